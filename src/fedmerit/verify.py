"""Verification of a run, finished or not, from its folder or a copy of its ledger; and payout decisions."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from fedmerit.config import Config, of_folder
from fedmerit.errors import CopyDiffers, KeyFileError, LedgerError, StoreError, UnsettledShares
from fedmerit.heading import Heading
from fedmerit.identity import SERVER, Member, Roster, read_roster
from fedmerit.ledger.account import Account, account_of, accounts_of
from fedmerit.ledger.chain import START, Copy, Ledger, Record, Records, verify_chain
from fedmerit.ledger.decisions import (
    Decision,
    Departure,
    OwnPart,
    Terms,
    decide,
    decisions_of,
    departs,
    own_parts,
)
from fedmerit.ledger.forms import check_forms, check_rounds
from fedmerit.ledger.head_log import check_head, check_kept, places_of, signed_heads, told
from fedmerit.ledger.joined_runs import RunPart, joined, part_of
from fedmerit.ledger.records import (
    Journal,
    Sign,
    aborted,
    check_server,
    check_stated,
    first_body,
    moves,
    reader_of,
    reading,
    rounds_of,
    run_and_config,
    unreported,
)
from fedmerit.ledger.settled import settlement_of
from fedmerit.notes import Note, formatted, planted, words
from fedmerit.protocol.direction import Gradient
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.pool import least_shown
from fedmerit.protocol.terms import EMBEDDED, REHEARSALS, stated_of
from fedmerit.scoring.doubts import check_payable, doubts
from fedmerit.scoring.files import LEDGER
from fedmerit.storage.archive import ARCHIVE, FolderArchive, check_archive, check_verdicts
from fedmerit.storage.run_folder import (
    Folder,
    Snapshot,
    check_checkpoints,
    check_config,
    examine_disk,
    head_of,
    held,
    leftovers,
    scored_in,
    snapshot,
)
from fedmerit.storage.score_files import (
    FOLLOW_FROM,
    about_scores,
    check_scores,
    read_scores,
    write_scores,
)

# ---------------------------------------------------------------------------------------------------- keys


def about_keys(run: Mapping[str, Any], config: Config, roster: Roster | None, name: str) -> Iterator[Note]:
    """Compare a run's keys with a roster, or say that they were not compared; yield the lines that say so.

    Args:
        run: the body of the ledger's first record.
        config: the config in it.
        roster: the reader's own roster, or None.
        name: name of the roster, for messages.

    Raises:
        LedgerError: names the members whose keys differ.
    """
    rehearsal = run["engine"] in REHEARSALS
    if roster is not None:
        agreed = run.get("terms", {}).get("roster")
        used = next((one for one in roster.chain if one.hash.hex() == agreed), roster)
        _check(run, config, used, name)
        if rehearsal:
            yield Note(
                "keys-held", roster=name, hash=used.hash.hex(), holder=words(f"holder.{run['engine']}")
            )
        else:
            yield Note("keys", roster=name, hash=used.hash.hex())
        if used is not roster:
            yield Note("keys-earlier", roster=name, changes=roster.chain.index(used))
    elif run["keys"] and not rehearsal:
        yield _how_to_compare(run, config)
    if before := run.get("terms", {}).get("previous"):
        yield Note("roster-before", hash=before)


def _check(run: Mapping[str, Any], config: Config, roster: Roster, name: str) -> None:
    """Raise LedgerError unless names, keys, public weights and hash match the roster."""
    if not run["keys"]:
        raise LedgerError(f"an unsigned ledger has no keys, so there is nothing to compare with {name}")
    listed, wrong = {member.name: member.key for member in roster.members}, []
    if roster.server is not None and bytes.fromhex(run["keys"][SERVER]) != roster.server:
        here, theirs = run["keys"][SERVER], roster.server.hex()
        wrong.append(f"the key of the server is {here[:16]}..., on the roster {theirs[:16]}...")
    for member in dict.fromkeys((*config.clients, *listed)):
        if member not in listed:
            wrong.append(f"{member} is not on it")
        elif member not in config.clients:
            wrong.append(f"{member} is on it, but not in the run")
        elif bytes.fromhex(run["keys"][member]) != listed[member]:
            theirs, here = listed[member].hex(), run["keys"][member]
            wrong.append(f"the key of {member} is {here[:16]}..., on the roster {theirs[:16]}...")
    if wrong:
        made = "; a rehearsal makes its own keys" if run["engine"] in REHEARSALS else ""
        raise LedgerError(f"its keys do not match {name}: {'; '.join(wrong)}{made}")
    training = config.training
    if training.weights == "roster" and training.roster_weights != roster.weights:
        raise LedgerError(f"its public weights do not match {name}")
    stated = run.get("terms", {}).get("roster", roster.hash.hex())
    if stated != roster.hash.hex():
        raise LedgerError(
            f"its members agreed to a roster with hash {stated!s:.64}, but {name} has {roster.hash.hex()}: "
            "names and keys are the same; public weights, server, quorum or the roster before it are not"
        )
    terms = run.get("terms", {})
    if {key: terms[key] for key in ("previous", "quorum") if key in terms} != stated_of(roster):
        raise LedgerError(f"its terms state another quorum, or another roster before it, than {name}")


def _how_to_compare(run: Mapping[str, Any], config: Config) -> Note:
    """Say how a reader can compare the keys; give the roster's hash only if it is the hash of these keys."""
    terms, training = run.get("terms", {}), config.training
    stated, before = terms.get("roster"), terms.get("previous")
    weights = training.roster_weights if training.weights == "roster" else {}
    keys = {name: bytes.fromhex(key) for name, key in run["keys"].items()}
    members = [Member(name, keys[name], weights.get(name)) for name in config.clients]
    try:
        made = Roster(members, keys[SERVER], before and bytes.fromhex(before), terms.get("quorum"))
    except KeyFileError as error:
        raise LedgerError(f"its keys do not form a roster: {error}") from error
    if stated == made.hash.hex():
        return Note("keys-hashed", hash=stated)
    if weights:
        raise LedgerError("its members agreed to a roster that its keys and public weights do not form")
    return Note("keys-stated" if stated is None else "keys-weighted")


# --------------------------------------------------------------------------------------------- score files


def renew(path: Path) -> str:
    """Rewrite the score files of a run if a killed process left them older than its ledger.

    The folder is locked meanwhile. It must verify.

    Returns:
        What was done, in words; an empty string if the files were up to date.

    Raises:
        StoreError: another process holds the folder, or a file contradicts the ledger. Such a file is left
            alone, because somebody may have edited it on purpose.
    """
    try:
        return _renewed(path)
    except CopyDiffers as error:
        raise StoreError(str(error)) from error


def _renewed(path: Path) -> str:
    config = of_folder(path)
    files, ledger = read_scores(path), snapshot(path / LEDGER)
    rounds = rounds_of(ledger)
    if not check_scores(path, files, rounds, config, accounts_of(ledger, rounds, config)):
        return ""
    with Folder(path, config, resume=True) as folder:
        for _ in verify_folder(path):
            pass
        rounds = rounds_of(folder.ledger)
        files, accounts = read_scores(path), accounts_of(folder.ledger, rounds, config)
        late = check_scores(path, files, rounds, config, accounts)
        if not late:
            return ""
        if config.scoring.truth:
            raise StoreError(
                f"{path / 'scores.json'}: older than the ledger, and holds ground truth, which the ledger "
                "does not: `fedmerit run --resume` writes it again"
            )
        write_scores(path, rounds, config, accounts[-1] if accounts else None)
    names, were = " and ".join(late), "was" if len(late) == 1 else "were"
    older = [count for name, count in late.items() if files[name] is not None]
    if not older:
        return f"wrote {names} again, which {were} missing"
    behind = f"{max(older)} round{'' if max(older) == 1 else 's'} older than the ledger"
    if not max(older):
        behind = "older than the settlement in the ledger"
    return f"wrote {names} again, which {were} {'' if len(older) == len(late) else 'missing or '}{behind}"


# -------------------------------------------------------------------------------------------------- verify

A = TypeVar("A")
B = TypeVar("B")
ATTEMPTS = 5
"""How often to read a folder in which a process keeps writing."""
PAUSE = 0.3
"""Seconds between two readings."""


def verify_folder(
    path: str | Path,
    *,
    head: str | None = None,
    heads: str | Path | None = None,
    member: str | None = None,
    roster: Roster | str | Path | None = None,
    after: Sequence[str | Path] = (),
    archive: str | Path | None = None,
    gradient: Gradient | None = None,
) -> Iterator[Note]:
    """Check a run folder, and yield what was found line by line.

    The checks cover: chain and signatures; whether records fit together; the scores and payouts stated in the
    ledger; and whether ``config.toml``, checkpoints, ``scores.json`` and ``scores.csv`` agree with it. Score
    files that lack the ledger's last rounds are mentioned, but are not an error, because the ledger is the
    record. A process may be writing in the folder meanwhile.

    Args:
        path: path of the folder.
        head: a head that somebody wrote down; it must be on the chain.
        heads: a member's own file of what it was shown, did and reported (``KEY.state/RUN/heads``); the
            ledger must agree with it.
        member: the member who asks; its own part is included.
        roster: the reader's own roster of members' keys, or its file; without it, signatures are checked with
            the keys that the ledger states.
        after: folders or copies of the runs before this one on which its decisions rest. They are checked
            too; without them, such a decision is not recomputed, and a line says so.
        archive: the folder with what the server kept of the rounds (``DIR/archive``, or a copy): sums, models
            and directions of a settlement are recomputed from it, and every verdict is judged anew. Without
            it, verdicts are judged by the archive in the folder; a line says so if it has none.
        gradient: with an archive, recomputes every direction.

    Raises:
        CopyDiffers: a score file is wrong, but the ledger is sound and has been described in full.
        LedgerError: names the first record, or the place in a file, that is wrong.
    """
    earlier = _earlier(after, member, roster)
    _, differs = yield from _verified(Path(path), earlier, head, heads, member, roster, archive, gradient)
    if differs is not None:
        raise differs


def verified(folder: str | Path, found: list[Note]) -> tuple[Snapshot, CopyDiffers | None]:
    """Verify a run folder and return its ledger exactly as it was verified, which alone may be shown.

    Args:
        folder: the run folder.
        found: gets the lines of :func:`verify_folder`, those before an error too.

    Returns:
        The ledger, and how a score file differs from it, if one does.

    Raises:
        StoreError: the ledger is empty.
    """
    if head_of(Path(folder) / LEDGER) == START.hex():
        raise StoreError(f"{folder}: no round is scored yet: its ledger is empty")
    checks = _verified(Path(folder), ())
    while True:
        try:
            found.append(next(checks))
        except StopIteration as end:
            book, differs = end.value
            return book, differs


def _verified(
    path: Path,
    earlier: Sequence[RunPart],
    head: str | None = None,
    heads: str | Path | None = None,
    member: str | None = None,
    roster: Roster | str | Path | None = None,
    archive: str | Path | None = None,
    gradient: Gradient | None = None,
) -> Generator[Note, None, tuple[Snapshot, CopyDiffers | None]]:
    """Yield what is found in a folder; return the ledger that was read, and how a score file differs."""
    ledger, before = path / LEDGER, ""
    for attempt in range(1, ATTEMPTS + 1):
        lines: list[Note] = []
        read = head_of(ledger)
        try:
            files, book = read_scores(path), snapshot(ledger)  # in this order: files must not be newer
            checked = _Checked(book, member, roster, earlier)
            judges = (path / ARCHIVE).is_dir() or archive is not None
            lines.extend(checked.lines(head, heads, judged=judges))
            if archive is None and judges:
                lines.extend(checked.judged(path / ARCHIVE))
            lines.extend(checked.archived(archive, gradient))
            check_config(path, checked.config)
            lines.extend(check_checkpoints(path, checked.rounds))
            accounts = accounts_of(book, checked.rounds, checked.config)
            late = check_scores(path, files, checked.rounds, checked.config, accounts)
        except LedgerError as error:
            if head_of(ledger) == read:
                yield from lines
                if isinstance(error, CopyDiffers):
                    yield from checked.about_money()
                    yield Note("head", head=book.head)
                    return book, error
                raise
            if attempt == ATTEMPTS:
                raise LedgerError(
                    f"{path}: a process keeps writing in this folder: its ledger grew during each of "
                    f"{ATTEMPTS} readings; verify when that process is done. The last reading found: {error}"
                ) from error
        else:
            same = read == before or not late
            if same or attempt == ATTEMPTS:
                yield from lines
                yield from about_scores(path, files, late, checked.config, running=not same)
                yield from checked.about_money()
                yield Note("head", head=book.head)
                return book, None
        before = read
        time.sleep(PAUSE)
    raise AssertionError("the last attempt returns or raises")


def examine_folder(path: str | Path) -> Iterator[Note]:
    """Check a run folder as its operator needs it, and yield what was found; "problem" is the code of faults.

    It says what `verify_folder` says, and looks at keys, leftovers, the disk and a process at work.
    """
    path = Path(path)
    if not (path / "config.toml").exists():
        Ledger(path / LEDGER, read_only=True).close()  # says so if this is no run, before anything is written
    try:
        held(path).close()
    except StoreError:
        yield Note("folder-running")
    except OSError as error:  # such as a copy on a disk that can only be read
        yield Note("folder-unlocked", why=error.strerror or str(error))
    keys = sorted((path / "keys").glob("*.pem"))
    for key in (path / LEDGER, *keys, *(path / "checkpoints").glob("*.safetensors")):
        if (mode := stat.S_IMODE(key.stat().st_mode)) & 0o077:
            yield Note("problem", what=f"{key}: expected mode 600, got {mode:o}; run: chmod 600 {key}")
    yield Note("folder-keys", files=len(keys))
    for left in (one for folder in (path, path / "checkpoints") for one in leftovers(folder)):
        yield Note("folder-left", path=str(left))
    try:
        yield from verify_folder(path)
    except LedgerError as error:
        yield Note("problem", what=str(error))
    largest = max((one.stat().st_size for one in (path / "checkpoints").glob("*")), default=0)
    yield from examine_disk(path, 4 * largest)
    yield Note("restore-folder")


def verify_copy(
    path: str | Path,
    *,
    head: str | None = None,
    heads: str | Path | None = None,
    member: str | None = None,
    roster: Roster | str | Path | None = None,
    after: Sequence[str | Path] = (),
    archive: str | Path | None = None,
    gradient: Gradient | None = None,
) -> Iterator[Note]:
    """Check a copy of a ledger (JSON lines), as :func:`verify_folder` checks the ledger of a folder.

    A copy for one member withholds what others reported. Chain, signatures and order are then checked for all
    records, but scores and payouts only for that member. A copy without the end of the run is a part, and
    nothing is said of the scores of the run: the code of that line is "part".
    """
    copy = Copy(path)
    checked = _Checked(copy, member, roster, _earlier(after, member, roster))
    yield from checked.lines(head, heads, judged=archive is not None)
    yield from checked.archived(archive, gradient)
    if not any(record.kind == "end" for record in checked.records):
        yield Note("part", record=len(copy), closed=len(checked.rounds))
    elif checked.reader is None:
        yield Note(FOLLOW_FROM[checked.config.scoring.method])
    else:
        yield Note("scores-own", client=checked.reader)
    if checked.reader is not None:
        yield Note("withheld", records=sum(bool(record.withheld) for record in checked.records))
    yield from checked.about_money()
    yield Note("head", head=copy.head)


def is_copy(source: Path) -> bool:
    """Return whether this names an exported ledger, not a run folder."""
    return source.suffix == ".jsonl" and not source.is_dir()


def _earlier(
    sources: Sequence[str | Path], member: str | None, roster: Roster | str | Path | None
) -> list[RunPart]:
    """Verify the folders or copies of earlier runs, and return these runs."""
    found = []
    for source in map(Path, sources):
        copy = is_copy(source)
        lines = (
            verify_copy(source, member=member, roster=roster)
            if copy
            else verify_folder(source, roster=roster)
        )
        try:
            list(lines)  # raises what is wrong
            found.append(part_of(Copy(source) if copy else snapshot(source / LEDGER)))
        except LedgerError as error:
            raise LedgerError(f"{source}: {error}", record=error.record, code=error.code) from error
    return found


class _Checked:
    """A verified ledger or copy: everything that can be recomputed has been."""

    def __init__(
        self,
        ledger: Records,
        member: str | None,
        roster: Roster | str | Path | None = None,
        earlier: Sequence[RunPart] = (),
    ) -> None:
        own = read_roster(roster) if isinstance(roster, str | Path) else roster
        name = "the roster" if isinstance(roster, Roster) else str(roster)
        self.signed = verify_chain(ledger, keys_of)
        self.records = list(ledger.records())
        self.run, self.config = run_and_config(ledger, signed=self.signed)
        with reading(self.records[0]):
            self.keys = list(about_keys(self.run, self.config, own, name))
        self.member = member
        self.reader = reader_of(self.records, self.config.clients, member)
        self.places = places_of(self.records)
        pool = first_body(ledger, "pool")
        self.rounds, self.heads = _both(
            lambda: self._stated(ledger), lambda: signed_heads(self.records, self.run, pool, self.places)
        )
        check_forms(self.records, self.config)
        check_rounds(self.records, self.rounds, self.config)
        self.settlement = settlement_of(ledger, self.rounds, self.config)
        self.decisions: list[Decision] = []
        self.own: list[OwnPart] = []
        if self.reader is None:
            self.decisions = decisions_of(ledger, self.rounds, self.config, earlier)
        else:
            self.own = own_parts(ledger, self.reader, self.rounds, self.config, earlier)
        self.earlier = {run.id: run for run in earlier}
        resting = [*(one.after for one in self.decisions), *(part.after for part in self.own)]
        named = {run for after in resting for run, _ in after}
        for run in earlier:
            if run.id not in named:
                wanted = ", ".join(sorted(named)) or "none"
                raise LedgerError(
                    f"{run.name}: is run {run.id}, on which no decision here rests; expected one of: {wanted}"
                )

    def _stated(self, ledger: Records) -> list[Round]:
        """Return the rounds; raise LedgerError if what the server stated after them does not follow."""
        rounds, pool = rounds_of(ledger), first_body(ledger, "pool")
        closing = (record for record in self.records if record.kind == "round")
        for record, one in zip(closing, rounds, strict=True):
            with reading(record):
                check_server(one, max(1, least_shown(pool)))
        check_stated(self.records, rounds, self.config, self.reader)
        return rounds

    def lines(self, head: str | None, heads: str | Path | None, *, judged: bool) -> Iterator[Note]:
        """Yield lines on chain, signatures, heads and rounds; ``judged``: verdicts are judged anew later."""
        yield Note("chain-signed" if self.signed else "chain", records=len(self.records))
        members = self.config.clients
        if not self.signed:
            yield Note("unsigned")
        elif (engine := self.run["engine"]) in REHEARSALS:
            yield Note("rehearsal", holder=words(f"holder.{engine}"))
        else:
            joined = {record.author for record in self.records if record.kind == "join"}
            yield Note("members", joined=len(joined), members=len(members))
        if faults := planted(self.config.corruption):
            yield faults
        yield from self.keys
        if self.signed:
            yield from told(self.heads, members, len(self.records))
        if head is not None:
            yield Note("on-chain", head=head.lower()[:16], place=check_head(head, self.places).words)
        if heads is not None:
            if self.run["engine"] == EMBEDDED:
                raise LedgerError(
                    "says that it is a rehearsal in one process, where no member keeps a file of its own: "
                    "if this file is yours, this is not the ledger of your run"
                )
            yield from check_kept(Path(heads), self.places, self.records)
        if self.member is not None and self.signed:
            own = self.heads.get(self.member)
            if own is None:
                yield Note("signed-none", client=self.member)
            else:
                yield Note("signed", client=self.member, place=own.words)
        yield self._about_rounds()
        for record in self.records:
            if record.kind == "blame":
                yield _about_blame(record)
        if self.settlement is not None:
            yield from self.settlement.lines(judged=judged)
        if moves(self.run):
            yield Note("moves")
        for one in self.rounds:
            for name, how in one.differences().items():
                yield Note("differs", round=one.number, client=name, how=how)
        if self.run["analysis"]:
            yield Note("analysis")

    def judged(self, archive: Path) -> Iterator[Note]:
        """Yield a line for every verdict, which the archive proves."""
        if self.settlement is not None and self.reader is None:
            given = self.settlement, self.records, self.rounds, self.config
            yield from check_verdicts(FolderArchive(archive), *given)

    def archived(self, archive: str | Path | None, gradient: Gradient | None) -> Iterator[Note]:
        """Yield lines on what the archive of a settlement shows."""
        if archive is None:
            return
        if self.settlement is None or self.reader is not None:
            raise LedgerError("an archive is checked with the whole ledger of a run that was settled")
        path = Path(archive)
        if not path.is_dir():
            raise LedgerError(f"{path}: expected the folder of an archive")
        yield from check_archive(
            FolderArchive(path), self.settlement, self.records, self.rounds, self.config, gradient
        )

    def _about_rounds(self) -> Note:
        closed, planned = len(self.rounds), self.config.training.rounds
        gone, without = len(aborted(self.rounds)), unreported(self.rounds)
        if not without:
            return Note("rounds", closed=closed, planned=planned, aborted=gone)
        return Note(
            "rounds-unreported",
            closed=closed,
            planned=planned,
            aborted=gone,
            unreported=len(without),
            rounds=without,
        )

    def about_money(self) -> Iterator[Note]:
        """Yield lines on the payout decisions, which were recomputed."""
        for one in self.decisions:
            mine, currency = "", f" {one.paid.currency}" if one.paid.currency else ""
            if self.member is not None:
                amount = one.paid.by_client.get(self.member, Decimal(0))
                mine = Note("payouts-mine", amount=amount, currency=currency, client=self.member)
            yield _terms_line(one.number, one.departures)
            yield from self._about_runs(one.number, one.after)
            yield Note(
                "payouts" if one.recomputed else "payouts-unchecked",
                decision=one.number,
                record=one.record,
                instead=Note("payouts-instead", decision=one.replaces) if one.replaces else "",
                after=self._after(one.rounds),
                budget=one.paid.budget,
                currency=currency,
                rule=one.terms.rule,
                mine=mine,
            )
            despite = "despite" if one.terms.despite_doubts else "despite-unsaid"
            for doubt in one.overruled:
                yield Note(despite, decision=one.number, doubt=str(doubt))
            if one.terms.despite_doubts and not one.recomputed:
                yield Note("despite-any", decision=one.number)
        made = {record.body["decision"]: record.body for record in self.records if record.kind == "decision"}
        for part in self.own:
            yield _terms_line(part.number, part.departures)
            yield from self._about_runs(part.number, part.after)
            stated = "payout-stated" if part.given else "payout-unchecked"
            yield Note(
                "payout" if part.recomputed else stated,
                decision=part.number,
                after=self._after(made[part.number]["rounds"]),
                money=formatted(part.amount, ","),
                client=self.reader,
            )
            if made[part.number].get("despite_doubts"):
                yield Note("despite-any", decision=part.number)

    def _about_runs(self, decision: int, after: Sequence[tuple[str, str]]) -> Iterator[Note]:
        """Yield lines on the runs before this one on which a decision rests, given or not."""
        for run, head in after:
            if run not in self.earlier:
                yield Note("after-lacking", decision=decision, hash=run, head=head)
                continue
            given = self.earlier[run]
            closed = given.closed[head]
            yield Note(
                "after-given", decision=decision, hash=run, path=given.name, head=head[:16], closed=closed
            )
            if given.decisions:
                yield Note("after-paid", path=given.name, count=given.decisions)

    def _after(self, rounds: int) -> str:
        planned = self.config.training.rounds
        return Note("payouts-after", round=rounds, planned=planned) if rounds < planned else ""


def _about_blame(record: Record) -> Note:
    body, at = record.body, record.seq
    if body["why"] == "share":
        return Note("blamed-share", round=body["round"], client=body["member"], other=body["by"], record=at)
    code = "blamed-complaint" if body["why"] == "complaint" else "blamed-secret"
    return Note(code, round=body["round"], client=body["member"], record=at)


def _both(one: Callable[[], A], other: Callable[[], B]) -> tuple[A, B]:
    """Return the results of two checks; if both fail, raise the error of the earlier record."""
    try:
        first = one()
    except LedgerError as error:
        try:
            other()
        except LedgerError as also:
            raise min(error, also, key=lambda one: one.record or 0) from None
        raise
    return first, other()


def keys_of(record: Record) -> Mapping[str, bytes]:
    """Return the public keys by author, from a ledger's first record."""
    if record.kind != "run" or record.author != SERVER:
        raise LedgerError(f"{record.name}: expected the run's first record", record=record.seq)
    keys = record.body.get("keys")
    try:
        return {} if keys is None else {name: bytes.fromhex(key) for name, key in keys.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise LedgerError(
            f"record {record.seq} (run): its keys cannot be read: {error}", record=record.seq
        ) from error


# ------------------------------------------------------------------------------------------------- payment
# A payout decision is recorded in the run's ledger and signed with the server's key in the run folder.


def _terms_line(decision: int, found: Sequence[Departure]) -> Note:
    """Return the line on whether a decision pays by the terms that members signed."""
    if told := departs(found):
        return Note("terms-departed", decision=decision, departs=told)
    return Note("terms-kept", decision=decision)


def record_decision(
    path: Path, terms: Terms, after: Sequence[Path] = (), heading: Heading | None = None
) -> tuple[Decision, bool]:
    """Verify a run, decide who is paid what, and record the decision.

    Args:
        path: the run folder.
        terms: terms of the decision.
        after: folders of the runs before this one, in order, if the decision is about their rounds too.
        heading: title, consortium, date and currency; what it leaves empty is as in the settings,
            and a date that neither names is today's.

    Returns:
        The decision, and whether it is new. If the last decision has the same terms, rounds and heading, that
        decision is returned and nothing is written; a date that nobody named may differ.

    Raises:
        DoubtfulShares: the reports contradict themselves, and the terms do not say to pay despite that.
        DoesNotFollow: one of the runs does not follow the one before it.
        UnsettledShares: the settlement is not final, or a verdict was not judged anew; its code says which.
    """
    for _ in verify_folder(path):  # only runs that verify are paid
        pass
    config, earlier = of_folder(path), _earlier(after, None, None)
    if terms.score == "PHI":
        _check_judged([path, *after])
    with Folder(path, config, resume=True) as folder:
        whole = joined([*earlier, part_of(folder.ledger)])
        before = decisions_of(folder.ledger, rounds_of(folder.ledger), config, earlier)
        if terms.score != "PHI":
            found = doubts(
                scored_in(whole, terms.utility), game=config.scoring.game, metrics=config.scoring.whole
            )
            check_payable(found, terms.rule, despite=terms.despite_doubts)
        journal = Journal(folder.ledger, _signer(path, folder.ledger))
        account = None
        if terms.score == "PHI":
            account = account_of(folder.ledger, rounds_of(folder.ledger), config)
        named = (heading or Heading()).over(config.heading)
        terms = replace(terms, currency=terms.currency or named.currency)
        made = decide(whole, terms, config, before, after=earlier, account=account)
        check_payable(made.doubts, terms.rule, despite=terms.despite_doubts)
        made = replace(made, heading=named.over(Heading(date=datetime.now(UTC).date().isoformat())))
        if before and _repeats(before[-1], made, dated=bool(named.date)):
            return before[-1], False
        place = 0
        with folder.ledger.transaction():
            for kind, body in made.records(config.scoring.visibility):
                written = journal.write(SERVER, kind, body)
                place = place or written.seq
        return replace(made, record=place), True


def _repeats(last: Decision, made: Decision, *, dated: bool) -> bool:
    """Return whether a decision says what the last one says."""
    heading = last.heading if dated else replace(last.heading, date=made.heading.date)
    return (last.terms, last.rounds, last.after, heading) == (
        made.terms,
        made.rounds,
        made.after,
        made.heading,
    )


def _check_judged(folders: Sequence[Path]) -> None:
    """Raise UnsettledShares if a verdict was not judged anew, because the run has no archive."""
    for path in folders:
        verdicts = snapshot(path / LEDGER).records("verdict")
        if any(True for _ in verdicts) and not (path / ARCHIVE).is_dir():
            raise UnsettledShares(Note("settlement-unjudged", path=str(path)), code="unjudged")


def read_run(path: Path, after: Sequence[Path] = ()) -> tuple[list[Round], list[Decision], str]:
    """Return the rounds, decisions and head of a run that has been verified; ``after`` as above."""
    config, earlier = of_folder(path), [part_of(snapshot(one / LEDGER)) for one in after]
    with Ledger(path / LEDGER, read_only=True) as ledger:
        decisions = decisions_of(ledger, rounds_of(ledger), config, earlier)
        return list(joined([*earlier, part_of(ledger)])), decisions, ledger.head


def read_accounts(path: Path, after: Sequence[Path] = ()) -> list[Account]:
    """Return the accounts of a settled run and those before it; empty unless all of them are settled."""
    found = [part_of(snapshot(one / LEDGER)).account for one in (*after, path)]
    settled = [one for one in found if one is not None]
    return settled if len(settled) == len(found) else []


def _signer(path: Path, ledger: Ledger) -> Sign:
    from fedmerit.identity import load_key, public_key

    keys = first_body(ledger, "run")["keys"]
    if keys is None:
        return lambda author, message: b""
    file = path / "keys" / f"{SERVER}.pem"
    if not file.exists():
        raise StoreError(
            f"{file}: only the holder of the server's key can record a decision; --dry-run prints it"
        )
    key = load_key(file)
    if public_key(key).hex() != keys[SERVER]:
        raise LedgerError(f"{file}: not the server's key according to the ledger")
    return lambda author, message: key.sign(message)
