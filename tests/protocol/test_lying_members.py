"""Whoever lies, errs, falls silent or deals bad shares costs itself a round; the run goes on and says why."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from fedmerit.errors import BindingError, LedgerError, ProtocolError
from fedmerit.identity import canonical, exact
from fedmerit.protocol import coordinator
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import MemoryState
from fedmerit.protocol.messages import Parcel, pack, with_more
from fedmerit.protocol.outcome import model_hash
from fedmerit.report.facts import Facts
from fedmerit.report.page.text import remark
from fedmerit.report.source import read_source
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.uncertainty import compare_pairs
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.verify import verify_copy, verify_folder
from forging import anew, changes, places, put
from linear_federation import LIAR, Federation, dealing_badly
from refusals import found_wrong
from wire import parts, unpack

HONEST = {"client-0", "client-2", "client-3"}


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path)


def ran(federation):
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


@pytest.mark.parametrize(
    ("kind", "number"),
    [("share", 1), *((kind, number) for kind in ("train", "check", "unmask", "report") for number in (1, 2))],
)
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
        body, signature = unpack(data)
        parsed = json.loads(body)
        parsed["measured"]["fit"]["alone"] = number if isinstance(number, float) else exact(float(number))
        return pack([json.dumps(parsed).encode(), signature])

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


# ------------------- who deals bad shares is blamed in the ledger with evidence; its rival stays in the sum


DEALER, RIVAL = "client-1", "client-2"


@pytest.fixture
def bad_dealer():
    """A member whose program deals some holders garbage in one round; everybody runs in this process."""
    with ExitStack() as stack:
        yield lambda number, *holders: stack.enter_context(
            dealing_badly(*((DEALER, number, holder) for holder in holders))
        )


def complaining(federation, name, dealer, key=None):
    """What makes a member's masked message one with a complaint about a dealer."""

    def lie(whole):
        answer, _ = parts(whole)
        size = struct.unpack(">I", answer[4:8])[0]
        fields = msgpack.decode(msgpack.decode(answer[8 : 8 + size])[0])
        fields[7][3] = [[federation.names.index(dealer), key or os.urandom(32)]]
        made = msgpack.encode(fields)
        signed = federation.keys[name].sign(b"fedmerit secagg head 1\0" + masks.digest_of(made))
        head = msgpack.encode([made, signed])
        return with_more(answer[:4] + struct.pack(">I", len(head)) + head + answer[8 + size :], b"")

    return lie


def blames(federation):
    return [record.body for record in federation.records if record.kind == "blame"]


@pytest.mark.parametrize("weights", [None, {f"client-{i}": 1 + i / 2 for i in range(7)}])
def test_the_rival_stays_in_the_sum_and_the_dealer_takes_part_in_no_later_round(
    tmp_path, bad_dealer, weights
):
    bad_dealer(1, RIVAL)
    federation = Federation(tmp_path, 7, 3, files=True, weights=weights).run()
    everybody = federation.names
    others = tuple(name for name in everybody if name != DEALER)
    first, *later = federation.rounds
    assert (first.included, first.declined, first.silent, first.blamed) == (everybody, (), (), (DEALER,))
    assert [(one.scheduled, one.included, one.aborted) for one in later] == [(others, others, "")] * 2
    (body,) = blames(federation)
    assert [body[key] for key in ("round", "member", "by", "why")] == [1, DEALER, RIVAL, "share"]
    assert f"blame: in round 1 {DEALER} dealt {RIVAL} a bad share (proved by record " in "\n".join(
        federation.verified()
    )
    for name in everybody:  # nobody's own file disagrees
        list(verify_folder(federation.folder, heads=federation.heads(name), member=name))
    lines = federation.heads(RIVAL).read_text().splitlines()
    assert f'1 complained ["{RIVAL}", "{DEALER}"]' in lines
    assert not any("complained" in line for line in federation.heads("client-3").read_text().splitlines())


def test_it_is_the_dealer_whom_missing_rounds_cost(tmp_path, bad_dealer):
    bad_dealer(1, RIVAL)
    federation = Federation(tmp_path, 7, 3).run()
    facts = Facts(read_source(federation.folder))
    assert facts.rounds_of(RIVAL, "counted") == (1, 2, 3)
    assert facts.happened[DEALER] == {1: "counted", 2: "blamed", 3: "blamed"}
    assert [one.client for one in facts.absences] == [DEALER]
    assert [remark(one) for one in facts.rounds] == [f"broke the protocol: {DEALER}", "", ""]


def test_a_false_complaint_costs_its_author_the_round_and_the_run(tmp_path):
    federation = Federation(tmp_path, 7, 3)
    federation.answering("train", 2, complaining(federation, RIVAL, DEALER), who=RIVAL)
    federation.run()
    others = tuple(name for name in federation.names if name != RIVAL)
    assert [one.included for one in federation.rounds] == [federation.names, others, others]
    assert [one.blamed for one in federation.rounds] == [(), (RIVAL,), ()]
    assert [one.declined for one in federation.rounds] == [()] * 3
    (body,) = blames(federation)
    assert [body[key] for key in ("round", "member", "by", "why")] == [2, RIVAL, RIVAL, "complaint"]
    assert any(
        line.startswith(f"blame: in round 2 {RIVAL} complained falsely") for line in federation.verified()
    )
    assert Facts(read_source(federation.folder)).rounds_of(RIVAL, "blamed") == (2, 3)


def test_a_dealer_that_spoils_a_round_for_all_spoils_one(tmp_path, bad_dealer):
    bad_dealer(1, *(f"client-{i}" for i in range(2, 7)))
    federation = Federation(tmp_path, 7, 2).run()
    first, second = federation.rounds
    assert "hold good shares of the secrets of client-1" in first.aborted
    assert (first.blamed, first.declined) == ((DEALER,), ())
    assert not any(
        one.ask.exchange in ("check", "unmask") and one.ask.round == 1 for one in federation.passed
    )
    assert second.included == tuple(name for name in federation.names if name != DEALER)
    assert federation.verified()


def test_where_too_few_are_left_without_the_blamed_rounds_say_so(tmp_path, bad_dealer):
    bad_dealer(1, RIVAL)
    federation = Federation(tmp_path, 3, 3).run()  # t = 3
    first, *later = federation.rounds
    assert first.aborted
    for one in later:
        assert one.aborted.endswith(f"left out, because blamed: {DEALER}")
    assert federation.verified()


def test_shares_of_something_else_are_blamed_when_they_are_put_together(tmp_path, monkeypatch):
    real = masks.split_secret
    share = Client.share

    def crooked(self, broadcast):
        with monkeypatch.context() as patch:
            if (self.name, self.setting.round) == (DEALER, 1):
                patch.setattr(masks, "split_secret", lambda secret, t, n: real(os.urandom(32), t, n))
            return share(self, broadcast)

    monkeypatch.setattr(Client, "share", crooked)
    federation = Federation(tmp_path, 7, 2).run()
    (body,) = blames(federation)
    assert [body[key] for key in ("round", "member", "by", "why")] == [1, DEALER, None, "secret"]
    assert federation.rounds[0].aborted
    assert DEALER not in federation.rounds[1].included
    assert any(
        "shared out something that differs from its commitment" in line for line in federation.verified()
    )


# ------------------------------------------------------------------------------------- what verify recomputes


@pytest.mark.parametrize(
    "why", ["share", *(pytest.param(why, marks=pytest.mark.long) for why in ("complaint", "secret"))]
)
def test_every_part_of_a_blame_is_recomputed(tmp_path, bad_dealer, monkeypatch, why):
    federation = Federation(tmp_path, 4, 1, settings={"secure_aggregation": {"threshold": 3}})
    if why == "share":
        bad_dealer(1, RIVAL)
    elif why == "complaint":
        federation.answering("train", 1, complaining(federation, RIVAL, DEALER), who=RIVAL)
    else:
        real = masks.split_secret
        monkeypatch.setattr(
            masks, "split_secret", lambda secret, t, n: [os.urandom(32), *real(secret, t, n)[1:]]
        )
    federation.run()
    monkeypatch.undo()
    records, copy = federation.records, tmp_path / "copy.jsonl"
    (blame,) = (record for record in records if record.kind == "blame")
    assert blame.body["why"] == why
    copy.write_bytes(anew(records, federation.keys))
    assert list(verify_copy(copy)), "what is written anew without a change verifies"
    words, tried = (*federation.names, "share", "complaint", "secret"), 0
    for path, value in places(json.loads(canonical(blame.body))):
        for other in (*changes(value), *(words if isinstance(value, str) else ())) if path else ():
            if canonical(other) == canonical(value):
                continue
            copy.write_bytes(anew(records, federation.keys, blame.seq, put(blame.body, path, other)))
            with pytest.raises(LedgerError):
                list(verify_copy(copy))
            tried += 1
    assert tried > 40


def test_a_ledger_in_which_the_blamed_take_part_again_is_refused(tmp_path, bad_dealer):
    bad_dealer(1, RIVAL)
    federation = Federation(tmp_path, 7, 2).run()
    records, copy = federation.records, tmp_path / "copy.jsonl"
    (second,) = (one for one in records if one.kind == "schedule" and one.body["round"] == 2)
    copy.write_bytes(
        anew(records, federation.keys, second.seq, {**second.body, "members": list(federation.names)})
    )
    with pytest.raises(LedgerError, match=f"schedules {DEALER}, who was blamed in round 1"):
        list(verify_copy(copy))


def test_a_ledger_with_a_masked_input_of_who_complained_falsely_is_refused(tmp_path):
    federation = Federation(tmp_path, 4, 1, settings={"secure_aggregation": {"threshold": 3}})
    federation.answering("train", 1, complaining(federation, RIVAL, DEALER), who=RIVAL)
    federation.run()
    records, copy = federation.records, tmp_path / "copy.jsonl"
    (masked,) = (one for one in records if one.kind == "masked")
    inputs = {**masked.body["inputs"], RIVAL: "0" * 64}
    copy.write_bytes(anew(records, federation.keys, masked.seq, {**masked.body, "inputs": inputs}))
    found_wrong(f"has a masked input of {RIVAL}, whose complaint was false", verify_copy, copy)


def test_a_ledger_without_the_blame_is_refused_by_who_complained(tmp_path, bad_dealer):
    bad_dealer(1, RIVAL)
    federation = Federation(tmp_path, 7, 1, files=True).run()
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(anew([one for one in federation.records if one.kind != "blame"], federation.keys))
    assert list(verify_copy(copy))  # nothing in the ledger shows it
    # heads that the server wrote anew are not those this member keeps; here only the complaint is compared
    kept = [line for line in federation.heads(RIVAL).read_text().splitlines() if line.split()[1] in KINDS]
    own = tmp_path / "heads"
    own.write_text("\n".join([*kept, ""]))
    with pytest.raises(LedgerError, match=f"{RIVAL} complained in round 1 that {DEALER} dealt it a bad"):
        list(verify_copy(copy, heads=own))


KINDS = ("trained", "masked", "complained", "released")


def test_a_complaint_that_never_arrived_is_told_and_accuses_nobody(tmp_path, bad_dealer):
    bad_dealer(1, RIVAL)
    lost = [(RIVAL, 1, "masked")]
    federation = Federation(tmp_path, 7, 1, files=True, lost=lost).run()
    assert blames(federation) == []
    lines = list(verify_folder(federation.folder, heads=federation.heads(RIVAL)))
    assert any(f"in round 1 {RIVAL} complained that {DEALER} dealt it a bad share" in line for line in lines)
