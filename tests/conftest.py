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


@pytest.fixture
def fedmerit(capsys, monkeypatch):
    """Call the command line as from a shell: (exit code, stdout, stderr)."""
    from fedmerit.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedmerit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


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
