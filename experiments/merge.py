"""Bring the cells of merged files into experiments/results, one file each; what is there stays.

::

    python experiments/merge.py DIR/cells.jsonl [...] [--into FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cells import RESULTS, read_merged, read_results, write_one


def main(arguments: Sequence[str] | None = None) -> None:
    """Split merged files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    known, new = set(read_results([options.into])), 0
    for file in options.files:
        if not file.exists():
            raise SystemExit(f"{file}: no such file")
        for result in read_merged(file):
            if result["name"] not in known:
                write_one(options.into, result)
                known.add(result["name"])
                new += 1
    print(f"{new} new cells, {len(known)} in {options.into}")


if __name__ == "__main__":
    main()
