"""One member on its own machine: it answers the coordinator's messages and checks all that it can check.

The roster is the member's own file, and the settings are pinned when it joins. It compares models by hash,
the test slice with its commitment, and the sum with the list it signed. Every message may be handled by a new
process, so the member keeps its state in files (`member_state`): it writes first and answers afterwards.

The member does not tell the server why it refuses: after it has joined, all refusals look the same. It trains
once per round and answers one request for a report, so neither errors nor repetition reveal anything about an
update. A member who is told an impossible outcome leaves the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerit.config import Config
from fedmerit.errors import (
    BindingError,
    FedmeritError,
    MessageError,
    ProtocolError,
    RefusedError,
    StoreError,
    placing,
)
from fedmerit.identity import Roster, canonical, commitment, seed_from
from fedmerit.notes import Note
from fedmerit.protocol import memory
from fedmerit.protocol.bench import least_samples
from fedmerit.protocol.judge import Judge, held_out_of
from fedmerit.protocol.memory import Gradients, HeldOut, MemberState, Signatory, Value, kept_line
from fedmerit.protocol.messages import (
    LEAST_SAMPLES,
    Ask,
    Joined,
    Parcel,
    Signed,
    join_body,
    pack,
    with_more,
)
from fedmerit.protocol.outcome import Contribution, Evaluate, Evaluations, Model, Scorer, Told, Work
from fedmerit.protocol.pool import Sampling, samples_in
from fedmerit.protocol.settler import SETTLING, Settler
from fedmerit.protocol.terms import (
    FLOWER,
    Agreed,
    Lineage,
    cautious,
    check_roster,
    check_server,
    check_version,
    config_in,
    least_scheduled,
    refuse_rehearsal,
    task_of,
)
from fedmerit.secagg.plain import PlainClient
from fedmerit.secagg.setting import Setting, Update

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger("fedmerit")
REFUSED = "refuses; the reason is in its own log"
AFTER_LAST = "has signed the last head of the run"
KEPT_ROUNDS = 2
"""How many rounds before the latest a member still answers in; it deletes the files of those before."""
Evaluator = Callable[[Any, Sequence[str]], Evaluate]
"""(shape noted by training, names of utilities) -> a function that evaluates a model on a test slice."""


class Participant(Signatory):
    """One member, for the time it takes to answer a message.

    Args:
        identity: its private key; None in a rehearsal without masks, where nothing is signed.
        roster: the public keys of all members, from the member's own file.
        state: returns the state of a run, given the run's identifier.
        evaluator: returns the function that evaluates models.
        accept: raises a `RefusedError` for settings that this member does not agree to.
        seed: seed of the stochastic rounding, for rehearsals that must be repeatable; None draws one.
        run_config: digest of the settings that the transport handed this node for the run.
        rehearsal: whether one process holds all members. It may then look at plain updates and sum them
            without masks, and its errors are raised.
        engines: names of the engines whose runs this member joins, as in a run's terms.
        gradients: returns the function for the gradient of a utility along a path, which a settlement needs.
        held_out: returns the samples by which it judges in a panel, and on which it does not train.
    """

    def __init__(
        self,
        name: str,
        identity: Ed25519PrivateKey | None,
        roster: Roster,
        state: Callable[[str], MemberState],
        evaluator: Evaluator,
        *,
        accept: Callable[[Config], None] = cautious,
        seed: int | None = None,
        run_config: bytes = b"",
        rehearsal: bool = False,
        engines: Sequence[str] = (FLOWER,),
        gradients: Gradients | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        super().__init__(name, identity, roster, gradients, rehearsal)
        self.state, self.evaluator, self.accept = state, evaluator, accept
        self.seed, self.run_config, self.engines = seed, run_config, engines
        self.held_out = held_out
        self.masked = False  # whether the last answer was a masked update
        self.declined = ""  # why its last answer was to leave the round; never sent
        self.reached: tuple[Any, Model] | None = None  # shape and M of the round that it acknowledged last
        self.solo: Model | None = None  # the model it trained alone, if it does so
        self.early = True  # whether it sends keys and shares for the next round ahead

    def answer(self, data: Parcel, address: str, work: Callable[[], Work] | None = None) -> bytes:
        """Answer one message, or refuse it with a ProtocolError, which has a reason only before it has
        joined.

        ``address`` is where the transport says this member is; ``work`` reads the model that came with
        ``train``.
        """
        opened = Ask.unpack(data, len(self.roster.members), self.name)
        return self.answer_opened(*opened, data, address, work)

    def answer_opened(
        self,
        ask: Ask,
        signed_by: Callable[[bytes], bool],
        data: Parcel,
        address: str,
        work: Callable[[], Work] | None = None,
    ) -> bytes:
        """Answer a message that has been unpacked before, once for all members who share a process."""
        with placing(ask.exchange, self.name):
            state = self.state(ask.run)
            if ask.exchange == "join":
                server, terms = ask.body.server, ask.body.terms
                if not self._signed(signed_by, server):
                    raise BindingError("not signed by the server it names")
                if not self.rehearsal:
                    check_version(terms)
                config = config_in(terms)  # may be slow, so it is done without the lock
                with state.held():
                    answer = self._join(ask, state, address, config)
                    state.save()
                    return answer
            with state.held():
                try:
                    state.check()
                    if (agreed := state.get(memory.TERMS)) is None:
                        raise BindingError("was asked before it joined")
                    if (left := state.get(memory.LEFT)) is not None:
                        raise RefusedError(f"has left the run: {left}")
                    if ask.exchange not in (*SETTLING, "close") and state.get(memory.SEEN) is not None:
                        raise RefusedError(AFTER_LAST)
                    if self.between(agreed.terms):
                        self._follow(state.known.roster)
                    if agreed.terms.get("roster") != self.roster.hash.hex():
                        raise RefusedError(
                            "the roster has changed since it joined this run, which is over with that: its "
                            "server may have been replaced"
                        )
                    if not self._signed(signed_by, agreed.server):
                        raise BindingError("not signed by the server")
                    answer = self._answer(ask, state, agreed, data.head, work)
                    state.save()
                    return answer
                except Exception as error:
                    if self.rehearsal:
                        raise
                    log.warning("%s refuses in round %d: %s", self.name, ask.round, error)
                    raise RefusedError(REFUSED, logged=True) from None

    def _signed(self, signed_by: Callable[[bytes], bool], server: bytes) -> bool:
        return server == b"" if self.identity is None else signed_by(server)

    def _answer(
        self, ask: Ask, state: MemberState, agreed: Agreed, head: bytes, work: Callable[[], Work] | None
    ) -> bytes:
        if ask.exchange in SETTLING:
            settler = Judge if agreed.config.judged else Settler
            return settler(self, state, agreed, ask.run, head).answer(ask)
        contributor = Contributor(self, state, agreed, ask)
        if ask.exchange == "advertise":
            return contributor.keys(ask.round, ask.body.members)
        if ask.exchange == "report":
            return contributor.report(hashlib.sha256(head).digest())
        if ask.exchange == "close":
            return contributor.close()
        return contributor.stage(work, hashlib.sha256(head).digest())

    # ----------------------------------------------------------------------------------------- the exchanges

    def _join(self, ask: Ask, state: MemberState, address: str, config: Config) -> bytes:
        terms, pool, server = ask.body.terms, ask.body.commitment, ask.body.server
        if not self.rehearsal:
            refuse_rehearsal(terms, config, self.engines)
            check_server(terms, server, self.roster)
        check_roster(terms, config, self.roster)
        self.accept(config)
        if config.settles and self.gradients is None:
            raise RefusedError(
                "asked for a settled run, which needs the gradient of the utility, and this member has none: "
                "pass gradient= where value= is passed, or score by reports (scoring.method)"
            )
        between = self.between(terms)
        with self._joining("lost what it keeps; its own log says which file"):
            state.check()
            last = state.known.roster if between else None
        self._follow(last)
        again = ""
        if (left := state.get(memory.LEFT)) is not None:
            again = f"has left the run: {left}"
        elif state.get(memory.SEEN) is not None:
            again = AFTER_LAST
        if again:
            log.warning("%s refuses to join again, it %s", self.name, again)
            raise RefusedError(REFUSED, logged=True)
        judges = self._judging(ask.run, config, state)
        body = join_body(ask.run, address, terms, pool, server, run_config=self.run_config, held_out=judges)
        signature = self.sign("join", body)
        if (agreed := state.get(memory.TERMS)) is None:
            self.check_pins(ask.run, terms, config, state)
            with self._joining("cannot keep another run; its own log says why"):
                state.open()
                if between:
                    state.known.roster = self.roster.hash
                state.put(memory.TERMS, Agreed(terms, pool, server))
                if judges is not None:
                    state.put(memory.HELD_OUT, judges)
            if config.weighing == "secret" and not self.rehearsal:
                log.warning("%s", Note("secret-weights"))
        elif agreed.hash != Agreed(terms, pool, server).hash:
            raise RefusedError("asked to agree to terms that differ from those it signed")
        return pack(
            Joined(self.name, signature, self.run_config, b"" if judges is None else canonical(judges))
        )

    def _judging(self, run: str, config: Config, state: MemberState) -> dict[str, Any] | None:
        """Return what this member commits to as a judge; None in a run without a panel."""
        if not config.judged:
            return None
        if self.held_out is None:
            raise RefusedError(
                "asked to judge, and this member has no held-out samples: pass held_out= where value= is "
                "passed, or score by another method (scoring.method)"
            )
        x, y = self.held_out()
        least = least_samples(config, rehearsal=self.rehearsal)
        if len(y) != len(x) or len(y) < least:
            raise RefusedError(f"has {len(y)} held-out samples, expected at least {least} to judge by")
        committed = held_out_of(self, run, x, y)
        if state.get(memory.HELD_OUT) not in (None, committed):
            raise RefusedError("its held-out samples are not those that it committed to when it joined")
        return committed

    def _follow(self, last: bytes | None) -> None:
        """Raise RefusedError unless this member's roster follows from the one it last took part under."""
        if last is not None and last not in [one.hash for one in self.roster.chain]:
            raise RefusedError(
                f"took part under the roster {last.hex()}, and its roster file now holds "
                f"{self.roster.hash.hex()}, which does not follow from that one by changes that its members "
                "signed (fedmerit keys propose, sign, adopt); another federation needs another key"
            )

    def check_pins(
        self, run: str, terms: Mapping[str, Any], config: Config, state: MemberState
    ) -> Lineage | None:
        """Raise RefusedError if this run conflicts with earlier ones; return None in a rehearsal."""
        if not self.between(terms):
            return None
        lineage = state.known.lineage(self.roster)
        try:
            lineage.check(run, config, time.time())
        except RefusedError as error:
            log.warning("%s: %s", self.name, error)
            raise
        return lineage

    @contextmanager
    def _joining(self, refusal: str) -> Iterator[None]:
        """Turn a problem with this member's files into this refusal to join; its own log says which."""
        try:
            yield
        except StoreError as error:
            log.warning("%s does not join: %s", self.name, error)
            raise RefusedError(refusal, logged=True) from None

    def contribution(self, run: str, number: int) -> Contribution:
        """Return what this member put into the sum of a round; for a rehearsal's analyses."""
        client, update = self.brought(self.state(run), number)
        return Contribution.of(client.words(update.delta), client.task.encoding)

    def weight(self, run: str, number: int) -> float:
        """Return w_i of a round whose sum includes this member; for a rehearsal's analyses."""
        return self.brought(self.state(run), number)[0].weight


@dataclass(frozen=True, eq=False)
class Contributor:
    """One member in the rounds of one run, while it answers a message."""

    member: Participant
    state: MemberState
    agreed: Agreed
    ask: Ask

    @property
    def config(self) -> Config:
        return self.agreed.config

    def keys(self, number: int, members: Sequence[str]) -> bytes:
        """Return fresh keys for a round; refuse if this member has gone beyond keys and shares in it."""
        setting, state = self._setting(number, members), self.state
        if self._is_past(number):
            raise RefusedError("takes part in no round after the last one")
        if number < (state.get(memory.FLOOR) or 0):
            raise RefusedError("is further than this round")
        before = self.member.client(state, number)
        if before is not None and (before.stage not in ("share", "masked") or self._began(number)):
            raise RefusedError("is past this stage of the round")
        client = self._new_client(setting)
        message = client.advertise()
        self._keep(client)
        self._end_rounds(before=number - KEPT_ROUNDS)
        return message

    def stage(self, work: Callable[[], Work] | None, head: bytes) -> bytes:
        """Answer one stage of secure aggregation; ``head`` is the hash of the message."""
        ask, state, member = self.ask, self.state, self.member
        if (client := member.client(state, ask.round)) is None:
            raise BindingError(f"has no state of round {ask.round}")
        due: str = "masked" if ask.exchange == "train" else ask.exchange
        if client.stage != due:
            raise BindingError(f"asked for {due}, but {client.stage} is due")
        if self._is_past(ask.round):
            raise RefusedError("takes part in no round after the last one")
        acknowledged = b""
        if due == "masked":
            client.readable(ask.body.list)  # fail on unreadable bytes before training
            if work is None or self._began(ask.round):
                raise RefusedError("trains once per round, and only with a model to train")
            if ask.body.before is not None:
                before = replace(ask, exchange="report", round=ask.round - 1, body=ask.body.before)
                acknowledged = replace(self, ask=before).report(head)
        message = self._attempt(client, ask.body.list, work if due == "masked" else None)
        self._keep(client)
        if member.masked:
            state.add_kept(
                kept_line(ask.round, "trained", client.task.m0_hash.hex()),
                kept_line(ask.round, "masked", json.dumps(member.name), client.sent),
                *(kept_line(ask.round, "complained", [member.name, dealer]) for dealer in client.complaints),
            )
            for dealer in client.complaints:
                member.warn("%s complains in round %d: %s dealt a bad share", member.name, ask.round, dealer)
        elif due == "unmask" and client.stage == "done":
            state.add_kept(kept_line(ask.round, "released", client.survivors))
            if self.config.settles:
                state.put(memory.SUMMED, [*(state.get(memory.SUMMED) or ()), ask.round])
        if due == "share":
            return message
        return with_more(message, acknowledged if due == "masked" else self._ahead(due))

    def report(self, asked: bytes) -> bytes:
        """Answer one request per round; repeat the answer if asked again. Another one would reveal more."""
        ask, state, member = self.ask, self.state, self.member
        (client, update), m0 = member.brought(state, ask.round), state.get(memory.M0.of(ask.round))
        if client.stage != "done" or m0 is None:
            raise BindingError("has nothing to report on")
        if (before := state.get(memory.REPORT.of(ask.round))) is not None and before.asked == asked:
            return before.reply
        if state.get(memory.ASKED.of(ask.round)) is not None:
            raise RefusedError("has had another request for a report on this round")
        state.put(memory.ASKED.of(ask.round), asked)
        state.save()
        task, weight = client.task, client.weight
        contribution = Contribution.of(client.words(update.delta), task.encoding)
        try:
            told = ask.told(task.encoding.words)
            self._check_told(told, client)
            outcome = told.outcome(m0, task)
            outcome.check(member.name, weight, task.encoding)
        except FedmeritError as error:
            state.put(memory.LEFT, str(error))
            state.save()
            raise
        member.reached = update.shape, outcome.model
        scorer = self._scorer(update.shape)
        report = scorer.report(
            m0, outcome, contribution, weight, solo=member.solo, direction=member.rehearsal
        )
        body = report.body(ask.run)
        reply = pack(Signed(canonical(body), member.sign("report", body)))
        state.add_kept(
            kept_line(ask.round - 1, outcome.head),
            kept_line(ask.round, "report", commitment(body).hex(), outcome.commitment),
        )
        sums = ask.round, outcome.bound_to["m"], scorer.totals_on, scorer.totals
        state.put(memory.REPORT.of(ask.round), memory.GivenReport(asked, reply, *sums))
        if self.config.settles:
            state.put(memory.SIGNED.of(ask.round), dict(outcome.bound_to))
        if self.config.judged and not member.rehearsal:  # a judge needs it after the last round
            state.room(told.words.nbytes)
            state.put(memory.SUM.of(ask.round), told.words)
        if told.slice is not None:
            member.remember_samples(state, self.agreed, samples_in(told.slice))
        self._end_rounds(before=ask.round)
        return reply

    def close(self) -> bytes:
        """Sign the last head of the ledger, and no other."""
        ask, last = self.ask, memory.SignedHead(self.ask.round, self.ask.body.head)
        if not 1 <= ask.round <= self.config.training.rounds:
            raise BindingError(f"there are {self.config.training.rounds} rounds, got round {ask.round}")
        if (seen := self.state.get(memory.SEEN)) is None:
            self.state.put(memory.SEEN, last)
            self.state.add_kept(kept_line(last.round, last.head))
        elif seen != last:
            raise RefusedError("has signed a different last head")
        return self.member.sign("seen", {"run": ask.run, "round": last.round, "head": last.head})

    # ------------------------------------------------------------------------------------------- inner parts

    def _setting(self, number: int, members: Sequence[str]) -> Setting:
        if not 1 <= number <= self.config.training.rounds:
            raise BindingError(f"there are {self.config.training.rounds} rounds, got round {number}")
        least = least_scheduled(self.config)
        if len(members) < least:
            raise RefusedError(f"scheduled with {len(members)} members, but at least {least} were agreed on")
        return self.agreed.setting(self.ask.run, number, members, self.member.roster)

    def _attempt(self, client: PlainClient, shown: bytes, work: Callable[[], Work] | None) -> bytes:
        """Return the message of a stage, or the one of a member that leaves, which does not say why."""
        member, number = self.member, client.setting.round
        member.masked, member.declined = False, ""
        try:
            if work is None:
                return client.handle(shown)
            message = self._mask(client, work())
            member.masked = True
            return message
        except MessageError:
            raise
        except (ProtocolError, StoreError) as error:
            member.warn("%s leaves round %d: %s", member.name, number, error)
            if isinstance(error, RefusedError) and error.code == "stale-state":
                self.state.known.stopped = str(error)
            member.declined = str(error)
        except Exception as error:  # user code: the server is not told why it failed
            if member.rehearsal:
                raise
            log.exception("%s leaves round %d", member.name, number)
            member.declined = str(error)
        return client.decline()

    def _mask(self, client: PlainClient, work: Work) -> bytes:
        """Train, and return the masked update."""
        ask, state, member, config = self.ask, self.state, self.member, self.config
        last, moves = state.last(memory.REPORT, ask.round), self.agreed.terms.get("optimiser")
        if last is not None and last.round == ask.round - 1 and not moves and work.m0_hash != last.m:
            raise BindingError("M0 is not the M of the round before")
        state.room(8 * work.m0.size)
        lineage = member.check_pins(ask.run, self.agreed.terms, config, state)
        if lineage is not None:
            lineage.begin(ask.run, config, time.time())
            state.known.lineages[member.roster.lineage] = lineage
        state.put(memory.BEGAN.of(ask.round), work.m0_hash)
        state.save()
        trained = work.train()
        work.check(trained, config)
        weighted = ask.body.weights if member.rehearsal else None
        task = task_of(config, work.m0_hash, work.m0.size, client.setting.members, weighted, work.extra)
        weight = trained.samples if config.weighing == "secret" else None
        delta = np.asarray(trained.delta, np.float32)  # as it is stored
        rounding = None if member.seed is None else seed_from(member.seed, "rounding", ask.round, member.name)
        message = client.masked(ask.body.list, Update(task, delta, weight, rounding))
        state.put(memory.M0.of(ask.round), work.m0)
        state.put(memory.UPDATE.of(ask.round), memory.TrainedUpdate(delta, trained.shape))
        return message

    def _check_told(self, told: Told, client: PlainClient) -> None:
        """Raise unless what is told fits the sum, the M0 and the test pool that this member knows."""
        if (told.slice is None) == self.config.reports:
            raise BindingError("told a test slice in a run whose pool stays shut, or none in another")
        if told.slice is not None and len(told.slice.y) < LEAST_SAMPLES and not self.member.rehearsal:
            raise MessageError(
                f"expected at least {LEAST_SAMPLES} test samples: a report on fewer reveals too much"
            )
        if told.included != client.survivors:
            raise BindingError("the members in the sum are not those we signed for")
        if told.m0_hash != client.task.m0_hash.hex():
            raise BindingError("the server's M0 is not ours")
        if told.slice is not None:
            told.slice.verify(self.agreed.commitment, told.round)

    def _scorer(self, shape: Any) -> Scorer:
        """Return the member's side of scoring, with the sums stored with its last report."""
        scoring = self.config.scoring
        evaluate = self.member.evaluator(shape, scoring.utilities)
        if not isinstance(evaluate, Evaluations):
            evaluate = Evaluations(evaluate)
        scorer = Scorer(self.member.name, evaluate, scoring.game, Sampling(self.agreed.balanced))
        if (last := self.state.last(memory.REPORT, self.ask.round)) is not None:
            scorer.totals_on, scorer.totals = last.totals_on, {**last.totals}
        return scorer

    def _ahead(self, stage: str) -> bytes:
        """Return keys or shares for the next round, or empty bytes if this member is not in it or refuses it.

        A problem with the next round says nothing about this one, so the member answers all the same.
        """
        member, following, body = self.member, self.ask.round + 1, self.ask.body
        declined = member.declined
        try:
            if declined or not member.early:
                return b""
            if stage == "check":
                return self.keys(following, body.next) if member.name in body.next else b""
            client = member.client(self.state, following) if body.keys else None
            if client is None or client.stage != "share":
                return b""
            shares = self._attempt(client, body.keys, None)
            self._keep(client)
            return shares
        except ProtocolError as error:
            log.warning("%s sends nothing ahead for round %d: %s", member.name, following, error)
            return b""
        finally:
            member.declined = declined

    def _new_client(self, setting: Setting) -> PlainClient:
        member, known = self.member, self.state.known
        if member.identity is None or not self.config.secure_aggregation.enabled:
            return PlainClient(setting, member.name, released=known.released)
        from fedmerit.secagg.client import Client

        tokens = known.lineage(member.roster).peers
        keys = {one.name: one.key.hex() for one in member.roster.members}
        return Client(
            *(setting, member.name, member.identity),
            released=known.released,
            counter=self.state.counter,
            peers={name: tokens[key] for name, key in keys.items() if key in tokens},
        )

    def _keep(self, client: PlainClient) -> None:
        """Set what must never be done again, and the client: written before the answer leaves."""
        known, roster, tokens = self.state.known, self.member.roster, client.tokens
        known.released = client.released
        self.state.put(memory.CLIENT.of(client.setting.round), client)
        lineage = known.lineage(roster)
        learnt = {roster.key(peer).hex(): tokens[peer] for peer in client.survivors if peer in tokens}
        if lineage.learn(learnt):
            known.lineages[roster.lineage] = lineage

    def _end_rounds(self, *, before: int) -> None:
        """Take no further part in rounds before this one; delete what is stored of them and not needed."""
        if before > (self.state.get(memory.FLOOR) or 0):
            self.state.put(memory.FLOOR, before)
            keep = memory.KEPT if self.config.settles else ()
            models = (memory.M0.name,) if self.config.judged and not self.member.rehearsal else ()
            self.state.drop_rounds(before=before, keep=(*keep, *models))

    def _began(self, number: int) -> bool:
        """Return whether this member has begun to train in a round."""
        return self.state.get(memory.BEGAN.of(number)) is not None

    def _is_past(self, number: int) -> bool:
        """Return whether a round is one after the last."""
        over: tuple[Value[Any], ...] = (memory.SETTLEMENT, memory.OPENED, memory.JUDGING)
        opened = any(self.state.get(value) is not None for value in over)
        return opened or number > (self.state.get(memory.LAST) or number)
