"""Models that are made on the device equal, bit for bit, those that numpy makes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from device import DeviceEvaluations, contribution_on, models_on, updates_on

from fedmerit.errors import BoundError
from fedmerit.protocol.measurement import Contribution, coalition_models
from fedmerit.protocol.outcome import Outcome
from fedmerit.simulation.run import Rehearsal
from fedmerit.simulation.setup import prepare
from fedmerit.storage.run_folder import Folder
from tiny import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("game", ["additive", "renormalised"])
@pytest.mark.parametrize(("weight", "total"), [(1.0, 9.0), (13.0, 57.0), (0.3, 1.7)])
def test_the_two_models_of_a_member_are_those_that_numpy_makes(game, weight, total):
    rng, size = np.random.default_rng(5), 70_001  # more than a block of numpy's
    m0, model = rng.normal(size=(2, size)).astype(np.float32)
    own = Contribution(rng.integers(-(2**31), 2**31, size, np.int32), 0.7e-9)
    outcome = Outcome(1, np.zeros(0, np.uint32), ("A", "B", "C"), None, "", "", model, total)
    expected = coalition_models(game, m0, outcome, own, weight)
    given = torch.as_tensor(m0), torch.as_tensor(model), contribution_on(CPU, own)
    for found, one in zip(models_on(game, *given, weight, total), expected, strict=True):
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), one)
    if game == "renormalised":
        with pytest.raises(BoundError, match="the renormalised game needs 0 < w_i < W"):
            models_on(game, *given, total, total)


def test_updates_before_a_sum_are_those_that_numpy_makes():
    start, *trained = np.random.default_rng(6).normal(size=(8, 1000)).astype(np.float32)
    for found, model in zip(updates_on(CPU, start, trained), trained, strict=True):
        np.testing.assert_array_equal(found.numpy(), (model - start) / np.float32(7))


@pytest.mark.parametrize("game", ["additive", "renormalised"])
@pytest.mark.parametrize("masks", [True, False])
def test_a_run_whose_models_are_made_on_the_device_has_the_same_scores(tmp_path, game, masks):
    config = tiny(f"scoring.game={game}", "training.weights=secret", "training.rounds=1")
    config = replace(config, secure_aggregation=replace(config.secure_aggregation, enabled=masks))
    reports, seen = [], []

    class Spy:
        def summed(self, plain):
            seen.append(plain)
            each = [plain.update(name) for name in plain.outcome.included]
            np.testing.assert_array_equal(plain.updates.numpy(), np.stack(each))

    for path in ("numpy", "device"):
        with Folder(tmp_path / path, config) as folder:
            federation = prepare(config, pool_key=bytes(32))
            rehearsal = Rehearsal(config, folder, federation=federation, analyses=[Spy()])
            if path == "device":
                on_device = DeviceEvaluations(federation.evaluate, CPU)
                rehearsal.coordinator.evaluate.of_member = on_device.of_member
            rehearsal.run()
            reports.append(rehearsal.recorder.rounds[0].reports)
    assert on_device._round is not None  # it was used
    assert len(seen) == 2
    assert len(reports[0]) == 4
    for name, one in reports[0].items():
        assert one.measured == reports[1][name].measured
        assert one.cosine == pytest.approx(reports[1][name].cosine, rel=1e-9)
