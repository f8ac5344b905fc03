"""What tests do to the file of a ledger, and what a run between members of one process needs to begin."""

import secrets
import sqlite3

import numpy as np

from fedmerit.identity import load_key
from fedmerit.protocol.pool import Pool
from fedmerit.protocol.terms import FLOWER, proposed


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


def pool_of(x, y, slices=1, key=None, settled=0):
    """A committed test pool of these samples, in this order."""
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
