r"""What test samples tell: standard errors, sketches of them, how many are needed, and whole metrics.

A mean over test samples has a vector :math:`e` with one entry per sample: what the sample adds to its error.
Its length is the standard error. The product of two members' vectors is their covariance, but nobody sees
both. So each member states a *sketch*, K products of its vector with signs that everybody can compute:

.. math:: z_k = \sum_s r_{ks} e_s, \quad r_{ks} = \pm 1, \qquad
          \mathrm{cov}(i, j) \approx \frac1K \sum_k z_{ik} z_{jk}

The signs of a test slice follow from its id, so sketches of rounds on one slice add up, as errors do. Slices
with other samples have other signs, so sketches add up there too, as variances do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, ReportError
from fedmerit.scoring.types import Vector, level_of, number, whole

SKETCH = 32
"""K, the numbers in a sketch. Of the pairs of 20 members, 500 samples tell 39 % apart with 16 numbers, 44 %
with 32, 47 % with 64, and 35 % with 16 blocks of samples (experiments/tables/coverage.md)."""
SHARPNESS = 16
"""How soon outcomes count as 0 or 1, see `least_error`; chosen by simulation (experiments/coverage.py)."""
PLAUSIBLE = 16.0
"""A sketch whose mean square is this many times the variance, or this part of it, does not belong to it."""

Strata = npt.NDArray[np.int64]
"""The stratum of every test sample, shape (m,): 0, 1, ..."""


def strata_of(labels: npt.ArrayLike) -> Strata:
    """Return the class of every sample as its stratum; classes with a single sample are merged.

    A variance needs two samples. All classes with one sample make up one stratum, or join the smallest other
    one if it has only that one.

    >>> strata_of([0, 0, 1, 2, 3, 3, 3]).tolist(), strata_of([0, 0, 1]).tolist()
    ([0, 0, 2, 2, 1, 1, 1], [0, 0, 0])
    """
    _, classes, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    single = counts == 1
    into = np.arange(len(counts))
    into[single] = len(counts)
    if np.count_nonzero(single) == 1 and len(counts) > 1:
        into[single] = np.argmin(np.where(single, len(classes) + 1, counts))
    return np.unique(into[classes], return_inverse=True)[1].astype(np.int64)


def degrees(strata: Strata) -> int:
    """Return the degrees of freedom of standard errors over these samples: samples minus strata."""
    return max(1, len(strata) - (int(strata.max()) + 1 if strata.size else 0))


def error_parts(values: Vector, strata: Strata) -> Vector:
    r"""Return what each sample adds to the error of the mean of ``values``, shape (m,).

    .. math:: e_s = \frac1m \sqrt{\frac{m_c}{m_c - 1}} \, (x_s - \bar x_c), \qquad
        |e|^2 = \sum_c \Big(\frac{m_c}{m}\Big)^2 \frac{\mathrm{sd}_c^2}{m_c}

    with :math:`m_c` samples and mean :math:`\bar x_c` in the stratum c of sample s. Differences between
    strata do not count: a test set drawn class by class has the same mix of classes every time.

    >>> x = np.array([1.0, 3.0, 10.0, 10.0])
    >>> error_parts(x, np.array([0, 0, 1, 1])).round(3).tolist()
    [-0.354, 0.354, 0.0, 0.0]
    """
    counts = np.bincount(strata).astype(np.float64)
    centred = values - (np.bincount(strata, weights=values) / counts)[strata]
    return np.asarray(centred * np.sqrt(counts / np.maximum(counts - 1, 1))[strata] / len(values))


def least_error(outcomes: Sequence[Vector], scale: Vector | float = 1.0, step: float = 1.0) -> float:
    r"""Return the error that remains even if no sample changes: for outcomes that are 0 or 1, or nearly.

    .. math:: \sqrt 2 \, \frac{h}{m} \max_s(\mathrm{scale}_s) \, \rho^{16}, \qquad
        \rho = 1 - \frac{\overline{v (1 - v)}}{\bar v (1 - \bar v)}

    where v are all outcomes, and a 0 and a 1. If 2 % of 50 answers change, 36 % of all test sets show no
    change, and the standard error would be 0. So one changed sample is added in each direction (Bonett &
    Price 2012; after Agresti & Min 2005). Outcomes that are only nearly 0 or 1 mislead in the same way;
    :math:`\rho` is 1 if all are 0 or 1, and far below 1 for answers of various probabilities. The error is 0
    if an outcome is not in [0, 1].

    Args:
        outcomes: utilities per sample of each model behind the score, before scaling.
        scale: what a sample's outcome is multiplied by, as balanced accuracy does; the largest counts.
        step: h, by how much one changed outcome changes the score of the sample: 1/2 for alpha.

    >>> [round(least_error([np.array(v)]), 3) for v in ([0.0, 1, 1, 0], [0.3, 0.5, 0.4, 0.6])]
    [0.354, 0.0]
    """
    v = np.concatenate([*outcomes, [0.0, 1.0]])
    if not (v.min() >= 0 and v.max() <= 1):
        return 0.0
    middle = float(v.mean())
    sharp = max(0.0, 1 - float(np.mean(v * (1 - v))) / (middle * (1 - middle)))
    return math.sqrt(2) * step * float(np.max(scale)) / len(outcomes[0]) * sharp**SHARPNESS


def signs(seed: str, count: int, samples: int) -> npt.NDArray[np.float64]:
    """Return public random signs, shape (count, samples): bits of SHAKE-256, 1 for +1.

    >>> signs("a", 2, 3).tolist()
    [[1.0, 1.0, 1.0], [1.0, -1.0, 1.0]]
    """
    width = (samples + 7) // 8
    stream = hashlib.shake_256(f"fedmerit/sketch/1 {seed}".encode()).digest(count * width)
    rows = np.frombuffer(stream, np.uint8).reshape(count, width)
    return np.asarray(2.0 * np.unpackbits(rows, axis=1, count=samples) - 1.0, dtype=np.float64)


_slice_signs = lru_cache(maxsize=2)(signs)


def sketch(parts: Vector, least: float, *, slice_id: str, round: int, client: str) -> tuple[float, ...]:
    """Return the sketch of one member's error, of `error_parts` and `least_error`, with seven digits.

    The latter counts with signs of the member's own in every round: it is nobody else's error.
    """
    own = signs(f"{slice_id} {round} {client}", SKETCH, 1)[:, 0]
    exact = _slice_signs(slice_id, SKETCH, len(parts)) @ parts + least * own
    return tuple(float(f"{entry:.7g}") for entry in exact)


def belongs(numbers: Sequence[float], stderr: float) -> bool:
    """Return whether a sketch can be that of an error of this size; chance fails one in 10^8 sketches."""
    square, expected = math.fsum(number * number for number in numbers) / len(numbers), stderr * stderr
    return expected / PLAUSIBLE - 1e-24 <= square <= expected * PLAUSIBLE + 1e-24


def pair_freedom(count: int, samples: int | None) -> int:
    r"""Return the degrees of freedom of a variance from a sketch of so many numbers.

    .. math:: \nu = \lfloor 1 / (1/K + 1/\nu_m) \rfloor

    A sketch estimates what the samples say, and the samples estimate the variance, with :math:`\nu_m` degrees
    of freedom (None for very many). Relative variances of the two add up.

    >>> pair_freedom(32, 490), pair_freedom(32, 40), pair_freedom(32, None)
    (30, 17, 32)
    """
    return max(1, count if samples is None else count * samples // (count + samples))


def strata_for(labels: Any, *, balanced: bool) -> Strata:
    """Return the strata of a test slice: its classes if it was drawn class by class, else a single one.

    Labels that are not whole numbers, one per sample, are not classes.
    """
    array = np.asarray(labels)
    classes = balanced and array.ndim == 1 and array.dtype.kind in "iu"
    return strata_of(array) if classes else np.zeros(len(array), np.int64)


# ------------------------------------------------------------------------------------------ critical values


def upper_quantile(tail: float) -> float:
    """Return z with P(Z > z) = tail for a standard normal Z; exact even if 1 - tail would round to 1."""
    return -NormalDist().inv_cdf(tail)


def student_quantile(tail: float, freedom: int) -> float:
    r"""Return t with P(T > t) = tail, for Student's T with ``freedom`` degrees of freedom.

    With :math:`t = \sqrt\nu \tan\theta` (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4; sums may be empty):

    .. math:: P(|T| \le t) = \frac2\pi \Big(\theta + \sin\theta \sum_{k=0}^{(\nu-3)/2}
        \tfrac{2 \cdot 4 \cdots 2k}{3 \cdot 5 \cdots (2k+1)} \cos^{2k+1}\theta\Big), \ \nu \text{ odd}; \quad
        \sin\theta \sum_{k=0}^{(\nu-2)/2} \tfrac{1 \cdot 3 \cdots (2k-1)}{2 \cdot 4 \cdots 2k}
        \cos^{2k}\theta, \ \nu \text{ even}
    """
    odd = freedom % 2
    steps = 2.0 * np.arange(1, (freedom - odd) // 2)
    factors = np.concatenate([[1.0], steps / (steps + 1) if odd else (steps - 1) / steps])
    weights = np.cumprod(factors) if freedom > 1 else np.zeros(0)
    powers = 2 * np.arange(weights.size) + odd

    def within(theta: float) -> float:
        inner = math.sin(theta) * math.fsum(weights * math.cos(theta) ** powers)
        return 2 / math.pi * (theta + inner) if odd else inner

    return math.sqrt(freedom) * math.tan(_bisected(within, 1 - 2 * tail, math.pi / 2))


def _bisected(rising: Callable[[float], float], level: float, high: float) -> float:
    """Return where a function that rises from 0 to ``high`` has this value."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < level else (low, middle)
    return (low + high) / 2


Quantile = Callable[[float], float]
"""(tail) -> the number of standard errors that chance exceeds with this probability."""


def quantiles(*freedoms: int | None) -> Quantile:
    """Return Student's quantiles for the least known freedom; the normal ones beyond 1,000 or without any."""
    freedom = min((freedom for freedom in freedoms if freedom is not None), default=1001)
    return upper_quantile if freedom > 1000 else lambda tail: student_quantile(tail, freedom)


def spread_factors(freedom: int, *, level: float = 0.95) -> tuple[float, float]:
    r"""Return how much smaller and larger than estimated a standard deviation may be.

    .. math:: \sqrt{\nu / \chi^2_{\nu, (1 + \mathrm{level})/2}}, \qquad
        \sqrt{\nu / \chi^2_{\nu, (1 - \mathrm{level})/2}}

    >>> [round(factor, 2) for factor in spread_factors(2)]
    [0.52, 6.28]
    """
    tail = (1 - level_of(level)) / 2
    low, high = (math.sqrt(freedom / _chi_square(p, freedom)) for p in (1 - tail, tail))
    return low, high


def _chi_square(probability: float, freedom: int) -> float:
    r"""Return the quantile of chi-square, by bisection of its distribution (Abramowitz & Stegun 26.4.4-5).

    .. math:: Q(x) = e^{-x/2} \sum_{k < \nu / 2} \frac{(x/2)^k}{k!}, \ \nu \text{ even}; \quad
        \operatorname{erfc}\sqrt{x/2} + e^{-x/2} \sum_{k < (\nu - 1)/2}
        \frac{(x/2)^{k + 1/2}}{\Gamma(k + 3/2)}, \ \nu \text{ odd}
    """
    half = 0.5 * (freedom % 2)

    def below(x: float) -> float:
        above = math.erfc(math.sqrt(x / 2)) if half else 0.0
        for k in range(freedom // 2):
            above += math.exp(-x / 2 + (k + half) * math.log(x / 2) - math.lgamma(k + half + 1))
        return 1 - above

    return _bisected(below, probability, 10.0 * freedom + 100)


# -------------------------------------------------------------------------------- how many samples are needed


def resolvable_gap(
    samples: float, sd: float, *,
    level: float = 0.95, power: float = 0.8, comparisons: int = 1, freedom: int | None = None,
) -> float:  # fmt: skip
    r"""Return the smallest difference of two clients' scores that so many test samples can detect.

    .. math:: \mathrm{gap} = (z_{1 - a/2} + z_{\mathrm{power}}) \, \frac{\mathrm{sd}}{\sqrt m},
              \qquad a = \frac{1 - \mathrm{level}}{\mathrm{comparisons}}

    For LOO with accuracy, sd^2 = d - gap^2, where the gap is LOO itself and d is the share of samples on
    which one of M and M - U_i is right and the other wrong. To detect a given gap takes
    (resolvable_gap(1, sd) / gap)^2 samples.

    Args:
        samples: m, the number of test samples.
        sd: standard deviation, over test samples, of the difference of the two clients' per-sample terms.
        level: 1 minus the probability of finding a difference where there is none.
        power: probability of finding the gap if it exists.
        comparisons: number of pairs tested at once (Bonferroni): N(N-1)/2 for N clients.
        freedom: degrees of freedom of the errors: 30 with sketches on 500 samples, B - 1 with B blocks; None
            for very many. The error varies from test set to test set, so with :math:`\nu` of them the z are

            .. math:: t \Big(1 - \frac{1}{4 \nu}\Big), \quad z_{\mathrm{power}} \sqrt{1 + \frac{t^2}{2 \nu}},
                      \qquad t = t_{\nu, 1 - a/2}

    >>> round(resolvable_gap(samples=39240, sd=0.1414), 4)
    0.002
    """
    root = math.sqrt(_positive(samples, "samples"))
    return _reach(level, power, comparisons, freedom) * _positive(sd, "sd") / root


def _reach(level: float, power: float, comparisons: int, freedom: int | None) -> float:
    """Return z_{1 - a/2} + z_power, 2.80 by default; its square is the 7.85 of the rule of thumb."""
    tests = whole(comparisons, "comparisons", 1)
    chance = number(power)
    if chance is None or not 0.5 <= chance < 1:
        raise InputError(f"power must lie in [0.5, 1), got {power!r:.100}")
    tail, z = (1 - level_of(level)) / tests / 2, upper_quantile(1 - chance)
    if freedom is None:
        return upper_quantile(tail) + z
    free = whole(freedom, "freedom", 1)
    critical = quantiles(free)(tail)
    return critical * (1 - 1 / (4 * free)) + z * math.sqrt(1 + critical**2 / (2 * free))


def _positive(setting: float, name: str) -> float:
    value = number(setting)
    if value is None or not 0 < value < math.inf:
        raise InputError(f"{name} must be a finite number above 0, got {setting!r:.100}")
    return value


# --------------------------------------------------------------------------- metrics of the whole test set

# AUC, F1, the C-index and the like are no means over samples. Their error is that of the jackknife over B
# blocks of samples (Efron & Stein 1981).

BLOCKS = 10
"""Blocks of the jackknife; fewer if there are fewer samples. A metric is computed once more than this."""

NAMES = frozenset({
    "auc", "roc-auc", "auroc", "auc-roc", "auprc", "pr-auc", "f1", "f1-score", "macro-f1", "c-index",
    "cindex", "concordance", "concordance-index", "mcc", "kappa",
})  # fmt: skip
"""Names of metrics that are no means over samples, in lower case with hyphens, wherever they are reported."""

Indices = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


def jackknife(
    name: str, metric: Callable[[Indices], Any], blocks: Sequence[Indices], *, unit: bool = True
) -> Vector:
    r"""Return pseudo-values of a metric, one per block; their mean is the metric of all samples.

    .. math:: p_b = \theta + (B - 1) \Big(\frac1B \sum_c \theta_{-c} - \theta_{-b}\Big)

    with :math:`\theta` on all samples and :math:`\theta_{-b}` without block b; the error is
    :math:`\mathrm{sd}(p) / \sqrt B`. Differences of pseudo-values are pseudo-values of differences, so they
    can stand for numbers per sample.

    Args:
        name: of the metric, for messages.
        metric: (places of samples) -> number.
        blocks: places of each block's samples; together all samples.
        unit: whether the metric promises to lie in [0, 1].

    >>> x = np.array([1.0, 2.0, 6.0])
    >>> jackknife("mean", lambda places: x[places].mean(), [np.array([i]) for i in range(3)], unit=False)
    array([1., 2., 6.])
    """
    if len(blocks) < 2:
        raise ReportError(f"metric {name!r}: expected at least 2 test samples, got {len(blocks)}")
    everything = np.sort(np.concatenate(blocks))
    overall = value(name, metric, everything, unit=unit)
    without = np.array([
        value(name, metric, np.setdiff1d(everything, block), f" without block {number}", unit=unit)
        for number, block in enumerate(blocks, 1)
    ])  # fmt: skip
    values = overall + (len(blocks) - 1) * (without.mean() - without)
    return np.asarray(values + (overall - math.fsum(values) / len(values)), dtype=np.float64)


def value(
    name: str, metric: Callable[[Indices], Any], places: Indices, where: str = "", *, unit: bool = True
) -> float:
    """Return a metric of some samples; raise `ReportError` unless it is a number in its range."""
    what = f"metric {name!r} of the {len(places)} test samples{where}"
    try:
        result = float(metric(places))
    except ReportError as error:
        raise ReportError(f"{what}: {error}") from error
    except Exception as error:  # a user's code may raise anything
        raise ReportError(f"{what} failed: {type(error).__name__}: {error}") from error
    if not math.isfinite(result):
        raise ReportError(f"{what} is {result}, expected a number")
    if unit and not -1e-9 <= result <= 1 + 1e-9:
        why = "a function with another range has the attribute unit = False"
        raise ReportError(f"{what} must lie in [0, 1], got {result:g}; {why}")
    return min(max(result, 0.0), 1.0) if unit else result


SCALED = ("rmse-skill", "mae-skill")
"""Utilities of errors, which lie in [0, 1] by a scale that is part of their name: rmse-skill:20."""


def is_whole(utility: str | None) -> bool:
    """Return whether a utility is a metric of the whole test set, which its name says.

    >>> [is_whole(name) for name in ("ROC_AUC", "accuracy", None, "whole:median")]
    [True, False, False, True]
    """
    plain = (utility or "").strip().casefold().replace("_", "-").replace(" ", "-")
    return plain.startswith("whole:") or plain in NAMES


def scale_of(utility: str | None) -> float | None:
    """Return the error from which on an answer counts as 0 in a utility of errors; None for any other one.

    >>> scale_of("rmse-skill:20"), scale_of("rmse-skill"), scale_of("brier")
    (20.0, 0.0, None)
    """
    name, _, scale = (utility or "").partition(":")
    if name not in SCALED:
        return None
    try:
        return float(scale or 0)
    except ValueError:
        return math.nan


def least_change(utility: str | None, y: npt.ArrayLike) -> float:
    r"""Return by how much one changed answer changes F1, about; 0 for other metrics.

    .. math:: \frac{2}{\mathrm{answered} + \mathrm{true}} \approx \frac{1}{\mathrm{true}}

    with the samples of class 1; of more than two classes, the rarest decides, by its part in their mean. The
    blocks of a small test set often show no change at all. So this much is added to their error, as if one
    answer changed; else 95 % intervals cover as little as a tenth of all cases.

    >>> least_change("f1", [0, 0, 0, 1]), least_change("macro-F1", [0, 1, 2, 2]), least_change("auc", [0, 1])
    (1.0, 0.3333333333333333, 0.0)
    """
    answers = np.asarray(y)
    if not (is_whole(utility) and "f1" in (utility or "").casefold()) or answers.dtype.kind not in "iub":
        return 0.0
    classes, counts = np.unique(answers, return_counts=True)
    if len(classes) > 2:
        return 1 / (len(classes) * int(counts.min()))
    return 1 / int(counts[-1])


def as_error(utility: str | None, value: float) -> tuple[str, float] | None:
    """Return name and size of the error behind the mean of a skill, in the unit of y; else None.

    >>> as_error("rmse-skill:10", 0.75), as_error("mae-skill:10", 0.75), as_error("auc", 0.75)
    (('RMSE', 5.0), ('MAE', 2.5), None)
    """
    if utility is None or not (scale := scale_of(utility)):
        return None
    rest = max(0.0, 1.0 - value)
    return ("RMSE", scale * math.sqrt(rest)) if utility.startswith("rmse") else ("MAE", scale * rest)


def auc(outputs: Numbers, y: Numbers) -> float:
    """Return the area under the ROC curve; of more than two classes, the mean of each against the rest.

    >>> auc(np.array([[0, 1.0], [0, 3.0], [0, 2.0], [0, 3.0]]), np.array([0, 1, 0, 0]))  # 2.5 pairs of 3
    0.8333333333333334
    """
    classes = outputs.shape[1]
    if classes == 2:
        return _auc(outputs[:, 1] - outputs[:, 0], y == 1, 1)
    shifted = np.exp(outputs - outputs.max(1, keepdims=True))
    p = shifted / np.sort(shifted, axis=1).sum(1, keepdims=True)  # sorted: equal on paper, equal here
    return math.fsum(_auc(p[:, c], y == c, c) for c in range(classes)) / int(classes)


def _auc(score: Numbers, positive: npt.NDArray[np.bool_], c: int) -> float:
    """Return the share of pairs (positive, negative) in which the positive one has more; a tie is half."""
    inside, outside = int(positive.sum()), int((~positive).sum())
    if not inside or not outside:
        needed = f"AUC needs samples of class {c} and others"
        raise ReportError(f"{needed}, got {inside} and {outside}: take a larger test set")
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # ranks from 1, ties at their mean
    return float((middle[place][positive].sum() - inside * (inside + 1) / 2) / (inside * outside))


def f1(outputs: Numbers, y: Numbers) -> float:
    """Return F1 of class 1; with more than two classes, the mean of F1 over classes (macro).

    >>> f1(np.array([[0, 1.0], [0, 1.0], [1.0, 0], [1.0, 0]]), np.array([1, 0, 1, 0]))
    0.5
    """
    answer = outputs.argmax(1)
    by_class = []
    for c in [1] if outputs.shape[1] == 2 else range(outputs.shape[1]):
        answered, true = answer == c, y == c
        if not true.any():
            raise ReportError(f"F1 needs samples of class {c}, got none: take a larger test set")
        by_class.append(2 * float((answered & true).sum()) / float(answered.sum() + true.sum()))
    return math.fsum(by_class) / len(by_class)


def c_index(outputs: Numbers, y: Numbers) -> float:
    """Return Harrell's C-index: the share of comparable pairs in which the earlier event had more risk.

    ``outputs`` are risks, shape (m,); ``y``, shape (m, 2), is the time, and whether the event was seen then
    (1) or the case was censored (0).

    >>> c_index(np.array([3.0, 1.0, 2.0]), np.array([[1, 1], [2, 0], [3, 1]]))  # the second is censored
    1.0
    """
    if y.ndim != 2 or y.shape[1] != 2:
        raise ReportError(f"c-index needs y with a time and an event per sample, got shape {y.shape}")
    time, seen, risk = y[:, 0], y[:, 1] != 0, outputs.reshape(len(y))
    pairs = better = 0.0
    for i in np.flatnonzero(seen):
        later = time > time[i]
        pairs += float(later.sum())
        better += float((risk[i] > risk[later]).sum()) + float((risk[i] == risk[later]).sum()) / 2
    if not pairs:
        raise ReportError("c-index needs a sample with an event before the time of another, got none")
    return better / pairs
