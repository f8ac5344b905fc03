"""N clients and a server in one process, to test and measure secure sums."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg.client import Client
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.server import Server
from fedmerit.secagg.setting import STAGES, Setting, Task, Update


@dataclass(frozen=True)
class InMemory:
    """The result of a round in one process."""

    mean: npt.NDArray[np.float64]  # weighted mean of the included vectors
    total_weight: float
    included: tuple[int, ...]  # indices into the vectors

    def __repr__(self) -> str:
        return f"InMemory({len(self.mean)} coordinates, included={self.included})"


def run_in_memory(
    vectors: Sequence[npt.ArrayLike],
    weights: Sequence[float] | None = None,
    threshold: int | None = None,
    lost: Mapping[str, Sequence[int]] | None = None,
    bound: float | None = None,
    seed: int | bytes | None = None,
    word_bytes: Literal[4, 8] = 4,
) -> InMemory:
    """Sum vectors securely, with all parties in this process.

    Args:
        vectors: one update per member.
        weights: sample counts, which stay secret; their maximum is the public cap. None: uniform.
        threshold: how many members suffice; None for floor(2N/3) + 1.
        lost: by stage, the members whose message of that stage, and every later one, never arrives.
        bound: largest allowed |coordinate|; None looks at all vectors, which no real party could do.
        seed: seed of the rounding only. Keys always come from the operating system.
        word_bytes: size of a masked word on the wire: 4 or 8. The result is the same.

    >>> run = run_in_memory([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], lost={"masked": [3]}, seed=0)
    >>> run.mean.round(6).tolist(), run.total_weight, run.included
    ([3.0, 4.0], 3.0, (0, 1, 2))
    """
    arrays = [np.asarray(vector) for vector in vectors]
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
        bound=bound or max(float(np.abs(array).max()) for array in arrays) or 1.0,
        weights="uniform" if weights is None else "secret",
        weight_cap=1 if weights is None else max(weights),
        word_bytes=word_bytes,
    )
    task = Task(hashlib.sha256(b"no model").digest(), encoding)
    server = Server(setting, task)
    clients = [Client(setting, name, key) for name, key in zip(names, identities, strict=True)]
    shown, gone = dict.fromkeys(names, b""), set[int]()
    for stage in STAGES:
        gone |= {*(lost or {}).get(stage, ())}
        for index, client in enumerate(clients):
            if client.name not in shown or index in gone:
                continue
            if stage == "masked":
                own_seed = seed if seed is None else b"%a %d" % (seed, index)
                update = Update(task, arrays[index], None if weights is None else weights[index], own_seed)
                message = client.masked(shown[client.name], update)
            else:
                message = client.handle(shown[client.name])
            server.receive(message, client.name)
        shown = dict(server.advance())
    assert server.result is not None
    included = tuple(names.index(name) for name in server.result.included)
    return InMemory(server.result.mean, server.result.total_weight, included)
