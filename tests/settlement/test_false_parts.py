"""Members that shift their parts of blocks: the sums over members fail there, and masks name them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from attacked import settling
from fedmerit.carriers.folders import _parcels
from fedmerit.errors import LedgerError, RefusedError
from fedmerit.identity import exact
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.run import replay
from fedmerit.protocol import direction, naming
from fedmerit.protocol.memory import TABLES
from fedmerit.secagg.quantise import direction_hash
from fedmerit.storage.run_folder import FolderArchive
from fedmerit.verify import verify_folder
from forging import body_of, written
from linear_federation import LIAR
from runs import record_decision

FRIEND = "client-3"


@pytest.fixture(scope="module")
def true(tmp_path_factory):
    """Scores and errors of the same federation if nobody lies."""
    federation = settling(tmp_path_factory.mktemp("honest"), ledger=False).run()
    settled = federation.coordinator.settled
    assert [one.odd for one in settled.equations] == [(), ()]
    return settled.totals(federation.names)


def asked(federation, kind="table"):
    """Who was asked along which block."""
    asks = [one for one in federation.passed if one.ask.exchange == kind]
    return [(one.member, (one.ask.body.along or {}).get("block"), one.error) for one in asks]


def ask_of(federation, name="client-0", block=0):
    asks = [one.ask for one in federation.passed if one.member == name and one.ask.exchange == "table"]
    return next(ask for ask in asks if ask.body.along["block"] == block)


# --------------------------------------------------------------------------------------- a member that shifts


@pytest.mark.parametrize("visibility", ["all", "coordinator"])
@pytest.mark.parametrize("more", [0.003, -0.3])
def test_who_shifts_parts_between_blocks_is_named_and_has_its_true_error(tmp_path, true, more, visibility):
    federation = settling(tmp_path, scoring={"visibility": visibility}).shifting(more).run()
    settled = federation.coordinator.settled
    assert [(one.holds, one.odd) for one in settled.equations] == [(True, ()), (True, (0, 1))]
    assert (settled.named, settled.final, settled.doubtful) == ({2: {LIAR: "part"}}, True, ())
    assert {block for _, block, _ in asked(federation)} == {0, 1}
    found = settled.totals(federation.names)
    assert found.values.tolist() == true.values.tolist()
    assert found.stderr == pytest.approx(true.stderr, rel=1e-6)
    for given in (None, federation.folder / "archive"):
        codes = [line.code for line in verify_folder(federation.folder, archive=given)]
        assert codes.count("archive-verdict") == 2
        assert "settlement-named" in codes
        assert "settlement-parts" not in codes
    with Ledger(federation.folder / "ledger.sqlite", read_only=True) as ledger:
        account = replay(ledger).account
    assert account.named == {2: {LIAR: "part"}}
    assert account.scores().stderr == pytest.approx(true.stderr, rel=1e-6)


@pytest.mark.parametrize("rule", ["fenced", "fair"])
def test_no_part_that_is_shifted_decides_money(tmp_path, rule):
    """Who shifts forfeits its share, and what the others get does not hang on how much it shifted."""
    shares = []
    for more in (0.003, -0.3):
        federation = settling(tmp_path / str(more)).shifting(more).run()
        decision, _ = record_decision(federation.folder, Terms("10.00", "fit", rule, "PHI"))
        shares.append(dict(decision.shares))
    assert shares[0] == shares[1]
    assert shares[0][LIAR] == 0
    assert shares[0]["client-0"] > 0


def test_two_who_shift_against_each_other_move_errors_between_each_other_only(tmp_path, true):
    federation = settling(tmp_path)
    federation.shifting(0.03).shifting(-0.03, FRIEND)
    settled = federation.run().coordinator.settled
    assert (settled.named, asked(federation)) == ({}, [])
    errors = settled.totals(federation.names).stderr
    assert [k for k in range(5) if errors[k] != true.stderr[k]] == [1, 3]


def test_a_silent_forger_keeps_everything_open_and_has_what_the_others_leave(tmp_path, true, monkeypatch):
    federation = settling(tmp_path).shifting()
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "table")
    with federation.over():
        settled = federation.coordinator.settled
        assert (settled.named, settled.unproved, settled.final) == ({2: {}}, (LIAR,), False)
        settled = federation.close(monkeypatch)
    assert settled.final
    assert settled.totals(federation.names).stderr == pytest.approx(true.stderr, rel=1e-3)
    assert federation.verified()


def test_a_forger_that_answers_by_hand_is_named(tmp_path):
    federation = settling(tmp_path, files=True).shifting()
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "table")
    with federation.over() as new:
        member = federation.member(LIAR)
        parcels = _parcels(federation.folder / "archive" / "messages", LIAR)
        answers = [
            (kind, number, member.answer(parcel, "here"))
            for kind, number, parcel in parcels
            if kind.startswith("table")
        ]
        assert [kind for kind, _, _ in answers] == ["table.0", "table.1"]
        federation.reaches = lambda name, ask: False
        clearing = new()
        clearing.gradient = None  # whoever adds answers by hand has none
        settled = clearing.late(LIAR, *answers)
        assert (settled.named, settled.final) == ({2: {LIAR: "part"}}, True)
    assert federation.verified()


def test_who_also_hides_it_in_a_mask_is_named_for_that(tmp_path):
    federation = settling(tmp_path, rounds=1, ledger=False).shifting(key="1")

    def hide(body):
        body["pairs"][FRIEND] = str((int(body["pairs"][FRIEND]) + 10**9) % 2**64)

    federation.tabling(hide)
    settled = federation.run().coordinator.settled
    assert settled.liars == (LIAR,)
    assert settled.final


# ------------------------------------------------------------------------------------------- honest members


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1e-7, 9e-6])
def test_members_whose_gradients_differ_as_machines_do_are_never_named(tmp_path, seed, share):
    federation = settling(tmp_path, ledger=False, seed=seed).shifting()
    slopes, rng = federation.gradient, np.random.default_rng(seed)

    def perturbed(*path):
        found = slopes(*path)
        noise = rng.normal(size=found.blocks.shape)
        noise *= share / np.linalg.norm(noise, axis=1, keepdims=True)
        noise *= np.linalg.norm(found.blocks, axis=1, keepdims=True)
        return replace(found, blocks=(found.blocks + noise).astype(np.float32))

    for member in federation.members.values():
        member.gradients = lambda shape, utility: perturbed
    settled = federation.run().coordinator.settled
    assert settled.equations[0].odd == ()
    assert settled.named == {2: {LIAR: "part"}}
    assert (settled.unproved, {error for _, _, error in asked(federation)}) == ((), {None})


def test_a_direction_that_would_make_an_honest_part_false_is_not_answered(tmp_path, monkeypatch):
    """As if a server could tilt it that far: the member compares its own product before it answers."""
    federation = settling(tmp_path, ledger=False).shifting()
    monkeypatch.setattr(direction, "TOLERANCE", 1.0)
    real = naming.integers

    def tilted(values, scale, encoding):
        own = federation.coordinator.recorder.signed("statement")
        return real(values * (1.2 if own else 1.0), scale, encoding)

    monkeypatch.setattr(naming, "integers", tilted)
    settled = federation.run().coordinator.settled
    assert settled.named == {2: {}}
    assert not settled.final
    assert None not in {error for _, _, error in asked(federation)}


@pytest.mark.parametrize("lie", ["coordinate", "across", "scale", "product"])
def test_another_direction_than_the_gradient_of_the_block_is_not_answered(tmp_path, lie):
    federation = settling(tmp_path, ledger=False).shifting()

    def other(told):
        along, g = dict(told["along"]), told["g"].astype(np.int64)
        if lie == "coordinate":
            g = np.eye(1, g.size, dtype=np.int64)[0]
        if lie == "across":  # this member's own product stays as it is
            own = federation.brought(LIAR, 2).view(np.int32)[:2].astype(np.int64) // 100
            g[:2] += np.array([own[1], -own[0]])
        if lie == "scale":
            g, along["scale"] = g // 2, exact(2 * float.fromhex(along["scale"]))
        g = g.astype(np.int32)
        along["product"] = str(direction.product(told["sum"], g) + (lie == "product"))
        told.update(g=g, along={**along, "g": direction_hash(g)})

    federation.telling("table", 2, other)
    settled = federation.run().coordinator.settled
    assert settled.unproved == (LIAR,)
    assert {type(error) for name, _, error in asked(federation) if name == LIAR} == {RefusedError}


def test_a_member_answers_one_direction_for_each_block_and_only_where_parts_fail(tmp_path):
    federation = settling(tmp_path, ledger=False).shifting()
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "table")  # so nothing is over
    federation.run()
    ask = ask_of(federation)
    kept = federation.archive.load("direction-0", 2)["g"]
    assert federation.ask("client-0", ask)
    near = kept.copy()
    near[np.abs(near).argmax()] += 1
    words = ask.arrays["sum"]
    for g, block in ((near, 0), (kept, 5), (kept, 99), (kept, -1), (kept, None)):
        total = str(direction.product(words, g))
        along = {**ask.body.along, "g": direction_hash(g), "product": total, "block": block}
        with pytest.raises(RefusedError):
            federation.ask("client-0", replace(ask, arrays={**ask.arrays, "g": g}), along=along)


# --------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("answered", [0, 2])
def test_a_server_that_dies_while_it_asks_along_a_block_loses_nothing(tmp_path, true, answered):
    federation = settling(tmp_path).shifting()
    federation.dies("table", answered=5 + answered)  # in the second block
    slopes = federation.gradient
    federation.gradient = lambda *path: replace(found := slopes(*path), blocks=found.blocks * (1 + 1e-7))
    with federation.taken_up():
        federation.finish()
    settled = federation.coordinator.settled
    assert (settled.named, settled.final) == ({2: {LIAR: "part"}}, True)
    assert settled.totals(federation.names).stderr == pytest.approx(true.stderr, rel=1e-6)
    assert {"archive-verdict", "settlement-named"} <= {line.code for line in federation.verified()}


def test_a_member_killed_after_it_answered_along_a_block_remembers_that(tmp_path):
    federation, kept = settling(tmp_path, files=True, ledger=False).shifting(), {}

    def killed(name, ask):
        if (name, ask.exchange) == ("client-0", "table") and not kept:
            federation.killed_once_saved(name, ask)
            kept["told"] = [*federation.member(name).state(federation.run_id).get(TABLES.of(2))]

    federation.before.append(killed)
    assert federation.run().coordinator.settled.named == {2: {LIAR: "part"}}
    assert kept["told"] == ["", "0"]  # the first is the round's, told with the statement


# -------------------------------------------------------------------------------------------- false verdicts


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A run with a verdict on round 1, and one on each of two blocks of round 2."""
    federation = settling(tmp_path_factory.mktemp("judged")).shifting()
    federation.stating(1, key="1")
    return federation.run()


@pytest.fixture
def home(judged, tmp_path):
    return shutil.copytree(judged.home, tmp_path / "home")


ROUND, BLOCK = (False, True)
FALSE_VERDICTS = {
    "names one more": (ROUND, lambda body: body["named"].update({"client-0": "stated"})),
    "names nobody": (ROUND, lambda body: body["named"].clear()),
    "another value": (ROUND, lambda body: body["values"].update({"client-0": "1"})),
    "another product": (ROUND, lambda body: body["evidence"]["products"].update({"client-0": "1"})),
    "another seed": (ROUND, lambda body: body["evidence"]["seeds"].update({"client-0": "A" * 43 + "="})),
    "names one more in a block": (BLOCK, lambda body: body["named"].update({FRIEND: "part"})),
    "names nobody in a block": (BLOCK, lambda body: body["named"].clear()),
    "another reason": (BLOCK, lambda body: body["named"].update({LIAR: "stated"})),
    "another value in a block": (BLOCK, lambda body: body["values"].update({FRIEND: "1"})),
    "fewer values": (BLOCK, lambda body: body["values"].pop(FRIEND)),
    "another scale": (BLOCK, lambda body: body.update(scale=exact(1.5 * float.fromhex(body["scale"])))),
    "a block that adds up": (BLOCK, lambda body: body.update(block=7)),
    "no block": (BLOCK, lambda body: body.update(block=99)),
    "another sum": (BLOCK, lambda body: body.update(product=str(int(body["product"]) + 2**64))),
    "another direction": (BLOCK, lambda body: body.update(g="0" * 64)),
    "one more silent": (BLOCK, lambda body: body["silent"].append(FRIEND)),
}


@pytest.mark.parametrize(("of_block", "change"), FALSE_VERDICTS.values(), ids=FALSE_VERDICTS.keys())
def test_a_verdict_that_does_not_follow_is_refused(home, of_block, change):
    assert list(verify_folder(home / "run"))
    seen = []

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "verdict" and (body["block"] is not None) == of_block and not seen:
                seen.append(change(body))
            yield record.author, record.kind, body, record.signature

    written(home, tell, anew=())
    with pytest.raises(LedgerError):
        list(verify_folder(home / "run"))
    assert seen


def test_an_archived_direction_that_is_not_the_one_of_the_verdict_is_refused(home):
    archive = FolderArchive(home / "run" / "archive")
    kept = archive.load("direction-0", 2)
    archive.save("direction-0", 2, {**kept, "g": kept["g"] + 1})
    with pytest.raises(LedgerError):
        list(verify_folder(home / "run"))
