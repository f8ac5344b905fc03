"""Whoever lies, errs or falls silent costs itself a round; the run goes on and says why."""

import hashlib
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import small
from federation_in import NODES, InProcess, client, grid_of, make_keys, rounds_in, run, task
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lies import LIAR, answering, checked, exchange_of, fedmerit_array, resigned

import fedmerit.flower
from fedmerit.errors import MessageError, ProtocolError
from fedmerit.flower.codec import BYTES, KIND, put, take
from fedmerit.flower.grid import SecureGrid
from fedmerit.identity import canonical, exact, new_key
from fedmerit.protocol.messages import Parcel, model_hash, pack, unpack

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


def test_a_member_with_another_roster_refuses_to_join(home, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    make_keys(other)
    grid = grid_of(home)
    grid.contexts[101].node_config["fedmerit-roster"] = str(other / "roster.toml")
    grid.contexts[101].node_config["fedmerit-key"] = str(other / "client-1.pem")
    strategy, rounds = run(home, grid, join=0.5)
    assert all(LIAR not in one.scheduled and len(one.reports) == 3 for one in rounds)
    assert "the server's roster differs from ours" in checked(strategy, rounds, home)[0]


def test_somebody_elses_signature_does_not_open_the_door(home):
    """Another member's name, signed with one's own key."""
    grid = grid_of(home)
    grid.alter = answering("join", 0, lambda data: pack(["client-2", *unpack(data, "")[1:]]))
    strategy, rounds = run(home, grid, join=0.5)
    assert all(set(one.reports) == {"client-0", "client-2", "client-3"} for one in rounds)
    assert "did not sign with its key on the roster" in checked(strategy, rounds, home)[0]


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
        folder=home / "x",
        join=0.1,
    )
    strategy.start(grid=grid, initial_arrays=ArrayRecord(task.first_model()), num_rounds=1)


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("kind", ["share", "train", "check", "unmask", "report"])
@pytest.mark.parametrize("number", [1, 2])
def test_garbage_is_refused_and_the_run_goes_on(home, kind, number):
    grid = grid_of(home)
    grid.alter = answering(kind, number, lambda data: b"garbage" + data[7:])
    strategy, rounds = run(home, grid)
    notes = checked(strategy, rounds, home)
    assert any(f"round {number}: refused" in note for note in notes)
    one = rounds[number - 1]
    if kind == "unmask":
        assert {LIAR} <= {*one.included} & {*one.silent}  # summed, but not heard at the end
    elif kind == "report":
        assert {LIAR} == {*one.included} & {*one.silent}
    else:
        assert (LIAR in one.included) == (kind == "check")
    assert len(one.reports) == 3


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_no_bytes_make_a_member_raise_anything_but_an_error_of_ours(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("member")
    make_keys(folder)
    grid = grid_of(folder)
    message = Message(put(Parcel(data)), dst_node_id=101, message_type="query.fedmerit")
    with pytest.raises(ProtocolError):
        client.app(message, grid.contexts[101])


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


def test_an_answer_to_an_old_round_is_refused(home):
    grid, old = grid_of(home), {}

    def alter(node, message, reply):
        ask = exchange_of(message)
        if node == NODES[LIAR] and ask.exchange == "train":
            old[ask.round] = take(reply.content)
            return Message(put(old[1]), reply_to=message)
        return reply

    grid.alter = alter
    strategy, rounds = run(home, grid)
    assert [LIAR in one.included for one in rounds] == [True, False]
    assert any("round 2: refused" in note and LIAR in note for note in checked(strategy, rounds, home))


@pytest.mark.parametrize(
    ("what", "lie"),
    [
        ("slice", hashlib.sha256(b"another slice").hexdigest()),
        ("m", model_hash(np.zeros(3, np.float32))),
        ("m0", model_hash(np.zeros(3, np.float32))),
        ("included", "0" * 64),
        ("head", "0" * 64),
    ],
)
def test_a_report_on_something_else_is_refused(home, what, lie):
    """Signed by the member, but computed on another test slice, another M, another history."""
    grid = grid_of(home)
    grid.alter = answering(
        "report", 1, lambda data: resigned(home, data, lambda body: body["bound_to"].update({what: lie}))
    )
    strategy, rounds = run(home, grid)
    assert any(
        f"computed on a different {what} from ours" in note for note in checked(strategy, rounds, home)
    )
    assert rounds[0].silent == (LIAR,)
    assert len(rounds[1].reports) == 4


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (float("nan"), "a report holds finite numbers, got nan"),
        (2.0, "alone of accuracy must lie in [0, 1]"),
        (-0.5, "alone of accuracy must lie in [0, 1]"),
    ],
)
def test_a_report_of_impossible_numbers_is_refused(home, number, reason):
    grid = grid_of(home)

    def lie(body):
        body["measured"]["accuracy"]["alone"] = exact(number)

    grid.alter = answering("report", 1, lambda data: resigned(home, data, lie))
    strategy, rounds = run(home, grid)
    assert any(reason in note for note in checked(strategy, rounds, home))
    assert rounds[0].silent == (LIAR,)


def test_a_report_that_was_changed_on_the_way_is_refused(home):
    grid = grid_of(home)

    def change(data):
        body, signature, keys = unpack(data, "")
        parsed = json.loads(body)
        parsed["measured"]["accuracy"]["alone"] = exact(0.5)
        return pack([canonical(parsed), signature, keys])

    grid.alter = answering("report", 1, change)
    strategy, rounds = run(home, grid)
    assert any("did not sign its report" in note for note in checked(strategy, rounds, home))
    assert rounds[0].silent == (LIAR,)


# ----------------------------------------------------------------------------------------- comings and goings


def test_who_leaves_may_come_back(home):
    """Gone in round 1 before it shares, there again in round 2."""
    grid = grid_of(home)

    def before(node, message):
        ask = exchange_of(message)
        if ask.exchange == "share" and ask.round == 1:
            grid.dead.add(103)
        elif ask.exchange == "report":
            grid.dead.discard(103)

    grid.before = before
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert "client-3" in {*rounds[0].scheduled} - {*rounds[0].included}
    assert "client-3" in rounds[1].reports


def test_too_few_abort_the_round_and_leave_the_model(home):
    """Two of four gone: nothing is unmasked, the next round finds the same model."""
    grid = grid_of(home)

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("check", 1):
            grid.dead |= {102, 103}

    def revived():
        grid.dead.clear()
        return list(NODES.values())

    grid.before, grid.get_node_ids = before, revived
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert "needed" in rounds[0].aborted
    assert not rounds[0].included
    assert rounds[1].reports
    assert rounds[1].reports["client-0"].bound_to["m0"] == model_hash(task.federation().first)


def test_training_that_fails_costs_the_member_its_round(home):
    app = fedmerit.flower.secure(ClientApp(), value=task.value, seed=0)

    @app.train()
    def train(message, context):
        raise RuntimeError("out of memory")

    grid = grid_of(home, {LIAR: app})
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert all(one.declined == (LIAR,) and len(one.reports) == 3 for one in rounds)
    assert not any("out of memory" in str(reply) for _, _, reply in grid.seen)


def test_an_update_beyond_the_bound_leaves_the_sum_without_saying_why(home):
    app = fedmerit.flower.secure(ClientApp(), value=task.value, seed=0)

    @app.train()
    def train(message, context):
        arrays = {name: array.numpy() + 9 for name, array in message.content["arrays"].items()}
        record = ArrayRecord({name: fedmerit_array(array) for name, array in arrays.items()})
        metrics = MetricRecord({"num-examples": 5})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    strategy, rounds = run(home, grid_of(home, {LIAR: app}))
    checked(strategy, rounds, home)
    assert all(one.declined == (LIAR,) and LIAR not in one.included for one in rounds)


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
