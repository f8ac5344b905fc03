"""The server."""

import json
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from contract.task import UTILITIES, federation, first_model, gradient, value
from fedmerit.carriers.host import SETTINGS

app = ServerApp()


def sections(**given):
    """Settings by section; those that are None are left out."""
    assert given.keys() <= {key for keys in SETTINGS.values() for key in keys}
    return {
        section: {key: given[key] for key in keys if given.get(key) is not None}
        for section, keys in SETTINGS.items()
    }


@app.main()
def main(grid, context):
    strategy = run(grid, **{key.replace("-", "_"): value for key, value in context.run_config.items()})
    Path(context.run_config["out"], "seconds.json").write_text(json.dumps(strategy.seconds))


def run(
    grid,
    *,
    roster,
    out,
    rounds=2,
    patience=30.0,
    weights="uniform",
    server_evaluates=True,
    join=60.0,
    threshold=None,
    method="reports",
    settlement=None,
    settle=False,
    test=None,
    **_,
):
    """A whole run over any Grid, or the settlement of one whose server died."""
    pool = federation().pool
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=roster,
        test=None if method == "panel" else test or (pool if method == "reports" else (pool.x, pool.y)),
        value=value if server_evaluates else None,
        gradient=None if method == "panel" else gradient,
        config=sections(
            method=method, utilities=UTILITIES, threshold=threshold, weights=weights, **(settlement or {})
        ),
        folder=out,
        patience=patience,
        join=join,
        page=False,
    )
    if settle:
        strategy.settle(grid=grid, initial_arrays=ArrayRecord(first_model()))
    else:
        strategy.start(grid=grid, initial_arrays=ArrayRecord(first_model()), num_rounds=rounds)
    return strategy
