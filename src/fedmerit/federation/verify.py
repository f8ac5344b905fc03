"""Check a finished or interrupted run from its folder alone."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmerit.accumulate import accumulate
from fedmerit.config import Config, from_dict
from fedmerit.errors import ConfigError, LedgerError
from fedmerit.federation.journal import Round, first_body, rounds_of, scores_document
from fedmerit.ledger import SERVER, Ledger, Record, number, verify_chain

TOLERANCE = 1e-12


def verify_folder(path: str | Path) -> Iterator[str]:
    """Check chain, signatures, scores in the ledger and ``scores.json``; yields what was found, line by line.

    Raises:
        LedgerError: names the first record, or the place in ``scores.json``, that is wrong.
    """
    path = Path(path)
    with Ledger(path / "ledger.sqlite", read_only=True) as ledger:
        signed = verify_chain(ledger, keys_of)
        run = first_body(ledger, "run")
        yield f"ledger: {len(ledger)} records, chain {'and signatures ' if signed else ''}in order"
        if signed:
            yield "rehearsal: one process held all keys, so signatures prove order, not who spoke"
        else:
            yield "unsigned: the run had secure aggregation off, so anyone could have written it"
        config = _config(run)
        rounds = rounds_of(ledger)
        _check_stated(ledger, rounds, config)
        head = ledger.head
    aborted = sum(bool(one.aborted) for one in rounds)
    yield f"rounds: {len(rounds)} of {config.training.rounds}, {aborted} aborted"
    _check_document(path, rounds, config, run["members"])
    yield "scores: follow from the reports in the ledger"
    if run["analysis"]:
        yield "analysis: plain updates were looked at, to compute ground truth"
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


def _config(run: Mapping[str, Any]) -> Config:
    try:
        config = from_dict(tomllib.loads(run["config"]))
    except (ConfigError, tomllib.TOMLDecodeError, KeyError) as error:
        raise LedgerError(f"record 1 (run): its config cannot be read: {error}") from error
    if config.hash() != run["config_hash"]:
        raise LedgerError("record 1 (run): its config is not the one of its hash")
    return config


def _check_stated(ledger: Ledger, rounds: Sequence[Round], config: Config) -> None:
    """The cumulative scores that the server stated each round, computed anew."""
    for record in ledger.records("scores"):
        upto = rounds[: int(record.body["round"])]
        for utility, stated in record.body["cumulative_alpha"].items():
            scored = [found for one in upto if (found := one.to_reports(utility)) is not None]
            again = accumulate(scored, missing=config.scoring.missing).as_dict()
            where = f"record {record.seq} (scores): cumulative alpha of {utility}"
            _compare({name: number(value) for name, value in stated.items()}, again, where)


def _check_document(path: Path, rounds: Sequence[Round], config: Config, members: Sequence[str]) -> None:
    try:
        there = json.loads((path / "scores.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path / 'scores.json'}: cannot be read: {error}") from error
    scoring = config.scoring
    content = scores_document(rounds, members, scoring.utilities, missing=scoring.missing)
    for extra in ("truth", "analysis"):  # computed from plain updates, not from reports
        there.pop(extra, None)
    _compare(there, json.loads(json.dumps(content)), "scores.json")


def _compare(there: Any, here: Any, where: str) -> None:
    """Equal, numbers up to a relative 1e-12; the error names the first place that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        if list(there) != list(here) and set(there) != set(here):
            odd = sorted(set(there) ^ set(here))[0]
            raise LedgerError(f"{where}.{odd}: {'not in the ledger' if odd in there else 'missing'}")
        for key in here:
            _compare(there[key], here[key], f"{where}.{key}")
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for k, (one, other) in enumerate(zip(there, here, strict=True)):
            _compare(one, other, f"{where}[{k}]")
    elif isinstance(there, float) and isinstance(here, float):
        if not math.isclose(there, here, rel_tol=TOLERANCE, abs_tol=0.0):
            raise LedgerError(f"{where}: states {there!r}, the reports give {here!r}")
    elif there != here or isinstance(there, bool) != isinstance(here, bool):
        raise LedgerError(f"{where}: states {there!r:.60}, the reports give {here!r:.60}")
