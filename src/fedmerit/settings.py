"""Every setting with its default, section by section, and what follows from them.

Settings are plain frozen dataclasses, so that they work where only numpy and torch are installed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from fedmerit.errors import InputError
from fedmerit.notes import Note, words
from fedmerit.scoring.sampling import is_whole
from fedmerit.secagg.setting import default_threshold

WITHOUT_GRADIENT = ("accuracy", "balanced-accuracy")
"""Utilities that cannot be settled: a small move of the model changes them by nothing, or by a jump."""


# ------------------------------------------------------------------------------------------------ headings
MOST_LETTERS = 120  # of a title
_CURRENCY = re.compile(r"[A-Z]{3}|[$€£¥₩₪₴₹₺₽]")


@dataclass(frozen=True)
class Heading:
    """What a page or decision is about, whom to ask, and until which day; each is empty if nobody said.

    >>> Heading(title="Lung nodules", currency="EUR").body()
    {'title': 'Lung nodules', 'currency': 'EUR'}
    """

    title: str = ""
    date: str = ""
    currency: str = ""
    contact: str = ""
    objections: str = ""  # the last day for them

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if expected := wrong(name, value):
                raise InputError(f"{name}: expected {expected}, got {value!r:.100}")

    def body(self) -> dict[str, str]:
        """Return what is not empty, as it is recorded."""
        return {name: value for name, value in vars(self).items() if value}

    def over(self, other: Heading) -> Heading:
        """Return this heading; what is empty in it is as in another one."""
        return Heading(**{**other.body(), **self.body()})

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Heading:
        """Read a recorded heading; raise InputError unless `body` could have written it."""
        if not {*body} <= {*cls.__dataclass_fields__} or not all(body.values()):
            raise InputError(
                f"heading: expected some of {', '.join(cls.__dataclass_fields__)}, got {dict(body)!r:.100}"
            )
        return cls(**body)


def wrong(name: str, value: Any) -> str:
    """Return what a part of a heading should be, if it is something else; an empty text if it is right.

    >>> wrong("date", "2026-02-30"), wrong("currency", "EUR")
    ('a day such as 2026-11-30', '')
    """
    if not isinstance(value, str):
        return "text"
    if not value:
        return ""
    if name in ("date", "objections"):
        try:
            right = date.fromisoformat(value).isoformat() == value
        except ValueError:
            right = False
        return "" if right else "a day such as 2026-11-30"
    if name == "currency":
        return "" if _CURRENCY.fullmatch(value) else "a code such as EUR, or a sign such as $"
    right = value.isprintable() and value.strip() == value and len(value) <= MOST_LETTERS
    return "" if right else f"one line of at most {MOST_LETTERS} letters"


NO_HEADING = Heading()


def file_part(text: str) -> str:
    """Return text as a part of a file name: small letters, digits and hyphens.

    >>> file_part("Lungenrundherde: Köln & Bonn, 2026")
    'lungenrundherde-koln-bonn-2026'
    """
    plain = unicodedata.normalize("NFKD", text.casefold())
    letters = "".join(sign if sign.isalnum() else "-" for sign in plain if not unicodedata.combining(sign))
    return re.sub("-+", "-", letters).strip("-")[:60].rstrip("-")


def setting(default: Any, beside: str = "", *, above: str = "") -> Any:
    """Return a field with its default, and the words that `fedmerit init` writes beside and above it."""
    texts = {"beside": beside, "above": above}
    if default == {}:
        return field(default_factory=dict, metadata=texts)
    return field(default=default, metadata=texts)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The samples, and the test samples on which everybody is measured."""

    name: str = setting(
        "fashion-mini",
        'one of "fashion-mini", "table", "npz", "folder", or "module:function"',
        above="Your own data, model and metric: docs/bring-your-own.md.",
    )
    path: str = setting("", "where the files are, relative to the current folder (not for fashion-mini)")
    test_size: int = setting(
        500, "test samples, balanced over classes if there are any; 0: the whole test set as it is"
    )
    test_reveal: Literal["fixed", "per-round"] = setting(
        "fixed",
        above="Where members report. fixed: the same test samples in all rounds. per-round: a fresh slice of "
        "the pool each round, in a committed order.",
    )
    options: Mapping[str, Any] = setting(
        {}, 'options of the reader: {size = 64} for images, {target = "outcome"} for a table'
    )


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Who holds which training samples."""

    scheme: str = setting(
        "dirichlet", 'one of "iid", "dirichlet", "group", "sizes", or "file:PATH", as saved'
    )
    clients: int = setting(
        6, 'for "group" and "file", leave it out or write 0: as many as in the data or the file'
    )
    mu: float = setting(0.5, 'for "dirichlet": the smaller, the fewer classes per client')
    sizes: Sequence[int] | Sequence[float] = setting(
        (), 'for "sizes": counts, or fractions, in the order of names'
    )
    names: Sequence[str] = setting(
        (),
        above='By default client-0, client-1, ...; with "group" and "file", the names in the data or the '
        'file: the key then says their order, and with "group" also which groups take part.',
    )


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """Faults planted in members on purpose; for rehearsals and experiments."""

    label_noise: Mapping[str, float] | Literal["ramp"] = setting(
        {}, '{client-5 = 0.8}: 80% of its labels are random; or "ramp": more from member to member'
    )
    label_flip: Sequence[str] = setting((), "members whose labels are turned round: y becomes C-1-y")
    free_rider: Mapping[str, Literal["zero", "noise", "stale"]] = setting(
        {}, '{client-1 = "zero"}: it sends no change; "noise": random numbers; "stale": an old model'
    )
    misstate: Mapping[str, float] = setting(
        {}, "{client-2 = 1.01}: it states 1.01 times its score at the settlement"
    )
    judge: Mapping[str, str] = setting(
        {}, '{client-2 = "praise:client-3"}: it shows a false gradient for a friend; "hurt": against all'
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = setting(
        "cnn",
        'one of "mlp", "cnn", "cnn-pool", "resnet18", "resnet50", or "module:factory"',
        above='A model of your own is "module:factory", called as factory(input_shape, outputs), where '
        "outputs is the number of classes, or 1 for real numbers and for the loss binary.",
    )
    outputs: Literal["", "logits", "probabilities", "standardised", "plain"] = setting(
        "",
        above="What the network returns. For classes: logits, or probabilities; if the key is empty, logits, "
        "and what looks like probabilities is refused. For the loss mse: standardised, in standard "
        "deviations from the mean of y, which is also what an empty key means, or plain, in the unit of y.",
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """Rounds, local training (the optimiser is reset each round), and the weights of the sum."""

    rounds: int = setting(10)
    local_epochs: int = setting(5)
    batch_size: int = setting(64)
    loss: str = setting(
        "cross-entropy",
        'one of "cross-entropy", "binary", "mse", or "module:function"',
        above='A loss of your own is "module:function", called as function(outputs, y) for a number.',
    )
    optimiser: Literal["adam", "adamw", "sgd"] = setting("adam")
    lr: float = setting(0.001)
    weight_decay: float = setting(0.001)
    weights: Literal["uniform", "roster", "secret", "scores"] | Mapping[str, float] = setting(
        "uniform",
        'one of "uniform", "secret", "scores", "roster" (as in its file), or {client-0 = 2.0, ...}',
    )
    weight_cap: int = setting(100000, 'for "secret": the largest sample count anyone may claim')


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part when."""

    fraction: float = setting(1.0, "fraction of the members who take part, drawn anew each round")
    away: Mapping[str, Sequence[int]] = setting({}, "{client-2 = [3]}: it misses round 3")


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is measured. Members are paid by the first utility."""

    method: Literal["settled", "both", "reports", "panel"] = setting(
        "both",
        above="reports: members report in each round what they measured. settled: after the last round "
        "members state their part in the gain, and the statements must add up exactly. both: reports and, on "
        "another part of the pool, a settlement. panel: no shared test set; each member judges the others on "
        "data of its own, and all statements must add up. If you leave the key out, it is reports where "
        "nothing can be settled.",
    )
    utilities: Sequence[str] = setting(
        ("expected-accuracy", "accuracy", "brier"),
        above="Also: sharpened-accuracy, balanced-accuracy, neg-loss, auc, f1, c-index, rmse-skill:20 (an "
        "error of 20 or more, in the unit of y, counts as 0), mae-skill:20. A metric of your own is "
        '"module:function", called as function(model, x, y) for a number per sample, or '
        '"whole:module:function" for one number of the whole test set.',
    )
    game: Literal["additive", "renormalised"] = setting("additive")
    visibility: Literal["all", "coordinator"] = setting(
        "all", above="coordinator: each member sees only its own numbers and the totals."
    )
    solo: bool = setting(False, "members also train alone and report that model's utility")
    truth: Sequence[Literal["mr-shapley", "round-shapley", "shapley"]] = setting(
        (),
        'any of "mr-shapley", "round-shapley", "shapley"',
        above="The Shapley value over all rounds, of the last round, or of retrained models, for "
        "comparison. It needs plain updates, so the run is marked as an analysis.",
    )


@dataclass(frozen=True, kw_only=True)
class Payment:
    """How members are paid. Members sign it with the other settings, before anybody knows a score."""

    rule: Literal["fenced", "fair", "impartial", "equal", "hands"] = setting(
        "fenced",
        above="`fedmerit rewards` pays by these terms; others are recorded and shown as a departure. A panel "
        "pays by the rule hands, whatever is set here.",
    )
    score: Literal["auto", "PHI", "PANEL", "ALPHA", "LOO", "IOI", "FP", "EE", "COS", "MERIT"] = setting(
        "auto", above="auto: PHI where members settle, PANEL with a panel, ALPHA where they report."
    )
    missing: Literal["zero", "own-mean"] = setting("zero", "what a missed round counts in the sum")
    equal: float = setting(
        0.0, "part of the budget that is divided equally among members who are not surely below zero"
    )
    floor: float = setting(0.0, "smallest share of a member who has a score")
    cap: float = setting(1.0, "largest share of a member")
    currency: str = setting("EUR", "of the budget: a code such as EUR, or a sign such as $")
    forfeit: float = setting(
        1.0, "part of its share that a member loses if the settlement names it for a lie; it stays unpaid"
    )


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The settlement after the last round; for the methods "settled" and "both"."""

    naming: bool = setting(
        True, "a false statement can be traced to its author, for 8 bytes per parameter; false: 4 bytes"
    )
    window_days: float = setting(14.0, "how long a missing statement may still be handed in")


@dataclass(frozen=True, kw_only=True)
class PanelSettings:
    """How members judge each other, with the method "panel"."""

    held_out: float = setting(0.2, "part of each member's data kept out of training; only in a rehearsal")
    least: int = setting(0, "held-out samples that a judge must have; 0: 300, and 20 in a rehearsal")
    coordinates: int = setting(50000, "coordinates of the model that are drawn for each round")
    most: float = setting(3.0, "nobody gets more of a judge's part than this many times an equal part")
    noise: float = setting(2.0, "noise on what a judge shows, in root mean squares of its gradient")
    blur: float = setting(0.05, "noise on what a judge learns, which cancels in every sum")
    epsilon: float = setting(0.0, "differential privacy of the held-out samples; 0: none")
    delta: float = setting(1e-5, "for epsilon")


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The masked sum."""

    enabled: bool = setting(True)
    bound: float = setting(4.0, "largest |M_i - M0| per coordinate")
    threshold: int = setting(0, "members needed to finish a round; 0: floor(2/3 of all members) + 1")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Seed, repeat and device."""

    seed: int = setting(0)
    repeat: int = setting(1, "from 2 on: another first model and batch order; data and test pool stay")
    device: str = setting("auto", 'one of "auto", "cpu", "cuda"')


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What decisions, statements and the page are about."""

    title: str = setting("", "such as Lung nodules 2026, Rhine hospitals")


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All sections, and what follows from their settings."""

    data: Data = Data()
    partition: Partition = Partition()
    corruption: Corruption = Corruption()
    model: Model = Model()
    training: Training = Training()
    participation: Participation = Participation()
    scoring: Scoring = Scoring()
    settlement: Settlement = Settlement()
    panel: PanelSettings = PanelSettings()
    payment: Payment = Payment()
    secure_aggregation: SecureAggregation = SecureAggregation()
    run: RunSettings = RunSettings()
    report: ReportSettings = ReportSettings()
    method_open: bool = field(default=False, compare=False, repr=False)
    """Whether scoring.method was left out, so that a rehearsal takes "reports" where nothing can be settled.
    This is no setting: it is not recorded."""

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of the members; final if the config is ``resolved``."""
        return tuple(self.partition.names) or tuple(f"client-{i}" for i in range(self.partition.clients))

    @property
    def resolved(self) -> bool:
        """Whether the settings say who the members are; else `simulation.setup.resolve` asks the data."""
        return bool(self.partition.names) or self.partition.scheme.partition(":")[0] not in ("group", "file")

    @property
    def threshold(self) -> int:
        """t, the number of members who must stay to the end of a round, whoever is scheduled."""
        return self.secure_aggregation.threshold or default_threshold(len(self.clients))

    @property
    def analysis(self) -> bool:
        """Whether the run looks at plain updates, which only an engine in one process can do."""
        return bool(self.scoring.truth)

    def values_coalitions(self, number: int) -> bool:
        """Return whether the ground truth asked for needs the utility of every coalition of this round."""
        last = number == self.training.rounds
        return "mr-shapley" in self.scoring.truth or (last and "round-shapley" in self.scoring.truth)

    @property
    def reports(self) -> bool:
        """Whether members measure and report in each round."""
        return self.scoring.method in ("reports", "both")

    @property
    def judged(self) -> bool:
        """Whether members judge each other on data of their own, without a shared test set."""
        return self.scoring.method == "panel"

    @property
    def whole(self) -> tuple[str, ...]:
        """The utilities that are metrics of the whole test set, not means over its samples."""
        return tuple(filter(is_whole, self.scoring.utilities))

    @property
    def settles(self) -> bool:
        """Whether members settle after the last round."""
        return self.scoring.method != "reports"

    @property
    def weighing(self) -> Literal["uniform", "roster", "secret", "scores"]:
        """What the weights of the sum are; a table of them is that of the roster."""
        return self.training.weights if isinstance(self.training.weights, str) else "roster"

    @property
    def roster_weights(self) -> Mapping[str, float]:
        """The weights that all members know, by member; empty if there are none."""
        return {} if isinstance(self.training.weights, str) else self.training.weights

    @property
    def heading(self) -> Heading:
        return Heading(self.report.title, currency=self.payment.currency)

    @property
    def paid_score(self) -> str:
        """The score that members are paid by according to these settings."""
        automatic = "PANEL" if self.judged else "PHI" if self.settles else "ALPHA"
        return automatic if self.payment.score == "auto" else self.payment.score

    @property
    def paid_rule(self) -> Literal["fenced", "fair", "impartial", "equal", "hands"]:
        """The rule by which members are paid according to these settings: a panel has one of its own."""
        return "hands" if self.judged else self.payment.rule

    @property
    def word_bytes(self) -> Literal[4, 8]:
        """Bytes per number of a masked update: 8 if a false statement must be traced to its author."""
        return 8 if self.settles and self.settlement.naming and self.secure_aggregation.enabled else 4


# ----------------------------------------------------------------------------------------- what was planted


def planted(corruption: Corruption, seen_by: str | None = None) -> Note:
    """Return a sentence that says which faults the settings planted in whom; empty if there are none.

    If only a member reads it (``seen_by``), it does not say in whom else anything was planted.

    >>> print(planted(Corruption(label_flip=["Site 10"])))
    Rehearsal: the labels of Site 10 were flipped on purpose (corruption.label_flip).
    """
    faults = tuple(_planted(corruption, seen_by))
    return Note("planted", faults=faults) if faults else Note("nothing")


def _planted(corruption: Corruption, seen_by: str | None) -> Iterator[Note]:
    def shown(name: str) -> str:
        return name if seen_by in (None, name) else words("name.somebody")

    noise = corruption.label_noise
    if isinstance(noise, str):
        yield Note("planted-ramp", noise=noise)
    elif rates := [
        Note("planted-rate", client=shown(name), percent=100 * rate) for name, rate in noise.items() if rate
    ]:
        yield Note("planted-noise", each=rates)
    if corruption.label_flip:
        yield Note("planted-flips", clients=tuple(map(shown, corruption.label_flip)))
    if riders := [Note(_RIDERS[kind], client=shown(name)) for name, kind in corruption.free_rider.items()]:
        yield Note("planted-riders", each=riders)
    if false := corruption.judge:
        yield Note("planted-judges", clients=tuple(map(shown, false)))
    if lies := [
        Note("planted-lie", client=shown(name), factor=factor) for name, factor in corruption.misstate.items()
    ]:
        yield Note("planted-lies", each=lies)


_RIDERS = {"zero": "rider-zero", "noise": "rider-noise", "stale": "rider-stale"}
