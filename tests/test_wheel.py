"""What is handed out: a wheel that works in an environment of its own, and the files people look for."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

import fedmerit as fm

ROOT = Path(__file__).parents[1]


def called(*arguments, cwd, **given):
    """Run a program that must succeed, without this checkout on its path; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, check=False, **given
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_wheel_runs_the_demo_in_an_environment_of_its_own(tmp_path):
    """The packages that fedmerit needs come from this environment: nothing is loaded from outside."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path)
    called(*pip, "wheel", *build, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("fedmerit-*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    bin_ = tmp_path / "env" / "bin"
    called(*pip, "--python", bin_ / "python", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (there,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (there / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    where = called(bin_ / "python", "-c", "import fedmerit; print(fedmerit.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(there)
    assert called(bin_ / "fedmerit", "--version", cwd=tmp_path) == f"fedmerit {fm.__version__}\n"
    small = ("--set", "training.rounds=1", "--set", "training.local_epochs=1")
    told = called(bin_ / "fedmerit", "demo", *small, cwd=tmp_path, timeout=280)
    assert "Six hospitals, secure aggregation on." in told
    assert "settlement: in round 1 Elm stated a false number" in told
    (made,) = (tmp_path / "runs" / "demo").glob("page*.html")
    assert made.read_text().startswith("<!doctype html>")
    paid = ("rewards", "runs/demo", "--budget", "10000.00", "--on-undefined", "equal", "--despite-doubts")
    assert "recorded as decision 1" in called(bin_ / "fedmerit", *paid, cwd=tmp_path)


def test_the_citation_is_of_this_version_and_names_its_licence():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert (str(cited["version"]), cited["license"]) == (project["version"], project["license"])
    assert cited["keywords"] == project["keywords"]
    assert len(cited["references"][0]["authors"]) == 5


def test_the_workflow_calls_targets_that_exist():
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    steps = [step["run"] for job in flow["jobs"].values() for step in job["steps"] if "run" in step]
    assert "make test" in steps
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {step.removeprefix("make ") for step in steps} <= set(targets)


def test_what_a_reporter_of_a_weakness_is_pointed_to_exists():
    told = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([\w./-]+)\)|`((?:tests|docs)/[\w./-]+)`", told):
        assert (ROOT / (path[0] or path[1])).exists(), path
