"""Whoever lies, errs or falls silent costs itself a round; the run goes on and says why."""

import hashlib
import json
import re
import stat
import tomllib

import numpy as np
import pytest
from federation_in import NODES, client, grid_of, make_keys, rounds_in, run, task
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedmerit.flower
from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, ProtocolError, RefusedError
from fedmerit.federation.protocol import model_hash
from fedmerit.federation.remote.member import cautious
from fedmerit.federation.remote.wire import Ask, pack, unpack
from fedmerit.federation.verify import verify_folder
from fedmerit.flower.carrying import BYTES, put, take
from fedmerit.keys import load_key, new_key
from fedmerit.ledger import canonical, content, exact

LIAR = "client-1"


@pytest.fixture
def home(tmp_path):
    make_keys(tmp_path)
    return tmp_path


def exchange_of(message):
    return Ask.unpack(take(message.content))


def answering(kind, number, change, who=LIAR):
    """What alters one member's answer to one exchange."""

    def alter(node, message, reply):
        ask = exchange_of(message)
        if node == NODES[who] and (ask.exchange, ask.round) == (kind, number) and not reply.has_error():
            return Message(put(change(take(reply.content))), reply_to=message)
        return reply

    return alter


def checked(strategy, rounds, folder):
    """The run came to its end, and its ledger verifies."""
    assert len(rounds) == 2
    list(verify_folder(folder / "run"))
    return strategy.notes


# --------------------------------------------------------------------------------------------- who takes part


def test_a_node_without_a_place_on_the_roster_does_not_take_part(home):
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
    assert "not the key of a member" in notes[0]


def test_a_member_with_another_roster_refuses_to_join(home, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    make_keys(other)
    grid = grid_of(home)
    grid.contexts[101].node_config["fedmerit-roster"] = str(other / "roster.toml")
    grid.contexts[101].node_config["fedmerit-key"] = str(other / "client-1.pem")
    strategy, rounds = run(home, grid, join=0.5)
    assert all(LIAR not in one.scheduled and len(one.reports) == 3 for one in rounds)
    assert "the server has another roster than ours" in checked(strategy, rounds, home)[0]


def test_somebody_elses_signature_does_not_open_the_door(home):
    """Another member's name, signed with one's own key."""
    grid = grid_of(home)
    grid.alter = answering("join", 0, lambda data: pack(["client-2", unpack(data, "")[1]]))
    strategy, rounds = run(home, grid, join=0.5)
    assert all(set(one.reports) == {"client-0", "client-2", "client-3"} for one in rounds)
    assert "not that of the roster's key" in checked(strategy, rounds, home)[0]


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
    message = Message(put(data), dst_node_id=101, message_type="query.fedmerit")
    with pytest.raises(ProtocolError):
        client.app(message, grid.contexts[101])


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
    assert any(f"computed on another {what} than ours" in note for note in checked(strategy, rounds, home))
    assert rounds[0].silent == (LIAR,)
    assert len(rounds[1].reports) == 4


@pytest.mark.parametrize("number", [float("nan"), 2.0, -0.5])
def test_a_report_of_impossible_numbers_is_refused(home, number):
    grid = grid_of(home)

    def lie(body):
        body["measured"]["accuracy"]["alone"] = exact(number)

    grid.alter = answering("report", 1, lambda data: resigned(home, data, lie))
    strategy, rounds = run(home, grid)
    assert any("alone of accuracy must lie in [0, 1]" in note for note in checked(strategy, rounds, home))
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
    assert any("its report is not signed by it" in note for note in checked(strategy, rounds, home))
    assert rounds[0].silent == (LIAR,)


def resigned(home, data, change):
    """A member's answer with a changed report that it signed all the same."""
    body, _, keys = unpack(data, "")
    parsed = json.loads(body)
    change(parsed)
    signature = load_key(home / f"{LIAR}.pem").sign(content(LIAR, "report", parsed))
    return pack([canonical(parsed), signature, keys])


# ----------------------------------------------------------------------------------------- a dishonest server


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("report", lambda b: b.update(model=b"\0\0\xc8\x42" * (len(b["model"]) // 4)), "further from M0"),
        ("report", lambda b: b.update(included=b["included"][:3]), "others are in the sum than we signed"),
        ("report", lambda b: b.update(m0="0" * 64), "another M0 than ours"),
        ("report", lambda b: b.update(total=1e9), "cannot weigh"),
        (
            "report",
            lambda b: b["slice"].__setitem__(3, bytes(len(b["slice"][3]))),
            "differs from what was committed",
        ),
        ("report", lambda b: b.update(model=b["model"][:-4]), "expected a model of"),
        ("share", lambda b: b.update(list=b"FMB1"), "bytes that no member of this protocol writes"),
        (
            "advertise",
            lambda b: b.update(members=["client-0", LIAR]),
            "scheduled with 2 members, at least 3 were agreed on",
        ),
        ("advertise", lambda b: b.update(members=["client-0", LIAR, "nobody"]), "not on the roster"),
        ("join", lambda b: b["terms"].update(config_hash="0" * 64), "not those of their hash"),
    ],
)
def test_a_member_refuses_what_a_server_makes_up(home, kind, change, reason):
    """One member is told something else; it says no, and nobody else is harmed."""
    grid, refused = grid_of(home), []

    def before(node, message):
        ask = exchange_of(message)
        if node == NODES[LIAR] and ask.exchange == kind and ask.round <= 1:
            body = unpack(pack(dict(ask.body)), "")
            change(body)
            message.content[BYTES] = put(Ask(ask.exchange, ask.run, ask.round, body).pack())[BYTES]

    def alter(node, message, reply):
        if node == NODES[LIAR] and reply.has_error():
            refused.append(reply.error.reason)
        return reply

    grid.before, grid.alter = before, alter
    strategy, rounds = run(home, grid, join=0.5)
    checked(strategy, rounds, home)
    assert re.search(reason, refused[0]), refused
    assert set(rounds[0].reports) == {*NODES} - {LIAR}


def test_a_secured_app_gives_no_plain_update(home):
    """A server that leaves fedmerit out gets nothing."""
    grid = grid_of(home)
    content_ = RecordDict({"arrays": ArrayRecord(task.first_model())})
    for kind in ("train", "train.other"):
        with pytest.raises(RefusedError, match="asked for a plain update"):
            client.app(Message(content_, dst_node_id=101, message_type=kind), grid.contexts[101])


def test_terms_are_pinned(home):
    """A member that joined a run agrees to nothing else in it."""
    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == 101 else None
    run(home, grid)
    ask = exchange_of(kept[0])
    body = {**ask.body, "commitment": {**ask.body["commitment"], "root": "0" * 64}}
    message = Message(
        put(Ask("join", ask.run, 0, body).pack()), dst_node_id=101, message_type="query.fedmerit"
    )
    with pytest.raises(RefusedError, match="something else than before"):
        client.app(message, grid.contexts[101])


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

    strategy, rounds = run(home, grid_of(home, {LIAR: app}))
    checked(strategy, rounds, home)
    assert all(LIAR not in one.included and len(one.reports) == 3 for one in rounds)


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


def fedmerit_array(values):
    from flwr.app import Array

    return Array(values.astype(np.float32))


# ------------------------------------------------------------------------------------ what leaves, what stays


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


def test_a_steady_round_takes_five_exchanges_and_four_evaluations(home):
    counted = []

    def value(arrays, test):
        counted.append(1)
        return task.value(arrays, test)

    app = fedmerit.flower.secure(client.app.inner, value=value, seed=0)
    grid = grid_of(home, dict.fromkeys(NODES, app))
    strategy, _ = run(home, grid, rounds=3, server_evaluates=False)
    kinds = {name: len(times) for name, times in strategy.seconds.items()}
    assert kinds == {"advertise": 1, "share": 3, "train": 3, "check": 3, "unmask": 3, "report": 3, "close": 1}
    assert len(counted) == 4 * 4 * 3


def test_without_the_check_it_takes_four(home):
    """If, and only if, the members agree to it."""
    app = fedmerit.flower.secure(client.app.inner, value=task.value, accept=lambda config: None)
    strategy, rounds = run(home, grid_of(home, dict.fromkeys(NODES, app)), check=False)
    checked(strategy, rounds, home)
    assert "check" not in strategy.seconds
    assert [len(one.reports) for one in rounds] == [4, 4]


@pytest.mark.parametrize(
    ("weak", "reason"),
    [
        ({"check": False}, "asked to leave the check out"),
        ({"threshold": 4}, "asked for a threshold of 4 of 6 members"),
        ({"least": 4}, "asked to take part in rounds of 4 of 6 members"),
    ],
)
def test_members_agree_to_nothing_weaker_than_the_default(weak, reason):
    """A server cannot talk them into less protection than they would have chosen."""
    members = {"partition": {"names": [f"client-{i}" for i in range(6)]}}
    with pytest.raises(RefusedError, match=reason):
        cautious(from_dict({**members, "secure_aggregation": weak}))
    cautious(from_dict(members))


def test_a_schedule_smaller_than_agreed_is_refused(home):
    """Three of four could be the server's choice of whom to look at."""
    from federation_in import NAMES

    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == 101 else None
    run(home, grid)
    join = exchange_of(kept[0])
    terms = dict(join.body["terms"])
    config = terms["config"].replace("least = 0", "least = 4")
    terms |= {"config": config, "config_hash": from_dict(tomllib.loads(config)).hash()}
    for kind, body in (("join", {**join.body, "terms": terms}), ("advertise", {"members": list(NAMES[:3])})):
        data = Ask(kind, "ab" * 16, 1, body).pack()
        message = Message(put(data), dst_node_id=101, message_type="query.fedmerit")
        if kind == "join":
            client.app(message, grid.contexts[101])
            continue
        with pytest.raises(RefusedError, match="scheduled with 3 members, at least 4 were agreed on"):
            client.app(message, grid.contexts[101])


def test_a_members_files_are_its_own_and_say_nothing(home):
    grid = grid_of(home)
    run(home, grid)
    folder = next((home / "client-1.pem.state").glob("*/"))
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == [
        "0002.client",
        "0002.report",
        "0002.update",
        "heads",
        "terms",
        "totals",
    ]  # round 1 is deleted
    first = task.federation().first.tobytes()
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert first[:64] not in path.read_bytes()
    assert stat.S_IMODE((home / "client-1.pem.state").stat().st_mode) == 0o700


def test_where_the_server_cannot_evaluate_the_median_counts_and_a_liar_is_named(home):
    grid = grid_of(home)

    def lie(body):
        body["measured"]["accuracy"]["grand"] = exact(1.0)

    grid.alter = answering("report", 1, lambda data: resigned(home, data, lie))
    strategy, rounds = run(home, grid, server_evaluates=False)
    notes = checked(strategy, rounds, home)
    assert notes == ["round 1: client-1 measured another v(M0) or v(M) than the round is scored with"]
    own = rounds[0].reports["client-0"].measured["accuracy"].grand
    assert rounds[0].body["utilities"]["accuracy"]["grand"] == exact(own)


def test_members_own_metrics_only_where_listed(home):
    app = fedmerit.flower.secure(client.app.inner, value=task.value, seed=0, metrics=["num-examples"])
    grid = grid_of(home, dict.fromkeys(NODES, app))
    from flwr.serverapp.strategy import FedAvg

    seen = []

    class Looks(FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.extend(replies := list(replies))
            return super().aggregate_train(server_round, replies)

    strategy = fedmerit.flower.Contributions(
        Looks(fraction_evaluate=0.0, weighted_by_key="weight"),
        roster=home / "roster.toml", test=task.federation().pool, value=task.value,
        utilities=task.UTILITIES, folder=home / "run", weights="uniform",
    )  # fmt: skip
    strategy.start(grid=grid, initial_arrays=ArrayRecord(task.first_model()), num_rounds=1)
    assert len(seen) == 1  # one reply, whoever averages
    assert dict(seen[0].content["metrics"]) == {"weight": 1, "num-examples": 55.0}


def test_what_cannot_run_here_is_refused_with_the_reason(home):
    from flwr.serverapp import strategy as stock

    options = {
        "roster": home / "roster.toml",
        "test": ([[1.0]] * 4, [0] * 4),
        "value": None,
        "folder": home / "r",
    }
    for strategy, reason in (
        (stock.Krum(), "Krum cannot run under secure aggregation: it compares members' updates"),
        (stock.FedMedian(), "FedMedian cannot run under secure aggregation: it needs the median"),
        (stock.QFedAvg(0.1), "QFedAvg cannot run under secure aggregation: it weighs members"),
    ):
        with pytest.raises(ConfigError, match=reason):
            fedmerit.flower.Contributions(strategy, **options)
    with pytest.raises(ConfigError, match="truth: needs plain updates"):
        fedmerit.flower.Contributions(stock.FedAvg(), **options, truth=["shapley"])
    with pytest.raises(ConfigError, match="the roster holds none"):
        fedmerit.flower.Contributions(stock.FedAvg(), **options, weights="roster")
    with pytest.raises(ConfigError, match="secured already"):
        fedmerit.flower.secure(client.app, value=task.value)


def test_a_server_optimiser_is_scored_before_it_acts(home):
    from flwr.serverapp.strategy import FedAdam

    strategy = fedmerit.flower.Contributions(
        FedAdam(fraction_evaluate=0.0), roster=home / "roster.toml", test=task.federation().pool,
        value=task.value, utilities=task.UTILITIES, folder=home / "run", weights="uniform",
    )  # fmt: skip
    strategy.start(grid=grid_of(home), initial_arrays=ArrayRecord(task.first_model()), num_rounds=2)
    one, two = rounds_in(home / "run")
    assert two.reports["client-0"].bound_to["m0"] != one.body["m"]  # the optimiser moved it
    list(verify_folder(home / "run"))
