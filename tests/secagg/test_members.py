"""Members that cheat: named, and never a wrong number. What shares and the keys they rebuild are good for."""

from __future__ import annotations

import os
from itertools import combinations

import pytest

from fedmerit.errors import BindingError, MessageError, RoundAborted, ShareError
from fedmerit.secagg import masks
from fedmerit.secagg.messages import SEALED_SHARES, load_state, to_broadcast
from parties import A, B, C, D, Parties, head_of, heads_in, secrets_of, seen_in, tampered_shares
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


def test_masked_words_that_were_not_signed_are_refused():
    parties = Parties(3).play(until="masked")
    message = parties.answer(A)
    with refused(BindingError, stage="masked", member=A):
        parties.server.receive(message[:-4] + b"\0\1\2\3")


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
