"""What the documents say can be run, and numbers they quote are in committed results."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FEDMERIT = [sys.executable, "-c", "from fedmerit.cli import main; main()"]


def blocks(language):
    """Fenced blocks of one language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_readme_runs_and_prints_what_its_comments_say(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    promised = re.findall(r"^print\(.*?\)\s+# (.+)$", code, flags=re.MULTILINE)
    assert promised
    for line in promised:
        assert line in printed


def test_commands_in_the_readme_run_as_written(tmp_path):
    """Those on files; runs are made short, what makes an environment is left to make itself."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs").mkdir()
    commands = [
        line.partition("#")[0].strip()
        for block in blocks("")
        for line in block.splitlines()
        if line.startswith("fedmerit ")
    ]
    assert len(commands) >= 6
    tiny = ["training.rounds=1", "training.local_epochs=1", "model.name=mlp", "data.test_size=50"]
    for command in commands:
        arguments = shlex.split(command)[1:]
        if arguments[0] in ("run", "plan"):
            arguments += [part for setting in tiny for part in ("--set", setting)]
        done = subprocess.run(
            [*FEDMERIT, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout


def test_every_number_in_the_speed_table_is_in_a_committed_result():
    """A row ends with the result file it comes from, and its numbers are found there when rounded alike."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(benchmarks/results/\S+)` \|$", README, flags=re.MULTILINE)
    assert len(rows) >= 4
    for what, claim, file in rows:
        text = (ROOT / file).read_text()
        known = [
            float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", json.dumps(json.loads(text)))
        ]
        for number in re.findall(r"\d+\.\d+", claim):
            digits = len(number.partition(".")[2])
            near = [
                value
                for value in known
                for scale in (1, 100)
                if round(value * scale, digits) == float(number)
            ]
            assert near, f"{what}: {number} is not in {file}"


def test_the_flower_guide_says_what_was_measured():
    found = json.loads((ROOT / "benchmarks/results/flower.json").read_text())
    guide = (ROOT / "docs/flower.md").read_text()
    for kind, row in found["exchanges"].items():
        assert re.search(rf"^\| {kind} \|.*\| {row['bytes_up']:,} \|$", guide, flags=re.MULTILINE), kind
    assert f"{found['ours_seconds']:.0f} s for a round" in guide
    assert f"{found['share_extrapolated']:.1%}".replace("%", " %") in guide


def test_the_flower_diff_is_what_the_example_does():
    """Every name in the added lines is used by the example app, and both documents show the same diff."""
    app = ROOT / "examples/flower-hospitals/hospitals"
    code = (app / "client_app.py").read_text() + (app / "server_app.py").read_text()
    diffs = [
        [line[1:].strip() for line in block.splitlines() if line.startswith("+")]
        for document in (README, (ROOT / "docs/flower.md").read_text())
        for block in re.findall(r"```diff\n(.*?)```", document, flags=re.DOTALL)
    ]
    assert len(diffs) == 2
    assert diffs[0] == diffs[1]
    assert len(diffs[0]) <= 5
    assert diffs[0][0] in code
    for argument in re.findall(r"(\w+)=", " ".join(diffs[0])):
        assert f"{argument}=" in code


def test_every_file_the_documents_name_exists():
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for name in re.findall(
            r"`((?:docs|examples|experiments|benchmarks|tests)/[\w./-]+)`", document.read_text()
        ):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


@pytest.mark.slow
def test_training_on_the_test_set_pays_if_the_pool_is_fixed_and_not_if_slices_stay_fresh(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_on_test

    def share(reveal, cheating):
        return train_on_test.share_of_cheat(0, reveal, cheating=cheating)

    fixed = share("fixed", True) / share("fixed", False)
    fresh = share("per-round", True) / share("per-round", False)
    assert fixed > 1.5
    assert fresh < 1.3
