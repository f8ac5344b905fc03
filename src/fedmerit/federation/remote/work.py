"""What the exchange ``train`` asks of a member: a model to train, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.federation.protocol import Model


@dataclass(frozen=True, eq=False)
class Trained:
    """What local training gave: the model it started from, the change, the number of samples, and what an
    evaluation must know of the model's shape (anything msgpack can carry)."""

    m0: Model
    delta: npt.NDArray[np.float32]
    samples: float | None
    shape: Any = None


def no_check(trained: Trained, config: Config) -> None:
    """Leave it to the masking to refuse an update."""


@dataclass(frozen=True, eq=False)
class Work:
    """A model to train: M0, the digest of everything else that came with it, what trains it, and what says
    in the app's own words why the settings do not allow an update."""

    m0: Model
    extra: bytes
    train: Callable[[], Trained]
    check: Callable[[Trained, Config], None] = no_check
