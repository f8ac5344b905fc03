"""Who may be the server of a run: only the key on the members' own roster."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.errors import BindingError, ProtocolError, RefusedError
from fedmerit.identity import SERVER, Roster, public_key
from linear_federation import Federation


def outsider(federation):
    """Somebody with a key of its own, who knows the roster and speaks first; returns its public key."""
    federation.keys[SERVER] = Ed25519PrivateKey.generate()
    return public_key(federation.keys[SERVER])


@pytest.mark.parametrize("files", [False, True])
def test_whoever_speaks_first_gets_nothing_without_the_key_on_the_roster(tmp_path, files):
    """With a roster that named no server, it got the sum of all updates and everybody's signed report."""
    federation = Federation(tmp_path, rounds=1, files=files)
    named, own = federation.roster.server.hex(), outsider(federation).hex()
    federation.run()
    (only,) = federation.rounds
    assert only.aborted
    assert not only.reports
    assert federation.updates == {}, "nobody trained for it"
    for name in federation.names:
        joining, *_ = federation.errors(name)
        assert isinstance(joining, BindingError)
        assert f"member {name}" in str(joining)
        assert f"invited by a server with key ed25519:{own}" in str(joining)
        assert f"its roster names ed25519:{named}" in str(joining)
    assert not [one for one in federation.passed if one.answer]


def test_an_outsider_that_comes_later_gets_nothing_either(tmp_path):
    federation = Federation(tmp_path, rounds=2, files=True)
    with federation.begun():
        assert federation.round(1) is not None
        before = len(federation.passed)
        outsider(federation)
        with federation.open("other") as other:
            assert federation.round(1, by=other) is None
        assert not [one for one in federation.passed[before:] if one.answer]


def test_between_machines_a_roster_must_name_a_server(tmp_path):
    nobody = Roster(Federation(tmp_path / "keys", rounds=1, ledger=False).roster.members)
    federation = Federation(tmp_path, rounds=1, ledger=False, roster=nobody)
    with federation.begun():
        for name in federation.names:
            (error,) = federation.errors(name)
            assert isinstance(error, RefusedError)
            assert "its roster names no server" in str(error)
            assert "fedmerit keys roster --server" in str(error)


def test_a_rehearsal_needs_no_key_of_a_server(tmp_path):
    assert Federation(tmp_path, rounds=1, masks=False).run().rounds[0].reports


def test_nobody_names_another_server_in_an_invitation_that_the_server_signed(tmp_path):
    """The key in the invitation is what members compare later messages with."""
    federation = Federation(tmp_path, rounds=1, ledger=False)
    own = public_key(Ed25519PrivateKey.generate())
    federation.telling("join", 0, lambda told: told.update(server=own))
    with federation.begun():
        (error,) = federation.errors("client-1")
        assert isinstance(error, ProtocolError)
        assert "not signed by the server" in str(error)
