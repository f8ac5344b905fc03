"""Payouts on record: recomputed to the cent, replaced in the open, and private where the run says so."""

import json
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import UNSET
from typer.testing import CliRunner

from fedmerit.cli import app
from fedmerit.errors import ConfigError, KeyFileError, LedgerError, StoreError
from fedmerit.identity import exact, number
from fedmerit.ledger import decisions, kinds
from fedmerit.ledger.chain import Copy
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.rounds import own_total, running, sees, totals
from fedmerit.report.payment import absence_cost
from fedmerit.report.statement import as_dict, as_markdown, write_statements
from fedmerit.report.statement import facts_as_decided as of_decision
from fedmerit.scoring.amounts import division, payouts
from fedmerit.scoring.types import Scores
from fedmerit.settings import Corruption
from fedmerit.simulation.run import run
from fedmerit.verify import verify_copy, verify_folder
from ledgers import written_anew
from raising import raises
from refusals import found_wrong
from runs import copied, facts_as_decided, read_run, record_decision, records_of, rounds_in, rounds_of, run_in
from tiny import losing, tiny

OVERRIDES = ("training.rounds=3", "participation.away={client-1 = [2]}")
OPEN = tiny(*OVERRIDES)
CLOSED = tiny(*OVERRIDES, "scoring.visibility=coordinator")
PAID = "expected-accuracy"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three rounds of four members, one away, one silent; everybody sees all, or the coordinator alone."""
    home = tmp_path_factory.mktemp("runs")
    with losing({"client-3": "3:report"}):
        run(OPEN, home / "open")
        run(CLOSED, home / "closed")
    return home


def lines(path, **options):
    return list((verify_copy if path.suffix else verify_folder)(path, **options))


def copy_for(folder, member=None):
    return copied(folder, folder.parent / f"{member}.jsonl", *([member] if member else ()))


def as_server(folder, change):
    """The ledger anew, by a server that changes its own records."""
    written_anew(folder, lambda record, body: change(record.kind, body))


# --------------------------------------------------------------------------------------------- on record


def test_a_decision_is_recorded_once_and_a_second_says_which_it_replaces(folder):
    first, new = record_decision(folder, Terms("1000.00", PAID))
    assert (first.number, first.replaces, new) == (1, None, True)
    again, new = record_decision(folder, Terms("1000.00", PAID))
    assert (again.number, again.record, new) == (1, first.record, False)
    second, new = record_decision(folder, Terms("999.99", PAID, rule="fenced"))
    assert (second.number, second.replaces, new) == (2, 1, True)
    told = [line for line in lines(folder) if line.startswith("payouts")]
    assert len(told) == 2
    assert "decision 2" in told[1]
    assert "in place of decision 1" in told[1]
    _, found, _ = read_run(folder)
    budgets = [sum(one.paid.values()) + one.paid.unpaid for one in found]
    assert budgets == [Decimal("1000.00"), Decimal("999.99")]


def test_a_decision_that_falls_between_two_rounds_leaves_the_run_in_order(tmp_path, monkeypatch):
    from fedmerit.simulation.run import Rehearsal

    real = Rehearsal.round
    monkeypatch.setattr(Rehearsal, "round", lambda self, n: real(self, n) if n < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(OPEN, tmp_path / "run")
    monkeypatch.undo()
    record_decision(tmp_path / "run", Terms("10.00", PAID))
    run(OPEN, tmp_path / "run", resume=True)
    record_decision(tmp_path / "run", Terms("10.00", PAID))
    _, found, _ = read_run(tmp_path / "run")
    assert [one.rounds for one in found] == [2, 3]
    assert lines(tmp_path / "run")


def test_only_who_holds_the_servers_key_decides_and_only_on_a_run_that_verifies(folder):
    key = folder / "keys" / "server.pem"
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(StoreError, match="only the holder of the server's key can record a decision"):
        record_decision(folder, Terms("10.00", PAID))
    key.write_bytes((folder / "keys" / "client-0.pem").read_bytes())
    key.chmod(0o600)
    with pytest.raises(KeyFileError, match="not the server's"):
        record_decision(folder, Terms("10.00", PAID))
    key.write_bytes(kept)
    text = (folder / "scores.json").read_text()
    (folder / "scores.json").write_text(text.replace("0.", "0.1", 1))
    with pytest.raises(LedgerError, match=r"scores\.json"):
        record_decision(folder, Terms("10.00", PAID))


def put(**values):
    return lambda body: body.update(values)


def inside(*path, **values):

    def edit(body):
        for key in path:
            body = body[key]
        body.update(values)

    return edit


def one_cent_to_a_friend(body):
    body["cents"]["client-0"] += 1
    body["cents"]["client-2"] -= 1


def a_share_to_a_friend(body):
    body["shares"]["client-0"] = exact(number(body["shares"]["client-0"]) * (1 + 1e-9))


def another_spelling(body):
    name = next(name for name, share in body["shares"].items() if not share.startswith("0x0"))
    body["shares"][name] = f" {body['shares'][name]}"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (one_cent_to_a_friend, r"cents.client-0: states \d+, the reports give \d+"),
        (a_share_to_a_friend, "share.client-0: states"),
        (put(budget="2000.00"), "cents.client-0"),
        (put(budget="1000.001"), "at most 2 decimals"),
        *((put(budget=spelled), "budget: expected 1000.00") for spelled in ("01000.00", "1000", "1000.0")),
        *((put(budget=spelled), r"at `\$\.budget`") for spelled in (1000, True)),
        (put(currency="euro"), "currency: expected"),
        (another_spelling, "expected a number as it is recorded"),
        (put(rule="equal", departures=["rule"]), "share.client-0"),
        (put(rule="generous"), r"at `\$\.rule`"),
        (put(despite_doubts=1), r"at `\$\.despite_doubts`"),
        (put(after=1), "unknown field `after`"),
        (put(missing="own-mean", departures=["missing"]), "share.client"),
        (put(score="LOO", departures=["score"]), "share.client"),
        (put(utility="accuracy"), "share.client|the positive part of ALPHA"),
        (put(utility="fame"), "not a record of its kind: KeyError"),
        (put(decision=2), "expected decision 1"),
        (put(replaces=1), "expected decision 1, which replaces None"),
        (put(rounds=2), "rests on 2 rounds, but 3 were closed before it"),
        (put(unpaid=1), "unpaid amount is not the rest"),
        (put(shares={}), "share.client-0: missing"),
        (put(cents=None), r"at `\$\.cents`"),
        (put(cap="x"), "expected a number in hexadecimal"),
        (inside("fence", rest=exact(0.5)), "fence.rest: states .*, the reports give"),
        (inside("fence", fence=exact(0.9)), "fence.fence: states"),
        (inside("fence", more=exact(0.9)), "unknown field `more`"),
        (lambda body: body.pop("fence"), "fence.fence: missing"),
        (put(fence=3), r"at `\$\.fence`"),
    ],
)
def test_a_decision_that_does_not_follow_is_named(folder, edit, message):
    """Even where the server itself signs it."""
    made, _ = record_decision(folder, Terms("1000.00", PAID))
    as_server(folder, lambda kind, body: edit(body) if kind == "decision" else None)
    caught = found_wrong(message, lines, folder)
    assert str(caught).startswith(f"record {made.record} (decision by server): ")


# -------------------------------------------------------------------------------------------- statements


def facts_of(folder, **terms):
    record_decision(folder, Terms("1000.00", PAID, **terms))
    return facts_as_decided(folder)


def test_a_statement_says_what_one_did_earns_and_missed_and_how_sure_that_is(folder):
    facts = facts_of(folder)
    assert write_statements(run_in(folder)) == 4
    read = {name: json.loads((folder / "statements" / f"{name}.json").read_text()) for name in OPEN.clients}
    assert read == {name: json.loads(json.dumps(as_dict(facts, name))) for name in OPEN.clients}
    assert sum(statement["cents"] for statement in read.values()) == 100_000
    assert (folder / "statements" / "client-0.md").read_text().startswith("# Statement for client-0\n")
    for name, told in read.items():
        low, high = told["share_interval"]
        assert low <= told["share"] <= high
        assert told["cents_interval"][0] <= told["cents"] <= told["cents_interval"][1]
        for code, word in (("less", "more"), ("more", "less")):
            others = told["indistinguishable_but_paid"][code]
            assert set(others) <= set(told["cannot_be_told_apart_from"])
            assert (f"You are paid {word} than" in as_markdown(facts, name)) == bool(others)
    assert any(told["indistinguishable_but_paid"]["less"] for told in read.values())
    text, told = as_markdown(facts, "client-1"), read["client-1"]
    rounds = {code: numbers for code, numbers in told["rounds"].items() if numbers}
    assert rounds == {"counted": [1, 3], "away": [2]}
    assert "In 2 of 3 rounds your update was in the sum and your report counted." in text
    assert "Round 2: you were not on the list of participants." in text
    assert f"**{told['cents'] // 100}.{told['cents'] % 100:02d}\xa0EUR** of 1,000.00" in text
    assert "This is an estimate" in text
    assert told["head"] in text
    assert told["head"] == read_run(folder)[2]
    silent = as_markdown(facts, "client-3")
    assert "Round 3: your update was in the sum, but your report did not arrive in time." in silent
    whole = as_markdown(facts, "client-0")
    assert "Nothing: you have a report for every round that was counted." in whole


def test_what_absence_cost_is_the_same_decision_with_that_members_rounds_at_its_own_mean(folder):
    facts = facts_of(folder)
    cost, decision = absence_cost(facts, "client-1"), facts.decision
    rounds, _, _ = read_run(folder)
    own = [reports.alone[k] + reports.grand - reports.without[k] - reports.empty
           for reports in (found.to_reports(PAID) for found in rounds) if "client-1" in reports.clients
           for k in [reports.clients.index("client-1")]]  # fmt: skip
    assert cost.score == pytest.approx(sum(own) / 2)
    assert cost.other == pytest.approx(sum(own) / 2 * 3 / 2)
    raw = dict(zip(decision.total.clients, decision.total.raw, strict=True)) | {"client-1": cost.other}
    positive = {name: max(value, 0) for name, value in raw.items()}
    again = payouts({name: value / sum(positive.values()) for name, value in positive.items()}, "1000.00")
    assert abs(cost.other_cents - int(again["client-1"] * 100)) <= 1  # a rounding of the shares
    assert cost.other_cents > cost.cents == int(decision.paid["client-1"] * 100)
    facts = facts_of(folder, missing="own-mean")
    compared = absence_cost(facts, "client-1")
    assert (compared.score, compared.other) == pytest.approx((cost.other, cost.score))
    assert "Counted as zero, your contribution would be" in as_markdown(facts, "client-1")


def test_who_never_reported_is_told_so_and_earns_nothing(tmp_path):
    config = tiny("participation.away={client-1 = [1, 2]}")
    run(config, tmp_path / "run")
    facts = facts_of(tmp_path / "run")
    text = as_markdown(facts, "client-1")
    assert as_dict(facts, "client-1")["cents"] == 0
    assert "**0.00\xa0EUR** of 1,000.00\xa0EUR: you never reported." in text
    assert "You have no report in any round" in text
    assert "No standard errors" not in text
    assert as_dict(facts, "client-1")["contribution"] is None
    equal = as_markdown(facts_of(tmp_path / "run", rule="equal"), "client-1")
    assert "Every member who ever reported gets the same share" in equal


def test_a_decision_before_the_end_says_after_which_round(tmp_path):
    folder, config = tmp_path / "run", tiny("training.rounds=3", "scoring.visibility=coordinator")

    def stop(step):
        if (step.stage, step.round) == ("round", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, folder, watch=stop)
    result = CliRunner().invoke(app, ["rewards", str(folder), "--budget", "10", "--rule", "equal"])
    said = "WARNING: the run is not over: this pays for 1 of 3 rounds; a later decision can replace it"
    assert said in result.output
    text = (folder / "statements" / "client-1.md").read_text()
    assert "Decision 1, after 1 of 3 rounds (the run was not over), with 4 members." in text
    run(config, folder, resume=True)
    assert any("in place of" not in line and "after round 1 of 3" in line for line in lines(folder))
    (mine,) = [line for line in lines(copy_for(folder, "client-1"), member="client-1") if "payouts" in line]
    assert "decision 1, after round 1 of 3: 2.50 for client-1" in mine
    result = CliRunner().invoke(app, ["rewards", str(folder), "--budget", "10", "--rule", "equal"])
    assert result.output.count("WARNING") == 1  # the departure
    paid = [line for line in lines(folder) if line.startswith("payouts")]
    assert ["after round" in line for line in paid] == [True, False]


def test_where_only_the_coordinator_sees_all_a_statement_names_nobody_else(closed):
    decision, _ = record_decision(closed, Terms("1000.00", PAID))
    found = run_in(closed)
    faulty = replace(CLOSED, corruption=Corruption(label_flip=CLOSED.clients[:2]))
    for config in (CLOSED, faulty):
        facts = of_decision(replace(found, config=config), decision)
        for member in CLOSED.clients:
            said = as_markdown(facts, member) + json.dumps(as_dict(facts, member))
            assert not any(name in said for name in CLOSED.clients if name != member)


# ------------------------------------------------------------------------- only the coordinator sees all


def times(name, factor):
    return lambda body: body["fence"].update({name: exact(factor * number(body["fence"][name]))})


@pytest.mark.parametrize("rule", ["fair", "fenced", "impartial", "equal"])
def test_a_member_recomputes_its_own_scores_and_cents_from_its_own_copy(closed, rule):
    made, _ = record_decision(closed, Terms("1000.01", PAID, rule=rule))
    whole = lines(closed)
    assert any("decision 1" in line for line in whole)
    for member in CLOSED.clients:
        told = lines(copy_for(closed, member), member=member)
        amount = f"{made.paid[member]:,} for {member}"
        assert f"scores: {member}'s follow from its own reports; nobody else's were recomputed" in told
        (line,) = [line for line in told if line.startswith("payouts")]
        assert amount in line
        assert "share and cents follow" in line
        assert told[-1] == whole[-1]  # the head is that of the whole ledger


def test_a_copy_holds_nothing_of_others_but_their_hashes(closed):
    record_decision(closed, Terms("1000.00", PAID))
    whole = records_of(closed)
    text = copy_for(closed, "client-1").read_text()
    secret, own = [], []
    for record in whole:
        about = record.author if record.kind == "report" else record.body.get("member")
        if record.kind not in ("report", "score", "payout"):
            continue
        values = [record.body["salt"]]
        if record.kind == "report":  # of the paid utility: of the others, two members may have the same
            measured = record.body["measured"][PAID]  # v(M0) and v(M) everybody knows
            values += measured["sketch"]
            values += [value for value in measured.values() if isinstance(value, str)]
            values = [value for value in values if value not in (measured["empty"], measured["grand"])]
        values += [record.body["cosine"]] if record.kind == "report" else []
        (own if about == "client-1" else secret).extend(values)
    assert len(secret) > 50
    assert not [value for value in secret if f'"{value}"' in text and value not in own]
    assert all(f'"{value}"' in text for value in own)


def test_salts_are_fresh_so_that_equal_bodies_have_different_hashes(closed):
    salts = [record.body["salt"] for record in records_of(closed) if "salt" in record.body]
    assert len(set(salts)) == len(salts) > 20
    assert all(len(bytes.fromhex(salt)) == 16 for salt in salts)


def test_a_copy_and_the_ledger_have_the_same_digests_signatures_and_seals(closed):
    whole = records_of(closed)
    for member in (None, "client-0", "client-3"):
        copy = list(Copy(copy_for(closed, member)).records())
        for one, other in zip(whole, copy, strict=True):
            assert (one.digest, one.signature, one.seal) == (other.digest, other.signature, other.seal)
            assert one.content == other.content


def test_totals_are_those_of_the_reports(closed):
    rounds = rounds_in(closed)
    told = totals(rounds[-1], running(rounds, CLOSED))[PAID]
    reports = rounds[-1].to_reports(PAID)
    alphas = (reports.alone - reports.empty + reports.grand - reports.without) / 2
    facts = told["round"]
    assert facts["n"] == 3
    assert number(facts["gain"]) == reports.gain
    assert number(facts["grand"]) == reports.grand
    assert number(facts["alpha"]) == pytest.approx(alphas.sum(), abs=1e-15)
    assert number(facts["alpha_plus"]) == pytest.approx(alphas.clip(0).sum(), abs=1e-15)
    said = (reports.grand - reports.alone) + (reports.without - reports.empty)  # r_j: its sum is T
    assert number(facts["t"]) == pytest.approx(said.sum(), abs=1e-14)
    assert told["summed"]["n"] == 4


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("score", inside("cumulative_alpha", **{PAID: exact(0.5)}), r"score by server\): cumulative"),
        ("score", put(member="client-0"), "score"),
        ("totals", inside("utilities", PAID, "summed", alpha_plus=exact(9.0)), "totals by server"),
        ("payout", lambda b: b.update(cents=b["cents"] + 1), "cents.client-"),
        ("payout", put(member="client-0"), "second one for its member|share of"),
        ("decision", inside("totals", positive=exact(9.0)), r"decision by server\): totals.positive"),
        ("decision", lambda b: b["totals"]["division"].__setitem__(1, 7), r"totals.division"),
    ],
)
def test_the_coordinator_cannot_state_what_does_not_follow(closed, kind, edit, message):
    record_decision(closed, Terms("1000.00", PAID))

    def change(at, body):
        if at == kind and body.get("round", 3) == 3:  # rounds before it are signed by members
            edit(body)

    as_server(closed, change)
    found_wrong(message, lines, closed)


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("score", inside("cumulative_alpha", **{PAID: exact(0.5)}), "cumulative alpha of client-2"),
        ("payout", lambda b: b.update(cents=b["cents"] - 1), "cents of client-2: states"),
        ("payout", put(share=exact(0.01)), "share of client-2: states"),
        ("decision", inside("totals", positive=exact(9.0)), "totals.positive: not the alpha_plus"),
        ("decision", inside("totals", n=3), "a payout for each of|totals.n"),
        ("decision", put(budget="2000.00"), "cents of client-2: states"),
        ("decision", lambda b: b["totals"]["division"].__setitem__(3, 0), "not a record of its kind"),
        ("totals", inside("utilities", PAID, "round", n=4), "expected-accuracy.n: states 4"),
        ("totals", inside("utilities", PAID, "round", t=exact(4.0)), "not 2 .N gain"),
        # with a doubled sum, say, a server could halve all shares and give the rest to a friend
        ("decision", times("positive", 2), "fence.positive: states .* the totals give"),
        ("decision", times("fence", 0.5), "fence.fence: states"),
        ("decision", times("counted", 2), "fence: expected a positive sum"),
        ("decision", lambda b: b.pop("fence"), "fence: missing"),
    ],
)
def test_a_member_finds_out_from_its_copy_when_its_own_part_does_not_follow(closed, kind, edit, message):
    record_decision(closed, Terms("1000.00", PAID))

    def change(at, body):
        mine = body.get("member", "client-2") == "client-2"
        if at == kind and mine and body.get("round", 3) == 3:
            edit(body)

    as_server(closed, change)
    found_wrong(message, lines, copy_for(closed, "client-2"), member="client-2")


def test_payouts_without_their_decision_are_refused(closed):
    record_decision(closed, Terms("1000.00", PAID))
    written_anew(closed, lambda record, body: None, times=lambda record: record.kind != "decision")
    found_wrong("follows no decision", lines, closed)


@pytest.mark.parametrize("rule", ["fair", "fenced"])
@pytest.mark.parametrize("raw", [[1.0, 0.5, 3e-12], [1.0, 0.5, 1e-3, 1e-3 + 1.5e-10], [50.0, 1.0, 1e-11]])
@pytest.mark.parametrize("error", [None, 0.01])
def test_a_member_accepts_its_share_where_only_rounding_parts_its_score_from_another(rule, raw, error):
    names = tuple(f"m{k}" for k in range(len(raw)))
    stderr = None if error is None else [error] * len(raw)
    total = Scores(score="ALPHA", clients=names, values=raw, raw=raw, gain=1.0, stderr=stderr)
    terms = Terms("1.00", PAID, rule=rule)
    divided = terms.divide(total)
    fence = UNSET
    if divided.fence is not None:
        fence = kinds.FenceBody(**{key: exact(value) for key, value in divided.fence.as_dict().items()})
    body = SimpleNamespace(status="ok", totals=decisions.totals_in(total, divided, terms), fence=fence)
    for name, own in total.as_dict().items():
        (expected,) = decisions._own_shares(own, body, terms)
        near = decisions._rounding(own, body.totals)
        assert expected == pytest.approx(divided[name], rel=1e-9, abs=near)
        assert near <= 1e-9


def test_a_copy_that_withholds_what_its_reader_may_see_is_refused(closed):
    with pytest.raises(LedgerError, match=r"report by client-0\): withheld from its own author"):
        lines(copy_for(closed, "client-1"), member="client-0")
    found_wrong("'nobody' is not a member of the run", lines, copy_for(closed, "client-1"), member="nobody")
    path = closed.parent / "dark.jsonl"
    copied(closed, path, lambda record: record.kind not in ("report", "score"))
    found_wrong("say whose copy it is", lines, path)
    copied(closed, path, lambda record: record.kind != "round" and sees("client-1")(record))
    found_wrong(r"although every member may see it", lines, path, member="client-1")
    copied(closed, path, lambda record: record.kind != "score" and sees("client-1")(record))
    found_wrong("after round 1: expected the scores of client-1", lines, path, member="client-1")


def test_own_totals_are_those_of_everybody_in_both_ways_of_counting_absence(closed):
    from fedmerit.scoring.accumulate import accumulate

    rounds = rounds_in(closed)
    reports = [one.to_reports(PAID) for one in rounds]
    for member in CLOSED.clients:
        copy = rounds_of(Copy(copy_for(closed, member)))
        for missing in ("zero", "own-mean"):
            for score in ("ALPHA", "LOO", "IOI", "COS"):
                whole = accumulate(reports, score=score, missing=missing).as_dict()[member]
                assert own_total(member, copy, PAID, score=score, missing=missing) == whole


# ------------------------------------------------------------------------------------------ dividing alone

SHARES = st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(any)


@given(SHARES, st.integers(0, 10**7))
def test_a_share_and_the_division_give_the_same_cents_as_dividing_for_all(weights, cents):
    shares = {f"m{k}": weight / sum(weights) for k, weight in enumerate(weights)}
    budget = Decimal(cents) / 100
    paid, made = payouts(shares, budget), division(shares, budget)
    assert {name: made.cents_of(name, share) for name, share in shares.items()} == {
        name: int(amount * 100) for name, amount in paid.items()
    }
    assert sum(paid.values()) == budget


@given(SHARES, st.integers(1, 10**7))
def test_the_published_cut_has_the_fewest_digits_that_separate(weights, cents):
    """An exact remainder would tell somebody's share: cents are often invertible modulo the total."""
    assume(len(set(weights)) > 1)
    shares = {f"m{k}": weight / sum(weights) for k, weight in enumerate(weights)}
    made = division(shares, Decimal(cents) / 100)
    rests = set()
    for share in shares.values():
        top, bottom = share.as_integer_ratio()
        rests.add(Fraction(made.cents * top * (made.one // bottom) % made.total, made.total))
    for cut in (made.low, made.high):
        digits = cut.denominator.bit_length() - 1
        for coarser in range(digits):
            grid = [Fraction(k, 2**coarser) for k in range(2**coarser + 1)] if coarser < 12 else []
            between = [point for point in grid if all((r >= point) == (r >= cut) for r in rests)]
            assert not between


@pytest.mark.parametrize("setting", ["training.weights=scores", 'scoring.truth=["mr-shapley"]'])
def test_settings_that_tell_everybody_exclude_visibility_of_the_coordinator_alone(setting):
    with raises(ConfigError, setting="scoring.visibility"):
        tiny("scoring.visibility=coordinator", setting)
