"""Keys and rosters, under the name that users import: see `fedmerit.identity.keys`."""

from fedmerit.identity.keys import (
    Member,
    Roster,
    load_key,
    new_key,
    parse_member,
    public_key,
    read_roster,
    verifies,
    write_roster,
)

__all__ = [
    "Member",
    "Roster",
    "load_key",
    "new_key",
    "parse_member",
    "public_key",
    "read_roster",
    "verifies",
    "write_roster",
]
