"""Files of reports: what is read, what is refused, and whether the message leads to the place."""

import json
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import call
from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, FileFormatError, InputError, KeyFileError, NamesAlike
from fedmerit.files.documents import as_csv, as_json, document
from fedmerit.files.reports import read, read_content
from fedmerit.identity import check_names
from fedmerit.notes import slips, two_spellings

CSV = """round,client,empty,grand,alone,without,se_alpha
1,north,0.1,0.5,0.2,0.4,0.01
1,south,0.1,0.5,0.3,0.3,0.02
2,north,0.5,0.6,0.5,0.6,0.01
2,south,0.5,0.6,0.6,0.5,0.02
"""
ROUND = {
    "empty": 0.1, "grand": 0.5, "alone": [0.2, 0.3], "without": [0.4, 0.3], "clients": ["north", "south"]
}  # fmt: skip


def write(tmp_path, text, name="reports.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_lines_may_come_in_any_order_with_spaces_blank_lines_and_a_byte_order_mark(tmp_path):
    header, *lines = CSV.splitlines()
    shuffled = "\ufeff" + "\n".join([header.replace(",", " , "), lines[3], "", lines[0], lines[2], lines[1]])
    first, second = read(write(tmp_path, shuffled))
    assert (first.round, second.round) == (1, 2)
    assert (first.clients, second.clients) == (("north", "south"), ("south", "north"))
    assert (first.se_alpha.tolist(), second.without.tolist()) == ([0.01, 0.02], [0.5, 0.6])


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


ACCURACY = {"utility": "accuracy"}
LISTED = {"clients": ["north", "south"], "rounds": [ROUND]}
HEADER = "round,client,empty,grand,alone,without"
COMPANY = {
    "utility": "accuracy",
    "rounds": [ROUND],
    "companions": {"brier": {"utility": "brier", "rounds": [ROUND | {"grand": 0.6}]}},
}


def csv(old, new):
    """The file with one thing changed, which stands in it."""
    assert old in CSV
    return CSV.replace(old, new, 1)


def named(*rounds):
    """Two members in rounds 1, 2, ...: one of these names, and B."""
    return "\n".join([HEADER, *(f"{k},{x},0,1,0,1" for k, name in enumerate(rounds, 1) for x in (name, "B"))])


def with_number(text):
    return f'{HEADER}\n1,A,0,1,"{text}",1\n1,B,0,1,0,1\n'


SPELLED = "differ only in case, blanks or letters that look the same"
REFUSED = [
    (csv(",without,", ",outside,"), "line 1: missing column 'without'; expected round, client, empty"),
    (csv(",se_alpha\n", ",se_alfa\n"), "line 1: unknown column 'se_alfa'; expected "),
    (csv(",se_alpha\n", ",se_alfa\n"), "did you mean 'se_alpha'"),
    (csv("1,south", "1,north"), "line 3: round 1: client 'north' is already on line 2"),
    (csv("0.2,0.4,", "0.2,,"), "line 2: without of client 'north' in round 1 is missing"),
    (csv("0.2,0.4,0.01", "0.2,0.4,"), "line 2: se_alpha of client 'north' in round 1 is"),
    ("\n\n" + csv("grand", "grant"), "line 3: missing column 'grand'"),
    (csv("0.2,0.4,", "0.2,high,"),
     "line 2: without of client 'north' in round 1 must be a number, got 'high'"),
    (csv("0.2,0.4,", "0.2,nan,"),
     "line 2: round 1: without of client 'north' must be a finite number, at most 1e+100"),
    (csv("0.3,0.3,0.02", "0.3,1e200,0.02"), "line 3: round 1: without of client 'south' must be a finite"),
    (csv("0.3,0.3,0.02", "0.3,0.3,-1"), "line 3: round 1: se_alpha of client 'south' must lie in [0, inf]"),
    (csv("0.1,0.5,0.2", "0.1,inf,0.2"), "line 3: round 1: grand is '0.5', but 'inf' on line 2"),
    (CSV.replace("0.1,0.5", "0.1,inf"),
     "line 2: round 1: grand must be a finite number, at most 1e+100, got inf"),
    (csv("1,south,0.1", "1,south,0.2"), "line 3: round 1: empty is '0.2', but '0.1' on line 2"),
    (csv("1,south,0.1,0.5,0.3,0.3,0.02", "1,south,0.1"), "line 3: expected 7 cells, got 3"),
    (csv("1,north", "first,north"), "line 2: round must be a number, got 'first'"),
    *((csv("1,north", f"{bad},north"), f"line 2: round must be a whole number, 0 or more, got {float(bad)}")
      for bad in ("1.5", "nan", "-1")),
    (csv("2,north", f"{10**20},north"), "line 4: round must be at most 2147483648, got 1e+20"),
    (csv("1,north", "1,"), "line 2: round 1: the name of the client is missing: fill in cell B2"),
    (csv("0.01\n", '"0.01\n'), "not CSV"),
    *((with_number(bad), f"line 2: alone of client 'A' in round 1 must be a number, got {bad!r}")
      for bad in ("0_5", "٣", "０.5", "0x1", "1 0", "++1")),
    (" \n", "the file is empty"),
    (CSV.splitlines()[0], "only a header, no reports"),
    ("\n".join(CSV.splitlines()[:2]), "line 2: round 1: expected at least 2 clients"),
    (b"\xff\xfe\x00", "cannot be read as UTF-16"),
    *((begin + bytes(100), f"reports.csv: this is {what}, not CSV: ") for begin, what in (
        (b"PAR1", "a Parquet file"), (b"\x1f\x8b\x08", "a compressed file (gzip)"),
        (b"\x89PNG\r\n", "a picture"), (b"<!DOCTYPE html>", "a web page"), (b"<html>", "a web page"))),
    *((f"{header}\n1,A,0,1,0,1\n", says) for header, says in (
        (HEADER.replace(",", ";"), "expected 6 cells, got 1 (the header separates cells by semicolons)"),
        (HEADER.replace(",", "\t"), "expected 6 cells, got 1 (the header separates cells by tabs)"),
        ("rounds,Clients,e,g", "got 'rounds, Clients, e, g': did you mean 'round' by 'rounds'"),
        ("name,value", "got 'name, value'"))),
    (f"{HEADER},utility\n1,A,0,1,0,1,accuracy\n1,B,0,1,0,1,accuracy\n1,A,-9,-5,-8,-6,neg-loss\n",
     "line 4: round 1: utility is 'neg-loss', but 'accuracy' on line 2"),
    *((named(*pair), f"{first} (round 1) and {second} (round 2) {SPELLED}") for pair, first, second in (
        (("K\u00f6ln", "Ko\u0308ln"), "'K\\xf6ln'", "'Ko\\u0308ln'"),
        (("North", "north"), "'North'", "'north'"),
        (("North Sea", "North  Sea"), "'North Sea'", "'North  Sea'"))),
    # JSON
    ("{", "line 1: not JSON"),
    ('{"empty": 1, "empty": 2}', "not reports: 'empty' appears twice in one object"),
    ('{"empty": ' + "[" * 100_000, "not reports: nested too deeply"),
    ([], "at least one round"),
    ([3], "round 1 of the file: expected an object, got int"),
    (ROUND | {"alones": 1}, "unknown field 'alones'"),
    ({"rounds": None}, "expected a round, or a list of at least one round"),
    (ROUND | {"alone": [0.2, True]}, "round 1: alone of client 'south': expected a number, got True"),
    (ROUND | {"grand": 10**400}, "round 1: grand must be a finite number, at most 1e+100, got inf"),
    (ROUND | {"grand": 1.5, "utility": "accuracy"}, "grand must lie in [0, 1] (as utility 'accuracy' promi"),
    (ROUND | {"silent": ["north"]}, "client 'north' is listed as silent but has a report"),
    (ROUND | {"utility": ["accuracy"]}, "utility must be a name, got ['accuracy']"),
    ([ROUND | ACCURACY, ROUND | {"utility": "brier"}], "round 2: utility 'brier', but 'accuracy' in"),
    ({"rounds": [{"round": 1, "reports": [1]}]}, "reports: expected an object, got list"),
    (ROUND | {"alone": None}, "alone is missing"),
    (ROUND | {"alone": {"north": 0.2}}, "alone of client 'south' is missing"),
    (ROUND | {"alone": {"north": 0, "south": 0, "x": 0}}, "unknown client 'x'; known: north, south"),
    (ROUND | {"alone": [0.2, float("nan")]},
     "json: round 1: alone of client 'south' must be a finite number"),
    (ROUND | {"alone": [0.2]}, "json: round 1: expected 1 client names, one per value, got 2"),
    ([ROUND, ROUND | {"grand": "x"}], "json: round 2: grand: expected a number"),
    ([ROUND, ROUND | {"round": 1}], "json: round 1 appears twice"),
    (ROUND | {"grand": float("inf")}, "json: round 1: grand must be a finite number"),
    (ROUND | {"round": 7, "grand": None}, "json: round 1 of the file, number 7: grand is missing"),
    (ROUND | {"round": -1}, "json: round 1 of the file: round must be a whole number, 0 or more"),
    (ROUND | {"round": 10**20}, "round must be at most 2147483648, got 1000000"),
    (LISTED | {"clients": ["A", "B"]}, "round 1: unknown client 'north'; the file lists A, B"),
    (LISTED | {"rounds": [ROUND | {"silent": ["Z"]}]}, "round 1: unknown client 'Z'; the file lists north, "),
    (LISTED | {"clients": "north"}, "clients: expected a list of names, got 'north'"),
    (LISTED | {"clients": ["north", 3]}, "clients: client names must be non-empty strings, got 3"),
    (LISTED | {"clients": ["south", "south"]}, "clients: client 'south' appears more than once"),
    (LISTED | {"clients": ["north", "south", " north"]},
     f"'north' (round 1) and ' north' (listed, in no round) {SPELLED}"),
    *((ROUND | {field: ["north", "\ud800"] if field == "clients" else "\ud800"}, "got '\\ud800'")
      for field in ("clients", "utility", "slice")),
    ('{"empty": 1' + "0" * 5000 + "}", "expected numbers of ordinary size, got one of thousands of digits"),
    (json.dumps(ROUND).encode("utf-16"),
     "expected JSON in UTF-8, got byte 0xff at place 0: save it as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "says"), REFUSED)
def test_a_file_that_cannot_be_read_leads_to_the_place(tmp_path, content, says):
    is_json = isinstance(content, list | dict) or content[:1] == "{" or content[:3] == b"\xff\xfe{"
    path = tmp_path / ("reports.json" if is_json else "reports.csv")
    text = json.dumps(content) if isinstance(content, list | dict) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileFormatError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)
    if is_json:
        assert str(caught.value).count("round 1") <= 1


@pytest.mark.parametrize(
    ("text", "name", "options", "says"),
    [
        (CSV, "reports.txt", {}, "ends in .csv, .xlsx or .json"),
        ("\n", "r.json", {}, "r.json: the file is empty"),
        (csv("0.2,0.4", "0.2,1.4"), "r.csv", ACCURACY, "line 2: round 1: without of client 'north' must lie"),
        (CSV.replace("0.5,0.6", "0.5,1.6"), "r.csv", ACCURACY, "line 4: round 2: grand must lie in [0"),
        (json.dumps(COMPANY), "r.json", {"utility": "dice"}, "has no utility 'dice'; it has accuracy, brier"),
        *((json.dumps(COMPANY | {"companions": bad}), "r.json", {"utility": "brier"}, ": expected an object")
          for bad in (3, {"brier": 3}, {"brier": {}})),
        *((CSV, "r.csv", {"encoding": bad}, "encoding: expected the name of an encoding, such as utf-8, ")
          for bad in ("idna", "undefined", "a\0b", "", 5)),
    ],
)  # fmt: skip
def test_what_is_asked_of_a_file_must_fit_it(tmp_path, text, name, options, says):
    with pytest.raises(InputError) as caught:
        read(write(tmp_path, text, name), **options)
    assert says in str(caught.value)
    if options == ACCURACY:  # without that promise, any number will do
        assert len(read(tmp_path / name)) == 2


@pytest.mark.parametrize(
    ("path", "kind", "says"),
    [
        *((bad, InputError, "expected the path of a file of reports, or a frame, got ")
          for bad in (3, ["r"], None, b"r")),
        ("a" * 5000 + ".csv", FileFormatError, "aaa: cannot be read: File name too long"),
        ("a\0.csv", FileFormatError, "'a\\x00.csv': no such file or folder"),
        ("nothing.csv", FileFormatError, "nothing.csv: no such file"),
        (".", FileFormatError, "ends in .csv, .xlsx or .json; fedmerit.load reads a run folder"),
    ],
)  # fmt: skip
def test_what_is_no_file_is_refused(path, kind, says):
    with pytest.raises(kind) as caught:
        read(path)
    assert says in str(caught.value)


def test_the_companion_of_the_utility_asked_for_is_read(tmp_path):
    path = write(tmp_path, json.dumps(COMPANY), "scores.json")
    for utility, grand in ((None, 0.5), ("accuracy", 0.5), ("brier", 0.6)):
        (one,) = read(path, utility=utility)
        assert (one.utility, one.grand) == (utility or "accuracy", grand)


def test_the_listed_clients_are_known_though_they_never_report(tmp_path):
    listed = {"clients": ["north", "south", "west"], "rounds": [ROUND]}
    found = read_content(write(tmp_path, json.dumps(listed), "r.json"))
    assert found.clients == ("north", "south", "west")
    assert found.rounds[0].clients == ("north", "south")


def test_a_silent_clients_document_reads_back(tmp_path):
    (one,) = read(write(tmp_path, json.dumps(ROUND | {"silent": ["west"]}), "r.json"))
    content = document([one])
    assert content["clients"] == ["north", "south", "west"]
    assert document(read(write(tmp_path, as_json(content), "again.json"))) == content


@pytest.mark.parametrize("number", ["+.5e0", "5.e-1", "0.5", "005E-1"])
def test_numbers_as_programs_write_them_are_read(tmp_path, number):
    assert read(write(tmp_path, with_number(number)))[0].alone[0] == 0.5


DOUBLED = [("Bonn", "Bon"), ("Aachen", "Achen"), ("Klinik Essen 2", "Klinik Esen 2"), ("Hann", "Han")]
ONE_LETTER = [
    ("Köln", "Kön"), ("Düsseldorf", "Düsseldor"), ("Essen", "Hessen"), ("Ulm", "Um"), ("Ulm", "Uln"),
    ("Bonn", "Born"), ("Köln", "Kölm"), ("Mainz", "Nainz"), ("St. Ulm 3", "St. Lum 3"),
]  # fmt: skip
ALIKE = [
    *DOUBLED, *ONE_LETTER,
    *(("LMU München", other)
      for other in ("LMU Munchen", "LMU Mnüchen", "LMU Muenchen", "LMU-München", "LMUMünchen")),
    ("Charité", "Charite"), ("Köln", "Koln"), ("St. Gallen", "St Gallen"), ("client_1", "client-1"),
    ("Heidelberg 2", "Heidleberg 2"), ("Heidelberg", "Heidelburg"),
    ("Site 1", "Site l"), ("Site O", "Site 0"), ("Ward I0", "Ward 1O"),
]  # fmt: skip
APART = [
    ("Site A", "Site B"), ("Clinic 1", "Clinic 2"), ("Clinic 1", "Clinic 11"), ("nodeA", "nodeB"),
    ("xA", "xB"), ("GroupI", "GroupII"), ("GroupII", "GroupIII"), ("Klinik VII", "Klinik VIII"),
    ("Ward A", "Ward AA"), ("Ward AA", "Ward AAA"), ("Ward AB", "Ward AC"), ("A+", "A-"),
    ("Group+", "Group-"), ("Bank of A", "Bank of AB"), ("Nord", "Nordost"), ("North", "South"),
    ("Ost", "West"), ("Köln", "Ulm"), ("東京", "京都"),
]  # fmt: skip
LISTS = [
    *APART,
    *([f"{stem}{k}" for k in range(200)]
      for stem in ("Site ", "client-", "client_", "hospital", "Klinik Nr. ", "S", "Bank 2-", "node-0-")),
    *([f"{stem}{letter}" for letter in string.ascii_uppercase]
      for stem in ("", "Site ", "site", "Hospital-", "x")),
    ["UKE", "UKB", "UKD", "UKM", "UKL", "UKS", "UKW", "MHH", "LMU", "TUM", "RWTH", "KIT"],
    ["Klinik I", "Klinik II", "Klinik III", "Klinik IV", "GroupI", "GroupII", "GroupIII"],
    ["Nord", "Süd", "Ost", "West", "Nordost", "Nordwest", "Südost", "Südwest", "North"],
    ["Essen", "Hessen", "Bonn", "Ulm", "Köln", "Mainz", "Mannheim", "Weinheim", "Hamburg", "Homburg-Saar"],
    ["Paris-1", "Paris-1-1", "Paris-11", "Paris 1.1.1"],
    ["Abbey", "Bridge", "Castle", "Dale", "Eyre", "Ford"],
    ["Bank of A", "Bank of B", "Bank of AB", "A+", "A-", "B+", "B-", "AB+", "AB-", "Group+", "Group-"],
    ["Münster", "Neumünster", "Frankfurt (Main)", "Frankfurt (Oder)"],
    ["東京", "京都", "大阪", "Київ", "Москва"],
]  # fmt: skip


def apart(path, names, **more):
    """A file in which every name but the first has a round with the first name alone."""
    first, *others = names
    lines = [f'{k},"{name}",0,1,0,1' for k, other in enumerate(others, 1) for name in ("Zz", other)]
    lines += [f'{len(names)},"{name}",0,1,0,1' for name in ("Zz", first)]
    path.write_text("\n".join([HEADER, *lines]), encoding="utf-8")
    return read(path, **more)


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_names_that_look_like_one_and_never_share_a_round_are_refused(tmp_path, one, other):
    path = tmp_path / "r.csv"
    with pytest.raises(NamesAlike) as refused:
        apart(path, (one, other))
    assert {*refused.value.names} == {one, other}
    for said in (one, other):
        assert len(apart(path, (one, other), distinct=[said])) == 2
        assert call("score", path, "--distinct", said).exit_code == 0
    assert call("rewards", path, "--budget", "10").exit_code != 0
    with pytest.raises(FileFormatError) as refused:
        apart(path, (one, other), distinct=["Bremen"])
    assert refused.type is FileFormatError  # not that the names are alike
    lines = [f"1,{name},0,1,0,1" for name in (one, other, "B")]  # they share a round: two members
    path.write_text("\n".join([HEADER, *lines]), encoding="utf-8")
    assert read(path)


@pytest.mark.parametrize("names", LISTS)
def test_names_as_people_give_them_are_not_mixed_up(tmp_path, names):
    assert len(apart(tmp_path / "r.csv", names)) == len(names)
    assert two_spellings(names) is None


@pytest.mark.parametrize(("one", "other"), [*DOUBLED, *ONE_LETTER])
def test_one_letter_is_a_slip_where_names_fill_each_others_gaps_and_a_doubled_one_everywhere(
    tmp_path, one, other
):
    path = tmp_path / "r.csv"
    if (one, other) in DOUBLED:
        with pytest.raises(NamesAlike):
            apart(path, (one, "Bremen", other))
    else:
        assert len(apart(path, (one, "Bremen", other))) == 3


@given(st.lists(st.integers(0, 10**6), min_size=2, unique=True), st.sampled_from(["Site ", "c-", "Köln", ""]))
def test_names_with_other_digits_are_other_names(numbers, stem):
    names = [f"{stem}{k}" for k in numbers]
    assert not list(slips(names))
    assert two_spellings(names) is None


@given(st.text(alphabet="abcdefghäöü", min_size=6, max_size=12), st.data())
def test_a_slip_of_the_finger_is_found(word, data):
    place = data.draw(st.integers(1, len(word) - 3))
    before, after = word[:place], word[place:]
    slips_ = [before + after[1] + after[0] + after[2:], before + "z" + after[1:], before + "z" + after]
    slip = data.draw(st.sampled_from([*slips_, word.upper().replace("Ä", "A")]))
    names = [f"Klinik {one} 7" for one in dict.fromkeys((word, slip))]
    assert len(names) == 1 or list(slips(names)) == [tuple(names)]


@pytest.mark.parametrize(
    ("one", "other"),
    [("Castle", "C\u0430stle"), ("Abbey", "\u0391bbey"), ("a-b", "a\u2011b"), ("Bonn", "\uff22onn"),
     ("ΝΙΚΗ", "νικη")],
)  # fmt: skip
def test_letters_that_look_the_same_are_one_spelling_everywhere(tmp_path, one, other):
    assert two_spellings([one, "Zz", other]) == (one, other)
    with pytest.raises(NamesAlike):
        apart(tmp_path / "r.csv", (one, other), distinct=[other])
    with pytest.raises(KeyFileError):
        check_names([one, "Zz", unicodedata.normalize("NFC", other)])
    with pytest.raises(ConfigError):
        from_dict({"partition": {"names": [one, "Zz", other], "clients": 3}})
