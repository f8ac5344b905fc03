"""What FINDINGS.md says of other test images: scores on one half of a pool, MR-SV on the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cells import RESULTS
from evidence import PAIR, TITLES, Claims, Evidence, Facts, agree, lines
from grid import mean, text
from measures import spread
from retrained import standard_error, student
from sections import Lines, table

RAW = RESULTS / "other" / "other-images.json"
NAMES = {"ALPHA sum": "alpha summed", "PHI sum": "PHI summed", "MR-SV": "MR-SV"}
CLOSE = 0.03
"""A smaller difference of two mean Spearmans is none that we would act on."""


def near(
    runs: Sequence[Mapping[str, Any]], score: str, utility: str, against: str, *, other: bool
) -> list[float]:
    """Per run, the Spearman of a score with MR-SV of ``against`` on the same or the other half, mean of both.

    >>> half = {"ALPHA sum": [1, 2, 3], "MR-SV": [1, 3, 2]}
    >>> run = {"utilities": {"accuracy": [half, {"ALPHA sum": [1, 2, 3], "MR-SV": [3, 2, 1]}]}}
    >>> near([run], "ALPHA sum", "accuracy", "accuracy", other=False)
    [-0.25]
    """
    found = []
    for run in runs:
        scored, true = run["utilities"][utility], run["utilities"][against]
        pairs = [agree(scored[k][score], true[1 - k if other else k]["MR-SV"]) for k in (0, 1)]
        found.append(mean(pairs))
    return found


def compared(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[list[float]]]:
    """By score, its utility and that of MR-SV: the Spearmans on the same half and on the other one."""
    cases = [(score, utility, utility) for utility in PAIR for score in NAMES]
    cases.append(("ALPHA sum", *PAIR))
    return {case: [near(runs, *case, other=other) for other in (False, True)] for case in cases}


def rows(found: Mapping[tuple[str, str, str], list[list[float]]]) -> list[list[str]]:
    """The lines of the table: both Spearmans, and how far behind MR-SV's own the second is."""
    body = []
    for (score, utility, against), (same, other) in found.items():
        behind = np.subtract(other, found["MR-SV", against, against][1])
        step = f"{text(mean(behind.tolist()), '+.3f')} ± {text(standard_error(behind), '.3f')}"
        title = (
            TITLES[against] if utility == against else f"{TITLES[against]}; the score's: {TITLES[utility]}"
        )
        own = score == "MR-SV"
        body.append([NAMES[score], title, "" if own else spread(same), spread(other), "" if own else step])
    return body


HEAD = ("score", "utility", "MR-SV on the same images", "MR-SV on other images", "ahead of MR-SV's own")


def other_images(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """How well scores carry over to other test images, beside how well MR-SV does."""
    raw = json.loads(RAW.read_text(encoding="utf-8"))
    found = compared(raw["runs"])
    sizes = [cell["test_images"] for cell in evidence.results.values()]
    expected, right = PAIR
    facts |= {
        "halves table": lines(HEAD, rows(found)),
        "halves runs": str(len(raw["runs"])),
        "halves images": str(raw["images in a half"]),
        "halves larger": f"{min(sizes):,} to {max(sizes):,}",
        "halves crossed": text(mean(found["ALPHA sum", expected, right][1]), ".2f"),
    }
    for name, utility in (("expected", expected), ("accuracy", right)):
        same, other = (text(mean(one), ".2f") for one in found["ALPHA sum", utility, utility])
        facts |= {f"halves alpha {name} same": same, f"halves alpha {name}": other}

    def behind(score: str, utility: str) -> np.ndarray:
        return np.subtract(found[score, utility, utility][1], found["MR-SV", utility, utility][1])

    facts["halves own expected"], facts["halves own accuracy"] = (
        text(mean(found["MR-SV", utility, utility][1]), ".2f") for utility in PAIR
    )
    claims["other images agree less"] = all(
        mean(same) > mean(other) for (_, own, of), (same, other) in found.items() if own == of
    )
    claims["for the expected accuracy alpha and PHI carry over to other images as MR-SV does"] = all(
        abs(mean(behind(score, expected).tolist())) < CLOSE for score in ("ALPHA sum", "PHI sum")
    )
    claims["for accuracy alpha and PHI are not behind MR-SV on other images beyond chance"] = all(
        student(behind(score, right)) > 0.05 for score in ("ALPHA sum", "PHI sum")
    )
    claims["on other images too alpha of the expected accuracy is no stand-in for accuracy's"] = mean(
        found["ALPHA sum", expected, right][1]
    ) < mean(found["ALPHA sum", right, right][1])


def other_images_section() -> Lines:
    """The table and every run of it."""
    raw = json.loads(RAW.read_text(encoding="utf-8"))
    found = compared(raw["runs"])
    yield "# Scores on other test images (not in the paper)"
    yield ""
    yield "`python experiments/other_images.py`"
    yield ""
    minutes = text(raw["seconds"] / 60, ".0f")
    yield f"fashion-mini, an MLP, 9 members, Dirichlet 0.5, 10 rounds, {len(raw['runs'])} seeds"
    yield f"({minutes} minutes on one core of a busy machine). The class-balanced test pool is cut into two"
    size = raw["images in a half"]
    yield f"class-balanced halves of {size} images. The table shows the Spearman of a score on one half with"
    yield "MR-SV, the mean of both directions; mean ± standard deviation over the seeds, in the last column ±"
    yield "standard error. PHI of accuracy is that of sharpened accuracy."
    yield ""
    yield from table(HEAD, rows(found))
    yield "Run by run, on the same / on other images:"
    yield ""
    titles = [
        f"{NAMES[score]}, {TITLES[against]}{'' if utility == against else ' (the score: expected accuracy)'}"
        for score, utility, against in found
    ]
    body = [
        [
            str(run["seed"]),
            *(f"{text(same[k], '.2f')} / {text(other[k], '.2f')}" for same, other in found.values()),
        ]
        for k, run in enumerate(raw["runs"])
    ]
    yield from table(["seed", *titles], body)
