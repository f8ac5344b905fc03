"""The server: a stock FedAvg, with contributions."""

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from fedmerit.identity import Member, Roster, new_key, write_roster
from hospitals.task import HOSPITALS, gradient, network, test_data, value

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds, and score everybody."""
    config = context.run_config
    if not config["out"]:
        raise SystemExit("--run-config needs out: the folder to write ledger and scores to")
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=config["roster"] or rehearsal(Path(config["fedmerit-rehearsal"])),
        server_key=config["server-key"] or None,  # unless given: server.pem beside the roster
        test=test_data(),
        value=value,
        gradient=gradient,  # so members are scored by a settlement, and see the test set after the last round
        utilities=["expected-accuracy"],
        folder=config["out"],
        patience=config["patience"],
        join=config["join"],
    )
    arrays = ArrayRecord(network().state_dict())
    if config["after"]:
        arrays = fedmerit.flower.last_model(config["after"], arrays)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=config["rounds"])


def rehearsal(folder: Path) -> Path:
    """In a simulation nobody has a machine of its own: make everybody's key, once, and the roster."""
    if not (folder / "roster.toml").exists():
        folder.mkdir(parents=True)
        members = [Member(name, new_key(folder / f"{name}.pem")) for name in HOSPITALS]
        write_roster(folder / "roster.toml", Roster(members, new_key(folder / "server.pem")))
    return folder / "roster.toml"
