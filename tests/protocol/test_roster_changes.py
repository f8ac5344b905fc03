"""Rosters that change between two runs: what a member follows, and what it refuses."""

import shutil
import tomllib
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from fedmerit.config import written
from fedmerit.errors import KeyFileError, LedgerError, RefusedError
from fedmerit.identity import (
    MOST_CHANGES,
    SERVER,
    Change,
    Member,
    Roster,
    public_key,
    read_change,
    read_roster,
    signed_as,
    write_roster,
)
from fedmerit.verify import about_keys, verify_folder
from linear_federation import Federation, write_key
from runs import run_in

NAMES = ("A", "B", "C", "D", "E")
KEYS = {name: Ed25519PrivateKey.generate() for name in (*NAMES, "F", "G", SERVER, "other server", "new A")}
PUBLIC = {name: public_key(key) for name, key in KEYS.items()}


def members(names=NAMES, **keys):
    return [Member(name, keys.get(name, PUBLIC[name])) for name in names]


FIRST = Roster(members(), PUBLIC[SERVER])
SECOND = Roster(members((*NAMES, "F")), PUBLIC[SERVER])


def changed(old, new, *signers):
    """The new roster after the old one, with these members' signatures."""
    change = Change.proposed(old, new)
    for name in signers:
        change = change.signed(KEYS[name])
    return change.adopted()


def forged(old, new, signatures):
    """A roster file's content with any signatures at all."""
    return Roster(new.members, new.server, old, new.quorum, signatures)


def on(old, new, *signers):
    """These people's signatures on the change, whoever they are."""
    content = signed_as(Roster(new.members, new.server, old.hash, new.quorum))
    return {name: KEYS[name].sign(content) for name in signers}


# ----------------------------------------------------------------------------------------------- the chain


def test_a_roster_without_server_and_history_has_the_hash_it_always_had():
    plain = Roster(members())
    assert plain.hash.hex() == Roster(members()[::-1]).hash.hex()
    assert len({one.hash for one in (plain, FIRST, Roster(members(), PUBLIC[SERVER], quorum=4))}) == 3
    assert plain.lineage == plain.hash.hex()


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_chain_survives_its_file(tmp_path, suffix):
    second = changed(FIRST, SECOND, "A", "B", "C")
    third = changed(second, Roster(members(("B", "C", "D", "E")), PUBLIC["other server"]), "B", "C", "D", "F")
    path = tmp_path / f"roster.{suffix}"
    write_roster(path, third)
    found = read_roster(path)
    assert found == third
    assert [one.hash for one in found.chain] == [third.hash, second.hash, FIRST.hash]
    assert found.lineage == FIRST.hash.hex()
    assert found.server == PUBLIC["other server"]
    assert set(found.signatures) == {"B", "C", "D", "F"}


STRICT, LOOSE = (Roster(members(), PUBLIC[SERVER], quorum=quorum) for quorum in (5, 3))
OTHER = Roster(members((*NAMES, "G")), PUBLIC[SERVER])
SMALL = changed(FIRST, Roster(members(("C", "D", "E")), PUBLIC[SERVER]), "A", "B", "C")
ROTATED = changed(FIRST, Roster(members(A=PUBLIC["new A"]), PUBLIC[SERVER]), "A", "B", "C")
THREE_SIGNED = on(FIRST, SECOND, "A", "B", "C")
NOT_BY_A, NO_MEMBER = "the signature of A is not by its key", "not the key of a member on the old roster"
CHANGES = {  # what somebody tries -> why nobody follows it
    **{
        f"{count} of five": (
            lambda count=count: changed(FIRST, SECOND, *NAMES[:count]),
            rf"{count} of the 5 members of the roster before it.*: 3 must",
        )
        for count in (0, 1, 2)
    },
    **{
        f"{count} of a quorum of five": (
            lambda count=count: changed(STRICT, LOOSE, *NAMES[:count]), f"{count} of the 5 members .* 5 must"
        )
        for count in (3, 4)
    },
    "who joins signs": (lambda: Change.proposed(FIRST, SECOND).signed(KEYS["F"]), NO_MEMBER),
    "who joins counts": (
        lambda: forged(FIRST, SECOND, on(FIRST, SECOND, "A", "B", "F")), "'F' signed, but is not on"
    ),
    "who left signs": (lambda: Change.proposed(SMALL, LOOSE).signed(KEYS["A"]), NO_MEMBER),
    "who left counts": (
        lambda: forged(SMALL, LOOSE, on(SMALL, LOOSE, "A", "B", "C")), "'A' signed, but is not on"
    ),
    "an old key": (lambda: forged(ROTATED, SECOND, on(ROTATED, SECOND, "A", "B", "C")), NOT_BY_A),
    "for somebody else": (
        lambda: forged(FIRST, SECOND, {**THREE_SIGNED, "C": THREE_SIGNED["A"]}), "signature of C is not by"
    ),
    "for another roster": (lambda: forged(FIRST, OTHER, THREE_SIGNED), NOT_BY_A),
    "after another roster": (lambda: forged(ROTATED, SECOND, THREE_SIGNED), NOT_BY_A),
}  # fmt: skip


@pytest.mark.parametrize(("tried", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_only_a_quorum_of_the_roster_before_changes_it(tried, reason):
    """A signature is by a key on the roster before, and on one change only."""
    with pytest.raises(KeyFileError, match=reason):
        tried()


def test_the_quorum_that_the_old_roster_states_counts_and_not_that_of_the_new():
    assert changed(STRICT, LOOSE, *NAMES).needed == 3
    assert changed(SMALL, LOOSE, "C", "D").names == NAMES


@pytest.mark.parametrize("quorum", [0, 1, 2, 6, -1, True, 2.5, "3"])
def test_a_quorum_is_more_than_half_and_at_most_all(quorum):
    """Two halves could each follow a roster of their own."""
    with pytest.raises(KeyFileError, match="quorum: expected a whole number above half of the 5 members"):
        Roster(members(), PUBLIC[SERVER], quorum=quorum)


def test_nobody_signs_twice(tmp_path):
    assert Change.proposed(FIRST, SECOND).signed(KEYS["A"]).signed(KEYS["A"]).missing == 2
    with pytest.raises(KeyFileError, match=r"roster\.toml: 'A' signed twice"):
        rewritten(tmp_path, changed(FIRST, SECOND, "A", "B", "C"), twice)


def twice(table):
    table["signatures"][2] = table["signatures"][0]


def rewritten(tmp_path, roster, change):
    path = tmp_path / "roster.toml"
    write_roster(path, roster)
    table = tomllib.loads(path.read_text())
    change(table)
    path.write_text("\n".join(f"{key} = {written(value)}" for key, value in table.items()))
    return read_roster(path)


def damaged(tmp_path, change):
    second = changed(FIRST, SECOND, "A", "B", "C")
    third = changed(second, Roster(members(), PUBLIC[SERVER], quorum=4), "A", "B", "C", "F")
    return rewritten(tmp_path, third, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("history"),
        lambda table: table["history"].pop(0),
        lambda table: table["history"].pop(1),
        lambda table: table["history"].reverse(),
        lambda table: table["history"][1].pop("previous"),
        lambda table: table.pop("previous"),
        lambda table: table["history"][1].pop("signatures"),
        lambda table: table["history"][0].update(quorum=4),
        lambda table: table["history"][0].pop("server"),
        lambda table: table["history"][0]["members"].pop(),
        lambda table: table["signatures"].pop(),
        lambda table: table["signatures"][0].update(signature="00" * 64),
        lambda table: table["signatures"][0].update(signature="x"),
        lambda table: table.update(server="ed25519:" + PUBLIC["other server"].hex()),
        lambda table: table.update(quorum=3),
        lambda table: table.update(history={}),
        lambda table: table.update(history=[7]),
        lambda table: table.update(signatures=7),
        lambda table: table.update(previous=7),
        lambda table: table.update(server=7),
    ],
)
def test_a_chain_that_is_cut_or_changed_is_refused(tmp_path, change):
    (tmp_path / "good").mkdir()
    assert damaged(tmp_path / "good", lambda table: None).needed == 4
    with pytest.raises(KeyFileError, match=r"roster\.toml: "):
        damaged(tmp_path, change)


def test_a_chain_has_an_end():
    old = FIRST
    for number in range(MOST_CHANGES):
        new = Roster(members(), PUBLIC[SERVER], quorum=3 + number % 2)
        old = changed(old, new, "A", "B", "C", "D")
    with pytest.raises(KeyFileError, match=f"a roster changes at most {MOST_CHANGES} times"):
        changed(old, FIRST, "A", "B", "C", "D")


def test_the_server_is_no_member():
    with pytest.raises(KeyFileError):
        Roster(members(), PUBLIC["A"])
    with pytest.raises(KeyFileError):
        Roster(members(), b"short")


def test_a_roster_whose_chain_is_not_known_has_no_lineage():
    with pytest.raises(KeyFileError):
        _ = Roster(members(), PUBLIC[SERVER], FIRST.hash).lineage


# -------------------------------------------------------------------------------------------------- a change


def test_a_change_travels_as_a_file_and_says_what_it_changes(tmp_path):
    new = Roster(members(("B", "C", "D", "E", "F"), B=PUBLIC["G"]), PUBLIC["other server"], quorum=4)
    change = Change.proposed(FIRST, new).signed(KEYS["B"])
    (tmp_path / "change.toml").write_text(change.text(), encoding="utf-8")
    found = read_change(tmp_path / "change.toml")
    assert found == change
    assert [*found.differences()] == [
        "A leaves",
        f"B has a new key  ed25519:{PUBLIC['G'].hex()}, not ed25519:{PUBLIC['B'].hex()}",
        f"F joins  ed25519:{PUBLIC['F'].hex()}",
        "the server has a new key  "
        f"ed25519:{PUBLIC['other server'].hex()}, not ed25519:{PUBLIC[SERVER].hex()}",
        "the next change needs 4 of 5 members, not 3 of 5",
    ]
    other = Change.proposed(FIRST, new).signed(KEYS["A"]).signed(KEYS["C"])
    assert found.joined(other).adopted().signatures.keys() == {"A", "B", "C"}
    with pytest.raises(KeyFileError, match="expected signatures on one new roster"):
        found.joined(Change.proposed(FIRST, SECOND))


def test_what_is_no_change_is_refused(tmp_path):
    with pytest.raises(KeyFileError):
        Change.proposed(FIRST, FIRST)
    with pytest.raises(KeyFileError):
        Change.proposed(FIRST, changed(FIRST, SECOND, "A", "B", "C"))
    write_roster(tmp_path / "roster.toml", FIRST)
    with pytest.raises(KeyFileError, match="format = 'fedmerit roster change 1'"):
        read_change(tmp_path / "roster.toml")
    text = Change.proposed(FIRST, SECOND).text()
    (tmp_path / "change.toml").write_text(text, encoding="utf-8")
    with pytest.raises(KeyFileError, match="format = 'fedmerit roster 1'"):
        read_roster(tmp_path / "change.toml")
    (tmp_path / "unsigned.toml").write_text(text.replace("roster change 1", "roster 1"), encoding="utf-8")
    with pytest.raises(KeyFileError, match=r"0 of the 5 members .* \(nobody\): 3 must"):
        read_roster(tmp_path / "unsigned.toml")


# ------------------------------------------------------------------------------------------- what members do

THREE = ("client-0", "client-1", "client-2")


class Years:
    """One federation through several rosters; its members' files stay where they are."""

    def __init__(self, home):
        self.home, self.runs, self.keys = home, 0, {}
        self.roster = self.run().roster

    def run(self, roster=None, names=(*THREE, "client-3")):
        self.runs += 1
        federation = Federation(self.home, names, 1, seed=0, files=True, roster=roster)
        federation.run_id = f"{self.runs:032x}"
        federation.model = federation.model + self.runs / 10  # another M0: no update is sent twice
        if self.home.joinpath("run").exists():
            shutil.rmtree(self.home / "run")
        self.keys |= federation.keys
        return federation.run()

    def next(self, *, names=(*THREE, "client-3"), before=None, signers=THREE, quorum=None):
        old = before or self.roster
        people = [Member(name, public_key(self.keys[name])) for name in names]
        change = Change.proposed(old, Roster(people, old.server, quorum=quorum))
        for name in signers:
            change = change.signed(self.keys[name])
        return change.adopted()


@pytest.fixture
def years(tmp_path):
    return Years(tmp_path)


def refused(federation):
    first = {name: federation.errors(name)[0] for name in federation.names if federation.errors(name)}
    assert all(isinstance(error, RefusedError) for error in first.values())
    return {name: str(error) for name, error in first.items()}


def test_a_roster_that_enough_members_signed_is_followed_and_the_ledger_names_the_one_before(years):
    second = years.next(names=THREE)
    found = years.run(second, THREE)
    assert set(found.rounds[0].reports) == set(THREE)
    assert f"roster: follows from the one with hash {years.roster.hash.hex()}" in found.verified()
    assert found.records[0].body["terms"]["previous"] == years.roster.hash.hex()
    third = years.next(names=THREE, before=second, signers=THREE[:2], quorum=3)
    lines = {one.code: one for one in verify_folder(found.folder, roster=third)}
    assert lines["keys"].values["hash"] == second.hash.hex()
    assert lines["keys-earlier"].values["changes"] == 1
    assert set(years.run(third, THREE).rounds[0].reports) == set(THREE)


def test_a_roster_of_nobody_knows_where_is_not_followed(years):
    """The same members and the same server: but nobody signed that client-3 is gone."""
    alone = Roster([one for one in years.roster.members if one.name in THREE], years.roster.server)
    found = years.run(alone, THREE)
    assert found.rounds[0].aborted
    assert set(refused(found)) == set(THREE)
    for text in refused(found).values():
        assert f"took part under the roster {years.roster.hash.hex()}" in text
        assert alone.hash.hex() in text
        assert "fedmerit keys propose" in text


def test_who_took_part_under_one_of_two_successors_refuses_the_other(years):
    one, other = years.next(names=THREE), years.next(quorum=4)
    assert set(years.run(one, THREE).rounds[0].reports) == set(THREE)
    found = years.run(other)
    assert found.rounds[0].aborted
    assert set(refused(found)) == set(THREE)  # client-3 took part under neither


def test_an_old_roster_does_not_come_back(years):
    first, second = years.roster, years.next(quorum=4)
    assert set(years.run(second).rounds[0].reports) == {*THREE, "client-3"}
    assert set(refused(years.run(first))) == {*THREE, "client-3"}
    back = years.next(before=second, signers=(*THREE, "client-3"))  # the same members, by a signed change
    assert set(years.run(back).rounds[0].reports) == {*THREE, "client-3"}


@pytest.mark.parametrize("back", [False, True])
def test_a_server_that_was_replaced_gets_nothing_more_in_a_run_that_it_began(tmp_path, back):
    """Nor if the old roster comes back onto the members' machines once they took part under the new one."""
    federation = Federation(tmp_path, 4, 3, files=True, ledger=False)
    old, other = federation.roster, Ed25519PrivateKey.generate()
    with federation.begun():
        assert federation.round(1) is not None
        change = Change.proposed(old, Roster(old.members, public_key(other)))
        for name in THREE:
            change = change.signed(federation.keys[name])
        federation.roster = change.adopted()  # on the members' machines
        if back:
            made = Federation(tmp_path, 4, 1, files=True, ledger=False, roster=federation.roster)
            made.keys[SERVER], made.run_id = other, "ab" * 16
            with made.begun():
                assert made.joined == {*made.names}
            federation.roster = old
        federation.coordinator.recorder.roster = federation.roster  # the old server knows of it
        assert federation.round(2) is None
    answers = [one.answer for one in federation.passed if one.ask.round == 2]
    assert answers
    assert answers == [None] * len(answers)


def test_a_member_that_missed_a_change_follows_the_whole_chain(years):
    second = years.next(names=THREE)
    assert years.run(second, THREE).rounds[0].reports
    third = years.next(before=second)
    assert set(years.run(third).rounds[0].reports) == {*THREE, "client-3"}


def test_a_member_whose_key_is_replaced_goes_on_with_a_new_state(years):
    """A lost key: the others sign another one for the same name."""
    lost = years.home / "client-3.pem"
    lost.rename(years.home / "lost.pem")
    years.keys["client-3"] = Ed25519PrivateKey.generate()
    (years.home / "client-3.pem.state").rename(years.home / "lost.pem.state")
    second = years.next()
    write_key(lost, years.keys["client-3"])
    key, Federation._key = Federation._key, lambda self, name: years.keys[name]
    try:
        assert set(years.run(second).rounds[0].reports) == {*THREE, "client-3"}
    finally:
        Federation._key = key


def test_terms_that_name_another_roster_before_are_refused(tmp_path):
    federation = Federation(tmp_path, rounds=1, ledger=False, terms={"previous": "00" * 32})
    with federation.begun():
        assert "another roster before" in str(federation.errors("client-0")[0])
    federation = Federation(tmp_path, rounds=1, ledger=False, terms={"quorum": 3})
    with federation.begun():
        assert "another roster before" in str(federation.errors("client-0")[0])


def test_a_ledger_that_names_another_roster_before_is_found(years):
    """By the reader's roster, even if everybody signed the lie."""
    second = years.next(names=THREE)
    found = years.run(second, THREE)
    assert list(verify_folder(found.folder, roster=second))
    run = run_in(found.folder)
    for lie in ({"previous": "00" * 32}, {"quorum": 3}):
        terms = {**run.first.terms, **lie}
        told = replace(run, first=structs.replace(run.first, terms=terms))
        with pytest.raises(LedgerError, match="its terms state another quorum, or another roster before it"):
            list(about_keys(told, second, "the roster"))
        (said, *_) = about_keys(told, None, "")
        assert said.code == "keys-weighted"  # without a roster the hash in the terms is no longer explained
    with pytest.raises(LedgerError, match=r"its keys do not match the roster: client-3 is on it"):
        list(verify_folder(found.folder, roster=years.roster))
