"""NVFlare's server and sites as real processes on this machine, with mutual TLS and a startup kit for each.

A site's job runs in a process of its own, which can be killed (-9).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loopback.processes import LoopbackError, kill, marked, start, wait_for
from loopback.superlink import free_port, read

ADMIN = "admin@nvidia.com"
SERVER = "server"
PROJECT = """
api_version: 3
name: loopback
participants:
- {{name: server, type: server, org: nvidia, default_host: localhost, fed_learn_port: {port}}}
- {{name: admin@nvidia.com, type: admin, org: nvidia, role: project_admin}}
{sites}
builders:
- path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  args: {{template_file: [master_template.yml, aws_template.yml, azure_template.yml]}}
- path: nvflare.lighter.impl.static_file.StaticFileBuilder
  args: {{config_folder: config}}
- path: nvflare.lighter.impl.cert.CertBuilder
- path: nvflare.lighter.impl.signature.SignatureBuilder
"""
"""What NVFlare provisions for a proof of concept, at a free port."""


class Flare:
    """A proof of concept of NVFlare (``nvflare poc``), whose processes end with this context.

    Args:
        folder: everything lies below it.
        sites: by name, the site's own settings for fedmerit, or none.
        environment: set for every process.
        strict: whether sites run no code from jobs, only fedmerit's door and NVFlare's own.
    """

    def __init__(
        self,
        folder: Path,
        sites: Mapping[str, Mapping[str, Path | str]],
        environment: Mapping[str, str] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.folder, self.sites, self.environment = folder, sites, environment or {}
        self.strict = strict
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        from nvflare.tool.poc.poc_commands import prepare_poc_provision

        project = self.folder / "loopback.yml"
        kind = "type: client, org: nvidia"
        clients = "\n".join(f"- {{name: {name}, {kind}}}" for name in self.sites)
        project.write_text(PROJECT.format(port=free_port(), sites=clients))
        with contextlib.redirect_stdout(io.StringIO()):
            prepare_poc_provision([*self.sites], len(self.sites), str(self.folder), "", False, str(project))
        for name, own in self.sites.items():
            lines = [f'{key} = "{value}"\n' for key, value in own.items()]
            (self.kit(name) / "local" / "fedmerit.toml").write_text("".join(lines))
        for name in (SERVER, *self.sites):
            self._write_rules(self.kit(name) / "local")
        server = self.kit(SERVER) / "startup" / "fed_server.json"  # else it accepts from all addresses
        server.write_text(server.read_text().replace('"target": "server:', '"target": "localhost:'))
        try:
            self.start(SERVER)
            for name in self.sites:
                self.start(name)
            for name in self.sites:
                wait_for(f"{name} registers", partial(self._registered, name), alive=self.check)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self.sites, SERVER):
            kill(self.mark(name))
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def kit(self, name: str) -> Path:
        """The startup kit of a site, of the server or of the admin."""
        return self.folder / "loopback" / "prod_00" / name

    def log(self, name: str) -> str:
        """What a site or the server has printed, its jobs included."""
        return read(self.kit(name) / "printed")

    def start(self, name: str) -> None:
        """Start the server or a site, with the command of its startup kit."""
        who, settings = ("server", "") if name == SERVER else ("client", f"uid={name}")
        command = ["python", "-u", "-m", f"nvflare.private.fed.app.{who}.{who}_train"]
        command += ["-m", str(self.kit(name)), "-s", f"fed_{who}.json", "--set", "secure_train=true"]
        command += [*settings.split(), "org=nvidia", "config_folder=config"]
        log = self.kit(name) / "printed"
        self._processes[name] = start(command, self.mark(name), log, self.environment)

    def submit(self, recipe: Any) -> str:
        """Submit a job as the admin does; return its identifier."""
        from nvflare.recipe import ProdEnv

        return str(recipe.run(ProdEnv(str(self.kit(ADMIN)), login_timeout=30.0)).get_job_id())

    def status(self, job: str) -> str:
        """What NVFlare says of a job."""
        from nvflare.recipe import ProdEnv

        return str(ProdEnv(str(self.kit(ADMIN)), login_timeout=30.0).get_job_status(job))

    def wait(self, job: str) -> str:
        """Wait until a job is over; return what NVFlare says of it."""
        said = ""

        def over() -> bool:
            nonlocal said
            said = self.status(job)
            return said.startswith("FINISHED")

        wait_for(f"job {job} ends", over, alive=self.check, every=1.0)
        return said

    def kill_job(self, name: str) -> list[int]:
        """kill -9 of a site's job, not of the site; returns the process ids."""
        hit = [pid for pid in marked(self.mark(name)) if pid != self._processes[name].pid]
        for pid in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return hit

    def check(self) -> None:
        """Raise if the server or a site has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise LoopbackError(f"{name} has ended ({process.returncode}): {self.log(name)[-2000:]}")

    def _write_rules(self, local: Path) -> None:
        """Let logs stay where they are; a strict site refuses jobs that bring code, and other classes."""
        own = local / "resources.json"
        resources = json.loads((own if own.exists() else local / "resources.json.default").read_text())
        resources["allow_log_streaming"] = False
        if self.strict:
            resources["class_allow_list"] = ["nvflare.collab.runtime.", "fedmerit.nvflare."]
            rights = json.loads((local / "authorization.json.default").read_text())
            rights["permissions"]["project_admin"] = {"submit_job": "any", "view": "any", "byoc": "none"}
            (local / "authorization.json").write_text(json.dumps(rights))
        own.write_text(json.dumps(resources))

    def _registered(self, name: str) -> bool:
        return "Successfully registered client" in self.log(name)

    def mark(self, name: str) -> str:
        """What the processes of a site, or of the server, are found by."""
        return f"{self.folder}/{name}"
