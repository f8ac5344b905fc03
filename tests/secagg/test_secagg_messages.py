"""Bytes damaged, moved, replayed or forged on their way: each is caught and changes nothing."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from parties import M0, A, B, C, D, Parties, caught, head_of, heads_in

from fedmerit.errors import (
    BindingError,
    MessageError,
    SignatureError,
)
from fedmerit.secagg import STAGES, Client
from fedmerit.secagg.messages import DOMAIN, head_limit, list_limit, to_broadcast


@pytest.mark.parametrize("stage", STAGES)
def test_a_flipped_bit_anywhere_is_caught_and_changes_nothing(stage):
    parties = Parties(3).play(until=stage)
    message = parties.answer(A)
    rng = np.random.default_rng(0)
    for bit in {*range(64), *rng.integers(0, 8 * len(message), 200).tolist()}:
        bad = bytearray(message)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises((MessageError, SignatureError, BindingError)):
            parties.server.receive(bytes(bad))
    assert A in parties.server.waiting
    assert parties.server.receive(message) == A
    for name in (B, C):
        parties.server.receive(parties.answer(name))
    parties.shown = parties.server.advance()
    assert parties.play().server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)


@pytest.mark.parametrize("stage", STAGES)
def test_a_truncated_or_longer_message_is_caught(stage):
    parties = Parties(3).play(until=stage)
    message = parties.answer(A)
    for bad in (b"", message[:3], message[:8], message[:20], message[:-1], message + b"\0", message * 2):
        with pytest.raises((MessageError, BindingError)) as error:
            parties.server.receive(bad, A)
        assert error.value.stage == stage
        assert error.value.member == A


def test_an_oversized_message_is_refused_before_it_is_parsed(monkeypatch):
    parties = Parties(3)
    monkeypatch.setattr("fedmerit.secagg.messages.open_head", lambda *_: pytest.fail("was parsed"))
    limit = 8 + head_limit(parties.setting.n) + 4 * parties.encoding.words
    with pytest.raises(MessageError, match=f"to {limit} bytes, got {limit + 1}"):
        parties.server.receive(b"FMS3" + bytes(limit - 3), A)
    with pytest.raises(MessageError, match="a head of"):
        parties.server.receive(b"FMS3" + b"\xff\xff\xff\xff" + bytes(200), A)
    parties.clients[A].advertise()
    with pytest.raises(MessageError, match="at most"):
        parties.clients[A].share(b"FMB3" + bytes(10**6))


def test_a_list_or_head_of_many_values_is_refused_before_they_are_made():
    """Within the size that a list of 26 heads can have; an empty map is one byte, and 64 in memory."""
    parties = Parties(26)
    limit = list_limit(26)
    parties.clients[A].advertise()
    head = b"\xdd" + struct.pack(">I", limit // 2) + b"\x80" * (limit // 2)
    listed = b"FMB3\x93\x03\xa9advertise" + head
    small = b"\xdd" + struct.pack(">I", 6000) + b"\x80" * 6000
    for call in (
        lambda: parties.clients[A].share(listed),
        lambda: parties.server.receive(b"FMS3" + struct.pack(">I", len(small)) + small, A),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(MessageError, match=r"expected at most \d+ values, got more"):
                call()
            assert tracemalloc.get_traced_memory()[1] < 3 * limit
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("stage", STAGES)
def test_a_replayed_message_is_refused(stage):
    parties = Parties(3).play(until=stage)
    message = parties.answer(A)
    parties.server.receive(message)
    with pytest.raises(BindingError, match="has sent its message already") as error:
        parties.server.receive(message)
    caught(error, BindingError, stage, A)


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_message_of_another_stage_is_refused(stage):
    parties = Parties(4).play(until=stage)
    late = parties.answer(D)
    for name in (A, B, C):
        parties.server.receive(parties.answer(name))
    parties.server.advance()
    with pytest.raises(BindingError, match="is due") as error:
        parties.server.receive(late)
    caught(error, BindingError, stage, D)


@pytest.mark.parametrize(
    "change", [{"round": 2}, {"attempt": 1}, {"run": "other"}, {"threshold": 4}, {"config_hash": M0}]
)
def test_a_message_of_another_run_round_attempt_threshold_or_config_is_refused(change):
    parties = Parties(4)
    other = replace(parties.setting, **change)
    message = Client(other, A, parties.identity[A]).advertise()
    with pytest.raises(BindingError) as error:
        parties.server.receive(message)
    caught(error, BindingError, "advertise", A)
    broadcast = to_broadcast(
        "advertise", [head_of(message), *heads_in(parties.play(until="share").shown[B])[1:]]
    )
    with pytest.raises(BindingError) as error:
        parties.clients[B].share(broadcast)
    caught(error, BindingError, "advertise", A)
    assert parties.clients[B].stage == "stopped"


def test_a_message_of_another_schedule_is_refused():
    parties = Parties(4)
    other = replace(parties.setting, members=parties.names[:3])
    with pytest.raises(BindingError, match="a different schedule") as error:
        parties.server.receive(Client(other, A, parties.identity[A]).advertise())
    caught(error, BindingError, "advertise", A)


def test_a_member_that_is_not_scheduled_is_refused():
    parties, five = Parties(4), Parties(5)
    with pytest.raises(BindingError, match="'hospital-e' is not scheduled"):
        parties.server.receive(five.clients["hospital-e"].advertise())


def test_a_message_under_another_members_name_is_refused():
    parties = Parties(3)
    with pytest.raises(BindingError, match="signed by hospital-b") as error:
        parties.server.receive(parties.answer(B), sender=A)
    caught(error, BindingError, "advertise", A)


@pytest.mark.parametrize("stage", [*STAGES, "decline"])
def test_a_forged_signature_is_refused(stage):
    due = "masked" if stage == "decline" else stage
    parties = Parties(3).play(until=due)
    with pytest.raises(SignatureError) as error:
        parties.server.receive(parties.forge(A, stage, [], signer=B))
    caught(error, SignatureError, stage, A)
    assert parties.server.declined == []


@pytest.mark.parametrize(
    "body",
    [
        [],
        [*[b"x" * 32] * 3, b"x" * 96, 1],
        [*[b"x" * 32] * 3, b"x" * 96, 1, b"x" * 64, 1],
        [*[b"x" * 31] * 3, b"x" * 96, 1, b"x" * 64],
        [*[b"x" * 32] * 3, b"x" * 64, 1, b"x" * 64],
        [*[b"x" * 32] * 3, [b"x" * 32] * 3, 1, b"x" * 64],
        [*[b"x" * 32] * 3, b"x" * 96, True, b"x" * 64],
        [*["x" * 32] * 3, b"x" * 96, 1, b"x" * 64],
        [[b"x" * 32] * 6],
        [None] * 6,
    ],
)
def test_a_signed_body_of_another_shape_is_refused(body):
    parties = Parties(3)
    with pytest.raises(MessageError, match="a body that no member") as error:
        parties.server.receive(parties.forge(A, "advertise", body))
    caught(error, MessageError, "advertise", A)


@pytest.mark.parametrize("version", [2, 4, True])
def test_another_version_is_refused(version, monkeypatch):
    parties = Parties(3)
    monkeypatch.setattr("fedmerit.secagg.messages.VERSION", version)
    message = parties.answer(A)
    monkeypatch.undo()
    with pytest.raises(MessageError, match=r"version|fields"):
        parties.server.receive(message)


def test_a_head_or_list_written_in_another_way_is_refused():
    """The same fields in other bytes have a valid signature, and another digest than its sender knows."""
    parties = Parties(3)
    message = parties.answer(A)
    content, signature = msgpack.unpackb(head_of(message))
    fields = msgpack.unpackb(content)
    assert content[:2] == b"\x99\x03"  # nine fields, the first is 3
    longer = b"\x99\xcc\x03" + content[2:]
    assert msgpack.unpackb(longer) == fields
    resigned = parties.identity[A].sign(DOMAIN + hashlib.sha256(longer).digest())
    wide = b"\x92\xc6" + len(content).to_bytes(4, "big") + content + b"\xc4\x40" + signature
    for head in (wide, msgpack.packb([longer, resigned])):
        with pytest.raises(MessageError, match="not encoded as"):
            parties.server.receive(b"FMS3" + len(head).to_bytes(4, "big") + head)
    parties.server.receive(message)
    for name in (B, C):
        parties.server.receive(parties.answer(name))
    shown = parties.server.advance()[A]
    assert shown[:6] == b"FMB3\x93\x03"
    with pytest.raises(MessageError, match="not encoded as"):
        parties.clients[A].share(b"FMB3\x93\xcc\x03" + shown[6:])
    assert parties.clients[A].share(shown)
