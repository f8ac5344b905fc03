"""Whole runs in one process: what they write, what changes it and what must not."""

import json

import numpy as np
import pytest
from tiny import ALL, TINY, tiny

from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, DataError, FedmeritError, StoreError
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.records import rounds_of
from fedmerit.protocol.terms import encoding_of
from fedmerit.scoring.files import read
from fedmerit.scoring.scores import alpha, ee, fp, ioi, loo
from fedmerit.simulation.plan import plan
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_folder

OFF = "secure_aggregation.enabled=false"


def scores_json(folder):
    return (folder / "scores.json").read_bytes()


def notes_of(*overrides, folder):
    seen = []
    content = run(tiny(*overrides), folder, watch=lambda step: seen.append(step))
    return content, [step.text for step in seen if step.stage == "note"]


def test_a_run_writes_the_documented_files_and_scores(rehearsed):
    content, folder = rehearsed
    assert {"config.toml", "ledger.sqlite", "scores.json", "scores.csv"} <= {p.name for p in folder.iterdir()}
    assert json.loads(scores_json(folder)) == json.loads(json.dumps(content))
    assert content["clients"] == ["client-0", "client-1", "client-2", "client-3"]
    assert content["utility"] == "expected-accuracy"
    assert list(content["companions"]) == ["accuracy", "brier"]
    assert [one["round"] for one in content["rounds"]] == [1, 2]
    first = content["rounds"][0]
    assert first["participants"] == content["clients"]
    assert set(first["scores"]) == {"LOO", "IOI", "ALPHA", "FP", "EE", "SURPLUS", "COS", "PHI"}
    for name in ("alone", "without", "se_loo", "se_ioi", "se_alpha", "se_alpha_total", "cosine"):
        assert len(first["reports"][name]) == 4
    assert "samples" not in first["reports"]  # nobody asked for disclosure
    one, two = read(folder / "scores.json")
    assert two.empty == pytest.approx(one.grand)  # the same slice: v(M) of round 1 is v(M0) of round 2
    assert first["scores"]["FP"] == fp(one).values.tolist()
    assert first["scores"]["EE"] == ee(one).values.tolist()
    total = alpha(one).values + alpha(two).values
    np.testing.assert_allclose(content["cumulative"]["ALPHA"], total, rtol=1e-12)


def test_reports_are_what_evaluating_the_plain_models_gives(rehearsed, tmp_path):
    """Fast path against slow path: rebuild M0 + U_i and M - U_i outside of the engine."""
    from fedmerit.simulation.setup import seed_for
    from fedmerit.simulation.training import train_many

    _, folder = rehearsed
    config = tiny(ALL)
    federation = prepare(config)
    seeds = [seed_for(config, "train", 1, name) for name in federation.names]
    data = [(client.x, client.y) for client in federation.clients]
    trained = train_many(federation.network, federation.first, data, federation.training, seeds).vectors
    updates = [(vector.astype(np.float64) - federation.first) / 4 for vector in trained]
    shown = federation.pool.slice(1)
    grand = federation.first + sum(updates)
    for utility in ("expected-accuracy", "brier"):
        reports = next(r for r in _rounds(folder, utility) if r.round == 1)

        def value(model, utility=utility):
            return float(np.mean(federation.evaluate(model.astype(np.float32), shown)[utility]))

        assert reports.empty == pytest.approx(value(federation.first), abs=1e-6)
        assert reports.grand == pytest.approx(value(grand), abs=1e-6)
        alone = [value(federation.first + update) for update in updates]
        without = [value(grand - update) for update in updates]
        np.testing.assert_allclose(reports.alone, alone, atol=1e-6)
        np.testing.assert_allclose(reports.without, without, atol=1e-6)
        # the paired standard error, from per-sample values
        pair = federation.evaluate(grand.astype(np.float32), shown)[utility]
        pair = pair - federation.evaluate((grand - updates[0]).astype(np.float32), shown)[utility]
        errors = [np.std(pair[shown.y == one], ddof=1) ** 2 * np.sum(shown.y == one) for one in set(shown.y)]
        assert reports.se_loo[0] == pytest.approx(np.sqrt(np.sum(errors)) / 50, rel=1e-3)  # by class


def _rounds(folder, utility):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return [one.to_reports(utility) for one in rounds_of(ledger)]


def later(*overrides):
    return pytest.param(overrides, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.weights=secret", "training.weight_cap=100"),
        ("training.weights=scores",),
        later(
            "training.weights=roster",
            "training.roster_weights={client-0=1, client-1=2, client-2=3, client-3=0.5}",
        ),
        ("scoring.game=renormalised", "scoring.solo=true"),
        later(
            "data.test_reveal=per-round", "scoring.utilities=['accuracy', 'balanced-accuracy', 'neg-loss']"
        ),
        ("participation.lost={client-1='1:masked'}", "participation.away={client-2=[2]}"),
        later("participation.lost={client-1='1:unmask', client-3='2:report'}"),
        later("partition.clients=5", "partition.sizes=[20,20,20,20,20]", "participation.fraction=0.8"),
        ("corruption.free_rider={client-1='zero', client-2='noise', client-3='stale'}",),
    ],
    ids=lambda overrides: " ".join(overrides)[:60] or "defaults",
)
def test_secure_aggregation_on_and_off_end_with_the_same_bytes(tmp_path, overrides):
    run(tiny(*overrides), tmp_path / "on")
    run(tiny(*overrides, OFF), tmp_path / "off")
    assert scores_json(tmp_path / "on") == scores_json(tmp_path / "off")
    assert list(verify_folder(tmp_path / "on"))
    assert any(line.startswith("unsigned") for line in verify_folder(tmp_path / "off"))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(rehearsed, tmp_path):
    _, folder = rehearsed
    run(tiny(ALL), tmp_path / "again")
    assert scores_json(tmp_path / "again") == scores_json(folder)
    run(tiny("run.seed=1", ALL), tmp_path / "other")
    assert scores_json(tmp_path / "other") != scores_json(folder)


def test_it_takes_two_evaluations_a_member_and_two_more(tmp_path, monkeypatch):
    from fedmerit.simulation import setup

    count = []
    original = setup.Federation.evaluate
    monkeypatch.setattr(setup.Federation, "evaluate", lambda *a: count.append(1) or original(*a))
    run(tiny(), tmp_path / "run")
    assert len(count) == (2 * 4 + 2) + (2 * 4 + 1)  # M of round 1 is M0 of round 2
    count.clear()
    run(tiny("data.test_reveal=per-round"), tmp_path / "fresh")
    assert len(count) == 2 * (2 * 4 + 2)


def test_what_the_server_receives_holds_no_plain_update(tmp_path):
    """The transcript of a whole run: no member's words and no bytes of its update in any message."""
    received, plain = [], []

    class Spy:
        def summed(self, one):
            for name in one.outcome.included:
                state = rehearsal.transport.states[name]
                delta = state.get(f"{one.outcome.round:04d}.update")[0]
                plain.append((delta, one.contribution(name)))

    config = tiny("model.name=mlp")
    with Folder(tmp_path / "run", config) as folder:
        rehearsal = Rehearsal(config, folder, observe=lambda *seen: received.append(seen), analyses=[Spy()])
        rehearsal.run()
    sums = {"advertise", "share", "masked", "check", "unmask"}
    assert {stage for stage, _, _ in received} == {"join", *sums, "report", "close"}
    assert len(plain) == 8
    whole = b"".join(message for _, _, message in received)
    encoding = encoding_of(config, plain[0][0].size, 4, None)
    for delta, contribution in plain:
        assert contribution.step == encoding.step
        rounded = contribution.part(slice(None))
        for values in (contribution.integers, delta, delta.astype(np.float64), rounded):
            for start in range(0, 4000, 400):
                assert values.tobytes()[start : start + 24] not in whole
    # ... while the check itself does find words that were put there
    masked = [message for stage, _, message in received if stage == "masked"]
    assert masked[0][5000:5024] in whole


# --- who takes part -------------------------------------------------------------------------------


def test_absence_loss_and_silence_are_recorded_as_what_they_are(tmp_path):
    content = run(
        tiny(
            "training.rounds=4",
            "participation.away={client-0=[1]}",
            "participation.lost={client-1='2:masked', client-2='3:unmask', client-3='4:report'}",
        ),
        tmp_path / "run",
    )
    one, two, three, four = content["rounds"]
    assert one["participants"] == ["client-1", "client-2", "client-3"]
    assert two["participants"] == ["client-0", "client-2", "client-3"]  # its masked input never came
    assert "silent" not in two
    assert three["silent"] == ["client-2"]  # summed, then gone
    assert four["silent"] == ["client-3"]
    for silenced in (three, four):
        assert silenced["scores"]["FP"] is None
        assert silenced["scores"]["EE"] is None
        assert len(silenced["scores"]["ALPHA"]) == 3
    assert content["coverage"] == [0.75, 0.75, 0.75, 0.75]


def test_too_few_members_abort_the_round_and_leave_the_model_alone(tmp_path):
    content, notes = notes_of("participation.away={client-0=[1], client-1=[1]}", folder=tmp_path / "run")
    assert content["rounds"][0]["reports"] is None
    assert content["rounds"][0]["aborted"] is True
    assert any(
        "round 1 aborted, the model is unchanged: 2 scheduled, at least 3 of the 4 members are needed" in note
        for note in notes
    )
    assert content["rounds"][1]["participants"] == content["clients"]
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        aborted, _ = rounds_of(ledger)
        assert aborted.body["m"] == next(ledger.records("run")).body["m0"]
    assert len(read(tmp_path / "run" / "scores.json")) == 1  # what can be scored still is


@pytest.mark.parametrize("switch", ["secure_aggregation.enabled=true", OFF])
@pytest.mark.parametrize("stage", ["advertise", "share", "masked", "check", "unmask"])
def test_n_is_who_was_scheduled_and_never_who_answered(tmp_path, switch, stage):
    """5 members, t = 4: two lost are too many, and no smaller sum takes the place of the round."""
    config = tiny(
        "training.rounds=1",
        "partition.clients=5",
        "partition.sizes=[20,20,20,20,20]",
        f"participation.lost={{client-0='1:{stage}', client-1='1:{stage}'}}",
        switch,
    )
    content = run(config, tmp_path / "run")
    assert content["rounds"][0]["aborted"] is True
    assert content["rounds"][0]["participants"] == []
    assert list(verify_folder(tmp_path / "run"))


def test_a_threshold_above_the_number_scheduled_aborts_the_round(tmp_path):
    content, notes = notes_of(
        "secure_aggregation.threshold=4", "participation.away={client-0=[1]}", folder=tmp_path / "run"
    )
    assert content["rounds"][0]["aborted"] is True
    assert any("3 scheduled, at least 4 of the 4 members are needed" in note for note in notes)


@pytest.mark.parametrize("switch", ["secure_aggregation.enabled=true", OFF])
def test_a_member_that_diverges_withdraws_and_is_recorded(tmp_path, monkeypatch, switch):
    from fedmerit.simulation import transport as local

    original = local.train_many

    def diverge(network, start, data, settings, seeds):
        trained = original(network, start, data, settings, seeds)
        if len(data[0][1]) == 50:  # client-1
            trained.vectors[0][:] = np.nan
        return trained

    monkeypatch.setattr(local, "train_many", diverge)
    content, notes = notes_of(switch, folder=tmp_path / "run")
    assert content["rounds"][0]["participants"] == ["client-0", "client-2", "client-3"]
    assert any(
        note.startswith("round 1: client-1 declined and is not in the sum: stage masked") for note in notes
    )
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert rounds_of(ledger)[0].declined == ("client-1",)


def test_an_update_beyond_the_bound_is_declined_or_clipped_if_asked_for(tmp_path):
    content, notes = notes_of("secure_aggregation.bound=0.0001", folder=tmp_path / "small")
    assert content["rounds"][0]["aborted"] is True  # nobody is within it
    assert sum("declined" in note for note in notes) == 8
    content, _ = notes_of(
        "secure_aggregation.bound=0.0001", "secure_aggregation.clip=true", folder=tmp_path / "clip"
    )
    assert content["rounds"][0]["participants"] == content["clients"]


# --- games, utilities, weights, solo --------------------------------------------------------------


def test_both_games_agree_on_the_grand_coalition_and_differ_elsewhere(rehearsed, tmp_path):
    additive, _ = rehearsed
    renormalised = run(tiny("scoring.game=renormalised"), tmp_path / "run")
    ours, theirs = additive["rounds"][0]["reports"], renormalised["rounds"][0]["reports"]
    assert (ours["empty"], ours["grand"]) == (theirs["empty"], theirs["grand"])
    assert ours["alone"] != theirs["alone"]
    # U_i is a quarter of d_i: alone in the renormalised game moves four times as far
    assert np.mean(np.abs(np.array(theirs["alone"]) - theirs["empty"])) > np.mean(
        np.abs(np.array(ours["alone"]) - ours["empty"])
    )


def test_every_utility_runs_and_a_users_own_too(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def margin(model, images, labels):\n"
        "    p = model(images).softmax(1)\n"
        "    return p.gather(1, labels[:, None])[:, 0].clamp(0, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["expected-accuracy", "accuracy", "brier", "balanced-accuracy", "neg-loss", "mine:margin"]
    content = run(tiny(f"scoring.utilities={names}"), tmp_path / "run")
    assert list(content["companions"]) == names[1:]
    np.testing.assert_allclose(
        content["companions"]["mine:margin"]["cumulative"]["ALPHA"], content["cumulative"]["ALPHA"], atol=1e-7
    )
    assert content["companions"]["neg-loss"]["rounds"][0]["reports"]["grand"] < 0
    # a balanced pool: balanced accuracy is accuracy
    pair = [content["companions"][name]["rounds"][0]["reports"]["alone"] for name in names[1:4:2]]
    np.testing.assert_allclose(*pair, atol=1e-12)


def test_fresh_slices_are_disjoint_and_the_error_of_the_sum_adds_as_squares(tmp_path):
    content = run(tiny("data.test_reveal=per-round"), tmp_path / "run")
    one, two = (entry["reports"] for entry in content["rounds"])
    assert one["slice"] != two["slice"]
    expected = np.hypot(one["se_alpha"], two["se_alpha"])
    np.testing.assert_allclose(content["stderr"]["ALPHA"], expected)
    assert one["se_alpha_total"] == one["se_alpha"]


def test_on_the_same_samples_the_running_error_is_not_the_root_of_squares(rehearsed):
    content, _ = rehearsed
    one, two = (entry["reports"] for entry in content["rounds"])
    assert one["slice"] == two["slice"]
    assert content["stderr"]["ALPHA"] == two["se_alpha_total"]
    assert not np.allclose(two["se_alpha_total"], np.hypot(one["se_alpha"], two["se_alpha"]), rtol=1e-3)


def test_score_weights_are_public_start_uniform_and_follow_the_scores(tmp_path):
    content = run(tiny("training.weights=scores", "training.rounds=3"), tmp_path / "run")
    from fedmerit.identity import number
    from fedmerit.scoring.agreement import normalise

    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        weights = [record.body["weights"] for record in ledger.records("schedule")]
    assert [number(value) for value in weights[0].values()] == [1.0] * 4
    reports = read(tmp_path / "run" / "scores.json")
    expected = np.clip(normalise(alpha(reports[0]).values), 0.1, 3.0)
    np.testing.assert_allclose([number(value) for value in weights[1].values()], expected)
    assert content["rounds"][2]["participants"] == content["clients"]


def test_weights_from_the_current_round_are_the_papers_and_mark_the_run_as_analysis(tmp_path):
    """They are those of this round's own alpha under plain averaging, from round 1 on."""
    from fedmerit.identity import number
    from fedmerit.scoring.agreement import normalise

    run(tiny("training.rounds=1"), tmp_path / "plain")
    expected = np.clip(normalise(alpha(read(tmp_path / "plain" / "scores.json")[0]).values), 0.1, 3.0)
    for switch in ("secure_aggregation.enabled=true", OFF):
        folder = tmp_path / switch.replace("=", "-")
        content = run(tiny("training.rounds=1", "training.weights=current-scores", switch), folder)
        assert content["analysis"] is True
        with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            (schedule,) = ledger.records("schedule")
        weights = [number(value) for value in schedule.body["weights"].values()]
        np.testing.assert_allclose(weights, expected, rtol=1e-3)
        assert "analysis: plain updates were analysed" in list(verify_folder(folder))
    assert "analysis" not in run(tiny("training.rounds=1", "training.weights=scores"), tmp_path / "past")


@pytest.mark.parametrize("score", ["LOO", "IOI", "FP", "EE", "COS"])
def test_other_scores_can_weigh_too(tmp_path, score):
    overrides = ("training.rounds=2", f"training.weight_score={score}")
    for kind in ("scores", "current-scores"):
        content = run(tiny(*overrides, f"training.weights={kind}"), tmp_path / kind)
        assert content["rounds"][1]["participants"] == content["clients"]


def test_secret_weights_are_in_no_record(tmp_path):
    run(tiny("training.weights=secret"), tmp_path / "run")
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        bodies = [record.body for record in ledger.records()]
    from fedmerit.identity import number

    totals = [number(body["weight"]) for body in bodies if "weight" in body]
    assert totals == [220.0, 220.0]  # 60 + 50 + 70 + 40: the total, and nothing else
    assert all(body.get("samples") is None and body.get("weights") is None for body in bodies)


def test_samples_are_disclosed_only_if_asked_for(tmp_path):
    content = run(tiny("training.rounds=1", "scoring.disclose_samples=true"), tmp_path / "run")
    assert content["rounds"][0]["reports"]["samples"] == [60, 50, 70, 40]


def test_solo_is_the_singleton_of_the_retraining_game(tmp_path):
    """Trained alone from the first model with the member's own seeds, round after round."""
    from fedmerit.simulation.setup import seed_for
    from fedmerit.simulation.training import train_many

    config = tiny("scoring.solo=true")
    content = run(config, tmp_path / "run")
    federation = prepare(config)
    client = federation.clients[2]
    vector = federation.first
    for number in (1, 2):
        seeds = [seed_for(config, "train", number, client.name)]
        data = [(client.x, client.y)]
        (vector,) = train_many(federation.network, [vector], data, federation.training, seeds).vectors
        value = float(
            np.mean(federation.evaluate(vector, federation.pool.slice(number))["expected-accuracy"])
        )
        assert content["rounds"][number - 1]["reports"]["solo"][2] == pytest.approx(value, abs=1e-9)
    merit = np.array(content["cumulative"]["MERIT"])
    first, last = read(tmp_path / "run" / "scores.json")
    expected = (last.solo - last.solo_empty) + ioi(first).values + ioi(last).values
    np.testing.assert_allclose(merit, expected)


# --- corruption -----------------------------------------------------------------------------------


def test_a_zero_free_rider_is_a_null_player_with_a_null_cosine(tmp_path):
    content = run(tiny("corruption.free_rider={client-3='zero'}"), tmp_path / "run")
    one = read(tmp_path / "run" / "scores.json")[0]
    assert loo(one).values[3] == ioi(one).values[3] == 0.0
    assert content["rounds"][0]["reports"]["cosine"][3] is None
    assert content["cumulative"]["ALPHA"][3] == 0.0


def test_a_stale_free_rider_sends_back_an_old_model(tmp_path):
    content = run(tiny("training.rounds=3", "corruption.free_rider={client-3='stale'}"), tmp_path / "run")
    cosines = [entry["reports"]["cosine"][3] for entry in content["rounds"]]
    assert cosines[0] is None  # the first model: no update
    assert cosines[1] < 0  # M0 of round 1 while the others went on: it pulls back
    assert cosines[2] < 0


def test_duplicated_data_is_seen_as_equal_contribution_only_up_to_training_noise(tmp_path):
    run(tiny("corruption.duplicate={client-1='client-0'}"), tmp_path / "run")
    one = read(tmp_path / "run" / "scores.json")[0]
    values = alpha(one).values
    assert values[0] != values[1]  # own seed, own order of batches


def test_who_trains_on_the_test_set_knows_it_whole_only_if_it_is_fixed():
    fixed = prepare(tiny("corruption.test_set=['client-1']"))
    assert len(fixed.training_data(fixed.clients[1], 1)[1]) == 50 + 50
    fresh = prepare(tiny("corruption.test_set=['client-1']", "data.test_reveal=per-round"))
    assert len(fresh.training_data(fresh.clients[1], 1)[1]) == 50
    x, y = fresh.training_data(fresh.clients[1], 2)
    assert len(y) == 50 + 25
    np.testing.assert_array_equal(x[50:], fresh.pool.slice(1).x)
    assert len(fresh.training_data(fresh.clients[0], 2)[1]) == 60


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_batch_norm_statistics_are_aggregated_evaluated_and_their_counters_named(tmp_path):
    sizes = "partition.sizes=[12,12,12]"
    content, notes = notes_of(
        "model.name=resnet18", "model.norm=batch", "training.rounds=1", "partition.clients=3", sizes,
        "data.test_size=10", "scoring.utilities=['accuracy']", folder=tmp_path / "run",
    )  # fmt: skip
    assert any("num_batches_tracked" in note for note in notes)
    assert any("3 members: none may be lost" in note for note in notes)
    assert content["rounds"][0]["participants"] == ["client-0", "client-1", "client-2"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("partition.clients=2",), ConfigError, "partition.clients: expected 3 to 1024 members"),
        (
            ("partition.scheme=dirichlet", "partition.mu=0"),
            ConfigError,
            "partition.mu: expected a number above 0",
        ),
        (
            ("partition.scheme=iid", "partition.sizes=[]", "partition.clients=500"),
            DataError,
            "500 clients with at least 10 each",
        ),
        (("data.test_size=5000",), DataError, "test_size|fashion-mini"),
        (("data.name=npz", "data.path=nowhere.npz"), DataError, "nowhere.npz: no such file"),
        (("data.name=npz",), DataError, "needs the path"),
        (("scoring.utilities=['luck']",), ConfigError, "scoring.utilities: expected expected-accuracy"),
        (("model.name=vgg",), ConfigError, "model.name"),
        (("run.device=quantum",), ConfigError, "run.device: expected auto, cpu or cuda"),
        (("corruption.label_noise={client-9=0.5}",), ConfigError, "unknown member 'client-9'"),
        (("corruption.label_noise={client-1=1.5}",), ConfigError, "expected a rate from 0 to 1, got 1.5"),
    ],
)
def test_bad_settings_are_named_before_anything_runs(tmp_path, overrides, error, message):
    with pytest.raises(error, match=message):
        run(tiny(*overrides), tmp_path / "run")


def test_somebodys_own_code_fails_before_training_and_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "def broken(input_shape, classes):\n    raise RuntimeError('no weights')\n"
        "def odd():\n    return None\n"
        "def short(model, images, labels):\n    return labels[:3].float()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for setting, message in (
        ("model.name=theirs:broken", r"'theirs:broken' failed, called as .*: RuntimeError: no weights"),
        ("model.name=theirs:odd", "'theirs:odd' failed, called as"),
        ("scoring.utilities=['theirs:short']", "theirs:short"),
        ("run.device=meta", "run.device: expected auto, cpu or cuda, got 'meta'"),
    ):
        steps = []
        with pytest.raises(FedmeritError, match=message):
            run(tiny(setting), tmp_path / "run", watch=steps.append)
        assert not any(step.stage == "train" for step in steps)
    assert not list((tmp_path / "run").glob("keys/*.pem"))
    assert len(run(tiny("training.rounds=1"), tmp_path / "run")["rounds"]) == 1


def test_a_fraction_below_three_members_says_so(tmp_path):
    _, notes = notes_of("training.rounds=1", "participation.fraction=0.1", folder=tmp_path / "run")
    assert any(
        "participation.fraction 0.1 of 4 members is fewer than 3: 3 take part" in note for note in notes
    )


def test_a_run_that_could_not_start_can_be_started_again(tmp_path):
    """Nothing of the failed start is in the way once the file is there."""
    config = from_dict(TINY, ("data.name=npz", f"data.path={tmp_path / 'later.npz'}"))
    with pytest.raises(DataError):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    rng = np.random.default_rng(0)
    for size in (100, 300):  # with 100 there is too little to deal, which shows once the folder was made
        images, labels = rng.integers(0, 256, (size, 8, 8, 1), np.uint8), np.arange(size) % 5
        np.savez(tmp_path / "later.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
        if size == 100:
            with pytest.raises(DataError, match="they add up to 220 samples, the data has 100"):
                run(config, tmp_path / "run")
    content = run(config, tmp_path / "run", resume=True)
    assert len(content["rounds"]) == 2


def test_a_folder_in_use_or_of_another_config_is_refused(rehearsed):
    _, folder = rehearsed
    with pytest.raises(StoreError, match="not empty; use --resume"):
        run(tiny(ALL), folder)
    with pytest.raises(StoreError, match=r"a different config: training.rounds is 2 there and 3 here"):
        run(tiny("training.rounds=3"), folder, resume=True)
    before = scores_json(folder)
    run(tiny(ALL), folder, resume=True)  # finished: nothing to do, nothing changed
    assert scores_json(folder) == before


@pytest.mark.parametrize(
    ("size", "every", "advice"),
    [
        (40, 4, "data.test_size = 0 takes the test set as it is"),
        (0, 4, None),
        (0, 2, "draw the test set as the model will be used"),  # it is taken as it is already
    ],
)
def test_a_run_and_its_plan_say_where_members_train_on_another_class_mix_than_they_are_measured_on(
    tmp_path, size, every, advice
):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count, nth in (("train", 240, 4), ("test", 100, every)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
        arrays[f"y_{part}"] = (np.arange(count) % nth == 0).astype(np.int64)
    np.savez(tmp_path / "skewed.npz", **arrays)
    config = tiny("data.name=npz", f"data.path={tmp_path / 'skewed.npz'}", f"data.test_size={size}", OFF)
    said = (
        "class 0 makes 75% of the training data and 50% of the test pool: whoever pushes the model away from "
        f"it may be rewarded, even with wrong labels; {advice}"
    )
    for notes in (prepare(config).notes, plan(config, calibrate=False).notes):
        assert [note for note in notes if note.startswith("class ")] == ([said] if advice else [])


def test_a_plan_says_before_the_run_what_the_run_says_at_its_start(tmp_path):
    overrides = (
        "participation.away={client-0=[2], client-1=[1, 2]}",
        "secure_aggregation.check=false",
        "corruption.label_flip=['client-3']",
        "scoring.utilities=['expected-accuracy', 'tiny_measures:log_loss']",
    )
    (tmp_path / "tiny_measures.py").write_text(
        "def log_loss(model, images, labels):\n    return (model(images).argmax(1) != labels).double()\n"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        planned = plan(tiny(*overrides), calibrate=False).notes
        _, said = notes_of(*overrides, folder=tmp_path / "run")
    assert tuple(said[: len(planned)]) == planned
    for expected in (
        "Rehearsal: the labels of client-3 were flipped on purpose (corruption.label_flip).",
        "3 members: none may be lost, and any two of them can compute the third one's update",
        "no check: members do not compare what they are asked to unmask, so updates are hidden only from a "
        "server that follows the protocol",
        "participation.away: round 2 will be aborted: fewer than 3 of all 4 members are scheduled",
    ):
        assert planned.count(expected) == said.count(expected) == 1
    (lower,) = [note for note in planned if note.startswith("scoring.utilities: ")]
    assert "lower is better in 'tiny_measures:log_loss'" in lower
    assert any(note.startswith("round 2 aborted, the model is unchanged: ") for note in said)
    quiet = plan(tiny(), calibrate=False).notes
    assert not any("aborted" in note or "members" in note or "lower" in note for note in quiet)


def test_a_test_slice_of_few_samples_is_scored_in_a_rehearsal(tmp_path):
    """Between machines it is refused: few samples say too much about each."""
    x, y = np.random.default_rng(0).integers(0, 256, (260, 6, 6, 1), np.uint8), np.arange(260) % 2
    np.savez(tmp_path / "two.npz", x_train=x[:240], y_train=y[:240], x_test=x[240:], y_test=y[240:])
    few = ("data.name=npz", f"data.path={tmp_path / 'two.npz'}", "data.test_size=8")
    content = run(tiny(*few), tmp_path / "run")
    assert [len(one["participants"]) for one in content["rounds"]] == [4, 4]


def test_who_is_lost_to_the_federation_trains_alone_all_the_same(tmp_path):
    whole = run(tiny("scoring.solo=true", "training.rounds=3"), tmp_path / "whole")
    lost = run(
        tiny("scoring.solo=true", "training.rounds=3", "participation.lost={client-1='2:share'}"),
        tmp_path / "lost",
    )
    solo = [content["rounds"][2]["reports"]["solo"][1] for content in (whole, lost)]
    assert solo[0] == solo[1]
