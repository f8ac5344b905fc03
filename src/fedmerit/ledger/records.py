"""Rounds as records of the ledger, rounds read back from records, and scores recomputed from them.

A run begins with ``run`` (config, keys) and ``pool`` (the test pool's commitment). A round has the records
``schedule``, ``masked`` (hashes of the masked inputs), one ``blame`` for each member who broke the protocol,
``outcome`` (the sum and the slice revealed after it), one ``report`` per member, and ``round``, which closes
it; a round without a sum has no outcome or reports.
After each round the server states the scores (`after_round`). A run ends with ``end``, and with ``seen`` by
every member who signs the head after it (`head_log`); a ``decision`` says who is paid what (`decisions`).
Scores always come from these records, never from the memory of a process. So a resumed run, a finished run
and its verification give the same scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fedmerit.config import Config, Scoring, recorded, recorded_hash
from fedmerit.errors import ConfigError, FedmeritError, LedgerError
from fedmerit.identity import SERVER, content, exact, new_salt, number
from fedmerit.ledger.chain import Ledger, Record, Records
from fedmerit.notes import Note
from fedmerit.protocol.outcome import Model, Outcome, Report, Round, included_hash, model_hash
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.files import (
    RoundEntry,
    add_phi,
    as_csv,
    as_json,
    round_object,
    settled_csv,
    sums_object,
)
from fedmerit.scoring.scores import score_of
from fedmerit.scoring.types import Reports, Vector

# -------------------------------------------------------------------------------------------------- rounds

Sign = Callable[[str, bytes], bytes]
"""(author, message) -> signature; empty bytes if there are no keys."""


@dataclass(frozen=True)
class Journal:
    """A writer of records that are signed by their authors and sealed by the server."""

    ledger: Ledger
    sign: Sign

    def write(self, author: str, kind: str, body: Mapping[str, Any]) -> Record:
        """Append one record."""
        signature = self.sign(author, content(author, kind, body))
        seal = (lambda digest: self.sign(SERVER, digest)) if signature else None
        return self.ledger.append(author, kind, body, signature=signature, seal=seal)


def rounds_of(ledger: Records) -> list[Round]:
    """Return every closed round of a ledger, in order; raise LedgerError if records contradict each other."""
    start = first_body(ledger, "run")
    found: list[Round] = []
    before: str | None = None
    pending: Round | None = None
    outcome: Mapping[str, str] | None = None
    masked: Mapping[str, str] | None = None
    head = last = ""
    for record in ledger.records():
        body = record.body
        with reading(record):
            if record.kind == "schedule":
                if pending is not None:
                    raise LedgerError(f"round {pending.number} before it is not closed")
                head, masked = last, None
                pending, outcome = Round(number=body["round"], scheduled=tuple(body["members"])), None
                before = None if found and moves(start) else found[-1].body["m"] if found else start["m0"]
                if pending.number != len(found) + 1:
                    raise LedgerError(f"expected round {len(found) + 1}, got round {pending.number}")
            elif record.kind == "masked":
                if pending is None or body["round"] != pending.number or masked is not None:
                    raise LedgerError("outside its round, or the second of its round")
                masked = dict(body["inputs"])
            elif record.kind == "blame":
                if (
                    pending is None
                    or body["round"] != pending.number
                    or masked is None
                    or outcome is not None
                ):
                    raise LedgerError("outside of its round, or not between masked inputs and outcome")
                pending.blamed += (body["member"],)
            elif record.kind == "outcome":
                if pending is None or body["round"] != pending.number or outcome is not None:
                    raise LedgerError("outside its round, or the second of its round")
                outcome = {key: value for key, value in body.items() if key != "round"}
                if before not in (None, outcome["m0"]):
                    raise LedgerError("does not start from the last recorded model")
                if outcome["head"] != head:
                    raise LedgerError("the head that its members saw is not the head before its round")
            elif record.kind == "report":
                if pending is None or (not record.withheld and body["round"] != pending.number):
                    raise LedgerError("outside its round")
                if record.author in (*pending.reports, *pending.withheld):
                    raise LedgerError("its author has already reported on this round")
                if record.withheld:
                    pending.withheld += (record.author,)
                else:
                    report = Report.from_body(record.author, body, run=start["run"])
                    if report.bound_to != outcome:
                        raise LedgerError("not computed on the outcome of its round")
                    pending.reports[record.author] = report
            elif record.kind == "round":
                if pending is None or body["round"] != pending.number:
                    raise LedgerError(f"expected the end of round {len(found) + 1}")
                found.append(_closed(pending, body, outcome))
                if outcome is None and before not in (None, body["m"]):
                    raise LedgerError("aborted, but its model is not the last recorded one")
                if masked is None or (start["keys"] and set(found[-1].included) - set(masked)):
                    raise LedgerError("includes a member whose masked input is not recorded")
                pending = None
        last = record.digest.hex()
    return found


def moves(run: Mapping[str, Any]) -> bool:
    """Return whether the server may move the model between rounds; M0 may then differ from the last M."""
    terms = run.get("terms")
    return isinstance(terms, Mapping) and bool(terms.get("optimiser"))


def _closed(one: Round, body: Mapping[str, Any], outcome: Mapping[str, str] | None) -> Round:
    """Return a round with its closing record; raise LedgerError if that contradicts the records before it."""
    one.included, one.declined = tuple(body["included"]), tuple(body["declined"])
    one.silent, one.aborted = tuple(body["silent"]), str(body["aborted"])
    one.body = body
    if bool(one.aborted) == (outcome is not None) or (one.aborted and one.included):
        raise LedgerError("aborted with an outcome or members in the sum, or neither aborted nor summed")
    if outcome is not None and outcome["included"] != included_hash(one.included):
        raise LedgerError("the members it includes are not those that its members were told")
    if not set(one.included) <= set(one.scheduled):
        raise LedgerError("includes a member who was not scheduled")
    heard = {*one.reports, *one.withheld}
    if heard | set(one.silent) != set(one.included) or heard & set(one.silent):
        raise LedgerError("the members it includes are not exactly those who reported or were silent")
    if outcome is not None and (body["m"], body["slice"]) != (outcome["m"], outcome.get("slice")):
        raise LedgerError("its model or test slice is not the one in the outcome of its round")
    members_did = body.get("evaluated") == "members"
    if members_did and not one.withheld and body["utilities"] != medians(one.reports.values()):
        raise LedgerError("v(M0) or v(M) is not the median of what its members measured")
    for name, report in one.reports.items():
        if set(report.measured) != set(body["utilities"]):
            raise LedgerError(f"the report of {name} is about other utilities")
    for utility in body["utilities"]:
        one.to_reports(utility)  # raises here if the reports cannot be scored
    return one


@contextmanager
def reading(record: Record) -> Iterator[None]:
    """Turn any error about a record's body into a LedgerError that names the record."""
    try:
        yield
    except FedmeritError as error:
        code = error.code if isinstance(error, LedgerError) else ""
        raise LedgerError(f"{record.name}: {error}", record=record.seq, code=code) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"{record.name}: not a record of its kind: {error!r:.80}"
        raise LedgerError(problem, record=record.seq) from error


def first_body(ledger: Records, kind: str) -> Mapping[str, Any]:
    """Return the body of the only record of a kind; raise LedgerError if there is not exactly one."""
    bodies = [record.body for record in ledger.records(kind)]
    if len(bodies) != 1:
        raise LedgerError(f"{ledger.path}: expected one record of kind {kind!r}, found {len(bodies)}")
    return bodies[0]


class RunningAlpha:
    """Alpha of one utility, summed over the rounds added so far: what `accumulate` gives for all of them.

    ``heard`` also counts rounds on which a copy withholds all reports.
    """

    def __init__(self, utility: str, missing: Missing) -> None:
        self.utility, self.missing = utility, missing
        self.heard = 0
        self._gains: list[float] = []
        self._terms: dict[str, list[float]] = {}

    def add(self, one: Round) -> None:
        """Add the next round."""
        reports = one.to_reports(self.utility)
        self.heard += not one.aborted and bool(one.reports or one.withheld)
        if reports is not None:
            self._gains.append(reports.gain)
            for name, value in score_of(reports, "ALPHA").as_dict().items():
                self._terms.setdefault(name, []).append(value)

    @property
    def gain(self) -> float:
        """The gain of all rounds that have reports."""
        return math.fsum(self._gains)

    def values(self) -> dict[str, float]:
        """Return the sum of everybody who has reported."""
        return {name: self._sum(own, len(self._gains)) for name, own in self._terms.items()}

    def of(self, member: str) -> float | None:
        """Return a member's sum as it follows from its own reports alone; None if it has none."""
        return self._sum(self._terms[member], self.heard) if member in self._terms else None

    def _sum(self, own: Sequence[float], rounds: int) -> float:
        return math.fsum(own) * (rounds / len(own) if self.missing == "own-mean" else 1.0)


Running = Mapping[str, RunningAlpha]
"""Utility -> its sums over the same rounds."""


def running(rounds: Iterable[Round], config: Config) -> Running:
    """Return the sums over these rounds, by utility; more rounds can be added."""
    missing = config.payment.missing
    found = {utility: RunningAlpha(utility, missing) for utility in config.scoring.utilities}
    for one in rounds:
        for each in found.values():
            each.add(one)
    return found


def stated(sums: Running) -> dict[str, dict[str, str]]:
    """Return cumulative alpha per utility and member, as the server states it."""
    told = {utility: each.values() for utility, each in sums.items()}
    return {
        utility: {name: exact(value) for name, value in values.items()}
        for utility, values in told.items()
        if values
    }


def closing(found: Round, model: Model, outcome: Outcome | None) -> dict[str, Any]:
    """Return the fields that every engine records at the end of a round; set who was silent."""
    if outcome is None:
        found.included = ()
    found.silent = tuple(name for name in found.included if name not in found.reports)
    return {
        "round": found.number,
        "included": list(found.included),
        "declined": list(found.declined),
        "silent": list(found.silent),
        "aborted": found.aborted,
        "m": outcome.bound_to["m"] if outcome else model_hash(model),
        "slice": outcome.slice.id if outcome and outcome.slice else None,
    }


def medians(reports: Iterable[Report]) -> dict[str, dict[str, str]]:
    """Return v(M0) and v(M) per utility as medians over the members, for a server that cannot evaluate."""
    listed = list(reports)
    found: dict[str, dict[str, str]] = {}
    for name in listed[0].measured:
        each = [report.measured[name] for report in listed]
        pairs = [(one.empty, one.grand) for one in each]
        if any(empty is None or grand is None for empty, grand in pairs):
            raise LedgerError(f"a report does not state v(M0) and v(M) of {name}")
        columns = zip(*pairs, strict=True)
        found[name] = {
            key: exact(median(column)) for key, column in zip(("empty", "grand"), columns, strict=True)
        }
    return found


def scores_document(
    rounds: Sequence[Round],
    clients: Sequence[str],
    utilities: Sequence[str],
    *,
    missing: Any = "zero",
    truth: Mapping[str, Any] | None = None,
    analysis: bool = False,
    settlement: Mapping[str, Any] | None = None,
    settled: bool = False,
) -> dict[str, Any]:
    """Return the content of ``scores.json``: the paid utility at the top level, others as companions.

    Args:
        rounds: of the ledger.
        clients: all members.
        utilities: the paid one first.
        missing: see :func:`fedmerit.accumulate`.
        truth: ground truth by utility.
        analysis: whether plain updates were analysed.
        settlement: its block, once there is one.
        settled: whether members report nothing, so that the settlement gives the only scores.
    """
    each = {utility: _one(rounds, clients, utility, missing) for utility in utilities}
    if settled:
        listed = [_unscored(one, one.included) for one in rounds]
        cumulative = {} if settlement is None else {"PHI": settlement["cumulative"]}
        bare = {"clients": list(clients), "utility": utilities[0], "method": "settled", "rounds": listed}
        each = {utilities[0]: {**bare, "cumulative": cumulative}}
    for utility, values in (truth or {}).items():
        each[utility]["truth"] = values
    paid, *others = utilities
    marked: dict[str, Any] = {"analysis": True} if analysis else {}
    if settlement is not None:
        marked["settlement"] = dict(settlement)
    beside = {utility: each[utility] for utility in others if utility in each}
    return {**each[paid], **marked, "companions": beside}


def _one(rounds: Sequence[Round], clients: Sequence[str], utility: str, missing: Any) -> dict[str, Any]:
    scored = [found for one in rounds if (found := one.to_reports(utility)) is not None]
    named = {"clients": list(clients), "utility": utility, "rounds": [_entry(one, utility) for one in rounds]}
    content_ = (
        {**named, **sums_object(scored, clients, missing=missing)} if scored else {"cumulative": {}, **named}
    )
    put_phi(content_, rounds, utility, missing)
    return content_


_ENTRIES: WeakKeyDictionary[Round, dict[str, RoundEntry]] = WeakKeyDictionary()


def _entry(one: Round, utility: str) -> RoundEntry:
    """Return the entry of a round, made once: a run writes all of its rounds after every round."""
    known = _ENTRIES.setdefault(one, {})
    if utility not in known:
        reports = one.to_reports(utility)
        known[utility] = RoundEntry(_unscored(one) if reports is None else round_object(reports))
    return known[utility]


def put_phi(document_: dict[str, Any], rounds: Sequence[Round], utility: str, missing: Missing) -> None:
    """Add PHI to the scores of a utility, from the rounds of a ledger that have it."""
    phi = {one.number: one.to_phi(utility) for one in rounds if not one.aborted}
    known = {number_: scores for number_, scores in phi.items() if scores is not None}
    total = None
    if known and len(known) == len(phi):  # a sum over some of the rounds would not be what it says
        total = accumulate(known.values(), score="PHI", missing=missing)
    beside = {one.number: _beside_phi(one.body["phi"][utility]) for one in rounds if one.number in known}
    add_phi(document_, total, {number_: (known[number_], beside[number_]) for number_ in known})


def _beside_phi(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"gain": number(found["gain"]), "rest": number(found["rest"]), "points": found["points"]}


def _unscored(one: Round, participants: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entry of a round without reported scores: it was aborted, or no member reported."""
    return {
        "round": one.number,
        "participants": list(participants),
        **({"silent": list(one.silent)} if one.silent else {}),
        "reports": None,
        "scores": None,
        "aborted": bool(one.aborted),
    }


def score_files(content_: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the score files."""
    yield "scores.json", as_json(content_).encode()
    if content_.get("method") == "settled":  # there are no reports
        yield "scores.csv", settled_csv(content_).encode()
        return
    scored = {**content_, "rounds": [one for one in content_["rounds"] if one["reports"] is not None]}
    yield "scores.csv", as_csv(scored).encode()


# ------------------------------------------------------------------------------- stated against recomputed

TOLERANCE = 1e-12


def compare(there: Any, here: Any, where: str) -> None:
    """Raise LedgerError at the first difference; numbers may differ by a relative 1e-12."""
    if isinstance(there, dict) and isinstance(here, dict):
        odd = [key for key in (*here, *there) if (key in here) != (key in there)]
        for key in here:
            if key in there:
                compare(there[key], here[key], f"{where}.{key}")
        if odd:
            raise LedgerError(f"{where}.{odd[0]}: {'not in the ledger' if odd[0] in there else 'missing'}")
    elif isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            raise LedgerError(f"{where}: holds {len(there)} entries, but the reports give {len(here)}")
        for k, (one, other) in enumerate(zip(there, here, strict=True)):
            compare(one, other, f"{where}[{k}]")
    elif isinstance(there, float) and isinstance(here, float):
        if not math.isclose(there, here, rel_tol=TOLERANCE, abs_tol=0.0):
            raise LedgerError(f"{where}: states {there!r}, the reports give {here!r}")
    elif there != here or isinstance(there, bool) != isinstance(here, bool):
        raise LedgerError(f"{where}: states {there!r:.60}, the reports give {here!r:.60}")


# ------------------------------------------------------------------------------------------ v(M0) and v(M)

FAR = 1e-2
"""A member contradicts the server if they differ by more than this (relative to 1 or to the value, whichever
is larger). Other processors, TF32 or another order of additions make less of a difference, except for a few
samples of a small test set: see `check_server`."""
FLIPS = 3
"""How many test samples may be classified differently on other processors."""
LEAST_AGAINST = 3
"""How many members must contradict the server before the ledger is refused."""


def check_server(one: Round, samples: int) -> None:
    """Raise LedgerError if the server evaluated a round and most members of its sum contradict it.

    A member contradicts the server if they differ by more than ``FAR``, or ``FLIPS`` of the round's test
    samples if that is more. Reports that a copy withholds count as agreeing, since its reader cannot know.
    """
    if one.body.get("evaluated") == "members":
        return
    away = one.differences(max(FAR, FLIPS / samples))
    if len(away) >= LEAST_AGAINST and 2 * len(away) > len(one.included):
        name, words = next(iter(away.items()))
        raise LedgerError(
            f"round {one.number}: {len(away)} of {len(one.included)} members contradict the server's v(M0) "
            f"or v(M): {name} {words}"
        )


# ---------------------------------------------------------------------------------- rounds without a score


def aborted(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Return the numbers of the rounds that were aborted."""
    return tuple(one.number for one in rounds if one.aborted)


def unreported(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Return the numbers of the rounds that were summed, but that no member reported on."""
    return tuple(one.number for one in rounds if not (one.aborted or one.reports or one.withheld))


def about(rounds: Sequence[Round]) -> Iterator[Note]:
    """Yield remarks on the rounds that have no score."""
    yield from in_words(aborted(rounds), unreported(rounds))


def in_words(aborted_: Sequence[int], unreported_: Sequence[int]) -> Iterator[Note]:
    """Yield remarks on which rounds have no score, and what that means.

    >>> print(*in_words([4], []))
    round 4 was aborted: the model stayed as it was
    """
    if aborted_:
        yield Note("aborted", rounds=tuple(aborted_))
    if unreported_:
        yield Note("unreported", rounds=tuple(unreported_))


def run_and_config(ledger: Records, *, signed: bool) -> tuple[Mapping[str, Any], Config]:
    """Return the first record and its config; raise LedgerError if these or the ledger disagree."""
    run = first_body(ledger, "run")
    with reading(next(ledger.records("run"))):
        try:
            config, digest = recorded(run["config"]), recorded_hash(run["config"])
        except ConfigError as error:
            raise LedgerError(f"its config cannot be read: {error}") from error
        if digest != run["config_hash"]:
            raise LedgerError("its config does not match its hash")
        if not config.clients or list(config.clients) != run["members"]:
            raise LedgerError("its members are not those in its config")
        if config.secure_aggregation.enabled != signed:
            state = "on, but the ledger is unsigned" if not signed else "off, but the ledger is signed"
            raise LedgerError(f"its config has secure aggregation {state}")
        if signed and set(run["keys"]) != {SERVER, *config.clients}:
            raise LedgerError("its keys are not those of the server and the members")
        if "terms" in run and run["terms"]["config"] != run["config"]:
            raise LedgerError("its members agreed to a different config")
        if "terms" in run and run["terms"].get("engine", run["engine"]) != run["engine"]:
            raise LedgerError("its members agreed to a different engine")
        if not isinstance(run["analysis"], bool):
            raise LedgerError("it does not say whether it is an analysis")
    return run, config


def config_of(ledger: Records) -> Config:
    """Return the settings of a run, from its ledger."""
    return run_and_config(ledger, signed=bool(first_body(ledger, "run").get("keys")))[1]


# ------------------------------------------------------------------------------------------- who sees what
# What the server states after a round, and what a member's copy withholds.
#
# With ``scoring.visibility = "all"`` every member may read every record, and after each round the server
# states all cumulative scores in one record (``scores``). With ``"coordinator"`` the server states ``totals``
# that all members may read, and each member's score in a salted record of its own (``score``). A member's
# copy then holds only the hash of the body of another member's report, score or payout.

PRIVATE = ("score", "payout")
"""Kinds of records that the server writes about one member, whom the body names."""


def after_round(rounds: Sequence[Round], config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and body of each record that the server writes after the last of these rounds."""
    last, sums = rounds[-1], running(rounds, config)
    told = stated(sums)
    if config.scoring.visibility == "all":
        yield "scores", {"round": last.number, "cumulative_alpha": told}
        return
    yield "totals", {"round": last.number, "utilities": totals(last, sums)}
    for name in dict.fromkeys(name for each in told.values() for name in each):
        own = {utility: each[name] for utility, each in told.items()}
        yield "score", {"round": last.number, "member": name, "salt": new_salt(), "cumulative_alpha": own}


def totals(last: Round, sums: Running) -> dict[str, dict[str, Any]]:
    r"""Return what all members may know, per utility: about the last round, and about all rounds so far.

    .. math:: N, \quad D = v(M) - v(M_0), \quad v(M), \quad A = \sum_i \alpha_i, \quad
        A^+ = \sum_i \max(\alpha_i, 0), \quad T = \sum_i 2 (D - \alpha_i)
    """
    found = {}
    for utility, each in sums.items():
        values = np.array([*each.values().values()])
        if not values.size:
            continue
        entry: dict[str, Any] = {"summed": {"n": values.size, "gain": exact(each.gain)} | _sums(values)}
        reports = last.to_reports(utility)
        if reports is not None:
            entry["round"] = _of_round(reports)
        found[utility] = entry
    return found


def _of_round(reports: Reports) -> dict[str, Any]:
    own = score_of(reports, "ALPHA").raw
    t = math.fsum(2 * (reports.gain - value) for value in own.tolist())
    facts = {"n": reports.n, "gain": exact(reports.gain), "grand": exact(reports.grand)}
    return facts | _sums(own) | {"t": exact(t)}


def _sums(own: Vector) -> dict[str, str]:
    return {"alpha": exact(math.fsum(own)), "alpha_plus": exact(math.fsum(np.maximum(own, 0.0)))}


def sees(member: str) -> Callable[[Record], bool]:
    """Return a function that tells which bodies a member may see if only the coordinator sees all."""

    def visible(record: Record) -> bool:
        if record.kind in ("report", "statement"):
            return record.author == member
        return record.kind not in PRIVATE or record.body.get("member") == member

    return visible


def own_total(
    member: str, rounds: Sequence[Round], utility: str, *, score: str = "ALPHA", missing: Missing = "zero"
) -> float | None:
    """Return a member's score summed over rounds, from its own reports alone; None if it has none."""
    heard = [one for one in rounds if not one.aborted and (one.reports or one.withheld)]
    reported = [one for one in heard if member in one.reports]
    own = [reports for one in reported if (reports := one.to_reports(utility)) is not None]
    if not own:
        return None
    factor = len(heard) / len(own) if missing == "own-mean" else 1.0
    total = accumulate(own, score=score).as_dict()[member]
    if score == "MERIT":  # only the part that is summed over rounds is scaled
        summed = accumulate(own, score="IOI").as_dict()[member]
        return summed * factor + (total - summed)
    return total * factor


def reader_of(records: Sequence[Record], members: Sequence[str], given: str | None) -> str | None:
    """Return the member that a copy was made for; None if it withholds nothing.

    Args:
        records: all records of the copy.
        members: of the run.
        given: the member who reads it, if known; no report or statement of its own may be withheld.
    """
    withheld = [record for record in records if record.withheld]
    if given is not None and given not in members:
        raise LedgerError(f"{given!r} is not a member of the run; members are {', '.join(members)}")
    if not withheld:
        return None
    open_ = {record.author for record in records if record.kind == "report" and not record.withheld}
    if given is None:
        if len(open_) != 1:
            raise LedgerError("this copy withholds records: say whose copy it is (--as NAME)")
        (given,) = open_
    for record in withheld:
        if record.kind not in ("report", "statement", *PRIVATE):
            raise LedgerError(f"{record.name}: withheld, though every member may see it", record=record.seq)
        if record.kind in ("report", "statement") and record.author == given:
            raise LedgerError(f"{record.name}: withheld from its own author", record=record.seq)
    return given


# ---------------------------------------------------------------------------------------------- recomputed


def check_stated(
    records: Sequence[Record], rounds: Sequence[Round], config: Config, reader: str | None
) -> None:
    """Recompute what the server stated after each round; in a member's copy, only what that member can."""
    scoring = config.scoring
    kinds = ("scores",) if scoring.visibility == "all" else ("totals", "score")
    stated_in: dict[int, list[Record]] = {one.number: [] for one in rounds}
    closed = 0
    for record in records:
        closed += record.kind == "round"
        if record.kind in kinds:
            with reading(record):
                if record.author != SERVER or (not record.withheld and record.body["round"] != closed):
                    raise LedgerError(f"expected what the server states after round {closed}")
                stated_in[closed].append(record)
    sums, heard = running((), config), set[str]()
    for one in rounds:
        for place, record in enumerate(stated_in[one.number]):
            with reading(record):
                for each in sums.values() if place == 0 else ():
                    each.add(one)
                _check_one(record, one, sums, scoring, reader)
        if scoring.visibility == "all":
            if len(stated_in[one.number]) != 1:
                many = len(stated_in[one.number])
                raise LedgerError(f"after round {one.number}: expected one record of scores, found {many}")
        else:
            if scoring.method != "settled":  # there, reports only acknowledge a round, and give no score
                heard |= {*one.reports, *one.withheld}
            _check_complete(one, heard, stated_in[one.number], reader)


def _check_one(record: Record, one: Round, sums: Running, scoring: Scoring, reader: str | None) -> None:
    """Raise LedgerError unless a record states what the sums up to its round give."""
    if record.withheld:
        return
    if record.kind == "totals":
        if reader is None:
            compare(_read(record.body["utilities"]), _read(totals(one, sums)), "utilities")
        else:
            _check_totals(record.body["utilities"], one, scoring)
        return
    told = _read(record.body["cumulative_alpha"])
    if record.kind == "score":
        name = record.body["member"]
        own = {utility: each.of(name) for utility, each in sums.items()}
        compare(told, own, f"cumulative alpha of {name}")
        return
    again = _read(stated(sums))
    for utility, each in told.items():
        compare(each, again[utility], f"cumulative alpha of {utility}")
    if lacking := sorted(set(again) - set(told)):
        raise LedgerError(f"cumulative alpha of {lacking[0]}: missing")


def _check_totals(told: Mapping[str, Any], one: Round, scoring: Scoring) -> None:
    """Raise unless totals fit their round and each other, which is all that a member can check."""
    for part in (part for each in told.values() for part in each.values()):
        if any(
            type(value) is not int if key == "n" else number(value) is None for key, value in part.items()
        ):
            raise LedgerError("totals: expected a whole number n, and numbers")
    scored = (one.reports or one.withheld) and scoring.method != "settled"
    for utility in scoring.utilities if scored else ():
        facts, used = told[utility]["round"], one.body["utilities"][utility]
        grand, gain = number(used["grand"]), number(used["grand"]) - number(used["empty"])
        n, sum_ = len(one.reports) + len(one.withheld), number(facts["alpha"])
        again = {"n": n, "gain": gain, "grand": grand}
        compare({key: value for key, value in _read(facts).items() if key in again}, again, f"{utility}")
        scale = n * abs(gain) + abs(sum_)
        if not math.isclose(number(facts["t"]), 2 * (n * gain - sum_), rel_tol=1e-9, abs_tol=1e-9 * scale):
            raise LedgerError(f"{utility}.t: not 2 (N gain - sum of alpha)")


def _check_complete(one: Round, heard: set[str], found: Sequence[Record], reader: str | None) -> None:
    """Raise unless a round has one record of totals, and one score per member who has ever reported."""
    kinds = [record.kind for record in found]
    if kinds != ["totals"] + ["score"] * len(heard):
        raise LedgerError(
            f"after round {one.number}: expected totals and {len(heard)} scores, "
            f"found {kinds.count('totals')} and {kinds.count('score')}"
        )
    open_ = [record.body["member"] for record in found if record.kind == "score" and not record.withheld]
    expected = heard if reader is None else heard & {reader}
    if len(open_) != len(expected) or set(open_) != expected:
        raise LedgerError(f"after round {one.number}: expected the scores of {', '.join(sorted(expected))}")


def _read(value: Any) -> Any:
    """Return a value with all its hexadecimal strings as numbers."""
    if isinstance(value, Mapping):
        return {key: _read(item) for key, item in value.items()}
    return number(value) if isinstance(value, str) else value
