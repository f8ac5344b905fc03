"""Commands of a settlement that waits for members: `member state`, `settle add`, `settle close`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedmerit.cli.base import Commands, app, out
from fedmerit.cli.members import Key_, member_app

settle_app = typer.Typer(
    cls=Commands, help="Late answers of members who were away at a settlement.", no_args_is_help=True
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
    roster: Annotated[Path, typer.Option(help="The member's roster.")],
    out_: Annotated[Path, typer.Option("--out", help="Where to write what the member signs.")],
    gradient: Annotated[
        str | None,
        typer.Option(
            help="The function that secure(..., gradient=...) was given, module:function; for a member that "
            "has not stated."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
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
    from fedmerit.config import load_object
    from fedmerit.flower.late import state

    found = None if gradient is None else load_object(gradient, "--gradient")
    name, kinds = state(key, roster, messages, found, out_, tuple(without or ()))
    out.print(f"wrote {out_}: what {name} signs ({', '.join(kinds) or 'nothing'})")


@settle_app.command("add")
def settle_add(
    folder: Run_,
    answers: Annotated[Path, typer.Argument(help="A member's answers, from `fedmerit member state`.")],
    key: Server_ = None,
) -> None:
    """Add the answers of a member who was away to the ledger of a run.

    DIR is the run folder. Answers must carry their author's signature; who hands them in does not matter.
    """
    from fedmerit.flower.late import add

    _tell(add(folder, answers, key))


@settle_app.command("close")
def settle_close(
    folder: Run_,
    signed: Annotated[
        list[Path] | None,
        typer.Argument(help="Answers of members who sign the end, from `fedmerit member state`."),
    ] = None,
    key: Server_ = None,
) -> None:
    """Close the settlement of a run when its window is over: members still awaited share the remainder.

    DIR is the run folder. As many members as the threshold must sign the end, and name those whom it leaves
    behind (`fedmerit member state --without`). Run this once without their files to write the messages that
    they sign, then with them.
    """
    from fedmerit.flower.late import close

    _tell(close(folder, key, signed or ()))


def _tell(settled: Any) -> None:
    """Print what a settlement comes to."""
    from fedmerit.ledger.settled import about

    for line in about(settled):
        out.print(line)
