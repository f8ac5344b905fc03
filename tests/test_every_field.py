"""Every field of every kind of record, changed and signed anew by all who sign: it is found, or is listed.

The ledgers are those of an earlier version, because their files hold everybody's keys. What nothing in a
ledger can show is listed in docs/threats.md with the reason; this test compares that list with what passes.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from fedmerit.copies import exported
from fedmerit.errors import LedgerError
from fedmerit.federation.verify import verify_copy, verify_folder
from fedmerit.keys import load_key
from fedmerit.ledger import SERVER, START, Ledger, canonical, content, exact, link
from older_files import HERE, copied

THREATS = Path(__file__).parents[1] / "docs" / "threats.md"
RUNS = {  # of which records: what they have in common is tried in one or two of them
    "masked": None,
    "grouped": ("totals", "score", "decision", "payout"),
    "sampled": ("schedule",),
    "flower": None,
}
HEX = re.compile(r"[0-9a-f]{32,}")
NUMBER = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return copied("0.1.0", tmp_path_factory.mktemp("every"))


def keys_of(files, name):
    """Everybody's private key, by author."""
    of_members = files / ("members" if name == "flower" else f"{name}/keys")
    found = {path.stem: load_key(path) for path in of_members.glob("*.pem")}
    return found | {SERVER: load_key(files / name / "keys" / "server.pem")}


def anew(records, keys, at, body):
    """The lines of a copy in which record ``at`` has another body; heads in later records are followed."""
    previous, heads, lines = START, {}, []
    for record in records:
        told = body if record.seq == at else _followed(record.body, heads)
        signature = keys[record.author].sign(content(record.author, record.kind, told))
        digest = link(previous, record.seq, content(record.author, record.kind, told), signature)
        heads[record.digest.hex()] = digest.hex()
        seal = keys[SERVER].sign(digest)
        line = {"seq": record.seq, "author": record.author, "kind": record.kind, "body": told}
        line |= {"digest": digest.hex(), "signature": signature.hex(), "seal": seal.hex()}
        lines.append(canonical(line))
        previous = digest
    return b"\n".join([*lines, b""])


def _followed(value, heads):
    if isinstance(value, dict):
        return {key: _followed(item, heads) for key, item in value.items()}
    if isinstance(value, list):
        return [_followed(item, heads) for item in value]
    return heads.get(value, value) if isinstance(value, str) else value


def changes(value):
    """Other values that somebody might put there."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, -5, str(value), None)
    elif value is None:
        yield from ("x", 0, {}, [])
    elif isinstance(value, str):
        if HEX.fullmatch(value):
            yield from (
                "0123456789abcdef"[(int(value[0], 16) + 1) % 16] + value[1:],
                value.upper() + "F",
                "00",
            )
        elif NUMBER.fullmatch(value):
            found = float.fromhex(value)
            yield from (
                exact(found * 1.5 + 0.01),
                exact(found * 0.99),
                exact(float("nan")),
                exact(-1e300),
                "x",
            )
        else:
            yield from (value + "x", "")
        yield from (None, 1)
    elif isinstance(value, list):
        yield from (value[:-1], value + value[-1:], value[::-1], [*value, "nobody"], None)
    elif isinstance(value, dict):
        yield {**value, "unexpected": "x"}
        yield None
        for key in value:
            yield {name: item for name, item in value.items() if name != key}
            break


def places(body, path=()):
    """Every place in a body, as a path."""
    yield path, body
    if isinstance(body, dict):
        for key, item in body.items():
            yield from places(item, (*path, key))
    elif isinstance(body, list):
        for k, item in enumerate(body):
            yield from places(item, (*path, k))


def put(body, path, value):
    if not path:
        return value
    made = json.loads(canonical(body))
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return made


def named(kind, path, names):
    """A place as the page lists it: members, utilities and numbers of entries left out."""
    steps = [kind]
    for step in path:
        steps.append("*" if isinstance(step, int) or step in names else step)
    return ".".join(steps)


def listed():
    """Fields that docs/threats.md says nothing in the ledger can show."""
    text = THREATS.read_text(encoding="utf-8").split("### What no ledger can show\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {field for row in rows for field in re.findall(r"`([a-z_0-9.*]+)`", row)}


@pytest.mark.slow
def test_every_field_is_compared_or_listed(files, tmp_path):
    passed, tried = {}, set()
    for name, kinds in RUNS.items():
        with Ledger(files / name / "ledger.sqlite", read_only=True) as ledger:
            records, lines = list(ledger.records()), b"".join(exported(ledger))
        run = records[0].body
        names = {*run["members"], *records_utilities(records), SERVER}
        keys, path = keys_of(files, name), tmp_path / "copy.jsonl"
        path.write_bytes(anew(records, keys, 0, None))
        assert list(verify_copy(path)), "what is signed anew without a change verifies"
        path.write_bytes(lines)
        assert list(verify_copy(path))
        last = {}
        for record in records:  # the last of each kind and place: nothing later repairs it, most is before it
            for place, value in places(record.body) if kinds is None or record.kind in kinds else ():
                last[named(record.kind, place, names), type(value)] = (record, place, value)
        for (what, _), (record, place, value) in last.items():
            tried.add(what)
            for other in changes(value):
                if other == value or (place == () and not isinstance(other, dict)):
                    continue
                path.write_bytes(anew(records, keys, record.seq, put(record.body, place, other)))
                try:
                    list(verify_copy(path))
                except LedgerError:
                    continue
                passed.setdefault(what, []).append((name, other))
    assert {what.partition(".")[0] for what in tried} >= {
        "run", "pool", "join", "schedule", "masked", "outcome", "report", "round", "scores", "totals",
        "score", "end", "seen", "decision", "payout",
    }  # fmt: skip
    expected = listed()
    assert set(passed) == expected, {
        what: passed.get(what, [])[:2] for what in sorted(set(passed) ^ expected)
    }


def records_utilities(records):
    return {name for record in records if record.kind == "round" for name in record.body["utilities"]}


@pytest.mark.parametrize("name", RUNS)
def test_a_record_by_somebody_else_is_found(files, tmp_path, name):
    """Each kind, once, by an author who never writes it, signed with that author's own key."""
    with Ledger(files / name / "ledger.sqlite", read_only=True) as ledger:
        records = list(ledger.records())
    keys, path = keys_of(files, name), tmp_path / "copy.jsonl"
    member = records[0].body["members"][0]
    for record in {one.kind: one for one in records[1:]}.values():
        other = member if record.author == SERVER else SERVER
        swapped = [type(one)(**{**vars(one), "author": other}) if one is record else one for one in records]
        path.write_bytes(anew(swapped, keys, 0, None))
        with pytest.raises(LedgerError):
            list(verify_copy(path))


def test_the_files_are_there():
    assert {path.name for path in (HERE / "0.1.0").iterdir()} >= set(RUNS)


def test_a_total_weight_that_the_members_cannot_have_is_found(files, tmp_path):
    """In the outcome and in all reports alike, signed by everybody: uniform weights of four are 4."""
    for name, weight in (("sampled", 999.0), ("grouped", 3.0), ("masked", 1e9)):
        with Ledger(files / name / "ledger.sqlite", read_only=True) as ledger:
            records = list(ledger.records())
        keys, told = keys_of(files, name), {}
        for record in records:
            body = json.loads(canonical(record.body))
            if record.kind == "outcome":
                body["weight"] = exact(weight)
            if record.kind == "report":
                body["bound_to"]["weight"] = exact(weight)
            told[record.seq] = body
        path = tmp_path / "copy.jsonl"
        changed = [type(one)(**{**vars(one), "body": told[one.seq]}) for one in records]
        path.write_bytes(anew(changed, keys, 0, None))
        with pytest.raises(LedgerError, match="states a total weight of"):
            list(verify_copy(path))


def test_nothing_but_signatures_and_money_comes_after_the_end(files, tmp_path):
    with Ledger(files / "masked" / "ledger.sqlite", read_only=True) as ledger:
        records = list(ledger.records())
    (end,) = (record for record in records if record.kind == "end")
    (late,) = (record for record in records if record.kind == "scores" and record.body["round"] == 4)
    moved = [one for one in records if one is not late]
    moved.insert(moved.index(end) + 1, late)
    moved = [type(one)(**{**vars(one), "seq": k}) for k, one in enumerate(moved, start=1)]
    path = tmp_path / "copy.jsonl"
    path.write_bytes(anew(moved, keys_of(files, "masked"), 0, None))
    with pytest.raises(LedgerError, match="comes after the end of the run"):
        list(verify_copy(path))


@pytest.mark.parametrize("file", ["model-0002.safetensors", "members-0002.safetensors"])
def test_a_checkpoint_that_is_not_the_recorded_one_is_found(files, tmp_path, file):
    path = shutil.copytree(files / "unmasked", tmp_path / "run")
    assert list(verify_folder(path))
    with (path / "checkpoints" / file).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(LedgerError, match=rf"{file}: not the checkpoint that round 2 recorded"):
        list(verify_folder(path))
