"""A small federation to play with: settings, clients, a server, and a loop that tests can interfere with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import msgpack

from fedmerit.errors import ProtocolError
from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import open_message, seal, to_broadcast
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.server import Server
from fedmerit.secagg.setting import STAGES, Setting, Task, Update

M0 = hashlib.sha256(b"model 0").digest()
CONFIG = hashlib.sha256(b"config").digest()
LENGTH = 20
A, B, C, D = "hospital-a", "hospital-b", "hospital-c", "hospital-d"


def names_of(n):
    return tuple(f"hospital-{chr(ord('a') + i)}" for i in range(n))


@dataclass
class Parties:
    """N members and a server in one attempt; `vectors` and `weights` are what the members bring, `others` are
    on the roster and not scheduled."""

    n: int = 4
    length: int = LENGTH
    round: int = 1
    attempt: int = 0
    threshold: int | None = None
    weights: list | None = None
    public: tuple | None = None
    keys: list = field(default_factory=list)
    released: dict = field(default_factory=dict)
    others: int = 0
    word_bytes: int = 4

    def __post_init__(self):
        self.names = names_of(self.n)
        everybody = names_of(self.n + self.others)
        self.keys = self.keys or [Ed25519PrivateKey.generate() for _ in everybody]
        self.identity = dict(zip(everybody, self.keys, strict=True))
        self.roster = Roster(Member(name, public_key(key)) for name, key in self.identity.items())
        self.setting = Setting(
            "run", self.round, self.attempt, self.names, self.roster, CONFIG, self.threshold
        )
        kind = "secret" if self.weights else "public" if self.public else "uniform"
        cap = max(self.weights or self.public or (1,))
        self.encoding = Encoding(self.length, self.n, 1.0, kind, cap, word_bytes=self.word_bytes)
        public = self.public and dict(zip(self.names, self.public, strict=True))
        self.task = Task(M0, self.encoding, public)
        rng = np.random.default_rng(self.n)
        self.vectors = {name: rng.uniform(-1, 1, self.length).astype(np.float32) for name in self.names}
        self.clients = {
            name: Client(self.setting, name, self.identity[name], released=self.released.get(name))
            for name in self.names
        }
        self.channels = {name: client._state.channel for name, client in self.clients.items()}
        self.lies = {}  # by stage and name: what makes the message of a member that lies
        self.server = Server(self.setting, self.task)
        self.shown = dict.fromkeys(self.names)
        self.sent = {stage: {} for stage in STAGES}

    def retry(self, **change):
        """The same people in another attempt; they remember what they released."""
        kept = {name: client.released for name, client in self.clients.items()}
        return replace(self, **({"attempt": self.attempt + 1, "released": kept} | change))

    def update(self, name):
        i = self.names.index(name)
        weight = (self.weights or self.public or [None] * self.n)[i]
        return Update(self.task, self.vectors[name], weight, b"seed of " + name.encode())

    def honest(self, name, shown=None):
        client, shown = self.clients[name], shown or self.shown[name]
        return client.masked(shown, self.update(name)) if client.stage == "masked" else client.handle(shown)

    def answer(self, name, shown=None):
        """The message of the stage that is due: the member's own, or the lie that it tells in this stage."""
        lie = self.lies.get((self.clients[name].stage, name))
        return lie(self, name) if lie else self.honest(name, shown)

    def play(self, until=None, lost=()):
        """Play whole stages up to, not including, `until`; `lost` is a list of (stage, name)."""
        gone = set()
        left = () if self.server.stage == "done" else STAGES[STAGES.index(self.server.stage) :]
        for stage in left:
            if stage == until:
                return self
            gone |= {name for at, name in lost if at == stage}
            self.collect([name for name in self.names if name in self.shown and name not in gone])
            self.shown = self.server.advance()
        return self

    def collect(self, names=None):
        """Let members, or all, answer the stage that is due; return the list of their heads."""
        stage, names = self.server.stage, names or self.names
        for name in names:
            self.sent[stage][name] = self.answer(name)
            try:
                self.server.receive(self.sent[stage][name], name)
            except ProtocolError:
                if name not in (liar for _, liar in self.lies):
                    raise
        return to_broadcast(stage, [head_of(self.sent[stage][name]) for name in names])

    def payload(self, name):
        """The masked words that a member sent, as bytes."""
        message = self.sent["masked"][name]
        return message[8 + len(head_of(message)) :]

    def words(self, name):
        """The integers that a member puts into the sum."""
        update = self.update(name)
        return self.encoding.encode(update.delta, weight=update.weight, seed=update.seed)

    def plain_mean(self, included=None):
        included = included or self.names
        weights = dict(zip(self.names, self.weights or self.public or [1] * self.n, strict=True))
        total = sum(weights[name] for name in included)
        return sum(weights[name] * self.vectors[name].astype(float) for name in included) / total

    def forge(self, name, stage, body, payload=b"", signer=None, setting=None, seen=None):
        """A message as a member that does not keep to the protocol could sign it."""
        seen = self.clients[name]._state.seen if seen is None else seen
        key = self.identity[signer or name]
        return seal(setting or self.setting, name, key, stage, seen, body, payload)[0]


def heads_in(broadcast):
    """The raw heads of a list the server shows."""
    return msgpack.decode(broadcast[4:])[1]


def seen_in(broadcast):
    """What members sign as seen for a list: the digest over the digests of its heads."""
    stage, heads = msgpack.decode(broadcast[4:])
    digests = [hashlib.sha256(head).digest() for head in heads]
    return hashlib.sha256(msgpack.encode(["fedmerit secagg list 1", stage, digests])).digest()


def head_of(message):
    """The raw head of a member's message."""
    return message[8 : 8 + int.from_bytes(message[4:8], "big")]


def secrets_of(parties, name):
    s = parties.clients[name]._state
    return [parties.channels[name], s.mask, s.seed]


def body_of(parties, message):
    """The body of a member's message that has no payload, as lists that a test can change."""
    return plain(open_message(message, parties.setting, 0)[0].body)


def plain(body):
    """A body as lists, in the order of its fields."""
    return msgpack.decode(msgpack.encode(body))


def tampered_shares(parties, name, change):
    """The share message of a dealer that changes what it deals to others."""
    client = parties.clients[name]
    rows, stale = body_of(parties, client.share(parties.shown[name]))
    change(rows)
    forged = parties.forge(name, "share", [rows, stale])
    client._state.said = hashlib.sha256(head_of(forged)).digest()
    return forged


def altered(parties, name, amounts):
    """The masked message of a member that adds amounts to some of its words after it has masked them."""
    head, payload = open_message(message := parties.honest(name), parties.setting, len(message))
    size = parties.encoding.word_bytes
    words = [int.from_bytes(payload[i : i + size], "little") for i in range(0, len(payload), size)]
    for at, amount in amounts.items():
        words[at] += amount
    payload = b"".join((word % 256**size).to_bytes(size, "little") for word in words)
    task, m0_hash, _, *rest = plain(head.body)
    digest = hashlib.sha256(payload).digest()
    forged = parties.forge(name, "masked", [task, m0_hash, digest, *rest], payload, seen=head.seen)
    state = parties.clients[name]._state
    state.said, state.sent = hashlib.sha256(head_of(forged)).digest(), digest
    return forged


def adds(parties, amounts):
    """Let members add amounts, by place, to their words after they have masked them."""
    for liar, own in amounts.items():
        parties.lies["masked", liar] = partial(altered, amounts=own)
    return parties


def commits_falsely(parties, peers, to=b"\7" * 32):
    """Let members commit to something else for their pairs with some peers."""

    def lie(parties, name):
        places = [parties.names.index(peer) for peer in peers[name]]

        def change(rows):
            for row in rows:
                row[4] = to if row[0] in places else row[4]

        return tampered_shares(parties, name, change)

    parties.lies |= {("share", liar): lie for liar in peers}
    return parties
