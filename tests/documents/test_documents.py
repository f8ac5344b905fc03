"""What the documents say can be run, and numbers they quote are in committed results."""

import ast
import json
import re
import shlex
import shutil
import sys
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import typer
from docs.building import tables

import fedmerit as fm
from fedmerit.cli import app
from fedmerit.config import Config, from_dict
from fedmerit.scoring.doubts import Code
from sources import calls, texts

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = (README, ROOT / "CONTRIBUTING.md", *PAGES)
FOR_USERS = (README, *PAGES)
TINY = ("training.rounds=1", "training.local_epochs=1", "model.name=mlp", "data.test_size=50")


@dataclass(frozen=True)
class Block:
    """A fenced block: commands (no language), or code; ``reason`` is why it is not run."""

    document: str
    language: str
    text: str
    reason: str | None

    def __str__(self):
        return self.document


def blocks(document):
    fenced = re.findall(
        r"(?:<!-- not run: (.+?) -->\n)?^```(\w*)\n(.*?)^```$",
        document.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    name = str(document.relative_to(ROOT))
    return [Block(name, language, text, reason or None) for reason, language, text in fenced]


def all_blocks(language):
    return [block for document in DOCUMENTS for block in blocks(document) if block.language == language]


def anchors(document):
    """The headings of a document as links name them."""
    whole = tables.filled(document.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$", "", whole, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(document):
    lines = [
        line.partition("#")[0].strip()
        for block in blocks(document)
        if block.language == "" and block.reason is None
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line]


def test_every_block_is_of_a_kind_that_is_checked():
    kinds = {block.language for document in DOCUMENTS for block in blocks(document)}
    assert kinds <= {"", "python", "diff", "toml"}
    for block in all_blocks("toml"):
        assert from_dict(tomllib.loads(block.text)) != Config()
    assert len(all_blocks("python")) > 12


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_table_has_one_head_and_rows_of_its_width(document):
    """A blank line within a table would show the rest of it as text."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^[ ]*\|.*\n?)+", text, flags=re.MULTILINE):
        head, line, *rows = table.splitlines()
        cells = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in (head, line, *rows)}
        assert re.fullmatch(r" *\|[-:| ]+\|", line), head
        assert len(cells) == 1, head
        assert rows, head


@pytest.mark.parametrize("block", [one for one in all_blocks("python") if one.reason is None], ids=str)
def test_python_runs_and_prints_what_its_comments_say(block, capsys):
    exec(compile(block.text, block.document, "exec"), {})
    printed = capsys.readouterr().out
    promised = re.findall(r"^print\(.*?\)\s+# (.+)$", block.text, flags=re.MULTILINE)
    assert promised
    for line in promised:
        assert line in printed


def shortened(arguments):
    if arguments[0] in ("run", "plan"):
        return [*arguments, *(part for setting in TINY for part in ("--set", setting))]
    return arguments


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """The run folder that pages speak of without making it."""
    from fedmerit.simulation.run import run

    folder = tmp_path_factory.mktemp("documents") / "first"
    run(from_dict({}, TINY), folder)
    return folder


@pytest.mark.parametrize(
    "document", [path for path in FOR_USERS if commands(path)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_commands_run_as_written(document, tmp_path, monkeypatch, fedmerit, brief_plans, a_run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = commands(document)
    assert all(line.startswith("fedmerit ") for line in lines), lines
    if not any(line.startswith("fedmerit run") for line in lines):
        shutil.copytree(a_run, tmp_path / "runs" / "first")
    for line in lines:
        assert fedmerit.said(*shortened(shlex.split(line)[1:]))


class Recorder:
    """Stands in for MLflow, for Weights & Biases and for TensorBoard's writer."""

    def __init__(self):
        self.points = []
        self.start_run = self.init = self.SummaryWriter = lambda *_, **__: self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def log_metric(self, name, value, step):
        self.points.append((name, value, step))

    def log(self, point):
        number = point.pop("round")
        self.points.append((*point.popitem(), number))

    def add_scalar(self, name, value, number):
        self.points.append((name, value, number))


def test_the_recipe_for_curves_sends_every_score_of_every_round(tmp_path, monkeypatch, a_run):
    (recipe,) = (block for block in all_blocks("python") if block.reason is not None)
    shutil.copytree(a_run, tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    tools = {name: Recorder() for name in ("mlflow", "wandb", "torch.utils.tensorboard")}
    for name, tool in tools.items():
        monkeypatch.setitem(sys.modules, name, tool)
    exec(compile(recipe.text, recipe.document, "exec"), {})
    run = fm.load(tmp_path / "runs" / "first")
    expected = [
        (f"{one.scores.score}/{client}", value, one.number)
        for one in run.rounds
        for client, value in one.scores.as_dict().items()
    ]
    assert len(expected) == len(run.clients) * len(run.rounds)
    for tool in tools.values():
        assert tool.points == expected


def test_what_is_not_run_says_why_and_names_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for block in (block for kind in ("", "python") for block in all_blocks(kind) if block.reason is not None):
        assert len(block.reason) > 20, block
        for named in re.findall(r"tests/\S+\.py", block.reason):
            assert (ROOT / named).exists(), named
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", document.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{document.name}: make {target}"


def test_commands_within_sentences_exist_with_their_options():
    every = typer.main.get_command(app)
    found = 0
    for document in DOCUMENTS:
        for text in re.findall(r"`fedmerit ([^`]+)`", document.read_text()):
            command, words = every, text.split()
            while isinstance(command, click.Group) and words and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert command is not every or words[0] in {"COMMAND", *known}, f"{document.name}: {text}"
            assert {word for word in words if word.startswith("--")} <= known, f"{document.name}: {text}"
            found += 1
    assert found > 20


def test_the_list_of_commands_is_complete():
    page = (ROOT / "docs/commands.md").read_text()
    every = typer.main.get_command(app)
    for name, command in every.commands.items():
        for sub in command.commands if isinstance(command, click.Group) else ("",):
            row = re.search(rf"^\| `fedmerit {f'{name} {sub}'.strip()}\b.*$", page, flags=re.MULTILINE)
            assert row, f"fedmerit {name} {sub} is missing"
            known = {option for parameter in command.params for option in parameter.opts}
            assert isinstance(command, click.Group) or set(re.findall(r"--[\w-]+", row[0])) <= known


@pytest.mark.parametrize("document", [README, ROOT / "docs/speed.md"], ids=lambda path: path.name)
def test_every_number_in_a_speed_table_is_in_a_committed_result(document):
    """A row ends with the result file it comes from, and its numbers are found there when rounded alike."""
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| `(benchmarks/results/\S+)` \|$", document.read_text(), flags=re.MULTILINE
    )
    assert len(rows) >= 2
    for what, claim, file in rows:
        text = (ROOT / file).read_text()
        known = [float(one) for one in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", json.dumps(json.loads(text)))]
        for number in re.findall(r"\d+\.\d+", claim):
            digits = len(number.partition(".")[2])
            near = {round(value * scale, digits) for value in known for scale in (1, 100)}
            assert float(number) in near, f"{what}: {number} is not in {file}"


def test_the_flower_guide_says_what_was_measured():
    found = json.loads((ROOT / "benchmarks/results/flower.json").read_text())
    guide = (ROOT / "docs/flower.md").read_text()
    for kind, row in found["exchanges"].items():
        assert re.search(rf"^\| {kind} \| {row['bytes_up']:,} \|$", guide, flags=re.MULTILINE), kind
    assert f"{found['ours_seconds']:.0f} s for a round" in guide
    assert f"{found['share_extrapolated']:.1%}".replace("%", " %") in guide
    real = json.loads((ROOT / "benchmarks/results/flower_deployment.json").read_text())["exchanges"].values()
    times = [row["deployment_seconds"] for row in real]
    assert f"{min(times):.1f} to {max(times):.1f} s" in guide


def test_the_flower_diff_is_what_the_example_does():
    """Every name in the added lines is used by the example app, and both documents show the same diff."""
    example = ROOT / "examples/flower-hospitals/hospitals"
    code = "".join((example / f"{name}.py").read_text() for name in ("task", "secured", "server_app"))
    diffs = [
        [line[1:].strip() for line in block.text.splitlines() if line.startswith("+")]
        for block in all_blocks("diff")
        if "fedmerit.flower" in block.text
    ]
    assert len(diffs) == 2
    assert diffs[0] == diffs[1]
    assert len(diffs[0]) <= 6
    assert diffs[0][0] in code
    assert diffs[0][1].replace("fedmerit.flower.", "") in code
    assert "".join(diffs[0][2].split()).removesuffix(")") in "".join(code.split())
    for argument in re.findall(r"(\w+)=", " ".join(diffs[0])):
        assert f"{argument}=" in code


def test_the_nvflare_diff_is_what_the_example_does():
    example = ROOT / "examples/nvflare-hospitals"
    code = (example / "hospitals/task.py").read_text() + (example / "demo.py").read_text()
    (block,) = [block for block in all_blocks("diff") if "fedmerit.nvflare" in block.text]
    added = [line[1:].strip() for line in block.text.splitlines() if line.startswith("+")]
    assert len(added) <= 8
    for name in re.findall(r"def (\w+)|(\w+)=", " ".join(added)):
        assert re.search(rf"(def {name[0]}\(|\b{name[1]}=)" if name[0] else rf"\b{name[1]}=", code), name


def test_the_answers_of_the_findings_are_on_their_page():
    page = tables.filled((ROOT / "docs/findings.md").read_text(encoding="utf-8"))
    assert re.findall(r"^(\d)\. \w", page, flags=re.MULTILINE) == list("123456789")


def test_every_error_and_every_code_is_in_the_index():
    told = tomllib.loads((ROOT / "docs" / "errors.toml").read_text(encoding="utf-8"))
    assert list(told["classes"]) == list(tables.classes())
    listed = {(name, code) for name, codes in told["codes"].items() for code in codes}
    listed |= {("LedgerError", code) for name, code in listed if name == "CopyDiffers"}
    raised = {
        (call.func.id, keyword.value.value)
        for _, call in calls(*tables.classes())
        for keyword in call.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }
    assert len(raised) > 20
    assert raised <= listed
    assert set(typing.get_args(Code)) == {code for name, code in listed if name == "DoubtfulShares"}
    assert {code for _, code in listed} <= {
        part for text in texts() for part in (text, text.rpartition("-")[2])
    }


def test_every_file_the_documents_name_exists():
    for document in DOCUMENTS:
        text = tables.filled(document.read_text(encoding="utf-8"))
        for name in re.findall(r"`((?:docs|examples|experiments|benchmarks|tests)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
        for name in re.findall(r"`python ((?:examples|experiments|benchmarks)/[\w./-]+)", text):
            assert (ROOT / name).is_file(), f"{document.name} runs {name}"
        for name in re.findall(r'src="([^"]+)"', text):
            assert (document.parent / name).exists(), f"{document.name} shows {name}"
        for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            target = document.parent / name if name else document
            assert target.exists(), f"{document.name} links {name}"
            assert not anchor or anchor in anchors(target), f"{document.name} links {name}#{anchor}"


@pytest.mark.long
def test_training_on_the_test_set_pays_if_the_pool_is_fixed_and_not_if_slices_stay_fresh(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_on_test

    def share(reveal, cheating):
        return train_on_test.share_of_cheat(0, reveal, cheating=cheating)

    fixed = share("fixed", True) / share("fixed", False)
    fresh = share("per-round", True) / share("per-round", False)
    assert fixed > 1.5
    assert fresh < 1.3
