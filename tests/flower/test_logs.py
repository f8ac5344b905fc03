"""What an operator can read: fedmerit's lines among Flower's, for whom it waits, and notes that stay."""

import io
import logging
import re
import subprocess
import sys

import pytest
from federation_in import NODES, grid_of, run
from flwr.common.logger import ConsoleHandler
from lies import LIAR, exchange_of

from fedmerit.flower import grid as grids
from fedmerit.flower.codec import Notes, Relay, log_inside_flower

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


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


def test_a_rounds_line_is_among_flowers_with_time_and_name(home, flower_log):
    console, plain = flower_log
    run(home, grid_of(home))
    words = "round 1: 4 scheduled, 4 summed, 4 reported"
    (line,) = lines_of(console, words)
    assert re.fullmatch(rf"INFO : +fedmerit {TIME}: {words}", line)
    (line,) = lines_of(plain, words)
    assert re.fullmatch(rf"INFO fedmerit {TIME},\d+ \| {words}", line)


def test_a_member_that_refuses_says_why_among_flowers_lines(home, flower_log):
    grid = grid_of(home)
    grid.before = lambda node, message: (
        (home / f"{LIAR}.pem").chmod(0o640)
        if node == NODES[LIAR] and exchange_of(message).exchange == "unmask"
        else None
    )
    run(home, grid, rounds=1)
    (line,) = lines_of(flower_log[0], "refuses a message")
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


def test_importing_sets_up_no_logging():
    code = (
        "import logging, fedmerit, fedmerit.flower.server, fedmerit.flower.client, fedmerit.cli; "
        "log = logging.getLogger('fedmerit'); print(log.handlers, log.level, log.propagate)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 0 True\n"


def waiting_lines(caplog):
    return [text for text in caplog.messages if "waiting for" in text]


def test_a_line_says_for_whom_an_exchange_waits(home, caplog, monkeypatch):
    """One a minute; here, every 0.1 s until one member's answer to ``train`` comes after two lines."""
    monkeypatch.setattr(grids, "TOLD", 0.1)
    monkeypatch.setattr(grids, "POLL", 0.05)
    caplog.set_level(logging.INFO, "fedmerit")
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


def test_a_line_says_who_is_missing_for_the_next_round(home, caplog, monkeypatch):
    """They come back when it was said."""
    monkeypatch.setattr(grids, "TOLD", 0.1)
    monkeypatch.setattr(grids, "POLL", 0.05)
    caplog.set_level(logging.INFO, "fedmerit")
    grid = grid_of(home)
    gone = {NODES["client-2"], NODES["client-3"]}

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("report", 1):
            grid.dead |= gone

    def get_node_ids():
        if waiting_lines(caplog):
            grid.dead.clear()
        return [node for node in grid.apps if node not in grid.dead]

    grid.before, grid.get_node_ids = before, get_node_ids
    run(home, grid, rounds=2, join=600.0)
    assert waiting_lines(caplog) == ["round 1: 2 present, 3 needed, waiting for client-2, client-3"]


def test_notes_are_in_the_run_folder_as_they_come(home):
    grid, seen = grid_of(home), []

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("share", 1):
            grid.dead.add(NODES[LIAR])
        if (ask.exchange, ask.round) == ("check", 1):
            seen.append((home / "run" / "notes.txt").read_text())

    grid.before = before
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
