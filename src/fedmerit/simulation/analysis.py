"""What a rehearsal computes from plain updates: the ground truth.

Secure aggregation hides members' updates and data, so only the engine that holds them anyway can compute the
utility of every coalition of a round, and of every coalition retrained. Such a run is marked as analysis. The
tables stay in DIR/tables, so that later questions need no second run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmerit.errors import ConfigError, ReportError, StoreError, UndefinedScore
from fedmerit.protocol.outcome import Contribution, Model, Outcome, mean
from fedmerit.protocol.pool import Slice
from fedmerit.scoring.ground_truth import sampled_shapley, shapley
from fedmerit.scoring.scores import cos_model
from fedmerit.scoring.types import Table
from fedmerit.simulation.models import Images, as_tensor, device_of, float32, load_vector
from fedmerit.simulation.setup import Federation, Tell
from fedmerit.simulation.training import trained
from fedmerit.simulation.utilities import Utility, check_for, resolve_all, values_of
from fedmerit.storage.run_folder import write

# -------------------------------------------------------------------------------------------- plain rounds


@dataclass(frozen=True, eq=False)
class PlainRound:
    """A round with each member's update as it was summed, which no server may see."""

    m0: Model  # that all members started from
    outcome: Outcome
    weights: tuple[float, ...]  # w_i, in the order of ``outcome.included``
    device: torch.device  # where models are evaluated
    _contribution: Callable[[str], Contribution]

    def contribution(self, name: str) -> Contribution:
        """Return w_i d_i after rounding to integers; under masks it is computed anew."""
        return self._contribution(name)

    def update(self, name: str) -> Model:
        """Return U_i = w_i d_i / W."""
        return self.contribution(name).update(self.outcome.total_weight)

    @cached_property
    def updates(self) -> Tensor:
        """U_i of the members in the sum, shape (N, P), on the device; all analyses share them."""
        rows = torch.empty(len(self.outcome.included), self.m0.size, device=self.device)
        for row, name in zip(rows, self.outcome.included, strict=True):
            row.copy_(as_tensor(self.update(name)))
        return rows


class Analysis(Protocol):
    """Something that looks at plain rounds, which only a rehearsal has."""

    def summed(self, plain: PlainRound) -> Mapping[str, Any] | None:
        """Return what the ledger should record about a round, if anything; called after its reports."""


# ----------------------------------------------------------------------------------------- coalition models

CHUNK = 8
"""Coalition models that are computed at a time."""
Masks = npt.NDArray[np.int64]
"""Coalitions as bitmasks: bit i is set if and only if client i belongs to the coalition."""


def coefficients(
    masks: Sequence[int] | Masks, weights: Sequence[float], game: str
) -> npt.NDArray[np.float64]:
    r"""Return the matrix (K, N) that turns updates into coalition models, M(S) = M_0 + \sum_i c_{S,i} U_i.

    .. math:: c_{S,i} = 1[i \in S] \quad\text{(additive)}, \qquad
              c_{S,i} = 1[i \in S] \frac{\sum_j w_j}{\sum_{j \in S} w_j} \quad\text{(renormalised)}

    where :math:`U_i = w_i (M_i - M_0) / \sum_j w_j`, so that the renormalised model is the weighted mean of
    the local models of S. Both games agree on the empty and on the grand coalition.

    >>> coefficients([0, 1, 3], [1, 3], "renormalised")
    array([[0., 0.],
           [4., 0.],
           [1., 1.]])
    """
    w = np.asarray(weights, dtype=np.float64)
    bits = np.asarray(masks, dtype=np.int64)[:, None] >> np.arange(len(w)) & 1
    member: npt.NDArray[np.float64] = bits.astype(np.float64)
    if game == "renormalised":
        inside = member @ w
        member *= np.divide(w.sum(), inside, out=np.zeros_like(inside), where=inside > 0)[:, None]
    return member


def coalition_name(mask: int, clients: Sequence[str]) -> str:
    """Return the names of a coalition's clients as text for messages.

    >>> coalition_name(5, ["A", "B", "C"])
    '{A, C}'
    """
    return "{" + ", ".join(client for i, client in enumerate(clients) if mask >> i & 1) + "}"


@dataclass(frozen=True, eq=False)
class Game:
    """The coalition models of one round: M0 (P,), U_i (N, P), w_i (N,), how they combine, and names."""

    m0: Tensor
    updates: Tensor
    weights: Sequence[float]
    kind: str
    clients: Sequence[str]

    @classmethod
    def of(cls, plain: PlainRound, kind: str) -> Game:
        """Return the game of a round, on the device of its updates."""
        m0 = as_tensor(plain.m0).to(plain.updates.device)
        return cls(m0, plain.updates, plain.weights, kind, plain.outcome.included)

    def vectors(self, masks: Masks) -> Tensor:
        """Return the models of these coalitions, shape (K, P)."""
        c = torch.as_tensor(coefficients(masks, self.weights, self.kind), dtype=torch.float32)
        with float32():
            return torch.addmm(self.m0.expand(len(c), -1), c.to(self.m0.device), self.updates)


class Evaluator:
    """Evaluates coalition models of one architecture on one test set, one after another.

    ``model`` gives architecture and device, and is not changed. ``how`` is what the ledger records of how the
    last coalitions were evaluated.
    """

    def __init__(
        self, model: nn.Module, x: Images, y: npt.NDArray[Any] | Tensor, utilities: Sequence[str | Utility]
    ) -> None:
        self.model, self.device = copy.deepcopy(model), device_of(model)
        self.utilities = resolve_all(utilities)
        self.x = as_tensor(x).to(self.device)
        self.labels = check_for(self.utilities, y, len(x)).to(self.device)
        self.how: dict[str, Any] = {"method": "exact"}

    def tables(self, game: Game, tell: Tell | None = None) -> dict[str, Table]:
        """Return the utility of every coalition of a round, one table per utility."""
        values = self.values(game, np.arange(1 << len(game.clients)), tell)
        return {u.name: Table(values[:, i], tuple(game.clients)) for i, u in enumerate(self.utilities)}

    def values(self, game: Game, masks: Masks, tell: Tell | None = None) -> npt.NDArray[np.float64]:
        """Return every utility of these coalitions of a round, shape (K, U)."""
        values = np.empty((len(masks), len(self.utilities)))
        for start in range(0, len(masks), CHUNK):
            chunk = masks[start : start + CHUNK]
            for row, (mask, vector) in enumerate(zip(chunk, game.vectors(chunk), strict=True), start):
                values[row] = self.measure(vector, coalition_name(int(mask), game.clients))
            if tell:
                tell(min(start + CHUNK, len(masks)), len(masks))
        return values

    def measure(self, vector: Tensor, coalition: str) -> list[float]:
        """Return the value of every utility for the model of a coalition, which errors name."""
        load_vector(self.model, vector)
        try:
            measured = values_of(self.model, self.x, self.labels, self.utilities)
        except ReportError as error:
            raise ReportError(f"coalition {coalition}: {error.problem}") from error
        return [mean(np.atleast_1d(values)) for values in measured.values()]


# -------------------------------------------------------------------------------------------- ground truth

MOST_EXACT = 16
"""With more members than this, the Shapley values of rounds are sampled."""
BUDGET = 4000
"""Coalitions evaluated per round when they are sampled."""

RETRAINING = "retraining.jsonl"
"""The file of the coalitions that are trained again, a line each."""


@dataclass(eq=False)
class Truth:
    """An `Analysis` of plain rounds that computes and keeps the ground truth that a config asks for."""

    federation: Federation
    folder: Path  # where the tables go
    tell: Tell = lambda done, total: None  # of a round's coalitions
    most_exact: int = MOST_EXACT  # members, for whom a round's Shapley values are exact
    budget: int = BUDGET  # coalitions evaluated per round when they are sampled
    _evaluator: tuple[str, Evaluator] | None = None

    def __post_init__(self) -> None:
        config, members = self.federation.config, len(self.federation.names)
        if "shapley" in config.scoring.truth:
            if members > MOST_EXACT:
                problem = f"trains 2^N models; at most {MOST_EXACT} members, got {members}"
                raise ConfigError.at("scoring.truth", f'"shapley" {problem}')
            if config.weighing not in ("uniform", "roster"):
                expected = f'training.weights = "uniform" or a table, got "{config.weighing}"'
                raise ConfigError.at(
                    "scoring.truth", f'"shapley" retrains with fixed weights: expected {expected}'
                )
        self.folder.mkdir(exist_ok=True)

    # ---------------------------------------------------------------------------------------- a round

    def summed(self, plain: PlainRound) -> dict[str, Any] | None:
        """Evaluate and save all coalition models of a round; return the record for the ledger."""
        config, outcome = self.federation.config, plain.outcome
        if not config.values_coalitions(outcome.round):
            return None
        evaluator = self.evaluator(self.federation.truth_slice(outcome.round))
        game = Game.of(plain, config.scoring.game)
        members = len(outcome.included)
        self.tell(0, 1 << members if members <= self.most_exact else self.budget)
        if members > self.most_exact:
            arrays, record = self._sampled(evaluator, game, outcome.round)
        else:
            tables = evaluator.tables(game, self.tell)
            arrays = {f"table/{name}": table.values for name, table in tables.items()}
            record = {**evaluator.how, "coalitions": 1 << members}
        with contextlib.suppress(UndefinedScore):  # a model that is zero has no cosine
            arrays["cos-model"] = cos_model(plain.updates.cpu().numpy(), plain.m0).values
        return {**record, "sha256": self._save(outcome.round, outcome.included, arrays)}

    def evaluator(self, shown: Slice) -> Evaluator:
        """Return the evaluator of coalitions on a test slice."""
        if self._evaluator is None or self._evaluator[0] != shown.id:
            self._evaluator = shown.id, self.new_evaluator(shown)
        return self._evaluator[1]

    def new_evaluator(self, shown: Slice) -> Evaluator:
        """Return an evaluator on a test slice that was not seen before."""
        return Evaluator(self.federation.network, shown.x, shown.y, self.federation.utilities)

    def _sampled(
        self, evaluator: Evaluator, game: Game, number: int
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        seed = self.federation.seed("sampled", number)
        drawn: list[int] = []

        def draw(mask: int) -> float:
            drawn.append(mask)  # no value influences the draw, so all can be evaluated at once
            return 0.0

        sampled_shapley(draw, game.clients, budget=self.budget, seed=seed)
        values = dict(zip(drawn, evaluator.values(game, np.array(drawn), self.tell), strict=True))
        arrays = {}
        for place, utility in enumerate(evaluator.utilities):

            def value(mask: int, place: int = place) -> float:
                return float(values[mask][place])

            scores = sampled_shapley(value, game.clients, budget=self.budget, seed=seed)
            arrays[f"sampled/{utility.name}"] = scores.values
            if scores.stderr is not None:  # enough orders were sampled
                arrays[f"stderr/{utility.name}"] = scores.stderr
        return arrays, {"method": "sampled", "coalitions": len(values)}

    def _file(self, number: int | None) -> Path:
        """Return the file of a round's tables; None: of the coalitions that were trained again."""
        return self.folder / ("retrained.npz" if number is None else f"round-{number:04d}.npz")

    def _save(self, number: int | None, clients: Sequence[str], arrays: Mapping[str, Any]) -> str:
        buffer = io.BytesIO()
        np.savez(buffer, clients=np.array(clients), **arrays)
        write(self._file(number), buffer.getvalue())
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    # ----------------------------------------------------------------------- every coalition, retrained

    def retrain(self, tell: Tell) -> None:
        """Train every coalition from the first model with the run's own seeds; resume after a kill."""
        federation, names = self.federation, self.federation.names
        log = self.folder / RETRAINING
        known = _finished(log)
        evaluator = self.evaluator(federation.truth_slice(federation.config.training.rounds))
        utilities = [utility.name for utility in evaluator.utilities]
        missing = [mask for mask in range(1 << len(names)) if mask not in known]
        with log.open("a", encoding="utf-8") as file:
            for mask, vector in self.retrained(missing, tell):
                measured = evaluator.measure(vector, coalition_name(mask, names))
                values = dict(zip(utilities, measured, strict=True))
                file.write(json.dumps({"coalition": mask, "utilities": values}) + "\n")
                file.flush()
                os.fsync(file.fileno())
                known[mask] = values
        every = [known[mask] for mask in range(1 << len(names))]
        tables = {f"table/{name}": np.array([values[name] for values in every]) for name in utilities}
        self._save(None, names, tables)

    def retrained(self, masks: Sequence[int], tell: Tell) -> Iterator[tuple[int, Tensor]]:
        r"""Yield each of these coalitions with its own federation's model after R rounds.

        .. math:: M_{r+1}(S) = M_r(S) + \sum_{i \in S} w_i (T_{r,i}(M_r(S)) - M_r(S)) / \sum_{i \in S} w_i

        where T_{r,i} is the local training of client i with the run's seed of (round, client).
        """
        federation, rounds = self.federation, self.federation.config.training.rounds
        start = as_tensor(federation.first).to(federation.device)
        in_first: dict[str, Tensor] = {}  # all coalitions start the first round from the same model
        done, total = 0, rounds * sum(mask.bit_count() for mask in masks)
        if total:
            tell(done, total)
        for mask in masks:
            model, shares = start, self.shares(mask)
            for number in range(1, rounds + 1):
                move = torch.zeros_like(model)
                for client, share in zip(federation.clients, shares, strict=True):
                    if not share:
                        continue
                    local = in_first.get(client.name) if number == 1 else None
                    if local is None:
                        seed = federation.seed("train", number, client.name)
                        data = client.x, client.y, federation.training
                        local = as_tensor(trained(federation.network, model, *data, seed)).to(model.device)
                    if number == 1:
                        in_first[client.name] = local
                    move += share * (local - model)
                    done += 1
                    tell(done, total)
                model = model + move
            yield mask, model

    def shares(self, mask: int) -> Tensor:
        """Return every client's part of a coalition's sum, shape (N,): w_i over the sum of its members' w."""
        names, roster = self.federation.names, self.federation.config.roster_weights
        weights = [float(roster[name]) if roster else 1.0 for name in names]
        inside = [weight * (mask >> i & 1) for i, weight in enumerate(weights)]
        shares = torch.tensor(inside, dtype=torch.float64, device=self.federation.device)
        return (shares / shares.sum()).float() if mask else shares.float()

    # ------------------------------------------------------------------------------------------ the values

    def values(self, scored: Sequence[int]) -> dict[str, dict[str, Any]]:
        r"""Return, per utility, MR-SV over the scored rounds, the values of each round, and the retrained SV.

        ``ROUND-SV`` is the Shapley value of the last round alone. ``COS-MODEL``, beside MR-SV, is that score
        summed over the scored rounds.

        Where rounds were sampled, ``se_MR-SV`` is the sampling error over R rounds, each with its own seed:

        .. math:: \frac1R \sqrt{\sum_t s_t(i)^2}
        """
        config, names = self.federation.config, self.federation.names
        truth, last = config.scoring.truth, self._file(config.training.rounds)
        paths = [self._file(number) for number in scored] if "mr-shapley" in truth else []
        rounds = [_Tables(path) for path in paths]
        final = _Tables(last) if "round-shapley" in truth and last.exists() else None
        again = _Tables(self._file(None)) if self._file(None).exists() else None
        scores: dict[str, dict[str, Any]] = {}
        for utility in (utility.name for utility in self.federation.utilities):
            entry = scores[utility] = {}
            if rounds:
                values = [tables.shapley(utility) for tables in rounds]
                entry["MR-SV"] = [float(np.mean([of.get(name, 0.0) for of in values])) for name in names]
                errors = [tables.errors(utility) for tables in rounds]
                if any(errors) and None not in errors:
                    own_errors = [[(of or {}).get(name, 0.0) for of in errors] for name in names]
                    entry["se_MR-SV"] = [math.hypot(*own) / len(rounds) for own in own_errors]
                cosines = [tables.named("cos-model") for tables in rounds]
                if all(cosines):
                    entry["COS-MODEL"] = [math.fsum(of.get(name, 0.0) for of in cosines) for name in names]
                entry["rounds"] = [[of.get(name) for name in names] for of in values]
            for score, tables in (("ROUND-SV", final), ("SV", again)):
                if tables is not None:
                    of = tables.shapley(utility)
                    entry[score] = [of.get(name, 0.0) for name in names]
        return scores


class _Tables:
    """The tables of a round, or of the coalitions that were trained again, as they were saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._refusing_damage(), np.load(path, allow_pickle=False) as content:
            self.arrays = dict(content)
            self.clients = [str(name) for name in self.arrays["clients"]]

    @contextlib.contextmanager
    def _refusing_damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError, ValueError) as error:
            raise StoreError(f"{self.path}: not a table of coalitions: {error}") from error

    def named(self, key: str) -> dict[str, float]:
        """Return an array by the clients' names; empty if it is not there."""
        values = self.arrays[key].tolist() if key in self.arrays else []
        return dict(zip(self.clients, values, strict=False))

    def shapley(self, utility: str) -> dict[str, float]:
        """Return the Shapley values, or the sampled ones, by name."""
        if sampled := self.named(f"sampled/{utility}"):
            return sampled
        with self._refusing_damage():
            values = shapley(Table(self.arrays[f"table/{utility}"], tuple(self.clients))).values
            return dict(zip(self.clients, values.tolist(), strict=True))

    def errors(self, utility: str) -> dict[str, float] | None:
        """Return the standard errors of sampled values by name; empty if exact, None if they are unknown."""
        if f"sampled/{utility}" not in self.arrays:
            return {}
        return self.named(f"stderr/{utility}") or None


def _finished(log: Path) -> dict[int, dict[str, float]]:
    """Return the coalitions in the log, and remove a last line that a kill cut short."""
    known, whole = dict[int, dict[str, float]](), 0
    if not log.exists():
        return known
    with log.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                known[int(entry["coalition"])] = dict(entry["utilities"])
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{log}: line {len(known) + 1} cannot be read: {error}") from error
            whole += len(line)
    os.truncate(log, whole)
    return known
