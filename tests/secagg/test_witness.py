"""Who witnesses whose masks: nobody its own, nobody too many, and no few of them unmask anybody."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from msgspec import msgpack

from fedmerit.errors import RefusedError
from fedmerit.secagg import masks
from fedmerit.secagg.naming import Evidence, MaskTable, mask_products
from fedmerit.secagg.witness import FEWEST, Handed, Sighting, Witnessed, witnesses
from parties import A, B, C, D, Parties, commits_falsely
from refusals import refused

E = "hospital-e"
SEED = b"s" * 32
MOST = 4000
"""Sets of colluding members that are tried; of larger ones so many are drawn."""


def names(n):
    return [f"m{place:02d}" for place in range(n)]


@pytest.mark.parametrize("n", range(5, 31))
def test_each_pair_has_one_witness_outside_it_and_nobody_sees_much_of_anybody(n):
    order = names(n)
    drawn = witnesses(order, 0)
    assert {*drawn} == {frozenset(pair) for pair in combinations(order, 2)}
    assert all(witness not in pair for pair, witness in drawn.items())
    seen = Counter((witness, name) for pair, witness in drawn.items() for name in pair)
    assert set(seen.values()) <= ({1} if n % 2 else {1, 2})
    load = Counter(drawn.values())
    assert max(load.values()) == (n - 1) // 2 + (n % 2 == 0)


def connected(order, drawn, colluding):
    """Whether pairs of honest members that no colluding one saw hold all of them together."""
    honest = [name for name in order if name not in colluding]
    reached, more = {honest[0]}, [honest[0]]
    while more:
        one = more.pop()
        new = [o for o in honest if o not in reached and drawn[frozenset((one, o))] not in colluding]
        reached |= {*new}
        more += new
    return len(reached) == len(honest)


@pytest.mark.parametrize("n", range(5, 31))
def test_no_few_colluding_witnesses_cut_honest_members_off(n):
    order, c = names(n), (n - 1) // 3
    assert n > 3 * c
    drawn, rng = witnesses(order, c), np.random.default_rng(n)
    sets = combinations(order, c)
    if math.comb(n, c) > MOST:
        sets = (rng.choice(order, c, replace=False).tolist() for _ in range(MOST // 4))
    assert all(connected(order, drawn, {*one}) for one in sets)


@pytest.mark.parametrize(("n", "c"), [(1, 0), (4, 0), (4, 1), (5, 2), (6, 2), (9, 3), (12, 4)])
def test_a_sum_of_few_members_has_no_witnesses(n, c):
    assert n < FEWEST or n <= 3 * c
    assert witnesses(names(n), c) == {}


def test_one_colluding_member_more_can_cut_somebody_off():
    """The condition on the number in the sum is not idle."""
    order = names(6)
    drawn = witnesses(order, 1)
    assert not all(connected(order, drawn, {*pair}) for pair in combinations(order, 2))


# ------------------------------------------------------------------------------------------------- the keys


class Case:
    """A sum of five, and what its members hand over and see."""

    def __init__(self, parties=None):
        self.parties = (parties or Parties(5, word_bytes=8)).play()
        evidence = msgpack.decode(self.parties.server.proof, type=Evidence)
        self.setting, self.task = self.parties.setting, self.parties.task
        attempt = evidence.check(self.setting, self.task)
        self.sums = Witnessed(self.setting, attempt, witnesses(self.setting.members, 1), SEED)
        self.direction = np.arange(self.task.encoding.words, dtype=np.int32)
        self.keys = {pair: self.client(pair[0])._pair_key(pair[1]) for pair in self.sums.pairs}
        binding = self.task.binding(self.setting)
        streams = {pair: masks.stream_key(key, binding) for pair, key in self.keys.items()}
        self.true = mask_products(streams, self.direction)
        self.handed = {name: self.hands(name) for name in self.setting.members}
        self.tables = {
            name: MaskTable(
                name, {(set(pair) - {name}).pop(): v for pair, v in self.true.items() if name in pair}
            )
            for name in self.setting.members
        }
        self.seen = {name: Sighting(self.of(name, self.true), {}, {}) for name in self.setting.members}

    def client(self, name):
        return self.parties.clients[name]

    def of(self, name, values):
        return {pair: values[pair] for pair, witness in self.sums.pairs.items() if witness == name}

    def hands(self, name):
        found = Handed({}, {})
        sealed, opened = {}, {}
        for peer in self.client(name).masked_peers:
            is_open, key = self.client(name).hand_over(peer, self.witness(name, peer), SEED)
            (opened if is_open else sealed)[peer] = key
        return Handed(sealed, opened) if found else found

    def witness(self, *pair):
        return self.sums.drawn[frozenset(pair)]

    def weigh(self):
        return self.sums.weigh(self.tables, self.handed, self.seen)


@pytest.fixture
def case():
    return Case()


def test_a_key_can_be_read_by_its_witness_and_by_nobody_else(case):
    for pair, witness in case.sums.pairs.items():
        for end in pair:
            sealed = case.sums.sealed(pair, case.handed)[end]
            for name in case.setting.members:
                if name != end:
                    key = case.sums.key(pair, end, sealed, case.client(name).channel(end))
                    assert key == (case.keys[pair] if name == witness else None)


def test_the_key_of_a_pair_opens_nothing_that_its_ends_send_to_each_other(case):
    """Who witnesses a pair knows its key, and reads all messages."""
    for pair, witness in case.sums.pairs.items():
        for end, sealed in case.sums.sealed(pair, case.handed).items():
            assert (
                case.sums.key(pair, end, sealed, case.keys[masks.in_order(case.setting, end, witness)])
                is None
            )


def test_what_honest_witnesses_sign_proves_everything(case):
    weighed = case.weigh()
    assert (weighed.values, weighed.keys, weighed.silent) == (case.true, {}, ())


def test_keys_are_handed_over_for_pairs_in_the_sum_only(case):
    for peer, witness in ((A, C), (B, A), (B, B), ("hospital-z", C), (B, "hospital-z")):
        with refused(RefusedError, stage="naming", member=A):
            case.client(A).hand_over(peer, witness, SEED)


@pytest.mark.parametrize("ends", [(A,), (A, B)])
@pytest.mark.parametrize("what", ["nothing", "another key"])
def test_one_end_is_enough_and_without_both_nothing_is_proved(case, ends, what):
    pair, witness = (A, B), case.witness(A, B)
    for end in ends:
        peer = B if end == A else A
        sealed = dict(case.handed[end].sealed)
        shared = case.client(end).channel(witness)
        sealed[peer] = masks.seal_key(shared, case.setting, SEED, end, pair, b"k" * 32)
        if what == "nothing":
            del sealed[peer]
        case.handed[end] = Handed(sealed, {})
    if len(ends) == 1:
        assert case.weigh().silent == ()
        return
    case.seen[witness].values.pop(pair)
    if what == "another key":  # the witness has to say so
        assert (case.weigh().silent, case.weigh().owing) == ((witness,), (witness,))
        case.seen[witness].channels.update({end: case.client(witness).channel(end) for end in pair})
    weighed = case.weigh()
    assert weighed.silent == (A, B)
    assert weighed.values[pair] is None
    assert not weighed.owing


def test_a_witness_that_complains_about_a_good_key_shows_it_and_nothing_else_follows(case):
    pair, witness = (A, B), case.witness(A, B)
    case.seen[witness].values.pop(pair)
    case.seen[witness].channels[A] = case.client(witness).channel(A)
    weighed = case.weigh()
    assert (weighed.keys, weighed.silent) == ({pair: case.keys[pair]}, ())


@pytest.mark.parametrize("lie", ["value", "key", "channel", "nothing"])
def test_a_witness_that_lies_is_silent_and_nobody_else_is_harmed(case, lie):
    pair, witness = (A, B), case.witness(A, B)
    seen = case.seen[witness]
    seen.values.pop(pair)
    if lie == "value":
        seen.values[pair] = case.true[pair] + 1
    elif lie == "key":
        seen.keys[pair] = b"k" * 32
    elif lie == "channel":
        seen.channels.update({A: b"k" * 32, B: b"k" * 32})
    weighed = case.weigh()
    assert (weighed.silent, weighed.owing) == ((witness,), (witness,))
    assert pair not in weighed.values


def test_who_commits_falsely_to_its_masks_with_others_keeps_none_of_their_pairs_from_being_proved():
    """An end knows then that the witness is not honest, and hands the key over openly."""
    case = Case(commits_falsely(Parties(5, word_bytes=8), {E: [A, B, C, D]}))
    for name in (A, B, C, D):
        assert E not in case.client(name).masked_peers
    case.seen[E] = Sighting({}, {}, {})
    weighed = case.weigh()
    assert weighed.silent == ()
    shown = {pair for pair, witness in case.sums.pairs.items() if witness == E}
    assert {*weighed.keys} == shown
    assert all(case.sums.attempt.is_key(case.setting, pair, key) for pair, key in weighed.keys.items())
