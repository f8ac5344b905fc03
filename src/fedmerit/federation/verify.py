"""Check a finished or interrupted run from its folder alone."""

from __future__ import annotations

import csv
import io
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmerit.accumulate import accumulate
from fedmerit.config import Config, difference, from_dict, load
from fedmerit.errors import ConfigError, FedmeritError, LedgerError
from fedmerit.federation.journal import (
    Round,
    first_body,
    reading,
    rounds_of,
    score_files,
    scores_document,
)
from fedmerit.ledger import SERVER, Ledger, Record, number, verify_chain

TOLERANCE = 1e-12


def verify_folder(path: str | Path) -> Iterator[str]:
    """Check a run folder; yields what was found, line by line.

    That is: chain and signatures; that records fit together; the scores stated in the ledger; and that
    ``config.toml``, ``scores.json`` and ``scores.csv`` say what the ledger says.

    Raises:
        LedgerError: names the first record, or the place in a file, that is wrong.
    """
    path = Path(path)
    with Ledger(path / "ledger.sqlite", read_only=True) as ledger:
        signed = verify_chain(ledger, keys_of)
        yield f"ledger: {len(ledger)} records, chain {'and signatures ' if signed else ''}in order"
        if signed:
            yield "rehearsal: one process held all keys, so signatures prove order, not who spoke"
        else:
            yield "unsigned: the run had secure aggregation off, so anyone could have written it"
        run, config = _run(ledger, signed=signed)
        rounds = rounds_of(ledger)
        _check_stated(ledger, rounds, config)
        head = ledger.head
    _check_config(path, config)
    aborted = sum(bool(one.aborted) for one in rounds)
    yield f"rounds: {len(rounds)} of {config.training.rounds}, {aborted} aborted"
    if rounds or (path / "scores.json").exists():
        _check_files(path, rounds, config)
        yield "scores: follow from the reports in the ledger"
    else:
        yield "scores: none yet"
    if run["analysis"]:
        yield "analysis: plain updates were looked at"
    yield f"head: {head}"


def keys_of(record: Record) -> Mapping[str, bytes]:
    """Public keys by author, from a ledger's first record."""
    if record.kind != "run" or record.author != SERVER:
        raise LedgerError(
            f"record {record.seq} ({record.kind} by {record.author}): expected the run's first record"
        )
    keys = record.body.get("keys")
    try:
        return {} if keys is None else {name: bytes.fromhex(key) for name, key in keys.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise LedgerError(f"record {record.seq} (run): its keys cannot be read: {error}") from error


def _run(ledger: Ledger, *, signed: bool) -> tuple[Mapping[str, Any], Config]:
    """The first record and the config in it, if they agree with each other and with the ledger."""
    run = first_body(ledger, "run")
    with reading(next(ledger.records("run"))):
        try:
            config = from_dict(tomllib.loads(run["config"]))
        except (ConfigError, tomllib.TOMLDecodeError) as error:
            raise LedgerError(f"its config cannot be read: {error}") from error
        if config.hash() != run["config_hash"]:
            raise LedgerError("its config is not the one of its hash")
        if list(config.clients) != run["members"]:
            raise LedgerError("its members are not those of its config")
        if config.secure_aggregation.enabled != signed:
            state = "on, but the ledger is unsigned" if not signed else "off, but the ledger is signed"
            raise LedgerError(f"its config has secure aggregation {state}")
        if signed and set(run["keys"]) != {SERVER, *config.clients}:
            raise LedgerError("its keys are not those of the server and the members")
        if not isinstance(run["analysis"], bool):
            raise LedgerError("it does not say whether it is an analysis")
    return run, config


def _check_config(path: Path, config: Config) -> None:
    try:
        there = load(path / "config.toml")
    except ConfigError as error:
        raise LedgerError(f"config.toml is damaged: {error}") from error
    if there.hash() != config.hash():
        raise LedgerError(
            f"{path / 'config.toml'}: not the config in the ledger: {difference(there, config)}"
        )


def _check_stated(ledger: Ledger, rounds: Sequence[Round], config: Config) -> None:
    """The cumulative scores that the server stated each round, computed anew."""
    for record in ledger.records("scores"):
        with reading(record):
            upto = [one for one in rounds if one.number <= record.body["round"]]
            for utility, stated in record.body["cumulative_alpha"].items():
                scored = [found for one in upto if (found := one.to_reports(utility)) is not None]
                again = accumulate(scored, missing=config.scoring.missing).as_dict()
                _compare(
                    {name: number(value) for name, value in stated.items()},
                    again,
                    f"cumulative alpha of {utility}",
                )


def _check_files(path: Path, rounds: Sequence[Round], config: Config) -> None:
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
    _compare(there, json.loads(files["scores.json"]), "scores.json")
    _compare(_table(path / "scores.csv"), _rows(files["scores.csv"].decode()), "scores.csv line")


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
        return float(text)
    except ValueError:
        return text


def _compare(there: Any, here: Any, where: str) -> None:
    """Equal, numbers up to a relative 1e-12; the error names the first place that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        odd = [key for key in (*here, *there) if (key in here) != (key in there)]
        for key in here:
            if key in there:
                _compare(there[key], here[key], f"{where}.{key}")
        if odd:
            raise LedgerError(f"{where}.{odd[0]}: {'not in the ledger' if odd[0] in there else 'missing'}")
    elif isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            raise LedgerError(f"{where}: holds {len(there)} entries, the reports give {len(here)}")
        for k, (one, other) in enumerate(zip(there, here, strict=True)):
            _compare(one, other, f"{where}[{k}]")
    elif isinstance(there, float) and isinstance(here, float):
        if not math.isclose(there, here, rel_tol=TOLERANCE, abs_tol=0.0):
            raise LedgerError(f"{where}: states {there!r}, the reports give {here!r}")
    elif there != here or isinstance(there, bool) != isinstance(here, bool):
        raise LedgerError(f"{where}: states {there!r:.60}, the reports give {here!r:.60}")
