"""A federation small enough to run many of: real data, a real network, seconds; scored by reports."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from fedmerit.config import from_dict

TINY = {
    "data": {"test_size": 50},
    "partition": {"clients": 4, "scheme": "sizes", "sizes": [60, 50, 70, 40]},
    "model": {"name": "network:tiny"},
    "training": {"rounds": 2, "local_epochs": 1, "batch_size": 16},
    "scoring": {"method": "reports", "utilities": ["expected-accuracy", "accuracy"]},
}


ALL = "scoring.utilities=['expected-accuracy', 'accuracy', 'brier']"
"""The utilities that a run has unless told otherwise."""


def tiny(*overrides):
    return from_dict(TINY, overrides)


class Seen:
    """An analysis that keeps the plain rounds by number: M0, the outcome, and everybody's update."""

    def __init__(self):
        self.rounds = {}

    def summed(self, plain):
        updates = np.stack([plain.update(name) for name in plain.outcome.included])
        self.rounds[plain.outcome.round] = (plain.m0, plain.outcome, updates)


LOSING = []  # whom the contexts of `losing` lose, the innermost last


@contextmanager
def losing(lost):
    """Lose members of rehearsals within this context: {"client-2": "3:masked"}, from that stage on.

    Within another such context, this one counts.
    """
    from fedmerit.protocol.messages import Ask, exchange_of
    from fedmerit.secagg.setting import STAGES
    from fedmerit.simulation.run import LocalTransport

    order, real = [exchange_of(stage) for stage in (*STAGES, "report")], LocalTransport.exchange

    def is_lost(name, number, kind):
        if LOSING[-1] is not lost:
            return False
        at, stage = lost.get(name, "0:report").split(":")
        return int(at) == number and kind in order[order.index(exchange_of(stage)) :]

    def exchange(self, kind, asks):
        number = Ask.unpack(next(iter(asks.values())))[0].round
        here = {name: parcel for name, parcel in asks.items() if not is_lost(name, number, kind)}
        for name in here if kind in ("check", "unmask") and LOSING[-1] is lost else ():
            self.members[name].early = not is_lost(name, number + 1, "share")
        if here:
            yield from real(self, kind, here)

    LOSING.append(lost)
    try:
        with patch.object(LocalTransport, "exchange", exchange):
            yield
    finally:
        LOSING.pop()


@contextmanager
def received():
    """Record everything that the server of rehearsals receives: (exchange, member, bytes)."""
    from fedmerit.simulation.run import LocalTransport

    transcript, real = [], LocalTransport.exchange

    def exchange(self, kind, asks):
        for name, answer in real(self, kind, asks):
            transcript.append((kind, name, answer))
            yield name, answer

    with patch.object(LocalTransport, "exchange", exchange):
        yield transcript
