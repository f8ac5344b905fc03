"""Members that are told to train otherwise than the others are not summed, by whatever way they are told."""

import numpy as np
import pytest
from federation_in import NODES, client, grid_of, run, task
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from lies import LIAR, checked, exchange_of

import fedmerit.flower
from fedmerit.errors import ConfigError, MessageError, ProtocolError
from fedmerit.flower.codec import config_digest, digest, put
from fedmerit.protocol.messages import Parcel

VALUES = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
OTHERS = [1, 1.0, True, "1", b"1", 0.0, -0.0, 0, False, ""]


def same(one, other):
    """Equal, value by value, with the types that Python calls equal told apart."""
    return {key: (type(value), repr(value)) for key, value in one.items()} == {
        key: (type(value), repr(value)) for key, value in other.items()
    }


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_a_run_config_does_not_count(config, random):
    keys = list(config)
    random.shuffle(keys)
    assert config_digest({key: config[key] for key in keys}) == config_digest(config)


@given(
    st.dictionaries(st.sampled_from("ab"), st.sampled_from(OTHERS), max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from(OTHERS), max_size=2),
)
def test_run_configs_have_the_same_digest_only_if_they_are_the_same(one, other):
    assert (config_digest(one) == config_digest(other)) == same(one, other)


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, 2**64, np.float32(1)])
def test_a_run_config_of_other_things_is_refused(value):
    with pytest.raises(MessageError, match=r"^run config: "):
        config_digest({"rate": value})


def test_whatever_a_train_message_says_is_in_its_digest(home):
    grid_of(home)  # messages are made inside a run

    def made(kind="train", **config):
        content = put(Parcel(b"ours"))
        content["arrays"] = ArrayRecord(task.first_model())
        return digest(Message(content, dst_node_id=1, message_type=kind), config_digest(config))

    assert made() == made()
    assert len({made(), made("train.other"), made(rate=0.1), made(rate=0.2), made(rates=0.1)}) == 5


RATE = {"learning-rate": 0.1, "local-epochs": 3, "augment": True, "optimiser": "sgd"}


def with_configs(home, others=RATE, **liars):
    grid = grid_of(home)
    for name, node in NODES.items():
        grid.contexts[node].run_config = {**others, **(liars if name == LIAR else {})}
    return grid


def test_members_with_one_run_config_and_their_own_node_configs_are_summed(home):
    """In whatever order the run config comes to them."""
    grid = with_configs(home)
    grid.contexts[NODES[LIAR]].run_config = dict(reversed(RATE.items()))
    grid.contexts[NODES[LIAR]].node_config["data"] = "/home/us"
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert not strategy.notes
    assert [len(one.reports) for one in rounds] == [4, 4]


@pytest.mark.parametrize("change", [{"learning-rate": 0.0}, {"local-epochs": 3.0}, {"more": 1}])
def test_a_member_that_is_handed_another_run_config_is_not_summed(home, change):
    strategy, rounds = run(home, with_configs(home, **change))
    notes = checked(strategy, rounds, home)
    assert all(LIAR not in one.included and len(one.reports) == 3 for one in rounds)
    assert f"{LIAR} has a different run config from most members: its update cannot be summed" in notes


def test_a_member_that_is_asked_for_another_kind_of_training_is_not_summed(home):
    """The type of a message chooses the function: the same one here, but a member cannot know."""
    app = fedmerit.flower.secure(ClientApp(), value=task.value, seed=0)
    app.train()(client.train_locally)
    app.train("other")(client.train_locally)
    grid = grid_of(home, dict.fromkeys(NODES, app))

    def before(node, message):
        if exchange_of(message).exchange == "train" and node == NODES[LIAR]:
            message.metadata.message_type = "train.other"

    grid.before = before
    strategy, rounds = run(home, grid)
    notes = checked(strategy, rounds, home)
    assert all(LIAR not in one.included and len(one.reports) == 3 for one in rounds)
    assert any("masked for a different encoding or different weights" in note for note in notes)


def test_a_run_config_that_cannot_be_compared_is_told_before_anybody_trains(home):
    with pytest.raises((ConfigError, ProtocolError), match=r"run config: learning-rate must be a number"):
        run(home, with_configs(home, {"learning-rate": [1]}), join=0.5)


def test_an_app_that_writes_into_its_run_config_is_summed_all_the_same(home):
    """A learning rate that falls, say: what it wrote ends with the call, so that members stay comparable."""
    app = fedmerit.flower.secure(ClientApp(), value=task.value)
    seen = []

    @app.train()
    def train(message, context):
        seen.append(context.run_config["learning-rate"])
        context.run_config["learning-rate"] *= 0.5
        return client.app.inner(message, context)

    grid = grid_of(home, dict.fromkeys(NODES, app))
    for node in NODES.values():
        grid.contexts[node].run_config = dict(RATE)
    _, rounds = run(home, grid)
    assert [len(one.included) for one in rounds] == [4, 4]
    assert set(seen) == {RATE["learning-rate"]}
