"""One catalogue of words: every code exists and is used, placeholders fit, a second language is a file."""

import ast
import json
import re
import shutil
import string
from dataclasses import fields
from functools import cache
from html import unescape
from typing import get_args

import jinja2
import pytest

from fedmerit import notes
from fedmerit.files.reports import TEMPLATE
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import LANGUAGES, MARKS, catalogue, catalogue_of, words
from fedmerit.protocol.terms import FLOWER, NVFLARE, REHEARSALS
from fedmerit.report import terminal
from fedmerit.report.exports import STANDINGS
from fedmerit.report.facts import Happened
from fedmerit.report.page.html import SIGNED, facts_of, page, render
from fedmerit.report.statement import as_markdown
from fedmerit.scoring.rewards import Rule
from fedmerit.scoring.types import UNIT_UTILITIES, Status
from runs import facts_as_decided, record_decision
from sample import NAMES, changed, write_scores
from sources import SOURCE, nodes, texts

MISSED = {*get_args(Happened)} - {"counted"}
SCORES = {"LOO", "IOI", "FP", "EE", "COS", "MERIT"}
WAYS = {"rose", "fell", "same"}
MEASURES = {"neg-loss", "rmse-skill", "mae-skill", "auc", "f1", "c-index", *UNIT_UTILITIES}
BY_KEY = {
    "template": {*TEMPLATE},
    "column": {*STANDINGS} - {"score"} | {
        "member", "round", "rounds", "samples", "value", "share-span", "payout", "payout-span", "payout_low",
        "payout_high",
    },
    "measure": {"none", *MEASURES},
    "measure-means": MEASURES,
    "score": {"ALPHA", "PHI", "PANEL"},
    "term": {one.name for one in fields(Terms)} - {"budget", "despite_doubts"},
    "term-value": {"none"},
    "score-means": {"ALPHA", "PHI", "PANEL", *SCORES},
    "score-of-yours": {"ALPHA", "PHI", "PANEL", *SCORES},
    "unsettled": {
        "unfinished", "no-PHI", "no-PANEL", "not-drawn", "no-judges",
        "not-agreed", "no-gain", "no-rounds", "not-finite", "damaged",
        "off-gain", "no-gradient", "not-last",
    },
    "doubt-of": {
        f"{code}-{part}"
        for code in ("changes", "renormalised", "unchecked", "chance", "mean")
        for part in ("title", "text", "short")
    },
    "lie": {"stated", "part", "pair", "range", "sum"},
    "rule": {*get_args(Rule), "hands"},
    "signed-col": {*SIGNED},
    "glance": {
        "of", "budget", "paid", "approved", "members", "rounds", "model", "equations", "columns", "ledger",
        "verified", "broken", "lacking",
    },
    "rule-in-short": {*get_args(Rule), "hands"},
    "status": {"none", *get_args(Status)},
    "status-short": {"none", *get_args(Status)},
    "why": MISSED,
    "why-you": MISSED - {"unknown"},
    "truth": {"SV", "MR-SV", "ROUND-SV"},
    "holder": REHEARSALS,
    "engine": {*REHEARSALS, FLOWER, NVFLARE},
    "stage": {"rounds", *terminal.STAGES, *terminal.COUNTED},
    "change": WAYS | {f"{way}-between" for way in WAYS},
    "list": {
        "comma", "clause", "last", "more", "so-on", "few", "rounds", "clients", "quoted", "quotes",
        "where", "counts",
    },
}  # fmt: skip
"""Sections whose codes are made from a value, and all values that there are."""


def fields(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None} - set(MARKS)


@cache
def said_in_python():
    """Where, code and the values given, of every call of ``words`` whose codes stand in the same function."""
    return [*calls_of_words()]


def calls_of_words():
    for file, function in nodes()[ast.FunctionDef]:
        inside = [*ast.walk(function)]
        assigned = {}
        for node in inside:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                assigned.setdefault(node.targets[0].id, []).extend(branches(node.value))
        for node in inside:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "words":
                first = node.args[0]
                codes = assigned.get(first.id, []) if isinstance(first, ast.Name) else branches(first)
                for code in codes:
                    if isinstance(code, ast.Constant):
                        given = {key.arg for key in node.keywords}
                        if None in given:  # values in a dictionary, which is made elsewhere
                            continue
                        yield f"{file.name}:{node.lineno}", code.value, given


def branches(node):
    """The expressions that a chain of conditions can give."""
    return [*branches(node.body), *branches(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def said_in_templates():
    for file in (SOURCE / "report/page").glob("*.html"):
        tree = jinja2.Environment().parse(file.read_text(encoding="utf-8"))
        for call in tree.find_all(jinja2.nodes.Call):
            if isinstance(call.node, jinja2.nodes.Name) and call.node.name in ("words", "marked"):
                codes = [*call.args[0].find_all(jinja2.nodes.Const)]
                if isinstance(call.args[0], jinja2.nodes.Const):
                    codes = [call.args[0]]
                for one in codes:
                    if one.value in catalogue() or "." in str(one.value):
                        yield f"{file.name}:{call.lineno}", one.value, {key.key for key in call.kwargs}


def literals():
    """Every string in the source, and in the calls of the templates."""
    yield from texts()
    yield from (code for _, code, _ in said_in_templates())


SECTIONS = {code.partition(".")[0] for code in catalogue() if "." in code}


def by_key(code):
    return code.partition(".")[0] in BY_KEY


def test_every_code_that_is_said_exists():
    written = [one for one in literals() if re.fullmatch(rf"({'|'.join(SECTIONS)})\.[\w-]+", one)]
    assert len(set(written)) > 300
    names = {"page.html", "page.css", "page.js", "file.read", "round.svg", "money.js", "statement.css"}
    assert sorted(set(written) - set(catalogue()) - names) == []


def test_every_entry_is_said_somewhere():
    used = set(literals())
    assert [code for code in catalogue() if "." in code and not by_key(code) and code not in used] == []


@pytest.mark.parametrize("section", BY_KEY)
def test_a_section_that_is_asked_by_value_has_all_values_and_no_other(section):
    assert {code.partition(".")[2] for code in catalogue() if code.startswith(f"{section}.")} == BY_KEY[
        section
    ]


def test_what_is_said_gives_just_the_values_that_the_words_take():
    calls = [*said_in_python(), *said_in_templates()]
    assert len(calls) > 300
    for where, code, given in calls:
        if not by_key(code) or given:
            assert fields(catalogue()[code]) == given, (where, code)


def test_no_words_hold_html():
    """Marks are the only way to tags, so a catalogue can neither open nor break one."""
    assert [code for code, text in catalogue().items() if re.search(r"[<>&]", text)] == []


# --------------------------------------------------------------------------------------- a second language


def upper(text):
    """The words in capital letters, but what is filled in, and what is code, as it is."""
    made, code = [], False
    for literal, name, spec, conversion in string.Formatter().parse(text):
        made.append(literal if code else literal.upper())
        if name is not None:
            code = name == "code" or (code and name != "/code")
            spec = spec.upper() if spec and "|" in spec else spec
            made.append(
                "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            )
    return "".join(made)


@pytest.fixture
def second_language(monkeypatch):
    other = {code: upper(text) for code, text in catalogue().items()}
    monkeypatch.setattr(notes, "catalogue", lambda: other)
    return other


MEMBERS = {"Abbey", "Bridge", "Castle", "Dale", "Elm"}
VALUES = {
    *get_args(Rule), *MEMBERS, *NAMES, "fedmerit", "embedded", "ramp", "label", "noise", "corruption",
    "accuracy", "expected", "balanced", "brier", "scores", "csv", "dice", "run",
}  # fmt: skip
"""What is no word: names, rules, utilities, settings, files."""


def left_over(text):
    """Words of the first language on a page: scripts, code and settings are not read as words."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, flags=re.S)[1])
    rules = data.get("rules", {}).values()
    said = [rule[key] for rule in rules for key in ("problem", "about")]
    said += [note for rule in rules for note in rule["notes"]]
    said += [*data.get("words", {}).values(), *re.findall(r'(?:aria-label|title)="([^"]*)"', text)]
    said += re.findall(r'"title":"([^"]*)"', json.dumps(data["charts"]).replace(": ", ":"))
    body = re.sub(r"<(script|style|code)\b.*?</\1>", " ", text, flags=re.S)
    body = re.sub(r'<th scope="row">[a-z_]+\.[a-z0-9_]+</th>', " ", body)  # settings
    said.append(re.sub(r"<[^>]*>", " ", body))
    read = unescape(" ".join(said))
    return set(re.findall(r"[A-Za-z]*[a-z][A-Za-z]+", read)) - VALUES - {"ab"}  # letters of groups


def test_a_whole_page_has_no_word_of_the_first_language(run_folder, tmp_path, second_language):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    record_decision(folder, Terms("1000.00", "brier", score="LOO", floor=0.05))
    assert left_over(page(folder)) == set()


def test_nor_has_a_page_of_reports_in_doubt(tmp_path, second_language):
    path = write_scores(tmp_path, companion=True)

    def change(content):
        content["clients"].append("Quiet")
        content["truth"] = {"MR-SV": [4, 3, 2, 1, 0]}
        last = content["rounds"][2]
        last["silent"] = [last["participants"].pop()]
        for values in last["reports"].values():
            if isinstance(values, list):
                values.pop()
        first = content["rounds"][0]["reports"]
        first["alone"], first["without"] = first["without"], first["alone"]
        content["rounds"].append(
            {"round": 4, "participants": [], "reports": None, "scores": None, "aborted": True}
        )

    changed(path, change)
    facts = facts_of(path)
    assert facts.doubts
    assert facts.unscored == ("Quiet",)
    assert left_over(render(facts)) - {"Quiet"} == set()


def test_nor_has_a_statement_or_the_terminal(run_folder, tmp_path, second_language, capsys):
    from rich.console import Console

    folder = shutil.copytree(run_folder, tmp_path / "run")
    record_decision(folder, Terms("1000.00", "expected-accuracy"))
    facts = facts_as_decided(folder)
    for name in MEMBERS:
        told = re.sub(r"`[^`]*`|[0-9a-f]{32,64}", "", as_markdown(facts, name))
        assert set(re.findall(r"[A-Za-z]*[a-z][A-Za-z]+", told)) - VALUES == set()
    terminal.print_facts(Console(width=200), facts)
    told = capsys.readouterr().out
    assert set(re.findall(r"[A-Za-z]*[a-z][A-Za-z]+", told)) - VALUES - {"alpha"} == set()


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_language_has_all_words_with_the_same_values_and_marks(language):
    first, other = catalogue_of("en"), catalogue_of(language)
    assert set(other) == set(first)
    for code, said in first.items():
        placed, there = ([*string.Formatter().parse(text)] for text in (said, other[code]))
        assert {one[1] for one in placed} - {None} == {one[1] for one in there} - {None}, code
        assert {one[3] for one in placed if one[1]} == {one[3] for one in there if one[1]}, code
        assert not re.search(r"[<>&]", other[code]), code


ENGLISH = """
the of and is are were with without from by for to member members round rounds share shares rule
paid pays payout payouts model worse better rank ranks which who what how sure not this that these
those than each every all nobody somebody they their its it has have had can cannot be been would
reported report reports stated statement ledger record records signed update updates score scores
sum sums gain samples coordinator quality change changed measure measures table page settings value
interval intervals contribution contributions because but only other others between before after
"""
"""Words that no German page says."""


def test_no_german_word_is_english():
    quoted, settings = r""""[^"]*"|'[^']*\'""", r"--[\w-]+|fedmerit [\w-]+|\w+\.\w+"
    code = re.compile(rf"\{{code\}}.*?\{{/code\}}|\{{[^}}]*\}}|{quoted}|{settings}")
    for name, text in catalogue_of("de").items():
        found = {*ENGLISH.split()} & {*re.findall(r"[A-Za-zÄÖÜäöüß]+", code.sub(" ", text))}
        assert not found - {"without"}, (name, text)  # which is also a column


def test_values_are_filled_in_and_marks_are_the_writers():
    said = words(
        "statement.paid", {"b": "**", "/b": "**"}, amount="5.00", budget="9.00", share=0.5, rule="fair"
    )
    assert said == "**5.00** of 9.00, for a share of 50.00%, by the rule “fair”."
    with pytest.raises(KeyError):
        words("statement.paid", amount="5.00")
