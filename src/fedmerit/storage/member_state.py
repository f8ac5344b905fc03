"""A member's state. Every message may be handled by a new process, so the state is next to the key.

::

    KEY.state/state               one sealed file: a counter, what must never be done again, pins and peers'
                                  counters for each federation, and all small values of each run
    KEY.state/RUN/terms.5f0c1d2e  a larger value (here the terms of a run), sealed. `state` holds its seal,
                                  and the name its first digits, so no other file passes for it
    KEY.state/RUN/heads           what the member was shown, did and said, one entry per line: see
                                  ledger/run.py; `state` holds its length and digest

`protocol.memory` lists the values of a run; those of round 3 are ``0003.client`` and so on.

A message is answered in this order: larger values are written, then ``heads``, then ``state``, each in one
step; then files are deleted that ``state`` no longer names; then the answer leaves. So a kill at any moment
leaves the state before the message or the state after it. Sealed means AES-256-GCM under a key derived from
the identity key. A file that is lost, cut, swapped or put back from an older copy raises an error. Only an
older copy of the whole folder passes here; the counter, which grows with every write and which other members
remember, shows it to them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from fedmerit.errors import ConfigError, StoreError
from fedmerit.identity import Roster, load_key
from fedmerit.notes import Note
from fedmerit.protocol import memory
from fedmerit.protocol.memory import T, Value
from fedmerit.protocol.messages import pack
from fedmerit.protocol.settler import two_manifests
from fedmerit.protocol.terms import Lineage
from fedmerit.storage.run_folder import examine_disk, lock, sweep, write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger("fedmerit")
_RUN = re.compile(r"[0-9a-f]{32}")
_VALUE = re.compile(r"(?:[0-9]+\.)?[a-z0-9]+(?:\.[0-9a-f]{8})?")
_OVER = {memory.LEFT.name, memory.SEEN.name}
"""Values that show that a member takes no further part in a run."""
IDLE = DAY = 86_400.0
"""Seconds without a message after which a run counts as over although it never ended."""
BEFORE_OPENING = 7 * DAY
"""Seconds for which a member who is away keeps what was summed, beside the window for statements: the window
opens after the last round, and such a member is not told when that was."""
MOST_RUNS = 100
"""Most runs that a member stores: a single invitation by a server makes a folder."""
SMALL = 4096
"""Most bytes of a value within the file `state`; a larger one has a file of its own."""
DISK = 4 * 2**30
"""Most bytes that a member stores of one run, unless its owner allows more."""
SPARE = 64 * 2**20
"""Bytes of the disk that a member leaves free."""
MAGIC = b"FMS"
VERSION = b"3"
NONCE, TAG = 12, 16
LOST = (
    "it says what this member must never do again; put back a copy of the whole folder that was made after "
    "this member's last answer, never an older one; if there is none, take part with a new key on a new "
    "roster"
)
GONE = (
    "put back this very file, from a copy that was made since it was written; without it, this member takes "
    "no further part in the run, but it joins other runs"
)


STOPPED = (
    "others have seen a later state of this key, so this one answers nothing more: " + LOST.partition("; ")[2]
)


class RunState(Struct):
    time: float = field(default_factory=time.time)  # of the last change
    heads: tuple[int, bytes] = (0, hashlib.sha256(b"").digest())  # length and digest of the file
    values: dict[str, bytes] = field(default_factory=dict)  # small ones
    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # seal and size of each other value

    @property
    def names(self) -> set[str]:
        return {*self.values, *self.files}

    def forget(self, name: str) -> None:
        """Delete a value; its file goes once the state is written."""
        self.values.pop(name, None)
        self.files.pop(name, None)


class Content(Struct):
    """What the file `state` holds."""

    counter: int = 0
    disk: int | None = None  # the owner's budget
    known: memory.Known = field(default_factory=memory.Known)
    runs: dict[str, RunState] = field(default_factory=dict)


class StateFile:
    """The file `state` of one member, and the sealed files that it names."""

    def __init__(self, key_file: Path, identity: Ed25519PrivateKey) -> None:
        self.home = key_file.with_name(key_file.name + ".state")
        self.path = self.home / "state"
        self._lock = self.home / ".lock"  # not empty once `state` was written
        self._key = _derived(identity)
        self._content: Content | None = None
        self.touched: set[str] = set()  # runs whose folders may hold what is no longer named

    @contextmanager
    def held(self, *, wait: bool = True) -> Iterator[None]:
        """Let one process at a time work: a second message waits until the first is answered."""
        try:
            self.home.mkdir(mode=0o700, exist_ok=True)
            mode = stat.S_IMODE(self.home.stat().st_mode)
            if os.name == "posix" and mode & 0o077:
                raise StoreError(
                    f"{self.home}: a member's state must have mode 700, got {mode:o}; otherwise others could "
                    f"replace its record of what must never be done again; run: chmod 700 {self.home}"
                )
            locked = self._lock.open("a")
            lock(locked, wait=wait)
        except BlockingIOError as error:
            locked.close()
            raise StoreError(f"{self.home}: the member is answering a message; try again later") from error
        except OSError as error:
            raise StoreError(f"{self.home}: cannot keep a member's state: {error}") from error
        with locked:
            self._content = None
            try:
                yield
            finally:
                self._content = None

    @property
    def content(self) -> Content:
        """What the file holds; read once."""
        if self._content is None:
            self._content = self._read()
        return self._content

    def _read(self) -> Content:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            if self._begun() or self.runs_on_disk():
                raise StoreError(f"{self.path}: missing; {LOST}") from None
            return Content()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error}; {LOST}") from error
        if data[:3] == MAGIC and data[3:4] != VERSION:
            raise StoreError(f"{self.path}: written by another version of fedmerit")
        head = len(MAGIC + VERSION)
        plain = self._unsealed(data[head:], _bound("", "state")) if data[:head] == MAGIC + VERSION else None
        if plain is None:
            raise StoreError(f"{self.path}: damaged, or encrypted with another key; {LOST}")
        content: Content = memory.unpacked(plain, Content, f"the state in {self.path}")
        return content

    def commit(self) -> None:
        """Count up and write the file in one step, then delete what it no longer names."""
        content = self.content
        content.counter += 1
        sealed = self._sealed(memory.packed(content), _bound("", "state"))
        write(self.path, MAGIC + VERSION + sealed, mode=0o600)
        if not self._begun():
            self._lock.write_bytes(b"state\n")
        sweep(self.home)
        for folder in self.runs_on_disk():
            if folder.name in self.touched:
                self._sweep_run(folder)
        self.touched.clear()

    def _begun(self) -> bool:
        return self._lock.exists() and self._lock.stat().st_size > 0

    def _sweep_run(self, folder: Path) -> None:
        run = self.content.runs.get(folder.name)
        named = set() if run is None else {file_name(name, seal) for name, (seal, _) in run.files.items()}
        sweep(folder)
        for path in folder.iterdir():
            if path.name not in {*named, "heads"} and _VALUE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        if run is None and not any(folder.iterdir()):
            folder.rmdir()

    def runs_on_disk(self) -> list[Path]:
        """Return the folders of runs."""
        if not self.home.is_dir():
            return []
        return [path for path in self.home.iterdir() if _RUN.fullmatch(path.name) and path.is_dir()]

    # ------------------------------------------------------------------------------------------ sealed files

    def value(self, run: str, value: Value[T]) -> T | None:
        """Return a value of a run, or None."""
        data = self.read(run, value.name)
        return None if data is None else memory.unpacked(data, value.kind, f"{value.name} of run {run}")

    def read(self, run: str, name: str) -> bytes | None:
        """Return a value of a run as it is stored, or None; raise StoreError if its file is not it."""
        if (stored := self.content.runs.get(run)) is None:
            return None
        data = stored.values.get(name)
        if data is None and name in stored.files:
            seal, _ = stored.files[name]
            path = self.home / run / file_name(name, seal)
            try:
                sealed = path.read_bytes()
            except OSError as error:
                raise StoreError(f"{path}: cannot be read: {error}; {GONE}") from error
            data = self._unsealed(sealed, _bound(run, name)) if sealed[-TAG:] == seal else None
            if data is None:
                raise StoreError(f"{path}: damaged, or not the file that was written; {GONE}")
        return data

    def _sealed(self, data: bytes, bound: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(NONCE)
        return nonce + AESGCM(self._key).encrypt(nonce, data, bound)

    def _unsealed(self, data: bytes, bound: bytes) -> bytes | None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            return AESGCM(self._key).decrypt(data[:NONCE], data[NONCE:], bound)
        except (InvalidTag, ValueError):
            return None


def file_name(name: str, seal: bytes) -> str:
    return f"{name}.{seal[:4].hex()}"


class MemberFiles(StateFile):
    """The state of one member in one run, in files; `protocol.memory.MemberState` says what methods do."""

    def __init__(self, key_file: Path, identity: Ed25519PrivateKey, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise StoreError(f"a run is named by 32 hexadecimal digits, got {run!r:.60}")
        super().__init__(key_file, identity)
        self.folder = self.home / run
        self.run = run
        self._lines: list[str] = []

    @contextmanager
    def held(self, *, wait: bool = True) -> Iterator[None]:
        with super().held(wait=wait):
            self._lines = []
            yield

    def check(self) -> None:
        if why := self.known.stopped:
            raise StoreError(f"{self.path}: {why}; {STOPPED}")
        stored = self._stored
        if stored is None:
            return
        for name, (seal, size) in stored.files.items():
            path = self.folder / file_name(name, seal)
            if not path.exists():
                raise StoreError(f"{path}: missing; {GONE}")
            if path.stat().st_size != size:
                raise StoreError(f"{path}: damaged: expected {size} bytes, got {path.stat().st_size}; {GONE}")
        heads, more = stated_heads(self.folder / "heads", stored.heads)
        if more:  # written for an answer that never left
            log.warning("%s: a kill left %d bytes too many, which are deleted", self.folder / "heads", more)
            write(self.folder / "heads", heads, mode=0o600)

    def open(self) -> None:
        """Prepare to store a run, and delete the secrets of other runs that are over or long idle."""
        runs = self.content.runs
        self.touched |= {folder.name for folder in self.runs_on_disk()}
        going = sum(not self._tidied(run) for run in [*runs] if run != self.run)
        if going:
            log.warning(
                "joins a run while %d other run(s) are not over; keeps what it stored for them", going
            )
        stored = [run for run in runs if run != self.run and (self.home / run).exists()]
        if len(stored) >= MOST_RUNS:
            raise StoreError(
                f"{self.home}: holds {len(stored)} runs, and a member keeps at most {MOST_RUNS}. Invitations "
                "are deleted after a day. Verify the runs that are over (fedmerit verify --heads), then "
                "delete their folders"
            )
        if not self.path.exists():
            self.commit()  # first: a folder of a run without it means that it was lost
        self.folder.mkdir(mode=0o700, exist_ok=True)
        runs.setdefault(self.run, RunState())

    def _tidied(self, run: str) -> bool:
        """Drop secrets of a run that is over or idle, or an idle invitation; return False if it goes on."""
        runs = self.content.runs
        stored = runs[run]
        idle, over = time.time() - stored.time >= IDLE, bool(stored.names & _OVER)
        if stored.names <= {memory.TERMS.name} and not stored.heads[0]:  # an invitation only
            if idle:
                del runs[run]
            return True
        if (not idle and not over) or self._waits(run, stored):
            return False
        large = (memory.CLIENT, memory.UPDATE, memory.SUM, memory.M0, memory.JUDGED)
        of_rounds = tuple(f".{value.name}" for value in large)
        secret = {name for name in stored.names if (over and "." in name) or name.endswith(of_rounds)}
        secret |= stored.names & {memory.POOL.name, memory.COLUMN.name, memory.COLUMNS.name}
        if over and not (self.home / run).exists():  # its owner deleted it: remember that it is over
            stored.heads = RunState().heads
            secret |= {*stored.files}
        for name in secret:
            stored.forget(name)
        return True

    def _waits(self, run: str, stored: RunState) -> bool:
        """Return whether a run may still be settled, so that what was summed must be stored."""
        names = stored.names
        updates = any(name.endswith(f".{memory.UPDATE.name}") for name in names)
        if not updates or memory.SUMMED.name not in names or memory.LEFT.name in names:
            return False
        if (closes := self.value(run, memory.CLOSES)) is None:
            agreed = self.value(run, memory.TERMS)
            assert agreed is not None  # it joined before it trained
            window = agreed.config.settlement.window_days * DAY
            return time.time() < stored.time + window + BEFORE_OPENING
        return time.time() < closes

    # ----------------------------------------------------------------------------------------- stored values

    @property
    def counter(self) -> int:
        return self.content.counter + 1

    @property
    def known(self) -> memory.Known:
        return self.content.known

    @property
    def _stored(self) -> RunState | None:
        return self.content.runs.get(self.run)

    def put(self, value: Value[T], new: T | None) -> None:
        """Set a value: within the file `state` if it is small, otherwise in a file of its own."""
        stored, name = self.content.runs[self.run], value.name
        stored.forget(name)
        if new is None:
            return
        data = memory.packed(new)
        if len(data) <= SMALL and value != memory.TERMS:  # terms stay for good, and are never written again
            stored.values[name] = data
            return
        self.room(len(data))
        sealed = self._sealed(data, _bound(self.run, name))
        seal = sealed[-TAG:]
        write(self.folder / file_name(name, seal), sealed, mode=0o600)
        stored.files[name] = seal, len(sealed)

    def get(self, value: Value[T]) -> T | None:
        return self.value(self.run, value)

    def last(self, value: Value[T], before: int) -> T | None:
        earlier = [number for number in self._rounds(value) if number < before]
        return self.get(value.of(max(earlier))) if earlier else None

    def room(self, size: int) -> None:
        """Raise StoreError unless so many more bytes may be stored of the run, and fit on the disk."""
        most = self.content.disk or DISK
        used = sum(length for _, length in self.content.runs[self.run].files.values())
        if used + size > most:
            raise StoreError(
                f"{self.folder}: {used + size} bytes of one run would be stored, and this member stores at "
                f"most {most}; its owner can change that: fedmerit member allow KEY disk={used + size}"
            )
        free = shutil.disk_usage(self.home).free
        if free < size + SPARE:
            raise StoreError(f"{self.home}: {size} bytes must be stored, but the disk has {free} left")

    def add_kept(self, *lines: str) -> None:
        self._lines.extend(lines)

    def drop_rounds(self, *, before: int, keep: Sequence[str] = ()) -> None:
        stored = self._stored
        assert stored is not None
        last = memory.REPORT.of(max(self._rounds(memory.REPORT), default=0)).name
        for name in stored.names - {last}:
            number, dot, value = name.partition(".")
            if dot and int(number) < before and value not in keep:
                stored.forget(name)

    def save(self) -> None:
        stored = self._stored
        if stored is None:
            return
        if self._lines:
            before, _ = stated_heads(self.folder / "heads", stored.heads)
            heads = before + "".join(f"{line}\n" for line in self._lines).encode("ascii")
            write(self.folder / "heads", heads, mode=0o600)
            stored.heads = len(heads), hashlib.sha256(heads).digest()
        stored.time = time.time()
        self.touched.add(self.run)
        self.commit()
        self._lines = []

    def _rounds(self, value: Value[Any]) -> list[int]:
        names = [name.partition(".") for name in (self._stored or RunState()).names]
        return [int(number) for number, _, kind in names if kind == value.name]


def stated_heads(path: Path, stated: tuple[int, bytes]) -> tuple[bytes, int]:
    """Return the lines of a file of heads that the state knows of, and how many more bytes it has."""
    length, digest = stated
    data = path.read_bytes() if path.exists() else b""
    if len(data) < length or hashlib.sha256(data[:length]).digest() != digest:
        damage = "missing" if not path.exists() else "cut or changed"
        raise StoreError(f"{path}: {damage}: expected {length} bytes as they were written; {GONE}")
    return data[:length], len(data) - length


# --------------------------------------------------------------------------------- for the member's owner


def about_state(key_file: Path) -> Iterator[Note]:
    """Check a member's key and files, and yield what they hold line by line; "problem" is the code of faults.

    Raises:
        StoreError: the member answers a message at this moment.
    """
    file = StateFile(key_file, load_key(key_file))
    if not file.home.exists():
        yield Note("state-none", path=str(file.home))
        return
    with file.held(wait=False):
        try:
            content = file.content
        except StoreError as error:
            yield Note("problem", what=str(error))
            return
        yield Note("state", path=str(file.path), counter=content.counter, disk=content.disk or DISK)
        if why := content.known.stopped:
            yield Note("problem", what=f"{file.path}: {why}; {STOPPED}")
        for roster, lineage in content.known.lineages.items():
            yield Note("state-roster", hash=roster, runs=len(lineage.recent(time.time())), most=lineage.most)
            yield Note("state-pins", hash=roster, what=lineage.told() or "nothing yet")
        for run, stored in content.runs.items():
            size = sum(size for _, size in stored.files.values())
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(stored.time))
            code = "state-run-over" if stored.names & _OVER else "state-run"
            yield Note(code, hash=run, what=when, bytes=size)
            try:
                yield from _about_run(file, run, stored)
            except StoreError as error:
                yield Note("problem", what=str(error))
        yield from examine_disk(file.home, SPARE)
    yield Note("restore-member")


def _about_run(file: StateFile, run: str, stored: RunState) -> Iterator[Note]:
    """Yield what the owner should know of the files of a run; raise StoreError if one is lost or damaged."""
    if stored.names & _OVER and not (file.home / run).exists():
        return  # its owner deleted the folder of a run that is over
    for name in stored.files:
        file.read(run, name)
    manifests, agreed = file.value(run, memory.MANIFESTS) or {}, file.value(run, memory.TERMS)
    if agreed is not None and len(manifests) == 2 and two_manifests(manifests, agreed.server):
        yield Note("state-two-manifests", hash=run, what=", ".join(manifests))
    heads = file.home / run / "heads"
    if more := stated_heads(heads, stored.heads)[1]:
        yield Note("state-tail", path=str(heads), bytes=more)


def allow(key_file: Path, changes: Mapping[str, str], roster: Roster | None = None) -> None:
    """Change what a member agrees to from run to run, as its owner says; see `fedmerit member allow`.

    Settings are ``disk`` (bytes) and those of `Lineage.allow`, with values as text. The roster is not needed
    if the member knows of only one.
    """
    file = StateFile(key_file, load_key(key_file))
    if not file.home.exists():  # a refusal makes no folder: that there is none may say that it was lost
        _change(Content(), changes, roster)
    with file.held():
        _change(file.content, changes, roster)
        file.commit()


def _change(content: Content, changes: Mapping[str, str], roster: Roster | None) -> None:
    rosters = [roster.lineage] if roster is not None else [*content.known.lineages]
    for name, text in changes.items():
        if name == "disk":
            if not text.isdecimal() or int(text) < 2**20:
                raise ConfigError(f"disk={text}: expected bytes, at least {2**20}", setting="disk")
            content.disk = int(text)
            continue
        if len(rosters) != 1:
            raise ConfigError(
                f"{name}: expected --roster FILE: this member knows of {len(rosters)} rosters", setting=name
            )
        content.known.lineages.setdefault(rosters[0], Lineage()).allow(name, text)


# ---------------------------------------------------------------------------------------------------- bytes


def _bound(run: str, name: str) -> bytes:
    return pack(["fedmerit member state 1", run, name])


def _derived(identity: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = identity.private_bytes_raw()
    return HKDF(SHA256(), 32, salt=None, info=b"fedmerit member state 1").derive(secret)
