"""What a round comes to: the sum that members are told, the model that follows, reports on it, and the round.

After the secure sum the server sends every included member what was summed (`Told`). The member computes the
model M from it (`Outcome`), measures (`fedmerit.protocol.outcome`) and answers with a `Report`, which
carries the hashes of what it was computed on. The server drops a report that was computed on anything else,
and a member stops if the server's hashes differ from its own.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import BindingError, BoundError, LedgerError, MessageError, placing
from fedmerit.identity import canonical, commitment, exact, new_salt, number
from fedmerit.notes import Note
from fedmerit.protocol.pool import BALANCED, Sampling, Slice
from fedmerit.scoring.sampling import (
    SKETCH,
    belongs,
    degrees,
    error_parts,
    is_whole,
    least_change,
    least_error,
    sketch,
)
from fedmerit.scoring.types import Reports
from fedmerit.secagg.quantise import Encoding, Words, blocks
from fedmerit.secagg.setting import LEAST_IN_SUM, Task

# -------------------------------------------------------------------------------------- outcome and report

Model = npt.NDArray[np.float32]
"""A model as one flat vector, shape (P,)."""


def model_hash(model: Model) -> str:
    """Return the SHA-256 of the float32 numbers, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(model, dtype="<f4").data).hexdigest()


def sum_hash(words: Words) -> str:
    """Return the SHA-256 of the integers that were summed, as 32-bit words, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(words, dtype="<u4").data).hexdigest()


def moved(m0: Model, weighted_sum: npt.NDArray[np.float64], total_weight: float) -> Model:
    """Return M = M0 + sum of w_i d_i / W, rounded once so that members and server get the same bits."""
    model = np.empty(m0.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # `Told.moved_to` refuses what is not finite
        for at in blocks(m0.size):
            model[at] = m0[at] + weighted_sum[at] / total_weight
    return model


def model_after(m0: Model, words: Words, task: Task, included: Sequence[str]) -> tuple[Model, float]:
    """Return M and the total weight, as they follow from the integers that were summed."""
    decoded = task.decode(words, included)
    return moved(m0, decoded.weighted_sum, decoded.total_weight), decoded.total_weight


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

    def outcome(self, m0: Model, task: Task) -> Outcome:
        """Return W and M as they follow from the integers; computed once for members who share a process.

        Raise BoundError if members within the bound and the weight cap cannot have this sum.
        """
        if "_outcome" not in self.__dict__ or self.__dict__["_outcome"][0] != task:
            m, total_weight = model_after(m0, self.words, task, self.included)
            self.__dict__["_outcome"] = task, self.moved_to(m, total_weight)
        outcome: Outcome = self.__dict__["_outcome"][1]
        return outcome

    def moved_to(self, model: Model, total_weight: float) -> Outcome:
        """Return the outcome, given W and the model that the integers move M0 to."""
        if not np.isfinite(model).all():
            raise BindingError("M is not finite", stage="report")
        told = {key.name: getattr(self, key.name) for key in fields(Told)}
        return Outcome(**told, model=model, total_weight=total_weight)


@dataclass(frozen=True, eq=False)
class Outcome(Told):
    """The result of a round, the same for the server and for every included member."""

    model: Model
    total_weight: float

    @cached_property
    def bound_to(self) -> Mapping[str, str]:
        """What a report depends on: hashes of models, sum, slice and names, the total weight, the head."""
        return {
            "m0": self.m0_hash,
            "m": model_hash(self.model),
            "x": sum_hash(self.words),
            "weight": exact(self.total_weight),
            **({} if self.slice is None else {"slice": self.slice.id}),
            "included": included_hash(self.included),
            "head": self.head,
        }

    @property
    def commitment(self) -> str:
        """The hash of all that, as the ledger records it."""
        return commitment({"round": self.round, **self.bound_to}).hex()

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


# ---------------------------------------------------------------------------- what a member puts into a sum


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of local training: the change, the number of samples, and what an evaluation must know about
    the model's shape (anything that msgpack can carry)."""

    delta: npt.NDArray[np.float32]
    samples: float | None
    shape: Any = None


@dataclass(frozen=True, eq=False)
class Work:
    """A model to train: M0, the digest of everything else that came with it, the function that trains it, and
    a check that explains, in the app's own words, why the settings do not allow an update."""

    m0: Model
    extra: bytes
    train: Callable[[], Trained]
    check: Callable[[Trained, Config], None] = lambda trained, config: None  # masking refuses bad ones
    m0_hash: str = ""  # given if it is known: many members of one process start from one array

    def __post_init__(self) -> None:
        object.__setattr__(self, "m0_hash", self.m0_hash or model_hash(self.m0))


@dataclass(frozen=True, eq=False)
class Contribution:
    """w_i d_i as it was summed, after rounding to integers; ``step`` is the value of one unit of them.

    In float64 it would be as large as two models, so it is taken part by part, in blocks that fit into the
    processor's cache.
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
        values: dict[str, Any] = {key: value for key, value in vars(self).items() if value is not None}
        if self.sketch is not None:
            values["sketch"] = [f"{value:.7g}" for value in self.sketch]
        return {key: value if key in _OTHERS else exact(value) for key, value in values.items()}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Measured:
        """Read what `body` wrote."""
        readers: dict[str, Callable[[Any], Any]] = {key: _OTHERS.get(key, _finite) for key in body}
        return cls(**{key: read(body[key]) for key, read in readers.items()})


@dataclass(frozen=True)
class Report:
    """One member's report on one round; an acknowledgement of the sum if it measures nothing."""

    client: str
    round: int
    bound_to: Mapping[str, str]
    measured: Mapping[str, Measured]
    cosine: float | None
    salt: str = field(default_factory=new_salt, compare=False)  # so that the record's hash reveals nothing
    signature: bytes = field(default=b"", compare=False, repr=False)

    def body(self, run: str) -> dict[str, Any]:
        """Return the report as it is recorded and sent: without floats, bound to the run."""
        return {
            "run": run,
            "salt": self.salt,
            "round": self.round,
            "bound_to": dict(self.bound_to),
            "cosine": None if self.cosine is None else exact(self.cosine),
            "measured": {name: utility.body() for name, utility in self.measured.items()},
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
                round=integer(body["round"]),
                bound_to={str(key): str(value) for key, value in body["bound_to"].items()},
                measured={str(name): Measured.from_body(part) for name, part in body["measured"].items()},
                cosine=None if cosine is None else _finite(cosine),
                salt=_salt(body["salt"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, LedgerError) as error:
            raise MessageError(f"not a report: {error!r:.200}", stage="report", member=client) from error


def accept(report: Report, outcome: Outcome, utilities: Sequence[str], sampling: Sampling) -> None:
    """Raise unless a report is about this round and computed on exactly these models, weights and samples.

    ``sampling`` says how standard errors are measured.
    """
    with placing("report", report.client):
        if report.round != outcome.round:
            raise BindingError(f"answers round {report.round}, but this is round {outcome.round}")
        if report.client not in outcome.included:
            raise BindingError("reports on a sum it is not in")
        for what in {**outcome.bound_to, **report.bound_to}:
            if report.bound_to.get(what) != outcome.bound_to.get(what):
                named = what if what in outcome.bound_to else f"{what!r:.40}"
                raise BindingError(f"computed on a different {named} from ours")
        if set(report.measured) != set(utilities):
            expected = ", ".join(utilities)
            raise MessageError(f"expected utilities {expected}, got {sorted(report.measured)!r:.200}")
        if outcome.slice is None:
            return
        for name, measured in report.measured.items():
            freedom, problem = sampling.freedom(name, outcome.slice), ""
            if measured.freedom != freedom or (measured.sketch is None) != (freedom is None):
                problem = f"expected a sketch exactly with degrees of freedom, and {freedom} of them"
            elif measured.sketch is not None and not belongs(measured.sketch, measured.se_alpha):
                problem = f"its sketch is not that of an error of {measured.se_alpha:g}"
            if problem:
                raise MessageError(f"{name}: {problem}")


def check_numbers(report: Report) -> None:
    """Raise MessageError if a report has numbers that no utility in [0, 1] can have; not for rehearsals."""
    with placing("report", report.client):
        for name, measured in report.measured.items():
            for key, value in vars(measured).items():
                if key in _OTHERS:
                    continue  # `accept` compares them with the test slice and with se_alpha
                most = float(report.round) if key == "se_alpha_total" else 1.0
                needed = key in ("empty", "grand")
                if (value is None and needed) or (value is not None and not 0 <= value <= most):
                    raise MessageError(f"{key} of {name} must lie in [0, {most:g}], got {value}")
        if report.cosine is not None and not -1 <= report.cosine <= 1:
            raise MessageError(f"cosine must lie in [-1, 1], got {report.cosine:g}")


def _salt(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise ValueError("a salt is 32 hexadecimal digits")
    return value


def _finite(text: Any) -> float:
    if not math.isfinite(value := number(text)):
        raise ValueError(f"a report holds finite numbers, got {value}")
    return value


def integer(value: Any) -> int:
    """Return a whole number as JSON has it; raise ValueError for anything else."""
    if type(value) is not int:
        raise ValueError(f"expected a whole number, got {value!r:.40}")
    return value


def _sketch(texts: Any) -> tuple[float, ...]:
    if not isinstance(texts, list) or len(texts) != SKETCH:
        raise ValueError(f"a sketch has {SKETCH} numbers")
    values = tuple(float(text) for text in texts)
    if not all(map(math.isfinite, values)) or [f"{value:.7g}" for value in values] != texts:
        raise ValueError("a sketch holds finite numbers with seven digits")
    return values


_OTHERS: dict[str, Callable[[Any], Any]] = {"sketch": _sketch, "freedom": integer}
"""How the fields of `Measured` are read that are not numbers in hexadecimal."""


# --------------------------------------------------------------------------------------------- measuring

PerSample = Mapping[str, npt.NDArray[np.float64]]
"""Utility -> one number per test sample, shape (m,); or one per block, see `fedmerit.scoring.sampling`."""
Evaluate = Callable[[Model, Slice], PerSample]
Game = Literal["additive", "renormalised"]


class Evaluations:
    """Per-sample utilities of models, with a cache for M0 and M by their hashes: all members need both."""

    MOST = 4  # M0, M, and the first model if members also train alone

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self._kept: dict[tuple[str, str], PerSample] = {}

    def __call__(self, model: Model, shown: Slice, digest: str = "") -> PerSample:
        """Return every utility of every sample; cache the result if the model's hash is given."""
        if not digest:
            return self.evaluate(model, shown)
        key = digest, shown.id
        kept = self._kept.pop(key, None)
        self._kept[key] = self.evaluate(model, shown) if kept is None else kept  # in order of last use
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
        """Return the utilities of a member's two models and, with ``direction``, the cosine of its update.

        The experiments replace this where models are made on a GPU.
        """
        assert outcome.slice is not None
        alone, without = coalition_models(game, m0, outcome, contribution, weight)
        inside, outside = self(alone, outcome.slice), self(without, outcome.slice)
        return inside, outside, contribution.cosine(m0, outcome.model) if direction else None


@dataclass(eq=False)
class Scorer:
    """One member's side of scoring: what it keeps between rounds, and how it measures.

    ``totals`` are, per utility, alpha per test sample, summed over the rounds on the slice ``totals_on``
    (private).
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

        ``solo`` is the model this member trained alone, if it does so. ``direction`` reports the cosine with
        the whole change: it tells a server that chooses M one exact number about the update, so members who
        do not trust the server leave it out.
        """
        shown = outcome.slice
        if shown is None:
            return Report(self.name, outcome.round, outcome.bound_to, {}, None)
        before = self.evaluate(m0, shown, outcome.m0_hash)
        after = self.evaluate(outcome.model, shown, outcome.bound_to["m"])
        inside, outside, along = self.evaluate.of_member(
            self.game, m0, outcome, contribution, weight, direction=direction
        )
        models = before, after, inside, outside
        own = None if solo is None else self.evaluate(solo, shown)
        measured = {name: self._measure(name, outcome, models, own) for name in before}
        return Report(self.name, outcome.round, outcome.bound_to, measured, along)

    def _measure(
        self, name: str, outcome: Outcome, models: Sequence[PerSample], own: PerSample | None
    ) -> Measured:
        """Return one utility of the models M0, M, and the two of this member, with standard errors."""
        before, after, inside, outside = values = [model[name] for model in models]
        shown = outcome.slice
        assert shown is not None
        self.sampling.check(name, after, shown)
        loo, ioi = after - outside, inside - before
        alpha = (loo + ioi) / 2
        if self.totals_on != shown.id:
            self.totals, self.totals_on = {}, shown.id
        self.totals[name] = self.totals.get(name, np.zeros_like(alpha)) + alpha
        strata = self.sampling.strata(name, shown)
        parts = {
            key: error_parts(differences, strata)
            for key, differences in (
                ("se_loo", loo), ("se_ioi", ioi), ("se_alpha", alpha), ("se_alpha_total", self.totals[name])
            )
        }  # fmt: skip
        least = least_change(name, shown.y)
        if not is_whole(name):  # where a change of one outcome counts 1
            scale = class_scale(shown.y) if name == BALANCED else np.ones(1)
            least = least_error([value / scale for value in values], scale)
        errors: dict[str, Any] = {
            key: math.hypot(least / (1 if key in ("se_loo", "se_ioi") else 2), *part.tolist())
            for key, part in parts.items()
        }
        error_sketch = sketch(
            parts["se_alpha"], least / 2, slice_id=shown.id, round=outcome.round, client=self.name
        )
        return Measured(
            alone=mean(inside),
            without=mean(outside),
            solo=None if own is None else mean(own[name]),
            empty=mean(before),
            grand=mean(after),
            sketch=error_sketch,
            freedom=degrees(strata),
            **errors,
        )


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

T = TypeVar("T")
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
    head: str = ""  # of the ledger before it, where it was read from one
    inputs: Mapping[str, str] | None = None  # in a ledger: hashes of its masked inputs
    outcome: Mapping[str, str] | None = None  # in a ledger: what its reports are bound to
    reports: dict[str, Report] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()  # in a copy: members whose reports its reader may not see
    _cached: dict[tuple[str, str], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def heard(self) -> tuple[str, ...]:
        """Everybody who reported, also if a copy withholds what."""
        return (*self.reports, *self.withheld)

    def to_reports(self, utility: str) -> Reports | None:
        """Return the reports that scores take (in a copy, those it shows), or None if there are none."""
        return self.once("reports", utility, self._make_reports)

    def once(self, what: str, utility: str, make: Callable[[str], T]) -> T:
        """Return what is made of a utility here, made at the first time."""
        if (what, utility) not in self._cached:
            self._cached[what, utility] = make(utility)
        return cast(T, self._cached[what, utility])

    def _make_reports(self, utility: str) -> Reports | None:
        if self.aborted or not any(report.measured for report in self.reports.values()):
            return None
        named = [name for name in self.included if name in self.reports]
        measured = [self.reports[name].measured[utility] for name in named]

        def column(key: str) -> list[Any] | None:
            values = [getattr(utilities, key) for utilities in measured]
            return None if None in values else values

        cosines = [self.reports[name].cosine for name in named]  # all None where members leave them out
        utilities = self.body["utilities"][utility]
        solo = column("solo") if "first" in utilities else None
        sketches, freedoms = column("sketch"), column("freedom")
        return Reports(
            empty=number(utilities["empty"]),
            grand=number(utilities["grand"]),
            clients=tuple(named),
            silent=(*self.silent, *self.withheld),
            slice=self.body["slice"],
            cosine=cosines if any(cosine is not None for cosine in cosines) else None,  # type: ignore[arg-type]
            solo=solo,  # type: ignore[arg-type]
            solo_empty=None if solo is None else number(utilities["first"]),
            utility=utility,
            round=self.number,
            sketch=sketches,  # type: ignore[arg-type]
            freedom=None if freedoms is None else int(min(freedoms)),
            **{key: column(key) for key in _COLUMNS},  # type: ignore[arg-type]
        )

    def differences(self, tolerance: float = TOLERANCE) -> dict[str, Note]:
        """Return the members whose own v(M0) or v(M) differs from the one the round is scored with, and how.

        ``tolerance`` is relative to 1 or to the value that the round is scored with, whichever is larger.
        """
        differing: dict[str, Note] = {}
        for name, report in self.reports.items():
            for utility, used in self.body["utilities"].items():
                own = report.measured[utility]
                for what, mine, its in (
                    ("v(M0)", own.empty, used["empty"]),
                    ("v(M)", own.grand, used["grand"]),
                ):
                    scored = number(its)
                    if mine is not None and not abs(mine - scored) <= tolerance * max(1.0, abs(scored)):
                        how = Note("differs-how", what=what, own=mine, utility=utility, used=scored)
                        differing.setdefault(name, how)
        return differing


def scored(rounds: Iterable[Round], utility: str) -> list[Reports]:
    """Return the reports that scores take, of the rounds that have any."""
    return [reports for closed in rounds if (reports := closed.to_reports(utility)) is not None]
