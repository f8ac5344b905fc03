"""Jobs of NVFlare whose sites are in this process: going on, a site's door, what a job holds."""

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.logging import constants
from nvflare.collab.api.exceptions import RunAborted as JobAborted

import fedmerit.nvflare
import linear_task
from fedmerit.carriers.folders import add, state
from fedmerit.errors import ConfigError, ProtocolError, RunAborted, StoreError
from fedmerit.nvflare.server import JobHost
from fedmerit.nvflare.site import JobTask, digest_of_job
from fedmerit.protocol.messages import Ask, Parcel
from fedmerit.protocol.settler import SETTLING
from fedmerit.verify import verify_folder
from flare import job, task_named
from runs import bodies_of, records_of, rounds_in
from scenarios import Scenario
from transports import make_keys

NAMES = Scenario().names


@pytest.fixture
def home(tmp_path):
    make_keys(tmp_path, Scenario())
    return tmp_path


def own(home, **more):
    return {name: {"key": home / f"{name}.pem", "roster": home / "roster.toml", **more} for name in NAMES}


def run(home, *, sites=None, rounds=2, spare=0, task="linear_task", config=None, **options):
    host = {"roster": home / "roster.toml", "folder": home / "run", "join": 0.5, "page": False}
    host["config"] = {"secure_aggregation": {"bound": 8.0}, **(config or {})}
    main = lambda: JobHost(JobTask(task), host, 60.0).run(rounds, spare)  # noqa: E731
    return job(home, sites or own(home), main, **{"task": task, **options})


def stopped(home, at, number, **options):
    """NVFlare ends a job when the last member is asked for this, as it does when a site's process dies."""
    aborted = Signal()

    def passes(name, sent, answer):
        ask = Ask.unpack(Parcel(sent["head"], sent["arrays"]))[0]
        if ask.exchange == at and number in (ask.round, None) and name == NAMES[-1]:
            aborted.trigger(True)
        if aborted.triggered:
            raise JobAborted("gone")
        return answer()

    assert run(home, passes=passes, aborted=aborted, **options) is None
    assert aborted.triggered


# ------------------------------------------------------------------------------------------------- a new job

EXCHANGES = (
    ("advertise", 1), ("share", 1), ("train", 2), ("check", 2), ("unmask", 1), ("unmask", 2), ("report", 2),
    ("open", 2), ("agree", 2), ("agreed", 2), ("state", 2), ("settle", 2), ("close", 2),
)  # fmt: skip


@pytest.mark.parametrize(("at", "number"), EXCHANGES)
def test_a_new_job_goes_on_where_a_stopped_one_was(home, at, number):
    """Wherever a site's process dies: rounds with a sum stay, a spare one replaces the other, all settle."""
    stopped(home, at, number, spare=1)
    before = [record.kind for record in records_of(home / "run")]
    assert run(home, spare=1)["cumulative"]
    records = records_of(home / "run")
    assert [record.kind for record in records][: len(before)] == before
    assert sum(not one.aborted for one in rounds_in(home / "run")) == 2
    (settled,) = bodies_of(home / "run", "settled")
    assert (settled["missing"], settled["named"], settled["final"]) == ([], [], True)
    assert all(one["holds"] for one in settled["rounds"])
    assert {record.author for record in records if record.kind == "seen"} == {*NAMES}
    assert not any(one.blamed or one.declined for one in rounds_in(home / "run"))
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(home / "run"))


def test_rounds_that_have_a_sum_are_enough_and_a_job_after_the_end_trains_nothing(home, caplog):
    run(home, spare=2)
    assert "this run is over" not in caplog.text
    assert [one.aborted for one in rounds_in(home / "run")] == ["", ""]
    count = len(records_of(home / "run"))
    run(home, spare=2)
    assert len(records_of(home / "run")) == count
    assert "this run is over" in caplog.text


@pytest.mark.parametrize("at", ["train", "judge", "judged", "column", "state"])
def test_a_panel_needs_no_test_set_and_goes_on_too(home, at):
    task = task_named("judged", **{**vars(linear_task), "test_set": None})
    stopped(home, at, None, spare=1, task=task, config={"panel": {"least": 20}})
    scores = run(home, spare=1, task=task, config={"panel": {"least": 20}})["panel"]
    assert (scores["judges"], scores["holds"], scores["missing"]) == ([*NAMES], [True] * 4, [])
    assert "panel" in [line.code for line in verify_folder(home / "run", archive=home / "run" / "archive")]


def test_a_site_that_was_away_at_the_settlement_states_by_hand(home):
    def passes(name, sent, answer):
        ask = Ask.unpack(Parcel(sent["head"], sent["arrays"]))[0]
        if name == NAMES[1] and (
            ask.exchange in SETTLING or ((ask.exchange, ask.round) == ("join", 0) and begun())
        ):
            raise TimeoutError
        return answer()

    def begun():
        return (home / "run" / "ledger.sqlite").exists() and records_of(home / "run", "opening")

    run(home, passes=passes)
    assert bodies_of(home / "run", "settled")[-1]["missing"] == [NAMES[1]]
    file, messages = home / "stated.json", home / "run" / "archive" / "messages"
    state(home / f"{NAMES[1]}.pem", home / "roster.toml", messages, linear_task.gradient, file)
    assert add(home / "run", file).missing == ()
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(home / "run"))


def test_a_job_of_another_run_does_not_go_on_with_this_one(home):
    stopped(home, "train", 2)
    with pytest.raises(ConfigError, match="num_rounds"):
        run(home, rounds=3)
    with pytest.raises(StoreError, match="different config"):
        run(home, config={"payment": {"floor": 0.1}})
    model = {"w": np.zeros(linear_task.NUMBERS, np.float32), "steps": np.array(0)}
    other = task_named("other_first", **{**vars(linear_task), "first_model": lambda: model})
    with pytest.raises(StoreError, match="first model changed"):
        run(home, task=other)
    run(home)


def test_too_few_sites_end_the_job_and_the_next_one_may_begin_anew(home):
    few = dict(list(own(home).items())[:2])
    with pytest.raises(ProtocolError, match="2 of 4 members joined"):
        run(home, sites=few)
    run(home)
    assert len(rounds_in(home / "run")) == 2


def test_a_site_that_hangs_in_a_round_is_missing_there_and_nowhere_else(home):
    def passes(name, sent, answer):
        ask = Ask.unpack(Parcel(sent["head"], sent["arrays"]))[0]
        if (name, ask.exchange, ask.round) == (NAMES[2], "train", 1):
            raise TimeoutError("hangs")
        return answer()

    run(home, passes=passes)
    assert [one.included for one in rounds_in(home / "run")] == [(NAMES[0], NAMES[1], NAMES[3]), NAMES]


# ---------------------------------------------------------------------------------------------- a site's door


def refused(home, name, **options):
    """Why this site does not take part, as the server is told."""
    with pytest.raises(ProtocolError):
        run(home, **options)
    notes = (home / "run" / "notes.txt").read_text()
    return next(line for line in notes.splitlines() if f"node {name} " in line)


def test_a_site_without_a_key_of_its_own_does_not_join(home):
    assert "expected" in (told := refused(home, NAMES[0], sites=dict.fromkeys(NAMES)))
    assert "fedmerit.toml, with key and roster" in told


def test_a_site_whose_log_leaves_does_not_join(home, monkeypatch):
    monkeypatch.setattr(constants.ConfigService, "get_bool_var", lambda **asked: True)
    assert '"allow_log_streaming": false in local/resources.json' in refused(home, NAMES[0])


def test_a_site_trains_its_own_task_whatever_a_job_names(home):
    run(home, sites=own(home, task="linear_task"), task="linear_task")
    asked = []

    def spying(model):
        asked.append(model)
        raise AssertionError

    task_named("spying", **{**vars(linear_task), "train": spying})
    aside = home / "again"
    aside.mkdir()
    make_keys(aside, Scenario())
    options = {"roster": aside / "roster.toml", "folder": aside / "run", "join": 0.5, "page": False}
    options["config"] = {"secure_aggregation": {"bound": 8.0}}
    host = lambda: JobHost(JobTask("linear_task"), options, 60.0).run(1)  # noqa: E731
    job(aside, own(aside, task="linear_task"), host, task="spying")
    assert asked == []


BROKEN = {
    "raises": lambda model: 1 / 0,
    "returns no FLModel": lambda model: model.params,
    "returns other arrays": lambda model: FLModel(params={"w": np.zeros(3, np.float32)}),
    "is not finite": lambda model: FLModel(params={**model.params, "w": model.params["w"] * np.nan}),
}


@pytest.mark.parametrize("how", BROKEN)
def test_why_training_fails_stays_on_the_site(home, how, caplog):
    task = task_named("broken", **{**vars(linear_task), "train": BROKEN[how]})
    with pytest.raises(RunAborted):
        run(home, task=task)
    notes = (home / "run" / "notes.txt").read_text()
    assert "declined: client-0" in notes
    assert not any(word in notes for word in ("ZeroDivision", "FLModel", "shape", "finite"))
    assert "leaves round 1" in caplog.text


def test_an_update_may_be_a_difference(home):
    def train(model):
        after = linear_task.train(model)
        return FLModel(
            params={"w": after.params["w"] - model.params["w"], "steps": np.array(0)},
            params_type="DIFF",
            meta=after.meta,
        )

    task = task_named("difference", **{**vars(linear_task), "train": train})
    run(home, task=task, seed=0)
    whole = home / "whole"
    whole.mkdir()
    make_keys(whole, Scenario())
    run(whole, seed=0)
    assert [one.body["m"] for one in rounds_in(home / "run")] == [
        one.body["m"] for one in rounds_in(whole / "run")
    ]


def test_anything_but_bytes_and_arrays_is_refused_without_a_trace(home):
    answers = []

    def passes(name, sent, answer):
        if not answers:
            for head, arrays in ((b"x", {"x": np.array(["text"])}), ("text", {}), (b"", {})):
                sent.update(head=head, arrays=arrays)
                answers.append(answer())
            raise TimeoutError
        return answer()

    run(home, passes=passes)
    assert answers == ["refuses; the reason is in its own log"] * 3


def test_jobs_that_differ_have_different_digests(tmp_path):
    for name, code in (("one", "a = 1"), ("same", "a = 1"), ("other", "a = 2")):
        (tmp_path / name / "custom" / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "custom" / "task.py").write_text(code)
        (tmp_path / name / "custom" / "__pycache__" / "task.pyc").write_text(name)
    one, same, other = (digest_of_job(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other


# ------------------------------------------------------------------------------------------------- the recipe


def test_a_job_brings_the_task_or_no_code_at_all(tmp_path):
    make = partial(
        fedmerit.nvflare.recipe, "ours", num_rounds=3, min_clients=3, folder="run", roster="roster.toml",
        config={"scoring": {"method": "settled"}},
    )  # fmt: skip
    for task, shipped in ((linear_task, ["linear_task.py"]), ("linear_task", [])):
        folder = tmp_path / str(len(shipped))
        make(task).export(str(folder))
        assert [path.name for path in sorted(folder.rglob("*.py"))] == shipped * 1
        texts = [path.read_text() for path in folder.rglob("config_fed_*.json")]
        assert len(texts) == 2
        assert {json.loads(text)["components"][0]["path"] for text in texts} == {
            "fedmerit.nvflare.site.Site", "fedmerit.nvflare.server.Hub",
        }  # fmt: skip


def test_the_task_is_the_module_that_asks_unless_another_is_given():
    given = {"num_rounds": 3, "min_clients": 3, "folder": "run", "roster": "roster.toml"}
    assert fedmerit.nvflare.recipe("ours", **given).client.task == __name__
    assert fedmerit.nvflare.recipe("ours", "not.installed.here", **given).client.task == "not.installed.here"


def test_a_recipe_says_what_it_lacks():
    make = partial(fedmerit.nvflare.recipe, "ours", linear_task, num_rounds=3, min_clients=3, folder="run")
    with pytest.raises(ConfigError, match="rehearsal"):
        make()
    with pytest.raises(ConfigError, match="rehearsal"):
        make(roster="roster.toml", rehearsal="keys")
    with pytest.raises(ConfigError, match="expected a function 'train'"):
        JobTask("json").call("train")


def test_the_core_needs_no_nvflare():
    code = "import sys; sys.modules['nvflare'] = None; import fedmerit, fedmerit.nvflare, fedmerit.cli\n"
    code += "try: fedmerit.nvflare.recipe\nexcept fedmerit.errors.MissingExtra as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install nvflare" in done.stdout
