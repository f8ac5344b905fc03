"""N clients and a server in one process: to try the protocol, to test it, to measure it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.errors import BindingError, ConfigError, RefusedError
from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import STAGES
from fedmerit.secagg.quantise import Encoding, is_number, seed_bytes, whole
from fedmerit.secagg.server import Server
from fedmerit.secagg.setting import Setting, Task, Update

__all__ = ["InMemory", "run_in_memory"]

Vector = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class InMemory:
    """What a round in one process gave."""

    mean: npt.NDArray[np.float64]  # weighted mean of the included
    total_weight: float
    included: tuple[int, ...]  # indices into the vectors
    transcript: dict[str, dict[int, bytes]]  # all the server received, by stage and index

    def __repr__(self) -> str:
        return f"InMemory({len(self.mean)} coordinates, included={self.included})"


def run_in_memory(
    vectors: Sequence[npt.ArrayLike],
    weights: Sequence[float] | None = None,
    threshold: int | None = None,
    lost: Mapping[str, Sequence[int]] | None = None,
    bound: float | Literal["auto"] = "auto",
    seed: int | bytes | None = None,
) -> InMemory:
    """Sum vectors securely, all parties in this process.

    Args:
        vectors: one update a member.
        weights: sample counts, which stay secret; their maximum is the public cap. None: uniform.
        threshold: how many members suffice; None for floor(2N/3) + 1.
        lost: for a stage, the members whose message of that stage, and every later one, never arrives.
        bound: largest allowed |coordinate|; "auto" looks at all vectors, which no real party could.
        seed: of the rounding only. Keys always come from the operating system.

    Raises:
        RoundAborted: too few members were left.
        ConfigError: weights, lost, bound or seed cannot be used.
        ProtocolError: of another kind, where a vector or the threshold cannot be used.

    >>> run = run_in_memory([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], lost={"masked": [3]}, seed=0)
    >>> run.mean.round(6).tolist(), run.total_weight, run.included
    ([3.0, 4.0], 3.0, (0, 1, 2))
    """
    arrays = [_vector(vector, index) for index, vector in enumerate(_listed(vectors, "vectors"))]
    away = _leaving(lost or {}, len(arrays))
    if not arrays:
        raise RefusedError("there is nothing to sum", stage="setting")
    counts = None if weights is None else _counts(weights, len(arrays))
    if seed is not None and not isinstance(seed, bytes):
        seed_bytes(seed)  # complains
        seed = whole(seed)
    identities = [Ed25519PrivateKey.generate() for _ in arrays]
    names = tuple(f"client-{index}" for index in range(len(arrays)))
    setting = Setting(
        run=secrets.token_hex(8),
        round=1,
        attempt=0,
        members=names,
        roster=Roster(Member(n, public_key(key)) for n, key in zip(names, identities, strict=True)),
        config_hash=hashlib.sha256(b"in memory").digest(),
        threshold=threshold,
    )
    encoding = Encoding(
        length=arrays[0].size,
        members=len(arrays),
        bound=_largest(arrays) if isinstance(bound, str) and bound == "auto" else bound,
        weights="uniform" if counts is None else "secret",
        weight_cap=1 if counts is None else max(counts),
    )
    task = Task(hashlib.sha256(b"no model").digest(), encoding)
    server = Server(setting, task)
    clients = [Client(setting, name, key) for name, key in zip(names, identities, strict=True)]
    transcript: dict[str, dict[int, bytes]] = {stage: {} for stage in STAGES}
    shown: dict[str, bytes | None] = dict.fromkeys(names)
    for at, stage in enumerate(STAGES):
        for index, client in enumerate(clients):
            if client.name not in shown or away.get(index, len(STAGES)) <= at:
                continue
            update = None
            if stage == "masked":
                own_seed = seed if seed is None else b"%a %d" % (seed, index)
                weight = None if counts is None else counts[index]
                update = Update(task, arrays[index], weight, own_seed)
            message = client.handle(shown[client.name], update)
            server.receive(message, client.name)
            transcript[stage][index] = message
        shown = dict(server.advance())
    assert server.result is not None
    included = tuple(names.index(name) for name in server.result.included)
    return InMemory(server.result.mean, server.result.total_weight, included, transcript)


def _listed(values: Any, what: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ConfigError(f"{what}: expected a list, got {type(values).__name__}") from None


def _counts(weights: Any, members: int) -> list[float]:
    """Sample counts as numbers; which of them the round can use, the encoding says."""
    counts = _listed(weights, "weights")
    if len(counts) != members:
        raise BindingError(f"expected {members} weights, got {len(counts)}", stage="setting")
    if not all(is_number(count) and count >= 1 and float(count).is_integer() for count in counts):
        raise ConfigError("weights: sample counts must be whole numbers of at least 1")
    return [float(count) for count in counts]


def _vector(vector: npt.ArrayLike, index: int) -> Vector:
    try:
        array = vector if isinstance(vector, np.ndarray) else np.asarray(vector, dtype=np.float64)
    except (ValueError, TypeError):
        raise BindingError("not a vector of numbers", stage="masked", member=f"client-{index}") from None
    if array.size == 0:
        raise BindingError(
            "an update needs at least one coordinate", stage="masked", member=f"client-{index}"
        )
    return array


def _largest(arrays: Sequence[Vector]) -> float:
    """The largest finite |coordinate|; what is not finite is found, and named, when it is encoded."""
    largest = 0.0
    for array in arrays:
        if np.issubdtype(array.dtype, np.floating):
            finite = array if np.isfinite(array).all() else array[np.isfinite(array)]
            largest = max(largest, float(np.abs(finite).max(initial=0.0)))
    return largest or 1.0


def _leaving(lost: Mapping[str, Sequence[int]], members: int) -> dict[int, int]:
    """The first stage, by number, whose message of a member is lost."""
    away: dict[int, int] = {}
    if not isinstance(lost, Mapping):
        raise ConfigError(f"lost: expected members by stage, got {type(lost).__name__}")
    for stage, indices in lost.items():
        if stage not in STAGES:
            raise ConfigError(f"lost: unknown stage {stage!r}; the stages are {', '.join(STAGES)}")
        for given in _listed(indices, f"lost: {stage}"):
            index = whole(given)
            if index is None or not 0 <= index < members:
                raise ConfigError(f"lost: there is no member {given!r:.40} among {members}")
            away[index] = min(STAGES.index(stage), away.get(index, len(STAGES)))
    return away
