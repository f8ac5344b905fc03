"""An error that a test expects, told by what it carries: `LedgerError.record`, `ProtocolError.stage`, ..."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(kind: type[BaseException], **carried: Any) -> Iterator[Any]:
    """Expect an error of this very kind with these attributes; see `fedmerit.errors`.

    >>> from fedmerit.errors import LedgerError
    >>> with raises(LedgerError, record=3):
    ...     raise LedgerError("record 3 is missing", record=3)
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert {name: getattr(caught.value, name) for name in carried} == carried, str(caught.value)
