"""All benchmarks, one table of ratios: make bench. Raw results go to benchmarks/results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = (["values.py"], ["secagg.py"], ["round.py"], ["coalitions.py", "--synthetic", "--quick"])


def main() -> int:
    """Run one after another; what fails is said at the end."""
    failed = []
    for script, *arguments in SCRIPTS:
        print(f"\n== {script} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, str(HERE / script), *arguments], check=False).returncode:
            failed.append(script)
    print("\nall done" if not failed else f"\nfailed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
