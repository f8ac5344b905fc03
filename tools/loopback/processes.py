"""Processes started for a federation on one machine, found and ended again whatever becomes of their parents.

Flower's SuperLink and SuperNodes start further processes in sessions of their own, so no process group holds
them together. Every process inherits its environment, though: a mark in there finds all of them in ``/proc``,
orphans included. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedmerit.errors import FedmeritError

MARK = "FEDMERIT_LOOPBACK"
HANG = 900.0
"""Seconds after which what has not happened never will: waits end on an event, also on a busy machine."""
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # 1: PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
"""Also a starter that is killed itself leaves nothing behind: the kernel ends what it had started."""


class LoopbackError(FedmeritError):
    """A federation of processes on this machine did not start, continue or end."""


def start(
    command: Sequence[str], mark: str, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program of this Python environment; its output goes to ``log``.

    Args:
        command: name of a program next to the Python interpreter, and its arguments.
        mark: what this process and all its descendants are found by.
        log: file the output is appended to.
        environment: set in addition to the caller's own.
    """
    if not sys.platform.startswith("linux"):
        raise LoopbackError(f"a federation on one machine needs Linux's /proc, this is {sys.platform}")
    programs = Path(sys.executable).parent
    program = programs / command[0]
    if not program.exists():
        raise LoopbackError(f"{program} does not exist: is flwr installed (pip install 'fedmerit[flower]')?")
    guard = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # Flower starts programs by name
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603
            [*guard, str(program), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path, **environment, MARK: mark},
            start_new_session=True,
        )


def marked(mark: str) -> list[int]:
    """Process ids of all living processes that were started with this mark, or by such a process."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for item in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, not ours, or not a process
            if entry in (item / "environ").read_bytes().split(b"\0") and int(item.name) != os.getpid():
                found.append(int(item.name))
    return found


def kill(mark: str, *, patience: float = HANG) -> list[int]:
    """SIGKILL every process with this mark until none is left; returns whom it hit."""
    hit: list[int] = []
    deadline = time.monotonic() + patience
    while pids := marked(mark):
        if time.monotonic() > deadline:
            raise LoopbackError(f"processes {pids} survived SIGKILL for {patience:.0f} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        hit += [pid for pid in pids if pid not in hit]
        time.sleep(0.02)
    return hit


def wait_for(
    what: str,
    happened: Callable[[], bool],
    *,
    alive: Callable[[], None],
    deadline: float = HANG,
    every: float = 0.1,
) -> float:
    """Wait until something happened; returns the seconds it took.

    Args:
        what: for the message when it does not happen.
        happened: asked again and again.
        alive: called each time; raises when waiting has become pointless.
        deadline: seconds until it is an error.
        every: seconds between two questions.
    """
    began = time.monotonic()
    while not happened():
        alive()
        if time.monotonic() - began > deadline:
            raise LoopbackError(f"{what}: did not happen within {deadline:.0f} s")
        time.sleep(every)
    return time.monotonic() - began
