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
    "sampled": ("schedule",),
    "flower": None,
    "aborted": ("round",),
    "unmasked": ("analysis",),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return made(tmp_path_factory.mktemp("every"))


def keys_of(files, name):
    """Everybody's private key, by author."""
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


def refused(path, records, keys, match, *, reader=None):
    path.write_bytes(anew(records, keys))
    if reader is not None:
        own = path.with_name("own.jsonl")
        own.write_bytes(b"".join(exported(Copy(path), sees(reader))))
        path = own
    found_wrong(match, verify_copy, path, member=reader)


@pytest.fixture
def flower(files, tmp_path):
    """Where to write a copy, and records and keys of a run between machines."""
    return tmp_path / "copy.jsonl", records_in(files, "flower"), keys_of(files, "flower")


@pytest.fixture
def grouped(files, tmp_path):
    """Likewise, of a run in which only the coordinator sees everything."""
    return tmp_path / "copy.jsonl", records_in(files, "grouped"), keys_of(files, "grouped")


def test_records_of_the_other_visibility_are_refused(flower, grouped):
    """Nothing computes them anew, and whoever reads the ledger would believe them."""
    path, records, keys = flower
    end, salt, member = where(records, "end"), "0" * 32, members_in(records)[0]
    another = "not a kind of record of a run with scoring.visibility = 'all'"
    own = {"member": member, "salt": salt}
    score = said(SERVER, "score", {"round": 3, **own, "cumulative_alpha": {"accuracy": exact(9.0)}})
    totals = said(SERVER, "totals", {"round": 3, "utilities": {}})
    payout = said(SERVER, "payout", {"decision": 1, **own, "share": exact(1.0), "cents": 99999999})
    refused(path, [*records[:end], score, *records[end:]], keys, another)
    refused(path, [*records[:end], totals, *records[end:]], keys, another)
    refused(path, [*records, payout], keys, another)
    bonus = said(SERVER, "bonus", {"member": member})
    refused(path, [*records, bonus], keys, "not a kind of record that this version knows")
    made = records[where(records, "decision")].body
    made["totals"] = {"n": 999}
    refused(path, records, keys, "unknown field `totals`")
    path, records, keys = grouped
    end = where(records, "end")
    scores = said(SERVER, "scores", {"round": 2, "cumulative_alpha": {}})
    another = "not a kind of record of a run with scoring.visibility = 'coordinator'"
    refused(path, [*records[:end], scores, *records[end:]], keys, another)
    records[where(records, "decision")].body["cents"] = {"client-0": 10**9}
    refused(path, records, keys, "unknown field `cents`")


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


def test_a_round_too_many_and_an_end_in_a_round_are_refused(flower):
    path, records, keys = flower
    end = where(records, "end")
    opened = said(SERVER, "schedule", {**of_round(records, "schedule").body, "round": 4})
    refused(path, [*records[:end], opened, *records[end:]], keys, "begins round 4 of 3")
    with_config(records, "rounds = 3", "rounds = 4")
    refused(path, [*records[:end], opened, *records[end:]], keys, "ends while round 4 is open")


@pytest.mark.parametrize("number", [1, 2])
def test_what_the_first_model_is_worth_on_a_slice_does_not_change(files, tmp_path, number):
    records = records_in(files, "masked")
    for values in of_round(records, "round", number).body["utilities"].values():
        values["first"] = exact(0.625)
    match = "of the first model than an earlier round on this slice"
    refused(tmp_path / "copy.jsonl", records, keys_of(files, "masked"), match)


def test_who_has_not_joined_reports_nothing(flower):
    path, records, keys = flower
    del records[where(records, "join", 2)]
    refused(path, records, keys, "its author has not joined the run")


def test_scores_are_stated_once_after_each_round(flower):
    path, records, keys = flower
    last = where(records, "scores", 2)
    refused(path, [*records[:last], records[last], *records[last:]], keys, "got {'scores': 2}")
    signed = [record for record in records if record.kind not in ("seen", "decision")]
    refused(path, [*signed[:last], *signed[last + 1 :]], keys, "after round 3: expected records .*got {}")


def test_a_member_signs_one_head_and_at_the_end(flower):
    path, records, keys = flower
    at = where(records, "seen")
    match = "comes before the end of the run, or is the second one of its author"
    refused(path, [*records[: at + 1], replace(records[at], digest=b""), *records[at + 1 :]], keys, match)
    after = where(records, "scores")
    body = {**records[at].body, "round": 1, "head": records[after - 1].digest.hex()}
    early = replace(said(records[at].author, "seen", body), digest=records[after].digest)
    refused(path, [*records[: after + 1], early, *records[after + 1 :]], keys, "before the end of the run")


def test_only_a_rehearsal_keeps_its_members_state(flower):
    path, records, keys = flower
    at = where(records, "round", 2)
    body = {**records[at].body, "members_checkpoint": "0" * 64}
    stated = [*records[:at], replace(records[at], body=body), *records[at + 1 :]]
    refused(path, stated, keys, "a checkpoint of the members: expected in a rehearsal, and only there")


def test_an_analysis_is_there_once(files, tmp_path):
    path, records = tmp_path / "copy.jsonl", records_in(files, "unmasked")
    at = where(records, "analysis")
    refused(path, [*records[:at], records[at], *records[at:]], {}, "the second of its round")
    refused(path, [*records[:at], *records[at + 1 :]], {}, "expected an analysis if the round has a sum")


def decision_with(term, value):
    return lambda records: records[where(records, "decision")].body.update({term: value})


def totals_with(fact, value):
    def edit(records):
        for facts in records[where(records, "totals")].body["utilities"].values():
            facts["summed"][fact] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [decision_with(term, value) for term, value in [
        ("rounds", 1), ("rounds", "x"), ("rounds", None), ("unpaid", -5), ("unpaid", 100), ("unpaid", True),
        ("rule", "x"), ("decision", True)]]
    + [totals_with(fact, value) for fact in ("n", "gain", "alpha") for value in ("x", True, None, [])],
)  # fmt: skip
def test_a_member_compares_totals_and_the_decision_in_its_copy(grouped, edit):
    path, records, keys = grouped
    edit(records)
    refused(path, records, keys, r"record \d+ \((decision|totals) by server\)", reader="client-1")


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


def test_nothing_but_signatures_and_money_comes_after_the_end(files, tmp_path):
    records = records_in(files, "masked")
    (late,) = (record for record in records if record.kind == "scores" and record.body["round"] == 4)
    records.remove(late)
    records.insert(where(records, "end") + 1, late)
    refused(tmp_path / "copy.jsonl", records, keys_of(files, "masked"), "comes after the end of the run")


@pytest.mark.parametrize("file", ["model-0002.safetensors", "members-0002.safetensors"])
def test_a_checkpoint_that_is_not_the_recorded_one_is_found(files, tmp_path, file):
    path = shutil.copytree(files / "unmasked", tmp_path / "run")
    assert list(verify_folder(path))
    with (path / "checkpoints" / file).open("ab") as stream:
        stream.write(b"x")
    found_wrong(rf"{file}: not the checkpoint that round 2 recorded", verify_folder, path)
