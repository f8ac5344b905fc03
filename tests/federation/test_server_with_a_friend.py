"""A server with one friend against one honest member: what each attack on the settlement gains, in shares.

Six members of 12 parameters; FRIEND overstates, VICTIM is honest. Every attack uses the real classes.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

import fedmerit as fm
from fedmerit.errors import LedgerError, RefusedError, SettlementError, UnsettledShares
from fedmerit.flower.late import HANDED, _parcels
from fedmerit.flower.late import close as close_by_hand
from fedmerit.identity import SERVER, canonical, content, public_key
from fedmerit.ledger.account import account_of
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.records import rounds_of
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.direction import Manifest
from fedmerit.protocol.messages import pack, unpack
from fedmerit.protocol.settler import MANIFESTS, two_manifests
from fedmerit.storage.member_state import about_state
from fedmerit.verify import record_decision, verify_folder
from forging import body_of, written
from linear_federation import Federation

RING = 2**64
VICTIM, FRIEND = "client-1", "client-3"
PAY = Terms("100.00", "fit", "fenced", "PHI")


def federation_of(home, *, detail="rounds", visibility="all", **given):
    settings = {
        "scoring": {"method": "settled", "visibility": visibility},
        "settlement": {"detail": detail},
    }
    return Federation(home, 6, 2, settings=settings, **given)


def shares(federation):
    with Ledger(federation.folder / "ledger.sqlite", read_only=True) as ledger:
        account = account_of(ledger, rounds_of(ledger), federation.config)
    return fm.shares(account.scores(), rule="fenced")


def resigned(federation, exchange, kind, number, change, who):
    def lie(answer):
        text, _, *rest = unpack(answer, "")
        body = json.loads(text)
        change(body)
        return pack([canonical(body), federation.keys[who].sign(content(who, kind, body)), *rest])

    federation.answering(exchange, number, lie, who)


def robbing(federation, more=2**55, rounds=(1,), victim=VICTIM, detail="rounds"):
    """Let FRIEND state too much, and show masks with the victim that hide it."""

    def overstate(body):
        for number in rounds:
            key = str(number) if detail == "rounds" else "all"
            body["rounds"][key] = str(int(body["rounds"][key]) + more)

    resigned(federation, "state", "statement", 2, overstate, FRIEND)
    for number in rounds:

        def hide(body):
            sign = 1 if victim < FRIEND else -1
            body["pairs"][victim] = str((int(body["pairs"][victim]) + more * sign) % RING)

        resigned(federation, "table", "table", number, hide, FRIEND)


def lose(federation, exchange="table", who=VICTIM):
    federation.after.append(
        lambda name, ask, answer: None if (name, ask.exchange) == (who, exchange) else answer
    )


@contextmanager
def over(federation, *, settles=True):
    """Run a federation to its end; gives what makes a server's side of the settlement anew."""
    with federation.begun() if settles is True else settles:
        for number in (1, 2) if settles is True else ():
            federation.round(number)
        federation.finish()
        made = federation.coordinator
        yield lambda: Clearing(made, made.gradient, made.archive)


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
    assert found[VICTIM] == pytest.approx(0.172, abs=1e-3)
    assert found[FRIEND] == pytest.approx(0.153, abs=1e-3)
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


# ------------------------------------------------------------------------------ a victim whose masks are lost


@pytest.mark.parametrize(
    ("detail", "rounds", "visibility", "lost"),
    [
        ("rounds", (1,), "all", "table"),
        ("rounds", (1, 2), "all", "table"),
        ("rounds", (1,), "coordinator", "table"),
        ("run", (1,), "all", "table"),
        ("run", (1,), "coordinator", "table"),
        ("rounds", (1,), "all", "pairs"),
    ],
)
def test_a_victim_whose_masks_are_lost_keeps_its_statement(
    tmp_path, honest, later, detail, rounds, visibility, lost
):
    """Before: the friend went from 15 to 47 %, the victim to 0, when the server closed the window."""
    federation = federation_of(tmp_path, detail=detail, visibility=visibility, files=True)
    robbing(federation, rounds=rounds, detail=detail)
    lose(federation, lost)
    with over(federation) as new:
        found = federation.coordinator.settled
        silent = (VICTIM,) if lost == "table" else (VICTIM, FRIEND)  # neither end opens its key
        assert (found.final, found.missing, found.unproved, found.liars) == (False, (), silent, ())
        assert found.counts(found.equations[0], VICTIM) == found.equations[0].stated[1]
        later(found)
        assert refused_codes(federation, new()) == ("uncountersigned", "silent")
        assert len(ends(federation, federation.names)) == 0  # nobody signs it without its owner's word
        federation.after.pop()  # the victim's answers arrive again, but nobody is asked any more
        federation.reaches = lambda name, ask: False
        found = new().late(VICTIM, *by_hand(federation, VICTIM))  # its table
        if not found.final:
            found = new().late(VICTIM, *by_hand(federation, VICTIM))  # the key of the disputed mask
        assert (found.final, found.unproved, found.liars) == (True, (), (FRIEND,))
    assert dict(shares(federation)) == pytest.approx(honest)
    record_decision(federation.folder, PAY)
    assert {"archive-verdict", "settlement-named"} <= {line.code for line in federation.verified()}


def test_the_same_holds_when_the_server_dies_and_another_one_goes_on(tmp_path, honest, later):
    federation = federation_of(tmp_path)
    robbing(federation)
    lose(federation)
    with federation.begun():
        for number in (1, 2):
            federation.round(number)
        Clearing(federation.coordinator, federation.gradient, federation.coordinator.archive).run(
            federation.names
        )
    with over(federation, settles=federation.taken_up()) as new:
        found = federation.coordinator.settled
        assert found.unproved == (VICTIM,)
        later(found)
        assert refused_codes(federation, new()) == ("uncountersigned", "silent")
    federation.after.pop()
    with over(federation, settles=federation.taken_up()):
        assert federation.coordinator.settled.liars == (FRIEND,)
    assert dict(shares(federation)) == pytest.approx(honest)


def test_a_liar_who_never_shows_its_masks_is_left_behind_by_t_members(tmp_path, honest, later):
    """It can delay a payout, and gains nothing; each of the t owners must name it."""
    federation = federation_of(tmp_path, files=True)
    robbing(federation)
    lose(federation, who=FRIEND)
    others = [name for name in federation.names if name != FRIEND]
    with over(federation) as new:
        found = federation.coordinator.settled
        assert found.unproved == (FRIEND,)
        later(found)
        few = ends(federation, others[:4], (FRIEND,))
        assert len(few) == 4
        federation.reaches = lambda name, ask: False
        with pytest.raises(SettlementError) as caught:
            new().close(time.time(), few)
        assert caught.value.code == "uncountersigned"
        assert new().close(time.time(), ends(federation, others, (FRIEND,))).final
    assert dict(shares(federation)) == pytest.approx(honest)
    made, _ = record_decision(federation.folder, PAY)
    assert made.paid[FRIEND] > 0
    assert "settlement-unshown-rest" in {line.code for line in federation.verified()}


def test_a_victim_signs_no_end_without_its_own_masks(tmp_path, later):
    federation = federation_of(tmp_path, files=True)
    robbing(federation)
    lose(federation)
    with over(federation) as new:
        later(federation.coordinator.settled)
        with pytest.raises(SettlementError):
            new().close(time.time())
        assert VICTIM not in ends(federation, federation.names, (VICTIM,))


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
    with over(federation) as new:
        assert federation.coordinator.settled.missing == (VICTIM,)
        federation.before.clear()
        assert new().late(VICTIM, *by_hand(federation, VICTIM)).final
    assert dict(shares(federation)) == pytest.approx(honest)
    state = federation.member(VICTIM).state(federation.run_id)
    assert two_manifests(state.get(MANIFESTS), public_key(federation.keys[SERVER]))
    assert not two_manifests(state.get(MANIFESTS), public_key(federation.keys[FRIEND]))
    assert "state-two-manifests" in {line.code for line in about_state(tmp_path / f"{VICTIM}.pem")}
    with pytest.raises(LedgerError) as caught:
        list(verify_folder(federation.folder, heads=federation.heads(VICTIM)))
    assert caught.value.code == "other-manifest"


def test_who_agreed_to_a_manifest_keeps_to_it_and_to_the_proof_against_the_server(tmp_path):
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
    with over(federation):
        body = dict(federation.coordinator.recorder.recorded("settled")[-1])
        body.update(final=True)
        with federation.coordinator.recorder.folder.ledger.transaction():
            federation.coordinator.recorder._write(SERVER, "settled", body)


@pytest.mark.parametrize("withheld", ["statement", "statement and requests to countersign"])
def test_a_window_that_t_members_did_not_close_is_not_closed(tmp_path, withheld):
    """Before: closed in the same second with a statement left out, and `verify` and `rewards` passed."""
    federation = federation_of(tmp_path, files=True)
    lose(federation, "state")
    if withheld != "statement":
        federation.reaches = lambda name, ask: ask.exchange != "settle"
    forged_end(federation)
    with pytest.raises(LedgerError) as caught:
        federation.verified()
    assert caught.value.code == "uncountersigned"
    with pytest.raises(LedgerError) as caught:
        record_decision(federation.folder, PAY)
    assert caught.value.code == "uncountersigned"


def test_a_member_proves_from_its_own_file_that_its_statement_was_left_out(tmp_path, later):
    """It is told while there is time, and t dishonest members and the server cannot make it vanish."""
    federation = federation_of(tmp_path, files=True)
    lose(federation, "state")
    with over(federation) as new:
        lines = list(verify_folder(federation.folder, heads=federation.heads(VICTIM)))
        assert "kept-unstated" in {line.code for line in lines}
        later(federation.coordinator.settled)
        with pytest.raises(SettlementError) as caught:
            new().close(time.time())
        assert caught.value.code == "uncountersigned"  # no owner has named it
        signed = ends(federation, federation.names, (VICTIM,))
        assert VICTIM not in signed
        assert new().close(time.time(), signed).final
    assert federation.verified()
    with pytest.raises(LedgerError) as caught:
        list(verify_folder(federation.folder, heads=federation.heads(VICTIM)))
    assert caught.value.code == "left-out"


def test_a_statement_from_any_hand_ends_the_waiting(tmp_path, honest, later):
    federation = federation_of(tmp_path, files=True)
    lose(federation, "state")
    with over(federation) as new:
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
    with over(federation) as new:
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
    with pytest.raises(UnsettledShares) as caught:
        record_decision(federation.folder, PAY)
    assert caught.value.code == "unjudged"


def test_a_rehearsal_without_keys_is_closed_by_its_clock(tmp_path):
    """Nothing is signed there, and one process holds all members: nobody could be robbed."""
    federation = federation_of(tmp_path, masks=False)
    lose(federation, "state")
    federation.run()
    found = close_by_hand(federation.folder, now=federation.coordinator.settled.closes + 1.0)
    assert (found.final, found.missing) == (True, (VICTIM,))
    assert record_decision(federation.folder, PAY)[1]
