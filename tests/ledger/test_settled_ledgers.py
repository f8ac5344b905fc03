"""Ledgers of a settlement that a dishonest server made of an honest run, signed with its own key."""

import json
import shutil
from dataclasses import replace

import pytest

from attacked import settling
from fedmerit.errors import UnsettledShares
from fedmerit.identity import SERVER, canonical, exact, number
from fedmerit.protocol.direction import Manifest, scale_of
from fedmerit.verify import verify_copy
from forging import body_of, copy_for, written
from linear_federation import LIAR
from raising import raises
from refusals import found_wrong
from runs import run_in

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

    found_wrong("another number than it stated|whose equation does not fail", verified, "honest", edit)


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
