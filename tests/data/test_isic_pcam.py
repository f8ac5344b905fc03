"""ISIC 2019 (images and CSV files) and PCam (HDF5)."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedmerit.data import load
from fedmerit.data.readers import lesion_split
from fedmerit.errors import DataError, MissingExtra

CLASSES = ["MEL", "NV", "BCC", "UNK"]
TRUTH, METADATA = "ISIC_2019_Training_GroundTruth.csv", "ISIC_2019_Training_Metadata.csv"


def table(file: Path, rows: list[list[object]]) -> None:
    with file.open("w", newline="") as text:
        csv.writer(text).writerows(rows)


def one_hot(name: str) -> list[float]:
    return [float(name == other) for other in CLASSES]


def image(i: int) -> str:
    return f"ISIC_{i:07d}"


@pytest.fixture
def isic(tmp_path: Path) -> Path:
    """30 images: 10 of each of 3 classes, two images a lesion, one archive a class; UNK is empty."""
    (tmp_path / "ISIC_2019_Training_Input").mkdir()
    truth, metadata = [["image", *CLASSES]], [["image", "age_approx", "lesion_id", "sex"]]
    for i in range(30):
        name = CLASSES[i % 3]
        archive = ["HAM_", "BCN_", "MSK4_"][i % 3]
        pixels = np.zeros((15, 20, 3), np.uint8)
        pixels[:, :, 0] = 8 * i
        Image.fromarray(pixels).save(tmp_path / "ISIC_2019_Training_Input" / f"{image(i)}.jpg")
        truth.append([image(i), *one_hot(name)])
        metadata.append([image(i), 50, f"{archive}{i // 6:07d}", "female"])
    table(tmp_path / TRUTH, truth)
    table(tmp_path / METADATA, metadata)
    return tmp_path


def test_isic(isic: Path):
    data = load("isic2019", isic, size=8)
    assert data.x_train.shape[1:] == (8, 8, 3)
    assert data.classes == ("MEL", "NV", "BCC")
    assert np.bincount(data.y_test).tolist() == [2, 2, 2]
    assert len(data.y_train) == 24
    assert data.group_train is not None
    assert set(zip(data.y_train.tolist(), data.group_train.tolist(), strict=True)) == {
        (0, "HAM"),
        (1, "BCN"),
        (2, "MSK"),
    }
    assert "CC BY-NC 4.0" in data.notes[0]
    # Image i is 8 i red: image, class and lesion can be told from the pixels.
    red = np.rint(data.x_train[:, 4, 4, 0] / 8).astype(int)
    assert np.array_equal(red % 3, data.y_train)
    tested = np.rint(data.x_test[:, 4, 4, 0] / 8).astype(int)
    assert not set(zip(red // 6, red % 3, strict=True)) & set(zip(tested // 6, tested % 3, strict=True))
    again, other = load("isic2019", isic, size=8), load("isic2019", isic, size=8, split_seed=1)
    assert np.array_equal(again.x_test, data.x_test)
    assert not np.array_equal(other.x_test, data.x_test)


def test_isic_crops_the_centre(isic: Path):
    pixels = np.zeros((15, 25, 3), np.uint8)
    pixels[:, 5:20] = 255
    file = isic / "ISIC_2019_Training_Input" / f"{image(0)}.jpg"
    Image.fromarray(pixels).save(file, quality=100)
    data = load("isic2019", isic, size=15)
    x = np.concatenate([data.x_train, data.x_test])
    assert x.min(axis=(1, 2, 3)).max() > 200


def test_isic_without_metadata_and_with_a_group_column(isic: Path):
    rows = list(csv.reader((isic / METADATA).read_text().splitlines()))
    table(isic / METADATA, [[*row, "center" if k == 0 else f"c{k % 2}"] for k, row in enumerate(rows)])
    data = load("isic2019", isic, size=8)
    assert data.group_train is not None
    assert set(data.group_train.tolist()) == {"c0", "c1"}
    by_sex = load("isic2019", isic, size=8, group="sex")
    assert by_sex.group_train is not None
    assert set(by_sex.group_train.tolist()) == {"female"}
    table(isic / METADATA, [[*row[:2], "" if k else row[2], row[3]] for k, row in enumerate(rows)])
    unknown = load("isic2019", isic, size=8)
    assert unknown.group_train is not None
    assert set(unknown.group_train.tolist()) == {"unknown"}
    (isic / METADATA).unlink()
    assert load("isic2019", isic, size=8).group_train is None


def test_isic_with_a_given_test_file(isic: Path):
    extra = isic / "ISIC_2019_Test_Input"
    extra.mkdir()
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(extra / f"{image(99)}.jpg")
    listed = [[image(k), *one_hot(CLASSES[k % 3]), 1.0, 0.0] for k in (0, 1, 2)] + [
        [image(99), *one_hot("UNK"), 1.0, 0.0]
    ]
    table(isic / "test.csv", [["image", *CLASSES, "score_weight", "validation_weight"], *listed])
    data = load("isic2019", isic, size=8, test_csv="test.csv")
    assert data.y_test.tolist() == [0, 1, 2]
    assert len(data.y_train) == 27
    assert data.notes[2:] == (
        "1 test images of classes without a training image left out",
        "3 lesions have images on both sides of the given split",
    )


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=60), st.floats(0.05, 0.95)
)
def test_lesions_never_stand_on_both_sides(pairs, fraction):
    lesions, labels = [f"L{a}" for a, _ in pairs], [str(b) for _, b in pairs]
    held = lesion_split(labels, lesions, fraction, np.random.default_rng(0))
    tested = {lesion for lesion, out in zip(lesions, held, strict=True) if out}
    assert not tested & {lesion for lesion, out in zip(lesions, held, strict=True) if not out}
    assert not held.all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            [image(40), 1.0, 1.0, 0.0, 0.0],
            ", line 32: expected one 1.0 and otherwise 0.0 for image ISIC_0000040",
        ),
        (
            [image(40), 0.0, 0.0, 0.0, 0.0],
            ", line 32: expected one 1.0 and otherwise 0.0 for image ISIC_0000040",
        ),
        (
            [image(40), "yes", 0.0, 0.0, 0.0],
            ", line 32: expected one 1.0 and otherwise 0.0 for image ISIC_0000040",
        ),
        ([image(0), 1.0, 0.0, 0.0, 0.0], ", line 32: image ISIC_0000000 is listed twice"),
        ([image(40), 1.0], ": line 32: expected 5 cells, got 2"),
    ],
)
def test_bad_lines_of_the_ground_truth_are_named(isic: Path, row, message):
    with (isic / TRUTH).open("a", newline="") as text:
        csv.writer(text).writerow(row)
    with pytest.raises(DataError) as caught:
        load("isic2019", isic, size=8)
    assert str(caught.value) == f"{isic / TRUTH}{message}"


def test_isic_messages(isic: Path):
    with pytest.raises(DataError, match=r"Metadata\.csv: no column 'centre' to group by$"):
        load("isic2019", isic, group="centre")
    with pytest.raises(DataError, match="test_fraction must lie between 0 and 1, got 1"):
        load("isic2019", isic, test_fraction=1)
    (isic / "ISIC_2019_Training_Input" / f"{image(3)}.jpg").unlink()
    with pytest.raises(DataError, match=r"image ISIC_0000003\.jpg is missing$"):
        load("isic2019", isic, size=8)
    (isic / TRUTH).write_text("image,MEL,NV\n")
    with pytest.raises(DataError, match=r"GroundTruth\.csv: lists no image$"):
        load("isic2019", isic)
    (isic / TRUTH).write_bytes(b"image,MEL\n\x81,1.0\n")
    with pytest.raises(DataError, match=r"GroundTruth\.csv: line 2: the letters are neither UTF-8 nor"):
        load("isic2019", isic)
    (isic / TRUTH).unlink()
    with pytest.raises(DataError, match=r"GroundTruth\.csv: no such file$"):
        load("isic2019", isic)


# --- PCam


def pcam_file(folder: Path, split: str, key: str) -> Path:
    return folder / f"camelyonpatch_level_2_split_{split}_{key}.h5"


@pytest.fixture
def pcam(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, n in (("train", 9), ("valid", 4), ("test", 5)):
        x = rng.integers(0, 256, (n, 96, 96, 3), dtype=np.uint8)
        y = (np.arange(n, dtype=np.uint8) % 2).reshape(n, 1, 1, 1)
        for key, values in (("x", x), ("y", y)):
            with h5py.File(pcam_file(tmp_path, split, key), "w") as file:
                file.create_dataset(key, data=values, compression="gzip", chunks=True)
    return tmp_path


def test_pcam(pcam: Path, monkeypatch):
    monkeypatch.setattr("fedmerit.data.readers.HDF5_ROWS", 4)
    data = load("pcam", pcam)
    with h5py.File(pcam_file(pcam, "train", "x")) as file:
        assert np.array_equal(data.x_train, file["x"][:])
    assert data.y_train.tolist() == [0, 1] * 4 + [0]
    assert len(data.y_test) == 5
    assert data.classes == ("normal", "tumour")
    assert data.group_train is None
    few = load("pcam", pcam, limit=3, test="valid")
    assert (few.x_train.shape, few.x_test.shape) == ((3, 96, 96, 3), (3, 96, 96, 3))
    assert np.array_equal(few.x_train, data.x_train[:3])


def test_pcam_slides_are_groups(pcam: Path):
    meta = pcam / "camelyonpatch_level_2_split_train_meta.csv"
    table(meta, [["", "coord_y", "wsi"], *([k, 0, f"camelyon16_train_tumor_{k // 3:03d}"] for k in range(9))])
    data = load("pcam", pcam)
    assert data.group_train is not None
    assert len(np.unique(data.group_train)) == 3
    table(meta, [["", "wsi"], [0, "a"]])
    with pytest.raises(DataError, match=r"meta\.csv: expected a slide for each of 9 images, got 1$"):
        load("pcam", pcam)


def test_pcam_messages(pcam: Path, monkeypatch):
    with pytest.raises(DataError, match="pcam: limit must be at least 1, got 0"):
        load("pcam", pcam, limit=0)
    with pytest.raises(DataError, match="pcam: test must be test or valid, got 'train'"):
        load("pcam", pcam, test="train")
    file = pcam_file(pcam, "train", "x")
    raw = file.read_bytes()
    for damaged in (raw[: len(raw) // 2], b"", b"hello"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"train_x\.h5: cannot be read as HDF5: "):
            load("pcam", pcam)
    file.write_bytes(raw[: len(raw) // 2] + bytes(200) + raw[len(raw) // 2 + 200 :])
    with pytest.raises(DataError, match=r"train_x\.h5: cannot be read as HDF5: "):
        load("pcam", pcam)
    with h5py.File(file, "w") as empty:
        empty.create_group("x")
    with pytest.raises(DataError, match=r"train_x\.h5: data set 'x' is missing$"):
        load("pcam", pcam)
    file.rename(f"{file}.gz")
    with pytest.raises(
        DataError, match=r"train_x\.h5: no such file \(found it with \.gz: unpack it first\)$"
    ):
        load("pcam", pcam)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(
        MissingExtra, match=r"reading PCam's HDF5 files needs h5py: pip install 'fedmerit\[data\]'"
    ):
        load("pcam", pcam)
