"""Value and gradient of a PyTorch model, for users who do not write them by hand.

::

    scoring = fedmerit.flower.torch_scoring(network, "expected-accuracy")
    app = fedmerit.flower.secure(ClientApp(), value=scoring.value, gradient=scoring.gradient)

torch is imported when one of the functions is called: Flower starts a process for every message, and most
need no network.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from fedmerit.errors import ConfigError, MessageError
from fedmerit.flower.codec import Gradient, Value


class Measures(NamedTuple):
    """What `secure` and `Contributions` take: ``value`` and ``gradient`` of the same utility."""

    value: Value
    gradient: Gradient


def torch_scoring(
    network: Callable[[], Any],
    utility: str | Sequence[str] = "expected-accuracy",
    *,
    scale: float = 0.0,
    whole: Sequence[str] = (),
) -> Measures:
    """Return value and gradient of a PyTorch model.

    Samples of shape (m, height, width, channels) are images: uint8 becomes x / 127.5 - 1, floats stay as they
    are, and the network gets them as (m, channels, height, width). Samples of any other shape reach it
    as they are. It runs in evaluation mode. Floating-point buffers, such as BatchNorm's running statistics,
    are coordinates of the gradient.

    Args:
        network: returns the network, with any weights; its ``state_dict`` has the names of Flower's arrays.
        utility: what is measured, such as "expected-accuracy" or "brier", or "module:function". Of several,
            the first is paid and has the gradient. Metrics of the whole test set have none.
        scale: for rmse-skill and mae-skill: the error, in the unit of y, from which on an answer counts as 0.
        whole: those of your own that are metrics of the whole test set; give `Contributions` the same.

    Raises:
        NoGradient: when the gradient is computed, if the utility, a parameter or a floating-point buffer has
            none.
    """
    utilities = (utility,) if isinstance(utility, str) else tuple(utility)
    if not callable(network) or not utilities:
        raise ConfigError("torch_scoring: expected a function that returns the network, and a utility")
    one = cache(network)

    def loaded(arrays: ArrayRecord) -> Any:
        import torch

        net = one()
        given = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
        try:
            net.load_state_dict(given)
        except RuntimeError as error:
            raise MessageError(f"the arrays are not those of the network: {error!s:.300}") from None
        return net

    def value(arrays: ArrayRecord, test: Any) -> Mapping[str, npt.ArrayLike]:
        from fedmerit.simulation.utilities import evaluate, metric_of, resolve_all

        net, found = loaded(arrays), dict[str, npt.ArrayLike]()
        wanted = resolve_all(utilities, scale=scale, whole=whole)
        if each := [one for one in wanted if not one.whole]:
            found |= evaluate(net, test.x, test.y, each)
        found |= {one.name: metric_of(net, test.x, test.y, one) for one in wanted if one.whole}
        return found if len(utilities) > 1 else found[utilities[0]]  # type: ignore[return-value]

    def gradient(arrays: ArrayRecord, test: Any) -> tuple[float, dict[str, npt.NDArray[Any]]]:
        from fedmerit.simulation.direction import slope
        from fedmerit.simulation.utilities import resolve

        paid = resolve(utilities[0], scale=scale, whole=whole)
        found, parts = slope(loaded(arrays), test.x, test.y, paid)
        return found, {name: part.cpu().numpy() for name, part in parts.items()}

    try:
        source = inspect.getsource(network)
    except (OSError, TypeError):
        source = ""
    for function in (value, gradient):
        vars(function)["definition"] = "\n".join((*utilities, *((repr(scale),) if scale else ()), source))
    return Measures(value, gradient)
