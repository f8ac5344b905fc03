"""Examples and tutorials run as they are printed, and show what the pages say."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedmerit as fm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "bring-your-own"
TUTORIALS = ROOT / "examples" / "tutorials"


@pytest.fixture
def run(fedmerit, brief_plans, monkeypatch, tmp_path):
    """Do in a copy of the folder what a reader types there; what the run said, and its folder."""

    def typed(*command):
        code, out, err = fedmerit(*command)
        assert code == 0, out + err
        return out + err  # notes go to the latter

    def all_of_it(name, *, table=True):
        shutil.copytree(FOLDER, tmp_path / "copy")
        monkeypatch.chdir(tmp_path / "copy")
        if table:
            monkeypatch.setattr(sys, "argv", [f"{name}.py"])
            runpy.run_path(f"{name}.py", run_name="__main__")
        assert "rounds" in typed("plan", f"{name}.toml")
        said = typed("run", f"{name}.toml", "--out", f"runs/{name}")
        assert "scores: follow from the" in typed("verify", f"runs/{name}")
        return said, tmp_path / "copy" / "runs" / name

    yield all_of_it
    for path in FOLDER.glob("*.py"):  # each test loads its own copy
        sys.modules.pop(path.stem, None)


def test_every_example_is_run_here_and_short():
    names = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".toml"))
    assert names == ["cells.py", "cells.toml", "progression.py", "progression.toml", "spots.py", "spots.toml"]
    for name in names:
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) < 60
    page = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    assert all(name in page for name in names)


def test_settings_that_the_guide_shows_leave_out_only_how_long_to_train():
    page = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    blocks = [tomllib.loads(text) for text in re.findall(r"```\n(\[data\].+?)```", page, flags=re.DOTALL)]
    assert len(blocks) == 2
    for shown in blocks:
        whole = tomllib.loads((FOLDER / shown["data"]["path"]).with_suffix(".toml").read_text())
        for name in ("rounds", "local_epochs", "batch_size"):
            whole["training"].pop(name, None)
        assert shown == whole


def test_what_the_guide_shows_of_the_examples_is_in_them():
    page = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    files = [*FOLDER.glob("*.*"), ROOT / "tests" / "simulation" / "test_own.py"]
    there = {line.partition("#")[0].strip() for path in files for line in path.read_text().splitlines()}
    there |= {f"{line} " for line in there}
    shown = re.findall(
        r"not run: (?:part of examples|a loss).*?-->\n```\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    assert len(shown) == 7
    for line in "".join(shown).splitlines():
        code = line.partition("#")[0].strip()
        assert not code or code in there or code == "cd examples/bring-your-own", line


def page_of(folder):
    (found,) = folder.glob("page*.html")
    return found


def test_cells(run):
    said, folder = run("cells")
    assert "'Elm / North' is 'Elm - North'" in said
    assert "auc is a metric of the whole test set" in said
    rounds = fm.read(folder / "scores.json")
    assert rounds[0].clients == ("Abbey", "Bridge", "Castle", "Dale", "Elm - North")
    assert rounds[-1].grand > max(0.75, rounds[0].empty)
    assert all(one.se_alpha is not None and one.freedom == 9 for one in rounds)
    page = page_of(folder).read_text(encoding="utf-8")
    assert "the AUC of the shared model rose by" in page
    assert "a metric of the whole test set, not a mean over its samples" in page


def test_progression(run):
    said, folder = run("progression")
    assert "y is not a class label: the test pool and its blocks are drawn at random" in said
    assert "5 of 5 equations hold" in said
    page = page_of(folder).read_text(encoding="utf-8")
    told = re.search(r"That is RMSE (\d+\.?\d*), then (\d+\.?\d*), in the unit of what is predicted", page)
    assert told is not None
    assert 65 < float(told[1]) < 90  # the first model answers about the mean of y
    assert float(told[2]) < 0.85 * float(told[1])


def test_spots(run):
    said, folder = run("spots", table=False)
    assert "4 of 4 equations hold" in said
    rounds = fm.read(folder / "scores.json")
    assert rounds[-1].grand > 0.6


# ------------------------------------------------------------------------------------------------- tutorials


def follow(name, folder):
    done = subprocess.run(
        [sys.executable, TUTORIALS / name, folder],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_every_tutorial_is_run_here():
    assert {path.stem for path in TUTORIALS.glob("*.py")} == {"rehearse_consortium", "score_existing"}


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
    assert f"{statement['cents'] / 100:,.2f}</td>" in board
    for text in (board, (ours / "first" / "page-first.html").read_text(encoding="utf-8")):
        assert "it divides 25,000.00 EUR by the rule “fenced”" in text.replace("\xa0", " ")
