"""A member of one attempt at one round. It takes the server's bytes and returns its own; it does no I/O.

A client can be saved between messages (`dump`, `restore`), because over a transport each message may reach a
new process. A dump holds the round's secrets. Store it encrypted or with mode 600, write it BEFORE you send
the message that the client has just made, and never restore an older one. The same goes for `Released`, which
outlives the round.

`audit.replay` shows an auditor what a member put into the sum, given what `Client.opening` returns.
`masked_again`, `project` and `open_pair` prove, long after the round, what `naming` asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, MessageError, ProtocolError, RefusedError, RoundAborted
from fedmerit.identity import verifies
from fedmerit.secagg import masks
from fedmerit.secagg.audit import Opening
from fedmerit.secagg.messages import (
    DECLINE,
    Head,
    digest_of,
    open_broadcast,
    open_message,
    placed,
    seal,
    seen_of,
)
from fedmerit.secagg.naming import (
    RING,
    Direction,
    MaskTable,
    direction_digest,
    mask_products,
    product,
    refuse_direction,
)
from fedmerit.secagg.quantise import Words, seed_bytes
from fedmerit.secagg.setting import Setting, Task, Update, pack
from fedmerit.secagg.state import Released, State, dump_state, load_state, update_digest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["Client"]

LEAST_SHUT = 2  # masks with members of the sum that are never opened

# ---------------------------------------------------------------------------------------------- the member


class Client:
    """One member. Call the stages in order, each with the list of heads the server showed after the last.

    A member reports whatever it finds wrong as a `ProtocolError` that names stage, member and reason. Such an
    error stops the client for good, unless the bytes were unreadable or the message came out of turn. Any
    other error in the middle of a stage, such as a lack of memory, stops it too. A stopped client can still
    `decline`. A bad share is no error: the member complains about its dealer and goes on.

    Args:
        setting: the attempt.
        name: of this member.
        identity: its private key on the roster.
        released: what it must never do again; it outlives the attempt.
        counter: a number that grows with every state this member stores, so that others notice an older one.
        peers: the counters and tokens of others as `tokens` returned them last, in any attempt.
    """

    def __init__(
        self,
        setting: Setting,
        name: str,
        identity: Ed25519PrivateKey,
        *,
        released: Released | None = None,
        counter: int = 1,
        peers: Mapping[str, tuple[int, bytes]] | None = None,
        _state: State | None = None,
    ) -> None:
        if name not in setting.members:
            raise BindingError("not scheduled in this round", stage="setting", member=name)
        if identity.public_key().public_bytes_raw() != setting.roster.key(name):
            raise BindingError("its private key is not the one on the roster", stage="setting", member=name)
        self.setting = setting
        self.name = name
        self.released = Released() if released is None else released
        self._identity = identity
        self._state = State.fresh(counter, peers or {}) if _state is None else _state
        self._readable: tuple[bytes, dict[str, Head]] = (b"", {})  # the list of dealt shares, once checked

    def __repr__(self) -> str:
        where = f"round {self.setting.round}, attempt {self.setting.attempt}"
        return f"Client({self.name!r}, {where}, {self.stage})"

    @property
    def stage(self) -> str:
        """The stage whose message is due next: one of `STAGES`, "done" or "stopped"."""
        return "stopped" if self._state.stopped else self._state.stage

    @property
    def clipped(self) -> int:
        """The number of coordinates that were cut to the bound, if the encoding clips."""
        return self._state.clipped

    @property
    def survivors(self) -> tuple[str, ...]:
        """The members whose masked inputs are in the sum; known after `check`."""
        return tuple(self._state.survivors)

    @property
    def complaints(self) -> tuple[str, ...]:
        """The dealers about whom this member complained; known after `masked`."""
        return tuple(name for name in self._state.dealers if name not in self._state.shares)

    @property
    def tokens(self) -> dict[str, tuple[int, bytes]]:
        """The greatest counter of each peer that it proved, and the proof; for later attempts. See `peers`.

        Keep those of peers in `survivors` only: they have seen what this member knew of them before.

        A counter is a peer's own signed statement, so a peer who restores an older state contradicts it.
        """
        return {name: (counter, token) for name, (counter, token) in self._state.tokens.items()}

    @property
    def rounding(self) -> bytes | None:
        """The seed that rounded the member's update; None until it has masked one."""
        return self._state.rounding

    # ------------------------------------------------------------------------------------------ the stages

    def advertise(self) -> bytes:
        """Send public keys, and commitments to the self-mask seed and the audit nonce; needs no model."""
        with self._turn("advertise") as s:
            mask, channels = masks.public(s.mask), map(self._channel_key, self.setting.members)
            body = [
                mask,
                masks.commitment("seed", s.seed, self.setting.session, self.name),
                masks.commitment("nonce", s.nonce, self.setting.session, self.name),
                b"".join(map(masks.public, channels)),
                *self._count(mask),
            ]
            return self._say("advertise", body)

    def share(self, broadcast: bytes) -> bytes:
        """Deal shares of the mask key and of the self-mask seed to every member who advertised."""
        with self._turn("share") as s:
            setting, own = self.setting, self.setting.members.index(self.name)
            heads = self._look(broadcast, "advertise")
            s.keys = {peer: [head.body[0], masks.channel_of(head, own)] for peer, head in heads.items()}
            kinds = [masks.split_secret(secret, setting.t, setting.n) for secret in (s.mask, s.seed)]
            rows = []
            for place, peer in enumerate(setting.members):
                if peer not in s.keys:
                    continue
                shares = [each[place] for each in kinds]
                # a key of small order, for the channel or for the mask, makes no secret and raises
                shared = masks.agree(self._channel_key(peer), s.keys[peer][1], stage="share", peer=peer)
                sealed = masks.seal_shares(shared, setting.session, self.name, peer, b"".join(shares))
                commitments = masks.share_commitments(setting.session, self.name, peer, shares)
                rows.append([place, sealed, *commitments, self._pair_commitment(peer)])
            return self._say("share", [rows, self._stale(heads)])

    def masked(self, broadcast: bytes, update: Update) -> bytes:
        """Quantise the weighted update and hide it under the self-mask and a mask with every dealer.

        If a dealer dealt a bad share, the message also opens this member's channel with that dealer.
        """
        with self._turn("masked") as s:
            task = update.task
            task.binding(self.setting)
            heads = self._look(broadcast, "share")
            self._refuse_stale_state(heads)
            self._take_shares(heads)
            s.task, s.weight = task, task.weight_of(self.setting, self.name, update.weight)
            s.rounding = os.urandom(32) if update.seed is None else seed_bytes(update.seed)
            encoded = task.encoding.encode(update.delta, weight=s.weight, seed=s.rounding)
            s.update = update_digest(task.m0_hash, np.asarray(update.delta))
            self.released.refuse_again(self.setting, s.update, stage="masked", member=self.name)
            self.released.same_schedule(self.setting, stage="masked", member=self.name)
            s.clipped = encoded.clipped
            s.pairs = list(masks.masked_with(self.setting, self.name, heads))
            payload = self._payload(task, encoded.words)
            del encoded  # with words of 8 bytes, a vector that nobody needs any more
            complaints = [
                [place, self._channel_key(dealer)]
                for place, dealer in enumerate(self.setting.members)
                if dealer in self.complaints
            ]
            s.sent = digest_of(payload)
            body = [task.digest, task.m0_hash, s.sent, complaints, *self._count(s.sent)]
            return self._say("masked", body, payload)

    def check(self, broadcast: bytes) -> bytes:
        """Sign the list of masked inputs if all of them belong to the same task and the same shares."""
        with self._turn("check"):
            self._agree(broadcast)
            return self._say("check", [])

    def unmask(self, broadcast: bytes) -> bytes:
        """Release one share per peer: of its self-mask seed if it is in the sum, of its mask key if not.

        The list that this member signed decides which of the two, and t members signed the same list. The
        server has no say, so it cannot ask for both. Without the check, no other member has confirmed the
        list. Nothing is released unless t members are left who hold good shares of every dealer.
        """
        with self._turn("unmask") as s:
            if not self.setting.checked:
                self._agree(broadcast)
            signed = self._look(broadcast, "check") if self.setting.checked else {}
            for peer in signed:
                if peer not in s.survivors:
                    raise BindingError("signed a sum that it is not in", stage="check", member=peer)
            masks.refuse_few_good_shares(self.setting, s.against, signed or s.survivors, stage="unmask")
            self.released.refuse_again(self.setting, s.update, stage="unmask", member=self.name)
            rows = []
            for place, peer in enumerate(self.setting.members):
                if peer in s.shares:
                    kind = "seed" if peer in s.survivors else "key"
                    rows.append([place, kind, s.shares[peer][kind == "seed"]])
            self.released.add(self.setting, s.update)
            # what remains is kept until a settlement: t members must not be able to rebuild others' secrets
            s.shares, s.channel = {dealer: [] for dealer in s.shares}, b""
            return self._say("unmask", rows)

    def readable(self, broadcast: bytes) -> None:
        """Raise a `ProtocolError` unless these bytes are a valid list of dealt shares; before training."""
        self._readable = broadcast, open_broadcast(broadcast, self.setting, "share")

    def sent(self, message: bytes) -> str:
        """Return the hash of the masked words in one of this member's messages, as the ledger records it."""
        return bytes(open_message(message, self.setting, len(message))[0].body[2]).hex()

    def decline(self) -> bytes:
        """Leave this attempt. The server learns nothing else."""
        self._state.stopped = self._state.stopped or "declined"
        return self._seal(DECLINE, [])[0]

    def handle(self, broadcast: bytes | None = None, update: Update | None = None) -> bytes:
        """Answer what the server sent last. Only the masked stage needs the update."""
        due = self._state.stage
        if self._state.stopped:
            raise RefusedError(f"has stopped: {self._state.stopped}", stage=due, member=self.name)
        if due == "advertise":
            return self.advertise()
        if broadcast is None:
            raise BindingError("expected a list of heads to answer, got none", stage=due, member=self.name)
        if due == "masked":
            if update is None:
                raise BindingError("needs the update", stage="masked", member=self.name)
            return self.masked(broadcast, update)
        answer = {"share": self.share, "check": self.check}.get(due, self.unmask)
        return answer(broadcast)

    # ------------------------------------------------------------------------------ after and between rounds

    def opening(self) -> Opening:
        """Return the secrets from which an auditor, who must not be the server, rebuilds the masked words."""
        s = self._state
        if s.task is None or s.rounding is None:
            raise BindingError(
                "has masked nothing, so there is nothing to open", stage=self.stage, member=self.name
            )
        return Opening(self.name, s.mask, s.seed, s.rounding, s.weight)

    def masked_again(self, delta: npt.NDArray[np.floating[Any]]) -> memoryview:
        """Return the masked words that this member sent, bit for bit, from its update.

        Raises:
            BindingError: this is not the update that it masked.
        """
        s, task = self._masked()
        try:
            words = task.encoding.encode(delta, weight=s.weight, seed=s.rounding or b"").words
        except ProtocolError as error:
            raise placed(error, "naming", self.name) from None
        payload = self._payload(task, words)
        self._refuse_other_words(payload)
        return payload

    def project(self, direction: Direction, payload: bytes | memoryview) -> MaskTable:
        """Return the products of this member's masks and of its masked words with a public direction.

        It answers one direction in an attempt: each tells one more number about its update. Store the client
        before you send the table.

        Args:
            direction: whole numbers, one for each word, and 0 for a secret weight.
            payload: what `masked_again` returned.

        Raises:
            BindingError: the direction has another form, or these are not the words that it sent.
            RefusedError: words of 4 bytes, another direction than before, or one that tells a secret weight.
        """
        s, task = self._masked()
        refuse_direction(task.encoding, direction, member=self.name)
        self._refuse_other_words(payload)
        digest = direction_digest(direction)
        if s.direction not in (b"", digest):
            raise RefusedError("has answered another direction", stage="naming", member=self.name)
        binding = task.binding(self.setting)
        streams = {peer: masks.stream_key(self._pair_key(peer), binding) for peer in s.pairs}
        s.direction, s.products = digest, mask_products(streams, direction)
        return MaskTable(self.name, dict(s.products), product(payload, direction))

    def open_pair(self, peer: str, ours: MaskTable, theirs: MaskTable) -> bytes:
        """Return the key of the mask with a peer who signed another product of it than this member did.

        Check signature, session and direction of the peer's table before, and store the client before you
        send the key. Self-masks are open by then, so two masks with members of the sum must stay shut:
        otherwise a server whose friends dispute everything would unmask this member.

        Raises:
            RefusedError: the two do not differ, or too few masks would remain.
        """
        s, _ = self._masked()
        if ours.member != self.name or dict(ours.pairs) != s.products or not s.direction:
            raise RefusedError("its table is not the one it told", stage="naming", member=self.name)
        if theirs.member != peer or peer not in s.pairs or peer not in s.survivors:
            raise RefusedError(f"has no mask with {peer} in the sum", stage="naming", member=self.name)
        said = theirs.pairs.get(self.name)
        if type(said) is not int or not 0 <= said < RING or said == ours.pairs[peer]:
            raise RefusedError(f"{peer} signed no other product", stage="naming", member=self.name)
        opened = {*s.opened, peer}
        left = [other for other in s.pairs if other in s.survivors and other not in opened]
        if peer not in s.opened and len(left) < LEAST_SHUT:
            raise RefusedError(
                f"{len(left)} masks with members of the sum would remain, {LEAST_SHUT} are needed",
                stage="naming",
                member=self.name,
            )
        s.opened = sorted(opened)
        return self._pair_key(peer)

    @property
    def nonce(self) -> bytes:
        """The nonce that `advertise` committed to, for drawing who is audited; revealed after all reports."""
        return self._state.nonce

    def forget(self) -> None:
        """Delete the round's secrets. Call it once no audit can ask for them."""
        self._state = State.forgotten(self._state.stage)

    def dump(self) -> bytes:
        """Return the client as bytes, without the identity key and `Released`. The bytes are secret."""
        return dump_state(self.setting, self.name, self._state)

    @classmethod
    def restore(
        cls,
        data: bytes,
        identity: Ed25519PrivateKey,
        *,
        released: Released | None = None,
        counter: int | None = None,
    ) -> Client:
        """Return the client as it was at `dump`; ``counter`` is that of the member's state now."""
        setting, name, state = load_state(data)
        state.counter = state.counter if counter is None else counter
        return cls(setting, name, identity, released=released, _state=state)

    # ------------------------------------------------------------------------------------------- inner parts

    @contextmanager
    def _turn(self, stage: str) -> Iterator[State]:
        """Check that a stage is due, move on after it, and stop for good if it fails."""
        s = self._state
        if s.stopped:
            raise RefusedError(f"has stopped: {s.stopped}", stage=stage, member=self.name)
        if s.stage != stage:
            raise BindingError(f"{s.stage} is due, not {stage}", stage=stage, member=self.name)
        try:
            self.released.once(self.setting, stage, self.name)
            yield s
        except ProtocolError as error:
            found = placed(error, stage, self.name)
            if not isinstance(error, MessageError):
                s.stopped = str(found)
            raise found from None
        except BaseException as error:  # half done: `seen` may have changed, and no message was made
            s.stopped = f"failed on its own side in stage {stage}: {type(error).__name__}"
            raise
        if stage in ("masked", "check", "unmask"):
            self.released.did(self.setting, stage, self.name)
        stages = self.setting.stages
        s.stage = (*stages, "done")[stages.index(stage) + 1]

    def _look(self, broadcast: bytes, stage: str) -> dict[str, Head]:
        """Return the heads of ``stage`` if they are enough, ours is among them and all saw what we saw."""
        s, setting = self._state, self.setting
        read, heads = self._readable
        if stage != "share" or read != broadcast:
            heads = open_broadcast(broadcast, setting, stage)
        if len(heads) < setting.need(stage):
            raise RoundAborted(f"{len(heads)} members left, {setting.need(stage)} are needed", stage=stage)
        if self.name not in heads or digest_of(heads[self.name].raw) != s.said:
            raise BindingError("its own message is missing or altered", stage=stage, member=self.name)
        for peer, head in heads.items():
            if head.seen != s.seen:
                raise BindingError("was not shown the messages that we were shown", stage=stage, member=peer)
        s.seen = seen_of(stage, heads.values())
        if stage in ("advertise", "share"):
            s.lists[stage] = broadcast  # complaints are judged by them
        return heads

    def _agree(self, broadcast: bytes) -> None:
        """Accept the list of masked inputs as the sum if all of them belong to the same task and shares."""
        s = self._state
        assert s.task is not None
        heads = self._look(broadcast, "masked")
        for peer, head in heads.items():
            if peer not in s.dealers:
                raise BindingError("in the sum without having dealt shares", stage="check", member=peer)
            if head.body[1] != s.task.m0_hash:
                raise BindingError("trained from a model M0 that is not ours", stage="check", member=peer)
            if head.body[0] != s.task.digest:
                raise BindingError(
                    "masked for a different encoding or different weights", stage="check", member=peer
                )
        s.task.refuse_small_sum(self.setting, heads, stage="check")
        s.against = self._complaints_in(heads)
        masks.refuse_few_good_shares(self.setting, s.against, heads, stage="check")
        s.survivors, s.lists = list(heads), {}
        for peer, head in heads.items():  # an older copy may remember its keys, and not what it masked
            _, _, words, _, counter, signature = head.body
            newer = peer != self.name and counter >= s.tokens.get(peer, [0])[0]
            if newer and _proves(self.setting, peer, counter, words + signature):
                s.tokens[peer] = [counter, words + signature]

    def _complaints_in(self, heads: dict[str, Head]) -> dict[str, list[str]]:
        """Return who complained about each dealer; raise if a complaint is false or about no dealer."""
        s, setting = self._state, self.setting
        against: dict[str, list[str]] = {dealer: [] for dealer in s.dealers}
        if not any(head.body[3] for head in heads.values()):
            return against
        advertised = open_broadcast(s.lists["advertise"], setting, "advertise")
        dealt = open_broadcast(s.lists["share"], setting, "share")
        for peer, head in heads.items():
            for place, opened in head.body[3]:
                dealer = setting.members[place]
                if dealer not in dealt or not masks.is_true(
                    setting, place, opened, advertised[peer], advertised[dealer], dealt[dealer]
                ):
                    raise BindingError(
                        f"in the sum with a false complaint about {dealer}", stage="check", member=peer
                    )
                against[dealer].append(peer)
        return against

    def _take_shares(self, heads: dict[str, Head]) -> None:
        """Keep the good shares; `complaints` then names the dealers of the others."""
        s = self._state
        for dealer, head in heads.items():
            if dealer not in s.keys:
                raise BindingError("deals without having advertised keys", stage="share", member=dealer)
            channel, private = s.keys[dealer][1], self._channel_key(dealer)
            shares = masks.open_row(self.setting, dealer, self.name, channel, head, private)
            s.dealers.append(dealer)
            if shares is not None:
                s.shares[dealer] = shares

    def _channel_key(self, peer: str) -> bytes:
        return masks.channel_key(self._state.channel, self.setting.session, self.name, peer)

    def _pair_commitment(self, peer: str) -> bytes:
        """Return the commitment to the key of the mask with a peer; zeros in the member's own row."""
        setting = self.setting
        if peer == self.name:
            return bytes(32)
        ends = masks.in_order(setting, self.name, peer)
        return masks.pair_commitment(self._pair_key(peer, "share"), setting.session, *ends)

    def _pair_key(self, peer: str, stage: str = "naming") -> bytes:
        s = self._state
        return masks.pair_with(self.setting, self.name, s.mask, peer, s.keys[peer][0], stage=stage)

    def _payload(self, task: Task, words: Words) -> memoryview:
        """Return words under the self-mask and the masks with all peers in `pairs`, as they travel."""
        s, setting = self._state, self.setting
        peers = {peer: s.keys[peer][0] for peer in s.pairs}
        own = masks.of_member(setting, self.name, s.mask, s.seed, peers, task.binding(setting))
        return masks.payload_of(words, task.encoding, own)

    def _masked(self) -> tuple[State, Task]:
        """Return state and task if this member masked an update in this attempt and remembers it."""
        s = self._state
        if s.task is None or not s.sent:
            raise BindingError("remembers no masked update", stage="naming", member=self.name)
        return s, s.task

    def _refuse_other_words(self, payload: bytes | memoryview) -> None:
        if digest_of(payload) != self._state.sent:
            raise BindingError(
                "these are not the words that it sent: its update or state has changed",
                stage="naming",
                member=self.name,
            )

    def _count(self, what: bytes) -> list[Any]:
        """Return the counter of this member's state, and a signature that binds it to what it says now."""
        counter = self._state.counter
        signature = self._identity.sign(_counted(self.setting, self.name, counter, what))
        self.released.made(what + signature)
        return [counter, signature]

    def _stale(self, heads: dict[str, Head]) -> list[list[Any]]:
        """Remember the counters of peers; return rows with the tokens of peers that it knew before.

        A peer is told of its last token also where it advertises a greater counter: a server can make an
        older copy of its state count up before others see it, but cannot make it remember that token.
        """
        s, rows = self._state, []
        for place, peer in enumerate(self.setting.members):
            if peer == self.name or peer not in heads:
                continue
            mask, *_, counter, signature = heads[peer].body
            now = [counter, mask + signature]
            before = s.tokens.get(peer)
            if not _proves(self.setting, peer, *now) or now == before:
                continue
            if before is not None:
                rows.append([place, *before])
            if before is None or counter > before[0]:
                s.tokens[peer] = now
        return rows

    def _refuse_stale_state(self, heads: dict[str, Head]) -> None:
        """Raise if a peer shows a token of ours that we do not remember: our state is an older copy."""
        own = self.setting.members.index(self.name)
        for peer, head in heads.items():
            for place, counter, token in head.body[1]:
                if place != own or self.released.has_made(token):
                    continue
                if _proves(self.setting, self.name, counter, token):
                    raise RefusedError(
                        f"its state is an older copy: {peer} has seen state {counter} of this key, which is "
                        "not among what this state remembers. Put the newest copy of the state folder back; "
                        "if it is lost, make a new key and have it put on the roster",
                        stage="share",
                        member=self.name,
                        code="stale-state",
                    )

    def _seal(self, stage: str, body: list[Any], payload: bytes | memoryview = b"") -> tuple[bytes, bytes]:
        return seal(self.setting, self.name, self._identity, stage, self._state.seen, body, payload)

    def _say(self, stage: str, body: list[Any], payload: bytes | memoryview = b"") -> bytes:
        message, head = self._seal(stage, body, payload)
        self._state.said = digest_of(head)
        return message


def _counted(setting: Setting, name: str, counter: int, what: bytes) -> bytes:
    """Return what a member signs to prove that its state had this counter when it advertised or masked.

    It names no roster: rosters change, and a key and its state outlive that.
    """
    return pack("fedmerit state counter 1", setting.roster.key(name), counter, what)


def _proves(setting: Setting, name: str, counter: int, token: bytes) -> bool:
    signed = _counted(setting, name, counter, token[:32])
    return counter >= 1 and verifies(setting.roster.key(name), token[32:], signed)
