"""One contract for every way to run a federation.

A *scenario* (`scenarios.py`) says what happens: who is lost where, who is away, who brings too much, how
members are weighed. A *way* (`transports.py`) goes through it: `linear` (members with files, a linear model,
this process), `local` (the engine in one process, torch), `grid` (Flower's messages in this process, same
task) and `collab` (NVFlare's calls, same task again). What a way cannot express is skipped with the reason. A
new way is one class with `cannot` and `run`, and one line in ``WAYS``. `hold` is what every run keeps to;
flower/test_deployments.py asks it of processes.

What differs: ``round`` records of `local` hold ``members_checkpoint``, and its reports a cosine. Of a round
that nobody reported on, `local` records v(M0) and v(M), others neither. Where no round is closed, Flower's
ways raise `RunAborted` once the folder is written. Over Flower who was lost joins again: ``seen`` has another
order.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmerit.config import of_folder
from fedmerit.errors import FedmeritError
from fedmerit.identity import number
from fedmerit.ledger.decisions import Terms
from fedmerit.protocol.outcome import model_hash
from fedmerit.verify import verify_copy, verify_folder
from linear_federation import dealing_badly
from runs import copied, read_run, record_decision, run_in
from scenarios import SCENARIOS, STAGES, Expected, Scenario, expected, name_of
from transports import WAYS, Local, Ran


def expectations(scenario: Scenario) -> list[Expected]:
    return [expected(scenario, 1 + i) for i in range(scenario.rounds)]


MONEY = ["everybody", "secret-weights", "coordinator-sees"]
SAME = [name for name, scenario in SCENARIOS.items() if any(not e.aborted for e in expectations(scenario))]


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """Goes through a scenario by a way, once; the folder is not to be changed."""
    done: dict[tuple[str, Scenario], Ran] = {}

    def go(way: str, scenario: Scenario) -> Ran:
        if reason := WAYS[way].cannot(scenario):
            pytest.skip(f"{way}: {reason}")
        if (way, scenario) not in done:
            with dealing_badly(*((name_of(d), at, name_of(h)) for d, at, h in scenario.bad)):
                done[way, scenario] = WAYS[way].run(scenario, tmp_path_factory.mktemp(way))
        return done[way, scenario]

    return go


# -------------------------------------------------------------------------------------------------- scenarios


FIRST = {
    "linear": tuple(SCENARIOS),
    "local": (
        *MONEY,
        "settled",
        "bad-shares",
        "one-beyond",
        "one-beyond-and-all-needed",
        "one-lost-at-masked-check",
    ),
    "grid": ("everybody", "settled", "bad-shares", "two-lost-at-masked-check"),
    "collab": ("everybody", "secret-weights", "settled", "bad-shares", "two-lost-at-masked-check"),
}
"""Scenarios that the quick tests try by each way; the long ones try all."""


def in_time(way, names):
    return [pytest.param(name, marks=() if name in FIRST[way] else pytest.mark.long) for name in names]


TRIED = [pytest.param(way, *one.values, marks=one.marks) for way in WAYS for one in in_time(way, SCENARIOS)]


@pytest.mark.parametrize(("way", "scenario"), TRIED)
def test_contract(ran, way, scenario):
    hold(SCENARIOS[scenario], ran(way, SCENARIOS[scenario]))


def hold(scenario: Scenario, found: Ran) -> None:
    it_verifies(scenario, found)
    everybody_is_where_expected(scenario, found)
    an_aborted_round_leaves_the_model(scenario, found)
    the_ledger_gives_no_reason(found)
    reports_are_bound_to_one_outcome(found)
    heads_are_on_the_chain(scenario, found)
    just_who_is_summed_has_a_masked_input(found)
    slices_are_revealed_as_agreed(scenario, found)
    weights_are_those_of_who_is_summed(scenario, found)
    the_model_is_the_weighted_mean(scenario, found)
    statements_add_up(scenario, found)


def it_verifies(scenario, found):
    lines = list(verify_folder(found.folder))
    aborted = sum(one.aborted for one in expectations(scenario))
    assert any(
        line.startswith(f"rounds: {scenario.rounds} of {scenario.rounds}, {aborted} ab") for line in lines
    )
    told = {scenario.names[0], *(name_of(i) for i, _, _ in scenario.lost)}
    for name in told & found.heads.keys():
        list(verify_folder(found.folder, heads=found.heads[name], member=name))


def everybody_is_where_expected(scenario, found):
    rounds = found.rounds
    assert [one.number for one in rounds] == list(range(1, scenario.rounds + 1))
    for one in rounds:
        listed = (one.scheduled, one.included, one.declined, one.blamed, one.silent)
        seen = Expected(*listed, bool(one.aborted))
        assert seen == expected(scenario, one.number), f"round {one.number}: {one.aborted}"
        assert tuple(one.reports) == tuple(name for name in one.included if name not in one.silent)
    assert found.given_up is False or all(one.aborted for one in rounds)


def an_aborted_round_leaves_the_model(scenario, found):
    rounds, before = found.rounds, found.records[0].body["m0"]
    settled = scenario.method == "settled"
    for one in rounds:
        assert (one.body["m"] == before) is bool(one.aborted)
        assert (one.body["slice"] is None) is (bool(one.aborted) or settled)
        before = one.body["m"]
    (end,) = [record.body for record in found.records if record.kind == "end"]
    assert end == {"rounds": len(rounds), "model": before}


def the_ledger_gives_no_reason(found):
    """The record at the end of a round says who declined, and has no more to say than that of any round."""
    bodies = [record.body for record in found.records if record.kind == "round"]
    assert len({frozenset(body) for body in bodies}) == 1
    plain = [record for record in found.records if record.kind not in ("run", "join", "opening")]
    said = json.dumps([dict(record.body) for record in plain])
    assert not re.search("beyond|withdrew|coordinates|largest|finite", said)
    assert all(not one.aborted or "declined" not in one.aborted for one in found.rounds)


def reports_are_bound_to_one_outcome(found):
    outcomes = {record.body["round"]: record.body for record in found.records if record.kind == "outcome"}
    before = found.records[0].body["m0"]
    for one in found.rounds:
        assert (one.number in outcomes) is not bool(one.aborted)
        for report in one.reports.values():
            assert {"round": one.number, **report.bound_to} == outcomes[one.number]
        if not one.aborted:
            assert outcomes[one.number]["m0"] == before
            before = outcomes[one.number]["m"]


def heads_are_on_the_chain(scenario, found):
    places = {record.digest.hex(): record for record in found.records}
    for record in found.records:
        if record.kind == "report":
            assert places[record.body["bound_to"]["head"]].seq < record.seq
    (end,) = [record for record in found.records if record.kind == "end"]
    signed = {record.author: record.body["head"] for record in found.records if record.kind == "seen"}
    assert signed == {name: end.digest.hex() for name in scenario.names if name not in found.dead}


def just_who_is_summed_has_a_masked_input(found):
    inputs = {r.body["round"]: set(r.body["inputs"]) for r in found.records if r.kind == "masked"}
    for one in found.rounds:
        assert one.aborted or inputs[one.number] == set(one.included)


def slices_are_revealed_as_agreed(scenario, found):
    shown = [one.body["slice"] for one in found.rounds if not one.aborted]
    assert len(set(shown)) == (len(shown) if scenario.reveal == "per-round" else min(1, len(shown)))


def weights_are_those_of_who_is_summed(scenario, found):
    for record in found.records:
        if record.kind == "outcome":
            included = expected(scenario, record.body["round"]).included
            assert number(record.body["weight"]) == sum(scenario.weight_of[name] for name in included)
        if record.kind == "schedule":
            public = record.body["weights"]
            assert (public is not None) is (scenario.weights == "roster")
            for name in record.body["members"] if public else ():
                assert number(public[name]) == scenario.weight_of[name]


def the_model_is_the_weighted_mean(scenario, found):
    """Every update is rounded by less than a step, and M to float32."""
    config = of_folder(found.folder)
    for one in found.rounds if found.models else ():
        m0, m = found.models[one.number - 1 : one.number + 1]
        assert one.body["m"] == model_hash(m)
        if one.aborted:
            assert np.array_equal(m0, m)
            continue
        weights = {name: scenario.weight_of[name] for name in one.included}
        cap = {"uniform": 1, "secret": config.training.weight_cap}.get(
            scenario.weights, max(scenario.weight_of[name] for name in one.scheduled)
        )
        step = config.secure_aggregation.bound * cap / ((2**32 // len(one.scheduled) - 1) // 2)
        total = sum(weights.values())
        mean = sum(w * found.updates[one.number, name].astype(float) for name, w in weights.items()) / total
        most = len(weights) * step / total + np.abs(m) * 2.0**-23 + 2.0**-23 * np.abs(mean)
        assert (np.abs(m.astype(float) - m0 - mean) <= most).all()


def statements_add_up(scenario, found):
    """Everybody who was summed states, also who was lost in the last round; every equation holds."""
    kinds = [record.kind for record in found.records]
    if scenario.method == "reports":
        assert not {"opening", "statement", "settled"} & {*kinds}
        return
    summed = {name for one in found.rounds for name in one.included}
    assert {record.author for record in found.records if record.kind == "statement"} == summed
    (settled,) = [record.body for record in found.records if record.kind == "settled"]
    closed = [one.number for one in found.rounds if not one.aborted]
    assert [(one["round"], one["holds"]) for one in settled["rounds"]] == [(n, True) for n in closed]
    assert (settled["missing"], settled["named"], settled["final"]) == ([], [], True)
    assert kinds.index("opening") > max(place for place, kind in enumerate(kinds) if kind == "round")
    (opening,) = [record.body["manifest"] for record in found.records if record.kind == "opening"]
    assert opening["pool"] not in {one.body["slice"] for one in found.rounds}


# ------------------------------------------------------------------------------------------- anything happens

LOSSES = st.dictionaries(st.tuples(st.integers(0, 4), st.integers(1, 2)), st.sampled_from(STAGES), max_size=5)


@pytest.mark.long
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(losses=LOSSES)
def test_whoever_is_lost_wherever_the_run_verifies(tmp_path_factory, losses):
    scenario = Scenario(members=5, lost=tuple((i, at, stage) for (i, at), stage in losses.items()))
    found = WAYS["linear"].run(scenario, tmp_path_factory.mktemp("any"))
    hold(scenario, found)
    early = STAGES[: STAGES.index("masked") + 1]
    for one in found.rounds:
        lost = {name_of(i) for (i, at), stage in losses.items() if at == one.number and stage in early}
        assert one.aborted or set(one.included) == {*scenario.names} - lost


# --------------------------------------------------------------------------------- one task, the same numbers


def said(found: Ran):
    """What reports say, apart from the history they rest on.

    The record of a join is in the ledger between machines only. There members also leave the cosine out.
    """
    return [
        {
            name: ({key: what for key, what in report.bound_to.items() if key != "head"}, report.measured)
            for name, report in one.reports.items()
        }
        for one in found.rounds
    ]


@pytest.mark.parametrize("scenario", in_time("grid", SAME))
def test_over_a_grid_the_reports_are_those_of_the_engine_in_one_process(ran, scenario):
    here, there = ran("local", SCENARIOS[scenario]), ran("grid", SCENARIOS[scenario])
    assert said(here) == said(there)
    assert [one.body["m"] for one in here.rounds] == [one.body["m"] for one in there.rounds]
    assert used(here) == used(there)
    assert any(said(here))


@pytest.mark.parametrize(
    "scenario", in_time("grid", (name for name in SAME if SCENARIOS[name].method != "reports"))
)
def test_over_a_grid_settled_scores_are_those_of_the_engine_in_one_process(ran, scenario):
    here, there = (phi(ran(way, SCENARIOS[scenario]), SCENARIOS[scenario]) for way in ("local", "grid"))
    assert np.abs(here - there).max() <= 1e-3 * np.abs(here).max()


def phi(found: Ran, scenario: Scenario) -> np.ndarray:
    return run_in(found.folder).settlement.account.totals(scenario.names).values


def used(found: Ran):
    return {one.number: one.body["utilities"] for one in found.rounds if one.reports}


@pytest.mark.parametrize("scenario", ["secret-weights", "roster-weights", "one-beyond"])
def test_in_one_process_masks_change_no_byte_of_the_scores(ran, tmp_path, scenario):
    masked = ran("local", SCENARIOS[scenario])
    plain = Local().run(SCENARIOS[scenario], tmp_path, masks=False)
    for name in ("scores.json", "scores.csv"):
        assert (masked.folder / name).read_bytes() == (plain.folder / name).read_bytes()
    list(verify_folder(plain.folder))


# ---------------------------------------------------------------------------------------------- who sees what


@pytest.mark.parametrize("way", WAYS)
def test_where_the_coordinator_sees_all_a_members_copy_verifies(ran, tmp_path, way):
    scenario = SCENARIOS["coordinator-sees"]
    found = ran(way, scenario)
    for name in scenario.names:
        copied(found.folder, tmp_path / name, name)
        lines = list(verify_copy(tmp_path / name, member=name, heads=found.heads.get(name)))
        assert f"scores: {name}'s follow from its own reports; nobody else's were recomputed" in lines
        shown = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        open_ = {one["author"] for one in shown if one["kind"] == "report" and "body" in one}
        assert open_ == {name}


# ------------------------------------------------------------------------------------------------------ money


def pays(folder: Path) -> dict[str, int]:
    utility = of_folder(folder).scoring.utilities[0]
    terms = Terms(budget="1000.00", utility=utility, despite_doubts=True)
    decision, new = record_decision(folder, terms)
    assert new
    assert sum(decision.paid.by_client.values()) + decision.paid.unpaid == decision.paid.budget == 1000
    assert any(line.startswith("payouts: decision 1 ") for line in verify_folder(folder))
    assert record_decision(folder, terms)[1] is False
    rounds, decisions, _ = read_run(folder)
    assert [one.paid for one in decisions] == [decision.paid]
    assert set(decision.paid.by_client) == {name for one in rounds for name in one.reports}
    return {name: int(100 * amount) for name, amount in decision.paid.items()}


@pytest.mark.parametrize("scenario", MONEY)
def test_money_is_paid_over_every_transport_and_the_same_for_the_same_task(ran, tmp_path, scenario):
    paid = {}
    for way in WAYS:
        folder = shutil.copytree(ran(way, SCENARIOS[scenario]).folder, tmp_path / way)
        paid[way] = pays(folder)
    assert paid["local"] == paid["grid"] == paid["collab"]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_without_any_score_pays_nobody(ran, tmp_path, way):
    found = ran(way, SCENARIOS["one-beyond-and-all-needed"])
    assert found.rounds[0].aborted
    folder = shutil.copytree(found.folder, tmp_path / "run")
    before = (folder / "ledger.sqlite").read_bytes()
    with pytest.raises((FedmeritError, ValueError)):
        record_decision(folder, Terms(budget="1000.00", utility=of_folder(folder).scoring.utilities[0]))
    assert (folder / "ledger.sqlite").read_bytes() == before
