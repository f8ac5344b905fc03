"""The panel: who helped whom, shares by hand and as properties, exact numbers, how sure, to the cent."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedmerit as fm
from fedmerit.notes import code_of
from fedmerit.scoring.panel import held_back, share_errors, share_spans
from fedmerit.scoring.sampling import student_quantile
from fedmerit.scoring.uncertainty import intervals, rank_intervals

ENTRIES = st.integers(-(10**30), 10**30) | st.integers(-4, 4) | st.sampled_from([0, 1, 2**60])


@st.composite
def matrices(draw, entries=ENTRIES, least=3, most=6):
    n = draw(st.integers(least, most))
    return draw(st.lists(st.lists(entries, min_size=n, max_size=n), min_size=n, max_size=n))


LIMITS = st.sampled_from([0.5, 1, 1.5, 3, 100])


def by_the_formula(matrix, most=3):
    """The definition, word for word, on exact rationals."""
    n, limit = len(matrix), Fraction(min(most, len(matrix) - 1)) / (len(matrix) - 1)
    shares = []
    for i in range(n):
        share = Fraction(0)
        for b in range(n):
            if b != i:
                total = sum(Fraction(max(matrix[j][b], 0)) for j in range(n) if j != b)
                part = Fraction(max(matrix[i][b], 0)) / total if total else Fraction(1, n - 1)
                share += min(part, limit) / n
        shares.append(share)
    return shares


def test_three_by_hand():
    # Judge A: of B 2 and C 6, so 1/4 and 3/4. B: of A 3 and C -1, so 1 and 0. C: nothing positive, 1/2 each.
    # The limit is min(3, 2) / 2 = 1, so it holds nobody. A = (1 + 1/2) / 3, B = (1/4 + 1/2) / 3, C = 3/4 / 3.
    found = fm.hands([[9, 3, 0], [2, 9, -5], [6, -1, 9]], clients=["A", "B", "C"])
    assert dict(found) == {"A": 1 / 2, "B": 1 / 4, "C": 1 / 4}
    assert (found.rule, found.unpaid) == ("hands", 0)
    assert found.slices["A"] == {"B": Fraction(1, 4), "C": Fraction(3, 4)}
    (note,) = found.notes
    assert (note.code, note.values) == ("hands-equal", {"clients": ("C",)})


def test_four_by_hand_with_a_limit():
    # Judge 0: 8, 1, 1 of 10 for members 1, 2, 3; nobody gets more than 3/2 of 1/3, so 1/2, .1, .1; .3 stays.
    # 1: all to member 0, so 1/2, and 1/2 stays. 2: 1, 1, 2 of 4 for 0, 1, 3: 1/4, 1/4, 1/2. 3: 1/3 each.
    # Sums: 1/2 + 1/4 + 1/3 = 13/12; 1/2 + 1/4 + 1/3 = 13/12; .1 + 1/3; .1 + 1/2; unpaid .8; a quarter of each
    matrix = [[0, 7, 1, 2], [8, 0, 1, 2], [1, -1, 0, 2], [1, 0, 2, 0]]
    found = fm.hands(matrix, most=1.5)
    names = [f"client-{i}" for i in range(4)]
    assert found == dict(zip(names, [13 / 48, 13 / 48, 13 / 120, 0.15], strict=True))
    assert found.unpaid == 0.2
    (note,) = found.notes
    assert (note.code, note.values) == ("hands-held", {"clients": ("client-0", "client-1"), "most": 1.5})
    # nobody more than 1/3 of a slice: 1/3 + .1 + .1; 1/3; 1/4 + 1/4 + 1/3; 1. What stays is 7/15 + 2/3 + 1/6.
    assert fm.hands(matrix, most=1).unpaid == pytest.approx(1.3 / 4)


@given(matrices(), LIMITS)
def test_shares_are_the_formula_on_integers_of_any_size(matrix, most):
    found, exact = fm.hands(matrix, most), by_the_formula(matrix, most)
    assert list(found.values()) == [float(share) for share in exact]
    assert found.unpaid == float(1 - sum(exact))
    by_judge = [sum(part[name] for judge, part in found.slices.items() if judge != name) for name in found]
    assert [total / len(matrix) for total in by_judge] == exact
    assert fm.hands(np.array(matrix, dtype=object), most) == found


@given(matrices(st.floats(-1e100, 1e100)), LIMITS)
def test_numbers_are_taken_as_they_are(matrix, most):
    found = fm.hands(np.array(matrix), most)
    assert list(found.values()) == [float(share) for share in by_the_formula(matrix, most)]
    assert fm.hands(matrix, most) == found
    exact = [[Fraction(x) for x in row] for row in matrix]
    assert (
        fm.hands(exact, Fraction(most))
        == fm.hands([[Decimal(x) for x in row] for row in matrix], most)
        == found
    )


@given(matrices(), LIMITS, st.data())
def test_what_a_judge_says_never_moves_its_own_share_or_amount(matrix, most, data):
    i = data.draw(st.integers(0, len(matrix) - 1))
    other = [list(row) for row in matrix]
    for row in other:
        row[i] = data.draw(ENTRIES)
    told, lied = fm.hands(matrix, most), fm.hands(other, most)
    name = f"client-{i}"
    assert told[name] == lied[name]
    assert fm.payouts(told, "1000.01")[name] == fm.payouts(lied, "1000.01")[name]


@given(matrices(), LIMITS, st.integers(0, 10**12))
def test_amounts_are_whole_cents_that_add_up_to_the_budget_less_what_is_unpaid(matrix, most, cents):
    n, budget = len(matrix), Decimal(cents).scaleb(-2)
    found = fm.hands(matrix, most)
    paid = fm.payouts(found, budget)
    assert sum(paid.values()) + paid.unpaid == paid.budget == budget
    exact = by_the_formula(matrix, most)
    for amount, share in zip([*paid.values(), paid.unpaid], [*exact, 1 - sum(exact)], strict=True):
        assert abs(Fraction(amount) - share * Fraction(budget)) < Fraction(
            2 * n, 100
        )  # less than 2 in a slice
        assert share > 0 or amount == 0
    assert list(paid) == list(found)


def test_a_cent_that_is_left_over_goes_by_a_hash_and_not_to_the_first_name():
    """25 cents in a slice are 8 and 1/3 for each of three others: four times, one of them gets the third."""
    names, equal = ["A", "B", "C", "D"], np.ones((4, 4))
    paid = fm.payouts(fm.hands(equal, clients=names), "1.00 EUR")
    assert sum(paid.values()) == 1
    assert {24, 25, 26, 27} >= {paid.cents(amount) for amount in paid.values()} != {25}
    assert paid["A"] < Decimal("0.27")  # the first name is not the first each time
    assert (paid.currency, paid.unpaid) == ("EUR", 0)
    again = fm.payouts(fm.hands(equal, clients=names[::-1]), "1.00", "EUR")
    assert dict(again) == dict(paid)
    yen = fm.payouts(fm.hands(equal, clients=names), 5, "JPY")  # slices of 1, 1, 1 and 2
    assert (sum(yen.values()), yen.unpaid, str(yen.budget)) == (5, 0, "5")


@given(matrices(), LIMITS, st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(matrix, most, random):
    n = len(matrix)
    order = random.sample(range(n), n)
    names = [f"client-{i}" for i in order]
    moved = fm.hands([[matrix[i][b] for b in order] for i in order], most, names)
    found = fm.hands(matrix, most)
    assert dict(moved) == dict(found)
    assert moved.unpaid == found.unpaid
    assert dict(fm.payouts(moved, "77.77")) == dict(fm.payouts(found, "77.77"))


@given(matrices(), LIMITS)
def test_nobody_gets_more_of_a_slice_than_the_limit_and_nothing_comes_back_from_its_own(matrix, most):
    n = len(matrix)
    limit = Fraction(min(most, n - 1)) / (n - 1)
    found = fm.hands(matrix, most)
    for judge, parts in found.slices.items():
        assert judge not in parts
        assert max(parts.values()) <= limit
        assert 0 <= sum(parts.values()) <= 1
    held = {name for parts in found.slices.values() for name, part in parts.items() if part == limit}
    named = {name for note in found.notes if code_of(note) == "hands-held" for name in note.values["clients"]}
    assert named <= held
    assert bool(named) == (found.unpaid > 0 and any(max(row) > 0 for row in matrix)) or most < 1


def test_a_member_without_data_gets_nothing_and_one_huge_word_is_held():
    rng = np.random.default_rng(0)
    matrix = rng.uniform(1, 2, (6, 6))
    matrix[5] = 0.0
    found = fm.hands(matrix)
    assert found["client-5"] == 0
    assert sum(found.values()) == pytest.approx(1)
    matrix[5, 0] = 1e100  # the first judge is a friend: 3/5 of a sixth
    assert fm.hands(matrix)["client-5"] == pytest.approx(0.1)
    assert fm.hands(matrix, most=5)["client-5"] == pytest.approx(1 / 6)


# --- the matrix


def halves_of(rng, n, p, noise=1.0, alike=0.3):
    """Updates of members who gave more or less, true gradients, and those that halves of the data show."""
    common, worth = rng.normal(size=p), rng.uniform(0.5, 1.5, (n, 1))
    gradients = (common + rng.normal(size=(n, p)) / 2) / p
    halves = gradients[:, None] + noise * rng.normal(size=(n, 2, p)) / p
    return alike * worth * common + rng.normal(size=(n, p)), gradients, halves


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_matrix_and_its_sums_are_the_definitions(n, p, seed):
    updates, _, halves = halves_of(np.random.default_rng(seed), n, p, 0.3)
    found, whole = fm.panel(updates, halves), fm.panel(updates.tolist(), halves.mean(axis=1))
    for i in range(n):
        for b in range(n):
            assert found.matrix[i, b] == pytest.approx(updates[i] @ halves[b].mean(axis=0), abs=1e-12)
    np.testing.assert_allclose(whole.matrix, found.matrix, atol=1e-12)
    off = np.where(np.eye(n, dtype=bool), 0.0, found.matrix)
    np.testing.assert_allclose(found.gave, off.sum(axis=1), atol=1e-12)
    np.testing.assert_allclose(found.received, off.sum(axis=0), atol=1e-12)
    scores = found.scores
    np.testing.assert_allclose(scores.values, off.sum(axis=1) / (n - 1), atol=1e-12)
    assert (scores.score, scores.clients, scores.status) == ("PANEL", found.clients, "ok")
    assert scores.gain == pytest.approx(scores.values.sum())
    each = np.einsum("ip,bhp->hib", updates, halves)
    away = np.where(np.eye(n, dtype=bool), 0.0, each[0] - each[1]) / 2
    np.testing.assert_allclose(found.stderr, np.sqrt((away**2).sum(axis=0) / (n - 1)), atol=1e-12)
    for i in range(n):
        others = [b for b in range(n) if b != i]
        own = sum(found.stderr[b] ** 2 for b in others)
        pairs = sum(found.stderr[b] * found.stderr[c] for b in others for c in others if b != c)
        expected = math.sqrt(own + found.correlation * pairs) / (n - 1)
        assert scores.stderr[i] == pytest.approx(expected, abs=1e-9)
    assert whole.stderr is whole.scores.stderr is None


def test_a_column_adds_up_to_what_its_judge_gained():
    """v_b(x) = <a_b, x> - |x|^2 / 2 is quadratic, so the mean gradient is that in the middle of the way."""
    rng = np.random.default_rng(1)
    updates, slopes = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    end = updates.sum(axis=0)
    found = fm.panel(updates, slopes - end / 2, list("ABCD"))
    gained = slopes @ end - end @ end / 2
    np.testing.assert_allclose(found.matrix.sum(axis=0), gained)
    np.testing.assert_allclose(found.received + np.diag(found.matrix), gained)
    for b in range(4):  # each column is PHI along that judge's direction
        np.testing.assert_allclose(found.matrix[:, b], fm.aumann_shapley(updates, slopes[b] - end / 2).values)


def test_rounds_side_by_side_are_summed_and_long_updates_too():
    rng = np.random.default_rng(2)
    updates, gradients = rng.normal(size=(2, 3, 2, 50)).astype(np.float32)
    both = fm.panel(updates.reshape(3, 100), gradients.reshape(3, 100))
    each = [fm.panel(updates[:, t], gradients[:, t]).matrix for t in (0, 1)]
    np.testing.assert_allclose(both.matrix, sum(each), atol=1e-12)
    long = rng.normal(size=(2, 3, (1 << 20) + 7)).astype(np.float32)
    np.testing.assert_allclose(fm.panel(*long).matrix, long[0].astype(float) @ long[1].T.astype(float))


def test_a_panel_is_divided_by_its_rule_alone_and_shown_like_other_scores():
    updates, _, halves = halves_of(np.random.default_rng(3), 5, 40, 0.1)
    found = fm.panel(updates, halves, list("ABCDE"))
    shares = fm.shares(found, rule="hands")
    assert dict(shares) == dict(fm.hands(found.matrix, clients=found.clients)) == dict(found.hands())
    assert shares.slices == found.hands().slices
    assert found.scores.to_csv().startswith("client")
    assert found.scores.to_pandas().shape[0] == 5
    assert "<table" in found.scores._repr_html_()
    low, high = intervals(found.scores).T
    assert (high - low) / 2 == pytest.approx(student_quantile(0.025, 4) * found.scores.stderr)
    assert (rank_intervals(found.scores)[:, 0] <= found.scores.ranks()).all()


# --- how sure


def test_errors_of_shares_by_hand_and_whatever_the_order():
    # The judge of the second column says 2 of A, 1 of C, each with error e: A's part 2/3 moves by
    # (1 * dA - 2 * dC) / 9, so by e * sqrt(5) / 9, a third of which is in the shares of A and of C.
    apart = [[0, 0.01, 0], [0, 0, 0], [0, -0.01, 0]]
    one = fm.Panel([[0, 2, 3], [1, 0, 1], [1, 1, 0]], ["A", "B", "C"], apart)
    assert one.stderr == pytest.approx([0, 0.01, 0])
    found = share_errors(one)
    assert found == pytest.approx(
        {"A": 0.01 * math.sqrt(5) / 27, "B": 0, "C": 0.01 * math.sqrt(5) / 27}, rel=0.1
    )
    updates, _, halves = halves_of(np.random.default_rng(3), 5, 40, 0.3)
    names, order = np.array(list("ABCDE")), [3, 0, 4, 1, 2]
    here, there = fm.panel(updates, halves, names), fm.panel(updates[order], halves[order], names[order])
    assert share_errors(there) == pytest.approx(share_errors(here), rel=1e-6)
    assert list(share_errors(there)) == list("DAEBC")
    assert share_errors(fm.Panel(here.matrix)) is None
    tight, free = (sum(share_errors(here, most=most).values()) for most in (1.2, 4))
    assert tight < free


def test_the_correlation_of_judges_is_that_of_their_errors():
    rng, n = np.random.default_rng(4), 200
    for rho in (0.0, 0.5, 1.0):
        away = math.sqrt(rho) * rng.normal(size=(n, 1)) + math.sqrt(1 - rho) * rng.normal(size=(n, n))
        found = fm.Panel(np.ones((n, n)), apart=away * rng.uniform(1, 5, n))
        assert found.correlation == pytest.approx(rho, abs=0.1)
    assert (
        fm.Panel(np.ones((3, 3))).correlation == fm.Panel(np.ones((3, 3)), apart=np.eye(3)).correlation == 0
    )


@pytest.mark.parametrize("alike", [0.3, 1.0])
@pytest.mark.parametrize("drawn", ["samples", "coordinates"])
def test_errors_cover_what_other_data_of_the_judges_would_say(drawn, alike):
    """Halves of the samples; or also of some coordinates, the same for all judges, and so is their luck.

    The standard error of what is held is about .01: 300 panels of six members who share judges.
    """
    rng, held = np.random.default_rng(5), {"PANEL": [], "shares": [], "entries": []}
    t, off = student_quantile(0.025, 5), ~np.eye(6, dtype=bool)
    for _ in range(300):
        updates, gradients, halves = halves_of(rng, 6, 1000, alike=alike)
        if drawn == "coordinates":
            for k, shown in enumerate(rng.permutation(1000)[:500].reshape(2, 250)):
                halves[:, k] *= 4 * np.isin(np.arange(1000), shown)
        found, truth = fm.panel(updates, halves), fm.panel(updates, gradients)
        held["PANEL"].append(np.abs(found.scores.raw - truth.scores.raw) <= t * found.scores.stderr)
        held["entries"].append((np.abs(found.matrix - truth.matrix) <= t * found.stderr)[off])
        shares, true, errors = found.hands(), truth.hands(), share_errors(found)
        held["shares"].append([abs(shares[name] - true[name]) <= 1.96 * errors[name] for name in shares])
    share = {what: float(np.mean(covered)) for what, covered in held.items()}
    assert share["PANEL"] > 0.94
    assert share["entries"] > 0.92
    assert share["shares"] > 0.95


def test_where_entries_are_noise_the_errors_of_shares_say_so():
    updates, _, halves = halves_of(np.random.default_rng(6), 6, 400, 100.0)
    assert np.median(list(share_errors(fm.panel(updates, halves)).values())) > 1 / 18


def test_intervals_of_shares_hold_what_is_paid_and_lose_what_is_lost():
    apart = [[0, 0.3, 0.1, 0.2], [0.2, 0, 0.1, 0.1], [0.1, 0.2, 0, 0.3], [0.2, 0.1, 0.1, 0]]
    judged = fm.Panel([[0, 2, 3, 1], [1, 0, 1, 2], [1, 1, 0, 2], [-9, -9, -9, 0]], apart=apart)
    divided = held_back(judged.hands(), {"client-1": 1.0})
    errors, spans = share_errors(judged), share_spans(judged, divided)
    for name in ("client-0", "client-2"):
        low, high = spans[name]
        assert high - low == pytest.approx(2 * 1.96 * errors[name], abs=2e-4)
        assert low <= divided[name] <= high
        assert all(end * 10_000 == pytest.approx(round(end * 10_000)) for end in (low, high))
    assert spans["client-1"] == (0.0, 0.0)  # it loses its whole share
    assert spans["client-3"] == (0.0, 0.0)  # far below zero in every column
    assert share_spans(fm.Panel(judged.matrix), divided) is None
