"""What members do not believe, do not answer and do not repeat."""

import json
import re

import numpy as np
import pytest
from federation_in import NODES, client, grid_of, make_keys, run, task
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from lies import LIAR, answering, checked, exchange_of, fedmerit_array, server_of, telling

from fedmerit.config import from_dict
from fedmerit.errors import BindingError, RefusedError
from fedmerit.flower.codec import put, take
from fedmerit.identity import exact, load_key, read_roster
from fedmerit.protocol.member import REFUSED
from fedmerit.protocol.messages import Ask, pack, unpack
from fedmerit.protocol.terms import check_roster

# ----------------------------------------------------------------------------------------- a dishonest server


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("report", lambda b: b.update(sum=0 * b["sum"] + 2**31 - 1), "the sum lies beyond what"),
        (
            "report",
            lambda b: b.update(included=b["included"][:3]),
            "the members in the sum are not those we signed for",
        ),
        ("report", lambda b: b.update(m0="0" * 64), "the server's M0 is not ours"),
        (
            "report",
            lambda b: b.update(salts=0 * b["salts"]),
            "differs from what was committed",
        ),
        ("report", lambda b: b.update(sum=b["sum"][:-1]), "expected a sum of"),
        ("report", lambda b: b.update(sum=b["sum"].astype(float)), "expected a sum of"),
        ("report", lambda b: b.update(salts=b["salts"][:-1]), "of salt each"),
        ("share", lambda b: b.update(list=b"FMB1"), "bytes that no member of this protocol writes"),
        (
            "advertise",
            lambda b: b.update(members=["client-0", LIAR]),
            "scheduled with 2 members, but at least 3 were agreed on",
        ),
        ("advertise", lambda b: b.update(members=["client-0", LIAR, "nobody"]), "not on the roster"),
        ("join", lambda b: b["terms"].update(config_hash="0" * 64), "do not match their hash"),
    ],
)
def test_a_member_refuses_what_a_server_makes_up(home, caplog, kind, change, reason):
    """One member is told something else; it says no, and nobody else is harmed."""
    grid, refused = grid_of(home), []

    def alter(node, message, reply):
        if node == NODES[LIAR] and reply.has_error():
            refused.append((exchange_of(message).exchange, reply.error.reason))
        return reply

    grid.before, grid.alter = telling(home, kind, 1, change), alter
    strategy, rounds = run(home, grid, join=0.5)
    checked(strategy, rounds, home)
    assert set(rounds[0].reports) == {*NODES} - {LIAR}
    if kind == "join":
        assert re.search(reason, refused[0][1])
    else:  # the reason stays with the member
        assert {text for _, text in refused} == {f"RefusedError: {REFUSED}"}
        assert re.search(reason, caplog.text)
    if kind == "report":  # who was told an impossible outcome answers nothing more
        assert LIAR not in rounds[1].scheduled or LIAR not in rounds[1].included


def test_a_secured_app_gives_no_plain_update(home):
    """A server that leaves fedmerit out gets nothing."""
    grid = grid_of(home)
    content_ = RecordDict({"arrays": ArrayRecord(task.first_model())})
    for kind in ("train", "train.other"):
        with pytest.raises(RefusedError, match="asked for a plain update"):
            client.app(Message(content_, dst_node_id=101, message_type=kind), grid.contexts[101])


def before_the_end(home, who, run_):
    """The member as it was before it signed the last head, after which it answers nothing else."""
    (home / f"{who}.pem.state" / run_ / "seen").unlink()


def test_terms_are_pinned(home):
    """A member that joined a run agrees to nothing else in it."""
    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == 101 else None
    run(home, grid)
    ask = exchange_of(kept[0])
    before_the_end(home, "client-1", ask.run)
    body = {**ask.body, "commitment": {**ask.body["commitment"], "root": "0" * 64}}
    message = Message(
        put(Ask("join", ask.run, 0, body).pack(server_of(home))),
        dst_node_id=101,
        message_type="query.fedmerit",
    )
    with pytest.raises(RefusedError, match="terms that differ from those it signed"):
        client.app(message, grid.contexts[101])


# ---------------------------------------------------------------- a server that asks again, or asks otherwise


def asked_of(home, who=LIAR, until=None):
    """A run, and every message that one member got."""
    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == NODES[who] else None
    run(home, grid)
    return grid, {(exchange_of(m).exchange, exchange_of(m).round): exchange_of(m) for m in kept}


def ask_again(home, grid, ask, **change):
    arrays = {name: change.pop(name, array) for name, array in ask.arrays.items()}
    data = Ask(ask.exchange, ask.run, ask.round, {**ask.body, **change}, arrays).pack(server_of(home))
    kind = "train" if ask.exchange == "train" else "query.fedmerit"
    return client.app(Message(put(data), dst_node_id=101, message_type=kind), grid.contexts[101])


def test_one_request_for_a_report_is_answered_and_no_other(home):
    """Each further one, on another M or W, would say something new about the update."""
    grid, asks = asked_of(home)
    before_the_end(home, LIAR, asks["report", 2].run)
    again = ask_again(home, grid, asks["report", 2])
    assert take(again.content)  # the very same: the same answer
    for change in ({"included": []}, {"sum": 0 * asks["report", 2].arrays["sum"]}, {"next": 0}):
        with pytest.raises(RefusedError, match=REFUSED):
            ask_again(home, grid, asks["report", 2], **change)


def test_nothing_is_said_twice_in_a_round(home):
    grid, asks = asked_of(home)
    before_the_end(home, LIAR, asks["share", 2].run)
    for key in (("share", 2), ("train", 2), ("check", 2), ("unmask", 2)):
        with pytest.raises(RefusedError, match=REFUSED):
            ask_again(home, grid, asks[key])
    first = Ask("advertise", asks["share", 2].run, 2, {"members": list(NODES)})
    with pytest.raises(RefusedError, match=REFUSED):  # new keys for a round that is over
        ask_again(home, grid, first)


def test_one_last_head_is_signed(home):
    grid, asks = asked_of(home)
    close = asks["close", 2]
    assert take(ask_again(home, grid, close).content)
    for change in ({"head": "0" * 64}, {"head": "x\n3 forged"}):
        with pytest.raises(RefusedError, match=REFUSED):
            ask_again(home, grid, close, **change)


def test_what_the_server_did_not_sign_is_refused(home, caplog):
    grid, asks = asked_of(home)
    key = load_key(home / "client-0.pem")
    data = Ask("close", asks["close", 2].run, 2, asks["close", 2].body).pack(key.sign)
    with pytest.raises(RefusedError, match=REFUSED):
        client.app(Message(put(data), dst_node_id=101, message_type="query.fedmerit"), grid.contexts[101])
    assert "not signed by the server" in caplog.text


@pytest.mark.parametrize("what", ["config", "integers"])
def test_members_that_are_told_to_train_differently_sum_nothing(home, what):
    """With a learning rate of 0 for all others, the sum would be one member's update."""
    grid = grid_of(home)

    def before(node, message):
        if exchange_of(message).exchange == "train" and node == NODES[LIAR]:
            if what == "config":
                message.content["config"]["lr"] = 0.0
            else:
                message.content["arrays"]["mask"] = fedmerit_integers()

    grid.before = before
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert all(LIAR not in one.included for one in rounds)
    if what == "config":  # the integers break its training instead
        assert any("masked for a different encoding or different weights" in note for note in strategy.notes)


def fedmerit_integers():
    return Array(np.ones(3, np.int64))


def test_a_model_that_is_not_the_last_one_is_not_trained(home):
    """A server that makes up M0 for one member learns from what it declines."""
    grid = grid_of(home)

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("train", 2) and node == NODES[LIAR]:
            arrays = message.content["arrays"]
            name = next(iter(arrays))
            arrays[name] = fedmerit_array(arrays[name].numpy() + 1e-3)

    grid.before = before
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert rounds[1].declined == (LIAR,)


def test_roster_weights_are_those_of_the_members_own_roster(tmp_path):
    """A server that weighs one member a million times more would read its update from the sum."""
    roster = read_roster(make_keys(tmp_path, weights=dict.fromkeys(NODES, 1.0)))
    for weights, good in (
        (dict.fromkeys(NODES, 1.0), True),
        ({**dict.fromkeys(NODES, 1e-12), LIAR: 1.0}, False),
    ):
        training = {"weights": "roster", "roster_weights": weights}
        config = from_dict({"partition": {"names": list(roster.names)}, "training": training})
        if good:
            check_roster({"roster": roster.hash.hex()}, config, roster, LIAR)
        else:
            with pytest.raises(BindingError, match="weights in the settings differ from those on the roster"):
                check_roster({"roster": roster.hash.hex()}, config, roster, LIAR)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(round=1e999),
        lambda body: body["measured"]["accuracy"].pop("empty"),
        lambda body: body["measured"]["accuracy"].update(se_alpha_total=exact(float("inf"))),
        lambda body: body["bound_to"].update(more="x"),
        lambda body: body.update(measured=[]),
        lambda body: body.update(bound_to=7),
    ],
)
def test_no_report_stops_the_server_or_spoils_its_ledger(home, change):
    grid = grid_of(home)

    def lie(data):
        body, _, keys = unpack(data, "")
        parsed = json.loads(body)
        change(parsed)
        signature = load_key(home / f"{LIAR}.pem").sign(b"whatever")
        return pack([json.dumps(parsed).encode(), signature, keys])

    grid.alter = answering("report", 1, lie)
    strategy, rounds = run(home, grid, server_evaluates=False)
    checked(strategy, rounds, home)
    assert rounds[0].silent == (LIAR,)


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
