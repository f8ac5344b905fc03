"""A whole federation in this process, with a model of 12 numbers: no torch, no Flower, no waiting.

Everything else is real: coordinator, members, masks, messages, signatures, ledger and run folder. A test of
the protocol, the ledger, `verify` or a member's state is written on it::

    federation = Federation(tmp_path, members=4, rounds=2, lost=[("client-2", 1, "masked")])
    federation.answering("report", 2, lambda answer: b"garbage")
    federation.run()
    assert federation.rounds[0].included == ("client-0", "client-1", "client-3")

Hooks see every message on its way there (`before`) and back (`after`); `telling` and `answering` make the
hooks of a server and a member that lie. `begun` and `round` go step by step, `ask` sends one message more.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.config import Config, as_toml, from_dict
from fedmerit.errors import ProtocolError
from fedmerit.identity import (
    SERVER,
    Member,
    Roster,
    canonical,
    content,
    exact,
    load_key,
    public_key,
    write_roster,
)
from fedmerit.ledger.chain import Record
from fedmerit.ledger.run import replay
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.direction import along_path
from fedmerit.protocol.hearing import clearing_of, finish
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import STATEMENT, MemoryState
from fedmerit.protocol.messages import Ask, Parcel, pack, with_more
from fedmerit.protocol.outcome import Evaluations, Round, Trained, Work
from fedmerit.protocol.settlement import agreement, countersignature, tables_hash
from fedmerit.protocol.terms import EMBEDDED, FLOWER, Agreed, cautious, roster_in
from fedmerit.secagg import masks as shares
from fedmerit.secagg.client import Client
from fedmerit.storage.member_state import MemberFiles
from fedmerit.storage.recorder import LedgerRecorder, closing
from fedmerit.storage.run_folder import Folder, FolderArchive, write
from fedmerit.verify import verify_folder
from ledgers import pool_of, terms_of
from runs import records_of, rounds_in
from wire import parts, said_in, told, unpack

SIZE = 12
STAGES = ("advertise", "share", "masked", "check", "unmask", "report")
"""Where a member can be lost: the answer of that stage never arrives, nor any later one of the round."""
LIAR = "client-1"
"""Who lies or is lied to, unless a test says otherwise."""


class Killed(BaseException):
    """The server's process ends here."""


@dataclass(frozen=True, eq=False)
class Passed:
    """One message and what came back: an answer, or the error of a member that gave none."""

    member: str
    ask: Ask
    answer: bytes | None = None
    error: ProtocolError | None = None


class Federation:
    """Members and a coordinator.

    Args:
        home: a folder for the run (``run``) and for everybody's files.
        members: their names, or how many; then they are called client-0, client-1, ...
        rounds: how many.
        seed: of keys, data, roundings and the test pool; what masks are made of is new each time.
        masks: whether updates are masked; without, it is a rehearsal, and nothing is signed.
        ledger: whether the run has a folder and a ledger; without, its rounds are remembered and not scored.
        files: whether keys and members' states are files, and every message meets a new process, as between
            machines; else they are in memory.
        lost: (member, round, stage): its answers from that stage to the end of that round never arrive.
        away: (member, round): it is not scheduled.
        beyond: members whose update lies beyond the bound.
        samples: training samples of a member; 50 where it is not named.
        weights: on the roster.
        settings: sections of the config, over those that this makes.
        terms: over the terms that this makes; None leaves one out.
        accept: the members' rule for settings.
        roster: in place of the one that this makes from its keys; the members' files are not written then.
        evaluates: whether the server can evaluate models; else the members' medians count.
    """

    def __init__(
        self,
        home: Path,
        members: int | Sequence[str] = 4,
        rounds: int = 2,
        *,
        seed: int = 0,
        masks: bool = True,
        ledger: bool = True,
        files: bool = False,
        lost: Iterable[tuple[str, int, str]] = (),
        away: Iterable[tuple[str, int]] = (),
        beyond: Iterable[str] = (),
        samples: Mapping[str, int] | None = None,
        weights: Mapping[str, float] | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        terms: Mapping[str, Any] | None = None,
        accept: Callable[[Any], None] = cautious,
        evaluates: bool = True,
        roster: Roster | None = None,
    ) -> None:
        self.home, self.seed, self.accept = home, seed, accept
        self.masks, self.ledger, self.files = masks, ledger, files
        self.names = tuple(f"client-{i}" for i in range(members)) if isinstance(members, int) else (*members,)
        self.lost = {(name, number): STAGES.index(stage) for name, number, stage in lost}
        self.away, self.beyond, self.samples = {*away}, {*beyond}, samples or {}
        self.text, self.config = self._settings(rounds, weights, settings or {})
        self.keys = {name: self._key(name) for name in (SERVER, *self.names)} if masks else {}
        self.roster = roster or self._roster(weights or {})
        slices = rounds if self.config.data.test_reveal == "per-round" else int(self.config.reports)
        settled = 32 if self.config.settles else 0
        if settled and slices and not masks:  # as a rehearsal divides its pool
            settled = 20 * slices
        drawn = data("test", 20 * slices + settled, seed)
        self.pool = pool_of(*drawn, slices + (settled > 0), key=self._secret("pool"), settled=settled)
        self.archive = MemoryArchive()
        self.terms = {**terms_of(self.text, self.roster), "evaluates": "server" if evaluates else "members"}
        self.terms |= ({} if masks else {"engine": EMBEDDED}) | dict(terms or {})
        self.terms = {key: value for key, value in self.terms.items() if value is not None}
        self.run_id = self._secret("run").hex()[:32]
        self.model = np.zeros(SIZE, np.float32)  # M0 of the round, or the last M
        self.models: list[np.ndarray] = []  # M0 of every round, and at the end the last M
        self.updates: dict[tuple[int, str], np.ndarray] = {}  # (round, member) -> its change of the model
        self.joined: set[str] = set()  # who agreed to the terms
        self.passed: list[Passed] = []  # in order
        self.reaches: Callable[[str, Ask], bool] = lambda name, ask: True  # whether the message gets there
        self.before: list[Callable[[str, Ask], Ask | None]] = []  # -> another message, or None for this one
        self.after: list[Callable[[str, Ask, bytes], bytes | None]] = []  # -> an answer; None: it is lost
        self.sent = lambda name, number, m0: m0  # the M0 that a member's train message carries
        self.extra = lambda name, number: b""  # digest of all else that the train message carries
        self.train = self.linear  # (member, round, M0) -> its change of the model
        self.evaluate: Callable[[np.ndarray, Any], dict[str, np.ndarray]] = fit
        self.slope = fit_slope  # (model, slice, positions) -> value and gradient
        self.members = {} if files else {name: self._member(name) for name in self.names}

    # ------------------------------------------------------------------------------------------------ a run

    def run(self) -> Federation:
        """Go through all rounds, and end the run."""
        with self.over():
            return self

    @contextmanager
    def begun(self) -> Iterator[Federation]:
        """Open the run folder and let everybody join; `round` and `finish` come next."""
        with self.open("run") as self.coordinator:
            yield self

    @contextmanager
    def open(self, name: str) -> Iterator[Coordinator]:
        """Give a coordinator with a folder of its own that everybody has joined; a server may have two."""
        with self._recorder(name) as recorder:
            made = self._coordinator(name, recorder)
            self._let_join(made)
            yield made

    @contextmanager
    def taken_up(self) -> Iterator[Federation]:
        """Start a server on the folder of one that died, as Flower's `settle` does; `finish` comes next."""
        key, run = self.keys[SERVER], (self.run_id, FLOWER, self.terms, self.pool.commitment)
        with Folder(self.folder, self.config, resume=True) as folder:
            begun = replay(folder.ledger)
            rounds, given = list(begun.rounds), (folder, self.config, self.roster, key)
            recorder = LedgerRecorder(*given, *run, rounds=rounds, resumed=begun)
            self.coordinator = self._coordinator("run", recorder)
            self.model = recorder.model_after(rounds[-1]) if rounds else self.models[0]
            if (cut := recorder.cut_off()) is not None:
                self.coordinator.take_up(cut, self.model)
                self.model = recorder.model_after(recorder.rounds[-1])
            self.joined.clear()
            self._let_join(self.coordinator)
            yield self

    def _coordinator(self, name: str, recorder: Any) -> Coordinator:
        evaluations = Evaluations(self.value) if self.terms["evaluates"] == "server" else None
        archive = FolderArchive(self.home / name / "archive") if self.ledger else self.archive
        return Coordinator(
            recorder, self.pool, self, evaluations,
            rehearsal=not self.masks, gradient=self.gradient, archive=archive,
        )  # fmt: skip

    def _let_join(self, made: Coordinator) -> None:
        for _, answer in self.exchange("join", dict.fromkeys(self.names, made.invitation())):
            try:
                self.joined.add(made.admit("here" if self.masks else "", answer))
            except ProtocolError as error:
                made.note(f"somebody does not take part: {error}")

    @contextmanager
    def _recorder(self, name: str) -> Iterator[Any]:
        key = self.keys.get(SERVER)
        if not self.ledger:
            yield MemoryRecorder(self.config, self.roster, self.run_id, self.terms, self.pool.commitment, key)
            return
        engine, fingerprint = (FLOWER, None) if self.masks else (EMBEDDED, "0" * 64)
        with Folder(self.home / name, self.config, text=self.text) as folder:
            recorder = LedgerRecorder(
                folder, self.config, self.roster, key, self.run_id, engine, self.terms, self.pool.commitment,
                data=fingerprint, beside=None if self.masks else partial(self._beside, folder),
            )  # fmt: skip
            if key is not None:
                write_key(folder.path / "keys" / "server.pem", key)
            recorder.begin(self.model)
            yield recorder

    def _beside(self, folder: Folder, found: Round, outcome: Any) -> tuple[str, None]:
        """Return what a rehearsal records beside a round; nothing of its members is kept to resume it."""
        return folder.save_checkpoint("members", found.number, {}), None

    def round(self, number: int, members: Sequence[str] | None = None, *, by: Coordinator | None = None):
        """Run one round from `model`, and move it; returns M, or None where the round is aborted."""
        self.models.append(self.model)
        here = [name for name in members or self.expected(number) if (name, number) not in self.away]
        model = (by or self.coordinator).round(number, self.model, here)
        self.model = self.model if model is None else model
        return model

    def finish(self) -> None:
        """End the run: all sign its last head."""
        self.models.append(self.model)
        finish(self.coordinator, self.model)

    def close(self, patch: pytest.MonkeyPatch) -> Any:
        """Close the settlement: every clock says that it is over, and all owners agree to that."""
        told = self.coordinator.recorder.recorded("settled")[-1]
        patch.setattr(time, "time", lambda: told["closes"] + 1.0)
        for member in self.members.values():
            member.without = (*told["missing"], *told["silent"])
        self.coordinator.settled = self.clearing().close(time.time())
        return self.coordinator.settled

    def clearing(self) -> Clearing:
        """Return a server's side of the settlement, as a new process makes it."""
        return clearing_of(self.coordinator, self.coordinator.gradient, self.coordinator.archive)

    @contextmanager
    def trained(self, rounds: int | None = None) -> Iterator[Federation]:
        """Go through the first so many rounds, or all; `finish` comes next."""
        with self.begun():
            for number in range(1, (rounds or self.config.training.rounds) + 1):
                self.round(number)
            yield self

    @contextmanager
    def over(self) -> Iterator[Callable[[], Clearing]]:
        """Go through the run and its settlement; give what takes the settlement up again."""
        with self.trained():
            self.finish()
            yield self.clearing

    # ------------------------------------------------------------------------------------- what came of it

    @property
    def folder(self) -> Path:
        return self.home / "run"

    @property
    def rounds(self) -> list[Round]:
        if not self.ledger:
            return self.coordinator.recorder.rounds
        return rounds_in(self.folder)

    @property
    def records(self) -> list[Record]:
        return records_of(self.folder)

    @property
    def notes(self) -> list[str]:
        """What the coordinator refused, and why."""
        return self.coordinator.refused

    def verified(self) -> list[str]:
        """What `verify` says of the run folder."""
        return list(verify_folder(self.folder))

    def heads(self, name: str) -> Path:
        """Return a member's own file of what it was shown; only with ``files``."""
        return self.home / f"{name}.pem.state" / self.run_id / "heads"

    def asked(self, name: str) -> dict[tuple[str, int], Ask]:
        """Return the last message of each exchange and round that a member got."""
        return {(one.ask.exchange, one.ask.round): one.ask for one in self.passed if one.member == name}

    def errors(self, name: str) -> list[ProtocolError]:
        """Return what a member refused, in order."""
        return [one.error for one in self.passed if one.member == name and one.error is not None]

    def refusals(self, name: str) -> list[str]:
        """Return the exchanges that a member refused, in order."""
        return [one.ask.exchange for one in self.passed if one.member == name and one.error is not None]

    # ------------------------------------------------------------------------------------------------- lies

    def telling(self, exchange: str, number: int, change: Callable[[dict[str, Any]], Any], who: str = LIAR):
        """Let the server tell one member something else in one message, and sign it all the same."""

        def lie(name: str, ask: Ask) -> Ask | None:
            if (name, ask.exchange, ask.round) != (who, exchange, number):
                return None
            body = {**said_in(ask), **ask.arrays}
            change(body)
            arrays = {key: body.pop(key) for key in ask.arrays}
            return told(ask, body, arrays)

        self.before.append(lie)

    def answering(self, exchange: str, number: int, change: Callable[[bytes], bytes], who: str = LIAR):
        """Let one member answer one message otherwise."""

        def lie(name: str, ask: Ask, answer: bytes) -> bytes:
            return change(answer) if (name, ask.exchange, ask.round) == (who, exchange, number) else answer

        self.after.append(lie)

    def resigned(
        self, change: Callable[[dict[str, Any]], Any], who: str = LIAR, kind: str = "report"
    ) -> Callable[[bytes], bytes]:
        """Return what changes a signed body in an answer, and has its author sign it all the same."""

        def lie(answer: bytes) -> bytes:
            text, _, *rest = unpack(answer)
            body = json.loads(text)
            change(body)
            return pack([canonical(body), self.keys[who].sign(content(who, kind, body)), *rest])

        return lie

    def stating(self, change: int | Callable[[dict[str, Any]], Any], who: str = LIAR, key: str | None = None):
        """Let a member state otherwise: so much more in its first round (or ``key``), or any other body."""

        def more(body: dict[str, Any]) -> None:
            at = key or next(iter(body["rounds"]))
            body["rounds"][at] = str(int(body["rounds"][at]) + change)

        signed = self.resigned(more if isinstance(change, int) else change, who, "statement")
        self.answering("state", self.config.training.rounds, self.remembered(signed, who), who)

    def remembered(self, lie: Callable[[bytes], bytes], who: str = LIAR) -> Callable[[bytes], bytes]:
        """Return a lie about a statement that its author remembers, repeats, and goes on from."""
        told: list[bytes] = []

        def remember(answer: bytes) -> bytes:
            told.extend([] if told else [lie(answer)])
            other, state = told[0], self.member(who).state(self.run_id)
            with state.held():
                state.put(STATEMENT, other)
                state.save()
            return other

        return remember

    def tabling(self, change: Callable[[dict[str, Any]], Any], who: str = LIAR, number: int = 1):
        """Let a member sign another table of its masks in a round, beside its statement."""

        def lie(answer: bytes) -> bytes:
            text, _, tables = unpack(answer)
            statement, bodies = json.loads(text), [json.loads(table) for table, _ in tables]
            for body in bodies:
                if body["round"] == number:
                    change(body)
            statement["masks"] = tables_hash(bodies)
            return self.stated(who, statement, bodies)

        self.answering("state", self.config.training.rounds, self.remembered(lie, who), who)

    def stated(self, who: str, statement: Mapping[str, Any], tables: Iterable[Mapping[str, Any]]) -> bytes:
        """Return the answer of a member that states this, and signs these tables."""
        signed = [
            [canonical(body), self.keys[who].sign(content(who, kind, body))]
            for kind, bodies in (("statement", [statement]), ("table", tables))
            for body in bodies
        ]
        return pack([*signed[0], signed[1:]])

    def tabling_along(self, change: Callable[[dict[str, Any]], Any], who: str = LIAR, number: int = 1):
        """Let a member sign another table of its masks with the direction of a block."""
        self.answering("table", number, self.resigned(change, who, "table"), who)

    def shifting(
        self, more: float = 0.03, who: str = LIAR, key: str = "2", blocks: tuple[int, int] = (0, 1)
    ) -> Federation:
        """Let a member state so much of one block in another: its parts agree with its integer."""

        def shift(body: dict[str, Any]) -> None:
            parts = [*map(float, body["blocks"][key])]
            for block, moved in zip(blocks, (more, -more), strict=True):
                parts[block] += moved
            body["blocks"][key] = [f"{part:.7g}" for part in parts]

        self.stating(shift, who)
        return self

    def disagreeing(
        self, wrong: Sequence[int], released: Sequence[int] | None = None, who: str = LIAR
    ) -> Callable[[bytes], bytes]:
        """Return what makes an agreement one with other rounds, and has its author sign it all the same."""

        def lie(answer: bytes) -> bytes:
            own = unpack(answer)[1] if released is None else [*released]
            draw = unpack(answer)[2]
            digest = self.coordinator.recorder.recorded("opening")[0]["settlement"]
            body = agreement(self.run_id, digest, wrong, own, draw)
            return pack([[*wrong], own, draw, self.keys[who].sign(content(who, "agreed", body))])

        return lie

    def dies(self, exchange: str, number: int | None = None, answered: int = 0, go: Any = None) -> Federation:
        """Let the server die at a message, once so many members have answered it; it runs until then."""
        asked: list[str] = []

        def kill(name: str, ask: Ask) -> None:
            if ask.exchange == exchange and number in (None, ask.round):
                asked.append(name)
                if len(asked) > answered:
                    raise Killed

        self.before.append(kill)
        with pytest.raises(Killed):
            (go or self.run)()
        self.before.remove(kill)
        return self

    def killed_once_saved(self, name: str, ask: Ask) -> None:
        """Let a member's process be killed at a message, when it has saved its state and not answered."""
        child = os.fork()
        if child == 0:
            save = MemberFiles.save
            MemberFiles.save = lambda state: (save(state), os.kill(os.getpid(), signal.SIGKILL))
            self.ask(name, ask)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def losing(self, *exchanges: str, who: str = LIAR) -> dict[str, bytes]:
        """Let a member's answers be lost on the way; return where the last of each exchange is kept."""
        kept: dict[str, bytes] = {}

        def lose(name: str, ask: Ask, answer: bytes) -> bytes | None:
            if name != who or ask.exchange not in exchanges:
                return answer
            kept[ask.exchange] = answer
            return None

        self.after.append(lose)
        return kept

    def ask(self, name: str, ask: Ask, *, by: str = SERVER, **change: Any) -> bytes:
        """Send one message, with changes, signed by the server; returns the member's answer or raises."""
        arrays = {key: change.pop(key, array) for key, array in ask.arrays.items()}
        changed = told(ask, {**said_in(ask), **change}, arrays)
        return self._answer(name, changed, changed.pack(self.keys[by].sign))

    # -------------------------------------------------------------------------------------------- transport

    def expected(self, number: int) -> Sequence[str]:
        return [name for name in self.names if name in self.joined]

    def exchange(self, kind: str, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        opened: dict[int, Ask] = {}
        for name, data in asks.items():
            ask = opened.get(id(data)) or opened.setdefault(id(data), Ask.unpack(data)[0])
            if not self.reaches(name, ask):
                continue
            for hook in self.before:
                if (other := hook(name, ask)) is not None:
                    ask, data = other, other.pack(self.coordinator_sign)
            try:
                answer: bytes | None = self._answer(name, ask, data)
            except ProtocolError as error:  # who refuses gives no answer
                self.passed.append(Passed(name, ask, error=error))
                continue
            answer = arrives(self.lost, name, ask, answer)
            for after in self.after:
                answer = answer if answer is None else after(name, ask, answer)
            self.passed.append(Passed(name, ask, answer))
            if answer is not None:
                yield name, answer

    def coordinator_sign(self, message: bytes) -> bytes:
        return self.keys[SERVER].sign(message) if self.masks else b""

    def member(self, name: str) -> Participant:
        """Return a member; a new one with ``files``, as in a new process."""
        return self._member(name) if self.files else self.members[name]

    def brought(self, name: str, number: int) -> np.ndarray:
        """Return the integers that a member masked in a round."""
        member = self.member(name)
        client, update = member.brought(member.state(self.run_id), number)
        return client.words(update.delta)

    def _answer(self, name: str, ask: Ask, data: Parcel) -> bytes:
        m0 = self.sent(name, ask.round, self.model)
        work = partial(self._work, name, ask.round, m0) if ask.exchange == "train" else None
        return self.member(name).answer(data, "here" if self.masks else "", work)

    def _work(self, name: str, number: int, m0: np.ndarray) -> Work:
        def train() -> Trained:
            delta = self.updates[number, name] = self.train(name, number, m0)
            return Trained(delta, self._count(name))

        return Work(m0, self.extra(name, number), train)

    # ------------------------------------------------------------------------------------------ the members

    def linear(self, name: str, number: int, m0: np.ndarray) -> np.ndarray:
        """Return one step of least squares on a member's samples but one; never twice the same."""
        x, y = data(name, self._count(name), self.seed)
        order = np.random.default_rng([number, len(y)]).permutation(len(y))[1:]
        delta = (0.2 * x[order].T @ (y - x @ m0)[order] / len(y)).astype(np.float32)
        if name in self.beyond:
            delta[0] += 9
        return delta

    def gradient(self, *path: Any) -> Any:
        return along_path(self.slope)(*path)

    def value(self, model: np.ndarray, shown: Any) -> dict[str, np.ndarray]:
        return self.evaluate(model, shown)

    def _count(self, name: str) -> int:
        return self.samples.get(name, 50)

    def _member(self, name: str) -> Participant:
        path, states = self.home / f"{name}.pem", {}
        identity = load_key(path) if self.files else self.keys.get(name)
        if self.files:
            state = partial(MemberFiles, path, identity)
        else:
            state = lambda run: states.setdefault(run, MemoryState())  # noqa: E731
        return Participant(
            name, identity, self.roster, state, lambda shape, utilities: self.value,
            accept=self.accept, seed=self.seed, rehearsal=not self.masks,
            gradients=lambda shape, utility: self.gradient,
            held_out=partial(self.held_out, name) if self.config.judged else None,
        )  # fmt: skip

    def held_out(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a judge's own samples."""
        return data(f"held-out {name}", 40, self.seed)

    def _settings(self, rounds, weights, sections):
        made: dict[str, dict[str, Any]] = {
            "partition": {"names": list(self.names)},
            "training": {"rounds": rounds, "weights": dict(weights) if weights else "uniform"},
            "scoring": {"method": "reports", "utilities": ["fit"]},
            "secure_aggregation": {"enabled": self.masks},
            "data": {} if self.masks else {"test_size": 0},
        }
        for name, section in sections.items():
            made[name] = {**made.get(name, {}), **section}
        return as_toml(made), from_dict(made)

    def _secret(self, what: str) -> bytes:
        return hashlib.sha256(f"{self.seed} {what}".encode()).digest()

    def _key(self, name: str) -> Ed25519PrivateKey:
        key = Ed25519PrivateKey.from_private_bytes(self._secret(f"key of {name}"))
        if self.files and name != SERVER:
            write_key(self.home / f"{name}.pem", key)
        return key

    def _roster(self, weights: Mapping[str, float]) -> Roster:
        if not self.masks:
            return roster_in(self.config, None)
        members = [Member(name, public_key(self.keys[name]), weights.get(name)) for name in self.names]
        roster = Roster(members, public_key(self.keys[SERVER]))
        if self.files and not (self.home / "roster.toml").exists():  # of an earlier run of these members
            write_roster(self.home / "roster.toml", roster)
        return roster


@dataclass(eq=False)
class MemoryRecorder:
    """A `protocol.coordinator.Recorder` that remembers rounds and checks signatures, and writes nothing."""

    config: Config
    roster: Roster
    run: str
    terms: Mapping[str, Any]
    commitment: Mapping[str, Any]
    key: Ed25519PrivateKey | None
    rounds: list[Round] = field(default_factory=list)
    head: str = "0" * 64
    said_: list[tuple[str, str, dict[str, Any], bytes]] = field(default_factory=list)  # with signatures

    @cached_property
    def agreed(self) -> Agreed:
        return Agreed(self.terms, self.commitment, b"" if self.key is None else public_key(self.key))

    def sign(self, message: bytes) -> bytes:
        return b"" if self.key is None else self.key.sign(message)

    def verifies(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        message = content(name, kind, body)
        return self.key is None or self.roster.verifies(name, signature, message)

    def _nothing(self, *_: Any) -> None:
        """Write nothing; the round names who is to blame."""

    schedule = masked = blame = end = _nothing

    def close(self, found: Round, model: np.ndarray, outcome: Any, utilities: Any) -> None:
        measured = utilities or {}
        found.body = {
            **closing(found, model, outcome),
            "utilities": {name: {key: exact(one) for key, one in v.items()} for name, v in measured.items()},
        }
        self.rounds.append(found)
        self.head = hashlib.sha256(f"{self.head} {found.number}".encode()).hexdigest()

    def said(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        if not self.verifies(name, kind, body, signature):
            return False
        self.said_.append((name, kind, dict(body), signature))
        return True

    def state(self, kind: str, body: Mapping[str, Any], countersigned: Any = None) -> None:
        self.said_.append((SERVER, kind, dict(body), b""))
        signed = countersignature(self.run, body) if countersigned else {}
        self.said_ += [(who, "countersigned", signed, one) for who, one in (countersigned or {}).items()]

    def signed(self, kind: str) -> Sequence[tuple[str, Mapping[str, Any], bytes]]:
        return [(name, body, signature) for name, of, body, signature in self.said_ if of == kind]

    def recorded(self, kind: str) -> Sequence[Mapping[str, Any]]:
        return [body for _, of, body, _ in self.said_ if of == kind]


class MemoryArchive:
    """A `protocol.coordinator.Archive` in memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], dict[str, np.ndarray]] = {}

    def save(self, kind: str, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        self.kept[kind, number] = {key: np.array(value) for key, value in arrays.items()}

    def load(self, kind: str, number: int) -> dict[str, np.ndarray]:
        return self.kept[kind, number]

    def has(self, kind: str, number: int) -> bool:
        return (kind, number) in self.kept

    def drop(self, kind: str, number: int) -> None:
        self.kept.pop((kind, number), None)


def write_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Write a private key as `fedmerit.identity` does."""
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, key.private_bytes(*form), mode=0o600)


def arrives(lost: Mapping[tuple[str, int], int], name: str, ask: Ask, answer: bytes) -> bytes | None:
    """Return what the server gets of a member's answer: all, nothing, or one without what it sends ahead.

    Keys and shares for a round come with the answers to check and unmask of the one before. Who is lost when
    they are due gives none then, and none when the server asks again; nor does who is lost when the sum is to
    be acknowledged, which would otherwise come with the next round.
    """
    stage = {"train": "masked"}.get(ask.exchange, ask.exchange)
    if stage in STAGES and STAGES.index(stage) >= lost.get((name, ask.round), len(STAGES)):
        return None
    unready = lost.get((name, ask.round + 1), len(STAGES)) <= 1 or (name, ask.round) in lost
    if stage in ("check", "unmask") and unready:
        return with_more(parts(answer)[0], b"")
    return answer


def false_sum(monkeypatch, more=1000):
    """Let the server tell everybody, and archive, an X that is not the sum: so much more (by round)."""
    real = Coordinator._sum

    def summed(coordinator, server, found, task, begin):
        real(coordinator, server, found, task, begin)
        number = found.number
        words = server.result.words.copy()
        words[:1] += np.uint32((more if isinstance(more, int) else more.get(number, 0)) % 2**32)
        decoded = task.decode(words, server.result.included)
        server.result = replace(server.result, words=words, weighted_sum=decoded.weighted_sum)

    monkeypatch.setattr(Coordinator, "_sum", summed)


def spoiling(monkeypatch, adds):
    """Let members add so much to the first word that they mask, by (member, round)."""
    real = Client._payload

    def spoilt(client, words):
        words = words.copy()
        words[:1] += np.uint32(adds.get((client.name, client.setting.round), 0) % 2**32)
        return real(client, words)

    monkeypatch.setattr(Client, "_payload", spoilt)


def committing_falsely(monkeypatch, *pairs):
    """Let members commit to another key than that of a pair: (member, peer), or (member, None) for all."""
    real = Client._pair_commitment

    def other(client, peer):
        false = peer != client.name and {(client.name, peer), (client.name, None)} & {*pairs}
        return bytes(range(32)) if false else real(client, peer)

    monkeypatch.setattr(Client, "_pair_commitment", other)


@contextmanager
def dealing_badly(*bad: tuple[str, int, str]) -> Iterator[None]:
    """Let members of this process deal bad shares: (dealer, round, holder)."""
    rounds: dict[bytes, int] = {}
    seal, share = shares.seal_shares, Client.share

    def noting(self: Client, broadcast: bytes) -> bytes:
        rounds[self.setting.session] = self.setting.round
        return share(self, broadcast)

    def sealing(shared: bytes, session: bytes, dealer: str, holder: str, dealt: bytes) -> bytes:
        spoilt = (dealer, rounds[session], holder) in bad
        return os.urandom(92) if spoilt else seal(shared, session, dealer, holder, dealt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "share", noting)
        patch.setattr(shares, "seal_shares", sealing)
        yield


def data(whose: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and noisy outputs of the function that all of them learn."""
    rng = np.random.default_rng([seed, *whose.encode()])
    x = rng.normal(size=(count, SIZE))
    return x, x @ np.linspace(0.1, 0.5, SIZE) + rng.normal(size=count) / 5


def fit(model: np.ndarray, shown: Any) -> dict[str, np.ndarray]:
    """Return a number in [0, 1] per sample; 1 for a perfect answer."""
    return {"fit": np.exp(-np.square(shown.x @ model - shown.y) / 4)}


def fit_slope(model: np.ndarray, shown: Any, places: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean of `fit` over some samples, and its gradient."""
    x, y = shown.x[places], shown.y[places]
    off = x @ model.astype(np.float64) - y
    value = np.exp(-np.square(off) / 4)
    return float(value.mean()), (-(off * value) / 2) @ x / len(y)
