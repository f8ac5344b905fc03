"""Without masks the same members are in the sum, and the sum is the same: fast path against slow path."""

import hashlib

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, MessageError, ProtocolError
from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg.client import Client
from fedmerit.secagg.plain import PlainClient, PlainServer
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.server import Server
from fedmerit.secagg.setting import STAGES, Released, Setting, Task, Update, update_digest
from refusals import refused

KEYS = [Ed25519PrivateKey.generate() for _ in range(6)]
NAMES = [f"client-{i}" for i in range(6)]
ROSTER = Roster(Member(name, public_key(key)) for name, key in zip(NAMES, KEYS, strict=True))
DIGEST = hashlib.sha256(b"").digest()


@st.composite
def attempts(draw):
    """Who is scheduled, how they are weighed, who is lost or declines where, and what they bring."""
    n = draw(st.integers(4, 6))
    kind = draw(st.sampled_from(["uniform", "secret", "public"]))
    weights = draw(st.lists(st.integers(0 if kind == "public" else 1, 9), min_size=n, max_size=n))
    stages = ["advertise", "share", "masked", "check", "unmask", "never"]
    return {
        "n": n,
        "kind": kind,
        "weights": weights,
        "word_bytes": draw(st.sampled_from([4, 8])),
        "threshold": draw(st.sampled_from([None, 4])),
        "lost": draw(st.lists(st.sampled_from([*stages, *["never"] * 9]), min_size=n, max_size=n)),
        "large": draw(st.lists(st.sampled_from([0.5, 0.5, 0.5, 2.0, float("nan")]), min_size=n, max_size=n)),
        "again": draw(st.lists(st.booleans(), min_size=n, max_size=n)),
    }


def outcome(given, masked):
    """Who is in the sum, who declined, why there is none, and the sum."""
    n, names = given["n"], tuple(NAMES[: given["n"]])
    try:
        setting = Setting("run", 1, 0, names, ROSTER, DIGEST, given["threshold"])
        cap = max(given["weights"]) or 1
        kind = given["kind"]
        encoding = Encoding(5, n, 1.0, kind, 1 if kind == "uniform" else cap, word_bytes=given["word_bytes"])
        weights = tuple(map(float, given["weights"])) if kind == "public" else None
        task = Task(DIGEST, encoding, weights)
    except ProtocolError as error:
        return str(error)
    server = (Server if masked else PlainServer)(setting, task)
    clients, shown = {}, dict.fromkeys(names, b"")
    for k, name in enumerate(names):
        released = Released()
        if given["again"][k]:  # it brought this very update to a sum before
            earlier = Setting("earlier", 1, 0, tuple(NAMES), ROSTER, DIGEST)
            released.add(earlier, update_digest(DIGEST, brought(given, k)))
        clients[name] = (Client if masked else PlainClient)(setting, name, KEYS[k], released=released)
    try:
        for stage in STAGES:
            for k, (name, broadcast) in enumerate(shown.items()):
                place = names.index(name)
                if (*STAGES, "never").index(given["lost"][place]) <= STAGES.index(stage):
                    continue
                client = clients[name]
                try:
                    if stage == "masked":
                        weight = given["weights"][place] if given["kind"] == "secret" else None
                        update = Update(task, brought(given, place), weight, seed=k)
                        message = client.masked(broadcast, update)
                        assert masked or len(message) == 1 + 32 + 4 * encoding.words
                    else:
                        message = client.handle(broadcast)
                except ProtocolError:
                    message = client.decline()
                server.receive(message, name)
            shown = dict(server.advance())
    except ProtocolError as error:
        return sorted(server.declined), str(error)
    found = server.result
    return found.included, sorted(server.declined), found.total_weight, found.weighted_sum.tolist()


def brought(given, k):
    return np.full(5, given["large"][k] * (k + 1) / 6, np.float32)


@settings(max_examples=60)
@given(attempts())
def test_with_masks_and_without_the_same_comes_out(given):
    assert outcome(given, masked=True) == outcome(given, masked=False)


def test_a_plain_server_refuses_what_is_no_message_of_its_attempt():
    task = Task(DIGEST, Encoding(5, 3, 1.0))
    setting = Setting("run", 1, 0, tuple(NAMES[:3]), Roster(ROSTER.members[:3]), DIGEST)
    server = PlainServer(setting, task)
    for bad in (b"", b"\6"):
        with refused(MessageError, stage="advertise", member=NAMES[0]):
            server.receive(bad, NAMES[0])
    for stage in (0, 1):
        for name in setting.members:
            server.receive(bytes([stage]), name)
        server.advance()
    for payload in (bytes(32 + 20), task.digest + bytes(19), task.digest + bytes(24)):
        with refused(BindingError, stage="masked", member=NAMES[0]):
            server.receive(b"\2" + payload, NAMES[0])
    with refused(BindingError, stage="setting", member="nobody"):
        PlainClient(setting, "nobody")
