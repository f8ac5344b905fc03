"""Rehearse our consortium: own data, a plan, a run under secure aggregation, checks, money, a page.

python examples/tutorials/rehearse_consortium.py [FOLDER]
"""

# Before members sign anything they want to know what will come out. A rehearsal answers that on one
# machine: the members, their keys and the server live in one process, but say to each other what they would
# say between machines.
#
# This script needs `pip install '.[engine,page]'` in a clone, and takes about ten seconds.

import os
import sys
from pathlib import Path

import numpy as np

from fedmerit.cli import app
from fedmerit.data import load

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tutorial-rehearsal")
folder.mkdir(parents=True)  # a new one: a run overwrites no other
os.chdir(folder)


def fedmerit(*arguments: str) -> None:
    """What you would type in a terminal."""
    print("\n$ fedmerit", *arguments)
    app(arguments, standalone_mode=False)


# ## Your data
#
# One `.npz` file with training and test images as (n, height, width, channels), their labels as integers,
# and for every training image who recorded it. Here we make one out of the pictures that fedmerit ships:
# five hospitals of different sizes, and Elm has scanned everything upside down.

shipped = load("fashion-mini")
rng = np.random.default_rng(3)
names = ["Abbey", "Bridge", "Castle", "Dale", "Elm"]
recorded_by = rng.choice(names, size=len(shipped.y_train), p=[0.3, 0.25, 0.2, 0.15, 0.1])
images = shipped.x_train.copy()
images[recorded_by == "Elm"] = images[recorded_by == "Elm"][:, ::-1]
np.savez(
    "ours.npz",
    x_train=images,
    y_train=shipped.y_train,
    x_test=shipped.x_test,
    y_test=shipped.y_test,
    group_train=recorded_by,
    classes=np.array(shipped.classes),
)

# ## Your settings
#
# Every key has a default (`fedmerit init` writes them all, explained). What must be agreed on is here: who
# takes part, which test samples everybody is shown and when, what is measured, and what a missed round
# counts. All test samples are committed to before round 1. Half of them stay shut until the last round is
# over: then the run is settled, and by that members are ranked and paid. The other half is for what members
# report in the rounds. With `test_reveal = "per-round"` every round has fresh samples of that half, shown
# after the round's masked updates are in. A member who trains on samples that it was shown gains nothing by
# it.

Path("ours.toml").write_text(
    f"""
[data]
name = "npz"
path = "ours.npz"
test_size = 500
test_reveal = "per-round"

[partition]
scheme = "group"
names = {names}

[model]
name = "mlp"

[training]
rounds = 3
local_epochs = 2

[participation]
away = {{Dale = [2]}}

[scoring]
utilities = ["expected-accuracy", "accuracy"]
"""
)

# ## What will it cost, and what can it tell?
#
# The plan counts models, trainings and bytes, and says how large a difference between two members the test
# samples can resolve. If that is larger than the differences you expect, get more test samples before you
# start.

fedmerit("plan", "ours.toml")

# ## Run it
#
# Secure aggregation is on. Dale is away in round 2. A run that is interrupted goes on with `--resume`.

fedmerit("run", "ours.toml", "--out", "first")

# The table says who contributed what and how sure that is, and whether the numbers that members stated add
# up; the folder holds the signed ledger, the scores
# as JSON and CSV, and `page-first.html` for everybody who does not open a terminal.

# ## Divide a budget
#
# The decision becomes a record of the ledger, and every member gets a statement: what it did, what it
# earns, what absence cost it, how sure that is. The terms are those of the settings (`[payment]`), which all
# members signed before the first round.

fedmerit("rewards", "first", "--budget", "25000.00")
print(Path("first/statements/Dale.md").read_text())

# ## Check it
#
# Anybody with the folder can check everything offline: the chain of records, every signature, that what
# members stated adds up, that scores follow from it and cents from the scores. Keep the head that is
# printed at the end: given to `--head` later, it shows whether history was rewritten.

fedmerit("verify", "first")

# A member can keep a copy of the ledger as lines of JSON, and verify that instead.

fedmerit("export", "first", "--out", "ledger.jsonl", "--for", "Dale")
fedmerit("verify", "ledger.jsonl", "--as", "Dale")

# ## Show it
#
# The page was written by the run, and anew with the decision: it shows who is paid what. `fedmerit page`
# writes it once more, under another name.

fedmerit("page", "first", "--out", "board.html")

# ## Then ask what would change the answer
#
# Train again: the intervals of one run only allow for what another training would give. Try
# `scoring.game=renormalised`, `payment.missing=own-mean`, another paid utility. If the ranking changes, the
# consortium should know before money depends on it.
#
#     fedmerit run ours.toml --out second --set run.seed=1
