"""What a run leaves to its settlement, and scores, files, money and pages of settled runs."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from attacked import settling
from fedmerit.cli import app
from fedmerit.config import from_dict, of_folder
from fedmerit.errors import ConfigError, CopyDiffers, DataError, LedgerError, StoreError, UnsettledShares
from fedmerit.ledger import account as accounts_module
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import Note
from fedmerit.protocol.terms import cautious, check_version, pinned, roster_in
from fedmerit.report.facts import Facts
from fedmerit.report.page.html import facts_of, render
from fedmerit.report.source import read_source
from fedmerit.scoring.uncertainty import intervals
from fedmerit.simulation.run import run
from fedmerit.simulation.setup import prepare
from fedmerit.verify import verify_copy, verify_folder
from forging import body_of, written
from ledgers import terms_of
from raising import raises
from refusals import refused
from runs import first_body, folded, record_decision, renew, run_in, source_in
from tiny import TINY, tiny

BOTH = ("scoring.method=both", "settlement.naming=false")


def no_gradient(model, images, labels):
    return (model(images).argmax(1) == labels).float()


@pytest.fixture(scope="module")
def both_halves(tmp_path_factory):
    home = tmp_path_factory.mktemp("both")
    run(tiny(*BOTH), home / "run")
    return home


@pytest.fixture
def home(both_halves, tmp_path):
    shutil.copytree(both_halves / "run", tmp_path / "run")
    return tmp_path


def forged(home, change):
    """The records and the config of a ledger whose record of the pool has other values; None: no value."""

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "pool":
                body = {key: value for key, value in (body | change).items() if value is not None}
            yield record.author, record.kind, body, record.signature

    written(home, tell, anew=())
    return run_in(home / "run")


def test_a_run_on_samples_that_are_there_twice_is_settled(tmp_path):
    """Members settle on no sample that a round has shown, also on no copy of one."""
    rng = np.random.default_rng(0)
    x, y = rng.random((240, 28, 28, 1)).astype(np.float32), np.arange(240) % 10
    test, labels = np.repeat(x[:40], 2, axis=0), np.repeat(y[:40], 2)
    np.savez(tmp_path / "twice.npz", x_train=x, y_train=y, x_test=test, y_test=labels)
    asked = ("data.name=npz", f"data.path={tmp_path / 'twice.npz'}", "data.test_size=0")
    written = run(tiny(*BOTH, *asked), tmp_path / "run")
    assert written["settlement"]["missing"] == []
    assert all(one["holds"] for one in written["settlement"]["rounds"])


def test_rounds_are_measured_on_the_other_half(home):
    federation = prepare(tiny(*BOTH), pool_key=(home / "run" / "keys" / "pool.key").read_bytes())
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        pool = first_body(ledger, "pool")
        shown = {record.body["slice"] for record in ledger.records() if record.kind == "outcome"}
    assert pool == federation.pool.commitment
    assert (pool["size"], pool["slices"], pool["settled"]) == (50, 2, 25)
    assert shown == {federation.pool.slice(1).id}
    assert federation.pool.settlement().id not in shown
    assert np.bincount(federation.pool.settlement().y).max() <= 3  # 25 samples of 10 classes
    assert "scores: follow from the statements and reports in the ledger" in list(verify_folder(home / "run"))
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        (home / "copy.jsonl").write_bytes(b"".join(exported(ledger)))
    assert "scores: follow from the statements and reports in the ledger" in list(
        verify_copy(home / "copy.jsonl")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"settled": 26},
            r"2 slices, with 26 samples for the settlement, are not what test_reveal = 'fixed'",
        ),
        ({"settled": 0}, "settled: 0 of 50 test samples in the last of 2 slices leave too few"),
        ({"settled": 50}, "settled: 50 of 50 test samples in the last of 2 slices leave too few"),
        ({"settled": -1}, "settled: -1 of 50"),
        ({"settled": "25"}, r".*int.*str.*\$\.settled"),
        ({"settled": True}, r".*int.*bool.*\$\.settled"),
        ({"settled": None}, "settled: expected only where members settle, but the method is 'both'"),
        ({"slices": 1}, "settled: 25 of 50 test samples in the last of 1 slices"),
        ({"slices": 3}, "3 slices, with 25 samples for the settlement, are not what"),
    ],
)
def test_a_ledger_says_truly_how_many_samples_are_settled(home, change, message):
    with pytest.raises(LedgerError, match=rf"^record 2 \(pool by server\): {message}"):
        forged(home, change)


def test_settlement_is_nothing_that_a_run_with_reports_has(tmp_path):
    run(tiny("scoring.method=reports"), tmp_path / "run")
    forged(tmp_path, {})
    with pytest.raises(
        LedgerError, match="settled: expected only where members settle, but the method is 're"
    ):
        forged(tmp_path, {"settled": 25})


@pytest.mark.parametrize("method", ["settled", "both"])
def test_a_utility_of_ones_own_without_a_gradient_is_refused_before_anybody_trains(method):
    name = f"{__name__}:no_gradient"
    with raises(ConfigError, setting="scoring.utilities") as caught:
        prepare(tiny(f"scoring.method={method}", f"scoring.utilities=['{name}']"))
    assert f"{method!r} settles the first utility along its gradient: " in str(caught.value)
    prepare(tiny("scoring.method=reports", f"scoring.utilities=['{name}']"))
    prepare(tiny("scoring.method=both", f"scoring.utilities=['brier', '{name}']"))


def left_out(*overrides):
    """Settings that do not name the method."""
    return from_dict({section: part for section, part in TINY.items() if section != "scoring"}, overrides)


def test_a_rehearsal_reports_and_settles_unless_its_settings_say_otherwise(tmp_path):
    content = run(left_out("data.test_size=32"), tmp_path / "run")
    assert of_folder(tmp_path / "run").scoring.method == "both"
    assert content["rounds"][0]["reports"] is not None
    assert content["settlement"]["rounds"][0]["holds"]


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("scoring.utilities=['accuracy']", "method-utilities", "because accuracy, the first utility, has no"),
        (f"scoring.utilities=['{__name__}:no_gradient']", "method-gradient", "has no gradient: "),
        ("scoring.game=renormalised", "method-game", "a settlement scores the additive game"),
        ("data.test_size=31", "method-pool", "expected at least 32 samples with scoring.method = 'both'"),
    ],
)
def test_where_nothing_can_be_settled_members_report_and_a_note_says_why(override, code, said, tmp_path):
    notes = prepare(left_out(override)).notes
    assert [note.code for note in notes if isinstance(note, Note)].count(code) == 1
    heard = []
    content = run(left_out(override), tmp_path / "run", watch=heard.append)
    assert "settlement" not in content
    assert of_folder(tmp_path / "run").scoring.method == "reports"
    told = [one.text for one in heard if one.stage == "note" and getattr(one.text, "code", "") == code]
    assert len(told) == 1
    assert said in told[0]
    again = []
    run(left_out(override), tmp_path / "run", resume=True, watch=again.append)  # as it was recorded
    assert all(getattr(one.text, "code", "") != code for one in again)


def test_a_pool_too_small_for_reports_is_refused_whatever_the_method():
    with pytest.raises(DataError):
        prepare(left_out("data.test_size=9"))


@pytest.mark.parametrize("method", ["settled", "both", "reports"])
def test_only_members_who_can_settle_join_a_run_with_a_settlement(method):
    config = tiny(f"scoring.method={method}")
    terms = terms_of(config.to_toml(), roster_in(config, None))
    needed = {"reports": ["sketches"], "both": ["settlement", "sketches"], "settled": ["settlement"]}
    assert terms["features"] == needed[method]
    check_version(terms)


def test_methods_are_not_pinned():
    assert pinned(tiny("scoring.method=settled")) == pinned(tiny("scoring.method=reports"))
    cautious(tiny("scoring.method=settled", "secure_aggregation.threshold=3"))


# --------------------------------------------------------------------------- scores, files, money and pages


def federation(home, method="settled", *, scoring=None, silent=(), **more):
    home.mkdir(parents=True, exist_ok=True)
    made = settling(home, rounds=3, naming=False, scoring={"method": method, **(scoring or {})}, **more)
    made.reaches = lambda name, ask: not (ask.exchange == "state" and name in silent)
    return made.run()


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    return federation(tmp_path_factory.mktemp("settled"))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return federation(tmp_path_factory.mktemp("both"), "both")


@pytest.fixture
def partly(tmp_path):
    """A run in which client-3 has not stated."""
    return federation(tmp_path, silent=["client-3"])


def said(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return re.sub(r"\s+", " ", f"{result.output} {result.exception or ''}")


def scores_in(run):
    return json.loads((run.folder / "scores.json").read_text())


# -------------------------------------------------------------------------------------------- score files


def test_scores_json_has_the_statements_and_they_add_up(settled):
    found = scores_in(settled)
    block = found["settlement"]
    assert found["clients"] == list(settled.names)
    assert [one["participants"] for one in found["rounds"]] == [list(settled.names)] * 3
    assert all(one["reports"] is None for one in found["rounds"])
    for line in block["rounds"]:
        assert sum(map(int, line["stated"])) == int(line["sum"]) == int(line["product"])
        assert line["holds"] is True
    assert block["cumulative"] == found["cumulative"]["PHI"]
    summed = [sum(line["phi"][k] for line in block["rounds"]) for k in range(5)]
    assert summed == pytest.approx(block["cumulative"])
    assert (block["named"], block["missing"], block["score"]) == ([], [], "PHI")
    assert all(error > 0 for error in block["stderr"])


def test_scores_csv_of_a_settled_run(settled):
    lines = (settled.folder / "scores.csv").read_text().splitlines()
    assert lines[0] == "round,client,utility,stated,PHI"
    first = scores_in(settled)["settlement"]["rounds"][0]
    assert len(lines) == 1 + 3 * 5
    assert lines[1] == f"1,client-0,fit,{first['stated'][0]},{first['phi'][0]}"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scores.json", lambda text: re.sub(r'("stated": \[\s+"\d+)(\d")', r"\g<1>0\2", text, count=1)),
        ("scores.json", lambda text: text.replace('"holds": true', '"holds": false', 1)),
        ("scores.csv", lambda text: re.sub(r"(,fit,\d+)(\d,)", r"\g<1>0\2", text, count=1)),
    ],
)
def test_verify_finds_a_changed_number(tmp_path, name, change):
    run = federation(tmp_path)
    path = run.folder / name
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before
    with pytest.raises(CopyDiffers, match=name):
        run.verified()


def test_files_without_the_settlement_are_older_and_are_written_again(tmp_path):
    run = federation(tmp_path)
    right = {name: (run.folder / name).read_bytes() for name in ("scores.json", "scores.csv")}
    found = scores_in(run)
    found.pop("settlement")
    del found["stderr"]
    found["cumulative"] = {}
    (run.folder / "scores.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    bare = re.sub(r",fit,.*", ",fit,,", right["scores.csv"].decode())
    (run.folder / "scores.csv").write_text(bare)
    assert any("older than the settlement" in line for line in run.verified())
    assert "wrote scores.json and scores.csv again" in renew(run.folder)
    assert {name: (run.folder / name).read_bytes() for name in right} == right


# ------------------------------------------------------------------------------------------------- ranking


def test_score_ranks_by_what_was_settled(settled):
    told = said("score", settled.folder)
    assert "PHI summed over 3 rounds" in told
    assert "3 of 3 equations hold" in told
    assert "5 members countersigned the sums" in told
    block = scores_in(settled)["settlement"]
    best = settled.names[block["cumulative"].index(max(block["cumulative"]))]
    assert told.index(best) == min(told.index(name) for name in settled.names)
    assert json.loads(CliRunner().invoke(app, ["score", str(settled.folder), "--format", "json"]).stdout)[
        "settlement"
    ] == block  # fmt: skip
    csv = CliRunner().invoke(app, ["score", str(settled.folder), "--format", "csv"]).stdout
    assert csv == (settled.folder / "scores.csv").read_text()


def test_intervals_allow_for_the_few_blocks(settled):
    total = replace(run_in(settled.folder).accounts[0].scores(), training=None)
    low, high = intervals(total)[0]
    assert len(total.blocks) == 16
    assert (high - low) / 2 == pytest.approx(2.131450 * total.stderr[0], rel=1e-5)  # Student's, 15 degrees
    assert (intervals(replace(total, blocks=None, sizes=None))[0, 1] - total.raw[0]) == pytest.approx(
        1.959964 * total.stderr[0], rel=1e-5
    )


def test_scores_that_nobody_reported_are_refused(settled):
    assert "members of this run report nothing" in said("score", settled.folder, "--score", "LOO")
    assert "has no utility 'other'" in said("score", settled.folder, "--utility", "other")


def test_reported_scores_stand_beside_settled_ones(both):
    told = said("score", both.folder, "--last-round")
    assert "PHI summed over 3 rounds" in told
    for name in ("phi", "alpha", "LOO", "FP", "EE"):
        assert f" {name} " in told
    assert "alpha: what members reported on a different part of the test set" in told
    assert "alpha: what members reported" not in said("score", both.folder, "--score", "ALPHA")
    assert "ALPHA summed over 3 rounds" in said("score", both.folder, "--score", "ALPHA")
    facts = Facts(read_source(both.folder))
    assert facts.settled
    assert facts.companions[0].reported
    assert facts.standings[0].reported == pytest.approx(
        facts.companions[0].facts.total.as_dict()[facts.standings[0].client]
    )
    page = render(facts_of(both.folder))
    assert "as reported" in page
    assert "ranks and pays nobody by them" in page
    both.verified()


def test_a_run_that_reports_has_no_settled_score(tmp_path):
    run = federation(tmp_path, "reports")
    assert "settlement" not in scores_in(run)
    assert "this run is not settled" in said("score", run.folder, "--score", "PHI")


# --------------------------------------------------------------------------------------------------- money


def test_payouts_rest_on_settled_scores(tmp_path):
    run = federation(tmp_path)
    with pytest.raises(LedgerError):
        record_decision(run.folder, Terms("1000.00", "accuracy", "fenced", "PHI"))
    told = said("rewards", run.folder, "--budget", "1000.00")
    assert "rule fenced" in told
    (decision,) = [record for record in run.records if record.kind == "decision"]
    assert (decision.body["score"], decision.body["rule"]) == ("PHI", "fenced")
    total = run_in(run.folder).accounts[0].scores()
    assert sum(decision.body["cents"].values()) == 100_000
    best = max(decision.body["cents"], key=decision.body["cents"].get)
    assert best == total.ranking()[0]
    assert any("follows from the scores, to the cent" in line for line in run.verified())
    statement = (run.folder / "statements" / "client-1.md").read_text()
    assert "Does it add up?" in statement
    own = scores_in(run)["settlement"]["rounds"][0]["stated"][1]
    assert f"{int(own):,}" in statement
    kept = json.loads((run.folder / "statements" / "client-1.json").read_text())
    assert kept["settlement"]["rounds"][0]["stated"] == own
    assert (kept["score"], kept["contribution"]) == ("PHI", pytest.approx(total.as_dict()["client-1"]))


def test_nothing_is_paid_while_somebody_can_still_state(partly, monkeypatch):
    block = scores_in(partly)["settlement"]
    assert block["missing"] == ["client-3"]
    assert block["cumulative"][3] is None
    assert block["rounds"][0]["stated"][3] is None
    assert (block["rounds"][0]["sum"], block["rounds"][0]["holds"]) == (None, False)
    with refused(UnsettledShares, code="open") as caught:
        record_decision(partly.folder, Terms("100.00", "fit", "fenced", "PHI"))
    assert re.search(r"open until \d{4}-\d\d-\d\d \d\d:\d\d UTC", str(caught.value))
    assert not [record for record in partly.records if record.kind == "decision"]
    assert "open until" in said("rewards", partly.folder, "--budget", "100.00", "--dry-run")
    told = said("score", partly.folder)
    assert "client-3 has not stated" in told
    assert "it counts zero until it does or the settlement is closed" in told
    page = render(facts_of(partly.folder))
    assert "not stated" in page
    assert "nobody has claimed what" in page

    closes = run_in(partly.folder).accounts[0].closes
    monkeypatch.setattr(accounts_module.time, "time", lambda: closes + 1)
    with refused(UnsettledShares, code="unclosed"):
        record_decision(partly.folder, Terms("100.00", "fit", "fenced", "PHI"))
    with partly.taken_up():
        partly.close(monkeypatch)
    made, new = record_decision(partly.folder, Terms("100.00", "fit", "fenced", "PHI"))
    assert new
    assert sorted(made.paid) == ["client-0", "client-1", "client-2", "client-3", "client-4"]
    honest = federation(partly.home / "honest")
    total, due = (run_in(one.folder).account.scores().as_dict() for one in (partly, honest))
    assert total == pytest.approx(due)  # what is left is its own
    assert [record.body["final"] for record in partly.records if record.kind == "settled"] == [False, True]
    partly.verified()


def told_otherwise(run, change):
    """The records of a run, some of them changed or (None) left out, without their chain."""
    records = [other for record in run.records if (other := change(record)) is not None]
    return folded(records)


def test_verify_refuses_a_decision_before_the_settlement_is_final(partly, monkeypatch):
    with partly.taken_up():
        partly.close(monkeypatch)
    record_decision(partly.folder, Terms("100.00", "fit", "fenced", "PHI"))
    assert len(told_otherwise(partly, lambda one: one).decisions) == 1

    end = max(record.seq for record in partly.records if record.kind == "settled")

    def unclosed(one):
        return None if one.kind in ("settled", "countersigned") and one.seq >= end else one

    with pytest.raises(LedgerError, match="not final before it"):
        told_otherwise(partly, unclosed)


def test_what_the_missing_member_is_worth_is_unclaimed(partly, settled):
    account, whole = run_in(partly.folder).accounts[0], run_in(settled.folder).accounts[0]
    assert account.unclaimed == pytest.approx(whole.scores().as_dict()["client-3"], rel=1e-6)
    assert whole.unclaimed == 0


def test_a_run_that_was_not_settled(tmp_path):
    for method in ("settled", "both"):
        home = tmp_path / method
        home.mkdir()
        run = settling(home, naming=False, scoring={"method": method})
        run.reaches = lambda name, ask: ask.exchange != "agreed"
        run.run()
        assert "settlement" not in scores_in(run)
        run.verified()
    assert "Only the scores that members reported exist" in said("score", run.folder)
    assert "too few members agree to the directions" in said("score", run.folder)
    with pytest.raises(UnsettledShares, match="--score ALPHA"):
        CliRunner().invoke(app, ["rewards", str(run.folder), "--budget", "9"], catch_exceptions=False)
    assert "budget 9.00 EUR, rule fenced" in said("rewards", run.folder, "--budget", "9", "--score", "ALPHA")
    assert "This run is not settled" in render(facts_of(run.folder))
    with pytest.raises(StoreError, match="too few members agree to the directions"):
        source_in(tmp_path / "settled" / "run")
    with pytest.raises(UnsettledShares):
        record_decision(run.folder, Terms("100.00", "fit", "fenced", "PHI"))


# ---------------------------------------------------------------------------------------------- visibility


def test_a_member_sees_its_own_statement_and_the_sums(tmp_path):
    run = federation(tmp_path, scoring={"visibility": "coordinator"})
    said("rewards", run.folder, "--budget", "1000.00", "--rule", "fair")
    run.verified()
    copy = tmp_path / "copy.jsonl"
    assert "20 of them withheld" in said("export", run.folder, "--for", "client-1", "--out", copy)
    lines = list(verify_copy(copy, member="client-1"))
    assert any(line.startswith("settlement: 3 of 3 equations hold") for line in lines)
    assert any("share and cents follow from its scores and the totals" in line for line in lines)
    block = scores_in(run)["settlement"]
    text, statement = copy.read_text(), (run.folder / "statements" / "client-1.md").read_text()
    for line in block["rounds"]:
        for name, number in zip(line["participants"], line["stated"], strict=True):
            assert (number in text) == (name == "client-1")
            assert (f"{int(number):,}" in statement) == (name == "client-1")
        assert f"{int(line['sum']):,}" in statement


# ---------------------------------------------------------------------------------------------- page, names


def test_the_page_shows_the_equation_in_numbers(settled):
    page = render(facts_of(settled.folder))
    line = scores_in(settled)["settlement"]["rounds"][0]
    assert "Does it add up?" in page
    for number in (*line["stated"], line["sum"]):
        assert f"{int(number):,}" in page
    assert "trusted not to show them to a member" in page
    assert "Each member measures and reports" not in page


def lying(home, *, naming, **sections):
    """A run in which client-1 states 7 units too many."""
    run = settling(home, naming=naming, sections=sections)
    run.stating(7, key="2")
    return run.run()


def test_a_liar_is_named_everywhere(tmp_path):
    run = lying(tmp_path, naming=True)
    told, page = said("score", run.folder), render(facts_of(run.folder))
    for text in (told, page):
        assert "In round 2, client-1 stated a false number" in text
    line = scores_in(run)["settlement"]["rounds"][-1]
    false, scale = int(line["stated"][1]), run_in(run.folder).accounts[0].scale
    assert line["phi"][1] == pytest.approx((false - 7) * scale, rel=1e-15)
    assert line["holds"] is False
    assert f"{false:,}" in page
    assert f"proved: {false - 7:,}" in page
    assert scores_in(run)["settlement"]["named"] == ["client-1"]
    assert "recorded as decision 1" in said("rewards", run.folder, "--budget", "10.00")
    assert "the masks prove" in (run.folder / "statements" / "client-1.md").read_text()
    run.verified()


def test_nothing_is_paid_if_somebody_lied_and_nobody_is_named(tmp_path):
    run = lying(tmp_path, naming=False)
    assert "This run does not find out who" in said("score", run.folder)
    assert "--despite-doubts" in said("rewards", run.folder, "--budget", "10.00")
    with refused(UnsettledShares, code="fails"):
        record_decision(run.folder, Terms("10.00", "fit", "fenced", "PHI"))
    record_decision(run.folder, Terms("10.00", "fit", "equal", "PHI"))
    record_decision(run.folder, Terms("10.00", "fit", "fenced", "PHI", despite_doubts=True))
    run.verified()

    def unsaid(one):
        despite = one.kind == "decision" and one.body["despite_doubts"]
        return replace(one, body={**one.body, "despite_doubts": False}) if despite else one

    with pytest.raises(LedgerError, match="somebody stated a false number"):
        told_otherwise(run, unsaid)
