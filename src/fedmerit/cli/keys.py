"""Commands on identity keys and the roster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmerit.cli.base import app, out

FEWEST = 3
"""Members of a federation (see ``partition.clients``)."""

keys_app = typer.Typer(help="Identity keys and the roster.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


@keys_app.command("new")
def keys_new(
    path: Annotated[Path, typer.Argument(help="Where to write the private key (mode 600).")],
) -> None:
    """Make an identity key; prints the public key for the roster.

    PATH is the file for the private key: a new one, which only its owner may read (mode 600).
    """
    from fedmerit.identity.keys import PREFIX, new_key

    out.print(PREFIX + new_key(path).hex())


@keys_app.command("roster")
def keys_roster(
    path: Annotated[Path, typer.Argument(help="The roster file: written from --member, or checked.")],
    member: Annotated[
        list[str] | None, typer.Option(help="NAME=ed25519:PUBLICKEY[,WEIGHT], repeatable.")
    ] = None,
) -> None:
    """Write a roster of names and public keys, or check one; prints its hash, which all members compare.

    PATH is the roster file (TOML or .json): a new one with --member, otherwise one that is checked.
    """
    from fedmerit.identity.keys import Roster, parse_member, read_roster, write_roster

    if member:
        write_roster(path, Roster(parse_member(text) for text in member))
    roster = read_roster(path)
    for one in roster.members:
        out.print(
            f"{one.name}  ed25519:{one.key.hex()}" + ("" if one.weight is None else f"  {one.weight:g}")
        )
    count = len(roster.members)
    out.print(f"{count} member{'' if count == 1 else 's'}, roster hash {roster.hash.hex()}")
    if count < FEWEST:
        out.print(
            f"note: a federation needs at least {FEWEST} members: with two, each learns the other's update"
        )
