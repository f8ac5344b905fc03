"""Rehearsals that are settled: what is stated, adds up and is kept; cut short at any moment; planted lies."""

import csv
import json
import stat

import numpy as np
import pytest

import fedmerit as fm
from fedmerit.errors import ConfigError, SettlementError
from fedmerit.ledger.chain import Ledger
from fedmerit.protocol.direction import blocks_of
from fedmerit.protocol.memory import SHOWN
from fedmerit.simulation.direction import PathGradients, direction
from fedmerit.simulation.run import Keeping, Rehearsal, run
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.utilities import resolve
from fedmerit.storage.checks import renew
from fedmerit.storage.recorder import LedgerRecorder
from fedmerit.storage.run_folder import Folder, FolderArchive
from fedmerit.verify import verified, verify_folder
from killing import crash
from raising import raises
from runs import records_of, run_in
from tiny import Seen, losing, tiny

PLAIN = "secure_aggregation.enabled=false"
MASKED = "settlement.naming=false"
LIE = ("settlement.naming=true", "corruption.misstate={client-2=1.01}")
SMALL = ("scoring.utilities=['expected-accuracy', 'accuracy']",)


def settled(*more, method="settled"):
    return tiny(f"scoring.method={method}", *SMALL, *more)


def book(folder):
    return run_in(folder).settlement


def integers(folder):
    """What was stated and what it adds up to, without what differs from run to run."""
    found = book(folder).account
    stated = {name: dict(one.rounds) for name, one in found.statements.items()}
    sums = [(one.round, one.participants, one.sum, one.product, one.holds) for one in found.equations]
    return stated, sums, [one.g for one in found.manifest.rounds]


@pytest.fixture(scope="module", params=["settled", "both"])
def ran(request, tmp_path_factory):
    folder, seen = tmp_path_factory.mktemp(request.param) / "run", Seen()
    config = settled(PLAIN, "participation.away={client-3=[2]}", method=request.param)
    with Folder(folder, config) as opened:
        rehearsal = Rehearsal(config, opened, analyses=[seen])
        rehearsal.run()
    return folder, rehearsal, seen.rounds


# -------------------------------------------------------------------------------------------- honest runs


def test_every_equation_holds_and_the_scores_add_up_to_the_gain(ran):
    folder, rehearsal, rounds = ran
    found, shown = book(folder).account, rehearsal.federation.pool.settlement()
    assert [(one.round, one.holds) for one in found.equations] == [(1, True), (2, True)]
    assert len(found.manifest.rounds[1].participants) == 3  # one was away
    models = [rounds[1][0], *(outcome.model for _, outcome, _ in rounds.values())]
    values = [rehearsal.federation.evaluate(m, shown)["expected-accuracy"].mean() for m in models]
    for entry, before, after in zip(found.manifest.rounds, values, values[1:], strict=False):
        phi = found.round_scores(entry).values
        assert phi.sum() + entry.rest == pytest.approx(after - before, abs=1e-5)
        assert abs(entry.rest) <= 0.02 * abs(after - before) or entry.points == 7
    total = found.totals(rehearsal.federation.names).values.sum()
    assert total == pytest.approx(values[-1] - values[0], rel=0.02)
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(folder))


def test_scores_are_the_aumann_shapley_values_of_the_plain_updates(ran):
    folder, rehearsal, rounds = ran
    found, shown = book(folder).account, rehearsal.federation.pool.settlement()
    blocks, _ = blocks_of(shown, balanced=True)
    for entry in found.manifest.rounds:
        m0, outcome, updates = rounds[entry.round]
        way = direction(
            rehearsal.federation.network, m0, outcome.model, shown.x, shown.y, "expected-accuracy",
            blocks=blocks, points=entry.points,
        )  # fmt: skip
        expected = fm.aumann_shapley(updates, way.blocks, outcome.included, sizes=way.sizes)
        own = found.round_scores(entry)
        assert own.clients == outcome.included
        np.testing.assert_allclose(own.values, expected.values, rtol=2e-3, atol=1e-5)
        np.testing.assert_allclose(own.stderr, expected.stderr, rtol=1e-3, atol=1e-7)


def test_the_paid_score_is_beside_the_others_in_every_file(ran):
    folder, rehearsal, _ = ran
    document, settled = json.loads((folder / "scores.json").read_text()), book(folder).account
    total = settled.scores(rehearsal.federation.names)
    assert document["cumulative"]["PHI"] == document["settlement"]["cumulative"]
    assert document["cumulative"]["PHI"] == pytest.approx(total.values.tolist())
    assert document["stderr"]["PHI"] == pytest.approx(total.stderr.tolist())
    with (folder / "scores.csv").open() as file:
        lines = {(int(line["round"]), line["client"]): float(line["PHI"]) for line in csv.DictReader(file)}
    for entry in settled.manifest.rounds:
        for name, value in settled.round_scores(entry).as_dict().items():
            assert lines.pop((entry.round, name)) == pytest.approx(value)
    assert not lines
    (folder / "scores.csv").unlink()  # whatever is stale is found and written again
    assert any(line.code == "files" for line in verify_folder(folder))
    assert renew(folder, verified(folder, [])[0])
    assert not any(line.code == "files" for line in verify_folder(folder))


def test_no_more_gradients_are_kept_than_asked_for():
    federation = prepare(settled(PLAIN))
    shown, first = federation.pool.settlement(), federation.first
    blocks, _ = blocks_of(shown, balanced=True)
    paths = PathGradients(federation.network, federation.utilities[0], most=3 * 32 * first.size)
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
        far = federation.first * np.float32(1e30)
        paths(federation.first, far, shown, blocks_of(shown, balanced=True)[0], 3)


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


@pytest.mark.parametrize(("size", "by_class"), [((), True), (("data.test_size=0",), False)])
def test_blocks_have_the_same_mix_of_classes_only_if_the_pool_was_drawn_class_by_class(
    tmp_path, size, by_class
):
    """Otherwise errors would leave out what the mix of classes owes to chance."""
    run(settled(PLAIN, *size), tmp_path / "run")
    assert book(tmp_path / "run").manifest.stratified == by_class


@pytest.mark.parametrize(
    ("rounds", "more"),
    [(1, ()), (4, ("training.weights=scores", "corruption.free_rider={client-3='stale'}"))],
    ids=["one round", "weights from scores"],
)
def test_every_equation_holds_to_the_last_bit(tmp_path, rounds, more):
    with losing({"client-2": "2:unmask"}):
        run(settled(PLAIN, f"training.rounds={rounds}", *more, method="both"), tmp_path / "run")
    assert [one.holds for one in book(tmp_path / "run").account.equations] == [True] * rounds


def test_ground_truth_is_on_the_samples_of_the_settlement(tmp_path):
    config = settled(PLAIN, "scoring.truth=['mr-shapley']", "training.local_epochs=3", method="both")
    document = run(config, tmp_path / "run")
    federation = prepare(config, pool_key=(tmp_path / "run" / "keys" / "pool.key").read_bytes())
    shown, found = federation.pool.settlement(), book(tmp_path / "run").account
    with np.load(tmp_path / "run" / "tables" / "round-0001.npz") as arrays:
        table = arrays["table/expected-accuracy"]
    empty = federation.evaluate(federation.first, shown)["expected-accuracy"].mean()
    assert table[0] == pytest.approx(empty, abs=1e-6)
    phi, exact = found.totals(federation.names).values / 2, document["truth"]["MR-SV"]
    assert phi == pytest.approx(exact, abs=0.1 * np.ptp(exact))


# -------------------------------------------------------------------------------------------------- kills


MOMENTS = {
    "round": (Ledger, "append", 2, lambda *given: given[2] == "round"),
    "members": (FolderArchive, "save", 2, lambda *given: given[1] == "members"),
    "units": (FolderArchive, "save", 2, lambda *given: given[1] == "units"),
    "direction": (FolderArchive, "save", 2, lambda *given: given[1] == "direction"),
    "opening": (LedgerRecorder, "state", 1, lambda *given: given[1] == "opening"),
    "agreed": (LedgerRecorder, "said", 3, lambda *given: given[2] == "agreed"),
    "first statement": (LedgerRecorder, "said", 1, lambda *given: given[2] == "statement"),
    "third statement": (LedgerRecorder, "said", 3, lambda *given: given[2] == "statement"),
    "second table": (LedgerRecorder, "said", 2, lambda *given: given[2] == "table"),
    "verdict": (LedgerRecorder, "state", 2, lambda *given: given[1] == "verdict"),
    "settled": (LedgerRecorder, "state", 1, lambda *given: given[1] == "settled"),
    "countersigned": (LedgerRecorder, "said", 2, lambda *given: given[2] == "countersigned"),
    "end": (LedgerRecorder, "end", 1),
    "files": (Keeping, "drop", 2),
}


FIRST = ("round", "third statement", "settled", "end")
"""Moments that the quick tests try; the long ones try all."""


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        *((moment, MASKED) for moment in ("round", "third statement")),
        *(
            pytest.param(moment, PLAIN, marks=() if moment in FIRST else pytest.mark.long)
            for moment in MOMENTS
            if moment not in ("second table", "verdict")
        ),
    ],
)
def test_a_run_that_is_cut_short_states_the_same_integers(tmp_path, whole, moment, how):
    folder = tmp_path / "run"
    crash(settled(how), folder, *MOMENTS[moment])
    run(settled(how), folder, resume=True)
    assert integers(folder) == whole
    assert not [*folder.glob("archive/members-*"), *folder.glob("archive/units-*")]
    kinds = [record.kind for record in records_of(folder)]
    expected = {"opening": 1, "agreed": 4, "statement": 4, "settled": 1, "countersigned": 4}
    assert {kind: kinds.count(kind) for kind in expected} == expected
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(folder))


def test_samples_that_were_shown_are_known_after_a_kill(tmp_path):
    config = settled(PLAIN, method="both")
    run(config, tmp_path / "whole")
    crash(config, tmp_path / "run", *MOMENTS["round"])
    with Folder(tmp_path / "run", config, resume=True) as opened:
        rehearsal = Rehearsal(config, opened)
        assert len(rehearsal.transport.states["client-0"].get(SHOWN)) == 25
        rehearsal.run()
    assert integers(tmp_path / "run") == integers(tmp_path / "whole")


# ---------------------------------------------------------------------------------- lies, and what is refused


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named") / "run"
    run(settled(*LIE), folder)
    return folder


def verdict(folder):
    """Who was named in which round, and what masks prove; the same after a kill."""
    found = book(folder).account
    return found.named, {at: dict(proof.values) for (at, _), proof in found.verdicts.items()}


def test_masks_name_who_lied_and_prove_its_true_integers(named, whole):
    stated, sums, _ = integers(named)
    assert {name for name, rounds in stated.items() if rounds != whole[0][name]} == {"client-2"}
    assert [holds for *_, holds in sums] == [False, False]
    liars, values = verdict(named)
    assert {number: list(each) for number, each in liars.items()} == {1: ["client-2"], 2: ["client-2"]}
    stated = whole[0].items()
    assert values == {number: {name: rounds[str(number)] for name, rounds in stated} for number in (1, 2)}


@pytest.mark.parametrize("moment", ["second table", "verdict", "countersigned", "end"])
def test_who_lied_is_named_after_a_kill_too(tmp_path, named, moment):
    folder = tmp_path / "run"
    crash(settled(*LIE), folder, *MOMENTS[moment])
    run(settled(*LIE), folder, resume=True)
    assert verdict(folder) == verdict(named)
    assert "settlement: 0 of 2 equations hold" in list(verify_folder(folder))
    assert len(book(folder).accounts) == 1
    assert sorted(book(folder).account.countersigned) == sorted(book(named).account.countersigned)


@pytest.mark.parametrize("method", ["settled", "both"])
def test_accuracy_has_no_gradient_and_is_refused_before_anybody_trains(tmp_path, method):
    with raises(ConfigError, setting="scoring.utilities"):
        run(tiny(f"scoring.method={method}", "scoring.utilities=['accuracy']"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind",
    ["witness", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("nonce", "drawn", "sealed"))],
)
def test_a_rehearsal_of_five_that_is_cut_short_has_all_its_pairs_witnessed(tmp_path, kind):
    sizes = ("partition.clients=5", "partition.sizes=[20, 20, 20, 20, 20]")
    config = settled("settlement.naming=true", *sizes)
    crash(config, tmp_path / "run", LedgerRecorder, "said", 3, lambda *given: given[2] == kind)
    run(config, tmp_path / "run", resume=True)
    account = book(tmp_path / "run").account
    assert (account.final, account.pairs, account.witnessed) == (True, (20, 20), True)
    assert "settlement: 20 of 20 pairs of members are witnessed" in list(verify_folder(tmp_path / "run"))
