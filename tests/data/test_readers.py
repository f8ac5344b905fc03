"""Readers, on small files of each public format that the tests write themselves."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from fedmerit.data import Dataset, load
from fedmerit.data.dataset import READERS
from fedmerit.errors import DataError, MissingExtra

RNG = np.random.default_rng(0)


def picture(
    file: Path, size: tuple[int, int] = (8, 8), mode: str = "RGB", value: int | None = None
) -> np.ndarray:
    """Write a random image, or a uniform one; the pixels."""
    from PIL import Image

    shape = size[::-1] if mode == "L" else (*size[::-1], 3)
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8) if value is None else np.full(shape, value, np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return pixels


def table(file: Path, rows: list[list[object]]) -> None:
    with file.open("w", newline="") as text:
        csv.writer(text).writerows(rows)


def refused(message: str, name: str, path: Path | None = None, **options) -> None:
    with pytest.raises(DataError) as caught:
        load(name, path, **options)
    assert str(caught.value) == message


# --- load, fashion-mini, npz


def test_fashion_mini_is_complete_and_needs_no_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    data = load("fashion-mini")
    assert data.x_train.shape == (1813, 28, 28, 1)
    assert data.x_test.shape == (600, 28, 28, 1)
    assert data.x_train.dtype == np.uint8
    assert np.bincount(data.y_train).tolist() == [174, 196, 178, 180, 172, 182, 175, 194, 179, 183]
    assert np.bincount(data.y_test).tolist() == [62, 65, 76, 55, 67, 50, 59, 53, 56, 57]
    assert data.classes[0] == "t-shirt/top"
    assert "MIT" in data.notes[0]


def test_the_licence_travels_with_the_images():
    import fedmerit.data

    notice = Path(fedmerit.data.__file__).with_name("fashion_mini.LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in notice
    assert "Permission is hereby granted" in notice


def arrays(**changes) -> dict[str, np.ndarray]:
    return {
        "x_train": RNG.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": RNG.integers(0, 256, (3, 4, 5, 3), dtype=np.uint8),
        "y_test": np.array([2, 1, 0]),
        **changes,
    }


def test_npz(tmp_path: Path):
    file = tmp_path / "a.npz"
    given = arrays(group_train=np.array(list("uvwuvw")), classes=np.array(["x", "y", "z"]))
    np.savez(file, **given, other=np.arange(3))
    data = load("npz", file)
    for key in ("x_train", "y_train", "x_test", "y_test", "group_train"):
        assert np.array_equal(getattr(data, key), given[key])
    assert data.classes == ("x", "y", "z")


def test_npz_without_channels_or_class_names_and_with_floats_and_column_labels(tmp_path: Path):
    x = RNG.random((6, 4, 5))
    file = tmp_path / "a.npz"
    y = np.array([[0], [1], [2], [0], [1], [2]], np.uint8)
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=np.arange(6) % 2)
    data = load("npz", str(file))
    assert data.x_train.shape == (6, 4, 5, 1)
    assert data.x_train.dtype == np.float32
    assert data.y_train.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.y_train.dtype == np.int64
    assert data.classes == ("0", "1", "2")


def test_npz_refuses_pickled_objects(tmp_path: Path):
    file = tmp_path / "a.npz"
    np.savez(file, **arrays(y_test=np.array([{}, {}, {}], dtype=object)))
    with pytest.raises(DataError, match=r"a\.npz: array y_test holds Python objects"):
        load("npz", file)
    groups = np.array(["Ulm", "Bonn"] * 3, dtype=object)  # as pandas has them
    np.savez(file, **arrays(group_train=groups))
    with pytest.raises(DataError, match=r"array group_train .*np\.asarray\(groups, dtype=str\)"):
        load("npz", file)
    np.savez(file, **arrays(group_train=np.asarray(groups, dtype=str)))
    assert set(load("npz", file).group_train) == {"Ulm", "Bonn"}


@pytest.mark.parametrize("damage", [0, 10, 300, "a flipped bit"])
def test_a_damaged_npz_is_refused(tmp_path: Path, damage: int | str):
    file = tmp_path / "a.npz"
    np.savez_compressed(file, **arrays())
    raw = bytearray(file.read_bytes())
    raw[120] ^= 0xFF
    file.write_bytes(raw if isinstance(damage, str) else file.read_bytes()[:damage])
    with pytest.raises(DataError, match=r"a\.npz: cannot be read as \.npz: "):
        load("npz", file)


def test_npz_messages(tmp_path: Path):
    file = tmp_path / "a.npz"
    np.savez(file, x_train=np.zeros(3), x_test=np.zeros(3))
    refused(f"{file}: array y_train is missing, found x_train, x_test", "npz", file)
    np.save(tmp_path / "a.npy", np.zeros(3))
    refused(f"{tmp_path / 'a.npy'}: holds a single array, expected an .npz file", "npz", tmp_path / "a.npy")


def test_load_messages(tmp_path: Path):
    names = "fashion-mini, npz, folder, table"
    assert ", ".join(READERS) == names
    refused(f"dataset must be one of {names} or \"module:function\", got 'mnist'", "mnist")
    refused("dataset 'npz' needs the path of its files", "npz")
    refused(f"{tmp_path / 'no'}: no such file or folder", "npz", tmp_path / "no")
    no_path = "dataset 'fashion-mini' is part of the package and takes no path, got '/x'"
    refused(no_path, "fashion-mini", Path("/x"))
    refused("data.options: 'fashion-mini' has no option 'size': it has none", "fashion-mini", size=3)
    near = "data.options: 'npz' has no option 'image' (did you mean images?): expected one of images"
    refused(near, "npz", tmp_path, image=3)


# --- what every dataset is checked for


NONE = {"classes": ()}
SHAPES = "must have shape (n, height, width, channels) for images, or (n, ...), none of them 0, got"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"y_train": np.array([0, 1, 2, 0, 1, 3])}, "y_train: label 3 of sample 5 is outside 0 .. 2"),
        ({"y_test": np.array([0, -1, 2])}, "y_test: label -1 of sample 1 is outside 0 .. 2"),
        ({"y_train": np.array([0, 1, 1, 0, 1, 1])}, "class 'c' has no training sample"),
        ({"y_train": np.array([0, 1, 2])}, "6 samples in x_train but 3 labels in y_train"),
        ({"y_test": np.zeros(3)}, "y_test must be integers of shape (n,), because classes are named"),
        ({**NONE, "y_train": np.full(6, 2.5), "y_test": np.zeros(3)}, "y_train is the same for every sample"),
        (
            {**NONE, "y_train": np.arange(6.0), "y_test": np.array([0, np.nan, 1])},
            "y_test: sample 1 holds a value that is not finite",
        ),
        (
            {**NONE, "y_train": np.arange(12.0).reshape(6, 2), "y_test": np.zeros((3, 3))},
            "training y are 2 float32, test y 3 float32",
        ),
        ({**NONE, "y_train": np.array(list("abcdef"))}, "y_train must be numbers, got <U1"),
        ({"x_test": np.zeros((3, 4, 4, 3), np.uint8)}, "samples are 4x5x3 uint8, test samples 4x4x3 uint8"),
        ({"x_test": np.zeros((3, 4, 5, 3))}, "samples are 4x5x3 uint8, test samples 4x5x3 float32"),
        ({"x_train": np.zeros((6, 4, 5, 3), np.int32)}, "samples are 4x5x3 int64, test samples 4x5x3 uint8"),
        ({"x_train": np.zeros((6, 4))}, "samples are 4 float32, test samples 4x5x3 uint8"),
        ({"x_train": np.zeros((6, 2), complex)}, "x_train must be numbers, got complex128"),
        ({"x_train": np.zeros(6)}, f"x_train {SHAPES} (6,)"),
        ({"x_test": np.zeros((0, 4, 5, 3), np.uint8)}, f"x_test {SHAPES} (0, 4, 5, 3)"),
        ({"x_train": np.full((6, 4, 5, 3), np.nan)}, "x_train: sample 0 holds a value that is not finite"),
        ({"classes": ("a",)}, "expected at least 2 classes, or none where y is not a class label, got 1"),
        ({"classes": ("a", "b", "a")}, "class name 'a' appears twice"),
        ({"group_train": np.array(["x"])}, "per training sample (6), got <U1 of shape (1,)"),
        ({"group_train": np.zeros(6)}, "per training sample (6), got float64 of shape (6,)"),
    ],
)
def test_malformed_datasets_are_refused(changes, told):
    with pytest.raises(DataError) as caught:
        Dataset(name="d", **{"classes": ("a", "b", "c"), **arrays(), **changes})
    assert str(caught.value).startswith("d: ")
    assert told in str(caught.value)


# --- image folders


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for name in ("dog", "cat"):
            for i in (2, 10):
                picture(tmp_path / part / name / f"{i}.png")
    return tmp_path


def test_folder_in_a_fixed_order(images: Path):
    last = picture(images / "train" / "dog" / "Z.PNG")
    picture(images / "train" / "dog" / ".hidden.png", (3, 3))
    (images / "train" / "dog" / "notes.txt").write_text("not an image")
    data = load("folder", images)
    assert data.classes == ("cat", "dog")
    assert data.y_train.tolist() == [0, 0, 1, 1, 1]
    assert np.array_equal(data.x_train[4], last)
    assert data.x_train.shape == (5, 8, 8, 3)
    assert data.group_train is None
    again = load("folder", images)
    assert np.array_equal(data.x_train, again.x_train)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "webp", "jpg", "gif"])
def test_folder_formats_and_grey(tmp_path: Path, suffix: str):
    for part in ("train", "test"):
        for i, name in enumerate("ab"):
            picture(tmp_path / part / name / f"0.{suffix}", mode="L", value=100 * i)
    data = load("folder", tmp_path)
    channels = 3 if suffix in ("webp", "gif") else 1  # those two have no grey mode that Pillow reads back
    assert data.x_train.shape == (2, 8, 8, channels)
    assert np.abs(data.x_train[1].astype(int) - 100).max() <= 1
    assert load("folder", tmp_path, channels=3).x_train.shape == (2, 8, 8, 3)
    assert load("folder", tmp_path, channels=1).x_train.shape == (2, 8, 8, 1)


def test_folder_of_mixed_sizes_needs_a_size(images: Path):
    odd = images / "train" / "dog" / "2.png"
    picture(odd, (8, 9))
    refused(
        f"{odd}: is 8x9 pixels, 10.png is 8x8: expected one size, or size= to resize to", "folder", images
    )
    assert load("folder", images, size=6).x_train.shape == (4, 6, 6, 3)
    assert load("folder", images, size=6).notes == ("resized to 6x6",)


def test_folder_groups(images: Path):
    rows = [[f"{c}/{i}.png", f"hospital {c}{i % 4}"] for c in ("cat", "dog") for i in (2, 10)]
    listed = [["file", "group"], *rows]
    table(images / "groups.csv", listed)
    data = load("folder", images, groups="groups.csv")
    assert data.group_train is not None
    assert data.group_train.tolist() == ["hospital cat2", "hospital cat2", "hospital dog2", "hospital dog2"]
    text = "\r\n".join(";".join(row) for row in listed)
    (images / "groups.csv").write_bytes(text.replace("hospital", "Köln").encode("utf-16"))
    european = load("folder", images, groups="groups.csv")
    assert european.group_train is not None
    assert european.group_train.tolist()[0] == "Köln cat2"
    said = "groups.csv: the file was read with text in UTF-16, cells separated by semicolons"
    assert said in european.notes
    table(images / "groups.csv", listed[:-1])
    refused(f"{images / 'groups.csv'}: no group for dog/10.png", "folder", images, groups="groups.csv")
    table(images / "groups.csv", [["path", "group"]])
    missing = "line 1: missing column 'file'; expected file, group; got 'path, group'"
    refused(f"{images / 'groups.csv'}: {missing}", "folder", images, groups="groups.csv")
    refused(f"{images / 'none.csv'}: no such file or folder", "folder", images, groups="none.csv")


def test_folder_messages(images: Path, tmp_path: Path):
    refused(f"{images / 'validation'}: no such folder", "folder", images, test="validation")
    refused("channels must be 1 (grey) or 3 (colour), got 2", "folder", images, channels=2)
    refused("size must be a positive number of pixels, got 0", "folder", images, size=0)
    (images / "train" / "emu").mkdir()
    refused(f"{images / 'train' / 'emu'}: class 'emu' has no images", "folder", images)
    picture(images / "train" / "emu" / "1.png")
    refused(f"{images / 'test' / 'emu'}: class 'emu' has no images", "folder", images)
    (images / "train" / "emu").rename(images / "test" / "emu")
    refused(f"{images / 'test' / 'emu'}: class 'emu' is missing in {images / 'train'}", "folder", images)
    (tmp_path / "bare" / "train").mkdir(parents=True)
    refused(
        f"{tmp_path / 'bare' / 'train'}: expected a folder per class, found none", "folder", tmp_path / "bare"
    )


@pytest.mark.parametrize("damage", ["text", "truncated", "empty"])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_damaged_image_is_named(images: Path, damage: str, suffix: str):
    file = images / "test" / "dog" / f"x.{suffix}"
    picture(file, (64, 64))
    raw = file.read_bytes()
    file.write_bytes({"text": b"hello", "truncated": raw[: len(raw) // 2], "empty": b""}[damage])
    with pytest.raises(DataError) as caught:
        load("folder", images, size=8)
    assert str(caught.value).startswith(f"{file}: cannot be read as an image: ")


def test_sixteen_bit_images_are_not_cut_to_eight(images: Path):
    from PIL import Image

    file = images / "train" / "dog" / "x.png"
    Image.fromarray(np.full((8, 8), 60000, np.uint16)).save(file)
    refused(f"{file}: expected 8 bits per channel, got an image of mode I;16", "folder", images)


def test_without_pillow_it_says_what_to_install(images: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match="image files need: pip install pillow"):
        load("folder", images)
