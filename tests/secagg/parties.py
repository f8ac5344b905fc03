"""A small federation to play with: settings, clients, a server, and a loop that tests can interfere with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import msgpack
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg import STAGES, Client, Encoding, Server, Setting, Task, Update
from fedmerit.secagg.messages import open_message, seal

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
        self.task = Task(M0, self.encoding, self.public)
        rng = np.random.default_rng(self.n)
        self.vectors = {name: rng.uniform(-1, 1, self.length).astype(np.float32) for name in self.names}
        self.clients = {
            name: Client(self.setting, name, self.identity[name], released=self.released.get(name))
            for name in self.names
        }
        self.channels = {name: client._state.channel for name, client in self.clients.items()}
        self.held = {}  # what members were dealt, once they have released it
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

    def answer(self, name):
        if self.clients[name].stage == "unmask":  # it forgets them with this answer
            self.held[name] = dict(self.clients[name]._state.shares)
        return self.clients[name].handle(self.shown[name], self.update(name))

    def play(self, until=None, lost=()):
        """Play whole stages up to, not including, `until`; `lost` is a list of (stage, name)."""
        gone = set()
        left = () if self.server.stage == "done" else STAGES[STAGES.index(self.server.stage) :]
        for stage in left:
            if stage == until:
                return self
            gone |= {name for at, name in lost if at == stage}
            for name in self.names:
                if name in self.shown and name not in gone:
                    self.sent[stage][name] = self.answer(name)
                    self.server.receive(self.sent[stage][name], name)
            self.shown = self.server.advance()
        return self

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
    return msgpack.unpackb(broadcast[4:])[2]


def seen_in(broadcast):
    """What members sign as seen for a list: the digest over the digests of its heads."""
    _, stage, heads = msgpack.unpackb(broadcast[4:])
    digests = [hashlib.sha256(head).digest() for head in heads]
    return hashlib.sha256(msgpack.packb(["fedmerit secagg list 1", stage, digests])).digest()


def head_of(message):
    """The raw head of a member's message."""
    return message[8 : 8 + int.from_bytes(message[4:8], "big")]


def secrets_of(parties, name):
    s = parties.clients[name]._state
    return [parties.channels[name], s.mask, s.seed, s.nonce]


def body_of(parties, message):
    """The body of a member's message that has no payload."""
    return open_message(message, parties.setting, 0)[0].body


def tampered_shares(parties, name, change):
    """The share message of a dealer that changes what it deals to others."""
    client = parties.clients[name]
    rows, stale = body_of(parties, client.share(parties.shown[name]))
    change(rows)
    forged = parties.forge(name, "share", [rows, stale])
    client._state.said = hashlib.sha256(head_of(forged)).digest()
    return forged


def altered(parties, name, message, amounts):
    """The masked message of a member that adds amounts to some of its words after it has masked them."""
    head, payload = open_message(message, parties.setting, len(message))
    size = parties.encoding.word_bytes
    words = [int.from_bytes(payload[i : i + size], "little") for i in range(0, len(payload), size)]
    for at, amount in amounts.items():
        words[at] += amount
    payload = b"".join((word % 256**size).to_bytes(size, "little") for word in words)
    task, m0_hash, _, *rest = head.body
    digest = hashlib.sha256(payload).digest()
    forged = parties.forge(name, "masked", [task, m0_hash, digest, *rest], payload, seen=head.seen)
    state = parties.clients[name]._state
    state.said, state.sent = hashlib.sha256(head_of(forged)).digest(), digest
    return forged


def commits_falsely(parties, lies, to=b"\7" * 32):
    """Play up to the masked stage; liars commit to something else for their pairs with some peers."""
    parties.play(until="share")
    for name in parties.shown:
        places = [parties.names.index(peer) for peer in lies.get(name, ())]

        def change(rows, places=places):
            for row in rows:
                row[4] = to if row[0] in places else row[4]

        parties.server.receive(tampered_shares(parties, name, change), name)
    parties.shown = parties.server.advance()
    return parties


def caught(error, kind, stage=None, member=None):
    """Whether an error has this very type and names stage and member."""
    assert type(error.value) is kind
    assert stage is None or error.value.stage == stage
    assert member is None or error.value.member == member
