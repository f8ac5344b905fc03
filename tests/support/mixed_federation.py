"""A federation one of whose members is a process with another package, which stands for another version.

Run as a script, this file is that member: it is started with the folder of its key and roster, and with its
name, reads requests from standard input and writes answers to standard output, each a length and a pickle.
"""

import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

from fedmerit.errors import FedmeritError, ProtocolError
from linear_federation import Federation, fit

OTHER = "client-1"


def send(stream, value):
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


def receive(stream):
    """Return the next value; None at the end."""
    length = stream.read(8)
    return pickle.loads(stream.read(int.from_bytes(length, "big"))) if length else None


class Process:
    """A member that is elsewhere, with the package and the tests' modules on ``path``."""

    def __init__(self, home, path):
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(home), OTHER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.said = receive(self.process.stdout)
        expected = path.split(os.pathsep)[0]
        assert self.said["from"].startswith(expected), f"expected the package in {expected}, got {self.said}"

    def answer(self, data, m0, delta):
        send(self.process.stdin, (data.head, dict(data.arrays), m0, delta))
        answer = receive(self.process.stdout)
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


def main(home, name):
    import fedmerit
    from fedmerit.identity import load_key, read_roster
    from fedmerit.protocol.member import Participant
    from fedmerit.protocol.messages import Parcel
    from fedmerit.protocol.outcome import Trained, Work
    from fedmerit.storage.member_state import MemberFiles

    key = home / f"{name}.pem"
    identity = load_key(key)
    states = partial(MemberFiles, key, identity)
    send(sys.stdout.buffer, {"version": fedmerit.__version__, "from": fedmerit.__file__})
    while request := receive(sys.stdin.buffer):
        head, arrays, m0, delta = request

        def work(m0=m0, delta=delta):
            return Work(m0, b"", lambda: Trained(delta, 50))

        try:
            roster = read_roster(home / "roster.toml")
            member = Participant(name, identity, roster, states, lambda shape, utilities: fit)
            answer = member.answer(Parcel(head, arrays), "here", None if delta is None else work)
        except FedmeritError as error:
            answer = type(error).__name__, str(error)
        send(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
