"""Decisions from reports that contradict themselves: refused, or made knowingly and told for good."""

import json
import re
import shutil
from html import unescape

import pytest

from command_line import call
from fedmerit.config import load
from fedmerit.errors import DoubtfulShares
from fedmerit.ledger.decisions import Terms
from fedmerit.report.page.html import page
from fedmerit.simulation.run import run
from runs import record_decision, records_of
from tests.ledger.test_decisions import copy_for, lines
from tiny import tiny

pytestmark = pytest.mark.long

UTILITY = "blunders:error"
TERMS = Terms("100.00", UTILITY, "fair")
DESPITE = Terms("100.00", UTILITY, "fair", despite_doubts=True)
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
            utilities = f"scoring.utilities=['{UTILITY}', 'expected-accuracy']"
            flipped = "corruption.label_flip=['client-3']"  # the only one with a positive score by it
            run(tiny(utilities, flipped, f"scoring.visibility={visibility}"), home / name)
    return home


@pytest.fixture(params=["open", "closed"])
def folder(runs, tmp_path, request):
    return shutil.copytree(runs / request.param, tmp_path / "run")


def test_a_doubted_decision_is_refused_and_nothing_is_written(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(DoubtfulShares, match=SAYS) as caught:
        record_decision(folder, TERMS)
    assert caught.value.codes == ("lower-is-better",)
    refused = call("rewards", folder, "--budget", "100")
    assert isinstance(refused.exception, DoubtfulShares)
    assert refused.stdout == ""
    assert not (folder / "statements").exists()
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before
    record_decision(folder, Terms("100.00", "expected-accuracy", "fair"))  # nothing is wrong


def test_a_decision_despite_doubts_says_so_in_the_ledger_the_statements_and_the_page(folder):
    paid = call("rewards", folder, "--budget", "100", "--despite-doubts")
    assert paid.exit_code == 0, paid.exception
    assert SAYS.search(paid.output)  # after the departure from the signed terms
    decision = next(record for record in records_of(folder) if record.kind == "decision")
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
    record_decision(folder, Terms("100.00", "expected-accuracy", "fair"))
    part = unescape(page(folder)).split('id="paid"')[1].split("<table")[0]
    assert "The decision was made despite this doubt." not in part
    assert not SAYS.search(part)


def test_the_same_terms_are_the_same_decision_and_an_equal_split_is_none_by_doubted_scores(folder):
    first, new = record_decision(folder, DESPITE)
    again, also = record_decision(folder, DESPITE)
    assert (new, also, again.record) == (True, False, first.record)
    assert again.terms.despite_doubts
    before = sum(line.startswith("doubts: ") for line in lines(folder))
    made, _ = record_decision(folder, Terms("100.00", UTILITY, rule="equal"))
    assert [doubt.code for doubt in made.doubts] == ["lower-is-better"]
    assert made.overruled == ()
    assert sum(line.startswith("doubts: ") for line in lines(folder)) == before == 1
