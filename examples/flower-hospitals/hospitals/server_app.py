"""The server: a stock FedAvg, with contributions."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from hospitals.task import HOSPITALS, gradient, network, test_data, value

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds, and score everybody; or settle a run whose server died."""
    config = context.run_config
    if not config["out"]:
        raise SystemExit("--run-config needs out: the folder to write ledger and scores to")
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=config["roster"] or fedmerit.flower.rehearsal(config["fedmerit-rehearsal"], HOSPITALS),
        server_key=config["server-key"] or None,  # unless given: server.pem beside the roster
        # with a test set, members are scored by a settlement, and see it after the last round; without one,
        # each of them judges the others on data of its own
        test=None if config["panel"] else test_data(),
        value=value,
        gradient=gradient,
        config={"scoring": {"utilities": ["expected-accuracy"]}, "panel": {"least": 50}},
        folder=config["out"],
        patience=config["patience"],
        join=config["join"],
    )
    arrays = ArrayRecord(network().state_dict())
    if config["after"]:
        arrays = fedmerit.flower.last_model(config["after"], arrays)
    if config["settle"]:
        strategy.settle(grid=grid, initial_arrays=arrays)
        return
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=config["rounds"])
