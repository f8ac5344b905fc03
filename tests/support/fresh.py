"""A node whose app answers each message in a process of its own, as a SuperNode's does."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

CODE = """
import pickle, sys
from flwr.supercore.object_ref import load_app
from flwr.supercore.task_identity import TaskIdentity
reference, project, message, context = pickle.load(sys.stdin.buffer)
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
reply = load_app(reference, RuntimeError, project)(message, context)
sys.stdout.buffer.write(pickle.dumps((reply, context.state, [*sys.modules])))
"""


class Fresh:
    """Called like an app; keeps what each process had imported at its end.

    Args:
        reference: the app, as in pyproject.toml.
        project: the folder of its package.
    """

    def __init__(self, reference, project):
        self.reference, self.project = reference, str(project)
        self.imported = []  # (message, modules) in order

    def __call__(self, message, context):
        given = pickle.dumps((self.reference, self.project, message, context))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", CODE], input=given, env=environment, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.decode()[-500:])
        reply, context.state, modules = pickle.loads(done.stdout)
        self.imported.append((message, {*modules}))
        return reply
