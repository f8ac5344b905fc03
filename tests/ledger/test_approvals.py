"""Members sign a decision: recorded once each, checked by verify, and forged by nobody."""

import json
import shutil

import msgspec
import pytest

from command_line import call
from fedmerit.errors import FileFormatError, KeyFileError, LedgerError, StoreError
from fedmerit.identity import SERVER, content, public_key
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.rounds import sees
from fedmerit.storage.recorder import read_approval, record_approval, sign
from fedmerit.verify import verified_run, verify_copy, verify_folder
from linear_federation import Federation, write_key
from refusals import found_wrong
from runs import record_decision, sound

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
    with Ledger(made.folder / "ledger.sqlite", read_only=True) as ledger:
        copy.write_bytes(b"".join(exported(ledger, sees(D))))
    key = key_of(made.folder, D)
    file.write_bytes(msgspec.json.encode(sign(verified_run(copy, public_key(made.keys[D])), key)))
    assert record_approval(sound(made.folder), read_approval(file)).approved(1) == (D,)
    with Ledger(made.folder / "ledger.sqlite", read_only=True) as ledger:
        copy.write_bytes(b"".join(exported(ledger, sees(B))))
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
