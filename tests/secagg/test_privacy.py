"""What the server can learn from every byte it gets, and proof that these checks would notice if it were
more.

Each check passes on the code as it is. Each broken variant below takes one protection away and must make its
check fail: a check that no flaw can fail protects nobody.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from fedmerit.identity import Member, Roster
from fedmerit.secagg import masks
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import STAGES, Task, pack
from parties import Parties, plain, secrets_of
from tests.secagg.test_blame import go, opened_rows

C = "hospital-c"


def stream(keys, size):
    words = np.zeros(size, np.uint32)
    masks.add_masks(words, keys)
    return words


def payload_of(parties, name):
    return np.frombuffer(parties.payload(name), "<u4")


def bared(parties):
    """Every member's words with all masks taken off that the server can rebuild from the shares it got."""
    server, binding = parties.server, parties.task.binding(parties.setting)
    left = {}
    for name in parties.sent["masked"]:
        words = payload_of(parties, name).copy()
        if name in server.heads["masked"]:
            masks.add_masks(words, [(masks.self_key(server._rebuild(name, "seed"), name, binding), -1)])
        else:
            mask_key = server._rebuild(name, "key")
            peers = {peer: head.body.mask for peer, head in server.heads["advertise"].items() if peer != name}
            own = masks.with_peers(parties.setting, name, mask_key, peers, binding)
            masks.add_masks(words, [(key, -sign) for key, sign in own])
        left[name] = words
    return left


def unmask_all(parties):
    """Play to the end, up to the moment where the server has every share it will ever get."""
    parties.play(until="unmask").collect([*parties.shown])
    return parties


def correlation(words, guess):
    """Between words and a guess of the update behind them, in standard errors of pure chance."""
    x, y = words.view(np.int32).astype(float), guess.view(np.int32).astype(float)
    return float(np.corrcoef(x, y)[0, 1] * np.sqrt(x.size))


# ---------------------------------------------------------------------------------------------------- checks


def check_only_the_sum_comes_out():
    """Of all subsets of members, the server can compute the sum of one: everybody's."""
    parties = unmask_all(Parties(5, length=2000))
    left = bared(parties)
    words_of = {name: parties.words(name) for name in parties.names}
    for size in range(1, 6):
        for chosen in combinations(parties.names, size):
            got = sum((left[name] for name in chosen), np.zeros(2000, np.uint32))
            true = sum((words_of[name] for name in chosen), np.zeros(2000, np.uint32))
            if size == 5:
                assert np.array_equal(got, true)  # the one thing it may learn; shows that the test can see
            else:
                assert not np.array_equal(got, true), chosen
                assert abs(correlation(got, true)) < 6, chosen


def check_colluders_learn_the_sum_of_the_others():
    """Two members give the server all their secrets: it can compute one sum of the other four, of all."""
    parties = unmask_all(Parties(6, length=2000))
    binding = parties.task.binding(parties.setting)
    honest, traitors = parties.names[2:], parties.names[:2]
    left = bared(parties)
    for name in honest:
        public = {name: parties.server.heads["advertise"][name].body.mask}
        for traitor in traitors:  # what the traitor added for this pair is what the honest one took off
            known = parties.clients[traitor]._state.mask
            masks.add_masks(left[name], masks.with_peers(parties.setting, traitor, known, public, binding))
    for size in range(1, 5):
        for chosen in combinations(honest, size):
            got = sum((left[name] for name in chosen), np.zeros(2000, np.uint32))
            true = sum((parties.words(name) for name in chosen), np.zeros(2000, np.uint32))
            assert np.array_equal(got, true) == (size == 4), chosen
            assert size == 4 or abs(correlation(got, true)) < 6, chosen


def check_a_member_called_lost_stays_hidden():
    """The server has its masked words AND the key of its pairwise masks: the self-mask must hold alone."""
    parties = Parties(5, length=2000).play(until="masked")
    for name in parties.names:
        parties.sent["masked"][name] = parties.answer(name)
        if name != C:  # the server pretends that this one never came
            parties.server.receive(parties.sent["masked"][name], name)
    parties.shown = parties.server.advance()
    left = bared(unmask_all(parties))[C]
    assert not np.array_equal(left, parties.words(C))
    assert abs(correlation(left, parties.words(C))) < 6


def check_every_attempt_has_fresh_secrets():
    """Two attempts with the same update have nothing in common that could be subtracted."""
    first = Parties(4, length=500).play(until="check")
    second = first.retry().play(until="check")
    assert not {s for name in first.names for s in secrets_of(first, name)} & {
        s for name in second.names for s in secrets_of(second, name)
    }
    for name in first.names:
        one, two = (plain(p.server.heads["advertise"][name].body) for p in (first, second))
        assert not set(one) & set(two) - {1}  # the counter of a state that was never stored
        each = [{body[2][at : at + 32] for at in range(0, 4 * 32, 32)} for body in (one, two)]
        assert len(each[0] | each[1]) == 8  # channel keys
        gap = payload_of(first, name) - payload_of(second, name)
        assert np.count_nonzero(gap) > 490


def check_masks_have_more_than_32_bits():
    """150,000 secrets give 150,000 masks. With a seed of 32 bits about three pairs would be the same."""
    seen = set()
    for i in range(150_000):
        key = masks.stream_key(masks.pair_key(i.to_bytes(32, "big"), b"a session", "a", "b"), b"binding")
        mask = stream([(key, 1)], 4).tobytes()
        assert mask not in seen
        seen.add(mask)


def check_masks_are_bound():
    """The same secrets give other masks wherever anything else is another."""
    parties = Parties(4)
    setting, task = parties.setting, parties.task
    other_key = Member("hospital-d", b"\5" * 32)
    roster = Roster([*parties.roster.members[:3], other_key])
    names = setting.members
    variants = {
        "nothing": (setting, task),
        "run": (replace(setting, run="another"), task),
        "round": (replace(setting, round=2), task),
        "attempt": (replace(setting, attempt=1), task),
        "schedule": (replace(setting, members=(*names[:2], names[3], names[2])), task),
        "threshold": (replace(setting, threshold=4), task),
        "roster": (replace(setting, roster=roster), task),
        "config": (replace(setting, config_hash=b"\3" * 32), task),
        "model": (setting, replace(task, m0_hash=b"\4" * 32)),
        "encoding": (setting, replace(task, encoding=replace(task.encoding, bound=2.0))),
    }
    keys = {}
    peers = {name: masks.public(bytes([i + 1]) * 32) for i, name in enumerate(names)}
    for what, (a_setting, a_task) in variants.items():
        own = masks.of_member(a_setting, names[0], b"\1" * 32, b"\2" * 32, peers, a_task.binding(a_setting))
        keys[what] = {key for key, _ in own}
        assert len(keys[what]) == 4  # also bound to both names
    for one, two in combinations(keys, 2):
        assert not keys[one] & keys[two], f"masks do not depend on the {one if two == 'nothing' else two}"


def check_no_plain_byte_reaches_the_server():
    """Neither updates, nor their integers, nor secret weights, nor any secret of who is in the sum."""
    weights = [123_456_789, 234_567_891, 98_765_432, 87_654_321]
    parties = unmask_all(Parties(4, length=100, weights=weights))
    got = b"".join(message for stage in STAGES for message in parties.sent[stage].values())
    for name, weight in zip(parties.names, weights, strict=True):
        delta = parties.vectors[name]
        for numbers in (delta, delta.astype(float), weight * delta.astype(float), parties.words(name)):
            data = numbers.tobytes()
            for at in range(0, len(data) - 8, 8):
                assert data[at : at + 8] not in got
        packed = pack(weight)[1:], pack(float(weight))[1:], pack(-weight)[1:]
        sizes = [weight.to_bytes(4, order) for order in ("little", "big")]
        for trace in (*packed, *sizes, str(weight).encode(), np.float32(weight).tobytes()):
            assert trace not in got
        for secret in secrets_of(parties, name):
            assert secret not in got
            assert secret[:16] not in got
            assert secret[16:] not in got


def check_a_complaint_opens_one_channel():
    """Of all shares, the opened keys read those between complainers and the dealers they complain about."""
    bad = {"hospital-a": ("hospital-c", "hospital-d"), "hospital-b": ("hospital-f", "hospital-g")}
    parties = go(Parties(7), bad=bad, how="other shares")
    pairs = {(dealer, victim) for dealer, victims in bad.items() for victim in victims}
    assert set(opened_rows(parties)) == pairs | {pair[::-1] for pair in pairs}


# -------------------------------------------------------------------------------------------- broken variants


def no_self_mask(patch):
    real = masks.of_member
    patch.setattr(masks, "of_member", lambda *args: real(*args)[1:])


def no_pairwise_masks(patch):
    patch.setattr(masks, "with_peers", lambda *args: [])


def one_key_for_all_pairs(patch):
    patch.setattr(masks, "pair_key", lambda shared, session, low, high: b"\7" * 32)


def reused_seed(patch):
    patch.setattr(os, "urandom", lambda size: b"\6" * size)


def seed_of_32_bits(patch):
    real = masks.derive

    def folded(*args):
        words = np.frombuffer(real(*args), "<u4")
        return hashlib.sha256(np.bitwise_xor.reduce(words).tobytes()).digest()

    patch.setattr(masks, "derive", folded)


def generator_of_32_bits(patch):
    real = masks.add_masks

    def weak(words, keys):
        real(words, [(hashlib.sha256(key[:4]).digest(), sign) for key, sign in keys])

    patch.setattr(masks, "add_masks", weak)


def masks_not_bound_to_m0(patch):
    def binding(self, setting):
        return pack(setting.run, setting.round, setting.attempt, setting.session, self.encoding.bound)

    patch.setattr(Task, "binding", binding)


def masks_not_bound_to_the_attempt(patch):
    def binding(self, setting):
        return pack(setting.run, setting.round, setting.roster.hash, setting.config_hash, self.digest)

    patch.setattr(Task, "binding", binding)


def masks_not_bound_to_names(patch):
    real = masks.derive
    patch.setattr(masks, "derive", lambda secret, label, *context: real(b"\1" * 32, label, context[-1]))


def no_masks_at_all(patch):
    patch.setattr(masks, "add_masks", lambda words, keys: None)


def weight_not_masked(patch):
    real = masks.add_masks
    patch.setattr(masks, "add_masks", lambda words, keys: real(words[:-1], keys))


def one_channel_key_for_all_peers(patch):
    real = masks.channel_key
    patch.setattr(masks, "channel_key", lambda secret, session, name, peer: real(secret, session, name, ""))


def shares_not_encrypted(patch):
    patch.setattr(masks, "seal_shares", lambda *args: bytes(12) + args[-1] + bytes(16))
    patch.setattr(masks, "open_shares", lambda *args: args[-1][12:-16])
    patch.setattr(masks, "split_secret", lambda secret, threshold, members: [secret] * members)


CHECKS = [
    check_only_the_sum_comes_out,
    check_colluders_learn_the_sum_of_the_others,
    check_a_member_called_lost_stays_hidden,
    check_every_attempt_has_fresh_secrets,
    check_masks_have_more_than_32_bits,
    check_masks_are_bound,
    check_no_plain_byte_reaches_the_server,
    check_a_complaint_opens_one_channel,
]

BROKEN = [
    (no_self_mask, check_a_member_called_lost_stays_hidden),
    (no_pairwise_masks, check_only_the_sum_comes_out),
    (one_key_for_all_pairs, check_only_the_sum_comes_out),
    (one_key_for_all_pairs, check_colluders_learn_the_sum_of_the_others),
    (reused_seed, check_every_attempt_has_fresh_secrets),
    (seed_of_32_bits, check_masks_have_more_than_32_bits),
    (generator_of_32_bits, check_masks_have_more_than_32_bits),
    (masks_not_bound_to_m0, check_masks_are_bound),
    (masks_not_bound_to_the_attempt, check_masks_are_bound),
    (masks_not_bound_to_names, check_masks_are_bound),
    (no_masks_at_all, check_no_plain_byte_reaches_the_server),
    (weight_not_masked, check_no_plain_byte_reaches_the_server),
    (shares_not_encrypted, check_no_plain_byte_reaches_the_server),
    (one_channel_key_for_all_peers, check_a_complaint_opens_one_channel),
]


def in_time(*flaw_and_check):
    """Return arguments of a test; a check of 150,000 masks is slow by nature."""
    long = flaw_and_check[-1] is check_masks_have_more_than_32_bits
    return pytest.param(*flaw_and_check, marks=[pytest.mark.long] if long else [])


@pytest.mark.parametrize(
    "check", [*map(in_time, CHECKS)], ids=lambda check: check.__name__.removeprefix("check_")
)
def test_privacy(check):
    check()


@pytest.mark.parametrize(
    ("flaw", "check"),
    [in_time(*both) for both in BROKEN],
    ids=lambda it: it.__name__.removeprefix("check_"),
)
def test_a_broken_variant_is_noticed(flaw, check, monkeypatch):
    flaw(monkeypatch)
    with pytest.raises(AssertionError):
        check()


# ------------------------------------------------------------------------------------------------- simulator


def view_of(words, monkeypatch):
    """What a server sees of a round in which the members put these words in."""
    parties = Parties(4, length=1500)
    queue = iter([words[name] for name in parties.names])
    with monkeypatch.context() as patch:
        patch.setattr(Encoding, "encode", lambda *a, **k: next(queue).copy())
        return unmask_all(parties)


def simulated(total, rng):
    """Words for four members from their sum alone."""
    names = Parties(4).names
    words = {name: rng.integers(0, 2**32, total.size, np.uint32) for name in names[1:]}
    words[names[0]] = total - sum(words.values(), np.zeros_like(total))
    return words


def features(view, guess):
    """What a suspicious server might look at, given a guess of everybody's update."""
    left = bared(view)
    every = b"".join(message for stage in STAGES for message in view.sent[stage].values())
    top = np.bincount(np.concatenate([words >> 24 for words in left.values()]), minlength=256)
    names = view.names
    return {
        "a member's words follow the guess": max(abs(correlation(left[n], guess[n])) for n in names),
        "two members' words follow each other": max(
            abs(correlation(left[a], left[b])) for a, b in combinations(names, 2)
        ),
        "two members' sum follows the guess": max(
            abs(correlation(left[a] + left[b], guess[a] + guess[b])) for a, b in combinations(names, 2)
        ),
        "words are uneven": float(((top - top.mean()) ** 2 / top.mean()).sum()),
        "bytes are uneven": float(np.frombuffer(every, np.uint8).mean()),
    }


def farthest(real, fake):
    """Kolmogorov and Smirnov: the largest gap between two distributions, 0 to 1."""
    points = np.concatenate([real, fake])
    return max(abs(np.mean(real <= p) - np.mean(fake <= p)) for p in points)


def distances(monkeypatch, views=20):
    rng = np.random.default_rng(0)
    parties = Parties(4, length=1500)
    guess = {name: parties.words(name) for name in parties.names}
    total = sum(guess.values(), np.zeros(1500, np.uint32))
    real = [view_of(guess, monkeypatch) for _ in range(views)]
    fake = [view_of(simulated(total, rng), monkeypatch) for _ in range(views)]
    for one, two in zip(real, fake, strict=True):
        sizes = [{s: [len(m) for m in v.sent[s].values()] for s in STAGES} for v in (one, two)]
        assert sizes[0] == sizes[1]
        sums = [sum(bared(view).values(), np.zeros(1500, np.uint32)) for view in (one, two)]
        assert np.array_equal(sums[0], sums[1])
    table = [[features(view, guess) for view in views_] for views_ in (real, fake)]
    return {
        what: farthest(*(np.array([row[what] for row in rows]) for rows in table)) for what in table[0][0]
    }


def test_a_transcript_made_from_the_sum_alone_cannot_be_told_from_a_real_one(monkeypatch):
    # 0.9 is passed by chance about once in ten million tests with 20 views against 20
    for what, distance in distances(monkeypatch).items():
        assert distance < 0.9, what


@pytest.mark.parametrize("flaw", [no_pairwise_masks, one_key_for_all_pairs], ids=lambda f: f.__name__)
def test_the_simulator_test_notices_missing_masks(flaw, monkeypatch):
    flaw(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_transcript_made_from_the_sum_alone_cannot_be_told_from_a_real_one(monkeypatch)
