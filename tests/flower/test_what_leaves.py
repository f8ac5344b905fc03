"""What leaves a member, what stays, what it costs, and what cannot run here."""

import json
import shutil
import stat

import numpy as np
import pytest
from federation_in import NAMES, NODES, client, grid_of, rounds_in, run, task
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from lies import answering, checked, exchange_of, resigned, server_of

import fedmerit.flower
from fedmerit.config import from_dict, recorded_hash
from fedmerit.errors import ConfigError, RefusedError
from fedmerit.flower.codec import BYTES, put, take
from fedmerit.identity import exact
from fedmerit.protocol.member import REFUSED
from fedmerit.protocol.messages import EXCHANGES, Ask
from fedmerit.protocol.terms import cautious
from fedmerit.verify import verify_folder


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
        ({"check": False}, "asked to leave out the check"),
        ({"threshold": 4}, "asked for a threshold of 4 of 6 members"),
        ({"bound": 1e20}, "asked for a bound of 1e"),
    ],
)
def test_members_agree_to_nothing_weaker_than_the_default(weak, reason):
    """A server cannot talk them into less protection than they would have chosen."""
    members = {"partition": {"names": [f"client-{i}" for i in range(6)]}}
    with pytest.raises(RefusedError, match=reason):
        cautious(from_dict({**members, "secure_aggregation": weak}))
    with pytest.raises(RefusedError, match=r"let the server choose 0\.9 of the members"):
        cautious(from_dict({**members, "participation": {"fraction": 0.9}}))
    cautious(from_dict(members))


def test_a_schedule_smaller_than_agreed_is_refused(home, caplog):
    """Three of four could be the server's choice of whom to look at."""
    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == 101 else None
    run(home, grid)
    join = exchange_of(kept[0])
    terms = dict(join.body["terms"])
    config = terms["config"].replace("least = 0", "least = 4")
    terms |= {"config": config, "config_hash": recorded_hash(config)}
    for kind, body in (("join", {**join.body, "terms": terms}), ("advertise", {"members": list(NAMES[:3])})):
        data = Ask(kind, "ab" * 16, 1, body).pack(server_of(home))
        message = Message(put(data), dst_node_id=101, message_type="query.fedmerit")
        if kind == "join":
            client.app(message, grid.contexts[101])
            continue
        with pytest.raises(RefusedError, match=REFUSED):
            client.app(message, grid.contexts[101])
    assert "scheduled with 3 members, but at least 4 were agreed on" in caplog.text


def test_a_members_files_are_its_own_and_say_nothing(home):
    grid = grid_of(home)
    run(home, grid)
    folder = next((home / "client-1.pem.state").glob("*/"))
    kept = sorted(path.name for path in folder.iterdir())
    of_a_round = ["0002.asked", "0002.began", "0002.client", "0002.report", "0002.update"]
    assert kept == [*of_a_round, "heads", "seen", "terms"]  # nothing of round 1
    first = task.federation().first.tobytes()
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert first[:64] not in path.read_bytes()
    assert stat.S_IMODE((home / "client-1.pem.state").stat().st_mode) == 0o700


def lost(path, how):
    """A file that was deleted, emptied, cut or replaced by what it held in the clear."""
    data = path.read_bytes()
    path.unlink()
    if how != "deleted":
        path.write_bytes({"emptied": b"", "cut": data[:32], "shortened": data[:-32], "plain": bytes(64)}[how])


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "shortened", "plain"])
def test_a_member_that_lost_what_it_must_never_do_again_does_nothing(home, caplog, how):
    """A server could have the same updates summed a second time, without one of them."""
    grid, kept = grid_of(home), []
    grid.before = lambda node, message: kept.append(message) if node == 101 else None
    run(home, grid)
    asks = [exchange_of(message) for message in kept]
    assert {ask.exchange for ask in asks} == {*EXCHANGES}
    state = home / "client-1.pem.state"
    lost(state / "released", how)
    before = sorted(state.rglob("*"))
    told = "missing; it says" if how == "deleted" else "damaged, or encrypted with another key; it says"
    told = f"{state / 'released'}: {told} what this member must never do again; put back a copy"
    for ask in (Ask("join", "ab" * 16, 0, asks[0].body), *asks):  # an invitation to any other run, and all
        caplog.clear()
        with pytest.raises(RefusedError, match="lost what it keeps" if ask.exchange == "join" else REFUSED):
            ask_of(home, grid, ask)
        assert told in caplog.text
    assert sorted(state.rglob("*")) == before


def ask_of(home, grid, ask):
    data = ask.pack(server_of(home))
    kind = "train" if ask.exchange == "train" else "query.fedmerit"
    return client.app(Message(put(data), dst_node_id=101, message_type=kind), grid.contexts[101])


def test_what_a_member_must_never_do_again_is_kept_from_the_first_invitation_on(home):
    """Before any share is released: a folder of a run without that file is one that lost it."""
    grid = grid_of(home)
    kept = []
    grid.before = lambda node, message: kept.append(message) if node == 101 else None
    run(home, grid)
    shutil.rmtree(home / "client-1.pem.state")  # a new machine: nothing can tell
    ask_of(home, grid, exchange_of(kept[0]))
    assert (home / "client-1.pem.state" / "released").exists()
    ask_of(home, grid, exchange_of(kept[0]))


def test_where_the_server_cannot_evaluate_the_median_counts_and_a_liar_is_named(home):
    grid = grid_of(home)

    def lie(body):
        body["measured"]["accuracy"]["grand"] = exact(1.0)

    grid.alter = answering("report", 1, lambda data: resigned(home, data, lie))
    strategy, rounds = run(home, grid, server_evaluates=False)
    notes = checked(strategy, rounds, home)
    assert notes == ["round 1: client-1 measured a different v(M0) or v(M) from the one used for scores"]
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
    half = stock.FedAvg(fraction_train=0.5)
    with pytest.raises(ConfigError, match=r"participation\.fraction: expected at least 0\.875, since 4 of"):
        fedmerit.flower.Contributions(half, **options, threshold=4)
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


def test_no_cosine_is_told_and_none_is_made_up(home):
    """It would read a coordinate for a server that makes up M."""
    strategy, rounds = run(home, grid_of(home))
    assert all(report.cosine is None for one in rounds for report in one.reports.values())
    assert "COS" not in strategy.scores["cumulative"]
    assert "cosine" not in json.dumps(strategy.scores)
