"""Runs that follow each other, and are counted as one: each goes on with the model that the last one left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate as accumulated
from typing import Any

from fedmerit.config import Config, differences
from fedmerit.errors import DoesNotFollow, LedgerError
from fedmerit.identity import SERVER
from fedmerit.ledger.account import Account, account_of
from fedmerit.ledger.chain import Records
from fedmerit.ledger.records import config_of, first_body, rounds_of
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.terms import REHEARSALS
from fedmerit.scoring.files import LEDGER
from fedmerit.scoring.validate import two_spellings

RULES = (*(f"scoring.{key}" for key in ("utilities", "game", "visibility", "method")), "payment.missing")
"""Settings that say what a score is; runs that are counted or compared together have the same."""


@dataclass(frozen=True)
class RunPart:
    """A run, up to some head of its ledger, as one of several that are counted as one."""

    name: str  # of its folder or file, for messages
    first: Mapping[str, Any]  # the body of its first record
    config: Config
    rounds: tuple[Round, ...]
    head: str
    closed: Mapping[str, int]  # head -> rounds closed by then
    decisions: int = 0  # of its own, which a decision in a later run does not replace
    account: Account | None = None  # of its settlement, if there is one

    @property
    def id(self) -> str:
        """The id of the run."""
        return str(self.first["run"])

    def upto(self, head: str) -> RunPart:
        """Return the run as it was at a head; raise LedgerError if that is not on its chain."""
        if head not in self.closed:
            raise LedgerError(
                f"rests on run {self.id} up to head {head}, which is not on the chain of {self.name}"
            )
        return replace(self, rounds=self.rounds[: self.closed[head]], head=head)


def part_of(ledger: Records) -> RunPart:
    """Return the run of a ledger up to its last head."""
    kinds = [record.kind for record in ledger.records()]
    closed = accumulated(kind == "round" for kind in kinds)
    heads = (record.digest.hex() for record in ledger.records())
    config, rounds = config_of(ledger), rounds_of(ledger)
    return RunPart(
        name=str(ledger.path.parent if ledger.path.name == LEDGER else ledger.path),
        first=first_body(ledger, "run"),
        config=config,
        rounds=tuple(rounds),
        head=ledger.head,
        closed=dict(zip(heads, closed, strict=True)),
        decisions=kinds.count("decision"),
        account=account_of(ledger, rounds, config),
    )


def joined(runs: Sequence[RunPart]) -> tuple[Round, ...]:
    """Return the rounds of runs that follow each other, numbered on; raise DoesNotFollow if they do not."""
    for place, run in enumerate(runs):
        for other in runs[:place]:
            if other.id == run.id:
                raise _apart(other, run, "same", f"both are run {run.id}; expected two runs")
        if place:
            _check_follows(runs[place - 1], run)
    return numbered_on(runs[:-1], runs[-1].rounds)


def numbered_on(before: Sequence[RunPart], rounds: Sequence[Round]) -> tuple[Round, ...]:
    """Return the rounds of runs before this one, and then its own, numbered on."""
    found: list[Round] = []
    for own in (*(run.rounds for run in before), rounds):
        past = len(found)
        since = past + 1 if past else None
        found += [replace(one, number=past + one.number, since=since) for one in own]
    return tuple(found)


def _apart(earlier: RunPart, later: RunPart, code: str, why: str) -> DoesNotFollow:
    return DoesNotFollow(why, earlier=earlier.name, later=later.name, code=code)


def _check_follows(earlier: RunPart, later: RunPart) -> None:
    """Raise DoesNotFollow unless a run goes on where another stopped, under the same rules."""
    if not earlier.rounds:
        raise _apart(earlier, later, "empty", f"no round is closed in {earlier.name}; leave it out")
    ends, begins = str(earlier.rounds[-1].body["m"]), str(later.first["m0"])
    if ends != begins and later.rounds and later.rounds[-1].body["m"] == earlier.first["m0"]:
        raise _apart(earlier, later, "order", f"it is the other way round; give {later.name} first")
    one, two = earlier.first, later.first
    if one["engine"] != two["engine"]:
        told = f"expected engine {one['engine']}, as in {earlier.name}, got {two['engine']}"
        raise _apart(earlier, later, "engine", told)
    _check_members(earlier, later)
    for path, expected, came in differences(earlier.config, later.config):
        if path in RULES:
            told = f"expected {path} = {expected!r}, as in {earlier.name}, got {came!r}"
            raise _apart(earlier, later, "scoring", told)
    if ends != begins:
        told = f"expected the model {ends}, with which round {len(earlier.rounds)} of {earlier.name} ended"
        raise _apart(earlier, later, "model", f"{told}, as its first model, got {begins}")


def other_key(one: RunPart, other: RunPart, names: Iterable[str]) -> tuple[str, Any, Any] | None:
    """Return the first of these names with another key in another run, with both keys; None if none has."""
    known, keys = one.first["keys"] or {}, other.first["keys"] or {}
    for name in names if one.first["engine"] in REHEARSALS else (SERVER, *names):
        if known.get(name) != keys.get(name):
            return name, known.get(name), keys.get(name)
    return None


def _check_members(earlier: RunPart, later: RunPart) -> None:
    """Raise DoesNotFollow unless both runs have one roster, or the later one has the next."""
    one, two = (run.first.get("terms", {}) for run in (earlier, later))
    before, here = one.get("roster"), two.get("roster")
    if before != here and (before is None or two.get("previous") != before):
        came = f"{here} after {two.get('previous')}"
        told = f"expected the roster {before} of {earlier.name}, or the one right after it, got {came}"
        raise _apart(earlier, later, "roster", told)
    names = dict.fromkeys((*earlier.config.clients, *later.config.clients))
    if alike := two_spellings(names):
        told = f"expected one spelling of each name, got {alike[0]!r} and {alike[1]!r}"
        raise _apart(earlier, later, "names", told)
    if before == here and (found := other_key(earlier, later, names)):  # a next roster may give another key
        name, expected, got = found
        told = f"expected the key {expected} of {name}, as in {earlier.name}, got {got}"
        raise _apart(earlier, later, "keys", told)
