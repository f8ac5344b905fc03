"""Who misstated a product is named from masks already sent; nobody honest ever is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from parties import A, B, C, D, Parties, altered, caught, commits_falsely, heads_in

from fedmerit.errors import BindingError, MessageError, ProtocolError, RefusedError, ShareError
from fedmerit.secagg import Client, Evidence, MaskTable, masks
from fedmerit.secagg.messages import digest_of, open_message, to_broadcast
from fedmerit.secagg.naming import RING, judge, largest_stated, mask_products, product, signed, sum_again
from fedmerit.secagg.quantise import BLOCK

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
            message = self.parties.sent["masked"][name]
            payload = bytes(open_message(message, self.setting, len(message))[1])
            self.tables[name] = self.parties.clients[name].project(self.direction, payload)
            self.products[name] = product(payload, self.direction)
            self.stated[name] = self.true(name)
        self.evidence = Evidence.of(server.broadcasts, server.seeds, server.keys)
        self.total = exact(server.result.words, self.direction)

    def true(self, name):
        """The product of the integers that a member should have put into the sum."""
        update = self.parties.update(name)
        words = self.parties.encoding.encode(update.delta, weight=update.weight, seed=update.seed).words
        return exact(words, self.direction)

    def verdict(self):
        said = (self.tables, self.products, self.stated, self.total)
        return judge(self.setting, self.task, self.direction, self.evidence, *said)

    def says(self, name, pairs=(), masked=0, stated=0):
        """Let a member change numbers of its table and its statement by amounts."""
        table = self.tables[name]
        changed = {peer: (c + dict(pairs).get(peer, 0)) % RING for peer, c in table.pairs.items()}
        self.tables[name] = MaskTable(name, changed, (table.masked + masked) % RING)
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


def exact(words, direction):
    """A product over the integers, in plain Python."""
    return sum(int(q) * int(g) for q, g in zip(words.view(np.int32), direction, strict=True))


def case(n=5, lost=(), **change):
    return Case(Parties(n, word_bytes=8, **change).play(lost=lost))


# ------------------------------------------------------------------------------------------- products


@given(st.integers(), st.integers(-(2**63), 2**63 - 1))
def test_signed_is_the_representative_nearest_to_zero(turns, value):
    assert signed(turns * RING + value) == value


@pytest.mark.parametrize("size", [1, BLOCK // 2, BLOCK // 2 + 1, 2 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_products_in_blocks_equal_those_of_plain_integers(size, dtype):
    rng, info = np.random.default_rng(size), np.iinfo(dtype)
    direction = rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
    words = rng.integers(0, 2**64, size, dtype=np.uint64)
    true = sum(int(w) * int(g) for w, g in zip(words, direction, strict=True)) % RING
    payload = words.astype("<u8").tobytes()
    assert product(words, direction) == product(payload, direction) == true
    assert product(memoryview(b"x" + payload)[1:], direction) == true  # at an odd address
    small = words.astype(np.uint32)
    assert product(small, direction) == exact(small, direction) % RING
    zeros = np.zeros(size, np.uint64)
    masks.add_masks(zeros, [(b"\1" * 32, 1)])
    assert mask_products({"one": b"\1" * 32, "two": b"\2" * 32}, direction)["one"] == product(
        zeros, direction
    )
    with pytest.raises(BindingError):
        product(payload[:-1], direction)
    with pytest.raises(BindingError):
        product(words[1:], direction)


# ----------------------------------------------------------------------------------------- what members say


@pytest.mark.parametrize("lost", [[], [("masked", A)], [("share", B)], [("masked", C)], [("check", D)]])
@pytest.mark.parametrize("weights", [None, [5, 1, 2**29, 3, 4]])
def test_without_a_liar_every_value_is_proved_and_nobody_is_named(lost, weights):
    told = case(lost=lost, threshold=4, weights=weights)
    verdict = told.verdict()
    assert verdict.values == {name: told.true(name) for name in told.included}
    assert sum(verdict.values.values()) == told.total
    assert not verdict.named
    assert not verdict.disputed
    assert not verdict.unproved


def test_both_ends_tell_the_same_number_and_only_for_masks_they_have():
    parties = commits_falsely(Parties(5, word_bytes=8), {A: [B], D: [E]}).play(lost=[("masked", C)])
    told = Case(parties)
    assert sorted(told.tables[A].pairs) == [C, D, E]
    assert sorted(told.tables[D].pairs) == [A, B, C]
    for name, table in told.tables.items():
        for peer, c in table.pairs.items():
            assert 0 <= c < RING
            assert peer == C or told.tables[peer].pairs[name] == c
    verdict = told.verdict()
    assert verdict.values == {name: told.true(name) for name in told.included}
    assert not verdict.named


def test_masked_again_is_what_was_sent_to_the_bit():
    parties = Parties(4, word_bytes=8, weights=[3, 1, 2, 7]).play()
    for name, client in parties.clients.items():
        again = client.masked_again(parties.vectors[name])
        assert parties.sent["masked"][name].endswith(bytes(again))
        assert digest_of(again) == parties.server.heads["masked"][name].body[2]
        other = parties.vectors[name].copy()
        other[3] += 1e-3
        with pytest.raises(BindingError, match="not the words that it sent") as error:
            client.masked_again(other)
        caught(error, BindingError, "naming", name)
        with pytest.raises(BindingError) as error:
            client.masked_again(other[1:])
        caught(error, BindingError, "naming", name)


def test_words_of_four_bytes_can_be_sent_again_and_name_nobody():
    parties = Parties(4).play()
    again = parties.clients[A].masked_again(parties.vectors[A])
    assert parties.sent["masked"][A].endswith(bytes(again))
    direction = np.ones(parties.length, np.int32)
    with pytest.raises(RefusedError, match="only words of 8 bytes") as error:
        parties.clients[A].project(direction, again)
    caught(error, RefusedError, "naming", A)
    with pytest.raises(RefusedError, match="only words of 8 bytes"):
        judge(parties.setting, parties.task, direction, None, {}, {}, {}, 0)


def test_restored_clients_say_the_same():
    parties = Parties(6, word_bytes=8, threshold=4).play(lost=[("masked", B), ("unmask", C)])
    told = Case(parties)
    for name in told.included:  # C masked and was lost later: it is in the sum, and can prove what it put in
        client = parties.clients[name]
        again = Client.restore(client.dump(), parties.identity[name])
        payload = again.masked_again(parties.vectors[name])
        assert again.project(told.direction, payload) == told.tables[name]
        assert again.dump() == client.dump()


def test_who_has_masked_nothing_or_has_forgotten_says_nothing():
    parties = Parties(4, word_bytes=8)
    direction = np.ones(parties.length, np.int32)
    for end in (
        lambda: None,
        lambda: parties.play(until="masked"),
        lambda: parties.play().clients[A].forget(),
    ):
        end()
        for call in (
            lambda: parties.clients[A].masked_again(parties.vectors[A]),
            lambda: parties.clients[A].project(direction, b""),
            lambda: parties.clients[A].open_pair(B, MaskTable(A, {}, 0), MaskTable(B, {}, 0)),
        ):
            with pytest.raises(BindingError, match="remembers no masked update") as error:
                call()
            caught(error, BindingError, "naming", A)


def test_a_member_answers_one_direction_and_none_that_tells_its_weight():
    parties = Parties(4, word_bytes=8, weights=[3, 1, 2, 7]).play()
    client, words = parties.clients[A], parties.encoding.words
    payload = client.masked_again(parties.vectors[A])
    direction = np.ones(words, np.int32)
    with pytest.raises(RefusedError, match="secret weight"):
        client.project(direction, payload)
    direction[-1] = 0
    for bad in (
        direction[:-1],
        direction.astype(float),
        direction.astype(np.uint16),
        direction.reshape(1, -1),
    ):
        with pytest.raises(BindingError, match="expected a direction"):
            client.project(bad, payload)
    with pytest.raises(BindingError, match="not the words that it sent"):
        client.project(direction, bytes(payload)[:-1] + b"\0\0")
    table = client.project(direction, payload)
    assert client.project(direction.astype(np.int64), payload) == table
    client = Client.restore(client.dump(), parties.identity[A])
    with pytest.raises(RefusedError, match="another direction") as error:
        client.project(2 * direction, payload)
    caught(error, RefusedError, "naming", A)
    assert client.project(direction, payload) == table


# ------------------------------------------------------------------------------------------------- liars


@pytest.mark.parametrize("lie", [1, -1, 2**62, 2**63, 2**64, -(2**65), 2**76 + 1])
def test_a_member_that_states_another_number_is_named(lie):
    told = case()
    told.says(B, stated=lie)
    verdict = told.verdict()
    assert verdict.named == {B: "stated"}
    assert verdict.values == {name: told.true(name) for name in told.included}


def test_a_lie_about_one_mask_is_opened_and_named():
    told = case()
    told.says(B, pairs={D: 7}, stated=told.moves(B, D, 7))
    verdict = told.verdict()
    assert not verdict.named  # both could be right
    assert verdict.disputed == ((B, D),)
    assert verdict.values[B] is verdict.values[D] is None
    assert verdict.values[A] == told.true(A)
    told.honest = tuple(name for name in told.included if name != B)
    verdict = told.open()
    assert verdict.named == {B: "pair"}
    assert not verdict.disputed
    assert verdict.values == {name: told.true(name) for name in told.included}


def test_a_lie_about_all_masks_is_named_by_any_one_of_them():
    told = case()
    lies = {peer: i + 1 for i, peer in enumerate(told.tables[C].pairs)}
    told.says(C, pairs=lies, stated=sum(told.moves(C, peer, lie) for peer, lie in lies.items()))
    told.honest = (A,)  # the others do not open
    verdict = told.open()
    assert verdict.named == {C: "pair"}
    assert verdict.disputed == ((B, C), (C, D), (C, E))
    assert verdict.values[A] == told.true(A)
    assert verdict.values[C] is None
    told.honest = (A, B, D, E)
    assert told.open().values == {name: told.true(name) for name in told.included}


def test_a_lie_about_a_mask_with_a_lost_dealer_needs_no_opening():
    told = case(lost=[("masked", C)], threshold=4)
    told.says(B, pairs={C: 5}, stated=told.moves(B, C, 5))
    verdict = told.verdict()
    assert verdict.named == {B: "pair"}
    assert verdict.values == {name: told.true(name) for name in told.included}


def test_two_who_agree_on_a_false_number_move_credit_between_themselves_only():
    told = case()
    for name, peer in ((B, D), (D, B)):
        told.says(name, pairs={peer: 9}, stated=told.moves(name, peer, 9))
    verdict = told.verdict()
    assert not verdict.named  # and the equation holds
    assert sum(told.stated.values()) == told.total
    assert verdict.values[B] + verdict.values[D] == told.true(B) + told.true(D)
    assert verdict.values[B] == told.true(B) + told.moves(B, D, 9)
    assert all(verdict.values[name] == told.true(name) for name in (A, C, E))
    told.stated[B] = told.true(B)  # one of them forgets to move its statement
    assert told.verdict().named == {B: "stated"}


def test_two_who_agree_on_a_number_so_large_that_their_values_wrap_are_named():
    """What they state is what the masks give modulo 2^64, and in sum it is 2^64 away."""
    told = case()
    assert max(map(abs, told.stated.values())) <= largest_stated(5)
    one, two = next((x, y) for x in (A, B) for y in (B, C) if x != y and told.stated[x] * told.stated[y] > 0)
    for name, peer in ((one, two), (two, one)):
        told.says(name, pairs={peer: RING // 2})
        told.stated[name] = signed(told.stated[name] + RING // 2)
    assert abs(sum(told.stated.values()) - told.total) == RING
    verdict = told.verdict()
    assert verdict.named == {one: "range", two: "range"}
    assert all(verdict.values[name] == told.true(name) for name in told.included if name not in (one, two))


def test_two_who_put_words_beyond_32_bits_into_the_sum_gain_nothing():
    """The words cancel, so the sum is right; their products do not fit, and nobody else is named."""
    parties = Parties(5, word_bytes=8).play(until="masked")
    for each in parties.names:
        message = parties.answer(each)
        wide = {B: {0: 2**45, 1: 2**41}, D: {0: -(2**45), 1: -(2**41)}}.get(each, {})
        parties.sent["masked"][each] = altered(parties, each, message, wide)
        parties.server.receive(parties.sent["masked"][each], each)
    parties.shown = parties.server.advance()
    told = Case(parties.play())
    put = {
        name: sign * sum(int(told.direction[i]) * 2**e for i, e in ((0, 45), (1, 41)))
        for name, sign in ((B, 1), (D, -1))
    }
    for name, amount in put.items():
        told.stated[name] = signed(told.true(name) + amount)
    verdict = told.verdict()
    assert {name: verdict.values[name] for name in (A, C, E)} == {name: told.true(name) for name in (A, C, E)}
    assert not verdict.named.keys() - {B, D}
    assert verdict.named or sum(told.stated.values()) == told.total
    for name in put:  # as if nothing had happened: then the equation holds
        told.stated[name] = told.true(name)
    assert sum(told.stated.values()) == told.total


def test_a_false_product_of_ones_own_words_is_named():
    told = case()
    told.says(B, masked=4, stated=4)
    verdict = told.verdict()
    assert verdict.named == {B: "masked"}
    assert verdict.values == {name: told.true(name) for name in told.included}
    del told.products[B]  # without the words it is nobody's proof
    verdict = told.verdict()
    assert not verdict.named
    assert verdict.unproved == (B,)


def uses_other_masks(parties, name, amounts):
    """Play to the end; one member adds amounts to its words after masking: it used another mask."""
    parties.play(until="masked")
    for each in parties.names:
        message = parties.answer(each)
        parties.sent["masked"][each] = altered(parties, each, message, amounts) if each == name else message
        parties.server.receive(parties.sent["masked"][each], each)
    parties.shown = parties.server.advance()
    return parties.play()


def test_who_used_another_mask_than_it_committed_to_is_named_and_its_value_is_what_it_put_in():
    told = Case(uses_other_masks(Parties(5, word_bytes=8), B, {0: 1000, 7: -3}))
    put = told.true(B) + 1000 * int(told.direction[0]) - 3 * int(told.direction[7])
    verdict = told.verdict()
    assert verdict.named == {B: "stated"}
    assert verdict.values == {name: put if name == B else told.true(name) for name in told.included}
    assert sum(verdict.values.values()) == told.total
    told.stated[B] = put  # what is in the sum is its own: no lie
    assert not told.verdict().named


@pytest.mark.parametrize("lie", [1, -(2**20), 2**63])
def test_a_false_sum_is_the_servers(lie):
    told = case(lost=[("masked", A)], threshold=4)
    told.total += lie
    verdict = told.verdict()
    assert verdict.named == {"server": "sum"}
    told.says(B, stated=3)  # also if a member lies as well, each is named for its own
    assert told.verdict().named == {B: "stated", "server": "sum"}
    told.says(B, stated=lie - 3)  # and if the member lies so that the equation holds
    assert told.verdict().named == {B: "stated", "server": "sum"}


def test_silence_is_missing_and_never_blame():
    for drop in ("tables", "products", "both"):
        told = case()
        if drop != "products":
            del told.tables[B]
        if drop != "tables":
            del told.products[B]
        told.says(D, stated=1)
        told.total += 5
        verdict = told.verdict()
        assert verdict.unproved == (B,)
        assert verdict.values[B] is None
        assert verdict.named == {D: "stated"}  # by its own table; the server is not proved
        if drop == "products":
            assert all(verdict.values[name] == told.true(name) for name in (A, C, D, E))
        else:
            assert set(verdict.values.values()) == {None}
    told = case()
    told.tables, told.products, told.stated = {}, {}, {}
    verdict = told.verdict()
    assert verdict.unproved == told.included
    assert not verdict.named


@pytest.mark.parametrize("change", ["fewer", "more", "number", "text", "member"])
def test_a_table_that_is_not_whole_counts_as_none(change):
    told = case()
    pairs, masked, member = dict(told.tables[B].pairs), told.tables[B].masked, B
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
    told.tables[B] = MaskTable(member, pairs, masked)
    verdict = told.verdict()
    assert verdict.unproved == (B,)
    assert not verdict.named
    assert verdict.values[B] is None


def test_products_beyond_64_bits_name_nobody():
    """A public direction so large that true products do not fit: statements are compared modulo 2^64."""
    parties = Parties(5, word_bytes=8).play()
    told = Case(parties, np.full(parties.length, 2**40, np.int64))
    assert any(abs(told.true(name)) >= RING // 2 for name in told.included)
    assert not told.verdict().named
    told.says(B, stated=1)
    assert told.verdict().named == {B: "stated"}


@pytest.mark.parametrize("lost", [[], [("masked", A)]])
def test_anyone_computes_the_sum_again_from_words_sent_again(lost):
    """So a false X is found also where its product is right, or wrong by a multiple of 2^64."""
    parties = commits_falsely(Parties(5, word_bytes=8, threshold=4, weights=[1, 2, 3, 4, 5]), {A: [B]})
    told = Case(parties.play(lost=lost))
    told.total += RING
    assert not told.verdict().named
    words = {name: parties.clients[name].masked_again(parties.vectors[name]) for name in told.included}
    given = (told.setting, told.task, told.evidence)
    assert np.array_equal(sum_again(*given, words.items()), parties.server.result.words)
    for bad in (
        [*words.items()][1:],
        [*words.items()] * 2,
        [*(words | {B: words[C]}).items()],
        [*(words | {B: bytes(words[B])[:-6]}).items()],
    ):
        with pytest.raises(BindingError, match=r"not the words that it signed|are missing"):
            sum_again(*given, bad)


# ----------------------------------------------------------------------------------------------- openings


def test_a_pair_is_opened_only_against_another_number_and_only_within_the_sum():
    told = case(6, lost=[("masked", F)], threshold=4)
    client, ours, theirs = told.parties.clients[A], told.tables[A], told.tables[B]
    wrong = MaskTable(B, {**theirs.pairs, A: (theirs.pairs[A] + 1) % RING}, theirs.masked)
    lost = MaskTable(F, {A: (ours.pairs[F] + 1) % RING}, 0)
    own = MaskTable(A, {**ours.pairs, B: (ours.pairs[B] + 1) % RING}, ours.masked)
    for refused, why in (
        ((B, ours, theirs), "signed no other product"),
        ((B, ours, MaskTable(B, {}, 0)), "signed no other product"),
        ((B, ours, MaskTable(B, {A: ours.pairs[B] + RING}, 0)), "signed no other product"),
        ((B, ours, MaskTable(B, {A: "1"}, 0)), "signed no other product"),
        ((C, ours, wrong), "has no mask with"),
        ((F, ours, lost), "has no mask with"),
        ((A, ours, ours), "has no mask with"),
        (("hospital-z", ours, wrong), "has no mask with"),
        ((B, own, theirs), "not the one it told"),
        ((B, theirs, wrong), "not the one it told"),
    ):
        with pytest.raises(RefusedError, match=why) as error:
            client.open_pair(*refused)
        caught(error, RefusedError, "naming", A)
    assert client._state.opened == []
    key = client.open_pair(B, ours, wrong)
    assert client.open_pair(B, ours, wrong) == key
    assert told.evidence.with_opened(told.setting, B, A, key).check(told.setting, told.task)


def test_before_it_told_its_products_a_member_opens_nothing():
    parties = Parties(5, word_bytes=8).play()
    with pytest.raises(RefusedError, match="not the one it told"):
        parties.clients[A].open_pair(B, MaskTable(A, {}, 0), MaskTable(B, {A: 1}, 0))


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_two_masks_with_members_of_the_sum_stay_shut_also_after_restarts(n):
    told = case(n + 1, lost=[("masked", "hospital-" + "abcdefg"[n])], threshold=n)
    client, ours = told.parties.clients[A], told.tables[A]
    done = 0
    for peer in told.included[1:]:
        client = Client.restore(client.dump(), told.parties.identity[A])
        wrong = MaskTable(peer, {A: (ours.pairs[peer] + 1) % RING}, 0)
        if done < n - 3:
            client.open_pair(peer, ours, wrong)
            done += 1
            continue
        with pytest.raises(
            RefusedError, match="masks with members of the sum would remain, 2 are needed"
        ) as error:
            client.open_pair(peer, ours, wrong)
        caught(error, RefusedError, "naming", A)
    assert len(client._state.opened) == done == n - 3


def test_pairs_without_a_mask_do_not_count_as_shut():
    parties = commits_falsely(Parties(5, word_bytes=8), {B: [A]}).play()
    told = Case(parties)
    client, ours = parties.clients[A], told.tables[A]
    wrong = [MaskTable(peer, {A: (ours.pairs[peer] + 1) % RING}, 0) for peer in (C, D)]
    client.open_pair(C, ours, wrong[0])
    with pytest.raises(RefusedError, match="1 masks"):
        client.open_pair(D, ours, wrong[1])


# ----------------------------------------------------------------------------------------------- evidence


def test_evidence_survives_json_and_nothing_else():
    told = case(6, lost=[("masked", C)], threshold=4)
    told.says(B, pairs={D: 7})
    told.honest = (A, D, E, F)
    told.open()
    values = told.evidence.to_dict()
    read = Evidence.from_dict(json.loads(json.dumps(values)))
    assert read == told.evidence
    assert len(read.opened) == 1
    told.evidence = read
    assert told.verdict().named == {B: "pair"}
    for change in (
        {"advertised": values["advertised"].upper()},
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
    assert values["seeds"][A] not in repr(told.evidence)


def test_evidence_of_another_attempt_proves_nothing():
    told = case(lost=[("masked", C)], threshold=4)
    other = Case(told.parties.retry(released={}).play(lost=[("masked", C)]))
    same = Case(replace(told.parties, released={}).play(lost=[("masked", C)]))  # fresh keys, same session
    for another in (other, same):
        for name in ("advertised", "shared", "masked", "seeds", "keys"):
            mixed = replace(told.evidence, **{name: getattr(another.evidence, name)})
            with pytest.raises(ProtocolError):
                mixed.check(told.setting, told.task)
    with pytest.raises(ProtocolError):
        other.evidence.check(told.setting, told.task)
    assert told.evidence.check(told.setting, told.task).digests == told.parties.server.inputs
    with pytest.raises(BindingError, match="another task"):
        told.evidence.check(told.setting, replace(told.task, m0_hash=b"\4" * 32))


def spoilt(data):
    """The same bytes but for the last one."""
    return data[:-1] + bytes([data[-1] ^ 1])


def test_forged_evidence_is_refused():
    told = case(6, lost=[("masked", C)], threshold=4)
    good, clients = told.evidence, told.parties.clients
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
        ({"opened": {(A, B): b"\1" * 32}}, ShareError),
        ({"opened": {(A, D): pair}}, ShareError),
        ({"opened": {(B, A): pair}}, BindingError),
        ({"opened": {(A, A): pair}}, BindingError),
        ({"opened": {(A, C): clients[A]._pair_key(C)}}, BindingError),
        ({"opened": {(A, "hospital-z"): pair}}, BindingError),
        ({"masked": to_broadcast("masked", masked[1:])}, BindingError),  # A would be a lost dealer
        ({"shared": to_broadcast("share", shared[:-1])}, BindingError),
        ({"masked": to_broadcast("masked", [spoilt(masked[0]), *masked[1:]])}, ProtocolError),
        ({"masked": good.shared}, BindingError),
    ):
        with pytest.raises(kind):
            replace(good, **change).check(told.setting, told.task)
    replace(good, opened={(A, B): pair}).check(told.setting, told.task)


def test_who_is_not_in_the_sum_has_no_say():
    told = case(lost=[("masked", C)], threshold=4)
    told.stated[C] = 1
    with pytest.raises(BindingError, match="not in the sum") as error:
        told.verdict()
    caught(error, BindingError, "naming", C)


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
    gone = {name for stage, name in lost if stage == "share"}
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
            "masked": draw(st.just(0) | AMOUNTS),
            "stated": draw(st.just(0) | AMOUNTS),
            "silent": draw(st.sampled_from(["", "", "", "table", "words", "all"])),
        }
    return n, lost, gone, lies, draw(st.just(0) | AMOUNTS)


def played(n, lost, gone, lies):
    """The round of a story, up to the sum."""
    parties = Parties(n, word_bytes=8, threshold=n // 2 + 1)
    parties.play(until="share")
    for name in gone:
        parties.shown.pop(name)
    commits_falsely(parties, {name: lie["commit"] for name, lie in lies.items()})
    for name in list(parties.shown):
        if ("masked", name) in lost:
            continue
        message = parties.answer(name)
        if lies.get(name, {}).get("words"):
            message = altered(parties, name, message, lies[name]["words"])
        parties.sent["masked"][name] = message
        parties.server.receive(message, name)
    parties.shown = parties.server.advance()
    return parties.play(lost=lost)


@settings(max_examples=40, deadline=None)
@given(stories())
def test_nobody_honest_is_ever_named_and_a_failed_equation_names_somebody(story):
    n, lost, gone, lies, off = story
    parties = played(n, lost, gone, lies)
    told = Case(parties, honest=tuple(name for name in parties.server.result.included if name not in lies))
    put = {name: told.true(name) for name in told.included}
    for name, lie in lies.items():
        put[name] += sum(amount * int(told.direction[at]) for at, amount in lie["words"].items())
        pairs = {peer: amount for peer, amount in lie["pairs"].items() if peer in told.tables[name].pairs}
        moved = sum(told.moves(name, peer, amount) for peer, amount in pairs.items()) if lie["fits"] else 0
        told.says(name, pairs=pairs, masked=lie["masked"], stated=moved + lie["stated"])
        for peer, amount in pairs.items():
            if lie["agrees"] and peer in lies:  # a friend tells the same number
                told.says(peer, pairs={name: amount}, stated=told.moves(peer, name, amount))
    silent = [name for name, lie in lies.items() if lie["silent"]]
    for name in silent:
        kind = lies[name]["silent"]
        if kind != "words":
            del told.tables[name]
        if kind != "table":
            del told.products[name]
    told.total += off
    fails = sum(told.stated.values()) != told.total
    verdict = told.open()

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
        assert (sum(verdict.values.values()) - told.total + off) % RING == 0
        if fails and abs(told.total) < RING // 2:
            assert verdict.named
    for pair in verdict.disputed:  # between liars, or too few masks of the honest end would stay shut
        for name, peer in (pair, pair[::-1]):
            if name not in lies:
                state = parties.clients[name]._state
                left = {*state.pairs} & {*state.survivors} - {*state.opened, peer}
                assert len(left) < 2
