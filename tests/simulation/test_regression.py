"""Real numbers: nobody is paid for teaching the mean of y, which wrong answers teach as well as others."""

import csv
import importlib.util
import sys
import tomllib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedmerit.cli import app
from fedmerit.config import from_dict
from fedmerit.errors import ConfigError
from fedmerit.notes import code_of
from fedmerit.report.facts import Facts
from fedmerit.report.page.html import facts_of
from fedmerit.report.page.text import truth
from fedmerit.report.source import read_source
from fedmerit.simulation.run import run
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.training import Unit, loss_of

GUIDE = Path(__file__).parents[2] / "examples" / "bring-your-own"
CLINICS = ("Abbey", "Bridge", "Castle", "Dale", "Elm")


def guide(folder, permuted="", **sections):
    """The guide's regression; the answers of one clinic's patients are exchanged among them."""
    spec = importlib.util.spec_from_file_location("progression", GUIDE / "progression.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with mock.patch.dict(sys.modules, {"sklearn": None, "sklearn.datasets": None}):  # the made-up patients
        module.main(folder / "progression.csv")
    head, *rows = csv.reader((folder / "progression.csv").read_text().splitlines())
    at = [i for i, row in enumerate(rows) if row[0] == permuted]
    for i, value in zip(at, np.random.default_rng(5).permutation([rows[i][1] for i in at]), strict=True):
        rows[i][1] = value
    with (folder / "progression.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    raw = tomllib.loads((GUIDE / "progression.toml").read_text())
    raw["data"]["path"] = str(folder / "progression.csv")
    raw["secure_aggregation"] = {"enabled": False}
    return from_dict({name: {**raw.get(name, {}), **sections.get(name, {})} for name in {**raw, **sections}})


def test_a_clinic_with_exchanged_answers_is_last_whichever_it_is(tmp_path):
    ranks = {}
    for clinic in CLINICS:
        (tmp_path / clinic).mkdir()
        run(guide(tmp_path / clinic, clinic), tmp_path / clinic / "run")
        ranks[clinic] = Facts(read_source(tmp_path / clinic / "run")).standing[clinic].rank
    assert sum(rank == 5 for rank in ranks.values()) >= 4, ranks  # with plain outputs, 2 of 5
    assert min(ranks.values()) >= 4


def test_most_of_the_gain_is_not_for_a_constant_answer(tmp_path):
    """The first model answers about the mean; in the unit of y a note says that this would be paid."""
    federation = prepare(guide(tmp_path))
    codes = [code_of(note) for note in federation.notes]
    assert "standardised-y" in codes
    assert "constant-earns" not in codes
    plain = prepare(guide(tmp_path, model={"outputs": "plain"}))
    codes = [code_of(note) for note in plain.notes]
    assert "constant-earns" in codes
    assert "standardised-y" not in codes
    shown = federation.pool.settlement()
    first, far = (
        float(np.mean(one.evaluate(one.first, shown)["rmse-skill:350"])) for one in (federation, plain)
    )
    assert first > 0.93 > 0.85 > far  # RMSE below 93, and above 135, of a scale of 350


@pytest.mark.parametrize(
    ("outputs", "loss"), [("logits", "mse"), ("probabilities", "mse"), ("standardised", "tests.nowhere:loss")]
)
def test_what_the_network_returns_must_fit_y(tmp_path, outputs, loss):
    with pytest.raises(ConfigError) as refused:
        prepare(guide(tmp_path, model={"outputs": outputs}, training={"loss": loss}))
    assert refused.value.setting in ("model.outputs", "training.loss")


@pytest.mark.parametrize("shape", [(200,), (200, 3), (50, 4, 5)])
def test_outputs_and_loss_are_those_of_standardised_answers(shape):
    rng = np.random.default_rng(0)
    y = (1000 + rng.normal(size=shape) * (np.arange(1, 4) if shape[1:] == (3,) else 50)).astype(np.float32)
    unit, z = Unit(y), torch.as_tensor(rng.normal(size=shape), dtype=torch.float32)
    found = unit(None, None, z)
    standard = (torch.as_tensor(y) - torch.as_tensor(unit.mean)) / torch.as_tensor(unit.sd)
    losses = loss_of("mse", unit=unit)(found, torch.as_tensor(y)), loss_of("mse")(z, standard.float())
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    assert unit(None, None, "no tensor") == "no tensor"
    assert Unit(np.ones(3)).sd == 1  # nothing varies


def test_the_retrained_comparison_includes_the_score_that_pays(tmp_path):
    config = guide(tmp_path, training={"rounds": 1}, scoring={"method": "both", "truth": ["shapley"]})
    (tmp_path / "c.toml").write_text(config.to_toml())
    said = CliRunner().invoke(app, ["run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")]).stdout
    line = " ".join(said.split()).split("retrained Shapley value of rmse-skill:350: ")[1].split("Spearman")[0]
    assert "PHI " in line
    near = {(utility, kind): found for utility, kind, found in truth(facts_of(tmp_path / "run"))}
    assert near["rmse-skill:350", "SV"]["PHI"] is not None
    assert "ALPHA" in near["rmse-skill:350", "SV"]
