"""Without masks the same members are in the sum, and the sum is the same: fast path against slow path."""

import hashlib

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.errors import ProtocolError
from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg import Client, Encoding, Released, Server, Setting, Task, Update
from fedmerit.secagg.plain import PlainClient, PlainServer

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
        "checked": draw(st.booleans()),
        "threshold": draw(st.sampled_from([None, 4])),
        "lost": draw(st.lists(st.sampled_from([*stages, *["never"] * 9]), min_size=n, max_size=n)),
        "large": draw(st.lists(st.sampled_from([0.5, 0.5, 0.5, 2.0, float("nan")]), min_size=n, max_size=n)),
        "again": draw(st.lists(st.booleans(), min_size=n, max_size=n)),
    }


def outcome(given, masked):
    """Who is in the sum, who declined, why there is none, and the sum."""
    n, names = given["n"], tuple(NAMES[: given["n"]])
    try:
        setting = Setting("run", 1, 0, names, ROSTER, DIGEST, given["threshold"], given["checked"])
        cap = max(given["weights"]) or 1
        kind = given["kind"]
        encoding = Encoding(5, n, 1.0, kind, 1 if kind == "uniform" else cap)
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
            released.add(earlier, digest_of(brought(given, k)))
        clients[name] = (
            Client(setting, name, KEYS[k], released=released)
            if masked
            else PlainClient(setting, name, released=released)
        )
    try:
        for stage in setting.stages:
            for k, (name, broadcast) in enumerate(shown.items()):
                place = names.index(name)
                if setting.stages.index(stage) >= lost_at(setting, given["lost"][place]):
                    continue
                client = clients[name]
                try:
                    if stage == "advertise":
                        message = client.advertise()
                    elif stage == "masked":
                        weight = given["weights"][place] if given["kind"] == "secret" else None
                        message = client.masked(
                            broadcast, Update(task, brought(given, place), weight, seed=k)
                        )
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


def digest_of(delta):
    from fedmerit.secagg import update_digest

    return update_digest(DIGEST, delta)


def lost_at(setting, stage):
    return setting.stages.index(stage) if stage in setting.stages else len(setting.stages)


@settings(max_examples=60)
@given(attempts())
def test_with_masks_and_without_the_same_comes_out(given):
    assert outcome(given, masked=True) == outcome(given, masked=False)
