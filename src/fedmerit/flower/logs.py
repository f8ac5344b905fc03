"""fedmerit's log lines among Flower's own, and a server's notes in a file.

Flower prints what its logger ``flwr`` is given; a logger beside it has neither handler nor level. So inside
Flower, and only there, what ``fedmerit`` logs goes to Flower's handlers too. Who has given the logger
``fedmerit`` a handler of its own is left alone.
"""

from __future__ import annotations

import copy
import logging
from datetime import UTC, datetime
from pathlib import Path

log = logging.getLogger("fedmerit")


class Relay(logging.Handler):
    """Hands lines to Flower's handlers; to its console, which shows neither, with name and time in front."""

    def emit(self, record: logging.LogRecord) -> None:
        """To each of them that wants lines of this level."""
        flower = logging.getLogger("flwr")
        for handler in flower.handlers if flower.isEnabledFor(record.levelno) else ():
            if record.levelno >= handler.level:
                console = hasattr(handler, "timestamps")
                handler.handle(_named(record, handler) if console else record)


def _named(record: logging.LogRecord, console: logging.Handler) -> logging.LogRecord:
    has_time = getattr(console, "timestamps", False) or getattr(console, "json", False)
    when = "" if has_time else logging.Formatter().formatTime(record, " %Y-%m-%d %H:%M:%S")
    named = copy.copy(record)
    named.msg, named.args = f"fedmerit{when}: {record.getMessage()}", ()
    return named


def log_inside_flower() -> None:
    """From now on fedmerit's lines, INFO and above, are among Flower's; once a process."""
    if log.handlers:
        return
    log.addHandler(Relay())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


class Notes(list[str]):
    """What a server notes in a run, also in a file: one line each, with its time, as it comes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def append(self, note: str) -> None:
        """Note something; a file that cannot be written costs the line in it, and is said, not the run."""
        super().append(note)
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{when} {' '.join(note.split())}\n")
        except OSError as error:
            log.error("%s: could not be written: %s", self.path, error)
