"""The stages without masks, for rehearsals: members hand over their integers, and the server adds them.

Client and server go through the same stages and sum the same integers, so every score is the same to the bit,
also where the cryptographic packages are not installed. A member between machines refuses such a run.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, MessageError, ProtocolError, RefusedError, RoundAborted, placing
from fedmerit.secagg.messages import Blame, State, decoded, dump_state, load_state
from fedmerit.secagg.quantise import Words, seed_bytes
from fedmerit.secagg.setting import STAGES, Released, Result, Setting, Task, Update, pack, update_digest

DECLINED = bytes([len(STAGES)])


class PlainClient:
    """One member of one attempt; `secagg.Client` without secrets."""

    def __init__(
        self, setting: Setting, name: str, identity: object = None, *, released: Released | None = None
    ) -> None:
        if name not in setting.members:
            raise BindingError("not scheduled in this round", stage="setting", member=name)
        self.setting, self.name = setting, name
        self.released = Released() if released is None else released
        self._update = b""  # digest
        self.stage = STAGES[0]
        self.rounding: bytes | None = None
        self.words: Words | None = None  # its integers, which are no secret here; not part of `dump`
        self.survivors: tuple[str, ...] = ()
        self.tokens: dict[str, tuple[int, bytes]] = {}  # counters of others: nobody signs any
        self.complaints: tuple[str, ...] = ()  # nothing is dealt here
        self.sent = ""  # nor masked

    def advertise(self) -> bytes:
        """Say that this member is there."""
        return self.handle(b"")

    def handle(self, broadcast: bytes) -> bytes:
        """Answer a stage that needs no update."""
        stage = self.stage
        if stage not in STAGES or stage == "masked":
            raise BindingError(f"{stage} is due", stage=stage, member=self.name)
        if stage == "check":
            self.survivors = decoded(broadcast, tuple[str, ...], "the members who are left")
        if stage == "unmask":
            self.released.add(self.setting, self._update)
        return self._say(stage)

    def masked(self, broadcast: bytes, update: Update) -> bytes:
        """Return the member's weighted update as integers."""
        task = update.task
        self.rounding = os.urandom(32) if update.seed is None else seed_bytes(update.seed)
        try:
            with placing("masked", self.name):
                task.binding(self.setting)
                weight = task.weight_of(self.setting, self.name, update.weight)
                self.words = task.encoding.encode(update.delta, weight=weight, seed=self.rounding)
                self._update = update_digest(task.m0_hash, np.asarray(update.delta))
                self.released.refuse_again(self.setting, self._update)
        except ProtocolError:
            self.stage = "stopped"
            raise
        return self._say("masked", task.digest, np.ascontiguousarray(self.words, "<u4").data)

    def decline(self) -> bytes:
        """Leave this attempt. The server learns nothing else."""
        self.stage = "stopped"
        return DECLINED

    def readable(self, broadcast: bytes) -> None:
        """Accept any bytes, because none of them are used."""

    def dump(self) -> bytes:
        """Return the client as bytes, without `Released`."""
        survivors, no = list(self.survivors), b""  # there are no secrets
        state = State(
            no, no, no, self.stage, survivors=survivors, rounding=self.rounding, update=self._update
        )
        return dump_state(self.setting, self.name, state)

    @classmethod
    def restore(cls, data: bytes, *, released: Released | None = None) -> PlainClient:
        """Return the client as it was at `dump`."""
        setting, name, state = load_state(data)
        client = cls(setting, name, released=released)
        client.stage, client.rounding, client._update = state.stage, state.rounding, state.update
        client.survivors = tuple(state.survivors)
        return client

    def _say(self, stage: str, *payload: bytes | memoryview) -> bytes:
        self.stage = (*STAGES, "done")[STAGES.index(stage) + 1]
        return b"".join([bytes([STAGES.index(stage)]), *payload])  # copies the update only once


class PlainServer:
    """The server of one attempt; its subclass `secagg.Server` also takes masks off."""

    def __init__(self, setting: Setting, task: Task | None = None) -> None:
        self.setting = setting
        self.stage = STAGES[0]  # the stage being collected; then "done" or "aborted"
        self.result: Result | None = None
        self.declined: list[str] = []
        self.blames: list[Blame] = []  # members who provably broke the protocol
        self.heads: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}  # who was heard, by stage
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
    def proof(self) -> dict[str, bytes]:
        """What naming a liar needs of this attempt: signed lists and rebuilt secrets; nothing here."""
        return {}

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

    def receive(self, data: bytes, sender: str | None = None) -> str:
        """Take a member's message and return its sender, as the transport names it."""
        assert sender is not None
        with placing(self.stage, sender):
            if not data or data[0] > len(STAGES):
                raise MessageError("not a message")
            stage, payload = (*STAGES, "decline")[data[0]], memoryview(data)[1:]
            if sender not in self.waiting:
                raise BindingError("has sent its message already, or has left")
            if stage == "decline":
                self.declined.append(sender)
                return sender
            if stage != self.stage:
                raise BindingError(f"{self.stage} is due")
            if stage == "masked":
                assert self._task is not None
                if payload[:32] != self._task.digest or len(payload) != 32 + 4 * self._task.encoding.words:
                    raise BindingError("made for a different encoding or different weights")
                np.add(self._sum, np.frombuffer(payload[32:], "<u4"), out=self._sum)
        self.heads[stage][sender] = True
        return sender

    def advance(self) -> dict[str, bytes]:
        """Close the stage; return what to send to each member, or nothing once there is a result."""
        stage, heads = self.stage, self.heads[self.stage]
        present = [member for member in self.setting.members if member in heads]
        try:
            if len(present) < (need := self.setting.need(stage)):
                raise RoundAborted(f"{len(present)} members left, {need} are needed", stage=stage)
            if stage == "masked":
                if self._task is None:
                    raise RefusedError("there is no task", stage=stage)
                self._task.refuse_small_sum(self.setting, present, stage=stage)
        except ProtocolError:
            self.stage = "aborted"
            raise
        if stage == STAGES[-1]:
            assert self._task is not None
            included = tuple(member for member in self.setting.members if member in self.heads["masked"])
            self.result, self.stage = self._task.result(self.setting, self._sum, included), "done"
            return {}
        self.stage = STAGES[STAGES.index(stage) + 1]
        return dict.fromkeys(present, pack(*present))
