"""A run that is trained several times: the same data and test pool, another first model and batch order."""

import json
import shutil

import numpy as np
import pytest

from command_line import call
from fedmerit.cli.base import errors_as_messages
from fedmerit.config import as_toml
from fedmerit.errors import NotComparable, StoreError
from fedmerit.report.comparison import compared
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare
from fedmerit.storage.run_folder import Folder, repeats_in, runs_of, stored_pool_key
from fedmerit.verify import verify_folder
from linear_federation import Federation
from runs import bodies_of
from tiny import TINY, tiny

QUICK = ("secure_aggregation.enabled=false",)


def again(number, *overrides):
    return tiny(*QUICK, f"run.repeat={number}", *overrides)


def body(folder, kind):
    return bodies_of(folder, kind)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two repeats, with one key of the test pool."""
    home = tmp_path_factory.mktemp("pair")
    run(again(1), home / "run-1")
    run(again(2), home / "run-2", pool_key=stored_pool_key(home / "run-1"))
    return home


@pytest.fixture
def copies(pair, tmp_path):
    return shutil.copytree(pair, tmp_path / "pair")


# ----------------------------------------------------------------------------------- what another repeat is


def test_another_repeat_has_the_same_data_and_pool_and_another_first_model_and_batch_order(pair, tmp_path):
    one, two = (body(pair / name, "run") for name in ("run-1", "run-2"))
    assert one["data"] == two["data"]
    assert one["m0"] != two["m0"]
    assert body(pair / "run-1", "pool") == body(pair / "run-2", "pool")
    first, second = prepare(again(1)), prepare(again(2))
    for mine, theirs in zip(first.clients, second.clients, strict=True):
        assert (mine.x == theirs.x).all()
        assert (mine.y == theirs.y).all()
    assert (first.pool.indices == second.pool.indices).all()
    assert not np.array_equal(first.first, second.first)
    assert first.seed("train", 1, "client-0") != second.seed("train", 1, "client-0")
    assert first.seed("noise", 1, "client-0") == second.seed("noise", 1, "client-0")
    run(tiny(*QUICK), tmp_path / "alone")  # is the first repeat
    files = [
        (path / "scores.json").read_bytes() for path in (tmp_path / "alone", pair / "run-1", pair / "run-2")
    ]
    assert files[0] == files[1] != files[2]


def test_the_ledger_says_which_repeat_it_is_and_verifies(pair, copies):
    for number, name in ((1, "run-1"), (2, "run-2")):
        assert f"repeat = {number}\n" in body(pair / name, "run")["terms"]["config"]
        assert any(line.code == "head" for line in verify_folder(pair / name))
    file = copies / "run-2" / "config.toml"
    file.write_text(file.read_text().replace("repeat = 2", "repeat = 3"))
    with pytest.raises(Exception, match=r"not the config in the ledger: run\.repeat is 3 there and 2 here"):
        list(verify_folder(copies / "run-2"))


# -------------------------------------------------------------------------------------- what is comparable


def test_two_repeats_are_compared(pair):
    found = compared([pair / "run-1", pair / "run-2"])
    totals = [run.facts.total for run in found.runs]
    assert found.numbers.scores == pytest.approx(np.stack([total.raw for total in totals]))
    assert found.numbers.training == pytest.approx(np.abs(totals[0].raw - totals[1].raw) / np.sqrt(2))
    assert found.labels == ("run 1", "run 2")
    assert found.notes == ()
    assert [run.repeat for run in found.runs] == [1, 2]
    assert found.lede[0].startswith("The same four members trained two times on the same data, and all runs ")


def refused(*paths, **asked):
    with pytest.raises(NotComparable) as error:
        compared(paths, **asked)
    assert str(error.value).startswith(f"{error.value.other} cannot be compared: ")
    return error.value


def test_one_run_alone_one_run_twice_and_one_training_twice_are_refused(pair, copies, tmp_path):
    assert refused(pair / "run-1").code == "few"
    found = refused(pair / "run-1", pair / "run-2", copies / "run-1")
    assert (found.code, found.first, found.other) == ("same", str(pair / "run-1"), str(copies / "run-1"))
    run(again(2), tmp_path / "once-more")
    assert refused(pair / "run-2", tmp_path / "once-more").code == "training"


@pytest.mark.parametrize(
    ("override", "code", "expected", "got"),
    [
        ("training.rounds=3", "rounds", "2", "3"),
        ("training.lr=0.002", "settings", "0.001", "0.002"),
        ("run.seed=1", "settings", "0", "1"),
        ('corruption.label_flip=["client-1"]', "settings", "[]", "['client-1']"),
        ("scoring.game=renormalised", "scoring", "'additive'", "'renormalised'"),
        ("payment.missing=own-mean", "scoring", "'zero'", "'own-mean'"),
        ("scoring.utilities=['brier']", "scoring", "['expected-accuracy', 'accuracy']", "['brier']"),
        (
            "partition.names=['A', 'B', 'C', 'D']", "members",
            "client-0, client-1, client-2, client-3", "A, B, C, D",
        ),
    ],
)  # fmt: skip
def test_runs_of_other_settings_are_refused_with_both_values(pair, tmp_path, override, code, expected, got):
    run(again(2, override), tmp_path / "other")
    found = refused(pair / "run-1", tmp_path / "other")
    assert (found.code, found.expected, found.got) == (code, expected, got)


def test_a_run_that_is_not_over_is_refused(pair, tmp_path):
    with Folder(tmp_path / "half", again(3)) as folder:
        rehearsal = Rehearsal(again(3), folder)
        rehearsal.join()
        rehearsal.round(1)
        rehearsal.recorder.write_scores()
    assert refused(pair / "run-1", tmp_path / "half").code == "unfinished"


def test_another_key_of_the_same_pool_is_no_other_pool_but_the_data_are_not_compared(pair, tmp_path):
    run(again(3), tmp_path / "own-key")
    found = compared([pair / "run-1", tmp_path / "own-key"])
    assert [note.code for note in found.notes] == ["repeats-data"]


def npz(path, rng, train):
    x = rng.integers(0, 256, (400, 6, 6), dtype=np.uint8)
    y = np.arange(400) % 3
    np.savez(path, x_train=train(x[:300]), y_train=y[:300], x_test=x[300:], y_test=y[300:])


@pytest.mark.parametrize("part", ["train", "test"])
def test_other_data_under_the_same_name_are_found_by_their_fingerprint(tmp_path, part):
    file = tmp_path / "data.npz"
    overrides = ("data.name=npz", f"data.path={json.dumps(str(file))}", "data.test_size=0")
    npz(file, np.random.default_rng(0), lambda x: x)
    run(again(1, *overrides), tmp_path / "one")
    if part == "train":
        npz(file, np.random.default_rng(0), lambda x: x[::-1])
    else:
        npz(file, np.random.default_rng(1), lambda x: x)
    run(again(2, *overrides), tmp_path / "two", pool_key=stored_pool_key(tmp_path / "one"))
    found = refused(tmp_path / "one", tmp_path / "two")
    assert found.code == {"train": "data", "test": "pool"}[part]


def test_a_settled_run_is_compared_by_what_was_stated(tmp_path):
    settled = ("scoring.method=settled", "training.rounds=4")
    run(tiny(*settled), tmp_path / "one")
    run(tiny(*settled, "run.repeat=2"), tmp_path / "two", pool_key=stored_pool_key(tmp_path / "one"))
    found = compared([tmp_path / "one", tmp_path / "two"])
    assert (found.first.ranked_by, found.numbers.runs[0].score) == ("PHI", "PHI")
    assert found.numbers.test is not None
    assert all(run.facts.convergence is not None for run in found.runs)
    assert found.notes == ()
    assert refused(tmp_path / "one", tmp_path / "two", score="ALPHA").code == "score"


def test_another_score_and_another_utility_can_be_compared(pair):
    found = compared([pair / "run-1", pair / "run-2"], utility="accuracy", score="LOO", missing="own-mean")
    assert (found.first.utility, found.numbers.runs[0].score) == ("accuracy", "LOO")
    assert refused(pair / "run-1", pair / "run-2", score="PHI").code == "unsettled"


# ------------------------------------------------------------------------------------- between machines


def machines(home, number, **more):
    """A run between machines; its members start from a model of its own."""
    home.mkdir()
    made = Federation(home, members=4, rounds=4, **more)
    made.run_id = f"{number:032x}"
    made.model = made.model + np.float32(0.01 * number)
    return made.run().folder


def test_runs_between_machines_are_compared_if_members_and_pool_are_the_same(tmp_path):
    folders = [machines(tmp_path / f"h{k}", k) for k in (1, 2, 3)]
    found = compared(folders)
    assert [note.code for note in found.notes] == ["repeats-machines"]
    assert found.labels == ("run 1", "run 2", "run 3")
    other = refused(folders[0], machines(tmp_path / "h4", 4, seed=5))
    assert other.code == "keys"
    assert refused(folders[0], machines(tmp_path / "h5", 5, masks=False)).code == "engine"


# ------------------------------------------------------------------------------------------- its folders


def test_runs_have_folders_of_their_own_and_what_is_there_is_resumed_or_refused(copies, tmp_path):
    planned = repeats_in(tmp_path / "new", again(1), 3, resume=False)
    assert [(run.folder.name, run.number, run.config.run.repeat, run.begun) for run in planned] == [
        (f"run-{number}", number, number, False) for number in (1, 2, 3)
    ]
    assert not (tmp_path / "new").exists()
    assert runs_of([copies]) == [copies / "run-1", copies / "run-2"]
    assert runs_of([copies / "run-2", copies / "run-1"]) == [copies / "run-2", copies / "run-1"]
    assert [one.begun for one in repeats_in(copies, again(1), 3, resume=True)] == [True, True, False]


def not_repeated(said, folder, count, *overrides, resume=True):
    with pytest.raises(StoreError, match=said):
        repeats_in(folder, again(1, *overrides), count, resume=resume)


def test_fewer_runs_other_ones_and_folders_of_something_else_are_refused(copies, tmp_path):
    not_repeated("holds run-1 already; use --resume", copies, 2, resume=False)
    not_repeated("run-1: holds a single run; repeats need a folder of their own", copies / "run-1", 2)
    shutil.rmtree(copies / "run-1")
    not_repeated(r"run-2: holds a run with a different config: run\.seed is 0 there", copies, 3, "run.seed=1")
    (copies / "run-2").rename(copies / "run-4")
    not_repeated("holds run-4, and 3 runs were asked for", copies, 3)
    (copies / "notes.txt").write_text("mine")
    not_repeated("got notes", copies, 4)
    not_repeated("nothing to resume, there is no run-1 in it", tmp_path / "new", 2)
    (tmp_path / "all" / "run-1").mkdir(parents=True)
    (tmp_path / "all" / "run-1" / "scores.json").write_text("{}")
    not_repeated("run-1: not empty", tmp_path / "all", 2)


# --------------------------------------------------------------------------------------- the command line


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(as_toml(TINY | {"model": {"name": "mlp"}, "secure_aggregation": {"enabled": False}}))
    return file


@pytest.mark.long
def test_the_command_trains_several_times_compares_and_goes_on(config, tmp_path):
    home = tmp_path / "all"
    result = call("run", config, "--repeat", 2, "--out", home)
    assert result.exit_code == 0, result.output
    assert f"run 2 of 2: {home / 'run-2'}" in result.stdout
    assert "mean over runs" in result.stdout
    assert (home / "comparison.html").read_text().startswith("<!doctype html>")
    before = (home / "run-2" / "ledger.sqlite").read_bytes()
    result = call("run", config, "--repeat", 3, "--out", home, "--resume")
    assert result.exit_code == 0, result.output
    assert (home / "run-2" / "ledger.sqlite").read_bytes() == before
    assert len({body(home / f"run-{k}", "pool")["root"] for k in (1, 2, 3)}) == 1
    assert len({body(home / f"run-{k}", "run")["m0"] for k in (1, 2, 3)}) == 3
    told = json.loads(call("compare", home, "--format", "json").stdout)
    assert [one["repeat"] for one in told["runs"]] == [1, 2, 3]
    scores = np.array(told["scores"])
    assert told["mean"] == pytest.approx(scores.mean(axis=0))
    assert told["training"] == pytest.approx(scores.std(axis=0, ddof=1))
    assert told["freedom"] == 2


def test_a_repeat_of_a_repeat_is_refused(config, tmp_path):
    error = call("run", config, "--out", tmp_path / "all", "--repeat", 2, "--set", "run.repeat=3").exception
    assert error.setting == "run.repeat"


def test_compare_says_why_not_in_one_line(pair, tmp_path, capsys):
    with pytest.raises(SystemExit), errors_as_messages():
        raise call("compare", pair / "run-1", pair / "run-1").exception
    assert capsys.readouterr().err.startswith(f"error: {pair / 'run-1'} cannot be compared: it is ")
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(SystemExit), errors_as_messages():
        raise call("compare", pair, "--out", tmp_path / "mine.html").exception
    assert (tmp_path / "mine.html").read_text() == "mine"
