"""The server's own key: where Contributions finds it, and what members do without it."""

import os
import stat

import pytest
import small
from federation_in import NAMES, NODES, grid_of, run
from flwr.app import Message

from fedmerit.errors import ConfigError, KeyFileError, ProtocolError
from fedmerit.flower.codec import put, take
from fedmerit.flower.grid import QUERY
from fedmerit.identity import Roster, load_key, new_key, public_key, read_roster, write_roster
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.records import first_body
from fedmerit.protocol.messages import Parcel, pack
from fedmerit.verify import record_decision


def server_in(folder):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return first_body(ledger, "run")["keys"]["server"]


def roster_without(home):
    """The same members, and no server."""
    members = read_roster(home / "roster.toml").members
    (home / "roster.toml").unlink()
    write_roster(home / "roster.toml", Roster(members))


def test_the_run_folder_holds_a_link_to_the_one_key(home):
    small.start(small.contributions(home), small.members(home), 1)
    link = home / "run" / "keys" / "server.pem"
    assert link.is_symlink()
    assert link.resolve() == home / "server.pem"
    assert stat.S_IMODE(os.stat(link).st_mode) == 0o600
    named = read_roster(home / "roster.toml").server.hex()
    assert server_in(home / "run") == named == public_key(load_key(home / "server.pem")).hex()


def test_the_same_key_serves_the_next_run_and_signs_payouts(finished):
    decision, new = record_decision(
        finished / "run", Terms(budget="10.00", utility="expected-accuracy", despite_doubts=True)
    )
    assert new
    assert decision.number == 1


def test_the_key_may_lie_elsewhere(home):
    (home / "vault").mkdir()
    (home / "server.pem").rename(home / "vault" / "ours.pem")
    with pytest.raises(ConfigError, match=r"server_key: .*server\.pem does not exist; expected"):
        small.contributions(home)
    strategy = small.contributions(home, server_key=home / "vault" / "ours.pem")
    small.start(strategy, small.members(home), 1)
    assert len(strategy.scores["rounds"]) == 1


def test_another_key_is_refused_before_anybody_is_invited(home):
    other = new_key(home / "other.pem").hex()
    with pytest.raises(ConfigError, match=f"is the key ed25519:{other}, but the roster names ed25519:"):
        small.contributions(home, server_key=home / "other.pem")
    (home / "server.pem").chmod(0o644)
    with pytest.raises(KeyFileError, match="mode 600"):
        small.contributions(home)


def test_a_roster_without_a_server_is_for_simulations(home):
    roster_without(home)
    with pytest.raises(ConfigError, match="but the roster names no server"):
        small.contributions(home, server_key=home / "server.pem")
    strategy = small.contributions(home)
    with pytest.raises(ConfigError, match=r"roster: names no server.*fedmerit keys new --server"):
        small.start(strategy, small.members(home), 1)
    assert not (home / "run").exists()


def test_members_refuse_a_server_that_is_not_on_their_roster_and_its_notes_name_both_keys(home):
    """The server has a roster file of its own, with its own key on it."""
    named = read_roster(home / "roster.toml").server.hex()
    (home / "elsewhere").mkdir()
    own = new_key(home / "elsewhere" / "server.pem")
    members = read_roster(home / "roster.toml").members
    write_roster(home / "elsewhere" / "roster.toml", Roster(members, own))
    grid = grid_of(home)
    with pytest.raises(ProtocolError, match="0 of 4 members joined"):
        run(home / "elsewhere", grid, join=0.5)
    told = [str(reply.error.reason) for _, _, reply in grid.seen]
    assert len(told) >= len(NAMES)
    for name in NAMES:
        (said, *_) = [text for text in told if f"member {name}" in text]
        assert f"ed25519:{own.hex()}" in said
        assert f"ed25519:{named}" in said


def test_a_message_of_another_protocol_is_refused_with_both_versions(home):
    """Also to the server, which is told nothing else: whoever runs it must know what to install."""
    grid = grid_of(home)
    parcel = Parcel(pack(["fedmerit remote 9", "4.5", b"", b""]))
    message = Message(put(parcel), dst_node_id=NODES["client-2"], message_type=QUERY)
    assert take(message.content).head == parcel.head
    (reply,) = grid.send_and_receive([message])
    assert "VersionError" in reply.error.reason
    assert (
        "member client-2: the server has fedmerit 4.5 and speaks protocol 9, this member"
        in reply.error.reason
    )
