"""Files of reports: what is read, what is refused, and whether the message leads to the place."""

import json

import pytest

from fedmerit.document import as_csv, as_json, document
from fedmerit.errors import FileFormatError
from fedmerit.reading import read

CSV = """round,client,empty,grand,alone,without,se_alpha
1,north,0.1,0.5,0.2,0.4,0.01
1,south,0.1,0.5,0.3,0.3,0.02
2,north,0.5,0.6,0.5,0.6,0.01
2,south,0.5,0.6,0.6,0.5,0.02
"""
ROUND = {
    "empty": 0.1,
    "grand": 0.5,
    "alone": [0.2, 0.3],
    "without": [0.4, 0.3],
    "clients": ["north", "south"],
}


def write(tmp_path, text, name="reports.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_csv_of_two_rounds(tmp_path):
    first, second = read(write(tmp_path, CSV))
    assert (first.round, second.round) == (1, 2)
    assert first.clients == ("north", "south")
    assert first.se_alpha.tolist() == [0.01, 0.02]
    assert second.without.tolist() == [0.6, 0.5]


def test_lines_may_come_in_any_order_with_spaces_blank_lines_and_a_byte_order_mark(tmp_path):
    header, *lines = CSV.splitlines()
    shuffled = "\ufeff" + "\n".join([header.replace(",", " , "), lines[3], "", lines[0], lines[2], lines[1]])
    first, second = read(write(tmp_path, shuffled))
    assert (first.round, second.round) == (1, 2)
    assert second.clients == ("south", "north")


@pytest.mark.parametrize("shape", ["one", "list", "rounds", "by name"])
def test_the_shapes_of_json(tmp_path, shape):
    by_name = ROUND | {"alone": {"south": 0.3, "north": 0.2}}
    content = {"one": ROUND, "list": [ROUND], "rounds": {"rounds": [ROUND]}, "by name": by_name}[shape]
    (r,) = read(write(tmp_path, json.dumps(content), "r.json"))
    assert r.alone.tolist() == [0.2, 0.3]
    assert r.clients == ("north", "south")
    assert r.round == 1


def test_what_is_written_reads_back_the_same(tmp_path):
    rounds = read(write(tmp_path, CSV), utility="accuracy")
    content = document(rounds)
    again = read(write(tmp_path, as_json(content), "scores.json"))
    assert document(again) == content
    tidy = read(write(tmp_path, as_csv(content), "scores.csv"))
    assert document(tidy) == content
    assert content["utility"] == "accuracy"
    assert content["cumulative"]["ALPHA"] == pytest.approx([0.1 + 0.0, 0.2 + 0.1])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",without,", ",outside,", "line 1: missing column 'without'; expected round, client, empty"),
        (",se_alpha\n", ",sigma\n", "line 1: unknown column 'sigma'; expected"),
        ("1,south", "1,north", "line 3: round 1: client 'north' is already on line 2"),
        ("0.2,0.4,", "0.2,,", "line 2: without of client 'north' in round 1 is missing"),
        (
            "0.2,0.4,",
            "0.2,high,",
            "line 2: without of client 'north' in round 1 must be a number, got 'high'",
        ),
        ("0.2,0.4,", "0.2,nan,", "lines 2-3: round 1: without of client 'north' must be a finite number"),
        ("1,south,0.1", "1,south,0.2", "line 3: round 1: empty is '0.2', but '0.1' on line 2"),
        ("1,south,0.1,0.5,0.3,0.3,0.02", "1,south,0.1", "line 3: expected 7 cells, got 3"),
        ("1,north", "first,north", "line 2: round must be a number, got 'first'"),
        ("1,north", "1.5,north", "line 2: round must be a whole number, got '1.5'"),
        ("1,north", "nan,north", "line 2: round must be a whole number, got 'nan'"),
        ("1,north", "1,", "line 2: round 1: the client has no name"),
        ("0.01\n", '"0.01\n', "not CSV"),
    ],
)
def test_csv_errors_name_file_line_client_and_round(tmp_path, old, new, message):
    assert old in CSV
    path = write(tmp_path, CSV.replace(old, new, 1))
    with pytest.raises(FileFormatError, match=f"reports.csv: .*{message}|reports.csv: {message}"):
        read(path)


def test_a_utility_that_promises_a_range_is_held_to_it(tmp_path):
    path = write(tmp_path, CSV.replace("0.2,0.4", "0.2,1.4"))
    assert len(read(path)) == 2
    with pytest.raises(FileFormatError, match=r"without of client 'north' must lie in \[0, 1\]"):
        read(path, utility="accuracy")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "at least one round"),
        ("[3]", "round 1 of the file: expected an object, got int"),
        (json.dumps(ROUND | {"alones": 1}), "unknown field 'alones'"),
        (json.dumps(ROUND | {"alone": None}), "alone is missing"),
        (json.dumps(ROUND | {"alone": {"north": 0.2}}), "alone of client 'south' is missing"),
        (
            json.dumps(ROUND | {"alone": {"north": 0, "south": 0, "x": 0}}),
            "unknown client 'x'; known: north, south",
        ),
        (
            json.dumps(ROUND | {"alone": [0.2, float("nan")]}),
            "alone of client 'south' must be a finite number",
        ),
        (json.dumps(ROUND | {"alone": [0.2]}), "expected 2 client names|expected 1 values|got 2"),
        (
            json.dumps([ROUND, ROUND | {"grand": "x"}]),
            "round 2 of the file: round 2: grand: expected a number",
        ),
    ],
)
def test_json_errors_name_file_and_place(tmp_path, content, message):
    with pytest.raises(FileFormatError, match=message):
        read(write(tmp_path, content, "r.json"))


def test_files_that_are_no_reports(tmp_path):
    with pytest.raises(FileFormatError, match=r"nothing\.csv: no such file"):
        read(tmp_path / "nothing.csv")
    with pytest.raises(FileFormatError, match="the file is empty"):
        read(write(tmp_path, " \n"))
    with pytest.raises(FileFormatError, match="only a header, no reports"):
        read(write(tmp_path, CSV.splitlines()[0]))
    with pytest.raises(FileFormatError, match=r"ends in \.csv or \.json"):
        read(write(tmp_path, CSV, "reports.txt"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(FileFormatError, match="cannot be read as text"):
        read(tmp_path / "binary.csv")
