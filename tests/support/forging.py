"""What tests of dishonest ledgers share: an honest one written anew, and copies of it."""

import json
from contextlib import suppress

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, content, load_key
from fedmerit.ledger.chain import Ledger, exported
from fedmerit.ledger.rounds import after_round, sees
from fedmerit.storage.recorder import score_files, scores_document
from runs import config_of, rounds_of


def body_of(record):
    return json.loads(canonical(record.body))


def written(home, tell, keys=None, anew=(2,)):
    """The run's ledger and score files anew: ``tell(ledger, records)`` yields author, kind, body, signature.

    Whoever has a key here signs anew, the others' signatures stay as they are. What the server states after
    the rounds ``anew`` is computed from the records before it, by a program that looks for no lies.
    """
    folder = home / "run"
    keys = {SERVER: load_key(folder / "keys" / "server.pem"), **(keys or {})}
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        records = list(ledger.records())
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
    path = home / f"{name}.jsonl"
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        path.write_bytes(b"".join(exported(ledger, sees(name)) if own else exported(ledger)))
    return path
