"""The server: an ordinary Flower ServerApp with a stock FedAvg."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from hospitals.task import HOSPITALS, network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds."""
    n = len(HOSPITALS)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=context.run_config["rounds"],
    )
