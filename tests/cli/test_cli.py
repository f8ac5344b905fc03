"""The command line, on its real output: what people read, what programs read, and what goes wrong."""

import csv
import io
import json
import re
import stat
import subprocess
import sys
import warnings
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

with warnings.catch_warnings():  # some releases of typer use what some releases of click deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer  # noqa: F401

from command_line import FEDMERIT, TINY, call, shell
from fedmerit import __version__
from fedmerit.cli import base
from fedmerit.cli.run import FIRST, is_demo
from fedmerit.config import from_dict, load
from fedmerit.errors import FileFormatError, InputError
from fedmerit.files.documents import as_csv, as_json, document
from fedmerit.files.reports import read
from fedmerit.files.workbooks import workbook
from fedmerit.report.facts import Facts
from fedmerit.report.source import Source
from fedmerit.report.terminal import print_facts, watching
from fedmerit.simulation.run import Progress

CSV = """round,client,empty,grand,alone,without,se_alpha
1,north,0.1,0.5,0.2,0.4,0.01
1,south,0.1,0.5,0.3,0.3,0.02
1,west,0.1,0.5,0.12,0.49,0.01
2,north,0.5,0.6,0.5,0.6,0.01
2,south,0.5,0.6,0.6,0.5,0.02
"""
ROUND = {
    "round": 1, "empty": 0.1, "grand": 0.5, "alone": [0.2, 0.3], "without": [0.4, 0.3],
    "clients": ["north", "south"], "silent": [], "se_loo": [0.01, 0.02], "se_ioi": [0.01, 0.02],
    "se_alpha": [0.01, 0.02], "se_alpha_total": [0.01, 0.02], "samples": [10, 20], "cosine": [0.5, None],
    "solo": [0.3, 0.4], "solo_empty": 0.1, "slice": "a", "utility": "accuracy",
}  # fmt: skip


@pytest.fixture
def reports(tmp_path):
    path = tmp_path / "reports.csv"
    path.write_text(CSV)
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A real run, made by the command line in a process of its own; also what it printed."""
    base = tmp_path_factory.mktemp("cli")
    (base / "tiny.toml").write_text(TINY)
    done = shell("run", base / "tiny.toml", "--out", base / "run", "--set", "payment.missing=own-mean")
    assert done.returncode == 0, done.stderr
    return base / "run", done


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# ---------------------------------------------------------------------------------------------- score


def test_score_as_a_table(fedmerit, reports):
    code, out, err = fedmerit("score", reports, "--last-round")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["member", "alpha", "rank", "share", "rounds"] in lines
    # south: alpha 0.2 + 0.1, errors 0.02 twice on unnamed, hence the same, samples: 1.96 * 0.04 * 1.562
    south = next(line for line in lines if line[:1] == ["south"])
    assert south[:5] == ["south", "+0.3000", "±", "0.1225", "1"]
    assert "west" in out
    assert "50%" in out
    assert "ALPHA summed over 2 rounds; gain +0.5000, sum of ALPHA +0.4150" in out
    _, last = out.split("LOO, FP and EE are those of round 2 alone\n")
    assert last.split()[:4] == ["member", "LOO", "FP", "EE"]
    assert "note: member 'west' reported 1 of 2 rounds; the rest counts as zero\n" in out
    ranking, notes = out.partition("LOO, FP and EE are those")[0], out[out.index("note: ") :]
    assert fedmerit.said("score", reports, "--quiet") == ranking
    assert fedmerit.said("score", reports) == ranking + notes  # although it was quiet once


@pytest.mark.parametrize("kind", ["csv", "json", "xlsx"])
def test_standard_input_is_a_file_of_any_kind(tmp_path, reports, kind):
    made = {
        "csv": CSV.encode(),
        "json": as_json(document(read(reports))).encode(),
        "xlsx": workbook({"Reports": csv.reader(CSV.splitlines())}),
    }[kind]
    for data, told in ((made, "+0.3000 ± 0.1225"), (made[:-20], "standard input: ")):
        done = call("score", "-", given=data)
        assert told in f"{done.output}{done.exception}"


def test_what_is_piped_can_be_paid_and_shown(tmp_path):
    made = tmp_path / "page.html"
    for asked, told in (
        (("rewards", "-", "--budget", "100", "--despite-doubts"), "budget 100.00, rule fenced"),
        (("page", "-", "--out", made), f"wrote {made}"),
        (("page", "-"), "-: expected --out FILE.html"),
    ):
        done = call(*asked, given=CSV.encode())
        assert told in f"{done.output}{done.exception}"


def test_score_as_json_and_csv_reads_back(fedmerit, reports, tmp_path):
    out = fedmerit.said("score", reports, "--format", "json")
    assert json.loads(out) == json.loads(as_json(document(read(reports))))
    again = write(tmp_path / "again.json", out)
    assert fedmerit("score", again, "--format", "json") == (0, out, "")
    tidy = fedmerit.said("score", again, "--format", "csv")
    assert tidy == as_csv(document(read(reports)))
    rows = list(csv.DictReader(io.StringIO(tidy)))
    assert [row["client"] for row in rows] == ["north", "south", "west", "north", "south"]
    assert float(rows[1]["ALPHA"]) == pytest.approx(0.2)


@pytest.mark.parametrize("columns", [72, 80, 120])
def test_nothing_is_cut_off_in_a_narrow_terminal(fedmerit, monkeypatch, tmp_path, columns):
    name = "The Hospital of the Holy Ghost and Associated Clinics [bold]"
    rounds = [ROUND | {"round": k, "clients": ["north", name], "silent": ["ghost"]} for k in (1, 2)]
    rounds.append(ROUND | {"round": 3, "clients": ["west", "south"]})
    path = write(tmp_path / "r.json", rounds)
    monkeypatch.setattr(base.out, "width", columns)
    code, out, err = fedmerit("score", path)
    assert (code, err) == (0, "")
    assert "…" not in out
    assert "..." not in out
    doubt, table = out.partition("ALPHA summed")[0].split("\n", 1)
    assert doubt.startswith("WARNING: ")
    assert max(len(line) for line in table.splitlines()) <= columns
    assert "[bold]" in table
    assert "+0.4000 ± 0.0612" in table
    if columns == 72:
        assert shell("score", path, columns=72).stdout == out
    code, out, err = fedmerit("rewards", path, "--budget", "123456789.00")
    assert (code, err) == (0, "")
    assert "…" not in out


def test_names_cannot_paint_the_terminal_or_break_the_table(fedmerit, tmp_path):
    names = ["[/red]\x1b[2J", "two\nlines :smile:"]
    path = write(tmp_path / "r.json", ROUND | {"clients": names})
    out = fedmerit.said("score", path)
    assert "\x1b" not in out
    assert r"[/red]\x1b[2J" in out
    assert r"two\nlines :smile:" in out
    out = fedmerit.said("rewards", path, "--budget", "1", "--format", "csv")
    assert {row["client"] for row in csv.DictReader(io.StringIO(out, newline=""))} == {*names}


# -------------------------------------------------------------------------------------------- rewards


def test_rewards_are_exact_to_the_cent(fedmerit, reports):
    out = fedmerit.said("rewards", reports, "--budget", "10000.01")
    amounts = re.findall(r"^  (\w+) +[\d.]+% +([\d,.]+)", out, re.MULTILINE)
    assert [name for name, _ in amounts] == ["south", "north", "west"]
    assert sum(Decimal(amount.replace(",", "")) for _, amount in amounts) == Decimal("10000.01")
    assert "budget 10,000.01, rule fenced, unpaid 0.00" in out


def test_every_share_and_amount_has_an_interval(fedmerit, reports):
    out = fedmerit.said("rewards", reports, "--budget", "100", "--format", "json")
    content = json.loads(out)
    assert content["rule"] == "fenced"
    assert 0 < content["fence"]["fence"] <= 1
    for name, share in content["shares"].items():
        low, high = content["share_intervals"][name]
        assert low <= share <= high
        assert high > low
        least, most = map(Decimal, content["payout_intervals"][name])
        assert least <= Decimal(content["payouts"][name]) <= most
    out = fedmerit.said("rewards", reports, "--budget", "100", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert sum(Decimal(row["payout"]) for row in rows) == 100
    for row in rows:
        span = content["share_intervals"][row["client"]]
        assert [float(row["share_low"]), float(row["share_high"])] == span
        assert [row["payout_low"], row["payout_high"]] == content["payout_intervals"][row["client"]]
    out = fedmerit.said("rewards", reports, "--budget", "100")
    assert "share, 95%" in out
    assert "95%: what the rule would pay by scores free of test and training error" in out


def test_a_tie_that_is_paid_apart_is_said(fedmerit, tmp_path):
    one = ROUND | {"clients": ["north", "south"], "se_alpha": [0.04, 0.04]}
    path = write(tmp_path / "r.json", one)
    out = fedmerit.said("rewards", path, "--budget", "100", "--rule", "fair")
    assert "Of the members who are statistically indistinguishable, south (66.7%)" in out
    out = fedmerit.said("rewards", path, "--budget", "100", "--rule", "fair", "--format", "json")
    assert any("statistically indistinguishable" in note for note in json.loads(out)["notes"])
    out = fedmerit.said("rewards", path, "--budget", "100", "--rule", "equal")
    assert "statistically indistinguishable" not in out


# ------------------------------------------------------------------------------------------ bad input


def test_a_name_with_a_line_break_stays_one_name(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes(b'round,client,empty,grand,alone,without\r\n1,"a\nb",0,1,0,1\r\n1,c\x0bd,0,1,2,3,4\r\n')
    with pytest.raises(FileFormatError, match="line 4: expected 6 cells, got 7"):
        read(path)
    path.write_bytes(path.read_bytes().replace(b"2,3,4", b"2,3"))
    assert read(path)[0].clients == ("a\nb", "c\x0bd")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, 0])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["north", "south", "x", "empty", "reports"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    field=st.sampled_from([*ROUND, "reports", "participants", "rounds", "extra"]),
    value=VALUES,
    shape=st.sampled_from(["one", "list", "rounds", "reports"]),
    utility=st.sampled_from(["accuracy", None]),
)
@settings(max_examples=200)
def test_hostile_json_gives_a_result_or_an_error_of_ours(tmp_path_factory, field, value, shape, utility):
    one = ROUND | {"utility": utility} | {field: value}
    if shape == "reports":
        one = {"round": 1, "participants": ["north", "south"], "reports": ROUND | {field: value}} | (
            {field: value} if field in ("round", "silent", "participants", "reports") else {}
        )
    content = {"one": one, "list": [one], "rounds": {"rounds": [one]}, "reports": {"rounds": [one]}}[shape]
    path = tmp_path_factory.mktemp("hostile") / "r.json"
    path.write_text(json.dumps(content))
    try:
        rounds = read(path)
    except FileFormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is fine, but not without the name
        return
    with suppress(InputError), np.errstate(all="ignore"):  # differences of huge numbers are not finite
        print_facts(Console(file=io.StringIO()), Facts(Source(rounds=tuple(rounds), clients=())))
        json.loads(as_json(document(rounds)))


@given(
    text=st.text(st.sampled_from('round,client\n"\r0159.eE+-nai\x0b\x00\u2028 ;'), max_size=60),
    header=st.booleans(),
)
@settings(max_examples=200)
def test_any_csv_at_all_is_reports_or_an_error_of_ours(tmp_path_factory, text, header):
    path = tmp_path_factory.mktemp("hostile") / "r.csv"
    path.write_text((CSV.splitlines()[0] + "\n" if header else "") + text, newline="")
    with pytest.raises(FileFormatError, match=r"r\.csv: "):
        read(path)


def test_a_terminal_without_unicode(tmp_path):
    path = write(tmp_path / "r.json", ROUND | {"clients": ["Zürich", "漢"]})
    done = shell("score", path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Z\\xfcrich" in done.stdout
    done = shell("score", path, "--format", "json", PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout)["clients"] == ["Zürich", "漢"]


def test_a_full_disk_under_the_output(reports):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*FEDMERIT, "score", reports], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0
    assert "error: [Errno 28] No space left on device" in done.stderr
    assert "Traceback" not in done.stderr.partition("Exception ignored")[0]


# ------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("scoring.utilities", '["acc"]', "scoring.utilities: expected expected-accuracy, "),
        ("model.name", '"mlpp"', "model.name: must be one of mlp, "),
    ],
)
def test_a_setting_that_only_the_engine_knows_to_be_wrong_names_its_file(
    fedmerit, tmp_path, command, setting, value, message
):
    pytest.importorskip("torch", reason="torch is not installed")
    section, _, key = setting.partition(".")
    path = tmp_path / "mine.toml"
    path.write_text(f"[{section}]\n{key} = {value}\n")
    folder = ["--out", str(tmp_path / "run")] if command == "run" else []
    err = fedmerit.refused(command, str(path), *folder)
    assert err.startswith(f"error: {path}: {message}")
    path.write_text("")
    err = fedmerit.refused(command, str(path), *folder, "--set", f"{setting}={value}")
    assert err.startswith(f"error: {message}")  # the file is not at fault


@pytest.mark.parametrize(
    "line",
    [
        "scores", "score", "score f.csv --format xml", "score f.csv --score SURPLUS",
        "score f.csv --missing mean", "rewards f.csv", "rewards f.csv --budget 1 --rule mine", "run c.toml",
        "keys old", "--verison",
    ],
)  # fmt: skip
def test_usage_errors(fedmerit, line):
    code, out, err = fedmerit(*line.split())
    assert (code, out) == (2, "")
    assert "Usage: " in err
    assert "Traceback" not in err


def test_the_version(fedmerit):
    assert fedmerit("--version") == (0, f"fedmerit {__version__}\n", "")


def test_a_shell_completes_commands_and_options():
    for words, found in (("fedmerit sc", "score"), ("fedmerit score --la", "--last-round")):
        how = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert shell(_FEDMERIT_COMPLETE="complete_bash", **how).stdout.split() == [found]


def test_a_terminal_shows_warnings_in_colour_unless_there_shall_be_none(monkeypatch, tmp_path):
    path = write(tmp_path / "r.json", ROUND | {"alone": [0.05, 0.02], "without": [0.6, 0.7]})
    assert "\x1b[33mWARNING" in shell("score", path, FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[33m" not in shell("score", path, FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout
    assert "\x1b" not in shell("score", path).stdout


def test_init_writes_a_first_run_and_never_over_a_file(fedmerit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fedmerit("init")[1].startswith("wrote fedmerit.toml; ")
    Path("fedmerit.toml").unlink()
    path = tmp_path / "fedmerit.toml"
    out = fedmerit.said("init", path)
    assert out.startswith(f"wrote {path}; next: fedmerit run {path} --out runs/first\n")
    assert "docs/bring-your-own.md" in out
    assert load(path) == from_dict(FIRST)
    path.write_text("mine")
    assert fedmerit.refused("init", path) == f"error: {path}: exists already and is not overwritten\n"
    assert path.read_text() == "mine"
    lost = tmp_path / "no" / "where.toml"
    assert "where.toml: cannot write: No such file or directory" in fedmerit.refused("init", lost)


def test_a_roster_is_changed_by_its_members(fedmerit, tmp_path):
    """A hospital joins, and the server gets a new key: proposed, signed apart, adopted, shown."""

    def public(name, *options):
        return fedmerit("keys", "new", *options, tmp_path / f"{name}.pem")[1].splitlines()[0]

    keys = {name: public(name) for name in "ABCD"}
    server, other = public("server", "--server"), public("other", "--server")
    members = [text for name in "ABC" for text in ("--member", f"{name}={keys[name]}")]
    new = ["--member", f"D={keys['D']}", "--server", other, "--quorum", "4"]
    shown = fedmerit.said("keys", "roster", tmp_path / "old.toml", *members, "--server", server)
    assert f"the server  {server}" in shown.splitlines()
    fedmerit("keys", "roster", tmp_path / "new.toml", *members, *new)
    change, copy = tmp_path / "change.toml", tmp_path / "copy.toml"
    both = tmp_path / "old.toml", tmp_path / "new.toml"
    shown = fedmerit.said("keys", "propose", *both, "--out", change)
    assert f"  D joins  {keys['D']}" in shown.splitlines()
    assert f"  the server has a new key  {other}, not {server}" in shown.splitlines()
    assert "signed by nobody yet; 2 of 3 members are needed: 2 more must sign" in shown
    assert fedmerit("keys", "propose", *both, "--out", change)[0] == 2
    copy.write_bytes(change.read_bytes())
    for key in ("D", "other"):
        code, _, err = fedmerit("keys", "sign", change, "--key", tmp_path / f"{key}.pem")
        assert (code, "not the key of a member on the old roster" in err) == (2, True)
    assert "signed by A;" in fedmerit("keys", "sign", change, "--key", tmp_path / "A.pem")[1]
    assert "signed by A;" in fedmerit("keys", "sign", change)[1]
    fedmerit.refused("keys", "adopt", change, "--out", tmp_path / "next.toml")  # one of three signed it
    assert not (tmp_path / "next.toml").exists()
    fedmerit("keys", "sign", copy, "--key", tmp_path / "C.pem")
    shown = fedmerit.said("keys", "adopt", change, copy, "--out", tmp_path / "next.toml")
    assert "signed by A, C; 2 of 3 members are needed: that is enough" in shown
    shown = fedmerit.said("keys", "roster", tmp_path / "next.toml")
    assert "signed by A, C; the first roster was " in shown
    assert fedmerit("keys", "roster", tmp_path / "next.toml", "--server", other)[0] == 2


def test_keys(fedmerit, tmp_path):
    public, taken = {}, "exists already and is not overwritten"
    for name in ("a", "b", "c"):
        path = tmp_path / f"{name}.pem"
        out = fedmerit.said("keys", "new", path)
        assert re.fullmatch(r"ed25519:[0-9a-f]{64}\n", out)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        public[name] = out.strip()
    before = path.read_bytes()
    assert fedmerit.refused("keys", "new", path) == f"error: {path}: {taken}\n"
    assert path.read_bytes() == before
    assert fedmerit.said("keys", "show", path) == public["c"] + "\n"

    roster = tmp_path / "roster.toml"
    members = [part for name, key in public.items() for part in ("--member", f"{name}={key}")]
    written = fedmerit.said("keys", "roster", roster, *members)
    assert written.splitlines()[0] == f"a  {public['a']}"
    assert re.fullmatch(r"3 members, roster hash [0-9a-f]{64}", written.splitlines()[-2])
    assert written.splitlines()[-1].startswith("note: it names no server")
    assert fedmerit("keys", "roster", roster) == (0, written, "")
    shown = fedmerit.said("keys", "show", tmp_path / "a.pem", "--roster", roster)
    assert shown == f"{public['a']}\non {roster} it is the key of a\n"
    for few, count in ((1, "1 member"), (2, "2 members")):
        path = tmp_path / f"{few}.toml"
        out = fedmerit.said("keys", "roster", path, *members[: 2 * few], "--server", public["c"])
        assert out.splitlines()[-2].startswith(f"{count}, roster hash ")
        assert out.splitlines()[-1].startswith("note: a federation needs at least 3 members")
    shown = fedmerit.said("keys", "show", tmp_path / "c.pem", "--roster", path)
    assert shown.endswith(f"on {path} it is the key of the server\n")
    refused = fedmerit.refused("keys", "show", tmp_path / "b.pem", "--roster", tmp_path / "1.toml")
    assert refused == f"error: {tmp_path / '1.toml'}: has no member with this key\n"
    assert fedmerit.refused("keys", "roster", roster, *members) == f"error: {roster}: {taken}\n"
    for member in ("a", "a=ed25519:00", f"a={public['a']},heavy", f"St. Mary/N={public['a']}"):
        fedmerit.refused("keys", "roster", tmp_path / "no.toml", "--member", member)
    assert not (tmp_path / "no.toml").exists()
    fedmerit.refused("keys", "roster", tmp_path / "none.toml")


HEAVY = ("torch", "flwr", "altair", "cryptography", "scipy.stats", "safetensors")


@pytest.mark.parametrize("command", ["import", "score FILE", "rewards FILE --budget 1", "score none.csv"])
def test_scoring_loads_nothing_heavy(reports, command):
    lines = "import fedmerit"
    if command != "import":
        words = ["fedmerit", *command.replace("FILE", str(reports)).split()]
        lines += f"\nimport sys\nsys.argv = {words!r}\nfrom fedmerit.cli import main"
        lines += "\ntry:\n main()\nexcept SystemExit:\n pass"
    lines += f"\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


# ---------------------------------------------------------------------------------------------- a run


def test_a_run_tells_its_progress_in_lines_when_nobody_watches(run_folder):
    folder, done = run_folder
    rounds = [line for line in done.stderr.splitlines() if line.startswith("round ")]
    assert len(rounds) == 2
    assert re.fullmatch(r"round 1/2: expected-accuracy 0\.\d+ -> 0\.\d+ \(about .+ left\)", rounds[0])
    assert "note: 3 members: none may be lost" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    assert "…" not in done.stdout
    assert f"written to {folder}: scores.json, scores.csv, ledger.sqlite" in done.stdout
    assert load(folder / "config.toml").payment.missing == "own-mean"


def test_progress_on_a_terminal_shows_bars_and_takes_names_as_they_are():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, markup=False, emoji=False, highlight=False)
    with watching(console) as watch:
        for stage in ("train", "sum", "evaluate"):
            watch(Progress(stage, 1, 2, done=1, total=3))
        watch(Progress("note", 0, 2, text="client [/bold] :smile: withdrew"))
        watch(Progress("round", 1, 2, done=1, total=2, text="accuracy 0.1 -> 0.5"))
    assert "note: client [/bold] :smile: withdrew" in out.getvalue()
    assert "round 1/2: accuracy 0.1 -> 0.5" in out.getvalue()
    assert re.search(r"rounds .*━.* \S*1/2", out.getvalue())


@pytest.mark.parametrize("terminal", [False, True])
def test_after_the_last_round_progress_says_once_that_the_settlement_follows(terminal):
    out = io.StringIO()
    with watching(Console(file=out, force_terminal=terminal, width=100, highlight=False)) as watch:
        for number in (1, 2):
            watch(Progress("round", number, 2, done=1, total=2, text="3 members summed"))
        assert "settlement follows" not in out.getvalue()
        for _ in range(2):
            watch(Progress("settle", 2, 2))
    assert out.getvalue().count("settlement follows") == 1


def test_a_run_that_turns_out_to_be_scored_by_reports_promises_no_settlement(tmp_path):
    """Its settings leave the method open, and its test samples are all alike, so nothing can be settled."""
    x, y = np.random.default_rng(0).random((60, 4)).astype(np.float32), np.arange(60) % 2
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=np.zeros_like(x), y_test=y)
    (tmp_path / "c.toml").write_text(
        f'[data]\nname = "npz"\npath = "{tmp_path}/d.npz"\ntest_size = 0\n[model]\nname = "mlp"\n'
        "[partition]\nclients = 3\n[training]\nrounds = 1\nlocal_epochs = 1\n"
    )
    said = call("run", tmp_path / "c.toml", "--out", tmp_path / "run").output
    assert "nothing is settled, because the test pool cannot be divided" in " ".join(said.split())
    assert "settlement follows" not in said


def test_scoring_a_run_counts_missed_rounds_as_the_run_did(fedmerit, tmp_path):
    """own-mean doubles what west earned in the one of two rounds it reported."""
    first = ROUND | {"clients": ["west", "north"]}
    write(tmp_path / "scores.json", {"rounds": [first, ROUND | {"round": 2}]})
    write(tmp_path / "config.toml", '[payment]\nmissing = "own-mean"\n')
    alpha = {}
    for options in ((), ("--missing", "zero")):
        out = fedmerit.said("score", tmp_path, "--format", "json", *options)
        content = json.loads(out)
        alpha[options] = content["cumulative"]["ALPHA"][content["clients"].index("west")]
    assert alpha[()] == pytest.approx(2 * alpha[("--missing", "zero")])


def test_resume(fedmerit, run_folder, tmp_path):
    folder, _ = run_folder
    config = write(tmp_path / "tiny.toml", TINY)
    own = ["--set", "payment.missing=own-mean"]
    before = (folder / "scores.json").read_bytes()
    err = fedmerit.refused("run", config, "--out", folder, *own)
    assert "not empty; use --resume" in err
    err = fedmerit.refused("run", config, "--out", folder, "--resume")
    assert "holds a run with a different config: payment.missing is 'own-mean' there and 'zero' here" in err
    out = fedmerit.said("run", config, "--out", folder, "--resume", *own)
    assert "PHI summed over 2 rounds" in out
    assert (folder / "scores.json").read_bytes() == before
    err = fedmerit.refused("run", config, "--out", tmp_path / "new", "--resume")
    assert "nothing to resume" in err


def test_the_demo_replaces_its_own_run_and_nobody_elses(fedmerit, run_folder, tmp_path):
    folder, _ = run_folder
    before = (folder / "ledger.sqlite").read_bytes()
    err = fedmerit.refused("demo", "--out", folder)
    assert "not empty" in err
    assert (folder / "ledger.sqlite").read_bytes() == before
    small = ["--set", "training.rounds=1", "--set", "training.local_epochs=1", "--set", "data.test_size=50"]
    for _ in range(2):
        out = fedmerit.said("demo", "--out", tmp_path / "demo", *small)
        assert "Harbour" in out
        assert "rehearsal: " in out
        assert f"next: fedmerit rewards {tmp_path / 'demo'} --budget 10000.00" in out
        assert "panel: 6 of 6 columns add up" in out
        before, now = re.search(
            r"Elm would be paid ([\d,.]+) of 10000.00 before, and ([\d,.]+) now", out
        ).groups()
        assert before == now
        told = [line for line in out.splitlines() if line.startswith("settlement: ")]
        assert told == [
            "settlement: 1 of 1 equations hold",
            "settlement: 15 of 15 pairs of members are witnessed",
            "settlement: 0 of 1 equations hold",
            "settlement: 15 of 15 pairs of members are witnessed",
            "settlement: in round 1 Elm stated a false number (proved by the masks of that round)",
        ]
    assert all(is_demo(tmp_path / f"demo-{what}") for what in ("liar", "panel", "judge"))
    fedmerit.said("rewards", tmp_path / "demo", "--budget", "9", "--rule", "equal", "--despite-doubts")
    before = (tmp_path / "demo" / "ledger.sqlite").read_bytes()
    told = f"error: {tmp_path / 'demo'}: holds a run with a decision, which the demo does not delete"
    assert fedmerit.refused("demo", "--out", tmp_path / "demo", *small).startswith(told)
    assert (tmp_path / "demo" / "ledger.sqlite").read_bytes() == before


def test_a_plan_says_what_a_run_will_cost(fedmerit, brief_plans, tmp_path):
    (tmp_path / "c.toml").write_text(TINY)
    out = fedmerit.said("plan", tmp_path / "c.toml", "--set", "scoring.truth=['mr-shapley']")
    assert "3 members, 2 rounds" in out
    assert re.search(r"^ *MR-SV \(analysis\) +16 ", out, flags=re.M)
    assert out.startswith("with 25 test samples, this run can tell two members apart if ")
    assert "settlement after the last round, on 25 test samples: each member receives" in out
    assert "participation.fraction" not in out
    assert re.search(r"^training samples: client-0 \d+, client-1 \d+, client-2 \d+$", out, flags=re.M)
    out = fedmerit.said("plan", tmp_path / "c.toml", "--set", "participation.fraction=0.1")
    assert "note: participation.fraction 0.1 of 3 members is fewer than 3: 3 take part\n" in out
    assert out.endswith(
        "note: 3 members: none may be lost, and any two of them can compute the third one's update\n"
    )
    out = fedmerit.said("plan", tmp_path / "c.toml", "--set", "scoring.method=settled")
    assert re.search(
        r"^settlement after the last round, on 50 test samples: each member receives [\d.]+ MiB, computes 6 "
        r"gradients or more \(about .+ here\), and until then keeps [\d.]+ MiB on disk$",
        out,
        flags=re.M,
    )
    assert out.startswith("with 50 test samples, this run can tell two members apart if ")
    code, _, err = fedmerit("plan", tmp_path / "nothing.toml")
    assert (code, "nothing.toml: no such file" in err) == (2, True)


def test_another_utility_of_a_run_is_scored_and_paid(fedmerit, tmp_path):
    turned = ROUND | {"utility": "brier", "alone": [0.4, 0.1]}  # alpha (0.2, 0.1); accuracy has (0.1, 0.2)
    companion = {"clients": ["north", "south"], "utility": "brier", "rounds": [turned]}
    write(
        tmp_path / "scores.json",
        {"utility": "accuracy", "rounds": [ROUND], "companions": {"brier": companion}},
    )
    for utility, first in (("accuracy", "south"), ("brier", "north")):
        out = fedmerit.said("score", tmp_path, "--utility", utility)
        assert f"utility {utility}" in out
        assert out.split("north")[0].count("south") == (first == "south")
        out = fedmerit.said("rewards", tmp_path, "--budget", "3.00", "--utility", utility, "--format", "json")
        assert max(json.loads(out)["payouts"].items(), key=lambda item: item[1])[0] == first
    err = fedmerit.refused("score", tmp_path, "--utility", "dice")
    assert "scores.json: has no utility 'dice'; it has accuracy, brier" in err


def test_errors_of_the_system_name_the_file_and_no_number(fedmerit, tmp_path):
    reports = tmp_path / "reports.csv"
    reports.write_text(CSV)
    assert fedmerit("page", reports, "--out", tmp_path) == (2, "", f"error: {tmp_path}: Is a directory\n")


def test_what_is_no_run_or_no_table_says_what_to_give_instead(tmp_path):
    (tmp_path / "again" / "run-1").mkdir(parents=True)
    (tmp_path / "again" / "run-1" / "ledger.sqlite").touch()
    for command in ("score", "verify", "page"):
        said = str(call(command, tmp_path / "again").exception)
        assert said.startswith(f"{tmp_path / 'again'} holds no run: no ledger.sqlite")
        assert said.endswith("; there are runs in it: run-1")
    (tmp_path / "ours.ods").touch()
    assert str(call("score", tmp_path / "ours.ods").exception).endswith(
        "or .json; save it as .xlsx or as CSV"
    )
    (tmp_path / "few.csv").write_text("client,empty\nA,1\n")
    said = str(call("score", tmp_path / "few.csv").exception)
    assert "missing columns 'round', 'grand', 'alone', 'without'; expected" in said
    (tmp_path / "mine.toml").touch()
    said = str(call("run", tmp_path / "mine.toml", "--out", tmp_path / "mine.toml").exception)
    assert said == f"{tmp_path / 'mine.toml'}: cannot be used as a run folder: Not a directory"
