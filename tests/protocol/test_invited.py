"""What a member does with a message that anybody who made up a server can send."""

import secrets
import tracemalloc
from functools import partial

import numpy as np
import pytest

from fedmerit.config import recorded_hash
from fedmerit.errors import MessageError, RefusedError
from fedmerit.identity import load_key, read_roster
from fedmerit.ledger.chain import Ledger
from fedmerit.protocol.member import Participant
from fedmerit.protocol.messages import EXCHANGES, Ask
from fedmerit.protocol.terms import FLOWER, proposed
from fedmerit.storage.member_state import MemberFiles
from linear_federation import Federation
from refusals import refused
from runs import first_body

NAME = "Site 1"


class Server:
    """Proposes the settings of a run that took place."""

    def __init__(self, files):
        self.key, self.run = load_key(files / "run" / "keys" / "server.pem"), secrets.token_hex(16)
        self.roster = read_roster(files / "roster.toml")
        with Ledger(files / "run" / "ledger.sqlite", read_only=True) as ledger:
            self.pool, old = first_body(ledger, "pool"), first_body(ledger, "run")["terms"]
        about = {key: old[key] for key in ("strategy", "optimiser", "evaluates")}
        self.terms = proposed(old["config"], self.roster, engine=FLOWER, **about)

    def ask(self, exchange, number, body):
        return Ask(exchange, self.run, number, body).pack(self.key.sign)

    def invitation(self, **other):
        key = self.key.public_key().public_bytes_raw()
        return self.ask("join", 0, {"terms": {**self.terms, **other}, "commitment": self.pool, "server": key})


@pytest.fixture
def files(tmp_path):
    return Federation(tmp_path, [NAME, "Site 2", "Site 3", "Site 4"], rounds=3, files=True).run().home


@pytest.fixture
def server(files):
    return Server(files)


@pytest.fixture
def member(files, server):
    path = files / f"{NAME}.pem"
    identity = load_key(path)
    return Participant(NAME, identity, server.roster, partial(MemberFiles, path, identity), lambda *_: None)


def test_an_invitation_with_a_key_of_thousands_of_parts_costs_little(files, server, member):
    text = server.terms["config"] + "\n[data.options]\n" + "a." * 8000 + "a = 1"
    invitation = server.invitation(config=text)
    tracemalloc.start()
    try:
        with pytest.raises(MessageError, match=r"cannot be read: .* keys of at most 16 parts"):
            member.answer(invitation, "here")
        assert tracemalloc.get_traced_memory()[1] < 100 * len(invitation)
    finally:
        tracemalloc.stop()
    assert not (files / f"{NAME}.pem.state" / server.run).exists()


@pytest.mark.parametrize(
    "text",
    [
        '[partition]\nscheme = "group"\nclients = 4\n[secure_aggregation]\nthreshold = 1000\n',
        "[training]\nrounds = 0x" + "f" * 6000,
        "[data]\noptions = {x = " + "[" * 900 + "]" * 900 + "}",
        "schema = 2\n",
    ],
)
def test_settings_that_cannot_be_read_are_refused_as_such(server, member, text):
    with refused(MessageError, stage="join"):
        member.answer(server.invitation(config=text, config_hash="0" * 64), "here")


def test_after_the_last_head_a_member_only_signs_it_again(server, member):
    member.answer(server.invitation(), "here")
    names = list(server.roster.names)
    assert member.answer(server.ask("advertise", 1, {"members": names}), "here")
    last = server.ask("close", 1, {"head": "0" * 64})
    signed = member.answer(last, "here")
    for message in (server.ask("advertise", 2, {"members": names}), server.invitation()):
        with pytest.raises(RefusedError):
            member.answer(message, "here")
    assert member.answer(last, "here") == signed


def test_settings_of_a_good_run_are_agreed_to(server, member):
    assert server.terms["config_hash"] == recorded_hash(server.terms["config"])
    assert member.answer(server.invitation(), "here")


@pytest.mark.parametrize("engine", ["embedded", "flower-simulation", "else"])
def test_a_member_does_not_sign_that_a_run_is_a_rehearsal(server, member, engine):
    """Whoever reads the ledger would be told that its signatures prove nothing."""
    with refused(RefusedError, stage="join", logged=False):
        member.answer(server.invitation(engine=engine), "here")


@pytest.mark.parametrize("exchange", [one for one in EXCHANGES if one != "report"])
def test_arrays_come_with_a_request_for_a_report_and_with_nothing_else(server, member, exchange):
    """They are as large as a model, and are hashed before anybody knows who sent them."""
    asked = Ask(exchange, server.run, 1, {}, {"x": np.zeros(9)}).pack(server.key.sign)
    with refused(MessageError, stage=exchange):
        member.answer(asked, "here")
