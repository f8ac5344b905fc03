"""The source of the package as syntax trees, parsed once for all tests that look at it."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "fedmerit"


@cache
def nodes() -> dict[type[ast.AST], list[tuple[Path, ast.AST]]]:
    """Return every node of every module with the module's file, by the node's class."""
    found: dict[type[ast.AST], list[tuple[Path, ast.AST]]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(type(node), []).append((file, node))
    gc.freeze()  # trees live as long as the process: keep them out of every collection of garbage
    return found


@cache
def texts() -> list[str]:
    """Return every string in the source, as often as it occurs."""
    return [node.value for _, node in nodes()[ast.Constant] if isinstance(node.value, str)]


@cache
def calls(*names: str) -> list[tuple[Path, ast.Call]]:
    """Return every call of a function or class by one of these names, with its file."""
    return [
        (file, node)
        for file, node in nodes()[ast.Call]
        if isinstance(node.func, ast.Name) and node.func.id in names
    ]
