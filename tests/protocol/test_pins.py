"""From run to run: settings stay as they were until a member's owner says otherwise, and runs are counted."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fedmerit.cli import main
from fedmerit.config import from_dict
from fedmerit.errors import RefusedError
from fedmerit.identity import read_roster
from fedmerit.protocol.memory import packed, unpacked
from fedmerit.protocol.terms import MONTH, RUNS_A_MONTH, Lineage, lineage_of, pinned
from fedmerit.storage.member_state import allow
from linear_federation import LIAR, Federation
from states import opened


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
    assert opened(tmp_path / f"{LIAR}.pem").content.rosters == {}
    assert len(run_again(tmp_path, 2).rounds) == 1
    with made.begun():  # the first one goes on after all
        assert made.round(1) is None
    assert not any(
        one.ask.exchange == "train" and one.error is None and len(one.answer) > 400 for one in made.passed
    )


def test_a_rehearsal_pins_nothing(tmp_path):
    for number, bound in ((1, 4.0), (2, 3.0)):
        made = Federation(
            tmp_path, rounds=1, masks=False, ledger=False, settings={"secure_aggregation": {"bound": bound}}
        )
        made.run_id = f"{number:032x}"
        with made.begun():
            assert made.round(1) is not None


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
def fedmerit(monkeypatch, capsys):
    """A function that does what a command line does; gives back its exit code and what it printed."""

    def call(*command):
        monkeypatch.setattr(sys, "argv", ["fedmerit", *map(str, command)])
        try:
            main()
            code = 0
        except SystemExit as left:
            code = left.code or 0
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


def test_an_owner_sees_and_changes_what_a_member_agrees_to(tmp_path, fedmerit):
    key = tmp_path / f"{LIAR}.pem"
    made = Federation(tmp_path, files=True)
    assert "this member has joined no run, or the folder was lost" in fedmerit("member", "show", key)[1]
    assert (
        "expected --roster FILE: this member knows of 0 rosters"
        in fedmerit("member", "allow", key, "bound=8")[1]
    )
    made.run()
    code, shown = fedmerit("member", "show", key)
    roster = lineage_of(made.roster)
    assert code == 0
    assert f"roster {roster}: trained in 1 of at most 30 runs within 30 days" in shown
    assert f"roster {roster}: pinned: bound = 4, threshold = 0" in shown
    assert f"run {made.run_id}: over" in shown
    code, shown = fedmerit("member", "allow", key, "bound=8", "runs=100", "disk=8000000")
    assert code == 0
    assert "pinned: bound = 8, threshold = 0" in shown
    assert "trained in 1 of at most 100 runs" in shown
    assert "at most 8000000 bytes of a run" in shown
    for wrong, expected in (
        ("bound=-1", "a number above 0"), ("bound=x", "a number"), ("threshold=-5", "at least 0"),
        ("weights=scores", "uniform, secret or roster"), ("runs=0", "at least 1"), ("disk=1", "at least 104"),
        ("size=3", "one of bound, disk"), ("bound", "a number"),
    ):  # fmt: skip
        code, shown = fedmerit("member", "allow", key, wrong)
        assert (code, expected in shown) == (2, True), wrong
    assert "bound = 8" in fedmerit("member", "show", key)[1]  # a wrong one changes nothing


def test_a_doctor_looks_at_a_key_and_at_a_run_folder(tmp_path, fedmerit):
    key = tmp_path / f"{LIAR}.pem"
    made = Federation(tmp_path, files=True).run()
    code, told = fedmerit("doctor", key, "--ledger", made.folder)
    assert (code, f"{key}: in order" in told) == (0, True)
    assert "never put back an older copy of this folder" in told
    assert "kept: 3 heads" in told or "heads" in told
    code, told = fedmerit("doctor", made.folder)
    assert (code, "in order" in told, "rounds: 2 of 2" in told) == (0, True, True)
    made.heads(LIAR).chmod(0o644)
    (made.folder / "keys" / "server.pem").chmod(0o640)
    code, told = fedmerit("doctor", key)
    assert (code, f"run: chmod 600 {made.heads(LIAR)}" in told) == (2, True)
    code, told = fedmerit("doctor", made.folder)
    assert (code, "server.pem: expected mode 600, got 640" in told) == (2, True)
    (made.folder / "scores.json").write_text("{}")
    made.heads(LIAR).unlink()
    assert "heads: missing: expected" in fedmerit("doctor", key)[1]
    code, told = fedmerit("doctor", made.folder)
    assert (code, "2 problems" in told) == (2, True)


def test_a_doctor_does_not_wait_for_a_member_at_work(tmp_path, fedmerit):
    made = Federation(tmp_path, files=True).run()
    key = tmp_path / f"{LIAR}.pem"
    with opened(key).held():
        code, told = fedmerit("doctor", key)
    assert (code, "is answering a message" in told) == (2, True)
    assert made.rounds
