"""Panels in one process: the same file after a kill at any moment, and what a rehearsal plants."""

import json

import pytest

from fedmerit.config import from_dict
from fedmerit.errors import DataError
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.simulation.run import run
from fedmerit.storage.recorder import LedgerRecorder
from fedmerit.storage.run_folder import FolderArchive
from fedmerit.verify import verify_folder
from killing import crash
from runs import run_in
from tiny import TINY

SIZES = {"clients": 5, "scheme": "sizes", "sizes": [40, 40, 40, 40, 40]}
MOMENTS = {
    "drawn": (LedgerRecorder, "said", 3, lambda *given: given[2] == "drawn"),
    "judged": (LedgerRecorder, "said", 3, lambda *given: given[2] == "judged"),
    "column": (FolderArchive, "save", 2, lambda *given: given[1].startswith("column-")),
    "opening": (LedgerRecorder, "state", 1, lambda *given: given[1] == "opening"),
    "statement": (LedgerRecorder, "said", 3, lambda *given: given[2] == "statement"),
    "witness": (LedgerRecorder, "said", 3, lambda *given: given[2] == "witness"),
    "settled": (LedgerRecorder, "state", 1, lambda *given: given[1] == "settled"),
}


def settings(*overrides, masks=True, **corruption):
    return from_dict(
        {
            **TINY,
            "partition": SIZES,
            "scoring": {"method": "panel", "utilities": ["expected-accuracy"]},
            "panel": {"held_out": 0.5},
            "secure_aggregation": {"enabled": masks},
            "corruption": corruption,
        },
        overrides,
    )


def block(folder):
    return json.loads((folder / "scores.json").read_text())["panel"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(settings(), folder)
    return block(folder)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=() if moment in ("judged", "column", "witness") else pytest.mark.long)
        for moment in MOMENTS
    ],
)
def test_a_panel_that_is_cut_short_has_the_same_file(tmp_path, whole, moment):
    crash(settings(), tmp_path / "run", *MOMENTS[moment])
    run(settings(), tmp_path / "run", resume=True)
    assert block(tmp_path / "run") == whole
    assert "panel: 5 of 5 columns add up" in list(verify_folder(tmp_path / "run"))


def test_masks_change_nothing(tmp_path, whole):
    run(settings(masks=False), tmp_path / "run")
    assert block(tmp_path / "run") | {"witnessed": True} == whole


def test_a_planted_judge_changes_no_share_of_its_own(tmp_path, whole):
    run(settings(judge={"client-2": "praise:client-3"}), tmp_path / "run")
    found = block(tmp_path / "run")
    assert found["shares"][2] == whole["shares"][2]
    assert found["shares"][3] > whole["shares"][3]
    assert "client-2" in found["odd"]
    assert run_in(tmp_path / "run").account.columns["client-2"]


def test_who_misstates_is_named(tmp_path):
    run(settings(misstate={"client-1": 1.5}), tmp_path / "run")
    assert block(tmp_path / "run")["named"] == ["client-1"]


def test_held_out_samples_are_not_trained_on(tmp_path, monkeypatch):
    seen = []
    real = Coordinator.admit

    def admitted(self, address, answer):
        name = real(self, address, answer)
        seen.append(self.recorder.signed("join")[-1][1]["held_out"]["samples"])
        return name

    monkeypatch.setattr(Coordinator, "admit", admitted)
    run(settings(masks=False), tmp_path / "run")
    assert seen == [20] * 5


def test_a_member_with_too_few_samples_to_hold_any_out_is_refused(tmp_path):
    with pytest.raises(DataError):
        run(settings("partition.sizes=[1, 40, 40, 40, 40]"), tmp_path / "run")
