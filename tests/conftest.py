"""Settings for all tests: one thread, also in processes that tests start, so that equal runs are equal."""

import functools
import gc
import os
import shutil
import sqlite3
import sys

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("COLUMNS", "200")

import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings

# The tree of commands stays the same, but typer builds it at every call.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)

# Every machine tries the same examples, so that what passed once passes again; `make explore` tries new ones.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fedmerit", derandomize=True, max_examples=50, **patient)
settings.register_profile("explore", derandomize=False, print_blob=True, **patient)
settings.load_profile("fedmerit")


def pytest_collection_finish(session):
    """Keep modules and tests, which live as long as the process, out of every collection of garbage."""
    gc.collect()
    gc.freeze()


class Shell:
    """The command line as from a shell."""

    def __init__(self, capsys, monkeypatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments):
        """Return exit code, stdout and stderr."""
        from fedmerit.cli import main

        self.monkeypatch.setattr(sys, "argv", ["fedmerit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self.capsys.readouterr()
        return ended.value.code or 0, out, err

    def said(self, *arguments):
        """Return what a command prints that must succeed."""
        code, out, err = self(*arguments)
        assert code == 0, err
        return out

    def refused(self, *arguments):
        """Return the one line with which a command must fail; some print what they find before."""
        code, out, err = self(*arguments)
        assert code == 2
        assert out == "" or arguments[0] in ("demo", "keys", "verify")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def fedmerit(capsys, monkeypatch):
    """Call the command line as from a shell: (exit code, stdout, stderr)."""
    return Shell(capsys, monkeypatch)


class Hasty(sqlite3.Connection):
    """A connection to SQLite that hands writes to the system and does not wait until they are on a disk."""

    def execute(self, sql, *given):
        return super().execute("PRAGMA synchronous=OFF" if sql == "PRAGMA synchronous=FULL" else sql, *given)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks():
    """Wait for no disk: a power cut is not what tests are about. Processes that tests start do wait."""
    fsync, connect = os.fsync, sqlite3.connect
    os.fsync, sqlite3.connect = lambda file: None, functools.partial(connect, factory=Hasty)
    yield
    os.fsync, sqlite3.connect = fsync, connect


@pytest.fixture
def brief_plans(monkeypatch):
    """Let plans measure this machine for an instant, not for a second."""
    from fedmerit.simulation import plan

    monkeypatch.setattr(plan, "CALIBRATION", 0.01)


@pytest.fixture
def folder(runs, tmp_path):
    """A copy of the run of a module's ``runs`` in which everybody sees all."""
    return shutil.copytree(runs / "open", tmp_path / "run")


@pytest.fixture
def closed(runs, tmp_path):
    """A copy of the one in which the coordinator alone does."""
    return shutil.copytree(runs / "closed", tmp_path / "closed")


@pytest.fixture(scope="session")
def once_finished(tmp_path_factory):
    from linear_federation import Federation

    return Federation(tmp_path_factory.mktemp("finished"), files=True).run().home


@pytest.fixture(scope="session")
def rehearsed(tmp_path_factory):
    """What `tiny` gives with all utilities, and the folder of that run; not to be changed."""
    from fedmerit.simulation.run import run
    from tiny import ALL, tiny

    folder = tmp_path_factory.mktemp("rehearsed") / "run"
    return run(tiny(ALL), folder), folder


@pytest.fixture
def finished(once_finished, tmp_path):
    """A copy of the folder of a run that went well: keys, roster, members' files, and ``run``."""
    return shutil.copytree(once_finished, tmp_path / "home")
