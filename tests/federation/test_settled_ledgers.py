"""Ledgers of a settlement that a dishonest server made of an honest run, signed with its own key."""

import json
import shutil

import pytest

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, content, exact, number
from fedmerit.protocol.direction import Manifest, scale_of
from fedmerit.protocol.messages import pack, unpack
from fedmerit.protocol.settlement import last_round
from fedmerit.verify import verify_copy
from forging import body_of, copy_for, written
from linear_federation import LIAR, Federation

FRIEND, VICTIM = "client-3", "client-4"


def settled(home, *, scoring=None, settlement=None, **given):
    settings = {"scoring": {"method": "settled", **(scoring or {})}, "settlement": settlement or {}}
    return Federation(home, 5, 2, settings=settings, **given)


def over_stated(federation):
    """Let a member state five too many."""

    def lie(answer):
        body = json.loads(unpack(answer, "")[0])
        key = next(iter(body["rounds"]))
        body["rounds"][key] = str(int(body["rounds"][key]) + 5)
        return pack([canonical(body), federation.keys[LIAR].sign(content(LIAR, "statement", body))])

    federation.answering("state", 2, lie)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that are over, by name: honest ones, some with a liar, with a missing member, ended early."""
    home = tmp_path_factory.mktemp("settled")
    coordinator = {"visibility": "coordinator"}
    settled(home / "honest").run()
    settled(home / "withheld", scoring=coordinator).run()
    for name, given in (("liar", {}), ("liar-run", {"settlement": {"detail": "run"}})):
        federation = settled(home / name, **given)
        over_stated(federation)
        federation.run()
    for name, scoring in (("missing", {}), ("missing-withheld", coordinator)):
        federation = settled(home / name, scoring=scoring)
        federation.reaches = lambda who, ask: (who, ask.exchange) != (VICTIM, "state")
        federation.run()
    federation = settled(home / "early")
    with federation.begun():
        federation.round(1)
        federation.finish()
    return home


def verified(runs, tmp_path, name, change, *, own=False, keys=None):
    """What `verify` says of a copy after ``change(kind, body)``, which returns whether the record stays.

    Nobody has signed the end: a server can withhold that. Who countersigned something else has not.
    """
    home = shutil.copytree(runs / name, tmp_path / name)
    changed = []

    def tell(ledger, records):
        for record in records:
            body = body_of(record)
            before = body_of(record)
            stays = record.kind != "seen" and change(record.kind, body) is not False
            if before != body and record.kind == "settled":
                changed.append(record)
            if stays and not (record.kind == "countersigned" and changed):
                yield record.author, record.kind, body, record.signature
            if record.kind == "statement" and (more := change("after-statement", body)):
                yield SERVER, "verdict", more, b""

    written(home, tell, keys, anew=())
    return list(verify_copy(copy_for(home, LIAR, own=own)))


@pytest.mark.parametrize(
    ("name", "own"),
    [("honest", False), ("withheld", True), ("liar", False), ("liar-run", False), ("missing", False),
     ("missing-withheld", True), ("early", False)],
)  # fmt: skip
def test_what_was_not_changed_verifies(runs, tmp_path, name, own):
    lines = verified(runs, tmp_path, name, lambda kind, body: None, own=own)
    assert any(line.startswith("settlement: ") and "equation" in line for line in lines)


# ------------------------------------------------------------------------------------------------- verdicts


def forged(numbers, named=None):
    """A verdict on round 1 after the last statement; ``numbers`` changes everybody's as stated."""
    stated = {}

    def change(kind, body):
        if kind == "after-statement":
            stated[len(stated)] = int(body["rounds"]["1"])
            if len(stated) == 5:
                values = {f"client-{at}": value for at, value in stated.items()}
                numbers(values)
                return {
                    "settlement": body["settlement"], "round": 1, "named": named or {}, "silent": [],
                    "values": {who: str(value) for who, value in values.items()}, "evidence": {},
                }  # fmt: skip
        if kind == "settled":
            body["named"] = list(named or {})
        return None

    return change


def to_a_friend(values):
    values[FRIEND] += 1000
    values[VICTIM] -= 1000


@pytest.mark.parametrize("named", [None, {FRIEND: "stated", VICTIM: "stated"}])
def test_a_verdict_where_the_equation_holds_is_refused(runs, tmp_path, named):
    """Members countersign the sums, not the verdicts: a silent one would move money."""
    with pytest.raises(LedgerError, match=r"another number than it stated|whose equation does not fail"):
        verified(runs, tmp_path, "honest", forged(to_a_friend, named))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: to_a_friend(numbers := _read(body)) or _put(body, numbers), "another number than it"),
        (lambda body: body["values"].update({LIAR: str(int(body["values"][LIAR]) + 1)}), "do not add up"),
        (lambda body: body["named"].update({SERVER: "sum"}), "do not add up"),
        (lambda body: body["named"].update({LIAR: "greed"}), "names 'client-1' for 'greed'"),
        (lambda body: body["named"].update({LIAR: "sum"}), "names 'client-1' for 'sum'"),
        (lambda body: body["named"].update({"nobody": "stated"}), "who is not in the sum"),
        (lambda body: body.update(round=2), "another number than it stated"),
    ],
)
def test_a_verdict_that_no_evidence_can_give_is_refused(runs, tmp_path, change, words):
    def verdict(kind, body):
        if kind == "verdict":
            change(body)
        if kind == "settled" and "nobody" in words:
            body["named"].append("nobody")

    with pytest.raises(LedgerError, match=words):
        verified(runs, tmp_path, "liar", verdict)


def _read(body):
    return {name: int(value) for name, value in body["values"].items()}


def _put(body, numbers):
    body["values"] = {name: str(value) for name, value in numbers.items()}


def test_the_verdict_on_the_run_cannot_be_left_out(runs, tmp_path):
    def change(kind, body):
        if kind == "settled":
            body["named"] = []
        return False if kind == "verdict" and body["round"] == 0 else None

    with pytest.raises(LedgerError, match="lacks the verdict on the whole run"):
        verified(runs, tmp_path, "liar-run", change)


# ---------------------------------------------------------------------------------------- sums and the window


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.update(sum=str(int(one["sum"]) + 1)),
        lambda one: one.update(product=str(int(one["product"]) + 1), sum=str(int(one["sum"]) + 1)),
        lambda one: one.update(sum=None, holds=False),
        lambda one: one.update(holds=1),
        lambda one: one.update(participants=one["participants"][:-1]),
        lambda one: one.update(round=7),
        lambda one: one.clear(),
    ],
)
def test_equations_whose_statements_are_withheld_still_follow_from_the_manifest(runs, tmp_path, change):
    def settle(kind, body):
        if kind == "settled":
            change(body["rounds"][0])

    with pytest.raises(LedgerError, match=r"\(settled by server\)"):
        verified(runs, tmp_path, "withheld", settle, own=True)


def test_a_sum_with_a_member_missing_is_none_also_where_statements_are_withheld(runs, tmp_path):
    def settle(kind, body):
        if kind == "settled":
            body["rounds"][0].update(sum=body["rounds"][0]["product"], holds=True)

    with pytest.raises(LedgerError, match="does not follow from the statements"):
        verified(runs, tmp_path, "missing-withheld", settle, own=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"final": True}, "closed without a window"),
        ({"final": True, "closes": 1}, "closed without a window"),
        ({"final": 0}, "whether it is final"),
        ({"closes": None}, "without a day on which it closes"),
        ({"closes": "never"}, "whether it is final"),
    ],
)
def test_a_window_is_opened_before_it_is_closed(runs, tmp_path, change, words):
    def settle(kind, body):
        if kind == "settled":
            body.update(change)

    with pytest.raises(LedgerError, match=words):
        verified(runs, tmp_path, "missing", settle)


# ------------------------------------------------------------------------------------------------ other runs


def test_signatures_under_the_last_round_of_another_run_do_not_count(runs, tmp_path):
    """The keys of members sign here what they signed in another run of as many rounds."""
    federation = settled(tmp_path / "other", ledger=False)

    def replayed(kind, body):
        if kind == "last":
            body.update(last_round("f" * 32, 1))

    with pytest.raises(LedgerError, match="the last round of another run"):
        verified(runs, tmp_path, "early", replayed, keys=federation.keys)


# --------------------------------------------------------------------------------------- one record at a time


def rows_of(records):
    """All records but those under the end, as lists that tests change."""
    kept = (record for record in records if record.kind != "seen")
    return [[record.author, record.kind, body_of(record), record.signature] for record in kept]


def at(rows, kind, place=0):
    return [number for number, row in enumerate(rows) if row[1] == kind][place]


def doubled(kind):
    return lambda rows: rows.insert(at(rows, kind, -1) + 1, [*rows[at(rows, kind)]])


def put(kind, **values):
    return lambda rows: rows[at(rows, kind)][2].update(values)


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


def moved_window(rows):
    told = rows[at(rows, "settled")]
    rows.append([SERVER, "settled", {**told[2], "closes": told[2]["closes"] - 1}, b""])


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("early", put("last", last=2), "signs another last round"),
        ("early", late_last, "comes after the pool was opened"),
        (
            "early",
            lambda rows: rows.pop(at(rows, "last")) and rows.pop(at(rows, "last")),
            "members signed and",
        ),
        ("honest", doubled("opening"), "a second time"),
        ("honest", put("opening", settlement="0" * 64), "does not match its digest"),
        ("honest", manifest(lambda made: made.update(run="f" * 32)), "manifest is of another run"),
        ("honest", manifest(lambda made: made.update(utility="rmse")), "settles rmse, expected fit"),
        ("honest", manifest(lambda made: made["rounds"].pop()), "not those with a sum"),
        (
            "honest",
            manifest(lambda made: made["rounds"][1].update(x="0" * 64)),
            "not the one that was summed",
        ),
        ("honest", manifest(lambda made: made["rounds"][1]["participants"].pop()), "not the one that was"),
        ("honest", put("agreed", run="f" * 32), "belongs to another run"),
        ("honest", put("agreed", settlement="0" * 64), "or to another one"),
        ("honest", doubled("agreed"), "agreed or stated before"),
        ("honest", few("agreed"), "states though 3 members agreed"),
        ("honest", doubled("statement"), "has stated before"),
        ("missing", after_the_close, "comes after the settlement was closed"),
        ("honest", doubled("settled"), "comes after the settlement was closed"),
        ("missing", moved_window, "closes earlier than was said before"),
        ("honest", put("settled", missing=[VICTIM]), "does not follow from the statements"),
        ("honest", put("countersigned", sums="0" * 64), "countersigns something else"),
        ("honest", put("countersigned", run="f" * 32), "another run"),
        ("honest", doubled("countersigned"), "or a second time"),
        ("liar", doubled("verdict"), "second verdict on its round"),
        ("liar", lambda rows: rows[at(rows, "verdict")][2]["values"].update(nobody="1"), "not in the sum"),
        ("liar", lambda rows: rows[at(rows, "verdict")][2].update(silent=["nobody"]), "not in the sum"),
    ],
)
def test_a_ledger_with_one_false_record_is_refused(runs, tmp_path, name, edit, words):
    """Members sign here whatever is asked of them: a check that rests on their signatures alone fails."""
    home = shutil.copytree(runs / name, tmp_path / "forged")
    keys = settled(tmp_path / "keys", ledger=False).keys

    def tell(ledger, records):
        rows = rows_of(records)
        ended = at(rows, "end")
        rows.append(rows.pop(ended))
        edit(rows)
        return iter(rows)

    written(home, tell, keys, anew=())
    with pytest.raises(LedgerError, match=words):
        list(verify_copy(copy_for(home, LIAR)))
