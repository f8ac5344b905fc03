"""The contract app's members in this process: keys, nodes, and what their run wrote."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for path in (HERE, HERE / "contract_app"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

from contract import client, server, task  # noqa: E402

from fedmerit.identity import Member, Roster, new_key, write_roster  # noqa: E402
from inprocess import InProcess  # noqa: E402
from runs import bodies_of, records_of, rounds_in  # noqa: E402

__all__ = ["bodies_of", "client", "records_of", "rounds_in", "server", "task"]
NAMES = tuple(f"client-{i}" for i in range(4))
NODES = {name: 100 + i for i, name in enumerate(NAMES)}


def make_keys(folder, names=NAMES, weights=None):
    """Everybody's key, the server's too, and the roster; returns the roster's path."""
    members = [Member(n, new_key(folder / f"{n}.pem"), weights and weights[n]) for n in names]
    write_roster(folder / "roster.toml", Roster(members, new_key(folder / "server.pem")))
    return folder / "roster.toml"


def node_config(folder, name):
    """What a member's own SuperNode is started with."""
    key, roster = folder / f"{name}.pem", folder / "roster.toml"
    return {"name": name, "fedmerit-key": str(key), "fedmerit-roster": str(roster)}


def grid_of(folder, apps=None):
    configs = {node: node_config(folder, name) for name, node in NODES.items()}
    return InProcess({node: (apps or {}).get(name, client.app) for name, node in NODES.items()}, configs)


def run(folder, grid, **options):
    """A run of the contract app; the strategy, its rounds as the ledger has them."""
    strategy = server.run(grid, roster=folder / "roster.toml", out=folder / "run", **options)
    return strategy, rounds_in(folder / "run")
