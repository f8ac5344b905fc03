"""A dealer of bad shares is blamed in the ledger with evidence; its rival stays in the sum, runs go on."""

from __future__ import annotations

import json
import os
import struct
from contextlib import ExitStack

import pytest
from msgspec import msgpack

from fedmerit.errors import LedgerError
from fedmerit.identity import canonical
from fedmerit.report.facts import Facts
from fedmerit.report.page.text import remark
from fedmerit.report.source import read_source
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.verify import verify_copy, verify_folder
from forging import anew, changes, places, put
from linear_federation import Federation, dealing_badly

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

    def lie(answer):
        size = struct.unpack(">I", answer[4:8])[0]
        fields = msgpack.decode(msgpack.decode(answer[8 : 8 + size])[0])
        fields[7][3] = [[federation.names.index(dealer), key or os.urandom(32)]]
        made = msgpack.encode(fields)
        signed = federation.keys[name].sign(b"fedmerit secagg head 1\0" + masks.digest_of(made))
        head = msgpack.encode([made, signed])
        return answer[:4] + struct.pack(">I", len(head)) + head + answer[8 + size :]

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
