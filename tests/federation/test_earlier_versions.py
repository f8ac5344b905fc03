"""Earlier versions as they really were: files from this repository's history, in a process of their own.

test_versions.py changes a copy of today's package; here nothing is changed. ``EARLIER`` lists the commits. A
version whose protocol is today's must work with it in both directions; any other is refused, and nothing of
that member is signed or summed.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from mixed_federation import OTHER, Mixed, Process

from fedmerit.config import VERSION
from fedmerit.identity import Roster, write_roster
from fedmerit.protocol.messages import PROTOCOL
from fedmerit.storage.run_folder import snapshot

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = " ".join((ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class Earlier:
    """What is known of a commit.

    Args:
        tests: the commit whose tests/linear_federation.py fits its package.
        protocol: what it speaks.
        version: of its package.
        refuses: what its member says to today's server; empty if the two work together.
        named: whether its roster names the server.
    """

    tests: str
    protocol: int
    version: str = "0.1.0"
    refuses: str = ""
    named: bool = True


EARLIER = {
    # The last one before versions were agreed on. Its member knows of no other version, and cannot name one.
    "922ec15ff021fb20558edc376f18b1b80318cb92": Earlier(
        tests="bc852df",
        protocol=2,
        refuses="MessageError: not a message of the server: expected at most 4 values, got more",
        named=False,
    ),
    # The first one with the wire format of protocol 3: it names both versions.
    "526099c476c01ccd2e619d5239692aa3d9f98c6d": Earlier(
        tests="526099c",
        protocol=3,
        refuses=f"VersionError: stage join, member {OTHER}: the server has fedmerit {VERSION} and speaks "
        f"protocol {PROTOCOL}, this member has fedmerit 0.1.0 and speaks protocol 3: install versions with "
        "one protocol",
    ),
    # One with all settings of schema 3 and sketches in reports.
    "e906384670fe780d8f492a73ebea40847e84fcfd": Earlier(tests="e906384", protocol=4),
}
BEFORE_SKETCHES = "73192cf557615eff8dc1d6e48c4c02c6ac4ee25e"
"""It speaks protocol 4, but its members report no sketches."""


def archived(commit, *names):
    """Files of a commit, as a tar; skip the test where the history does not go back that far."""
    if shutil.which("git") is None:
        pytest.skip("needs the history of this repository, and git to read it")
    git = ["git", "-C", str(ROOT)]
    there = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False)
    if there.returncode:
        said = there.stderr.decode().strip()
        pytest.skip(f"needs commit {commit} in the history of this repository: {said}")
    return subprocess.run([*git, "archive", commit, *names], capture_output=True, check=True).stdout


@pytest.fixture(params=EARLIER, ids=lambda commit: commit[:7])
def earlier(request, tmp_path):
    """A version, and a path with its package and its tests' modules."""
    known = EARLIER.get(request.param, Earlier(tests=request.param, protocol=4))
    installed = tmp_path / "installed"
    for commit, names in (
        (request.param, ["src"]),
        (known.tests, ["tests/linear_federation.py", "tests/ledgers.py"]),
    ):
        with tarfile.open(fileobj=io.BytesIO(archived(commit, *names))) as archive:
            archive.extractall(installed, filter="data")
    return known, os.pathsep.join(str(installed / name) for name in ("src", "tests"))


@pytest.fixture
def home(tmp_path):
    found = tmp_path / "home"
    found.mkdir()
    return found


def check_together(told):
    assert told["included"] == [["client-0", OTHER, "client-2", "client-3"]] * 2
    assert told["errors"][OTHER] == []


def check_apart(told, home):
    """The other three make a run that verifies, and nothing in it comes from the member who was refused."""
    assert told["included"] == [["client-0", "client-2", "client-3"]] * 2
    assert any(line.startswith("rounds: 2 of 2, 0 aborted") for line in told["verified"])
    authors = {record.author for record in snapshot(home / "run" / "ledger.sqlite").records()}
    assert authors == {"server", "client-0", "client-2", "client-3"}
    state = home / f"{OTHER}.pem.state"
    assert not [path for path in state.rglob("*") if path.is_file() and path.name != ".lock"]


def test_an_earlier_member_beside_todays_server(earlier, home):
    known, path = earlier
    federation = Mixed(home, rounds=2, files=True)
    if not known.named:  # it has the roster of its time
        (home / "roster.toml").unlink()
        write_roster(home / "roster.toml", Roster(federation.roster.members))
    federation.elsewhere = Process(home, path)
    try:
        told = federation.run().told()
    finally:
        federation.elsewhere.close()
    assert federation.elsewhere.said["version"] == known.version
    if known.protocol == PROTOCOL:
        return check_together(told)
    assert set(told["errors"][OTHER]) == {known.refuses}
    if known.protocol < 3:  # it cannot name versions, so the page explains what it says
        assert known.refuses.partition(": ")[2] in PAGE
    return check_apart(told, home)


@pytest.mark.parametrize("earlier", [BEFORE_SKETCHES], indirect=True)
def test_a_member_who_knows_no_sketches_refuses_them_by_name(earlier, home):
    federation = Mixed(home, rounds=2, files=True)
    federation.elsewhere = Process(home, earlier[1])
    try:
        told = federation.run().told()
    finally:
        federation.elsewhere.close()
    (said,) = set(told["errors"][OTHER])
    assert said.startswith(
        f"VersionError: stage join, member {OTHER}: the server (fedmerit {VERSION}) proposes"
    )
    assert "with 'sketches', which this member does not know" in said
    check_apart(told, home)


def test_an_earlier_member_cannot_read_a_roster_that_names_the_server(earlier, home):
    known, path = earlier
    if known.named:
        pytest.skip("its rosters name the server")
    federation = Mixed(home, rounds=2, files=True)
    federation.elsewhere = Process(home, path)
    try:
        told = federation.run().told()
    finally:
        federation.elsewhere.close()
    words = "expected format and [[members]]"
    assert words in PAGE
    assert told["errors"][OTHER]
    assert all(f"roster.toml: {words}" in said for said in told["errors"][OTHER])
    check_apart(told, home)


def test_todays_member_beside_an_earlier_server(earlier, home):
    known, path = earlier
    todays = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
    ran = subprocess.run(
        [sys.executable, str(HERE / "mixed_federation.py"), str(home), todays],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    if known.protocol == PROTOCOL:
        return check_together(told)
    said = told["errors"][OTHER][0]
    assert said.startswith("VersionError: ")
    assert f"member {OTHER}" in said
    assert f"speaks protocol {known.protocol}, this member has fedmerit {VERSION}" in said
    assert f"and speaks protocol {PROTOCOL}: install versions with one protocol" in said
    return check_apart(told, home)
