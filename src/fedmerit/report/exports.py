"""Scores in other tools: pandas, CSV and notebooks; TensorBoard and MLflow.

A tracker receives the settings, then the scores of each round, then the result::

    class Mine:
        def start(self, config): ...            # settings, section by section
        def round(self, number, scores): ...    # {"contribution summed/Abbey": 0.07, "model/accuracy": 0.8}
        def end(self, summary): ...             # the same of the whole run; None where it did not finish

TensorBoard and MLflow are imported only when a tracker for them is made.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedmerit.config import Config, Payment, of_folder
from fedmerit.errors import InputError, MissingExtra, UndefinedShares
from fedmerit.ledger.decisions import Terms
from fedmerit.scoring.accumulate import Missing, accumulate, number_of
from fedmerit.scoring.files import LEDGER, read_content, scores_in
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.spreadsheets import sheet_text
from fedmerit.scoring.types import Reports, Scores
from fedmerit.scoring.uncertainty import intervals, rank_intervals

if TYPE_CHECKING:
    from fedmerit.ledger.account import Account

# -------------------------------------------------------------------------------------------------- tables

MOST_ROWS = 60
"""The most clients in a notebook's table."""


def columns(scores: Scores) -> dict[str, list[Any]]:
    """Return one list per column, in the order of the clients; values that are unknown get no column.

    ``low`` and ``high`` are the 95 % interval of ``raw``; ``rank_low`` and ``rank_high`` are the interval of
    the rank.

    >>> from fedmerit.scoring.types import Scores
    >>> s = Scores(score="LOO", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4)
    >>> columns(s)
    {'client': ['A', 'B'], 'score': ['LOO', 'LOO'], 'value': [1.0, 3.0], 'raw': [1.0, 3.0], 'rank': [2, 1]}
    """
    found: dict[str, list[Any]] = {
        "client": list(scores.clients),
        "score": [scores.score] * scores.n,
        "value": scores.values.tolist(),
        "raw": scores.raw.tolist(),
        "rank": scores.ranks().tolist(),
    }
    if scores.stderr is not None:
        spans, ranks = intervals(scores), rank_intervals(scores)
        found["stderr"] = scores.stderr.tolist()
        found["low"], found["high"] = spans[:, 0].tolist(), spans[:, 1].tolist()
        found["rank_low"], found["rank_high"] = ranks[:, 0].tolist(), ranks[:, 1].tolist()
    if scores.coverage is not None:
        found["coverage"] = scores.coverage.tolist()
    return found


def as_frame(scores: Scores) -> Any:
    """Return a pandas frame with one row per client."""
    return frame_of(columns(scores))


def frame_of(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return columns as a pandas frame."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("a frame needs: pip install 'fedmerit[pandas]'; to_csv() needs nothing") from error
    return pandas.DataFrame(columns)


def as_csv(scores: Scores) -> str:
    """Return the same table as CSV; floats read back exactly."""
    found = columns(scores)
    return sheet_text([found, *zip(*found.values(), strict=True)])


def as_html(scores: Scores) -> str:
    """Return the table that a notebook shows: best first, numbers as on the terminal, names escaped."""
    from fedmerit.notes import words
    from fedmerit.report.text import digits_for, signed

    digits = digits_for(float(np.max(np.abs(scores.values))))
    found = columns(scores)
    place = {name: k for k, name in enumerate(scores.clients)}
    sure = scores.stderr is not None
    lines = []
    for name in scores.ranking()[:MOST_ROWS]:
        k = place[name]
        rank = str(found["rank"][k])
        value = signed(float(scores.values[k]), digits)
        if sure and found["rank_low"][k] != found["rank_high"][k]:
            rank += f" ({found['rank_low'][k]}-{found['rank_high'][k]})"
        if sure and found["value"] == found["raw"]:  # the interval belongs to the raw score
            value += f" ± {(found['high'][k] - found['low'][k]) / 2:.{digits}f}"
        lines.append(f'<tr><th scope="row">{html.escape(name)}</th><td>{value}</td><td>{rank}</td></tr>')
    gain = signed(scores.gain, digits)
    said = [words("notebook.caption", score=scores.score, gain=gain)]
    if scores.rounds > 1:
        said = [words("notebook.caption-rounds", score=scores.score, rounds=scores.rounds, gain=gain)]
    if scores.status != "ok":
        said.append(words("notebook.status", status=words(f"status-short.{scores.status}")))
    if scores.n > MOST_ROWS:
        said.append(words("notebook.first", most=MOST_ROWS, all=scores.n))
    headings = (words("notebook.client"), words("notebook.value"), words("notebook.rank"))
    head = "".join(f'<th scope="col">{name}</th>' for name in headings)
    return (
        f"<table><caption>{html.escape(words('list.clause').join(said))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


# -------------------------------------------------------------------------------------------------- curves

Curves = Mapping[str, float]
"""Name of a curve, ``what/whose`` -> its value."""


class Tracker(Protocol):
    """Something that follows a run."""

    def start(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """Receive the settings by section, before the first round."""

    def round(self, number: int, scores: Curves) -> None:
        """Receive the points of a round, after every round that has scores."""

    def end(self, summary: Curves | None) -> None:
        """Receive the result after the last round; None if the run did not finish."""


def curves(rounds: Sequence[Reports], *, missing: Missing = "zero") -> dict[str, float]:
    """Return the points of the last of these rounds: its contributions, the sums so far, and the model.

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


def settled_curves(account: Account, place: int, *, missing: Missing = "zero") -> dict[str, float]:
    """Return the points of the place-th settled round: like `curves`, from statements."""
    one = account.rounds[place - 1]
    found = {f"model/{one.utility}": one.grand}
    scored = [part.scores for part in account.rounds[:place] if part.scores is not None]
    if one.scores is not None:
        own, total = one.scores.as_dict(), accumulate(scored, score="PHI", missing=missing).as_dict()
        found |= {f"contribution of the round/{name}": value for name, value in own.items()}
        found |= {f"contribution summed/{name}": value for name, value in total.items()}
    found["contribution summed/gain of the model"] = sum(part.gain for part in account.rounds[:place])
    return found


def summary_of(rounds: Sequence[Reports], payment: Payment) -> dict[str, float]:
    """Return the result of a finished run: contributions, and shares if there are any."""
    return _result(accumulate(rounds, missing=payment.missing), payment)


def _result(total: Scores, payment: Payment) -> dict[str, float]:
    found = {f"total contribution/{name}": value for name, value in total.as_dict().items()}
    with suppress(UndefinedShares):  # without shares there are no points for them
        divided = Terms.agreed(payment, "0", "", total.score).divide(total)
        found |= {f"share/{name}": value for name, value in divided.items()}
    return found


# ------------------------------------------------------------------------------------------ while it runs


@contextmanager
def tracked(
    watch: Callable[[Any], None], folder: Path, config: Config, trackers: Sequence[Tracker]
) -> Iterator[Callable[[Any], None]]:
    """Yield a watch for the engine that also informs trackers; a resumed run sends only the rounds it adds.

    Args:
        watch: called first with every step.
        folder: the run folder.
        config: the settings of the run.
        trackers: all of them receive the same.
    """

    def watched(step: Any) -> None:
        watch(step)
        if step.stage != "round" or not trackers:
            return
        rounds = _scored(folder)
        if rounds and rounds[-1].round == step.round:
            points = curves(rounds, missing=config.payment.missing)
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
    summary = summary_of(rounds, config.payment) if rounds else {}
    account = _settled(folder) if trackers and config.settles else None
    if account is not None:
        summary = _result(account.scores(config.payment.missing), config.payment)
        for tracker in trackers if not rounds else ():
            _send(tracker, account, config)
    for tracker in trackers:
        tracker.end(summary)


def replay(folder: Path, tracker: Tracker) -> int:
    """Send a recorded run, such as one between machines, to a tracker; return how many rounds had scores."""
    from fedmerit.storage.run_folder import recorded  # here, so that a table of scores loads no ledger
    from fedmerit.verify import verified

    found = recorded(verified(folder, [])[0]) if (folder / LEDGER).is_file() else None
    rounds = (found.content if found else read_content(scores_in(folder))).rounds
    config = of_folder(folder)
    account = found.accounts[-1] if found and found.accounts else None
    tracker.start(config.as_dict())
    for k, one in enumerate(rounds, start=1):
        points = curves(rounds[:k], missing=config.payment.missing)
        tracker.round(number_of(one, k), points)
    if account is None:
        tracker.end(summary_of(rounds, config.payment))
        return len(rounds)
    if not rounds:
        _send(tracker, account, config)
    tracker.end(_result(account.scores(config.payment.missing), config.payment))
    return len(rounds or account.rounds)


def _send(tracker: Tracker, account: Account, config: Config) -> None:
    """Send all settled rounds: their scores are known only after the last one."""
    for place, one in enumerate(account.rounds, start=1):
        tracker.round(one.round, settled_curves(account, place, missing=config.payment.missing))


def _settled(folder: Path) -> Account | None:
    from fedmerit.errors import StoreError
    from fedmerit.storage.run_folder import recorded

    try:
        return (recorded(folder).accounts or (None,))[-1]
    except StoreError:  # nothing is scored
        return None


def _scored(folder: Path) -> list[Reports]:
    from fedmerit.errors import FileFormatError

    try:
        return read_content(folder / "scores.json").rounds
    except FileFormatError:  # no round has scores yet
        return []


# --------------------------------------------------------------------------------------------- adapters


def tracker(where: str) -> Tracker:
    """Return a tracker from its description: ``tensorboard:DIR`` or ``mlflow:URI``."""
    kind, colon, target = where.partition(":")
    if kind not in ("tensorboard", "mlflow") or not colon or not target:
        raise InputError(f"expected tensorboard:DIR or mlflow:URI, got {where!r}")
    return TensorBoard(target) if kind == "tensorboard" else MLflow(target)


class TensorBoard:
    """A tracker that writes curves as TensorBoard's event files, with torch.

    Args:
        folder: where the event files go; ``tensorboard --logdir`` shows it.
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
        """Write the settings as a table of text."""
        from fedmerit.report.text import markdown

        rows = [f"| {name} | {markdown(str(value))} |" for name, value in _flat(config).items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def round(self, number: int, scores: Curves) -> None:
        """Write one point of every curve."""
        for name, value in scores.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def end(self, summary: Curves | None) -> None:
        """Write the result as points at step 0."""
        for name, value in (summary or {}).items():
            self._writer.add_scalar(name, value, 0)
        self._writer.close()


class MLflow:
    """A tracker that writes curves as metrics of one run in the MLflow experiment ``fedmerit``.

    MLflow allows letters, digits, blanks and ``_-.:/`` in names. Any other character is written as its
    hexadecimal code point between colons, so that two members never share a curve.

    Args:
        uri: address of the tracking server or store.
    """

    MOST = 1000
    """The most metrics that MLflow takes in one call."""

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
        """Write the settings as parameters."""
        with self._ours():
            self._run = self._client.create_run(self._experiment).info.run_id
            for name, value in _flat(config).items():
                self._client.log_param(self._run, name, str(value))

    def round(self, number: int, scores: Curves) -> None:
        """Write one point of every curve."""
        now = int(time.time() * 1000)
        points = [self._metric(_spelled(name), value, now, number) for name, value in scores.items()]
        with self._ours():
            for k in range(0, len(points), self.MOST):
                self._client.log_batch(self._run, metrics=points[k : k + self.MOST])

    def end(self, summary: Curves | None) -> None:
        """Write the result as metrics, and end the run as finished or failed."""
        self.round(0, summary or {})
        with self._ours():
            self._client.set_terminated(self._run, "FAILED" if summary is None else "FINISHED")

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Turn MLflow's errors into ours."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise InputError(f"mlflow:{self._uri}: {error!s:.300}") from error


def _flat(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, part in config.items() for key, value in part.items()}


def _spelled(name: str) -> str:
    r"""Return a name in the characters that MLflow allows.

    >>> _spelled("share/St. Mary's")
    'share/St. Mary:27:s'
    """
    return re.sub(r"[^\w.\- :/]", lambda found: f":{ord(found[0]):x}:", name)
