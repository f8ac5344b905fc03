"""Whoever lies, errs or falls silent costs itself a round; the run goes on and says why."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, LedgerError, ProtocolError
from fedmerit.identity import canonical, exact
from fedmerit.protocol import coordinator
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import MemoryState
from fedmerit.protocol.messages import Parcel, pack, unpack
from fedmerit.protocol.outcome import model_hash
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.uncertainty import compare_pairs
from linear_federation import LIAR, Federation

HONEST = {"client-0", "client-2", "client-3"}


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path)


def ran(federation):
    """The run came to its end, and its ledger verifies."""
    federation.run()
    assert federation.verified()
    rounds = federation.rounds
    assert len(rounds) == 2
    return rounds


# --------------------------------------------------------------------------------------------- who takes part


def test_a_member_with_another_roster_refuses_to_join(federation, tmp_path):
    other = Federation(tmp_path / "other", seed=1)
    federation.members[LIAR] = Participant(
        LIAR, other.keys[LIAR], other.roster, lambda run: MemoryState(), lambda shape, utilities: None
    )
    rounds = ran(federation)
    (error,) = federation.errors(LIAR)
    assert isinstance(error, BindingError)
    assert (error.stage, error.member) == ("join", LIAR)
    assert all({*one.scheduled} == {*one.reports} == HONEST for one in rounds)


def test_somebody_elses_signature_does_not_open_the_door(federation):
    """Another member's name, signed with one's own key."""
    federation.answering("join", 0, lambda data: pack(["client-2", *unpack(data, "")[1:]]))
    rounds = ran(federation)
    assert "stage join, member client-2: " in federation.notes[0]
    assert {one.author for one in federation.records if one.kind == "join"} == HONEST
    assert all({*one.reports} == HONEST for one in rounds)


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("kind", ["share", "train", "check", "unmask", "report"])
@pytest.mark.parametrize("number", [1, 2])
def test_garbage_is_refused_and_the_run_goes_on(federation, kind, number):
    federation.answering(kind, number, lambda data: b"garbage" + data[7:])
    one = ran(federation)[number - 1]
    assert any(f"round {number}: refused" in note for note in federation.notes)
    if kind in ("unmask", "report"):
        assert LIAR in {*one.included} & {*one.silent}  # summed, but not heard at the end
    else:
        assert (LIAR in one.included) == (kind == "check")
    assert {*one.reports} == HONEST


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_no_bytes_make_a_member_raise_anything_but_an_error_of_ours(federation, data):
    with pytest.raises(ProtocolError):
        federation.member(LIAR).answer(Parcel(data), "here")


def test_an_answer_to_an_old_round_is_refused(federation):
    old = {}

    def again(data):
        return old.setdefault("first", data)

    federation.answering("train", 1, again)
    federation.answering("train", 2, again)
    rounds = ran(federation)
    assert [LIAR in one.included for one in rounds] == [True, False]
    assert any("round 2: refused" in note and LIAR in note for note in federation.notes)


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
def test_a_report_on_something_else_is_refused(federation, what, lie):
    """Signed by the member, but computed on another test slice, another M, another history."""
    lied = federation.resigned(lambda body: body["bound_to"].update({what: lie}))
    federation.answering("report", 1, lied)
    rounds = ran(federation)
    assert any(f"computed on a different {what} from ours" in note for note in federation.notes)
    assert rounds[0].silent == (LIAR,)
    assert len(rounds[1].reports) == 4


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (float("nan"), "a report holds finite numbers, got nan"),
        (2.0, "alone of fit must lie in [0, 1]"),
        (-0.5, "alone of fit must lie in [0, 1]"),
    ],
)
def test_a_report_of_impossible_numbers_is_refused(federation, number, reason):
    lied = federation.resigned(lambda body: body["measured"]["fit"].update(alone=exact(number)))
    federation.answering("report", 1, lied)
    rounds = ran(federation)
    assert any(reason in note for note in federation.notes)
    assert rounds[0].silent == (LIAR,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda said: said.update(sketch=["1"] * 32), "its sketch is not that of an error of"),
        (lambda said: said.update(sketch=["0"] * 32), "its sketch is not that of an error of"),
        (lambda said: said.pop("sketch"), "expected a sketch exactly with degrees of freedom"),
        (lambda said: said.update(freedom=3), "expected a sketch exactly with degrees of freedom"),
        (lambda said: said.pop("freedom"), "expected a sketch exactly with degrees of freedom"),
        (lambda said: said.update(freedom="3"), "expected a whole number, got '3'"),
        (lambda said: said["sketch"].pop(), "a sketch has 32 numbers"),
        (lambda said: said["sketch"].__setitem__(0, "nan"), "finite numbers with seven digits"),
        (lambda said: said["sketch"].__setitem__(0, "0.12345678901"), "finite numbers with seven digits"),
        (lambda said: said["sketch"].__setitem__(0, 1), "finite numbers with seven digits"),
        (lambda said: said["sketch"].__setitem__(0, None), "not a report"),
        (lambda said: said.update(sketch="0"), "a sketch has 32 numbers"),
    ],
)
def test_a_sketch_that_cannot_be_that_of_the_error_is_refused(federation, change, reason):
    federation.answering("report", 1, federation.resigned(lambda body: change(body["measured"]["fit"])))
    rounds = ran(federation)
    assert any(reason in note for note in federation.notes), federation.notes
    assert rounds[0].silent == (LIAR,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda said: said.update(sketch=["1"] * 32), "not that of an error of"),
        (lambda said: (said.pop("sketch"), said.pop("freedom")), "unlike the terms"),
        (lambda said: said.update(freedom=3), "degrees of freedom"),
    ],
)
def test_a_ledger_with_such_a_sketch_does_not_verify(federation, monkeypatch, change, reason):
    """As a server would record it that did not care."""
    monkeypatch.setattr(coordinator, "accept", lambda *_: None)
    federation.answering("report", 2, federation.resigned(lambda body: change(body["measured"]["fit"])))
    federation.run()
    with pytest.raises(LedgerError, match=reason):
        federation.verified()


def test_a_run_with_plain_errors_has_no_sketches_and_takes_none(tmp_path):
    federation = Federation(tmp_path, settings={"scoring": {"utilities": ["fit"], "errors": "plain"}})
    numbers = {"sketch": ["0"] * 32, "freedom": 3}
    federation.answering(
        "report", 1, federation.resigned(lambda body: body["measured"]["fit"].update(numbers))
    )
    rounds = ran(federation)
    assert rounds[0].silent == (LIAR,)
    assert rounds[1].to_reports("fit").sketch is None


def test_the_ledger_knows_how_members_hang_together(federation):
    rounds = [one.to_reports("fit") for one in ran(federation)]
    total = accumulate(rounds)
    assert total.sketch == pytest.approx(sum(one.sketch for one in rounds).T)
    assert np.sqrt(np.diag(total.covariance)) == pytest.approx(total.stderr, rel=0.6)  # 32 degrees of freedom
    assert compare_pairs(total).stderr.max() < compare_pairs(total, errors="conservative").stderr.max()


def test_a_report_that_was_changed_on_the_way_is_refused(federation):
    def change(data):
        body, signature, keys = unpack(data, "")
        parsed = json.loads(body)
        parsed["measured"]["fit"]["alone"] = exact(0.5)
        return pack([canonical(parsed), signature, keys])

    federation.answering("report", 1, change)
    rounds = ran(federation)
    assert any("did not sign its report" in note for note in federation.notes)
    assert rounds[0].silent == (LIAR,)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(round=1e999),
        lambda body: body["measured"]["fit"].pop("empty"),
        lambda body: body["measured"]["fit"].update(se_alpha_total=exact(float("inf"))),
        lambda body: body["bound_to"].update(more="x"),
        lambda body: body.update(measured=[]),
        lambda body: body.update(bound_to=7),
    ],
)
def test_no_report_stops_the_server_or_spoils_its_ledger(tmp_path, change):
    federation = Federation(tmp_path, evaluates=False)

    def lie(data):
        body, _, keys = unpack(data, "")
        parsed = json.loads(body)
        change(parsed)
        return pack([json.dumps(parsed).encode(), federation.keys[LIAR].sign(b"whatever"), keys])

    federation.answering("report", 1, lie)
    assert ran(federation)[0].silent == (LIAR,)


def test_where_the_server_cannot_evaluate_the_median_counts_and_a_liar_is_named(tmp_path):
    federation = Federation(tmp_path, evaluates=False)
    lied = federation.resigned(lambda body: body["measured"]["fit"].update(grand=exact(1.0)))
    federation.answering("report", 1, lied)
    rounds = ran(federation)
    assert federation.notes == [
        f"round 1: {LIAR} measured a different v(M0) or v(M) from the one used for scores"
    ]
    own = rounds[0].reports["client-0"].measured["fit"].grand
    assert rounds[0].body["utilities"]["fit"]["grand"] == exact(own)


# ----------------------------------------------------------------------------------------- comings and goings


def test_who_leaves_may_come_back(tmp_path):
    """Gone in round 1 before it shares, there again in round 2."""
    rounds = ran(Federation(tmp_path, lost=[("client-3", 1, "share")]))
    assert "client-3" in {*rounds[0].scheduled} - {*rounds[0].included}
    assert "client-3" in rounds[1].reports


def test_too_few_abort_the_round_and_leave_the_model(tmp_path):
    """Two of four gone: nothing is unmasked, the next round finds the same model."""
    federation = Federation(tmp_path, lost=[("client-2", 1, "check"), ("client-3", 1, "check")])
    rounds = ran(federation)
    assert rounds[0].aborted
    assert not rounds[0].included
    assert not any((one.ask.exchange, one.ask.round) == ("unmask", 1) for one in federation.passed)
    assert rounds[1].reports["client-0"].bound_to["m0"] == model_hash(federation.models[0])


def test_training_that_fails_costs_the_member_its_round(federation):
    def train(name, number, m0):
        if name == LIAR:
            raise RuntimeError("out of memory")
        return federation.linear(name, number, m0)

    federation.train = train
    rounds = ran(federation)
    assert all(one.declined == (LIAR,) and {*one.reports} == HONEST for one in rounds)
    assert not any(b"out of memory" in one.answer for one in federation.passed if one.answer)


def test_an_update_beyond_the_bound_leaves_the_sum_without_saying_why(tmp_path):
    federation = Federation(tmp_path, beyond=[LIAR])
    rounds = ran(federation)
    assert all(one.declined == (LIAR,) and LIAR not in one.included for one in rounds)
    assert not any(b"beyond" in one.answer for one in federation.passed if one.answer)
