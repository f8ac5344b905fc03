"""A server that makes up rounds or directions in its manifest, and asks for masks before anybody agreed."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from attacked import attacked
from fedmerit.errors import RefusedError
from fedmerit.identity import canonical, content
from fedmerit.protocol.direction import Manifest, direction_hash, scale_of
from fedmerit.protocol.memory import SETTLEMENT, SIGNED, TABLES
from fedmerit.protocol.messages import Ask, pack, slice_arrays
from fedmerit.protocol.settlement import Statement, agreement
from linear_federation import SIZE
from wire import unpack

VICTIM, FRIEND = "client-0", "client-3"


@contextmanager
def over(home, *, rounds=1, train=None, **scoring):
    """A run of five members whose rounds are over, and whose server has not settled it."""
    federation = attacked(home, rounds=rounds, scoring=scoring)
    federation.train = train or federation.train
    with federation.trained():
        yield federation


def made_up(federation, g, change):
    """The manifest of a server that changes rounds and puts this direction in all that it changes."""
    true = federation.clearing()._made()
    entries = [
        replace(one, **{"g": direction_hash(g), **new} if (new := change(one)) else {}) for one in true.rounds
    ]
    scale = scale_of(one.size for one in entries)
    return Manifest.from_body(replace(true, rounds=tuple(entries), scale=scale).body())


def opening(federation, manifest):
    shown = federation.coordinator.pool.settlement()
    body = {"manifest": canonical(manifest.body()), "slice": [shown.index, list(shown.path)], "last": {}}
    rounds = federation.config.training.rounds
    return Ask("open", federation.run_id, rounds, body, slice_arrays(shown))


def stated_by(federation, manifest, names):
    """Signed statements of members who lie: their numbers do not add up."""
    found = {}
    for name in names:
        rounds = [str(one.round) for one in manifest.rounds if name in one.participants]
        parts = (0.0,) * len(manifest.blocks)
        body = Statement(
            name, manifest.digest, dict.fromkeys(rounds, 12345), dict.fromkeys(rounds, parts)
        ).body(federation.run_id)
        signature = federation.keys[name].sign(content(name, "statement", body))
        found[name] = [canonical(body), signature]
    return found


def coordinate(number):
    return np.eye(1, SIZE, number, dtype=np.int32)[0]


@pytest.mark.parametrize("participants", [(FRIEND,), ("client-1", "client-2", FRIEND), ("a", "b", "c", "d")])
def test_a_manifest_with_a_round_of_few_members_or_strangers_is_refused(tmp_path, participants):
    """None of the honest ones would recompute its direction, from which the scale of all others follows."""
    with over(tmp_path) as federation:
        manifest = made_up(federation, coordinate(7), lambda one: {"participants": participants})
        with pytest.raises(RefusedError):
            federation.ask(VICTIM, opening(federation, manifest))
        assert federation.members[VICTIM].state(federation.run_id).get(SETTLEMENT) is None


def test_masks_are_shown_on_no_round_that_leaves_this_member_out(tmp_path):
    """They would tell the product of its update with a direction that it never saw: here one coordinate."""
    others = ("client-1", "client-2", FRIEND, "client-4")
    with over(tmp_path) as federation:
        manifest = made_up(federation, coordinate(7), lambda one: {"participants": others})
        federation.ask(VICTIM, opening(federation, manifest))
        shown = stated_by(federation, manifest, others)
        with pytest.raises(RefusedError):
            federation.ask(
                VICTIM, Ask("table", federation.run_id, 1, {"statements": shown}, {"g": coordinate(7)})
            )
        assert federation.members[VICTIM].state(federation.run_id).get(TABLES.of(1)) is None


def test_masks_are_shown_on_no_round_that_leaves_this_member_out_though_it_stated_on_others(tmp_path):
    """Where statements are withheld, the server needs no friend to say that an equation fails."""
    others = ("client-1", "client-2", FRIEND, "client-4")
    with over(tmp_path, rounds=2, visibility="coordinator") as federation:
        federation.members[VICTIM].state(federation.run_id).put(SIGNED.of(2), None)  # it acknowledged no sum
        g = coordinate(7)
        manifest = made_up(federation, g, lambda one: {"participants": others} if one.round == 2 else None)
        made = federation.clearing()
        federation.ask(VICTIM, opening(federation, manifest))
        direction = made._direction_ask(next(made.rounds()), manifest.rounds[0])
        federation.member(VICTIM).answer(direction, "here")
        federation.ask(VICTIM, Ask("agreed", federation.run_id, 2, {}))
        body = agreement(federation.run_id, manifest.digest, [], [])
        rows = [[name, [], federation.keys[name].sign(content(name, "agreed", body))] for name in others]
        answer = federation.ask(VICTIM, Ask("state", federation.run_id, 2, {"agreed": rows}))
        shown = {"statements": {VICTIM: unpack(answer)}, "sum": "1"}
        with pytest.raises(RefusedError):
            federation.ask(VICTIM, Ask("table", federation.run_id, 2, shown, {"g": g}))


def test_a_false_direction_is_answered_alike_whatever_the_update_is(tmp_path, caplog):
    """Whether a product with it could be stated would tell on which side of a plane the update lies."""
    g = np.full(SIZE, 32767, np.int32)
    answers = []
    for sign in (1, -1):
        alternating = np.where(np.arange(SIZE) % 2, sign, 1).astype(np.float32)

        def train(name, number, m0, own=alternating):
            return (own * (1 if name == VICTIM else 0.01)).astype(np.float32)

        with over(tmp_path / str(sign), train=train) as federation:
            manifest = made_up(federation, g, lambda one: {"m": one.m})
            federation.ask(VICTIM, opening(federation, manifest))
            archive = federation.coordinator.archive
            arrays = {"g": g, "m0": federation.models[0], "sum": archive.load("round", 1)["x"]}
            with caplog.at_level(logging.CRITICAL, "fedmerit"):
                answers.append(federation.ask(VICTIM, Ask("agree", federation.run_id, 1, {}, arrays)))
    assert answers == [pack(False)] * 2
