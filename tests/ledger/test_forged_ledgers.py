"""Ledgers that a dishonest server made of an honest run, signed with its own key."""

import json
import shutil
from dataclasses import replace

import pytest

from attacked import settling
from fedmerit.errors import UnsettledShares
from fedmerit.identity import SERVER, canonical, exact, load_key, number
from fedmerit.protocol.direction import Manifest, scale_of
from fedmerit.verify import verify_copy, verify_folder
from forging import body_of, copy_for, written
from linear_federation import LIAR, Federation
from raising import raises
from refusals import found_wrong
from runs import run_in

NAMES = tuple(f"client-{i}" for i in range(4))
SAMPLES = 20  # of the test slice


@pytest.fixture
def home(finished):
    return finished


# ------------------------------------------------------------------- v(M0) and v(M) as the server likes them


def edited(edit):
    """Records after ``edit(record, body)``, which returns False for one to leave out; none under the end."""

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            if record.kind != "seen" and edit(record, body) is not False:
                yield record.author, record.kind, body, record.signature

    return tell


def lied(change):
    """Another v(M0) and v(M) of the last round, which no head that members sign later covers."""
    return edited(lambda record, body: change(body["utilities"]["fit"]) if closes_last(record) else None)


def closes_last(record):
    return record.kind == "round" and record.body["round"] == 2


def all_of_it(used):
    used.update(empty=exact(0.0), grand=exact(1.0))


def by(much):
    return lambda used: used.update(grand=exact(number(used["grand"]) + much))


def test_what_the_server_says_it_measured_must_be_what_most_members_signed(home):
    written(home, lied(all_of_it))
    message = (
        r"^record \d+ \(round by server\): round 2: 4 of 4 members contradict the server's "
        r"v\(M0\) or v\(M\): client-0 signed v\(M0\) = 0\.\d+ of \S+, "
        r"the round is scored with 0$"
    )
    found_wrong(message, verify_folder, home / "run")


def test_machines_may_differ_by_what_processors_do_and_no_more(home):
    """A server on another processor is named and believed, also where a few samples fall otherwise."""
    far = max(1e-2, 3 / SAMPLES)
    written(home, lied(by(9e-7)))
    lines = list(verify_folder(home / "run"))
    assert "scores: follow from the reports in the ledger" in lines
    assert not any("is scored with" in line for line in lines)
    written(home, lied(by(-far * 0.98)))
    lines = list(verify_folder(home / "run"))
    assert "scores: follow from the reports in the ledger" in lines
    assert sum("is scored with" in line for line in lines) == len(NAMES)
    written(home, lied(by(-far * 0.05)))  # now more
    found_wrong(r"round 2: 4 of 4 members contradict .* signed v\(M\) = ", verify_folder, home / "run")


def test_one_or_two_members_contradict_nobody_out_of_a_ledger(home):
    """Where only two of four reported, and both measured otherwise: they are named, no more."""

    def edit(record, body):
        if closes_last(record):
            body["silent"] = list(NAMES[2:])
            all_of_it(body["utilities"]["fit"])
        return record.kind != "report" or body["round"] != 2 or record.author in NAMES[:2]

    written(home, edited(edit))
    said = [line for line in verify_folder(home / "run") if "is scored with" in line]
    assert [line.split()[2] for line in said] == list(NAMES[:2])


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_members_that_measured_otherwise_are_named_and_most_of_them_are_believed(home, liars):
    """Signed by those members themselves: who is right cannot be told, so the number of them decides."""
    away = NAMES[:liars]

    def edit(record, body):
        if record.kind == "report" and record.author in away and body["round"] == 2:
            body["measured"]["fit"]["grand"] = exact(0.125)

    written(home, edited(edit), {name: load_key(home / f"{name}.pem") for name in away})
    if 2 * liars > len(NAMES):
        found_wrong(r"round 2: 3 of 4 members contradict the server", verify_folder, home / "run")
        return
    said = [line for line in verify_folder(home / "run") if "is scored with" in line]
    assert [line.partition(" = ")[0] for line in said] == [f"round 2: {name} signed v(M)" for name in away]
    assert said[0].startswith("round 2: client-0 signed v(M) = 0.125 of fit, the round is scored with 0.")


# ------------------------------------------------------------------------ a round that was aborted, or not


def aborted(which, model=None):
    """That a round was aborted, and the run cut off after it: nothing of it needs a member's signature."""

    def tell(ledger, records):
        closed = body_of(next(record for record in records if record.kind == "round"))
        run_ = next(record for record in records if record.kind == "run").body
        for record in records:
            if record.kind == "schedule" and record.body["round"] == which:
                break
            yield record.author, record.kind, body_of(record), record.signature
        yield SERVER, "schedule", body_of(record), b""
        yield SERVER, "masked", {"round": which, "inputs": {}}, b""
        closed |= {"round": which, "included": [], "declined": [], "silent": [], "slice": None}
        closed |= {"aborted": "stage masked: 2 members left, 3 are needed", "utilities": {}}
        closed["m"] = model or (run_["m0"] if which == 1 else closed["m"])
        yield SERVER, "round", closed, b""

    return tell


@pytest.mark.parametrize("which", [1, 2])
def test_an_aborted_round_leaves_the_model_as_it_was(home, which):
    shutil.rmtree(home / "run" / "checkpoints")  # which would tell of the round that was really summed
    shutil.copytree(home, home / "other")
    written(home, aborted(which), anew=(which,))
    assert f"rounds: {which} of 2, 1 aborted" in list(verify_folder(home / "run"))
    written(home / "other", aborted(which, "ab" * 32), anew=())
    message = r"^record \d+ \(round by server\): aborted, but its model is not the last recorded one$"
    found_wrong(message, verify_folder, home / "other" / "run")


@pytest.mark.parametrize("optimiser", [False, True])
@pytest.mark.parametrize("which", [(1,), (2,), (1, 2), (3,)])
def test_rounds_that_are_really_aborted_verify(tmp_path, optimiser, which):
    """The first, one between two others, two of them, the last; also where an optimiser moves the model."""
    lost = [(name, number, "check") for name in NAMES[2:] for number in which]
    federation = Federation(tmp_path, rounds=3, lost=lost, terms={"optimiser": optimiser})
    with federation.begun():
        for number in (1, 2, 3):
            summed = federation.round(number) is not None
            federation.model = federation.model * (1.01 if optimiser and summed else 1)
        federation.finish()
    lines = federation.verified()
    assert f"rounds: 3 of 3, {len(which)} aborted" in lines
    moved = "models: the server's optimiser moves the model between rounds, so M0 cannot be checked"
    assert (moved in lines) is optimiser


@pytest.fixture
def private(tmp_path):
    """A run of which every member sees its own part alone."""
    return Federation(tmp_path, settings={"scoring": {"visibility": "coordinator"}}).run().home


def test_a_members_copy_names_its_own_difference_alone(private):
    lines = list(verify_copy(copy_for(private, LIAR, own=True)))
    assert not any("is scored with" in line for line in lines)
    written(private, lied(all_of_it))
    lines = list(verify_copy(copy_for(private, LIAR, own=True)))  # what the others signed, it cannot know
    (said,) = [line for line in lines if "is scored with" in line]
    assert said.startswith(f"round 2: {LIAR} signed v(M0) = ")
    assert f"scores: {LIAR}'s follow from its own reports; nobody else's were recomputed" in lines
    found_wrong("round 2: 4 of 4 members contradict", verify_folder, private / "run")


# ------------------------------------------------------------------------------------------ of a settlement


FRIEND, VICTIM = "client-3", "client-4"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that are over, by name: honest ones, some with a liar, with a missing member, ended early."""
    home = tmp_path_factory.mktemp("settled")
    coordinator = {"visibility": "coordinator"}
    settling(home / "honest").run()
    settling(home / "withheld", scoring=coordinator).run()
    federation = settling(home / "liar", lost=[(FRIEND, 2, "masked")])
    federation.stating(5)
    federation.run()
    for name, scoring in (("missing", {}), ("missing-withheld", coordinator)):
        federation = settling(home / name, scoring=scoring)
        federation.reaches = lambda who, ask: (who, ask.exchange) != (VICTIM, "state")
        federation.run()
    federation = settling(home / "early")
    with federation.begun():
        federation.round(1)
        federation.finish()
    return home


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Everybody's keys: members sign whatever is asked, so a check that rests on that alone finds nothing."""
    return settling(tmp_path_factory.mktemp("keys"), ledger=False).keys


@pytest.fixture
def verified(runs, keys, tmp_path):
    """What `verify` says of a copy after ``edit(rows)``, which everybody signs; the end comes last."""

    def made(name, edit=lambda rows: None):
        home = shutil.copytree(runs / name, tmp_path / name)

        def tell(ledger, records):
            rows = [
                [record.author, record.kind, body_of(record), record.signature]
                for record in records
                if record.kind != "seen"
            ]
            rows.append(rows.pop(at(rows, "end")))
            edit(rows)
            return iter(rows)

        written(home, tell, keys, anew=())
        return list(verify_copy(copy_for(home, LIAR, own=name.endswith("withheld"))))

    return made


def at(rows, kind, place=0):
    return [number for number, row in enumerate(rows) if row[1] == kind][place]


@pytest.mark.parametrize("name", ["honest", "withheld", "liar", "missing", "missing-withheld", "early"])
def test_what_was_not_changed_verifies(verified, name):
    assert any(line.startswith("settlement: ") and "equation" in line for line in verified(name))


def test_where_nobody_stated_there_are_no_scores(runs):
    account = run_in(runs / "honest" / "run").account
    with raises(UnsettledShares, code="nobody"):
        replace(account, clients=()).scores()


# ------------------------------------------------------------------------------------------------- verdicts


def to_a_friend(values):
    values[FRIEND] += 1000
    values[VICTIM] -= 1000


@pytest.mark.parametrize("named", [{}, {FRIEND: "stated", VICTIM: "stated"}])
def test_a_verdict_where_the_equation_holds_is_refused(verified, named):
    """Members countersign the sums, not the verdicts: a silent one would move money."""

    def edit(rows):
        manifest = rows[at(rows, "opening")][2]["manifest"]
        values = {row[0]: int(row[2]["rounds"]["1"]) for row in rows if row[1] == "statement"}
        body = {
            "settlement": rows[at(rows, "opening")][2]["settlement"], "round": 1, "block": None,
            "g": manifest["rounds"][0]["g"], "scale": manifest["scale"], "product": str(sum(values.values())),
            "named": named, "silent": [], "evidence": {},
        }  # fmt: skip
        to_a_friend(values)
        body["values"] = {name: str(value) for name, value in values.items()}
        rows.insert(at(rows, "statement", -1) + 1, [SERVER, "verdict", body, b""])
        rows[at(rows, "settled")][2]["named"] = [*named]

    found_wrong("another number than it stated|countersigns something else", verified, "honest", edit)


def verdict_for_a_friend(body):
    values = {name: int(value) for name, value in body["values"].items()}
    to_a_friend(values)
    body["values"] = {name: str(value) for name, value in values.items()}


def verdict_of_one_more(body):
    body["values"][LIAR] = str(int(body["values"][LIAR]) + 1)


def holding(body):
    body["rounds"][0].update(sum=body["rounds"][0]["product"], holds=True)


def to_nobody(body):
    if isinstance(body["named"], dict):
        body["named"]["nobody"] = "stated"
    else:
        body["named"].append("nobody")


def first_sum(**values):
    return lambda body: body["rounds"][0].update(values)


def shifted(*keys):
    return lambda body: body["rounds"][0].update({key: str(int(body["rounds"][0][key]) + 1) for key in keys})


def stating(kinds, change):
    def edit(rows):
        for row in rows:
            if row[1] in kinds.split():
                change(row[2])

    return edit


def doubled(kind):
    return lambda rows: rows.insert(at(rows, kind, -1) + 1, [*rows[at(rows, kind)]])


def put(kind, **values):
    return lambda rows: rows[at(rows, kind)][2].update(values)


def naming(who, why):
    return stating("verdict", lambda body: body["named"].update({who: why}))


def manifest(change):
    """Change the manifest and its digest, also in what others sign."""

    def edit(rows):
        opening = rows[at(rows, "opening")][2]
        change(opening["manifest"])
        made = opening["manifest"]
        one = [number(entry["size"]) for entry in made["rounds"]]
        made["scale"] = exact(scale_of(one))
        digest = Manifest.from_body(made).digest
        for row in rows:
            if "settlement" in row[2]:
                row[2]["settlement"] = digest

    return edit


def few(kind):
    def edit(rows):
        for _ in range(2):
            del rows[at(rows, kind)]

    return edit


def late_last(rows):
    rows.insert(at(rows, "opening") + 1, rows.pop(at(rows, "last")))


def after_the_close(rows):
    """The window closes; then the missing member states."""
    told = rows[at(rows, "settled")]
    stated = json.loads(canonical(rows[at(rows, "statement")][2]))
    rows += [
        [SERVER, "settled", {**told[2], "final": True}, b""],
        [VICTIM, "statement", stated, b""],
    ]


def table_of_another_round(rows):
    """By a member who was not in the sum of that round."""
    (table,) = (row[2] for row in rows if row[:2] == [FRIEND, "table"])
    entry = rows[at(rows, "opening")][2]["manifest"]["rounds"][1]
    table.update(round=2, g=entry["g"], product=entry["product"])


def given_up(rows):
    """Although enough members agreed."""
    body = {"settlement": rows[at(rows, "opening")][2]["settlement"], "why": "not-agreed"}
    rows.insert(at(rows, "agreed", -1) + 1, [SERVER, "unsettled", body, b""])


def moved_window(rows):
    told = rows[at(rows, "settled")]
    rows.append([SERVER, "settled", {**told[2], "closes": told[2]["closes"] - 1}, b""])


BY_SERVER = r"\(settled by server\)"
FALSE = [
    # a verdict that no evidence can give
    ("liar", stating("verdict", verdict_for_a_friend), "another number"),
    ("liar", stating("verdict", verdict_of_one_more), "do not add up"),
    ("liar", naming(SERVER, "sum"), "do not add up"),
    ("liar", naming(LIAR, "greed"), "names 'client-1' for 'greed'"),
    ("liar", naming(LIAR, "sum"), "names 'client-1' for 'sum'"),
    ("liar", stating("verdict settled", to_nobody), "who is not in the sum"),
    ("liar", put("verdict", round=2), "direction that the manifest does not have"),
    # equations whose statements are withheld still follow from the manifest
    ("withheld", stating("settled", shifted("sum")), BY_SERVER),
    ("withheld", stating("settled", shifted("product", "sum")), BY_SERVER),
    ("withheld", stating("settled", first_sum(sum=None, holds=False)), BY_SERVER),
    ("withheld", stating("settled", first_sum(holds=1)), BY_SERVER),
    ("withheld", stating("settled", lambda body: body["rounds"][0]["participants"].pop()), BY_SERVER),
    ("withheld", stating("settled", first_sum(round=7)), BY_SERVER),
    ("withheld", stating("settled", lambda body: body["rounds"][0].clear()), BY_SERVER),
    # a sum with a member missing is none
    ("missing-withheld", stating("settled", holding), "does not follow from the statements"),
    # a window is opened before it is closed
    ("missing", put("settled", final=True), "closed without a window"),
    ("missing", put("settled", final=True, closes=1), "closed without a window"),
    ("missing", put("settled", final=0), r"at `\$\.final`"),
    ("missing", put("settled", closes=None), "states no day on which it closes"),
    ("missing", put("settled", closes="never"), r"at `\$\.closes`"),
    # one record at a time
    ("early", put("last", last=2), "signs another last round"),
    ("early", late_last, "comes after the pool was opened"),
    ("early", few("last"), "members signed that this was the last"),
    ("honest", doubled("opening"), "a second time"),
    ("honest", put("opening", settlement="0" * 64), "does not match its digest"),
    ("honest", manifest(lambda made: made.update(run="f" * 32)), "manifest is of another run"),
    ("honest", manifest(lambda made: made.update(utility="rmse")), "settles rmse, expected fit"),
    ("honest", manifest(lambda made: made["rounds"].pop()), "not those with a sum"),
    ("honest", manifest(lambda made: made["rounds"][1].update(x="0" * 64)), "not the one that was"),
    ("honest", manifest(lambda made: made["rounds"][1]["participants"].pop()), "not the one that was"),
    ("early", put("last", run="f" * 32), "belongs to another run"),  # signed in a run of as many rounds
    ("honest", put("agreed", run="f" * 32), "belongs to another run"),
    ("honest", put("agreed", settlement="0" * 64), "or to another one"),
    ("honest", doubled("agreed"), "agreed or stated before"),
    ("honest", given_up, "but enough did"),
    ("liar", table_of_another_round, "its author is not in the sum"),
    ("honest", few("agreed"), "states although 3 members agreed"),
    ("honest", doubled("statement"), "has stated before"),
    ("missing", after_the_close, "comes after the settlement was closed"),
    ("honest", doubled("settled"), "comes after the settlement was closed"),
    ("missing", moved_window, "closes earlier than stated before"),
    ("honest", put("settled", missing=[VICTIM]), "does not follow from the statements"),
    ("honest", put("countersigned", sums="0" * 64), "countersigns something else"),
    ("honest", put("countersigned", run="f" * 32), "another run"),
    ("honest", doubled("countersigned"), "or a second time"),
    ("liar", doubled("verdict"), "second verdict on its direction"),
    ("liar", lambda rows: rows[at(rows, "verdict")][2]["values"].update(nobody="1"), "not in the sum"),
    ("liar", lambda rows: rows[at(rows, "verdict")][2].update(silent=["nobody"]), "not in the sum"),
]


@pytest.mark.parametrize(("name", "edit", "words"), FALSE)
def test_what_is_stated_falsely_about_a_settlement_is_refused(verified, name, edit, words):
    found_wrong(words, verified, name, edit)
