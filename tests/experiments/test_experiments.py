"""The paper's experiments: every kind runs at toy size, and what is written follows from the raw results."""

import ast
import hashlib
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import claims
import coverage
import findings
import numpy as np
import onecell
import other_images
import prepare as preparing
import pytest
import retrained
import run
import sections
import tables
import torch
import uses
from analyses import Halves, Paths, ensembles, halves
from cells import RESULTS, Row, append, in_order, plan, read_merged, read_results, select
from compact import load
from engine import BothGames, PrintedWeights, QuickEvaluation, ShapleyWeights
from evidence import Evidence
from findings import fill
from grid import rounded, settled, text
from hypothesis import given
from hypothesis import strategies as st
from measures import interval, intervals, lent, phi, repeats, reports, scores, seeds, spread
from numpy._core import _multiarray_umath as kernels
from onecell import Scratch, only
from other_images import differs, near
from protocols import AUTHORS, OURS, TEXT, compared, squared_distance, theirs
from retrained import holm, sign_test, student
from sections import variation
from verdicts import AT_THE_END, HOLDS, NOT, ONLY, lead, verdict

from fedmerit import Reports, fp, normalise
from fedmerit.data import load as load_data
from fedmerit.scoring.scores import from_blocks
from fedmerit.simulation.plan import SPREAD
from fedmerit.simulation.run import Rehearsal
from fedmerit.simulation.setup import prepare, seed_for
from fedmerit.storage.run_folder import Folder
from tiny import tiny

from .test_downloads import brain_files, cifar, isic_files, pcam_files

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "experiments"


def stopped(said, step, *arguments):
    with pytest.raises(SystemExit) as caught:
        step(*arguments)
    assert said in str(caught.value)


def call(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_experiment_runs_at_toy_size_and_ends_in_tables_and_figures(tmp_path):
    said = call("run.py", "--toy", "--out", tmp_path / "run", "--budget-minutes", 50)
    assert "nothing is left" in said
    assert "FAILED" not in said
    assert "nothing is left" in call("run.py", "--toy", "--out", tmp_path / "run", "--list")

    call("merge.py", tmp_path / "run" / "cells.jsonl", "--into", tmp_path / "results")
    cells = [json.loads(line) for line in (tmp_path / "run" / "cells.jsonl").read_text().splitlines()]
    assert len(list((tmp_path / "results").glob("*.json"))) == len(cells)
    assert "0 new cells" in call("merge.py", tmp_path / "run" / "cells.jsonl", "--into", tmp_path / "results")

    given = ("--toy", "--results", tmp_path / "results", "--into", tmp_path / "made")
    call("tables.py", *given)
    text = (tmp_path / "made" / "README.md").read_text()
    for label in ("tab:error", "tab:error_game", "tab:round", "tab:client", "tab:alpha", "tab:attack"):
        assert f"[`{label}`](tables/{label.replace(':', '-').replace('_', '-')}.md)" in text
    assert "Every run of the plan was done." in text
    assert "0.904 ± 0.055" in (tmp_path / "made" / "tables" / "tab-error.md").read_text()  # the paper's
    game = (tmp_path / "made" / "tables" / "tab-error-game.md").read_text()
    assert "with the retrained Shapley value" in game
    assert "| ALPHA sum, renormalised | " in game
    call("tables.py", *given, "--check")
    call("figures.py", "--into", tmp_path / "made" / "figures")
    for name in ("fig-illustrate", "fig-perf", "fig-misbeh", "retrained"):
        assert (tmp_path / "made" / "figures" / f"{name}.png").read_bytes()[1:4] == b"PNG"
        assert (tmp_path / "made" / "figures" / f"{name}.pdf").read_bytes()[:4] == b"%PDF"


def test_a_cell_that_does_not_fit_the_budget_is_left_with_its_cost(tmp_path, capsys):
    assert run.main(["--toy", "--out", str(tmp_path), "--budget-minutes", "0.01", "--only", "tab-error"]) == 0
    said = capsys.readouterr().out
    planned = int(said.split(" cells")[0])
    assert planned > 5
    assert f"left: {planned} cells" in said
    assert not (tmp_path / "cells.jsonl").exists()


def downloads(folder):
    """Made-up downloads in the formats of the originals: name in the plan -> path."""
    pictures = np.random.default_rng(0).integers(0, 256, (4, 5, 40, 50), dtype=np.uint8)
    return {
        "cifar10": cifar(folder).with_name("cifar-10-python.tar.gz"),
        "brain_mri": brain_files(folder / "brain", pictures),
        "isic2019_ham": isic_files(folder / "isic", ("HAM_", "HAM_", "BCN_")),
        "pcam": pcam_files(folder / "pcam"),
    }


def test_the_data_folder_is_made_from_the_original_downloads(tmp_path, monkeypatch, capsys):
    given = downloads(tmp_path / "from")

    def make(name, path, into, *options):
        return preparing.main([name, str(path), str(tmp_path / into), *options])

    digest = hashlib.md5(given["cifar10"].read_bytes()).hexdigest()
    stopped("expected md5 c58f30108f718f92721af3b95e74349a", make, "cifar10", given["cifar10"], "data")
    monkeypatch.setitem(preparing.SOURCES["cifar10"].md5, "cifar-10-python.tar.gz", digest)
    shapes = {"cifar10": ((60, 32, 32, 3), 10), "brain_mri": ((12, 128, 128, 1), 4)}
    shapes |= {"isic2019_ham": ((16, 64, 64, 3), 2), "pcam": ((9, 96, 96, 3), 2)}
    for name, path in given.items():
        assert make(name, path, "data") == 0
        found, extra = load(tmp_path / "data", name, "center" if name == "isic2019_ham" else None)
        assert (found.x_train.shape, len(found.classes)) == shapes[name]
        if name == "brain_mri":
            assert extra["dup_test"].tolist() == [True, False, False] * 4
    assert "checksums: cifar-10-python.tar.gz" in capsys.readouterr().out
    assert make("isic2019_ham", given["isic2019_ham"], "whole", "--whole", "--size", "16") == 0
    assert load(tmp_path / "whole", "isic2019_ham")[0].x_train.shape == (24, 16, 16, 3)
    assert make("cifar10", given["cifar10"], "new/cifar10.npz") == 0
    read = load_data("npz", tmp_path / "new" / "cifar10.npz")
    assert (read.x_train.shape, read.classes[0]) == ((60, 32, 32, 3), "airplane")
    stopped("published at https://www.kaggle", make, "brain_mri", tmp_path / "nothing", "data")
    assert preparing.main(["--sources"]) == 0
    assert "1571f514728f59376b705fc836ff4b63" in capsys.readouterr().out


@pytest.mark.long
def test_published_cells_are_run_again_and_compared_with_minutes_of_this_machine(
    tmp_path, monkeypatch, capsys
):
    preparing.keep(tmp_path / "data", "cifar10", load_data("fashion-mini"), "made up")
    rows = [row for row in plan(toy=True) if (row.dataset, row.row) == ("cifar10", "6")]
    monkeypatch.setattr(run, "plan", lambda **_: [row for row in rows if row.label == "tab:client"])
    monkeypatch.setattr(run, "RESULTS", tmp_path / "published")
    given = ["--data", str(tmp_path / "data"), "--dataset", "cifar10", "--row", "6", "--budget-minutes", "40"]
    assert run.main([*given, "--out", str(tmp_path / "first")]) == 0
    assert load(tmp_path / "data", "cifar10")[0].notes == ("made up (28x28)",)
    (tmp_path / "first").rename(tmp_path / "published")
    capsys.readouterr()
    assert run.main([*given, "--out", str(tmp_path / "other")]) == 0
    assert "1 cells, 1 finished" in capsys.readouterr().out
    assert run.main([*given, "--out", str(tmp_path / "again"), "--list", "--fresh"]) == 0
    seconds = re.search(r"^ +(\d+) s ", capsys.readouterr().out, re.M)
    assert int(seconds[1]) < 600  # measured here: the plan's guess is of another machine and size
    assert run.main([*given, "--out", str(tmp_path / "again"), "--fresh"]) == 0
    said = capsys.readouterr().out
    assert "v(M) differs by at most expected-accuracy 0.0000" in said
    assert "Spearman of alpha 1.00" in said
    asked = [*given[:4], "--row", "x", "--out", str(tmp_path / "again")]
    stopped("--row: no such rows, expected one of '6'", run.main, asked)


def test_a_dataset_that_is_not_there_costs_no_other_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    stopped(
        "prepare.py makes them", run.main, ["--data", str(tmp_path / "empty"), "--out", str(tmp_path / "x")]
    )
    assert not (tmp_path / "x" / "cells.jsonl").exists()
    preparing.keep(tmp_path / "data", "pcam", load_data("fashion-mini"), "made up")
    given = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--only", "tab-error"]
    monkeypatch.setattr(run, "probe", lambda _cell, _path: (1.0, 1.0))
    run.main([*given, "--fresh", "--budget-minutes", "0"])
    assert re.search(r"isic2019_slow is not there, \d+ cells were left out", capsys.readouterr().out)


@pytest.mark.long
def test_what_is_committed_follows_from_the_raw_results():
    """As an old processor computes it: numpy and its BLAS have other kernels there, which add otherwise."""
    found = [name for name in kernels.__cpu_dispatch__ if kernels.__cpu_features__.get(name)]
    old = {"NPY_DISABLE_CPU_FEATURES": " ".join(found), "OPENBLAS_CORETYPE": "Nehalem"}
    assert "up to date" in call("tables.py", "--check", **old if found else {})
    drawn = sorted((HERE / "figures").glob("*.csv"))
    assert len(drawn) == 4
    for file in drawn:
        assert file.with_suffix(".png").exists()
        assert file.with_suffix(".pdf").exists()


@pytest.fixture(scope="module")
def raw():
    """Every raw number: the cells by name, and the two files beside them."""
    cells = {file.stem: json.loads(file.read_bytes()) for file in sorted((HERE / "results").glob("*.json"))}
    return cells, {file.name: json.loads(file.read_bytes()) for file in (HERE / "results/other").iterdir()}


def moved(found, draw):
    if isinstance(found, dict):
        return {key: moved(value, draw) for key, value in found.items()}
    if isinstance(found, list):
        return [moved(value, draw) for value in found]
    return found * (1 + draw()) if isinstance(found, float) else found


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_no_character_hangs_on_the_last_bits_of_a_number(raw, seed, tmp_path, monkeypatch):
    chance = random.Random(seed)

    def otherwise(found):
        """All numbers of a file up, all down, or each its own way."""
        ways = chance.choice(((1e-12,), (-1e-12,), (1e-12, -1e-12)))
        return moved(found, lambda: chance.choice(ways))

    runs, others = raw
    for name, found in others.items():
        (tmp_path / name).write_text(json.dumps(otherwise(found)))
    monkeypatch.setattr(claims, "ALONE", tmp_path / claims.ALONE.name)
    monkeypatch.setattr(uses, "CHEAT", tmp_path / uses.CHEAT.name)
    monkeypatch.setattr(other_images, "RAW", tmp_path / other_images.RAW.name)
    monkeypatch.setattr(coverage, "OUT", tmp_path / coverage.OUT.name)
    made = tables.documents(plan(), {name: otherwise(found) for name, found in runs.items()})
    assert len(made) > 14
    for name, written in made.items():
        assert written == (HERE / name).read_text(encoding="utf-8"), name


@given(st.integers(-400, 400), st.floats(-1e-12, 1e-12))
def test_a_half_way_case_is_decided_the_same_whatever_the_last_bits(eighths, noise):
    for form in (".2f", "+.2f", ".1%", ".0f"):
        assert text(eighths / 8 + noise, form) == text(eighths / 8, form)
        assert not re.fullmatch(r"-[0.%]+", text(eighths / 8 + noise, form))
    assert rounded(eighths / 8 + noise, 2) == rounded(eighths / 8, 2)
    assert math.copysign(1, rounded(0 * eighths - abs(noise), 4)) == 1


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.floats(-1e-12, 1e-12)), min_size=1, max_size=12), st.randoms()
)
def test_what_differs_by_noise_is_equal_and_nothing_else_is(drawn, chance):
    given = [steps / 1000 + noise for steps, noise in drawn]
    found = settled(given)
    for i, j in itertools.product(range(len(drawn)), repeat=2):
        assert (found[i] == found[j]) == (drawn[i][0] == drawn[j][0])
        assert (found[i] < found[j]) == (drawn[i][0] < drawn[j][0])
    assert all((found[i] == 0) == (steps == 0) for i, (steps, _) in enumerate(drawn))
    order = list(range(len(drawn)))
    chance.shuffle(order)
    assert settled([given[i] for i in order]).tolist() == found[order].tolist()
    alone = settled([0.123456789012345])
    assert alone.tolist() == [0.123456789012345]


def test_accuracies_are_shares_of_test_images_whose_sums_cancel():
    """Of 216 images member a wins 2 and b and c lose 1 each: FP's denominator is 0, and b and c are equal."""

    def share(right):
        return float(f"{right / 216:.9g}")  # as a result file has it

    one = {"round": 1, "participants": ["a", "b", "c"], "empty": share(30), "grand": share(30)}
    one |= {"alone": [share(32), share(29), share(30)], "without": [share(28), share(31), share(32)]}
    cell = {"name": "cell", "clients": ["a", "b", "c"], "samples": dict.fromkeys("abc", 1)}
    cell |= {"test_images": 216, "settings": {"training": {"rounds": 1}}}
    cell |= {"utilities": {"accuracy": {"rounds": [one], "truth": {}}}}
    stored = Reports(**{key: one[key] for key in ("empty", "grand", "alone", "without")})
    assert fp(stored).status == "reversed"  # 9 digits do not cancel
    assert fp(reports(cell, "accuracy")[0]).status == "fallback"
    found = scores(cell, "accuracy", 1)["ALPHA sum"]
    assert found[1] == found[2] == pytest.approx(-1 / 216)
    one["grand"] = 0.2
    stopped("cell: an accuracy is no share of 216 test images", reports, {**cell, "reports": {}}, "accuracy")


def test_phi_is_summed_over_rounds_and_stands_in_for_accuracy():
    cell = {"clients": ["A", "B", "C"], "phi": {}}
    assert phi(cell, "accuracy", 9) is None
    first = {"round": 1, "participants": ["A", "B", "C"], "phi": [0.1, 0.2, 0.3], "gain": 0.6}
    second = {"round": 2, "participants": ["C", "A"], "phi": [0.5, 0.25], "gain": 0.7}  # B was away
    third = {"round": 3, "participants": ["A", "B", "C"], "phi": [9.0, 9.0, 9.0], "gain": 27.0}
    cell["phi"]["sharpened-accuracy"] = [first, second, third]
    values, gain = phi(cell, "accuracy", 2)
    assert values.tolist() == pytest.approx([0.35, 0.2, 0.8])
    assert gain == pytest.approx(1.3)
    assert phi(cell, "expected-accuracy", 2) is None
    assert variation([1, 1, 2], [2, 1, 1]) == 0.25

    whole = next(json.loads(file.read_text()) for file in sorted((HERE / "results").glob("cifar10-55fec*")))
    found = scores(whole, "accuracy", 10)["PHI sum"]
    assert found == pytest.approx(phi(whole, "accuracy", 10)[0])


def test_every_test_named_for_an_axiom_exists():
    for name in {test for tests in sections.TESTS.values() for test in tests}:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_building_blocks_are_those_of_the_papers_table():
    papers = {"LOO": ("-Ui", "M"), "FP": ("M0", "+Ui", "-Ui", "M"), "EE": ("M0", "+Uj", "-Uj", "M")}
    for name, blocks in papers.items():
        found = sections.blocks(sections.LISTED[name][0])
        assert tuple(block for block, mark in found.items() if mark == "●") == blocks


def test_every_fact_is_said_every_word_is_known_and_every_claim_holds(monkeypatch):
    two = {"a": "{{? rises}}by {{step}}", "b": "{{step}} steps"}
    assert fill(two, {"step": 2}, {"rises": True}) == {"a": "by 2", "b": "2 steps"}
    stopped("never said: step", fill, {"a": "{{? rises}}", "b": ""}, {"step": 2}, {"rises": True})
    stopped("no fact 'stop'", fill, {"a": "{{stop}}"}, {"step": 2}, {})
    stopped("nothing checks 'falls'", fill, {"a": "{{? falls}}"}, {}, {"rises": True})

    def false(_evidence, _facts, claims):
        claims["water is dry"] = False

    monkeypatch.setattr(findings, "PARTS", (false,))
    stopped("no longer hold: water is dry", findings.findings, [], {}, {})


def one_round_of(settings, *truth):
    scoring, training = replace(settings.scoring, truth=truth), replace(settings.training, rounds=1)
    return replace(settings, scoring=scoring, training=training)


@pytest.fixture
def small():
    names = ["expected-accuracy", "accuracy", "brier", "neg-loss", "balanced-accuracy"]
    members = ("partition.clients=3", "partition.sizes=[60, 50, 70]")
    return tiny(*members, f"scoring.utilities={names}", "data.test_size=60", "model.name=mlp")


def test_quick_evaluation_is_the_federations_own(small):
    federation = prepare(small)
    shown = federation.pool.slice(1)
    plain = federation.evaluate(federation.first, shown)
    quick = QuickEvaluation(federation)(federation.first, shown)
    assert list(plain) == list(quick)
    for name, values in plain.items():
        np.testing.assert_allclose(quick[name], values, rtol=1e-5, atol=1e-6)


def test_weights_of_the_current_round_are_its_normalised_shapley_value(small):
    federation = prepare(small)
    names, first, shown = federation.names, federation.first, federation.pool.slice(1)
    rng = np.random.default_rng(0)
    steps = {name: rng.normal(0, 0.1, first.size).astype(np.float32) for name in names}
    value = dict.fromkeys(names, 0.0)
    for order in itertools.permutations(names):  # what each adds on arrival, over all orders
        model, before = first, federation.evaluate(first, shown)["expected-accuracy"].mean()
        for name in order:
            model = model + steps[name] / np.float32(3)
            after = federation.evaluate(model, shown)["expected-accuracy"].mean()
            value[name], before = value[name] + (after - before) / 6, after
    expected = np.clip(normalise(list(value.values())), 0.1, 3)
    trained = {name: first + step for name, step in steps.items()}
    weights = ShapleyWeights(federation)(1, first, trained)
    np.testing.assert_allclose([weights[name] for name in names], expected, rtol=1e-3)


def test_an_ensemble_is_the_mean_of_its_members_predictions(small):
    federation = prepare(small)
    rng = np.random.default_rng(1)
    first = federation.first
    solo = {name: first + rng.normal(0, 0.1, first.size).astype(np.float32) for name in federation.names}
    shown = federation.pool.slice(1)
    right = {name: federation.evaluate(model, shown)["expected-accuracy"] for name, model in solo.items()}
    found = ensembles(federation, solo)
    for mask in range(1, 8):  # the right class's mean probability, by the federation's own evaluation
        members = [name for i, name in enumerate(solo) if mask >> i & 1]
        mean = np.mean([right[name] for name in members], axis=0)
        assert found["expected-accuracy"]["table"][mask - 1] == pytest.approx(mean.mean(), rel=1e-5)
        assert found["neg-loss"]["table"][mask - 1] == pytest.approx(np.log(mean).mean(), rel=1e-5)
    for one in found.values():
        assert one["alone"] == [one["table"][m - 1] for m in (1, 2, 4)]
        assert one["without"] == [one["table"][m - 1] for m in (6, 5, 3)]
        assert one["grand"] == one["table"][-1]
    assert found["accuracy"]["table"] != found["expected-accuracy"]["table"]


def test_the_path_without_a_member_leaves_its_updates_of_all_rounds_out():
    rng = np.random.default_rng(2)
    first = torch.as_tensor(rng.normal(size=5))
    steps = torch.as_tensor(rng.normal(size=(2, 3, 5)))  # two rounds, three members
    paths, model = Paths(first), first
    for one in steps:
        for i in range(3):
            paths.add(f"client-{i}", one[i] / 3, (one.sum(0) - one[i]) / 2)
        model = model + one.mean(0)
    for i in range(3):
        made = paths.models(f"client-{i}", model)
        others = [j for j in range(3) if j != i]
        additive = first + steps[:, others].sum((0, 1)) / 3
        np.testing.assert_allclose(made["path without"], additive)
        renormalised = first + steps[:, others].mean(1).sum(0)
        np.testing.assert_allclose(made["path without, renormalised"], renormalised)


def test_p_values_by_hand():
    given = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    assert holm(given) == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})  # Holm 1979
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert sign_test(np.array([0.4, 0.1, 0.2, 0.0, 1e-12])) == pytest.approx(2 / 8)  # three of three
    assert sign_test(np.array([0.4, -0.1])) == 1.0
    assert sign_test(np.zeros(3)) == 1.0


def test_phi_and_alpha_are_compared_in_runs_that_have_both(monkeypatch):
    known = {
        ("expected-accuracy", "accuracy"): {"PHI sum": {"a": 0.5, "b": 0.5, "c": 0.9}},
        ("accuracy", "accuracy"): {"ALPHA sum": {"a": 0.25, "b": 0.5, "d": 0.1}},
    }
    monkeypatch.setattr(retrained, "against_truth", lambda _cells, own, against: known[own, against])
    along, ours, steps = retrained.phi_beside_alpha([], "expected-accuracy", "accuracy", "accuracy")
    assert (along, ours, steps.tolist()) == ([0.5, 0.5], [0.25, 0.5], [0.25, 0.0])


@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_runs_that_do_not_differ_are_no_evidence(size):
    assert student(np.array([size, -size, size])) == 1.0
    assert retrained.verdict(np.full(4, size)) == "not beyond chance (p = 1.000)"
    assert retrained.verdict(np.array([0.5, 0.51, 0.49])) == "beyond chance (p = 0.000)"


def test_the_documents_have_the_numbers_of_the_findings():
    found = "".join(
        (HERE / file).read_text(encoding="utf-8") for file in ("FINDINGS.md", "tables/retrained.md")
    )
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    worth = choosing.split("## What each criterion is worth")[1].split("\n## ")[0]
    phi = (ROOT / "docs" / "scores" / "phi.md").read_text(encoding="utf-8")
    said = re.findall(r"-?\d\.\d\d+", worth)
    said += re.findall(r"\d\.\d\d ± \d\.\d\d|\d\.\d\d to \d\.\d\d of the gain|\d of \d runs", phi)
    assert len(said) > 40
    assert [one for one in said if one not in found] == []


@pytest.mark.parametrize("total", [1, 3, 5, 10])
def test_counts_have_exact_intervals(total):
    low, high = interval(total, total)  # in closed form where all or none succeed
    assert (low, high) == pytest.approx((0.025 ** (1 / total), 1.0))
    assert interval(0, total) == pytest.approx((0.0, 1 - low))
    said = intervals([(total, total), (0, total), (total, total)])
    assert said.count(f"{total} of {total}:") == 1
    assert said.index(f"0 of {total}:") < said.index(f"{total} of {total}:")


def test_rows_of_few_seeds_are_marked_and_no_sentence_rests_on_them(monkeypatch):
    assert spread([0.5, 0.7]) == "0.60 ± 0.14 (2)"
    every = [{"seed": k, "name": f"run-{k}"} for k in range(3)]
    runs = {"few": every[:2], "enough": every, "again": every}  # the last one: the same runs in another row
    assert seeds(runs["few"]) == "2, thin"
    assert seeds(runs["enough"]) == "3"

    def found(cells, _utility, _at, _truth):
        worse = len(cells) == 2  # in the thin row FP is ahead
        near = {"FP": 0.9, "ALPHA sum": 0.1} if worse else {"FP": 0.5, "ALPHA sum": 0.7}
        return {score: {"spearman": [value] * len(cells)} for score, value in near.items()}

    monkeypatch.setattr(claims, "done", lambda row, _results: runs[row.row])
    monkeypatch.setattr(claims, "compare", found)
    rows = [Row("tab-round", "tab:round", "", "cifar10", name, 10, ()) for name in runs]
    count, ahead, lowest = claims._ablations(Evidence(rows, {}, {}))
    assert count == 1
    assert ahead
    assert lowest.startswith("0.70 (tab:round enough")


def test_halves_of_a_pool_have_equal_classes_and_nothing_in_common():
    labels = np.repeat([0, 1, 2], [7, 4, 6])
    one, other = halves(labels, np.random.default_rng(0))
    assert not set(one) & set(other)
    assert np.bincount(labels[one]).tolist() == np.bincount(labels[other]).tolist() == [3, 2, 3]


def test_scores_on_a_half_are_those_of_its_images(small, tmp_path):
    made = one_round_of(small)
    federation = prepare(made)
    analysis = Halves(federation)
    seen = []

    class Kept:
        def summed(self, plain):
            seen.append((plain.m0, plain.outcome.model, [plain.update(n) for n in plain.outcome.included]))

    with Folder(tmp_path / "run", made) as folder:
        Rehearsal(made, folder, federation=federation, analyses=[analysis, Kept()]).run()
    ((m0, model, updates),) = seen
    shown, found = federation.pool.slice(1), analysis.totals["expected-accuracy"]
    for (x, y), total in zip(analysis.images, found, strict=True):
        inside = [bool((shown.x[k] == x.numpy()).all((1, 2, 3)).any()) for k in range(len(shown.y))]

        def value(vector, inside=inside):
            return federation.evaluate(vector, shown)["expected-accuracy"][inside].mean()

        own = [(value(m0 + u) - value(m0) + value(model) - value(model - u)) / 2 for u in updates]
        np.testing.assert_allclose(total["ALPHA sum"], own, atol=1e-5)
        gain = value(model) - value(m0)
        assert sum(total["MR-SV"]) == pytest.approx(gain, abs=1e-5)  # the Shapley value adds up
        assert sum(total["PHI sum"]) == pytest.approx(gain, abs=0.02)
        assert len(y) == 30
    assert found[0]["MR-SV"].tolist() != found[1]["MR-SV"].tolist()


def test_a_score_is_compared_with_the_other_half_of_runs_whose_members_differ():
    first, second = {"ALPHA sum": [1, 2, 3], "MR-SV": [1, 2, 3]}, {"ALPHA sum": [3, 2, 1], "MR-SV": [3, 2, 1]}
    runs = [{"utilities": {"accuracy": [first, second]}}]
    assert near(runs, "ALPHA sum", "accuracy", "accuracy", other=False) == [1.0]
    assert near(runs, "ALPHA sum", "accuracy", "accuracy", other=True) == [-1.0]
    flat = {"ALPHA sum": [0.1, 0.1, 0.1], "MR-SV": [0, 1, 2]}
    assert differs({"accuracy": [first, second]})
    assert not differs({"accuracy": [first, second], "expected-accuracy": [first, flat]})


def test_classes_that_are_kept_are_numbered_anew():
    pictures = np.arange(6)
    given = {"classes": ("a", "b", "c"), "group_train": pictures * 10}
    given |= {f"x_{part}": pictures for part in ("train", "test")}
    given |= {"y_train": np.array([0, 1, 2, 2, 1, 0]), "y_test": np.array([2, 2, 1, 0, 0, 2])}
    found = only(given, ["c", "a"])
    assert found["classes"] == ("c", "a")
    assert found["x_train"].tolist() == [0, 2, 3, 5]
    assert found["y_train"].tolist() == [1, 0, 0, 1]
    assert found["group_train"].tolist() == [0, 20, 30, 50]
    assert found["x_test"].tolist() == [0, 1, 3, 4, 5]
    assert found["y_test"].tolist() == [0, 0, 1, 1, 0]
    stopped("kept: no class 'd', expected some of a, b, c", only, given, ["a", "d"])


def run_of(name, seed=0, *, phi=False, solo=False, truth=("mr-shapley",), mu=0.5, **special):
    """A finished cell, as far as it says what it was asked for."""
    rounds = [{"solo": [0.5]} if solo else {}]
    settings = {"partition": {"mu": mu}, "scoring": {"truth": list(truth)}, "experiment": special}
    made = {"name": name, "dataset": "cifar10", "subset": 9, "seed": seed, "settings": settings}
    return made | {"phi": {"accuracy": [1]} if phi else {}, "utilities": {"accuracy": {"rounds": rounds}}}


def test_a_score_that_runs_were_not_asked_for_is_taken_from_their_repeats():
    asked = [run_of("one", solo=True), run_of("two", seed=1, solo=True)]
    others = [
        run_of("without truth", phi=True, truth=()),
        run_of("other partition", phi=True, mu=0.1),
        run_of("cheated", phi=True, cheat="pool"),
        run_of("again", phi=True, games="additive", halves=True),
        run_of("another seed", seed=2, phi=True),
    ]
    results = {one["name"]: one for one in (*asked, *others)}
    found, mark = repeats(asked, results, "PHI sum")
    assert ([one["name"] for one in found], mark) == (["again"], " ‡")
    found, _ = repeats(asked, results, "PHI sum", truth="")
    assert [one["name"] for one in found] == ["without truth"]
    assert repeats(asked, results, "MERIT") == (asked, "")
    assert repeats(asked, {}, "PHI sum") == ([], "")
    assert repeats(others[3:4], results, "PHI sum") == (others[3:4], "")


def test_a_repeat_is_compared_with_the_retrained_value_of_the_run_it_repeats():
    first = run_of("first", truth=("mr-shapley", "shapley")) | {"retrained": [0, 1, 2], "samples": {"A": 3}}
    first["utilities"]["accuracy"]["truth"] = {"MR-SV": [5], "SV": [7]}
    again = run_of("again", phi=True, truth=("mr-shapley",)) | {"samples": {"A": 3}, "computed": "of its own"}
    again["utilities"]["accuracy"]["truth"] = {"MR-SV": [6]}
    (found,), mark = repeats([first], {"first": first, "again": again}, "PHI sum", truth="SV")
    assert (found["name"], found["retrained"], mark) == ("again", [0, 1, 2], " ‡")
    assert found["utilities"]["accuracy"]["truth"] == {"MR-SV": [6], "SV": [7]}
    assert "computed" not in found
    assert again["utilities"]["accuracy"]["truth"] == {"MR-SV": [6]}
    assert [lent(first, again), lent(first, first), lent(again, first)] == [found, first, first]
    other = again | {"samples": {"A": 4}}
    stopped("again repeats first, but members have other numbers of samples", lent, first, other)


@pytest.mark.long
def test_what_a_cell_asks_reaches_its_rehearsal(small, tmp_path):
    made = one_round_of(small, "mr-shapley")
    with Folder(tmp_path / "plain", made) as folder:
        plain = BothGames(made, folder, lambda _: None)
        plain.run()
    special = {"weights": "MR-SV", "sampled": 12, "loop": True, "again": 1, "games": "additive"}
    with Folder(tmp_path / "special", made) as folder:
        asked = BothGames(made, folder, lambda _: None, loop=True, special=special)
        asked.run()
        methods = [record.body["method"] for record in folder.ledger.records("analysis")]
    assert isinstance(asked.current_weights, ShapleyWeights)
    assert methods == ["sampled"]
    assert asked.truth.stacked is asked.transport.local.stacked is False
    assert asked.federation.seed("noise", 1) == plain.federation.seed("noise", 1)  # the data stay as they are
    assert asked.federation.seed("model") != plain.federation.seed("model") == seed_for(made, "model")
    assert len(plain.renormalised) == 1
    assert len(plain.whole_run) == 2
    assert asked.renormalised == []
    assert plain.current_weights is None
    for asked_for, special, computed in ((True, {}, True), (False, {}, False), (False, {"phi": True}, True)):
        with Folder(tmp_path / f"{asked_for} {special}", made) as folder:
            engine = BothGames(made, folder, lambda _: None, phi=asked_for, special=special)
        assert bool(engine.phi.utilities) == computed  # it is left out unless the plan asks for it


def test_a_cell_writes_no_checkpoints_and_has_the_scores_of_a_run_with_them(small, tmp_path):
    made, documents = one_round_of(small), []
    for kind in (Folder, Scratch):
        with kind(tmp_path / kind.__name__, made) as folder:
            documents.append(Rehearsal(made, folder, federation=prepare(made, pool_key=bytes(32))).run())
            left = [*(tmp_path / kind.__name__).glob("checkpoints/*")]
        assert bool(left) == (kind is Folder)
    assert documents[0] == documents[1]


def test_a_line_that_was_cut_short_costs_no_other_run(tmp_path):
    file = tmp_path / "cells.jsonl"
    append(tmp_path, {"name": "one"})
    with file.open("a", encoding="utf-8") as out:
        out.write('{"name": "tw')  # killed in the middle
    append(tmp_path, {"name": "three"})
    append(tmp_path, {"name": "four"})
    assert [cell["name"] for cell in read_merged(file)] == ["one", "three", "four"]
    assert file.read_bytes().count(b"\n") == 4


@pytest.mark.long
def test_coalitions_that_are_trained_again_outlast_a_run_that_is_given_up(tmp_path, monkeypatch):
    cell = in_order(select(plan(toy=True), ["tab-error-game"]))[0]
    titles = onecell.convert(None, [cell.dataset], tmp_path)
    given = cell, tmp_path / f"{cell.dataset}.npz", titles[cell.dataset]
    trained = tmp_path / f"{cell.name}.jsonl"
    stopped = []

    def late():
        if trained.exists() and len(trained.read_text().splitlines()) > 2:
            stopped.append(1)
        return len(stopped)

    monkeypatch.setattr(onecell.time, "time", late)
    with pytest.raises(onecell.Overtime):
        onecell.run_cell(*given, deadline=0.5, unfinished=tmp_path)
    lines = [json.loads(line) for line in trained.read_text().splitlines()]
    kept = lines[2]["coalition"]
    name = next(iter(lines[2]["utilities"]))
    lines[2]["utilities"][name] = 0.123  # were it trained once more, this would be gone
    trained.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = onecell.run_cell(*given, unfinished=tmp_path)
    assert result["retrained"][name][kept] == 0.123
    assert len(result["retrained"][name]) == 1 << len(result["clients"])
    assert not trained.exists()


def test_the_authors_protocol_is_theirs():
    """Accuracy, nobody worth 0, the same round's truth, a minimum that stays unless negative, L2 squared."""
    reports = {"empty": 0.6, "grand": 0.5, "alone": [0.4, 0.5], "without": [0.5, 0.4]}  # B is better
    one = {"round": 1, "participants": ["A", "B"], **reports}
    truth = {"rounds": [[-0.1, 0.0]], "MR-SV": [-0.1, 0.0]}
    cell = {"name": "x", "clients": ["A", "B"], "test_images": 10, "samples": {"A": 1, "B": 1}}
    cell |= {"settings": {"training": {"rounds": 1}}}
    cell |= {"utilities": {"accuracy": {"rounds": [one], "truth": truth}}}
    found = theirs(cell, 1)
    np.testing.assert_allclose(found["truth"], [0.2, 0.3])  # a Shapley value plus v(M0)/N
    np.testing.assert_allclose(found["FP"], [0.2, 0.3])  # alpha = (-0.1, 0) + v(M0)/2, scaled to v(M)
    near = {"spearman": [1.0], "kendall": [1.0], "pearson": [pytest.approx(1)], "l2": [pytest.approx(0)]}
    assert compared([cell], AUTHORS, 1)["FP"] == near
    assert compared([cell], TEXT, 1)["FP"]["spearman"] == [-1.0]  # the sum of alpha is negative
    assert squared_distance(np.array([1.0, 3.0]), np.array([1.0, 1.0]), AUTHORS) == pytest.approx(0.5)
    assert squared_distance(np.array([-1.0, 3.0]), np.array([1.0, 1.0]), AUTHORS) == pytest.approx(2)


def test_a_verdict_is_of_the_protocols_that_can_say():
    def of(authors, text):
        return verdict({AUTHORS: ("", authors), TEXT: ("", text), OURS: ("", True)})

    assert (of(True, True), of(True, False), of(False, True), of(False, False)) == (HOLDS, ONLY, NOT, NOT)
    assert (of(None, True), of(None, False), of(None, None)) == (HOLDS, NOT, NOT)
    assert of(None, AT_THE_END) == AT_THE_END
    assert lead([0.1, 0.2, 0.3])[1] is False
    assert lead([0.2, 0.21, 0.22]) == ("+0.21 (+0.19 to +0.23; 3)", True)


@pytest.mark.parametrize("score", ["FP", "LOO", "COS"])
def test_printed_weights_are_the_normalised_score_of_the_round_unclipped(small, score):
    federation = prepare(small)
    rng = np.random.default_rng(1)
    start = federation.first
    trained = {name: start + rng.normal(0, 0.1, start.size).astype(np.float32) for name in federation.names}
    weights = PrintedWeights(federation, score)(1, start, trained)
    n = len(trained)
    moves = [(model.astype(float) - start) / n for model in trained.values()]
    grand = start + sum(moves)

    def value(model):
        values = federation.evaluate(model.astype(np.float32), federation.pool.slice(1))["accuracy"]
        return float(np.mean(values))

    def cosine(one, other):
        return one @ other / np.linalg.norm(one) / np.linalg.norm(other)

    alone, without = [value(start + move) for move in moves], [value(grand - move) for move in moves]
    reports = Reports(empty=value(start), grand=value(grand), alone=alone, without=without)
    by_hand = {
        "FP": lambda: fp(reports).values,
        "LOO": lambda: [reports.grand - one for one in without],
        "COS": lambda: [cosine(start + move, grand) for move in moves],
    }[score]()
    assert min(weights.values()) == 0
    np.testing.assert_allclose(list(weights.values()), normalise(by_hand), atol=1e-6)


def test_the_spreads_of_the_plan_are_those_of_the_committed_runs():
    """By dataset: the median over pairs of members without a planted fault."""
    seen = {}
    for cell in read_results([RESULTS]).values():
        alike, found = cell["settings"]["partition"]["scheme"] == "iid", {}
        faults, names = cell["settings"].get("corruption", {}), cell["clients"]
        noise = faults.get("label_noise", {})
        faulty = {
            *faults.get("label_flip", ()),
            *faults.get("free_rider", ()),
            *(names if noise == "ramp" else noise),
        }
        pairs = [
            (i, j)
            for i, j in zip(*np.triu_indices(len(names), 1), strict=True)
            if not faulty & {names[i], names[j]}
        ]
        one, other = np.array(pairs, dtype=int).reshape(-1, 2).T
        for utility, part in cell["utilities"].items():  # of alpha, whose errors are those of members
            own = np.array(part["rounds"][-1].get("se_alpha_total") or np.nan, dtype=float)
            if np.isfinite(own).all():
                found[utility] = np.hypot(own[one], own[other]) * math.sqrt(cell["test_images"])
        for utility, rounds in cell.get("phi", {}).items():
            total = from_blocks(sum(np.array(one["blocks"]) for one in rounds), rounds[0]["sizes"])
            if total.covariance is None:  # a single block
                continue
            own = np.diag(total.covariance)
            spread = own[one] + own[other] - 2 * total.covariance[one, other]
            found[utility] = np.sqrt(spread * sum(rounds[0]["sizes"]))
        for utility in found.keys() & SPREAD.keys():
            if utility in cell.get("phi", {}) or "accuracy" not in utility.partition("-")[2]:
                seen.setdefault((utility, alike), {}).setdefault(cell["dataset"], []).extend(found[utility])
    assert len(seen) == 2 * len(SPREAD)
    for (utility, alike), each in seen.items():
        medians = [np.median(values) for values in each.values() if values]
        ends = min(medians), max(medians)
        assert SPREAD[utility][not alike] == pytest.approx(ends, rel=0.02), (utility, alike)
