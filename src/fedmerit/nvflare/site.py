"""A site's door: the one function that a job's server may call, and the task that the site trains.

The site's own folder decides who the member is, never the job: ``local/fedmerit.toml`` in its startup kit
names the private key (``key``) and the roster (``roster``), and where the site runs no code from jobs, the
module with its task (``task``). In a rehearsal all sites share one folder, named by the job.
"""

from __future__ import annotations

import hashlib
import logging
import tomllib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.logging.constants import ALLOW_LOG_STREAMING_VAR as STREAMING
from nvflare.app_common.logging.constants import is_log_streaming_allowed
from nvflare.collab import collab

from fedmerit.carriers.door import Place, check_update, invites, participant, refusal
from fedmerit.carriers.measures import Gradient, Value
from fedmerit.carriers.shape import NamedArrays, Shape
from fedmerit.config import Config
from fedmerit.errors import ConfigError, MessageError, RefusedError
from fedmerit.protocol.messages import Parcel
from fedmerit.protocol.outcome import Trained, Work
from fedmerit.protocol.terms import NVFLARE, NVFLARE_SIMULATED, cautious
from fedmerit.secagg.setting import pack

OWN = "fedmerit.toml"
"""The site's own settings, in the folder ``local`` of its startup kit."""
STEPS = "NUM_STEPS_CURRENT_ROUND"
"""The entry of ``FLModel.meta`` by which NVFlare weighs members."""
MOST_ARRAYS = 8
log = logging.getLogger("fedmerit")


class JobTask:
    """What a run is about, from the module of this name; see `recipe`."""

    def __init__(self, module: str) -> None:
        self.module, self._names = module, vars(import_module(module))
        scoring = self._names.get("scoring")
        self.value: Value | None = self._names.get("value") or getattr(scoring, "value", None)
        self.gradient: Gradient | None = self._names.get("gradient") or getattr(scoring, "gradient", None)
        self.accept: Callable[[Config], None] = self._names.get("accept", cautious)
        self.test_set: Callable[[], Any] | None = self._names.get("test_set")
        self.held_out: Callable[[], tuple[Any, Any]] | None = self._names.get("held_out")

    def call(self, name: str, *given: Any) -> Any:
        """Call one of the user's functions that a run cannot do without."""
        if not callable(found := self._names.get(name)):
            raise ConfigError(f"task {self.module}: expected a function {name!r}")
        return found(*given)


def digest(arrays: NamedArrays, number: int, rounds: int, job: bytes) -> bytes:
    """Return the SHA-256 of everything that says how to train; members compare it before unmasking.

    The numbers that are summed are bound by the hash of M0; those that are not are here.
    """
    shape = Shape.of(arrays)
    return hashlib.sha256(pack("fedmerit nvflare train 1", number, rounds, job, shape.dump())).digest()


def digest_of_job(folder: Path) -> bytes:
    """Return the SHA-256 of a job as a site got it: its settings and its code."""
    rows = [
        [path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).digest()]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return hashlib.sha256(pack("fedmerit nvflare job 1", rows)).digest()


class Site:
    """What a job's server may call on a site.

    Args:
        task: the name of the module with the task, unless the site's own settings name one.
        rehearsal: the folder with everybody's key, for sites without settings of their own.
        weighted_by: the entry of ``FLModel.meta`` that holds the number of training samples.
        seed: seed of the stochastic rounding, for rehearsals that must be exactly repeatable.
    """

    def __init__(
        self, task: str, rehearsal: str = "", weighted_by: str = STEPS, seed: int | None = None
    ) -> None:
        self.task, self.rehearsal, self.weighted_by, self.seed = task, rehearsal, weighted_by, seed

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(
        self,
        head: bytes,
        arrays: dict[str, Any],
        model: dict[str, Any] | None = None,
        number: int = 0,
        rounds: int = 0,
    ) -> bytes | str:
        """Answer a message; return a text in place of bytes to refuse it. Errors would show their trace."""
        data = None
        try:
            data = _parcel(head, arrays)
            return self._answer(data, model, number, rounds)
        except Exception as error:
            return str(refusal(error, data)) or "refused"

    def _answer(self, data: Parcel, model: dict[str, Any] | None, number: int, rounds: int) -> bytes:
        workspace, job = collab.workspace, digest_of_job(self._app())
        place, own = self._place(Path(workspace.get_site_config_dir()), collab.site_name)
        if not place.rehearsal and is_log_streaming_allowed(collab.fl_ctx):
            raise ConfigError(
                "this site's log may be sent to the server, as NVFlare does by default, and it says what no "
                f'server is to know: expected "{STREAMING}": false in local/resources.json'
            )
        if place.rehearsal and invites(data):
            log.warning("a rehearsal: the job names %s, so whoever started it holds this key too", place.key)
        task = JobTask(own or self.task)
        if task.value is None:
            raise ConfigError(f"task {task.module}: expected scoring = torch_scoring(...), or value")
        member = participant(
            *(place, task.value, task.gradient, Shape),
            engines=(NVFLARE, NVFLARE_SIMULATED),
            accept=task.accept,
            held_out=task.held_out,
            seed=self.seed,
            run_config=job,
        )
        work = None if model is None else partial(self._work, task, model, number, rounds, job)
        return member.answer(data, collab.site_name, work)

    def _app(self) -> Path:
        """Return the folder of the job's app on this site."""
        return Path(collab.workspace.get_app_dir(collab.fl_ctx.get_job_id()))

    def _place(self, local: Path, site: str) -> tuple[Place, str]:
        """Return where this site's key and roster are, and the module of its own task, if it has one."""
        file = local / OWN
        if file.is_file():
            own = tomllib.loads(file.read_text(encoding="utf-8"))
            if not {"key", "roster"} <= {*own} <= {"key", "roster", "task"}:
                raise ConfigError(f"{file}: expected key and roster, and task or nothing else")
            return Place(local / own["key"], local / own["roster"]), str(own.get("task", ""))
        if not self.rehearsal:
            raise ConfigError(f"who is this member? expected {file}, with key and roster")
        folder = Path(self.rehearsal)
        return Place(folder / f"{site}.pem", folder / "roster.toml", rehearsal=True), ""

    def _work(self, task: JobTask, model: dict[str, Any], number: int, rounds: int, job: bytes) -> Work:
        """Return the model in a message, and the user's training of it."""
        shape = Shape.of(model)

        def train() -> Trained:
            given = FLModel(
                params={name: np.array(array) for name, array in model.items()},
                params_type=ParamsType.FULL,
                current_round=number - 1,  # NVFlare counts from 0
                total_rounds=rounds,
            )
            trained = task.call("train", given)
            if not isinstance(trained, FLModel):
                told = f"training must return an FLModel, got {type(trained).__name__}"
                raise RefusedError(told, stage="masked")
            try:
                after = shape.read(trained.params)
            except MessageError as error:
                told = f"training must return the arrays it was given, trained: {error}"
                raise RefusedError(told, stage="masked") from None
            delta = after if trained.params_type == ParamsType.DIFF else after - shape.vector
            return Trained(delta, trained.meta.get(self.weighted_by), shape.dump())

        extra = digest(model, number, rounds, job)
        return Work(shape.vector, extra, train, partial(check_update, shape, self.weighted_by))


def _parcel(head: object, arrays: object) -> Parcel:
    """Return the parcel in a message; raise MessageError for anything else than bytes and arrays."""
    if not isinstance(head, bytes) or not isinstance(arrays, dict) or len(arrays) > MOST_ARRAYS:
        raise MessageError("the message does not come from fedmerit")
    for array in arrays.values():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
            raise MessageError(f"expected an array of numbers, got a {type(array).__name__}")
    return Parcel(head, arrays)
