"""What a plan says of bytes and of the settlement, beside what is really sent."""

import math

import pytest

from fedmerit.simulation.plan import fixed_bytes, plan
from fedmerit.simulation.setup import prepare
from linear_federation import SIZE, Federation, fit
from tiny import tiny

NAMES = ("fit", "again", "third")


@pytest.mark.parametrize(("members", "utilities"), [(3, 1), (9, 1), (9, 3)])
def test_a_member_sends_about_as_many_bytes_as_planned(tmp_path, members, utilities):
    named = list(NAMES[:utilities])
    federation = Federation(tmp_path, members, 3, settings={"scoring": {"utilities": named}})
    federation.evaluate = lambda model, shown: dict.fromkeys(named, fit(model, shown)["fit"])
    federation.run()
    sent = dict.fromkeys(federation.names, 0)
    for passed in federation.passed:
        if passed.ask.round == 2:
            sent[passed.member] += len(passed.answer)
    beside = max(sent.values()) - federation.config.word_bytes * SIZE
    assert fixed_bytes(federation.config, members) == pytest.approx(beside, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "word_bytes"),
    [
        (("scoring.method=reports",), 4),
        (("scoring.method=both",), 8),
        (("scoring.method=settled",), 8),
        (("scoring.method=both", "settlement.naming=false"), 4),
        (("scoring.method=both", "secure_aggregation.enabled=false"), 4),
    ],
)
def test_only_statements_that_can_be_traced_cost_longer_words(settings, word_bytes):
    config = tiny(*settings)
    found = plan(config, calibrate=False)
    assert found.bytes_up == word_bytes * found.parameters + fixed_bytes(config, 4)
    utilities = 0 if config.scoring.method == "settled" else 2
    assert fixed_bytes(config, 4) - fixed_bytes(tiny("scoring.method=settled"), 4) == 785 * utilities


@pytest.mark.parametrize(("method", "samples"), [("both", 25), ("settled", 50)])
def test_a_plan_counts_what_the_settlement_costs_a_member(brief_plans, method, samples):
    config = tiny(f"scoring.method={method}", "training.rounds=7")
    found = plan(config, calibrate=False)
    cost, model = found.settlement, found.parameters
    shown = prepare(config).pool.settlement()
    assert cost.samples == len(shown.y) == samples
    pool = shown.x.nbytes + shown.y.nbytes + len(shown.salts)
    assert cost.bytes_down == pool + 7 * (2 + 4 + 4) * model  # g_t as int16; M0 and X as 4 bytes each
    assert cost.disk_bytes == 7 * 4 * model
    assert cost.gradients == 7 * 3
    assert math.isnan(cost.minutes)
    assert plan(config).settlement.minutes > 0


def test_what_a_settled_run_does_not_measure_is_not_planned():
    settled, both, reports = (
        plan(tiny(f"scoring.method={method}"), calibrate=False) for method in ("settled", "both", "reports")
    )
    assert (settled.costs, settled.pool, settled.flower_models) == ((), 0, 0)
    assert settled.resolution.samples == settled.settlement.samples
    assert [cost.name for cost in both.costs] == [cost.name for cost in reports.costs]
    assert (both.pool, reports.pool) == (25, 50)
    assert reports.settlement is None
