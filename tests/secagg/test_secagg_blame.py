"""Bad shares and false complaints: who broke the protocol is proved to be to blame, and nobody else.

A rival of a bad dealer stays in the sum. What everybody is shown proves who is to blame; evidence that is put
together from anything else proves nothing. A complaint opens one channel. Without enough good shares nothing
is released.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from parties import A, B, C, D, Parties, body_of, caught, head_of, heads_in, seen_in, tampered_shares

from fedmerit.errors import BindingError, ProtocolError, RefusedError, RoundAborted, ShareError
from fedmerit.secagg import STAGES, Client, Released, masks
from fedmerit.secagg.messages import open_head, open_message, to_broadcast

HOW = ("ciphertext", "key commitment", "seed commitment", "other shares")


def spoil(parties, dealer, victims, how):
    """The share message of a dealer that deals these holders bad shares."""

    def change(rows):
        for row in rows:
            holder = parties.names[row[0]]
            if holder not in victims:
                continue
            if how == "ciphertext":
                row[1] = os.urandom(len(row[1]))
            elif how == "other shares":  # they decrypt, and are not those that are committed to
                private = parties.clients[dealer]._channel_key(holder)
                public = parties.clients[dealer]._state.keys[holder][1]
                shared = masks.agree(private, public, stage="", peer="")
                row[1] = masks.seal_shares(shared, parties.setting.session, dealer, holder, os.urandom(64))
            else:
                row[2 if how == "key commitment" else 3] = os.urandom(32)

    return tampered_shares(parties, dealer, change)


def complaining(parties, name, rows):
    """The masked message of a member with these complaints in place of its own."""
    message = parties.answer(name)
    head, payload = open_message(message, parties.setting, len(message))
    seen = head.seen
    return parties.forge(name, "masked", [*head.body[:3], rows, *head.body[4:]], bytes(payload), seen=seen)


def key_of(parties, name, peer):
    """The private key of a member's channel with a peer."""
    return parties.clients[name]._channel_key(peer)


def go(parties, bad=(), how="ciphertext", false=(), lost=(), until=None):
    """Play with dealers of bad shares (dealer -> holders), false complainers (who -> about whom) and losses.

    Who is refused is not heard again, as the server treats it.
    """
    bad, false, gone = dict(bad), dict(false), set()
    for stage in STAGES[STAGES.index(parties.server.stage) :]:
        if stage == until:
            break
        gone |= {name for at, name in lost if at == stage}
        for name in parties.names:
            if name not in parties.shown or name in gone:
                continue
            if stage == "share" and name in bad:
                message = spoil(parties, name, bad[name], how)
            elif stage == "masked" and name in false:
                about = parties.names.index(false[name])
                message = complaining(parties, name, [[about, key_of(parties, name, false[name])]])
                parties.clients[name]._state.said = hashlib.sha256(head_of(message)).digest()
            else:
                message = parties.answer(name)
            parties.sent[stage][name] = message
            try:
                parties.server.receive(message, name)
            except ProtocolError:
                assert name in false
                gone.add(name)
        parties.shown = parties.server.advance()
    return parties


def blamed(parties):
    return {(one.member, one.by, one.why) for one in parties.server.blames}


def all_judged_anew(parties):
    """Everybody who has the evidence comes to the same verdict."""
    for one in parties.server.blames:
        assert masks.judge(parties.setting, one.evidence) == one
    return True


# --------------------------------------------------------------------------------- the rival stays in the sum


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("victims", [(B,), (B, C), (C, "hospital-g")])
def test_a_dealer_of_bad_shares_is_blamed_and_its_rivals_stay_in_the_sum(how, victims):
    parties = go(Parties(7), bad={A: victims}, how=how)  # t = 5
    assert parties.server.result.included == parties.names
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)
    assert parties.server.declined == []
    assert blamed(parties) == {(A, victims[0], "share")}
    assert all_judged_anew(parties)
    for name in parties.names:
        assert parties.clients[name].complaints == ((A,) if name in victims else ())
        assert parties.clients[name].stage == "done"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("spared", [0, 3])
def test_a_dealer_that_leaves_too_few_good_shares_is_blamed_before_anything_is_released(how, spared):
    names = Parties(7).names
    parties = Parties(7)
    with pytest.raises(RoundAborted, match="hold good shares of the secrets of hospital-a, 5 are needed"):
        go(parties, bad={A: names[1 + spared :]}, how=how)
    assert blamed(parties) == {(A, names[1 + spared], "share")}
    assert all_judged_anew(parties)
    assert parties.sent["check"] == {}
    shown = to_broadcast("masked", [head_of(parties.sent["masked"][name]) for name in names])
    for name in names:  # a server that asks all the same gets nothing
        with pytest.raises(RoundAborted, match="hold good shares of the secrets of hospital-a"):
            parties.clients[name].check(shown)
        nothing_released(parties, name)


def nothing_released(parties, name):
    """A member that released nothing in a round may try it again; no other may."""
    parties.clients[name].released.refuse_again(parties.setting, b"", stage="", member=name)


def test_good_shares_are_counted_again_before_they_are_released():
    """Two complain, two others leave after the masked inputs: of seven, three hold good shares, t = 5."""
    parties = go(Parties(7), bad={A: (B, C)}, until="unmask")
    assert len(parties.shown) == 7
    parties = Parties(7)
    with pytest.raises(RoundAborted, match="4 of the 6 members left hold good shares"):
        go(parties, bad={A: (B, C)}, lost=[("check", D)])
    assert parties.server.stage == "aborted"
    few = [head_of(parties.sent["check"][name]) for name in parties.names if name != D]
    for name in parties.names:
        if name != D:
            with pytest.raises(RoundAborted, match="4 of the 6 members left hold good shares"):
                parties.clients[name].unmask(to_broadcast("check", few))
            nothing_released(parties, name)


@pytest.mark.parametrize(("stage", "included"), [("masked", 1), ("check", 0), ("unmask", 0)])
def test_the_sum_comes_out_whatever_happens_to_the_dealer_later(stage, included):
    parties = go(Parties(7), bad={A: (B,)}, lost=[(stage, A)])
    assert parties.server.result.included == parties.names[included:]
    expected = parties.plain_mean(parties.names[included:])
    assert parties.server.result.mean == pytest.approx(expected, abs=1e-8)
    assert blamed(parties) == {(A, B, "share")}


def test_a_round_without_the_check_treats_complaints_alike():
    parties = Parties(7)
    unchecked = replace(parties.setting, checked=False)
    parties.setting = unchecked
    parties.clients = {name: Client(unchecked, name, parties.identity[name]) for name in parties.names}
    parties.server = type(parties.server)(unchecked, parties.task)
    for stage in unchecked.stages:
        for name in parties.names:
            spoiled = stage == "share" and name == A
            message = spoil(parties, A, (B,), "ciphertext") if spoiled else parties.answer(name)
            parties.server.receive(message, name)
        parties.shown = parties.server.advance()
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)
    assert blamed(parties) == {(A, B, "share")}


def test_two_who_deal_each_other_bad_shares_are_both_blamed():
    parties = go(Parties(7), bad={A: (B,), B: (A,)})
    assert blamed(parties) == {(A, B, "share"), (B, A, "share")}
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)


def test_a_complaint_survives_a_restart():
    """Each message is handled by another process."""
    parties = go(Parties(7), bad={A: (B,)}, until="masked")

    def restarted():
        for name, client in parties.clients.items():
            kept = Released.load(client.released.dump())
            parties.clients[name] = Client.restore(client.dump(), parties.identity[name], released=kept)

    for stage in ("check", "unmask", None):
        restarted()
        go(parties, until=stage)
    assert parties.clients[B].complaints == (A,)
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)


# ------------------------------------------------------------------------------------------ false complaints


def test_a_false_complaint_is_its_authors_blame_and_the_others_go_on():
    parties = go(Parties(7), false={B: A}, until="check")
    assert blamed(parties) == {(B, B, "complaint")}
    assert all_judged_anew(parties)
    assert set(parties.shown) == set(parties.names) - {B}
    go(parties)
    assert parties.server.result.included == tuple(name for name in parties.names if name != B)
    expected = parties.plain_mean(parties.server.result.included)
    assert parties.server.result.mean == pytest.approx(expected, abs=1e-8)


def test_who_complained_falsely_is_not_heard_again_in_the_round():
    parties = Parties(7).play(until="masked")
    good = parties.answer(B)
    rows = [[0, key_of(parties, B, A)]]
    head, payload = open_message(good, parties.setting, len(good))
    lie = parties.forge(B, "masked", [*head.body[:3], rows, *head.body[4:]], bytes(payload), seen=head.seen)
    with pytest.raises(ShareError, match="complains falsely about hospital-a") as error:
        parties.server.receive(lie)
    caught(error, ShareError, "masked", B)
    with pytest.raises(BindingError, match="has sent its message already, or has left"):
        parties.server.receive(good)


@pytest.mark.parametrize("whose", ["of another channel", "of another member", "of nobody", "as public key"])
def test_a_complaint_that_opens_another_key_is_false_even_if_the_share_is_bad(whose):
    parties = go(Parties(7), bad={A: (B,)}, until="masked")
    key = {
        "of another channel": key_of(parties, B, C),
        "of another member": key_of(parties, C, A),
        "of nobody": os.urandom(32),
        "as public key": parties.server.heads["advertise"][B].body[3][:32],
    }[whose]
    message = complaining(parties, B, [[0, key]])
    with pytest.raises(ShareError, match="complains falsely about hospital-a") as error:
        parties.server.receive(message)
    caught(error, ShareError, "masked", B)
    assert blamed(parties) == {(B, B, "complaint")}
    assert all_judged_anew(parties)


def test_a_complaint_about_somebody_who_dealt_nothing_is_refused_and_nobody_is_blamed():
    parties = go(Parties(7), lost=[("share", A)], until="masked")
    message = complaining(parties, B, [[0, key_of(parties, B, A)]])
    with pytest.raises(BindingError, match="complains about hospital-a, who dealt nothing") as error:
        parties.server.receive(message)
    caught(error, BindingError, "masked", B)
    assert parties.server.blames == []


def test_a_complaint_of_another_session_is_refused():
    """Neither its message, nor its opened key, nor the evidence counts in another attempt or round."""
    first = go(Parties(7), bad={A: (B,)}, until="check")
    (blame,) = first.server.blames
    opened = first.server.heads["masked"][B].body[3][0][1]
    for change in ({}, {"round": 2, "attempt": 0}):
        second = first.retry(**change)
        with pytest.raises(BindingError, match="expected a message of"):
            masks.judge(second.setting, blame.evidence)
        second.play(until="masked")
        with pytest.raises(BindingError, match="expected a message of"):
            second.server.receive(first.sent["masked"][B])
        with pytest.raises(ShareError, match="complains falsely"):
            second.server.receive(complaining(second, B, [[0, opened]]))
        assert blamed(second) == {(B, B, "complaint")}


# ----------------------------------------------------------------------------------------- dishonest servers


def test_a_server_that_shows_a_false_complaint_gets_no_signature():
    parties = Parties(7).play(until="masked")
    sent = {name: parties.answer(name) for name in parties.names if name != B}
    sent[B] = complaining(parties, B, [[0, key_of(parties, B, A)]])
    shown = to_broadcast("masked", [head_of(sent[name]) for name in parties.names])
    for name in (A, C, D):
        with pytest.raises(BindingError, match="in the sum with a false complaint about hospital-a") as error:
            parties.clients[name].check(shown)
        caught(error, BindingError, "check", B)
        nothing_released(parties, name)


def test_a_server_cannot_take_a_complaint_out_of_a_message():
    """It can only drop the message: then the victim signs nothing, and keeps that it complained."""
    parties = go(Parties(7), bad={A: (B,)}, until="check")
    heads = heads_in(parties.shown[B])
    fields = list(open_head(heads[1], parties.setting).body)
    quiet = head_of(parties.forge(B, "masked", [*fields[:3], [], *fields[4:]], seen=bytes(32), signer=C))
    for lie in ([heads[0], quiet, *heads[2:]], [heads[0], *heads[2:]]):
        parties.clients[B]._state.stopped = ""
        with pytest.raises(ProtocolError, match=r"not signed by|own message is missing"):
            parties.clients[B].check(to_broadcast("masked", lie))
    assert parties.clients[B].complaints == (A,)


def test_two_members_shown_different_complaints_find_out_before_any_share_is_released():
    """A dealer and the server try to have one half believe that nobody complained."""
    parties = go(Parties(7), bad={A: (B,)}, until="check")
    heads = heads_in(parties.shown[A])
    without = to_broadcast("masked", [heads[0], *heads[2:]])
    signed = {name: parties.clients[name].check(without) for name in parties.names[2:5]}
    signed |= {name: parties.answer(name) for name in (A, B, *parties.names[5:])}
    everybody = to_broadcast("check", [head_of(signed[name]) for name in parties.names])
    for name in parties.names:
        with pytest.raises(BindingError, match="was not shown the messages"):
            parties.clients[name].unmask(everybody)
        nothing_released(parties, name)


# ----------------------------------------------------------------------------------------- framing the honest


def mixtures(parties, blame, others):
    """The evidence of a blame with each of its parts exchanged for what somebody else may have at hand."""
    evidence = blame.evidence
    for at, key in product(range(len(evidence["heads"])), range(len(others["heads"]))):
        heads = list(evidence["heads"])
        heads[at] = others["heads"][key]
        yield {**evidence, "heads": heads}
    for part in ("advertised", "dealt"):
        for other in others[part]:
            yield {**evidence, part: other}
            for at, key in product(range(len(evidence["heads"])), range(len(others["heads"]))):
                heads = list(evidence["heads"])
                heads[at] = others["heads"][key]
                yield {**evidence, part: other, "heads": heads}


def digests(broadcast):
    return [masks.digest_of(head).hex() for head in heads_in(broadcast)]


def test_a_complainer_that_advertises_twice_frames_no_dealer():
    """With the server's help it shows the dealer one list of keys, and judges by another."""
    parties = Parties(7).play(until="share")
    twin = Client(parties.setting, B, parties.identity[B])
    second = head_of(twin.advertise())
    real = parties.server.broadcasts["advertise"]
    other = to_broadcast("advertise", [second if i == 1 else head for i, head in enumerate(heads_in(real))])
    parties.play(until="masked")
    rows = [[0, twin._channel_key(A)]]  # opens the key of the second message, which A never saw
    complaint = head_of(complaining(parties, B, rows))
    advertised, dealt = parties.server.heads["advertise"], parties.server.heads["share"]
    evidence = {
        "advertised": digests(other),
        "dealt": digests(parties.server.broadcasts["share"]),
        "heads": [second.hex(), *(one.raw.hex() for one in (advertised[A], dealt[A])), complaint.hex()],
    }
    with pytest.raises(BindingError, match="answers another list of stage advertise") as error:
        masks.judge(parties.setting, evidence)
    caught(error, BindingError, "share", A)
    with pytest.raises(BindingError, match="answers another list of stage advertise"):
        masks.judge(parties.setting, {**evidence, "advertised": digests(real)})
    found = masks.judge(
        parties.setting,
        {
            **evidence,
            "advertised": digests(real),
            "heads": [advertised[B].raw.hex(), *evidence["heads"][1:]],
        },
    )
    assert (found.member, found.why) == (B, "complaint")  # what is left proves who lied


def test_a_dealer_that_deals_twice_frames_no_complainer():
    """It deals a bad share, and shows the judges a good one."""
    parties = Parties(7).play(until="share")
    before = parties.clients[A].dump()
    good = head_of(parties.answer(A))
    twin = Client.restore(before, parties.identity[A], released=Released())
    parties.clients[A] = twin
    go(parties, bad={A: (B,)}, until="check")
    (blame,) = parties.server.blames
    heads = list(blame.evidence["heads"])
    heads[2] = good.hex()
    shown = [good, *heads_in(parties.server.broadcasts["share"])[1:]]
    for dealt in (blame.evidence["dealt"], digests(to_broadcast("share", shown))):
        with pytest.raises(BindingError, match="answers another list of stage share") as error:
            masks.judge(parties.setting, {**blame.evidence, "heads": heads, "dealt": dealt})
        caught(error, BindingError, "masked", B)


def test_a_dealer_that_was_asked_for_keys_twice_cannot_be_framed_with_the_older_ones():
    parties = Parties(7)
    older = head_of(parties.answer(A))
    parties.clients[A] = Client(parties.setting, A, parties.identity[A])
    parties.play(until="masked")
    message = complaining(parties, B, [[0, key_of(parties, B, A)]])
    advertised, dealt = parties.server.heads["advertise"], parties.server.heads["share"]
    real = parties.server.broadcasts["advertise"]
    for listed in (real, to_broadcast("advertise", [older, *heads_in(real)[1:]])):
        evidence = {
            "advertised": digests(listed),
            "dealt": digests(parties.server.broadcasts["share"]),
            "heads": [x.hex() for x in (advertised[B].raw, older, dealt[A].raw, head_of(message))],
        }
        with pytest.raises(BindingError, match="answers another list"):
            masks.judge(parties.setting, evidence)


def test_no_mixture_of_what_was_ever_signed_blames_anybody_else():
    """Heads of two attempts, two rounds, and of everybody, in every place of the evidence."""
    parties = go(Parties(5, threshold=3), bad={A: (B,)}, until="check")
    (blame,) = parties.server.blames
    again = parties.retry().play(until="check")
    heads = [one.raw.hex() for p in (parties, again) for s in STAGES for one in p.server.heads[s].values()]
    shown = [p.server.broadcasts[stage] for p in (parties, again) for stage in ("advertise", "share")]
    others = {"heads": heads, "advertised": [*map(digests, shown)], "dealt": [*map(digests, shown)]}
    verdicts = set()
    for evidence in mixtures(parties, blame, others):
        try:
            found = masks.judge(parties.setting, evidence)
        except ProtocolError:
            continue
        verdicts.add((found.member, found.by, found.why))
    assert verdicts == {(A, B, "share")}


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.pop("dealt"),
        lambda e: e.update(more=[]),
        lambda e: e.update(heads=e["heads"][:3]),
        lambda e: e.update(heads=e["heads"][::-1]),
        lambda e: e.update(heads=None),
        lambda e: e.update(heads=[one.upper() for one in e["heads"]]),
        lambda e: e.update(advertised=e["advertised"][1:]),
        lambda e: e.update(dealt=[*e["dealt"], "00" * 32]),
        lambda e: e.update(dealt="00"),
        lambda e: e.update(shares=[]),
    ],
)
def test_evidence_in_any_other_form_proves_nothing(change):
    parties = go(Parties(5, threshold=3), bad={A: (B,)}, until="check")
    evidence = dict(parties.server.blames[0].evidence)
    change(evidence)
    with pytest.raises(ProtocolError):
        masks.judge(parties.setting, evidence)


def test_no_shares_of_an_honest_dealer_prove_that_it_shared_out_something_else():
    parties = Parties(5).play(until="unmask")  # t = 4
    advertised, dealt = parties.server.heads["advertise"], parties.server.heads["share"]
    held = {i: parties.clients[name]._state.shares[A] for i, name in enumerate(parties.names)}
    evidence = {
        "advertised": digests(parties.server.broadcasts["advertise"]),
        "heads": [advertised[A].raw.hex(), dealt[A].raw.hex()],
    }
    for kind, chosen in product(("key", "seed"), combinations(held, 4)):
        shares = [[i, held[i][kind == "seed"].hex()] for i in chosen]
        with pytest.raises(ShareError, match="dealt shares of what it committed to"):
            masks.judge(parties.setting, {**evidence, "kind": kind, "shares": shares})
        other = [[shares[0][0], os.urandom(32).hex()], *shares[1:]]
        with pytest.raises(ShareError, match="not a share that it dealt"):
            masks.judge(parties.setting, {**evidence, "kind": kind, "shares": other})
        for bad in (
            shares[1:],
            shares[::-1],
            [[str(i), share] for i, share in shares],
            [*shares[:3], [99, shares[3][1]]],
        ):
            with pytest.raises(ProtocolError):
                masks.judge(parties.setting, {**evidence, "kind": kind, "shares": bad})


# ------------------------------------------------------------------------------------ what a complaint opens


def opened_rows(parties):
    """Every sealed row (dealer, holder) that the opened keys of all complaints decrypt, and both shares."""
    keys = [row[1] for head in parties.server.heads["masked"].values() for row in head.body[3]]
    public = [
        masks.channel_of(head, place)
        for head in parties.server.heads["advertise"].values()
        for place in range(parties.n)
    ]
    secrets = {masks.agree(key, other, stage="", peer="") for key in keys for other in public}
    found = {}
    for dealer, head in parties.server.heads["share"].items():
        for place, sealed, *_ in head.body[0]:
            for shared in secrets:
                holder = parties.names[place]
                try:
                    shares = masks.open_shares(shared, parties.setting.session, dealer, holder, sealed)
                except ShareError:
                    continue
                found[dealer, holder] = [shares[:32], shares[32:]]
    return found


def test_all_complaints_together_open_what_bad_dealers_knew_and_nothing_else():
    """Two of seven (as many as may collude) deal bad shares to as many as possible, and the server has every
    opened key: it can read what honest members dealt these two, which they could have told it."""
    bad = {A: (C, D), B: ("hospital-f", "hospital-g")}
    parties = go(Parties(7), bad=bad, how="other shares")
    pairs = {frozenset((dealer, victim)) for dealer, victims in bad.items() for victim in victims}
    found = opened_rows(parties)
    assert {frozenset(pair) for pair in found} == pairs
    assert len(found) == 2 * len(pairs)  # both directions
    for victim in (C, D, "hospital-f", "hospital-g"):
        known = {parties.names.index(h): shares for (d, h), shares in found.items() if d == victim}
        known |= {  # and what the two were dealt otherwise
            i: parties.held[liar][victim] for i, liar in enumerate((A, B)) if victim in parties.held[liar]
        }
        assert set(known) == {0, 1}  # of t = 5 shares
        own = parties.clients[victim]._state
        released = {
            parties.names.index(name): next(r[2] for r in head.body if parties.names[r[0]] == victim)
            for name, head in parties.server.heads["unmask"].items()
        }
        assert masks.combine_shares(released, 5) == own.seed  # a member in the sum: as without complaints
        for few in range(2, 3):
            assert masks.combine_shares({i: s[0] for i, s in known.items()}, few) != own.mask


def test_a_member_that_complains_about_all_who_are_bad_opens_no_key_of_another_attempt():
    parties = go(Parties(7), bad={A: (C,), B: (C,)}, until="check")
    opened = {row[1] for row in parties.server.heads["masked"][C].body[3]}
    assert len(opened) == 2
    again = parties.retry().play(until="masked")
    assert not opened & {key_of(again, C, name) for name in again.names}
    assert not opened & {key_of(parties, C, name) for name in parties.names[2:]}


# ------------------------------------------------------------------------------------------- nothing is lucky

NAMES = Parties(6).names


@st.composite
def stories(draw):
    """Who deals bad shares to whom and how, who complains falsely, who is lost where; six members, t = 5."""
    guilty = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    bad = {
        name: tuple(draw(st.lists(st.sampled_from([n for n in NAMES if n != name]), unique=True, max_size=3)))
        for name in guilty[: draw(st.integers(0, 3))]
    }
    false = {
        name: draw(st.sampled_from([n for n in NAMES if n != name]))
        for name in guilty
        if name not in bad and draw(st.booleans())
    }
    lost = draw(st.lists(st.tuples(st.sampled_from(STAGES), st.sampled_from(NAMES)), max_size=1))
    return bad, false, lost, draw(st.sampled_from(HOW))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=stories())
@example(story=({A: (B, "hospital-f"), C: ("hospital-f",)}, {"hospital-f": C}, [], "ciphertext"))
@example(story=({A: (B, "hospital-f"), B: ("hospital-f",)}, {"hospital-f": A}, [], "ciphertext"))
def test_the_sum_is_right_or_nothing_is_released_and_only_the_guilty_are_blamed(story):
    bad, false, lost, how = story
    parties = Parties(6, length=3)
    guilty = {*(name for name, victims in bad.items() if victims), *false}
    try:
        go(parties, bad, how, false, lost)
    except RoundAborted:
        if parties.sent["unmask"]:  # somebody left when asked for shares, or hid that it has none
            hidden = any(name in victims for victims in bad.values() for name in false)
            assert hidden or any(stage == "unmask" for stage, _ in lost)
        else:
            for name in parties.names:
                nothing_released(parties, name)
    else:
        included = parties.server.result.included
        assert set(parties.names) - set(included) <= {*false, *(name for _, name in lost)}
        assert parties.server.result.mean == pytest.approx(parties.plain_mean(included), abs=1e-8)
    assert {name for name, _, _ in blamed(parties)} <= guilty
    assert parties.server.declined == []
    assert all_judged_anew(parties)
    heard = set(parties.server.heads["masked"]) - set(false)  # a false complainer may keep a true one back
    dealt = set(parties.server.heads["share"])
    for name, victims in bad.items():
        if name in dealt and heard & set(victims) and parties.server.stage not in ("share", "masked"):
            assert name in {one.member for one in parties.server.blames}


# -------------------------------------------------------------------------------------- counters of a state


def counted(parties, name, counter, peers=None, released=None):
    """A member with a stored state."""
    client = Client(
        parties.setting, name, parties.identity[name], counter=counter, peers=peers, released=released
    )
    parties.clients[name] = client
    return client


def test_members_remember_the_counters_of_others():
    first = Parties(4)
    for i, name in enumerate(first.names):
        counted(first, name, 5 + i)
    first.play()
    assert {name: counter for name, (counter, _) in first.clients[A].tokens.items()} == {B: 6, C: 7, D: 8}
    second = first.retry(round=2, attempt=0)
    for name, client in first.clients.items():
        counted(second, name, 20, client.tokens, client.released)
        second.vectors[name] = second.vectors[name] * np.float32(0.5)
    second.play()
    told = {name: {row[0] for row in head.body[1]} for name, head in second.server.heads["share"].items()}
    assert told == {
        name: {*range(4)} - {i} for i, name in enumerate(second.names)
    }  # of what is known of each
    assert {counter for counter, _ in second.clients[A].tokens.values()} == {20}
    restored = Client.restore(second.clients[A].dump(), second.identity[A], released=Released())
    assert restored.tokens == second.clients[A].tokens


@pytest.mark.parametrize("counter", [1, 4, 5, 6, 99])
def test_a_member_with_an_older_state_is_told_by_the_others_and_stops(counter):
    """It does not remember that it made the later token, however far a server made it count up since."""
    first = Parties(4)
    old = Released.load(first.clients[B].released.dump())
    for name in first.names:
        counted(first, name, 5)
    first.play()
    second = first.retry(round=2, attempt=0)
    for name, client in first.clients.items():
        counted(second, name, 9, client.tokens, client.released)
    counted(second, B, counter, {}, old)
    second.play(until="masked")
    with pytest.raises(RefusedError, match="its state is an older copy") as error:
        second.answer(B)
    caught(error, RefusedError, "share", B)
    assert error.value.code == "stale-state"
    assert second.clients[B].stage == "stopped"
    told = [row for head in second.server.heads["share"].values() for row in head.body[1]]
    assert {(place, number) for place, number, _ in told if place == 1} == {(1, 5)}


def test_a_member_that_remembers_its_keys_and_not_what_it_masked_is_told_too():
    """Its state was copied after it advertised, and put back after the sum."""
    first = Parties(4).play(until="masked")
    old = Released.load(first.clients[B].released.dump())
    first.play()
    second = first.retry(round=2, attempt=0)
    for name, client in first.clients.items():
        counted(second, name, 9, client.tokens, old if name == B else client.released)
    second.play(until="masked")
    with pytest.raises(RefusedError, match="its state is an older copy") as error:
        second.answer(B)
    assert error.value.code == "stale-state"


def test_a_member_of_two_runs_at_once_is_not_taken_for_an_older_copy():
    """Its newer token is known from the other run; it remembers that it made it."""
    here = Parties(4)
    for name in here.names:
        counted(here, name, 5)
    for name in here.names:
        here.server.receive(here.answer(name))
    here.shown = here.server.advance()
    there = here.retry(round=7)
    for name in here.names:
        counted(there, name, 6, {}, here.clients[name].released)
    there.play(until="masked")
    here.clients[A]._state.tokens = {n: [*token] for n, token in there.clients[A].tokens.items()}
    here.play()
    assert len(here.server.heads["share"][A].body[1]) == 3  # A takes the others for stale, and says so
    assert here.server.result is not None


def test_a_forged_or_foreign_token_changes_nothing():
    parties = Parties(4).play(until="share")
    other = Parties(4).play(until="share")  # another roster
    mask, *_, signature = other.server.heads["advertise"][B].body
    lies = [[1, 9, os.urandom(96)], [1, 9, bytes(mask + signature)], [1, 0, bytes(mask + signature)]]
    real = parties.server.heads["advertise"][B].body
    lies.append([1, 7, bytes(real[0] + real[5])])  # its own token with another counter
    for name, lie in zip(parties.names, lies, strict=True):
        rows, _ = body_of(parties, parties.answer(name))
        message = parties.forge(name, "share", [rows, [lie]])
        parties.clients[name]._state.said = masks.digest_of(head_of(message))
        parties.server.receive(message)
    parties.shown = parties.server.advance()
    parties.play()
    assert parties.server.result is not None


def test_a_counter_that_is_not_proved_is_not_remembered():
    parties = Parties(4)
    for name in parties.names:
        message = parties.answer(name)
        if name == B:
            body = body_of(parties, message)
            message = parties.forge(B, "advertise", [*body[:4], 10**6, body[5]])
            parties.clients[B]._state.said = masks.digest_of(head_of(message))
        parties.server.receive(message)
    parties.shown = parties.server.advance()
    parties.play(until="check")
    assert set(parties.clients[A].tokens) == {C, D}
    parties.play()
    assert parties.clients[A].tokens[B][0] == 1  # which it proved when it masked
    assert seen_in(parties.server.broadcasts["advertise"]) == parties.server.heads["share"][A].seen
