"""Random settlements with liars, spoilers, silent members and a lying server: nobody honest is ever harmed.

A seed draws a federation, who lies and how, and whose messages never arrive. The rounds of a federation are
run once; then it is settled several times, each time from the same memory with other lies. What must hold
whatever was drawn is in `check`. ``FEDMERIT_SCHEDULES=10000 pytest -m long`` tries more of them.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from attacked import attacked
from fedmerit.errors import MessageError
from fedmerit.identity import SERVER
from fedmerit.protocol import clearing
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.direction import product
from fedmerit.protocol.memory import STATEMENT
from fedmerit.protocol.settlement import tables_hash
from fedmerit.protocol.witness import KINDS, Book, drawn_for
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from linear_federation import committing_falsely, false_sum, spoiling
from wire import unpack

RING = 2**64
EACH = 10
"""Settlements of one federation."""
FEW, MANY = 60, int(os.environ.get("FEDMERIT_SCHEDULES", "1500"))
STAGES = ("share", "masked", "check", "unmask", "report")


@dataclass
class Rounds:
    """What is drawn for the rounds."""

    seed: int
    members: int
    rounds: int
    lost: list[tuple[str, int, str]]
    spoilt: dict[tuple[str, int], int]  # (member, round) -> what it adds to its first word, and never states
    uncommitted: set[str]  # commit to other pair keys than they have
    false_sums: dict[int, int]  # round -> what the server adds to the first word of X

    @classmethod
    def drawn(cls, seed: int) -> Rounds:
        draw = random.Random(seed)
        members, rounds = draw.choice((4, 4, 5, 5, 6)), draw.choice((1, 1, 2))
        names = [f"client-{i}" for i in range(members)]
        lost = []
        if draw.random() < 0.4:
            who = draw.choice(names)
            lost = [(who, draw.randint(1, rounds), draw.choice(STAGES))]
        spoilt, uncommitted, false = {}, set(), {}
        if draw.random() < 0.25:
            spoilt[draw.choice(names), draw.randint(1, rounds)] = draw.choice((1, -3, 1000))
        if draw.random() < 0.15:
            uncommitted = {draw.choice(names)}
        if draw.random() < 0.25:
            false[draw.randint(1, rounds)] = draw.choice((1, -1, 5000))
        return cls(seed, members, rounds, lost, spoilt, uncommitted, false)


EXCHANGES = ("open", "agreed", "state", "draw", "drawn", "seal", "witness", "pairs")


@dataclass
class Lies:
    """What is drawn for one settlement."""

    stated: dict[str, str] = field(default_factory=dict)  # member -> what it states: +1, big, ring, another's
    tables: dict[str, str] = field(default_factory=dict)  # member -> how it lies: one, all, whole
    allies: tuple[str, ...] = ()  # two who agree on a false number of their pair
    silent: dict[str, str] = field(default_factory=dict)  # member -> the exchange it does not answer
    false_direction: bool = False
    late: bool = False  # whether everybody answers in the end

    @classmethod
    def drawn(cls, seed: int, names: tuple[str, ...]) -> Lies:
        draw = random.Random(seed)
        found = cls(late=draw.random() < 0.3, false_direction=draw.random() < 0.04)
        for name in draw.sample(names, draw.choice((0, 1, 1, 1, 2))):
            found.stated[name] = draw.choice(("+1", "+1", "big", "ring", "another"))
            if draw.random() < 0.5:
                found.tables[name] = draw.choice(("one", "all", "whole"))
        if draw.random() < 0.2:
            found.tables.setdefault(draw.choice(names), draw.choice(("one", "all")))
        if draw.random() < 0.2:
            found.allies = tuple(draw.sample(names, 2))
        if draw.random() < 0.35:
            found.silent[draw.choice(names)] = draw.choice(EXCHANGES)
        return found

    def liars(self) -> set[str]:
        return {*self.stated, *self.tables, *self.allies}


class Settling:
    """A federation whose rounds are over, and the memory from which it is settled again and again."""

    def __init__(self, home: Path, rounds: Rounds) -> None:
        self.drawn = rounds
        seed, lost = rounds.seed % 50, rounds.lost
        self.federation = federation = attacked(home, rounds.members, rounds.rounds, seed=seed, lost=lost)
        self.names = federation.names
        self.tolerated = rounds.members - federation.config.threshold
        with self._spoiling(), federation.trained():
            pass
        self.states = {name: self._state(name)._values for name in self.names}
        for values in self.states.values():
            for key, value in values.items():
                values[key] = value.dump() if isinstance(value, Client) else value
        self.words = {
            (number, name): self._words(number, name)
            for number in range(1, rounds.rounds + 1)
            for name in self.included(number)
        }
        self.archive, self.said = dict(federation.archive.kept), [*federation.coordinator.recorder.said_]

    def _state(self, name):
        return self.federation.members[name].state(self.federation.run_id)

    @contextmanager
    def _spoiling(self):
        with pytest.MonkeyPatch.context() as patch:
            spoiling(patch, self.drawn.spoilt)
            committing_falsely(patch, *((name, None) for name in self.drawn.uncommitted))
            false_sum(patch, self.drawn.false_sums)
            yield

    def _words(self, number: int, name: str):
        """What a member really brought to a sum: the integers that it masked."""
        words = self.federation.brought(name, number).copy()
        words[:1] += np.uint32(self.drawn.spoilt.get((name, number), 0) % 2**32)
        return words

    def settled(self, lies: Lies):
        """Settle from the same memory, with other lies."""
        federation, coordinator = self.federation, self.federation.coordinator
        for name in self.names:
            self._state(name)._values = dict(self.states[name])
            self._state(name).known.lineages = {}
        federation.archive.kept = dict(self.archive)
        coordinator.recorder.said_ = [*self.said]
        coordinator.refused, federation.passed = [], []
        federation.after = [Told(self, lies)]
        with self._spoiling(), pytest.MonkeyPatch.context() as patch:
            if lies.false_direction:
                real = clearing.integers
                patch.setattr(clearing, "integers", lambda *given: real(*given) + 2**20)
            found = Clearing(coordinator, coordinator.gradient, coordinator.archive).run(self.names)
            if found is not None and lies.late and not found.final:
                federation.after = [Told(self, replace(lies, silent={}))]
                found = self._late(found) or found
        return found

    def _late(self, found):
        """Let everybody answer who did not; return what the settlement comes to then."""
        federation, coordinator = self.federation, self.federation.coordinator
        asked = [*{id(one.ask): one.ask for one in federation.passed}.values()]
        for name in found.awaited:
            answers = []
            for kind in ("open", "agree", "agreed", "state") if name in found.missing else ():
                for ask in (ask for ask in asked if ask.exchange == kind):
                    if kind != "agree" or name in self.included(ask.round):
                        answer = federation.ask(name, ask)
                if kind == "state":
                    answers = [("state", ask.round, federation.after[0](name, ask, answer))]
            try:
                found = Clearing(coordinator, coordinator.gradient, coordinator.archive).late(name, *answers)
            except MessageError:  # a number that nobody can prove is no statement
                assert self.lies_of(name) == "ring"
            if found.final:
                break
        return found

    def lies_of(self, name: str) -> str | None:
        return self.federation.after[0].lies.stated.get(name)

    def too_many(self, guilty: set[str], entry) -> bool:
        """Whether so many are dishonest in a round that both ends of a dispute may keep their key shut."""
        opened = min(self.tolerated, len(entry.participants) - 3)
        return len((guilty | self.drawn.uncommitted) & {*entry.participants}) > opened

    def included(self, number):
        return self.federation.rounds[number - 1].included


class Told:
    """What arrives of members' answers: signed by them, true or not."""

    def __init__(self, settling: Settling, lies: Lies) -> None:
        self.settling, self.lies, self.said = settling, lies, {}

    def __call__(self, name, ask, answer):
        if self.lies.silent.get(name) == ask.exchange:
            return None
        return self._statement(name, answer) if ask.exchange == "state" else answer

    def _statement(self, name, answer):
        text, _, tables = unpack(answer)
        body = json.loads(text)
        lie, rounds = self.lies.stated.get(name), body["rounds"]
        self.said.setdefault(name, dict(rounds))
        if lie and rounds:
            key = next(iter(rounds))
            own = int(rounds[key])
            others = [int(one[key]) for who, one in self.said.items() if who != name and key in one]
            rounds[key] = str({
                "+1": own + 1, "big": own + 2**40, "ring": own + RING,
                "another": others[0] if others else own - 1,
            }[lie])  # fmt: skip
        if name in self.lies.allies and rounds:  # credit goes from one ally to the other
            sign = 1 if name == self.lies.allies[0] else -1
            for key in self._common(rounds):
                rounds[key] = str(int(rounds[key]) + sign * 1000)
        bodies = [self._table(name, json.loads(table)) for table, _ in tables]
        body["masks"] = tables_hash(bodies)
        other = self.settling.federation.stated(name, body, bodies)
        self.settling._state(name).put(STATEMENT, other)  # so that its author remembers its lie
        return other

    def _common(self, keys):
        for key in keys:
            if {*self.lies.allies} <= {*self.settling.included(int(key))}:
                yield key

    def _table(self, name, body):
        pairs, how, number = body["pairs"], self.lies.tables.get(name), body["round"]
        federation = self.settling.federation
        scheduled = federation.rounds[number - 1].scheduled
        agreed = federation.coordinator.recorder.agreed
        setting = agreed.setting(federation.run_id, number, scheduled, federation.roster)
        if name in self.lies.allies and {*self.lies.allies} <= {*self.settling.included(number)}:
            first, second = self.lies.allies
            peer = second if name == first else first
            if peer in pairs:
                pairs[peer] = str((int(pairs[peer]) - 1000 * masks.sign_of(setting, first, second)) % RING)
        if how in ("one", "whole") and pairs:
            peer = sorted(pairs)[number % len(pairs)]
            lie = 1  # "whole": just what makes its statement fit its table
            if how == "whole" and self.lies.stated.get(name) == "big":
                lie = 2**40
            pairs[peer] = str((int(pairs[peer]) - lie * masks.sign_of(setting, name, peer)) % RING)
        if how == "all":
            for peer in pairs:
                pairs[peer] = str((int(pairs[peer]) + 17) % RING)
        return body


def said(federation):
    """Return what was said of witnesses."""
    for kind in KINDS:
        for author, body, _ in federation.coordinator.recorder.signed(kind):
            yield author, kind, body


def pair_is_caught(federation, lies, guilty, found, entry, numbers) -> bool:
    """Raise AssertionError if two moved credit between each other, and an honest witness saw their masks."""
    if not ({*lies.allies} <= {*entry.participants} and lies.allies and found.final):
        return False
    book = Book.read(found.manifest, federation.config, said(federation))
    drawn = drawn_for(entry, book.seed, federation.config) if book.is_drawn else {}
    if not drawn or drawn[frozenset(lies.allies)] in guilty:
        return False
    for name in lies.allies:
        counts, true = numbers[name]
        assert counts in (None, true), "a pair moved credit"
    return True


def check(settling: Settling, lies: Lies, found) -> str:
    """Raise AssertionError if anybody honest is harmed, or anybody dishonest gains; return what happened."""
    drawn, federation = settling.drawn, settling.federation
    if found is None:
        assert not federation.coordinator.recorder.signed("statement") or not found
        return "unsettled"
    assert not lies.false_direction, "a false direction was settled"
    spoilers = {name for name, _ in drawn.spoilt}
    guilty = lies.liars() | spoilers
    silenced = {*lies.silent} if not lies.late else set()
    assert not ({*found.liars} - {SERVER}) - guilty, f"honest and named: {found.named}"
    assert found.final == (not found.awaited)
    what = Counter()
    for entry in found.manifest.rounds:
        g = federation.archive.load("direction", entry.round)["g"]
        true = {name: product(settling.words[entry.round, name], g) for name in entry.participants}
        named, silent = found.named.get(entry.round, {}), found.silent.get(entry.round, ())
        assert SERVER not in named or entry.round in drawn.false_sums, "the server is named, and X is true"
        honest = {*entry.participants} - guilty
        many = settling.too_many(guilty, entry)
        if not many:
            assert not {*silent} & honest - silenced, f"honest and silent: {silent}"
        values = {name: found.value(entry, name) for name in entry.participants}
        for name in honest:
            if values[name] is None:
                assert name in found.missing, f"{name} lost its integer in round {entry.round}"
                assert name in silenced or many
            else:
                assert values[name] == true[name], f"{name} has another integer in round {entry.round}"
        numbers = {name: (values[name], true[name]) for name in true}
        what += Counter(
            {"pair": 1} if pair_is_caught(federation, lies, guilty, found, entry, numbers) else {}
        )
        (equation,) = [one for one in found.equations if one.round == entry.round]
        coalition = {*entry.participants} & guilty
        if not found.awaited and None not in values.values():
            total = sum(true[n] for n in coalition)
            if equation.holds and SERVER not in named:  # a server may take from X what a spoiler added
                total = entry.product - sum(true[n] for n in honest)
            assert sum(values[n] for n in coalition) == total, "a coalition gained"
        if equation.missing:
            what["missing"] += 1
        elif equation.holds:
            assert not {*named} - coalition - {SERVER}
            what["holds"] += 1
        else:
            assert named or silent, "the equation fails and nobody is named or silent"
            if not silent:
                assert {*named} & (coalition | {SERVER})
                assert all(values[name] == true[name] for name in honest)
            if entry.round in drawn.false_sums and not silent:
                assert SERVER in named, "X is false, everybody answered, and the server is not named"
            what["server" if SERVER in named else "named" if named else "silent"] += 1
        for name in coalition:  # alone, it gains nothing, even if it says nothing more
            alone = coalition == {name} and not equation.missing and not silent
            if alone and not equation.holds:
                assert values[name] in (None, true[name]), f"{name} gained alone"
    return "+".join(sorted(what)) or "nothing"


def schedules(tmp_path, first: int, count: int) -> Counter:
    """Try so many schedules; return what happened how often."""
    seen: Counter = Counter()
    for seed in range(first, first + count, EACH):
        settling = Settling(tmp_path / str(seed), Rounds.drawn(seed))
        if all(one.aborted for one in settling.federation.rounds):
            seen["aborted"] += EACH
            continue
        for at in range(seed, min(seed + EACH, first + count)):
            lies = Lies.drawn(at, settling.names)
            try:
                seen[check(settling, lies, settling.settled(lies))] += 1
            except AssertionError as error:
                raise AssertionError(f"schedule {at}: {error}\n{settling.drawn}\n{lies}") from error
    return seen


def test_whatever_is_drawn_nobody_honest_is_harmed(tmp_path):
    seen = schedules(tmp_path, 0, FEW)
    happened = {what for each in seen for what in each.split("+")}
    assert {"holds", "named", "silent", "missing", "pair"} <= happened


@pytest.mark.long
def test_whatever_else_is_drawn_nobody_honest_is_harmed(tmp_path):
    seen = schedules(tmp_path, 10_000, MANY)
    assert seen.total() == MANY
    assert seen["unsettled"] < MANY / 4  # else it says nothing about settlements
