"""Without the stage check: the same sum one exchange sooner, for servers that keep to the protocol."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from parties import A, D, Parties, heads_in

from fedmerit.errors import BindingError, RefusedError
from fedmerit.secagg import Client, Server
from fedmerit.secagg.messages import to_broadcast


@dataclass
class Unchecked(Parties):
    """The same people without the check."""

    def __post_init__(self):
        super().__post_init__()
        self.setting = replace(self.setting, checked=False)
        self.clients = {n: Client(self.setting, n, self.identity[n]) for n in self.names}
        self.server = Server(self.setting, self.task)

    def play(self, until=None, lost=()):
        gone = set()
        for stage in self.setting.stages[self.setting.stages.index(self.server.stage) :]:
            if stage == until:
                return self
            gone |= {name for at, name in lost if at == stage}
            for name in self.names:
                if name in self.shown and name not in gone:
                    self.server.receive(self.answer(name), name)
            self.shown = self.server.advance()
        return self


def test_the_stages_are_four():
    assert Unchecked().setting.stages == ("advertise", "share", "masked", "unmask")


@pytest.mark.parametrize("lost", [[], [("share", D)], [("masked", D)], [("unmask", D)]])
def test_the_sum_is_that_of_who_masked(lost):
    parties = Unchecked().play(lost=lost)
    included = parties.server.result.included
    assert included == tuple(n for n in parties.names if lost in ([], [("unmask", D)]) or n != D)
    np.testing.assert_allclose(parties.server.result.mean, parties.plain_mean(included), atol=1e-8)


def test_it_is_another_session_and_says_so():
    """Nobody can be talked out of the check within an attempt that has it."""
    checked, unchecked = Parties(), Unchecked()
    assert replace(unchecked.setting, checked=True).session != unchecked.setting.session
    assert any("no check" in note for note in unchecked.setting.notes)
    assert not any("no check" in note for note in checked.setting.notes)
    parties = checked.play(until="check")
    with pytest.raises(BindingError, match="check is due, not unmask"):
        parties.clients[A].unmask(parties.shown[A])


def test_a_saved_client_knows_its_mode():
    parties = Unchecked().play(until="unmask")
    client = parties.clients[A]
    again = Client.restore(client.dump(), parties.identity[A], released=client.released)
    assert again.stage == "unmask"
    assert again.setting.checked is False
    again.unmask(parties.shown[A])
    rolled_back = Client.restore(client.dump(), parties.identity[A], released=client.released)
    with pytest.raises(RefusedError, match="has done this before"):
        rolled_back.unmask(parties.shown[A])


def test_what_is_given_up_two_lists_are_not_noticed():
    """A server that shows one member another list gets its shares, where the check would stop everybody."""
    parties = Unchecked().play(until="unmask")
    heads = heads_in(parties.shown[A])
    shorter = to_broadcast("masked", heads[:3])
    assert parties.clients[A].unmask(shorter)  # releases D's mask key
    assert parties.clients["hospital-b"].unmask(parties.shown[A])  # releases D's self-mask
