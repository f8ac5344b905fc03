"""Members who refuse, fail or fall silent, and strangers: it costs them a round, and nobody else anything."""

import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict

import small
from federation_in import NAMES, NODES, client, grid_of, make_keys, node_config, rounds_in, run
from fedmerit.carriers import attendance
from fedmerit.config import VERSION
from fedmerit.errors import MessageError
from fedmerit.flower import grid as grids
from fedmerit.flower.codec import BYTES, KIND, only_arrays, put, take
from fedmerit.flower.grid import SecureGrid
from fedmerit.identity import new_key
from fedmerit.protocol.member import REFUSED
from fedmerit.protocol.messages import PROTOCOL, Parcel
from fedmerit.verify import verify_folder
from inprocess import FAILED, InProcess
from lies import LIAR, at, checked, exchange_of, telling

STEADY = ("train", "check", "unmask", "report")
INVITED = f"(invited by fedmerit {VERSION}, which speaks protocol {PROTOCOL})"


def exchanges(grid, name):
    asked = [exchange_of(message) for node, message, _ in grid.seen if node == NODES[name]]
    return [(ask.exchange, ask.round) for ask in asked]


def honest(rounds, anew=()):
    """What a member is asked if nothing happens but that keys and shares of some rounds do not come ahead."""
    asked = [("join", 0)]
    for number in range(1, rounds + 1):
        first = ("advertise", "share") if number in (1, *anew) else ()
        asked += [(kind, number) for kind in (*first, *STEADY)]
    return [*asked, ("close", rounds)]


def failing(refuses):
    """One member's app fails where ``refuses`` says so."""

    def alter(node, message, reply):
        ask = exchange_of(message)
        if node == NODES[LIAR] and refuses(ask.exchange, ask.round):
            return Message(Error(FAILED, "refuses"), reply_to=message)
        return reply

    return alter


class Clock:
    """A clock that goes on only where a test or a wait says so, however busy the machine is."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (attendance, grids):
        monkeypatch.setattr(module, "time", made)
    return made


def finished(home, grid, rounds):
    strategy, found = run(home, grid, rounds=rounds, join=0.5)
    assert len(found) == rounds
    list(verify_folder(home / "run"))
    return strategy, found


# ------------------------------------------------------------------------------------------ refused and back


@pytest.mark.parametrize("kind", ["advertise", "train", "unmask"])
def test_one_refusal_costs_that_round_and_one_invitation(home, kind):
    """It joins while the others report; the next round asks all for keys and shares."""
    grid = grid_of(home)
    grid.alter = failing(lambda exchange, number: (exchange, number) == (kind, 1))
    strategy, rounds = finished(home, grid, 3)
    assert [note for note in strategy.notes if "failed" in note] == [f"{LIAR}: {kind} failed: refuses"]
    assert LIAR not in rounds[0].reports
    assert [set(one.reports) for one in rounds[1:]] == [{*NAMES}, {*NAMES}]
    asked = honest(3, anew=(2,))
    until = asked[: asked.index((kind, 1)) + 1]
    later = [entry for entry in asked if entry[1] >= 2]
    assert exchanges(grid, LIAR) == [*until, ("join", 0), *later]
    assert {name: exchanges(grid, name) for name in NAMES if name != LIAR} == {
        name: asked for name in NAMES if name != LIAR
    }


@pytest.mark.usefixtures("clock")
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


@pytest.mark.usefixtures("clock")
def test_a_member_that_has_left_the_run_does_not_join_again(home):
    """It was told of a sum over others than it signed: one round is scheduled with it in vain, then none."""
    grid = grid_of(home)
    grid.before = telling(home, "report", 1, lambda body: body.update(included=body["included"][:3]))
    strategy, rounds = finished(home, grid, 4)
    assert [LIAR in one.scheduled for one in rounds] == [True, True, False, False]
    assert [set(one.reports) for one in rounds] == [{*NAMES} - {LIAR}] * 4
    refused = [note for note in strategy.notes if "does not take part" in note]
    said = f"RefusedError: stage join, member {LIAR}: {REFUSED} {INVITED}"
    assert refused == [f"node 101 does not take part: {said}"]
    assert Counter(exchanges(grid, LIAR))["join", 0] == 2


def looking(clock, look=20.0):
    """Looks for nodes with so many seconds between two of them."""

    def get_node_ids():
        clock.sleep(look)
        return list(NODES.values())

    return get_node_ids


def test_who_joins_and_never_answers_is_invited_later_and_later(home, clock):
    """Joining is no proof of good will: the wait goes on growing until an exchange is answered."""
    grid, events, look = grid_of(home), [], 20.0

    def before(node, message):
        if node == NODES[LIAR]:
            events.append((exchange_of(message).exchange == "join", clock.now))

    grid.before, grid.alter = before, failing(lambda exchange, number: exchange != "join")
    grid.get_node_ids = looking(clock, look)
    _, rounds = finished(home, grid, 6)
    assert all(set(one.reports) == {*NAMES} - {LIAR} for one in rounds)
    assert [joins for joins, _ in events[:8]] == [True, False] * 4
    waited = [after - refused for (_, refused), (_, after) in pairwise(events[1:])][::2]
    assert waited[0] == look
    assert waited[1] - look < attendance.AGAIN <= waited[1]
    assert waited[2] - look < 2 * attendance.AGAIN <= waited[2]
    assert sum(LIAR in one.scheduled for one in rounds) < len(rounds)


@pytest.mark.usefixtures("clock")
def test_who_comes_back_while_a_round_is_sampled_takes_nobodys_place(home):
    """Flower asks how many are there, and then who: the answer is one and the same."""
    grid, looks = grid_of(home), []

    def get_node_ids():
        looks.append("look")
        if looks[-2:] == ["look", "look"] and "over" in looks:
            grid.dead.clear()
        return [node for node in NODES.values() if node not in grid.dead]

    at(grid, "share", 1, lambda message: grid.dead.add(NODES[LIAR]))
    at(grid, "report", 1, lambda message: looks.append("over"))
    grid.get_node_ids = get_node_ids
    random.seed(0)
    _, rounds = finished(home, grid, 3)
    assert [{*NAMES} - {*one.scheduled} for one in rounds[1:]] in ([{LIAR}, {LIAR}], [{LIAR}, set()])


def test_a_node_that_could_not_join_is_asked_again(home, clock):
    """Its key is found again in the middle of the run."""
    grid = grid_of(home)
    grid.get_node_ids = looking(clock)
    config = grid.contexts[NODES[LIAR]].node_config
    right, config["fedmerit-key"] = config["fedmerit-key"], "nowhere.pem"
    at(grid, "report", 1, lambda message: config.update({"fedmerit-key": right}))
    strategy, rounds = finished(home, grid, 8)
    assert [LIAR in closed.reports for closed in (rounds[0], rounds[-1])] == [False, True]
    assert any(f"node {NODES[LIAR]} does not take part" in note for note in strategy.notes)
    assert not any("nowhere.pem" in note for note in strategy.notes)  # that is in the member's own log


# ----------------------------------------------------------------------------------------- away for a moment


NINE = {f"m{i}": 100 + i for i in range(9)}


def test_a_short_outage_of_some_costs_nobody_a_later_round(tmp_path):
    """One of nine is away, another misses one message at the end of round 1; then all are back.

    Seven are there when round 1 is over, and seven of the nine must stay to the end of any round.
    """
    make_keys(tmp_path, NINE)
    grid = small.members(tmp_path, nodes=NINE)
    grid.dead = {108}
    at(grid, "unmask", 1, lambda message: grid.dead.add(106), who=106)
    at(grid, "report", 1, lambda message: grid.dead.clear())
    strategy = small.contributions(tmp_path)
    small.start(strategy, grid, 3)
    rounds = rounds_in(tmp_path / "run")
    counted = [(len(one.scheduled), len(one.included), len(one.reports)) for one in rounds]
    assert counted == [(8, 8, 7), (9, 9, 9), (9, 9, 9)]
    assert not any("refused" in note or "leaves" in note for note in strategy.notes)
    list(verify_folder(tmp_path / "run"))


@pytest.mark.parametrize(
    ("proposed", "reported", "words"),
    [
        (["client-0", LIAR], {*NODES}, f"{LIAR} sends nothing ahead for round 2: scheduled with 2 members"),
        ("everybody", {*NODES} - {LIAR}, ""),
    ],
)
def test_a_next_round_that_is_too_small_or_cannot_be_read_costs_one_report_at_most(
    home, caplog, proposed, reported, words
):
    """Too small, it gives no keys for it; what it is told of the round before is true all the same."""
    grid = grid_of(home)
    grid.before = telling(home, "check", 1, lambda body: body.update(next=proposed))
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert [set(one.reports) for one in rounds] == [reported, {*NODES}]
    assert words in caplog.text


# ------------------------------------------------------------------------------------ strangers and nonsense


def test_a_node_without_a_place_on_the_roster_does_not_take_part(home, caplog):
    new_key(home / "stranger.pem")
    grid = grid_of(home)
    grid.apps[999] = client.app
    grid.contexts[999] = Context(7, 999, node_config(home, "stranger"), RecordDict(), {})
    strategy, rounds = run(home, grid)
    assert [len(one.reports) for one in rounds] == [4, 4]
    notes = checked(strategy, rounds, home)
    assert len(notes) == 1
    assert "node 999 does not take part" in notes[0]
    assert "stranger.pem: not the key of a member" in caplog.text


def test_a_node_with_another_members_key_is_named_beside_the_node_that_had_it(home):
    """Whoever is there first takes part; the other one stands in for nobody."""
    grid = grid_of(home)
    grid.contexts[NODES[LIAR]].node_config = node_config(home, "client-0")
    strategy, rounds = run(home, grid, join=0.5)
    assert [{*one.reports} for one in rounds] == [{*NAMES} - {LIAR}] * 2
    (note,) = checked(strategy, rounds, home)
    assert note.startswith(
        "node 101 does not take part: it signs with the key of client-0, who has joined al"
    )
    assert (
        "at node 100: client-0 was started again, or one of the two machines has another member's key" in note
    )


def test_an_answer_without_a_message_of_ours_is_noted(home):
    def alter(node, message, reply):
        ask = exchange_of(message)
        if node == NODES[LIAR] and (ask.exchange, ask.round) == ("report", 1):
            return Message(RecordDict(), reply_to=message)
        return reply

    grid = grid_of(home)
    grid.alter = alter
    strategy, rounds = run(home, grid)
    assert LIAR not in rounds[0].reports
    assert any(
        note.startswith(f"{LIAR}: report cannot be read: ") for note in checked(strategy, rounds, home)
    )


KINDS = ["m8[s/0]", "(,)f4", "O", "f4,f4", "<f4", "\x00", "U" * 10_000]


def with_type(kind):
    """A message of ours that holds an array of a type of somebody's choice."""
    arrays = {"0": Array("uint8", (1,), KIND, b"x"), "a": Array(kind, (2,), KIND, b"12345678")}
    return RecordDict({BYTES: ArrayRecord(arrays)})


def test_no_type_of_an_array_makes_the_server_fall(home):
    """Nodes that are on no roster answer an invitation; numpy would parse the type, and divide by zero."""
    grid = small.members(home)
    for node, kind in enumerate(KINDS, 900):
        grid.apps[node] = lambda message, context, kind=kind: Message(with_type(kind), reply_to=message)
        grid.contexts[node] = Context(7, node, {}, RecordDict(), {})
    strategy = small.contributions(home)
    small.start(strategy, grid, 1)
    for node, _ in enumerate(KINDS, 900):
        assert any(note.startswith(f"node {node} does not take part") for note in strategy.notes)
    assert any(closed.reports for closed in rounds_in(home / "run"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "<f4"])
def test_no_type_of_an_array_makes_a_member_fall(kind):
    with pytest.raises(MessageError, match="expected numbers"):
        take(with_type(kind))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "does not come from fedmerit"),
        ({str(k): Array("uint8", (1,), KIND, b"x") for k in range(9)}, "does not come from fedmerit"),
        ({"0": Array(np.zeros(1, np.uint8))}, "expected bytes, got an array serialised as"),
    ],
)
def test_what_is_no_message_of_ours_is_refused_before_it_is_parsed(arrays, words):
    with pytest.raises(MessageError, match=words):
        take(RecordDict({BYTES: ArrayRecord(arrays)}))


@pytest.mark.parametrize("names", [[], ["one", "two"]])
def test_a_users_message_holds_one_model(names):
    models = {name: ArrayRecord([np.zeros(1)]) for name in (*names, BYTES)}
    with pytest.raises(MessageError, match=f"expected one ArrayRecord, the model, got {len(names)}"):
        only_arrays(RecordDict(models))


def test_an_answer_that_came_in_time_counts_however_long_the_one_before_took(clock):
    class Reply:
        def __init__(self, number):
            self.metadata = SimpleNamespace(reply_to_message_id=number)
            self.content = put(Parcel(number.encode()))

        def has_error(self):
            return False

    class Slow(InProcess):
        def push_messages(self, messages):
            self.began = clock.now
            return [str(k) for k, _ in enumerate(messages)]

        def pull_messages(self, ids):
            late = clock.now > self.began + 0.3
            return [Reply(number) for number in ids if number == "0" or late]

    grid = SecureGrid(grid=Slow({}, {}), shape=None, patience=0.5, join=0, weighted_by="")
    grid.nodes = {"A": 1, "B": 2}
    asks = dict.fromkeys("AB", Parcel(b""))
    heard = []
    for name, _ in grid.exchange("check", asks):
        heard.append(name)
        clock.sleep(60)  # the coordinator adds a large model
    assert heard == ["A", "B"]
