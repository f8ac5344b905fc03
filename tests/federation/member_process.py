"""One member in a process of its own, with the package that its PYTHONPATH names: see mixed_federation.py.

It reads requests from standard input and writes answers to standard output, each a length and a pickle. It
is started with the folder of its key and roster, and with its name.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path


def main(home: Path, name: str) -> None:
    import fedmerit
    from fedmerit.errors import FedmeritError
    from fedmerit.identity import load_key, read_roster
    from fedmerit.protocol.member import Participant
    from fedmerit.protocol.messages import Parcel

    try:
        from fedmerit.protocol.outcome import Trained, Work
    except ModuleNotFoundError:  # before they had a module of their own
        from fedmerit.protocol.messages import Trained, Work  # type: ignore[attr-defined,no-redef]
    from fedmerit.storage.member_state import MemberFiles
    from linear_federation import fit

    key = home / f"{name}.pem"
    identity = load_key(key)
    states = partial(MemberFiles, key, identity)
    send({"version": fedmerit.__version__, "from": fedmerit.__file__})
    while request := receive():
        head, arrays, m0, delta = request

        def work(m0=m0, delta=delta):
            return Work(m0, b"", lambda: Trained(m0, delta, 50))

        try:
            roster = read_roster(home / "roster.toml")
            member = Participant(name, identity, roster, states, lambda shape, utilities: fit)
            send(member.answer(Parcel(head, arrays), "here", None if delta is None else work))
        except FedmeritError as error:
            send((type(error).__name__, str(error)))


def send(value: object) -> None:
    data = pickle.dumps(value)
    sys.stdout.buffer.write(len(data).to_bytes(8, "big") + data)
    sys.stdout.buffer.flush()


def receive() -> tuple | None:
    """Return the next request; None at the end."""
    length = sys.stdin.buffer.read(8)
    return pickle.loads(sys.stdin.buffer.read(int.from_bytes(length, "big"))) if length else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
