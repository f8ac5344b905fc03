"""Results -> FINDINGS.md: findings.md.in with every number filled in, and every sentence checked.

A fact is a number or a table computed from the results. A claim is a sentence of the template that is only
true if the numbers are as they are: claims.py, retrained.py and uses.py hold its condition, and where that
no longer holds nothing is written.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cells import Result, Row
from claims import directions, elsewhere, ranking, single_round, utilities
from evidence import Evidence, Facts
from other_images import other_images
from retrained import game
from takings import cheats
from uses import class_mix, downstream, flipper, lies, rules

PARTS = (
    ranking,
    single_round,
    other_images,
    elsewhere,
    directions,
    game,
    utilities,
    flipper,
    class_mix,
    downstream,
    rules,
    lies,
    cheats,
)
FORM: dict[str, Any] = {"width": 118, "break_long_words": False, "break_on_hyphens": False}
TEMPLATE = Path(__file__).resolve().parent / "findings.md.in"


def findings(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> str:
    """The whole text, or an error that names the claims that no longer hold."""
    evidence = Evidence(rows, results, paper)
    facts: Facts = {}
    claims: dict[str, bool] = {}
    for part in PARTS:
        part(evidence, facts, claims)
    wrong = [claim for claim, holds in claims.items() if not holds]
    if wrong:
        raise SystemExit("FINDINGS.md is not written, these no longer hold: " + "; ".join(wrong))
    return fill(TEMPLATE.read_text(encoding="utf-8"), facts, claims)


def reflowed(text: str) -> str:
    """Paragraphs with lines of one length; headings, lists, tables and commands as they are.

    >>> reflowed("a\\nb\\n\\n| a\\n| b")
    'a b\\n\\n| a\\n| b'
    """
    blocks = text.split("\n\n")
    return "\n\n".join(
        block if re.match(r"[|#\-]|    |\d+\. ", block) else textwrap.fill(block, **FORM) for block in blocks
    )


def fill(template: str, facts: Mapping[str, Any], claims: Mapping[str, bool]) -> str:
    """``{{name}}`` becomes its fact; ``{{? claim}}`` marks a checked sentence and disappears.

    Everything must be known and everything known must be said.

    >>> fill("{{? rises}}It rises by {{step}}.", {"step": 2}, {"rises": True})
    'It rises by 2.'
    """
    used: set[str] = set()

    def put(found: re.Match[str]) -> str:
        name = found[1]
        used.add(name)
        if name.startswith("? "):
            if name[2:] not in claims:
                raise SystemExit(f"{TEMPLATE.name}: nothing checks {name[2:]!r}")
            return ""
        if name not in facts:
            raise SystemExit(f"{TEMPLATE.name}: no fact {name!r}")
        return str(facts[name])

    text = reflowed(re.sub(r"\{\{(.*?)\}\}", put, template))
    unused = (set(facts) | {f"? {claim}" for claim in claims}) - used
    if unused:
        raise SystemExit(f"{TEMPLATE.name}: never said: {', '.join(sorted(unused))}")
    return text
