"""Regression: five clinics, a year of diabetes, RMSE.

    python progression.py                            # writes progression.csv
    fedmerit run progression.toml --out runs/progression
    python progression.py progression.csv Dale       # the answers of Dale's patients, exchanged among them

With scikit-learn installed the table is its copy of the diabetes data of Efron, Hastie, Johnstone and
Tibshirani (2004), "Least Angle Regression". Without it, the table is made up: as many patients and columns.
"""

import csv
import sys
from pathlib import Path

import numpy as np

CLINICS = ("Abbey", "Bridge", "Castle", "Dale", "Elm")
COLUMNS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


def patients():
    """Return baseline values (n, 10), and the progression of the disease after a year."""
    try:
        from sklearn.datasets import load_diabetes

        return load_diabetes(return_X_y=True, scaled=False)
    except ImportError:
        print("scikit-learn is not installed: the patients are made up")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(442, 10)).round(3)
    slope = np.array([1, -10, 25, 15, -35, 20, 5, 8, 34, 3])
    return x, np.clip(152 + x @ slope + rng.normal(0, 54, 442), 25, 346).round()


def main(path="progression.csv", exchanged=""):
    x, y = patients()
    clinic = np.random.default_rng(1).choice(CLINICS, len(x))
    y[clinic == exchanged] = np.random.default_rng(2).permutation(y[clinic == exchanged])
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["clinic", "progression", *COLUMNS])
        rows.writerows([c, float(v), *map(float, row)] for c, v, row in zip(clinic, y, x, strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
