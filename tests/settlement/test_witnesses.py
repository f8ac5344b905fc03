"""Two members that move credit between each other, and the witnesses that they cannot choose."""

from __future__ import annotations

import json
import shutil

import pytest

import fedmerit as fm
from attacked import due_in, settling
from fedmerit.carriers.folders import HANDED, _parcels
from fedmerit.errors import LedgerError, RefusedError, StoreError, UnsettledShares
from fedmerit.identity import canonical, content
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.run import replay
from fedmerit.notes import Note
from fedmerit.protocol.messages import pack
from fedmerit.protocol.settlement import tables_hash, words_kind
from fedmerit.protocol.witness import drawn_body, drawn_for
from fedmerit.report.facts import Facts
from fedmerit.report.payment import propose
from fedmerit.report.source import read_source
from fedmerit.storage.run_folder import FolderArchive
from fedmerit.verify import verify_folder
from forging import body_of, written
from linear_federation import LIAR, committing_falsely
from runs import record_decision, run_in
from wire import unpack

RING = 2**64
FRIEND = "client-3"
PAIR = (LIAR, FRIEND)
ASKED = ("draw", "drawn", "seal", "witness")
PAY = Terms("100.00", "fit", "fair", "PHI")


def moving(federation, more=2**60, rounds=(1,)):
    """Let LIAR state so much more and FRIEND so much less, with tables of masks that agree on it."""
    for name, peer, sign in ((*PAIR, 1), (FRIEND, LIAR, -1)):

        def lie(answer, name=name, peer=peer, sign=sign):
            text, _, tables = unpack(answer)
            statement, bodies = json.loads(text), [json.loads(table) for table, _ in tables]
            for body in bodies:
                if body["round"] in rounds:
                    key = str(body["round"])
                    statement["rounds"][key] = str(int(statement["rounds"][key]) + sign * more)
                    body["pairs"][peer] = str((int(body["pairs"][peer]) - more) % RING)  # LIAR comes first
            statement["masks"] = tables_hash(bodies)
            return federation.stated(name, statement, bodies)

        remembered = federation.remembered(lie, name)
        federation.answering("state", federation.config.training.rounds, remembered, name)
    return federation


def shares(federation, rule="fair"):
    with Ledger(federation.folder / "ledger.sqlite", read_only=True) as ledger:
        return dict(fm.shares(replay(ledger).account.scores(), rule=rule))


def witness_of(federation, number=1, pair=PAIR):
    """Who was drawn for a pair."""
    found = federation.coordinator.settled.manifest
    (seed,) = {body["seed"] for body in federation.coordinator.recorder.recorded("draw")} - {""}
    return drawn_for(found.entry(number), seed, federation.config)[frozenset(pair)]


def sighting(federation, change):
    """Let whoever witnesses the pair sign something else about it."""

    def lie(name, ask, answer):
        if ask.exchange != "witness":
            return answer
        body = json.loads(unpack(answer)[0])
        if change(body) is None:
            return answer
        return pack([canonical(body), federation.keys[name].sign(content(name, "witness", body))])

    federation.after.append(lie)
    return federation


def of_pair(rows):
    return next((row for row in rows if row[:2] == [*PAIR]), None)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return settling(tmp_path_factory.mktemp("honest"), 5, 1).run()


# ---------------------------------------------------------------------------------------------- honest runs


@pytest.mark.parametrize(("members", "pairs"), [(5, 10), (6, 15), (7, 21)])
def test_every_pair_is_witnessed(tmp_path, members, pairs):
    federation = settling(tmp_path, members, 1).run()
    found = federation.coordinator.settled
    assert (found.pairs, found.witnessed, found.final, found.verdicts) == ((pairs, pairs), True, True, {})
    lines = list(
        verify_folder(federation.folder, archive=federation.folder / "archive", gradient=federation.gradient)
    )
    assert f"settlement: {pairs} of {pairs} pairs of members are witnessed" in lines
    assert json.loads((federation.folder / "scores.json").read_text())["settlement"]["witnessed"] is True


@pytest.mark.parametrize("lost", [[("client-2", 1, "masked")], [("client-2", 1, "share")]])
def test_pairs_with_a_lost_dealer_need_no_witness(tmp_path, lost):
    found = settling(tmp_path, 6, 1, lost=lost, ledger=False).run().coordinator.settled
    assert (found.pairs, found.final) == ((10, 10), True)


def test_a_run_without_masks_of_eight_bytes_draws_nobody_and_says_so(tmp_path):
    federation = settling(tmp_path, 5, 1, naming=False).run()
    assert not {one.ask.exchange for one in federation.passed} & {*ASKED}
    assert json.loads((federation.folder / "scores.json").read_text())["settlement"]["witnessed"] is False
    assert "settlement-witnessed" not in {line.code for line in federation.verified()}


# ------------------------------------------------------------------------------------- two who move credit


def test_two_who_agree_on_a_false_mask_are_both_named(tmp_path, honest):
    federation = moving(settling(tmp_path, 5, 1)).run()
    found = federation.coordinator.settled
    assert (found.holding, found.named, found.final) == (1, {1: dict.fromkeys(PAIR, "pair")}, True)
    assert due_in(federation) == due_in(honest)
    assert {"archive-verdict", "settlement-named"} <= {line.code for line in federation.verified()}
    made, _ = record_decision(federation.folder, PAY)
    assert made.paid[LIAR] == made.paid[FRIEND] == 0


def test_what_they_gained_before(tmp_path):
    """Under ``fair`` who is below 0 pays nothing: two of six take most of what all have brought about."""
    whole = shares(settling(tmp_path / "honest", 6, 1).run())
    assert whole[LIAR] + whole[FRIEND] < 0.4
    taken = shares(moving_without_masks(settling(tmp_path / "lie", 6, 1, naming=False), 2**60).run())
    assert taken[LIAR] + taken[FRIEND] > 0.8
    back = shares(moving(settling(tmp_path / "witnessed", 6, 1)).run())
    assert back == pytest.approx(whole)


def moving_without_masks(federation, more):
    federation.stating(more)
    federation.stating(-more, FRIEND)
    return federation


def test_four_members_can_still_move_credit(tmp_path):
    """No witness could be given a key there without seeing too much."""
    federation = moving(settling(tmp_path, 4, 1), 1000).run()
    found = federation.coordinator.settled
    assert (found.holding, found.final, found.liars, found.witnessed) == (1, True, (), False)
    assert not {one.ask.exchange for one in federation.passed} & {*ASKED}
    assert federation.verified()


def test_three_of_whom_one_is_the_witness_can_still_move_credit(tmp_path, honest):
    """It signs what the two have stated, whatever the key says."""
    federation = moving(settling(tmp_path, 5, 1), 1000)

    def agree(body):
        if (shown := of_pair(body["keys"])) is None:
            return None
        body["keys"].remove(shown)
        table = next(b for n, b, _ in federation.coordinator.recorder.signed("table") if n == LIAR)
        body["values"].append([*PAIR, table["pairs"][FRIEND]])
        return body["values"].sort() is None

    found = sighting(federation, agree).run().coordinator.settled
    assert (found.holding, found.final, found.liars, found.witnessed) == (1, True, (), True)
    due, got = due_in(honest), due_in(federation)
    assert {name: got[name] - due[name] for name in due} == {
        **dict.fromkeys(due, 0), LIAR: 1000, FRIEND: -1000,
    }  # fmt: skip


@pytest.mark.parametrize("what", ["nothing", "garbage"])
def test_two_who_hand_over_no_key_are_not_proved_and_share_what_is_theirs(tmp_path, monkeypatch, what):
    due = due_in(settling(tmp_path / "honest", 7, 1, ledger=False).run())
    federation = moving(settling(tmp_path, 7, 1))
    for name, peer in (PAIR, PAIR[::-1]):

        def spoil(answer, name=name, peer=peer):
            ((text, _),) = unpack(answer)
            body = json.loads(text)
            if what == "nothing":
                del body["sealed"][peer]
            else:
                body["sealed"][peer] = body["sealed"][next(one for one in body["sealed"] if one != peer)]
            return pack([[canonical(body), federation.keys[name].sign(content(name, "sealed", body))]])

        federation.answering("seal", 1, spoil, name)
    with federation.over():
        found = federation.coordinator.settled
        assert (found.unproved, found.witnessed, found.final) == (PAIR, False, False)
        with pytest.raises(UnsettledShares):
            record_decision(shutil.copytree(federation.folder, tmp_path / "copy"), PAY)
        federation.close(monkeypatch)
    account = run_in(federation.folder).account
    got = {name: account.counted(account.manifest.rounds[0], name) for name in due}
    assert {name: got[name] for name in due if name not in PAIR} == {
        name: due[name] for name in due if name not in PAIR
    }
    assert got[LIAR] + got[FRIEND] == due[LIAR] + due[FRIEND]
    assert abs(got[LIAR] - got[FRIEND]) <= 1


def test_two_who_have_masks_with_each_other_only_are_caught_too(tmp_path, monkeypatch):
    """They share no secret with their witness, so they hand the key over openly, or nothing."""
    others = [name for name in (f"client-{i}" for i in range(5)) if name not in PAIR]
    federation = moving(settling(tmp_path, 5, 1))
    with monkeypatch.context() as patch:
        committing_falsely(patch, *((name, other) for name in PAIR for other in others))
        found = federation.run().coordinator.settled
    assert (found.named, found.final) == ({1: dict.fromkeys(PAIR, "pair")}, True)
    assert federation.verified()


def test_words_that_were_archived_are_those_that_count(tmp_path, honest):
    """Nobody is asked for its masked words, so nobody can show others than it sent."""
    federation = settling(tmp_path, 5, 1).run()
    archive = tmp_path / "run" / "archive"
    assert len(list(archive.glob("words-*"))) == 5
    kept = FolderArchive(archive)
    words = kept.load(words_kind(LIAR), 1)[LIAR].copy()
    words[0] ^= 1
    kept.save(words_kind(LIAR), 1, {LIAR: words})
    with pytest.raises(LedgerError):
        list(verify_folder(federation.folder, archive=archive))


# ------------------------------------------------------------------------------------- witnesses and openings


@pytest.mark.parametrize("exchange", ["witness", "draw"])
def test_whose_answer_is_lost_is_awaited_and_answers_by_hand(tmp_path, honest, exchange):
    federation = moving(settling(tmp_path, 5, 1, files=True))
    federation.losing(exchange, who="client-0")
    with federation.over() as new:
        found = federation.coordinator.settled
        assert (found.unproved, found.final) == (("client-0",), False)
        with pytest.raises(UnsettledShares):
            record_decision(shutil.copytree(federation.folder, tmp_path / "copy"), PAY)
        federation.reaches = lambda name, ask: False
        member, answers = federation.member("client-0"), []
        for kind, number, parcel in _parcels(federation.folder / "archive" / "messages", "client-0"):
            if kind in HANDED:
                answers.append((kind, number, member.answer(parcel, "here")))
        found = new().late("client-0", *answers)
        assert (found.final, found.named) == (True, {1: dict.fromkeys(PAIR, "pair")})
    (entry,) = found.manifest.rounds
    assert {name: found.value(entry, name) for name in entry.participants} == due_in(honest)
    assert federation.verified()


@pytest.mark.parametrize("lie", ["value", "key", "channel", "nothing"])
def test_a_witness_that_accuses_an_honest_pair_harms_nobody(tmp_path, honest, monkeypatch, lie):
    federation = settling(tmp_path, 5, 1)

    def accuse(body):
        if (seen := of_pair(body["values"])) is None:
            return None
        body["values"].remove(seen)
        if lie == "value":
            body["values"] = sorted([*body["values"], [*PAIR, str((int(seen[2]) + 1) % RING)]])
        elif lie == "key":
            body["keys"] = [[*PAIR, "A" * 43 + "="]]
        elif lie == "channel":
            body["channels"] = dict.fromkeys(PAIR, "A" * 43 + "=")
        return True

    with sighting(federation, accuse).over():
        found, witness = federation.coordinator.settled, witness_of(federation)
        assert (found.unproved, found.liars, found.final) == ((witness,), (), False)
        assert due_in(federation) == due_in(honest)
        assert federation.close(monkeypatch).final
    assert due_in(federation) == due_in(honest)
    assert federation.verified()


def test_a_server_gets_one_draw_only(tmp_path):
    federation = settling(tmp_path, 7, 1, ledger=False).run()
    asked = federation.asked(LIAR)
    drawn, seal, draw = asked["drawn", 1], asked["seal", 1], asked["draw", 1]
    for ask in (draw, drawn, seal, asked["witness", 1]):
        assert federation.ask(LIAR, ask) == federation.ask(LIAR, ask)
    fewer = dict([*drawn.body.openings.items()][1:])
    forged = {**drawn.body.openings, LIAR: drawn.body.openings["client-0"]}
    others = {**draw.body.statements, "client-0": "0" * 64}
    few = dict([*seal.body.drawn.items()][:4])
    for ask, change in (
        (drawn, {"openings": fewer}),  # another seed
        (drawn, {"openings": forged}),
        (drawn, {"openings": dict([*drawn.body.openings.items()][:4])}),
        (drawn, {"statements": others}),
        (draw, {"statements": dict([*draw.body.statements.items()][:4])}),
        (draw, {"statements": {**draw.body.statements, LIAR: "0" * 64}}),
        (draw, {"committed": {**draw.body.committed, LIAR: "0" * 64}}),
        (drawn, {"committed": {**drawn.body.committed, "client-0": "0" * 64}}),
        (seal, {"seed": "0" * 64}),
        (seal, {"drawn": few}),
        (seal, {"drawn": dict.fromkeys(seal.body.drawn, seal.body.drawn[LIAR])}),
    ):
        with pytest.raises(RefusedError):
            federation.ask(LIAR, ask, **change)


def test_a_number_is_opened_for_one_list_until_a_draw_is_signed(tmp_path):
    federation = settling(tmp_path, 7, 1, ledger=False)
    federation.reaches = lambda name, ask: ask.exchange != "seal"
    federation.run()
    draw = federation.asked(LIAR)["draw", 1]
    assert federation.ask(LIAR, draw)
    with pytest.raises(RefusedError):
        federation.ask(LIAR, draw, statements={**draw.body.statements, "client-0": "0" * 64})


def test_keys_are_handed_over_for_one_draw_only(tmp_path):
    """Also if so many collude that they sign a second one."""
    federation = settling(tmp_path, 7, 1, ledger=False).run()
    seal, manifest = federation.asked(LIAR)["seal", 1], federation.coordinator.settled.manifest
    body = drawn_body(federation.run_id, manifest.digest, "0" * 64)
    drawn = {name: federation.keys[name].sign(content(name, "drawn", body)) for name in federation.names}
    with pytest.raises(RefusedError):
        federation.ask(LIAR, seal, seed="0" * 64, drawn=drawn)


def test_who_was_shown_another_list_takes_part_in_the_draw_that_t_members_signed(tmp_path):
    """Before: it was silent for ever, whatever it was asked later."""
    federation, victim = settling(tmp_path, 7, 1), "client-1"
    federation.telling(
        "draw",
        1,
        lambda body: [body[part].pop("client-0") for part in ("statements", "committed")],
        who=victim,
    )
    with federation.over() as new:
        assert federation.refusals(victim) == ["drawn"]
        assert victim in federation.coordinator.settled.unproved
        federation.before.clear()
        new().run(federation.names)
        found = federation.coordinator.recorder.recorded("settled")[-1]
    assert (found["silent"], found["final"]) == ([], True)


def test_nobody_commits_to_a_number_once_others_have_opened_theirs(tmp_path):
    """Before: the last to agree tried numbers until the witness of its friends was a friend."""
    federation, late = settling(tmp_path, 7, 1), {"committed": {FRIEND: "0" * 64}}
    for name in federation.names:
        federation.telling("drawn", 1, lambda body: body["committed"].update(late["committed"]), who=name)
    with federation.over():
        assert [name for name in federation.names if federation.refusals(name) != ["drawn"]] == []
        assert not federation.coordinator.settled.final


def test_keys_go_to_nobody_if_members_are_shown_two_draws(tmp_path):
    """Those with the other draw sign another seed, and nobody hands keys out before t signed the same."""
    federation = settling(tmp_path, 7, 1, ledger=False)
    for name in federation.names[:3]:
        federation.telling("drawn", 1, lambda told: told["openings"].pop("client-6"), who=name)
    found = federation.run().coordinator.settled
    assert "seal" not in {one.ask.exchange for one in federation.passed}
    assert (found.final, found.pairs, found.unproved) == (False, (0, 21), federation.names[:3])


def test_a_witness_is_shown_what_ends_signed_in_its_own_sum(tmp_path):
    federation = settling(tmp_path, 5, 2, ledger=False).run()
    first, second = (federation.asked(LIAR)["witness", number] for number in (1, 2))
    told = first.body
    for change in (
        {"lists": second.body.lists},
        {"tables": second.body.tables},
        {"sealed": second.body.sealed},
        {"tables": {**told.tables, "client-0": told.tables[FRIEND]}},
        {"sealed": {**told.sealed, "client-0": told.sealed[FRIEND]}},
        {"g": first.arrays["g"] + 1},
    ):
        with pytest.raises(RefusedError):
            federation.ask(LIAR, first, **change)


# ----------------------------------------------------------------------------------------- kills, and ledgers


@pytest.mark.parametrize("answered", [0, 3])
@pytest.mark.parametrize("exchange", ASKED)
def test_a_server_that_dies_while_it_asks_loses_nothing(tmp_path, honest, exchange, answered):
    federation = moving(settling(tmp_path, 5, 1))
    federation.dies(exchange, 1, answered)
    with federation.taken_up():
        federation.finish()
    found = federation.coordinator.settled
    assert (found.named, found.final) == ({1: dict.fromkeys(PAIR, "pair")}, True)
    assert due_in(federation) == due_in(honest)
    assert federation.verified()


@pytest.mark.parametrize("exchange", ASKED)
def test_a_member_that_is_killed_once_it_has_answered_answers_alike(tmp_path, exchange):
    federation, killed = settling(tmp_path, 5, 1, files=True), []

    def kill(name, ask):
        if (name, ask.exchange) == (LIAR, exchange) and not killed:
            killed.append(federation.killed_once_saved(name, ask))

    federation.before.append(kill)
    found = federation.run().coordinator.settled
    assert killed
    assert (found.witnessed, found.final) == (True, True)


WITHOUT = {
    "what one witness signed": (lambda one: one.kind == "witness" and one.author == "client-0", LedgerError),
    "all of it": (lambda one: one.kind in (*ASKED, "nonce", "sealed"), LedgerError),
    "signatures under the draw": (lambda one: one.kind == "drawn" and one.author != LIAR, LedgerError),
    "what was opened": (lambda one: one.kind == "nonce" and one.author == LIAR, LedgerError),
    "a table": (lambda one: one.kind == "table" and one.author == LIAR, LedgerError),
}


@pytest.mark.parametrize(("left_out", "error"), WITHOUT.values(), ids=WITHOUT.keys())
def test_a_ledger_that_leaves_something_out_does_not_verify(tmp_path, left_out, error):
    federation = settling(tmp_path, 5, 1).run()

    def change(ledger, records):
        for record in records:
            if not left_out(record) and record.kind not in ("countersigned", "end", "seen"):
                yield record.author, record.kind, body_of(record), record.signature

    written(federation.home, change, anew=())
    with pytest.raises(error):
        federation.verified()


def test_a_server_that_records_no_verdict_on_a_false_pair_does_not_verify(tmp_path):
    federation = moving(settling(tmp_path, 5, 1)).run()

    def change(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "settled":
                body.update(named=[])
            if record.kind not in ("verdict", "countersigned", "end", "seen"):
                yield record.author, record.kind, body, record.signature

    written(federation.home, change, anew=())
    with pytest.raises(LedgerError):
        federation.verified()


def test_verify_judges_every_round_by_the_archive(tmp_path):
    """A server that signs for its friends finds no way past the masked words."""
    federation = settling(tmp_path, 5, 1).run()
    lines = list(verify_folder(federation.folder, archive=federation.folder / "archive"))
    assert "archive-verdict" not in {line.code for line in lines}
    file = next((federation.folder / "archive").glob("words-*"))
    file.unlink()
    with pytest.raises(StoreError):
        list(verify_folder(federation.folder, archive=federation.folder / "archive"))


FALSE_DRAWS = {
    "another seed": lambda body: body.update(seed="0" * 64 if body["seed"] else ""),
    "another statement": lambda body: body["statements"].update({LIAR: "0" * 64}),
    "few statements": lambda body: [body["statements"].pop(name) for name in PAIR],
    "few numbers": lambda body: [body["nonces"].pop(name, "") for name in PAIR],
    "a number that nobody opened": lambda body: body["nonces"].update({LIAR: "0" * 64}),
}


@pytest.mark.parametrize("change", FALSE_DRAWS.values(), ids=FALSE_DRAWS.keys())
def test_a_draw_that_does_not_follow_is_refused(honest, tmp_path, change):
    home = shutil.copytree(honest.home, tmp_path / "home")

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind == "draw":
                change(body)
            yield record.author, record.kind, body, record.signature

    written(home, tell, anew=())
    with pytest.raises(LedgerError):
        list(verify_folder(home / "run"))


def test_a_draw_that_nobody_was_asked_to_sign_leaves_everybody_unproved(tmp_path):
    """A server that stops once all numbers are open must not pass for one whose pairs were witnessed."""
    federation = moving(settling(tmp_path, 5, 1))
    federation.reaches = lambda name, ask: ask.exchange != "drawn"
    found = federation.run().coordinator.settled
    assert (found.final, found.witnessed, found.pairs) == (False, False, (0, 10))
    assert found.unproved == federation.names


@pytest.mark.parametrize(("exchange", "kind"), [("seal", "sealed"), ("witness", "witness")])
def test_what_the_ledger_would_refuse_is_not_recorded(tmp_path, exchange, kind):
    """One member's odd answer costs it that answer, and not the ledger."""
    federation = settling(tmp_path, 5, 1)

    def odd(answer):
        found = unpack(answer)
        text = found[0][0] if exchange == "seal" else found[0]
        body = {**json.loads(text), "more": "field"}
        signed = [canonical(body), federation.keys[LIAR].sign(content(LIAR, kind, body))]
        return pack([signed] if exchange == "seal" else signed)

    federation.answering(exchange, 1, odd)
    federation.run()
    assert not [one for one in federation.records if one.kind == kind and "more" in one.body]
    assert federation.verified()


def test_a_round_of_too_few_members_leaves_a_run_unwitnessed(tmp_path):
    """Six of seven have no witnesses: credit can move there, and no other round makes up for it."""
    federation = settling(tmp_path, 7, 2, lost=[("client-6", 2, "masked")]).run()
    found = federation.coordinator.settled
    assert (found.final, found.pairs, found.witnessed) == (True, (21, 21 + 15), False)
    assert "settlement: 21 of 36 pairs of members are witnessed" in federation.verified()
    proposal = propose(Facts(read_source(federation.folder), score="PHI"), "100.00", {}, dry_run=True)
    assert Note("settlement-credit") in proposal.notes


def test_where_all_pairs_are_witnessed_nothing_is_said_of_moved_credit(honest):
    proposal = propose(Facts(read_source(honest.folder), score="PHI"), "100.00", {}, dry_run=True)
    assert Note("settlement-credit") not in proposal.notes
