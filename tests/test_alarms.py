"""What is in doubt is said first, everywhere, by one rule; and is not paid from unless somebody says so."""

import csv
import io
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from typer.testing import CliRunner

from fedmerit.alarms import balance, check_payable, doubts, lower_is_better
from fedmerit.cli import app
from fedmerit.document import as_csv, document
from fedmerit.errors import DoubtfulShares, UndefinedShares
from fedmerit.page import words
from fedmerit.page.html import facts_of, page
from fedmerit.types import Reports
from games import two_additive_tables

ROOT = Path(__file__).parents[1]
CHOOSING = ROOT / "docs" / "choosing.md"
HOSPITALS = ROOT / "examples" / "hospitals.csv"
BOTH_NUMBERS = "The contributions add up to +2.768, but the model gained +0.5482"
SWAPPED = "With alone and without swapped they would add up to +0.5208: the two columns are probably swapped."


def call(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def turned(one):
    return replace(one, alone=one.without, without=one.alone)


def of(alphas, gain, *, se=None, **other):
    """One round in which LOO and IOI are these numbers."""
    x = np.array(alphas, dtype=float)
    errors = None if se is None else [se] * len(x)
    return Reports(empty=1.0, grand=1.0 + gain, alone=1 + x, without=1 + gain - x, se_alpha=errors, **other)


def codes(*rounds, **how):
    return [(one.code, one.gross) for one in doubts(rounds, **how)]


def file_of(folder, *rounds, name="reports.csv"):
    path = folder / name
    path.write_text(as_csv(document(rounds)))
    return path


@pytest.fixture
def swapped(tmp_path):
    """The example, with the heads of two columns swapped."""
    path = tmp_path / "swapped.csv"
    path.write_text(HOSPITALS.read_text().replace("alone,without", "without,alone"))
    return path


# ----------------------------------------------------------------------------------------------- the rule


@given(two_additive_tables())
def test_whatever_adds_up_is_not_doubted_for_its_sum(table):
    """In games of at most pairs alpha is the Shapley value, which adds up to the gain."""
    found = codes(Reports.from_table(table), Reports.from_table(table))
    assert found == ([("fell", False)] if table.gain < 0 else [])


@given(two_additive_tables(min_clients=3))
def test_swapped_columns_are_named_from_three_members_on(table):
    """Each alpha becomes gain - alpha: N - 1 times the gain in all, which swapping back mends exactly."""
    assume(table.gain != 0)
    found = doubts([turned(Reports.from_table(table))])
    assert (found[0].code, found[0].gross) == ("swapped", True)
    assert f"add up to {(table.n - 1) * table.gain:+.4g}" in found[0].title
    assert f"would add up to {table.gain:+.4g}" in found[0].text


@given(two_additive_tables(min_clients=2, max_clients=2))
def test_of_two_members_swapping_changes_no_sum(table):
    one = Reports.from_table(table)
    assert balance([one]).said == balance([turned(one)]).said == table.gain


@pytest.mark.parametrize(
    ("alphas", "gain", "expected"),
    [
        ([0.4, 0.4, 0.4], 1.0, []),  # 120 %, up to rounding
        ([0.4, 0.41, 0.4], 1.0, [("strays", False)]),
        ([0.3, 0.3, 0.19], 1.0, [("strays", False)]),  # 79 %
        ([0.25, 0.25, 0.0], 1.0, [("strays", False)]),  # half
        ([0.25, 0.24, 0.0], 1.0, [("strays", True)]),
        ([0.4] * 4, 1.0, [("strays", False)]),  # 160 % of four; swapped it would be 240 %
        ([0.41] * 5, 1.0, [("strays", True)]),  # 205 % of five; swapped it would be 295 %
        ([0.6, 0.7, 0.7], 1.0, [("swapped", True)]),  # 200 % of three: swapped it would be 100 %
        ([-0.1, -0.1, 0.1], 1.0, [("strays", True)]),  # the wrong sign
        ([0.1, 0.1, 0.0], 0.0, [("strays", True)]),  # of no gain
        ([0.0, 0.0, 0.0], 0.0, []),
        ([-0.5, -0.25, -0.25], -1.0, [("fell", False)]),
        ([-0.2, -0.1, -0.1], -1.0, [("strays", True), ("fell", False)]),
        ([0.1, 0.1, 0.1], -1.0, [("strays", True), ("fell", False)]),
        ([0.5, 0.0], 1.0, [("strays", False)]),  # of two members, swapping changes no sum's distance
    ],
)
def test_how_far_is_far_without_errors(alphas, gain, expected):
    assert codes(of(alphas, gain)) == expected


@pytest.mark.parametrize(
    ("se", "expected"), [(0.0, [True]), (0.016, [True]), (0.017, [False]), (0.099, [False]), (0.101, [])]
)
def test_chance_is_two_standard_errors_of_everybody(se, expected):
    """0.4 of 1.0 by three members: 0.6 less than the gain, 0.1 less than half of it; 6 se may be chance."""
    assert [gross for _, gross in codes(of([0.2, 0.2, 0.0], 1.0, se=se))] == expected


def test_what_is_taken_for_chance_is_said():
    without, with_ = (str(doubts([of([0.1, 0.1, 0.1], 1.0, se=se)])[0]) for se in (None, 0.01))
    assert "no standard errors were reported, so none of the difference is taken for chance" in without
    assert "standard errors explain at most 0.06 of the difference" in with_


def test_errors_of_rounds_on_one_slice_are_those_of_the_sum():
    """Ten rounds of 3 * 0.01 each: 0.6 where they add up, 0.19 where slices are independent."""
    alphas = [0.03, 0.02, 0.02]
    one, other = (
        balance([of(alphas, 0.1, se=0.01, slice="s" if same else str(k), round=k) for k in range(1, 11)])
        for same in (True, False)
    )
    assert one.error == pytest.approx(0.6)
    assert other.error == pytest.approx(0.6 / 10**0.5)
    assert (one.said, one.gain) == pytest.approx((0.7, 1.0))
    assert (one.strays, other.strays) == (False, True)


def test_rounds_without_everybodys_report_are_not_judged():
    """What a silent member added is in no sum."""
    partly = of([0.2, 0.1], 1.0, silent=("Eve",), round=1)
    assert codes(partly) == [("unchecked", False)]
    assert codes(partly, of([0.5, 0.5], 1.0, round=2)) == []
    assert codes(partly, of([0.1, 0.1], 1.0, round=2)) == [("strays", True)]
    assert (
        "in the rounds that everybody reported on" in doubts([partly, of([0.1, 0.1], 1.0, round=2)])[0].title
    )


def test_the_renormalised_game_cannot_be_judged_by_its_sum():
    assert codes(of([1.0, 1.0, 1.0], 1.0), game="renormalised") == [("renormalised", False)]
    assert codes(of([1.0, 1.0, 1.0], 1.0), game="additive")[0][1]


def test_only_gross_doubts_stop_a_payment_and_the_equal_split_has_none():
    mild, gross = doubts([of([0.3, 0.3, 0.1], 1.0)]), doubts([of([0.1, 0.1, 0.1], 1.0)])
    check_payable(mild, "fair", despite=False)
    check_payable(gross, "equal", despite=False)
    check_payable(gross, "fair", despite=True)
    for rule in ("fair", "fenced", "impartial"):
        with pytest.raises(
            DoubtfulShares, match=re.escape("add up to +0.3, but the model gained +1.")
        ) as caught:
            check_payable(gross, rule, despite=False)
        assert caught.value.codes == ("strays",)
        assert isinstance(caught.value, UndefinedShares)


def measured():
    """Utility and rounds of every committed run of the additive game."""
    for file in sorted((ROOT / "experiments" / "results").glob("*.json")):
        content = json.loads(file.read_text())
        if content.get("settings", {}).get("scoring", {}).get("game", "additive") != "additive":
            continue
        for utility, part in content.get("utilities", {}).items():
            given = (one.get("reports", one) for one in part["rounds"])
            yield (
                utility,
                [
                    Reports(
                        **{key: one[key] for key in ("empty", "grand", "alone", "without", "se_alpha")},
                        se_alpha_total=one.get("se_alpha_total"),
                        slice=one.get("slice"),
                        round=k,
                    )
                    for k, one in enumerate(given, start=1)
                ],
            )


def test_honest_runs_on_real_images_are_paid_and_swapped_ones_are_not():
    """The bounds were chosen by these runs; docs/choosing.md states the numbers."""
    counts = {}
    for utility, rounds in measured():
        honest = [one for one in doubts(rounds) if one.code in ("strays", "swapped")]
        wrong = doubts([turned(one) for one in rounds])
        assert not any(one.code == "swapped" for one in honest)
        found = (1, len(honest), any(one.gross for one in honest), any(one.gross for one in wrong))
        counts[utility] = np.add(counts.get(utility, 0), found)
    page = CHOOSING.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    stated = {name: tuple(map(int, each)) for name, *each in rows}
    assert {name: tuple(map(int, each)) for name, each in counts.items()} == stated
    runs, _, refused, swapped = stated["expected-accuracy"]  # the default
    assert refused == 0
    assert swapped > 0.9 * runs


# ------------------------------------------------------------------------------------ lower is better


@pytest.mark.parametrize(
    "name",
    [
        "rmse", "RMSE", "val_rmse", "test-loss", "mse", "MAE", "mean absolute error", "logLoss", "MSELoss",
        "cross-entropy", "perplexity", "error_rate", "top-1-error", "measures:nll", "WER", "val.loss",
    ],
)  # fmt: skip
def test_names_of_which_less_is_better(name):
    assert lower_is_better(name)


@pytest.mark.parametrize(
    "name",
    [
        None, "", "accuracy", "expected-accuracy", "balanced-accuracy", "brier", "dice", "neg-loss", "-rmse",
        "neg_mse", "negative log loss", "neg_mean_squared_error", "negRMSE", "minus_loss", "−mae", "1-error",
        "1 - rmse", "1/loss", "one-minus-error", "exp(-loss)", "losses:accuracy", "lossless", "auc", "f1",
        "error-free", "loss reduction", "terror", "glossary", "score",
    ],
)  # fmt: skip
def test_names_of_which_more_is_better(name):
    assert not lower_is_better(name)


def rmse(name, low=4.0, high=5.0):
    """Three members that take a measure from high to low, in shares of 0.5, 0.3 and 0.2."""
    parts = (high - low) * np.array([0.5, 0.3, 0.2])
    return Reports(empty=high, grand=low, alone=high - parts, without=low + parts, utility=name, round=1)


def test_a_falling_measure_of_which_less_is_better_is_told_first_and_not_paid_by(tmp_path):
    path = file_of(tmp_path, rmse("val_rmse"))
    told = (
        "WARNING: The utility 'val_rmse' fell by 1, and higher counts as better. By its name lower is better"
    )
    assert call("score", path).output.startswith(told)
    for more in ((), ("--on-undefined", "equal"), ("--score", "IOI"), ("--dry-run",)):
        result = call("rewards", path, "--budget", "10", *more)
        assert isinstance(result.exception, DoubtfulShares)
        assert result.stdout == ""
        assert "report -x in its place, or 1 - x if it lies in [0, 1]. --despite-doubts" in str(
            result.exception
        )
        assert "positive part" not in str(result.exception)
    assert words.title(facts_of(path)) == "The utility 'val_rmse' fell by 1, and higher counts as better"
    paid = call("rewards", path, "--budget", "10", "--on-undefined", "equal", "--despite-doubts")
    assert paid.exit_code == 0
    assert paid.output.startswith(told)
    mended = replace(
        rmse("neg_rmse"), empty=-5.0, grand=-4.0, alone=-rmse("x").alone, without=-rmse("x").without
    )
    assert doubts([mended]) == ()
    shares = json.loads(
        call("rewards", file_of(tmp_path, mended), "--budget", "10", "--format", "json").stdout
    )["shares"]
    assert list(shares.values()) == pytest.approx([0.5, 0.3, 0.2])


def test_such_a_name_that_rises_and_any_name_that_falls_are_warnings(tmp_path):
    rose, fell, unnamed = rmse("loss", 5.0, 4.0), rmse("quality"), rmse(None)
    assert codes(rose) == [("lower-rose", False)]
    assert "If it is negated already, let its name say so" in doubts([rose])[0].text
    assert codes(fell) == codes(unnamed) == [("fell", False)]
    assert "Either the model got worse, or lower is better in this measure" in doubts([fell])[0].text
    assert call("rewards", file_of(tmp_path, rose), "--budget", "10").exit_code == 0
    refused = str(call("rewards", file_of(tmp_path, fell), "--budget", "10").exception)
    assert refused.startswith(
        "The utility 'quality' fell by 1, and higher counts as better. Either the model"
    )
    assert refused.endswith("--on-undefined equal or zero would say what to do then")


# ------------------------------------------------------------------------------------------- everywhere


def test_the_example_is_not_doubted():
    assert call("score", HOSPITALS).output.count("WARNING") == 0
    assert call("rewards", HOSPITALS, "--budget", "10").output.count("WARNING") == 0
    assert words.title(facts_of(HOSPITALS)) == words.headline(facts_of(HOSPITALS))
    assert 'class="alarm"' not in page(HOSPITALS)


def test_swapped_columns_are_told_first_by_score(swapped):
    first = call("score", swapped).output.splitlines()[0]
    assert first.startswith(f"WARNING: {BOTH_NUMBERS}. That is 505% of the gain; standard errors explain at")
    assert first.endswith(SWAPPED)
    plain = call("score", swapped, "--format", "json")
    assert json.loads(plain.stdout)["cumulative"]
    assert plain.stderr.startswith(f"WARNING: {BOTH_NUMBERS}")


@pytest.mark.parametrize("score", ["ALPHA", "LOO", "IOI"])
@pytest.mark.parametrize("rule", ["fair", "fenced", "impartial"])
def test_swapped_columns_are_paid_by_no_score(swapped, score, rule):
    result = call("rewards", swapped, "--budget", "1000", "--score", score, "--rule", rule)
    assert isinstance(result.exception, DoubtfulShares)
    assert result.exception.codes == ("swapped",)
    assert result.stdout == ""
    assert str(result.exception).startswith(f"nothing is paid: {BOTH_NUMBERS}. ")
    assert SWAPPED in str(result.exception)
    assert "--despite-doubts pays all the same" in str(result.exception)


def test_despite_doubts_pays_and_says_so(swapped):
    command = ("rewards", swapped, "--budget", "1000", "--despite-doubts")
    assert call(*command).output.startswith(f"WARNING: {BOTH_NUMBERS}")
    plain = call(*command, "--format", "json")
    assert json.loads(plain.stdout)["notes"][0].startswith(BOTH_NUMBERS)
    assert plain.stderr.startswith(f"WARNING: {BOTH_NUMBERS}")
    rows = csv.DictReader(io.StringIO(call(*command, "--format", "csv").stdout))
    assert next(iter(rows))["client"] == "Abbey"
    equal = call("rewards", swapped, "--budget", "600", "--rule", "equal")  # it pays by no score
    assert (equal.exit_code, equal.output.count("100.00")) == (0, 6)
    assert equal.output.startswith(f"WARNING: {BOTH_NUMBERS}")


def test_the_page_opens_with_the_doubt_and_praises_nobody(swapped):
    text = page(swapped)
    assert f"<title>{BOTH_NUMBERS}</title>" in text
    assert f"<h1>{BOTH_NUMBERS}</h1>" in text
    assert SWAPPED in text.split('<p class="lede">')[0]
    assert "contributed most" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "These reports are in doubt: see the top of this page." in text.split('id="paid"')[1]
    assert call("page", swapped).output.splitlines()[1].startswith(f"WARNING: {BOTH_NUMBERS}")


def test_a_mild_doubt_stands_above_the_headline(tmp_path):
    path = file_of(tmp_path, of([0.5, 0.2, 0.0], 1.0, se=0.01, round=1, slice="s"))
    opening = unescape(page(path).split("<header>")[1].split("<nav")[0])
    doubt, headline = "The contributions add up to +0.7, but the model gained +1.", "contributed most</h1>"
    assert 0 < opening.index(doubt) < opening.index(headline)
    assert call("rewards", path, "--budget", "10").output.startswith(f"WARNING: {doubt[:-1]}")
