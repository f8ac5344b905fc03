"""What a member computes from the integers it is told, what it measures, and what the server takes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.data import choose_pool, load
from fedmerit.errors import BindingError, BoundError, MessageError
from fedmerit.protocol.outcome import (
    Contribution,
    Evaluations,
    Outcome,
    Report,
    Scorer,
    Told,
    accept,
    coalition_models,
    model_hash,
    moved,
    sum_hash,
)
from fedmerit.protocol.pool import Sampling
from fedmerit.scoring.sampling import error_parts, least_error, sketch
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import intervals
from fedmerit.secagg.quantise import BLOCK, Encoding
from fedmerit.secagg.setting import Task
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
        accept(Report(**facts), outcome(), ["accuracy"], Sampling())
    accept(report, outcome(), ["accuracy"], Sampling())


LINE = "m\nround 1: refused: stage unmask, member B: lied " + "x" * 1000


@pytest.mark.parametrize("change", [{"bound_to": {LINE: "00"}}, {"measured": {LINE: None}}])
def test_what_a_member_makes_up_is_no_line_of_the_servers_notes(change):
    """A message that holds a name of a member's making holds little of it, and on one line."""
    report = member().report(M0, outcome(), summed(UPDATES[0]), 1.0)
    facts = vars(report) | {key: {**getattr(report, key), **value} for key, value in change.items()}
    with pytest.raises((BindingError, MessageError)) as caught:
        accept(Report(**facts), outcome(), ["accuracy"], Sampling())
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


# ---------------------------------------------------------------------------------- which sums are possible


NAMES = ("A", "B", "C", "D", "E", "F", "G")


class Shown:
    """A test slice of which only the name matters here."""

    id = "s"


def told(m0, words, included=NAMES[:4]):
    return Told(1, words, tuple(included), Shown, model_hash(m0), "00" * 32)


def words_of(*numbers, total=None):
    """Return integers as the words of a sum, with the total weight as the last one if it is secret."""
    words = np.array(numbers, np.int64) % 2**32
    return np.append(words, [] if total is None else [total]).astype(np.uint32)


@st.composite
def honest(draw):
    """M0 of any magnitudes, and the sum of updates within the bound and often at it."""
    n, coordinates = draw(st.integers(3, 7)), draw(st.integers(1, 6))
    bound = draw(st.sampled_from([1e-30, 1e-6, 0.1, 4.0, 100.0, 1e6]) | st.floats(1e-9, 1e9))
    kind = draw(st.sampled_from(["uniform", "public", "secret"]))
    cap = 1 if kind == "uniform" else draw(st.sampled_from([1, 10, 100_000, 600_000_000 // n]))
    weights = {
        "uniform": st.just(1),
        "public": st.floats(cap * 1e-6, cap),
        "secret": st.integers(1, min(cap, 5)) | st.integers(1, cap),
    }[kind]
    size = st.sampled_from([0.0, 1e-45, 1e-38, 1e-6, 1.0, 1e4, 1e10, 1e30])
    values = st.builds(lambda big, x: big * x, size, st.floats(-1, 1, width=32))
    m0 = np.array(draw(st.lists(values, min_size=coordinates, max_size=coordinates)), np.float32)
    part = st.sampled_from([-1.0, 1.0, 1.0, 0.0]) | st.floats(-1, 1)
    parts = st.lists(part, min_size=coordinates, max_size=coordinates)
    together = draw(st.none() | parts)  # everybody at the same place: the sum reaches the bound too
    encoding = Encoding(coordinates, n, bound, kind, cap)
    words, each = np.zeros(encoding.words, np.uint32), []
    for k in range(n):
        each.append(draw(weights))
        delta = bound * np.array(together or draw(parts))
        words += encoding.encode(delta, weight=each[-1], seed=k)
    public = dict(zip(NAMES, map(float, each), strict=False)) if kind == "public" else None
    return m0, encoding, each, public, words


@settings(max_examples=80)
@given(honest())
def test_every_member_computes_from_the_integers_the_m_that_the_server_has(case):
    m0, encoding, weights, public, words = case
    total = math.fsum(public.values()) if public else None
    decoded = encoding.decode(words, included=len(weights), public_total=total)
    for number, name in enumerate(NAMES[: len(weights)]):
        found = told(m0, words, NAMES[: len(weights)]).outcome(m0, Task(bytes(32), encoding, public))
        found.check(name, float(weights[number]), encoding)
        assert found.total_weight == decoded.total_weight
        assert model_hash(found.model) == model_hash(moved(m0, decoded.weighted_sum, decoded.total_weight))
        assert found.bound_to["x"] == sum_hash(words)


def test_one_unit_more_in_one_place_is_another_outcome():
    """M is rounded to float32, so it may be the same; the digest of the integers is not."""
    m0, encoding = np.full(3, 1e6, np.float32), Encoding(3, 4, 4.0)
    one = told(m0, words_of(5, 6, 7)).outcome(m0, Task(bytes(32), encoding))
    other = told(m0, words_of(5, 6, 8)).outcome(m0, Task(bytes(32), encoding))
    assert one.bound_to["m"] == other.bound_to["m"]
    assert {key for key in one.bound_to if one.bound_to[key] != other.bound_to[key]} == {"x"}


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_sum_beyond_the_reach_of_those_who_are_in_it_is_refused(sign):
    m0, encoding = np.zeros(3, np.float32), Encoding(3, 7, 4.0)
    reach = 4 * encoding.limit
    found = told(m0, words_of(0, sign * reach, 0)).outcome(m0, Task(bytes(32), encoding))
    assert found.model[1] == pytest.approx(sign * 4.0)
    with pytest.raises(BoundError):
        told(m0, words_of(0, sign * (reach + 1), 0)).outcome(m0, Task(bytes(32), encoding))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_is_refused(odd):
    m0 = np.zeros(5, np.float32)
    m0[2] = odd
    with pytest.raises(BindingError):
        told(m0, words_of(*range(5))).outcome(m0, Task(bytes(32), Encoding(5, 4, 4.0)))


def test_members_that_weigh_nothing_together_have_summed_to_nothing():
    m0, encoding = np.zeros(5, np.float32), Encoding(5, 4, 4.0, "public", 1)
    with pytest.raises(BoundError):
        told(m0, words_of(*[0] * 5)).outcome(m0, Task(bytes(32), encoding, dict.fromkeys("ABCD", 0.0)))


def test_a_weight_below_ones_own_and_one_for_each_other_is_refused():
    """A member that says a negative secret weight makes W small; so does a server that makes W up."""
    m0, encoding = np.zeros(3, np.float32), Encoding(3, 7, 4.0, "secret", 1000)
    for total in (106, 7000):
        told(m0, words_of(0, 0, 0, total=total), NAMES).outcome(m0, Task(bytes(32), encoding)).check(
            "A", 100.0, encoding
        )
    for total in (105, 7):
        found = told(m0, words_of(0, 0, 0, total=total), NAMES).outcome(m0, Task(bytes(32), encoding))
        with refused(BindingError, stage="report", member="A"):
            found.check("A", 100.0, encoding)
    for total in (6, 7001):
        with pytest.raises(BoundError):
            told(m0, words_of(0, 0, 0, total=total), NAMES).outcome(m0, Task(bytes(32), encoding))


def test_a_sum_of_others_or_of_two_is_refused():
    m0, encoding = np.zeros(3, np.float32), Encoding(3, 4, 4.0)
    for included in (("B", "C", "D"), ("A", "B"), ("A", "B", "A")):
        found = told(m0, words_of(0, 0, 0), included).outcome(m0, Task(bytes(32), encoding))
        with pytest.raises(BindingError):
            found.check("A", 1.0, encoding)


# ------------------------------------------------ standard errors: the formula, and whether intervals cover


def joint(utility, labels, *parts, balanced=True):
    """Errors by class, of a member that measured these outcomes."""
    shown = SimpleNamespace(id="s", y=np.array(labels))
    values = [{utility: np.array(part, dtype=float)} for part in parts]
    member = Scorer("A", Evaluations(lambda model, shown: {}), "additive", Sampling(balanced))
    return member, member._measure(utility, SimpleNamespace(slice=shown, round=1), values, None)


def test_errors_by_class_where_the_pool_was_drawn_by_class():
    # LOO per sample (.1, .3 | .5, .5), IOI 0: only class 0 varies, sd .1414, over sqrt 2, times 2/4
    before, after, outside = [0.5] * 4, [0.6, 0.8, 1.0, 1.0], [0.5] * 4
    _, one = joint("u", [0, 0, 1, 1], before, after, before, outside)
    assert one.se_loo == pytest.approx(0.05, rel=1e-3)
    assert one.se_alpha == pytest.approx(0.025, rel=1e-3)
    assert (one.freedom, len(one.sketch)) == (2, 32)
    parts = error_parts(np.array([0.05, 0.15, 0.25, 0.25]), np.array([0, 0, 1, 1]))
    least = least_error([np.array(part) for part in (before, after, before, outside)]) / 2
    stated = sketch(parts, least, slice_id="s", round=1, client="A")
    assert one.sketch == pytest.approx(stated, abs=1e-6 * max(stated))
    _, other = joint("u", [0, 0, 1, 1], before, after, before, outside, balanced=False)
    assert other.se_loo == pytest.approx(np.std([0.1, 0.3, 0.5, 0.5], ddof=1) / 2, rel=1e-3)
    assert other.freedom == 3


def test_one_changed_answer_is_added_each_way_and_counts_half_in_alpha():
    right = [1, 0, 1, 1, 0, 1]
    member, one = joint("accuracy", [0, 0, 0, 1, 1, 1], right, right, right, right)
    assert (one.se_loo, one.se_ioi) == (pytest.approx(2**0.5 / 6), pytest.approx(2**0.5 / 6))
    assert (one.se_alpha, one.se_alpha_total) == (pytest.approx(2**0.5 / 12), pytest.approx(2**0.5 / 12))
    assert np.abs(one.sketch) == pytest.approx(2**0.5 / 12, rel=1e-6)
    assert (
        member.sampling.freedom("accuracy", SimpleNamespace(y=np.array([0, 0, 0, 1, 1, 1])))
        == one.freedom
        == 4
    )


def test_balanced_accuracy_counts_a_sample_of_the_rarest_class():
    labels = [0] * 8 + [1] * 2
    scale = np.array([10 / (2 * 8)] * 8 + [10 / (2 * 2)] * 2)
    right = scale * [1, 1, 0, 1, 0, 1, 1, 1, 1, 0]
    _, one = joint("balanced-accuracy", labels, right, right, right, right, balanced=False)
    assert one.se_loo == pytest.approx(2**0.5 * 2.5 / 10)
    assert one.freedom == 8  # classes are strata however the pool was drawn


def error_of(differences, *, counted):
    """The error of a mean difference of right answers, as members state it or without the least error."""
    before, after = (np.where(differences == kind, 0.0, 1.0) for kind in (1, -1))
    least = least_error([before, after]) if counted else 0.0
    return math.hypot(least, np.linalg.norm(error_parts(differences, np.zeros(len(differences), np.int64))))


def coverage(m, changed, upwards, counted, seed=0, repeats=4000):
    """How often the 95 % interval of an accuracy's LOO holds the true one; how often it has no width."""
    up, down = changed * upwards, changed * (1 - upwards)
    drawn = np.random.default_rng(seed).multinomial(m, [up, down, 1 - changed], size=repeats)
    kinds, times = np.unique(drawn, axis=0, return_counts=True)
    errors = [error_of(np.repeat([1.0, -1.0, 0.0], kind), counted=counted) for kind in kinds]
    found = (kinds[:, 0] - kinds[:, 1]) / m
    names = tuple(f"test-set-{k}" for k in range(len(kinds)))
    scores = Scores(score="LOO", clients=names, values=found, raw=found, gain=1, stderr=errors)
    low, high = intervals(scores).T
    held = (low <= up - down + 1e-12) & (up - down <= high + 1e-12)
    return np.average(held, weights=times), np.average(np.array(errors) == 0, weights=times)


@pytest.mark.parametrize(("m", "plain", "here"), [(25, 0.11, 0.96), (100, 0.39, 0.95), (200, 0.63, 0.94)])
def test_intervals_of_accuracy_cover(m, plain, here):
    every = [
        (changed, upwards)
        for changed in (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
        for upwards in (0.5, 0.75, 0.9, 1)
    ]
    worst = [min(coverage(m, *one, counted=counted)[0] for one in every) for counted in (False, True)]
    # of 32 shares with a standard error of .0035 the lowest
    assert worst[0] == pytest.approx(plain, abs=0.02)
    assert worst[1] == pytest.approx(here, abs=0.015)


def test_it_costs_nothing_where_there_is_enough_to_see():
    samples = np.random.default_rng(0).choice([1.0, -1.0, 0.0], p=[0.1, 0.1, 0.8], size=1000)
    assert error_of(samples, counted=True) == pytest.approx(error_of(samples, counted=False), rel=0.006)
