"""A federation made ready to run from its config: members' data, committed test pool, model and device."""

from __future__ import annotations

import copy
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmerit import data
from fedmerit.config import Config, of_folder, unsettled_for
from fedmerit.data.dataset import Dataset, pool_order
from fedmerit.data.partitions import ClientData
from fedmerit.errors import ConfigError, DataError, FedmeritError
from fedmerit.identity import canonical, seed_from
from fedmerit.limits import check_schedule, usual_schedule
from fedmerit.notes import Note, numbered, planted
from fedmerit.protocol.outcome import Model, PerSample
from fedmerit.protocol.pool import Images, Labels, Pool, Slice
from fedmerit.protocol.terms import least_scheduled
from fedmerit.scoring.doubts import lower_is_better
from fedmerit.secagg.setting import LEAST_IN_SUM, what_to_know
from fedmerit.simulation.direction import missing_gradient
from fedmerit.simulation.losses import CROSS_ENTROPY, Unit, check_target, loss_of, outputs_for
from fedmerit.simulation.models import as_tensor, build, left_out, load_vector, to_vector
from fedmerit.simulation.training import TrainingSettings, train
from fedmerit.simulation.utilities import Utility, check_kind, evaluate, resolve_all

OTHER_MIX = 0.2
"""A run notes it when a class's share of the training data exceeds its share of the test pool by more."""

AGAIN = ("model", "train")
"""What another repeat of a run draws anew; all else follows from the run's seed alone."""


def seed_for(config: Config, *what: str | int) -> int:
    """Return a seed that depends only on the run's seed and on what it is for.

    The first model and the batch order also depend on the repeat, so that members train again on the same
    data, with the same test pool.
    """
    repeat = config.run.repeat
    again = ("repeat", repeat) if repeat > 1 and what[0] in AGAIN else ()
    return seed_from(config.run.seed, *again, *what)


Seeds = Callable[..., int]
"""A function such as `seed_for`: (config, what the seed is for) -> seed."""


def generator_for(config: Config, *what: str | int) -> np.random.Generator:
    """Return a numpy generator seeded by `seed_for`."""
    return np.random.default_rng(seed_for(config, *what))


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
    seeds: Seeds = seed_for
    evaluations: int = 0  # models evaluated so far

    def __post_init__(self) -> None:
        self._shown: tuple[str, Tensor, Tensor] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members."""
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
        """Return what a member trains on in a round.

        That is the member's own data. A member in ``corruption.test_set`` adds the test samples known by
        then: the pool of the reports if it is fixed, otherwise the slices of earlier rounds.
        """
        if client.name not in self.config.corruption.test_set:
            return client.x, client.y
        fixed = self.config.data.test_reveal == "fixed"
        known = [self.pool.slice(one) for one in ((1,) if fixed else range(1, number))]
        x = np.concatenate([client.x, *(shown.x for shown in known)])
        return x, np.concatenate([client.y, *(shown.y for shown in known)])

    def truth_slice(self, number: int) -> Slice:
        """Return the samples of the ground truth in a round: those of the settlement, if there is one."""
        return self._settled if self.config.settles else self.pool.slice(number)

    @cached_property
    def _settled(self) -> Slice:
        return self.pool.settlement()

    def evaluate(self, model: Model | Tensor, shown: Slice) -> PerSample:
        """Return every utility of every sample of a slice for the model with this vector."""
        if self._shown is None or self._shown[0] != shown.id:  # copy a slice to the device only once
            self._shown = (shown.id, as_tensor(shown.x).to(self.device), as_tensor(shown.y).to(self.device))
        self.evaluations += 1
        load_vector(self.network, model)
        _, x, y = self._shown
        return evaluate(self.network, x, y, self.utilities, balanced=self.pool.balanced)


def read(config: Config) -> Dataset:
    """Read the data of a run."""
    return data.load(config.data.name, config.data.path or None, **config.data.options)


def resolve(config: Config, dataset: Dataset) -> tuple[Config, tuple[str, ...]]:
    """Return the config with its members and its method, and the notes of a run about them.

    With the schemes ``group`` and ``file`` the data or the saved partition names the members. The returned
    config has these names in ``partition.names`` and has passed all checks that involve members' names. If
    the settings leave ``scoring.method`` out, it is "reports" where nothing can be settled. Resolving a
    resolved config changes nothing.
    """
    part, notes = config.partition, tuple[str, ...]()
    if part.scheme in ("group", "file"):
        names, notes = data.members(
            part.scheme,
            part.names,
            clients=part.clients,
            groups=dataset.group_train,
            merge=part.merge,
            file=part.file,
        )
        config = replace(config, partition=replace(part, names=names, clients=len(names)))
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
    try:
        indices, _, settled = pool_order(
            dataset,
            config.data.test_size,
            generator_for(config, "pool"),
            **_pool_settings(config) | {"method": "both"},
        )
    except (ConfigError, DataError) as error:
        return Note("method-pool", why=str(error))
    if not any(":" in name for name in (config.model.name, paid)):
        return None  # the models and utilities of this package have a gradient
    shown, network = indices[:-settled], _network(config, dataset, seed_for)
    why = missing_gradient(network, dataset.x_test[shown], dataset.y_test[shown], _utilities(config)[0])
    return Note("method-gradient", utility=paid, why=str(why)) if why else None


def continued(config: Config, path: Path) -> Config:
    """Return the config with which a run goes on: a method that it leaves out may be "reports" there."""
    try:
        there = of_folder(path).scoring.method
    except ConfigError:  # opening the folder says what is wrong with it
        return config
    if not config.method_open or there != "reports":
        return config
    return replace(config, scoring=replace(config.scoring, method="reports"), method_open=False)


def prepare(
    config: Config,
    *,
    pool_key: bytes | None = None,
    dataset: Dataset | None = None,
    seeds: Seeds = seed_for,
) -> Federation:
    """Read the data, resolve the members, deal the data to them, commit to a test pool, build the model.

    Args:
        config: settings of the run.
        pool_key: secret from which the pool's salts are derived; a resumed run passes its first one.
        dataset: the result of `read`, if the data has been read.
        seeds: replaces `seed_for` for the first model and for training.
    """
    dataset = read(config) if dataset is None else dataset
    config, said = resolve(config, dataset)
    check_schedule(config)
    device = choose_device(config.run.device)
    utilities = _utilities(config)
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
    if config.partition.scheme == "dirichlet" and not dataset.classes:
        raise ConfigError.at(
            "partition.scheme",
            f"'dirichlet' deals class by class, and y of {dataset.name} is no class: expected iid, sizes, "
            "group or file",
        )
    parts = data.split(
        dataset.y_train,
        config.partition.clients,
        config.partition.scheme,
        rng=generator_for(config, "partition"),
        mu=config.partition.mu,
        minimum=config.partition.minimum,
        sizes=_sizes(config.partition.sizes) or None,
        groups=dataset.group_train,
        merge=config.partition.merge,
        file=config.partition.file or None,
        names=config.clients,
    )
    corruption = config.corruption
    for key in ("label_noise", "label_flip"):
        if getattr(corruption, key) and not dataset.classes:
            raise ConfigError.at(
                f"corruption.{key}", f"only where y is classes, and y of {dataset.name} is not"
            )
    clients = data.apply(
        dataset.x_train,
        dataset.y_train,
        parts,
        config.clients,
        len(dataset.classes),
        generator_for(config, "corruption"),
        label_noise=corruption.label_noise if corruption.label_noise else None,  # type: ignore[arg-type]
        label_flip=corruption.label_flip,
        free_rider=corruption.free_rider,
        duplicate=corruption.duplicate,
    )
    network, unit = _network(config, dataset, seeds), _unit(config, dataset)
    if unit is not None:
        network.register_forward_hook(unit)
    network.to(device)
    training = TrainingSettings(
        local_epochs=config.training.local_epochs,
        batch_size=config.training.batch_size,
        lr=config.training.lr,
        weight_decay=config.training.weight_decay,
        tf32=config.training.tf32,
        optimiser=config.training.optimiser,
        momentum=config.training.momentum,
        loss=loss_of(config.training.loss, probabilities=config.model.outputs == "probabilities", unit=unit),
    )
    _try(config, network, training, clients[0], pool.first, utilities)
    if config.settles and (why := missing_gradient(network, pool.first.x, pool.first.y, utilities[0])):
        raise ConfigError.at(
            "scoring.utilities",
            f"{config.scoring.method!r} settles the first utility along its gradient: {why}",
        )
    notes = [*dataset.notes, *said, *start_notes(config)]
    if unit is not None:
        mean, sd = (", ".join(f"{one:.4g}" for one in np.ravel(of)[:4]) for of in (unit.mean, unit.sd))
        notes.append(Note("standardised-y", mean=mean, sd=sd))
    if constant := _constant(network, pool.first, utilities[0], dataset.y_train):
        notes.append(constant)
    if not dataset.classes:
        notes.append(Note("drawn-at-random"))
    elif mix := _class_mix(dataset.y_train, pool, dataset.classes):
        notes.append(mix)
    notes += [Note("whole-metric", utility=name) for name in config.whole]
    if left := left_out(network):
        notes.append(f"not aggregated, because they are counters: {', '.join(left)}")
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
        seeds=seeds,
    )


def _check_measurable(utilities: Sequence[Utility], dataset: Dataset) -> None:
    """Raise `ConfigError` for a packaged utility that cannot be measured on these targets."""
    for utility in utilities:
        fits = {
            "classes": dataset.target == "classes",
            "numbers": dataset.y_test.dtype.kind == "f",
            "any": True,
        }[utility.of]
        if not fits:
            need = "classes" if utility.of == "classes" else "real numbers"
            others = "rmse-skill, mae-skill" if utility.of == "classes" else "expected-accuracy, auc"
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
    """Measure the first model and train a copy of it, so that a user's code fails before the first round.

    The packaged networks on images with classes need no such test.
    """
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
    scoring = config.scoring
    probabilities = config.model.outputs == "probabilities"
    return resolve_all(
        scoring.utilities, scale=scoring.scale, whole=scoring.whole, probabilities=probabilities
    )


def _network(config: Config, dataset: Dataset, seeds: Seeds) -> nn.Module:
    shape = dataset.x_train.shape[1:]
    outputs = outputs_for(config.training.loss, dataset.y_train, len(dataset.classes))
    return build(config.model.name, shape, outputs, norm=config.model.norm, seed=seeds(config, "model"))


def _unit(config: Config, dataset: Dataset) -> Unit | None:
    """Return the unit in which the network's outputs are counted; None if that of y, or if y is no number.

    Raises:
        ConfigError: model.outputs does not fit y.
    """
    said, real = config.model.outputs, config.training.loss == "mse"
    allowed = ("standardised", "plain") if real else ("logits", "probabilities") if dataset.classes else ()
    if said and said not in allowed:
        expected = " or ".join(allowed) or "no such key"
        raise ConfigError.at(
            "model.outputs",
            f"expected {expected} with y of {dataset.target} and the loss {config.training.loss!r}, got "
            f"{said!r}",
        )
    return Unit(dataset.y_train) if real and said != "plain" else None


MOST = 0.5
"""A constant answer earns most if it covers this part of the way from the first model to a perfect one."""


def _constant(network: nn.Module, shown: Slice, paid: Utility, y: Labels) -> Note | None:
    """Return a note if always answering the mean of y is far better than the first model."""
    if paid.of != "numbers" or paid.of_logits is None:
        return None
    axis = 0 if y.ndim <= 2 else None
    targets = torch.as_tensor(shown.y)
    always = torch.as_tensor(np.broadcast_to(np.mean(y, axis=axis), shown.y.shape).astype(np.float32))
    first = float(np.mean(evaluate(network, shown.x, shown.y, [paid])[paid.name]))
    constant = float(paid.of_logits(always, targets).double().mean())
    if constant - first <= MOST * (1 - first):
        return None
    return Note("constant-earns", utility=paid.name, first=first, constant=constant)


def _pool_settings(config: Config) -> dict[str, Any]:
    """Return how the pool is cut."""
    return {
        "reveal": config.data.test_reveal,
        "rounds": config.training.rounds,
        "method": config.scoring.method,
        "blocks": config.settlement.blocks,
    }


def start_notes(config: Config) -> Iterator[str]:
    """Yield what users should know before a run starts and what follows from a resolved config alone."""
    if faults := planted(config.corruption):
        yield faults
    fraction, members = config.participation.fraction, len(config.clients)
    if fraction < 1 and round(fraction * members) < LEAST_IN_SUM:
        yield (
            f"participation.fraction {fraction:g} of {members} members is fewer than {LEAST_IN_SUM}: "
            f"{LEAST_IN_SUM} take part"
        )
    need, secure = least_scheduled(config), config.secure_aggregation
    rounds = range(1, config.training.rounds + 1)
    present = {number: len(schedule(config, config.clients, number)) for number in rounds}
    if secure.enabled:
        fewest = min((count for count in present.values() if count >= need), default=members)
        yield from what_to_know(fewest, config.threshold, members, checked=secure.check)
    if impossible := [number for number, count in present.items() if count < need]:
        yield (
            f"participation.away: {numbered(impossible)} will be aborted: fewer than {need} of all {members} "
            "members are scheduled"
        )
    for name in config.scoring.utilities:
        if lower_is_better(name):
            yield (
                f"scoring.utilities: by its name lower is better in {name!r}, and higher counts as better: "
                "give -x in its place, or 1 - x if it lies in [0, 1]; if it does so already, let its name "
                "say so (neg-...)"
            )


def _class_mix(train: Labels, pool: Pool, classes: Sequence[str]) -> str:
    """Return a note if a class is much more frequent in the training data than in the pool, else ""."""
    shares = [np.bincount(y, minlength=len(classes)) / len(y) for y in (train, pool.y)]
    gap = shares[0] - shares[1]
    most = int(gap.argmax())
    if gap[most] <= OTHER_MIX:
        return ""
    taken = "data.test_size = 0 takes the test set as it is"
    return (
        f"class {classes[most]} makes {shares[0][most]:.0%} of the training data and {shares[1][most]:.0%} "
        "of the test pool: whoever pushes the model away from it may be rewarded, even with wrong labels; "
        + (taken if pool.balanced else "draw the test set as the model will be used")
    )


def _sizes(given: Sequence[float]) -> list[float]:
    """Return counts as integers, and fractions unchanged."""
    return [int(size) for size in given] if all(float(s).is_integer() for s in given) else list(given)


def utility_hash(utilities: Sequence[Utility]) -> str:
    """Return the SHA-256 of the definitions of all utilities, in order; the pool's commitment includes it."""
    listed = [[utility.name, utility.definition_hash()] for utility in utilities]
    return hashlib.sha256(canonical(listed)).hexdigest()


def choose_device(name: str) -> torch.device:
    """Return the device with this name; ``auto`` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError.at("run.device", f"expected auto, cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError.at("run.device", f"expected auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError.at("run.device", "cuda was asked for, but torch sees no GPU here")
    return device


def schedule(config: Config, names: Sequence[str], number: int) -> tuple[str, ...]:
    """Return who takes part in a round: members drawn from seed and round, except those who are away."""
    fraction, away = config.participation.fraction, config.participation.away
    drawn = set(names)
    if fraction < 1.0:
        count = usual_schedule(config)
        drawn = set(
            generator_for(config, "participation", number).choice(names, count, replace=False).tolist()
        )
    return tuple(name for name in names if name in drawn and number not in away.get(name, ()))


def losses(config: Config, number: int) -> Mapping[str, str]:
    """Return which members are lost in this round, and at which stage."""
    split = {name: when.split(":") for name, when in config.participation.lost.items()}
    return {name: stage for name, (at, stage) in split.items() if int(at) == number}
