"""Identity keys and the roster: private stays private, and everybody hashes the same roster."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, KeyFileError
from fedmerit.identity import (
    Member,
    Roster,
    load_key,
    new_key,
    parse_member,
    public_key,
    read_roster,
    write_roster,
)
from fedmerit.storage.member_state import allow

KEYS = [bytes([i]) * 32 for i in range(1, 5)]


def test_a_new_key_is_private_whatever_the_umask_and_never_overwritten(tmp_path):
    path, before = tmp_path / "id.pem", os.umask(0)
    try:
        public = new_key(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_key(load_key(path)) == public
    assert len(public) == 32
    content = path.read_bytes()
    with pytest.raises(KeyFileError, match="not overwritten"):
        new_key(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["id.pem"]  # no draft is left


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o601, 0o777])
def test_a_key_that_others_may_touch_is_refused(tmp_path, mode):
    path = tmp_path / "id.pem"
    new_key(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode 600, got {mode:o}"):
        load_key(path)


@pytest.mark.parametrize(
    ("act", "content", "says"),
    [
        (load_key, None, "cannot read"),
        (load_key, b"[training]\n", r"mine: expected an unencrypted Ed25519 private key"),  # not: close it
        (read_roster, None, "cannot read"),
        (read_roster, b"#" * (1 << 20) + b"#", "at most"),
        (read_roster, b"\xff\xfe", "not a roster"),
        (read_roster, b"a=" + b"[" * 9000, "not a roster"),
        (read_roster, b"not toml", "not a roster"),
        (read_roster, b'format = "other"', "expected a roster file with format"),
        (lambda path: new_key(path / "id.pem"), None, "cannot write"),
        *[
            (lambda path, other=other: new_key(Path(other)), None, "got a folder$")
            for other in (".", "", "/")
        ],
    ],
)
def test_a_file_that_cannot_be_what_it_is_to_be_says_why(tmp_path, act, content, says):
    path = tmp_path / "mine"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o644)
    with pytest.raises(KeyFileError, match=says):
        act(path)


def test_what_is_not_a_key_is_refused_and_not_quoted(tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    other = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    good = tmp_path / "good.pem"
    new_key(good)
    for content in (b"", b"secret words", other, good.read_bytes()[:60], good.read_bytes()[::-1]):
        path = tmp_path / "bad.pem"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(KeyFileError) as error:
            load_key(path)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize("weights", [(None, None), (1200.0, 0.1)])
def test_a_roster_survives_its_file(tmp_path, weights):
    names = ['Klinik "Süd" 1', "Hospital A"]
    roster = Roster(Member(n, k, w) for n, k, w in zip(names, KEYS, weights, strict=False))
    path = tmp_path / "roster.toml"
    write_roster(path, roster)
    assert read_roster(path) == roster
    assert read_roster(path).hash == roster.hash
    assert roster.weights == (None if weights[0] is None else dict(zip(names, weights, strict=True)))
    with pytest.raises(KeyFileError, match="not overwritten"):
        write_roster(path, roster)


def test_the_hash_is_known_and_depends_on_content_alone():
    a, b = Member("A", KEYS[0]), Member("B", KEYS[1])
    # sha256 of ["fedmerit roster 1",[["A","0101...01",null],["B","0202...02",null]]], by hand with sha256sum
    assert Roster([a, b]).hash.hex() == "b2904bd19abe6f8ca3b2fb23891b3ba74b9e13fde33f756cb62bb97d392e8568"
    assert Roster([b, a]).hash == Roster([a, b]).hash
    others = [
        Roster([a, Member("C", KEYS[1])]),
        Roster([a, Member("B", KEYS[2])]),
        Roster([a]),
        Roster([Member("A", KEYS[0], 1), Member("B", KEYS[1], 1)]),
        Roster([Member("A", KEYS[0], 1), Member("B", KEYS[1], 2)]),
    ]
    assert len({roster.hash for roster in [Roster([a, b]), *others]}) == 6
    assert Roster([Member("A", KEYS[0], 1)]).hash == Roster([Member("A", KEYS[0], 1.0)]).hash


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([], "1 to 1024 members"),
        ([("A", KEYS[0], None), ("A", KEYS[1], None)], "A: on the roster twice"),
        ([("A", KEYS[0], None), ("B", KEYS[0], None)], "A: shares its key"),
        ([("A", KEYS[0], None), ("B", KEYS[1], 2)], "a weight for every member of the roster or for none"),
        ([("A", KEYS[0][:31], None)], "32 bytes"),
        ([("A", KEYS[0], -1)], "weight"),
        ([("A", KEYS[0], float("nan"))], "weight"),
        ([("A", KEYS[0], float("inf"))], "weight"),
        *[([("A", KEYS[0], weight)], "weight") for weight in (10**400, 1e31, True, "5")],
        ([(7, KEYS[0], None)], "name"),
    ],
)
def test_bad_rosters_are_refused(members, says):
    with pytest.raises(KeyFileError, match=says):
        Roster(Member(*member) for member in members)


@pytest.mark.parametrize(
    "names",
    [
        ("St. Mary/North",), ("North\\South",), ("server",), (".",), ("..",), ("\u20ac\U0001f3e5" * 32,),
        ("ABBEY", "Abbey"), ("St  Mary", "St Mary"), ("STRASSE", "Straße"),
        ("",), ("a ",), ("a\0",), ("a\x1b[2J",), ("e\u0301",), ("x" * 65,), (" A",), ("A\n",),
    ],
)  # fmt: skip
def test_a_roster_refuses_the_names_that_a_run_refuses_and_in_the_same_words(names):
    with pytest.raises(KeyFileError) as of_roster:
        Roster(Member(name, key) for name, key in zip(names, KEYS, strict=False))
    with pytest.raises(ConfigError) as of_run:
        from_dict({"partition": {"names": [*names, "fine", "also fine"]}})
    assert str(of_run.value) == f"partition.names: {of_roster.value}"


KEY = "ed25519:" + "01" * 32
MEMBER = f'[[members]]\nname = "A"\nkey = "{KEY}"'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "members = 3",
        "members = []",
        f"extra = 1\n{MEMBER}",
        f'{MEMBER}\nrole = "x"',
        *[f"{MEMBER}\nweight = {weight}" for weight in ('"5"', "true", "inf")],
        f'[[members]]\nname = 3\nkey = "{KEY}"',
        *[f'[[members]]\nname = "A"\nkey = "{key}"' for key in (KEY[:-2], KEY[:-1] + "z", "rsa:00")],
        '[[members]]\nname = "A"',
    ],
)
def test_malformed_roster_files_name_the_file(tmp_path, text):
    path = tmp_path / "roster.toml"
    path.write_text('format = "fedmerit roster 1"\n' + text)
    with pytest.raises(KeyFileError) as caught:
        read_roster(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_signatures_verify_against_the_roster_only(tmp_path):
    roster = Roster([Member("A", new_key(tmp_path / "a")), Member("B", new_key(tmp_path / "b"))])
    signature = load_key(tmp_path / "a").sign(b"message")
    assert roster.verifies("A", signature, b"message")
    assert not roster.verifies("B", signature, b"message")
    assert not roster.verifies("A", signature, b"other")
    assert not roster.verifies("A", b"short", b"message")
    with pytest.raises(KeyFileError, match="'C' is not on the roster"):
        roster.verifies("C", signature, b"message")


@pytest.mark.parametrize("weight", ["0_5", "nan", "inf", "-1", " 1", "1e", "", "\u0661"])
def test_a_weight_is_a_number_as_one_writes_it(weight):
    with pytest.raises(KeyFileError, match=r"^A: weight must be a number from 0 to 1e30, got"):
        parse_member(f"A=ed25519:{KEYS[0].hex()},{weight}")


SMALL_ORDER = [  # y of all points whose order divides 8, also unreduced, as libsodium lists them
    "00" * 32,
    "01" + "00" * 31,
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ec" + "ff" * 30 + "7f",
    "ed" + "ff" * 30 + "7f",
    "ee" + "ff" * 30 + "7f",
]


@pytest.mark.parametrize("sign", [0, 0x80])
@pytest.mark.parametrize("y", SMALL_ORDER)
def test_keys_of_small_order_are_refused_however_they_are_written(y, sign):
    """Under such a key a signature that anybody can make is good, so its owner can deny every one."""
    raw = bytes.fromhex(y)
    key = raw[:31] + bytes([raw[31] | sign])
    for make in (lambda: Member("M", key), lambda: parse_member(f"M=ed25519:{key.hex()}")):
        with pytest.raises(KeyFileError, match=rf"^M: ed25519:{key.hex()} protects nothing"):
            make()


def test_keys_that_were_made_here_are_never_refused(tmp_path):
    for number in range(200):
        Member("M", new_key(tmp_path / f"{number}.pem"))


def test_a_refused_change_makes_no_state_because_none_may_say_that_it_was_lost(tmp_path):
    new_key(key := tmp_path / "a.pem")
    for changes in ({"bound": "8"}, {"disk": "8"}, {"disk": str(2**30), "runs": "5"}):
        with pytest.raises(ConfigError):
            allow(key, changes)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pem"]
    allow(key, {"disk": str(2**30)})
    assert (tmp_path / "a.pem.state" / "state").is_file()
