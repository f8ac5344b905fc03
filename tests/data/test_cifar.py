"""CIFAR-10's python version, as Python 2 wrote it and as Python 3 would; hostile and damaged pickles."""

from __future__ import annotations

import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedmerit.data import load
from fedmerit.errors import DataError

FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def python2(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes that Python 2 with numpy writes for {"data": pixels, "labels": labels} in protocol 2."""

    def text(value: bytes) -> bytes:
        return (
            b"U" + bytes([len(value)]) + value
            if len(value) < 256
            else b"T" + struct.pack("<i", len(value)) + value
        )

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    shape = number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    array = empty + b"(K\x01" + shape + kind + b"\x89" + text(pixels.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def batch(seed: int) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (12, 3072), dtype=np.uint8), [i % 10 for i in range(12)]


WRITERS = {
    "python 2": python2,
    **{
        f"python 3, protocol {p}": lambda x, y, p=p: pickle.dumps({b"data": x, b"labels": y}, protocol=p)
        for p in (2, 3, 4)
    },
    "text keys": lambda x, y: pickle.dumps({"data": np.asfortranarray(x), "labels": y}, protocol=2),
}


def write(folder: Path, writer=python2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(FILES):
        (folder / name).write_bytes(writer(*batch(i)))
    return folder


def check(path: Path) -> None:
    data = load("cifar10", path)
    assert data.x_train.shape == (60, 32, 32, 3)
    assert data.x_test.shape == (12, 32, 32, 3)
    assert data.y_train[:12].tolist() == [*range(10), 0, 1]
    # A row holds 1024 red, 1024 green and 1024 blue values, each image row by row.
    row = batch(2)[0][5]
    image = data.x_train[2 * 12 + 5]
    assert image[3, 7].tolist() == [row[3 * 32 + 7], row[1024 + 3 * 32 + 7], row[2048 + 3 * 32 + 7]]
    assert np.array_equal(data.x_test.transpose(0, 3, 1, 2).reshape(12, 3072), batch(5)[0])
    assert data.classes[:2] == ("airplane", "automobile")


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_folder(tmp_path: Path, writer):
    folder = write(tmp_path / "cifar-10-batches-py", writer)
    check(folder)
    check(tmp_path)


def test_the_hand_written_python_2_pickle_is_what_numpy_reads():
    pixels, labels = batch(0)
    read = pickle.loads(python2(pixels, labels), encoding="bytes")
    assert np.array_equal(read[b"data"], pixels)
    assert read[b"labels"] == labels


def test_archive(tmp_path: Path):
    folder = write(tmp_path / "cifar-10-batches-py")
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-py")
    check(archive)
    raw = archive.read_bytes()
    archive.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataError, match=r"tar\.gz: cannot be read as a tar archive: "):
        load("cifar10", archive)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "test_batch", "cifar-10-batches-py/test_batch")
    with pytest.raises(DataError, match=r"tar\.gz: cifar-10-batches-py/data_batch_1 is missing"):
        load("cifar10", archive)


class Reduce:
    def __init__(self, function, *args) -> None:
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("inside", ["whole", "value", "data"])
def test_a_hostile_pickle_does_not_run(tmp_path: Path, protocol: int, inside: str):
    folder, mark = write(tmp_path / "c"), tmp_path / "it-ran"
    attack = Reduce(os.system, f"touch {mark}")
    pixels, labels = batch(0)
    hostile = {
        "whole": attack,
        "value": {b"data": pixels, b"labels": labels, b"more": attack},
        "data": {b"data": attack, b"labels": labels},
    }[inside]
    raw = pickle.dumps(hostile, protocol=protocol)
    (folder / "data_batch_3").write_bytes(raw)
    with pytest.raises(DataError) as caught:
        load("cifar10", folder)
    assert not mark.exists()
    assert str(caught.value).startswith(f"{folder / 'data_batch_3'}: refused: the pickle asks for ")
    pickle.loads(raw)  # it is a working attack
    assert mark.exists()


@pytest.mark.parametrize("function", [eval, exec, getattr, __import__, open, bytes, np.load, np.fromfile])
def test_no_other_function_can_be_named(tmp_path: Path, function):
    folder = write(tmp_path / "c")
    (folder / "test_batch").write_bytes(pickle.dumps(Reduce(function, "x"), protocol=2))
    with pytest.raises(DataError, match="refused: the pickle asks for"):
        load("cifar10", folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02ccopy_reg\n_reconstructor\n.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"(S'x'\nios\nsystem\n.",
        b"(cos\nsystem\nS'x'\no.",
        b"\x80\x04\x8c\x05numpy\x8c\x1a_core.multiarray.os.system\x93.",
    ],
)
def test_other_ways_to_name_things_are_refused(tmp_path: Path, raw: bytes):
    folder = write(tmp_path / "c")
    (folder / "test_batch").write_bytes(raw)
    with pytest.raises(DataError, match="refused: the pickle asks for"):
        load("cifar10", folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b"\x80\x02.",
        b"Pid\n.",
        b"\x80\x02\x82\x01.",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": 3, b"labels": [1]}),
        pickle.dumps({1: 2}),
        python2(*batch(0))[:-20],
        python2(*batch(0)).replace(b"U\x02u1", b"U\x02f8"),
        python2(*batch(0)).replace(b"(K\x01J\x0c", b"(K\x01J\x0d"),
        python2(batch(0)[0].reshape(24, 1536), batch(0)[1]),
        python2(batch(0)[0], [1, 2, 3]),
        b"\x80\x02}(U\x04datacnumpy\ndtype\n)R.",
    ],
)
def test_a_damaged_batch_is_named(tmp_path: Path, raw: bytes):
    folder = write(tmp_path / "c")
    (folder / "data_batch_2").write_bytes(raw)
    with pytest.raises(DataError) as caught:
        load("cifar10", folder)
    assert str(caught.value).startswith(f"{folder / 'data_batch_2'}: ")


def test_messages(tmp_path: Path):
    folder = write(tmp_path / "c")
    (folder / "data_batch_2").write_bytes(pickle.dumps({b"labels": [1]}))
    with pytest.raises(DataError, match=r"data_batch_2: not a CIFAR-10 batch: data is missing$"):
        load("cifar10", folder)
    (folder / "data_batch_2").write_bytes(python2(batch(0)[0], [1, 2, 3]))
    with pytest.raises(DataError, match=r"data_batch_2: expected 12 integer labels, got int64 \(3,\)$"):
        load("cifar10", folder)
    (folder / "data_batch_2").write_bytes(python2(batch(0)[0], [77] * 12))
    with pytest.raises(DataError, match=r"cifar10: y_train: label 77 of sample 12 is outside 0 \.\. 9$"):
        load("cifar10", folder)
    (folder / "data_batch_2").unlink()
    with pytest.raises(DataError, match=r"data_batch_2: cannot be read: No such file or directory$"):
        load("cifar10", folder)
