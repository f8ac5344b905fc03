"""One member on its own machine: answers the coordinator's messages, and believes nothing it can check.

What it takes from the server it has checked before: the roster is its own file, the config is pinned when it
joins, models are compared by hash, the test slice by commitment, the sum by the list it signed. What it does
not know from one message to the next is in its files (`keeping`): write first, answer then.
"""

from __future__ import annotations

import hashlib
import logging
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerit.config import Config, from_dict
from fedmerit.errors import (
    BindingError,
    KeyFileError,
    MessageError,
    ProtocolError,
    RefusedError,
)
from fedmerit.federation import protocol
from fedmerit.federation.protocol import Evaluate, Model, model_hash
from fedmerit.federation.remote.keeping import Keeping
from fedmerit.federation.remote.wire import Ask, join_body, pack, same, unpack_outcome
from fedmerit.federation.weighing import are_public, encoding_of, roster_weights
from fedmerit.keys import Roster, load_key, public_key
from fedmerit.ledger import canonical, content
from fedmerit.secagg import Client, Setting, Task, Update
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import LEAST_IN_SUM, default_threshold

if TYPE_CHECKING:
    import numpy.typing as npt


log = logging.getLogger("fedmerit")


@dataclass(frozen=True, eq=False)
class Trained:
    """What local training gave: the model it started from, the change, the number of samples, and what an
    evaluation must know of the model's shape (anything msgpack can carry)."""

    m0: Model
    delta: npt.NDArray[np.float32]
    samples: float | None
    shape: Any = None


Train = Callable[[], Trained]
Evaluator = Callable[[Any, Sequence[str]], Evaluate]
"""From the shape that training noted and the utilities' names, what evaluates a model on a test slice."""


@dataclass(frozen=True)
class Agreed:
    """What a member signed when it joined a run."""

    terms: Mapping[str, Any]
    commitment: Mapping[str, Any]
    server: bytes

    @property
    def config(self) -> Config:
        """The settings among the terms."""
        return config_in(self.terms)


def config_in(terms: Mapping[str, Any]) -> Config:
    """The settings that terms hold, if they are of a run between machines."""
    try:
        config = from_dict(tomllib.loads(terms["config"]))
    except (KeyError, TypeError, ValueError) as error:  # a ConfigError is a ValueError
        raise MessageError(f"the server's settings cannot be read: {error!s:.200}", stage="join") from None
    if config.hash() != terms.get("config_hash"):
        raise MessageError("the server's settings are not those of their hash", stage="join")
    if config.analysis or not config.secure_aggregation.enabled:
        raise RefusedError("asked for a run that looks at plain updates", stage="join")
    if config.training.weights not in ("uniform", "secret", "roster"):
        raise RefusedError(f"weights {config.training.weights!r} are for one process only", stage="join")
    return config


def cautious(config: Config) -> None:
    """What a member agrees to by default: no setting may be weaker than the one fedmerit would choose."""
    secure, members = config.secure_aggregation, len(config.clients)
    if not secure.check:
        raise RefusedError("asked to leave the check out, which hides updates from honest servers only")
    if secure.threshold and secure.threshold < default_threshold(members):
        raise RefusedError(f"asked for a threshold of {secure.threshold} of {members} members")
    if secure.least and secure.least < usual_least(config):
        raise RefusedError(f"asked to take part in rounds of {secure.least} of {members} members")


def usual_least(config: Config) -> int:
    """Two thirds of those a round usually schedules, and one more: a server must not choose whom to sum."""
    usual = max(LEAST_IN_SUM, round(config.participation.fraction * len(config.clients)))
    return max(LEAST_IN_SUM, default_threshold(usual))


def terms_hash(terms: Mapping[str, Any]) -> bytes:
    """SHA-256 of all that was agreed; enters every mask and signature of secure aggregation."""
    return hashlib.sha256(canonical(terms)).digest()


class RemoteMember:
    """A member, for the time of one message.

    Args:
        name: on the roster.
        key_file: its private key; its files lie next to it.
        roster: everybody's public keys, from the member's own file.
        evaluator: makes what evaluates models.
        accept: raises a `RefusedError` for settings that this member does not agree to.
        seed: of the stochastic rounding, for rehearsals that are to be repeated; None draws one.
    """

    def __init__(
        self,
        name: str,
        key_file: Path,
        roster: Roster,
        evaluator: Evaluator,
        *,
        accept: Callable[[Config], None] = cautious,
        seed: int | None = None,
    ) -> None:
        self.name, self.key_file, self.roster = name, key_file, roster
        self.evaluator, self.accept, self.seed = evaluator, accept, seed
        self.identity = load_key(key_file)
        if public_key(self.identity) != roster.key(name):
            raise KeyFileError(f"{key_file}: not the key of {name!r} on the roster")

    def answer(self, data: bytes, address: str, train: Train | None = None) -> bytes:
        """Answer one message.

        Args:
            data: what the coordinator sent.
            address: where the transport says this member is.
            train: trains the model that came with the message; for the exchange ``train``.

        Raises:
            ProtocolError: the message is refused; whether a share was released before, it still is.
        """
        ask = Ask.unpack(data)
        keeping = Keeping(self.key_file, self.identity, ask.run)
        with keeping.held():
            if ask.exchange == "join":
                return self._join(ask, keeping, address)
            kept = keeping.get("terms")
            if kept is None:
                raise BindingError("was asked before it joined", stage=ask.exchange, member=self.name)
            agreed = Agreed(*kept)
            if ask.exchange == "advertise":
                return self._advertise(ask, keeping, agreed, ask.get("members", list))
            if ask.exchange == "report":
                return self._report(ask, keeping, agreed, hashlib.sha256(data).digest())
            if ask.exchange == "close":
                return self._close(ask, keeping)
            return self._stage(ask, keeping, agreed, train)

    # ------------------------------------------------------------------------------------------ the exchanges

    def _join(self, ask: Ask, keeping: Keeping, address: str) -> bytes:
        terms, commitment = ask.get("terms", dict), ask.get("commitment", dict)
        server = ask.get("server", bytes)
        config = config_in(terms)
        if terms.get("roster") != self.roster.hash.hex():
            raise BindingError("the server has another roster than ours", stage="join", member=self.name)
        if set(config.clients) != set(self.roster.names):
            raise BindingError("the settings name others than the roster", stage="join", member=self.name)
        self.accept(config)
        body = join_body(ask.run, address, terms, commitment, server)
        kept = keeping.get("terms")
        if kept is None:
            keeping.put("terms", [terms, commitment, server])
        elif not same(body, join_body(ask.run, address, *kept)):
            raise RefusedError("asked to agree to something else than before", stage="join", member=self.name)
        return pack([self.name, self.identity.sign(content(self.name, "join", body))])

    def _advertise(self, ask: Ask, keeping: Keeping, agreed: Agreed, members: Sequence[str]) -> bytes:
        return self._keys_for(ask.round, keeping, agreed, members, ask.run)

    def _keys_for(
        self, number: int, keeping: Keeping, agreed: Agreed, members: Sequence[str], run: str
    ) -> bytes:
        """Fresh keys for one attempt at a round."""
        config = agreed.config
        if not 1 <= number <= config.training.rounds:
            raise BindingError(
                f"round {number} of {config.training.rounds}", stage="advertise", member=self.name
            )
        least = config.secure_aggregation.least or usual_least(config)
        if len(members) < least:
            raise RefusedError(
                f"scheduled with {len(members)} members, at least {least} were agreed on",
                stage="advertise",
                member=self.name,
            )
        setting = Setting(
            run=run,
            round=number,
            attempt=0,
            members=tuple(members),
            roster=self.roster,
            config_hash=terms_hash(agreed.terms),
            threshold=config.secure_aggregation.threshold or None,
            checked=config.secure_aggregation.check,
        )
        client = Client(setting, self.name, self.identity, released=keeping.released())
        message = client.advertise()
        self._keep(keeping, client)
        return message

    def _stage(self, ask: Ask, keeping: Keeping, agreed: Agreed, train: Train | None) -> bytes:
        """One stage of secure aggregation. Whatever is wrong stays here: the server learns of a leave."""
        client = self._client(ask, keeping)
        due = {"train": "masked"}.get(ask.exchange, ask.exchange)
        if client.stage != due:
            raise BindingError(f"{due} was asked, but {client.stage} is due", stage=due, member=self.name)
        shown = ask.get("list", bytes)
        try:
            if due == "masked":
                if train is None:
                    raise MessageError("came without a model to train", stage=due, member=self.name)
                message = self._mask(ask, keeping, agreed, client, shown, train())
            else:
                message = client.handle(shown)
        except MessageError:
            raise
        except ProtocolError as error:
            log.warning("%s leaves round %d: %s", self.name, ask.round, error)
            message = client.decline()
        self._keep(keeping, client)
        return message

    def _mask(
        self, ask: Ask, keeping: Keeping, agreed: Agreed, client: Client, shown: bytes, trained: Trained
    ) -> bytes:
        config, setting = agreed.config, client.setting
        encoding, public = self._encoding(config, trained.m0.size, setting.members)
        weights = None if public is None else tuple(public[name] for name in setting.members)
        task = Task(bytes.fromhex(model_hash(trained.m0)), encoding, weights)
        weight = trained.samples if config.training.weights == "secret" else None
        if config.training.weights == "secret" and weight is None:
            raise MessageError("needs the number of training samples", stage="masked", member=self.name)
        seed = self._rounding(ask.round)
        message = client.masked(shown, Update(task, trained.delta, weight, seed))
        little = [np.ascontiguousarray(part, "<f4").tobytes() for part in (trained.m0, trained.delta)]
        own = weight if public is None else public[self.name]
        keeping.put(_file(ask.round, "update"), [*little, own, trained.shape])
        return message

    def _report(self, ask: Ask, keeping: Keeping, agreed: Agreed, asked: bytes) -> bytes:
        if (said := keeping.get(_file(ask.round, "report"))) is not None:
            if said[0] != asked:
                raise RefusedError("has reported on another outcome", stage="report", member=self.name)
            return bytes(said[1])
        client, update = self._client(ask, keeping), keeping.get(_file(ask.round, "update"))
        if client.stage != "done" or update is None:
            raise BindingError("has nothing to report on", stage="report", member=self.name)
        m0, delta = (np.frombuffer(part, "<f4").astype(np.float32) for part in update[:2])
        outcome = unpack_outcome(ask, m0.size)
        if outcome.included != client.survivors:
            raise BindingError("others are in the sum than we signed", stage="report", member=self.name)
        encoding, public = self._encoding(agreed.config, m0.size, client.setting.members)
        weight = 1.0 if update[2] is None else float(update[2])
        rounding = client.opening().rounding
        words = encoding.encode(delta, weight=update[2], seed=rounding).words
        evaluate = self.evaluator(update[3], agreed.config.scoring.utilities)
        side = protocol.Member(self.name, evaluate, agreed.commitment, agreed.config.scoring.game)
        if (totals := keeping.get("totals")) is not None:
            side.totals_on = totals[0]
            side.totals = {name: np.frombuffer(data, "<f8").copy() for name, data in totals[1].items()}
        report = side.report(m0, outcome, encoding.dequantise(words), weight, encoding, public=public)
        body = report.body(ask.run)
        signature = self.identity.sign(content(self.name, "report", body))
        following = [str(name) for name in ask.get("next", list)]
        keys = b""
        if self.name in following:
            keys = self._keys_for(ask.round + 1, keeping, agreed, following, ask.run)
        reply = pack([canonical(body), signature, keys])
        kept = {name: np.ascontiguousarray(values, "<f8").tobytes() for name, values in side.totals.items()}
        keeping.put("totals", [side.totals_on, kept])
        keeping.put(_file(ask.round, "report"), [asked, reply])
        keeping.add_head(ask.round - 1, outcome.head)
        keeping.drop_rounds(before=ask.round)
        return reply

    def _close(self, ask: Ask, keeping: Keeping) -> bytes:
        head = ask.get("head", str)
        keeping.add_head(ask.round, head)
        body = {"run": ask.run, "round": ask.round, "head": head}
        return self.identity.sign(content(self.name, "seen", body))

    # ------------------------------------------------------------------------------------------- inner parts

    def _client(self, ask: Ask, keeping: Keeping) -> Client:
        dumped = keeping.get(_file(ask.round, "client"))
        if dumped is None:
            raise BindingError(f"knows nothing of round {ask.round}", stage=ask.exchange, member=self.name)
        return Client.restore(dumped, self.identity, released=keeping.released())

    def _keep(self, keeping: Keeping, client: Client) -> None:
        """What must never be done again first, then where the client stands; only then may it speak."""
        keeping.put_released(client.released)
        keeping.put(_file(client.setting.round, "client"), client.dump())

    def _encoding(
        self, config: Config, length: int, members: Sequence[str]
    ) -> tuple[Encoding, dict[str, float] | None]:
        public = None
        if are_public(config):
            everybody = roster_weights(config)
            public = {name: everybody[name] for name in members}
        return encoding_of(config, length, len(members), public), public

    def _rounding(self, number: int) -> int | None:
        if self.seed is None:
            return None
        text = canonical(["fedmerit seed 1", self.seed, "rounding", number, self.name])
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def _file(number: int, what: str) -> str:
    return f"{number:04d}.{what}"
