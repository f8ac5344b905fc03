"""A server with one friend against one honest member: what each attack on the settlement gains, in shares.

Seven members of 12 parameters; FRIEND overstates, VICTIM is honest. Every attack uses the real classes.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest
from msgspec import to_builtins

import fedmerit as fm
from attacked import settling
from fedmerit.carriers.folders import HANDED, _parcels
from fedmerit.carriers.folders import close as close_by_hand
from fedmerit.errors import LedgerError, RefusedError, SettlementError, UnsettledShares
from fedmerit.identity import SERVER, canonical, public_key
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.run import replay
from fedmerit.protocol.direction import Manifest
from fedmerit.protocol.memory import MANIFESTS
from fedmerit.protocol.messages import AskBody, Signed
from fedmerit.protocol.settlement import Statement
from fedmerit.protocol.settler import two_manifests
from fedmerit.storage.member_state import about_state
from fedmerit.verify import verify_folder
from forging import body_of, written
from refusals import refused
from runs import record_decision, run_in
from wire import unpack

RING = 2**64
VICTIM, FRIEND = "client-1", "client-3"
PAY = Terms("100.00", "fit", "fenced", "PHI")


def federation_of(home, **given):
    return settling(home, 7, **given)


def shares(federation):
    with Ledger(federation.folder / "ledger.sqlite", read_only=True) as ledger:
        account = replay(ledger).account
    return fm.shares(account.scores(), rule="fenced")


def robbing(federation, more=2**55, rounds=(1,), victim=VICTIM):
    """Let FRIEND state too much, and show masks with the victim that hide it."""

    def overstate(body):
        for number in rounds:
            body["rounds"][str(number)] = str(int(body["rounds"][str(number)]) + more)

    federation.stating(overstate, FRIEND)
    for number in rounds:

        def hide(body):
            sign = 1 if victim < FRIEND else -1
            body["pairs"][victim] = str((int(body["pairs"][victim]) + more * sign) % RING)

        federation.tabling(hide, FRIEND, number)


def by_hand(federation, name, without=()):
    """Return what a member answers to the messages that the server left, on its own machine."""
    member, found = federation.member(name), []
    member.without = without
    for kind, number, parcel in _parcels(federation.folder / "archive" / "messages", name):
        try:
            answer = member.answer(parcel, "here")
        except RefusedError:
            continue
        if kind in HANDED:
            found.append((kind, number, answer))
    return found


def ends(federation, names, without=()):
    return {
        name: answer
        for name in names
        for kind, _, answer in by_hand(federation, name, without)
        if kind == "settle"
    }


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    found = shares(federation_of(tmp_path_factory.mktemp("honest")).run())
    assert found[VICTIM] == pytest.approx(0.151, abs=1e-3)
    assert found[FRIEND] == pytest.approx(0.134, abs=1e-3)
    return dict(found)


@pytest.fixture
def later(monkeypatch):
    """Let everybody's clock say that a window is over."""
    return lambda settled: monkeypatch.setattr(time, "time", lambda: settled.closes + 1.0)


def refused_codes(federation, clearing):
    """Return why the settlement is not closed, and why nobody is paid."""
    with pytest.raises(SettlementError) as closing:
        clearing.close(time.time())
    copy = shutil.copytree(federation.folder, federation.home / f"copy-{time.time()}")  # it is locked
    with pytest.raises(UnsettledShares) as paying:
        record_decision(copy, PAY)
    return closing.value.code, paying.value.code


# ---------------------------------------------------------------------------- a victim whose answers are lost


@pytest.mark.parametrize(
    ("rounds", "visibility", "lost"),
    [
        ((1,), "all", "witness"),
        ((1, 2), "all", "witness"),
        ((1,), "coordinator", "witness"),
        ((1,), "all", "draw"),
    ],
)
def test_a_victim_whose_answers_are_lost_keeps_its_statement(
    tmp_path, honest, later, rounds, visibility, lost
):
    """Before: the friend went from 15 to 47 %, the victim to 0, when the server closed the window."""
    federation = federation_of(tmp_path, scoring={"visibility": visibility}, files=True)
    robbing(federation, rounds=rounds)
    federation.losing(lost, who=VICTIM)
    with federation.over() as new:
        found = federation.coordinator.settled
        assert (found.final, found.missing, found.unproved) == (False, (), (VICTIM,))
        assert found.counts(found.manifest.rounds[0], VICTIM) == found.equations[0].stated[1]
        later(found)
        assert refused_codes(federation, new()) == ("uncountersigned", "silent")
        assert len(ends(federation, federation.names)) == 0  # nobody signs it without its owner's word
        federation.after.pop()  # the victim's answers arrive again, but nobody is asked any more
        federation.reaches = lambda name, ask: False
        found = new().late(VICTIM, *by_hand(federation, VICTIM))
        assert (found.final, found.unproved, found.liars) == (True, (), (FRIEND,))
    assert dict(shares(federation)) == pytest.approx(honest)
    record_decision(federation.folder, PAY)
    assert {"archive-verdict", "settlement-named"} <= {line.code for line in federation.verified()}


@pytest.mark.parametrize("lost", ["drawn", "seal", "pairs", "table"])
def test_nothing_is_lost_with_answers_that_others_can_give(tmp_path, honest, lost):
    """The other end's key is enough, and t members sign the draw."""
    federation = federation_of(tmp_path)
    robbing(federation)
    federation.losing(lost, who=VICTIM)
    found = federation.run().coordinator.settled
    assert (found.final, found.unproved, found.liars) == (True, (), (FRIEND,))
    assert dict(shares(federation)) == pytest.approx(honest)
    assert federation.verified()


def test_the_same_holds_when_the_server_dies_and_another_one_goes_on(tmp_path, honest, later):
    federation = federation_of(tmp_path)
    robbing(federation)
    federation.losing("witness", who=VICTIM)
    with federation.trained():
        federation.clearing().run(federation.names)
    with federation.taken_up():
        federation.finish()
        found = federation.coordinator.settled
        assert found.unproved == (VICTIM,)
        later(found)
        assert refused_codes(federation, federation.clearing()) == ("uncountersigned", "silent")
    federation.after.pop()
    with federation.taken_up():
        federation.clearing().run(federation.names)
    assert run_in(federation.folder).account.liars == (FRIEND,)
    assert dict(shares(federation)) == pytest.approx(honest)


def test_a_witness_who_never_answers_is_left_behind_by_t_members(tmp_path, honest, later):
    """It can delay a payout, and changes nobody's score; each of the t owners must name it."""
    federation = federation_of(tmp_path, files=True)
    federation.losing("witness", who=FRIEND)
    others = [name for name in federation.names if name != FRIEND]
    with federation.over() as new:
        found = federation.coordinator.settled
        assert (found.unproved, found.witnessed) == ((FRIEND,), False)
        later(found)
        few = ends(federation, others[:4], (FRIEND,))
        assert len(few) == 4
        federation.reaches = lambda name, ask: False
        with refused(SettlementError, code="uncountersigned"):
            new().close(time.time(), few)
        assert new().close(time.time(), ends(federation, others, (FRIEND,))).final
    assert dict(shares(federation)) == pytest.approx(honest)
    made, _ = record_decision(federation.folder, PAY)
    assert made.paid[FRIEND] > 0
    assert "settlement-unshown-rest" in {line.code for line in federation.verified()}


def test_a_victim_signs_no_end_without_its_own_answers(tmp_path, later):
    federation = federation_of(tmp_path, files=True)
    robbing(federation)
    federation.losing("witness", who=VICTIM)
    with federation.over() as new:
        later(federation.coordinator.settled)
        with pytest.raises(SettlementError):
            new().close(time.time())
        assert VICTIM not in ends(federation, federation.names, (VICTIM,))


@pytest.mark.parametrize("visibility", ["all", "coordinator"])
def test_a_victim_that_was_shown_a_false_end_still_proves_its_statement(tmp_path, honest, visibility):
    """Before: it deleted its masks then, was silent when asked for them, and was left behind by t members."""
    federation, true, ended = federation_of(tmp_path, scoring={"visibility": visibility}, files=True), {}, []
    federation.answering("state", 2, lambda answer: true.setdefault(FRIEND, answer), FRIEND)
    robbing(federation)  # in another statement than this one

    def show(name, ask):
        if (name, ask.exchange) == (VICTIM, "witness") and not ended:
            made = federation.clearing()
            manifest, _ = made._opening(), made._read(made._opening())
            text, signature, _ = unpack(true[FRIEND])
            made.statements[FRIEND] = Statement.from_body(FRIEND, json.loads(text), manifest), signature
            settled = made.settled(manifest)
            assert (settled.final, settled.holding) == (True, 2)
            (asked,) = dict(made._end_asks(settled, [VICTIM])).values()
            ended.append(federation.member(VICTIM).answer(asked, "here"))

    federation.before.append(show)
    found = federation.run().coordinator.settled
    assert ended
    assert (found.final, found.unproved, found.liars) == (True, (), (FRIEND,))
    assert dict(shares(federation)) == pytest.approx(honest)


# ------------------------------------------------------------------------------------------ a second manifest


def second_manifest(federation, who=VICTIM):
    """Let the server show a member another manifest first, signed like the right one."""

    def lie(told):
        manifest = Manifest.from_body(json.loads(told["manifest"]))
        first, *others = manifest.rounds
        first = replace(first, empty=first.empty + 1e-12)  # within what machines may differ by
        told["manifest"] = canonical(replace(manifest, rounds=(first, *others)).body())

    federation.telling("open", 2, lie, who)


def test_a_member_shown_a_second_manifest_still_states(tmp_path, honest):
    """Before: it was locked out for good, and paid what the others left it."""
    federation = federation_of(tmp_path, files=True)
    second_manifest(federation)
    with federation.over() as new:
        assert federation.coordinator.settled.missing == (VICTIM,)
        federation.before.clear()
        assert new().late(VICTIM, *by_hand(federation, VICTIM)).final
    assert dict(shares(federation)) == pytest.approx(honest)
    state = federation.member(VICTIM).state(federation.run_id)
    assert two_manifests(state.get(MANIFESTS), public_key(federation.keys[SERVER]))
    assert not two_manifests(state.get(MANIFESTS), public_key(federation.keys[FRIEND]))
    assert "state-two-manifests" in {line.code for line in about_state(tmp_path / f"{VICTIM}.pem")}
    with refused(LedgerError, code="other-manifest"):
        list(verify_folder(federation.folder, heads=federation.heads(VICTIM)))


def test_a_manifest_that_was_only_shown_binds_nobody(tmp_path):
    """Also while nobody has agreed yet: else t members who need this one would never come together."""
    federation = federation_of(tmp_path, files=True)
    second_manifest(federation)
    with federation.over():
        ask = federation.asked("client-0")["open", 2]
        federation.before.clear()
        assert federation.ask(VICTIM, ask, agreed={})


def test_who_agreed_to_a_second_manifest_takes_the_one_that_t_members_agreed_to(tmp_path, honest):
    """Before: it never stated, and was paid what the others left it."""
    federation = federation_of(tmp_path, files=True)
    second_manifest(federation)
    with federation.over() as new:
        victim, made = federation.member(VICTIM), new()
        for summed, entry in zip(made.rounds(), federation.coordinator.settled.manifest.rounds, strict=True):
            assert unpack(victim.answer(made._direction_ask(summed, entry), "here"))
        victim.answer(federation.coordinator.ask("agreed", 2, AskBody()), "here")
        federation.before.clear()
        opened = federation.asked("client-0")["open", 2]
        made._read(federation.coordinator.settled.manifest)
        signed = to_builtins(made.agreed, builtin_types=(bytes,))
        for agreed in ({}, dict([*signed.items()][:4]), dict.fromkeys(signed, signed["client-0"])):
            with pytest.raises(RefusedError):
                federation.ask(VICTIM, opened, agreed=agreed)
        assert new().late(VICTIM, *by_hand(federation, VICTIM)).final
    assert dict(shares(federation)) == pytest.approx(honest)
    state = federation.member(VICTIM).state(federation.run_id)
    assert two_manifests(state.get(MANIFESTS), public_key(federation.keys[SERVER]))


def test_who_stated_on_a_manifest_keeps_to_it_and_to_the_proof_against_the_server(tmp_path):
    federation = federation_of(tmp_path, files=True).run()
    second_manifest(federation)
    ask = federation.asked(VICTIM)["open", 2]
    with pytest.raises(RefusedError):
        federation.ask(VICTIM, federation.before[0](VICTIM, ask))
    state = federation.member(VICTIM).state(federation.run_id)
    assert two_manifests(state.get(MANIFESTS), public_key(federation.keys[SERVER]))
    assert federation.ask(VICTIM, ask)


# ------------------------------------------------------------------------------ the window, the server's word


def forged_end(federation):
    """Let the server write that the settlement is closed, with its own key and clock."""
    with federation.over():
        body = dict(federation.coordinator.recorder.recorded("settled")[-1])
        body.update(final=True)
        with federation.coordinator.recorder.folder.ledger.transaction():
            federation.coordinator.recorder._write(SERVER, "settled", body)


@pytest.mark.parametrize("withheld", ["statement", "statement and requests to countersign"])
def test_a_window_that_t_members_did_not_close_is_not_closed(tmp_path, withheld):
    """Before: closed in the same second with a statement left out, and `verify` and `rewards` passed."""
    federation = federation_of(tmp_path, files=True)
    federation.losing("state", who=VICTIM)
    if withheld != "statement":
        federation.reaches = lambda name, ask: ask.exchange != "settle"
    forged_end(federation)
    with refused(LedgerError, code="uncountersigned"):
        federation.verified()
    with refused(LedgerError, code="uncountersigned"):
        record_decision(federation.folder, PAY)


@pytest.mark.parametrize("seen", [4, 5])
def test_a_window_that_t_members_did_not_see_open_is_not_closed(tmp_path, monkeypatch, seen):
    """However many sign its end: who hears of a window when it is over could not state any more."""
    federation = federation_of(tmp_path)
    federation.losing("state", who=VICTIM)
    with federation.over():
        assert federation.close(monkeypatch).final

    def change(ledger, records):
        opened, closed = 0, False
        for record in records:
            final = record.body["final"] if record.kind == "settled" else False
            closed = closed or final
            early = record.kind == "countersigned" and not closed
            opened += early
            if record.kind not in ("end", "seen") and not (early and opened > seen):
                yield record.author, record.kind, body_of(record), record.signature

    written(federation.home, change, anew=())
    for name in ("scores.json", "scores.csv"):
        (federation.folder / name).unlink(missing_ok=True)
    if seen == federation.config.threshold:
        assert federation.verified()
        return
    for judge in (federation.verified, lambda: record_decision(federation.folder, PAY)):
        with refused(LedgerError, code="uncountersigned"):
            judge()


def test_a_member_proves_from_its_own_file_that_its_statement_was_left_out(tmp_path, later):
    """It is told while there is time, and t dishonest members and the server cannot make it vanish."""
    federation = federation_of(tmp_path, files=True)
    federation.losing("state", who=VICTIM)
    with federation.over() as new:
        lines = list(verify_folder(federation.folder, heads=federation.heads(VICTIM)))
        assert "kept-unstated" in {line.code for line in lines}
        later(federation.coordinator.settled)
        with refused(SettlementError, code="uncountersigned"):
            new().close(time.time())
        signed = ends(federation, federation.names, (VICTIM,))
        assert VICTIM not in signed
        assert new().close(time.time(), signed).final
    assert federation.verified()
    with refused(LedgerError, code="left-out"):
        list(verify_folder(federation.folder, heads=federation.heads(VICTIM)))


def test_a_statement_from_any_hand_ends_the_waiting(tmp_path, honest, later):
    federation = federation_of(tmp_path, files=True)
    federation.losing("state", who=VICTIM)
    with federation.over() as new:
        later(federation.coordinator.settled)
        assert new().late(VICTIM, *by_hand(federation, VICTIM)).final
    assert dict(shares(federation)) == pytest.approx(honest)
    lines = list(verify_folder(federation.folder, heads=federation.heads(VICTIM)))
    assert "kept-stated" in {line.code for line in lines}


def test_a_window_that_few_members_know_of_is_opened_again(tmp_path, later):
    federation = federation_of(tmp_path, files=True)
    federation.reaches = lambda name, ask: (
        (name, ask.exchange) != (VICTIM, "state")
        and (ask.exchange != "settle" or name in ("client-0", "client-2"))
    )
    with federation.over() as new:
        first = federation.coordinator.settled
        assert "settlement-unopened" in {line.code for line in federation.verified()}
        later(first)
        assert refused_codes(federation, new()) == ("uncountersigned", "open")
        for name in (name for name in federation.names if name != VICTIM):
            found = new().late(name, *by_hand(federation, name))
        assert found.closes > first.closes
        assert "settlement-unopened" not in {line.code for line in federation.verified()}
        later(found)
        with pytest.raises(SettlementError):
            new().close(time.time())
        assert new().close(time.time(), ends(federation, federation.names, (VICTIM,))).final
    record_decision(federation.folder, PAY)


def test_a_window_that_was_told_is_not_shortened_later(tmp_path):
    federation = federation_of(tmp_path)
    kept = federation.losing("state", who=VICTIM)
    federation.run()
    ask = federation.asked(FRIEND)["settle", 2]
    body = json.loads(ask.body.settled)
    assert federation.ask(FRIEND, ask)
    assert federation.ask(FRIEND, ask, settled=canonical({**body, "closes": body["closes"] + 1}))
    with pytest.raises(RefusedError):
        federation.ask(FRIEND, ask, settled=canonical(body | {"closes": body["closes"] - 1}))
    ended = {**body, "final": True, "closes": None, "missing": []}  # as if nobody were awaited
    for one, settled in zip(ended["rounds"], federation.coordinator.settled.equations, strict=True):
        one.update(sum=str(settled.product), holds=True)
    shown = {**ask.body.statements, VICTIM: Signed(*unpack(kept["state"])[:2])}
    assert federation.ask(FRIEND, ask, settled=canonical(ended), statements=shown)
    with pytest.raises(RefusedError):
        federation.ask(FRIEND, ask, settled=canonical(body))


# ------------------------------------------------------------------------------------------------ the verdict


def forged_verdict(federation):
    """Let the server name an honest member in a round whose equation its friend broke."""
    settled = federation.coordinator.settled
    entry = settled.manifest.rounds[0]
    stated = {name: settled.statements[name].rounds["1"] for name in entry.participants}
    excess = sum(stated.values()) - entry.product

    def change(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "verdict":
                body["named"] = {VICTIM: "stated"}
                body["values"] = {
                    name: str(value - excess * (name == VICTIM)) for name, value in stated.items()
                }
            if record.kind == "settled":
                body["named"] = [VICTIM]
            if record.kind not in ("countersigned", "end", "seen"):
                yield record.author, record.kind, body, record.signature

    written(federation.home, change, anew=())
    for name in ("scores.json", "scores.csv"):  # copies, which `verify` misses and does not need
        (federation.folder / name).unlink()


def test_a_verdict_against_an_honest_member_is_judged_by_the_runs_own_archive(tmp_path):
    """Before: without --archive it passed, and the friend kept all that it took."""
    federation = federation_of(tmp_path)
    robbing(federation)
    federation.run()
    assert federation.coordinator.settled.liars == (FRIEND,)
    forged_verdict(federation)
    for judge in (federation.verified, lambda: record_decision(federation.folder, PAY)):
        with pytest.raises(LedgerError, match="another verdict"):
            judge()
    shutil.move(federation.folder / "archive", tmp_path / "kept")
    codes = {line.code for line in federation.verified()}
    assert "settlement-verdict" in codes  # unjudged, says `verify`
    with refused(UnsettledShares, code="unjudged"):
        record_decision(federation.folder, PAY)


def test_a_rehearsal_without_keys_is_closed_by_its_clock(tmp_path):
    """Nothing is signed there, and one process holds all members: nobody could be robbed."""
    federation = federation_of(tmp_path, masks=False)
    federation.losing("state", who=VICTIM)
    federation.run()
    found = close_by_hand(federation.folder, now=federation.coordinator.settled.closes + 1.0)
    assert (found.final, found.missing) == (True, (VICTIM,))
    assert record_decision(federation.folder, PAY)[1]
