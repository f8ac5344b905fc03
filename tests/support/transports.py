"""Every way to run a federation, behind one method; whatever belongs to a class of fedmerit is here.

`linear`, `local` and `grid` take a few tenths of a second a run. `grid` has the task of `local`: same data,
network, training and seeds, so that its reports must be the same, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedmerit.config import Config, from_dict
from fedmerit.errors import RunAborted
from fedmerit.identity import Member, Roster, new_key, write_roster
from fedmerit.ledger.chain import Record
from fedmerit.protocol.messages import Ask, Parcel
from fedmerit.protocol.outcome import Round
from linear_federation import STAGES, Federation, arrives
from runs import records_of, rounds_in
from scenarios import Scenario, name_of
from tiny import losing

HERE = Path(__file__).parent


@dataclass(eq=False)
class Ran:
    """What is left of a run, as it was when it was over.

    Args:
        folder: of the run.
        updates: (round, member) -> its change of the model, where somebody can know it.
        models: M0 of every round and the last M, where somebody can know them.
        heads: the members' own files of what they were shown, where they keep any.
        dead: who was killed and never came back.
        given_up: whether the run told whoever started it that it gave up.
    """

    folder: Path
    updates: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    models: list[np.ndarray] = field(default_factory=list)
    heads: dict[str, Path] = field(default_factory=dict)
    dead: tuple[str, ...] = ()
    given_up: bool = False

    @cached_property
    def rounds(self) -> list[Round]:
        return rounds_in(self.folder)

    @cached_property
    def records(self) -> list[Record]:
        return records_of(self.folder)


class Way(Protocol):
    """One way to run."""

    def cannot(self, scenario: Scenario) -> str:
        """Why it cannot go through this scenario; nothing where it can."""

    def run(self, scenario: Scenario, home: Path) -> Ran:
        """Go through it, with everything below a new folder."""


def make_keys(home: Path, scenario: Scenario) -> Roster:
    """Everybody's key, the server's too, and the roster, in a folder."""
    weights: Mapping[str, Any] = scenario.roster if scenario.weights == "roster" else {}
    members = [Member(name, new_key(home / f"{name}.pem"), weights.get(name)) for name in scenario.names]
    write_roster(home / "roster.toml", roster := Roster(members, new_key(home / "server.pem")))
    return roster


def kept(home: Path, ran: Ran) -> dict[str, Path]:
    """The members' own files, next to their keys."""
    run = ran.records[0].body["run"]
    found = {path.name: path / run / "heads" for path in home.glob("*.pem.state")}
    return {name.removesuffix(".pem.state"): path for name, path in found.items() if path.exists()}


# ------------------------------------------------------------------------------------------------- linear


class Linear:
    """Members with files of their own and a linear model, in this process; no torch, no Flower.

    Who is lost has received the message and acted on it: its answer gets lost.
    """

    def cannot(self, scenario: Scenario) -> str:
        return ""

    def run(self, scenario: Scenario, home: Path) -> Ran:
        federation = Federation(
            home,
            scenario.names,
            scenario.rounds,
            files=True,
            lost=[(name_of(i), number, stage) for i, number, stage in scenario.lost],
            away=[(name_of(i), number) for i, number in scenario.away],
            beyond=map(name_of, scenario.beyond),
            samples=scenario.samples,
            weights=scenario.roster if scenario.weights == "roster" else None,
            settings={
                "data": {"test_reveal": scenario.reveal},
                **({} if scenario.weights == "roster" else {"training": {"weights": scenario.weights}}),
                "scoring": {"visibility": scenario.visibility, "method": scenario.method},
                "secure_aggregation": {"threshold": scenario.threshold},
            },
        ).run()
        ran = Ran(federation.folder, federation.updates, federation.models)
        ran.heads = kept(home, ran)
        return ran


# -------------------------------------------------------------------------------------------------- local


def settings_of(scenario: Scenario, *, masks: bool = True) -> Config:
    """The scenario as the settings of a run in one process."""
    training: dict[str, Any] = {"rounds": scenario.rounds, "local_epochs": 1, "batch_size": 16}
    training |= {"weights": scenario.roster if scenario.weights == "roster" else scenario.weights}
    away: dict[str, list[int]] = {}
    for i, number in scenario.away:
        away.setdefault(name_of(i), []).append(number)
    sizes = list(scenario.samples.values())
    return from_dict(
        {
            "data": {"test_size": 50 * scenario.rounds, "test_reveal": scenario.reveal},
            "partition": {"clients": scenario.members, "scheme": "sizes", "sizes": sizes},
            "model": {"name": "network:tiny"},
            "training": training,
            "participation": {"away": away},
            "scoring": {"visibility": scenario.visibility, "method": scenario.method},
            "secure_aggregation": {
                "enabled": masks,
                "threshold": scenario.threshold,
                # Adam moves a number by about lr = 0.001 a step: 5 steps are within, 19 are not
                **({"bound": 0.009} if scenario.beyond else {}),
            },
        }
    )


class Local:
    """The engine in one process."""

    def cannot(self, scenario: Scenario) -> str:
        if len({i for i, _, _ in scenario.lost}) < len(scenario.lost):
            return "`losing` takes one round and stage a member"
        return ""

    def run(self, scenario: Scenario, home: Path, *, masks: bool = True) -> Ran:
        from fedmerit.simulation.run import run

        with losing({name_of(i): f"{number}:{stage}" for i, number, stage in scenario.lost}):
            run(settings_of(scenario, masks=masks), home / "run")
        return Ran(home / "run")


# --------------------------------------------------------------------------------------------------- grid


class InProcessGrid:
    """Flower's messages between this process and itself, with the task of `Local`.

    Who is lost never gets the message, and is a node that Flower calls unavailable. Who takes part in a round
    is the strategy's choice.
    """

    def cannot(self, scenario: Scenario) -> str:
        return ""

    def run(self, scenario: Scenario, home: Path) -> Ran:
        import fedmerit.flower
        from federation_in import server

        make_keys(home, scenario)
        task = FlowerTask(scenario, federation_of(replace(scenario, lost=())), Ran(home / "run"))
        config = task.federation.config
        strategy = fedmerit.flower.Contributions(
            task.strategy(),
            roster=home / "roster.toml",
            test=task.federation.pool,
            value=task.value,
            gradient=task.gradient,
            folder=task.ran.folder,
            config=server.sections(
                method=scenario.method,
                utilities=list(config.scoring.utilities),
                weights=scenario.weights,
                bound=config.secure_aggregation.bound,
                threshold=scenario.threshold,
                test_reveal=scenario.reveal,
                visibility=scenario.visibility,
            ),
            join=0.5,
            page=False,
        )
        try:
            result = strategy.start(
                grid=task.grid(home), initial_arrays=task.first(), num_rounds=scenario.rounds
            )
            task.ran.models.append(task.vector(result.arrays))
        except RunAborted:
            task.ran.given_up = True
            task.ran.models.append(task.ran.models[-1])
        task.ran.heads = kept(home, task.ran)
        return task.ran


@cache
def federation_of(scenario: Scenario) -> Any:
    """Data, network and test pool; every member of a run takes its own part of it."""
    from fedmerit.simulation.setup import prepare

    return prepare(settings_of(scenario), pool_key=bytes(32))


@dataclass(eq=False)
class FlowerTask:
    """The federation of one process as a Flower app."""

    scenario: Scenario
    federation: Any
    ran: Ran

    @property
    def nodes(self) -> dict[int, str]:
        return {100 + i: name for i, name in enumerate(self.scenario.names)}

    def first(self):
        from flwr.app import ArrayRecord

        from fedmerit.simulation.models import load_vector

        load_vector(self.federation.network, self.federation.first)
        return ArrayRecord(self.federation.network.state_dict())

    def vector(self, arrays):
        return np.concatenate([array.numpy().ravel() for array in arrays.values()])

    def value(self, arrays, test):
        from fedmerit.simulation.utilities import evaluate

        network = self.federation.network
        network.load_state_dict(arrays.to_torch_state_dict())
        return evaluate(network, test.x, test.y, self.federation.config.scoring.utilities)

    def gradient(self, arrays, test):
        from fedmerit.flower import torch_scoring

        utilities = self.federation.config.scoring.utilities
        return torch_scoring(lambda: self.federation.network, utilities).gradient(arrays, test)

    def client(self, name):
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp

        import fedmerit.flower
        from fedmerit.simulation.setup import seed_for
        from fedmerit.simulation.training import train

        app = fedmerit.flower.secure(ClientApp(), value=self.value, gradient=self.gradient, seed=0)
        network, config = self.federation.network, self.federation.config
        data = next(client for client in self.federation.clients if client.name == name)

        @app.train()
        def train_locally(message, context):
            number, arrays = message.content["config"]["server-round"], message.content["arrays"]
            network.load_state_dict(arrays.to_torch_state_dict())
            train(network, data.x, data.y, self.federation.training, seed_for(config, "train", number, name))
            trained = ArrayRecord(network.state_dict())
            self.ran.updates[number, name] = self.vector(trained) - self.vector(arrays)
            metrics = MetricRecord({"num-examples": len(data.y)})
            return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

        return app

    def strategy(self):
        from flwr.serverapp.strategy import FedAvg

        task = self

        class Chosen(FedAvg):
            def configure_train(self, server_round, arrays, config, grid):
                task.ran.models.append(task.vector(arrays))
                for message in super().configure_train(server_round, arrays, config, grid):
                    if not task.scenario.is_away(task.nodes[message.metadata.dst_node_id], server_round):
                        yield message

        return Chosen(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)

    def grid(self, home):
        from flwr.app import Error, Message

        from fedmerit.flower.codec import BYTES, put, take
        from fedmerit.flower.grid import UNAVAILABLE
        from inprocess import InProcess

        task = self
        lost = {(name_of(i), number): STAGES.index(stage) for i, number, stage in self.scenario.lost}

        class Lossy(InProcess):
            def _answer(self, node, message):
                ask, name = Ask.unpack(take(message.content))[0], task.nodes[node]
                if arrives(lost, name, ask, b"") is None:
                    return Message(Error(UNAVAILABLE, "Node Unavailable"), reply_to=message)
                reply = super()._answer(node, message)
                if ask.exchange in ("check", "unmask") and not reply.has_error():
                    answer = arrives(lost, name, ask, take(reply.content).head)
                    reply.content[BYTES] = put(Parcel(answer))[BYTES]
                return reply

        configs = {
            node: {
                "fedmerit-key": str(home / f"{name}.pem"), "fedmerit-roster": str(home / "roster.toml")
            }
            for node, name in self.nodes.items()
        }  # fmt: skip
        return Lossy({node: self.client(name) for node, name in self.nodes.items()}, configs)


# ------------------------------------------------------------------------------------------------- collab


class InProcessCollab:
    """NVFlare's calls between this process and itself, with the task of `Local`.

    Who is lost never gets the call, which times out.
    """

    def cannot(self, scenario: Scenario) -> str:
        return ""

    def run(self, scenario: Scenario, home: Path) -> Ran:
        from federation_in import server
        from fedmerit.nvflare.server import JobHost
        from fedmerit.nvflare.site import JobTask
        from fedmerit.nvflare.transport import CollabTransport
        from flare import job, task_named

        make_keys(home, scenario)
        task = CollabTask(scenario, federation_of(replace(scenario, lost=())), Ran(home / "run"))
        config = task.federation.config
        module = task_named(
            "task_in_this_process", value=task.value, gradient=task.gradient, train=task.train,
            first_model=task.first, test_set=lambda: task.federation.pool,
        )  # fmt: skip
        options = {
            "roster": home / "roster.toml",
            "folder": task.ran.folder,
            "config": server.sections(
                method=scenario.method,
                utilities=list(config.scoring.utilities),
                weights=scenario.weights,
                bound=config.secure_aggregation.bound,
                threshold=scenario.threshold,
                test_reveal=scenario.reveal,
                visibility=scenario.visibility,
            ),
            "join": 0.5,
            "page": False,
        }

        class Chosen(CollabTransport):
            def next_round(self, model):
                task.ran.models.append(model)
                away = {name for name in self.nodes if scenario.is_away(name, self.rounds + 1)}
                kept = {name: self.nodes.pop(name) for name in away}
                try:
                    after = super().next_round(model)
                finally:
                    self.nodes |= kept
                task.last = model if after is None else after
                return after

        class Chooses(JobHost):
            transport = Chosen

        sites = {
            name: {"key": home / f"{name}.pem", "roster": home / "roster.toml"} for name in scenario.names
        }
        try:
            main = lambda: Chooses(JobTask(module), options, 3600.0).run(scenario.rounds)  # noqa: E731
            job(home, sites, main, passes=task.lossy(), task=module, seed=0)
        except RunAborted:
            task.ran.given_up = True
        task.ran.models.append(task.last)
        task.ran.heads = kept(home, task.ran)
        return task.ran


@dataclass(eq=False)
class CollabTask:
    """The federation of one process as a task of NVFlare."""

    scenario: Scenario
    federation: Any
    ran: Ran
    last: Any = None

    def first(self):
        from fedmerit.simulation.models import load_vector

        load_vector(self.federation.network, self.federation.first)
        return self.federation.network.state_dict()

    def _load(self, arrays):
        import torch

        state = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        self.federation.network.load_state_dict(state)
        return self.federation.network

    def value(self, arrays, test):
        from fedmerit.simulation.utilities import evaluate

        return evaluate(self._load(arrays), test.x, test.y, self.federation.config.scoring.utilities)

    def gradient(self, arrays, test):
        from fedmerit.nvflare import torch_scoring

        utilities = self.federation.config.scoring.utilities
        return torch_scoring(lambda: self.federation.network, utilities).gradient(arrays, test)

    def train(self, model):
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.collab import collab

        from fedmerit.nvflare.site import STEPS
        from fedmerit.simulation.setup import seed_for
        from fedmerit.simulation.training import train

        name, number, config = collab.site_name, model.current_round + 1, self.federation.config
        data = next(client for client in self.federation.clients if client.name == name)
        network, before = self._load(model.params), np.concatenate([a.ravel() for a in model.params.values()])
        train(network, data.x, data.y, self.federation.training, seed_for(config, "train", number, name))
        after = {name: array.numpy().copy() for name, array in network.state_dict().items()}
        self.ran.updates[number, name] = np.concatenate([a.ravel() for a in after.values()]) - before
        return FLModel(params=after, meta={STEPS: len(data.y)})

    def lossy(self):
        lost = {(name_of(i), number): STAGES.index(stage) for i, number, stage in self.scenario.lost}

        def passes(name, sent, answer):
            ask = Ask.unpack(Parcel(sent["head"], sent["arrays"]))[0]
            if arrives(lost, name, ask, b"") is None:
                raise TimeoutError("no answer")
            answered = answer()
            whole = ask.exchange in ("check", "unmask") and isinstance(answered, bytes)
            return arrives(lost, name, ask, answered) if whole else answered

        return passes


WAYS: dict[str, Way] = {
    "linear": Linear(),
    "local": Local(),
    "grid": InProcessGrid(),
    "collab": InProcessCollab(),
}
