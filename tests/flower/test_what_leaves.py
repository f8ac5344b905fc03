"""What leaves a member, and what a server may tell it: nothing that differs from what the others are told."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as PIECE
from hypothesis import given
from hypothesis import strategies as st

import fedmerit.flower
from federation_in import NODES, client, grid_of, rounds_in, run, task
from fedmerit.errors import ConfigError, MessageError, ProtocolError, RefusedError
from fedmerit.flower.codec import BYTES, config_digest, digest, put, take
from fedmerit.protocol.member import REFUSED
from fedmerit.protocol.messages import Parcel
from lies import LIAR, at, checked, exchange_of, telling
from refusals import refused


def test_what_leaves_a_member_is_masked_and_little(home):
    """Neither the update nor its words nor the sample count is in any reply; 4 bytes a parameter go up."""
    grid = grid_of(home)
    strategy, rounds = run(home, grid, weights="secret")
    checked(strategy, rounds, home)
    size = task.federation().first.size
    up = {}
    for node, message, reply in grid.seen:
        ask = exchange_of(message)
        assert set(reply.content) == {BYTES}  # no metrics, no arrays of the user's
        up.setdefault((node, ask.round), []).append(len(take(reply.content)))
        if ask.exchange == "train":
            assert len(take(reply.content)) < 4 * size + 600
    assert all(sum(sizes) < 4 * size + 8000 for sizes in up.values())


def test_a_steady_round_takes_four_exchanges_and_four_evaluations(home):
    counted = []

    def value(arrays, test):
        counted.append(1)
        return task.value(arrays, test)

    app = fedmerit.flower.secure(client.app.inner, value=value, seed=0)
    grid = grid_of(home, dict.fromkeys(NODES, app))
    strategy, _ = run(home, grid, rounds=3, server_evaluates=False)
    kinds = {name: len(times) for name, times in strategy.seconds.items()}
    assert kinds == {"advertise": 1, "share": 1, "train": 3, "check": 3, "unmask": 3, "report": 3, "close": 1}
    assert len(counted) == 4 * 4 * 3
    for node in NODES.values():  # who is there from the start is invited once
        asked = [exchange_of(message).exchange for to, message, _ in grid.seen if to == node]
        assert asked.count("join") == 1


def test_a_steady_settled_round_takes_three_exchanges_and_the_model_travels_once(home):
    grid = grid_of(home)
    strategy, _ = run(home, grid, rounds=3, method="settled")
    kinds = {name: len(times) for name, times in strategy.seconds.items()}
    rounds = {"advertise": 1, "share": 1, "train": 3, "check": 3, "unmask": 3, "report": 1}
    assert {kind: kinds[kind] for kind in rounds} == rounds
    assert all(len(one.reports) == 4 for one in rounds_in(home / "run"))
    assert not strategy.notes
    size = sum(array.numpy().size for array in ArrayRecord(task.first_model()).values())
    for _, message, _ in grid.seen:
        ask = exchange_of(message)
        if ask.exchange == "train":
            arrays = [array for record in message.content.array_records.values() for array in record.values()]
            assert 4 * size < sum(len(array.data) for array in arrays) < 4 * size + 6000
            assert ("sum" in ask.arrays) == (ask.round > 1)


def test_who_is_told_a_false_sum_beside_the_next_training_is_not_in_the_next_sum(home):
    """It makes another model of it, signs for that one, and trains that one."""

    def change(body):
        if "sum" in body:
            body["sum"] = body["sum"] + np.uint32(2**31)

    grid = grid_of(home)
    grid.before = telling(home, "train", 2, change)
    strategy, rounds = run(home, grid, rounds=2, method="settled", join=0.5)
    assert [LIAR in one.included for one in rounds] == [True, False]
    assert [LIAR in one.reports for one in rounds] == [False, False]
    assert any("round 1: refused: " in note and "computed on a different" in note for note in strategy.notes)


def test_a_message_of_any_size_travels_in_pieces_that_flower_carries():
    """Our bytes are arrays for this reason: Flower cuts each into pieces, and only those have a limit."""
    parcel = Parcel(bytes(2 * PIECE + 1), {"sum": np.zeros(PIECE, np.uint32)})
    arrays = put(parcel)[BYTES].values()
    pieces = [[len(piece.data) for _, piece in array.slice_array()] for array in arrays]
    assert pieces == [[PIECE, PIECE, 1], [PIECE] * 4]


def test_an_evaluation_tells_listed_metrics_and_no_sample_count(home):
    app = fedmerit.flower.secure(ClientApp(), value=task.value, metrics=["accuracy"])

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 1234, "accuracy": 0.5, "secret": 1.0})
        return Message(RecordDict({"m": metrics, "arrays": ArrayRecord([np.ones(3)])}), reply_to=message)

    message = Message(RecordDict(), dst_node_id=101, message_type="evaluate")
    reply = app(message, grid_of(home).contexts[101])
    assert {key: dict(record) for key, record in reply.content.items()} == {
        "metrics": {"num-examples": 1, "accuracy": 0.5}
    }


# ------------------------------------------------------------------------- whatever goes wrong, one sentence


SECRET = "/data/patients/Meier_Anna_1961.dcm: label 3 unknown"
NODE = NODES[LIAR]


def readable_by_others(home):
    (home / f"{LIAR}.pem").chmod(0o640)


def key_is_gone(home):
    (home / f"{LIAR}.pem").unlink()


def cannot_lock(home):
    lock = home / f"{LIAR}.pem.state" / ".lock"
    lock.unlink()
    lock.mkdir()


def no_terms(home):
    (terms,) = (home / f"{LIAR}.pem.state").glob("*/terms.*")
    terms.unlink()


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (readable_by_others, f"{LIAR}.pem: a private key must have mode 600, got 640"),
        (key_is_gone, f"{LIAR}.pem: cannot read the private key"),
        (cannot_lock, "cannot keep a member's state"),
        (no_terms, ": missing; put back this very file"),
    ],
)
def test_a_machine_out_of_order_says_so_at_home_only(home, caplog, break_it, reason):
    grid, replies = grid_of(home), []

    def alter(node, message, reply):
        if node == NODE and reply.has_error() and exchange_of(message).exchange != "join":
            replies.append(reply.error.reason)
        return reply

    at(grid, "unmask", 2, lambda message: break_it(home), who=NODE)
    grid.alter = alter
    strategy, rounds = run(home, grid, join=0.5)
    notes = checked(strategy, rounds, home)
    assert LIAR in {*rounds[1].included} & {*rounds[1].silent}
    assert set(replies) == {f"RefusedError: {REFUSED}"}
    assert f"{LIAR}: unmask failed: RefusedError: {REFUSED}" in notes
    assert any(reason in record.getMessage() for record in caplog.records if "refuses" in record.msg)
    if break_it is no_terms:  # the member has said it, once
        assert not any("refuses a message" in record.msg for record in caplog.records)


def failing_app(kind, how):
    app = fedmerit.flower.secure(ClientApp(), value=task.value)

    @getattr(app, kind)()
    def fail(message, context):
        return how(message)

    return app


def raises(message):
    raise ValueError(SECRET)


def answers_with_an_error(message):
    return Message(Error(0, SECRET), reply_to=message)


def forgets_to_answer(message):
    return None


@pytest.mark.parametrize("kind", ["evaluate", "query"])
@pytest.mark.parametrize("how", [raises, answers_with_an_error, forgets_to_answer])
def test_the_users_own_functions_fail_at_home(home, caplog, kind, how):
    grid_of(home)  # Flower's messages need to know whose they are
    message = Message(RecordDict(), dst_node_id=3, message_type=kind)
    with pytest.raises(RefusedError) as caught:
        failing_app(kind, how)(message, Context(7, 3, {}, RecordDict(), {}))
    assert str(caught.value) == REFUSED
    assert caught.value.logged
    assert caught.value.__suppress_context__
    assert how is forgets_to_answer or SECRET in caplog.text


def test_a_broken_value_function_fails_at_home(home, caplog):
    def value(arrays, test):
        raise ValueError(SECRET)

    app = fedmerit.flower.secure(ClientApp(), value=value)

    @app.train()
    def train(message, context):
        return client.app.inner(message, context)

    grid = grid_of(home, {LIAR: app})
    strategy, rounds = run(home, grid)
    notes = checked(strategy, rounds, home)
    assert all(one.silent == (LIAR,) for one in rounds)
    assert f"{LIAR}: report failed: RefusedError: {REFUSED}" in notes
    assert SECRET in caplog.text
    assert not any(reply.has_error() and SECRET in reply.error.reason for _, _, reply in grid.seen)


def test_bytes_of_nobody_are_refused_without_a_reason(home):
    grid = grid_of(home)
    data = np.random.default_rng(0).bytes(100)
    message = Message(put(Parcel(data)), dst_node_id=NODE, message_type="query.fedmerit")
    with pytest.raises(RefusedError) as caught:
        grid.apps[NODE](message, grid.contexts[NODE])
    assert str(caught.value) == REFUSED


@pytest.mark.parametrize("break_it", [readable_by_others, key_is_gone, cannot_lock])
def test_an_invitation_is_refused_without_the_paths_of_a_member(home, caplog, break_it):
    """Also one that is sent again in the middle of a run."""
    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == NODE else None
    run(home, grid)
    (invitation,) = [message for message in kept if exchange_of(message).exchange == "join"]
    break_it(home)
    with pytest.raises(RefusedError) as caught:
        client.app(invitation, grid.contexts[NODE])
    assert str(caught.value) == "stage join: cannot use its key or files; its own log says which"
    assert LIAR in caplog.text


# ---------------------------------------------------------------------------- told otherwise than the others


OTHERS = [1, 1.0, True, "1", b"1", 0.0, -0.0, 0, False, ""]


def same(one, other):
    """Equal, value by value, with the types that Python calls equal told apart."""
    return {key: (type(value), repr(value)) for key, value in one.items()} == {
        key: (type(value), repr(value)) for key, value in other.items()
    }


@given(
    st.dictionaries(st.sampled_from("ab"), st.sampled_from(OTHERS), max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from(OTHERS), max_size=2),
)
def test_run_configs_have_the_same_digest_only_if_they_are_the_same(one, other):
    assert (config_digest(one) == config_digest(other)) == same(one, other)


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, 2**64, np.float32(1)])
def test_a_run_config_of_other_things_is_refused(value):
    with pytest.raises(MessageError, match=r"^run config: "):
        config_digest({"rate": value})


def test_whatever_a_train_message_says_is_in_its_digest(home):
    grid_of(home)  # messages are made inside a run

    def made(kind="train", **config):
        content = put(Parcel(b"ours"))
        content["arrays"] = ArrayRecord(task.first_model())
        return digest(Message(content, dst_node_id=1, message_type=kind), config_digest(config))

    assert made() == made()
    assert len({made(), made("train.other"), made(rate=0.1), made(rate=0.2), made(rates=0.1)}) == 5


RATE = {"learning-rate": 0.1, "local-epochs": 3, "augment": True, "optimiser": "sgd"}


def with_configs(home, others=RATE, **liars):
    grid = grid_of(home)
    for name, node in NODES.items():
        grid.contexts[node].run_config = {**others, **(liars if name == LIAR else {})}
    return grid


def test_members_with_one_run_config_and_their_own_node_configs_are_summed(home):
    """In whatever order the run config comes to them."""
    grid = with_configs(home)
    grid.contexts[NODES[LIAR]].run_config = dict(reversed(RATE.items()))
    grid.contexts[NODES[LIAR]].node_config["data"] = "/home/us"
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert not strategy.notes
    assert [len(one.reports) for one in rounds] == [4, 4]


@pytest.mark.parametrize("change", [{"learning-rate": 0.0}, {"local-epochs": 3.0}, {"more": 1}])
def test_a_member_that_is_handed_another_run_config_is_not_summed(home, change):
    strategy, rounds = run(home, with_configs(home, **change))
    notes = checked(strategy, rounds, home)
    assert all(LIAR not in one.included and len(one.reports) == 3 for one in rounds)
    assert f"{LIAR} has a different run config from most members: its update cannot be summed" in notes


def other_type(message):
    """The type of a message chooses the function: the same one here, but a member cannot know."""
    message.metadata.message_type = "train.other"


def other_config(message):
    """With a learning rate of 0 for all others, the sum would be one member's update."""
    message.content["config"]["lr"] = 0.0


def other_arrays(message):
    """Integers, which no sum shows; they break its training."""
    message.content["arrays"]["mask"] = Array(np.ones(3, np.int64))


@pytest.mark.parametrize("change", [other_type, other_config, other_arrays])
def test_a_member_that_is_told_to_train_differently_is_not_summed(home, change):
    app = fedmerit.flower.secure(ClientApp(), value=task.value, seed=0)
    app.train()(client.train_locally)
    app.train("other")(client.train_locally)
    grid = grid_of(home, dict.fromkeys(NODES, app))
    at(grid, "train", None, change, who=NODES[LIAR])
    strategy, rounds = run(home, grid)
    notes = checked(strategy, rounds, home)
    assert all(LIAR not in one.included and len(one.reports) == 3 for one in rounds)
    if change is not other_arrays:
        assert any("masked for a different encoding or different weights" in note for note in notes)


def test_a_secured_app_gives_no_plain_update(home):
    """A server that leaves fedmerit out gets nothing."""
    grid = grid_of(home)
    content = RecordDict({"arrays": ArrayRecord(task.first_model())})
    for kind in ("train", "train.other"):
        with refused(RefusedError, stage="train"):
            client.app(Message(content, dst_node_id=101, message_type=kind), grid.contexts[101])


@pytest.mark.parametrize("number", [0.0, float("nan"), 1e308])
def test_a_members_metric_never_becomes_the_weight_of_the_sum(home, number):
    grid = grid_of(home)

    def alter(node, message, reply):
        if node == NODES[LIAR] and exchange_of(message).exchange == "train":
            reply.content["metrics"] = MetricRecord({"num-examples": number, "loss": number})
        return reply

    grid.alter = alter
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert [len(one.reports) for one in rounds] == [4, 4]


def test_a_run_config_that_cannot_be_compared_is_told_before_anybody_trains(home):
    with pytest.raises((ConfigError, ProtocolError), match=r"run config: learning-rate must be a number"):
        run(home, with_configs(home, {"learning-rate": [1]}), join=0.5)


def test_an_app_that_writes_into_its_run_config_is_summed_all_the_same(home):
    """A learning rate that falls, say: what it wrote ends with the call, so that members stay comparable."""
    app = fedmerit.flower.secure(ClientApp(), value=task.value)
    seen = []

    @app.train()
    def train(message, context):
        seen.append(context.run_config["learning-rate"])
        context.run_config["learning-rate"] *= 0.5
        return client.app.inner(message, context)

    grid = grid_of(home, dict.fromkeys(NODES, app))
    for node in NODES.values():
        grid.contexts[node].run_config = dict(RATE)
    _, rounds = run(home, grid)
    assert [len(one.included) for one in rounds] == [4, 4]
    assert set(seen) == {RATE["learning-rate"]}
