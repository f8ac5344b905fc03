"""What tests of misbehaviour share: nodes whose messages can be altered, and keys to sign lies with."""

import json

import numpy as np
from federation_in import NODES
from flwr.app import Array, Message

from fedmerit.flower.codec import BYTES, put, take
from fedmerit.identity import canonical, content, load_key
from fedmerit.protocol.messages import Ask, Parcel, pack, unpack
from fedmerit.verify import verify_folder

LIAR = "client-1"


def exchange_of(message):
    return Ask.unpack(take(message.content))[0]


def answering(kind, number, change, who=LIAR):
    """What alters one member's answer to one exchange."""

    def alter(node, message, reply):
        ask = exchange_of(message)
        if node == NODES[who] and (ask.exchange, ask.round) == (kind, number) and not reply.has_error():
            return Message(put(Parcel(change(take(reply.content).head))), reply_to=message)
        return reply

    return alter


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


def resigned(home, data, change):
    """A member's answer with a changed report that it signed all the same."""
    body, _, keys = unpack(data, "")
    parsed = json.loads(body)
    change(parsed)
    signature = load_key(home / f"{LIAR}.pem").sign(content(LIAR, "report", parsed))
    return pack([canonical(parsed), signature, keys])


def fedmerit_array(values):
    return Array(values.astype(np.float32))
