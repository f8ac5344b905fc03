"""Rescaling raw scores so that they add up to a pot, and saying what that did to their order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np

from fedmerit.errors import InputError
from fedmerit.types import Reports, Scores, Status, Vector

Pot = Literal["grand", "gain"]

Candidate = tuple[str, Vector, Vector]
"""What a raw vector is called, the vector, and what rounding may have done to each of its entries."""


def noise(reports: Reports) -> Vector:
    r"""What rounding alone can leave of a client's four utilities where they cancel on paper.

    .. math:: 2 \epsilon \, (|v(M_0)| + |v(M)| + |v(M_0 + U_i)| + |v(M - U_i)|), \qquad \epsilon = 2^{-52}
    """
    shared = abs(reports.empty) + abs(reports.grand)
    return 2 * np.finfo(np.float64).eps * (shared + np.abs(reports.alone) + np.abs(reports.without))


def share_out(
    score: str, candidates: Iterable[Candidate], reports: Reports, pot: Pot, stderr: Vector | None
) -> Scores:
    r"""Rescale the first candidate x whose sum is not zero, so that it adds up to the pot.

    .. math:: \frac{x_i}{\sum_j x_j} \cdot \mathrm{pot}

    Zero means: within 1e-12 of the sum of absolute values, or no more than rounding leaves. ``raw`` is the
    first candidate in any case.
    """
    if pot not in ("grand", "gain"):
        raise InputError(f"pot must be 'grand' (v(M)) or 'gain' (v(M) - v(M0)), got {pot!r}")
    amount = reports.grand if pot == "grand" else reports.gain
    ranked_by: Vector | None = None
    status: Status = "ok"
    zero: list[str] = []  # candidates that add up to nothing
    note = ""
    equal = np.full(reports.n, amount / reports.n)
    values = equal
    for name, raw, lost in candidates:
        ranked_by = raw if ranked_by is None else ranked_by
        total = math.fsum(raw)
        if abs(total) <= max(1e-12 * math.fsum(np.abs(raw)), math.fsum(lost)):
            zero.append(name)
            continue
        values = raw / total * amount
        if zero:
            status, note = "fallback", f"{_zero_sums(zero)}; computed from {name} alone"
        elif (amount < 0) != (total < 0):  # a pot of zero is nothing, below
            status, note = "reversed", f"pot {amount:.6g} and sum {total:.6g} have opposite signs"
        break
    else:
        status, note = "undefined", f"{_zero_sums(zero)}; split equally"
    if _is_nothing(amount, reports, pot):
        values, status = equal, "undefined"
        note = f"nothing to distribute, the pot is 0{' up to rounding' if amount else ''}"
    assert ranked_by is not None
    return Scores(
        score=score, clients=reports.clients, values=values, raw=ranked_by, gain=reports.gain, status=status,
        stderr=stderr, notes=(f"{reports.where}{score}: {note}",) if note else (),
    )  # fmt: skip


def _is_nothing(amount: float, reports: Reports, pot: Pot) -> bool:
    """Whether the pot is empty; a gain is a difference, so what rounding leaves of one is nothing too."""
    shared = abs(reports.empty) + abs(reports.grand) if pot == "gain" else 0.0
    return bool(abs(amount) <= 2 * np.finfo(np.float64).eps * shared)


def _zero_sums(names: list[str]) -> str:
    said = "sum of" if len(names) == 1 else "sums of"
    return f"the {said} {', '.join(names)} over clients {'is' if len(names) == 1 else 'are'} zero"
