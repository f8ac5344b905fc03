"""The threshold is one of the roster: whomever a server schedules, it needs as many colluders."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parties import CONFIG, Parties, body_of, head_of, heads_in, names_of, seen_in

from fedmerit.errors import ProtocolError, RefusedError
from fedmerit.identity import Member, Roster
from fedmerit.secagg import Setting, default_threshold, masks
from fedmerit.secagg.messages import open_message, to_broadcast


def unmasked(parties, colluding):
    """What a server and its colluders find out of the update of the last member, alone.

    It shows one half of the honest members a list of masked inputs with the victim, who gives shares of its
    self-mask seed, and the other half one without, which gives shares of its mask key. Colluders sign both.
    """
    parties.play(until="check")
    setting, victim = parties.setting, parties.names[-1]
    place, bad = setting.members.index(victim), parties.names[:colluding]
    real = heads_in(parties.server.broadcasts["masked"])
    honest = parties.names[colluding:]
    half = len(honest) // 2
    lists = {"seed": to_broadcast("masked", real), "key": to_broadcast("masked", real[:-1])}
    secrets = {}
    for (kind, shown), group in zip(lists.items(), (honest[-half:], honest[:-half]), strict=True):
        seen = seen_in(shown)
        signed = {name: parties.forge(name, "check", [], seen=seen) for name in bad}
        signed |= {name: parties.clients[name].check(shown) for name in group}
        together = to_broadcast("check", [head_of(signed[name]) for name in parties.names if name in signed])
        shares = {name: parties.clients[name]._state.shares[victim][kind == "seed"] for name in bad}
        for name in group:
            rows = body_of(parties, parties.clients[name].unmask(together))
            shares[name] = next(share for at, said, share in rows if (at, said) == (place, kind))
        by_place = {setting.members.index(name): share for name, share in shares.items()}
        secrets[kind] = masks.combine_shares(by_place, setting.t)
    payload = open_message(parties.sent["masked"][victim], setting, 4 * parties.length)[1]
    words, binding = masks.from_wire(payload, 4).copy(), parties.task.binding(setting)
    peers = {name: head.body[0] for name, head in parties.server.heads["advertise"].items()}
    own = masks.of_member(setting, victim, secrets["key"], secrets["seed"], peers, binding)
    masks.add_masks(words, [(key, -sign) for key, sign in own])
    return parties.encoding.dequantise(words)


def test_the_attack_is_one_where_members_agree_to_a_low_threshold():
    """t = 6 of 10: two colluders are enough for two views, as the setting's note says."""
    parties = Parties(10, threshold=6)
    assert "2 members and the server together can unmask a third party" in parties.setting.notes[0]
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
    checked=st.booleans(),
)
def test_every_setting_keeps_the_bounds_of_the_whole_roster(on_roster, scheduled, threshold, checked):
    names = [f"m{i}" for i in range(on_roster)]
    roster = Roster(Member(name, hashlib.sha256(name.encode()).digest()) for name in names)
    try:
        setting = Setting("run", 1, 0, names[:scheduled], roster, CONFIG, threshold, checked)
    except RefusedError:
        t = default_threshold(on_roster) if threshold is None else threshold
        assert not on_roster / 2 < t <= min(on_roster, scheduled)
        return
    t, n = setting.t, setting.n
    assert t == (threshold or 2 * on_roster // 3 + 1)
    c = setting.tolerated
    if not checked:
        assert c == 0
        return
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
