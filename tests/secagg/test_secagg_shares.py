"""What shares and the keys they rebuild are good for, and for whom."""

from __future__ import annotations

import os
from itertools import combinations

import numpy as np
import pytest
from parties import A, B, C, D, Parties, caught, head_of, heads_in, seen_in

from fedmerit.errors import BindingError, ShareError
from fedmerit.secagg import masks
from fedmerit.secagg.messages import SEALED_SHARES, open_message, to_broadcast
from fedmerit.secagg.state import load_state

E = "hospital-e"
SMALL_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


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
    kept = [load_state(parties.clients[name].dump())[2] for name in parties.names[1:]]
    assert not [share for state in kept for shares in state.shares.values() for share in shares]
    assert not any(state.channel for state in kept)  # else the archived lists hold what was dealt to them
    assert parties.clients[B].complaints == ()
    assert parties.clients[B].masked_again(parties.vectors[B]) == open_payload(parties, B)


def open_payload(parties, name):
    return open_message(parties.sent["masked"][name], parties.setting, 10**6)[1]


def test_the_key_that_is_shared_out_opens_no_channel():
    """A lost member's mask key is rebuilt by the server: no share must be encrypted under it."""
    parties = Parties(5).play(lost=[("masked", C)])
    rebuilt = parties.server._rebuild(C, "key")
    for place, name in enumerate(parties.names):
        advertised = parties.server.heads["advertise"][name]
        keys = [advertised.body[0], *(masks.channel_of(advertised, at) for at in range(5))]
        assert len(set(keys)) == 6
        for dealer, head in parties.server.heads["share"].items():
            sealed = next(row[1] for row in head.body[0] if row[0] == place)
            for key in keys:
                shared = masks.agree(rebuilt, key, stage="", peer="")
                with pytest.raises(ShareError):
                    masks.open_shares(shared, parties.setting.session, dealer, name, sealed)


def test_shares_of_somebody_who_did_not_advertise_are_refused():
    parties = Parties(5).play(until="masked", lost=[("advertise", E)])
    rows = [[place, os.urandom(SEALED_SHARES), *[bytes(32)] * 3] for place in range(5)]
    seen = seen_in(parties.server.broadcasts["advertise"])
    stranger = head_of(parties.forge(E, "share", [rows, []], seen=seen))
    shown = to_broadcast("share", [*heads_in(parties.shown[A]), stranger])
    with pytest.raises(BindingError, match="deals without having advertised keys") as error:
        parties.clients[A].masked(shown, parties.update(A))
    caught(error, BindingError, "share", E)
    assert parties.clients[A].stage == "stopped"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_key_of_small_order_names_its_owner(point, which):
    """It is found when keys are shown, be it the mask key or that of one channel, and by a server before."""
    parties = Parties(4)
    keys = [masks.public(os.urandom(32)) for _ in range(5)]
    keys[2 * which] = bytes.fromhex(point)  # the mask key, or that of the channel with B
    bad = [keys[0], bytes(32), bytes(32), b"".join(keys[1:]), 1, bytes(64)]
    message = parties.forge(A, "advertise", bad)
    with pytest.raises(BindingError, match="a secret which everybody knows") as error:
        parties.server.receive(message)
    caught(error, BindingError, "advertise", A)
    others = [head_of(parties.answer(name)) for name in (B, C, D)]
    with pytest.raises(BindingError, match="a secret which everybody knows") as error:
        parties.clients[B].share(to_broadcast("advertise", [head_of(message), *others]))
    caught(error, BindingError, "share", A)
    assert np.all([parties.clients[B].stage == "stopped", A in parties.server.waiting])
