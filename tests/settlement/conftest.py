from functools import cache

import pytest

from attacked import attacked, due_in


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """What everybody states in the same federation if nobody lies, by who is lost."""
    return cache(
        lambda lost=(), members=5: due_in(
            attacked(tmp_path_factory.mktemp("honest"), members, lost=lost).run()
        )
    )
