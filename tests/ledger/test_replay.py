"""A run is read in one pass: every record is parsed once, and folded once, whatever is made from it."""

from collections import Counter

import pytest

import command_line
from fedmerit.ledger import chain, run
from linear_federation import Federation
from runs import records_of


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
    for page in folder.glob("page*.html"):
        page.unlink()  # `rewards` writes it anew from another reading

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
