r"""Metrics of a whole test set, which are no means over samples: AUC, F1, the C-index, or a user's own.

The error of such a metric is that of the jackknife over B blocks of samples (Efron & Stein 1981). With
:math:`\theta` on all samples and :math:`\theta_{-b}` without block b, the pseudo-values are

.. math:: p_b = \theta + (B - 1) \Big(\frac1B \sum_c \theta_{-c} - \theta_{-b}\Big)

Their mean is :math:`\theta`, and :math:`\mathrm{sd}(p) / \sqrt B` is the error. Differences of pseudo-values
are pseudo-values of differences. So whatever takes one number per sample takes them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ReportError
from fedmerit.scoring.types import Vector

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
    name: str,
    metric: Callable[[Indices], Any],
    blocks: Sequence[Indices],
    *,
    unit: bool = True,
) -> Vector:
    """Return pseudo-values of a metric, one per block; their mean is the metric of all samples.

    Args:
        name: of the metric, for messages.
        metric: (places of samples) -> number.
        blocks: places of each block's samples; together all samples. At least two.
        unit: whether the metric promises to lie in [0, 1].

    Raises:
        ReportError: the metric fails, or returns anything but a number in its range.

    >>> x = np.array([1.0, 2.0, 6.0])
    >>> jackknife("mean", lambda places: x[places].mean(), [np.array([i]) for i in range(3)], unit=False)
    array([1., 2., 6.])
    """
    if len(blocks) < 2:
        raise ReportError(f"metric {name!r}: expected at least 2 test samples, got {len(blocks)}")
    everything = np.sort(np.concatenate(blocks))
    whole = value(name, metric, everything, unit=unit)
    parts = [(np.setdiff1d(everything, block), f" without block {b}") for b, block in enumerate(blocks, 1)]
    without = np.array([value(name, metric, rest, where, unit=unit) for rest, where in parts])
    values = whole + (len(blocks) - 1) * (without.mean() - without)
    return np.asarray(values + (whole - math.fsum(values) / len(values)), dtype=np.float64)


def value(
    name: str, metric: Callable[[Indices], Any], places: Indices, where: str = "", *, unit: bool = True
) -> float:
    """Return a metric of some samples; raise `ReportError` unless it is a number in its range."""
    said = f"metric {name!r} of the {len(places)} test samples{where}"
    try:
        given = metric(places)
        found = float(given)
    except ReportError as error:
        raise ReportError(f"{said}: {error}") from error
    except Exception as error:  # a user's code may raise anything
        raise ReportError(f"{said} failed: {type(error).__name__}: {error}") from error
    if not math.isfinite(found):
        raise ReportError(f"{said} is {found}, expected a number")
    if unit and not -1e-9 <= found <= 1 + 1e-9:
        raise ReportError(
            f"{said} must lie in [0, 1], got {found:g}; a function with another range has the attribute "
            "unit = False"
        )
    return min(max(found, 0.0), 1.0) if unit else found


def is_whole(utility: str | None, own: Collection[str] = ()) -> bool:
    """Return whether a utility is a metric of the whole test set: it is listed, or its name says so.

    >>> [is_whole(name) for name in ("ROC_AUC", "accuracy", None)], is_whole("median", ["median"])
    ([True, False, False], True)
    """
    plain = (utility or "").strip().casefold().replace("_", "-").replace(" ", "-")
    return utility in own or plain in NAMES


def least_change(utility: str | None, y: npt.ArrayLike) -> float:
    r"""Return by how much one changed answer changes F1, about; 0 for other metrics.

    .. math:: \frac{2}{\mathrm{said} + \mathrm{there}} \approx \frac{1}{\mathrm{there}}

    with the samples of class 1; of more than two classes, the rarest decides, by its part in their mean. The
    blocks of a small test set often show no change at all, and their error would be 0: 95 % intervals then
    cover as little as a tenth of all cases. So this much is added to the error, as if one answer changed.

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


def as_error(utility: str | None, value: float, scale: float) -> tuple[str, float] | None:
    """Return name and size of the error behind a skill, in the unit of y; None for other utilities.

    Args:
        utility: its name.
        value: its mean over the test samples.
        scale: of the settings; errors were cut there.

    >>> as_error("rmse-skill", 0.75, 10.0), as_error("mae-skill", 0.75, 10.0), as_error("auc", 0.75, 0.0)
    (('RMSE', 5.0), ('MAE', 2.5), None)
    """
    if not scale or utility not in ("rmse-skill", "mae-skill"):
        return None
    rest = max(0.0, 1.0 - value)
    return ("RMSE", scale * math.sqrt(rest)) if utility == "rmse-skill" else ("MAE", scale * rest)


def auc(outputs: Numbers, y: Numbers) -> float:
    """Return the area under the ROC curve; of more than two classes, the mean of each against the rest.

    Args:
        outputs: logits, shape (m, C).
        y: classes, shape (m,).

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
        raise ReportError(
            f"AUC needs samples of class {c} and others, got {inside} and {outside}: take a larger test set"
        )
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # ranks from 1, ties at their mean
    return float((middle[place][positive].sum() - inside * (inside + 1) / 2) / (inside * outside))


def f1(outputs: Numbers, y: Numbers) -> float:
    """Return F1 of class 1; with more than two classes, the mean of F1 over classes (macro).

    >>> f1(np.array([[0, 1.0], [0, 1.0], [1.0, 0], [1.0, 0]]), np.array([1, 0, 1, 0]))
    0.5
    """
    answer = outputs.argmax(1)
    of = [1] if outputs.shape[1] == 2 else range(outputs.shape[1])
    found = []
    for c in of:
        said, there = answer == c, y == c
        if not there.any():
            raise ReportError(f"F1 needs samples of class {c}, got none: take a larger test set")
        found.append(2 * float((said & there).sum()) / float(said.sum() + there.sum()))
    return math.fsum(found) / len(found)


def c_index(outputs: Numbers, y: Numbers) -> float:
    """Return Harrell's C-index: the share of comparable pairs in which the earlier event had more risk.

    Args:
        outputs: risks, shape (m,).
        y: time, and whether the event was seen then (1) or the case was censored (0), shape (m, 2).

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
