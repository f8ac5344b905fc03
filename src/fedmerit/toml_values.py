"""TOML from anybody and as it is recorded, and values of the types that settings have."""

from __future__ import annotations

import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedmerit.errors import ConfigError

DEEPEST = 16
"""The most parts of a key, and the deepest nesting of tables and lists."""
MOST_BITS = 128
_STRINGS = re.compile(  # of TOML, and comments; an unclosed one goes on to its end, where a parser stops
    r""""{3}(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|\\?\Z)|'{3}(?:[^']|'(?!''))*+(?:'{3,5}|\Z)"""
    r"""|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?:\.[^.\n=,\[\]{{}}]*+){{{DEEPEST}}}")


def text_in(path: str | Path) -> str:
    """Return the text of a file of settings; raise ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected text in UTF-8, got byte 0x{error.object[error.start]:02x} at place "
            f"{error.start}: save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse(text: str) -> dict[str, Any]:
    """Parse TOML from anybody; first refuse what would cost a parser hours or all memory."""
    if _LONG_KEY.search(_STRINGS.sub("s", text)):
        raise ConfigError(f"not settings: expected keys of at most {DEEPEST} parts, got a longer one")
    try:
        parsed = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error!s:.200}") from error
    _check_plain(parsed)
    return parsed


def _check_plain(parsed: dict[str, Any]) -> None:
    """Refuse values so deep or so large that later code could not handle or print them."""
    level: list[Any] = [parsed]
    for _ in range(DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        values = [value for one in inner for value in one]
        if any(isinstance(value, int) and value.bit_length() > MOST_BITS for value in values):
            raise ConfigError(f"not settings: expected whole numbers of at most {MOST_BITS} bits")
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ConfigError(f"not settings: expected tables and lists at most {DEEPEST} deep")


# -------------------------------------------------------------------------------------------------- values

_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of a setting; a whole number is a number, true is not."""
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
    """Return a fitting value in the one form of its type: 1 becomes 1.0 if a float is expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return as_kind(value, next(option for option in arguments if fits(value, option)))
    if _is(origin, Mapping):
        return {key: as_kind(item, arguments[1]) for key, item in value.items()}
    if _is(origin, Sequence):
        return tuple(as_kind(item, arguments[0]) for item in value)
    return float(value) if hint is float else value


def words(hint: Any) -> str:
    """Return a type in words."""
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
    """Return a plain value as TOML.

    >>> print(written({"a b": [1, 2.0, True, "ü\\n"]}))
    {"a b" = [1, 2.0, true, "ü\\n"]}
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{written(str(key))} = {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(item) for item in value) + "]"
    if isinstance(value, str):  # as in JSON, but TOML also wants this one character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _is(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | bool) or (isinstance(value, int | float) and _is_finite(value))
