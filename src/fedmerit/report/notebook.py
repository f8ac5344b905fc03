"""A run as objects and frames, for Python and for notebooks: what `fedmerit.load` returns."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedmerit.config import Config
from fedmerit.errors import LedgerError
from fedmerit.ledger.decisions import Decision, decisions_of
from fedmerit.notes import Note, words
from fedmerit.report.exports import as_html, columns, frame_of
from fedmerit.report.facts import Facts
from fedmerit.report.source import source_of
from fedmerit.report.text import money_text, share_text
from fedmerit.scoring.accumulate import number_of
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports, Scores
from fedmerit.storage.run_folder import Recorded, recorded
from fedmerit.verify import verified

Part = Literal["scores", "rounds", "decisions"]


def load(folder: str | Path) -> Run:
    """Return the run in a folder: its scores, rounds and decisions, from its ledger, which is verified first.

    Args:
        folder: a run folder, of a rehearsal or of a run between machines, over or not.

    Raises:
        LedgerError: the folder holds no run, or its ledger does not verify.
        StoreError: no round is scored yet.
    """
    if Path(folder).is_file():
        raise LedgerError(
            f"{folder}: expected a run folder, got a file; fedmerit.read reads files of reports"
        )
    checks: list[Note] = []
    ledger, differs = verified(folder, checks)
    if differs:  # nothing is read from that file
        checks.append(Note("problem", what=str(differs)))
    return Run(Path(folder), recorded(ledger), tuple(checks))


@dataclass(frozen=True)
class RunRound:
    """One round of a run.

    Args:
        number: of the round, from 1.
        included: members whose updates are in the sum.
        aborted: why the round came to nothing; empty if it did not.
        scores: of this round alone: PHI as settled, otherwise ALPHA as reported; None if there are none.
        reports: what members reported of the paid utility; None if they reported nothing.
    """

    number: int
    included: tuple[str, ...]
    aborted: str
    scores: Scores | None
    reports: Reports | None


@dataclass(frozen=True, eq=False)
class Run:
    """A run that was read from its folder; a notebook shows its scores and its last decision.

    ``checks`` are the lines of `fedmerit verify`. ``record`` is the ledger as it was read.
    """

    folder: Path
    record: Recorded
    checks: tuple[Note, ...] = ()

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.record.config

    @property
    def clients(self) -> tuple[str, ...]:
        """The members, in the order of the roster."""
        return self.config.clients

    @property
    def head(self) -> str:
        """The last digest of the ledger."""
        return self.record.ledger.head

    @cached_property
    def scores(self) -> Scores:
        """The score by which members are ranked and paid, summed over rounds: PHI if settled, else ALPHA."""
        return Facts(self._source).total

    @cached_property
    def rounds(self) -> tuple[RunRound, ...]:
        """All closed rounds in order."""
        reported = {number_of(one, k): one for k, one in enumerate(self._source.rounds, start=1)}
        settled = {one.round: one.scores for one in self._source.settled_rounds}
        found = []
        for one in self.record.rounds:
            reports = reported.get(one.number)
            scores = settled.get(one.number)
            if scores is None and not settled and reports is not None:
                scores = alpha(reports)
            found.append(RunRound(one.number, one.included, one.aborted, scores, reports))
        return tuple(found)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Who is paid what, in the order in which it was decided; the last decision counts."""
        return tuple(decisions_of(self.record.ledger, self.record.rounds, self.config))

    def frame(self, of: Part = "scores") -> Any:
        """Return a pandas frame: scores by member, scores by round and member, or decisions by member."""
        return frame_of(self.columns(of))

    def columns(self, of: Part = "scores") -> dict[str, list[Any]]:
        """Return what `frame` shows as lists, one per column."""
        if of == "scores":
            return columns(self.scores)
        rows: list[dict[str, Any]] = []
        if of == "rounds":
            for one in self.rounds:
                scores = {} if one.scores is None else one.scores.as_dict()
                kind = None if one.scores is None else one.scores.score
                for name in self.clients:
                    row = {"client": name, "summed": name in one.included, "score": kind}
                    rows.append({"round": one.number, **row, "value": scores.get(name)})
            return _turned(rows, ("round", "client", "summed", "score", "value"))
        for decision in self.decisions:
            terms = {"decision": decision.number, "rule": decision.terms.rule}
            for name, amount in decision.paid.items():
                rows.append({**terms, "client": name, "share": decision.shares[name], "payout": amount})
        return _turned(rows, ("decision", "rule", "client", "share", "payout"))

    def __repr__(self) -> str:
        closed, planned = len(self.rounds), self.config.training.rounds
        return f"Run({str(self.folder)!r}: {len(self.clients)} members, {closed} of {planned} rounds)"

    def _repr_html_(self) -> str:
        told = words(
            "notebook.run",
            path=str(self.folder), members=len(self.clients), rounds=len(self.rounds),
            planned=self.config.training.rounds,
        )  # fmt: skip
        return f"<p>{html.escape(told)}</p>{as_html(self.scores)}{self._paid()}"

    def _paid(self) -> str:
        """Return the last decision as a table, best paid first; empty if nothing was decided."""
        if not self.decisions:
            return ""
        last = self.decisions[-1]
        rows = "".join(
            f'<tr><th scope="row">{html.escape(name)}</th>'
            f"<td>{share_text(last.shares[name], 2)}</td><td>{amount:,.2f}</td></tr>"
            for name, amount in sorted(last.paid.items(), key=lambda item: (-item[1], item[0]))
        )
        budget = money_text(last.paid.budget, last.paid.currency or "")
        told = words("notebook.decision", number=last.number, budget=budget, rule=last.terms.rule)
        headings = (words("notebook.client"), words("terminal.share"), words("terminal.payout"))
        head = "".join(f'<th scope="col">{one}</th>' for one in headings)
        return (
            f"<table><caption>{html.escape(told)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )

    @cached_property
    def _source(self) -> Any:
        return source_of(self.record.content, self.record, missing=self.config.payment.missing)


def _turned(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return rows as columns."""
    return {name: [row[name] for row in rows] for name in names}
