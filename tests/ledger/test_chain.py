"""The ledger: whatever is changed behind its back is found, and the first wrong record is named."""

import json
import os
import random
import shutil
import sqlite3
import stat
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, content, exact, number
from fedmerit.ledger.chain import Ledger
from raising import raises
from refusals import found_wrong
from runs import verify_chain

KEYS = {name: Ed25519PrivateKey.generate() for name in (SERVER, "north", "south")}
PUBLIC = {name: key.public_key().public_bytes_raw() for name, key in KEYS.items()}
RECORDS = [
    (SERVER, "run", {"run": "7f", "rounds": 2}),
    ("north", "report", {"round": 1, "alone": exact(0.25)}),
    ("south", "report", {"round": 1, "alone": exact(0.5), "note": "é"}),
    (SERVER, "round", {"round": 1, "included": ["north", "south"], "aborted": ""}),
    ("north", "report", {"round": 1, "alone": exact(0.25)}),  # the same words once more, elsewhere
]
COLUMNS = ("author", "kind", "body", "digest", "signature", "seal")


def append(ledger, author, kind, body, *, signed=True):
    if not signed:
        return ledger.append(author, kind, body)
    signature = KEYS[author].sign(content(author, kind, body))
    return ledger.append(author, kind, body, signature=signature, seal=KEYS[SERVER].sign)


def fill(path, records=RECORDS, *, signed=True):
    with Ledger(path) as ledger, ledger.transaction():
        for author, kind, body in records:
            append(ledger, author, kind, body, signed=signed)
    return path


def write(ledger, *records, then=lambda: None):
    """Append records in one transaction, before the end of which something else is done."""
    with ledger.transaction():
        for record in records:
            append(ledger, *record)
        then()


def verify(path, keys=PUBLIC):
    with Ledger(path, read_only=True) as ledger:
        return verify_chain(ledger, lambda _: keys)


def sql(path, *statements):
    db = sqlite3.connect(path)
    for statement, *values in statements:
        db.execute(statement, *values)
    db.commit()
    db.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("ledger") / "ledger.sqlite")


@pytest.fixture
def path(original, tmp_path):
    return shutil.copy(original, tmp_path / "ledger.sqlite")


def test_what_was_written_comes_back_and_an_unsigned_ledger_is_no_signed_one(path, tmp_path):
    assert verify(path) is True
    with Ledger(path, read_only=True) as ledger:
        assert [(r.author, r.kind, r.body) for r in ledger.records()] == RECORDS
        assert [r.seq for r in ledger.records("report")] == [2, 3, 5]
        assert len(ledger) == 5
        assert ledger.head == list(ledger.records())[-1].digest.hex()
    plain = fill(tmp_path / "plain.sqlite", signed=False)
    assert verify(plain, keys={}) is False
    with raises(LedgerError, record=1, code="unsigned"):
        verify(plain)
    found_wrong(r"^record 1 \(run by server\): signed, in a ledger whose first", verify, path, keys={})


# ------------------------------------------------------------------------------------------- tampering


@given(
    seq=st.integers(1, len(RECORDS)),
    column=st.sampled_from(COLUMNS),
    at=st.integers(0, 10**6),
    flip=st.integers(1, 255),
)
@settings(max_examples=100)
def test_one_changed_byte_anywhere_is_found(original, tmp_path_factory, seq, column, at, flip):
    path = shutil.copy(original, tmp_path_factory.mktemp("byte") / "ledger.sqlite")
    db = sqlite3.connect(path)
    (value,) = db.execute(f"SELECT CAST({column} AS BLOB) FROM records WHERE seq = ?", (seq,)).fetchone()
    changed = bytearray(value)
    changed[at % len(changed)] ^= flip
    kept = "TEXT" if column in ("author", "kind") else "BLOB"
    db.execute(f"UPDATE records SET {column} = CAST(? AS {kept}) WHERE seq = ?", (bytes(changed), seq))
    db.commit()
    db.close()
    with pytest.raises(LedgerError) as caught:
        verify(path)
    found = caught.value
    assert found.record == seq or (found.code == "damaged" and f"after record {seq - 1}: " in str(found))


@given(
    seq=st.integers(1, len(RECORDS)),
    column=st.sampled_from(COLUMNS),
    value=st.none()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=64),
)
@settings(max_examples=100)
def test_any_other_cell_is_found(original, tmp_path_factory, seq, column, value):
    path = shutil.copy(original, tmp_path_factory.mktemp("cell") / "ledger.sqlite")
    db = sqlite3.connect(path)
    try:
        db.execute(f"UPDATE records SET {column} = ? WHERE seq = ?", (value, seq))
        (same,) = db.execute(f"SELECT {column} FROM records WHERE seq = ?", (seq,)).fetchone()
        db.commit()
    except sqlite3.IntegrityError:  # the table itself refuses null
        assume(False)
    finally:
        db.close()
    with raises(LedgerError, record=seq):
        verify(path)
    assert same is not None


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"[]", b"3", b'{"a":1.5}', b'{"b":1,"a":2}', b'{"a": 1}', b"{"]
)
def test_bodies_that_are_no_canonical_object(path, body):
    sql(path, ("UPDATE records SET body = ? WHERE seq = 3", (body,)))
    with raises(LedgerError, record=3, code="unreadable"):
        verify(path)


ALL_CELLS = ", ".join(COLUMNS)
MOVE = "UPDATE records SET seq = ? WHERE seq = ?"
TAMPERING = {
    "dropped": ([("DELETE FROM records WHERE seq = 3",)], 3, "missing"),
    "dropped and renumbered": (
        [("DELETE FROM records WHERE seq = 3",), ("UPDATE records SET seq = seq - 1 WHERE seq > 3",)],
        3,
        "altered",
    ),
    **{
        f"swapped {one, other}": (
            [(MOVE, (-1, one)), (MOVE, (one, other)), (MOVE, (other, -1))],
            one,
            "altered",
        )
        for one, other in ((1, 2), (2, 3), (2, 5), (4, 5))
    },
    "inserted": (
        [
            ("UPDATE records SET seq = -seq - 1 WHERE seq > 2",),
            ("UPDATE records SET seq = -seq WHERE seq < 0",),
            (f"INSERT INTO records SELECT 3, {ALL_CELLS} FROM records WHERE seq = 2",),
        ],
        3,
        "altered",
    ),
    "first": ([(f"INSERT INTO records SELECT 0, {ALL_CELLS} FROM records LIMIT 1",)], 1, "missing"),
}


@pytest.mark.parametrize(("statements", "record", "code"), TAMPERING.values(), ids=TAMPERING)
def test_whoever_has_the_file_and_no_key_is_found(path, statements, record, code):
    sql(path, *statements)
    with raises(LedgerError, record=record, code=code):
        verify(path)


@pytest.mark.parametrize("digest", ["'text'", "7", "x'00'", "1.5"])
def test_a_last_digest_that_is_none_is_an_error_that_says_so(path, digest):
    """A flipped bit in the header of a cell makes a number or text of a blob."""
    sql(path, ("PRAGMA ignore_check_constraints = ON",), (f"UPDATE OR IGNORE records SET digest = {digest}",))
    with Ledger(path) as ledger, raises(LedgerError, code="damaged"):
        ledger.head  # noqa: B018
    with pytest.raises(LedgerError):
        verify(path)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Enough unsigned records for several pages of the table, all of them in the file itself."""
    file = tmp_path_factory.mktemp("long") / "ledger.sqlite"
    bodies = [(SERVER, "run" if k == 1 else "round", {"round": k, "x": "é" * (k % 90)}) for k in range(1, 84)]
    fill(file, bodies, signed=False)
    db = sqlite3.connect(file)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("PRAGMA journal_mode=DELETE")
    db.close()
    return file


def read_all(path):
    try:
        with Ledger(path, read_only=True) as ledger:
            verify_chain(ledger, lambda _: {})
            return [record.digest for record in ledger.records()]
    except LedgerError as error:
        return str(error)


@pytest.mark.long
def test_flipped_bits_of_the_table_lose_no_record_unnoticed(long, tmp_path):
    """Every bit in the head of every page (type, number of cells, where they are), and many elsewhere."""
    whole, right, path = long.read_bytes(), read_all(long), tmp_path / "ledger.sqlite"
    assert len(right) == 83
    page, chooser = int.from_bytes(whole[16:18], "big"), random.Random(5)
    heads = [start + (100 if start == 0 else 0) for start in range(0, len(whole), page)]
    assert len(heads) >= 5
    places = [8 * (head + k) + bit for head in heads for k in range(16) for bit in range(8)]
    places += [chooser.randrange(8 * len(whole)) for _ in range(400)]
    noticed = 0
    for place in places:
        wrong = bytearray(whole)
        wrong[place // 8] ^= 1 << place % 8
        path.write_bytes(wrong)
        found = read_all(path)
        noticed += isinstance(found, str)
        assert isinstance(found, str) or found == right, place
    assert noticed > len(places) / 4


def test_records_that_disappeared_are_missed_by_the_header(long, tmp_path):
    path = shutil.copy(long, tmp_path / "ledger.sqlite")
    sql(path, ("DELETE FROM records WHERE seq > 81",))
    assert read_all(path).endswith("by its header it ends with record 83, the last one here is record 81")
    with Ledger(path) as ledger:
        for read in (lambda: ledger.head, lambda: len(ledger)):
            with raises(LedgerError, code="damaged"):
                read()
        with ledger.transaction(), raises(LedgerError, code="damaged"):
            append(ledger, SERVER, "round", {}, signed=False)


@pytest.mark.parametrize(
    ("order", "change", "record", "code"),
    [
        ((0, 1, 2, 3, 4), {"alone": exact(0.9)}, 3, "unsigned"),  # anew, but nobody can sign what is changed
        ((0, 2, 1), {}, 2, "unsealed"),  # old words cannot be put elsewhere: the server seals a place
    ],
)
def test_a_chain_made_anew_without_keys_is_found(path, order, change, record, code):
    with Ledger(path, read_only=True) as ledger:
        records = list(ledger.records())
    path.unlink()
    with Ledger(path) as ledger, ledger.transaction():
        for old in (records[k] for k in order):
            body, seal = old.body | (change if old.seq == 3 else {}), lambda _, own=old.seal: own
            ledger.append(old.author, old.kind, body, signature=old.signature, seal=seal)
    with raises(LedgerError, record=record, code=code):
        verify(path)


def test_an_author_without_a_key_and_a_key_that_is_none(path):
    with raises(LedgerError, record=3, code="stranger"):
        verify(path, keys={name: PUBLIC[name] for name in (SERVER, "north")})
    with raises(LedgerError, record=3, code="unsigned"):
        verify(path, keys=PUBLIC | {"south": b"short"})


# -------------------------------------------------------------------------------------------- encoding

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def same(one, other):
    """Equal, and true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(one=PLAIN, other=PLAIN)
def test_one_encoding_per_value_and_one_value_per_encoding(one, other):
    assert same(json.loads(canonical(one)), one)
    assert (canonical(one) == canonical(other)) == same(one, other)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"a": {"b": [1, 0.5]}}, r"^record\.a\.b\[\]: floats have no place in a signed record"),
        ({"a": float("nan")}, r"^record\.a: floats have no place"),
        ({1: 2}, r"^record: keys must be text, got 1"),
        ({"a": b"x"}, r"^record\.a: cannot be recorded: bytes"),
        ({"a": {1, 2}}, r"^record\.a: cannot be recorded: set"),
    ],
)
def test_what_has_no_exact_form_is_refused(tmp_path, body, message):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        with pytest.raises(LedgerError, match=message), ledger.transaction():
            ledger.append(SERVER, "run", body)
        assert len(ledger) == 0


@given(value=st.floats())
def test_floats_come_back_to_the_bit(value):
    assert exact(number(exact(value))) == exact(value)


@pytest.mark.parametrize("text", ["", "x", None, 0.5, "0x1p99999", [1]])
def test_text_that_is_no_number(text):
    with pytest.raises(LedgerError, match="expected a number in hexadecimal, got"):
        number(text)


# ---------------------------------------------------------------------------------------- transactions


def test_a_transaction_is_needed_and_all_or_nothing(path):
    with Ledger(path) as ledger:
        before = ledger.head
        with pytest.raises(LedgerError):
            ledger.append(SERVER, "run", {})
        with pytest.raises(ZeroDivisionError):
            write(ledger, *RECORDS[1:3], then=lambda: 1 / 0)
        # SQLite may roll back by itself, for one on a full disk: the first error must not be hidden by that
        with pytest.raises(ZeroDivisionError):
            write(ledger, RECORDS[1], then=lambda: ledger._db.execute("ROLLBACK") and 1 / 0)
        assert (len(ledger), ledger.head) == (5, before)
        with ledger.transaction():
            assert append(ledger, "north", "report", {"round": 2}).seq == 6
            with pytest.raises(LedgerError), ledger.transaction():
                pass
        assert len(ledger) == 6
    assert verify(path) is True


def test_a_commit_that_fails_leaves_no_transaction_open(path):
    with Ledger(path) as ledger:
        size = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count = {size}")  # as a full disk does
        with pytest.raises(LedgerError):
            write(ledger, *[("north", "report", {"text": "x" * 5000})] * 50)
        assert len(ledger) == 5
        ledger._db.execute("PRAGMA max_page_count = 1000000")
        with ledger.transaction():
            append(ledger, "north", "report", {"round": 2})
    assert verify(path) is True


def test_two_writers_wait_for_each_other_and_make_one_chain(path, monkeypatch):
    monkeypatch.setattr("fedmerit.ledger.chain.WAIT", 0.01)
    with Ledger(path) as first, Ledger(path) as second:
        with first.transaction():
            append(first, "north", "report", {"round": 2})
            with pytest.raises(LedgerError), second.transaction():
                raise AssertionError("two writers at once")
            assert len(second) == 5  # what is not committed is not seen
        with second.transaction():
            assert append(second, "south", "report", {"round": 2}).seq == 7
    assert verify(path) is True


# ----------------------------------------------------------------------------------------------- files


def test_no_ledger_and_files_that_are_none(tmp_path):
    with pytest.raises(LedgerError, match=r"holds no run: no gone\.sqlite"):
        Ledger(tmp_path / "gone.sqlite", read_only=True)
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"this is no database, but it is longer than a header of SQLite would be: " * 3)
    for read_only in (True, False):
        with pytest.raises(LedgerError, match=r"other\.sqlite: cannot be opened as a ledger: file is not"):
            Ledger(other, read_only=read_only)
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(LedgerError, match=r"empty\.sqlite: cannot be opened as a ledger: .*got nothing"):
        Ledger(tmp_path / "empty.sqlite", read_only=True)
    with pytest.raises(LedgerError, match="cannot be opened as a ledger"):
        Ledger(tmp_path)
    with Ledger(tmp_path / "new.sqlite"):
        pass
    found_wrong(r"new\.sqlite: the ledger is empty", verify, tmp_path / "new.sqlite")


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_a_file_cut_short_or_overwritten_is_an_error_of_ours(tmp_path, at):
    path = fill(tmp_path / "l.sqlite", [(SERVER, "run", {"k": k, "text": "x" * 500}) for k in range(100)])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * at)])
    with pytest.raises(LedgerError):
        verify(path)
    start = int(len(whole) * at)
    path.write_bytes(whole[:start] + bytes(4096) + whole[start + 4096 :])
    with pytest.raises(LedgerError):
        verify(path)


@pytest.mark.parametrize("name", ["a?b.sqlite", "a%20b.sqlite", "a#b.sqlite", "é [1].sqlite"])
def test_odd_file_names_are_taken_as_they_are(tmp_path, name):
    path = fill(tmp_path / name)
    assert [item.name for item in tmp_path.iterdir()] == [name]
    assert verify(path) is True


def test_reading_leaves_nothing_behind_and_needs_no_permission_to_write(path):
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert verify(path) is True
        assert os.listdir(path.parent) == ["ledger.sqlite"]
    finally:
        path.parent.chmod(0o755)


def test_a_run_under_way_can_be_verified(path):
    with Ledger(path) as ledger:
        with ledger.transaction():
            append(ledger, "north", "report", {"round": 2})
        with Ledger(path, read_only=True) as reader:
            assert verify_chain(reader, lambda _: PUBLIC) is True
            assert len(reader) == 6
            with pytest.raises(LedgerError), reader.transaction():
                append(reader, "north", "report", {"round": 3})


# ------------------------------------------------------------------------------- a file that is a program

FORGED = "SELECT seq, author, kind, body, digest, signature, seal FROM kept WHERE random() > 0"
ENDLESS = (
    "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) "
    "SELECT k AS seq, 'a' AS author, 'b' AS kind, x'7b7d' AS body, x'' AS digest, x'' AS signature, "
    "x'' AS seal FROM n WHERE k < 0"
)
PROGRAMS = {
    "view": [("ALTER TABLE records RENAME TO kept",), (f"CREATE VIEW records AS {FORGED}",)],
    "endless": [("DROP TABLE records",), (f"CREATE VIEW records AS {ENDLESS}",)],
    "beside": [("CREATE VIEW more AS SELECT 1",)],
    "table": [("CREATE TABLE more (a)",)],
    "trigger": [("CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END",)],
    "index": [("CREATE INDEX i ON records (kind)",)],
    "virtual": [("CREATE VIRTUAL TABLE v USING fts5(a)",)],
    "column": [("ALTER TABLE records ADD COLUMN more BLOB DEFAULT x'00'",)],
    "computed": [("ALTER TABLE records ADD COLUMN b AS (zeroblob(1000000000))",)],
    "none": [("DROP TABLE records",), ("CREATE TABLE other (a)",)],
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_file_that_holds_more_than_the_table_is_refused(path, program, read_only):
    sql(path, *PROGRAMS[program])
    with raises(LedgerError, code="schema"):
        Ledger(path, read_only=read_only)


def interior(size, child, start=0):
    """Return a page of a table's tree whose children are all the same page: one cell, pointed at often."""
    most, cell = (size - 8) // 6, size - 8
    head = struct.pack(">BHHHBI", 5, 0, most, cell, 0, child) + struct.pack(">H", cell) * most
    page = head + bytes(cell - start - len(head)) + struct.pack(">IB", child, 100)
    return page.ljust(size - start, b"\0")


@pytest.mark.parametrize("levels", [1, 6])
def test_pages_that_are_used_many_times_cost_no_more_than_their_size(tmp_path, levels):
    """24 kB whose rows are 7 MB with one level of the tree; with six, no disk could hold them."""
    path = tmp_path / "ledger.sqlite"
    sql(path, ("PRAGMA page_size = 8192",))
    sql(path, ("PRAGMA page_size = 8192",), ("VACUUM",))
    fill(path, [(SERVER, "run", {"k": k, "text": "x" * 900}) for k in range(5)])
    data = bytearray(path.read_bytes())
    assert len(data) == 2 * 8192  # the schema, and one leaf, which is the root
    leaf, pages = data[8192:], []
    for level in range(levels):  # page 2 is the root; the leaf moves to the end
        pages.append(interior(8192, 3 + level))
    data = data[:8192] + b"".join(pages) + leaf
    data[28:32] = struct.pack(">I", len(data) // 8192)
    path.write_bytes(data)
    with Ledger(path, read_only=True) as ledger, raises(LedgerError, code="damaged"):
        for count, _ in enumerate(ledger.records()):
            assert count < 2000
    with raises(LedgerError):
        verify(path)


def test_a_schema_that_never_ends_is_an_error(path):
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    data[100:size] = interior(size, 3, 100)
    data += interior(size, 4) + interior(size, 5) + data[size : 2 * size]
    data[28:32] = struct.pack(">I", len(data) // size)
    path.write_bytes(data)
    with pytest.raises(LedgerError):
        Ledger(path, read_only=True)


def test_only_the_owner_reads_a_ledger(tmp_path, monkeypatch):
    before = os.umask(0o022)
    try:
        for name, link in (("a.sqlite", os.link), ("b.sqlite", failing_link)):
            monkeypatch.setattr(os, "link", link)
            with Ledger(tmp_path / name) as ledger, ledger.transaction():
                append(ledger, *RECORDS[0])
                files = list(tmp_path.glob(f"{name}*"))
                assert len(files) == 3
                assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {0o600}
    finally:
        os.umask(before)


def failing_link(*_):
    raise OSError("no second name")
