"""A ledger with keys that are not the members': what `verify` says with a roster, and what without."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, Member, Roster, exact, load_key, public_key, read_roster
from fedmerit.notes import words
from fedmerit.report.page.html import facts_of
from fedmerit.report.page.text import not_guaranteed
from fedmerit.verify import verify_copy, verify_folder
from forging import body_of, copy_for, written
from linear_federation import LIAR, Federation
from refusals import found_wrong

NAMES = tuple(f"client-{i}" for i in range(4))


@pytest.fixture
def home(finished):
    return finished


def forged(keys, hash_=None):
    """Every key one of the server's own, client-1 as good as can be, everything signed anew."""

    def tell(ledger, records):
        head = ended = ""
        for record in records:
            body = body_of(record)
            if record.kind == "run":
                body["keys"] = {name: public_key(key).hex() for name, key in keys.items()}
            if record.kind == "join":
                body["server"] = public_key(keys[SERVER]).hex()
            if record.kind in ("run", "join") and hash_:
                body["terms"]["roster"] = hash_
            if record.kind == "schedule":
                head = ledger.head
            if record.kind == "outcome":
                body["head"] = head
            if record.kind == "report":
                body["bound_to"]["head"] = head
                for one in body["measured"].values() if record.author == "client-1" else ():
                    one |= {"alone": exact(1.0), "without": exact(0.0)}
            if record.kind == "seen":
                ended = ended or ledger.head
                body["head"] = ended
            yield record.author, record.kind, body, b""

    return tell


@pytest.fixture
def made_up():
    return {name: Ed25519PrivateKey.generate() for name in (SERVER, *NAMES)}


def roster_of(keys, weights=None):
    members = (
        Member(name, public_key(keys[name]), weights and weights[name]) for name in keys if name != SERVER
    )
    return Roster(members, public_key(keys[SERVER]))


@pytest.mark.parametrize("thorough", [False, True])
def test_a_ledger_forged_from_end_to_end_is_found_by_a_roster_and_by_nothing_else(home, made_up, thorough):
    """The thorough one puts the hash of its own roster into the terms as well."""
    honest, other = read_roster(home / "roster.toml").hash.hex(), roster_of(made_up).hash.hex()
    written(home, forged(made_up, other if thorough else None), made_up, anew=(1, 2))
    lines = list(verify_folder(home / "run"))
    assert any(line.startswith("members: 4 of 4 joined, each with its own key; ") for line in lines)
    assert "scores: follow from the reports in the ledger" in lines
    assert any(line.startswith("heads: 4 of 4 members signed") for line in lines)
    (said,) = [
        line for line in lines if line.startswith("keys: taken from the ledger itself; compare with --roster")
    ]
    assert honest not in said  # a reader who compares the hash is told one of these keys, or none
    assert said.endswith(f"the hash of your roster with {other}") == thorough
    with pytest.raises(LedgerError) as caught:
        list(verify_folder(home / "run", roster=home / "roster.toml"))
    message = str(caught.value)
    assert message.startswith(f"record 1 (run by server): its keys do not match {home / 'roster.toml'}: ")
    for name in (SERVER, *NAMES):
        path = home / "run" / "keys" / "server.pem" if name == SERVER else home / f"{name}.pem"
        own = public_key(load_key(path)).hex()[:16]
        there = public_key(made_up[name]).hex()[:16]
        whose = "the server" if name == SERVER else name
        assert f"the key of {whose} is {there}..., on the roster {own}..." in message
    found_wrong(
        "its keys do not match", verify_copy, copy_for(home, LIAR), member=LIAR, roster=home / "roster.toml"
    )


def test_an_honest_ledger_has_the_keys_of_the_roster(home):
    assert words("lacks.keys") in not_guaranteed(facts_of(home / "run"))
    roster = read_roster(home / "roster.toml")
    said = f"keys: they match {home / 'roster.toml'}, roster hash {roster.hash.hex()}"
    assert said in list(verify_folder(home / "run", roster=home / "roster.toml"))
    assert said in list(verify_copy(copy_for(home, LIAR), roster=str(home / "roster.toml")))
    lines = list(verify_folder(home / "run", roster=roster))
    assert f"keys: they match the roster, roster hash {roster.hash.hex()}" in lines
    (said,) = [line for line in verify_folder(home / "run") if line.startswith("keys:")]
    assert said == (
        "keys: taken from the ledger itself; compare with --roster FILE, or the hash of your roster with "
        f"{roster.hash.hex()}"
    )


def test_whose_key_differs_and_who_is_missing_is_named(home):
    server = read_roster(home / "roster.toml").server
    members = {member.name: member for member in read_roster(home / "roster.toml").members}
    other = Member("client-2", bytes(range(32)))

    def message(*changed, without=()):
        kept = {name: one for name, one in members.items() if name not in without}
        roster = Roster((kept | {one.name: one for one in changed}).values(), server)
        with pytest.raises(LedgerError) as caught:
            list(verify_folder(home / "run", roster=roster))
        return str(caught.value).partition("its keys do not match the roster: ")[2]

    there = members["client-2"].key.hex()[:16]
    assert message(other) == f"the key of client-2 is {there}..., on the roster 0001020304050607..."
    assert message(without=("client-3",)) == "client-3 is not on it"
    assert message(Member("west", other.key)) == "west is on it, but not in the run"
    weighed = Roster((Member(one.name, one.key, 3.0) for one in members.values()), server)
    for other in (weighed, Roster(members.values()), Roster(members.values(), server, quorum=4)):
        same = r"has [0-9a-f]{64}: names and keys are the same; public weights, "
        found_wrong(same, verify_folder, home / "run", roster=other)
    another = Roster(members.values(), bytes(range(32)))
    differs = r"the key of the server is [0-9a-f]{16}\.\.\., on the roster 0001"
    found_wrong(differs, verify_folder, home / "run", roster=another)


def test_public_weights_of_the_roster_are_compared_too(tmp_path):
    weights = dict(zip(NAMES, (3.0, 1.0, 2.0, 1.0), strict=True))
    Federation(tmp_path, files=True, weights=weights).run()
    assert any(
        line.startswith("keys: they match")
        for line in verify_folder(tmp_path / "run", roster=tmp_path / "roster.toml")
    )
    hash_ = read_roster(tmp_path / "roster.toml").hash.hex()
    assert any(line.endswith(f"roster with {hash_}") for line in verify_folder(tmp_path / "run"))
    own = read_roster(tmp_path / "roster.toml")
    others = Roster((Member(one.name, one.key, 1.0) for one in own.members), own.server)
    found_wrong("its public weights do not match the roster", verify_folder, tmp_path / "run", roster=others)
    keys = {name: load_key(tmp_path / f"{name}.pem") for name in NAMES}
    keys[SERVER] = load_key(tmp_path / "run" / "keys" / "server.pem")
    written(tmp_path, forged(keys, "00" * 32), keys, anew=(1, 2))
    found_wrong(
        "agreed to a roster that its keys and public weights do not form", verify_folder, tmp_path / "run"
    )


def test_members_must_have_agreed_to_the_config_that_scores_are_computed_with(home):
    def tell(ledger, records):
        for record in records[:2]:
            body = body_of(record)
            if record.kind == "run":
                body["terms"]["config"] += "\n"
            yield record.author, record.kind, body, record.signature

    written(home, tell)
    with pytest.raises(LedgerError, match=r"^record 1 \(run by .*its config does not match its hash"):
        list(verify_folder(home / "run"))
