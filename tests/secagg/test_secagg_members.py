"""Members that cheat: named, and never a wrong number."""

from __future__ import annotations

import os

import pytest
from parties import A, B, C, D, Parties, caught, head_of, heads_in, secrets_of, seen_in, tampered_shares

from fedmerit.errors import (
    BindingError,
    RoundAborted,
    ShareError,
)
from fedmerit.secagg import masks
from fedmerit.secagg.messages import to_broadcast


def test_a_dealer_that_leaves_somebody_out_is_named():
    parties = Parties(4).play(until="share")
    message = tampered_shares(parties, A, lambda rows: rows.pop(1))
    with pytest.raises(ShareError, match="does not deal to exactly") as error:
        parties.server.receive(message)
    caught(error, ShareError, "share", A)
    shown = [head_of(message), *(head_of(parties.answer(name)) for name in (B, C, D))]
    parties.clients[B].masked(to_broadcast("share", shown), parties.update(B))
    assert parties.clients[B].complaints == (A,)  # even if the server shows it all the same


@pytest.mark.parametrize("kind", ["seed", "key"])
def test_a_dealer_whose_shares_do_not_lie_on_one_polynomial_is_named_never_a_wrong_number(kind, monkeypatch):
    parties = Parties(4).play(until="share")
    secret = getattr(parties.clients[A]._state, "seed" if kind == "seed" else "mask")
    real = masks.split_secret

    def crooked(value, threshold, members):
        return (
            [os.urandom(32) for _ in range(members)] if value == secret else real(value, threshold, members)
        )

    monkeypatch.setattr(masks, "split_secret", crooked)
    lost = [("masked", A)] if kind == "key" else []
    with pytest.raises(ShareError, match="a secret that it did not commit to") as error:
        parties.play(lost=lost)
    caught(error, ShareError, "unmask", A)
    (blame,) = parties.server.blames
    assert (blame.member, blame.by, blame.why) == (A, None, "secret")
    assert masks.judge(parties.setting, blame.evidence) == blame
    assert parties.server.result is None
    assert parties.server.stage == "aborted"


@pytest.mark.parametrize("n", [4, 3])
def test_a_share_holder_that_lies_is_named_and_outvoted_or_the_round_aborts(n):
    parties = Parties(n).play(until="unmask")
    parties.clients[B]._state.shares[C][1] = os.urandom(32)
    with pytest.raises(ShareError, match="a share that hospital-c did not deal it") as error:
        parties.server.receive(parties.answer(B))
    caught(error, ShareError, "unmask", B)
    for name in set(parties.names) - {B}:
        parties.server.receive(parties.answer(name))
    with pytest.raises(ShareError, match="a share that"):
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
    shares = parties.held[B]
    return [[i, "seed", bytes(32) if n == victim else shares[n][1]] for i, n in enumerate(parties.names)]


def test_shares_of_the_wrong_kind_or_of_others_are_refused():
    parties = Parties(4).play(until="unmask")
    shares = parties.clients[B]._state.shares
    seen = seen_in(parties.shown[B])
    wrong = [[i, "key", shares[name][0]] for i, name in enumerate(parties.names)]
    few = [[i, "seed", shares[name][1]] for i, name in enumerate(parties.names[:3])]
    odd = [[i, "both", shares[name][1]] for i, name in enumerate(parties.names)]
    for body, says in ((wrong, "wrong kind"), (few, "of exactly those who dealt"), (odd, "wrong kind")):
        with pytest.raises(ShareError, match=says) as error:
            parties.server.receive(parties.forge(B, "unmask", body, seen=seen))
        caught(error, ShareError, "unmask", B)


def test_masked_words_that_were_not_signed_are_refused():
    parties = Parties(3).play(until="masked")
    message = parties.answer(A)
    with pytest.raises(BindingError, match="do not match the hash it signed") as error:
        parties.server.receive(message[:-4] + b"\0\1\2\3")
    caught(error, BindingError, "masked", A)


def test_someone_in_the_sum_who_dealt_no_shares_is_noticed():
    parties = Parties(5).play(until="check", lost=[("share", "hospital-e")])
    seen = parties.clients[A]._state.seen
    body = [parties.task.digest, parties.task.m0_hash, bytes(32), [], 1, bytes(64)]
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
    for secret in secrets_of(parties, A):
        assert repr(secret)[2:-1] not in text
        assert secret.hex() not in text
    assert "SECRET" not in text
