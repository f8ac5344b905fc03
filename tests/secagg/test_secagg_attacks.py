"""Bad bytes and dishonest parties: each is caught, by name, before anything is revealed."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from parties import M0, Parties, head_of, heads_in

from fedmerit.errors import (
    BindingError,
    MessageError,
    ProtocolError,
    RefusedError,
    RoundAborted,
    ShareError,
    SignatureError,
)
from fedmerit.secagg import STAGES, Client, Released, Task, Update, sharing
from fedmerit.secagg.messages import head_limit, to_broadcast

A, B, C, D = "hospital-a", "hospital-b", "hospital-c", "hospital-d"


def caught(error, kind, stage=None, member=None):
    assert type(error.value) is kind
    assert stage is None or error.value.stage == stage
    assert member is None or error.value.member == member


# --------------------------------------------------------------------- messages damaged or moved on their way


@pytest.mark.parametrize("stage", STAGES)
def test_a_flipped_bit_anywhere_is_caught_and_changes_nothing(stage):
    parties = Parties(3).play(until=stage)
    message = parties.answer(A)
    rng = np.random.default_rng(0)
    for bit in {*range(64), *rng.integers(0, 8 * len(message), 200).tolist()}:
        bad = bytearray(message)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises((MessageError, SignatureError, BindingError)):
            parties.server.receive(bytes(bad))
    assert A in parties.server.waiting
    assert parties.server.receive(message) == A
    for name in (B, C):
        parties.server.receive(parties.answer(name))
    parties.shown = parties.server.advance()
    assert parties.play().server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)


@pytest.mark.parametrize("stage", STAGES)
def test_a_truncated_or_longer_message_is_caught(stage):
    parties = Parties(3).play(until=stage)
    message = parties.answer(A)
    for bad in (b"", message[:3], message[:8], message[:20], message[:-1], message + b"\0", message * 2):
        with pytest.raises((MessageError, BindingError)) as error:
            parties.server.receive(bad, A)
        assert error.value.stage == stage
        assert error.value.member == A


def test_an_oversized_message_is_refused_before_it_is_parsed(monkeypatch):
    parties = Parties(3)
    monkeypatch.setattr("fedmerit.secagg.messages.open_head", lambda *_: pytest.fail("was parsed"))
    limit = 8 + head_limit(parties.setting) + 4 * parties.encoding.words
    with pytest.raises(MessageError, match=f"to {limit} bytes, got {limit + 1}"):
        parties.server.receive(b"FMS1" + bytes(limit - 3), A)
    with pytest.raises(MessageError, match="a head of"):
        parties.server.receive(b"FMS1" + b"\xff\xff\xff\xff" + bytes(200), A)
    parties.clients[A].advertise()
    with pytest.raises(MessageError, match="at most"):
        parties.clients[A].share(b"FMB1" + bytes(10**6))


@pytest.mark.parametrize("stage", STAGES)
def test_a_replayed_message_is_refused(stage):
    parties = Parties(3).play(until=stage)
    message = parties.answer(A)
    parties.server.receive(message)
    with pytest.raises(BindingError, match="heard already") as error:
        parties.server.receive(message)
    caught(error, BindingError, stage, A)


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_message_of_another_stage_is_refused(stage):
    parties = Parties(4).play(until=stage)
    late = parties.answer(D)
    for name in (A, B, C):
        parties.server.receive(parties.answer(name))
    parties.server.advance()
    with pytest.raises(BindingError, match="is due") as error:
        parties.server.receive(late)
    caught(error, BindingError, stage, D)


@pytest.mark.parametrize(
    "change", [{"round": 2}, {"attempt": 1}, {"run": "other"}, {"threshold": 4}, {"config_hash": M0}]
)
def test_a_message_of_another_run_round_attempt_threshold_or_config_is_refused(change):
    parties = Parties(4)
    other = replace(parties.setting, **change)
    message = Client(other, A, parties.identity[A]).advertise()
    with pytest.raises(BindingError) as error:
        parties.server.receive(message)
    caught(error, BindingError, "advertise", A)
    broadcast = to_broadcast(
        "advertise", [head_of(message), *heads_in(parties.play(until="share").shown[B])[1:]]
    )
    with pytest.raises(BindingError) as error:
        parties.clients[B].share(broadcast)
    caught(error, BindingError, "advertise", A)
    assert parties.clients[B].stage == "stopped"


def test_a_message_of_another_schedule_is_refused():
    parties = Parties(4)
    other = replace(parties.setting, members=parties.names[:3])
    with pytest.raises(BindingError, match="another schedule") as error:
        parties.server.receive(Client(other, A, parties.identity[A]).advertise())
    caught(error, BindingError, "advertise", A)


def test_a_member_that_is_not_scheduled_is_refused():
    parties, five = Parties(4), Parties(5)
    with pytest.raises(BindingError, match="'hospital-e' is not scheduled"):
        parties.server.receive(five.clients["hospital-e"].advertise())


def test_a_message_under_another_members_name_is_refused():
    parties = Parties(3)
    with pytest.raises(BindingError, match="signed by hospital-b") as error:
        parties.server.receive(parties.answer(B), sender=A)
    caught(error, BindingError, "advertise", A)


@pytest.mark.parametrize("stage", [*STAGES, "decline"])
def test_a_forged_signature_is_refused(stage):
    due = "masked" if stage == "decline" else stage
    parties = Parties(3).play(until=due)
    with pytest.raises(SignatureError) as error:
        parties.server.receive(parties.forge(A, stage, [], signer=B))
    caught(error, SignatureError, stage, A)
    assert parties.server.declined == []


@pytest.mark.parametrize(
    "body",
    [
        [],
        [b"x" * 32] * 3,
        [b"x" * 32] * 5,
        [b"x" * 31] * 4,
        ["x" * 32] * 4,
        [[b"x" * 32] * 4],
        [None] * 4,
    ],
)
def test_a_signed_body_of_another_shape_is_refused(body):
    parties = Parties(3)
    with pytest.raises(MessageError, match="a body that no member") as error:
        parties.server.receive(parties.forge(A, "advertise", body))
    caught(error, MessageError, "advertise", A)


@pytest.mark.parametrize("version", [0, 2, True])
def test_another_version_is_refused(version, monkeypatch):
    parties = Parties(3)
    monkeypatch.setattr("fedmerit.secagg.messages.VERSION", version)
    message = parties.answer(A)
    monkeypatch.undo()
    with pytest.raises(MessageError, match=r"version|fields"):
        parties.server.receive(message)


# ------------------------------------------------------------------------------------- a server that cheats


def test_a_man_in_the_middle_cannot_put_his_keys_in_place_of_a_members():
    parties = Parties(4).play(until="share")
    mallory = Ed25519PrivateKey.generate()
    evil = Parties(4, keys=[mallory, *parties.keys[1:]])  # a roster with his key under the victim's name
    own = evil.forge(A, "advertise", [os.urandom(32)] * 4)
    # what he signs with his own key, and the victim's signed head with his keys written over the victim's
    real = heads_in(parties.shown[B])
    body = parties.server.heads["advertise"][A].body
    swapped = real[0].replace(body[1], os.urandom(32))
    resigned = head_of(parties.forge(A, "advertise", [os.urandom(32)] * 4, signer=B))
    for forged in (head_of(own), swapped, resigned):
        parties.clients[B]._state.stopped = ""
        with pytest.raises((SignatureError, BindingError)) as error:
            parties.clients[B].share(to_broadcast("advertise", [forged, *real[1:]]))
        assert (error.value.stage, error.value.member) == ("advertise", A)
        assert parties.clients[B].stage == "stopped"
        with pytest.raises(RefusedError, match="has stopped"):
            parties.clients[B].share(parties.shown[B])


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_list_that_is_reordered_doubled_shortened_or_of_another_stage_is_refused(stage):
    parties = Parties(4).play(until=STAGES[STAGES.index(stage) + 1])
    real = heads_in(parties.shown[A])
    other = "check" if stage != "check" else "masked"
    bad = {
        "out of order": [real[0], real[2], real[1], real[3]],
        "twice": [real[0], real[0], *real[1:3]],
        "expected at most 4": [*real, real[0]],
        "2 members left": real[:2],
        "own message is missing": real[1:],
    }
    for says, heads in bad.items():
        parties.clients[A]._state.stopped = ""
        with pytest.raises(ProtocolError, match=says) as error:
            parties.clients[A].handle(to_broadcast(stage, heads), parties.update(A))
        assert error.value.stage in STAGES
    parties.clients[A]._state.stopped = ""
    with pytest.raises(BindingError, match="expected the heads of stage"):
        parties.clients[A].handle(to_broadcast(other, real), parties.update(A))
    parties.clients[A]._state.stopped = ""
    if stage != "advertise":
        mixed = [real[0], heads_in(parties.server.broadcasts["advertise"])[1], *real[2:]]
        with pytest.raises(BindingError, match="shown a head of stage advertise") as error:
            parties.clients[A].handle(to_broadcast(stage, mixed), parties.update(A))
        caught(error, BindingError, stage, B)


def test_members_shown_different_key_lists_find_out_before_masking():
    parties = Parties(4).play(until="share")
    real = heads_in(parties.shown[A])
    parties.shown[A] = to_broadcast("advertise", real[:3])
    shared = {name: parties.answer(name) for name in parties.names[:3]}
    with pytest.raises(
        BindingError, match="other messages than it was shown"
    ):  # an honest server notices at once
        parties.server.receive(shared[A])
    shown = to_broadcast("share", [head_of(shared[name]) for name in (A, B, C)])
    with pytest.raises(BindingError, match="was shown other messages") as error:
        parties.clients[B].masked(shown, parties.update(B))
    caught(error, BindingError, "share", A)


def test_members_shown_different_share_lists_find_out_before_signing():
    parties = Parties(4).play(until="masked")
    parties.shown[A] = to_broadcast("share", heads_in(parties.shown[A])[:3])
    masked = {name: parties.answer(name) for name in (A, B, C)}
    shown = to_broadcast("masked", [head_of(masked[name]) for name in (A, B, C)])
    for name, liar in ((A, B), (B, A)):
        with pytest.raises(BindingError, match="was shown other messages") as error:
            parties.clients[name].check(shown)
        caught(error, BindingError, "masked", liar)


def test_two_survivor_lists_yield_no_share_at_all():
    """The attack on Bonawitz without the consistency check: half of the members believe the victim is in the
    sum and would give its seed, the others believe it is lost and would give its key."""
    parties = Parties(9).play(until="check")
    real = heads_in(parties.server.broadcasts["masked"])
    with_victim, without = to_broadcast("masked", real), to_broadcast("masked", real[1:])
    group = {name: with_victim if i < 5 else without for i, name in enumerate(parties.names)}
    signed = {name: parties.clients[name].check(shown) for name, shown in group.items()}
    for believed in (with_victim, without):
        same = [head_of(signed[name]) for name in parties.names if group[name] == believed]
        everyone = [head_of(signed[name]) for name in parties.names]
        for name in (name for name in parties.names if group[name] == believed):
            with pytest.raises(RoundAborted, match="7 are needed"):
                parties.clients[name].unmask(to_broadcast("check", same))
            assert parties.clients[name].stage == "stopped"
            parties.clients[name]._state.stopped = ""
            with pytest.raises(BindingError, match="was shown other messages"):
                parties.clients[name].unmask(to_broadcast("check", everyone))


@pytest.mark.parametrize(("colluding", "kinds"), [(2, 0), (3, 0), (4, 1), (5, 2)])
def test_two_survivor_lists_need_more_colluders_than_n_minus_t(colluding, kinds):
    """Colluders sign both lists. To get both kinds of share takes 2t - N = 5 of them, more than N - t = 2."""
    parties = Parties(9).play(until="check")
    real = heads_in(parties.server.broadcasts["masked"])
    lists = (
        to_broadcast("masked", real),
        to_broadcast("masked", real[:-1]),
    )  # with and without the victim, the last
    honest = parties.names[colluding:]
    half = len(honest) // 2
    released = set()
    for shown, group in zip(lists, (honest[-half:], honest[:-half]), strict=True):
        seen = hashlib.sha256(shown).digest()
        signed = {name: parties.forge(name, "check", [], seen=seen) for name in parties.names[:colluding]}
        signed |= {name: parties.clients[name].check(shown) for name in group}
        together = to_broadcast("check", [head_of(signed[name]) for name in parties.names if name in signed])
        for name in group:
            with suppress(RoundAborted):
                released.add(_body(parties, parties.clients[name].unmask(together))[-1][1])
    assert len(released) == kinds


def test_a_server_cannot_ask_for_both_share_kinds():
    parties = Parties(4).play(until="unmask")
    alone = to_broadcast("masked", heads_in(parties.server.broadcasts["masked"])[1:])
    client = parties.clients[B]
    with pytest.raises(
        BindingError, match="unmask is due, not check"
    ):  # another list after signing the first
        client.check(alone)
    message = client.unmask(parties.shown[B])
    for again in (lambda: client.unmask(parties.shown[B]), lambda: client.check(alone)):
        with pytest.raises(BindingError, match="done is due"):
            again()
    parties.server.receive(message)
    kinds = {row[0]: row[1] for row in parties.server.heads["unmask"][B].body}
    assert kinds == {0: "seed", 1: "seed", 2: "seed", 3: "seed"}


@pytest.mark.parametrize("lost_at", ["masked", "share", "check"])
def test_nobody_ever_releases_both_kinds_or_a_kind_for_a_stranger(lost_at):
    parties = Parties(5).play(lost=[(lost_at, C)])
    kinds = {"masked": "key", "check": "seed", "share": None}[lost_at]
    for head in parties.server.heads["unmask"].values():
        rows = {parties.names[place]: kind for place, kind, _ in head.body}
        assert rows.pop(C, None) == kinds
        assert set(rows) == set(parties.names) - {C}
        assert set(rows.values()) == {"seed"}


def test_a_rolled_back_client_does_nothing_twice():
    parties = Parties(4).play(until="check")
    old = parties.clients[B].dump()
    real = heads_in(parties.server.broadcasts["masked"])
    parties.clients[B].check(parties.shown[B])
    kept = Released.load(parties.clients[B].released.dump())
    again = Client.restore(old, parties.identity[B], released=kept)
    with pytest.raises(RefusedError, match="did this before") as error:
        again.check(to_broadcast("masked", real[1:]))
    caught(error, RefusedError, "check", B)


def test_another_m0_for_one_member_is_caught_by_all():
    parties = Parties(4).play(until="masked")
    other = Task(b"\1" * 32, parties.encoding)
    sent = {A: parties.clients[A].masked(parties.shown[A], Update(other, parties.vectors[A]))}
    with pytest.raises(BindingError, match="another model M0") as error:  # an honest server that was misled
        parties.server.receive(sent[A])
    caught(error, BindingError, "masked", A)
    for name in (B, C, D):  # a server that crafted it shows it all the same
        sent[name] = parties.answer(name)
    shown = to_broadcast("masked", [head_of(sent[name]) for name in parties.names])
    for name, other_member in ((A, B), (B, A), (C, A), (D, A)):
        with pytest.raises(BindingError, match="another model M0") as error:
            parties.clients[name].check(shown)
        caught(error, BindingError, "check", other_member)
        with pytest.raises(RefusedError, match="another model M0"):
            parties.clients[name].unmask(shown)


def test_another_encoding_for_one_member_is_caught():
    parties = Parties(4).play(until="masked")
    other = Task(M0, replace(parties.encoding, bound=2.0))
    sent = {A: parties.clients[A].masked(parties.shown[A], Update(other, parties.vectors[A]))}
    with pytest.raises(BindingError, match="another encoding"):
        parties.server.receive(sent[A])
    for name in (B, C, D):
        sent[name] = parties.answer(name)
    with pytest.raises(BindingError, match="another encoding") as error:
        parties.clients[B].check(to_broadcast("masked", [head_of(sent[name]) for name in parties.names]))
    caught(error, BindingError, "check", A)


def test_a_public_weight_cannot_be_changed_by_its_member():
    parties = Parties(3, public=(1.0, 2.0, 3.0)).play(until="masked")
    with pytest.raises(BindingError, match="its weight is public and is 1, got 3") as error:
        parties.clients[A].masked(parties.shown[A], Update(parties.task, parties.vectors[A], 3.0))
    caught(error, BindingError, "masked", A)


def test_a_retry_before_any_share_was_released_is_fine_and_one_after_is_refused():
    first = Parties(4).play(until="check")
    second = first.retry()
    assert second.vectors[A].tolist() == first.vectors[A].tolist()
    second.play(until="unmask")
    released = second.clients[A].unmask(second.shown[A])
    assert released
    third = second.retry().play(until="masked")
    with pytest.raises(RefusedError, match="released a share in this round") as error:
        third.answer(A)
    caught(error, RefusedError, "masked", A)
    assert third.answer(B)  # who released nothing may try again


def test_an_older_attempt_cannot_be_unmasked_after_a_newer_one():
    first = Parties(4).play(until="unmask")
    second = first.retry().play()
    assert second.server.result is not None
    for name in first.names:
        with pytest.raises(RefusedError, match="released a share") as error:
            first.clients[name].unmask(first.shown[name])
        caught(error, RefusedError, "unmask", name)


def test_an_update_is_refused_again_under_any_round_weight_or_rounding_even_after_a_restart():
    first = Parties(4, weights=[1, 2, 3, 4]).play()
    kept = {name: Released.load(client.released.dump()) for name, client in first.clients.items()}
    later = Parties(4, round=2, weights=[4, 3, 2, 1], keys=first.keys, released=kept).play(until="masked")
    for delta in (later.vectors[A], later.vectors[A].astype(np.float64)):
        client = Client.restore(later.clients[A].dump(), first.identity[A], released=kept[A])
        with pytest.raises(RefusedError, match="released a share for this update") as error:
            client.masked(later.shown[A], Update(later.task, delta, 4, os.urandom(8)))
        caught(error, RefusedError, "masked", A)
    later.vectors[B] = later.vectors[B] * np.float32(0.5)
    assert later.answer(B)  # another update in another round is what rounds are for


# ------------------------------------------------------------------------------------- members that cheat


def tampered_shares(parties, name, change):
    """The share message of a dealer that changes what it deals to others."""
    client = parties.clients[name]
    message = client.share(parties.shown[name])
    parties.sent["share"][name] = message
    body = [list(row) for row in _body(parties, message)]
    change(client, body)
    seen = client._state.seen
    forged = parties.forge(name, "share", body, seen=seen)
    client._state.said = hashlib.sha256(head_of(forged)).digest()
    return forged


def _body(parties, message):
    from fedmerit.secagg.messages import open_message

    return open_message(message, parties.setting, 0)[0].body


def test_a_share_that_decrypts_to_garbage_names_the_dealer():
    parties = Parties(4).play(until="share")

    def garbage(client, body):
        body[1][1] = os.urandom(len(body[1][1]))

    parties.server.receive(tampered_shares(parties, A, garbage))
    for name in (B, C, D):
        parties.server.receive(parties.answer(name))
    parties.shown = parties.server.advance()
    with pytest.raises(ShareError, match="does not decrypt") as error:
        parties.answer(B)
    caught(error, ShareError, "share", A)
    assert parties.answer(C)  # the others were dealt good ones


def test_a_dealer_that_commits_to_other_shares_than_it_deals_is_named_by_the_holder():
    parties = Parties(4).play(until="share")

    def other(client, body):
        body[1][3] = os.urandom(32)

    parties.server.receive(tampered_shares(parties, A, other))
    for name in (B, C, D):
        parties.server.receive(parties.answer(name))
    parties.shown = parties.server.advance()
    with pytest.raises(ShareError, match="another share than it committed to") as error:
        parties.answer(B)
    caught(error, ShareError, "share", A)


def test_a_dealer_that_leaves_somebody_out_is_named():
    parties = Parties(4).play(until="share")
    message = tampered_shares(parties, A, lambda client, body: body.pop(1))
    with pytest.raises(ShareError, match="deals to others") as error:
        parties.server.receive(message)
    caught(error, ShareError, "share", A)
    shown = [head_of(message), *(head_of(parties.answer(name)) for name in (B, C, D))]
    with pytest.raises(ShareError, match="dealt no share to hospital-b") as error:
        parties.clients[B].masked(to_broadcast("share", shown), parties.update(B))
    caught(error, ShareError, "share", A)


@pytest.mark.parametrize("kind", ["seed", "key"])
def test_a_dealer_whose_shares_do_not_lie_on_one_polynomial_is_named_never_a_wrong_number(kind, monkeypatch):
    parties = Parties(4).play(until="share")
    secret = getattr(parties.clients[A]._state, "seed" if kind == "seed" else "mask")
    real = sharing.split

    def crooked(value, threshold, members):
        return (
            [os.urandom(32) for _ in range(members)] if value == secret else real(value, threshold, members)
        )

    monkeypatch.setattr(sharing, "split", crooked)
    lost = [("masked", A)] if kind == "key" else []
    with pytest.raises(ShareError, match="something else than it committed to") as error:
        parties.play(lost=lost)
    caught(error, ShareError, "unmask", A)
    assert parties.server.result is None
    assert parties.server.stage == "aborted"


@pytest.mark.parametrize("n", [4, 3])
def test_a_share_holder_that_lies_is_named_and_outvoted_or_the_round_aborts(n):
    parties = Parties(n).play(until="unmask")
    parties.clients[B]._state.shares[C][1] = os.urandom(32)
    with pytest.raises(ShareError, match="another share than hospital-c dealt it") as error:
        parties.server.receive(parties.answer(B))
    caught(error, ShareError, "unmask", B)
    for name in set(parties.names) - {B}:
        parties.server.receive(parties.answer(name))
    with pytest.raises(ShareError, match="another share"):
        parties.server.receive(
            parties.forge(B, "unmask", _lie(parties, C), seen=parties.clients[B]._state.seen)
        )
    assert parties.server.lied == [B]
    if n == 4:
        parties.server.advance()
        assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)
    else:
        with pytest.raises(RoundAborted, match="lied about a share: hospital-b"):
            parties.server.advance()


def _lie(parties, victim):
    shares = parties.clients[B]._state.shares
    return [[i, "seed", bytes(32) if n == victim else shares[n][1]] for i, n in enumerate(parties.names)]


def test_shares_of_the_wrong_kind_or_of_others_are_refused():
    parties = Parties(4).play(until="unmask")
    shares = parties.clients[B]._state.shares
    seen = hashlib.sha256(parties.shown[B]).digest()
    wrong = [[i, "key", shares[name][0]] for i, name in enumerate(parties.names)]
    few = [[i, "seed", shares[name][1]] for i, name in enumerate(parties.names[:3])]
    odd = [[i, "both", shares[name][1]] for i, name in enumerate(parties.names)]
    for body, says in ((wrong, "wrong kind"), (few, "others than the dealers"), (odd, "wrong kind")):
        with pytest.raises(ShareError, match=says) as error:
            parties.server.receive(parties.forge(B, "unmask", body, seen=seen))
        caught(error, ShareError, "unmask", B)


def test_masked_words_that_were_not_signed_are_refused():
    parties = Parties(3).play(until="masked")
    message = parties.answer(A)
    with pytest.raises(BindingError, match="not those it signed") as error:
        parties.server.receive(message[:-4] + b"\0\1\2\3")
    caught(error, BindingError, "masked", A)


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
def test_a_key_of_small_order_names_its_owner(point):
    parties = Parties(3)
    own = parties.clients[A]
    own.advertise()
    message = parties.forge(A, "advertise", [point, point, bytes(32), bytes(32)])
    parties.server.receive(message)
    for name in (B, C):
        parties.server.receive(parties.answer(name))
    shown = parties.server.advance()
    with pytest.raises(BindingError, match="agrees on nothing secret") as error:
        parties.clients[B].share(shown[B])
    caught(error, BindingError, "share", A)


def test_someone_in_the_sum_who_dealt_no_shares_is_noticed():
    parties = Parties(5).play(until="check", lost=[("share", "hospital-e")])
    seen = parties.clients[A]._state.seen
    body = [parties.task.digest, parties.task.m0_hash, bytes(32)]
    intruder = seal_head(parties, "hospital-e", body, seen)
    shown = to_broadcast("masked", [*heads_in(parties.shown[A]), intruder])
    with pytest.raises(BindingError, match="without having dealt shares") as error:
        parties.clients[A].check(shown)
    caught(error, BindingError, "check", "hospital-e")


def seal_head(parties, name, body, seen):
    return head_of(parties.forge(name, "masked", body, seen=seen))


def test_secrets_are_in_no_repr_and_no_error():
    parties = Parties(3).play(until="unmask")
    client = parties.clients[A]
    shown = [repr(client), repr(client._state), repr(client.opening()), repr(client.released)]
    shown += [repr(head) for heads in parties.server.heads.values() for head in heads.values()]
    client._state.shares[B][1] = b"SECRET" * 5 + b"!!"
    with pytest.raises(ShareError) as error:
        parties.server.receive(parties.answer(A))
    shown.append(str(error.value))
    text = " ".join(shown)
    for secret in (client._state.mask, client._state.seed, client._state.nonce, client._state.channel):
        assert repr(secret)[2:-1] not in text
        assert secret.hex() not in text
    assert "SECRET" not in text
