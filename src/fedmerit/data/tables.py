"""Tables as data: a CSV or Parquet file, with a target, features and the member of every row in columns.

Nothing is guessed: text in a feature and an empty cell are refused unless ``categories`` and ``missing`` say
what to do with them. What is computed from the training rows (means, categories) is computed over all
members, which one process can do. Members of a run between machines must agree on such numbers before.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedmerit.data.dataset import Dataset
from fedmerit.errors import DataError, FileFormatError, MissingExtra
from fedmerit.notes import first_names
from fedmerit.scoring.spreadsheets import SEPARATORS, SheetForm, read_sheet

Cells = dict[str, list[str]]
"""Cells by column, as text without blanks around it; an empty text is a missing value."""
Categories = Literal["refuse", "one-hot"]
Missing = Literal["refuse", "drop", "mean"]
Kind = Literal["classes", "numbers"]
LISTED = 40
"""The most columns that a message lists."""
CATEGORIES = 100
"""The most values of a category; a column with more is an identifier or a text."""
EMPTY = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Cells that hold no value, in lower case."""


def table(
    path: Path,
    *,
    target: str,
    kind: Kind = "classes",
    features: Sequence[str] = (),
    group: str = "",
    test: str = "",
    test_fraction: float = 0.25,
    split_seed: int = 0,
    categories: Categories = "refuse",
    missing: Missing = "refuse",
    standardise: bool = False,
    separator: str = "",
    decimal: str = ".",
) -> Dataset:
    """Read a table with a header; x has a row of numbers per row, y its target.

    Args:
        path: a ``.csv`` or ``.parquet`` file; the latter needs pyarrow.
        target: the column of y.
        kind: what y is: ``classes`` (any text or whole numbers) or ``numbers`` (real ones).
        features: the columns of x; by default all that are neither target nor group nor test.
        group: the column that names the member of every row, for ``partition.scheme = "group"``.
        test: a column that holds ``train`` or ``test``, or a second file with the test rows; by default, rows
            are drawn by ``test_fraction``, from each class and member alike.
        test_fraction: share of the rows to test on, if ``test`` is not given.
        split_seed: seed of that draw.
        categories: text in features is refused, or becomes a column of 0 and 1 per value (``one-hot``).
        missing: empty cells in features are refused, their rows left out (``drop``), or replaced by the
            training rows' mean (``mean``); an empty category is a category of its own then. An empty
            target or group is always refused.
        standardise: whether features have mean 0 and standard deviation 1 over the training rows.
        separator: between cells of a CSV file: a comma, semicolon, tab or bar; by default found out from the
            header, as are the encoding of letters and a line ``sep=``, and noted.
        decimal: point or comma, in numbers of a CSV file.
    """
    for name, given, allowed in (
        ("kind", kind, get_args(Kind)),
        ("categories", categories, get_args(Categories)),
        ("missing", missing, get_args(Missing)),
    ):
        if given not in allowed:
            raise DataError.at("data.options", f"expected {' or '.join(allowed)}, got {given!r}", entry=name)
    (cells, notes), other = _read(path, separator, target), None
    if test and test not in cells and Path(test).suffix in (".csv", ".parquet"):
        other, more = _read(Path(test), separator, target)
        notes += more
    split = test if test and other is None else ""
    if isinstance(features, str):
        raise DataError.at("data.options", f"expected a list of columns, got {features!r}", entry="features")
    for file, found in ((path, cells), *(((Path(test), other),) if other is not None else ())):
        wanted = (target, *features, *filter(None, (split, group if found is cells else "")))
        _check_columns(file, found, wanted)
    named = list(features) or [name for name in cells if name not in (target, group, split)]
    if not named or len(set(named)) < len(named) or target in named:
        raise DataError.at(
            "data.options", f"expected different columns besides {target!r}, got {named}", entry="features"
        )
    if other is not None:
        _check_columns(Path(test), other, named)
    count = len(cells[target])
    for name in filter(None, (target, group, split)):
        _check_filled(path, name, cells[name])
    if other is not None:
        _check_filled(Path(test), target, other[target])
        joined = {name: cells[name] + other[name] for name in (target, *named)}
        held = np.arange(len(joined[target])) >= count
    else:
        joined = cells
    y, classes = _target(path, target, joined[target], kind, decimal)
    if other is None:
        alike = [name for name in (target if kind == "classes" else "", group) if name]
        held = _held(path, cells, split, alike, test_fraction, split_seed)
    kept = np.ones(len(held), dtype=bool)
    if missing == "drop":
        kept = np.array([all(not _empty(joined[name][i]) for name in named) for i in range(len(held))])
        if not kept.all():
            notes.append(
                f"{path.name}: {int((~kept).sum())} of {len(kept)} rows with empty cells were left out"
            )
    train, tested = kept & ~held, kept & held
    if not train.any() or not tested.any():
        raise DataError(f"{path}: no row left to {'test' if train.any() else 'train'} on")
    x = _features(path, joined, named, train, categories, missing, decimal)
    x = x.astype(np.float64)
    if standardise:
        spread = x[train].std(axis=0)
        x = (x - x[train].mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        notes.append(f"{path.name}: features standardised over the training rows of all members")
    groups = None
    if group:
        groups = np.array(cells[group], dtype=str)[train[:count]]
        if lost := sorted(set(cells[group]) - set(groups.tolist())):
            named_lost = first_names([repr(one) for one in lost], LISTED)
            raise DataError(
                f"{path}: no row is left to train on for {group} {named_lost}: its rows are for the test, or "
                "have empty cells; data.options.test says which rows are for the test"
            )
    return Dataset(
        name=path.name,
        x_train=x[train].astype(np.float32),
        y_train=y[train],
        x_test=x[tested].astype(np.float32),
        y_test=y[tested],
        classes=classes,
        group_train=groups,
        notes=tuple(notes),
    )


def _read(path: Path, separator: str, target: str) -> tuple[Cells, list[str]]:
    """Return the cells of a file by column, and notes on how it was read."""
    if path.suffix == ".parquet":
        return _parquet(path), []
    if separator not in ("", *SEPARATORS):
        expected = "a comma, semicolon, tab or bar"
        raise DataError.at("data.options", f"expected {expected}, got {separator!r}", entry="separator")
    try:
        found = read_sheet(path, (), likely=(target,), form=SheetForm(separator or None))
    except FileFormatError as error:
        raise DataError(str(error)) from error
    if not found.rows:
        raise DataError(f"{path}: has no row below its header")
    cells = {name: [row[name] for _, row in found.rows] for name in found.columns if name}
    return cells, [f"{path.name}: {note}" for note in found.notes]


def _parquet(path: Path) -> Cells:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtra(
            f"{path}: reading Parquet needs pyarrow: pip install pyarrow, or save the table as CSV"
        ) from error
    try:
        found = parquet.read_table(path).to_pydict()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except Exception as error:  # pyarrow has errors of its own
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    return {str(name): [_text(value) for value in values] for name, values in found.items()}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value).strip()


def _check_columns(path: Path, cells: Cells, wanted: Sequence[str]) -> None:
    """Raise `DataError` if a column is missing; name one that is spelled alike."""
    for name in wanted:
        if name not in cells:
            folded = {column.casefold().replace("_", "").replace(" ", ""): column for column in cells}
            near = difflib.get_close_matches(name.casefold().replace("_", "").replace(" ", ""), folded, n=1)
            hint = f" (did you mean {folded[near[0]]!r}?)" if near else ""
            found = first_names(list(cells), LISTED)
            raise DataError(f"{path}: column {name!r} is missing{hint}; found {found or 'none'}")


def _check_filled(path: Path, name: str, values: Sequence[str]) -> None:
    for row, value in enumerate(values, 1):
        if _empty(value):
            raise DataError(f"{path}: row {row} below the header has no {name!r}; an empty one is refused")


def _empty(value: str) -> bool:
    return value.casefold() in EMPTY


def _number(text: str, decimal: str) -> float:
    """Return a number; NaN if the text is none."""
    if decimal == ",":
        if "." in text:
            return math.nan
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return math.nan


def _features(
    path: Path,
    cells: Cells,
    named: Sequence[str],
    train: npt.NDArray[np.bool_],
    categories: Categories,
    missing: Missing,
    decimal: str,
) -> npt.NDArray[np.float64]:
    """Return the features as columns of numbers; rows that neither train nor test may hold anything."""
    if decimal not in (".", ","):
        raise DataError.at("data.options", f"expected . or , got {decimal!r}", entry="decimal")
    columns = []
    for name in named:
        values = cells[name]
        empty = np.array([_empty(value) for value in values])
        if empty.any() and missing == "refuse":
            row = int(np.flatnonzero(empty)[0]) + 1
            raise DataError(
                f"{path}: row {row} below the header has no {name!r}: choose data.options.missing = "
                "'drop' or 'mean', or leave the column out of data.options.features"
            )
        numbers = np.array([math.nan if gone else _number(value, decimal)
                            for value, gone in zip(values, empty, strict=True)])  # fmt: skip
        wrong = ~empty & ~np.isfinite(numbers)
        other = "." if decimal == "," else ","
        for place in np.flatnonzero(wrong).tolist():
            if math.isfinite(_number(values[place], other)):
                raise DataError(
                    f"{path}: row {place + 1} below the header: {name!r} is {values[place]!r:.60}, a number "
                    f"with {other!r} for the decimals: choose data.options.decimal = {other!r}"
                )
        if wrong.any() and categories == "refuse":
            row = int(np.flatnonzero(wrong)[0])
            raise DataError(
                f"{path}: row {row + 1} below the header: {name!r} is {values[row]!r:.60}, which is no "
                "number: choose data.options.categories = 'one-hot', or leave the column out of "
                "data.options.features"
            )
        if wrong.any():
            seen = sorted({values[i] for i in np.flatnonzero(train)})
            if len(seen) > CATEGORIES:
                raise DataError(
                    f"{path}: column {name!r} has {len(seen)} different values, expected at most "
                    f"{CATEGORIES} categories: leave it out of data.options.features"
                )
            columns += [np.array([float(value == one) for value in values]) for one in seen]
        elif empty.any() and missing == "mean":
            there = train & ~empty
            if not there.any():
                raise DataError(f"{path}: column {name!r} has no value in any training row")
            columns.append(np.where(empty, numbers[there].mean(), numbers))
        else:
            columns.append(np.where(empty, 0.0, numbers))  # rows that are left out
    return np.stack(columns, axis=1)


def _target(
    path: Path, name: str, values: Sequence[str], kind: Kind, decimal: str
) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """Return y, and the names of its classes."""
    numbers = np.array([_number(value, decimal) for value in values])
    if kind == "numbers":
        if not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise DataError(
                f"{path}: row {row + 1} below the header: the target {name!r} is {values[row]!r:.60}, which "
                "is no number"
            )
        return numbers.astype(np.float32), ()
    whole = bool(np.isfinite(numbers).all())
    if whole and (numbers != np.rint(numbers)).any():
        row = int(np.flatnonzero(numbers != np.rint(numbers))[0])
        raise DataError(
            f"{path}: the target {name!r} holds real numbers, such as {values[row]} in row {row + 1} below "
            "the header, which are no classes: choose data.options.kind = 'numbers'"
        )
    names = sorted(set(values), key=float if whole else str)
    place = {value: k for k, value in enumerate(names)}
    return np.array([place[value] for value in values], dtype=np.int64), tuple(names)


def _held(
    path: Path, cells: Cells, split: str, alike: Sequence[str], fraction: float, seed: int
) -> npt.NDArray[np.bool_]:
    """Return which rows are for the test: those that say so, or a share of the rows of each kind."""
    count = len(next(iter(cells.values())))
    if split:
        told = [value.casefold() for value in cells[split]]
        for row, value in enumerate(told, 1):
            if value not in ("train", "test"):
                raise DataError(
                    f"{path}: row {row} below the header: {split!r} must be train or test, "
                    f"got {cells[split][row - 1]!r:.40}"
                )
        return np.array([value == "test" for value in told])
    if not 0 < fraction < 1:
        raise DataError.at(
            "data.options", f"expected a number between 0 and 1, got {fraction}", entry="test_fraction"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(count)
    if alike:  # rows of one kind follow each other, so each kind gives its share
        keys = [tuple(cells[name][i] for name in alike) for i in order]
        order = order[np.array(sorted(range(count), key=keys.__getitem__))]
    every = (np.arange(count) * fraction).astype(np.int64)
    held = np.zeros(count, dtype=bool)
    held[order[np.diff(every, append=int(count * fraction)) > 0]] = True
    return held
