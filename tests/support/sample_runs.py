"""Small finished runs of every kind, with everybody's keys in their folders, so that tests can sign anew."""

import numpy as np

from command_line import call
from fedmerit.config import from_dict
from fedmerit.simulation.run import run
from linear_federation import Federation, write_key
from tiny import losing

SITES = ("Site 1", "Site 2", "Site 3", "Site 4")
NAMES = ["St. Anna", "Nordklinik", "Dale", "Elm", "Hospital E"]


def _rehearsed(folder, **sections):
    """Run a federation with a small network on fashion-mini, scored by reports unless told otherwise."""
    settings = {
        "data": {"test_size": 60},
        "model": {"name": "mlp"},
        "run": {"device": "cpu"},
        "training": {"rounds": 2, "local_epochs": 1, "batch_size": 16},
        "scoring": {"method": "reports"},
    }
    for name, part in sections.items():
        settings[name] = {**settings.get(name, {}), **part}
    run(from_dict(settings), folder)


def _sizes(count):
    return {"clients": count, "scheme": "sizes", "sizes": [30] * count}


def _decided(folder, budget, *options):
    done = call("rewards", folder, "--budget", budget, "--despite-doubts", *options)
    assert done.exit_code == 0, done.output


def masked(home):
    """Secret weights, SOLO, a member away, one silent, one lost; two decisions, the last one approved."""
    folder = home / "masked"
    with losing({"Nordklinik": "3:report", "Elm": "4:masked"}):
        _rehearsed(
            folder,
            partition={**_sizes(5), "names": NAMES},
            training={"rounds": 4, "weights": "secret", "weight_cap": 1000},
            participation={"away": {"Dale": [2]}},
            scoring={"solo": True},
        )
    _decided(folder, "750.00")
    _decided(folder, "100.00", "--rule", "equal")
    done = call("approve", folder, "--key", folder / "keys" / "Elm.pem")
    assert done.exit_code == 0, done.output


def grouped(home):
    """Visibility "coordinator", and a decision."""
    folder = home / "grouped"
    _rehearsed(folder, partition=_sizes(4), scoring={"visibility": "coordinator"})
    _decided(folder, "750.00")


def sampled(home):
    """Five of six members per round, weights from scores; y is a real number."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 4)).astype(np.float32)
    y = 5 + x.sum(1) + rng.normal(0, 0.3, 240)
    home.mkdir(exist_ok=True)
    np.savez(home / "numbers.npz", x_train=x[:180], y_train=y[:180], x_test=x[180:], y_test=y[180:])
    _rehearsed(
        home / "sampled",
        data={"name": "npz", "path": str(home / "numbers.npz")},
        partition=_sizes(6),
        training={"rounds": 3, "weights": "scores", "loss": "mse"},
        participation={"fraction": 0.84},
        scoring={"utilities": ["rmse-skill:9", "mae-skill:9"]},
    )


def unmasked(home):
    """Without secure aggregation, with MR-SV."""
    _rehearsed(
        home / "unmasked",
        partition=_sizes(4),
        secure_aggregation={"enabled": False},
        scoring={"truth": ["mr-shapley"]},
    )


_SLICES = {"data": {"test_reveal": "per-round"}, "training": {"weights": "secret", "weight_cap": 1000}}


def _kept(made, folder):
    for who, key in made.keys.items():
        write_key(made.folder / "keys" / f"{who}.pem", key)
    made.folder.rename(folder)


def flower(home):
    """Fresh test slices, one report lost; a decision."""
    made = Federation(
        home / "flower-home", SITES, rounds=3, lost=[("Site 4", 2, "report")], settings=_SLICES
    ).run()
    _kept(made, home / "flower")
    _decided(home / "flower", "750.00")


def aborted(home):
    """Somebody declines in every round, and the last one has no sum."""
    lost = [("Site 3", 3, "masked")]
    federation = Federation(
        home / "aborted-home", SITES, rounds=3, lost=lost, beyond=["Site 4"], settings=_SLICES
    )
    _kept(federation.run(), home / "aborted")


RUNS = {one.__name__: one for one in (masked, grouped, sampled, unmasked, flower, aborted)}


def made(home, *names):
    """Make runs, all unless they are named; return the folder that theirs are in."""
    for name in names or RUNS:
        RUNS[name](home)
    return home
