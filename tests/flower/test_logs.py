"""What operators and members read: fedmerit's lines among Flower's, for whom a server waits, what to set."""

import io
import logging
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.logger import ConsoleHandler
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from federation_in import NODES, grid_of, rounds_in, run
from fedmerit.carriers import attendance
from fedmerit.carriers.folders import Notes
from fedmerit.flower import grid as grids
from fedmerit.flower.codec import Relay, log_inside_flower
from lies import LIAR, at
from small import contributions, members, reply, start

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def _all_lines(caplog):
    caplog.set_level(logging.INFO, "fedmerit")


@pytest.fixture
def flower_log():
    """What Flower's console and a file of its log show."""
    console, plain = ConsoleHandler(colored=False, stream=io.StringIO()), logging.StreamHandler(io.StringIO())
    console.setLevel(logging.INFO)
    plain.setFormatter(logging.Formatter("%(levelname)s %(name)s %(asctime)s | %(message)s"))
    for handler in (console, plain):
        logging.getLogger("flwr").addHandler(handler)
    yield console, plain
    for handler in (console, plain):
        logging.getLogger("flwr").removeHandler(handler)


def lines_of(handler, words):
    return [line for line in handler.stream.getvalue().splitlines() if words in line]


def test_lines_of_server_and_member_are_among_flowers_with_time_and_name(home, flower_log):
    """One for a round, and one of a member that refuses in the second and says why."""
    console, plain = flower_log
    grid = grid_of(home)
    at(grid, "unmask", 2, lambda message: (home / f"{LIAR}.pem").chmod(0o640), who=NODES[LIAR])
    run(home, grid)
    words = "round 1: 4 scheduled, 4 summed, 4 reported"
    (line,) = lines_of(console, words)
    assert re.fullmatch(rf"INFO : +fedmerit {TIME}: {words}", line)
    (line,) = lines_of(plain, words)
    assert re.fullmatch(rf"INFO fedmerit {TIME},\d+ \| {words}", line)
    (line,) = lines_of(console, "refuses a message")
    assert re.match(rf"WARNING : +fedmerit {TIME}: refuses a message: .*must have mode 600, got 640", line)


def test_flowers_own_time_is_not_repeated(flower_log):
    console, _ = flower_log
    log_inside_flower()
    console.timestamps = True
    logging.getLogger("fedmerit").warning("all is %s", "well")
    (line,) = lines_of(console, "all is well")
    assert re.fullmatch(rf"WARNING {TIME},\d+: +fedmerit: all is well", line)


def test_a_logger_that_somebody_set_up_is_left_alone():
    logger, handler = logging.getLogger("fedmerit"), logging.NullHandler()
    before, level = list(logger.handlers), logger.level
    try:
        logger.handlers, logger.level = [handler], logging.NOTSET
        log_inside_flower()
        assert (logger.handlers, logger.level) == ([handler], logging.NOTSET)
        logger.handlers = []
        log_inside_flower()
        log_inside_flower()
        assert [type(one) for one in logger.handlers] == [Relay]
    finally:
        logger.handlers, logger.level = before, level


IMPORTS = """
import logging, sys
import fedmerit, fedmerit.flower
assert "flwr" not in sys.modules
import fedmerit.flower.server, fedmerit.flower.client, fedmerit.carriers.measures, fedmerit.cli
log = logging.getLogger("fedmerit")
assert (log.handlers, log.level, log.propagate) == ([], 0, True)
assert "torch" not in sys.modules
"""
RUNS = """
import sys
from pathlib import Path
import federation_in, small
home = Path(sys.argv[1])
federation_in.make_keys(home)
small.start(small.contributions(home), small.members(home), 1)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("code", [IMPORTS, RUNS])
def test_importing_sets_up_no_logging_and_loads_no_torch_nor_does_a_run_whose_users_need_none(tmp_path, code):
    """Flower starts a process for every message, and torch takes seconds."""
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def waiting_lines(caplog):
    return [text for text in caplog.messages if "waiting for" in text]


@pytest.fixture
def told_often(monkeypatch):
    """For whom a server waits is told every 0.1 s, not once a minute."""
    monkeypatch.setattr(attendance, "TOLD", 0.1)
    for module in (attendance, grids):
        monkeypatch.setattr(module, "POLL", 0.05)


@pytest.mark.usefixtures("told_often")
def test_a_line_says_for_whom_an_exchange_waits(home, caplog):
    """One member's answer to ``train`` comes after two lines."""
    grid = grid_of(home)
    pull = grid.pull_messages

    def held_back(message_ids):
        late = {
            one
            for one, reply in grid._replies.items()
            if reply.metadata.src_node_id == NODES[LIAR] and reply.metadata.message_type == "train"
        }
        hidden = late if len(waiting_lines(caplog)) < 2 else set()
        return pull([one for one in message_ids if one not in hidden])

    grid.pull_messages = held_back
    run(home, grid, rounds=1)
    waiting = waiting_lines(caplog)
    assert len(waiting) == 2
    assert all(re.fullmatch(rf"round 1: train for \d+ s, waiting for {LIAR}", text) for text in waiting)


@pytest.mark.usefixtures("told_often")
def test_a_line_says_who_is_missing_for_the_next_round(home, caplog):
    """They come back when it was said."""
    grid = grid_of(home)
    gone = {NODES["client-2"], NODES["client-3"]}

    def get_node_ids():
        if waiting_lines(caplog):
            grid.dead.clear()
        return [node for node in grid.apps if node not in grid.dead]

    at(grid, "report", 1, lambda message: grid.dead.update(gone))
    grid.get_node_ids = get_node_ids
    run(home, grid, rounds=2, join=600.0)
    assert waiting_lines(caplog) == ["round 1: 2 present, 3 needed, waiting for client-2, client-3"]


def test_notes_are_in_the_run_folder_as_they_come(home):
    grid, seen = grid_of(home), []

    at(grid, "share", 1, lambda message: grid.dead.add(NODES[LIAR]))
    at(grid, "check", 1, lambda message: seen.append((home / "run" / "notes.txt").read_text()))
    strategy, _ = run(home, grid)
    assert f"{LIAR} is away: Node Unavailable" in seen[0]
    lines = (home / "run" / "notes.txt").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == strategy.notes
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)


def test_a_note_is_one_line_and_a_full_disk_costs_no_run(tmp_path, caplog):
    notes = Notes(tmp_path / "notes.txt")
    notes.append("first\nsecond\rthird")
    assert (tmp_path / "notes.txt").read_text().endswith("Z first second third\n")
    nowhere = Notes(tmp_path / "no folder" / "notes.txt")
    nowhere.append("something")
    assert nowhere == ["something"]
    assert "notes.txt: could not be written: " in caplog.text


# -------------------------------------------------------------------- a member whose update cannot be masked


SAMPLES = {"num-examples": 10}
STAY = "stay on this machine: secure(..., metrics=[...]) lists those that leave"


def one_trains(home, change=0.01, metrics=SAMPLES, rounds=1, **options):
    """A run in which one member trains like that; the others are as ever, each run anew."""
    rng = np.random.default_rng()

    def train(name, message):
        if name == LIAR:
            return reply(message, change, **metrics)
        return reply(message, rng.normal() / 100, **SAMPLES)

    grid = members(home, train)
    start(contributions(home, **options), grid, rounds)
    return grid, rounds_in(home / "run")


def said(caplog):
    (line,) = [text for text in caplog.messages if text.startswith(f"{LIAR} leaves round 1: stage masked")]
    return line


def tells_the_server_nothing(grid, *words):
    """To the server a decline is a decline."""
    for node, _, answer in grid.seen:
        if node == NODES[LIAR]:
            assert not any(word in str(answer) for word in words)


STATISTICS = " (running statistics of BatchNorm, the usual ones)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm.running_var": 9.0}, f"'norm.running_var'{STATISTICS} by 9"),
        (
            {"norm.running_var": 5.0, "layer.weight": -7.0},
            f"'layer.weight', 'norm.running_var'{STATISTICS} by 7",
        ),
        ({"layer.weight": 7.0}, "'layer.weight' by 7"),
        ({"layer.weight": math.nan}, "not finite in 'layer.weight'"),
        ({"layer.weight": math.inf}, "not finite in 'layer.weight'"),
    ],
)
def test_an_update_that_cannot_be_masked_names_its_arrays(home, caplog, change, words):
    """The largest change comes first; a number that is too large names the setting too."""
    grid, (closed,) = one_trains(home, change)
    assert closed.declined == (LIAR,)
    line = said(caplog)
    assert words in line
    if "finite" not in words:
        assert "beyond the bound 4: training changed a number of '" in line
        assert line.endswith("the server has to use a larger secure_aggregation.bound")
    tells_the_server_nothing(grid, "running_var", "weight", "bound")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {},
            "training returned no metric 'num-examples', by which this run weighs members: put the number",
        ),
        ({"samples": 3}, "or name the metric that holds it (weighted_by=...)"),
        ({"num-examples": 0}, "a whole number from 1 to 50, got 0: put that number there"),
        ({"num-examples": -3}, "got -3: put that number there"),
        ({"num-examples": 12.5}, "got 12.5: put that number there"),
        ({"num-examples": math.nan}, "got nan: put that number there"),
        ({"num-examples": math.inf}, "got inf: put that number there"),
        ({"num-examples": 51}, "got 51: the server has to use a larger training.weight_cap"),
        ({"num-examples": [1, 2]}, "'num-examples' must be a single number"),
    ],
)
def test_a_weight_that_is_none_says_what_to_set(home, caplog, metrics, words):
    grid, (one,) = one_trains(home, metrics=metrics, **SECRET)
    assert one.declined == (LIAR,)
    assert words in said(caplog)
    tells_the_server_nothing(grid, "num-examples", "weight")


SECRET = {"weights": "secret", "weight_cap": 50}


@pytest.mark.parametrize(
    ("metrics", "options"),
    [
        *((metrics, {}) for metrics in ({}, {"num-examples": 12.5}, {"num-examples": 51})),
        *(({"num-examples": samples}, SECRET) for samples in (1, 50, 50.0)),
    ],
)
def test_whole_weights_up_to_the_cap_are_summed_and_where_members_weigh_the_same_nobody_asks_for_them(
    home, caplog, metrics, options
):
    _, (one,) = one_trains(home, metrics=metrics, **options)
    assert LIAR in one.included
    ours = [record.getMessage() for record in caplog.records if record.name == "fedmerit"]
    assert ours
    assert not any("num-examples" in text for text in ours)


def test_a_repeated_update_says_what_to_mix_into_the_seed(home, caplog):
    """The same first model in a second run, and training that knows neither the run nor the round."""
    one_trains(home)
    caplog.clear()
    _, (one,) = one_trains(home, folder=home / "again")
    assert one.number == 1
    assert (
        "Training gave the same update from the same model: mix the run's id and the round number into its "
        in (said(caplog))
    )


@pytest.mark.parametrize(("bound", "hidden"), [(4.0, False), (1e8, True)])
def test_a_bound_so_large_that_rounding_hides_training_is_noted_once_with_the_numbers(home, bound, hidden):
    """Every number changes by about 0.01; of 4 members, a unit of the sum is 0.19."""
    strategy = contributions(home, bound=bound)
    start(strategy, members(home, accept=lambda config: None, seed=0), 3)
    assert len(strategy.notes) == hidden
    for note in strategy.notes:
        assert re.search(r"^round \d: rounding, 4.7e-02, hides what training changed in 'layer.weight'", note)
        assert note.endswith("expected a smaller secure_aggregation.bound (it is 1e+08)")


def with_metrics(home, shares, rounds=3, **options):
    """Every member's training tells a loss and a text's length; ``shares`` by member says which may leave."""
    rng = np.random.default_rng(0)

    def train(name, message):
        return reply(message, rng.normal() / 100, loss=0.5, words=[1, 2], **SAMPLES)

    grid = members(home, train)
    for name, node in NODES.items():
        inner = grid.apps[node].inner
        grid.apps[node] = fedmerit.flower.secure(inner, value=grid.apps[node].value, metrics=shares(name))
    return start(contributions(home, **options), grid, rounds)


@pytest.mark.parametrize(
    ("first", "others", "reaches", "stays", "server"),
    [
        ((), (), {}, 4, "the strategy gets no training metrics"),
        # the first member shares none that the others share: it is not its list that counts
        (["words"], ["words", "loss"], {}, 1, "the strategy does not get the training metrics words, loss:"),
        (["loss", "words"],) * 2
        + ({"loss": 0.5}, 0, "the strategy does not get the training metrics words:"),
    ],
)
def test_metrics_that_do_not_reach_the_strategy_are_named_once_by_member_and_server(
    home, caplog, first, others, reaches, stays, server
):
    result = with_metrics(home, lambda name: first if name == "client-0" else others)
    assert dict(result.train_metrics_clientapp.get(1, {})) == reaches
    assert sum(STAY in text for text in caplog.messages) == stays
    said = [text for text in caplog.messages if text.startswith("the strategy ")]
    assert [text.startswith(server) for text in said] == [True]
    if not first:
        assert caplog.messages.count(f"metrics loss, words of training {STAY}") == len(NODES)


def test_metrics_of_an_evaluation_that_nobody_shares_are_named_once_too(home, caplog):
    grid = members(home)
    for app in grid.apps.values():

        @app.evaluate()
        def evaluate(message, context):
            metrics = MetricRecord({"accuracy": 0.5, "num-examples": 10})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    start(contributions(home, FedAvg()), grid, 2)
    assert caplog.text.count("the strategy gets no evaluation metrics") == 1
    assert caplog.messages.count(f"metrics accuracy of evaluation {STAY}") == len(NODES)
