"""The protocol when nobody attacks: exact sums, members that leave, clients saved and restored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parties import Parties

from fedmerit import secagg
from fedmerit.errors import BindingError, BoundError, ConfigError, MessageError, RefusedError, RoundAborted
from fedmerit.secagg import STAGES, Client, Encoding, Released, Server, Setting, Update, run_in_memory


def words_of(parties, name):
    update = parties.update(name)
    return parties.encoding.encode(update.delta, weight=update.weight, seed=update.seed).words


@pytest.mark.parametrize("kind", ["uniform", "secret", "public"])
def test_the_masked_sum_is_the_plain_sum_of_the_same_integers_bit_for_bit(kind):
    weights = {
        "uniform": {},
        "secret": {"weights": [10, 20, 3, 7, 9]},
        "public": {"public": (1.0, 0.5, 0.0, 2.0, 3.0)},
    }
    parties = Parties(5, **weights[kind]).play(lost=[("masked", "hospital-b")])
    included = tuple(name for name in parties.names if name != "hospital-b")
    plain = np.zeros(parties.encoding.words, np.uint32)
    for name in included:
        plain += words_of(parties, name)
    total = sum(parties.public[i] for i in (0, 2, 3, 4)) if kind == "public" else None
    expected = parties.encoding.decode(plain, included=4, public_total=total)
    result = parties.server.result
    assert result.included == included
    assert result.total_weight == expected.total_weight
    assert np.array_equal(result.mean, expected.mean)
    assert result.mean == pytest.approx(parties.plain_mean(included), abs=4 * parties.encoding.step)


@pytest.mark.parametrize("stage", STAGES)
def test_one_member_can_leave_at_any_stage(stage):
    parties = Parties(4).play(lost=[(stage, "hospital-c")])
    included = parties.names if stage in ("check", "unmask") else ("hospital-a", "hospital-b", "hospital-d")
    assert parties.server.result.included == included
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(included), abs=1e-8)


@pytest.mark.parametrize("stage", STAGES)
def test_too_few_members_abort_cleanly(stage):
    parties = Parties(4)
    with pytest.raises(RoundAborted, match="2 members left, 3 are needed") as error:
        parties.play(lost=[(stage, "hospital-a"), (stage, "hospital-c")])
    assert error.value.stage == stage
    assert parties.server.stage == "aborted"
    assert parties.server.result is None
    assert parties.server.waiting == ()


@pytest.mark.parametrize(("n", "survived"), [(3, 0), (4, 1), (5, 1), (6, 1), (7, 2), (8, 2), (9, 2), (12, 3)])
def test_losses_survived(n, survived):
    vectors = np.random.default_rng(n).uniform(-1, 1, (n, 3))
    run = run_in_memory(vectors, lost={"masked": range(survived)})
    assert run.included == tuple(range(survived, n))
    with pytest.raises(RoundAborted):
        run_in_memory(vectors, lost={"masked": range(survived + 1)})


def test_a_decline_is_all_the_server_learns_and_the_others_go_on():
    parties = Parties(4).play(until="masked")
    parties.vectors["hospital-b"][3] = 7.5
    with pytest.raises(BoundError, match=r"1 of 20 .* the largest is 7\.5") as error:
        parties.answer("hospital-b")
    assert (error.value.stage, error.value.member) == ("masked", "hospital-b")
    message = parties.clients["hospital-b"].decline()
    assert b"7.5" not in message
    assert len(message) < 350
    assert parties.server.receive(message) == "hospital-b"
    for name in ("hospital-a", "hospital-c", "hospital-d"):
        parties.server.receive(parties.answer(name))
    parties.shown = parties.server.advance()
    parties.play()
    assert parties.server.declined == ["hospital-b"]
    assert parties.server.result.included == ("hospital-a", "hospital-c", "hospital-d")


def test_clips_are_counted_for_the_member():
    parties = Parties(3).play(until="masked")
    clipping = Encoding(parties.length, 3, 0.5, clip=True)
    task = secagg.Task(parties.task.m0_hash, clipping)
    client = parties.clients["hospital-a"]
    client.masked(parties.shown["hospital-a"], Update(task, parties.vectors["hospital-a"]))
    assert Client.restore(client.dump(), parties.identity["hospital-a"]).clipped == client.clipped
    assert client.clipped == np.count_nonzero(np.abs(parties.vectors["hospital-a"]) > 0.5) > 0


def test_keys_can_be_advertised_before_the_round_and_its_model_are_known():
    parties = Parties(4)
    early = [client.advertise() for client in parties.clients.values()]
    server = Server(parties.setting)  # no task yet
    for message in early:
        server.receive(message)
    parties.server, parties.shown = server, server.advance()
    server.begin(parties.task)
    assert parties.play().server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-8)
    with pytest.raises(BindingError, match="given once"):
        server.begin(parties.task)


def test_every_client_can_be_saved_and_restored_between_any_two_messages():
    parties = Parties(4, weights=[3, 1, 4, 1])
    for stage in STAGES:
        for name in parties.names:
            kept = parties.clients[name].dump(), parties.clients[name].released.dump()
            parties.clients[name] = Client.restore(
                kept[0], parties.identity[name], released=Released.load(kept[1])
            )
        parties.play(until=STAGES[STAGES.index(stage) + 1] if stage != "unmask" else None)
    assert parties.server.result.mean == pytest.approx(parties.plain_mean(), abs=1e-7)
    name = "hospital-a"
    again = Client.restore(parties.clients[name].dump(), parties.identity[name])
    assert again.opening() == parties.clients[name].opening()
    assert again.survivors == parties.names
    assert again.stage == "done"


def test_saved_state_of_a_public_weight_round_is_restored():
    parties = Parties(3, public=(1.0, 2.0, 0.5)).play(until="check")
    for name in parties.names:
        parties.clients[name] = Client.restore(parties.clients[name].dump(), parties.identity[name])
    assert parties.play().server.result.total_weight == 3.5


def test_a_damaged_or_foreign_dump_is_refused():
    parties = Parties(3)
    data = parties.clients["hospital-a"].dump()
    for bad in (b"", data[:-1], data[:40] + b"\xff" + data[41:], bytes(100)):
        with pytest.raises(MessageError):
            Client.restore(bad, parties.identity["hospital-a"])
    with pytest.raises(BindingError, match="not the one on the roster"):
        Client.restore(data, parties.identity["hospital-b"])


def test_after_forget_nothing_is_left_to_open():
    parties = Parties(3).play()
    client = parties.clients["hospital-a"]
    secret = client.opening()
    client.forget()
    for value in (secret.mask, secret.seed, secret.rounding):
        assert value not in client.dump()
    with pytest.raises(BindingError, match="nothing to open"):
        client.opening()
    with pytest.raises(RefusedError, match="secrets were deleted"):
        client.advertise()


def test_settings_say_what_is_risky_and_refuse_what_is_unsafe():
    parties = Parties(3)
    assert "3 members" in parties.setting.notes[0]
    assert Parties(4).setting.notes == ()
    assert "threshold 5 of 9: 1 members and the server" in Parties(9, threshold=5).setting.notes[0]
    for threshold in (0, 2, 5, 2.5, "3", True, np.float64(3)):
        with pytest.raises(RefusedError, match="threshold"):
            Parties(4, threshold=threshold)
    with pytest.raises(RefusedError, match="a sum of two"):
        Parties(2)


def test_numbers_of_numpy_are_numbers():
    base = Parties(4)
    setting = replace(base.setting, threshold=np.int64(3), round=np.int32(1), attempt=np.uint8(0))
    assert setting.session == base.setting.session
    encoding = Encoding(np.int64(3), np.int32(4), np.float32(1.0))
    assert encoding == Encoding(3, 4, 1.0)
    client = Client(setting, "hospital-a", base.identity["hospital-a"])
    client._state.task = secagg.Task(base.task.m0_hash, encoding)
    assert Client.restore(client.dump(), base.identity["hospital-a"]).setting == setting


@pytest.mark.parametrize(
    "change",
    [
        {"run": ""},
        {"run": "\ud800"},
        {"run": "a\nb"},
        {"run": 5},
        {"run": "x" * 129},
        {"round": -1},
        {"round": 1.0},
        {"attempt": "0"},
        {"attempt": True},
        {"config_hash": "c" * 32},
        {"config_hash": None},
        {"members": None},
        {"members": "hospital-a"},
        {"members": (1, 2, 3)},
    ],
)
def test_settings_of_the_wrong_type_are_refused(change):
    with pytest.raises(BindingError) as error:
        replace(Parties(3).setting, **change)
    assert error.value.stage == "setting"


def test_an_error_on_ones_own_side_stops_the_client_and_is_called_that(monkeypatch):
    parties = Parties(4).play(until="masked")
    client = parties.clients["hospital-b"]
    with monkeypatch.context() as patch:
        patch.setattr("fedmerit.secagg.masks.add_masks", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            parties.answer("hospital-b")
    assert client.stage == "stopped"
    for again in (lambda: parties.answer("hospital-b"), client.handle):
        with pytest.raises(
            RefusedError, match="has stopped: failed on its own side in stage masked: MemoryError"
        ) as error:
            again()
        assert (error.value.stage, error.value.member) == ("masked", "hospital-b")
    assert parties.server.receive(client.decline()) == "hospital-b"


@pytest.mark.parametrize("seed", ["text", 1.5, [1]])
def test_a_seed_is_a_number_or_bytes(seed):
    parties = Parties(3)
    with pytest.raises(ConfigError, match="a seed must be"):
        Update(parties.task, parties.vectors["hospital-a"], None, seed)


def test_a_schedule_has_no_duplicates_and_no_strangers():
    base = Parties(3).setting
    with pytest.raises(BindingError, match="member hospital-a: scheduled twice"):
        Setting("run", 1, 0, (*base.members, "hospital-a"), base.roster, base.config_hash)
    with pytest.raises(BindingError, match="member nobody: scheduled but not on the roster"):
        Setting("run", 1, 0, (*base.members, "nobody"), base.roster, base.config_hash)
    with pytest.raises(BindingError, match="not scheduled"):
        Client(base, "nobody", Parties(3).keys[0])


def test_the_schedule_counts_not_who_answers():
    # 7 of 9 needed even if only 7 are heard from at all: the threshold never shrinks with the absent
    parties = Parties(9)
    with pytest.raises(RoundAborted):
        parties.play(lost=[("advertise", name) for name in parties.names[:3]])


def test_public_names_are_importable_and_others_are_not():
    assert secagg.__all__ == sorted(
        secagg.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    for name in secagg.__all__:
        assert getattr(secagg, name).__module__.startswith("fedmerit.secagg") if name != "STAGES" else STAGES
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        secagg.nonsense  # noqa: B018
