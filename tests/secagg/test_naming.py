"""Who misstated a product is named from masks already sent; nobody honest ever is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from fedmerit.errors import BindingError, MessageError, ProtocolError, RefusedError, ShareError
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import digest_of, to_broadcast
from fedmerit.secagg.naming import (
    RING,
    Evidence,
    MaskTable,
    judge,
    largest_stated,
    mask_products,
    product,
    signed,
)
from fedmerit.secagg.quantise import BLOCK, direction_hash
from parties import A, B, C, D, Parties, adds, commits_falsely, heads_in
from refusals import refused

E, F = "hospital-e", "hospital-f"


@dataclass
class Case:
    """A round that was summed, its direction, and what everybody says of it; change what a liar says."""

    parties: Parties
    direction: np.ndarray = None
    honest: tuple = None
    tables: dict = field(default_factory=dict)
    products: dict = field(default_factory=dict)
    stated: dict = field(default_factory=dict)

    def __post_init__(self):
        server, rng = self.parties.server, np.random.default_rng(1)
        self.setting, self.task = self.parties.setting, self.parties.task
        self.included = server.result.included
        self.honest = self.included if self.honest is None else self.honest
        if self.direction is None:
            self.direction = rng.integers(-(2**9), 2**9, self.task.encoding.words).astype(np.int32)
            self.direction[self.parties.length :] = 0
        for name in self.included:
            payload = self.parties.payload(name)
            self.tables[name] = table_of(self.parties.clients[name], self.direction)
            self.products[name] = product(payload, self.direction)
            self.stated[name] = self.true(name)
        self.evidence = msgpack.decode(server.proof, type=Evidence)
        self.total = exact(server.result.words, self.direction)

    def true(self, name):
        """The product of the integers that a member should have put into the sum."""
        return exact(self.parties.words(name), self.direction)

    def verdict(self, witnessed=None):
        stated = {name: range(value, value + 1) for name, value in self.stated.items()}
        said = (self.tables, self.products, stated, self.total)
        return judge(self.setting, self.task, self.direction, self.evidence, *said, witnessed)

    def says(self, name, pairs=(), stated=0):
        """Let a member change numbers of its table and its statement by amounts."""
        table = self.tables[name]
        changed = {peer: (c + dict(pairs).get(peer, 0)) % RING for peer, c in table.pairs.items()}
        self.tables[name] = MaskTable(name, changed)
        self.stated[name] += stated

    def moves(self, name, peer, amount):
        """The change of a member's statement that fits a change of its number for this pair."""
        return -masks.sign_of(self.setting, name, peer) * amount

    def open(self):
        """Judge; let honest members open what is disputed, and judge again."""
        verdict = self.verdict()
        for pair in verdict.disputed:
            for name, peer in (pair, pair[::-1]):
                if name in self.honest:
                    try:
                        tables = self.tables[name], self.tables[peer]
                        key = self.parties.clients[name].open_pair(peer, *tables)
                    except RefusedError:
                        continue
                    self.evidence = self.evidence.with_opened(self.setting, name, peer, key)
        return self.verdict()


def table_of(client, direction, purpose=""):
    """What a member says of its masks, whatever it masked with them."""
    binding = client.task.binding(client.setting)
    keys = {peer: masks.stream_key(client._pair_key(peer), binding) for peer in client._state.pairs}
    return client.tell(direction_hash(direction), mask_products(keys, direction), purpose)


def exact(words, direction):
    """A product over the integers, in plain Python."""
    return sum(int(q) * int(g) for q, g in zip(words.view(np.int32), direction, strict=True))


def summed(n=5, lost=(), **change):
    return Case(Parties(n, word_bytes=8, **change).play(lost=lost))


# ------------------------------------------------------------------------------------------- products


@given(st.integers(), st.integers(-(2**63), 2**63 - 1))
def test_signed_is_the_representative_nearest_to_zero(turns, value):
    assert signed(turns * RING + value) == value


@pytest.mark.parametrize("size", [1, BLOCK // 2, BLOCK // 2 + 1, 2 * BLOCK + 7])
def test_products_in_blocks_equal_those_of_plain_integers(size):
    rng = np.random.default_rng(size)
    direction = rng.integers(-(2**31), 2**31, size).astype(np.int32)
    words = rng.integers(0, 2**64, size, dtype=np.uint64)
    true = sum(int(w) * int(g) for w, g in zip(words, direction, strict=True)) % RING
    payload = words.astype("<u8").tobytes()
    assert product(payload, direction) == true
    assert product(memoryview(b"x" + payload)[1:], direction) == true  # at an odd address
    zeros = np.zeros(size, np.uint64)
    masks.add_masks(zeros, [(b"\1" * 32, 1)])
    one = mask_products({"one": b"\1" * 32, "two": b"\2" * 32}, direction)["one"]
    assert one == product(zeros.astype("<u8").tobytes(), direction)
    with pytest.raises(BindingError):
        product(payload[:-1], direction)


# ----------------------------------------------------------------------------------------- what members say


@pytest.mark.parametrize("lost", [[], [("masked", A)], [("share", B)], [("masked", C)], [("check", D)]])
@pytest.mark.parametrize("weights", [None, [5, 1, 2**29, 3, 4]])
def test_without_a_liar_every_value_is_proved_and_nobody_is_named(lost, weights):
    case = summed(lost=lost, threshold=4, weights=weights)
    verdict = case.verdict()
    assert verdict.values == {name: case.true(name) for name in case.included}
    assert sum(verdict.values.values()) == case.total
    assert not verdict.named
    assert not verdict.disputed
    assert not verdict.unproved


def test_masked_again_is_what_was_sent_to_the_bit():
    parties = Parties(4, word_bytes=8, weights=[3, 1, 2, 7]).play()
    for name, client in parties.clients.items():
        again = client.masked_again(parties.vectors[name])
        assert parties.payload(name) == again
        assert digest_of(again) == parties.server.heads["masked"][name].body.words
        other = parties.vectors[name].copy()
        other[3] += 1e-3
        with refused(BindingError, stage="naming", member=name):
            client.masked_again(other)
        with refused(BindingError, stage="naming", member=name):
            client.masked_again(other[1:])


def test_words_of_four_bytes_can_be_sent_again_and_name_nobody():
    parties = Parties(4).play()
    again = parties.clients[A].masked_again(parties.vectors[A])
    assert parties.payload(A) == again
    direction = np.ones(parties.length, np.int32)
    with refused(RefusedError, stage="naming", member=A):
        parties.clients[A].products(direction, parties.vectors[A])
    with pytest.raises(RefusedError, match="only words of 8 bytes"):
        judge(parties.setting, parties.task, direction, None, {}, {}, {}, 0)


def test_who_has_masked_nothing_says_nothing_and_who_has_told_no_products_opens_nothing():
    parties = Parties(4, word_bytes=8)
    client, direction = parties.clients[A], np.ones(parties.length, np.int32)
    tables = MaskTable(A, {}), MaskTable(B, {A: 1})
    for until in ("advertise", "masked"):
        parties.play(until=until)
        for call, error in (
            (lambda: client.masked_again(parties.vectors[A]), BindingError),
            (lambda: client.products(direction, parties.vectors[A]), BindingError),
            (lambda: client.open_pair(B, *tables), RefusedError),
        ):
            with refused(error, stage="naming", member=A):
                call()
    parties.play()
    with refused(RefusedError, stage="naming", member=A):
        client.open_pair(B, *tables)


def test_a_member_answers_one_direction_and_none_that_tells_its_weight():
    parties = Parties(4, word_bytes=8, weights=[3, 1, 2, 7]).play()
    client, words = parties.clients[A], parties.encoding.words
    direction, own = np.ones(words, np.int32), parties.vectors[A]
    with pytest.raises(RefusedError, match="secret weight"):
        client.products(direction, own)
    direction[-1] = 0
    for bad in (
        direction[:-1],
        direction.astype(float),
        direction.astype(np.int64),
        direction.reshape(1, -1),
    ):
        with pytest.raises(BindingError, match="expected a direction"):
            client.products(bad, own)
    with pytest.raises(BindingError, match="not the words that it sent"):
        client.products(direction, 0.5 * own)
    products, integers = client.products(direction, own)
    assert (
        product(parties.payload(A), direction)
        == (
            exact(integers, direction)
            + mask_products(
                {A: masks.self_key(client._state.seed, A, client.task.binding(client.setting))}, direction
            )[A]
            + sum(masks.sign_of(parties.setting, A, peer) * value for peer, value in products.items())
        )
        % RING
    )
    table = client.tell(direction_hash(direction), products)
    client = Client.restore(client.dump(), parties.identity[A])
    with refused(RefusedError, stage="naming", member=A):
        client.tell(direction_hash(2 * direction), products)
    assert client.tell(direction_hash(direction), products) == table


# ------------------------------------------------------------------------------------------------- liars


@pytest.mark.parametrize("lie", [1, -1, 2**62, 2**63, 2**64, -(2**65), 2**76 + 1])
def test_a_member_that_states_another_number_is_named(lie):
    case = summed()
    case.says(B, stated=lie)
    verdict = case.verdict()
    assert verdict.named == {B: "stated"}
    assert verdict.values == {name: case.true(name) for name in case.included}


@pytest.mark.parametrize(("lost", "peers"), [([], [D]), ([], [A, C, D, E]), ([("masked", C)], [C])])
def test_a_lie_about_masks_is_named_by_any_one_of_them_and_by_a_lost_dealers_key(lost, peers):
    case = summed(lost=lost, threshold=4)
    lies = {peer: i + 1 for i, peer in enumerate(peers)}
    case.says(B, pairs=lies, stated=sum(case.moves(B, peer, lie) for peer, lie in lies.items()))
    true = {name: case.true(name) for name in case.included}
    disputed = [masks.in_order(case.setting, B, peer) for peer in peers if not lost]
    verdict = case.verdict()
    assert verdict.named == ({B: "pair"} if lost else {})  # both ends of a pair could be right
    assert verdict.disputed == tuple(disputed)
    unproved = {name for pair in disputed for name in pair}
    assert verdict.values == {name: None if name in unproved else value for name, value in true.items()}
    case.honest = (peers[0],)  # the others do not open
    verdict = case.open()
    assert verdict.named == {B: "pair"}
    assert verdict.disputed == tuple(disputed[1:])
    assert verdict.values.get(peers[0]) == true.get(peers[0])
    case.honest = tuple(name for name in case.included if name != B)
    assert case.open().values == true


def test_two_who_agree_on_a_false_number_move_credit_between_themselves_only():
    case = summed()
    for name, peer in ((B, D), (D, B)):
        case.says(name, pairs={peer: 9}, stated=case.moves(name, peer, 9))
    verdict = case.verdict()
    assert not verdict.named  # and the equation holds
    assert sum(case.stated.values()) == case.total
    assert verdict.values[B] + verdict.values[D] == case.true(B) + case.true(D)
    assert verdict.values[B] == case.true(B) + case.moves(B, D, 9)
    assert all(verdict.values[name] == case.true(name) for name in (A, C, E))
    case.stated[B] = case.true(B)  # one of them forgets to move its statement
    assert case.verdict().named == {B: "stated"}


def test_two_who_agree_on_a_number_so_large_that_their_values_wrap_are_named():
    """What they state is what the masks give modulo 2^64, and in sum it is 2^64 away."""
    case = summed()
    assert max(map(abs, case.stated.values())) <= largest_stated(5)
    one, two = next((x, y) for x in (A, B) for y in (B, C) if x != y and case.stated[x] * case.stated[y] > 0)
    for name, peer in ((one, two), (two, one)):
        case.says(name, pairs={peer: RING // 2})
        case.stated[name] = signed(case.stated[name] + RING // 2)
    assert abs(sum(case.stated.values()) - case.total) == RING
    verdict = case.verdict()
    assert verdict.named == {one: "range", two: "range"}
    assert all(verdict.values[name] == case.true(name) for name in case.included if name not in (one, two))


def test_two_who_put_words_beyond_32_bits_into_the_sum_gain_nothing():
    """The words cancel, so the sum is right; their products do not fit, and nobody else is named."""
    wide = {B: {0: 2**45, 1: 2**41}, D: {0: -(2**45), 1: -(2**41)}}
    case = Case(adds(Parties(5, word_bytes=8), wide).play())
    put = {
        name: sum(int(case.direction[at]) * amount for at, amount in amounts.items())
        for name, amounts in wide.items()
    }
    for name, amount in put.items():
        case.stated[name] = signed(case.true(name) + amount)
    verdict = case.verdict()
    assert {name: verdict.values[name] for name in (A, C, E)} == {name: case.true(name) for name in (A, C, E)}
    assert not verdict.named.keys() - {B, D}
    assert verdict.named or sum(case.stated.values()) == case.total
    for name in put:  # as if nothing had happened: then the equation holds
        case.stated[name] = case.true(name)
    assert sum(case.stated.values()) == case.total


def test_without_a_statement_a_table_proves_nothing():
    case = summed()
    case.says(B, pairs={D: 4}, stated=4)
    del case.products[B]
    verdict = case.verdict()
    assert not verdict.named
    assert verdict.unproved == (B,)


def test_what_a_witness_signed_stands_in_for_a_missing_table_and_proves_nobody_false():
    case = summed()
    pair = masks.in_order(case.setting, B, D)
    true, missing = case.tables[B].pairs[D], case.tables.pop(D)
    del case.products[D]
    assert case.verdict().values[B] is None
    signed_by_all = {masks.in_order(case.setting, D, peer): missing.pairs[peer] for peer in missing.pairs}
    verdict = case.verdict(signed_by_all)
    assert {name: verdict.values[name] for name in (A, B, C, E)} == {
        name: case.true(name) for name in (A, B, C, E)
    }
    assert verdict.unproved == (D,)
    verdict = case.verdict({**signed_by_all, pair: (true + 1) % RING})  # another number than B's
    assert verdict.values[B] is None
    assert not verdict.named


def test_what_both_ends_say_proves_nothing_where_a_witness_was_given_no_key():
    case = summed()
    for name, peer in ((B, D), (D, B)):
        case.says(name, pairs={peer: 9}, stated=case.moves(name, peer, 9))
    verdict = case.verdict({masks.in_order(case.setting, B, D): None})
    assert (verdict.named, verdict.disputed) == ({}, ())
    assert {name for name, value in verdict.values.items() if value is None} == {B, D}


def test_who_used_another_mask_than_it_committed_to_is_named_and_its_value_is_what_it_put_in():
    case = Case(adds(Parties(5, word_bytes=8), {B: {0: 1000, 7: -3}}).play())
    put = case.true(B) + 1000 * int(case.direction[0]) - 3 * int(case.direction[7])
    verdict = case.verdict()
    assert verdict.named == {B: "stated"}
    assert verdict.values == {name: put if name == B else case.true(name) for name in case.included}
    assert sum(verdict.values.values()) == case.total
    case.stated[B] = put  # what is in the sum is its own: no lie
    assert not case.verdict().named


@pytest.mark.parametrize("lie", [1, -(2**20), 2**63])
def test_a_false_sum_is_the_servers(lie):
    case = summed(lost=[("masked", A)], threshold=4)
    case.total += lie
    verdict = case.verdict()
    assert verdict.named == {"server": "sum"}
    case.says(B, stated=3)  # also if a member lies as well, each is named for its own
    assert case.verdict().named == {B: "stated", "server": "sum"}
    case.says(B, stated=lie - 3)  # and if the member lies so that the equation holds
    assert case.verdict().named == {B: "stated", "server": "sum"}


def test_silence_is_missing_and_never_blame():
    for drop in ("tables", "products", "both"):
        case = summed()
        if drop != "products":
            del case.tables[B]
        if drop != "tables":
            del case.products[B]
        case.says(D, stated=1)
        case.total += 5
        verdict = case.verdict()
        assert verdict.unproved == (B,)
        assert verdict.values[B] is None
        assert verdict.named == {D: "stated"}  # by its own table; the server is not proved
        if drop == "products":
            assert all(verdict.values[name] == case.true(name) for name in (A, C, D, E))
        else:
            assert set(verdict.values.values()) == {None}
    case = summed()
    case.tables, case.products, case.stated = {}, {}, {}
    verdict = case.verdict()
    assert verdict.unproved == case.included
    assert not verdict.named


@pytest.mark.parametrize("change", ["fewer", "more", "number", "text", "member"])
def test_a_table_that_is_not_whole_counts_as_none(change):
    case = summed()
    pairs, member = dict(case.tables[B].pairs), B
    if change == "fewer":
        del pairs[C]
    elif change == "more":
        pairs["hospital-z"] = 1
    elif change == "number":
        pairs[C] += RING
    elif change == "text":
        pairs[C] = "1"
    else:
        member = D
    case.tables[B] = MaskTable(member, pairs)
    verdict = case.verdict()
    assert verdict.unproved == (B,)
    assert not verdict.named
    assert verdict.values[B] is None


def test_products_beyond_64_bits_name_nobody():
    """A public direction so large that true products do not fit: statements are compared modulo 2^64."""
    parties = Parties(5, length=100, word_bytes=8).play()
    signs = np.where(parties.words(A).view(np.int32) < 0, -1, 1)
    case = Case(parties, (signs * (2**31 - 1)).astype(np.int32))
    assert any(abs(case.true(name)) >= RING // 2 for name in case.included)
    assert not case.verdict().named
    case.says(B, stated=1)
    assert case.verdict().named == {B: "stated"}


# ----------------------------------------------------------------------------------------------- openings


def test_a_pair_is_opened_only_against_another_number_and_only_within_the_sum():
    case = summed(6, lost=[("masked", F)], threshold=4)
    client, ours, theirs = case.parties.clients[A], case.tables[A], case.tables[B]
    wrong = MaskTable(B, {**theirs.pairs, A: (theirs.pairs[A] + 1) % RING})
    lost = MaskTable(F, {A: (ours.pairs[F] + 1) % RING})
    own = MaskTable(A, {**ours.pairs, B: (ours.pairs[B] + 1) % RING})
    for attempt in (
        (B, ours, theirs),  # it signed no other product
        (B, ours, MaskTable(B, {})),
        (B, ours, MaskTable(B, {A: ours.pairs[B] + RING})),
        (B, ours, MaskTable(B, {A: "1"})),
        (C, ours, wrong),  # no mask with it in the sum
        (F, ours, lost),
        (A, ours, ours),
        ("hospital-z", ours, wrong),
        (B, own, theirs),  # not the table that was case
        (B, theirs, wrong),
    ):
        with refused(RefusedError, stage="naming", member=A):
            client.open_pair(*attempt)
    assert client._state.opened == []
    key = client.open_pair(B, ours, wrong)
    assert client.open_pair(B, ours, wrong) == key
    assert case.evidence.with_opened(case.setting, B, A, key).check(case.setting, case.task)


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_two_masks_with_members_of_the_sum_stay_shut_also_after_restarts(n):
    case = summed(n + 1, lost=[("masked", "hospital-" + "abcdefg"[n])], threshold=n)
    client, ours = case.parties.clients[A], case.tables[A]
    done = 0
    for peer in case.included[1:]:
        client = Client.restore(client.dump(), case.parties.identity[A])
        wrong = MaskTable(peer, {A: (ours.pairs[peer] + 1) % RING})
        if done < n - 3:
            client.open_pair(peer, ours, wrong)
            done += 1
            continue
        with refused(RefusedError, stage="naming", member=A):
            client.open_pair(peer, ours, wrong)
    assert len(client._state.opened) == done == n - 3


def test_pairs_without_a_mask_do_not_count_as_shut():
    parties = commits_falsely(Parties(5, word_bytes=8), {B: [A]}).play()
    case = Case(parties)
    client, ours = parties.clients[A], case.tables[A]
    wrong = [MaskTable(peer, {A: (ours.pairs[peer] + 1) % RING}) for peer in (C, D)]
    client.open_pair(C, ours, wrong[0])
    with pytest.raises(RefusedError, match="1 masks"):
        client.open_pair(D, ours, wrong[1])


# ----------------------------------------------------------------------------------------------- evidence


def test_evidence_survives_json_and_nothing_else():
    case = summed(6, lost=[("masked", C)], threshold=4)
    case.says(B, pairs={D: 7})
    case.honest = (A, D, E, F)
    case.open()
    values = case.evidence.to_dict()
    read = Evidence.from_dict(json.loads(json.dumps(values)))
    assert read == case.evidence
    assert len(read.opened) == 1
    case.evidence = read
    assert case.verdict().named == {B: "pair"}
    for change in (
        {"advertised": values["advertised"].swapcase()},
        {"seeds": [*values["seeds"]]},
        {"keys": {C: "zz"}},
        {"opened": [["a", "b"]]},
        {"masked": None},
        {"more": 1},
    ):
        with pytest.raises(MessageError):
            Evidence.from_dict(values | change)
    with pytest.raises(MessageError):
        Evidence.from_dict({})
    assert values["seeds"][A] not in repr(case.evidence)


def test_evidence_of_another_attempt_proves_nothing():
    case = summed(lost=[("masked", C)], threshold=4)
    other = Case(case.parties.retry(released={}).play(lost=[("masked", C)]))
    same = Case(replace(case.parties, released={}).play(lost=[("masked", C)]))  # fresh keys, same session
    for another in (other, same):
        for name in ("advertised", "shared", "masked", "seeds", "keys"):
            mixed = replace(case.evidence, **{name: getattr(another.evidence, name)})
            with pytest.raises(ProtocolError):
                mixed.check(case.setting, case.task)
    with pytest.raises(ProtocolError):
        other.evidence.check(case.setting, case.task)
    assert case.evidence.check(case.setting, case.task).digests == case.parties.server.inputs
    with pytest.raises(BindingError, match="another task"):
        case.evidence.check(case.setting, replace(case.task, m0_hash=b"\4" * 32))


def spoilt(data):
    """The same bytes but for the last one."""
    return data[:-1] + bytes([data[-1] ^ 1])


def test_forged_evidence_is_refused():
    case = summed(6, lost=[("masked", C)], threshold=4)
    good, clients = case.evidence, case.parties.clients
    pair = clients[A]._pair_key(B)
    masked, shared = heads_in(good.masked), heads_in(good.shared)
    for change, kind in (
        ({"seeds": {**good.seeds, A: b"\1" * 32}}, ShareError),
        ({"seeds": {**good.seeds, A: b""}}, ShareError),
        ({"seeds": {name: seed for name, seed in good.seeds.items() if name != A}}, BindingError),
        ({"seeds": {**good.seeds, C: clients[C]._state.seed}}, BindingError),
        ({"keys": {}}, BindingError),
        ({"keys": {C: clients[A]._state.mask}}, ShareError),
        ({"keys": {C: b"short"}}, ShareError),
        ({"keys": {**good.keys, A: clients[A]._state.mask}}, BindingError),
        ({"opened": ((A, B, b"\1" * 32),)}, ShareError),
        ({"opened": ((A, D, pair),)}, ShareError),
        ({"opened": ((B, A, pair),)}, BindingError),
        ({"opened": ((A, A, pair),)}, BindingError),
        ({"opened": ((A, C, clients[A]._pair_key(C)),)}, BindingError),
        ({"opened": ((A, "hospital-z", pair),)}, BindingError),
        ({"opened": ((A, B, pair),) * 2}, BindingError),
        ({"masked": to_broadcast("masked", masked[1:])}, BindingError),  # A would be a lost dealer
        ({"shared": to_broadcast("share", shared[:-1])}, BindingError),
        ({"masked": to_broadcast("masked", [spoilt(masked[0]), *masked[1:]])}, ProtocolError),
        ({"masked": good.shared}, BindingError),
    ):
        with pytest.raises(kind):
            replace(good, **change).check(case.setting, case.task)
    replace(good, opened=((A, B, pair),)).check(case.setting, case.task)


def test_who_is_not_in_the_sum_has_no_say():
    case = summed(lost=[("masked", C)], threshold=4)
    case.stated[C] = 1
    with refused(BindingError, stage="naming", member=C):
        case.verdict()


# ------------------------------------------------------------------------------------------ any story at all


AMOUNTS = st.sampled_from([1, -1, 2, 12345, -(2**33), 2**63, 2**64, 2**64 + 1])


@st.composite
def stories(draw):
    """A round with losses and liars: about commitments, words, masks and statements; some are silent."""
    n = draw(st.integers(4, 6))
    names = tuple(f"hospital-{letter}" for letter in "abcdef"[:n])
    lost = draw(st.lists(st.sampled_from(names), max_size=n // 2 - 1, unique=True))
    lost = [(draw(st.sampled_from(["share", "masked", "unmask"])), name) for name in lost]
    left = [name for name in names if ("share", name) not in lost and ("masked", name) not in lost]
    liars = draw(st.lists(st.sampled_from(left), max_size=3, unique=True))
    lies = {}
    for name in liars:
        peers = [peer for peer in left if peer != name]
        chosen = st.lists(st.sampled_from(peers), unique=True)
        lies[name] = {
            "commit": draw(st.just([]) | chosen),
            "words": draw(
                st.just({}) | st.dictionaries(st.integers(0, 19), st.integers(-999, 999), max_size=2)
            ),
            "pairs": {peer: draw(AMOUNTS) for peer in draw(st.just([]) | chosen)},
            "fits": draw(st.booleans()),
            "agrees": draw(st.booleans()),
            "stated": draw(st.just(0) | AMOUNTS),
            "silent": draw(st.sampled_from(["", "", "", "table", "words", "all"])),
        }
    return n, lost, lies, draw(st.just(0) | AMOUNTS)


def played(n, lost, lies):
    """The round of a story."""
    parties = commits_falsely(
        Parties(n, word_bytes=8, threshold=n // 2 + 1), {name: lie["commit"] for name, lie in lies.items()}
    )
    return adds(parties, {name: lie["words"] for name, lie in lies.items() if lie["words"]}).play(lost=lost)


@settings(max_examples=40, deadline=None)
@given(stories())
def test_nobody_honest_is_ever_named_and_a_failed_equation_names_somebody(story):
    n, lost, lies, off = story
    parties = played(n, lost, lies)
    case = Case(parties, honest=tuple(name for name in parties.server.result.included if name not in lies))
    put = {name: case.true(name) for name in case.included}
    for name, lie in lies.items():
        put[name] += sum(amount * int(case.direction[at]) for at, amount in lie["words"].items())
        pairs = {peer: amount for peer, amount in lie["pairs"].items() if peer in case.tables[name].pairs}
        moved = sum(case.moves(name, peer, amount) for peer, amount in pairs.items()) if lie["fits"] else 0
        case.says(name, pairs=pairs, stated=moved + lie["stated"])
        for peer, amount in pairs.items():
            if lie["agrees"] and peer in lies:  # a friend tells the same number
                case.says(peer, pairs={name: amount}, stated=case.moves(peer, name, amount))
    silent = [name for name, lie in lies.items() if lie["silent"]]
    for name in silent:
        kind = lies[name]["silent"]
        if kind != "words":
            del case.tables[name]
        if kind != "table":
            del case.products[name]
    case.total += off
    fails = sum(case.stated.values()) != case.total
    verdict = case.open()

    assert not verdict.named.keys() - {*lies, "server"}
    assert "server" not in verdict.named or off % RING
    assert set(verdict.unproved) == set(silent)
    whole = all(value is not None for value in verdict.values.values())
    event(f"fails {fails}, whole {whole}, silent {len(silent)}, named {len(verdict.named)}")
    for name, value in verdict.values.items():
        if name not in lies and value is not None:
            assert value == put[name]
    if whole:
        if off % RING:
            assert verdict.named["server"] == "sum"
        assert (sum(verdict.values.values()) - case.total + off) % RING == 0
        if fails and abs(case.total) < RING // 2:
            assert verdict.named
    for pair in verdict.disputed:  # between liars, or too few masks of the honest end would stay shut
        for name, peer in (pair, pair[::-1]):
            if name not in lies:
                state = parties.clients[name]._state
                left = {*state.pairs} & {*state.survivors} - {*state.opened, peer}
                assert len(left) < 2
