"""A fault that the settings planted is told as that, before anything is said about who contributed what."""

import json
import shutil

import pytest

from command_line import call
from fedmerit.report.page.html import page
from fedmerit.report.text import unbroken
from fedmerit.verify import verify_folder

SAID = "Rehearsal: labels were replaced by random ones on purpose: 90% at {} (corruption.label_noise)."


@pytest.fixture
def folder(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def done(*arguments):
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.mark.parametrize("how", ["whole", "without settings", "damaged ledger"])
def test_the_page_says_it_above_the_headline(folder, how):
    if how == "without settings":
        (folder / "config.toml").unlink()
    elif how == "damaged ledger":
        (folder / "ledger.sqlite").unlink()
    text = page(folder)
    assert f'<p class="alarm">{unbroken(SAID.format("Dale"))}</p>' in text[: text.index("<h1>")]


def test_score_rewards_statements_and_verify_say_it(folder):
    said = SAID.format("Dale")
    assert done("score", folder).stdout.splitlines()[0] == said
    as_json = done("score", folder, "--format", "json")
    assert as_json.stderr.splitlines()[0] == said
    json.loads(as_json.stdout)
    assert done("rewards", folder, "--budget", "100.00", "--despite-doubts").stdout.splitlines()[0] == said
    for name in ("Abbey", "Bridge", "Castle", "Dale", "Elm"):
        assert (folder / "statements" / f"{name}.md").read_text().split("\n\n")[3] == said
        assert json.loads((folder / "statements" / f"{name}.json").read_text())["planted"] == said
    assert said in list(verify_folder(folder))
    (folder / "ledger.sqlite").unlink()
    assert done("score", folder).stdout.splitlines()[0] == said
