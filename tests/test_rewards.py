"""Shares and payouts: rules by hand, leave-one-out fences against a loop, exact cents, nothing silent."""

import math
import time
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmerit.config import Payment
from fedmerit.errors import InputError, UndefinedShares
from fedmerit.ledger.decisions import Terms
from fedmerit.scoring import rewards
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.rewards import Payouts, Shares, null_share, payouts
from fedmerit.scoring.scores import alpha, fp, ioi, loo
from fedmerit.scoring.share_intervals import share_intervals
from fedmerit.scoring.types import Reports, Scores

numbers = st.integers(-512, 512).map(lambda k: k / 64)
amounts = st.integers(0, 10**12).map(lambda cents: Decimal(cents).scaleb(-2))


def shares(scores, rule="fair", **options):
    return rewards.shares(scores, rule, **options)


def scored(raw, *, score="ALPHA", gain=None, clients=None, **extra):
    names = clients or tuple(f"m{i}" for i in range(len(raw)))
    gain = float(sum(raw)) if gain is None else gain
    return Scores(score=score, clients=names, values=raw, raw=raw, gain=gain, **extra)


@st.composite
def payable(draw, min_size=1, max_size=9):
    raw = draw(st.lists(numbers, min_size=min_size, max_size=max_size))
    assume(max(raw) > 0)
    return scored(raw)


# --- fair ----------------------------------------------------------------------------------------------


def test_fair_by_hand():
    s = shares(scored([-1, 1, 3], clients=("A", "B", "C")))
    assert dict(s) == {"A": 0.0, "B": 0.25, "C": 0.75}
    assert (s.rule, s.status, s.unpaid, len(s), list(s)) == ("fair", "ok", 0.0, 3, ["A", "B", "C"])
    assert s.notes == ("negative ALPHA counts as zero: A",)
    assert s == {"A": 0.0, "B": 0.25, "C": 0.75}


def test_raw_is_paid_not_the_normalised_vector():
    s = Scores(score="LOO", clients=("A", "B"), values=[3, 1], raw=[1, 3], gain=4)
    assert dict(shares(s)) == {"A": 0.25, "B": 0.75}


@given(payable())
def test_fair_is_the_positive_part_over_its_sum(scores):
    total = sum(Fraction(max(x, 0)) for x in scores.raw.tolist())
    found = shares(scores)
    for client, x in zip(scores.clients, scores.raw.tolist(), strict=True):
        assert found[client] == pytest.approx(float(Fraction(max(x, 0)) / total), abs=1e-15)
        assert (found[client] > 0) == (x > 0)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-14)


@given(payable(), st.sampled_from(["fair", "fenced"]), st.floats(0, 1), st.floats(0, 1))
def test_shares_follow_the_order_of_the_scores(scores, rule, low, high):
    n = scores.n
    floor = low / n
    try:
        found = shares(scores, rule, floor=floor, cap=1 / n + high * (1 - 1 / n))
    except (UndefinedShares, InputError):
        assume(False)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(found.values()) >= floor
    if rule == "fair":  # a fence may hold back the largest below the next
        by_score = [found[client] for client in scores.ranking()]
        assert all(a >= b for a, b in pairwise(by_score))


def test_equal_up_to_rounding_is_equal_to_the_cent():
    raw = [0.1 + 0.2, 0.3, 0.4]
    assert raw[0] != raw[1]
    found = shares(scored(raw, clients=("Z", "A", "B")))
    assert found["Z"] == found["A"]
    paid = payouts(found, "10.01")  # 3.003, 3.003, 4.004: the odd cent goes by remainder, then name
    assert paid == {"Z": Decimal("3.00"), "A": Decimal("3.00"), "B": Decimal("4.01")}
    assert payouts(shares(scored([0.1 + 0.2, 0.3], clients=("Z", "A"))), "0.01")["A"] == Decimal("0.01")


# --- what a negative score gets ------------------------------------------------------------------------


def test_negative_can_be_refused():
    s = scored([-1, 1, 3, -2, -1, -1, -1, -1], gain=1)
    with pytest.raises(
        UndefinedShares, match="negative ALPHA of m0, m3, m4, m5, m6 and 1 more, and negative='refuse'"
    ):
        shares(s, negative="refuse")
    assert shares(s).notes == ("negative ALPHA counts as zero: m0, m3, m4, m5, m6 and 1 more",)
    assert shares(scored([-1, 1, 3]), "impartial").notes == (
        "negative ALPHA counts as zero in the shares of the others: m0",  # m0 itself is paid by the others
    )
    assert sum(shares(scored([0, 1, 3]), negative="refuse").values()) == 1.0  # zero is not negative
    assert shares(s, "equal", negative="refuse")["m0"] == 1 / 8  # looks at no score
    # nor is what rounding leaves of zero
    assert shares(scored([0.3 - 0.2 - 0.1, 1, 3], gain=4), negative="refuse")["m0"] == 0.0


def test_a_round_without_gain_is_noted():
    assert shares(scored([1, -3, 1])).notes[-1] == (
        "the utility did not rise (gain -1): there is no gain to attribute"
    )
    assert shares(scored([1, 3])).notes == ()


def test_notes_of_the_scores_travel_along():
    assert shares(scored([1, 3], notes=("client 'x' was away",))).notes == ("client 'x' was away",)
    assert "close to an equal split" in shares(scored([1, 3], score="EE")).notes[0]


# --- undefined -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["fallback", "reversed", "undefined"])
@pytest.mark.parametrize("rule", ["fair", "fenced"])
def test_a_status_other_than_ok_is_refused(status, rule):
    s = scored([1, 2, 3], score="FP", status=status)
    with pytest.raises(UndefinedShares, match=f"FP has status '{status}', not 'ok'; on_undefined="):
        shares(s, rule)
    found = shares(s, rule, on_undefined="equal")
    assert dict(found) == dict.fromkeys(s.clients, 1 / 3)
    assert found.status == "undefined"
    assert found.notes[-1] == f"FP has status '{status}', not 'ok'; on_undefined='equal' decided"
    nothing = shares(s, rule, on_undefined="zero")
    assert (list(nothing.values()), nothing.unpaid, nothing.status) == ([0, 0, 0], 1.0, "undefined")
    assert shares(s, rule, on_undefined="zero", floor=0.25).unpaid == 0.25
    assert dict(shares(s, "equal")) == dict.fromkeys(s.clients, 1 / 3)  # looks at no score


@pytest.mark.parametrize("raw", [[0, 0, 0], [-1, -2, -3], [1e-13, 2e-13, 0]])
def test_nothing_positive_is_refused(raw):
    with pytest.raises(
        UndefinedShares, match=r"the positive part of ALPHA is .*, which rounding alone can leave"
    ):
        shares(scored(raw))
    assert shares(scored(raw), on_undefined="equal").status == "undefined"


def test_noise_is_refused():
    # positive part 1 + 3 = 4; two standard errors: 2 * (1 + 1) = 4. The negative one does not count.
    s = scored([1, 3, -5], stderr=[1, 1, 9])
    with pytest.raises(
        UndefinedShares, match=r"positive part of ALPHA is 4, no more than two standard errors \(4\)"
    ):
        shares(s)
    assert shares(scored([1, 3.01, -5], stderr=[1, 1, 9])).status == "ok"


def test_bad_reason_does_not_hide_behind_on_undefined():
    with pytest.raises(InputError, match="on_undefined must be one of refuse, equal, zero, got 'guess'"):
        shares(scored([1, 2]), on_undefined="guess")


# --- the default and the fence -------------------------------------------------------------------------


def test_the_default_rule_is_the_same_in_python_and_on_the_command_line():
    one = scored([1, 1, 1, 40])
    assert rewards.shares(one) == rewards.shares(one, "fenced") != rewards.shares(one, "fair")
    assert Terms("1", "accuracy").divide(one) == rewards.shares(one)
    assert Payment().rule == rewards.USUAL_RULE == "fenced"


def test_a_higher_score_never_gets_less_beside_two_large_ones():
    low, high = (shares(scored([5.999, 0.074, own, 0.077, 6.917]), "fenced")["m2"] for own in (0.091, 1.363))
    assert high > low


def test_single_client():
    assert dict(shares(scored([2.0]), "fenced")) == {"m0": 1.0}
    assert dict(shares(scored([2.0]))) == {"m0": 1.0}


# --- impartial -----------------------------------------------------------------------------------------


def test_impartial_by_hand():
    # gain 4, x = (0, 1/4, 3/4): (1 - mean of the others) / 3 = (1 - 1/2)/3, (1 - 3/8)/3, (1 - 1/8)/3.
    s = shares(scored([-1, 1, 3], gain=4), "impartial")
    assert list(s.values()) == pytest.approx([1 / 6, 5 / 24, 7 / 24])
    assert s.unpaid == pytest.approx(1 / 3)  # the mean of x
    assert shares(scored([9, 1, 3], gain=4), "impartial")["m1"] == pytest.approx(
        (1 - 7 / 8) / 3
    )  # clipped at 1


@given(
    st.lists(numbers, min_size=2, max_size=8),
    numbers,
    st.integers(1, 1000).map(lambda k: k / 64),
    st.floats(0, 1),
    st.floats(0, 1),
    amounts,
)
def test_impartial_own_report_never_touches_own_share_or_payout(raw, lie, gain, low, high, budget):
    n = len(raw)
    options = {"floor": low / n, "cap": 1 / n + high * (1 - 1 / n)}
    honest = shares(scored(raw, gain=gain), "impartial", **options)
    lying = shares(scored([lie, *raw[1:]], gain=gain), "impartial", **options)
    assert lying["m0"] == honest["m0"]
    assert payouts(lying, budget)["m0"] == payouts(honest, budget)["m0"]
    for found in (honest, lying):
        assert math.fsum(found.values()) + found.unpaid == pytest.approx(1.0, abs=1e-8)
        assert found.unpaid >= 0


def back_and_forth(first, second):
    """Three rounds that end exactly where they began."""
    ends = [(0.1, first), (first, second), (second, 0.1)]
    return accumulate(
        Reports(
            empty=empty, grand=grand, alone=[empty + 0.05, empty - 0.05],
            without=[grand - 0.05, grand + 0.05], round=k,
        )
        for k, (empty, grand) in enumerate(ends, start=1)
    )  # fmt: skip


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.9), (0.7, 0.4)])
def test_a_gain_that_rounding_left_is_no_gain(first, second):
    """One is 2.8e-17 and the other 0: whether half the budget is paid must not hang on that."""
    scores = back_and_forth(first, second)
    assert 0 <= scores.gain < 1e-16
    with pytest.raises(UndefinedShares, match=r"the gain is .*, and 'impartial' divides by it"):
        shares(scores, "impartial")
    assert any("the utility did not rise" in note for note in shares(scores).notes)
    assert dict(shares(scored([1e-11, 0], gain=1e-11), "impartial")) == {"m0": 0.5, "m1": 0.0}


def test_impartial_needs_a_gain():
    for gain in (0.0, -0.5):
        with pytest.raises(UndefinedShares, match=f"the gain is {gain:g}, and 'impartial' divides by it"):
            shares(scored([1, 2], gain=gain), "impartial")


@pytest.mark.parametrize("score", ["EE", "SURPLUS", "COS", "SV", "SOLO", "MERIT", "FP"])
def test_impartial_needs_own_reports(score):
    with pytest.raises(
        InputError, match=rf"entry i is client i's own report.*\(ALPHA, IOI, LOO\); {score} is not"
    ):
        shares(scored([1, 2], score=score), "impartial")


def fractions_of(own, number=1):
    """Three reports of one round; that of the first is ``own``."""
    said = np.array([own, 0.1, -0.05])
    return Reports(empty=0.2, grand=0.6, alone=0.2 + said, without=0.6 - said, round=number)


def test_nobodys_report_decides_whether_impartial_pays():
    """FP turns where the reports add up to less than nothing, which any client can see to; alpha cannot."""
    assert [fp(fractions_of(own)).status for own in (0.2, -0.3)] == ["ok", "reversed"]
    for score in (alpha, loo, ioi):
        paid = [
            shares(score(fractions_of(own)), "impartial", on_undefined="equal")["client-0"]
            for own in (0.2, -0.3, 0.7)
        ]
        assert len(set(paid)) == 1
    with pytest.raises(InputError, match="'impartial' needs negative='zero', got 'refuse': any client could"):
        shares(scored([1, 2]), "impartial", negative="refuse")


def test_impartial_needs_two():
    with pytest.raises(InputError, match="rule 'impartial' needs at least 2 clients, got 1"):
        shares(scored([1]), "impartial")


# --- floor and cap -------------------------------------------------------------------------------------


def test_floor_and_cap_by_hand():
    s = scored([1, 1, 8])  # .1, .1, .8
    # cap .5: the rest, .5, in proportion 1:1
    assert list(shares(s, cap=0.5).values()) == pytest.approx([0.25, 0.25, 0.5])
    # floor .2: the rest, .6, to the only one above it
    assert list(shares(s, floor=0.2).values()) == pytest.approx([0.2, 0.2, 0.6])
    # both: cap .5 leaves .5 for 1:1, above the floor
    assert list(shares(s, floor=0.2, cap=0.5).values()) == pytest.approx([0.25, 0.25, 0.5])
    # 0, 3, 7 with floor .1 and cap .6: 0 stays at .1, 7 would get .63 of .9, so .6, and 3 the remaining .3
    assert list(shares(scored([0, 3, 7]), floor=0.1, cap=0.6).values()) == pytest.approx([0.1, 0.3, 0.6])
    assert list(shares(s, floor=1 / 3).values()) == pytest.approx([1 / 3] * 3)
    assert list(shares(s, cap=1 / 3).values()) == pytest.approx([1 / 3] * 3)
    assert list(shares(s, "equal", floor=0.1, cap=0.9).values()) == pytest.approx([1 / 3] * 3)


@given(payable(min_size=2), st.floats(0, 1), st.floats(0, 1))
def test_floor_and_cap_are_a_clipped_multiple(scores, low, high):
    n = scores.n
    floor, cap = low / n, 1 / n + high * (1 - 1 / n)
    weights = np.maximum(scores.raw, 0)
    reach = np.where(weights > 0, cap, floor).sum()
    if reach < 1 - 1e-9:
        with pytest.raises(InputError, match=r"leaves a part that nobody may take: only \d of \d clients"):
            shares(scores, floor=floor, cap=cap)
        return
    assume(reach > 1 + 1e-9)
    found = np.array(list(shares(scores, floor=floor, cap=cap).values()))
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found >= floor).all()
    assert (found <= cap).all()
    # solved again by bisection on the multiple
    lower, upper = 0.0, 1e9
    for _ in range(200):
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if np.clip(middle * weights, floor, cap).sum() < 1 else (lower, middle)
    assert found == pytest.approx(np.clip(upper * weights, floor, cap), abs=1e-9)


def test_forty_nine_at_the_cap():
    # 49 * (1/49) is a little less than 1 in floating point
    assert sum(shares(scored([1.0] * 49), cap=1 / 49).values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floor": 0.4}, r"floor must lie between 0 and 1/N = 0.333333 for 3 clients, got 0.4"),
        ({"floor": -0.1}, r"floor must lie between 0 and 1/N"),
        ({"floor": math.nan}, r"floor must lie between 0 and 1/N .* got nan"),
        ({"cap": 0.3}, r"cap must lie between 1/N = 0.333333 and 1 for 3 clients, got 0.3"),
        ({"cap": 1.1}, r"cap must lie between 1/N = 0.333333 and 1"),
        ({"cap": math.nan}, r"cap must lie between .* got nan"),
        ({"floor": "a"}, "floor must be a number, got 'a'"),
        ({"floor": None}, "floor must be a number, got None"),
        ({"cap": "1"}, "cap must be a number, got '1'"),
        ({"cap": True}, "cap must be a number, got True"),
        ({"rule": "merit"}, "rule must be one of fair, fenced, impartial, equal, got 'merit'"),
        ({"equal": 1.5}, "equal must lie between 0 and 1, got 1.5"),
        ({"rule": "impartial", "equal": 0.5}, "equal must be 0 under the rule 'impartial', got 0.5"),
        ({"forfeits": {"X": 1.0}}, "forfeits: expected clients that have a score, got 'X'"),
        ({"negative": "shift"}, "negative must be one of zero, refuse, got 'shift'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        shares(scored([1, 2, 3]), **options)


@pytest.mark.parametrize("kind", [np.float32, np.float16, Fraction, Decimal])
def test_floor_and_cap_of_any_precision_leave_no_cent_behind(kind):
    scores = scored([0, 1, 2])
    for floor, cap in (("0.1", "1"), ("0.1", "0.6"), ("0", "0.5")):
        low, high = kind(floor), kind(cap)
        found = shares(scores, floor=low, cap=high)
        assert dict(found) == dict(shares(scores, floor=float(low), cap=float(high)))
        assert math.fsum(found.values()) == pytest.approx(1, abs=1e-15)
        assert payouts(found, "1000000.00").unpaid == 0


def test_infeasible_cap():
    with pytest.raises(
        InputError, match=r"cap=0\.5 leaves a part that nobody may take: only 1 of 3 clients have a pos"
    ):
        shares(scored([0, 0, 3]), cap=0.5)


def test_only_scores():
    with pytest.raises(InputError, match="shares takes Scores, got list"):
        shares([1, 2, 3])


# --- payouts -------------------------------------------------------------------------------------------


def test_payouts_by_hand():
    paid = payouts(shares(scored([1, 1, 1], clients=("C", "A", "B"))), "100.00")
    assert dict(paid) == {"C": Decimal("33.33"), "A": Decimal("33.34"), "B": Decimal("33.33")}
    assert (paid.budget, paid.unpaid) == (Decimal("100.00"), Decimal("0.00"))
    assert str(paid["C"]) == "33.33"
    assert isinstance(paid, Payouts)
    # 0.2 of a cent, 0.8, 1: largest remainder
    assert dict(payouts({"A": 0.1, "B": 0.4, "C": 0.5}, "0.02")) == {
        "A": Decimal("0.00"),
        "B": Decimal("0.01"),
        "C": Decimal("0.01"),
    }


def test_cents_go_by_name_where_remainders_are_equal_whatever_the_order():
    # of 2.04 exactly 25.5, 76.5, 42.5, 34 and 25.5 cents: two cents are left, for the first two names
    raw = {"m0": 0.3, "m1": 0.9, "m2": 0.5, "m3": 0.4, "m4": 0.3}
    expected = dict(zip(raw, map(Decimal, ("0.26", "0.77", "0.42", "0.34", "0.25")), strict=True))
    for order in permutations(raw):
        found = shares(scored([raw[name] for name in order], clients=order))
        assert dict(payouts(found, "2.04")) == expected


@given(
    st.lists(st.integers(1, 99), min_size=2, max_size=9),
    st.integers(1, 10**8),
    st.randoms(use_true_random=False),
    st.sampled_from([(0.0, 1.0), (0.05, 1.0), (0.02, 0.6)]),
    st.sampled_from(["fair", "fenced"]),
)
def test_cents_do_not_depend_on_the_order_of_clients(parts, cents, random, limits, rule):
    """Scores in hundredths, which have no exact binary form."""
    raw = {f"m{i}": part / 100 for i, part in enumerate(parts)}
    budget, (floor, cap) = Decimal(cents).scaleb(-2), limits
    paid = []
    for _ in range(3):
        order = random.sample(sorted(raw), len(raw))
        found = shares(
            scored([raw[name] for name in order], clients=tuple(order)), rule, floor=floor, cap=cap
        )
        paid.append(dict(payouts(found, budget)))
    assert paid[0] == paid[1] == paid[2]


@given(st.lists(st.integers(1, 99), min_size=2, max_size=9), st.integers(1, 10**8))
def test_fair_cents_are_those_of_exact_arithmetic(parts, cents):
    """Largest remainders by whole numbers alone, equal ones by name."""
    left = {f"m{i}": divmod(cents * part, sum(parts)) for i, part in enumerate(parts)}
    more = sorted(left, key=lambda name: (-left[name][1], name))[: cents - sum(x for x, _ in left.values())]
    found = payouts(shares(scored([part / 100 for part in parts])), Decimal(cents).scaleb(-2))
    assert {name: int(100 * x) for name, x in found.items()} == {n: left[n][0] + (n in more) for n in left}


def test_remainders_further_apart_than_rounding_go_by_size():
    """Half a cent each, up to a hundred-thousandth: what is larger by that gets the cent."""
    a, b = Fraction(1, 2) - Fraction(1, 10**5), Fraction(1, 2) + Fraction(1, 10**5)
    assert dict(payouts({"A": a, "B": b}, "0.01")) == {"A": 0, "B": Decimal("0.01")}
    a, b = Fraction(1, 2) - Fraction(1, 10**8), Fraction(1, 2) + Fraction(1, 10**8)
    assert dict(payouts({"A": a, "B": b}, "0.01")) == {"A": Decimal("0.01"), "B": 0}


@given(payable(max_size=30), amounts)
def test_payouts_sum_exactly(scores, budget):
    found = shares(scores)
    paid = payouts(found, budget)
    assert sum(paid.values()) == budget
    assert paid.unpaid == 0
    for client, share in found.items():
        assert paid[client] >= 0
        assert abs(paid[client] - budget * Decimal(share)) < Decimal("0.0101")
        if share == 0:
            assert paid[client] == 0
    for a in found:
        for b in found:
            if found[a] > found[b]:
                assert paid[a] >= paid[b]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.integers(0, 10**24 - 1))
def test_payouts_are_exact_for_fractions_and_any_budget(parts, budget):
    assume(sum(parts) > 0)
    found = {f"m{i}": Fraction(part, sum(parts)) for i, part in enumerate(parts)}
    paid = payouts(found, budget)
    assert sum(paid.values()) == budget
    for client, share in found.items():
        assert abs(Fraction(paid[client]) - share * budget) < Fraction(1, 100)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), amounts)
def test_less_than_everything_leaves_the_rest(parts, budget):
    total = math.fsum(parts) or 1.0
    found = {f"m{i}": part / total / 2 for i, part in enumerate(parts)}
    paid = payouts(found, budget)
    assert sum(paid.values()) + paid.unpaid == budget
    assert paid.unpaid >= budget / 2 - Decimal("0.01")
    for client, share in found.items():
        exact = Fraction(share) * Fraction(budget)
        assert exact - Fraction(1, 100) < Fraction(paid[client]) <= exact + Fraction(1, 10**6)


def test_rounding_errors_cost_nobody_a_cent():
    found = Shares({"A": 0.25 - 2**-54, "B": 0.25}, rule="impartial", unpaid=0.5)
    assert found["A"] < 0.25
    assert dict(payouts(found, 100)) == {"A": 25, "B": 25}
    assert payouts(found, 100).unpaid == 50


def test_rounding_errors_never_overspend():
    found = Shares({"A": 0.5, "B": 0.5 + 2**-52}, rule="impartial")
    paid = payouts(found, 10**23)
    assert sum(paid.values()) + paid.unpaid == 10**23
    assert paid.unpaid >= 0


def test_impartial_rounds_down():
    found = shares(scored([0, 0, 0], gain=1), "impartial")
    assert list(found.values()) == pytest.approx([1 / 3] * 3)
    assert found.unpaid == 0
    paid = payouts(found, "100")
    assert list(paid.values()) == [Decimal("33.33")] * 3
    assert paid.unpaid == Decimal("0.01")


def test_undefined_scores_can_pay_nothing():
    paid = payouts(shares(scored([0, 0]), on_undefined="zero"), "10.00")
    assert dict(paid) == {"m0": 0, "m1": 0}
    assert paid.unpaid == Decimal("10.00")


def test_ten_thousand_clients():
    raw = np.random.default_rng(0).normal(1, 1, 10_000)
    s = scored(raw, stderr=np.full(10_000, 0.01))
    for rule in ("fair", "fenced", "impartial", "equal"):
        start = time.process_time()
        found = shares(s, rule)
        assert time.process_time() - start < 0.3
        paid = payouts(found, "1234567.89")
        assert sum(paid.values()) + paid.unpaid == Decimal("1234567.89")
        assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("budget", "cents"),
    [
        ("10000.00", 1000000),
        (7, 700),
        (Decimal("0.5"), 50),
        ("0", 0),
        ("1.5", 150),
        (Decimal("1e3"), 100000),
        (Decimal("1.000"), 100),
    ],
)
def test_budgets(budget, cents):
    paid = payouts({"A": 1.0}, budget)
    assert paid["A"] * 100 == cents
    assert paid.budget.as_tuple().exponent == -2


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            100.0,
            "budget must be text, int or Decimal, like '10000.00', got 100.0; a float has no exact cents",
        ),
        (True, "budget must be text, int or Decimal, like '10000.00', got True$"),
        (None, "budget must be text, int or Decimal, like '10000.00', got None"),
        ("10,000", "budget: '10,000' can be read as 10000 and as 10.000: write it without a mark"),
        ("", "budget: expected an amount like 10000.00, 10,000.00 or 10 000,00 EUR, got ''"),
        ("-1", "budget: expected an amount like 10000.00, 10,000.00 or 10 000,00 EUR, got '-1'"),
        ("NaN", "budget: expected an amount like 10000.00, 10,000.00 or 10 000,00 EUR, got 'NaN'"),
        ("Infinity", "budget: expected an amount"),
        ("1e3", "budget: expected an amount"),
        ("1_000", "budget: expected an amount"),
        ("2 000 000 00", "budget: expected an amount"),
        ("2 EURO", "budget: expected an amount"),
        ("2 XYZ", "budget: expected a currency such as EUR in '2 XYZ', got 'XYZ'"),
        ("+2", "budget: expected an amount"),
        ("2.", "budget: expected an amount"),
        (".5", "budget: expected an amount"),
        ("\u0661\u0662", "budget: expected an amount"),
        ("1.000", "budget: '1.000' can be read as 1000 and as 1.000"),
        ("0.500", "budget must have at most 2 decimals, got '0.500'"),
        (-1, "budget must be finite, at least 0 and below 1e24, got -1"),
        (Decimal("NaN"), "budget must be finite"),
        (Decimal("sNaN"), "budget must be finite"),
        ("1" + "0" * 24, "budget must be finite, at least 0 and below 1e24"),
        (Decimal("1e999999"), "budget must be finite, at least 0 and below 1e24"),
        ("1234.005", "budget must have at most 2 decimals, got '1234.005'"),
        (Decimal("1e-7"), "budget must have at most 2 decimals, got"),
    ],
)
def test_bad_budgets(budget, message):
    with pytest.raises(InputError, match=message):
        payouts({"A": 1.0}, budget)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({}, "payouts takes a mapping of name to share, got {}"),
        ([0.5, 0.5], r"payouts takes a mapping of name to share, got \[0.5, 0.5\]"),
        ({"A": 0.7, "B": 0.7}, "shares must sum to at most 1, got 1.4"),
        ({"A": 1.5, "B": -0.5}, "share of 'B' must not be negative, got -0.5"),
        ({"A": math.nan}, "share of 'A' must be a finite number, got nan"),
        ({"A": math.inf}, "share of 'A' must be a finite number, got inf"),
        ({"A": "1"}, "share of 'A' must be a finite number, got '1'"),
        ({1: 0.5, "B": 0.5}, "names of clients must be text, got 1"),
        ({"A": None}, "share of 'A' must be a finite number, got None"),
        ({"A": True}, "share of 'A' must be a finite number, got True"),
        ({"A": np.bool_(True)}, "share of 'A' must be a finite number, got np.True_"),
        ({"A": 1 + 0j}, r"share of 'A' must be a finite number, got \(1\+0j\)"),
    ],
)
def test_bad_shares(given_, message):
    with pytest.raises(InputError, match=message):
        payouts(given_, "1.00")


def test_numbers_of_numpy_are_shares_and_budgets():
    assert payouts({"A": np.int64(1), "B": np.uint8(0)}, np.int64(10)) == {"A": 10, "B": 0}
    assert payouts({"A": np.float32(0.25), "B": np.float64(0.75)}, 10) == {
        "A": Decimal("2.5"),
        "B": Decimal("7.5"),
    }


def test_results_cannot_be_changed():
    found = shares(scored([1, 3]))
    paid = payouts(found, 10)
    for result in (found, paid):
        with pytest.raises(TypeError):
            result["m0"] = 1
        with pytest.raises(AttributeError):
            result.unpaid = 1


@pytest.mark.parametrize("huge", [1e15, 1e16, 1e17, 1e30, 1e100])
def test_one_huge_score_takes_nearly_all_and_leaves_no_money_undivided(huge):
    found = shares(scored([0.1, 0.2, 0.3, huge]))
    assert sum(found.by_client.values()) == pytest.approx(1)
    assert found["m3"] == pytest.approx(1)
    assert found["m0"] <= found["m1"] <= found["m2"]
    assert sum(payouts(found, "100.00").values()) == 100


@pytest.mark.parametrize("huge", [1e13, 1e100])
def test_one_huge_score_hides_nobodys_negative_one(huge):
    scores = scored([huge, -5, 3], clients=("A", "B", "C"))
    with pytest.raises(UndefinedShares, match="negative ALPHA of B, and negative='refuse' is set"):
        shares(scores, negative="refuse")
    for rule in ("fair", "fenced"):
        assert "negative ALPHA counts as zero: B" in shares(scores, rule).notes
    assert not shares(scored([huge, -1e-12, 3]), negative="refuse").notes  # rounding is not negative


def test_what_only_rounding_separates_from_zero_counts_as_zero():
    """A cap used to pay it what the others may not take."""
    assert list(shares(scored([1, 1e-310])).values()) == [1, 0]
    assert list(shares(scored([1, 1e-310, 0]), floor=0.25).values()) == [0.5, 0.25, 0.25]
    with pytest.raises(InputError, match=r"cap=0\.4 leaves a part that nobody may take: only 2 of 3 clients"):
        shares(scored([1, 0.8, 1e-17]), cap=0.4)


@pytest.mark.parametrize("rule", ["fair", "fenced"])
@pytest.mark.parametrize("stderr", [None, [1e-13] * 3])
def test_what_only_rounding_puts_above_zero_is_nothing_to_divide(rule, stderr):
    """1e-10 is more than nothing, but not beside a score of -1, of which it may be the rounding error."""
    s = scored([0.0, 1e-10, -1.0], stderr=stderr)
    with pytest.raises(UndefinedShares, match="positive"):
        shares(s, rule)
    assert list(shares(s, rule, on_undefined="equal").values()) == [1 / 3] * 3


@pytest.mark.parametrize("cap", [0.4, 0.5, 0.9])
def test_shares_never_add_up_to_more_than_one(cap):
    """These added up to 2."""
    with pytest.raises(InputError, match=r"leaves a part that nobody may take: only 1 of 5 clients"):
        shares(scored([1, 1e-49, 3e-318, 3e-318, 3e-318]), cap=cap)
    wide = st.floats(-1e150, 1e150)

    @settings(max_examples=50)
    @given(st.lists(wide, min_size=3, max_size=6))
    def together(raw):
        try:
            found = shares(scored(raw, gain=1.0), cap=cap)
        except (UndefinedShares, InputError):
            return
        assert math.fsum(found.values()) == pytest.approx(1, abs=1e-9)

    together()


# --- what noise pays a null client ---------------------------------------------------------------------


def test_null_share_is_what_noise_pays():
    truth, s = np.array([0.0, 2.0, 3.0]), 0.2
    raws = truth + np.random.default_rng(1).normal(0, s, size=(20_000, 3))
    paid = np.maximum(raws[:, 0], 0) / np.maximum(raws, 0).sum(axis=1)
    assert null_share(scored([0, 2, 3], stderr=[s] * 3)) == pytest.approx(paid.mean(), rel=0.05)
    assert null_share(scored([0, 2, 3])) is None
    assert null_share(scored([0, -2], stderr=[1, 1])) is None


def test_intervals_of_shares_take_scores_first():
    total = accumulate([Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])])
    with pytest.raises(InputError, match=r"^share_intervals takes Scores and the Shares of them, got Shares"):
        share_intervals(shares(total), total)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"divided": shares(scored([1, 2]))}, "expected the shares of these scores, got some without client"),
    ],
)
def test_intervals_of_shares_refuse_other_shares_and_impossible_limits(change, message):
    total = scored([1, 2, 3], stderr=[0.1] * 3)
    with pytest.raises(InputError, match=message):
        share_intervals(**{"scores": total, "divided": shares(total), **change})
