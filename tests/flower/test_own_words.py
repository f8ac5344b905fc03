"""What a member reads in its own log when its update cannot be masked: which array, what to set."""

import logging
import math

import numpy as np
import pytest
from federation_in import NODES, rounds_in
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from lies import LIAR
from small import contributions, members, reply, start

import fedmerit.flower
from fedmerit.flower.codec import Shape

SAMPLES = {"num-examples": 10}
STAY = "stay on this machine: secure(..., metrics=[...]) lists those that leave"


@pytest.fixture(autouse=True)
def _all_lines(caplog):
    caplog.set_level(logging.INFO, "fedmerit")


def one_trains(home, change=0.01, metrics=SAMPLES, rounds=1, **options):
    """A run in which one member trains like that; the others are as ever, each run anew."""
    rng = np.random.default_rng()

    def train(name, message):
        if name == LIAR:
            return reply(message, change, **metrics)
        return reply(message, rng.normal() / 100, **SAMPLES)

    grid = members(home, train)
    start(contributions(home, **options), grid, rounds)
    return grid, rounds_in(home / "run")


def said(caplog):
    """What the member logged as it left its round."""
    (line,) = [text for text in caplog.messages if text.startswith(f"{LIAR} leaves round 1: stage masked")]
    return line


def tells_the_server_nothing(grid, *words):
    """To the server a decline is a decline."""
    for node, _, answer in grid.seen:
        if node == NODES[LIAR]:
            assert not any(word in str(answer) for word in words)


def test_an_update_beyond_the_bound_names_arrays_and_setting(home, caplog):
    grid, (one,) = one_trains(home, {"norm.running_var": 9.0})
    assert one.declined == (LIAR,)
    line = said(caplog)
    assert (
        "beyond the bound 4: training changed a number of 'norm.running_var' (running statistics of " in line
    )
    assert "BatchNorm, the usual ones) by 9; " in line
    assert line.endswith("the server has to use a larger `bound` in Contributions")
    assert "layer.weight" not in line
    tells_the_server_nothing(grid, "running_var", "bound")


def test_the_largest_change_comes_first_and_other_arrays_are_no_statistics(home, caplog):
    one_trains(home, {"norm.running_var": 5.0, "layer.weight": -7.0})
    assert (
        "'layer.weight', 'norm.running_var' (running statistics of BatchNorm, the usual ones) by 7; "
        in said(caplog)
    )


def test_only_a_weight_is_no_running_statistic(home, caplog):
    one_trains(home, {"layer.weight": 7.0})
    assert "BatchNorm" not in said(caplog)


def test_what_is_cut_is_not_refused(home):
    _, (one,) = one_trains(home, {"norm.running_var": 9.0}, clip=True)
    assert LIAR in one.included


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_name_their_array(home, caplog, clip, number):
    _, (one,) = one_trains(home, {"layer.weight": number}, clip=clip)
    assert one.declined == (LIAR,)
    assert said(caplog).endswith("training left numbers that are not finite in 'layer.weight'")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {},
            "training returned no metric 'num-examples', by which this run weighs members: put the number",
        ),
        ({"samples": 3}, "or name the metric that holds it in secure(..., weighted_by=...)"),
        ({"num-examples": 0}, "a whole number from 1 to 50, got 0: put that number there"),
        ({"num-examples": -3}, "got -3: put that number there"),
        ({"num-examples": 12.5}, "got 12.5: put that number there"),
        ({"num-examples": math.nan}, "got nan: put that number there"),
        ({"num-examples": math.inf}, "got inf: put that number there"),
        ({"num-examples": 51}, "got 51: the server has to use a larger `weight_cap` in Contributions"),
        ({"num-examples": [1, 2]}, "'num-examples' must be a single number"),
    ],
)
def test_a_weight_that_is_none_says_what_to_set(home, caplog, metrics, words):
    grid, (one,) = one_trains(home, metrics=metrics, weights="secret", weight_cap=50)
    assert one.declined == (LIAR,)
    assert words in said(caplog)
    tells_the_server_nothing(grid, "num-examples", "weight")


@pytest.mark.parametrize("metrics", [{}, {"num-examples": 12.5}, {"num-examples": 51}])
def test_where_members_weigh_the_same_nobody_asks_for_it(home, caplog, metrics):
    _, (one,) = one_trains(home, metrics=metrics)
    assert LIAR in one.included
    ours = [record.getMessage() for record in caplog.records if record.name == "fedmerit"]
    assert ours
    assert not any("num-examples" in text for text in ours)


@pytest.mark.parametrize("samples", [1, 50, 50.0])
def test_whole_weights_up_to_the_cap_are_summed(home, samples):
    _, (one,) = one_trains(home, metrics={"num-examples": samples}, weights="secret", weight_cap=50)
    assert LIAR in one.included


def test_a_repeated_update_says_what_to_mix_into_the_seed(home, caplog):
    """The same first model in a second run, and training that knows neither the run nor the round."""
    one_trains(home)
    caplog.clear()
    _, (one,) = one_trains(home, folder=home / "again")
    assert one.number == 1
    assert (
        "Training gave the same update from the same model: mix the run's id and the round number into its "
        in (said(caplog))
    )


@given(
    st.lists(
        arrays_of.arrays(
            np.float32,
            arrays_of.array_shapes(max_dims=2, min_side=0, max_side=3),
            elements=st.floats(width=32),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_largest_number_of_every_array_is_found_under_its_name(given_arrays):
    """Integers between them shift nothing."""
    named = {}
    for index, array in enumerate(given_arrays):
        named[f"a{index}"], named[f"counter{index}"] = array, np.array(7)
    shape = Shape.of(ArrayRecord({name: Array(array) for name, array in named.items()}))
    expected = {f"a{i}": float(np.abs(a).max()) if a.size else 0.0 for i, a in enumerate(given_arrays)}
    found = shape.largest(shape.vector)
    assert list(found) == list(expected)
    assert np.array_equal([*found.values()], [*expected.values()], equal_nan=True)


# ---------------------------------------------------------------------------------------------------- metrics


def with_metrics(home, shares, rounds=3, **options):
    """Every member's training tells a loss and a text's length; ``shares`` by member says which may leave."""
    rng = np.random.default_rng(0)

    def train(name, message):
        return reply(message, rng.normal() / 100, loss=0.5, words=[1, 2], **SAMPLES)

    grid = members(home, train)
    for name, node in NODES.items():
        inner = grid.apps[node].inner
        grid.apps[node] = fedmerit.flower.secure(inner, value=grid.apps[node].value, metrics=shares(name))
    return start(contributions(home, **options), grid, rounds)


def test_metrics_that_stay_at_home_are_named_once_by_member_and_server(home, caplog):
    with_metrics(home, lambda name: ())
    own = f"metrics loss, words of training {STAY}"
    assert caplog.messages.count(own) == len(NODES)
    theirs = [text for text in caplog.messages if text.startswith("the strategy gets no training metrics")]
    assert len(theirs) == 1


def test_metrics_that_cannot_be_averaged_are_named_once(home, caplog):
    """The first member shares none that the others share: it is not its list that counts."""
    with_metrics(home, lambda name: ["words"] if name == "client-0" else ["words", "loss"])
    said = [text for text in caplog.messages if text.startswith("the strategy does not get")]
    assert len(said) == 1
    assert "the training metrics words, loss" in said[0]


def test_numbers_that_all_share_reach_the_strategy_and_only_the_rest_is_named(home, caplog):
    result = with_metrics(home, lambda name: ["loss", "words"])
    assert dict(result.train_metrics_clientapp[1]) == {"loss": 0.5}
    assert not any("stay on this machine" in text for text in caplog.messages)
    said = [text for text in caplog.messages if text.startswith("the strategy does not get")]
    assert ["the training metrics words" in text for text in said] == [True]


def test_an_evaluation_names_what_stays_once_too(home, caplog):
    grid = members(home)
    node = NODES[LIAR]

    @grid.apps[node].evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"m": MetricRecord({"accuracy": 0.5})}), reply_to=message)

    for _ in range(2):
        message = Message(RecordDict(), dst_node_id=node, message_type="evaluate")
        grid.apps[node](message, grid.contexts[node])
    own = f"metrics accuracy of evaluation {STAY}"
    assert caplog.messages.count(own) == 1
