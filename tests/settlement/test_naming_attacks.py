"""Attacks on the settlement, one by one: members who lie when masks are asked for, and servers that lie."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec import structs

from attacked import attacked, due_in
from fedmerit.errors import BindingError, MessageError, RefusedError
from fedmerit.identity import SERVER, canonical, number
from fedmerit.protocol import clearing, messages
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.direction import Entry, manifest_limit
from fedmerit.protocol.memory import CLIENT, CLOSES, STATED, STATEMENT, TERMS
from fedmerit.protocol.messages import Ask, PairsAsk, pack
from fedmerit.protocol.settler import Settler
from fedmerit.secagg.client import Client
from fedmerit.verify import verify_folder
from linear_federation import LIAR, false_sum
from refusals import refused as raised
from tests.settlement.test_attacks import FACTS
from wire import said_in, told, unpack

RING = 2**64
FRIEND = "client-3"


def errors(federation, name, exchange):
    return [one.error for one in federation.passed if one.member == name and one.ask.exchange == exchange]


# ----------------------------------------------------------------------------------------- members who lie


def test_two_who_agree_on_a_false_mask_move_credit_between_each_other_only(truth, tmp_path):
    honest = truth()
    federation = attacked(tmp_path / "lie")
    federation.stating(700)
    federation.stating(-700 + 1, FRIEND)  # one unit too much, so that masks are asked for

    def change(peer):
        return lambda body: body["pairs"].update({peer: str((int(body["pairs"][peer]) - 700) % RING)})

    federation.tabling(change(FRIEND))
    federation.tabling(change(LIAR), FRIEND)
    federation.run()
    assert federation.coordinator.settled.liars == (FRIEND,)
    found = due_in(federation)
    assert found[LIAR] == honest[LIAR] + 700
    assert found[LIAR] + found[FRIEND] == honest[LIAR] + honest[FRIEND]
    assert {n: v for n, v in found.items() if n not in (LIAR, FRIEND)} == {
        n: v for n, v in honest.items() if n not in (LIAR, FRIEND)
    }


def test_a_silent_liar_is_named_when_it_comes_back_and_given_up_if_it_does_not(truth, tmp_path, monkeypatch):
    honest = truth()
    for back in (True, False):
        federation = attacked(tmp_path / f"lie-{back}", ledger=True)
        federation.stating(9)
        away = [True]
        federation.after.append(
            lambda name, ask, answer, away=away: (
                None if away and (name, ask.exchange) == (LIAR, "table") else answer
            )
        )
        with federation.over():
            coordinator = federation.coordinator
            assert coordinator.settled.unproved == (LIAR,)
            if back:
                away.clear()
                coordinator.settled = federation.clearing().late(LIAR)
                assert coordinator.settled.liars == (LIAR,)
                assert due_in(federation) == honest
            else:
                federation.close(monkeypatch)
                assert coordinator.settled.unproved == (LIAR,)
                assert due_in(federation) == {**honest, LIAR: None}
            assert coordinator.settled.final
        assert federation.verified()
        list(verify_folder(federation.folder, archive=federation.folder / "archive"))


def test_who_uses_another_mask_spoils_the_sum_and_nobody_is_named(tmp_path, monkeypatch):
    real = Client._payload

    def other(client, task, words):
        if client.name == LIAR:
            client._state.pairs = client._state.pairs[1:]
        return real(client, task, words)

    monkeypatch.setattr(Client, "_payload", other)
    federation = attacked(tmp_path).run()
    assert federation.rounds[0].aborted
    assert federation.coordinator.settled is None


def test_a_second_table_is_refused(tmp_path):
    federation = attacked(tmp_path, ledger=True)
    federation.stating(1)
    federation.answering("table", 1, lambda answer: None, who=FRIEND)
    with federation.over():
        federation.tabling(lambda body: body.update(masked="1"), "client-0")
        found = federation.clearing().late(LIAR)
    assert "client-0" not in found.liars
    assert any("another table before" in note for note in federation.notes)
    assert federation.verified()


def test_damaged_updates_make_a_member_missing_and_not_a_liar(tmp_path, monkeypatch):
    monkeypatch.setattr("fedmerit.storage.member_state.SMALL", 16)  # the update has a file of its own
    federation = attacked(tmp_path, files=True, ledger=True)
    federation.stating(1, FRIEND)
    with federation.begun():
        federation.round(1)
        (file,) = (tmp_path / f"{LIAR}.pem.state" / federation.run_id).glob("0001.update.*")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        federation.finish()
    assert federation.coordinator.settled.missing == (LIAR,)
    assert federation.coordinator.settled.liars == ()
    assert federation.verified()


# ----------------------------------------------------------------------------------------- what is answered


def refused(federation, name, ask, kind=RefusedError, **change):
    """Ask once more, with changes; the member must refuse."""
    with pytest.raises(kind):
        federation.ask(name, ask, **change)


def remembering(federation):
    """Let members remember everything of the rounds: they are shown no end that they could countersign."""
    for name in federation.names:
        federation.telling(
            "settle", federation.config.training.rounds, lambda told: told.update(settled=b"{}"), who=name
        )


def disputed(home, peer="client-0", **given):
    """A run whose members remember everything; LIAR states one too much, and disputes a mask with a peer."""
    federation = attacked(home, **given)
    remembering(federation)
    federation.stating(1)
    federation.tabling(lambda body: body["pairs"].update({peer: "5"}))
    return federation


@pytest.fixture(scope="module")
def asked_before(tmp_path_factory):
    """Such a run, in which client-0 has answered every message; what it is asked now changes nothing."""
    return disputed(tmp_path_factory.mktemp("asked")).run()


def test_masks_are_shown_in_one_direction_only_if_the_equation_fails(asked_before):
    ask = asked_before.asked("client-0")["table", 1]
    assert asked_before.ask("client-0", ask)  # the same again
    few = {name: one for name, one in ask.body.statements.items() if name != FRIEND}
    forged = {**ask.body.statements, FRIEND: ask.body.statements[LIAR]}
    g = np.eye(1, ask.arrays["g"].size, dtype=np.int32)[0]
    for change in ({"g": g}, {"statements": few}, {"statements": forged}):
        refused(asked_before, "client-0", ask, **change)


def test_what_was_shown_before_still_counts_when_a_silent_member_comes_back(truth, tmp_path):
    federation = disputed(tmp_path, ledger=True)
    lost = {(FRIEND, "table")}
    federation.after.append(lambda name, ask, answer: None if (name, ask.exchange) in lost else answer)
    with federation.over():
        coordinator = federation.coordinator
        assert FRIEND in coordinator.settled.unproved
        lost |= {(name, kind) for name in federation.names for kind in ("table", "pairs")}
        lost.remove((FRIEND, "table"))
        coordinator.settled = federation.clearing().late(LIAR)
    assert coordinator.settled.final
    assert coordinator.settled.liars == (LIAR,)
    assert due_in(federation) == truth()
    assert federation.verified()
    list(verify_folder(federation.folder, archive=federation.folder / "archive"))


def test_masks_are_not_shown_if_the_equation_holds(tmp_path):
    federation = attacked(tmp_path)
    remembering(federation)
    with federation.over():
        coordinator = federation.coordinator
        made = federation.clearing()
        made._read(coordinator.settled.manifest)
        g = made.direction(coordinator.settled.manifest.rounds[0])
    ask = Ask("table", federation.run_id, 1, {"statements": made.shown_statements()}, {"g": g})
    refused(federation, "client-0", ask)


def test_masks_are_not_shown_before_a_statement(tmp_path):
    federation = attacked(tmp_path)
    remembering(federation)
    federation.stating(1)
    federation.answering("state", 1, lambda answer: None, who="client-0")
    federation.run()
    assert "table" not in {one.ask.exchange for one in federation.passed}


def test_who_does_not_remember_its_statement_shows_no_masks(tmp_path):
    """Its signature under one may come from a state that was lost since, and so may the direction."""
    federation = disputed(tmp_path).run()
    federation.members["client-0"].state(federation.run_id).put(STATEMENT, None)
    refused(federation, "client-0", federation.asked("client-0")["table", 1])


def test_a_key_is_opened_only_against_another_number_that_its_other_end_signed(asked_before):
    federation = asked_before
    ask = federation.asked("client-0")["pairs", 1]
    assert list(ask.body.tables) == [LIAR]
    assert federation.ask("client-0", ask)  # the same again
    text, signature = ask.body.tables[LIAR].text, ask.body.tables[LIAR].signature
    agreed = {n: [canonical(b), s] for n, b, s in federation.coordinator.recorder.signed("table")}
    for tables in (
        {LIAR: [text, b"s" * 64]},
        {LIAR: [text.replace(b'"5"', b'"6"'), signature]},
        {FRIEND: [text, signature]},
        {FRIEND: agreed[FRIEND]},  # it says the same
        {"client-0": agreed["client-0"]},
    ):
        refused(federation, "client-0", ask, tables=tables)


def both_too_large(body):
    body["rounds"] = {key: str(int(value) + 1) for key, value in body["rounds"].items()}


def test_a_table_of_another_round_opens_no_key(tmp_path):
    """Its numbers are others, and its author signed them: for another round."""
    federation = disputed(tmp_path, rounds=2)
    federation.after.clear()
    federation.stating(both_too_large)
    federation.tabling(lambda body: body["pairs"].update({"client-0": "5"}))
    federation.run()
    ask = federation.asked("client-0")["pairs", 1]
    tables = {
        b["round"]: [canonical(b), s]
        for n, b, s in federation.coordinator.recorder.signed("table")
        if n == FRIEND
    }
    assert federation.ask("client-0", ask)
    for one in tables.values():  # in round 1 the two agree
        refused(federation, "client-0", ask, tables={FRIEND: one})


def test_keys_are_opened_until_two_masks_remain(tmp_path):
    federation = disputed(tmp_path, members=4)
    federation.tabling(lambda body: body["pairs"].update({"client-0": "5"}), "client-2")
    federation.run()
    assert federation.coordinator.settled.named[1].keys() <= {LIAR, "client-2"}
    assert errors(federation, "client-0", "pairs") != [None]
    client = federation.member("client-0").state(federation.run_id).get(CLIENT.of(1))
    assert len(client._state.opened) <= 1


def test_a_member_killed_after_it_opened_a_key_remembers_it(tmp_path):
    federation, kept = disputed(tmp_path, files=True), {}

    def killed(name, ask):
        if (name, ask.exchange) == ("client-0", "pairs") and not kept:
            federation.killed_once_saved(name, ask)
            state = federation.member(name).state(federation.run_id)
            kept["opened"] = Client.restore(state.get(CLIENT.of(1)), federation.keys[name])._state.opened

    federation.before.append(killed)
    federation.run()
    assert kept["opened"] == [LIAR]
    assert federation.coordinator.settled.liars == (LIAR,)


def test_statements_that_are_withheld_stay_so_and_a_server_must_sign_that_they_do_not_add_up(truth, tmp_path):
    federation = attacked(tmp_path / "lie", scoring={"visibility": "coordinator"})
    remembering(federation)
    federation.stating(1)
    federation.run()
    for one in federation.passed:
        if one.ask.exchange in ("table", "settle"):
            assert list(one.ask.body.statements) == [one.member]
    assert federation.coordinator.settled.liars == (LIAR,)
    assert due_in(federation) == truth()
    ask = federation.asked("client-0")["table", 1]
    product = str(federation.coordinator.settled.manifest.rounds[0].product)
    assert federation.ask("client-0", ask)
    refused(federation, "client-0", ask, sum=product)
    refused(federation, "client-0", ask, sum="")
    refused(federation, "client-0", ask, statements={})


def settler_of(federation, name):
    """A member in the settlement, whose reasons are not withheld."""
    member = federation.member(name)
    state = member.state(federation.run_id)
    return Settler(member, state, state.get(TERMS), federation.run_id)


def asked_otherwise(federation, ask, **change):
    arrays = {key: change.pop(key, array) for key, array in ask.arrays.items()}
    return Ask.unpack(told(ask, {**said_in(ask), **change}, arrays).pack(federation.coordinator_sign))[0]


def test_each_check_of_a_member_has_its_own_reason(tmp_path):
    federation = disputed(tmp_path).run()
    settler, asks = settler_of(federation, "client-0"), federation.asked("client-0")
    table, run = asks["table", 1], federation.run_id
    along = settler.manifest().along(1).body()
    for stage, kind, ask in (
        ("table", BindingError, asked_otherwise(federation, table, along={**along, "block": 99})),
        ("table", BindingError, asked_otherwise(federation, table, along={**along, "block": 0, "round": 9})),
        ("table", BindingError, asked_otherwise(federation, table, g=table.arrays["g"] + np.int32(1))),
        ("pairs", BindingError, Ask("pairs", run, 1, PairsAsk({}, "5"))),
    ):
        with raised(kind, stage=stage, member="client-0"):
            settler.answer(ask)
    settler.state.put(STATED.of(1), None)
    with raised(BindingError, stage="agreed", member="client-0"):
        settler.answer(asks["agreed", 1])


def test_a_member_closes_no_window_that_it_was_not_told_of_and_nothing_that_it_did_not_prove(tmp_path):
    federation = attacked(tmp_path).run()
    settler = settler_of(federation, "client-0")
    settler.member.without = (LIAR,)
    end = {"named": [], "rounds": [], "missing": [LIAR], "silent": [], "closes": None, "final": True}
    settler.state.put(CLOSES, None)
    with raised(RefusedError):
        settler._check_end(end)
    settler.state.put(CLOSES, 1)  # long over
    settler._check_end(end)
    fails = {"round": 1, "participants": ["client-0"], "sum": "1", "product": "2", "odd": []}
    for one in (fails, {**fails, "sum": "2", "odd": [3]}):
        with raised(RefusedError):
            settler._check_asked({"final": True, "rounds": [one]})
        settler._check_asked({"final": True, "rounds": [{**one, "participants": [LIAR]}]})


# ------------------------------------------------------------------------------------------ lying servers


def test_a_false_sum_costs_nobody_and_is_named_as_the_servers(tmp_path, monkeypatch):
    false_sum(monkeypatch)
    federation = attacked(tmp_path / "all", ledger=True).run()
    assert federation.coordinator.settled.named == {1: {SERVER: "sum"}}
    list(verify_folder(federation.folder, archive=federation.folder / "archive"))
    federation = attacked(tmp_path / "withheld")
    federation.answering("table", 1, lambda answer: pack([*unpack(answer)[:2], b""]), who=FRIEND)
    federation.run()
    found = federation.coordinator.settled
    assert found.liars == ()
    assert found.unproved == (FRIEND,)
    entry = found.manifest.rounds[0]
    for name in set(entry.participants) - {FRIEND}:
        assert found.value(entry, name) == found.statements[name].rounds["1"]


@pytest.mark.parametrize("points", [3, 7])
def test_three_points_of_a_path_are_not_enough_where_they_leave_a_large_rest(tmp_path, monkeypatch, points):
    """With another gradient than needed, a server would choose between two directions."""

    def sharp(model, shown, places):
        x, y = shown.x[places], shown.y[places]
        off = x @ model.astype(np.float64) - y
        value = np.exp(-np.square(off) * 5000)
        return float(value.mean()), (-10000 * off * value) @ x / len(y)

    real = clearing.slopes_of
    monkeypatch.setattr(clearing, "slopes_of", lambda *given: real(*given[:5], points))
    federation = attacked(tmp_path)
    federation.slope = sharp
    federation.run()
    (entry,) = federation.coordinator.recorder.recorded("opening")[0]["manifest"]["rounds"]
    rest, gain = number(entry["rest"]), number(entry["grand"]) - number(entry["empty"])
    assert points == 7 or abs(rest) > 0.03 * abs(gain)
    assert (federation.coordinator.settled is None) == (points == 3)


@pytest.mark.parametrize("what", ["participants", "m", "m0"])
def test_who_never_saw_a_sum_still_knows_its_model_and_whom_it_signed_for(tmp_path, monkeypatch, what):
    federation = attacked(tmp_path, members=4)
    federation.reaches = lambda name, ask: ask.exchange != "report"
    if what in FACTS:
        FACTS[what](federation, monkeypatch)
    else:
        real = Clearing.rounds

        def other(self):
            for one in real(self):
                m0 = one.m0 + np.float32(0.5)
                yield clearing.Summed(one.round, one.participants, m0, m0 + (one.m - one.m0), one.words,
                                      one.weight, one.encoding)  # fmt: skip

        monkeypatch.setattr(Clearing, "rounds", other)
    federation.run()
    assert federation.coordinator.settled is None


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_round_that_the_manifest_leaves_out_is_missed(tmp_path, monkeypatch, acknowledged):
    """Who acknowledged its sum agrees to nothing without it; who did not signs that it released shares."""
    federation = attacked(tmp_path, rounds=2)
    federation.reaches = lambda name, ask: acknowledged or (ask.exchange, ask.round) != ("report", 1)
    real = Clearing.rounds
    monkeypatch.setattr(Clearing, "rounds", lambda self: (one for one in real(self) if one.round != 1))
    federation.run()
    said = {name: body for name, body, _ in federation.coordinator.recorder.signed("agreed")}
    assert {name: (body["wrong"], body["released"]) for name, body in said.items()} == {
        name: ([1], []) if acknowledged else ([], [1]) for name in federation.names
    }
    assert (federation.coordinator.settled is None) == acknowledged


def test_who_never_saw_a_sum_knows_that_another_stands_in_for_one_of_its_members(tmp_path, monkeypatch):
    """As many members and the same weight: only the list that was signed speaks against it."""
    federation = attacked(tmp_path, lost=[("client-4", 1, "masked")])
    federation.reaches = lambda name, ask: ask.exchange != "report"
    others = ("client-0", LIAR, "client-2", "client-4")
    monkeypatch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "participants": others}))
    federation.run()
    assert federation.coordinator.settled is None
    said = {name: body["wrong"] for name, body, _ in federation.coordinator.recorder.signed("agreed")}
    assert {name for name, wrong in said.items() if wrong == [1]} == {"client-0", LIAR, "client-2"}


def test_a_direction_that_was_recomputed_is_not_looked_at_again(tmp_path):
    federation = attacked(tmp_path)
    remembering(federation)
    federation.run()
    ask = federation.asked("client-0")["agree", 1]
    for what in ("m0", "sum", "g"):
        assert federation.ask("client-0", ask, **{what: ask.arrays[what] + 1}) == pack(True)


def test_exchanges_out_of_order_are_refused(tmp_path):
    federation = attacked(tmp_path)
    federation.reaches = lambda name, ask: name != LIAR or ask.exchange not in clearing_kinds
    clearing_kinds = ("open", "agree", "agreed", "state", "settle")
    federation.run()
    other = federation.asked("client-0")
    for key in (("agree", 1), ("agreed", 1), ("state", 1), ("settle", 1)):
        refused(federation, LIAR, other[key])
    federation.ask(LIAR, other["open", 1])
    refused(federation, LIAR, other["agreed", 1])
    refused(federation, LIAR, other["state", 1])


# ------------------------------------------------------------------------------------------------- sizes


def test_a_manifest_is_measured_before_it_is_parsed(tmp_path, monkeypatch):
    federation = attacked(tmp_path).run()
    most, ask = manifest_limit(1, federation.names), federation.asked(LIAR)["open", 1]
    assert len(ask.body.manifest) <= most
    federation, parsed = attacked(tmp_path), []
    federation.telling("open", 1, lambda told: told.update(manifest=b"[" * (most + 1)))
    monkeypatch.setattr("fedmerit.protocol.settler.parsed", lambda text, stage: parsed.append(len(text)))
    federation.run()
    assert all(size <= most for size in parsed)


@pytest.mark.parametrize("kind", ["settle", "table", "pairs"])
def test_json_in_a_settlement_is_measured_before_it_is_parsed(asked_before, monkeypatch, kind):
    """Lists within lists take 25 times as much memory as their text."""
    long, read = b'{"a":[' + b"[]," * 10_000 + b"[]]}", json.loads
    shown = {LIAR: [long, b"s" * 64]}
    lies = {"settle": {"settled": long}, "table": {"statements": shown}, "pairs": {"tables": shown}}
    most = []
    monkeypatch.setattr(messages.json, "loads", lambda text: most.append(len(text)) or read(text))
    with pytest.raises(RefusedError):
        asked_before.ask("client-0", asked_before.asked("client-0")[kind, 1], **lies[kind])
    assert max(most, default=0) < len(long)


def test_the_settlement_of_a_long_run_fits_its_messages(tmp_path):
    federation = attacked(tmp_path, rounds=2).run()
    names = [f"client-{i}" for i in range(300)]
    asked = federation.asked("client-0")
    settle, opening = asked["settle", 2].body, asked["open", 2]
    own = settle.statements["client-0"]
    long = structs.replace(own, text=own.text * 50)
    for kind, body, arrays in (
        ("settle", structs.replace(settle, statements=dict.fromkeys(names, long)), {}),
        ("open", structs.replace(opening.body, manifest=opening.body.manifest * 250), opening.arrays),
    ):
        parcel = Ask(kind, federation.run_id, 2, body, arrays).pack(lambda message: b"s" * 64)
        assert Ask.unpack(parcel, len(names))[0].body == body
    large = structs.replace(settle, settled=bytes(messages.SETTLEMENT_BYTES))
    parcel = Ask("settle", federation.run_id, 2, large).pack(lambda message: b"s" * 64)
    with pytest.raises(MessageError):
        Ask.unpack(parcel, 300)
