"""Every field of every kind of record, changed and signed anew by all who sign: it is found, or is listed.

What nothing in a ledger can show is listed in docs/threats.md with the reason; this test compares that list
with what passes.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fedmerit.config import recorded, recorded_hash
from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, exact, load_key
from fedmerit.ledger.chain import Copy, Record, exported
from fedmerit.ledger.rounds import after_round, sees
from fedmerit.protocol.outcome import included_hash
from fedmerit.verify import verify_copy, verify_folder
from forging import anew, changes, places, put
from refusals import found_wrong
from runs import records_of, rounds_of
from sample_runs import made

THREATS = Path(__file__).parents[2] / "docs" / "threats.md"
RUNS = {  # of which records: what they have in common is tried in one or two of them
    "masked": ("run", "pool", "report", "round", "approval"),
    "grouped": ("totals", "score", "decision", "payout"),
    "sampled": ("schedule", "run"),
    "flower": None,
    "aborted": ("round",),
    "unmasked": ("analysis",),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return made(tmp_path_factory.mktemp("every"))


def keys_of(files, name):
    if name == "unmasked":
        return {}
    return {path.stem: load_key(path) for path in (files / name / "keys").glob("*.pem")}


def records_in(files, name):
    return [replace(one, body=json.loads(canonical(one.body))) for one in records_of(files / name)]


def members_in(records):
    return recorded(records[0].body["terms"]["config"]).clients


def said(author, kind, body):
    """A record that is not there."""
    return Record(0, author, kind, body, b"", b"", b"")


def where(records, kind, n=0):
    return [k for k, one in enumerate(records) if one.kind == kind][n]


def named(kind, path, names):
    """A place as the page lists it: members, utilities and numbers of entries left out."""
    steps = [kind]
    for step in path:
        steps.append("*" if isinstance(step, int) or step in names else step)
    if kind == "analysis" and steps[1:] != ["round"]:
        return "analysis.*"
    return ".".join(steps)


def listed():
    """Fields that docs/threats.md says nothing in the ledger can show."""
    text = THREATS.read_text(encoding="utf-8").split("### What no ledger can show\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {field for row in rows for field in re.findall(r"`([a-z_0-9.*]+)`", row)}


def is_rounding(value):
    return isinstance(value, str) and abs(float.fromhex(value)) < 1e-12


@pytest.mark.long
def test_every_field_is_compared_or_listed(files, tmp_path):
    passed, tried = {}, set()
    for name, kinds in RUNS.items():
        records = records_in(files, name)
        names = {*members_in(records), *records_utilities(records), SERVER}
        keys, path = keys_of(files, name), tmp_path / "copy.jsonl"
        path.write_bytes(anew(records, keys))
        assert list(verify_copy(path)), "what is signed anew without a change verifies"
        last = {}
        for seq, record in enumerate(records, start=1):  # the last of each place: nothing later repairs it
            for place, value in places(record.body) if kinds is None or record.kind in kinds else ():
                last[named(record.kind, place, names), type(value)] = (seq, record, place, value)
            if record.kind == "decision":
                last["decision.despite_doubts", bool] = (seq, record, ("despite_doubts",), False)
        for (what, _), (seq, record, place, value) in last.items():
            tried.add(what)
            for other in changes(value):
                if canonical(other) == canonical(value) or (place == () and not isinstance(other, dict)):
                    continue
                path.write_bytes(anew(records, keys, seq, put(record.body, place, other)))
                try:
                    list(verify_copy(path))
                except LedgerError:
                    continue
                passed.setdefault(what, []).append((name, other))
    assert {what.partition(".")[0] for what in tried} >= {
        "run", "pool", "join", "schedule", "masked", "outcome", "report", "round", "scores", "totals",
        "score", "end", "seen", "decision", "payout", "analysis", "approval",
    }  # fmt: skip
    expected = listed()
    passed = {  # a sum that is zero but for the last bits may have other last bits
        what: found
        for what, found in passed.items()
        if what != "decision.fence.rest" or not all(is_rounding(other) for _, other in found)
    }
    assert {what: found[:2] for what, found in passed.items() if what not in expected} == {}
    assert {*expected} - {*passed} == set()


def records_utilities(records):
    return {name for record in records if record.kind == "round" for name in record.body["utilities"]}


@pytest.mark.parametrize("name", [name for name in RUNS if name != "unmasked"])
def test_a_record_by_somebody_else_is_found(files, tmp_path, name):
    """Each kind, once, by an author who never writes it, signed with that author's own key."""
    records = records_in(files, name)
    keys, path = keys_of(files, name), tmp_path / "copy.jsonl"
    member = members_in(records)[0]
    for record in {one.kind: one for one in records[1:]}.values():
        other = member if record.author == SERVER else SERVER
        swapped = [replace(one, author=other) if one is record else one for one in records]
        path.write_bytes(anew(swapped, keys))
        with pytest.raises(LedgerError):
            list(verify_copy(path))


# ------------------------------------------------------------------- records that no honest server writes


def refused(path, records, keys, match, *, reader=""):
    path.write_bytes(anew(records, keys))
    if reader:
        own = path.with_name("own.jsonl")
        own.write_bytes(b"".join(exported(Copy(path), sees(reader))))
        path = own
    found_wrong(match, verify_copy, path, member=reader or None)


@pytest.fixture
def flower(files, tmp_path):
    """Where to write a copy, and records and keys of a run between machines."""
    return tmp_path / "copy.jsonl", records_in(files, "flower"), keys_of(files, "flower")


def of_round(records, kind, number=3):
    return next(one for one in records if one.kind == kind and one.body["round"] == number)


def with_config(records, old, new):
    """The same ledger of a run with another setting, to which everybody agreed."""
    text = records[0].body["terms"]["config"].replace(old, new)
    for body in (one.body for one in records if one.kind in ("run", "join")):
        body["terms"].update(config=text, config_hash=recorded_hash(text))


def summing(records, keys, path, count):
    """The same run with the last round over fewer members; what follows from it is computed anew."""
    names = list(members_in(records)[:count])
    hashed, weight = included_hash(names), exact(100.0 * count)
    of_round(records, "outcome").body.update(included=hashed, weight=weight)
    of_round(records, "round").body.update(included=names, silent=[])
    of_round(records, "schedule").body["members"] = names
    inputs = of_round(records, "masked").body["inputs"]
    of_round(records, "masked").body["inputs"] = {name: inputs[name] for name in names}
    kept = []
    for one in records:
        if one.kind == "report" and one.body["round"] == 3:
            one.body["bound_to"].update(included=hashed, weight=weight)
            kept += [one] if one.author in names else []
        elif one.kind != "decision":
            kept.append(one)
    at = where(kept, "scores", 2)
    path.write_bytes(anew(kept[:at], keys))
    config = recorded(records[0].body["terms"]["config"])
    ((_, body),) = after_round(rounds_of(Copy(path)), config)
    kept[at] = replace(kept[at], body=body)
    return kept


def test_a_sum_of_fewer_than_three_or_than_the_threshold_is_refused(files, flower):
    path, records, keys = flower
    two = summing(records_in(files, "flower"), keys, path, 2)
    refused(path, two, keys, "sums 2 members, but at least 3 are needed")
    records = summing(records, keys, path, 3)
    path.write_bytes(anew(records, keys))
    assert list(verify_copy(path))
    with_config(records, "enabled = true", "enabled = true\nthreshold = 4")
    refused(path, records, keys, "sums 3 members, but at least 4 are needed")


def inserted(kind, body, before="end", author=SERVER):
    """One more record before the first of a kind, or at the end; its body may follow from the others."""

    def edit(records):
        at = where(records, before) if before else len(records)
        made = said(author, kind, body(records) if callable(body) else body)
        return [*records[:at], replace(made, digest=records[at - 1].digest), *records[at:]]

    return edit


def twice(kind, n=0):
    def edit(records):
        at = where(records, kind, n)
        return [*records[: at + 1], replace(records[at], digest=b""), *records[at + 1 :]]

    return edit


def without(*kinds, n=0):
    """All records of these kinds but the first, and the ``n``-th of that one, are left out."""

    def edit(records):
        gone = where(records, kinds[0], n)
        return [one for k, one in enumerate(records) if k != gone and one.kind not in kinds[1:]]

    return edit


def put_in(kind, n=0, **values):
    return lambda records: records[where(records, kind, n)].body.update(values)


def totals_with(fact, value):
    def edit(records):
        for facts in records[where(records, "totals")].body["utilities"].values():
            facts["summed"][fact] = value

    return edit


def round_too_many(records):
    return {**of_round(records, "schedule").body, "round": 4}


def round_left_open(records):
    records = inserted("schedule", round_too_many)(records)
    with_config(records, "rounds = 3", "rounds = 4")
    return records


def early_head(records):
    head = records[where(records, "scores") - 1].digest.hex()
    return {**records[where(records, "seen")].body, "round": 1, "head": head}


def scores_after_the_end(records):
    late = records.pop(where(records, "scores", 3))
    records.insert(where(records, "end") + 1, late)


def first_model_worth(number):
    def edit(records):
        for values in of_round(records, "round", number).body["utilities"].values():
            values["first"] = exact(0.625)

    return edit


WITHHELD = {"member": "Site 1", "salt": "0" * 32}
IN_ALL, IN_COORDINATOR = (f"not a kind of record of a run with scoring.visibility = '{one}'"
                          for one in ("all", "coordinator"))  # fmt: skip
FALSE = [  # in a run of which records, what is there, and why it is refused
    # nothing computes these anew, and whoever reads the ledger would believe them
    ("flower", inserted("score", {"round": 3, **WITHHELD, "cumulative_alpha": {"fit": exact(9.0)}}), IN_ALL),
    ("flower", inserted("totals", {"round": 3, "utilities": {}}), IN_ALL),
    ("flower", inserted("payout", {"decision": 1, **WITHHELD, "share": exact(1.0), "cents": 9}, ""), IN_ALL),
    ("flower", inserted("bonus", {"member": "Site 1"}, ""), "not a kind of record that this version knows"),
    ("flower", put_in("decision", totals={"n": 999}), "unknown field `totals`"),
    ("grouped", inserted("scores", {"round": 2, "cumulative_alpha": {}}), IN_COORDINATOR),
    ("grouped", put_in("decision", cents={"client-0": 10**9}), "unknown field `cents`"),
    ("flower", inserted("schedule", round_too_many), "begins round 4 of 3"),
    ("flower", round_left_open, "ends while round 4 is open"),
    *(("masked", first_model_worth(number), "of the first model than an earlier round on this slice")
      for number in (1, 2)),
    ("flower", without("join", n=2), "its author has not joined the run"),
    ("flower", twice("scores", 2), "got {'scores': 2}"),
    ("flower", without("scores", "seen", "decision", n=2), "after round 3: expected records .*got {}"),
    ("flower", twice("seen"), "comes before the end of the run, or is the second one of its author"),
    ("flower", inserted("seen", early_head, "scores", "Site 1"), "before the end of the run"),
    ("flower", put_in("round", 2, members_checkpoint="0" * 64), "expected in a rehearsal, and only there"),
    ("unmasked", twice("analysis"), "the second of its round"),
    ("unmasked", without("analysis"), "expected an analysis if the round has a sum"),
    ("masked", scores_after_the_end, "comes after the end of the run"),
    # in a member's own copy
    *(("grouped client-1", edit, r"record \d+ \((decision|totals) by server\)") for edit in (
        *(put_in("decision", **{term: value}) for term, value in (
            ("rounds", 1), ("rounds", "x"), ("rounds", None), ("unpaid", -5), ("unpaid", 100),
            ("unpaid", True), ("rule", "x"),
            ("decision", True))),
        *(totals_with(fact, value)
          for fact in ("n", "gain", "alpha") for value in ("x", True, None, [])))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "match"), FALSE)
def test_records_that_no_honest_server_writes_are_refused(files, tmp_path, name, edit, match):
    name, _, reader = name.partition(" ")
    records = records_in(files, name)
    refused(tmp_path / "copy.jsonl", edit(records) or records, keys_of(files, name), match, reader=reader)


@pytest.mark.parametrize("depth", [40, 300, 900])
def test_what_is_too_deep_is_an_error_of_the_ledger(flower, depth):
    """Whoever reads it must not die of it; 900 levels are more than Python's stack takes."""
    path, records, keys = flower
    path.write_bytes(anew(records, keys))
    lines = path.read_bytes().split(b"\n")
    nested = b"[" * depth + b"]" * depth
    lines[-2] = re.sub(rb'"cap":"[^"]*"', b'"cap":' + nested, lines[-2])
    path.write_bytes(b"\n".join(lines))
    assert nested in path.read_bytes()
    found_wrong("cannot be read", verify_copy, path)


def test_a_total_weight_that_the_members_cannot_have_is_found(files, tmp_path):
    """In the outcome and in all reports alike, signed by everybody: uniform weights of four are 4."""
    for name, weight in (("sampled", 999.0), ("grouped", 3.0), ("masked", 1e9)):
        records = records_in(files, name)
        for record in records:
            if record.kind == "outcome":
                record.body["weight"] = exact(weight)
            if record.kind == "report":
                record.body["bound_to"]["weight"] = exact(weight)
        refused(tmp_path / "copy.jsonl", records, keys_of(files, name), "states a total weight of")


@pytest.mark.parametrize("file", ["model-0002.safetensors", "members-0002.safetensors"])
def test_a_checkpoint_that_is_not_the_recorded_one_is_found(files, tmp_path, file):
    path = shutil.copytree(files / "unmasked", tmp_path / "run")
    assert list(verify_folder(path))
    with (path / "checkpoints" / file).open("ab") as stream:
        stream.write(b"x")
    found_wrong(rf"{file}: not the checkpoint that round 2 recorded", verify_folder, path)
