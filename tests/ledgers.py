"""What tests do to the file of a ledger."""

import sqlite3

from fedmerit.identity import load_key


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
