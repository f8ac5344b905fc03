"""NVFlare's sites and its server in this process: every call goes through NVFlare's own serialisation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, FLMetaKey
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.apis.workspace import Workspace
from nvflare.app_common.decomposers import common_decomposers
from nvflare.collab import collab
from nvflare.collab.api._invocation import _InvocationDispatcher
from nvflare.collab.api.app import ClientApp, ServerApp
from nvflare.collab.api.constants import FL_CONTEXT_PROP
from nvflare.collab.api.context import get_call_context, set_call_context
from nvflare.collab.api.proxy import Proxy
from nvflare.collab.runtime.dispatch import _preprocess
from nvflare.collab.runtime.lifecycle import run_server
from nvflare.fuel.utils import fobs

from fedmerit.nvflare.site import OWN, STEPS, Site

assert STEPS == FLMetaKey.NUM_STEPS_CURRENT_ROUND
JOB = "job"
Passes = Callable[[str, dict[str, Any], Callable[[], Any]], Any]
"""(site, arguments of a call, the site's answer) -> what arrives; raises for nothing."""


class Wire(_InvocationDispatcher):
    """To one site, or to the server."""

    def __init__(self, name, app, passes, aborted):
        super().__init__(aborted)
        self.name, self.app, self.passes = name, app, passes

    def call_target_in_group(self, gcc, func_name, *args, **kwargs):
        before = get_call_context()
        sent = fobs.loads(fobs.dumps(kwargs))
        try:
            gcc.set_result(fobs.loads(fobs.dumps(self.passes(self.name, sent, lambda: self._at_site(sent)))))
        except Exception as error:
            gcc.set_exception(error)
        finally:
            set_call_context(before)
            gcc.call_completed()

    def _at_site(self, sent):
        method = self.app.find_collab_method(self.app.obj, "answer")
        _, args, kwargs = _preprocess(self.app, "server", "client", "answer", method, [], dict(sent))
        return method(*args, **kwargs)

    def handle_exception(self, exception):
        raise exception


def workspace_of(home, name, own=None):
    """A startup kit with the site's own settings, and a job's app in it."""
    root = home / "sites" / name
    for folder in ("startup", "local", f"{JOB}/app_{name}/config"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / JOB / f"app_{name}" / "config" / "config_fed_client.json").write_text("{}")
    (root / "local" / "resources.json").write_text('{"allow_log_streaming": false}')
    if own is not None:
        (root / "local" / OWN).write_text("".join(f"{key} = {str(value)!r}\n" for key, value in own.items()))
    return Workspace(str(root), name)


def task_named(name, **functions):
    """A module with a task."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(functions)
    return name


def job(home, sites, main, *, passes=lambda site, sent, answer: answer(), aborted=None, **options):
    """Run ``main`` as a job's server, with these sites (name -> own settings); its result."""
    flare_decomposers.register()
    common_decomposers.register()
    aborted = aborted or Signal()

    class Main:
        @collab.main
        def run(self):
            return main()

    server = ServerApp(Main())
    apps = {name: ClientApp(Site(**options)) for name in sites}
    for name, app in (("server", server), *apps.items()):
        app.name = name
        root = {FLContextKey.WORKSPACE_ROOT: str(home / "sites" / name)}
        context = SimpleNamespace(get_prop=root.get, get_identity_name=lambda name=name, **default: name)
        context.get_job_id, context.get_engine = (lambda: JOB), object
        app.set_prop(FL_CONTEXT_PROP, context)

    def proxy(caller, name, app):
        interface = app.get_collab_interface()["client"]
        return Proxy(caller, name, name, Wire(name, app, passes, aborted), interface)

    for name, app in (("server", server), *apps.items()):
        clients = [proxy(app, site, one) for site, one in apps.items()]
        own = workspace_of(home, name, sites.get(name))
        app.setup(
            own, Proxy(app, "server", "server", Wire("server", server, passes, aborted), {}), clients, aborted
        )
    return run_server(server, server.logger)
