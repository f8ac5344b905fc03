"""What a node of Flower may send or leave out: it costs that node a round, and the run goes on."""

import time
from types import SimpleNamespace

import pytest
import small
from federation_in import NODES, InProcess, client, grid_of, make_keys, rounds_in, run, task
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from lies import LIAR, checked, exchange_of

import fedmerit.flower
from fedmerit.errors import MessageError, ProtocolError
from fedmerit.flower.codec import BYTES, KIND, put, take
from fedmerit.flower.grid import SecureGrid
from fedmerit.identity import new_key
from fedmerit.protocol.messages import Parcel

# --------------------------------------------------------------------------------------------- who takes part


def test_a_node_without_a_place_on_the_roster_does_not_take_part(home, caplog):
    new_key(home / "stranger.pem")
    grid = grid_of(home)
    grid.apps[999] = client.app
    grid.contexts[999] = grid.contexts[100].__class__(
        7, 999, {"fedmerit-key": str(home / "stranger.pem"), "fedmerit-roster": str(home / "roster.toml")},
        RecordDict(), {},
    )  # fmt: skip
    strategy, rounds = run(home, grid)
    assert [len(one.reports) for one in rounds] == [4, 4]
    notes = checked(strategy, rounds, home)
    assert len(notes) == 1
    assert "node 999 does not take part" in notes[0]
    assert "stranger.pem: not the key of a member" in caplog.text


def test_fewer_than_three_members_are_no_federation(home):
    grid = grid_of(home)
    grid.dead |= {100, 101}
    with pytest.raises(ProtocolError, match=r"2 of 4 members joined within 0\.1 s, 3 are needed"):
        run_briefly(home, grid)


def run_briefly(home, grid):
    from flwr.serverapp.strategy import FedAvg

    strategy = fedmerit.flower.Contributions(
        FedAvg(),
        roster=home / "roster.toml",
        test=task.federation().pool,
        value=None,
        method="reports",
        folder=home / "x",
        join=0.1,
    )
    strategy.start(grid=grid, initial_arrays=ArrayRecord(task.first_model()), num_rounds=1)


# ---------------------------------------------------------------------------------------------------- answers


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


@pytest.mark.parametrize("kind", ["m8[s/0]", "(,)f4", "O", "f4,f4", "<f4", "\x00", "U" * 10_000])
def test_no_type_of_an_array_makes_the_server_fall(tmp_path, kind):
    """A node that is on no roster answers an invitation; numpy would parse the type, and divide by zero."""
    make_keys(tmp_path)
    grid = small.members(tmp_path)

    def stranger(message, context):
        arrays = {"0": Array("uint8", (1,), KIND, b"x"), "a": Array(kind, (2,), KIND, b"12345678")}
        return Message(RecordDict({BYTES: ArrayRecord(arrays)}), reply_to=message)

    grid.apps[999] = stranger
    grid.contexts[999] = Context(7, 999, {}, RecordDict(), {})
    strategy = small.contributions(tmp_path)
    small.start(strategy, grid, 1)
    assert any(note.startswith("node 999 does not take part") for note in strategy.notes)
    assert any(one.reports for one in rounds_in(tmp_path / "run"))


@pytest.mark.parametrize("kind", ["m8[s/0]", "(,)f4", "O", "f4,f4", "\x00"])
def test_no_type_of_an_array_makes_a_member_fall(kind):
    arrays = {"0": Array("uint8", (1,), KIND, b"x"), "model": Array(kind, (2,), KIND, b"12345678")}
    with pytest.raises(MessageError, match="expected numbers"):
        take(RecordDict({BYTES: ArrayRecord(arrays)}))


def test_an_answer_that_came_in_time_counts_however_long_the_one_before_took():
    class Reply:
        def __init__(self, number):
            self.metadata = SimpleNamespace(reply_to_message_id=number)
            self.content = put(Parcel(number.encode()))

        def has_error(self):
            return False

    class Slow(InProcess):
        def push_messages(self, messages):
            self.began = time.monotonic()
            return [str(k) for k, _ in enumerate(messages)]

        def pull_messages(self, ids):
            late = time.monotonic() > self.began + 0.3
            return [Reply(number) for number in ids if number == "0" or late]

    grid = SecureGrid(Slow({}, {}), None, patience=0.5, join=0, weighted_by="")
    grid.nodes = {"A": 1, "B": 2}
    asks = dict.fromkeys("AB", Parcel(b""))
    heard = []
    for name, _ in grid.exchange("check", asks):
        heard.append(name)
        time.sleep(0.6)  # the coordinator adds a large model
    assert heard == ["A", "B"]
