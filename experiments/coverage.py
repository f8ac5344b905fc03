"""How often the errors are right: coverage of intervals, wrong claims, and power, by simulation.

::

    python experiments/coverage.py             # 4 minutes on one core; writes results/other/coverage.json

A population of 20,000 images in 10 classes has logits of the starting model and of every member's update.
They are correlated over images, classes and members: a member helps with the classes that it holds and harms
others. From these logits follow everybody's alpha and PHI per image over three rounds, and so the true
scores. A test set is drawn from the population, class by class or at random, and judged as members, server
and readers would: before (plain errors, s_i + s_j, Holm's method; settled scores by 8 blocks, always dealt by
class) and now (errors by class, sketches, Holm's method with Student's quantiles; settled scores by 16
blocks, dealt by class if the test set was drawn so).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from cells import Result, Row, datasets, write_json  # noqa: E402
from grid import grid, text  # noqa: E402
from sections import Lines, done, table  # noqa: E402

from fedmerit.protocol.direction import BLOCKS  # noqa: E402
from fedmerit.scoring.sampling import BLOCKS as METRIC_BLOCKS  # noqa: E402
from fedmerit.scoring.sampling import (  # noqa: E402
    SHARPNESS,
    SKETCH,
    f1,
    jackknife,
    least_change,
    pair_freedom,
    student_quantile,
    upper_quantile,
)
from fedmerit.scoring.scores import from_blocks  # noqa: E402
from fedmerit.scoring.types import Scores  # noqa: E402
from fedmerit.scoring.uncertainty import compare_pairs  # noqa: E402

OUT = HERE / "results" / "other" / "coverage.json"
CLASSES, IMAGES, ROUNDS, LEVEL = 10, 20_000, 3, 0.95
SEEDS = 4
"""Populations per cell; each is tested on a quarter of the repetitions."""
Array = npt.NDArray[np.float64]
Kind = str
"""fixed: one test set for all rounds; fresh: one for each; settled: PHI, in blocks."""


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    kind: Kind
    members: int
    samples: int  # per test set
    utility: str = "expected accuracy"
    case: str = ""  # a corner case, in words
    sharp: float = 1.0  # factor of the logits: large ones saturate
    size: float = 1.0  # of the updates
    drawn: str = "by class"  # or "at random"


CELLS = (
    *(
        Cell(kind, members, samples)
        for kind in ("fixed", "fresh", "settled")
        for members in (3, 9, 20)
        for samples in (50, 200, 500, 2000, 5000)
    ),
    *(Cell("fixed", 9, samples, "accuracy") for samples in (50, 200, 500, 2000, 5000)),
    Cell("fixed", 9, 500, case="drawn at random", drawn="at random"),
    *(Cell("fixed", 9, samples, case="saturated", sharp=40, size=0.2) for samples in (50, 200, 500)),
    *(Cell("fixed", 9, samples, "accuracy", "few answers change", size=0.2) for samples in (50, 200, 500)),
    *(Cell("fixed", 9, samples, "balanced accuracy", "one rare class changes") for samples in (500, 2000)),
    *(
        Cell("settled", members, samples, case="drawn at random", drawn="at random")
        for members in (3, 9, 20)
        for samples in (50, 200, 500, 2000)
    ),
)


# --------------------------------------------------------------------------------------------- populations


@dataclass(frozen=True, eq=False)
class Population:
    """Per image: alpha of every round and member, PHI of the run, and the outcomes of each round's models."""

    alpha: Array  # (rounds, images, members)
    phi: Array  # (images, members), summed over the rounds
    outcomes: Array  # (rounds, 2, images): v(M0) and v(M)
    counts: tuple[int, ...] = ()  # of samples per class, if not all equal


def softmax(logits: Array) -> Array:
    """Return probabilities."""
    away = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(away / away.sum(axis=-1, keepdims=True))


@cache
def population(members: int, utility: str, sharp: float, size: float, seed: int) -> Population:
    """Return a federation as its test images see it; images are sorted by class."""
    rng = np.random.default_rng([seed, members])
    labels, images = np.repeat(np.arange(CLASSES), IMAGES // CLASSES), np.arange(IMAGES)
    logits = rng.normal(0, 1, (IMAGES, CLASSES))
    logits[images, labels] += 1 + rng.normal(0, 1, IMAGES)  # some images are easy
    mix = np.log(CLASSES * rng.dirichlet(np.full(CLASSES, 0.5), members) + 0.1)

    def value(at: Array) -> Array:
        if utility == "accuracy":
            return np.asarray(at.argmax(axis=1) == labels, dtype=np.float64)
        return softmax(sharp * at)[images, labels]

    alpha, phi = np.empty((ROUNDS, IMAGES, members)), np.zeros((IMAGES, members))
    outcomes = np.empty((ROUNDS, 2, IMAGES))
    for number in range(ROUNDS):
        shared = rng.normal(0, 0.25, (IMAGES, CLASSES))
        moves = np.empty((members, IMAGES, CLASSES))
        for one in range(members):
            moves[one] = mix[one] + shared + rng.normal(0, 0.25, (IMAGES, CLASSES))
            moves[one, images, labels] += 1
            moves[one] *= size * rng.uniform(0.6, 1.4) / ((number + 1) * members)
        whole = moves.sum(axis=0)
        before, after = value(logits), value(logits + whole)
        outcomes[number] = before, after
        for one, move in enumerate(moves):
            alpha[number, :, one] = (after - value(logits + whole - move) + value(logits + move) - before) / 2
        for place, weight in ((0.112702, 5 / 18), (0.5, 8 / 18), (0.887298, 5 / 18)):  # along the path
            p = softmax(sharp * (logits + place * whole))
            slope = weight * sharp * p[images, labels]
            for one, move in enumerate(moves):
                phi[:, one] += slope * (move[images, labels] - (p * move).sum(axis=1))
        logits = logits + whole
    return Population(alpha, phi, outcomes)


@cache
def rare_population(members: int, samples: int, seed: int) -> Population:
    """Return a federation that changes the answers to one class alone, which 1 in 100 test samples has."""
    rng = np.random.default_rng([seed, members, samples])
    alpha = np.zeros((1, IMAGES, members))
    first = IMAGES // CLASSES
    for one in range(members):  # 5 % of its images, the same number for every member: all are equal
        alpha[0, rng.choice(first, first // 20, replace=False), one] = 0.5
    rare = samples // 100
    others, more = divmod(samples - rare, CLASSES - 1)
    counts = (rare, *(others + (k < more) for k in range(CLASSES - 1)))
    outcomes = np.asarray(rng.random((1, 2, IMAGES)) < 0.7, dtype=np.float64)
    return Population(alpha, alpha[0], outcomes, counts)


# ------------------------------------------------------------------------------------------------ judgement


@dataclass
class Judged:
    """Sums over test sets: how often intervals, differences and claims were right, and what they found."""

    repetitions: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Array) -> None:
        """Add the mean over members or pairs of every test set."""
        self.sums[name] = self.sums.get(name, 0.0) + math.fsum(values.reshape(len(values), -1).mean(axis=1))

    def result(self) -> dict[str, float]:
        """Return the means over all test sets."""
        return {name: round(total / self.repetitions, 4) for name, total in self.sums.items()}


@cache
def critical_values(hypotheses: int, freedom: int | None) -> Array:
    """Return the critical values of Holm's method after 0, 1, ... rejections."""
    tails = (1 - LEVEL) / (hypotheses - np.arange(hypotheses // 2))
    by = upper_quantile if freedom is None else lambda tail: student_quantile(tail, freedom)
    return np.array([by(tail) for tail in tails.tolist()])


def told_apart(statistic: Array, hypotheses: int, freedom: int | None) -> npt.NDArray[np.bool_]:
    """Return which pairs Holm's method tells apart, from their |difference| / error, shape (sets, pairs).

    It is what `fedmerit.scoring.uncertainty.compare_pairs` does, for many test sets at once.
    """
    order = np.argsort(-statistic, axis=1)
    ordered = np.take_along_axis(statistic, order, axis=1)
    found = np.logical_and.accumulate(ordered > critical_values(hypotheses, freedom), axis=1)
    out = np.zeros(statistic.shape, bool)
    np.put_along_axis(out, order, found, axis=1)
    return out


def judge(
    judged: Judged,
    found: Array,
    truth: Array,
    single: Array,
    pairs: Array,
    freedom: tuple[int | None, int | None],
    name: str,
) -> None:
    """Judge intervals and claims about some test sets.

    Args:
        judged: where results go.
        found: estimated scores, shape (sets, members).
        truth: true scores, shape (members,).
        single: standard errors, shape (sets, members).
        pairs: standard errors of the differences, shape (sets, pairs).
        freedom: degrees of freedom of the two; None for very many.
        name: "before" or "now".
    """
    one, other = np.triu_indices(len(truth), 1)
    quantiles = [1.959964 if free is None else student_quantile((1 - LEVEL) / 2, free) for free in freedom]
    judged.add(f"{name}: interval", np.abs(found - truth) <= quantiles[0] * single + 1e-12)
    difference = found[:, one] - found[:, other]
    true = truth[one] - truth[other]
    judged.add(f"{name}: difference", np.abs(difference - true) <= quantiles[1] * pairs + 1e-12)
    hypotheses, safe = 2 * len(one), np.maximum(pairs, 1e-12)
    none = np.abs(difference - true) / safe  # if all members were equal, which shifts their scores
    first = critical_values(hypotheses, freedom[1])[0]
    judged.add(f"{name}: any wrong claim", (none.max(axis=1) > first)[:, None])
    claims = told_apart(np.abs(difference) / safe, hypotheses, freedom[1])
    judged.add(f"{name}: told apart", claims)
    judged.add(f"{name}: wrong pairs", claims & (np.sign(difference) != np.sign(true)))


# ------------------------------------------------------------------------------------------------- test sets


def drawn(rng: np.random.Generator, cell: Cell, people: Population, sets: int) -> npt.NDArray[np.int64]:
    """Return images of test sets, shape (sets, samples), sorted by class if they are drawn so."""
    if cell.drawn == "at random":
        return rng.integers(0, IMAGES, (sets, cell.samples))
    counts = people.counts or (cell.samples // CLASSES,) * CLASSES
    per = IMAGES // CLASSES
    return np.concatenate(
        [rng.integers(k * per, (k + 1) * per, (sets, n)) for k, n in enumerate(counts)], axis=1
    )


def spans(cell: Cell, people: Population) -> list[slice]:
    """Return the places of every stratum in a test set."""
    counts = people.counts or (cell.samples // CLASSES,) * CLASSES
    if cell.drawn == "at random":
        counts = (cell.samples,)
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def one_slice(
    rng: np.random.Generator, cell: Cell, people: Population, values: Array, outcomes: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Return estimates, plain errors, errors by stratum, least errors and sketches of test sets.

    Args:
        rng: for the signs.
        cell: what is simulated.
        people: the population.
        values: alpha of the samples, shape (sets, samples, members).
        outcomes: of two models, shape (sets, 2, samples).
    """
    m, strata = cell.samples, spans(cell, people)
    scale = np.ones(m)
    if people.counts:
        for span in strata:
            scale[span] = m / CLASSES / (span.stop - span.start)
        values = values * scale[:, None]
    found = values.mean(axis=1)
    plain = values.std(axis=1, ddof=1) / math.sqrt(m)
    if cell.utility == "accuracy":  # as before: one changed sample is added in each direction
        spread = (values * values).sum(axis=1) + 2 - m * m * found * found / (m + 2)
        plain = np.sqrt(spread / ((m + 1) * (m + 2)))
    parts = np.empty_like(values)
    for span in strata:
        own, n = values[:, span], span.stop - span.start
        parts[:, span] = (own - own.mean(axis=1, keepdims=True)) * math.sqrt(n / (n - 1)) / m
    flat = np.concatenate(
        [outcomes.reshape(len(outcomes), -1), np.tile([0.0, 1.0], (len(outcomes), 1))], axis=1
    )
    middle = flat.mean(axis=1)
    sharp = np.maximum(0, 1 - (flat * (1 - flat)).mean(axis=1) / (middle * (1 - middle)))
    least = math.sqrt(2) * 0.5 * scale.max() / m * sharp**SHARPNESS
    bits = np.unpackbits(np.frombuffer(rng.bytes(len(values) * SKETCH * ((m + 7) // 8)), np.uint8))
    signs = bits.reshape(len(values), SKETCH, -1)[:, :, :m].astype(np.float64) * 2 - 1
    own = rng.integers(0, 2, (len(values), SKETCH, values.shape[2])) * 2.0 - 1
    sketch = signs @ parts + least[:, None, None] * own
    return found, plain, np.sqrt((parts * parts).sum(axis=1)), least, sketch


def reported(rng: np.random.Generator, cell: Cell, people: Population, sets: int, judged: Judged) -> None:
    """Judge test sets on which members reported alpha."""
    rounds = len(people.alpha)
    truth = _mean(people, people.alpha.sum(axis=0))
    one, other = np.triu_indices(cell.members, 1)
    if cell.kind == "fixed":
        at = drawn(rng, cell, people, sets)
        outcomes = people.outcomes[-1][:, at].swapaxes(0, 1)
        found, plain, single, least, sketch = one_slice(
            rng, cell, people, people.alpha.sum(axis=0)[at], outcomes
        )
        extra = rng.integers(0, 2, (rounds - 1, *sketch.shape)) * 2.0 - 1  # a round each
        sketch = sketch + least[:, None, None] * extra.sum(axis=0)
        single = np.hypot(single, least[:, None])
    else:
        found, plain, single, sketch = 0.0, 0.0, 0.0, 0.0  # type: ignore[assignment]
        for number in range(rounds):
            at = drawn(rng, cell, people, sets)
            outcomes = people.outcomes[number][:, at].swapaxes(0, 1)
            told = one_slice(rng, cell, people, people.alpha[number][at], outcomes)
            found, plain = found + told[0], plain + told[1] ** 2
            single, sketch = single + told[2] ** 2 + told[3][:, None] ** 2, sketch + told[4]
        plain, single = np.sqrt(plain), np.sqrt(single)
    judge(judged, found, truth, plain, plain[:, one] + plain[:, other], (None, None), "before")
    pairs = np.sqrt(((sketch[:, :, one] - sketch[:, :, other]) ** 2).mean(axis=1))
    freedom = pair_freedom(SKETCH, cell.samples - len(spans(cell, people)))
    judge(judged, found, truth, single, pairs, (cell.samples - len(spans(cell, people)), freedom), "now")


def settled(rng: np.random.Generator, cell: Cell, people: Population, sets: int, judged: Judged) -> None:
    """Judge test sets on which members settled PHI in blocks."""
    truth, m = people.phi.mean(axis=0), cell.samples
    images = drawn(rng, cell, people, sets)
    one, other = np.triu_indices(cell.members, 1)
    for name, count in (("before", 8), ("now", BLOCKS)):
        by_class = name == "before" or cell.drawn == "by class"
        values = people.phi[np.sort(images, axis=1) if by_class else images]  # images are sorted by class
        blocks = np.stack([values[:, first::count].mean(axis=1) for first in range(count)], axis=1)
        weights = np.array([len(range(first, m, count)) for first in range(count)]) / m
        found = values.mean(axis=1)
        away = (blocks - found[:, None]) * np.sqrt(weights / (count - 1))[:, None]
        single = np.sqrt((away * away).sum(axis=1))
        pairs = np.sqrt(((away[:, :, one] - away[:, :, other]) ** 2).sum(axis=1))
        if name == "before":
            pairs = single[:, one] + single[:, other]
        judge(judged, found, truth, single, pairs, (count - 1, count - 1), name)


def _mean(people: Population, values: Array) -> Array:
    """Return the true mean; classes count alike, however many samples they have."""
    return np.asarray(values.reshape(CLASSES, IMAGES // CLASSES, -1).mean(axis=(0, 1)))


def simulate(cell: Cell, repetitions: int, seed: int = 0) -> dict[str, float]:
    """Return what a cell comes to."""
    judged = Judged()
    rng = np.random.default_rng([seed, CELLS.index(cell) if cell in CELLS else 999])
    for which in range(SEEDS):
        left = repetitions // SEEDS
        if cell.utility == "balanced accuracy":
            people = rare_population(cell.members, cell.samples, which)
        else:
            people = population(cell.members, cell.utility, cell.sharp, cell.size, which)
        most = max(1, 2_000_000 // (cell.samples * max(cell.members, SKETCH)))
        while left:
            sets = min(left, most)
            (settled if cell.kind == "settled" else reported)(rng, cell, people, sets, judged)
            judged.repetitions += sets
            left -= sets
    return judged.result()


# --------------------------------------------------------------------------------- what was chosen, and why

DESIGNS = (("sketch", 16), ("sketch", 32), ("sketch", 64), ("blocks", 8), ("blocks", 16))
DRAWS = 500


def max_t(covariance: Array, errors: Array, freedom: int, rng: np.random.Generator) -> float:
    """Return the critical value of max-T: of the largest standardised difference, multivariate Student."""
    values, vectors = np.linalg.eigh(covariance)
    noise = rng.standard_normal((DRAWS, len(values))) @ (vectors * np.sqrt(np.maximum(values, 0))).T
    one, other = np.triu_indices(len(values), 1)
    largest = (np.abs(noise[:, one] - noise[:, other]) / errors).max(axis=1)
    return float(np.quantile(largest / np.sqrt(rng.chisquare(freedom, DRAWS) / freedom), LEVEL))


def design(kind: str, count: int, members: int, samples: int, repetitions: int) -> dict[str, Any]:
    """Return wrong claims and power of sketches or blocks of some size, under Holm's method and max-T."""
    rng, sums = np.random.default_rng([count, members, samples]), np.zeros(4)
    one, other = np.triu_indices(members, 1)
    people = population(members, "expected accuracy", 1.0, 1.0, 0)
    whole, cell = people.alpha.sum(axis=0), Cell("fixed", members, samples)
    truth, strata = whole.mean(axis=0), spans(cell, people)
    freedom = pair_freedom(count, samples - CLASSES) if kind == "sketch" else count - 1
    first = critical_values(members * (members - 1), freedom)[0]
    for _ in range(repetitions):
        values = whole[drawn(rng, cell, people, 1)[0]]
        found = values.mean(axis=0)
        if kind == "sketch":
            parts = np.empty_like(values)
            for span in strata:
                n = span.stop - span.start
                parts[span] = (values[span] - values[span].mean(axis=0)) * math.sqrt(n / (n - 1)) / samples
            roots = (rng.integers(0, 2, (count, samples)) * 2.0 - 1) @ parts / math.sqrt(count)
        else:
            blocks = np.stack([values[place::count].mean(axis=0) for place in range(count)])
            weights = np.array([len(range(place, samples, count)) for place in range(count)]) / samples
            roots = np.sqrt(weights / (count - 1))[:, None] * (blocks - found)
        errors = np.sqrt(((roots[:, one] - roots[:, other]) ** 2).sum(axis=0))
        critical = max_t(roots.T @ roots, errors, freedom, rng)
        difference = found[one] - found[other]
        null = (np.abs(difference - truth[one] + truth[other]) / errors).max()
        statistic = np.abs(difference) / errors
        claims = told_apart(statistic[None], members * (members - 1), freedom)
        sums += [null > first, null > critical, claims.mean(), (statistic > critical).mean()]
    means = [round(float(value) / repetitions, 4) for value in sums]
    names = ("Holm: any wrong claim", "max-T: any wrong claim", "Holm: told apart", "max-T: told apart")
    return {
        "design": f"{kind} {count}",
        "members": members,
        "samples": samples,
        **dict(zip(names, means, strict=True)),
    }


# ------------------------------------------------------------------------------------ F1 with few positives


def few_positives(samples: int, share: float, size: float, repetitions: int) -> dict[str, Any]:
    """Return how often a 95 % interval of alpha by F1 holds the true one, without and with a least error.

    Args:
        samples: per test set, drawn at random.
        share: of positives.
        size: of the updates of the three members.
        repetitions: test sets.
    """
    rng = np.random.default_rng([samples, round(100 * share), round(10 * size)])
    y = (rng.random(IMAGES) < share).astype(np.int64)
    start = rng.normal(1.5 * y - 1.7, 1.0)
    moves = [size * (rng.normal(0, 0.5, IMAGES) + way * (y - 0.5)) for way in (0.5, 0.2, -0.1)]
    whole = start + sum(moves)
    models = [start, whole, *(start + one for one in moves), *(whole - one for one in moves)]

    def score(logit: Array, at: npt.NDArray[np.int64]) -> float:
        return f1(np.stack([0 * logit[at], logit[at]], 1), y[at])

    def alphas(of: Sequence[Any]) -> list[Any]:
        return [(of[1] - of[5 + one] + of[2 + one] - of[0]) / 2 for one in range(3)]

    truth = alphas([score(one, np.arange(IMAGES)) for one in models])
    wide, held = student_quantile((1 - LEVEL) / 2, METRIC_BLOCKS - 1), np.zeros(2)
    for _ in range(repetitions):
        at = rng.integers(0, IMAGES, samples)
        while y[at].sum() < 3:
            at = rng.integers(0, IMAGES, samples)
        blocks = np.array_split(rng.permutation(samples), METRIC_BLOCKS)
        while min(y[at].sum() - y[at[block]].sum() for block in blocks) < 1:  # F1 needs positives
            blocks = np.array_split(rng.permutation(samples), METRIC_BLOCKS)
        least = least_change("f1", y[at]) / 2
        of = [jackknife("f1", lambda rest, one=one, at=at: score(one, at[rest]), blocks) for one in models]
        for values, true in zip(alphas(of), truth, strict=True):
            error = values.std(ddof=1) / math.sqrt(len(values))
            held += [abs(values.mean() - true) <= wide * one for one in (error, math.hypot(error, least))]
    before, now = (round(float(one) / repetitions / 3, 4) for one in held)
    return {"samples": samples, "positives": share, "size": size, "before": before, "now": now}


FEW = tuple((m, share, size) for m in (50, 200, 500) for share in (0.05, 0.2) for size in (0.1, 0.3, 1.0))


# --------------------------------------------------------------------------------------- the committed runs


def committed(cells: Sequence[Result], utility: str) -> tuple[list[int], int]:
    """Return how many pairs of members are told apart in the runs that hold PHI, and how many there are.

    In this order: by alpha with plain errors and s_i + s_j, by PHI with s_i + s_j, and by PHI with its
    covariance. The runs hold no sketches, so alpha cannot be judged anew.
    """
    found, pairs = [0, 0, 0], 0
    for cell in cells:
        rounds, along = cell["utilities"][utility]["rounds"], cell["phi"][utility]
        names = tuple(cell["clients"])
        if any(tuple(one["participants"]) != names for one in (*rounds, *along)):
            continue
        gain = math.fsum(one["grand"] - one["empty"] for one in rounds)
        more = [np.subtract(one["alone"], one["without"]) for one in rounds]
        total, last = (np.sum(more, axis=0) + gain) / 2, rounds[-1]["se_alpha_total"]
        plain = Scores(score="ALPHA", clients=names, values=total, raw=total, gain=gain, stderr=last)
        blocks = np.sum([one["blocks"] for one in along], axis=0)
        phi = from_blocks(blocks, along[0]["sizes"], names)
        bound = replace(phi, blocks=None, sizes=None, freedom=len(blocks) - 1)
        judged = (compare_pairs(plain), compare_pairs(bound), compare_pairs(phi))
        found = [count + int(one.better.sum()) for count, one in zip(found, judged, strict=True)]
        pairs += len(names) * (len(names) - 1) // 2
    return found, pairs


# ---------------------------------------------------------------------------------------------------- texts


def coverage_section(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """Coverage and power by simulation, and the committed runs before and now."""
    document = json.loads(OUT.read_text(encoding="utf-8"), parse_float=lambda given: grid(float(given)))
    cells, designs = document["cells"], document["designs"]
    yield "# How sure: coverage, wrong claims and power (not in the paper)"
    yield ""
    yield "`python experiments/coverage.py` simulates, without training."
    sets = f"{cells[0]['repetitions']:,} test sets per line"
    yield f"{sets}, from {SEEDS} populations; {ROUNDS} rounds, {CLASSES} classes."
    yield ""
    yield "- *interval*: how often a 95 % interval of one member holds its true score;"
    yield "- *difference*: the same for the difference of two members, each pair on its own;"
    yield "- *any wrong claim*: how often any pair is told apart if all members are equal, at most 5 %;"
    yield "- *told apart*: the share of all pairs that is told apart, with the true differences: power;"
    yield "- *before*: plain standard errors, s_i + s_j for differences; *now*: by class, with sketches."
    yield ""
    yield (
        f"Settled scores are judged by blocks: before by 8, dealt by class, with s_i + s_j; now by {BLOCKS},"
    )
    yield "dealt by class if the test set was drawn so, with their covariance."
    yield ""
    head = ["test sets", "utility", "members", "test samples"]
    head += [f"{what}, {when}" for what in MEASURED for when in ("before", "now")]
    yield from table(head, [list(_line(one)) for one in cells])
    outside = [one for one in cells if not all(0.93 <= one[f"now: {what}"] <= 0.97 for what in MEASURED[:2])]
    low = [one for one in outside if min(one[f"now: {what}"] for what in MEASURED[:2]) < 0.93]
    wrong = [one for one in cells if one["now: any wrong claim"] > 0.05]
    never = [one for one in cells if one["now: any wrong claim"] == 0]
    yield f"Of {len(cells)} lines, {len(cells) - len(outside)} have both coverages between 93 and 97 %,"
    yield f"{len(outside) - len(low)} cover more (marked with +) and {len(low)} less (marked with −)."
    share = math.sqrt(0.05 * 0.95 / cells[0]["repetitions"])
    yield f"The standard error of a share of 5 % is {text(share, '.1%')}."
    yield f"More than 5 % wrong claims: {_listed(wrong)}. No wrong claim at all: {_listed(never)}."
    yield ""
    yield "## What was chosen, and why"
    yield ""
    yield "Sketches of 16, 32 or 64 numbers, and 8 or 16 blocks of samples, on one test set for all rounds."
    yield "Max-T is the simulated quantile of the largest standardised difference (multivariate Student)."
    yield "Where the covariance is an estimate, max-T is wrong too often, so Holm's method was chosen, and 32"
    yield "numbers, because 64 tell few more pairs apart."
    yield ""
    columns = list(designs[0])
    yield from table(
        columns,
        [[text(v, ".1%") if isinstance(v, float) else str(v) for v in one.values()] for one in designs],
    )
    yield "## F1 with few positives"
    yield ""
    yield "How often a 95 % interval of alpha by F1 holds the true one: by the jackknife alone, and"
    yield "with the error of one changed answer added. 500 test sets per line, drawn at random."
    yield ""
    head = ["test samples", "positives", "size of the updates", "jackknife alone", "now"]
    yield from table(
        head,
        [
            [f"{one['samples']:,}", text(one["positives"], ".0%"), text(one["size"], ".1f")]
            + [text(one[when], ".1%") for when in ("before", "now")]
            for one in document["f1"]
        ],
    )
    yield "## The committed runs"
    yield ""
    yield "Pairs of members told apart after the last round of the runs of [tab-phi](tab-phi.md), expected"
    yield "accuracy. They hold no sketches, so alpha is judged with the plain errors that they recorded."
    yield ""
    body = []
    for row in rows:
        if row.experiment == "tab-phi" and (cells := done(row, results)):
            counts, pairs = committed(cells, "expected-accuracy")
            title = datasets()[row.dataset]["short"]
            body.append([title, *(f"{count} of {pairs}" for count in counts)])
    yield from table(["data", "alpha, before", "PHI, before", "PHI, now (covariance of their blocks)"], body)


MEASURED = ("interval", "difference", "any wrong claim", "told apart")


def _line(one: Mapping[str, Any]) -> Iterator[str]:
    yield f"{one['kind']}{f', {case}' if (case := one['case']) else ''}"
    yield from (one["utility"], str(one["members"]), f"{one['samples']:,}")
    for what in MEASURED:
        for when in ("before", "now"):
            value, mark = one[f"{when}: {what}"], ""
            if when == "now" and what in MEASURED[:2]:
                mark = " −" if value < 0.93 else " +" if value > 0.97 else ""
            yield text(value, ".1%") + mark


def _listed(cells: Sequence[Mapping[str, Any]]) -> str:
    counted = len(cells)
    names = [f"{next(_line(one))}: {one['members']} members, {one['samples']:,} samples" for one in cells]
    return f"{counted} ({'; '.join(names)})" if names else "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    found = []
    for cell in CELLS:
        result = simulate(cell, options.repetitions)
        found.append({**vars(cell), "repetitions": options.repetitions, **result})
        print(cell, result, flush=True)
    designs = [
        design(kind, count, members, 500, options.repetitions)
        for members in (9, 20)
        for kind, count in DESIGNS
    ]
    few = [few_positives(*one, options.repetitions // 4) for one in FEW]
    made = {"cells": found, "designs": designs, "f1": few}
    write_json(options.out, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
