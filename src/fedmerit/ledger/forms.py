"""The form of every kind of record: who writes it, which fields it has, and what they must fit.

`rounds_of` reads rounds and compares what their members signed; `signed_heads`, `check_stated` and
`decisions_of` check heads, scores and payouts. This module checks the rest, so that every field of every
record is either checked or named in docs/threats.md as one that the ledger cannot prove.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedmerit.config import Config
from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, Roster, number
from fedmerit.ledger.chain import Record
from fedmerit.ledger.records import compare, moves, reading
from fedmerit.protocol.messages import PACKAGE
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.pool import parts_of
from fedmerit.protocol.terms import EMBEDDED, ENGINES, LEAST, MOST, Agreed, from_past, roster_in
from fedmerit.scoring.sampling import belongs
from fedmerit.secagg.setting import LEAST_IN_SUM, Setting

# --------------------------------------------------------------------------------------------------- forms

MEMBER = "a member"


@dataclass(frozen=True)
class Form:
    """Who writes records of one kind, and which fields they have."""

    author: str
    fields: frozenset[str]
    optional: frozenset[str] = frozenset()
    others: bool = False  # whether other fields are allowed

    def check(self, record: Record, members: Sequence[str]) -> None:
        """Raise LedgerError unless a record has the right author and fields."""
        allowed = members if self.author == MEMBER else (SERVER,)
        if record.author not in allowed:
            raise LedgerError(f"expected {self.author} as its author, got {record.author!r:.60}")
        if record.withheld:
            return
        given = set(record.body)
        if lacking := sorted(self.fields - given):
            raise LedgerError(f"lacks {lacking[0]}")
        if not self.others and (strange := sorted(given - self.fields - self.optional)):
            raise LedgerError(f"has a field {strange[0]!r:.40} that no record of its kind has")


def _form(author: str, fields: str, optional: str = "", *, others: bool = False) -> Form:
    return Form(author, frozenset(fields.split()), frozenset(optional.split()), others)


_DECISION = (
    "decision replaces rounds budget currency utility rule score missing equal floor cap forfeit "
    "on_undefined despite_doubts departures status unpaid"
)
FORMS = {
    "run": _form(SERVER, "run version engine config config_hash members keys m0 data analysis", "terms"),
    "pool": _form(SERVER, "version root size slices classes balanced utility", "settled"),
    "join": _form(MEMBER, "run address run_config terms commitment server"),
    "schedule": _form(SERVER, "round members weights"),
    "masked": _form(SERVER, "round inputs"),
    "blame": _form(SERVER, "round member by why evidence"),
    "outcome": _form(SERVER, "round m0 m weight included head", "x slice"),
    "report": _form(MEMBER, "run salt round bound_to cosine measured"),
    "analysis": _form(SERVER, "round", others=True),
    "round": _form(
        SERVER,
        "round included declined silent aborted m slice utilities samples checkpoint",
        "evaluated members_checkpoint totals_on phi",
    ),
    "scores": _form(SERVER, "round cumulative_alpha"),
    "totals": _form(SERVER, "round utilities"),
    "score": _form(SERVER, "round member salt cumulative_alpha"),
    "last": _form(MEMBER, "run last"),
    "opening": _form(SERVER, "settlement manifest"),
    "agreed": _form(MEMBER, "run settlement wrong released"),
    "statement": _form(MEMBER, "run salt settlement rounds blocks"),
    "table": _form(MEMBER, "run settlement round pairs masked"),
    "verdict": _form(SERVER, "settlement round named values silent evidence"),
    "settled": _form(SERVER, "settlement rounds named missing silent closes final"),
    "unsettled": _form(SERVER, "settlement why"),
    "countersigned": _form(MEMBER, "run settlement sums"),
    "end": _form(SERVER, "rounds model"),
    "seen": _form(MEMBER, "run round head"),
    "decision": _form(SERVER, _DECISION, "shares cents totals after fence heading"),
    "payout": _form(SERVER, "decision member salt share cents"),
}
"""All kinds of records, in the order in which a run first writes them."""
_SHOWN_TO_ALL = {
    kind: form for kind, form in FORMS.items() if kind not in ("totals", "score", "payout", "decision")
} | {"decision": _form(SERVER, f"{_DECISION} shares cents", "after fence heading")}
_SHOWN_TO_COORDINATOR = {kind: form for kind, form in FORMS.items() if kind not in ("scores", "decision")} | {
    "decision": _form(SERVER, f"{_DECISION} totals", "after fence heading")
}
AFTER_END = (
    "join", "seen", "statement", "table", "verdict", "settled", "countersigned", "decision", "payout",
)  # fmt: skip
WHOLE = ("round", "rounds", "decision", "replaces", "unpaid")
"""Fields that are whole numbers (not booleans) in every record; ``replaces`` may also be null."""
NOT_WHOLE = ("statement", "settled")
"""Kinds of records whose ``rounds`` are no number."""
TERMS = {"config", "config_hash", "roster", "strategy", "optimiser", "evaluates"}
"""Entries of a run's terms, in every version."""
MORE_TERMS = {"engine", "previous", "quorum", "protocol", "features", "version"}
"""Entries that version 0.1.0 did not have; ``previous`` and ``quorum`` only if the roster states them."""


def check_forms(records: Sequence[Record], config: Config) -> None:
    """Raise LedgerError at the first record whose author, fields or place do not fit its kind."""
    if [record.kind for record in records[:2]] != ["run", "pool"]:
        raise LedgerError("expected a ledger that begins with the records run and pool")
    ended, signed = False, set()
    shown = config.scoring.visibility
    forms = _SHOWN_TO_ALL if shown == "all" else _SHOWN_TO_COORDINATOR
    for record in records:
        with reading(record):
            if record.kind not in FORMS:
                raise LedgerError("not a kind of record that this version knows")
            if record.kind not in forms:
                raise LedgerError(f"not a kind of record of a run with scoring.visibility = {shown!r}")
            forms[record.kind].check(record, config.clients)
            for name in (name for name in WHOLE if name in record.body and record.kind not in NOT_WHOLE):
                value = record.body[name]
                if type(value) is not int and (name != "replaces" or value is not None):
                    raise LedgerError(f"{name}: expected a whole number, got {value!r:.20}")
            if ended and record.kind not in AFTER_END:
                raise LedgerError("comes after the end of the run")
            if record.kind == "seen":
                if not ended or record.author in signed:
                    raise LedgerError("comes before the end of the run, or is the second one of its author")
                signed.add(record.author)
            if record.seq > 2 and record.kind in ("run", "pool"):
                raise LedgerError("is the second of its kind")
            ended = ended or record.kind == "end"
    run, pool = records[0], records[1]
    with reading(run):
        _check_run(run.body, config)
    with reading(pool):
        _check_pool(pool.body, run.body, config)


def check_rounds(records: Sequence[Record], rounds: Sequence[Round], config: Config) -> None:
    """Raise LedgerError if the records of a round, or of the run's end, contradict the rest of the ledger.

    Args:
        records: of a ledger that passed `check_forms`.
        rounds: as `rounds_of` read them.
        config: of the run.
    """
    walk = _Walk(records[0].body, records[1].body, rounds, config, max(LEAST_IN_SUM, config.threshold))
    for record in records:
        with reading(record):
            if record.kind == "schedule":
                walk.schedule(record.body)
            elif record.kind == "masked":
                walk.masked(record.body["inputs"])
            elif record.kind == "blame":
                walk.blame(record.body)
            elif record.kind == "outcome":
                walk.outcome(record.body)
            elif record.kind == "analysis":
                walk.analysis(record.body)
            elif record.kind == "round":
                walk.close(record.body)
            elif record.kind == "end":
                walk.end(record.body)
            elif record.kind in ("score", "payout") and not record.withheld:
                _hex(record.body["salt"], "salt", 32)
            elif record.kind == "join":
                _check_address(record.body)


def setting_of(records: Sequence[Record], one: Round, config: Config) -> Setting:
    """Return the setting of a round with masks, as its members knew it."""
    return _setting(records[0].body, records[1].body, config, one.number, one.scheduled)


def _setting(
    run: Mapping[str, Any],
    pool: Mapping[str, Any],
    config: Config,
    number_: int,
    scheduled: Sequence[str],
) -> Setting:
    agreed = Agreed(run["terms"], pool, bytes.fromhex(run["keys"][SERVER]))
    return agreed.setting(run["run"], number_, scheduled, recorded_roster(run, config))


def recorded_roster(run: Mapping[str, Any], config: Config) -> Roster:
    """Return the roster that a ledger's first record states, with the hash that members signed.

    The hash may cover more than keys, such as weights that do not count in this run.
    """
    keys = run["keys"] and {name: bytes.fromhex(key) for name, key in run["keys"].items()}
    roster = roster_in(config, keys)
    roster.__dict__["hash"] = bytes.fromhex(run["terms"]["roster"])
    return roster


def masked_inputs(records: Sequence[Record], round_: int, members: Sequence[str]) -> dict[str, str]:
    """Return the hashes of the words that members sent in a round, as recorded before any unmasking."""
    for record in records:
        if record.kind == "masked" and record.body["round"] == round_:
            return {name: str(record.body["inputs"].get(name, "")) for name in members}
    return {}


@dataclass
class _Walk:
    """A second pass over the rounds, record by record."""

    run: Mapping[str, Any]
    pool: Mapping[str, Any]
    rounds: Sequence[Round]
    config: Config
    least: int  # members in a sum
    closed: int = 0
    opened: int = 0
    analysed: int = 0  # the last round with an analysis
    m0: str = ""
    scheduled: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)  # masked ones of the round, by member
    blamed: dict[str, tuple[int, str]] = field(default_factory=dict)  # member -> round, why
    weights: Mapping[str, float] | None = None
    slices: list[str] = field(default_factory=list)
    first: dict[tuple[str, str], str] = field(
        default_factory=dict
    )  # utility of the first model, by slice and name

    @property
    def _agreed(self) -> bool:
        """Whether members joined the run; rehearsals of version 0.1.0 had no joins."""
        return "terms" in self.run

    @property
    def _rehearsal(self) -> bool:
        return bool(self.run["engine"] == EMBEDDED)

    def schedule(self, body: Mapping[str, Any]) -> None:
        clients = self.config.clients
        self.opened += 1
        if self.opened > self.config.training.rounds:
            raise LedgerError(f"begins round {self.opened} of {self.config.training.rounds}")
        self.scheduled = _named(body["members"], clients, "schedules")
        for name in self.scheduled:
            if name in self.blamed:
                raise LedgerError(f"schedules {name}, who was blamed in round {self.blamed[name][0]}")
        self.weights = self._weights(body["weights"])

    def _weights(self, told: Any) -> dict[str, float] | None:
        """Return the public weights of a schedule; raise unless they follow from the config."""
        kind = self.config.training.weights
        if kind in ("uniform", "secret"):
            if told is not None:
                raise LedgerError(f"states weights, but the weights of this run are {kind}")
            return None
        weights = {name: number(weight) for name, weight in told.items()}
        named = self.scheduled if self._agreed else self.config.clients
        if kind == "current-scores":
            named = tuple(weights)
            if set(named) != set(self.scheduled):
                raise LedgerError("does not state the weights of exactly the members it schedules")
            if not all(LEAST <= weight <= MOST for weight in weights.values()):
                raise LedgerError(f"states a weight outside {LEAST:g} to {MOST:g}")
            return weights
        if kind == "roster":
            expected = {name: float(self.config.training.roster_weights[name]) for name in named}
        else:
            paid, training = self.config.scoring.utilities[0], self.config.training
            before = [one.to_reports(paid) for one in self.rounds[: self.closed]]
            scored = [reports for reports in before if reports is not None]
            score, missing = training.weight_score, self.config.payment.missing
            everybody = from_past(scored, self.config.clients, score=score, missing=missing)
            expected = {name: everybody[name] for name in named}
        compare(weights, expected, "weights")
        return weights

    def masked(self, inputs: Mapping[str, str]) -> None:
        _named(sorted(inputs, key=self._place), self.scheduled, "has a masked input of")
        for name, digest in inputs.items():
            _hex(digest, f"the masked input of {name}")
        if inputs and not self.run["keys"]:
            raise LedgerError("has masked inputs in a run without masks")
        self.inputs = inputs

    def blame(self, body: Mapping[str, Any]) -> None:
        """Judge the evidence anew; raise LedgerError unless it proves just what the record states."""
        if not self.run["keys"] or not self._agreed:
            raise LedgerError("blames a member in a run without masks, or of a version that blamed nobody")
        from fedmerit.secagg.masks import judge

        found = judge(self._setting(), body["evidence"])
        proved = [found.member, found.by, found.why]
        if [body["member"], body["by"], body["why"]] != proved:
            raise LedgerError(f"states another blame than its evidence proves: {', '.join(map(str, proved))}")
        if found.member in self.blamed:
            raise LedgerError(f"blames {found.member} a second time")
        if found.why == "complaint" and found.member in self.inputs:
            raise LedgerError(f"has a masked input of {found.member}, whose complaint was false")
        if found.why == "share" and found.by not in self.inputs:
            raise LedgerError(f"has no masked input of {found.by}, who complained")
        self.blamed[found.member] = self.opened, found.why

    def _setting(self) -> Setting:
        return _setting(self.run, self.pool, self.config, self.opened, self.scheduled)

    def _place(self, name: str) -> int:
        return self.scheduled.index(name) if name in self.scheduled else len(self.scheduled)

    def outcome(self, body: Mapping[str, Any]) -> None:
        for what in ("m0", "m", "included", "head", *({"x", "slice"} & body.keys())):
            _hex(body[what], what)
        if ("slice" in body) != self.config.reports:
            raise LedgerError("names a test slice where nothing is reported, or none where members report")
        self.m0 = body["m0"]
        one = self.rounds[self.closed] if self.closed < len(self.rounds) else None
        if one is not None:  # None if the run stopped before the round was closed
            self._total(number(body["weight"]), one.included)
        if "slice" not in body:
            return
        if self.config.data.test_reveal == "fixed" and self.slices and body["slice"] != self.slices[0]:
            raise LedgerError(
                "its test slice differs from the earlier ones, but the run has one for all rounds"
            )
        if self.config.data.test_reveal == "per-round" and body["slice"] in self.slices:
            raise LedgerError(
                "uses the test slice of an earlier round, but each round of this run has a fresh one"
            )
        self.slices.append(body["slice"])

    def _total(self, total: float, included: Sequence[str]) -> None:
        """Raise LedgerError unless W is a total weight that the members in the sum can have."""
        n, training = len(included), self.config.training
        least, most = float(n), float(n)
        if training.weights == "secret":
            most = n * float(training.weight_cap)
        elif self.weights is not None:
            least = most = math.fsum(self.weights[name] for name in included)
        if not least <= total <= most or (training.weights == "secret" and not total.is_integer()):
            raise LedgerError(f"states a total weight of {total:g}, which {n} members cannot have")

    def analysis(self, body: Mapping[str, Any]) -> None:
        if not self.run["analysis"]:
            raise LedgerError("in a run that looked at no plain updates")
        if body["round"] != self.closed + 1:
            raise LedgerError(f"expected the analysis of round {self.closed + 1}, got {body['round']!r:.20}")
        if self.analysed == self.closed + 1:
            raise LedgerError("is the second of its round")
        self.analysed = self.closed + 1

    def close(self, body: Mapping[str, Any]) -> None:
        one = self.rounds[self.closed]
        included = _named(body["included"], self.scheduled, "includes")
        _named(body["silent"], included, "did not hear from")
        if not isinstance(body["aborted"], str) or not isinstance(body["declined"], list):
            raise LedgerError("expected aborted to be text, and declined a list")
        if not body["aborted"] and len(included) < self.least:
            raise LedgerError(f"sums {len(included)} members, but at least {self.least} are needed")
        if not body["aborted"] and (self.opened, "secret") in self.blamed.values():
            raise LedgerError("sums although a member shared out something else than it committed to")
        declined = _named(sorted(body["declined"], key=self._place), self.scheduled, "was declined by")
        if both := [name for name in declined if name in (*one.reports, *one.withheld)]:
            raise LedgerError(f"{both[0]} declined and reported")
        looked, summed = self.analysed == self.closed + 1, not body["aborted"]
        if self.config.values_coalitions(self.closed + 1) and looked != summed:
            raise LedgerError("expected an analysis if the round has a sum, and none otherwise")
        _hex(body["m"], "m")
        self._utilities(body, bool(one.reports or one.withheld))
        self._samples(body["samples"])
        self._errors(one)
        if "phi" in body:
            self._phi(body["phi"], included, aborted=bool(body["aborted"]))
        _hex(body["checkpoint"], "the checkpoint")
        if self._agreed:
            by = body.get("evaluated")
            if by not in ("server", "members"):
                raise LedgerError(f"evaluated by {by!r:.20}: expected server or members")
            if by == "server" and self.run["terms"]["evaluates"] == "members" and body["utilities"]:
                raise LedgerError("evaluated by the server, but the terms say that members evaluate")
        elif "evaluated" in body:
            raise LedgerError("says who evaluated, which no rehearsal of its version does")
        if not self._rehearsal:
            if {"members_checkpoint", "totals_on"} & set(body):
                raise LedgerError("holds a checkpoint of the members, which no server has")
        else:
            _hex(body["members_checkpoint"], "the checkpoint of the members")
            if body["totals_on"] != (expected := self._totals_on()):
                raise LedgerError(f"totals_on: expected {expected!r}, where the members' reports are summed")
        self.closed += 1

    def _errors(self, one: Round) -> None:
        """Raise LedgerError unless reports have sketches of their errors where the terms ask for them."""
        joint, most = self.config.scoring.errors == "joint", self.pool["size"]
        for name, report in one.reports.items():
            for utility, said in report.measured.items():
                first = next(iter(one.reports.values())).measured[utility]
                if (said.sketch is None) == joint or (said.freedom is None) == joint:
                    raise LedgerError(
                        f"the report of {name} has a sketch of its error or none, unlike the terms"
                    )
                if said.sketch is None or said.freedom is None:
                    continue
                if said.freedom != first.freedom or not 1 <= said.freedom <= most:
                    raise LedgerError(
                        f"the report of {name} states {said.freedom} degrees of freedom, others "
                        f"{first.freedom}, on at most {most} samples"
                    )
                if not belongs(said.sketch, said.se_alpha):
                    raise LedgerError(
                        f"the report of {name} has a sketch that is not that of an error of {said.se_alpha:g}"
                    )

    def _totals_on(self) -> str:
        """Return the slice of the last report by the first member of the config who has reported at all."""
        so_far = self.rounds[: self.closed + 1]
        for name in self.config.clients:
            for one in reversed(so_far):
                if name in one.reports or name in one.withheld:
                    return str(one.body["slice"] or "")
        return ""

    def _utilities(self, body: Mapping[str, Any], heard: bool) -> None:
        scoring, given = self.config.scoring, body["utilities"]
        if body["aborted"] and (given or body["slice"] is not None):
            raise LedgerError("aborted, but states utilities or a test slice")
        if not self.config.reports:
            if given or body["slice"] is not None:
                raise LedgerError("states utilities or a test slice, but nothing is reported in this run")
            return
        if set(given) != set(scoring.utilities) and (given or heard):
            raise LedgerError(f"is about the utilities {', '.join(map(str, given))[:100]}")
        keys = {"empty", "grand", "first"} if scoring.solo and self._rehearsal else {"empty", "grand"}
        for name, values in given.items():
            if set(values) != keys or not all(math.isfinite(number(value)) for value in values.values()):
                raise LedgerError(f"expected finite numbers {', '.join(sorted(keys))} of {name}")
            if "first" in keys:
                known = values["empty"] if self.m0 == self.run["m0"] else values["first"]
                if values["first"] != self.first.setdefault((self.slices[-1], name), known):
                    raise LedgerError(
                        f"states a different {name} of the first model than an earlier round on this slice"
                    )

    def _phi(self, given: Any, included: Sequence[str], *, aborted: bool) -> None:
        """Raise LedgerError unless these are the Aumann-Shapley scores of everybody in the sum, by block."""
        scoring = self.config.scoring
        if not self._rehearsal or aborted or scoring.visibility != "all":
            raise LedgerError(
                "phi: only a rehearsal whose members see all scores has it, for a round with a sum"
            )
        if not set(given) <= set(scoring.utilities):
            raise LedgerError(f"phi is about the utilities {', '.join(map(str, given))[:100]}")
        for name, one in given.items():
            if set(one) != {"blocks", "sizes", "stratified", "gain", "rest", "points"}:
                raise LedgerError(f"phi of {name}: has other fields than it should")
            sizes, blocks = one["sizes"], one["blocks"]
            counts = [*sizes, one["points"]]
            if not sizes or not all(type(count) is int and count > 0 for count in counts):
                raise LedgerError(f"phi of {name}: expected whole numbers above 0 as sizes and points")
            if set(blocks) != set(included) or any(len(own) != len(sizes) for own in blocks.values()):
                raise LedgerError(f"phi of {name}: expected {len(sizes)} numbers of everybody in the sum")
            values = [one["gain"], one["rest"], *(value for own in blocks.values() for value in own)]
            if type(one["stratified"]) is not bool or not all(math.isfinite(number(v)) for v in values):
                raise LedgerError(
                    f"phi of {name}: expected finite numbers, and whether blocks are stratified"
                )

    def _samples(self, samples: Any) -> None:
        if not self.config.scoring.disclose_samples:
            if samples is not None:
                raise LedgerError("states sample counts, which this run does not disclose")
            return
        if set(samples) != set(self.config.clients):
            raise LedgerError("does not state the sample counts of all members")
        if not all(type(count) is int and count >= 0 for count in samples.values()):
            raise LedgerError("states a sample count that is not a whole number")

    def end(self, body: Mapping[str, Any]) -> None:
        if body["rounds"] != self.closed or isinstance(body["rounds"], bool):
            raise LedgerError(f"ends after {body['rounds']!r:.20} rounds, but {self.closed} were closed")
        if self.opened != self.closed:
            raise LedgerError(f"ends while round {self.opened} is open")
        last = self.rounds[self.closed - 1].body["m"] if self.closed else self.run["m0"]
        _hex(body["model"], "the last model")
        if body["model"] != last and not moves(self.run):
            raise LedgerError("does not end with the model of the last round")


def _check_run(run: Mapping[str, Any], config: Config) -> None:
    _hex(run["run"], "run", 32)
    _hex(run["m0"], "m0")
    if not isinstance(run["version"], str) or not re.fullmatch(PACKAGE, run["version"]):
        raise LedgerError(f"version: expected the version of a release, got {run['version']!r:.60}")
    if run["engine"] not in ENGINES:
        raise LedgerError(f"engine: expected one of {', '.join(ENGINES)}, got {run['engine']!r:.40}")
    if "terms" not in run and run["engine"] != EMBEDDED:
        raise LedgerError("terms: missing, although members agree to them with this engine")
    if run["data"] is not None or run["engine"] == EMBEDDED:
        _hex(run["data"], "data")
    if run["analysis"] is not config.analysis:
        raise LedgerError("analysis: differs from what its config says")
    if "terms" in run:
        terms = run["terms"]
        if set(terms) - MORE_TERMS != TERMS or terms["config_hash"] != run["config_hash"]:
            raise LedgerError(f"terms: expected {', '.join(sorted(TERMS))}, and the hash of its config")
        _hex(terms["roster"], "the hash of the roster")
        _check_more(terms)
        if not isinstance(terms["strategy"], str) or not isinstance(terms["optimiser"], bool):
            raise LedgerError("terms: expected the strategy's name, and whether it has an optimiser")
        if run["engine"] == EMBEDDED:
            keys = run["keys"] and {name: bytes.fromhex(key) for name, key in run["keys"].items()}
            expected = (roster_in(config, keys).hash.hex(), False, "server")
            if (terms["roster"], terms["optimiser"], terms["evaluates"]) != expected:
                raise LedgerError("terms: not the terms of a rehearsal with its keys")
        if terms["evaluates"] not in ("server", "members"):
            raise LedgerError(f"terms: evaluates is server or members, got {terms['evaluates']!r:.20}")


def _check_more(terms: Mapping[str, Any]) -> None:
    """Raise unless the entries that version 0.1.0 did not have are well formed."""
    if "previous" in terms:
        _hex(terms["previous"], "the hash of the roster before")
    if "quorum" in terms and (type(terms["quorum"]) is not int or terms["quorum"] < 1):
        raise LedgerError(f"terms: quorum: expected a whole number, got {terms['quorum']!r:.20}")
    spoken = {"protocol", "features", "version"} & set(terms)
    if not spoken:
        return
    if len(spoken) < 3 or type(terms["protocol"]) is not int or terms["protocol"] < 3:
        raise LedgerError("terms: expected protocol, a whole number from 3 on, features and version")
    if not isinstance(terms["features"], list) or not all(isinstance(one, str) for one in terms["features"]):
        raise LedgerError("terms: expected features to be a list of names")
    if not isinstance(terms["version"], str) or not re.fullmatch(PACKAGE, terms["version"]):
        raise LedgerError(f"terms: version: expected the version of a release, got {terms['version']!r:.60}")


def _check_address(join: Mapping[str, Any]) -> None:
    """Raise unless a join has an address, and the digest of a run config or nothing."""
    if not isinstance(join["address"], str):
        raise LedgerError(f"address: expected text, got {join['address']!r:.40}")
    if join["run_config"] != "":
        _hex(join["run_config"], "run_config")


def _check_pool(pool: Mapping[str, Any], run: Mapping[str, Any], config: Config) -> None:
    for what in ("version", "size", "slices", "classes", "balanced", *({"settled"} & pool.keys())):
        if type(pool[what]) is not int:
            raise LedgerError(f"{what}: expected a whole number, got {pool[what]!r:.20}")
    if pool["version"] != 1 or pool["balanced"] not in (0, 1) or pool["classes"] < 0:
        raise LedgerError("expected version 1, balanced 0 or 1, and at least 0 classes")
    for what in ("root", "utility"):
        _hex(pool[what], what)
    size, slices, data = pool["size"], pool["slices"], config.data
    if not 1 <= slices <= size:
        raise LedgerError(f"{size} test samples cannot be cut into {slices} slices")
    _check_settled(pool, config)
    if run["engine"] != EMBEDDED:
        return  # the server brought its own test set
    if data.test_size not in (0, size) or bool(pool["balanced"]) != bool(data.test_size):
        raise LedgerError(f"holds {size} test samples, but the config asks for {data.test_size or 'all'}")
    method, reveal, rounds = config.scoring.method, data.test_reveal, config.training.rounds
    if (slices, pool.get("settled", 0)) != parts_of(size, method=method, reveal=reveal, rounds=rounds):
        raise LedgerError(
            f"{slices} slices, with {pool.get('settled', 0)} samples for the settlement, are not what "
            f"test_reveal = {reveal!r} and method = {method!r} make"
        )


def _check_settled(pool: Mapping[str, Any], config: Config) -> None:
    """Raise LedgerError unless a pool has a part for the settlement where the run has one, and only there."""
    method, size, slices = config.scoring.method, pool["size"], pool["slices"]
    if ("settled" in pool) != config.settles:
        raise LedgerError(f"settled: expected only where members settle, but the method is {method!r}")
    if not config.settles:
        return
    settled = pool["settled"]
    if method == "settled" and (settled, slices) != (size, 1):
        raise LedgerError(f"settled: expected all {size} test samples in one slice, got {settled}")
    if method == "both" and not (1 <= settled < size and 1 <= slices - 1 <= size - settled):
        raise LedgerError(
            f"settled: {settled} of {size} test samples in the last of {slices} slices leave too few for the "
            "rounds or for the settlement"
        )


def _named(names: Any, known: Sequence[str], does: str) -> tuple[str, ...]:
    """Return names; raise LedgerError unless each is known, listed once and in the known order."""
    if not isinstance(names, list) or [name for name in known if name in names] != names:
        raise LedgerError(f"{does} {', '.join(map(str, names))[:200]}: expected some of {', '.join(known)}")
    return tuple(names)


def _hex(value: Any, what: str, digits: int = 64) -> None:
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        raise LedgerError(f"{what}: expected {digits} hexadecimal digits, got {value!r:.80}")
