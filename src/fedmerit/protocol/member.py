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
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import BindingError, FedmeritError, MessageError, ProtocolError, RefusedError, StoreError
from fedmerit.identity import Roster, canonical, content, seed_from
from fedmerit.notes import Note
from fedmerit.protocol.direction import Gradient
from fedmerit.protocol.memory import KEPT, MemberState
from fedmerit.protocol.messages import LEAST_SAMPLES, Ask, Parcel, checked_head, join_body, pack, same
from fedmerit.protocol.outcome import (
    Contribution,
    Evaluate,
    Evaluations,
    Model,
    Scorer,
    Told,
    Work,
    as_array,
    file_name,
    kept_complained,
    kept_head,
    kept_masked,
    kept_released,
    kept_report,
    kept_trained,
)
from fedmerit.protocol.pool import Sampling, samples_in
from fedmerit.protocol.settler import SETTLING, Gradients, Settler
from fedmerit.protocol.terms import (
    FLOWER,
    REHEARSALS,
    Agreed,
    Lineage,
    cautious,
    check_roster,
    check_server,
    check_version,
    config_in,
    least_scheduled,
    lineage_of,
    refuse_rehearsal,
    scheduled_encoding,
)
from fedmerit.secagg.plain import PlainClient
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import Setting, Task, Update

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedmerit.secagg.client import Client

log = logging.getLogger("fedmerit")
REFUSED = "refuses; the reason is in its own log"
AFTER_LAST = "has signed the last head of the run"
KEPT_ROUNDS = 2
"""How many rounds before the latest a member still answers in; it deletes the files of those before."""
Evaluator = Callable[[Any, Sequence[str]], Evaluate]
"""(shape noted by training, names of utilities) -> a function that evaluates a model on a test slice."""

# ---------------------------------------------------------------------------------------------- the member


class Participant:
    """One member, for the time it takes to answer a message.

    Args:
        name: the member's name on the roster.
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
    ) -> None:
        if identity is None and not rehearsal:
            raise RefusedError("has no key: only a rehearsal can do without one", member=name)
        self.name, self.identity, self.roster, self.state = name, identity, roster, state
        self.evaluator, self.accept, self.seed, self.run_config = evaluator, accept, seed, run_config
        self.rehearsal, self.engines, self.gradients = rehearsal, engines, gradients
        self.misstates: float | None = None  # in a rehearsal, the factor by which it misstates
        self.without: tuple[str, ...] = ()  # whose answers its owner agrees to close a settlement without
        self.masked = False  # whether the last answer was a masked update
        self.declined = ""  # why its last answer was to leave the round; never sent
        self.solo: Model | None = None  # the model it trained alone, if it does so
        self.early = True  # whether it sends keys for the next round with its report

    def answer(self, data: Parcel, address: str, work: Callable[[], Work] | None = None) -> bytes:
        """Answer one message.

        Args:
            data: what the coordinator sent.
            address: where the transport says this member is.
            work: reads the model that came with the message; for the exchange ``train``.

        Raises:
            ProtocolError: the message is refused. A member gives its reason only before it has joined.
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
        state = self.state(ask.run)
        if ask.exchange == "join":
            server = ask.get("server", bytes)
            if not self._signed(signed_by, server):
                raise BindingError("not signed by the server it names", stage="join", member=self.name)
            if not self.rehearsal:
                check_version(ask.get("terms", dict), self.name)
            config = config_in(ask.get("terms", dict))  # may be slow, so it is done without the lock
            with state.held():
                answer = self._join(ask, state, address, config, server)
                state.save()
                return answer
        with state.held():
            try:
                state.check()
                kept = state.get("terms")
                if kept is None:
                    raise BindingError("was asked before it joined", stage=ask.exchange, member=self.name)
                if (left := state.get("left")) is not None:
                    raise RefusedError(f"has left the run: {left}", stage=ask.exchange, member=self.name)
                if ask.exchange not in (*SETTLING, "close") and state.get("seen") is not None:
                    raise RefusedError(AFTER_LAST, stage=ask.exchange, member=self.name)
                agreed = Agreed(*kept)
                if self.between(agreed.terms):
                    self._follow(state.roster())
                if agreed.terms.get("roster") != self.roster.hash.hex():
                    raise RefusedError(
                        "the roster has changed since it joined this run, which is over with that: its "
                        "server may have been replaced",
                        stage=ask.exchange,
                        member=self.name,
                    )
                if not self._signed(signed_by, agreed.server):
                    raise BindingError("not signed by the server", stage=ask.exchange, member=self.name)
                answer = self._answer(ask, state, agreed, data.head, work)
                state.save()
                return answer
            except Exception as error:
                if self.rehearsal:
                    raise
                log.warning("%s refuses in round %d: %s", self.name, ask.round, error)
                raise RefusedError(REFUSED, stage=ask.exchange, member=self.name, logged=True) from None

    def _signed(self, signed_by: Callable[[bytes], bool], server: bytes) -> bool:
        return server == b"" if self.identity is None else signed_by(server)

    def sign(self, kind: str, body: Mapping[str, Any]) -> bytes:
        """Sign a record of this member; return empty bytes if it has no key."""
        return b"" if self.identity is None else self.identity.sign(content(self.name, kind, body))

    def _answer(
        self, ask: Ask, state: MemberState, agreed: Agreed, head: bytes, work: Callable[[], Work] | None
    ) -> bytes:
        if ask.exchange == "advertise":
            return self._keys_for(ask.round, state, agreed, ask.get("members", list), ask.run)
        if ask.exchange == "report":
            return self._report(ask, state, agreed, hashlib.sha256(head).digest())
        if ask.exchange == "close":
            return self._close(ask, state, agreed)
        if ask.exchange in SETTLING:
            return Settler(self, state, agreed, ask.run, head).answer(ask)
        return self._stage(ask, state, agreed, work)

    # ----------------------------------------------------------------------------------------- the exchanges

    def _join(self, ask: Ask, state: MemberState, address: str, config: Config, server: bytes) -> bytes:
        terms, pool = ask.get("terms", dict), ask.get("commitment", dict)
        if not self.rehearsal:
            refuse_rehearsal(terms, config, self.engines)
            check_server(terms, server, self.roster, self.name)
        check_roster(terms, config, self.roster, self.name)
        self.accept(config)
        if config.scoring.method != "reports" and self.gradients is None:
            raise RefusedError(
                "asked for a settled run, which needs the gradient of the utility, and this member has none: "
                "pass gradient= where value= is passed, or score by reports (scoring.method)",
                stage="join",
            )
        between = self.between(terms)
        with self._joining("lost what it keeps; its own log says which file"):
            state.check()
            last = state.roster() if between else None
        self._follow(last)
        if (left := state.get("left")) is not None:
            log.warning("%s refuses to join again, it has left the run: %s", self.name, left)
            raise RefusedError(REFUSED, logged=True)
        if state.get("seen") is not None:
            log.warning("%s refuses to join again, it %s", self.name, AFTER_LAST)
            raise RefusedError(REFUSED, logged=True)
        body = join_body(ask.run, address, terms, pool, server, run_config=self.run_config)
        signature = self.sign("join", body)
        kept = state.get("terms")
        if kept is None:
            self._check_pins(ask.run, terms, config, state)
            with self._joining("cannot keep another run; its own log says why"):
                state.open()
                if between:
                    state.put_roster(self.roster.hash)
                state.put("terms", [terms, pool, server])
            if config.training.weights == "secret" and not self.rehearsal:
                log.warning("%s", Note("secret-weights"))
        elif not same(body, join_body(ask.run, address, *kept, run_config=self.run_config)):
            raise RefusedError(
                "asked to agree to terms that differ from those it signed", stage="join", member=self.name
            )
        return pack([self.name, signature, self.run_config])

    def between(self, terms: Mapping[str, Any]) -> bool:
        """Return whether a run is one between machines."""
        return not self.rehearsal and terms.get("engine", FLOWER) not in REHEARSALS

    def _follow(self, last: bytes | None) -> None:
        """Raise RefusedError unless this member's roster follows from the one it last took part under."""
        if last is not None and last not in [one.hash for one in self.roster.chain]:
            raise RefusedError(
                f"took part under the roster {last.hex()}, and its roster file now holds "
                f"{self.roster.hash.hex()}, which does not follow from that one by changes that its members "
                "signed (fedmerit keys propose, sign, adopt); another federation needs another key",
                stage="join",
                member=self.name,
            )

    def _check_pins(
        self, run: str, terms: Mapping[str, Any], config: Config, state: MemberState
    ) -> Lineage | None:
        """Raise RefusedError if earlier runs speak against this one; return None in a rehearsal."""
        if not self.between(terms):
            return None
        lineage = state.lineage(lineage_of(self.roster))
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
            raise RefusedError(refusal, stage="join", logged=True) from None

    def _keys_for(
        self, number: int, state: MemberState, agreed: Agreed, members: Sequence[Any], run: str
    ) -> bytes:
        """Return fresh keys for a round; refuse if this member has gone beyond keys and shares in it."""
        setting = self._setting(number, agreed, members, run)
        if state.get("settlement") is not None or number > (state.get("last") or number):
            raise RefusedError(
                "takes part in no round after the last one", stage="advertise", member=self.name
            )
        if number < (state.get("floor") or 0):
            raise RefusedError("is further than this round", stage="advertise", member=self.name)
        before = self._client(number, state)
        if before is not None and (
            before.stage not in ("share", "masked") or state.get(file_name(number, "began"))
        ):
            raise RefusedError("is past this stage of the round", stage="advertise", member=self.name)
        client = self._new_client(setting, agreed, state)
        message = client.advertise()
        self._keep(state, client)
        self._end_rounds(state, agreed, before=number - KEPT_ROUNDS)
        return message

    def _end_rounds(self, state: MemberState, agreed: Agreed, *, before: int) -> None:
        """Take no further part in rounds before this one; delete what is stored of them and not needed."""
        if before > (state.get("floor") or 0):
            state.put("floor", before)
            state.drop_rounds(before=before, keep=KEPT if agreed.config.settles else ())

    def _setting(self, number: int, agreed: Agreed, members: Sequence[Any], run: str) -> Setting:
        config = agreed.config
        if not 1 <= number <= config.training.rounds:
            raise BindingError(
                f"there are {config.training.rounds} rounds, got round {number}", stage="advertise"
            )
        least = least_scheduled(config)
        if len(members) < least:
            raise RefusedError(
                f"scheduled with {len(members)} members, but at least {least} were agreed on",
                stage="advertise",
            )
        return agreed.setting(run, number, (str(name) for name in members), self.roster)

    def _stage(self, ask: Ask, state: MemberState, agreed: Agreed, work: Callable[[], Work] | None) -> bytes:
        """Answer one stage of secure aggregation; a member who leaves does not tell the server why."""
        client = self._known_client(ask, state)
        due: str = "masked" if ask.exchange == "train" else ask.exchange
        if client.stage != due:
            raise BindingError(f"asked for {due}, but {client.stage} is due", stage=due)
        shown = ask.get("list", bytes)
        if state.get("settlement") is not None or ask.round > (state.get("last") or ask.round):
            raise RefusedError("takes part in no round after the last one", stage=due, member=self.name)
        if due == "masked":
            client.readable(shown)  # fail on unreadable bytes before training
            if work is None or state.get(file_name(ask.round, "began")):
                raise RefusedError("trains once per round, and only with a model to train", stage=due)
        self.masked, self.declined = False, ""
        try:
            if due == "masked":
                assert work is not None
                message = self._mask(ask, state, agreed, client, shown, work())
                self.masked = True
            else:
                message = client.handle(shown)
        except MessageError:
            raise
        except (ProtocolError, StoreError) as error:
            if not self.rehearsal:
                log.warning("%s leaves round %d: %s", self.name, ask.round, error)
            if isinstance(error, RefusedError) and error.code == "stale-state":
                state.stop(str(error))
            message, self.declined = client.decline(), str(error)
        except Exception as error:  # user code: the server is not told why it failed
            if self.rehearsal:
                raise
            log.exception("%s leaves round %d", self.name, ask.round)
            message, self.declined = client.decline(), str(error)
        self._keep(state, client)
        if due == "masked" and self.masked:
            trained = kept_trained(ask.round, state.get(file_name(ask.round, "began")))
            complained = [kept_complained(ask.round, self.name, dealer) for dealer in client.complaints]
            for dealer in client.complaints if not self.rehearsal else ():
                log.warning("%s complains in round %d: %s dealt a bad share", self.name, ask.round, dealer)
            state.add_kept(trained, kept_masked(ask.round, self.name, client.sent(message)), *complained)
        elif due == "unmask" and client.stage == "done":
            state.add_kept(kept_released(ask.round, client.survivors))
            if agreed.config.settles:
                state.put("summed", [*(state.get("summed") or ()), ask.round])
        return message

    def _mask(
        self,
        ask: Ask,
        state: MemberState,
        agreed: Agreed,
        client: Client | PlainClient,
        shown: bytes,
        work: Work,
    ) -> bytes:
        config, setting, m0_hash = agreed.config, client.setting, work.m0_hash
        last = state.last("report", ask.round)
        steady = last is not None and last[2] == ask.round - 1 and not agreed.terms.get("optimiser")
        if steady and m0_hash != last[3]:
            raise BindingError("M0 is not the M of the round before", stage="masked", member=self.name)
        state.room(8 * work.m0.size)
        lineage = self._check_pins(ask.run, agreed.terms, config, state)
        if lineage is not None:
            lineage.begin(ask.run, config, time.time())
            state.put_lineage(lineage_of(self.roster), lineage)
        state.put(file_name(ask.round, "began"), m0_hash)
        state.save()
        trained = work.train()
        work.check(trained, config)
        told = ask.body.get("weights") if self.rehearsal else None
        encoding, public = scheduled_encoding(config, work.m0.size, setting.members, told)
        weights = None if public is None else tuple(public[name] for name in setting.members)
        task = Task(bytes.fromhex(m0_hash), encoding, weights, work.extra)
        weight = trained.samples if config.training.weights == "secret" else None
        delta = np.asarray(trained.delta, np.float32)  # as it is stored
        message = client.masked(shown, Update(task, delta, weight, self._rounding(ask.round)))
        own = weight if public is None else public[self.name]
        state.put(file_name(ask.round, "m0"), work.m0)
        state.put(file_name(ask.round, "update"), [delta, own, trained.shape, told])
        return message

    def contribution(self, run: str, number: int) -> Contribution:
        """Return what this member put into the sum of a round; for a rehearsal's analyses."""
        state = self.state(run)
        client, update = self.summed(state, number)
        encoding, _ = self._encoding(Agreed(*state.get("terms")), client, update)
        return self._contribution(client, update, encoding)

    def summed(self, state: MemberState, number: int) -> tuple[Client | PlainClient, Sequence[Any]]:
        """Return the client and the update of a round; raise BindingError if this member brought none."""
        client, update = self._client(number, state), state.get(file_name(number, "update"))
        if client is None or update is None or client.rounding is None:
            raise BindingError(f"brought nothing to the sum of round {number}", member=self.name)
        return client, update

    def gradient_for(self, shape: Any, utility: str) -> Gradient:
        """Return the gradient of a utility along a path, for models of this shape."""
        assert self.gradients is not None  # a member without any does not join
        return self.gradients(shape, utility)

    def weight(self, run: str, number: int) -> float:
        """Return w_i of a round whose sum includes this member; for a rehearsal's analyses."""
        return _weight(self.state(run).get(file_name(number, "update")))

    def sums(self, run: str, before: int) -> tuple[str, dict[str, npt.NDArray[Any]]] | None:
        """Return test slice and per-sample sums of the last report before a round; None if there is none."""
        return _sums(self.state(run), before)

    def restore_sums(
        self, run: str, number: int, m: str, slice_id: str, sums: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Store what `sums` returned, as the sums after a round; ``m`` is the hash of its model M."""
        self.state(run).put(file_name(number, "report"), [b"", b"", number, m, slice_id, sums])

    def _encoding(
        self, agreed: Agreed, client: Client | PlainClient, update: Sequence[Any]
    ) -> tuple[Encoding, dict[str, float] | None]:
        """Return the encoding of an update's round, and the round's public weights if there are any."""
        length = as_array(update[0], "<f4").size
        return scheduled_encoding(agreed.config, length, client.setting.members, update[3])

    def _contribution(
        self, client: Client | PlainClient, update: Sequence[Any], encoding: Encoding
    ) -> Contribution:
        words = client.words if isinstance(client, PlainClient) else None
        if words is None:
            assert client.rounding is not None
            delta = as_array(update[0], "<f4")
            words = encoding.encode(delta, weight=update[1], seed=client.rounding).words
        return Contribution.of(words, encoding)

    def _report(self, ask: Ask, state: MemberState, agreed: Agreed, asked: bytes) -> bytes:
        """Answer one request per round; repeat the answer if asked again. Another one would reveal more."""
        client, update = self._known_client(ask, state), state.get(file_name(ask.round, "update"))
        if client.stage != "done" or update is None:
            raise BindingError("has nothing to report on", stage="report")
        if (said := state.get(file_name(ask.round, "report"))) is not None and said[0] == asked:
            return bytes(said[1])
        if state.get(file_name(ask.round, "asked")) is not None:
            raise RefusedError("has had another request for a report on this round", stage="report")
        state.put(file_name(ask.round, "asked"), asked)
        state.save()
        m0 = as_array(state.get(file_name(ask.round, "m0")), "<f4")
        encoding, public = self._encoding(agreed, client, update)
        contribution, weight = self._contribution(client, update, encoding), _weight(update)
        try:
            told = ask.told(encoding.words)
            self._check_told(told, agreed, client, state.get(file_name(ask.round, "began")))
            outcome = told.outcome(m0, encoding, public)
            outcome.check(self.name, weight, encoding)
        except FedmeritError as error:
            state.put("left", str(error))
            state.save()
            raise
        scorer = self._scorer(state, agreed, ask.round, update[2])
        report = scorer.report(m0, outcome, contribution, weight, solo=self.solo, direction=self.rehearsal)
        body = report.body(ask.run)
        following = self._next_keys(ask, state, agreed) if self.early else b""
        reply = pack([canonical(body), self.sign("report", body), following])
        said = [asked, reply, ask.round, outcome.bound_to["m"], scorer.totals_on, scorer.totals]
        state.add_kept(kept_head(ask.round - 1, outcome.head), kept_report(ask.round, body, outcome.bound_to))
        state.put(file_name(ask.round, "report"), said)
        if agreed.config.settles:
            state.put(file_name(ask.round, "signed"), dict(outcome.bound_to))
        if told.slice is not None:
            self._remember_samples(state, agreed, samples_in(told.slice))
        self._end_rounds(state, agreed, before=ask.round)
        return reply

    def _remember_samples(self, state: MemberState, agreed: Agreed, samples: set[bytes]) -> None:
        """Note samples that were shown: no settlement, of this run or a later one, may be about them."""
        if agreed.config.settles:
            state.put("shown", sorted({*(state.get("shown") or ()), *samples}))
        if self.between(agreed.terms):
            lineage = state.lineage(lineage_of(self.roster))
            if not samples <= lineage.opened:
                lineage.opened |= samples
                state.put_lineage(lineage_of(self.roster), lineage)

    def _check_told(self, told: Told, agreed: Agreed, client: Client | PlainClient, m0_hash: str) -> None:
        """Raise unless what is told fits the sum, the M0 and the test pool that this member knows."""
        if (told.slice is None) != (agreed.config.scoring.method == "settled"):
            raise BindingError(
                "told a test slice in a run whose pool stays shut, or none in another", stage="report"
            )
        if told.slice is not None and len(told.slice.y) < LEAST_SAMPLES and not self.rehearsal:
            raise MessageError(
                f"expected at least {LEAST_SAMPLES} test samples: a report on fewer reveals too much",
                stage="report",
            )
        if told.included != client.survivors:
            raise BindingError(
                "the members in the sum are not those we signed for", stage="report", member=self.name
            )
        if told.m0_hash != m0_hash:
            raise BindingError("the server's M0 is not ours", stage="report", member=self.name)
        if told.slice is not None:
            told.slice.verify(agreed.commitment, told.round)

    def _scorer(self, state: MemberState, agreed: Agreed, number: int, shape: Any) -> Scorer:
        """Return the member's side of scoring, with the sums stored with its last report."""
        scoring = agreed.config.scoring
        evaluate = self.evaluator(shape, scoring.utilities)
        if not isinstance(evaluate, Evaluations):
            evaluate = Evaluations(evaluate)
        sampling = Sampling.of(agreed.config, agreed.commitment)
        scorer = Scorer(self.name, evaluate, scoring.game, sampling)
        if (last := _sums(state, number)) is not None:
            scorer.totals_on, scorer.totals = last
        return scorer

    def _next_keys(self, ask: Ask, state: MemberState, agreed: Agreed) -> bytes:
        """Return keys for the next round, or empty bytes if this member is not in it or refuses it.

        A problem with the next round says nothing about this one, so the member reports all the same.
        """
        try:
            following = [str(name) for name in ask.get("next", list)]
            if self.name not in following:
                return b""
            return self._keys_for(ask.round + 1, state, agreed, following, ask.run)
        except ProtocolError as error:
            log.warning("%s gives no keys for round %d: %s", self.name, ask.round + 1, error)
            return b""

    def _close(self, ask: Ask, state: MemberState, agreed: Agreed) -> bytes:
        head = checked_head(ask)
        if not 1 <= ask.round <= agreed.config.training.rounds:
            raise BindingError(
                f"there are {agreed.config.training.rounds} rounds, got round {ask.round}", stage="close"
            )
        if (seen := state.get("seen")) is None:
            state.put("seen", [ask.round, head])
            state.add_kept(kept_head(ask.round, head))
        elif seen != [ask.round, head]:
            raise RefusedError("has signed a different last head", stage="close", member=self.name)
        body = {"run": ask.run, "round": ask.round, "head": head}
        return self.sign("seen", body)

    # --------------------------------------------------------------------------------------------- internals

    def _new_client(self, setting: Setting, agreed: Agreed, state: MemberState) -> Client | PlainClient:
        if self.identity is None or not agreed.config.secure_aggregation.enabled:
            return PlainClient(setting, self.name, released=state.released())
        from fedmerit.secagg.client import Client

        known = state.lineage(lineage_of(self.roster)).peers
        return Client(
            *(setting, self.name, self.identity),
            released=state.released(),
            counter=state.counter,
            peers={one.name: known[one.key.hex()] for one in self.roster.members if one.key.hex() in known},
        )

    def _client(self, number: int, state: MemberState) -> Client | PlainClient | None:
        """Return the state machine of a round, or None."""
        kept: Any = state.get(file_name(number, "client"))
        if not isinstance(kept, bytes):
            client: Client | PlainClient | None = kept
            return client
        if self.identity is None:
            return PlainClient.restore(kept, released=state.released())
        from fedmerit.secagg.client import Client

        return Client.restore(kept, self.identity, released=state.released(), counter=state.counter)

    def _known_client(self, ask: Ask, state: MemberState) -> Client | PlainClient:
        if (client := self._client(ask.round, state)) is None:
            raise BindingError(f"has no state of round {ask.round}", stage=ask.exchange, member=self.name)
        return client

    def _keep(self, state: MemberState, client: Client | PlainClient) -> None:
        """Set what must never be done again, and the client: written before the answer leaves."""
        state.put_released(client.released)
        state.put(file_name(client.setting.round, "client"), client)
        lineage = state.lineage(lineage_of(self.roster))
        tokens = client.tokens
        if lineage.learn(
            {self.roster.key(one).hex(): tokens[one] for one in client.survivors if one in tokens}
        ):
            state.put_lineage(lineage_of(self.roster), lineage)

    def _rounding(self, number: int) -> int | None:
        return None if self.seed is None else seed_from(self.seed, "rounding", number, self.name)


def _sums(state: MemberState, before: int) -> tuple[str, dict[str, npt.NDArray[Any]]] | None:
    if (last := state.last("report", before)) is None:
        return None
    return last[4], {name: as_array(kept, "<f8") for name, kept in last[5].items()}


def _weight(update: Sequence[Any]) -> float:
    return 1.0 if update[1] is None else float(update[1])
