"""Rounds that are aborted: what the result is, when the run is given up, and what the folder then holds."""

import copy
import json
import pickle

import numpy as np
import pytest
from federation_in import NODES, rounds_in
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg
from lies import exchange_of
from small import contributions, first, members, start

import fedmerit.flower
from fedmerit.errors import ConfigError, DoubtfulShares, ProtocolError, RunAborted
from fedmerit.flower.codec import Shape
from fedmerit.ledger.chain import Ledger
from fedmerit.protocol.outcome import model_hash
from fedmerit.verify import verify_folder

pytestmark = pytest.mark.long

LOST = ("client-2", "client-3")


def losing(home, which, **options):
    """Two of four members, one too many, fall silent before the check of these rounds, and come back."""
    grid = members(home, **options)

    def before(node, message):
        ask = exchange_of(message)
        if ask.exchange == "check" and ask.round in which:
            grid.dead |= {NODES[name] for name in LOST}

    def revived():
        grid.dead.clear()
        return list(NODES.values())

    grid.before, grid.get_node_ids = before, revived
    return grid


def kinds_in(folder):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return [record.kind for record in ledger.records()], [record.body for record in ledger.records("end")]


def vector(arrays):
    return Shape.of(first()).read(arrays)


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
    with pytest.raises(
        RunAborted, match=r"^3 rounds in a row were aborted \(4 of 9 rounds aborted, 2 closed"
    ):
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


def test_an_error_of_the_users_own_between_rounds_leaves_a_closed_ledger(home):
    class Breaks(FedAvg):
        def configure_evaluate(self, server_round, *args):
            if server_round == 2:
                raise ZeroDivisionError("the user's own")
            return []

    strategy = contributions(home, Breaks(min_train_nodes=2, min_available_nodes=2))
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        start(strategy, members(home), 5)
    lines = list(verify_folder(home / "run"))
    assert "rounds: 2 of 5, 0 aborted" in lines
    assert any(line.startswith("heads: 4 of 4 members signed the head of record") for line in lines)
    _, (end,) = kinds_in(home / "run")
    assert end["rounds"] == 2
    assert len(strategy.scores["rounds"]) == 2


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

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("train", 2):
            raise MemoryError("the server's own")

    grid.before = before
    with pytest.raises(MemoryError, match="the server's own"):
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

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("share", 2):
            grid.dead |= set(list(NODES.values())[:gone])

    grid.before = before
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


def test_more_members_than_joined_are_missed_before_the_first_round(home):
    grid = members(home)
    grid.dead |= {next(iter(NODES.values()))}
    own = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=4)
    with pytest.raises(ProtocolError, match=r"3 of 4 members joined within 0\.05 s, 4 are needed"):
        start(contributions(home, own, join=0.05), grid, 2)


class TellsOtherwise(FedAvg):
    """Tells one member to train otherwise in round 2."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if server_round == 2:
            messages[0] = copy.deepcopy(messages[0])
            messages[0].content["config"]["lr"] = 7.0
        return messages


class Forgets(FedAvg):
    """Drops an array from the model after round 2."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if server_round == 2:
            del arrays["norm.running_var"]
        return arrays, metrics


@pytest.mark.parametrize(
    ("strategy", "rounds", "closed"), [(TellsOtherwise, 4, 1), (Forgets, 4, 2), (Forgets, 2, 2)]
)
def test_a_strategys_own_mistake_between_rounds_leaves_a_closed_ledger(home, strategy, rounds, closed):
    own = strategy(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    with pytest.raises(ProtocolError, match=r"a message that differs from the others|norm\.running_var"):
        start(contributions(home, own), members(home), rounds)
    kinds, (end,) = kinds_in(home / "run")
    assert end["rounds"] == closed
    assert kinds[-4:] == ["seen"] * 4
    assert f"rounds: {closed} of {rounds}, 0 aborted" in list(verify_folder(home / "run"))


def test_a_fraction_that_flower_rounds_down_below_the_threshold_is_refused(home):
    """Of four, .75 are three, and .74 two by Flower's rule, three by rounding."""
    contributions(home, FedAvg(fraction_train=0.75))
    contributions(home, FedAvg(fraction_train=0.74, min_train_nodes=3))
    with pytest.raises(
        ConfigError, match=r"0\.74 of 4 members schedules 2, but 3 must stay to the end: .*=3"
    ):
        contributions(home, FedAvg(fraction_train=0.74))


def test_the_errors_survive_a_pickle():
    for error in (
        RunAborted("x", closed=(1,), aborted=(2, 3)),
        DoubtfulShares("x", ("swapped",)),
        ProtocolError("x", stage="join", member="A"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
