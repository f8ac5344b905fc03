"""What somebody else sent costs little before it is refused, and little is kept of it."""

from __future__ import annotations

import secrets
import stat
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.errors import MessageError, RefusedError, StoreError
from fedmerit.identity import load_key, public_key
from fedmerit.protocol.messages import (
    EXCHANGES,
    FORMAT,
    SETTLEMENT_BYTES,
    Ask,
    Parcel,
    ask_limit,
    pack,
    words_limit,
)
from fedmerit.secagg.messages import list_limit, refuse_many
from fedmerit.storage import member_state as keeping
from fedmerit.storage.member_state import MemberFiles
from linear_federation import Federation

SIZE = 8 * 2**20
KINDS_OF = {"sum": np.uint32, "x": np.float32, "y": np.int64, "salts": np.uint8}
ALL = ["A", "B", "C", "D"]


@pytest.fixture
def federation(tmp_path):
    made = Federation(tmp_path, ALL, 4, files=True)
    with made.begun():
        yield made


def peak_of(call):
    """Bytes that were held at once while something ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def many(kind, count=SIZE):
    """A list of so many empty values, of one byte each."""
    return b"\xdd" + struct.pack(">I", count) + kind * count


# -------------------------------------------------------------------------------------------- counted first

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=40)),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=40), inner, max_size=40),
    max_leaves=80,
)


def count(value):
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(VALUES)
def test_values_are_counted_as_they_are(value):
    data, values = msgpack.packb(value), count(value)
    refuse_many(data, values)
    with pytest.raises(MessageError, match=f"expected at most {values - 1} values, got more"):
        refuse_many(data, values - 1)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536])
def test_every_width_of_a_count_is_read(size):
    for value in ("x" * size, bytes(size), msgpack.ExtType(1, bytes(size))):
        refuse_many(msgpack.packb([value, 7]), 3)
        with pytest.raises(MessageError):
            refuse_many(msgpack.packb([value, 7]), 2)
    refuse_many(msgpack.packb([0] * size), 1 + size)
    refuse_many(msgpack.packb(dict.fromkeys(range(size))), 1 + 2 * size)
    for value in ([0] * size, dict.fromkeys(range(size))):
        with pytest.raises(MessageError):
            refuse_many(msgpack.packb(value), count(value) - 1)


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(data):
    try:
        refuse_many(data, 50)
    except MessageError:
        return
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return
    assert not isinstance(value, list | dict) or len(value) < 50


# ------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("kind", [b"\x80", b"\x90", b"\xc0", b"\xa0"], ids=["maps", "lists", "nil", "texts"])
@pytest.mark.parametrize("place", ["outside", "inside", "body"])
def test_a_large_message_is_refused_before_it_is_parsed(federation, kind, place):
    """8 MB of empty maps take 600 MB as Python's; whoever can reach a member could send them."""
    data = many(kind)
    if place == "body":
        data = b"\x95\xa9advertise\xd9\x20" + federation.run_id.encode() + b"\x01\x81\xa7members" + data
    if place != "outside":
        data = pack([FORMAT, "0.1.0", data, bytes(64)])
    member = federation.member("A")

    def refuse():
        with pytest.raises(MessageError, match=r"not a message of the server: expected at most \d+ values"):
            member.answer(Parcel(data), "here")

    assert peak_of(refuse) < 2 * len(data)


def test_text_is_no_way_round_it(federation):
    """One character beyond the basic plane makes all others four bytes wide."""
    key = Ed25519PrivateKey.generate()
    body = {"terms": {"config": "#" * SIZE + "\U0001f600"}, "commitment": {}, "server": public_key(key)}
    data = Ask("join", "ab" * 16, 0, body).pack(key.sign)

    def refuse():
        with pytest.raises(MessageError, match="not a message of the server"):
            federation.member("A").answer(data, "here")

    assert peak_of(refuse) < 2 * len(data)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_message_is_no_larger_than_its_kind_can_be(federation, exchange):
    limit = ask_limit(exchange, len(ALL))
    assert limit in (words_limit(4), words_limit(4) + list_limit(4), SETTLEMENT_BYTES)
    data = Ask(exchange, federation.run_id, 1, {"list": bytes(limit)}).pack(
        federation.coordinator.recorder.key.sign
    )
    with pytest.raises(MessageError, match=f"expected at most {limit} bytes, got {len(data)}"):
        federation.member("A").answer(data, "here")


@pytest.mark.parametrize("change", ["x", "sum", "salts"])
def test_arrays_are_measured_before_they_are_hashed(change):
    """Arrays of a tebibyte each, which take no memory unless somebody copies or hashes them."""
    huge = {name: np.broadcast_to(np.zeros((), kind), 2**40) for name, kind in KINDS_OF.items()}
    small = {
        "sum": np.zeros(5, np.uint32),
        "x": np.zeros((10, 2), np.float32),
        "y": np.zeros(10, np.int64),
        "salts": np.zeros(320, np.uint8),
    }
    parcel = Ask("report", "0" * 32, 1, {"slice": [0, []]}, small).pack(lambda message: b"")
    taken = {"x": {"x", "y"}}.get(change, {change})
    ask, _ = Ask.unpack(
        Parcel(parcel.head, {name: (huge if name in taken else small)[name] for name in small})
    )
    with pytest.raises(MessageError, match=r"expected (5 numbers of type uint32|at most)"):
        ask.told(5)


def test_arrays_that_the_signed_bytes_do_not_name_are_refused():
    arrays = {"sum": np.zeros(5, np.uint32), "x": np.zeros((10, 2), np.float32)}
    arrays |= {"y": np.zeros(10, np.int64), "salts": np.zeros(320, np.uint8)}
    body = {"slice": [0, []], "included": ["A"], "m0": "0" * 64, "head": "0" * 64}
    parcel = Ask("report", "0" * 32, 1, body, arrays).pack(lambda message: b"")
    assert Ask.unpack(parcel)[0].told(5).included == ("A",)
    for name, array in arrays.items():
        other = arrays | {name: array + array.dtype.type(1)}
        with pytest.raises(MessageError, match="its arrays do not match the hashes that it names"):
            Ask.unpack(Parcel(parcel.head, other))[0].told(5)
    for strange in ({}, arrays | {"more": arrays["sum"]}, {"sum": arrays["sum"]}):
        with pytest.raises(MessageError, match="other arrays beside it than expected"):
            Ask.unpack(Parcel(parcel.head, strange))


@pytest.mark.parametrize(
    "answer",
    [
        pack([b"[" + b"[]," * (SIZE // 3) + b"[]]", bytes(64), b""]),
        pack([b"{}", bytes(64), b""])[:-2] + many(b"\x80"),
        many(b"\x80"),
        pack([b'{"a":' * 4000, bytes(64), b""]),
    ],
    ids=["json", "inside", "outside", "deep"],
)
def test_a_large_report_costs_its_author_the_report_and_the_server_nothing(federation, answer):
    peaks = []

    def sends(name, ask, said):
        if (name, ask.exchange) != ("B", "report"):
            return said
        tracemalloc.start()
        return answer

    def is_over(name, ask):  # the next member is asked when the server is done with the answer
        if tracemalloc.is_tracing():
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    federation.after.append(sends)
    federation.before.append(is_over)
    assert federation.round(1) is not None
    assert [*federation.coordinator.recorder.rounds[0].reports] == ["A", "C", "D"]
    assert any("a report has at most" in note for note in federation.notes)
    (peak,) = peaks
    assert peak < 100_000


def test_a_large_answer_to_an_invitation_is_refused(federation):
    data = pack(["A", bytes(64), bytes(SIZE)])

    def refuse():
        with pytest.raises(MessageError, match=f"answered an invitation with {len(data)} bytes"):
            federation.coordinator.admit("here", data)

    assert peak_of(refuse) < 100_000


# ----------------------------------------------------------------------------------------------------- files


def invitation(federation, **change):
    """As the server can write any number of them: to another run."""
    recorder = federation.coordinator.recorder
    key = recorder.key
    body = {
        "terms": {**recorder.terms, **change},
        "commitment": recorder.commitment,
        "server": public_key(key),
    }
    return Ask("join", secrets.token_hex(16), 0, body).pack(key.sign)


def test_a_large_invitation_leaves_nothing_on_the_disk(federation):
    member = federation.member("A")
    home = federation.home / "A.pem.state"
    before = sorted(home.rglob("*"))
    for filler in ("x" * words_limit(4), [bytes(1000)] * 5000, bytes(5 * 2**20)):
        with pytest.raises(MessageError, match=r"expected at most|not a message of the server"):
            member.answer(invitation(federation, filler=filler), "here")
    assert sorted(home.rglob("*")) == before


def test_a_member_keeps_so_many_runs_and_says_how_to_go_on(federation, monkeypatch, caplog):
    monkeypatch.setattr(keeping, "MOST_RUNS", 5)
    member, home = federation.member("A"), federation.home / "A.pem.state"
    for _ in range(4):  # and the run of the federation
        member.answer(invitation(federation), "here")
    with pytest.raises(RefusedError, match="cannot keep another run; its own log says why"):
        member.answer(invitation(federation), "here")
    assert f"{home}: holds 5 runs, and a member keeps at most 5. Invitations are deleted" in caplog.text
    assert len([path for path in home.iterdir() if path.is_dir()]) == 5
    assert federation.round(1) is not None  # what it joined before goes on
    monkeypatch.setattr(keeping, "IDLE", 0.0)  # a day later
    member.answer(invitation(federation), "here")
    assert len([path for path in home.iterdir() if path.is_dir()]) == 2


def test_most_runs_take_little_of_a_disk():
    assert keeping.MOST_RUNS * words_limit(10) < 10e6


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o770, 0o701])
def test_a_state_folder_that_others_can_use_is_refused(federation, mode):
    """Whoever can write there can put back an older copy of what must never be done again."""
    home, key = federation.home / "A.pem.state", federation.home / "A.pem"
    home.chmod(mode)
    with pytest.raises(StoreError, match=rf"must have mode 700, got {mode:o}; .*; run: chmod 700 {home}"):
        federation.member("A").answer(federation.coordinator.invitation(), "here")
    home.chmod(0o700)
    federation.member("A").answer(federation.coordinator.invitation(), "here")
    with MemberFiles(federation.home / "new.pem", load_key(key), "ab" * 16).held():
        pass
    assert stat.S_IMODE((federation.home / "new.pem.state").stat().st_mode) == 0o700
