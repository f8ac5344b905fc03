"""Members that agree to sums over everybody only: with one lost there is no sum, so nothing to subtract."""

import numpy as np
import pytest
from federation_in import NODES, client, grid_of, rounds_in, run, task
from lies import exchange_of

import fedmerit.flower
from fedmerit.config import from_dict
from fedmerit.errors import ProtocolError, RefusedError, RunAborted
from fedmerit.secagg import Encoding

SIX = {"partition": {"names": [f"client-{i}" for i in range(6)]}}


@pytest.mark.parametrize("given", [{}, {"threshold": 6}, {"least": 6}, {"threshold": 5, "least": 6}])
def test_settings_that_allow_smaller_sums_are_not_accepted(given):
    with pytest.raises(RefusedError, match="expected threshold and least to be 6"):
        fedmerit.flower.everybody(from_dict({**SIX, "secure_aggregation": given}))


@pytest.mark.parametrize(("given", "expected"), [("secret", "uniform"), ("uniform", "secret")])
def test_another_weighting_is_not_accepted(given, expected):
    """A sum over everybody with weights and one without differ by those whose weight is not 1."""
    whole = {**SIX, "secure_aggregation": {"threshold": 6, "least": 6}, "training": {"weights": given}}
    config = from_dict(
        {**whole, "training": {"weights": given, "weight_cap": 100 if given == "secret" else 1}}
    )
    with pytest.raises(RefusedError, match=f"asked for {given} weights, expected {expected}"):
        fedmerit.flower.everybody(config, weights=expected)
    fedmerit.flower.everybody(config, weights=given, weight_cap=100)


def test_another_cap_of_secret_weights_is_not_accepted():
    """Whoever has more samples than the cap declines: runs with different caps would count them."""
    whole = {**SIX, "secure_aggregation": {"threshold": 6, "least": 6}}
    capped = from_dict({**whole, "training": {"weights": "secret", "weight_cap": 699}})
    with pytest.raises(RefusedError, match="asked for a weight_cap of 699, expected 100000"):
        fedmerit.flower.everybody(capped, weights="secret")
    fedmerit.flower.everybody(capped, weights="secret", weight_cap=699)
    fedmerit.flower.everybody(from_dict({**whole, "training": {"weight_cap": 699}}))


def test_it_is_as_cautious_as_the_default():
    whole = {"threshold": 6, "least": 6}
    fedmerit.flower.everybody(from_dict({**SIX, "secure_aggregation": whole}))
    with pytest.raises(RefusedError, match="asked to leave out the check"):
        fedmerit.flower.everybody(from_dict({**SIX, "secure_aggregation": {**whole, "check": False}}))


def strict():
    return dict.fromkeys(
        NODES, fedmerit.flower.secure(client.app.inner, value=task.value, accept=fedmerit.flower.everybody)
    )


def test_with_everybody_there_rounds_are_summed_and_scored(home):
    _, rounds = run(home, grid_of(home, strict()), threshold=4, least=4)
    assert [(len(one.included), len(one.reports)) for one in rounds] == [(4, 4), (4, 4)]


def test_one_lost_member_means_no_sum(home):
    """It is lost after it has masked: by default the others would finish without it."""
    grid = grid_of(home, strict())

    def before(node, message):
        if exchange_of(message).exchange == "check":
            grid.dead = {node} if node == 103 else grid.dead

    grid.before = before
    with pytest.raises(RunAborted, match=r"no round was closed .* client-3 is away"):
        run(home, grid, threshold=4, least=4, rounds=1, join=1.0)
    assert [(one.included, bool(one.aborted)) for one in rounds_in(home / "run")] == [((), True)]


def test_nobody_joins_where_smaller_sums_are_allowed(home):
    with pytest.raises(ProtocolError, match=r"0 of 4 members joined .* asked for sums of fewer than all"):
        run(home, grid_of(home, strict()), join=0.5)


# --------------------------------------------------------------------------------------- two bounds, clipped


def clipped_sum(bound, deltas):
    """What a server learns from one run over everybody, in which updates are cut to the bound."""
    encoding = Encoding(deltas.shape[1], len(deltas), bound, clip=True)
    words = sum(encoding.encode(delta, seed=i).words for i, delta in enumerate(deltas))
    return encoding.decode(words, included=len(deltas)).weighted_sum


@pytest.mark.parametrize("given", [{"clip": True}, {"bound": 0.01}, {"clip": True, "bound": 0.01}])
def test_sums_under_another_bound_are_not_accepted(given):
    """Everybody is in both sums, and their difference is what only the outlier has beyond the lower bound."""
    deltas = np.random.default_rng(0).uniform(-0.01, 0.01, (6, 30))
    deltas[2] = np.random.default_rng(1).choice([-1, 1], 30) * np.random.default_rng(2).uniform(0.5, 2, 30)
    found = clipped_sum(4.0, deltas) - clipped_sum(0.01, deltas)
    assert np.abs(found - deltas[2]).max() <= 0.01 + 1e-6
    whole = {"threshold": 6, "least": 6}
    fedmerit.flower.everybody(from_dict({**SIX, "secure_aggregation": whole}))
    with pytest.raises(RefusedError, match="asked to clip updates" if "clip" in given else "expected 4"):
        fedmerit.flower.everybody(from_dict({**SIX, "secure_aggregation": whole | given}))


def test_another_bound_is_given_by_name():
    whole = {"threshold": 6, "least": 6, "bound": 8.0}
    config = from_dict({**SIX, "secure_aggregation": whole})
    fedmerit.flower.everybody(config, bound=8.0)
    with pytest.raises(RefusedError, match="asked for a bound of 8, expected 4: a member who declines"):
        fedmerit.flower.everybody(config)
    with pytest.raises(RefusedError, match="asked for a bound of 8, expected 2"):
        fedmerit.flower.everybody(config, bound=2.0)


def test_nobody_joins_where_updates_are_clipped(home):
    with pytest.raises(ProtocolError, match=r"0 of 4 members joined .* asked to clip updates"):
        run(home, grid_of(home, strict()), threshold=4, least=4, clip=True, join=0.5)
