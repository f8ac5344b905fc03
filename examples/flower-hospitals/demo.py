"""Five hospitals on one machine as five machines would be: `make demo-flower`.

A SuperLink and five SuperNodes start on 127.0.0.1 with TLS and node authentication. Harbour's labels are
mostly noise; Dale's machine dies in round 3 (kill -9), its masked update sent. After the last round everybody
who is there states its part in the gain; Dale, whose machine is repaired later, hands its statement in by
hand. Out come scores with intervals, a statement in cents, and a check of the ledger by another member.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fedmerit.errors import FedmeritError
from fedmerit.identity import Member, Roster, new_key, write_roster

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

from hospitals.task import HOSPITALS  # noqa: E402

from loopback import Loopback, Submission  # noqa: E402

VICTIM, VERIFIER = "Dale", "Bridge"
DIES_IN_ROUND = 3
WAIT = 60.0
"""Seconds for which the server waits at the settlement for who is away."""
BUDGET = "10000.00"
THREADS = {"OMP_NUM_THREADS": "1"}


def main() -> None:
    """Run the demonstration."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("runs/demo-flower"), help="replaced if it exists")
    folder = arguments.parse_args().out.resolve()
    if folder.exists() and not (folder / "operator").is_dir():
        sys.exit(f"{folder}: not a folder of this demonstration, nothing was touched")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    say("keys: every hospital and the server make an identity key; the roster holds the public halves")
    roster = make_roster(folder)
    members = {
        name: {"name": name, "fedmerit-key": str(key_of(folder, name)), "fedmerit-roster": str(roster)}
        for name in HOSPITALS
    }
    say("starting a SuperLink (TLS, node authentication) and five SuperNodes on 127.0.0.1 ...")
    with Loopback(folder, members, THREADS) as federation:
        say(f"connected after {time.monotonic() - began:.0f} s; `flwr run`")
        config = {"roster": str(roster), "server-key": str(server_key(folder)), "out": str(folder / "run")}
        run = federation.submit(HERE, {**config, "join": WAIT})
        follow(federation, run)
    say(f"done after {time.monotonic() - began:.0f} s")
    state_later(folder, roster)
    fedmerit("score", folder / "run")
    fedmerit("rewards", folder / "run", "--budget", BUDGET)
    verify_copy(folder, roster)


def make_roster(folder: Path) -> Path:
    """One key per hospital and one for the server, in folders of their own (mode 600), and the roster."""
    members = []
    for name in HOSPITALS:
        key_of(folder, name).parent.mkdir(parents=True)
        members.append(Member(name, new_key(key_of(folder, name))))
    server_key(folder).parent.mkdir()
    write_roster(folder / "roster.toml", Roster(members, new_key(server_key(folder))))
    return folder / "roster.toml"


def key_of(folder: Path, name: str) -> Path:
    """Where a hospital keeps its identity key."""
    return folder / "members" / name / "identity.pem"


def server_key(folder: Path) -> Path:
    """Where the server keeps its identity key; `server.pem` beside the roster is the TLS certificate here."""
    return folder / "server" / "identity.pem"


def follow(federation: Loopback, run: Submission) -> None:
    """Say which round it is; let one machine die."""
    said = 0
    killed = False
    while not run.over:
        federation.check()
        rounds = [int(number) for number in re.findall(r"\[ROUND (\d+)/", run.output)]
        if len(rounds) > said:
            said = len(rounds)
            say(f"round {rounds[-1]} ({time.monotonic() - run.began:.0f} s since `flwr run`)")
        if not killed and federation.sent(VICTIM, "train") >= DIES_IN_ROUND:
            hit = federation.kill(VICTIM)
            say(f"  kill -9: {VICTIM}'s machine is gone ({len(hit)} processes), its masked update was sent")
            killed = True
        time.sleep(0.2)
    run.wait()
    if not killed:
        raise FedmeritError(f"{VICTIM} was to die in round {DIES_IN_ROUND}, but the run was over before")


def state_later(folder: Path, roster: Path) -> None:
    """What a hospital does that was away at the settlement: it states by hand, and the server adds that."""
    messages, statement = folder / "run" / "archive" / "messages", folder / "members" / VICTIM / "stated.json"
    say(f"{VICTIM}'s machine is repaired: its disk still holds what it sent, so it can state its part")
    options = ("--messages", messages, "--gradient", "hospitals.task:gradient", "--roster", roster)
    fedmerit("member", "state", key_of(folder, VICTIM), *options, "--out", statement)
    fedmerit("settle", "add", folder / "run", statement)


def verify_copy(folder: Path, roster: Path) -> None:
    """What another member does: without its roster it would take the ledger's word for everybody's keys."""
    copy = folder / "members" / VERIFIER / "run"
    shutil.copytree(folder / "run", copy, ignore=shutil.ignore_patterns("keys"))  # the server's stay there
    say(f"{VERIFIER} was sent a copy of the run folder, and checks it against the roster that it has:")
    fedmerit("verify", copy, "--roster", roster, "--archive", copy / "archive")


def fedmerit(*arguments: object) -> None:
    """Run a command of fedmerit, shown as it is typed."""
    print(f"\n$ fedmerit {' '.join(map(str, arguments))}", flush=True)
    program = Path(sys.executable).parent / "fedmerit"
    subprocess.run([program, *map(str, arguments)], check=True, cwd=HERE)


def say(line: str) -> None:
    """Progress."""
    print(f"· {line}", flush=True)


if __name__ == "__main__":
    main()
