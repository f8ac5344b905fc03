"""Statements of members who were away at the settlement, handed in by hand within the window.

The server leaves signed messages in ``RUN/archive/messages``. A member's owner answers them on the member's
own machine (`state`), with its key, its stored updates and its own gradient. What comes out is one signed
statement, which may be handed on by anybody. Whoever has the server's key adds it to the ledger (`add`), and
closes the settlement when the window is over (`close`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedmerit.config import Config, of_folder
from fedmerit.errors import FileFormatError, KeyFileError, SettlementError, StoreError
from fedmerit.identity import SERVER, content, load_key, public_key, verifies
from fedmerit.ledger.records import Journal, first_body, rounds_of
from fedmerit.ledger.settled import Book, settlement_of
from fedmerit.protocol.clearing import HEAD, MESSAGES
from fedmerit.protocol.member import Participant
from fedmerit.protocol.messages import Parcel, unpack
from fedmerit.protocol.settlement import Settled, Statement
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
        SettlementError: the settlement is closed, or the member has stated something else before.
    """
    member, body, signature = _statement_in(file)
    with _opened(path, key) as (folder, config, book, sign):
        assert book.manifest is not None
        assert book.settled is not None
        keys = first_body(folder.ledger, "run")["keys"]
        if member not in config.clients:
            raise FileFormatError(f"{file}: {member!r:.60} is not a member of the run in {path}")
        if not verifies(bytes.fromhex(keys[member]), signature, content(member, "statement", body)):
            raise FileFormatError(f"{file}: {member} did not sign this statement")
        statement = Statement.from_body(member, body, book.manifest, detail=config.settlement.detail)
        if (before := book.statements.get(member)) is not None:
            if before.body(book.manifest.run) == body:
                return book.settled
            raise SettlementError("has stated something else before", code="stated", member=member)
        settled = replace(book.settled, statements={**book.statements, member: statement}, told=None)
        settled = _final(settled) if not settled.missing else settled
        with folder.ledger.transaction():
            Journal(folder.ledger, lambda who, text: signature if who == member else sign(text)).write(
                member, "statement", body
            )
            Journal(folder.ledger, lambda who, text: sign(text)).write(SERVER, "settled", settled.body())
    renew(path)
    return settled


def close(path: Path, key: Path | None = None, *, now: float | None = None) -> Settled:
    """Close the settlement of a run, if the window is over or nobody is missing; return what it came to.

    Raises:
        SettlementError: it is closed already, or the window is not over.
    """
    moment = time.time() if now is None else now
    with _opened(path, key) as (folder, _, book, sign):
        settled = book.settled
        assert settled is not None
        if settled.missing and (settled.closes is None or moment < settled.closes):
            until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(settled.closes))
            raise SettlementError(
                f"{', '.join(settled.missing)} may state until {until}; close it then", code="window"
            )
        settled = replace(settled, final=True)
        with folder.ledger.transaction():
            Journal(folder.ledger, lambda who, text: sign(text)).write(SERVER, "settled", settled.body())
    renew(path)
    return settled


def _final(settled: Settled) -> Settled:
    """Return a settlement in which nobody is missing as closed, if nothing is left to find out."""
    done = all(one.holds for one in settled.equations)
    return replace(settled, closes=None, final=True) if done else settled


@contextmanager
def _opened(path: Path, key: Path | None) -> Iterator[tuple[Folder, Config, Book, Callable[[bytes], bytes]]]:
    """Open a run that verifies and whose settlement is not closed, to sign with the server's key."""
    for _ in verify_folder(path):  # only what verifies is added to
        pass
    config = of_folder(path)
    with Folder(path, config, resume=True) as folder:
        book = settlement_of(folder.ledger, rounds_of(folder.ledger), config)
        if book is None or book.settled is None:
            raise SettlementError(f"{path}: was not settled, so nothing can be added", code="unsettled")
        if book.settled.final:
            raise SettlementError(f"{path}: the settlement is closed", code="closed")
        keys = first_body(folder.ledger, "run")["keys"]
        if keys is None:
            raise SettlementError(
                f"{path}: a rehearsal without keys has nobody to wait for", code="rehearsal"
            )
        file = key or path / "keys" / f"{SERVER}.pem"
        if not file.exists():
            raise KeyFileError(f"{file}: no such file; expected the server's private key (--key)")
        identity = load_key(file)
        if public_key(identity).hex() != keys[SERVER]:
            raise KeyFileError(f"{file}: not the server's key according to the ledger")
        yield folder, config, book, identity.sign


def _statement_in(file: Path) -> tuple[str, Mapping[str, Any], bytes]:
    try:
        found = json.loads(file.read_text("utf-8"))
        if found["format"] != FORMAT or not isinstance(found["statement"], dict):
            raise ValueError(f"expected format {FORMAT!r}")
        return str(found["member"]), found["statement"], bytes.fromhex(found["signature"])
    except OSError as error:
        raise FileFormatError(f"{file}: cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{file}: not a statement: {error!s:.120}") from error
