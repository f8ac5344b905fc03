"""Runs that repeat each other, compared: what training again changes, as one model for terminal and page.

`compared` reads runs, refuses those that are not repeats of each other, and returns a `Comparison`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmerit.config import ReportSettings, differences, of_folder
from fedmerit.errors import NotComparable
from fedmerit.ledger.joined_runs import RULES, RunPart, other_key, part_of
from fedmerit.ledger.records import first_body
from fedmerit.notes import Note, formatted, listed, words
from fedmerit.protocol.terms import REHEARSALS
from fedmerit.report.facts import Facts
from fedmerit.report.source import source_of
from fedmerit.report.text import digits_for, rounds_enough
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.files import LEDGER, read_content, scores_in
from fedmerit.scoring.repeats import Repeats, repeats, spread_factors
from fedmerit.scoring.spreadsheets import FOUND_OUT, SheetForm, check_form
from fedmerit.storage.run_folder import recorded
from fedmerit.verify import verified

MAY_DIFFER = ("run.repeat", "run.device", *(f"report.{key}" for key in ReportSettings.__dataclass_fields__))
"""Settings in which repeats may differ."""

# --------------------------------------------------------------------------------------------- reading runs


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A run, or a file of reports, as one of several that are compared.

    Args:
        name: of its folder or file.
        facts: what happened in it.
        id: of the run; of a file, the hash of its content.
        part: what its ledger says; None for a file.
        pool: the commitment to its test pool; empty for a file.
    """

    name: str
    facts: Facts
    id: str
    part: RunPart | None = None
    pool: Mapping[str, Any] | None = None

    @property
    def repeat(self) -> int | None:
        """Which repeat it is, if it says so."""
        return None if self.part is None else self.part.config.run.repeat

    @property
    def slices(self) -> list[str | None]:
        """The id of the test samples of every round."""
        return [one.slice for one in self.facts.measured]


def compared(
    paths: Sequence[str | Path],
    *,
    utility: str | None = None,
    score: str | None = None,
    missing: Missing | None = None,
    form: SheetForm = FOUND_OUT,
) -> Comparison:
    """Read and verify runs, and compare them.

    Args:
        paths: run folders, or files of reports (.json or .csv).
        utility: by which members are compared; the paid one unless given.
        score: which is summed over rounds; None takes the settled one, or ALPHA without it.
        missing: what a missed round counts; None: as in the runs, otherwise zero.
        form: how CSV files are written, as far as their owner says so.

    Raises:
        NotComparable: they are not repeats of each other.
        LedgerError: a run does not verify.
    """
    runs = [_read(Path(path), utility, score, missing, form) for path in paths]
    if len(runs) < 2:
        only = runs[0].name if runs else ""
        raise NotComparable("expected at least 2 runs, got 1", code="few", first=only, other=only)
    for place, run in enumerate(runs):
        for other in runs[:place]:
            _check_two(other, run)
        _check_whole(runs[0], run, asked=score)
    for run in runs[1:]:
        _check_repeats(runs[0], run)
    return Comparison(tuple(runs))


def _read(
    path: Path, utility: str | None, score: str | None, missing: Missing | None, form: SheetForm
) -> ComparedRun:
    check_form(path, form)
    if (path / LEDGER).is_file():
        ledger, differs = verified(path, [])  # compares only what verifies
        if differs:
            raise differs
        found = recorded(ledger, utility=utility)
        part, pool = part_of(found.ledger), first_body(found.ledger, "pool")
        source = source_of(found.content, found, missing=missing or found.config.payment.missing)
        return ComparedRun(str(path), Facts(source, score=score), part.id, part, pool)
    file = scores_in(path) if path.is_dir() else path
    content = read_content(file, utility=utility, form=form)
    config = of_folder(path) if (path / "config.toml").is_file() else None
    counts = missing or (config.payment.missing if config else "zero")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return ComparedRun(
        str(path), Facts(source_of(content, None, config, missing=counts), score=score), digest
    )


# -------------------------------------------------------------------------------------------- are they alike


def _check_two(one: ComparedRun, other: ComparedRun) -> None:
    """Raise NotComparable if two runs are one, or the same training."""
    who = {"first": one.name, "other": other.name}
    if one.id == other.id:
        raise NotComparable(f"it is {one.name} once more (run {one.id})", code="same", **who)
    if one.part is None or other.part is None or one.part.first["engine"] not in REHEARSALS:
        return
    if one.repeat == other.repeat and one.part.first["m0"] == other.part.first["m0"]:
        told = f"it is the same training as {one.name}, repeat {one.repeat} from the same first model"
        raise NotComparable(told, code="training", **who)


def _check_whole(first: ComparedRun, run: ComparedRun, *, asked: str | None) -> None:
    """Raise NotComparable if a run is not over, or its scores may change."""
    who = {"first": first.name, "other": run.name}
    if unfinished := run.facts.unfinished:
        closed, planned = unfinished
        told = f"it is not over: {closed} of {planned} rounds are closed"
        raise NotComparable(told, code="unfinished", **who)
    source = run.facts.source
    if source.unsettled and asked is None:
        raise NotComparable(f"it is not settled: {source.unsettled}", code="unsettled", **who)
    if run.facts.settled:
        if not source.accounts:
            told = source.unsettled or words("unsettled.not-settled")
            raise NotComparable(f"it has no PHI: {told}", code="unsettled", **who)
        if still := source.accounts[-1].provisional():
            raise NotComparable(f"it is not over: {still}", code="unfinished", **who)
    elif not source.rounds:
        told = f"its members report nothing, so there is no {run.facts.ranked_by}; expected --score PHI"
        raise NotComparable(told, code="score", **who)


def _check_repeats(first: ComparedRun, run: ComparedRun) -> None:
    """Raise NotComparable unless a run differs from the first in training alone."""
    one, other = first.part, run.part

    def refuse(code: str, what: str, expected: object, got: object) -> None:
        if expected != got:
            who = {"first": first.name, "other": run.name}
            raise NotComparable(what, code=code, **who, expected=expected, got=got)

    def kind(part: RunPart | None) -> str:
        return "a file of reports" if part is None else "a run folder"

    refuse("kind", "kind of source", kind(one), kind(other))
    if one is not None and other is not None:
        refuse("engine", "engine", one.first["engine"], other.first["engine"])
        refuse("members", "members", ", ".join(one.config.clients), ", ".join(other.config.clients))
        if one.first["engine"] not in REHEARSALS and (found := other_key(one, other, one.config.clients)):
            name, known, key = found
            refuse("keys", f"key of {name}", known, key)
        for path, expected, got in differences(one.config, other.config):
            if path not in MAY_DIFFER:
                code = "rounds" if path == "training.rounds" else "scoring" if path in RULES else "settings"
                refuse(code, path, f"{expected!r:.100}", f"{got!r:.100}")
        assert first.pool is not None
        assert run.pool is not None
        if first.pool["root"] == run.pool["root"]:
            refuse("data", "fingerprint of the training data", one.first["data"], other.first["data"])
        elif first.slices != run.slices:
            refuse("pool", "test pool", first.pool["root"], run.pool["root"])
    refuse("utility", "utility", first.facts.utility, run.facts.utility)
    refuse("score", "score", first.facts.ranked_by, run.facts.ranked_by)
    refuse("rounds", "rounds with a score", first.facts.total.rounds, run.facts.total.rounds)
    mine, theirs = (tuple(sorted(each.facts.total.clients)) for each in (first, run))
    refuse("members", "members with a score", ", ".join(mine), ", ".join(theirs))
    if first.slices != run.slices:
        refuse("pool", "test samples of the rounds", first.slices, run.slices)


# ------------------------------------------------------------------------------------------------- findings


@dataclass(frozen=True)
class Row:
    """One member over all runs: scores, both spreads, ranks; numbers that are unknown are None."""

    client: str
    mean: float
    interval: tuple[float, float] | None  # of the mean, for training and test set
    scores: tuple[float, ...]
    ranks: tuple[int, ...]
    training: float
    test: float | None
    total: float | None

    @property
    def rank_range(self) -> str:
        """The ranks of all runs: one, or from best to worst."""
        low, high = min(self.ranks), max(self.ranks)
        return str(low) if low == high else f"{low}-{high}"


@dataclass(frozen=True, eq=False)
class Comparison:
    """What training again changed, over runs that repeat each other.

    Args:
        runs: at least two.
        points: whether texts state scores of a measure from 0 to 1 in points, as pages do.
    """

    runs: tuple[ComparedRun, ...]
    points: bool = False

    @cached_property
    def numbers(self) -> Repeats:
        """The arithmetic."""
        return repeats([run.facts.total for run in self.runs])

    @property
    def first(self) -> Facts:
        """The facts of the first run, for what all have in common."""
        return self.runs[0].facts

    @property
    def unit(self) -> int:
        """By what texts multiply scores."""
        return self.first.unit if self.points else 1

    @property
    def digits(self) -> int:
        """Decimals to show for scores of this size."""
        found = digits_for(float(abs(self.numbers.scores).max()))
        return found if self.unit == 1 else max(1, found - 2)

    @property
    def labels(self) -> tuple[str, ...]:
        """A short name for each run: its repeat, or its place where repeats are unknown or twice."""
        known = [run.repeat for run in self.runs]
        numbers = known if None not in known and len(set(known)) == len(known) else range(1, len(known) + 1)
        return tuple(words("compare.run", number=number) for number in numbers)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every member, best mean first."""
        found = self.numbers
        spans, place = found.intervals(), {name: i for i, name in enumerate(found.clients)}
        made = []
        for name in found.average.ranking():
            i = place[name]
            made.append(
                Row(
                    client=name,
                    mean=float(found.mean[i]),
                    interval=None if spans is None else (float(spans[i, 0]), float(spans[i, 1])),
                    scores=tuple(found.scores[:, i].tolist()),
                    ranks=tuple(found.ranks[:, i].tolist()),
                    training=float(found.training[i]),
                    test=None if found.test is None else float(found.test[i]),
                    total=None if found.total is None else float(found.total[i]),
                )
            )
        return tuple(made)

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """What readers should know: what could not be checked, and who missed rounds in some runs only."""
        found = []
        if self.runs[0].part is None:
            found.append(Note("repeats-files"))
        elif self.runs[0].part.first["data"] is None:
            found.append(Note("repeats-machines"))
        elif len({(run.pool or {}).get("root") for run in self.runs}) > 1:
            found.append(Note("repeats-data"))
        for i, name in enumerate(self.numbers.clients):
            covered = [one.coverage[i] for one in self.numbers.runs if one.coverage is not None]
            if len(set(covered)) > 1:
                found.append(Note("repeats-away", client=name))
        return tuple(found)

    # -------------------------------------------------------------------------------------------- sentences

    @property
    def headline(self) -> str:
        """Return in one sentence what training again changes."""
        found, count = self.numbers, self.numbers.count
        swaps = len(found.swaps)
        if not swaps:
            return words("compare.headline-none", runs=count)
        if found.same_rank and found.same_rank[0] == self.rows[0].client:
            first = self.rows[0].client
            return words("compare.headline-first", client=first, runs=count, swaps=swaps, pairs=found.pairs)
        return words("compare.headline-turns", runs=count)

    @property
    def lede(self) -> list[str]:
        """Return what was done, and how large both spreads are over all members."""
        found = self.numbers
        training, test = (None if one is None else self._moved(one) for one in found.overall)
        code = "compare.trained" if self.checked else "compare.trained-unchecked"
        said = words(code, members=len(found.clients), runs=found.count)
        if test is None:
            return [said, words("compare.spread-unsure", training=training)]
        return [said, words("compare.spread", training=training, test=test)]

    @property
    def checked(self) -> bool:
        """Whether all runs are known to have the same data."""
        return not any(
            note.code in ("repeats-files", "repeats-machines", "repeats-data") for note in self.notes
        )

    @property
    def common(self) -> str:
        """Return why the error of the test set is no part of the spread between runs."""
        return words("compare.common-files" if self.runs[0].part is None else "compare.common")

    @property
    def wider(self) -> str:
        """Return what training adds to the interval of a single run; empty without standard errors."""
        training, test = self.numbers.overall
        return words("compare.wider", wider=math.hypot(training, test) / test) if test else ""

    @property
    def rough(self) -> str:
        """Return how well so few runs can know a spread."""
        low, high = spread_factors(self.numbers.freedom)
        return words("compare.rough", runs=self.numbers.count, low=low, high=high)

    @property
    def order(self) -> list[str]:
        """Return which pairs and ranks hold in all runs, and which change."""
        found = self.numbers
        if found.holding == found.pairs:
            said = [words("compare.pairs-all", pairs=found.pairs)]
        else:
            said = [words("compare.pairs-some", holding=found.holding, pairs=found.pairs)]
        same = found.same_rank
        if len(same) == len(found.clients):
            said.append(words("compare.ranks-all"))
        else:
            said.append(words("compare.ranks-some", clients=same) if same else words("compare.ranks-none"))
        if broken := tuple(words("compare.over", better=a, worse=b) for a, b in found.broken):
            said.append(words("compare.broken", pairs=broken))
        elif found.told_apart is not None and found.told_apart.any():
            said.append(words("compare.unbroken"))
        return said

    @property
    def swaps(self) -> list[tuple[str, str, str, str]]:
        """Return the pairs that swap: both names, in how many runs each is above."""
        runs = self.numbers.count
        return [
            (
                one,
                other,
                words("compare.times", times=above, runs=runs),
                words("compare.times", times=below, runs=runs),
            )
            for one, other, above, below in self.numbers.swaps
        ]

    @property
    def chance(self) -> str:
        """Return what a pair that holds proves."""
        return words("compare.chance", runs=self.numbers.count, odds=round(1 / self.numbers.by_chance))

    @property
    def enough(self) -> list[tuple[str, str]]:
        """Return whether there were rounds enough: which runs, and a sentence; runs with the same once."""
        by_sentence: dict[str, list[str]] = {}
        for label, run in zip(self.labels, self.runs, strict=True):
            if told := rounds_enough(run.facts):
                by_sentence.setdefault(told, []).append(label)
        if len(by_sentence) == 1 and len(self.runs) == sum(map(len, by_sentence.values())):
            return [(words("compare.every"), next(iter(by_sentence)))]
        return [(listed(runs, len(runs)), told) for told, runs in by_sentence.items()]

    def score_text(self, value: float | None) -> str:
        """Return a score with its sign."""
        return "-" if value is None else formatted(value * self.unit, f"+.{self.digits}f")

    def mean_text(self, row: Row) -> str:
        """Return a member's mean, with the half width of its interval."""
        if row.interval is None:
            return self.score_text(row.mean)
        return f"{self.score_text(row.mean)} ± {self.spread_text((row.interval[1] - row.interval[0]) / 2)}"

    def spread_text(self, value: float | None) -> str:
        """Return a spread, or a dash."""
        return "-" if value is None else formatted(value * self.unit, f".{self.digits}f")

    def _moved(self, value: float) -> str:
        """Return a spread for a sentence, with its unit."""
        told = self.spread_text(value)
        return told if self.unit == 1 else words("number.points", value=told)

    # ------------------------------------------------------------------------------------------ for programs

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        found, spans = self.numbers, self.numbers.intervals()
        training, test = found.overall
        return {
            "score": self.first.ranked_by,
            "utility": self.first.utility,
            "rounds": self.first.total.rounds,
            "runs": [
                {
                    "name": run.name,
                    "run": run.id,
                    "repeat": run.repeat,
                    "head": None if run.part is None else run.part.head,
                }
                for run in self.runs
            ],
            "clients": list(found.clients),
            "scores": found.scores.tolist(),
            "stderr": None if found.test is None else [_list(one.stderr) for one in found.runs],
            "ranks": found.ranks.tolist(),
            "mean": found.mean.tolist(),
            "interval": _list(spans),
            "training": found.training.tolist(),
            "freedom": found.freedom,
            "test": _list(found.test),
            "total": _list(found.total),
            "mean_stderr": _list(found.mean_error),
            "overall": {"training": training, "test": test},
            "same_rank": list(found.same_rank),
            "pairs": found.pairs,
            "holding": found.holding,
            "swaps": [
                {"client": one, "other": other, "above": above, "below": below}
                for one, other, above, below in found.swaps
            ],
            "broken": [{"better": better, "worse": worse} for better, worse in found.broken],
            "by_chance": found.by_chance,
            "convergence": [_converged(run.facts) for run in self.runs],
            "notes": list(self.notes),
        }


def _list(values: Any) -> Any:
    return None if values is None else values.tolist()


def _converged(facts: Facts) -> dict[str, Any] | None:
    found = facts.convergence
    return None if found is None else vars(found) | {"settled": found.settled(found.since)}
