"""A member's files. Every message may be handled by a new process, so a member's state is next to its key.

::

    KEY.state/released            digests of what must never be done again (all runs)
    KEY.state/roster              hash of the roster that this member last took part under (all runs)
    KEY.state/RUN/terms           what this member agreed to when it joined; it cannot change
    KEY.state/RUN/left            why this member has left the run, if it has
    KEY.state/RUN/0003.client     the state machine of round 3, with its secrets
    KEY.state/RUN/0003.began      hash of the model it began to train, which it does once per round
    KEY.state/RUN/0003.update     M0, the update and its weight: for the report, and for an audit
    KEY.state/RUN/0003.asked      hash of the only request for a report that it answers
    KEY.state/RUN/0003.report     the answer, and the per-sample sums behind cumulative standard errors
    KEY.state/RUN/seen            the last head of the run, once it has signed it
    KEY.state/RUN/heads           the heads it was shown, the models it trained from, hashes of what it
                                  masked, the sums it released shares for, and hashes of its reports and
                                  their outcomes, one per line: see head_log.py

All files have mode 600, in a folder of mode 700, and are written in one step. All but the last are encrypted
(AES-256-GCM under a key derived from the identity key). So a backup of the folder reveals only ``heads``,
and a file that was cut, emptied or swapped with another one raises an error. ``released`` is written before
the folder of the first run is made: if there is a run but no ``released``, the file was lost. Nobody can
notice if an older copy of it was put back, or if the key was moved elsewhere without its folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerit.errors import StoreError
from fedmerit.protocol.messages import pack, unpack
from fedmerit.secagg.state import Released
from fedmerit.storage.run_folder import sweep, write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger("fedmerit")
_RUN = re.compile(r"[0-9a-f]{32}")
IDLE = 86_400.0
"""Seconds without a message after which a run counts as over although it never ended."""
MOST_RUNS = 100
"""Most runs that a member stores: a single invitation by a server makes a folder."""
NONCE = 12
ALL_RUNS = "all runs"
RESTORE = (
    "it says what this member must never do again; put back a copy that was made after its last round, or, "
    "if there is none, take part with a new key on a new roster"
)


class MemberFiles:
    """The files of one member in one run: a `protocol.member.MemberState`."""

    def __init__(self, key_file: Path, identity: Ed25519PrivateKey, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise StoreError(f"a run is named by 32 hexadecimal digits, got {run!r:.60}")
        self.home = key_file.with_name(key_file.name + ".state")
        self.folder = self.home / run
        self.run = run
        self._key = _derived(identity)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let one process at a time work: a second message waits until the first is answered."""
        try:
            self.home.mkdir(mode=0o700, exist_ok=True)
            mode = stat.S_IMODE(self.home.stat().st_mode)
            if os.name == "posix" and mode & 0o077:
                raise StoreError(
                    f"{self.home}: a member's state must have mode 700, got {mode:o}; otherwise others could "
                    f"replace its record of what must never be done again; run: chmod 700 {self.home}"
                )
            lock = (self.home / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(f"{self.home}: cannot keep a member's state: {error}") from error
        with lock:
            yield

    def open(self) -> None:
        """Make the folder of a run, and delete the secrets of other runs that are over or long idle."""
        if not self._released.exists():
            self.put_released(self.released())
        sweep(self.home)
        others = [folder for folder in self.home.iterdir() if folder.is_dir() and folder != self.folder]
        if going := sum(not _tidied(folder) for folder in others):
            log.warning(
                "joins a run while %d other run(s) are not over; keeps what it stored for them", going
            )
        if (kept := sum(folder.exists() for folder in others)) >= MOST_RUNS:
            raise StoreError(
                f"{self.home}: holds {kept} runs, and a member keeps at most {MOST_RUNS}. Invitations are "
                "deleted after a day. Verify the runs that are over (fedmerit verify --heads), then delete "
                "their folders"
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)

    # ----------------------------------------------------------------------------------------- stored values

    def put(self, name: str, value: Any) -> None:
        """Encrypt and write a value, bound to its name so that files cannot be swapped."""
        self._put(self.folder / name, self.run, value)

    def get(self, name: str) -> Any:
        """Return the value stored under a name, or None."""
        return self._get(self.folder / name, self.run)

    def released(self) -> Released:
        """Return what this member must never do again, in any run; raise StoreError if that was lost."""
        try:
            kept = self._get(self._released, ALL_RUNS)
        except StoreError as error:
            raise StoreError(f"{error}; {RESTORE}") from None
        if kept is None and any(path.is_dir() for path in self.home.iterdir()):
            raise StoreError(f"{self._released}: missing; {RESTORE}")
        return Released() if kept is None else Released.load(kept)

    def put_released(self, released: Released) -> None:
        """Store what must never be done again, before the message that changed it is sent."""
        self._put(self._released, ALL_RUNS, released.dump())

    def roster(self) -> bytes | None:
        """Return the hash of the roster that this member last took part under, or None."""
        kept: bytes | None = self._get(self.home / "roster", ALL_RUNS)
        return kept

    def put_roster(self, hash_: bytes) -> None:
        """Store the hash of the roster that this member takes part under."""
        if self.roster() != hash_:
            self._put(self.home / "roster", ALL_RUNS, hash_)

    def add_kept(self, *lines: str) -> None:
        """Append lines about what the member was shown, did and said, to detect a ledger that differs."""
        path = self.folder / "heads"
        before = path.read_bytes() if path.exists() else b""
        write(path, before + "".join(f"{line}\n" for line in lines).encode("ascii"), mode=0o600)

    def last(self, what: str, before: int) -> Any:
        """Return the value stored under `ROUND.what` in the latest round before this one, or None."""
        numbers = [int(path.stem) for path in self.folder.glob(f"[0-9]*.{what}") if path.stem.isdecimal()]
        earlier = [number for number in numbers if number < before]
        return self.get(f"{max(earlier):04d}.{what}") if earlier else None

    def drop_rounds(self, *, before: int) -> None:
        """Delete the files of rounds before this one, which no audit can ask for any more."""
        sweep(self.folder)
        for path in self.folder.glob("[0-9]*.*"):
            if path.stem.isdecimal() and int(path.stem) < before:
                path.unlink(missing_ok=True)

    @property
    def _released(self) -> Path:
        return self.home / "released"

    def _put(self, path: Path, run: str, value: Any) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(NONCE)
        sealed = AESGCM(self._key).encrypt(nonce, pack(_plain(value)), _bound(run, path.name))
        write(path, nonce + sealed, mode=0o600)

    def _get(self, path: Path, run: str) -> Any:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            plain = AESGCM(self._key).decrypt(data[:NONCE], data[NONCE:], _bound(run, path.name))
        except (InvalidTag, ValueError):
            raise StoreError(f"{path}: damaged, or encrypted with another key") from None
        return unpack(plain, f"the state in {path}")


def _plain(value: Any) -> Any:
    """Return a value as it is stored: arrays as little-endian bytes, a client as its dump."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    if hasattr(value, "dump"):
        return value.dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _tidied(folder: Path) -> bool:
    """Delete the secrets of a run that is over or idle, or an idle invitation; return False if it goes on."""
    sweep(folder)
    files = {path.name: path.stat().st_mtime for path in folder.iterdir()}
    idle = time.time() - max(files.values(), default=0.0) >= IDLE
    if files.keys() <= {"terms"}:  # an invitation only: deleted once it is idle
        if idle:
            for name in files:
                (folder / name).unlink()
            folder.rmdir()
        return True
    if not idle and not files.keys() & {"seen", "left"}:
        return False
    for path in (*folder.glob("*.client"), *folder.glob("*.update")):
        path.unlink(missing_ok=True)
    return True


def _bound(run: str, name: str) -> bytes:
    return pack(["fedmerit member state 1", run, name])


def _derived(identity: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = identity.private_bytes_raw()
    return HKDF(SHA256(), 32, salt=None, info=b"fedmerit member state 1").derive(secret)
