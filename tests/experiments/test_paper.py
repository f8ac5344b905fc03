"""The paper's protocol: its config, its table from the recorded tables, FP and EE as scores to pay by."""

import csv
import json
import tomllib
from typing import get_args

import numpy as np
import pytest
from scipy import stats

import fedmerit as fm
from command_line import call
from fedmerit.cli.run import PaperData, paper_config
from fedmerit.config import from_dict, of_folder
from fedmerit.errors import UndefinedShares
from fedmerit.scoring.ground_truth import paper_table
from games import shapley_by_permutations
from tiny import TINY

TURNED = fm.Reports(empty=6, grand=5, alone=[4, 5], without=[5, 4], clients=["A", "B"], round=2)
GOOD = fm.Reports(empty=0, grand=6, alone=[2, 4], without=[4, 2], clients=["A", "B"], round=1)


@pytest.mark.parametrize("name", get_args(PaperData))
def test_every_preset_is_the_papers_protocol(name):
    config = from_dict(tomllib.loads(paper_config(name)))
    shipped = name == "fashion-mini"
    assert (config.data.name, bool(config.data.path)) == (
        ("fashion-mini", False) if shipped else ("npz", True)
    )
    assert (len(config.clients), config.partition.mu) == (9, 0.5)
    assert (config.training.rounds, config.training.lr, config.training.weight_decay) == (10, 0.001, 0.001)
    assert (config.scoring.method, config.scoring.utilities[0]) == ("reports", "accuracy")
    assert set(config.scoring.truth) == {"round-shapley", "mr-shapley"}


def row(values, truth, *, always):
    """L2, Spearman, Kendall and Pearson by other code: scipy, and the normalisation written out."""
    pair = [np.array(one, dtype=float) for one in (values, truth)]
    x, y = ((one - (one.min() if always else min(one.min(), 0))) for one in pair)
    l2 = float(np.sqrt(np.sum((x / x.mean() - y / y.mean()) ** 2)))
    found = (stats.spearmanr(*pair), stats.kendalltau(*pair), stats.pearsonr(*pair))
    return [*(one.statistic for one in found), l2, l2**2]


def test_a_run_of_the_preset_prints_the_table_that_its_tables_of_coalitions_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("init", "--paper", "fashion-mini").exit_code == 0
    sizes = ["data.test_size=100", "partition.clients=4", "training.rounds=2", "training.local_epochs=1"]
    options = [part for one in sizes for part in ("--set", one)]
    done = call("run", "paper.toml", "--out", "made", *options)
    assert done.exit_code == 0, done.exception
    assert of_folder("made").analysis
    tables, cosines = [], 0.0
    for number in (1, 2):
        with np.load(tmp_path / "made" / "tables" / f"round-000{number}.npz") as arrays:
            tables.append(arrays["table/accuracy"])
            cosines = cosines + arrays["cos-model"]
    last = tables[-1]
    empty, grand = last[0], last[15]
    alone, without = last[[1, 2, 4, 8]], last[[14, 13, 11, 7]]
    reports = [one["reports"] for one in json.loads((tmp_path / "made/scores.json").read_text())["rounds"]]
    cos = np.sum([one["cosine"] for one in reports], axis=0)
    for always, zero in ((False, 0.0), (True, empty)):
        games = tables if always else [[0.0, *last[1:]]]
        truth = np.mean([shapley_by_permutations(fm.Table(game)) for game in games], axis=0)
        alpha = ((grand - without) + (alone - zero)) / 2
        said = (grand - alone) + (without - zero)
        others = said.sum() - said
        scores = {
            "LOO": grand - without, "FP": alpha / alpha.sum() * grand, "EE": others / others.sum() * grand,
            "COS": cos, "COS-MODEL": cosines,
        }  # fmt: skip
        lines = [line.split() for line in done.stdout.split("The paper's table")[1 + always].splitlines()]
        shown = {line[0]: line[1:] for line in lines if line and line[0] in scores}
        assert list(shown) == list(scores)
        for name, values in scores.items():
            numbers = [float(cell) if cell != "-" else np.nan for cell in shown[name][:5]]
            np.testing.assert_allclose(numbers, row(values, truth, always=always), atol=6e-4, err_msg=name)
            turned = {"FP": alpha.sum() < 0, "EE": others.sum() < 0}.get(name, False)
            assert (shown[name][5] == "reversed") == turned
    again = call("score", "made").stdout
    assert again.split("The paper's table")[1:3] == [
        part.split("written to")[0] for part in done.stdout.split("The paper's table")[1:3]
    ]


def test_each_reading_says_when_a_score_is_reversed():
    truth = {"A": -1.0, "B": 0.0}
    assert [one.status for one in paper_table(TURNED, truth, {}, by="text")] == ["ok", "reversed", "reversed"]
    assert [one.status for one in paper_table(TURNED, truth, {}, by="scripts")] == ["ok", "ok", "ok"]


def write(path, *rounds):
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["round", "client", "empty", "grand", "alone", "without"])
        for one in rounds:
            for name, alone, without in zip(one.clients, one.alone, one.without, strict=True):
                rows.writerow([one.round, name, one.empty, one.grand, alone, without])
    return path


@pytest.mark.parametrize("score", ["fp", "ee"])
def test_score_and_rewards_take_fp_and_ee(tmp_path, score):
    file = write(tmp_path / "good.csv", GOOD)
    total = fm.accumulate([GOOD], score=score.upper())
    done = call("rewards", file, "--score", score, "--budget", "100", "--rule", "fair", "--format", "json")
    assert json.loads(done.stdout)["shares"] == pytest.approx(dict(fm.shares(total, "fair")))
    assert f"{score.upper()} summed over 1 round" in call("score", file, "--score", score).stdout
    turned = write(tmp_path / "turned.csv", GOOD, TURNED)
    assert f"{score.upper()} is reversed in at least one" in call("score", turned, "--score", score).stdout
    done = call("rewards", turned, "--score", score, "--budget", "100", "--despite-doubts")
    assert done.exit_code
    assert isinstance(done.exception, UndefinedShares)
    assert done.exception.note.values["reason"].code == "status-in"


@pytest.mark.parametrize("agreed", [True, False])
def test_a_run_that_is_paid_by_fp_verifies_also_in_a_members_copy(tmp_path, agreed):
    asked, terms = ([], ["payment.score=FP"]) if agreed else (["--score", "fp"], [])
    config = from_dict(TINY, ["scoring.visibility=coordinator", "training.rounds=1", *terms])
    from fedmerit.simulation.run import run
    from fedmerit.verify import verify_folder

    run(config, tmp_path / "run")
    options = [*asked, "--budget", "100", "--despite-doubts", "--format", "json"]
    paid = call("rewards", tmp_path / "run", *options)
    assert paid.exit_code == 0, paid.exception
    assert ("score" in json.loads(paid.stdout)["departures"]) == (not agreed)
    assert list(verify_folder(tmp_path / "run"))
    copy = tmp_path / "copy.jsonl"
    assert call("export", tmp_path / "run", "--out", copy, "--for", "client-1").exit_code == 0
    done = call("verify", copy, "--as", "client-1")
    assert done.exit_code == 0, done.exception
