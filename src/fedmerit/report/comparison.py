"""Runs that repeat each other, compared: what training again changes, as one model for terminal and page.

`compared` reads runs, refuses those that are not repeats of each other, and returns a `Comparison`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmerit.config import differences
from fedmerit.errors import NotComparable
from fedmerit.files.sheets import FOUND_OUT, SheetForm
from fedmerit.identity import SERVER
from fedmerit.ledger.chain import scores_in
from fedmerit.ledger.run import Run
from fedmerit.notes import Note, digits_for, formatted, listed, words
from fedmerit.protocol.terms import REHEARSALS
from fedmerit.report.facts import Facts
from fedmerit.report.source import read_source
from fedmerit.report.text import rounds_enough
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.sampling import spread_factors
from fedmerit.scoring.uncertainty import Repeats, repeats
from fedmerit.settings import ReportSettings

MAY_DIFFER = ("run.repeat", "run.device", *(f"report.{key}" for key in ReportSettings.__dataclass_fields__))
"""Settings in which repeats may differ."""
RULES = (*(f"scoring.{key}" for key in ("utilities", "game", "visibility", "method")), "payment.missing")
"""Settings that say what a score is."""

# --------------------------------------------------------------------------------------------- reading runs


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A run, or a file of reports, as one of several that are compared."""

    name: str  # of its folder or file
    facts: Facts
    id: str  # of the run; of a file, the hash of its content

    @property
    def run(self) -> Run | None:
        """What its ledger says; None for a file."""
        return self.facts.source.run

    @property
    def repeat(self) -> int | None:
        """Which repeat it is, if it says so."""
        return None if self.run is None else self.run.config.run.repeat

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
    """Read and verify run folders or files of reports, and compare them by a score summed over rounds.

    Raises:
        NotComparable: they are not repeats of each other.
        LedgerError: a run does not verify.
    """
    runs = [_read(Path(path), utility, score, missing, form) for path in paths]
    if len(runs) < 2:
        only = runs[0].name if runs else ""
        raise NotComparable("expected at least 2 runs, got 1", code="few", first=only, other=only)
    for place, run in enumerate(runs):
        if run.facts.panel is not None:
            what = "it has a panel, and no test set by which repeats of it could be compared"
            raise _refusal(runs[0], run, "panel", what)
        for other in runs[:place]:
            _check_two(other, run)
        _check_whole(runs[0], run, asked=score)
    for run in runs[1:]:
        _check_repeats(runs[0], run)
    return Comparison(tuple(runs))


def _read(
    path: Path, utility: str | None, score: str | None, missing: Missing | None, form: SheetForm
) -> ComparedRun:
    source = read_source(path, utility, form=form, missing=missing)
    if source.changed is not None:  # compares only what verifies as a whole
        raise source.changed
    facts = Facts(source, score=score)
    if source.run is not None:
        return ComparedRun(str(path), facts, source.run.id)
    file_ = scores_in(path) if path.is_dir() else path
    return ComparedRun(str(path), facts, hashlib.sha256(file_.read_bytes()).hexdigest())


# -------------------------------------------------------------------------------------------- are they alike


def _check_two(one: ComparedRun, other: ComparedRun) -> None:
    """Raise NotComparable if two runs are one, or the same training."""
    if one.id == other.id:
        raise _refusal(one, other, "same", f"it is {one.name} once more (run {one.id})")
    if one.run is None or other.run is None or one.run.first.engine not in REHEARSALS:
        return
    if one.repeat == other.repeat and one.run.first.m0 == other.run.first.m0:
        what = f"it is the same training as {one.name}, repeat {one.repeat} from the same first model"
        raise _refusal(one, other, "training", what)


def _check_whole(first: ComparedRun, run: ComparedRun, *, asked: str | None) -> None:
    """Raise NotComparable if a run is not over, or its scores may change."""
    facts, source, code, what = run.facts, run.facts.source, "unsettled", ""
    if facts.unfinished:
        closed, planned = facts.unfinished
        code, what = "unfinished", f"it is not over: {closed} of {planned} rounds are closed"
    elif source.unsettled and asked is None:
        what = f"it is not settled: {source.unsettled}"
    elif facts.settled and source.account is None:
        what = f"it has no PHI: {source.unsettled or words('unsettled.no-PHI')}"
    elif facts.settled and (still := facts.account.provisional()):
        code, what = "unfinished", f"it is not over: {still}"
    elif not facts.settled and not source.rounds:
        what = f"its members report nothing, so there is no {facts.ranked_by}; expected --score PHI"
        code = "score"
    if what:
        raise _refusal(first, run, code, what)


def _refusal(first: ComparedRun, other: ComparedRun, code: str, what: str, **values: object) -> NotComparable:
    return NotComparable(what, code=code, first=first.name, other=other.name, **values)


def _check_repeats(first: ComparedRun, run: ComparedRun) -> None:
    """Raise NotComparable unless a run differs from the first in training alone."""
    one, other = first.run, run.run

    def refuse(code: str, what: str, expected: object, got: object) -> None:
        if expected != got:
            raise _refusal(first, run, code, what, expected=expected, got=got)

    def kind(part: Run | None) -> str:
        return "a file of reports" if part is None else "a run folder"

    refuse("kind", "kind of source", kind(one), kind(other))
    if one is not None and other is not None:
        refuse("engine", "engine", one.first.engine, other.first.engine)
        refuse("members", "members", ", ".join(one.config.clients), ", ".join(other.config.clients))
        if one.first.engine not in REHEARSALS:
            known, keys = one.first.keys or {}, other.first.keys or {}
            for name in (SERVER, *one.config.clients):
                refuse("keys", f"key of {name}", known.get(name), keys.get(name))
        for path, expected, got in differences(one.config, other.config):
            if path not in MAY_DIFFER:
                code = "rounds" if path == "training.rounds" else "scoring" if path in RULES else "settings"
                refuse(code, path, f"{expected!r:.100}", f"{got!r:.100}")
        if one.pool["root"] == other.pool["root"]:
            refuse("data", "fingerprint of the training data", one.first.data, other.first.data)
        elif first.slices != run.slices:
            refuse("pool", "test pool", one.pool["root"], other.pool["root"])
    refuse("utility", "utility", first.facts.utility, run.facts.utility)
    refuse("score", "score", first.facts.ranked_by, run.facts.ranked_by)
    refuse("rounds", "rounds with a score", first.facts.total.rounds, run.facts.total.rounds)
    scored = [", ".join(sorted(compared_.facts.total.clients)) for compared_ in (first, run)]
    refuse("members", "members with a score", *scored)
    if first.slices != run.slices:
        refuse("pool", "test samples of the rounds", first.slices, run.slices)


# ------------------------------------------------------------------------------------------------- findings


@dataclass(frozen=True)
class ComparedMember:
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
    """What training again changed, over at least two runs that repeat each other."""

    runs: tuple[ComparedRun, ...]
    points: bool = False  # whether texts state scores of a measure from 0 to 1 in points, as pages do

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
    def rows(self) -> tuple[ComparedMember, ...]:
        """Every member, best mean first."""
        found, spans = self.numbers, self.numbers.intervals()
        place = {name: i for i, name in enumerate(found.clients)}
        return tuple(
            ComparedMember(
                client=name,
                mean=float(found.mean[i]),
                interval=None if spans is None else (float(spans[i, 0]), float(spans[i, 1])),
                scores=tuple(found.scores[:, i].tolist()),
                ranks=tuple(found.ranks[:, i].tolist()),
                training=float(found.training[i]),
                test=None if found.test is None else float(found.test[i]),
                total=None if found.total is None else float(found.total[i]),
            )
            for name, i in ((name, place[name]) for name in found.average.ranking())
        )

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """What readers should know: what could not be checked, and who missed rounds in some runs only."""
        runs = [run.run for run in self.runs if run.run is not None]
        found = []
        if not runs:
            found.append(Note("repeats-files"))
        elif runs[0].first.data is None:
            found.append(Note("repeats-machines"))
        elif len({run.pool["root"] for run in runs}) > 1:
            found.append(Note("repeats-data"))
        for i, name in enumerate(self.numbers.clients):
            if len({total.coverage[i] for total in self.numbers.runs if total.coverage is not None}) > 1:
                found.append(Note("repeats-away", client=name))
        return tuple(found)

    # -------------------------------------------------------------------------------------------- sentences

    @property
    def headline(self) -> str:
        """Return in one sentence what training again changes."""
        found, runs, swaps = self.numbers, self.numbers.count, len(self.numbers.swaps)
        if not swaps:
            return words("compare.headline-none", runs=runs)
        first = self.rows[0].client
        if found.same_rank[:1] == (first,):
            return words("compare.headline-first", client=first, runs=runs, swaps=swaps, pairs=found.pairs)
        return words("compare.headline-turns", runs=runs)

    @property
    def lede(self) -> list[str]:
        """Return what was done, and how large both spreads are over all members."""
        found = self.numbers
        training, test = (None if spread is None else self._moved(spread) for spread in found.overall)
        unchecked = {"repeats-files", "repeats-machines", "repeats-data"} & {note.code for note in self.notes}
        code = "compare.trained-unchecked" if unchecked else "compare.trained"
        trained = words(code, members=len(found.clients), runs=found.count)
        if test is None:
            return [trained, words("compare.spread-unsure", training=training)]
        return [trained, words("compare.spread", training=training, test=test)]

    @property
    def common(self) -> str:
        """Return why the error of the test set is no part of the spread between runs."""
        return words("compare.common-files" if self.runs[0].run is None else "compare.common")

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

        def times(count: int) -> str:
            return words("compare.times", times=count, runs=self.numbers.count)

        return [(one, other, times(above), times(below)) for one, other, above, below in self.numbers.swaps]

    @property
    def chance(self) -> str:
        """Return what a pair that holds proves."""
        return words("compare.chance", runs=self.numbers.count, odds=round(1 / self.numbers.by_chance))

    @property
    def enough(self) -> list[tuple[str, str]]:
        """Return whether there were enough rounds: which runs, and a sentence; runs with the same once."""
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

    def mean_text(self, row: ComparedMember) -> str:
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
                {"name": one.name, "run": one.id, "repeat": one.repeat, "head": one.run and one.run.head}
                for one in self.runs
            ],
            "clients": list(found.clients),
            **{name: _list(getattr(found, name)) for name in _NUMBERS},
            "stderr": None if found.test is None else [_list(one.stderr) for one in found.runs],
            "interval": _list(spans),
            "freedom": found.freedom,
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


_NUMBERS = ("scores", "ranks", "mean", "training", "test", "total")


def _list(values: Any) -> Any:
    return None if values is None else values.tolist()


def _converged(facts: Facts) -> dict[str, Any] | None:
    found = facts.convergence
    return None if found is None else vars(found) | {"settled": found.settled(found.since)}
