"""What tests of misbehaviour share: nodes whose messages can be altered, and keys to sign lies with."""

from federation_in import NODES
from fedmerit.flower.codec import BYTES, put, take
from fedmerit.identity import load_key
from fedmerit.protocol.messages import Ask
from fedmerit.verify import verify_folder
from wire import said_in, told

LIAR = "client-1"


def exchange_of(message):
    return Ask.unpack(take(message.content))[0]


def at(grid, exchange, number, act, who=None):
    """Call ``act(message)`` when the server sends an exchange to a node; None is any round or any node."""
    earlier = grid.before

    def before(node, message):
        earlier(node, message)
        ask = exchange_of(message)
        if ask.exchange == exchange and number in (None, ask.round) and who in (None, node):
            act(message)

    grid.before = before


def dies(error=KeyboardInterrupt):
    """What `at` calls where the server dies."""

    def act(message):
        raise error

    return act


def telling(home, kind, number, change, who=LIAR):
    """What alters one exchange's message to one member, signed by the server all the same."""

    def before(node, message):
        ask = exchange_of(message)
        if node == NODES[who] and ask.exchange == kind and ask.round <= number:
            body = {**said_in(ask), **ask.arrays}
            change(body)
            arrays = {name: body.pop(name) for name in ask.arrays}
            data = told(ask, body, arrays).pack(server_of(home))
            message.content[BYTES] = put(data)[BYTES]

    return before


def checked(strategy, rounds, folder):
    """The run came to its end, and its ledger verifies."""
    assert len(rounds) == 2
    list(verify_folder(folder / "run"))
    return strategy.notes


def server_of(home):
    """The server's own hand: what a dishonest one signs with."""
    return load_key(home / "run" / "keys" / "server.pem").sign
