"""Verification of a run, finished or not, from its folder or from a copy of its ledger. It writes nothing.

`examine_machine` checks what a run needs on this machine.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict, Unpack

from fedmerit.config import VERSION
from fedmerit.errors import CopyDiffers, KeyFileError, LedgerError, StoreError
from fedmerit.identity import SERVER, Member, Roster, read_roster
from fedmerit.ledger.chain import LEDGER, START, Copy, Ledger, Record, reading
from fedmerit.ledger.decisions import Decision, OwnPart, departs
from fedmerit.ledger.rounds import aborted, unreported
from fedmerit.ledger.run import Run, check_head, check_kept, heads_signed, opening_of, replay
from fedmerit.notes import EXTRAS, Note, formatted, install, words
from fedmerit.protocol.direction import Gradient
from fedmerit.protocol.terms import EMBEDDED, roster_terms
from fedmerit.settings import planted
from fedmerit.storage.checks import (
    FOLLOW_FROM,
    about_scores,
    check_archive,
    check_checkpoints,
    check_config,
    check_scores,
    check_verdicts,
    read_scores,
)
from fedmerit.storage.member_state import SPARE
from fedmerit.storage.run_folder import (
    ARCHIVE,
    FolderArchive,
    examine_disk,
    head_of,
)

# ---------------------------------------------------------------------------------------------------- keys


def about_keys(run: Run, roster: Roster | None, name: str) -> Iterator[Note]:
    """Compare a run's keys with the reader's own roster, or say that they were not compared.

    ``name`` is that of the roster, for messages. Raise LedgerError, which names members whose keys differ.
    """
    terms = run.first.terms
    if roster is not None:
        used = next((step for step in roster.chain if step.hash.hex() == terms["roster"]), roster)
        _check(run, used, name)
        if run.rehearsal:
            holder = words(f"holder.{run.first.engine}")
            yield Note("keys-held", roster=name, hash=used.hash.hex(), holder=holder)
        else:
            yield Note("keys", roster=name, hash=used.hash.hex())
        if used is not roster:
            yield Note("keys-earlier", roster=name, changes=roster.chain.index(used))
    elif run.signed and not run.rehearsal:
        yield _how_to_compare(run)
    if before := terms.get("previous"):
        yield Note("roster-before", hash=before)


def _check(run: Run, roster: Roster, name: str) -> None:
    keys, clients, terms = run.first.keys, run.clients, run.first.terms
    if not keys:
        raise LedgerError(f"an unsigned ledger has no keys, so there is nothing to compare with {name}")
    listed, wrong = {member.name: member.key for member in roster.members}, []
    if roster.server is not None and bytes.fromhex(keys[SERVER]) != roster.server:
        wrong.append(_two_keys("the server", keys[SERVER], roster.server))
    for member in dict.fromkeys((*clients, *listed)):
        if member not in listed:
            wrong.append(f"{member} is not on it")
        elif member not in clients:
            wrong.append(f"{member} is on it, but not in the run")
        elif bytes.fromhex(keys[member]) != listed[member]:
            wrong.append(_two_keys(member, keys[member], listed[member]))
    if wrong:
        made = "; a rehearsal makes its own keys" if run.rehearsal else ""
        raise LedgerError(f"its keys do not match {name}: {'; '.join(wrong)}{made}")
    weights = run.config.roster_weights
    if weights and weights != roster.weights:
        raise LedgerError(f"its public weights do not match {name}")
    if terms["roster"] != roster.hash.hex():
        raise LedgerError(
            f"its members agreed to a roster with hash {terms['roster']}, but {name} has "
            f"{roster.hash.hex()}: names and keys are the same; public weights, server, quorum or the roster "
            "before it are not"
        )
    if {key: terms[key] for key in ("previous", "quorum") if key in terms} != roster_terms(roster):
        raise LedgerError(f"its terms state another quorum, or another roster before it, than {name}")


def _two_keys(whose: str, key: str, listed: bytes) -> str:
    return f"the key of {whose} is {key[:16]}..., on the roster {listed.hex()[:16]}..."


def _how_to_compare(run: Run) -> Note:
    """Say how a reader can compare the keys; give the roster's hash only if it is the hash of these keys."""
    terms, keys = run.first.terms, run.first.public
    assert keys is not None
    before = terms.get("previous")
    weights = run.config.roster_weights
    members = [Member(name, keys[name], weights.get(name)) for name in run.clients]
    try:
        made = Roster(members, keys[SERVER], before and bytes.fromhex(before), terms.get("quorum"))
    except KeyFileError as error:
        raise LedgerError(f"its keys do not form a roster: {error}") from error
    if terms["roster"] == made.hash.hex():
        return Note("keys-hashed", hash=made.hash.hex())
    if weights:
        raise LedgerError("its members agreed to a roster that its keys and public weights do not form")
    return Note("keys-weighted")


# -------------------------------------------------------------------------------------------------- verify

ATTEMPTS = 5
"""How often to read a folder in which a process keeps writing."""
PAUSE = 0.3
"""Seconds between two readings."""


class Against(TypedDict, total=False):
    """What a reader compares a ledger with."""

    head: str | None  # that somebody wrote down; it must be on the chain
    heads: str | Path | None  # a member's own file of what it was shown, did and said: KEY.state/RUN/heads
    member: str | None  # who asks: its own part is included
    roster: Roster | str | Path | None  # the reader's own; else signatures are checked with the ledger's keys
    archive: str | Path | None  # of a settlement: sums, models and directions are recomputed from it
    gradient: Gradient | None  # with an archive, recomputes every direction


def verify_folder(path: str | Path, **asked: Unpack[Against]) -> Iterator[Note]:
    """Check a run folder, and yield what was found line by line; a process may be writing in it meanwhile.

    The checks cover chain and signatures, whether records fit together, the scores and payouts in the ledger,
    and whether ``config.toml``, checkpoints and score files agree with it. Score files may lack the last
    rounds, because the ledger is the record. Verdicts are judged by the folder's archive or the given one.

    Raises:
        CopyDiffers: a score file is wrong, but the ledger is sound and has been described in full.
        LedgerError: names the first record, or the place in a file, that is wrong.
    """
    lines: list[Note] = []
    wrong: LedgerError | None
    try:
        _, wrong = _read(Path(path), lines, asked)
    except LedgerError as error:
        wrong = error
    yield from lines
    if wrong is not None:
        raise wrong


def verified(
    folder: str | Path, found: list[Note], known: Run | None = None
) -> tuple[Run, CopyDiffers | None]:
    """Verify a run folder; return the run exactly as it was verified, and how a score file differs from it.

    ``found`` gets the lines of :func:`verify_folder`, those before an error too. ``known`` is a run that was
    verified before: while its head is that of the ledger, its records are not read again. Raise StoreError
    if the ledger is empty.
    """
    path = Path(folder)
    if head_of(path / LEDGER) == START.hex():
        raise StoreError(f"{folder}: no round is scored yet: its ledger is empty")
    return _read(path, found, {}, known)


def _read(
    path: Path, found: list[Note], asked: Against, known: Run | None = None
) -> tuple[Run, CopyDiffers | None]:
    """Fold the ledger of a folder; return the run, and how a score file differs. ``found`` gets the lines."""
    file, before = path / LEDGER, ""
    for attempt in range(1, ATTEMPTS + 1):
        lines: list[Note] = []
        read = head_of(file)
        try:
            files = read_scores(path)  # before the ledger: files must not be newer
            if known is not None and known.head == read:
                run = known
            else:
                with Ledger(file, read_only=True) as ledger:
                    run = replay(ledger, member=asked.get("member"))
            own = path / ARCHIVE if (path / ARCHIVE).is_dir() else None
            lines.extend(_lines(run, asked, own))
            check_config(path, run.config)
            lines.extend(check_checkpoints(path, run.rounds))
            late = check_scores(path, files, run)
        except LedgerError as error:
            if head_of(file) == read:
                found.extend(lines)
                if isinstance(error, CopyDiffers):
                    found.extend((*about_money(run, asked.get("member")), Note("head", head=run.head)))
                    return run, error
                raise
            if attempt == ATTEMPTS:
                raise LedgerError(
                    f"{path}: a process keeps writing in this folder: its ledger grew during each of "
                    f"{ATTEMPTS} readings; verify when that process is done. The last reading found: {error}"
                ) from error
        else:
            same = read == before or not late
            if same or attempt == ATTEMPTS:
                lines.extend(about_scores(path, files, late, run.config, running=not same))
                found.extend((*lines, *about_money(run, asked.get("member")), Note("head", head=run.head)))
                return run, None
        before = read
        time.sleep(PAUSE)
    raise AssertionError("the last attempt returns or raises")


def verify_copy(path: str | Path, **asked: Unpack[Against]) -> Iterator[Note]:
    """Check a copy of a ledger (JSON lines), as :func:`verify_folder` checks the ledger of a folder.

    A copy for one member withholds what others reported: chain, signatures and order are checked for all
    records, scores and payouts only for that member. Of a copy without the end of the run, a line with the
    code "part" stands for the scores.
    """
    copy, member = Copy(path), asked.get("member")
    run = replay(copy, member=member)
    yield from _lines(run, asked, None)
    if run.end is None:
        yield Note("part", record=len(copy), closed=len(run.rounds))
    elif run.reader is None:
        yield Note(FOLLOW_FROM[run.config.scoring.method])
    if run.reader is not None:
        if run.end is not None:
            yield Note("scores-own", client=run.reader)
        yield Note("withheld", records=sum(bool(record.withheld) for record in run.records))
    yield from about_money(run, member)
    yield Note("head", head=run.head)


def verified_run(source: Path, key: bytes | None = None) -> Run:
    """Verify a run folder, or a member's copy, which its owner reads, whose public key this is."""
    if is_copy(source):
        copy = Copy(source)
        own = [
            name
            for name, known in (opening_of(copy)[0].public or {}).items()
            if known == key and name != SERVER
        ]
        return replay(copy, member=own[0] if own else None)
    run, differs = verified(source, [])
    if differs:
        raise differs
    return run


def is_copy(source: Path) -> bool:
    """Return whether this names an exported ledger, not a run folder."""
    return source.suffix == ".jsonl" and not source.is_dir()


# --------------------------------------------------------------------------------------------- in lines


def _lines(run: Run, asked: Against, judge: Path | None) -> Iterator[Note]:
    own = asked.get("roster")
    roster = read_roster(own) if isinstance(own, str | Path) else own
    with reading(run.records[0]):
        keys = list(about_keys(run, roster, "the roster" if isinstance(own, Roster) else str(own)))
    yield Note("chain-signed" if run.signed else "chain", records=len(run.records))
    if not run.signed:
        yield Note("unsigned")
    elif run.rehearsal:
        yield Note("rehearsal", holder=words(f"holder.{run.first.engine}"))
    else:
        yield Note("members", joined=len(run.joined), members=len(run.clients))
    if faults := planted(run.config.corruption):
        yield faults
    yield from keys
    if run.signed:
        yield heads_signed(run)
    yield from _compared(run, asked)
    yield _about_rounds(run)
    yield from map(_about_blame, run.of("blame"))
    if run.settlement is not None:
        yield from run.settlement.lines(judged=bool(judge or asked.get("archive")))
    if run.first.moves:
        yield Note("moves")
    for closed in run.rounds:
        for name, how in closed.differences().items():
            yield Note("differs", round=closed.number, client=name, how=how)
    if run.config.analysis:
        yield Note("analysis")
    yield from _judged(run, asked, judge)


def _compared(run: Run, asked: Against) -> Iterator[Note]:
    if (head := asked.get("head")) is not None:
        yield Note("on-chain", head=head.lower()[:16], place=check_head(head, run).words)
    if (heads := asked.get("heads")) is not None:
        if run.first.engine == EMBEDDED:
            raise LedgerError(
                "says that it is a rehearsal in one process, where no member keeps a file of its own: "
                "if this file is yours, this is not the ledger of your run"
            )
        yield from check_kept(Path(heads), run)
    if (member := asked.get("member")) is not None and run.signed:
        own = run.heads.get(member)
        yield Note("signed", client=member, place=own.words) if own else Note("signed-none", client=member)


def _judged(run: Run, asked: Against, judge: Path | None) -> Iterator[Note]:
    """Yield lines on what an archive shows: verdicts by the run's own one, the rest if it was asked for."""
    whole = run.settlement is not None and run.reader is None
    archive = asked.get("archive")
    if archive is None:
        if judge is not None and whole:
            yield from check_verdicts(FolderArchive(judge), run)
        return
    if not whole:
        raise LedgerError("an archive is checked with the whole ledger of a run that was settled")
    path = Path(archive)
    if not path.is_dir():
        raise LedgerError(f"{path}: expected the folder of an archive")
    yield from check_archive(FolderArchive(path), run, asked.get("gradient"))


def _about_rounds(run: Run) -> Note:
    closed, planned = len(run.rounds), run.config.training.rounds
    gone, without = len(aborted(run.rounds)), unreported(run.rounds)
    if not without:
        return Note("rounds", closed=closed, planned=planned, aborted=gone)
    unheard = len(without)
    return Note(
        "rounds-unreported", closed=closed, planned=planned, aborted=gone, unreported=unheard, rounds=without
    )


def _about_blame(record: Record) -> Note:
    body, at = record.body, record.seq
    if body["why"] == "share":
        return Note("blamed-share", round=body["round"], client=body["member"], other=body["by"], record=at)
    code = "blamed-complaint" if body["why"] == "complaint" else "blamed-secret"
    return Note(code, round=body["round"], client=body["member"], record=at)


def about_money(run: Run, member: str | None = None) -> Iterator[Note]:
    """Yield lines on the payout decisions, which were recomputed; on a member's own part in its copy."""
    made_or_own: list[Decision | OwnPart] = [*run.decisions, *run.own]
    planned = run.config.training.rounds
    for made in made_or_own:
        number, rounds, departed = made.number, made.rounds, departs(made.departures)
        after = Note("payouts-after", round=rounds, planned=planned) if rounds < planned else ""
        if departed:
            yield Note("terms-departed", decision=number, departs=departed)
        else:
            yield Note("terms-kept", decision=number)
        if isinstance(made, Decision):
            yield from _about_payouts(made, member, after)
        else:
            code = "payout" if made.recomputed else "payout-stated"
            money = formatted(made.amount, ",")
            yield Note(code, decision=number, after=after, money=money, client=run.reader)
            if made.terms.despite_doubts:
                yield Note("despite-any", decision=number)
        if clients := run.approved(number):
            yield Note("approved", decision=number, clients=clients, members=len(run.clients))


def _about_payouts(decision: Decision, member: str | None, after: str) -> Iterator[Note]:
    paid, number = decision.paid, decision.number
    mine, currency = "", f" {paid.currency}" if paid.currency else ""
    if member is not None:
        amount = paid.by_client.get(member, Decimal(0))
        mine = Note("payouts-mine", amount=amount, currency=currency, client=member)
    yield Note(
        "payouts",
        decision=number,
        record=decision.record,
        instead=Note("payouts-instead", decision=decision.replaces) if decision.replaces else "",
        after=after,
        budget=paid.budget,
        currency=currency,
        rule=decision.terms.rule,
        mine=mine,
    )
    despite = "despite" if decision.terms.despite_doubts else "despite-unsaid"
    for doubt in decision.overruled:
        yield Note(despite, decision=number, doubt=str(doubt))


# -------------------------------------------------------------------------------------------- this machine

SLACK = 86_400
"""Seconds by which a file may be newer than the clock: copies keep the time of another machine."""


def examine_machine() -> Iterator[Note]:
    """Check what a run in this folder needs of the machine; "problem" is the code of faults."""
    yield Note("machine", python=platform.python_version(), version=VERSION, system=platform.platform())
    for extra, packages in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        if missing := [package for package, number in versions.items() if not number]:
            yield Note("machine-without", extra=extra, packages=missing, install=install(extra))
        else:
            named = [f"{package} {number}" for package, number in versions.items()]
            yield Note("machine-extra", extra=extra, packages=named)
    yield _processor()
    ours = Path(__file__).parent.rglob("*.py")
    now, newest = time.time(), max(path.stat().st_mtime for path in ours)
    if newest > now + SLACK:
        fault = f"the clock says {_utc(now)}, but files of fedmerit are from {_utc(newest)}: set the clock"
        yield Note("problem", what=fault)
    yield Note("machine-clock", clock=_utc(now))
    yield from examine_disk(Path.cwd(), SPARE)


def _version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> Note:
    """Return on what a run would train."""
    cores = os.cpu_count() or 1
    if _version("torch"):
        import torch

        if torch.cuda.is_available():
            return Note("machine-gpu", gpu=torch.cuda.get_device_name(), cores=cores)
    return Note("machine-cpu", cores=cores)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
