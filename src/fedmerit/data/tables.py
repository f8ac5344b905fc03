"""Tables as data: a CSV or Parquet file, with a target, features and the member of every row in columns.

Nothing is guessed: text in a feature and an empty cell are refused unless ``categories`` and ``missing`` say
what to do with them. What is computed from the training rows (means, categories) is computed over all
members, which one process can do. Members of a run between machines must agree on such numbers before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedmerit.data.dataset import Dataset
from fedmerit.errors import DataError, FileFormatError, MissingExtra
from fedmerit.notes import first_names, nearest
from fedmerit.scoring.amounts import readings
from fedmerit.scoring.spreadsheets import SEPARATORS, SheetForm, read_sheet
from fedmerit.scoring.validate import spelled, two_spellings

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
MARKS = {".": "point", ",": "comma"}
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
    _check_options(target, kind, features, group, test, test_fraction, split_seed, categories, missing,
                   standardise, separator, decimal)  # fmt: skip
    (cells, notes, delimiter), other = _read(path, separator, target), None
    if test and test not in cells and Path(test).suffix in (".csv", ".parquet"):
        if Path(test).resolve() == path.resolve():
            raise DataError.at("data.options", f"expected another file than {path}, got {test}", entry="test")
        other, more, second = _read(Path(test), separator, target)
        notes += more
    split = test if test and other is None else ""
    listed = [] if isinstance(categories, str) else list(categories)
    for file, found in ((path, cells), *(((Path(test), other),) if other is not None else ())):
        wanted = (target, *features, *listed, *filter(None, (split, group if found is cells else "")))
        _check_columns(file, found, wanted)
    named = list(features) or [name for name in cells if name not in (target, group, split)]
    if not named or len(set(named)) < len(named) or target in named:
        raise DataError.at(
            "data.options", f"expected different columns besides {target!r}, got {named}", entry="features"
        )
    if strange := [name for name in listed if name not in named]:
        raise DataError.at(
            "data.options", f"expected features, got {strange[0]!r}, which is none", entry="categories"
        )
    if not features:
        told = first_names(named, 12)
        are = "column is a feature" if len(named) == 1 else "columns are features"
        notes.append(f"{path.name}: {len(named)} {are} (data.options.features): {told}")
    if other is not None:
        _check_columns(Path(test), other, named)
    count = len(cells[target])
    for name in filter(None, (target, group, split)):
        _check_filled(path, name, cells[name])
    may = [name for name in (*named, *([target] if kind == "numbers" else [])) if name not in listed]
    cells, more = _with_plain_numbers(path, cells, may, decimal, plain=delimiter == ",")
    notes += more
    if other is not None:
        _check_filled(Path(test), target, other[target])
        other, more = _with_plain_numbers(Path(test), other, may, decimal, plain=second == ",")
        notes += more
        joined = {name: cells[name] + other[name] for name in (target, *named)}
        held = np.arange(len(joined[target])) >= count
    else:
        joined = cells
    rows = _Rows(path, count, None if other is None else Path(test))
    y, classes = _target(rows, target, joined[target], kind)
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
    x, more = _features(rows, joined, named, train, tested, categories, missing)
    notes += [f"{path.name}: {note}" for note in more]
    if standardise:
        varies = x[train].min(axis=0) < x[train].max(axis=0)  # rounding gives 0.1, 0.1, ... a deviation too
        x = (x - x[train].mean(axis=0)) / np.where(varies, x[train].std(axis=0), 1.0)
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


def _check_options(
    target: Any,
    kind: Any,
    features: Any,
    group: Any,
    test: Any,
    test_fraction: Any,
    split_seed: Any,
    categories: Any,
    missing: Any,
    standardise: Any,
    separator: Any,
    decimal: Any,
) -> None:
    """Raise `DataError` if an option has a wrong type or value."""

    def check(entry: str, given: Any, expected: str, *, right: bool) -> None:
        if not right:
            raise DataError.at("data.options", f"expected {expected}, got {given!r:.100}", entry=entry)

    def are_columns(given: Any) -> bool:
        return isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)

    for entry, given in (("target", target), ("group", group), ("test", test)):
        check(entry, given, "a text", right=isinstance(given, str))
    for entry, given, allowed in (("kind", kind, get_args(Kind)), ("missing", missing, get_args(Missing))):
        check(entry, given, " or ".join(allowed), right=given in allowed)
    check("features", features, "a list of columns", right=are_columns(features))
    choices = " or ".join((*get_args(Categories), "a list of columns"))
    check(
        "categories", categories, choices, right=categories in get_args(Categories) or are_columns(categories)
    )
    fits = isinstance(test_fraction, int | float) and not isinstance(test_fraction, bool)
    check("test_fraction", test_fraction, "a number between 0 and 1", right=fits and 0 < test_fraction < 1)
    check(
        "split_seed",
        split_seed,
        "a whole number, 0 or more",
        right=type(split_seed) is int and split_seed >= 0,
    )
    check("standardise", standardise, "true or false", right=isinstance(standardise, bool))
    check("separator", separator, "a comma, semicolon, tab or bar", right=separator in ("", *SEPARATORS))
    check("decimal", decimal, "a point or a comma", right=decimal in ("", *MARKS))


def _read(path: Path, separator: str, target: str) -> tuple[Cells, list[str], str]:
    """Return the cells of a file by column, notes on how it was read, and what separates its cells."""
    if path.suffix == ".parquet":
        return _parquet(path), [], ","
    try:
        found = read_sheet(path, (), likely=(target,), form=SheetForm(separator or None))
    except FileFormatError as error:
        raise DataError(str(error)) from error
    if not found.rows:
        raise DataError(f"{path}: has no row below its header")
    cells = {name: [row[name] for _, row in found.rows] for name in found.columns if name}
    return cells, [f"{path.name}: {note}" for note in found.notes], found.delimiter


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
    if found and not any(found.values()):
        raise DataError(f"{path}: has no row")
    return {str(name): [_text(value) for value in values] for name, values in found.items()}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value).strip()


def _check_columns(path: Path, cells: Cells, wanted: Sequence[str]) -> None:
    """Raise `DataError` if a column is missing; name one that is spelled alike."""
    for name in wanted:
        if name not in cells:
            near = nearest(name, cells)
            hint = f" (did you mean {near!r}?)" if near else ""
            found = first_names(list(cells), LISTED)
            raise DataError(f"{path}: column {name!r} is missing{hint}; found {found or 'none'}")


def _check_filled(path: Path, name: str, values: Sequence[str]) -> None:
    for row, value in enumerate(values, 1):
        if _empty(value):
            raise DataError(f"{path}: row {row} below the header has no {name!r}; an empty one is refused")


def _empty(value: str) -> bool:
    return value.casefold() in EMPTY


# ------------------------------------------------------------------------------------------------- numbers


def _with_plain_numbers(
    path: Path, cells: Cells, columns: Sequence[str], decimal: str, *, plain: bool
) -> tuple[Cells, list[str]]:
    """Return the cells with numbers written in one way, and notes; the decimal mark is found out or given.

    Args:
        path: of the file.
        cells: by column.
        columns: those that may hold numbers.
        decimal: the decimal mark; an empty text if it is to be found out from the numbers.
        plain: whether 1.234 is a number with a decimal point, as programs write it.
    """
    decimal = "." if path.suffix == ".parquet" else decimal  # numbers there have no other
    if plain and decimal != ",":  # the usual case: every number is written as programs do
        odd = {text for name in columns for text in cells[name] if not _PLAIN.fullmatch(text)}
        if not any(readings(text) for text in odd if not _empty(text)):
            return cells, []
    ways = {text: readings(text) for name in columns for text in {*cells[name]} if not _empty(text)}
    numeric = [name for name in columns if all(ways.get(text, {"": ""}) for text in {*cells[name]})]
    mark = decimal or _mark(path, cells, numeric, ways, plain=plain)
    grouped: set[str] = set()
    for name in numeric:
        for row, text in enumerate(cells[name], 1):
            found = ways.get(text)
            if found is None:
                continue
            where = f"{path}: row {row} below the header: {name!r} is {text!r:.60}"
            if mark not in found:
                raise DataError(f"{where}, which is no number with a decimal {MARKS[mark]}")
            if len(found[mark]) < len(text):
                if not decimal and len({*found.values()}) > 1:
                    raise DataError(f"{where}, which can be read {_twice(found)}: {CHOOSE}")
                grouped.add(name)
    told = [*(["decimal commas"] if mark == "," else [])]
    told += [f"marks between thousands in {first_names(sorted(grouped), LISTED)}"] if grouped else []
    made = {name: [ways[text][mark] if text in ways else text for text in cells[name]] for name in numeric}
    return {**cells, **made}, [f"{path.name}: numbers were read with {' and '.join(told)}"] if told else []


def _mark(
    path: Path, cells: Cells, numeric: Sequence[str], ways: Mapping[str, Mapping[str, str]], *, plain: bool
) -> str:
    """Return the decimal mark that all numbers allow; a point if there is no mark at all."""
    sure: dict[str, str] = {}
    doubtful = ""
    for name in numeric:
        for row, text in enumerate(cells[name], 1):
            found = ways.get(text, {})
            at = f"row {row} below the header: {name!r} is {text!r:.60}"
            if len(found) == 1:
                sure.setdefault(next(iter(found)), at)
            elif len({*found.values()}) > 1 and not (plain and "," not in text):
                doubtful = doubtful or f"{at}, which can be read {_twice(found)}"
    if len(sure) > 1:
        raise DataError(
            f"{path}: {sure[',']}, with a decimal comma, but {sure['.']}, with a decimal point: write all "
            "numbers in one way"
        )
    if doubtful and not sure:
        raise DataError(f"{path}: {doubtful}, and no other number shows which: {CHOOSE}")
    return next(iter(sure), ".")


_PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _twice(found: Mapping[str, str]) -> str:
    return f"as {found['.']} and as {found[',']}"


def _number(text: str) -> float:
    """Return a number that is written with a decimal point; NaN if the text is none."""
    return float(text) if _PLAIN.fullmatch(text) else math.nan


@dataclass(frozen=True)
class _Rows:
    """Where the rows are: those of a file, then those of a second one."""

    path: Path
    count: int
    other: Path | None = None

    def at(self, row: int) -> str:
        """Return what messages call a row."""
        if self.other is None or row < self.count:
            return f"{self.path}: row {row + 1} below the header"
        return f"{self.other}: row {row - self.count + 1} below the header"


def _features(
    rows: _Rows,
    cells: Cells,
    named: Sequence[str],
    train: npt.NDArray[np.bool_],
    tested: npt.NDArray[np.bool_],
    categories: str | Sequence[str],
    missing: Missing,
) -> tuple[npt.NDArray[np.float64], list[str]]:
    """Return the features as columns of numbers, and notes; rows that are left out may hold anything."""
    columns, notes = [], []
    for name in named:
        values = cells[name]
        empty = np.array([_empty(value) for value in values])
        if empty.any() and missing == "refuse":
            raise DataError(
                f"{rows.at(int(np.flatnonzero(empty)[0]))} has no {name!r}: choose data.options.missing = "
                "'drop' or 'mean', or leave the column out of data.options.features"
            )
        numbers = np.array([math.nan if gone else _number(value)
                            for value, gone in zip(values, empty, strict=True)])  # fmt: skip
        listed = name in categories if not isinstance(categories, str) else False
        huge = (train | tested) & np.isfinite(numbers) & (np.abs(numbers) > LARGEST)
        if huge.any() and not listed:
            first = int(np.flatnonzero(huge)[0])
            raise DataError(
                f"{rows.at(first)}: {name!r} is {values[first]!r:.60}: expected at most {LARGEST:.1e}, the "
                "largest number that a model takes"
            )
        if listed or (~empty & ~np.isfinite(numbers)).any():
            if not listed:
                _check_text(rows, name, values, empty, numbers, categories)
            values = ["" if gone else value for value, gone in zip(values, empty, strict=True)]
            seen = sorted({values[i] for i in np.flatnonzero(train)})
            if len(seen) > CATEGORIES:
                raise DataError(
                    f"{rows.path}: column {name!r} has {len(seen)} different values, expected at most "
                    f"{CATEGORIES} categories: leave it out of data.options.features"
                )
            if alike := two_spellings(seen):
                one, other = spelled(*alike)
                raise DataError(
                    f"{rows.path}: column {name!r} holds {one} and {other}, which differ only in case, "
                    "blanks or letters that look the same: write a category in one way"
                )
            columns += [np.array([float(value == one) for value in values]) for one in seen]
            if new := sorted({values[i] for i in np.flatnonzero(tested)} - {*seen}):
                told = first_names([repr(one) for one in new], LISTED)
                notes.append(f"{name}: only test rows hold {told}, which is none of the categories")
        elif empty.any() and missing == "mean":
            there = train & ~empty
            if not there.any():
                raise DataError(f"{rows.path}: column {name!r} has no value in any training row")
            columns.append(np.where(empty, numbers[there].mean(), numbers))
        else:
            columns.append(np.where(empty, 0.0, numbers))  # rows that are left out
    return np.stack(columns, axis=1), notes


def _check_text(
    rows: _Rows,
    name: str,
    values: Sequence[str],
    empty: npt.NDArray[np.bool_],
    numbers: npt.NDArray[np.float64],
    categories: str | Sequence[str],
) -> None:
    """Raise `DataError` unless text in a feature is a category, as the options say, and no broken number."""
    text = [place for place in np.flatnonzero(~empty).tolist() if not readings(values[place])]
    if not text:
        row = int(np.flatnonzero(~empty & ~np.isfinite(numbers))[0])
        raise DataError(f"{rows.at(row)}: {name!r} is {values[row]!r:.60}, which is too large a number")
    row = text[0]
    for place in text:
        if values[place].endswith("%") or values[place][:1] in ("=", "#"):
            raise DataError(
                f"{rows.at(place)}: {name!r} is {values[place]!r:.60}, a percentage, formula or error of a "
                "spreadsheet program: write the number"
            )
    if categories != "one-hot":
        raise DataError(
            f"{rows.at(row)}: {name!r} is {values[row]!r:.60}, which is no number: choose "
            f"data.options.categories = 'one-hot' or [{name!r}], or leave the column out of "
            "data.options.features"
        )
    there = sorted({*np.flatnonzero(~empty).tolist()} - {*text})
    if there:
        raise DataError(
            f"{rows.at(row)}: {name!r} is {values[row]!r:.60}, but {values[there[0]]!r:.60}, a number, "
            f"in row {there[0] + 1}: correct the text; or, if all of it are categories, list the "
            f"columns of categories, as in data.options.categories = [{name!r}]"
        )


def _target(
    rows: _Rows, name: str, values: Sequence[str], kind: Kind
) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """Return y, and the names of its classes."""
    if kind == "numbers":
        numbers = np.array([_number(value) for value in values])
        if not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise DataError(f"{rows.at(row)}: the target {name!r} is {values[row]!r:.60}, which is no number")
        return numbers.astype(np.float32), ()
    size = {value: float(next(iter(readings(value).values()), "nan")) for value in {*values}}
    whole = all(map(math.isfinite, size.values()))
    if whole and (real := [value for value in size if not size[value].is_integer()]):
        row = min(map(values.index, real))
        raise DataError(
            f"{rows.at(row)}: the target {name!r} holds real numbers, such as {values[row]}, which are no "
            "classes: choose data.options.kind = 'numbers'"
        )
    names = sorted(sorted(size), key=size.__getitem__ if whole else str)
    alike = two_spellings(names) or next(
        (pair for pair in pairwise(names) if whole and size[pair[0]] == size[pair[1]]), None
    )
    if alike:
        one, other = spelled(*alike)
        raise DataError(
            f"{rows.path}: the target {name!r} holds {one} and {other}, which would be two classes: write a "
            "class in one way"
        )
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
    rng = np.random.default_rng(seed)
    order = rng.permutation(count)
    if alike:  # rows of one kind follow each other, so each kind gives its share
        keys = [tuple(cells[name][i] for name in alike) for i in order]
        order = order[np.array(sorted(range(count), key=keys.__getitem__))]
    every = (np.arange(count) * fraction).astype(np.int64)
    held = np.zeros(count, dtype=bool)
    held[order[np.diff(every, append=int(count * fraction)) > 0]] = True
    return held
