"""Expecting an error by what it is about, not by its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fedmerit.errors import FedmeritError, LedgerError


@contextmanager
def refused(kind: type[FedmeritError], **facts: object) -> Iterator[pytest.ExceptionInfo[FedmeritError]]:
    """Expect exactly this error, with these attributes: `refused(ConfigError, setting="run.seed")`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.type is kind, f"expected {kind.__name__}, got {caught.value!r}"
    told = {name: getattr(caught.value, name) for name in facts}
    assert told == facts, caught.value


def found_wrong(words: str, check: Callable[..., object], *args: object, **given: object) -> LedgerError:
    """Expect a check of a ledger to find what is wrong, in these words; return the error."""

    def whole() -> None:
        result = check(*args, **given)
        if isinstance(result, Iterator):
            list(result)

    with pytest.raises(LedgerError, match=words) as caught:
        whole()
    return caught.value
