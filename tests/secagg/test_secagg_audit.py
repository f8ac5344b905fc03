"""An opening and the public transcript give the masked words back, bit for bit, and no other opening does."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest
from parties import A, B, Parties, caught, head_of, heads_in, seen_in

from fedmerit.errors import BindingError, BoundError, ProtocolError, ShareError
from fedmerit.secagg import masks, nonce_opens, replay
from fedmerit.secagg.messages import digest_of, to_broadcast

LISTS = {"advertised": "advertise", "shared": "share", "masked": "masked", "checked": "check"}


def lists(parties):
    shown = parties.server.broadcasts
    return {past: shown[stage] for past, stage in LISTS.items()}


@pytest.mark.parametrize("kind", [{}, {"weights": [5, 6, 7, 8, 9]}, {"public": (0.5, 1.0, 2.0, 3.0, 1.5)}])
@pytest.mark.parametrize("lost", [[], [("share", "hospital-e")], [("masked", "hospital-b")]])
def test_the_masked_message_is_rebuilt_bit_for_bit(kind, lost):
    parties = Parties(5, **kind).play(lost=lost)
    for name in parties.server.result.included:
        opening = parties.clients[name].opening()
        words = replay(parties.setting, parties.task, opening, parties.vectors[name], **lists(parties))
        message = parties.sent["masked"][name]
        assert words.tobytes() == message[8 + len(head_of(message)) :]


def test_only_the_update_that_was_sent_can_be_opened():
    parties = Parties(4, weights=[5, 6, 7, 8]).play()
    opening, delta = parties.clients[A].opening(), parties.vectors[A]
    moved = delta.copy()
    moved[0] = np.nextafter(moved[0], np.float32(2))
    lies = [
        (opening, moved, BindingError, "did not mask what it opened"),
        (replace(opening, weight=4), delta, BindingError, "did not mask what it opened"),
        (replace(opening, rounding=b"other"), delta, BindingError, "did not mask what it opened"),
        (replace(opening, mask=os.urandom(32)), delta, ShareError, "a mask key that it did not advertise"),
        (
            replace(opening, seed=os.urandom(32)),
            delta,
            ShareError,
            "a self-mask seed that it did not commit to",
        ),
        (replace(opening, member="hospital-b"), delta, ShareError, "a mask key that it did not advertise"),
        (replace(opening, member="nobody"), delta, BindingError, "no masked input"),
        (opening, delta * 100, BoundError, "beyond the bound"),
        (opening, delta[1:], BindingError, "must have shape"),
        (replace(opening, weight=99), delta, BoundError, "secret weight"),
    ]
    for lie, vector, error, says in lies:
        with pytest.raises(error, match=says) as caught:
            replay(parties.setting, parties.task, lie, vector, **lists(parties))
        assert (caught.value.stage, caught.value.member) == ("audit", lie.member)


def test_an_audit_needs_the_transcript_of_the_same_attempt():
    parties = Parties(4).play()
    other = parties.retry(released={}).play()
    opening = parties.clients[A].opening()
    for change in (*({name} for name in LISTS), set(LISTS)):
        mixed = lists(parties) | {key: lists(other)[key] for key in change}
        with pytest.raises(ProtocolError):
            replay(parties.setting, parties.task, opening, parties.vectors[A], **mixed)


def test_a_public_weight_is_the_tasks_not_the_openings():
    """Half of the update at twice the weight gives the same words."""
    parties = Parties(4, public=(1.0, 2.0, 2.0, 2.0)).play()
    opening, delta = parties.clients[A].opening(), parties.vectors[A]
    for weight, vector, says in (
        (2.0, delta / 2, "its public weight is 1, got 2.0"),
        (2.0, delta, "its public weight is 1"),
        (None, delta / 2, "did not mask what it opened"),
    ):
        with pytest.raises(BindingError, match=says) as error:
            replay(parties.setting, parties.task, replace(opening, weight=weight), vector, **lists(parties))
        caught(error, BindingError, "audit", A)
    replay(parties.setting, parties.task, replace(opening, weight=None), delta, **lists(parties))


def second_input(parties, delta, dealers=None, keys=None):
    """A second masked head of A, on an update that was never summed, in a list of masked inputs."""
    opening, shown = parties.clients[A].opening(), parties.server.heads
    words = parties.encoding.encode(delta, seed=opening.rounding).words
    peers = {
        name: (keys or {}).get(name, shown["advertise"][name].body[0]) for name in dealers or parties.names
    }
    binding = parties.task.binding(parties.setting)
    own = masks.of_member(parties.setting, A, opening.mask, opening.seed, peers, binding)
    masks.add_masks(words, own)
    body = [parties.task.digest, parties.task.m0_hash, digest_of(masks.to_wire(words)), [], 1, bytes(64)]
    head = head_of(parties.forge(A, "masked", body, seen=shown["masked"][A].seen))
    return to_broadcast("masked", [head, *heads_in(parties.server.broadcasts["masked"])[1:]])


def signed_by(parties, masked, names):
    """What these members would have to sign for that list to be the one that was summed."""
    return to_broadcast(
        "check", [head_of(parties.forge(name, "check", [], seen=seen_in(masked))) for name in names]
    )


def test_an_update_that_was_never_summed_cannot_be_opened_even_with_the_servers_help():
    parties = Parties(7).play()  # t = 5
    opening, delta = parties.clients[A].opening(), parties.vectors[A] * np.float32(0.5)
    masked = second_input(parties, delta)
    few = signed_by(parties, masked, parties.names[:4])
    honest = heads_in(parties.server.broadcasts["check"])
    mixed = to_broadcast("check", [*heads_in(few), *honest[4:]])
    for checked, says, member in (
        (parties.server.broadcasts["check"], "a different list of masked inputs", A),
        (mixed, "a different list of masked inputs", parties.names[4]),
        (few, "4 members signed this list of masked inputs, 5 are needed", None),
    ):
        with pytest.raises(BindingError, match=says) as error:
            replay(
                *(parties.setting, parties.task, opening, delta),
                **lists(parties) | {"masked": masked, "checked": checked},
            )
        caught(error, BindingError, "audit", member)


def test_signatures_on_a_list_count_only_of_members_in_it():
    parties = Parties(4).play(lost=[("masked", "hospital-d")])
    shown = lists(parties)
    masked = shown["masked"]
    shown["checked"] = signed_by(parties, masked, (A, B, "hospital-d"))
    with pytest.raises(BindingError, match="a different list of masked inputs") as error:
        replay(parties.setting, parties.task, parties.clients[A].opening(), parties.vectors[A], **shown)
    caught(error, BindingError, "audit", "hospital-d")


def test_lists_that_do_not_follow_from_each_other_open_nothing():
    """t members signed this list of inputs, but the lists of shares or keys are not those they answered."""
    parties = Parties(4).play()
    opening, delta, shown = parties.clients[A].opening(), parties.vectors[A], lists(parties)
    fewer = to_broadcast("share", heads_in(shown["shared"])[:3])
    key = masks.public(os.urandom(32))
    body = [key, bytes(32), bytes(32), key * 4, 1, bytes(64)]
    swapped = head_of(parties.forge(B, "advertise", body, seen=bytes(32)))
    heads = heads_in(shown["advertised"])
    other = to_broadcast("advertise", [heads[0], swapped, *heads[2:]])
    for past, changed, masked in (
        ("shared", fewer, second_input(parties, delta, dealers=parties.names[:3])),
        ("advertised", other, second_input(parties, delta, keys={B: key})),
    ):
        lie = shown | {past: changed, "masked": masked, "checked": signed_by(parties, masked, parties.names)}
        with pytest.raises(BindingError, match="no masked input of this member for these shares") as error:
            replay(parties.setting, parties.task, opening, delta, **lie)
        caught(error, BindingError, "audit", A)


def test_nothing_can_be_opened_before_it_was_masked():
    parties = Parties(3).play(until="masked")
    with pytest.raises(BindingError, match="nothing to open"):
        parties.clients[A].opening()


def test_nonces_open_their_commitments_only():
    parties = Parties(3).play(until="share")
    shown = parties.server.broadcasts["advertise"]
    nonce = parties.clients[A].nonce
    assert nonce_opens(parties.setting, shown, A, nonce)
    assert not nonce_opens(parties.setting, shown, "hospital-b", nonce)
    assert not nonce_opens(parties.setting, shown, A, os.urandom(32))
    assert not nonce_opens(parties.setting, shown, "nobody", nonce)


def test_the_server_keeps_what_a_ledger_needs():
    parties = Parties(4).play(lost=[("masked", "hospital-d")])
    heads = parties.server.heads
    assert [sorted(heads[stage]) for stage in heads] == [[*parties.names]] * 2 + [[*parties.names[:3]]] * 3
    for name in parties.names[:3]:
        message = parties.sent["masked"][name]
        payload = message[8 + len(head_of(message)) :]
        assert heads["masked"][name].body[2] == hashlib.sha256(payload).digest()
