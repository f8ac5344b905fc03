"""A member and the server of an attempt, whose stages they go through without masks, for rehearsals.

`secagg.Client` and `secagg.Server` add what masks need. With or without them the same integers are summed, so
every score is the same to the bit, also where the cryptographic packages are not installed. A member between
machines refuses a run without masks.

Between messages a client can be saved (`dump`, `restore`). A dump holds the round's secrets: write it, and
`Released`, BEFORE you send the message that the client has just made, and never restore an older one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from msgspec import MsgspecError, Struct, field, msgpack

from fedmerit.errors import (
    BindingError,
    FedmeritError,
    MessageError,
    ProtocolError,
    RefusedError,
    RoundAborted,
    placing,
)
from fedmerit.secagg.messages import DECLINE, NOTHING_SEEN, Blame, decoded
from fedmerit.secagg.quantise import Words, seed_bytes
from fedmerit.secagg.setting import STAGES, Released, Result, Setting, Task, Update, pack, update_digest

DECLINED: Final = bytes([len(STAGES)])
STATE: Final = "fedmerit secagg client 1"


class State(Struct):
    """The round's secrets, drawn from the operating system, and what was said and seen so far."""

    channel: bytes = b""  # private X25519 keys that encrypt shares follow from it, one per peer; till unmask
    mask: bytes = b""  # X25519 private key of the pairwise masks; dealt in shares
    seed: bytes = b""  # of the self-mask; dealt in shares
    stage: str = STAGES[0]
    stopped: str = ""
    seen: bytes = NOTHING_SEEN  # digest of the last list the server showed
    said: bytes = b""  # digest of our last head
    keys: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)  # mask key, channel key towards us
    lists: dict[str, bytes] = field(default_factory=dict)  # those of advertise and share, until the check
    dealers: list[str] = field(default_factory=list)  # members who dealt shares
    pairs: list[str] = field(default_factory=list)  # those of them with whom we have a mask
    shares: dict[str, list[bytes]] = field(default_factory=dict)
    """Good ones: key share, seed share, by dealer; only the dealers' names once one of each is released."""
    survivors: list[str] = field(default_factory=list)  # members in the sum
    against: dict[str, list[str]] = field(default_factory=dict)  # by dealer: who in the sum complained
    task: Task | None = None
    weight: float | None = None
    rounding: bytes = b""  # seed
    update: bytes = b""  # digest
    counter: int = 1  # of the member's stored state
    sent: bytes = b""  # digest of our masked words
    told: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)
    """By what a direction is for: its hash, and by peer the product of our mask, in hexadecimal."""
    opened: list[str] = field(default_factory=list)  # peers whose pair key with us we have opened
    tokens: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # greatest counter seen, its proof

    def __repr__(self) -> str:
        """Return no content: it holds secrets."""
        return f"State({self.stage!r}, ...)"


class _Saved(Struct, frozen=True, forbid_unknown_fields=True):
    """A state with the setting that it belongs to."""

    form: str
    setting: Setting
    name: str
    state: State


def load_state(data: bytes) -> tuple[Setting, str, State]:
    """Read what `PlainClient.dump` wrote: return the setting, the member's name and its state."""
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        raise MessageError("not the saved state of a client, or damaged")
    try:
        saved = msgpack.decode(body, type=_Saved)
    except (MsgspecError, ValueError, TypeError, RecursionError, FedmeritError):  # it is secret: do not quote
        raise MessageError("not the saved state of a client") from None
    if saved.form != STATE:
        raise MessageError("the saved state of another version")
    return saved.setting, saved.name, saved.state


class PlainClient:
    """One member of one attempt. Call the stages in order, each with what the server showed after the last.

    A `ProtocolError` says what a member found wrong. It stops the client for good, unless the bytes were
    unreadable or the message came out of turn; so does any other error in the middle of a stage. A stopped
    client can still `decline`.
    """

    def __init__(
        self,
        setting: Setting,
        name: str,
        identity: object = None,
        *,
        released: Released | None = None,
        _state: State | None = None,
    ) -> None:
        if name not in setting.members:
            raise BindingError("not scheduled in this round", stage="setting", member=name)
        self.setting, self.name = setting, name
        self.released = Released() if released is None else released
        self._state = State() if _state is None else _state
        self._words: Words | None = None  # its integers, where they are no secret; not part of `dump`

    def __repr__(self) -> str:
        where = f"round {self.setting.round}, attempt {self.setting.attempt}"
        return f"{type(self).__name__}({self.name!r}, {where}, {self.stage})"

    @property
    def stage(self) -> str:
        """The stage whose message is due next: one of `STAGES`, "done" or "stopped"."""
        return "stopped" if self._state.stopped else self._state.stage

    @property
    def task(self) -> Task:
        """What this member put its update into the sum of."""
        if self._state.task is None:
            raise BindingError("remembers no update")
        return self._state.task

    @property
    def weight(self) -> float:
        """The weight of its update in the sum."""
        return 1.0 if self._state.weight is None else self._state.weight

    @property
    def survivors(self) -> tuple[str, ...]:
        """The members whose inputs are in the sum; known after `check`."""
        return tuple(self._state.survivors)

    @property
    def complaints(self) -> tuple[str, ...]:
        """The dealers about whom this member complained; known after `masked`."""
        return tuple(name for name in self._state.dealers if name not in self._state.shares)

    @property
    def sent(self) -> str:
        """The hash of this member's masked words, as the ledger records it; known after `masked`."""
        return self._state.sent.hex()

    @property
    def tokens(self) -> dict[str, tuple[int, bytes]]:
        """The greatest counter that each peer proved, and the proof; keep those of `survivors` only.

        They have seen what this member knew of them before.
        """
        return dict(self._state.tokens)

    def advertise(self) -> bytes:
        """Say that this member is there."""
        return self.handle()

    def handle(self, broadcast: bytes = b"") -> bytes:
        """Answer a stage that needs no update."""
        due = self._state.stage
        with self._turn(due if due in ("advertise", "share", "unmask") else "check") as s:
            if due == "check":
                s.survivors = list(decoded(broadcast, tuple[str, ...], "the members who are left"))
            if due == "unmask":
                self.released.add(self.setting, s.update)
            return bytes([STAGES.index(due)])

    def masked(self, broadcast: bytes, update: Update) -> bytes:
        """Return the member's weighted update as integers."""
        with self._turn("masked"):
            self._words = self._rounded(update)
            payload = np.ascontiguousarray(self._words, "<u4").data
            return b"".join([bytes([STAGES.index("masked")]), update.task.digest, payload])

    def readable(self, broadcast: bytes) -> None:
        """Raise a `ProtocolError` unless these bytes can be read in the stage masked; before training."""

    def decline(self) -> bytes:
        """Leave this attempt. The server learns nothing else."""
        self._state.stopped = self._state.stopped or "declined"
        return DECLINED

    def words(self, delta: npt.NDArray[np.floating[Any]]) -> Words:
        """Return the integers that this member put into the sum, given its update once more."""
        task, s = self.task, self._state
        if self._words is not None:
            return self._words
        return task.encoding.encode(delta, weight=s.weight, seed=s.rounding)

    def dump(self) -> bytes:
        """Return the client as bytes, without the identity key and `Released`.

        The bytes are secret: keep them in a file that nobody else can read. Their checksum shows damage, not
        tampering.
        """
        body = msgpack.encode(_Saved(STATE, self.setting, self.name, self._state))
        return hashlib.sha256(body).digest() + body

    @classmethod
    def restore(
        cls, data: bytes, identity: Any = None, *, released: Released | None = None, counter: int = 0
    ) -> Self:
        """Return the client as it was at `dump`; ``counter`` is that of its state now, if any."""
        setting, name, state = load_state(data)
        state.counter = counter or state.counter
        return cls(setting, name, identity, released=released, _state=state)

    @contextmanager
    def _turn(self, stage: str) -> Iterator[State]:
        """Check that a stage is due, move on after it, and stop for good if it fails.

        If a client was rolled back, it could otherwise put two updates under the same masks, or sign two
        lists: so what it passed is also in `released`.
        """
        s, passed = self._state, ("stage", self.setting.session, stage, self.name)
        if s.stopped:
            raise RefusedError(f"has stopped: {s.stopped}", stage=stage, member=self.name)
        if s.stage != stage:
            raise BindingError(f"{s.stage} is due, not {stage}", stage=stage, member=self.name)
        try:
            with placing(stage, self.name):
                if self.released.remembers(*passed):
                    raise RefusedError("has done this before in this attempt")
                yield s
        except ProtocolError as error:
            if not isinstance(error, MessageError):
                s.stopped = str(error)
            raise
        except BaseException as error:  # half done: `seen` may have changed, and no message was made
            s.stopped = f"failed on its own side in stage {stage}: {type(error).__name__}"
            raise
        if stage in ("masked", "check", "unmask"):
            self.released.remember(*passed)
        s.stage = (*STAGES, "done")[STAGES.index(stage) + 1]

    def _rounded(self, update: Update) -> Words:
        """Return the integers of an update; refuse one that must not be summed again."""
        s, task = self._state, update.task
        task.binding(self.setting)
        s.task, s.weight = task, task.weight_of(self.name, update.weight)
        s.rounding = os.urandom(32) if update.seed is None else seed_bytes(update.seed)
        words = task.encoding.encode(update.delta, weight=s.weight, seed=s.rounding)
        s.update = update_digest(task.m0_hash, np.asarray(update.delta))
        self.released.refuse_again(self.setting, s.update)
        self.released.same_schedule(self.setting)
        return words


class PlainServer:
    """The server of one attempt. Collect a stage's messages with `receive`, then `advance`; the last stage
    gives a `result`.

    A refused message changes nothing. Its sender counts as lost unless a good message follows in time.
    """

    def __init__(self, setting: Setting, task: Task | None = None) -> None:
        self.setting = setting
        self.stage = STAGES[0]  # the stage being collected; then "done" or "aborted"
        self.result: Result | None = None
        self.declined: list[str] = []
        self.lied: list[str] = []  # members who released a share that they were not dealt
        self.blames: list[Blame] = []  # members who provably broke the protocol
        self.heads: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}  # who was heard, by stage
        self.keep: Callable[[str, memoryview], None] | None = (
            None  # is given the masked words that are summed
        )
        self._task: Task | None = None
        self._sum: npt.NDArray[Any] = np.zeros(0, np.uint32)
        if task is not None:
            self.begin(task)

    def begin(self, task: Task) -> None:
        """Set what is summed. Call it before updates arrive."""
        if self._task is not None:
            raise BindingError("the task of an attempt is given once", stage=self.stage)
        task.binding(self.setting)
        self._task, self._sum = task, np.zeros(task.encoding.words, np.uint32)

    @property
    def inputs(self) -> dict[str, str]:
        """The hashes of masked inputs by member, for the ledger; none here, because nothing is masked."""
        return {}

    @property
    def proof(self) -> bytes:
        """What naming a liar needs of this attempt: signed lists and rebuilt secrets; nothing here."""
        return b""

    @property
    def waiting(self) -> tuple[str, ...]:
        """The members who may still send in this stage."""
        if self.stage not in STAGES:
            return ()
        at = STAGES.index(self.stage)
        able = self.heads[STAGES[at - 1]] if at else self.setting.members
        refused = (blame.member for blame in self.blames if blame.why == "complaint")
        done = {*self.heads[self.stage], *self.declined, *refused}
        return tuple(member for member in self.setting.members if member in able and member not in done)

    def receive(self, data: bytes | memoryview, sender: str | None = None) -> str:
        """Take a member's message and return its author; ``sender`` is the member the transport names."""
        with placing(self.stage, sender):
            stage, author, head, payload = self._opened(data, sender)
        with placing(stage, author):
            if sender not in (None, author):
                raise BindingError(f"signed by {author}", member=sender)
            if stage not in (self.stage, DECLINE):
                raise BindingError(f"the attempt is at {self.stage}")
            if author not in self.waiting:
                raise BindingError("has sent its message already, or has left")
            if stage == DECLINE:
                self.declined.append(author)
                return author
            self._take(stage, head, payload)
        self.heads[stage][author] = head
        return author

    def advance(self) -> dict[str, bytes]:
        """Close the stage; return what to send to each member, or nothing once there is a result."""
        stage = self.stage
        if stage not in STAGES:
            raise BindingError(f"the attempt is {stage}", stage=stage)
        present = self._heard(stage)
        try:
            self._refuse_few(stage, present)
            shown = self._shown(stage, present) if stage != STAGES[-1] else self._finish()
        except Exception:
            self.stage = "aborted"
            raise
        self.stage = (*STAGES, "done")[STAGES.index(stage) + 1]
        return dict.fromkeys(present, shown) if shown else {}

    def _opened(self, data: bytes | memoryview, sender: str | None) -> tuple[str, str, Any, memoryview]:
        """Return the stage of a message, its author, what is kept of it, and its words."""
        assert sender is not None
        if not data or data[0] > len(STAGES):
            raise MessageError("not a message")
        return (*STAGES, DECLINE)[data[0]], sender, True, memoryview(data)[1:]

    def _take(self, stage: str, head: Any, payload: memoryview) -> None:
        """Raise unless a message is good; add its words to the sum."""
        if stage == "masked":
            assert self._task is not None
            if payload[:32] != self._task.digest or len(payload) != 32 + 4 * self._task.encoding.words:
                raise BindingError("made for a different encoding or different weights")
            np.add(self._sum, np.frombuffer(payload[32:], "<u4"), out=self._sum)

    def _heard(self, stage: str) -> tuple[str, ...]:
        """Return the members who sent a message of this stage, in schedule order."""
        return tuple(member for member in self.setting.members if member in self.heads[stage])

    def _refuse_few(self, stage: str, present: Sequence[str]) -> None:
        """Raise `RoundAborted` if the members left are too few to go on."""
        if len(present) < (need := self.setting.need(stage)):
            lied = f"; lied about a share: {', '.join(self.lied)}" if self.lied else ""
            raise RoundAborted(f"{len(present)} members left, {need} are needed{lied}", stage=stage)
        if stage == "masked":
            if self._task is None:
                raise RefusedError("there is no task", stage=stage)
            self._task.refuse_small_sum(present, stage=stage)

    def _shown(self, stage: str, present: Sequence[str]) -> bytes:
        """Return what everybody who is present is shown after a stage."""
        return pack(*present)

    def _finish(self) -> bytes:
        """Set the result; nobody is shown anything."""
        assert self._task is not None
        included = self._heard("masked")
        words = self._unmasked(included)
        decoded = self._task.decode(words, included)
        self.result = Result(decoded.weighted_sum, decoded.total_weight, included, words)
        return b""

    def _unmasked(self, included: Sequence[str]) -> Words:
        """Return the sum of these members' integers."""
        return self._sum
