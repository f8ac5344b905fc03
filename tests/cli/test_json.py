"""What programs read: the output of `--format json`, against the schema in the documentation."""

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import jsonschema
import pytest

from fedmerit.simulation.run import run
from tiny import losing, tiny

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "output.schema.json").read_text())
NAMED = 'partition.names=["A", "B", "C", "D"]'
PLAIN = "scoring.utilities=['expected-accuracy']"


def valid(text, command):
    """Parse what a command printed, and check it against its part of the schema."""
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{command}: {name} is not JSON"))
    part = {"$ref": f"#/$defs/{command}", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(part).validate(found)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("json")
    truth = ['scoring.truth=["mr-shapley"]', 'scoring.utilities=["expected-accuracy", "neg-loss"]']
    with losing({"D": "1:report"}):
        for method in ("reports", "settled", "both"):
            run(tiny(NAMED, PLAIN, f"scoring.method={method}"), home / method)
        run(tiny(NAMED, PLAIN, "run.repeat=2"), home / "again")
        run(tiny(NAMED, *truth), home / "truth")
    return home


def test_the_schema_is_one_and_refuses_what_it_does_not_know():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match="extra"):
        valid('{"source": "x", "verified": true, "lines": [], "error": null, "extra": 1}', "verify")
    with pytest.raises(jsonschema.ValidationError, match="required"):
        valid('{"source": "x", "verified": true, "lines": []}', "verify")


@pytest.mark.parametrize("method", ["reports", "settled", "both", "truth"])
def test_scores_and_payouts(runs, fedmerit, method):
    out = fedmerit.said("score", runs / method, "--format", "json")
    found = valid(out, "score")
    assert found["clients"] == ["A", "B", "C", "D"]
    valid((runs / method / "scores.json").read_text(), "score")
    out = fedmerit("rewards", runs / method, "--budget", "100", "--dry-run", "--format", "json",
                   "--rule", "equal")[1]  # fmt: skip
    paid = valid(out, "rewards")
    assert set(paid["shares"]) == {"A", "B", "C", "D"}


def test_scores_and_payouts_of_a_file(fedmerit):
    file = ROOT / "examples" / "hospitals.csv"
    valid(fedmerit("score", file, "--format", "json")[1], "score")
    found = valid(fedmerit("rewards", file, "--budget", "100 EUR", "--format", "json")[1], "rewards")
    assert found["currency"] == "EUR"
    equal = fedmerit("rewards", file, "--budget", "100", "--rule", "equal", "--format", "json")[1]
    assert valid(equal, "rewards")["fence"] is None


def test_runs_that_are_compared(runs, fedmerit):
    out = fedmerit.said("compare", runs / "reports", runs / "again", "--format", "json")
    found = valid(out, "compare")
    assert [one["repeat"] for one in found["runs"]] == [1, 2]


@pytest.mark.parametrize("method", ["reports", "settled", "both"])
def test_a_plan(fedmerit, brief_plans, tmp_path, method):
    config = tmp_path / "my.toml"
    config.write_text(tiny(NAMED, "scoring.utilities=['brier']", f"scoring.method={method}").to_toml())
    code, out, err = fedmerit("plan", config, "--format", "json")
    assert (code, err) == (0, "")
    found = valid(out, "plan")
    assert found["samples"] == {"A": 60, "B": 50, "C": 70, "D": 40}
    assert (found["settlement"] is None) == (method == "reports")
    assert found["train_minutes"] > 0


def test_a_run_that_verifies_and_one_that_does_not(runs, fedmerit):
    code, out, err = fedmerit("verify", runs / "reports", "--format", "json")
    assert (code, err) == (0, "")
    found = valid(out, "verify")
    assert found["verified"]
    assert found["error"] is None
    table = fedmerit("verify", runs / "reports")[1]
    assert [line["text"] for line in found["lines"]] == table.splitlines()
    assert found["lines"][-1]["code"] == "head"
    with closing(sqlite3.connect(runs / "again" / "ledger.sqlite")) as db, db:
        db.execute("UPDATE records SET body = replace(body, 'a', 'b') WHERE kind = 'report'")
    code, out, err = fedmerit("verify", runs / "again", "--format", "json")
    assert code == 2
    found = valid(out, "verify")
    assert not found["verified"]
    assert found["error"]["record"] > 1
    assert err == f"error: {found['error']['text']}\n"


def test_the_page_on_json_names_every_field(runs):
    page = (ROOT / "docs" / "json.md").read_text()
    told = set(re.findall(r"`(\w+)`", page))
    for command in ("score", "rewards", "compare", "plan", "verify"):
        assert f"## `fedmerit {command}" in page
        assert set(SCHEMA["$defs"][command]["properties"]) <= told, command
