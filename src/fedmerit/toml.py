"""Values of a TOML file: whether one has the type of a setting, that type in words, and a value as text."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a setting; nothing that only looks like it (true is no number)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is types.UnionType:
        return any(fits(value, option) for option in arguments)
    if _is(origin, Mapping):
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and fits(item, arguments[1]) for key, item in value.items()
        )
    if _is(origin, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, arguments[0]) for item in value)
    if hint is Any:
        return _is_plain(value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    return isinstance(value, hint) and isinstance(value, bool) == (hint is bool)


def as_kind(value: Any, hint: Any) -> Any:
    """A value that fits, in the one form its type has: 1 becomes 1.0 where a number is meant."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return as_kind(value, next(option for option in arguments if fits(value, option)))
    if _is(origin, Mapping):
        return {key: as_kind(item, arguments[1]) for key, item in value.items()}
    if _is(origin, Sequence):
        return tuple(as_kind(item, arguments[0]) for item in value)
    return float(value) if hint is float else value


def words(hint: Any) -> str:
    """A type as a person would say it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is types.UnionType:
        return " or ".join(words(option) for option in arguments)
    if _is(origin, Mapping):
        return f"a table of {_PLURAL.get(arguments[1]) or words(arguments[1])} by name"
    if origin is not None:
        return f"a list of {_PLURAL.get(arguments[0]) or words(arguments[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(hint, "text, numbers, true or false, or lists and tables of them")


def written(value: Any) -> str:
    """A plain value as TOML.

    >>> print(written({"a b": [1, 2.0, True, "ü\\n"]}))
    {"a b" = [1, 2.0, true, "ü\\n"]}
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{written(str(key))} = {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(item) for item in value) + "]"
    if isinstance(value, str):  # as in JSON, but for one character that TOML wants escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _is(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | bool) or (isinstance(value, int | float) and _is_finite(value))
