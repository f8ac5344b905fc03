"""Rounds from JSON: one round, a list of rounds, or an object with ``rounds``. Errors name the round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedmerit.errors import FileFormatError
from fedmerit.layout import TEXT, VECTORS, Found, fail
from fedmerit.types import Reports

_FIELDS = frozenset(field.name for field in fields(Reports))
_LARGEST = 10**300


def rounds_of_json(path: Path, text: str, utility: str | None) -> tuple[list[Found], tuple[str, ...]]:
    """The rounds of a JSON file as they stand there, and the clients it lists (none: it does not say)."""
    try:
        document = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        fail(path, f"line {error.lineno}", f"not JSON: {error.msg}")
    except RecursionError:
        raise FileFormatError(f"{path}: not reports: nested too deeply") from None
    except ValueError as error:  # a key twice, or a number of thousands of digits
        raise FileFormatError(f"{path}: not reports: {error}") from None
    shared: dict[str, Any] = {}
    clients: tuple[str, ...] = ()
    if isinstance(document, dict) and "rounds" in document:
        document = _of_utility(path, document, utility)
        clients = _listed(path, document)
        shared = {"utility": document.get("utility"), "clients": list(clients)}
        document = document["rounds"]
    rounds = [document] if isinstance(document, dict) else document
    if not isinstance(rounds, list) or not rounds:
        fail(path, "rounds", "expected a round, or a list of at least one round")
    found = [_round_object(path, k, one, shared) for k, one in enumerate(rounds, start=1)]
    kept = [one for one in found if one is not None]
    known = set(clients)
    for one in kept if clients else ():
        for name in (*one.given["clients"], *one.given["silent"]):
            if name not in known:
                fail(path, one.where, f"unknown client {name!r}; the file lists {', '.join(clients)}")
    return kept, clients


def _of_utility(path: Path, document: dict[str, Any], utility: str | None) -> dict[str, Any]:
    """The part of a run's document that is about the utility asked for."""
    companions = document.get("companions")
    if utility is None or companions is None or document.get("utility") == utility:
        return document
    if not isinstance(companions, dict):
        fail(path, "companions", f"expected an object by utility, got {companions!r:.60}")
    if utility not in companions:
        known = ", ".join(map(str, (document.get("utility"), *companions)))
        raise FileFormatError(f"{path}: has no utility {utility!r}; it has {known}")
    found = companions[utility]
    if not isinstance(found, dict) or "rounds" not in found:
        fail(path, f"companions: {utility}", "expected an object with rounds")
    return found


def _listed(path: Path, document: dict[str, Any]) -> tuple[str, ...]:
    names = document.get("clients")
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fail(path, "clients", f"expected a list of names, got {names!r:.60}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        fail(path, "clients", f"{twice!r} appears more than once")
    return tuple(names)


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice in one object")
        found[key] = value
    return found


def _round_object(path: Path, place: int, one: Any, shared: Mapping[str, Any]) -> Found | None:
    where = f"round {place} of the file"
    if not isinstance(one, dict):
        fail(path, where, f"expected an object, got {type(one).__name__}")
    given = dict(one)
    if "reports" in given:  # the shape of a run's scores.json
        if given["reports"] is None:  # an aborted round: recorded there, nothing to score
            return None
        if not isinstance(given["reports"], dict):
            fail(path, where, f"reports: expected an object, got {type(given['reports']).__name__}")
        inner = dict(given["reports"])
        inner.setdefault("round", given.get("round"))
        inner.setdefault("clients", given.get("participants"))
        inner.setdefault("silent", given.get("silent"))
        given = inner
    for name, otherwise in (("utility", shared.get("utility")), ("round", place), ("silent", [])):
        if given.get(name) is None:
            given[name] = otherwise
    if given.get("clients") in (None, []):
        keyed = next((given[name] for name in VECTORS if isinstance(given.get(name), dict)), None)
        given["clients"] = list(keyed) if keyed is not None else shared.get("clients") or []
    where = _round_number(path, where, place, given)
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        fail(path, where, f"unknown field {unknown[0]!r}; expected {', '.join(sorted(_FIELDS))}")
    for name in ("empty", "grand", "alone", "without"):
        if given.get(name) is None:
            fail(path, where, f"{name} is missing")
    _check_kinds(path, where, given)
    for name in VECTORS:
        if isinstance(given.get(name), dict):
            given[name] = _by_name(path, where, name, given[name], given["clients"])
    return Found(given, where)


def _round_number(path: Path, where: str, place: int, given: dict[str, Any]) -> str:
    """Checks the number of a round; returns what messages call that round."""
    number = given["round"]
    whole = isinstance(number, int | float) and not isinstance(number, bool) and number == number // 1
    if not whole or number < 0:
        fail(path, where, f"round: expected a whole number, 0 or more, got {number!r:.60}")
    given["round"] = int(number)
    return f"round {place}" if number == place else f"{where}, number {int(number)}"


def _check_kinds(path: Path, where: str, given: dict[str, Any]) -> None:
    """Every field has the type it should have, and none is converted silently."""
    for name in ("empty", "grand", "solo_empty"):
        if given.get(name) is not None:
            _check_number(path, where, name, given[name])
    for name in VECTORS:
        values = given.get(name)
        if values is None:
            continue
        if not isinstance(values, list | dict):
            fail(path, where, f"{name}: expected one number per client, got {values!r:.60}")
        for value in values.values() if isinstance(values, dict) else values:
            if value is not None:
                _check_number(path, where, name, value)
    for name in ("clients", "silent"):
        if not isinstance(given[name], list) or not all(isinstance(one, str) for one in given[name]):
            fail(path, where, f"{name}: expected a list of names, got {given[name]!r:.60}")
    for name in TEXT:
        if not isinstance(given.get(name), str | None):
            fail(path, where, f"{name}: expected text, got {given[name]!r:.60}")


def _check_number(path: Path, where: str, name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        fail(path, where, f"{name}: expected a number, got {value!r:.60}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        fail(path, where, f"{name}: expected a number of ordinary size, got one of {len(str(value))} digits")


def _by_name(
    path: Path, where: str, name: str, values: Mapping[str, Any], clients: Sequence[str]
) -> list[Any]:
    known = set(clients)
    for client in values:
        if client not in known:
            fail(path, where, f"{name} names an unknown client {client!r}; known: {', '.join(clients)}")
    for client in clients:
        if client not in values:
            fail(path, where, f"{name} of client {client!r} is missing")
    return [values[client] for client in clients]
