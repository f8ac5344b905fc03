"""Rehearsals that are settled: what is stated, adds up and is kept; kills at any moment; planted lies."""

import random
import stat
import time

import numpy as np
import pytest
from killing import killed
from tiny import tiny

import fedmerit as fm
from fedmerit.errors import ConfigError, SettlementError
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.recorder import LedgerRecorder
from fedmerit.ledger.records import Journal, config_of, rounds_of
from fedmerit.ledger.settled import settlement_of
from fedmerit.protocol.direction import blocks_of
from fedmerit.simulation.direction import PathGradients, direction
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.transport import Keeping
from fedmerit.simulation.utilities import resolve
from fedmerit.storage.archive import FolderArchive
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_folder
from raising import raises

PLAIN = "secure_aggregation.enabled=false"
MASKED = "settlement.naming=false"
LIE = ("settlement.naming=true", "corruption.misstate={client-2=1.01}")
SMALL = ("scoring.utilities=['expected-accuracy', 'accuracy']", "settlement.blocks=4")


def settled(*more, method="settled"):
    return tiny(f"scoring.method={method}", *SMALL, *more)


def book(folder):
    """The settlement as the ledger has it."""
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return settlement_of(ledger, rounds_of(ledger), config_of(ledger))


def integers(folder):
    """What was stated and what it adds up to, without what differs from run to run."""
    found = book(folder).settled
    stated = {name: dict(one.rounds) for name, one in found.statements.items()}
    sums = [(one.round, one.participants, one.sum, one.product, one.holds) for one in found.equations]
    return stated, sums, [one.g for one in found.manifest.rounds]


class Seen:
    """An analysis that keeps the plain rounds: M0, M, and everybody's update."""

    def __init__(self):
        self.rounds = {}

    def summed(self, plain):
        updates = np.stack([plain.update(name) for name in plain.outcome.included])
        self.rounds[plain.outcome.round] = (plain.m0, plain.outcome, updates)


@pytest.fixture(scope="module", params=["settled", "both"])
def ran(request, tmp_path_factory):
    folder, seen = tmp_path_factory.mktemp(request.param) / "run", Seen()
    config = settled(PLAIN, "participation.away={client-3=[2]}", method=request.param)
    with Folder(folder, config) as opened:
        rehearsal = Rehearsal(config, opened, analyses=[seen])
        rehearsal.run()
    return folder, rehearsal, seen.rounds, rehearsal.federation.evaluations


# -------------------------------------------------------------------------------------------- honest runs


def test_every_equation_holds_and_the_scores_add_up_to_the_gain(ran):
    folder, rehearsal, rounds, _ = ran
    found, shown = book(folder).settled, rehearsal.federation.pool.settlement()
    assert [(one.round, one.holds) for one in found.equations] == [(1, True), (2, True)]
    assert len(found.manifest.rounds[1].participants) == 3  # one was away
    models = [rounds[1][0], *(outcome.model for _, outcome, _ in rounds.values())]
    values = [rehearsal.federation.evaluate(m, shown)["expected-accuracy"].mean() for m in models]
    for entry, before, after in zip(found.manifest.rounds, values, values[1:], strict=False):
        phi = found.round_scores(entry).values
        assert phi.sum() + entry.rest == pytest.approx(after - before, abs=1e-5)
        assert abs(entry.rest) <= 0.02 * abs(after - before) or entry.points == 7
    assert found.scores(rehearsal.federation.names).values.sum() == pytest.approx(
        values[-1] - values[0], rel=0.02
    )
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(folder))


def test_scores_are_the_aumann_shapley_values_of_the_plain_updates(ran):
    folder, rehearsal, rounds, _ = ran
    found, shown = book(folder).settled, rehearsal.federation.pool.settlement()
    blocks, _ = blocks_of(shown, 4, balanced=True)
    for entry in found.manifest.rounds:
        m0, outcome, updates = rounds[entry.round]
        way = direction(
            rehearsal.federation.network, m0, outcome.model, shown.x, shown.y, "expected-accuracy",
            blocks=blocks, points=(entry.points, entry.points),
        )  # fmt: skip
        expected = fm.aumann_shapley(updates, way.blocks.cpu().numpy(), outcome.included, sizes=way.sizes)
        own = found.round_scores(entry)
        assert own.clients == outcome.included
        np.testing.assert_allclose(own.values, expected.values, rtol=2e-3, atol=1e-5)
        np.testing.assert_allclose(own.stderr, expected.stderr, rtol=1e-3, atol=1e-7)


def test_the_pool_stays_shut_while_members_train(ran):
    _, rehearsal, rounds, evaluations = ran
    shut = rehearsal.federation.pool.settlement().id
    shown = {None if outcome.slice is None else outcome.slice.id for _, outcome, _ in rounds.values()}
    assert shut not in shown
    assert (shown == {None}) == (rehearsal.config.scoring.method == "settled")
    assert (evaluations == 0) == (rehearsal.config.scoring.method == "settled")


def test_a_gradient_is_computed_once_for_server_and_members(tmp_path):
    config = settled(PLAIN)
    with Folder(tmp_path / "run", config) as opened:
        rehearsal = Rehearsal(config, opened)
        rehearsal.run()
    tried = {one.round: one.points for one in book(tmp_path / "run").settled.manifest.rounds}
    expected = sum(1 if points == 3 else 2 for points in tried.values())
    assert rehearsal.coordinator.gradient.computed == expected


def test_no_more_gradients_are_kept_than_asked_for():
    federation = prepare(settled(PLAIN))
    shown, first = federation.pool.settlement(), federation.first
    blocks, _ = blocks_of(shown, 2, balanced=True)
    paths = PathGradients(federation.network, federation.utilities[0], most=3 * 4 * first.size)
    for scale in (1.0, 1.1, 1.0):
        paths(first, first * np.float32(scale), shown, blocks, 3)
    assert paths.computed == 3  # two do not fit
    again = paths(first, first, shown, blocks, 3)
    assert paths.computed == 3
    other = paths(first, first, shown, blocks[::-1], 3)
    np.testing.assert_allclose(other.blocks[::-1], again.blocks, rtol=1e-4, atol=1e-7)
    assert paths.computed == 4


def test_what_is_not_finite_is_an_error_of_the_settlement():
    federation = prepare(settled(PLAIN, "model.name=mlp"))
    shown = federation.pool.settlement()
    paths = PathGradients(federation.network, resolve("neg-loss"))
    with raises(SettlementError, code="not-finite"):
        paths(
            federation.first,
            federation.first * np.float32(1e30),
            shown,
            blocks_of(shown, 2, balanced=True)[0],
            3,
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(settled(PLAIN), folder)
    return integers(folder)


def test_masks_and_words_of_eight_bytes_change_no_integer(tmp_path, whole):
    for place, more in enumerate([(MASKED,), ("settlement.naming=true",)]):
        run(settled(*more), tmp_path / str(place))
        assert integers(tmp_path / str(place)) == whole
    assert list(verify_folder(tmp_path / "0"))


def test_members_keep_secret_files_until_the_settlement_is_over(tmp_path, monkeypatch):
    seen = []

    def looked(keeping, number):
        seen.append(sorted(path.name for path in folder.glob("archive/members-*")))
        seen_modes.update(stat.S_IMODE(path.stat().st_mode) for path in folder.glob("archive/*"))
        real(keeping, number)

    folder, seen_modes, real = tmp_path / "run", set(), Keeping.drop
    monkeypatch.setattr(Keeping, "drop", looked)
    run(settled(PLAIN), folder)
    assert seen[0] == ["members-0001.arrays", "members-0002.arrays"]
    assert seen_modes == {0o600}
    assert stat.S_IMODE((folder / "archive").stat().st_mode) == 0o700
    assert not [*folder.glob("archive/members-*")]
    assert len([*folder.glob("archive/round-*")]) == 2


def test_one_number_for_the_run_settles_too(tmp_path, whole):
    run(settled(PLAIN, "settlement.detail=run"), tmp_path / "run")
    found = book(tmp_path / "run").settled
    assert [one.holds for one in found.equations] == [True]
    assert {name: one.rounds["all"] for name, one in found.statements.items()} == {
        name: sum(rounds.values()) for name, rounds in whole[0].items()
    }


@pytest.mark.parametrize(("size", "by_class"), [((), True), (("data.test_size=0",), False)])
def test_blocks_have_the_same_mix_of_classes_only_if_the_pool_was_drawn_class_by_class(
    tmp_path, size, by_class
):
    """Otherwise errors would leave out what the mix of classes owes to chance."""
    run(settled(PLAIN, *size), tmp_path / "run")
    assert book(tmp_path / "run").manifest.stratified == by_class


def test_a_run_of_one_round_settles(tmp_path):
    run(settled(PLAIN, "training.rounds=1"), tmp_path / "run")
    assert [one.holds for one in book(tmp_path / "run").settled.equations] == [True]


def test_weights_from_scores_settle_to_the_last_bit(tmp_path):
    more = ("training.weights=scores", "training.rounds=4", "participation.lost={client-2='2:unmask'}")
    run(settled(PLAIN, *more, "corruption.free_rider={client-3='stale'}", method="both"), tmp_path / "run")
    assert [one.holds for one in book(tmp_path / "run").settled.equations] == [True] * 4


def test_ground_truth_is_on_the_samples_of_the_settlement(tmp_path):
    config = settled(PLAIN, "scoring.truth=['mr-shapley']", "training.local_epochs=3", method="both")
    document = run(config, tmp_path / "run")
    federation = prepare(config, pool_key=(tmp_path / "run" / "keys" / "pool.key").read_bytes())
    shown, found = federation.pool.settlement(), book(tmp_path / "run").settled
    with np.load(tmp_path / "run" / "tables" / "round-0001.npz") as arrays:
        table = arrays["table/expected-accuracy"]
    empty = federation.evaluate(federation.first, shown)["expected-accuracy"].mean()
    assert table[0] == pytest.approx(empty, abs=1e-6)
    phi, exact = found.scores(federation.names).values / 2, document["truth"]["MR-SV"]
    assert phi == pytest.approx(exact, abs=0.1 * np.ptp(exact))


# -------------------------------------------------------------------------------------------------- kills


class Crash(BaseException):
    """Ends a run as a kill would."""


MOMENTS = {
    "round": (Journal, "write", lambda *given: given[2] == "round", 2),
    "members": (FolderArchive, "save", lambda *given: given[1] == "members", 2),
    "units": (FolderArchive, "save", lambda *given: given[1] == "units", 2),
    "direction": (FolderArchive, "save", lambda *given: given[1] == "direction", 2),
    "opening": (LedgerRecorder, "state", lambda *given: given[1] == "opening", 1),
    "agreed": (LedgerRecorder, "said", lambda *given: given[2] == "agreed", 3),
    "first statement": (LedgerRecorder, "said", lambda *given: given[2] == "statement", 1),
    "third statement": (LedgerRecorder, "said", lambda *given: given[2] == "statement", 3),
    "second table": (LedgerRecorder, "said", lambda *given: given[2] == "table", 2),
    "verdict": (LedgerRecorder, "state", lambda *given: given[1] == "verdict", 2),
    "settled": (LedgerRecorder, "state", lambda *given: given[1] == "settled", 1),
    "countersigned": (LedgerRecorder, "said", lambda *given: given[2] == "countersigned", 2),
    "end": (LedgerRecorder, "end", lambda *given: True, 1),
    "files": (Keeping, "drop", lambda *given: True, 2),
}


def crash_at(monkeypatch, moment):
    where, name, when, call = MOMENTS[moment]
    real, calls = getattr(where, name), []

    def wrapped(*args, **kwargs):
        if when(*args):
            calls.append(1)
            if len(calls) == call:
                raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, wrapped)


FIRST = ("round", "third statement", "settled", "end")
"""Moments that the quick tests try; the long ones try all."""


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(one, marks=() if one in FIRST else pytest.mark.long)
        for one in MOMENTS
        if one not in ("second table", "verdict")
    ],
)
def test_a_run_that_is_cut_short_states_the_same_integers(tmp_path, whole, monkeypatch, moment):
    folder = tmp_path / "run"
    crash_at(monkeypatch, moment)
    with pytest.raises(Crash):
        run(settled(PLAIN), folder)
    monkeypatch.undo()
    run(settled(PLAIN), folder, resume=True)
    assert integers(folder) == whole
    assert not [*folder.glob("archive/members-*"), *folder.glob("archive/units-*")]
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        kinds = [record.kind for record in ledger.records()]
    assert [kinds.count(kind) for kind in ("opening", "agreed", "statement", "settled", "countersigned")] == [
        1, 4, 4, 1, 4,
    ]  # fmt: skip
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(folder))


@pytest.mark.parametrize("moment", ["round", "third statement"])
def test_a_masked_run_that_is_cut_short_states_the_same_integers(tmp_path, whole, monkeypatch, moment):
    folder, config = tmp_path / "run", settled(MASKED)
    crash_at(monkeypatch, moment)
    with pytest.raises(Crash):
        run(config, folder)
    monkeypatch.undo()
    run(config, folder, resume=True)
    assert integers(folder) == whole
    assert list(verify_folder(folder))


def test_samples_that_were_shown_are_known_after_a_kill(tmp_path, monkeypatch):
    config = settled(PLAIN, method="both")
    run(config, tmp_path / "whole")
    crash_at(monkeypatch, "round")
    with pytest.raises(Crash):
        run(config, tmp_path / "run")
    monkeypatch.undo()
    with Folder(tmp_path / "run", config, resume=True) as opened:
        rehearsal = Rehearsal(config, opened)
        assert len(rehearsal.transport.states["client-0"].get("shown")) == 25
        rehearsal.run()
    assert integers(tmp_path / "run") == integers(tmp_path / "whole")


def config():
    """A run that lasts long enough to be killed."""
    return settled(PLAIN, "model.name=mlp")


@pytest.mark.long
@pytest.mark.timeout(280)
def test_killed_at_random_moments_it_states_the_same_integers(tmp_path):
    """Real processes and kill -9: three kills in rounds, then in the settlement."""
    folder, rng, seen = tmp_path / "run", random.Random(20261116), []

    def live(stages):
        late, line = len(seen) >= 3, ""
        while late and (line := stages.readline()) not in ("settle\n", ""):
            pass
        for _ in range(rng.randrange(1, 3 if late else 7)):
            line = stages.readline()
        time.sleep(rng.random() * (0.01 if late else 0.1))
        seen.append(line)

    kills = 0
    while kills < 7 and not killed(__name__, folder, live):
        kills += 1
    run(config(), folder, resume=True)
    run(config(), tmp_path / "whole")
    assert integers(folder) == integers(tmp_path / "whole")
    assert list(verify_folder(folder))
    assert kills >= 4
    assert "settle\n" in seen[:kills]


# ---------------------------------------------------------------------------------- lies, and what is refused


def test_a_false_statement_breaks_every_equation_that_it_is_in(tmp_path, whole):
    folder, told = tmp_path / "run", []
    config = settled(PLAIN, "corruption.misstate={client-2=1.01}")
    run(config, folder, watch=told.append)
    assert any("client-2" in step.text and "misstate" in step.text for step in told if step.stage == "note")
    stated, sums, _ = integers(folder)
    assert [holds for *_, holds in sums] == [False, False]
    for name, rounds in stated.items():
        assert (rounds == whole[0][name]) == (name != "client-2")
    assert "settlement: 0 of 2 equations hold" in list(verify_folder(folder))


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named") / "run"
    run(settled(*LIE), folder)
    return folder


def verdict(folder):
    """Who was named in which round, and what masks prove; the same after a kill."""
    found = book(folder).settled
    return found.named, found.values


def test_masks_name_who_lied_and_prove_its_true_integers(named, whole):
    liars, values = verdict(named)
    assert {number: list(each) for number, each in liars.items()} == {1: ["client-2"], 2: ["client-2"]}
    assert values == {
        number: {name: rounds[str(number)] for name, rounds in whole[0].items()} for number in (1, 2)
    }


@pytest.mark.parametrize("moment", ["second table", "verdict", "countersigned", "end"])
def test_who_lied_is_named_after_a_kill_too(tmp_path, named, monkeypatch, moment):
    folder = tmp_path / "run"
    crash_at(monkeypatch, moment)
    with pytest.raises(Crash):
        run(settled(*LIE), folder)
    monkeypatch.undo()
    run(settled(*LIE), folder, resume=True)
    assert verdict(folder) == verdict(named)
    assert "settlement: 0 of 2 equations hold" in list(verify_folder(folder))
    assert len(book(folder).history) == 1
    assert sorted(book(folder).countersigned) == sorted(book(named).countersigned)


@pytest.mark.parametrize("method", ["settled", "both"])
def test_accuracy_has_no_gradient_and_is_refused_before_anybody_trains(tmp_path, method):
    with raises(ConfigError, setting="scoring.utilities"):
        run(tiny(f"scoring.method={method}", "scoring.utilities=['accuracy']"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
