"""PHI in a rehearsal: the scores of every round with a sum, in the ledger and in what is written from it."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fedmerit as fm
from fedmerit.errors import LedgerError
from fedmerit.identity import canonical
from fedmerit.report.page.html import page
from fedmerit.report.source import read_source
from fedmerit.scoring.ground_truth import agreement
from fedmerit.simulation.direction import direction
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_copy, verify_folder
from forging import anew, changes, places, put
from networks import module_of
from runs import rounds_of
from tiny import ALL, Seen, tiny


def rehearse(config, folder):
    told, seen = [], Seen()
    with Folder(folder, config) as opened:
        rehearsal = Rehearsal(config, opened, told.append, analyses=[seen])
        document = rehearsal.run()
        return rehearsal, document, [one.text for one in told if one.stage == "note"], [*seen.rounds.values()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi") / "run"
    config = tiny("scoring.truth=['mr-shapley']", "participation.away={client-3=[2]}", ALL)
    return folder, *rehearse(config, folder)


def test_scores_are_the_products_with_the_direction_of_the_round(ran):
    _, rehearsal, document, _, rounds = ran
    each = []
    for one, (m0, outcome, updates) in zip(document["rounds"], rounds, strict=True):
        shown = outcome.slice
        way = direction(
            rehearsal.federation.network, m0, outcome.model, shown.x, shown.y, "expected-accuracy"
        )
        scores = fm.aumann_shapley(updates, way.blocks, outcome.included, sizes=way.sizes)
        each.append(scores)
        found = one["phi"]
        assert found["participants"] == list(outcome.included)
        np.testing.assert_allclose(found["phi"], scores.values, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(found["stderr"], scores.stderr, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(one["scores"]["PHI"], scores.values, rtol=1e-5, atol=1e-9)
        gain = one["reports"]["grand"] - one["reports"]["empty"]
        assert found["gain"] == pytest.approx(gain, abs=1e-6)
        assert sum(found["phi"]) + found["rest"] == pytest.approx(gain, abs=1e-6)
        assert abs(found["rest"]) <= 0.02 * abs(gain) or found["points"] == 7
    total = fm.accumulate(each, score="PHI")
    np.testing.assert_allclose(document["cumulative"]["PHI"], total.values, rtol=1e-5)
    np.testing.assert_allclose(document["stderr"]["PHI"], total.stderr, rtol=1e-4)
    assert len(document["rounds"][1]["phi"]["participants"]) == 3  # one was away


def test_it_is_close_to_the_exact_value_of_the_same_rounds(ran):
    _, _, document, _, _ = ran
    for part in (document, document["companions"]["brier"]):
        assert agreement(part["cumulative"]["PHI"], part["truth"]["MR-SV"]).pearson > 0.9


def test_a_utility_without_a_gradient_has_none_and_the_run_says_so(ran):
    _, _, document, notes, _ = ran
    assert [note.code for note in notes if getattr(note, "code", "").startswith("phi")] == ["phi-no-gradient"]
    assert "PHI of accuracy is left out: the utility has no gradient" in notes
    accuracy = document["companions"]["accuracy"]
    assert "PHI" not in accuracy["cumulative"]
    assert all("phi" not in one for one in accuracy["rounds"])


def test_it_is_verified_written_anew_and_shown(ran):
    folder, _, document, _, _ = ran
    assert any("scores" in line for line in verify_folder(folder))
    assert "PHI" in (folder / "scores.csv").read_text().splitlines()[0]
    assert len(fm.read(folder / "scores.csv")) == len(fm.read(folder / "scores.json")) == 2
    source = read_source(folder)
    assert source.analysed["expected-accuracy"]["cumulative"]["PHI"] == document["cumulative"]["PHI"]
    assert '<th scope="col">PHI</th>' in page(folder)


def test_members_who_may_not_see_each_others_scores_have_none(tmp_path):
    _, document, notes, _ = rehearse(tiny("scoring.visibility='coordinator'"), tmp_path / "run")
    assert "phi-private" in [getattr(note, "code", "") for note in notes]
    assert "PHI" not in document["cumulative"]
    with Folder(tmp_path / "run", tiny("scoring.visibility='coordinator'"), resume=True) as folder:
        assert all("phi" not in one.body for one in rounds_of(folder.ledger))


FAILS = '''
import torch

calls = 0

def fragile(model, images, labels):
    """Finite; its gradient is not from the second round on, where logits are clipped at their own value."""
    p = model(images).softmax(1).gather(1, labels[:, None])[:, 0]
    return p + (0 * p).sqrt() if p.mean() > 0.2 else p
'''


@pytest.fixture
def fragile(tmp_path, monkeypatch):
    yield from module_of("fragile_measure", FAILS, tmp_path, monkeypatch)


def test_a_round_without_a_gradient_ends_the_sum_and_not_the_run(tmp_path, fragile):
    config = tiny(
        "scoring.utilities=['fragile_measure:fragile']", "training.rounds=4", "training.local_epochs=3",
        "model.name=mlp",
    )  # fmt: skip
    _, document, notes, _ = rehearse(config, tmp_path / "run")
    with_phi = ["phi" in one for one in document["rounds"]]
    assert with_phi == sorted(with_phi, reverse=True)
    assert not all(with_phi)
    assert "PHI" not in document["cumulative"]
    assert [note.code for note in notes if getattr(note, "code", "").startswith("phi")] == ["phi-failed"]


def test_what_a_ledger_says_of_phi_has_its_form(tmp_path):
    """A changed field of PHI is refused, or is another number of the same kind, which nothing shows."""
    config = tiny("secure_aggregation.enabled=false", "training.rounds=1", "scoring.utilities=['brier']")
    run(config, tmp_path / "run")
    with Folder(tmp_path / "run", config, resume=True) as folder:
        records = [replace(one, body=json.loads(canonical(one.body))) for one in folder.ledger.records()]
    (place,) = (k for k, one in enumerate(records) if one.kind == "round")
    body, copy = records[place].body, tmp_path / "copy.jsonl"
    copy.write_bytes(anew(records, None))
    assert list(verify_copy(copy))
    passed = set()
    for path, value in places(body["phi"]):
        if {"client-1", "client-2", "client-3"} & set(path) or (path[-1:] and path[-1] in range(1, 16)):
            continue  # one member and one block stand for all
        for other in changes(value):
            copy.write_bytes(anew(records, None, place + 1, put(body, ("phi", *path), other)))
            try:
                list(verify_copy(copy))
            except LedgerError:
                continue
            assert type(other) is type(value), (path, other)
            passed.add(".".join(str(step) for step in path[1:]))
    numbers = {"gain", "rest", "points", "sizes", "sizes.0", "stratified"}
    own = {"blocks.client-0", "blocks.client-0.0"}
    assert passed <= {*numbers, *own, ""}  # other numbers, or in another order; or PHI is left out
    assert {"gain", "rest", "blocks.client-0.0"} <= passed
    shown = {**body, "phi": {"accuracy": body["phi"]["brier"]}}
    copy.write_bytes(anew(records, None, place + 1, shown))
    with pytest.raises(LedgerError, match="phi is about the utilities accuracy"):
        list(verify_copy(copy))
