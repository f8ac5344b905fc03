"""Settled runs over Flower's messages, in this process: who is there, who comes back, who states later."""

import base64
import json
import shutil
import time

import pytest

import fedmerit.flower
from command_line import call
from federation_in import NAMES, NODES, bodies_in, client, grid_of, make_keys, records_in, run, task
from fedmerit.errors import DataError, ProtocolError, RunAborted, SettlementError, StoreError
from fedmerit.flower.folders import FORMAT, close
from fedmerit.flower.grid import SecureGrid
from fedmerit.identity import canonical, content, load_key
from fedmerit.protocol.messages import pack
from fedmerit.verify import verify_folder
from lies import at
from refusals import refused
from wire import unpack

VICTIM = "client-2"
SETTLED = {"method": "settled"}
TWO_HOLD = "settlement: 2 of 2 equations hold"


def dying(home, *, back_at=None):
    """A grid whose member dies in round 2, its masked update sent; perhaps it is back at an exchange."""
    grid = grid_of(home)
    at(grid, "check", 2, lambda message: grid.dead.add(NODES[VICTIM]), who=NODES[VICTIM])
    at(grid, back_at, None, lambda message: grid.dead.clear())
    return grid


def verified(home):
    return list(verify_folder(home / "run"))


@pytest.mark.parametrize("method", ["settled", "both"])
def test_everybody_states_and_it_adds_up(home, method):
    """What members report on is not what they settle on."""
    strategy, rounds = run(home, grid_of(home), method=method)
    assert strategy.notes == []
    assert [len(one.included) for one in rounds] == [4, 4]
    assert [len(one.reports) for one in rounds] == [4, 4]
    assert TWO_HOLD in verified(home)
    assert len(records_in(home / "run", "statement")) == len(records_in(home / "run", "countersigned")) == 4
    assert not (home / "run" / "archive" / "messages").exists()
    (settled,), (opening,) = (bodies_in(home / "run", kind) for kind in ("settled", "opening"))
    assert settled["final"]
    shown = {body.get("slice") for body in bodies_in(home / "run", "outcome")}
    assert len(shown) == 1
    assert (shown == {None}) == (method == "settled")
    assert opening["manifest"]["pool"] not in shown
    assert len(opening["manifest"]["blocks"]) == 16


def test_a_member_who_is_back_while_the_server_waits_is_asked(home):
    strategy, rounds = run(home, dying(home, back_at="agreed"), **SETTLED)
    assert rounds[1].silent == (VICTIM,)
    assert any(f"{VICTIM} is away" in note for note in strategy.notes)
    told = [(body["missing"], body["final"]) for body in bodies_in(home / "run", "settled")]
    assert told == [([VICTIM], False), ([], True)]
    assert TWO_HOLD in verified(home)


def test_a_server_that_dies_while_it_waits_leaves_what_was_stated(home, monkeypatch):
    """Who was away can state by hand, as if the server had ended its run."""

    def killed(grid, names):
        raise KeyboardInterrupt

    monkeypatch.setattr(SecureGrid, "awaited", killed)
    with pytest.raises(KeyboardInterrupt):
        run(home, dying(home), **SETTLED)
    assert len(records_in(home / "run", "statement")) == 3
    assert awaited(verified(home))
    assert stating(home)[0] == 0
    code, said = adding(home)
    assert (code, TWO_HOLD in said) == (0, True), said
    assert TWO_HOLD in verified(home)


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
    with refused(StoreError):
        run(home, again, **SETTLED)


def test_a_settled_run_on_samples_that_members_reported_on_is_refused_before_anybody_trains(home):
    first, noted, asked = grid_of(home), home / "server.pem.opened", []
    at(first, "report", None, lambda message: asked.append(len(noted.read_text().splitlines())))
    run(home, first, method="reports")
    (home / "run").rename(home / "first")
    assert min(asked) >= 1
    lines = [json.loads(line)["samples"] for line in noted.read_text().splitlines()]
    assert all(lines.count(one) == 1 for one in lines)
    again = grid_of(home)
    with refused(DataError):
        run(home, again, **SETTLED)
    assert again.seen == []


def test_a_pool_that_stayed_shut_can_be_opened_by_the_next_run(home):
    grid = grid_of(home)
    grid.before = lambda node, message: grid.dead.update(NODES.values())
    with pytest.raises(ProtocolError):
        run(home, grid, **SETTLED, join=0.3)
    run(home, grid_of(home), **SETTLED)
    assert TWO_HOLD in verified(home)


def test_a_run_that_is_given_up_is_settled_with_who_signs_that_it_is_over(home):
    grid = grid_of(home)
    for number in range(2, 7):
        at(grid, "share", number, lambda message: grid.dead.add(NODES["client-2"]))
    at(grid, "last", None, lambda message: grid.dead.clear())
    with pytest.raises(RunAborted):
        run(home, grid, **SETTLED, rounds=6, join=0.3, threshold=4)
    assert {record.author for record in records_in(home / "run", "last")} == set(NODES)
    assert "settlement: 1 of 1 equations hold" in verified(home)


# ------------------------------------------------------------------------------------ by hand, and later


@pytest.fixture(scope="module")
def once_away(tmp_path_factory):
    home = tmp_path_factory.mktemp("away")
    make_keys(home)
    run(home, dying(home), **SETTLED, join=0.3)
    return home


@pytest.fixture
def away(once_away, tmp_path):
    """The folder of a run that was settled while a member was away."""
    return shutil.copytree(once_away, tmp_path / "home", symlinks=True)


def said_by(*arguments):
    done = call(*arguments)
    return done.exit_code, done.output if done.exception is None else f"{done.output} {done.exception}"


def stating(home, name=VICTIM, *without):
    arguments = ("member", "state", home / f"{name}.pem", "--messages", home / "run" / "archive" / "messages")
    more = ("--gradient", "contract.task:gradient", "--roster", home / "roster.toml")
    return said_by(*arguments, *more, "--out", home / "statement.json", *without)


def adding(home, key="server.pem"):
    return said_by("settle", "add", home / "run", home / "statement.json", "--key", home / key)


def closing(home, *signed):
    return said_by("settle", "close", home / "run", *signed, "--key", home / "server.pem")


def awaited(lines):
    return any(line.startswith("settlement: no statement from") and VICTIM in line for line in lines)


def changed(home, change, member=VICTIM, key=None):
    """Hand in a changed statement, perhaps another member's, perhaps signed anew; return what is said."""
    text, signature = unpack(
        base64.b64decode(json.loads((home / "statement.json").read_text())["answers"][0][2])
    )
    body = json.loads(text)
    change(body)
    signature = key.sign(content(member, "statement", body)) if key else signature
    answer = base64.b64encode(pack([canonical(body), signature])).decode()
    found = {"format": FORMAT, "member": member, "answers": [["state", 2, answer]]}
    (home / "statement.json").write_text(json.dumps(found))
    return adding(home)[1]


def test_it_states_later_by_hand_and_another_member_verifies(away):
    (settled,) = bodies_in(away / "run", "settled")
    assert (settled["missing"], settled["final"]) == ([VICTIM], False)
    assert settled["closes"] > 0
    lines = verified(away)
    assert "settlement: 0 of 2 equations hold" in lines
    assert awaited(lines)
    code, said = stating(away)
    assert code == 0, said
    first = (away / "statement.json").read_text()
    stating(away)
    assert (away / "statement.json").read_text() == first
    code, said = adding(away)
    assert (code, TWO_HOLD in said) == (0, True), said
    copy = shutil.copytree(away / "run", away / "copy", ignore=shutil.ignore_patterns("keys", "archive"))
    lines = list(verify_folder(copy))
    assert TWO_HOLD in lines
    assert not any(VICTIM in line for line in lines if line.startswith("settlement"))
    last = bodies_in(away / "run", "settled")[-1]
    assert (last["missing"], last["final"]) == ([], True)
    code, said = adding(away)
    assert (code, "the settlement is closed" in said) == (1, True), said


def test_a_statement_that_its_author_did_not_sign_is_refused(away):
    stating(away)
    assert "not the server's key" in adding(away, "client-0.pem")[1]

    def lie(body):
        body["rounds"]["1"] = "12345"

    assert "did not sign its statement" in changed(away, lie)
    assert "client-1: did not sign its statement" in changed(away, lie, "client-1")
    signed = changed(away, lie, "client-1", load_key(away / "client-1.pem"))
    assert "client-1: has stated something else before" in signed
    assert len(records_in(away / "run", "statement")) == 3


def test_it_is_closed_when_the_window_is_over_by_t_members_and_not_before(away, monkeypatch):
    assert f"answers of {VICTIM} are taken until" in closing(away)[1]
    closes = bodies_in(away / "run", "settled")[-1]["closes"]
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
    code, said = closing(away, *signed)
    assert (code, "credited with the rest" in said) == (0, True), said
    assert bodies_in(away / "run", "settled")[-1]["final"]
    assert awaited(verified(away))
    assert "credited with the rest" in closing(away)[1]
    stating(away)
    assert "the settlement is closed" in adding(away)[1]


def test_a_member_without_a_gradient_does_not_join_a_settled_run(home):
    plain = fedmerit.flower.secure(client.app.inner, value=task.value, seed=0)
    strategy, rounds = run(home, grid_of(home, {"client-3": plain}), **SETTLED, join=0.5)
    assert any("this member has none: pass gradient=" in note for note in strategy.notes)
    assert [one.included for one in rounds] == [("client-0", "client-1", "client-2")] * 2
