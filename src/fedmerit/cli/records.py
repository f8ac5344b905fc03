"""Commands on what is kept: a run's ledger (verify, export), identity keys and the roster (keys)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmerit.cli import app, fail, out
from fedmerit.scoring.files import LEDGER

# ---------------------------------------------------------------------------------------------- the ledger


@app.command()
def verify(
    source: Annotated[
        Path, typer.Argument(help="A run folder, or an exported ledger (.jsonl).", metavar="SOURCE")
    ],
    head: Annotated[
        str | None, typer.Option(help="A head of the ledger that you kept: it must still be on the chain.")
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(help="A member's file of what it was shown and reported: KEY.pem.state/RUN/heads."),
    ] = None,
    as_: Annotated[
        str | None, typer.Option("--as", help="Who you are: your own part is told too.", metavar="NAME")
    ] = None,
    roster: Annotated[
        Path | None,
        typer.Option(
            help="Your roster file: the members' keys must be its, not just those the ledger states."
        ),
    ] = None,
) -> None:
    """Check a run's ledger: chain, signatures, heads, and that scores and payouts follow from the reports.

    SOURCE is a run folder, or an exported ledger (.jsonl).
    """
    from fedmerit.verify import verify_copy, verify_folder

    copy = source.suffix == ".jsonl" and not source.is_dir()
    if source.is_file() and not copy:
        inside = f": give its folder, {source.parent}" if source.name == LEDGER else ""
        fail(f"{source}: expected a run folder or an exported ledger (.jsonl), got another file{inside}")
    check = verify_copy if copy else verify_folder
    for line in check(source, head=head, heads=heads, member=as_, roster=roster):
        out.print(line)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    out_: Annotated[Path, typer.Option("--out", help="Where to write it; a name that ends in .jsonl.")],
    for_: Annotated[
        str | None,
        typer.Option("--for", help="The member whose copy it is; it holds what that member may see."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite any file that is there.")] = False,
) -> None:
    """The ledger of the run folder DIR as lines of JSON, to keep, to hand out, and to verify again.

    A copy that is there is overwritten only by one that goes on from it, or with --force.
    """
    from fedmerit.ledger.chain import Ledger, exported
    from fedmerit.ledger.records import config_of
    from fedmerit.ledger.visibility import sees
    from fedmerit.storage.run_folder import write

    if out_.suffix != ".jsonl":
        fail(f"{out_}: expected a name that ends in .jsonl")
    if not out_.parent.is_dir():
        fail(f"{out_}: could not be written: there is no folder {out_.parent}")
    with Ledger(folder / LEDGER, read_only=True) as ledger:
        config = config_of(ledger)
        if for_ is not None and for_ not in config.clients:
            fail(f"{for_!r} is not a member of the run; members are {', '.join(config.clients)}")
        private = for_ is not None and config.scoring.visibility == "coordinator"
        visible = sees(for_) if private and for_ is not None else lambda _: True
        lines = list(exported(ledger, visible))
    data = b"".join(lines)
    if out_.exists() and not force and not data.startswith(out_.read_bytes()):
        fail(f"{out_}: exists, and this ledger does not go on from it: --out another file, or --force")
    write(out_, data, mode=0o600 if config.scoring.visibility == "coordinator" else 0o644)
    held = sum(b'"withheld":' in line for line in lines)
    out.print(f"wrote {out_}: {len(lines)} records" + (f", {held} of them withheld" if private else ""))
    if for_ is not None and not private:
        out.print("every member of this run may see every record, so nothing is withheld")


# ------------------------------------------------------------------------------------- keys and the roster

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
