"""A member's side of a panel: it judges the others on data of its own, and states along what all judges show.

It is the settlement (`Settler`) with as many directions as there are judges, which nobody can recompute: a
judge signs the hash of its column before it sees another one, and its noise follows from a seed that it
committed to when it joined. A member shows its column for one list of hashes only, and answers one set of
columns. What it needs of the rounds it has kept itself; a server shows it those that it missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, MessageError, RefusedError
from fedmerit.identity import canonical
from fedmerit.protocol import memory
from fedmerit.protocol.bench import (
    COORDINATES,
    Showing,
    held_out_body,
    showing_body,
    showings_hash,
)
from fedmerit.protocol.column import INNOVATION, column_hash, dealt, rounded, shown
from fedmerit.protocol.direction import Entry, Manifest, manifest_limit, numeral, slopes_of
from fedmerit.protocol.memory import JudgedRound, OwnProducts, Signatory
from fedmerit.protocol.messages import Ask, Signed, pack, parsed
from fedmerit.protocol.outcome import Model, model_hash, moved
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.protocol.prover import manifest_in, masked
from fedmerit.protocol.settler import Settler
from fedmerit.protocol.witness import drawn_body, nonce_hash
from fedmerit.secagg.quantise import Words

POINTS = 3
"""Gauss-Legendre points of the path on which a judge computes its gradient."""
SHOWING = 4096
"""Most bytes of what a judge signs about its column."""


class Judge(Settler):
    """One member in the panel of one run, while it answers a message."""

    def answer(self, ask: Ask) -> bytes:
        """Answer one exchange of the panel, or of the settlement that follows it."""
        steps: Mapping[str, Callable[[Ask], bytes]] = {
            "judge": self._judge, "judged": self._judged, "column": self._column,
        }  # fmt: skip
        return steps.get(ask.exchange, super().answer)(ask)

    # ------------------------------------------------------------------------------------------------- judge

    def _judge(self, ask: Ask) -> bytes:
        """Compute this member's gradient of a round at the drawn coordinates; say whether it could.

        It cannot (the answer is False) if it lacks the models of the round, which the server then shows.
        """
        manifest = self._rounds_in(ask)
        entry = manifest.entry(ask.round)
        if self.state.get(memory.JUDGED.of(entry.round)) is None:
            self._check_round(entry)
            if (models := self._models(ask, manifest, entry)) is None:
                return pack(False)
            self.state.put(memory.JUDGED.of(entry.round), self._gradient(ask, manifest, entry, *models))
        return pack(True)

    def _rounds_in(self, ask: Ask) -> Manifest:
        """Return the rounds that are judged; raise unless t members drew their coordinates."""
        text = ask.body.manifest
        if len(text) > manifest_limit(self.config.training.rounds, self.member.roster.names):
            raise MessageError(f"rounds to judge in {len(text)} bytes, which are too many")
        manifest = manifest_in(text)
        if (before := self.state.get(memory.JUDGING)) is not None:
            if before != text:
                raise RefusedError("judges other rounds")
            return manifest
        bench = manifest.bench
        if bench is None or bench.judges or (manifest.run, manifest.utility) != (
            self.run, self.config.scoring.utilities[0],
        ):  # fmt: skip
            raise BindingError("rounds of another run, or with judges already")
        self._check_participants(manifest)
        if bench.drawn != min(self.config.panel.coordinates, manifest.coordinates):
            raise BindingError(f"{bench.drawn} coordinates are drawn, which is not what was agreed")
        if bench.blur != self.blur:
            raise BindingError("the noise of what judges learn is not what was agreed")
        body = drawn_body(self.run, COORDINATES, bench.seed)
        drawn = ask.body.drawn.items()
        self.enough(
            (name for name, proof in drawn if self.member.is_signed(name, "drawn", body, proof)),
            "this draw of coordinates",
        )
        if (self.state.get(memory.DRAWN) or {}).get(COORDINATES, bench.seed) != bench.seed:
            raise RefusedError("takes part in another draw")
        self.state.put(memory.JUDGING, text)
        return manifest

    @property
    def blur(self) -> float:
        """The noise of what judges learn; none in a rehearsal."""
        return 0.0 if self.member.rehearsal else self.config.panel.blur

    def _models(self, ask: Ask, manifest: Manifest, entry: Entry) -> tuple[Model, Words] | None:
        """Return M0 and the sum of a round as this member kept them, or as it is shown them now."""
        places = memory.M0.of(entry.round), memory.SUM.of(entry.round)
        m0, x = map(self.state.get, places)
        if m0 is None or x is None:
            if "m0" not in ask.arrays:
                return None
            m0 = ask.array("m0", "<f4", manifest.coordinates, entry.m0)
            x = ask.array("sum", "<u4", self._words(manifest), entry.x)
            if not self.member.rehearsal:  # there they are beside every message
                self.state.room(8 * manifest.coordinates)
                self.state.put(places[0], m0)
                self.state.put(places[1], x)
        return m0, x

    def _check_round(self, entry: Entry) -> None:
        """Raise if a round is not the one that this member took part in: it would judge any model."""
        if self.name in entry.participants:
            if (client := self.member.client(self.state, entry.round)) is None:
                raise BindingError(f"took no part in round {entry.round}")
            if problem := self._contradiction(entry, client):
                raise BindingError(f"round {entry.round}: {problem}")

    def _words(self, manifest: Manifest) -> int:
        """Return how many integers a sum has."""
        return manifest.coordinates + (self.config.weighing == "secret")

    def _gradient(self, ask: Ask, manifest: Manifest, entry: Entry, m0: Model, x: Words) -> JudgedRound:
        """Return what this judge shows of a round, before it is rounded."""
        own, gradients = self._held_out(), self.member.gradients
        assert gradients is not None  # a member without any does not join
        if (model := _model_of(m0, x, entry, manifest)) is None:
            raise BindingError(f"the model of round {entry.round} does not follow from its sum")
        noise = self.member.secret("noise", self.run)
        assert manifest.bench is not None
        halves, seed = dealt(len(own.y), noise), manifest.bench.seed
        shape = self._shape()
        slopes, _, _ = slopes_of(gradients(shape, manifest.utility), m0, model, own, halves, POINTS)
        at = manifest.drawn(entry)
        factor = entry.step / entry.weight
        rows = slopes.blocks[:, at].astype(np.float64) * factor
        before = self._before(ask, manifest, entry, at)
        units, removed = shown(rows, before, self.config.panel.noise, noise, seed, entry.round)
        public = x[at].view(np.int32).astype(np.float64)
        worth = manifest.coordinates / len(at)
        variance = worth**2 * len(at) * float(np.var(public * units))
        return JudgedRound(units, worth * float(public @ removed), variance, slopes.empty, slopes.grand)

    def _shape(self) -> Any:
        """Return what evaluations must know about the model's shape, as this member trained it last."""
        update = self.state.last(memory.UPDATE, self.config.training.rounds + 1)
        return None if update is None else update.shape

    def _held_out(self) -> Slice:
        """Return this judge's own samples; raise unless they are those that it committed to."""
        if self.member.held_out is None:
            raise RefusedError("has no held-out samples to judge by")
        x, y = self.member.held_out()
        committed = self.state.get(memory.HELD_OUT)
        if committed is None or held_out_of(self.member, self.run, x, y) != committed:
            raise RefusedError("its held-out samples are not those that it committed to when it joined")
        return Slice(index=0, x=np.asarray(x), y=np.asarray(y), salts=b"", path=())

    def _before(self, ask: Ask, manifest: Manifest, entry: Entry, at: Indices) -> npt.NDArray[Any]:
        """Return the sums of the rounds before a round, at its coordinates."""
        place = manifest.rounds.index(entry)
        earlier = manifest.rounds[max(0, place - INNOVATION) : place]
        if self.member.rehearsal:  # there sums are beside every message; else a server would choose them
            return ask.array("before", "<i4", len(earlier) * len(at)).reshape(len(earlier), len(at))
        sums = [self.state.get(memory.SUM.of(one.round)) for one in earlier]
        rows = [x[at].view(np.int32) for x in sums if x is not None]
        if len(rows) < len(earlier):
            raise BindingError(f"has not kept the sums of the rounds before round {entry.round}")
        return np.stack(rows) if rows else np.zeros((0, len(at)), np.int32)

    # ------------------------------------------------------------------------------------------------ columns

    def _judged(self, ask: Ask) -> bytes:
        """Round all gradients to eight bits on one scale, and sign the hash of the column."""
        if (before := self.state.get(memory.SHOWING)) is not None:
            return before
        if (text := self.state.get(memory.JUDGING)) is None:
            raise BindingError("has judged nothing")
        manifest = manifest_in(text)
        judged = [self.state.get(memory.JUDGED.of(entry.round)) for entry in manifest.rounds]
        if None in judged:
            raise BindingError("has not judged all rounds")
        rounds = [one for one in judged if one is not None]
        units = [one.units for one in rounds]
        if self.member.falsely is not None:
            units = self.member.falsely(manifest)
        column, scale = rounded(units)
        showing = Showing(
            judge=self.name,
            column=column_hash(column),
            scale=scale,
            samples=len(self._held_out().y),
            first=float(f"{rounds[0].empty:.3f}"),
            last=float(f"{rounds[-1].grand:.3f}"),
            rest=float(f"{math.fsum(one.removed for one in rounds):.3f}"),
            error=float(f"{math.sqrt(math.fsum(one.variance for one in rounds)):.2g}"),
        )
        body = showing_body(self.run, manifest.digest, showing)
        answer = pack(Signed(canonical(body), self.member.sign("judged", body)))
        self.state.put(memory.COLUMN, column)
        self.state.put(memory.SHOWING, answer)
        return answer

    def _column(self, ask: Ask) -> bytes:
        """Show this judge's column, once it is shown the hashes of all columns, its own among them.

        t members must have judged these rounds, so that each round is one that honest members know.
        """
        showings = self._showings(ask.body.showings)
        self.enough(showings, "what they show of these rounds")
        column, own = self.state.get(memory.COLUMN), self.state.get(memory.SHOWING)
        if column is None or own is None or self.name not in showings:
            raise RefusedError("is not among the judges")
        if pack(ask.body.showings[self.name]) != own:
            raise RefusedError("was shown another hash than it signed")
        listed = {name: showings_hash([showing]) for name, showing in showings.items()}
        if self.state.get(memory.LISTED) not in (None, listed):
            raise RefusedError("has shown its column for another list of judges")
        self.state.put(memory.LISTED, listed)
        return pack(column.tobytes())

    def _showings(self, texts: Mapping[str, Signed]) -> dict[str, Showing]:
        """Return what judges show by hash; each signed by its author, about the same rounds."""
        judging, found = self.state.get(memory.JUDGING), {}
        for name, signed in texts.items():
            body = parsed(signed.text, "column", SHOWING)
            if not self.member.is_signed(name, "judged", body, signed.signature):
                raise BindingError("did not sign what it shows", member=name)
            showing = Showing.from_body({key: body.get(key) for key in Showing.__dataclass_fields__})
            facts = str(body.get("facts"))
            if showing.judge != name or body != showing_body(self.run, facts, showing):
                raise BindingError("shows this in another run", member=name)
            if judging is not None and facts != manifest_in(judging).digest:
                raise BindingError("judged other rounds", member=name)
            found[name] = showing
        return found

    # -------------------------------------------------------------------------------------- what is settled

    def _check_shown(self, ask: Ask, manifest: Manifest) -> None:
        """Raise unless the manifest is about the rounds that were judged, with columns that were signed."""
        bench = manifest.bench
        if bench is None:
            raise BindingError("a manifest without judges in a run with a panel")
        judging = self.state.get(memory.JUDGING)
        if judging is not None and judging != canonical(rounds_of(manifest).body()):
            raise BindingError("the manifest is about other rounds than were judged")
        showings = self._showings(ask.body.showings)
        self.enough(showings, "what they show as judges")  # what the others would hand out is divided equally
        if tuple(showings.values()) != bench.judges:
            raise BindingError("the manifest names other judges, or another order of them")
        listed = self.state.get(memory.LISTED)
        if listed is not None and not (
            self.name in showings and {name: showings_hash([one]) for name, one in showings.items()}.items()
            <= listed.items()
        ):  # fmt: skip
            raise RefusedError("has shown its column for another list of judges, or is left out of it")
        columns = ask.arrays.get("columns")
        if columns is None:
            raise MessageError("expected the columns of all judges beside the manifest")
        flat = ask.array("columns", "i1", columns.size)
        shaped = flat.reshape(len(bench.judges), len(manifest.rounds), -1)
        if problem := bench.problem_with(shaped, len(manifest.rounds)):
            raise BindingError(problem)
        self.state.room(shaped.nbytes)
        self.state.put(memory.COLUMNS, shaped)

    def _recompute(self, ask: Ask, manifest: Manifest, entry: Entry) -> OwnProducts:
        """Return this member's products with the directions of a round, or what is wrong with the round."""
        client, update = self.member.brought(self.state, entry.round)
        if problem := self._contradiction(entry, client):
            return OwnProducts(problem=problem)
        columns, x = self.state.get(memory.COLUMNS), self.state.get(memory.SUM.of(entry.round))
        if x is None and "sum" in ask.arrays:
            x = ask.array("sum", "<u4", self._words(manifest), entry.x)
            if not self.member.rehearsal:  # a witness needs it too
                self.state.room(x.nbytes)
                self.state.put(memory.SUM.of(entry.round), x)
        if columns is None or x is None:
            raise BindingError("lacks the columns of the judges, or the sum of this round")
        board = manifest.board(entry, columns, x)
        if board.of_words(x) != entry.product:
            return OwnProducts(problem="the product of the sum with all directions differs from ours")
        if client.task.encoding.length != manifest.coordinates:
            return OwnProducts(problem=f"the model has not {manifest.coordinates} coordinates")
        if self.config.word_bytes == 4:
            return OwnProducts(numeral(board.of_words(client.words(update.delta))))
        pairs, words = masked(client).products(board, update.delta, entry.participants)
        own = masked(client).blurred(board, words, entry.participants)
        return OwnProducts(numeral(own), pairs={peer: numeral(value) for peer, value in pairs.items()})


def held_out_of(member: Signatory, run: str, x: Any, y: Any) -> dict[str, Any]:
    """Return what a member commits to as a judge of a run."""
    nonce = nonce_hash(member.secret(COORDINATES, run))
    return held_out_body(member.secret("held-out", run), x, y, nonce, member.secret("noise", run))


def rounds_of(manifest: Manifest) -> Manifest:
    """Return the rounds of a panel as they are judged, without judges and directions."""
    assert manifest.bench is not None
    entries = tuple(replace(entry, g="", product=0) for entry in manifest.rounds)
    return replace(manifest, rounds=entries, bench=replace(manifest.bench, judges=()))


def _model_of(m0: Model, x: Words, entry: Entry, manifest: Manifest) -> Model | None:
    """Return M of a round, or None if it is not the one of the manifest."""
    signed = x[: manifest.coordinates].view(np.int32).astype(np.float64)
    model: Model = moved(m0, signed * np.float64(entry.step), entry.weight)
    return model if model_hash(model) == entry.m else None
