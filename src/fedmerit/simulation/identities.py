"""Keys of a rehearsal, all in one folder. Loaded only where a run has masks: it needs `cryptography`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmerit.errors import KeyFileError
from fedmerit.identity.encoding import SERVER
from fedmerit.identity.keys import Member, Roster, load_key, new_key, public_key
from fedmerit.secagg.state import Released


@dataclass(frozen=True, repr=False)
class Identities:
    """Private keys of the server and of all members."""

    members: dict[str, Ed25519PrivateKey]
    server: Ed25519PrivateKey
    roster: Roster
    released: dict[str, Released]

    @classmethod
    def in_folder(cls, folder: Path, names: Sequence[str], *, make: bool) -> Identities:
        """Read the keys there; with ``make``, make those (mode 600) that are not there yet."""
        folder.mkdir(mode=0o700, exist_ok=True)
        keys = {}
        for name in (SERVER, *names):
            path = folder / f"{name}.pem"
            if make and not path.exists():
                new_key(path)
            keys[name] = load_key(path)
        server = keys.pop(SERVER)
        roster = Roster(Member(name, public_key(key)) for name, key in keys.items())
        return cls(keys, server, roster, {name: Released() for name in names})

    @property
    def public(self) -> dict[str, bytes]:
        """Public keys by author, the server's among them."""
        return {SERVER: public_key(self.server)} | {
            name: public_key(key) for name, key in self.members.items()
        }

    def sign(self, author: str, message: bytes) -> bytes:
        """Sign as somebody."""
        key = self.server if author == SERVER else self.members.get(author)
        if key is None:
            raise KeyFileError(f"no key of {author!r} here")
        return key.sign(message)
