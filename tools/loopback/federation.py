"""A whole Flower federation on 127.0.0.1: a SuperLink with TLS and node authentication, and its SuperNodes.

::

    with Loopback(folder, {"Abbey": {"partition-id": 0}, "Bridge": {"partition-id": 1}, ...}) as federation:
        run = federation.submit(app_folder, {"rounds": 2})
        federation.kill("Abbey")            # kill -9, with everything it started
        run.wait()

Beside the SuperLink's folders::

    DIR/ca.pem server.pem server.key        TLS, for everybody
    DIR/members/NAME/                       Flower home of a member, its log, node.key, node.key.pub
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from loopback.certificates import loopback_certificates, supernode_key
from loopback.processes import kill, marked, wait_for
from loopback.superlink import HOST, SuperLink, Value, free_port, pairs, read


class Loopback(SuperLink):
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
        super().__init__(folder, environment)
        self.members = {name: dict(config) for name, config in members.items()}
        self.node_ids: dict[str, int] = {}

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tls = loopback_certificates(self.folder)
        super()._open()
        for name in self.members:
            self.make_node_key(name)
        self.register(*self.members)
        for name in self.members:
            self.start_member(name)
        for name in self.members:
            self.wait_until_connected(name)

    def _options(self) -> list[str]:
        return ["--enable-supernode-auth", *self._certificates()]

    def _connection(self) -> dict[str, Value]:
        return {"root-certificates": str(self._tls.authority)}

    def _certificates(self) -> list[str]:
        tls = self._tls
        options = ["--ssl-certfile", str(tls.server), "--ssl-keyfile", str(tls.key)]
        return [*options, "--ssl-ca-certfile", str(tls.authority)]

    def home(self, name: str) -> Path:
        """Flower home of a member, of the "superlink" or of the "operator"."""
        return super().home(name) if name in ("superlink", "operator") else self.folder / "members" / name

    def make_node_key(self, name: str) -> Path:
        """A new authentication key of a member; the SuperLink does not know it yet."""
        self.home(name).mkdir(parents=True, exist_ok=True)
        return supernode_key(self.home(name) / "node.key")

    def register(self, *names: str) -> None:
        """Tell the SuperLink the public keys of these members (`flwr supernode register`)."""
        running = {
            name: self._flwr("supernode", "register", str(self.home(name) / "node.key.pub"), "loopback")
            for name in names
        }
        for name, process in running.items():
            self.node_ids[name] = int(self._answer(f"registering {name}", process)["node-id"])

    def start_member(self, name: str, options: Sequence[str] = ()) -> None:
        """Start a member's SuperNode, again where it was killed; options are further ones of its command."""
        home = self.home(name)
        command = ["flower-supernode", "--superlink", self.address, "--isolation", "subprocess"]
        command += ["--root-certificates", str(self._tls.authority), *self._certificates()]
        command += ["--auth-supernode-private-key", str(home / "node.key"), "--max-retries", "10"]
        command += ["--host", HOST, "--port", str(free_port()), *options]
        if config := self.members.get(name):
            command += ["--node-config", pairs(config)]
        (home / "log").unlink(missing_ok=True)
        self._start(name, command, home)

    def wait_until_connected(self, name: str) -> None:
        """Wait until the SuperLink has accepted a member."""
        wait_for(
            f"{name} connects to the SuperLink",
            lambda: "SuperNode ID:" in read(self.home(name) / "log"),
            alive=self.check,
        )

    def last_words(self, name: str) -> str:
        """The log of a SuperNode that is expected to end by itself, once it has."""
        process = self._processes[name]
        wait_for(f"{name} ends", lambda: process.poll() is not None, alive=lambda: None)
        del self._processes[name]
        return read(self.home(name) / "log")

    def sent(self, name: str, kind: str) -> int:
        """How many messages of this type a member has sent, completely."""
        entry = rf"Sending: {re.escape(kind)} message(?:(?!Sending:).)*?Sent successfully"
        return len(re.findall(entry, read(self.home(name) / "log"), re.DOTALL))

    def kill(self, name: str) -> list[int]:
        """kill -9 of a member's SuperNode and everything it started; returns their process ids."""
        hit = kill(self._marked(name))
        self._processes.pop(name).wait()
        return hit

    def pids(self, name: str) -> list[int]:
        """Everything that now runs for a member (or the "superlink")."""
        return marked(self._marked(name))
