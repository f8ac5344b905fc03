"""Judges, witnesses and servers that cheat in a panel, and what they gain by it: nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from attacked import judging
from fedmerit.errors import RefusedError
from fedmerit.identity import canonical, content, exact
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.run import replay
from fedmerit.protocol import memory
from fedmerit.protocol.messages import Signed, pack
from fedmerit.protocol.settlement import tables_hash
from fedmerit.protocol.terms import cautious
from linear_federation import LIAR
from wire import unpack

NAMES = tuple(f"client-{i}" for i in range(5))


def refusals(federation, *exchanges):
    return [one.member for one in federation.passed if one.error and one.ask.exchange in exchanges]


def account_of(federation):
    with Ledger(federation.folder / "ledger.sqlite", read_only=True) as ledger:
        return replay(ledger).account


def tabling(federation, value, peer="client-3"):
    """Let LIAR sign a table with another number for its mask with a peer."""

    def lie(answer):
        text, _, tables = unpack(answer)
        statement, bodies = json.loads(text), [json.loads(table) for table, _ in tables]
        bodies[0]["pairs"][peer] = value
        statement["masks"] = tables_hash(bodies)
        return federation.stated(LIAR, statement, bodies)

    federation.answering("state", 2, federation.remembered(lie), LIAR)
    return federation


def showing(federation, change, who=LIAR):
    """Let a judge sign something else of its column, and go on from that."""

    def lie(name, ask, answer):
        if (name, ask.exchange) != (who, "judged"):
            return answer
        body = {**json.loads(unpack(answer)[0]), **change}
        signed = Signed(canonical(body), federation.keys[name].sign(content(name, "judged", body)))
        state = federation.member(name).state(federation.run_id)
        state.put(memory.SHOWING, pack(signed))
        return pack(signed)

    federation.after.append(lie)
    return federation


def silent(federation, who, *exchanges):
    """Let a member's answers to these messages never arrive."""
    federation.after.append(
        lambda name, ask, answer: None if name == who and ask.exchange in exchanges else answer
    )
    return federation


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return judging(tmp_path_factory.mktemp("honest")).run()


# ------------------------------------------------------------------------------------------------- liveness


@pytest.mark.parametrize("value", ["-1", hex(2 ** (64 * 11))])
def test_a_number_beyond_all_lanes_leaves_its_author_unproved_and_stops_nobody(tmp_path, value):
    federation = tabling(judging(tmp_path), value).run()
    found = federation.coordinator.settled
    assert (found.final, found.unproved, found.liars) == (False, (LIAR,), ())
    assert federation.verified()


@pytest.mark.parametrize(
    "change",
    [
        {"scale": exact(1e300)},
        {"scale": exact(5e-324)},
        {"first": "nan"},
        {"last": "inf"},
        {"rest": "-inf"},
        {"first": exact(-1e308), "last": exact(1e308)},
        {"error": exact(-1.0)},
    ],
)
def test_a_judge_with_impossible_numbers_is_no_judge_and_stops_nobody(tmp_path, change):
    federation = showing(judging(tmp_path), change).run()
    found = federation.coordinator.settled
    assert found.final
    assert found.manifest.bench.names == tuple(name for name in NAMES if name != LIAR)
    assert federation.verified()


@pytest.mark.parametrize("away", [("witness",), ("open", "agree", "agreed", "state")])
def test_a_witness_that_stays_away_keeps_nobody_from_being_paid(tmp_path, monkeypatch, away):
    federation = silent(judging(tmp_path), "client-2", *away)
    with federation.over():
        assert {*account_of(federation).unwitnessed} == {*NAMES} - {"client-2"}
        assert federation.close(monkeypatch).final
        account = account_of(federation)
        assert (account.final, account.awaited, account.unwitnessed) == (True, ("client-2",), ())
        assert min(account.shares(3, {}).values()) > 0


def test_ends_who_hand_over_no_key_are_not_paid_at_the_end(tmp_path, monkeypatch):
    federation = judging(tmp_path, 7)
    ends = (LIAR, "client-3")
    for name, peer in (ends, ends[::-1]):

        def spoil(answer, name=name, peer=peer):
            bodies = [json.loads(text) for text, _ in unpack(answer)]
            for body in bodies:
                del body["sealed"][peer]
            sign = federation.keys[name].sign
            return pack([[canonical(body), sign(content(name, "sealed", body))] for body in bodies])

        federation.answering("seal", 2, spoil, name)
    with federation.over():
        assert federation.close(monkeypatch).final
        assert account_of(federation).unwitnessed == ends


def test_a_round_without_witnesses_counts_for_nobody_and_costs_nobody_its_share(tmp_path):
    federation = judging(tmp_path, 5, 3, lost=[("client-4", 2, "masked")]).run()
    account = account_of(federation)
    assert (account.paying, account.unwitnessed) == ((1, 3), ())
    assert account.pairs == (20, 26)
    only = account.panel_in((1, 3))
    assert account.paid.matrix.tolist() == only.matrix.tolist() != account.panel.matrix.tolist()


def test_no_round_pays_where_masks_prove_nothing(tmp_path):
    account = account_of(judging(tmp_path, sections={"settlement": {"naming": False}}).run())
    assert account.paying == ()


def test_who_was_away_from_a_sum_and_from_the_judging_still_states(tmp_path):
    """It lacks the sum of a round, of which the message to members who are back has it."""
    federation = judging(tmp_path)
    away = ("report", "judge", "judged", "column", "open", "agree", "agreed", "state")
    asked = SimpleNamespace(exchange="state")
    federation.reaches = lambda name, ask: name != LIAR or ask.exchange not in away

    def back(names):
        if not federation.coordinator.recorder.recorded("settled") or federation.reaches(LIAR, asked):
            return []
        assert federation.member(LIAR).state(federation.run_id).get(memory.SUM.of(2)) is None
        federation.reaches = lambda name, ask: True
        return names

    with federation.trained():
        federation.coordinator.awaited = back
        federation.finish()
        found = federation.coordinator.settled
        assert (found.missing, found.final, found.witnessed) == ((), True, True)


# ---------------------------------------------------------------------------------------------------- money


def test_no_judge_can_try_out_columns_until_the_noise_favours_it(honest):
    """The noise of a pair follows from its key and the draw; both were fixed before anybody judged."""
    manifest = honest.coordinator.settled.manifest
    entry, columns = manifest.rounds[0], honest.coordinator.archive.load("columns", 0)["columns"]
    x = honest.coordinator.archive.load("round", 1)["x"]
    changed = [replace(judge, rest=0.5 * place) for place, judge in enumerate(manifest.bench.judges)]
    bench = replace(manifest.bench, judges=tuple(changed))
    entries = tuple(replace(one, g=bench.lines_hash(one.round)) for one in manifest.rounds)
    other = replace(manifest, bench=bench, rounds=entries)
    assert other.digest != manifest.digest
    key = bytes(range(32))
    first, second = (one.board(one.rounds[0], columns, x) for one in (manifest, other))
    assert any(first.blur)
    assert first.noise(key) == second.noise(key)
    drawn = replace(manifest, bench=replace(bench, seed="0" * 64))
    assert drawn.board(entry, columns, x).noise(key) != first.noise(key)


def test_a_server_does_not_choose_what_innovation_takes_away(tmp_path, honest):
    """Judges take the sums that they signed for; of others, a friend's replay would be paid."""
    federation = judging(tmp_path)

    def clear(name, ask):
        if ask.exchange != "judge" or ask.round == 1:
            return None
        state = federation.member(name).state(federation.run_id)
        shown = {
            "m0": state.get(memory.M0.of(ask.round)),
            "sum": state.get(memory.SUM.of(ask.round)),
            "before": np.zeros(12 * (ask.round - 1), np.int32),
        }
        return replace(ask, arrays=shown)

    federation.before.append(clear)
    federation.run()
    own = {one.judge: one for one in federation.coordinator.settled.manifest.bench.judges}
    due = {one.judge: one for one in honest.coordinator.settled.manifest.bench.judges}
    assert {name: one.rest for name, one in own.items()} == {name: one.rest for name, one in due.items()}


def test_fewer_than_t_judges_settle_nothing(tmp_path):
    """Slices of members who do not judge are divided equally, so a server could pay a friend without data."""
    federation = judging(tmp_path)
    federation.reaches = lambda name, ask: ask.exchange != "judge" or name in ("client-0", LIAR)
    with federation.over():
        assert federation.coordinator.settled is None
        ends = federation.coordinator.recorder.recorded("unsettled")
        assert [body["why"] for body in ends] == ["no-judges"]


# -------------------------------------------------------------------------------------------------- privacy


@pytest.mark.parametrize(
    "weak",
    [
        {"panel": {"least": 1}},
        {"panel": {"noise": 0.0}},
        {"panel": {"blur": 0.0}},
        {"sections": {"settlement": {"naming": False}}},
    ],
)
def test_a_careful_member_joins_no_panel_that_shows_more_than_usual(tmp_path, weak):
    cautious(judging(tmp_path / "usual").config)
    with pytest.raises(RefusedError):
        cautious(judging(tmp_path / "weak", **weak).config)


def test_a_column_is_shown_only_to_a_list_of_t_judges(tmp_path):
    federation = judging(tmp_path)
    federation.telling("column", 2, lambda body: body.update(showings={LIAR: body["showings"][LIAR]}))
    federation.run()
    assert refusals(federation, "column") == [LIAR]


@pytest.mark.parametrize("key", ["m0", "x", "participants"])
def test_no_member_judges_a_round_that_it_knows_otherwise(tmp_path, key):
    federation = judging(tmp_path)

    def false(body):
        manifest = json.loads(body["manifest"])
        entry = manifest["rounds"][0]
        entry[key] = entry[key][::-1] if key == "participants" else "0" * 64
        body["manifest"] = canonical(manifest)

    for number in (1, 2):
        federation.telling("judge", number, false)
    federation.run()
    assert {*refusals(federation, "judge")} == {LIAR}
    assert LIAR not in federation.coordinator.settled.manifest.bench.names


def test_what_a_judge_says_of_its_data_has_few_digits(honest):
    for judge in honest.coordinator.settled.manifest.bench.judges:
        for value in (judge.first, judge.last, judge.rest):
            assert value == round(value, 3)
        assert judge.error == float(f"{judge.error:.2g}")
