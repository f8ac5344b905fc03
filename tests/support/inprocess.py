"""A Grid whose nodes live in this process: every message goes through Flower's own serialisation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedmerit.flower.grid import UNAVAILABLE

FAILED = 1


class InProcess(Grid):
    """Nodes are client apps with their own context.

    Args:
        apps: by node id.
        node_config: of each node.
        run_config: of all.
    """

    def __init__(self, apps, node_configs, run_config=None):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
        self.apps = apps
        self.contexts = {
            node: Context(7, node, config, RecordDict(), dict(run_config or {}))
            for node, config in node_configs.items()
        }
        self.dead = set()
        self.seen = []  # (node, message to it, reply) in order
        self.alter: Callable[[int, Message, Message], Message] = lambda node, message, reply: reply
        self.before: Callable[[int, Message], None] = lambda node, message: None
        self._replies = {}
        self._ids = itertools.count(1)

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return [node for node in self.apps if node not in self.dead]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            identity = str(next(self._ids))
            ids.append(identity)
            message = copy.deepcopy(message)
            message.metadata.__dict__["_message_id"] = identity
            node = message.metadata.dst_node_id
            self._replies[identity] = self._answer(node, message)
        return ids

    def pull_messages(self, message_ids):
        return [self._replies.pop(one) for one in list(message_ids) if one in self._replies]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, node, message):
        if node not in self.dead:
            self.before(node, message)
        if node in self.dead:
            return Message(Error(UNAVAILABLE, "Node Unavailable"), reply_to=message)
        try:
            reply = self.apps[node](copy.deepcopy(message), self.contexts[node])
        except Exception as error:
            reply = Message(Error(FAILED, f"{type(error).__name__}: {error}"), reply_to=message)
        reply = self.alter(node, message, reply)
        self.seen.append((node, message, reply))
        return reply
