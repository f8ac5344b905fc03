"""A run that is killed at any moment goes on and ends with the same bytes. Real processes, kill -9."""

import json
import os
import random
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from fedmerit.errors import KeyFileError, StoreError
from fedmerit.identity import new_key
from fedmerit.ledger.chain import Ledger
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.storage.recorder import LedgerRecorder
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_folder
from killing import crash, half_run
from runs import records_of
from tiny import losing, tiny

STALE = "corruption.free_rider={client-3='stale'}"
SETTINGS = ("training.rounds=4", "scoring.solo=true", "training.weights=scores", STALE)
LOST = {"client-2": "2:unmask"}


@pytest.fixture(scope="module", autouse=True)
def lost():
    with losing(LOST):
        yield


def config():
    return tiny(*SETTINGS, "model.name=mlp")  # it lasts long enough to be killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The score files of a run that goes through without a stop, by its network."""

    def files(network):
        folder = tmp_path_factory.mktemp("whole") / "run"
        run(tiny(*SETTINGS, f"model.name={network}"), folder)
        return (folder / "scores.json").read_bytes(), (folder / "scores.csv").read_bytes()

    return cache(files)


CHILD = """
import sys
import torch
torch.set_num_threads(1)
sys.path[:0] = {paths!r}
from fedmerit.simulation.run import run
from tests.simulation.test_resume import LOST, config
from tiny import losing
print("ready", flush=True)
with losing(LOST):
    run(config(), {folder!r}, resume={resume!r}, watch=lambda step: print(step.stage, flush=True))
"""


def killed(folder, live):
    """Run or resume ``config()`` in a process of its own, and kill it; return whether it was over.

    ``live`` reads its stages, one a line, for as long as the run is to live.
    """
    root, resume = Path(__file__).parents[2], (folder / "config.toml").exists()
    code = CHILD.format(paths=[str(root), str(root / "tests/support")], folder=str(folder), resume=resume)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout.readline() == "ready\n"
        live(process.stdout)
    finally:
        finished = process.poll() is not None
        process.kill()
        process.communicate()
    assert not finished or process.returncode == 0
    return finished


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_at_ten_random_moments_it_ends_with_the_same_bytes(tmp_path, whole):
    folder, rng, kills = tmp_path / "run", random.Random(20261115), 0

    def live(stages):
        """Let it live for at most 40 steps of the 32 of a round, then an instant longer."""
        for _ in range(rng.randrange(1, 41)):
            if not stages.readline():
                break
        time.sleep(rng.random() * 0.02)

    while kills < 10 and not killed(folder, live):
        kills += 1
    run(config(), folder, resume=True)
    found = (folder / "scores.json").read_bytes(), (folder / "scores.csv").read_bytes()
    assert found == whole("mlp")
    assert list(verify_folder(folder))
    assert not [path for path in folder.rglob(".*") if path.name not in (".lock",)]
    assert kills >= 5


@pytest.mark.parametrize(
    ("where", "step", "when"),
    [
        (Folder, "save_checkpoint", lambda *given: True),
        (Ledger, "append", lambda *given: given[2] == "round"),
        (LedgerRecorder, "write_scores", lambda *given: True),
    ],
    ids=["checkpoint", "commit", "scores"],
)
def test_a_crash_at_each_step_of_closing_a_round_is_repaired(tmp_path, whole, where, step, when):
    """Between checkpoint and transaction, inside the transaction, and between transaction and score files."""
    settings = tiny(*SETTINGS)
    crash(settings, tmp_path / "run", where, step, 2, when)
    run(settings, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "scores.json").read_bytes() == whole("network:tiny")[0]
    assert list(verify_folder(tmp_path / "run"))


@pytest.fixture
def half_done(tmp_path):
    return half_run(tiny(), tmp_path / "run")


def test_a_lost_key_is_not_made_anew_and_a_changed_one_is_noticed(half_done):
    key = half_done / "keys" / "client-0.pem"
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(KeyFileError, match=r"client-0\.pem: cannot read the private key"):
        run(tiny(), half_done, resume=True)
    assert not key.exists()
    new_key(key)
    with pytest.raises(StoreError, match="cannot be resumed: the keys changed since it started"):
        run(tiny(), half_done, resume=True)
    key.write_bytes(kept)
    assert len(run(tiny(), half_done, resume=True)["rounds"]) == 2


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "expected 32 bytes, got 0"), (bytes(32), "the test pool")]
)
def test_a_changed_pool_key_is_noticed(half_done, content, message):
    (half_done / "keys" / "pool.key").write_bytes(content)
    with pytest.raises(StoreError, match=message):
        run(tiny(), half_done, resume=True)


def test_changed_training_data_is_noticed(half_done, monkeypatch):
    from fedmerit.simulation import setup

    original = setup.data.load

    def relabelled(*args, **kwargs):
        dataset = original(*args, **kwargs)
        dataset.y_train[:] = dataset.y_train[::-1].copy()
        return dataset

    monkeypatch.setattr(setup.data, "load", relabelled)
    with pytest.raises(StoreError, match="the training data changed since it started"):
        run(tiny(), half_done, resume=True)


@pytest.mark.parametrize("rider", ["zero", pytest.param("stale", marks=pytest.mark.long)])
def test_an_update_that_comes_again_is_declined_with_masks_without_and_after_a_stop(tmp_path, rider):
    """Round 1 is aborted when shares are out; from the same model a free rider has the same update."""
    settings = ("training.rounds=3", f"corruption.free_rider={{client-3='{rider}'}}")
    found = []
    for enabled in ("true", "false"):
        config = tiny(*settings, f"secure_aggregation.enabled={enabled}")
        with losing({"client-0": "1:unmask", "client-1": "1:unmask"}):
            run(config, tmp_path / enabled)
            for resume in (False, True):
                half_run(config, tmp_path / f"{enabled}-stopped", resume=resume)
            run(config, tmp_path / f"{enabled}-stopped", resume=True)
        for folder in (tmp_path / enabled, tmp_path / f"{enabled}-stopped"):
            found.append((folder / "scores.json").read_bytes())
            assert list(verify_folder(folder))
    assert len(set(found)) == 1
    participants = [one["participants"] for one in json.loads(found[0])["rounds"]]
    assert participants == [[], ["client-0", "client-1", "client-2"], [f"client-{i}" for i in range(4)]]


def test_who_had_not_signed_the_last_head_signs_it_after_a_kill(tmp_path):
    crash(tiny(), tmp_path / "run", LedgerRecorder, "said", 6)
    for _ in range(2):
        run(tiny(), tmp_path / "run", resume=True)
        records = records_of(tmp_path / "run")
        kinds = [record.kind for record in records]
        signed = [record.author for record in records if record.kind == "seen"]
        assert sorted(signed) == [f"client-{i}" for i in range(4)]
        assert kinds.count("join") == 4
        assert kinds.count("end") == 1
        assert list(verify_folder(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.parametrize("switch", ["true", "false"])
@pytest.mark.parametrize(("aborted", "stopped"), [([1], 1), ([2], 1), ([2], 2), ([1, 2], 1), ([2, 3], 3)])
def test_an_aborted_round_before_or_after_a_resume_verifies(tmp_path, switch, aborted, stopped):
    config = tiny(
        "training.rounds=4",
        f"secure_aggregation.enabled={switch}",
        f"participation.away={{client-0={aborted}, client-1={aborted}}}",
    )

    crash(config, tmp_path / "run", Rehearsal, "round", stopped + 1)
    assert f"rounds: {stopped} of 4, {sum(one <= stopped for one in aborted)} aborted" in list(
        verify_folder(tmp_path / "run")
    )
    run(config, tmp_path / "run", resume=True)
    assert f"rounds: 4 of 4, {len(aborted)} aborted" in list(verify_folder(tmp_path / "run"))
