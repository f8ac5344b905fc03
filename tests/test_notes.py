"""What a rehearsal planted, in one sentence."""

import pytest

from fedmerit.config import Corruption
from fedmerit.notes import planted

A, B, C = "Ash {0}", "Bonn, Radiology", "Cork"
HIDDEN = {A: "Member C", B: "Member A", C: "Member B"}


@pytest.mark.parametrize(
    ("given", "expected", "hidden"),
    [
        ({}, "", ""),
        ({"label_noise": {A: 0.0}}, "", ""),
        (
            {"label_noise": {A: 0.8, B: 0.125, C: 0.0}},
            f"Rehearsal: labels were replaced by random ones on purpose, 80 % at {A}, 12.5 % at “{B}” "
            "(corruption.label_noise).",
            "Rehearsal: labels were replaced by random ones on purpose, 12.5 % at Member A, 80 % at Member C "
            "(corruption.label_noise).",
        ),
        (
            {"label_noise": "ramp"},
            "Rehearsal: labels were replaced by random ones on purpose, from none at the first member to all "
            'at the last one (corruption.label_noise = "ramp").',
            "Rehearsal: labels were replaced by random ones on purpose, from none at the first member to all "
            'at the last one (corruption.label_noise = "ramp").',
        ),
        (
            {"label_flip": [A, C]},
            f"Rehearsal: the labels of {A} and {C} were flipped on purpose (corruption.label_flip).",
            "Rehearsal: the labels of Member B and Member C were flipped on purpose (corruption.label_flip).",
        ),
        (
            {"free_rider": {A: "zero", C: "stale"}, "test_set": [B]},
            f"Rehearsal: in place of training, {A} sent no change, {C} sent back the model of one round "
            f"earlier on purpose (corruption.free_rider); {B} trained on test samples on purpose "
            "(corruption.test_set).",
            "Rehearsal: in place of training, Member B sent back the model of one round earlier, Member C "
            "sent no change on purpose (corruption.free_rider); Member A trained on test samples on purpose "
            "(corruption.test_set).",
        ),
        (
            {"duplicate": {C: A}},
            f"Rehearsal: {C} trained on the data of {A} on purpose (corruption.duplicate).",
            "Rehearsal: Member B trained on the data of Member C on purpose (corruption.duplicate).",
        ),
    ],
)
def test_every_kind_of_planted_fault_is_told(given, expected, hidden):
    assert planted(Corruption(**given)) == expected
    assert planted(Corruption(**given), HIDDEN) == hidden


def test_a_name_without_a_pseudonym_is_not_told():
    assert "Cork" not in planted(Corruption(label_flip=[C], duplicate={A: C}), {A: "Member A"})


def test_of_very_many_only_some_are_named():
    many = [f"n{i}" for i in range(30)]
    assert "n11 and 18 more were flipped" in planted(Corruption(label_flip=many))
    riders = planted(Corruption(free_rider=dict.fromkeys(many, "zero")))
    assert "n11 sent no change, and so on for 18 more on purpose" in riders
