"""Workbooks as people send them: what is read, what is said about it, what is refused, in one table."""

import io
import json
import subprocess
import sys
import zipfile
from datetime import date, datetime
from pathlib import Path

import pytest
from openpyxl import Workbook, load_workbook
from openpyxl.chart import BarChart
from openpyxl.utils.datetime import CALENDAR_MAC_1904

import fedmerit as fm
from fedmerit.errors import FileFormatError
from fedmerit.files import workbooks
from fedmerit.files.reports import read, read_content
from fedmerit.files.workbooks import workbook

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals.csv"
HEADER = ("Round", "Member", "empty", "grand", "alone", "without")
ROWS = ((1, "Köln", 0.1, 0.5, 0.2, 0.4), (1, "Ulm", 0.1, 0.5, 0.3, 0.3))


def book_of(*rows, header=HEADER, title="Reports"):
    """A workbook with one sheet."""
    book = Workbook()
    book.active.title = title
    for row in (header, *rows):
        book.active.append(row)
    return book


def changed(**cells):
    """The usual workbook with other values in these cells."""
    book = book_of(*ROWS)
    for cell, value in cells.items():
        book.active[cell] = value
    return book


def formatted(form, *cells, **values):
    book = changed(**values)
    for cell in cells:
        book.active[cell].number_format = form
    return book


def since_1904(**cells):
    book = changed(**cells)
    book.epoch = CALENDAR_MAC_1904
    return book


def merged_header():
    book = book_of(HEADER, *ROWS, header=("Who", None, "What", None, None, None))
    book.active.merge_cells("A1:B1")
    book.active.merge_cells("C1:F1")
    return book


def beside(*titles, state="visible", of="Notes"):
    """The usual workbook with more sheets: the same table in each of these, and one of notes."""
    book = changed()
    book.create_sheet(of, 0).append(["What we did"])
    for title in titles:
        book.create_sheet(title).sheet_state = state
        for row in (HEADER, *ROWS):
            book[title].append(row)
    return book


def merged(*ranges, **cells):
    book = changed(**cells)
    for span in ranges:
        book.active.merge_cells(span)
    return book


def hidden():
    book = changed()
    book.active.row_dimensions[3].hidden = True
    book.active.column_dimensions["E"].hidden = True
    return book


def only_hidden():
    book = beside("More", state="hidden")
    book["Reports"].sheet_state = "veryHidden"
    del book["More"]
    return book


def styled_to_the_end():
    book = changed()
    book.active["XFD1048576"].number_format = "0.00"  # a whole sheet that was formatted
    return book


def stored(book):
    data = io.BytesIO()
    book.save(data)
    return data.getvalue()


def repacked(change, book=None):
    """A workbook whose parts went through ``change(name, data)``; None leaves a part out."""
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(stored(book or changed()))) as old,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for part in old.namelist():
            if (data := change(part, old.read(part))) is not None:
                new.writestr(part, data)
    return target.getvalue()


def in_sheet(old, new, **more):
    """The XML of the sheet, with one thing changed."""

    def change(part, data):
        if part != "xl/worksheets/sheet1.xml":
            return data
        assert old in data, data
        return data.replace(old, new, 1)

    return repacked(change, **more)


def chart_sheet():
    book = changed()
    book.create_chartsheet("Picture", 0).add_chart(BarChart())
    return book


PERCENT = "percent signs, so that 81% is 0.81"
READ = {
    "as people type it": (changed(), []),
    "text with decimal commas": (changed(C2="0,1", D2="0,5", C3="0,1", D3="0,5", E2=" 0,2 "),
     ["the file was read with decimal commas"]),
    "text with decimal points beside numbers": (changed(C2="0.1", C3="0.1"), []),
    "percent formats": (formatted("0.0%", "C2", "C3"), [f"the file was read with {PERCENT}"]),
    "a percent format of zero": (formatted("0%", "G2", G1="se_alpha", G2=0.01, G3=0), [
     f"the file was read with {PERCENT}"]),
    "percent signs in text": (changed(E2="20 %", E3="30%"), [f"the file was read with {PERCENT}"]),
    "a percent sign that is a unit of the format": (formatted('0.0" %"', "C2", "C3"), []),
    "dates as names": (changed(B3=date(2026, 2, 1)),
     ["names that look like dates, which spreadsheet programs make of names such as 1-2: 2026-02-01"]),
    "numbers as names": (changed(B3=17), []),
    "several sheets": (beside(), ["the sheet 'Reports' was read, and not Notes"]),
    "hidden sheets with the same columns": (beside("Old", state="hidden"),
     ["the sheet 'Reports' was read, and not Notes, Old"]),
    "a chart sheet": (chart_sheet(), []),
    "hidden rows and columns": (hidden(),
     ["hidden in the workbook, and read all the same: column E, row 3"]),
    "merged cells down a column": (merged("A2:A3", "C2:C3", A3=None, C3=None),
     ["merged cells count in each of their rows: A2:A3, C2:C3"]),
    "a merged title in a column that nobody reads": (merged("H2:J2", H1="comment", H2="checked"),
     ["the file has columns that are not read: comment"]),
    "cells at the end of the sheet that are empty": (styled_to_the_end(), []),
    "dimensions that are wrong": (in_sheet(b'ref="A1:F3"', b'ref="A1:XFD1048576"'), []),
    "formulas with values": (in_sheet(b"<v>0.4</v>", b"<f>D2-C2</f><v>0.4</v>"), []),
    "text in place": (in_sheet(b"<v>0.4</v>", b"<v>4e-1</v>"), []),
    "blank rows inside": (book_of(ROWS[0], (), (None, " "), ROWS[1]), []),
    "blanks around names and headings": (book_of((1, " Köln ", *ROWS[0][2:]), (1, "Ulm\u00a0", *ROWS[1][2:]),
     header=("Round ", " Member", *HEADER[2:])), []),
    "names in other letters": (changed(B3="北京"), []),
    "formats of money": (formatted('#,##0.00 "EUR"', "C2", "E2"), []),
    "macros under another name": (repacked(lambda part, data: data.replace(
     b"openxmlformats-officedocument.spreadsheetml.sheet.main", b"ms-excel.sheet.macroEnabled.main")), []),
    "names that begin a formula": (workbook({"Reports": [HEADER, ROWS[0], (1, "=1+1", *ROWS[1][2:])]}), []),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_what_is_read_and_said(tmp_path, case):
    made, said = READ[case]
    path = tmp_path / "reports.xlsx"
    path.write_bytes(made if isinstance(made, bytes) else stored(made))
    content = read_content(path)
    told = [str(note) for note in content.notes]
    heads = [note for note in content.notes if note.code == "sheet-headings"]
    assert [str(note) for note in heads] == ["headings were understood in this way: Member as client"]
    told.remove(str(heads[0]))
    assert told == said
    (reports,) = content.rounds
    assert reports.clients[0] == "Köln"
    assert reports.clients[1] == {"dates as names": "2026-02-01", "numbers as names": "17",
                                  "names in other letters": "北京",
                                  "names that begin a formula": "=1+1"}.get(case, "Ulm")  # fmt: skip
    assert (reports.empty, reports.grand) == (0.1, 0.5)
    assert reports.alone.tolist() == [0.2, 0.3]
    assert reports.without.tolist() == [0.4, 0.3]


def spoiled(part, data):
    return b"<!DOCTYPE x [<!ENTITY a 'b'>]>" + data.partition(b"?>")[2] if part == "xl/workbook.xml" else data


REFUSED = {
    "dates in a column of numbers": (changed(E2=datetime(2026, 2, 1)), "Reports!E2",
     "Reports!E2: alone: '2026-02-01' looks like a date, which"),
    "a time": (changed(E2=datetime(2026, 2, 1, 12, 30)), "Reports!E2",
     "Reports!E2: alone: '2026-02-01 12:30:00' looks like a date, which"),
    "an error of a formula": (changed(F3="#DIV/0!"), "Reports!F3",
     "Reports!F3: without: '#DIV/0!' is an error of the spreadsheet program"),
    "true": (changed(E2=True), "Reports!E2", "must be a number, got 'True'"),
    "an empty cell": (changed(F3=None), "Reports!F3",
     "Reports!F3: without of client 'Ulm' in round 1 is missing: fill in cell Reports!F3"),
    "a formula without a value": (changed(F3="=D3-C3"), "Reports!F3",
     "Reports!F3: without: a formula whose value is not in the file: open it"),
    "a sheet with a blank in its name": (book_of((1, "A", 0, 1, "x", 1), title="Round 1"), "'Round 1'!E2",
     "'Round 1'!E2: alone of client 'A' in round 1 must be a number, got 'x'"),
    "merged cells across columns": (merged("C2:D2"), "Reports!C2:D2", "merged cells of several columns"),
    "percent formats in half a column": (formatted("0%", "E2"), "Reports!E2",
     "'0.2' is in percent, but cell Reports!E3 is not: expected percent signs in all cells of a column"),
    "percent formats in two of four columns": (formatted("0%", "C2", "C3", "D2", "D3",
     E2=20, E3=30, F2=40, F3=30), "Reports!E2",
     "alone and without are 20 or more, but the other two columns are 0.5 or less"),
    "a number between percent formats": (formatted("0%", "E2", "E3", "E4", A4=1, B4="Bonn", C4=0.1, D4=0.5,
     E4=0.2, F4=0.4, A5=1, B5="Trier", C5=0.1, D5=0.5, E5=0.3, F5=0.4), "Reports!E5",
     "Reports!E5: alone: '0.3' is not in percent, but cell Reports!E2 is"),
    "beyond the range of the utility": (changed(G1="utility", G2="accuracy", G3="accuracy", F3=3),
     "Reports!F3", "without of client 'Ulm' must lie in [0, 1] (as utility 'accuracy' promises), got 3"),
    "beyond the range in a column of the round": (changed(G1="utility", G2="accuracy", G3="accuracy", D2=1.5,
     D3=1.5), "Reports!D2", "Reports!D2: round 1: grand must lie in [0, 1]"),
    "a negative error": (changed(G1="se_alpha", G2=0.01, G3=-0.02), "Reports!G3", "mend cell Reports!G3"),
    "half a sample": (changed(G1="samples", G2=10, G3=10.5), "Reports!G3",
     "must be a whole number, got 10.5"),
    "infinity": (changed(E2="inf"), "Reports!E2", "must be a finite number, at most 1e+100, got inf"),
    "not available": (changed(E3="#N/A"), "Reports!E3", "'#N/A' is an error of the spreadsheet program"),
    "money in text": (changed(F2="0.40 EUR"), "Reports!F2", "must be a number, got '0.40 EUR'"),
    "a date that is stored as days since 1904": (since_1904(E2=date(2026, 2, 1)), "Reports!E2",
     "alone: '2026-02-01' looks like a date"),
    "a second header with units": (book_of(("", "", "points", "points", "points", "points"), *ROWS),
     "Reports!A2", "round is missing: fill in cell Reports!A2"),
    "a merged header above the header": (merged_header(), "",
     "expected the columns round, client, empty, grand, alone, without, which are on row 2"),
    "a column twice": (changed(G1="alone", G2=0.2, G3=0.3), "Reports!E1", "column 'alone' appears twice"),
    "a column almost known": (changed(F1="witout"), "Reports!F1", "did you mean 'without' by 'witout'"),
    "one member twice in a round": (changed(B3="Köln"), "Reports!B3", "client 'Köln' is already on row 2"),
    "no name": (changed(B3="  "), "Reports!B3", "the name of the client is missing: fill in cell Reports!B3"),
    "two values for a round": (changed(D3=0.6), "Reports!D3", "grand is '0.6', but '0.5' on row 2"),
    "a fault at the end of a long sheet": (book_of(*((k // 2, f"{'AB'[k % 2]}", 0, 1, 0.2, "x" if k == 3999
     else 0.4) for k in range(4000))), "Reports!F4001", "must be a number, got 'x': mend cell Reports!F4001"),
    "two decimal marks in text": (changed(E2="0,2", E3="0.3"), "Reports!E2",
     "'0,2' has a decimal comma, but '0.3' in cell Reports!E3 has a decimal point"),
    "a comma that may be one of two things": (changed(E2="1,234"), "Reports!E2",
     "'1,234' can be read as 1234 and as 1.234"),
    "two sheets with the table": (beside("Again"), "",
     "2 sheets have the columns of the table: Reports, Again; say which to read with --sheet"),
    "a hidden sheet alone": (only_hidden(), "",
     "only a hidden sheet has the columns of the table: Reports; say"),
    "a title above the table": (book_of(HEADER, *ROWS, header=("Reports 2026",)), "",
     "expected the columns round, client, empty, grand, alone, without, which are on row 2"),
    "no such columns": (book_of((1,), header=("name", "alone")), "",
     "row 1: missing columns 'round', 'client'"),
    "a column twice in two words": (changed(G1="client"), "Reports!G1",
     "column 'client' appears twice, as 'Member' and as"),
    "an empty workbook": (Workbook(), "", "the workbook is empty"),
    "cells far to the right of the header": (changed(J3="see mail"), "", "expected 6 cells, got 10"),
    "text with another name": (b"round,client\n", "", "expected a workbook (.xlsx), got text, such as CSV"),
    "an old workbook": (b"\xd0\xcf\x11\xe0" + bytes(600), "",
     "got an old Excel workbook, or one with a password"),
    "an archive": (repacked(lambda part, data: None if "Types" in part else data), "",
     "got another kind of archive"),
    "a document type": (repacked(spoiled), "", "xl/workbook.xml declares a document type, which no workbook"),
    "a part that is cut off": (repacked(lambda part, data: data[: len(data) // 2]), "",
     "cannot be read as a workbook"),
    "a part that is missing": (repacked(lambda part, data: None if "sheet1" in part else data), "",
     "the workbook is empty"),
    "a number of thousands of digits": (in_sheet(b"<v>0.4</v>", b"<v>" + b"9" * 5000 + b"</v>"), "",
     "cannot be read as a workbook (ValueError"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_why(tmp_path, case):
    made, cell, message = REFUSED[case]
    path = tmp_path / "reports.xlsx"
    path.write_bytes(made if isinstance(made, bytes) else stored(made))
    with pytest.raises(FileFormatError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert refused.value.cell == cell


def test_bombs_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb.xlsx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in ("[Content_Types].xml", "xl/a.xml", "xl/b.xml"):
            with bomb.open(name, "w") as part:
                for _ in range(70):
                    part.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    with pytest.raises(
        FileFormatError, match="expected a workbook, unpacked, of at most 200 MiB, got 210 MiB"
    ):
        read(path)
    path.write_bytes(stored(changed()))
    monkeypatch.setattr(workbooks, "MOST_PARTS", 3)
    with pytest.raises(FileFormatError, match="expected a workbook of at most 3 files, got "):
        read(path)


@pytest.mark.parametrize(
    "made",
    [
        lambda: in_sheet(b'<row r="3"', b'<row r="99999999999"'),
        lambda: stored(styled_to_the_end()),
        lambda: in_sheet(b'"A2:A3"', b'"A2:A1048576"', book=merged("A2:A3")),
    ],
    ids=["rows that are far apart", "cells that are far apart", "ranges that are long"],
)
def test_sheets_of_nothing_end(tmp_path, monkeypatch, made):
    monkeypatch.setattr(workbooks, "MOST_CELLS", 1000)
    path = tmp_path / "far.xlsx"
    path.write_bytes(made())
    with pytest.raises(
        FileFormatError, match=r"sheet 'Reports': expected (at most 1,000 cells|fewer merged)"
    ):
        read(path)


def test_the_owner_says_which_sheet(tmp_path, fedmerit):
    path = tmp_path / "two.xlsx"
    book = beside("Again")
    book["Again"]["B3"] = "Bonn"
    path.write_bytes(stored(book))
    assert read(path, sheet="Again")[0].clients == ("Köln", "Bonn")
    out = fedmerit.said("score", path, "--sheet", "Reports")
    assert "note: the sheet 'Reports' was read, and not Notes, Again\n" in out
    assert "has no sheet 'Else'; it has Notes, Reports, Again" in fedmerit.refused(
        "score", path, "--sheet", "Else"
    )
    csv = tmp_path / "r.csv"
    csv.write_text("x")
    assert "r.csv: sheet is only of .xlsx files" in fedmerit.refused("score", csv, "--sheet", "Else")


def test_every_command_takes_a_workbook(tmp_path, fedmerit):
    path = tmp_path / "reports.xlsx"
    path.write_bytes(stored(changed()))
    for command in (("score",), ("rewards", "--budget", "100"), ("page", "--out", tmp_path / "p.html")):
        out = fedmerit.said(command[0], path, *command[1:])
        assert "note: headings were understood in this way: Member as client\n" in out


def test_without_openpyxl_one_is_told_what_to_install(tmp_path):
    path = tmp_path / "reports.xlsx"
    path.write_bytes(stored(changed()))
    program = (
        "import sys; sys.modules['openpyxl'] = None\nimport fedmerit as fm\n"
        f"try: fm.read({str(path)!r})\nexcept fm.FedmeritError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "workbooks (.xlsx) need: pip install openpyxl; CSV needs nothing\n"


def test_a_template_says_what_goes_where_and_reads_back(tmp_path, fedmerit):
    path = tmp_path / "mine.xlsx"
    out = fedmerit.said("init", path, "--xlsx", "--member", "=Bonn", "--member", "Ulm", "--rounds", "1")
    assert f"wrote {path}: fill in 2 lines, as the first two explain" in out
    refused = fedmerit.refused("score", path)
    assert "Reports!D4: round 1: empty is missing: fill in cell Reports!D4" in refused
    book = load_workbook(path)
    assert [cell.value for cell in book.active[3]][:4] == ["# example: round 1", "Bonn", "accuracy", 0.7]
    for row in (4, 5):
        for column, value in zip("DEFGH", (0.1, 0.5, 0.2, 0.4, 0.01), strict=True):
            book.active[f"{column}{row}"] = value
    book.save(path)
    assert read(path)[0].clients == ("=Bonn", "Ulm")


def test_results_are_a_workbook_that_reads_back(tmp_path, fedmerit):
    path, scores, paid = (tmp_path / name for name in ("reports.xlsx", "scores.xlsx", "paid.xlsx"))
    names = ["=1+1", "Ulm", "a\nb"]
    rows = [(1, name, 0.1, 0.5, 0.2 + k / 10, 0.4, 0.01) for k, name in enumerate(names)]
    path.write_bytes(workbook({"Reports": [(*HEADER, "se_alpha"), *rows]}))
    code, out, err = fedmerit("score", path, "--format", "xlsx", "--out", scores)
    assert (code, out) == (0, "")
    assert f"wrote {scores}\n" in err
    book = load_workbook(scores)
    assert book.sheetnames == ["Scores", "Rounds", "How this was computed"]
    header, first, *_ = book["Scores"].iter_rows(values_only=True)
    content = json.loads(fedmerit.said("score", path, "--format", "json"))
    assert dict(zip(header, first, strict=True))["ALPHA"] == max(content["cumulative"]["ALPHA"])
    assert first[0] == "a\nb"
    assert [str(one) for one in (read(scores)[0].clients, read(scores)[0].alone.tolist())] == [
        str(one) for one in (tuple(names), read(path)[0].alone.tolist())
    ]
    told = [row[0] for row in book["How this was computed"].iter_rows(values_only=True)]
    assert any("ALPHA summed over 1 round; gain +0.4000" in line for line in told)

    asked = ("rewards", path, "--budget", "100.01 EUR", "--despite-doubts")
    assert fedmerit(*asked, "--format", "xlsx", "--out", paid)[0] == 0
    header, *lines = load_workbook(paid)["Payouts"].iter_rows(values_only=True)
    payouts = json.loads(fedmerit.said(*asked, "--format", "json"))["payouts"]
    assert {line[0]: f"{line[2]:.2f}" for line in lines[:3]} == payouts
    assert [line[:3] for line in lines[3:]] == [
        ("all members", pytest.approx(1), 100.01), ("unpaid", None, 0), ("budget", None, 100.01)
    ]  # fmt: skip
    german = paid.with_name("german.xlsx")
    assert fedmerit(*asked, "--format", "xlsx", "--out", german, "--language", "de")[0] == 0
    assert "Auszahlung (EUR)" in [
        cell.value for row in load_workbook(german).worksheets[0].iter_rows() for cell in row
    ]
    assert header[:3] == ("member", "share", "payout (EUR)")
    told = [row[0] for row in load_workbook(paid)["How this was computed"].iter_rows(values_only=True)]
    assert "budget 100.01 EUR, rule fenced, unpaid 0.00" in told
    for sheet in (*load_workbook(paid), *load_workbook(scores)):
        assert not [cell for row in sheet.iter_rows() for cell in row if cell.data_type == "f"]

    for options, message in (
        (("--format", "xlsx"), "expected --format xlsx and --out FILE.xlsx together"),
        (("--out", tmp_path / "new.xlsx"), "expected --format xlsx and --out FILE.xlsx together"),
        (("--format", "xlsx", "--out", tmp_path / "new.csv"), "expected a name that ends in .xlsx"),
        (("--format", "xlsx", "--out", scores), "exists already and is not overwritten"),
    ):
        for command in (("score", path), asked):
            assert message in fedmerit.refused(*command, *options)


def looks(path, title):
    """How the first line of numbers of a sheet looks, by heading."""
    rows = load_workbook(path)[title].iter_rows(max_row=2)
    header, first = ([*row] for row in rows)
    return {name.value: cell.number_format for name, cell in zip(header, first, strict=True)}


@pytest.mark.parametrize(
    ("budget", "money"), [("100.01 EUR", "#,##0.00"), ("101 JPY", "#,##0"), ("100.5 KWD", "#,##0.000")]
)
def test_numbers_look_like_money_shares_and_scores_and_add_up(tmp_path, fedmerit, budget, money):
    path, paid, scores = HOSPITALS, tmp_path / "paid.xlsx", tmp_path / "scores.xlsx"
    days = {date.today()}
    asked = ("rewards", path, "--budget", budget, "--rule", "impartial")  # which leaves a part unpaid
    assert fedmerit(*asked, "--format", "xlsx", "--out", paid)[0] == 0
    assert fedmerit("score", path, "--format", "xlsx", "--out", scores)[0] == 0
    days |= {date.today()}
    amount, coin = budget.split()
    found = looks(paid, "Payouts")
    assert [*found.items()][:3] == [("member", "General"), ("share", "0.00%"), (f"payout ({coin})", money)]
    *members, total, left, whole = load_workbook(paid)["Payouts"].iter_rows(min_row=2)
    assert [row[0].value for row in (total, left, whole)] == ["all members", "unpaid", "budget"]
    assert sum(row[2].value for row in members) == pytest.approx(total[2].value)
    assert total[2].value + left[2].value == pytest.approx(whole[2].value)
    assert (left[2].value > 0, whole[2].value) == (True, float(amount))
    assert {row[2].number_format for row in (*members, total, left, whole)} == {money}
    assert [row[0].font.b for row in (members[0], total, left, whole)] == [False, True, False, True]
    found = looks(scores, "Scores")
    assert [found[name] for name in ("rank", "ALPHA", "ALPHA, lower end (95%)", "share")] == [
        "0", "0.0000", "0.0000", "0.00%"
    ]  # fmt: skip
    assert found["part of the rounds"] == "0%"
    assert looks(scores, "Rounds")["alone"] == "0.0000"
    for book in (paid, scores):
        told = [row[0] for row in load_workbook(book)["How this was computed"].iter_rows(values_only=True)]
        assert told[1] in {
            f"From hospitals.csv, on {day.day} {day:%B %Y}, with fedmerit {fm.__version__}." for day in days
        }


def test_notes_in_a_workbook_are_in_its_language(tmp_path, fedmerit):
    asked = ("rewards", HOSPITALS, "--budget", "100", "--format", "xlsx", "--language", "de")
    assert fedmerit(*asked, "--out", tmp_path / "paid.xlsx")[0] == 0
    (*_, how) = load_workbook(tmp_path / "paid.xlsx")
    told = [row[0] for row in how.iter_rows(values_only=True)]
    assert [line for line in told if "unter null" in line] == [
        "Hinweis: Beitrag unter null zählt als null: Harbour"
    ]


EVIL = ["=HYPERLINK(A1)", "+1+cmd|'/C calc'!A0", "-2+3", "@SUM(A1)", "#N/A", "'=kept", "a\x07b"]


def test_no_name_in_a_workbook_that_is_written_is_a_formula():
    data = workbook({"Names": [("member", "amount"), *((name, 1.5) for name in EVIL)]})
    cells = [row[0] for row in load_workbook(io.BytesIO(data))["Names"].iter_rows(min_row=2)]
    assert [cell.data_type for cell in cells] == ["s"] * len(EVIL)
    assert [cell.value for cell in cells] == [*EVIL[:-1], r"a\x07b"]
    assert [cell.hyperlink for cell in cells] == [None] * len(EVIL)
    assert cells[0].quotePrefix
