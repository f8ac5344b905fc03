"""Pages that state a default state the one that the code has."""

import inspect
import json
import re
from pathlib import Path

import pytest

from fedmerit.config import Config
from fedmerit.flower import Contributions, everybody
from fedmerit.protocol.member import KEPT_ROUNDS
from fedmerit.protocol.messages import SLICE_BYTES
from fedmerit.protocol.terms import MONTH, RUNS_A_MONTH
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.rewards import shares
from fedmerit.secagg import default_threshold
from fedmerit.storage.member_state import DISK, MOST_RUNS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "flower-hospitals" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def argument(function, name):
    return inspect.signature(function).parameters[name].default


CONFIG = Config()
UTILITY = CONFIG.scoring.utilities[0].replace("-", " ")
REVEAL = CONFIG.data.test_reveal
REPORTED = re.findall(r'"end" if scored_by == "settled" else "(\w+)"', inspect.getsource(Contributions))[0]
SEES_ALL = r'- `"(\w+)"` \(default\): every member may read'
STATED = [  # page, what it says with the value in brackets, what the code has
    ("docs/choosing.md", r'`scoring\.game = "(\w+)"` \(default\)', CONFIG.scoring.game),
    ("docs/choosing.md", r"with the ([\w ]+), the default utility", UTILITY),
    ("docs/findings.md", r"For the ([\w ]+), our default utility", UTILITY),
    ("docs/money.md", SEES_ALL, CONFIG.scoring.visibility),
    ("docs/money.md", SEES_ALL, argument(Contributions, "visibility")),
    ("docs/running.md", r'`test_reveal = "(\w+)"` \(the paper\'s, default here\)', CONFIG.data.test_reveal),
    ("docs/flower.md", r'`reveal="(\w+)"`, the default where members report', REPORTED),
    ("docs/shown.md", r"`(\w+)` is the default because", CONFIG.data.test_reveal),
    ("docs/shown.md", r"`(\w+)` is the default because", REPORTED),
    ("docs/scores/alpha.md", r"# (\w+): the default", argument(accumulate, "score").lower()),
]  # fmt: skip
WITHOUT_A_VALUE = [
    r"every setting, its default and what it means",
    r"also where our default is not the best",
    r"all settings, defaults included",
    r"no score is shown to be better than our default",
    r"\(R - t with the default t\)",
    r"test_members_agree_to_nothing_weaker_than_the_default",
    r"floor\(2R/3\)\+1 of the roster by default",  # see the table of sizes below
    r"^\| default \| everywhere where members report: rehearsals .* and Flower \| nowhere",  # see below
    r'^\| `"settled"`, the default if there is a gradient',  # tests/flower/test_settled.py
    r"needs a default, words beside it in `config.py`",
    r'^default = "ours"$',
]


@pytest.mark.parametrize(("page", "pattern", "value"), STATED)
def test_a_stated_default_is_the_codes(page, pattern, value):
    (found,) = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"))
    assert found == value


def test_every_line_about_a_default_is_checked():
    """A new sentence about a default needs a line above."""
    known = [re.compile(pattern) for pattern in (*(pattern for _, pattern, _ in STATED), *WITHOUT_A_VALUE)]
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if re.search(r"\bdefaults?\b", line):
                assert any(pattern.search(line) for pattern in known), f"{page.relative_to(ROOT)}: {line}"


def test_the_table_of_test_slices_says_who_has_which_by_default():
    assert (REVEAL, REPORTED) == ("fixed", "fixed")


def test_the_recommended_choice_departs_from_the_defaults_where_it_says_so():
    """The expected accuracy is a default; a config also lets members report; the rule is none."""
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    (chosen,) = re.findall(r"^> \*\*(.*)\*\*$", text, re.MULTILINE)
    assert chosen == (
        "PHI of the expected accuracy, settled after the last round; the test set stays shut until then; "
        "paid by the rule `fenced`."
    )
    assert CONFIG.scoring.utilities[0] == "expected-accuracy"
    assert CONFIG.scoring.method == "both"
    assert "A rehearsal settles half of the test set and lets members report on\nthe other half" in text
    assert argument(shares, "rule") == CONFIG.payment.rule == "fenced"


def test_the_threshold_is_as_the_pages_state_it():
    threats = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", threats, re.MULTILINE)
    assert len(rows) >= 6
    for members, *stated in (map(int, row) for row in rows):
        t = default_threshold(members)
        assert stated == [t, members - t, members - t, 2 * t - members]
    for members in range(3, 60):
        assert default_threshold(members) == 2 * members // 3 + 1


def test_the_limits_of_a_member_are_as_the_pages_state_them():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (runs,) = re.findall(r"^\| runs of one roster .*, within 30 days \| (\d+) \|", text, re.MULTILINE)
    (gigabytes, millions) = re.findall(
        r"^\| bytes stored of one run \| (\d+) GiB, enough for two rounds of (\d+) million",
        text,
        re.MULTILINE,
    )[0]
    (stored,) = re.findall(r"^\| runs stored \| (\d+) \|", text, re.MULTILINE)
    assert (int(runs), MONTH) == (RUNS_A_MONTH, 30 * 86_400)
    assert (int(gigabytes) * 2**30, int(stored)) == (DISK, MOST_RUNS)
    assert 2 * 8 * int(millions) * 10**6 < DISK  # M0 and the update, as float32
    assert KEPT_ROUNDS + 1 == 3
    threats = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
    assert f"at most {RUNS_A_MONTH} runs of a roster within 30 days" in threats
    assert f"the latest three rounds of a run and at most {gigabytes} GiB" in threats
    assert f"at most {SLICE_BYTES // 2**30} GiB of test samples" in threats


def test_sums_over_everybody_pin_the_bound_that_runs_have():
    assert argument(everybody, "bound") == CONFIG.secure_aggregation.bound == argument(Contributions, "bound")


def test_what_training_on_the_test_set_earns_is_the_committed_result():
    raw = ROOT / "experiments" / "results" / "other" / "train-on-test.json"
    shares = json.loads(raw.read_text(encoding="utf-8"))["shares"]
    honest, fixed, fresh = (
        f"{sum(shares[way]) / len(shares[way]):.2f}".lstrip("0")
        for way in ("fixed, honest", "fixed, cheating", "per-round, cheating")
    )
    shown, flower = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("shown.md", "flower.md"))
    assert f"got {fixed} of the pay in place of {honest}, with fresh slices {fresh}." in shown
    assert f"doubled its share ({honest} to {fixed}," in flower


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
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
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
