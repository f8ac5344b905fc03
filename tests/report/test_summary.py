"""Who, how much, how sure: the first thing a person reads must not say more than the reports do."""

import io
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedmerit.notes import code_of
from fedmerit.report.facts import MOST_COMPARED, Facts
from fedmerit.report.source import Source
from fedmerit.report.terminal import print_facts, table_lines
from fedmerit.report.text import printable
from fedmerit.scoring.rewards import shares
from fedmerit.scoring.types import Reports, Scores
from fedmerit.scoring.uncertainty import TRAINING, compare_pairs, sure_signs
from sample import of_alpha


def reports(number=1, *, se=0.001, clients=("good", "fair", "bad"), **other):
    """alpha = (0.20, 0.10, -0.10); gain 0.4."""
    alpha = [0.2, 0.1, -0.1][: len(clients)]
    return of_alpha(alpha, 0.4, start=0.1, names=clients, se=se, round=number, **other)


def facts_from(rounds, *, score="ALPHA", missing="zero", clients=()):
    return Facts(Source(rounds=tuple(rounds), clients=clients, missing=missing), score=score)


def shown(facts, width=100):
    out = io.StringIO()
    print_facts(Console(file=out, width=width, soft_wrap=True, markup=False), facts, last_round=True)
    return out.getvalue()


def test_standings_are_in_order_with_intervals_and_shares():
    found = facts_from([reports()])
    assert [one.client for one in found.standings] == ["good", "fair", "bad"]
    assert [one.rank for one in found.standings] == [1, 2, 3]
    assert [one.rank_interval for one in found.standings] == [(1, 1), (2, 2), (3, 3)]
    assert [one.total for one in found.standings] == pytest.approx([0.2, 0.1, -0.1])
    low, high = found.standings[0].interval
    assert (low, high) == pytest.approx((0.2 - 0.0030616, 0.2 + 0.0030616), abs=1e-5)
    assert [one.share for one in found.standings] == pytest.approx([2 / 3, 1 / 3, 0], abs=1e-4)
    assert {one.client: one.share for one in found.standings} == dict(shares(found.total))  # what is paid
    assert found.last_scores["LOO"].as_dict()["good"] == pytest.approx(0.2)
    assert found.standings[0].samples is None
    assert found.status == {"FP": "ok", "EE": "ok"}


ALONE = Reports(
    empty=0.1, grand=0.5, alone=[0.2], without=[0.3], clients=["a"], silent=["b"], se_alpha=[0.01]
)


@pytest.mark.parametrize(
    ("one", "suspects", "groups"),
    [
        (reports(), ("bad",), (("good",), ("fair",), ("bad",))),
        (reports(se=0.1), (), (("good", "fair", "bad"),)),  # the test set is too small
        (of_alpha([0.3, 0.2, 0.1], 0.6, names="ABC", se=0.001, round=1), (), (("A",), ("B",), ("C",))),
        (ALONE, (), (("a",),)),  # of a single reporter nobody can say it
    ],
)
def test_who_is_surely_last_and_did_harm_is_a_suspect(one, suspects, groups):
    found = facts_from([one])
    assert (found.suspects, found.groups) == (suspects, groups)
    text = shown(found)
    assert ("bad is significantly below every other member: talk to this member" in text) == bool(suspects)
    assert ("statistically indistinguishable: good, fair, bad" in text) == (groups[0][-1] == "bad")


@pytest.mark.long
@pytest.mark.parametrize("n", [6, 20])
def test_of_many_that_contributed_nothing_few_are_ever_accused(n):
    """One good client and n - 1 without any contribution: how often is one of those below or above zero?"""
    rng, pages = np.random.default_rng(5), 300
    single, together = 0, 0
    for _ in range(pages):
        alpha = rng.normal(0, 0.01, n)
        alpha[0] += 0.3
        error = [0.01 / math.hypot(1, TRAINING)] * n  # with the allowance for one training, 0.01
        one = Reports(empty=0, grand=0.3, alone=alpha, without=0.3 - alpha, se_alpha=error, round=1)
        found = {standing.client: standing for standing in facts_from([one]).standings}
        assert found.pop("client-0").surely == 1
        single += any(standing.interval[1] < 0 for standing in found.values())
        together += any(standing.surely for standing in found.values())
    assert single > (0.08 if n == 6 else 0.3) * pages
    assert together <= 0.07 * pages  # at most 5 %, and three standard errors of 300 pages less


def test_sure_signs_are_holms():
    """One-sided p-values in order, the (k+1)-th against a / (2N - k): written down as Holm has it."""
    rng, normal = np.random.default_rng(6), NormalDist()
    for _ in range(200):
        n = int(rng.integers(1, 8))
        raw, stderr = rng.normal(0, 3, n), rng.uniform(0.5, 1.5, n)
        tests = sorted((normal.cdf(-s * raw[i] / stderr[i]), i, s) for i in range(n) for s in (1, -1))
        expected = [0] * n
        for k, (p, i, sign) in enumerate(tests):
            if p >= 0.05 / (2 * n - k):
                break
            expected[i] = sign
        given = Scores(
            score="ALPHA", clients=tuple(map(str, range(n))), values=raw, raw=raw, gain=1, stderr=stderr
        )
        assert sure_signs(given) == expected


def test_a_zero_without_any_error_is_not_surely_anything():
    raw = np.array([0.3 - 0.2 - 0.1, 0.1])
    given = Scores(score="ALPHA", clients=("A", "B"), values=raw, raw=raw, gain=1, stderr=[0, 0])
    assert sure_signs(given) == [0, 1]


def test_suspects_are_those_that_everybody_beats():
    """The sorted way to find them agrees with all pairs."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        raw = np.round(rng.normal(size=5), 1)
        one = Reports(
            empty=0, grand=raw.sum(), alone=raw, without=raw.sum() - raw, se_alpha=rng.uniform(0, 0.3, 5)
        )
        found = facts_from([one])
        better = compare_pairs(found.total).better
        worst = [name for j, name in enumerate(found.total.clients) if better[:, j].sum() == 4]
        assert found.suspects == tuple(name for name in worst if name in found.harmful)


def test_without_standard_errors_nothing_is_said_about_certainty():
    found = facts_from([reports(se=None)])
    assert (found.suspects, found.groups) == ((), ())
    assert all(one.interval is None and one.rank_interval is None for one in found.standings)
    text = shown(found)
    assert "no standard errors were reported: nobody can say how sure these scores are" in text
    assert "±" not in text


def test_shares_are_refused_with_the_reason():
    found = facts_from([reports(se=1.0)])
    assert all(one.share is None for one in found.standings)
    (why,) = [note for note in found.notes if code_of(note) == "no-shares"]
    assert why.part("within-errors") is not None
    text = shown(found)
    assert f"note: {why}" in text
    assert "%" not in text.partition("ALPHA summed")[0]


def test_who_was_silent_is_said_and_the_last_round_has_no_fp():
    rounds = [reports(), reports(2, clients=("good", "fair"), silent=("bad", "ghost"))]
    found = facts_from(rounds)
    assert found.status == {}
    by_name = {one.client: one for one in found.standings}
    assert "FP" not in found.last_scores or found.last_scores["FP"] is None
    assert found.last_scores["LOO"].as_dict() == pytest.approx({"good": 0.2, "fair": 0.1})
    assert by_name["bad"].coverage == 0.5
    assert "ghost" not in by_name
    assert "member 'bad' was in the sum but sent no report: round 2" in found.notes
    assert "member 'ghost' was in the sum but sent no report: round 2" in found.notes
    unnumbered = facts_from([replace(one, round=None) for one in rounds])
    assert "member 'ghost' was in the sum but sent no report: round 2" in unnumbered.notes
    assert "50%" in shown(found)


@pytest.mark.parametrize("missing", ["zero", "own-mean"])
def test_who_missed_a_round_is_nobodys_suspect(missing):
    found = facts_from([reports(slice="1"), reports(2, clients=("good", "fair"), slice="2")], missing=missing)
    assert found.standings[-1].client == "bad"
    assert found.standings[-1].rank_interval == (3, 3)
    assert found.suspects == ()
    assert "talk to this member" not in shown(found)


def test_missed_rounds_count_as_asked():
    rounds = [reports(), reports(2, clients=("good", "fair"))]
    zero, own = (facts_from(rounds, missing=how) for how in ("zero", "own-mean"))
    assert zero.standings[-1].total == pytest.approx(-0.1)
    assert own.standings[-1].total == pytest.approx(-0.2)
    assert "member 'bad' reported 1 of 2 rounds; the rest counts as zero" in zero.notes
    assert "member 'bad' reported 1 of 2 rounds; the rest counts at its own mean" in own.notes
    assert [one.coverage for one in zero.standings] == [1, 1, 0.5]


def test_a_reversed_normalisation_is_flagged():
    one = reports()
    turned = Reports(
        empty=-0.5, grand=-0.1, alone=one.alone - 0.6, without=one.without - 0.6, clients=one.clients
    )
    found = facts_from([turned])
    assert found.status == {"FP": "reversed", "EE": "reversed"}
    assert [standing.client for standing in found.standings] == ["good", "fair", "bad"]
    assert "FP of the last round is reversed: do not rank or pay by it" in shown(found)


def test_samples_only_where_disclosed():
    assert "samples" not in shown(facts_from([reports()]))
    found = facts_from([reports(samples=[10, 20, 30])])
    assert [one.samples for one in found.standings] == [10, 20, 30]
    assert "samples" in shown(found)


@pytest.mark.parametrize("score", ["LOO", "IOI"])
def test_other_sums(score):
    found = facts_from([reports(utility="brier"), reports(2, utility="brier")], score=score)
    assert found.total.score == score
    header = next(line for line in shown(found).splitlines() if "member" in line)
    assert score.lower() in header
    assert f"{score} summed over 2 rounds, utility brier" in shown(found)


def test_many_clients_take_no_square_of_memory():
    n = 10 * MOST_COMPARED
    raw = np.linspace(0, 1, n)
    one = Reports(empty=0, grand=1, alone=raw, without=1 - raw, se_alpha=np.full(n, 1e-9), round=1)
    found = facts_from([one])
    assert found.groups == ()
    assert found.suspects == ()  # the last one did no harm
    assert found.standings[-1].rank == n


def test_what_is_printable_stays_and_the_rest_is_spelled_out():
    assert printable("Zürich 漢 🏥") == "Zürich 漢 🏥"
    assert printable("a\tb\x1b\u2028\u202e") == r"a\tb\x1b\u2028\u202e"


@pytest.mark.parametrize(
    ("scale", "first", "gain"),
    [(1, "+0.2000 ± 0.0031", "gain +0.4000"), (1e-4, "+0.0000200 ± 0.0000003", "gain +0.0000400"),
     (1e5, "+20000.00 ± 306.16", "gain +40000.00")],
)  # fmt: skip
def test_numbers_have_the_digits_their_size_needs(scale, first, gain):
    one = reports()
    big = Reports(
        empty=one.empty * scale, grand=one.grand * scale, alone=one.alone * scale, clients=one.clients,
        without=one.without * scale, se_alpha=one.se_alpha * scale, round=1,
    )  # fmt: skip
    text = shown(facts_from([big]), width=120)
    assert first in text
    assert gain in text


@given(
    names=st.lists(st.text("abcXYZ 漢字é-'", min_size=1, max_size=40), min_size=1, max_size=6),
    width=st.integers(70, 140),  # narrower than the numbers need, rich cuts them and we do not
    data=st.data(),
)
def test_a_table_is_laid_out_as_rich_does(names, width, data):
    """Fast path against slow path: rich takes seconds for ten thousand rows."""
    numbers = st.text("0123456789+-.± ()", min_size=1, max_size=14)
    columns = {"client": [name.strip() or "x" for name in names]}
    for title in ("alpha", "rank", "share"):
        columns[title] = [data.draw(numbers).strip() or "-" for _ in names]
    table = Table(box=box.SIMPLE_HEAD)
    for title, cells in columns.items():
        longest = max(map(len, (title, *cells)))
        if title == "client":
            table.add_column(title, overflow="fold", min_width=min(12, max(map(cell_len, cells))))
        else:
            table.add_column(title, justify="right", no_wrap=True, min_width=longest)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console = Console(width=width, file=io.StringIO(), markup=False, emoji=False, highlight=False)
    console.print(table)
    assert table_lines(columns, width) == console.file.getvalue().split("\n")[:-1]
