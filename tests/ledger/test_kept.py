"""What a run between machines leaves on record, and what a member's own file shows of its server."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from fedmerit.errors import LedgerError, RoundAborted
from fedmerit.identity import SERVER, load_key
from fedmerit.protocol.outcome import Outcome, Round, model_hash
from fedmerit.secagg.server import Server
from fedmerit.verify import verify_folder
from forging import body_of, written
from linear_federation import LIAR, SIZE, Federation
from refusals import found_wrong
from runs import records_of

# --------------------------------------------- what a run leaves on record: joins, signed heads, kept heads


NAMES = tuple(f"client-{i}" for i in range(4))


@pytest.fixture
def home(finished):
    return finished


def heads_of(home, name):
    (path,) = (home / f"{name}.pem.state").glob("*/heads")
    return path


def anew(home, change, *, sign_as=(SERVER,)):
    """The ledger rewritten: ``change`` gives the author's new body, or None to leave the record out."""
    heads = {}

    def tell(ledger, records):
        for record in records:
            if (body := change(record, body_of(record))) is None:
                continue
            if record.kind == "outcome":
                body["head"] = heads[body["head"]]
            yield record.author, record.kind, body, record.signature
            heads[record.digest.hex()] = ledger.head

    written(home, tell, {name: load_key(home / f"{name}.pem") for name in {*sign_as} - {SERVER}}, anew=())


@pytest.mark.parametrize("name", NAMES)
def test_every_member_finds_all_heads_it_was_ever_shown(home, name):
    lines = list(verify_folder(home / "run", heads=heads_of(home, name), member=name))
    assert any(line.startswith("kept: all 3 heads") for line in lines)
    assert "kept: trained in 2 rounds, from the models that the ledger states" in lines
    assert "kept: 2 of 2 reports are in the ledger, on the outcomes that the member was told" in lines
    assert sum(line.startswith("kept: ") for line in lines) == 3
    assert any(line.startswith(f"{name}: last signed the head of record") for line in lines)
    careful = "members: 4 of 4 joined, each with its own key; this cannot show whose machines they were"
    assert careful in lines
    assert any(line.startswith("heads: 4 of 4 members signed the head of record") for line in lines)
    assert not any("rehearsal" in line for line in lines)


def test_a_server_that_writes_another_history_is_found_by_a_members_file(home):
    """Everything is redone and signed, even with stolen keys of all members: only what was kept tells."""
    heads = {}

    def other(record, body):
        if record.kind == "round" and body["round"] == 2:
            body["checkpoint"] = "00" * 32
        if record.kind == "seen":
            body["head"] = heads.get("end", body["head"])
        return body

    shutil.rmtree(home / "run" / "checkpoints")  # which would tell
    anew(home, other)  # to learn the new head
    heads["end"] = records_of(home / "run", "end")[0].digest.hex()
    anew(home, other, sign_as=(SERVER, *NAMES))
    assert list(verify_folder(home / "run"))
    found_wrong(
        r"heads: line 11: head [0-9a-f]{64} is not on this chain",
        verify_folder,
        home / "run",
        heads=heads_of(home, "client-1"),
    )


def test_a_server_that_tells_one_member_another_model_is_found_by_that_members_file(tmp_path):
    """The other M is within the bound, so the member reports on it; the ledger cannot hold that report."""
    federation = Federation(tmp_path, files=True)

    def nudged(body):
        body["sum"] = body["sum"] + np.uint32(1)

    federation.telling("report", 1, nudged)
    federation.run()
    assert federation.verified()  # to everybody else the ledger is in order
    assert LIAR not in federation.rounds[0].reports
    told = r"line 5: the server told this member an outcome of round 1 .* but wrote a different one"
    found_wrong(told, verify_folder, tmp_path / "run", heads=heads_of(tmp_path, LIAR))
    assert list(verify_folder(tmp_path / "run", heads=heads_of(tmp_path, "client-2")))


def test_a_report_that_the_server_left_out_is_missed_by_its_author(tmp_path):
    federation = Federation(tmp_path, files=True)
    federation.answering("report", 1, lambda data: b"")
    federation.run()
    lines = list(verify_folder(tmp_path / "run", heads=heads_of(tmp_path, LIAR)))
    assert "kept: 1 of 2 reports are in the ledger, on the outcomes that the member was told" in lines
    assert any(line.startswith("kept: the report of round 1 is not in the ledger") for line in lines)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda body: body["terms"].update(strategy="FedAdam"),
            "its author did not agree to the run's terms",
        ),
        (lambda body: body["commitment"].update(size=7), "its author did not agree to the run's test pool"),
        (lambda body: body.update(server="00" * 32), "its author did not agree to the run's server key"),
        (lambda body: body.update(run="00"), "its author did not agree to the run's identifier"),
        (lambda body: body.clear(), "Object missing required field"),
    ],
)
def test_a_join_to_something_else_is_named(home, edit, message):
    def other(record, body):
        if (record.kind, record.author) == ("join", "client-2"):
            edit(body)
        return body

    anew(home, other, sign_as=(SERVER, "client-2"))
    found_wrong(rf"\(join by client-2\): {message}", verify_folder, home / "run")


# ---------------------------------------- a server that has more sums than its ledger says, and honest ones


ALL = ["A", "B", "C", "D"]
M0 = np.linspace(-1, 1, SIZE, dtype=np.float32)
RNG = np.random.default_rng(0)
UPDATES = {name: RNG.normal(size=SIZE).astype(np.float32) * np.float32(0.05) for name in ALL}


def train(name, number, m0):
    """Almost the same from almost the same model, as local training is; never the very same."""
    return UPDATES[name] + RNG.normal(size=SIZE).astype(np.float32) * np.float32(1e-6)


class TwoLedgers(Federation):
    """Four members with files, and a server with a ledger to show (`coordinator`) and another to itself."""

    def __init__(self, home, *, optimiser=False):
        super().__init__(home, ALL, 4, files=True, terms={"optimiser": optimiser})
        self.model, self.train = M0, train
        self.unasked = lambda kind, number, name: False
        self.reaches = lambda name, ask: not self.unasked(ask.exchange, ask.round, name)

    def start(self, number, m0, members=ALL, *, by=None):
        self.model = m0
        return self.round(number, members, by=by)

    def pretend(self, number, m0):
        """A round that the ledger calls aborted, in which nobody was asked anything."""
        unasked, self.unasked = self.unasked, lambda kind, number, name: True
        assert self.start(number, m0) is None
        self.unasked = unasked

    def lines(self, name):
        """What a member finds out from the server's ledger and its own file."""
        list(verify_folder(self.folder))  # to everybody else the ledger is in order
        found = list(verify_folder(self.folder, heads=self.heads(name), member=name))
        return [line.removeprefix("kept: ") for line in found if line.startswith("kept: ")]


@pytest.fixture
def federation(tmp_path, request):
    made = TwoLedgers(tmp_path, **getattr(request, "param", {}))
    with made.begun(), made.open("hidden") as made.hidden:
        yield made


# ----------------------------------------------------------------------------------------- dishonest servers


def unreported(kind, number, name):
    """Who is not asked for a report has none to miss afterwards."""
    return kind == "report"


def test_a_sum_that_the_server_calls_aborted_is_in_the_file_of_who_released_shares(federation, monkeypatch):
    """It keeps the sum of all, starts again from the same M0 without D, and has D's update by subtraction."""
    kept, real = [], Server.advance

    def advance(self):
        shown = real(self)
        if self.result is not None:
            kept.append(self.result)
            if len(kept) == 1:
                raise RoundAborted("2 members left, 3 are needed", stage="unmask")
        return shown

    monkeypatch.setattr(Server, "advance", advance)
    assert federation.start(1, M0) is None
    assert federation.start(2, M0, ALL[:3]) is not None
    assert np.abs(kept[0].weighted_sum - kept[1].weighted_sum - UPDATES["D"]).max() < 1e-4
    lines = federation.lines("A")
    assert lines[1] == "trained in 2 rounds, from the models that the ledger states"
    assert lines[2].startswith(
        "shares were released in round 1 for the sum of A, B, C, D, but in the ledger that round is aborted"
    )
    assert lines[3] == (
        "rounds 1, 2 started from the same M0, and not all of them have the same members in the sum "
        "(round 1: A, B, C, D; round 2: A, B, C): anybody who knows these sums can subtract them"
    )
    assert federation.lines("D")[-1] == lines[3]  # who was left out finds it, too


def test_an_old_model_in_a_round_that_the_server_calls_aborted_is_an_error(federation):
    """After a gap in the numbers members take any M0: the first one again, one bit changed."""
    model = federation.start(1, M0)
    federation.pretend(2, model)
    old = M0.copy()
    old[0] = np.nextafter(old[0], np.float32(9))
    federation.unasked = unreported
    assert federation.start(3, old, ALL[:3], by=federation.hidden) is not None
    federation.pretend(3, model)
    message = (
        r"heads: line 6: this member did not train from the M0 that the ledger states for round 3: "
        rf"it trained from {model_hash(old)}, the ledger states {model_hash(model)}"
    )
    with pytest.raises(LedgerError, match=message):
        federation.lines("A")


def test_a_round_that_is_not_in_the_ledger_is_an_error(federation):
    federation.start(1, M0)
    federation.unasked = unreported
    assert federation.start(3, M0, ALL[:3], by=federation.hidden) is not None
    with pytest.raises(LedgerError, match=r"heads: line 6: this member trained in round 3, which is not in"):
        federation.lines("A")


@pytest.mark.parametrize("federation", [{"optimiser": True}], indirect=True)
def test_a_server_that_moves_the_model_back_is_found_by_what_started_from_the_same_model(federation):
    """The terms allow it any M0, and both rounds are reported on."""
    federation.start(1, M0)
    assert federation.start(2, M0, ALL[:3]) is not None
    for name in ("A", "D"):
        assert any(
            line.startswith("rounds 1, 2 started from the same M0")
            and "(round 1: A, B, C, D; round 2: A, B, C)" in line
            for line in federation.lines(name)
        )


def inputs_in(folder):
    return next(one for one in records_of(folder) if one.kind == "masked").body["inputs"]


def test_a_ledger_with_others_in_the_sum_is_an_error(federation):
    """Nobody is asked for a report, so nobody has signed for the outcome."""
    federation.unasked = unreported
    model = federation.start(1, M0, ALL[:3], by=federation.hidden)
    recorder, found = federation.coordinator.recorder, Round(1, tuple(ALL), included=tuple(ALL))
    head = recorder.head
    recorder.schedule(1, ALL, None)
    recorder.masked(1, {**inputs_in(federation.home / "hidden"), "D": "00" * 32})
    where = (tuple(ALL), federation.pool.slice(1), model_hash(M0), head)
    told = Outcome(1, np.zeros(1, np.uint32), *where, model, 4.0)
    recorder.close(found, model, told, None)
    message = (
        r"line 3: .* for the sum of A, B, C in round 1, but the ledger says that the sum is of A, B, C, D"
    )
    with pytest.raises(LedgerError, match=message):
        federation.lines("A")


def test_a_ledger_with_other_masked_words_than_a_member_sent_is_an_error(federation):
    """The server writes down that B sent something else, by which nobody could audit B."""
    real = federation.coordinator.recorder.masked
    federation.coordinator.recorder.masked = lambda number, inputs: real(number, inputs | {"B": inputs["A"]})
    assert federation.start(1, M0) is not None
    assert any(line.startswith("trained in 1 round,") for line in federation.lines("A"))
    with pytest.raises(LedgerError, match=r"heads: line 2: B did not send the masked words that the led"):
        federation.lines("B")


# -------------------------------------------------------------------------------------------- honest servers


def quiet(lines):
    return not any("shares were released" in line or "same M0" in line for line in lines)


def test_an_honest_run_is_not_accused(federation):
    model = M0
    for number in (1, 2, 3, 4):
        model = federation.start(number, model)
    federation.finish()
    for name in ALL:
        lines = federation.lines(name)
        assert quiet(lines)
        assert "trained in 4 rounds, from the models that the ledger states" in lines
        digest = inputs_in(federation.folder)[name]
        assert f'1 masked "{name}" {digest}' in federation.heads(name).read_text().splitlines()


@pytest.mark.parametrize("kind", ["train", "check"])
def test_a_round_that_is_aborted_before_any_share_is_released_is_not_accused(federation, kind):
    """Members train again from the same M0; with fewer, too."""
    federation.unasked = lambda *at: at in ((kind, 2, "C"), (kind, 2, "D"))
    model = federation.start(1, M0)
    assert federation.start(2, model) is None
    assert federation.start(3, model, ALL[:3]) is not None
    assert all(quiet(federation.lines(name)) for name in ALL)


def test_a_round_that_is_aborted_at_the_end_is_told_and_nobody_is_accused(federation):
    """Two release shares, which is one too few for a sum; the next round has the same members."""
    federation.unasked = lambda *at: at in (("unmask", 2, "C"), ("unmask", 2, "D"))
    model = federation.start(1, M0)
    assert federation.start(2, model) is None
    federation.start(3, model)
    for name in ("A", "B"):
        told = [line for line in federation.lines(name) if "shares were released" in line]
        assert len(told) == 1
        assert "round 2 for the sum of A, B, C, D, but in the ledger that round is aborted" in told[0]
        assert "This also happens if too few members answered at the end" in told[0]
        assert not any("same M0" in line for line in federation.lines(name))
    assert quiet(federation.lines("C"))


@pytest.mark.parametrize("kind", ["train", "check", "unmask", "report"])
def test_a_member_whose_answer_is_lost_or_that_is_killed_before_it_sends_accuses_nobody(federation, kind):
    """All it does is on its disk before it speaks; the round goes on without it, and so does it later."""
    at = (kind, 1, "D")
    federation.after.append(lambda name, ask, said: None if (ask.exchange, ask.round, name) == at else said)
    model = federation.start(1, M0)
    model = federation.start(2, model)
    federation.finish()
    assert all(quiet(federation.lines(name)) for name in ALL)
    assert "trained in 2 rounds, from the models that the ledger states" in federation.lines("D")


@pytest.mark.parametrize(("kind", "released"), [("train", False), ("check", False), ("report", True)])
def test_a_server_that_is_killed_in_a_round_is_not_accused(federation, kind, released):
    """The ledger has the schedule, and no end of the round."""

    def killed(*at):
        if at == (kind, 2, "D"):
            raise KeyboardInterrupt
        return False

    federation.unasked = killed
    model = federation.start(1, M0)
    with pytest.raises(KeyboardInterrupt):
        federation.start(2, model)
    lines = federation.lines("A")
    assert "trained in 2 rounds, from the models that the ledger states" in lines
    told = [line for line in lines if "shares were released" in line]
    assert [("in round 2" in line, "that round does not end" in line) for line in told] == [
        (True, True)
    ] * released
    assert not any("same M0" in line for line in lines)
