"""Members who judge each other on data of their own: what the matrix is, and what nobody can change."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

import fedmerit as fm
from attacked import judging
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.run import replay
from fedmerit.protocol.column import dealt, halves
from fedmerit.secagg.board import signed_lanes
from fedmerit.verify import verify_folder
from linear_federation import LIAR
from runs import record_decision

BARE = {"noise": 0.0, "blur": 0.0}
PAY = Terms("100.00", "fit", "hands", "PANEL", despite_doubts=True)


def account_of(federation):
    with Ledger(federation.folder / "ledger.sqlite", read_only=True) as ledger:
        return replay(ledger).account


def lines_of(federation):
    return list(verify_folder(federation.folder, archive=federation.folder / "archive"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return judging(tmp_path_factory.mktemp("bare"), 5, 2, panel=BARE).run()


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return judging(tmp_path_factory.mktemp("usual"), 5, 2).run()


# ---------------------------------------------------------------------------------------------- honest runs


@pytest.mark.parametrize("members", [5, 6, 7])
def test_all_columns_add_up_and_all_pairs_are_witnessed(tmp_path, members):
    federation = judging(tmp_path, members, 2).run()
    found = federation.coordinator.settled
    assert (found.final, found.missing, found.liars, found.verdicts) == (True, (), (), {})
    assert found.columns == dict.fromkeys(federation.names, True)
    assert found.witnessed
    lines = lines_of(federation)
    assert f"panel: {members} of {members} columns add up" in lines
    block = json.loads((federation.folder / "scores.json").read_text())["panel"]
    assert (block["judges"], block["holds"], block["witnessed"]) == (
        list(federation.names), [True] * members, True,
    )  # fmt: skip
    sums = np.array(block["stated"], dtype=object).astype(object)
    for judge in range(members):
        for half in (0, 1):
            assert sum(int(row[judge][half]) for row in sums) == int(block["sums"][judge][half])


def test_the_matrix_is_that_of_the_updates_and_the_columns(bare):
    """Without noise and blur, each entry is the product of what a member masked and what a judge showed."""
    found = bare.coordinator.settled
    manifest, columns = found.manifest, bare.coordinator.archive.load("columns", 0)["columns"]
    size, parts = manifest.coordinates, halves(manifest.bench.drawn)
    for b, judge in enumerate(manifest.bench.judges):
        for i, name in enumerate(bare.names):
            each = []
            for part in parts:
                total = 0
                for place, entry in enumerate(manifest.rounds):
                    words = bare.brought(name, entry.round)[manifest.drawn(entry)].view(np.int32)
                    total += int(words[part].astype(object) @ columns[b, place, part].astype(object))
                each.append(judge.scale * size / (part.stop - part.start) * total)
            assert found.panel.matrix[i, b] == pytest.approx(np.mean(each), rel=1e-12)


def test_a_column_is_the_gradient_of_the_judges_own_data(bare):
    """Of the first half of its samples at the first half of the coordinates, and so on, to one unit."""
    found = bare.coordinator.settled
    manifest, columns = found.manifest, bare.coordinator.archive.load("columns", 0)["columns"]
    entry, points = manifest.rounds[0], ((0.1127, 5 / 18), (0.5, 8 / 18), (0.8873, 5 / 18))
    at = manifest.drawn(entry)  # nothing was public before this round: there is no innovation
    for b, judge in enumerate(manifest.bench.judges):
        own = Samples(*bare.held_out(judge.judge))
        secret = bare.members[judge.judge].secret("noise", bare.run_id)
        for places, part in zip(dealt(40, secret), halves(len(at)), strict=True):
            slope = sum(w * bare.slope(t * bare.models[1], own, places)[1] for t, w in points)
            due = slope[at[part]] * entry.step / entry.weight / judge.scale
            assert np.abs(columns[b, 0, part] - due).max() < 0.6


class Samples:
    def __init__(self, x, y):
        self.x, self.y = x, y


def test_noise_of_pairs_hides_numbers_and_leaves_columns_exact(usual):
    found = usual.coordinator.settled
    columns = usual.coordinator.archive.load("columns", 0)["columns"]
    for entry in found.manifest.rounds:
        x = usual.coordinator.archive.load("round", entry.round)["x"]
        board = found.manifest.board(entry, columns, x)
        assert min(board.blur) > 0
        for name in usual.names:
            stated = signed_lanes(found.value(entry, name), board.lanes)
            true = signed_lanes(board.of_words(usual.brought(name, entry.round)), board.lanes)
            assert all(a != b for a, b in zip(stated, true, strict=True))
            apart = [abs(a - b) / s for a, b, s in zip(stated, true, board.blur, strict=True)]
            assert max(apart) < 6 * len(usual.names) ** 0.5


def test_a_rehearsal_without_masks_has_the_same_file_each_time(tmp_path):
    files = [
        (judging(tmp_path / str(k), 5, 2, masks=False).run().folder / "scores.json").read_bytes()
        for k in (0, 1)
    ]
    assert files[0] == files[1]
    assert json.loads(files[0])["panel"]["holds"] == [True] * 5


def test_members_who_were_away_judge_by_what_they_are_shown(tmp_path):
    federation = judging(tmp_path, 6, 3, away=[(LIAR, 2)]).run()
    found = federation.coordinator.settled
    assert (found.final, found.missing) == (True, ())
    assert found.columns == dict.fromkeys(federation.names, True)
    assert LIAR not in found.manifest.entry(2).participants
    shown = [one.ask for one in federation.passed if one.ask.exchange == "judge" and one.ask.arrays]
    assert {ask.round for ask in shown} == {2}


# --------------------------------------------------------------------------------------------------- money


def test_each_judge_hands_out_an_equal_part_to_the_cent(usual):
    made, _ = record_decision(usual.folder, PAY)
    account = account_of(usual)
    due = fm.hands(account.panel.matrix, 3, account.panel.clients)
    assert dict(made.shares) == dict(due)
    assert made.paid == fm.payouts(due, "100.00") or dict(made.paid) == dict(fm.payouts(due, "100.00"))
    assert sum(made.paid.values()) + made.paid.unpaid == 100
    assert lines_of(usual)


def shares_of(federation):
    panel = federation.coordinator.settled.panel
    divided = fm.hands(panel.matrix, 3, panel.clients)
    return {
        name: sum((parts.get(name, Fraction(0)) for parts in divided.slices.values()), Fraction(0))
        for name in panel.clients
    }


@pytest.mark.parametrize("what", ["praise", "hurt"])
def test_a_lying_judge_gains_nothing(tmp_path, what):
    """Its own share is the honest one, to the last digit: nothing that it shows enters it."""
    honest = judging(tmp_path / "honest", 5, 2, panel=BARE).run()
    federation = judging(tmp_path / "lie", 5, 2, panel=BARE)

    def falsely(manifest):
        units = []
        for entry in manifest.rounds:
            at = manifest.drawn(entry)
            own = {n: federation.brought(n, entry.round)[at].view(np.int32) for n in entry.participants}
            others = sum(own[name].astype(float) for name in own if name != LIAR)
            units.append(own["client-3"] - others / 4 if what == "praise" else -others)
        return units

    federation.members[LIAR].falsely = falsely
    federation.run()
    before, after = shares_of(honest), shares_of(federation)
    assert after[LIAR] == before[LIAR]
    assert after["client-3"] != before["client-3"]
    assert federation.coordinator.settled.columns[LIAR]
    assert LIAR in account_of(federation).odd_judges
