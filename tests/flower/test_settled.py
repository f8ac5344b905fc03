"""Settled runs over Flower's messages, in this process: who is there, who comes back, who states later."""

import base64
import json
import shutil
import time

import numpy as np
import pytest
from federation_in import NAMES, NODES, client, grid_of, run, task
from flwr.app import Array, ArrayRecord
from small import contributions
from typer.testing import CliRunner

import fedmerit.flower
from fedmerit.cli import app as commands
from fedmerit.errors import (
    ConfigError,
    DataError,
    NoGradient,
    ProtocolError,
    ReportError,
    RunAborted,
    SettlementError,
    StoreError,
)
from fedmerit.flower.client import Secured, place_of
from fedmerit.flower.codec import Samples, Shape, slope_of, take
from fedmerit.flower.grid import SecureGrid
from fedmerit.flower.late import FORMAT, close
from fedmerit.identity import canonical, content, load_key
from fedmerit.ledger.chain import Ledger
from fedmerit.protocol.messages import Ask, pack, unpack
from fedmerit.protocol.pool import Slice
from fedmerit.protocol.terms import cautious
from fedmerit.verify import verify_folder

VICTIM = "client-2"
SETTLED = {"method": "settled", "settlement": {"blocks": 2}}


def records(folder, kind):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return list(ledger.records(kind))


def dying(home, *, back_at=None):
    """A grid whose member dies in round 2, its masked update sent; perhaps it is back at an exchange."""
    grid = grid_of(home)

    def before(node, message):
        ask = Ask.unpack(take(message.content))[0]
        if node == NODES[VICTIM] and (ask.exchange, ask.round) == ("check", 2):
            grid.dead.add(node)
        if ask.exchange == back_at:
            grid.dead.clear()

    grid.before = before
    return grid


def fedmerit_command(*arguments):
    done = CliRunner().invoke(commands, [str(one) for one in arguments])
    return done.exit_code, done.output if done.exception is None else f"{done.output} {done.exception}"


def test_everybody_states_and_it_adds_up(home):
    strategy, rounds = run(home, grid_of(home), **SETTLED)
    assert strategy.notes == []
    assert [len(one.included) for one in rounds] == [4, 4]
    lines = list(verify_folder(home / "run"))
    assert "settlement: 2 of 2 equations hold" in lines
    assert len(records(home / "run", "statement")) == len(records(home / "run", "countersigned")) == 4
    assert not (home / "run" / "archive" / "messages").exists()
    (settled,) = records(home / "run", "settled")
    assert settled.body["final"]


def test_both_ways_use_different_samples(home):
    strategy, rounds = run(home, grid_of(home), method="both", settlement={"detail": "run", "blocks": 4})
    assert strategy.notes == []
    assert [len(one.reports) for one in rounds] == [4, 4]
    assert "settlement: 1 of 1 equations hold" in list(verify_folder(home / "run"))
    (opening,) = records(home / "run", "opening")
    shown = {record.body["slice"] for record in records(home / "run", "outcome")}
    assert len(shown) == 1
    assert opening.body["manifest"]["pool"] not in shown
    assert len(opening.body["manifest"]["blocks"]) == 4


def test_a_member_who_is_back_while_the_server_waits_is_asked(home):
    strategy, rounds = run(home, dying(home, back_at="agreed"), **SETTLED)
    assert rounds[1].silent == (VICTIM,)
    assert any(f"{VICTIM} is away" in note for note in strategy.notes)
    before, settled = records(home / "run", "settled")
    assert (before.body["missing"], before.body["final"]) == ([VICTIM], False)
    assert settled.body["missing"] == []
    assert settled.body["final"]
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(home / "run"))


def test_a_server_that_dies_while_it_waits_leaves_what_was_stated(home, monkeypatch):
    """Who was away can state by hand, as if the server had ended its run."""

    def killed(grid, names):
        raise KeyboardInterrupt

    monkeypatch.setattr(SecureGrid, "awaited", killed)
    with pytest.raises(KeyboardInterrupt):
        run(home, dying(home), **SETTLED)
    assert len(records(home / "run", "statement")) == 3
    lines = list(verify_folder(home / "run"))
    assert any(VICTIM in line for line in lines if line.startswith("settlement: no statement from"))
    code, said = stating(home)
    assert code == 0, said
    code, said = fedmerit_command("settle", "add", home / "run", home / "statement.json", *keyed(home))
    assert code == 0, said
    assert "settlement: 2 of 2 equations hold" in said
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(home / "run"))


def test_a_second_run_on_samples_that_were_opened_is_refused_before_anybody_trains(home):
    """Its members would refuse them at the end, and all training would be in vain."""
    run(home, grid_of(home), **SETTLED)
    (home / "run").rename(home / "first")
    again = grid_of(home)
    with pytest.raises(DataError, match=r"samples were shown to these members .*run, and members settle on"):
        run(home, again, **SETTLED)
    assert again.seen == []
    assert (home / "server.pem.opened").stat().st_mode & 0o777 == 0o600
    run(home, again, method="reports")
    (home / "server.pem.opened").write_text("no line of JSON\n")
    with pytest.raises(StoreError, match="it says which test samples were opened before"):
        run(home, again, **SETTLED)


def test_a_settled_run_on_samples_that_members_reported_on_is_refused_before_anybody_trains(home):
    first, noted, asked = grid_of(home), home / "server.pem.opened", []

    def before(node, message):
        if Ask.unpack(take(message.content))[0].exchange == "report":
            asked.append(len(noted.read_text().splitlines()))  # before the member sees the slice

    first.before = before
    run(home, first, method="reports")
    (home / "run").rename(home / "first")
    assert min(asked) >= 1
    lines = [json.loads(line)["samples"] for line in noted.read_text().splitlines()]
    assert all(lines.count(one) == 1 for one in lines)
    again = grid_of(home)
    with pytest.raises(DataError, match="samples were shown to these members"):
        run(home, again, **SETTLED)
    assert again.seen == []


def test_a_pool_that_stayed_shut_can_be_opened_by_the_next_run(home):
    grid = grid_of(home)
    grid.before = lambda node, message: grid.dead.update(NODES.values())
    with pytest.raises(ProtocolError):
        run(home, grid, **SETTLED, join=0.3)
    run(home, grid_of(home), **SETTLED)
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(home / "run"))


def test_a_run_that_is_given_up_with_too_few_members_keeps_its_pool_shut(home):
    grid = grid_of(home)

    def before(node, message):
        ask = Ask.unpack(take(message.content))[0]
        if ask.round == 2 and node in (NODES["client-1"], NODES["client-2"]):
            grid.dead.add(node)

    grid.before = before
    with pytest.raises(RunAborted):
        run(home, grid, **SETTLED, rounds=6, join=0.3)
    lines = list(verify_folder(home / "run"))
    assert "settlement: none; it ended early, and too few members signed which round was the last" in lines
    assert records(home / "run", "opening") == []


def test_a_run_that_is_given_up_is_settled_with_who_signs_that_it_is_over(home):
    grid = grid_of(home)

    def before(node, message):
        ask = Ask.unpack(take(message.content))[0]
        if ask.exchange == "share" and ask.round > 1:
            grid.dead.add(NODES["client-2"])
        if ask.exchange == "last":
            grid.dead.clear()

    grid.before = before
    with pytest.raises(RunAborted):
        run(home, grid, **SETTLED, rounds=6, join=0.3, threshold=4)
    assert {record.author for record in records(home / "run", "last")} == set(NODES)
    assert "settlement: 1 of 1 equations hold" in list(verify_folder(home / "run"))


class Liar(Secured):
    """A member who states one percent too much."""

    def _member(self, place, context):
        member = super()._member(place, context)
        member.misstates = 1.01
        return member


def test_a_liar_is_named(home):
    liar = Liar(client.app.inner, task.value, (), place_of, "num-examples", cautious, 0, task.gradient)
    strategy, _ = run(home, grid_of(home, {"client-1": liar}), **SETTLED)
    (settled,) = records(home / "run", "settled")
    assert settled.body["named"] == ["client-1"]
    assert any(note.startswith("client-1 lied in round 1") for note in strategy.notes)
    lines = list(verify_folder(home / "run", archive=home / "run" / "archive"))
    assert any("client-1" in line for line in lines if line.startswith("settlement: in round"))


@pytest.fixture(scope="module")
def once_away(tmp_path_factory):
    from federation_in import make_keys

    home = tmp_path_factory.mktemp("away")
    make_keys(home)
    run(home, dying(home), **SETTLED, join=0.3)
    return home


@pytest.fixture
def away(once_away, tmp_path):
    """The folder of a run that was settled while a member was away."""
    return shutil.copytree(once_away, tmp_path / "home", symlinks=True)


def stating(home, name=VICTIM, *without):
    arguments = ("member", "state", home / f"{name}.pem", "--messages", home / "run" / "archive" / "messages")
    more = ("--gradient", "contract.task:gradient", "--roster", home / "roster.toml")
    return fedmerit_command(*arguments, *more, "--out", home / "statement.json", *without)


def write(home, change, member=VICTIM, key=None):
    """Change a statement that is handed in; a key signs it anew."""
    text, signature = unpack(base64.b64decode(read(home)["answers"][0][2]), "")
    body = json.loads(text)
    change(body)
    signature = key.sign(content(member, "statement", body)) if key else signature
    answer = base64.b64encode(pack([canonical(body), signature])).decode()
    found = {"format": FORMAT, "member": member, "answers": [["state", 2, answer]]}
    (home / "statement.json").write_text(json.dumps(found))


def read(home):
    return json.loads((home / "statement.json").read_text())


def keyed(home):
    return ("--key", home / "server.pem")


def test_who_was_away_is_missing(away):
    (settled,) = records(away / "run", "settled")
    assert settled.body["missing"] == [VICTIM]
    assert not settled.body["final"]
    assert settled.body["closes"] > 0
    lines = list(verify_folder(away / "run"))
    assert "settlement: 0 of 2 equations hold" in lines
    assert any(VICTIM in line for line in lines if line.startswith("settlement: no statement from"))


def test_it_states_later_by_hand_and_another_member_verifies(away):
    code, said = stating(away)
    assert code == 0, said
    code, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *keyed(away))
    assert code == 0, said
    assert "settlement: 2 of 2 equations hold" in said
    copy = shutil.copytree(away / "run", away / "copy", ignore=shutil.ignore_patterns("keys", "archive"))
    lines = list(verify_folder(copy))
    assert "settlement: 2 of 2 equations hold" in lines
    assert not any(VICTIM in line for line in lines if line.startswith("settlement"))
    last = records(away / "run", "settled")[-1].body
    assert (last["missing"], last["final"]) == ([], True)
    code, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *keyed(away))
    assert (code, "the settlement is closed" in said) == (1, True), said


def test_it_states_the_same_when_it_is_asked_again(away):
    stating(away)
    first = (away / "statement.json").read_text()
    stating(away)
    assert (away / "statement.json").read_text() == first


def test_a_statement_that_its_author_did_not_sign_is_refused(away):
    stating(away)
    write(away, lambda body: body["rounds"].update({"1": "12345"}))
    _, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *keyed(away))
    assert "did not sign its statement" in said
    write(away, lambda body: body["rounds"].update({"1": "12345"}), member="client-1")
    _, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *keyed(away))
    assert "client-1: did not sign its statement" in said
    write(away, lambda body: None, member="client-1", key=load_key(away / "client-1.pem"))
    _, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *keyed(away))
    assert "client-1: has stated something else before" in said
    assert len(records(away / "run", "statement")) == 3


def test_a_late_lie_does_not_add_up_and_is_not_final(away):
    """Its author signed it, so it is in the ledger for good; the masks are with members who are elsewhere."""
    stating(away)
    more = lambda body: body["rounds"].update({"1": str(int(body["rounds"]["1"]) + 1)})  # noqa: E731
    write(away, more, key=load_key(away / f"{VICTIM}.pem"))
    code, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *keyed(away))
    assert (code, "settlement: 1 of 2 equations hold" in said) == (0, True), said
    last = records(away / "run", "settled")[-1].body
    assert (last["missing"], last["named"], last["final"]) == ([], [], False)
    assert sorted(last["silent"]) == sorted(NAMES)  # nobody could be asked; all can show their masks by hand
    assert "settlement: 1 of 2 equations hold" in list(verify_folder(away / "run"))


def test_only_the_servers_key_adds_it(away):
    stating(away)
    other = ("--key", away / "client-0.pem")
    _, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *other)
    assert "not the server's key" in said


def test_it_is_closed_when_the_window_is_over_by_t_members_and_not_before(away, monkeypatch):
    _, said = fedmerit_command("settle", "close", away / "run", *keyed(away))
    assert f"answers of {VICTIM} are taken until" in said
    closes = records(away / "run", "settled")[-1].body["closes"]
    with pytest.raises(SettlementError) as caught:
        close(away / "run", away / "server.pem", now=closes + 1)
    assert caught.value.code == "uncountersigned"
    signed = []
    owner = ("--without", VICTIM)
    for now, without in ((closes - 1.0, owner), (closes + 1.0, ()), (closes + 1.0, owner)):  # its own clock
        monkeypatch.setattr(time, "time", lambda now=now: now)
        signed = []
        for name in (name for name in NAMES if name != VICTIM):
            stating(away, name, *without)
            signed.append((away / "statement.json").rename(away / f"{name}.json"))
        told = [[kind for kind, _, _ in json.loads(file.read_text())["answers"]] for file in signed]
        assert told == [["state", "settle"] if now > closes and without else ["state"]] * len(signed)
    code, said = fedmerit_command("settle", "close", away / "run", *signed, *keyed(away))
    assert (code, "counts as theirs" in said) == (0, True), said
    assert records(away / "run", "settled")[-1].body["final"]
    assert any(VICTIM in line for line in verify_folder(away / "run") if "no statement from" in line)
    _, said = fedmerit_command("settle", "close", away / "run", *keyed(away))
    assert "counts as theirs" in said
    stating(away)
    _, said = fedmerit_command("settle", "add", away / "run", away / "statement.json", *keyed(away))
    assert "the settlement is closed" in said


# --------------------------------------------------------------------------------------------- the gradient


def arrays(**given):
    return ArrayRecord({name: Array(np.asarray(values)) for name, values in given.items()})


FIRST = arrays(a=np.ones((2, 3), np.float32), counter=np.array(7), b=np.zeros(2, np.float32))
SHOWN = Slice(index=0, x=np.arange(8.0).reshape(4, 2), y=np.array([0, 1, 0, 1]), salts=b"", path=())


def slope(result, seen=None):
    def gradient(given, test):
        if seen is not None:
            seen.append((given, test))
        return result

    shape = Shape.of(FIRST)
    return slope_of(gradient, shape)(shape.vector, SHOWN, np.array([3, 1]))


def test_gradients_come_by_name_or_in_order_and_integers_have_none():
    a, b = np.full((2, 3), 2.0), np.array([5.0, 6.0])
    seen = []
    for parts in ([a, b], {"b": b, "a": a, "counter": np.array(9)}, arrays(a=a, b=b)):
        value, vector = slope((0.25, parts), seen)
        assert value == 0.25
        assert vector.tolist() == [2.0] * 6 + [5.0, 6.0]
    given, test = seen[0]
    assert given["counter"].numpy() == 7
    assert isinstance(test, Samples)
    assert (test.x.tolist(), test.y.tolist()) == ([[6.0, 7.0], [2.0, 3.0]], [1, 1])


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (0.5, ReportError, "expected (value, gradients), got float"),
        ((0.5, [np.zeros((2, 3))]), ReportError, "expected 2 arrays, one per floating-point array"),
        ((0.5, {"a": np.zeros((2, 3))}), NoGradient, "none for the array 'b'"),
        ((0.5, [np.zeros((3, 2)), np.zeros(2)]), ReportError, "gradient of 'a': expected shape (2, 3)"),
        (("much", [np.zeros((2, 3)), np.zeros(2)]), ReportError, "expected a number"),
    ],
)
def test_what_is_no_gradient_is_refused(result, error, words):
    with pytest.raises(error) as found:
        slope(result)
    assert words in str(found.value)


def test_without_a_gradient_the_method_must_be_said(home):
    with pytest.raises(ConfigError, match=r"expected gradient=.* or method=\"reports\""):
        contributions(home, method=None)
    for method in ("settled", "both"):
        with pytest.raises(ConfigError, match=f"{method}' needs gradient="):
            contributions(home, method=method)
    nothing = lambda given, test: None  # noqa: E731
    made = contributions(home, method=None, gradient=nothing)
    config, text = made._config(2)
    assert (config.scoring.method, config.data.test_reveal) == ("settled", "end")
    assert "window_days = 14.0" in text
    with pytest.raises(ConfigError, match="test_reveal"):
        contributions(home, gradient=nothing, method="settled", reveal="fixed")


def test_a_gradient_of_something_else_is_found_before_anybody_trains(home):
    from small import first

    def gradient(given, test):
        return 0.9, [np.zeros(5), np.zeros(3)]  # value says 0.5

    strategy = contributions(home, gradient=gradient, method="settled")
    with pytest.raises(ConfigError, match="both must measure the same"):
        strategy.start(grid=grid_of(home), initial_arrays=first(), num_rounds=1)
    assert not (home / "run").exists()


def test_a_member_without_a_gradient_does_not_join_a_settled_run(home):
    plain = fedmerit.flower.secure(client.app.inner, value=task.value, seed=0)
    strategy, rounds = run(home, grid_of(home, {"client-3": plain}), **SETTLED, join=0.5)
    assert any("this member has none: pass gradient=" in note for note in strategy.notes)
    assert [one.included for one in rounds] == [("client-0", "client-1", "client-2")] * 2


def test_running_statistics_are_coordinates_and_counters_are_not():
    """Against a difference quotient, for BatchNorm's statistics too."""
    import torch
    from torch import nn

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    rng = np.random.default_rng(0)
    test = Samples(rng.normal(size=(9, 2, 2, 3)).astype(np.float32), rng.integers(0, 3, 9))
    value, gradient = fedmerit.flower.torch_scoring(network, "brier")
    record = ArrayRecord(network().state_dict())
    shape = Shape.of(record)
    found, parts = gradient(record, test)
    assert found == pytest.approx(float(np.mean(value(record, test))), abs=1e-6)
    assert "2.num_batches_tracked" not in parts
    vector, slopes = shape.vector, shape.gradient(parts)
    direction = rng.normal(size=vector.size).astype(np.float32)
    h = 1e-2
    ends = [float(np.mean(value(shape.record(vector + sign * h * direction), test))) for sign in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float(slopes @ direction), rel=2e-2)
    assert np.abs(parts["2.running_var"]).max() > 0


def test_a_utility_without_a_gradient_is_a_typed_error():
    from torch import nn

    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3))  # noqa: E731
    _, gradient = fedmerit.flower.torch_scoring(network, "accuracy")
    test = Samples(np.zeros((4, 2, 2, 3), np.float32), np.array([0, 1, 2, 0]))
    with pytest.raises(NoGradient) as found:
        gradient(ArrayRecord(network().state_dict()), test)
    assert found.value.utility == "accuracy"
