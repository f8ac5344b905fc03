"""Sums over rounds: who was away, what that counts, how sure the sum is, whether there were rounds enough."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.errors import ReportError, UndefinedShares
from fedmerit.notes import code_of
from fedmerit.report.facts import Facts
from fedmerit.report.source import Source
from fedmerit.report.text import rounds_enough
from fedmerit.scoring.accumulate import MOST_CLIENTS, accumulate, convergence_of
from fedmerit.scoring.rewards import shares
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports, Scores
from games import reports
from raising import raises


def make(round_number, clients="ABC", **extra):
    n = len(clients)
    given_ = {"empty": 0.25, "grand": 0.75, "alone": [0.5] * n, "without": [0.5] * n} | extra
    return Reports(clients=list(clients), round=round_number, **given_)  # alpha = .25 each


@given(st.lists(reports(min_clients=3, max_clients=3), min_size=1, max_size=5))
def test_with_everyone_present_it_is_the_plain_sum(rounds):
    total = accumulate(rounds)
    np.testing.assert_allclose(total.values, sum(alpha(r).values for r in rounds), atol=1e-12)
    assert total.gain == pytest.approx(sum(r.gain for r in rounds))
    assert total.coverage.tolist() == [1, 1, 1]
    assert total.notes == ()
    np.testing.assert_array_equal(total.values, accumulate(rounds, missing="own-mean").values)


def test_members_join_leave_and_miss_rounds():
    rounds = [make(1, "AB"), make(2, "ABC"), make(3, "AC"), make(4, "A", silent=["B", "C"])]
    zero = accumulate(rounds)
    assert zero.as_dict() == {"A": 1.0, "B": 0.5, "C": 0.5}
    assert zero.coverage.tolist() == [1.0, 0.5, 0.5]
    assert zero.rounds == 4
    assert "member 'B' reported 2 of 4 rounds; the rest counts as zero" in zero.notes
    own = accumulate(rounds, missing="own-mean")
    assert own.as_dict() == {"A": 1.0, "B": 1.0, "C": 1.0}
    assert "member 'C' reported 2 of 4 rounds; the rest counts at its own mean" in own.notes


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ("ab", math.hypot(0.1, 0.1)),  # other samples: independent
        ("aa", 0.2),
        ((None, None), 0.2),
        (("a", None), 0.2),  # what is not named may be slice a
        (("a", None, None), 0.3),
        (("a", "b", None), math.hypot(0.1, 0.1) + 0.1),
    ],
)
def test_a_slice_that_is_not_named_is_independent_of_none(slices, expected):
    rounds = [make(k, se_alpha=[0.1] * 3, slice=one) for k, one in enumerate(slices, start=1)]
    total = accumulate(rounds)
    assert total.stderr == pytest.approx([expected] * 3)
    assert any("were added up: an upper bound" in note for note in total.notes) == (slices != "ab")


def test_two_spellings_of_a_name_are_noted():
    rounds = [make(1, ("Ulm", "Bonn")), make(2, ("Ulm ", "Bonn"))]
    assert "spelled-alike" in [code_of(note) for note in accumulate(rounds).notes]
    assert not any("differ" in said for said in accumulate(rounds[:1]).notes)


SAID = {"se_alpha": [0.03, 0.04, 0], "slice": "s", "se_alpha_total": [0.05, 0.06, 0]}
"""On one slice; running totals that are smaller than the sums of the rounds' errors."""
BARE = SAID | {"se_alpha_total": None}
ELSEWHERE = SAID | {"slice": "t"}
TOTAL, ADDED = [0.05, 0.06, 0], [0.06, 0.08, 0]


@pytest.mark.parametrize(
    ("rounds", "expected", "bounds"),
    [
        ([make(1, **SAID), make(2, **SAID)], TOTAL, []),
        ([make(None, **SAID), make(None, **SAID)], TOTAL, []),
        ([make(1, **BARE), make(2, **BARE)], ADDED, ["bound-shared"]),
        ([make(1, **BARE | {"slice": None}), make(2, **BARE | {"slice": None})], ADDED, ["bound-unnamed"]),
        ([make(1, **BARE), make(2, **ELSEWHERE)], [0.03 * 2**0.5, 0.04 * 2**0.5, 0], []),  # independent
        # a later round did not renew it
        ([make(1, **BARE), make(2, **SAID), make(3, **BARE)], [0.09, 0.12, 0], ["bound-shared"]),
        ([make(3, **SAID), make(4, **SAID)], ADDED, ["bound-shared"]),  # it may cover rounds 1 and 2 as well
        ([make(1, **SAID), make(3, **SAID)], ADDED, ["bound-shared"]),
        ([make(None, **SAID), make(2, **SAID)], ADDED, ["bound-shared"]),
        ([make(1, **SAID), make(2, **SAID), make(4, "AB", se_alpha=[0.01, 0.01], slice="s")],
         [0.07, 0.09, 0], ["bound-shared"]),
        # it began anew on another slice
        ([make(1, **SAID), make(2, **ELSEWHERE), make(3, **SAID)],
         [math.hypot(0.06, 0.03), math.hypot(0.08, 0.04), 0], ["bound-shared"]),
    ],
)  # fmt: skip
def test_a_running_total_is_used_where_it_covers_exactly_these_rounds(rounds, expected, bounds):
    total = accumulate(rounds)
    np.testing.assert_allclose(total.stderr, expected, atol=1e-12)
    assert [code for note in total.notes if (code := code_of(note)).startswith("bound")] == bounds


def test_an_aborted_round_is_no_gap():
    """It leaves the model as it is: the next round begins where the one before ended."""
    first = make(1, **SAID)
    after = replace(make(3, **SAID), empty=first.grand, grand=first.grand + 1)
    assert accumulate([first, after]).stderr.tolist() == [0.05, 0.06, 0]
    moved = replace(after, empty=first.grand + 1e-9)
    np.testing.assert_allclose(accumulate([first, moved]).stderr, [0.06, 0.08, 0], atol=1e-12)


def test_a_running_total_of_somebody_silent_before_is_not_used():
    """It measured in round 2 and was not heard; who was not in the sum measured nothing."""

    def two(**extra):
        return {"se_alpha": [0.03, 0.03], "slice": "s", "se_alpha_total": [0.04, 0.04]} | extra

    later = make(3, **SAID | {"se_alpha": [0.01] * 3})
    total = accumulate([make(1, **SAID), make(2, "AB", silent=["C"], **two()), later])
    np.testing.assert_allclose(total.stderr, [0.05, 0.06, 0.01])
    assert any("upper bound" in note for note in total.notes)
    away = [make(1, **SAID), make(2, "AB", **two()), make(3, **SAID)]
    assert accumulate(away).stderr.tolist() == [0.05, 0.06, 0]
    small = SAID | {"se_alpha": [0.03, 0.04, 0.02], "se_alpha_total": [0.05, 0.06, 0.02]}
    elsewhere = [make(1, **small), make(2, "AB", silent=["C"], **two(slice="t")), make(3, **small)]
    np.testing.assert_allclose(accumulate(elsewhere).stderr[2], 0.04)  # its total began anew there
    later = [make(1, **SAID), make(2, **SAID), make(3, "AB", silent=["C"], **two())]
    assert accumulate(later).stderr.tolist() == [0.04, 0.04, 0]


def test_the_error_of_a_real_sum_is_never_understated():
    """Alpha per test sample in three rounds that nearly cancel; the client is silent in the second."""
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 1, 400)
    samples = [noise + rng.normal(0, 0.1, 400), -2 * noise, noise + rng.normal(0, 0.1, 400)]

    def error(values):
        return float(np.std(values, ddof=1) / 20)

    rounds = []
    for k, own in enumerate(samples, start=1):
        errors = {"se_alpha": [error(own), 0.01], "se_alpha_total": [error(sum(samples[:k])), 0.01]}
        if k == 2:
            rounds.append(make(k, "B", silent=["A"], slice="s", se_alpha=[0.01], se_alpha_total=[0.01]))
        else:
            rounds.append(make(k, "AB", slice="s", **errors))
    true = error(samples[0] + samples[2])
    assert errors["se_alpha_total"][0] < 0.1 * true
    assert accumulate(rounds).stderr[0] >= true
    assert accumulate([rounds[0], rounds[2]]).stderr[0] >= true


@pytest.mark.parametrize("score", ["LOO", "IOI"])
def test_a_running_total_of_alpha_says_nothing_about_other_scores(score):
    errors = SAID | {f"se_{score.lower()}": [0.1, 0.2, 0.3]}
    total = accumulate([make(1, **errors), make(2, **errors)], score=score)
    np.testing.assert_allclose(total.stderr, [0.2, 0.4, 0.6])
    assert code_of(total.notes[-1]) == "bound-shared"


def test_a_round_that_nobody_reported_in_is_refused_with_its_number():
    def nobody(number):
        return Reports(empty=0, grand=1, alone=[], without=[], silent=["A", "B", "C"], round=number)

    with raises(ReportError, round=2):
        accumulate([make(1), nobody(2)])
    with raises(ReportError, round=1):
        accumulate([nobody(None), make(None)])


def test_own_mean_scales_the_error_with_the_score():
    rounds = [make(1, "ABC", se_alpha=[0.03] * 3, slice="1"), make(2, "AB", se_alpha=[0.03] * 2, slice="2")]
    total = accumulate(rounds, missing="own-mean")
    np.testing.assert_allclose(total.stderr, [0.03 * math.sqrt(2), 0.03 * math.sqrt(2), 0.06])
    assert accumulate([rounds[0], make(2)]).stderr is None  # a round without errors leaves the sum without


def test_the_other_scores_sum_too():
    rounds = [make(k, alone=[0.5, 0.5, 0.75], cosine=[0.5, None, -0.5]) for k in (1, 2)]
    assert accumulate(rounds, score="IOI").values.tolist() == [0.5, 0.5, 1.0]
    assert accumulate(rounds, score="LOO").values.tolist() == [0.5, 0.5, 0.5]
    cosine = accumulate(rounds, score="COS")
    assert cosine.values.tolist() == [1.0, 0.0, -1.0]
    assert "round 2: member 'B' has no cosine" in cosine.notes[1]


def test_merit_is_the_last_solo_plus_ioi_summed():
    later = {"solo": [0.75, 0.25], "solo_empty": 0.25}
    rounds = [make(1, solo=[0.5, 0.5, 0.5], solo_empty=0.25), make(2, "AB", **later)]
    # IOI .25 a round: A .5, B .5, C .25; last SOLO: A .5, B 0, C .25 (from round 1)
    assert accumulate(rounds, score="MERIT").as_dict() == {"A": 1.0, "B": 0.5, "C": 0.5}


EXAMPLE = Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1], clients=list("ABC"), round=1)
# A 2, B 1, C 1 of 4: LOO = IOI = alpha, so FP = alpha and r_j = (4 - alone) + (without - 0) = 4, 6, 6;
# EE_i = (16 - r_i) / 32 * 4
SECOND = Reports(empty=0, grand=4, alone=[2, 1, 1], without=[2, 3, 3], clients=list("ABC"), round=2)


def test_fp_and_ee_are_summed_as_published():
    fp, ee = (accumulate([EXAMPLE, SECOND], score=name) for name in ("FP", "EE"))
    assert fp.values == pytest.approx([0 + 2, 1 + 1, 2 + 1])
    assert ee.values == pytest.approx([0.75 + 1.5, 1 + 1.25, 1.25 + 1.25])
    for one in (fp, ee):
        assert (one.status, one.rounds, one.stderr) == ("ok", 2, None)
        np.testing.assert_array_equal(one.raw, one.values)


def test_one_reversed_round_marks_the_sum_and_pays_nobody():
    # alpha = (5 - 5 + 4 - 6)/2, (5 - 4 + 5 - 6)/2 = -1, 0: the sum is below 0 and the pot, 5, is not
    worse = Reports(empty=6, grand=5, alone=[4, 5], without=[5, 4], clients=["A", "B"], round=2)
    good = Reports(empty=0, grand=6, alone=[2, 4], without=[4, 2], clients=["A", "B"], round=1)
    total = accumulate([good, worse], score="FP")
    assert total.values == pytest.approx([2 + 5, 4 + 0])
    assert total.status == "reversed"
    with pytest.raises(UndefinedShares) as caught:
        shares(total)
    reason = caught.value.note.values["reason"]
    assert (reason.code, reason.values["status"], reason.values["rounds"]) == ("status-in", "reversed", (2,))
    assert shares(accumulate([good], score="FP"))


def test_who_was_in_the_sum_and_never_reported_is_noted_under_every_rule():
    total = accumulate([make(1, silent=["Eve"]), make(2, silent=["Eve"])])
    (note,) = total.notes
    assert (note.code, note.values) == ("never-reported", {"client": "Eve"})
    assert "Eve" not in total.clients
    for rule in ("fair", "equal"):
        assert note in shares(total, rule).notes
    same = replace(total, notes=("somebody's own words", *total.notes))
    assert [code_of(note) for note in shares(same, "equal").notes] == ["never-reported"]


def test_rounds_that_do_not_join_up_are_noted_with_their_numbers():
    def at(number, empty, grand, slice="s"):
        return Reports(
            empty=empty, grand=grand, alone=[empty] * 2, without=[grand] * 2, round=number, slice=slice
        )

    assert accumulate([at(1, 0.1, 0.3), at(2, 0.3, 0.4)]).notes == ()
    assert accumulate([at(1, 0.1, 0.3), at(3, 0.3, 0.4)]).notes == ()  # nothing changed in between
    assert accumulate([at(1, 0.1, 0.3, "a"), at(2, 0.2, 0.4, "b")]).notes == ()  # other samples
    assert accumulate([at(1, 0.1, 0.3), at(2, 0.25, 0.4)]).notes == (
        "on the same test samples, round 1 ends at 0.3 and round 2 begins at 0.25: nobody's score includes "
        "what changed in between",
    )
    assert accumulate([at(1, 0.1, 0.3, None), at(3, 0.25, 0.4, None)]).notes == (
        "there are no reports between rounds 1 and 3: nobody's score includes what changed then",
    )
    many = accumulate([at(k, 0.1, 0.3) for k in range(1, 8)]).notes
    assert len(many) == 1
    assert "round 3 ends at 0.3 and round 4 begins at 0.1; and 3 more" in many[0]


# --------------------------------------------------------------------------------- were there enough rounds


def convergence(each, numbers, stderr=None):
    clients = tuple(f"client-{i}" for i in range(np.shape(each)[1]))

    def scores(values, **more):
        return Scores(score="ALPHA", clients=clients, values=values, raw=values, gain=0.0, **more)

    error = None if stderr is None else np.full(len(clients), stderr)
    return convergence_of(scores(np.sum(each, axis=0), stderr=error), [*map(scores, each)], numbers)


def test_an_order_that_settles_by_hand():
    # sums: A 1 3 4 5 6 7 8 9, B 2 2 3 4 5 6 7 8, C 0 0 0 0 0 0 0 0: B is before A after round 1 only
    each = np.array([[1, 2, 0], [2, 0, 0], *[[1, 1, 0]] * 6], float)
    found = convergence(each, range(1, 9))
    assert found.numbers == (1, 2, 3, 4, 5, 6, 7, 8)
    assert (found.pairs, found.ordered) == (3, (2, 3, 3, 3, 3, 3, 3, 3))
    assert found.spearman == pytest.approx((0.5, *[1.0] * 7))
    assert (found.since, found.sure_since) == (2, None)
    assert found.settled(found.since)
    tie = convergence(np.array([[1, 0], [0, 1], [1, 1], [1, 1]], float), range(1, 5))
    assert (tie.pairs, tie.ordered, tie.since) == (0, (0, 0, 0, 0), 2)


def test_what_still_changes_in_the_last_quarter_is_not_settled():
    def since(last):  # B overtakes A in this round
        each = np.array([[1.0, 0.0]] + [[0.0, 0.0]] * 7)
        each[last - 1] = [0.0, 3.0]
        found = convergence(each, range(11, 19))
        assert found.since == 10 + last
        return found.settled(found.since)

    assert [since(last) for last in (2, 5, 6, 7, 8)] == [True, True, True, False, False]


def test_pairs_that_are_told_apart_are_judged_on_their_own():
    each = np.array([[5, 1, 2], [5, 1, 1], [5, 1, 1], [5, 4, 1]], float)  # B overtakes C in round 4
    found = convergence(each, range(1, 5), stderr=1.0)  # sums 20, 7 and 5: A is above both, B and C are alike
    assert (found.since, found.sure_since) == (4, 1)
    assert convergence(each, range(1, 5), stderr=0.1).sure_since == 4


@pytest.mark.parametrize("shape", [(3, 4), (9, 1), (4, MOST_CLIENTS + 1)])
def test_few_rounds_or_very_many_clients_say_nothing(shape):
    assert convergence(np.ones(shape), range(1, shape[0] + 1)) is None


VALUES = st.integers(-20, 20).map(lambda k: k / 8)


@st.composite
def histories(draw):
    """Reports of members who come and go; everybody is in the first round."""
    names = "ABCDE"[: draw(st.integers(2, 5))]
    rounds, level = [], 0.0
    for number in range(1, draw(st.integers(4, 9)) + 1):
        away = draw(st.sampled_from(["", *names])) if number > 1 and len(names) > 2 else ""
        here = [name for name in names if name != away]
        grand = draw(VALUES)
        alone, without = (draw(st.lists(VALUES, min_size=len(here), max_size=len(here))) for _ in range(2))
        rounds.append(
            Reports(empty=level, grand=grand, alone=alone, without=without, clients=here, round=number)
        )
        level = grand
    return rounds


def above(total, clients):
    values = total.as_dict()
    return [(one, other) for one in clients for other in clients if values[one] - values[other] > 1e-7]


@given(histories(), st.sampled_from(["zero", "own-mean"]), st.sampled_from(["ALPHA", "LOO"]))
def test_it_is_the_order_of_sums_that_accumulate_makes(rounds, missing, score):
    total = accumulate(rounds, score=score, missing=missing)
    numbers = [one.round for one in rounds]
    found = convergence_of(total, rounds, numbers, missing=missing)
    orders = [
        above(accumulate(rounds[:place], score=score, missing=missing), total.clients) for place in numbers
    ]
    final = orders[-1]
    assert found.pairs == len(final)
    assert list(found.ordered) == [len(set(one) & set(final)) for one in orders]
    changed = [place for place, one in zip(numbers, orders, strict=True) if set(one) != set(final)]
    assert found.since == (changed[-1] + 1 if changed else 1)


def facts(*rounds, stderr=None):
    level, made = 0.0, []
    for number, values in enumerate(rounds, start=1):
        n = len(values)
        gain = sum(values)
        made.append(
            Reports(
                empty=level, grand=level + gain, alone=[level + value for value in values],
                without=[level + gain - value for value in values], clients=list("ABCD"[:n]), round=number,
                se_alpha=None if stderr is None else [stderr] * n, slice="s", utility="u",
            )
        )  # fmt: skip
        level += gain
    return Facts(Source(rounds=tuple(made), clients=tuple("ABCD"[: len(rounds[0])])))


def test_one_sentence_says_whether_there_were_rounds_enough():
    same = [[0.3, 0.2, 0.1]] * 8
    assert rounds_enough(facts(*same)) == "The order of members has been the same since the first round."
    early = [[0.1, 0.2, 0.0], [0.3, 0.1, 0.0], *same[2:]]
    told = "The order of members has not changed since round 2 of 8."
    assert rounds_enough(facts(*early)) == told
    late = [*same[:7], [0.0, 0.9, 0.0]]
    told = "The order of members still changed in round 8 of 8"
    assert rounds_enough(facts(*late)) == f"{told}: more rounds may change it again."
    within = [*[[0.01, 0.0, -9.0]] * 7, [0.0, 0.09, -9.0]]
    assert rounds_enough(facts(*within, stderr=0.1)) == (
        f"{told}, but only between members who are statistically indistinguishable; all others have kept "
        "their order since the first round."
    )
    within[0] = [0.01, 0.0, 9.0]
    assert rounds_enough(facts(*within, stderr=0.1)).endswith(
        "all others have kept their order since round 3."
    )
    assert rounds_enough(facts(*late, stderr=0.001)).startswith(f"{told}, and not only between members who ")
    assert rounds_enough(facts(*same[:3])) == ""
