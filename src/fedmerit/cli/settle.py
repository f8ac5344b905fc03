"""Commands of a settlement that has members missing: `member state`, `settle add`, `settle close`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedmerit.cli.base import Commands, app, out
from fedmerit.cli.members import Key_, member_app

settle_app = typer.Typer(
    cls=Commands, help="Late statements of members who were away at a settlement.", no_args_is_help=True
)
app.add_typer(settle_app, name="settle")
Run_ = Annotated[Path, typer.Argument(help="The run folder.", metavar="DIR")]
Server_ = Annotated[
    Path | None,
    typer.Option("--key", help="The server's private key.", show_default="DIR/keys/server.pem"),
]


@member_app.command("state")
def member_state(
    key: Key_,
    messages: Annotated[Path, typer.Option(help="The run's archive/messages, or a copy of it.")],
    gradient: Annotated[
        str, typer.Option(help="The function that secure(..., gradient=...) was given: module:function.")
    ],
    roster: Annotated[Path, typer.Option(help="The member's roster.")],
    out_: Annotated[Path, typer.Option("--out", help="Where to write the signed statement.")],
) -> None:
    """State what a member contributed to a run, if it was away at the settlement.

    KEY is the member's private key; the updates it stored are in KEY.state beside it. The statement may be
    handed to anybody: its signature counts. `fedmerit settle add` puts it into the ledger.
    """
    from fedmerit.config import load_object
    from fedmerit.flower.late import state

    name = state(key, roster, messages, load_object(gradient, "--gradient"), out_)
    out.print(f"wrote {out_}: the statement of {name}, signed")


@settle_app.command("add")
def settle_add(
    folder: Run_,
    statement: Annotated[Path, typer.Argument(help="A signed statement, from `fedmerit member state`.")],
    key: Server_ = None,
) -> None:
    """Add the statement of a member who was away to the ledger of a run.

    DIR is the run folder. The statement must carry its author's signature; who hands it in does not matter.
    """
    from fedmerit.flower.late import add

    _tell(add(folder, statement, key))


@settle_app.command("close")
def settle_close(folder: Run_, key: Server_ = None) -> None:
    """Close the settlement of a run when its window is over: who has not stated then gets what is left.

    DIR is the run folder.
    """
    from fedmerit.flower.late import close

    _tell(close(folder, key))


def _tell(settled: Any) -> None:
    """Print what a settlement comes to."""
    from fedmerit.ledger.settled import about

    for line in about(settled):
        out.print(line)
