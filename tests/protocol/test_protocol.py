"""Member and server without an engine: what each refuses, and the two models only a member can build."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.data import choose_pool, load
from fedmerit.errors import BindingError, BoundError, MessageError
from fedmerit.protocol.measurement import (
    Contribution,
    Evaluations,
    Scorer,
    coalition_models,
)
from fedmerit.protocol.outcome import (
    Outcome,
    Report,
    accept,
    model_hash,
    moved,
)
from fedmerit.secagg.quantise import BLOCK, Encoding
from refusals import refused

P = 6


def value(model, shown):
    """A stand-in for a network: per sample, a smooth function of the vector and the label."""
    return {"accuracy": 1 / (1 + np.exp(-(float(model @ np.arange(P)) + shown.y / 10)))}


def pool(seed=0):
    rng, key = np.random.default_rng(seed), bytes(range(32))
    return choose_pool(load("fashion-mini"), 20, rng, key=key, utility_hash="0" * 64)


M0 = np.linspace(-0.1, 0.1, P, dtype=np.float32)
UPDATES = np.random.default_rng(1).normal(0, 0.1, (3, P))
POOL = pool()
PLAIN = Encoding(length=P, members=3, bound=1.0)


def outcome(model=None, **change):
    new = (M0 + UPDATES.sum(axis=0) / 3).astype(np.float32) if model is None else model
    facts = {
        "round": 1,
        "model": new,
        "total_weight": 3.0,
        "included": ("A", "B", "C"),
        "slice": POOL.slice(1),
        "m0_hash": model_hash(M0),
        "head": "00" * 32,
        "words": np.zeros(P, np.uint32),
    }
    return Outcome(**(facts | change))


def summed(update):
    """An update as integers: more exact than any test asks for."""
    return Contribution(np.rint(update * 2.0**30).astype(np.int32), 2.0**-30)


def member(name="A", **change):
    return Scorer(name, Evaluations(value), **change)


BOUND = ("m0", "m", "x", "weight", "slice", "included", "head")


def test_a_report_holds_what_the_formulas_say():
    out = outcome()
    report = member().report(M0, out, summed(UPDATES[0]), 1.0)
    shown = out.slice
    alone = value((M0 + UPDATES[0] / 3).astype(np.float32), shown)["accuracy"]
    without = value((out.model - UPDATES[0] / 3).astype(np.float32), shown)["accuracy"]
    before, after = value(M0, shown)["accuracy"], value(out.model, shown)["accuracy"]
    measured = report.measured["accuracy"]
    assert measured.alone == pytest.approx(alone.mean(), abs=1e-7)
    assert measured.without == pytest.approx(without.mean(), abs=1e-7)
    h = ((after - without) + (alone - before)) / 2
    assert measured.se_alpha == pytest.approx(np.std(h, ddof=1) / np.sqrt(20), rel=1e-4)
    assert measured.se_alpha_total == measured.se_alpha
    change = out.model - M0
    expected = UPDATES[0] @ change / np.linalg.norm(UPDATES[0]) / np.linalg.norm(change)
    assert report.cosine == pytest.approx(expected, abs=1e-6)


def test_the_running_error_is_that_of_the_summed_differences():
    one = member()
    for _ in range(3):
        last = one.report(M0, outcome(), summed(UPDATES[0]), 1.0)
    measured = last.measured["accuracy"]
    assert measured.se_alpha_total == pytest.approx(3 * measured.se_alpha)  # the same differences three times


def test_what_everybody_needs_is_evaluated_once_and_changes_nothing():
    calls = []

    def counted(model, shown):
        calls.append(1)
        return value(model, shown)

    out = outcome()
    plain = Scorer("A", Evaluations(counted)).report(M0, out, summed(UPDATES[0]), 1.0)
    assert len(calls) == 4
    shared = Evaluations(counted)
    for _ in range(3):
        again = Scorer("A", shared).report(M0, out, summed(UPDATES[0]), 1.0)
    assert len(calls) == 4 + 4 + 2 + 2
    assert again == plain
    other = pool(seed=5).slice(1)
    shared(M0, other, model_hash(M0))  # on other samples it is another evaluation
    assert len(calls) == 13
    for k in range(10):  # and few are kept
        shared(M0 + k, other, model_hash(M0 + k))
    assert len(shared._kept) == Evaluations.MOST


def test_a_member_refuses_a_sum_it_is_not_in():
    with refused(BindingError, stage="report", member="D"):
        outcome().check("D", 1.0, PLAIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"round": 2}, "answers round 2, but this is round 1"),
        ({"client": "D"}, "member D: reports on a sum it is not in"),
        ({"measured": {}}, "expected utilities accuracy, got"),
        *[
            ({"bound_to": what}, f"computed on a different {what} from ours")
            for what in ("m0", "m", "weight", "slice")
        ],
    ],
)
def test_the_server_drops_what_was_computed_on_anything_else(change, message):
    report = member().report(M0, outcome(), summed(UPDATES[0]), 1.0)
    facts = vars(report) | change
    if isinstance(change.get("bound_to"), str):
        facts["bound_to"] = {**report.bound_to, change["bound_to"]: "00"}
    with pytest.raises((BindingError, MessageError), match=message):
        accept(Report(**facts), outcome(), ["accuracy"])
    accept(report, outcome(), ["accuracy"])


LINE = "m\nround 1: refused: stage unmask, member B: lied " + "x" * 1000


@pytest.mark.parametrize("change", [{"bound_to": {LINE: "00"}}, {"measured": {LINE: None}}])
def test_what_a_member_makes_up_is_no_line_of_the_servers_notes(change):
    """A message that holds a name of a member's making holds little of it, and on one line."""
    report = member().report(M0, outcome(), summed(UPDATES[0]), 1.0)
    facts = vars(report) | {key: {**getattr(report, key), **value} for key, value in change.items()}
    with pytest.raises((BindingError, MessageError)) as caught:
        accept(Report(**facts), outcome(), ["accuracy"])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_report_reads_back_bit_for_bit_and_only_in_its_own_run():
    report = member().report(M0, outcome(), summed(UPDATES[0]), 1.0)
    assert Report.from_body("A", report.body("run-1"), run="run-1") == report
    with refused(BindingError, stage="report", member="A"):
        Report.from_body("A", report.body("run-1"), run="run-2")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@given(
    st.dictionaries(
        st.sampled_from(["run", "round", "bound_to", "measured", "cosine", "else"]), JSON | st.just("run-1")
    )
)
def test_anything_else_in_the_place_of_a_report_is_a_protocol_error(body):
    try:
        found = Report.from_body("A", body, run="run-1")
    except (MessageError, BindingError):
        return
    assert set(body) >= {"run", "round", "bound_to", "measured", "cosine"}
    assert isinstance(found.round, int)


def test_the_renormalised_game_takes_the_member_out_and_rescales():
    weights, deltas = np.array([1.0, 2.0, 3.0]), UPDATES
    total = weights.sum()
    model = (M0 + weights @ deltas / total).astype(np.float32)
    out = outcome(model=model, total_weight=total)
    alone, without = coalition_models("renormalised", M0, out, summed(weights[1] * deltas[1]), weights[1])
    np.testing.assert_allclose(alone, M0 + deltas[1], atol=1e-6)
    others = (weights[0] * deltas[0] + weights[2] * deltas[2]) / 4
    np.testing.assert_allclose(without, M0 + others, atol=1e-6)
    for weight in (0.0, total):
        with refused(BoundError, stage="report"):
            coalition_models("renormalised", M0, out, summed(deltas[1]), weight)


@pytest.mark.parametrize("game", ["additive", "renormalised"])
def test_models_that_are_made_block_by_block_are_those_of_the_formulas(game):
    rng, size, total, weight = np.random.default_rng(3), 2 * BLOCK + 5, 7.0, 2.0
    m0, model = rng.normal(size=(2, size)).astype(np.float32)
    own = Contribution(rng.integers(-(2**30), 2**30, size, np.int32), 0.3e-9)
    contribution = own.integers.astype(np.float64) * own.step
    update, change = (contribution / total).astype(np.float32), model.astype(np.float64) - m0
    expected = m0 + update, model - update
    if game == "renormalised":
        rest = (change * total - contribution) / (total - weight)
        expected = m0 + (contribution / weight).astype(np.float32), m0 + rest.astype(np.float32)
    found = coalition_models(game, m0, outcome(model=model, total_weight=total), own, weight)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(own.update(total), update)
    np.testing.assert_array_equal(
        moved(m0, contribution, total), (m0 + contribution / total).astype(np.float32)
    )
    cosine = contribution @ change / np.linalg.norm(contribution) / np.linalg.norm(change)
    assert own.cosine(m0, model) == pytest.approx(cosine, abs=1e-12)


def test_small_things():
    assert summed(np.zeros(P)).cosine(M0, M0 + 1) is None
    assert summed(np.ones(P)).cosine(M0, M0) is None
    assert summed(np.ones(P)).cosine(M0, M0 + 1) == pytest.approx(1.0)
    assert model_hash(M0) == model_hash(M0.copy())
    assert model_hash(M0) != model_hash(np.nextafter(M0, 1))
