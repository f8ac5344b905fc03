"""Ledgers that a dishonest server made of an honest run, signed with its own key."""

import shutil

import pytest

from fedmerit.identity import SERVER, exact, load_key, number
from fedmerit.verify import verify_copy, verify_folder
from forging import body_of, copy_for, written
from linear_federation import LIAR, Federation
from refusals import found_wrong

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
