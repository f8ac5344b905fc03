"""All benchmarks, then one table of ratios: make bench. Raw results go to benchmarks/results.

python benchmarks/run.py [--peers]      # --peers: shapiq and pyDVL in a throw-away environment, too
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCRIPTS = (
    ["values.py"],
    ["secagg.py"],
    ["round.py"],
    ["training.py"],
    ["flower.py"],
    ["growth.py"],
    ["scale.py"],
    ["settlement.py"],
    ["coalitions.py", "--synthetic", "--quick"],
)


def peers() -> None:
    """shapiq and pyDVL on the tables of values.py, installed into a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "shapiq", "pydvl"], check=True)
        command = [python, "-W", "ignore", HERE / "peers.py", RESULTS / "peers.json", "10", "15"]
        subprocess.run(command, check=True)


def table() -> list[tuple[str, str]]:
    """What the committed or fresh result files say, as ratios."""
    rows = []

    def read(name: str) -> dict:
        path = RESULTS / name
        return json.loads(path.read_text()) if path.exists() else {}

    for row in read("values.json").get("rows", []):
        if "ratio" in row:
            rows.append(
                (f"Shapley from a table, N={row['n']}: against the definition", f"{row['ratio']:.0f}x")
            )
    ours = {row["n"]: row["seconds"] for row in read("values.json").get("rows", [])}
    for row in read("peers.json").get("rows", []):
        if "seconds" in row and row["n"] in ours:
            ratio = row["seconds"] / ours[row["n"]]
            rows.append((f"Shapley from a table, N={row['n']}: against {row['package']}", f"{ratio:.0f}x"))
    for row in read("secagg.json").get("rows", []):
        if "times_faster" in row:
            what = f"masked sum, {row['members']} x {row['parameters'] / 1e6:g}M: against Flower's SecAgg+"
            rows.append((what, f"{row['times_faster']:.1f}x"))
    if overhead := read("round.json").get("overhead_extrapolated"):
        rows.append(("secure sum and scores on top of a plain round, extrapolated", f"{overhead:.1%}"))
    for row in read("training.json").get("rows", []):
        rows.append((f"{row['model']}, {row['work']} on a CPU: against a plain loop", f"{row['ratio']:.1f}x"))
    if share := read("flower.json").get("share_extrapolated"):
        rows.append(("fedmerit's part of a round of Flower, extrapolated", f"{share:.1%}"))
    for row in read("scale.json").get("rows", []):
        more = "3 times the members" if row["case"] == "members" else f"4 times the rounds, {row['case']}"
        rows.append((f"{row['work']}: with {more}", f"{row['ratio']:.1f}x"))
    for file in sorted(RESULTS.glob("coalitions*.json")):
        found = read(file.name)
        for section in ("coalitions_cnn", "coalitions_resnet"):
            for key, value in found.get(section, {}).items():
                if key.startswith("loop batch"):
                    rows.append((f"{file.stem}: {section}, against {key}", f"{value['ratio']:.1f}x"))
        for section in ("training", "retraining"):
            for kind, value in found.get(section, {}).items():
                if isinstance(value, dict):
                    rows.append((f"{file.stem}: stacked {section}, {kind}", f"{value['ratio']:.1f}x"))
    return rows


def main() -> int:
    """Run one after another; what fails is said at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    options = parser.parse_args()
    failed = []
    for script, *arguments in () if options.table else SCRIPTS:
        print(f"\n== {script} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, str(HERE / script), *arguments], check=False).returncode:
            failed.append(script)
    if options.peers:
        peers()
    print()
    for what, ratio in table():
        print(f"{ratio:>8}  {what}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
