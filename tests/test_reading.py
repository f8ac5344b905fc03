"""Files of reports: what is read, what is refused, and whether the message leads to the place."""

import json
import re
import string
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import call
from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, FileFormatError, InputError, KeyFileError, NamesAlike
from fedmerit.identity import check_names
from fedmerit.scoring.files import as_csv, as_json, document, read, read_content
from fedmerit.scoring.validate import slips, two_spellings

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
        (
            ",se_alpha\n",
            ",se_alfa\n",
            "line 1: unknown column 'se_alfa'; expected .* did you mean 'se_alpha'",
        ),
        ("1,south", "1,north", "line 3: round 1: client 'north' is already on line 2"),
        ("0.2,0.4,", "0.2,,", "line 2: without of client 'north' in round 1 is missing"),
        (
            "0.2,0.4,",
            "0.2,high,",
            "line 2: without of client 'north' in round 1 must be a number, got 'high'",
        ),
        (
            "0.2,0.4,",
            "0.2,nan,",
            "line 2: without of client 'north' in round 1 must be a finite number, at most 1e.100, got nan",
        ),
        ("1,south,0.1", "1,south,0.2", "line 3: round 1: empty is '0.2', but '0.1' on line 2"),
        ("1,south,0.1,0.5,0.3,0.3,0.02", "1,south,0.1", "line 3: expected 7 cells, got 3"),
        ("1,north", "first,north", "line 2: round must be a number, got 'first'"),
        ("1,north", "1.5,north", "line 2: round must be a whole number, 0 or more, got '1.5'"),
        ("1,north", "nan,north", "line 2: round must be a whole number, 0 or more, got 'nan'"),
        ("1,north", "-1,north", "line 2: round must be a whole number, 0 or more, got '-1'"),
        ("0.3,0.3,0.02", "0.3,1e200,0.02", "line 3: without of client 'south' in round 1 must be a finite"),
        ("0.3,0.3,0.02", "0.3,0.3,-1", r"line 3: round 1: se_alpha of client 'south' must lie in \[0, inf\]"),
        (
            "0.1,0.5,0.2",
            "0.1,inf,0.2",
            "line 2: grand in round 1 must be a finite number, at most 1e.100, got inf",
        ),
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
    with pytest.raises(
        FileFormatError, match=r": line 2: round 1: without of client 'north' must lie in \[0"
    ):
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
        (json.dumps(ROUND | {"alone": [0.2]}), "alone has 1 values, clients has 2 names"),
        (
            json.dumps([ROUND, ROUND | {"grand": "x"}]),
            "r.json: round 2: grand: expected a number",
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
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="cannot be read as UTF-16"):
        read(tmp_path / "binary.csv")


def test_an_out_of_range_value_of_a_whole_round_names_the_rounds_first_line(tmp_path):
    path = write(tmp_path, CSV.replace("0.5,0.6", "0.5,1.6"))
    with pytest.raises(FileFormatError, match=r"line 4: round 2: grand must lie in \[0, 1\]"):
        read(path, utility="accuracy")


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (ROUND | {"grand": float("inf")}, r"r\.json: round 1: grand must be a finite number"),
        (ROUND | {"round": 7, "grand": None}, r"r\.json: round 1 of the file, number 7: grand is missing"),
        (ROUND | {"round": -1}, r"r\.json: round 1 of the file: round: expected a whole number, 0 or more"),
    ],
)
def test_json_errors_name_the_round_once(tmp_path, one, message):
    with pytest.raises(FileFormatError, match=message) as caught:
        read(write(tmp_path, json.dumps(one), "r.json"))
    assert str(caught.value).count("round 1") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"clients": ["A", "B"], "rounds": [ROUND]}, "round 1: unknown client 'north'; the file lists A, B"),
        (
            {"clients": ["north", "south"], "rounds": [ROUND | {"silent": ["Z"]}]},
            "round 1: unknown client 'Z'; the file lists north, south",
        ),
        ({"clients": "north", "rounds": [ROUND]}, "clients: expected a list of names, got 'north'"),
        ({"clients": ["north", 3], "rounds": [ROUND]}, "clients: expected a list of names, got"),
        ({"clients": ["south", "south"], "rounds": [ROUND]}, "clients: 'south' appears more than once"),
    ],
)
def test_the_clients_that_a_file_lists_are_all_there_are(tmp_path, content, message):
    with pytest.raises(FileFormatError, match=message):
        read(write(tmp_path, json.dumps(content), "r.json"))


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


COMPANY = {
    "utility": "accuracy",
    "rounds": [ROUND],
    "companions": {"brier": {"utility": "brier", "rounds": [ROUND | {"grand": 0.6}]}},
}


def test_the_companion_of_the_utility_asked_for_is_read(tmp_path):
    path = write(tmp_path, json.dumps(COMPANY), "scores.json")
    for utility, grand in ((None, 0.5), ("accuracy", 0.5), ("brier", 0.6)):
        (one,) = read(path, utility=utility)
        assert (one.utility, one.grand) == (utility or "accuracy", grand)
    with pytest.raises(FileFormatError, match="has no utility 'dice'; it has accuracy, brier"):
        read(path, utility="dice")


@pytest.mark.parametrize("companions", [3, {"brier": 3}, {"brier": {}}])
def test_companions_that_are_none(tmp_path, companions):
    path = write(tmp_path, json.dumps(COMPANY | {"companions": companions}), "scores.json")
    with pytest.raises(FileFormatError, match=r"companions.*: expected an object"):
        read(path, utility="brier")


HEADER = "round,client,empty,grand,alone,without"


@pytest.mark.parametrize("number", ["0_5", "٣", "０.5", "0x1", "1 0", "++1"])
def test_only_numbers_as_one_writes_them_are_numbers(tmp_path, number):
    path = tmp_path / "r.csv"
    path.write_text(f'{HEADER}\n1,A,0,1,"{number}",1\n1,B,0,1,0,1\n', encoding="utf-8")
    with pytest.raises(FileFormatError, match="line 2: alone of client 'A' in round 1 must be a number, got"):
        read(path)


@pytest.mark.parametrize("number", ["+.5e0", "5.e-1", "0.5", "005E-1"])
def test_numbers_as_programs_write_them_are_read(tmp_path, number):
    path = tmp_path / "r.csv"
    path.write_text(f"{HEADER}\n1,A,0,1,{number},1\n1,B,0,1,0,1\n")
    assert read(path)[0].alone[0] == 0.5


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        ("K\u00f6ln", "Ko\u0308ln", r"'K\xf6ln' (round 1) and 'Ko\u0308ln' (round 2)"),
        ("North", "north", "'North' (round 1) and 'north' (round 2)"),
        ("North Sea", "North  Sea", "'North Sea' (round 1) and 'North  Sea' (round 2)"),
    ],
)
def test_two_spellings_of_one_name_are_refused_with_their_rounds(tmp_path, one, other, shown):
    path = tmp_path / "r.csv"
    lines = [f"{k},{name},0,1,0,1" for k, who in ((1, one), (2, other)) for name in (who, "B")]
    path.write_text("\n".join([HEADER, *lines]), encoding="utf-8")
    with pytest.raises(FileFormatError) as refused:
        read(path)
    assert f"{shown} differ only in case, blanks or letters that look the same" in str(refused.value)


def test_a_listed_name_in_another_spelling_is_refused(tmp_path):
    path = tmp_path / "r.json"
    one = {"empty": 0, "grand": 1, "alone": [0, 0], "without": [1, 1], "clients": ["A", "B"]}
    path.write_text(json.dumps({"clients": ["A", "B", " A"], "rounds": [one]}))
    with pytest.raises(
        FileFormatError, match=r"'A' \(round 1\) and ' A' \(listed, in no round\) differ only"
    ):
        read(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER.replace(",", ";"), "expected 6 cells, got 1 (the header separates cells by semicolons)"),
        (HEADER.replace(",", "\t"), "expected 6 cells, got 1 (the header separates cells by tabs)"),
        (
            HEADER.title(),
            "got 'Round, Client, Empty, Grand, Alone, Without': did you mean 'round' by 'Round'?",
        ),
        ("name,value", "got 'name, value'"),
    ],
)
def test_a_header_that_is_none_says_what_came_and_what_to_do(tmp_path, header, message):
    path = tmp_path / "r.csv"
    path.write_text(f"{header}\n1,A,0,1,0,1\n")
    with pytest.raises(FileFormatError) as refused:
        read(path)
    assert message in str(refused.value)


def test_two_utilities_in_one_csv_are_called_that(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text(
        f"{HEADER},utility\n1,A,0.1,0.5,0.2,0.4,accuracy\n1,B,0.1,0.5,0.2,0.4,accuracy\n"
        "1,A,-0.9,-0.5,-0.8,-0.6,neg-loss\n1,B,-0.9,-0.5,-0.8,-0.6,neg-loss\n"
    )
    with pytest.raises(FileFormatError) as refused:
        read(path)
    assert "line 4: round 1: utility is 'neg-loss', but 'accuracy' on line 2" in str(refused.value)
    assert "several utilities go into JSON, under companions" in str(refused.value)


def test_where_a_run_begins_is_written_and_read_back(tmp_path):
    first, second = read(write(tmp_path, CSV), utility="accuracy")
    content = document([first, replace(second, since=2)])
    for text, name in ((as_json(content), "scores.json"), (as_csv(content), "scores.csv")):
        again = read(write(tmp_path, text, name))
        assert [one.since for one in again] == [None, 2]
        assert document(again) == content
    with pytest.raises(FileFormatError, match="since: expected a number"):
        read(write(tmp_path, json.dumps([ROUND | {"since": "1"}]), "r.json"))


@pytest.mark.parametrize("field", ["clients", "utility", "slice"])
def test_half_a_letter_is_refused_because_no_file_can_hold_it(tmp_path, field):
    half = ["north", "\ud800"] if field == "clients" else "\ud800"
    path = write(tmp_path, json.dumps({**ROUND, field: half}), "reports.json")
    with pytest.raises(FileFormatError, match=r"reports\.json: round 1: .* must be .*, got '\\ud800'$"):
        read(path)


def test_a_round_has_a_number_that_charts_and_other_programs_can_hold(tmp_path):
    huge = str(10**20 - 1)
    with pytest.raises(FileFormatError, match=r"line 4: round must be at most 2147483648, got '99999"):
        read(write(tmp_path, CSV.replace("\n2,", f"\n{huge},")))
    path = write(tmp_path, json.dumps({**ROUND, "round": 10**20}), "reports.json")
    with pytest.raises(FileFormatError, match=r"round must be at most 2147483648, got 1000000"):
        read(path)


@pytest.mark.parametrize("encoding", ["idna", "undefined", "a\0b", "", 5])
def test_an_encoding_that_no_file_has_is_refused(tmp_path, encoding):
    with pytest.raises(InputError, match=r"^encoding: expected the name of an encoding, such as utf-8, "):
        read(write(tmp_path, CSV), encoding=encoding)


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"PAR1", "a Parquet file"),
        (b"\x1f\x8b\x08", "a compressed file (gzip)"),
        (b"\x89PNG\r\n", "a picture"),
        (b"<!DOCTYPE html>", "a web page"),
        (b"<html>", "a web page"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, begin, what):
    path = tmp_path / "reports.csv"
    path.write_bytes(begin + bytes(100))
    with pytest.raises(FileFormatError, match=rf"reports\.csv: this is {re.escape(what)}, not CSV: "):
        read(path)


def test_json_in_other_letters_or_with_endless_numbers_is_refused_in_plain_words(tmp_path):
    path = tmp_path / "reports.json"
    path.write_text(json.dumps(ROUND), encoding="utf-16")
    with pytest.raises(FileFormatError, match="expected JSON in UTF-8, got byte 0xff at place 0: save it as"):
        read(path)
    path.write_text('{"empty": 1' + "0" * 5000 + "}")
    with pytest.raises(FileFormatError, match="expected numbers of ordinary size, got one of thousands of"):
        read(path)


@pytest.mark.parametrize("path", [3, ["reports.csv"], None, b"reports.csv"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InputError, match=r"^expected the path of a file of reports, got "):
        read(path)


def test_a_path_that_no_disk_takes_is_refused():
    with pytest.raises(FileFormatError, match=r"aaa: cannot be read: File name too long$"):
        read("a" * 5000 + ".csv")
    with pytest.raises(FileFormatError, match=r"'a\\x00\.csv': no such file or folder$"):
        read("a\0.csv")


def test_a_run_folder_is_for_another_function(tmp_path):
    with pytest.raises(FileFormatError, match=r"ends in \.csv or \.json; fedmerit\.load reads a run folder$"):
        read(tmp_path)


def test_one_line_is_one_line(tmp_path):
    with pytest.raises(FileFormatError, match=r"reports\.csv: line 2: round 1: expected at least 2 clients"):
        read(write(tmp_path, "\n".join(CSV.splitlines()[:2])))


# ------------------------------------------------------------------------------------- names that look alike

ALIKE = [
    ("LMU München", "LMU Munchen"),
    ("LMU München", "LMU Mnüchen"),
    ("LMU München", "LMU Muenchen"),
    ("LMU München", "LMU-München"),
    ("LMU München", "LMUMünchen"),
    ("Charité", "Charite"),
    ("Köln", "Koln"),
    ("Heidelberg 2", "Heidleberg 2"),
    ("Heidelberg", "Heidelburg"),
    ("St. Gallen", "St Gallen"),
    ("client_1", "client-1"),
]
LISTS = [
    [f"{stem}{k}" for k in range(200)]
    for stem in ("Site ", "client-", "client_", "hospital", "Klinik Nr. ", "S", "Bank 2-", "node-0-")
]
LISTS += [
    [f"{stem}{letter}" for letter in string.ascii_uppercase]
    for stem in ("", "Site ", "site", "Hospital-", "x")
]
LISTS += [
    ["UKE", "UKB", "UKD", "UKM", "UKL", "UKS", "UKW", "MHH", "LMU", "TUM", "RWTH", "KIT"],
    ["Klinik I", "Klinik II", "Klinik III", "Klinik IV", "GroupI", "GroupII", "GroupIII"],
    ["Nord", "Süd", "Ost", "West", "Nordost", "Nordwest", "Südost", "Südwest", "North"],
    ["Essen", "Hessen", "Bonn", "Ulm", "Köln", "Mainz", "Mannheim", "Weinheim", "Hamburg", "Homburg-Saar"],
    ["Paris-1", "Paris-1-1", "Paris-11", "Paris 1.1.1"],
    ["Abbey", "Bridge", "Castle", "Dale", "Eyre", "Ford"],
    ["Bank of A", "Bank of B", "Bank of AB", "A+", "A-", "B+", "B-", "AB+", "AB-", "Group+", "Group-"],
    [
        "Münster",
        "Neumünster",
        "Frankfurt (Main)",
        "Frankfurt (Oder)",
        "東京",
        "京都",
        "大阪",
        "Київ",
        "Москва",
    ],
]


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
    with pytest.raises(FileFormatError, match="distinct"):
        apart(path, (one, other), distinct=["Bremen"])
    lines = [f"1,{name},0,1,0,1" for name in (one, other, "B")]  # they share a round: two members
    path.write_text("\n".join([HEADER, *lines]), encoding="utf-8")
    assert read(path)


@pytest.mark.parametrize("names", LISTS)
def test_names_as_people_give_them_are_not_mixed_up(tmp_path, names):
    assert len(apart(tmp_path / "r.csv", names)) == len(names)
    assert two_spellings(names) is None


@given(st.lists(st.integers(0, 10**6), min_size=2, unique=True), st.sampled_from(["Site ", "c-", "Köln", ""]))
def test_names_with_other_digits_are_other_names(numbers, stem):
    names = [f"{stem}{k}" for k in numbers]
    assert not list(slips(names))
    assert two_spellings(names) is None


@given(st.text(alphabet="abcdefghäöü", min_size=6, max_size=12), st.data())
def test_a_slip_of_the_finger_is_found(word, data):
    place = data.draw(st.integers(1, len(word) - 3))
    slip = data.draw(
        st.sampled_from(
            [
                word[:place] + word[place + 1] + word[place] + word[place + 2 :],
                word[:place] + "z" + word[place + 1 :],
                word[:place] + "z" + word[place:],
                word.upper().replace("Ä", "A"),
            ]
        )
    )
    names = [f"Klinik {one} 7" for one in dict.fromkeys((word, slip))]
    assert len(names) == 1 or list(slips(names)) == [tuple(names)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Castle", "C\u0430stle"),
        ("Abbey", "\u0391bbey"),
        ("a-b", "a\u2011b"),
        ("Bonn", "\uff22onn"),
        ("ΝΙΚΗ", "νικη"),
    ],
)
def test_letters_that_look_the_same_are_one_spelling_everywhere(tmp_path, one, other):
    assert two_spellings([one, "Zz", other]) == (one, other)
    with pytest.raises(NamesAlike):
        apart(tmp_path / "r.csv", (one, other), distinct=[other])
    with pytest.raises(KeyFileError):
        check_names([one, "Zz", unicodedata.normalize("NFC", other)])
    with pytest.raises(ConfigError):
        from_dict({"partition": {"names": [one, "Zz", other], "clients": 3}})
