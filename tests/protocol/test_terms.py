"""What members agree to: settings that stay as they were, thresholds, and versions of the package."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit import settings as sections
from fedmerit.config import VERSION, from_dict, recorded_hash, written
from fedmerit.errors import ConfigError, LedgerError, MessageError, RefusedError, VersionError
from fedmerit.identity import Member, Roster, read_roster
from fedmerit.protocol import messages, terms
from fedmerit.protocol.memory import packed, unpacked
from fedmerit.protocol.messages import FORMAT, PROTOCOL, Ask, Parcel, pack
from fedmerit.protocol.terms import (
    MONTH,
    RUNS_A_MONTH,
    Agreed,
    Lineage,
    cautious,
    config_in,
    everybody,
    least_scheduled,
    pinned,
)
from fedmerit.secagg import setting as secagg_setting
from fedmerit.simulation import setup
from fedmerit.simulation.run import run
from fedmerit.storage.member_state import allow
from fedmerit.verify import verify_folder
from linear_federation import LIAR, Federation
from raising import raises
from refusals import refused
from runs import rounds_in
from states import opened
from tiny import TINY, losing, tiny


def run_again(home, number, *, settings=None, change=None, **options):
    """One round in another run of the same members, on the same machines; returns the federation."""
    made = Federation(home, rounds=1, files=True, ledger=False, settings=settings, **options)
    made.run_id = f"{number:032x}"
    made.train = lambda name, _, m0: (change or made.linear)(name, number, m0)
    with made.begun():
        joined = [one.member for one in made.passed if one.ask.exchange == "join" and one.error is None]
        if len(joined) >= 3:
            made.round(1, joined)
    return made


def refusals(federation):
    return {one.member: str(one.error) for one in federation.passed if one.error is not None}


# ----------------------------------------------------------------------------- a server that varies the bound

LARGEST = 0.7312068


def jump(name, number, m0):
    """Return an update whose largest coordinate a server would like to know; never twice the same."""
    coordinates = np.eye(12, dtype=np.float32)
    return (LARGEST if name == LIAR else 0.01) * coordinates[3] + np.float32(1e-5 * number) * coordinates[4]


def bracket(home, runs):
    """What a server reads of one member's largest coordinate, by who declines under which bound."""
    low, high, first = 0.0, 4.0, None
    for number in range(runs):
        bound = high if number == 0 else (low + high) / 2
        made = run_again(home, number, settings={"secure_aggregation": {"bound": bound}}, change=jump)
        asked = [one for one in made.passed if one.member == LIAR and one.ask.exchange == "train"]
        if asked and made.rounds:  # it took part: it masked, or it declined
            low, high = (low, bound) if LIAR in made.rounds[0].included else (bound, high)
        first = first or (low, high)
    return first, (low, high)


def test_a_server_that_varies_the_bound_reads_nothing_more(tmp_path):
    """Without pins, 22 runs gave it the largest coordinate of an update to five digits."""
    first, last = bracket(tmp_path, 22)
    assert first == last == (0.0, 4.0)


# ------------------------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"secure_aggregation": {"bound": 3.0}}, "bound = 3, but the runs of this roster have bound = 4"),
        (
            {"secure_aggregation": {"threshold": 4}},
            "threshold = 4, but the runs of this roster have threshold = 0",
        ),
        (
            {"training": {"weights": "secret"}},
            "weights = secret, but the runs of this roster have weights = uniform",
        ),
    ],
)
def test_a_setting_that_differs_from_earlier_runs_is_refused_with_the_command_that_allows_it(
    tmp_path, caplog, settings, told
):
    assert len(run_again(tmp_path, 1).rounds) == 1
    made = run_again(tmp_path, 2, settings=settings)
    assert {name: told in text for name, text in refusals(made).items()} == dict.fromkeys(made.names, True)
    name = told.partition(" ")[0]
    command = f"fedmerit member allow KEY {name}="
    assert all(command in text for text in refusals(made).values())
    assert command in caplog.text  # its owner reads it too
    value = refusals(made)[LIAR].rpartition("=")[2]
    for member in made.names:
        allow(tmp_path / f"{member}.pem", {name: value})
    assert len(run_again(tmp_path, 3, settings=settings).rounds) == 1
    assert told.partition(" ")[0] in refusals(run_again(tmp_path, 4))[LIAR]  # and now back is refused


def test_the_cap_of_secret_weights_is_pinned_and_said_to_matter(tmp_path, caplog):
    secret = {"training": {"weights": "secret"}}
    assert len(run_again(tmp_path, 1, settings=secret).rounds) == 1
    assert caplog.text.count("this run weighs members by their numbers of samples") == 4
    made = run_again(tmp_path, 2, settings={"training": {"weights": "secret", "weight_cap": 60}})
    assert "weight_cap = 60, but the runs of this roster have weight_cap = 100000" in refusals(made)[LIAR]


def test_defaults_and_the_same_sizes_in_numbers_are_one():
    members = {"partition": {"names": list("ABCD")}}
    stated = from_dict({**members, "secure_aggregation": {"threshold": 3}})
    assert pinned(stated) == pinned(from_dict(members))
    assert pinned(from_dict({**members, "training": {"weights": "secret"}}))["weight_cap"] == 100_000
    weighed = {"weights": dict.fromkeys("ABCD", 2.0)}
    assert pinned(from_dict({**members, "training": weighed}))["weights"] == "roster"


def test_settings_are_pinned_by_training_not_by_an_invitation(tmp_path):
    """An invitation that comes to nothing does not decide what a member agrees to later."""
    made = Federation(
        tmp_path, rounds=1, files=True, ledger=False, settings={"secure_aggregation": {"bound": 1.0}}
    )
    with made.begun():
        pass  # all have joined, and nothing came of it
    assert opened(tmp_path / f"{LIAR}.pem").content.known.lineages == {}
    assert len(run_again(tmp_path, 2).rounds) == 1
    with made.begun():  # the first one goes on after all
        assert made.round(1) is None
    assert not any(
        one.ask.exchange == "train" and one.error is None and len(one.answer) > 400 for one in made.passed
    )


# -------------------------------------------------------------------------------------------------- the month


def test_a_member_trains_in_so_many_runs_a_month(tmp_path, monkeypatch):
    now = [1e9]
    monkeypatch.setattr("fedmerit.protocol.member.time.time", lambda: now[0])
    for member in Federation(tmp_path, files=True).names:
        allow(tmp_path / f"{member}.pem", {"runs": "2"}, read_roster(tmp_path / "roster.toml"))
    assert [len(run_again(tmp_path, number).rounds) for number in (1, 2)] == [1, 1]
    made = run_again(tmp_path, 3)
    assert (
        "has trained in 2 runs of this roster within 30 days, and does so in at most 2"
        in refusals(made)[LIAR]
    )
    assert "fedmerit member allow KEY runs=4" in refusals(made)[LIAR]
    now[0] += MONTH + 1
    assert len(run_again(tmp_path, 4).rounds) == 1


def test_runs_are_counted_once_and_forgotten_after_a_month():
    config, lineage = from_dict({"partition": {"names": list("ABCD")}}), Lineage()
    for number in range(RUNS_A_MONTH):
        for _ in range(2):  # every round of it
            lineage.check(str(number), config, 1000.0 + number)
            lineage.begin(str(number), config, 1000.0 + number)
    lineage.check("0", config, 2000.0)  # this one goes on
    with pytest.raises(RefusedError):
        lineage.check("other", config, 2000.0)
    lineage.check("other", config, 1001.0 + MONTH)
    lineage.begin("other", config, 1001.0 + MONTH)
    assert len(lineage.runs) == RUNS_A_MONTH - 1
    assert unpacked(packed(lineage), Lineage, "") == lineage


# ----------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def shown(fedmerit):

    def call(*command):
        code, out, err = fedmerit(*command)
        return code, out + err

    return call


def test_an_owner_sees_and_changes_what_a_member_agrees_to(tmp_path, shown):
    key = tmp_path / f"{LIAR}.pem"
    made = Federation(tmp_path, files=True)
    assert "this member has joined no run, or the folder was lost" in shown("member", "show", key)[1]
    assert (
        "expected --roster FILE: this member knows of 0 rosters"
        in shown("member", "allow", key, "bound=8")[1]
    )
    made.run()
    code, told = shown("member", "show", key)
    roster = made.roster.lineage
    assert code == 0
    assert f"roster {roster}: trained in 1 of at most 30 runs within 30 days" in told
    assert f"roster {roster}: pinned: bound = 4, threshold = 0" in told
    assert f"run {made.run_id}: over" in told
    code, told = shown("member", "allow", key, "bound=8", "runs=100", "disk=8000000")
    assert code == 0
    assert "pinned: bound = 8, threshold = 0" in told
    assert "trained in 1 of at most 100 runs" in told
    assert "at most 8000000 bytes of a run" in told
    for wrong, expected in (
        ("bound=-1", "a number above 0"), ("bound=x", "a number"), ("threshold=-5", "at least 0"),
        ("weights=scores", "uniform, secret or roster"), ("runs=0", "at least 1"), ("disk=1", "at least 104"),
        ("size=3", "one of bound, disk"), ("bound", "a number"),
    ):  # fmt: skip
        code, told = shown("member", "allow", key, wrong)
        assert (code, expected in told) == (2, True), wrong
    assert "bound = 8" in shown("member", "show", key)[1]  # a wrong one changes nothing


def test_what_a_member_remembers_is_checked(tmp_path, shown):
    key = tmp_path / f"{LIAR}.pem"
    made = Federation(tmp_path, files=True).run()
    code, told = shown("member", "show", key)
    assert (code, f"{key}: in order" in told) == (0, True)
    assert "never put back an older copy of this folder" in told
    heads = made.heads(LIAR)
    whole = heads.read_bytes()
    heads.write_bytes(whole + b"3 seen")
    assert f"{heads}: 6 bytes of an answer that never left" in shown("member", "show", key)[1]
    heads.unlink()
    code, told = shown("member", "show", key)
    assert (code, "heads: missing: expected" in told, "1 problem" in told) == (2, True, True)


def test_it_is_not_checked_while_the_member_is_at_work(tmp_path, shown):
    made = Federation(tmp_path, files=True).run()
    key = tmp_path / f"{LIAR}.pem"
    with opened(key).held():
        code, told = shown("member", "show", key)
    assert (code, "is answering a message" in told) == (2, True)
    assert made.rounds


# ----------------------------------------------------------------- how many must stay to the end of a round


NINE = ("partition.clients=9", f"partition.sizes={[20] * 9}", "training.rounds=1")


@pytest.mark.parametrize("enabled", ["true", "false"])
@pytest.mark.parametrize(
    ("away", "lost", "aborted"),
    [
        (["client-0"], ["client-1"], ""),
        (["client-0", "client-3"], ["client-1"], "stage masked: 6 members left, 7 are needed"),
        (["client-0", "client-3", "client-4"], [], "6 scheduled, at least 7 of the 9 members are needed"),
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


# ---------------------------------------------------------- a member with another version of the package


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """Gives a federation to one of whose members these names of `messages` have other values."""

    def federation(**others):
        made = Federation(tmp_path, files=True)
        answer = made._answer

        def elsewhere(name, *given):
            with monkeypatch.context() as patch:
                for key, value in others.items() if name == LIAR else ():
                    patch.setattr(messages, key, value)
                return answer(name, *given)

        made._answer = elsewhere
        return made.run()

    return federation


def test_versions_with_one_protocol_work_together(mixed):
    federation = mixed(VERSION="7.8.9")
    assert [set(one.reports) for one in federation.rounds] == [set(federation.names)] * 2
    assert any(line.startswith("rounds: 2 of 2") for line in federation.verified())


def test_a_member_with_another_protocol_does_not_join_and_says_what_to_install(mixed):
    later = PROTOCOL + 1
    federation = mixed(VERSION="7.8.9", PROTOCOL=later, FORMAT=f"fedmerit remote {later}")
    assert [set(one.reports) for one in federation.rounds] == [{*federation.names} - {LIAR}] * 2
    error = federation.errors(LIAR)[0]
    assert type(error) is VersionError
    for said in (
        f"member {LIAR}", f"the server has fedmerit {VERSION} and speaks protocol {PROTOCOL}",
        f"this member has fedmerit 7.8.9 and speaks protocol {later}",
    ):  # fmt: skip
        assert said in str(error)


def test_a_member_that_lacks_a_feature_names_it(tmp_path):
    """The run needs what only later versions can do."""
    federation = Federation(tmp_path, terms={"features": ["sparse-sums"], "version": "7.8.9"}).run()
    assert all(one.aborted for one in federation.rounds)
    for name in federation.names:
        said = str(federation.errors(name)[0])
        assert f"member {name}" in said
        assert "the server (fedmerit 7.8.9) proposes a run with 'sparse-sums'" in said
        assert f"fedmerit {VERSION}" in said


@pytest.mark.parametrize(
    ("terms", "kind", "named"),
    [
        *(({"protocol": one}, VersionError, f"protocol {one!r}") for one in (2, 3, "4", True, None)),
        *(({"features": one}, MessageError, "features of") for one in (None, "sparse-sums", [1], {})),
    ],
)
def test_terms_of_another_protocol_or_with_features_that_are_no_list_are_refused(
    tmp_path, terms, kind, named
):
    with Federation(tmp_path, rounds=1, ledger=False, terms=terms).begun() as federation:
        (error,) = federation.errors("client-0")
        assert type(error) is kind
        assert named in str(error)


def head_of(form, *more):
    return Parcel(pack([form, *more]))


def test_the_envelope_of_another_protocol_is_recognised_whatever_is_in_it():
    with pytest.raises(VersionError, match=r"member A: the server has fedmerit 2\.0 and speaks protocol 12,"):
        Ask.unpack(head_of("fedmerit remote 12", "2.0", [1, {}], *range(100)), reader="A")
    with pytest.raises(VersionError, match="the server speaks protocol 12,"):  # no text of its choice
        Ask.unpack(head_of("fedmerit remote 12", "install this: evil.example", b""))


@pytest.mark.parametrize(
    "head",
    [b"", b"\xc1", pack(7), pack([]), pack([7]), pack(["fedmerit remote"]), pack(["fedmerit remote x", "1"]),
     pack([FORMAT]), pack([FORMAT, "0.1.0", b""]), pack([FORMAT, b"", b"", b""]), b"\xdd\xff\xff\xff\xff",
     pack(["fedmerit remote 9999999999999", "1"]), pack(["x" * 300])],
)  # fmt: skip
def test_what_is_no_message_is_called_that(head):
    with refused(MessageError):  # and no VersionError
        Ask.unpack(Parcel(head))
