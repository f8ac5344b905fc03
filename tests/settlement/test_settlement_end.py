"""How a settlement ends: taken up again after a kill, its window, and what one member can spoil."""

from __future__ import annotations

import json
import time

import pytest

from attacked import settling
from fedmerit.errors import RefusedError, SettlementError, UnsettledShares
from fedmerit.identity import canonical
from fedmerit.ledger.decisions import Terms
from fedmerit.protocol.messages import Ask, Signed
from linear_federation import LIAR, false_sum
from runs import record_decision
from wire import unpack

FRIEND = "client-3"


def test_a_server_killed_after_it_settled_with_a_liar_keeps_a_sound_ledger(tmp_path, monkeypatch):
    """The next one ends the run a minute and a half later."""
    federation = settling(tmp_path)
    federation.stating(5)
    with federation.trained():
        federation.clearing().run(federation.names)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 90)
        federation.finish()
    (body,) = [record.body for record in federation.records if record.kind == "settled"]
    assert (body["final"], body["closes"], body["named"]) == (True, None, [LIAR])
    assert federation.verified()


def test_who_signed_that_a_round_is_the_last_masks_in_no_later_one(tmp_path):
    """Keys of the next round came with the last report, so only the stages after them can refuse."""
    federation = settling(tmp_path, rounds=3)
    with federation.trained(1):
        for _ in federation.coordinator.exchange("last", 1, federation.names, {}):
            pass
        assert federation.round(2) is None
        refused = {one.ask.exchange for one in federation.passed if one.error is not None}
        assert refused == {"share"}
        with pytest.raises(RefusedError):
            federation.ask(LIAR, Ask("advertise", federation.run_id, 3, {"members": [*federation.names]}, {}))


# ------------------------------------------------------------------------------------------------- the window


def test_a_window_that_was_told_is_not_shortened_later(tmp_path):
    federation = settling(tmp_path)
    kept = federation.losing("state")
    federation.run()
    ask = federation.asked(FRIEND)["settle", 2]
    body = json.loads(ask.body.settled)
    assert federation.ask(FRIEND, ask)
    assert federation.ask(FRIEND, ask, settled=canonical({**body, "closes": body["closes"] + 1}))
    with pytest.raises(RefusedError):
        federation.ask(FRIEND, ask, settled=canonical(body | {"closes": body["closes"] - 1}))
    ended = {**body, "final": True, "closes": None, "missing": []}  # as if nobody were awaited
    for one, settled in zip(ended["rounds"], federation.coordinator.settled.equations, strict=True):
        one.update(sum=str(settled.product), holds=True)
    shown = {**ask.body.statements, LIAR: Signed(*unpack(kept["state"]))}
    assert federation.ask(FRIEND, ask, settled=canonical(ended), statements=shown)
    with pytest.raises(RefusedError):
        federation.ask(FRIEND, ask, settled=canonical(body))


def test_who_was_not_asked_for_its_masks_signs_no_end_with_a_false_equation(tmp_path):
    """It would forget its masks, and be silent when it is asked for them afterwards."""
    federation = settling(tmp_path)
    federation.stating(5)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (FRIEND, "table")

    def end(told):
        body = json.loads(told["settled"])
        body.update(final=True, missing=[], named=[LIAR], closes=None)
        told["settled"] = canonical(body)

    federation.telling("settle", 2, end, FRIEND)
    federation.run()
    assert federation.refusals(FRIEND) == ["settle"]
    assert federation.ask(FRIEND, federation.asked("client-0")["table", 1])


# ------------------------------------------------------------------------------------------ a server's friend


def test_a_server_and_its_friend_can_add_to_a_sum_after_they_know_it(tmp_path, monkeypatch):
    """It is as if the friend had sent another update; nobody else's number changes, and nobody is named."""
    more = 1000
    false_sum(monkeypatch, more)
    federation = settling(tmp_path, rounds=1, ledger=False)

    def change(body):
        g = federation.archive.load("direction", 1)["g"]
        body["rounds"]["1"] = str(int(body["rounds"]["1"]) + more * int(g[0]))

    federation.stating(change, FRIEND)
    federation.run()
    found = federation.coordinator.settled
    assert (found.holding, found.named, found.final) == (1, {}, True)


# ------------------------------------------------------------------------------------------------------ money


def test_a_liar_who_shows_no_masks_stops_no_payout_and_gains_nothing(tmp_path, monkeypatch):
    honest = settling(tmp_path / "honest").run().coordinator.settled
    federation = settling(tmp_path / "lie")
    federation.stating(2**40)
    for number in (1, 2):
        federation.answering("table", number, lambda answer: None)
    with federation.over():
        block = json.loads((federation.folder / "scores.json").read_text())["settlement"]
        assert (block["missing"], block["silent"]) == ([], [LIAR])
        federation.close(monkeypatch)
    record_decision(federation.folder, Terms("10.00", "fit", "fenced", "PHI"))
    assert federation.verified()
    block = json.loads((federation.folder / "scores.json").read_text())["settlement"]
    assert block["cumulative"] == pytest.approx(honest.totals(federation.names).values.tolist(), rel=1e-12)


def test_two_of_five_who_show_no_masks_stop_a_payout(tmp_path, monkeypatch):
    """The other three are fewer than t, whatever their owners say."""
    federation = settling(tmp_path)
    federation.stating(2**40)
    for name in (LIAR, FRIEND):
        federation.answering("table", 1, lambda answer: None, name)
    with federation.over(), pytest.raises(SettlementError) as closing:
        federation.close(monkeypatch)
    with pytest.raises(UnsettledShares) as paying:
        record_decision(federation.folder, Terms("10.00", "fit", "fenced", "PHI"))
    assert (closing.value.code, paying.value.code) == ("uncountersigned", "silent")
    assert federation.verified()
