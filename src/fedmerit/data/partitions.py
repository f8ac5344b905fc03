"""Who gets which samples: a client's training data, perhaps corrupted on purpose, and the test pool.

=========== ================================================================================
scheme      rule
=========== ================================================================================
iid         a random deal; sizes differ by at most one
dirichlet   for every class c, its samples are dealt in proportions p_c ~ Dirichlet(mu, ..., mu)
sizes       a random deal of the given counts or fractions of all samples; the rest is unused
group       one client per group, named after it
file        indices saved before (`save`, `restore`), by name if they were saved with names
=========== ================================================================================

Clients never share samples, and each must hold at least ``minimum``; otherwise an error is raised. With
``group`` and ``file`` a client's name selects its samples, so no client gets the samples of another name.

`apply` gives every client its samples and corrupts those named in ``[corruption]``, each in one way.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.data.dataset import Dataset, Groups
from fedmerit.errors import ConfigError, DataError, KeyFileError
from fedmerit.identity import check_name, check_names
from fedmerit.notes import first_names
from fedmerit.protocol.pool import Images, Labels, Pool, apart, parts_of, span_of
from fedmerit.scoring.types import LARGEST
from fedmerit.settings import Corruption

Indices = npt.NDArray[np.int64]
"""Sample numbers of one client, in ascending order."""

SCHEMES = ("iid", "dirichlet", "group", "sizes", "file")

DRAWS = 100
"""Number of Dirichlet draws before the last one is repaired."""

LISTED = 40
"""The most names that a message lists."""


def split(
    labels: Labels,
    clients: int | None = None,
    scheme: str = "iid",
    *,
    rng: np.random.Generator,
    mu: float = 0.5,
    minimum: int = 1,
    sizes: Sequence[float] | None = None,
    groups: Groups | None = None,
    file: str | Path | None = None,
    names: Sequence[str] = (),
) -> list[Indices]:
    """Deal the samples to the clients.

    Args:
        labels: class of every sample.
        clients: number of clients; optional with ``names``, and for ``group``, ``sizes`` and ``file``.
        scheme: one of ``SCHEMES``.
        rng: the only source of randomness; the same state gives the same split.
        mu: Dirichlet concentration; with a small one every client has few classes.
        minimum: fewest samples per client. Dirichlet draws are repeated until it is met, at most ``DRAWS``
            times; then samples move from the largest client to those with too few.
        sizes: for ``sizes``: integers are counts, other numbers fractions in (0, 1] with a sum of at most 1.
        groups: for ``group``: hospital or centre of every sample.
        file: for ``file``: a file that `save` wrote.
        names: names of the clients, in the order of the result. For ``group``, the groups that take part (by
            default all, in natural order); for ``file``, the names saved with it, in any order.

    >>> [part.tolist() for part in split(np.zeros(5, int), 2, rng=np.random.default_rng(0))]
    [[2, 3, 4], [0, 1]]
    """
    n = len(labels)
    if scheme in ("group", "file"):
        names, _ = members(scheme, names, clients=clients, groups=groups, file=file)
    count = len(names or sizes or ()) if clients is None else clients
    if count < 1:
        raise DataError.at("partition.clients", f"expected at least 1 client, got {count}")
    if names and len(names) != count:
        raise DataError.at("partition.names", f"expected {count} names, got {_listed(names)}")
    if count * minimum > n:
        raise DataError.at(
            "partition.clients",
            f"{count} clients with at least {minimum} each need {count * minimum} samples, got {n}",
        )
    if scheme == "iid":
        parts = np.array_split(rng.permutation(n), count)
    elif scheme == "dirichlet":
        parts = _dirichlet(np.asarray(labels), count, mu, minimum, rng)
    elif scheme == "sizes":
        parts = _sizes(n, count, list(sizes or ()), rng)
    elif scheme == "group":
        assert groups is not None  # members has checked it
        held = by_group(groups)
        parts = [held[name] for name in names]
    elif scheme == "file":
        parts, saved = restore(Path(file or ""), samples=n)
        parts = [parts[(saved or names).index(name)] for name in names]
    else:
        raise DataError.at("partition.scheme", f"expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    for i, part in enumerate(parts):
        if len(part) < minimum:
            short = f"{names[i] if names else f'client {i}'} would hold {len(part)} samples"
            raise DataError.at("partition.clients", f"{short}, expected at least {minimum}")
    return [np.sort(part).astype(np.int64) for part in parts]


def members(
    scheme: str,
    names: Sequence[str] = (),
    *,
    clients: int | None = None,
    groups: Groups | None = None,
    file: str | Path | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the clients of a ``group`` or ``file`` partition in order, and notes about them.

    Without names all that are there take part; `DataError` if one is missing, or their number is another.
    """
    if scheme == "group":
        if groups is None:
            raise DataError.at(
                "partition.scheme",
                "'group' needs groups, and this dataset has none: data.options.group names their column in a "
                "table, and an .npz file has them in the array group_train",
            )
        everybody, notes = _group_members(groups, names, clients)
    elif file:
        everybody, notes = _saved_members(Path(file), names, clients)
    else:
        raise DataError.at("partition.scheme", "'file:' needs the path of a saved partition")
    chosen = tuple(names) or everybody
    if len(set(chosen)) != len(chosen):
        raise DataError.at("partition.names", f"expected different names, got {_listed(chosen)}")
    return chosen, notes


def _group_members(
    groups: Groups, names: Sequence[str], clients: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    samples, notes = by_group(groups), []
    members = tuple(samples)
    values = sorted({str(value) for value in np.unique(np.asarray(groups)).tolist()}, key=natural)
    if renamed := [f"{group!r} is {_safe(group)!r}" for group in values if group != _safe(group)]:
        problem = "groups of the data whose values cannot be names of members have others"
        notes.append(f"{problem}: {_listed(renamed)}")
    if unknown := [name for name in names if name not in samples]:
        raise DataError.at(
            "partition.names",
            f"{_listed(map(repr, unknown))} not among the groups of the data; "
            f"asked for: {_listed(names)}; groups of the data: {_listed(members)}",
        )
    if names and (others := [name for name in members if name not in names]):
        counts = _listed(f"{name} ({len(samples[name])})" for name in others)
        notes.append(
            f"partition.names leaves out {len(others)} of the {len(members)} groups of the data, "
            f"{sum(len(samples[name]) for name in others)} of {len(groups)} training samples: {counts}"
        )
    if clients and not names and clients != len(members):
        raise DataError.at(
            "partition.clients",
            f"expected {len(members)}, as many as there are groups of the data ({_listed(members)}), "
            f"got {clients}: leave it out, or choose groups in partition.names",
        )
    return members, tuple(notes)


def _saved_members(
    path: Path, names: Sequence[str], clients: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parts, saved = restore(path)
    if saved and names and set(names) != set(saved):
        raise DataError.at(
            "partition.names",
            f"expected the names in {path}; asked for: {_listed(names)}; in the file: {_listed(saved)}",
        )
    expected = clients or len(names) or len(parts)
    if expected != len(parts):
        raise DataError.at("partition.scheme", f"{path}: holds {len(parts)} clients, expected {expected}")
    if saved:
        return saved, ()
    usual = tuple(f"client-{i}" for i in range(len(parts)))
    order = "partition.names are" if names and tuple(names) != usual else "client-0, client-1, ... are"
    return usual, (f"partition.scheme: {path} has no names: {order} given to its parts in order, unchecked",)


def by_group(groups: Groups) -> dict[str, Indices]:
    """Return the samples of every group by name (the group's value as text), in natural order.

    >>> {name: held.tolist() for name, held in by_group(np.array(["Site 10", "Site 9", "Site 10"])).items()}
    {'Site 9': [1], 'Site 10': [0, 2]}
    """
    values, place = np.unique(np.asarray(groups), return_inverse=True)
    named = [_safe(str(value)) for value in values.tolist()]
    if twice := {name for name in named if named.count(name) > 1}:
        alike = _listed(sorted(repr(str(value)) for value in values.tolist() if _safe(str(value)) in twice))
        raise DataError.at(
            "partition.scheme",
            f"groups {alike} would be one member, {min(twice)!r}: rename them in the data",
        )
    try:
        check_names(named)
    except KeyFileError as error:
        raise DataError.at(
            "partition.scheme",
            f"a group of the data is a member, and its value the name: {error}: rename it in the data",
        ) from error
    ordered = {name: i for i, name in enumerate(sorted(set(named), key=natural))}
    member = np.array([ordered[name] for name in named], dtype=np.int64)[place]
    ends = np.cumsum(np.bincount(member, minlength=len(ordered)))[:-1]
    return dict(zip(ordered, np.split(np.argsort(member, kind="stable"), ends), strict=True))


def _safe(group: str) -> str:
    """Return a group's value as the name of a member; if it cannot be one, a name like it.

    >>> _safe("St. Mary / North"), _safe("Abbey")
    ('St. Mary - North', 'Abbey')
    """
    with contextlib.suppress(KeyFileError):
        check_name(group)
        return group
    text = unicodedata.normalize("NFC", re.sub(r"[/\\]", "-", group))
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def natural(name: str) -> tuple[Any, ...]:
    """Return a sort key that orders numbers in names by size, and puts names that are integers first.

    >>> sorted(["Site 10", "Site 2", "10", "-3", "9"], key=natural)
    ['-3', '9', '10', 'Site 2', 'Site 10']
    """
    if re.fullmatch("-?[0-9]+", name):
        return 0, int(name), name
    pieces = re.split("([0-9]+)", name)  # text, digits, text, ...
    return 1, [int(piece) if i % 2 else piece for i, piece in enumerate(pieces)], name


def _listed(names: Iterable[str]) -> str:
    return first_names(list(names), LISTED)


def _dirichlet(
    labels: Labels, clients: int, mu: float, minimum: int, rng: np.random.Generator
) -> list[Indices]:
    if not 0 < mu <= LARGEST:  # larger ones overflow
        raise DataError.at("partition.mu", f"expected a positive number, at most {LARGEST:g}, got {mu}")
    values, counts = np.unique(labels, return_counts=True)
    for _ in range(DRAWS):
        proportions = rng.dirichlet(np.full(clients, float(mu)), size=len(values))
        # Sample k of class c goes to the client whose interval of cumulative proportions contains k / n_c.
        ends = np.rint(np.cumsum(proportions, axis=1) * counts[:, None]).astype(np.int64)
        ends[:, -1] = counts
        held = np.diff(ends, axis=1, prepend=0).sum(axis=0)
        if held.min() >= minimum:
            break
    dealt = [
        np.split(rng.permutation(np.flatnonzero(labels == value)), ends[c, :-1])
        for c, value in enumerate(values)
    ]
    parts = [np.concatenate([of_class[i] for of_class in dealt]) for i in range(clients)]
    while min(map(len, parts)) < minimum:
        poor = min(range(clients), key=lambda i: len(parts[i]))
        rich = max(range(clients), key=lambda i: len(parts[i]))
        give = rng.integers(len(parts[rich]))
        parts[poor] = np.append(parts[poor], parts[rich][give])
        parts[rich] = np.delete(parts[rich], give)
    return parts


def _sizes(n: int, clients: int, sizes: list[float], rng: np.random.Generator) -> list[Indices]:
    if len(sizes) != clients:
        raise DataError.at("partition.sizes", f"expected {clients} sizes, one per client, got {len(sizes)}")
    for i, size in enumerate(sizes):
        if not size > 0:
            raise DataError.at("partition.sizes", f"size of client {i} must be positive, got {size}")
    if all(isinstance(size, int | np.integer) for size in sizes):
        if sum(sizes) > n:
            raise DataError.at("partition.sizes", f"they add up to {sum(sizes)} samples, the data has {n}")
        ends = np.cumsum(sizes)
    else:
        if not sum(sizes) <= 1 + 1e-9:
            raise DataError.at(
                "partition.sizes",
                f"sizes that are not all integers are fractions with a sum of at most 1, got {sum(sizes)}",
            )
        ends = np.minimum(np.rint(np.cumsum(sizes) * n), n).astype(np.int64)
    return np.split(rng.permutation(n), ends)[:-1]


def save(path: str | Path, parts: Sequence[Indices], samples: int, names: Sequence[str] = ()) -> None:
    """Write a partition of ``samples`` samples as JSON, with the names of the clients if given.

    ``{"samples": n, "clients": [[0, 5, ...], [1, ...], ...], "names": ["Abbey", ...]}``. A file without names
    can only be matched to clients by order.
    """
    content: dict[str, Any] = {"samples": int(samples)}
    content["clients"] = [np.asarray(part).tolist() for part in parts]
    if names:
        content["names"] = list(_checked(names, len(parts), "names"))
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")


def restore(path: str | Path, samples: int | None = None) -> tuple[list[Indices], tuple[str, ...]]:
    """Return the parts and the names in a file that `save` wrote; the names are empty if it has none.

    Indices that repeat or lie outside the dataset's ``samples`` are refused.
    """
    path = Path(path)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        total, parts = saved["samples"], [np.asarray(part) for part in saved["clients"]]
        names = saved.get("names")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except KeyError as error:
        raise DataError(f"{path}: not a partition file: {error.args[0]} is missing") from error
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a partition file: {error}") from error
    if type(total) is not int or total < 1:
        raise DataError(f"{path}: samples must be a whole number of at least 1, got {total!r:.60}")
    if samples is not None and total != samples:
        raise DataError(f"{path}: made for {total} samples, the dataset has {samples}")
    owner: dict[int, int] = {}
    for i, part in enumerate(parts):
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise DataError(f"{path}: client {i} must be a list of integers")
        for index in part.tolist():
            if not 0 <= index < total:
                raise DataError(f"{path}: client {i} holds sample {index}, outside 0 .. {total - 1}")
            if index in owner:
                raise DataError(f"{path}: sample {index} is held by clients {owner[index]} and {i}")
            owner[index] = i
    checked = () if names is None else _checked(names, len(parts), f"{path}: names")
    return [part.astype(np.int64) for part in parts], checked


def _checked(names: Any, count: int, what: str) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or len(names) != count or len(set(map(str, names))) != count:
        raise DataError(f"{what}: expected {count} different names, one per client, got {names!r:.200}")
    try:
        check_names(names)
    except KeyFileError as error:
        raise DataError(f"{what}: {error}") from error
    return tuple(names)


# --------------------------------------------------------------------------------------------- corruptions

Behaviour = Literal["honest", "zero", "noise", "stale"]
"""What a client sends: a trained model, no change, random noise, or the previous round's global model."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientData:
    """What one client trains on, and how it behaves."""

    name: str
    x: Images
    y: Labels
    behaviour: Behaviour = "honest"
    held_out: tuple[Images, Labels] | None = None  # by which it judges in a panel; not in x and y


def hold_out(client: ClientData, part: float, rng: np.random.Generator) -> ClientData:
    """Take a part of a client's samples out of its training: by these it judges the others."""
    order, count = rng.permutation(len(client.y)), round(part * len(client.y))
    held, rest = np.sort(order[:count]), np.sort(order[count:])
    if not len(held) or not len(rest):
        problem = f"client {client.name!r} has {len(client.y)} samples, of which {count} would be held out"
        raise DataError.at("panel.held_out", problem)
    return replace(client, x=client.x[rest], y=client.y[rest], held_out=(client.x[held], client.y[held]))


def label_noise(y: Labels, rate: float, classes: int, rng: np.random.Generator) -> Labels:
    """Replace each label, with probability ``rate``, by a uniformly random class (its own included).

    The expected share of wrong labels is rate * (1 - 1/C).

    >>> label_noise(np.array([1, 1, 1]), 0.0, 10, np.random.default_rng(0))
    array([1, 1, 1])
    """
    if not 0 <= rate <= 1:
        raise DataError.at("corruption.label_noise", f"expected a rate in [0, 1], got {rate!r}")
    hit = rng.random(len(y)) < rate
    return np.where(hit, rng.integers(classes, size=len(y)), y)


def label_flip(y: Labels, classes: int) -> Labels:
    """Return C-1-y for each label y. With an odd number of classes the middle one stays.

    >>> label_flip(np.array([0, 1, 9]), 10)
    array([9, 8, 0])
    """
    return classes - 1 - y


def apply(
    x: Images,
    y: Labels,
    parts: Sequence[Indices],
    names: Sequence[str],
    classes: int,
    rng: np.random.Generator,
    faults: Corruption | None = None,
) -> list[ClientData]:
    """Give each client its part of (x, y) and corrupt the clients that ``faults`` name.

    Label noise "ramp" has the rates i/(N-1): the first client is clean, the last has random labels.

    Args:
        x: all training samples.
        y: all training targets.
        parts: from `split`.
        names: of the clients, in the same order.
        classes: number of classes C.
        rng: spawns one generator per client, so that no client's noise depends on that of others.
        faults: each client may have one.
    """
    faults = faults or Corruption()
    rates, flipped, riders = faults.label_noise, faults.label_flip, faults.free_rider
    if isinstance(rates, str):
        last = len(names) - 1
        rates = {name: i / last for i, name in enumerate(names)}
    noise = {name: rate for name, rate in rates.items() if rate}
    corrupted: dict[str, str] = {}
    for setting, listed in (("label_noise", noise), ("label_flip", flipped), ("free_rider", riders)):
        for name in listed:
            if name in corrupted:
                problem = f"client {name!r} is in {corrupted[name]} too: one corruption each"
                raise DataError.at(f"corruption.{setting}", problem)
            corrupted[name] = setting

    made = []
    for name, part, own in zip(names, parts, rng.spawn(len(names)), strict=True):
        labels = y[part]
        if name in noise:
            labels = label_noise(labels, noise[name], classes, own)
        elif name in flipped:
            labels = label_flip(labels, classes)
        behaviour: Behaviour = riders.get(name, "honest")
        made.append(ClientData(name=name, x=x[part], y=labels, behaviour=behaviour))
    return made


# ------------------------------------------------------------------------------------------- the test pool


def choose_pool(
    dataset: Dataset, size: int, rng: np.random.Generator, *, key: bytes, utility_hash: str, **cut: Any
) -> Pool:
    """Choose ``size`` test samples, balanced over classes (counts differ by at most one), and slice them.

    Any consecutive slice is as balanced as the pool. ``size`` 0 takes the whole test set, unbalanced; its
    slices then follow the class proportions of the whole. Where y is not a class label, samples are drawn at
    random. The salts are derived from the secret ``key``: whoever has it can test guesses of images.
    ``utility_hash`` is the SHA-256 of the utilities' definitions; for what else says how the pool is cut, see
    `pool_order`.
    """
    indices, slices, settled = pool_order(dataset, size, rng, **cut)
    return Pool(
        indices=indices,
        x=dataset.x_test[indices],
        y=dataset.y_test[indices],
        slices=slices,
        balanced=bool(dataset.classes) and size > 0,
        classes=len(dataset.classes),
        utility_hash=utility_hash,
        key=key,
        settled=settled,
    )


def pool_order(
    dataset: Dataset,
    size: int,
    rng: np.random.Generator,
    *,
    reveal: str = "fixed",
    rounds: int = 1,
    method: str = "reports",
    blocks: int = 1,
) -> tuple[npt.NDArray[np.int64], int, int]:
    """Return the test samples of a pool in their order, its slices, and how many samples are settled.

    Args:
        dataset: only its test half is used.
        size: samples in the pool; 0 takes all.
        rng: chooses and orders them.
        reveal: "fixed" or "per-round".
        rounds: number of slices for "per-round".
        method: "reports", or "both" or "settled", which leave half or all of the pool to the settlement.
        blocks: of the settlement; each needs a sample.
    """
    total, classes = size or len(dataset.y_test), len(dataset.classes)
    counts = _test_counts(dataset, size)
    slices, settled = parts_of(total, method=method, reveal=reveal, rounds=rounds)
    if method != "reports":
        _check_parts(total, max(1, classes), method, slices - 1, blocks)
    elif not classes and total < 2 * slices:
        problem = f"expected at least {2 * slices} samples, 2 for each of {slices} slices, got {total}"
        raise ConfigError.at("data.test_size", problem)
    elif total // slices < classes:
        raise DataError(
            f"a pool of {total} cut into {slices} slices leaves {total // slices} samples each, fewer than "
            f"the {classes} classes: expected test_size of at least {slices * classes}"
        )
    if not classes:
        indices = rng.permutation(len(dataset.y_test))[:total].astype(np.int64)
        return apart(indices, dataset.x_test, dataset.y_test, settled, by_class=False), slices, settled

    # Classes in random order, except that those with enough samples to give one more come first.
    order = rng.permutation(len(counts))
    order = order[np.argsort(counts[order] <= total // len(counts), kind="stable")]
    place, turn = np.empty(len(dataset.y_test)), np.empty(len(dataset.y_test))
    for position, c in enumerate(order):
        members = rng.permutation(np.flatnonzero(dataset.y_test == c))
        count = np.arange(len(members))
        place[members] = count if size else (count + 0.5) / len(members)
        turn[members] = position
    indices = np.lexsort((turn, place))[:total].astype(np.int64)
    for s in range(slices):
        classes_in = dataset.y_test[indices[span_of(total, slices, s, settled)]].tolist()
        if lacking := {*range(classes)} - {*classes_in}:
            raise DataError(
                f"test slice {s} of {slices} has no sample of class {dataset.classes[min(lacking)]!r}: "
                "expected fewer rounds or a balanced pool"
            )
    return apart(indices, dataset.x_test, dataset.y_test, settled, by_class=True), slices, settled


def _check_parts(total: int, classes: int, method: str, for_rounds: int, blocks: int) -> None:
    least, parts = max(classes, blocks), "the settlement"
    if for_rounds:
        least = max(2 * for_rounds * classes - 1, 2 * least)
        parts = f"{for_rounds} slices for rounds and a half for the settlement"
    if total < least:
        raise ConfigError.at(
            "data.test_size",
            f"expected at least {least} samples with scoring.method = {method!r}, for {parts}, each with all "
            f"{classes} classes, and {blocks} blocks, got {total}",
        )


def _test_counts(dataset: Dataset, size: int) -> npt.NDArray[Any]:
    """Return the test samples of every class; raise if the pool needs more, or a class has none.

    A balanced pool takes at most min(counts) per class, and one more from larger classes.
    """
    counts = np.bincount(dataset.y_test, minlength=len(dataset.classes)) if dataset.classes else np.zeros(0)
    if not dataset.classes and size > len(dataset.y_test):
        samples = f"{len(dataset.y_test)} test samples of {dataset.name}"
        raise ConfigError.at("data.test_size", f"expected at most the {samples}, got {size}")
    if not counts.all():
        absent = dataset.classes[int(counts.argmin())]
        raise DataError(f"{dataset.name}: class {absent!r} has no test sample")
    if not dataset.classes or not size:
        return counts
    least = int(counts.min())
    fits = least * len(counts) + int((counts > least).sum())
    if size > fits:
        scarce = dataset.classes[int(counts.argmin())]
        raise DataError(
            f"{dataset.name}: a balanced test pool of {size} needs {size // len(counts)} or more samples of "
            f"every class, but class {scarce!r} has {least}: expected test_size of at most {fits}"
        )
    return counts
