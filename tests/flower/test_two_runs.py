"""Somebody starts a second run while one is going on; and what is deleted of runs that are over."""

import pytest
from federation_in import NAMES, grid_of, run, server
from lies import exchange_of

from fedmerit.errors import ProtocolError, RunAborted
from fedmerit.storage import member_state
from raising import raises
from states import names_in, without


def start(home, out):
    """A second run of one round from the same model: members join, and decline the same update."""
    with pytest.raises(RunAborted, match=r"declined: client-0, client-1, client-2, client-3") as caught:
        server.run(grid_of(home), roster=home / "roster.toml", out=home / out, join=1.0, rounds=1)
    return caught.value


def secrets(home):
    """Runs for which some member keeps secrets of a round."""
    found = [names_in(home / f"{name}.pem").items() for name in NAMES]
    return {run for kept in found for run, names in kept if any(name.endswith(".client") for name in names)}


@pytest.mark.parametrize("exchange", ["check", "report"])
def test_a_second_run_does_not_cost_the_first_its_round(home, exchange):
    """Members join it in the middle of a round of the first: neither shares nor updates are lost by that."""
    grid, begun = grid_of(home), []

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == (exchange, 2) and not begun:
            begun.append(start(home, "other"))

    grid.before = before
    _, rounds = run(home, grid, rounds=3)
    assert begun
    assert [(len(one.included), len(one.reports)) for one in rounds] == [(4, 4)] * 3


@pytest.mark.parametrize("ended", [True, False])
def test_secrets_of_a_run_that_is_over_or_long_idle_are_deleted_by_the_next(home, monkeypatch, ended):
    run(home, grid_of(home), rounds=1)
    (first,) = secrets(home)
    if not ended:  # its server died before it said goodbye, long ago
        for name in NAMES:
            without(home / f"{name}.pem", first, "seen")
        monkeypatch.setattr(member_state, "IDLE", 0.0)
    start(home, "next")
    assert first not in secrets(home)
    assert len(secrets(home)) == 1


def test_what_a_killed_member_left_half_written_is_removed(home):
    run(home, grid_of(home), rounds=1)
    folder = next(home.glob("client-0.pem.state/*/heads")).parent
    for place in (folder, folder.parent):
        (place / ".0001.update.72052f7f").write_bytes(b"half")
    start(home, "next")
    assert not list(home.glob("client-0.pem.state/**/.0001.update.*"))
    assert (folder / "heads").exists()


def test_invitations_that_come_to_nothing_leave_nothing(home, caplog, monkeypatch):
    """Anybody may send them: they cost one line each, and their folders go after a day."""
    for number in range(5):
        grid = grid_of(home)
        grid.dead = {102, 103}
        with raises(ProtocolError, stage="join"):
            server.run(grid, roster=home / "roster.toml", out=home / f"out-{number}", join=0.1)
    assert "not over" not in caplog.text
    folders = [path for path in home.glob("client-0.pem.state/*") if path.is_dir()]
    assert len(folders) == 5
    monkeypatch.setattr(member_state, "IDLE", 0.0)
    run(home, grid_of(home), rounds=1)
    assert len([path for path in home.glob("client-0.pem.state/*") if path.is_dir()]) == 1
