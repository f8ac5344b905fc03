"""How many must stay to the end of a round follows from all members, in every engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit import settings as sections
from fedmerit.config import from_dict, recorded_hash, written
from fedmerit.errors import ConfigError, LedgerError, MessageError, RefusedError
from fedmerit.identity import Member, Roster
from fedmerit.ledger.chain import Ledger
from fedmerit.protocol import terms
from fedmerit.protocol.terms import Agreed, cautious, config_in, everybody, least_scheduled
from fedmerit.secagg import setting as secagg_setting
from fedmerit.simulation import setup
from fedmerit.simulation.run import run
from fedmerit.verify import verify_folder
from raising import raises
from runs import rounds_of
from tiny import TINY, losing, tiny

NINE = ("partition.clients=9", f"partition.sizes={[20] * 9}", "training.rounds=1")


def rounds_in(folder):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return rounds_of(ledger)


@pytest.mark.parametrize("enabled", ["true", "false"])
@pytest.mark.parametrize(
    ("away", "lost", "aborted"),
    [
        ([], ["client-1", "client-2"], ""),
        (["client-0"], ["client-1"], ""),
        (["client-0", "client-3"], [], ""),
        (["client-0"], ["client-1", "client-2"], "stage masked: 6 members left, 7 are needed"),
        (["client-0", "client-3"], ["client-1"], "stage masked: 6 members left, 7 are needed"),
        (
            ["client-0", "client-3", "client-4"],
            [],
            "6 scheduled, at least 7 of the 9 members are needed",
        ),
    ],
)
def test_whoever_is_away_counts_as_lost_with_masks_and_without(tmp_path, enabled, away, lost, aborted):
    config = tiny(
        *NINE,
        f"participation.away={written({name: [1] for name in away})}",
        f"secure_aggregation.enabled={enabled}",
    )
    with losing(dict.fromkeys(lost, "1:masked")):
        run(config, tmp_path / "run")
    (one,) = rounds_in(tmp_path / "run")
    assert one.aborted == aborted
    assert len(one.included) == (0 if aborted else 9 - len(away) - len(lost))
    assert list(verify_folder(tmp_path / "run"))


def test_a_run_with_sums_below_the_threshold_does_not_verify(tmp_path, monkeypatch):
    """As a server would record it that did not care."""
    old = {**TINY, "partition": {"clients": 6, "scheme": "sizes", "sizes": [30] * 6}}
    old |= {"participation": {"fraction": 0.67}, "secure_aggregation": {"enabled": False}}
    config = from_dict(old)
    with monkeypatch.context() as then:
        then.setattr(sections, "default_threshold", lambda members: 4)
        then.setattr(setup, "check_schedule", lambda config: None)
        then.setattr(terms, "check_schedule", lambda config: None)
        then.setattr(secagg_setting, "default_threshold", lambda members: 4)
        run(config, tmp_path / "run")
    terms._settings.cache_clear()
    assert [len(one.included) for one in rounds_in(tmp_path / "run")] == [4, 4]
    with pytest.raises(LedgerError, match="sums 4 members, but at least 5"):
        list(verify_folder(tmp_path / "run"))
    with raises(ConfigError, setting="participation.fraction"):
        run(config, tmp_path / "run", resume=True)


def test_a_member_does_not_join_where_rounds_are_too_small_whatever_it_accepts():
    proposed = {"config": "[partition]\nclients = 6\n[participation]\nfraction = 0.5\n"}
    with pytest.raises(MessageError, match=r"the server's settings cannot be read: .*\.fraction: expected"):
        config_in(proposed)


@given(members=st.integers(3, 40), scheduled=st.integers(3, 40), fewer=st.integers(0, 20))
def test_between_machines_it_is_the_rosters_whatever_the_server_schedules(members, scheduled, fewer):
    names = [f"m{i}" for i in range(members)]
    roster = Roster(Member(name, bytes([i + 1]) * 32) for i, name in enumerate(names))
    usual = 2 * members // 3 + 1
    threshold = 0 if fewer == 0 else max(members // 2 + 1, usual - fewer)
    text = f"[partition]\nnames = {names}\n[secure_aggregation]\nthreshold = {threshold}\n"
    config = from_dict({"partition": {"names": names}, "secure_aggregation": {"threshold": threshold}})
    agreed = Agreed({"config": text, "config_hash": recorded_hash(text)}, {}, bytes(32))
    t = threshold or usual
    assert least_scheduled(config) == max(3, t)
    for accept in (cautious, everybody):
        if t < usual:
            with pytest.raises(RefusedError, match=f"asked for a threshold of {t} of {members} members"):
                accept(config)
    scheduled = min(scheduled, members)
    if scheduled < t:
        with pytest.raises(RefusedError, match=f"{t} of the {members} on the roster are needed"):
            agreed.setting("run", 1, names[:scheduled], roster)
    else:
        assert agreed.setting("run", 1, names[:scheduled], roster).t == t
