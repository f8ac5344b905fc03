"""Five hospitals on one machine as five machines would be, over NVFlare: `make demo-nvflare`.

NVFlare's server and five sites start with mutual TLS. No site runs code from jobs: the task is installed
there. Castle's job dies in round 2 (kill -9), and NVFlare ends the whole job; a new one goes on with the run.
Out come scores with intervals, a statement in cents, and a check of the ledger by another member.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fedmerit.identity import Member, Roster, new_key, write_roster
from fedmerit.ledger.chain import LEDGER, Ledger

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

from hospitals.task import HOSPITALS  # noqa: E402

import fedmerit.nvflare  # noqa: E402
from loopback.flare import Flare  # noqa: E402
from loopback.processes import wait_for  # noqa: E402

VICTIM, DIES_IN_ROUND, ROUNDS, VERIFIER = "Castle", 2, 3, "Bridge"
BUDGET = "10000.00"


def main() -> None:
    """Run the demonstration."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--out", type=Path, default=Path("runs/demo-nvflare"), help="replaced if it exists"
    )
    folder = arguments.parse_args().out.resolve()
    if folder.exists() and not (folder / "nvflare").is_dir():
        sys.exit(f"{folder}: not a folder of this demonstration, nothing was touched")
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    say("keys: every hospital and the server make an identity key; the roster holds the public halves")
    sites = make_sites(folder)
    recipe = fedmerit.nvflare.recipe(
        "hospitals",
        "hospitals.task",  # its name, because it is installed on server and sites
        num_rounds=ROUNDS,
        spare_rounds=1,
        min_clients=len(HOSPITALS),
        roster=folder / "roster.toml",
        server_key=folder / "server" / "identity.pem",
        folder=folder / "run",
    )
    say("starting NVFlare's server and five sites, with mutual TLS and without code from jobs ...")
    installed = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    with Flare(folder / "nvflare", sites, installed, strict=True) as federation:
        job = federation.submit(recipe)
        say(f"job {job} after {time.monotonic() - began:.0f} s")
        wait_for(f"round {DIES_IN_ROUND}", lambda: scheduled(folder) == DIES_IN_ROUND, alive=federation.check)
        federation.kill_job(VICTIM)
        say(f"  kill -9: {VICTIM}'s job is gone in round {DIES_IN_ROUND}; NVFlare: {federation.wait(job)}")
        job = federation.submit(recipe)
        say(f"  the same recipe again, job {job}: it goes on with the run")
        say(f"NVFlare: {federation.wait(job)}, after {time.monotonic() - began:.0f} s")
    fedmerit_("score", folder / "run")
    fedmerit_("rewards", folder / "run", "--budget", BUDGET)
    copy = folder / "members" / VERIFIER / "run"
    shutil.copytree(folder / "run", copy, ignore=shutil.ignore_patterns("keys"))  # the server's stay there
    say(f"{VERIFIER} was sent a copy of the run folder, and checks it against the roster that it has:")
    fedmerit_("verify", copy, "--roster", folder / "roster.toml", "--archive", copy / "archive")


def make_sites(folder: Path) -> dict[str, dict[str, Path | str]]:
    """Everybody's key in a folder of its own, the roster, and what each site has in local/fedmerit.toml."""
    keys = {name: folder / "members" / name / "identity.pem" for name in HOSPITALS}
    for path in (*keys.values(), folder / "server" / "identity.pem"):
        path.parent.mkdir(parents=True)
    members = [Member(name, new_key(path)) for name, path in keys.items()]
    write_roster(folder / "roster.toml", Roster(members, new_key(folder / "server" / "identity.pem")))
    shared = {"roster": folder / "roster.toml", "task": "hospitals.task"}
    return {name: {"key": path, **shared} for name, path in keys.items()}


def scheduled(folder: Path) -> int:
    """The round that the ledger is at."""
    if not (folder / "run" / LEDGER).is_file():
        return 0
    with Ledger(folder / "run" / LEDGER, read_only=True) as ledger:
        return len(list(ledger.records("schedule")))


def fedmerit_(*arguments: object) -> None:
    """Run a command of fedmerit, shown as it is typed."""
    print(f"\n$ fedmerit {' '.join(map(str, arguments))}", flush=True)
    program = Path(sys.executable).parent / "fedmerit"
    subprocess.run([program, *map(str, arguments)], check=True, cwd=HERE)


def say(line: str) -> None:
    """Progress."""
    print(f"· {line}", flush=True)


if __name__ == "__main__":
    main()
