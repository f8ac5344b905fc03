"""Rounds that are aborted: what the result is, when the run is given up, and what the folder then holds."""

import copy
import json
import pickle

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from federation_in import NODES, bodies_of, records_of, rounds_in
from fedmerit.errors import DoubtfulShares, ProtocolError, RunAborted
from fedmerit.flower.codec import RecordShape
from fedmerit.protocol.outcome import model_hash
from fedmerit.verify import verify_folder
from lies import at, dies, exchange_of
from refusals import refused
from small import contributions, first, members, start

pytestmark = pytest.mark.long

LOST = ("client-2", "client-3")


def losing(home, which, **options):
    """Two of four members, one too many, fall silent before the check of these rounds, and come back."""
    grid = members(home, **options)
    for number in which:
        at(grid, "check", number, lambda message: grid.dead.update(NODES[name] for name in LOST))

    def revived():
        grid.dead.clear()
        return list(NODES.values())

    grid.get_node_ids = revived
    return grid


def kinds_in(folder):
    return [record.kind for record in records_of(folder)], bodies_of(folder, "end")


def vector(arrays):
    return RecordShape.of(first()).read(arrays)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_run_without_a_closed_round_raises_and_names_rounds_reason_and_members(home, rounds):
    strategy = contributions(home)
    with pytest.raises(RunAborted) as caught:
        start(strategy, losing(home, {1, 2, 3}), rounds)
    assert isinstance(caught.value, ProtocolError)
    assert (caught.value.closed, caught.value.aborted) == ((), tuple(range(1, rounds + 1)))
    said = str(caught.value)
    assert said.startswith(f"no round was closed ({rounds} of {rounds} rounds aborted, 0 closed); ")
    assert "stage check: 2 members left, 3 are needed" in said
    for number in range(1, rounds + 1):
        assert f"round {number} aborted" in said
    for name in LOST:
        assert f"{name} is away: Node Unavailable" in said
    assert f"rounds: {rounds} of {rounds}, {rounds} aborted" in list(verify_folder(home / "run"))
    kinds, (end,) = kinds_in(home / "run")
    assert end == {"rounds": rounds, "model": model_hash(vector(first()))}
    assert kinds[-5:] == ["end", *["seen"] * 4]  # all are back by then


def test_three_aborted_rounds_in_a_row_end_the_run_and_what_was_closed_stays_good(home):
    strategy, grid = contributions(home), losing(home, {2, 4, 5, 6})
    with refused(RunAborted, closed=(1, 3), aborted=(2, 4, 5, 6)):
        start(strategy, grid, 9)
    assert max(exchange_of(message).round for _, message, _ in grid.seen) == 6
    lines = list(verify_folder(home / "run"))
    assert "rounds: 6 of 9, 4 aborted" in lines
    assert any(line.startswith("heads: 4 of 4 members signed the head of record") for line in lines)
    rounds = rounds_in(home / "run")
    assert [bool(one.reports) for one in rounds] == [True, False, True, False, False, False]
    scores = json.loads((home / "run" / "scores.json").read_text())
    assert strategy.scores == scores
    assert [one["aborted"] for one in scores["rounds"] if one["scores"] is None] == [True] * 4
    last = vector(fedmerit.flower.last_model(home / "run", first()))
    _, (end,) = kinds_in(home / "run")
    assert end == {"rounds": 6, "model": model_hash(last)}
    assert rounds[2].body["m"] == model_hash(last) != model_hash(vector(first()))


@pytest.mark.parametrize("lost", [{2, 3}, {2, 3, 5, 6}, {1, 2, 4, 5}, {4, 5, 6}])
def test_outages_that_end_and_those_at_the_end_cost_rounds_and_not_the_run(home, lost):
    """Of six rounds: never three in a row, or three with which the run was over anyway."""
    result = start(contributions(home), losing(home, lost), 6)
    rounds = rounds_in(home / "run")
    assert {one.number for one in rounds if one.aborted} == lost
    good = max(one.number for one in rounds if not one.aborted)
    assert model_hash(vector(result.arrays)) == rounds[good - 1].body["m"]
    list(verify_folder(home / "run"))


def test_an_error_before_the_first_round_leaves_a_folder_that_can_be_used_again(home):
    def fails(number, arrays):
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError):
        start(contributions(home), members(home), 2, evaluate_fn=fails)
    kinds, ends = kinds_in(home / "run")
    assert set(kinds) == {"run", "pool", "join"}
    assert not ends
    start(contributions(home), members(home), 2)


def test_an_error_in_a_round_leaves_it_open_and_is_the_one_that_is_raised(home):
    strategy = contributions(home)
    grid = members(home)
    at(grid, "train", 2, dies(MemoryError("the server's own")))
    with pytest.raises(MemoryError):
        start(strategy, grid, 3)
    kinds, ends = kinds_in(home / "run")
    assert kinds[-1] == "schedule"
    assert not ends
    assert "rounds: 1 of 3, 0 aborted" in list(verify_folder(home / "run"))


def test_a_strategy_that_only_evaluates_gets_the_first_model_back(home):
    strategy = contributions(home, FedAvg(fraction_train=0.0, fraction_evaluate=0.0))
    result = start(strategy, members(home), 1, evaluate_fn=lambda number, arrays: MetricRecord({"x": 1}))
    assert np.array_equal(vector(result.arrays), vector(first()))


@pytest.mark.parametrize(
    ("gone", "available"),
    [(3, 2), (4, 2), (1, 4)],
    ids=["too few", "nobody", "fewer than the strategy wants"],
)
def test_members_that_never_come_back_end_the_run(home, gone, available):
    """Flower's own strategies ask for ever who is there."""
    grid = members(home)
    at(grid, "train", 2, lambda message: grid.dead.update(list(NODES.values())[:gone]))
    own = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=available)
    needed = max(3, available)
    with pytest.raises(RunAborted, match=rf"^{4 - gone} members are present, {needed} are needed") as caught:
        start(contributions(home, own, join=0.05), grid, 6)
    assert "client-0" in str(caught.value)
    assert 1 in caught.value.closed
    kinds, ends = kinds_in(home / "run")
    assert "end" in kinds
    assert ends[0]["rounds"] == len(rounds_in(home / "run"))
    list(verify_folder(home / "run"))


class TellsOtherwise(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if server_round == 2:
            messages[0] = copy.deepcopy(messages[0])
            messages[0].content["config"]["lr"] = 7.0
        return messages


class Forgets(FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if server_round == 2:
            del arrays["norm.running_var"]
        return arrays, metrics


class Breaks(FedAvg):
    def configure_evaluate(self, server_round, *args):
        if server_round == 2:
            raise ZeroDivisionError("the user's own")
        return []


@pytest.mark.parametrize(
    ("strategy", "rounds", "closed", "error", "words"),
    [
        (TellsOtherwise, 4, 1, ProtocolError, "a message that differs from the others"),
        (Forgets, 4, 2, ProtocolError, "norm.running_var"),
        (Forgets, 2, 2, ProtocolError, "norm.running_var"),
        (Breaks, 5, 2, ZeroDivisionError, "the user's own"),
    ],
)
def test_a_mistake_of_the_users_own_between_rounds_leaves_a_closed_ledger(
    home, strategy, rounds, closed, error, words
):
    wrapped = contributions(home, strategy(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2))
    with pytest.raises(error) as caught:
        start(wrapped, members(home), rounds)
    assert words in str(caught.value)
    kinds, (end,) = kinds_in(home / "run")
    assert end["rounds"] == len(wrapped.scores["rounds"]) == closed
    assert kinds[-4:] == ["seen"] * 4
    lines = list(verify_folder(home / "run"))
    assert f"rounds: {closed} of {rounds}, 0 aborted" in lines
    assert any(line.startswith("heads: 4 of 4 members signed the head of record") for line in lines)


def test_the_errors_survive_a_pickle():
    for error in (
        RunAborted("x", closed=(1,), aborted=(2, 3)),
        DoubtfulShares("x", ("swapped",)),
        ProtocolError("x", stage="join", member="A"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
