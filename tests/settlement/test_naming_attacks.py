"""Attacks on the settlement that take several steps: what members answer, and what servers make up."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from attacked import attacked, due_in, settling
from fedmerit.errors import BindingError, MessageError, RefusedError
from fedmerit.identity import canonical, content, exact, number
from fedmerit.protocol import clearing, messages
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.direction import Along, Manifest, manifest_limit, scale_of
from fedmerit.protocol.memory import CLIENT, CLOSES, SETTLEMENT, SIGNED, STATED, STATEMENT, TABLES, TERMS
from fedmerit.protocol.messages import Ask, PairsAsk, pack, slice_arrays
from fedmerit.protocol.settlement import Statement, agreement
from fedmerit.protocol.settler import Settler
from fedmerit.secagg.client import Client
from fedmerit.secagg.quantise import direction_hash
from linear_federation import LIAR, SIZE
from refusals import refused as raised
from wire import said_in, told, unpack

FRIEND = "client-3"


def errors(federation, name, exchange):
    return [one.error for one in federation.passed if one.member == name and one.ask.exchange == exchange]


# ----------------------------------------------------------------------------------------- members who lie


def test_a_second_table_along_a_block_is_refused(tmp_path):
    federation = settling(tmp_path).shifting()
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "table")
    with federation.over():
        federation.tabling_along(lambda body: body["pairs"].update({FRIEND: "1"}), "client-0", 2)
        found = federation.clearing().late(LIAR)
    assert "client-0" not in found.liars
    assert any("another table before" in note for note in federation.notes)
    assert federation.verified()


def test_damaged_updates_make_a_member_missing_and_not_a_liar(tmp_path, monkeypatch):
    monkeypatch.setattr("fedmerit.storage.member_state.SMALL", 16)  # the update has a file of its own
    federation = attacked(tmp_path, files=True, ledger=True)
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


def disputed(home, peer="client-0", members=4, **given):
    """A run whose members remember everything; LIAR states one too much, and disputes a mask with a peer.

    Four members have no witnesses, so both ends are asked to open the key.
    """
    federation = attacked(home, members, **given)
    remembering(federation)
    federation.stating(1)
    federation.tabling(lambda body: body["pairs"].update({peer: "5"}))
    return federation


@pytest.fixture(scope="module")
def asked_before(tmp_path_factory):
    """Such a run, in which client-0 has answered every message; what it is asked now changes nothing."""
    return disputed(tmp_path_factory.mktemp("asked")).run()


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """A run in which LIAR shifts parts of blocks, and everybody has shown masks along them."""
    federation = attacked(tmp_path_factory.mktemp("shifted"))
    remembering(federation)
    return federation.shifting(key="1").run()


def test_masks_are_shown_along_a_block_only_if_its_parts_do_not_add_up(shifted):
    ask = shifted.asked("client-0")["table", 1]
    assert shifted.ask("client-0", ask)  # the same again
    few = {name: one for name, one in ask.body.statements.items() if name != FRIEND}
    forged = {**ask.body.statements, FRIEND: ask.body.statements[LIAR]}
    g = np.eye(1, ask.arrays["g"].size, dtype=np.int32)[0]
    for change in ({"g": g}, {"statements": few}, {"statements": forged}):
        refused(shifted, "client-0", ask, **change)


def test_who_does_not_remember_its_statement_shows_no_masks(tmp_path):
    """Its signature under one may come from a state that was lost since, and so may the direction."""
    federation = attacked(tmp_path).shifting(key="1").run()
    federation.members["client-0"].state(federation.run_id).put(STATEMENT, None)
    asked = federation.asked("client-0")
    for kind in ("draw", "drawn", "seal", "witness", "table"):
        refused(federation, "client-0", asked[kind, 1])


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


def test_statements_that_are_withheld_stay_so_and_a_server_must_sign_that_parts_are_odd(truth, tmp_path):
    federation = attacked(tmp_path / "lie", scoring={"visibility": "coordinator"})
    remembering(federation)
    federation.shifting(key="1").run()
    for one in federation.passed:
        if one.ask.exchange in ("table", "settle"):
            assert list(one.ask.body.statements) == [one.member]
    assert federation.coordinator.settled.named == {1: {LIAR: "part"}}
    assert due_in(federation) == truth()
    ask = federation.asked("client-0")["table", 1]
    (entry,) = federation.coordinator.settled.manifest.rounds
    assert federation.ask("client-0", ask)
    refused(federation, "client-0", ask, total=exact(entry.blocks[ask.body.along["block"]]))
    refused(federation, "client-0", ask, total="")
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
    federation = attacked(tmp_path).shifting(key="1").run()
    settler, asks = settler_of(federation, "client-0"), federation.asked("client-0")
    table, run = asks["table", 1], federation.run_id
    along = table.body.along
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
    fails = {"round": 1, "participants": ["client-0"], "sum": "2", "product": "2", "odd": [3]}
    with raised(RefusedError):
        settler._check_asked({"final": True, "rounds": [fails]})
    settler._check_asked({"final": True, "rounds": [{**fails, "participants": [LIAR]}]})


# ------------------------------------------------------------------------------------------ lying servers


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


@pytest.mark.parametrize("kind", ["settle", "table", "witness", "pairs"])
def test_json_in_a_settlement_is_measured_before_it_is_parsed(asked_before, shifted, monkeypatch, kind):
    """Lists within lists take 25 times as much memory as their text."""
    long, read = b'{"a":[' + b"[]," * 10_000 + b"[]]}", json.loads
    shown = {LIAR: [long, b"s" * 64]}
    lies = {"settle": {"settled": long}, "table": {"statements": shown}, "pairs": {"tables": shown}}
    lies |= {"witness": {"sealed": shown}}
    federation = asked_before if kind == "pairs" else shifted
    most = []
    monkeypatch.setattr(messages.json, "loads", lambda text: most.append(len(text)) or read(text))
    with pytest.raises(RefusedError):
        federation.ask("client-0", federation.asked("client-0")[kind, 1], **lies[kind])
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


# -------------------- a server that makes up rounds or directions, and asks for masks before anybody agreed


VICTIM = "client-0"


@contextmanager
def over(home, *, rounds=1, train=None, **scoring):
    """A run of five members whose rounds are over, and whose server has not settled it."""
    federation = attacked(home, rounds=rounds, scoring=scoring)
    federation.train = train or federation.train
    with federation.trained():
        yield federation


def made_up(federation, g, change):
    """The manifest of a server that changes rounds and puts this direction in all that it changes."""
    true = federation.clearing()._made()
    entries = [
        replace(one, **{"g": direction_hash(g), **new} if (new := change(one)) else {}) for one in true.rounds
    ]
    scale = scale_of(one.size for one in entries)
    return Manifest.from_body(replace(true, rounds=tuple(entries), scale=scale).body())


def opening(federation, manifest):
    shown = federation.coordinator.pool.settlement()
    body = {"manifest": canonical(manifest.body()), "slice": [shown.index, list(shown.path)], "last": {}}
    rounds = federation.config.training.rounds
    return Ask("open", federation.run_id, rounds, body, slice_arrays(shown))


def stated_by(federation, manifest, names):
    """Signed statements of members who lie: their numbers do not add up."""
    found = {}
    for name in names:
        rounds = [str(one.round) for one in manifest.rounds if name in one.participants]
        parts = (0.0,) * len(manifest.blocks)
        body = Statement(
            name, manifest.digest, dict.fromkeys(rounds, 12345), dict.fromkeys(rounds, parts)
        ).body(federation.run_id)
        signature = federation.keys[name].sign(content(name, "statement", body))
        found[name] = [canonical(body), signature]
    return found


def along_a_block(federation, round, g, **shown):
    """The question for masks along a direction that a server made up."""
    along = Along(round, 0, direction_hash(g), 1.0, 0).body()
    x = federation.coordinator.archive.load("round", 1)["x"]
    arrays = {"g": g, "m0": federation.models[0], "sum": x}
    return Ask("table", federation.run_id, round, {**shown, "along": along}, arrays)


def coordinate(number):
    return np.eye(1, SIZE, number, dtype=np.int32)[0]


@pytest.mark.parametrize("participants", [(FRIEND,), ("client-1", "client-2", FRIEND), ("a", "b", "c", "d")])
def test_a_manifest_with_a_round_of_few_members_or_strangers_is_refused(tmp_path, participants):
    """None of the honest ones would recompute its direction, from which the scale of all others follows."""
    with over(tmp_path) as federation:
        manifest = made_up(federation, coordinate(7), lambda one: {"participants": participants})
        with pytest.raises(RefusedError):
            federation.ask(VICTIM, opening(federation, manifest))
        assert federation.members[VICTIM].state(federation.run_id).get(SETTLEMENT) is None


def test_masks_are_shown_on_no_round_that_leaves_this_member_out(tmp_path):
    """They would tell the product of its update with a direction that it never saw: here one coordinate."""
    others = ("client-1", "client-2", FRIEND, "client-4")
    with over(tmp_path) as federation:
        manifest = made_up(federation, coordinate(7), lambda one: {"participants": others})
        federation.ask(VICTIM, opening(federation, manifest))
        shown = stated_by(federation, manifest, others)
        with pytest.raises(RefusedError):
            federation.ask(VICTIM, along_a_block(federation, 1, coordinate(7), statements=shown))
        assert federation.members[VICTIM].state(federation.run_id).get(TABLES.of(1)) is None


def test_masks_are_shown_on_no_round_that_leaves_this_member_out_though_it_stated_on_others(tmp_path):
    """Where statements are withheld, the server needs no friend to say that an equation fails."""
    others = ("client-1", "client-2", FRIEND, "client-4")
    with over(tmp_path, rounds=2, visibility="coordinator") as federation:
        federation.members[VICTIM].state(federation.run_id).put(SIGNED.of(2), None)  # it acknowledged no sum
        g = coordinate(7)
        manifest = made_up(federation, g, lambda one: {"participants": others} if one.round == 2 else None)
        made = federation.clearing()
        federation.ask(VICTIM, opening(federation, manifest))
        direction = made._direction_ask(next(made.rounds()), manifest.rounds[0])
        federation.member(VICTIM).answer(direction, "here")
        federation.ask(VICTIM, Ask("agreed", federation.run_id, 2, {}))
        body = agreement(federation.run_id, manifest.digest, [], [], "0" * 64)
        signed = {
            name: [[], [], "0" * 64, federation.keys[name].sign(content(name, "agreed", body))]
            for name in others
        }
        answer = federation.ask(VICTIM, Ask("state", federation.run_id, 2, {"agreed": signed}))
        shown = {"statements": {VICTIM: unpack(answer)[:2]}, "total": exact(1.0)}
        with pytest.raises(RefusedError):
            federation.ask(VICTIM, along_a_block(federation, 2, g, **shown))


def test_a_false_direction_is_answered_alike_whatever_the_update_is(tmp_path, caplog):
    """Whether a product with it could be stated would tell on which side of a plane the update lies."""
    g = np.full(SIZE, 32767, np.int32)
    answers = []
    for sign in (1, -1):
        alternating = np.where(np.arange(SIZE) % 2, sign, 1).astype(np.float32)

        def train(name, number, m0, own=alternating):
            return (own * (1 if name == VICTIM else 0.01)).astype(np.float32)

        with over(tmp_path / str(sign), train=train) as federation:
            manifest = made_up(federation, g, lambda one: {"m": one.m})
            federation.ask(VICTIM, opening(federation, manifest))
            archive = federation.coordinator.archive
            arrays = {"g": g, "m0": federation.models[0], "sum": archive.load("round", 1)["x"]}
            with caplog.at_level(logging.CRITICAL, "fedmerit"):
                answers.append(federation.ask(VICTIM, Ask("agree", federation.run_id, 1, {}, arrays)))
    assert answers == [pack(False)] * 2
