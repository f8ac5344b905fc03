"""Shares and payouts: rules by hand, leave-one-out fences against a loop, exact cents, nothing silent."""

import math
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmerit.errors import InputError, UndefinedShares
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import code_of
from fedmerit.scoring import rewards
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.amounts import payouts
from fedmerit.scoring.rewards import Shares, null_share
from fedmerit.scoring.scores import alpha, fp, ioi, loo
from fedmerit.scoring.types import Reports, Scores
from fedmerit.settings import Payment

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


def test_fair_by_hand():
    s = shares(scored([-1, 1, 3], clients=("A", "B", "C")))
    assert s == {"A": 0.0, "B": 0.25, "C": 0.75}
    assert (s.rule, s.unpaid, len(s), list(s)) == ("fair", 0.0, 3, ["A", "B", "C"])
    assert s.notes == ("negative ALPHA counts as zero: A",)
    normalised = Scores(score="LOO", clients=("A", "B"), values=[3, 1], raw=[1, 3], gain=4)
    assert shares(normalised) == {"A": 0.25, "B": 0.75}  # by raw
    with pytest.raises(AttributeError):
        s.unpaid = 1


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


def test_notes_of_the_scores_travel_along():
    assert [code_of(note) for note in shares(scored([1, -3, 1])).notes] == ["negative", "no-gain"]
    assert shares(scored([1, 3])).notes == ()
    assert shares(scored([1, 3], notes=("client 'x' was away",))).notes == ("client 'x' was away",)
    assert "close to an equal split" in shares(scored([1, 3], score="EE")).notes[0]


def reason_of(scores, rule="fair"):
    with pytest.raises(UndefinedShares) as caught:
        shares(scores, rule)
    return caught.value.note.values["reason"].code


@pytest.mark.parametrize(
    ("scores", "rule", "code"),
    [
        *((scored(raw), "fair", "nothing-positive") for raw in ([0, 0, 0], [-1, -2, -3], [1e-13, 2e-13, 0])),
        # 1e-10 is more than nothing, but not beside -1, of which it may be the rounding error
        *((scored([0.0, 1e-10, -1.0]), rule, "nothing-positive") for rule in ("fair", "fenced")),
        (scored([0.0, 1e-10, -1.0], stderr=[1e-13] * 3), "fenced", "nothing-positive"),
        # positive part 1 + 3 = 4; two standard errors: 2 * (1 + 1) = 4. The negative one does not count.
        (scored([1, 3, -5], stderr=[1, 1, 9]), "fair", "within-errors"),
        *((scored([1, 2], gain=gain), "impartial", "no-gain-to-divide") for gain in (0.0, -0.5)),
    ],
)
def test_what_gives_nothing_to_divide_is_refused(scores, rule, code):
    assert reason_of(scores, rule) == code
    assert shares(scored([1, 3.01, -5], stderr=[1, 1, 9]))  # just above the noise


@pytest.mark.parametrize("status", ["fallback", "reversed", "undefined"])
@pytest.mark.parametrize("rule", ["fair", "fenced"])
def test_a_status_other_than_ok_is_refused(status, rule):
    s = scored([1, 2, 3], score="FP", status=status)
    assert reason_of(s, rule) == "status"
    assert dict(shares(s, "equal")) == dict.fromkeys(s.clients, 1 / 3)  # looks at no score


def test_the_default_rule_is_the_same_in_python_and_on_the_command_line():
    one = scored([1, 1, 1, 40])
    assert rewards.shares(one) == rewards.shares(one, "fenced") != rewards.shares(one, "fair")
    assert Terms("1", "accuracy").divide(one) == rewards.shares(one)
    assert Payment().rule == rewards.USUAL_RULE == "fenced"


def test_impartial_by_hand():
    # gain 4, x = (0, 1/4, 3/4): (1 - mean of the others) / 3 = (1 - 1/2)/3, (1 - 3/8)/3, (1 - 1/8)/3.
    s = shares(scored([-1, 1, 3], gain=4), "impartial")
    assert list(s.values()) == pytest.approx([1 / 6, 5 / 24, 7 / 24])
    assert s.unpaid == pytest.approx(1 / 3)  # the mean of x
    clipped = shares(scored([9, 1, 3], gain=4), "impartial")
    assert clipped["m1"] == pytest.approx((1 - 7 / 8) / 3)  # x of m0 is 1, not 9/4


@given(
    st.lists(numbers, min_size=2, max_size=8), numbers, st.integers(1, 1000).map(lambda k: k / 64),
    st.floats(0, 1), st.floats(0, 1), amounts,
)  # fmt: skip
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
    assert reason_of(scores, "impartial") == "no-gain-to-divide"
    assert any("the utility did not rise" in note for note in shares(scores).notes)
    assert dict(shares(scored([1e-11, 0], gain=1e-11), "impartial")) == {"m0": 0.5, "m1": 0.0}


def fractions_of(own, number=1):
    """Three reports of one round; that of the first is ``own``."""
    said = np.array([own, 0.1, -0.05])
    return Reports(empty=0.2, grand=0.6, alone=0.2 + said, without=0.6 - said, round=number)


def test_nobodys_report_decides_whether_impartial_pays():
    """FP turns where the reports add up to less than nothing, which any client can see to; alpha cannot."""
    assert [fp(fractions_of(own)).status for own in (0.2, -0.3)] == ["ok", "reversed"]
    for score in (alpha, loo, ioi):
        paid = [shares(score(fractions_of(own)), "impartial")["client-0"] for own in (0.2, -0.3, 0.7)]
        assert len(set(paid)) == 1


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
    # 49 * (1/49) is a little less than 1 in floating point
    assert sum(shares(scored([1.0] * 49), cap=1 / 49).values()) == pytest.approx(1)


@given(payable(min_size=2), st.floats(0, 1), st.floats(0, 1))
def test_floor_and_cap_are_a_clipped_multiple(scores, low, high):
    n = scores.n
    floor, cap = low / n, 1 / n + high * (1 - 1 / n)
    weights = np.maximum(scores.raw, 0)
    reach = np.where(weights > 0, cap, floor).sum()
    if reach < 1 - 1e-9:
        with pytest.raises(InputError):
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


@pytest.mark.parametrize("kind", [np.float32, np.float16, Fraction, Decimal])
def test_floor_and_cap_of_any_precision_leave_no_cent_behind(kind):
    scores = scored([0, 1, 2])
    for floor, cap in (("0.1", "1"), ("0.1", "0.6"), ("0", "0.5")):
        low, high = kind(floor), kind(cap)
        found = shares(scores, floor=low, cap=high)
        assert dict(found) == dict(shares(scores, floor=float(low), cap=float(high)))
        assert math.fsum(found.values()) == pytest.approx(1, abs=1e-15)
        assert payouts(found, "1000000.00").unpaid == 0


@given(
    st.lists(st.integers(1, 99), min_size=2, max_size=9), st.integers(1, 10**8),
    st.randoms(use_true_random=False), st.sampled_from([(0.0, 1.0), (0.05, 1.0), (0.02, 0.6)]),
    st.sampled_from(["fair", "fenced"]),
)  # fmt: skip
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


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9).filter(any), st.integers(0, 10**8))
def test_fair_cents_are_those_of_exact_arithmetic(parts, cents):
    """Largest remainders by whole numbers alone, equal ones by name."""
    left = {f"m{i}": divmod(cents * part, sum(parts)) for i, part in enumerate(parts)}
    more = sorted(left, key=lambda name: (-left[name][1], name))[: cents - sum(x for x, _ in left.values())]
    found = payouts(shares(scored([part / 100 for part in parts])), Decimal(cents).scaleb(-2))
    assert {name: int(100 * x) for name, x in found.items()} == {n: left[n][0] + (n in more) for n in left}
    assert (sum(found.values()), found.unpaid) == (found.budget, 0)


def test_remainders_further_apart_than_rounding_go_by_size():
    """Half a cent each, up to a hundred-thousandth: what is larger by that gets the cent."""
    a, b = Fraction(1, 2) - Fraction(1, 10**5), Fraction(1, 2) + Fraction(1, 10**5)
    assert dict(payouts({"A": a, "B": b}, "0.01")) == {"A": 0, "B": Decimal("0.01")}
    a, b = Fraction(1, 2) - Fraction(1, 10**8), Fraction(1, 2) + Fraction(1, 10**8)
    assert dict(payouts({"A": a, "B": b}, "0.01")) == {"A": Decimal("0.01"), "B": 0}


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


def test_rounding_errors_cost_nobody_a_cent_and_never_overspend():
    found = Shares({"A": 0.25 - 2**-54, "B": 0.25}, rule="impartial", unpaid=0.5)
    assert found["A"] < 0.25
    assert dict(payouts(found, 100)) == {"A": 25, "B": 25}
    assert payouts(found, 100).unpaid == 50
    found = Shares({"A": 0.5, "B": 0.5 + 2**-52}, rule="impartial")
    paid = payouts(found, 10**23)
    assert sum(paid.values()) + paid.unpaid == 10**23
    assert paid.unpaid >= 0
    found = shares(scored([0, 0, 0], gain=1), "impartial")
    assert list(found.values()) == pytest.approx([1 / 3] * 3)
    assert found.unpaid == 0
    paid = payouts(found, "100")
    assert (list(paid.values()), paid.unpaid) == ([Decimal("33.33")] * 3, Decimal("0.01"))


def test_budgets_and_shares_are_numbers_of_any_kind():
    for budget, cents in (
        ("10000.00", 1000000), (7, 700), (Decimal("0.5"), 50), ("0", 0), ("1.5", 150),
        (Decimal("1e3"), 100000), (Decimal("1.000"), 100),
    ):  # fmt: skip
        paid = payouts({"A": 1.0}, budget)
        assert paid["A"] * 100 == cents
        assert paid.budget.as_tuple().exponent == -2
    assert payouts({"A": np.int64(1), "B": np.uint8(0)}, np.int64(10)) == {"A": 10, "B": 0}
    quarters = payouts({"A": np.float32(0.25), "B": np.float64(0.75)}, 10)
    assert quarters == {"A": Decimal("2.5"), "B": Decimal("7.5")}


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
    for rule in ("fair", "fenced"):
        assert "negative ALPHA counts as zero: B" in shares(scores, rule).notes
    assert not shares(scored([huge, -1e-12, 3])).notes  # rounding is not negative
    assert not shares(scored([0.3 - 0.2 - 0.1, 1, 3], gain=4)).notes
    assert list(shares(scored([1, 1e-310])).values()) == [1, 0]  # nor positive
    assert list(shares(scored([1, 1e-310, 0]), floor=0.25).values()) == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("cap", [0.4, 0.5, 0.9])
def test_shares_never_add_up_to_more_than_one(cap):
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


def test_null_share_is_what_noise_pays():
    truth, s = np.array([0.0, 2.0, 3.0]), 0.2
    raws = truth + np.random.default_rng(1).normal(0, s, size=(20_000, 3))
    paid = np.maximum(raws[:, 0], 0) / np.maximum(raws, 0).sum(axis=1)
    assert null_share(scored([0, 2, 3], stderr=[s] * 3)) == pytest.approx(paid.mean(), rel=0.05)
    assert null_share(scored([0, 2, 3])) is None
    assert null_share(scored([0, -2], stderr=[1, 1])) is None
