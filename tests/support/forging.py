"""What tests of dishonest ledgers share: an honest one written anew, and copies of it."""

import json
import re
from contextlib import suppress

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, content, exact, load_key
from fedmerit.ledger.chain import START, Ledger, link
from fedmerit.ledger.rounds import after_round
from fedmerit.storage.recorder import score_files, scores_document
from runs import config_of, copied, records_of, rounds_of


def body_of(record):
    return json.loads(canonical(record.body))


def written(home, tell, keys=None, anew=(2,)):
    """The run's ledger and score files anew: ``tell(ledger, records)`` yields author, kind, body, signature.

    Whoever has a key here signs anew, the others' signatures stay as they are. What the server states after
    the rounds ``anew`` is computed from the records before it, by a program that looks for no lies.
    """
    folder = home / "run"
    keys = {SERVER: load_key(folder / "keys" / "server.pem"), **(keys or {})}
    records = records_of(folder)
    (folder / "ledger.sqlite").unlink()

    def add(author, kind, body, signature=b""):
        if author in keys:
            signature = keys[author].sign(content(author, kind, body))
        ledger.append(author, kind, body, signature=signature, seal=keys[SERVER].sign)

    with Ledger(folder / "ledger.sqlite") as ledger:
        with ledger.transaction():
            for author, kind, body, signature in tell(ledger, records):
                if kind in ("scores", "score", "totals") and body["round"] in anew:
                    continue
                add(author, kind, body, signature)
                if kind == "round" and body["round"] in anew:
                    for stated in after_round(rounds_of(ledger), config_of(ledger)):
                        add(SERVER, *stated)
        with suppress(LedgerError):  # the ledger itself is refused then, whatever the files say
            rounds, config = rounds_of(ledger), config_of(ledger)
            for name, data in score_files(scores_document(rounds, config)).items():
                (folder / name).write_bytes(data)


def copy_for(home, name, *, own=False):
    """A copy of the ledger; of a member's own part alone where the run has such."""
    return copied(home / "run", home / f"{name}.jsonl", *([name] if own else ()))


def anew(records, keys, at=0, body=None):
    """The lines of a copy in which record ``at`` has another body; heads in later records are followed."""
    previous, heads, lines = START, {}, []
    for seq, record in enumerate(records, start=1):
        told = body if seq == at else _followed(record.body, heads)
        said = content(record.author, record.kind, told)
        signature = keys[record.author].sign(said) if keys else b""
        digest = link(previous, seq, said, signature)
        heads[record.digest.hex()] = digest.hex()
        seal = keys[SERVER].sign(digest) if keys else b""
        line = {"seq": seq, "author": record.author, "kind": record.kind, "body": told}
        line |= {"digest": digest.hex(), "signature": signature.hex(), "seal": seal.hex()}
        lines.append(canonical(line))
        previous = digest
    return b"\n".join([*lines, b""])


def _followed(value, heads):
    if isinstance(value, dict):
        return {key: _followed(item, heads) for key, item in value.items()}
    if isinstance(value, list):
        return [_followed(item, heads) for item in value]
    return heads.get(value, value) if isinstance(value, str) else value


OTHERS = {"refuse": "equal", "zero": "own-mean", "ok": "undefined", "fair": "impartial"}
HEX = re.compile(r"[0-9a-f]{32,}")
NUMBER = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+")


def changes(value):
    """Other values that somebody might put there."""
    if isinstance(value, bool):
        yield from (not value, int(value))
    elif isinstance(value, int):
        yield from (value + 1, value - 1, -5, str(value), None, bool(value))
    elif value is None:
        yield from ("x", 0, {}, [])
    elif isinstance(value, str):
        if HEX.fullmatch(value):
            other = "0123456789abcdef"[(int(value[0], 16) + 1) % 16] + value[1:]
            yield from (other, value.upper() + "F", "00")
        elif NUMBER.fullmatch(value):
            found = float.fromhex(value)
            yield from map(exact, (found * 1.5 + 0.01, found * 0.99, float("nan"), -1e300))
            yield "x"
        else:
            yield from (value + "x", "", *([OTHERS[value]] if value in OTHERS else ()))
        yield from (None, True, [])
    elif isinstance(value, list):
        yield from (value[:-1], value + value[-1:], value[::-1], [*value, "nobody"], None, {}, "")
    elif isinstance(value, dict):
        yield {**value, "unexpected": "x"}
        yield None
        for key in value:
            yield {name: item for name, item in value.items() if name != key}
            break


def places(body, path=()):
    yield path, body
    if isinstance(body, dict):
        for key, item in body.items():
            yield from places(item, (*path, key))
    elif isinstance(body, list):
        for k, item in enumerate(body):
            yield from places(item, (*path, k))


def put(body, path, value):
    if not path:
        return value
    made = json.loads(canonical(body))
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return made
