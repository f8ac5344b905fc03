"""Spreadsheets as people send them: what is read, what is said about it, what is refused, in one table."""

import csv
import html
import io
import json
import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import call
from fedmerit.data import load
from fedmerit.errors import DataError, FileFormatError, InputError
from fedmerit.files.documents import as_csv, document
from fedmerit.files.reports import read, read_content, template, template_csv
from fedmerit.files.sheets import LARGEST, sheet_text, text_cell, text_of
from fedmerit.report.text import markdown
from fedmerit.scoring.amounts import CURRENCIES, amount_of, readings
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports

HEADER = "round;client;empty;grand;alone;without"
SHEET = f"""{HEADER}
1;Köln;0,1;0,5;0,2;0,4
1;Ulm;0,1;0,5;0,3;0,3
"""
"""As Excel writes it in Germany."""
PLAIN = SHEET.replace(",", ".").replace(";", ",")
SEMICOLONS = "the file was read with cells separated by semicolons"
WESTERN = "text in Windows-1252, with words such as 'Köln' (if they are wrong, name the encoding)"
GERMAN = f"{SEMICOLONS}, decimal commas"


def changed(old, new, text=SHEET):
    assert old in text
    return text.replace(old, new, 1).encode()


def with_column(name, *cells, text=SHEET):
    lines = zip(text.splitlines(), (name, *cells), strict=True)
    return "\n".join(f"{line};{cell}" for line, cell in lines).encode()


READ = {
    "plain": (PLAIN.encode(), []),
    "UTF-8 with its mark": (PLAIN.encode("utf-8-sig"), []),
    "semicolons and decimal commas": (SHEET.encode(), [GERMAN]),
    "semicolons and decimal points": (SHEET.replace(",", ".").encode(), [SEMICOLONS]),
    "tabs": (SHEET.replace(";", "\t").encode(), [GERMAN.replace("semicolons", "tabs")]),
    "bars": (SHEET.replace(";", "|").encode(), [GERMAN.replace("semicolons", "bars")]),
    "decimal commas in quotation marks between commas": (
     "\n".join(",".join(f'"{cell}"' for cell in line.split(";")) for line in SHEET.splitlines()).encode(),
     ["the file was read with decimal commas"]),
    "a line that names the separator": (b"sep=;\r\n" + SHEET.encode(), [GERMAN]),
    "the same on an old Mac": (b'"sep=;"\r' + SHEET.replace("\n", "\r").encode(), [GERMAN]),
    "UTF-16, as Excel's Unicode text": (
     b"\xff\xfe" + SHEET.replace(";", "\t").replace("\n", "\r\n").encode("utf-16-le"),
     ["the file was read with text in UTF-16, cells separated by tabs, decimal commas"]),
    "UTF-16, the other way round": (b"\xfe\xff" + SHEET.encode("utf-16-be"),
     ["the file was read with text in UTF-16, cells separated by semicolons, decimal commas"]),
    "Latin-1": (SHEET.encode("latin-1"),
     [GERMAN.replace("with ", f"with {WESTERN}, ")]),
    "Windows-1252 with a euro sign": (with_column("comment", "5 €", "").decode().encode("cp1252"),
     [GERMAN.replace("with ", f"with {WESTERN}, "),
     "the file has columns that are not read: comment"]),
    "line ends of Windows": (SHEET.replace("\n", "\r\n").encode(), [GERMAN]),
    "line ends of an old Mac": (SHEET.replace("\n", "\r").encode(), [GERMAN]),
    "separators after the last column": (SHEET.replace("\n", ";;;\n").encode(), [GERMAN]),
    "empty lines at the end": ((SHEET + ";;;;;\n;;;;;\n\n").encode(), [GERMAN]),
    "an empty line between, and one before": (b";;;;;\n" + changed("1;Ulm", "\n;;;;;\n1;Ulm"), [GERMAN]),
    "a comment with a line break": (with_column("comment", '"first;\nsecond"', ""),
     [GERMAN, "the file has columns that are not read: comment"]),
    "two more columns": (with_column("comment;checked by", "ok;Ö", ";"),
     [GERMAN, "the file has columns that are not read: comment, checked by"]),
    "the index of a data frame": ("\n".join(f"{k or ''},{line}" for k,
     line in enumerate(PLAIN.splitlines())).encode(),
     ["the file has columns without a name that are not read: A"]),
    "blanks around cells": (SHEET.replace(";", " ; ").encode(), [GERMAN]),
    "a minus as typographers write it": (changed("0,2", "\u22120,2"), [GERMAN]),
    "thousands in a column that counts": (with_column("samples", "1.234", "12.345.678"),
     [f"{GERMAN}, 2 numbers with marks between thousands"]),
    "thousands and decimals in one cell": (changed("0,4", "1.234,5"),
     [f"{GERMAN}, 1 number with marks between thousands"]),
    "thousands separated by a narrow blank": (with_column("samples", "1\u202f234", "1\u00a0234"),
     [f"{GERMAN}, 2 numbers with marks between thousands"]),
    "a name that became a date": (changed("Ulm", "02. Jan"),
     [GERMAN, "names that look like dates, which spreadsheet programs make of names such as 1-2: 02. Jan"]),
    "capitals, blanks, and another word": (SHEET.replace("round;client", "ROUND; Member ").encode(),
     [GERMAN, "headings were understood in this way: Member as client"]),
    "capitals alone": (SHEET.replace("round;client", "ROUND;Client").encode(), [GERMAN]),
    "percent signs": (SHEET.replace("0,1;0,5", "10 %;50%").encode(),
     [f"{GERMAN}, percent signs, so that 81% is 0.81"]),
    "percent signs, thousands and decimals": (changed("0,4", "123.450,00 %").replace(b"0,3;0,3",
     b"0,3;30,0 %"),
     [f"{GERMAN}, 1 number with marks between thousands, percent signs, so that 81% is 0.81"]),
    "columns in another order": ("\n".join(";".join(reversed(line.split(";")))
     for line in SHEET.splitlines()).encode(), [GERMAN]),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_what_is_read_and_said(tmp_path, case):
    data, said = READ[case]
    path = tmp_path / "reports.csv"
    path.write_bytes(data)
    content = read_content(path)
    assert [str(note) for note in content.notes] == said
    (reports,) = content.rounds
    assert reports.clients == ("Köln", "02. Jan" if "02. Jan" in case + str(said) else "Ulm")
    assert (reports.empty, reports.grand) == (0.1, 0.5)
    assert reports.alone.tolist() == [-0.2 if "minus" in case else 0.2, 0.3]
    assert reports.without.tolist() == [1234.5 if "and decimals" in case else 0.4, 0.3]
    if "counts" in case:
        assert reports.samples.tolist() == [1234, 12345678]
    if "narrow" in case:
        assert reports.samples.tolist() == [1234, 1234]


TWICE = "and no other number shows which: name the decimal mark with --decimal"
WHOLE = f"{HEADER}\n1;A;0;9;2;8\n1;B;0;9;3;7\n"

REFUSED = {
    "a workbook with another name": (b"PK\x03\x04\x14\x00\x06\x00",
     "this is an Excel or OpenDocument workbook, not CSV: open it and save it as CSV (UTF-8) or .xlsx"),
    "an old workbook": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
     "this is an old Excel workbook, or one with a password, not CSV: open it"),
    "a document": (b"%PDF-1.7\n", "this is a PDF document, not CSV"),
    "UTF-16 without its mark": (SHEET.encode("utf-16-le"),
     "line 1: expected text, got a NUL byte: save the table as CSV (UTF-8) once more"),
    "a NUL byte": (changed("Ulm", "U\0lm"), "line 3: expected text, got a NUL byte"),
    "UTF-16 that is cut off": (b"\xff\xfe" + SHEET.encode("utf-16-le")[:-1], "cannot be read as UTF-16: "),
    "an encoding of Mac OS": (SHEET.encode("mac-roman"),
     "line 2: the letters are neither UTF-8 nor surely Windows-1252 (byte 0x9a): save the table as CSV"),
    "an encoding of Poland": (SHEET.replace("Köln", "Łódź").encode("cp1250"),
     "line 2: the letters are neither UTF-8 nor surely Windows-1252 (byte 0xa3)"),
    "commas that may be decimals or thousands": (changed("1;A;0;9;2;8", "1;A;0;9;1,234;8", WHOLE),
     f"line 2: alone in cell E2: '1,234' can be read as 1234 and as 1.234, {TWICE}"),
    "the same in quotation marks between commas": (WHOLE.replace(";", ",").replace("1,A,0,9,2,8",
     '1,A,0,9,"1,234",8').encode(),
     f"line 2: alone in cell E2: '1,234' can be read as 1234 and as 1.234, {TWICE}"),
    "points that may be decimals or thousands": (changed("1;A;0;9;2;8", "1;A;0;9;1.234;8", WHOLE),
     f"line 2: alone in cell E2: '1.234' can be read as 1.234 and as 1234, {TWICE}"),
    "thousands among decimals": (changed("0,4", "1.234"),
     "line 2: without in cell F2: '1.234' can be read as 1.234 and as 1234: write it without a mark for"),
    "decimal points and decimal commas": (changed("0,3;0,3", "0.3;0.3"),
     "line 2: empty in cell C2: '0,1' has a decimal comma, but '0.3' in cell E3 has a decimal point"),
    "decimal commas between commas": (SHEET.replace(";", ",").encode(),
     "line 2: expected 6 cells, got 10 (a number with a decimal comma must be in quotation marks here)"),
    "percent signs in half a column": (changed("0,2", "20 %"),
     "line 2: alone in cell E2: '20 %' is in percent, but cell E3 is not: expected percent signs in all"),
    "percent signs in two of four columns": (SHEET.replace("0,2;0,4", "20 %;40 %").replace("0,3;0,3",
     "30 %;30 %").replace("0,1;0,5", "10;50").encode(),
     "round 1: empty and grand are 10 or more, but the other two columns are 0.4 or less"),
    "a date that was 1.2": (changed("0,2", "01. Feb"),
     "alone in cell E2: '01. Feb' looks like a date, which"),
    "a date that was 1-2": (changed("0,2", "2-Jan"), "alone in cell E2: '2-Jan' looks like a date, which"),
    "a whole date": (changed("0,2", "01.02.2026"), "alone in cell E2: '01.02.2026' looks like a date, which"),
    "a round that became a date": (changed("1;Ulm", "1/2;Ulm"), "line 3: round in cell A3: '1/2' looks like"),
    "a formula": (changed("0,2", "=C2*2"),
     "alone in cell E2: '=C2*2' is a formula: save the table with values"),
    "an error of a formula": (changed("0,2", "#WERT!"),
     "alone in cell E2: '#WERT!' is an error of the spread"),
    "a unit": (changed("0,2", "0,2 pts"),
     "alone of client 'Köln' in round 1 must be a number, got '0,2 pts'"),
    "merged cells": (changed("1;Ulm", ";Ulm"), "line 3: round is missing: fill in cell A3"),
    "merged cells of a round": (changed("1;Ulm;0,1", "1;Ulm;"),
     "line 3: empty in round 1 is missing: fill in cell C3"),
    "a column twice": (with_column("alone", "0", "0"), "line 1: column 'alone' appears twice"),
    "a column that is almost known": (with_column("sample", "1", "1"), "did you mean 'samples' by 'sample'?"),
    "headings in another language": (changed("client", "Mitglied"),
     "line 1: missing column 'client'; expected round, client, empty, grand, alone, without"),
    "a title above the table": ((";;;;;\nReports 2026;;;;;\n" + SHEET).encode(),
     "line 1: expected the columns round, client, empty, grand, alone, without, which are on line 3"),
    "percent in two of four columns": (SHEET.replace("0,1;0,5", "10;50").encode(),
     "round 1: empty and grand are 10 or more, but the other two columns are 0.4 or less: expected one"),
    "percent in the other two": (SHEET.replace("0,2;0,4", "20;40").replace("0,3;0,3", "30;30").encode(),
     "round 1: alone and without are 20 or more, but the other two columns are 0.5 or less"),
    "members in place of clients": (changed("client", "Members"), "did you mean 'client' by 'Members'?"),
    "a blank of no width in a name": ((SHEET + SHEET.split("\n", 1)[1] .replace("\n1;",
     "\n2;") .replace("1;K", "2;K", 1) .replace("Ulm", "Ulm\u200b")).encode(),
     r"'Ulm' (round 1) and 'Ulm\u200b' (round 2) differ only in case, blanks or letters"),
    "every line in one cell": ("".join(f'"{line}"\n' for line in PLAIN.splitlines()).encode(),
     "line 1: every line is one cell in quotation marks, which holds the whole line: split the column"),
    "a line that is too short": (changed(";0,3;0,3", ";0,3"),
     "line 3: expected 6 cells, got 5 (the header separates cells by semicolons)"),
    "a cell beyond the last column": (changed("0,3;0,3", "0,3;0,3;see mail"),
     "line 3: expected 6 cells, got 7"),
    "a quotation mark that never ends": (changed("Ulm", '"Ulm'), "line 3: not CSV: "),
    "a line that names no separator": (b"sep=:\n" + SHEET.encode(),
     "line 1: expected cells separated by commas"),
    "only a header": (HEADER.encode() + b"\n;;;;;\n", "line 1: only a header, no reports"),
    "only separators": (b";;;\n;;;\n", "the file is empty"),
    "nothing but a mark": (b"\xef\xbb\xbf", "the file is empty"),
    "nothing but odd blanks": (b"\x0b\n\x1c,\x1d\n", "the file is empty"),
    "two lines of one member": (changed("Ulm", "Köln"),
     "line 3: round 1: client 'Köln' is already on line 2"),
    "a member in two spellings": (SHEET.encode() + b"2;ulm;0,1;0,5;0,2;0,4\n2;X;0,1;0,5;0,2;0,4\n",
     "'Ulm' (round 1) and 'ulm' (round 2) differ only in case"),
    "a place after a line break in a cell": (with_column("comment", '"a\nb"', "").replace(b"0,3;0,3",
     b"0,3;high"), "line 4: without of client 'Ulm' in round 1 must be a number, got 'high'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_why(tmp_path, case):
    data, message = REFUSED[case]
    path = tmp_path / "reports.csv"
    path.write_bytes(data)
    with pytest.raises(FileFormatError) as refused:
        read(path)
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize("ending", ["csv", "json", "xlsx"])
def test_a_file_that_is_too_large_is_not_read(tmp_path, ending):
    path = tmp_path / f"reports.{ending}"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)  # no byte of it is on disk
    with pytest.raises(FileFormatError, match="expected a file of at most 200 MiB, got 200 MiB"):
        read(path)


def test_the_owner_decides_what_the_table_leaves_open(tmp_path):
    path = tmp_path / "reports.csv"
    path.write_bytes(changed("1;A;0;9;2;8", "1;A;0;9;1,234;8", WHOLE))
    assert read(path, decimal=",")[0].alone[0] == 1.234
    assert read(path, decimal=".")[0].alone[0] == 1234
    path.write_bytes(SHEET.replace("Köln", "Łódź").encode("cp1250"))
    assert read(path, encoding="cp1250")[0].clients == ("Łódź", "Ulm")


def test_an_encoding_that_is_named_for_a_file_in_utf_8_is_taken_with_a_note(tmp_path, fedmerit):
    path = tmp_path / "reports.csv"
    path.write_text(PLAIN, encoding="utf-8")
    code, out, _ = fedmerit("score", path, "--encoding", "latin-1")
    assert code == 0
    assert "text in latin-1, with words such as 'KÃ¶ln': it is valid UTF-8 too, with 'Köln'" in out
    _, out, _ = fedmerit("score", path, "--encoding", "utf-8")
    assert "note: the file was read" not in out
    path.write_text(PLAIN, encoding="latin-1")
    _, out, _ = fedmerit("score", path, "--encoding", "latin-1")
    assert "UTF-8" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decimal": "."},
         "line 2: empty in cell C2: '0,1' does not have a decimal point, which was asked for"),
        ({"delimiter": ","}, "line 1: missing columns 'round', 'client'"),
        ({"encoding": "ascii"}, "cannot be read as ascii: "),
        ({"encoding": "latin-1"}, "its first bytes say UTF-16, but not latin-1"),
        ({"delimiter": ":"}, "delimiter: expected ',', ';', '|' or a tab, got ':'"),
        ({"decimal": "point"}, "decimal: expected '.' or ',', got 'point'"),
        ({"encoding": "klingon"},
         "encoding: expected the name of an encoding, such as utf-8, latin-1 or cp1250"),
        ({"encoding": "hex"}, "encoding: expected the name of an encoding"),
    ],
)  # fmt: skip
def test_what_the_owner_says_must_be_true(tmp_path, options, message):
    path = tmp_path / "reports.csv"
    path.write_text(SHEET, encoding="utf-16" if "first bytes" in message else "utf-8")
    with pytest.raises(InputError) as refused:
        read(path, **options)
    assert message in str(refused.value)


def test_what_can_be_said_of_a_file_depends_on_its_kind(fedmerit, tmp_path):
    (tmp_path / "r.json").write_text("{}")
    for command in ("score", "page"):
        for path, option in (
            (tmp_path / "r.json", ("--decimal", "comma")),
            (tmp_path, ("--delimiter", "tab")),
        ):
            assert f"{path}: {option[0][2:]} is only of .csv" in fedmerit.refused(command, path, *option)


def test_every_command_says_how_it_read_the_file(fedmerit, tmp_path):
    path = tmp_path / "reports.csv"
    path.write_bytes(with_column("comment", "ok", "").decode().encode("latin-1"))
    said = (
        f"note: the file was read with {WESTERN}, cells separated by semicolons, decimal commas\n"
        "note: the file has columns that are not read: comment\n"
    )
    assert said in fedmerit("score", path)[1]
    assert said in fedmerit("score", path, "--format", "json")[2]
    pay = ("rewards", path, "--budget", "10 000,00 €", "--despite-doubts", "--rule", "fair")
    paid = fedmerit(*pay)[1]
    assert said in paid
    assert "budget 10,000.00 EUR" in paid
    assert json.loads(fedmerit(*pay, "--format", "json")[1])["currency"] == "EUR"
    form = ("--encoding", "latin-1", "--delimiter", "semicolon", "--decimal", ",")
    code, told, _ = fedmerit("score", path, *form)
    assert code == 0
    assert "the file was read with text in latin-1, cells separated by semicolons, decimal commas" in told


def test_comparing_says_how_each_file_was_read(fedmerit, tmp_path):
    (tmp_path / "one.csv").write_text(SHEET, encoding="utf-8")
    (tmp_path / "two.csv").write_text(PLAIN.replace("0.2", "0.25"), encoding="utf-8")
    code, out, err = fedmerit("compare", tmp_path / "one.csv", tmp_path / "two.csv")
    assert (code, err) == (0, "")
    assert f"note: {tmp_path / 'one.csv'}: {GERMAN}\n" in out
    assert f"note: {tmp_path / 'two.csv'}" not in out
    code, _, err = fedmerit("compare", tmp_path / "one.csv", tmp_path / "two.csv", "--decimal", "point")
    assert code == 2
    assert "'0,1' does not have a decimal point, which was asked for" in err


def test_tables_of_data_are_read_in_the_same_forms(tmp_path):
    lines = [f"{'Köln' if k % 2 else 'Ulm'};{k},5;{k // 2 % 2}" for k in range(12)]
    file = tmp_path / "cells.csv"
    file.write_bytes("\r\n".join(["site;age;y", *lines]).encode("latin-1"))
    found = load("table", file, target="y", group="site", features=["age"])  # the mark is found out
    assert set(found.group_train) == {"Köln", "Ulm"}
    assert sorted([*found.x_train[:, 0], *found.x_test[:, 0]]) == [k + 0.5 for k in range(12)]
    assert found.notes[:2] == (
        f"cells.csv: the file was read with {WESTERN}, cells separated by semicolons",
        "cells.csv: numbers were read with decimal commas",
    )
    with pytest.raises(DataError, match=r"separator: expected a comma, semicolon, tab or bar"):
        load("table", file, target="y", separator=":")


@pytest.mark.parametrize("delimiter", ["comma", "semicolon", "tab"])
def test_a_template_reads_back_once_it_is_filled_in(fedmerit, tmp_path, delimiter):
    path = tmp_path / "mine.csv"
    options = ("--member", "Köln; Süd", "--member", 'the "other"', "--rounds", "2", "--delimiter", delimiter)
    out = fedmerit.said("init", path, "--csv", *options)
    assert f"wrote {path}: fill in 4 lines, as the first two explain; next: fedmerit score {path}" in out
    assert f"{path}: line 4: round 1: empty is missing: fill in cell D4" in fedmerit.refused("score", path)
    mark = {"comma": ",", "semicolon": ";", "tab": "\t"}[delimiter]
    rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), delimiter=mark))
    header, means, example, *lines = rows
    assert len(means) == len(example) == len(header)
    assert means[3] == "how good the shared model was before this round; the same for all members"
    assert example[:2] == ["# example: round 1", "Bonn"]
    assert [row[:2] for row in lines] == [[k, name] for k in "12" for name in ("Köln; Süd", 'the "other"')]
    numbers = ["accuracy", "0,1", "0,5", "0,25", "0,375", "0,01"]
    filled = [header, means, example, *([*row[:2], *numbers] for row in lines)]
    half = [*filled[:-1], [*filled[-1][:6], "", ""]]
    missing = "without of client 'the \"other\"' in round 2 is missing: fill in cell G7"
    for text, expected, problem in ((half, 2, missing), (filled, 0, "")):
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=mark).writerows(text)
        code, out, err = fedmerit("score", path)
        assert code == expected
        assert problem in err
    assert "note: 2 lines that begin with # were not read\n" in out
    assert [one.alone.tolist() for one in read(path)] == [[0.25, 0.25]] * 2


def test_a_template_is_never_written_over_a_file(fedmerit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fedmerit("init", "--csv")[0] == 0
    before = (tmp_path / "reports.csv").read_bytes()
    assert before.count(b"\n") == 12
    code, _, err = fedmerit("init", "--csv")
    assert code == 2
    assert "reports.csv: exists already and is not overwritten" in err
    assert (tmp_path / "reports.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--csv", "--xlsx"], "expected one of --csv, --xlsx and --paper"),
        (["--xlsx", "--delimiter", "tab"], "--delimiter: expected together with --csv"),
        (["--csv", "--rounds", "0"], "rounds must be a whole number of at least 1, got 0"),
        (["--csv", "--member", "A", "--member", "A"], "client 'A' appears more than once"),
        (["--csv", "--member", "A", "--member", "a "], "'A' and 'a ' differ only in case, blanks"),
        (["--csv", "--member", ""], "client names must be non-empty strings"),
        (["--csv", "--delimiter", "space"], "delimiter: expected ',', ';', '|' or a tab, got 'space'"),
        (["mine.toml", "--csv"], "mine.toml: expected a name that ends in .csv"),
        (["--rounds", "2"], "--rounds: expected together with --csv"),
    ],
)
def test_templates_that_cannot_be(fedmerit, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = fedmerit("init", *options)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


NAMES = st.text(st.characters(codec="cp1252", exclude_categories=["C", "Z"]), min_size=1, max_size=8)
UTILITIES = st.floats(0, 1, allow_subnormal=False)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(NAMES, min_size=2, max_size=4, unique_by=lambda name: name.casefold()),
    numbers=st.lists(UTILITIES, min_size=10, max_size=10),
    delimiter=st.sampled_from(",;\t|"),
    decimal=st.sampled_from(".,"),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    ends=st.sampled_from(["\n", "\r\n"]),
)
def test_what_the_tool_writes_reads_back_in_every_form(
    tmp_path_factory, names, numbers, delimiter, decimal, encoding, ends
):
    """The scores of a run, saved again by any spreadsheet program, are the same reports, bit for bit."""
    path = tmp_path_factory.mktemp("sheets") / "reports.csv"
    empty, grand, *rest = numbers
    plain = io.StringIO()
    rows = [(1, name, empty, grand, rest[k], rest[k + 4]) for k, name in enumerate(names)]
    csv.writer(plain).writerows([HEADER.split(";"), *rows])
    path.write_text(plain.getvalue(), encoding="utf-8")
    content = document(read(path))
    columns, *lines = csv.reader(io.StringIO(as_csv(content)))
    saved = io.StringIO(newline="")
    writer = csv.writer(saved, delimiter=delimiter, lineterminator=ends)
    numeric = [place for place, name in enumerate(columns) if name not in ("client", "utility")]
    for line in (columns, *lines):
        cells = [cell.replace(".", decimal) if place in numeric else cell for place, cell in enumerate(line)]
        writer.writerow(cells)
    path.write_bytes(saved.getvalue().encode(encoding))
    assert document(read(path)) == content


@pytest.mark.parametrize(
    ("text", "amount", "currency"),
    [
        ("10000", "10000", None), ("10000.5", "10000.5", None), (" 0,5\n", "0.5", None),
        *[(text, "10000.00", None) for text in ("10,000.00", "10.000,00", "10 000,00", "10'000.00")],
        *[(text, "10000.00", "EUR") for text in ("10\u00a0000,00\u00a0€", "10\u202f000,00 €")],
        *[(text, "10000", "EUR") for text in ("€10000", "10000 EUR", "10000eur")],
        ("CHF 10\u2019000.00", "10000.00", "CHF"), ("$10,000.00", "10000.00", "$"), ("£5", "5", "£"),
        ("1,234,567", "1234567", None), ("1.234.567", "1234567", None),
    ],
)  # fmt: skip
def test_amounts_that_can_be_read_in_one_way(text, amount, currency):
    assert amount_of(text) == (Decimal(amount), currency)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10,000",
         "'10,000' can be read as 10000 and as 10.000: write it without a mark for thousands, such as"),
        ("10.000", "'10.000' can be read as 10000 and as 10.000"),
        ("1.234 EUR", "'1.234 EUR' can be read as 1234 and as 1.234"),
        *[(text, f"expected an amount like 10000.00, 10,000.00 or 10 000,00 EUR, got {text!r}") for text in (
            "1,00,000.00", "1 234.567,00", "1,234.567.890", "10 00", "-5", "EUR", "five", "5%", "5 EUR USD")],
        ("EUR 5 USD", "expected one currency in 'EUR 5 USD', got EUR and USD"),
        ("5 XYZ", "expected a currency such as EUR in '5 XYZ', got 'XYZ'"),
    ],
)  # fmt: skip
def test_amounts_that_are_none_or_two(text, message):
    with pytest.raises(InputError) as refused:
        amount_of(text)
    assert message in str(refused.value)


@given(
    cents=st.integers(0, 10**25),
    form=st.sampled_from(["{:.2f}", "{:,.2f}"]),
    marks=st.sampled_from([".,", ",.", ", ", ",\u00a0", ",\u202f", ".'", ".\u2019", ". "]),
    currency=st.sampled_from([None, *sorted(CURRENCIES), "$", "£"]),
    shape=st.sampled_from(["{0}{1}", "{1}{0}", "{0} {1}", "{1} {0}", "{0}\u00a0{1}"]),
)
def test_amounts_that_are_printed_can_be_pasted(cents, form, marks, currency, shape):
    """Whatever fedmerit prints ("{:,.2f}"), in any country's form and with any currency, is read."""
    amount = Decimal(cents).scaleb(-2)
    printed = form.format(amount).translate({ord("."): marks[0], ord(","): marks[1]})
    text = printed if currency is None else shape.format(printed, currency)
    assert amount_of(text) == (amount, currency)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_that_programs_write_are_read_with_a_point(number):
    assert float(readings(repr(number))["."]) == number


EVIL = ["=HYPERLINK(A1)", "+1+cmd|'/C calc'!A0", "-2+3", "@SUM(A1)", "Ulm;=1+1", "'=kept", "a, -b", "\uff1d1"]
LIVE = tuple("=+-@\uff1d\uff0b\uff0d\uff20")


def is_live(text):
    """Whether a program that separates cells in one of four ways would run one of the cells as a formula."""
    for mark in ",;|\t":
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark):
            for cell in (part for whole in row for part in (whole, *whole.split(mark))):
                try:
                    float(cell.partition(",")[0])
                except ValueError:
                    if cell.lstrip(" ").startswith(LIVE):
                        return True
    return False


def of_names(names):
    n = len(names)
    given = {"empty": 0, "grand": 1, "alone": [0.5] * n, "without": [1 - 1 / n] * n, "se_alpha": [0.1] * n}
    return Reports(**given, clients=names, utility="=v", round=1)


def test_no_name_is_a_formula_in_any_table_and_our_own_reads_back(tmp_path):
    one = of_names(EVIL)
    file = tmp_path / "reports.csv"
    file.write_text(as_csv(document([one])), encoding="utf-8")
    (again,) = read(file)
    assert (again.clients, again.utility, again.alone.tolist()) == (tuple(EVIL), "=v", one.alone.tolist())
    paid = call("rewards", file, "--budget", "100", "--format", "csv")
    assert paid.exit_code == 0, paid.output
    made = (
        file.read_text(),
        paid.stdout,
        alpha(one).to_csv(),
        *(template_csv(template(EVIL, 2), mark) for mark in ",;"),
    )
    assert not any(map(is_live, made))
    assert is_live("a,=1+1\n")
    assert is_live('"x;=1+1",2\n')


@given(st.text(alphabet="=+-@'; ,|\t\r\naä1\uff1d", max_size=8), st.sampled_from([",", ";"]))
def test_every_text_reads_back_and_runs_nowhere(text, mark):
    assert text_of(text_cell(text)) == text
    if "\r" not in text and "\n" not in text:
        ((cell, number),) = csv.reader([sheet_text([[text, -1.5]], mark)], delimiter=mark)
        assert (text_of(cell), number) == (text, "-1.5")
        assert not is_live(sheet_text([[text, "x"]], mark))


@given(st.text(alphabet="<>&;|`*_[]()#-=+~\\!a1 ", max_size=20))
def test_a_name_is_text_in_markdown(name):
    told = markdown(name)
    assert "<" not in told
    assert ">" not in told
    assert not re.search(r"(?<!\\)(\\\\)*[|`*\[\]]", told)
    assert not re.match(r"\s*[#+=-]", told)
    assert html.unescape(re.sub(r"\\([^\w\s]|_)", r"\1", told)) == name
