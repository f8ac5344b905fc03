"""What is handed out: a wheel that works by itself, files people look for, and what runs without extras."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import fedmerit as fm

ROOT = Path(__file__).parents[1]


def called(*arguments, cwd):
    """Run a program that must succeed, without this checkout on its path; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
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
    told = called(bin_ / "fedmerit", "demo", *small, cwd=tmp_path)
    assert "Six hospitals, secure aggregation on." in told
    assert "settlement: in round 1 Elm stated a false number" in told
    (made,) = (tmp_path / "runs" / "demo").glob("page*.html")
    assert made.read_text().startswith("<!doctype html>")
    paid = ("rewards", "runs/demo", "--budget", "10000.00", "--rule", "equal")
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


# ----------------------------------------------------------------------------------------- without packages


ABSENT = ("cryptography", "Crypto", "pydantic", "altair", "flwr", "jinja2", "pandas", "polars", "openpyxl")
BLOCK = "import sys\nfor name in {!r}: sys.modules[name] = None\n"
RUN = """
from fedmerit.config import from_dict
from fedmerit.errors import MissingExtra
from fedmerit.simulation.run import run
try:
    run(from_dict({tiny!r}), {home!r} + "/masked")
except MissingExtra as error:
    print(error)
run(from_dict({tiny!r}, {overrides!r}), {home!r} + "/plain")
"""
TINY = {
    "data": {"test_size": 50},
    "partition": {"clients": 4, "scheme": "sizes", "sizes": [60, 50, 70, 40]},
    "model": {"name": "mlp"},
    "training": {"rounds": 1, "local_epochs": 1, "batch_size": 16},
}


PLAIN = ["secure_aggregation.enabled=false", 'scoring.truth=["mr-shapley"]']


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A process that tries a run with masks, then makes one without them; and the folder of both."""
    home = tmp_path_factory.mktemp("without")
    program = BLOCK.format(ABSENT) + RUN.format(tiny=TINY, overrides=PLAIN, home=str(home))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False), home


def test_a_run_without_masks_and_with_ground_truth(process):
    found, home = process
    assert found.returncode == 0, found.stderr
    scores = json.loads((home / "plain" / "scores.json").read_text())
    assert len(scores["cumulative"]["ALPHA"]) == 4
    assert len(scores["truth"]["MR-SV"]) == 4


def test_a_run_with_masks_says_what_to_install(process):
    found, home = process
    assert "secure aggregation needs the packages cryptography and pycryptodome" in found.stdout
    assert not (home / "masked" / "scores.json").exists()


INTEGERS = """
import fedmerit.secagg.quantise
from fedmerit.config import from_dict
assert from_dict({}).threshold == 5
"""


@pytest.mark.parametrize(
    ("absent", "program"),
    [
        (ABSENT, "import fedmerit, fedmerit.cli"),
        (("PIL", "h5py", "torch", "scipy", "cryptography"), "import fedmerit.data"),
        (("cryptography", "Crypto", "msgspec", "torch"), INTEGERS),
    ],
    ids=["rehearsals", "data", "settings and integers"],
)
def test_what_needs_none_of_them_loads(absent, program):
    found = subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent) + program], capture_output=True, check=False
    )
    assert found.returncode == 0, found.stderr


TABLES = """
from importlib.metadata import packages_distributions
from pathlib import Path
from fedmerit.cli import main
from fedmerit.errors import StoreError
from fedmerit.storage.run_folder import held
for command in (["score"], ["rewards", "--budget", "100"], ["page", "--out", {page!r}]):
    sys.argv = ["fedmerit", *command, {table!r}]
    try: main()
    except SystemExit as done: assert not done.code, done
try: held(Path({page!r}).parent)
except StoreError as error: print(error)
"""


def test_without_locks_as_on_windows_tables_are_read_and_runs_are_refused(tmp_path):
    table = str(ROOT / "examples" / "hospitals.csv")
    program = BLOCK.format(("fcntl",)) + TABLES.format(table=table, page=str(tmp_path / "page.html"))
    said = called(sys.executable, "-c", program, cwd=tmp_path)
    assert "budget 100.00, rule fenced" in said
    assert said.endswith("a run and a member's state need Linux or macOS: on Windows, use WSL or Docker\n")
    assert (tmp_path / "page.html").exists()


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    declared = {
        re.match(r"[\w-]+", one)[0].replace("_", "-").lower() for one in (*project["dependencies"], *extras)
    }
    imported = set()
    for path in (ROOT / "src" / "fedmerit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    of, known = packages_distributions(), {"fedmerit", *sys.stdlib_module_names}
    packages = {of[name][0].replace("_", "-").lower() for name in imported - known}
    # jinja2 brings the one; where Parquet is read, an error tells how to install the other
    assert packages - declared == {"markupsafe", "pyarrow"}
