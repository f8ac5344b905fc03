"""Who refuses is out of that round, and a member again when it joins again; nobody else pays for it."""

import random
import shutil
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from federation_in import NAMES, NODES, grid_of, run
from flwr.app import Error, Message
from inprocess import FAILED
from lies import LIAR, exchange_of, telling

from fedmerit.config import VERSION
from fedmerit.flower import grid as grids
from fedmerit.protocol.member import REFUSED
from fedmerit.protocol.messages import PROTOCOL
from fedmerit.verify import verify_folder

STEADY = ("share", "train", "check", "unmask", "report")
INVITED = f"(invited by fedmerit {VERSION}, which speaks protocol {PROTOCOL})"


def exchanges(grid, name):
    """What one member was asked, in order."""
    asked = [exchange_of(message) for node, message, _ in grid.seen if node == NODES[name]]
    return [(ask.exchange, ask.round) for ask in asked]


def honest(rounds):
    """What a member is asked in a run in which nothing happens."""
    steady = [(kind, number) for number in range(1, rounds + 1) for kind in STEADY]
    return [("join", 0), ("advertise", 1), *steady, ("close", rounds)]


def failing(refuses):
    """One member's app fails where ``refuses`` says so."""

    def alter(node, message, reply):
        ask = exchange_of(message)
        if node == NODES[LIAR] and refuses(ask.exchange, ask.round):
            return Message(Error(FAILED, "refuses"), reply_to=message)
        return reply

    return alter


def finished(home, grid, rounds):
    strategy, found = run(home, grid, rounds=rounds, join=0.5)
    assert len(found) == rounds
    list(verify_folder(home / "run"))
    return strategy, found


def test_the_honest_path_has_five_exchanges_a_round_and_one_invitation(home):
    grid = grid_of(home)
    finished(home, grid, 3)
    assert {name: exchanges(grid, name) for name in NAMES} == dict.fromkeys(NAMES, honest(3))


@pytest.mark.parametrize("kind", ["advertise", "train", "unmask"])
def test_one_refusal_costs_that_round_and_one_invitation(home, kind):
    """It joins while the others report, and gives its keys of the next round then: nobody waits for it."""
    grid = grid_of(home)
    grid.alter = failing(lambda exchange, number: (exchange, number) == (kind, 1))
    strategy, rounds = finished(home, grid, 3)
    assert [note for note in strategy.notes if "failed" in note] == [f"{LIAR}: {kind} failed: refuses"]
    assert LIAR not in rounds[0].reports
    assert [set(one.reports) for one in rounds[1:]] == [{*NAMES}, {*NAMES}]
    before = [("join", 0), ("advertise", 1), *((stage, 1) for stage in STEADY)]
    until = before[: before.index((kind, 1)) + 1]
    later = [entry for entry in honest(3) if entry[1] >= 2]
    assert exchanges(grid, LIAR) == [*until, ("join", 0), ("advertise", 2), *later]
    assert {name: exchanges(grid, name) for name in NAMES if name != LIAR} == {
        name: honest(3) for name in NAMES if name != LIAR
    }


def test_a_member_that_lost_the_folder_of_a_run_takes_no_further_part_in_it(home, caplog):
    """In the middle of round 1: what it said and did in this run is no longer known."""
    grid = grid_of(home)

    def before(node, message):
        ask = exchange_of(message)
        if node == NODES[LIAR] and (ask.exchange, ask.round) == ("check", 1):
            shutil.rmtree(home / f"{LIAR}.pem.state" / ask.run)

    grid.before = before
    _, rounds = finished(home, grid, 3)
    assert LIAR in {*rounds[0].included} & {*rounds[0].silent}
    assert [set(one.reports) for one in rounds[1:]] == [{*NAMES} - {LIAR}] * 2
    assert ": missing; put back this very file" in caplog.text


def test_who_always_refuses_is_scheduled_no_more_and_seldom_invited(home):
    """From round 2 on its app fails, also at invitations: N shrinks, the others' exchanges stay the same."""
    grid = grid_of(home)
    invited = []
    grid.before = lambda node, message: invited.append(node) if exchange_of(message).exchange == "join" else 0
    grid.alter = failing(
        lambda exchange, number: number >= 2 or (exchange == "join" and invited.count(101) > 1)
    )
    strategy, rounds = finished(home, grid, 5)
    assert [LIAR in one.scheduled for one in rounds] == [True, True, False, False, False]
    assert [len(one.reports) for one in rounds] == [4, 3, 3, 3, 3]
    assert Counter(exchanges(grid, LIAR))["join", 0] == 2  # at once; then not before AGAIN
    assert [note for note in strategy.notes if "101" in note] == [
        f"node 101 does not take part: refuses {INVITED}"
    ]
    others = {name: exchanges(grid, name) for name in NAMES if name != LIAR}
    assert others == dict.fromkeys(others, honest(5))


def test_a_member_that_has_left_the_run_does_not_join_again(home):
    """It was told of a sum over others than it signed: one round is scheduled with it in vain, then none."""
    grid = grid_of(home)
    grid.before = telling(home, "report", 1, lambda body: body.update(included=body["included"][:3]))
    strategy, rounds = finished(home, grid, 4)
    assert [LIAR in one.scheduled for one in rounds] == [True, True, False, False]
    assert [set(one.reports) for one in rounds] == [{*NAMES} - {LIAR}] * 4
    refused = [note for note in strategy.notes if "does not take part" in note]
    assert refused == [f"node 101 does not take part: RefusedError: {REFUSED} {INVITED}"]
    assert Counter(exchanges(grid, LIAR))["join", 0] == 2


def test_who_joins_and_never_answers_is_invited_later_and_later(home, monkeypatch):
    """Joining is no proof of good will: the wait goes on growing until an exchange is answered."""
    grid, now, events = grid_of(home), [1000.0], []
    look = 20.0  # between two looks for nodes; the clock stands still otherwise
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(grids, "time", clock)

    def before(node, message):
        if node == NODES[LIAR]:
            events.append((exchange_of(message).exchange == "join", now[0]))

    def get_node_ids():
        now[0] += look
        return list(NODES.values())

    grid.before, grid.alter = before, failing(lambda exchange, number: exchange != "join")
    grid.get_node_ids = get_node_ids
    _, rounds = finished(home, grid, 6)
    assert all(set(one.reports) == {*NAMES} - {LIAR} for one in rounds)
    assert [joins for joins, _ in events[:8]] == [True, False] * 4
    waited = [after - refused for (_, refused), (_, after) in pairwise(events[1:])][::2]
    assert waited[0] == look
    assert waited[1] - look < grids.AGAIN <= waited[1]
    assert waited[2] - look < 2 * grids.AGAIN <= waited[2]
    assert sum(LIAR in one.scheduled for one in rounds) < len(rounds)


def test_who_gives_no_report_takes_part_in_the_next_round(home):
    """Its update is wanted all the same; its keys are asked for with one more exchange."""
    grid = grid_of(home)
    grid.alter = failing(lambda exchange, number: (exchange, number) == ("report", 1))
    _, rounds = finished(home, grid, 2)
    assert rounds[0].silent == (LIAR,)
    assert set(rounds[1].reports) == {*NAMES}
    assert Counter(exchanges(grid, LIAR))["join", 0] == 1


def test_who_comes_back_while_a_round_is_sampled_takes_nobodys_place(home):
    """Flower asks how many are there, and then who: the answer is one and the same."""
    grid, looks = grid_of(home), []

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("share", 1):
            grid.dead.add(NODES[LIAR])
        if (ask.exchange, ask.round) == ("report", 1):
            looks.append("over")

    def get_node_ids():
        looks.append("look")
        if looks[-2:] == ["look", "look"] and "over" in looks:
            grid.dead.clear()
        return [node for node in NODES.values() if node not in grid.dead]

    grid.before, grid.get_node_ids = before, get_node_ids
    random.seed(0)
    _, rounds = finished(home, grid, 3)
    assert [{*NAMES} - {*one.scheduled} for one in rounds[1:]] in ([{LIAR}, {LIAR}], [{LIAR}, set()])
