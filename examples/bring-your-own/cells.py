"""Tabular classification: five clinics, a table of measured cells, a model for vectors, AUC.

    python cells.py                                  # writes cells.csv
    fedmerit run cells.toml --out runs/cells

With scikit-learn installed the table is its copy of Breast Cancer Wisconsin (Diagnostic): W. Wolberg,
W. Street, O. Mangasarian, UCI, CC BY 4.0. Without it, the table is made up: as many cells, columns, clinics.
"""

import csv
import sys
from pathlib import Path

import numpy as np

CLINICS = ("Abbey", "Bridge", "Castle", "Dale", "Elm / North")  # the last cannot name a file: a note says so


def cells():
    """Return features (n, 30), their names, and the diagnosis of each cell."""
    try:
        from sklearn.datasets import load_breast_cancer

        found = load_breast_cancer()
        return found.data, [str(name) for name in found.feature_names], found.target_names[found.target]
    except ImportError:
        print("scikit-learn is not installed: the cells are made up")
    rng = np.random.default_rng(0)
    malignant = rng.random(569) < 212 / 569
    size = rng.normal(malignant[:, None] * 1.2, 1, (569, 3)) @ rng.normal(size=(3, 30))
    x = np.exp(0.2 * size + rng.normal(0, 0.4, (569, 30)))
    return x, [f"measure {k}" for k in range(30)], np.where(malignant, "malignant", "benign")


def main(path="cells.csv"):
    x, names, diagnosis = cells()
    rng = np.random.default_rng(1)
    clinic = rng.choice(CLINICS, len(x), p=(0.35, 0.25, 0.2, 0.15, 0.05))
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["clinic", "diagnosis", *names])
        rows.writerows([c, d, *map(float, row)] for c, d, row in zip(clinic, diagnosis, x, strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
