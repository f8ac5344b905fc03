"""Bad shares and false complaints: who broke the protocol is proved to be to blame, and nobody else.

A rival of a bad dealer stays in the sum. What everybody is shown proves who is to blame; evidence that is put
together from anything else proves nothing. A complaint opens one channel. Without enough good shares nothing
is released.
"""

from __future__ import annotations

import base64
import hashlib
import os
from contextlib import suppress
from functools import partial
from itertools import combinations, product

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, MessageError, ProtocolError, RefusedError, RoundAborted, ShareError
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import open_head, open_message, to_broadcast
from fedmerit.secagg.setting import STAGES, Released
from parties import A, B, C, D, Parties, body_of, head_of, heads_in, plain, seen_in, tampered_shares
from refusals import refused

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


def complaining(parties, name, rows, message=None):
    """The masked message of a member with these complaints in place of its own."""
    message = message or parties.honest(name)
    head, payload = open_message(message, parties.setting, len(message))
    fields, seen = plain(head.body), head.seen
    return parties.forge(name, "masked", [*fields[:3], rows, *fields[4:]], bytes(payload), seen=seen)


def key_of(parties, name, peer):
    """The private key of a member's channel with a peer."""
    return parties.clients[name]._channel_key(peer)


def go(parties, bad=(), how="ciphertext", false=(), lost=(), until=None):
    """Play with dealers of bad shares (dealer -> holders), false complainers (who -> whom) and losses."""

    def complain(parties, name, about):
        message = complaining(parties, name, [[parties.names.index(about), key_of(parties, name, about)]])
        parties.clients[name]._state.said = hashlib.sha256(head_of(message)).digest()
        return message

    for dealer, victims in dict(bad).items():
        parties.lies["share", dealer] = partial(spoil, victims=victims, how=how)
    for name, about in dict(false).items():
        parties.lies["masked", name] = partial(complain, about=about)
    return parties.play(until, lost)


def blamed(parties):
    return {(one.member, one.by, one.why) for one in parties.server.blames}


def all_judged_anew(parties):
    """Everybody who has the evidence comes to the same verdict."""
    for one in parties.server.blames:
        assert masks.judge(parties.setting, one.evidence) == one
    return True


# --------------------------------------------------------------------------------- the rival stays in the sum


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bad", [{A: (B,)}, {A: (B, C)}, {A: (C, "hospital-g")}, {A: (B,), B: (A,)}], ids=str)
def test_a_dealer_of_bad_shares_is_blamed_and_its_rivals_stay_in_the_sum(how, bad):
    parties = go(Parties(7), bad=bad, how=how)  # t = 5
    assert parties.server.result.included == parties.names
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)
    assert parties.server.declined == []
    assert blamed(parties) == {(dealer, victims[0], "share") for dealer, victims in bad.items()}
    assert all_judged_anew(parties)
    for name, client in parties.clients.items():
        assert client.complaints == tuple(dealer for dealer, victims in bad.items() if name in victims)
        assert client.stage == "done"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("spared", [0, 3])
def test_a_dealer_that_leaves_too_few_good_shares_is_blamed_before_anything_is_released(how, spared):
    names = Parties(7).names
    parties = Parties(7)
    with refused(RoundAborted, stage="masked"):
        go(parties, bad={A: names[1 + spared :]}, how=how)
    assert blamed(parties) == {(A, names[1 + spared], "share")}
    assert all_judged_anew(parties)
    assert parties.sent["check"] == {}
    shown = to_broadcast("masked", [head_of(parties.sent["masked"][name]) for name in names])
    for name in names:  # a server that asks all the same gets nothing
        with refused(RoundAborted, stage="check"):
            parties.clients[name].check(shown)
        nothing_released(parties, name)


def nothing_released(parties, name):
    """A member that released nothing in a round may try it again; no other may."""
    parties.clients[name].released.refuse_again(parties.setting, b"")


def test_good_shares_are_counted_again_before_they_are_released():
    """Two complain, two others leave after the masked inputs: of seven, three hold good shares, t = 5."""
    parties = go(Parties(7), bad={A: (B, C)}, until="unmask")
    assert len(parties.shown) == 7
    parties = Parties(7)
    with refused(RoundAborted, stage="check"):
        go(parties, bad={A: (B, C)}, lost=[("check", D)])
    assert parties.server.stage == "aborted"
    left = [name for name in parties.names if name != D]
    for name in left:
        with pytest.raises(RoundAborted, match="4 of the 6 members left hold good shares"):
            parties.clients[name].unmask(
                to_broadcast("check", [head_of(parties.sent["check"][name]) for name in left])
            )
        nothing_released(parties, name)


@pytest.mark.parametrize(("stage", "included"), [("masked", 1), ("check", 0), ("unmask", 0)])
def test_the_sum_comes_out_whatever_happens_to_the_dealer_later(stage, included):
    parties = go(Parties(7), bad={A: (B,)}, lost=[(stage, A)])
    assert parties.server.result.included == parties.names[included:]
    expected = parties.plain_mean(parties.names[included:])
    assert parties.server.result.mean == pytest.approx(expected, abs=1e-8)
    assert blamed(parties) == {(A, B, "share")}


# ------------------------------------------------------------------------------------------ false complaints


def test_a_false_complaint_is_its_authors_blame_and_the_others_go_on():
    parties = Parties(7).play(until="masked")
    others = tuple(name for name in parties.names if name != B)
    good = parties.answer(B)
    with refused(ShareError, stage="masked", member=B):
        parties.server.receive(complaining(parties, B, [[0, key_of(parties, B, A)]], good))
    with refused(BindingError, stage="masked", member=B):  # it is not heard again in the round
        parties.server.receive(good)
    assert blamed(parties) == {(B, B, "complaint")}
    assert all_judged_anew(parties)
    parties.play(lost=[("masked", B)])
    assert parties.server.result.included == others
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(others), abs=1e-8)


@pytest.mark.parametrize("whose", ["of another channel", "of another member", "of nobody", "as public key"])
def test_a_complaint_that_opens_another_key_is_false_even_if_the_share_is_bad(whose):
    parties = go(Parties(7), bad={A: (B,)}, until="masked")
    key = {
        "of another channel": key_of(parties, B, C),
        "of another member": key_of(parties, C, A),
        "of nobody": os.urandom(32),
        "as public key": parties.server.heads["advertise"][B].body.channels[:32],
    }[whose]
    message = complaining(parties, B, [[0, key]])
    with refused(ShareError, stage="masked", member=B):
        parties.server.receive(message)
    assert blamed(parties) == {(B, B, "complaint")}
    assert all_judged_anew(parties)


def test_a_complaint_about_somebody_who_dealt_nothing_is_refused_and_nobody_is_blamed():
    parties = go(Parties(7), lost=[("share", A)], until="masked")
    message = complaining(parties, B, [[0, key_of(parties, B, A)]])
    with refused(BindingError, stage="masked", member=B):
        parties.server.receive(message)
    assert parties.server.blames == []


def test_a_complaint_of_another_session_is_refused():
    """Neither its message, nor its opened key, nor the evidence counts in another attempt or round."""
    first = go(Parties(7), bad={A: (B,)}, until="check")
    (blame,) = first.server.blames
    opened = first.server.heads["masked"][B].body.complaints[0].key
    for change in ({}, {"round": 2, "attempt": 0}):
        second = first.retry(**change)
        with refused(BindingError, stage="advertise"):
            masks.judge(second.setting, blame.evidence)
        second.play(until="masked")
        with refused(BindingError, stage="masked", member=B):
            second.server.receive(first.sent["masked"][B])
        with refused(ShareError, stage="masked", member=B):
            second.server.receive(complaining(second, B, [[0, opened]]))
        assert blamed(second) == {(B, B, "complaint")}


# ----------------------------------------------------------------------------------------- dishonest servers


def test_a_server_that_shows_a_false_complaint_gets_no_signature():
    parties = Parties(7).play(until="masked")
    sent = {name: parties.answer(name) for name in parties.names if name != B}
    sent[B] = complaining(parties, B, [[0, key_of(parties, B, A)]])
    shown = to_broadcast("masked", [head_of(sent[name]) for name in parties.names])
    for name in (A, C, D):
        with refused(BindingError, stage="check", member=B):
            parties.clients[name].check(shown)
        nothing_released(parties, name)


def test_a_server_cannot_take_a_complaint_out_of_a_message():
    """It can only drop the message: then the victim signs nothing, and keeps that it complained."""
    parties = go(Parties(7), bad={A: (B,)}, until="check")
    heads = heads_in(parties.shown[B])
    fields = plain(open_head(heads[1], parties.setting).body)
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
        with refused(BindingError, stage="check"):
            parties.clients[name].unmask(everybody)
        nothing_released(parties, name)


# ----------------------------------------------------------------------------------------- framing the honest


def mixtures(evidence, others, lists):
    """The evidence of a blame with its parts exchanged for other heads and lists."""
    for part, other in [("", None), *product(("advertised", "dealt"), lists)]:
        changed = {**evidence, part: other} if part else evidence
        yield changed
        for at, head in product(range(len(evidence["heads"])), others):
            heads = list(evidence["heads"])
            heads[at] = head
            yield {**changed, "heads": heads}


def written(data):
    """Bytes as evidence holds them."""
    return base64.b64encode(data).decode()


def digests(broadcast):
    return [written(masks.digest_of(head)) for head in heads_in(broadcast)]


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
        "heads": [*map(written, (second, advertised[A].raw, dealt[A].raw, complaint))],
    }
    with refused(BindingError, stage="share", member=A):
        masks.judge(parties.setting, evidence)
    evidence["advertised"] = digests(real)
    with refused(BindingError, stage="share", member=A):
        masks.judge(parties.setting, evidence)
    evidence["heads"][0] = written(advertised[B].raw)
    found = masks.judge(parties.setting, evidence)
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
    heads[2] = written(good)
    shown = [good, *heads_in(parties.server.broadcasts["share"])[1:]]
    for dealt in (blame.evidence["dealt"], digests(to_broadcast("share", shown))):
        with refused(BindingError, stage="masked", member=B):
            masks.judge(parties.setting, {**blame.evidence, "heads": heads, "dealt": dealt})


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
            "heads": [written(x) for x in (advertised[B].raw, older, dealt[A].raw, head_of(message))],
        }
        with refused(BindingError, stage="share", member=A):
            masks.judge(parties.setting, evidence)


def test_no_mixture_of_what_was_ever_signed_blames_anybody_else():
    """Heads of two attempts, two rounds, and of everybody, in every place of the evidence."""
    parties = go(Parties(5, threshold=3), bad={A: (B,)}, until="check")
    (blame,) = parties.server.blames
    again = parties.retry().play(until="check")
    heads = [written(one.raw) for p in (parties, again) for s in STAGES for one in p.server.heads[s].values()]
    shown = [p.server.broadcasts[stage] for p in (parties, again) for stage in ("advertise", "share")]
    verdicts = set()
    for evidence in mixtures(blame.evidence, heads, [*map(digests, shown)]):
        with suppress(ProtocolError):
            found = masks.judge(parties.setting, evidence)
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
        lambda e: e.update(heads=[one.swapcase() for one in e["heads"]]),
        lambda e: e.update(advertised=e["advertised"][1:]),
        lambda e: e.update(dealt=[*e["dealt"], written(bytes(32))]),
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
        "heads": [written(advertised[A].raw), written(dealt[A].raw)],
    }
    for kind, chosen in product(("key", "seed"), combinations(held, 4)):
        shares = [[i, written(held[i][kind == "seed"])] for i in chosen]
        for bad, error in (
            (shares, ShareError),  # they rebuild what it committed to
            ([[shares[0][0], written(os.urandom(32))], *shares[1:]], ShareError),
            (shares[1:], BindingError),
            (shares[::-1], BindingError),
            ([[str(i), share] for i, share in shares], MessageError),
            ([*shares[:3], [99, shares[3][1]]], BindingError),
            ([[shares[0][0] - 5, shares[0][1]], *shares[1:]], MessageError),
        ):
            with refused(error):
                masks.judge(parties.setting, {**evidence, "kind": kind, "shares": bad})


# ------------------------------------------------------------------------------------ what a complaint opens


def opened_rows(parties):
    """Every sealed row (dealer, holder) that the opened keys of all complaints decrypt, and both shares."""
    keys = [row.key for head in parties.server.heads["masked"].values() for row in head.body.complaints]
    public = [
        masks.channel_of(head, place)
        for head in parties.server.heads["advertise"].values()
        for place in range(parties.n)
    ]
    secrets = {masks.agree(key, other, stage="", peer="") for key in keys for other in public}
    found = {}
    for dealer, head in parties.server.heads["share"].items():
        for row, shared in product(head.body.rows, secrets):
            holder = parties.names[row.place]
            with suppress(ShareError):
                shares = masks.open_shares(shared, parties.setting.session, dealer, holder, row.sealed)
                found[dealer, holder] = [shares[:32], shares[32:]]
    return found


def test_all_complaints_together_open_what_bad_dealers_knew_and_nothing_else():
    """Two of seven (as many as may collude) deal bad shares to as many as possible, and the server has every
    opened key: it can read what honest members dealt these two, which they could have told it."""
    bad = {A: (C, D), B: ("hospital-f", "hospital-g")}
    parties = go(Parties(7), bad=bad, how="other shares", until="unmask")
    held = {
        liar: dict(parties.clients[liar]._state.shares) for liar in bad
    }  # they forget them with shares sent
    parties.play()
    pairs = {frozenset((dealer, victim)) for dealer, victims in bad.items() for victim in victims}
    found = opened_rows(parties)
    assert {frozenset(pair) for pair in found} == pairs
    assert len(found) == 2 * len(pairs)  # both directions
    for victim in (C, D, "hospital-f", "hospital-g"):
        known = {parties.names.index(h): shares for (d, h), shares in found.items() if d == victim}
        known |= {  # and what the two were dealt otherwise
            i: held[liar][victim] for i, liar in enumerate(bad) if victim in held[liar]
        }
        assert set(known) == {0, 1}  # of t = 5 shares
        own = parties.clients[victim]._state
        released = {
            parties.names.index(name): next(
                r.share for r in head.body.rows if parties.names[r.place] == victim
            )
            for name, head in parties.server.heads["unmask"].items()
        }
        assert masks.combine_shares(released, 5) == own.seed  # a member in the sum: as without complaints
        assert masks.combine_shares({i: shares[0] for i, shares in known.items()}, 2) != own.mask


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


@pytest.mark.parametrize(
    ("copied", "counter"), [*[("advertise", counter) for counter in (1, 4, 5, 6, 99)], ("masked", 9)]
)
def test_a_member_with_an_older_state_is_told_by_the_others_and_stops(copied, counter):
    """Its state was copied before it advertised, or before it masked, and put back after the sum. It does not
    remember that it made the later token, however far a server made it count up since."""
    first = Parties(4)
    for name in first.names:
        counted(first, name, 5)
    old = Released.load(first.play(until=copied).clients[B].released.dump())
    first.play()
    second = first.retry(round=2, attempt=0)
    for name, client in first.clients.items():
        counted(second, name, 9, client.tokens, client.released)
    counted(second, B, counter, {}, old)
    second.play(until="masked")
    with refused(RefusedError, stage="share", member=B, code="stale-state"):
        second.answer(B)
    assert second.clients[B].stage == "stopped"
    told = [row for head in second.server.heads["share"].values() for row in head.body.stale]
    assert {(row.place, row.counter) for row in told if row.place == 1} == {(1, 5)}


def test_a_member_of_two_runs_at_once_is_not_taken_for_an_older_copy():
    """Its newer token is known from the other run; it remembers that it made it."""
    here = Parties(4)
    for name in here.names:
        counted(here, name, 5)
    here.collect()
    here.shown = here.server.advance()
    there = here.retry(round=7)
    for name in here.names:
        counted(there, name, 6, {}, here.clients[name].released)
    there.play(until="masked")
    here.clients[A]._state.tokens = there.clients[A].tokens
    here.play()
    assert len(here.server.heads["share"][A].body.stale) == 3  # A takes the others for stale, and says so
    assert here.server.result is not None


def test_a_forged_or_foreign_token_changes_nothing():
    parties = Parties(4).play(until="share")
    other = Parties(4).play(until="share")  # another roster
    foreign, real = (one.server.heads["advertise"][B].body for one in (other, parties))
    token = foreign.mask + foreign.signature
    lies = [[1, 9, os.urandom(96)], [1, 9, token], [1, 0, token]]
    lies.append([1, 7, real.mask + real.signature])  # its own token with another counter
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
            message = parties.forge(B, "advertise", [*body[:3], 10**6, body[4]])
            parties.clients[B]._state.said = masks.digest_of(head_of(message))
        parties.server.receive(message)
    parties.shown = parties.server.advance()
    parties.play(until="check")
    assert set(parties.clients[A].tokens) == {C, D}
    parties.play()
    assert parties.clients[A].tokens[B][0] == 1  # which it proved when it masked
    assert seen_in(parties.server.broadcasts["advertise"]) == parties.server.heads["share"][A].seen
