"""Keys and rosters, under the name that users import: see `fedmerit.identity`. And changes of a roster.

Between two runs, members may join, leave or replace a key, and the server may get another key. Somebody
writes the new roster and proposes it. Members of the old roster sign the change, each on its own machine.
As soon as enough of them have signed (``Roster.needed``), it is adopted: the new roster file holds the
signatures and all rosters before it. A member follows no other change. See docs/operations.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedmerit.errors import KeyFileError
from fedmerit.identity import *  # noqa: F403
from fedmerit.identity import (
    PREFIX,
    Roster,
    check_signed,
    public_key,
    read_history,
    roster_of,
    signatures_of,
    signed_as,
    stated,
    toml_of,
)
from fedmerit.identity import __all__ as _names
from fedmerit.identity import named as _named

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [*_names, "Change", "read_change"]
FORMAT = "fedmerit roster change 1"


@dataclass(frozen=True)
class Change:
    """A roster that is proposed in place of another, with the signatures that it has so far.

    Raises:
        KeyFileError: somebody signed who is not on the old roster, or a signature is not that member's.
    """

    old: Roster
    new: Roster
    signatures: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_signed(self.old, self.new, self.signatures)

    @classmethod
    def proposed(cls, old: Roster, new: Roster) -> Change:
        """Return the change from one roster to another, which nobody has signed yet."""
        if new.previous is not None:
            raise KeyFileError(
                "the new roster states one before it: expected a file as `fedmerit keys roster` writes it"
            )
        if new == Roster(old.members, old.server, quorum=old.quorum):
            raise KeyFileError("the new roster is the old one: there is nothing to sign")
        return cls(old, Roster(new.members, new.server, old.hash, new.quorum))

    @property
    def missing(self) -> int:
        """How many signatures are still missing."""
        return max(0, self.old.needed - len(self.signatures))

    def signed(self, key: Ed25519PrivateKey) -> Change:
        """Return the change with one more signature; its author must be on the old roster."""
        for member in self.old.members:
            if member.key == public_key(key):
                return self._with({member.name: key.sign(signed_as(self.new))})
        raise KeyFileError("this is not the key of a member on the old roster, and only those sign")

    def joined(self, other: Change) -> Change:
        """Return the change with the signatures of both."""
        if other.new.hash != self.new.hash:
            raise KeyFileError(
                f"expected signatures on one new roster, got those on {self.new.hash.hex()} and on "
                f"{other.new.hash.hex()}"
            )
        return self._with(other.signatures)

    def _with(self, more: Mapping[str, bytes]) -> Change:
        return Change(self.old, self.new, dict(sorted({**self.signatures, **more}.items())))

    def adopted(self) -> Roster:
        """Return the new roster with its chain; raise KeyFileError if too few have signed."""
        return Roster(self.new.members, self.new.server, self.old, self.new.quorum, self.signatures)

    def text(self) -> str:
        """Return the change as the text of a file."""
        return toml_of({"format": FORMAT, **stated(self.new, self.signatures, self.old)})

    def differences(self) -> Iterator[str]:
        """Yield what changes, one line each."""
        before, after = ({one.name: one for one in roster.members} for roster in (self.old, self.new))
        for name in sorted({*before, *after}):
            old, new = before.get(name), after.get(name)
            if new is None:
                yield f"{name} leaves"
            elif old is None:
                yield f"{name} joins  {PREFIX}{new.key.hex()}"
            elif old.key != new.key:
                yield f"{name} has a new key  {PREFIX}{new.key.hex()}, not {PREFIX}{old.key.hex()}"
            if old and new and old.weight != new.weight:
                yield f"{name} has another weight: {_weight(new.weight)}, not {_weight(old.weight)}"
        if self.old.server != self.new.server:
            yield f"the server has a new key  {_key(self.new.server)}, not {_key(self.old.server)}"
        if self.old.needed != self.new.needed:
            yield (
                f"the next change needs {self.new.needed} of {len(after)} members, not {self.old.needed} of "
                f"{len(before)}"
            )


def _weight(weight: float | None) -> str:
    return "none" if weight is None else f"{weight:g}"


def _key(key: bytes | None) -> str:
    return "none" if key is None else PREFIX + key.hex()


def read_change(path: str | os.PathLike[str]) -> Change:
    """Read a proposed change of a roster, with the signatures it has so far."""
    table, old = read_history(path, FORMAT)
    with _named(path):
        if old is None:
            raise KeyFileError("expected the old roster in [[history]]")
        given = signatures_of(table)
        return Change(old, roster_of({**table, "signatures": []}, old.hash), given)
