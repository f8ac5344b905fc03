"""Words for people: one catalogue, codes that are made where they are meant."""

import ast
import copy
import json
import pickle
import re
import string

import pytest

from fedmerit.config import SECTIONS
from fedmerit.notes import Note, catalogue, catalogue_of, code_of, speaking, words
from fedmerit.report.text import on_page
from fedmerit.settings import Corruption, planted
from sources import SOURCE, calls, texts

WORDS = {code: text for code, text in catalogue().items() if "." not in code}

# ----------------------------------------------------------------------------------------- the catalogue


def fields(words):
    """What a template takes, and in which form: name -> specs."""
    found = {}
    for _, name, spec, _ in string.Formatter().parse(words):
        if name is not None:
            found.setdefault(name, []).append(spec)
    return found


JOINED = re.compile("first|listed|so on|few|clauses|spaced|numbered", re.IGNORECASE)
"""How lists are written, see `fedmerit.notes`."""


def sample(code, words=None):
    """Values for everything that a template takes, as its placeholders need them."""
    values = {}
    for name, specs in fields(words or WORDS[code]).items():
        if name == "where":
            values["round"] = 4
        elif any(JOINED.match(spec) for spec in specs):
            values[name] = (2, 5) if any("numbered" in spec.lower() for spec in specs) else ("North", "South")
        elif any(spec == "quoted" for spec in specs):
            values[name] = "North"
        else:
            values[name] = 7
    return values


@pytest.mark.parametrize("code", WORDS)
def test_every_template_formats_with_its_values(code):
    values = sample(code)
    text = str(Note(code, **values))
    assert not re.search(r"[{}]", text)
    for name in fields(WORDS[code]):
        for value in values[name] if isinstance(values.get(name), tuple) else [values.get(name, "round 4: ")]:
            assert str(value) in text
    assert (code_of(Note(code, **values)), code_of(text)) == (code, "")


def test_every_code_is_made_somewhere_with_just_the_values_that_it_says():
    assert {*WORDS} - {*texts()} == set()
    assert len(calls("Note")) > 60
    for file, call in calls("Note"):
        said = [node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
        given = {keyword.arg for keyword in call.keywords}
        for code in (one for one in said if one in WORDS):
            takes = {"round" if name == "where" else name for name in fields(WORDS[code])}
            assert takes == given, (f"{file.name}:{call.lineno}", code)


def test_no_source_takes_its_own_words_apart():
    """No message, note or line is searched, cut or compared by its beginning or end: they have attributes."""
    words = r"(str\((error|also|note|line|text)\)|\b(error|note|line|message|said|told))"
    apart = re.compile(words + r"\.((starts|ends)with|remove(pre|suf)fix|replace|partition|find|index)\(")
    parsed = re.compile(r"\bre\.\w+\([^\n]*\b(str\(error\)|note|message)\b")
    compared = re.compile(r"\b(in|==|!=) str\((error|note)\)")
    for file in SOURCE.rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            own = not line.strip().startswith(("if not line.endswith(b",))  # bytes of a file
            assert not (own and apart.search(line)), (file.name, line)
            assert not parsed.search(line), (file.name, line)
            assert not compared.search(line), (file.name, line)


SECTION = re.compile(rf"({'|'.join(SECTIONS)})\.")


def test_an_error_about_a_setting_says_which_in_an_attribute_too():
    """What begins with the path of a setting is made by ``at``, or says ``setting=``."""
    for file, call in calls("ConfigError", "DataError"):
        first = next((one for one in ast.walk(call.args[0]) if isinstance(one, ast.Constant)), None)
        told = any(keyword.arg == "setting" for keyword in call.keywords)
        about = first is not None and isinstance(first.value, str) and SECTION.match(first.value)
        assert told or not about, (file.name, call.lineno)


# ------------------------------------------------------------------------------------------------- a note


def test_a_note_is_its_text_everywhere_and_stays_a_note_in_copies():
    one = Note("partly-zero", client="Ulm", seen=1, rounds=2)
    text = "member 'Ulm' reported 1 of 2 rounds; the rest counts as zero"
    assert (one == text, hash(one) == hash(text), json.dumps([one])) == (True, True, json.dumps([text]))
    assert f"{one}" == text
    assert type(str(one)) is str
    for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
        assert (again, again.code, again.values) == (one, one.code, one.values)


def test_the_page_has_words_of_its_own():
    why = Note("undefined", reason=Note("within-errors", score="ALPHA", positive=0.5, noise=1.0))
    told = Note("no-shares", why=why)
    assert told == (
        "no shares: the positive part of ALPHA is 0.5, no more than two standard errors (1); "
        "--rule equal pays everybody alike"
    )
    assert on_page(told) == told.replace("ALPHA", "contribution")
    none = Note("nothing-positive", score="LOO", positive=0.0)
    nothing = "nobody's LOO is above zero, so there is nothing to divide by"
    assert on_page(Note("undefined", reason=none)).startswith(nothing)
    assert on_page(Note("only-listed", client="Eve")).startswith("member 'Eve' is on the list of members but")
    assert on_page("client 'Eve' of somebody's own note") == "client 'Eve' of somebody's own note"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fenced", {"clients": list("ABCDEFG")}), "held back by the fence: A, B, C, D, E and 2 more"),
        (("aborted", {"rounds": [4, 5]}), "rounds 4 and 5 were aborted: the model stayed as it was"),
        (("file-older", {"file": "scores.csv", "rounds": 2}), "scores.csv is 2 rounds older than the ledger"),
        (
            ("gap", {"gaps": [Note("gap-between", earlier=k, later=k + 2) for k in (1, 3, 5, 7)]}),
            "there are no reports between rounds 1 and 3; 3 and 5; 5 and 7; and 1 more: nobody's score "
            "includes what changed then",
        ),
        (
            ("fallback", {"score": "FP", "round": None, "zero": ["alpha"], "used": "LOO"}),
            "FP: the sum of alpha over members is zero; computed from LOO alone",
        ),
    ],
)
def test_lists_and_numbers_read_as_one_says_them(words, said):
    code, values = words
    assert Note(code, **values) == said


# ------------------------------------------------------------------------------ what a rehearsal planted

A, B, C = "Ash {0}", "Bonn, Radiology", "Cork"


RANDOM = "labels were replaced by random ones on purpose:"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"label_noise": {A: 0.0}}, ""),
        ({"label_noise": {A: 0.8, B: 0.125, C: 0.0}},
         f"{RANDOM} 80% at {A}, 12.5% at “{B}” (corruption.label_noise)."),
        ({"label_noise": "ramp"},
         f'{RANDOM} from none at the first member to all at the last one (corruption.label_noise = "ramp").'),
        ({"label_flip": [A, C]},
         f"the labels of {A} and {C} were flipped on purpose (corruption.label_flip)."),
        ({"free_rider": {A: "zero", C: "stale"}},
         f"in place of training, {A} sent no change, {C} sent back the model of one round earlier on purpose "
         "(corruption.free_rider)."),
        ({"misstate": {A: 1.01, C: -2.0}},
         f"{A} stated 1.01 times its score, {C} stated -2 times its score on purpose (corruption.misstate)."),
    ],
)  # fmt: skip
def test_every_kind_of_planted_fault_is_told_and_one_member_reads_no_other_name(given, expected):
    expected = expected and f"Rehearsal: {expected}"
    assert planted(Corruption(**given)) == expected
    others = expected.replace(f"“{B}”", B).replace(B, words("name.somebody"))
    assert planted(Corruption(**given), seen_by=A) == others.replace(C, words("name.somebody"))


def test_of_very_many_only_some_are_named():
    many = [f"n{i}" for i in range(30)]
    assert "n11 and 18 more were flipped" in planted(Corruption(label_flip=many))
    riders = planted(Corruption(free_rider=dict.fromkeys(many, "zero")))
    assert "n11 sent no change, and so on for 18 more on purpose" in riders


def test_german_notes_have_german_quotation_marks_and_code_stays_code():
    with speaking("de"):
        assert "Mitglied „Ulm“ hat 1 von 2 Runden" in Note("partly-zero", client="Ulm", seen=1, rounds=2)
        assert "„Sankt Anna's\\n“" in Note("never-summed", client="Sankt Anna's\n")
        assert "„U\\u0308lm“ und „\\xdclm“" in Note("composed-alike", client="U\u0308lm", other="Ülm")
        assert "Status „reversed“, nicht „ok“" in Note("status", score="FP", status="reversed")
        undefined = Note("undefined", reason="x")
    assert "--rule equal zahlt allen gleich viel" in undefined
    assert "member 'Ulm' reported" in Note("partly-zero", client="Ulm", seen=1, rounds=2)


def test_a_percentage_has_a_space_in_german_and_none_in_english():
    loose = re.compile(r"[0-9}]\s%(?![a-z])")
    assert [code for code, text in catalogue_of("en").items() if loose.search(text)] == []
    tight = re.compile(r"[0-9}]%(?!})")
    assert [code for code, text in catalogue_of("de").items() if tight.search(text)] == []
