"""How a settlement ends: taken up again after a kill, its window, and what one member can spoil."""

from __future__ import annotations

import json
import time

import pytest

from fedmerit.errors import RefusedError, SettlementError, UnsettledShares
from fedmerit.identity import canonical, content
from fedmerit.ledger.decisions import Terms
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.messages import Ask, pack, unpack
from fedmerit.protocol.settlement import DAY, agreement
from fedmerit.verify import record_decision
from linear_federation import LIAR, Federation, false_sum

FRIEND = "client-3"


def settled(home, *, rounds=2, detail="rounds", **given):
    settings = {"scoring": {"method": "settled"}, "settlement": {"detail": detail}}
    return Federation(home, 5, rounds, settings=settings, **given)


def resigned(federation, exchange, kind, number, change, who=LIAR):
    def lie(answer):
        text, _, *rest = unpack(answer, "")
        body = json.loads(text)
        change(body)
        return pack([canonical(body), federation.keys[who].sign(content(who, kind, body)), *rest])

    federation.answering(exchange, number, lie, who)


def stating(federation, more, who=LIAR):
    def change(body):
        key = next(iter(body["rounds"]))
        body["rounds"][key] = str(int(body["rounds"][key]) + more)

    resigned(federation, "state", "statement", federation.config.training.rounds, change, who)


def taken_up(federation):
    coordinator = federation.coordinator
    return Clearing(coordinator, coordinator.gradient, coordinator.archive)


def recorded(federation, kind):
    return [record.body for record in federation.records if record.kind == kind]


# -------------------------------------------------------------------------------------------- taken up again


@pytest.mark.parametrize("detail", ["rounds", "run"])
def test_a_server_killed_after_it_settled_with_a_liar_keeps_a_sound_ledger(tmp_path, monkeypatch, detail):
    federation = settled(tmp_path, detail=detail)
    stating(federation, 5)
    with federation.begun():
        for number in (1, 2):
            federation.round(number)
        taken_up(federation).run(federation.names)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 90)
        federation.finish()
    (body,) = recorded(federation, "settled")
    assert (body["final"], body["closes"], body["named"]) == (True, None, [LIAR])
    assert federation.verified()


def test_a_window_stays_as_it_was_opened_when_the_server_is_killed(tmp_path, monkeypatch):
    federation = settled(tmp_path)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "state")
    with federation.begun():
        for number in (1, 2):
            federation.round(number)
        taken_up(federation).run(federation.names)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 90)
        federation.finish()
    assert len(recorded(federation, "settled")) == 1
    assert federation.verified()


# ------------------------------------------------------------------------------------------------ two answers


def test_a_second_agreement_is_refused_and_spoils_no_ledger(tmp_path):
    """Who is asked again, because it was away for a moment, must sign what it signed before."""
    federation = settled(tmp_path)
    away, asked = [True], []

    def answers(name, ask, answer):
        if name != LIAR:
            return answer
        if ask.exchange == "state" and away:
            return None
        if ask.exchange == "agreed":
            asked.append(ask)
            if len(asked) == 2:
                digest = unpack(federation.passed_open, "")[0]
                body = agreement(federation.run_id, digest, [], [2])
                return pack([[], [2], federation.keys[LIAR].sign(content(LIAR, "agreed", body))])
        if ask.exchange == "open":
            federation.passed_open = answer
        return answer

    def awaited(names):
        back = list(names) if away else []
        away.clear()
        return back

    federation.after.append(answers)
    with federation.begun():
        for number in (1, 2):
            federation.round(number)
        federation.coordinator.awaited = awaited
        federation.finish()
    assert len(asked) == 2
    assert f"refused: {LIAR}: has signed another agreement before" in federation.notes
    assert federation.coordinator.settled.final
    assert federation.verified()


def test_who_signed_that_a_round_is_the_last_masks_in_no_later_one(tmp_path):
    """Keys of the next round came with the last report, so only the stages after them can refuse."""
    federation = settled(tmp_path, rounds=3)
    with federation.begun():
        federation.round(1)
        for _ in federation.coordinator.exchange("last", 1, federation.names, {}):
            pass
        assert federation.round(2) is None
        refused = {one.ask.exchange for one in federation.passed if one.error is not None}
        assert refused == {"share"}
        with pytest.raises(RefusedError):
            federation.ask(LIAR, Ask("advertise", federation.run_id, 3, {"members": [*federation.names]}, {}))


# ------------------------------------------------------------------------------------------------- the window


@pytest.mark.parametrize("days", [13, 0, -1])
def test_a_window_shorter_than_agreed_is_not_countersigned(tmp_path, days):
    federation = settled(tmp_path)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "state")

    def shorter(told):
        body = json.loads(told["settled"])
        body["closes"] = int(time.time() + days * DAY)
        told["settled"] = canonical(body)

    federation.telling("settle", 2, shorter, FRIEND)
    federation.run()
    refused = [
        one.ask.exchange for one in federation.passed if one.member == FRIEND and one.error is not None
    ]
    assert refused == ["settle"]


def test_a_window_that_was_told_is_not_shortened_later(tmp_path):
    federation = settled(tmp_path)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "state")
    federation.run()
    ask = federation.asked(FRIEND)["settle", 2]
    body = json.loads(ask.body["settled"])
    assert federation.ask(FRIEND, ask)
    assert federation.ask(FRIEND, ask, settled=canonical({**body, "closes": body["closes"] + 1}))
    with pytest.raises(RefusedError):
        federation.ask(FRIEND, ask, settled=canonical(body | {"closes": body["closes"] - 1}))


@pytest.mark.parametrize("detail", ["rounds", "run"])
def test_who_was_not_asked_for_its_masks_signs_no_end_with_a_false_equation(tmp_path, detail):
    """It would forget its masks, and be silent when it is asked for them afterwards."""
    federation = settled(tmp_path, detail=detail)
    stating(federation, 5)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (FRIEND, "table")

    def end(told):
        body = json.loads(told["settled"])
        body.update(final=True, missing=[], named=[LIAR], closes=None)
        told["settled"] = canonical(body)

    federation.telling("settle", 2, end, FRIEND)
    federation.run()
    refused = [one.ask.exchange for one in federation.passed if one.member == FRIEND and one.error]
    assert refused == ["settle"]
    assert federation.ask(FRIEND, federation.asked("client-0")["table", 1])


def test_nobody_countersigns_that_it_lied_in_place_of_another(tmp_path):
    federation = settled(tmp_path)
    stating(federation, 5)

    def end(told):
        told["settled"] = canonical({**json.loads(told["settled"]), "named": [FRIEND]})

    federation.telling("settle", 2, end, FRIEND)
    federation.run()
    refused = [one.ask.exchange for one in federation.passed if one.member == FRIEND and one.error]
    assert refused == ["settle"]


def test_an_equation_that_fails_is_not_countersigned_as_one_that_holds(tmp_path):
    federation = settled(tmp_path)
    stating(federation, 5)

    def end(told):
        body = json.loads(told["settled"])
        for one in body["rounds"]:
            one.update(sum=one["product"], holds=True)
        told["settled"] = canonical({**body, "named": []})

    federation.telling("settle", 2, end, FRIEND)
    federation.run()
    refused = [one.ask.exchange for one in federation.passed if one.member == FRIEND and one.error]
    assert refused == ["settle"]


# ------------------------------------------------------------------------------------------ a server's friend


def test_a_server_and_its_friend_can_add_to_a_sum_after_they_know_it(tmp_path, monkeypatch):
    """It is as if the friend had sent another update; nobody else's number changes, and nobody is named."""
    more = 1000
    false_sum(monkeypatch, more)
    federation = settled(tmp_path, rounds=1, ledger=False)

    def change(body):
        g = federation.archive.load("direction", 1)["g"]
        body["rounds"]["1"] = str(int(body["rounds"]["1"]) + more * int(g[0]))

    resigned(federation, "state", "statement", 1, change, FRIEND)
    federation.run()
    found = federation.coordinator.settled
    assert (found.holding, found.named, found.final) == (1, {}, True)


# ------------------------------------------------------------------------------------------------------ money


@pytest.mark.parametrize("detail", ["rounds", "run"])
def test_a_liar_who_shows_no_masks_stops_no_payout_and_gains_nothing(tmp_path, monkeypatch, detail):
    honest = settled(tmp_path / "honest", detail=detail).run().coordinator.settled
    federation = settled(tmp_path / "lie", detail=detail)
    stating(federation, 2**40)
    for number in (1, 2):
        federation.answering("table", number, lambda answer: None)
    with federation.begun():
        for number in (1, 2):
            federation.round(number)
        federation.finish()
        block = json.loads((federation.folder / "scores.json").read_text())["settlement"]
        assert (block["missing"], block["silent"]) == ([], [LIAR])
        federation.close(monkeypatch)
    record_decision(federation.folder, Terms("10.00", "fit", "fenced", "PHI"))
    assert federation.verified()
    block = json.loads((federation.folder / "scores.json").read_text())["settlement"]
    assert block["cumulative"] == pytest.approx(honest.scores(federation.names).values.tolist(), rel=1e-12)


def test_two_of_five_who_show_no_masks_stop_a_payout(tmp_path, monkeypatch):
    """The other three are fewer than t, whatever their owners say."""
    federation = settled(tmp_path)
    stating(federation, 2**40)
    for name in (LIAR, FRIEND):
        federation.answering("table", 1, lambda answer: None, name)
    with federation.begun():
        for number in (1, 2):
            federation.round(number)
        federation.finish()
        with pytest.raises(SettlementError) as closing:
            federation.close(monkeypatch)
    with pytest.raises(UnsettledShares) as paying:
        record_decision(federation.folder, Terms("10.00", "fit", "fenced", "PHI"))
    assert (closing.value.code, paying.value.code) == ("uncountersigned", "silent")
    assert federation.verified()
