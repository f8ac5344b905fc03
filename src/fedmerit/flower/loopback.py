"""A whole Flower federation on 127.0.0.1: a SuperLink with TLS and node authentication, and its SuperNodes.

For demonstrations and tests of the real thing: every party is a process with a Flower home, a log and keys of
its own, as it would be on a machine of its own::

    with Loopback(folder, {"hospital-a": {"partition-id": 0}, ...}) as federation:
        run = federation.submit(app_folder, {"num-server-rounds": 2})
        federation.kill("hospital-a")            # kill -9, with everything it started
        run.wait(deadline=120)

::

    DIR/ca.pem server.pem server.key      TLS
    DIR/superlink/                        Flower home of the SuperLink, its log, state.db
    DIR/operator/                         Flower home of who submits runs (`flwr run`)
    DIR/members/NAME/                     Flower home of a member, its log, node.key, node.key.pub

Nothing but loopback is contacted: telemetry, update checks and installation of dependencies are off.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmerit.errors import FedmeritError
from fedmerit.flower.certificates import loopback_certificates, supernode_key
from fedmerit.flower.processes import kill, marked, start, wait_for

Value = str | int | float | bool
HOST = "127.0.0.1"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""No traffic but Flower's own."""
FAST = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}
"""Seconds between two questions of a SuperExec for work, of which there is one per party; Flower waits 1."""
_PORTS = range(20000, 32000)
"""Below the range Linux takes ports of outgoing connections from."""


@dataclass
class Run:
    """A submitted run. Its output, the ServerApp's log, is in ``log``."""

    federation: Loopback
    run_id: int
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        """What the ServerApp has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def over(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.process.poll() is not None

    def wait(self, deadline: float) -> float:
        """Wait for the run's end; anything but success is an error. Returns the seconds it took."""
        wait_for(f"run {self.run_id}", lambda: self.over, deadline=deadline, alive=self.federation.check)
        if (status := self.federation.status(self.run_id)) != "finished:completed":
            raise FedmeritError(f"run {self.run_id} ended as {status}; its last words:\n{tail(self.log)}")
        return time.monotonic() - self.began


class Loopback:
    """A SuperLink and one SuperNode per member. Everything starts on entry and is ended on exit.

    Args:
        folder: new or empty; everything is written below it.
        members: by name, the node configuration each member's ClientApp sees.
        environment: set for every process, e.g. ``{"OMP_NUM_THREADS": "1"}``.
    """

    def __init__(
        self,
        folder: Path,
        members: Mapping[str, Mapping[str, Value]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(folder).resolve()
        self.members = {name: dict(config) for name, config in members.items()}
        self.database = self.folder / "superlink" / "state.db"
        self.node_ids: dict[str, int] = {}
        self._environment = {**QUIET, **FAST, **(environment or {})}
        self._mark = secrets.token_hex(8)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killed: set[str] = set()

    def __enter__(self) -> Loopback:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tls = loopback_certificates(self.folder)
            self._start_superlink()
            for name in self.members:
                self.make_node_key(name)
            self.register(*self.members)
            for name in self.members:
                self.start_member(name)
            for name in self.members:
                self.wait_until_connected(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started, by its process id."""
        for name in [*self._processes]:
            kill(self._marked(name))
            self._processes.pop(name).wait()

    def make_node_key(self, name: str) -> Path:
        """A new authentication key of a member; the SuperLink does not know it yet."""
        home = self.home(name)
        home.mkdir(parents=True, exist_ok=True)
        return supernode_key(home / "node.key")

    def register(self, *names: str) -> None:
        """Tell the SuperLink the public keys of these members (`flwr supernode register`)."""
        running = {
            name: self._flwr("supernode", "register", str(self.home(name) / "node.key.pub"), "loopback")
            for name in names
        }
        for name, process in running.items():
            answer = self._answer(f"registering {name}", process)
            self.node_ids[name] = int(answer["node-id"])

    def start_member(self, name: str, config: Mapping[str, Value] | None = None) -> None:
        """Start a member's SuperNode, again where it was killed."""
        home = self.home(name)
        tls = self._tls
        command = ["flower-supernode", "--superlink", self.address, "--root-certificates", str(tls.authority)]
        command += ["--auth-supernode-private-key", str(home / "node.key")]
        command += ["--isolation", "subprocess", "--host", HOST, "--port", str(free_port())]
        command += ["--ssl-certfile", str(tls.server), "--ssl-keyfile", str(tls.key)]
        command += ["--ssl-ca-certfile", str(tls.authority)]
        command += ["--max-retries", "10"]
        if settings := {**self.members.get(name, {}), **(config or {})}:
            command += ["--node-config", pairs(settings)]
        self._start(name, command, home, home / "log")
        self._killed.discard(name)

    def wait_until_connected(self, name: str, deadline: float = 60.0) -> None:
        """Wait until the SuperLink has accepted a member."""
        log = self.home(name) / "log"
        wait_for(
            f"{name} connects to the SuperLink",
            lambda: "SuperNode ID:" in log.read_text(encoding="utf-8", errors="replace"),
            deadline=deadline,
            alive=self.check,
        )

    def submit(self, app: Path, config: Mapping[str, Value] | None = None) -> Run:
        """`flwr run` of the app in this folder, following its log. ``config`` overrides its settings."""
        log = self.folder / "operator" / f"run-{secrets.token_hex(4)}.log"
        command = ["flwr", "run", str(app), "loopback", "--stream"]
        if config:
            command += ["--run-config", pairs(config)]
        process = self._start(log.stem, command, self.folder / "operator", log)
        found: list[str] = []

        def started() -> bool:
            found[:] = re.findall(r"started run (\d+)", log.read_text(encoding="utf-8", errors="replace"))
            return bool(found) or process.poll() is not None

        wait_for("the SuperLink accepts the run", started, deadline=60, alive=self.check)
        if not found:
            raise FedmeritError(f"{app} was not accepted:\n{tail(log)}")
        return Run(self, int(found[0]), log, process)

    def status(self, run_id: int) -> str:
        """`flwr list`: what has become of a run."""
        answer = self._answer("flwr list", self._flwr("list", "--run-id", str(run_id), "loopback"))
        return str(answer["runs"][0]["status"])

    def kill(self, name: str) -> list[int]:
        """kill -9 of a member's SuperNode and everything it started; returns their process ids."""
        hit = kill(self._marked(name))
        self._processes.pop(name).wait()
        self._killed.add(name)
        return hit

    def check(self) -> None:
        """Every process that was not killed must be alive, else its last words are in the error."""
        for name in ("superlink", *self.members):
            process = self._processes.get(name)
            if process is not None and process.poll() is not None:
                raise FedmeritError(
                    f"{name} ended with exit code {process.returncode}; its last words:\n"
                    f"{tail(self.home(name) / 'log')}"
                )

    def home(self, name: str) -> Path:
        """A member's own folder, or the SuperLink's."""
        return self.folder / "superlink" if name == "superlink" else self.folder / "members" / name

    def pids(self, name: str) -> list[int]:
        """Everything that now runs for a member (or the "superlink")."""
        return marked(self._marked(name))

    def _start_superlink(self) -> None:
        port = free_port()
        self.address = f"{HOST}:{port}"
        home, tls = self.home("superlink"), self._tls
        operator = self.folder / "operator"
        for folder in (home, operator):
            folder.mkdir()
        connection = {"address": self.address, "root-certificates": str(tls.authority)}
        lines = ["[superlink]", 'default = "loopback"', "", "[superlink.loopback]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in connection.items()]
        (operator / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["flower-superlink", "--host", HOST, "--port", str(port), "--isolation", "subprocess"]
        command += ["--ssl-certfile", str(tls.server), "--ssl-keyfile", str(tls.key)]
        command += ["--ssl-ca-certfile", str(tls.authority), "--enable-supernode-auth"]
        command += ["--database", str(self.database), "--disable-runtime-dependency-installation"]
        self._start("superlink", command, home, home / "log")
        wait_for("the SuperLink listens", lambda: listens(port), deadline=60, alive=self.check)

    def _start(self, name: str, command: list[str], home: Path, log: Path) -> subprocess.Popen[bytes]:
        environment = {**self._environment, "FLWR_HOME": str(home)}
        self._processes[name] = start(command, self._marked(name), log, environment)
        return self._processes[name]

    def _flwr(self, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        """A `flwr` command that answers in JSON, started."""
        name = f"flwr-{secrets.token_hex(4)}"
        operator = self.folder / "operator"
        log = operator / f"{name}.json"
        return self._start(name, ["flwr", *arguments, "--format", "json"], operator, log), log

    def _answer(self, what: str, running: tuple[subprocess.Popen[bytes], Path]) -> dict[str, Any]:
        process, log = running
        wait_for(what, lambda: process.poll() is not None, deadline=60, alive=self.check)
        self._processes.pop(log.stem)
        text = log.read_text(encoding="utf-8", errors="replace")
        try:
            answer = json.loads(text[text.index("{") :])
        except ValueError as error:
            raise FedmeritError(f"{what}: expected JSON, got: {text[-2000:]}") from error
        if not answer.get("success"):
            raise FedmeritError(f"{what}: {answer.get('error-message', text[-2000:])}")
        return dict(answer)

    def _marked(self, name: str) -> str:
        return f"{self._mark}:{name}"


def pairs(settings: Mapping[str, Value]) -> str:
    """Settings as Flower's command line takes them.

    >>> pairs({"name": "St. Anne", "partition-id": 2, "noisy": True})
    'name="St. Anne" partition-id=2 noisy=true'
    """
    for key, value in settings.items():
        if isinstance(value, str) and ('"' in value or "\\" in value or "\n" in value):
            raise FedmeritError(
                f"{key}: a quote, backslash or line break cannot be passed to Flower, got {value!r}"
            )
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
    raise FedmeritError(f"no free port on {HOST} among 100 tried between {_PORTS.start} and {_PORTS.stop}")


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
