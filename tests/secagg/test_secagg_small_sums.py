"""No sum that is too small, and no second sum over the same updates that would make a difference small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parties import LENGTH, M0, A, B, C, D, Parties, caught, head_of, heads_in

from fedmerit.errors import BindingError, RefusedError, RoundAborted
from fedmerit.secagg import Client, Encoding, Released, Server, Task, Update
from fedmerit.secagg.messages import to_broadcast


def test_a_sum_of_two_is_refused_by_members_and_server():
    parties = Parties(3, threshold=2).play(until="masked")
    for name in (A, B):
        parties.sent["masked"][name] = parties.answer(name)
        parties.server.receive(parties.sent["masked"][name])
    with pytest.raises(RoundAborted, match="3 are needed"):
        parties.server.advance()
    two = to_broadcast("masked", [head_of(parties.sent["masked"][name]) for name in (A, B)])
    with pytest.raises(RoundAborted, match="3 are needed"):
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
    for name in first.names[:t]:
        first.server.receive(first.answer(name))
    first.server.advance()
    assert first.server.result.included == first.names
    with pytest.raises(RefusedError, match=f"3 members scheduled, {t} of the {n} on the roster are needed"):
        replace(first.setting, attempt=1, members=first.names[-3:])
    members = first.names[-t:]  # the smallest there may be
    released = {name: Released.load(first.clients[name].released.dump()) for name in members}
    released |= {name: Released() for name in members[:colluding]}
    clients, shown, updates = attempt_of(first, members, released)
    for name in first.names[t:]:
        with pytest.raises(RefusedError, match="another schedule or threshold") as error:
            clients[name].masked(shown[name], updates[name])
        caught(error, RefusedError, "masked", name)
        assert clients[name].stage == "stopped"


def test_who_masked_in_a_round_takes_part_in_no_attempt_with_another_threshold_or_order():
    first = Parties(5).play(until="check")  # t = 4
    kept = {name: Released.load(client.released.dump()) for name, client in first.clients.items()}
    for members, threshold in ((first.names, 3), (first.names, 5), (first.names[::-1], None)):
        clients, shown, updates = attempt_of(first, members, kept, threshold)
        with pytest.raises(RefusedError, match="another schedule or threshold"):
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
    for name in parties.names:
        parties.sent["masked"][name] = parties.answer(name)
        parties.server.receive(parties.sent["masked"][name])
    shown = to_broadcast("masked", [head_of(parties.sent["masked"][name]) for name in parties.names])
    with pytest.raises(RoundAborted, match="with a weight above 0 in the sum, 3 are needed") as error:
        parties.server.advance()
    assert error.value.stage == "masked"
    assert parties.server.stage == "aborted"
    for name in parties.names:  # whatever the server thinks
        with pytest.raises(RoundAborted, match="with a weight above 0 in the sum, 3 are needed") as error:
            parties.clients[name].check(shown)
        assert error.value.stage == "check"
        assert parties.clients[name].stage == "stopped"


def test_the_weights_of_those_in_the_sum_count_not_of_those_scheduled():
    public = (1.0, 2.0, 3.0, 0.0)
    assert Parties(4, public=public).play().server.result.total_weight == 6
    assert Parties(4, public=public).play(lost=[("masked", D)]).server.result.total_weight == 6
    lossy = Parties(4, public=public)
    with pytest.raises(RoundAborted, match="2 members with a weight above 0"):
        lossy.play(lost=[("masked", C)])
    whole = Parties(4, public=public).play(until="check")
    without = to_broadcast("masked", [head for i, head in enumerate(heads_in(whole.shown[A])) if i != 2])
    with pytest.raises(RoundAborted, match="2 members with a weight above 0"):
        whole.clients[A].check(without)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, 3.5, "1", None, True, 10**400])
def test_a_public_weight_is_a_number_from_0_to_the_cap(bad):
    encoding = Encoding(LENGTH, 3, 1.0, "public", 3.0)
    with pytest.raises(BindingError, match="public weights must be numbers from 0 to the cap 3"):
        Task(M0, encoding, (1.0, 2.0, bad))
    assert Task(M0, encoding, (np.float32(1), 2, np.int64(0))).weights == (1.0, 2.0, 0.0)
