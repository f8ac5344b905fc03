"""What members and servers of a panel refuse, and what is left when somebody is silent or dies."""

from __future__ import annotations

import json

import numpy as np
import pytest

from attacked import judging
from fedmerit.errors import ConfigError, RefusedError, UnsettledShares
from fedmerit.identity import canonical, content
from fedmerit.ledger.decisions import Terms
from fedmerit.protocol.messages import pack
from linear_federation import LIAR
from runs import record_decision
from wire import unpack

FRIEND = "client-3"
PAY = Terms("100.00", "fit", "hands", "PANEL", despite_doubts=True)
STEPS = (
    "draw", "drawn", "judge", "judged", "column", "open", "agree", "agreed", "state", "seal", "witness",
    "settle",
)  # fmt: skip


def block_of(federation):
    return json.loads((federation.folder / "scores.json").read_text())["panel"]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return judging(tmp_path_factory.mktemp("honest"), 5, 2).run()


# ------------------------------------------------------------------------------------------ before the panel


@pytest.mark.parametrize("samples", [0, 19])
def test_who_has_too_few_held_out_samples_does_not_join(tmp_path, samples):
    federation = judging(tmp_path, 6, 1)
    federation.members[LIAR].held_out = lambda: (np.zeros((samples, 12)), np.zeros(samples))
    federation.run()
    assert LIAR not in federation.joined
    assert federation.coordinator.settled.columns == dict.fromkeys(set(federation.names) - {LIAR}, True)


def test_who_has_none_or_no_gradient_does_not_join(tmp_path):
    federation = judging(tmp_path, 7, 1)
    federation.members[LIAR].held_out = None
    federation.members[FRIEND].gradients = None
    federation.run()
    assert {LIAR, FRIEND}.isdisjoint(federation.joined)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("scoring", "visibility", "coordinator"),
        ("payment", "rule", "fair"),
        ("payment", "score", "PHI"),
        ("corruption", "judge", {LIAR: "praise"}),
        ("corruption", "judge", {LIAR: f"praise:{LIAR}"}),
        ("panel", "coordinates", 10),
    ],
)
def test_settings_that_a_panel_cannot_have(tmp_path, section, key, value):
    with pytest.raises(ConfigError):
        judging(
            tmp_path,
            5,
            1,
            sections={section: {"method": "panel", key: value} if section == "scoring" else {key: value}},
        )


def test_other_samples_than_it_committed_to_are_refused(tmp_path):
    federation = judging(tmp_path, 5, 1)
    with federation.trained():
        x, y = federation.held_out(LIAR)
        federation.members[LIAR].held_out = lambda: (x, y + 1)
        federation.finish()
    found = federation.coordinator.settled
    assert LIAR not in found.columns
    assert (found.final, found.missing) == (True, ())  # it is no judge, and states all the same


# ---------------------------------------------------------------------------------------------- false columns


def test_a_column_that_its_judge_did_not_sign_is_no_column(tmp_path):
    federation = judging(tmp_path, 5, 1)
    federation.answering("column", 1, lambda answer: pack(bytes(len(unpack(answer)))))
    federation.run()
    found = federation.coordinator.settled
    assert LIAR not in found.columns
    assert block_of(federation)["judges"] == [name for name in federation.names if name != LIAR]
    assert any(LIAR in note and "column" in note for note in federation.notes)


def test_a_judge_that_the_server_leaves_out_does_not_agree(tmp_path):
    """It has shown its column, so that it knows that it judged."""
    federation = judging(tmp_path, 5, 1)
    archive = federation.archive if not federation.ledger else None
    assert archive is None
    with federation.trained():
        clearing = federation.clearing()
        made = clearing._columns
        clearing._columns = lambda facts, showings: {
            name: column for name, column in made(facts, showings).items() if name != LIAR
        }
        clearing.run(federation.names)
    assert "open" in federation.refusals(LIAR)


@pytest.mark.parametrize("what", ["columns", "seed", "showings"])
def test_a_server_that_shows_one_member_something_else_gets_no_agreement(tmp_path, what):
    federation = judging(tmp_path, 6, 1)

    def lie(body):
        if what == "columns":
            columns = body["columns"].copy()
            columns[3] ^= 1
            body["columns"] = columns
        elif what == "showings":
            del body["showings"][FRIEND]
        else:
            manifest = json.loads(body["manifest"])
            manifest["bench"]["seed"] = "0" * 64
            body["manifest"] = canonical(manifest)

    federation.telling("open", 1, lie)
    federation.run()
    assert "open" in federation.refusals(LIAR)
    assert federation.coordinator.settled.missing == (LIAR,)


def test_a_column_is_shown_for_one_list_of_judges(tmp_path):
    federation = judging(tmp_path, 5, 1).run()
    ask = federation.asked(LIAR)["column", 1]
    fewer = {name: text for name, text in ask.body.showings.items() if name != FRIEND}
    with pytest.raises(RefusedError):
        federation.ask(LIAR, ask, showings={name: [t.text, t.signature] for name, t in fewer.items()})


def test_nobody_trains_after_the_coordinates_are_drawn(tmp_path):
    federation = judging(tmp_path, 5, 2)
    with federation.trained():
        federation.finish()
    ask = federation.asked(LIAR)["advertise", 1]
    with pytest.raises(RefusedError):
        federation.ask(LIAR, ask)


def test_a_second_draw_of_coordinates_is_refused(tmp_path):
    federation = judging(tmp_path, 5, 1).run()
    ask = next(one.ask for one in federation.passed if one.ask.exchange == "draw")
    committed = dict(list(ask.body.committed.items())[:4])
    with pytest.raises(RefusedError):
        federation.ask(LIAR, ask, committed=committed)


# ------------------------------------------------------------------------------------------ false statements


def lane(value, more, place=0):
    number = int(value, 16)
    lanes = [(number >> (64 * k)) % 2**64 for k in range(10)]
    lanes[place] = (lanes[place] + more) % 2**64
    return hex(sum(one << (64 * k) for k, one in enumerate(lanes)))


@pytest.mark.parametrize("place", [0, 9])
def test_who_misstates_one_number_is_named_and_not_paid(tmp_path, honest, place):
    federation = judging(tmp_path, 5, 2)

    def lie(body):
        body["rounds"]["1"] = lane(body["rounds"]["1"], 2**30, place)

    federation.stating(lie)
    federation.run()
    found = federation.coordinator.settled
    assert found.named == {1: {LIAR: "stated"}}
    assert found.columns == {name: k != place // 2 for k, name in enumerate(federation.names)}
    made, _ = record_decision(federation.folder, PAY)
    assert made.paid[LIAR] == 0
    assert federation.verified()


def test_two_who_move_credit_between_each_other_are_named(tmp_path):
    federation = judging(tmp_path, 5, 1)
    for name, peer, sign in ((LIAR, FRIEND, 1), (FRIEND, LIAR, -1)):

        def move(answer, name=name, peer=peer, sign=sign):
            from fedmerit.protocol.settlement import tables_hash

            text, _, tables = unpack(answer)
            statement, bodies = json.loads(text), [json.loads(table) for table, _ in tables]
            statement["rounds"]["1"] = lane(statement["rounds"]["1"], sign * 2**30)
            bodies[0]["pairs"][peer] = lane(bodies[0]["pairs"][peer], -(2**30))
            statement["masks"] = tables_hash(bodies)
            return federation.stated(name, statement, bodies)

        federation.answering("state", 1, federation.remembered(move, name), name)
    federation.run()
    found = federation.coordinator.settled
    assert found.named == {1: {LIAR: "pair", FRIEND: "pair"}}
    made, _ = record_decision(federation.folder, PAY)
    assert made.paid[LIAR] == made.paid[FRIEND] == 0


def test_who_is_not_witnessed_is_not_paid(tmp_path):
    """Its share stays unpaid; nobody else gets it."""
    federation = judging(tmp_path, 7, 1)
    federation.reaches = lambda name, ask: not (ask.exchange == "seal" and name in (LIAR, FRIEND))
    with pytest.MonkeyPatch.context() as patch, federation.over():
        assert not federation.coordinator.settled.final
        federation.close(patch)
    paid, _ = record_decision(federation.folder, PAY)
    assert paid.paid[LIAR] == paid.paid[FRIEND] == 0
    assert paid.paid.unpaid > 0


@pytest.mark.parametrize("members", [3, 4])
def test_a_panel_of_few_is_shown_and_pays_nobody(tmp_path, members):
    federation = judging(tmp_path, members, 1).run()
    assert federation.coordinator.settled.columns == dict.fromkeys(federation.names, True)
    with pytest.raises(UnsettledShares) as caught:
        record_decision(federation.folder, PAY)
    assert caught.value.code == "few"


# ---------------------------------------------------------------------------------------------- who is silent


def test_a_silent_judge_is_no_judge(tmp_path):
    federation = judging(tmp_path, 5, 1)
    federation.reaches = lambda name, ask: not (ask.exchange == "judge" and name == LIAR)
    federation.run()
    found = federation.coordinator.settled
    assert (LIAR in found.columns, found.missing, found.final) == (False, (), True)


def test_too_few_for_a_draw_wait(tmp_path):
    federation = judging(tmp_path, 5, 1)
    federation.reaches = lambda name, ask: ask.exchange != "draw" or name == LIAR
    with federation.trained():
        federation.finish()
        assert federation.coordinator.settled is None
        federation.reaches = lambda name, ask: True
    with federation.taken_up():
        federation.finish()
    assert federation.coordinator.settled.final


@pytest.mark.parametrize("answered", [0, 3])
@pytest.mark.parametrize("exchange", STEPS)
def test_a_server_that_dies_at_any_step_loses_nothing(tmp_path, honest, exchange, answered):
    federation = judging(tmp_path, 5, 2).dies(exchange, None, answered)
    with federation.taken_up():
        federation.finish()
    found = federation.coordinator.settled
    assert (found.final, found.missing, found.named, found.witnessed) == (True, (), {}, True)
    assert found.columns == dict.fromkeys(federation.names, True)
    assert federation.verified()


@pytest.mark.long
@pytest.mark.parametrize("exchange", STEPS)
def test_a_member_killed_once_it_has_saved_answers_the_same(tmp_path, exchange):
    federation = judging(tmp_path, 5, 2, files=True)
    killed = []

    def kill(name, ask):
        if name == LIAR and ask.exchange == exchange and not killed:
            killed.append(name)
            federation.killed_once_saved(name, ask)

    federation.before.append(kill)
    federation.run()
    found = federation.coordinator.settled
    assert killed
    assert (found.final, found.missing, found.named, found.witnessed) == (True, (), {}, True)


def test_nobody_else_can_say_what_a_judge_shows(tmp_path):
    federation = judging(tmp_path, 5, 1)

    def forged(answer):
        body = json.loads(unpack(answer)[0])
        body["judge"] = FRIEND
        return pack([canonical(body), federation.keys[LIAR].sign(content(LIAR, "judged", body))])

    federation.answering("judged", 1, forged)
    federation.run()
    assert LIAR not in federation.coordinator.settled.columns
    assert FRIEND in federation.coordinator.settled.columns


# ------------------------------------------------------------------------------------------ with an epsilon


def test_with_an_epsilon_that_drowns_the_scores_nobody_judges(tmp_path):
    federation = judging(tmp_path, 5, 1, panel={"epsilon": 0.1}).run()
    assert federation.coordinator.settled is None
    (why,) = {record.body["why"] for record in federation.records if record.kind == "unsettled"}
    assert why == "no-judges"


def test_with_a_large_epsilon_columns_add_up(tmp_path):
    federation = judging(tmp_path, 5, 1, panel={"epsilon": 900.0}).run()
    assert federation.coordinator.settled.columns == dict.fromkeys(federation.names, True)
