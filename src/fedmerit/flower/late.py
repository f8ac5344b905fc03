"""Answers of members who were away at the settlement, handed in by hand: statements, masks, signatures.

The server leaves signed messages in ``RUN/archive/messages``. A member's owner answers them on the member's
own machine (`state`), with its key, its stored updates and its own gradient. What comes out is a file that
anybody may hand on. Whoever has the server's key adds it to the ledger (`add`). When the window is over, t
members sign the end in the same way, and it is closed with their files (`close`).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fedmerit.config import of_folder
from fedmerit.errors import FileFormatError, KeyFileError, RefusedError, SettlementError, StoreError
from fedmerit.identity import SERVER, load_key, public_key
from fedmerit.ledger.forms import recorded_roster
from fedmerit.ledger.recorder import LedgerRecorder
from fedmerit.ledger.records import first_body, rounds_of
from fedmerit.protocol.clearing import HEAD, MESSAGES, Clearing
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.member import Participant
from fedmerit.protocol.messages import Exchange, Parcel
from fedmerit.protocol.settlement import Settled, name_hash
from fedmerit.storage.archive import ARCHIVE, FolderArchive
from fedmerit.storage.member_state import MemberFiles
from fedmerit.storage.run_folder import Folder, write
from fedmerit.verify import renew, verify_folder

FORMAT = "fedmerit answers 1"
ORDER = ("open", "agree", "agreed", "state", "table", "pairs", "settle")
HANDED = ("state", "table", "pairs", "settle")
"""Which answers are handed in; the others only prepare these."""

# ------------------------------------------------------------------------------------- on a member's machine


def state(
    key: Path,
    roster: Path,
    messages: Path,
    gradient: Callable[..., Any] | None,
    target: Path,
    without: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """Answer the messages of a settlement, and write what this member signs; return its name and what it is.

    Args:
        key: the member's private key, with its state beside it.
        roster: the member's roster.
        messages: the folder ``archive/messages`` of the run, or a copy.
        gradient: as in `secure`; not needed by a member that has stated.
        target: where the answers are written.
        without: members without whose statements or masks this member's owner agrees to close the
            settlement, when its window is over: they then share what the others leave.

    Raises:
        RefusedError: the member does not state; the log says why.
    """
    from fedmerit.flower.client import Place, named, path_gradient

    name, known = named(Place(key, roster))
    identity = load_key(key)
    member = Participant(
        *(name, identity, known, partial(MemberFiles, key, identity), _no_evaluator),
        gradients=partial(path_gradient, gradient or _no_gradient),
    )
    member.without = tuple(without)
    answers: list[tuple[str, int, str]] = []
    for kind, number, parcel in _parcels(messages, name):
        try:
            answer = member.answer(parcel, "")
        except RefusedError:
            if kind not in HANDED[1:]:
                raise
            continue  # its log says why; the statement is handed in all the same
        if kind in HANDED:
            answers.append((kind, number, base64.b64encode(answer).decode()))
    found = {"format": FORMAT, "member": name, "answers": answers}
    write(target, (json.dumps(found, indent=1) + "\n").encode())
    return name, [kind for kind, _, _ in answers]


def _no_gradient(*given: Any) -> Any:
    raise SettlementError("this member has not stated yet, which needs the gradient", code="no-gradient")


def _no_evaluator(shape: Any, utilities: Any) -> Any:
    raise AssertionError("a settlement evaluates nothing but the gradient")


def _parcels(folder: Path, name: str) -> Iterator[tuple[str, int, Parcel]]:
    """Yield the messages of a settlement to a member, in the order in which they are answered."""
    archive, found = FolderArchive(folder), 0
    kinds = [(kind, own) for kind in ORDER for own in (kind, f"{kind}-{name_hash(name)}")]
    for kind, own in kinds:
        for path in sorted(folder.glob(f"{own}-*.arrays")):
            before, _, number = path.stem.rpartition("-")
            if number.isdecimal() and before == own:
                arrays = archive.load(own, int(number))
                if HEAD not in arrays:
                    raise StoreError(f"{path}: expected a message of a settlement, got one without a head")
                found += 1
                yield kind, int(number), Parcel(arrays.pop(HEAD).tobytes(), arrays)
    if not found:
        raise StoreError(f"{folder}: expected the messages of a settlement, RUN/{ARCHIVE}/{MESSAGES}")


# --------------------------------------------------------------------------------------- on the server's side


def add(path: Path, file: Path, key: Path | None = None) -> Settled:
    """Add a member's answers to the ledger of a run; return what the settlement comes to with them.

    Args:
        path: the run folder.
        file: the answers, from whichever hand: their signatures decide.
        key: the server's private key; unless given, the one in the run folder.

    Raises:
        MessageError: the member did not sign it, or has stated something else before.
        SettlementError: the run was not settled, or its settlement is closed.
    """
    member, answers = _answers_in(file)
    with _opened(path, key) as clearing:
        if member not in clearing.coordinator.config.clients:
            raise FileFormatError(f"{file}: {member!r:.60} is not a member of the run in {path}")
        settled = clearing.late(member, *answers)
    renew(path)
    return settled


def close(
    path: Path, key: Path | None = None, signed: Sequence[Path] = (), *, now: float | None = None
) -> Settled:
    """Close the settlement of a run once its window is over; return what it came to.

    Args:
        path: the run folder.
        key: as for `add`.
        signed: answers of t members, with their signatures under the end; not needed if nobody is awaited.
        now: the time, in seconds since 1970.

    Raises:
        SettlementError: the window is not over, or fewer than t members signed its beginning or its end. The
            messages for members to sign are in ``archive/messages`` then.
    """
    given = dict(map(_answers_in, signed))
    with _opened(path, key) as clearing:
        ends = {name: end for name, each in given.items() for kind, _, end in each if kind == "settle"}
        settled = clearing.close(time.time() if now is None else now, ends)
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
        identity = None
        if run["keys"] is not None:
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
        yield Clearing(coordinator, nothing, FolderArchive(path / ARCHIVE))


def _answers_in(file: Path) -> tuple[str, list[tuple[str, int, bytes]]]:
    try:
        found = json.loads(file.read_text("utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}")
        answers = []
        for kind, number, answer in found["answers"]:
            if kind not in HANDED or type(number) is not int:
                raise ValueError(f"{kind!r:.40} is not an answer that is handed in")
            answers.append((str(kind), number, base64.b64decode(answer, validate=True)))
        return str(found["member"]), answers
    except OSError as error:
        raise FileFormatError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{file}: not a member's answers: {error!s:.120}") from error
