"""The protocol when nobody attacks: sums, members that leave, clients saved and restored, and no masks."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmerit.errors import (
    BindingError,
    BoundError,
    ConfigError,
    MessageError,
    ProtocolError,
    RefusedError,
    RoundAborted,
)
from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg.client import Client
from fedmerit.secagg.plain import PlainClient, PlainServer
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.server import Server
from fedmerit.secagg.setting import STAGES, Released, Setting, Task, Update, update_digest, what_to_know
from in_memory import run_in_memory
from parties import A, B, C, D, Parties
from refusals import refused


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_result_is_the_plain_sum_over_the_included_or_the_round_is_aborted(data):
    n = data.draw(st.integers(3, 8))
    t = data.draw(st.integers(n // 2 + 1, n))
    leaves = data.draw(st.lists(st.sampled_from([*STAGES, None, None, None]), min_size=n, max_size=n))
    weighted = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n, data.draw(st.integers(1, 40)))) * 10.0 ** rng.integers(-6, 6)
    weights = rng.integers(1, 1000, n).tolist() if weighted else None
    lost = {stage: [i for i in range(n) if leaves[i] == stage] for stage in STAGES}
    here = [n]  # how many are left after each stage
    for stage in STAGES:
        here.append(here[-1] - len(lost[stage]))
    needed = [max(t, 3)] * 3 + [t] * 2
    if any(left < need for left, need in zip(here[1:], needed, strict=True)):
        with pytest.raises(RoundAborted):
            run_in_memory(vectors, weights, t, lost, seed=seed)
        return
    run = run_in_memory(vectors, weights, t, lost, seed=seed)
    included = [i for i in range(n) if leaves[i] not in ("advertise", "share", "masked")]
    chosen = None if weights is None else [weights[i] for i in included]
    expected = np.average(vectors[included], axis=0, weights=chosen)
    step = np.abs(vectors).max() / ((2**32 // n - 1) // 2)
    worst = len(included) * step * (max(weights) if weights else 1) / run.total_weight
    assert run.included == tuple(included)
    assert run.total_weight == (sum(chosen) if chosen else len(included))
    assert np.abs(run.mean - expected).max() <= worst * (1 + 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_too_few_members_abort_cleanly(stage):
    parties = Parties(4)
    with refused(RoundAborted, stage=stage):
        parties.play(lost=[(stage, A), (stage, C)])
    assert parties.server.stage == "aborted"
    assert parties.server.result is None
    assert parties.server.waiting == ()
    with refused(BindingError, stage="aborted"):
        parties.server.advance()


def test_a_decline_is_all_the_server_learns_and_the_others_go_on():
    parties = Parties(4).play(until="masked")
    parties.vectors[B][3] = 7.5
    with refused(BoundError, stage="masked", member=B):
        parties.answer(B)
    message = parties.clients[B].decline()
    assert b"7.5" not in message
    assert len(message) < 350
    assert parties.server.receive(message) == B
    parties.collect((A, C, D))
    parties.shown = parties.server.advance()
    parties.play()
    assert parties.server.declined == [B]
    assert parties.server.result.included == (A, C, D)


def test_keys_can_be_advertised_before_the_round_and_its_model_are_known():
    parties = Parties(4)
    parties.server = server = Server(parties.setting)  # no task yet
    parties.play(until="masked")
    early = parties.answer(A)
    with refused(BindingError, stage="masked", member=A):
        server.receive(early)
    server.begin(parties.task)
    server.receive(early)
    parties.collect((B, C, D))
    parties.shown = server.advance()
    assert parties.play().server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)
    with refused(BindingError, stage="done"):
        server.begin(parties.task)


@pytest.mark.parametrize("weights", [{"weights": [3, 1, 4, 1]}, {"public": (1.0, 2.0, 0.5, 0.0)}], ids=str)
def test_every_client_can_be_saved_and_restored_between_any_two_messages(weights):
    parties = Parties(4, **weights)
    for until in (*STAGES[1:], None):
        for name, client in parties.clients.items():
            released = Released.load(client.released.dump())
            parties.clients[name] = Client.restore(client.dump(), parties.identity[name], released=released)
        parties.play(until=until)
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-7)
    again = Client.restore(parties.clients[A].dump(), parties.identity[A])
    assert again.dump() == parties.clients[A].dump()
    assert (again.stage, again.survivors) == ("done", parties.names)


def test_a_damaged_or_foreign_dump_is_refused():
    parties = Parties(3)
    data = parties.clients[A].dump()
    altered = data.replace(parties.clients[A]._state.mask, bytes(32))
    other = data[32:].replace(b"secagg client 1", b"secagg client 2")
    version = hashlib.sha256(other).digest() + other
    for bad in (b"", data[:-1], altered, version, data[:40] + b"\xff" + data[41:], bytes(100)):
        with pytest.raises(MessageError):
            Client.restore(bad, parties.identity[A])
    with refused(BindingError, stage="setting", member=A):
        Client.restore(data, parties.identity[B])


def test_settings_say_what_is_risky():
    assert "3 members" in what_to_know(3, 3, 3)[0]
    assert what_to_know(4, 3, 4) == ()
    assert "threshold 5 of 9: 1 members and the server" in what_to_know(9, 5, 9)[0]


@pytest.mark.parametrize(
    ("error", "change"),
    [
        *[(RefusedError, {"threshold": threshold}) for threshold in (0, 1, 4, 2.5)],
        *[(RefusedError, {"members": (A, B), "threshold": threshold}) for threshold in (None, 2)],
        *[(BindingError, {"run": run}) for run in ("", "\ud800", "a\nb", "x" * 129)],
        (BindingError, {"round": -1}),
        (BindingError, {"attempt": 2**32}),
        *[(BindingError, {"members": members}) for members in ((1, 2, 3), (A, B, C, A), (A, B, C, "nobody"))],
    ],
)
def test_settings_that_are_unsafe_or_impossible_are_refused(error, change):
    with refused(error, stage="setting"):
        replace(Parties(3).setting, **change)


def test_only_the_scheduled_take_part():
    parties = Parties(3)
    with refused(BindingError, stage="setting", member="nobody"):
        Client(parties.setting, "nobody", parties.keys[0])


def test_an_error_on_ones_own_side_stops_the_client_and_is_called_that(monkeypatch):
    parties = Parties(4).play(until="masked")
    client = parties.clients[B]
    with monkeypatch.context() as patch:
        patch.setattr("fedmerit.secagg.masks.add_masks", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            parties.answer(B)
    assert client.stage == "stopped"
    with refused(RefusedError, stage="masked", member=B):
        client.masked(parties.shown[B], parties.update(B))
    with refused(RefusedError, stage="check", member=B):
        client.handle()
    assert parties.server.receive(client.decline()) == B


@pytest.mark.parametrize("seed", ["text", 1.5, [1]])
def test_a_seed_is_a_number_or_bytes(seed):
    parties = Parties(3)
    with refused(ConfigError):
        Update(parties.task, parties.vectors[A], None, seed)


def test_the_schedule_counts_not_who_answers():
    # 7 of 9 needed even if only 7 are heard from at all: the threshold never shrinks with the absent
    parties = Parties(9)
    with pytest.raises(RoundAborted):
        parties.play(lost=[("advertise", name) for name in parties.names[:3]])


def test_the_server_keeps_what_a_ledger_and_a_naming_need():
    parties = Parties(5, threshold=3).play(lost=[("masked", D), ("share", "hospital-e")])
    server, included = parties.server, [A, B, C]
    heard = [sorted(heads) for heads in server.heads.values()]
    assert heard == [[*parties.names], [A, B, C, D], *[included] * 3]
    for name in included:
        assert server.heads["masked"][name].body.words == hashlib.sha256(parties.payload(name)).digest()
        assert parties.clients[name].sent == server.inputs[name]
    assert server.seeds == {name: parties.clients[name]._state.seed for name in included}
    assert server.keys == {D: parties.clients[D]._state.mask}


# ----------------------------------- without masks the same members are in the sum, and the sum is the same


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
        weights = dict(zip(names, given["weights"], strict=True)) if kind == "public" else None
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
