"""What a run between machines leaves on record: joins, signed heads, kept heads, copies for members."""

import json
import shutil

import numpy as np
import pytest

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, content, load_key
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.records import sees
from fedmerit.verify import record_decision, verify_copy, verify_folder
from linear_federation import LIAR, Federation
from raising import raises

NAMES = tuple(f"client-{i}" for i in range(4))


@pytest.fixture
def home(finished):
    return finished


def heads_of(home, name):
    (path,) = (home / f"{name}.pem.state").glob("*/heads")
    return path


def anew(home, change, *, sign_as=(SERVER,)):
    """The ledger rewritten: ``change`` gives the author's new body, or None to leave the record out."""
    keys = {name: load_key(home / f"{name}.pem") for name in NAMES}
    keys[SERVER] = load_key(home / "run" / "keys" / "server.pem")
    path = home / "run" / "ledger.sqlite"
    with Ledger(path, read_only=True) as ledger:
        records = list(ledger.records())
    path.unlink()
    heads = {}
    with Ledger(path) as ledger, ledger.transaction():
        for record in records:
            body = change(record, json.loads(json.dumps(record.body)))
            if body is None:
                continue
            if record.kind == "outcome":
                body["head"] = heads[body["head"]]
            signature = record.signature
            if record.author in sign_as:
                signature = keys[record.author].sign(content(record.author, record.kind, body))
            ledger.append(record.author, record.kind, body, signature=signature, seal=keys[SERVER].sign)
            heads[record.digest.hex()] = ledger.head


def test_who_joined_and_who_signed_the_end_is_told_and_nobody_calls_it_a_rehearsal(home):
    lines = list(verify_folder(home / "run"))
    careful = "members: 4 of 4 joined, each with its own key; this cannot show whose machines they were"
    assert careful in lines
    assert any(line.startswith("heads: 4 of 4 members signed the head of record") for line in lines)
    assert not any("rehearsal" in line for line in lines)


@pytest.mark.parametrize("terms", [{"engine": None}, {"engine": "flower"}], ids=["before", "today"])
def test_ledgers_whose_terms_name_no_engine_are_read_with_the_careful_words(tmp_path, terms):
    federation = Federation(tmp_path, rounds=1, terms=terms).run()
    joins = [record for record in federation.records if record.kind == "join"]
    assert all(("engine" in record.body["terms"]) is bool(terms["engine"]) for record in joins)
    careful = "members: 4 of 4 joined, each with its own key; this cannot show whose machines they were"
    assert careful in federation.verified()


@pytest.mark.parametrize("name", NAMES)
def test_every_member_finds_all_heads_it_was_ever_shown(home, name):
    lines = list(verify_folder(home / "run", heads=heads_of(home, name), member=name))
    assert any(line.startswith("kept: all 3 heads") for line in lines)
    assert "kept: trained in 2 rounds, from the models that the ledger states" in lines
    assert "kept: 2 of 2 reports are in the ledger, on the outcomes that the member was told" in lines
    assert sum(line.startswith("kept: ") for line in lines) == 3
    assert any(line.startswith(f"{name}: last signed the head of record") for line in lines)


def test_a_server_that_writes_another_history_is_found_by_a_members_file(home):
    """Everything is redone and signed, even with stolen keys of all members: only what was kept tells."""
    heads = {}

    def other(record, body):
        if record.kind == "round" and body["round"] == 2:
            body["checkpoint"] = "00" * 32
        if record.kind == "seen":
            body["head"] = heads.get("end", body["head"])
        return body

    shutil.rmtree(home / "run" / "checkpoints")  # which would tell
    anew(home, other)  # to learn the new head
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        heads["end"] = next(ledger.records("end")).digest.hex()
    anew(home, other, sign_as=(SERVER, *NAMES))
    assert list(verify_folder(home / "run"))
    with pytest.raises(LedgerError, match=r"heads: line 11: head [0-9a-f]{64} is not on this chain"):
        list(verify_folder(home / "run", heads=heads_of(home, "client-1")))


def test_a_server_that_tells_one_member_another_model_is_found_by_that_members_file(tmp_path):
    """The other M is within the bound, so the member reports on it; the ledger cannot hold that report."""
    federation = Federation(tmp_path, files=True)

    def nudged(body):
        body["sum"] = body["sum"] + np.uint32(1)

    federation.telling("report", 1, nudged)
    federation.run()
    assert federation.verified()  # to everybody else the ledger is in order
    assert LIAR not in federation.rounds[0].reports
    told = r"line 5: the server told this member an outcome of round 1 .* but wrote a different one"
    with pytest.raises(LedgerError, match=told):
        list(verify_folder(tmp_path / "run", heads=heads_of(tmp_path, LIAR)))
    assert list(verify_folder(tmp_path / "run", heads=heads_of(tmp_path, "client-2")))


def test_a_report_that_the_server_left_out_is_missed_by_its_author(tmp_path):
    federation = Federation(tmp_path, files=True)
    federation.answering("report", 1, lambda data: b"")
    federation.run()
    lines = list(verify_folder(tmp_path / "run", heads=heads_of(tmp_path, LIAR)))
    assert "kept: 1 of 2 reports are in the ledger, on the outcomes that the member was told" in lines
    assert any(line.startswith("kept: the report of round 1 is not in the ledger") for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "1",
        "1 report 00",
        "one " + "0" * 64,
        "1 report 00 11 22",
        "1 retort 00 11",
        "1 released",
        "trained 00",
    ],
)
def test_a_kept_file_that_is_none_is_refused(home, line):
    path = heads_of(home, LIAR)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(
        LedgerError, match=r"heads: line 12: (expected a round, and then a head|a head is 64 hex)"
    ):
        list(verify_folder(home / "run", heads=path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda body: body["terms"].update(strategy="FedAdam"),
            "its author did not agree to the run's terms",
        ),
        (lambda body: body["commitment"].update(size=7), "its author did not agree to the run's test pool"),
        (lambda body: body.update(server="00" * 32), "its author did not agree to the run's server key"),
        (lambda body: body.update(run="00"), "its author did not agree to the run's identifier"),
        (lambda body: body.clear(), "not a record of its kind"),
    ],
)
def test_a_join_to_something_else_is_named(home, edit, message):
    def other(record, body):
        if (record.kind, record.author) == ("join", "client-2"):
            edit(body)
        return body

    anew(home, other, sign_as=(SERVER, "client-2"))
    with pytest.raises(LedgerError, match=rf"\(join by client-2\): {message}"):
        list(verify_folder(home / "run"))


def test_a_join_that_its_member_did_not_sign_is_named(home):
    def other(record, body):
        return body | (
            {"address": "elsewhere"} if (record.kind, record.author) == ("join", "client-2") else {}
        )

    anew(home, other)
    with raises(LedgerError, record=5, code="unsigned"):
        list(verify_folder(home / "run"))


def test_decisions_and_copies_between_machines(home):
    made, _ = record_decision(home / "run", Terms("1000.00", "fit", on_undefined="equal"))
    assert any(line.startswith("payouts: decision 1") for line in verify_folder(home / "run"))
    assert made.record > 0


@pytest.mark.parametrize("server_evaluates", [True, False])
def test_where_only_the_coordinator_sees_all_each_member_checks_its_own_copy(tmp_path, server_evaluates):
    settings = {"scoring": {"visibility": "coordinator"}}
    Federation(tmp_path, files=True, settings=settings, evaluates=server_evaluates).run()
    record_decision(tmp_path / "run", Terms("1000.00", "fit", on_undefined="equal"))
    assert list(verify_folder(tmp_path / "run"))
    for name in NAMES:
        path = tmp_path / f"{name}.jsonl"
        with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
            path.write_bytes(b"".join(exported(ledger, sees(name))))
        lines = list(verify_copy(path, member=name, heads=heads_of(tmp_path, name)))
        assert f"scores: {name}'s follow from its own reports; nobody else's were recomputed" in lines
