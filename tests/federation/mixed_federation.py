"""A federation one of whose members is a process with another package; either side may be an earlier version.

As a script it is the other way round: the server and the other members have the package that PYTHONPATH
names, perhaps an earlier one, and the member that is elsewhere has another::

    python mixed_federation.py HOME MEMBERS_PATH

So this file and member_process.py use only what every pinned version has: see test_earlier_versions.py.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from fedmerit.errors import ProtocolError
from linear_federation import Federation

HERE = Path(__file__).parent
OTHER = "client-1"


class Process:
    """A member that is elsewhere, with the package and the tests' modules on ``path``."""

    def __init__(self, home, path):
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "member_process.py"), str(home), OTHER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        self.said = self.receive()
        expected = path.split(os.pathsep)[0]
        assert self.said["from"].startswith(expected), f"expected the package in {expected}, got {self.said}"

    def receive(self):
        length = int.from_bytes(self.process.stdout.read(8), "big")
        return pickle.loads(self.process.stdout.read(length))

    def answer(self, data, m0, delta):
        request = pickle.dumps((data.head, dict(data.arrays), m0, delta))
        self.process.stdin.write(len(request).to_bytes(8, "big") + request)
        self.process.stdin.flush()
        answer = self.receive()
        if isinstance(answer, bytes):
            return answer
        raise ProtocolError(": ".join(answer))

    def close(self):
        self.process.communicate(timeout=60)


class Mixed(Federation):
    """A federation one of whose members is elsewhere: ``elsewhere`` answers for it."""

    def _answer(self, name, ask, data):
        if name != OTHER:
            return super()._answer(name, ask, data)
        delta = self.train(name, ask.round, self.model) if ask.exchange == "train" else None
        return self.elsewhere.answer(data, self.model, delta)

    def told(self):
        """What happened, in plain values: who is in each sum, who refused what, and what `verify` says."""
        return {
            "included": [list(one.included) for one in self.rounds],
            "errors": {name: [str(error) for error in self.errors(name)] for name in self.names},
            "verified": [str(line) for line in self.verified()],
        }


def main(home, path):
    federation = Mixed(home, rounds=2, files=True)
    federation.elsewhere = Process(home, path)
    try:
        json.dump(federation.run().told(), sys.stdout)
    finally:
        federation.elsewhere.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
