"""Whoever lies, errs or falls silent costs itself a round; the run goes on and says why."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, LedgerError, ProtocolError
from fedmerit.identity import exact
from fedmerit.protocol import coordinator
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import MemoryState
from fedmerit.protocol.messages import Parcel, pack
from fedmerit.protocol.outcome import model_hash
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.uncertainty import compare_pairs
from linear_federation import LIAR, Federation
from wire import unpack

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
    federation.answering("join", 0, lambda data: pack(["client-2", *unpack(data)[1:]]))
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


def bound(**lie):
    return lambda body: body["bound_to"].update(lie)


def measured(change):
    return lambda body: change(body["measured"]["fit"])


def alone(value):
    return measured(lambda fit: fit.update(alone=exact(value)))


def digit(value):
    return measured(lambda fit: fit["sketch"].__setitem__(0, value))


OTHER = model_hash(np.zeros(3, np.float32))
REPORTS = {  # what a member signs in its report -> why the server refuses it
    "another slice": (bound(slice=hashlib.sha256(b"another").hexdigest()), "a different slice from ours"),
    "another M": (bound(m=OTHER), "a different m from ours"),
    "another M0": (bound(m0=OTHER), "a different m0 from ours"),
    "other members": (bound(included="0" * 64), "a different included from ours"),
    "another history": (bound(head="0" * 64), "a different head from ours"),
    "more that it depends on": (bound(more="x"), "a different 'more' from ours"),
    "a NaN": (alone(float("nan")), "a report holds finite numbers, got nan"),
    "a utility above 1": (alone(2.0), "alone of fit must lie in [0, 1]"),
    "a utility below 0": (alone(-0.5), "alone of fit must lie in [0, 1]"),
    "an infinite error": (
        measured(lambda fit: fit.update(se_alpha_total=exact(float("inf")))), "holds finite numbers, got inf"
    ),
    "no v(M0)": (measured(lambda fit: fit.pop("empty")), "empty of fit must lie in [0, 1], got None"),
    "no utilities": (lambda body: body.update(measured=[]), "not a report"),
    "no binding": (lambda body: body.update(bound_to=7), "not a report"),
    "another sketch": (measured(lambda fit: fit.update(sketch=["1"] * 32)), "not that of an error of"),
    "an empty sketch": (measured(lambda fit: fit.update(sketch=["0"] * 32)), "not that of an error of"),
    "no sketch": (measured(lambda fit: fit.pop("sketch")), "sketch exactly with degrees of freedom"),
    "other freedom": (measured(lambda fit: fit.update(freedom=3)), "sketch exactly with degrees of freedom"),
    "no freedom": (measured(lambda fit: fit.pop("freedom")), "sketch exactly with degrees of freedom"),
    "freedom as text": (measured(lambda fit: fit.update(freedom="3")), "expected a whole number, got '3'"),
    "a short sketch": (measured(lambda fit: fit["sketch"].pop()), "a sketch has 32 numbers"),
    "a sketch as text": (measured(lambda fit: fit.update(sketch="0")), "a sketch has 32 numbers"),
    "a sketch with NaN": (digit("nan"), "finite numbers with seven digits"),
    "a sketch with more digits": (digit("0.12345678901"), "finite numbers with seven digits"),
    "a sketch of numbers": (digit(1), "finite numbers with seven digits"),
    "a sketch with nothing": (digit(None), "not a report"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REPORTS.values(), ids=REPORTS.keys())
def test_a_report_that_cannot_be_true_is_refused_and_spoils_no_ledger(tmp_path, change, reason):
    """Signed by its author, but of impossible numbers, or computed on something else; medians count here."""
    federation = Federation(tmp_path, rounds=1, evaluates=False)
    federation.answering("report", 1, federation.resigned(change))
    federation.run()
    assert federation.verified()
    assert any(reason in note for note in federation.notes), federation.notes
    assert federation.rounds[0].silent == (LIAR,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda said: said.update(sketch=["1"] * 32), "not that of an error of"),
        (lambda said: (said.pop("sketch"), said.pop("freedom")), "no sketch of its error"),
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


def test_the_ledger_knows_how_members_hang_together(federation):
    rounds = [one.to_reports("fit") for one in ran(federation)]
    total = accumulate(rounds)
    assert total.sketch == pytest.approx(sum(one.sketch for one in rounds).T)
    assert np.sqrt(np.diag(total.covariance)) == pytest.approx(total.stderr, rel=0.6)  # 32 degrees of freedom
    assert compare_pairs(total).stderr.max() < compare_pairs(replace(total, sketch=None)).stderr.max()


@pytest.mark.parametrize("number", ["0.5", 1e999])
def test_a_report_that_was_changed_on_the_way_is_refused(federation, number):
    """Also by numbers that JSON has and no report may have."""

    def change(data):
        body, signature, keys = unpack(data)
        parsed = json.loads(body)
        parsed["measured"]["fit"]["alone"] = number if isinstance(number, float) else exact(float(number))
        return pack([json.dumps(parsed).encode(), signature, keys])

    federation.answering("report", 1, change)
    rounds = ran(federation)
    assert rounds[0].silent == (LIAR,)
    assert len(rounds[1].reports) == 4


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
