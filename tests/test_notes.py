"""Words for people: one catalogue, codes that are made where they are meant, names that never leak."""

import ast
import copy
import json
import pickle
import re
import string
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.config import SECTIONS, Corruption
from fedmerit.notes import NAMES, PLAIN, Note, catalogue, catalogue_of, code_of, planted, speaking, words
from fedmerit.report.text import on_page, on_terminal
from sources import SOURCE, calls, texts

WORDS = {code: text for code, text in catalogue().items() if "." not in code}

# ----------------------------------------------------------------------------------------- the catalogue

LISTS = {
    "clients": ("North", "South"),
    "zero": ("alpha", "LOO"),
    "packages": ("torch 2.4", "safetensors 0.4"),
    "doubts": ("One. Two.", "Three."),
    "each": (Note("rider-zero", client="North"), Note("rider-stale", client="South")),
    "faults": (Note("planted-flips", clients=["North"]),),
    "gaps": (Note("gap-between", earlier=1, later=3),),
    "jumps": (Note("jump-between", earlier=1, later=2, ends=0.5, begins=0.25),),
    "files": (Note("file-gone", file="scores.csv"),),
    "columns": ("comment", "checked by"),
    "sums": (Note("kept-sum", round=2, clients=["North"]),),
}
NUMBERS = dict.fromkeys(
    [
        "aborted", "budget", "amount", "begins", "closed", "decision", "earlier", "ends", "gain", "heads",
        "first", "constant", "mean", "sd",
        "joined", "later", "least", "members", "own", "pairs", "percent", "planned", "positive", "pot",
        "record", "records", "reports", "round", "seen", "signed", "sum", "there", "total", "unreported",
        "counter", "count", "disk", "bytes", "size", "factor", "lines", "most", "runs", "changes",
        "holding", "equations", "needed", "part", "cores",
    ],
    7,
)  # fmt: skip
NESTED = {
    "reason": Note("status", score="FP", status="reversed"),
    "why": Note("undefined", reason=Note("status", score="FP", status="reversed")),
    "place": Note("place", record=5, rounds=2),
    "how": Note("differs-how", what="v(M)", own=0.5, utility="accuracy", used=0.25),
    "instead": Note("payouts-instead", decision=1),
    "after": Note("payouts-after", round=2, planned=3),
    "mine": Note("payouts-mine", amount=Decimal("1.5"), currency=" EUR", client="North"),
}
NESTED["departures"] = (Note("departs-in", term="rule", used="fair", signed="fenced"),)
NESTED["departs"] = Note("departs", departures=NESTED["departures"])
TEXTS = {
    "client": "North",
    "other": "South",
    "roster": "roster.toml",
    "path": "runs/North",
    "option": "--on",
    "text": "North",
    "meant": "North",
}


def fields(words):
    """What a template takes, and in which form: name -> specs."""
    found = {}
    for _, name, spec, _ in string.Formatter().parse(words):
        if name is not None:
            found.setdefault(name, []).append(spec)
    return found


def sample(code, words=None):
    """Values for everything that a template takes."""
    values = {}
    for name, specs in fields(words or WORDS[code]).items():
        if name == "where":
            values["round"] = 4
        elif name == "rounds":
            values[name] = (2, 5) if {"numbered", "it|them"} & set(specs) or code in LISTED else 2
        elif name in ("noise", "used"):
            values[name] = 7 if "g" in "".join(specs) else "ramp"
        else:
            values[name] = {**NUMBERS, **LISTS, **NESTED, **TEXTS}.get(
                name, "plain" if name in PLAIN else None
            )
            assert values[name] is not None, f"{code}: no sample of {name}"
    return values


LISTED = ("kept-same", "kept-lost")
"""Notes whose rounds are numbers, not a count."""


@pytest.mark.parametrize("code", WORDS)
def test_every_template_formats_with_its_values(code):
    values = sample(code)
    text = str(Note(code, **values))
    assert not re.search(r"[{}]", text)
    for name in fields(WORDS[code]):
        for shown in values[name] if isinstance(values.get(name), tuple) else [values.get(name, "round 4: ")]:
            assert str(shown) in text
    assert (code_of(Note(code, **values)), code_of(text)) == (code, "")


@pytest.mark.parametrize("writer", ["note-on-page", "note-on-terminal"])
def test_other_words_are_of_known_codes_and_need_no_more_than_these_have(writer):
    other = {
        code.partition(".")[2]: text for code, text in catalogue().items() if code.startswith(f"{writer}.")
    }
    assert other
    for code, text in other.items():
        assert set(fields(text)) <= {*fields(WORDS[code]), "option"}, code
        assert str(Note(code, **sample(code)).worded(writer, option="--on"))


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


def test_the_page_and_the_command_line_have_words_of_their_own():
    why = Note("undefined", reason=Note("within-errors", score="ALPHA", positive=0.5, noise=1.0))
    library = (
        "no shares: the positive part of ALPHA is 0.5, no more than two standard errors (1); "
        "on_undefined='equal' or 'zero' decides such a case"
    )
    told = Note("no-shares", why=why)
    assert told == library
    assert on_terminal(told, "--on-undefined") == library.replace(
        "on_undefined='equal' or 'zero'", "--on-undefined equal or zero"
    )
    assert on_page(told) == (
        "no shares: the positive part of contribution is 0.5, no more than two standard errors (1); "
        "fedmerit rewards --on-undefined equal or zero decides such a case"
    )
    none = Note("nothing-positive", score="LOO", positive=0.0)
    nothing = "nobody's LOO is above zero, so there is nothing to divide by"
    assert on_page(Note("undefined-decided", reason=none, decided="equal")) == nothing
    assert on_page(Note("only-listed", client="Eve")).startswith("member 'Eve' is on the list of members but")
    assert on_page("client 'Eve' of somebody's own note") == "client 'Eve' of somebody's own note"
    assert on_terminal("plain") == "plain"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fenced", {"clients": list("ABCDEFG")}), "held back by the fence: A, B, C, D, E and 2 more"),
        (("aborted", {"rounds": [4]}), "round 4 was aborted: the model stayed as it was"),
        (("aborted", {"rounds": [4, 5]}), "rounds 4 and 5 were aborted: the model stayed as it was"),
        (("file-older", {"file": "scores.csv", "rounds": 1}), "scores.csv is 1 round older than the ledger"),
        (("file-older", {"file": "scores.csv", "rounds": 2}), "scores.csv is 2 rounds older than the ledger"),
        (
            ("gap", {"gaps": [Note("gap-between", earlier=k, later=k + 2) for k in (1, 3, 5, 7)]}),
            "there are no reports between rounds 1 and 3; 3 and 5; 5 and 7; and 1 more: what changed then is "
            "in nobody's score",
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


# ------------------------------------------------------------------------------------------- pseudonyms

ODD = [
    "the", "round", "client", "1", "10", "0", "A", "AA", "Ulm", "Ulm 2", ".*", "(?i)x", "<b>", "</p>", "{0}",
    "%s", "Member A", "another member", "withheld", "alpha", "é", "e\u0301", "scores.csv", "'", '"', ", and",
]  # fmt: skip
names = st.lists(
    st.one_of(st.sampled_from(ODD), st.text(min_size=1, max_size=8)), min_size=2, max_size=2, unique=True
)


def with_names(code, one, other):
    """A note in which everything that could be a name, or hold one, is or does."""
    values = {}
    for key, value in sample(code).items():
        if key in NAMES:
            value = {"client": one, "other": other, "clients": (one, other)}[key]
        elif isinstance(value, Note):
            value = with_names(value.code, one, other)
        elif isinstance(value, tuple) and isinstance(value[0], Note):
            value = tuple(with_names(item.code, one, other) for item in value)
        elif isinstance(value, str) and key not in PLAIN:
            value = f"{one} of {other}"
        values[key] = value
    return Note(code, **values)


@given(names, st.sampled_from(sorted(WORDS)))
def test_whatever_members_are_called_their_pseudonyms_make_the_same_text(real, code):
    one, other = real
    plain = with_names(code, "North", "South").renamed({"North": "Member A", "South": "Member B"})
    hidden = with_names(code, one, other).renamed({one: "Member A", other: "Member B"})
    assert hidden == plain
    assert "North" not in plain
    assert "South" not in plain


def test_who_has_no_pseudonym_is_not_named_and_lists_follow_the_new_names():
    told = Note("fenced", clients=["Ulm", "Bonn", "Eve"]).renamed({"Ulm": "Member C", "Bonn": "Member B"})
    assert told == f"held back by the fence: Member B, Member C, {words('name.somebody')}"
    assert (
        Note("kept-heads", heads=2, path="/data/Ulm").renamed({})
        == "kept: all 2 heads in DIR are on the chain"
    )
    assert "Ulm" not in Note("keys", roster="Ulm.toml", hash="ab").renamed({})


# ------------------------------------------------------------------------------ what a rehearsal planted

A, B, C = "Ash {0}", "Bonn, Radiology", "Cork"
HIDDEN = {A: "Member C", B: "Member A", C: "Member B"}


@pytest.mark.parametrize(
    ("given", "expected", "hidden"),
    [
        ({}, "", ""),
        ({"label_noise": {A: 0.0}}, "", ""),
        (
            {"label_noise": {A: 0.8, B: 0.125, C: 0.0}},
            f"Rehearsal: labels were replaced by random ones on purpose: 80% at {A}, 12.5% at “{B}” "
            "(corruption.label_noise).",
            "Rehearsal: labels were replaced by random ones on purpose: 12.5% at Member A, 80% at Member C "
            "(corruption.label_noise).",
        ),
        (
            {"label_noise": "ramp"},
            "Rehearsal: labels were replaced by random ones on purpose: from none at the first member to all "
            'at the last one (corruption.label_noise = "ramp").',
            "Rehearsal: labels were replaced by random ones on purpose: from none at the first member to all "
            'at the last one (corruption.label_noise = "ramp").',
        ),
        (
            {"label_flip": [A, C]},
            f"Rehearsal: the labels of {A} and {C} were flipped on purpose (corruption.label_flip).",
            "Rehearsal: the labels of Member B and Member C were flipped on purpose (corruption.label_flip).",
        ),
        (
            {"free_rider": {A: "zero", C: "stale"}, "test_set": [B]},
            f"Rehearsal: in place of training, {A} sent no change, {C} sent back the model of one round "
            f"earlier on purpose (corruption.free_rider); {B} trained on test samples on purpose "
            "(corruption.test_set).",
            "Rehearsal: in place of training, Member B sent back the model of one round earlier, Member C "
            "sent no change on purpose (corruption.free_rider); Member A trained on test samples on purpose "
            "(corruption.test_set).",
        ),
        (
            {"duplicate": {C: A}},
            f"Rehearsal: {C} trained on the data of {A} on purpose (corruption.duplicate).",
            "Rehearsal: Member B trained on the data of Member C on purpose (corruption.duplicate).",
        ),
        (
            {"misstate": {A: 1.01, C: -2.0}},
            f"Rehearsal: {A} stated 1.01 times its score, {C} stated -2 times its score on purpose "
            "(corruption.misstate).",
            "Rehearsal: Member B stated -2 times its score, Member C stated 1.01 times its score on purpose "
            "(corruption.misstate).",
        ),
    ],
)
def test_every_kind_of_planted_fault_is_told(given, expected, hidden):
    assert planted(Corruption(**given)) == expected
    assert planted(Corruption(**given), HIDDEN) == hidden


def test_a_name_without_a_pseudonym_is_not_told():
    assert "Cork" not in planted(Corruption(label_flip=[C], duplicate={A: C}), {A: "Member A"})


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
        decided = Note("undefined-decided", reason=Note("no-division"), decided="equal")
    assert "on_undefined='equal' hat entschieden" in decided
    assert "member 'Ulm' reported" in Note("partly-zero", client="Ulm", seen=1, rounds=2)


def test_a_percentage_has_a_space_in_german_and_none_in_english():
    loose = re.compile(r"[0-9}]\s%(?![a-z])")
    assert [code for code, text in catalogue_of("en").items() if loose.search(text)] == []
    tight = re.compile(r"[0-9}]%(?!})")
    assert [code for code, text in catalogue_of("de").items() if tight.search(text)] == []
