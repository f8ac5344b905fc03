"""Members that agree to sums over everybody only: with one lost there is no sum, so nothing to subtract."""

import pytest

import fedmerit.flower
from federation_in import NODES, client, grid_of, rounds_in, run, task
from fedmerit.config import from_dict
from fedmerit.errors import ProtocolError, RefusedError, RunAborted
from lies import at
from refusals import refused

WHOLE = {
    "partition": {"names": [f"client-{i}" for i in range(6)]},
    "secure_aggregation": {"threshold": 6},
}


def config_of(**sections):
    """The settings of a run of six whose sums are over everybody, with changes."""
    return from_dict({key: {**WHOLE.get(key, {}), **sections.get(key, {})} for key in {*WHOLE, *sections}})


def capped(weights, cap):
    return {"training": {"weights": weights, "weight_cap": cap}}


@pytest.mark.parametrize(
    ("sections", "agreed", "words"),
    [
        ({"secure_aggregation": {"threshold": 5}}, {}, "expected the threshold 6"),
        ({"secure_aggregation": {"threshold": 0}}, {}, "expected the threshold 6"),
        # a sum over everybody with weights and one without differ by those whose weight is not 1
        (capped("secret", 100), {}, "asked for secret weights, expected uniform"),
        (capped("uniform", 1), {"weights": "secret"}, "asked for uniform weights, expected secret"),
        # whoever has more samples than the cap declines: runs with different caps would count them
        (capped("secret", 699), {"weights": "secret"}, "a weight_cap of 699, expected 100000"),
        ({"secure_aggregation": {"bound": 8.0}}, {}, "asked for a bound of 8, expected 4"),
        ({"secure_aggregation": {"bound": 8.0}}, {"bound": 2.0}, "asked for a bound of 8, expected 2"),
        ({"participation": {"fraction": 0.9}}, {}, "a server that chooses"),  # as `cautious` refuses
    ],
)
def test_settings_that_allow_smaller_or_different_sums_are_not_accepted(sections, agreed, words):
    with refused(RefusedError, stage="join") as caught:
        fedmerit.flower.everybody(config_of(**sections), **agreed)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "agreed"),
    [
        ({}, {}),
        (capped("uniform", 699), {}),  # without secret weights no cap counts
        (capped("secret", 699), {"weights": "secret", "weight_cap": 699}),
        ({"secure_aggregation": {"bound": 8.0}}, {"bound": 8.0}),
    ],
)
def test_what_a_member_agreed_to_by_name_is_accepted(sections, agreed):
    fedmerit.flower.everybody(config_of(**sections), **agreed)


def strict():
    return dict.fromkeys(
        NODES, fedmerit.flower.secure(client.app.inner, value=task.value, accept=fedmerit.flower.everybody)
    )


def test_with_everybody_there_rounds_are_summed_and_scored(home):
    _, rounds = run(home, grid_of(home, strict()), threshold=4)
    assert [(len(one.included), len(one.reports)) for one in rounds] == [(4, 4), (4, 4)]


def test_one_lost_member_means_no_sum(home):
    """It is lost after it has masked: by default the others would finish without it."""
    grid = grid_of(home, strict())
    at(grid, "check", None, lambda message: grid.dead.add(103), who=103)
    with refused(RunAborted, closed=(), aborted=(1,)):
        run(home, grid, threshold=4, rounds=1, join=1.0)
    assert [(one.included, bool(one.aborted)) for one in rounds_in(home / "run")] == [((), True)]


def test_nobody_joins_where_smaller_sums_are_allowed(home):
    with pytest.raises(ProtocolError, match=r"0 of 4 members joined .* asked for sums of fewer than all"):
        run(home, grid_of(home, strict()), join=0.5)
