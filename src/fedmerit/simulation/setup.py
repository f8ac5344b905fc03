"""A federation made ready to run from its config: members' data, committed test pool, model and device."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmerit import data
from fedmerit.config import Config, check_schedule, of_folder, unsettled_for, usual_schedule
from fedmerit.data.dataset import Dataset
from fedmerit.data.partitions import ClientData, pool_order
from fedmerit.errors import ConfigError, DataError, FedmeritError
from fedmerit.identity import canonical, seed_from
from fedmerit.notes import Note, numbered
from fedmerit.protocol.direction import BLOCKS
from fedmerit.protocol.outcome import Model, PerSample
from fedmerit.protocol.pool import Images, Labels, Pool, Slice
from fedmerit.protocol.terms import least_scheduled
from fedmerit.scoring.doubts import MOST_BY_MEAN, lower_is_better
from fedmerit.secagg.setting import LEAST_IN_SUM, what_to_know
from fedmerit.settings import planted
from fedmerit.simulation.direction import missing_gradient
from fedmerit.simulation.models import as_tensor, build, left_out, load_vector, to_vector
from fedmerit.simulation.training import (
    CROSS_ENTROPY,
    TrainingSettings,
    Unit,
    check_target,
    loss_of,
    outputs_for,
    train,
    trained,
)
from fedmerit.simulation.utilities import (
    Utility,
    check_kind,
    evaluate,
    look_like_probabilities,
    resolve_all,
)

OTHER_MIX = 0.2
"""A run notes it when a class's share of the training data exceeds its share of the test pool by more."""

AGAIN = ("model", "train")
"""What another repeat draws anew: first model and batch order. All else follows from the run's seed alone."""


def seed_for(config: Config, *what: str | int) -> int:
    """Return a seed that depends on the run's seed and what it is for, and on the repeat for `AGAIN`."""
    repeat = config.run.repeat
    again = ("repeat", repeat) if repeat > 1 and what[0] in AGAIN else ()
    return seed_from(config.run.seed, *again, *what)


def generator_for(config: Config, *what: str | int) -> np.random.Generator:
    """Return a numpy generator seeded by `seed_for`."""
    return np.random.default_rng(seed_for(config, *what))


Seeds = Callable[..., int]
"""A function such as `seed_for`: (config, what the seed is for) -> seed."""
Tell = Callable[[int, int], None]
"""Called with (done, total)."""
LEAST_DEALT = 10
"""The fewest samples that a member gets where chance deals them."""


@dataclass(eq=False)
class Federation:
    """Everything that a run needs except keys and a folder."""

    config: Config
    clients: tuple[ClientData, ...]
    pool: Pool
    network: nn.Module
    first: Model
    utilities: tuple[Utility, ...]
    training: TrainingSettings
    device: torch.device
    notes: tuple[str, ...]
    constant: float | None = None  # the paid utility of always answering the mean of y, where y is numbers
    seeds: Seeds = seed_for
    _shown: tuple[str, Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(client.name for client in self.clients)

    def seed(self, *what: str | int) -> int:
        """Return the run's seed for a purpose, as `seed_for`."""
        return self.seeds(self.config, *what)

    @cached_property
    def fingerprint(self) -> str:
        """HMAC of all members' training data under the pool's key; it shows whether the data changed."""
        digest = hmac.new(self.pool.key, digestmod=hashlib.sha256)
        for client in self.clients:
            digest.update(canonical([client.name, client.behaviour, list(client.x.shape)]))
            digest.update(np.ascontiguousarray(client.x).data)
            kind = "<i8" if client.y.ndim == 1 and client.y.dtype.kind in "iu" else client.y.dtype
            digest.update(np.ascontiguousarray(client.y, dtype=kind).data)
        return digest.hexdigest()

    def training_data(self, client: ClientData, number: int) -> tuple[Images, Labels]:
        """Return what a member trains on in a round: its own data, unless an experiment makes it cheat."""
        return client.x, client.y

    def truth_slice(self, number: int) -> Slice:
        """Return the samples of the ground truth in a round: those of the settlement, if there is one."""
        return self.pool.settlement() if self.config.settles else self.pool.slice(number)

    def evaluate(self, model: Model | Tensor, shown: Slice) -> PerSample:
        """Return every utility of every sample of a slice for the model with this vector."""
        if self._shown is None or self._shown[0] != shown.id:  # copy a slice to the device only once
            self._shown = (shown.id, as_tensor(shown.x).to(self.device), as_tensor(shown.y).to(self.device))
        load_vector(self.network, model)
        _, x, y = self._shown
        return evaluate(self.network, x, y, self.utilities, balanced=self.pool.balanced)


def read(config: Config) -> Dataset:
    return data.load(config.data.name, config.data.path or None, **config.data.options)


def resolve(config: Config, dataset: Dataset) -> tuple[Config, tuple[str, ...]]:
    """Return the config with its members and its method, and the notes of a run about them.

    A partition by ``group`` or ``file`` names the members. If the settings leave ``scoring.method`` out, it
    is "reports" where nothing can be settled.
    """
    partition, notes = config.partition, tuple[str, ...]()
    scheme, _, file = partition.scheme.partition(":")
    if scheme in ("group", "file"):
        count, groups = partition.clients, dataset.group_train
        names, notes = data.members(scheme, partition.names, clients=count, groups=groups, file=file)
        config = replace(config, partition=replace(partition, names=names, clients=len(names)))
    if config.method_open and (why := _unsettled(config, dataset)):
        config = replace(config, scoring=replace(config.scoring, method="reports"))
        notes = (*notes, why)
    return config, notes


def _unsettled(config: Config, dataset: Dataset) -> Note | None:
    """Return why a run of these settings is not settled unless they ask for it; None if it is."""
    paid = config.scoring.utilities[0]
    match unsettled_for(config.scoring):
        case "utilities":
            return Note("method-utilities", utility=paid)
        case "game":
            return Note("method-game")
    drawn = dataset, config.data.test_size, generator_for(config, "pool")
    try:
        indices, _, settled = pool_order(*drawn, **_pool_settings(config) | {"method": "both"})
    except (ConfigError, DataError) as error:
        return Note("method-pool", why=str(error))
    if not any(":" in name for name in (config.model.name, paid)):
        return None  # the models and utilities of this package have a gradient
    shown, network = indices[:-settled], _network(config, dataset, seed_for)
    why = missing_gradient(network, dataset.x_test[shown], dataset.y_test[shown], _utilities(config)[0])
    return Note("method-gradient", utility=paid, why=str(why)) if why else None


def continued(config: Config, path: Path) -> Config:
    """Return the config with which a run goes on: a method that it leaves out may be "reports" there."""
    with contextlib.suppress(ConfigError):  # opening the folder says what is wrong with it
        if config.method_open and of_folder(path).scoring.method == "reports":
            scoring = replace(config.scoring, method="reports")
            return replace(config, scoring=scoring, method_open=False)
    return config


def prepare(
    config: Config, *, pool_key: bytes | None = None, dataset: Dataset | None = None, seeds: Seeds = seed_for
) -> Federation:
    """Read the data, resolve the members, deal the data to them, commit to a test pool, build the model.

    A resumed run passes its ``pool_key``, from which the pool's salts are derived.
    """
    dataset = read(config) if dataset is None else dataset
    config, member_notes = resolve(config, dataset)
    check_schedule(config)
    device = choose_device(config.run.device)
    utilities = _utilities(config)
    _check_classes(config, dataset)
    check_target(config.training.loss, dataset.y_train, len(dataset.classes), dataset.name)
    _check_measurable(utilities, dataset)
    pool = data.choose_pool(
        dataset,
        config.data.test_size,
        generator_for(config, "pool"),
        key=pool_key or secrets.token_bytes(32),
        utility_hash=utility_hash(utilities),
        **_pool_settings(config),
    )
    scheme, _, file = config.partition.scheme.partition(":")
    sizes = config.partition.sizes  # whole numbers are counts
    parts = data.split(
        dataset.y_train,
        config.partition.clients,
        scheme,
        rng=generator_for(config, "partition"),
        mu=config.partition.mu,
        minimum=LEAST_DEALT if scheme in ("iid", "dirichlet") else 1,
        sizes=[int(size) for size in sizes] if all(float(size).is_integer() for size in sizes) else sizes,
        groups=dataset.group_train,
        file=file or None,
        names=config.clients,
    )
    clients = data.apply(
        dataset.x_train,
        dataset.y_train,
        parts,
        config.clients,
        len(dataset.classes),
        generator_for(config, "corruption"),
        config.corruption,
    )
    if config.judged:
        apart = generator_for(config, "held-out").spawn(len(clients))
        pairs = zip(clients, apart, strict=True)
        clients = [data.hold_out(client, config.panel.held_out, own) for client, own in pairs]
    network, unit = _network(config, dataset, seeds), _unit(config, dataset)
    if unit is not None:
        network.register_forward_hook(unit)
    network.to(device)
    named = ("local_epochs", "batch_size", "lr", "weight_decay", "optimiser")
    training = TrainingSettings(
        loss=loss_of(config.training.loss, probabilities=config.model.outputs == "probabilities", unit=unit),
        **{name: getattr(config.training, name) for name in named},
    )
    _try(config, network, training, clients[0], pool.first, utilities)
    if config.settles and (why := missing_gradient(network, pool.first.x, pool.first.y, utilities[0])):
        raise ConfigError.at(
            "scoring.utilities",
            f"{config.scoring.method!r} settles the first utility along its gradient: {why}",
        )
    notes = [*dataset.notes, *member_notes, *start_notes(config)]
    if config.model.outputs == "logits" and look_like_probabilities(network, pool.first.x, adding_up=True):
        notes.append(Note("called-logits"))
    if unit is not None:
        mean, sd = (", ".join(f"{x:.4g}" for x in np.ravel(values)[:4]) for values in (unit.mean, unit.sd))
        notes.append(Note("standardised-y", mean=mean, sd=sd))
    constant = mean_answer(pool.first, utilities[0], dataset.y_train)
    if constant is not None:
        notes += _constant(network, pool.first, utilities[0], constant, config)
    notes += _class_mix(dataset, pool) if dataset.classes else [Note("drawn-at-random")]
    notes += [Note("whole-metric", utility=name) for name in config.whole]
    if counters := left_out(network):
        notes.append(f"not aggregated, because they are counters: {', '.join(counters)}")
    return Federation(
        config=config,
        clients=tuple(clients),
        pool=pool,
        network=network,
        first=to_vector(network),
        utilities=utilities,
        training=training,
        device=device,
        notes=tuple(notes),
        constant=constant,
        seeds=seeds,
    )


def _check_classes(config: Config, dataset: Dataset) -> None:
    if dataset.classes:
        return
    if config.partition.scheme == "dirichlet":
        raise ConfigError.at(
            "partition.scheme",
            f"'dirichlet' deals class by class, and y of {dataset.name} is not a class label: expected iid, "
            "sizes, group or file",
        )
    for key in ("label_noise", "label_flip"):
        if getattr(config.corruption, key):
            problem = f"only where y is classes, and y of {dataset.name} is not"
            raise ConfigError.at(f"corruption.{key}", problem)


def _check_measurable(utilities: Sequence[Utility], dataset: Dataset) -> None:
    for utility in utilities:
        if utility.of == "classes" and dataset.target != "classes":
            need, others = "classes", "rmse-skill, mae-skill"
        elif utility.of == "numbers" and dataset.y_test.dtype.kind != "f":
            need, others = "real numbers", "expected-accuracy, auc"
        else:
            continue
        raise ConfigError.at(
            "scoring.utilities",
            f"{utility.name!r} needs y of {need}, and y of {dataset.name} are {dataset.target}: take "
            f"{others} or your own 'module:function'",
        )


def _try(
    config: Config,
    network: nn.Module,
    training: TrainingSettings,
    client: ClientData,
    shown: Slice,
    utilities: Sequence[Utility],
) -> None:
    """Measure the first model and train a copy of it, so that a user's code fails before the first round."""
    named = (config.model.name, config.training.loss, *config.scoring.utilities)
    usual = training.loss == CROSS_ENTROPY and shown.x.ndim == 4 and shown.y.ndim == 1 and not config.whole
    if usual and not any(":" in name for name in named):
        return
    evaluate(network, shown.x, shown.y, utilities)
    if ":" in config.model.name:
        check_kind(network, shown.x, utilities, config.model.outputs)
    few, once = slice(0, min(4, len(client.y))), replace(training, local_epochs=1)
    try:
        train(copy.deepcopy(network), client.x[few], client.y[few], once, 0)
    except FedmeritError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise ConfigError.at(
            "model.name", f"{config.model.name!r} cannot be trained: {type(error).__name__}: {error}"
        ) from error


def _utilities(config: Config) -> tuple[Utility, ...]:
    probabilities = config.model.outputs == "probabilities"
    return resolve_all(config.scoring.utilities, probabilities=probabilities)


def _network(config: Config, dataset: Dataset, seeds: Seeds) -> nn.Module:
    shape = dataset.x_train.shape[1:]
    outputs = outputs_for(config.training.loss, dataset.y_train, len(dataset.classes))
    return build(config.model.name, shape, outputs, seed=seeds(config, "model"))


def _unit(config: Config, dataset: Dataset) -> Unit | None:
    """Return the unit of the network's outputs; None: that of y, or y is no number. Check model.outputs."""
    outputs, loss = config.model.outputs, config.training.loss
    allowed = ("logits", "probabilities") if dataset.classes else ()
    if loss == "mse":
        allowed = ("standardised", "plain")
    if outputs and outputs not in allowed:
        expected = " or ".join(allowed) or "no such key"
        problem = f"expected {expected} with y of {dataset.target} and the loss {loss!r}, got {outputs!r}"
        raise ConfigError.at("model.outputs", problem)
    return Unit(dataset.y_train) if loss == "mse" and outputs != "plain" else None


def mean_answer(shown: Slice, paid: Utility, y: Labels) -> float | None:
    """Return the utility of a model that always answers the mean of y; None where y is no number."""
    if paid.of != "numbers" or paid.of_logits is None:
        return None
    mean = np.mean(y, axis=0 if y.ndim <= 2 else None)
    always = torch.as_tensor(np.broadcast_to(mean, shown.y.shape).astype(np.float32))
    return float(paid.of_logits(always, torch.as_tensor(shown.y)).double().mean())


def _constant(
    network: nn.Module, shown: Slice, paid: Utility, constant: float, config: Config
) -> Iterator[Note]:
    """Yield a note if always answering the mean of y is far better than the first model."""
    first = float(np.mean(evaluate(network, shown.x, shown.y, [paid])[paid.name]))
    if constant - first > MOST_BY_MEAN * (1 - first):
        plain, mse = config.model.outputs == "plain", config.training.loss == "mse"
        why = Note("constant-plain" if plain else "constant-standardised" if mse else "constant-loss")
        yield Note("constant-earns", utility=paid.name, first=first, constant=constant, why=why)


def _pool_settings(config: Config) -> dict[str, Any]:
    return {
        "reveal": config.data.test_reveal,
        "rounds": config.training.rounds,
        "method": config.scoring.method,
        "blocks": BLOCKS,
    }


def start_notes(config: Config) -> Iterator[str]:
    """Yield what users should know before a run starts and what follows from a resolved config alone."""
    if faults := planted(config.corruption):
        yield faults
    fraction, members, least = config.participation.fraction, len(config.clients), LEAST_IN_SUM
    if fraction < 1 and round(fraction * members) < least:
        taken = f"participation.fraction {fraction:g} of {members} members"
        yield f"{taken} is fewer than {least}: {least} take part"
    need, rounds = least_scheduled(config), range(1, config.training.rounds + 1)
    present = {number: len(schedule(config, config.clients, number)) for number in rounds}
    if config.secure_aggregation.enabled:
        fewest = min((count for count in present.values() if count >= need), default=members)
        yield from what_to_know(fewest, config.threshold, members)
    if impossible := [number for number, count in present.items() if count < need]:
        yield (
            f"participation.away: {numbered(impossible)} will be aborted: fewer than {need} of all {members} "
            "members are scheduled"
        )
    paid, *others = config.scoring.utilities
    if others and not config.reports:
        yield Note("only-settled", method=config.scoring.method, utility=paid, others=others)
    for name in config.scoring.utilities:
        if lower_is_better(name):
            yield (
                f"scoring.utilities: by its name lower is better in {name!r}, and higher counts as better: "
                "give -x in its place, or 1 - x if it lies in [0, 1]; if it does so already, let its name "
                "say so (neg-...)"
            )


def _class_mix(dataset: Dataset, pool: Pool) -> Iterator[str]:
    """Yield a note if a class is much more frequent in the training data than in the pool."""
    classes, both = dataset.classes, (dataset.y_train, pool.y)
    trained, tested = (np.bincount(y, minlength=len(classes)) / len(y) for y in both)
    most = int((trained - tested).argmax())
    if trained[most] - tested[most] <= OTHER_MIX:
        return
    advice = "draw the test set as the model will be used"
    if pool.balanced:
        advice = "data.test_size = 0 takes the test set as it is"
    yield (
        f"class {classes[most]} makes {trained[most]:.0%} of the training data and {tested[most]:.0%} "
        "of the test pool: whoever pushes the model away from it may be rewarded, even with wrong labels; "
        f"{advice}"
    )


def utility_hash(utilities: Sequence[Utility]) -> str:
    """Return the SHA-256 of the definitions of all utilities, in order; the pool's commitment includes it."""
    listed = [[utility.name, utility.definition_hash()] for utility in utilities]
    return hashlib.sha256(canonical(listed)).hexdigest()


def choose_device(name: str) -> torch.device:
    """Return the device with this name; ``auto`` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        raise ConfigError.at("run.device", f"expected auto, cpu or cuda, got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError.at("run.device", "cuda was asked for, but torch sees no GPU here")
    return torch.device(name)


def schedule(config: Config, names: Sequence[str], number: int) -> tuple[str, ...]:
    """Return who takes part in a round: members drawn from seed and round, except those who are away."""
    drawn, away = list(names), config.participation.away
    if config.participation.fraction < 1.0:
        generator = generator_for(config, "participation", number)
        drawn = generator.choice(names, usual_schedule(config), replace=False).tolist()
    return tuple(name for name in names if name in drawn and number not in away.get(name, ()))


# ------------------------------------------------------------------------------------------ local training

NOISE = 0.01
"""Standard deviation of a noise free rider's update, as a multiple of that of the model's weights."""


@dataclass(eq=False)
class LocalTraining:
    """The local training of a federation's members, one after another."""

    federation: Federation
    solo: dict[str, Model] = field(default_factory=dict)
    """Per member, the model that it trains alone from the first one; empty without a solo track."""

    def train(
        self, number: int, scheduled: Sequence[str], start: Model, stale: Model, tell: Tell
    ) -> dict[str, Model]:
        """Return the local model of every scheduled member after training from ``start`` in a round.

        ``stale`` is the global model of one round earlier, which a stale free rider sends back.
        """
        clients = [client for client in self.federation.clients if client.name in scheduled]
        honest = [client for client in clients if client.behaviour == "honest"]
        tell(0, len(honest))
        models = self.honest(number, honest, start, tell)
        for client in clients:
            if client.behaviour == "zero":
                models[client.name] = start
            elif client.behaviour == "stale":
                models[client.name] = stale
            elif client.behaviour == "noise":
                generator = np.random.default_rng(self.federation.seed("noise", number, client.name))
                noise = generator.normal(0.0, NOISE * float(np.std(start)), start.size)
                models[client.name] = (start + noise).astype(np.float32)
        return models

    def honest(
        self, number: int, clients: Sequence[ClientData], start: Model, tell: Tell
    ) -> dict[str, Model]:
        """Train these members, and their solo models."""
        federation, models = self.federation, dict[str, Model]()
        for done, client in enumerate(clients, start=1):
            seed = federation.seed("train", number, client.name)
            how = *federation.training_data(client, number), federation.training, seed
            models[client.name] = trained(federation.network, start, *how)
            if self.solo:
                self.solo[client.name] = trained(federation.network, self.solo[client.name], *how)
            tell(done, len(clients))
        return models
