"""The paper's datasets as published, hostile pickles too, and the compact files beside them."""

import csv
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import compact
import h5py
import numpy as np
import pytest
from downloads import CIFAR_TEST, CIFAR_TRAIN, cifar10, isic2019, lesion_split
from downloads import pcam as read_pcam
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedmerit.data import load
from fedmerit.errors import DataError
from raising import raises


def wrong(read, path, said, **options):
    """Reading says what is wrong, after the place where it is."""
    with raises(DataError) as caught:
        read(path, **options)
    assert said in str(caught.value)


# --- CIFAR-10: its python version, as Python 2 wrote it and as Python 3 would


def python2(pixels, labels):
    """The opcodes that Python 2 with numpy writes for {"data": pixels, "labels": labels} in protocol 2."""

    def text(value):
        size = bytes([len(value)]) if len(value) < 256 else struct.pack("<i", len(value))
        return (b"U" if len(value) < 256 else b"T") + size + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    shape = number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    array = empty + b"(K\x01" + shape + kind + b"\x89" + text(pixels.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def python3(protocol, kind=bytes, turned=np.asarray):
    """A writer of today, with keys of a kind."""
    names = [name.encode() if kind is bytes else name for name in ("data", "labels")]
    return lambda x, y: pickle.dumps(dict(zip(names, (turned(x), y), strict=True)), protocol=protocol)


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (12, 3072), dtype=np.uint8), [i % 10 for i in range(12)]


def cifar(folder, writer=python2):
    """Six batches of twelve images; the archive beside them."""
    home = folder / "cifar-10-batches-py"
    home.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate((*CIFAR_TRAIN, CIFAR_TEST)):
        (home / name).write_bytes(writer(*batch(i)))
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as packed:
        packed.add(home, home.name)
    return home


WRITERS = {"python 2": python2, **{f"python 3, protocol {p}": python3(p) for p in (2, 3, 4)}}
WRITERS["text keys"] = python3(2, str, np.asfortranarray)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_cifar_is_read_from_its_folder_from_one_above_and_from_the_archive(tmp_path, writer):
    for path in (cifar(tmp_path, writer), tmp_path, tmp_path / "cifar-10-python.tar.gz"):
        data = cifar10(path)
        assert (data.x_train.shape, data.x_test.shape) == ((60, 32, 32, 3), (12, 32, 32, 3))
        assert data.y_train[:12].tolist() == [*range(10), 0, 1]
        # A row holds 1024 red, 1024 green and 1024 blue values, each image row by row.
        row = batch(2)[0][5]
        image = data.x_train[2 * 12 + 5]
        assert image[3, 7].tolist() == [row[3 * 32 + 7], row[1024 + 3 * 32 + 7], row[2048 + 3 * 32 + 7]]
        assert np.array_equal(data.x_test.transpose(0, 3, 1, 2).reshape(12, 3072), batch(5)[0])
        assert data.classes[:2] == ("airplane", "automobile")


def test_a_damaged_archive_is_named(tmp_path):
    folder, archive = cifar(tmp_path), tmp_path / "cifar-10-python.tar.gz"
    raw = archive.read_bytes()
    archive.write_bytes(raw[: len(raw) // 2])
    wrong(cifar10, archive, f"{archive}: cannot be read as a tar archive: ")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "test_batch", "cifar-10-batches-py/test_batch")
    wrong(cifar10, archive, f"{archive}: cifar-10-batches-py/data_batch_1 is missing")


class Reduce:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("inside", ["whole", "value", "data"])
def test_a_hostile_pickle_does_not_run(tmp_path, protocol, inside):
    folder, mark = cifar(tmp_path), tmp_path / "it-ran"
    attack = Reduce(os.system, f"touch {mark}")
    pixels, labels = batch(0)
    value = {b"data": pixels, b"labels": labels, b"more": attack}
    hostile = {"whole": attack, "value": value, "data": {b"data": attack, b"labels": labels}}[inside]
    raw = pickle.dumps(hostile, protocol=protocol)
    (folder / "data_batch_3").write_bytes(raw)
    wrong(cifar10, folder, f"{folder / 'data_batch_3'}: refused: the pickle asks for ")
    assert not mark.exists()
    pickle.loads(raw)  # it is a working attack
    assert mark.exists()


NAMED = (eval, exec, getattr, __import__, open, bytes, np.load, np.fromfile)
OTHER_WAYS = (
    b"\x80\x02ccopy_reg\n_reconstructor\n.", b"c__builtin__\neval\n(S'1'\ntR.", b"(S'x'\nios\nsystem\n.",
    b"(cos\nsystem\nS'x'\no.", b"\x80\x04\x8c\x05numpy\x8c\x1a_core.multiarray.os.system\x93.",
)  # fmt: skip


@pytest.mark.parametrize("raw", [*(pickle.dumps(Reduce(one, "x"), protocol=2) for one in NAMED), *OTHER_WAYS])
def test_no_other_function_can_be_named_in_any_way(tmp_path, raw):
    folder = cifar(tmp_path)
    (folder / "test_batch").write_bytes(raw)
    wrong(cifar10, folder, "refused: the pickle asks for")


PLAIN = python2(*batch(0))
DAMAGED = (
    b"", b"hello", b"\x80\x02.", b"Pid\n.", b"\x80\x02\x82\x01.", b"\x80\x02}(U\x04datacnumpy\ndtype\n)R.",
    pickle.dumps([1, 2]), pickle.dumps({b"data": 3, b"labels": [1]}), pickle.dumps({1: 2}), PLAIN[:-20],
    PLAIN.replace(b"U\x02u1", b"U\x02f8"), PLAIN.replace(b"(K\x01J\x0c", b"(K\x01J\x0d"),
    python2(batch(0)[0].reshape(24, 1536), batch(0)[1]),
)  # fmt: skip
SAID = (
    (pickle.dumps({b"labels": [1]}), "data_batch_2: not a CIFAR-10 batch: data is missing"),
    (python2(batch(0)[0], [1, 2, 3]), "data_batch_2: expected 12 integer labels, got int64 (3,)"),
    (python2(batch(0)[0], [77] * 12), "cifar10: y_train: label 77 of sample 12 is outside 0 .. 9"),
    (None, "data_batch_2: cannot be read: No such file or directory"),
)


@pytest.mark.parametrize(("raw", "said"), [*((raw, "/data_batch_2: ") for raw in DAMAGED), *SAID])
def test_a_damaged_batch_is_named(tmp_path, raw, said):
    folder = cifar(tmp_path)
    (folder / "data_batch_2").unlink() if raw is None else (folder / "data_batch_2").write_bytes(raw)
    wrong(cifar10, folder, said)


# --- ISIC 2019

CLASSES = ["MEL", "NV", "BCC", "UNK"]
TRUTH, METADATA = "ISIC_2019_Training_GroundTruth.csv", "ISIC_2019_Training_Metadata.csv"
INPUT = "ISIC_2019_Training_Input"


def table(file, rows):
    with file.open("w", newline="") as text:
        csv.writer(text).writerows(rows)


def image(i):
    return f"ISIC_{i:07d}"


def isic_files(folder, archives=("HAM_", "BCN_", "MSK4_")):
    """30 images: 10 of each of 3 classes, two images a lesion, one archive a class; UNK is empty."""
    (folder / INPUT).mkdir(parents=True)
    truth, metadata = [["image", *CLASSES]], [["image", "age_approx", "lesion_id", "sex"]]
    for i in range(30):
        pixels = np.zeros((15, 20, 3), np.uint8)
        pixels[:, :, 0] = 8 * i
        Image.fromarray(pixels).save(folder / INPUT / f"{image(i)}.jpg")
        truth.append([image(i), *(float(k == i % 3) for k in range(4))])
        metadata.append([image(i), 50, f"{archives[i % 3]}{i // 6:07d}", "female"])
    table(folder / TRUTH, truth)
    table(folder / METADATA, metadata)
    return folder


@pytest.fixture
def isic(tmp_path):
    return isic_files(tmp_path / "isic")


def test_isic(isic):
    data = isic2019(isic, size=8)
    assert (data.x_train.shape, data.classes) == ((24, 8, 8, 3), ("MEL", "NV", "BCC"))
    assert np.bincount(data.y_test).tolist() == [2, 2, 2]
    groups = set(zip(data.y_train.tolist(), data.group_train.tolist(), strict=True))
    assert groups == {(0, "HAM"), (1, "BCN"), (2, "MSK")}
    assert "CC BY-NC 4.0" in data.notes[0]
    # Image i is 8 i red: image, class and lesion can be told from the pixels.
    red, tested = (np.rint(x[:, 4, 4, 0] / 8).astype(int) for x in (data.x_train, data.x_test))
    assert np.array_equal(red % 3, data.y_train)
    assert not set(zip(red // 6, red % 3, strict=True)) & set(zip(tested // 6, tested % 3, strict=True))
    assert np.array_equal(isic2019(isic, size=8).x_test, data.x_test)


def test_isic_without_metadata_and_with_a_group_column(isic):
    rows = list(csv.reader((isic / METADATA).read_text().splitlines()))
    table(isic / METADATA, [[*row, "center" if k == 0 else f"c{k % 2}"] for k, row in enumerate(rows)])
    assert set(isic2019(isic, size=8).group_train.tolist()) == {"c0", "c1"}
    table(isic / METADATA, [[*row[:2], "" if k else row[2], row[3]] for k, row in enumerate(rows)])
    assert set(isic2019(isic, size=8).group_train.tolist()) == {"unknown"}
    (isic / METADATA).unlink()
    assert isic2019(isic, size=8).group_train is None


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=60), st.floats(0.05, 0.95)
)
def test_lesions_never_stand_on_both_sides(pairs, fraction):
    lesions, labels = [f"L{a}" for a, _ in pairs], [str(b) for _, b in pairs]
    held = lesion_split(labels, lesions, fraction, np.random.default_rng(0))
    tested = {lesion for lesion, out in zip(lesions, held, strict=True) if out}
    assert not tested & {lesion for lesion, out in zip(lesions, held, strict=True) if not out}
    assert not held.all()


ONE_HOT = ", line 32: expected one 1.0 and otherwise 0.0 for image ISIC_0000040"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        *(([image(40), *cells, 0.0, 0.0], ONE_HOT) for cells in ((1.0, 1.0), (0.0, 0.0), ("yes", 0.0))),
        ([image(0), 1.0, 0.0, 0.0, 0.0], ", line 32: image ISIC_0000000 is listed twice"),
        ([image(40), 1.0], ": line 32: expected 5 cells, got 2"),
    ],
)
def test_bad_lines_of_the_ground_truth_are_named(isic, row, said):
    with (isic / TRUTH).open("a", newline="") as text:
        csv.writer(text).writerow(row)
    wrong(isic2019, isic, f"{isic / TRUTH}{said}", size=8)


def test_what_is_missing_of_isic_is_named(isic):
    (isic / INPUT / f"{image(3)}.jpg").unlink()
    wrong(isic2019, isic, "image ISIC_0000003.jpg is missing", size=8)
    (isic / TRUTH).write_text("image,MEL,NV\n")
    wrong(isic2019, isic, "GroundTruth.csv: lists no image")
    (isic / TRUTH).write_bytes(b"image,MEL\n\x81,1.0\n")
    wrong(isic2019, isic, "GroundTruth.csv: line 2: the letters are neither UTF-8 nor")
    (isic / TRUTH).unlink()
    wrong(isic2019, isic, "GroundTruth.csv: no such file")


# --- PCam


def pcam_file(folder, split, key):
    return folder / f"camelyonpatch_level_2_split_{split}_{key}.h5"


def pcam_files(folder):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split, n in (("train", 9), ("test", 5)):
        x = rng.integers(0, 256, (n, 96, 96, 3), dtype=np.uint8)
        for key, values in (("x", x), ("y", (np.arange(n, dtype=np.uint8) % 2).reshape(n, 1, 1, 1))):
            with h5py.File(pcam_file(folder, split, key), "w") as file:
                file.create_dataset(key, data=values, compression="gzip", chunks=True)
    return folder


@pytest.fixture
def pcam(tmp_path):
    return pcam_files(tmp_path / "pcam")


def test_pcam(pcam, monkeypatch):
    monkeypatch.setattr("downloads.HDF5_ROWS", 4)
    data = read_pcam(pcam)
    with h5py.File(pcam_file(pcam, "train", "x")) as file:
        assert np.array_equal(data.x_train, file["x"][:])
    assert (data.y_train.tolist(), len(data.y_test)) == ([0, 1] * 4 + [0], 5)
    assert (data.classes, data.group_train) == (("normal", "tumour"), None)
    few = read_pcam(pcam, limit=3)
    assert (few.x_train.shape, few.x_test.shape) == ((3, 96, 96, 3), (3, 96, 96, 3))
    assert np.array_equal(few.x_train, data.x_train[:3])


def test_pcam_slides_are_groups(pcam):
    meta = pcam / "camelyonpatch_level_2_split_train_meta.csv"
    table(meta, [["", "coord_y", "wsi"], *([k, 0, f"camelyon16_train_tumor_{k // 3:03d}"] for k in range(9))])
    assert len(np.unique(read_pcam(pcam).group_train)) == 3
    table(meta, [["", "wsi"], [0, "a"]])
    wrong(read_pcam, pcam, "meta.csv: expected a slide for each of 9 images, got 1")


def test_damaged_files_of_pcam_are_named(pcam):
    file = pcam_file(pcam, "train", "x")
    raw = file.read_bytes()
    half = len(raw) // 2
    for damaged in (raw[:half], b"", b"hello", raw[:half] + bytes(200) + raw[half + 200 :]):
        file.write_bytes(damaged)
        wrong(read_pcam, pcam, "train_x.h5: cannot be read as HDF5: ")
    with h5py.File(file, "w") as empty:
        empty.create_group("x")
    wrong(read_pcam, pcam, "train_x.h5: data set 'x' is missing")
    file.rename(f"{file}.gz")
    wrong(read_pcam, pcam, "train_x.h5: no such file (found it with .gz: unpack it first)")


# --- Brain-MRI

TUMOURS = ("glioma", "meningioma", "notumor", "pituitary")


def brain_files(folder, pictures):
    """Of the five pictures of a class three to train and three to test, one in both."""
    for i, name in enumerate(TUMOURS):
        for part, chosen in (("Training", (0, 1, 2)), ("Testing", (0, 3, 4))):
            (folder / part / name).mkdir(parents=True)
            for k, pixels in enumerate(pictures[i][list(chosen)]):
                Image.fromarray(pixels).save(folder / part / name / f"{name[:2]}_{k:04d}.png")
    return folder


# -------------------------------------------------------------------------------------------- compact files


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "compact.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``tiles``: PNG mosaics of 3x2 tiles, the 8 training images in two; ``flow``: a stream of WebP files."""
    rng = np.random.default_rng(0)
    y = {"y_train": np.arange(8) % 2, "y_test": np.array([1, 0])}
    index = {}
    for name, channels in (("tiles", 3), ("flow", 1)):
        (tmp_path / name).mkdir()
        index[name] = {"tile": 8, "channels": channels, "classes": ["a", "b"]}
    index["tiles"] |= {"train": ["train_0.png", "train_1.png"], "test": ["test_0.png"]}
    for file in ("train_0.png", "train_1.png", "test_0.png"):
        Image.fromarray(rng.integers(0, 256, (24, 16, 3), dtype=np.uint8)).save(tmp_path / "tiles" / file)
    np.savez(tmp_path / "tiles" / "labels.npz", **y, center_train=np.arange(8))
    index["flow"] |= {"train": ["train.bin"], "test": ["test.bin"]}
    sizes = {}
    for part, n in (("train", 8), ("test", 2)):
        encoded = []
        for i in range(n):
            buffer = io.BytesIO()
            Image.fromarray(np.full((8, 8), 20 * i, np.uint8)).save(buffer, "WEBP", lossless=True)
            encoded.append(buffer.getvalue())
        (tmp_path / "flow" / f"{part}.bin").write_bytes(b"".join(encoded))
        sizes[f"size_{part}"] = np.array([len(raw) for raw in encoded], np.uint16)
    np.savez(tmp_path / "flow" / "labels.npz", **y, **sizes)
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


def test_mosaics(folder: Path):
    data, extra = compact.load(folder, "tiles", group="center")
    assert data.x_train.shape == (8, 8, 8, 3)
    with Image.open(folder / "tiles" / "train_1.png") as picture:
        second = np.asarray(picture)
    assert np.array_equal(data.x_train[7], second[:8, 8:])
    assert data.group_train.tolist() == list(range(8))
    assert list(extra) == ["center_train"]


def test_stream(folder: Path):
    data, extra = compact.load(folder, "flow")
    assert data.x_train[:, 0, 0, 0].tolist() == [20 * i for i in range(8)]
    assert extra == {}
    (folder / "flow" / "train.bin").write_bytes(b"short")
    with pytest.raises(SystemExit, match="bytes, got 5"):
        compact.load(folder, "flow")
    with pytest.raises(SystemExit, match="no dataset 'x', expected one of tiles, flow"):
        compact.load(folder, "x")


def test_the_command_writes_what_the_npz_reader_reads(folder: Path, tmp_path: Path):
    out = tmp_path / "out.npz"
    command = [sys.executable, str(SCRIPT), str(folder), "tiles", str(out), "--group", "center"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{out}: 8 training and 2 test images\n"
    data = load("npz", out)
    assert data.classes == ("a", "b")
    assert data.group_train is not None
