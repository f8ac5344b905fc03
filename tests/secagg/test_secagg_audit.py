"""An opening and the public transcript give the masked words back, bit for bit, and no other opening does."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest
from parties import Parties, head_of

from fedmerit.errors import BindingError, BoundError, ProtocolError, ShareError
from fedmerit.secagg import nonce_opens, replay

A = "hospital-a"


def lists(parties):
    shown = parties.server.broadcasts
    return {"advertised": shown["advertise"], "shared": shown["share"], "masked": shown["masked"]}


@pytest.mark.parametrize("kind", [{}, {"weights": [5, 6, 7, 8, 9]}, {"public": (0.5, 1.0, 2.0, 3.0, 1.5)}])
@pytest.mark.parametrize("lost", [[], [("share", "hospital-e")], [("masked", "hospital-b")]])
def test_the_masked_message_is_rebuilt_bit_for_bit(kind, lost):
    parties = Parties(5, **kind).play(lost=lost)
    for name in parties.server.result.included:
        opening = parties.clients[name].opening()
        words = replay(parties.setting, parties.task, opening, parties.vectors[name], **lists(parties))
        message = parties.sent["masked"][name]
        assert words.tobytes() == message[8 + len(head_of(message)) :]


def test_only_the_update_that_was_sent_can_be_opened():
    parties = Parties(4, weights=[5, 6, 7, 8]).play()
    opening, delta = parties.clients[A].opening(), parties.vectors[A]
    moved = delta.copy()
    moved[0] = np.nextafter(moved[0], np.float32(2))
    lies = [
        (opening, moved, BindingError, "masked something else"),
        (replace(opening, weight=4), delta, BindingError, "masked something else"),
        (replace(opening, rounding=b"other"), delta, BindingError, "masked something else"),
        (replace(opening, mask=os.urandom(32)), delta, ShareError, "another mask key"),
        (replace(opening, seed=os.urandom(32)), delta, ShareError, "another self-mask seed"),
        (replace(opening, member="hospital-b"), delta, ShareError, "another mask key"),
        (replace(opening, member="nobody"), delta, BindingError, "no masked input"),
        (opening, delta * 100, BoundError, "beyond the bound"),
        (opening, delta[1:], BindingError, "must have shape"),
        (replace(opening, weight=99), delta, BoundError, "secret weight"),
    ]
    for lie, vector, error, says in lies:
        with pytest.raises(error, match=says) as caught:
            replay(parties.setting, parties.task, lie, vector, **lists(parties))
        assert (caught.value.stage, caught.value.member) == ("audit", lie.member)


def test_an_audit_needs_the_transcript_of_the_same_attempt():
    parties = Parties(4).play()
    other = parties.retry(released={}).play()
    opening = parties.clients[A].opening()
    for change in ({"advertised"}, {"shared"}, {"masked"}, {"advertised", "shared", "masked"}):
        mixed = lists(parties) | {key: lists(other)[key] for key in change}
        with pytest.raises(ProtocolError):
            replay(parties.setting, parties.task, opening, parties.vectors[A], **mixed)


def test_nothing_can_be_opened_before_it_was_masked():
    parties = Parties(3).play(until="masked")
    with pytest.raises(BindingError, match="nothing to open"):
        parties.clients[A].opening()


def test_nonces_open_their_commitments_only():
    parties = Parties(3).play(until="share")
    shown = parties.server.broadcasts["advertise"]
    nonce = parties.clients[A].nonce
    assert nonce_opens(parties.setting, shown, A, nonce)
    assert not nonce_opens(parties.setting, shown, "hospital-b", nonce)
    assert not nonce_opens(parties.setting, shown, A, os.urandom(32))
    assert not nonce_opens(parties.setting, shown, "nobody", nonce)


def test_the_server_keeps_what_a_ledger_needs():
    parties = Parties(4).play(lost=[("masked", "hospital-d")])
    heads = parties.server.heads
    assert [sorted(heads[stage]) for stage in heads] == [[*parties.names]] * 2 + [[*parties.names[:3]]] * 3
    for name in parties.names[:3]:
        message = parties.sent["masked"][name]
        payload = message[8 + len(head_of(message)) :]
        assert heads["masked"][name].body[2] == hashlib.sha256(payload).digest()
