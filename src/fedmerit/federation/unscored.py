"""Rounds without a score: those that were aborted, and those that were summed without a report.

An aborted round changed nothing. A round that was summed moved the model; if nobody's report on it arrived,
what it changed is in nobody's score, and whoever reads a sum over rounds must know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedmerit.federation.journal import Round


def aborted(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Numbers of the rounds without a sum."""
    return tuple(one.number for one in rounds if one.aborted)


def unreported(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Numbers of the rounds that were summed, and that nobody reported on."""
    return tuple(one.number for one in rounds if not (one.aborted or one.reports or one.withheld))


def numbered(numbers: Sequence[int], most: int = 30) -> str:
    """Rounds as one reads them out.

    >>> numbered([3]), numbered([1, 2, 5]), numbered([1, 2, 5, 6], most=2)
    ('round 3', 'rounds 1, 2 and 5', 'rounds 1, 2 and 2 more')
    """
    told = [str(number) for number in numbers[:most]]
    last = f"{len(numbers) - most} more" if len(numbers) > most else told.pop()
    return f"round{'' if len(numbers) == 1 else 's'} " + (f"{', '.join(told)} and {last}" if told else last)


def about(rounds: Sequence[Round]) -> Iterator[str]:
    """What to know beside scores that are summed over these rounds."""
    yield from in_words(aborted(rounds), unreported(rounds))


def in_words(aborted_: Sequence[int], unreported_: Sequence[int]) -> Iterator[str]:
    """Which rounds have no score, and what that means.

    >>> print(*in_words([4], []))
    round 4 was aborted: the model stayed as it was
    """
    if aborted_:
        yield f"{numbered(aborted_)} {_were(aborted_)} aborted: the model stayed as it was"
    if unreported_:
        them = "it" if len(unreported_) == 1 else "them"
        yield (
            f"{numbered(unreported_)} {_were(unreported_)} summed, but nobody reported on {them}: what "
            "changed in the model then is in nobody's score and in no gain"
        )


def _were(numbers: Sequence[int]) -> str:
    return "was" if len(numbers) == 1 else "were"
