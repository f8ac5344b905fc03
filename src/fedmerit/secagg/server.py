"""The server of one attempt at one round. It takes the members' bytes and returns what to show them; no I/O.

It adds masked words as they arrive and keeps only the sum, never a member's words. This is code for honest
servers; it is the members who make dishonest ones fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import msgpack

from fedmerit.errors import BindingError, ShareError
from fedmerit.secagg import masks
from fedmerit.secagg.messages import (
    NOTHING_SEEN,
    Blame,
    Head,
    Masked,
    dealt_to,
    digest_of,
    open_message,
    seen_of,
    to_broadcast,
)
from fedmerit.secagg.naming import Evidence
from fedmerit.secagg.plain import PlainServer
from fedmerit.secagg.quantise import Words
from fedmerit.secagg.setting import STAGES, Setting, Task


class Server(PlainServer):
    """The server, which takes masks off the sum and judges shares and complaints."""

    def __init__(self, setting: Setting, task: Task | None = None) -> None:
        self.heads: dict[str, dict[str, Head]]  # signed and public; for the ledger
        self.broadcasts: dict[str, bytes] = {}  # what was shown after each stage; for the ledger
        self.seeds: dict[str, bytes] = {}  # of the self-masks in the sum, once there is one; for `naming`
        self.keys: dict[str, bytes] = {}  # mask keys of dealers who are not in the sum; for `naming`
        self._seen = NOTHING_SEEN  # what members sign as seen in this stage
        super().__init__(setting, task)

    def begin(self, task: Task) -> None:
        """Set what is summed. Call it before updates arrive."""
        super().begin(task)
        self._sum = np.zeros(task.encoding.words, f"u{task.encoding.word_bytes}")

    @property
    def _payload(self) -> int:
        """The size in bytes of a member's masked words; 0 before there is a task."""
        return self._task.encoding.word_bytes * self._task.encoding.words if self._task else 0

    @property
    def inputs(self) -> dict[str, str]:
        """The hashes of the masked inputs so far, by member; for the ledger."""
        return {name: head.body.words.hex() for name, head in self.heads["masked"].items()}

    @property
    def proof(self) -> bytes:
        """What naming a liar needs of this attempt, a `naming.Evidence` in msgpack."""
        assert self._task is not None
        advertised, shared, masked = (self.broadcasts[stage] for stage in STAGES[:3])
        evidence = Evidence(advertised, shared, masked, self.seeds, self.keys, self._task.extra)
        return msgpack.encode(evidence)

    # ------------------------------------------------------------------------------------------- inner parts

    def _opened(self, data: bytes | memoryview, sender: str | None) -> tuple[str, str, Head, memoryview]:
        head, payload = open_message(data, self.setting, self._payload)
        return head.stage, head.sender, head, payload

    def _take(self, stage: str, head: Head, payload: memoryview) -> None:
        if head.seen != self._seen:
            raise BindingError("answers messages that it was not shown")
        if stage == "advertise":
            channels = (masks.channel_of(head, place) for place in range(self.setting.n))
            for key in (head.body.mask, *channels):  # with one of small order, any private key raises
                masks.agree(b"\x01" * 32, key, stage="advertise", peer=head.sender)
        elif stage == "share":
            self._check_dealt(head)
        elif stage == "masked":
            self._add(head, payload)
        elif stage == "unmask":
            self._check_released(head)

    def _heads_in(self, stage: str) -> dict[str, Head]:
        """Return the heads of a stage in schedule order, as they are shown."""
        return {member: self.heads[stage][member] for member in self._heard(stage)}

    def _shown(self, stage: str, present: Sequence[str]) -> bytes:
        heads = self._heads_in(stage).values()
        self.broadcasts[stage] = to_broadcast(stage, [head.raw for head in heads])
        self._seen = seen_of(stage, heads)
        return self.broadcasts[stage]

    def _refuse_few(self, stage: str, present: Sequence[str]) -> None:
        """Raise `RoundAborted` also if the members left hold too few good shares."""
        if stage == "masked":  # complaints of members in the sum are true: false ones were refused
            for dealer, complainers in self._against().items():
                if complainers:
                    self._judge(self.heads["masked"][complainers[0]], dealer)
        super()._refuse_few(stage, present)
        if stage in ("masked", "check", "unmask"):
            masks.refuse_few_good_shares(self.setting, self._against(), present, stage=stage)

    def _against(self) -> dict[str, list[str]]:
        """Return who in the sum complained about each dealer, all in schedule order."""
        masked, members = self._heads_in("masked"), self.setting.members
        return {
            members[place]: [name for name, head in masked.items() if place in _complaints(head)]
            for place in self._places("share")
        }

    def _judge(self, complaint: Head, dealer: str) -> None:
        advertised, dealt = self._heads_in("advertise"), self._heads_in("share")
        self._blame(masks.blame_for_complaint(self.setting, complaint, dealer, advertised, dealt))

    def _blame(self, blame: Blame) -> None:
        """Keep the first blame of a member."""
        if blame.member not in (earlier.member for earlier in self.blames):
            self.blames.append(blame)

    def _places(self, stage: str) -> list[int]:
        return [place for place, member in enumerate(self.setting.members) if member in self.heads[stage]]

    def _check_dealt(self, head: Head) -> None:
        if [row.place for row in head.body.rows] != self._places("advertise"):
            raise ShareError("does not deal to exactly the members who advertised")

    def _add(self, head: Head, payload: memoryview) -> None:
        task = self._task
        if task is None:
            raise BindingError("came before the task")
        said: Masked = head.body
        if said.m0 != task.m0_hash:
            raise BindingError("trained from a different model M0")
        if said.task != task.digest:
            raise BindingError("masked for a different encoding or different weights")
        if len(payload) != self._payload or digest_of(payload) != said.words:
            raise BindingError("its words do not match the hash it signed")
        for complaint in said.complaints:
            self._check_complaint(head, complaint.place, complaint.key)
        if self.keep:
            self.keep(head.sender, payload)
        np.add(self._sum, masks.from_wire(payload, self._sum.itemsize), out=self._sum)

    def _check_complaint(self, head: Head, place: int, opened: bytes) -> None:
        """Raise if a complaint is about no dealer; blame its author and raise if it is false."""
        dealer, advertised = self.setting.members[place], self.heads["advertise"]
        if dealer not in self.heads["share"]:
            raise BindingError(f"complains about {dealer}, who dealt nothing")
        parts = (advertised[head.sender], advertised[dealer], self.heads["share"][dealer])
        if not masks.is_true(self.setting, place, opened, *parts):
            self._judge(head, dealer)
            raise ShareError(f"complains falsely about {dealer}")

    def _check_released(self, head: Head) -> None:
        members, sender = self.setting.members, head.sender
        place, bad = members.index(sender), _complaints(self.heads["masked"][sender])
        due = [dealer for dealer in self._places("share") if dealer not in bad]
        if [row.place for row in head.body.rows] != due:
            raise ShareError("does not release shares of exactly those who dealt it good ones")
        for released in head.body.rows:
            peer, kind = members[released.place], released.kind
            if kind != ("seed" if peer in self.heads["masked"] else "key"):
                raise ShareError(f"releases the wrong kind of share of {peer}")
            row, context = dealt_to(self.heads["share"][peer], place), (self.setting.session, peer, sender)
            if masks.commitment(f"{kind} share", released.share, *context) != getattr(row, kind):
                self.lied += [] if sender in self.lied else [sender]
                raise ShareError(f"released a share that {peer} did not deal it")

    def _unmasked(self, included: Sequence[str]) -> Words:
        """Remove the self-masks of members in the sum, and the pairwise masks of the other members."""
        setting, task = self.setting, self._task
        assert task is not None
        binding = task.binding(setting)
        keys, dealt = [], self._heads_in("share")
        for dealer in dealt:
            secret = self._rebuild(dealer, "seed" if dealer in included else "key")
            if dealer in included:
                self.seeds[dealer] = secret
                keys.append((masks.self_key(secret, dealer, binding), -1))
                continue
            self.keys[dealer] = secret
            masked = masks.masked_with(setting, dealer, dealt)
            peers = {peer: self.heads["advertise"][peer].body.mask for peer in included if peer in masked}
            # the sum lacks exactly the masks that the lost member would have added
            keys += masks.with_peers(setting, dealer, secret, peers, binding)
        masks.add_masks(self._sum, keys)
        return masks.narrowed(self._sum, task.encoding)

    def _rebuild(self, dealer: str, kind: Literal["key", "seed"]) -> bytes:
        at = self.setting.members.index
        shares = {
            at(holder): row.share
            for holder, head in self.heads["unmask"].items()
            for row in head.body.rows
            if row.place == at(dealer)
        }
        secret, advertised = masks.combine_shares(shares, self.setting.t), self._heads_in("advertise")
        if not masks.is_secret_of(advertised[dealer], kind, secret, self.setting.session):
            # every share is the one that was dealt, so the dealer lied
            dealt = self.heads["share"][dealer]
            self._blame(masks.blame_for_secret(self.setting, dealer, kind, shares, advertised, dealt))
            raise ShareError(
                "dealt shares of a secret that it did not commit to", stage="unmask", member=dealer
            )
        return secret


def _complaints(head: Head) -> set[int]:
    """Return the places of the dealers about whom a member complains in its masked message."""
    return {complaint.place for complaint in head.body.complaints}
