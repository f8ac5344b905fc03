"""A fault that the settings planted is told as that, before anything is said about who contributed what."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from fedmerit.cli import app
from fedmerit.report.page.html import facts_of, page
from fedmerit.report.text import unbroken
from fedmerit.verify import verify_folder

SAID = "Rehearsal: labels were replaced by random ones on purpose: 90% at {} (corruption.label_noise)."


@pytest.fixture
def folder(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def call(*arguments):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.stderr
    return done


@pytest.mark.parametrize("how", ["whole", "without settings", "damaged ledger"])
@pytest.mark.parametrize("pseudonyms", [False, True])
def test_the_page_says_it_above_the_headline(folder, how, pseudonyms):
    if how == "without settings":
        (folder / "config.toml").unlink()
    elif how == "damaged ledger":
        (folder / "ledger.sqlite").unlink()
    text = page(folder, pseudonyms=pseudonyms)
    shown = facts_of(folder, pseudonyms=pseudonyms).source.names["Dale"]
    assert (shown == "Dale") != pseudonyms
    assert f'<p class="alarm">{unbroken(SAID.format(shown))}</p>' in text[: text.index("<h1>")]
    if pseudonyms:
        assert not re.search(r"\bDale\b", text)


def test_score_rewards_statements_and_verify_say_it(folder):
    said = SAID.format("Dale")
    assert call("score", folder).stdout.splitlines()[0] == said
    as_json = call("score", folder, "--format", "json")
    assert as_json.stderr.splitlines()[0] == said
    json.loads(as_json.stdout)
    assert call("rewards", folder, "--budget", "100.00", "--despite-doubts").stdout.splitlines()[0] == said
    for name in ("Abbey", "Bridge", "Castle", "Dale", "Elm"):
        assert (folder / "statements" / f"{name}.md").read_text().split("\n\n")[2] == said
        assert json.loads((folder / "statements" / f"{name}.json").read_text())["planted"] == said
    assert said in list(verify_folder(folder))
    (folder / "ledger.sqlite").unlink()
    assert call("score", folder).stdout.splitlines()[0] == said


def test_reports_are_called_signed_nowhere_where_nobody_signed(tmp_path):
    path = tmp_path / "reports.csv"
    path.write_text("round,client,empty,grand,alone,without\n1,A,0.1,0.5,0.3,0.3\n1,B,0.1,0.5,0.3,0.3\n")
    text = page(path)
    assert "signed" not in re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
    assert "Ranks and payouts follow raw contributions with their sign" in text
