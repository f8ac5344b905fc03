"""Partitions: which client holds which training samples, and which clients are corrupted on purpose.

=========== ================================================================================
scheme      rule
=========== ================================================================================
iid         a random deal; sizes differ by at most one
dirichlet   for every class c, its samples are dealt in proportions p_c ~ Dirichlet(mu, ..., mu)
sizes       a random deal of the given counts or fractions of all samples; the rest is unused
group       one client per group, named after it; `merge` makes one client of several groups
file        indices saved before (`save`, `restore`), by name if they were saved with names
=========== ================================================================================

Clients never share samples, and each must hold at least ``minimum``; otherwise an error is raised. With
``group`` and ``file`` a client's name selects its samples, so no client gets the samples of another name.

`apply` gives every client its samples and corrupts the clients named in the ``[corruption]`` settings, with
one corruption per client::

    label_noise = {client-5 = 0.8}          or "ramp": client i of N at rate i/(N-1)
    label_flip  = ["client-2"]              y -> C-1-y
    duplicate   = {client-3 = "client-0"}   trains on what client-0 trains on
    free_rider  = {client-1 = "zero"}       the engine sends no change, "noise", or a "stale" model for it

Further settings there are not about a client's own samples: the engine carries them out in every round.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from fedmerit.data.dataset import Groups, arrays
from fedmerit.errors import DataError, KeyFileError
from fedmerit.identity import check_name, check_names
from fedmerit.notes import first_names
from fedmerit.protocol.pool import Images, Labels
from fedmerit.scoring.validate import LARGEST

Indices = npt.NDArray[np.int64]
"""Sample numbers of one client, in ascending order."""

SCHEMES = ("iid", "dirichlet", "group", "sizes", "file")

DRAWS = 100
"""Number of Dirichlet draws before the last one is repaired."""

NO_GROUPS = (
    "'group' needs groups, and this dataset has none: data.options.group names their column in a table, and "
    "an .npz file has them in the array group_train"
)

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
    merge: Mapping[str, Sequence[str]] | None = None,
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
        minimum: fewest samples that a client may hold. Dirichlet draws are repeated until it is met, at most
            ``DRAWS`` times; then samples move from the largest client to those with too few.
        sizes: for ``sizes``: integers are counts, other numbers fractions in (0, 1] with a sum of at most 1.
        groups: for ``group``: hospital or centre of every sample.
        merge: for ``group``: client name -> the groups that form this client.
        file: for ``file``: a file that `save` wrote.
        names: names of the clients, in the order of the result. For ``group``, the groups that take part (by
            default all, in natural order); for ``file``, the names saved with it, in any order.

    >>> [part.tolist() for part in split(np.zeros(5, int), 2, rng=np.random.default_rng(0))]
    [[2, 3, 4], [0, 1]]
    """
    n = len(labels)
    if scheme not in SCHEMES:
        raise DataError.at("partition.scheme", f"expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    if minimum < 1:
        raise DataError.at("partition.minimum", f"expected at least 1 sample per client, got {minimum}")
    needed = {"sizes": sizes, "group": groups, "file": file}
    if scheme in needed and needed[scheme] is None:
        needs = NO_GROUPS if scheme == "group" else f"{scheme!r} needs {scheme}"
        raise DataError.at("partition.scheme", needs)
    if groups is not None and scheme == "group" and groups.shape != (n,):
        raise DataError(f"expected {n} group values, one per sample, got shape {groups.shape}")
    if scheme in ("group", "file"):
        names, _ = members(scheme, names, clients=clients, groups=groups, merge=merge, file=file)
        clients = len(names) if clients is None else clients
    if clients is None:
        clients = len(names or sizes or ())
        if not clients:
            raise DataError.at("partition.clients", f"scheme {scheme!r} needs the number of clients")
    if names and len(names) != clients:
        raise DataError.at("partition.names", f"expected {clients} names, got {_listed(names)}")
    if clients < 1:
        raise DataError.at("partition.clients", f"expected at least 1 client, got {clients}")
    if clients * minimum > n:
        raise DataError.at(
            "partition.minimum",
            f"{clients} clients with at least {minimum} each need {clients * minimum} samples, got {n}",
        )

    if scheme == "iid":
        parts = np.array_split(rng.permutation(n), clients)
    elif scheme == "dirichlet":
        parts = _dirichlet(np.asarray(labels), clients, mu, minimum, rng)
    elif scheme == "sizes":
        parts = _sizes(n, clients, list(sizes or ()), rng)
    elif scheme == "group":
        assert groups is not None
        held = by_group(groups, merge)
        parts = [held[name] for name in names]
    else:
        parts = restore(Path(file or ""), samples=n)
        saved = saved_names(Path(file or "")) or names
        parts = [parts[saved.index(name)] for name in names]
    for i, part in enumerate(parts):
        if len(part) < minimum:
            short = f"{names[i] if names else f'client {i}'} would hold {len(part)} samples"
            raise DataError.at("partition.minimum", f"{short}, expected at least {minimum}")
    return [np.sort(part).astype(np.int64) for part in parts]


def members(
    scheme: str,
    names: Sequence[str] = (),
    *,
    clients: int | None = None,
    groups: Groups | None = None,
    merge: Mapping[str, Sequence[str]] | None = None,
    file: str | Path | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the clients of a ``group`` or ``file`` partition in order, and notes about them.

    Args:
        scheme: ``group`` or ``file``.
        names: the requested names; all if empty.
        clients: the requested number; None or 0 for as many as there are.
        groups: as for `split`.
        merge: as for `split`.
        file: as for `split`.

    Raises:
        DataError: if the data or the file lacks a requested name, or has another number of clients.
    """
    if scheme == "group":
        if groups is None:
            raise DataError.at("partition.scheme", NO_GROUPS)
        there, notes = _group_members(groups, merge, names, clients)
    elif file:
        there, notes = _saved_members(Path(file), names, clients)
    else:
        raise DataError.at(
            "partition.file", "missing: partition.scheme 'file' needs a saved partition (.json or .npz)"
        )
    chosen = tuple(names) or there
    if len(set(chosen)) != len(chosen):
        raise DataError.at("partition.names", f"expected different names, got {_listed(chosen)}")
    return chosen, notes


def _group_members(
    groups: Groups, merge: Mapping[str, Sequence[str]] | None, names: Sequence[str], clients: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of all groups, and notes on groups that are named anew or left out."""
    held, notes = by_group(groups, merge), []
    what = "groups of the data" + (" after partition.merge" if merge else "")
    there = tuple(held)
    merged = {group for listed in (merge or {}).values() for group in listed}
    values = {str(value) for value in np.unique(np.asarray(groups)).tolist()} - merged
    if new := {group: _safe(group) for group in sorted(values, key=natural) if group != _safe(group)}:
        told = _listed(f"{group!r} is {name!r}" for group, name in new.items())
        notes.append(f"groups of the data whose values cannot be names of members have others: {told}")
    if unknown := [name for name in names if name not in held]:
        raise DataError.at(
            "partition.names",
            f"{_listed(map(repr, unknown))} not among the {what}; "
            f"asked for: {_listed(names)}; {what}: {_listed(there)}",
        )
    if names and (left := [name for name in there if name not in names]):
        each = _listed(f"{name} ({len(held[name])})" for name in left)
        notes.append(
            f"partition.names leaves out {len(left)} of the {len(there)} {what}, "
            f"{sum(len(held[name]) for name in left)} of {len(groups)} training samples: {each}"
        )
    if clients and not names and clients != len(there):
        raise DataError.at(
            "partition.clients",
            f"expected {len(there)}, as many as there are {what} ({_listed(there)}), "
            f"got {clients}: leave it out, choose groups in partition.names, or put groups together in "
            "partition.merge",
        )
    return there, tuple(notes)


def _saved_members(
    path: Path, names: Sequence[str], clients: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names in a saved partition, or client-0, client-1, ... with a note if it has none."""
    count, there = len(restore(path)), saved_names(path)
    if there and names and set(names) != set(there):
        raise DataError.at(
            "partition.names",
            f"expected the names in {path}; asked for: {_listed(names)}; in the file: {_listed(there)}",
        )
    asked = clients or len(names) or count
    if asked != count:
        raise DataError.at("partition.file", f"{path}: holds {count} clients, expected {asked}")
    if there:
        return there, ()
    there = tuple(f"client-{i}" for i in range(count))
    given = "partition.names are" if names and tuple(names) != there else "client-0, client-1, ... are"
    return there, (f"partition.file: {path} has no names: {given} given to its parts in order, unchecked",)


def by_group(groups: Groups, merge: Mapping[str, Sequence[str]] | None = None) -> dict[str, Indices]:
    """Return the samples of every group by name (the group's value as text), in natural order.

    Args:
        groups: the group of every sample.
        merge: name -> the groups to merge under this name; the others stay separate.

    >>> {name: held.tolist() for name, held in by_group(np.array(["Site 10", "Site 9", "Site 10"])).items()}
    {'Site 9': [1], 'Site 10': [0, 2]}
    """
    values, place = np.unique(np.asarray(groups), return_inverse=True)
    found = [str(value) for value in values.tolist()]
    owner = {group: name for name, listed in (merge or {}).items() for group in listed}
    there = set(found)
    if unknown := [group for group in owner if group not in there]:
        raise DataError.at(
            "partition.merge",
            f"{_listed(map(repr, unknown))} not among the groups of the data; "
            f"asked for: {_listed(owner)}; groups of the data: {_listed(sorted(found, key=natural))}",
        )
    for name in merge or ():
        if name in there and owner.get(name) != name:
            raise DataError.at(
                "partition.merge",
                "the data has a group of that name, which is not one of those that "
                f"are merged into it: {_listed((merge or {})[name])}",
                entry=name,
            )
    named = [owner.get(group, _safe(group)) for group in found]
    if both := {name for name in named if named.count(name) > 1} - set(merge or ()):
        alike = sorted(group for group, name in zip(found, named, strict=True) if name in both)
        raise DataError.at(
            "partition.scheme",
            f"groups {first_names([repr(group) for group in alike], LISTED)} would be one member, "
            f"{min(both)!r}: name them in partition.merge",
        )
    try:
        check_names(named)
    except KeyFileError as error:
        raise DataError.at(
            "partition.scheme",
            f"a group of the data is a member, and its value the name: {error}; "
            "partition.merge can make groups one or name them anew",
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
    try:
        check_name(group)
        return group
    except KeyFileError:
        pass
    text = unicodedata.normalize("NFC", re.sub(r"[/\\]", "-", group))
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


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
    """Write a partition of ``samples`` samples, with the names of the clients if given.

    ``.json``: ``{"samples": n, "clients": [[0, 5, ...], [1, ...], ...], "names": ["Abbey", ...]}``; ``.npz``:
    the integer ``samples``, the arrays ``client_0``, ``client_1``, ... and the strings ``names``. A file
    without names can only be matched to clients by order.
    """
    path = _suffixed(path)
    names = _checked(names, len(parts), "names") if names else ()
    if path.suffix == ".json":
        content: dict[str, Any] = {"samples": int(samples)}
        content["clients"] = [np.asarray(part).tolist() for part in parts]
        content |= {"names": list(names)} if names else {}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    else:
        held: dict[str, Any] = {f"client_{i}": np.asarray(part) for i, part in enumerate(parts)}
        held |= {"names": np.array(names)} if names else {}
        np.savez_compressed(path, samples=np.int64(samples), **held)


def saved_names(path: str | Path) -> tuple[str, ...]:
    """Return the names in a file that `save` wrote, in its order; empty if it was saved without names."""
    return _read(_suffixed(path))[2]


def restore(path: str | Path, samples: int | None = None) -> list[Indices]:
    """Read a file that `save` wrote; refuse indices that repeat or lie outside the dataset's ``samples``."""
    path = _suffixed(path)
    total, listed, _ = _read(path)
    if samples is not None and total != samples:
        raise DataError(f"{path}: made for {total} samples, the dataset has {samples}")
    owner: dict[int, int] = {}
    for i, part in enumerate(listed):
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise DataError(f"{path}: client {i} must be a list of integers")
        for index in part.tolist():
            if not 0 <= index < total:
                raise DataError(f"{path}: client {i} holds sample {index}, outside 0 .. {total - 1}")
            if index in owner:
                raise DataError(f"{path}: sample {index} is held by clients {owner[index]} and {i}")
            owner[index] = i
    return [part.astype(np.int64) for part in listed]


def _read(path: Path) -> tuple[int, list[npt.NDArray[Any]], tuple[str, ...]]:
    """Return the number of samples, the parts and the names of a saved partition."""
    try:
        if path.suffix == ".json":
            saved = json.loads(path.read_text(encoding="utf-8"))
            total, listed = saved["samples"], [np.asarray(part) for part in saved["clients"]]
            names = saved.get("names")
        else:
            saved = arrays(path)
            total = int(saved["samples"])
            listed = [saved[f"client_{i}"] for i in range(len(saved) - 1 - ("names" in saved))]
            names = saved["names"].tolist() if "names" in saved else None
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except KeyError as error:
        raise DataError(f"{path}: not a partition file: {error.args[0]} is missing") from error
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a partition file: {error}") from error
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        raise DataError(f"{path}: samples must be a whole number of at least 1, got {total!r:.60}")
    return total, listed, () if names is None else _checked(names, len(listed), f"{path}: names")


def _checked(names: Any, count: int, what: str) -> tuple[str, ...]:
    """Return the names; raise `DataError` unless they are ``count`` different valid names."""
    if not isinstance(names, list | tuple) or len(names) != count or len(set(map(str, names))) != count:
        raise DataError(f"{what}: expected {count} different names, one per client, got {names!r:.200}")
    try:
        check_names(names)
    except KeyFileError as error:
        raise DataError(f"{what}: {error}") from error
    return tuple(names)


def _suffixed(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in (".json", ".npz"):
        raise DataError(f"{path}: a partition file ends in .json or .npz")
    return path


# --------------------------------------------------------------------------------------------- corruptions

T = TypeVar("T")

Behaviour = Literal["honest", "zero", "noise", "stale"]
"""What a client sends: a trained model, no change, random noise, or the previous round's global model."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientData:
    """What one client trains on, how it behaves, and how it was corrupted (empty: not at all)."""

    name: str
    x: Images
    y: Labels
    behaviour: Behaviour = "honest"
    corruption: str = ""


def label_noise(y: Labels, rate: float, classes: int, rng: np.random.Generator) -> Labels:
    """Replace each label, with probability ``rate``, by a uniformly random class (its own included).

    The expected share of wrong labels is rate * (1 - 1/C).

    >>> label_noise(np.array([1, 1, 1]), 0.0, 10, np.random.default_rng(0))
    array([1, 1, 1])
    """
    if not _is_rate(rate):
        raise DataError(f"label noise: {RATE}, got {rate!r}")
    hit = rng.random(len(y)) < rate
    return np.where(hit, rng.integers(classes, size=len(y)), y)


def label_flip(y: Labels, classes: int) -> Labels:
    """Return C-1-y for each label y. With an odd number of classes the middle one stays.

    >>> label_flip(np.array([0, 1, 9]), 10)
    array([9, 8, 0])
    """
    return classes - 1 - y


def ramp(clients: int) -> list[float]:
    """Return the noise rates i/(N-1): the first client is clean, the last has random labels.

    >>> ramp(5)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if clients < 2:
        raise DataError.at("corruption.label_noise", f"a ramp needs at least 2 clients, got {clients}")
    return [i / (clients - 1) for i in range(clients)]


def apply(
    x: Images,
    y: Labels,
    parts: Sequence[Indices],
    names: Sequence[str],
    classes: int,
    rng: np.random.Generator,
    *,
    label_noise: Mapping[str, float] | Literal["ramp"] | None = None,
    label_flip: Iterable[str] = (),
    free_rider: Mapping[str, str] | None = None,
    duplicate: Mapping[str, str] | None = None,
) -> list[ClientData]:
    """Give each client its part of (x, y) and corrupt the clients that the settings name.

    Args:
        x: all training images.
        y: all training labels.
        parts: indices of each client, from `split`.
        names: names of the clients, in the same order.
        classes: number of classes C.
        rng: spawns one generator per client, so that no client's noise depends on that of others.
        label_noise: rate in [0, 1] by name, or "ramp" for all clients.
        label_flip: names of clients whose labels are flipped.
        free_rider: "zero", "noise" or "stale" by name.
        duplicate: name -> the client whose data, corrupted or not, it trains on.
    """
    if len(parts) != len(names):
        raise DataError(f"{len(parts)} parts for {len(names)} clients")
    noise = _noise_rates(label_noise, names)
    riders, copies = _mapped(free_rider, "free_rider"), _mapped(duplicate, "duplicate")
    flippers = _named(label_flip, "label_flip")
    _check_names(
        names,
        {"label_noise": noise, "label_flip": flippers, "free_rider": riders, "duplicate": copies},
    )
    _check_riders(riders)
    _check_copies(copies, names)

    made: dict[str, ClientData] = {}
    for name, part, own in zip(names, parts, rng.spawn(len(names)), strict=True):
        images, labels, what = x[part], y[part], ""
        if name in noise:
            labels, what = _label_noise(labels, noise[name], classes, own), f"label noise {noise[name]:g}"
        elif name in flippers:
            labels, what = _label_flip(labels, classes), "labels flipped"
        elif name in riders:
            what = f"free rider: {riders[name]}"
        behaviour = cast(Behaviour, riders.get(name, "honest"))
        made[name] = ClientData(name=name, x=images, y=labels, behaviour=behaviour, corruption=what)
    for name, other in copies.items():
        source = made[other]
        made[name] = ClientData(name=name, x=source.x, y=source.y, corruption=f"data of {other}")
    return [made[name] for name in names]


_label_noise, _label_flip = label_noise, label_flip


def _noise_rates(
    given: Mapping[str, float] | Literal["ramp"] | None, names: Sequence[str]
) -> dict[str, float]:
    """Return the noise rates by name, without rates of 0."""
    if isinstance(given, str):
        if given != "ramp":
            raise DataError.at(
                "corruption.label_noise", f'expected "ramp" or a rate by client, got {given!r}'
            )
        given = dict(zip(names, ramp(len(names)), strict=True))
    rates = _mapped(given, "label_noise")
    for name, rate in rates.items():
        if not _is_rate(rate):
            raise DataError.at("corruption.label_noise", f"{RATE}, got {rate!r}", entry=name)
    return {name: rate for name, rate in rates.items() if rate or name not in names}


RATE = "expected a rate in [0, 1]"


def _is_rate(rate: float) -> bool:
    return not isinstance(rate, bool) and isinstance(rate, int | float | np.number) and bool(0 <= rate <= 1)


def _named(names: Iterable[str], setting: str) -> list[str]:
    if isinstance(names, str):
        raise DataError.at(
            f"corruption.{setting}", f"expected a list of client names, got the string {names!r}"
        )
    return list(names)


def _mapped(given: Mapping[str, T] | None, setting: str) -> dict[str, T]:
    if given is not None and not isinstance(given, Mapping):
        raise DataError.at(f"corruption.{setting}", f"expected a value by client name, got {given!r}")
    return dict(given or {})


def _check_names(names: Sequence[str], settings: Mapping[str, Iterable[str]]) -> None:
    """Raise an error if a name does not exist or has more than one corruption."""
    used: dict[str, str] = {}
    for setting, listed in settings.items():
        where = f"corruption.{setting}"
        for name in listed:
            if name not in names:
                raise DataError.at(where, f"no client {name!r}, expected one of {', '.join(names)}")
            if name in used:
                raise DataError.at(where, f"client {name!r} is in {used[name]} too: one corruption each")
            used[name] = setting


def _check_riders(riders: Mapping[str, str]) -> None:
    allowed = get_args(Behaviour)[1:]
    for name, kind in riders.items():
        if kind not in allowed:
            raise DataError.at(
                "corruption.free_rider", f"expected {', '.join(allowed)}, got {kind!r}", entry=name
            )


def _check_copies(copies: Mapping[str, str], names: Sequence[str]) -> None:
    for name, other in copies.items():
        if other not in names:
            raise DataError.at(
                "corruption.duplicate", f"no client {other!r}, expected one of {', '.join(names)}", entry=name
            )
        if other in copies:
            why = "itself" if other == name else f"{other!r}, which is a duplicate too"
            raise DataError.at("corruption.duplicate", f"client {name!r} cannot copy {why}")
