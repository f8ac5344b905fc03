"""Decisions from reports that contradict themselves: refused, or made knowingly and told for good."""

import json
import re
import shutil
from html import unescape

import pytest
from test_decisions import as_server, copy_for, lines
from tiny import tiny

from command_line import call
from fedmerit.config import load
from fedmerit.errors import DoubtfulShares, LedgerError
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.report.page.html import page
from fedmerit.simulation.run import run
from fedmerit.verify import record_decision

pytestmark = pytest.mark.long

UTILITY = "blunders:error"
TERMS = Terms("100.00", UTILITY, on_undefined="equal")
DESPITE = Terms("100.00", UTILITY, on_undefined="equal", despite_doubts=True)
SAYS = re.compile(r"The utility 'blunders:error' fell by [\d.]+, and higher counts as better\.")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A measure of which less is better, paid by in two real runs: open, and for the coordinator alone."""
    home = tmp_path_factory.mktemp("runs")
    (home / "blunders.py").write_text(
        "def error(model, images, labels):\n"
        "    return 1 - model(images).softmax(1).gather(1, labels[:, None])[:, 0].clamp(0, 1)\n"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(home))
        for name, visibility in (("open", "all"), ("closed", "coordinator")):
            run(
                tiny(
                    f"scoring.utilities=['{UTILITY}', 'expected-accuracy']",
                    f"scoring.visibility={visibility}",
                ),
                home / name,
            )
    return home


@pytest.fixture(params=["open", "closed"])
def folder(runs, tmp_path, request):
    return shutil.copytree(runs / request.param, tmp_path / "run")


def records(folder):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return list(ledger.records())


def test_a_doubted_decision_is_refused_and_nothing_is_written(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(DoubtfulShares, match=SAYS) as caught:
        record_decision(folder, TERMS)
    assert caught.value.codes == ("lower-is-better",)
    refused = call("rewards", folder, "--budget", "100", "--on-undefined", "equal")
    assert isinstance(refused.exception, DoubtfulShares)
    assert refused.stdout == ""
    assert not (folder / "statements").exists()
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before
    record_decision(
        folder, Terms("100.00", "expected-accuracy", on_undefined="equal")
    )  # nothing is wrong there


def test_a_decision_despite_doubts_says_so_in_the_ledger_the_statements_and_the_page(folder):
    paid = call("rewards", folder, "--budget", "100", "--on-undefined", "equal", "--despite-doubts")
    assert paid.exit_code == 0, paid.exception
    assert SAYS.search(paid.output)  # after the departure from the signed terms
    decision = next(record for record in records(folder) if record.kind == "decision")
    assert decision.body["despite_doubts"] is True
    told = [line for line in lines(folder) if line.startswith("doubts: ")]
    assert len(told) == 1
    assert told[0].startswith("doubts: decision 1 was made despite this, as its record says: The utility")
    closed = load(folder / "config.toml").scoring.visibility == "coordinator"
    copied = lines(copy_for(folder, "client-2" if closed else None), member="client-2")
    assert sum(line.startswith("doubts: ") and "decision 1 was" in line for line in copied) == 1
    for name in load(folder / "config.toml").clients:
        text = (folder / "statements" / f"{name}.md").read_text()
        first = text.split("## What you did")[0]
        assert SAYS.search(first)
        assert "The decision was made despite this doubt." in first
        plain = json.loads((folder / "statements" / f"{name}.json").read_text())
        assert plain["despite_doubts"] is True
        assert SAYS.match(plain["doubts"][0])
    shown = unescape(page(folder))
    assert "<h1>Do not pay by these numbers: the measure fell</h1>" in shown
    assert SAYS.search(shown.split('<p class="lede">')[0])
    assert "The decision was made despite this doubt." in shown.split('id="paid"')[1].split("<table")[0]


def test_a_decision_by_a_sound_measure_is_not_doubted_for_what_the_page_ranks_by(runs, tmp_path):
    folder = shutil.copytree(runs / "open", tmp_path / "run")
    record_decision(folder, Terms("100.00", "expected-accuracy", on_undefined="equal"))
    part = unescape(page(folder)).split('id="paid"')[1].split("<table")[0]
    assert "The decision was made despite this doubt." not in part
    assert not SAYS.search(part)


def test_the_same_terms_are_the_same_decision_with_the_flag_too(folder):
    first, new = record_decision(folder, DESPITE)
    again, also = record_decision(folder, DESPITE)
    assert (new, also, again.record) == (True, False, first.record)
    assert again.terms.despite_doubts


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_flag_that_is_no_flag_is_named(folder, value):
    made, _ = record_decision(folder, DESPITE)
    as_server(
        folder,
        lambda kind, body: body.update(despite_doubts=value) if kind == "decision" else None,
        load(folder / "config.toml"),
    )
    with pytest.raises(LedgerError, match="despite_doubts: expected true or false, got") as caught:
        lines(folder)
    assert str(caught.value).startswith(f"record {made.record} (decision by server): ")


def test_the_equal_split_is_no_decision_by_doubted_scores(folder):
    made, _ = record_decision(folder, Terms("100.00", UTILITY, rule="equal"))
    assert [one.code for one in made.doubts] == ["lower-is-better"]
    assert made.overruled == ()
    assert not [line for line in lines(folder) if line.startswith("doubts: ")]


def test_the_renormalised_game_is_told_and_not_refused(tmp_path):
    folder = tmp_path / "run"
    run(tiny("scoring.game=renormalised"), folder)
    told = "WARNING: The game is renormalised, so contributions need not add up to the gain."
    assert call("score", folder).output.startswith(told)
    paid = call("rewards", folder, "--budget", "100", "--on-undefined", "equal")
    assert paid.exit_code == 0, paid.exception
    assert paid.output.startswith(told)
