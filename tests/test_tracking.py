"""Curves of scores: what a tracker is told, and that TensorBoard and MLflow can read it back."""

import json
import sys
from pathlib import Path

import pytest

from fedmerit.config import Payment, from_dict
from fedmerit.errors import InputError, MissingExtra
from fedmerit.report.exports import curves, replay, summary_of, tracked, tracker
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.files import read_content
from fedmerit.scoring.rewards import shares
from fedmerit.scoring.types import Reports
from fedmerit.simulation.run import run

CONFIG = from_dict(
    {
        "data": {"test_size": 50},
        "partition": {"scheme": "sizes", "sizes": [60, 50, 70, 40], "names": ["A", "B&C", "D", "É"]},
        "model": {"name": "network:tiny"},
        "training": {"rounds": 3, "local_epochs": 1, "batch_size": 16},
        "participation": {"away": {"B&C": [2]}},
    }
)  # fmt: skip
REPORTED = from_dict(CONFIG.as_dict(), ["scoring.method=reports"])


class Recorder:
    def __init__(self):
        self.told = []

    def start(self, config):
        self.told.append(("start", config["training"]["rounds"]))

    def round(self, number, scores):
        self.told.append((number, dict(scores)))

    def end(self, summary):
        self.told.append(("end", None if summary is None else dict(summary)))


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory):
    path, recorder = tmp_path_factory.mktemp("runs") / "run", Recorder()
    with tracked(lambda step: None, path, CONFIG, [recorder]) as watch:
        run(CONFIG, path, watch=watch)
    return path, recorder


def test_a_tracker_is_told_settings_then_every_round_then_the_end(tracked_run):
    path, recorder = tracked_run
    assert [what for what, _ in recorder.told] == ["start", 1, 2, 3, "end"]
    rounds = read_content(path / "scores.json").rounds
    for number in (1, 2, 3):
        told = recorder.told[number][1]
        total = accumulate(rounds[:number])
        for name, value in total.as_dict().items():
            assert told[f"contribution summed/{name}"] == value
        assert told["contribution summed/gain of the model"] == total.gain
        assert told["model/expected-accuracy"] == rounds[number - 1].grand
    assert "contribution of the round/B&C" not in recorder.told[2][1]  # it was away
    summary = recorder.told[-1][1]
    settled = json.loads((path / "scores.json").read_text())["settlement"]["cumulative"]  # PHI pays
    assert [summary[f"total contribution/{name}"] for name in CONFIG.clients] == settled
    assert sum(summary[f"share/{name}"] for name in CONFIG.clients) == pytest.approx(1)


def test_without_a_settlement_the_summary_is_that_of_the_reports(tmp_path):
    recorder = Recorder()
    with tracked(lambda step: None, tmp_path / "run", REPORTED, [recorder]) as watch:
        run(REPORTED, tmp_path / "run", watch=watch)
    divided = shares(accumulate(read_content(tmp_path / "run" / "scores.json").rounds))
    assert {f"share/{name}": value for name, value in divided.items()}.items() <= recorder.told[-1][1].items()


def test_a_run_that_is_over_is_told_the_same(tracked_run):
    path, recorder = tracked_run
    again = Recorder()
    assert replay(path, again) == 3
    assert again.told == recorder.told


def test_a_run_that_fails_ends_with_none_and_a_resumed_one_tells_what_it_adds(tmp_path, monkeypatch):
    from fedmerit.simulation.run import Rehearsal

    real, recorder = Rehearsal.round, Recorder()
    monkeypatch.setattr(Rehearsal, "round", lambda self, n: real(self, n) if n < 2 else 1 / 0)
    with (
        pytest.raises(ZeroDivisionError),
        tracked(lambda step: None, tmp_path / "run", REPORTED, [recorder]) as watch,
    ):
        run(REPORTED, tmp_path / "run", watch=watch)
    assert [what for what, _ in recorder.told] == ["start", 1, "end"]
    assert recorder.told[-1] == ("end", None)
    monkeypatch.undo()
    recorder = Recorder()
    with tracked(lambda step: None, tmp_path / "run", REPORTED, [recorder]) as watch:
        run(REPORTED, tmp_path / "run", resume=True, watch=watch)
    assert [what for what, _ in recorder.told] == ["start", 2, 3, "end"]


def test_a_round_without_scores_adds_no_point(tmp_path):
    config = from_dict(REPORTED.as_dict(), ["secure_aggregation.threshold=4"])
    recorder = Recorder()
    with tracked(lambda step: None, tmp_path / "run", config, [recorder]) as watch:
        run(config, tmp_path / "run", watch=watch)
    assert [what for what, _ in recorder.told] == ["start", 1, 3, "end"]  # in round 2 there were three


def test_where_nothing_can_be_divided_the_summary_has_no_shares():
    harm = Reports(empty=1, grand=0, alone=[0, 0], without=[1, 1], clients=["A", "B"])
    assert summary_of([harm], Payment()) == {"total contribution/A": -1.0, "total contribution/B": -1.0}
    assert curves([harm])["model/utility"] == 0


@pytest.mark.parametrize("where", ["", "tensorboard", "tensorboard:", "wandb:x", "mlflow:"])
def test_a_tracker_that_is_none(where):
    with pytest.raises(InputError, match="expected tensorboard:DIR or mlflow:URI"):
        tracker(where)


@pytest.mark.parametrize(
    ("where", "package", "extras"),
    [("tensorboard:x", "torch.utils.tensorboard", "engine,tracking"), ("mlflow:x", "mlflow", "tracking")],
)
def test_what_is_not_installed_is_named(monkeypatch, where, package, extras):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'fedmerit\[{extras}\]'"):
        tracker(where)


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_the_curves_back(tracked_run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, recorder = tracked_run
    replay(path, tracker(f"tensorboard:{tmp_path}"))
    read = EventAccumulator(str(tmp_path)).Reload()
    for number in (1, 2, 3):
        for name, value in recorder.told[number][1].items():
            points = {event.step: event.value for event in read.Scalars(name)}
            assert points[number] == pytest.approx(value, rel=1e-6)  # it keeps single precision


@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_the_curves_back(tracked_run, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    path, recorder = tracked_run
    uri = Path(tmp_path / "store").as_uri()
    replay(path, tracker(f"mlflow:{uri}"))
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("fedmerit").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["training.rounds"] == "3"
    for number in (1, 2, 3):
        for name, value in recorder.told[number][1].items():
            history = client.get_metric_history(found.info.run_id, name.replace("&", ":26:"))
            assert {point.step: point.value for point in history}[number] == value
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with pytest.raises(InputError, match=r"^mlflow:"):
        tracker("mlflow:" + Path(tmp_path / "refused").as_uri())
