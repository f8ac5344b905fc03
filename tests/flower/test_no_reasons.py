"""Whatever goes wrong on a member's machine, the server reads one and the same sentence."""

import numpy as np
import pytest
from federation_in import NODES, client, grid_of, run, task
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from lies import LIAR, checked, exchange_of

import fedmerit.flower
from fedmerit.errors import RefusedError
from fedmerit.flower.codec import put
from fedmerit.protocol.member import REFUSED
from fedmerit.protocol.messages import Parcel

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

    def before(node, message):
        ask = exchange_of(message)
        if node == NODE and (ask.exchange, ask.round) == ("unmask", 2):
            break_it(home)

    def alter(node, message, reply):
        if node == NODE and reply.has_error() and exchange_of(message).exchange != "join":
            replies.append(reply.error.reason)
        return reply

    grid.before, grid.alter = before, alter
    strategy, rounds = run(home, grid, join=0.5)
    notes = checked(strategy, rounds, home)
    assert LIAR in {*rounds[1].included} & {*rounds[1].silent}
    assert set(replies) == {f"RefusedError: {REFUSED}"}
    assert f"{LIAR}: unmask failed: RefusedError: {REFUSED}" in notes
    assert any(reason in record.getMessage() for record in caplog.records if "refuses" in record.msg)
    if break_it is no_terms:  # the member has said it, once
        assert not any("refuses a message" in record.msg for record in caplog.records)


def test_an_invitation_is_refused_with_a_reason(home):
    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == NODE else None
    run(home, grid, rounds=1)
    strict = fedmerit.flower.secure(client.app.inner, value=task.value, accept=fedmerit.flower.everybody)
    with pytest.raises(RefusedError, match="asked for sums of fewer than all"):
        strict(kept[0], grid.contexts[NODE])


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
