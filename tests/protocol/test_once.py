"""What is computed once for each round or record, however many there are."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import command_line
from fedmerit.config import from_dict
from fedmerit.files.documents import RoundEntry, as_csv, as_json, document
from fedmerit.identity import exact
from fedmerit.ledger import chain, run
from fedmerit.ledger.rounds import running, stated
from fedmerit.protocol import direction, outcome, settlement
from fedmerit.report import source
from fedmerit.report.page.html import page
from fedmerit.scoring import scores
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.types import Reports
from fedmerit.secagg import client
from fedmerit.storage import recorder
from linear_federation import Federation
from runs import records_of

ROUNDS = 5


@pytest.fixture
def counted(monkeypatch):
    """Return a function that counts the calls of a name in a module or a class."""
    found = Counter()

    def count(where, name):
        made = getattr(where, name)

        def counting(*given, **named):
            found[name] += 1
            return made(*given, **named)

        monkeypatch.setattr(where, name, counting)
        return found

    return count


@pytest.mark.parametrize("visibility", ["all", "coordinator"])
def test_a_run_and_its_check_score_every_round_once(tmp_path, counted, visibility):
    """Each time, sums over all rounds so far are stated or checked; the rounds in them are not made anew."""
    settings = {"scoring": {"visibility": visibility}}
    federation = Federation(tmp_path, rounds=ROUNDS, masks=False, settings=settings)
    found = counted(outcome, "Reports")
    counted(recorder, "round_object")
    counted(scores, "_alpha")
    federation.run()
    assert found == {
        "Reports": ROUNDS,
        "round_object": ROUNDS,
        "_alpha": 3 * ROUNDS,
    }  # ALPHA, FP, EE, SURPLUS
    found.clear()
    federation.verified()
    assert found == {"Reports": ROUNDS, "round_object": ROUNDS, "_alpha": 3 * ROUNDS}


def test_a_member_checks_every_list_of_a_round_once(tmp_path, counted):
    """It looks at the list of shares before it trains, and answers it afterwards."""
    found = counted(client, "open_broadcast")
    federation = Federation(tmp_path, rounds=1).run()
    assert found == {"open_broadcast": 4 * len(federation.names)}  # advertise, share, masked, check


def test_members_of_a_process_read_the_manifest_once(tmp_path, counted):
    """They are asked about every round in it."""
    found = counted(direction.Manifest, "from_body")
    settings = {"scoring": {"method": "settled"}}
    Federation(tmp_path, rounds=ROUNDS, masks=False, settings=settings).run()
    assert found == {"from_body": 2}  # one member, and the server, which reads its ledger


def test_the_equations_of_an_account_are_made_once(tmp_path, counted):
    found, made = counted(settlement, "equations"), []
    for rounds in (2, ROUNDS):
        settings = {"scoring": {"method": "settled"}}
        federation = Federation(tmp_path / str(rounds), rounds=rounds, masks=False, settings=settings).run()
        found.clear()
        federation.verified()
        made.append(found["equations"])
    assert made[0] == made[1]


def test_a_page_numbers_the_settled_rounds_once(tmp_path, counted):
    """It asks for them with every number that it shows."""
    settings = {"scoring": {"method": "settled"}}
    federation = Federation(tmp_path, rounds=ROUNDS, masks=False, settings=settings).run()
    found = counted(source, "replace")
    page(federation.folder)
    assert found["replace"] <= 2 * ROUNDS


class Drawn:
    """A round of a ledger, as far as sums over rounds look at it."""

    def __init__(self, reports: Reports) -> None:
        self.aborted, self.reports, self.withheld = "", dict.fromkeys(reports.clients), ()
        self.heard = (*self.reports,)
        self._reports = reports

    def to_reports(self, utility: str) -> Reports:
        return self._reports


def drawn(seed: int, count: int) -> list[Reports]:
    """Return rounds in which members come and go."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(1, count + 1):
        here = sorted(rng.permutation(6)[: rng.integers(2, 7)].tolist())
        columns = {
            name: rng.normal(size=len(here)) * 10.0 ** rng.integers(-9, 9) for name in ("alone", "without")
        }
        empty, grand = rng.normal(size=2).tolist()
        clients = [f"client-{i}" for i in here]
        found.append(Reports(empty=empty, grand=grand, clients=clients, round=number, **columns))
    return found


@pytest.mark.parametrize("missing", ["zero", "own-mean"])
@given(seed=st.integers(0, 1000), count=st.integers(1, 12))
def test_running_sums_are_to_the_bit_those_of_all_rounds_at_once(missing, seed, count):
    rounds = drawn(seed, count)
    sums = running((), from_dict({"scoring": {"utilities": ["fit"]}, "payment": {"missing": missing}}))
    for place, reports in enumerate(rounds, start=1):
        sums["fit"].add(Drawn(reports))
        whole = accumulate(rounds[:place], missing=missing)
        assert stated(sums) == {"fit": {name: exact(value) for name, value in whole.as_dict().items()}}
        assert sums["fit"].gain == whole.gain
        assert [sums["fit"].of(name) for name in whole.clients] == whole.values.tolist()
    assert sums["fit"].of("nobody") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON))
def test_the_text_of_a_document_is_that_of_the_standard_library(content):
    assert as_json(content) == json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def test_a_document_of_entries_has_the_same_text():
    content = document(drawn(0, 3))
    kept = {**content, "rounds": [RoundEntry(one) for one in content["rounds"]]}
    for _ in range(2):  # made, and made before
        assert as_json(kept) == as_json(content)
        assert as_json({"a": kept}) == as_json({"a": content})
        assert as_csv(kept) == as_csv(content)
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"a": [float("nan")]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    settings = {"scoring": {"method": "both"}}
    return Federation(tmp_path_factory.mktemp("once"), rounds=2, settings=settings).run().folder


@pytest.mark.parametrize(
    "command", [("score",), ("rewards", "--budget", "100"), ("page",), ("rewards", "--budget", "200")]
)
def test_one_run_read_is_one_pass(folder, monkeypatch, command):
    there, parsed, folded = len(records_of(folder)), Counter(), []
    parse, begin = chain.parsed_record, run._Fold.begun.__func__

    def counted(seq, *cells):
        parsed[seq] += 1
        return parse(seq, *cells)

    def counted_fold(cls, *given):
        folded.append(given)
        return begin(cls, *given)

    monkeypatch.setattr(chain, "parsed_record", counted)
    monkeypatch.setattr(run._Fold, "begun", classmethod(counted_fold))
    name, *options = command
    found = command_line.call(name, folder, *options)
    assert found.exit_code == 0, found.output
    assert parsed == Counter(range(1, there + 1))
    assert len(folded) == 1
