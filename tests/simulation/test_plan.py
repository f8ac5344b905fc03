"""What a plan says, beside what is really sent; a first run finds what was planted; progress ends."""

import io
import math
from itertools import groupby, pairwise

import pytest
from rich.console import Console

from fedmerit.cli.run import FIRST, commented_config
from fedmerit.config import from_dict
from fedmerit.report import terminal
from fedmerit.report.facts import Facts
from fedmerit.report.source import read_source
from fedmerit.report.terminal import print_plan, watching
from fedmerit.simulation import plan as planning
from fedmerit.simulation.plan import fixed_bytes, plan, resolution
from fedmerit.simulation.run import Progress, run
from fedmerit.simulation.setup import prepare
from linear_federation import SIZE, Federation, fit
from tiny import losing, tiny

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


# -------------------------------------------------------------------------------- a first run, and progress


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_the_run_that_init_writes_names_the_member_with_wrong_labels(fedmerit, tmp_path, seed):
    (tmp_path / "my.toml").write_text(commented_config())
    (liar,) = FIRST["corruption"]["label_flip"]
    settings = ("--set", f"run.seed={seed}", "--set", "secure_aggregation.enabled=false")
    fedmerit.said("run", tmp_path / "my.toml", "--out", tmp_path / "run", *settings)
    facts = Facts(read_source(tmp_path / "run"))
    assert tuple(facts.suspects) == (liar,)
    assert facts.standing[liar].rank == 6
    assert facts.standing[liar].share == 0
    assert min(one.share for name, one in facts.standing.items() if name != liar) > 0.1
    assert not any(doubt.gross for doubt in facts.doubts)
    assert set(facts.status.values()) == {"ok"}  # neither FP nor EE is reversed


# ------------------------------------------------------------------------------------------------- a plan


@pytest.mark.parametrize(
    ("first", "others", "calls"), [(0.02, 0.02, 1), (0.0, 0.0, 51), (0.009, 0.0002, 7), (0.009, 0.002, 2)]
)
def test_a_plan_measures_slow_work_once_and_quick_work_often_but_not_for_long(
    monkeypatch, first, others, calls
):
    """The clock goes on by so many seconds a call; the first one, which warms up, does not count."""
    done, federation = [], prepare(tiny("model.name=mlp"))
    monkeypatch.setattr(planning, "CALIBRATION", 0.001)
    monkeypatch.setattr(
        planning.time, "perf_counter", lambda: bool(done) * first + others * max(0, len(done) - 1)
    )
    found = planning._clocked(lambda: done.append(1), federation)
    assert found == pytest.approx(first if calls == 1 else others)
    assert len(done) <= calls


def test_a_plan_measures_whole_trainings_and_settlements_where_there_is_time(monkeypatch):
    """To begin takes longer than a step: what is measured is as much as a member does, not a single batch."""
    asked = []

    def timed(network, x, y, settings, seed):
        asked.append(len(y))

    monkeypatch.setattr(planning, "train", timed)
    monkeypatch.setattr(planning, "CALIBRATION", 0.001)
    monkeypatch.setattr(planning.time, "perf_counter", lambda: 0.0001 * len(asked))
    federation = prepare(tiny("model.name=mlp", "training.batch_size=4"))
    _, per_sample = planning.calibration(federation)
    assert max(asked) == 40  # ten batches of 4 take the time that there is
    assert per_sample == pytest.approx(0.0001 / 40)


def test_a_plan_says_first_what_the_test_set_cannot_tell_apart_and_demands_nothing(brief_plans):
    planned, out = plan(from_dict(FIRST, ("data.test_size=100",)), calibrate=False), io.StringIO()
    print_plan(Console(file=out, width=500), planned)
    first, second, *_ = out.getvalue().splitlines()
    low, high = (100 * gap for gap in planned.resolution.gaps)
    assert first.startswith(
        f"with 50 test samples, this run can tell two members apart if their scores differ by {low:.0f} to"
    )
    assert second.startswith("so it shows a member that does harm, and perhaps")
    assert 1 < low < high
    assert high < 10 * low  # a range of 1.9 to 53 says nothing


def test_more_samples_tell_more_apart_and_samples_dealt_alike_too():
    def gaps(samples, *overrides):
        return resolution(from_dict({}, overrides), 6, samples).gaps

    few, many = gaps(250), gaps(1000)
    assert [2 * gap for gap in many] == pytest.approx(few)
    assert gaps(250, "partition.scheme=iid") < few
    assert gaps(250, "scoring.utilities=['accuracy']", "scoring.method=reports")[0] > few[0]
    unmeasured = from_dict({}, ["scoring.utilities=['f1:0']", "scoring.method=reports"])
    assert resolution(unmeasured, 6, 250) is None


# ----------------------------------------------------------------------------------------------- progress


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """All steps of a run with ground truth, of whose members one is lost."""
    told = []
    with losing({"client-1": "2:unmask"}):
        config = tiny("scoring.method=both", "scoring.truth=['mr-shapley', 'shapley']", "model.name=mlp")
        run(config, tmp_path_factory.mktemp("steps") / "run", watch=told.append)
    return [step for step in told if step.stage != "note"]


def test_ground_truth_tells_how_many_coalitions_are_done_of_all(steps):
    found = [(step.round, step.done, step.total) for step in steps if step.stage == "coalitions"]
    assert found == [(number, done, 16) for number in (1, 2) for done in (0, 8, 16)]
    again = [(step.done, step.total) for step in steps if step.stage == "retrain"]
    assert again[0] == (0, 64)
    assert again[-1] == (64, 64)
    assert all(after[0] == before[0] + 1 for before, after in pairwise(again))


def test_every_stage_ends_with_all_of_it_done(steps):
    for stage, group in groupby(steps, key=lambda step: (step.stage, step.round)):
        *_, last = group
        assert last.done == last.total or stage == ("round", 1), stage
    assert steps[-1].stage == "settle"


def test_lines_tell_of_long_stages_now_and_then(steps, monkeypatch):
    monkeypatch.setattr(terminal, "LATELY", 0.0)
    out = io.StringIO()
    with watching(Console(file=out, width=100)) as watch:
        for step in steps:
            watch(step)
    assert "\ncoalitions: 8 of 16\n" in out.getvalue()
    assert "\nretraining: 64 of 64\n" in out.getvalue()
    monkeypatch.setattr(terminal, "LATELY", 1e9)
    quiet = io.StringIO()
    with watching(Console(file=quiet, width=100)) as watch:
        watch(Progress("coalitions", 1, 2, 8, 16))
    assert quiet.getvalue() == ""


def test_nothing_half_done_is_left_on_a_terminal(steps):
    """Where a terminal cannot clear its last lines, they are what it ends with."""
    out = io.StringIO()
    with watching(Console(file=out, force_terminal=True, width=100)) as watch:
        for step in steps:
            watch(step)
    last = out.getvalue().rpartition("settlement follows")[2]
    assert "0/4" not in last
    assert "2/2" in last


def test_what_is_left_is_told_by_the_rounds_after_the_slow_first_one(monkeypatch):
    clock, out = [0.0], io.StringIO()
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    with watching(Console(file=out, width=100)) as watch:
        for number, at in ((1, 30.0), (2, 32.0), (3, 34.0)):
            clock[0] = at
            watch(Progress("round", number, 5, number, 5))
    assert "(about 6.0 s left)" in out.getvalue()  # after two rounds: three of 2 s
    assert "(about 4.0 s left)" in out.getvalue()
