"""The example app, on nodes in this process: what it shows must work, and cost no import of torch in vain."""

import subprocess
import sys
import tomllib

import pytest
from flwr.app import Context, RecordDict

from fedmerit.flower.codec import take
from fedmerit.protocol.messages import Ask
from fedmerit.verify import verify_folder
from inprocess import InProcess
from runs import run_in

EXAMPLE = "examples/flower-hospitals"


@pytest.fixture
def hospitals(request, monkeypatch):
    folder = request.config.rootpath / EXAMPLE
    monkeypatch.syspath_prepend(str(folder))
    settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return folder, settings


@pytest.mark.alone
def test_the_noisy_hospital_is_last(hospitals, tmp_path):
    _, settings = hospitals
    from hospitals import secured, server_app
    from hospitals.task import HOSPITALS, NOISY

    keys = {"out": str(tmp_path / "run"), "fedmerit-rehearsal": str(tmp_path / "keys")}
    config = {**settings, "rounds": 2, **keys}
    nodes = {100 + part: {"partition-id": part} for part in range(len(HOSPITALS))}
    grid = InProcess(dict.fromkeys(nodes, secured.app), nodes, config)
    server_app.app(grid, Context(7, 1, {}, RecordDict(), config))
    settlement = run_in(tmp_path / "run").settlement
    total = dict(zip(HOSPITALS, settlement.account.totals(HOSPITALS).values, strict=True))
    assert {min(total, key=total.__getitem__)} == NOISY.keys()
    lines = list(verify_folder(tmp_path / "run"))
    assert any("rounds: 2 of 2, 0 aborted" in line for line in lines)
    assert "settlement: 2 of 2 equations hold" in lines


@pytest.mark.alone
def test_the_demonstration_scores_and_pays_with_who_states_by_hand(hospitals, tmp_path, capfd):
    """All of it but the processes: a hospital dies in the last round, its masked update sent."""
    _, settings = hospitals
    import demo
    from hospitals import secured, server_app
    from hospitals.task import HOSPITALS

    roster = demo.make_roster(tmp_path)
    nodes = {
        100 + place: {"fedmerit-key": str(demo.key_of(tmp_path, name)), "fedmerit-roster": str(roster)}
        for place, name in enumerate(HOSPITALS)
    }
    server = {
        "out": str(tmp_path / "run"),
        "roster": str(roster),
        "server-key": str(demo.server_key(tmp_path)),
    }
    config = {**settings, **server, "rounds": 1, "local-epochs": 1, "join": 0.5}
    grid = InProcess(dict.fromkeys(nodes, secured.app), nodes, config)
    victim = 100 + HOSPITALS.index(demo.VICTIM)

    def before(node, message):
        if node == victim and Ask.unpack(take(message.content))[0].exchange == "check":
            grid.dead.add(node)

    grid.before = before
    server_app.app(grid, Context(7, 1, {}, RecordDict(), config))
    demo.state_later(tmp_path, roster)
    demo.fedmerit("score", tmp_path / "run")
    demo.fedmerit("rewards", tmp_path / "run", "--budget", demo.BUDGET)
    demo.verify_copy(tmp_path, roster)
    shown = capfd.readouterr().out
    assert shown.count("settlement: 1 of 1 equations hold") >= 2
    assert "5 statements in" in shown
    assert f"keys: they match {roster}, roster hash " in shown
    assert "keys: taken from the ledger itself" not in shown
    assert "archive: sums, models, directions and products of 1 round" in shown
    assert not (tmp_path / "members" / "Bridge" / "run" / "keys").exists()


def test_most_processes_of_a_member_load_no_torch(hospitals):
    folder, _ = hospitals
    code = "import sys; import hospitals.secured; sys.exit(len({'torch', 'hospitals.task'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=folder).returncode == 0
