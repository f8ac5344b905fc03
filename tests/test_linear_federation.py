"""The federation that tests of the protocol are written on is a real one, and small."""

import subprocess
import sys

import numpy as np
import pytest

from linear_federation import LIAR, STAGES, Federation


def said(federation):
    return [{name: report.measured for name, report in one.reports.items()} for one in federation.rounds]


@pytest.mark.parametrize("options", [{}, {"masks": False}, {"ledger": False}, {"files": True}], ids=str)
def test_one_seed_gives_the_same_reports_however_it_is_run(tmp_path, options):
    lost = [("client-3", 1, "masked"), (LIAR, 2, "report")]
    plain = Federation(tmp_path / "plain", lost=lost).run()
    (tmp_path / "other").mkdir()
    other = Federation(tmp_path / "other", lost=lost, **options).run()
    assert said(other) == said(plain)
    assert [{*one} for one in said(plain)] == [{"client-0", "client-1", "client-2"}, {*plain.names} - {LIAR}]
    assert np.array_equal(other.models, plain.models)
    different = Federation(tmp_path / "seed", lost=lost, seed=1, **{**options, "files": False}).run()
    assert said(different) != said(plain)


@pytest.mark.parametrize("masks", [True, False])
def test_what_it_writes_verifies_and_it_learns(tmp_path, masks):
    federation = Federation(tmp_path, 3, 4, masks=masks)
    federation.run()
    assert "rounds: 4 of 4, 0 aborted" in federation.verified()
    values = [one.body["utilities"]["fit"] for one in federation.rounds]
    assert float.fromhex(values[-1]["grand"]) > float.fromhex(values[0]["empty"])


def test_many_rounds_without_a_ledger(tmp_path):
    federation = Federation(tmp_path, 3, 60, masks=False, ledger=False).run()
    assert [len(one.reports) for one in federation.rounds] == [3] * 60
    assert not list(tmp_path.iterdir())


def test_hooks_see_every_message_there_and_back(tmp_path):
    federation, there, back = Federation(tmp_path, 3, 1, ledger=False), [], []
    federation.before.append(lambda name, ask: there.append((name, ask.exchange)))
    federation.after.append(lambda name, ask, answer: back.append((name, ask.exchange)) or answer)
    federation.run()
    exchanges = ["join", *("train" if stage == "masked" else stage for stage in STAGES), "close"]
    assert there == back == [(name, kind) for kind in exchanges for name in federation.names]
    assert [(one.member, one.ask.exchange) for one in federation.passed] == there


def test_it_needs_neither_torch_nor_flower():
    code = (
        "import sys, tempfile, pathlib; from linear_federation import Federation; "
        "f = Federation(pathlib.Path(tempfile.mkdtemp()), 3, 1).run(); f.verified(); "
        "print(sorted({'torch', 'flwr', 'pandas', 'altair'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "[]", done.stderr
