"""The files of a run folder compared with its ledger: score files, settings, checkpoints and the archive.

Score files that a killed process left older than the ledger are written again (`renew`). Nothing else is
written here.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerit.config import Config, difference, of_folder
from fedmerit.errors import ConfigError, CopyDiffers, FedmeritError, LedgerError, ProtocolError, StoreError
from fedmerit.ledger.account import Account
from fedmerit.ledger.chain import Record, reading
from fedmerit.ledger.kinds import compare, setting_of
from fedmerit.ledger.run import Run
from fedmerit.notes import Note
from fedmerit.protocol.coordinator import Summed, summed_rounds
from fedmerit.protocol.direction import (
    Along,
    Entry,
    Gradient,
    Manifest,
    as_units,
    blocks_of,
    differs,
    numeral,
    product,
    slopes_of,
)
from fedmerit.protocol.naming import Case, evidence_in, masked_product, recorded_evidence
from fedmerit.protocol.outcome import Round, model_hash, sum_hash
from fedmerit.protocol.pool import Slice
from fedmerit.protocol.settlement import Proof, table_of, words_kind
from fedmerit.protocol.terms import archived_task
from fedmerit.protocol.witness import KINDS, Book
from fedmerit.scoring.types import written_number
from fedmerit.secagg.quantise import direction_hash
from fedmerit.secagg.setting import Setting, Task
from fedmerit.storage.recorder import score_files, scores_document, write_scores
from fedmerit.storage.run_folder import Folder, FolderArchive, checkpoint_in

if TYPE_CHECKING:
    from fedmerit.secagg.naming import Evidence

# --------------------------------------------------------------------------------------------- score files

SCORE_FILES = ("scores.json", "scores.csv")

ScoreFiles = Mapping[str, bytes | None]
"""Name of a score file -> its content; None if there is no such file."""


def read_scores(path: Path) -> ScoreFiles:
    """Return the current content of a folder's score files."""
    files: dict[str, bytes | None] = {}
    for name in SCORE_FILES:
        try:
            files[name] = (path / name).read_bytes()
        except FileNotFoundError:
            files[name] = None
        except OSError as error:
            raise LedgerError(f"{path / name}: cannot be read: {error}") from error
    return files


def check_scores(path: Path, files: ScoreFiles, run: Run) -> tuple[Note, ...]:
    """Check that ``scores.json`` and ``scores.csv`` follow from all of the ledger's rounds, or the first few.

    If a process is killed after the ledger's transaction and before it writes these files, they stay one
    round behind, or lack the settlement. They are then correct, but the ledger has more.

    Returns:
        A note on each file that is missing or older than the ledger.

    Raises:
        CopyDiffers: a file says something else, or cannot be read.
    """
    rounds, config = run.rounds, run.config
    accounts: tuple[Account | None, ...] = (None, *run.accounts)

    @cache
    def expected(count: int, settled: int) -> dict[str, bytes]:
        """Return the files after so many rounds and records of the settlement."""
        try:
            return score_files(scores_document(rounds[:count], config, accounts[settled]))
        except (FedmeritError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(f"the reports in the ledger give no scores: {error!s:.200}") from error

    def lateness(name: str) -> Note | None:
        if (data := files[name]) is None:
            return Note("file-gone", file=name) if rounds else None
        parsed, where = (_json, name) if name == "scores.json" else (_table, f"{name} line")
        with _copy(path, name, config):
            content = parsed(path / name, data)
        held = _rounds_in(content, run)
        settled = reversed(range(len(accounts) if held == len(rounds) else 1))
        right = [parsed(path, expected(held, account)[name]) for account in settled]
        if content.get("1") not in [option.get("1") for option in right]:  # it has columns of more rounds
            right = [parsed(path, expected(len(rounds), 0)[name])]
        with _copy(path, name, config):
            place = _first_alike(content, right, where)
        behind = rounds[held:]
        lines = any(closed.reports if config.reports else closed.included for closed in behind)
        if behind and (name == "scores.json" or lines):  # other rounds have no lines
            return Note("file-older", file=name, rounds=len(behind))
        return Note("file-unsettled", file=name) if place else None

    return tuple(filter(None, map(lateness, files)))


def _rounds_in(content: Mapping[str, Any], run: Run) -> int:
    """Return how many rounds a score file has; as many as the ledger has if it does not say."""
    listed, known = content.get("rounds"), len(run.rounds)
    if isinstance(listed, list):
        return min(len(listed), known)
    if "1" not in content or run.accounts:
        return known
    last = content[str(len(content))].get("round") if len(content) > 1 else 0.0
    return int(last) if isinstance(last, float) and last in range(known + 1) else known


def _first_alike(content: Any, options: Sequence[Any], where: str) -> int:
    """Return the place of the first option that equals a file; raise as the first one differs."""
    for place, option in enumerate(options):
        with suppress(LedgerError):
            compare(content, option, where)
            return place
    compare(content, options[0], where)
    raise AssertionError("it was not equal before")


@contextmanager
def _copy(path: Path, name: str, config: Config) -> Iterator[None]:
    """Turn an error in a score file, which is only a copy, into CopyDiffers, which says how to mend it."""
    try:
        yield
    except LedgerError as error:
        how = "`fedmerit run --resume`" if config.scoring.truth else f"`fedmerit page {path}`"
        raise CopyDiffers(
            f"{error}. The ledger is the record, and {name} is a copy that was changed: delete it, and {how} "
            "writes it again",
            name,
        ) from error


FOLLOW_FROM = {
    "reports": "scores",
    "settled": "scores-settled",
    "both": "scores-both",
    "panel": "scores-settled",
}
"""By `scoring.method`, the note that says what scores follow from."""


def about_scores(
    path: Path, files: ScoreFiles, late: Sequence[Note], config: Config, *, running: bool = False
) -> Iterator[Note]:
    """Yield what `check_scores` found; ``running`` says that a process keeps writing in the folder."""
    if any(data is not None for data in files.values()):
        yield Note(FOLLOW_FROM[config.scoring.method])
    else:
        yield Note("scores-unwritten" if late else "scores-none")
    how = Note("files-by-command", path=str(path))
    if running:
        how = Note("files-by-process")
    elif config.scoring.truth:
        how = Note("files-by-resume")
    if late:
        yield Note("files", files=late, how=how)


def renew(path: Path, run: Run) -> str:
    """Rewrite the score files of a verified run if a killed process left them older than its ledger.

    Return what was done, in words; an empty text if the files were up to date, or if the ledger has grown.
    Raise StoreError if another process holds the folder, or a file contradicts the ledger: it is left alone,
    because somebody may have edited it on purpose.
    """
    try:
        if not check_scores(path, read_scores(path), run):
            return ""
        with Folder(path, run.config, resume=True) as folder:
            files = read_scores(path)
            late = check_scores(path, files, run)
            if not late or folder.ledger.head != run.head:
                return ""
            if run.config.scoring.truth:
                raise StoreError(
                    f"{path / 'scores.json'}: older than the ledger, and holds ground truth, which the "
                    "ledger does not: `fedmerit run --resume` writes it again"
                )
            write_scores(folder, scores_document(run.rounds, run.config, run.account))
    except CopyDiffers as error:
        raise StoreError(str(error)) from error
    return f"wrote {' and '.join(note.values['file'] for note in late)} again, from the ledger"


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise LedgerError(f"{path}: expected an object, got {type(content).__name__}")
    others = content.get("companions")
    for part in (content, *(others.values() if isinstance(others, dict) else ())):
        for extra in ("truth", "analysis"):  # computed from plain updates, not from reports
            if isinstance(part, dict):
                part.pop(extra, None)
    return content


def _table(path: Path, text: bytes) -> dict[str, dict[str, Any]]:
    """Return the cells of a CSV file by number of the line and name of the column."""
    try:
        lines = list(csv.reader(io.StringIO(text.decode("utf-8"), newline=""), strict=True))
    except (ValueError, csv.Error) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error
    head, longest = lines[0] if lines else [], max(map(len, lines), default=0)
    names = [*head, *(f"column {k + 1}" for k in range(len(head), longest))]
    return {
        str(number): {name: _cell(name, cell) for name, cell in zip(names, line, strict=False)}
        for number, line in enumerate(lines, start=1)
    }


def _cell(name: str, text: str) -> Any:
    if name == "stated":  # integers that a float does not hold
        return text
    try:
        return written_number(text)
    except ValueError:
        return text


# -------------------------------------------------------------------------------- settings and checkpoints


def check_config(path: Path, config: Config) -> None:
    """Raise LedgerError unless ``config.toml`` is the config in the ledger."""
    try:
        stored = of_folder(path)
    except ConfigError as error:
        raise LedgerError(f"config.toml is damaged: {error}") from error
    if differs := difference(stored, config):
        raise LedgerError(f"{path / 'config.toml'}: not the config in the ledger: {differs}")


def check_checkpoints(path: Path, rounds: Sequence[Round]) -> Iterator[Note]:
    """Check that the checkpoints still there are those recorded; yield a line if the last model is gone."""
    for closed in rounds:
        for name, field in (("model", "checkpoint"), ("members", "members_checkpoint")):
            file = checkpoint_in(path, name, closed.number)
            if field not in closed.body or not file.exists():  # only the last ones are kept
                continue
            try:
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
            except OSError as error:
                raise LedgerError(f"{file}: cannot be read: {error}") from error
            if digest != closed.body[field]:
                raise LedgerError(f"{file}: not the checkpoint that round {closed.number} recorded")
    if rounds and not checkpoint_in(path, "model", rounds[-1].number).exists():
        yield Note("checkpoint-gone", round=rounds[-1].number)


# -------------------------------------------------------------------------- the archive of a settlement


def _archived(archive: FolderArchive, run: Run) -> Iterator[tuple[Summed, Any]]:
    """Yield every sum in an archive, with its direction if the ledger has a manifest.

    Raise StoreError unless sums, models and directions are those in the ledger.
    """
    manifest = run.settlement.manifest if run.settlement else None
    for summed in summed_rounds(archive, run.rounds, run.config):
        number, stated, direction = summed.round, run.rounds[summed.round - 1].outcome or {}, None
        hashes = {"m0": model_hash(summed.m0), "m": model_hash(summed.m), "x": sum_hash(summed.words)}
        odd = [key for key, value in hashes.items() if stated.get(key) != value]
        if manifest is not None:
            direction, right = _lines(archive, manifest, manifest.along(number))
            odd += [] if right else ["direction"]
        if odd:
            raise StoreError(
                f"{archive.path}: {', '.join(odd)} of round {number} is not what the ledger says: put "
                "the file of that round back"
            )
        yield summed, direction


def _lines(archive: FolderArchive, manifest: Manifest, along: Along) -> tuple[Any, bool]:
    """Return a direction, or all those of a panel in a round, and whether it is the one in the ledger."""
    entry = manifest.entry(along.round)
    if manifest.bench is None:
        kind = "direction" if along.block is None else f"direction-{along.block}"
        g = archive.load(kind, entry.round)["g"]
        return g, direction_hash(g) == along.g
    columns = archive.load("columns", 0)["columns"]
    if problem := manifest.bench.problem_with(columns, len(manifest.rounds)):
        raise StoreError(f"{archive.path}: {problem}: put the file back")
    return manifest.board(entry, columns, archive.load("round", entry.round)["x"]), True


def check_sums(archive: FolderArchive, run: Run) -> None:
    """Raise StoreError unless an archive has every sum, model, mask and direction that the ledger states."""
    for summed, _ in _archived(archive, run):
        if run.config.word_bytes == 8:
            _check_masks(archive, run, summed)


def _sent(run: Run, number: int, members: Sequence[str]) -> dict[str, str]:
    """Return the hashes of the words that members sent in a round, as recorded before any unmasking."""
    inputs = run.rounds[number - 1].inputs or {}
    return {name: inputs.get(name, "") for name in members}


def _attempt(
    archive: FolderArchive, run: Run, number: int, size: int, m0: str, extra: bytes
) -> tuple[Setting, Task]:
    """Return setting and task of a settled round, as its members had them."""
    round_ = run.rounds[number - 1]
    setting = setting_of(run.first, run.pool, run.config, round_)
    archived = archive.load("round", number)
    return setting, archived_task(archived, run.config, m0, size, round_.scheduled, extra)


def _check_masks(archive: FolderArchive, run: Run, summed: Summed) -> None:
    """Raise StoreError unless an archive has masks and masked words of a round as the ledger states them."""
    number, m0 = summed.round, model_hash(summed.m0)
    problem = f"{archive.path}: the masks of round {number} are not what the ledger says"
    advice = "put the file of that round back"
    try:
        evidence = evidence_in(archive, number)
        sent = evidence.check(*_attempt(archive, run, number, summed.m0.size, m0, evidence.extra)).digests
        words = _words_of(archive, number, sent)
    except (ProtocolError, LookupError) as error:
        raise StoreError(f"{problem}: {error!s:.120}: {advice}") from error
    if not sent == words == _sent(run, number, summed.participants):
        raise StoreError(f"{problem}: {advice}")


def _words_of(archive: FolderArchive, number: int, names: Iterable[str]) -> dict[str, str]:
    """Return the hashes of archived masked words."""
    return {
        name: hashlib.sha256(archive.load(words_kind(name), number)[name].data).hexdigest() for name in names
    }


def check_archive(archive: FolderArchive, run: Run, gradient: Gradient | None = None) -> Iterator[Note]:
    """Compare sums, models, directions, their products and the pool with the manifest; judge every verdict.

    With the gradient of the paid utility, the directions are recomputed too.

    Raises:
        LedgerError: the archive shows that the ledger states something false.
        StoreError: a file is gone or damaged, or is not the one that the ledger is about.
    """
    manifest = run.settlement.manifest if run.settlement else None
    if manifest is None:
        return
    try:
        yield from _recomputed(archive, run, manifest, gradient)
    except FedmeritError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # a file with a right checksum
        raise StoreError(
            f"{archive.path}: a file holds other arrays than an archive does: {error!s:.100}"
        ) from error


def _recomputed(
    archive: FolderArchive, run: Run, manifest: Manifest, gradient: Gradient | None
) -> Iterator[Note]:
    opened = None if manifest.bench else _pool(archive, run, manifest)
    for (summed, g), entry in zip(_archived(archive, run), manifest.rounds, strict=True):
        if product(summed.words, g) != entry.product:
            raise LedgerError(f"round {entry.round}: the product of sum and direction is not the one stated")
        if gradient is not None and opened is not None:
            blocks, _ = blocks_of(opened, balanced=bool(run.pool["balanced"]))
            slopes, _, _ = slopes_of(gradient, summed.m0, summed.m, opened, blocks, entry.points)
            values = as_units(slopes, manifest.blocks, entry.step, entry.weight)
            if problem := differs(g, values, manifest.scale, summed.task.encoding):
                raise LedgerError(f"round {entry.round}: {problem}")
    yield Note("archive", rounds=len(manifest.rounds))
    if manifest.bench is None:
        yield Note("archive-gradient" if gradient else "archive-no-gradient")
    yield from check_verdicts(archive, run)


def _pool(archive: FolderArchive, run: Run, manifest: Manifest) -> Slice:
    """Return the opened pool; raise LedgerError unless it is the one that was committed to and settled on."""
    pool = archive.load("pool", 0)
    path = pool["path"].tobytes()
    nodes = tuple(path[start : start + 32] for start in range(0, len(path), 32))
    opened = Slice(
        index=int(pool["index"][0]), x=pool["x"], y=pool["y"], salts=pool["salts"].tobytes(), path=nodes
    )
    opened.verify(run.pool, "settlement")
    if opened.id != manifest.pool:
        raise LedgerError(f"{archive.path}: its pool is not the one that was opened")
    return opened


def _check_plain(archive: FolderArchive, run: Run, manifest: Manifest, entry: Entry) -> None:
    """Raise LedgerError unless masks prove what everybody stated on a round without a verdict."""
    evidence, last = evidence_in(archive, entry.round), run.of("settled")[-1]
    case = _case(archive, run, manifest, manifest.along(entry.round), evidence, last)
    _, proof, shown = case.judged()
    if not case.is_plain(proof, shown):
        raise LedgerError(f"round {entry.round} has no verdict, and masks do not prove what was stated")


def check_verdicts(archive: FolderArchive, run: Run) -> Iterator[Note]:
    """Judge every verdict anew from masks and words in the archive, and every round without one."""
    for record in run.of("verdict"):
        with reading(record):
            _judge_again(archive, record, run)
        yield Note("archive-verdict", round=record.body["round"])
    manifest = run.settlement.manifest if run.settlement else None
    judged = {record.body["round"] for record in run.of("verdict") if record.body["block"] is None}
    if manifest is None or not run.accounts or run.config.word_bytes == 4:
        return
    for entry in manifest.rounds:
        if entry.round not in judged:
            _check_plain(archive, run, manifest, entry)


def _judge_again(archive: FolderArchive, record: Record, run: Run) -> None:
    """Raise LedgerError unless tables, words and evidence prove just what a verdict states."""
    book = run.settlement
    assert book is not None
    assert book.manifest is not None
    proof = Proof.from_body(record.body)
    evidence, products = recorded_evidence(record.body)
    case = _case(archive, run, book.manifest, proof.along, evidence, record)
    if {name: numeral(value) for name, value in case.products.items()} != dict(products):
        raise LedgerError("the products of masked words are not those of the words")
    if case.judged()[1] != proof:
        raise LedgerError("states another verdict than its evidence proves")


def _case(
    archive: FolderArchive, run: Run, manifest: Manifest, along: Along, evidence: Evidence, at: Record
) -> Case:
    """Return what a direction is judged by: the archive, and the records before this one.

    Raise LedgerError unless direction, sum and masked words are those of the ledger.
    """
    assert run.settlement is not None
    entry = manifest.entry(along.round)
    setting, task = _attempt(archive, run, entry.round, manifest.coordinates, entry.m0, evidence.extra)
    g, right = _lines(archive, manifest, along)
    if not right:
        raise LedgerError(f"{archive.path}: its direction is not the one of the verdict")
    if product(archive.load("round", entry.round)["x"], g) != along.product:
        raise LedgerError("the product of sum and direction is not the one stated")
    sent = _sent(run, entry.round, entry.participants)
    if evidence.check(setting, task).digests != sent:
        raise LedgerError("its evidence is about other masked inputs than those recorded in the round")
    if _words_of(archive, entry.round, sent) != sent:
        raise LedgerError(f"the archived words of round {entry.round} are not those that members sent")
    before = [record for record in run.records if record.seq < at.seq]
    tables = {
        table.author: table_of(table.author, table.body, manifest.run, manifest.digest, along, manifest.lanes)
        for table in before
        if table.kind == "table" and (table.body["round"], table.body["block"]) == (along.round, along.block)
    }
    stated = {record.author for record in before if record.kind == "statement"}
    statements = {name: one for name, one in run.settlement.statements.items() if name in stated}
    said = ((record.author, record.kind, record.body) for record in before if record.kind in KINDS)
    words = {name: masked_product(archive, entry.round, name, g) for name in entry.participants}
    where = (entry, along, g, setting, task, evidence, tables, words, statements)
    return Case(*where, Book.read(manifest, run.config, said))
