"""Whatever bytes arrive, a decoder answers with a `ProtocolError` or a value, and with nothing else."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from fedmerit.errors import ProtocolError
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import DOMAIN, load_state, open_broadcast, open_head, open_message, to_broadcast
from fedmerit.secagg.setting import STAGES, Released
from parties import Parties, head_of, heads_in

A, B = "hospital-a", "hospital-b"
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
