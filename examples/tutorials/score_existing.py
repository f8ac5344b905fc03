"""Score my existing federation: from four numbers a round to money, for any framework.

python examples/tutorials/score_existing.py [FOLDER]
"""

# You run federated learning already, with a framework or with code of your own, and want to know who
# contributed what. fedmerit needs four kinds of numbers a round: how good the model was before it, `empty`
# = v(M0), and after it, `grand` = v(M); and from every member how good the model is with its update alone,
# `alone` = v(M0 + U_i), and without it, `without` = v(M - U_i). A member computes its two itself, because
# only it knows its update U_i (what it adds to the sum, its weight included). All of them are measured on
# one labelled test set that every member has been shown.
#
# This script needs numpy, and the page at the end `pip install '.[page]'` in a clone. It takes a few seconds.

import csv
import sys
from pathlib import Path

import numpy as np

import fedmerit as fm
from fedmerit.data import load
from fedmerit.report.page.html import page
from fedmerit.scoring.uncertainty import indistinguishable, intervals, rank_intervals

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tutorial-score")
folder.mkdir(parents=True, exist_ok=True)

# ## A federation
#
# Let this stand for yours: five labs, softmax regression on small pictures of clothes, six rounds of
# averaging. The labs have different amounts of data, and a third of Echo's labels are noise.

data = load("fashion-mini")
rng = np.random.default_rng(7)
classes = len(data.classes)


def pixels(images: np.ndarray) -> np.ndarray:
    """One row per picture, and a 1 for the bias."""
    rows = images.reshape(len(images), -1) / 255.0
    return np.hstack([rows, np.ones((len(rows), 1))])


order = rng.permutation(len(data.y_train))
sizes = {"Alder": 500, "Birch": 300, "Cedar": 300, "Dogwood": 150, "Echo": 300}
cuts = np.split(order, np.cumsum(list(sizes.values())))
labs = {
    name: (pixels(data.x_train[own]), data.y_train[own].copy())
    for name, own in zip(sizes, cuts, strict=False)
}
noisy = rng.random(sizes["Echo"]) < 1 / 3
labs["Echo"][1][noisy] = rng.integers(0, classes, noisy.sum())

test = rng.permutation(len(data.y_test))[:500]
x_test, y_test = pixels(data.x_test[test]), data.y_test[test]


def probabilities(model: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Softmax of the scores of all classes."""
    scores = x @ model
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def trained(model: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Twenty steps of gradient descent at home."""
    wanted = np.eye(classes)[y]
    for _ in range(20):
        model = model - 0.1 * x.T @ (probabilities(model, x) - wanted) / len(y)
    return model


# ## Two more evaluations a member
#
# How good is a model? The probability that it gives to the right answer, one number per test sample:
# fedmerit calls its mean the *expected accuracy*. It is smooth, which accuracy is not, and that is what
# makes the scores add up. Keep the numbers per sample for a moment: every member is measured on the same
# samples, so the standard error of its alpha comes from the differences sample by sample, and is much
# smaller than that of the utilities themselves.


def value(model: np.ndarray) -> np.ndarray:
    """What the model is worth on each test sample."""
    return probabilities(model, x_test)[np.arange(len(y_test)), y_test]


def error(per_sample: np.ndarray) -> float:
    """Standard error of a mean over the test samples."""
    return float(per_sample.std(ddof=1) / np.sqrt(len(per_sample)))


# This is the loop you already have, with the lines that a member adds. Under secure aggregation nobody but
# the member could run them: they need U_i. Only the numbers of `lines` leave it. On a fixed test set the
# errors of the rounds are not independent, so a member also adds its alpha up sample by sample
# (`se_alpha_total`).

model = np.zeros((x_test.shape[1], classes))
weights = {name: size / sum(sizes.values()) for name, size in sizes.items()}
so_far = {name: np.zeros(len(y_test)) for name in labs}
lines = []
for number in range(1, 7):
    updates = {name: weights[name] * (trained(model, *own) - model) for name, own in labs.items()}
    after = model + sum(updates.values())
    v_empty, v_grand = value(model), value(after)
    for name, update in updates.items():
        v_alone, v_without = value(model + update), value(after - update)
        alpha = ((v_grand - v_without) + (v_alone - v_empty)) / 2
        so_far[name] += alpha
        lines.append(
            {
                "round": number,
                "client": name,
                "utility": "expected-accuracy",
                "empty": v_empty.mean(),
                "grand": v_grand.mean(),
                "alone": v_alone.mean(),
                "without": v_without.mean(),
                "se_alpha": error(alpha),
                "se_alpha_total": error(so_far[name]),
                "slice": "the 500 samples",
            }
        )
    model = after

# One line per round and member, in a CSV file. JSON works as well.

reports = folder / "reports.csv"
with reports.open("w", newline="") as file:
    writer = csv.DictWriter(file, lines[0].keys())
    writer.writeheader()
    writer.writerows(lines)

# ## Scores, and how sure they are
#
# From here on it is arithmetic. `fedmerit score reports.csv` prints all of it as one table; this is how to
# get at the parts. The default score is alpha, the mean of what the model loses without a member and what
# the member adds alone, summed over the rounds.

rounds = fm.read(reports)
total = fm.accumulate(rounds)
spans, ranks = intervals(total), rank_intervals(total)
print(f"{'member':8}  alpha      95% interval        rank, and those it may have")
for name in total.ranking():
    i = total.clients.index(name)
    low, high = spans[i]
    best, worst = ranks[i]
    print(f"{name:8} {total.raw[i]:+.4f}  [{low:+.4f}, {high:+.4f}]    {total.ranks()[i]} ({best}-{worst})")

# Before believing a table, look at two things. Does the sum of alpha come near the gain? Then what is
# divided is what the model gained. And which members are statistically indistinguishable? To rank those,
# more test samples would be needed.

print(f"the model gained {total.gain:+.4f}; alpha adds up to {total.raw.sum():+.4f}")
for group in indistinguishable(total):
    if len(group) > 1:
        print("statistically indistinguishable:", ", ".join(group))

# The scores of single rounds are there too, with the status that says whether a normalisation turned them
# around.

for r in rounds:
    print(f"round {r.round}: gain {r.gain:+.4f}, FP {fm.fp(r).status}, EE {fm.ee(r).status}")

# ## Payouts
#
# A rule turns scores into shares, and shares into cents that add up to the budget exactly. `fair` follows
# the scores, `fenced` limits what an exaggerated report can earn, `impartial` lets nobody's own report touch
# its own share, at the price of nearly equal shares and a part that stays unpaid.

for rule in ("fair", "fenced", "impartial"):
    paid = fm.payouts(fm.shares(total, rule), budget="10000.00")
    assert sum(paid.values()) + paid.unpaid == paid.budget
    print(
        f"{rule:9}",
        ", ".join(f"{name} {amount:,}" for name, amount in paid.items()),
        f"unpaid {paid.unpaid:,}",
    )

# ## A page for everybody else
#
# One HTML file that works from a USB stick, with the same numbers as charts and tables and a field for the
# budget: `fedmerit page reports.csv` on the command line.

(folder / "page.html").write_text(page(reports), encoding="utf-8")
print(f"open {folder / 'page.html'} in a browser")

# ## What this did not give you
#
# Here one process saw every update. In a real federation that is what secure aggregation prevents: see
# "fedmerit inside Flower", or carry `fedmerit.secagg` over your own wires. And nothing here checks that a
# member reports what it measured: without signed reports and a ledger you take its word.
