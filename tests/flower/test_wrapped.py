"""The strategy inside Contributions: what it has is reachable; one that aggregates itself is told so."""

import copy
import pickle

import pytest
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx
from small import contributions, members, start


class Custom(FedAvg):
    """A user's own, which looks at its replies."""

    def __init__(self, **options):
        super().__init__(fraction_evaluate=0.0, **options)
        self.replies, self.mine = [], "kept"

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.replies.append(len(replies))
        return super().aggregate_train(server_round, replies)

    def double(self, number):
        """A method of the user's."""
        return 2 * number

    @property
    def best(self):
        """A property of the user's."""
        return max(self.replies)


class Further(Custom):
    """Inherits it."""


def test_what_the_strategy_has_is_reachable(home):
    inner = Custom(fraction_train=1.0, min_train_nodes=3)
    wrapped = contributions(home, inner)
    assert (wrapped.fraction_train, wrapped.min_train_nodes, wrapped.mine) == (1.0, 3, "kept")
    assert wrapped.double(21) == 42
    assert wrapped.weighted_by_key == "num-examples"
    start(wrapped, members(home), 2)
    assert wrapped.replies is inner.replies
    assert wrapped.best == 1


def test_ours_come_first_and_what_nobody_has_is_an_attribute_error(home):
    inner = Custom()
    inner.notes = inner.join = "the strategy's"
    wrapped = contributions(home, inner, join=7.0)
    assert wrapped.join == 7.0
    assert wrapped.notes == []
    with pytest.raises(AttributeError, match="'Custom' object has no attribute 'fraction_trian'"):
        _ = wrapped.fraction_trian
    assert getattr(wrapped, "nothing", None) is None


def test_setting_what_is_the_strategys_is_refused_instead_of_hiding_it(home):
    wrapped = contributions(home, Custom(fraction_train=1.0))
    with pytest.raises(AttributeError, match="fraction_train belongs to the Custom inside: set it there"):
        wrapped.fraction_train = 0.5
    assert wrapped.strategy.fraction_train == 1.0
    wrapped.join = 9.0
    wrapped.something_new = 1
    assert (wrapped.join, wrapped.something_new) == (9.0, 1)


def test_it_can_be_copied(home):
    wrapped = contributions(home, FedAvg(fraction_evaluate=0.0))
    assert copy.copy(wrapped).min_train_nodes == 2
    assert copy.copy(wrapped).strategy is wrapped.strategy
    assert pickle.loads(pickle.dumps(wrapped)).min_train_nodes == 2


@pytest.mark.parametrize(
    ("strategy", "told"),
    [(Custom, "Custom"), (Further, "Custom"), (FedAvg, ""), (FedProx, ""), (FedAdam, "")],
)
def test_an_aggregation_of_the_users_own_is_told_once_that_it_sees_one_reply(home, caplog, strategy, told):
    options = {"proximal_mu": 0.1} if strategy is FedProx else {}
    wrapped = contributions(home, strategy(**options))
    start(wrapped, members(home), 2)
    lines = [text for text in caplog.messages if "sees one reply per round, from the masked sum" in text]
    assert [line.partition(".")[0] for line in lines] == ([told] if told else [])
