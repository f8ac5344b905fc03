"""Expecting an error by what it is about, not by its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fedmerit.errors import LedgerError
from raising import raises

refused = raises
"""Expect exactly this error, with these attributes: `refused(ConfigError, setting="run.seed")`."""


def found_wrong(words: str, check: Callable[..., object], *args: object, **given: object) -> LedgerError:
    """Expect a check of a ledger to find what is wrong, in these words; return the error."""

    def whole() -> None:
        result = check(*args, **given)
        if isinstance(result, Iterator):
            list(result)

    with pytest.raises(LedgerError, match=words) as caught:
        whole()
    return caught.value
