"""Ledgers that a dishonest server made of an honest run, signed with its own key."""

import shutil
from functools import partial

import pytest
from federation_in import NAMES, NODES, grid_of, make_keys, run, task
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAdam, FedAvg
from forging import body_of, copy_for, written
from lies import LIAR, exchange_of

import fedmerit.flower
from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, exact, load_key, number
from fedmerit.verify import verify_copy, verify_folder


@pytest.fixture
def home(finished):
    return finished


# ------------------------------------------------------------------- v(M0) and v(M) as the server likes them


def lied(change):
    """Another v(M0) and v(M) of the last round, which no head that members sign later covers."""

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "seen":
                continue
            if record.kind == "round" and body["round"] == 2:
                for used in body["utilities"].values():
                    change(used)
            yield record.author, record.kind, body, record.signature

    return tell


def all_of_it(used):
    used.update(empty=exact(0.0), grand=exact(1.0))


def by(much):
    return lambda used: used.update(grand=exact(number(used["grand"]) + much))


def test_what_the_server_says_it_measured_must_be_what_most_members_signed(home):
    written(home, lied(all_of_it))
    message = (
        r"^record \d+ \(round by server\): round 2: 4 of 4 members contradict the server's "
        r"v\(M0\) or v\(M\): client-0 signed v\(M0\) = 0\.\d+ of \S+, "
        r"the round is scored with 0$"
    )
    with pytest.raises(LedgerError, match=message):
        list(verify_folder(home / "run"))


def test_machines_may_differ_by_what_processors_do_and_no_more(home):
    """A server on another processor is named and believed, also where a few samples fall otherwise."""
    samples = len(task.federation().pool.slice(1).y)
    far = max(1e-2, 3 / samples)
    written(home, lied(by(9e-7)))
    lines = list(verify_folder(home / "run"))
    assert "scores: follow from the reports in the ledger" in lines
    assert not any("is scored with" in line for line in lines)
    written(home, lied(by(far * 0.98)))
    lines = list(verify_folder(home / "run"))
    assert "scores: follow from the reports in the ledger" in lines
    assert sum("is scored with" in line for line in lines) == len(NAMES)
    written(home, lied(by(far * 0.05)))  # now more
    with pytest.raises(LedgerError, match=r"round 2: 4 of 4 members contradict .* signed v\(M\) = "):
        list(verify_folder(home / "run"))


def test_one_or_two_members_contradict_nobody_out_of_a_ledger(home):
    """Where only two of four reported, and both measured otherwise: they are named, no more."""

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "seen" or (
                record.kind == "report" and body["round"] == 2 and record.author in NAMES[2:]
            ):
                continue
            if record.kind == "round" and body["round"] == 2:
                body["silent"] = list(NAMES[2:])
                all_of_it(body["utilities"]["accuracy"])
            yield record.author, record.kind, body, record.signature

    written(home, tell)
    said = [line for line in verify_folder(home / "run") if "is scored with" in line]
    assert [line.split()[2] for line in said] == list(NAMES[:2])


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_members_that_measured_otherwise_are_named_and_most_of_them_are_believed(home, liars):
    """Signed by those members themselves: who is right cannot be told, so the number of them decides."""
    away = NAMES[:liars]

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "seen":
                continue
            if record.kind == "report" and record.author in away and body["round"] == 2:
                body["measured"]["accuracy"]["grand"] = exact(0.125)
            yield record.author, record.kind, body, record.signature

    written(home, tell, {name: load_key(home / f"{name}.pem") for name in away})
    if 2 * liars > len(NAMES):
        with pytest.raises(
            LedgerError, match=r"round 2: 3 of 4 members contradict the server's v\(M0\) or v\(M\)"
        ):
            list(verify_folder(home / "run"))
        return
    said = [line for line in verify_folder(home / "run") if "is scored with" in line]
    assert [line.partition(" = ")[0] for line in said] == [f"round 2: {name} signed v(M)" for name in away]
    assert said[0].startswith(
        "round 2: client-0 signed v(M) = 0.125 of accuracy, the round is scored with 0."
    )


# ------------------------------------------------------------------------ a round that was aborted, or not


def aborted(which, model=None):
    """That a round was aborted, and the run cut off after it: nothing of it needs a member's signature."""

    def tell(ledger, records):
        closed = body_of(next(record for record in records if record.kind == "round"))
        run_ = next(record for record in records if record.kind == "run").body
        for record in records:
            if record.kind == "schedule" and record.body["round"] == which:
                break
            yield record.author, record.kind, body_of(record), record.signature
        yield SERVER, "schedule", body_of(record), b""
        yield SERVER, "masked", {"round": which, "inputs": {}}, b""
        closed |= {"round": which, "included": [], "declined": [], "silent": [], "slice": None}
        closed |= {"aborted": "stage masked: 2 members left, 3 are needed", "utilities": {}}
        closed["m"] = model or (run_["m0"] if which == 1 else closed["m"])
        yield SERVER, "round", closed, b""

    return tell


@pytest.mark.parametrize("which", [1, 2])
def test_an_aborted_round_leaves_the_model_as_it_was(home, which):
    shutil.rmtree(home / "run" / "checkpoints")  # which would tell of the round that was really summed
    shutil.copytree(home, home / "other")
    written(home, aborted(which), anew=(which,))
    assert f"rounds: {which} of 2, 1 aborted" in list(verify_folder(home / "run"))
    written(home / "other", aborted(which, "ab" * 32), anew=())
    message = r"^record \d+ \(round by server\): aborted, but its model is not the last recorded one$"
    with pytest.raises(LedgerError, match=message):
        list(verify_folder(home / "other" / "run"))


@pytest.mark.parametrize("strategy", [FedAvg, FedAdam])
@pytest.mark.parametrize("which", [(1,), (2,), (1, 2), (3,)])
def test_rounds_that_are_really_aborted_verify(tmp_path, strategy, which):
    """The first, one between two others, two of them, the last; also where an optimiser moves the model."""
    make_keys(tmp_path)
    grid = grid_of(tmp_path)

    def before(node, message):
        ask = exchange_of(message)
        if ask.exchange == "check" and ask.round in which:
            grid.dead |= {102, 103}

    def revived():
        grid.dead.clear()
        return list(NODES.values())

    grid.before, grid.get_node_ids = before, revived
    fedmerit.flower.Contributions(
        strategy(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=tmp_path / "roster.toml",
        test=task.federation().pool,
        value=task.value,
        utilities=task.UTILITIES,
        folder=tmp_path / "run",
        weights="uniform",
        page=False,
    ).start(grid=grid, initial_arrays=ArrayRecord(task.first_model()), num_rounds=3)
    lines = list(verify_folder(tmp_path / "run"))
    assert f"rounds: 3 of 3, {len(which)} aborted" in lines
    followed = not any(
        line == "models: the server's optimiser moves the model between rounds, so M0 cannot be checked"
        for line in lines
    )
    assert followed == (strategy is FedAvg)


@pytest.fixture
def private(tmp_path, monkeypatch):
    """A run of which every member sees its own part alone."""
    contributions = partial(fedmerit.flower.Contributions, visibility="coordinator")
    monkeypatch.setattr(fedmerit.flower, "Contributions", contributions)
    make_keys(tmp_path)
    run(tmp_path, grid_of(tmp_path))
    return tmp_path


def test_a_members_copy_names_its_own_difference_alone(private):
    lines = list(verify_copy(copy_for(private, LIAR, own=True)))
    assert not any("is scored with" in line for line in lines)
    written(private, lied(all_of_it))
    lines = list(verify_copy(copy_for(private, LIAR, own=True)))  # what the others signed, it cannot know
    (said,) = [line for line in lines if "is scored with" in line]
    assert said.startswith(f"round 2: {LIAR} signed v(M0) = ")
    assert f"scores: {LIAR}'s follow from its own reports; nobody else's were recomputed" in lines
    with pytest.raises(LedgerError, match="round 2: 4 of 4 members contradict"):
        list(verify_folder(private / "run"))
