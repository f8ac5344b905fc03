"""Scores as curves where people already look: TensorBoard, MLflow, or anything with three methods.

A tracker is told the settings, then the scores of each round, then what came out::

    class Mine:
        def start(self, config): ...            # settings, section by section
        def round(self, number, scores): ...    # {"contribution summed/Abbey": 0.07, "model/accuracy": 0.8}
        def end(self, summary): ...             # the same of the whole run; None where it did not finish

TensorBoard and MLflow are imported when a tracker of theirs is made, and only then.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fedmerit.config import Config, of_folder
from fedmerit.errors import InputError, MissingExtra, UndefinedShares
from fedmerit.scoring.accumulate import Missing, accumulate, number_of
from fedmerit.scoring.files import LEDGER, read_content
from fedmerit.scoring.rewards import shares
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports
from fedmerit.storage.run_folder import recorded

Curves = Mapping[str, float]
"""Name of a curve, ``what/whose``, and its value."""


class Tracker(Protocol):
    """Is told how a run goes."""

    def start(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """Before the first round; settings by section."""

    def round(self, number: int, scores: Curves) -> None:
        """After every round that has scores."""

    def end(self, summary: Curves | None) -> None:
        """After the last; None where the run did not finish."""


def curves(rounds: Sequence[Reports], *, missing: Missing = "zero") -> dict[str, float]:
    """The points that the last of these rounds adds: contributions of it, summed so far, and the model.

    >>> first = Reports(empty=0, grand=3, alone=[0, 1], without=[3, 2], clients=["A", "B"], utility="v")
    >>> curves([first])["contribution summed/B"], curves([first])["model/v"]
    (1.0, 3.0)
    """
    last = rounds[-1]
    found = {f"contribution of the round/{name}": value for name, value in alpha(last).as_dict().items()}
    total = accumulate(rounds, missing=missing)
    found |= {f"contribution summed/{name}": value for name, value in total.as_dict().items()}
    found["contribution summed/gain of the model"] = total.gain
    found[f"model/{last.utility or 'utility'}"] = last.grand
    return found


def summary_of(rounds: Sequence[Reports], *, missing: Missing = "zero") -> dict[str, float]:
    """What a finished run comes to: contributions, and shares where there are any."""
    total = accumulate(rounds, missing=missing)
    found = {f"total contribution/{name}": value for name, value in total.as_dict().items()}
    with suppress(UndefinedShares):  # then there are none to tell
        found |= {f"share/{name}": value for name, value in shares(total).items()}
    return found


# ------------------------------------------------------------------------------------------ while it runs


@contextmanager
def tracked(
    watch: Callable[[Any], None], folder: Path, config: Config, trackers: Sequence[Tracker]
) -> Iterator[Callable[[Any], None]]:
    """A watch for the engine that also tells trackers; a resumed run tells the rounds it adds.

    Args:
        watch: called with every step first.
        folder: of the run.
        config: of the run.
        trackers: all are told the same.
    """

    def watched(step: Any) -> None:
        watch(step)
        if step.stage != "round" or not trackers:
            return
        rounds = _scored(folder)
        if rounds and rounds[-1].round == step.round:
            points = curves(rounds, missing=config.scoring.missing)
            for tracker in trackers:
                tracker.round(step.round, points)

    for tracker in trackers:
        tracker.start(config.as_dict())
    try:
        yield watched
    except BaseException:
        for tracker in trackers:
            tracker.end(None)
        raise
    rounds = _scored(folder) if trackers else []
    summary = summary_of(rounds, missing=config.scoring.missing) if rounds else {}
    for tracker in trackers:
        tracker.end(summary)


def replay(folder: Path, tracker: Tracker) -> int:
    """Tell a tracker about a run that is over, such as one between machines; how many rounds had scores."""
    config = of_folder(folder)
    has_ledger = (folder / LEDGER).is_file()
    content = recorded(folder).content if has_ledger else read_content(folder / "scores.json")
    rounds = content.rounds
    tracker.start(config.as_dict())
    for k, one in enumerate(rounds, start=1):
        points = curves(rounds[:k], missing=config.scoring.missing)
        tracker.round(number_of(one, k), points)
    tracker.end(summary_of(rounds, missing=config.scoring.missing))
    return len(rounds)


def _scored(folder: Path) -> list[Reports]:
    from fedmerit.errors import FileFormatError

    try:
        return read_content(folder / "scores.json").rounds
    except FileFormatError:  # no round has scores yet
        return []


# --------------------------------------------------------------------------------------------- adapters


def tracker(where: str) -> Tracker:
    """A tracker from text: ``tensorboard:DIR`` or ``mlflow:URI``."""
    kind, colon, target = where.partition(":")
    if kind not in ("tensorboard", "mlflow") or not colon or not target:
        raise InputError(f"expected tensorboard:DIR or mlflow:URI, got {where!r}")
    return TensorBoard(target) if kind == "tensorboard" else MLflow(target)


class TensorBoard:
    """Curves as TensorBoard's event files, written by torch.

    Args:
        folder: of the event files; ``tensorboard --logdir`` shows it.
    """

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra(
                "tracking with TensorBoard needs: pip install 'fedmerit[engine,tracking]'"
            ) from error
        self._writer = SummaryWriter(folder)

    def start(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """The settings as a table of text."""
        rows = [f"| {name} | {value} |" for name, value in _flat(config).items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def round(self, number: int, scores: Curves) -> None:
        """One point of every curve."""
        for name, value in scores.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def end(self, summary: Curves | None) -> None:
        """What came out, as points at step 0."""
        for name, value in (summary or {}).items():
            self._writer.add_scalar(name, value, 0)
        self._writer.close()


class MLflow:
    """Curves as metrics of one run in the experiment ``fedmerit``.

    MLflow allows letters, digits, blanks and ``_-.:/`` in names; any other character is written as its code
    point in hexadecimal between colons, so that two members never share a curve.

    Args:
        uri: of the tracking server or store.
    """

    MOST = 1000
    """Metrics MLflow takes in one call."""

    def __init__(self, uri: str) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError as error:
            raise MissingExtra("tracking with MLflow needs: pip install 'fedmerit[tracking]'") from error
        self._metric, self._uri, self._run = Metric, uri, ""
        with self._ours():
            self._client = MlflowClient(tracking_uri=uri)
            known = self._client.get_experiment_by_name("fedmerit")
            self._experiment = known.experiment_id if known else self._client.create_experiment("fedmerit")

    def start(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """The settings as parameters."""
        with self._ours():
            self._run = self._client.create_run(self._experiment).info.run_id
            for name, value in _flat(config).items():
                self._client.log_param(self._run, name, str(value))

    def round(self, number: int, scores: Curves) -> None:
        """One point of every curve."""
        now = int(time.time() * 1000)
        points = [self._metric(_spelled(name), value, now, number) for name, value in scores.items()]
        with self._ours():
            for k in range(0, len(points), self.MOST):
                self._client.log_batch(self._run, metrics=points[k : k + self.MOST])

    def end(self, summary: Curves | None) -> None:
        """What came out, as metrics; the run is finished, or failed."""
        self.round(0, summary or {})
        with self._ours():
            self._client.set_terminated(self._run, "FAILED" if summary is None else "FINISHED")

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """MLflow's errors leave here as ours."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise InputError(f"mlflow:{self._uri}: {error!s:.300}") from error


def _flat(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, part in config.items() for key, value in part.items()}


def _spelled(name: str) -> str:
    r"""A name as MLflow allows it.

    >>> _spelled("share/St. Mary's")
    'share/St. Mary:27:s'
    """
    return re.sub(r"[^\w.\- :/]", lambda found: f":{ord(found[0]):x}:", name)
