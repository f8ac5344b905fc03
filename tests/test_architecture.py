"""The house: no import cycle, no class name twice, and a round that walks where docs/architecture.md says."""

import ast
import re
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from sources import SOURCE, nodes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.fixture(scope="module")
def imports():
    """Module -> what it imports, lazily and for type checkers too."""
    graph = grimp.build_graph("fedmerit", exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_import_cycle_at_the_top_or_lazily_or_for_type_checkers(imports):
    assert "fedmerit.ledger.run" in imports
    TopologicalSorter(imports).prepare()  # raises a CycleError, which names the modules of one


def test_a_file_is_a_concept_and_no_fragment_of_one():
    """Merge before you split: a first version had 6.7 files per 1,000 lines, and nobody found their way."""
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")]
    assert 1000 * len(lines) / sum(lines) <= 3.5


def test_no_class_name_twice():
    modules = [module for _, module in nodes()[ast.Module]]
    names = Counter(node.name for one in modules for node in one.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def stops(transport):
    """Modules of the walk in docs/architecture.md, for one of the two transports."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|", PAGE, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, len(rows) + 1)]
    found = []
    for _, named, _ in rows:
        local, _, flower = named.partition(" or ")
        found += re.findall(r"`([a-z_/]+)`", flower if transport == "flower" and flower else local)
    return found


NOT_PROTOCOL = (
    "scoring", "files/", "simulation/", "data/", "carriers/measures", "carriers/shape", "errors", "config",
    "settings", "identity", "report", "notes",
)  # fmt: skip
"""Formulas, networks, settings, names: what a round uses, and would use in any protocol."""


def walked(run):
    """Modules with protocol logic in which a function ran."""
    seen = set()

    def look(frame, event, argument):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    paths = [Path(name).relative_to(SOURCE) for name in seen if Path(name).is_relative_to(SOURCE)]
    named = {path.with_suffix("").as_posix() for path in paths}
    whole = {"secagg" if name.startswith("secagg/") else name for name in named}
    return {name for name in whole if not name.startswith(NOT_PROTOCOL)} | (named & {"simulation/run"})


def test_a_round_in_one_process_walks_where_the_page_says(tmp_path):
    from fedmerit.simulation.run import Rehearsal
    from fedmerit.storage.run_folder import Folder
    from tiny import tiny

    with Folder(tmp_path / "run", tiny()) as folder:
        rehearsal = Rehearsal(tiny(), folder)
        rehearsal.join()
        rehearsal.round(1)
        found = walked(lambda: rehearsal.round(2)) - {"protocol/direction"}  # for an analysis of its own
    told = stops("local")
    assert len(told) <= 16
    assert len(told) == len(set(told))
    assert found <= set(told)
    assert set(told) - found <= {"storage/member_state"}  # members of one process remember in memory


def test_a_round_over_flower_walks_where_the_page_says(tmp_path, monkeypatch):
    from federation_in import grid_of, make_keys
    from federation_in import run as run_over
    from fedmerit.protocol.coordinator import Coordinator

    real, found, models = Coordinator.round, set(), []

    def followed(self, *given):
        found.update(walked(lambda: models.append(real(self, *given))))
        return models[-1]

    monkeypatch.setattr(Coordinator, "round", followed)
    make_keys(tmp_path)
    run_over(tmp_path, grid_of(tmp_path))
    told = stops("flower")
    assert len(told) <= 18
    assert len(told) == len(set(told))
    assert found == set(told)
