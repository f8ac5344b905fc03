"""The tutorials run as they are printed, and show what their prose says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedmerit as fm

TUTORIALS = Path(__file__).resolve().parent.parent / "examples" / "tutorials"


def follow(name, folder):
    """What a reader sees who runs the script."""
    done = subprocess.run(
        [sys.executable, TUTORIALS / name, folder],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_every_tutorial_is_run_here():
    assert sorted(path.name for path in TUTORIALS.glob("*.py")) == [
        "rehearse_consortium.py",
        "score_existing.py",
    ]


def test_score_existing(tmp_path):
    said = follow("score_existing.py", tmp_path)
    rounds = fm.read(tmp_path / "reports.csv")
    total = fm.accumulate(rounds)
    assert len(rounds) == 6
    assert total.ranking()[0] == "Alder"  # the most data
    assert total.ranking()[-1] == "Echo"  # noisy labels
    assert total.raw.sum() == pytest.approx(total.gain, rel=0.2)  # "adds up", as the prose has it
    assert all(r.se_alpha.max() < 0.02 for r in rounds)  # paired errors: far below those of v itself
    assert re.search(r"^Alder .*\(1-1\)$", said, flags=re.MULTILINE)
    assert "statistically indistinguishable: Birch, Cedar" in said
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(name in page for name in total.clients)
    paid = fm.payouts(fm.shares(total), budget="10000.00")
    assert ", ".join(f"{name} {amount:,}" for name, amount in paid.items()) in said


@pytest.mark.long
def test_rehearse_consortium(tmp_path):
    ours = tmp_path / "ours"
    said = follow("rehearse_consortium.py", ours)
    total = fm.accumulate(fm.read(ours / "first" / "scores.json"))
    assert total.ranking()[-1] == "Elm"  # upside down
    assert total.as_dict().keys() == {"Abbey", "Bridge", "Castle", "Dale", "Elm"}
    assert "to the cent; " in said  # the member's own payout, verified from its copy
    statement = json.loads((ours / "first" / "statements" / "Dale.json").read_text())
    assert statement["rounds"]["away"] == [2]
    assert statement["absence"]["other_cents"] > statement["cents"]
    assert f"{statement['cents'] / 100:,.2f} EUR for Dale" in said
    heads = re.findall(r"^head: (\w{64})$", said, flags=re.MULTILINE)
    assert len(heads) == 3  # rewards, verify of the folder, verify of the copy
    assert len(set(heads)) == 1
    board = (ours / "board.html").read_text(encoding="utf-8")
    assert "Member A" in board
    assert not any(name in board for name in total.clients)
    assert f"{statement['cents'] / 100:,.2f}</td>" in board
    for text in (board, (ours / "first" / "page-first.html").read_text(encoding="utf-8")):
        assert "it divides 25,000.00 EUR by the rule “fenced”" in text.replace("\xa0", " ")
