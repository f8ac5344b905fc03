"""What tests do to the file of a ledger, and what a run between members of one process needs to begin."""

import copy
import secrets
import sqlite3

import numpy as np

from fedmerit.identity import SERVER, content, load_key
from fedmerit.ledger.chain import Ledger
from fedmerit.protocol.pool import Pool
from fedmerit.protocol.terms import FLOWER, proposed
from runs import records_of


def cut(path, last):
    """Delete all records after ``last``, as somebody does who knows what the header of the file keeps."""
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM records WHERE seq > ?", (last,))
        rows = db.execute("SELECT digest FROM records WHERE seq = ?", (last,)).fetchall()
        mark = int.from_bytes(rows[0][0][:4], "big") & 0x7FFFFFFF if rows else 0
        db.execute(f"PRAGMA user_version = {last if rows else 0}")
        db.execute(f"PRAGMA application_id = {mark}")
    db.close()


class Keys:
    """Everybody's private keys in a rehearsal's folder: who holds them can sign as anybody."""

    def __init__(self, folder):
        self.keys = {path.stem: load_key(path) for path in folder.glob("*.pem")}

    def sign(self, author, message):
        return self.keys[author].sign(message)


def written_anew(folder, edit, *, signed=True, times=lambda record: 1):
    """The whole ledger of a folder anew; ``edit(record, body)`` changes bodies in place.

    Signed, it is by a server with its key: it changes its own records, and members' stay as they signed them.
    Otherwise by anybody who has the file: signatures and seals are as they were. Heads that are named are
    followed where no member signed them. ``times`` says how often a record is written.
    """
    keys = Keys(folder / "keys") if signed else None
    records = records_of(folder)
    (folder / "ledger.sqlite").unlink()
    heads = {}
    with Ledger(folder / "ledger.sqlite") as ledger, ledger.transaction():
        for record in records:
            body, signature = copy.deepcopy(record.body), record.signature
            if not signed or record.author == SERVER:
                edit(record, body)
                for holder in (body, body.get("bound_to")):
                    if isinstance(holder, dict) and str(holder.get("head")) in heads:
                        holder["head"] = heads[holder["head"]]
            if signed and record.author == SERVER:
                signature = keys.sign(SERVER, content(SERVER, record.kind, body))
            seal = lambda digest, own=record.seal: keys.sign(SERVER, digest) if signed else own  # noqa: E731
            for _ in range(times(record)):
                ledger.append(
                    record.author, record.kind, body, signature=signature, seal=seal if record.seal else None
                )
            heads[record.digest.hex()] = ledger.head


def pool_of(x, y, slices=1, key=None, settled=0):
    """A committed test pool of these samples, in this order; the last ones may be the settlement's."""
    return Pool(
        indices=np.arange(len(y)),
        x=x,
        y=y,
        slices=slices,
        balanced=False,
        classes=0,
        utility_hash="0" * 64,
        key=key or secrets.token_bytes(32),
        settled=settled,
    )


def terms_of(text, roster, *, optimiser=False):
    """What a server that averages proposes."""
    about = {"strategy": "FedAvg", "optimiser": optimiser, "evaluates": "server", "engine": FLOWER}
    return proposed(text, roster, **about)
