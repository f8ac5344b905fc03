"""A finished run, verified; every way to falsify it, each found and its place named; keys of others."""

import copy
import csv
import io
import json
import math
import shutil
import sqlite3
from contextlib import suppress
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.config import from_dict
from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, Member, Roster, exact, load_key, number, public_key, read_roster
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.rounds import after_round
from fedmerit.notes import words
from fedmerit.report.page.html import facts_of
from fedmerit.report.page.text import not_guaranteed
from fedmerit.simulation.run import run
from fedmerit.storage.recorder import score_files, scores_document
from fedmerit.verify import verify_copy, verify_folder
from forging import body_of, copy_for, written
from ledgers import cut, written_anew
from linear_federation import LIAR, Federation
from raising import raises
from refusals import found_wrong
from runs import config_of, folded, records_of, rounds_of
from tiny import ALL, losing, tiny

CONFIG = tiny(ALL)
LOST = {"client-3": "2:report"}


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """Two rounds of four members under secure aggregation; one is silent in the second."""
    path = tmp_path_factory.mktemp("runs") / "signed"
    with losing(LOST):
        run(CONFIG, path)
    return path


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "unsigned"
    with losing(LOST):
        run(from_dict(CONFIG.as_dict(), ["secure_aggregation.enabled=false"]), path)
    return path


@pytest.fixture
def folder(signed, tmp_path):
    return shutil.copytree(signed, tmp_path / "run")


@pytest.fixture
def plain(unsigned, tmp_path):
    return shutil.copytree(unsigned, tmp_path / "plain")


def verify(path):
    return list(verify_folder(path))


def change_one(path, kind, edit, *, which=0):
    """Rewrite one record of a kind; return its number."""
    seq = [record.seq for record in records_of(path) if record.kind == kind][which]
    written_anew(path, lambda record, body: edit(body) if record.seq == seq else None, signed=False)
    return seq


def rewritten(path, times):
    written_anew(path, lambda record, body: None, signed=False, times=times)


# ------------------------------------------------------------------------------------ what is found good


def test_a_run_as_it_was(folder, plain):
    before = {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}
    lines = verify(folder)
    assert before == {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}
    head = sqlite3.connect(folder / "ledger.sqlite").execute("SELECT digest FROM records ORDER BY seq DESC")
    assert lines == [
        f"ledger: {len(records_of(folder))} records, chain and signatures in order",
        "rehearsal: one process held all keys, so signatures prove the order of records, not their authors",
        f"heads: 4 of 4 members signed the head of record {len(records_of(folder)) - 4}, after round 2; "
        f"the ledger has {len(records_of(folder))} records",
        "rounds: 2 of 2, 0 aborted",
        "scores: follow from the reports in the ledger",
        f"head: {head.fetchone()[0].hex()}",
    ]
    assert [line.code for line in lines] == ["chain-signed", "rehearsal", "heads", "rounds", "scores", "head"]
    assert lines[0].values == {"records": len(records_of(folder))}
    assert [line.code for line in verify(plain)] == ["chain", "unsigned", "rounds", "scores", "head"]


def test_a_run_that_was_interrupted(folder):
    whole = verify(folder)[-1]
    start = [record.seq for record in records_of(folder) if record.kind == "schedule"]
    cut(folder / "ledger.sqlite", start[1] - 1)
    with Ledger(folder / "ledger.sqlite") as ledger:
        content = scores_document(rounds_of(ledger), CONFIG)
    for name, data in score_files(content).items():
        (folder / name).write_bytes(data)
    lines = verify(folder)
    assert "rounds: 1 of 2, 0 aborted" in lines
    assert lines[-1] != whole  # what was cut off shows in the head


def test_before_the_first_round(folder):
    cut(folder / "ledger.sqlite", 2)
    for name in ("scores.json", "scores.csv"):
        (folder / name).unlink()
    assert verify(folder)[2:5] == [
        "heads: no member has signed one yet, so everything here rests on the server alone",
        "rounds: 0 of 2, 0 aborted",
        "scores: none yet",
    ]


# ------------------------------------------------------------------------------------------ scores.json


def numbers_in(value, path="scores.json"):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers_in(item, f"{path}.{key}")
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from numbers_in(item, f"{path}[{k}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def with_number(value, place, new, path="scores.json"):
    if isinstance(value, dict):
        return {key: with_number(item, place, new, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [with_number(item, place, new, f"{path}[{k}]") for k, item in enumerate(value)]
    return new if path == place else value


def test_every_number_of_the_scores_is_checked(folder):
    """Each one changed in its last digits, one after another, without the ledger being read each time."""
    from fedmerit.ledger.kinds import compare

    content = json.loads((folder / "scores.json").read_text())
    places = list(numbers_in(content))
    assert len(places) > 200
    for place, value in places:
        wrong = with_number(content, place, value * (1 + 1e-9) if value else 1e-30)
        with pytest.raises(LedgerError) as caught:
            compare(wrong, content, "scores.json")
        assert str(caught.value).startswith(f"{place}: states ")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda c: c["rounds"][1]["reports"].update(grand=0.0),
            r"^scores\.json\.rounds\[1\]\.reports\.grand: states",
        ),
        (lambda c: c["clients"].reverse(), r"^scores\.json\.clients\[0\]: states 'client-3'"),
        (lambda c: c.update(utility="accuracy"), r"^scores\.json\.utility: states 'accuracy'"),
        (lambda c: c.pop("cumulative"), r"^scores\.json\.cumulative: missing"),
        (lambda c: c.update(bonus=1), r"^scores\.json\.bonus: not in the ledger"),
        (lambda c: c["rounds"][1].pop("silent"), r"^scores\.json\.rounds\[1\]\.silent: missing"),
        (lambda c: c["rounds"].append(c["rounds"][0]), r"^scores\.json\.rounds: holds 3 entries, .* give 2"),
        (lambda c: c["rounds"][0]["status"].update(FP="fine"), r"rounds\[0\]\.status\.FP: states 'fine'"),
        (lambda c: c["companions"].pop("brier"), r"^scores\.json\.companions\.brier: missing"),
        (lambda c: c["cumulative"]["ALPHA"].__setitem__(0, None), r"\.cumulative\.ALPHA\[0\]: states None"),
        (lambda c: c["cumulative"]["ALPHA"].__setitem__(0, math.nan), r"\.ALPHA\[0\]: states nan"),
    ],
)
def test_other_changes_of_the_scores(folder, edit, message):
    content = json.loads((folder / "scores.json").read_text())
    edit(content)
    (folder / "scores.json").write_text(json.dumps(content))
    found_wrong(message, verify, folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "[" * 100_000, '{"rounds": 3}', '{"rounds": []}', "{}"], ids=lambda t: t[:9]
)
def test_scores_that_are_no_document(folder, text):
    (folder / "scores.json").write_text(text)
    found_wrong(r"scores\.json", verify, folder)


def test_a_tidy_file_with_another_number_or_without_a_line(folder):
    rows = list(csv.reader(io.StringIO((folder / "scores.csv").read_text())))
    column = rows[0].index("ALPHA")
    rows[3][column] = repr(float(rows[3][column]) * 1.001)
    for lines, message in ((rows, r"line\.4\.ALPHA: states "), (rows[:3], r"line\.4: missing")):
        with (folder / "scores.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
        found_wrong(rf"^scores\.csv {message}", verify, folder)


def test_score_files_that_cannot_be_read(folder):
    for name in ("scores.json", "scores.csv"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(b"\xff" + kept)
        found_wrong(rf"{name}: cannot be read", verify, folder)
        (folder / name).unlink()
        (folder / name).mkdir()
        found_wrong(rf"{name}: cannot be read", verify, folder)
        (folder / name).rmdir()
        (folder / name).write_bytes(kept)


# --------------------------------------------------------------------------------------------- config


def test_a_changed_config(folder):
    text = (folder / "config.toml").read_text().replace("lr = 0.001", "lr = 0.002")
    (folder / "config.toml").write_text(text)
    found_wrong(r"config\.toml: not the config in the ledger: training\.lr is 0\.002", verify, folder)
    (folder / "config.toml").write_text("[training")
    found_wrong(r"config\.toml is damaged: .*not TOML", verify, folder)
    (folder / "config.toml").unlink()
    found_wrong(r"config\.toml is damaged: .*no such file", verify, folder)


# --------------------------------------------------------------------------------------------- ledger


def nicer(body):
    """A report that makes its author look better."""
    measured = body["measured"]["expected-accuracy"]
    measured["alone"] = exact(number(measured["alone"]) + 0.01)


def test_who_changes_a_report_must_change_scores_and_files_and_then_the_head_differs(folder, plain):
    seq = change_one(folder, "report", nicer, which=2)
    with raises(LedgerError, record=seq, code="unsigned"):
        verify(folder)
    change_one(plain, "report", nicer, which=2)
    fits = r"\(scores by server\): cumulative alpha\.expected-accuracy\.client-2: states"
    found_wrong(fits, verify, plain)
    with Ledger(plain / "ledger.sqlite", read_only=True) as ledger:
        rounds, config = rounds_of(ledger), config_of(ledger)

    def stated_anew(record, body):
        if record.kind == "scores":
            ((_, again),) = after_round(rounds[: body["round"]], config)
            body.update(again)

    written_anew(plain, stated_anew, signed=False)
    found_wrong(r"^scores\.json\.rounds\[0\]\.reports\.alone\[2\]: states ", verify, plain)


def test_a_round_cannot_be_told_twice_or_left_open(plain):
    kept = (plain / "ledger.sqlite").read_bytes()
    for kind, author, message in (
        ("outcome", SERVER, "the second of its round"),
        ("masked", SERVER, "the second of its round"),
        ("schedule", SERVER, "round 1 before it is not closed"),
        ("report", "client-1", r"\(report by client-1\): its author has already reported on this round"),
    ):
        rewritten(plain, lambda record, at=(kind, author): 1 + ((record.kind, record.author) == at))
        found_wrong(message, verify, plain)
        (plain / "ledger.sqlite").write_bytes(kept)


def test_a_member_in_the_sum_has_a_masked_input_on_record(folder):
    def dropped(record, body):
        if record.kind == "masked":
            body["inputs"] = {}

    written_anew(folder, dropped)
    found_wrong(r"head before its round|masked input is not recorded", verify, folder)


def test_the_server_cannot_rewrite_a_round_that_members_built_on(folder):
    """The reports of round 2 sign the head of round 1, so a changed round 1 contradicts them."""
    written_anew(folder, lambda record, body: None)
    assert verify(folder)

    def raised(record, body):
        if record.kind == "round" and body["round"] == 1:
            body["checkpoint"] = "00" * 32  # of which its members signed nothing but the head after it

    written_anew(folder, raised)
    with pytest.raises(LedgerError, match=r"report by client-0\): not computed on the outcome"):
        verify(folder)


def test_stripping_all_signatures_is_found(folder):
    records = records_of(folder)
    (folder / "ledger.sqlite").unlink()
    with Ledger(folder / "ledger.sqlite") as ledger, ledger.transaction():
        for record in records:
            body = record.body | ({"keys": None} if record.kind == "run" else {})
            ledger.append(record.author, record.kind, body)
    found_wrong(r"^record 1 \(run by server\): .*on, but the ledger is unsigned", verify, folder)


def edits():
    def put(**values):
        return lambda body: body.update(values)

    def terms(**values):
        return lambda body: body["terms"].update(values)

    return [
        ("run", terms(config="[training"), "its config cannot be read"),
        ("run", terms(config="[training]\nrounds = 3\n"), "its config does not match its hash"),
        ("run", put(keys={"server": "zz"}), "not a record of its kind"),
        ("run", put(keys=3), "not a record of its kind"),
        *(("run", terms(engine=engine), r"at `\$\.engine`") for engine in ("else", "", None)),
        ("run", lambda body: body.clear(), "missing required field"),
        ("schedule", put(round=7), "expected round 1, got round 7"),
        ("schedule", put(round="1"), r"at `\$\.round`"),
        ("schedule", put(members=["client-0"]), "includes .*: expected some of client-0$"),
        ("outcome", put(m0="0" * 64), "does not start from the last recorded model"),
        ("outcome", put(m="0" * 64), "not computed on the outcome of its round"),
        ("report", put(round=2), "outside its round"),
        ("report", put(run="00"), "belongs to another run"),
        ("report", put(cosine="x"), "not a report"),
        ("report", put(salt="00"), "not a report"),
        ("report", put(salt=None), r"at `\$\.salt`"),
        ("report", put(measured={}), "the report of client-0 is about other utilities"),
        ("round", put(round=2), "expected the end of round 1"),
        ("round", put(included=["client-0"]), "it includes are not those that its members were told"),
        ("round", put(aborted="cancelled"), "aborted with an outcome or members in the sum"),
        ("masked", put(round=2), "outside its round"),
        ("outcome", put(round=2), "outside its round"),
        ("outcome", put(head="0" * 64), "the head that its members saw is not the head before its round"),
        ("outcome", put(included="0" * 64), "not computed on the outcome of its round"),
        ("round", put(silent=["client-0"]), "are not exactly those who reported or were silent"),
        ("round", put(m="0" * 64), "its model or test slice is not the one in the outcome"),
        ("round", put(utilities={}), "the report of client-0 is about other utilities"),
        ("round", put(samples={"client-0": 1}), "unknown field `samples`"),
        ("round", put(declined=None), r"at `\$\.declined`"),
        ("scores", put(cumulative_alpha={"brier": {}}), "cumulative alpha.brier.client-0: missing"),
        ("scores", put(cumulative_alpha={"fame": {}}), "cumulative alpha.expected-accuracy: missing"),
        ("scores", put(cumulative_alpha=3), r"at `\$\.cumulative_alpha`"),
        ("scores", put(round=-1), "expected what the server states after round 1"),
        ("scores", put(round=None), r"at `\$\.round`"),
    ]


@pytest.mark.parametrize(("kind", "edit", "message"), edits(), ids=lambda v: v if isinstance(v, str) else "")
def test_records_that_do_not_fit_together(plain, kind, edit, message):
    """Unsigned, so that nothing but the content gives it away."""
    seq = change_one(plain, kind, edit)
    caught = found_wrong(message, verify, plain)
    if kind not in ("outcome", "schedule") and "other utilities" not in str(caught):
        assert str(caught).startswith(f"record {seq} ({kind}")  # the others are found by what follows


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(data=st.data())
@settings(max_examples=60)
def test_no_record_makes_verifying_fall_over(unsigned, tmp_path_factory, data):
    """Any value in the place of any field: an error of ours, or what it means does not matter to scores."""
    path = shutil.copytree(unsigned, tmp_path_factory.mktemp("junk") / "run")
    records = records_of(path)
    record = data.draw(st.sampled_from(records))
    key = data.draw(st.sampled_from(sorted(record.body)))
    junk = data.draw(JUNK)

    written_anew(
        path, lambda one, body: body.update({key: junk}) if one.seq == record.seq else None, signed=False
    )
    with suppress(LedgerError):
        verify(path)


@pytest.mark.parametrize("dropped", ["run", "schedule", "outcome", "report", "round"])
def test_dropped_records_in_a_chain_made_anew(plain, dropped):
    rewritten(plain, lambda record: record.kind != dropped)
    with pytest.raises(LedgerError):
        verify(plain)


@pytest.mark.parametrize(
    "change", [{"optimiser": True}, {"roster": "0" * 64}, {"evaluates": "members"}], ids=str
)
def test_terms_of_a_rehearsal_are_those_that_one_process_makes(signed, change):
    """An optimiser would excuse every M0, and members that evaluate every v."""
    records = records_of(signed)
    assert folded(records)
    body = copy.deepcopy(records[0].body)
    body["terms"] |= change
    with pytest.raises(LedgerError, match="terms: not the terms of a rehearsal with its keys"):
        folded([replace(records[0], body=body), *records[1:]])


def test_a_rehearsal_is_compared_with_no_members_own_file(signed, tmp_path):
    """Else a server could pass a run between machines off as one, whose checks are fewer."""
    heads = tmp_path / "heads"
    heads.write_text("1 " + "0" * 64 + "\n")
    found_wrong("where no member keeps a file of its own", verify_folder, signed, heads=heads)
    found_wrong("nowhere: no such folder", verify, tmp_path / "nowhere")


# ------------------------------------------------------------- a ledger with keys that are not the members'


NAMES = tuple(f"client-{i}" for i in range(4))


@pytest.fixture
def home(finished):
    return finished


def forged(keys, hash_=None):
    """Every key one of the server's own, client-1 as good as can be, everything signed anew."""

    def tell(ledger, records):
        head = ended = ""
        for record in records:
            body = body_of(record)
            if record.kind == "run":
                body["keys"] = {name: public_key(key).hex() for name, key in keys.items()}
            if record.kind == "join":
                body["server"] = public_key(keys[SERVER]).hex()
            if record.kind in ("run", "join") and hash_:
                body["terms"]["roster"] = hash_
            if record.kind == "schedule":
                head = ledger.head
            if record.kind == "outcome":
                body["head"] = head
            if record.kind == "report":
                body["bound_to"]["head"] = head
                for one in body["measured"].values() if record.author == "client-1" else ():
                    one |= {"alone": exact(1.0), "without": exact(0.0)}
            if record.kind == "seen":
                ended = ended or ledger.head
                body["head"] = ended
            yield record.author, record.kind, body, b""

    return tell


@pytest.fixture
def made_up():
    return {name: Ed25519PrivateKey.generate() for name in (SERVER, *NAMES)}


def roster_of(keys, weights=None):
    members = (
        Member(name, public_key(keys[name]), weights and weights[name]) for name in keys if name != SERVER
    )
    return Roster(members, public_key(keys[SERVER]))


@pytest.mark.parametrize("thorough", [False, True])
def test_a_ledger_forged_from_end_to_end_is_found_by_a_roster_and_by_nothing_else(home, made_up, thorough):
    """The thorough one puts the hash of its own roster into the terms as well."""
    honest, other = read_roster(home / "roster.toml").hash.hex(), roster_of(made_up).hash.hex()
    written(home, forged(made_up, other if thorough else None), made_up, anew=(1, 2))
    lines = list(verify_folder(home / "run"))
    assert any(line.startswith("members: 4 of 4 joined, each with its own key; ") for line in lines)
    assert "scores: follow from the reports in the ledger" in lines
    assert any(line.startswith("heads: 4 of 4 members signed") for line in lines)
    (said,) = [
        line for line in lines if line.startswith("keys: taken from the ledger itself; compare with --roster")
    ]
    assert honest not in said  # a reader who compares the hash is told one of these keys, or none
    assert said.endswith(f"the hash of your roster with {other}") == thorough
    with pytest.raises(LedgerError) as caught:
        list(verify_folder(home / "run", roster=home / "roster.toml"))
    message = str(caught.value)
    assert message.startswith(f"record 1 (run by server): its keys do not match {home / 'roster.toml'}: ")
    for name in (SERVER, *NAMES):
        path = home / "run" / "keys" / "server.pem" if name == SERVER else home / f"{name}.pem"
        own = public_key(load_key(path)).hex()[:16]
        there = public_key(made_up[name]).hex()[:16]
        whose = "the server" if name == SERVER else name
        assert f"the key of {whose} is {there}..., on the roster {own}..." in message
    found_wrong(
        "its keys do not match", verify_copy, copy_for(home, LIAR), member=LIAR, roster=home / "roster.toml"
    )


def test_an_honest_ledger_has_the_keys_of_the_roster(home):
    assert words("lacks.keys") in not_guaranteed(facts_of(home / "run"))
    roster = read_roster(home / "roster.toml")
    said = f"keys: they match {home / 'roster.toml'}, roster hash {roster.hash.hex()}"
    assert said in list(verify_folder(home / "run", roster=home / "roster.toml"))
    assert said in list(verify_copy(copy_for(home, LIAR), roster=str(home / "roster.toml")))
    lines = list(verify_folder(home / "run", roster=roster))
    assert f"keys: they match the roster, roster hash {roster.hash.hex()}" in lines
    (said,) = [line for line in verify_folder(home / "run") if line.startswith("keys:")]
    assert said == (
        "keys: taken from the ledger itself; compare with --roster FILE, or the hash of your roster with "
        f"{roster.hash.hex()}"
    )


def test_whose_key_differs_and_who_is_missing_is_named(home):
    server = read_roster(home / "roster.toml").server
    members = {member.name: member for member in read_roster(home / "roster.toml").members}
    other = Member("client-2", bytes(range(32)))

    def message(*changed, without=()):
        kept = {name: one for name, one in members.items() if name not in without}
        roster = Roster((kept | {one.name: one for one in changed}).values(), server)
        with pytest.raises(LedgerError) as caught:
            list(verify_folder(home / "run", roster=roster))
        return str(caught.value).partition("its keys do not match the roster: ")[2]

    there = members["client-2"].key.hex()[:16]
    assert message(other) == f"the key of client-2 is {there}..., on the roster 0001020304050607..."
    assert message(without=("client-3",)) == "client-3 is not on it"
    assert message(Member("west", other.key)) == "west is on it, but not in the run"
    weighed = Roster((Member(one.name, one.key, 3.0) for one in members.values()), server)
    for other in (weighed, Roster(members.values()), Roster(members.values(), server, quorum=4)):
        same = r"has [0-9a-f]{64}: names and keys are the same; public weights, "
        found_wrong(same, verify_folder, home / "run", roster=other)
    another = Roster(members.values(), bytes(range(32)))
    differs = r"the key of the server is [0-9a-f]{16}\.\.\., on the roster 0001"
    found_wrong(differs, verify_folder, home / "run", roster=another)


def test_public_weights_of_the_roster_are_compared_too(tmp_path):
    weights = dict(zip(NAMES, (3.0, 1.0, 2.0, 1.0), strict=True))
    Federation(tmp_path, files=True, weights=weights).run()
    assert any(
        line.startswith("keys: they match")
        for line in verify_folder(tmp_path / "run", roster=tmp_path / "roster.toml")
    )
    hash_ = read_roster(tmp_path / "roster.toml").hash.hex()
    assert any(line.endswith(f"roster with {hash_}") for line in verify_folder(tmp_path / "run"))
    own = read_roster(tmp_path / "roster.toml")
    others = Roster((Member(one.name, one.key, 1.0) for one in own.members), own.server)
    found_wrong("its public weights do not match the roster", verify_folder, tmp_path / "run", roster=others)
    keys = {name: load_key(tmp_path / f"{name}.pem") for name in NAMES}
    keys[SERVER] = load_key(tmp_path / "run" / "keys" / "server.pem")
    written(tmp_path, forged(keys, "00" * 32), keys, anew=(1, 2))
    found_wrong(
        "agreed to a roster that its keys and public weights do not form", verify_folder, tmp_path / "run"
    )


def test_members_must_have_agreed_to_the_config_that_scores_are_computed_with(home):
    def tell(ledger, records):
        for record in records[:2]:
            body = body_of(record)
            if record.kind == "run":
                body["terms"]["config"] += "\n"
            yield record.author, record.kind, body, record.signature

    written(home, tell)
    with pytest.raises(LedgerError, match=r"^record 1 \(run by .*its config does not match its hash"):
        list(verify_folder(home / "run"))
