"""Tables as data: a CSV or Parquet file, with a target, features and the member of every row in columns.

Nothing is guessed: text in a feature and an empty cell are refused unless options say what to do with them.
Means and categories are those of the training rows of all members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import DataError, FileFormatError, MissingExtra
from fedmerit.files.sheets import (
    MARKS,
    SEPARATORS,
    Expected,
    Sheet,
    SheetForm,
    cell_text,
    plain_numbers,
    read_sheet,
)
from fedmerit.notes import Note, first_names, nearest, spelled, two_spellings
from fedmerit.scoring.amounts import readings
from fedmerit.scoring.types import written_number

Mask = npt.NDArray[np.bool_]
"""Which rows."""
Cells = dict[str, list[str]]
"""Cells by column, as text without blanks around it; an empty text is a missing value."""
Categories = Literal["refuse", "one-hot"]
Missing = Literal["refuse", "drop", "mean"]
Kind = Literal["classes", "numbers"]
LISTED = 40
"""The most columns that a message lists."""
CATEGORIES = 100
"""The most values of a category; a column with more is an identifier or a text."""
EMPTY = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "null", "?"})
"""Cells that hold no value, in lower case. "none" is no such cell: it is a category in many tables."""
LARGEST = float(np.finfo(np.float32).max)
CHOOSE = "data.options.decimal = '.' or ',' says which"


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
    categories: Categories | Sequence[str] = "refuse",
    missing: Missing = "refuse",
    standardise: bool = False,
    separator: str = "",
    decimal: str = "",
) -> dict[str, Any]:
    """Return what a `Dataset` is made of from a table with a header; x has a row of numbers per row.

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
        categories: text in features is refused, or becomes a column of 0 and 1 per value (``one-hot``), in
            all columns that hold no number, or in those that are listed, whatever they hold.
        missing: empty cells in features are refused, their rows left out (``drop``), or replaced by the
            training rows' mean (``mean``); an empty category is a category of its own then. An empty
            target or group is always refused.
        standardise: whether features have mean 0 and standard deviation 1 over the training rows.
        separator: between cells of a CSV file: a comma, semicolon, tab or bar; by default found out from the
            header, as are the encoding of letters and a line ``sep=``, and noted.
        decimal: point or comma, in numbers of a CSV file; by default found out from the numbers, and refused
            if they can be read in two ways. If it is given, the other mark may separate thousands.
    """
    _check_ranges(test_fraction, split_seed, separator, decimal)
    files = [_read(path, separator, target)]
    if test and test not in files[0].cells and Path(test).suffix in (".csv", ".parquet"):
        if Path(test).resolve() == path.resolve():
            raise DataError.at("data.options", f"expected another file than {path}, got {test}", entry="test")
        files.append(_read(Path(test), separator, target))
    notes = [note for file in files for note in file.notes]
    split = test if len(files) == 1 else ""
    listed = [] if isinstance(categories, str) else list(categories)
    named = list(features) or [name for name in files[0].cells if name not in (target, group, split)]
    for place, file in enumerate(files):
        _check_columns(file, (target, *features, *listed, *([] if place else filter(None, (split, group)))))
    _check_features(named, target, listed)
    if not features:
        are = "column is a feature" if len(named) == 1 else "columns are features"
        notes.append(f"{path.name}: {len(named)} {are} (data.options.features): {first_names(named, 12)}")
    may = [name for name in (*named, *([target] if kind == "numbers" else [])) if name not in listed]
    for place, file in enumerate(files):
        _check_columns(file, named)
        for name in (target, *([] if place else filter(None, (group, split)))):
            if (empty := next((row for row, value in enumerate(file.cells[name]) if _empty(value)), -1)) >= 0:
                raise DataError(f"{file.at(empty)} has no {name!r}; an empty one is refused")
        notes += file.read_numbers(may, decimal)
    cells = {name: [value for file in files for value in file.cells[name]] for name in (target, *named)}
    y, classes = _target(files, target, cells[target], kind)
    alike = [name for name in (target if kind == "classes" else "", group) if name]
    held = _held(files, split, alike, test_fraction, split_seed)
    if group and not test:
        notes.append(Note("tested-on-members"))
    kept = np.ones(len(held), dtype=bool)
    if missing == "drop":
        kept = ~np.any([[_empty(value) for value in cells[name]] for name in named], axis=0)
    if not kept.all():
        notes.append(f"{path.name}: {int((~kept).sum())} of {len(kept)} rows with empty cells were left out")
    train, tested = kept & ~held, kept & held
    if not train.any() or not tested.any():
        raise DataError(f"{path}: no row left to {'test' if train.any() else 'train'} on")
    columns = []
    for name in named:
        feature = _Feature(files, name, cells[name], train, tested)
        columns += feature.columns(missing, one_hot=categories == "one-hot", listed=name in listed)
        notes += [f"{path.name}: {note}" for note in feature.notes]
    x = np.stack(columns, axis=1)
    if standardise:
        varies = x[train].min(axis=0) < x[train].max(axis=0)  # rounding gives 0.1, 0.1, ... a deviation too
        x = (x - x[train].mean(axis=0)) / np.where(varies, x[train].std(axis=0), 1.0)
        notes.append(f"{path.name}: features standardised over the training rows of all members")
    groups = files[0].cells.get(group, [])
    return {
        "name": path.name,
        "x_train": x[train].astype(np.float32),
        "y_train": y[train],
        "x_test": x[tested].astype(np.float32),
        "y_test": y[tested],
        "classes": classes,
        "group_train": _groups(path, group, groups, train[: len(groups)]) if group else None,
        "notes": tuple(notes),
    }


def _check_features(named: Sequence[str], target: str, listed: Sequence[str]) -> None:
    if not named or len(set(named)) < len(named) or target in named:
        raise DataError.at(
            "data.options", f"expected different columns besides {target!r}, got {named}", entry="features"
        )
    if strange := [name for name in listed if name not in named]:
        raise DataError.at("data.options", f"{strange[0]!r} is not a feature", entry="categories")


def _groups(path: Path, column: str, values: Sequence[str], train: Mask) -> npt.NDArray[np.str_]:
    """Return the member of every training row; raise `DataError` if a member is left without a row."""
    groups = np.array(values, dtype=str)[train]
    if lost := sorted(set(values) - set(groups.tolist())):
        named = first_names([repr(member) for member in lost], LISTED)
        raise DataError(
            f"{path}: no row is left to train on for {column} {named}: its rows are for the test, or "
            "have empty cells; data.options.test says which rows are for the test"
        )
    return groups


def _check_ranges(test_fraction: float, split_seed: int, separator: str, decimal: str) -> None:
    for entry, expected, right, got in (
        ("test_fraction", "a number between 0 and 1", 0 < test_fraction < 1, test_fraction),
        ("split_seed", "0 or more", split_seed >= 0, split_seed),
        ("separator", "a comma, semicolon, tab or bar", separator in ("", *SEPARATORS), separator),
        ("decimal", "a point or a comma", decimal in ("", *MARKS), decimal),
    ):
        if not right:
            raise DataError.at("data.options", f"expected {expected}, got {got!r:.100}", entry=entry)


@dataclass
class _Table:
    """A file as it was read: the table, its cells by column, and notes."""

    sheet: Sheet
    cells: Cells
    notes: list[str]

    @property
    def path(self) -> Path:
        return self.sheet.path

    def at(self, row: int) -> str:
        """Return what messages call a row."""
        return f"{self.path}: row {row + 1} below the header"

    def read_numbers(self, columns: Sequence[str], decimal: str) -> list[str]:
        """Write plain numbers into the columns that hold nothing else; return notes on how they were read."""
        texts = {name: [text for text in {*self.cells[name]} if not _empty(text)] for name in columns}
        numeric = [name for name in columns if all(map(readings, texts[name]))]
        try:
            sheet, mark, grouped = plain_numbers(self.sheet, numeric, decimal=decimal, how=CHOOSE)
        except FileFormatError as error:
            raise DataError(str(error)) from error
        self.cells |= {name: [row[name] for _, row in sheet.rows] for name in numeric}
        ways = ["decimal commas"] if mark == "," else []
        ways += [f"marks between thousands in {first_names(sorted(grouped), LISTED)}"] if grouped else []
        return [f"{self.path.name}: numbers were read with {' and '.join(ways)}"] if ways else []


def _read(path: Path, separator: str, target: str) -> _Table:
    try:
        if path.suffix == ".parquet":
            sheet = _parquet(path)
        else:
            sheet = read_sheet(path, Expected(likely=(target,)), SheetForm(separator or None))
    except FileFormatError as error:
        raise DataError(str(error)) from error
    if not sheet.rows:
        raise DataError(f"{path}: has no row below its header")
    cells = {name: [row[name] for _, row in sheet.rows] for name in sheet.columns if name}
    return _Table(sheet, cells, [f"{path.name}: {note}" for note in sheet.notes])


def _parquet(path: Path) -> Sheet:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtra(
            f"{path}: reading Parquet needs pyarrow: pip install pyarrow, or save the table as CSV"
        ) from error
    try:
        columns = parquet.read_table(path).to_pydict()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except Exception as error:  # pyarrow has errors of its own
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    names = tuple(map(str, columns))
    rows = zip(*([cell_text(value) for value in values] for values in columns.values()), strict=True)
    lines = tuple((line, dict(zip(names, row, strict=True))) for line, row in enumerate(rows, start=2))
    return Sheet(path, names, 1, lines, {line: line for line, _ in lines})


def _check_columns(file: _Table, wanted: Sequence[str]) -> None:
    """Raise `DataError` if a column is missing; name one that is spelled alike."""
    for name in wanted:
        if name not in file.cells:
            near = nearest(name, file.cells)
            hint = f" (did you mean {near!r}?)" if near else ""
            columns = first_names(list(file.cells), LISTED) or "none"
            raise DataError(f"{file.path}: column {name!r} is missing{hint}; found {columns}")


def _empty(value: str) -> bool:
    return value.casefold() in EMPTY


# ------------------------------------------------------------------------------------------------- numbers


def _number(text: str) -> float:
    try:
        return written_number(text)
    except ValueError:
        return math.nan


def _at(files: Sequence[_Table], row: int) -> str:
    """Return what messages call a row of a file, or of the second one below it."""
    first = len(files[0].sheet.rows)
    return files[0].at(row) if row < first else files[1].at(row - first)


class _Feature:
    """A column of features; rows that are neither for training nor for the test may hold anything."""

    def __init__(
        self, files: Sequence[_Table], name: str, values: list[str], train: Mask, tested: Mask
    ) -> None:
        self.files, self.name, self.values = files, name, values
        self.train, self.tested = train, tested
        self.empty = np.array([_empty(value) for value in values])
        self.numbers = np.array([math.nan if _empty(value) else _number(value) for value in values])
        self.notes: list[str] = []

    def columns(self, missing: Missing, *, one_hot: bool, listed: bool) -> list[npt.NDArray[np.float64]]:
        """Return the feature as columns of numbers: one, or one per category."""
        if self.empty.any() and missing == "refuse":
            raise DataError(
                f"{self._first(self.empty)} has no {self.name!r}: choose data.options.missing = "
                "'drop' or 'mean', or leave the column out of data.options.features"
            )
        if listed:
            return self._categories()
        finite = np.isfinite(self.numbers)
        huge = (self.train | self.tested) & finite & (np.abs(self.numbers) > LARGEST)
        if huge.any():
            value = self.values[int(np.flatnonzero(huge)[0])]
            raise DataError(
                f"{self._first(huge)}: {self.name!r} is {value!r:.60}: expected at most {LARGEST:.1e}, the "
                "largest number that a model takes"
            )
        if (~self.empty & ~finite).any():
            self._check_text(one_hot=one_hot)
            return self._categories()
        if not (self.empty.any() and missing == "mean"):
            return [np.where(self.empty, 0.0, self.numbers)]  # rows that are left out
        trained = self.train & ~self.empty
        if not trained.any():
            raise DataError(f"{self.files[0].path}: column {self.name!r} has no value in any training row")
        return [np.where(self.empty, self.numbers[trained].mean(), self.numbers)]

    def _first(self, mask: Mask) -> str:
        return _at(self.files, int(np.flatnonzero(mask)[0]))

    def _categories(self) -> list[npt.NDArray[np.float64]]:
        """Return a column of 0 and 1 per category in the training rows."""
        values = ["" if gone else value for value, gone in zip(self.values, self.empty, strict=True)]
        seen = sorted({values[i] for i in np.flatnonzero(self.train)})
        column = f"{self.files[0].path}: column {self.name!r}"
        if len(seen) > CATEGORIES:
            raise DataError(
                f"{column} has {len(seen)} different values, expected at most {CATEGORIES} categories: leave "
                "it out of data.options.features"
            )
        if alike := two_spellings(seen):
            both = " and ".join(spelled(*alike))
            raise DataError(
                f"{column} holds {both}, which differ only in case, blanks or letters that look the same: "
                "write a category in one way"
            )
        if new := sorted({values[i] for i in np.flatnonzero(self.tested)} - {*seen}):
            names = first_names([repr(value) for value in new], LISTED)
            self.notes.append(f"{self.name}: only test rows hold {names}, which is none of the categories")
        return [np.array([float(value == category) for value in values]) for category in seen]

    def _check_text(self, *, one_hot: bool) -> None:
        """Raise `DataError` unless text is a category, as the options say, and no broken number."""
        name, values = self.name, self.values
        text = [place for place in np.flatnonzero(~self.empty).tolist() if not readings(values[place])]
        if not text:
            row = int(np.flatnonzero(~self.empty & ~np.isfinite(self.numbers))[0])
            raise DataError(
                f"{_at(self.files, row)}: {name!r} is {values[row]!r:.60}, which is too large a number"
            )
        for place in text:
            if values[place].endswith("%") or values[place][:1] in ("=", "#"):
                raise DataError(
                    f"{_at(self.files, place)}: {name!r} is {values[place]!r:.60}, a percentage, formula or "
                    "error of a spreadsheet program: write the number"
                )
        where = f"{_at(self.files, text[0])}: {name!r} is {values[text[0]]!r:.60}"
        if not one_hot:
            raise DataError(
                f"{where}, which is no number: choose data.options.categories = 'one-hot' or [{name!r}], or "
                "leave the column out of data.options.features"
            )
        if numbers := sorted({*np.flatnonzero(~self.empty).tolist()} - {*text}):
            first = numbers[0]
            raise DataError(
                f"{where}, but {values[first]!r:.60}, a number, in row {first + 1}: correct the text; "
                "or, if all of it are categories, list the columns of categories, as in "
                f"data.options.categories = [{name!r}]"
            )


def _target(
    files: Sequence[_Table], name: str, values: Sequence[str], kind: Kind
) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    if kind == "numbers":
        numbers = np.array([_number(value) for value in values])
        if not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise DataError(
                f"{_at(files, row)}: the target {name!r} is {values[row]!r:.60}, which is no number"
            )
        return numbers.astype(np.float32), ()
    size = {value: float(next(iter(readings(value).values()), "nan")) for value in {*values}}
    whole = all(map(math.isfinite, size.values()))
    if whole and (real := [value for value in size if not size[value].is_integer()]):
        row = min(map(values.index, real))
        raise DataError(
            f"{_at(files, row)}: the target {name!r} holds real numbers, such as {values[row]}, which are no "
            "classes: choose data.options.kind = 'numbers'"
        )
    names = sorted(sorted(size), key=size.__getitem__ if whole else str)
    alike = two_spellings(names) or next(
        (pair for pair in pairwise(names) if whole and size[pair[0]] == size[pair[1]]), None
    )
    if alike:
        both = " and ".join(spelled(*alike))
        raise DataError(
            f"{files[0].path}: the target {name!r} holds {both}, which would be two classes: write a class "
            "in one way"
        )
    place = {value: k for k, value in enumerate(names)}
    return np.array([place[value] for value in values], dtype=np.int64), tuple(names)


def _held(files: Sequence[_Table], split: str, alike: Sequence[str], fraction: float, seed: int) -> Mask:
    """Return which rows are for the test: those of a second file, those that say so, or a share."""
    cells, count = files[0].cells, len(files[0].sheet.rows)
    if len(files) > 1:
        return np.arange(count + len(files[1].sheet.rows)) >= count
    if split:
        for row, value in enumerate(cells[split]):
            if value.casefold() not in ("train", "test"):
                raise DataError(f"{files[0].at(row)}: {split!r} must be train or test, got {value!r:.40}")
        return np.array([value.casefold() == "test" for value in cells[split]])
    rng = np.random.default_rng(seed)
    order = rng.permutation(count)
    if alike:  # rows of one kind follow each other, so each kind gives its share
        keys = [tuple(cells[name][i] for name in alike) for i in order]
        order = order[np.array(sorted(range(count), key=keys.__getitem__))]
    every = (np.arange(count) * fraction).astype(np.int64)
    held = np.zeros(count, dtype=bool)
    held[order[np.diff(every, append=int(count * fraction)) > 0]] = True
    return held
