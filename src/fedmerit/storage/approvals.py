"""Approvals of decisions: a member signs the latest one with its key, and the owner of the ledger records it.

A member that has only a copy of the ledger signs into a file (`sign`, `write_approval`). Whoever has the
server's key takes it in (`read_approval`, `record_approval`). What counts is the member's signature.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedmerit.errors import FileFormatError, KeyFileError, LedgerError, StoreError
from fedmerit.identity import SERVER, content, load_key, public_key, write_new
from fedmerit.ledger import kinds
from fedmerit.ledger.run import Run, replay
from fedmerit.storage.recorder import signer
from fedmerit.storage.run_folder import Folder

FORMAT = "fedmerit approval 1"


@dataclass(frozen=True)
class SignedApproval:
    """What a member signed, before it is recorded."""

    member: str
    body: kinds.Approved
    signature: bytes


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    member: str
    approval: kinds.Approved
    signature: str


def sign(run: Run, key: Path) -> SignedApproval:
    """Sign the latest decision of a verified run, from its folder or a member's copy.

    Raises:
        KeyFileError: the key is that of no member of the run.
        StoreError: nothing was decided, or nobody signs in this run.
    """
    identity = load_key(key)
    keys = run.first.public or {}
    member = next((name for name, own in keys.items() if own == public_key(identity)), SERVER)
    if not keys:
        raise StoreError(f"{run.name}: nobody signs in a run with secure aggregation off")
    if member == SERVER:
        raise KeyFileError(f"{key}: not the key of a member of the run in {run.name}")
    if not (made := run.of("decision")):
        raise StoreError(f"{run.name}: holds no decision to approve; fedmerit rewards makes one")
    body = kinds.Approved(run=run.id, decision=made[-1].digest.hex(), record=made[-1].seq)
    signature = identity.sign(content(member, "approval", msgspec.to_builtins(body)))
    return SignedApproval(member, body, signature)


def write_approval(path: Path, signed: SignedApproval) -> None:
    """Write an approval as a file, a new one."""
    file = _File(FORMAT, signed.member, signed.body, signed.signature.hex())
    write_new(path, (json.dumps(msgspec.to_builtins(file), indent=1) + "\n").encode())


def read_approval(path: Path) -> SignedApproval:
    """Read an approval from a file; its signature is checked where it is recorded."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        signature = bytes.fromhex(file.signature)
    except (msgspec.DecodeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: expected an approval from `fedmerit approve --out`: {error}"
        ) from error
    if file.format != FORMAT:
        raise FileFormatError(f"{path}: expected the format {FORMAT!r}, got {file.format!r:.60}")
    return SignedApproval(file.member, file.approval, signature)


def record_approval(run: Run, signed: SignedApproval) -> Run:
    """Record an approval in the ledger of a run that was verified; return the run with it.

    Raises:
        LedgerError: the member did not sign it, it is of no decision of this ledger, or of one that this
            member has approved before.
        StoreError: the ledger has grown since it was verified, or the server's key is not in the folder.
    """
    folder = run.path.parent
    seal = signer(run, "record an approval; fedmerit approve --out writes a file for them")
    with Folder(folder, run.config, resume=True) as held:
        if held.ledger.head != run.head:
            raise StoreError(f"{folder}: its ledger has grown since it was verified: try again")
        with held.ledger.transaction():  # nothing is left of an approval that does not verify
            body = msgspec.to_builtins(signed.body)
            held.ledger.append(signed.member, "approval", body, signature=signed.signature, seal=seal)
            try:
                return replay(held.ledger)
            except LedgerError as error:
                said = f"the approval of {signed.member!r:.60} is not recorded: {error}"
                raise LedgerError(said, record=error.record, code=error.code) from error
