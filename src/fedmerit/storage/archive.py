"""What the server keeps of every round for the settlement: sums, models, directions, proofs of masks.

One file of arrays per kind and round in ``DIR/archive``::

    round-0003       X, the integers that were summed, and M0 unless it is the M of the round before
    masks-0003       the signed lists of the round, and the secrets that were rebuilt to unmask its sum
    direction-0003   g, the public direction as integers
    words-0003       masked words that members sent again, where an equation failed
    messages/        if somebody was away: the signed messages to which it can still answer with its statement

Whoever has the folder, the ledger and the test pool can recompute every number of the settlement
(``fedmerit verify DIR --archive``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import FedmeritError, LedgerError, ProtocolError, StoreError
from fedmerit.ledger.chain import Record, Records
from fedmerit.ledger.forms import masked_inputs, setting_of
from fedmerit.ledger.records import reading
from fedmerit.ledger.settled import Book
from fedmerit.notes import Note
from fedmerit.protocol.clearing import Summed, summed_rounds
from fedmerit.protocol.direction import (
    Gradient,
    as_units,
    blocks_of,
    differs,
    direction_hash,
    product,
    slopes_of,
)
from fedmerit.protocol.naming import attempt_of, evidence_in, silent_in, table_of
from fedmerit.protocol.outcome import Round, model_hash, sum_hash
from fedmerit.protocol.pool import Slice
from fedmerit.protocol.settlement import name_hash
from fedmerit.protocol.terms import archived_weights
from fedmerit.storage.run_folder import arrays_in, safetensors, write

ARCHIVE = "archive"


class FolderArchive:
    """A `protocol.clearing.Archive` in a folder; every file carries its own checksum.

    Args:
        path: the folder; made when something is first kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, kind: str, number: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep arrays in one step, readable by their owner only."""
        self._file(kind, number).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data: bytes = safetensors().save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        write(self._file(kind, number), hashlib.sha256(data).digest() + data, mode=0o600)

    def load(self, kind: str, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return what was kept; raise StoreError if it is gone or damaged."""
        path = self._file(kind, number)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: needed for the settlement, and gone: {error}") from error
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise StoreError(f"{path}: damaged")
        return arrays_in(path, data[32:])

    def has(self, kind: str, number: int) -> bool:
        """Return whether there is such a file."""
        return self._file(kind, number).exists()

    def drop(self, kind: str, number: int) -> None:
        """Delete a file."""
        self._file(kind, number).unlink(missing_ok=True)

    def _file(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:04d}.arrays"


# ------------------------------------------------------------------------------------------- checked again


def check_sums(archive: FolderArchive, ledger: Records, rounds: Sequence[Round], config: Config) -> None:
    """Raise StoreError unless an archive has what a settlement needs of these rounds, as the ledger says.

    That is every sum, the model it moved, what names a liar, and every direction if the settlement had begun.
    """
    records = list(ledger.records())
    outcomes = {record.body["round"]: record.body for record in records if record.kind == "outcome"}
    for one in summed_rounds(archive, rounds, config):
        found = {"m0": model_hash(one.m0), "m": model_hash(one.m), "x": sum_hash(one.words)}
        if odd := [key for key, value in found.items() if outcomes[one.round][key] != value]:
            raise StoreError(
                f"{archive.path}: {', '.join(odd)} of round {one.round} is not what the ledger says: put the "
                "file of that round back"
            )
        if config.word_bytes == 8:
            _check_masks(archive, records, rounds[one.round - 1], one, config)
    for opening in (record for record in records if record.kind == "opening"):
        for entry in opening.body["manifest"]["rounds"]:
            if direction_hash(archive.load("direction", entry["round"])["g"]) != entry["g"]:
                raise StoreError(
                    f"{archive.path}: the direction of round {entry['round']} is not the one in the ledger: "
                    "put its file back"
                )


def _check_masks(
    archive: FolderArchive, records: Sequence[Record], found: Round, one: Summed, config: Config
) -> None:
    """Raise StoreError unless an archive can prove who put what into a sum, as far as the server knows it."""
    kept = {key: value.tobytes() for key, value in archive.load("masks", one.round).items()}
    public = archived_weights(archive.load("round", one.round), found.scheduled)
    where = (config, one.m0.size, model_hash(one.m0), public, kept.get("extra", b""))
    setting, task = attempt_of(setting_of(records, found, config), *where)
    try:
        sent = evidence_in(kept).check(setting, task).digests
    except (ProtocolError, LookupError) as error:
        raise StoreError(
            f"{archive.path}: the masks of round {one.round} are those of another one: {error!s:.120}: put "
            "the file of that round back"
        ) from error
    if sent != masked_inputs(records, one.round, one.participants):
        raise StoreError(
            f"{archive.path}: the masks of round {one.round} are not what the ledger says: put the file of "
            "that round back"
        )


def check_archive(
    archive: FolderArchive,
    book: Book,
    records: Sequence[Record],
    rounds: Sequence[Round],
    config: Config,
    gradient: Gradient | None = None,
) -> Iterator[Note]:
    """Recompute a settlement from the archive, and yield what was found.

    Sums, models, directions as integers, their products and the pool are compared with the manifest, and
    every verdict is judged anew. With a gradient, the directions are recomputed too.

    Args:
        archive: the server's, or a copy.
        book: the settlement in the ledger.
        records: of the ledger.
        rounds: of the ledger.
        config: of the run.
        gradient: of the paid utility.

    Raises:
        LedgerError: something in the archive contradicts the ledger.
        StoreError: a file is gone or damaged.
    """
    try:
        yield from _recomputed(archive, book, records, rounds, config, gradient)
    except FedmeritError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # a file with a right checksum
        raise StoreError(
            f"{archive.path}: a file holds other arrays than an archive does: {error!s:.100}"
        ) from error


def _recomputed(
    archive: FolderArchive,
    book: Book,
    records: Sequence[Record],
    rounds: Sequence[Round],
    config: Config,
    gradient: Gradient | None,
) -> Iterator[Note]:
    """Do what `check_archive` says, with arrays of any name, type and shape."""
    manifest = book.manifest
    if manifest is None:
        return
    shown = _pool(archive)
    shown.verify_settlement(records[1].body)
    if shown.id != manifest.pool:
        raise LedgerError(f"{archive.path}: its pool is not the one that was opened")
    blocks, _ = blocks_of(shown, config.settlement.blocks, balanced=bool(records[1].body["balanced"]))
    for one, entry in zip(summed_rounds(archive, rounds, config), manifest.rounds, strict=True):
        g = archive.load("direction", entry.round)["g"]
        found = (sum_hash(one.words), model_hash(one.m0), model_hash(one.m), direction_hash(g))
        if found != (entry.x, entry.m0, entry.m, entry.g):
            raise LedgerError(f"{archive.path}: round {entry.round} is not the one in the manifest")
        if product(one.words, g) != entry.product:
            raise LedgerError(f"round {entry.round}: the product of sum and direction is not the one stated")
        if gradient is not None:
            slopes, _, _ = slopes_of(gradient, one.m0, one.m, shown, blocks, entry.points)
            values = as_units(slopes, manifest.blocks, entry.step, entry.weight)
            if problem := differs(g, values, manifest.scale, one.encoding):
                raise LedgerError(f"round {entry.round}: {problem}")
    yield Note("archive", rounds=len(manifest.rounds))
    yield Note("archive-gradient" if gradient else "archive-no-gradient")
    yield from check_verdicts(archive, book, records, rounds, config)


def check_verdicts(
    archive: FolderArchive, book: Book, records: Sequence[Record], rounds: Sequence[Round], config: Config
) -> Iterator[Note]:
    """Judge every verdict anew from masks and words in the archive; arguments as for `check_archive`."""
    for record in records:
        if record.kind == "verdict" and record.body["round"]:
            with reading(record):
                _judge_again(archive, book, record, records, rounds, config)
            yield Note("archive-verdict", round=record.body["round"])


def _judge_again(
    archive: FolderArchive,
    book: Book,
    record: Record,
    records: Sequence[Record],
    rounds: Sequence[Round],
    config: Config,
) -> None:
    """Raise LedgerError unless tables, words and evidence prove just what a verdict states."""
    from fedmerit.secagg.naming import Evidence, judge
    from fedmerit.secagg.naming import product as masked_product

    body, manifest = record.body, book.manifest
    assert manifest is not None
    entry, one = manifest.entry(body["round"]), rounds[body["round"] - 1]
    given = dict(body["evidence"])
    extra, products = bytes.fromhex(given.pop("extra")), given.pop("products")
    public = archived_weights(archive.load("round", entry.round), one.scheduled)
    which = (manifest.coordinates, entry.m0)
    setting, task = attempt_of(setting_of(records, one, config), config, *which, public, extra)
    evidence, g = Evidence.from_dict(given), archive.load("direction", entry.round)["g"]
    if direction_hash(g) != entry.g:
        raise LedgerError(f"{archive.path}: its direction is not the one in the manifest")
    sent = masked_inputs(records, entry.round, entry.participants)
    if evidence.check(setting, task).digests != sent:
        raise LedgerError("its evidence is about other masked inputs than those recorded in the round")
    words = {}
    for name in products:
        payload = archive.load(f"words-{name_hash(name)}", entry.round)[name].tobytes()
        if hashlib.sha256(payload).hexdigest() != sent.get(name):
            raise LedgerError(f"the words of {name} are not those that it sent in the round")
        words[name] = masked_product(payload, g)
    if {name: str(value) for name, value in words.items()} != dict(products):
        raise LedgerError("the products of masked words are not those of the words")
    tables = {
        table.author: table_of(table.author, table.body, manifest.run, manifest.digest, entry.round)
        for table in records[: records.index(record)]
        if table.kind == "table" and table.body["round"] == entry.round
    }
    stated = {}
    if config.settlement.detail == "rounds":
        stated = {
            name: book.statements[name].rounds[str(entry.round)]
            for name in entry.participants
            if name in book.statements
        }
    found = judge(setting, task, g, evidence, tables, words, stated, entry.product)
    proved = {name: str(value) for name, value in found.values.items() if value is not None}
    told = (dict(body["named"]), dict(body["values"]), tuple(body["silent"]))
    if told != (dict(found.named), proved, silent_in(found)):
        raise LedgerError("states another verdict than its evidence proves")


def _pool(archive: FolderArchive) -> Slice:
    kept = archive.load("pool", 0)
    path = kept["path"].tobytes()
    nodes = tuple(path[start : start + 32] for start in range(0, len(path), 32))
    return Slice(
        index=int(kept["index"][0]), x=kept["x"], y=kept["y"], salts=kept["salts"].tobytes(), path=nodes
    )
