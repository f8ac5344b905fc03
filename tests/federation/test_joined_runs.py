"""Runs that follow each other, scored and paid as one: what counts, what is refused, what can be verified."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedmerit.cli import app
from fedmerit.errors import DoesNotFollow, FedmeritError, LedgerError, UndefinedScore
from fedmerit.identity import SERVER, Roster, content, load_key
from fedmerit.keys import Change
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.joined_runs import joined, part_of
from fedmerit.ledger.records import rounds_of, sees
from fedmerit.notes import code_of
from fedmerit.report.page.html import page
from fedmerit.scoring.accumulate import accumulate
from fedmerit.storage.run_folder import recorded, snapshot
from fedmerit.verify import read_run, record_decision, verify_copy, verify_folder
from linear_federation import Federation

pytestmark = pytest.mark.long

TERMS = Terms("1000.00", "fit")
CLOSED = {"scoring": {"utilities": ["fit"], "visibility": "coordinator"}}


def start(home, model=None, *, run="0" * 32, stop=None, rounds=2, **options):
    """A run from a model; its server dies after ``stop`` rounds."""
    federation = Federation(home, rounds=rounds, **options)
    federation.run_id = run
    if model is not None:
        federation.model = model
    if stop is None:
        return federation.run()
    with federation.begun():
        for number in range(1, stop + 1):
            federation.round(number)
    return federation


def series(home, count=2, **options):
    """The folders of runs that follow each other: two rounds of five, then two, then again two."""
    first = start(home / "a", stop=2, rounds=5, **options)
    found, model = [first.folder], first.model
    for place in range(1, count):
        later = start(home / "abc"[place], model, run=f"{place:032x}", **options)
        found.append(later.folder)
        model = later.model
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("series")
    return {"open": series(home / "open", 3), "closed": series(home / "closed", settings=CLOSED)}


@pytest.fixture
def runs(made, tmp_path):
    """Folders a, b, c of an open series, to be changed."""
    return copied(made["open"], tmp_path)


@pytest.fixture
def closed(made, tmp_path):
    return copied(made["closed"], tmp_path)


def copied(folders, home):
    return [shutil.copytree(one, home / one.parent.name) for one in folders]


def rounds_in(folder):
    return rounds_of(snapshot(folder / "ledger.sqlite"))


def lines(source, **options):
    return list((verify_copy if source.suffix else verify_folder)(source, **options))


def codes(found):
    return [code_of(line) for line in found]


def called(*args):
    found = CliRunner().invoke(app, [*map(str, args)])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.output


def as_server(folder, change):
    """The ledger anew, by a server that changes its decisions and signs all of it."""
    key = load_key(folder / "keys" / "server.pem")
    path = folder / "ledger.sqlite"
    with Ledger(path, read_only=True) as ledger:
        records = list(ledger.records())
    path.unlink()
    with Ledger(path) as ledger, ledger.transaction():
        for record in records:
            body, signature = json.loads(json.dumps(record.body)), record.signature
            if record.kind == "decision":
                change(body)
                signature = key.sign(content(SERVER, "decision", body))
            ledger.append(record.author, record.kind, body, signature=signature, seal=key.sign)


# ---------------------------------------------------------------------------------------------- what counts


def test_rounds_are_numbered_on_and_contributions_are_the_sums_of_those_of_the_runs(runs):
    """alpha_i = (v(M0 + U_i) - v(M0) + v(M) - v(M - U_i)) / 2, added up by hand over four rounds."""
    first, second, _ = runs
    found = recorded(second, after=[first])
    assert [(one.number, one.since) for one in found.rounds] == [(1, None), (2, None), (3, 3), (4, 3)]
    by_hand = {}
    for folder in (first, second):
        for one in rounds_in(folder):
            used = one.to_reports("fit")
            for name, alone, without in zip(used.clients, used.alone, used.without, strict=True):
                alpha = ((alone - used.empty) + (used.grand - without)) / 2
                by_hand[name] = by_hand.get(name, 0.0) + alpha
    total = accumulate(found.content.rounds)
    assert total.as_dict() == pytest.approx(by_hand)
    last = rounds_in(second)[-1].to_reports("fit")
    assert total.gain == pytest.approx(last.grand - found.content.rounds[0].empty)  # one test slice
    parts = [accumulate([one.to_reports("fit") for one in rounds_in(folder)]) for folder in (first, second)]
    np.testing.assert_allclose(total.stderr, parts[0].stderr + parts[1].stderr)
    assert "bound-runs" in codes(total.notes)
    assert found.planned == 2 + 2


def test_other_test_samples_prove_no_independence_so_their_errors_are_added_too(tmp_path):
    """The next run's pool may hold the same samples in another order, under another id."""
    first = start(tmp_path / "a", stop=2, rounds=3, settings={"data": {"test_reveal": "per-round"}})
    second = start(tmp_path / "b", first.model, run="1" * 32, settings={"data": {"test_reveal": "per-round"}})
    both = recorded(second.folder, after=[first.folder]).content.rounds
    parts = [[one for one in both if one.since is None], [one for one in both if one.since]]
    errors = [accumulate(part).stderr for part in parts]
    np.testing.assert_allclose(
        errors[0], [math.hypot(*(one.se_alpha[k] for one in parts[0])) for k in range(4)]
    )
    np.testing.assert_allclose(accumulate(both).stderr, errors[0] + errors[1])


def test_three_runs_count_as_one_and_the_second_run_may_have_aborted_rounds(runs, tmp_path):
    assert [one.number for one in recorded(runs[2], after=runs[:2]).rounds] == [1, 2, 3, 4, 5, 6]
    first = start(tmp_path / "x", stop=1, rounds=3)
    away = [("client-2", 1, "masked"), ("client-3", 1, "masked")]
    second = start(tmp_path / "y", first.model, run="1" * 32, lost=away)
    found = recorded(second.folder, after=[first.folder])
    assert [bool(one.aborted) for one in found.rounds] == [False, True, False]
    assert [one.round for one in found.content.rounds] == [1, 3]
    made, _ = record_decision(second.folder, TERMS, [first.folder])
    assert (made.rounds, made.counts, made.counted) == (2, (1,), 3)


def test_who_left_or_joined_with_the_next_roster_is_counted(tmp_path):
    names = tuple(f"client-{i}" for i in range(5))
    first = start(tmp_path / "a", stop=2, rounds=3, members=names[:4])
    other = Federation(tmp_path / "b", members=names[1:])
    change = Change.proposed(first.roster, other.roster)
    for name in names[:4]:
        change = change.signed(first.keys[name])
    roster = change.adopted()
    second = start(tmp_path / "c", first.model, run="1" * 32, members=names[1:], roster=roster)
    made, _ = record_decision(second.folder, TERMS, [first.folder])
    assert set(made.shares) == set(names)
    again, _, head = read_run(second.folder, [first.folder])
    table = called(
        "rewards", first.folder, second.folder, "--budget", "1000", "--rule", TERMS.rule
    ).splitlines()
    assert sum(line.startswith("  client-") for line in table) == 5
    assert {one.stem for one in (second.folder / "statements").glob("*.md")} == set(names)
    assert head == snapshot(second.folder / "ledger.sqlite").head
    assert len(again) == 4
    assert "client-0" in page(second.folder)  # paid, though not in this run
    assert "client-0" not in page(second.folder, pseudonyms=True)


# ------------------------------------------------------------------------------------------ what is refused


def parts(*folders):
    return [part_of(snapshot(one / "ledger.sqlite")) for one in folders]


def refused(code, earlier, later, *words):
    with pytest.raises(DoesNotFollow) as caught:
        joined(parts(earlier, later))
    error = caught.value
    assert (error.code, error.earlier, error.later) == (code, str(earlier), str(later))
    for word in (str(earlier), str(later), *words):
        assert word in str(error)


def test_each_condition_has_its_refusal_with_both_folders(runs, tmp_path):
    first, second, third = runs
    model = start(tmp_path / "again", stop=2, rounds=5).model
    refused("same", first, first, "0" * 32)
    refused("order", second, first, f"give {first} first")
    m = rounds_in(first)[-1].body["m"]
    refused("model", first, third, f"the model {m}, with which round 2 of {first} ended")
    empty = start(tmp_path / "empty", stop=0)
    refused("empty", empty.folder, second, "no round is closed", "leave it out")
    for section, key, value in (
        ("scoring", "game", "renormalised"),
        ("payment", "missing", "own-mean"),
        ("scoring", "visibility", "coordinator"),
    ):
        settings = {"scoring": {"utilities": ["fit"]}}
        settings[section] = {**settings.get(section, {}), key: value}
        other = start(tmp_path / key, model, run="1" * 32, settings=settings)
        refused("scoring", first, other.folder, f"{section}.{key} = ", f"got {value!r}")
    other = start(tmp_path / "keys", model, run="1" * 32, seed=7)
    here = part_of(snapshot(first / "ledger.sqlite")).first["terms"]["roster"]
    refused("roster", first, other.folder, f"expected the roster {here}", "after None")


def test_a_utility_an_engine_a_name_or_a_key_that_differs_is_refused(runs, tmp_path):
    first, second = parts(*runs[:2])

    def refuses(code, word, **changes):
        with pytest.raises(DoesNotFollow, match=word) as caught:
            joined([first, replace(second, **changes)])
        assert caught.value.code == code

    config = second.config
    utilities = replace(config, scoring=replace(config.scoring, utilities=("fit", "brier")))
    refuses("scoring", "scoring.utilities", config=utilities)
    refuses("engine", "expected engine flower, as in", first={**second.first, "engine": "embedded"})
    spelled = replace(config, partition=replace(config.partition, names=("Client-0", *config.clients[1:])))
    refuses("names", "'client-0' and 'Client-0'", config=spelled)
    keys = {**second.first["keys"], "client-2": "ab" * 32}
    refuses("keys", "of client-2, as in .*, got abab", first={**second.first, "keys": keys})
    keys = {**second.first["keys"], SERVER: "ab" * 32}
    refuses("keys", "of server, as in .*, got abab", first={**second.first, "keys": keys})


def test_a_roster_two_changes_later_is_not_the_next_one(tmp_path):
    first = start(tmp_path / "a", stop=1, rounds=3)
    roster = first.roster
    for quorum in (4, 3):
        change = Change.proposed(roster, Roster(roster.members, roster.server, quorum=quorum))
        for name in first.names:
            change = change.signed(first.keys[name])
        roster = change.adopted()
    second = start(tmp_path / "b", first.model, run="1" * 32, roster=roster)
    refused("roster", first.folder, second.folder, f"after {roster.previous.hex()}")


def test_what_is_refused_writes_nothing_and_says_why_on_the_command_line(runs):
    heads = [snapshot(one / "ledger.sqlite").head for one in runs]
    for command in (("score",), ("rewards", "--budget", "10")):
        with pytest.raises(DoesNotFollow, match=r"give .*a first"):
            called(command[0], runs[1], runs[0], *command[1:])
    with pytest.raises(DoesNotFollow, match="does not follow"):
        record_decision(runs[2], TERMS, [runs[0]])
    with pytest.raises(FedmeritError, match="expected a run folder, because several runs were given"):
        called("score", runs[0] / "scores.json", runs[1])
    with pytest.raises(UndefinedScore, match="MERIT"):
        called("score", runs[0], runs[1], "--score", "MERIT")
    assert [snapshot(one / "ledger.sqlite").head for one in runs] == heads


# ------------------------------------------------------------------------------------------------ decisions


def test_a_decision_over_two_runs_is_recomputed_to_the_cent_only_with_both(runs):
    first, second, _ = runs
    made, new = record_decision(second, TERMS, [first])
    assert new
    assert made.after == (("0" * 32, snapshot(first / "ledger.sqlite").head),)
    assert (made.rounds, made.counts) == (2, (2,))
    total = accumulate(recorded(second, after=[first]).content.rounds).as_dict()
    positive = {name: max(value, 0.0) for name, value in total.items()}
    for name, share in made.shares.items():
        assert share == pytest.approx(positive[name] / sum(positive.values()))
    assert sum(made.paid.values()) == 1000
    again, new = record_decision(second, TERMS, [first])
    assert (again.record, new) == (made.record, False)
    alone = lines(second)
    assert "payouts-unchecked" in codes(alone)
    assert "payouts" not in codes(alone)
    assert not any("to the cent" in line for line in alone)
    (lacking,) = [line for line in alone if code_of(line) == "after-lacking"]
    assert f"also rests on run {'0' * 32} up to head {made.after[0][1]}, which was not given" in lacking
    both = lines(second, after=[first], member="client-1")
    assert "payouts-unchecked" not in codes(both)
    assert any(f"({first})" in line and "2 rounds" in line for line in both)
    (paid,) = [line for line in both if code_of(line) == "payouts"]
    assert f"{made.paid['client-1']:,.2f} EUR for client-1" in paid


def test_a_later_decision_replaces_it_and_three_runs_are_paid_in_the_last(runs):
    first, second, third = runs
    record_decision(second, TERMS, [first])
    own, new = record_decision(second, TERMS)
    assert (own.number, own.replaces, own.after, new) == (2, 1, (), True)
    both = codes(lines(second, after=[first]))
    assert both.count("payouts") == 2
    assert codes(lines(second)).count("payouts") == 1
    whole, _ = record_decision(third, TERMS, [first, second])
    assert [run for run, _ in whole.after] == ["0" * 32, f"{1:032x}"]
    assert whole.counts == (2, 2)
    found = lines(third, after=[second, first])  # their order is in the ledger
    assert codes(found).count("after-given") == 2
    assert codes(found).count("after-paid") == 1  # the second run has decisions of its own
    partly = lines(third, after=[first])
    assert {"after-given", "after-lacking", "payouts-unchecked"} <= {*codes(partly)}
    as_server(third, lambda body: body["after"][0].__setitem__(1, "0" * 64))
    with pytest.raises(LedgerError, match="which is not on the chain of"):
        lines(third, after=[first])


def test_a_decision_rests_on_the_earlier_run_as_it_was(runs):
    first, second, _ = runs
    made, _ = record_decision(second, TERMS, [first])
    record_decision(first, TERMS)  # its ledger grows
    assert "payouts" in codes(lines(second, after=[first]))
    again, new = record_decision(second, TERMS, [first])
    assert (again.replaces, new) == (1, True)
    assert again.paid == made.paid


def test_an_earlier_run_that_is_not_meant_or_does_not_verify_is_an_error(runs):
    first, second, third = runs
    record_decision(second, TERMS, [first])
    with pytest.raises(LedgerError, match="on which no decision here rests; expected one of: 0000"):
        lines(second, after=[first, third])
    with pytest.raises(LedgerError, match="expected one of: none"):
        lines(third, after=[first])
    (first / "config.toml").write_text("[training]\nrounds = 77\n")
    with pytest.raises(LedgerError, match=f"{first}: "):
        lines(second, after=[first])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda after: [[after[0][0], "0" * 64]], "which is not on the chain of"),
        (lambda after: [["f" * 32, after[0][1]]], None),  # nobody can tell without that run
        (lambda after: [], "after: expected pairs of a run and a head"),
        (lambda after: [after[0], after[0]], "each run once"),
        (lambda after: [[*after[0], 1]], "expected pairs"),
        (lambda after: [[after[0][0].upper() + "X", after[0][1]]], "expected pairs"),
        (lambda after: {"a": 1}, "expected pairs"),
        (lambda after: [[10**31, after[0][1]]], "expected pairs"),
        (lambda after: 7, "expected pairs"),
        (lambda after: [[f"{1:032x}", after[0][1]]], "names its own run"),
    ],
)
def test_a_decision_that_names_other_runs_or_heads_is_found(runs, change, words):
    first, second, _ = runs
    record_decision(second, TERMS, [first])
    as_server(second, lambda body: body.update(after=change(body["after"])))
    if words is None:
        assert "payouts-unchecked" in codes(lines(second))
        with pytest.raises(LedgerError, match="on which no decision here rests"):
            lines(second, after=[first])
        return
    with pytest.raises(LedgerError, match=words):
        lines(second, after=[first])


def test_a_decision_on_fewer_rounds_of_the_earlier_run_or_on_none_is_found(runs):
    first, second, _ = runs
    record_decision(second, TERMS, [first])
    records = [*snapshot(first / "ledger.sqlite").records()]
    early = next(one.digest.hex() for one in records if one.kind == "scores")
    kept = (second / "ledger.sqlite").read_bytes()
    as_server(second, lambda body: body.update(after=[[body["after"][0][0], early]]))
    with pytest.raises(LedgerError, match="does not follow"):
        lines(second, after=[first])
    assert "payouts-unchecked" in codes(lines(second))
    (second / "ledger.sqlite").write_bytes(kept)
    as_server(second, lambda body: body.pop("after"))
    with pytest.raises(LedgerError, match=r"share of .*: states .*, the reports give"):
        lines(second)


def test_another_head_passes_only_if_the_same_rounds_were_closed_by_then(runs):
    first, second, _ = runs
    record_decision(second, TERMS, [first])
    closing = [one.digest.hex() for one in snapshot(first / "ledger.sqlite").records() if one.kind == "round"]
    as_server(second, lambda body: body.update(after=[[body["after"][0][0], closing[-1]]]))
    assert "payouts" in codes(lines(second, after=[first]))
    as_server(second, lambda body: body.update(after=[[body["after"][0][0], closing[0]]]))
    with pytest.raises(LedgerError, match="does not follow"):
        lines(second, after=[first])


@pytest.mark.parametrize("what", ["cents", "shares", "unpaid", "rounds", "decision", "status"])
def test_what_follows_from_the_record_itself_is_checked_without_the_earlier_run(runs, what):
    first, second, _ = runs
    record_decision(second, TERMS, [first])

    def change(body):
        if what == "cents":
            body["cents"]["client-0"] += 1
        elif what == "shares":
            body["shares"]["client-0"] = body["shares"]["client-1"]
        elif what == "status":
            body["status"] = "undefined"
        else:
            body[what] += 1

    as_server(second, change)
    with pytest.raises(LedgerError, match="decision"):
        lines(second)


def test_a_share_that_does_not_follow_from_both_runs_is_found_with_the_earlier_one(runs):
    """The server swaps two members' shares and cents, which fits together but not with the reports."""
    first, second, _ = runs
    record_decision(second, TERMS, [first])

    def change(body):
        for key in ("shares", "cents"):
            one = body[key]
            one["client-0"], one["client-1"] = one["client-1"], one["client-0"]

    as_server(second, change)
    assert "payouts-unchecked" in codes(lines(second))
    with pytest.raises(LedgerError, match="share of client-0: states"):
        lines(second, after=[first])


# ---------------------------------------------------------------------------------------- one member's copy


def copy_of(folder, member):
    path = folder.parent / f"{folder.name}-{member}.jsonl"
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        path.write_bytes(b"".join(exported(ledger, sees(member))))
    return path


def test_a_member_recomputes_its_share_from_its_own_copies_of_both_runs(closed):
    first, second = closed
    made, _ = record_decision(second, TERMS, [first])
    mine, before = copy_of(second, "client-2"), copy_of(first, "client-2")
    alone = lines(mine)
    assert {"after-lacking", "payout-unchecked"} <= {*codes(alone)}
    assert "payout" not in codes(alone)
    both = lines(mine, after=[before])
    (own,) = [line for line in both if code_of(line) == "payout"]
    assert f"{made.paid['client-2']:,.2f} for client-2: share and cents follow" in own
    assert "payouts" in codes(lines(second, after=[first]))
    assert "payouts-unchecked" in codes(lines(second))


@pytest.mark.parametrize("key", ["positive", "gain"])
def test_a_member_finds_totals_that_its_share_does_not_follow_from(closed, key):
    first, second = closed
    record_decision(second, TERMS, [first])
    as_server(second, lambda body: body["totals"].update({key: (2.5).hex()}))
    with pytest.raises(LedgerError, match=rf"totals\.{key}: states"):
        lines(second, after=[first])
    if key == "positive":
        with pytest.raises(LedgerError, match=r"fence\.positive|share of client-2"):
            lines(copy_of(second, "client-2"), after=[copy_of(first, "client-2")])


def test_what_follows_from_the_shares_is_checked_in_a_private_run_too(closed):
    first, second = closed
    record_decision(second, TERMS, [first])
    as_server(second, lambda body: body["totals"].update(n=3))
    with pytest.raises(LedgerError, match=r"totals\.n"):
        lines(second)


# ------------------------------------------------------------------------------------------ what people read


def test_the_command_line_scores_and_pays_and_says_which_rounds_are_whose(runs):
    first, second, _ = runs
    told = called("score", first, second)
    assert "ALPHA summed over 4 rounds" in told
    assert f"of round 4 alone (round 2 of {second})" in told
    assert f"rounds 1 to 2: rounds 1 to 2 of {first}" in told
    assert f"rounds 3 to 4: rounds 1 to 2 of {second}" in told
    assert "the run is not over" not in told  # the first will never be, the second is
    written = json.loads(called("score", first, second, "--format", "json"))
    assert [one["reports"].get("since") for one in written["rounds"]] == [None, None, 3, 3]
    total = accumulate(recorded(second, after=[first]).content.rounds)
    assert written["cumulative"]["ALPHA"] == pytest.approx(total.values.tolist())
    dry = called("rewards", first, second, "--budget", "1000", "--dry-run")
    assert "recorded" not in dry
    paid = called("rewards", first, second, "--budget", "1000")
    assert "recorded as decision 1" in paid
    assert not (first / "statements").exists()
    assert "not given (--after)" in called("verify", second)
    assert "to the cent" in called("verify", second, "--after", first)


def test_a_run_that_closed_no_round_yet_adds_none(runs, tmp_path):
    model = start(tmp_path / "again", stop=2, rounds=5).model
    later = start(tmp_path / "later", model, run="2" * 32, stop=0).folder
    told = called("score", runs[0], later)
    assert f"no round of {later} is closed yet" in told
    assert "the run is not over: this covers 2 of 4 rounds" in told
    assert "pays for 2 of 4 rounds" in called("rewards", runs[0], later, "--budget", "1000")
    assert "after 2 of 4 rounds" in (later / "statements" / "client-0.md").read_text()
    assert "to the cent" in called("verify", later, "--after", runs[0])


def test_a_decision_despite_doubts_says_so_where_they_cannot_be_recomputed(runs):
    record_decision(runs[1], replace(TERMS, despite_doubts=True), [runs[0]])
    assert "despite-any" in codes(lines(runs[1]))
    assert "despite-any" not in codes(lines(runs[1], after=[runs[0]]))  # no doubt was overruled


def test_an_earlier_run_that_was_paid_already_is_warned_about(runs):
    first, second, _ = runs
    called("rewards", first, "--budget", "10")
    paid = called("rewards", first, second, "--budget", "1000")
    assert f"WARNING: {first} has a decision of its own, which pays for its rounds too" in paid


def test_statements_cover_both_runs_and_say_so(runs):
    first, second, _ = runs
    called("rewards", first, second, "--budget", "1000")
    made, _ = record_decision(second, TERMS, [first])
    text = (second / "statements" / "client-0.md").read_text()
    assert "Decision 1, after 4 rounds with 4 members. It covers two runs that follow each other" in text
    assert f"rounds 1 to 2 are those of run {'0' * 32}; rounds 3 to 4 are those of the run of this" in text
    assert "In 4 of 4 rounds your update was in the sum" in text
    assert made.after[0][1] in text
    told = json.loads((second / "statements" / "client-0.json").read_text())
    assert told["after"] == [list(one) for one in made.after]
    assert told["rounds"]["counted"] == [1, 2, 3, 4]
    assert told["contribution"] == pytest.approx(made.total.as_dict()["client-0"])


@pytest.mark.parametrize("score", ["ALPHA", "LOO"])
def test_the_page_shows_the_decision_as_one_on_several_runs_and_counts_its_own(runs, score):
    first, second, _ = runs
    made, _ = record_decision(second, Terms("1000.00", "fit", score=score, on_undefined="equal"), [first])
    text = page(second)
    assert "for two runs that follow each other, this one being the last." in text
    assert f"run {'0' * 32} up to head {made.after[0][1]}" in text
    assert "on this run alone, not the decision in part 1, which rests on several runs" in text
    assert "gives the same amounts for this run alone" in text
    assert "was not recomputed" in text or "were not recomputed" in text
    assert "follows from the scores, to the cent" not in text
    for amount in made.paid.values():
        assert f"{amount:,.2f}" in text
