"""Statements of members who were away at the settlement, handed in by hand within the window.

The server leaves signed messages in ``RUN/archive/messages``. A member's owner answers them on the member's
own machine (`state`), with its key, its stored updates and its own gradient. What comes out is one signed
statement, which may be handed on by anybody. Whoever has the server's key adds it to the ledger (`add`), and
closes the settlement when the window is over (`close`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fedmerit.config import of_folder
from fedmerit.errors import FileFormatError, KeyFileError, SettlementError, StoreError
from fedmerit.identity import SERVER, canonical, load_key, public_key
from fedmerit.ledger.forms import recorded_roster
from fedmerit.ledger.recorder import LedgerRecorder
from fedmerit.ledger.records import first_body, rounds_of
from fedmerit.protocol.clearing import HEAD, MESSAGES, Clearing
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.member import Participant
from fedmerit.protocol.messages import Exchange, Parcel, pack, unpack
from fedmerit.protocol.settlement import Settled
from fedmerit.storage.archive import ARCHIVE, FolderArchive
from fedmerit.storage.member_state import MemberFiles
from fedmerit.storage.run_folder import Folder, write
from fedmerit.verify import renew, verify_folder

FORMAT = "fedmerit statement 1"
ORDER = ("open", "agree", "agreed", "state")

# ------------------------------------------------------------------------------------- on a member's machine


def state(key: Path, roster: Path, messages: Path, gradient: Callable[..., Any], target: Path) -> str:
    """Answer the messages of a settlement, and write this member's signed statement; return its name.

    Args:
        key: the member's private key, with its state beside it.
        roster: the member's roster.
        messages: the folder ``archive/messages`` of the run, or a copy.
        gradient: as in `secure`.
        target: where the statement is written.

    Raises:
        RefusedError: the member does not state; the log says why.
    """
    from fedmerit.flower.client import Place, named, path_gradient

    name, known = named(Place(key, roster))
    identity = load_key(key)
    member = Participant(
        *(name, identity, known, partial(MemberFiles, key, identity), _no_evaluator),
        gradients=partial(path_gradient, gradient),
    )
    answer = b""
    for parcel in _parcels(messages):
        answer = member.answer(parcel, "")
    text, signature = unpack(answer, "a statement")
    found = {"format": FORMAT, "member": name, "statement": json.loads(text), "signature": signature.hex()}
    write(target, (json.dumps(found, indent=1) + "\n").encode())
    return name


def _no_evaluator(shape: Any, utilities: Any) -> Any:
    raise AssertionError("a settlement evaluates nothing but the gradient")


def _parcels(folder: Path) -> Iterator[Parcel]:
    """Yield the messages of a settlement in the order in which they are answered."""
    archive, found = FolderArchive(folder), 0
    for kind in ORDER:
        for path in sorted(folder.glob(f"{kind}-*.arrays")):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal():
                arrays = archive.load(kind, int(number))
                if HEAD not in arrays:
                    raise StoreError(f"{path}: expected a message of a settlement, got one without a head")
                found += 1
                yield Parcel(arrays.pop(HEAD).tobytes(), arrays)
    if not found:
        raise StoreError(f"{folder}: expected the messages of a settlement, RUN/{ARCHIVE}/{MESSAGES}")


# --------------------------------------------------------------------------------------- on the server's side


def add(path: Path, file: Path, key: Path | None = None) -> Settled:
    """Add a member's signed statement to the ledger of a run; return what the settlement comes to with it.

    Args:
        path: the run folder.
        file: the statement, from whichever hand: its signature decides.
        key: the server's private key; unless given, the one in the run folder.

    Raises:
        MessageError: the member did not sign it, or has stated something else before.
        SettlementError: the run was not settled, or its settlement is closed.
    """
    member, answer = _statement_in(file)
    with _opened(path, key) as clearing:
        if member not in clearing.coordinator.config.clients:
            raise FileFormatError(f"{file}: {member!r:.60} is not a member of the run in {path}")
        settled = clearing.late(member, answer)
    renew(path)
    return settled


def close(path: Path, key: Path | None = None, *, now: float | None = None) -> Settled:
    """Close the settlement of a run once its window is over; return what it came to.

    Raises:
        SettlementError: the window is not over.
    """
    with _opened(path, key) as clearing:
        settled = clearing.close(time.time() if now is None else now)
    renew(path)
    return settled


class _Nobody:
    """A transport that reaches nobody: the members' machines are elsewhere, and the run is over."""

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterable[tuple[str, bytes]]:
        return ()

    def expected(self, number: int) -> Sequence[str]:
        return ()


@contextmanager
def _opened(path: Path, key: Path | None) -> Iterator[Clearing]:
    """Open the settlement of a run that verifies, to sign with the server's key."""
    for _ in verify_folder(path):  # only what verifies is added to
        pass
    config = of_folder(path)
    with Folder(path, config, resume=True) as folder:
        run, commitment = (first_body(folder.ledger, kind) for kind in ("run", "pool"))
        file = key or path / "keys" / f"{SERVER}.pem"
        if run["keys"] is None:
            raise SettlementError(f"{path}: a rehearsal without keys waits for nobody", code="rehearsal")
        if not file.exists():
            raise KeyFileError(f"{file}: no such file; expected the server's private key (--key)")
        identity = load_key(file)
        if public_key(identity).hex() != run["keys"][SERVER]:
            raise KeyFileError(f"{file}: not the server's key according to the ledger")
        recorder = LedgerRecorder(
            *(folder, config, recorded_roster(run, config), identity, run["run"], run["engine"]),
            *(run["terms"], commitment),
            rounds=rounds_of(folder.ledger),
        )
        nothing: Any = None  # neither the pool nor the gradient is needed any more
        coordinator = Coordinator(recorder, nothing, _Nobody(), None)
        yield Clearing(coordinator, nothing, FolderArchive(path / ARCHIVE), reaches=False)


def _statement_in(file: Path) -> tuple[str, bytes]:
    try:
        found = json.loads(file.read_text("utf-8"))
        if found["format"] != FORMAT or not isinstance(found["statement"], dict):
            raise ValueError(f"expected format {FORMAT!r}")
        answer = pack([canonical(found["statement"]), bytes.fromhex(found["signature"])])
        return str(found["member"]), answer
    except OSError as error:
        raise FileFormatError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{file}: not a statement: {error!s:.120}") from error
