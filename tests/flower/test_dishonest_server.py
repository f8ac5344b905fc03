"""What a server can put into Flower's own messages, and what a member may put into its metrics."""

import numpy as np
import pytest
from federation_in import NODES, client, grid_of, run, task
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from lies import LIAR, checked, exchange_of

from fedmerit.errors import RefusedError


def test_a_secured_app_gives_no_plain_update(home):
    """A server that leaves fedmerit out gets nothing."""
    grid = grid_of(home)
    content_ = RecordDict({"arrays": ArrayRecord(task.first_model())})
    for kind in ("train", "train.other"):
        with pytest.raises(RefusedError, match="asked for a plain update"):
            client.app(Message(content_, dst_node_id=101, message_type=kind), grid.contexts[101])


@pytest.mark.parametrize("what", ["config", "integers"])
def test_members_that_are_told_to_train_differently_sum_nothing(home, what):
    """With a learning rate of 0 for all others, the sum would be one member's update."""
    grid = grid_of(home)

    def before(node, message):
        if exchange_of(message).exchange == "train" and node == NODES[LIAR]:
            if what == "config":
                message.content["config"]["lr"] = 0.0
            else:
                message.content["arrays"]["mask"] = fedmerit_integers()

    grid.before = before
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert all(LIAR not in one.included for one in rounds)
    if what == "config":  # the integers break its training instead
        assert any("masked for a different encoding or different weights" in note for note in strategy.notes)


def fedmerit_integers():
    return Array(np.ones(3, np.int64))


@pytest.mark.parametrize("number", [0.0, float("nan"), 1e308])
def test_a_members_metric_never_becomes_the_weight_of_the_sum(home, number):
    grid = grid_of(home)

    def alter(node, message, reply):
        if node == NODES[LIAR] and exchange_of(message).exchange == "train":
            reply.content["metrics"] = MetricRecord({"num-examples": number, "loss": number})
        return reply

    grid.alter = alter
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert [len(one.reports) for one in rounds] == [4, 4]
