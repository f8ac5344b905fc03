"""The settlement on the in-memory transport: honest runs, and members and servers that lie."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from safetensors import numpy

from attacked import settling
from fedmerit.errors import (
    FedmeritError,
    LedgerError,
    MessageError,
    RefusedError,
    SettlementError,
    StoreError,
)
from fedmerit.identity import canonical, content, exact, number
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.rounds import sees
from fedmerit.notes import code_of
from fedmerit.protocol import clearing, pool
from fedmerit.protocol.direction import Manifest, differs, integers, product, scale_of
from fedmerit.protocol.memory import CLIENT, POOL, UPDATE
from fedmerit.protocol.messages import Ask
from fedmerit.protocol.settlement import Statement, countersignature, last_round
from fedmerit.protocol.settler import SETTLING, Settler
from fedmerit.secagg.quantise import Encoding, largest_stated
from fedmerit.storage.checks import check_archive
from fedmerit.storage.run_folder import FolderArchive
from fedmerit.verify import verify_copy, verify_folder
from ledgers import pool_of
from linear_federation import LIAR, Federation, data, fit, fit_slope
from refusals import refused
from runs import record_decision, run_in


def settled(home, members=4, rounds=3, *, naming=False, **given):
    """A federation that settles; without naming unless asked for."""
    return settling(home, members, rounds, naming=naming, **given)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """What a settled run comes to in which nobody lies, by its arguments."""

    @cache
    def settlement(lost=(), masks=True):
        home = tmp_path_factory.mktemp("honest")
        given = {"lost": lost, "masks": masks, "ledger": False}
        return settled(home, **given).run().coordinator.settled

    return settlement


@pytest.fixture(scope="module")
def once_settled(tmp_path_factory):
    return settled(tmp_path_factory.mktemp("settled")).run()


@pytest.fixture
def copied(once_settled, tmp_path):
    """A copy of the folder of a run that was settled."""
    return shutil.copytree(once_settled.folder, tmp_path / "run")


def book(federation):
    """The settlement as the ledger has it, with everything recomputed."""
    return run_in(federation.folder).settlement


def accounts(federation):
    return run_in(federation.folder).accounts


def records(federation, kind):
    return [record for record in federation.records if record.kind == kind]


# --------------------------------------------------------------------------------------------- honest runs


@pytest.mark.parametrize("method", ["settled", "both"])
@pytest.mark.parametrize("given", [{"masks": False}, {}, {"files": True}, {"ledger": False}])
def test_everything_that_is_stated_adds_up(tmp_path, method, given):
    federation = settled(tmp_path, scoring={"method": method}, **given).run()
    found = federation.coordinator.settled
    assert [one.holds for one in found.equations] == [True, True, True]
    assert found.missing == found.liars == ()
    assert federation.notes == []
    shown = federation.pool.settlement()
    values = [fit(model, shown)["fit"].mean() for model in federation.models]
    assert found.totals(federation.names).values.sum() == pytest.approx(values[-1] - values[0], rel=0.02)
    assert (found.totals(federation.names).stderr > 0).all()


def test_what_is_stated_is_the_product_with_the_path_gradient(tmp_path):
    federation = settled(tmp_path, masks=False, ledger=False).run()
    found, shown = federation.coordinator.settled, federation.pool.settlement()
    every = np.arange(len(shown.y))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    for entry, m0, m in zip(found.manifest.rounds, federation.models, federation.models[1:], strict=False):
        ways = [fit_slope(m0 + (1 + t) / 2 * (m - m0), shown, every)[1] for t in nodes]
        gradient = np.tensordot(weights / 2, ways, 1)
        own = [federation.updates[entry.round, name] @ gradient / 4 for name in entry.participants]
        assert found.round_scores(entry).values == pytest.approx(own, rel=0.02, abs=1e-5)


def test_sums_with_weights_of_the_roster_settle(tmp_path):
    federation = settled(tmp_path, weights={f"client-{i}": 1.0 + i for i in range(4)}).run()
    assert [one.holds for one in federation.coordinator.settled.equations] == [True] * 3
    assert federation.verified()


def test_nothing_is_measured_before_the_pool_opens(tmp_path):
    federation = settled(tmp_path)
    opened = []
    federation.before.append(lambda name, ask: opened.append((ask.exchange, "x" in ask.arrays)) and None)
    federation.evaluate = None  # nobody evaluates
    federation.run()
    assert {exchange for exchange, shown in opened if shown} == {"open"}
    assert [exchange for exchange, _ in opened].index("open") > max(
        i for i, (exchange, _) in enumerate(opened) if exchange == "report"
    )
    for one in federation.rounds:
        assert set(one.reports) == set(one.included)  # acknowledgements
        assert all(report.measured == {} for report in one.reports.values())
        assert one.body["utilities"] == {}


@pytest.mark.parametrize("stage", ["masked", "unmask"])
def test_an_aborted_round_is_not_settled_and_listed_if_shares_were_released(tmp_path, stage):
    lost = [(f"client-{i}", 2, stage) for i in range(3)]
    federation = settled(tmp_path, lost=lost).run()
    assert [entry.round for entry in federation.coordinator.settled.manifest.rounds] == [1, 3]
    released = {record.author: record.body["released"] for record in records(federation, "agreed")}
    assert released == {name: [2] if stage == "unmask" else [] for name in federation.names}
    lines = [line for line in federation.verified() if code_of(line) == "settlement-released"]
    told = [(line.values["round"], line.values["clients"]) for line in lines]
    assert told == [(2, federation.names)] * (stage == "unmask")


def test_a_server_that_opens_the_pool_early_gets_no_answer(tmp_path):
    federation = settled(tmp_path)
    for name in federation.names[:3]:
        federation.telling("open", 1, lambda told: told.update(last={}), who=name)
    with federation.trained(1):
        federation.finish()
    assert federation.coordinator.settled is None
    assert {type(error) for name in federation.names[:3] for error in federation.errors(name)} == {
        RefusedError
    }


# ------------------------------------------------------------------------------------------- lying members


def test_members_that_say_a_right_direction_is_wrong_keep_nobody_else_from_stating(tmp_path):
    federation = settled(tmp_path)

    federation.answering("agreed", 3, federation.disagreeing([1]))
    federation.run()
    assert federation.coordinator.settled.missing == (LIAR,)
    assert [record.body["wrong"] for record in records(federation, "agreed")].count([1]) == 1
    (line,) = [line for line in federation.verified() if code_of(line) == "settlement-disagreed"]
    assert line.values == {"round": 1, "clients": (LIAR,)}


def test_who_finds_a_direction_wrong_states_nothing_though_all_others_agree(tmp_path):
    federation = settled(tmp_path, ledger=False)
    slopes = federation.gradient

    def steeper(*path):
        found = slopes(*path)
        return replace(found, blocks=2 * found.blocks)

    federation.members[LIAR].gradients = lambda shape, utility: steeper
    federation.run()
    assert federation.coordinator.settled.missing == (LIAR,)
    with pytest.raises(RefusedError):
        federation.ask(LIAR, federation.asked("client-0")["state", 3])


# ------------------------------------------------------------------------------------------- lying servers


def test_a_manifest_of_another_run_or_utility_or_of_later_rounds_is_refused(tmp_path):
    federation = settled(tmp_path, ledger=False)
    federation.reaches = lambda name, ask: (name, ask.exchange) != (LIAR, "open")
    federation.run()
    ask = federation.asked("client-0")["open", 3]
    body = json.loads(ask.body.manifest)
    for other in ({"run": "f" * 32}, {"utility": "accuracy"}, {"pool": "0" * 64}, {"stratified": True}):
        with pytest.raises(RefusedError):
            federation.ask(LIAR, ask, manifest=canonical({**body, **other}))
    with pytest.raises(RefusedError):
        federation.ask(LIAR, ask, manifest=ask.body.manifest.replace(b",", b", "))
    early = replace(ask, round=2)
    with pytest.raises(RefusedError):  # who has seen the pool signs no end any more
        federation.ask("client-0", Ask("last", ask.run, 2, {}, {}))
    told = last_round(ask.run, 2)
    signed = {name: key.sign(content(name, "last", told)) for name, key in federation.keys.items()}
    with pytest.raises(RefusedError):  # signed as it should be, but with a third round
        federation.ask(LIAR, early, last=signed)
    rounds = {**body, "rounds": body["rounds"][:2]}
    facts = [one.size for one in Manifest.from_body(body).rounds[:2]]
    rounds["scale"] = exact(scale_of(facts))
    assert federation.ask(LIAR, early, last=signed, manifest=canonical(rounds))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(scale=exact(2 * number(body["scale"]))), "scale does not follow"),
        (lambda body: body["rounds"][0]["participants"].append(LIAR), "names a member twice"),
        (lambda body: body["rounds"][0].update(participants=[]), "or nobody"),
        (lambda body: body["rounds"].reverse(), "rounds in order"),
        (lambda body: body["rounds"].append(body["rounds"][-1]), "rounds in order"),
        (lambda body: body["rounds"][0].update(points=5), "other blocks or points"),
        (lambda body: body["rounds"][0].update(product="-0"), "a whole number as text"),
        (lambda body: body.update(stratified=0), "blocks of at least one sample"),
        (lambda body: body.update(more="field"), "not written as servers write it"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_none(tmp_path, change, words):
    federation = settled(tmp_path, ledger=False, rounds=2).run()
    body = json.loads(canonical(federation.coordinator.recorder.recorded("opening")[0]["manifest"]))
    Manifest.from_body(body)
    change(body)
    with pytest.raises(MessageError, match=words):
        Manifest.from_body(body)


def test_one_last_round_is_signed_and_it_is_one_before_the_end(tmp_path):
    federation = settled(tmp_path, ledger=False)
    with federation.begun():
        ask = Ask("last", federation.run_id, 2, {}, {})
        for number in (0, 3, -1):
            with pytest.raises(RefusedError):
                federation.ask(LIAR, replace(ask, round=number))
        assert federation.ask(LIAR, ask) == federation.ask(LIAR, ask)
        with pytest.raises(RefusedError):
            federation.ask(LIAR, replace(ask, round=1))


@pytest.mark.parametrize(("samples", "key"), [(data("another", 32), b""), (data("test", 32), b"k" * 32)])
def test_nobody_states_on_a_pool_that_was_chosen_after_the_rounds(tmp_path, samples, key):
    """All that the server makes of it fits together: only the commitment speaks against it."""
    federation = settled(tmp_path, ledger=False)
    with federation.trained():
        federation.coordinator.pool = pool_of(*samples, key=key or federation.pool.key, settled=32)
        federation.finish()
    assert federation.coordinator.settled is None
    assert federation.coordinator.recorder.recorded("unsettled")[0]["why"] == "not-agreed"
    assert not federation.coordinator.recorder.signed("agreed")


@pytest.mark.parametrize("count", [9, 10])
def test_a_pool_of_few_samples_is_refused(tmp_path, count):
    """A product with the gradient of a few samples would tell more of an update than a score needs."""
    federation = settled(tmp_path, rounds=1, ledger=False)
    federation.pool = pool_of(*data("test", count), key=b"k" * 32, settled=count)
    federation.run()
    assert (federation.coordinator.settled is None) == (count < 10)
    assert bool(federation.coordinator.recorder.signed("statement")) == (count >= 10)


@pytest.mark.parametrize("repeated", [False, True])
def test_samples_that_a_round_was_measured_on_are_refused(tmp_path, repeated):
    """A server may commit to a settled part that repeats a sample of the rounds' part."""
    federation = settled(tmp_path, scoring={"method": "both"}, rounds=1, ledger=False)
    x, y = data("test", 52)
    if repeated:
        x[51], y[51] = x[3], y[3]
    federation.pool = pool_of(x, y, 2, key=b"k" * 32, settled=32)
    federation.run()
    assert (federation.coordinator.settled is None) == repeated
    assert bool(federation.coordinator.recorder.signed("agreed")) == (not repeated)


def test_samples_that_were_opened_before_are_refused(tmp_path):
    first = settled(tmp_path, files=True).run()
    assert first.coordinator.settled.missing == ()
    again = settled(tmp_path, files=True)
    again.run_id, again.model = "f" * 32, again.model + np.float32(0.01)  # else it would be the same updates
    again.home.joinpath("run").rename(tmp_path / "first")
    again.run()
    assert [one.aborted for one in again.rounds] == [""] * 3
    assert {one.ask.exchange for one in again.passed if one.error} == {"open"}
    assert again.coordinator.settled is None
    other = settled(tmp_path, files=True)
    other.run_id, other.pool = "e" * 32, settled(tmp_path / "other", seed=5).pool
    again.home.joinpath("run").rename(tmp_path / "second")
    other.run()
    assert other.coordinator.settled.missing == ()


def test_samples_that_an_earlier_run_reported_on_are_refused(tmp_path):
    """Its members saw them, and may have trained on them since."""
    x, y = data("test", 32)
    first = Federation(tmp_path, 4, 1, files=True, ledger=False)
    first.pool = pool_of(x, y, 1, key=b"1" * 32)
    assert len(first.run().rounds[0].reports) == 4
    again = settled(tmp_path, files=True, ledger=False, rounds=1)
    again.run_id, again.model = "f" * 32, again.model + np.float32(0.01)
    again.pool = pool_of(np.roll(x, 1, 0), np.roll(y, 1), 1, key=b"2" * 32, settled=32)
    again.run()
    assert {one.ask.exchange for one in again.passed if one.error} == {"open"}
    assert again.coordinator.settled is None


def test_a_copy_that_withholds_its_readers_own_statement_is_refused(tmp_path):
    """It could not recompute what it is paid, and would not be told so."""
    scoring, path = {"visibility": "coordinator"}, tmp_path / "copy.jsonl"
    run = settled(tmp_path / "home", rounds=1, scoring=scoring).run()
    with Ledger(run.folder / "ledger.sqlite", read_only=True) as ledger:
        path.write_bytes(b"".join(exported(ledger, sees(LIAR))))
        assert list(verify_copy(path, member=LIAR))
        path.write_bytes(b"".join(exported(ledger, lambda one: one.kind != "statement" and sees(LIAR)(one))))
    with pytest.raises(LedgerError, match=rf"statement by {LIAR}\): withheld from its own author"):
        list(verify_copy(path, member=LIAR))


@pytest.mark.parametrize("shown", ["last", "open"])
def test_who_signed_the_last_round_or_saw_the_pool_takes_part_in_no_later_round(tmp_path, shown):
    """Also if it sent keys and shares ahead."""
    federation = settled(tmp_path, ledger=False)
    with federation.trained(1):
        if shown == "last":
            assert federation.ask(LIAR, Ask("last", federation.run_id, 1, {}, {}))
        else:
            one = federation.clearing()
            opening = Ask.unpack(one._opening_ask(one._made(), {}))[0]
            assert federation.ask(LIAR, replace(opening, round=3))  # as if this had been the last round
        federation.round(2)
        assert federation.refusals(LIAR) == ["train"]
        assert LIAR not in federation.rounds[1].included


# ----------------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(("slope", "why"), [(0.0, "no-gain"), (np.nan, "not-finite")])
def test_a_utility_without_a_finite_gradient_that_is_not_zero_cannot_be_settled(tmp_path, slope, why):
    federation = settled(tmp_path)
    federation.slope = lambda model, shown, places: (0.5, np.full(12, slope))
    federation.run()
    assert federation.coordinator.settled is None
    assert book(federation).why == why


def test_where_no_round_has_a_sum_nothing_is_settled(tmp_path):
    lost = [(f"client-{i}", 1, "masked") for i in range(3)]
    federation = settled(tmp_path, rounds=1, lost=lost).run()
    assert federation.coordinator.settled is None
    assert (book(federation).why, records(federation, "opening")) == ("no-rounds", [])


@pytest.mark.parametrize("members", [3, 9, 1024])
@pytest.mark.parametrize("coordinates", [1, 12, 10_007])
def test_no_update_within_the_bound_has_a_product_beyond_what_masks_prove(members, coordinates):
    """Whatever the others send, also if it makes the sum nearly zero."""
    rng, encoding = np.random.default_rng(coordinates), Encoding(coordinates, members, 4.0)
    u = rng.normal(size=coordinates) ** 3
    g = integers(u, scale_of([float(np.abs(u).sum())]), encoding)
    worst = encoding.encode(np.where(g > 0, 4.0, -4.0), seed=0)
    assert 2**61 / members < product(worst, g) <= largest_stated(members)


def test_scores_that_would_not_add_up_to_the_gain_are_not_settled(tmp_path, monkeypatch):
    real = clearing.integers
    monkeypatch.setattr(clearing, "integers", lambda *given: (real(*given) * 0.98).astype(np.int32))
    federation = settled(tmp_path / "honest").run()
    assert (federation.coordinator.settled, book(federation).why) == (None, "off-gain")
    assert not records(federation, "opening")

    class Careless(Manifest):
        off_gain = False

    monkeypatch.setattr(clearing, "Manifest", Careless)
    federation = settled(tmp_path / "careless").run()
    assert federation.coordinator.settled is None
    assert not records(federation, "agreed")  # members refuse the manifest before they look at a direction


def test_products_are_exact():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 200_003, dtype=np.uint32)
    g = rng.integers(-(2**31), 2**31, 200_003).astype(np.int32)
    own = sum(int(a) * int(b) for a, b in zip(words.view(np.int32).tolist(), g.tolist(), strict=True))
    assert product(words, g) == own


def test_a_run_of_more_than_nine_rounds_is_settled_like_a_short_one_and_statements_are_small(tmp_path):
    federation = settled(tmp_path, members=3, rounds=10, naming=True).run()
    found = federation.coordinator.settled
    assert list(found.statements) == list(federation.config.clients)
    assert all(list(one.rounds) == [str(k) for k in range(1, 11)] for one in found.statements.values())
    assert all(len(canonical(record.body)) <= 4096 for record in records(federation, "statement"))
    assert found.final
    assert "rounds: 10 of 10, 0 aborted" in federation.verified()


def test_a_statement_is_read_as_it_was_written(once_settled):
    federation = once_settled
    manifest = federation.coordinator.settled.manifest
    body = records(federation, "statement")[0].body
    again = Statement.from_body("client-0", body, manifest)
    assert again.body(federation.run_id) == body
    with pytest.raises(MessageError):
        Statement.from_body("client-9", body, manifest)


# ------------------------------------------------------------------------------------ the window, the archive


def signing(federation, patch, name=LIAR):
    """Let a member countersign whatever it is shown, as a friend of the server does."""
    real = Settler._settle

    def settle(settler, ask):
        if settler.name != name:
            return real(settler, ask)
        told = json.loads(ask.body.settled)
        return settler.member.sign("countersigned", countersignature(settler.run, told))

    patch.setattr(Settler, "_settle", settle)


def test_the_window_closes_once_and_late_statements_come_before(tmp_path, monkeypatch):
    federation = settled(tmp_path, settlement={"window_days": 2})
    kept = federation.losing("state")
    with federation.over() as new:
        closes = federation.coordinator.settled.closes
        with refused(SettlementError, code="open"):
            new().close(closes - 1)
        with refused(SettlementError, code="uncountersigned"):
            new().close(closes)  # as the server's clock says, and nobody else's
        found = federation.close(monkeypatch)
        assert found.missing == (LIAR,)
        assert found.final
        with refused(SettlementError, code="closed"):
            new().late(LIAR, ("state", 3, kept["state"]))
    assert book(federation).account.final
    assert any(line.code == "settlement-rest" for line in federation.verified())


def test_a_friend_who_never_states_pays_for_a_lie(tmp_path, monkeypatch, honest):
    """What one of two takes too much is missing where the other one is silent; nobody else loses anything."""
    federation = settled(tmp_path, settlement={"window_days": 0})
    federation.stating(10**6, key="2")
    federation.losing("state", who="client-3")
    signing(federation, monkeypatch)
    with federation.over():
        found = federation.close(monkeypatch)
    got, due = (one.totals(federation.names).values for one in (found, honest()))
    assert got[[0, 2]].tolist() == due[[0, 2]].tolist()
    assert got[1] - due[1] == pytest.approx(10**6 * found.manifest.scale)
    assert got.sum() == pytest.approx(due.sum())


@pytest.mark.parametrize("rule", ["fenced", "fair"])
@pytest.mark.parametrize("forged", [0.003, 0.03])
def test_parts_shifted_between_blocks_change_no_other_error_and_no_share(tmp_path, rule, forged):
    """Whoever states them is not known, but only its own error is false; shares by score stay."""

    def paid(home, more):
        federation = settled(home).shifting(more).run()
        assert federation.coordinator.settled.odd_parts == ({2: ()} if more else {})
        said = [line for line in verify_folder(federation.folder) if line.code == "settlement-parts"]
        assert [line.values for line in said] == [{"round": 2, "clients": federation.names}] * bool(more)
        total = accounts(federation)[-1].scores()
        assert ("false-parts" in map(code_of, total.notes)) == bool(more)
        errors.append(dict(zip(total.clients, total.stderr.tolist(), strict=True)))
        terms = Terms("1000.00", federation.config.scoring.utilities[0], rule=rule, score="PHI")
        return record_decision(federation.folder, terms)[0].shares

    errors = []
    honest, lied = paid(tmp_path / "honest", 0.0), paid(tmp_path / "lied", forged)
    assert dict(honest) == dict(lied)
    assert [name for name in errors[0] if errors[0][name] != errors[1][name]] == [LIAR]


def twice(body, key):
    """State twice the number, and parts of blocks that agree with it: masks prove the number."""
    body["rounds"][key] = str(2 * int(body["rounds"][key]))
    body["blocks"][key] = [f"{2 * float(part):.7g}" for part in body["blocks"][key]]


def larger(body, key):
    one, *others = map(float, body["blocks"][key])
    body["blocks"][key] = [f"{part:.7g}" for part in (one + 0.03, *others)]


def huge(body, key):
    body["blocks"][key] = [f"{float(part) * 1e8:.7g}" for part in body["blocks"][key]]


def none(body, key):
    body["blocks"][key] = ["0"] * len(body["blocks"][key])


@pytest.mark.parametrize(
    ("forge", "naming"),
    [
        *((forge, True) for forge in (twice, larger, huge, none)),
        (larger, False),
        (huge, False),
        (none, False),
    ],
)
def test_who_states_parts_that_contradict_its_number_spoils_nobodys_errors(tmp_path, honest, forge, naming):
    """Masks prove its parts; without them, what the others leave in each block counts, which is the same."""
    federation = settled(tmp_path, naming=naming)
    true = honest()
    federation.stating(lambda body: forge(body, "2"))
    federation.run()
    found = federation.coordinator.settled
    got, due = (one.totals(federation.names) for one in (found, true))
    assert got.values.tolist() == due.values.tolist()
    for stderr in (got.stderr, accounts(federation)[-1].scores().stderr):
        assert stderr is not None
        assert stderr == pytest.approx(due.stderr, rel=1e-3)
    assert found.odd_parts == ({} if naming else {2: (LIAR,)})
    assert found.liars == ((LIAR,) if naming else ())
    codes = {"settlement-named", "settlement-parts-false"}
    lines = [one for one in verify_folder(federation.folder) if one.code in codes]
    assert {one.code for one in lines} == {"settlement-named" if naming else "settlement-parts-false"}
    for one in lines:
        assert one.values.get("client", LIAR) == LIAR
        assert one.values.get("clients", (LIAR,)) == (LIAR,)


@pytest.mark.parametrize("scale", [1, 1e-6])
def test_honest_parts_of_blocks_add_up_within_their_rounding(tmp_path, scale):
    federation = settled(tmp_path, ledger=False).run()
    found = federation.coordinator.settled
    assert found.odd_parts == {}
    off = {
        key: tuple(part + 1e-2 * scale for part in parts)
        for key, parts in found.statements[LIAR].blocks.items()
    }
    moved = replace(found, statements=found.statements | {LIAR: replace(found.statements[LIAR], blocks=off)})
    assert len(moved.odd_parts) == (0 if scale < 1 else len(found.equations))


def test_the_opened_pool_is_hashed_when_it_comes_and_not_for_every_round(tmp_path, monkeypatch):
    real, calls = pool.slice_id, []
    monkeypatch.setattr(pool, "slice_id", lambda x, y: calls.append(len(y)) or real(x, y))
    counts = []
    for rounds in (1, 3):
        calls.clear()
        settled(tmp_path / str(rounds), rounds=rounds, ledger=False).run()
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(("days", "away"), [(2, True), (40, True), (2, False)])
def test_a_member_keeps_its_updates_for_the_window(tmp_path, monkeypatch, days, away):
    """Also when it has signed that the settlement is over: nobody else may have been told so."""
    federation = settled(tmp_path, files=True, settlement={"window_days": days})
    federation.reaches = lambda name, ask: (
        not away or name != LIAR or ask.exchange not in (*SETTLING, "close")
    )
    federation.run()
    assert federation.coordinator.settled.missing == ((LIAR,) if away else ())
    began, day = time.time(), 86_400
    for later, kept in ((days + 6.9, True), (days + 7.1, False)):
        monkeypatch.setattr(time, "time", lambda later=later: began + later * day)
        another = federation.member(LIAR).state(("f" if kept else "e") * 32)
        another.open()  # the invitation to another run lets it tidy up
        another.save()
        state = federation.member(LIAR).state(federation.run_id)
        for value in (UPDATE, CLIENT):
            assert (state.get(value.of(1)) is not None) == kept
        assert (state.get(POOL) is not None) == (kept and not away)


def geometry(noise, *, coordinates=100_000, members=9, cosine=0.0016):
    """A direction, everybody's update, and its scale; the last member adds noise of so many rms to its own.

    The updates of a CNN have such a small cosine with the direction.
    """
    rng = np.random.default_rng(1)
    u = rng.normal(size=coordinates) * rng.exponential(size=coordinates)
    ahead = u / np.linalg.norm(u)
    updates = rng.normal(size=(members, coordinates))
    updates += np.outer(cosine * np.sqrt(coordinates) - updates @ ahead, ahead)
    own = np.rint(updates * 2**18)
    own[-1] += np.rint(
        noise * 2**18 * (more := rng.normal(size=coordinates)) - 2**18 * noise * (more @ ahead) * ahead
    )
    words = own.sum(axis=0)
    return u, own, words, scale_of([float(np.abs(u).sum())])


@pytest.mark.parametrize(
    ("share", "good"), [(0, True), (3e-7, True), (5e-6, True), (2e-5, False), (1e-3, False)]
)
def test_two_machines_agree_on_a_direction_within_one_tolerance(share, good):
    u, *_, scale = geometry(0)
    encoding, rng = Encoding(u.size, 9, 4.0), np.random.default_rng(2)
    e = rng.normal(size=u.size) * np.linalg.norm(u) / np.sqrt(u.size)
    assert (differs(integers(u + share * e, scale, encoding), u, scale, encoding) == "") == good


@pytest.mark.parametrize(("noise", "most"), [(0, 0.001), (3, 0.003), (20, 0.015)])
def test_a_direction_tilted_towards_a_noisy_friend_moves_hardly_any_of_the_gain(noise, most):
    u, own, words, scale = geometry(noise)
    encoding = Encoding(u.size, 9, 4.0)
    friend = own[-1] / np.linalg.norm(own[-1]) * np.linalg.norm(u)
    true, best = integers(u, scale, encoding), 0.0
    for tilt in np.geomspace(1e-7, 1e-2, 60):
        g = integers(u + tilt * friend, scale, encoding)
        if not differs(g, u, scale, encoding):
            best = max(best, float(own[-1] @ (g - true.astype(float))) / float(words @ true))
    assert 0 < best < most


@pytest.mark.parametrize("noise", [0, 60])
def test_noise_of_one_member_leaves_directions_fine(noise):
    """3.2 million parameters: all but 1 % of the coordinates were 0 on a scale for 47 bits."""
    u, own, words, scale = geometry(noise, coordinates=3_200_000, members=3)
    g = integers(u, scale, Encoding(u.size, 3, 4.0))
    assert np.sqrt(np.mean(np.square(g, dtype=float))) > 1000
    assert scale * (own[0] @ g) == pytest.approx(own[0] @ u, rel=1e-3)
    assert abs(scale * (words @ g) - words @ u) < 5e-3 * abs(words @ u)


@pytest.mark.parametrize("given", [{}, {"lost": (("client-3", 2, "masked"),)}, {"masks": False}])
def test_the_archive_proves_the_settlement_again(tmp_path, honest, given):
    naming = given.get("masks", True)
    federation = settled(tmp_path, naming=naming, **given)
    if naming:
        federation.stating(-7, key="2")
    federation.run()
    lines = list(
        verify_folder(federation.folder, archive=federation.folder / "archive", gradient=federation.gradient)
    )
    codes = [line.code for line in lines]
    assert {"archive", "archive-gradient"} <= set(codes)
    assert codes.count("archive-verdict") == int(naming)
    found, due = book(federation).account, honest(**given)
    names = federation.names
    assert found.totals(names).values.tolist() == due.totals(names).values.tolist()


def another(kind, what, number):
    """Let the first number of one of its arrays be another."""

    def change(archive):
        arrays = dict(archive.load(kind, number))
        arrays[what] = arrays[what].copy()
        arrays[what][0] += 1
        archive.save(kind, number, arrays)

    return change


def without_m0(archive):
    archive.save("round", 1, {key: value for key, value in archive.load("round", 1).items() if key != "m0"})


def damaged(archive):
    file = archive.path / "round-0002.arrays"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (another("round", "x", 1), FedmeritError),
        (another("direction", "g", 1), FedmeritError),
        (another("pool", "y", 0), FedmeritError),
        (another("round", "m0", 1), FedmeritError),
        (without_m0, StoreError),
        (damaged, StoreError),
    ],
)
def test_another_archive_is_refused(copied, change, kind):
    archive = FolderArchive(copied / "archive")
    change(archive)
    with pytest.raises(kind):
        list(verify_folder(copied, archive=archive.path))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("product", "the product of sum"),
        ("gradient", "from the gradient"),
        ("pool", "its pool is not the one"),
    ],
)
def test_what_only_the_server_and_its_friends_saw_is_recomputed(once_settled, what, says):
    """As if all members had agreed to them: the archive alone says that they are false."""
    federation = once_settled
    found, slopes = book(federation), federation.gradient
    if what == "product":
        first, *others = found.manifest.rounds
        first = replace(first, product=first.product + 1)
        found.manifest = replace(found.manifest, rounds=(first, *others))
    elif what == "pool":
        found.manifest = replace(found.manifest, pool="0" * 64)

    def gradient(*path):
        own = slopes(*path)
        return replace(own, blocks=own.blocks + 1) if what == "gradient" else own

    archive = FolderArchive(federation.folder / "archive")
    given = (archive, replace(run_in(federation.folder), settlement=found), gradient)
    with pytest.raises(LedgerError, match=says):
        list(check_archive(*given))


HEADER = b'{"x":{"dtype":"F4","shape":[9],"data_offsets":[0,36]}}'
OTHER = (
    b"",
    b"no arrays at all",
    len(HEADER).to_bytes(8, "little") + HEADER + bytes(36),
    (2**62).to_bytes(8, "little") + b"{}",
    *(np.zeros(shape, kind) for shape in (0, 1, (2, 3)) for kind in ("u1", "f8")),
)


@pytest.mark.parametrize("other", OTHER)
def test_an_archive_of_other_arrays_with_a_right_checksum_is_refused(copied, other):
    for name in ("direction-0001", "pool-0000", "round-0002"):
        file = copied / "archive" / f"{name}.arrays"
        whole = file.read_bytes()
        data = other
        if not isinstance(other, bytes):
            data = numpy.save(dict.fromkeys(numpy.load(whole[32:]) if len(other) else (), other))
        file.write_bytes(hashlib.sha256(data).digest() + data)
        with pytest.raises(FedmeritError):
            list(verify_folder(copied, archive=file.parent))
        file.write_bytes(whole)
