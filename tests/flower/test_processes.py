"""What the process of one message imports: Flower starts one for every message, and torch takes seconds."""

import pytest

from federation_in import HERE, NAMES, grid_of, run
from fedmerit.verify import verify_folder
from fresh import Fresh
from lies import exchange_of

COMPUTES = {"reports": {"train", "report"}, "settled": {"train", "agree"}}
"""The exchanges in which a member trains, measures, or recomputes a gradient."""


@pytest.mark.long
@pytest.mark.parametrize("method", COMPUTES)
def test_an_exchange_that_only_carries_bytes_imports_neither_torch_nor_the_users_modules(home, method):
    fresh = Fresh("contract.secured:app", HERE / "contract_app")
    run(home, grid_of(home, {NAMES[1]: fresh}), rounds=1, method=method)
    heavy = {
        exchange_of(message).exchange: {"torch", "contract.client", "contract.task", "fedmerit.simulation"}
        & modules
        for message, modules in fresh.imported
    }
    assert {exchange for exchange, modules in heavy.items() if modules} == COMPUTES[method]
    assert len(heavy) >= 8
    assert any("1 of 1" in line for line in verify_folder(home / "run"))
