"""Who lied in a settlement: both sides of the exchanges that find out, around `fedmerit.secagg.naming`.

Only where everybody in a round's sum has stated and the equation fails. Each member signs the products of its
masks with the round's direction and sends its masked words again; where the two ends of a pair differ, both
are asked to open its key. A member takes part only if it is shown signed statements that do not add up.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerit.errors import BindingError, FedmeritError, MessageError, RefusedError
from fedmerit.identity import canonical
from fedmerit.protocol.direction import Direction, Entry, Manifest, direction_hash, whole_number
from fedmerit.protocol.messages import Ask, Parcel, pack, parsed, unpack
from fedmerit.protocol.outcome import as_array, file_name
from fedmerit.protocol.settlement import ALL, Equation, Settled, Statement, name_hash
from fedmerit.protocol.terms import archived_weights, scheduled_encoding
from fedmerit.secagg.plain import PlainClient
from fedmerit.secagg.setting import Setting, Task

if TYPE_CHECKING:
    from fedmerit.protocol.clearing import Clearing
    from fedmerit.protocol.settler import Settler
    from fedmerit.secagg.naming import Evidence, MaskTable, Verdict

WHOLE_RUN = 0
"""In place of a round's number: a verdict on what was stated for the whole run."""


def table_body(run: str, settlement: str, number: int, table: MaskTable) -> dict[str, Any]:
    """Return what a member signs of its masks in a round."""
    pairs = {peer: str(value) for peer, value in table.pairs.items()}
    return {
        "run": run,
        "settlement": settlement,
        "round": number,
        "pairs": pairs,
        "masked": str(table.masked),
    }


def table_limit(members: Sequence[str]) -> int:
    """Return the most bytes of a table, which its reader compares before it parses one."""
    return 1024 + sum(12 * len(one) + 64 for one in members)


def table_of(member: str, body: Mapping[str, Any], run: str, settlement: str, number: int) -> MaskTable:
    """Read a table; raise MessageError unless it is one of this round and settlement."""
    from fedmerit.secagg.naming import MaskTable

    try:
        pairs = {str(peer): whole_number(value) for peer, value in body["pairs"].items()}
        found = MaskTable(member, pairs, whole_number(body["masked"]))
        same = table_body(run, settlement, number, found) == dict(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"not a table of masks: {error!r:.100}", stage="table", member=member) from None
    if not same:
        raise MessageError("a table of another round or settlement", stage="table", member=member)
    return found


# ---------------------------------------------------------------------------------------------- a member


def table_answer(settler: Settler, manifest: Manifest, ask: Ask) -> bytes:
    """Return a member's signed table and its masked words, if it is shown that the equation fails.

    A table tells the product of its update with the direction. So it shows one only where it has told this
    product before: in a round of which it stated, and whose direction it recomputed before that.
    """
    entry = manifest.entry(ask.round)
    if settler.name not in entry.participants or settler.state.get("statement") is None:
        raise RefusedError("has not stated on this round", stage="table", member=settler.name)
    _refuse_if_it_holds(settler, manifest, entry, settler.statements_in(ask, manifest), ask)
    client, update = settler.member.summed(settler.state, entry.round)
    if isinstance(client, PlainClient):
        raise RefusedError("has no masks that could prove anything", stage="table", member=settler.name)
    encoding, _ = scheduled_encoding(settler.config, manifest.coordinates, client.setting.members, update[3])
    g = ask.array("g", "<i4", encoding.words)
    if direction_hash(g) != entry.g:
        raise BindingError("a direction that is not the manifest's", stage="table", member=settler.name)
    payload = client.masked_again(as_array(update[0], "<f4"))
    body = table_body(settler.run, manifest.digest, entry.round, client.project(g, payload))
    settler.state.put(file_name(entry.round, "client"), client)
    settler.state.put(file_name(entry.round, "table"), canonical(body))
    return pack([canonical(body), settler.member.sign("table", body), bytes(payload)])


def _refuse_if_it_holds(
    settler: Settler, manifest: Manifest, entry: Entry, statements: Mapping[str, Statement], ask: Ask
) -> None:
    """Raise unless the equation fails: as statements show or, if they are withheld, as the server signs."""
    if settler.config.settlement.detail == "run":
        names, total, key = set(manifest.members), manifest.product, ALL
    else:
        names, total, key = set(entry.participants), entry.product, str(entry.round)
    if settler.config.scoring.visibility != "all":
        names, said = {settler.name}, whole_number(ask.get("sum", str))
    if not names <= set(statements):
        raise RefusedError(
            "was not shown everybody's statement, so nobody can be named", stage="table", member=settler.name
        )
    if settler.config.scoring.visibility == "all":
        said = sum(statements[name].rounds[key] for name in names)
    if said == total:
        raise RefusedError("the equation holds, so nobody lied", stage="table", member=settler.name)


def pairs_answer(settler: Settler, manifest: Manifest, ask: Ask) -> bytes:
    """Return the keys of pairs whose other end signed another number; write down first what is opened."""
    entry = manifest.entry(ask.round)
    own = settler.state.get(file_name(entry.round, "table"))
    if own is None:
        raise BindingError("has told nothing of its masks", stage="pairs", member=settler.name)
    where = (settler.run, manifest.digest, entry.round)
    ours = table_of(settler.name, parsed(bytes(own), "pairs"), *where)
    client, _ = settler.member.summed(settler.state, entry.round)
    assert not isinstance(client, PlainClient)  # it has told of its masks
    opened = []
    for peer, shown in sorted(ask.get("tables", dict).items()):
        match shown:
            case [bytes(text), bytes(signature)]:
                body = parsed(text, "pairs", table_limit(client.setting.members))
                if not settler.is_signed(peer, "table", body, signature):
                    raise BindingError("did not sign this table", stage="pairs", member=peer)
                theirs = table_of(peer, body, *where)
                opened.append([peer, client.open_pair(peer, ours, theirs)])
            case _:
                raise MessageError("not a signed table", stage="pairs", member=settler.name)
    settler.state.put(file_name(entry.round, "client"), client)
    return pack(opened)


# ---------------------------------------------------------------------------------------------- the server


def named(clearing: Clearing, settled: Settled, failed: Sequence[Equation]) -> Settled:
    """Return the settlement with what masks prove about the equations that fail.

    Who does not show its masks is silent there, and is asked again whenever this is called again. The
    settlement is not final until it answers, or t members close it without.
    """
    values = {key: dict(each) for key, each in settled.values.items()}
    liars = {key: dict(each) for key, each in settled.named.items()}
    silent = dict(settled.silent)
    manifest = settled.manifest
    whole_run = failed[0].round is None
    numbers = [entry.round for entry in manifest.rounds] if whole_run else [one.round for one in failed]
    for number in numbers:
        assert number is not None
        if number in liars and not silent.get(number):
            continue
        entry = manifest.entry(number)
        stated = {}
        if not whole_run:
            stated = {name: settled.statements[name].rounds[str(number)] for name in entry.participants}
        verdict, evidence = _Naming(clearing, manifest, entry, stated).verdict()
        values[number] = {name: value for name, value in verdict.values.items() if value is not None}
        liars[number] = {name: str(why) for name, why in verdict.named.items()}
        silent[number] = silent_in(verdict)
        _record(clearing, manifest, number, liars[number], values[number], silent[number], evidence)
    found = replace(settled, values=values, named=liars, silent=silent)
    if whole_run:
        liars[WHOLE_RUN] = wrong = found.lies_over_run
        _record(clearing, manifest, WHOLE_RUN, wrong, {}, (), {})
        found = replace(found, named=liars)
    for number, each in liars.items():
        where = f"in round {number}" if number else "in the run"
        for name, why in each.items():
            clearing.coordinator.note(f"{name} lied {where} ({why}), as the masks of the round prove")
    return found


def silent_in(verdict: Verdict) -> tuple[str, ...]:
    """Return who has not shown what would prove its product: its table, its words, the key of a dispute.

    In a small sum nobody may open a key. Who disputes with one member only, who disputes with several, is
    not to suffer from that.
    """
    disputes = Counter(name for pair in verdict.disputed for name in pair)
    shut = {
        name
        for pair in verdict.disputed
        for name, peer in (pair, pair[::-1])
        if disputes[name] > 1 or disputes[peer] == 1
    }
    return tuple(name for name in verdict.values if name in verdict.unproved or name in shut)


def _record(
    clearing: Clearing,
    manifest: Manifest,
    number: int,
    liars: Mapping[str, str],
    values: Mapping[str, int],
    silent: Sequence[str],
    evidence: Mapping[str, Any],
) -> None:
    body = {
        "settlement": manifest.digest,
        "round": number,
        "named": dict(liars),
        "values": {name: str(value) for name, value in values.items()},
        "silent": list(silent),
        "evidence": dict(evidence),
    }
    clearing.coordinator.recorder.state("verdict", body)


class _Naming:
    """One failed round: the server collects tables, words and opened keys."""

    def __init__(
        self, clearing: Clearing, manifest: Manifest, entry: Entry, stated: Mapping[str, int]
    ) -> None:
        self.clearing, self.manifest, self.entry, self.stated = clearing, manifest, entry, stated
        self.coordinator = clearing.coordinator
        kept = {key: value.tobytes() for key, value in clearing.archive.load("masks", entry.round).items()}
        self.g: Direction = clearing.direction(entry)
        self.setting, self.task = self._attempt(kept.get("extra", b""))
        self.evidence = evidence_in(kept)
        self.sent = self.evidence.check(self.setting, self.task).digests  # of the words in the round
        self.tables: dict[str, tuple[MaskTable, bytes, bytes]] = {}
        self.products: dict[str, int] = {}

    def _attempt(self, extra: bytes) -> tuple[Setting, Task]:
        recorder, number = self.coordinator.recorder, self.entry.round
        one = next(one for one in recorder.rounds if one.number == number)
        public = archived_weights(self.clearing.archive.load("round", number), one.scheduled)
        return attempt_of(
            recorder.agreed.setting(recorder.run, number, one.scheduled, recorder.roster),
            self.coordinator.config, self.manifest.coordinates, self.entry.m0, public, extra,
        )  # fmt: skip

    def verdict(self) -> tuple[Verdict, dict[str, Any]]:
        """Return the verdict, and the evidence for the ledger."""
        self._recall()
        self._ask_tables()
        verdict = self._judge()
        if verdict.disputed:
            self._ask_keys(verdict.disputed)
            verdict = self._judge()
        self._keep_asks(verdict)
        products = {name: str(value) for name, value in sorted(self.products.items())}
        return verdict, {**self.evidence.to_dict(), "extra": self.task.extra.hex(), "products": products}

    def _recall(self) -> None:
        """Take what members showed when they were asked before."""
        from fedmerit.secagg.naming import Evidence, product

        recorder, number = self.coordinator.recorder, self.entry.round
        for name, body, signature in recorder.signed("table"):
            if body["round"] == number:
                where = (recorder.run, self.manifest.digest, number)
                self.tables[name] = table_of(name, body, *where), canonical(body), signature
            kind = f"words-{name_hash(name)}"
            if name in self.tables and self.clearing.archive.has(kind, number):
                payload = self.clearing.archive.load(kind, number)[name].tobytes()
                self.products[name] = product(payload, self.g)
        for body in recorder.recorded("verdict"):
            if body["round"] == number:
                given = {key: body["evidence"][key] for key in self.evidence.to_dict()}
                self.evidence = replace(self.evidence, opened=Evidence.from_dict(given).opened)

    def _judge(self) -> Verdict:
        from fedmerit.secagg.naming import judge

        tables = {name: table for name, (table, _, _) in self.tables.items()}
        return judge(
            self.setting, self.task, self.g, self.evidence, tables, self.products, self.stated,
            self.entry.product,
        )  # fmt: skip

    def _ask_tables(self) -> None:
        """Ask everybody in the sum for its table and its masked words; record what they sign."""
        from fedmerit.secagg.naming import product

        number = self.entry.round
        for name, answer in self.clearing.answers("table", number, self._table_asks(self.entry.participants)):
            try:
                if len(answer) > (most := self._most()):
                    raise MessageError(
                        f"a table has at most {most} bytes, got {len(answer)}", stage="table", member=name
                    )
                match unpack(answer, "a table of masks", values=4):
                    case [bytes(text), bytes(signature), bytes(payload)]:
                        table = self._take(name, parsed(text, "table"), signature)
                        self.tables[name] = table, text, signature
                        if _digest(payload) == self.sent[name]:
                            self.products[name] = product(payload, self.g)
                            kept = {name: np.frombuffer(payload, np.uint8)}
                            self.clearing.archive.save(f"words-{name_hash(name)}", number, kept)
                        else:
                            self.coordinator.note(f"{name} sent other words than in round {number}")
            except (FedmeritError, ValueError) as error:
                self.coordinator.note(f"round {number}: refused: {error!s:.200}")

    def _table_asks(self, names: Sequence[str]) -> dict[str, Parcel]:
        """Return the requests for these members' tables."""
        if self.coordinator.config.scoring.visibility != "all":
            return {name: self._ask_alone(name) for name in names}
        shown = {"statements": self.clearing.shown_statements()}
        return dict.fromkeys(names, self.coordinator.ask("table", self.entry.round, shown, {"g": self.g}))

    def _keep_asks(self, verdict: Verdict) -> None:
        """Keep what members who are silent can still answer by hand: for their tables, else for keys."""
        silent = silent_in(verdict)
        for name, ask in self._table_asks([one for one in silent if one in verdict.unproved]).items():
            self.clearing.keep_for(name, "table", self.entry.round, ask)
        for name, ask in self._key_asks(verdict.disputed).items():
            self.clearing.keep_for(name, "pairs", self.entry.round, ask)

    def _key_asks(self, disputed: Sequence[tuple[str, str]]) -> dict[str, Parcel]:
        """Return the requests for the keys of disputed pairs, to both ends of each."""
        peers: dict[str, dict[str, list[bytes]]] = {}
        for name, peer in (ends for pair in disputed for ends in (pair, pair[::-1])):
            peers.setdefault(name, {})[peer] = list(self.tables[peer][1:])
        number = self.entry.round
        return {name: self.coordinator.ask("pairs", number, {"tables": one}) for name, one in peers.items()}

    def _ask_alone(self, name: str) -> Parcel:
        """Return the request for a table where statements are withheld: its own, and what all add up to."""
        number = self.entry.round
        key = ALL if self.coordinator.config.settlement.detail == "run" else str(number)
        stated = sum(one.rounds.get(key, 0) for one, _ in self.clearing.statements.values())
        own = {name: self.clearing.shown_statements()[name]}
        return self.coordinator.ask("table", number, {"statements": own, "sum": str(stated)}, {"g": self.g})

    def _take(self, name: str, body: Mapping[str, Any], signature: bytes) -> MaskTable:
        recorder = self.coordinator.recorder
        if not recorder.verifies(name, "table", body, signature):
            raise MessageError("did not sign its table", stage="table", member=name)
        table = table_of(name, body, recorder.run, self.manifest.digest, self.entry.round)
        if name in self.tables and self.tables[name][0] != table:
            raise MessageError("has signed another table before", stage="table", member=name)
        if not set(table.pairs) <= set(self.setting.members):
            raise MessageError("has masks with nobody else", stage="table", member=name)
        recorder.said(name, "table", body, signature)
        return table

    def _most(self) -> int:
        """Return the most bytes of a table, with the words beside it."""
        return table_limit(self.setting.members) + self.task.encoding.word_bytes * self.task.encoding.words

    def _ask_keys(self, disputed: Sequence[tuple[str, str]]) -> None:
        """Ask both ends of every disputed pair for its key."""
        number = self.entry.round
        for who, answer in self.clearing.answers("pairs", number, self._key_asks(disputed)):
            try:
                for peer, key in unpack(answer, "opened keys", values=1 + 3 * len(disputed)):
                    trial = self.evidence.with_opened(self.setting, who, peer, key)
                    trial.check(self.setting, self.task)
                    self.evidence = trial
            except (FedmeritError, ValueError, TypeError) as error:
                self.coordinator.note(f"round {number}: {who} opened no key: {error!s:.200}")


def attempt_of(
    setting: Setting,
    config: Any,
    coordinates: int,
    m0: str,
    public: Mapping[str, float] | None,
    extra: bytes,
) -> tuple[Setting, Task]:
    """Return setting and task of a settled round, as its members had them; ``m0`` is the hash of M0."""
    encoding, weights = scheduled_encoding(config, coordinates, setting.members, public)
    given = None if weights is None else tuple(weights[name] for name in setting.members)
    return setting, Task(bytes.fromhex(m0), encoding, given, extra)


def evidence_in(kept: Mapping[str, bytes]) -> Evidence:
    """Return the evidence that was archived with a round."""
    from fedmerit.secagg.naming import Evidence

    def part(kind: str) -> dict[str, bytes]:
        return {key.partition("/")[2]: value for key, value in kept.items() if key.startswith(f"{kind}/")}

    return Evidence.of(part("list"), part("seed"), part("key"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
