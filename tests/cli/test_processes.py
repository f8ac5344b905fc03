"""The command line as people meet it: processes, signals, pipes, and folders that hold no run."""

import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from command_line import FEDMERIT, TINY, shell
from fedmerit import verify
from fedmerit.cli.base import WORK
from fedmerit.notes import EXTRAS


def settings(path, rounds):
    path.write_text(TINY.replace("rounds = 2", f"rounds = {rounds}") + '[scoring]\nmethod = "settled"\n')
    return path


@pytest.mark.long
def test_a_run_that_is_stopped_says_how_far_it_got_and_goes_on(tmp_path):
    config, folder = settings(tmp_path / "my.toml", 40), tmp_path / "run"
    with subprocess.Popen(
        [*FEDMERIT, "run", config, "--out", folder],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
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


def test_a_demo_that_is_stopped_says_how_far_it_got_and_how_to_begin_again(tmp_path, fedmerit, monkeypatch):
    from fedmerit.simulation.run import Rehearsal

    real = Rehearsal.round

    def second(self, number, *more):
        if number == 2:
            raise KeyboardInterrupt
        return real(self, number, *more)

    monkeypatch.setattr(Rehearsal, "round", second)
    small = ["--set", "training.rounds=3", "--set", "training.local_epochs=1", "--set", "data.test_size=50"]
    code, _, err = fedmerit("demo", "--out", tmp_path / "demo", *small)
    assert code == 130
    assert err.splitlines()[-1] == "stopped after round 1 of 3; fedmerit demo starts afresh"


@pytest.mark.parametrize(
    ("where", "command", "told"),
    [
        ("simulation.plan.plan", "plan my.toml", "stopped: this command writes nothing; start it again"),
        ("identity.read_roster", "keys roster roster.toml",
         "stopped: files are written whole or not at all; start it again"),
        ("cli.run._run", "run my.toml --out run", "stopped before the run began; start it again"),
        ("cli.app", "score r.csv", "stopped before anything began; start it again"),
    ],
)  # fmt: skip
def test_any_command_that_is_stopped_says_what_it_leaves(
    tmp_path, fedmerit, monkeypatch, where, command, told
):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    settings(tmp_path / "my.toml", 2)
    monkeypatch.setattr(f"fedmerit.{where}", stopped)
    assert fedmerit(*command.split()) == (130, "", told + "\n")


@pytest.mark.parametrize(
    "command",
    [
        "score {}", "rewards {} --budget 10", "page {}", "compare {} {}", "verify {}",
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


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(fedmerit):
    csv = Path(__file__).parents[2] / "examples" / "hospitals.csv"
    code, _, err = fedmerit("page", csv, "--out", "/proc/page.html")  # where nobody can write
    assert (code, err) == (2, "error: /proc/page.html: could not be written: No such file or directory\n")


def test_a_command_that_does_not_exist_is_asked_about_once(fedmerit):
    for given, asked in (
        (["runn"], "'runn'. Did you mean 'run'?"),
        (["keys", "shwo"], "Did you mean 'show'?"),
    ):
        code, _, err = fedmerit(*given)
        assert code == 2
        assert asked in err
        assert err.count("Did you mean") == 1


def test_a_source_that_does_not_exist_is_said_to_be_missing(fedmerit, tmp_path):
    for name in ("nothing", "nothing.csv"):
        for command in (["score"], ["rewards", "--budget", "5"], ["page"]):
            code, _, err = fedmerit(*command, tmp_path / name)
            assert (code, err) == (2, f"error: {tmp_path / name}: no such file or folder\n")


def test_paragraphs_of_help_are_as_wide_as_the_terminal(fedmerit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    told = fedmerit.said("rewards", "--help")
    assert "or a run folder, which gets the record and the statements." in told


def commands(fedmerit, *above):
    told = fedmerit.said(*above, "--help")
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
        assert fedmerit.said(*above, "-h") == told
        assert "Arguments" not in told, above
        assert not re.search(r" _[A-Za-z]|\b[a-z]+_\b| \.\s", told), above  # _NUMBER, out_, a lost default
        described, usage = told.split("╭─")[0], re.search(r"Usage: .*\[OPTIONS\] (.*)", told)[1]
        for argument in {*re.findall(r"\b[A-Z]{3,}\b", usage)} - {"COMMAND", "ARGS"}:
            assert described.count(argument) > 1, above  # what comes without a name is explained


def test_a_doctor_looks_at_the_machine(fedmerit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = fedmerit("doctor")
    assert (code, err) == (0, "")
    version = ".".join(map(str, sys.version_info[:3]))
    assert out.startswith(f"Python {version}, fedmerit ")
    assert "fedmerit[engine]: torch " in out
    assert re.search(r"^(GPU: .+|no GPU that PyTorch can use); \d+ CPU cores?$", out, re.MULTILINE)
    assert re.search(r"^clock: \d{4}-\d\d-\d\d \d\d:\d\d UTC$", out, re.MULTILINE)
    assert re.search(r"^disk: [\d,]+\.\d GiB free\nthis machine: in order$", out, re.MULTILINE)


def test_a_doctor_finds_a_clock_that_is_behind_a_full_disk_and_what_is_not_installed(
    fedmerit, tmp_path, monkeypatch
):
    monkeypatch.setattr(verify.time, "time", lambda: 0.0)
    monkeypatch.setattr("fedmerit.verify.SPARE", 2**70)
    monkeypatch.setitem(EXTRAS, "page", ("jinja2", "no-such-package"))
    code, out, err = fedmerit("doctor")
    assert code == 2
    assert "PROBLEM: the clock says 1970-01-01 00:00 UTC, but files of fedmerit are from 20" in out
    assert re.search(r"^PROBLEM: .+: the disk has \d+ bytes left, expected \d+$", out, re.MULTILINE)
    assert "fedmerit[page] is incomplete: no-such-package missing; pip install jinja2 no-such-package" in out
    assert err == "error: this machine: 2 problems\n"


def test_the_extras_that_a_doctor_looks_for_are_those_that_can_be_installed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {name: tuple(re.match(r"[\w-]+", one)[0] for one in extras[name]) for name in EXTRAS}
    assert named == EXTRAS
    assert set(extras) == {*EXTRAS, "docs", "all"}
    assert extras["all"] == [f"fedmerit[{','.join(EXTRAS)}]"]


def on_a_terminal(*arguments):
    """Call the command line with a terminal for standard error: exit code, output, what it showed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*FEDMERIT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=theirs, text=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end was closed
            pass
        out = process.stdout.read()
    os.close(ours)
    return process.returncode, out, re.sub(r"\x1b\[[\d;?]*\w", "", shown.decode())


@pytest.mark.long
def test_progress_is_on_the_terminal_alone(tmp_path):
    csv = Path(__file__).parents[2] / "examples" / "hospitals.csv"
    config, folder = settings(tmp_path / "my.toml", 2), tmp_path / "run"
    config.write_text(config.read_text() + 'method = "both"\ntruth = ["mr-shapley"]\n')
    config.write_text(config.read_text().replace('method = "settled"\n', ""))
    for command, told, said in (
        (("plan", config), "measuring this machine", "3 members, 2 rounds"),
        (("run", config, "--out", folder), "coalitions", "analysis: plain updates were analysed"),
        (("page", csv, "--out", tmp_path / "one.html"), "writing the page", "wrote "),
    ):
        code, out, shown = on_a_terminal(*command)
        assert code == 0, shown
        assert told in shown, command
        assert re.search(r"\d/\d .*(\d:\d\d:\d\d|-:--:--)", shown), command
        assert said in out, command
        assert told not in out, command
    for command in (("plan", config), ("page", csv, "--out", tmp_path / "two.html")):
        done = shell(*command)
        assert (done.returncode, done.stderr) == (0, "")
