"""How often the committed runs, in which all reports are honest, are doubted because they do not add up.

tables.py writes it to tables/alarms.md. docs/choosing.md says what it shows, where a test compares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from cells import Result

from fedmerit import Reports
from fedmerit.scoring.doubts import doubts


def honest_runs(results: Mapping[str, Result]) -> Iterator[tuple[str, list[Reports]]]:
    """Utility and rounds, with standard errors, of every run of the additive game in which nobody cheats."""
    for name in sorted(results):
        settings = results[name]["settings"]
        if settings.get("scoring", {}).get("game", "additive") != "additive":
            continue
        if "cheat" in settings.get("experiment", {}):
            continue
        for utility, part in results[name]["utilities"].items():
            yield (
                utility,
                [
                    Reports(
                        **{key: one[key] for key in ("empty", "grand", "alone", "without", "se_alpha")},
                        se_alpha_total=one.get("se_alpha_total"),
                        slice=one.get("slice"),
                        round=one["round"],
                    )
                    for one in part["rounds"]
                ],
            )


def swapped(one: Reports) -> Reports:
    """The same numbers, with the columns alone and without exchanged."""
    return replace(one, alone=one.without, without=one.alone)


def counted(results: Mapping[str, Result]) -> dict[str, list[int]]:
    """By utility: runs, how many are warned, how many refused, how many refused with the columns swapped."""
    found: dict[str, list[int]] = {}
    for utility, rounds in honest_runs(results):
        said = [one for one in doubts(rounds) if one.code in ("strays", "swapped")]
        wrong = doubts([swapped(one) for one in rounds])
        row = found.setdefault(utility, [0, 0, 0, 0])
        row[0] += 1
        row[1] += bool(said)
        row[2] += any(one.gross for one in said)
        row[3] += any(one.gross for one in wrong)
    return found


def alarms_section(results: Mapping[str, Result]) -> Iterator[str]:
    """The page."""
    yield "# How often honest runs are refused (not in the paper)"
    yield ""
    yield "All runs of the additive game in which nobody cheats: in how many contributions stray so far from"
    yield "the gain that `score` warns, in how many `rewards` refuses to pay, and in how many it would refuse"
    yield "if the columns `alone` and `without` were swapped. Runs that repeat others, with the same members"
    yield "and data, count too."
    yield ""
    yield "| utility | runs | warned | refused | refused with the columns swapped |"
    yield "|---|---|---|---|---|"
    for utility, row in sorted(counted(results).items(), key=lambda one: -one[1][0]):
        yield f"| `{utility}` | {' | '.join(map(str, row))} |"
