"""What says how good a model is, and where it gets better: users' functions, and those made for PyTorch.

torch is imported when one of its functions is called: Flower starts a process for every message, and most
need no network.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedmerit.carriers.shape import NamedArrays, Shape, listed, numbers
from fedmerit.errors import ConfigError, DataError, FedmeritError, MessageError, ReportError
from fedmerit.identity import canonical
from fedmerit.notes import Note
from fedmerit.protocol.direction import Slope, metric_blocks
from fedmerit.protocol.outcome import Evaluate, Model, PerSample, mean
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.scoring.sampling import jackknife

log = logging.getLogger("fedmerit")
Value = Callable[[NamedArrays, Any], npt.ArrayLike | Mapping[str, npt.ArrayLike]]
"""(model, test samples with ``x`` and ``y``) -> one number in [0, 1] per sample, or several such by name; one
number in [0, 1] for a metric of the whole test set."""


def evaluator(value: Value, shape: Shape, utilities: Sequence[str]) -> Evaluate:
    """Return a function that measures how good a model of this shape is on a slice.

    Of what is one number, it returns a pseudo-value per block of samples (`fedmerit.scoring.sampling`); for
    these, ``value`` is called once more per block, with the samples outside it.
    """

    def named(model: NamedArrays, test: Slice | Samples) -> Mapping[str, Any]:
        values = value(model, test)
        if not isinstance(values, Mapping):
            values = {utilities[0]: values} if len(utilities) == 1 else {}
        if set(values) != set(utilities):
            got = ", ".join(map(str, values)) or "one unnamed array"
            raise ReportError(f"value: expected the utilities {', '.join(utilities)}, got {got}")
        return values

    def evaluate(model: Model, shown: Slice) -> PerSample:
        record, samples = shape.record(model), len(shown.y)
        values = named(record, shown)
        measured = {np.arange(samples).tobytes(): values}  # several metrics share their calls

        def metric(places: Indices, name: str) -> Any:
            if (key := places.tobytes()) not in measured:
                measured[key] = named(record, Samples(shown.x[places], shown.y[places]))
            return measured[key][name]

        per_sample = {}
        for name in utilities:
            if np.ndim(values[name]):
                per_sample[name] = _checked(name, values[name], samples)
            else:
                blocks = metric_blocks(shown.y, balanced=False)  # the owner of the test set drew it
                per_sample[name] = jackknife(name, partial(metric, name=name), blocks)
        return per_sample

    return evaluate


class Samples(NamedTuple):
    """Some samples of the test set."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]


Gradient = Callable[[NamedArrays, Samples], tuple[float, Mapping[str, Any] | Sequence[Any]]]
"""(model, test samples with ``x`` and ``y``) -> the mean of the paid utility over these samples, and its
gradient: an array for each floating-point array of the model, by name or in their order."""


def slope_of(gradient: Gradient, shape: Shape) -> Slope:
    """Return value and gradient at one model, as vectors, from a user's ``gradient`` function."""

    def slope(model: Model, shown: Slice, places: Indices) -> tuple[float, npt.NDArray[Any]]:
        pair = gradient(shape.record(model), Samples(shown.x[places], shown.y[places]))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ReportError(f"gradient: expected (value, gradients), got {type(pair).__name__}")
        value, parts = pair
        try:
            return float(value), shape.gradient(parts)
        except FedmeritError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # torch raises it if a gradient is attached
            raise ReportError(f"gradient: expected a number, and arrays of numbers: {error}") from None

    return slope


def definition(value: Value | Gradient | None, utilities: Sequence[str]) -> str:
    """Return the SHA-256 of the utilities' names and of what defines the function."""
    source = getattr(value, "definition", None) or source_of(value)
    return hashlib.sha256(canonical([list(utilities), source])).hexdigest()


def source_of(function: Callable[..., Any] | None) -> str:
    """Return the source of a function; an empty text if Python cannot find it."""
    try:
        return "" if function is None else inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _checked(name: str, given: Any, samples: int) -> npt.NDArray[np.float64]:
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises it if a gradient is attached
        raise ReportError(f"value {name!r}: expected numbers: {error}") from None
    if values.shape != (samples,):
        expected = f"expected {samples} numbers, one per sample"
        raise ReportError(f"value {name!r}: {expected}, got shape {values.shape}")
    bad = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if bad.size:
        raise ReportError(f"value {name!r} of sample {bad[0]} must lie in [0, 1], got {values[bad[0]]}")
    return values


# ------------------------------------------------------------------------------------- before anybody trains

FEW = 16
"""Test samples on which ``value`` and ``gradient`` are compared before anybody trains."""


def check_slope(slope: Slope, evaluate: Evaluate | None, model: Model, shown: Slice, utility: str) -> None:
    """Raise ConfigError unless the user's gradient works and is about what the user's value measures."""
    few = Slice(index=shown.index, x=shown.x[:FEW], y=shown.y[:FEW], salts=b"", path=())
    every = np.arange(len(few.y))
    level, uphill = slope(model, few, every)
    if not (np.isfinite(level) and np.isfinite(uphill).all()):
        raise ConfigError("gradient: of the first model, it returns numbers that are not finite")
    if evaluate is not None:
        expected = mean(evaluate(model, few)[utility])
        if not abs(level - expected) <= 1e-3:
            said = f"it says that the mean {utility} of {len(few.y)} test samples is {level:g}"
            raise ConfigError(f"gradient: {said}, but value says {expected:g}: both must measure the same")
    check_rise(lambda at: slope(at, few, every)[0], model, level, uphill)


RISE = 1e-3
"""By how much the gradient promises that the step raises the utility."""
LEAST_RISE = 1e-5
"""Rounding may hide less than this; where the longest step promises less, nothing is checked."""
LONGEST = 0.05
"""The longest step, as a part of the model's own length."""


def check_rise(
    measured: Callable[[Model], float], model: Model, value: float, uphill: npt.NDArray[Any]
) -> None:
    """Raise ConfigError unless a small step along the gradient raises the utility about as it promises.

    It finds a wrong sign, or a sum in place of a mean, but no factor of 2. It checks nothing where the
    utility is nearly 0 or 1, or too curved: where a shorter step gives another answer.
    """
    steepest = float(np.linalg.norm(uphill.astype(np.float64)))
    longest = LONGEST * float(np.linalg.norm(model.astype(np.float64)))
    rise = min(RISE, value / 10, (1 - value) / 10, steepest * longest)
    if rise < LEAST_RISE:
        return
    length = rise / steepest

    def ratio(length: float) -> float:
        """Return the measured change over the promised one."""
        step = (uphill * (length / steepest)).astype(np.float32)
        return (measured(model + step) - measured(model - step)) / (2 * length * steepest)

    whole, quarter = ratio(length), ratio(length / 4)
    if abs(whole - quarter) <= max(1.0, abs(whole), abs(quarter)) / 4 and not 0.5 <= whole <= 2:
        raise ConfigError(
            f"gradient: a small step along it changes the mean utility by {whole:.2g} times what it "
            "promises: expected the gradient of the mean over the given samples, of a utility that is better "
            "the higher it is (not of a loss, and not of a sum)"
        )


# ---------------------------------------------------------------------------------------------------- PyTorch

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
    channels: Channels | None = None,
    outputs: Outputs | None = None,
    part: bool = False,
) -> Measures:
    """Return value and gradient of a PyTorch model.

    ::

        scoring = fedmerit.flower.torch_scoring(network, "expected-accuracy")
        app = fedmerit.flower.secure(ClientApp(), value=scoring.value, gradient=scoring.gradient)

    Samples of shape (m, height, width, channels), or with ``channels="first"`` (m, channels, height, width),
    are images: uint8 becomes x / 127.5 - 1, floats stay as they are, and the network gets them as
    (m, channels, height, width). Samples of any other shape reach it as they are. It runs in evaluation mode.
    Floating-point buffers, such as BatchNorm's running statistics, are coordinates of the gradient.

    Args:
        network: returns the network, with any weights; its ``state_dict`` has the names of Flower's arrays.
        utility: what is measured, such as "brier", "rmse-skill:20" or "module:function". Of several,
            the first is paid and has the gradient. Metrics of the whole test set have none.
        channels: where images have their channels. Unless given, they come last, and images that look as if
            they came first are refused.
        outputs: what the network returns for classes. Unless given, logits, and outputs that look like
            probabilities, as after a sigmoid or softmax, are refused.
        part: whether the arrays are a part of the network, as those of adapters are. Whatever they lack stays
            as ``network`` returns it, which must be the same on every machine.

    `Contributions` takes the names of the utilities from these functions unless it is given ``utilities``.

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
    made = _Once(network)

    def measures(net: Any, x: npt.NDArray[Any]) -> tuple[Any, ...]:
        """Return the utilities; of the first network that is measured, check what it returns."""
        from fedmerit.simulation.utilities import check_kind, look_like_probabilities, resolve_all

        resolved = resolve_all(utilities, probabilities=outputs == "probabilities")
        if not made.checked:
            if any(measure.function is None for measure in resolved):
                _check_tensor(net, x)
            check_kind(net, x, resolved, outputs or "")
            if outputs == "logits" and look_like_probabilities(net, x, adding_up=True):
                log.warning("torch_scoring: %s", Note("called-logits"))
            made.checked = True
        return resolved

    def loaded(arrays: NamedArrays) -> Any:
        import torch

        net = made()
        state = {name: torch.from_numpy(np.array(numbers(array))) for name, array in arrays.items()}
        own = net.state_dict()
        if state and state.keys() < own.keys():
            missing = [name for name in own if name not in state]
            if not part:
                raise MessageError(
                    f"the arrays are a part of the network, without {listed(missing)}: expected all of "
                    "ArrayRecord(model.state_dict()), also what training leaves as it is, or part=True if "
                    "the function that returns the network gives the rest, the same on every machine"
                )
            _keep_out({*missing}, net)
        try:
            net.load_state_dict(state)
        except RuntimeError as error:
            raise MessageError(
                "the arrays are not those of the network: expected ArrayRecord(model.state_dict()) of such a "
                f"model: {error!s:.300}"
            ) from None
        return net

    def value(arrays: NamedArrays, test: Any) -> npt.ArrayLike | Mapping[str, npt.ArrayLike]:
        from fedmerit.simulation.utilities import values_of

        net = loaded(arrays)
        with _samples(net, test.x, channels) as x:
            values = values_of(net, x, test.y, measures(net, x))
        return values if len(utilities) > 1 else values[utilities[0]]

    def gradient(arrays: NamedArrays, test: Any) -> tuple[float, dict[str, npt.NDArray[Any]]]:
        from fedmerit.simulation.direction import slope

        net = loaded(arrays)
        with _samples(net, test.x, channels) as x:
            level, parts = slope(net, x, test.y, measures(net, x)[0])
        return level, _by_name(net, {name: part.cpu().numpy() for name, part in parts.items()})

    options = [option for option in (channels, outputs, "part" * part) if option]
    for function in (value, gradient):
        vars(function)["definition"] = "\n".join([*utilities, *options, source_of(network)])
        vars(function)["utilities"] = list(utilities)
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


def _keep_out(names: set[str], net: Any) -> None:
    """Make parameters and buffers of these names buffers that are not saved: nobody loads them."""
    for path, module in net.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        for name, tensor in own.items():
            if f"{path}.{name}".lstrip(".") in names:
                delattr(module, name)
                module.register_buffer(name, tensor.detach(), persistent=False)


def _by_name(net: Any, parts: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return a gradient for every name of a tensor that has several, as tied weights have.

    The array of the last name is loaded last, so the network follows that one, and the others change nothing.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    tied = [same for same in names.values() if len(same) > 1 and same[0] in parts]
    for first, *more in tied:
        gradient = parts[first]
        parts |= dict.fromkeys((first, *more), np.zeros_like(gradient)) | {more[-1]: gradient}
    return parts


def _check_tensor(net: Any, x: npt.NDArray[Any]) -> None:
    """Raise `ConfigError` if a network returns something other than a tensor."""
    import torch

    from fedmerit.simulation.models import device_of, evaluation, prepare

    with evaluation(net):
        answer = net(prepare(x[:1], device_of(net)))
    if not isinstance(answer, torch.Tensor):
        raise ConfigError(
            f"torch_scoring: expected a network that returns one tensor, got a {type(answer).__name__}: give "
            "a subclass whose forward returns the one that counts, as super().forward(x)['logits'] does; its "
            "arrays keep their names"
        )


@contextlib.contextmanager
def _samples(net: Any, x: npt.NDArray[Any], channels: Channels | None) -> Iterator[npt.NDArray[Any]]:
    """Yield samples with the channels of images last; if the network fails on them, say what it got."""
    shape = tuple(x.shape)
    images = x.ndim == 4 and (x.dtype == np.uint8 or x.dtype.kind == "f")
    if images and channels is None and shape[1] <= MOST_CHANNELS < shape[3]:
        raise DataError(
            f"test samples of shape {shape} look like images whose channels come first: say "
            "torch_scoring(..., channels='first') if they do, channels='last' if not"
        )
    if images and channels == "first":
        x = np.moveaxis(x, 1, -1)
    try:
        yield x
    except RuntimeError as error:
        kinds = {
            str(part.dtype).removeprefix("torch.") for part in net.parameters() if part.is_floating_point()
        }
        if others := sorted(kinds - {"float32"}):
            raise ConfigError(
                f"torch_scoring: the network computes in {', '.join(others)}, but samples reach it as "
                "float32, in which updates are summed too: return it .float(), or let it convert its input"
            ) from error
        if images:
            _, height, width, depth = x.shape
            error.add_note(
                f"test samples of shape {shape} reached the network as images of shape (m, {depth}, "
                f"{height}, {width}); torch_scoring(..., channels=...) says where they have their channels"
            )
        raise
