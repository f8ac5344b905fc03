"""The panel measured on real images: fidelity, cheats side by side with the settlement, errors of shares.

::

    python experiments/panel.py --out experiments/results/panel                      # fashion-mini
    python experiments/panel.py --out DIR --data FOLDER --dataset cifar10 --seeds 0:5 --processes 16
    python experiments/panel.py --out DIR --only attacks --members 9 --toy

Each line of ``DIR/DATASET.jsonl`` is what one question found with one seed; what is there is not run again.
FOLDER holds the datasets (prepare.py); fashion-mini comes with fedmerit. Torch, numpy and msgspec are enough.
Members train by the rehearsal's own code, and keep a fifth of their data out of it, by which they judge:

- fidelity: s_ib, from whole gradients and from columns, beside the exact multi-round Shapley value of judge
  b's own utility, and beside what b loses when i leaves and everybody else trains again.
- attacks: shares by the rule "hands" of the panel, and by "fenced" of PHI on a shared pool.
- noise: how far columns move shares, and how often the check of a judge's sum gives a false alarm.
- coverage: how often the errors of shares hold the true ones, where judges' samples are drawn again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from cheats import Cheating, Kind, told  # noqa: E402
from engine import other_seed  # noqa: E402
from onecell import convert, subset  # noqa: E402

from fedmerit.config import from_dict  # noqa: E402
from fedmerit.errors import UndefinedShares  # noqa: E402
from fedmerit.protocol.column import coordinates, halves, rounded, shown  # noqa: E402
from fedmerit.protocol.direction import BLOCKS  # noqa: E402
from fedmerit.protocol.pool import Slice  # noqa: E402
from fedmerit.scoring.ground_truth import shapley  # noqa: E402
from fedmerit.scoring.panel import Panel, hands, share_errors  # noqa: E402
from fedmerit.scoring.rewards import shares  # noqa: E402
from fedmerit.scoring.scores import from_blocks, products_of  # noqa: E402
from fedmerit.scoring.types import Table  # noqa: E402
from fedmerit.simulation.analysis import Game  # noqa: E402
from fedmerit.simulation.direction import direction  # noqa: E402
from fedmerit.simulation.models import as_tensor  # noqa: E402
from fedmerit.simulation.setup import Federation, LocalTraining, seed_for  # noqa: E402
from fedmerit.simulation.setup import prepare as federation_of  # noqa: E402

Array = np.ndarray
UTILITY = "expected-accuracy"
HELD_OUT = 0.2
LEAST = 20  # samples that a judge has, as in a rehearsal; a partition that gives less is drawn again
COUNT, NOISE, BLUR = 50_000, 2.0, 0.05
ROUNDS, EPOCHS = 8, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "fashion-mini": {"model": "mlp", "test_size": 300},
    "cifar10": {"model": "cnn-pool", "test_size": 600, "images": 1800},
}
RETRAININGS = 3
VERSIONS = {"device": "CPU", "torch": str(torch.__version__), "numpy": np.__version__}
DRAWS = 5

# ------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Cell:
    """One federation: its data, how many members it has, how its classes are dealt, its seed."""

    dataset: str
    members: int
    mu: float
    seed: int
    toy: bool = False
    retrainings: int = RETRAININGS
    file: str = ""  # of the dataset; empty for the one that comes with fedmerit


@dataclass(frozen=True)
class Home:
    """A federation whose members keep a part of their data out of training."""

    federation: Federation
    held: tuple[Slice, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.federation.names

    @functools.cached_property
    def together(self) -> Slice:
        """All held-out samples in one slice, judge by judge."""
        x, y = (np.concatenate([getattr(one, part) for one in self.held]) for part in "xy")
        return _slice(x, y)

    def values(self, model: Any) -> Array:
        """Every judge's mean utility of a model."""
        each = self.federation.evaluate(model, self.together)[UTILITY]
        ends = np.cumsum([len(one.y) for one in self.held])[:-1]
        return np.array([part.mean() for part in np.split(np.asarray(each), ends)])


def _slice(x: Array, y: Array) -> Slice:
    return Slice(index=0, x=x, y=y, salts=b"", path=())


def home_of(cell: Cell, again: int = 0) -> Home:
    """The federation of a cell; ``again``: the same data, another first model and order of batches."""
    how = SETTINGS[cell.dataset]
    seeds = functools.partial(other_seed, again) if again else seed_for
    for attempt in itertools.count():
        raw: dict[str, Any] = {
            "run": {"seed": 1000 * cell.seed + attempt, "device": "cpu"},
            "data": {"name": "npz", "path": cell.file} if cell.file else {"name": "fashion-mini"},
            "model": {"name": how["model"]},
            "partition": {"clients": cell.members, "scheme": "dirichlet", "mu": cell.mu},
            "training": {"rounds": 2 if cell.toy else ROUNDS, "local_epochs": 1 if cell.toy else EPOCHS},
            "scoring": {"utilities": [UTILITY]},
        }
        raw["data"]["test_size"] = how["test_size"]
        federation = federation_of(from_dict(raw), seeds=seeds)
        clients, held = [], []
        for number, client in enumerate(federation.clients):
            order = np.random.default_rng([cell.seed, attempt, number]).permutation(len(client.y))
            kept, out = np.split(order, [len(order) - round(HELD_OUT * len(order))])
            kept, out = np.sort(kept), np.sort(out)
            clients.append(replace(client, x=client.x[kept], y=client.y[kept]))
            held.append(_slice(client.x[out], client.y[out]))
        if min(len(one.y) for one in held) >= LEAST:
            return Home(replace(federation, clients=tuple(clients)), tuple(held))
    raise AssertionError


def trained(home: Home, local: LocalTraining | None = None, without: str = "") -> tuple[Array, Array]:
    """Plain averaging: the global models, shape (T + 1, P), and all updates U_i, shape (T, N, P)."""
    local = local or LocalTraining(home.federation)
    names = [name for name in home.names if name != without]
    models, moves = [home.federation.first] * 2, []
    for number in range(1, home.federation.config.training.rounds + 1):
        stale, start = models[-2:]
        found = local.train(number, names, start, stale, lambda done, total: None)
        moves.append(np.stack([(found[name] - start) / len(names) for name in names]))
        models.append(start + moves[-1].sum(axis=0))
    return np.stack(models[1:]), np.stack(moves)


@dataclass(frozen=True)
class Run:
    """A finished training and every gradient that somebody judges by."""

    home: Home
    models: Array  # (T + 1, P)
    updates: Array  # (T, N, P)
    gradients: Array  # (N, 2, T, P): of each half of a judge's data
    gained: Array  # (N,)
    pool: Array  # (T, B, P): of each block of the shared pool
    sizes: tuple[int, ...]

    @property
    def changes(self) -> Array:
        """What is public: the sum of each round, shape (T, P)."""
        return np.diff(self.models, axis=0)

    def panel(self, updates: Array | None = None, forged: Mapping[int, Array] | None = None) -> Array:
        """Who helped whom, from whole gradients, by half: shape (2, N, N). ``forged``: judge -> (T, P)."""
        moves = self.updates if updates is None else updates
        found = np.einsum("tip,bhtp->hib", moves, self.gradients, optimize=True).astype(np.float64)
        for b, lie in (forged or {}).items():
            found[:, :, b] = np.einsum("tip,tp->i", moves, lie)
        return found

    def fenced(self, updates: Array | None = None) -> list[float] | None:
        """The shares by the settlement's PHI on the shared pool; None where the rule refuses to pay."""
        moves = self.updates if updates is None else updates
        blocks = np.sum([products_of(g, u) for g, u in zip(self.pool, moves, strict=True)], axis=0)
        try:
            return list(shares(from_blocks(blocks, self.sizes, self.home.names), rule="fenced").values())
        except UndefinedShares:
            return None


def measured(home: Home, models: Array, updates: Array, *, pool: bool = True) -> Run:
    """Compute every judge's gradients, and those of the pool."""
    network, shared = home.federation.network, home.federation.pool.first
    steps, gradients, blocks, sizes = list(itertools.pairwise(models)), [], [], ()
    for number, one in enumerate(home.held):
        order = np.random.default_rng([7, number]).permutation(len(one.y))
        parts = [np.sort(order[half]) for half in halves(len(order))]
        ways = [direction(network, *step, one.x, one.y, UTILITY, blocks=parts).blocks for step in steps]
        gradients.append(np.stack(ways, axis=1))
    for step in steps if pool else ():
        way = direction(network, *step, shared.x, shared.y, UTILITY, blocks=BLOCKS)
        blocks.append(way.blocks)
        sizes = way.sizes
    gained = home.values(models[-1]) - home.values(models[0])
    return Run(home, models, updates, np.stack(gradients), gained, np.array(blocks), sizes)


def honest(cell: Cell, *, pool: bool = True) -> Run:
    """Everybody trains on its own data."""
    home = home_of(cell)
    return measured(home, *trained(home), pool=pool)


# -------------------------------------------------------------------------------------------------- columns


@dataclass(frozen=True)
class Columns:
    """What is known from columns: s_ib by half, (2, N, N); what innovation took, and the error of a sum."""

    halves: Array
    rest: Array
    error: Array

    @property
    def matrix(self) -> Array:
        return self.halves.mean(axis=0)

    def panel(self) -> Panel:
        return Panel(self.matrix, apart=(self.halves[0] - self.halves[1]) / 2)


def columns(
    run: Run,
    seed: str,
    *,
    updates: Array | None = None,
    gradients: Array | None = None,
    count: int = COUNT,
    noise: float = NOISE,
    innovate: bool = True,
    blur: float = 0.0,
) -> Columns:
    """What the panel knows of a run: drawn coordinates, innovation, noise, eight bits; and blur."""
    moves = run.updates if updates is None else updates
    shape = rounds, n, length = moves.shape
    drawn = [coordinates(seed, t, length, count) for t in range(rounds)]
    seen = [moves[t][:, places].astype(np.float64) for t, places in enumerate(drawn)]
    publics = [run.changes[max(0, t - 5) : t][:, places] for t, places in enumerate(drawn)]
    known, rest, error = np.zeros((2, n, n)), np.zeros(n), np.zeros(n)
    for b, slopes in enumerate(run.gradients if gradients is None else gradients):
        made = [
            shown(slopes[:, t, places], publics[t] if innovate else (), noise, seed, b, t)
            for t, places in enumerate(drawn)
        ]
        column, scale = rounded([left for left, _ in made])
        factor = scale * length / len(drawn[0])
        variance, size = 0.0, 0.0
        for t, own in enumerate(seen):
            for h, half in enumerate(halves(len(drawn[t]))):
                known[h, :, b] += 2 * factor * (own[:, half] @ column[t, half].astype(np.float64))
            total = own.sum(axis=0)
            rest[b] += length / len(drawn[t]) * float(total @ made[t][1])
            variance += len(drawn[t]) * float(np.var(factor * total * column[t]))
            size += float(np.linalg.norm(total)) * float(np.linalg.norm(factor * column[t]))
        error[b] = np.sqrt(variance)
        if blur:
            known[:, :, b] += blurred(known[:, :, b], size, blur, np.random.default_rng([*seed.encode(), b]))
    assert shape == moves.shape
    return Columns(known, rest, error)


def blurred(known: Array, size: float, blur: float, rng: np.random.Generator) -> Array:
    """Noise that cancels within each pair; per statement, of blur times the larger of two lengths over N."""
    n = known.shape[1]
    noise = np.zeros((2, n, n))
    spread = blur * np.maximum(np.abs(known.sum(axis=1)), 0.05 * size) / n / np.sqrt(n - 1)
    for h in range(2):
        noise[h] = np.triu(rng.normal(0, spread[h], (n, n)), 1)
        noise[h] -= noise[h].T
    return noise.sum(axis=2)


# -------------------------------------------------------------------------------------------------- fidelity


def fidelity(cell: Cell) -> dict[str, Any]:
    """Every matrix beside s: Shapley values of each judge's utility, and losses when a member leaves."""
    run, home = honest(cell, pool=False), home_of(cell)
    truth = np.zeros((cell.members,) * 2)
    for start, moves in zip(run.models, run.updates, strict=False):
        game = Game(as_tensor(start), as_tensor(moves), [1.0] * cell.members, "additive", home.names)
        masks = np.arange(1 << cell.members)
        table = np.concatenate(
            [[home.values(model) for model in game.vectors(part)] for part in np.array_split(masks, 32)]
        )
        for b in range(cell.members):
            truth[:, b] += shapley(Table(table[:, b], home.names)).values
    lost = []
    for again in range(min(cell.retrainings, 1) if cell.toy else cell.retrainings):
        other = home_of(cell, again)
        whole = home.values(trained(other)[0][-1])
        gone = [whole - home.values(trained(other, without=name)[0][-1]) for name in home.names]
        lost.append(np.stack(gone).tolist())
    return {
        "exact": run.panel().tolist(),
        "column": columns(run, f"{cell.seed}", blur=BLUR).halves.tolist(),
        "shapley": truth.tolist(),
        "lost": lost,
        "gained": run.gained.tolist(),
    }


# --------------------------------------------------------------------------------------------------- attacks


def attacks(cell: Cell) -> Iterator[dict[str, Any]]:
    """Everybody's shares under each cheat. Cheats are the last members; the judge who tells is the first."""
    run, last = honest(cell), cell.members - 1
    yield divided(run, "nobody cheats", cell, ())
    for name, kind, factor, also in TRAINED:
        home = home_of(cell)
        if also:
            known = home.federation.pool.slice(1) if also == "pool" else home.held[0]
            home = replace(home, federation=told(home.federation, known))
        local = Cheating(home.federation, kind=kind, factor=factor, stacked=False)
        cheats = (last - 1, last) if kind.endswith("pair") else (last, 0) if also == "judge" else (last,)
        yield divided(measured(home, *trained(home, local)), name, cell, cheats)
    before = np.concatenate([np.zeros_like(run.changes[:1]), run.changes[:-1]])
    for name, added in (
        ("pair, 3 public updates", 3 * before / cell.members),
        ("pair, 1 own update", run.updates[:, last - 1]),
        ("pair, 3 own updates", 3 * run.updates[:, last - 1]),
    ):
        moves = run.updates.copy()
        moves[:, last - 1] += added
        moves[:, last] -= added
        yield divided(run, name, cell, (last - 1, last), updates=moves)
    moves, whole = run.updates, run.changes
    lies: dict[str, dict[int, Array]] = {"hurt": {last: moves[:, last] - whole}}
    for name, friends in (
        ("praise, a pair", (last - 1, last)),
        ("praise, three", (last - 2, last - 1, last)),
    ):
        lies[name] = {}
        for b in friends:
            favoured = moves[:, [one for one in friends if one != b]].sum(axis=1)
            others = whole - moves[:, list(friends)].sum(axis=1)
            lies[name][b] = favoured / (len(friends) - 1) - others / (cell.members - len(friends))
    for name, forged in lies.items():
        yield divided(run, name, cell, tuple(forged), forged=forged)
    yield divided(run, "refuses to judge", cell, (last,), forged={last: np.zeros_like(whole)})
    zero = trained(home := home_of(cell), Cheating(home_of(cell).federation, kind="empty pair", factor=0.0))
    run = measured(home, *zero, pool=False)
    table = run.panel().mean(axis=0)
    table[last - 1] += (most := 10 * np.abs(table).sum())
    table[last] -= most
    table[:, last - 1] += (np.arange(cell.members) == last) * 2 * most  # the other way in its friend's column
    yield {
        "attack": "transfer by an empty pair, no witness",
        "cheats": [last - 1, last],
        "hands": list(hands(table).values()),
    }


TRAINED: tuple[tuple[str, Kind, float, str], ...] = (
    ("told the pool", "pool", 1.0, "pool"),
    ("told one judge's set", "pool", 1.0, "judge"),
    ("replay x 3", "replay", 3.0, ""),
    ("honest update x 2", "scale", 2.0, ""),
    ("honest update x 3", "scale", 3.0, ""),
    ("empty pair, 3 public updates", "empty pair", 3.0, ""),
)
"""Cheats that need a training of their own: name, kind, factor, and what the cheat trains on."""


def divided(
    run: Run,
    name: str,
    cell: Cell,
    cheats: Sequence[int],
    *,
    updates: Array | None = None,
    forged: Mapping[int, Array] | None = None,
) -> dict[str, Any]:
    """The shares by every way to divide."""
    whole = run.panel(updates, forged).mean(axis=0)
    found: dict[str, Any] = {
        f"hands, most {most}" if most != 3 else "hands": list(hands(whole, most).values())
        for most in (3, 2, cell.members - 1)
    }
    for way, innovate in (("columns", True), ("columns, no innovation", False)):
        one = columns(run, f"{cell.seed}", updates=updates, innovate=innovate, blur=BLUR)
        table = one.matrix.copy()
        for b in forged or {}:
            table[:, b] = whole[:, b]  # a liar's column has no error
        found[way] = list(hands(table).values())
    return {"attack": name, "cheats": list(cheats), **found, "fenced": run.fenced(updates)}


# ---------------------------------------------------------------------------------------------------- errors


def noise(cell: Cell) -> dict[str, Any]:
    """Shares from columns of several kinds, and the check of every judge's sum."""
    run = honest(cell, pool=False)
    length = run.updates.shape[2]
    ways = {
        "all, noise 0": (length, 0.0, False, 0.0),
        "all, noise 2": (length, 2.0, False, 0.0),
        "50,000, noise 0": (COUNT, 0.0, False, 0.0),
        "10,000, noise 0": (10_000, 0.0, False, 0.0),
        "all, noise 0, innovation": (length, 0.0, True, 0.0),
        "50,000, noise 2": (COUNT, 2.0, False, 0.0),
        "10,000, noise 2": (10_000, 2.0, False, 0.0),
        "50,000, noise 2, innovation": (COUNT, 2.0, True, 0.0),
        "50,000, noise 4, innovation": (COUNT, 4.0, True, 0.0),
        "50,000, noise 8, innovation": (COUNT, 8.0, True, 0.0),
        "50,000, noise 2, innovation, blur": (COUNT, 2.0, True, BLUR),
    }
    found: dict[str, list[Any]] = {name: [] for name in ways}
    checks = []
    for draw in range(1 if cell.toy else DRAWS):
        for name, (count, spread, innovate, blur) in ways.items():
            if draw >= 1 and name != "50,000, noise 2, innovation":
                continue
            one = columns(run, f"{cell.seed} {draw}", count=count, noise=spread, innovate=innovate, blur=blur)
            found[name].append(list(hands(one.matrix).values()))
            if name == "50,000, noise 2, innovation":
                off = run.gained - one.rest - one.matrix.sum(axis=0)
                checks.append([off.tolist(), one.error.tolist()])
    exact = run.panel().mean(axis=0)
    return {
        "exact": list(hands(exact).values()),
        "shares": found,
        "gained": run.gained.tolist(),
        "sums": exact.sum(axis=0).tolist(),
        "checks": checks,  # per draw: gain - rest - sum, and its standard error, of every judge
        "length": length,
    }


def coverage(cell: Cell) -> dict[str, Any]:
    """Judges' samples are drawn again, with replacement: the truth is the panel of those that there are."""
    home = home_of(cell)
    models, updates = trained(home)
    steps, network = list(itertools.pairwise(models)), home.federation.network
    single = [  # per judge: (T, samples, P)
        np.stack(
            [
                direction(
                    network, *step, one.x, one.y, UTILITY, blocks=[np.array([k]) for k in range(len(one.y))]
                ).blocks
                for step in steps
            ]
        )
        for one in home.held
    ]
    whole = np.stack([np.stack([rows.mean(axis=1)] * 2) for rows in single])
    run = Run(home, models, updates, whole, np.zeros(cell.members), np.zeros(0), ())
    truth = run.panel().mean(axis=0)
    inside: dict[str, list[Any]] = {"gradients": [], "columns": []}
    for draw in range(2 if cell.toy else 2 * DRAWS):
        rng = np.random.default_rng([cell.seed, draw])
        rows = []
        for own in single:
            chosen = rng.integers(own.shape[1], size=own.shape[1])
            parts = [chosen[half] for half in halves(len(chosen))]
            rows.append(np.stack([_weighed(own, part) for part in parts]))
        again = replace(run, gradients=np.stack(rows))
        first, second = again.panel()
        seen = {
            "gradients": Panel((first + second) / 2, apart=(first - second) / 2),
            "columns": columns(again, f"{cell.seed} {draw}", blur=BLUR).panel(),
        }
        for name, panel in seen.items():
            errors = share_errors(panel)
            assert errors is not None
            inside[name].append([list(hands(panel.matrix).values()), list(errors.values())])
    return {"truth": list(hands(truth).values()), "draws": inside}


def _weighed(own: Array, part: Array) -> Array:
    """The mean of some samples' gradients, each as often as it was drawn: (T, P)."""
    weights = np.bincount(part, minlength=own.shape[1]).astype(np.float32) / len(part)
    return np.stack([weights @ rows for rows in own])


# ---------------------------------------------------------------------------------------------------- script

QUESTIONS: dict[str, Callable[[Cell], Any]] = {
    "attacks": attacks,
    "fidelity": fidelity,
    "noise": noise,
    "coverage": coverage,
}


def answered(job: tuple[str, Cell]) -> list[dict[str, Any]]:
    """The lines of one question about one cell."""
    what, cell = job
    torch.set_num_threads(1)
    began, found = time.perf_counter(), QUESTIONS[what](cell)
    lines = [found] if isinstance(found, dict) else list(found)
    held = [len(one.y) for one in home_of(cell).held]
    about = {key: getattr(cell, key) for key in ("dataset", "members", "mu", "seed")}
    seconds = round(time.perf_counter() - began, 1)
    common = {"what": what, **about, "held": held, "seconds": seconds, "machine": VERSIONS}
    return [short({**common, **line}) for line in lines]


def short(value: Any) -> Any:
    """Six digits suffice for what is measured in parts of a hundred."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: short(one) for key, one in value.items()}
    return [short(one) for one in value] if isinstance(value, list) else value


def main() -> None:
    """Answer what is not answered yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "panel")
    parser.add_argument("--data", type=Path, help="folder of the datasets; not needed for fashion-mini")
    parser.add_argument("--dataset", choices=SETTINGS, default="fashion-mini")
    parser.add_argument("--seeds", default="0:5", help="first:last, without the last")
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--mu", type=float, nargs="+", default=[0.5, 5.0])
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--retrainings", type=int, default=RETRAININGS, help="of fidelity; the dearest part")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="two rounds, to see that everything runs")
    options = parser.parse_args()
    if options.dataset != "fashion-mini" and options.data is None:
        parser.error(f"--data is needed for {options.dataset}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{options.dataset}.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    there = {(one["what"], one["members"], one["mu"], one["seed"]) for one in known}
    first, last = map(int, options.seeds.split(":"))
    with tempfile.TemporaryDirectory() as scratch:
        cells = []
        for seed in range(first, last):
            made = _file(options.dataset, options.data, seed, Path(scratch))
            given = seed, options.toy, options.retrainings, made
            cells += [Cell(options.dataset, options.members, mu, *given) for mu in options.mu]
        jobs = [
            (what, cell)
            for what, cell in itertools.product(options.only, cells)
            if (what, cell.members, cell.mu, cell.seed) not in there
        ]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with multiprocessing.get_context("spawn").Pool(max(1, min(options.processes, len(jobs)))) as pool:
            for done, lines in enumerate(pool.imap_unordered(answered, jobs), start=1):
                with file.open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps(line) + "\n" for line in lines)
                one = lines[0]
                print(
                    f"{done} of {len(jobs)}: {one['what']}, mu {one['mu']:g}, seed {one['seed']}, "
                    f"{one['seconds']:.0f} s",
                    flush=True,
                )


def _file(dataset: str, data: Path | None, seed: int, scratch: Path) -> str:
    """The dataset's file with as many training images as a cell takes; empty for the one in the package."""
    if dataset == "fashion-mini":
        return ""
    if not (scratch / f"{dataset}.npz").exists():
        convert(data, [dataset], scratch)
    into = scratch / str(seed)
    into.mkdir()
    return str(subset(scratch / f"{dataset}.npz", SETTINGS[dataset]["images"], seed, into))


if __name__ == "__main__":
    main()
