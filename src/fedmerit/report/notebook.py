"""A run as objects and frames, for Python and for notebooks: what `fedmerit.load` returns."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedmerit.config import Config
from fedmerit.errors import LedgerError
from fedmerit.files.documents import frame_of, html_table, scores_columns, scores_html
from fedmerit.ledger.decisions import Decision
from fedmerit.ledger.run import Run
from fedmerit.notes import Note, words
from fedmerit.report.facts import Facts
from fedmerit.report.source import source_of
from fedmerit.report.text import money_text, share_text
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports, Scores
from fedmerit.verify import verified

Part = Literal["scores", "rounds", "decisions"]


def load(folder: str | Path) -> LoadedRun:
    """Return the run in a folder: its scores, rounds and decisions, from its ledger, which is verified first.

    Raises:
        LedgerError: the folder holds no run, or its ledger does not verify.
        StoreError: no round is scored yet.
    """
    if Path(folder).is_file():
        raise LedgerError(
            f"{folder}: expected a run folder, got a file; fedmerit.read reads files of reports"
        )
    checks: list[Note] = []
    run, differs = verified(folder, checks)
    if differs:  # nothing is read from that file
        checks.append(Note("problem", what=str(differs)))
    return LoadedRun(Path(folder), run, Facts(source_of(run)), tuple(checks))


@dataclass(frozen=True)
class RunRound:
    """One round of a run; what there is not is None."""

    number: int  # from 1
    included: tuple[str, ...]  # whose updates are in the sum
    aborted: str  # why the round came to nothing; empty if it did not
    scores: Scores | None  # of this round alone: PHI as settled, otherwise ALPHA as reported
    reports: Reports | None  # of the paid utility


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run that was read from its folder; a notebook shows its scores and its last decision.

    ``record`` is what its ledger says, ``checks`` are the lines of `fedmerit verify`.
    """

    folder: Path
    record: Run
    facts: Facts
    checks: tuple[Note, ...] = ()

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.record.config

    @property
    def clients(self) -> tuple[str, ...]:
        """The members, in the order of the roster."""
        return self.record.clients

    @property
    def head(self) -> str:
        """The last digest of the ledger."""
        return self.record.head

    @property
    def scores(self) -> Scores:
        """The score by which members are ranked and paid, summed over rounds: PHI if settled, else ALPHA."""
        return self.facts.total

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Who is paid what, in the order in which it was decided; the last decision counts."""
        return self.record.decisions

    @cached_property
    def rounds(self) -> tuple[RunRound, ...]:
        """All closed rounds in order."""
        reported = self.facts.reported
        settled = {one.round: one.scores for one in self.facts.source.settled_rounds}
        found = []
        for closed in self.record.rounds:
            reports, scores = reported.get(closed.number), settled.get(closed.number)
            if not settled and reports is not None:
                scores = alpha(reports)
            found.append(RunRound(closed.number, closed.included, closed.aborted, scores, reports))
        return tuple(found)

    def frame(self, of: Part = "scores") -> Any:
        """Return a pandas frame: scores by member, scores by round and member, or decisions by member."""
        return frame_of(self.columns(of))

    def columns(self, of: Part = "scores") -> dict[str, list[Any]]:
        """Return what `frame` shows as lists, one per column."""
        if of == "scores":
            return scores_columns(self.scores)
        rows: list[tuple[Any, ...]] = []
        if of == "rounds":
            names = ("round", "client", "summed", "score", "value")
            for closed in self.rounds:
                score = None if closed.scores is None else closed.scores.score
                values = {} if closed.scores is None else closed.scores.as_dict()
                for name in self.clients:
                    rows.append((closed.number, name, name in closed.included, score, values.get(name)))
        else:
            names = ("decision", "rule", "client", "share", "payout")
            for decision in self.decisions:
                for name, amount in decision.paid.items():
                    share = decision.shares[name]
                    rows.append((decision.number, decision.terms.rule, name, share, amount))
        return {name: [row[k] for row in rows] for k, name in enumerate(names)}

    def __repr__(self) -> str:
        closed, planned = len(self.rounds), self.config.training.rounds
        return f"Run({str(self.folder)!r}: {len(self.clients)} members, {closed} of {planned} rounds)"

    def _repr_html_(self) -> str:
        members, rounds, planned = len(self.clients), len(self.rounds), self.config.training.rounds
        text = words("notebook.run", path=str(self.folder), members=members, rounds=rounds, planned=planned)
        return f"<p>{html.escape(text)}</p>{scores_html(self.scores)}{self._paid()}"

    def _paid(self) -> str:
        """Return the last decision as a table, best paid first; empty if nothing was decided."""
        if not self.decisions:
            return ""
        last = self.decisions[-1]
        paid = sorted(last.paid.items(), key=lambda item: (-item[1], item[0]))
        rows = [(name, share_text(last.shares[name], 2), f"{amount:,.2f}") for name, amount in paid]
        budget = money_text(last.paid.budget, last.paid.currency or "")
        caption = words("notebook.decision", number=last.number, budget=budget, rule=last.terms.rule)
        headings = (words("notebook.client"), words("terminal.share"), words("terminal.payout"))
        return html_table(caption, headings, rows)
