"""A SuperLink on 127.0.0.1, and the operator who submits runs to it with the `flwr` command.

::

    DIR/superlink/      Flower home of the SuperLink, its log, state.db
    DIR/operator/       Flower home of the operator; config.toml names the SuperLink "loopback"
"""

from __future__ import annotations

import json
import random
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from loopback.processes import HANG, LoopbackError, kill, start, wait_for

Value = str | int | float | bool
HOST = "127.0.0.1"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""No traffic but Flower's own."""
_PORTS = range(20000, 32000)
"""Below the range Linux takes ports of outgoing connections from."""


@dataclass
class Submission:
    """A submitted run. Its output, the ServerApp's log, is in ``log``."""

    superlink: SuperLink
    run_id: int
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        """What the ServerApp has said so far."""
        return read(self.log)

    @property
    def over(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.process.poll() is not None

    def wait(self, deadline: float = HANG) -> float:
        """Wait for the run's end; anything but success is an error. Returns the seconds it took."""
        wait_for(
            f"end of run {self.run_id}", lambda: self.over, deadline=deadline, alive=self.superlink.check
        )
        if (status := self.superlink.status(self.run_id)) != "finished:completed":
            raise LoopbackError(f"run {self.run_id} ended as {status}; its last words:\n{tail(self.log)}")
        return time.monotonic() - self.began


class SuperLink(ABC):
    """A SuperLink, started on entry; on exit everything that was started is ended, by its process id.

    Args:
        folder: new or empty; everything is written below it.
        environment: set for every process, e.g. ``{"OMP_NUM_THREADS": "1"}``.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder).resolve()
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        self.database = self.home("superlink") / "state.db"
        self._environment = {**QUIET, **(environment or {})}
        self._mark = secrets.token_hex(8)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @abstractmethod
    def _options(self) -> list[str]:
        """Of `flower-superlink`, beyond those every kind has."""

    @abstractmethod
    def _connection(self) -> dict[str, Value]:
        """How the operator connects, beyond the address."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        for name in ("superlink", "operator"):
            self.home(name).mkdir(parents=True)
        connection = {"address": self.address, **self._connection()}
        lines = ["[superlink]", 'default = "loopback"', "", "[superlink.loopback]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in connection.items()]
        (self.home("operator") / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        command += ["--isolation", "subprocess", "--disable-runtime-dependency-installation"]
        command += ["--database", str(self.database), *self._options()]
        self._start("superlink", command, self.home("superlink"))
        wait_for("the SuperLink listens", lambda: listens(self.port), alive=self.check)

    def close(self) -> None:
        """End everything that was started."""
        for name in [*self._processes]:
            kill(self._marked(name))
            self._processes.pop(name).wait()

    def home(self, name: str) -> Path:
        """Flower home of one party; its log is in there."""
        return self.folder / name

    def submit(
        self, app: Path, config: Mapping[str, Value] | None = None, options: Sequence[str] = ()
    ) -> Submission:
        """`flwr run` of the app in this folder, following its log.

        Args:
            app: folder of a Flower app.
            config: overrides the app's own settings, which must exist.
            options: further options of `flwr run`.
        """
        name = f"run-{secrets.token_hex(4)}"
        command = ["flwr", "run", str(app), "loopback", "--stream", *options]
        if config:
            command += ["--run-config", pairs(config)]
        log = self.home("operator") / f"{name}.log"
        process = self._start(name, command, self.home("operator"), log)
        pattern = re.compile(r"started run (\d+)")
        wait_for(
            "the SuperLink accepts the run",
            lambda: bool(pattern.search(read(log))) or process.poll() is not None,
            alive=self.check,
        )
        if not (found := pattern.search(read(log))):
            raise LoopbackError(f"{app} was not accepted:\n{tail(log)}")
        return Submission(self, int(found[1]), log, process)

    def status(self, run_id: int) -> str:
        """`flwr list`: what has become of a run."""
        answer = self._answer("flwr list", self._flwr("list", "--run-id", str(run_id), "loopback"))
        return str(answer["runs"][0]["status"])

    def check(self) -> None:
        """Every party that was not killed must be alive; else its last words are in the error."""
        for name, process in self._processes.items():
            if (log := self.home(name) / "log").exists() and process.poll() is not None:
                raise LoopbackError(
                    f"{name} ended with exit code {process.returncode}; its last words:\n{tail(log)}"
                )

    def _start(
        self, name: str, command: list[str], home: Path, log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        environment = {**self._environment, "FLWR_HOME": str(home)}
        self._processes[name] = start(command, self._marked(name), log or home / "log", environment)
        return self._processes[name]

    def _flwr(self, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        """A `flwr` command that answers in JSON, started."""
        name = f"flwr-{secrets.token_hex(4)}"
        log = self.home("operator") / f"{name}.json"
        command = ["flwr", *arguments, "--format", "json"]
        return self._start(name, command, self.home("operator"), log), log

    def _answer(self, what: str, running: tuple[subprocess.Popen[bytes], Path]) -> dict[str, Any]:
        process, log = running
        wait_for(what, lambda: process.poll() is not None, alive=self.check)
        self._processes.pop(log.stem)
        text = read(log)
        try:
            answer = json.loads(text[text.index("{") :])
        except ValueError as error:
            raise LoopbackError(f"{what}: expected JSON, got: {text[-2000:]}") from error
        if not answer.get("success"):
            raise LoopbackError(f"{what}: {answer.get('error-message', text[-2000:])}")
        return dict(answer)

    def _marked(self, name: str) -> str:
        return f"{self._mark}:{name}"


class Simulation(SuperLink):
    """Flower's simulation of many nodes in one process tree (needs ray), with a SuperLink of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._ray = Path(tempfile.mkdtemp(prefix="ray-"))  # not below folder: paths of sockets must be short
        super().__init__(folder, {"RAY_TMPDIR": str(self._ray), **(environment or {})})

    def close(self) -> None:
        """End everything that was started, and remove what ray has left."""
        super().close()
        shutil.rmtree(self._ray, ignore_errors=True)

    def _options(self) -> list[str]:
        return ["--insecure", "--simulation"]

    def _connection(self) -> dict[str, Value]:
        return {"insecure": True}

    def simulate(self, app: Path, nodes: int, config: Mapping[str, Value] | None = None) -> Submission:
        """`flwr run` of the app on this many simulated nodes, each with a CPU at a time."""
        return self.submit(app, config, ["--federation-config", pairs({"num-supernodes": nodes})])


def pairs(settings: Mapping[str, Value]) -> str:
    """Settings as Flower's command line takes them.

    >>> pairs({"name": "St. Anne", "partition-id": 2, "noisy": True})
    'name="St. Anne" partition-id=2 noisy=true'
    """
    for key, value in settings.items():
        if isinstance(value, str) and any(letter in value for letter in '"\\\n'):
            raise LoopbackError(f"{key}: no quote, backslash or line break can be passed, got {value!r}")
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())


def free_port() -> int:
    """A port of 127.0.0.1 nobody listens on."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise LoopbackError(f"no free port on {HOST} among 100 tried between {_PORTS.start} and {_PORTS.stop}")


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def read(log: Path) -> str:
    """A log as it is now."""
    return log.read_text(encoding="utf-8", errors="replace")


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log."""
    return "\n".join(read(log).splitlines()[-lines:])
