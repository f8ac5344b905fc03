"""The promises of docs/threats.md name tests that exist, and its numbers are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_secagg_privacy
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from parties import Parties, head_of

from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg import Client, Setting, default_threshold
from fedmerit.secagg.messages import to_broadcast

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "threats.md").read_text()


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+(?:\[\w+\])?)`", TEXT))
    assert len(named) > 30
    sources = "".join(path.read_text() for path in HERE.parent.rglob("test_*.py"))
    written = set(re.findall(r"^def (test_\w+)", sources, re.M))
    checks = {
        f"test_privacy[{check.__name__.removeprefix('check_')}]" for check in test_secagg_privacy.CHECKS
    }
    assert named - written - checks == set()


def test_every_check_with_a_broken_twin_is_marked_and_every_marked_one_has_a_twin():
    twins = {check.__name__.removeprefix("check_") for _, check in test_secagg_privacy.BROKEN}
    rows = [row for row in TEXT.splitlines() if "`test_privacy[" in row]
    marked = {name for row in rows if "†" in row for name in re.findall(r"test_privacy\[(\w+)\]", row)}
    assert marked == twins == {check.__name__.removeprefix("check_") for check in test_secagg_privacy.CHECKS}


@pytest.mark.parametrize("row", re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", TEXT, re.M))
def test_the_table_of_sizes(row):
    n, t, lost, colluding, honest = map(int, row)
    assert t == default_threshold(n)
    assert lost == colluding == n - t
    assert honest == 2 * t - n
    assert Parties(n).setting.tolerated == colluding


@pytest.mark.parametrize(("n", "t", "tolerated"), [(9, 5, 0), (9, 6, 2), (9, 7, 2), (9, 8, 1), (4, 3, 1)])
def test_colluders_tolerated_with_a_configured_threshold(n, t, tolerated):
    assert "min(R - t, 2t - R - 1)" in TEXT
    assert Parties(n, threshold=t).setting.tolerated == tolerated


@pytest.mark.parametrize("row", re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", TEXT, re.M))
def test_the_table_of_bytes(row):
    """Of members called client-0, client-1, ... and a run with an identifier of 16 characters."""
    members, advertise, share, lists = (int(cell.replace(",", "")) for cell in row)
    names = tuple(f"client-{i}" for i in range(members))
    keys = [Ed25519PrivateKey.generate() for _ in names]
    roster = Roster(Member(name, public_key(key)) for name, key in zip(names, keys, strict=True))
    setting = Setting("0" * 16, 1, 0, names, roster, bytes(32))
    clients = [Client(setting, name, key) for name, key in zip(names, keys, strict=True)]
    sent = [client.advertise() for client in clients]
    shown = to_broadcast("advertise", map(head_of, sent))
    dealt = clients[0].share(shown)
    assert (len(sent[0]), len(dealt)) == (advertise, share)
    both = len(shown) + len(to_broadcast("share", [head_of(dealt)] * members))
    assert lists == round(both / 1000)
