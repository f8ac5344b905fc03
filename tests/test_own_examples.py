"""The examples of docs/bring-your-own.md run as they are printed, and show what it says."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import fedmerit as fm

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "bring-your-own"


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


def test_what_the_guide_shows_of_the_examples_is_in_them():
    page = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
    files = [*FOLDER.iterdir(), ROOT / "tests" / "test_own.py"]
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
    assert "y is no class: the test pool is drawn at random" in said
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
