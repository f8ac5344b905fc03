"""What members do not believe, do not answer and do not repeat, and whose word they take at all."""

import secrets
import shutil
import stat
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.config import from_dict
from fedmerit.errors import BindingError, MessageError, ProtocolError, RefusedError
from fedmerit.identity import SERVER, Roster, load_key, public_key, read_roster
from fedmerit.protocol.member import REFUSED, Participant
from fedmerit.protocol.messages import EXCHANGES, Ask
from fedmerit.protocol.settler import SETTLING
from fedmerit.protocol.terms import FLOWER, cautious, check_roster, proposed, refuse_rehearsal
from fedmerit.secagg.messages import to_broadcast
from fedmerit.storage.member_state import MemberFiles
from ledgers import pool_of
from linear_federation import LIAR, Federation, data
from raising import raises
from refusals import refused
from runs import bodies_of
from states import names_in
from wire import parts, said_in, told

NAMES = tuple(f"client-{i}" for i in range(4))


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path)


@pytest.fixture
def over(federation):
    """A run up to the last head, which nobody has signed: after it members answer nothing else."""
    with federation.trained():
        yield federation


# ----------------------------------------------------------------------------------------- something else


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("report", lambda b: b.update(sum=0 * b["sum"] + 2**31 - 1), "the sum lies beyond what"),
        (
            "report",
            lambda b: b.update(included=b["included"][:3]),
            "the members in the sum are not those we signed for",
        ),
        ("report", lambda b: b.update(m0="0" * 64), "the server's M0 is not ours"),
        ("report", lambda b: b.update(salts=0 * b["salts"]), "differs from what was committed"),
        ("report", lambda b: b.update(sum=b["sum"][:-1]), "sum: expected 12 numbers"),
        ("report", lambda b: b.update(sum=b["sum"].astype(float)), "sum: expected 12 numbers"),
        ("report", lambda b: b.update(salts=b["salts"][:-1]), "of salt each"),
        ("report", lambda b: b.update(salts=b["salts"].astype(float)), "salts of a test slice must be bytes"),
        ("report", lambda b: b.update(y=b["y"][:-1]), "as many samples as labels"),
        ("report", lambda b: b.update(slice=None), "a test slice without its place"),
        ("share", lambda b: b.update(list=b"FMB1"), "bytes that no member or server writes"),
        (
            "advertise",
            lambda b: b.update(members=["client-0", LIAR]),
            "scheduled with 2 members, but at least 3",
        ),
        ("advertise", lambda b: b.update(members=["client-0", LIAR, "nobody"]), "not on the roster"),
    ],
)
def test_a_member_refuses_what_a_server_makes_up(federation, caplog, kind, change, reason):
    """One member is told something else; it says no, and nobody else is harmed."""
    federation.telling(kind, 1, change)
    federation.run()
    assert federation.verified()
    rounds = federation.rounds
    assert {*rounds[0].reports} == {*NAMES} - {LIAR}
    refused = federation.errors(LIAR)
    assert refused
    assert all(isinstance(error, RefusedError) and error.logged for error in refused)
    assert all(str(error).endswith(REFUSED) for error in refused)  # the reason stays with the member
    assert reason in caplog.text
    if kind == "report":  # who was told an impossible outcome answers nothing more
        assert LIAR not in rounds[1].included


def test_settings_that_are_not_those_of_their_hash_are_refused_with_a_reason(federation):
    federation.telling("join", 0, lambda body: body["terms"].update(config_hash="0" * 64))
    with federation.begun():
        (error,) = federation.errors(LIAR)
    assert isinstance(error, MessageError)
    assert error.stage == "join"


def test_roster_names_and_weights_are_those_of_the_members_own_roster(tmp_path):
    """A server that weighs one member a million times more would read its update from the sum."""
    equal = dict.fromkeys(NAMES, 1.0)
    roster = Federation(tmp_path, weights=equal).roster
    own = roster.hash.hex()

    def check(weights, hashed=own):
        settings = {"partition": {"names": [*weights]}, "training": {"weights": weights}}
        check_roster({"roster": hashed}, from_dict(settings), roster)

    check(equal)
    for false in (
        ({**dict.fromkeys(NAMES, 1e-12), LIAR: 1.0},),
        ({**equal, "nobody": 1.0},),
        (equal, "00" * 32),
    ):
        with refused(BindingError):
            check(*false)


@pytest.mark.parametrize("count", [9, 10])
def test_nobody_reports_on_few_samples(tmp_path, count):
    """A report on fewer would tell more of an update than a score needs."""
    federation = Federation(tmp_path, rounds=1, ledger=False)
    federation.pool = pool_of(*data("test", count), key=b"k" * 32)
    assert len(federation.run().rounds[0].reports) == (4 if count == 10 else 0)


def test_nobody_reports_without_a_test_slice(federation, caplog):
    """As if the pool stayed shut until the end."""

    def shut(name, ask):
        if (name, ask.exchange) == (LIAR, "report"):
            return told(ask, {**said_in(ask), "slice": None}, {"sum": ask.arrays["sum"]})
        return None

    federation.before.append(shut)
    federation.run()
    assert {*federation.rounds[0].reports} == {*NAMES} - {LIAR}
    assert "whose pool stays shut" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"secure_aggregation": {"enabled": False}},
        {"scoring": {"truth": ["shapley"]}},
        {"training": {"weights": "scores"}},
    ],
)
def test_no_owner_can_accept_what_only_a_rehearsal_may(settings):
    """One that looks at plain updates, or weighs members by scores that everybody would have to see."""
    names = {"partition": {"names": [*NAMES]}}
    refuse_rehearsal({}, from_dict(names), [FLOWER])
    with refused(RefusedError):
        refuse_rehearsal({}, from_dict(names | settings), [FLOWER])


def test_messages_out_of_order_are_refused(federation):
    """Of a round that is over, not begun or none of the run, and of a run that the member did not join."""
    with federation.begun():
        federation.round(1)
        asks, keys = federation.asked(LIAR), {"members": [*NAMES]}
        for ask in (
            Ask("advertise", federation.run_id, 1, keys),
            Ask("advertise", federation.run_id, 3, keys),
            replace(asks["report", 1], round=2),
            replace(asks["unmask", 1], round=9),
            Ask("close", federation.run_id, 3, {"head": "0" * 64}),
            replace(asks["share", 1], run="ab" * 16),
        ):
            with refused(RefusedError, logged=True):
                federation.ask(LIAR, ask)
        assert federation.round(2) is not None


def test_a_model_that_is_not_the_last_one_is_not_trained(federation):
    """A server that makes up M0 for one member learns from what it declines."""
    nudged = np.float32(1e-3)
    federation.sent = lambda name, number, m0: m0 + nudged if (name, number) == (LIAR, 2) else m0
    federation.run()
    assert federation.verified()
    assert federation.rounds[1].declined == (LIAR,)


def test_a_server_that_would_sum_them_gets_no_share(federation):
    """With a learning rate of 0 for all others, the sum would be one member's update."""
    federation.extra = lambda name, number: b"another learning rate" if name == LIAR else b""
    heads = {}

    def keep(name, ask, answer):
        if ask.exchange == "train":
            masked, _ = parts(answer)
            heads[ask.round, name] = masked[8 : 8 + int.from_bytes(masked[4:8], "big")]
        return answer

    def everybody(name, ask):
        if ask.exchange != "check":
            return None
        lists = to_broadcast("masked", [heads[ask.round, one] for one in NAMES])
        return replace(ask, body={"list": lists, "next": []})

    federation.after.append(keep)
    federation.before.append(everybody)
    federation.run()
    assert federation.verified()
    assert all(one.aborted and not one.included for one in federation.rounds)
    assert {one.ask.exchange for one in federation.passed} == {*EXCHANGES} - {"unmask", "report", *SETTLING}


@pytest.mark.parametrize(
    ("weak", "reason"),
    [
        ({"threshold": 4}, "asked for a threshold of 4 of 6 members"),
        ({"bound": 1e20}, "asked for a bound of 1e"),
    ],
)
def test_members_agree_to_nothing_weaker_than_the_default(weak, reason):
    """A server cannot talk them into less protection than they would have chosen."""
    members = {"partition": {"names": [f"client-{i}" for i in range(6)]}}
    with pytest.raises(RefusedError, match=reason):
        cautious(from_dict({**members, "secure_aggregation": weak}))
    with pytest.raises(RefusedError, match=r"chooses 0\.9 of the members"):
        cautious(from_dict({**members, "participation": {"fraction": 0.9}}))
    cautious(from_dict(members))


# ---------------------------------------------------------------- a server that asks again, or asks otherwise


def test_terms_are_pinned(over):
    """A member that joined a run agrees to nothing else in it."""
    join = over.asked(LIAR)["join", 0]
    with refused(RefusedError, stage="join", logged=False):
        over.ask(LIAR, join, commitment={**join.body.commitment, "root": "0" * 64})


@pytest.mark.parametrize("what", ["sum", "included"])
def test_one_request_for_a_report_is_answered_and_no_other(over, caplog, what):
    """Each further one, on another M or W that members can well have summed to, would say something new."""
    asked = over.asked(LIAR)["report", 2]
    (said,) = [one.answer for one in over.passed if one.ask is asked and one.member == LIAR]
    assert over.ask(LIAR, asked) == said  # the very same: the same answer
    nudged = asked.arrays["sum"] + np.uint32(1)
    with raises(RefusedError, logged=True):
        over.ask(LIAR, asked, **{what: {"sum": nudged, "included": list(NAMES[:3])}[what]})
    assert "has had another request for a report on this round" in caplog.text


def test_nothing_is_said_twice_in_a_round(over):
    asks = over.asked(LIAR)
    for kind, number in (("share", 1), ("train", 2), ("check", 2), ("unmask", 2)):
        with raises(RefusedError, logged=True):
            over.ask(LIAR, asks[kind, number])
    with raises(RefusedError, logged=True):  # new keys for a round that is over
        over.ask(LIAR, Ask("advertise", over.run_id, 2, {"members": list(NAMES)}))


def test_who_was_killed_while_it_trained_does_not_train_again(tmp_path, caplog):
    """From a model of the server's choice, say: what it began is on its disk before it trains."""
    federation, asks = Federation(tmp_path, files=True), {}

    def killed(name, number, m0):
        if name == LIAR:
            raise KeyboardInterrupt
        return federation.linear(name, number, m0)

    federation.before.append(lambda name, ask: asks.update({(name, ask.exchange): ask}))
    with federation.begun():
        federation.train = killed
        with pytest.raises(KeyboardInterrupt):
            federation.round(1)
        federation.train = federation.linear
        with raises(RefusedError, logged=True):
            federation.ask(LIAR, asks[LIAR, "train"])
        assert "trains once per round" in caplog.text
        with raises(RefusedError, logged=True):  # nor with new keys
            federation.ask(LIAR, asks[LIAR, "advertise"])
    assert (1, LIAR) not in federation.updates


def test_one_last_head_is_signed(over):
    over.finish()
    close = over.asked(LIAR)["close", 2]
    assert over.ask(LIAR, close)
    with raises(RefusedError, logged=True):
        over.ask(LIAR, close, head="0" * 64)


def test_a_run_of_reports_is_not_settled(over):
    """Who signed that a round is the last one would take part in no later round."""
    with raises(RefusedError, logged=True):
        over.ask(LIAR, Ask("last", over.run_id, 1, {}, {}))


def test_what_the_server_did_not_sign_is_refused(over, caplog):
    over.finish()
    with raises(RefusedError, logged=True):
        over.ask(LIAR, over.asked(LIAR)["close", 2], by="client-0")
    assert "not signed by the server" in caplog.text


# --------------------------------------------------------------------------------------- a member's own files


def test_a_members_files_are_its_own_and_say_nothing(tmp_path):
    federation = Federation(tmp_path, files=True).run()
    folder = federation.heads(LIAR).parent
    of_a_round = {"0002.asked", "0002.began", "0002.client", "0002.m0", "0002.report", "0002.update"}
    kept = names_in(tmp_path / f"{LIAR}.pem")[federation.run_id]
    assert kept == {*of_a_round, "floor", "seen", "terms"}  # nothing of round 1
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {
        "heads",
        "terms",
    }  # all else is small
    told = federation.models[1].tobytes(), federation.updates[2, LIAR].tobytes()
    for path in (folder.parent / "state", *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not any(one[:16] in path.read_bytes() for one in told)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def lost(path, how):
    """A file that was deleted, emptied, cut or replaced by what it held in the clear."""
    data = path.read_bytes()
    path.unlink()
    if how != "deleted":
        path.write_bytes({"emptied": b"", "cut": data[:32], "shortened": data[:-32], "plain": bytes(64)}[how])


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "shortened", "plain"])
def test_a_member_that_lost_what_it_must_never_do_again_does_nothing(tmp_path, caplog, how):
    """A server could have the same updates summed a second time, without one of them."""
    federation = Federation(tmp_path, files=True).run()
    asks = federation.asked(LIAR).values()
    assert {ask.exchange for ask in asks} == {*EXCHANGES} - {*SETTLING}
    state = tmp_path / f"{LIAR}.pem.state"
    lost(state / "state", how)
    before = sorted(state.rglob("*"))
    told = "missing; it says" if how == "deleted" else "damaged, or encrypted with another key; it says"
    told = f"{state / 'state'}: {told} what this member must never do again; put back a copy of the whole"
    (join,) = [ask for ask in asks if ask.exchange == "join"]
    for ask in (replace(join, run="ab" * 16), *asks):  # an invitation to any other run, and all
        caplog.clear()
        with refused(RefusedError, logged=True):
            federation.ask(LIAR, ask)
        assert told in caplog.text
    assert sorted(state.rglob("*")) == before


def test_what_a_member_must_never_do_again_is_kept_from_the_first_invitation_on(tmp_path):
    """Before any share is released: a folder of a run without that file is one that lost it."""
    federation = Federation(tmp_path, files=True)
    with federation.begun():
        assert (tmp_path / f"{LIAR}.pem.state" / "state").exists()
        federation.ask(LIAR, federation.asked(LIAR)["join", 0])
        shutil.rmtree(tmp_path / f"{LIAR}.pem.state")  # a new machine: nothing can tell
        federation.ask(LIAR, federation.asked(LIAR)["join", 0])
        assert (tmp_path / f"{LIAR}.pem.state" / "state").exists()


def test_no_cosine_is_told_and_none_is_made_up(federation):
    """It would read a coordinate for a server that makes up M."""
    federation.run()
    assert all(report.cosine is None for one in federation.rounds for report in one.reports.values())
    said = (federation.folder / "scores.json").read_text()
    assert "cosine" not in said
    assert '"COS"' not in said


# --------------------------------------------------------------- what anybody who made up a server can send


SITE = "client-0"


class Server:
    """Proposes the settings of a run that took place."""

    def __init__(self, files):
        self.key, self.run = load_key(files / "run" / "keys" / "server.pem"), secrets.token_hex(16)
        self.roster = read_roster(files / "roster.toml")
        (self.pool,), old = bodies_of(files / "run", "pool"), bodies_of(files / "run", "run")[0]["terms"]
        about = {key: old[key] for key in ("strategy", "optimiser", "evaluates")}
        self.terms = proposed(old["config"], self.roster, engine=FLOWER, **about)

    def ask(self, exchange, number, body):
        return Ask(exchange, self.run, number, body).pack(self.key.sign)

    def invitation(self, **other):
        key = self.key.public_key().public_bytes_raw()
        return self.ask("join", 0, {"terms": {**self.terms, **other}, "commitment": self.pool, "server": key})


@pytest.fixture
def server(finished):
    return Server(finished)


@pytest.fixture
def member(finished, server):
    path = finished / f"{SITE}.pem"
    identity = load_key(path)
    return Participant(SITE, identity, server.roster, partial(MemberFiles, path, identity), lambda *_: None)


def test_an_invitation_with_a_key_of_thousands_of_parts_costs_little(finished, server, member):
    text = server.terms["config"] + "\n[data.options]\n" + "a." * 8000 + "a = 1"
    invitation = server.invitation(config=text)
    tracemalloc.start()
    try:
        with pytest.raises(MessageError, match=r"cannot be read: .* keys of at most 16 parts"):
            member.answer(invitation, "here")
        assert tracemalloc.get_traced_memory()[1] < 100 * len(invitation)
    finally:
        tracemalloc.stop()
    assert not (finished / f"{SITE}.pem.state" / server.run).exists()


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


# ------------------------------------------- who may be the server: only the key on the members' own roster


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


def test_nobody_names_another_server_in_an_invitation_that_the_server_signed(tmp_path):
    """The key in the invitation is what members compare later messages with."""
    federation = Federation(tmp_path, rounds=1, ledger=False)
    own = public_key(Ed25519PrivateKey.generate())
    federation.telling("join", 0, lambda told: told.update(server=own))
    with federation.begun():
        (error,) = federation.errors("client-1")
        assert isinstance(error, ProtocolError)
        assert "not signed by the server" in str(error)
