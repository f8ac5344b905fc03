"""A member of one attempt at one round. It takes the server's bytes and returns its own; it does no I/O.

`products`, `tell` and `open_pair` prove, long after the round, what `naming` asks for. `hand_over` and
`channel` are for the witnesses of pairs (`witness`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, RefusedError, RoundAborted, placing
from fedmerit.identity import verifies
from fedmerit.secagg import masks
from fedmerit.secagg.board import Board, packed, total
from fedmerit.secagg.masks import RING
from fedmerit.secagg.messages import (
    DECLINE,
    Advertise,
    Body,
    Check,
    Complaint,
    Dealt,
    Decline,
    Head,
    Masked,
    ReleasedShare,
    Share,
    Stale,
    Unmask,
    digest_of,
    open_broadcast,
    seal,
    seen_of,
)
from fedmerit.secagg.naming import Lines, MaskTable, mask_products, refuse_direction
from fedmerit.secagg.plain import PlainClient, State
from fedmerit.secagg.quantise import Words
from fedmerit.secagg.setting import Released, Setting, Update, pack

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


LEAST_SHUT = 2  # masks with members of the sum that are never opened


class Client(PlainClient):
    """One member. After a bad share, it complains about its dealer and goes on.

    Args:
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
        if _state is None:
            channel, mask, seed = (os.urandom(32) for _ in range(3))
            _state = State(channel, mask, seed, counter=counter, tokens=dict(peers or {}))
        super().__init__(setting, name, released=released, _state=_state)
        if identity.public_key().public_bytes_raw() != setting.roster.key(name):
            raise BindingError("its private key is not the one on the roster", stage="setting", member=name)
        self._identity = identity
        self._readable: tuple[bytes, dict[str, Head]] = (b"", {})  # the list of dealt shares, once checked

    # ------------------------------------------------------------------------------------------ the stages

    def advertise(self) -> bytes:
        """Send public keys, and a commitment to the self-mask seed; needs no model."""
        with self._turn("advertise") as s:
            mask, channels = masks.public(s.mask), map(self._channel_key, self.setting.members)
            seed = masks.commitment("seed", s.seed, self.setting.session, self.name)
            body = Advertise(mask, seed, b"".join(map(masks.public, channels)), *self._count(mask))
            return self._say("advertise", body)

    def share(self, broadcast: bytes) -> bytes:
        """Deal shares of the mask key and of the self-mask seed to every member who advertised."""
        with self._turn("share") as s:
            setting, own = self.setting, self.setting.members.index(self.name)
            heads = self._look(broadcast, "advertise")
            s.keys = {peer: (head.body.mask, masks.channel_of(head, own)) for peer, head in heads.items()}
            secrets = [masks.split_secret(secret, setting.t, setting.n) for secret in (s.mask, s.seed)]
            rows = []
            for place, (peer, *shares) in enumerate(zip(setting.members, *secrets, strict=True)):
                if peer not in s.keys:
                    continue
                # a key of small order, for the channel or for the mask, makes no secret and raises
                shared = masks.agree(self._channel_key(peer), s.keys[peer][1], stage="share", peer=peer)
                sealed = masks.seal_shares(shared, setting.session, self.name, peer, b"".join(shares))
                key, seed = masks.share_commitments(setting.session, self.name, peer, shares)
                rows.append(Dealt(place, sealed, key, seed, self._pair_commitment(peer)))
            return self._say("share", Share(tuple(rows), tuple(self._stale(heads))))

    def masked(self, broadcast: bytes, update: Update) -> bytes:
        """Quantise the weighted update and hide it under the self-mask and a mask with every dealer.

        If a dealer dealt a bad share, the message also opens this member's channel with that dealer.
        """
        with self._turn("masked") as s:
            task = update.task
            heads = self._look(broadcast, "share")
            self._refuse_stale_state(heads)
            self._take_shares(heads)
            s.pairs = list(masks.masked_with(self.setting, self.name, heads))
            payload = self._payload(self._rounded(update))
            complaints = tuple(
                Complaint(place, self._channel_key(dealer))
                for place, dealer in enumerate(self.setting.members)
                if dealer in self.complaints
            )
            s.sent = digest_of(payload)
            body = Masked(task.digest, task.m0_hash, s.sent, complaints, *self._count(s.sent))
            return self._say("masked", body, payload)

    def check(self, broadcast: bytes) -> bytes:
        """Sign the list of masked inputs if all of them belong to the same task and the same shares."""
        with self._turn("check") as s:
            task, heads = self.task, self._look(broadcast, "masked")
            for peer, head in heads.items():
                if peer not in s.dealers:
                    raise BindingError("in the sum without having dealt shares", member=peer)
                if head.body.m0 != task.m0_hash:
                    raise BindingError("trained from a model M0 that is not ours", member=peer)
                if head.body.task != task.digest:
                    raise BindingError("masked for a different encoding or different weights", member=peer)
            task.refuse_small_sum(heads, stage="check")
            s.against = self._complaints_in(heads)
            masks.refuse_few_good_shares(self.setting, s.against, heads, stage="check")
            s.survivors, s.lists = list(heads), {}
            for peer, head in heads.items():  # an older copy may remember its keys, and not what it masked
                counter, token = head.body.counter, head.body.words + head.body.signature
                newer = peer != self.name and counter >= s.tokens.get(peer, (0, b""))[0]
                if newer and _proves(self.setting, peer, counter, token):
                    s.tokens[peer] = counter, token
            return self._say("check", Check())

    def unmask(self, broadcast: bytes) -> bytes:
        """Release one share per peer: of its self-mask seed if it is in the sum, of its mask key if not.

        The list that t members signed decides which, so no server can ask for both. Nothing is released
        unless t members are left who hold good shares of every dealer.
        """
        with self._turn("unmask") as s:
            signed = self._look(broadcast, "check")
            for peer in signed:
                if peer not in s.survivors:
                    raise BindingError("signed a sum that it is not in", stage="check", member=peer)
            masks.refuse_few_good_shares(self.setting, s.against, signed, stage="unmask")
            self.released.refuse_again(self.setting, s.update)
            rows = []
            for place, peer in enumerate(self.setting.members):
                if peer in s.shares:
                    kind: Literal["key", "seed"] = "seed" if peer in s.survivors else "key"
                    rows.append(ReleasedShare(place, kind, s.shares[peer][kind == "seed"]))
            self.released.add(self.setting, s.update)
            # what remains is kept until a settlement: t members must not be able to rebuild others' secrets
            s.shares, s.channel = {dealer: [] for dealer in s.shares}, b""
            return self._say("unmask", Unmask(tuple(rows)))

    def readable(self, broadcast: bytes) -> None:
        """Raise a `ProtocolError` unless these bytes are a valid list of dealt shares; before training."""
        self._readable = broadcast, open_broadcast(broadcast, self.setting, "share")

    def decline(self) -> bytes:
        """Leave this attempt. The server learns nothing else."""
        self._state.stopped = self._state.stopped or "declined"
        return seal(self.setting, self.name, self._identity, DECLINE, self._state.seen, Decline())[0]

    def handle(self, broadcast: bytes = b"") -> bytes:
        """Answer a stage that needs no update."""
        if self._state.stage == "advertise":
            return self.advertise()
        return {"share": self.share, "unmask": self.unmask}.get(self._state.stage, self.check)(broadcast)

    # ------------------------------------------------------------------------------ after and between rounds

    def masked_again(self, delta: npt.NDArray[np.floating[Any]]) -> memoryview:
        """Return the masked words that this member sent; raise `BindingError` for a different update."""
        with placing("naming", self.name):
            payload = self._payload(self.words(delta))
            self._refuse_other_words(payload)
            return payload

    def products(
        self, direction: Lines, delta: npt.NDArray[np.floating[Any]], included: Collection[str] = ()
    ) -> tuple[dict[str, int], Words]:
        """Return the products of this member's masks with a direction, by peer, and the integers it masked.

        With members who are ``included`` in the sum, the products of a panel lack their noise. Raise
        `BindingError` for another update than was sent. Nothing is told yet (`tell`).
        """
        with placing("naming", self.name):
            refuse_direction(self.task.encoding, direction)
            self.masked_again(delta)
            keys = self._stream_keys()
            here = {peer: key for peer, key in keys.items() if peer in included}
            lost = {peer: key for peer, key in keys.items() if peer not in here}
            found = mask_products(here, direction, pairs=True) | mask_products(lost, direction)
            return {peer: found[peer] for peer in keys}, self.words(delta)

    def blurred(self, board: Board, words: Words, included: Collection[str]) -> int:
        """Return the products of these integers with a panel's directions, with the noise of all pairs."""
        parts = [board.of_words(words)]
        for peer, key in self._stream_keys().items():
            if peer in included:
                sign = masks.sign_of(self.setting, self.name, peer)
                parts.append(packed(sign * number for number in board.noise(key)))
        return total(parts, board.lanes)

    def _stream_keys(self) -> dict[str, bytes]:
        """Return the keys of this member's masks, by peer."""
        binding = self.task.binding(self.setting)
        return {peer: masks.stream_key(self._pair_key(peer), binding) for peer in self._state.pairs}

    def tell(
        self, direction: str, products: Mapping[str, int], purpose: str = "", lanes: int = 1
    ) -> MaskTable:
        """Return a table of these products to be signed; ``direction`` is the hash of theirs.

        It tells of one direction for each purpose in an attempt: every direction tells one more number about
        its update, which its owner must have told before. Store the client before you send the table.
        """
        with placing("naming", self.name):
            told = self._state.told
            if purpose in told and told[purpose][0] != direction:
                raise RefusedError("has answered a different direction")
            told[purpose] = direction, _told(products)
            return MaskTable(self.name, dict(products), lanes)

    def open_pair(self, peer: str, ours: MaskTable, theirs: MaskTable, purpose: str = "") -> bytes:
        """Return the key of the mask with a peer who signed a different product of it than this member did.

        Check signature, session and direction of the peer's table before, and store the client before you
        send the key. Self-masks are open by then, so two masks with members of the sum stay shut: otherwise
        a server whose friends dispute everything would unmask this member.
        """
        with placing("naming", self.name):
            s = self._state
            if ours.member != self.name or purpose not in s.told or _told(ours.pairs) != s.told[purpose][1]:
                raise RefusedError("its table is not the one it told")
            if theirs.member != peer or peer not in s.pairs or peer not in s.survivors:
                raise RefusedError(f"has no mask with {peer} in the sum")
            value = theirs.pairs.get(self.name)
            if type(value) is not int or not 0 <= value < RING**ours.lanes or value == ours.pairs[peer]:
                raise RefusedError(f"{peer} signed no different product")
            opened = {*s.opened, peer}
            shut = {*s.pairs} & {*s.survivors} - opened
            if peer not in s.opened and len(shut) < LEAST_SHUT:
                raise RefusedError(
                    f"{len(shut)} masks with members of the sum would remain, {LEAST_SHUT} are needed"
                )
            s.opened = sorted(opened)
            return self._pair_key(peer)

    @property
    def masked_peers(self) -> tuple[str, ...]:
        """The members of the sum with whom this member has a mask."""
        return tuple(peer for peer in self._state.pairs if peer in self._state.survivors)

    def hand_over(self, peer: str, witness: str, seed: bytes) -> tuple[bool, bytes]:
        """Return the key of the mask with a peer for its witness: whether it is open, and the bytes.

        It is sealed under a secret that the two share, unless one of them committed falsely to their mask:
        an honest member knows then that the witness is not, who would have seen the key anyway. The caller
        knows from a draw that t members signed that this is the witness.
        """
        with placing("naming", self.name):
            if peer not in self.masked_peers or witness not in {*self.survivors} - {peer, self.name}:
                raise RefusedError(f"has no mask with {peer} in the sum that {witness} could witness")
            key = self._pair_key(peer)
            if witness not in self.masked_peers:
                return True, key
            pair = masks.in_order(self.setting, self.name, peer)
            return False, masks.seal_key(self.channel(witness), self.setting, seed, self.name, pair, key)

    def channel(self, peer: str) -> bytes:
        """Return the secret that this member shares with a peer; who shows it proves what the peer sealed."""
        s = self._state
        return masks.agree(s.mask, s.keys[peer][0], stage="naming", peer=peer)

    # ------------------------------------------------------------------------------------------- inner parts

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

    def _complaints_in(self, heads: dict[str, Head]) -> dict[str, list[str]]:
        """Return who complained about each dealer; raise if a complaint is false or about no dealer."""
        s, setting = self._state, self.setting
        against: dict[str, list[str]] = {dealer: [] for dealer in s.dealers}
        if not any(head.body.complaints for head in heads.values()):
            return against
        advertised = open_broadcast(s.lists["advertise"], setting, "advertise")
        dealt = open_broadcast(s.lists["share"], setting, "share")
        for peer, head in heads.items():
            for complaint in head.body.complaints:
                place, dealer = complaint.place, setting.members[complaint.place]
                true = dealer in dealt and masks.is_true(
                    setting, place, complaint.key, advertised[peer], advertised[dealer], dealt[dealer]
                )
                if not true:
                    raise BindingError(f"in the sum with a false complaint about {dealer}", member=peer)
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

    def _payload(self, words: Words) -> memoryview:
        """Return words under the self-mask and the masks with all peers in `pairs`, as they travel."""
        s, setting, task = self._state, self.setting, self.task
        peers = {peer: s.keys[peer][0] for peer in s.pairs}
        own = masks.of_member(setting, self.name, s.mask, s.seed, peers, task.binding(setting))
        return masks.payload_of(words, task.encoding, own)

    def _refuse_other_words(self, payload: bytes | memoryview) -> None:
        if digest_of(payload) != self._state.sent:
            raise BindingError("these are not the words that it sent: its update or state has changed")

    def _count(self, subject: bytes) -> tuple[int, bytes]:
        """Return the counter of this member's state, and a signature that binds it to what it says now."""
        counter = self._state.counter
        signature = self._identity.sign(_counted(self.setting, self.name, counter, subject))
        self.released.remember("token", subject + signature)
        return counter, signature

    def _stale(self, heads: dict[str, Head]) -> list[Stale]:
        """Remember the counters of peers; return rows with the tokens of peers that it knew before.

        A peer is told of its last token also where it advertises a greater counter: a server can make an
        older copy of its state count up before others see it, but cannot make it remember that token.
        """
        s, rows = self._state, []
        for place, peer in enumerate(self.setting.members):
            if peer == self.name or peer not in heads:
                continue
            keys: Advertise = heads[peer].body
            now, before = (keys.counter, keys.mask + keys.signature), s.tokens.get(peer)
            if not _proves(self.setting, peer, *now) or now == before:
                continue
            if before is not None:
                rows.append(Stale(place, *before))
            if before is None or now[0] > before[0]:
                s.tokens[peer] = now
        return rows

    def _refuse_stale_state(self, heads: dict[str, Head]) -> None:
        """Raise if a peer shows a token of ours that we do not remember: our state is an older copy."""
        own = self.setting.members.index(self.name)
        for peer, head in heads.items():
            for row in head.body.stale:
                if row.place != own or self.released.remembers("token", row.token):
                    continue
                if _proves(self.setting, self.name, row.counter, row.token):
                    raise RefusedError(
                        f"its state is an older copy: {peer} has seen state {row.counter} of this key, which "
                        "this state does not remember. Put the newest copy of the state folder back; if it "
                        "is lost, make a new key and have it put on the roster",
                        stage="share",
                        member=self.name,
                        code="stale-state",
                    )

    def _say(self, stage: str, body: Body, payload: bytes | memoryview = b"") -> bytes:
        s = self._state
        message, head = seal(self.setting, self.name, self._identity, stage, s.seen, body, payload)
        s.said = digest_of(head)
        return message


def _told(products: Mapping[str, int]) -> dict[str, str]:
    """Return products as they are stored: those of a panel are longer than a stored number may be."""
    return {peer: hex(value) for peer, value in products.items()}


def _counted(setting: Setting, name: str, counter: int, subject: bytes) -> bytes:
    """Return what a member signs to prove that its state had this counter when it advertised or masked.

    It names no roster: rosters change, and a key and its state outlive that.
    """
    return pack("fedmerit state counter 1", setting.roster.key(name), counter, subject)


def _proves(setting: Setting, name: str, counter: int, token: bytes) -> bool:
    signed = _counted(setting, name, counter, token[:32])
    return counter >= 1 and verifies(setting.roster.key(name), token[32:], signed)
