"""What tests of misbehaviour share: nodes whose messages can be altered, and keys to sign lies with."""

from federation_in import NODES

from fedmerit.flower.codec import BYTES, put, take
from fedmerit.identity import load_key
from fedmerit.protocol.messages import Ask, pack, unpack
from fedmerit.verify import verify_folder

LIAR = "client-1"


def exchange_of(message):
    return Ask.unpack(take(message.content))[0]


def telling(home, kind, number, change, who=LIAR):
    """What alters one exchange's message to one member, signed by the server all the same."""

    def before(node, message):
        ask = exchange_of(message)
        if node == NODES[who] and ask.exchange == kind and ask.round <= number:
            told = {**unpack(pack(dict(ask.body)), ""), **ask.arrays}
            change(told)
            arrays = {name: told.pop(name) for name in ask.arrays}
            data = Ask(ask.exchange, ask.run, ask.round, told, arrays).pack(server_of(home))
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
