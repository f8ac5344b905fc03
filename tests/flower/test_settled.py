"""Settled runs over Flower: who comes back or states later, and what the next ServerApp settles."""

import base64
import json
import logging
import shutil
import sqlite3
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

import fedmerit.flower
from command_line import call
from federation_in import (
    NAMES,
    NODES,
    bodies_of,
    client,
    grid_of,
    make_keys,
    node_config,
    records_of,
    run,
    server,
    task,
)
from fedmerit.carriers.folders import close
from fedmerit.errors import (
    ConfigError,
    DataError,
    LedgerError,
    ProtocolError,
    RunAborted,
    SettlementError,
    StoreError,
)
from fedmerit.identity import canonical, content, load_key
from fedmerit.protocol import settler
from fedmerit.protocol.messages import pack
from fedmerit.protocol.pool import order_of
from fedmerit.storage.run_folder import FolderArchive
from fedmerit.verify import verify_folder
from inprocess import InProcess
from lies import at, dies, exchange_of
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


def test_a_member_who_is_back_while_the_server_waits_is_asked(home):
    strategy, rounds = run(home, dying(home, back_at="agreed"), **SETTLED)
    assert rounds[1].silent == (VICTIM,)
    assert any(f"{VICTIM} is away" in note for note in strategy.notes)
    told = [(body["missing"], body["final"]) for body in bodies_of(home / "run", "settled")]
    assert told == [([VICTIM], False), ([], True)]
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
        at(grid, "train", number, lambda message: grid.dead.add(NODES["client-2"]))
    at(grid, "last", None, lambda message: grid.dead.clear())
    with pytest.raises(RunAborted):
        run(home, grid, **SETTLED, rounds=6, join=0.3, threshold=4)
    assert {record.author for record in records_of(home / "run", "last")} == set(NODES)
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
    text, signature, tables = unpack(
        base64.b64decode(json.loads((home / "statement.json").read_text())["answers"][0][2])
    )
    body = json.loads(text)
    change(body)
    signature = key.sign(content(member, "statement", body)) if key else signature
    answer = base64.b64encode(pack([canonical(body), signature, tables])).decode()
    found = {"format": "fedmerit answers 1", "member": member, "answers": [["state", 2, answer]]}
    (home / "statement.json").write_text(json.dumps(found))
    return adding(home)[1]


def test_it_states_later_by_hand_and_another_member_verifies(away):
    (settled,) = bodies_of(away / "run", "settled")
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
    last = bodies_of(away / "run", "settled")[-1]
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
    assert len(records_of(away / "run", "statement")) == 3


def test_it_is_closed_when_the_window_is_over_by_t_members_and_not_before(away, monkeypatch):
    assert f"answers of {VICTIM} are taken until" in closing(away)[1]
    closes = bodies_of(away / "run", "settled")[-1]["closes"]
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
    assert bodies_of(away / "run", "settled")[-1]["final"]
    assert awaited(verified(away))
    assert "credited with the rest" in closing(away)[1]
    stating(away)
    assert "the settlement is closed" in adding(away)[1]


def test_a_member_without_a_gradient_does_not_join_a_settled_run(home):
    plain = fedmerit.flower.secure(client.app.inner, value=task.value, seed=0)
    strategy, rounds = run(home, grid_of(home, {"client-3": plain}), **SETTLED, join=0.5)
    assert any("this member has none: pass gradient=" in note for note in strategy.notes)
    assert [one.included for one in rounds] == [("client-0", "client-1", "client-2")] * 2


# ------------------------------------------------- a run whose server died is settled by the next ServerApp


AGAIN = {**SETTLED, "settle": True}


class Killed(BaseException):
    """A ServerApp that dies."""


def killed(home, exchange, number=2, **options):
    grid = grid_of(home)
    at(grid, exchange, number, dies(Killed))
    with pytest.raises(Killed):
        run(home, grid, **SETTLED, **options)


def noted_samples(home):
    return [json.loads(line) for line in (home / "server.pem.opened").read_text().splitlines()]


@pytest.fixture(scope="module")
def once_died(tmp_path_factory):
    home = tmp_path_factory.mktemp("died")
    make_keys(home)
    killed(home, "open")
    return home


@pytest.fixture
def died(once_died, tmp_path):
    """The folder of a run whose server died when it noted_samples the pool: nobody saw it."""
    return shutil.copytree(once_died, tmp_path / "home", symlinks=True)


def test_what_was_trained_is_settled(died, caplog):
    """The samples that it noted_samples are remembered though it died, and once."""
    (line,) = noted_samples(died)
    with pytest.raises(StoreError, match=r"can still be settled: strategy\.settle\(grid=grid"):
        run(died, grid_of(died), **SETTLED, test=fresh())
    grid = grid_of(died)
    strategy, rounds = run(died, grid, **AGAIN)
    assert strategy.notes == []
    assert len(rounds) == 2
    assert "train" not in {exchange_of(message).exchange for _, message, _ in grid.seen}
    lines = list(verify_folder(died / "run", archive=died / "run" / "archive"))
    assert "settlement: 2 of 2 equations hold" in lines
    assert strategy.scores["settlement"]["named"] == []
    assert noted_samples(died) == [line]
    with refused(DataError):
        run(died, grid_of(died), **SETTLED)
    head = bodies_of(died / "run", "end")
    with caplog.at_level(logging.INFO, "fedmerit"):
        run(died, silent := grid_of(died), **AGAIN)
    assert "settled before" in caplog.text
    assert silent.seen == []
    assert bodies_of(died / "run", "end") == head


@pytest.mark.parametrize("asked", [0, 2])
def test_members_who_were_not_asked_to_sign_the_end_are_asked_by_the_next_server(home, asked):
    """Who has signed does nothing more in a run: where the server died with that answer, it is lost."""
    grid, closes = grid_of(home), []

    def close(message):
        if len(closes) == asked:
            raise Killed
        closes.append(message)

    at(grid, "close", None, close)
    with pytest.raises(Killed):
        run(home, grid, **SETTLED)
    assert (len(bodies_of(home / "run", "end")), bodies_of(home / "run", "seen")) == (1, [])
    run(home, grid_of(home), **AGAIN, join=0.3)
    signed = bodies_of(home / "run", "seen")
    assert len(signed) == 4 - asked
    assert len({one["head"] for one in signed}) == 1
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(home / "run"))
    run(home, again := grid_of(home), **AGAIN, join=0.3)
    assert {exchange_of(message).exchange for _, message, _ in again.seen} == ({"join"} if asked else set())
    assert bodies_of(home / "run", "seen") == signed


def fresh():
    rng = np.random.default_rng(5)
    pool = task.federation().pool
    return rng.integers(0, 256, pool.x.shape).astype(pool.x.dtype), pool.y


def test_a_run_that_was_given_up_is_settled_when_its_members_are_back(home, caplog):
    grid = grid_of(home)
    gone = {NODES["client-1"], NODES["client-2"]}
    grid.before = lambda node, message: grid.dead.update(gone if exchange_of(message).round == 2 else ())
    with pytest.raises(RunAborted), caplog.at_level(logging.ERROR, "fedmerit"):
        run(home, grid, **SETTLED, rounds=6, join=0.3)
    assert "strategy.settle(grid=grid" in caplog.text
    assert bodies_of(home / "run", "opening") == bodies_of(home / "run", "end") == []
    none = "settlement: none; it ended early, and too few members signed which round was the last"
    assert none in list(verify_folder(home / "run"))
    with refused(ProtocolError, stage="join"):
        run(home, grid, **AGAIN, join=0.3)
    run(home, grid_of(home), **AGAIN)
    assert "settlement: 1 of 1 equations hold" in list(verify_folder(home / "run"))


def test_a_run_that_ended_without_a_settlement_is_over(home, monkeypatch):
    """All members say that a direction is wrong, and would say so again."""
    monkeypatch.setattr(settler, "problems_of", lambda *round: iter(["it differs"]))
    run(home, grid_of(home), **SETTLED)
    with refused(SettlementError, code="not-agreed"):
        run(home, grid_of(home), **AGAIN)


def other_roster(home):
    for path in (*home.glob("client-*.pem"), home / "server.pem", home / "roster.toml"):
        path.unlink()
    make_keys(home)


def unsigned_record(home):
    with sqlite3.connect(home / "run" / "ledger.sqlite") as db:
        db.execute("UPDATE records SET seal = zeroblob(64) WHERE kind = 'schedule'")


def short_pool_key(home):
    path = home / "run" / "keys" / "pool.key"
    path.write_bytes(path.read_bytes()[:-1])


def damaged(home):
    path = home / "run" / "archive" / "round-0001.arrays"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def without(name):

    def change(home):
        path = home / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def swapped(kind):
    """Put the file of round 1, which is whole, in the place of that of round 2."""

    def change(home):
        archive = home / "run" / "archive"
        shutil.copy(archive / f"{kind}-0001.arrays", archive / f"{kind}-0002.arrays")

    return change


def other_sum(home):
    archive = FolderArchive(home / "run" / "archive")
    arrays = archive.load("round", 2)
    archive.save("round", 2, {**arrays, "x": arrays["x"] ^ 1})


def lacking_masks(home):
    """A file that is whole, without anything in it."""
    FolderArchive(home / "run" / "archive").save("masks", 2, {})


def opened_elsewhere(home):
    """Another run has noted_samples these samples since."""
    (line,) = noted_samples(home)
    (home / "server.pem.opened").write_text(json.dumps({**line, "id": "0" * 32, "run": "/second"}) + "\n")


def unchanged(home):
    pass


POOL = task.federation().pool
OTHER_SAMPLES = "test: expected the 50 samples, in the same order, that were committed"
OTHER_CONFIG = "holds a run with a different config"
OTHER_MASKS = "the masks of round 2 are not what the ledger says"


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (unchanged, {"test": fresh()}, DataError, OTHER_SAMPLES),
        (unchanged, {"test": (POOL.x[::-1], POOL.y[::-1])}, DataError, OTHER_SAMPLES),
        (unchanged, {"settlement": {"window_days": 3}}, StoreError, OTHER_CONFIG),
        (unchanged, {"method": "reports"}, StoreError, OTHER_CONFIG),
        (other_roster, {}, ConfigError, "roster: expected that of the run in"),
        (without("keys/pool.key"), {}, StoreError, "the key of the test pool is gone"),
        (short_pool_key, {}, StoreError, "pool.key: damaged: expected 32 bytes, got 31"),
        (unsigned_record, {}, LedgerError, "(schedule by server)"),
        (without(""), {}, StoreError, "expected the folder of a run to settle"),
        (damaged, {}, StoreError, "round-0001.arrays: damaged"),
        (swapped("direction"), {}, StoreError, "direction of round 2 is not what the ledger says"),
        (other_sum, {}, StoreError, "x of round 2 is not what the ledger says"),
        (without("archive/masks-0002.arrays"), {}, StoreError, "needed for the settlement, and gone"),
        (swapped("masks"), {}, StoreError, OTHER_MASKS),
        (lacking_masks, {}, StoreError, OTHER_MASKS),
        (opened_elsewhere, {}, DataError, "shown to these members in /second"),
    ],
)
def test_what_is_not_the_run_of_the_folder_is_refused_and_nobody_is_shown_anything(
    died, change, options, error, words
):
    change(died)
    grid = grid_of(died)
    with pytest.raises(error) as caught:
        server.run(grid, roster=died / "roster.toml", out=died / "run", **{**AGAIN, **options})
    assert words in str(caught.value)
    assert {exchange_of(message).exchange for _, message, _ in grid.seen} <= {"join"}


def strategy_of(home):
    pool = task.federation().pool
    return fedmerit.flower.Contributions(
        server.FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=home / "roster.toml", test=(pool.x, pool.y), value=task.value, gradient=task.gradient,
        config=server.sections(utilities=task.UTILITIES, weights="uniform"), folder=home / "run", page=False,
    )  # fmt: skip


def settle(home, arrays):
    """Settle with another model than the run began with."""
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    strategy_of(home).settle(grid=grid_of(home), initial_arrays=record)


def moved():
    return {name: array.numpy() + np.float32(1) for name, array in task.first_model().items()}


def test_a_model_of_another_size_is_refused(died):
    with refused(ConfigError):
        settle(died, {"one": np.zeros(3, np.float32)})


def test_a_first_round_without_a_sum_is_left_as_it_is(home):
    """The model before it is in no file, and the one that `settle` is given may be another."""
    killed(home, "train", 1)
    with refused(SettlementError, code="no-rounds"):
        settle(home, moved())
    assert bodies_of(home / "run", "round") == []
    assert list(verify_folder(home / "run"))


def test_a_first_round_with_a_sum_starts_from_the_model_in_the_archive(home):
    killed(home, "train", 2)
    settle(home, moved())
    assert "settlement: 1 of 1 equations hold" in list(verify_folder(home / "run"))


@pytest.mark.parametrize("line", ["[]", "{}", "3", '{"federation": "f", "run": "r", "samples": [[1]]}', "{"])
def test_a_file_of_opened_samples_that_is_damaged_is_named(died, line):
    path = died / "server.pem.opened"
    path.write_text(line + "\n")
    with refused(StoreError):
        run(died, grid_of(died), **AGAIN)


def test_a_run_scored_by_reports_has_nothing_to_settle(home):
    run(home, grid_of(home), rounds=1)
    with refused(ConfigError):
        run(home, grid_of(home), settle=True)


def test_the_order_of_a_pool_follows_from_its_key_and_from_nothing_else():
    order = order_of(b"k" * 32, 100)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() == order_of(b"k" * 32, 100).tolist() != order_of(b"j" * 32, 100).tolist()
    assert order[:5].tolist() == [14, 52, 66, 25, 32]  # the same on every machine and with every numpy


def test_a_run_between_machines_is_not_settled_in_a_simulation(died):
    grid = type("InMemoryGrid", (), {})()
    with refused(ConfigError):
        run(died, grid, **AGAIN)


# --------------------------------------------------------------------------------------------- witnesses


FIVE = {f"client-{i}": 100 + i for i in range(5)}


def five_of(home):
    """A federation of five, enough for witnesses."""
    make_keys(home, tuple(FIVE))
    configs = {node: node_config(home, name) for name, node in FIVE.items()}
    configs[FIVE["client-4"]]["name"] = "client-0"  # whose data it trains on
    return InProcess(dict.fromkeys(configs, client.app), configs)


def test_all_pairs_of_five_members_are_witnessed(tmp_path):
    run(tmp_path, five_of(tmp_path), **SETTLED)
    lines = list(verify_folder(tmp_path / "run", archive=tmp_path / "run" / "archive"))
    assert {TWO_HOLD, "settlement: 20 of 20 pairs of members are witnessed"} <= {*lines}


def test_a_witness_that_died_answers_by_hand(tmp_path):
    grid = five_of(tmp_path)
    at(grid, "witness", None, lambda message: grid.dead.add(FIVE[VICTIM]), who=FIVE[VICTIM])
    run(tmp_path, grid, **SETTLED, join=0.3)
    (last,) = bodies_of(tmp_path / "run", "settled")
    assert (last["silent"], last["final"], last["witnessed"]) == ([VICTIM], False, [16, 20])
    for said in (stating(tmp_path), adding(tmp_path)):
        assert said[0] == 0, said
    last = bodies_of(tmp_path / "run", "settled")[-1]
    assert (last["silent"], last["final"], last["witnessed"]) == ([], True, [20, 20])
    assert "settlement: 20 of 20 pairs of members are witnessed" in verified(tmp_path)
