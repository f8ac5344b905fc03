"""A finished run, verified; then every way to falsify it, each found and its place named."""

import copy
import csv
import io
import json
import math
import shutil
import sqlite3
import tomllib
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ALL, tiny

from fedmerit.config import from_dict, recorded
from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, content, exact, number
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.forms import _check_run
from fedmerit.ledger.records import Journal, after_round, config_of, rounds_of, score_files, scores_document
from fedmerit.simulation.run import run
from fedmerit.verify import keys_of, verify_folder
from ledgers import Keys, cut
from raising import raises

CONFIG = tiny('participation.lost={client-3 = "2:report"}', "scoring.disclose_samples=true", ALL)


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """Two rounds of four members under secure aggregation; one is silent in the second."""
    path = tmp_path_factory.mktemp("runs") / "signed"
    run(CONFIG, path)
    return path


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "unsigned"
    run(from_dict(CONFIG.as_dict(), ["secure_aggregation.enabled=false"]), path)
    return path


@pytest.fixture
def folder(signed, tmp_path):
    return shutil.copytree(signed, tmp_path / "run")


@pytest.fixture
def plain(unsigned, tmp_path):
    return shutil.copytree(unsigned, tmp_path / "run")


def verify(path):
    return list(verify_folder(path))


def records_of(path):
    with Ledger(path / "ledger.sqlite", read_only=True) as ledger:
        return list(ledger.records())


def rewrite(path, change):
    """The whole ledger anew, as anyone can who holds the file: chained, signatures and seals as they were.

    Heads that members saw are brought up to date, which under their signatures nobody else could do.
    """
    records = records_of(path)
    (path / "ledger.sqlite").unlink()
    heads = {}
    with Ledger(path / "ledger.sqlite") as ledger, ledger.transaction():
        for record in records:
            for author, kind, body in change(
                record.seq, record.author, record.kind, copy.deepcopy(record.body)
            ):
                seal = (lambda _, seal=record.seal: seal) if record.seal else None
                for holder in (body, body.get("bound_to", {})):
                    if isinstance(holder, dict) and str(holder.get("head")) in heads:
                        holder["head"] = heads[holder["head"]]
                ledger.append(author, kind, body, signature=record.signature, seal=seal)
            heads[record.digest.hex()] = ledger.head


def change_one(path, kind, edit, *, which=0):
    """Rewrite one record of a kind; returns its number."""
    seq = [record.seq for record in records_of(path) if record.kind == kind][which]

    def change(at, author, kind_, body):
        if at == seq:
            body = edit(body) or body
        return [(author, kind_, body)]

    rewrite(path, change)
    return seq


# ------------------------------------------------------------------------------------ what is found good


def test_a_run_as_it_was(folder):
    lines = verify(folder)
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


def test_verifying_changes_nothing(folder):
    before = {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}
    verify(folder)
    assert before == {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}


def test_without_secure_aggregation_it_is_unsigned(plain):
    lines = verify(plain)
    assert lines[0].endswith("records, chain in order")
    assert lines[1] == "unsigned: the run had secure aggregation off, so anyone could have written it"
    assert not any("rehearsal" in line for line in lines)


def test_a_run_that_was_interrupted(folder):
    whole = verify(folder)[-1]
    start = [record.seq for record in records_of(folder) if record.kind == "schedule"]
    cut(folder / "ledger.sqlite", start[1] - 1)
    with Ledger(folder / "ledger.sqlite") as ledger:
        content = scores_document(rounds_of(ledger), CONFIG.clients, CONFIG.scoring.utilities)
    for name, data in score_files(content):
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
    from fedmerit.ledger.records import compare

    content = json.loads((folder / "scores.json").read_text())
    places = list(numbers_in(content))
    assert len(places) > 200
    for place, value in places:
        wrong = with_number(content, place, value * (1 + 1e-9) if value else 1e-30)
        with pytest.raises(LedgerError) as caught:
            compare(wrong, content, "scores.json")
        assert str(caught.value).startswith(f"{place}: states ")


@pytest.mark.parametrize("pick", [0.0, 0.31, 0.63, 1.0])
def test_a_changed_score_is_named(folder, pick):
    content = json.loads((folder / "scores.json").read_text())
    places = list(numbers_in(content))
    place, value = places[int(pick * (len(places) - 1))]
    (folder / "scores.json").write_text(json.dumps(with_number(content, place, value + 1)))
    with pytest.raises(LedgerError) as caught:
        verify(folder)
    assert str(caught.value).startswith(f"{place}: states ")
    assert "the reports give" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["clients"].reverse(), r"^scores\.json\.clients\[0\]: states 'client-3'"),
        (lambda c: c.update(utility="accuracy"), r"^scores\.json\.utility: states 'accuracy'"),
        (lambda c: c.pop("cumulative"), r"^scores\.json\.cumulative: missing"),
        (lambda c: c.update(bonus=1), r"^scores\.json\.bonus: not in the ledger"),
        (lambda c: c["rounds"][1].pop("silent"), r"^scores\.json\.rounds\[1\]\.silent: missing"),
        (lambda c: c["rounds"].append(c["rounds"][0]), r"^scores\.json\.rounds: holds 3 entries, .* give 2"),
        (lambda c: c["rounds"][0]["status"].update(FP="fine"), r"rounds\[0\]\.status\.FP: states 'fine'"),
        (lambda c: c["companions"].pop("brier"), r"^scores\.json\.companions\.brier: missing"),
        (
            lambda c: c["cumulative"]["ALPHA"].__setitem__(0, None),
            r"^scores\.json\.cumulative\.ALPHA\[0\]: states None, the reports give",
        ),
        (
            lambda c: c["cumulative"]["ALPHA"].__setitem__(0, math.nan),
            r"^scores\.json\.cumulative\.ALPHA\[0\]: states nan",
        ),
    ],
)
def test_other_changes_of_the_scores(folder, edit, message):
    content = json.loads((folder / "scores.json").read_text())
    edit(content)
    (folder / "scores.json").write_text(json.dumps(content))
    with pytest.raises(LedgerError, match=message):
        verify(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "[" * 100_000, '{"rounds": 3}', '{"rounds": []}', "{}"], ids=lambda t: t[:9]
)
def test_scores_that_are_no_document(folder, text):
    (folder / "scores.json").write_text(text)
    with pytest.raises(LedgerError, match=r"scores\.json"):
        verify(folder)


def test_score_files_that_cannot_be_read(folder):
    for name in ("scores.json", "scores.csv"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(b"\xff" + kept)
        with pytest.raises(LedgerError, match=rf"{name}: cannot be read"):
            verify(folder)
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(LedgerError, match=rf"{name}: cannot be read"):
            verify(folder)
        (folder / name).rmdir()
        (folder / name).write_bytes(kept)


def test_the_tidy_file_is_checked_too(folder):
    rows = list(csv.reader(io.StringIO((folder / "scores.csv").read_text())))
    column = rows[0].index("ALPHA")
    rows[3][column] = repr(float(rows[3][column]) * 1.001)
    with (folder / "scores.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    with pytest.raises(LedgerError, match=r"^scores\.csv line\.4\.ALPHA: states "):
        verify(folder)
    with (folder / "scores.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows[:3])
    with pytest.raises(LedgerError, match=r"^scores\.csv line\.4: missing"):
        verify(folder)


# --------------------------------------------------------------------------------------------- config


def test_a_changed_config(folder):
    text = (folder / "config.toml").read_text().replace("lr = 0.001", "lr = 0.002")
    (folder / "config.toml").write_text(text)
    with pytest.raises(
        LedgerError, match=r"config\.toml: not the config in the ledger: training\.lr is 0\.002"
    ):
        verify(folder)
    (folder / "config.toml").write_text("[training")
    with pytest.raises(LedgerError, match=r"config\.toml is damaged: .*not TOML"):
        verify(folder)
    (folder / "config.toml").unlink()
    with pytest.raises(LedgerError, match=r"config\.toml is damaged: .*no such file"):
        verify(folder)


# --------------------------------------------------------------------------------------------- ledger


def nicer(body):
    """A report that makes its author look better."""
    measured = body["measured"]["expected-accuracy"]
    measured["alone"] = exact(number(measured["alone"]) + 0.01)


def test_a_report_changed_behind_its_authors_back(folder):
    seq = change_one(folder, "report", nicer, which=2)
    with raises(LedgerError, record=seq, code="unsigned") as caught:
        verify(folder)
    assert caught.value.record == seq


def test_an_unsigned_report_that_is_changed_no_longer_fits_the_stated_scores(plain):
    change_one(plain, "report", nicer, which=2)
    with pytest.raises(LedgerError) as caught:
        verify(plain)
    assert "(scores by server): cumulative alpha of expected-accuracy.client-2: states" in str(caught.value)


def test_an_unsigned_ledger_that_is_consistent_but_no_longer_fits_the_files(plain):
    """Whoever rewrites report and stated scores must rewrite the files too, and then the head differs."""
    change_one(plain, "report", nicer, which=2)
    with Ledger(plain / "ledger.sqlite", read_only=True) as ledger:
        rounds, config = rounds_of(ledger), config_of(ledger)

    def stated_anew(_, author, kind, body):
        if kind == "scores":
            ((_, body),) = after_round(rounds[: body["round"]], config)
        return [(author, kind, body)]

    rewrite(plain, stated_anew)
    with pytest.raises(LedgerError, match=r"^scores\.json\.rounds\[0\]\.reports\.alone\[2\]: states "):
        verify(plain)


def test_a_round_cannot_be_told_twice_or_left_open(plain):
    def twice(kind):
        return lambda _, author, kind_, body: [(author, kind_, body)] * (2 if kind_ == kind else 1)

    kept = (plain / "ledger.sqlite").read_bytes()
    for kind, message in (
        ("outcome", "the second of its round"),
        ("masked", "the second of its round"),
        ("schedule", "round 1 before it is not closed"),
    ):
        rewrite(plain, twice(kind))
        with pytest.raises(LedgerError, match=message):
            verify(plain)
        (plain / "ledger.sqlite").write_bytes(kept)


def as_the_server(path, edit):
    """The ledger anew with the server's key: its own records say what it likes, members' stay as signed."""
    keys = Keys(path / "keys")
    records = records_of(path)
    (path / "ledger.sqlite").unlink()
    heads = {}
    with Ledger(path / "ledger.sqlite") as ledger, ledger.transaction():
        for record in records:
            body, signature = copy.deepcopy(record.body), record.signature
            if record.author == SERVER:
                edit(record.kind, body)
                body |= {"head": heads[body["head"]]} if record.kind == "outcome" else {}
                signature = keys.sign(SERVER, content(SERVER, record.kind, body))
            seal = partial(keys.sign, SERVER)
            ledger.append(record.author, record.kind, body, signature=signature, seal=seal)
            heads[record.digest.hex()] = ledger.head


def test_a_member_in_the_sum_has_a_masked_input_on_record(folder):
    def dropped(kind, body):
        if kind == "masked":
            body["inputs"] = {}

    as_the_server(folder, dropped)
    with pytest.raises(LedgerError, match=r"head before its round|masked input is not recorded"):
        verify(folder)


def test_the_server_cannot_rewrite_a_round_that_members_built_on(folder):
    """The reports of round 2 sign the head of round 1, so a changed round 1 contradicts them."""
    as_the_server(folder, lambda kind, body: None)
    assert verify(folder)

    def raised(kind, body):
        if kind == "round" and body["round"] == 1:
            body["samples"]["client-0"] += 1000  # of which its members signed nothing but the head after it

    as_the_server(folder, raised)
    with pytest.raises(LedgerError, match=r"report by client-0\): not computed on the outcome"):
        verify(folder)


def test_stripping_all_signatures_is_found(folder):
    records = records_of(folder)
    (folder / "ledger.sqlite").unlink()
    with Ledger(folder / "ledger.sqlite") as ledger, ledger.transaction():
        for record in records:
            body = record.body | ({"keys": None} if record.kind == "run" else {})
            ledger.append(record.author, record.kind, body)
    with pytest.raises(LedgerError, match=r"^record 1 \(run by server\): .*on, but the ledger is unsigned"):
        verify(folder)


def edits():
    def put(**values):
        return lambda body: body.update(values)

    return [
        ("run", put(config="[training"), "its config cannot be read"),
        ("run", put(config="[training]\nrounds = 3\n"), "its config does not match its hash"),
        ("run", put(members=["client-0"]), "its members are not those in its config"),
        ("run", put(keys={"server": "zz"}), "its keys cannot be read"),
        ("run", put(keys=3), "its keys cannot be read"),
        ("run", put(analysis=None), "does not say whether it is an analysis"),
        ("run", lambda body: body.clear(), "not a record of its kind: KeyError"),
        ("schedule", put(round=7), "expected round 1, got round 7"),
        ("schedule", put(round="1"), "expected round 1, got round 1"),
        ("schedule", put(members=["client-0"]), "includes a member who was not scheduled"),
        ("outcome", put(m0="00"), "does not start from the last recorded model"),
        ("outcome", put(m="00"), "not computed on the outcome of its round"),
        ("report", put(round=2), "outside its round"),
        ("report", put(run="00"), "belongs to another run"),
        ("report", put(cosine="x"), "not a report"),
        ("report", put(salt="00"), "not a report"),
        ("report", put(salt=None), "not a report"),
        ("report", put(measured={}), "the report of client-0 is about other utilities"),
        ("round", put(round=2), "expected the end of round 1"),
        (
            "round",
            put(included=["client-0"]),
            "the members it includes are not those that its members were told",
        ),
        ("round", put(aborted="cancelled"), "aborted with an outcome or members in the sum"),
        ("masked", put(round=2), "outside its round, or the second of its round"),
        ("outcome", put(round=2), "outside its round, or the second of its round"),
        ("outcome", put(head="00"), "the head that its members saw is not the head before its round"),
        ("outcome", put(included="00"), "not computed on the outcome of its round"),
        ("round", put(silent=["client-0"]), "are not exactly those who reported or were silent"),
        ("round", put(m="00"), "its model or test slice is not the one in the outcome"),
        ("round", put(utilities={}), "the report of client-0 is about other utilities"),
        ("round", put(samples={"client-0": 1}), "not a record of its kind: KeyError"),
        ("round", put(declined=None), "not a record of its kind"),
        ("scores", put(cumulative_alpha={"brier": {}}), "cumulative alpha of brier.client-0: missing"),
        ("scores", put(cumulative_alpha={"fame": {}}), "not a record of its kind|fame"),
        ("scores", put(cumulative_alpha=3), "not a record of its kind"),
        ("scores", put(round=-1), "expected what the server states after round 1"),
        ("scores", put(round=None), "expected what the server states after round 1"),
    ]


@pytest.mark.parametrize(("kind", "edit", "message"), edits(), ids=lambda v: v if isinstance(v, str) else "")
def test_records_that_do_not_fit_together(plain, kind, edit, message):
    """Unsigned, so that nothing but the content gives it away."""
    seq = change_one(plain, kind, edit)
    with pytest.raises(LedgerError, match=message) as caught:
        verify(plain)
    if kind not in ("outcome", "schedule") and "other utilities" not in str(caught.value):
        assert str(caught.value).startswith(f"record {seq} ({kind}")  # the others are found by what follows


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

    def change(seq, author, kind, body):
        return [(author, kind, body | {key: junk} if seq == record.seq else body)]

    rewrite(path, change)
    with suppress(LedgerError):
        verify(path)


def test_a_second_report_of_the_same_member(plain):
    def twice(_, author, kind, body):
        return [(author, kind, body)] * (2 if kind == "report" and author == "client-1" else 1)

    rewrite(plain, twice)
    with pytest.raises(
        LedgerError, match=r"\(report by client-1\): its author has already reported on this round"
    ):
        verify(plain)


@pytest.mark.parametrize("dropped", ["run", "schedule", "outcome", "report", "round"])
def test_dropped_records_in_a_chain_made_anew(plain, dropped):
    rewrite(plain, lambda _, author, kind, body: [] if kind == dropped else [(author, kind, body)])
    with pytest.raises(LedgerError):
        verify(plain)


def test_no_folder_and_no_ledger(tmp_path):
    with pytest.raises(LedgerError, match="nowhere: no such folder"):
        verify(tmp_path / "nowhere")


def test_keys_come_from_the_first_record_alone(folder):
    run_record, pool, *_ = records_of(folder)
    assert set(keys_of(run_record)) == {SERVER, *CONFIG.clients}
    with pytest.raises(LedgerError, match=r"^record 2 \(pool by server\): expected the run's first record"):
        keys_of(pool)


def test_a_member_cannot_speak_for_another(folder):
    """Signed with a real key of the run, but not the author's."""
    from ledgers import Keys

    keys = Keys(folder / "keys")
    seq = len(records_of(folder)) + 1
    with Ledger(folder / "ledger.sqlite") as ledger, ledger.transaction():
        forged = Journal(ledger, lambda author, message: keys.sign("client-0", message))
        forged.write("client-1", "report", {"round": 3})
    with raises(LedgerError, record=seq, code="unsigned"):
        verify(folder)


def test_the_config_in_the_ledger_is_the_one_of_the_run(folder):
    body = records_of(folder)[0].body
    assert from_dict(tomllib.loads(body["config"])) == CONFIG


@pytest.mark.parametrize(
    "change", [{"optimiser": True}, {"roster": "0" * 64}, {"evaluates": "members"}], ids=str
)
def test_terms_of_a_rehearsal_are_those_that_one_process_makes(tmp_path, change):
    """An optimiser would excuse every M0, and members that evaluate every v."""
    run(CONFIG, tmp_path / "run")
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        body = copy.deepcopy(next(ledger.records("run")).body)
    _check_run(body, recorded(body["config"]))
    body["terms"] |= change
    with pytest.raises(LedgerError, match="terms: not the terms of a rehearsal with its keys"):
        _check_run(body, recorded(body["config"]))


def test_a_rehearsal_is_compared_with_no_members_own_file(tmp_path):
    """Else a server could pass a run between machines off as one, whose checks are fewer."""
    run(CONFIG, tmp_path / "run")
    (tmp_path / "heads").write_text("1 " + "0" * 64 + "\n")
    with pytest.raises(LedgerError, match="where no member keeps a file of its own"):
        list(verify_folder(tmp_path / "run", heads=tmp_path / "heads"))
