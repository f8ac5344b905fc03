"""The recipe of a job whose members are scored, for NVFlare's environments: SimEnv, PocEnv, ProdEnv."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nvflare.collab.api.module_wrapper import get_caller_module, get_importable_module_name
from nvflare.collab.recipe import CollabRecipe

from fedmerit.config import parse, text_in
from fedmerit.errors import ConfigError
from fedmerit.nvflare.server import Hub
from fedmerit.nvflare.site import STEPS, Site


class Scored(CollabRecipe):  # type: ignore[misc]
    """A Collab recipe that ships the task, if it is to be shipped, and nothing of fedmerit."""

    def __init__(self, name: str, shipped: ModuleType | None, **options: Any) -> None:
        super().__init__(job_name=name, **options)
        self.shipped = shipped
        self._job.set_app_packages(["fedmerit"])

    def _user_source_entries(self, objs: object) -> list[tuple[str, str | None]]:
        """Return the files that travel with the job, and where they go."""
        if self.shipped is None:
            return []
        name, source = get_importable_module_name(self.shipped), inspect.getfile(self.shipped)
        entries: list[tuple[str, str | None]] = self._module_source_entries(name, source)
        return entries


def recipe(
    name: str,
    task: ModuleType | str | None = None,
    *,
    num_rounds: int,
    spare_rounds: int = 0,
    min_clients: int,
    folder: str | Path,
    roster: str | Path | None = None,
    rehearsal: str | Path | None = None,
    config: Mapping[str, Mapping[str, Any]] | str | Path | None = None,
    server_key: str | Path | None = None,
    patience: float = 120.0,
    join: float = 300.0,
    timeout: float = 3600.0,
    page: bool = True,
    weighted_by: str = STEPS,
    seed: int | None = None,
    sync_task_timeout: int = 300,
) -> CollabRecipe:
    """Return a recipe whose members are scored by what they contribute, and whose updates nobody sees.

    ::

        recipe = fedmerit.nvflare.recipe(
            "hospitals", task, num_rounds=10, min_clients=4, roster="roster.toml", folder="runs/ours"
        )
        recipe.execute(SimEnv(clients=HOSPITALS))

    The task is a module with

    - ``train(model)``: an FLModel in, the trained FLModel out, as between ``flare.receive()`` and
      ``flare.send()``; ``meta["NUM_STEPS_CURRENT_ROUND"]`` is the number of training samples;
    - ``scoring``: what `torch_scoring` returns, or ``value`` and ``gradient`` (see `fedmerit.flower.secure`);
    - ``first_model()``: the first model, such as ``network().state_dict()``; called on the server;
    - ``test_set()``: samples and labels on which all members are measured; called on the server. Without it
      members judge each other in a panel, each on what its own ``held_out()`` returns.

    A job that stops, because a site or the server died, is submitted again: it goes on with the run in
    ``folder``. The arguments that `fedmerit.flower.Contributions` has too are the same there.

    Args:
        name: of the job.
        task: the module, which travels with the job; its name, if it is installed on the server and on the
            sites; or None for the module that calls this.
        num_rounds: how many rounds are trained.
        spare_rounds: how many more the members agree to, in place of rounds that a stopped job or too few
            members left without a sum.
        min_clients: sites that NVFlare waits for before it starts the job.
        folder: where ledger, scores and notes go, on the server.
        roster: the file of everybody's public keys, on the server.
        rehearsal: instead of a roster, a folder where everybody's keys are made, for a run on one machine.
            Sites have the names of members.
        config: settings as sections or as a TOML file.
        server_key: the file of the server's private key, on the server.
        patience: seconds to wait for an answer that needs neither training nor evaluation.
        join: seconds to wait for members to join.
        timeout: seconds for a member who trains or evaluates.
        page: write page.html into the folder at the end.
        weighted_by: the entry of ``FLModel.meta`` that holds the number of training samples; it stays secret.
        seed: seed of the stochastic rounding, for rehearsals that must be exactly repeatable.
        sync_task_timeout: seconds that NVFlare waits for sites to start the job.
    """
    if (roster is None) == (rehearsal is None):
        raise ConfigError("recipe: expected roster=..., or rehearsal=... for a run on one machine")
    shipped = get_caller_module() if task is None else task if isinstance(task, ModuleType) else None
    module = task if isinstance(task, str) else get_importable_module_name(shipped)
    options: dict[str, Any] = {"folder": str(folder), "patience": patience, "join": join, "page": page}
    if config is not None:
        stated = parse(text_in(config)) if isinstance(config, str | Path) else config
        options["config"] = {section: dict(part) for section, part in stated.items() if section != "schema"}
    for key, path in (("roster", roster), ("server_key", server_key)):
        if path is not None:
            options[key] = str(path)
    keys = "" if rehearsal is None else str(rehearsal)
    return Scored(
        name,
        shipped,
        server=Hub(module, num_rounds, options, keys, timeout, spare_rounds),
        client=Site(module, keys, weighted_by, seed),
        min_clients=min_clients,
        sync_task_timeout=sync_task_timeout,
    )
