"""Results -> FINDINGS.md and its page on retraining: templates with numbers filled in, sentences checked.

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
from judges import judges
from other_images import other_images
from retrained import game
from rules import beside_retrained
from takings import cheats
from uses import class_mix, downstream, flipper, lies, rules
from verdicts import verdicts

PARTS = (
    verdicts,
    ranking,
    single_round,
    other_images,
    elsewhere,
    directions,
    game,
    beside_retrained,
    utilities,
    flipper,
    class_mix,
    downstream,
    rules,
    lies,
    cheats,
    judges,
)
FORM: dict[str, Any] = {"width": 126, "break_long_words": False, "break_on_hyphens": False}
HERE = Path(__file__).resolve().parent
TEMPLATES = {"FINDINGS.md": HERE / "findings.md.in", "tables/retrained.md": HERE / "retrained.md.in"}


def findings(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> dict[str, str]:
    """Both texts by their paths, or an error that names the claims that no longer hold."""
    evidence = Evidence(rows, results, paper)
    facts: Facts = {}
    claims: dict[str, bool] = {}
    for part in PARTS:
        part(evidence, facts, claims)
    wrong = [claim for claim, holds in claims.items() if not holds]
    if wrong:
        raise SystemExit("FINDINGS.md is not written, these no longer hold: " + "; ".join(wrong))
    return fill({name: file.read_text(encoding="utf-8") for name, file in TEMPLATES.items()}, facts, claims)


def reflowed(text: str) -> str:
    """Paragraphs and items of lists with lines of one length; headings, tables and commands as they are.

    >>> reflowed("a\\nb\\n\\n| a\\n| b\\n\\n- a\\n  b\\n  - c")
    'a b\\n\\n| a\\n| b\\n\\n- a b\\n  - c'
    """
    return "\n\n".join(map(_block, text.split("\n\n")))


def _block(block: str) -> str:
    if re.match(r"[|#]|    ", block):
        return block
    made = []
    for item in re.split(r"\n(?= *(?:- |\d+\. ))", block):
        mark = re.match(r" *(?:- |\d+\. )?", item)
        indent = mark[0] if mark else ""
        form = {"initial_indent": indent, "subsequent_indent": " " * len(indent), **FORM}
        made.append(textwrap.fill(" ".join(item[len(indent) :].split()), **form))
    return "\n".join(made)


def fill(
    templates: Mapping[str, str], facts: Mapping[str, Any], claims: Mapping[str, bool]
) -> dict[str, str]:
    """``{{name}}`` becomes its fact; ``{{? claim}}`` marks a checked sentence and disappears.

    Everything must be known, and everything known must be said in one of the texts.

    >>> fill({"a": "{{? rises}}It rises by {{step}}."}, {"step": 2}, {"rises": True})
    {'a': 'It rises by 2.'}
    """
    used: set[str] = set()

    def put(found: re.Match[str]) -> str:
        name = found[1]
        used.add(name)
        if name.startswith("? "):
            if name[2:] not in claims:
                raise SystemExit(f"FINDINGS.md: nothing checks {name[2:]!r}")
            return ""
        if name not in facts:
            raise SystemExit(f"FINDINGS.md: no fact {name!r}")
        return str(facts[name])

    made = {
        name: reflowed(re.sub(r"\{\{(.*?)\}\}", put, re.sub(r"\n +\{\{\?", "{{?", template)))
        for name, template in templates.items()
    }
    unused = (set(facts) | {f"? {claim}" for claim in claims}) - used
    if unused:
        raise SystemExit(f"FINDINGS.md: never said: {', '.join(sorted(unused))}")
    return made
