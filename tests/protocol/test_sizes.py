"""What somebody else sent costs little before it is refused, and little is kept of it."""

from __future__ import annotations

import random
import secrets
import stat
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from attacked import judging
from fedmerit.errors import (
    LedgerError,
    MessageError,
    ProtocolError,
    RefusedError,
    StoreError,
    VersionError,
)
from fedmerit.identity import canonical, load_key, public_key
from fedmerit.ledger.chain import parsed_record
from fedmerit.ledger.kinds import typed
from fedmerit.protocol.messages import (
    EXCHANGES,
    FORMAT,
    SETTLEMENT_BYTES,
    Accord,
    Ask,
    AskBody,
    Joined,
    NonceAnswer,
    Opened,
    Parcel,
    Signature,
    Signed,
    StateAnswer,
    Texts,
    answer_of,
    ask_limit,
    pack,
    words_limit,
)
from fedmerit.secagg.messages import list_limit, open_broadcast, open_message
from fedmerit.secagg.setting import STAGES
from fedmerit.storage import member_state as keeping
from fedmerit.storage.member_state import MemberFiles
from linear_federation import Federation
from parties import Parties
from refusals import refused
from runs import records_of

SIZE = 8 * 2**20
ALL = ["A", "B", "C", "D"]
SETTLED = {"scoring": {"method": "both"}, "settlement": {"naming": True}}


@pytest.fixture
def federation(tmp_path):
    made = Federation(tmp_path, ALL, 4, files=True)
    with made.begun():
        yield made


def peak_of(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def many(kind, count=SIZE):
    """A list of so many empty values, of one byte each."""
    return b"\xdd" + struct.pack(">I", count) + kind * count


# ------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("kind", [b"\x80", b"\x90", b"\xc0", b"\xa0"], ids=["maps", "lists", "nil", "texts"])
@pytest.mark.parametrize("place", ["outside", "inside", "exchange", "body", "agreed", "tables"])
def test_a_large_message_is_refused_before_it_is_parsed(federation, kind, place):
    """8 MB of empty maps take 600 MB as Python's; whoever can reach a member could send them."""
    data, run = many(kind), b"\xd9\x20" + federation.run_id.encode() + b"\x01"
    if place == "exchange":
        data = b"\x95" + data + run + b"\x80\x80"
    elif place == "body":
        data = b"\x95\xa9advertise" + run + b"\x81\xa7members" + data + b"\x80"
    elif place == "agreed":  # a message that may be large
        data = b"\x95\xa5state" + run + b"\x81\xa6agreed" + data + b"\x80"
    elif place == "tables":
        data = b"\x95\xa5pairs" + run + b"\x82\xa6tables\xdf" + data[1:] + b"\xa7purpose\xa0\x80"
    if place != "outside":
        data = pack([FORMAT, "0.1.0", data, bytes(64)])
    member = federation.member("A")

    def refuse():
        with refused(MessageError, member=None):
            member.answer(Parcel(data), "here")

    assert peak_of(refuse) < 4 * len(data)


def test_text_is_no_way_round_it(federation):
    """One character beyond the basic plane makes all others four bytes wide."""
    key = Ed25519PrivateKey.generate()
    body = {"terms": {"config": "#" * SIZE + "\U0001f600"}, "commitment": {}, "server": public_key(key)}
    data = Ask("join", "ab" * 16, 0, body).pack(key.sign)

    def refuse():
        with refused(MessageError, stage="join"):
            federation.member("A").answer(data, "here")

    assert peak_of(refuse) < 2 * len(data)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_message_is_no_larger_than_its_kind_can_be(federation, exchange):
    limit = ask_limit(exchange, len(ALL))
    assert limit in (*(words_limit(4) + lists * list_limit(4) for lists in range(3)), SETTLEMENT_BYTES)
    data = Ask(exchange, federation.run_id, 1, {"list": bytes(limit)}).pack(
        federation.coordinator.recorder.key.sign
    )
    with refused(MessageError, stage=exchange):
        federation.member("A").answer(data, "here")


SMALL = {
    "sum": np.zeros(5, np.uint32),
    "x": np.zeros((10, 2), np.float32),
    "y": np.zeros(10, np.int64),
    "salts": np.zeros(320, np.uint8),
}


def request(**change):
    body = {"included": ["A"], "m0": "0" * 64, "head": "0" * 64, "slice": [0, []]}
    return Ask("report", "0" * 32, 1, body | change, SMALL).pack(lambda message: b"")


@pytest.mark.parametrize("change", ["x", "sum", "salts"])
def test_arrays_are_measured_before_they_are_hashed(change):
    """Arrays of a tebibyte each, which take no memory unless somebody copies or hashes them."""
    huge = {name: np.broadcast_to(np.zeros((), array.dtype), 2**40) for name, array in SMALL.items()}
    taken = {"x": {"x", "y"}}.get(change, {change})
    arrays = {name: (huge if name in taken else SMALL)[name] for name in SMALL}
    with refused(MessageError, stage="report"):
        Ask.unpack(Parcel(request().head, arrays))[0].told(5)


def test_arrays_that_the_signed_bytes_do_not_name_are_refused():
    assert Ask.unpack(request())[0].told(5).included == ("A",)
    for name, array in SMALL.items():
        ask, _ = Ask.unpack(Parcel(request().head, SMALL | {name: array + array.dtype.type(1)}))
        with refused(MessageError, stage="report"):
            ask.told(5)
    for strange in ({}, SMALL | {"more": SMALL["sum"]}, {"sum": SMALL["sum"]}):
        with refused(MessageError, stage="report"):
            Ask.unpack(Parcel(request().head, strange))


@pytest.mark.parametrize(
    "change",
    [
        {"m0": "0" * 63}, {"head": "x\n3 forged"}, {"head": None}, {"next": ["A"]}, {"included": [1]},
        {"slice": [0, [1]]}, {"slice": [0.0, []]}, {"included": ["A"] * 1025}, {"more": 1},
    ],
)  # fmt: skip
def test_a_body_is_of_the_form_of_its_exchange(change):
    with refused(MessageError, member=None):
        Ask.unpack(request(**change))


def test_a_message_is_written_in_one_way():
    """Else two members could hold different bytes of one message."""
    inner = pack(["close", "0" * 32, 1, {"head": "0" * 64}, {}])
    assert Ask.unpack(Parcel(pack([FORMAT, "0.1.0", inner, b""])))[0].round == 1
    for other in (
        inner.replace(b"\x01\x81", b"\xd0\x01\x81"),  # a number of one byte in two
        inner + b"\xc0",
        pack(["close", "0" * 32, True, {"head": "0" * 64}, {}]),
        pack(["nothing", "0" * 32, 1, {"head": "0" * 64}, {}]),
    ):
        with refused(MessageError, member=None):
            Ask.unpack(Parcel(pack([FORMAT, "0.1.0", other, b""])))


def all_passed(home):
    """Messages and answers of every kind: four open keys to all, five have witnesses, a panel judges."""
    panel = judging(home / "panel", [*ALL, "E"], 1)
    four = Federation(home / "four", ALL, 1, settings=SETTLED)  # who open keys to everybody
    four.stating(1, "B")
    four.tabling(lambda body: body["pairs"].update({"A": "5"}), "B")
    five = Federation(home / "five", [*ALL, "E"], 1, settings=SETTLED).shifting(who="B", key="1")
    return [*panel.run().passed, *four.run().passed, *five.run().passed]


@pytest.mark.long
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_mutated_messages_are_refused_or_read(tmp_path, exchange):
    """100,000 mutations in all: each gives a message, which is written as it was read, or a MessageError."""
    asks = {one.ask.exchange: one.ask for one in all_passed(tmp_path)}
    assert {*asks} == {*EXCHANGES} - {"last"}
    ask = asks.get(exchange) or Ask("last", "0" * 32, 1, AskBody())
    parcel = ask.pack(lambda message: b"s" * 64)
    good = 0
    for head in mutations(parcel.head, 100_000 // len(EXCHANGES)):
        try:
            read, _ = Ask.unpack(Parcel(head, parcel.arrays))
        except (MessageError, VersionError):
            continue
        good += 1
        assert pack(read.body) in head
    assert good


@pytest.mark.long
def test_mutated_answers_are_refused_or_read(tmp_path):
    """100,000 mutations in all: each gives an answer, which is written as it was read, or a MessageError."""
    kinds_of_answers = {
        "join": Joined, "report": Signed, "open": str, "agree": bool, "agreed": Accord,
        "state": StateAnswer, "draw": NonceAnswer, "drawn": Signature, "seal": Texts, "witness": Signed,
        "table": Signed, "pairs": Opened, "judge": bool, "judged": Signed, "column": bytes,
    }  # fmt: skip
    answers = {one.ask.exchange: one.answer for one in all_passed(tmp_path) if one.answer}
    for exchange, kind in kinds_of_answers.items():
        good = 0
        for answer in mutations(answers[exchange], 100_000 // len(kinds_of_answers)):
            try:
                good += pack(answer_of("B", answer, kind, exchange, SIZE)) == answer
            except MessageError:
                continue
        assert good, exchange


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_mutated_messages_and_lists_of_the_secure_sum_are_refused_or_read(stage):
    """100,000 mutations in all: each gives heads or a ProtocolError."""
    parties = Parties(4).play(until=stage)
    heads = parties.collect()
    message = parties.sent[stage][parties.names[0]]
    count, most = 50_000 // len(STAGES), parties.encoding.words * parties.encoding.word_bytes
    for mutated in mutations(message, count):
        with suppress(ProtocolError):
            head, _ = open_message(mutated, parties.setting, most)
            assert head.sender in parties.names
    for mutated in mutations(heads, count):
        with suppress(ProtocolError):
            assert {*open_broadcast(mutated, parties.setting, stage)} <= {*parties.names}


@pytest.mark.long
def test_mutated_records_are_refused_or_read(tmp_path):
    """100,000 mutations in all, of a record of each kind: each is of its form, or a LedgerError."""
    panel = judging(tmp_path / "panel", [*ALL, "E"], 1).run()
    federation = Federation(tmp_path / "four", ALL, 1, settings=SETTLED)
    federation.stating(1, "B")
    federation.run()
    records = {record.kind: record for one in (panel, federation) for record in records_of(one.folder)}
    assert len(records) > 10
    for record in records.values():
        good = 0
        for text in mutations(canonical(record.body), 100_000 // len(records)):
            with suppress(LedgerError):
                cells = (record.digest, record.signature, record.seal)
                read = parsed_record(record.seq, record.author, record.kind, text, *cells)
                typed(read, [*ALL, "E"], "all")
                good += 1
        assert good, record.kind


def mutations(message, count):
    """Yield so many damaged copies of a message; each has a few bytes changed, added or taken away."""
    rng = random.Random(len(message))
    for _ in range(count):
        head = bytearray(message)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(head) + 1)
            cut = rng.randrange(4)
            head[at : at + cut] = rng.randbytes(rng.choice([cut, cut, rng.randrange(4)]))
        yield bytes(head)


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
    assert any("expected at most" in note for note in federation.notes)
    (peak,) = peaks
    assert peak < 100_000


def test_a_large_answer_to_an_invitation_is_refused(federation):
    data = pack(["A", bytes(64), bytes(SIZE)])

    def refuse():
        with refused(MessageError, stage="join", member="the node at here"):
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
        with refused(MessageError, stage="join", member=None):
            member.answer(invitation(federation, filler=filler), "here")
    assert sorted(home.rglob("*")) == before


def test_a_member_keeps_so_many_runs_and_says_how_to_go_on(federation, monkeypatch, caplog):
    monkeypatch.setattr(keeping, "MOST_RUNS", 5)
    member, home = federation.member("A"), federation.home / "A.pem.state"
    for _ in range(4):  # and the run of the federation
        member.answer(invitation(federation), "here")
    with refused(RefusedError, stage="join", logged=True):
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
