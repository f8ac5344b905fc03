"""The run folder: one process at a time, nothing half written, and a clear word when it cannot be used."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedmerit.config import Config, from_dict
from fedmerit.errors import LedgerError, StoreError
from fedmerit.identity import SERVER
from fedmerit.storage.run_folder import Folder, checkpoint_in, read_checkpoint, remove, write

CONFIG = Config()
ARRAYS = {"model": np.arange(6, dtype=np.float32).reshape(2, 3)}


def listed(path):
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


def record(folder):
    with folder.ledger.transaction():
        folder.ledger.append(SERVER, "run", {"run": "7f"})


@pytest.fixture
def started(tmp_path):
    """A folder with a run in it that was stopped after a round."""
    path = tmp_path / "run"
    with Folder(path, CONFIG) as folder:
        record(folder)
        folder.save_checkpoint("model", 1, ARRAYS)
    return path


# ---------------------------------------------------------------------------------------- which folder


def test_a_new_folder_holds_config_ledger_and_room_for_checkpoints(tmp_path):
    with Folder(tmp_path / "a" / "b", CONFIG) as folder:
        assert {"config.toml", "ledger.sqlite", "checkpoints", ".lock"} <= set(listed(folder.path))
        assert (folder.path / "config.toml").read_text() == CONFIG.to_toml()


def test_a_run_that_failed_before_its_first_record_can_be_started_again(tmp_path):
    with Folder(tmp_path / "run", CONFIG) as folder:
        assert len(folder.ledger) == 0  # and then, say, the data could not be read
    (tmp_path / "run" / ".config.toml.0123abcd").touch()  # of a process that was killed
    other = from_dict({"data": {"path": "elsewhere"}})
    with Folder(tmp_path / "run", other) as folder:
        assert (folder.path / "config.toml").read_text() == other.to_toml()
    assert ".config.toml.0123abcd" not in listed(tmp_path / "run")


def test_what_is_no_run_folder_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "made").mkdir()
    unusable, nothing = "cannot be used as a run folder", r"nothing to resume, there is no config\.toml"
    for path, resume, message in (
        (tmp_path, False, "not empty; use --resume to go on with the run in it, or another"),
        (tmp_path / "file", False, unusable),
        (tmp_path / "file" / "below", False, unusable),
        (tmp_path / "made", True, nothing),
        (tmp_path / "new", True, nothing),
    ):
        with pytest.raises(StoreError, match=message):
            Folder(path, CONFIG, resume=resume)
    assert listed(tmp_path) == ["file", "made"]


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    """As another user would see it (root may write anywhere)."""

    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(StoreError, match=r"run: cannot be used as a run folder: .*Permission denied"):
        Folder(tmp_path / "run", CONFIG)


# --------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"run": {"seed": 1}}, "run.seed is 0 there and 1 here"),
        ({"training": {"lr": 0.5}, "run": {"seed": 1}}, "training.lr is 0.001 there and 0.5 here"),
        ({"partition": {"names": list("abcdef")}}, r"partition.names is \[\] there and \['a', 'b', 'c'"),
    ],
)
def test_resume_with_another_config_names_the_first_difference(started, raw, message):
    with pytest.raises(StoreError, match=f"holds a run with a different config: {message}"):
        Folder(started, from_dict(raw), resume=True)
    with Folder(started, CONFIG, resume=True):
        pass  # the lock was given back


def put(name, data):
    return lambda run: (run / name).write_bytes(data)


def gone(run):
    (run / "ledger.sqlite").unlink()


NO_RECORD = "damaged run folder: checkpoints, but no record of a run"


@pytest.mark.parametrize(
    ("spoil", "resume", "kind", "words"),
    [
        (lambda run: None, False, StoreError, "not empty; use --resume"),
        (put("config.toml", b"[training"), True, StoreError, "run: damaged run folder: "),
        (put("config.toml", b"[training]\nrounds = 0\n"), True, StoreError, "run: damaged run folder: "),
        (put("config.toml", b"[x]\n"), True, StoreError, "run: damaged run folder: "),
        (put("ledger.sqlite", b"no database " * 40), True, LedgerError, "cannot be opened as a ledger"),
        (gone, True, StoreError, NO_RECORD),
        (gone, False, StoreError, "not empty"),
        (put("ledger.sqlite", b""), True, StoreError, NO_RECORD),
        (put("ledger.sqlite", b""), False, StoreError, "not empty"),
    ],
)
def test_a_folder_is_neither_started_over_nor_gone_on_with_unless_it_is_whole(
    started, spoil, resume, kind, words
):
    spoil(started)
    names = ("config.toml", "check*/*", *(() if resume else ("ledger.sqlite",)))
    there = [one for name in names for one in started.glob(name) if one.stat().st_size]
    before = {one: one.read_bytes() for one in there}
    with pytest.raises(kind, match=words):
        Folder(started, CONFIG if resume else from_dict({"run": {"seed": 1}}), resume=resume)
    assert before == {one: one.read_bytes() for one in before}


# ----------------------------------------------------------------------------------------------- lock

HOLD = """
import sys
from fedmerit.config import Config
from fedmerit.storage.run_folder import Folder
with Folder(sys.argv[1], Config(), resume=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_and_free_again_when_it_is_killed(started):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, started], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    with pytest.raises(StoreError, match="run: another process is running in this folder"):
        Folder(started, CONFIG, resume=True)
    with pytest.raises(StoreError, match="another process is running"):
        remove(started)
    assert (started / "ledger.sqlite").exists()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with Folder(started, CONFIG, resume=True):
        pass
    remove(started)
    assert not started.exists()


# ---------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_come_back_and_are_private(started):
    with Folder(started, CONFIG, resume=True) as folder:
        digest = folder.save_checkpoint("members", 2, ARRAYS | {"empty": np.zeros(0)})
        found = read_checkpoint(folder.path, "members", 2, digest)
        assert np.array_equal(found["model"], ARRAYS["model"])
        assert found["empty"].shape == (0,)
        path = checkpoint_in(folder.path, "members", 2)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_private_file_is_never_readable_in_between(tmp_path, monkeypatch):
    seen = []
    real = os.fsync

    def look(handle):
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return real(handle)

    monkeypatch.setattr(os, "fsync", look)
    write(tmp_path / "key", b"secret", mode=0o600)
    assert seen[0] == 0o600
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "other"])
def test_a_damaged_checkpoint(started, damage):
    with Folder(started, CONFIG, resume=True) as folder:
        digest = folder.save_checkpoint("model", 3, ARRAYS)
        path = checkpoint_in(folder.path, "model", 3)
        data = path.read_bytes()
        if damage == "gone":
            path.unlink()
            expected = "the checkpoint of round 3 is gone"
        else:
            changed = {"cut": data[:-1], "flip": data[:-1] + bytes([data[-1] ^ 1]), "other": b"{}"}
            path.write_bytes(changed[damage])
            expected = rf"model-0003\.safetensors: damaged: expected SHA-256 {digest[:16]}\.\.\., got "
        with pytest.raises(StoreError, match=expected):
            read_checkpoint(folder.path, "model", 3, digest)


def test_old_checkpoints_go_and_nothing_else(started):
    with Folder(started, CONFIG, resume=True) as folder:
        for number in (2, 3):
            folder.save_checkpoint("model", number, ARRAYS)
        (folder.path / "checkpoints" / "mine.safetensors").touch()
        folder.drop_checkpoints(keep=3)
        assert listed(folder.path / "checkpoints") == ["mine.safetensors", "model-0003.safetensors"]


def test_what_a_killed_process_left_half_written_is_cleared_away(started):
    for name in (".scores.json.0123abcd", "checkpoints/.model-0002.safetensors.deadbeef"):
        (started / name).write_bytes(b"half")
    (started / ".gitignore").write_text("keys\n")
    with Folder(started, CONFIG, resume=True):
        pass
    assert ".gitignore" in listed(started)
    assert not [name for name in listed(started) if "0123abcd" in name or "deadbeef" in name]


# ----------------------------------------------------------------------------------------- full disks


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["os.open", "os.fsync", "os.replace"])
def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch, call):
    path = tmp_path / "scores.json"
    write(path, b"before")
    target = {"os.replace": "pathlib.Path.replace"}.get(call, call)
    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        with pytest.raises(
            StoreError, match=r"scores\.json: could not be written: .*No space left on device"
        ):
            write(path, b"after")
    assert path.read_bytes() == b"before"
    assert listed(tmp_path) == ["scores.json"]


def test_a_folder_on_a_full_disk(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left on device"):
            Folder(tmp_path / "run", CONFIG)
    assert listed(tmp_path / "run") == [".lock"]
    with Folder(tmp_path / "run", CONFIG):
        pass


def test_a_disk_that_can_only_be_read_is_named_with_the_file_that_was_asked_for(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "a temporary file")

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr("pathlib.Path.unlink", refused)
    with pytest.raises(StoreError, match=r"page\.html: could not be written: Read-only file system$"):
        write(tmp_path / "page.html", b"")
    with pytest.raises(StoreError, match="expected the name of a file, got a folder"):
        write(Path("."), b"")
    monkeypatch.undo()
    with pytest.raises(StoreError, match="could not be written"):
        write(tmp_path / "gone" / "file", b"x")
