"""Members and servers that cheat: caught and named before anything is revealed, and never a wrong number."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.errors import (
    BindingError,
    MessageError,
    RefusedError,
    RoundAborted,
    ShareError,
    SignatureError,
)
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import SEALED_SHARES, to_broadcast
from fedmerit.secagg.plain import load_state
from fedmerit.secagg.setting import STAGES, Released, Task, Update
from parties import M0, A, B, C, D, Parties, head_of, heads_in, secrets_of, seen_in, tampered_shares
from refusals import refused

E = "hospital-e"
SMALL_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]

# ----------------------------------------------------------------------------------------- members that cheat


def test_a_dealer_that_leaves_somebody_out_is_named():
    parties = Parties(4).play(until="share")
    message = tampered_shares(parties, A, lambda rows: rows.pop(1))
    with refused(ShareError, stage="share", member=A):
        parties.server.receive(message)
    shown = [head_of(message), *(head_of(parties.answer(name)) for name in (B, C, D))]
    parties.clients[B].masked(to_broadcast("share", shown), parties.update(B))
    assert parties.clients[B].complaints == (A,)  # even if the server shows it all the same


@pytest.mark.parametrize("kind", ["seed", "key"])
def test_a_dealer_whose_shares_do_not_lie_on_one_polynomial_is_named_never_a_wrong_number(kind, monkeypatch):
    parties = Parties(4).play(until="share")
    secret = getattr(parties.clients[A]._state, "seed" if kind == "seed" else "mask")
    real = masks.split_secret

    def crooked(value, threshold, members):
        if value != secret:
            return real(value, threshold, members)
        return [os.urandom(32) for _ in range(members)]

    monkeypatch.setattr(masks, "split_secret", crooked)
    with refused(ShareError, stage="unmask", member=A):
        parties.play(lost=[("masked", A)] if kind == "key" else [])
    (blame,) = parties.server.blames
    assert (blame.member, blame.by, blame.why) == (A, None, "secret")
    assert masks.judge(parties.setting, blame.evidence) == blame
    assert parties.server.result is None
    assert parties.server.stage == "aborted"


@pytest.mark.parametrize("n", [4, 3])
def test_a_share_holder_that_lies_is_named_and_outvoted_or_the_round_aborts(n):
    parties = Parties(n).play(until="unmask")
    dealt = dict(parties.clients[B]._state.shares)  # it forgets them with its answer
    dealt[C][1] = os.urandom(32)
    with refused(ShareError, stage="unmask", member=B):
        parties.server.receive(parties.answer(B))
    parties.collect([name for name in parties.names if name != B])
    shares = {name: bytes(32) if name == C else share[1] for name, share in dealt.items()}
    rows = [[i, "seed", shares[name]] for i, name in enumerate(parties.names)]
    with refused(ShareError, stage="unmask", member=B):  # it lies again, and is listed once
        parties.server.receive(parties.forge(B, "unmask", [rows]))
    assert parties.server.lied == [B]
    if n == 4:
        parties.server.advance()
        assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)
    else:
        with pytest.raises(RoundAborted, match="lied about a share: hospital-b"):
            parties.server.advance()


def test_shares_of_the_wrong_kind_or_of_others_are_refused():
    parties = Parties(4).play(until="unmask")
    shares = parties.clients[B]._state.shares
    seen = seen_in(parties.shown[B])
    wrong = [[i, "key", shares[name][0]] for i, name in enumerate(parties.names)]
    few = [[i, "seed", shares[name][1]] for i, name in enumerate(parties.names[:3])]
    odd = [[i, "both", shares[name][1]] for i, name in enumerate(parties.names)]
    for rows, kind in ((wrong, ShareError), (few, ShareError), (odd, MessageError)):
        with refused(kind, stage="unmask", member=B):
            parties.server.receive(parties.forge(B, "unmask", [rows], seen=seen))


def test_someone_in_the_sum_who_dealt_no_shares_is_noticed():
    parties = Parties(5).play(until="check", lost=[("share", E)])
    seen = parties.clients[A]._state.seen
    body = [parties.task.digest, parties.task.m0_hash, bytes(32), [], 1, bytes(64)]
    intruder = head_of(parties.forge(E, "masked", body, seen=seen))
    shown = to_broadcast("masked", [*heads_in(parties.shown[A]), intruder])
    with refused(BindingError, stage="check", member=E):
        parties.clients[A].check(shown)


def test_shares_of_somebody_who_did_not_advertise_are_refused():
    parties = Parties(5).play(until="masked", lost=[("advertise", E)])
    rows = [[place, os.urandom(SEALED_SHARES), *[bytes(32)] * 3] for place in range(5)]
    seen = seen_in(parties.server.broadcasts["advertise"])
    stranger = head_of(parties.forge(E, "share", [rows, []], seen=seen))
    shown = to_broadcast("share", [*heads_in(parties.shown[A]), stranger])
    with refused(BindingError, stage="share", member=E):
        parties.clients[A].masked(shown, parties.update(A))
    assert parties.clients[A].stage == "stopped"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_key_of_small_order_names_its_owner(point, which):
    """It is found when keys are shown, be it the mask key or that of one channel, and by a server before."""
    parties = Parties(4)
    keys = [masks.public(os.urandom(32)) for _ in range(5)]
    keys[2 * which] = bytes.fromhex(point)  # the mask key, or that of the channel with B
    message = parties.forge(A, "advertise", [keys[0], bytes(32), b"".join(keys[1:]), 1, bytes(64)])
    with refused(BindingError, stage="advertise", member=A):
        parties.server.receive(message)
    others = [head_of(parties.answer(name)) for name in (B, C, D)]
    with refused(BindingError, stage="share", member=A):
        parties.clients[B].share(to_broadcast("advertise", [head_of(message), *others]))
    assert parties.clients[B].stage == "stopped"
    assert A in parties.server.waiting


# ------------------------------------------------------------------------------------------- what shares open


def test_fewer_than_t_holders_rebuild_nothing():
    parties = Parties(6).play(until="check")  # t = 5
    held = {i: parties.clients[name]._state.shares[A] for i, name in enumerate(parties.names)}
    dealer = parties.clients[A]._state
    for kind, secret in ((0, dealer.mask), (1, dealer.seed)):
        assert masks.combine_shares({i: shares[kind] for i, shares in held.items()}, 5) == secret
        for few in range(2, 5):
            for chosen in combinations(held, few):
                assert masks.combine_shares({i: held[i][kind] for i in chosen}, few) != secret
                with pytest.raises(ShareError):
                    masks.combine_shares({i: held[i][kind] for i in chosen}, 5)


def test_what_t_members_keep_of_a_round_rebuilds_nobody_elses_secret():
    """Clients are kept until a settlement is over: copies of t of them must not open what was masked then."""
    parties = Parties(5).play()
    states = [load_state(parties.clients[name].dump())[2] for name in parties.names[1:]]
    assert not [share for state in states for shares in state.shares.values() for share in shares]
    assert not any(state.channel for state in states)  # else the archived lists hold what was dealt to them
    assert parties.clients[B].complaints == ()
    assert parties.clients[B].masked_again(parties.vectors[B]) == parties.payload(B)


def test_the_key_that_is_shared_out_opens_no_channel():
    """A lost member's mask key is rebuilt by the server: no share must be encrypted under it."""
    parties = Parties(5).play(lost=[("masked", C)])
    rebuilt = parties.server._rebuild(C, "key")
    for place, name in enumerate(parties.names):
        advertised = parties.server.heads["advertise"][name]
        keys = [advertised.body.mask, *(masks.channel_of(advertised, at) for at in range(5))]
        assert len(set(keys)) == 6
        for dealer, head in parties.server.heads["share"].items():
            sealed = next(row.sealed for row in head.body.rows if row.place == place)
            for key in keys:
                shared = masks.agree(rebuilt, key, stage="", peer="")
                with pytest.raises(ShareError):
                    masks.open_shares(shared, parties.setting.session, dealer, name, sealed)


def test_secrets_are_in_no_repr_and_no_error():
    parties = Parties(3).play(until="unmask")
    client = parties.clients[A]
    texts = [repr(client), repr(client._state), repr(client.released)]
    texts += [repr(head) for heads in parties.server.heads.values() for head in heads.values()]
    client._state.shares[B][1] = b"SECRET" * 5 + b"!!"
    with pytest.raises(ShareError) as error:
        parties.server.receive(parties.answer(A))
    text = " ".join([*texts, str(error.value)])
    for secret in secrets_of(parties, A):
        assert repr(secret)[2:-1] not in text
        assert secret.hex() not in text
    assert "SECRET" not in text


# ------------------------------------------------------------------------------------- a server that cheats


def test_a_man_in_the_middle_cannot_put_his_keys_in_place_of_a_members():
    parties = Parties(4).play(until="share")
    mallory = Ed25519PrivateKey.generate()
    evil = Parties(4, keys=[mallory, *parties.keys[1:]])  # a roster with his key under the victim's name
    own = evil.forge(A, "advertise", [os.urandom(32)] * 4)
    # what he signs with his own key, and the victim's signed head with his keys written over the victim's
    real = heads_in(parties.shown[B])
    body = parties.server.heads["advertise"][A].body
    swapped = real[0].replace(body.seed, os.urandom(32))
    resigned = head_of(parties.forge(A, "advertise", [os.urandom(32)] * 4, signer=B))
    for forged in (head_of(own), swapped, resigned):
        parties.clients[B]._state.stopped = ""
        with pytest.raises((SignatureError, BindingError)) as error:
            parties.clients[B].share(to_broadcast("advertise", [forged, *real[1:]]))
        assert (error.value.stage, error.value.member) == ("advertise", A)
        assert parties.clients[B].stage == "stopped"
        with refused(RefusedError, stage="share", member=B):
            parties.clients[B].share(parties.shown[B])


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_list_that_is_reordered_doubled_shortened_or_of_another_stage_is_refused(stage):
    parties = Parties(4).play(until=STAGES[STAGES.index(stage) + 1])
    real = heads_in(parties.shown[A])
    other = "check" if stage != "check" else "masked"
    first = heads_in(parties.server.broadcasts["advertise"])
    declined = head_of(parties.clients[B].decline())  # it was shown what A was shown, and signed nothing else
    bad = [  # the list as one of this stage, what is wrong with it, and whose head shows it
        (stage, [real[0], real[2], real[1], real[3]], BindingError, B),
        (stage, [real[0], real[0], *real[1:3]], BindingError, A),
        (stage, [*real, real[0]], BindingError, A),
        (stage, real[:2], RoundAborted, None),
        (stage, real[1:], BindingError, A),
        (other, real, BindingError, None),
        (stage, [real[0], declined, *real[2:]], BindingError, B),
    ]
    bad += [(stage, [real[0], first[1], *real[2:]], BindingError, B)] if stage != "advertise" else []
    for listed_as, heads, error, member in bad:
        parties.clients[A]._state.stopped = ""
        with refused(error, stage=stage, member=member):
            parties.answer(A, to_broadcast(listed_as, heads))


def test_members_shown_different_key_lists_find_out_before_masking():
    parties = Parties(4).play(until="share")
    real = heads_in(parties.shown[A])
    parties.shown[A] = to_broadcast("advertise", real[:3])
    shared = {name: parties.answer(name) for name in parties.names[:3]}
    with refused(BindingError, stage="share", member=A):  # an honest server notices at once
        parties.server.receive(shared[A])
    shown = to_broadcast("share", [head_of(shared[name]) for name in (A, B, C)])
    with refused(BindingError, stage="share", member=A):
        parties.clients[B].masked(shown, parties.update(B))


def test_members_shown_different_share_lists_find_out_before_signing():
    parties = Parties(4).play(until="masked")
    parties.shown[A] = to_broadcast("share", heads_in(parties.shown[A])[:3])
    masked = {name: parties.answer(name) for name in (A, B, C)}
    shown = to_broadcast("masked", [head_of(masked[name]) for name in (A, B, C)])
    for name, liar in ((A, B), (B, A)):
        with refused(BindingError, stage="masked", member=liar):
            parties.clients[name].check(shown)


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
            with refused(RoundAborted, stage="check"):
                parties.clients[name].unmask(to_broadcast("check", same))
            assert parties.clients[name].stage == "stopped"
            parties.clients[name]._state.stopped = ""
            with refused(BindingError, stage="check"):
                parties.clients[name].unmask(to_broadcast("check", everyone))


def test_a_server_cannot_ask_for_both_share_kinds():
    parties = Parties(4).play(until="unmask")
    alone = to_broadcast("masked", heads_in(parties.server.broadcasts["masked"])[1:])
    client = parties.clients[B]
    with refused(BindingError, stage="check", member=B):  # another list after signing the first
        client.check(alone)
    message = client.unmask(parties.shown[B])
    with refused(BindingError, stage="unmask", member=B):
        client.unmask(parties.shown[B])
    with refused(BindingError, stage="check", member=B):
        client.check(alone)
    parties.server.receive(message)
    kinds = {row.place: row.kind for row in parties.server.heads["unmask"][B].body.rows}
    assert kinds == {0: "seed", 1: "seed", 2: "seed", 3: "seed"}


@pytest.mark.parametrize("lost_at", ["masked", "share", "check"])
def test_nobody_ever_releases_both_kinds_or_a_kind_for_a_stranger(lost_at):
    parties = Parties(5).play(lost=[(lost_at, C)])
    kinds = {"masked": "key", "check": "seed", "share": None}[lost_at]
    for head in parties.server.heads["unmask"].values():
        rows = {parties.names[row.place]: row.kind for row in head.body.rows}
        assert rows.pop(C, None) == kinds
        assert set(rows) == set(parties.names) - {C}
        assert set(rows.values()) == {"seed"}


@pytest.mark.parametrize("stage", ["masked", "check", "unmask"])
def test_a_rolled_back_client_does_nothing_twice(stage):
    parties = Parties(4).play(until=stage)
    old = parties.clients[B].dump()
    parties.answer(B)
    kept = Released.load(parties.clients[B].released.dump())
    again = Client.restore(old, parties.identity[B], released=kept)
    shown, parties.clients[B] = parties.shown[B], again
    if stage == "check":  # another list of survivors
        shown = to_broadcast("masked", heads_in(shown)[1:])
    parties.vectors[B] = parties.vectors[B] * np.float32(0.5)
    with refused(RefusedError, stage=stage, member=B):
        parties.answer(B, shown)


def test_an_older_message_of_ones_own_is_noticed():
    parties = Parties(4)
    old = parties.answer(B)
    parties.clients[B] = Client(parties.setting, B, parties.identity[B])  # restarted without its state
    parties.clients[B].advertise()
    for message in (old, *(parties.answer(name) for name in (A, C, D))):
        parties.server.receive(message)
    with refused(BindingError, stage="advertise", member=B):
        parties.clients[B].share(parties.server.advance()[B])


def test_signatures_of_members_that_are_not_in_the_sum_do_not_count():
    parties = Parties(9)  # t = 7
    outside = parties.names[7:]
    parties.play(until="unmask", lost=[("masked", name) for name in outside])
    seen = seen_in(parties.server.broadcasts["masked"])
    signed = {name: head_of(parties.sent["check"][name]) for name in parties.names[:5]}
    signed |= {name: head_of(parties.forge(name, "check", [], seen=seen)) for name in outside}
    with refused(BindingError, stage="check", member=outside[0]):
        parties.clients[A].unmask(to_broadcast("check", list(signed.values())))


@pytest.mark.parametrize("change", [{"m0_hash": b"\1" * 32}, {"bound": 2.0}, {"word_bytes": 4}], ids=str)
def test_another_m0_or_encoding_for_one_member_is_caught_by_all(change):
    parties = Parties(4, word_bytes=8).play(until="masked")
    encoding = parties.encoding if "m0_hash" in change else replace(parties.encoding, **change)
    other = Task(change.get("m0_hash", M0), encoding)
    sent = {A: parties.clients[A].masked(parties.shown[A], Update(other, parties.vectors[A]))}
    with refused(BindingError, stage="masked", member=A):
        parties.server.receive(sent[A])
    for name in (B, C, D):  # a server that crafted it shows it all the same
        sent[name] = parties.answer(name)
    shown = to_broadcast("masked", [head_of(sent[name]) for name in parties.names])
    for name, other_member in ((A, B), (B, A), (C, A), (D, A)):
        with refused(BindingError, stage="check", member=other_member):
            parties.clients[name].check(shown)
        with refused(RefusedError, stage="unmask", member=name):
            parties.clients[name].unmask(shown)


def test_a_public_weight_cannot_be_changed_by_its_member():
    parties = Parties(3, public=(1.0, 2.0, 3.0)).play(until="masked")
    with refused(BindingError, stage="masked", member=A):
        parties.clients[A].masked(parties.shown[A], Update(parties.task, parties.vectors[A], 3.0))


def test_a_retry_before_any_share_was_released_is_fine_and_one_after_is_refused():
    first = Parties(4).play(until="check")
    second = first.retry()
    assert second.vectors[A].tolist() == first.vectors[A].tolist()
    second.play(until="unmask")
    released = second.clients[A].unmask(second.shown[A])
    assert released
    third = second.retry().play(until="masked")
    with refused(RefusedError, stage="masked", member=A):
        third.answer(A)
    assert third.answer(B)  # who released nothing may try again


def test_an_older_attempt_cannot_be_unmasked_after_a_newer_one():
    first = Parties(4).play(until="unmask")
    second = first.retry().play()
    assert second.server.result is not None
    for name in first.names:
        with refused(RefusedError, stage="unmask", member=name):
            first.clients[name].unmask(first.shown[name])


def test_an_update_is_refused_again_under_any_round_weight_or_rounding_even_after_a_restart():
    first = Parties(4, weights=[1, 2, 3, 4]).play()
    kept = {name: Released.load(client.released.dump()) for name, client in first.clients.items()}
    later = Parties(4, round=2, weights=[4, 3, 2, 1], keys=first.keys, released=kept).play(until="masked")
    for delta in (later.vectors[A], later.vectors[A].astype(np.float64)):
        client = Client.restore(later.clients[A].dump(), first.identity[A], released=kept[A])
        with refused(RefusedError, stage="masked", member=A):
            client.masked(later.shown[A], Update(later.task, delta, 4, os.urandom(8)))
    later.vectors[B] = later.vectors[B] * np.float32(0.5)
    assert later.answer(B)  # another update in another round is what rounds are for
