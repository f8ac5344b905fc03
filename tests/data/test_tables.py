"""Tables as data: columns, numbers and categories are what their owner says, never guessed."""

from __future__ import annotations

import sys
from decimal import Decimal

import numpy as np
import pytest

from fedmerit.data import load
from fedmerit.data.partitions import members
from fedmerit.errors import DataError, MissingExtra
from fedmerit.notes import code_of


def table(tmp_path, text, **options):
    file = tmp_path / "t.csv"
    file.write_text(text, encoding="utf-8")
    return load("table", file, **{"target": "y", "test_fraction": 0.34, **options})


ROWS = "site,age,sex,y\n" + "".join(f"{'NS'[i % 2]},{20 + i},{'fm'[i % 2]},{i // 2 % 2}\n" for i in range(12))


def test_a_table_by_explicit_choice(tmp_path):
    found = table(tmp_path, ROWS, group="site", features=["age"])
    assert found.classes == ("0", "1")
    assert found.x_train.shape == (8, 1)
    assert len(found.y_test) == 4
    assert found.y_test.tolist().count(0) == 2  # drawn from each class and member alike
    assert set(found.group_train) == {"N", "S"}
    codes = [code_of(note) for note in found.notes]
    assert "tested-on-members" in codes
    hot = table(tmp_path, ROWS, group="site", categories="one-hot", standardise=True)
    assert hot.x_train.shape == (8, 3)
    assert hot.x_train.mean(0) == pytest.approx(0, abs=1e-6)
    numbers = table(tmp_path, ROWS, kind="numbers", features=["age"])
    assert numbers.target == "numbers"
    assert numbers.classes == ()
    comma = ROWS.replace(",", ";").replace("20;", "20,5;")
    german = table(tmp_path, comma, features=["age"], separator=";", decimal=",", test_fraction=0.1)
    assert 20.5 in german.x_train


def test_rows_may_say_which_are_for_the_test(tmp_path):
    marked = "use,site,x,y\n" + "".join(
        f"{'test' if i > 7 else 'train'},{'NS'[i % 2]},{i},{i % 2}\n" for i in range(12)
    )
    found = table(tmp_path, marked, test="use", group="site")
    assert found.x_test[:, 0].tolist() == [8, 9, 10, 11]
    (tmp_path / "more.csv").write_text("x,y\n50,0\n51,1\n")
    assert "tested-on-members" not in map(code_of, found.notes)
    found = table(tmp_path, "x,y\n1,0\n2,1\n", test=str(tmp_path / "more.csv"))
    assert found.x_test[:, 0].tolist() == [50, 51]
    with pytest.raises(DataError, match="row 3 below the header: 'use' must be train or test, got 'both'"):
        table(tmp_path, "use,x,y\ntrain,1,0\ntest,2,1\nboth,3,1\n", test="use")


HOLES = "x,y\n1,0\n,1\n3,0\nNA,1\n5,0\n6,1\n7,0\n8,1\n9,0\n"


def test_missing_values_are_refused_left_out_or_replaced(tmp_path):
    with pytest.raises(DataError, match=r"row 2 below the header has no 'x': choose data\.options\.missing"):
        table(tmp_path, HOLES)
    dropped = table(tmp_path, HOLES, missing="drop")
    assert len(dropped.y_train) + len(dropped.y_test) == 7
    assert dropped.notes[-1] == "t.csv: 2 of 9 rows with empty cells were left out"
    filled = table(tmp_path, HOLES, missing="mean")
    assert len(filled.y_train) + len(filled.y_test) == 9
    assert np.isfinite(filled.x_train).all()


LETTERS = "x,y\n" + "".join(f"n{i},{i % 2}\n" for i in range(300))
LOST = "site,x,y\n" + "".join(f"N,{i},{i % 2}\n" for i in range(9)) + "W,,1\n"
EMPTY = "use,x,y\ntrain,,0\ntrain,,1\ntest,1,0\ntest,2,1\n"
MIXED = "age;y\n1,5;0\nunknown;1\n3;0\n"
TWO = "x,y\n1,0\n2,1\n"
HOT = {"categories": "one-hot"}


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (ROWS, {"target": "Y "}, "column 'Y ' is missing (did you mean 'y'?); found site, age, sex"),
        (ROWS, {"features": ["ages"]}, "column 'ages' is missing (did you mean 'age'?)"),
        (ROWS, {"group": "hospital"}, "column 'hospital' is missing; found"),
        (ROWS, {}, "row 1 below the header: 'site' is 'N', which is no number: choose data.options.categor"),
        ("x,y\n1,nan\n2,0\n", {}, "row 1 below the header has no 'y'; an empty one is refused"),
        ("x,y\n1,0.5\n2,0\n", {}, "the target 'y' holds real numbers, such as 0.5, which are no classes"),
        ("x;y\n1;0,5\n2;1,5\n3;0,5\n", {}, "the target 'y' holds real numbers, such as 0,5, which are"),
        ("x,y\n1,a\n2,0\n", {"kind": "numbers"}, "the target 'y' is 'a', which is no number"),
        ("x,y\n1,2\n2,2\n3,2\n", {"kind": "numbers"}, "y_train is the same for every sample"),
        ("x,y\n1,2\n2,2\n3,2\n", {}, "at least 2 classes"),
        (LETTERS, HOT, "different values, expected at most 100 categories"),
        (LOST, {"group": "site", "missing": "drop"}, "no row is left to train on for site 'W'"),
        (EMPTY, {"test": "use", "missing": "mean"}, "column 'x' has no value in any training row"),
        ("x,x,y\n1,2,3\n", {}, "column 'x' appears twice"),
        ("x,y\n1\n", {}, "line 2: expected 2 cells, got 1"),
        ("x,y\n", {}, "has no row below its header"),
        # numbers that can be read in two ways: never guessed
        ("n;y\n726;0\n1.230;1\n", {}, "n in cell A3: '1.230' can be read as 1.230 and as 1230, and no other"),
        ("n;z;y\n726;0,5;0\n1.230;0,6;1\n", {}, "n in cell A3: '1.230' can be read as 1.230 and as"),
        ('n,y\n726,0\n"1,230",1\n', {}, "n in cell A3: '1,230' can be read as 1230 and as 1.230, and"),
        ("n;z;y\n0.5;0,5;0\n1;1;1\n", {}, "z in cell B2: '0,5' has a decimal comma, but '0.5' in cell A2"),
        ("n;y\n0.5;0\n1;1\n", {"decimal": ","}, "n in cell A2: '0.5' does not have a decimal comma"),
        ("n,y\n1e999,0\n1,1\n2,0\n3,1\n", {}, "'n' is '1e999', which is too large a number"),
        ("n,y\n1,0\n1e300,1\n2,0\n3,1\n", {}, "row 2 below the header: 'n' is '1e300': expected at most"),
        # categories that are slips of the pen
        ("age,y\n1,0\nunknown,1\n3,0\n", HOT, "row 2 below the header: 'age' is 'unknown', but '1', a"),
        (MIXED, HOT, "row 2 below the header: 'age' is 'unknown', but '1,5', a number, in row 1"),
        ("x,y\n50%,0\n60%,1\n50%,0\n60%,1\n", HOT, "'x' is '50%', a percentage, formula or error"),
        ("s,y\nf,0\nF,1\nf,0\nF,1\nf,1\nF,0\n", HOT, "holds 'F' and 'f', which differ only"),
        ("x,y\n1,0\n2,0.0\n3,1\n", {}, "the target 'y' holds '0' and '0.0', which would be two classes"),
        ("x,y\n1,dead\n2,Dead\n3,alive\n", {}, "the target 'y' holds 'Dead' and 'dead', which would be two"),
        # options that are missing, or of a wrong type
        (ROWS, {"targt": "y"}, "data.options: 'table' has no option 'targt' (did you mean target?)"),
        (ROWS, {"features": ["age"], "categories": ["sex"]}, "categories: 'sex' is not a feature"),
        (TWO, {"missing": "guess"}, "data.options.missing: expected one of refuse, drop, mean"),
        (TWO, {"test_fraction": 2}, "data.options.test_fraction: expected a number between 0 and 1"),
        (TWO, {"test_fraction": "0.3"}, "data.options.test_fraction: expected a number, got '0.3'"),
        (TWO, {"standardise": "no"}, "data.options.standardise: expected true or false, got 'no'"),
        (TWO, {"split_seed": "1"}, "data.options.split_seed: expected a whole number, got '1'"),
        (TWO, {"features": [1]}, "data.options.features: expected a list of texts, got [1]"),
        (TWO, {"target": 3}, "data.options.target: expected text, got 3"),
        (TWO, {"decimal": "comma"}, "data.options.decimal: expected a point or a comma, got 'comma'"),
    ],
)
def test_tables_with_mistakes(tmp_path, text, options, told):
    with pytest.raises(DataError) as caught:
        table(tmp_path, text, **options)
    assert told in str(caught.value)


def test_a_table_without_a_target_and_groups_without_a_column_say_what_is_needed(tmp_path):
    (tmp_path / "t.csv").write_text(ROWS)
    with pytest.raises(
        DataError, match=r"^data\.options: 'table' needs the option 'target', such as target = "
    ):
        load("table", tmp_path / "t.csv")
    with pytest.raises(
        DataError, match=r"none: data\.options\.group names their column in a table, and an \.npz"
    ):
        members("group")


def test_numbers_of_a_table_are_read_as_they_are_meant(tmp_path):
    german = "n;z;y\n726;0,5;0\n1.230;0,6;1\n2.500;1;0\n900;2;1\n"
    found = table(tmp_path, german, decimal=",", test_fraction=0.25)
    every = np.concatenate([found.x_train, found.x_test])
    assert sorted(every[:, 0].tolist()) == [726, 900, 1230, 2500]
    assert sorted(every[:, 1].tolist()) == pytest.approx([0.5, 0.6, 1, 2])
    assert found.notes[-2:] == (
        "t.csv: 2 columns are features (data.options.features): n, z",
        "t.csv: numbers were read with decimal commas and marks between thousands in n",
    )
    british = 'n,y\n726,0\n"1,230",1\n900,0\n800,1\n'
    found = table(tmp_path, british, decimal=".", test_fraction=0.25)
    assert 1230 in np.concatenate([found.x_train, found.x_test])
    found = table(tmp_path, "n;y\n0,123;0\n1;1\n2;0\n3;1\n", test_fraction=0.25)  # a comma, surely
    assert 0.123 in np.concatenate([found.x_train, found.x_test]).round(6)
    programs = table(tmp_path, "n,y\n1.234,0\n1.235,1\n1.236,0\n1.237,1\n", test_fraction=0.25)
    assert programs.x_train.max() < 2


def test_a_category_may_be_a_number_or_be_called_none(tmp_path):
    smoking = "s,code,y\n" + "".join(
        f"{'none' if i % 3 else 'some'},{i % 2 + 1},{i % 2}\n" for i in range(12)
    )
    found = table(tmp_path, smoking, categories=["s", "code"], missing="drop")
    assert len(found.y_train) + len(found.y_test) == 12
    assert set(np.unique(found.x_train)) == {0, 1}
    assert found.x_train.shape[1] == 4
    holes = "s,y\n" + "".join(f"{('a', '', 'NA', 'b')[i % 4]},{i % 2}\n" for i in range(24))
    empty = table(tmp_path, holes, categories="one-hot", missing="mean")  # all empty cells are one category
    assert empty.x_train.shape[1] == 3
    hot = table(tmp_path, smoking, categories="one-hot")  # numbers stay numbers
    assert hot.x_train.shape[1] == 3


def test_the_test_file_is_named_where_its_rows_are_wrong(tmp_path):
    more = tmp_path / "more.csv"
    more.write_text("x,s,y\n50,a,0\n,new,1\n")
    with pytest.raises(DataError, match=r"more\.csv: row 2 below the header has no 'x'"):
        table(tmp_path, "x,s,y\n1,a,0\n2,b,1\n", test=str(more), categories="one-hot")
    more.write_text("x,s,y\n50,a,0\n51,new,1\n")
    found = table(tmp_path, "x,s,y\n1,a,0\n2,b,1\n", test=str(more), categories="one-hot")
    assert found.notes[-1] == "t.csv: s: only test rows hold 'new', which is none of the categories"
    with pytest.raises(DataError, match=r"data\.options\.test: expected another file than"):
        table(tmp_path, "x,s,y\n1,a,0\n2,b,1\n", test=str(tmp_path / "t.csv"))


def parquet(file, **columns):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.table({**columns, "y": ["a", "b"] * 10}), file)
    return file


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    file = parquet(tmp_path / "t.parquet", x=np.arange(20.0))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match="reading Parquet needs pyarrow: pip install pyarrow"):
        load("table", file, target="y")


def test_a_parquet_file_is_read_as_the_same_table_in_csv(tmp_path):
    columns = {
        "x": np.linspace(-1, 1, 20),
        "n": np.arange(20) % 7,
        "price": [Decimal("1.50"), Decimal("2.25")] * 10,
        "ward": ["north", "south", "north", "west"] * 5,
    }
    file = parquet(tmp_path / "t.parquet", **columns)
    rows = zip(*columns.values(), ["a", "b"] * 10, strict=True)
    lines = [",".join([*columns, "y"]), *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    one, other = (
        load("table", path, target="y", categories="one-hot") for path in (file, tmp_path / "t.csv")
    )
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.classes == other.classes == ("a", "b")
    assert one.x_train.shape[1] == 6


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([True, False] * 10, "'x' is 'True', which is no number: choose"),
        ([[1.0, 2.0]] * 20, r"'x' is '\[1.0, 2.0\]', which is no number: choose"),
        ([None] * 20, "row 1 below the header has no 'x': choose"),
        ([1.0, float("nan")] * 10, "row 2 below the header has no 'x': choose"),
        ([float("inf")] * 20, "'x' is 'inf', which is no number"),
    ],
)
def test_cells_of_a_parquet_file_that_are_no_numbers_are_refused(tmp_path, values, said):
    with pytest.raises(DataError, match=rf"t\.parquet: .*{said}"):
        load("table", parquet(tmp_path / "t.parquet", x=values), target="y")


def test_a_parquet_file_without_rows_or_that_is_none_is_refused(tmp_path):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    file = tmp_path / "t.parquet"
    write_table(pa.table({"x": pa.array([], pa.float64()), "y": pa.array([], pa.string())}), file)
    with pytest.raises(DataError, match=r"t\.parquet: has no row below its header$"):
        load("table", file, target="y")
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"t\.parquet: cannot be read as Parquet: "):
        load("table", file, target="y")


def test_a_feature_that_never_varies_in_training_is_not_blown_up_by_rounding(tmp_path):
    rows = "".join(f"0.1,{i},{i % 2},train\n" for i in range(9)) + "0.2,1,0,test\n0.1,2,1,test\n"
    found = table(tmp_path, f"dose,age,y,part\n{rows}", test="part", standardise=True)
    assert found.x_test[:, 0] == pytest.approx([0.1, 0.0])
