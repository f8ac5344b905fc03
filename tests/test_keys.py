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


def test_a_new_key_is_private_and_can_be_read_back(tmp_path):
    path = tmp_path / "id.pem"
    public = new_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_key(load_key(path)) == public
    assert len(public) == 32
    assert os.listdir(tmp_path) == ["id.pem"]  # no draft is left


def test_a_key_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        new_key(tmp_path / "id.pem")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "id.pem").stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "id.pem"
    new_key(path)
    content = path.read_bytes()
    with pytest.raises(KeyFileError, match="not overwritten"):
        new_key(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["id.pem"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o601, 0o777])
def test_a_key_that_others_may_touch_is_refused(tmp_path, mode):
    path = tmp_path / "id.pem"
    new_key(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode 600, got {mode:o}"):
        load_key(path)


def test_nobody_is_asked_to_close_a_file_that_is_no_key(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("[training]\n")
    file.chmod(0o644)
    with pytest.raises(KeyFileError, match=r"my\.toml: expected an unencrypted Ed25519 private key"):
        load_key(file)


def test_what_is_not_a_key_is_refused_and_not_quoted(tmp_path):
    with pytest.raises(KeyFileError, match="cannot read"):
        load_key(tmp_path / "none.pem")
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


def test_a_key_cannot_be_written_where_there_is_no_folder(tmp_path):
    with pytest.raises(KeyFileError, match="cannot write"):
        new_key(tmp_path / "nowhere" / "id.pem")


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("weights", [(None, None), (1200.0, 0.1)])
def test_a_roster_survives_its_file(tmp_path, suffix, weights):
    names = ['Klinik "Süd" 1', "Hospital A"]
    roster = Roster(Member(n, k, w) for n, k, w in zip(names, KEYS, weights, strict=False))
    path = tmp_path / f"roster.{suffix}"
    write_roster(path, roster)
    assert read_roster(path) == roster
    assert read_roster(path).hash == roster.hash
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
        ([("A", KEYS[0], 10**400)], "weight"),
        *[([(name, KEYS[0], None)], "name") for name in ("", " A", "A\n", "A\x00", "x" * 65, "e\u0301", 7)],
    ],
)
def test_bad_rosters_are_refused(members, says):
    with pytest.raises(KeyFileError, match=says):
        Roster(Member(*member) for member in members)


@pytest.mark.parametrize(
    "names",
    [
        ("St. Mary/North",), ("North\\South",), ("server",), (".",), ("..",), ("\u20ac\U0001f3e5" * 32,),
        ("ABBEY", "Abbey"), ("St  Mary", "St Mary"), ("STRASSE", "Straße"), (" A",), ("A\n",),
    ],
)  # fmt: skip
def test_a_roster_refuses_the_names_that_a_run_refuses_and_in_the_same_words(names):
    with pytest.raises(KeyFileError) as of_roster:
        Roster(Member(name, key) for name, key in zip(names, KEYS, strict=False))
    with pytest.raises(ConfigError) as of_run:
        from_dict({"partition": {"names": [*names, "fine", "also fine"]}})
    assert str(of_run.value) == f"partition.names: {of_roster.value}"


KEY = "ed25519:" + "01" * 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not toml",
        'format = "other"',
        'format = "fedmerit roster 1"',
        'format = "fedmerit roster 1"\nmembers = 3',
        'format = "fedmerit roster 1"\nmembers = []',
        f'format = "fedmerit roster 1"\nextra = 1\n[[members]]\nname = "A"\nkey = "{KEY}"',
        f'format = "fedmerit roster 1"\n[[members]]\nname = "A"\nkey = "{KEY}"\nrole = "x"',
        f'format = "fedmerit roster 1"\n[[members]]\nname = 3\nkey = "{KEY}"',
        f'format = "fedmerit roster 1"\n[[members]]\nname = "A"\nkey = "{KEY}"\nweight = "5"',
        f'format = "fedmerit roster 1"\n[[members]]\nname = "A"\nkey = "{KEY}"\nweight = true',
        f'format = "fedmerit roster 1"\n[[members]]\nname = "A"\nkey = "{KEY}"\nweight = inf',
        f'format = "fedmerit roster 1"\n[[members]]\nname = "A"\nkey = "{KEY[:-2]}"',
        f'format = "fedmerit roster 1"\n[[members]]\nname = "A"\nkey = "{KEY[:-1]}z"',
        'format = "fedmerit roster 1"\n[[members]]\nname = "A"\nkey = "rsa:00"',
        'format = "fedmerit roster 1"\n[[members]]\nname = "A"',
    ],
)
def test_malformed_roster_files_name_the_file(tmp_path, text):
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=r"roster\.toml"):
        read_roster(path)


def test_a_roster_file_that_is_missing_huge_or_no_text(tmp_path):
    with pytest.raises(KeyFileError, match="cannot read"):
        read_roster(tmp_path / "none.toml")
    for content, says in ((b"#" * (1 << 20) + b"#", "at most"), (b"\xff\xfe", "not a roster")):
        (tmp_path / "roster.toml").write_bytes(content)
        with pytest.raises(KeyFileError, match=says):
            read_roster(tmp_path / "roster.toml")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(KeyFileError, match="not a roster"):
        read_roster(tmp_path / "deep.json")


def test_signatures_verify_against_the_roster_only(tmp_path):
    roster = Roster([Member("A", new_key(tmp_path / "a")), Member("B", new_key(tmp_path / "b"))])
    signature = load_key(tmp_path / "a").sign(b"message")
    assert roster.verifies("A", signature, b"message")
    assert not roster.verifies("B", signature, b"message")
    assert not roster.verifies("A", signature, b"other")
    assert not roster.verifies("A", b"short", b"message")
    with pytest.raises(KeyFileError, match="'C' is not on the roster"):
        roster.verifies("C", signature, b"message")


def test_weights_by_name():
    assert Roster([Member("A", KEYS[0], 0.0), Member("B", KEYS[1], 2.5)]).weights == {"A": 0.0, "B": 2.5}
    assert Roster([Member("A", KEYS[0])]).weights is None


@pytest.mark.parametrize("weight", ["0_5", "nan", "inf", "-1", " 1", "1e", "", "\u0661"])
def test_a_weight_is_a_number_as_one_writes_it(weight):
    with pytest.raises(KeyFileError, match=r"^A: weight must be a number of at least 0, got"):
        parse_member(f"A=ed25519:{KEYS[0].hex()},{weight}")


# ---------------------------------------------------------------------------------------- keys of small order

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def add(one, other):
    """The addition of twisted Edwards curves with a = -1, which has no exceptions on this one."""
    (a, b), (c, d) = one, other
    t = D * a * b * c * d
    return (a * d + b * c) * pow(1 + t, -1, P) % P, (b * d + a * c) * pow(1 - t, -1, P) % P


def times(k, point):
    total = (0, 1)
    while k:
        if k & 1:
            total = add(total, point)
        point, k = add(point, point), k >> 1
    return total


def small_points():
    """Any point times the order of the large subgroup is one of the eight; one of those generates them."""
    order = 2**252 + 27742317777372353535851937790883648493
    for y in range(2, 100):
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        if x * x % P != square:
            x = x * pow(2, (P - 1) // 4, P) % P
        if x * x % P != square:
            continue
        found = {times(k, times(order, (x, y))) for k in range(8)}
        if len(found) == 8:
            return found
    raise AssertionError("no generator found")


def test_keys_of_small_order_are_refused_however_they_are_written():
    """Under such a key a signature that anybody can make is good, so its owner can deny every one."""
    points = small_points()
    assert all((y * y - x * x - 1 - D * x * x * y * y) % P == 0 for x, y in points)
    assert all(times(8, point) == (0, 1) for point in points)
    written = {
        (value | sign << 255).to_bytes(32, "little")
        for _, y in points
        for value in (y, y + P)
        if value < 2**255
        for sign in (0, 1)
    }
    assert len(written) == 2 * (5 + 2)  # five values of y, two of which can be written unreduced
    for key in written:
        with pytest.raises(KeyFileError, match=rf"^M: ed25519:{key.hex()} protects nothing"):
            Member("M", key)
        with pytest.raises(KeyFileError, match="protects nothing"):
            parse_member(f"M=ed25519:{key.hex()}")


def test_keys_that_were_made_here_are_never_refused(tmp_path):
    for number in range(200):
        Member("M", new_key(tmp_path / f"{number}.pem"))


@pytest.mark.parametrize("path", [".", "", "/"])
def test_a_key_needs_the_name_of_a_file(path):
    with pytest.raises(KeyFileError, match=r"expected the name of a file, got a folder$"):
        new_key(Path(path))


def test_a_refused_change_makes_no_state_because_none_may_say_that_it_was_lost(tmp_path):
    new_key(key := tmp_path / "a.pem")
    for changes in ({"bound": "8"}, {"disk": "8"}, {"disk": str(2**30), "runs": "5"}):
        with pytest.raises(ConfigError):
            allow(key, changes)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pem"]
    allow(key, {"disk": str(2**30)})
    assert (tmp_path / "a.pem.state" / "state").is_file()
