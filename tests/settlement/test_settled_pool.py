"""What a run leaves to its settlement: a part of the test pool, terms, and words that can be traced."""

import shutil

import numpy as np
import pytest

from fedmerit.config import from_dict, of_folder
from fedmerit.errors import ConfigError, DataError, LedgerError
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.notes import Note
from fedmerit.protocol.terms import cautious, check_version, pinned, roster_in, task_of
from fedmerit.simulation.run import run
from fedmerit.simulation.setup import prepare
from fedmerit.verify import verify_copy, verify_folder
from forging import body_of, written
from ledgers import terms_of
from raising import raises
from runs import first_body, run_in
from tiny import TINY, tiny

BOTH = ("scoring.method=both", "settlement.naming=false")


def no_gradient(model, images, labels):
    return (model(images).argmax(1) == labels).float()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    home = tmp_path_factory.mktemp("both")
    run(tiny(*BOTH), home / "run")
    return home


@pytest.fixture
def home(both, tmp_path):
    shutil.copytree(both / "run", tmp_path / "run")
    return tmp_path


def forged(home, change):
    """The records and the config of a ledger whose record of the pool has other values; None: no value."""

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "pool":
                body = {key: value for key, value in (body | change).items() if value is not None}
            yield record.author, record.kind, body, record.signature

    written(home, tell, anew=())
    return run_in(home / "run")


def test_a_run_on_samples_that_are_there_twice_is_settled(tmp_path):
    """Members settle on no sample that a round has shown, also on no copy of one."""
    rng = np.random.default_rng(0)
    x, y = rng.random((240, 28, 28, 1)).astype(np.float32), np.arange(240) % 10
    test, labels = np.repeat(x[:40], 2, axis=0), np.repeat(y[:40], 2)
    np.savez(tmp_path / "twice.npz", x_train=x, y_train=y, x_test=test, y_test=labels)
    asked = ("data.name=npz", f"data.path={tmp_path / 'twice.npz'}", "data.test_size=0")
    written = run(tiny(*BOTH, *asked), tmp_path / "run")
    assert written["settlement"]["missing"] == []
    assert all(one["holds"] for one in written["settlement"]["rounds"])


def test_rounds_are_measured_on_the_other_half(home):
    federation = prepare(tiny(*BOTH), pool_key=(home / "run" / "keys" / "pool.key").read_bytes())
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        pool = first_body(ledger, "pool")
        shown = {record.body["slice"] for record in ledger.records() if record.kind == "outcome"}
    assert pool == federation.pool.commitment
    assert (pool["size"], pool["slices"], pool["settled"]) == (50, 2, 25)
    assert shown == {federation.pool.slice(1).id}
    assert federation.pool.settlement().id not in shown
    assert np.bincount(federation.pool.settlement().y).max() <= 3  # 25 samples of 10 classes
    assert "scores: follow from the statements and reports in the ledger" in list(verify_folder(home / "run"))
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        (home / "copy.jsonl").write_bytes(b"".join(exported(ledger)))
    assert "scores: follow from the statements and reports in the ledger" in list(
        verify_copy(home / "copy.jsonl")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"settled": 26},
            r"2 slices, with 26 samples for the settlement, are not what test_reveal = 'fixed'",
        ),
        ({"settled": 0}, "settled: 0 of 50 test samples in the last of 2 slices leave too few"),
        ({"settled": 50}, "settled: 50 of 50 test samples in the last of 2 slices leave too few"),
        ({"settled": -1}, "settled: -1 of 50"),
        ({"settled": "25"}, r".*int.*str.*\$\.settled"),
        ({"settled": True}, r".*int.*bool.*\$\.settled"),
        ({"settled": None}, "settled: expected only where members settle, but the method is 'both'"),
        ({"slices": 1}, "settled: 25 of 50 test samples in the last of 1 slices"),
        ({"slices": 3}, "3 slices, with 25 samples for the settlement, are not what"),
    ],
)
def test_a_ledger_says_truly_how_many_samples_are_settled(home, change, message):
    with pytest.raises(LedgerError, match=rf"^record 2 \(pool by server\): {message}"):
        forged(home, change)


def test_settlement_is_nothing_that_a_run_with_reports_has(tmp_path):
    run(tiny("scoring.method=reports"), tmp_path / "run")
    forged(tmp_path, {})
    with pytest.raises(
        LedgerError, match="settled: expected only where members settle, but the method is 're"
    ):
        forged(tmp_path, {"settled": 25})


def test_a_pool_too_small_for_both_parts_is_refused_before_anybody_trains():
    with raises(ConfigError, setting="data.test_size") as caught:
        prepare(tiny(*BOTH, "data.test_size=31"))
    assert "expected at least 32 samples" in str(caught.value)
    assert len(prepare(tiny(*BOTH, "data.test_size=32")).pool.settlement().y) == 16


@pytest.mark.parametrize("method", ["settled", "both"])
def test_a_utility_of_ones_own_without_a_gradient_is_refused_before_anybody_trains(method):
    name = f"{__name__}:no_gradient"
    with raises(ConfigError, setting="scoring.utilities") as caught:
        prepare(tiny(f"scoring.method={method}", f"scoring.utilities=['{name}']"))
    assert f"{method!r} settles the first utility along its gradient: " in str(caught.value)
    prepare(tiny("scoring.method=reports", f"scoring.utilities=['{name}']"))
    prepare(tiny("scoring.method=both", f"scoring.utilities=['brier', '{name}']"))


def left_out(*overrides):
    """Settings that do not name the method."""
    return from_dict({section: part for section, part in TINY.items() if section != "scoring"}, overrides)


def test_a_rehearsal_reports_and_settles_unless_its_settings_say_otherwise(tmp_path):
    content = run(left_out("data.test_size=32"), tmp_path / "run")
    assert of_folder(tmp_path / "run").scoring.method == "both"
    assert content["rounds"][0]["reports"] is not None
    assert content["settlement"]["rounds"][0]["holds"]


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("scoring.utilities=['accuracy']", "method-utilities", "because accuracy, the first utility, has no"),
        (f"scoring.utilities=['{__name__}:no_gradient']", "method-gradient", "has no gradient: "),
        ("scoring.game=renormalised", "method-game", "a settlement scores the additive game"),
        ("data.test_size=31", "method-pool", "expected at least 32 samples with scoring.method = 'both'"),
    ],
)
def test_where_nothing_can_be_settled_members_report_and_a_note_says_why(override, code, said, tmp_path):
    notes = prepare(left_out(override)).notes
    assert [note.code for note in notes if isinstance(note, Note)].count(code) == 1
    heard = []
    content = run(left_out(override), tmp_path / "run", watch=heard.append)
    assert "settlement" not in content
    assert of_folder(tmp_path / "run").scoring.method == "reports"
    told = [one.text for one in heard if one.stage == "note" and getattr(one.text, "code", "") == code]
    assert len(told) == 1
    assert said in told[0]
    again = []
    run(left_out(override), tmp_path / "run", resume=True, watch=again.append)  # as it was recorded
    assert all(getattr(one.text, "code", "") != code for one in again)


def test_a_pool_too_small_for_reports_is_refused_whatever_the_method():
    with pytest.raises(DataError):
        prepare(left_out("data.test_size=9"))


@pytest.mark.parametrize("method", ["settled", "both", "reports"])
def test_only_members_who_can_settle_join_a_run_with_a_settlement(method):
    config = tiny(f"scoring.method={method}")
    terms = terms_of(config.to_toml(), roster_in(config, None))
    needed = {"reports": ["sketches"], "both": ["settlement", "sketches"], "settled": ["settlement"]}
    assert terms["features"] == needed[method]
    check_version(terms)


def test_methods_are_not_pinned():
    assert pinned(tiny("scoring.method=settled")) == pinned(tiny("scoring.method=reports"))
    cautious(tiny("scoring.method=settled", "secure_aggregation.threshold=3"))


@pytest.mark.parametrize("method", ["settled", "both", "reports"])
@pytest.mark.parametrize("naming", ["true", "false"])
def test_updates_have_the_words_that_the_settings_ask_for(method, naming):
    config = tiny(f"scoring.method={method}", f"settlement.naming={naming}")
    encoding = task_of(config, "00" * 32, 10, config.clients).encoding
    assert encoding.word_bytes == config.word_bytes


def test_the_pool_of_a_settled_run_is_prepared_and_stays_shut():
    pool = prepare(tiny("scoring.method=settled")).pool
    assert (pool.slices, pool.settled) == (1, 50)
    pool.settlement().verify(pool.commitment, "settlement")
