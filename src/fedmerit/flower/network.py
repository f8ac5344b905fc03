"""Value and gradient of a PyTorch model, for users who do not write them by hand.

::

    scoring = fedmerit.flower.torch_scoring(network, "expected-accuracy")
    app = fedmerit.flower.secure(ClientApp(), value=scoring.value, gradient=scoring.gradient)

torch is imported when one of the functions is called: Flower starts a process for every message, and most
need no network.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from fedmerit.errors import ConfigError, DataError, MessageError
from fedmerit.flower.codec import Gradient, Value

Channels = Literal["first", "last"]
Outputs = Literal["logits", "probabilities"]
MOST_CHANNELS = 4
"""Samples with at most so many channels in front, and more numbers behind, look like channels first."""


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
    channels: Channels | None = None,
    outputs: Outputs | None = None,
) -> Measures:
    """Return value and gradient of a PyTorch model.

    Samples of shape (m, height, width, channels), or with ``channels="first"`` (m, channels, height, width),
    are images: uint8 becomes x / 127.5 - 1, floats stay as they are, and the network gets them as
    (m, channels, height, width). Samples of any other shape reach it as they are. It runs in evaluation mode.
    Floating-point buffers, such as BatchNorm's running statistics, are coordinates of the gradient.

    Args:
        network: returns the network, with any weights; its ``state_dict`` has the names of Flower's arrays.
        utility: what is measured, such as "expected-accuracy" or "brier", or "module:function". Of several,
            the first is paid and has the gradient. Metrics of the whole test set have none.
        scale: for rmse-skill and mae-skill: the error, in the unit of y, from which on an answer counts as 0.
        whole: those of your own that are metrics of the whole test set.
        channels: where images have their channels. Unless given, they come last, and images that look as if
            they came first are refused.

        outputs: what the network returns for classes. Unless given, logits, and outputs that look like
            probabilities, as after a sigmoid or softmax, are refused.

    `Contributions` takes the names of the utilities, scale and whole from these functions unless it is given
    ``utilities``.

    Raises:
        ConfigError: when a network is measured whose outputs look like probabilities.
        DataError: when images are measured that look as if their channels came first.
        NoGradient: when the gradient is computed, if the utility, a parameter or a floating-point buffer has
            none.
    """
    utilities = (utility,) if isinstance(utility, str) else tuple(utility)
    if not callable(network) or not utilities:
        raise ConfigError("torch_scoring: expected a function that returns the network, and a utility")
    if channels not in (None, "first", "last"):
        raise ConfigError(f"torch_scoring: channels: expected 'first' or 'last', got {channels!r}")
    if outputs not in (None, "logits", "probabilities"):
        raise ConfigError(f"torch_scoring: outputs: expected 'logits' or 'probabilities', got {outputs!r}")
    one = _Once(network)

    def resolved(net: Any, x: npt.NDArray[Any]) -> tuple[Any, ...]:
        """Return the utilities; of the first network that is measured, check what it returns."""
        from fedmerit.simulation.utilities import check_kind, resolve_all

        found = resolve_all(utilities, scale=scale, whole=whole, probabilities=outputs == "probabilities")
        if not one.checked:
            check_kind(net, x, found, outputs or "")
            one.checked = True
        return found

    def loaded(arrays: ArrayRecord) -> Any:
        import torch

        net = one()
        given = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
        try:
            net.load_state_dict(given)
        except RuntimeError as error:
            raise MessageError(
                "the arrays are not those of the network: expected ArrayRecord(model.state_dict()) of such a "
                f"model: {error!s:.300}"
            ) from None
        return net

    def value(arrays: ArrayRecord, test: Any) -> Mapping[str, npt.ArrayLike]:
        from fedmerit.simulation.utilities import evaluate, metric_of

        net, found = loaded(arrays), dict[str, npt.ArrayLike]()
        with _images(test.x, channels) as x:
            wanted = resolved(net, x)
            if each := [one for one in wanted if not one.whole]:
                found |= evaluate(net, x, test.y, each)
            found |= {one.name: metric_of(net, x, test.y, one) for one in wanted if one.whole}
        return found if len(utilities) > 1 else found[utilities[0]]  # type: ignore[return-value]

    def gradient(arrays: ArrayRecord, test: Any) -> tuple[float, dict[str, npt.NDArray[Any]]]:
        from fedmerit.simulation.direction import slope

        net = loaded(arrays)
        with _images(test.x, channels) as x:
            found, parts = slope(net, x, test.y, resolved(net, x)[0])
        return found, {name: part.cpu().numpy() for name, part in parts.items()}

    try:
        source = inspect.getsource(network)
    except (OSError, TypeError):
        source = ""
    stated = (*utilities, *((repr(scale),) if scale else ()), *((channels,) if channels else ()))
    stated += (*((outputs,) if outputs else ()), source)
    names = {"utilities": list(utilities), "whole": list(whole)}
    for function in (value, gradient):
        vars(function)["definition"] = "\n".join(stated)
        vars(function)["scoring"] = {**names, **({"scale": float(scale)} if scale else {})}
    return Measures(value, gradient)


class _Once:
    """Makes a network when it is first asked for one; its copy in another process makes its own.

    Flower's simulation pickles the ClientApp with every message, so this leaves the network out.
    """

    def __init__(self, network: Callable[[], Any]) -> None:
        self.network, self._made, self.checked = network, None, False

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self.network()
        return self._made

    def __reduce__(self) -> tuple[Any, ...]:
        return _Once, (self.network,)


@contextlib.contextmanager
def _images(x: npt.NDArray[Any], channels: Channels | None) -> Iterator[npt.NDArray[Any]]:
    """Yield samples with the channels of images last; if the network fails on images, say what it got."""
    if x.ndim != 4 or not (x.dtype == np.uint8 or x.dtype.kind == "f"):
        yield x
        return
    shape = tuple(x.shape)
    if channels is None and shape[1] <= MOST_CHANNELS < shape[3]:
        raise DataError(
            f"test samples of shape {shape} look like images whose channels come first: say "
            "torch_scoring(..., channels='first') if they do, channels='last' if not"
        )
    if channels == "first":
        x = np.moveaxis(x, 1, -1)
    try:
        yield x
    except RuntimeError as error:
        got = f"(m, {x.shape[3]}, {x.shape[1]}, {x.shape[2]})"
        error.add_note(
            f"test samples of shape {shape} reached the network as images of shape {got}; "
            "torch_scoring(..., channels=...) says where they have their channels"
        )
        raise
