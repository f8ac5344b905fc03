"""A page under pseudonyms is the same, byte for byte, whatever the members are called."""

import re
import shutil
import sqlite3
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sample import HOSTILE, NAMES, rounds, write_scores

from fedmerit.config import from_dict
from fedmerit.notes import Note, planted
from fedmerit.report.facts import Facts
from fedmerit.report.page.html import HIDDEN, facts_of, page, refreshed, render
from fedmerit.report.source import Source, pseudonymised
from fedmerit.scoring.types import Reports
from fedmerit.scoring.validate import two_spellings

WORDS = (
    "member", "contribution", "North, South", "1", "12", "2", "A", "AB", "Member B", "another member", ".*",
    "(", "\\1", "[a-z]+", "$", "{client}", "<b>", "&amp;", "fair", "round", "aborted", "Ulm", "ulm 2",
)  # fmt: skip
called = st.lists(
    st.one_of(st.sampled_from(WORDS), st.text(min_size=1, max_size=6).filter(str.strip)),
    min_size=5,
    max_size=5,
    unique=True,
).filter(lambda names: two_spellings(names) is None)


def source_of(names):
    """Five members, of whom the last never reported, and text about them wherever a source can hold any."""
    told = rounds(tuple(names[:4]))
    third = told[2]
    told[2] = Reports(
        empty=third.empty, grand=third.grand, alone=third.alone[:3], without=third.without[:3],
        clients=third.clients[:3], silent=third.clients[3:], se_alpha=third.se_alpha[:3], slice=third.slice,
        utility=third.utility, round=5,
    )  # fmt: skip
    how = Note("differs-how", what="v(M)", own=0.5, utility="accuracy", used=0.25)
    faults = from_dict(
        {"corruption": {"label_noise": {"North": 0.5}, "duplicate": {"South": "East"}},
         "partition": {"names": ["North", "South", "East"]}}
    ).corruption  # fmt: skip
    faults = replace(faults, label_noise={names[0]: 0.5}, duplicate={names[1]: names[2]})
    return Source(
        rounds=tuple(told),
        clients=tuple(names),
        aborted={4: f"stage masked, member {names[1]}: lost {names[2]!r:.3}"},
        broken=f"record 7 (report by {names[3]}): not signed by {names[3].upper()}",
        broken_record=7,
        changed=("scores.csv", f"scores.csv line 3: {names[0]!a}"),
        corruption=faults,
        checks=(
            Note("differs", round=1, client=names[2], how=how),
            Note("payouts-mine", amount=1.5, currency="", client=names[1]),
            Note("files-by-command", path=f"/runs/{names[0]}"),
            planted(faults),
        ),
        names={name: name for name in names},
    )


def hidden(names):
    source = source_of(names)
    return render(Facts(pseudonymised(source), source))


@pytest.fixture(scope="module")
def plain():
    return hidden([*NAMES, "Quincy"])


@pytest.mark.long
@given(called)
@example([*HOSTILE, "Quincy"])
@example(["Member B", "Member A", "Member C", "Member D", "Member E"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_page_is_the_same_whatever_the_members_are_called(plain, names):
    assert hidden(names) == plain


def test_it_holds_no_name_and_says_what_it_does_not_tell(plain):
    for name in (*NAMES, "Quincy"):
        assert name not in re.sub(r"<script.*?</script>", "", plain, flags=re.S)
    assert "Record 7 is wrong. This page does not say how, because that may name members" in plain
    assert "not scored: aborted" in plain
    assert "`fedmerit page DIR` or" in plain
    source = source_of([*NAMES, "Quincy"])
    named = render(Facts(source, source))
    assert "not signed by WEST" in named
    assert "not scored: stage masked, member South" in named


def test_a_note_without_a_code_is_shown_with_names_and_not_at_all_without(tmp_path):
    path = write_scores(tmp_path)
    for pseudonyms in (False, True):
        facts = facts_of(path, pseudonyms=pseudonyms)
        vars(facts)["notes"] = ("client 'North' of somebody's own note",)
        text = render(facts)
        assert ("client &#39;North&#39; of somebody&#39;s own note" in text) != pseudonyms


WORDS_OF_SETTINGS = ["additive", "mlp", "fedavg", "uniform", "iid"]


def test_a_member_that_is_called_like_a_setting_changes_no_setting(tmp_path):
    """A setting in which a pseudonym stands would tell that somebody is called as its value."""
    shown = []
    for names in (["Abbey", "Bridge", "Castle", "Dale", "Elm"], WORDS_OF_SETTINGS):
        config = from_dict(
            {"partition": {"names": names}, "participation": {"away": {names[1]: [1]}},
             "corruption": {"duplicate": {names[2]: names[0]}, "label_flip": [names[3]]}}
        )  # fmt: skip
        source = replace(source_of(names), settings=config.as_dict())
        shown.append(pseudonymised(source).settings)
    assert shown[0] == shown[1]
    assert shown[1]["scoring"]["game"] == "additive"
    assert shown[1]["corruption"]["duplicate"] == {"Member C": "Member A"}
    assert shown[1]["participation"]["away"] == {"Member B": [1]}


@pytest.mark.parametrize("how", ["tampered", "copy"])
def test_of_a_run_that_does_not_verify(run_folder, tmp_path, how):
    folder = shutil.copytree(run_folder, tmp_path / "Castle")
    if how == "tampered":
        db = sqlite3.connect(folder / "ledger.sqlite")
        db.execute("UPDATE records SET author = 'Castle' WHERE author = 'Dale'")
        db.commit()
        db.close()
    else:
        path = folder / "scores.csv"
        path.write_text(path.read_text().replace("Castle", "Cast1e"))
    text = page(folder, pseudonyms=True)
    for name in ("Abbey", "Bridge", "Castle", "Cast1e", "Dale", "Elm"):
        assert name not in text
    assert "because that may name members: `fedmerit verify` does" in text
    source = facts_of(folder, pseudonyms=True).source
    assert (source.broken_record or 0) > 1 if how == "tampered" else source.changed[0] == "scores.csv"
    assert (f"Record {source.broken_record} is wrong" in text) == (how == "tampered")


def test_a_page_that_is_written_anew_goes_on_to_hide_names(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    text = page(folder, pseudonyms=True)
    assert text.count(HIDDEN) == 1
    (folder / "page.html").write_text(text, encoding="utf-8")
    assert refreshed(folder) == f"{folder / 'page.html'} shows this decision"
    assert (folder / "page.html").read_text(encoding="utf-8") == text
    assert HIDDEN not in page(folder)
