"""The server of one attempt at one round. It takes the members' bytes and returns what to show them; no I/O.

It adds masked words as they arrive and keeps only the sum, never a member's words. This is code for honest
servers; it is the members who make dishonest ones fail.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.errors import BindingError, ConfigError, ProtocolError, RefusedError, RoundAborted, ShareError
from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import (
    DECLINE,
    NOTHING_SEEN,
    STAGES,
    Blame,
    Head,
    digest_of,
    open_message,
    placed,
    seen_of,
    to_broadcast,
)
from fedmerit.secagg.plain import PlainServer
from fedmerit.secagg.quantise import Encoding, is_number, seed_bytes, whole
from fedmerit.secagg.setting import Result, Setting, Task, Update

__all__ = ["InMemory", "Result", "Server", "run_in_memory"]


class Server(PlainServer):
    """The server. Collect a stage's messages with `receive`, then `advance`; the last stage gives a `result`.

    A refused message changes nothing. Its sender counts as lost unless a good message follows in time.
    """

    def __init__(self, setting: Setting, task: Task | None = None) -> None:
        self.lied: list[str] = []  # members who released a share that they were not dealt
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
        return {name: bytes(head.body[2]).hex() for name, head in self.heads["masked"].items()}

    @property
    def proof(self) -> dict[str, bytes]:
        """What naming a liar needs of this attempt: signed lists, rebuilt secrets, and instructions."""
        assert self._task is not None
        lists = {f"list/{stage}": self.broadcasts[stage] for stage in ("advertise", "share", "masked")}
        secrets_ = {f"seed/{name}": one for name, one in self.seeds.items()}
        secrets_ |= {f"key/{name}": one for name, one in self.keys.items()}
        return lists | secrets_ | ({"extra": self._task.extra} if self._task.extra else {})

    def receive(self, data: bytes, sender: str | None = None) -> str:
        """Take a member's message and return who signed it; ``sender`` is the member the transport names."""
        try:
            head, payload = open_message(data, self.setting, self._payload)
            if sender not in (None, head.sender):
                raise BindingError(f"signed by {head.sender}", stage=head.stage, member=sender)
            if self.stage not in STAGES:
                raise BindingError(f"the attempt is {self.stage}", stage=head.stage, member=head.sender)
            if head.stage not in (self.stage, DECLINE):
                raise BindingError(f"{self.stage} is due", stage=head.stage, member=head.sender)
            if head.sender not in self.waiting:
                raise BindingError(
                    "has sent its message already, or has left", stage=head.stage, member=head.sender
                )
            if head.stage == DECLINE:
                self.declined.append(head.sender)
                return head.sender
            if head.seen != self._seen:
                raise BindingError(
                    "answers messages that it was not shown", stage=head.stage, member=head.sender
                )
            if head.stage == "advertise":
                channels = (masks.channel_of(head, place) for place in range(self.setting.n))
                masks.refuse_small_order([head.body[0], *channels], stage="advertise", peer=head.sender)
            elif head.stage == "share":
                self._check_dealt(head)
            elif head.stage == "masked":
                self._add(head, payload)
            elif head.stage == "unmask":
                self._check_released(head)
        except ProtocolError as error:
            raise placed(error, self.stage, sender) from None
        self.heads[head.stage][head.sender] = head
        return head.sender

    def advance(self) -> dict[str, bytes]:
        """Close the stage; return what to send to each member, or nothing once there is a result."""
        if self.stage not in STAGES:
            raise BindingError(f"the attempt is {self.stage}", stage=self.stage)
        stage, heads = self.stage, self.heads[self.stage]
        if stage == "masked":
            self._blame_dealers()
        try:
            self._refuse_few(stage, heads)
        except RoundAborted:
            self.stage = "aborted"
            raise
        if stage == STAGES[-1]:
            self.stage = "aborted"  # unless what follows succeeds
            self.result = self._unmask()
            self.stage = "done"
            return {}
        present = self._shown_in(stage)
        broadcast = to_broadcast(stage, [head.raw for head in present.values()])
        self.broadcasts[stage], self._seen = broadcast, seen_of(stage, present.values())
        stages = self.setting.stages
        self.stage = stages[stages.index(stage) + 1]
        return dict.fromkeys(present, broadcast)

    # ------------------------------------------------------------------------------------------- inner parts

    def _shown_in(self, stage: str) -> dict[str, Head]:
        """Return the heads of a stage in schedule order, as they are shown."""
        heads = self.heads[stage]
        return {member: heads[member] for member in self.setting.members if member in heads}

    def _refuse_few(self, stage: str, heads: Mapping[str, Head]) -> None:
        """Raise `RoundAborted` if the members left are too few to go on, or hold too few good shares."""
        if len(heads) < self.setting.need(stage):
            lied = f"; lied about a share: {', '.join(self.lied)}" if self.lied else ""
            raise RoundAborted(
                f"{len(heads)} members left, {self.setting.need(stage)} are needed{lied}", stage=stage
            )
        if stage == "masked" and self._task is not None:
            self._task.refuse_small_sum(self.setting, heads, stage=stage)
        if stage in ("masked", "check", "unmask"):
            masks.refuse_few_good_shares(self.setting, self._against(), heads, stage=stage)

    def _against(self) -> dict[str, list[str]]:
        """Return who in the sum complained about each dealer, all in schedule order."""
        masked, members = self._shown_in("masked"), self.setting.members
        return {
            members[place]: [name for name, head in masked.items() if place in _complaints(head)]
            for place in self._places("share")
        }

    def _blame_dealers(self) -> None:
        """Blame each dealer about whom a member in the sum complained; false complaints were refused."""
        for dealer, complainers in self._against().items():
            if complainers:
                self._judge(self.heads["masked"][complainers[0]], dealer)

    def _judge(self, complaint: Head, dealer: str) -> None:
        advertised, dealt = self._shown_in("advertise"), self._shown_in("share")
        self._blame(masks.blame_for_complaint(self.setting, complaint, dealer, advertised, dealt))

    def _blame(self, blame: Blame) -> None:
        """Keep the first blame of a member."""
        if blame.member not in (one.member for one in self.blames):
            self.blames.append(blame)

    def _places(self, stage: str) -> list[int]:
        return [place for place, member in enumerate(self.setting.members) if member in self.heads[stage]]

    def _check_dealt(self, head: Head) -> None:
        if [row[0] for row in head.body[0]] != self._places("advertise"):
            raise ShareError(
                "does not deal to exactly the members who advertised", stage="share", member=head.sender
            )

    def _add(self, head: Head, payload: memoryview) -> None:
        task, sender = self._task, head.sender
        if task is None:
            raise BindingError("came before the task", stage="masked", member=sender)
        digest, m0_hash, words_digest, complaints, *_ = head.body
        if m0_hash != task.m0_hash:
            raise BindingError("trained from a different model M0", stage="masked", member=sender)
        if digest != task.digest:
            raise BindingError(
                "masked for a different encoding or different weights", stage="masked", member=sender
            )
        if len(payload) != self._payload or digest_of(payload) != words_digest:
            raise BindingError("its words do not match the hash it signed", stage="masked", member=sender)
        for place, opened in complaints:
            self._check_complaint(head, place, opened)
        masks.add_payload(self._sum, payload)

    def _check_complaint(self, head: Head, place: int, opened: bytes) -> None:
        """Raise if a complaint is about no dealer; blame its author and raise if it is false."""
        dealer, advertised = self.setting.members[place], self.heads["advertise"]
        if dealer not in self.heads["share"]:
            raise BindingError(
                f"complains about {dealer}, who dealt nothing", stage="masked", member=head.sender
            )
        parts = (advertised[head.sender], advertised[dealer], self.heads["share"][dealer])
        if not masks.is_true(self.setting, place, opened, *parts):
            self._judge(head, dealer)
            raise ShareError(f"complains falsely about {dealer}", stage="masked", member=head.sender)

    def _check_released(self, head: Head) -> None:
        members, sender = self.setting.members, head.sender
        place, bad = members.index(sender), _complaints(self.heads["masked"][sender])
        if [row[0] for row in head.body] != [dealer for dealer in self._places("share") if dealer not in bad]:
            raise ShareError(
                "does not release shares of exactly those who dealt it good ones",
                stage="unmask",
                member=sender,
            )
        for peer_place, kind, share in head.body:
            peer = members[peer_place]
            if kind != ("seed" if peer in self.heads["masked"] else "key"):
                raise ShareError(f"releases the wrong kind of share of {peer}", stage="unmask", member=sender)
            row = next(row for row in self.heads["share"][peer].body[0] if row[0] == place)
            dealt = row[3] if kind == "seed" else row[2]
            if masks.commitment(f"{kind} share", share, self.setting.session, peer, sender) != dealt:
                self.lied += [] if sender in self.lied else [sender]
                raise ShareError(
                    f"released a share that {peer} did not deal it", stage="unmask", member=sender
                )

    def _unmask(self) -> Result:
        """Remove the self-masks of members in the sum, and the pairwise masks of the other members."""
        setting, task = self.setting, self._task
        assert task is not None
        binding = task.binding(setting)
        included = tuple(member for member in setting.members if member in self.heads["masked"])
        keys, dealt = [], self._shown_in("share")
        for dealer in dealt:
            secret = self._rebuild(dealer, "seed" if dealer in included else "key")
            if dealer in included:
                self.seeds[dealer] = secret
                keys.append((masks.self_key(secret, dealer, binding), -1))
                continue
            self.keys[dealer] = secret
            masked = masks.masked_with(setting, dealer, dealt)
            peers = {peer: self.heads["advertise"][peer].body[0] for peer in included if peer in masked}
            # the sum lacks exactly the masks that the lost member would have added
            keys += masks.with_peers(setting, dealer, secret, peers, binding)
        masks.add_masks(self._sum, keys)
        return task.result(setting, masks.narrowed(self._sum, task.encoding), included)

    def _rebuild(self, dealer: str, kind: str) -> bytes:
        place = self.setting.members.index(dealer)
        shares = {
            self.setting.members.index(holder): row[2]
            for holder, head in self.heads["unmask"].items()
            for row in head.body
            if row[0] == place
        }
        secret, advertised = masks.combine_shares(shares, self.setting.t), self._shown_in("advertise")
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
    return {place for place, _ in head.body[3]}


# ------------------------------------------------------------------------------ all parties in one process
# N clients and a server in one process, to try, test and measure the protocol.

Vector = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class InMemory:
    """The result of a round in one process."""

    mean: npt.NDArray[np.float64]  # weighted mean of the included vectors
    total_weight: float
    included: tuple[int, ...]  # indices into the vectors
    transcript: dict[str, dict[int, bytes]]  # messages that the server received, by stage and index

    def __repr__(self) -> str:
        return f"InMemory({len(self.mean)} coordinates, included={self.included})"


def run_in_memory(
    vectors: Sequence[npt.ArrayLike],
    weights: Sequence[float] | None = None,
    threshold: int | None = None,
    lost: Mapping[str, Sequence[int]] | None = None,
    bound: float | Literal["auto"] = "auto",
    seed: int | bytes | None = None,
    word_bytes: Literal[4, 8] = 4,
    *,
    transcript: bool = True,
) -> InMemory:
    """Sum vectors securely, with all parties in this process.

    Args:
        vectors: one update per member.
        weights: sample counts, which stay secret; their maximum is the public cap. None: uniform.
        threshold: how many members suffice; None for floor(2N/3) + 1.
        lost: by stage, the members whose message of that stage, and every later one, never arrives.
        bound: largest allowed |coordinate|; "auto" looks at all vectors, which no real party could do.
        seed: seed of the rounding only. Keys always come from the operating system.
        word_bytes: size of a masked word on the wire: 4 or 8. The result is the same.
        transcript: keep all messages, which together are larger than the vectors; a server keeps none.

    Raises:
        RoundAborted: too few members were left.
        ConfigError: weights, lost, bound or seed cannot be used.
        ProtocolError: a vector or the threshold cannot be used.

    >>> run = run_in_memory([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], lost={"masked": [3]}, seed=0)
    >>> run.mean.round(6).tolist(), run.total_weight, run.included
    ([3.0, 4.0], 3.0, (0, 1, 2))
    """
    arrays = [_vector(vector, index) for index, vector in enumerate(_listed(vectors, "vectors"))]
    away = _leaving(lost or {}, len(arrays))
    if not arrays:
        raise RefusedError("there is nothing to sum", stage="setting")
    counts = None if weights is None else _counts(weights, len(arrays))
    if seed is not None and not isinstance(seed, bytes):
        seed_bytes(seed)  # raises if it is not a seed
        seed = whole(seed)
    identities = [Ed25519PrivateKey.generate() for _ in arrays]
    names = tuple(f"client-{index}" for index in range(len(arrays)))
    setting = Setting(
        run=secrets.token_hex(8),
        round=1,
        attempt=0,
        members=names,
        roster=Roster(Member(n, public_key(key)) for n, key in zip(names, identities, strict=True)),
        config_hash=hashlib.sha256(b"in memory").digest(),
        threshold=threshold,
    )
    encoding = Encoding(
        length=arrays[0].size,
        members=len(arrays),
        bound=_largest(arrays) if isinstance(bound, str) and bound == "auto" else bound,
        weights="uniform" if counts is None else "secret",
        weight_cap=1 if counts is None else max(counts),
        word_bytes=word_bytes,
    )
    task = Task(hashlib.sha256(b"no model").digest(), encoding)
    server = Server(setting, task)
    clients = [Client(setting, name, key) for name, key in zip(names, identities, strict=True)]
    kept: dict[str, dict[int, bytes]] = {stage: {} for stage in STAGES}
    shown: dict[str, bytes | None] = dict.fromkeys(names)
    for at, stage in enumerate(STAGES):
        for index, client in enumerate(clients):
            if client.name not in shown or away.get(index, len(STAGES)) <= at:
                continue
            update = None
            if stage == "masked":
                own_seed = seed if seed is None else b"%a %d" % (seed, index)
                weight = None if counts is None else counts[index]
                update = Update(task, arrays[index], weight, own_seed)
            message = client.handle(shown[client.name], update)
            server.receive(message, client.name)
            if transcript:
                kept[stage][index] = message
        shown = dict(server.advance())
    assert server.result is not None
    included = tuple(names.index(name) for name in server.result.included)
    return InMemory(server.result.mean, server.result.total_weight, included, kept)


def _listed(values: Any, what: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ConfigError(f"{what}: expected a list, got {type(values).__name__}") from None


def _counts(weights: Any, members: int) -> list[float]:
    """Return sample counts as numbers; the encoding checks that the round can use them."""
    counts = _listed(weights, "weights")
    if len(counts) != members:
        raise BindingError(f"expected {members} weights, got {len(counts)}", stage="setting")
    if not all(is_number(count) and count >= 1 and float(count).is_integer() for count in counts):
        raise ConfigError("weights: sample counts must be whole numbers of at least 1")
    return [float(count) for count in counts]


def _vector(vector: npt.ArrayLike, index: int) -> Vector:
    try:
        array = vector if isinstance(vector, np.ndarray) else np.asarray(vector, dtype=np.float64)
    except (ValueError, TypeError):
        raise BindingError("not a vector of numbers", stage="masked", member=f"client-{index}") from None
    if array.size == 0:
        raise BindingError(
            "an update needs at least one coordinate", stage="masked", member=f"client-{index}"
        )
    return array


def _largest(arrays: Sequence[Vector]) -> float:
    """Return the largest finite |coordinate|; encoding refuses numbers that are not finite."""
    largest = 0.0
    for array in arrays:
        if np.issubdtype(array.dtype, np.floating):
            finite = array if np.isfinite(array).all() else array[np.isfinite(array)]
            largest = max(largest, float(np.abs(finite).max(initial=0.0)))
    return largest or 1.0


def _leaving(lost: Mapping[str, Sequence[int]], members: int) -> dict[int, int]:
    """Return, by member, the number of the first stage whose message is lost."""
    away: dict[int, int] = {}
    if not isinstance(lost, Mapping):
        raise ConfigError(f"lost: expected members by stage, got {type(lost).__name__}")
    for stage, indices in lost.items():
        if stage not in STAGES:
            raise ConfigError(f"lost: unknown stage {stage!r}; the stages are {', '.join(STAGES)}")
        for given in _listed(indices, f"lost: {stage}"):
            index = whole(given)
            if index is None or not 0 <= index < members:
                raise ConfigError(f"lost: there is no member {given!r:.40} among {members}")
            away[index] = min(STAGES.index(stage), away.get(index, len(STAGES)))
    return away
