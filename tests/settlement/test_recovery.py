"""A server that dies at any message of a settled run, and one that takes its folder up again and settles."""

from __future__ import annotations

import shutil
import time

import pytest

from attacked import settling
from fedmerit.errors import LedgerError
from fedmerit.identity import canonical
from fedmerit.ledger.decisions import Terms
from fedmerit.protocol.clearing import Clearing
from fedmerit.storage.run_folder import FolderArchive
from ledgers import pool_of
from linear_federation import LIAR, Killed, data, fit_slope
from runs import record_decision

AWAY = "client-3"
ROUNDS = 2


def settled(home, rounds=ROUNDS, **given):
    return settling(home, 4, rounds, **given)


def dies(federation, exchange, number=ROUNDS, answered=2):
    return federation.dies(exchange, number, answered)


def again(federation):
    """Another server goes on, with everybody who can be reached."""
    with federation.taken_up():
        federation.finish()
    return federation.coordinator.settled


def bodies(federation, kind):
    return [(record.author, record.body) for record in federation.records if record.kind == kind]


def refusals(federation, exchange):
    return {one.member for one in federation.passed if one.ask.exchange == exchange and one.error}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Everybody's integers of a run whose server lives."""
    return settled(tmp_path_factory.mktemp("honest")).run().coordinator.settled


@pytest.fixture
def stated(tmp_path):
    """A federation whose server died when two members had stated."""
    return dies(settled(tmp_path), "state")


# ---------------------------------------------------------------------------------------------- at any moment


@pytest.mark.parametrize("answered", [0, 3])
@pytest.mark.parametrize("exchange", ["open", "agree", "agreed", "state", "settle"])
def test_a_server_that_dies_in_the_settlement_loses_nothing(tmp_path, honest, exchange, answered):
    federation = dies(settled(tmp_path), exchange, answered=answered)
    before = [record.digest for record in federation.records]
    found = again(federation)
    assert (found.holding, found.final, found.missing) == (ROUNDS, True, ())
    assert [one.stated for one in found.equations] == [one.stated for one in honest.equations]
    assert [record.digest for record in federation.records][: len(before)] == before
    for kind in ("agreed", "statement", "countersigned", "seen"):
        assert sorted(who for who, _ in bodies(federation, kind)) == [*federation.names], kind
    assert [len(bodies(federation, kind)) for kind in ("opening", "settled", "end")] == [1, 1, 1]
    assert f"settlement: {ROUNDS} of {ROUNDS} equations hold" in federation.verified()
    record_decision(federation.folder, Terms("10.00", "fit", "fenced", "PHI"))


@pytest.mark.parametrize("exchange", ["advertise", "share", "train", "check", "unmask"])
def test_a_server_that_dies_in_a_round_is_settled_on_the_rounds_before(tmp_path, honest, exchange):
    """The round is closed as aborted; who released shares for its sum says so."""
    federation = settled(tmp_path)
    if exchange in ("advertise", "share"):  # keys and shares of round 2 come ahead
        for member in federation.members.values():
            member.early = False
    found = again(dies(federation, exchange))
    (entry,) = found.manifest.rounds
    of_the_first = honest.round_scores(honest.manifest.rounds[0]).values
    assert found.round_scores(entry).values == pytest.approx(of_the_first, rel=1e-2)  # on another scale
    assert entry.round == 1
    assert federation.rounds[1].aborted == "the server stopped before it had the sum"
    lines = federation.verified()
    assert "settlement: 1 of 1 equations hold" in lines
    released = [body["released"] for _, body in bodies(federation, "agreed")]
    assert released == ([[2], [2], [], []] if exchange == "unmask" else [[]] * 4)


@pytest.mark.parametrize("answered", [0, 3])
def test_a_round_whose_sum_was_known_counts_though_it_was_not_closed(tmp_path, honest, answered):
    """Who has acknowledged its sum would not settle without it."""
    federation = dies(settled(tmp_path), "report", answered=answered)
    assert len(federation.rounds) == 1
    found = again(federation)
    assert [one.stated for one in found.equations] == [one.stated for one in honest.equations]
    assert federation.rounds[1].silent == federation.names
    assert f"settlement: {ROUNDS} of {ROUNDS} equations hold" in federation.verified()
    assert found.final


@pytest.mark.parametrize("kind", ["masks", "round"])
def test_a_server_that_dies_while_it_archives_a_sum_has_none(tmp_path, monkeypatch, kind):
    """Nobody was told this sum; and without its masks nobody could be named for it."""
    federation, save = settled(tmp_path), FolderArchive.save

    def dying(archive, what, number, arrays):
        if (what, number) == (kind, 2):
            raise Killed
        save(archive, what, number, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(FolderArchive, "save", dying)
        with pytest.raises(Killed):
            federation.run()
    assert [entry.round for entry in again(federation).manifest.rounds] == [1]
    assert federation.rounds[1].aborted == "the server stopped before it had the sum"
    assert [body["released"] for _, body in bodies(federation, "agreed")] == [[2]] * 4
    assert "settlement: 1 of 1 equations hold" in federation.verified()


def test_reports_of_a_round_that_was_cut_off_are_lost_and_its_settlement_is_not(tmp_path):
    federation = dies(settled(tmp_path, scoring={"method": "both"}), "report", answered=3)
    assert again(federation).holding == ROUNDS
    assert [len(one.reports) for one in federation.rounds] == [4, 0]
    assert federation.verified()


def test_a_full_disk_at_the_end_of_a_round_loses_nothing(tmp_path, honest, monkeypatch):
    federation = settled(tmp_path)
    with federation.begun():
        federation.round(1)
        with monkeypatch.context() as patch:
            patch.setattr(
                type(federation.coordinator.recorder.folder),
                "save_checkpoint",
                lambda *_: (_ for _ in ()).throw(OSError("no space left")),
            )
            with pytest.raises(OSError):
                federation.round(2)
    found = again(federation)
    assert [one.stated for one in found.equations] == [one.stated for one in honest.equations]
    assert federation.verified()


def test_a_run_of_three_that_died_in_its_second_ends_when_enough_sign_that(tmp_path):
    """Signatures from before the death count; who signs after the pool is open is not recorded."""
    federation = dies(settled(tmp_path, 3), "train", 2)
    federation.reaches = lambda name, ask: ask.exchange != "last" or name in ("client-0", "client-1")
    assert again(federation) is None
    assert {who for who, _ in bodies(federation, "last")} == {"client-0", "client-1"}
    assert not bodies(federation, "end")
    assert "settlement: none; it ended early, and too few members signed which round was the last" in (
        federation.verified()
    )
    few = {"last": {"client-2"}, "agreed": {"client-0", "client-1"}}
    federation.reaches = lambda name, ask: name in few.get(ask.exchange, federation.names)
    assert again(federation) is None
    assert [body["why"] for _, body in bodies(federation, "unsettled")] == ["not-last", "not-agreed"]
    assert "settlement: none; too few members agree to the directions" in federation.verified()
    federation.reaches = lambda name, ask: True
    asked = len(federation.passed)
    found = again(federation)
    assert (found.holding, found.final) == (1, True)
    assert "last" not in {one.ask.exchange for one in federation.passed[asked:]}
    assert {who for who, _ in bodies(federation, "last")} == {"client-0", "client-1", "client-2"}
    assert "settlement: 1 of 1 equations hold" in federation.verified()


def test_once_the_pool_is_open_the_reason_why_it_was_not_counts_no_more(tmp_path):
    federation = dies(settled(tmp_path, 3), "train", 2)
    federation.reaches = lambda name, ask: ask.exchange != "last"
    assert again(federation) is None
    federation.reaches = lambda name, ask: True
    federation.dies("state", go=lambda: again(federation))
    assert "settlement: none; it is unfinished" in federation.verified()


def test_who_disagreed_is_not_counted_as_agreeing_by_the_next_server(tmp_path):
    federation = settled(tmp_path)

    federation.answering("agreed", ROUNDS, federation.disagreeing([1]))
    federation.reaches = lambda name, ask: (name, ask.exchange) != (AWAY, "agreed")
    assert federation.run().coordinator.settled is None
    assert not bodies(federation, "end")
    assert again(federation) is None
    assert "state" not in {one.ask.exchange for one in federation.passed}
    federation.reaches = lambda name, ask: True
    assert again(federation).missing == (LIAR,)
    assert federation.verified()


def test_a_second_attempt_may_fail_for_another_reason_and_for_good(tmp_path):
    federation = dies(settled(tmp_path, 3), "train", 2)
    federation.reaches = lambda name, ask: ask.exchange != "last"
    assert again(federation) is None
    federation.reaches = lambda name, ask: True
    federation.slope = lambda model, shown, places: (0.5, 0 * model)
    assert again(federation) is None
    assert [body["why"] for _, body in bodies(federation, "unsettled")] == ["not-last", "no-gain"]
    assert "settlement: none; the gradient is zero in every round, so there is no gain to divide" in (
        federation.verified()
    )
    assert len(bodies(federation, "end")) == 1


def test_who_stated_before_and_is_gone_now_has_stated(tmp_path, stated):
    first = dict(bodies(stated, "statement"))
    stated.reaches = lambda name, ask: name not in first
    found = again(stated)
    assert found.final
    assert {name: body for name, body in bodies(stated, "statement") if name in first} == first
    assert len(bodies(stated, "statement")) == 4
    assert any("countersigned" in line for line in stated.verified())


def test_too_few_members_leave_the_run_open_until_more_are_there(tmp_path):
    federation = dies(settled(tmp_path), "agreed", answered=1)
    for _ in range(2):
        federation.reaches = lambda name, ask: name in ("client-0", "client-1") or ask.exchange == "join"
        assert again(federation) is None
        assert federation.verified()
    assert len(bodies(federation, "unsettled")) == 1
    assert not bodies(federation, "end")
    federation.reaches = lambda name, ask: True
    assert again(federation).final
    assert "settlement: 2 of 2 equations hold" in federation.verified()


@pytest.mark.parametrize("settled_before", [False, True])
def test_a_liar_is_named_once_by_the_server_that_goes_on_later(tmp_path, monkeypatch, settled_before):
    federation = settled(tmp_path)
    federation.stating(1)
    if settled_before:  # the server dies before it ends the run
        with federation.trained():
            federation.clearing().run(federation.names)
    else:
        dies(federation, "settle")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90)
    assert again(federation).liars == (LIAR,)
    told = [(body["named"], body["final"], body["closes"]) for _, body in bodies(federation, "settled")]
    assert told == [([LIAR], True, None)]
    assert federation.verified()


# ------------------------------------------------------------------------------- a server that wants it anew


@pytest.fixture
def reopened(tmp_path):
    """A server that saw two statements, and that has a copy of its folder from before the opening."""
    federation = settled(tmp_path)
    with federation.trained():
        pass
    shutil.copytree(federation.folder, tmp_path / "copy")
    federation.dies("state", answered=2, go=lambda: again(federation))
    federation.stated = dict(bodies(federation, "statement"))
    assert len(federation.stated) == 2
    shutil.rmtree(federation.folder)
    shutil.copytree(tmp_path / "copy", federation.folder)
    return federation


def test_the_same_manifest_is_accepted_again_and_answered_in_the_same_way(reopened):
    found = again(reopened)
    assert found.final
    now = dict(bodies(reopened, "statement"))
    assert {name: now[name] for name in reopened.stated} == reopened.stated
    assert reopened.verified()


def other_direction(federation):
    federation.slope = lambda model, shown, places: (
        fit_slope(model, shown, places)[0],
        fit_slope(model, shown, places)[1] * 1.5,
    )


def other_samples(federation):
    federation.pool = pool_of(*data("another", 32), key=federation.pool.key, settled=32)


def other_order(federation):
    x, y = federation.pool.x, federation.pool.y
    federation.pool = pool_of(x[::-1], y[::-1], key=federation.pool.key, settled=32)


def other_rounds(federation):
    federation.coordinator.recorder.rounds.pop()


@pytest.mark.parametrize("change", [other_direction, other_samples, other_order, other_rounds])
def test_a_server_that_saw_statements_gets_no_second_opening(reopened, change):
    """Another direction, pool, order of the pool, or fewer rounds: nobody agrees, and nobody states anew."""
    with reopened.taken_up():
        change(reopened)
        reopened.coordinator.pool = reopened.pool
        before = len(reopened.passed)
        reopened.finish()
    assert reopened.coordinator.settled is None
    asked = "last" if change is other_rounds else "open"
    assert refusals(reopened, asked) == {*reopened.names}
    new = [one for one in reopened.passed[before:] if one.ask.exchange in ("agree", "agreed", "state")]
    assert not [one for one in new if one.answer is not None]
    assert not bodies(reopened, "statement")


def test_a_round_that_members_acknowledged_cannot_be_dropped_by_dying(tmp_path):
    """They do not agree to the directions of the others alone, and the run is over with that."""
    federation = dies(settled(tmp_path), "report", answered=3)
    (federation.folder / "archive" / "round-0002.arrays").unlink()
    assert again(federation) is None
    wrong = [body["wrong"] for _, body in bodies(federation, "agreed")]
    assert wrong == [[2], [2], [2], []]
    assert bodies(federation, "unsettled")[0][1]["why"] == "not-agreed"
    assert len(bodies(federation, "end")) == 1
    assert any("round 2" in line for line in federation.verified() if line.startswith("settlement: "))


def test_another_sum_than_the_archived_one_is_not_agreed_to(tmp_path):
    federation = dies(settled(tmp_path), "report", answered=3)
    archive = federation.coordinator.archive
    kept = archive.load("round", 2)
    kept["x"] = kept["x"] + (kept["x"].dtype.type(1) * (kept["x"] == kept["x"][0]))
    archive.save("round", 2, kept)
    assert again(federation) is None
    assert not bodies(federation, "statement")


def test_nobody_trains_for_a_server_that_goes_on_after_the_opening(tmp_path):
    """Members who signed the last round are not asked for another, nor those who only saw the pool."""
    federation = dies(settled(tmp_path, 3), "train", 2)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (AWAY, "last")
    federation.dies("state", go=lambda: again(federation))
    with federation.taken_up():
        assert federation.round(3) is None
    assert refusals(federation, "advertise") == {*federation.names}
    assert AWAY not in {who for who, _ in bodies(federation, "last")}


# ----------------------------------------------------------------------------- members who change their mind


def test_a_member_that_states_something_else_to_the_next_server_is_refused(tmp_path, stated, honest):
    who = "client-0"  # it has stated

    stated.stating(7, who)
    found = again(stated)
    assert any(f"{who}: has stated something else before" in note for note in stated.notes)
    assert [one.stated for one in found.equations] == [one.stated for one in honest.equations]
    assert len(bodies(stated, "statement")) == 4
    assert stated.verified()


def test_a_member_that_agrees_otherwise_to_the_next_server_is_refused(tmp_path, stated):
    stated.answering("agreed", ROUNDS, stated.disagreeing([1]))
    assert again(stated).final
    assert f"refused: {LIAR}: has signed another agreement before" in stated.notes
    assert stated.verified()


def test_a_window_that_was_opened_stays_when_another_server_goes_on(tmp_path, monkeypatch):
    federation = settled(tmp_path)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (AWAY, "state")
    dies(federation, "settle", answered=0)
    (_, before), now = bodies(federation, "settled")[0], time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90)
    assert again(federation).closes == before["closes"]
    assert len(bodies(federation, "settled")) == 1
    assert federation.verified()


@pytest.mark.parametrize("back", [True, False])
def test_a_settlement_that_was_closed_and_paid_by_stays_closed_when_another_server_goes_on(
    tmp_path, monkeypatch, back
):
    """Who comes back after the window states no more; what was paid stands."""
    federation = settled(tmp_path)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (AWAY, "state")
    dies(federation, "settle", answered=3)
    with federation.taken_up():  # as `fedmerit settle close` does
        closed = federation.close(monkeypatch)
    record_decision(federation.folder, Terms("10.00", "fit", "fenced", "PHI"))
    if back:
        federation.reaches = lambda name, ask: True
    before = len(federation.passed)
    found = again(federation)
    asked = {one.ask.exchange for one in federation.passed[before:]}
    assert (found.final, found.missing) == (True, (AWAY,))
    assert canonical(found.body()) == canonical(closed.body())
    assert asked == {"join", "open", "settle", "close"}
    assert [body["final"] for _, body in bodies(federation, "settled")] == [False, True]
    assert len(bodies(federation, "statement")) == 3
    assert len(bodies(federation, "end")) == 1
    assert "settlement: 0 of 2 equations hold" in federation.verified()


# -------------------------------------------------------------------------------- why it was not settled


@pytest.mark.parametrize(
    ("exchange", "body", "words"),
    [
        ("train", {"settlement": None, "why": "bad luck"}, "states an unknown reason: 'bad luck'"),
        ("train", {"settlement": None, "why": ["not-last"]}, r"at `\$\.why`"),
        ("train", {"settlement": None, "why": "not-agreed"}, "states an unknown reason"),
        ("train", {"settlement": "0" * 64, "why": "not-last"}, "belongs to no manifest"),
        ("agreed", {"settlement": None, "why": "not-agreed"}, "belongs to no manifest"),
        ("agreed", {"why": "no-gain"}, "states an unknown reason: 'no-gain'"),
        ("state", {"why": "not-agreed"}, "too few members signed, but enough did"),
        ("settle", {"why": "not-agreed"}, "comes after the settlement"),
    ],
)
def test_a_false_reason_why_a_run_was_not_settled_is_refused(tmp_path, exchange, body, words):
    federation = dies(settled(tmp_path), exchange, answered=1)
    with federation.taken_up():
        opened = [manifest["settlement"] for _, manifest in bodies(federation, "opening")]
        federation.coordinator.recorder.state("unsettled", {"settlement": (*opened, None)[0], **body})
    with pytest.raises(LedgerError, match=words) as caught:
        federation.verified()
    assert "(unsettled by server)" in str(caught.value)


def test_a_server_with_enough_signatures_under_the_last_round_cannot_say_that_they_are_too_few(tmp_path):
    federation = dies(settled(tmp_path, 3), "train", 2)
    with federation.taken_up():
        Clearing(federation.coordinator, federation.gradient, federation.archive)._last(federation.names)
        federation.coordinator.recorder.state("unsettled", {"settlement": None, "why": "not-last"})
    with pytest.raises(LedgerError, match="too few members signed, but enough did"):
        federation.verified()
