"""Attacks on the settlement, one by one: members who lie when masks are asked for, and servers that lie."""

from __future__ import annotations

import json
import os
import signal
from functools import cache

import numpy as np
import pytest

from fedmerit.errors import MessageError, RefusedError
from fedmerit.identity import SERVER, canonical, content, number
from fedmerit.protocol import clearing, direction, messages
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.direction import Entry, Manifest, manifest_limit
from fedmerit.protocol.messages import Ask, pack, unpack
from fedmerit.secagg.client import Client
from fedmerit.storage.member_state import MemberFiles
from fedmerit.verify import verify_folder
from linear_federation import LIAR, Federation, false_sum

RING = 2**64
FRIEND = "client-3"


def federation_of(home, *, members=5, rounds=1, detail="rounds", scoring=None, **given):
    settings = {
        "scoring": {"method": "settled", **(scoring or {})},
        "settlement": {"naming": True, "detail": detail},
    }
    return Federation(home, members, rounds, settings=settings, **{"ledger": False, **given})


def resigned(federation, exchange, kind, change, who=LIAR, number=1):
    """Let a member sign something else than it should."""

    def lie(answer):
        text, _, *rest = unpack(answer, "")
        body = json.loads(text)
        change(body)
        return pack([canonical(body), federation.keys[who].sign(content(who, kind, body)), *rest])

    federation.answering(exchange, number, lie, who)


def stating(federation, more, who=LIAR, key="1"):
    """Let a member state so much more than is true."""

    def change(body):
        body["rounds"][key] = str(int(body["rounds"][key]) + more)

    resigned(federation, "state", "statement", change, who, federation.config.training.rounds)


def tabling(federation, change, who=LIAR, number=1):
    """Let a member sign another table of its masks."""
    resigned(federation, "table", "table", change, who, number)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """What everybody states in the same federation if nobody lies, by who is lost; not to be changed."""

    @cache
    def stated(lost=()):
        return values(federation_of(tmp_path_factory.mktemp("honest"), lost=lost).run())

    return stated


def values(federation):
    found = federation.coordinator.settled
    entry = found.manifest.rounds[0]
    return {name: found.value(entry, name) for name in entry.participants}


def errors(federation, name, exchange):
    return [one.error for one in federation.passed if one.member == name and one.ask.exchange == exchange]


# ----------------------------------------------------------------------------------------- members who lie


@pytest.mark.parametrize("more", [1, -1, 2**40])
def test_who_states_another_number_is_named_and_everybody_keeps_what_is_true(truth, tmp_path, more):
    federation = federation_of(tmp_path / "lie", ledger=True)
    stating(federation, more)
    federation.run()
    assert federation.coordinator.settled.named == {1: {LIAR: "stated"}}
    assert values(federation) == truth()
    lines = [line.code for line in verify_folder(federation.folder, archive=federation.folder / "archive")]
    assert "archive-verdict" in lines


def test_who_states_anothers_number_is_named(truth, tmp_path):
    honest = truth()
    federation = federation_of(tmp_path / "lie")
    stating(federation, honest[FRIEND] - honest[LIAR])
    federation.run()
    assert federation.coordinator.settled.liars == (LIAR,)
    assert values(federation) == honest


@pytest.mark.parametrize("which", ["one", "all", "masked"])
def test_who_lies_about_its_masks_is_named(truth, tmp_path, which):
    federation = federation_of(tmp_path / "lie")
    stating(federation, 5)

    def change(body):
        if which == "masked":
            body["masked"] = str((int(body["masked"]) + 5) % RING)
        for peer in sorted(body["pairs"])[: {"one": 1, "all": 9}.get(which, 0)]:
            sign = 1 if peer < LIAR else -1  # just what its statement needs, if it were one pair
            body["pairs"][peer] = str((int(body["pairs"][peer]) + 5 * sign) % RING)

    tabling(federation, change)
    federation.run()
    assert federation.coordinator.settled.liars == (LIAR,)
    assert values(federation) == truth()


def test_two_who_agree_on_a_false_mask_move_credit_between_each_other_only(truth, tmp_path):
    honest = truth()
    federation = federation_of(tmp_path / "lie")
    stating(federation, 700)
    stating(federation, -700 + 1, FRIEND)  # one unit too much, so that masks are asked for

    def change(peer):
        return lambda body: body["pairs"].update({peer: str((int(body["pairs"][peer]) - 700) % RING)})

    tabling(federation, change(FRIEND))
    tabling(federation, change(LIAR), FRIEND)
    federation.run()
    assert federation.coordinator.settled.liars == (FRIEND,)
    found = values(federation)
    assert found[LIAR] == honest[LIAR] + 700
    assert found[LIAR] + found[FRIEND] == honest[LIAR] + honest[FRIEND]
    assert {n: v for n, v in found.items() if n not in (LIAR, FRIEND)} == {
        n: v for n, v in honest.items() if n not in (LIAR, FRIEND)
    }


@pytest.mark.parametrize("exchange", ["table", "pairs"])
def test_a_liar_who_falls_silent_keeps_nothing_of_its_lie(truth, tmp_path, exchange):
    honest = truth()
    federation = federation_of(tmp_path / "lie", ledger=True)
    stating(federation, 2**40)
    if exchange == "table":
        federation.answering("table", 1, lambda answer: None)
    else:  # it disputes a pair, and neither end opens it
        tabling(federation, lambda body: body["pairs"].update({FRIEND: "5"}))
        for name in (LIAR, FRIEND):
            federation.answering("pairs", 1, lambda answer: None, who=name)
    federation.run()
    found = federation.coordinator.settled
    assert LIAR in found.unproved
    assert not found.final
    for name in set(honest) - {LIAR}:
        assert values(federation)[name] == honest[name]
    assert federation.verified()


def test_a_silent_liar_is_named_when_it_comes_back_and_given_up_if_it_does_not(truth, tmp_path, monkeypatch):
    honest = truth()
    for back in (True, False):
        federation = federation_of(tmp_path / f"lie-{back}", ledger=True)
        stating(federation, 9)
        away = [True]
        federation.after.append(
            lambda name, ask, answer, away=away: (
                None if away and (name, ask.exchange) == (LIAR, "table") else answer
            )
        )
        with federation.begun():
            federation.round(1)
            federation.finish()
            coordinator = federation.coordinator
            new = lambda c=coordinator: Clearing(c, c.gradient, c.archive)  # noqa: E731
            assert coordinator.settled.unproved == (LIAR,)
            if back:
                away.clear()
                coordinator.settled = new().late(LIAR)
                assert coordinator.settled.liars == (LIAR,)
                assert values(federation) == honest
            else:
                federation.close(monkeypatch)
                assert coordinator.settled.unproved == (LIAR,)
                assert values(federation) == {**honest, LIAR: None}
            assert coordinator.settled.final
        assert federation.verified()
        list(verify_folder(federation.folder, archive=federation.folder / "archive"))


def test_who_adds_something_to_its_masked_words_is_named(tmp_path, monkeypatch):
    real = Client._payload

    def spoilt(client, task, words):
        words = words.copy()
        words[:1] += np.uint32(1000 * (client.name == LIAR))
        return real(client, task, words)

    monkeypatch.setattr(Client, "_payload", spoilt)
    federation = federation_of(tmp_path / "lie").run()
    assert federation.coordinator.settled.liars == (LIAR,)


def test_who_uses_another_mask_spoils_the_sum_and_nobody_is_named(tmp_path, monkeypatch):
    real = Client._payload

    def other(client, task, words):
        if client.name == LIAR:
            client._state.pairs = client._state.pairs[1:]
        return real(client, task, words)

    monkeypatch.setattr(Client, "_payload", other)
    federation = federation_of(tmp_path).run()
    assert federation.rounds[0].aborted
    assert federation.coordinator.settled is None


def test_commitments_that_differ_take_a_mask_away_and_hide_no_liar(tmp_path, monkeypatch):
    real = Client._pair_commitment

    def other(client, peer):
        return bytes(range(32)) if (client.name, peer) == (LIAR, FRIEND) else real(client, peer)

    monkeypatch.setattr(Client, "_pair_commitment", other)
    federation = federation_of(tmp_path / "lie")
    stating(federation, 1)
    federation.run()
    table = next(b for n, b, _ in federation.coordinator.recorder.signed("table") if n == LIAR)
    assert FRIEND not in table["pairs"]
    assert federation.coordinator.settled.liars == (LIAR,)


@pytest.mark.parametrize("stage", ["masked", "check", "unmask"])
def test_a_liar_is_named_although_a_dealer_was_lost(truth, tmp_path, stage):
    lost = ((FRIEND, 1, stage),)
    federation = federation_of(tmp_path / "lie", lost=lost)
    stating(federation, 1)
    federation.run()
    assert federation.coordinator.settled.liars == (LIAR,)
    assert values(federation) == truth(lost)


def test_who_lies_about_the_mask_with_a_lost_dealer_is_named(tmp_path):
    federation = federation_of(tmp_path, lost=[(FRIEND, 1, "masked")])
    stating(federation, 1)
    tabling(federation, lambda body: body["pairs"].update({FRIEND: "1"}), "client-0")
    federation.run()
    assert federation.coordinator.settled.named[1] == {"client-0": "pair", LIAR: "stated"}


def test_a_second_table_is_refused(tmp_path):
    federation = federation_of(tmp_path, ledger=True)
    stating(federation, 1)
    federation.answering("table", 1, lambda answer: None, who=FRIEND)
    with federation.begun():
        federation.round(1)
        federation.finish()
        tabling(federation, lambda body: body.update(masked="1"), "client-0")
        coordinator = federation.coordinator
        found = Clearing(coordinator, coordinator.gradient, coordinator.archive).late(LIAR)
    assert "client-0" not in found.liars
    assert any("another table before" in note for note in federation.notes)
    assert federation.verified()


@pytest.mark.parametrize(
    "lie",
    [
        lambda answer: b"garbage",
        lambda answer: pack([b"[" * 20_000, b"s", b""]),
        lambda answer: pack([b"{", b"s", b""]),
        lambda answer: pack([*unpack(answer, "")[:2], bytes(10**6)]),
        lambda answer: pack([*unpack(answer, "")[:2], b""]),
        lambda answer: pack([*unpack(answer, "")[:2], bytes(len(unpack(answer, "")[2]))]),
        lambda answer: pack([unpack(answer, "")[0], bytes(64), unpack(answer, "")[2]]),
    ],
    ids=["bytes", "nested", "json", "large", "no words", "other words", "signature"],
)
def test_a_table_that_is_none_leaves_its_author_unproved(tmp_path, lie):
    federation = federation_of(tmp_path)
    stating(federation, 1)
    federation.answering("table", 1, lie, who=FRIEND)
    federation.run()
    found = federation.coordinator.settled
    assert found.silent[1] == (FRIEND,)
    assert found.liars in ((), (LIAR,))
    assert values(federation)[FRIEND] == found.statements[FRIEND].rounds["1"]
    assert not found.final


def test_a_table_is_measured_before_it_is_parsed(tmp_path):
    federation = federation_of(tmp_path)
    stating(federation, 1)
    federation.answering("table", 1, lambda answer: answer + bytes(10**6), who=FRIEND)
    federation.run()
    assert any("a table has at most" in note for note in federation.notes)


@pytest.mark.parametrize(
    "lie",
    [
        lambda answer: b"garbage",
        lambda answer: pack([b"[" * 3000, b"s"]),
        lambda answer: pack([b"{", b"s"]),
        lambda answer: pack([b"{}", b"s"]),
        lambda answer: pack([b"1", b"s"]),
        lambda answer: bytes(10**6),
    ],
    ids=["bytes", "nested", "json", "empty", "number", "large"],
)
def test_a_statement_that_is_none_makes_its_author_missing_and_nobody_else(tmp_path, lie):
    federation = federation_of(tmp_path)
    federation.answering("state", 1, lie)
    federation.run()
    assert federation.coordinator.settled.missing == (LIAR,)


@pytest.mark.parametrize(
    "value", [str(2**63), str(-(2**63)), "1" * 39, "1" * 10_000, 1, 1.5, "1e3", None, True]
)
def test_a_number_that_no_mask_can_prove_is_no_statement(tmp_path, value):
    federation = federation_of(tmp_path)

    def lie(answer):
        body = json.loads(unpack(answer, "")[0])
        body["rounds"]["1"] = value
        return pack([json.dumps(body).encode(), b"s" * 64])

    if isinstance(value, str) and value.lstrip("-").isdigit():
        resigned(federation, "state", "statement", lambda body: body["rounds"].update({"1": value}))
    else:
        federation.answering("state", 1, lie)
    federation.run()
    assert federation.coordinator.settled.missing == (LIAR,)


@pytest.mark.parametrize("part", [1.7e308, 1e149, float("inf"), float("nan")])
def test_block_products_that_nobody_has_are_no_statement(tmp_path, part):
    federation = federation_of(tmp_path, ledger=True)
    parts = {"1": [part.hex()] * 8}
    resigned(federation, "state", "statement", lambda body: body["blocks"].update(parts))
    federation.run()
    assert federation.coordinator.settled.missing == (LIAR,)
    assert np.isfinite(federation.coordinator.settled.scores(federation.names).stderr).all()
    assert federation.verified()


def test_damaged_updates_make_a_member_missing_and_not_a_liar(tmp_path, monkeypatch):
    monkeypatch.setattr("fedmerit.storage.member_state.SMALL", 16)  # the update has a file of its own
    federation = federation_of(tmp_path, files=True, ledger=True)
    stating(federation, 1, FRIEND)
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


def test_masks_are_shown_in_one_direction_only_if_the_equation_fails(tmp_path):
    federation = federation_of(tmp_path)
    remembering(federation)
    stating(federation, 1)
    federation.run()
    ask = federation.asked("client-0")["table", 1]
    assert federation.ask("client-0", ask)  # the same again
    refused(federation, "client-0", ask, g=np.eye(1, ask.arrays["g"].size, dtype=np.int32)[0])
    few = {name: one for name, one in ask.body["statements"].items() if name != FRIEND}
    refused(federation, "client-0", ask, statements=few)
    forged = {**ask.body["statements"], FRIEND: ask.body["statements"][LIAR]}
    refused(federation, "client-0", ask, statements=forged)


def test_a_first_direction_that_is_not_the_manifests_is_not_answered(tmp_path):
    federation = federation_of(tmp_path)
    stating(federation, 1)
    one = lambda told: told.update(g=np.eye(1, told["g"].size, dtype=np.int32)[0])  # noqa: E731
    federation.telling("table", 1, one, who="client-0")
    federation.run()
    assert federation.coordinator.settled.silent[1] == ("client-0",)
    assert errors(federation, "client-0", "table") != [None]


def test_what_was_shown_before_still_counts_when_a_silent_member_comes_back(truth, tmp_path):
    federation = federation_of(tmp_path, ledger=True)
    stating(federation, 1)
    tabling(federation, lambda body: body["pairs"].update({"client-0": "5"}))
    lost = {(FRIEND, "table")}
    federation.after.append(lambda name, ask, answer: None if (name, ask.exchange) in lost else answer)
    with federation.begun():
        federation.round(1)
        federation.finish()
        coordinator = federation.coordinator
        assert FRIEND in coordinator.settled.unproved
        lost |= {(name, kind) for name in federation.names for kind in ("table", "pairs")}
        lost.remove((FRIEND, "table"))
        again = Clearing(coordinator, coordinator.gradient, coordinator.archive)
        coordinator.settled = again.late(LIAR)
    assert coordinator.settled.final
    assert coordinator.settled.liars == (LIAR,)
    assert values(federation) == truth()
    assert federation.verified()
    list(verify_folder(federation.folder, archive=federation.folder / "archive"))


def test_masks_are_not_shown_if_the_equation_holds(tmp_path):
    federation = federation_of(tmp_path)
    remembering(federation)
    with federation.begun():
        federation.round(1)
        federation.finish()
        coordinator = federation.coordinator
        made = Clearing(coordinator, coordinator.gradient, coordinator.archive)
        made._read(coordinator.settled.manifest)
        g = made.direction(coordinator.settled.manifest.rounds[0])
    ask = Ask("table", federation.run_id, 1, {"statements": made.shown_statements()}, {"g": g})
    refused(federation, "client-0", ask)


def test_masks_are_not_shown_before_a_statement(tmp_path):
    federation = federation_of(tmp_path)
    remembering(federation)
    stating(federation, 1)
    federation.answering("state", 1, lambda answer: None, who="client-0")
    federation.run()
    assert "table" not in {one.ask.exchange for one in federation.passed}


def test_who_does_not_remember_its_statement_shows_no_masks(tmp_path):
    """Its signature under one may come from a state that was lost since, and so may the direction."""
    federation = federation_of(tmp_path)
    remembering(federation)
    stating(federation, 1)
    federation.run()
    federation.members["client-0"].state(federation.run_id).put("statement", None)
    refused(federation, "client-0", federation.asked("client-0")["table", 1])


def test_a_key_is_opened_only_against_another_number_that_its_other_end_signed(tmp_path):
    federation = federation_of(tmp_path)
    remembering(federation)
    stating(federation, 1)
    tabling(federation, lambda body: body["pairs"].update({"client-0": "5"}))
    federation.run()
    ask = federation.asked("client-0")["pairs", 1]
    assert list(ask.body["tables"]) == [LIAR]
    assert federation.ask("client-0", ask)  # the same again
    text, signature = ask.body["tables"][LIAR]
    agreed = {n: [canonical(b), s] for n, b, s in federation.coordinator.recorder.signed("table")}
    for tables in (
        {LIAR: [text, b"s" * 64]},
        {LIAR: [text.replace(b'"5"', b'"6"'), signature]},
        {FRIEND: [text, signature]},
        {FRIEND: agreed[FRIEND]},  # it says the same
        {"client-0": agreed["client-0"]},
        {LIAR: text},
    ):
        refused(federation, "client-0", ask, tables=tables)


def test_a_table_of_another_round_opens_no_key(tmp_path):
    """Its numbers are others, and its author signed them: for another round."""
    federation = federation_of(tmp_path, rounds=2, detail="run")
    remembering(federation)
    stating(federation, 1, key="all")
    tabling(federation, lambda body: body["pairs"].update({"client-0": "5"}))
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


@pytest.mark.parametrize("key", [b"k" * 32, b"", 5, None])
def test_a_key_that_was_not_committed_to_is_refused_and_ends_nothing(tmp_path, key):
    federation = federation_of(tmp_path)
    stating(federation, 1)
    tabling(federation, lambda body: body["pairs"].update({"client-0": "5"}))
    federation.answering("pairs", 1, lambda answer: pack([[LIAR, key]]), "client-0")
    federation.run()
    found = federation.coordinator.settled
    assert (found.liars, found.unproved) == ((LIAR,), ("client-0", LIAR))
    assert any("client-0 opened no key" in note for note in federation.notes)


def test_keys_are_opened_until_two_masks_remain(tmp_path):
    federation = federation_of(tmp_path, members=4)
    remembering(federation)
    stating(federation, 1)
    for name in (LIAR, "client-2"):
        tabling(federation, lambda body: body["pairs"].update({"client-0": "5"}), name)
    federation.run()
    assert federation.coordinator.settled.named[1].keys() <= {LIAR, "client-2"}
    assert errors(federation, "client-0", "pairs") != [None]
    client = federation.member("client-0").state(federation.run_id).get("0001.client")
    assert len(client._state.opened) <= 1


def test_a_member_killed_after_it_opened_a_key_remembers_it(tmp_path):
    federation = federation_of(tmp_path, files=True)
    remembering(federation)
    stating(federation, 1)
    tabling(federation, lambda body: body["pairs"].update({"client-0": "5"}))
    kept = {}

    def killed(name, ask):
        if (name, ask.exchange) == ("client-0", "pairs") and not kept:
            kept["ask"] = ask
            child = os.fork()
            if child == 0:
                real = MemberFiles.save
                MemberFiles.save = lambda self: (real(self), os.kill(os.getpid(), signal.SIGKILL))
                federation.ask(name, ask)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            state = federation.member(name).state(federation.run_id)
            client = Client.restore(state.get("0001.client"), federation.keys[name])
            kept["opened"] = client._state.opened

    federation.before.append(killed)
    federation.run()
    assert kept["opened"] == [LIAR]
    assert federation.coordinator.settled.liars == (LIAR,)


def test_statements_that_are_withheld_stay_so_when_masks_are_asked_for(truth, tmp_path):
    federation = federation_of(tmp_path / "lie", scoring={"visibility": "coordinator"})
    stating(federation, 1)
    federation.run()
    for one in federation.passed:
        if one.ask.exchange in ("table", "settle"):
            assert list(one.ask.body["statements"]) == [one.member]
    assert federation.coordinator.settled.liars == (LIAR,)
    assert values(federation) == truth()


def test_where_statements_are_withheld_a_server_must_sign_that_they_do_not_add_up(tmp_path):
    federation = federation_of(tmp_path, scoring={"visibility": "coordinator"})
    remembering(federation)
    stating(federation, 1)
    federation.run()
    ask = federation.asked("client-0")["table", 1]
    product = str(federation.coordinator.settled.manifest.rounds[0].product)
    assert federation.ask("client-0", ask)
    refused(federation, "client-0", ask, sum=product)
    refused(federation, "client-0", ask, sum=None)
    refused(federation, "client-0", ask, statements={})


# ------------------------------------------------------------------------------------------ lying servers


def test_a_server_whose_sum_is_none_is_named(tmp_path, monkeypatch):
    false_sum(monkeypatch)
    federation = federation_of(tmp_path, ledger=True).run()
    assert federation.coordinator.settled.named == {1: {SERVER: "sum"}}
    assert federation.verified()
    list(verify_folder(federation.folder, archive=federation.folder / "archive"))


def test_a_false_sum_costs_nobody_whose_words_are_withheld(tmp_path, monkeypatch):
    false_sum(monkeypatch)
    federation = federation_of(tmp_path)
    federation.answering("table", 1, lambda answer: pack([*unpack(answer, "")[:2], b""]), who=FRIEND)
    federation.run()
    found = federation.coordinator.settled
    assert found.liars == ()
    assert found.unproved == (FRIEND,)
    entry = found.manifest.rounds[0]
    for name in set(entry.participants) - {FRIEND}:
        assert found.value(entry, name) == found.statements[name].rounds["1"]


FACTS = {
    "size": lambda patch: (
        patch.setattr(clearing, "scale_of", lambda sizes: direction.scale_of(2 * size for size in sizes)),
        patch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "size": 2 * d["size"]})),
    ),
    "coordinates": lambda patch: patch.setattr(
        clearing, "Manifest", lambda *given: Manifest(*given[:6], 1, given[7])
    ),
    "product": lambda patch: patch.setattr(clearing, "product", lambda *given: direction.product(*given) + 1),
    "empty": lambda patch: patch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "empty": 0.9})),
    "rest": lambda patch: patch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "rest": 0.5})),
    "weight": lambda patch: patch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "weight": 4.0})),
    "step": lambda patch: patch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "step": 2 * d["step"]})),
    "blocks": lambda patch: patch.setattr(
        clearing, "Entry", lambda **d: Entry(**{**d, "blocks": tuple(2 * one for one in d["blocks"])})
    ),
    "m": lambda patch: patch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "m": "0" * 64})),
    "participants": lambda patch: patch.setattr(
        clearing, "Entry", lambda **d: Entry(**{**d, "participants": d["participants"][:-1]})
    ),
}


@pytest.mark.parametrize("what", FACTS)
def test_nobody_states_on_a_manifest_with_a_false_fact(tmp_path, monkeypatch, what):
    FACTS[what](monkeypatch)
    monkeypatch.setattr(Manifest, "off_gain", False)  # which a few of these are too
    federation = federation_of(tmp_path).run()
    assert federation.coordinator.settled is None
    assert "state" not in {one.ask.exchange for one in federation.passed}


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
    federation = federation_of(tmp_path)
    federation.slope = sharp
    federation.run()
    (entry,) = federation.coordinator.recorder.recorded("opening")[0]["manifest"]["rounds"]
    rest, gain = number(entry["rest"]), number(entry["grand"]) - number(entry["empty"])
    assert points == 7 or abs(rest) > 0.03 * abs(gain)
    assert (federation.coordinator.settled is None) == (points == 3)


@pytest.mark.parametrize("what", ["participants", "m", "m0"])
def test_who_never_saw_a_sum_still_knows_its_model_and_whom_it_signed_for(tmp_path, monkeypatch, what):
    federation = federation_of(tmp_path, members=4)
    federation.reaches = lambda name, ask: ask.exchange != "report"
    if what in FACTS:
        FACTS[what](monkeypatch)
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
    federation = federation_of(tmp_path, rounds=2)
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
    federation = federation_of(tmp_path, lost=[("client-4", 1, "masked")])
    federation.reaches = lambda name, ask: ask.exchange != "report"
    others = ("client-0", LIAR, "client-2", "client-4")
    monkeypatch.setattr(clearing, "Entry", lambda **d: Entry(**{**d, "participants": others}))
    federation.run()
    assert federation.coordinator.settled is None
    said = {name: body["wrong"] for name, body, _ in federation.coordinator.recorder.signed("agreed")}
    assert {name for name, wrong in said.items() if wrong == [1]} == {"client-0", LIAR, "client-2"}


@pytest.mark.parametrize("what", ["m0", "sum", "g"])
def test_arrays_that_are_not_the_manifests_are_refused_whenever_they_come(tmp_path, what):
    federation = federation_of(tmp_path)

    def other(told):
        told[what] = told[what] + told[what].dtype.type(1)

    federation.telling("agree", 1, other)
    federation.run()
    assert federation.coordinator.settled.missing == (LIAR,)
    assert errors(federation, LIAR, "agree") != [None]  # it has not even looked at them
    ask = federation.asked("client-0")["agree", 1]
    assert federation.ask("client-0", ask, **{what: ask.arrays[what] + 1}) == pack([True])  # it computes once


def test_who_was_not_shown_a_direction_does_not_agree(tmp_path):
    federation = federation_of(tmp_path, rounds=2)
    federation.reaches = lambda name, ask: (name, ask.exchange, ask.round) != (LIAR, "agree", 2)
    federation.run()
    assert federation.coordinator.settled.missing == (LIAR,)


def test_exchanges_out_of_order_are_refused(tmp_path):
    federation = federation_of(tmp_path)
    federation.reaches = lambda name, ask: name != LIAR or ask.exchange not in clearing_kinds
    clearing_kinds = ("open", "agree", "agreed", "state", "settle")
    federation.run()
    other = federation.asked("client-0")
    for key in (("agree", 1), ("agreed", 1), ("state", 1), ("settle", 1)):
        refused(federation, LIAR, other[key])
    federation.ask(LIAR, other["open", 1])
    refused(federation, LIAR, other["agreed", 1])
    refused(federation, LIAR, other["state", 1])


def changed_end(change):
    def lie(told):
        body = json.loads(told["settled"])
        change(body, told)
        told["settled"] = canonical(body)

    return lie


@pytest.mark.parametrize(
    "change",
    [
        lambda body, told: body["rounds"][0].update(sum="1", holds=False),
        lambda body, told: body["rounds"][0].update(holds=False),
        lambda body, told: body["rounds"][0].update(product="1"),
        lambda body, told: body["rounds"][0].update(participants=[LIAR]),
        lambda body, told: body["rounds"].clear(),
        lambda body, told: body.update(named=[LIAR]),
        lambda body, told: body.update(named=[FRIEND]),
        lambda body, told: body.update(missing=[LIAR]),
        lambda body, told: body.update(missing=[FRIEND], final=True),
        lambda body, told: told["statements"].pop(LIAR),
        lambda body, told: told["statements"].pop(FRIEND),
        lambda body, told: told["statements"].update({FRIEND: told["statements"][LIAR]}),
        lambda body, told: body.update(settlement="0" * 64),
    ],
    ids=[
        "sum", "holds", "product", "participants", "rounds", "named", "friend", "missing", "final", "own",
        "another", "forged", "settlement",
    ],
)  # fmt: skip
def test_a_member_countersigns_nothing_else_than_what_it_can_check(tmp_path, change):
    federation = federation_of(tmp_path)
    federation.telling("settle", 1, changed_end(change))
    federation.run()
    signed = {name for name, _, _ in federation.coordinator.recorder.signed("countersigned")}
    assert signed == set(federation.names) - {LIAR}
    (error,) = errors(federation, LIAR, "settle")
    assert error is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda body, told: body["rounds"][0].update(sum="1"),
        lambda body, told: body["rounds"][0].update(holds=False),
        lambda body, told: body["rounds"][0].update(product="1", sum="1"),
        lambda body, told: body["rounds"][0].update(participants=[LIAR]),
        lambda body, told: body["rounds"][0].update(round=2),
        lambda body, told: body["rounds"].clear(),
        lambda body, told: told["statements"].clear(),
        lambda body, told: body.update(named=[FRIEND]),
        lambda body, told: body.update(missing=[LIAR]),
    ],
    ids=["sum", "holds", "product", "participants", "round", "rounds", "own", "named", "missing"],
)
def test_who_sees_no_other_statement_still_compares_the_equations(tmp_path, change):
    federation = federation_of(tmp_path, scoring={"visibility": "coordinator"})
    federation.telling("settle", 1, changed_end(change))
    federation.run()
    assert len(errors(federation, "client-0", "settle")) == 1
    assert errors(federation, "client-0", "settle")[0] is None
    assert errors(federation, LIAR, "settle")[0] is not None


# ------------------------------------------------------------------------------------------------- sizes


def test_a_manifest_is_measured_before_it_is_parsed(tmp_path, monkeypatch):
    federation = federation_of(tmp_path)
    most = manifest_limit(1, federation.config.settlement.blocks, federation.names)
    federation.telling("open", 1, lambda told: told.update(manifest=b"[" * (most + 1)))
    parsed = []
    monkeypatch.setattr("fedmerit.protocol.settler.parsed", lambda text, stage: parsed.append(len(text)))
    federation.run()
    assert all(size <= most for size in parsed)
    assert len(canonical_manifest(tmp_path / "honest")) <= most


@pytest.mark.parametrize("kind", ["settle", "table", "pairs"])
def test_json_in_a_settlement_is_measured_before_it_is_parsed(tmp_path, monkeypatch, kind):
    """Lists within lists take 25 times as much memory as their text."""
    federation = federation_of(tmp_path)
    remembering(federation)
    stating(federation, 1)
    tabling(federation, lambda body: body["pairs"].update({"client-0": "5"}))
    federation.run()
    long, read = b'{"a":[' + b"[]," * 10_000 + b"[]]}", json.loads
    shown = {LIAR: [long, b"s" * 64]}
    lies = {"settle": {"settled": long}, "table": {"statements": shown}, "pairs": {"tables": shown}}
    most = []
    monkeypatch.setattr(messages.json, "loads", lambda text: most.append(len(text)) or read(text))
    with pytest.raises(RefusedError):
        federation.ask("client-0", federation.asked("client-0")[kind, 1], **lies[kind])
    assert max(most, default=0) < len(long)


def canonical_manifest(home):
    federation = federation_of(home)
    kept = []
    federation.before.append(
        lambda name, ask: kept.append(ask.body["manifest"]) if ask.exchange == "open" else None
    )
    federation.run()
    return kept[0]


def test_the_settlement_of_a_long_run_fits_its_messages(tmp_path):
    federation = federation_of(tmp_path, rounds=2).run()
    names = [f"client-{i}" for i in range(300)]
    settle = federation.asked("client-0")["settle", 2]
    text, signature = settle.body["statements"]["client-0"]
    opened = federation.asked("client-0")["open", 2]
    long = {
        "settle": {**settle.body, "statements": {name: [text * 50, signature] for name in names}},
        "open": {**opened.body, "manifest": opened.body["manifest"] * 250},
    }
    for kind, body in long.items():
        arrays = opened.arrays if kind == "open" else {}
        parcel = Ask(kind, federation.run_id, 2, body, arrays).pack(lambda message: b"s" * 64)
        assert Ask.unpack(parcel, len(names))[0].body.keys() == body.keys()
    large = {**settle.body, "settled": bytes(messages.SETTLEMENT_BYTES)}
    parcel = Ask("settle", federation.run_id, 2, large).pack(lambda message: b"s" * 64)
    with pytest.raises(MessageError):
        Ask.unpack(parcel, 300)


def test_a_replayed_statement_of_another_run_is_refused(tmp_path):
    first = federation_of(tmp_path / "first").run()
    _, body, signature = next(one for one in first.coordinator.recorder.signed("statement") if one[0] == LIAR)
    second = federation_of(tmp_path / "second")
    second.run_id = "f" * 32
    second.answering("state", 1, lambda answer: pack([canonical(body), signature]))
    second.run()
    assert second.coordinator.settled.missing == (LIAR,)
