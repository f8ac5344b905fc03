"""The files of a run folder against its ledger: the config, and the scores that follow from the reports."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmerit.checks import written_number
from fedmerit.config import Config, difference, load
from fedmerit.errors import ConfigError, FedmeritError, LedgerError
from fedmerit.federation.comparing import compare
from fedmerit.federation.journal import Round, score_files, scores_document


def check_config(path: Path, config: Config) -> None:
    """``config.toml`` must be the config in the ledger."""
    try:
        there = load(path / "config.toml")
    except ConfigError as error:
        raise LedgerError(f"config.toml is damaged: {error}") from error
    if there.hash() != config.hash():
        raise LedgerError(
            f"{path / 'config.toml'}: not the config in the ledger: {difference(there, config)}"
        )


def check_scores(path: Path, rounds: Sequence[Round], config: Config) -> None:
    """``scores.json`` and ``scores.csv`` must follow from the rounds in the ledger."""
    scoring = config.scoring
    try:
        content = scores_document(rounds, config.clients, scoring.utilities, missing=scoring.missing)
    except (FedmeritError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise LedgerError(f"the reports in the ledger give no scores: {error!s:.200}") from error
    files = dict(score_files(content))
    there = _json(path / "scores.json")
    for one in (there, *there.get("companions", {}).values()):
        for extra in ("truth", "analysis"):  # computed from plain updates, not from reports
            one.pop(extra, None)
    found = there.get("rounds")
    if isinstance(found, list) and len(found) < len(rounds):
        held = f"holds {len(found)} rounds, the ledger {len(rounds)}"
        raise LedgerError(f"{path / 'scores.json'}: {held}; run --resume writes it anew")
    compare(there, json.loads(files["scores.json"]), "scores.json")
    compare(_table(path / "scores.csv"), _rows(files["scores.csv"].decode()), "scores.csv line")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise LedgerError(f"{path}: expected an object, got {type(found).__name__}")
    return found


def _table(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return _rows(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, csv.Error) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error


def _rows(text: str) -> dict[str, dict[str, Any]]:
    """Lines of a CSV file by number, cells by column; numbers as such."""
    lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    head = dict(enumerate(lines[0])) if lines else {}
    return {
        str(number): {head.get(k, f"column {k + 1}"): _cell(cell) for k, cell in enumerate(line)}
        for number, line in enumerate(lines, start=1)
    }


def _cell(text: str) -> Any:
    try:
        return written_number(text)
    except ValueError:
        return text
