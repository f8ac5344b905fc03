"""The ServerApp of a settled run between processes is killed (-9) after training; the next one settles."""

import contextlib
import os
import signal
import sqlite3
from pathlib import Path

import pytest
from deployment import verified

from fedmerit.errors import FedmeritError, LedgerError
from fedmerit.ledger.chain import Ledger
from loopback import Loopback
from loopback.processes import HANG, wait_for


def kinds(out):
    """Kinds of the records so far."""
    with (
        contextlib.suppress(LedgerError, sqlite3.Error),
        Ledger(out / "ledger.sqlite", read_only=True) as ledger,
    ):
        return [record.kind for record in ledger.records()]
    return []


def server_app(federation):
    """The process that runs the ServerApp."""
    found = []
    for pid in federation.pids("superlink"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] if any(Path(word.decode()).name == "flwr-serverapp" for word in words) else []
    return found


@pytest.mark.alone
@pytest.mark.timeout(4 * HANG)
def test_a_server_app_killed_after_training_is_settled_by_the_next_one(request, tmp_path, monkeypatch):
    example = request.config.rootpath / "examples" / "flower-hospitals"
    monkeypatch.syspath_prepend(str(example))
    import demo
    from hospitals.task import HOSPITALS

    roster, out = demo.make_roster(tmp_path), tmp_path / "run"
    nodes = {
        name: {"fedmerit-key": str(demo.key_of(tmp_path, name)), "fedmerit-roster": str(roster)}
        for name in HOSPITALS
    }
    config = {"roster": str(roster), "server-key": str(demo.server_key(tmp_path)), "out": str(out)}
    config |= {"rounds": 2, "patience": HANG, "join": HANG}
    with Loopback(tmp_path / "federation", nodes, demo.THREADS) as federation:
        run = federation.submit(example, config)

        def goes_on():
            federation.check()
            if run.over:
                raise FedmeritError(f"the run is over already:\n{run.output[-3000:]}")

        wait_for("the pool is opened", lambda: "opening" in kinds(out), alive=goes_on)
        killed = server_app(federation)
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for("the ServerApp is gone", lambda: not server_app(federation), alive=federation.check)
        before = kinds(out)
        assert before.count("round") == 2
        assert not {"statement", "settled", "end"} & {*before}
        federation.submit(example, {**config, "settle": True}).wait()
    after = kinds(out)
    assert after[: len(before)] == before
    assert [after.count(kind) for kind in ("opening", "round", "settled", "end")] == [1, 2, 1, 1]
    for kind in ("agreed", "statement", "countersigned", "seen"):
        assert after.count(kind) == len(HOSPITALS), kind
    assert "settlement: 2 of 2 equations hold" in verified(out, tmp_path / "copy", roster)
