"""Who holds which training samples: labels -> one sorted index array per client.

=========== ================================================================================
scheme      rule
=========== ================================================================================
iid         a random deal, sizes differ by at most one
dirichlet   for every class c, its samples are dealt in proportions p_c ~ Dirichlet(mu, ..., mu)
sizes       a random deal of the given counts, or fractions of all samples; the rest is unused
group       a client per group value (in sorted order), or whole groups dealt to fewer clients
file        indices saved before (`save`, `restore`)
=========== ================================================================================

Clients are always disjoint and each holds at least ``minimum`` samples, or it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.checks import LARGEST
from fedmerit.data.dataset import Groups, Labels
from fedmerit.data.tables import arrays
from fedmerit.errors import DataError

Indices = npt.NDArray[np.int64]
"""Sample numbers of one client, ascending."""

SCHEMES = ("iid", "dirichlet", "group", "sizes", "file")

DRAWS = 100
"""Dirichlet draws tried before the last one is repaired."""


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
) -> list[Indices]:
    """Deal the samples to the clients.

    Args:
        labels: class of every sample.
        clients: how many; may be left out for ``group``, ``sizes`` and ``file``, which know it.
        scheme: one of ``SCHEMES``.
        rng: the only source of randomness; equal state, equal split.
        mu: Dirichlet concentration; small means every client has few classes.
        minimum: fewest samples a client may hold. Dirichlet draws are repeated until it is met, at most
            ``DRAWS`` times; then samples move from the largest client to those below it.
        sizes: for ``sizes``: integers are counts, anything else fractions in (0, 1] with a sum of at most 1.
        groups: for ``group``: hospital or centre of every sample.
        file: for ``file``: what `save` wrote.

    >>> [part.tolist() for part in split(np.zeros(5, int), 2, rng=np.random.default_rng(0))]
    [[2, 3, 4], [0, 1]]
    """
    n = len(labels)
    if scheme not in SCHEMES:
        raise DataError(f"partition.scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    if minimum < 1:
        raise DataError(f"partition.minimum: expected at least 1 sample per client, got {minimum}")
    needed = {"sizes": sizes, "group": groups, "file": file}
    if scheme in needed and needed[scheme] is None:
        have = " (this dataset has none)" if scheme == "group" else ""
        raise DataError(
            f"partition.scheme: {scheme!r} needs {'groups' if scheme == 'group' else scheme}{have}"
        )
    if clients is None:
        clients = _count(scheme, sizes, groups, file)
    if clients < 1:
        raise DataError(f"partition.clients: expected at least 1 client, got {clients}")
    if clients * minimum > n:
        raise DataError(
            f"partition.minimum: {clients} clients with at least {minimum} each need {clients * minimum} "
            f"samples, got {n}"
        )

    if scheme == "iid":
        parts = np.array_split(rng.permutation(n), clients)
    elif scheme == "dirichlet":
        parts = _dirichlet(np.asarray(labels), clients, mu, minimum, rng)
    elif scheme == "sizes":
        parts = _sizes(n, clients, list(sizes or ()), rng)
    elif scheme == "group":
        parts = _group(np.asarray(groups), n, clients)
    else:
        parts = restore(Path(file or ""), samples=n)
        if len(parts) != clients:
            raise DataError(f"partition.file: {file}: holds {len(parts)} clients, expected {clients}")
    for i, part in enumerate(parts):
        if len(part) < minimum:
            held = f"client {i} would hold {len(part)} samples"
            raise DataError(f"partition.minimum: {held}, expected at least {minimum}")
    return [np.sort(part).astype(np.int64) for part in parts]


def _count(scheme: str, sizes: Sequence[float] | None, groups: Groups | None, file: str | Path | None) -> int:
    """The number of clients that the other arguments imply."""
    if scheme == "sizes":
        return len(sizes or ())
    if scheme == "group":
        return len(np.unique(np.asarray(groups)))
    if scheme == "file":
        return len(restore(Path(file or "")))
    raise DataError(f"partition.clients: scheme {scheme!r} needs the number of clients")


def _dirichlet(
    labels: Labels, clients: int, mu: float, minimum: int, rng: np.random.Generator
) -> list[Indices]:
    if not 0 < mu <= LARGEST:  # draws from larger ones overflow
        raise DataError(f"partition.mu: expected a positive number, at most {LARGEST:g}, got {mu}")
    values, counts = np.unique(labels, return_counts=True)
    for _ in range(DRAWS):
        proportions = rng.dirichlet(np.full(clients, float(mu)), size=len(values))
        # Sample k of class c goes to the client whose interval of the cumulative proportions holds k / n_c.
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
        raise DataError(f"partition.sizes: expected {clients} sizes, one per client, got {len(sizes)}")
    for i, size in enumerate(sizes):
        if not size > 0:
            raise DataError(f"partition.sizes: size of client {i} must be positive, got {size}")
    if all(isinstance(size, int | np.integer) for size in sizes):
        if sum(sizes) > n:
            raise DataError(f"partition.sizes: they add up to {sum(sizes)} samples, the data has {n}")
        ends = np.cumsum(sizes)
    else:
        if not sum(sizes) <= 1 + 1e-9:
            raise DataError(
                "partition.sizes: sizes that are not all integers are fractions with a sum of at most 1, "
                f"got {sum(sizes)}"
            )
        ends = np.minimum(np.rint(np.cumsum(sizes) * n), n).astype(np.int64)
    return np.split(rng.permutation(n), ends)[:-1]


def _group(groups: Groups, n: int, clients: int) -> list[Indices]:
    """A client per group; with fewer clients, the largest remaining group goes to the smallest client."""
    if groups.shape != (n,):
        raise DataError(f"expected {n} group values, one per sample, got shape {groups.shape}")
    values, member, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if clients > len(values):
        raise DataError(
            f"partition.clients: {clients} clients but only {len(values)} groups: "
            f"{', '.join(map(str, values[:20]))}"
        )
    owner = np.arange(len(values))
    if clients < len(values):
        held = [0] * clients
        for group in np.argsort(-counts, kind="stable"):
            owner[group] = held.index(min(held))
            held[owner[group]] += int(counts[group])
    return [np.flatnonzero(owner[member] == i) for i in range(clients)]


def save(path: str | Path, parts: Sequence[Indices], samples: int) -> None:
    """Write a partition of ``samples`` samples.

    ``.json``: ``{"samples": n, "clients": [[0, 5, ...], [1, ...], ...]}``; ``.npz``: the integers
    ``samples`` and the arrays ``client_0``, ``client_1``, ...
    """
    path = _suffixed(path)
    if path.suffix == ".json":
        text = json.dumps({"samples": int(samples), "clients": [np.asarray(part).tolist() for part in parts]})
        path.write_text(text + "\n", encoding="utf-8")
    else:
        held: dict[str, Any] = {f"client_{i}": np.asarray(part) for i, part in enumerate(parts)}
        np.savez_compressed(path, samples=np.int64(samples), **held)


def restore(path: str | Path, samples: int | None = None) -> list[Indices]:
    """Read what `save` wrote; refuse indices that repeat or lie outside the ``samples`` of the dataset."""
    path = _suffixed(path)
    try:
        if path.suffix == ".json":
            saved = json.loads(path.read_text(encoding="utf-8"))
            total, listed = saved["samples"], [np.asarray(part) for part in saved["clients"]]
        else:
            saved = arrays(path)
            total = int(saved["samples"])
            listed = [saved[f"client_{i}"] for i in range(len(saved) - 1)]
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except KeyError as error:
        raise DataError(f"{path}: not a partition file: {error.args[0]} is missing") from error
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a partition file: {error}") from error
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


def _suffixed(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in (".json", ".npz"):
        raise DataError(f"{path}: a partition file ends in .json or .npz")
    return path
