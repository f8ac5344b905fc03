"""Where one party played all members the ledger says so; else it says no more than that keys differ."""

import logging
from dataclasses import replace

import pytest
from flwr.app import Context, RecordDict
from flwr.superlink.grid import HttpGrid, InMemoryGrid

import fedmerit.flower
from command_line import call
from federation_in import NAMES, NODES
from fedmerit.errors import ConfigError, LedgerError, ProtocolError
from fedmerit.flower.client import place_of
from fedmerit.flower.server import engine_of
from fedmerit.identity import read_roster
from fedmerit.verify import verify_folder
from inprocess import InProcess
from refusals import refused
from small import contributions, members, start
from tests.ledger.test_kept import anew

CAREFUL = "members: 4 of 4 joined, each with its own key; this cannot show whose machines they were"
REHEARSAL = (
    "rehearsal: one simulation held all keys, so signatures prove the order of records, not their authors"
)


class Simulated(InProcess, InMemoryGrid):
    """Flower's simulation as a ServerApp sees it, with nodes that need no ray."""


def test_flowers_own_grids_are_told_apart():
    """If a version of Flower renames the one of its simulation, this fails."""
    assert engine_of(InMemoryGrid.__new__(InMemoryGrid)) == "flower-simulation"
    assert engine_of(HttpGrid.__new__(HttpGrid)) == "flower"


def rehearsed(context):
    """A place that says what it is: a member signs no rehearsal else."""
    return replace(place_of(context), rehearsal=True)


@pytest.fixture
def simulated(home):
    grid = members(home, place=rehearsed)
    grid.__class__ = Simulated
    start(contributions(home), grid, 2)
    return home


def page_in(folder):
    made = call("page", folder)
    assert made.exit_code == 0, made.output
    return (folder / "page-run.html").read_text()


def test_a_simulation_is_a_rehearsal_to_verify_and_on_the_page(simulated):
    lines = list(verify_folder(simulated / "run"))
    assert REHEARSAL in lines
    assert not any(line.startswith(("members: ", "keys: ")) for line in lines)
    lines = list(verify_folder(simulated / "run", roster=read_roster(simulated / "roster.toml")))
    assert any(
        line.endswith("; but one simulation held all of them, so they do not prove who signed")
        for line in lines
    )
    page = page_in(simulated / "run")
    assert "This was a rehearsal: one simulation held all keys" in page
    assert "Nothing here can show on whose machines the keys were" not in page


def test_a_run_between_nodes_of_whoever_is_no_rehearsal_and_no_more_than_keys(home):
    start(contributions(home), members(home), 2)
    lines = list(verify_folder(home / "run"))
    assert CAREFUL in lines
    assert not any("rehearsal" in line or "own machine" in line for line in lines)
    page = page_in(home / "run")
    assert "Nothing here can show on whose machines the keys were" in page
    assert "This was a rehearsal" not in page


def test_a_server_cannot_say_afterwards_that_it_was_none(simulated):
    def other(record, body):
        return body | {"engine": "flower"} if record.kind == "run" else body

    anew(simulated, other)
    with refused(LedgerError, record=1):
        list(verify_folder(simulated / "run"))


def test_a_simulation_that_too_few_joined_leaves_a_folder_that_can_be_used_again(home):
    grid = members(home, place=rehearsed)
    grid.__class__ = Simulated
    grid.dead = {100, 101}
    with refused(ProtocolError, stage="join"):
        start(contributions(home), grid, 1)
    grid.dead.clear()
    start(contributions(home), grid, 1)
    resumed = call("run", home / "run" / "config.toml", "--out", home / "run", "--resume")
    assert "it holds a Flower simulation (engine 'flower-simulation')" in str(resumed.exception)


def test_a_member_says_in_its_log_that_the_run_named_its_key(home, caplog):
    caplog.set_level(logging.WARNING, "fedmerit")
    grid = members(home, run_config={"fedmerit-rehearsal": str(home)})
    for part, node in enumerate(NODES.values()):
        grid.contexts[node].node_config = {"partition-id": part}
    start(contributions(home), grid, 1)
    said = [text for text in caplog.messages if text.startswith("a rehearsal: ")]
    assert said == [
        f"a rehearsal: the run names {home / name}.pem, so whoever started it holds this key too"
        for name in NAMES
    ]


def test_keys_for_a_simulation_are_made_once(tmp_path):
    roster = fedmerit.flower.rehearsal(tmp_path / "keys", NAMES)
    before = roster.read_bytes()
    assert fedmerit.flower.rehearsal(tmp_path / "keys", NAMES) == roster
    assert roster.read_bytes() == before
    assert read_roster(roster).names == NAMES
    assert {path.name for path in roster.parent.iterdir()} == {
        "roster.toml",
        "server.pem",
        *(f"{name}.pem" for name in NAMES),
    }
    with refused(ConfigError):
        fedmerit.flower.rehearsal(tmp_path / "keys", ["a", "b", "c"])
    with refused(ConfigError):
        fedmerit.flower.rehearsal("", NAMES)


@pytest.mark.parametrize(
    ("node", "rehearsal"),
    [({"fedmerit-key": "key.pem"}, ""), ({}, ""), ({"partition-id": 0}, ""), ({"partition-id": 4}, "here")],
    ids=["no roster", "nothing", "no folder", "no such member"],
)
def test_a_node_that_names_no_member_is_told_what_is_expected(home, node, rehearsal):
    config = {"fedmerit-rehearsal": str(home) if rehearsal else ""}
    with refused(ConfigError):
        place_of(Context(7, 100, node, RecordDict(), config))
