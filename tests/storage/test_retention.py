"""docs/data-protection.md: each file of its tables is deleted, and what happens is what the page says.

Server's folders are a run of this version and runs of an earlier one, which have what rehearsals and Flower
write beside it. Every file in them must be in the table.
"""

import re
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

import sample_runs
from command_line import call
from fedmerit.errors import KeyFileError, LedgerError
from fedmerit.identity import Change, Roster, load_key, public_key, read_roster, write_roster
from fedmerit.protocol.memory import packed
from fedmerit.verify import verify_copy, verify_folder
from linear_federation import Federation, data
from states import names_in, opened

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "data-protection.md").read_text(encoding="utf-8")
NAMES = ("Abbey", "Bridge", "Castle", "Dale")
WHO = "Bridge"
FOLDERS = ("run", "settled/run", "more/grouped", "more/unmasked")
SAME = "says the same"


def rows(title):
    """The rows of the first table under a heading: first cell without marks, and all cells."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert {len(row) for row in cells} == {6}
    assert all(row[4].startswith(("yes", "no")) for row in cells)
    return {re.sub(r"`", "", row[0]): row for row in cells}


SERVER = rows("The server's run folder")
MEMBER = rows("A member's machine")


def quoted(cell):
    """The words that the page quotes; a cell that quotes none says that nothing changes."""
    found = re.findall(r'"([^"]+)"', cell)
    assert bool(found) != (SAME in cell), cell
    return found


def may_go(row):
    return row[4].startswith("yes")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A federation whose run is over, paid, and shown on a page; and rehearsals."""
    home = tmp_path_factory.mktemp("retention")
    federation = Federation(home, NAMES, rounds=3, files=True).run()
    for command in (["rewards", "--budget", "100.00", "--despite-doubts"], ["page"]):
        done = call(command[0], federation.folder, *command[1:])
        assert done.exit_code == 0, done.output
    sample_runs.made(home / "more", "grouped", "unmasked")
    settings = {"scoring": {"method": "settled"}, "settlement": {"naming": False}}
    Federation(home / "settled", NAMES, rounds=3, settings=settings).run()
    return federation


@pytest.fixture
def folder(made, tmp_path, request):
    return shutil.copytree(made.home / request.param, tmp_path / "folder", symlinks=True)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


# --------------------------------------------------------------------------------------- the server's folder


def test_every_file_of_a_run_folder_is_in_the_table_and_every_row_is_a_file(made):
    there = {item.name for name in FOLDERS for item in (made.home / name).iterdir()}
    there = {"page-*.html" if name.startswith("page-") else name for name in there}
    by_commands = {"costs.json", "notes.txt"}  # of `fedmerit run`, and of Flower's server
    assert there | by_commands == {name.rstrip("/") for name in SERVER}


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_what_may_be_deleted_leaves_a_run_that_verifies_and_what_must_stay_is_missed_by_name(folder):
    before, away = list(verify_folder(folder)), folder.parent / "away"
    items = [(item, row) for name, row in SERVER.items() for item in folder.glob(name.rstrip("/"))]
    for item, row in items:
        item.rename(away)
        if may_go(row):
            after = list(verify_folder(folder))
            assert set(before) <= set(after), item
            news = " ".join(set(after) - set(before))
            assert all(words in news for words in quoted(row[5])), (item, news)
            assert SAME not in row[5] or not news, (item, news)
        else:
            with pytest.raises(LedgerError) as caught:
                list(verify_folder(folder))
            assert all(words in str(caught.value) for words in quoted(row[5])), item
        away.rename(item)
    for item, row in items:
        if may_go(row):
            remove(item)
    assert {item.name for item in folder.iterdir()} == {"ledger.sqlite", "config.toml"}
    left = " ".join(verify_folder(folder))
    assert "chain" in left
    assert "scores.json is missing" in left


def test_files_are_as_private_as_the_page_says(made):
    """Rows that state mode 600 hold only such files; the others are not claimed to be closed."""
    folders = (made.folder, made.home / "settled" / "run")
    named = [name for name, row in SERVER.items() if "(mode 600)" in row[2]]
    closed = [folder / name for folder in folders for name in named if (folder / name).exists()]
    assert {path.name for path in closed} == {Path(name).name for name in named}
    files = [file for one in closed for file in (one.iterdir() if one.is_dir() else [one])]
    files += [
        file for name in NAMES for file in (made.home / f"{name}.pem.state").rglob("*") if file.is_file()
    ]
    files += [made.home / f"{name}.pem" for name in NAMES]
    open_ = {file for file in files if stat.S_IMODE(file.stat().st_mode) & 0o077 and file.name != ".lock"}
    assert len(files) > 20
    assert open_ == set()


def test_no_file_holds_a_sample(made):
    """Neither of anybody's training data nor of the test pool: as bytes of either precision, or as digits."""
    pairs = np.concatenate([data(who, 50)[0].reshape(-1, 2)[:100] for who in (*NAMES, "test")])
    assert pairs[-1, 0] in made.pool.x
    files = [file for file in made.home.rglob("*") if file.is_file() and "more" not in file.parts]
    files = [file for file in files if file.name != "pool-0000.arrays"]  # the pool that was opened to all
    contents = {str(file): file.read_bytes() for file in files}
    for name in NAMES:  # what is sealed is looked at too
        state, run = opened(made.home / f"{name}.pem"), made.run_id
        kept = {value: state.read(run, value) for value in names_in(made.home / f"{name}.pem")[run]}
        assert {"terms", "0003.update", "0003.report"} <= kept.keys()
        contents[name] = b"".join([packed(state.content), *kept.values()])
    for where, content in contents.items():
        for pair in pairs:
            assert pair.tobytes() not in content, where
            assert pair.astype(np.float32).tobytes() not in content, where
            assert repr(float(pair[0]))[:12].encode() not in content, where


# --------------------------------------------------------------------------------------- a member's machine


def again(federation, number=1):
    made = Federation(federation.home, NAMES, rounds=1, files=True, ledger=False)
    made.run_id = f"{number:032x}"
    made.train = lambda name, round_, m0: made.linear(name, 10 * number + round_, m0)
    return made


@pytest.fixture
def over(tmp_path):
    return Federation(tmp_path, NAMES, rounds=2, files=True).run()


def test_every_file_of_a_member_is_in_the_table(over):
    kinds = {"KEY": over.home / f"{WHO}.pem", "KEY.state/state": over.home / f"{WHO}.pem.state" / "state"}
    run = over.heads(WHO).parent
    named = {*kinds.values(), run, run.parent, over.home / "roster.toml", run.parent / ".lock"}
    there = {path for path in over.home.rglob("*") if f"{WHO}.pem" in str(path) or path.name == "roster.toml"}
    assert {path for path in there if run not in path.parents} == named
    assert {*MEMBER} == {
        *kinds, "KEY.state/RUN/ of a run under way", "KEY.state/RUN/ of a run that is over", "roster.toml",
    }  # fmt: skip


def test_a_member_without_its_key_or_roster_does_nothing(over):
    (over.home / f"{WHO}.pem").unlink()
    with pytest.raises(KeyFileError) as caught:
        load_key(over.home / f"{WHO}.pem")
    assert all(words in str(caught.value) for words in quoted(MEMBER["KEY"][5]))
    (over.home / "roster.toml").unlink()
    with pytest.raises(KeyFileError) as caught:
        list(verify_folder(over.folder, roster=over.home / "roster.toml"))
    assert all(words in str(caught.value) for words in quoted(MEMBER["roster.toml"][5]))
    assert any(line.startswith("keys: taken from the ledger itself") for line in verify_folder(over.folder))


def test_a_member_without_its_state_joins_nothing(over, caplog):
    (over.home / f"{WHO}.pem.state" / "state").unlink()
    later = again(over).run()
    assert WHO not in later.joined
    assert all(words in caplog.text for words in quoted(MEMBER["KEY.state/state"][5]))


def test_a_member_without_the_folder_of_a_run_under_way_is_out_of_that_run(tmp_path, caplog):
    federation = Federation(tmp_path, NAMES, rounds=2, files=True)
    with federation.begun():
        federation.round(1)
        shutil.rmtree(federation.heads(WHO).parent)
        federation.round(2)
    assert [WHO in one.included for one in federation.rounds] == [True, False]
    row = MEMBER["KEY.state/RUN/ of a run under way"]
    assert not may_go(row)
    assert all(words in caplog.text for words in quoted(row[5]))


def test_the_folder_of_a_run_that_is_over_may_go(over):
    """The member joins the next run; only the comparison with what it was told is no longer possible."""
    row = MEMBER["KEY.state/RUN/ of a run that is over"]
    heads = over.heads(WHO)
    assert any(line.startswith("kept:") for line in verify_folder(over.folder, heads=heads))
    shutil.rmtree(heads.parent)
    later = again(over).run()
    assert WHO in later.rounds[0].included
    assert may_go(row)
    with pytest.raises(LedgerError) as caught:
        list(verify_folder(over.folder, heads=heads))
    assert all(words in str(caught.value) for words in quoted(row[5]))
    assert not any(line.startswith("kept:") for line in verify_folder(over.folder))


def test_updates_are_kept_until_the_next_round_and_those_of_the_last_until_the_next_run(over):
    key = over.home / f"{WHO}.pem"
    assert {"0002.client", "0002.update"} <= names_in(key)[over.run_id]
    assert not [name for name in names_in(key)[over.run_id] if name.startswith("0001.")]
    later = again(over)
    with later.begun():
        pass
    assert not [name for name in names_in(key)[over.run_id] if "." in name]


# ------------------------------------------------------------------------------------------------- the names


def test_page_scores_settings_and_ledger_name_everybody(made):
    (page,) = made.folder.glob("page*.html")
    for file in (page.name, "scores.json", "scores.csv", "config.toml", "ledger.sqlite"):
        assert all(name.encode() in (made.folder / file).read_bytes() for name in NAMES), file


@pytest.mark.parametrize("visibility", ["all", "coordinator"])
def test_what_a_members_copy_holds_of_the_others(tmp_path, fedmerit, visibility):
    federation = Federation(tmp_path, NAMES, rounds=2, settings={"scoring": {"visibility": visibility}}).run()
    fedmerit("export", federation.folder, "--out", tmp_path / "mine.jsonl", "--for", WHO)
    text = (tmp_path / "mine.jsonl").read_text(encoding="utf-8")
    lines = " ".join(verify_copy(tmp_path / "mine.jsonl"))
    of_others = [
        str(measured["alone"])
        for one in federation.records
        if one.kind == "report" and one.author != WHO
        for measured in one.body["measured"].values()
    ]
    assert len(of_others) == 6
    said = "this copy holds only their hashes"
    if visibility == "all":
        assert all(number in text for number in of_others)
        assert said not in lines
    else:
        assert not any(number in text for number in of_others)
        assert said in lines
    assert all(name in text and public_key(federation.keys[name]).hex() in text for name in NAMES)


# ------------------------------------------------------------------------------------ when a member leaves


def test_a_roster_without_a_member_still_holds_the_roster_with_it(over):
    others = [member for member in over.roster.members if member.name != WHO]
    change = Change.proposed(over.roster, Roster(others, over.roster.server))
    for member in others:
        change = change.signed(over.keys[member.name])
    write_roster(over.home / "next.toml", change.adopted())
    assert WHO not in read_roster(over.home / "next.toml").names
    text = (over.home / "next.toml").read_text(encoding="utf-8")
    assert f'"{WHO}"' in text
    assert public_key(over.keys[WHO]).hex() in text
