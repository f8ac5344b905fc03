"""What a round comes to: the sum that members are told, the model that follows, reports on it, and the round.

After the secure sum the server sends every included member what was summed (:class:`Told`). The member
computes the model M from it (:class:`Outcome`), builds the two models that nobody else can build, evaluates
them on the revealed test slice and answers with a :class:`Report`. A report carries the hashes of what it was
computed on. The server drops a report that was computed on anything else, and a member stops if the server's
hashes differ from its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import BindingError, BoundError, LedgerError, MessageError
from fedmerit.identity import canonical, commitment, exact, new_salt, number
from fedmerit.notes import Note
from fedmerit.protocol.pool import BALANCED, Sampling, Slice
from fedmerit.scoring.metrics import least_change
from fedmerit.scoring.sampling import (
    SKETCH,
    belongs,
    degrees,
    error_parts,
    least_error,
    sketch,
    standard_error,
)
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.types import Reports, Scores
from fedmerit.secagg.quantise import Decoded, Encoding, Words, blocks
from fedmerit.secagg.setting import LEAST_IN_SUM, Result

# -------------------------------------------------------------------------------------- outcome and report

Model = npt.NDArray[np.float32]
"""A model as one flat vector, shape (P,)."""
PerSample = Mapping[str, npt.NDArray[np.float64]]
"""Utility -> one number per test sample, shape (m,); or one per block, see `fedmerit.scoring.metrics`."""
Evaluate = Callable[[Model, Slice], PerSample]
Game = Literal["additive", "renormalised"]


def model_hash(model: Model) -> str:
    """Return the SHA-256 of the float32 numbers, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(model, dtype="<f4").data).hexdigest()


def sum_hash(words: Words) -> str:
    """Return the SHA-256 of the integers that were summed, as 32-bit words, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(words, dtype="<u4").data).hexdigest()


def moved(m0: Model, weighted_sum: npt.NDArray[np.float64], total_weight: float) -> Model:
    """Return M = M0 + sum of w_i d_i / W, rounded once so that members and server get the same bits."""
    model = np.empty(m0.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # `Outcome.of` refuses what is not finite
        for at in blocks(m0.size):
            model[at] = m0[at] + weighted_sum[at] / total_weight
    return model


def included_hash(included: Sequence[str]) -> str:
    """Return the SHA-256 of the names in a sum, in the order of the schedule."""
    return hashlib.sha256(canonical(list(included))).hexdigest()


@dataclass(frozen=True, eq=False)
class Told:
    """What the server says about a round: the integers that were summed, whose they are, the test slice.

    The model M is not said. Members compute it from the integers, so what they sign for is the sum itself.
    """

    round: int
    words: Words  # X, the sum of the members' integers modulo 2^32
    included: tuple[str, ...]
    slice: Slice | None  # None where nothing is reported: the member acknowledges the sum
    m0_hash: str
    head: str  # of the ledger before this round; a report signs it, and so the history so far

    def outcome(self, m0: Model, encoding: Encoding, public: Mapping[str, float] | None) -> Outcome:
        """Return W and M as they follow from the integers; computed once for members who share a process.

        Args:
            m0: the model with the hash ``m0_hash``, from which the members started.
            encoding: how their updates became integers.
            public: the weights of the scheduled members, if these are public.

        Raises:
            BoundError: members within the bound and the weight cap cannot have this sum.
            BindingError: M is not finite.
        """
        asked = (encoding, public)
        if "_outcome" not in self.__dict__ or self.__dict__["_outcome"][0] != asked:
            total = None
            if public is not None:
                total = math.fsum(public.get(name, math.nan) for name in self.included)
            decoded = encoding.decode(self.words, included=len(self.included), public_total=total)
            found = Outcome.of(self, moved(m0, decoded.weighted_sum, decoded.total_weight), decoded)
            self.__dict__["_outcome"] = asked, found
        outcome: Outcome = self.__dict__["_outcome"][1]
        return outcome


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a round, the same for the server and for every included member."""

    round: int
    model: Model
    total_weight: float
    included: tuple[str, ...]
    slice: Slice | None
    m0_hash: str
    head: str  # of the ledger before this round; a report signs it, and so the history so far
    sum_hash: str  # of the integers that were summed

    @classmethod
    def of(cls, told: Told, model: Model, result: Result | Decoded) -> Outcome:
        """Return the outcome of a round whose integers stand for ``result`` and move M0 to ``model``."""
        if not np.isfinite(model).all():
            raise BindingError("M is not finite", stage="report")
        where = (told.included, told.slice, told.m0_hash, told.head)
        return cls(told.round, model, result.total_weight, *where, sum_hash(told.words))

    @cached_property
    def bound_to(self) -> Mapping[str, str]:
        """What a report depends on: hashes of models, sum, slice and names, the total weight, the head."""
        return {
            "m0": self.m0_hash,
            "m": model_hash(self.model),
            "x": self.sum_hash,
            "weight": exact(self.total_weight),
            **({} if self.slice is None else {"slice": self.slice.id}),
            "included": included_hash(self.included),
            "head": self.head,
        }

    def check(self, member: str, weight: float, encoding: Encoding) -> None:
        """Raise BindingError unless this can be a sum that a member of this weight is in.

        That the sum lies within the bound has been checked when it was decoded (`Told.outcome`).
        """
        n, total = len(self.included), self.total_weight
        least = weight + (n - 1) if encoding.weights == "secret" else 0.0
        problem = ""
        if member not in self.included or len(set(self.included)) != n:
            problem = "asked to report on a sum we are not in"
        elif n < LEAST_IN_SUM:
            problem = f"a sum of {n} members hides no update"
        elif not total >= least:
            problem = f"{n} members cannot have a total weight of {total:g}"
        if problem:
            raise BindingError(problem, stage="report", member=member)


@dataclass(frozen=True)
class Measured:
    """One utility as one member measured it, with standard errors paired over the test samples."""

    alone: float
    without: float
    se_loo: float
    se_ioi: float
    se_alpha: float
    se_alpha_total: float | None = None
    solo: float | None = None
    empty: float | None = None  # v(M0) and v(M) as the member measured them
    grand: float | None = None
    sketch: tuple[float, ...] | None = None  # of the error of alpha, see `fedmerit.scoring.sampling`
    freedom: int | None = None  # degrees of freedom of these errors: test samples minus strata

    def body(self) -> dict[str, Any]:
        """Return the numbers as they are recorded and sent: as text, but for whole numbers."""
        told: dict[str, Any] = {key: value for key, value in vars(self).items() if value is not None}
        if self.sketch is not None:
            told["sketch"] = [f"{value:.7g}" for value in self.sketch]
        return {key: value if key in _OTHERS else exact(value) for key, value in told.items()}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Measured:
        """Read what `body` wrote."""
        found: dict[str, Any] = {}
        for key, value in body.items():
            read: Callable[[Any], Any] = _OTHERS.get(key, _finite)
            found[key] = read(value)
        return cls(**found)


@dataclass(frozen=True)
class Report:
    """One member's report on one round; an acknowledgement of the sum if it measures nothing."""

    client: str
    round: int
    bound_to: Mapping[str, str]
    measured: Mapping[str, Measured]
    cosine: float | None
    salt: str = field(default_factory=new_salt, compare=False)  # so that the record's hash reveals nothing

    def body(self, run: str) -> dict[str, Any]:
        """Return the report as it is recorded and sent: without floats, bound to the run."""
        return {
            "run": run,
            "salt": self.salt,
            "round": self.round,
            "bound_to": dict(self.bound_to),
            "cosine": None if self.cosine is None else exact(self.cosine),
            "measured": {name: one.body() for name, one in self.measured.items()},
        }

    @classmethod
    def from_body(cls, client: str, body: Mapping[str, Any], *, run: str) -> Report:
        """Read a report; raise MessageError or BindingError if it is not one of this run."""
        try:
            if body["run"] != run:
                raise BindingError("belongs to another run", stage="report", member=client)
            cosine = body["cosine"]
            return cls(
                client=client,
                round=_whole(body["round"]),
                bound_to={str(key): str(value) for key, value in body["bound_to"].items()},
                measured={str(name): Measured.from_body(one) for name, one in body["measured"].items()},
                cosine=None if cosine is None else _finite(cosine),
                salt=_salt(body["salt"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, LedgerError) as error:
            raise MessageError(f"not a report: {error!r:.200}", stage="report", member=client) from error


def accept(
    report: Report, outcome: Outcome, utilities: Sequence[str], sampling: Sampling | None = None
) -> None:
    """Raise unless a report is about this round and computed on exactly these models, weights and samples.

    Args:
        report: what the member sent.
        outcome: of the round.
        utilities: those that members measure.
        sampling: how standard errors are measured; None does not ask.
    """
    if report.round != outcome.round:
        raise BindingError(
            f"answers round {report.round}, but this is round {outcome.round}",
            stage="report",
            member=report.client,
        )
    if report.client not in outcome.included:
        raise BindingError("reports on a sum it is not in", stage="report", member=report.client)
    for what in {**outcome.bound_to, **report.bound_to}:
        if report.bound_to.get(what) != outcome.bound_to.get(what):
            named = what if what in outcome.bound_to else f"{what!r:.40}"
            raise BindingError(
                f"computed on a different {named} from ours", stage="report", member=report.client
            )
    if set(report.measured) != set(utilities):
        raise MessageError(
            f"expected utilities {', '.join(utilities)}, got {sorted(report.measured)!r:.200}",
            stage="report",
            member=report.client,
        )
    shown = outcome.slice
    for name, one in report.measured.items():
        if sampling is None or shown is None:
            break
        expected, problem = sampling.freedom(name, shown), ""
        if one.freedom != expected or (one.sketch is None) != (expected is None):
            problem = f"expected a sketch exactly with degrees of freedom, and {expected} of them"
        elif one.sketch is not None and not belongs(one.sketch, one.se_alpha):
            problem = f"its sketch is not that of an error of {one.se_alpha:g}"
        if problem:
            raise MessageError(f"{name}: {problem}", stage="report", member=report.client)


def _salt(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise ValueError("a salt is 32 hexadecimal digits")
    return value


def _finite(text: Any) -> float:
    if not math.isfinite(found := number(text)):
        raise ValueError(f"a report holds finite numbers, got {found}")
    return found


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected a whole number, got {value!r:.40}")
    return value


def _sketch(given: Any) -> tuple[float, ...]:
    if not isinstance(given, list) or len(given) != SKETCH:
        raise ValueError(f"a sketch has {SKETCH} numbers")
    found = tuple(float(text) for text in given)
    if any(
        f"{value:.7g}" != text or not math.isfinite(value) for value, text in zip(found, given, strict=True)
    ):
        raise ValueError("a sketch holds finite numbers with seven digits")
    return found


_OTHERS: dict[str, Callable[[Any], Any]] = {"sketch": _sketch, "freedom": _whole}
"""How the fields of `Measured` are read that are not numbers in hexadecimal."""


def check_numbers(report: Report) -> None:
    """Raise MessageError if a report has numbers that no utility in [0, 1] can have; not for rehearsals."""
    for name, one in report.measured.items():
        for key, value in vars(one).items():
            if key in _OTHERS:
                continue  # `accept` compares them with the test slice and with se_alpha
            most = float(report.round) if key == "se_alpha_total" else 1.0
            needed = key in ("empty", "grand")
            if (value is None and needed) or (value is not None and not 0 <= value <= most):
                raise MessageError(
                    f"{key} of {name} must lie in [0, {most:g}], got {value}",
                    stage="report",
                    member=report.client,
                )
    if report.cosine is not None and not -1 <= report.cosine <= 1:
        raise MessageError(
            f"cosine must lie in [-1, 1], got {report.cosine:g}", stage="report", member=report.client
        )


# -------------------------------------------------------------------------------------- a member measures
# One member's side of scoring: the two models that only it can build, and its report on them.


@dataclass(frozen=True, eq=False)
class Contribution:
    """w_i d_i as it was summed, that is, after rounding to integers.

    In float64 it would be as large as two models. So whoever computes with it takes it part by part, in
    blocks that fit into the processor's cache.

    Args:
        integers: one per coordinate, shape (P,).
        step: the value of one unit of them.
    """

    integers: npt.NDArray[np.int32]
    step: float

    @classmethod
    def of(cls, words: Words, encoding: Encoding) -> Contribution:
        """Return what a member's own words stand for."""
        return cls(words[: encoding.length].view(np.int32), encoding.step)

    def part(self, at: slice) -> npt.NDArray[np.float64]:
        """Return the coordinates of a block."""
        return self.integers[at] * np.float64(self.step)

    def update(self, total_weight: float) -> Model:
        """Return U_i = w_i d_i / W."""
        update = np.empty(self.integers.shape, np.float32)
        for at in blocks(update.size):
            update[at] = self.part(at) / total_weight
        return update

    def cosine(self, m0: Model, m: Model) -> float | None:
        """Return the cosine with the whole change M - M0; products are summed block by block.

        Without BLAS, whose threads take longer to meet than a block takes.
        """
        products = np.zeros(3)
        for at in blocks(m0.size):
            own, change = self.part(at), np.subtract(m[at], m0[at], dtype=np.float64)
            pairs = (own, own), (change, change), (own, change)
            products += [np.einsum("i,i", one, other) for one, other in pairs]
        return cosine(*products.tolist())


class Evaluations:
    """Per-sample utilities of models, with a cache for M0 and M by their hashes.

    M is the next round's M0, and members who share a process all need both. With the cache, N such members
    need 2N + 1 evaluations per round, and one more in the first round and on every fresh test slice.
    """

    MOST = 4  # M0, M, and the first model if members also train alone

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self._kept: dict[tuple[str, str], PerSample] = {}

    def __call__(self, model: Model, shown: Slice, digest: str = "") -> PerSample:
        """Return every utility of every sample; cache the result if the model's hash is given."""
        if not digest:
            return self.evaluate(model, shown)
        key = digest, shown.id
        found = self._kept.pop(key, None)
        self._kept[key] = self.evaluate(model, shown) if found is None else found  # in order of last use
        if len(self._kept) > self.MOST:
            del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def of_member(
        self,
        game: Game,
        m0: Model,
        outcome: Outcome,
        contribution: Contribution,
        weight: float,
        *,
        direction: bool,
    ) -> tuple[PerSample, PerSample, float | None]:
        """Return what only one member can measure.

        That is the utilities of its two models (`coalition_models`) and, with ``direction``, the cosine of
        its update with the whole change.
        """
        assert outcome.slice is not None
        alone, without = coalition_models(game, m0, outcome, contribution, weight)
        inside, outside = self.evaluate(alone, outcome.slice), self.evaluate(without, outcome.slice)
        return inside, outside, contribution.cosine(m0, outcome.model) if direction else None


@dataclass(eq=False)
class Scorer:
    """One member's side of scoring: what it keeps between rounds, and how it measures.

    Args:
        name: the member's name on the roster.
        evaluate: returns per-sample utilities of a model on a slice; runs the member's own code.
        game: how coalition models are built.
        sampling: how standard errors are measured.
        totals: per utility, alpha per test sample, summed over the rounds on one slice (private).
        totals_on: id of that slice.
    """

    name: str
    evaluate: Evaluations
    game: Game = "additive"
    sampling: Sampling = field(default_factory=Sampling)
    totals: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    totals_on: str = ""

    def report(
        self,
        m0: Model,
        outcome: Outcome,
        contribution: Contribution,
        weight: float,
        *,
        solo: Model | None = None,
        direction: bool = True,
    ) -> Report:
        """Evaluate M0 + U_i and M - U_i and return the report. The outcome must have been checked before.

        Args:
            m0: the model this member started from.
            outcome: the result of the round, as the server states it.
            contribution: w_i d_i as it was summed.
            weight: w_i.
            solo: the model this member trained alone, if it does so.
            direction: whether to report the cosine with the whole change. It tells a server that chooses M
                one exact number about the update, so members who do not trust the server leave it out.
        """
        shown = outcome.slice
        if shown is None:
            return Report(self.name, outcome.round, outcome.bound_to, {}, None)
        before = self.evaluate(m0, shown, outcome.m0_hash)
        after = self.evaluate(outcome.model, shown, outcome.bound_to["m"])
        inside, outside, along = self.evaluate.of_member(
            self.game, m0, outcome, contribution, weight, direction=direction
        )
        own = None if solo is None else self.evaluate(solo, shown)
        return Report(
            client=self.name,
            round=outcome.round,
            bound_to=outcome.bound_to,
            measured={
                name: self._measure(name, outcome, before, after, inside, outside, own) for name in before
            },
            cosine=along,
        )

    def _measure(
        self,
        name: str,
        outcome: Outcome,
        before: PerSample,
        after: PerSample,
        inside: PerSample,
        outside: PerSample,
        own: PerSample | None,
    ) -> Measured:
        assert outcome.slice is not None
        self.sampling.check(name, after[name], outcome.slice)
        loo = after[name] - outside[name]
        ioi = inside[name] - before[name]
        alpha = (loo + ioi) / 2
        if self.totals_on != outcome.slice.id:
            self.totals, self.totals_on = {}, outcome.slice.id
        self.totals[name] = self.totals.get(name, np.zeros_like(alpha)) + alpha
        models = [part[name] for part in (before, after, inside, outside)]
        return Measured(
            alone=mean(inside[name]),
            without=mean(outside[name]),
            solo=None if own is None else mean(own[name]),
            empty=mean(before[name]),
            grand=mean(after[name]),
            **self._errors(name, outcome, models, loo, ioi, alpha),
        )

    def _errors(
        self,
        name: str,
        outcome: Outcome,
        models: Sequence[npt.NDArray[np.float64]],
        loo: npt.NDArray[np.float64],
        ioi: npt.NDArray[np.float64],
        alpha: npt.NDArray[np.float64],
    ) -> dict[str, Any]:
        """Return the standard errors of a report, by field."""
        shown = outcome.slice
        assert shown is not None
        strata = self.sampling.strata(name, shown)
        terms = {"se_loo": loo, "se_ioi": ioi, "se_alpha": alpha, "se_alpha_total": self.totals[name]}
        if strata is None:
            counted = name not in self.sampling.whole and all(
                np.isin(one, (0.0, 1.0)).all() for one in models
            )
            return {key: standard_error(values, counted=counted) for key, values in terms.items()}
        scale = class_scale(shown.y) if name == BALANCED else np.ones(1)
        least = least_change(name, shown.y)
        if name not in self.sampling.whole:  # where a change of one outcome counts 1
            least = least_error([one / scale for one in models], scale)
        parts = {key: error_parts(values, strata) for key, values in terms.items()}
        found: dict[str, Any] = {
            key: math.hypot(least / (1 if key in ("se_loo", "se_ioi") else 2), *one.tolist())
            for key, one in parts.items()
        }
        stated = sketch(
            parts["se_alpha"], least / 2, slice_id=shown.id, round=outcome.round, client=self.name
        )
        return {**found, "sketch": stated, "freedom": degrees(strata)}


def class_scale(labels: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return m / (C m_y) for every sample: what balanced accuracy multiplies its outcome by."""
    _, classes, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    return np.asarray(len(classes) / (len(counts) * counts[classes]), dtype=np.float64)


def coalition_models(
    game: Game, m0: Model, outcome: Outcome, contribution: Contribution, weight: float
) -> tuple[Model, Model]:
    r"""Return the two models that only this member can build: of the coalition {i}, and of all others.

    .. math:: \text{additive: } M_0 + U_i, \ M - U_i \text{ with } U_i = w_i d_i / W; \qquad
        \text{renormalised: } M_0 + d_i, \ M_0 + \frac{W (M - M_0) - w_i d_i}{W - w_i}
    """
    total = outcome.total_weight
    check_weight(game, weight, total)
    alone, without = np.empty(m0.shape, np.float32), np.empty(m0.shape, np.float32)
    for at in blocks(m0.size):
        own, start, model = contribution.part(at), m0[at], outcome.model[at]
        if game == "additive":
            update = (own / total).astype(np.float32)
            alone[at], without[at] = start + update, model - update
        else:
            change = np.subtract(model, start, dtype=np.float64)
            rest = (change * total - own) / (total - weight)
            alone[at] = start + (own / weight).astype(np.float32)
            without[at] = start + rest.astype(np.float32)
    return alone, without


def check_weight(game: Game, weight: float, total: float) -> None:
    """Raise BoundError if the renormalised game has no model of this member, or none of all others."""
    if game == "renormalised" and (weight <= 0 or total - weight <= 0):
        raise BoundError(
            f"the renormalised game needs 0 < w_i < W, got {weight:g} of {total:g}", stage="report"
        )


def cosine(one: float, other: float, product: float) -> float | None:
    """Return the cosine of two vectors from <a, a>, <b, b> and <a, b>; None if one of them is zero.

    >>> cosine(4.0, 9.0, -6.0)
    -1.0
    """
    scale = math.sqrt(one) * math.sqrt(other)
    return None if scale == 0.0 else max(-1.0, min(1.0, product / scale))


def mean(values: npt.NDArray[np.float64]) -> float:
    return math.fsum(values) / values.size


# ------------------------------------------------------------------------------------------------- a round

_COLUMNS = ("alone", "without", "se_loo", "se_ioi", "se_alpha", "se_alpha_total")
TOLERANCE = 1e-6
"""Members who differ by more are named; machines of the same kind differ by less."""


@dataclass(eq=False)
class Round:
    """One round: who took part, their reports, and how it was closed. A closed round does not change."""

    number: int
    scheduled: tuple[str, ...]
    included: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    blamed: tuple[str, ...] = ()  # members who provably broke the protocol in this round
    silent: tuple[str, ...] = ()
    aborted: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)  # of the closing record
    reports: dict[str, Report] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()  # in a copy: members whose reports its reader may not see
    since: int | None = None  # the first round of its run, if it follows others
    _phi: dict[str, Scores | None] = field(default_factory=dict, init=False, repr=False)
    _reports: dict[str, Reports | None] = field(default_factory=dict, init=False, repr=False)

    def to_phi(self, utility: str) -> Scores | None:
        """Return the Aumann-Shapley scores of everybody in the sum, or None if the round has none."""
        if utility not in self._phi:
            self._phi[utility] = self._make_phi(utility)
        return self._phi[utility]

    def to_reports(self, utility: str) -> Reports | None:
        """Return the reports that scores take (in a copy, those it shows), or None if there are none."""
        if utility not in self._reports:
            self._reports[utility] = self._make_reports(utility)
        return self._reports[utility]

    def _make_phi(self, utility: str) -> Scores | None:
        found = (self.body.get("phi") or {}).get(utility)
        if found is None:
            return None
        columns = [[number(value) for value in found["blocks"][name]] for name in self.included]
        return from_blocks(np.transpose(columns), found["sizes"], self.included)

    def _make_reports(self, utility: str) -> Reports | None:
        if self.aborted or not any(report.measured for report in self.reports.values()):
            return None
        named = [name for name in self.included if name in self.reports]
        measured = [self.reports[name].measured[utility] for name in named]

        def column(key: str) -> list[Any] | None:
            values = [getattr(one, key) for one in measured]
            return None if any(value is None for value in values) else values

        cosines = [self.reports[name].cosine for name in named]  # all None where members leave them out
        utilities, samples = self.body["utilities"][utility], self.body.get("samples")
        solo = column("solo") if "first" in utilities else None
        sketches, freedoms = column("sketch"), column("freedom")
        return Reports(
            empty=number(utilities["empty"]),
            grand=number(utilities["grand"]),
            clients=tuple(named),
            silent=(*self.silent, *self.withheld),
            slice=self.body["slice"],
            samples=None if samples is None else [samples[name] for name in named],  # type: ignore[arg-type]
            cosine=cosines if any(one is not None for one in cosines) else None,  # type: ignore[arg-type]
            solo=solo,  # type: ignore[arg-type]
            solo_empty=None if solo is None else number(utilities["first"]),
            utility=utility,
            round=self.number,
            since=self.since,
            sketch=sketches,  # type: ignore[arg-type]
            freedom=None if freedoms is None else int(min(freedoms)),
            **{key: column(key) for key in _COLUMNS},  # type: ignore[arg-type]
        )

    def differences(self, tolerance: float = TOLERANCE) -> dict[str, Note]:
        """Return the members whose own v(M0) or v(M) differs from the one the round is scored with, and how.

        ``tolerance`` is relative to 1 or to the value that the round is scored with, whichever is larger.
        """
        found: dict[str, Note] = {}
        for name, report in self.reports.items():
            for utility, used in self.body["utilities"].items():
                own = report.measured[utility]
                for what, mine, its in (
                    ("v(M0)", own.empty, number(used["empty"])),
                    ("v(M)", own.grand, number(used["grand"])),
                ):
                    if mine is not None and not abs(mine - its) <= tolerance * max(1.0, abs(its)):
                        how = Note("differs-how", what=what, own=mine, utility=utility, used=its)
                        found.setdefault(name, how)
        return found


# ------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of local training: the model it started from, the change, the number of samples, and what an
    evaluation must know about the model's shape (anything that msgpack can carry)."""

    m0: Model
    delta: npt.NDArray[np.float32]
    samples: float | None
    shape: Any = None


def no_check(trained: Trained, config: Config) -> None:
    """Accept any update; masking refuses the bad ones."""


@dataclass(frozen=True, eq=False)
class Work:
    """A model to train: M0, the digest of everything else that came with it, the function that trains it, and
    a check that explains, in the app's own words, why the settings do not allow an update."""

    m0: Model
    extra: bytes
    train: Callable[[], Trained]
    check: Callable[[Trained, Config], None] = no_check
    m0_hash: str = ""  # given if it is known: many members of one process start from one array

    def __post_init__(self) -> None:
        object.__setattr__(self, "m0_hash", self.m0_hash or model_hash(self.m0))


# ------------------------------------------------------------------------------------ what is kept of a round


def file_name(number: int, what: str) -> str:
    """Return the name of a value of a round."""
    return f"{number:04d}.{what}"


def as_array(kept: Any, kind: str) -> npt.NDArray[Any]:
    """Return an array that was stored in a state, which may hand back its bytes."""
    return kept if isinstance(kept, np.ndarray) else np.frombuffer(kept, kind).copy()


# The lines of a member's own file; `ledger.head_log` explains them and compares them with a ledger.


def kept_head(number: int, head: str) -> str:
    """Return the line for a head that was shown as the head after a round."""
    return f"{number} {head}"


def kept_trained(number: int, m0_hash: str) -> str:
    """Return the line for a masked update, with the hash of the model it starts from."""
    return f"{number} trained {m0_hash}"


def kept_masked(number: int, member: str, digest: str) -> str:
    """Return the line for the masked words that this member sent, hashed as in the record ``masked``."""
    return f"{number} masked {json.dumps(member)} {digest}"


def kept_complained(number: int, member: str, dealer: str) -> str:
    """Return the line for a complaint of this member about a dealer of a bad share."""
    return f"{number} complained {json.dumps([member, dealer])}"


def kept_released(number: int, included: Sequence[str]) -> str:
    """Return the line for shares that were released for the sum of these members."""
    return f"{number} released {json.dumps(list(included))}"


def kept_opened(number: int, settlement: str) -> str:
    """Return the line for a manifest that was shown after the last round, by its digest."""
    return f"{number} opened {settlement}"


def kept_stated(number: int, member: str, body: Mapping[str, Any]) -> str:
    """Return the line for this member's statement, hashed as in the ledger."""
    return f"{number} stated {json.dumps(member)} {commitment(body).hex()}"


def kept_report(number: int, body: Mapping[str, Any], bound_to: Mapping[str, Any]) -> str:
    """Return the line for a report and the outcome it is about, by their hashes."""
    outcome = commitment({"round": number, **bound_to})
    return f"{number} report {commitment(body).hex()} {outcome.hex()}"
