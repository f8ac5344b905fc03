"""A member's state: nothing of it is lost or put back unnoticed, and a kill at any moment harms nobody."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from typing import Any

import pytest

from fedmerit.errors import ProtocolError, RefusedError, StoreError
from fedmerit.identity import Change, Roster, load_key
from fedmerit.protocol.member import KEPT_ROUNDS, REFUSED
from fedmerit.protocol.memory import Value
from fedmerit.protocol.messages import Ask
from fedmerit.storage import member_state
from fedmerit.storage.member_state import MemberFiles, about_state, allow
from linear_federation import LIAR, STAGES, Federation
from states import names_in, opened

MESSAGES = ("join", "advertise", "share", "train", "check", "unmask", "report", "close")


@pytest.fixture
def federation(tmp_path, monkeypatch):
    monkeypatch.setattr(member_state, "SMALL", 256)  # clients, updates and reports have their own files
    return Federation(tmp_path, rounds=3, files=True)


def key_of(federation, name=LIAR):
    return federation.home / f"{name}.pem"


def home_of(federation, name=LIAR):
    return federation.home / f"{name}.pem.state"


def put_back(copy, home):
    shutil.rmtree(home, ignore_errors=True)
    if copy.exists():
        shutil.copytree(copy, home)


def recorded(federation):
    """Go through a run; returns (message, copy of the member's state before it) for each one to a member."""
    found = []

    def look(name, ask):
        if name == LIAR:
            copy = federation.home / f"copy-{len(found)}"
            if home_of(federation).exists():
                shutil.copytree(home_of(federation), copy)
            found.append((ask, copy))

    federation.before.append(look)
    federation.run()
    return found


# ------------------------------------------------------------------------------------------- a damaged folder


def damaged(path, how):
    data = path.read_bytes()
    path.unlink()
    if how != "deleted":
        path.write_bytes({"emptied": b"", "halved": data[: len(data) // 2], "changed": data[::-1]}[how])


def files_in(folder):
    """Its files, except the lock and files that are empty from the beginning."""
    return sorted(
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name[0] != "."
    )


@pytest.mark.parametrize("how", ["deleted", "emptied", "halved"])
def test_whichever_file_is_lost_or_cut_the_member_answers_nothing_and_says_what_to_do(
    federation, caplog, how
):
    """Before every message of a run: terms, what it said and did, that it left, what it signed last."""
    messages, home = recorded(federation), home_of(federation)
    seen = set()
    for ask, copy in messages:
        if not copy.exists():
            continue
        for file in files_in(copy):
            put_back(copy, home)
            damaged(home / file, how)
            before = {path: (home / path).read_bytes() for path in files_in(home)}
            caplog.clear()
            with pytest.raises(RefusedError, match=f"{REFUSED}|lost what it keeps"):
                federation.ask(LIAR, ask)
            assert str(home / file) in caplog.text
            assert "put back" in caplog.text
            assert {path: (home / path).read_bytes() for path in files_in(home)} == before
            assert [line for line in about_state(key_of(federation)) if line.code == "problem"]
            seen.add(file.name.partition(".")[0])
    assert {"state", "heads", "terms", "0002"} < seen


def test_a_file_with_other_content_is_no_other_file(federation):
    """Neither bytes of the same length nor the same value of another round or of another run pass for it."""
    messages, home = recorded(federation), home_of(federation)
    _, copy = messages[[ask.exchange for ask, _ in messages].index("close")]
    put_back(copy, home)
    key = key_of(federation)
    state = MemberFiles(key, load_key(key), federation.run_id)
    named = opened(key).content.runs[federation.run_id].files
    assert "terms" in named
    for name in named:
        (path,) = home.glob(f"*/{name}.*")
        good = path.read_bytes()
        for other in (good[::-1], *(file.read_bytes() for file in home.glob("*/*.*") if file != path)):
            path.write_bytes(other)
            with pytest.raises(StoreError, match=f"{name}.*: damaged, or not the file that was written"):
                state.get(Value(name, Any))
            path.write_bytes(good)
        assert state.read(federation.run_id, name) is not None
    heads = home / federation.run_id / "heads"
    heads.write_bytes(heads.read_bytes()[::-1])
    with pytest.raises(StoreError, match="heads: cut or changed"):
        state.check()


def test_a_run_that_lost_a_file_does_not_keep_the_member_from_others(federation, caplog):
    with federation.begun():
        federation.round(1)
        shutil.rmtree(home_of(federation) / federation.run_id)
        invitation = federation.asked(LIAR)["join", 0]
        assert federation.ask(LIAR, Ask("join", "ab" * 16, 0, invitation.body))
        with pytest.raises(RefusedError, match="lost what it keeps; its own log says which file"):
            federation.ask(LIAR, invitation)
        assert "takes no further part in the run, but it joins other runs" in " ".join(caplog.text.split())


def test_an_owner_may_delete_the_folder_of_a_run_that_is_over(federation):
    """Its state still knows that the run is over, and does not join it again."""
    federation.run()
    shutil.rmtree(home_of(federation) / federation.run_id)
    assert not [line for line in about_state(key_of(federation)) if line.code == "problem"]
    asked = federation.asked(LIAR)
    federation.ask(LIAR, Ask("join", "ab" * 16, 0, asked["join", 0].body))
    assert names_in(key_of(federation))[federation.run_id] == {"floor", "seen"}
    with pytest.raises(RefusedError, match=REFUSED):
        federation.ask(LIAR, asked["join", 0])
    assert not [line for line in about_state(key_of(federation)) if line.code == "problem"]


def test_without_its_state_a_member_joins_nothing_although_its_owner_deleted_all_runs(federation):
    federation.run()
    shutil.rmtree(home_of(federation) / federation.run_id)
    (home_of(federation) / "state").unlink()
    made = next_run(federation)
    with made.begun():
        assert made.joined == {*made.names} - {LIAR}
    (problem,) = [line for line in about_state(key_of(federation)) if line.code == "problem"]
    assert "state: missing" in problem


def test_a_state_of_another_version_is_left_alone(federation):
    counters = []
    federation.after.append(
        lambda name, ask, answer: counters.append(opened(key_of(federation)).content.counter) or answer
    )
    federation.run()
    of_liar = counters[1::4]  # four members answer in turn, and every write counts up
    assert of_liar == sorted({*of_liar})
    path = home_of(federation) / "state"
    path.write_bytes(b"FMS4" + path.read_bytes()[4:])
    with pytest.raises(StoreError, match="written by another version of fedmerit"):
        opened(key_of(federation)).content  # noqa: B018


# -------------------------------------------------------------------------------------------- killed anywhere


STEPS = ("fsync", "replace", "unlink", "mkdir", "rmdir")


def in_a_child(work, kill=None):
    """Do something in a process that is killed before one of its writes; returns its result and its writes.

    A process that is killed gives None.
    """
    there, here = os.pipe()
    if (child := os.fork()) == 0:
        try:
            count = [0]

            def stepping(step):
                def do(*args, **options):
                    if count[0] == kill:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count[0] += 1
                    return step(*args, **options)

                return do

            for name in STEPS:
                setattr(os, name, stepping(getattr(os, name)))
            try:
                found = work()
            except ProtocolError as error:
                found = error
            with os.fdopen(here, "wb") as out:
                pickle.dump((found if isinstance(found, bytes) else None, count[0]), out)
        finally:
            os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as result:
        data = result.read()
    assert os.waitpid(child, 0)[0] == child
    return pickle.loads(data) if data else None


@pytest.mark.parametrize(
    "kind", [kind if kind == "advertise" else pytest.param(kind, marks=pytest.mark.long) for kind in MESSAGES]
)
def test_a_member_that_is_killed_at_any_write_never_says_two_things(federation, kind):
    """Its state is the one before the message or the one after it; asked again, it answers once at most."""
    messages, home = recorded(federation), home_of(federation)
    at = {"join": 0, "advertise": 1, "share": 1, "close": 3}.get(kind, 2)
    ((ask, copy),) = [
        (ask, copy) for ask, copy in messages if (ask.exchange, ask.round) == (kind, at if at != 0 else 0)
    ]
    put_back(copy, home)
    whole, writes = in_a_child(lambda: federation.ask(LIAR, ask))
    assert whole is not None
    assert writes >= 4
    answered = 0
    for kill in range(writes):
        put_back(copy, home)
        assert in_a_child(lambda: federation.ask(LIAR, ask), kill) is None
        said = [in_a_child(lambda: federation.ask(LIAR, ask))[0] for _ in range(3)]
        answers = {one for one in said if one is not None}
        if kind not in ("join", "advertise"):
            assert len(answers) <= 1, kill
        answered += bool(answers)
        assert not [line for line in about_state(key_of(federation)) if line.code == "problem"], kill
        assert not [path for path in home.rglob(".*") if path.name != ".lock"] or not answers
    assert answered >= 1


# -------------------------------------------------------------------------------------------- rounds and disk


def test_a_member_stores_few_rounds_whatever_it_is_asked(federation):
    """A server may never ask for a report, and ask for keys of any round."""
    with federation.begun():
        federation.lost = {(name, number): 5 for name in federation.names for number in (1, 2, 3)}
        for number in (1, 2, 3):
            federation.round(number)
        first = federation.asked(LIAR)["advertise", 1]
        kept = names_in(key_of(federation))[federation.run_id]
        assert {int(name[:4]) for name in kept if "." in name} <= {*range(3 - KEPT_ROUNDS, 4)}
        with pytest.raises(RefusedError, match=REFUSED):  # it may be asked for keys of the last rounds only
            federation.ask(LIAR, Ask("advertise", first.run, 0, first.body))


@pytest.fixture
def trained(federation):
    found = []
    federation.train = lambda name, number, m0: found.append(name) or federation.linear(name, number, m0)
    return found


def test_the_budget_of_a_run_is_checked_before_training(federation, trained, monkeypatch, caplog):
    with federation.begun():
        files = opened(key_of(federation)).content.runs[federation.run_id].files
        monkeypatch.setattr(member_state, "DISK", sum(size for _, size in files.values()) + 50)
        assert federation.round(1) is None
        assert trained == []
        needed = "its owner can change that: fedmerit member allow KEY disk="
        assert needed in caplog.text
        for name in federation.names:
            allow(key_of(federation, name), {"disk": str(2**20)})
        assert federation.round(2) is not None


def test_a_full_disk_is_noticed_before_training(federation, trained, monkeypatch, caplog):
    with federation.begun():
        monkeypatch.setattr(member_state, "SPARE", 2**62)
        assert federation.round(1) is None
    assert trained == []
    assert "must be stored, but the disk has" in caplog.text


# -------------------------------------------------------------------------------- an older copy of the folder


def next_run(federation, number=1, roster=None):
    made = Federation(federation.home, rounds=3, files=True, ledger=False, roster=roster)
    made.run_id = f"{number:032x}"
    made.train = lambda name, round_, m0: made.linear(name, 10 * number + round_, m0)
    return made


def without_folder(federation, copy):
    """The key alone, as on a new machine."""
    shutil.rmtree(home_of(federation))


def older_copy(federation, copy):
    """The folder as it was before the member released shares of round 2."""
    put_back(copy, home_of(federation))


@pytest.mark.parametrize("restored", [without_folder, older_copy])
def test_an_older_copy_of_a_members_folder_is_noticed_by_the_others_and_stops_for_good(
    federation, caplog, restored
):
    """It does not know what it released since, and could be led to release it a second time."""
    copies = {(ask.exchange, ask.round): copy for ask, copy in recorded(federation)}
    newest = federation.home / "newest"
    shutil.copytree(home_of(federation), newest)
    restored(federation, copies["unmask", 2])
    made = next_run(federation)
    with made.begun():
        made.round(1)
        assert LIAR not in made.rounds[0].included
        assert "its state is an older copy" in caplog.text
        made.round(2)
    assert [LIAR in one.included for one in made.rounds] == [False, False]
    assert not any(one.member == LIAR and one.ask.exchange == "unmask" for one in made.passed)
    (problem,) = [line for line in about_state(key_of(federation)) if line.code == "problem"]
    assert "never an older one" in problem
    with pytest.raises(RefusedError, match="lost what it keeps"):
        federation.ask(LIAR, Ask("join", "ab" * 16, 0, federation.asked(LIAR)["join", 0].body))
    put_back(newest, home_of(federation))  # which is right
    made = next_run(federation, 2)
    with made.begun():
        assert made.round(1) is not None
    assert LIAR in made.rounds[0].included


@pytest.mark.parametrize("message", [("unmask", 2), ("train", 3)])
def test_a_copy_from_the_last_round_is_noticed_if_the_member_masked_since(federation, caplog, message):
    """It remembers the keys that all have seen, and not what it masked and released with them."""
    copies = {(ask.exchange, ask.round): copy for ask, copy in recorded(federation)}
    older_copy(federation, copies[message])
    made = next_run(federation)
    with made.begun():
        made.round(1)
    assert LIAR not in made.rounds[0].included
    assert "its state is an older copy" in caplog.text


@pytest.mark.parametrize("shown", [False, True])
def test_a_server_cannot_make_an_older_copy_count_up_until_nobody_notices(federation, shown):
    """It asks for keys again and again before others see any, or shows them to the others and stops there."""
    copies = {(ask.exchange, ask.round): copy for ask, copy in recorded(federation)}
    older_copy(federation, copies["unmask", 2])
    made = next_run(federation)
    with made.begun():
        advertise = Ask("advertise", made.run_id, 1, {"members": list(made.names)})
        for _ in range(60):
            made.ask(LIAR, advertise)
        if shown:
            made.lost = {(name, 1): STAGES.index("masked") for name in made.names}
        made.round(1)
        made.round(2)
    assert [LIAR in one.included for one in made.rounds] == [False, False]
    assert len(made.rounds[1].included) == 3


def test_what_is_remembered_outlives_a_change_of_the_roster(federation):
    """Pins and counters belong to the federation, not to one of its rosters."""
    copies = {(ask.exchange, ask.round): copy for ask, copy in recorded(federation)}
    older_copy(federation, copies["unmask", 2])
    old = federation.roster
    change = Change.proposed(old, Roster(old.members, old.server, quorum=4))
    for name in federation.names[:3]:
        change = change.signed(federation.keys[name])
    made = next_run(federation, roster=change.adopted())
    assert made.roster.hash != old.hash
    with made.begun():
        made.round(1)
    assert set(made.rounds[0].included) == {*made.names} - {LIAR}
    rosters = opened(key_of(federation, "client-0")).content.known.lineages
    assert [*rosters] == [old.hash.hex()]
    assert len(rosters[old.hash.hex()].runs) == 2
