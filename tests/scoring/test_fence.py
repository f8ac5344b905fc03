"""The rule "fenced": by hand, its corners, and what holds for all scores; the intervals of shares."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fedmerit.errors import InputError, UndefinedShares
from fedmerit.notes import code_of
from fedmerit.scoring.amounts import payouts
from fedmerit.scoring.rewards import (
    Shares,
    _divided,
    amounts_within,
    believed,
    by_rule,
    fenced,
    paid_apart,
    share_intervals,
    shares,
    visible_gaps,
)
from fedmerit.scoring.types import Scores

numbers = st.integers(-256, 512).map(lambda k: k / 64)
errors = st.integers(0, 128).map(lambda k: k / 64)


def scored(raw, stderr=None, *, gain=1.0, clients=None, **extra):
    names = clients or tuple(f"m{i}" for i in range(len(raw)))
    stderr = [stderr] * len(raw) if isinstance(stderr, float) else stderr
    return Scores(score="ALPHA", clients=names, values=raw, raw=raw, gain=gain, stderr=stderr, **extra)


def in_blocks(blocks):
    blocks = np.array(blocks, dtype=float)
    raw = blocks.mean(axis=0)
    named = {"score": "PHI", "clients": tuple(f"m{i}" for i in range(len(raw))), "gain": 1.0}
    return Scores(values=raw, raw=raw, blocks=blocks, sizes=np.ones(len(blocks)), **named)


def paid(scores, **options):
    return list(shares(scores, "fenced", **options).values())


def test_who_is_surely_below_zero_gets_no_part_of_what_is_cut_off():
    # sigma .5: a member at -.5 counts half, one at -1 not at all; kappa = 4 / (3.5 + 3)
    found = shares(scored([20.0, 2.0, 0.0, -0.5, -1.0], 0.5))
    assert found.fence.counted == pytest.approx(3.5)
    assert found["m0"] == pytest.approx(4 / 6.5)
    assert found["m4"] == 0
    assert found["m3"] == pytest.approx(found["m2"] / 2)


@pytest.mark.parametrize(("n", "most"), [(2, 4 / 5), (3, 4 / 6), (6, 4 / 9), (9, 4 / 12)])
def test_one_huge_score_gets_four_times_the_mean_of_the_others(n, most):
    for error in (None, 0.1):
        found = shares(scored([*[1.0] * (n - 1), 1e6], error))
        assert found[f"m{n - 1}"] == pytest.approx(most)
        assert found["m0"] == pytest.approx(most / 4, rel=1e-3)
        assert found.notes[-1] == f"held back by the fence: m{n - 1}"


def test_floor_and_cap():
    raw = [0, 1, 2, 12]  # kappa = 4/7; .8 - 4/7 is cut off: a third of it for each of the others
    plain = paid(scored(raw, 0.1))
    rest = (0.8 - 4 / 7) / 3
    assert plain == pytest.approx([rest, 1 / 15 + rest, 2 / 15 + rest, 4 / 7])
    capped = paid(scored(raw, 0.1), cap=0.4)
    assert capped[3] == 0.4
    assert capped[0] / capped[1] == pytest.approx(plain[0] / plain[1])  # the others in proportion
    assert paid(scored(raw, 0.1), floor=0.1)[0] == 0.1
    assert paid(scored(raw, 0.1), floor=0.25) == pytest.approx([0.25] * 4)


def test_few_contributors_share_with_those_who_may_have_contributed():
    assert paid(scored([1.0, 1.0, 1.0, 1.0, 1e6, 1e6])) == pytest.approx([1 / 36] * 4 + [4 / 9] * 2, rel=1e-4)
    # nobody can tell a single contributor from a liar: four times the mean of the others
    assert paid(scored([10, 0, 0, 0], 0.1)) == pytest.approx([4 / 7, 1 / 7, 1 / 7, 1 / 7])
    # those who surely did harm do not count
    assert paid(scored([10, -5, -5, -5], 0.1)) == [1, 0, 0, 0]


CLEAR = [3.0, 2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("own", [0.5, 0.0, -1.0])
def test_a_huge_error_of_one_member_flattens_no_payment(own):
    honest = paid(scored([*CLEAR, own], 0.1))
    for stated in (0.4, 1e3, 1e12):
        found = shares(scored([*CLEAR, own], [0.1] * 5 + [stated]))
        assert list(found.values()) == pytest.approx(honest, abs=0.008)
    told = {code_of(note): note for note in found.notes}
    assert told["large-errors"].values["clients"] == ("m5",)


def test_a_huge_error_in_a_sketch_or_in_blocks_counts_no_more():
    rng = np.random.default_rng(0)
    away = rng.normal(0, 0.1, (32, 6))
    large = away.copy()
    large[:, 5] *= 1e6
    raw = [*CLEAR, 0.2]
    few, much = (scored(raw, 0.1, sketch=one, freedom=400) for one in (away, large))
    assert paid(much) == pytest.approx(paid(few), abs=0.01)
    few, much = (in_blocks(raw + one - one.mean(axis=0)) for one in (3 * away, 3 * large))
    assert paid(much) == pytest.approx(paid(few), abs=0.01)


@pytest.mark.parametrize("rule", ["fair", "fenced"])
def test_nobody_stops_all_payment_by_a_huge_error(rule):
    assert shares(scored([*CLEAR, 0.5], [0.1] * 5 + [1e6]), rule)


def test_errors_are_believed_up_to_four_times_the_median_of_the_others():
    for stated, counted in (
        ([1, 2, 3, 10], [1, 2, 3, 8]),
        ([0, 0, 0, 1], [0, 0, 0, 1]),  # who sends no update has no error
        ([0, 0, 1, 9], [0, 0, 1, 4]),
        ([1, 9], [1, 4]),
        ([5], [5]),
    ):
        assert believed(np.array(stated, float)).tolist() == counted


@given(st.lists(errors, min_size=1, max_size=7), st.integers(0, 6), st.floats(1, 1e9))
def test_one_error_moves_what_is_believed_of_another_only_as_a_median_moves(stated, who, times):
    who %= len(stated)
    positive = [s for k, s in enumerate(stated) if s and k != who]
    assume(len(positive) > 1)
    found = believed(np.array([s * times if k == who else s for k, s in enumerate(stated)]))
    assert found[who] <= 4 * max(positive)
    assert all(low <= high for low, high in zip(found, [s * times for s in stated], strict=True))


@st.composite
def cases(draw):
    n = draw(st.integers(2, 7))
    raw = draw(st.lists(numbers, min_size=n, max_size=n))
    if draw(st.booleans()):
        raw[0] *= draw(st.sampled_from([4, 64, 10**6]))
    assume(max(raw) > 0)
    stderr = draw(st.none() | st.lists(errors, min_size=n, max_size=n))
    return raw, stderr


def divided(raw, stderr, **options):
    """Shares whether or not they are above noise: the guard against noise is that of every rule."""
    scores = scored(raw, stderr)
    try:
        return list(shares(scores, **options).values())
    except UndefinedShares:
        assume(not options)
        return fenced(scores, np.maximum(scores.raw, 0.0))[0].tolist()


MORE = st.integers(1, 640).map(lambda k: k / 64)


@settings(max_examples=100)
@given(cases(), st.integers(0, 6), MORE, st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)))
@example(([5.999, 0.074, 0.091, 0.077, 6.917], None), 2, 1.272, None)
@example(([5.999, 0.074, 0.091, 0.077, 6.917], [0.1] * 5), 2, 1.272, None)
def test_nobody_earns_less_by_a_higher_score(case, who, more, limits):
    """Also within a floor and a cap, where these allow shares."""
    (raw, stderr), n = case, len(case[0])
    higher = [x + more * (k == who % n) for k, x in enumerate(raw)]
    options = {"floor": limits[0] / n, "cap": 1 / n + limits[1] * (1 - 1 / n)} if limits else {}
    try:
        before, after = (divided(one, stderr, **options)[who % n] for one in (raw, higher))
    except InputError:
        assume(False)
    assert after >= before - (1e-9 if limits else 1e-12)


@settings(max_examples=50)
@given(cases(), st.integers(0, 6))
def test_there_is_no_cliff(case, who):
    """Look ever more closely where the share moves most, from far below to far above the others."""
    raw, stderr = case
    who %= len(raw)
    assume(max(x for k, x in enumerate(raw) if k != who) > 0)

    def share(own):
        return divided([own if k == who else x for k, x in enumerate(raw)], stderr)[who]

    size = 2 * max(map(abs, raw))
    way = [(share(x), x) for x in np.linspace(-size, size, 41)]
    (low, a), (high, b) = max(pairwise(way), key=lambda step: step[1][0] - step[0][0])
    for _ in range(40):
        middle = share((a + b) / 2)
        if middle - low > high - middle:
            high, b = middle, (a + b) / 2
        else:
            low, a = middle, (a + b) / 2
    assert high - low < 1e-6


@given(cases())
def test_shares_add_up_follow_the_scores_and_keep_the_fence(case):
    raw, stderr = case
    scores = scored(raw, stderr)
    found, how = fenced(scores, np.maximum(scores.raw, 0.0))
    assert math.fsum(found) == pytest.approx(1, abs=1e-12)
    assert all(found[j] <= found[i] + 1e-12 for i, j in pairwise(np.argsort(-scores.raw, kind="stable")))
    assert (found >= 0).all()
    assert found.max() <= how.fence + 1e-12
    assert [how.share(x) for x in raw] == pytest.approx(found.tolist(), abs=1e-12)  # what a member recomputes


@given(cases(), st.floats(0.01, 100))
def test_the_unit_of_the_scores_does_not_matter(case, unit):
    raw, stderr = case
    scores = scored(raw, stderr)
    other = scored([unit * x for x in raw], None if stderr is None else [unit * s for s in stderr])
    first, second = (fenced(one, np.maximum(one.raw, 0.0))[0] for one in (scores, other))
    assert second == pytest.approx(first, abs=1e-7)


def test_an_interval_by_hand():
    # two members, share x / (x + y) = 1/4: its error is |y dx - x dy| / 16 = .1 * sqrt(10) / 16
    s = scored([1, 3], 0.1)
    low, high = share_intervals(s, shares(s))["m0"]
    half = 1.96 * 0.1 * math.sqrt(10) / 16
    assert (low, high) == pytest.approx((0.25 - half, 0.25 + half), abs=0.004)


def test_an_interval_knows_correlation_and_the_number_of_blocks():
    rng = np.random.default_rng(0)
    common = rng.normal(0, 1, (8, 1)) * [1.0, 2.0, 3.0]  # in proportion: no share moves
    found = in_blocks(np.array([1, 2, 3]) + 0.2 * common)
    assert share_intervals(found, shares(found))["m0"] == pytest.approx((1 / 6, 1 / 6), abs=2e-4)
    own = in_blocks(np.array([1, 2, 3]) + rng.normal(0, 0.3, (8, 3)))
    alone = scored(own.raw, np.sqrt(np.diag(own.covariance)))
    wide, narrow = (share_intervals(s, shares(s)) for s in (own, alone))
    assert any(b - a > d - c for (a, b), (c, d) in zip(wide.values(), narrow.values(), strict=True))


def test_an_interval_from_sketches_has_the_freedom_of_the_sketch():
    known = np.random.default_rng(0).normal(0, 0.01, (32, 2))
    few, many = (scored([1.0, 3.0], 0.01, sketch=known, freedom=freedom) for freedom in (40, 10**6))
    (a, b), (c, d) = (share_intervals(s, shares(s))["m0"] for s in (few, many))
    # Student's quantiles of 17 and of 31 degrees of freedom; 40 and many would have 2.021 and 1.960
    assert (b - a) / (d - c) == pytest.approx(2.110 / 2.040, abs=0.03)
    error = math.sqrt(np.mean((known @ [3, -1]) ** 2)) / 16
    assert (d - c) / 2 == pytest.approx(2.037 * error, rel=0.04)


@pytest.mark.parametrize("rule", ["fair", "fenced", "impartial", "equal"])
@pytest.mark.parametrize("limits", [{}, {"floor": 0.05, "cap": 0.5}])
def test_what_is_paid_lies_in_its_interval(monkeypatch, rule, limits):
    monkeypatch.setattr("fedmerit.scoring.rewards.DRAWS", 400)
    s = scored([0.2, 1.0, 1.1, 3.0], 0.2, gain=5.0)
    found = shares(s, rule, **limits)
    spans = share_intervals(s, found)
    amounts, money = amounts_within(spans, payouts(found, "1000.01")), payouts(found, "1000.01")
    for name in s.clients:
        low, high = spans[name]
        assert low <= found[name] + 1e-9
        assert found[name] - 1e-9 <= high
        assert (low, high) == (round(low, 4), round(high, 4))
        assert amounts[name][0] <= money[name] <= amounts[name][1]
    assert (rule == "equal") == all(high - low < 2e-4 for low, high in spans.values())


@pytest.mark.parametrize(
    ("rule", "equal"),
    [("fair", 0), ("fenced", 0), ("impartial", 0), ("fair", 0.5), ("fenced", 0.5), ("fenced", 1)],
)
def test_drawn_scores_are_divided_together_as_each_would_be_alone(rule, equal):
    """Also where scores are equal, zero or only noise, and where the cap leaves what nobody may take."""

    def alone(one, floor, cap):
        try:
            return by_rule(one, rule, equal, one.raw >= 0, floor, cap)[0]
        except InputError:
            return np.full(one.n, np.nan)

    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 9))
        floor, above = (rng.choice([0.0, rng.uniform(), 1.0]) for _ in range(2))
        floor, cap = floor / n, 1 / n + above * (1 - 1 / n)
        drawn = rng.normal(0.5, 1, (20, n))
        drawn[rng.uniform(size=drawn.shape) < 0.2] = 0.0
        drawn[rng.uniform(size=drawn.shape) < 0.1] = 1e-13
        drawn[:, 0] = np.maximum(drawn[:, 0], 0.1)
        if rule == "fenced":  # an equal part of 0, up to rounding, decides there who may take the rest
            some = np.count_nonzero(drawn > 1e-9, axis=1)
            drawn = drawn[some * cap + (n - some) * floor > 1]
        s = scored([1.0] * n, 0.3, gain=1.5)
        expected = [alone(replace(s, values=raw, raw=raw), floor, cap) for raw in drawn]
        found = _divided(s, drawn, Shares({}, rule, equal=equal, floor=floor, cap=cap))
        np.testing.assert_allclose(found, np.reshape(expected, found.shape), atol=1e-12)


@pytest.mark.parametrize("rule", ["fair", "impartial"])
@pytest.mark.parametrize("sketched", [False, True])
def test_intervals_do_not_hang_on_the_order_of_clients(monkeypatch, rule, sketched):
    monkeypatch.setattr("fedmerit.scoring.rewards.DRAWS", 400)
    rng = np.random.default_rng(0)
    raw, stderr, order = np.array([0.5, 1, 1, 2]), np.array([0.1, 0.2, 0.3, 0.1]), [2, 0, 3, 1]
    known = rng.normal(0, 0.1, (8, 4)) if sketched else None
    here = scored(raw, stderr, gain=5.0, sketch=known, freedom=50)
    names = tuple(here.clients[i] for i in order)
    known = None if known is None else known[:, order]
    there = scored(raw[order], stderr[order], gain=5.0, clients=names, sketch=known, freedom=50)
    one, other = (share_intervals(s, shares(s, rule)) for s in (here, there))
    assert one == other
    assert list(other) == list(names)
    s = scored([1.0, 2.0, 1.0, 1.0], [0.3, 0.1, 0.3, 0.2])  # equal clients have one, whatever their names
    found = share_intervals(s, shares(s))
    assert found["m0"] == found["m2"] != found["m3"]
    renamed = replace(s, clients=("z", "y", "x", "w"))
    assert list(share_intervals(renamed, shares(renamed)).values()) == list(found.values())


def test_there_is_no_interval_without_errors():
    s = scored([1, 2, 3])
    assert share_intervals(s, shares(s)) is None
    assert share_intervals(s, shares(s, "equal")) == dict.fromkeys(s.clients, (1 / 3, 1 / 3))


def test_intervals_cover_in_a_small_simulation(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))
    from share_coverage import Cell, coverage

    for cell in (Cell(6, "spread", "standard errors", 0.0), Cell(4, "alike", "8 blocks", 0.3)):
        for held, _, _ in coverage(cell, 60).values():
            assert 0.9 <= held <= 0.99
    for held, _, _ in coverage(Cell(9, "all null but one", "standard errors", 0.0), 60).values():
        assert 0.8 <= held <= 0.93  # less than 95 %, as docs/money.md says


def test_a_tie_that_is_paid_apart_is_named():
    s = scored([1.0, 1.3, 5.0], 0.3, clients=("A", "B", "C"))
    fair = shares(s)
    found = paid_apart(s, fair)
    assert (found.more, found.less) == ("B", "A")
    tied = scored([1.0, 1.3, 1.2], 0.3, clients=("A", "B", "C"))
    assert paid_apart(tied, shares(tied)) is not None
    assert paid_apart(tied, shares(tied, equal=0.8)) is None


def test_who_forfeits_is_not_called_paid_apart():
    s = scored([1.0, 1.1, 1.2], 0.3, clients=("A", "B", "C"))
    lost = shares(s, "equal", forfeits={"B": 1.0})
    assert visible_gaps(s, replace(lost, forfeits={})).any()
    assert not visible_gaps(s, lost).any()
    assert paid_apart(s, lost) is None


def test_the_table_of_what_each_rule_pays_is_what_the_rules_pay(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "experiments"))
    from rules import paid as table

    lines = "\n".join(table())
    money = (root / "docs" / "money.md").read_text(encoding="utf-8")
    counted = (root / "experiments" / "tables" / "rules.md").read_text(encoding="utf-8")
    assert lines in money
    assert lines in counted
    all_members = next(line for line in counted.splitlines() if line.startswith("| all |"))
    now, twice = (float(part) / 100 for part in re.findall(r"\(([\d.]+)%\)", all_members))
    told = " ".join(money.split())
    for share, sentence in (
        (now, r"Four times the mean holds back about 1 in (\d+)"),
        (twice, r"but hold back about 1 in (\d+) honest members"),
    ):
        assert 0.8 < share * int(re.search(sentence, told)[1]) < 1.25
    choosing = (root / "docs" / "choosing.md").read_text(encoding="utf-8")
    distances = counted[counted.index("| rule | goes elsewhere") :].strip()
    assert distances in choosing
    assert distances in (root / "experiments" / "FINDINGS.md").read_text(encoding="utf-8")
