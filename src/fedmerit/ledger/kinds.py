"""The kinds of records: who writes each, one typed definition of its body, and how two bodies are compared.

`typed` checks the author and the form of a record. What a record must agree with in others is checked where
records are folded into a run (`run`, `rounds`, `account`, `decisions`). So every field of every record is
either checked or named in docs/threats.md as one that the ledger cannot prove.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fedmerit.config import Config, recorded, recorded_hash
from fedmerit.errors import ConfigError, LedgerError
from fedmerit.identity import SERVER, Roster, number
from fedmerit.ledger.chain import HASH, Record, reading
from fedmerit.protocol.messages import PACKAGE
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.terms import Agreed, roster_in
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.rewards import Rule
from fedmerit.secagg.setting import Setting

Hash = Annotated[str, Meta(pattern=HASH)]
Short = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""The identifier of a run, or a salt."""
Version = Annotated[str, Meta(pattern=rf"\A{PACKAGE}\Z")]
Names = tuple[str, ...]
Count = Annotated[int, Meta(ge=0)]
Visibility = Literal["all", "coordinator"]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a record. Numbers that must be read back exactly are text (`fedmerit.identity.number`)."""


# ------------------------------------------------------------------------------------------------ the run


class SignedTerms(Body, frozen=True):
    """What members sign when they join; in the record ``run``."""

    config: str
    config_hash: str
    roster: Hash
    strategy: str
    optimiser: bool
    evaluates: Literal["server", "members"]
    engine: Literal["embedded", "flower", "flower-simulation", "nvflare", "nvflare-simulation"]
    protocol: Annotated[int, Meta(ge=1)]
    features: Names
    version: Version
    previous: Hash | UnsetType = UNSET
    quorum: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class First(Body, frozen=True):
    run: Short
    keys: Mapping[str, str] | None
    m0: Hash
    data: Hash | None
    terms: Mapping[str, Any]  # as signed; its form is that of `SignedTerms`
    constant: str | UnsetType = UNSET  # the utility of a model that always answers the mean of y

    @property
    def engine(self) -> str:
        """What ran: `EMBEDDED`, `FLOWER` or another of `fedmerit.protocol.terms`."""
        return str(self.terms["engine"])

    @property
    def mean_answer(self) -> float | None:
        """The utility of a model that always answers the mean of y; None where y is no number."""
        return None if isinstance(self.constant, UnsetType) else number(self.constant)

    @property
    def public(self) -> dict[str, bytes] | None:
        """The public keys by author; None if nothing is signed."""
        return {name: bytes.fromhex(key) for name, key in self.keys.items()} if self.keys else None

    @property
    def moves(self) -> bool:
        """Whether the server may move the model between rounds; M0 may then differ from the last M."""
        return bool(self.terms["optimiser"])


class PoolBody(Body, frozen=True):
    version: Literal[1]
    root: Hash
    size: Count
    slices: Count
    classes: Count
    balanced: Literal[0, 1]
    utility: Hash
    settled: int | UnsetType = UNSET


class HeldOut(Body, frozen=True):
    """What a judge commits to: its own samples, a number for the draw, a seed of noise."""

    data: Hash
    samples: Count
    nonce: Hash
    noise: Hash


class Join(Body, frozen=True):
    run: str
    address: str
    run_config: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    terms: Mapping[str, Any]
    commitment: Mapping[str, Any]
    server: str
    held_out: HeldOut | UnsetType = UNSET  # in a panel


class End(Body, frozen=True):
    rounds: int
    model: Hash


class Seen(Body, frozen=True):
    run: str
    round: int
    head: str


# ----------------------------------------------------------------------------------------------- a round


class Schedule(Body, frozen=True):
    round: int
    members: Names
    weights: Mapping[str, str] | None


class MaskedInputs(Body, frozen=True):
    round: int
    inputs: Mapping[str, Hash]


class Blamed(Body, frozen=True):
    round: int
    member: str
    by: str | None
    why: str
    evidence: Mapping[str, Any]


class OutcomeBody(Body, frozen=True):
    round: int
    m0: Hash
    m: Hash
    weight: str
    included: Hash
    head: Hash
    x: Hash | UnsetType = UNSET
    slice: Hash | UnsetType = UNSET


class Reported(Body, frozen=True):
    run: str
    salt: str
    round: int
    bound_to: Mapping[str, Any]
    cosine: str | None
    measured: Mapping[str, Any]


class Closed(Body, frozen=True):
    round: int
    included: Names
    declined: Names
    silent: Names
    aborted: str
    m: Hash
    slice: str | None
    utilities: Mapping[str, Mapping[str, str]]
    checkpoint: Hash
    evaluated: Literal["server", "members"]
    members_checkpoint: Hash | UnsetType = UNSET


class Analysed(msgspec.Struct, frozen=True):  # and what was found
    round: int


class Stated(Body, frozen=True):
    round: int
    cumulative_alpha: Mapping[str, Mapping[str, str]]


class Totals(Body, frozen=True):
    round: int
    utilities: Mapping[str, Mapping[str, Mapping[str, Any]]]


class OwnScore(Body, frozen=True):
    round: int
    member: str
    salt: Short
    cumulative_alpha: Mapping[str, str]


# ---------------------------------------------------------------------------------------- the settlement


class Last(Body, frozen=True):
    run: str
    last: int


class JudgedBody(Body, frozen=True):
    """What a judge shows, by hash, and what it says of its own samples."""

    run: str
    facts: Hash  # of the rounds that it judged
    judge: str
    column: Hash
    scale: str
    samples: Count
    first: str
    last: str
    rest: str
    error: str


class Opening(Body, frozen=True):
    settlement: str
    manifest: Mapping[str, Any]


class AgreedTo(Body, frozen=True):
    run: str
    settlement: str
    wrong: tuple[int, ...]
    released: tuple[int, ...]
    draw: Hash


class StatementBody(Body, frozen=True):
    run: str
    salt: str
    settlement: str
    masks: str
    rounds: Mapping[str, Any]
    blocks: Any


class TableBody(Body, frozen=True):
    run: str
    settlement: str
    round: int
    block: int | None
    g: str
    scale: str
    product: str
    pairs: Mapping[str, str]


class DrawBody(Body, frozen=True):
    """For which statements members open their numbers; then whose numbers make the seed."""

    settlement: str
    statements: Mapping[str, Hash]
    committed: Mapping[str, Hash]
    nonces: Mapping[str, Hash]
    seed: str


class Opened(Body, frozen=True):
    run: str
    settlement: str
    listed: Hash
    nonce: Hash


class Drawn(Body, frozen=True):
    run: str
    settlement: str
    seed: Hash


class Sealed(Drawn, frozen=True):
    """What an end hands to the witnesses of its pairs, by peer."""

    round: int
    sealed: Mapping[str, str]
    open: Mapping[str, str]


class Sighted(Drawn, frozen=True):
    """What a witness says of pairs in a round; ``channels`` are secrets shared with ends that sealed none."""

    round: int
    values: tuple[tuple[str, str, str], ...]
    keys: tuple[tuple[str, str, str], ...]
    channels: Mapping[str, str]


class VerdictBody(Body, frozen=True):
    settlement: str
    round: int
    block: int | None
    g: str
    scale: str
    product: str
    named: Mapping[str, str]
    values: Mapping[str, str]
    silent: Names
    evidence: Mapping[str, Any]


class SettledSums(Body, frozen=True):
    settlement: str
    rounds: tuple[Mapping[str, Any], ...]
    named: Names
    missing: Names
    silent: Names
    witnessed: tuple[int, int]
    closes: int | None
    final: bool


class Unsettled(Body, frozen=True):
    settlement: str | None
    why: str


class Countersigned(Body, frozen=True):
    run: str
    settlement: str
    sums: Any


# ----------------------------------------------------------------------------------------------- payment


RecordedPart = Literal["title", "date", "contact", "objections"]
RecordedHeading = Annotated[Mapping[RecordedPart, str], Meta(min_length=1)]


class FenceBody(Body, frozen=True):
    """The numbers behind "fenced" (`fedmerit.scoring.rewards.Fence`)."""

    fence: str
    rest: str
    positive: str
    counted: str
    error: str


class DecisionTotals(Body, frozen=True):
    """From what a member can recompute its share and cents, and no more about others."""

    n: int
    division: tuple[int, int, int, int, int, int, str]  # total, one, low and high as fractions, last
    among: int
    gain: str
    positive: str
    clipped: str | None


class DecisionBody(Body, frozen=True, kw_only=True):
    """A payout decision; `fedmerit.ledger.decisions` recomputes it."""

    decision: int
    replaces: int | None
    rounds: int
    budget: str
    currency: str
    utility: str
    rule: Rule | Literal["hands"]
    score: str
    missing: Missing
    equal: str
    floor: str
    cap: str
    forfeit: str
    despite_doubts: bool
    departures: Names
    unpaid: int
    fence: FenceBody | UnsetType = UNSET
    heading: RecordedHeading | UnsetType = UNSET


class OpenDecision(DecisionBody, frozen=True, kw_only=True):
    """A decision of a run whose members see everything."""

    shares: Mapping[str, str]
    cents: Mapping[str, int]


class PrivateDecision(DecisionBody, frozen=True, kw_only=True):
    """A decision of a run in which only the coordinator sees everything; payouts follow one by one."""

    totals: DecisionTotals


class PayoutBody(Body, frozen=True):
    decision: int
    member: str
    salt: Short
    share: str
    cents: int


class Approved(Body, frozen=True):
    """A member's signature under a decision, which the digest of its record stands for."""

    run: str
    decision: Hash
    record: Count


# --------------------------------------------------------------------------------------------- all kinds

MEMBER = "a member"


class Kind(NamedTuple):
    """A kind of record: its author, its body, in which runs it occurs, whether it may follow the end."""

    author: str
    body: type[msgspec.Struct]
    late: bool = False
    shown: Visibility | None = None  # only in runs of this visibility
    withheld: bool = False  # whether a member's copy may hold the hash of the body alone


KINDS: Mapping[str, Kind] = {
    "run": Kind(SERVER, First),  # settings, terms and keys
    "pool": Kind(SERVER, PoolBody),  # the commitment to the test pool
    "join": Kind(MEMBER, Join, late=True),  # agrees to the terms
    "schedule": Kind(SERVER, Schedule),  # a round begins with these members
    "masked": Kind(SERVER, MaskedInputs),  # their hashes, before anything is unmasked
    "blame": Kind(SERVER, Blamed),  # who broke the protocol, with the evidence
    "outcome": Kind(SERVER, OutcomeBody),  # the sum, and the test slice that is revealed after it
    "report": Kind(MEMBER, Reported, withheld=True),
    "analysis": Kind(SERVER, Analysed),  # of plain updates in a rehearsal
    "round": Kind(SERVER, Closed),  # closes one
    "scores": Kind(SERVER, Stated, shown="all"),  # what all members read after a round
    "totals": Kind(SERVER, Totals, shown="coordinator"),  # likewise, if only the coordinator sees the rest
    "score": Kind(SERVER, OwnScore, shown="coordinator", withheld=True),
    "last": Kind(MEMBER, Last),  # signs that the run ended early
    "judged": Kind(MEMBER, JudgedBody),  # what a judge of a panel shows
    "opening": Kind(SERVER, Opening),  # the manifest of all directions
    "agreed": Kind(MEMBER, AgreedTo),  # recomputed the directions
    "statement": Kind(MEMBER, StatementBody, late=True, withheld=True),
    "table": Kind(MEMBER, TableBody, late=True),  # the products of its masks with a direction
    "draw": Kind(SERVER, DrawBody, late=True),  # of witnesses
    "nonce": Kind(MEMBER, Opened, late=True),  # opens its number for the draw
    "drawn": Kind(MEMBER, Drawn, late=True),  # signs the draw
    "sealed": Kind(MEMBER, Sealed, late=True),  # hands the keys of its pairs to their witnesses
    "witness": Kind(MEMBER, Sighted, late=True),  # signs what both ends of a pair said
    "verdict": Kind(SERVER, VerdictBody, late=True),  # what masks prove of a round that is not as stated
    "settled": Kind(SERVER, SettledSums, late=True),  # what the settlement came to
    "unsettled": Kind(SERVER, Unsettled),  # why there was none
    "countersigned": Kind(MEMBER, Countersigned, late=True),  # signs what it came to
    "end": Kind(SERVER, End),
    "seen": Kind(MEMBER, Seen, late=True),  # signs the head after the end
    "decision": Kind(SERVER, OpenDecision, late=True),  # `PrivateDecision` if only the coordinator sees all
    "payout": Kind(SERVER, PayoutBody, late=True, shown="coordinator", withheld=True),  # to one member
    "approval": Kind(MEMBER, Approved, late=True),  # signs a decision
}
"""All kinds of records, in the order in which a run first writes them."""


def typed(record: Record, members: Sequence[str], shown: Visibility) -> Any:
    """Return the typed body of a record; None if a copy withholds it.

    Raise LedgerError if runs of this visibility have no such record, its author never writes it, or its body
    has another form.
    """
    kind = KINDS.get(record.kind)
    if kind is None:
        raise LedgerError("not a kind of record that this version knows")
    if kind.shown not in (None, shown):
        raise LedgerError(f"not a kind of record of a run with scoring.visibility = {shown!r}")
    if record.author not in (members if kind.author == MEMBER else (SERVER,)):
        raise LedgerError(f"expected {kind.author} as its author, got {record.author!r:.60}")
    if record.withheld:
        if not kind.withheld:
            raise LedgerError("withheld, although every member may see it")
        return None
    private = record.kind == "decision" and shown == "coordinator"
    return converted(record.body, PrivateDecision if private else kind.body)


def converted(body: Any, form: type[Any]) -> Any:
    """Return a value in this form; raise LedgerError if it has another one."""
    try:
        return msgspec.convert(body, form)
    except msgspec.ValidationError as error:
        raise LedgerError(str(error)) from None


# ------------------------------------------------------------------------------------- the first record


def keys_of(record: Record) -> Mapping[str, bytes]:
    """Return the public keys by author, from a ledger's first record."""
    with reading(record):
        if record.kind != "run" or record.author != SERVER:
            raise LedgerError("expected the run's first record")
        keys = record.body.get("keys")
        return {} if keys is None else {name: bytes.fromhex(key) for name, key in keys.items()}


def first_in(record: Record | None, path: Path) -> tuple[First, Config]:
    """Return the first record of a ledger and the settings in it; raise LedgerError if they disagree."""
    if record is None:
        raise LedgerError(f"{path}: the ledger is empty")
    with reading(record):
        if record.kind != "run":
            raise LedgerError("expected a ledger that begins with the records run and pool")
        first: First = converted(record.body, First)
        terms: SignedTerms = converted(first.terms, SignedTerms)
        try:
            config, digest = recorded(terms.config), recorded_hash(terms.config)
        except ConfigError as error:
            raise LedgerError(f"its config cannot be read: {error}") from error
        if digest != terms.config_hash:
            raise LedgerError("its config does not match its hash")
        return first, config


def setting_of(first: First, pool: Mapping[str, Any], config: Config, round_: Round) -> Setting:
    """Return the setting of a round with masks, as its members knew it."""
    assert first.keys is not None
    agreed = Agreed(first.terms, pool, bytes.fromhex(first.keys[SERVER]))
    return agreed.setting(first.run, round_.number, round_.scheduled, recorded_roster(first, config))


def recorded_roster(first: First, config: Config) -> Roster:
    """Return the roster that a ledger's first record states, with the hash that members signed.

    The hash may cover more than keys, such as weights that do not count in this run.
    """
    return roster_in(config, first.public, bytes.fromhex(first.terms["roster"]))


# ----------------------------------------------------------------------------- stated against recomputed

TOLERANCE = 1e-12


def compare(stated: Any, due: Any, where: str, *, within: float = TOLERANCE, near: float = 0.0) -> None:
    """Raise LedgerError at the first difference; numbers may differ a little, relatively or absolutely."""
    if isinstance(stated, dict) and isinstance(due, dict):
        for key in due:
            if key in stated:
                compare(stated[key], due[key], f"{where}.{key}", within=within, near=near)
        if odd := [key for key in (*due, *stated) if (key in due) != (key in stated)]:
            raise LedgerError(f"{where}.{odd[0]}: {'not in the ledger' if odd[0] in stated else 'missing'}")
    elif isinstance(stated, list) and isinstance(due, list):
        if len(stated) != len(due):
            raise LedgerError(f"{where}: holds {len(stated)} entries, but the reports give {len(due)}")
        for place, pair in enumerate(zip(stated, due, strict=True)):
            compare(*pair, f"{where}[{place}]", within=within, near=near)
    elif isinstance(stated, float) and isinstance(due, float):
        if not math.isclose(stated, due, rel_tol=within, abs_tol=near):
            raise LedgerError(f"{where}: states {stated!r}, the reports give {due!r}")
    elif stated != due or isinstance(stated, bool) != isinstance(due, bool):
        raise LedgerError(f"{where}: states {stated!r:.60}, the reports give {due!r:.60}")


def numbers(value: Any) -> Any:
    """Return a value with all its hexadecimal strings as numbers."""
    if isinstance(value, Mapping):
        return {key: numbers(item) for key, item in value.items()}
    return number(value) if isinstance(value, str) else value
