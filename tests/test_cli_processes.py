"""The command line as people meet it: processes, signals, pipes, and folders that hold no run."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedmerit.cli.base import WORK
from fedmerit.config import of_folder
from fedmerit.errors import ConfigError

FEDMERIT = [sys.executable, "-c", "from fedmerit.cli import main; main()"]
TINY = """
[data]
test_size = 50
[partition]
clients = 3
scheme = "sizes"
sizes = [40, 30, 50]
[model]
name = "mlp"
[training]
rounds = {rounds}
local_epochs = 1
[scoring]
method = "settled"
"""


def shell(*arguments):
    return subprocess.run([*FEDMERIT, *map(str, arguments)], capture_output=True, text=True, check=False)


def settings(path, rounds):
    path.write_text(TINY.format(rounds=rounds))
    return path


def test_a_run_that_is_stopped_says_how_far_it_got_and_goes_on(tmp_path):
    config, folder = settings(tmp_path / "my.toml", 40), tmp_path / "run"
    with subprocess.Popen(
        [*FEDMERIT, "run", config, "--out", folder], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("round 2/40"):
                process.send_signal(signal.SIGINT)
                break
        lines += list(process.stderr)
        assert process.stdout.read() == ""
    assert process.returncode == 130
    told = re.fullmatch(r"stopped after round (\d+) of 40; go on with --resume\n", lines[-1])
    assert told, lines
    assert 2 <= int(told[1]) < 40
    assert not any("Traceback" in line for line in lines)
    done = shell("run", config, "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr
    first = re.search(r"^round (\d+)/40", done.stderr, re.MULTILINE)
    assert int(first[1]) == int(told[1]) + 1
    assert shell("verify", folder).returncode == 0


def test_a_run_that_is_stopped_before_it_began_is_started_again(tmp_path, fedmerit, monkeypatch):
    from fedmerit.cli import run

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_run", stopped)
    code, _, err = fedmerit("run", settings(tmp_path / "my.toml", 2), "--out", tmp_path / "run")
    assert (code, err) == (130, "stopped before the run began; start it again\n")


@pytest.mark.parametrize(
    "command",
    [
        "score {}", "rewards {} --budget 10", "page {}", "compare {} {}", "verify {}", "doctor {}",
        "export {} --out copy.jsonl", "settle close {}",
    ],
)  # fmt: skip
def test_a_folder_that_is_no_run_is_said_to_be_none_and_nothing_is_written(
    fedmerit, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# no run")
    code, out, err = fedmerit(*command.format("docs", "docs").split())
    assert (code, out) == (2, "")
    assert err.startswith("error: docs holds no run: no ledger.sqlite")
    assert [one.name for one in (tmp_path / "docs").iterdir()] == ["index.md"]


def test_a_folder_without_settings_holds_no_run_either(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: no config\.toml"):
        of_folder(tmp_path)


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(fedmerit):
    csv = Path(__file__).parents[1] / "examples" / "hospitals.csv"
    code, _, err = fedmerit("page", csv, "--out", "/proc/page.html")  # where nobody can write
    assert (code, err) == (2, "error: /proc/page.html: could not be written: No such file or directory\n")


@pytest.mark.parametrize(
    ("override", "asked"),
    [
        ("training.round=3", "training.round: unknown key (did you mean rounds?); expected one of rounds, "),
        ("training.local-epochs=3", "unknown key (did you mean local_epochs?)"),
        ("trainings.rounds=3", "trainings: unknown section (did you mean training?)"),
        ("training.zzz=3", "training.zzz: unknown key; expected one of rounds, "),
    ],
)
def test_near_misses_are_asked_about(fedmerit, tmp_path, override, asked):
    config = settings(tmp_path / "my.toml", 2)
    code, _, err = fedmerit("run", config, "--out", tmp_path / "run", "--set", override)
    assert code == 2
    assert asked in err


def commands(fedmerit, *above):
    """Every command with its help, also those of groups."""
    _, told, _ = fedmerit(*above, "--help")
    names = re.findall(r"^│ ([a-z]+)  ", told, re.MULTILINE)
    yield above, told, names
    for name in names:
        yield from commands(fedmerit, *above, name)


def test_help_is_in_the_order_of_the_work_and_without_names_of_the_code(fedmerit):
    found = list(commands(fedmerit))
    assert found[0][2] == [name for names in WORK.values() for name in names]
    assert len(found) > 20
    for above, told, _ in found:
        assert "Usage: fedmerit" in told, above
        assert "Arguments" not in told, above
        assert not re.search(r" _[A-Za-z]|\b[a-z]+_\b| \.\s", told), above  # _NUMBER, out_, a lost default
