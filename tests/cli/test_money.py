"""Payouts on the command line: a row for everybody on the roster, and only what is recorded is printed."""

import csv
import io
import json
import shutil

import pytest

from command_line import call
from fedmerit.cli.base import errors_as_messages
from fedmerit.simulation.run import run
from runs import read_run
from tiny import tiny

SILENT = """round,client,silent,empty,grand,alone,without
1,A,,0.1,0.4,0.2,0.3
1,B,,0.1,0.4,0.2,0.3
1,Eve,yes,0.1,0.4,,
2,A,,0.4,0.6,0.5,0.5
2,B,,0.4,0.6,0.5,0.5
2,Eve,yes,0.4,0.6,,
"""


def failure(*arguments):
    result = call(*arguments)
    assert result.exception is not None
    with pytest.raises(SystemExit), errors_as_messages():
        raise result.exception
    return str(result.exception)


@pytest.fixture
def silent(tmp_path):
    path = tmp_path / "silent.csv"
    path.write_text(SILENT)
    return path


@pytest.mark.parametrize("rule", ["fair", "equal", "impartial"])
def test_who_never_reported_has_a_row_with_nothing_and_a_reason(silent, rule):
    reason = (
        "member 'Eve' was in the sum but never reported: it has no score and is paid nothing under any rule"
    )
    when = "member 'Eve' was in the sum but sent no report: rounds 1 and 2"
    asked = ("rewards", silent, "--budget", "1000", "--rule", rule)
    text = call(*asked).output
    assert ["Eve", "0.00%", "0.00"] in [line.split()[:3] for line in text.splitlines()]
    assert f"note: {reason}" in text
    assert f"note: {when}" in text
    plain = json.loads(call(*asked, "--format", "json").stdout)
    assert (plain["shares"]["Eve"], plain["payouts"]["Eve"]) == (0.0, "0.00")
    assert {reason, when} <= set(plain["notes"])
    rows = csv.DictReader(io.StringIO(call(*asked, "--format", "csv").stdout))
    assert [(row["client"], row["payout"]) for row in rows][-1] == ("Eve", "0.00")


def test_advice_names_the_option_and_the_argument(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("round,client,empty,grand,alone,without\n1,A,0.5,0.4,0.45,0.45\n1,B,0.5,0.4,0.45,0.45\n")
    advice = "; --rule equal pays everybody alike"
    assert advice in failure("rewards", path, "--budget", "1", "--despite-doubts")
    assert advice in call("score", path).output
    assert "0.50" in call("rewards", path, "--budget", "1", "--rule", "equal").output


def test_a_decision_records_the_currency_of_its_budget(tmp_path):
    folder = tmp_path / "run"
    run(tiny("training.rounds=1"), folder)
    paid = call("rewards", folder, "--budget", "1.234,50 EUR", "--rule", "equal").output
    assert "budget 1,234.50 EUR, rule equal" in paid
    made = read_run(folder)[1][-1]
    assert (made.heading.currency, made.paid.currency) == ("EUR", "EUR")
    assert "the division of 1,234.50 EUR by the rule equal" in call("verify", folder).output
    other = call("rewards", folder, "--budget", "1234.5 EUR", "--rule", "equal", "--currency", "USD")
    assert "--budget: expected an amount in USD, got one in EUR" in str(other.exception)
    again = call("rewards", folder, "--budget", "1234.5", "--rule", "equal", "--currency", "EUR").output
    assert "decision 1, record" in again
    assert "is unchanged" in again
    shutil.rmtree(folder / "keys")
    result = call("rewards", folder, "--budget", "10", "--rule", "equal")
    assert result.output == ""
    assert "only the holder of the server's key can record a decision" in str(result.exception)


@pytest.mark.parametrize("options", [["--score", "LOO"], ["--missing", "own-mean"]])
def test_what_a_csv_of_scores_cannot_hold_is_refused(silent, options):
    said = failure("score", silent, "--format", "csv", *options)
    assert said.startswith(f"{options[0]}: expected --format table or json, got csv")
    assert call("score", silent, "--format", "json", *options).exit_code == 0


@pytest.mark.parametrize("option", ["--floor", "--cap"])
def test_a_floor_is_a_number_as_one_writes_it(silent, option):
    result = call("rewards", silent, "--budget", "1", option, "0_5")
    assert result.exit_code == 2
    assert "0_5" in result.output
    assert call("rewards", silent, "--budget", "1", option, ".5").exit_code == 0


def test_a_currency_may_be_in_small_letters_as_in_an_amount(silent):
    for given in (["--budget", "100 eur"], ["--budget", "100", "--currency", "eur"]):
        plain = json.loads(call("rewards", silent, *given, "--rule", "equal", "--format", "json").stdout)
        assert plain["currency"] == "EUR"
    assert "in USD, got one in EUR" in failure("rewards", silent, "--budget", "1 eur", "--currency", "usd")
    refused = failure("rewards", silent, "--budget", "100", "--currency", "euros")
    assert refused == "--currency: expected a code such as EUR, or a sign such as $, got 'EUROS'"


def test_a_euro_has_a_code_and_a_sign(silent):
    for budget, said in (("100 €", "€"), ("100 EUR", "€"), ("100 €", "EUR")):
        result = call("rewards", silent, "--budget", budget, "--currency", said)
        assert f"budget 100.00 {said}, rule" in result.output
    assert "expected an amount in USD, got one in $" in failure(
        "rewards", silent, "--budget", "100 $", "--currency", "USD"
    )
