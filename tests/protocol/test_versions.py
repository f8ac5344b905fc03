"""Members with other versions of the package: one of them runs in a process with a copy of it.

The copy stands for another release that is installed on that member's machine. Versions with one protocol
work together. Otherwise the member does not join, and whoever runs the server is told what to install.
"""

import os
import shutil
from pathlib import Path

import pytest

from fedmerit.config import VERSION
from fedmerit.errors import MessageError, VersionError
from fedmerit.protocol.messages import FORMAT, PROTOCOL, Ask, Parcel, pack
from linear_federation import Federation
from mixed_federation import OTHER, Mixed, Process
from refusals import refused

ROOT = Path(__file__).parents[2]


def copied(home, *changes):
    """A path with a copy of the package, in which some lines are others, and with the tests' modules."""
    copy = home / "installed"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in changes:
        text = (copy / "fedmerit" / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} no longer says {old!r}"
        (copy / "fedmerit" / file).write_text(text.replace(old, new), encoding="utf-8")
    return os.pathsep.join(map(str, (copy, ROOT / "tests" / "support")))


@pytest.fixture
def mixed(tmp_path):
    made = []

    def federation(*changes, **given):
        found = Mixed(tmp_path, rounds=2, files=True, **given)
        found.elsewhere = Process(tmp_path, copied(tmp_path, *changes))
        made.append(found.elsewhere)
        return found

    yield federation
    for process in made:
        process.close()


def test_versions_with_one_protocol_work_together(mixed):
    federation = mixed(("config.py", f'VERSION = "{VERSION}"', 'VERSION = "7.8.9"'))
    assert federation.elsewhere.said["version"] == "7.8.9"
    federation.run()
    assert [set(one.reports) for one in federation.rounds] == [set(federation.names)] * 2
    assert any(line.startswith("rounds: 2 of 2") for line in federation.verified())


def test_a_member_with_another_protocol_does_not_join_and_says_what_to_install(mixed):
    changes = [
        ("config.py", f'VERSION = "{VERSION}"', 'VERSION = "7.8.9"'),
        ("protocol/messages.py", f"PROTOCOL: Final = {PROTOCOL}\n", f"PROTOCOL: Final = {PROTOCOL + 1}\n"),
    ]
    federation = mixed(*changes).run()
    assert [set(one.reports) for one in federation.rounds] == [{*federation.names} - {OTHER}] * 2
    said = str(federation.errors(OTHER)[0])
    assert said.startswith("VersionError: ")
    assert f"member {OTHER}" in said
    assert f"the server has fedmerit {VERSION} and speaks protocol {PROTOCOL}" in said
    assert f"this member has fedmerit 7.8.9 and speaks protocol {PROTOCOL + 1}" in said


def test_a_member_that_lacks_a_feature_names_it(mixed):
    """The run needs what only later versions can do."""
    federation = mixed(terms={"features": ["sparse-sums"], "version": "7.8.9"}).run()
    assert all(one.aborted for one in federation.rounds)
    for name in federation.names:
        said = str(federation.errors(name)[0])
        assert f"member {name}" in said
        assert "the server (fedmerit 7.8.9) proposes a run with 'sparse-sums'" in said
        assert f"fedmerit {VERSION}" in said


def test_a_member_that_knows_the_feature_joins(mixed):
    federation = mixed(
        ("protocol/terms.py", 'FEATURES = ("settlement", ', 'FEATURES = ("sparse-sums", '),
        terms={"features": ["sparse-sums"]},
    )
    with federation.begun():
        assert [name for name in federation.names if not federation.errors(name)] == [OTHER]


@pytest.mark.parametrize(
    ("terms", "kind", "named"),
    [
        *(({"protocol": one}, VersionError, f"protocol {one!r}") for one in (2, 3, "4", True, None)),
        *(({"features": one}, MessageError, "features of") for one in (None, "sparse-sums", [1], {})),
    ],
)
def test_terms_of_another_protocol_or_with_features_that_are_no_list_are_refused(
    tmp_path, terms, kind, named
):
    with Federation(tmp_path, rounds=1, ledger=False, terms=terms).begun() as federation:
        (error,) = federation.errors("client-0")
        assert type(error) is kind
        assert named in str(error)


def head_of(form, *more):
    return Parcel(pack([form, *more]))


def test_the_envelope_of_another_protocol_is_recognised_whatever_is_in_it():
    with pytest.raises(VersionError, match=r"member A: the server has fedmerit 2\.0 and speaks protocol 12,"):
        Ask.unpack(head_of("fedmerit remote 12", "2.0", [1, {}], *range(100)), reader="A")
    with pytest.raises(VersionError, match="the server speaks protocol 12,"):  # no text of its choice
        Ask.unpack(head_of("fedmerit remote 12", "install this: evil.example", b""))


@pytest.mark.parametrize(
    "head",
    [b"", b"\xc1", pack(7), pack([]), pack([7]), pack(["fedmerit remote"]), pack(["fedmerit remote x", "1"]),
     pack([FORMAT]), pack([FORMAT, "0.1.0", b""]), pack([FORMAT, b"", b"", b""]), b"\xdd\xff\xff\xff\xff",
     pack(["fedmerit remote 9999999999999", "1"]), pack(["x" * 300])],
)  # fmt: skip
def test_what_is_no_message_is_called_that(head):
    with refused(MessageError):  # and no VersionError
        Ask.unpack(Parcel(head))
