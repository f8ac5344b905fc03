"""One member on its own machine: answers the coordinator's messages, and believes nothing it can check.

What it takes from the server it has checked before: the roster is its own file, the settings are pinned when
it joins, models are compared by hash, the test slice by commitment, the sum by the list it signed. What it
does not know from one message to the next is in its files (`member_state`): write first, answer then.

Whatever is wrong stays here. To the server every refusal looks the same, training happens once a round and
one request for a report is answered, so that neither errors nor repetition say anything about an update. A
member that was told an impossible outcome leaves the run.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmerit.config import Config
from fedmerit.errors import (
    BindingError,
    FedmeritError,
    KeyFileError,
    MessageError,
    ProtocolError,
    RefusedError,
    StoreError,
)
from fedmerit.identity.encoding import canonical, content, seed_from
from fedmerit.identity.keys import Roster, load_key, public_key
from fedmerit.ledger.head_log import kept_head, kept_masked, kept_released, kept_report, kept_trained
from fedmerit.protocol.measure import Member
from fedmerit.protocol.messages import (
    Ask,
    Evaluate,
    Model,
    Outcome,
    Work,
    checked_head,
    join_body,
    model_hash,
    pack,
    same,
    unpack_outcome,
)
from fedmerit.protocol.terms import (
    Agreed,
    cautious,
    check_roster,
    config_in,
    least_scheduled,
    scheduled_encoding,
)
from fedmerit.secagg import Client, Setting, Task, Update
from fedmerit.secagg.messages import open_broadcast, open_message
from fedmerit.storage.member_state import Keeping

# ---------------------------------------------------------------------------------------------- an outcome

Evaluator = Callable[[Any, Sequence[str]], Evaluate]
"""From the shape that training noted and the utilities' names, what evaluates a model on a test slice."""


def told(ask: Ask, agreed: Agreed, client: Client, update: Sequence[Any], member: str) -> Outcome:
    """What the server says came out of a round, if it can be true.

    Args:
        ask: the request for a report.
        agreed: what the member signed when it joined.
        client: its state machine of the round; knows who is in the sum.
        update: what it kept: M0, its change, its weight.
        member: its name.
    """
    m0 = vector(update[0])
    outcome = unpack_outcome(ask, m0.size)
    if outcome.included != client.survivors:
        raise BindingError("others are in the sum than we signed", stage="report", member=member)
    if outcome.m0_hash != model_hash(m0):
        raise BindingError("the server speaks of another M0 than ours", stage="report", member=member)
    encoding, public = scheduled_encoding(agreed.config, m0.size, client.setting.members)
    weight = 1.0 if update[2] is None else float(update[2])
    outcome.check(member, m0, weight, encoding, public)
    outcome.slice.verify(agreed.commitment, outcome.round)
    return outcome


def scoring_side(
    keeping: Keeping, agreed: Agreed, number: int, member: str, evaluator: Evaluator, shape: Any
) -> Member:
    """The member's side of scoring, with the sums it kept with its last report."""
    config = agreed.config
    evaluate = evaluator(shape, config.scoring.utilities)
    side = Member(member, evaluate, agreed.commitment, config.scoring.game)
    if (last := keeping.last("report", number)) is not None:
        side.totals_on = last[4]
        side.totals = {name: np.frombuffer(data, "<f8").copy() for name, data in last[5].items()}
    return side


def vector(data: bytes) -> Model:
    """A model from a member's file."""
    return np.frombuffer(data, "<f4").astype(np.float32)


# ---------------------------------------------------------------------------------------------- the member

log = logging.getLogger("fedmerit")
REFUSED = "refuses; the reason is in its own log"
AFTER_LAST = "has signed the last head of the run"


class RemoteMember:
    """A member, for the time of one message.

    Args:
        name: on the roster.
        key_file: its private key; its files lie next to it.
        roster: everybody's public keys, from the member's own file.
        evaluator: makes what evaluates models.
        accept: raises a `RefusedError` for settings that this member does not agree to.
        seed: of the stochastic rounding, for rehearsals that are to be repeated; None draws one.
        run_config: digest of the settings that the transport handed this node for the run.
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
        run_config: bytes = b"",
    ) -> None:
        self.name, self.key_file, self.roster = name, key_file, roster
        self.evaluator, self.accept, self.seed, self.run_config = evaluator, accept, seed, run_config
        self.masked = False  # whether the last answer was a masked update
        self.identity = load_key(key_file)
        if public_key(self.identity) != roster.key(name):
            raise KeyFileError(f"{key_file}: not the key of {name!r} on the roster")

    def answer(self, data: bytes, address: str, work: Callable[[], Work] | None = None) -> bytes:
        """Answer one message.

        Args:
            data: what the coordinator sent.
            address: where the transport says this member is.
            work: reads the model that came with the message; for the exchange ``train``.

        Raises:
            ProtocolError: the message is refused. Only before it joins does a member say why.
        """
        ask, signed_by = Ask.unpack(data, len(self.roster.members))
        keeping = Keeping(self.key_file, self.identity, ask.run)
        if ask.exchange == "join":
            if not signed_by(ask.get("server", bytes)):
                raise BindingError("not signed by the server it names", stage="join", member=self.name)
            config = config_in(ask.get("terms", dict))  # whatever it costs, no other message waits for it
            with keeping.held():
                return self._join(ask, keeping, address, config)
        with keeping.held():
            try:
                keeping.released()  # whoever cannot tell what it did before does nothing
                kept = keeping.get("terms")
                if kept is None:
                    raise BindingError("was asked before it joined", stage=ask.exchange, member=self.name)
                if (left := keeping.get("left")) is not None:
                    raise RefusedError(f"has left the run: {left}", stage=ask.exchange, member=self.name)
                if ask.exchange != "close" and keeping.get("seen") is not None:
                    raise RefusedError(AFTER_LAST, stage=ask.exchange, member=self.name)
                agreed = Agreed(*kept)
                if not signed_by(agreed.server):
                    raise BindingError("not signed by the server", stage=ask.exchange, member=self.name)
                return self._answer(ask, keeping, agreed, hashlib.sha256(data).digest(), work)
            except Exception as error:
                log.warning("%s refuses in round %d: %s", self.name, ask.round, error)
                raise RefusedError(REFUSED, stage=ask.exchange, member=self.name) from None

    def _answer(
        self, ask: Ask, keeping: Keeping, agreed: Agreed, digest: bytes, work: Callable[[], Work] | None
    ) -> bytes:
        if ask.exchange == "advertise":
            return self._keys_for(ask.round, keeping, agreed, ask.get("members", list), ask.run)
        if ask.exchange == "report":
            return self._report(ask, keeping, agreed, digest)
        if ask.exchange == "close":
            return self._close(ask, keeping, agreed)
        return self._stage(ask, keeping, agreed, work)

    # ------------------------------------------------------------------------------------------ the exchanges

    def _join(self, ask: Ask, keeping: Keeping, address: str, config: Config) -> bytes:
        terms, commitment = ask.get("terms", dict), ask.get("commitment", dict)
        server = ask.get("server", bytes)
        check_roster(terms, config, self.roster, self.name)
        self.accept(config)
        try:
            keeping.released()
        except StoreError as error:
            log.warning("%s does not join: %s", self.name, error)
            raise RefusedError("lost what it keeps; its own log says which file", stage="join") from None
        if (left := keeping.get("left")) is not None:
            log.warning("%s refuses to join again, it has left the run: %s", self.name, left)
            raise RefusedError(REFUSED)
        if keeping.get("seen") is not None:
            log.warning("%s refuses to join again, it %s", self.name, AFTER_LAST)
            raise RefusedError(REFUSED)
        body = join_body(ask.run, address, terms, commitment, server, run_config=self.run_config)
        signature = self.identity.sign(content(self.name, "join", body))
        kept = keeping.get("terms")
        if kept is None:
            try:
                keeping.open()
            except StoreError as error:
                log.warning("%s does not join: %s", self.name, error)
                raise RefusedError("cannot keep another run; its own log says why", stage="join") from None
            keeping.put("terms", [terms, commitment, server])
        elif not same(body, join_body(ask.run, address, *kept, run_config=self.run_config)):
            raise RefusedError("asked to agree to something else than before", stage="join", member=self.name)
        return pack([self.name, signature, self.run_config])

    def _keys_for(
        self, number: int, keeping: Keeping, agreed: Agreed, members: Sequence[Any], run: str
    ) -> bytes:
        """Fresh keys for one attempt at a round that has not gone further than keys and shares."""
        setting = self._setting(number, agreed, members, run)
        dumped, released = keeping.get(_file(number, "client")), keeping.released()
        if dumped is not None:
            before = Client.restore(dumped, self.identity, released=released)
            if before.stage not in ("share", "masked") or keeping.get(_file(number, "began")):
                raise RefusedError("is further in this round", stage="advertise", member=self.name)
        client = Client(setting, self.name, self.identity, released=released)
        message = client.advertise()
        self._keep(keeping, client)
        return message

    def _setting(self, number: int, agreed: Agreed, members: Sequence[Any], run: str) -> Setting:
        config = agreed.config
        if not 1 <= number <= config.training.rounds:
            raise BindingError(f"not one of {config.training.rounds} rounds: {number}", stage="advertise")
        least = least_scheduled(config)
        if len(members) < least:
            raise RefusedError(
                f"scheduled with {len(members)} members, at least {least} were agreed on", stage="advertise"
            )
        return agreed.setting(run, number, (str(name) for name in members), self.roster)

    def _stage(self, ask: Ask, keeping: Keeping, agreed: Agreed, work: Callable[[], Work] | None) -> bytes:
        """One stage of secure aggregation: the server learns of a leave, and of nothing else."""
        client = self._client(ask, keeping)
        due = {"train": "masked"}.get(ask.exchange, ask.exchange)
        if client.stage != due:
            raise BindingError(f"{due} was asked, but {client.stage} is due", stage=due)
        shown = ask.get("list", bytes)
        if due == "masked":
            open_broadcast(shown, client.setting, "share")  # unreadable bytes cost no training
            if work is None or keeping.get(_file(ask.round, "began")):
                raise RefusedError("trains once a round, and a model", stage=due)
        try:
            if due == "masked":
                assert work is not None
                message = self._mask(ask, keeping, agreed, client, shown, work())
                self.masked = True
            else:
                message = client.handle(shown)
        except MessageError:
            raise
        except ProtocolError as error:
            log.warning("%s leaves round %d: %s", self.name, ask.round, error)
            message = client.decline()
        except Exception:  # the member's own training: its reasons are its own
            log.exception("%s leaves round %d", self.name, ask.round)
            message = client.decline()
        self._keep(keeping, client)
        if due == "masked" and self.masked:
            sent = open_message(message, client.setting, len(message))[0].body[2].hex()
            keeping.add_kept(
                kept_trained(ask.round, keeping.get(_file(ask.round, "began"))),
                kept_masked(ask.round, self.name, sent),
            )
        elif due == "unmask" and client.stage == "done":
            keeping.add_kept(kept_released(ask.round, client.survivors))
        return message

    def _mask(
        self, ask: Ask, keeping: Keeping, agreed: Agreed, client: Client, shown: bytes, work: Work
    ) -> bytes:
        config, setting, m0_hash = agreed.config, client.setting, model_hash(work.m0)
        last = keeping.last("report", ask.round)
        steady = last is not None and last[2] == ask.round - 1 and not agreed.terms.get("optimiser")
        if steady and m0_hash != last[3]:
            raise BindingError("M0 is not the M of the round before", stage="masked", member=self.name)
        keeping.put(_file(ask.round, "began"), m0_hash)
        trained = work.train()
        work.check(trained, config)
        encoding, public = scheduled_encoding(config, work.m0.size, setting.members)
        weights = None if public is None else tuple(public[name] for name in setting.members)
        task = Task(bytes.fromhex(m0_hash), encoding, weights, work.extra)
        weight = trained.samples if config.training.weights == "secret" else None
        message = client.masked(shown, Update(task, trained.delta, weight, self._rounding(ask.round)))
        little = [np.ascontiguousarray(part, "<f4").tobytes() for part in (work.m0, trained.delta)]
        own = weight if public is None else public[self.name]
        keeping.put(_file(ask.round, "update"), [*little, own, trained.shape])
        return message

    def _report(self, ask: Ask, keeping: Keeping, agreed: Agreed, asked: bytes) -> bytes:
        """Answer the first request of a round, and no other: each would say something new of the update."""
        client, update = self._client(ask, keeping), keeping.get(_file(ask.round, "update"))
        if client.stage != "done" or update is None:
            raise BindingError("has nothing to report on", stage="report")
        if (said := keeping.get(_file(ask.round, "report"))) is not None and said[0] == asked:
            return bytes(said[1])
        if keeping.get(_file(ask.round, "asked")) is not None:
            raise RefusedError("was asked for a report of this round before", stage="report")
        keeping.put(_file(ask.round, "asked"), asked)
        try:
            outcome = told(ask, agreed, client, update, self.name)
        except FedmeritError as error:
            keeping.put("left", str(error))
            raise
        m0 = vector(update[0])
        side = scoring_side(keeping, agreed, ask.round, self.name, self.evaluator, update[3])
        encoding, public = scheduled_encoding(agreed.config, m0.size, client.setting.members)
        weight = 1.0 if update[2] is None else float(update[2])
        words = encoding.encode(vector(update[1]), weight=update[2], seed=client.opening().rounding).words
        contribution = encoding.dequantise(words)
        report = side.report(m0, outcome, contribution, weight, encoding, public=public, direction=False)
        body = report.body(ask.run)
        signature = self.identity.sign(content(self.name, "report", body))
        reply = pack([canonical(body), signature, self._next_keys(ask, keeping, agreed)])
        kept = {name: np.ascontiguousarray(values, "<f8").tobytes() for name, values in side.totals.items()}
        said = [asked, reply, ask.round, outcome.bound_to["m"], side.totals_on, kept]
        keeping.add_kept(
            kept_head(ask.round - 1, outcome.head), kept_report(ask.round, body, outcome.bound_to)
        )
        keeping.put(_file(ask.round, "report"), said)
        keeping.drop_rounds(before=ask.round)
        return reply

    def _next_keys(self, ask: Ask, keeping: Keeping, agreed: Agreed) -> bytes:
        """Keys for the next round, if this member is scheduled in it and would take part; else none.

        What is wrong with the next round says nothing about this one: the report is given all the same.
        """
        try:
            following = [str(name) for name in ask.get("next", list)]
            if self.name not in following:
                return b""
            return self._keys_for(ask.round + 1, keeping, agreed, following, ask.run)
        except ProtocolError as error:
            log.warning("%s gives no keys for round %d: %s", self.name, ask.round + 1, error)
            return b""

    def _close(self, ask: Ask, keeping: Keeping, agreed: Agreed) -> bytes:
        head = checked_head(ask)
        if not 1 <= ask.round <= agreed.config.training.rounds:
            raise BindingError(f"not one of {agreed.config.training.rounds} rounds", stage="close")
        if (seen := keeping.get("seen")) is None:
            keeping.put("seen", [ask.round, head])
            keeping.add_kept(kept_head(ask.round, head))
        elif seen != [ask.round, head]:
            raise RefusedError("has signed another last head", stage="close", member=self.name)
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

    def _rounding(self, number: int) -> int | None:
        return None if self.seed is None else seed_from(self.seed, "rounding", number, self.name)


def _file(number: int, what: str) -> str:
    return f"{number:04d}.{what}"
