"""The server."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from small.task import first_model, probability_of_truth, test_data

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=config["roster"],
        test=test_data(),
        value=probability_of_truth,
        utilities=["expected-accuracy"],
        folder=config["out"],
        patience=config["patience"],
        join=90,
    )
    strategy.start(grid=grid, initial_arrays=ArrayRecord(first_model()), num_rounds=config["rounds"])
