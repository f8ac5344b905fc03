"""Ground truth for a run: the utility of every coalition in every round, and of every coalition retrained.

It needs the members' plain updates or data, which secure aggregation hides. So only the engine that holds
them anyway can compute it, and the run is marked as analysis. The tables stay in DIR/tables, so that later
questions need neither a second run nor a GPU.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmerit.errors import ConfigError, FedmeritError, NoGradient, StoreError, UndefinedScore
from fedmerit.identity import exact
from fedmerit.notes import Note
from fedmerit.protocol.outcome import Model, mean
from fedmerit.protocol.pool import Slice
from fedmerit.protocol.terms import weights_of
from fedmerit.scoring.ground_truth import sampled_shapley, shapley
from fedmerit.scoring.scores import SCORES, cos_model
from fedmerit.scoring.types import Reports, Table
from fedmerit.simulation.coalitions import Evaluator, retrain_tables
from fedmerit.simulation.contributions import Evaluate, cosine_of, updates_on
from fedmerit.simulation.direction import BLOCKS, direction, missing_gradient
from fedmerit.simulation.models import as_tensor, load_vector
from fedmerit.simulation.setup import Federation
from fedmerit.simulation.transport import PlainRound
from fedmerit.simulation.utilities import Utility
from fedmerit.storage.run_folder import write

# ------------------------------------------------------------------------------------- weights from scores


def from_this_round(
    federation: Federation,
    number: int,
    start: Model,
    trained: Mapping[str, Model],
    score: str,
    evaluate: Evaluate | None = None,
) -> dict[str, float]:
    """Return weights from this round's own scores under plain averaging. For analysis only.

    Args:
        federation: gives the test pool and the utilities.
        number: the round.
        start: the model that all members started from.
        trained: the local model of each member.
        score: the score that becomes the weights.
        evaluate: replaces the federation's own evaluation.
    """
    weights = dict.fromkeys(trained, 1.0)
    reports = reports_under_plain_averaging(federation, number, start, trained, evaluate)
    if reports is None:
        return weights
    return weights | weights_of(SCORES[score].function(reports).raw, reports.clients)


def reports_under_plain_averaging(
    federation: Federation,
    number: int,
    start: Model,
    trained: Mapping[str, Model],
    evaluate: Evaluate | None = None,
    utility: str | None = None,
) -> Reports | None:
    """Return the reports that a round under plain averaging would have, None with fewer than 2 finite models.

    ``utility`` is by default the one that members are paid by.
    """
    finite = {name: model for name, model in trained.items() if bool(np.isfinite(model).all())}
    if len(finite) < 2:
        return None
    shown, utility = federation.pool.slice(number), utility or federation.utilities[0].name
    first = as_tensor(start).to(federation.device)
    updates = updates_on(federation.device, start, finite.values())
    change = torch.zeros_like(first, dtype=torch.float64)
    for update in updates:
        change += update
    grand = (first + change).float()

    def value(model: Tensor) -> float:
        return mean((evaluate or federation.evaluate)(model, shown)[utility])

    return Reports(
        empty=value(first),
        grand=value(grand),
        alone=np.array([value(first + update) for update in updates]),
        without=np.array([value(grand - update) for update in updates]),
        clients=tuple(finite),
        cosine=[cosine_of(update.double(), change) for update in updates],  # type: ignore[arg-type]
        round=number,
    )


# ------------------------------------------------------------------------------- along a public direction


@dataclass(eq=False)
class Phi:
    """An `Analysis` of plain rounds: everybody's Aumann-Shapley score, per utility that has a gradient.

    The direction of a round is public. A member's scalar products with it are numbers that the member itself
    could state.

    Args:
        federation: network, test pool and utilities.
        utilities: those to score by; None takes all of the federation.
        blocks: of the test set, for standard errors; at most one per test sample.

    Attributes:
        rounds: per round and utility, what was found; see :meth:`summed`.
        without: per utility that has no direction, why, and since which round; 0 is before the first.
    """

    federation: Federation
    utilities: Sequence[Utility] | None = None
    blocks: int = BLOCKS
    rounds: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    without: dict[str, tuple[FedmeritError, int]] = field(default_factory=dict)
    _shown: tuple[str, Any, Any] | None = None
    _told: int = 0

    def __post_init__(self) -> None:
        if self.utilities is None:
            self.utilities = self.federation.utilities
        shown, network = self.federation.pool.first, self.federation.network
        load_vector(network, self.federation.first)
        for utility in self.utilities:
            if why := missing_gradient(network, shown.x, shown.y, utility):
                self.without[utility.name] = why, 0

    def summed(self, plain: PlainRound) -> None:
        """Keep, per utility, the products of everybody's update with every block's gradient, shape (B, N).

        Beside them: the participants, the blocks' sizes, whether blocks have the same mix of classes, the
        gain v(M) - v(M0), what the quadrature leaves of it (``rest``), and the points of the path.
        """
        outcome, device = plain.outcome, self.federation.device
        shown = outcome.slice
        assert shown is not None  # runs without reports have no such analysis
        if self._shown is None or self._shown[0] != shown.id:
            self._shown = shown.id, as_tensor(shown.x).to(device), as_tensor(shown.y).to(device)
        _, x, y = self._shown
        found: dict[str, dict[str, Any]] = {}
        for utility in self.utilities or ():
            if utility.name in self.without:
                continue
            try:
                way = direction(
                    self.federation.network,
                    plain.m0,
                    outcome.model,
                    x,
                    y,
                    utility,
                    blocks=min(self.blocks, len(y)),
                    balanced=self.federation.pool.balanced,
                )
            except FedmeritError as error:  # a sum over the other rounds would not be what it says
                self.without[utility.name] = error, outcome.round
                continue
            found[utility.name] = {
                "participants": list(outcome.included),
                "blocks": way.products(plain.updates).tolist(),
                "sizes": list(way.sizes),
                "stratified": way.stratified,
                "gain": way.gain,
                "rest": way.rest,
                "points": way.points,
            }
        self.rounds[outcome.round] = found

    def recorded(self, number: int, utilities: Sequence[str]) -> dict[str, Any]:
        """Return what the ledger holds of a round: for each of these utilities, every member's products."""
        found = {}
        for name, one in self.rounds[number].items():
            if name in utilities:
                columns = zip(*one["blocks"], strict=True)
                own = zip(one["participants"], columns, strict=True)
                found[name] = {
                    "blocks": {client: [exact(value) for value in values] for client, values in own},
                    **{key: one[key] for key in ("sizes", "stratified", "points")},
                    **{key: exact(one[key]) for key in ("gain", "rest")},
                }
        return found

    def new_notes(self) -> Iterator[Note]:
        """Yield a note on each utility that is left out and was not yet named."""
        new = list(self.without.items())[self._told :]
        self._told = len(self.without)
        for name, (error, number) in new:
            if number or not isinstance(error, NoGradient):
                yield Note("phi-failed", utility=name, round=number)
            elif error.coordinate:
                yield Note("phi-no-coordinate", utility=name, what=error.coordinate)
            else:
                yield Note("phi-no-gradient", utility=name)


# -------------------------------------------------------------------------------------------- ground truth

MOST_EXACT = 16
"""With more members than this, the Shapley values of rounds are sampled."""
BUDGET = 4000
"""Coalitions evaluated per round when they are sampled."""

RETRAINING = "retraining.jsonl"
"""The file of the coalitions that are trained again, a line each."""

Tell = Callable[[int, int], None]


@dataclass(eq=False)
class Truth:
    """An `Analysis` of plain rounds that computes and keeps the ground truth that a config asks for.

    Args:
        federation: data, network and settings.
        folder: where the tables go.
        tell: called with (done, total) coalitions of a round.
        evaluator: makes the evaluator of coalitions on a test slice; None takes the usual one.
        most_exact: the most members for whom a round's Shapley values are exact.
        budget: coalitions evaluated per round when they are sampled.
        stacked: whether many coalitions are retrained at a time; None does so on a GPU.
    """

    federation: Federation
    folder: Path
    tell: Tell = lambda done, total: None
    evaluator: Callable[[Federation, Slice], Evaluator] | None = None
    most_exact: int = MOST_EXACT
    budget: int = BUDGET
    stacked: bool | None = None
    _evaluators: dict[str, Evaluator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, n = self.federation.config, len(self.federation.names)
        if "shapley" in config.scoring.truth:
            if n > MOST_EXACT:
                raise ConfigError.at(
                    "scoring.truth", f'"shapley" trains 2^N models; at most {MOST_EXACT} members, got {n}'
                )
            if config.training.weights not in ("uniform", "roster"):
                raise ConfigError.at(
                    "scoring.truth",
                    '"shapley" retrains with fixed weights: expected training.weights = '
                    f'"uniform" or "roster", got "{config.training.weights}"',
                )
        self.folder.mkdir(exist_ok=True)

    # ---------------------------------------------------------------------------------------- a round

    def summed(self, plain: PlainRound) -> dict[str, Any] | None:
        """Evaluate and save all coalition models of a round; return the record for the ledger."""
        if not self.federation.config.values_coalitions(plain.outcome.round):
            return None
        outcome = plain.outcome
        evaluator, game = (
            self.of_slice(self.federation.truth_slice(outcome.round)),
            self.federation.config.scoring.game,
        )
        if len(outcome.included) > self.most_exact:
            return self._sampled(evaluator, plain)
        tables, record = evaluator.tables(
            plain.m0, plain.updates, plain.weights, game=game, clients=outcome.included, progress=self.tell
        )
        arrays = {f"table/{name}": table.values for name, table in tables.items()} | _cosines(plain)
        facts = {
            "method": record.method,
            "precision": record.precision,
            "deviation": {name: exact(value) for name, value in record.deviation.items()},
            "coalitions": record.coalitions,
        }
        return {**facts, "sha256": self._save(f"round-{outcome.round:04d}.npz", outcome.included, arrays)}

    def of_slice(self, shown: Slice) -> Evaluator:
        """Return the evaluator of coalitions on a test slice."""
        if shown.id not in self._evaluators:  # the fastest strategy serves all rounds on these samples
            make = self.evaluator or _usual
            self._evaluators = {shown.id: make(self.federation, shown)}
        return self._evaluators[shown.id]

    def _sampled(self, evaluator: Evaluator, plain: PlainRound) -> dict[str, Any]:
        outcome = plain.outcome
        game = evaluator.game(
            plain.m0,
            plain.updates,
            plain.weights,
            game=self.federation.config.scoring.game,
            clients=outcome.included,
            total=self.budget,
        )
        seed = self.federation.seed("sampled", outcome.round)
        asked: list[int] = []

        def ask(mask: int) -> float:
            asked.append(mask)  # no value influences the draw, so all can be evaluated at once
            return 0.0

        sampled_shapley(ask, outcome.included, budget=self.budget, seed=seed)
        seen = dict(zip(asked, game.values(np.array(asked)), strict=True))
        arrays = _cosines(plain)
        for k, utility in enumerate(self.federation.utilities):

            def value(mask: int, k: int = k) -> float:
                return float(seen[mask][k])

            found = sampled_shapley(value, outcome.included, budget=self.budget, seed=seed).scores
            arrays[f"sampled/{utility.name}"] = found.values
            if found.stderr is not None:  # enough orders were sampled
                arrays[f"stderr/{utility.name}"] = found.stderr
        digest = self._save(f"round-{outcome.round:04d}.npz", outcome.included, arrays)
        return {"method": "sampled", "coalitions": len(seen), "sha256": digest}

    def _save(self, name: str, clients: Sequence[str], arrays: Mapping[str, npt.NDArray[Any]]) -> str:
        buffer = io.BytesIO()
        np.savez(buffer, clients=np.array(clients), **arrays)  # type: ignore[arg-type]
        write(self.folder / name, buffer.getvalue())
        return hashlib.sha256(buffer.getvalue()).hexdigest()

    # ----------------------------------------------------------------------- every coalition, retrained

    def retrain(self, tell: Tell) -> None:
        """Train every coalition from the first model with the run's own seeds; resume after a kill."""
        federation, config = self.federation, self.federation.config
        log = self.folder / RETRAINING
        known = _finished(log)
        names = federation.names
        seeds = [
            [federation.seed("train", number, name) for name in names]
            for number in range(1, config.training.rounds + 1)
        ]
        roster = config.training.roster_weights
        weights = [float(roster[name]) if roster else 1.0 for name in names]
        last = federation.truth_slice(config.training.rounds)
        with log.open("a", encoding="utf-8") as file:

            def store(mask: int, values: Mapping[str, float]) -> None:
                file.write(json.dumps({"coalition": mask, "utilities": dict(values)}) + "\n")
                file.flush()
                os.fsync(file.fileno())

            tables, how = retrain_tables(
                federation.network,
                federation.first,
                [(client.x, client.y) for client in federation.clients],
                federation.training,
                seeds,
                weights,
                last.x,
                last.y,
                federation.utilities,
                clients=names,
                known=known,
                store=store,
                stacked=self.stacked,
                progress=tell,
            )
        self._save("retrained.npz", names, {f"table/{name}": table.values for name, table in tables.items()})
        write(self.folder / "retraining.json", (json.dumps(asdict(how), indent=1) + "\n").encode())

    # ------------------------------------------------------------------------------------------ the values

    def values(self, scored: Sequence[int]) -> dict[str, dict[str, Any]]:
        r"""Return, per utility, MR-SV over the scored rounds, the values of each round, and the retrained SV.

        ``ROUND-SV`` is the Shapley value of the last round alone. ``COS-MODEL``, beside MR-SV, is that score
        summed over the scored rounds.

        Where rounds were sampled, ``se_MR-SV`` is the sampling error over R rounds, each with its own seed:

        .. math:: \frac1R \sqrt{\sum_t s_t(i)^2}
        """
        names, found = self.federation.names, {}
        for utility in self.federation.utilities:
            one: dict[str, Any] = {}
            if "mr-shapley" in self.federation.config.scoring.truth and scored:
                paths = [self.folder / f"round-{number:04d}.npz" for number in scored]
                rounds = [_value(path, utility.name) for path in paths]
                one["MR-SV"] = [
                    float(np.mean([values.get(name, 0.0) for values in rounds])) for name in names
                ]
                errors = [_errors(path, utility.name) for path in paths]
                if any(errors) and None not in errors:
                    own_errors = [[(each or {}).get(name, 0.0) for each in errors] for name in names]
                    one["se_MR-SV"] = [math.hypot(*own) / len(paths) for own in own_errors]
                cosines = [_cosines_in(path) for path in paths]
                if all(cosines):
                    one["COS-MODEL"] = [math.fsum(each.get(name, 0.0) for each in cosines) for name in names]
                one["rounds"] = [[values.get(name) for name in names] for values in rounds]
            last = self.folder / f"round-{self.federation.config.training.rounds:04d}.npz"
            if "round-shapley" in self.federation.config.scoring.truth and last.exists():
                values = _value(last, utility.name)
                one["ROUND-SV"] = [values.get(name, 0.0) for name in names]
            if (self.folder / "retrained.npz").exists():
                values = _value(self.folder / "retrained.npz", utility.name)
                one["SV"] = [values[name] for name in names]
            found[utility.name] = one
        return found


def _usual(federation: Federation, shown: Slice) -> Evaluator:
    return Evaluator(federation.network, shown.x, shown.y, federation.utilities)


def _value(path: Path, utility: str) -> dict[str, float]:
    """Return the Shapley values of a saved table, or the sampled ones, by name."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            clients = [str(name) for name in arrays["clients"]]
            if f"sampled/{utility}" in arrays:
                values = arrays[f"sampled/{utility}"]
            else:
                values = shapley(Table(arrays[f"table/{utility}"], tuple(clients))).values
    except (OSError, KeyError, ValueError) as error:
        raise StoreError(f"{path}: not a table of coalitions: {error}") from error
    return dict(zip(clients, values.tolist(), strict=True))


def _cosines(plain: PlainRound) -> dict[str, npt.NDArray[np.float64]]:
    """Return the cosines of models of a round, to be saved; nothing if a model is zero."""
    try:
        return {"cos-model": cos_model(plain.updates.cpu().numpy(), plain.m0).values}
    except UndefinedScore:
        return {}


def _cosines_in(path: Path) -> dict[str, float]:
    """Return the saved cosines of models by name; empty if there are none."""
    with np.load(path, allow_pickle=False) as arrays:  # _value has read it before
        values = arrays["cos-model"].tolist() if "cos-model" in arrays else []
        return dict(zip(arrays["clients"].tolist(), values, strict=False))


def _errors(path: Path, utility: str) -> dict[str, float] | None:
    """Return the standard errors of sampled values by name; empty if exact, None if they are unknown."""
    with np.load(path, allow_pickle=False) as arrays:  # _value has read it before
        if f"sampled/{utility}" not in arrays:
            return {}
        if f"stderr/{utility}" not in arrays:
            return None
        return dict(zip(arrays["clients"].tolist(), arrays[f"stderr/{utility}"].tolist(), strict=True))


def _finished(log: Path) -> dict[int, dict[str, float]]:
    """Return the coalitions in the log, and remove a last line that a kill cut short."""
    known: dict[int, dict[str, float]] = {}
    whole = 0
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
