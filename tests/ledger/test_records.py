"""What a run between machines leaves on record: joins, signed heads, kept heads, copies for members."""

import shutil

import numpy as np
import pytest

from fedmerit.identity import SERVER, load_key
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.rounds import sees
from fedmerit.verify import verify_copy, verify_folder
from forging import body_of, written
from linear_federation import LIAR, Federation
from refusals import found_wrong
from runs import record_decision

NAMES = tuple(f"client-{i}" for i in range(4))


@pytest.fixture
def home(finished):
    return finished


def heads_of(home, name):
    (path,) = (home / f"{name}.pem.state").glob("*/heads")
    return path


def anew(home, change, *, sign_as=(SERVER,)):
    """The ledger rewritten: ``change`` gives the author's new body, or None to leave the record out."""
    heads = {}

    def tell(ledger, records):
        for record in records:
            if (body := change(record, body_of(record))) is None:
                continue
            if record.kind == "outcome":
                body["head"] = heads[body["head"]]
            yield record.author, record.kind, body, record.signature
            heads[record.digest.hex()] = ledger.head

    written(home, tell, {name: load_key(home / f"{name}.pem") for name in {*sign_as} - {SERVER}}, anew=())


@pytest.mark.parametrize("name", NAMES)
def test_every_member_finds_all_heads_it_was_ever_shown(home, name):
    lines = list(verify_folder(home / "run", heads=heads_of(home, name), member=name))
    assert any(line.startswith("kept: all 3 heads") for line in lines)
    assert "kept: trained in 2 rounds, from the models that the ledger states" in lines
    assert "kept: 2 of 2 reports are in the ledger, on the outcomes that the member was told" in lines
    assert sum(line.startswith("kept: ") for line in lines) == 3
    assert any(line.startswith(f"{name}: last signed the head of record") for line in lines)
    careful = "members: 4 of 4 joined, each with its own key; this cannot show whose machines they were"
    assert careful in lines
    assert any(line.startswith("heads: 4 of 4 members signed the head of record") for line in lines)
    assert not any("rehearsal" in line for line in lines)


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
    found_wrong(
        r"heads: line 11: head [0-9a-f]{64} is not on this chain",
        verify_folder,
        home / "run",
        heads=heads_of(home, "client-1"),
    )


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
    found_wrong(told, verify_folder, tmp_path / "run", heads=heads_of(tmp_path, LIAR))
    assert list(verify_folder(tmp_path / "run", heads=heads_of(tmp_path, "client-2")))


def test_a_report_that_the_server_left_out_is_missed_by_its_author(tmp_path):
    federation = Federation(tmp_path, files=True)
    federation.answering("report", 1, lambda data: b"")
    federation.run()
    lines = list(verify_folder(tmp_path / "run", heads=heads_of(tmp_path, LIAR)))
    assert "kept: 1 of 2 reports are in the ledger, on the outcomes that the member was told" in lines
    assert any(line.startswith("kept: the report of round 1 is not in the ledger") for line in lines)


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
        (lambda body: body.clear(), "Object missing required field"),
    ],
)
def test_a_join_to_something_else_is_named(home, edit, message):
    def other(record, body):
        if (record.kind, record.author) == ("join", "client-2"):
            edit(body)
        return body

    anew(home, other, sign_as=(SERVER, "client-2"))
    found_wrong(rf"\(join by client-2\): {message}", verify_folder, home / "run")


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
