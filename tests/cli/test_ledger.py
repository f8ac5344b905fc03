"""Commands on a run's ledger: rewards that are recorded, verify with heads, export."""

import json
import shutil
from html import unescape

import pytest

from fedmerit.identity import Member, Roster, load_key, new_key, public_key, write_roster
from fedmerit.ledger.chain import Ledger
from fedmerit.report.page.html import page_of_run, page_path
from fedmerit.settings import NO_HEADING
from fedmerit.simulation.run import run
from tiny import tiny

NAMED = 'partition.names=["A", "B", "C", "D"]'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    run(tiny(NAMED), home / "open")
    run(tiny(NAMED, "scoring.visibility=coordinator"), home / "closed")
    return home


def length(folder):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return len(ledger), ledger.head


def test_rewards_of_a_run_are_recorded_with_statements_and_a_head_to_keep(fedmerit, folder):
    before, _ = length(folder)
    code, out, _ = fedmerit("rewards", folder, "--budget", "1000")
    after, head = length(folder)
    assert code == 0
    assert after == before + 1
    assert f"recorded as decision 1, record {after} of the ledger; 4 statements in" in out
    assert out.endswith(f"head: {head}\n")
    assert {path.name for path in (folder / "statements").iterdir()} == {
        f"{name}.{kind}" for name in "ABCD" for kind in ("md", "html", "json")
    }
    again = fedmerit.said("rewards", folder, "--budget", "1000.00")
    assert "decision 1, record" in again
    assert "is unchanged" in again
    assert length(folder) == (after, head)
    third = fedmerit.said("rewards", folder, "--budget", "1000.00", "--rule", "equal")
    assert "recorded as decision 2" in third
    assert "in place of decision 1" in third


def test_a_dry_run_and_a_lone_file_write_nothing(fedmerit, folder, tmp_path):
    before = {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}
    out = fedmerit.said("rewards", folder, "--budget", "1000", "--dry-run")
    assert "recorded" not in out
    assert before == {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}
    (tmp_path / "lone").mkdir()
    shutil.copy(folder / "scores.json", tmp_path / "lone")
    fedmerit("rewards", tmp_path / "lone" / "scores.json", "--budget", "1000")
    assert fedmerit("rewards", tmp_path / "lone", "--budget", "1000")[0] == 0  # a folder without a ledger
    assert [item.name for item in (tmp_path / "lone").iterdir()] == ["scores.json"]


@pytest.mark.parametrize("format", ["json", "csv"])
def test_what_programs_read_stays_alone_on_standard_output(fedmerit, folder, format):
    _, out, err = fedmerit("rewards", folder, "--budget", "1000", "--format", format)
    assert "recorded as decision 1" in err
    assert "recorded" not in out
    if format == "json":
        told = json.loads(out)["payouts"]
        for name, amount in told.items():
            stated = json.loads((folder / "statements" / f"{name}.json").read_text())
            assert f"{stated['cents'] // 100}.{stated['cents'] % 100:02d}" == amount


def test_a_run_that_does_not_verify_is_not_paid(fedmerit, folder):
    text = (folder / "scores.json").read_text()
    content = json.loads(text)
    content["rounds"][0]["reports"]["alone"][0] += 0.01
    (folder / "scores.json").write_text(json.dumps(content))
    before = length(folder)
    err = fedmerit.refused("rewards", folder, "--budget", "1000")
    assert "scores.json" in err
    assert length(folder) == before
    assert not (folder / "statements").exists()


def test_verify_with_a_head_that_was_kept(fedmerit, folder):
    _, head = length(folder)
    out = fedmerit.said("verify", folder, "--head", head, "--as", "B")
    assert f"head {head[:16]}...: on the chain: record" in out
    assert "B: last signed the head of record" in out
    err = fedmerit.refused("verify", folder, "--head", "0" * 64)
    assert "is not on this chain" in err
    err = fedmerit.refused("verify", folder, "--as", "nobody")
    assert "'nobody' is not a member of the run" in err


def test_verify_of_a_file_that_is_no_copy_says_what_was_expected(fedmerit, folder):
    for name, advice in (("ledger.sqlite", f": give its folder, {folder}"), ("scores.json", "")):
        expected = f"{folder / name}: expected a run folder or an exported ledger (.jsonl){advice}"
        assert fedmerit.refused("verify", folder / name) == f"error: {expected}\n"


def test_an_export_is_verified_like_the_folder(fedmerit, folder, tmp_path):
    fedmerit("rewards", folder, "--budget", "1000")
    out = fedmerit.said("export", folder, "--out", tmp_path / "ledger.jsonl")
    assert f"wrote {tmp_path / 'ledger.jsonl'}: {length(folder)[0]} records\n" == out
    assert fedmerit("verify", tmp_path / "ledger.jsonl") == fedmerit("verify", folder)
    out = fedmerit.said("export", folder, "--out", tmp_path / "b.jsonl", "--for", "B")
    assert "nothing is withheld" in out
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "ledger.jsonl").read_bytes()


@pytest.mark.parametrize("which", ["folder", "closed"])
def test_a_cut_export_is_a_part_and_says_nothing_of_scores(fedmerit, request, tmp_path, which):
    run = request.getfixturevalue(which)
    target, cut = tmp_path / "copy.jsonl", tmp_path / "cut.jsonl"
    assert fedmerit("export", run, "--out", target, "--for", "A")[0] == 0
    lines = target.read_bytes().splitlines(keepends=True)
    end = next(k for k, line in enumerate(lines, 1) if b'"kind":"end"' in line)
    for count in (2, 5, end - 1, end, len(lines)):
        cut.write_bytes(b"".join(lines[:count]))
        code, out, err = fedmerit("verify", cut, "--format", "json")
        found = json.loads(out)
        codes = {line["code"] for line in found["lines"]}
        assert found["verified"], err
        assert (code, found["part"]) == ((3, True) if count < end else (0, False))
        assert ("part" in codes) == (count < end)
        assert bool(codes & {"scores", "scores-own"}) == (count >= end)
        assert fedmerit("verify", cut)[0] == code


def test_a_members_copy_where_only_the_coordinator_sees_all(fedmerit, closed, tmp_path):
    fedmerit("rewards", closed, "--budget", "1000")
    out = fedmerit.said("export", closed, "--out", tmp_path / "b.jsonl", "--for", "B")
    assert "of them withheld" in out
    assert (tmp_path / "b.jsonl").stat().st_mode & 0o777 == 0o600
    out = fedmerit.said("verify", tmp_path / "b.jsonl", "--as", "B")
    assert "scores: B's follow from its own reports; nobody else's were recomputed" in out
    stated = json.loads((closed / "statements" / "B.json").read_text())["cents"]
    assert f"payouts: decision 1: {stated // 100}.{stated % 100:02d} for B: share and cents follow" in out
    assert fedmerit("verify", tmp_path / "b.jsonl", "--as", "C")[0] == 2


def test_a_page_with_everybodys_numbers_is_not_for_everybody_where_only_the_coordinator_sees_all(
    fedmerit, folder, closed
):
    mine = f"{page_path(closed, NO_HEADING)} shows the numbers of all members: it is for the coordinator"
    assert page_of_run(closed).startswith(mine)
    assert fedmerit("page", closed)[1].splitlines()[1].startswith(mine)
    said = "this page shows the numbers of all members. It is for the coordinator alone"
    shown = unescape(page_path(closed, NO_HEADING).read_text())
    assert said in shown
    assert shown.index("This page shows the numbers of all members.") < shown.index(said)
    assert page_of_run(folder) == f"the page for everybody: open {page_path(folder, NO_HEADING)} in a browser"
    assert fedmerit("page", folder)[1] == f"wrote {page_path(folder, NO_HEADING)}\n"
    shown = unescape(page_path(folder, NO_HEADING).read_text())
    assert said not in shown
    assert "This page shows the numbers" not in shown
    assert "--roster FILE" not in shown  # one process held all keys, and the page says that


def test_a_score_file_that_was_deleted_was_not_there_and_not_older(fedmerit, folder):
    whole = {name: (folder / name).read_bytes() for name in ("scores.json", "scores.csv")}
    (folder / "scores.json").unlink()
    assert "wrote scores.json again, from the ledger\n" in fedmerit("page", folder)[1]
    for name in whole:
        (folder / name).unlink()
    assert "wrote scores.json and scores.csv again, from the ledger\n" in fedmerit("page", folder)[1]
    (folder / "scores.json").unlink()
    lines = whole["scores.csv"].splitlines(keepends=True)
    (folder / "scores.csv").write_bytes(b"".join(line for line in lines if not line.startswith(b"2,")))
    said = "wrote scores.json and scores.csv again, from the ledger\n"
    assert said in fedmerit("page", folder)[1]
    assert whole == {name: (folder / name).read_bytes() for name in whole}


def test_exports_that_cannot_be_made(fedmerit, folder, tmp_path):
    for arguments, message in (
        (("--out", tmp_path / "ledger.json"), "expected a name that ends in .jsonl"),
        (("--out", tmp_path / "x.jsonl", "--for", "nobody"), "'nobody' is not a member of the run"),
        (("--out", tmp_path / "nowhere" / "x.jsonl"), "could not be written"),
    ):
        err = fedmerit.refused("export", folder, *arguments)
        assert message in err
    assert fedmerit("export", tmp_path / "nowhere", "--out", tmp_path / "x.jsonl")[0] == 2
    assert not (tmp_path / "x.jsonl").exists()


def test_an_export_replaces_an_older_copy_of_its_ledger_and_nothing_else(fedmerit, folder, tmp_path):
    target = tmp_path / "mine.jsonl"
    assert fedmerit("export", folder, "--out", target)[0] == 0
    assert fedmerit("rewards", folder, "--budget", "10", "--rule", "equal")[0] == 0
    assert fedmerit("export", folder, "--out", target)[0] == 0  # it goes on from the first
    target.write_text('{"seq":1}\n')
    err = fedmerit.refused("export", folder, "--out", target)
    assert f"{target}: exists, and this ledger does not begin with it: choose another --out, or use" in err
    assert target.read_text() == '{"seq":1}\n'
    assert fedmerit("export", folder, "--out", target, "--force")[0] == 0
    assert len(target.read_text().splitlines()) == length(folder)[0]


def roster_in(folder):
    path = folder.parent / "roster.toml"
    keys = {name: public_key(load_key(folder / "keys" / f"{name}.pem")) for name in "ABCD"}
    write_roster(path, Roster(Member(name, key) for name, key in keys.items()))
    return path


def test_verify_with_a_roster_says_what_it_shows_of_a_rehearsal(fedmerit, folder, tmp_path):
    path = roster_in(folder)
    out = fedmerit.said("verify", folder, "--roster", path)
    assert f"keys: they match {path}, roster hash " in out
    assert "; but one process held all of them, so they do not prove who signed" in out
    others = [Member(name, new_key(tmp_path / f"{name}.pem")) for name in "ABCD"]
    write_roster(tmp_path / "others.toml", Roster(others))
    err = fedmerit.refused("verify", folder, "--roster", tmp_path / "others.toml")
    assert "its keys do not match" in err
    assert "the key of A is" in err
    assert "a rehearsal makes its own keys" in err
    err = fedmerit.refused("verify", folder, "--roster", tmp_path / "nowhere.toml")
    assert "nowhere.toml: cannot read the roster" in err


def test_verify_with_a_roster_refuses_what_has_no_keys(fedmerit, folder, tmp_path):
    path = roster_in(folder)
    run(tiny(NAMED, "secure_aggregation.enabled=false"), tmp_path / "plain")
    err = fedmerit.refused("verify", tmp_path / "plain", "--roster", path)
    assert "an unsigned ledger has no keys, so there is nothing to compare with" in err


def test_the_page_of_the_folder_that_one_is_in(fedmerit, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert fedmerit("page", ".") == (0, "wrote page-run.html\n", "")
    assert (folder / "page-run.html").is_file()


def test_the_copy_of_a_settled_run_says_that_the_folder_has_the_scores_that_are_paid(fedmerit, tmp_path):
    rounds = [{"empty": 0.1, "grand": 0.5, "alone": [0.2, 0.3], "without": [0.4, 0.3]}]
    copy = tmp_path / "scores.json"
    document = {"clients": ["A", "B"], "rounds": rounds, "settlement": {"score": "PHI"}}
    copy.write_text(json.dumps(document))
    said = "note: this file is a copy of a settled run, and holds what members reported: the run folder has"
    for command in (["score", copy], ["rewards", copy, "--budget", "10"], ["page", copy]):
        out = fedmerit.said(*command)
        assert said in out
    copy.write_text(json.dumps({**document, "settlement": None}))
    assert "settled" not in fedmerit("score", copy)[1]
