"""Terms of payment: signed before the first round, followed or marked as a departure, told and approved."""

import json
import math
import shutil
from dataclasses import replace
from decimal import Decimal

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import command_line
from attacked import settling
from command_line import call
from fedmerit.config import from_dict
from fedmerit.errors import (
    ConfigError,
    FileFormatError,
    InputError,
    KeyFileError,
    LedgerError,
    StoreError,
    UndefinedShares,
)
from fedmerit.identity import SERVER, content, public_key
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms, departures_of
from fedmerit.notes import code_of
from fedmerit.report.page.html import facts_of, render
from fedmerit.scoring.amounts import decimals_of, payouts
from fedmerit.scoring.rewards import amounts_within, believed, null_share, share_intervals, shares, takes_part
from fedmerit.scoring.types import Scores
from fedmerit.storage.recorder import read_approval, record_approval, sign
from fedmerit.verify import verified_run, verify_copy, verify_folder
from linear_federation import Federation, write_key
from refusals import found_wrong
from runs import copied, folded, record_decision, records_of, sound
from tests.settlement.test_settled_runs import lying


def ran(*arguments):
    """Run a command; return whether it failed, its output, and its error."""
    found = command_line.call(*arguments)
    return int(found.exit_code != 0), found.stdout, str(found.exception or found.stderr)


def scored(raw, stderr=None, **extra):
    names = tuple(f"m{i}" for i in range(len(raw)))
    stderr = [stderr] * len(raw) if isinstance(stderr, float) else stderr
    made = {"score": "ALPHA", "clients": names, "values": raw, "raw": raw, "gain": 1.0, "stderr": stderr}
    return Scores(**made | extra)


# --------------------------------------------------------------------------------------- signed and departed


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    home = tmp_path_factory.mktemp("settled")
    return settling(home, sections={"payment": {"equal": 0.25, "cap": 0.5}}).run()


@pytest.fixture
def run(settled, tmp_path):
    """A copy of the run that may be paid."""
    shutil.copytree(settled.folder, tmp_path / "run")
    return tmp_path / "run"


def decision_in(folder):
    return [one for one in records_of(folder) if one.kind == "decision"][-1]


def test_terms_chosen_afterwards_are_a_departure_which_is_told_first(run):
    """Whoever chooses the rule when scores are known chooses who wins: the weakest would like "equal"."""
    honest = json.loads(ran("rewards", run, "--budget", "1000", "--format", "json")[1])
    body = decision_in(run).body
    assert (body["rule"], body["score"], body["departures"]) == ("fenced", "PHI", [])
    assert [float.fromhex(body[key]) for key in ("equal", "cap", "forfeit")] == [0.25, 0.5, 1.0]
    found = [*verify_folder(run)]
    assert "terms-kept" in [line.code for line in found]
    assert "terms-departed" not in [line.code for line in found]
    assert "DEPARTURE" not in render(facts_of(run))
    weakest = min(honest["shares"], key=honest["shares"].get)
    options = ("--rule", "equal", "--equal", "0", "--cap", "1")
    code, out, err = ran("rewards", run, "--budget", "1000", *options)
    assert code == 0, err
    assert out.startswith("WARNING: DEPARTURE")
    body = decision_in(run).body
    assert body["departures"] == ["rule", "equal", "cap"]
    assert float.fromhex(body["shares"][weakest]) > honest["shares"][weakest]
    found = [*verify_folder(run)]
    *_, first, second, _ = found  # the lines on this decision; then comes the head
    assert (first.code, first.values["departs"].code, second.code) == ("terms-departed", "departs", "payouts")
    html = render(facts_of(run))
    header = html[html.index("<header>") :]
    assert header.index("DEPARTURE") < header.index("<h1>")
    for name in honest["shares"]:
        text = (run / "statements" / f"{name}.md").read_text()
        assert text.split("\n\n")[1].startswith("**DEPARTURE")
        told = json.loads((run / "statements" / f"{name}.json").read_text())["departures"]
        assert told["rule"] == {"signed": "fenced", "used": "equal"}
    told = json.loads(ran("rewards", run, "--budget", "1", *options, "--format", "json", "--dry-run")[1])
    assert next(iter(told)) == "departures"
    assert told["departures"]["cap"] == {"signed": 0.5, "used": 1.0}


@pytest.mark.parametrize(
    ("rule", "marked", "expected"),
    [
        ("fair", [], ["rule"]),
        ("fair", ["cap"], ["rule"]),
        ("fair", ["rule", "cap"], ["rule"]),
        ("fenced", ["rule"], []),  # marked without need
    ],
)
def test_a_departure_that_is_not_marked_does_not_verify(settled, run, rule, marked, expected):
    record_decision(run, Terms("10.00", "fit", rule, "PHI", equal=0.25, cap=0.5))

    def lie(one):
        return replace(one, body={**one.body, "departures": marked}) if one.kind == "decision" else one

    records = records_of(run)
    assert len(folded(records).decisions) == 1
    with pytest.raises(LedgerError) as caught:
        folded([*map(lie, records)])
    assert str(expected) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "term"),
    [
        ({"utility": "accuracy"}, "utility"),
        ({"rule": "fair"}, "rule"),
        ({"score": "LOO"}, "score"),
        ({"missing": "own-mean"}, "missing"),
        ({"equal": 0.5}, "equal"),
        ({"floor": 0.1}, "floor"),
        ({"cap": 0.9}, "cap"),
        ({"forfeit": 0.0}, "forfeit"),
        ({"currency": "CHF"}, "currency"),
    ],
)
def test_every_term_is_compared(change, term):
    config = from_dict({})
    signed = Terms.agreed(config.payment, "1", config.scoring.utilities[0], config.paid_score)
    assert departures_of(signed, config) == ()
    (found,) = departures_of(replace(signed, **change), config)
    assert (found.term, found.used) == (term, change[term])


def test_a_member_checks_its_share_with_an_equal_part_from_its_own_copy(tmp_path):
    scoring, sections = {"visibility": "coordinator"}, {"payment": {"equal": 0.5}}
    made = settling(tmp_path, scoring=scoring, sections=sections).run()
    assert ran("rewards", made.folder, "--budget", "1000")[0] == 0
    copy = tmp_path / "copy.jsonl"
    assert ran("export", made.folder, "--for", "client-2", "--out", copy)[0] == 0
    code, out, err = ran("verify", copy, "--as", "client-2")
    assert code == 0, err
    assert "share and cents follow" in out


@pytest.mark.parametrize(
    ("payment", "more", "key"),
    [
        ({"equal": 0.5, "rule": "equal"}, {}, "equal"),
        ({"floor": 0.2}, {}, "floor"),
        ({"cap": 0.1}, {}, "cap"),
        ({"rule": "impartial"}, {}, "rule"),  # of a run that settles
        ({"score": "PHI"}, {"scoring": {"method": "reports"}}, "score"),
        ({"score": "ALPHA"}, {"scoring": {"method": "settled"}}, "score"),
        ({"score": "MERIT"}, {}, "score"),
    ],
)
def test_terms_by_which_nobody_could_be_paid_are_refused_before_the_run(payment, more, key):
    with pytest.raises(ConfigError) as caught:
        from_dict({"payment": payment, **more})
    assert caught.value.setting == f"payment.{key}"


# ---------------------------------------------------------------------------------------------------- forfeit


@pytest.mark.parametrize("part", [1.0, 0.5, 0.0])
def test_a_named_liar_forfeits_its_share_and_nobody_earns_by_naming_it(tmp_path, part, monkeypatch):
    """Today's price of a lie would be nothing: whoever is found out is paid its true number."""
    run = lying(tmp_path, naming=True, payment={"forfeit": part})
    code, out, err = ran("rewards", run.folder, "--budget", "1000", "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    total = facts_of(run.folder).total
    full = shares(total)
    assert found["shares"]["client-1"] == pytest.approx((1 - part) * full["client-1"])
    for name in set(full) - {"client-1"}:
        assert found["shares"][name] == full[name]
        assert Decimal(found["payouts"][name]) <= payouts(full, "1000")[name]
    paid = sum(map(Decimal, found["payouts"].values()))
    assert paid + Decimal(found["unpaid"]) == 1000
    assert Decimal(found["unpaid"]) == pytest.approx(
        Decimal(1000 * part * full["client-1"]), abs=Decimal("0.06")
    )
    assert decision_in(run.folder).body["departures"] == []
    assert [*verify_folder(run.folder)]
    statement = (run.folder / "statements" / "client-1.md").read_text()
    assert ("stays unpaid" in statement) == (part > 0)


def test_no_forfeit_without_a_verdict_and_none_of_nobody():
    one = scored([1.0, 2.0, 3.0])
    assert Terms("1", "x").divide(one).unpaid == 0
    assert Terms("1", "x").divide(one, ["server", "m1"]).forfeits == {"m1": 1.0}
    assert share_intervals(scored([1.0, 2.0], 0.1), shares(scored([1.0, 2.0], 0.1), forfeits={"m1": 1}))[
        "m1"
    ] == (0, 0)


# ------------------------------------------------------------------------------------------------- equal part

numbers = st.integers(-256, 512).map(lambda k: k / 64)
errors = st.integers(0, 128).map(lambda k: k / 64)


@st.composite
def cases(draw):
    n = draw(st.integers(2, 7))
    raw = draw(st.lists(numbers, min_size=n, max_size=n))
    stderr = draw(st.none() | st.lists(errors, min_size=n, max_size=n))
    one = scored(raw, stderr)
    assume(max(raw) > 2 * sum(believed(one.stderr) if stderr else [0]))
    return one


@given(cases(), st.floats(0, 1), st.sampled_from(["fair", "fenced"]), st.randoms(use_true_random=False))
def test_with_an_equal_part_shares_add_up_and_order_does_not_matter(one, equal, rule, random):
    found = shares(one, rule, equal=equal)
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-12)
    order = random.sample(range(one.n), one.n)
    other = scored(
        one.raw[order], None if one.stderr is None else one.stderr[order],
        clients=tuple(one.clients[k] for k in order),
    )  # fmt: skip
    assert dict(shares(other, rule, equal=equal)) == pytest.approx(dict(found), abs=1e-12)
    plain, takes = shares(one, rule), takes_part(one)
    for name, taken in zip(one.clients, takes, strict=True):
        expected = (1 - equal) * plain[name] + equal * taken / takes.sum()
        assert found[name] == pytest.approx(expected, abs=1e-12)


@given(cases(), st.floats(0, 1), st.integers(0, 6), st.integers(1, 640).map(lambda k: k / 64))
def test_nobody_earns_less_by_a_higher_score_with_an_equal_part(one, equal, who, more):
    who %= one.n
    raw = one.raw.copy()
    raw[who] += more
    higher = replace(one, values=raw, raw=raw)
    before = shares(one, equal=equal)
    try:
        after = shares(higher, equal=equal)
    except UndefinedShares:
        assume(False)
    assert after[f"m{who}"] >= before[f"m{who}"] - 1e-9


def test_who_takes_part_and_what_a_free_rider_gets():
    # errors of .1: -1 is surely below zero, -.1 is not
    one = scored([1, 1, 1, 0, -0.1, -1], 0.1)
    found = shares(one, "fair", equal=0.5)
    assert [*found.values()] == pytest.approx([1 / 6 + 0.1] * 3 + [0.1, 0.1, 0])
    assert found.among == 5
    assert {code_of(note) for note in found.notes} >= {"not-equal"}
    assert null_share(one, 0.5) == pytest.approx(0.5 * null_share(one) + 0.1)
    # without errors nothing is sure
    assert shares(scored([1, 1, 1, 0, -0.1, -1]), "fair", equal=0.6)["m5"] == pytest.approx(0.1)


def test_the_interval_of_an_equal_part_holds_what_is_paid_and_what_exact_scores_would_pay():
    one = scored([2.0, 1.0, 0.05, -0.05], 0.1)
    found = shares(one, "fair", equal=0.5)
    spans = share_intervals(one, found)
    exact = shares(scored([2.0, 1.0, 0.05, -0.05]), "fair")
    assert found["m3"] == pytest.approx(0.125)
    assert spans["m3"][0] == 0  # by exact scores it is below zero
    for name, (low, high) in spans.items():
        assert low <= found[name] <= high
    half = 0.5 * exact["m0"] + 0.5 / 3
    assert spans["m0"][0] <= half <= spans["m0"][1]


# ----------------------------------------------------------------------------------------- moving money


@pytest.mark.parametrize("times", [2, 4, 100])
def test_nobody_moves_money_by_stating_a_larger_error(times):
    """The worst of six: 8.0 % by scores, and 14.6 % once scores were pulled together by stated errors."""
    raw = [0.24, 0.21, 0.18, 0.16, 0.13, 0.08]
    for worst in range(6):
        stated = [0.03 * (times if k == worst else 1) for k in range(6)]
        assert [*shares(scored(raw, stated)).values()] == pytest.approx([x / sum(raw) for x in raw])


def test_a_false_error_does_not_pay_a_member_who_does_harm_at_the_fence():
    """Without anybody's errors it would get 7.9 %. Its equal part hangs on its own error: that it can get."""
    raw = [0.9, 0.1, 0.05, -0.3, -0.3, 0.02]
    true, false = scored(raw, 0.03), scored(raw, [0.03] * 4 + [1e9, 0.03])
    assert shares(false, rule="fenced") == shares(true, rule="fenced")
    assert shares(true, rule="fenced")["m4"] == 0
    assert shares(scored(raw), rule="fenced")["m4"] == pytest.approx(0.0793, abs=1e-4)
    raw = [0.24, 0.21, 0.18, 0.16, 0.13, -0.15]
    for last, gained in ((0.03, 0), (1e9, 0.5 / 6)):
        found = shares(scored(raw, [0.03] * 5 + [last]), rule="fenced", equal=0.5)
        assert found["m5"] == pytest.approx(gained)


def test_nobody_moves_money_by_splitting():
    """The best of six: 24.4 % as one, and 29.8 % as three once their errors counted in a common factor."""
    raw = [0.244, 0.2, 0.18, 0.16, 0.13, 0.086]
    whole = shares(scored(raw, 0.03))
    parts = scored([0.244 / 3] * 3 + raw[1:], [0.03 / math.sqrt(3)] * 3 + [0.03] * 5)
    split = shares(parts)
    assert whole["m0"] == pytest.approx(0.244)
    assert sum(split[f"m{k}"] for k in range(3)) == pytest.approx(0.244)
    # an equal part pays per name: whoever splits gets it three times, which docs/money.md says
    assert sum(shares(parts, equal=0.5)[f"m{k}"] for k in range(3)) == pytest.approx(0.122 + 0.5 * 3 / 8)


# ------------------------------------------------------------------------------------------------- currencies


@pytest.mark.parametrize(
    ("budget", "currency", "amounts"),
    [
        ("10000 JPY", None, ["3334", "3333", "3333"]),
        ("10000", "JPY", ["3334", "3333", "3333"]),
        (10_000, "KRW", ["3334", "3333", "3333"]),
        (Decimal("10.001"), "KWD", ["3.334", "3.334", "3.333"]),
        ("10.00", "EUR", ["3.34", "3.33", "3.33"]),
        ("10.00", "XBT", ["3.34", "3.33", "3.33"]),
        ("10.00", None, ["3.34", "3.33", "3.33"]),
    ],
)
def test_amounts_have_the_decimals_of_their_currency(budget, currency, amounts):
    third = {"A": 1 / 3, "B": 1 / 3, "C": 1 / 3}
    paid = payouts(third, budget, currency)
    assert [str(amount) for amount in paid.values()] == amounts
    assert sum(paid.values()) + paid.unpaid == paid.budget
    assert str(paid.nothing) == str(Decimal(0).scaleb(-decimals_of(paid.currency)))
    ends = amounts_within({"A": (0.3, 0.4)}, paid)["A"]
    assert all(end.as_tuple().exponent == -decimals_of(paid.currency) for end in ends)
    sure = amounts_within(dict.fromkeys(third, (1 / 3, 1 / 3)), paid)
    assert sure == {name: (amount, amount) for name, amount in paid.items()}


def test_a_run_paid_in_yen_has_whole_amounts_everywhere(tmp_path):
    for budget, currency in (("100.50", "JPY"), ("100.50 JPY", None), (Decimal("0.5"), "JPY")):
        with pytest.raises(InputError, match="at most 0 decimals in JPY"):
            payouts({"A": 1.0}, budget, currency)
    with pytest.raises(InputError, match="expected an amount in JPY, got one in EUR"):
        payouts({"A": 1.0}, "100 EUR", "JPY")
    made = settling(tmp_path, sections={"payment": {"currency": "JPY"}}).run()
    code, out, err = ran("rewards", made.folder, "--budget", "100001")
    assert code == 0, err
    assert "budget 100,001 JPY" in out
    body = decision_in(made.folder).body
    assert (body["budget"], sum(body["cents"].values()) + body["unpaid"]) == ("100001", 100_001)
    assert "100,001.00" not in render(facts_of(made.folder))
    name = max(body["cents"], key=body["cents"].get)
    assert f"**{body['cents'][name]:,}\xa0JPY**" in (made.folder / "statements" / f"{name}.md").read_text()
    assert [*verify_folder(made.folder)]


def test_a_currency_of_unknown_decimals_is_told(settled, tmp_path, run):
    out = ran("rewards", run, "--budget", "10", "--currency", "XBT", "--dry-run")[1]
    assert "two" in out
    assert "XBT" in out
    out = json.loads(ran("rewards", run, "--budget", "10", "--dry-run", "--format", "json")[1])
    assert out["currency"] == "EUR"
    assert not [note for note in out["notes"] if "decimals" in note]


# ---------------------------------------- members sign a decision: recorded once each, and forged by nobody


A, B, C, D = (f"client-{k}" for k in range(4))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a decision, and everybody's keys in its folder."""
    return _decided(tmp_path_factory.mktemp("approved"))


def _decided(home, **settings):
    made = Federation(home, 4, 2, settings=settings).run()
    for who, key in made.keys.items():
        write_key(made.folder / "keys" / f"{who}.pem", key)
    record_decision(made.folder, Terms("100.00", made.config.scoring.utilities[0], rule="equal"))
    return made


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished.folder, tmp_path / "run")


def key_of(folder, name):
    return folder / "keys" / f"{name}.pem"


def approve(folder, name):
    run = sound(folder)
    return record_approval(run, sign(run, key_of(folder, name)))


def forged(folder, keys, author, signer, **changed):
    """Append an approval by one, signed by another, as a dishonest server can."""
    run = sound(folder)
    decision = next(record for record in reversed(run.records) if record.kind == "decision")
    body = {"run": run.id, "decision": decision.digest.hex(), "record": decision.seq, **changed}
    with Ledger(folder / "ledger.sqlite") as ledger, ledger.transaction():
        signature = keys[signer].sign(content(author, "approval", body))
        ledger.append(author, "approval", body, signature=signature, seal=keys[SERVER].sign)


def approved(lines):
    return [str(line) for line in lines if line.code == "approved"]


def test_members_approve_the_latest_decision_once_each(folder):
    approve(folder, A)
    run = approve(folder, C)
    assert run.approved(1) == (A, C)
    assert approved(verify_folder(folder)) == [f"approved: decision 1, by {A} and {C}; 4 members in all"]
    with pytest.raises(LedgerError, match="client-0 has approved decision 1 before"):
        approve(folder, A)
    assert sound(folder).head == run.head  # nothing is left of it
    late = sign(run, key_of(folder, B))
    approve(folder, D)
    with pytest.raises(StoreError, match="its ledger has grown since it was verified"):
        record_approval(run, late)


def test_an_approval_of_an_older_decision_stays_with_that_one(folder, tmp_path):
    late = sign(sound(folder), key_of(folder, B))
    approve(folder, A)
    record_decision(folder, Terms("200.00", sound(folder).config.scoring.utilities[0], rule="equal"))
    run = record_approval(sound(folder), late)
    assert (run.approved(1), run.approved(2)) == ((A, B), ())
    assert approve(folder, A).approved(2) == (A,)
    told = approved(verify_folder(folder))
    assert [line.split(";")[0] for line in told] == [
        f"approved: decision 1, by {A} and {B}", f"approved: decision 2, by {A}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("author", "signer", "changed", "words"),
    [
        (A, SERVER, {}, "not signed by client-0"),  # the server forges one
        (A, B, {}, "not signed by client-0"),  # another member's key
        (SERVER, SERVER, {}, "expected a member as its author"),
        (A, A, {"decision": "0" * 64}, "approves another decision than record"),
        (A, A, {"record": 1}, "record 1, which is no decision"),
        (A, A, {"run": "f" * 32}, "belongs to another run"),
        (A, A, {"more": "x"}, "unknown field"),
    ],
)
def test_a_forged_approval_fails_verify(folder, finished, author, signer, changed, words):
    forged(folder, finished.keys, author, signer, **changed)
    found_wrong(words, verify_folder, folder)


def test_a_member_signs_from_its_copy_into_a_file_that_anybody_hands_in(tmp_path):
    made = _decided(tmp_path / "private", scoring={"visibility": "coordinator"})
    copy, file = tmp_path / "own.jsonl", tmp_path / "approval.json"
    copied(made.folder, copy, D)
    key = key_of(made.folder, D)
    file.write_bytes(msgspec.json.encode(sign(verified_run(copy, public_key(made.keys[D])), key)))
    assert record_approval(sound(made.folder), read_approval(file)).approved(1) == (D,)
    copied(made.folder, copy, B)
    assert approved(verify_copy(copy, member=B)) == [f"approved: decision 1, by {D}; 4 members in all"]
    file.write_text(json.dumps({**json.loads(file.read_text()), "member": A}))
    with pytest.raises(LedgerError, match="not signed by client-0"):
        record_approval(sound(made.folder), read_approval(file))
    for wrong in ("{}", "x", file.read_text().replace("approval 1", "approval 2")):
        file.write_text(wrong)
        with pytest.raises(FileFormatError):
            read_approval(file)


def test_only_a_member_approves_and_only_what_was_decided(folder, tmp_path):
    with pytest.raises(KeyFileError, match=r"server\.pem: not the key of a member"):
        sign(sound(folder), key_of(folder, SERVER))
    undecided = Federation(tmp_path / "undecided", 4, 1, masks=False).run()
    with pytest.raises(StoreError, match="nobody signs in a run with secure aggregation off"):
        sign(sound(undecided.folder), key_of(folder, A))
    other = Federation(tmp_path / "other", 4, 1).run()
    write_key(tmp_path / "other.pem", other.keys[A])
    with pytest.raises(StoreError, match="holds no decision to approve"):
        sign(sound(other.folder), tmp_path / "other.pem")
    key_of(folder, SERVER).unlink()
    with pytest.raises(StoreError, match="only the holder of the server's key can record an approval"):
        approve(folder, A)


def test_an_unsigned_ledger_has_no_approvals(tmp_path):
    made = Federation(tmp_path, 4, 1, masks=False).run()
    record_decision(made.folder, Terms("100.00", made.config.scoring.utilities[0], rule="equal"))
    decision = sound(made.folder).records[-1]
    body = {"run": sound(made.folder).id, "decision": decision.digest.hex(), "record": decision.seq}
    with Ledger(made.folder / "ledger.sqlite") as ledger, ledger.transaction():
        ledger.append(A, "approval", body)
    found_wrong("nobody signs in this run", verify_folder, made.folder)


def test_the_command_approves_and_says_who_has_not(folder, fedmerit, tmp_path):
    said = fedmerit.said("approve", folder, "--key", key_of(folder, A))
    assert f"{A} approves decision 1: record" in said
    assert f"not approved yet by {B}, {C} and {D}" in said
    file = tmp_path / "b.json"
    fedmerit.said("approve", folder, "--key", key_of(folder, B), "--out", file)
    assert f"{B} approves decision 1" in fedmerit.said("approve", folder, file)
    assert sound(folder).approved(1) == (A, B)
    copy = tmp_path / "copy.jsonl"
    fedmerit.said("export", folder, "--out", copy)
    assert "a copy records nothing" in str(call("approve", copy, "--key", key_of(folder, C)).exception)
    assert "expected either --key" in str(call("approve", folder).exception)
