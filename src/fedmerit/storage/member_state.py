"""A member's state. Every message may be handled by a new process, so the state is next to the key.

::

    KEY.state/state               one sealed file: a counter, what must never be done again, pins and peers'
                                  counters for each federation, and all small values of each run
    KEY.state/RUN/terms.5f0c1d2e  a larger value (here the terms of a run), sealed. `state` holds its seal,
                                  and the name its first digits, so no other file passes for it
    KEY.state/RUN/heads           what the member was shown, did and said, one entry per line: see
                                  head_log.py; `state` holds its length and digest

Values of a run are ``terms`` (what the member agreed to), ``left`` (why it has left the run), ``seen`` (the
last head, once signed) and ``floor`` (rounds before this one are over). Values of round 3 are
``0003.client`` (the state machine, with its secrets), ``0003.began`` (hash of the model it began to train),
``0003.update`` (M0, the update, its weight), ``0003.asked`` (hash of the only request for a report that it
answers) and ``0003.report`` (the answer, and the sums behind cumulative standard errors). A run that is
settled also has ``summed`` (rounds it released shares for), ``settlement`` (the manifest), ``closes`` (when
its window closes), ``pool`` (the opened test set), ``agreed``, ``statement``, ``settled`` (what it signed),
and for each round ``0003.signed`` (the outcome it signed for) and ``0003.stated`` (its part in the gain).

A message is answered in this order: larger values are written, then ``heads``, then ``state``, each in one
step; then files are deleted that ``state`` no longer names; then the answer leaves. So a kill at any moment
leaves the state before the message or the state after it. Sealed means AES-256-GCM under a key derived from
the identity key. A file that is lost, cut, swapped or put back from an older copy raises an error. Only an
older copy of the whole folder passes here; the counter, which grows with every write and which other members
remember, shows it to them.
"""

from __future__ import annotations

import fcntl
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

import numpy as np

from fedmerit.errors import ConfigError, StoreError
from fedmerit.identity import Roster, load_key
from fedmerit.ledger.records import first_body
from fedmerit.notes import Note
from fedmerit.protocol.memory import POOL
from fedmerit.protocol.messages import pack, unpack
from fedmerit.protocol.settler import MANIFESTS, two_manifests
from fedmerit.protocol.terms import Agreed, Lineage, lineage_of
from fedmerit.scoring.files import LEDGER
from fedmerit.secagg.state import Released
from fedmerit.storage.run_folder import examine_disk, snapshot, sweep, write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger("fedmerit")
_RUN = re.compile(r"[0-9a-f]{32}")
_VALUE = re.compile(
    r"(?:terms|left|seen|pool|settlement|agreed|statement|settled|shown|summed|[0-9]+\.[a-z]+)"
    r"(?:\.[0-9a-f]{8})?"
)
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
VERSION = b"2"
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


class StateFile:
    """The file `state` of one member, and the sealed files that it names.

    ``content`` is what it holds: ``counter``; ``released``; ``roster``, the hash of the roster it last took
    part under; ``stopped``, if it is, why it answers nothing more; ``disk``, the owner's budget, or None;
    ``rosters``, a `Lineage` as plain values for each federation; and ``runs``, for each run ``time`` of the
    last change, ``heads`` (length and digest), ``values`` (packed) and ``files`` (seal and size).
    """

    def __init__(self, key_file: Path, identity: Ed25519PrivateKey) -> None:
        self.home = key_file.with_name(key_file.name + ".state")
        self.path = self.home / "state"
        self._lock = self.home / ".lock"  # not empty once `state` was written
        self._key = _derived(identity)
        self._content: dict[str, Any] | None = None
        self._held = False
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
            lock = self._lock.open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            lock.close()
            raise StoreError(
                f"{self.home}: the member answers a message at this moment; try again later"
            ) from error
        except OSError as error:
            raise StoreError(f"{self.home}: cannot keep a member's state: {error}") from error
        with lock:
            self._content, self._held = None, True
            try:
                yield
            finally:
                self._content, self._held = None, False

    @property
    def content(self) -> dict[str, Any]:
        """What the file holds; read once."""
        if self._content is None:
            self._content = self._read()
        return self._content

    def _read(self) -> dict[str, Any]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            if self._begun() or self.runs_on_disk():
                raise StoreError(f"{self.path}: missing; {LOST}") from None
            return {"counter": 0, "released": b"", "disk": None, "rosters": {}, "runs": {}}
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error}; {LOST}") from error
        if data[:3] == MAGIC and data[3:4] != VERSION:
            raise StoreError(f"{self.path}: written by another version of fedmerit")
        head = len(MAGIC + VERSION)
        plain = self._unsealed(data[head:], _bound("", "state")) if data[:head] == MAGIC + VERSION else None
        if plain is None:
            raise StoreError(f"{self.path}: damaged, or encrypted with another key; {LOST}")
        found: dict[str, Any] = unpack(plain, f"the state in {self.path}")
        return found

    def save(self) -> None:
        """Count up and write the file in one step, then delete what it no longer names."""
        content = self.content
        content["counter"] += 1
        sealed = self._sealed(pack(content), _bound("", "state"))
        write(self.path, MAGIC + VERSION + sealed, mode=0o600)
        if not self._begun():
            self._lock.write_bytes(b"state\n")
        sweep(self.home)
        for folder in self.runs_on_disk():
            if folder.name in self.touched:
                self._sweep_run(folder)
        self.touched.clear()

    def _begun(self) -> bool:
        """Return whether there was a file `state`, even if no folder of a run shows it."""
        return self._lock.exists() and self._lock.stat().st_size > 0

    def _sweep_run(self, folder: Path) -> None:
        run = self.content["runs"].get(folder.name)
        named = set() if run is None else {file_name(name, seal) for name, (seal, _) in run["files"].items()}
        sweep(folder)
        for path in folder.iterdir():
            if path.name not in named and _VALUE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        if run is None and not any(folder.iterdir()):
            folder.rmdir()

    def runs_on_disk(self) -> list[Path]:
        """Return the folders of runs."""
        if not self.home.is_dir():
            return []
        return [path for path in self.home.iterdir() if _RUN.fullmatch(path.name) and path.is_dir()]

    # ------------------------------------------------------------------------------------------ sealed files

    def put(self, run: str, name: str, value: Any) -> None:
        """Set a value of a run: within the file if it is small, otherwise in a file of its own."""
        kept, data = self.content["runs"][run], pack(_plain(value))
        kept["values"].pop(name, None)
        kept["files"].pop(name, None)
        if len(data) <= SMALL and name != "terms":  # terms stay for good, and are never written again
            kept["values"][name] = data
            return
        self.room(run, len(data))
        sealed = self._sealed(data, _bound(run, name))
        seal = sealed[-TAG:]
        write(self.home / run / file_name(name, seal), sealed, mode=0o600)
        kept["files"][name] = [seal, len(sealed)]

    def get(self, run: str, name: str) -> Any:
        """Return a value of a run, or None."""
        kept = self.content["runs"].get(run)
        if kept is None:
            return None
        data = kept["values"].get(name)
        if data is None and name in kept["files"]:
            seal, _ = kept["files"][name]
            path = self.home / run / file_name(name, seal)
            try:
                sealed = path.read_bytes()
            except OSError as error:
                raise StoreError(f"{path}: cannot be read: {error}; {GONE}") from error
            data = self._unsealed(sealed, _bound(run, name)) if sealed[-TAG:] == seal else None
            if data is None:
                raise StoreError(f"{path}: damaged, or not the file that was written; {GONE}")
        return None if data is None else unpack(data, f"{name} of run {run}")

    def room(self, run: str, size: int) -> None:
        """Raise StoreError unless so many more bytes may be stored of a run, and fit on the disk."""
        most = self.content["disk"] or DISK
        used = sum(there for _, there in self.content["runs"][run]["files"].values())
        if used + size > most:
            raise StoreError(
                f"{self.home / run}: {used + size} bytes of one run would be stored, and this member stores "
                f"at most {most}; its owner can change that: fedmerit member allow KEY disk={used + size}"
            )
        free = shutil.disk_usage(self.home).free
        if free < size + SPARE:
            raise StoreError(f"{self.home}: {size} bytes are to be stored, and the disk has {free} left")

    def _sealed(self, data: bytes, bound: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(NONCE)
        return nonce + AESGCM(self._key).encrypt(nonce, data, bound)

    def _unsealed(self, data: bytes, bound: bytes) -> bytes | None:
        """Return what was sealed, or None if this is not it."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            return AESGCM(self._key).decrypt(data[:NONCE], data[NONCE:], bound)
        except (InvalidTag, ValueError):
            return None


def new_run(heads: bytes = b"") -> dict[str, Any]:
    """Return what is kept of a run of which nothing is stored but its file of heads."""
    digest = hashlib.sha256(heads).digest()
    return {"time": time.time(), "heads": [len(heads), digest], "values": {}, "files": {}}


def file_name(name: str, seal: bytes) -> str:
    """Return the name of the file of a larger value."""
    return f"{name}.{seal[:4].hex()}"


class MemberFiles:
    """The state of one member in one run: a `protocol.memory.MemberState`."""

    def __init__(self, key_file: Path, identity: Ed25519PrivateKey, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise StoreError(f"a run is named by 32 hexadecimal digits, got {run!r:.60}")
        self.file = StateFile(key_file, identity)
        self.home = self.file.home
        self.folder = self.home / run
        self.run = run
        self._released: Released | None = None
        self._lines: list[str] = []
        self._changed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let one message at a time through."""
        with self.file.held():
            self._released, self._lines, self._changed = None, [], False
            yield

    def stop(self, why: str) -> None:
        """Answer nothing more in any run; `save` makes it count."""
        self.file.content["stopped"] = why
        self._changed = True

    def check(self) -> None:
        """Raise StoreError if anything is lost that this member needs to answer in this run."""
        if why := self.file.content.get("stopped"):
            raise StoreError(f"{self.file.path}: {why}; {STOPPED}")
        kept = self._kept
        if kept is None:
            return
        for name, (seal, size) in kept["files"].items():
            path = self.folder / file_name(name, seal)
            if not path.exists():
                raise StoreError(f"{path}: missing; {GONE}")
            if path.stat().st_size != size:
                raise StoreError(f"{path}: damaged: expected {size} bytes, got {path.stat().st_size}; {GONE}")
        heads, more = stated_heads(self.folder / "heads", kept["heads"])
        if more:  # written for an answer that never left
            log.warning("%s: a kill left %d bytes too many, which are deleted", self.folder / "heads", more)
            write(self.folder / "heads", heads, mode=0o600)

    def open(self) -> None:
        """Prepare to store a run, and delete the secrets of other runs that are over or long idle."""
        runs = self.file.content["runs"]
        self.file.touched |= {folder.name for folder in self.file.runs_on_disk()}
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
        if not self.file.path.exists():
            self.file.save()  # first: a folder of a run without it means that it was lost
        self.folder.mkdir(mode=0o700, exist_ok=True)
        runs.setdefault(self.run, new_run())
        self._changed = True

    def _tidied(self, run: str) -> bool:
        """Drop secrets of a run that is over or idle, or an idle invitation; return False if it goes on."""
        runs = self.file.content["runs"]
        kept = runs[run]
        names = {*kept["values"], *kept["files"]}
        idle, over = time.time() - kept["time"] >= IDLE, bool(names & {"seen", "left"})
        if names <= {"terms"} and not kept["heads"][0]:  # an invitation only
            if idle:
                del runs[run]
            return True
        if (not idle and not over) or self._waits(run, kept):
            return False
        secret = {name for name in names if (over and "." in name) or name.endswith((".client", ".update"))}
        secret |= names & {POOL}
        if over and not (self.home / run).exists():  # its owner deleted it: remember that it is over
            kept["heads"] = new_run()["heads"]
            secret |= {*kept["files"]}
        for name in secret:
            kept["values"].pop(name, None)
            kept["files"].pop(name, None)
        return True

    def _waits(self, run: str, kept: Mapping[str, Any]) -> bool:
        """Return whether a run may still be settled, so that what was summed must be kept."""
        names = {*kept["values"], *kept["files"]}
        if not any(name.endswith(".update") for name in names) or "summed" not in names or "left" in names:
            return False
        closes = self.file.get(run, "closes")
        if closes is None:
            window = Agreed(*self.file.get(run, "terms")).config.settlement.window_days * DAY
            closes = kept["time"] + window + BEFORE_OPENING
        return bool(time.time() < closes)

    # ----------------------------------------------------------------------------------------- stored values

    @property
    def counter(self) -> int:
        """The counter of the next write, greater than that of any message this member has sent."""
        return int(self.file.content["counter"]) + 1

    @property
    def _kept(self) -> dict[str, Any] | None:
        kept: dict[str, Any] | None = self.file.content["runs"].get(self.run)
        return kept

    def put(self, name: str, value: Any) -> None:
        """Set a value; `save` makes it count."""
        self.file.put(self.run, name, value)
        self._changed = True

    def get(self, name: str) -> Any:
        """Return the value stored under a name, or None."""
        return self.file.get(self.run, name)

    def last(self, what: str, before: int) -> Any:
        """Return the value stored under `ROUND.what` in the latest round before this one, or None."""
        earlier = [number for number in self._rounds(what) if number < before]
        return self.get(f"{max(earlier):04d}.{what}") if earlier else None

    def released(self) -> Released:
        """Return what this member must never do again, in any run."""
        if self._released is None:
            self._released = Released.load(self.file.content["released"])
        return self._released

    def put_released(self, released: Released) -> None:
        """Set what must never be done again; `save` makes it count."""
        self._released, self._changed = released, True
        self.file.content["released"] = released.dump()

    def lineage(self, name: str) -> Lineage:
        """Return what this member remembers of a federation from run to run."""
        return Lineage.load(self.file.content["rosters"].get(name))

    def put_lineage(self, name: str, lineage: Lineage) -> None:
        """Set what this member remembers of a federation; `save` makes it count."""
        self.file.content["rosters"][name] = lineage.dump()
        self._changed = True

    def roster(self) -> bytes | None:
        """Return the hash of the roster that this member last took part under, or None."""
        kept: bytes | None = self.file.content.get("roster")
        return kept

    def put_roster(self, hash_: bytes) -> None:
        """Set the hash of the roster that this member takes part under; `save` makes it count."""
        self.file.content["roster"] = hash_
        self._changed = True

    def room(self, size: int) -> None:
        """Raise StoreError unless so many more bytes may be stored of this run."""
        self.file.room(self.run, size)

    def add_kept(self, *lines: str) -> None:
        """Add lines about what the member was shown, did and said, to detect a ledger that differs."""
        self._lines.extend(lines)
        self._changed = True

    def drop_rounds(self, *, before: int, keep: Sequence[str] = ()) -> None:
        """Delete what is stored of rounds before this one; but not the latest report, nor what to keep."""
        kept = self._kept
        assert kept is not None
        last = f"{max(self._rounds('report'), default=0):04d}.report"
        for stored in (kept["values"], kept["files"]):
            for name in [name for name in stored if "." in name and name != last]:
                place, _, what = name.partition(".")
                if int(place) < before and what not in keep:
                    del stored[name]
        self._changed = True

    def save(self) -> None:
        """Write what was set since the last time; only then may the answer leave."""
        kept = self._kept
        if not self._changed or kept is None:
            return
        if self._lines:
            before, _ = stated_heads(self.folder / "heads", kept["heads"])
            heads = before + "".join(f"{line}\n" for line in self._lines).encode("ascii")
            write(self.folder / "heads", heads, mode=0o600)
            kept["heads"] = new_run(heads)["heads"]
        kept["time"] = time.time()
        self.file.touched.add(self.run)
        self.file.save()
        self._lines, self._changed = [], False

    def _rounds(self, what: str) -> list[int]:
        kept = self._kept or new_run()
        names = [name.partition(".") for name in (*kept["values"], *kept["files"])]
        return [int(number) for number, _, kind in names if kind == what]


def stated_heads(path: Path, stated: list[Any]) -> tuple[bytes, int]:
    """Return the lines of a file of heads that the state knows of, and how many more bytes it has."""
    length, digest = stated
    data = path.read_bytes() if path.exists() else b""
    if len(data) < length or hashlib.sha256(data[:length]).digest() != digest:
        what = "missing" if not path.exists() else "cut or changed"
        raise StoreError(f"{path}: {what}: expected {length} bytes as they were written; {GONE}")
    return data[:length], len(data) - length


# --------------------------------------------------------------------------------- for the member's owner


def about_state(key_file: Path) -> Iterator[Note]:
    """Yield what a member's state holds, line by line; see `fedmerit member show`."""
    file = StateFile(key_file, load_key(key_file))
    if not file.home.exists():
        yield Note("state-none", path=str(file.home))
        return
    content = file.content
    yield Note("state", path=str(file.path), counter=content["counter"], disk=content["disk"] or DISK)
    for roster, kept in content["rosters"].items():
        lineage = Lineage.load(kept)
        yield Note("state-roster", hash=roster, runs=len(lineage.recent(time.time())), most=lineage.most)
        yield Note("state-pins", hash=roster, what=lineage.told() or "nothing yet")
    for run, kept in content["runs"].items():
        over = {*kept["values"], *kept["files"]} & {"seen", "left"}
        size = sum(size for _, size in kept["files"].values())
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(kept["time"]))
        yield Note("state-run-over" if over else "state-run", hash=run, what=when, bytes=size)
        shown = file.get(run, MANIFESTS) or {}
        if len(shown) == 2 and two_manifests(shown, file.get(run, "terms")[2]):
            yield Note("state-two-manifests", hash=run, what=", ".join(shown))


def allow(key_file: Path, changes: Mapping[str, str], roster: Roster | None = None) -> None:
    """Change what a member agrees to from run to run, as its owner says; see `fedmerit member allow`.

    Args:
        key_file: the member's key.
        changes: setting -> value as text: ``disk`` (bytes), or a setting of `Lineage.allow`.
        roster: of the federation; not needed if the member knows of only one.
    """
    file = StateFile(key_file, load_key(key_file))
    if not file.home.exists():  # a refusal makes no folder: that there is none may say that it was lost
        _change({"disk": None, "rosters": {}}, changes, roster)
    with file.held():
        _change(file.content, changes, roster)
        file.save()


def _change(content: dict[str, Any], changes: Mapping[str, str], roster: Roster | None) -> None:
    known = [lineage_of(roster)] if roster is not None else [*content["rosters"]]
    for name, text in changes.items():
        if name == "disk":
            if not text.isdecimal() or int(text) < 2**20:
                raise ConfigError(f"disk={text}: expected bytes, at least {2**20}", setting="disk")
            content["disk"] = int(text)
            continue
        if len(known) != 1:
            raise ConfigError(
                f"{name}: expected --roster FILE: this member knows of {len(known)} rosters", setting=name
            )
        lineage = Lineage.load(content["rosters"].get(known[0]))
        lineage.allow(name, text)
        content["rosters"][known[0]] = lineage.dump()


def examine(key_file: Path) -> Iterator[Note]:
    """Check a member's key and files, and yield what was found line by line; "problem" is the code of faults.

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
        yield Note("state", path=str(file.path), counter=content["counter"], disk=content["disk"] or DISK)
        if why := content.get("stopped"):
            yield Note("problem", what=f"{file.path}: {why}; {STOPPED}")
        for run, kept in content["runs"].items():
            problems = list(_faults(file, run, kept))
            yield from problems
            if not problems:
                yield Note("state-in-order", hash=run, files=len(kept["files"]), lines=kept["heads"][0])
        for path in (file.path, *(item for folder in file.runs_on_disk() for item in folder.iterdir())):
            if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
                yield Note("problem", what=f"{path}: expected mode 600, got {mode:o}; run: chmod 600 {path}")
        yield from examine_disk(file.home, SPARE)
    yield Note("restore-member")


def heads_of(key_file: Path, folder: Path) -> Path:
    """Return a member's own file about the run in a run folder."""
    run = first_body(snapshot(folder / LEDGER), "run")["run"]
    return key_file.with_name(key_file.name + ".state") / str(run) / "heads"


def _faults(file: StateFile, run: str, kept: Mapping[str, Any]) -> Iterator[Note]:
    if {*kept["values"], *kept["files"]} & {"seen", "left"} and not (file.home / run).exists():
        return  # its owner deleted the folder of a run that is over
    for name in kept["files"]:
        try:
            file.get(run, name)
        except StoreError as error:
            yield Note("problem", what=str(error))
    try:
        _, more = stated_heads(file.home / run / "heads", kept["heads"])
    except StoreError as error:
        yield Note("problem", what=str(error))
    else:
        if more:
            yield Note("state-tail", path=str(file.home / run / "heads"), bytes=more)


# ---------------------------------------------------------------------------------------------------- bytes


def _plain(value: Any) -> Any:
    """Return a value as it is stored: arrays as little-endian bytes, a client as its dump."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    if hasattr(value, "dump"):
        return value.dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _bound(run: str, name: str) -> bytes:
    return pack(["fedmerit member state 2", run, name])


def _derived(identity: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = identity.private_bytes_raw()
    return HKDF(SHA256(), 32, salt=None, info=b"fedmerit member state 1").derive(secret)
