"""No sum that is too small, and no second sum over the same updates that would make a difference small."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.errors import BindingError, ProtocolError, RefusedError, RoundAborted
from fedmerit.identity import Member, Roster
from fedmerit.secagg import masks
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import to_broadcast
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.server import Server
from fedmerit.secagg.setting import Released, Setting, Task, Update, default_threshold, what_to_know
from parties import CONFIG, LENGTH, M0, A, B, C, D, Parties, body_of, head_of, heads_in, names_of, seen_in
from refusals import refused


def test_a_sum_of_two_is_refused_by_members_and_server():
    parties = Parties(3, threshold=2).play(until="masked")
    two = parties.collect((A, B))
    with refused(RoundAborted, stage="masked"):
        parties.server.advance()
    with refused(RoundAborted, stage="masked"):
        parties.clients[A].check(two)


# ------------------------------------------------------------------------------------ another schedule


def attempt_of(first, members, released, threshold=None):
    """Another attempt at the same round, with these members and the updates they had."""
    setting = replace(first.setting, attempt=first.setting.attempt + 1, members=members, threshold=threshold)
    task = Task(M0, Encoding(LENGTH, len(members), 1.0))
    clients = {name: Client(setting, name, first.identity[name], released=released[name]) for name in members}
    server, shown = Server(setting, task), dict.fromkeys(members)
    for _ in ("advertise", "share"):
        for name in members:
            server.receive(clients[name].handle(shown[name]))
        shown = server.advance()
    return clients, shown, {name: Update(task, first.vectors[name]) for name in members}


@pytest.mark.parametrize(("n", "colluding"), [(12, 0), (9, 1), (9, 2)])
def test_who_masked_in_a_round_takes_part_in_no_smaller_attempt_at_it(n, colluding):
    """t of N members release shares: the server has the sum of N. The others have released nothing and would,
    with forgetful colluders to fill up the schedule, give a second sum over their updates alone."""
    first = Parties(n).play(until="unmask")
    t = first.setting.t
    first.collect(first.names[:t])
    first.server.advance()
    assert first.server.result.included == first.names
    with refused(RefusedError, stage="setting"):
        replace(first.setting, attempt=1, members=first.names[-3:])
    members = first.names[-t:]  # the smallest there may be
    released = {name: Released.load(first.clients[name].released.dump()) for name in members}
    released |= {name: Released() for name in members[:colluding]}
    clients, shown, updates = attempt_of(first, members, released)
    for name in first.names[t:]:
        with refused(RefusedError, stage="masked", member=name):
            clients[name].masked(shown[name], updates[name])
        assert clients[name].stage == "stopped"


def test_who_masked_in_a_round_takes_part_in_no_attempt_with_another_threshold_or_order():
    first = Parties(5).play(until="check")  # t = 4
    kept = {name: Released.load(client.released.dump()) for name, client in first.clients.items()}
    for members, threshold in ((first.names, 3), (first.names, 5), (first.names[::-1], None)):
        clients, shown, updates = attempt_of(first, members, kept, threshold)
        with refused(RefusedError, stage="masked", member=A):
            clients[A].masked(shown[A], updates[A])
    clients, shown, updates = attempt_of(first, first.names, kept, 4)
    assert clients[A].masked(shown[A], updates[A])  # the default, spelt out


def test_before_masking_and_in_the_next_round_any_schedule_will_do():
    first = Parties(5).play(until="masked")
    kept = {name: client.released for name, client in first.clients.items()}
    clients, shown, updates = attempt_of(first, first.names[:4], kept)
    assert clients[A].masked(shown[A], updates[A])
    later = Parties(5, round=2, threshold=5, keys=first.keys, released=kept).play(until="check")
    assert later.clients[A].stage == "check"


# ---------------------------------------------------------------------------------------- public weights


@pytest.mark.parametrize("public", [(1.0, 0.0, 0.0, 0.0), (1.0, 2.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1e-9)])
def test_members_without_a_weight_do_not_make_a_sum_large_enough(public):
    parties = Parties(4, public=public).play(until="masked")
    shown = parties.collect()
    with refused(RoundAborted, stage="masked"):
        parties.server.advance()
    assert parties.server.stage == "aborted"
    for name in parties.names:  # whatever the server thinks
        with refused(RoundAborted, stage="check"):
            parties.clients[name].check(shown)
        assert parties.clients[name].stage == "stopped"


def test_the_weights_of_those_in_the_sum_count_not_of_those_scheduled():
    public = (1.0, 2.0, 3.0, 0.0)
    assert Parties(4, public=public).play().server.result.total_weight == 6
    assert Parties(4, public=public).play(lost=[("masked", D)]).server.result.total_weight == 6
    lossy = Parties(4, public=public)
    with refused(RoundAborted, stage="masked"):
        lossy.play(lost=[("masked", C)])
    whole = Parties(4, public=public).play(until="check")
    without = to_broadcast("masked", [head for i, head in enumerate(heads_in(whole.shown[A])) if i != 2])
    with refused(RoundAborted, stage="check"):
        whole.clients[A].check(without)


@pytest.mark.parametrize(
    "weights",
    [
        *[(1.0, 2.0, bad) for bad in (-1.0, np.nan, np.inf, 3.5, "1", None, True, 10**400)],
        *[None, (1.0,), (1.0, 2.0), (1.0,) * 4],
    ],
)
def test_public_weights_are_numbers_from_0_to_the_cap_of_everybody_scheduled(weights):
    encoding = Encoding(LENGTH, 3, 1.0, "public", 3.0)
    with refused(BindingError, stage="masked"):
        Task(M0, encoding, weights and dict(zip(names_of(4), weights, strict=False)))
    good = dict(zip(names_of(3), (np.float32(1), 2, np.int64(0)), strict=False))
    assert Task(M0, encoding, good).weights == {A: 1.0, B: 2.0, C: 0.0}


def test_a_task_is_for_as_many_members_as_are_scheduled():
    with refused(BindingError, stage="masked"):
        Server(Parties(4).setting, Task(M0, Encoding(LENGTH, 3, 1.0)))
    weights = dict.fromkeys((A, B, D, C), 1.0)
    with refused(BindingError, stage="masked"):  # those of others, or in another order
        Server(Parties(4).setting, Task(M0, Encoding(LENGTH, 4, 1.0, "public", 1.0), weights))


# ------------------------------------------------------------------------------------------- the threshold
# It is one of the roster: whomever a server schedules, it needs as many colluders.


def two_views(parties, colluding):
    """What a server and its colluders get of the last member's secrets: shares by place, by kind.

    It shows one half of the honest members a list of masked inputs with the victim, who gives shares of its
    self-mask seed, and the other half one without, which gives shares of its mask key. Colluders sign both.
    """
    parties.play(until="check")
    victim, bad, honest = parties.names[-1], parties.names[:colluding], parties.names[colluding:]
    real, half = heads_in(parties.server.broadcasts["masked"]), len(honest) // 2
    lists = {"seed": to_broadcast("masked", real), "key": to_broadcast("masked", real[:-1])}
    place, got = parties.names.index, {}
    for (kind, shown), group in zip(lists.items(), (honest[-half:], honest[:-half]), strict=True):
        signed = {name: parties.forge(name, "check", [], seen=seen_in(shown)) for name in bad}
        signed |= {name: parties.clients[name].check(shown) for name in group}
        together = to_broadcast("check", [head_of(signed[name]) for name in parties.names if name in signed])
        got[kind] = {place(name): parties.clients[name]._state.shares[victim][kind == "seed"] for name in bad}
        for name in group:
            with suppress(RoundAborted):
                (rows,) = body_of(parties, parties.clients[name].unmask(together))
                own = (share for at, said, share in rows if (at, said) == (place(victim), kind))
                got[kind][place(name)] = next(own)
    return got


def unmasked(parties, colluding):
    """What a server and its colluders find out of the update of the last member, alone."""
    secrets = {
        kind: masks.combine_shares(shares, parties.setting.t)
        for kind, shares in two_views(parties, colluding).items()
    }
    victim, setting = parties.names[-1], parties.setting
    words, binding = masks.from_wire(parties.payload(victim), 4).copy(), parties.task.binding(setting)
    peers = {name: head.body.mask for name, head in parties.server.heads["advertise"].items()}
    own = masks.of_member(setting, victim, secrets["key"], secrets["seed"], peers, binding)
    masks.add_masks(words, [(key, -sign) for key, sign in own])
    return parties.encoding.dequantise(words)


@pytest.mark.parametrize(("colluding", "kinds"), [(2, 0), (3, 0), (4, 1), (5, 2)])
def test_two_survivor_lists_need_more_colluders_than_n_minus_t(colluding, kinds):
    """To get both kinds of share takes 2t - N = 5 of them, more than N - t = 2."""
    got = two_views(Parties(9), colluding)
    assert sum(len(shares) > colluding for shares in got.values()) == kinds


def test_the_attack_is_one_where_members_agree_to_a_low_threshold():
    """t = 6 of 10: two colluders are enough for two views, as the setting's note says."""
    parties = Parties(10, threshold=6)
    (note,) = what_to_know(10, 6, 10)
    assert "2 members and the server together can unmask a third party" in note
    found = unmasked(parties, 2)
    assert np.abs(found - parties.vectors[parties.names[-1]]).max() <= parties.encoding.step


@pytest.mark.parametrize(
    ("on_roster", "scheduled"),
    [(10, 7), (10, 8), (10, 10), (10, 6), (12, 9), (12, 7), (9, 7), (9, 5), (7, 5), (6, 5), (4, 3)],
)
def test_a_server_that_schedules_few_needs_no_fewer_colluders(on_roster, scheduled):
    """Of a roster of 10 it schedules 7, all 3 colluders among them: a threshold of 5 would be theirs."""
    colluding = on_roster - default_threshold(on_roster)
    with pytest.raises(ProtocolError) as error:
        unmasked(Parties(scheduled, others=on_roster - scheduled), colluding)
    assert "are needed" in str(error.value)


@given(
    on_roster=st.integers(3, 60),
    scheduled=st.integers(3, 60),
    threshold=st.none() | st.integers(1, 60),
)
def test_every_setting_keeps_the_bounds_of_the_whole_roster(on_roster, scheduled, threshold):
    names = [f"m{i}" for i in range(on_roster)]
    roster = Roster(Member(name, hashlib.sha256(name.encode()).digest()) for name in names)
    try:
        setting = Setting("run", 1, 0, names[:scheduled], roster, CONFIG, threshold)
    except RefusedError:
        t = default_threshold(on_roster) if threshold is None else threshold
        assert not on_roster / 2 < t <= min(on_roster, scheduled)
        return
    t, n = setting.t, setting.n
    assert t == (threshold or 2 * on_roster // 3 + 1)
    c = setting.tolerated
    assert c < 2 * t - n  # two views of this schedule need more
    assert 2 * (t - c) > on_roster - c  # and so do two schedules of one round
    assert t - c >= 2 * t - on_roster >= 1  # honest members in the smallest sum
    if threshold is None:
        assert c == on_roster - t
        assert t - c >= 2


def test_whoever_is_not_scheduled_counts_as_lost():
    """9 on the roster, t = 7: with one not scheduled, one may be lost; with two, nobody."""
    for others, may_be_lost in ((0, 2), (1, 1), (2, 0)):
        names = names_of(9 - others)
        lost = [("masked", name) for name in names[:may_be_lost]]
        assert (
            Parties(9 - others, others=others).play(lost=lost).server.result.included == names[may_be_lost:]
        )
        with pytest.raises(ProtocolError, match="7 are needed"):
            Parties(9 - others, others=others).play(lost=[*lost, ("masked", names[may_be_lost])])
