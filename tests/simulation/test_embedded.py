"""Whole runs in one process: what they write, what changes it and what must not."""

import json

import numpy as np
import pytest

from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, DataError, FedmeritError
from fedmerit.files.reports import read
from fedmerit.identity import number
from fedmerit.notes import code_of
from fedmerit.protocol.memory import UPDATE
from fedmerit.protocol.terms import task_of
from fedmerit.scoring.ground_truth import normalise
from fedmerit.scoring.scores import alpha, ee, fp, ioi, loo
from fedmerit.simulation import setup
from fedmerit.simulation.plan import plan
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare, seed_for
from fedmerit.simulation.training import trained
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_folder
from raising import raises
from runs import bodies_of, rounds_in
from tiny import ALL, TINY, losing, received, tiny

OFF = "secure_aggregation.enabled=false"


def scores_json(folder):
    return (folder / "scores.json").read_bytes()


def notes_of(*overrides, folder):
    steps = []
    content = run(tiny(*overrides), folder, watch=steps.append)
    return content, [step.text for step in steps if step.stage == "note"]


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
    assert set(first["scores"]) == {"LOO", "IOI", "ALPHA", "FP", "EE", "SURPLUS", "COS"}
    assert {"alone", "without", "se_loo", "se_ioi", "se_alpha_total", "cosine"} < set(first["reports"])
    assert "samples" not in first["reports"]  # nobody asked for disclosure
    one, two = read(folder / "scores.json")
    assert two.empty == pytest.approx(one.grand)  # the same slice: v(M) of round 1 is v(M0) of round 2
    assert first["scores"]["FP"] == fp(one).values.tolist()
    assert first["scores"]["EE"] == ee(one).values.tolist()
    total = alpha(one).values + alpha(two).values
    np.testing.assert_allclose(content["cumulative"]["ALPHA"], total, rtol=1e-12)


def test_reports_are_what_evaluating_the_plain_models_gives(rehearsed, tmp_path):
    """Fast path against slow path: rebuild M0 + U_i and M - U_i outside of the engine."""
    _, folder = rehearsed
    config = tiny(ALL)
    federation = prepare(config)
    updates = []
    for client in federation.clients:
        given = client.x, client.y, federation.training, seed_for(config, "train", 1, client.name)
        vector = trained(federation.network, federation.first, *given)
        updates.append((vector.astype(np.float64) - federation.first) / 4)
    shown = federation.pool.slice(1)
    grand = federation.first + sum(updates)
    for utility in ("expected-accuracy", "brier"):
        reports = rounds_in(folder)[0].to_reports(utility)

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


def later(*overrides):
    return pytest.param(overrides, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.weights=scores",),
        ("scoring.game=renormalised", "scoring.solo=true"),
        later(
            "data.test_reveal=per-round", "scoring.utilities=['accuracy', 'balanced-accuracy', 'neg-loss']"
        ),
        ("client-1 lost at 1:masked", "participation.away={client-2=[2]}"),
        later("client-1 lost at 1:unmask", "client-3 lost at 2:report"),
        later("partition.clients=5", "partition.sizes=[20,20,20,20,20]", "participation.fraction=0.8"),
        ("corruption.free_rider={client-1='zero', client-2='noise', client-3='stale'}",),
    ],
    ids=lambda overrides: " ".join(overrides)[:60],
)
def test_secure_aggregation_on_and_off_end_with_the_same_bytes(tmp_path, overrides):
    lost = dict(one.split(" lost at ") for one in overrides if " lost at " in one)
    overrides = [one for one in overrides if " lost at " not in one]
    with losing(lost):
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


def test_what_the_server_receives_holds_no_plain_update(tmp_path):
    """The transcript of a whole run: no member's words and no bytes of its update in any message."""
    plain = []

    class Spy:
        def summed(self, one):
            for name in one.outcome.included:
                state = rehearsal.transport.states[name]
                delta = state.get(UPDATE.of(one.outcome.round)).delta
                plain.append((delta, one.contribution(name)))

    config = tiny("model.name=mlp")
    with Folder(tmp_path / "run", config) as folder, received() as transcript:
        rehearsal = Rehearsal(config, folder, analyses=[Spy()])
        rehearsal.run()
    sums = {"advertise", "share", "train", "check", "unmask"}
    assert {kind for kind, _, _ in transcript} == {"join", *sums, "report", "close"}
    assert len(plain) == 8
    whole = b"".join(message for _, _, message in transcript)
    encoding = task_of(config, "00" * 32, plain[0][0].size, config.clients).encoding
    for delta, contribution in plain:
        assert contribution.step == encoding.step
        rounded = contribution.part(slice(None))
        for values in (contribution.integers, delta, delta.astype(np.float64), rounded):
            for start in range(0, 4000, 400):
                assert values.tobytes()[start : start + 24] not in whole
    # ... while the check itself does find words that were put there
    masked = [message for kind, _, message in transcript if kind == "train"]
    assert masked[0][5000:5024] in whole


# --- who takes part -------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["secure_aggregation.enabled=true", OFF])
def test_a_member_that_diverges_withdraws_and_is_recorded(tmp_path, monkeypatch, switch):
    original = setup.trained

    def diverge(network, start, x, y, settings, seed):
        vector = original(network, start, x, y, settings, seed)
        return vector * np.float32(np.nan) if len(y) == 50 else vector  # client-1

    monkeypatch.setattr(setup, "trained", diverge)
    content, notes = notes_of(switch, folder=tmp_path / "run")
    assert content["rounds"][0]["participants"] == ["client-0", "client-2", "client-3"]
    assert any(note.startswith("round 1: client-1 declined and is not in the sum: stage") for note in notes)
    assert rounds_in(tmp_path / "run")[0].declined == ("client-1",)


# --- games, utilities, weights, solo --------------------------------------------------------------


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


def test_fresh_slices_are_disjoint_and_the_error_of_the_sum_adds_as_squares(rehearsed, tmp_path):
    content = run(tiny("data.test_reveal=per-round"), tmp_path / "run")
    one, two = (entry["reports"] for entry in content["rounds"])
    assert one["slice"] != two["slice"]
    np.testing.assert_allclose(content["stderr"]["ALPHA"], np.hypot(one["se_alpha"], two["se_alpha"]))
    assert one["se_alpha_total"] == one["se_alpha"]
    one, two = (entry["reports"] for entry in rehearsed[0]["rounds"])
    assert one["slice"] == two["slice"]  # the running error of the same samples is no root of squares
    assert rehearsed[0]["stderr"]["ALPHA"] == two["se_alpha_total"]
    assert not np.allclose(two["se_alpha_total"], np.hypot(one["se_alpha"], two["se_alpha"]), rtol=1e-3)


def test_score_weights_are_public_start_uniform_and_follow_the_scores(tmp_path):
    content = run(tiny("training.weights=scores", "training.rounds=3"), tmp_path / "run")
    weights = [body["weights"] for body in bodies_of(tmp_path / "run", "schedule")]
    assert [number(value) for value in weights[0].values()] == [1.0] * 4
    reports = read(tmp_path / "run" / "scores.json")
    expected = np.clip(normalise(alpha(reports[0]).values), 0.1, 3.0)
    np.testing.assert_allclose([number(value) for value in weights[1].values()], expected)
    assert content["rounds"][2]["participants"] == content["clients"]


def test_solo_is_the_singleton_of_the_retraining_game(tmp_path):
    """Trained alone from the first model with the member's own seeds, round after round."""
    config = tiny("scoring.solo=true")
    content = run(config, tmp_path / "run")
    federation = prepare(config)
    client = federation.clients[2]
    vector = federation.first
    for k, entry in enumerate(content["rounds"], start=1):
        seed = seed_for(config, "train", k, client.name)
        vector = trained(federation.network, vector, client.x, client.y, federation.training, seed)
        values = federation.evaluate(vector, federation.pool.slice(k))["expected-accuracy"]
        assert entry["reports"]["solo"][2] == pytest.approx(np.mean(values), abs=1e-9)
    merit = np.array(content["cumulative"]["MERIT"])
    first, last = read(tmp_path / "run" / "scores.json")
    expected = (last.solo - last.solo_empty) + ioi(first).values + ioi(last).values
    np.testing.assert_allclose(merit, expected)


# --- corruption -----------------------------------------------------------------------------------


def test_a_zero_free_rider_is_a_null_player_and_a_stale_one_pulls_back(tmp_path):
    riders = "corruption.free_rider={client-2='stale', client-3='zero'}"
    content = run(tiny("training.rounds=3", riders), tmp_path / "run")
    cosines = [entry["reports"]["cosine"] for entry in content["rounds"]]
    assert [cosine[3] for cosine in cosines] == [None] * 3
    assert cosines[0][2] is None  # the first model: no update
    assert max(cosines[1][2], cosines[2][2]) < 0  # the M0 of a round before, while the others went on
    one = read(tmp_path / "run" / "scores.json")[0]
    assert loo(one).values[3] == ioi(one).values[3] == content["cumulative"]["ALPHA"][3] == 0.0


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "error", "setting"),
    [
        (("partition.clients=2",), ConfigError, "partition.clients"),
        (("data.test_size=5000",), DataError, ""),
        (("data.name=npz", "data.path=nowhere.npz"), DataError, ""),
        (("model.name=vgg",), ConfigError, "model.name"),
        (("run.device=quantum",), ConfigError, "run.device"),
        (("corruption.label_noise={client-1=1.5}",), ConfigError, "corruption.label_noise"),
    ],
)
def test_bad_settings_are_named_before_anything_runs(tmp_path, overrides, error, setting):
    with raises(error, setting=setting):
        run(tiny(*overrides), tmp_path / "run")


def test_what_cannot_start_fails_before_training_and_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "def broken(input_shape, classes):\n    raise RuntimeError('no weights')\n"
        "def short(model, images, labels):\n    return labels[:3].float()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for setting, told in (
        ("model.name=theirs:broken", "RuntimeError: no weights"),
        ("scoring.utilities=['theirs:short']", "theirs:short"),
    ):
        steps = []
        with pytest.raises(FedmeritError) as caught:
            run(tiny(setting), tmp_path / "run", watch=steps.append)
        assert told in str(caught.value)
        assert not any(step.stage == "train" for step in steps)
    assert not list((tmp_path / "run").glob("keys/*.pem"))
    config = from_dict(TINY, ("data.name=npz", f"data.path={tmp_path / 'later.npz'}"))
    with pytest.raises(DataError):
        run(config, tmp_path / "later")
    assert not (tmp_path / "later").exists()
    rng = np.random.default_rng(0)
    for size in (100, 300):  # with 100 there is too little to deal, which shows once the folder was made
        images, labels = rng.integers(0, 256, (size, 8, 8, 1), np.uint8), np.arange(size) % 5
        np.savez(tmp_path / "later.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
        if size == 100:
            with pytest.raises(DataError, match="they add up to 220 samples, the data has 100"):
                run(config, tmp_path / "later")
    for folder, settings in (("run", tiny("training.rounds=2")), ("later", config)):
        assert len(run(settings, tmp_path / folder, resume=folder == "later")["rounds"]) == 2


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
        "participation.away: round 2 will be aborted: fewer than 3 of all 4 members are scheduled",
    ):
        assert planned.count(expected) == said.count(expected) == 1
    (lower,) = [note for note in planned if note.startswith("scoring.utilities: ")]
    assert "lower is better in 'tiny_measures:log_loss'" in lower
    assert any(note.startswith("round 2 aborted, the model is unchanged: ") for note in said)
    few = plan(tiny("participation.fraction=0.1"), calibrate=False).notes
    assert "participation.fraction 0.1 of 4 members is fewer than 3: 3 take part" in few
    settled = plan(tiny("scoring.method=settled"), calibrate=False).notes
    assert [code_of(note) for note in settled if "not measured" in note] == ["only-settled"]
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
    with losing({"client-1": "2:share"}):
        lost = run(tiny("scoring.solo=true", "training.rounds=3"), tmp_path / "lost")
    solo = [content["rounds"][2]["reports"]["solo"][1] for content in (whole, lost)]
    assert solo[0] == solo[1]
