"""Whatever is done to a ledger afterwards: found, and the first wrong record named; or found by a kept head.

What signatures cannot show is that the end was cut off. That takes a head somebody kept, or signed.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, content
from fedmerit.ledger import kinds
from fedmerit.ledger.chain import Copy, Ledger, exported
from fedmerit.ledger.run import check_kept
from fedmerit.storage.run_folder import TEMPORARY
from fedmerit.verify import verify_copy, verify_folder
from ledgers import Keys, written_anew
from raising import raises
from refusals import found_wrong
from runs import copied, records_of, run_in, verify_chain
from tests.ledger.test_chain import KEYS, PUBLIC, fill


@pytest.fixture(scope="module", params=["whole", "withheld"])
def lines(request, tmp_path_factory):
    """A small ledger as JSON lines, and the same with what south said withheld."""
    path = fill(tmp_path_factory.mktemp("small") / "ledger.sqlite")
    with Ledger(path, read_only=True) as ledger:
        shown = lambda record: request.param == "whole" or record.author != "south"  # noqa: E731
        return list(exported(ledger, shown))


def check(path, data):
    return verify_chain(copy_of(path, data), lambda _: PUBLIC)


def refused(tmp_path, lines, place, record):
    """Another record in the place of one is not accepted: return the error, which is about that place."""
    changed = [*lines[:place], canonical(record) + b"\n", *lines[place + 1 :]]
    with pytest.raises(LedgerError) as caught:
        check(tmp_path / "copy.jsonl", b"".join(changed))
    assert is_about(caught.value, place + 1)
    return caught.value


def is_about(error, number):
    """Whether an error is about this record, or names its line where it cannot be read as one."""
    return error.record == number or (error.record is None and f": line {number}: " in str(error))


def copy_of(path, data):
    path.unlink(missing_ok=True)  # some file systems write to the disk at once what is written over a file
    path.write_bytes(data)
    return Copy(path)


# -------------------------------------------------------------------------------------------- byte by byte


def test_every_byte_of_every_field_counts(lines, tmp_path):
    """Each byte of the file changed in one bit, one after another: never accepted, its record named."""
    whole, at = b"".join(lines), 0
    assert check(tmp_path / "copy.jsonl", whole) is True
    chooser = random.Random(7)
    for number, line in enumerate(lines, start=1):
        for offset in range(len(line)):
            wrong = bytearray(whole)
            wrong[at + offset] ^= 1 << chooser.randrange(8)
            with pytest.raises(LedgerError) as caught:
                check(tmp_path / "copy.jsonl", bytes(wrong))
            if offset < len(line) - 1:
                assert is_about(caught.value, number), (number, offset, str(caught.value))
        at += len(line)


@pytest.mark.parametrize("field", ["signature", "seal"])
@pytest.mark.parametrize("signer", ["north", "south", "stranger"])
def test_every_replaced_signature_and_seal(lines, tmp_path, field, signer):
    key = KEYS.get(signer) or Ed25519PrivateKey.generate()
    for k, record in enumerate(copy_of(tmp_path / "read.jsonl", b"".join(lines)).records()):
        author = record.author if field == "signature" else SERVER
        if author == signer:
            continue
        message = record.content if field == "signature" else record.digest
        refused(tmp_path, lines, k, json.loads(lines[k]) | {field: key.sign(message).hex()})


def test_another_hash_for_a_withheld_body_or_a_body_for_the_hash(lines, tmp_path):
    """A withheld record cannot be given another content, nor shown with a body that is not its own."""
    for k, plain in enumerate(map(json.loads, lines)):
        for other in ({"withheld": "00" * 32}, {"body": {"round": 2}}):
            wrong = {key: value for key, value in plain.items() if key not in ("body", "withheld")} | other
            assert refused(tmp_path, lines, k, wrong).code == "altered"


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b"3", b"{", b"[" * 100_000, b'{"seq":1}', b'{"a": 1}', b"\xff"], ids=str
)
def test_lines_that_are_no_records(tmp_path, line):
    with pytest.raises(LedgerError, match="line 1"):
        check(tmp_path / "copy.jsonl", line[:200_000] + b"\n")


def test_a_file_that_is_empty_gone_or_cut_inside_a_line(lines, tmp_path):
    with pytest.raises(LedgerError, match="the ledger is empty"):
        check(tmp_path / "copy.jsonl", b"")
    found_wrong("copy.jsonl: the ledger is empty", verify_copy, tmp_path / "copy.jsonl")
    with pytest.raises(LedgerError):
        Copy(tmp_path / "nowhere.jsonl")
    whole = b"".join(lines)
    for end in range(1, len(whole)):
        if whole[end - 1 : end] != b"\n":
            with raises(LedgerError, code="damaged"):
                copy_of(tmp_path / "cut.jsonl", whole[:end])


# ------------------------------------------------------------------------------- what only a kept head shows


@pytest.fixture
def folder(rehearsed, tmp_path):
    return shutil.copytree(rehearsed[1], tmp_path / "run")


def test_a_cut_end_is_found_by_a_kept_head_and_by_nothing_else(folder, tmp_path):
    """Every place to cut: the chain alone is in order, the head of anybody who saw more is missing."""
    records = records_of(folder)
    closed = [record.seq for record in records if record.kind in ("scores", "end", "seen")]
    whole = copied(folder, path := tmp_path / "copy.jsonl").read_bytes().splitlines(keepends=True)
    for cut in closed[:-1]:
        path.write_bytes(b"".join(whole[:cut]))
        shortened = list(verify_copy(path))
        assert shortened[-1] == f"head: {records[cut - 1].digest.hex()}"
        assert list(verify_copy(path, head=records[cut - 1].digest.hex()))
        for head in (record.digest.hex() for record in records[cut:]):
            found_wrong(rf"head {head} is not on this chain", verify_copy, path, head=head)


def test_a_kept_head_is_placed_by_record_and_round(folder):
    rounds = 0
    for record in records_of(folder):
        rounds += record.kind == "round"
        line = next(
            line for line in verify_folder(folder, head=record.digest.hex().upper()) if "on the ch" in line
        )
        after = f"after round {rounds}" if rounds else "before round 1"
        assert line == f"head {record.digest.hex()[:16]}...: on the chain: record {record.seq}, {after}"
    for odd in ("", "00", "g" * 64, "0" * 63):
        found_wrong("a head is 64 hexadecimal digits", verify_folder, folder, head=odd)


def test_whatever_the_server_rewrites_before_the_last_signed_head_is_found(rehearsed, tmp_path, monkeypatch):
    """Its own records, one after another, with its real key: members' signatures say otherwise."""
    form = kinds.converted
    monkeypatch.setattr(
        kinds, "converted", lambda body, kind: form({key: body[key] for key in body if key != "x"}, kind)
    )
    records = records_of(rehearsed[1])
    last = max(record.seq for record in records if record.kind == "end")
    path = copied(rehearsed[1], tmp_path / "copy.jsonl")
    assert list(verify_copy(path)) == list(verify_folder(rehearsed[1]))
    for number in [record.seq for record in records if record.author == SERVER and record.seq <= last]:
        path = shutil.copytree(rehearsed[1], tmp_path / str(number))
        written_anew(path, lambda record, body, n=number: body.update(x=1) if record.seq == n else None)
        with pytest.raises(LedgerError, match=r"^record \d+ \((join|report|seen|outcome|masked)"):
            list(verify_folder(path))
        shutil.rmtree(path)


def test_a_fork_after_the_last_signed_head_is_found_by_who_kept_it(folder):
    """Two ends of one history, both sealed by the server: each verifies, neither has the other's head."""
    from fedmerit.ledger.decisions import Terms
    from runs import record_decision

    other = shutil.copytree(folder, folder.parent / "other")
    record_decision(folder, Terms("1000.00", "expected-accuracy"))
    record_decision(other, Terms("1000.00", "expected-accuracy", rule="equal"))
    ends = [records_of(path)[-1].digest.hex() for path in (folder, other)]
    common = records_of(folder)[-2].digest.hex()
    for path, own, others in ((folder, ends[0], ends[1]), (other, ends[1], ends[0])):
        assert list(verify_folder(path, head=own))
        assert list(verify_folder(path, head=common))
        found_wrong("is not on this chain", verify_folder, path, head=others)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda body: body.update(head="00" * 32), "its author saw a different history"),
        (lambda body: body.update(round=1), "signs round 1, but its head is of record"),
        (lambda body: body.update(run="00"), "belongs to another run"),
        (lambda body: body.clear(), "missing required field"),
    ],
)
def test_a_signature_under_a_head_that_never_was(folder, edit, message):
    """Signed with the member's own key: a rehearsal has it."""
    keys = Keys(folder / "keys")
    body = dict(records_of(folder)[-1].body)
    edit(body)
    with Ledger(folder / "ledger.sqlite") as ledger, ledger.transaction():
        signature = keys.sign("client-0", content("client-0", "seen", body))
        seal = lambda digest: keys.sign(SERVER, digest)  # noqa: E731
        made = ledger.append("client-0", "seen", body, signature=signature, seal=seal)
    caught = found_wrong(message, verify_folder, folder)
    assert str(caught).startswith(f"record {made.seq} (seen by client-0): ")


NO_ENTRIES = ("x", "1", "1 report 00", "one " + "0" * 64, "1 report 00 11 22", "1 retort 00 11", "trained 00")
NO_NAMES = ("A, B", "[", "7", "null")
NOBODY = ("masked A 00", 'masked "A', "masked [[ 00", "masked 00", 'complained ["A"]')


def test_a_members_file_of_heads(folder, tmp_path):
    found = run_in(folder)
    by_round = {place.rounds: head for head, place in found.places.items()}
    path = tmp_path / "heads"
    path.write_text("".join(f"{number} {head}\n" for number, head in sorted(by_round.items())))
    assert f"kept: all 3 heads in {path} are on the chain" in list(check_kept(path, found))
    for text, message in (
        (f"1 {by_round[2]}\n", r"line 1: shown as the head after round 1, but it is the head of record"),
        (f"1 {by_round[1]}\n2 {'0' * 64}\n", "line 2: head 0+ is not on this chain"),
        ("", "holds no head"),
        ("nonsense\n", "line 1: expected a round, and then a head"),
        ("1 zz\n", "line 1: a head is 64"),
        *((f"{line}\n", "line 1: expected a round, and then a head") for line in NO_ENTRIES),
        *((f"1 released {names}\n", "line 1: expected the names of members as JSON") for names in NO_NAMES),
        *((f"1 {kept}\n", "line 1: expected the names of members as JSON") for kept in NOBODY),
        (f"{'9' * 5000} {'0' * 64}\n", "line 1"),
    ):
        path.write_text(text)
        found_wrong(message, check_kept, path, found)
    found_wrong("cannot be read", check_kept, tmp_path / "nowhere", found)


# --------------------------------------------------------------------------------------- size and accidents


WRITER = """
import sys
from fedmerit.ledger.chain import Ledger
with Ledger(sys.argv[1]) as ledger:
    for k in range(10_000):
        with ledger.transaction():
            for part in range(3):
                ledger.append("server", "batch", {"k": k, "part": part, "text": "x" * 500})
        print("done", k, flush=True)
"""


def test_killed_between_any_two_statements_nothing_acknowledged_is_lost_and_nothing_half_written(tmp_path):
    chooser = random.Random(3)
    for attempt in range(6):
        path = tmp_path / f"{attempt}.sqlite"
        child = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        said = [child.stdout.readline() for _ in range(1 + chooser.randrange(20))]
        time.sleep(chooser.random() / 50)
        child.send_signal(signal.SIGKILL)
        said += child.communicate()[0].splitlines()
        acknowledged = sum(line.startswith("done") for line in said)
        with Ledger(path, read_only=True) as ledger:
            assert verify_chain(ledger, lambda _: {}) is False
            written = [(record.body["k"], record.body["part"]) for record in ledger.records()]
        whole = len(written) // 3
        assert written == [(k, part) for k in range(whole) for part in range(3)]
        assert acknowledged <= whole <= acknowledged + 1


KILLED = """
import os, signal, sqlite3, sys
from fedmerit.ledger.chain import Ledger
left = int(sys.argv[2])

class Connection(sqlite3.Connection):
    def execute(self, *arguments):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return super().execute(*arguments)

connect = sqlite3.connect
sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Connection, **options)
Ledger(sys.argv[1]).close()
"""


@pytest.mark.parametrize("statements", range(8))
def test_killed_while_a_ledger_is_made_there_is_none_or_a_whole_one(tmp_path, statements):
    path = tmp_path / "ledger.sqlite"
    done = subprocess.run([sys.executable, "-c", KILLED, path, str(statements)], check=False)
    assert done.returncode == (-signal.SIGKILL if statements < 6 else 0)
    if path.exists():
        with Ledger(path, read_only=True) as ledger:
            assert len(ledger) == 0
    others = {item.name for item in tmp_path.iterdir()} - {path.name}
    assert all(TEMPORARY.fullmatch(name) or name.startswith("ledger.sqlite-") for name in others)
    with Ledger(path) as ledger:
        assert len(ledger) == 0
