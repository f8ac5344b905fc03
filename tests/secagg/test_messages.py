"""Bytes damaged, moved, replayed or forged on their way, or made at random: caught, and nothing changes."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from fedmerit.errors import BindingError, MessageError, ProtocolError, SignatureError
from fedmerit.secagg import masks, messages
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import (
    DOMAIN,
    head_limit,
    list_limit,
    open_broadcast,
    open_head,
    open_message,
    to_broadcast,
)
from fedmerit.secagg.plain import load_state
from fedmerit.secagg.setting import STAGES, Released
from parties import M0, A, B, C, D, Parties, head_of, heads_in
from refusals import refused


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
    parties.collect((B, C))
    parties.shown = parties.server.advance()
    assert parties.play().server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)


@pytest.mark.parametrize("word_bytes", [4, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_a_truncated_or_longer_message_is_caught(stage, word_bytes):
    parties = Parties(3, word_bytes=word_bytes).play(until=stage)
    message = parties.answer(A)
    shorter = [message[:size] for size in (0, 3, 8, 20, -1)]
    for bad in (*shorter, message + b"\0", message + bytes(word_bytes), message * 2):
        with pytest.raises((MessageError, BindingError)) as error:
            parties.server.receive(bad, A)
        assert (error.value.stage, error.value.member) == (stage, A)
    assert parties.server.receive(message, A) == A


def test_an_oversized_message_is_refused_before_it_is_parsed(monkeypatch):
    parties = Parties(3)
    long, setting = bytes(head_limit(3) + 100), parties.setting
    with pytest.raises(MessageError, match="a head has at most"):
        open_head(long, setting)
    masked = Parties(3).play(until="masked")
    with refused(MessageError, stage="masked", member=A):
        masked.server.receive(masked.answer(A) + long, A)
    monkeypatch.setattr("fedmerit.secagg.messages.open_head", lambda *_: pytest.fail("was parsed"))
    limit = 8 + head_limit(setting.n) + 4 * parties.encoding.words
    for message in (b"FMS1" + bytes(limit - 3), b"FMS1" + b"\xff\xff\xff\xff" + bytes(200)):
        with refused(MessageError, stage="advertise", member=A):
            parties.server.receive(message, A)
    parties.clients[A].advertise()
    with pytest.raises(MessageError, match="at most"):
        parties.clients[A].share(b"FMB1" + bytes(10**6))


def test_a_list_or_head_of_many_values_is_refused_before_they_are_made():
    """Within the size that a list of 26 heads can have; an empty map is one byte, and 64 in memory."""
    parties = Parties(26)
    limit = list_limit(26)
    parties.clients[A].advertise()
    head = b"\xdd" + struct.pack(">I", limit // 2) + b"\x80" * (limit // 2)
    listed = b"FMB1\x92\xa9advertise" + head
    small = b"\xdd" + struct.pack(">I", 6000) + b"\x80" * 6000
    for call in (
        lambda: parties.clients[A].share(listed),
        lambda: parties.server.receive(b"FMS1" + struct.pack(">I", len(small)) + small, A),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(MessageError):
                call()
            assert tracemalloc.get_traced_memory()[1] < 3 * limit
        finally:
            tracemalloc.stop()


def test_no_head_is_opened_after_the_first_that_is_repeated(monkeypatch):
    parties = Parties(3).play(until="share")
    heads, opened = heads_in(parties.shown[A]), []

    def noted(raw, setting):
        opened.append(raw)
        return open_head(raw, setting)

    monkeypatch.setattr(messages, "open_head", noted)
    with refused(BindingError, stage="advertise", member=A):
        messages.open_broadcast(to_broadcast("advertise", 3 * heads), parties.setting, "advertise")
    assert opened == [*heads, heads[0]]


@pytest.mark.parametrize("stage", STAGES)
def test_a_replayed_or_late_message_is_refused(stage):
    parties = Parties(4).play(until=stage)
    late = parties.answer(D)
    parties.collect((A, B, C))
    with refused(BindingError, stage=stage, member=A):
        parties.server.receive(parties.sent[stage][A])
    parties.server.advance()
    with refused(BindingError, stage=stage, member=D):
        parties.server.receive(late)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 2}, {"attempt": 1}, {"run": "other"}, {"threshold": 4}, {"config_hash": M0},
        {"members": (A, B, C)},
    ],
)  # fmt: skip
def test_a_message_of_another_run_round_attempt_threshold_or_config_is_refused(change):
    parties = Parties(4)
    other = replace(parties.setting, **change)
    message = Client(other, A, parties.identity[A]).advertise()
    with refused(BindingError, stage="advertise", member=A) as caught:
        parties.server.receive(message)
    (name,) = change  # where it is one of these three, the error says which
    assert (f"of {name} " in str(caught.value)) == (name in ("run", "round", "attempt"))
    broadcast = to_broadcast(
        "advertise", [head_of(message), *heads_in(parties.play(until="share").shown[B])[1:]]
    )
    with refused(BindingError, stage="advertise", member=A):
        parties.clients[B].share(broadcast)
    assert parties.clients[B].stage == "stopped"


def test_a_message_of_a_stranger_or_under_another_members_name_is_refused():
    parties, five = Parties(4), Parties(5)
    with refused(BindingError, stage="advertise", member=None):
        parties.server.receive(five.clients["hospital-e"].advertise())
    with refused(BindingError, stage="advertise", member=A):
        parties.server.receive(parties.answer(B), sender=A)


@pytest.mark.parametrize("stage", [*STAGES, "decline"])
def test_a_forged_signature_is_refused(stage):
    due = "masked" if stage == "decline" else stage
    parties = Parties(3).play(until=due)
    with refused(SignatureError, stage=stage, member=A):
        parties.server.receive(parties.forge(A, stage, [], signer=B))
    assert parties.server.declined == []


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *[(at, value) for at in (0, 1) for value in (b"x" * 31, "x" * 32, None)],
        *[(2, value) for value in (b"x" * 64, [b"x" * 32] * 3)],
        *[(3, value) for value in (True, -1, "1")],
        *[(4, value) for value in (b"x" * 63, "x" * 64, None)],
        (slice(4, 5), []),
        (slice(5, 5), [1]),
        (slice(0, 5), []),
    ],
)
def test_a_signed_body_of_another_shape_is_refused(at, value):
    parties = Parties(3)
    body = [b"x" * 32, b"x" * 32, b"x" * 96, 1, b"x" * 64]
    with pytest.raises(MessageError, match="unknown stage"):
        parties.server.receive(parties.forge(A, "other", body))
    body[at] = value
    with refused(MessageError, stage="advertise", member=A):
        parties.server.receive(parties.forge(A, "advertise", body))


@pytest.mark.parametrize(("what", "kind"), [("MESSAGE", MessageError), ("DOMAIN", SignatureError)])
def test_another_version_is_refused(what, kind, monkeypatch):
    """Its number is in the first four bytes and in what is signed."""
    parties = Parties(3)
    monkeypatch.setattr(f"fedmerit.secagg.messages.{what}", b"FMS2")
    message = parties.answer(A)
    monkeypatch.undo()
    with pytest.raises(kind):
        parties.server.receive(message)


def test_a_head_or_list_written_in_another_way_is_refused():
    """The same fields in other bytes have a valid signature, and another digest than its sender knows."""
    parties = Parties(3)
    message = parties.answer(A)
    content, signature = msgpack.decode(head_of(message))
    fields = msgpack.decode(content)
    assert content[:11] == b"\x98\xa9advertise"  # eight fields, the first is the stage
    longer = b"\x98\xd9\x09advertise" + content[11:]
    assert msgpack.decode(longer) == fields
    number = content.index(b"\x01\x00\xaahospital-a")  # round 1, attempt 0
    wider = content[:number] + b"\xcc\x01" + content[number + 1 :]
    assert msgpack.decode(wider) == fields
    both = [
        msgpack.encode([one, parties.identity[A].sign(DOMAIN + hashlib.sha256(one).digest())])
        for one in (longer, wider)
    ]
    wide = b"\x92\xc6" + len(content).to_bytes(4, "big") + content + b"\xc4\x40" + signature
    for head in (wide, *both):
        with pytest.raises(MessageError, match="not encoded as"):
            parties.server.receive(b"FMS1" + len(head).to_bytes(4, "big") + head)
    parties.server.receive(message)
    parties.collect((B, C))
    shown = parties.server.advance()[A]
    assert shown[:6] == b"FMB1\x92\xa9"
    with pytest.raises(MessageError, match="not encoded as"):
        parties.clients[A].share(b"FMB1\x92\xd9\x09" + shown[6:])
    with pytest.raises(MessageError, match="starts with"):
        parties.clients[A].share(b"FMB2" + shown[4:])
    assert parties.clients[A].share(shown)


# -------------------------------------- whatever bytes arrive: a ProtocolError or a value, and nothing else


PLAYED = {stage: Parties(3).play(until=stage) for stage in STAGES}
MESSAGES = {stage: parties.answer(A) for stage, parties in PLAYED.items()}
BROADCASTS = PLAYED["unmask"].server.broadcasts

many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text()
) | st.sampled_from([b"x" * 32, b"x" * 64, b"x" * 92, "seed", "key", *STAGES, A, "run", 0, 1, 2])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner), max_leaves=15
)

blob, place = st.binary(min_size=32, max_size=32), st.integers(-1, 4)
counter, signature = st.integers(-1, 2**64 - 1), st.binary(min_size=64, max_size=64)
token = st.tuples(place, counter, st.binary(min_size=96, max_size=96))
dealt = st.tuples(place, st.binary(min_size=92, max_size=92), blob, blob, blob)
bodies = (  # of any structure, or with luck of the shape that a stage expects
    values
    | st.tuples(blob, blob, st.binary(min_size=96, max_size=96), counter, signature)
    | st.tuples(st.lists(dealt, max_size=3), st.lists(token, max_size=3))
    | st.tuples(blob, blob, blob, st.lists(st.tuples(place, blob), max_size=3), counter, signature)
    | st.tuples(st.lists(st.tuples(place, st.sampled_from(["seed", "key", "x"]), blob), max_size=4))
)
EVIDENCE = {
    "advertised": [hashlib.sha256(raw).hexdigest() for raw in heads_in(BROADCASTS["advertise"])],
    "dealt": [hashlib.sha256(raw).hexdigest() for raw in heads_in(BROADCASTS["share"])],
    "heads": [heads_in(BROADCASTS[at])[0].hex() for at in ("advertise", "advertise", "share", "masked")],
    "kind": "seed",
    "shares": [[0, "00" * 32], [1, "00" * 32], [2, "00" * 32]],
}


def tolerates(call, *args):
    with suppress(ProtocolError):
        call(*args)


def answered(client, data, update):
    return client.masked(data, update) if client.stage == "masked" else client.handle(data)


@st.composite
def damaged(draw, originals):
    """A good message with bytes changed, cut out, put in or repeated."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["set", "cut", "insert", "repeat", "truncate"]))
        if how == "set":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=40))
        elif how == "repeat":
            data[at:at] = data[at : at + 40]
        else:
            del data[at:]
    return bytes(data)


def fresh(stage):
    """A server and a client that wait for this stage, cheaply."""
    parties = PLAYED[stage]
    client = Client.restore(parties.clients[B].dump(), parties.identity[B])
    return parties, client


@many
@given(data=st.binary(max_size=2000) | damaged(list(MESSAGES.values())))
@pytest.mark.parametrize("stage", STAGES)
def test_the_server(stage, data):
    parties = PLAYED[stage]
    if data != MESSAGES[stage]:
        tolerates(parties.server.receive, data)
        tolerates(open_message, data, parties.setting, 100)


@many
@given(data=st.binary(max_size=2000) | damaged(list(BROADCASTS.values())))
@pytest.mark.parametrize("stage", STAGES[1:])
def test_the_client(stage, data):
    parties, client = fresh(stage)
    tolerates(answered, client, data, parties.update(B))


@many
@given(value=values)
def test_heads_and_lists_of_any_structure(value):
    setting = PLAYED["share"].setting
    data = msgpack.encode(value)
    tolerates(open_head, data, setting)
    tolerates(open_broadcast, b"FMB1" + data, setting, "share")
    for stage in ("share", value):
        tolerates(open_broadcast, b"FMB1" + msgpack.encode([stage, value]), setting, "share")
    tolerates(open_message, b"FMS1" + len(data).to_bytes(4, "big") + data, setting, 100)


def signed(content, parties):
    signature = parties.identity[A].sign(DOMAIN + hashlib.sha256(content).digest())
    return msgpack.encode([content, signature])


@many
@given(body=bodies, at=st.none() | st.integers(0, 7), value=values)
@pytest.mark.parametrize("stage", STAGES)
def test_whatever_a_dishonest_member_signs(stage, body, at, value):
    parties = PLAYED[stage]
    fields = msgpack.decode(msgpack.decode(head_of(MESSAGES[stage]))[0])
    fields[7] = body
    if at is not None:
        fields[at] = value
    head = signed(msgpack.encode(fields), parties)
    tolerates(open_head, head, parties.setting)
    for payload in (b"", b"x" * 80):
        message = b"FMS1" + len(head).to_bytes(4, "big") + head + payload
        if head != head_of(MESSAGES[stage]):
            tolerates(parties.server.receive, message)
    if stage != "advertise":
        before = STAGES[STAGES.index(stage) - 1]
        fields[0] = before
        heads = [signed(msgpack.encode(fields), parties), *heads_in(parties.server.broadcasts[before])[1:]]
        _, client = fresh(stage)
        tolerates(answered, client, to_broadcast(before, heads), parties.update(B))


@many
@given(data=st.binary(max_size=500) | damaged([PLAYED["check"].clients[A].dump()]), value=values)
def test_saved_states(data, value):
    tolerates(load_state, data)
    for body in (data, msgpack.encode(value), msgpack.encode(["fedmerit secagg client 1", *[value] * 6])):
        tolerates(load_state, hashlib.sha256(body).digest() + body)
    tolerates(Released.load, data)


@many
@given(value=values, part=st.sampled_from([*EVIDENCE]), secret=st.booleans())
def test_evidence(value, part, secret):
    parts = ("advertised", "heads", "kind", "shares") if secret else ("advertised", "dealt", "heads")
    given_ = {key: EVIDENCE[key] for key in parts}
    given_["heads"] = given_["heads"][1:3] if secret else given_["heads"]
    tolerates(masks.judge, PLAYED["unmask"].setting, given_)
    tolerates(masks.judge, PLAYED["unmask"].setting, {**given_, part: value})
