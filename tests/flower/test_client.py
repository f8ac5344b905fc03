"""A member's app: which settings it agrees to, whose keys it holds, and which apps its node runs."""

import logging
import re
from dataclasses import replace

import pytest
from flwr.app import Context, RecordDict
from flwr.superlink.grid import HttpGrid, InMemoryGrid
from flwr.supernode.cli.flower_supernode import (
    _parse_args_run_supernode,
    _try_obtain_trusted_entities,
    _validate_public_keys_ed25519,
)

import fedmerit.flower
from command_line import call
from federation_in import NAMES, NODES, client, grid_of, rounds_in, run, task
from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, LedgerError, ProtocolError, RefusedError, RunAborted
from fedmerit.flower.client import place_of
from fedmerit.flower.server import engine_of
from fedmerit.identity import read_roster
from fedmerit.verify import verify_folder
from inprocess import InProcess
from lies import at
from refusals import refused
from small import contributions, members, start
from tests.ledger.test_kept import anew

# ---------------------------- members that agree to sums over everybody only: with one lost there is no sum


WHOLE = {
    "partition": {"names": [f"client-{i}" for i in range(6)]},
    "secure_aggregation": {"threshold": 6},
}


def config_of(**sections):
    """The settings of a run of six whose sums are over everybody, with changes."""
    return from_dict({key: {**WHOLE.get(key, {}), **sections.get(key, {})} for key in {*WHOLE, *sections}})


def capped(weights, cap):
    return {"training": {"weights": weights, "weight_cap": cap}}


@pytest.mark.parametrize(
    ("sections", "agreed", "words"),
    [
        ({"secure_aggregation": {"threshold": 5}}, {}, "expected the threshold 6"),
        ({"secure_aggregation": {"threshold": 0}}, {}, "expected the threshold 6"),
        # a sum over everybody with weights and one without differ by those whose weight is not 1
        (capped("secret", 100), {}, "asked for secret weights, expected uniform"),
        (capped("uniform", 1), {"weights": "secret"}, "asked for uniform weights, expected secret"),
        # whoever has more samples than the cap declines: runs with different caps would count them
        (capped("secret", 699), {"weights": "secret"}, "a weight_cap of 699, expected 100000"),
        ({"secure_aggregation": {"bound": 8.0}}, {}, "asked for a bound of 8, expected 4"),
        ({"secure_aggregation": {"bound": 8.0}}, {"bound": 2.0}, "asked for a bound of 8, expected 2"),
        ({"participation": {"fraction": 0.9}}, {}, "a server that chooses"),  # as `cautious` refuses
    ],
)
def test_settings_that_allow_smaller_or_different_sums_are_not_accepted(sections, agreed, words):
    with refused(RefusedError, stage="join") as caught:
        fedmerit.flower.everybody(config_of(**sections), **agreed)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "agreed"),
    [
        ({}, {}),
        (capped("uniform", 699), {}),  # without secret weights no cap counts
        (capped("secret", 699), {"weights": "secret", "weight_cap": 699}),
        ({"secure_aggregation": {"bound": 8.0}}, {"bound": 8.0}),
    ],
)
def test_what_a_member_agreed_to_by_name_is_accepted(sections, agreed):
    fedmerit.flower.everybody(config_of(**sections), **agreed)


def strict():
    return dict.fromkeys(
        NODES, fedmerit.flower.secure(client.app.inner, value=task.value, accept=fedmerit.flower.everybody)
    )


def test_with_everybody_there_rounds_are_summed_and_scored(home):
    _, rounds = run(home, grid_of(home, strict()), threshold=4)
    assert [(len(one.included), len(one.reports)) for one in rounds] == [(4, 4), (4, 4)]


def test_one_lost_member_means_no_sum(home):
    """It is lost after it has masked: by default the others would finish without it."""
    grid = grid_of(home, strict())
    at(grid, "check", None, lambda message: grid.dead.add(103), who=103)
    with refused(RunAborted, closed=(), aborted=(1,)):
        run(home, grid, threshold=4, rounds=1, join=1.0)
    assert [(one.included, bool(one.aborted)) for one in rounds_in(home / "run")] == [((), True)]


def test_nobody_joins_where_smaller_sums_are_allowed(home):
    with pytest.raises(ProtocolError, match=r"0 of 4 members joined .* asked for sums of fewer than all"):
        run(home, grid_of(home, strict()), join=0.5)


# --------------------------------------------------- where one party played all members, the ledger says so


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


# ----------------------------------------------------------- which apps a SuperNode runs, as the guide says


EXAMPLE = "examples/flower-hospitals"


def test_the_readmes_file_and_command_are_what_a_supernode_takes(request, tmp_path):
    text = (request.config.rootpath / EXAMPLE / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "trusted.yaml"
    path.write_text(block)
    assert "--trusted-entities trusted.yaml" in text
    options = _parse_args_run_supernode().parse_args(["--insecure", "--trusted-entities", str(path)])
    trusted = _try_obtain_trusted_entities(options.trusted_entities)
    assert trusted
    assert all(name.startswith("fpk_") for name in trusted)
    _validate_public_keys_ed25519(trusted)


def test_a_list_without_a_name_is_no_list(tmp_path):
    """Flower asks `if trusted_entities`: an empty mapping lets every app run, as the guide warns."""
    path = tmp_path / "trusted.yaml"
    path.write_text("{}")
    assert not _try_obtain_trusted_entities(path)
