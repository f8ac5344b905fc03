"""Run the paper's experiments: as many cells as fit into the time, the most valuable first.

::

    python experiments/run.py --data FOLDER --out DIR --budget-minutes 9 [--only tab-error] [--jobs 2]
    python experiments/run.py --data FOLDER --out DIR --fresh --dataset cifar10 --row 10 [--seeds 0 1]
    python experiments/run.py --toy --out DIR             # every experiment at toy size, a minute on a CPU

FOLDER holds the datasets (prepare.py makes it from the original downloads). Cells that are finished in DIR or
in experiments/results are skipped; with --fresh the published ones are run again and compared. Minutes are
estimated by a probe of a few seconds per dataset on this machine, unless cells were run on it before. Of a
retraining game that was given up, DIR/unfinished keeps the coalitions that are trained. DIR gets
``cells.jsonl``, a line a cell; merge.py brings its cells into experiments/results, tables.py makes tables.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import engine  # noqa: E402
import torch  # noqa: E402
from cells import (  # noqa: E402
    RESULTS,
    Cell,
    Costs,
    Result,
    append,
    datasets,
    in_order,
    plan,
    read_results,
    select,
    subset_of,
)
from onecell import Overtime, convert, machine, probe, run_cell, scratch  # noqa: E402
from protocols import OURS, vectors  # noqa: E402

from fedmerit import agreement  # noqa: E402
from fedmerit.simulation.training import keep_memory  # noqa: E402

GRACE = 15.0
"""Seconds beyond the budget after which a running cell is given up."""
FAILURES = 3
"""After so many cells that failed no more are started."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what fits, say what is left."""
    options = parse(arguments)
    began = time.time()
    budget = options.budget_minutes * 60
    rows = plan(toy=options.toy, subsets=dict(options.subset))
    cells = in_order(select(rows, options.only, options.dataset, options.row))
    if options.seeds:
        cells = [cell for cell in cells if cell.seed in options.seeds]
    published = {} if options.toy else read_results([RESULTS])
    done = read_results([options.out]) if options.fresh else {**published, **read_results([options.out])}
    pending = [cell for cell in cells if cell.name not in done]
    device = machine()["device"]
    costs = Costs.of(device, options.jobs, done.values())
    print(f"{len(cells)} cells, {len(cells) - len(pending)} finished; {device}, {options.jobs} at once")
    if options.list and options.data is None:
        print("without --data nothing is measured: seconds as on the machine that the plan was made for")
        report(pending, costs)
        return 0
    if not options.toy and options.data is None:
        raise SystemExit("--data: the folder of the datasets is needed (or --toy); prepare.py makes it")
    absent = [cell.dataset for cell in pending if options.data and not is_there(options.data, cell.dataset)]
    if absent and len(absent) == len(pending):
        names = ", ".join(sorted(set(absent)))
        raise SystemExit(f"{options.data}: holds none of {names}; prepare.py makes them from the downloads")
    pending = [cell for cell in pending if cell.dataset not in absent]
    options.out.mkdir(parents=True, exist_ok=True)
    home = Path(scratch())
    failed: list[Cell] = []
    try:
        work = Work(options, home, began + budget + GRACE)
        if not options.toy:
            work.measure(pending, costs)
        if options.list:
            report(pending, costs)
            return 0
        while pending or work.running:
            left = began + budget - time.time()
            while len(work.running) < options.jobs and len(failed) < FAILURES:
                fitting = next((cell for cell in pending if costs(cell) * 1.1 < left), None)
                if fitting is None:
                    break
                pending.remove(fitting)
                work.start(fitting, costs(fitting))
            if not work.running:
                break
            for cell, result in work.finished():
                if isinstance(result, Overtime):
                    print(f"given up, out of time: {cell}", flush=True)
                    pending.append(cell)
                elif isinstance(result, BaseException):
                    traceback.print_exception(result)
                    failed.append(cell)
                else:
                    append(options.out, result)
                    if options.fresh and cell.name in published:
                        print(difference(result, published[cell.name]), flush=True)
                    costs.add(cell, result["seconds"]["total"])
                    parts = ", ".join(f"{k} {v:.0f}" for k, v in result["seconds"].items() if k != "total")
                    now = time.time() - began
                    print(f"[{now:5.0f} s] {cell}: {result['seconds']['total']:.0f} s ({parts})", flush=True)
        work.close()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    pending.sort(key=lambda cell: cell.order)
    report(pending, costs)
    for cell in failed:
        print(f"FAILED: {cell}")
    for name in sorted(set(absent)):
        print(f"{options.data}: {name} is not there, {absent.count(name)} cells were left out")
    print(f"{time.time() - began:.0f} s; results in {options.out}")
    return 1 if failed else 0


def is_there(folder: Path, dataset: str) -> bool:
    """Whether the folder holds it: some machines have room for a part of the datasets only."""
    return (folder / datasets()[dataset].get("source", dataset) / "labels.npz").is_file()


class Work:
    """Cells that run: in this process one at a time, or in several processes."""

    def __init__(self, options: argparse.Namespace, home: Path, deadline: float) -> None:
        self.options, self.home, self.deadline = options, home, deadline
        self.unfinished = options.out / "unfinished"
        self.unfinished.mkdir(exist_ok=True)
        self.titles: dict[str, str] = {}
        self.running: dict[Future[Result], Cell] = {}
        self.pool: ProcessPoolExecutor | None = None
        if options.jobs > 1:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(
                options.jobs, mp_context=context, initializer=_begin, initargs=(options.jobs,)
            )
        else:
            _begin(1, options.toy)

    def measure(self, pending: Sequence[Cell], costs: Costs) -> None:
        """Probe this machine with every dataset of which no cell was run here."""
        known = {key for key, _, _ in costs.known}
        for cell in pending:
            if cell.key not in known and cell.dataset not in costs.rates and not costs.known:
                costs.rates[cell.dataset] = probe(cell, self.converted(cell.dataset))

    def converted(self, dataset: str) -> Path:
        """The file of a dataset, converted if it is the first cell of it."""
        if dataset not in self.titles:
            self.titles |= convert(self.options.data, [dataset], self.home)
        return self.home / f"{dataset}.npz"

    def start(self, cell: Cell, seconds: float) -> None:
        """Run it."""
        file = self.converted(cell.dataset)
        print(f"start: {cell} (about {seconds:.0f} s)", flush=True)
        given = (cell, file, self.titles[cell.dataset])
        known = {"jobs": self.options.jobs, "loop": self.options.loop, "deadline": self.deadline}
        known |= {"phi": not self.options.no_phi, "unfinished": self.unfinished}
        if self.pool is not None:
            self.running[self.pool.submit(run_cell, *given, **known)] = cell
            return
        future: Future[Result] = Future()
        try:
            future.set_result(run_cell(*given, **known))
        except Exception as error:
            future.set_exception(error)
        self.running[future] = cell

    def finished(self) -> list[tuple[Cell, Result | BaseException]]:
        """Wait for at least one."""
        done, _ = wait(self.running, return_when=FIRST_COMPLETED)
        return [(self.running.pop(future), future.exception() or future.result()) for future in done]

    def close(self) -> None:
        """Nothing more to do."""
        if self.pool is not None:
            self.pool.shutdown()


def _begin(jobs: int, toy: bool = False) -> None:
    """Share cores and memory of the device with the other processes."""
    torch.set_num_threads(1 if toy else max(1, len(os.sched_getaffinity(0)) // jobs))
    if not toy:
        keep_memory()
    if torch.cuda.is_available() and jobs > 1:
        engine.SHARE = 0.96 / jobs
        torch.cuda.set_per_process_memory_fraction(engine.SHARE)


def difference(result: Result, published: Result) -> str:
    """How far a cell that was run again is from the published one."""
    parts = []
    for utility, part in result["utilities"].items():
        pairs = zip(part["rounds"], published["utilities"].get(utility, {}).get("rounds", ()), strict=False)
        gaps = [abs(one["grand"] - other["grand"]) for one, other in pairs]
        parts.append(f"{utility} {max(gaps, default=0.0):.4f}")
    near = [vectors(one, OURS, 10**6).get("FP") for one in (result, published)]
    known = [one for one in near if one is not None]
    again = agreement(*known).spearman if len(known) == 2 else None
    shown = "undefined" if again is None else f"{again:.2f}"
    return (
        f"  against the published cell: v(M) differs by at most {', '.join(parts)}; Spearman of alpha {shown}"
    )


def report(pending: Sequence[Cell], costs: Costs) -> None:
    """What is left and what it will cost."""
    if not pending:
        print("nothing is left")
        return
    total = sum(costs(cell) for cell in pending) / costs.jobs
    print(f"left: {len(pending)} cells, about {total / 60:.1f} minutes")
    for cell in pending:
        print(f"  {costs(cell):5.0f} s  {cell}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    parser.add_argument("--out", type=Path, default=Path("runs/cells"), help="where results go (runs/cells)")
    parser.add_argument("--budget-minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="+", default=[], metavar="EXPERIMENT")
    parser.add_argument("--dataset", help="only rows of this dataset of the plan, such as cifar10")
    parser.add_argument("--row", help="only rows of this name, such as 10")
    parser.add_argument("--fresh", action="store_true", help="run published cells again and compare")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--loop", action="store_true", help="members of a cell train one after another")
    parser.add_argument("--no-phi", action="store_true", help="PHI only where the plan asks for it")
    parser.add_argument("--toy", action="store_true", help="every experiment at toy size")
    parser.add_argument("--list", action="store_true", help="say what is left, run nothing")
    parser.add_argument(
        "--subset", type=subset_of, action="append", default=[], metavar="DATASET=COUNT",
        help="training images, 0 for all, where the plan has no number for the run itself",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
