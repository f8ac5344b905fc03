"""Commands of members and operators: keys, the roster, a member's state, a settlement that waits, doctor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedmerit.cli.base import Commands, app, fail, out
from fedmerit.notes import Note

# ------------------------------------------------------------------------------------- keys and the roster

FEWEST = 3
"""The fewest members of a federation (see ``partition.clients``)."""

keys_app = typer.Typer(cls=Commands, help="Identity keys and the roster.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


@keys_app.command("new")
def keys_new(
    path: Path,
    server: Annotated[
        bool, Option("--server", help="Make the server's key, and say what to do with it.")
    ] = False,
) -> None:
    """Make an identity key, and print the public key for the roster.

    PATH is a new file for the private key, which only its owner may read (mode 600).
    """
    from fedmerit.identity import PREFIX, new_key

    public = PREFIX + new_key(path).hex()
    out.print(public)
    if server:
        out.print(
            f"put it on the roster: fedmerit keys roster ROSTER --member ... --server {public}; keep {path} "
            "as server.pem beside the roster, or name it in Contributions(server_key=...)"
        )


@keys_app.command("show")
def keys_show(
    path: Annotated[Path, Argument(metavar="KEY")],
    roster: Annotated[Path | None, Option(help="A roster: say under which name it has this key.")] = None,
) -> None:
    """Print the public key of a private key and, with --roster, whose key it is there.

    KEY is the file of the private key, which stays where it is.
    """
    from fedmerit.identity import PREFIX, load_key, public_key, read_roster

    key = public_key(load_key(path))
    out.print(PREFIX + key.hex())
    if roster is None:
        return
    listed = read_roster(roster)
    names = [one.name for one in listed.members if one.key == key]
    if key == listed.server:
        names.append("the server")
    if not names:
        fail(f"{roster}: has no member with this key")
    out.print(f"on {roster} it is the key of {names[0]}")


@keys_app.command("roster")
def keys_roster(
    path: Path,
    member: Annotated[list[str] | None, Option(help="NAME=ed25519:PUBLICKEY[,WEIGHT], repeatable.")] = None,
    server: Annotated[
        str | None, Option(help="The server's public key; members refuse every other server.")
    ] = None,
    quorum: Annotated[
        int | None, Option(help="How many members must sign a change of it.", show_default="more than half")
    ] = None,
) -> None:
    """Write or check a roster of names and public keys, and print its hash, which all members compare.

    PATH is the roster file. With --member, it is written; otherwise it is checked.
    """
    from fedmerit.identity import PREFIX, SERVER, Roster, parse_key, parse_member, read_roster, write_roster

    if member:
        key = None if server is None else parse_key(SERVER, server)
        write_roster(path, Roster((parse_member(text) for text in member), key, quorum=quorum))
    elif server is not None or quorum is not None:
        fail("--server and --quorum belong to a new roster: expected --member too")
    roster = read_roster(path)
    for one in roster.members:
        out.print(
            f"{one.name}  ed25519:{one.key.hex()}" + ("" if one.weight is None else f"  {one.weight:g}")
        )
    if roster.server is not None:
        out.print(f"the server  {PREFIX}{roster.server.hex()}")
    count = len(roster.members)
    out.print(f"{count} member{'' if count == 1 else 's'}, roster hash {roster.hash.hex()}")
    if roster.before is not None:
        out.print(
            f"follows from {roster.before.hash.hex()}, signed by {', '.join(roster.signatures)}; the first "
            f"roster was {roster.lineage}"
        )
    if roster.server is None:
        out.print("note: it names no server (--server): members use it in rehearsals only")
    if count < FEWEST:
        out.print(
            f"note: a federation needs at least {FEWEST} members: with two, each learns the other's update"
        )


@keys_app.command("propose")
def keys_propose(
    old: Path,
    new: Path,
    out_: Annotated[Path, Option("--out", help="Where to write the change, a new file.")],
) -> None:
    """Propose another roster in place of the one in use; its members sign the change.

    OLD is the roster in use. NEW is a roster that `fedmerit keys roster` wrote, with all members, keys,
    server and quorum as they should be.
    """
    from fedmerit.identity import Change, read_roster, write_new

    change = Change.proposed(read_roster(old), read_roster(new))
    write_new(out_, change.text().encode())
    _show(change)
    out.print(f"wrote {out_}; each member: fedmerit keys sign {out_} --key KEY")


@keys_app.command("sign")
def keys_sign(
    path: Annotated[Path, Argument(metavar="CHANGE")],
    key: Annotated[
        Path | None, Option(help="Your private key; without it, the change is only shown.")
    ] = None,
) -> None:
    """Show a proposed change of the roster and, with --key, sign it.

    CHANGE is the file of the change; the signature is added to it.
    """
    from fedmerit.identity import load_key, read_change
    from fedmerit.storage.run_folder import write

    change = read_change(path)
    if key is not None:
        change = change.signed(load_key(key))
        write(path, change.text().encode())
    _show(change)


@keys_app.command("adopt")
def keys_adopt(
    paths: Annotated[list[Path], Argument(metavar="CHANGE...")],
    out_: Annotated[Path, Option("--out", help="Where to write the roster, a new file.")],
) -> None:
    """Write the new roster, once enough members of the old one have signed the change.

    CHANGE is the signed change, or several copies of it that were signed apart. Give the new roster to all.
    """
    from functools import reduce

    from fedmerit.identity import Change, read_change, write_roster

    change = reduce(Change.joined, map(read_change, paths))
    _show(change)
    write_roster(out_, roster := change.adopted())
    out.print(f"wrote {out_}, roster hash {roster.hash.hex()}")


def _show(change: Any) -> None:
    """Print what a change of the roster changes, and who has signed it."""
    out.print(f"from roster {change.old.hash.hex()}")
    out.print(f"to roster {change.new.hash.hex()}")
    for line in change.differences():
        out.print(f"  {line}")
    signed = f"signed by {', '.join(change.signatures)}" if change.signatures else "signed by nobody yet"
    missing = f"{change.missing} more must sign" if change.missing else "that is enough"
    out.print(f"{signed}; {change.old.needed} of {len(change.old.members)} members are needed: {missing}")


# ------------------------------------------------------------------------------------- a member's own state

member_app = typer.Typer(
    cls=Commands, help="What a member remembers, and what its owner allows.", no_args_is_help=True
)
app.add_typer(member_app, name="member")
Key_ = Annotated[Path, Argument(metavar="KEY")]


@member_app.command("show")
def member_show(key: Key_) -> None:
    """Check what a member remembers, and print it: runs, settings pinned from run to run, limits.

    KEY is the member's private key; the state is in KEY.state beside it. Exit code 2 says that there is a
    problem, such as a file that is lost or damaged.
    """
    from fedmerit.storage.member_state import about_state

    _print_checked(about_state(key), key)


@member_app.command("allow")
def member_allow(
    key: Key_,
    changes: Annotated[list[str], Argument(metavar="NAME=VALUE...")],
    roster: Annotated[
        Path | None, Option(help="The roster, if this member knows of more than one, or of none.")
    ] = None,
) -> None:
    """Change what a member agrees to from run to run; only its owner decides that.

    KEY is the member's private key. NAME=VALUE is a new value of bound, disk, runs, threshold, weight_cap or
    weights, such as weights=uniform: all stay as they were in a member's first run of a roster until they are
    changed here. With runs=100 it trains in up to 100 runs within 30 days, and with disk=8000000000 it stores
    up to so many bytes of a run.
    """
    from fedmerit.identity import read_roster
    from fedmerit.storage.member_state import about_state, allow

    given = dict(one.partition("=")[::2] for one in changes)
    allow(key, given, None if roster is None else read_roster(roster))
    for line in about_state(key):
        out.print(line)


# ---------------------------------------------------------------------- a settlement that waits for members

settle_app = typer.Typer(
    cls=Commands, help="Late answers of members who were away at a settlement.", no_args_is_help=True
)
app.add_typer(settle_app, name="settle")
Run_ = Annotated[Path, Argument(metavar="DIR")]
Server_ = Annotated[
    Path | None, Option("--key", help="The server's private key.", show_default="DIR/keys/server.pem")
]


@member_app.command("state")
def member_state(
    key: Key_,
    messages: Annotated[Path, Option(help="The run's archive/messages, or a copy of it.")],
    roster: Annotated[Path, Option(help="The member's roster.")],
    out_: Annotated[Path, Option("--out", help="Where to write what the member signs.")],
    gradient: Annotated[
        str | None,
        Option(
            help="The function that secure(..., gradient=...) was given, module:function; for a member that "
            "has not stated."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        Option(
            help="A member without whose statement or masks you agree to close the settlement, when its "
            "window is over; repeatable."
        ),
    ] = None,
) -> None:
    """Answer what a settlement still asks of a member: its statement, its masks, its signature.

    KEY is the member's private key; the updates it stored are in KEY.state beside it. The file may be handed
    to anybody: its signatures count. `fedmerit settle add` puts it into the ledger, and when the window is
    over, `fedmerit settle close` takes the signatures under the end.
    """
    from fedmerit.carriers.folders import state
    from fedmerit.config import load_object

    found = None if gradient is None else load_object(gradient, "--gradient")
    name, kinds = state(key, roster, messages, found, out_, tuple(without or ()), _shape)
    out.print(f"wrote {out_}: what {name} signs ({', '.join(kinds) or 'nothing'})")


def _shape(engine: str) -> Any:
    """Return the shape that makes what a user's gradient gets in a run of this engine."""
    from fedmerit.carriers.shape import Shape

    if not engine.startswith("flower"):
        return Shape
    from fedmerit.flower.codec import RecordShape

    return RecordShape


@settle_app.command("add")
def settle_add(folder: Run_, answers: Path, key: Server_ = None) -> None:
    """Add the answers of a member who was away to the ledger of a run.

    DIR is the run folder, and ANSWERS a file that `fedmerit member state` wrote. Answers must carry their
    author's signature; who hands them in does not matter.
    """
    from fedmerit.carriers.folders import add

    _tell(add(folder, answers, key))


@settle_app.command("close")
def settle_close(
    folder: Run_, signed: Annotated[list[Path] | None, Argument()] = None, key: Server_ = None
) -> None:
    """Close the settlement of a run when its window is over: members still awaited share the remainder.

    DIR is the run folder, and SIGNED are files that `fedmerit member state` wrote. As many members as the
    threshold must sign the end, and name those whom it leaves behind (`fedmerit member state --without`). Run
    this once without their files to write the messages that they sign, then with them.
    """
    from fedmerit.carriers.folders import close

    _tell(close(folder, key, signed or ()))


def _tell(settled: Any) -> None:
    """Print what a settlement comes to."""
    from fedmerit.ledger.account import about

    for line in about(settled):
        out.print(line)


# ----------------------------------------------------------------------------------------------- this machine


@app.command()
def doctor() -> None:
    """Check this machine: Python, optional packages, GPU, clock, disk. Exit code 2: there is a problem."""
    from fedmerit.verify import examine_machine

    _print_checked(examine_machine(), "this machine")


def _print_checked(lines: Iterable[Note], examined: object) -> None:
    """Print what was found; fail if there are problems."""
    problems = 0
    for line in lines:
        out.print(line)
        problems += line.code == "problem"
    if problems:
        fail(f"{examined}: {problems} problem{'' if problems == 1 else 's'}")
    out.print(f"{examined}: in order")
