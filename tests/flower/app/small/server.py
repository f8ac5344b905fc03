"""The server."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from small.task import first_model

app = ServerApp()


@app.main()
def main(grid, context):
    n = context.run_config["members"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
    strategy.start(
        grid=grid, initial_arrays=ArrayRecord(first_model()), num_rounds=context.run_config["rounds"]
    )
