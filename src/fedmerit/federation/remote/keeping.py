"""A member's files: every message may be handled by a new process, so all it knows is kept next to its key.

::

    KEY.state/released            digests of what must never be done again (all runs)
    KEY.state/RUN/terms           what this member agreed to when it joined; pinned
    KEY.state/RUN/left            why this member answers nothing more in this run, if so
    KEY.state/RUN/0003.client     the state machine of round 3, with its secrets
    KEY.state/RUN/0003.began      training began: once a round
    KEY.state/RUN/0003.update     M0, the update and its weight: for the report, and for an audit
    KEY.state/RUN/0003.asked      the one request for a report that is answered
    KEY.state/RUN/0003.report     the answer, and the per-sample sums behind cumulative standard errors
    KEY.state/RUN/heads           the ledger's heads as they were shown to this member, and the hashes of its
                                  reports and of what they were about, one a line: see witness.py

All have mode 600 and are written in one step. Whatever holds a secret is also encrypted (AES-256-GCM under a
key derived from the identity key), so that a backup of the folder alone says nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerit.errors import StoreError
from fedmerit.federation.remote.wire import pack, unpack
from fedmerit.secagg.released import Released
from fedmerit.store import write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_RUN = re.compile(r"[0-9a-f]{32}")
NONCE = 12


class Keeping:
    """The files of one member in one run."""

    def __init__(self, key_file: Path, identity: Ed25519PrivateKey, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise StoreError(f"a run is named by 32 hexadecimal digits, got {run!r:.60}")
        self.home = key_file.with_name(key_file.name + ".state")
        self.folder = self.home / run
        self.run = run
        self._key = _derived(identity)

    @contextmanager
    def held(self) -> Iterator[None]:
        """One process at a time: a second message waits until the first is answered."""
        try:
            self.home.mkdir(mode=0o700, exist_ok=True)
            lock = (self.home / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(f"{self.home}: cannot keep a member's state: {error}") from error
        with lock:
            yield

    def open(self) -> None:
        """Begin to keep a run; of earlier ones, the secrets are deleted."""
        for path in (*self.home.glob("*/*.client"), *self.home.glob("*/*.update")):
            if path.parent != self.folder:
                path.unlink(missing_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    # ------------------------------------------------------------------------------------------- what is kept

    def put(self, name: str, value: Any) -> None:
        """Encrypt and write; the name is bound in, so files cannot be swapped."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(NONCE)
        sealed = AESGCM(self._key).encrypt(nonce, pack(value), self._bound(name))
        write(self.folder / name, nonce + sealed, mode=0o600)

    def get(self, name: str) -> Any:
        """What was put there, or None."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        path = self.folder / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            plain = AESGCM(self._key).decrypt(data[:NONCE], data[NONCE:], self._bound(name))
        except (InvalidTag, ValueError):
            raise StoreError(f"{path}: damaged, or of another key") from None
        return unpack(plain, f"the state in {path}")

    def released(self) -> Released:
        """What this member must never do again, in any run."""
        try:
            return Released.load((self.home / "released").read_bytes())
        except FileNotFoundError:
            if any(self.home.glob("*/*.client")):
                raise StoreError(f"{self.home / 'released'}: is gone; without it nothing is safe") from None
            return Released()

    def put_released(self, released: Released) -> None:
        """Before the message that changed it is sent."""
        write(self.home / "released", released.dump(), mode=0o600)

    def add_kept(self, *lines: str) -> None:
        """Remember heads and reports: whoever holds an old one sees a later rewrite."""
        path = self.folder / "heads"
        before = path.read_bytes() if path.exists() else b""
        write(path, before + "".join(f"{line}\n" for line in lines).encode("ascii"), mode=0o600)

    def last(self, what: str, before: int) -> Any:
        """What was put under that name in the latest round before this one, or None."""
        numbers = [int(path.stem) for path in self.folder.glob(f"[0-9]*.{what}") if path.stem.isdecimal()]
        earlier = [number for number in numbers if number < before]
        return self.get(f"{max(earlier):04d}.{what}") if earlier else None

    def drop_rounds(self, *, before: int) -> None:
        """Delete what is kept of rounds before this one: no audit can ask for it any more."""
        for path in self.folder.glob("[0-9]*.*"):
            if path.stem.isdecimal() and int(path.stem) < before:
                path.unlink(missing_ok=True)

    def _bound(self, name: str) -> bytes:
        return pack(["fedmerit member state 1", self.run, name])


def _derived(identity: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = identity.private_bytes_raw()
    return HKDF(SHA256(), 32, salt=None, info=b"fedmerit member state 1").derive(secret)
