"""Promises, limits, sizes and results that pages state are those of the code and of committed results."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.config import Config
from fedmerit.flower import everybody
from fedmerit.identity import Member, Roster, public_key
from fedmerit.protocol.member import KEPT_ROUNDS
from fedmerit.protocol.messages import SLICE_BYTES
from fedmerit.protocol.terms import MONTH, RUNS_A_MONTH
from fedmerit.scoring.rewards import shares
from fedmerit.secagg.client import Client
from fedmerit.secagg.messages import to_broadcast
from fedmerit.secagg.setting import Setting, default_threshold
from fedmerit.storage.member_state import DISK, MOST_RUNS
from parties import Parties, head_of
from tests.secagg import test_privacy
from tests.settlement import test_attacks

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
PROMISES = tomllib.loads((ROOT / "docs" / "promises.toml").read_text(encoding="utf-8"))
EVERY = [one for listed in PROMISES.values() for one in listed]
CONFIG = Config()


def argument(function, name):
    return inspect.signature(function).parameters[name].default


def test_every_promise_has_tests_that_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    written = set(re.findall(r"^def (test_\w+)", sources, re.M))
    written |= {f"test_privacy[{check.__name__.removeprefix('check_')}]" for check in test_privacy.CHECKS}
    rows = (("members_who", test_attacks.MEMBERS_LIE), ("servers_that", test_attacks.SERVERS_LIE))
    written |= {f"test_{who}_lie_come_to_what_the_table_says[{row}]" for who, table in rows for row in table}
    lost = {name for one in EVERY for name in one["tests"]} - written
    assert not lost, f"docs/promises.toml names tests that are gone or renamed: {sorted(lost)}"
    assert len(EVERY) >= 150
    for one in EVERY:
        assert one.keys() <= {"against", "promise", "twin", "tests"}
        assert all(one[key] for key in ("against", "promise", "tests"))


def test_every_check_with_a_broken_twin_is_marked_and_every_marked_one_has_a_twin():
    twins = {check.__name__.removeprefix("check_") for _, check in test_privacy.BROKEN}
    marked = {
        name
        for one in EVERY
        if one.get("twin")
        for name in re.findall(r"test_privacy\[(\w+)\]", " ".join(one["tests"]))
    }
    assert marked == twins == {check.__name__.removeprefix("check_") for check in test_privacy.CHECKS}


@pytest.mark.parametrize("row", re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", TEXT, re.M))
def test_the_table_of_sizes(row):
    n, t, lost, colluding, honest = map(int, row)
    assert t == default_threshold(n) == 2 * n // 3 + 1
    assert lost == colluding == n - t
    assert honest == 2 * t - n
    assert Parties(n).setting.tolerated == colluding


@pytest.mark.parametrize(("n", "t", "tolerated"), [(9, 5, 0), (9, 6, 2), (9, 7, 2), (9, 8, 1), (4, 3, 1)])
def test_colluders_tolerated_with_a_configured_threshold(n, t, tolerated):
    assert "min(R - t, 2t - R - 1)" in TEXT
    assert Parties(n, threshold=t).setting.tolerated == tolerated


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PROTOCOL, re.M)
)
def test_the_table_of_bytes(row):
    """Of members called client-0, client-1, ... and a run with an identifier of 16 characters."""
    members, advertise, share, lists = (int(cell.replace(",", "")) for cell in row)
    names = tuple(f"client-{i}" for i in range(members))
    keys = [Ed25519PrivateKey.generate() for _ in names]
    roster = Roster(Member(name, public_key(key)) for name, key in zip(names, keys, strict=True))
    setting = Setting("0" * 16, 1, 0, names, roster, bytes(32))
    clients = [Client(setting, name, key) for name, key in zip(names, keys, strict=True)]
    sent = [client.advertise() for client in clients]
    shown = to_broadcast("advertise", map(head_of, sent))
    dealt = clients[0].share(shown)
    assert (len(sent[0]), len(dealt)) == (advertise, share)
    both = len(shown) + len(to_broadcast("share", [head_of(dealt)] * members))
    assert lists == round(both / 1000)


def test_the_recommended_choice_departs_from_the_defaults_where_it_says_so():
    """A config also lets members report; the utility and the rule are what one gets without choosing."""
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    (chosen,) = re.findall(r"^> \*\*(.*)\*\*$", text, re.MULTILINE)
    assert chosen == (
        "PHI of the expected accuracy, settled after the last round; the test set stays shut until then; "
        "paid by the rule `fenced`."
    )
    assert CONFIG.scoring.utilities[0] == "expected-accuracy"
    assert CONFIG.scoring.method == "both"
    assert "A rehearsal settles half of the test set and lets members report on the other half" in text
    assert argument(shares, "rule") == CONFIG.payment.rule == "fenced"


def test_the_limits_of_a_member_are_as_the_pages_state_them():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (runs,) = re.findall(r"^\| runs of one roster .*, within 30 days \| (\d+) \|", text, re.M)
    stored_of_one = r"^\| bytes stored of one run \| (\d+) GiB, enough for two rounds of (\d+) million"
    ((gigabytes, millions),) = re.findall(stored_of_one, text, re.M)
    (stored,) = re.findall(r"^\| runs stored \| (\d+) \|", text, re.M)
    assert (int(runs), MONTH) == (RUNS_A_MONTH, 30 * 86_400)
    assert (int(gigabytes) * 2**30, int(stored)) == (DISK, MOST_RUNS)
    assert 2 * 8 * int(millions) * 10**6 < DISK  # M0 and the update, as float32
    assert KEPT_ROUNDS + 1 == 3
    (bytes_,) = re.findall(r"^\| test samples in one message \| (\d+) GiB", text, re.MULTILINE)
    assert int(bytes_) * 2**30 == SLICE_BYTES
    promised = (ROOT / "docs" / "promises.toml").read_text(encoding="utf-8")
    assert f"at most {RUNS_A_MONTH} runs of a roster within 30 days" in promised
    assert f"the latest three rounds of a run and at most {gigabytes} GiB" in promised


def test_sums_over_everybody_pin_the_bound_that_runs_have():
    assert argument(everybody, "bound") == CONFIG.secure_aggregation.bound


def test_what_training_on_the_test_set_earns_is_the_committed_result():
    raw = ROOT / "experiments" / "results" / "other" / "train-on-test.json"
    shares = json.loads(raw.read_text(encoding="utf-8"))["shares"]
    honest, fixed, fresh = (
        f"{sum(shares[way]) / len(shares[way]):.2f}".lstrip("0")
        for way in ("fixed, honest", "fixed, cheating", "per-round, cheating")
    )
    shown = (ROOT / "docs" / "shown.md").read_text(encoding="utf-8")
    assert f"is paid for it: {fixed} of the pay in place of {honest} | gains nothing: {fresh};" in shown


def test_what_cheats_take_is_the_committed_result():
    rows = {}
    for line in (ROOT / "experiments" / "tables" / "tab-cheat.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("**"):
            data = line.strip("*")
        elif found := re.match(r"\| ([^|]+) \| 3 \| (-?\d+)% ", line):
            rows[data, found[1]] = found[2]
    page = (ROOT / "docs" / "settlement.md").read_text(encoding="utf-8")
    stated = re.findall(
        r"^\| ([^|]+) \| (?:together )?(-?\d+) % \| (?:together )?(-?\d+) % \|", page, re.MULTILINE
    )
    measured = [
        "told the pool, length x 1",
        "told the pool, length x 3",
        "replays the last public update, x 1",
        "replays the last public update, x 3",
        "honest update x 2",
        "two add and take away 3 public updates",
    ]
    assert [list(shares) for _, *shares in stated[1:]] == [
        [rows[data, cheat] for data in ("CIFAR-10", "Brain-MRI")] for cheat in measured
    ]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"took {stated[1][2]} % of the gain on one dataset and all of it on another" in readme
    assert int(stated[1][1]) > 100


def test_what_the_fence_leaves_to_who_was_told_the_pool_is_the_committed_result():
    table = (ROOT / "experiments" / "tables" / "tab-cheat.md").read_text(encoding="utf-8")
    lines = table.partition("**CIFAR-10**")[2].partition("**Brain-MRI**")[0].splitlines()
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in lines) if len(cells) > 8}
    place = [cell.strip() for cell in rows["what the cheat does"]].index("PHI paid by `fenced`")
    share = rows["told the pool, length x 3"][place].partition("%")[0].strip()
    assert f"it took {share} % on CIFAR-10" in (ROOT / "docs" / "money.md").read_text(encoding="utf-8")


def test_how_close_phi_comes_is_the_committed_result():
    found = []
    for line in (ROOT / "experiments" / "tables" / "tab-phi.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and "±" in line:
            _, seeds, utility, phi, _, alpha, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            if utility == "accuracy":
                found[-1] += [phi, alpha]
            else:
                found.append([seeds, phi, alpha])
    page = (ROOT / "docs" / "scores" / "phi.md").read_text(encoding="utf-8")
    stated = re.findall(r"^\| [^|]+, (\d) \| (.+ ± .+) \|$", page, re.MULTILINE)
    assert [[seeds, *cells.split(" | ")] for seeds, cells in stated] == found
    assert len(found) == 5


def test_settled_intervals_hold_as_often_as_promised_on_pools_drawn_at_random():
    text = (ROOT / "experiments" / "tables" / "coverage.md").read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if line.startswith("| test sets |")).split("|")
    now = [head.index(" interval, now "), head.index(" difference, now ")]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| settled, drawn at random |")]
    assert len(rows) >= 12
    for row in rows:
        assert all(93 <= float(row[at].strip(" %+−")) <= 97 for at in now), row
