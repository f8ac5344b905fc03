"""Folders of image files, a folder per class; Brain-MRI is one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np

from fedmerit.errors import DataError, MissingExtra
from fedmerit.protocol.pool import Images, Labels
from fedmerit.simulation.data.dataset import Dataset, Groups
from fedmerit.simulation.data.tables import rows

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
GREY = frozenset({"1", "L", "LA"})
COLOUR = frozenset({"RGB", "RGBA", "P", "PA", "CMYK", "YCbCr", "RGBX"})


def folder(
    path: Path,
    *,
    size: int | None = None,
    channels: int | None = None,
    train: str = "train",
    test: str = "test",
    groups: str | None = None,
) -> Dataset:
    """``train/<class>/*`` and ``test/<class>/*``; classes in sorted order, files by name within a class.

    Args:
        path: the folder that holds both.
        size: resize every image to size x size (aspect ratio not kept); without it all must be of one size.
        channels: 1 for grey, 3 for colour; grey only if every file is, unless given.
        train: name of the training folder.
        test: name of the test folder.
        groups: a CSV file under ``path`` with the columns ``file`` (``<class>/<name>`` under the training
            folder) and ``group`` (the hospital); every training file must be listed.
    """
    if channels not in (None, 1, 3):
        raise DataError(f"channels must be 1 (grey) or 3 (colour), got {channels!r}")
    classes = _classes(path / train)
    for name in _classes(path / test):
        if name not in classes:
            raise DataError(f"{path / test / name}: class {name!r} is missing in {path / train}")
    files_train, y_train = _files(path / train, classes)
    files_test, y_test = _files(path / test, classes)
    if channels is None:
        channels = 1 if all(mode in GREY for mode in modes([*files_train, *files_test])) else 3
    together = read_images([*files_train, *files_test], size=size, channels=channels)
    return Dataset(
        name=path.name,
        x_train=together[: len(files_train)],
        y_train=y_train,
        x_test=together[len(files_train) :],
        y_test=y_test,
        classes=tuple(classes),
        group_train=_groups(path / groups, [f"{f.parent.name}/{f.name}" for f in files_train])
        if groups
        else None,
        notes=(f"resized to {size}x{size}",) if size else (),
    )


def brain_mri(path: Path, *, size: int = 128) -> Dataset:
    """Brain Tumor MRI (M. Nickparvar): ``Training/<class>/*.jpg``, ``Testing/<class>/*.jpg`` of mixed sizes.

    Turned to grey and resized to size x size.
    """
    found = folder(path, size=size, channels=1, train="Training", test="Testing")
    notes = (
        "Brain Tumor MRI (M. Nickparvar; CC0 as published, figshare part CC BY 4.0)",
        f"grey, resized to {size}x{size}",
        "about a third of the published test images have a near-identical training image",
    )
    return Dataset(**{**vars(found), "name": "brain-mri", "notes": notes})


def modes(files: Sequence[Path]) -> list[str]:
    """Pillow's mode of every file, from the headers."""
    image = pillow()
    found = []
    for file in files:
        with _guard(file), image.open(file) as opened:
            found.append(str(opened.mode))
    return found


def read_images(files: Sequence[Path], *, size: int | None, channels: int, crop: bool = False) -> Images:
    """Decode 8-bit images to (n, h, w, channels), resized to size x size if given.

    ``crop`` cuts the largest centred square out before resizing (Lanczos).
    """
    image = pillow()
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise DataError(f"size must be a positive number of pixels, got {size!r}")
    out: Images | None = None
    for i, file in enumerate(files):
        with _guard(file), image.open(file) as opened:
            if opened.mode not in GREY | COLOUR:
                raise DataError(f"{file}: expected 8 bits per channel, got an image of mode {opened.mode}")
            picture = opened.convert("L" if channels == 1 else "RGB")
            if crop:
                side = min(picture.size)
                left, top = (picture.width - side) // 2, (picture.height - side) // 2
                picture = picture.crop((left, top, left + side, top + side))
            if size is not None and picture.size != (size, size):
                picture = picture.resize((size, size), image.Resampling.LANCZOS)
            pixels = np.asarray(picture).reshape(picture.height, picture.width, channels)
        if out is None:
            out = np.empty((len(files), *pixels.shape), np.uint8)
        if pixels.shape != out.shape[1:]:
            raise DataError(
                f"{file}: is {pixels.shape[1]}x{pixels.shape[0]} pixels, {files[0].name} is "
                f"{out.shape[2]}x{out.shape[1]}: expected one size, or size= to resize to"
            )
        out[i] = pixels
    if out is None:
        raise DataError("no images to read")
    return out


def pillow() -> ModuleType:
    """``PIL.Image``, or a message that says what to install."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("reading image files needs Pillow: pip install 'fedmerit[data]'") from error
    return Image


@contextmanager
def _guard(file: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except Exception as error:  # a damaged image can raise almost anything
        raise DataError(f"{file}: cannot be read as an image: {error}") from error


def _classes(path: Path) -> list[str]:
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    found = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not found:
        raise DataError(f"{path}: expected a folder per class, found none")
    return found


def _files(path: Path, classes: Sequence[str]) -> tuple[list[Path], Labels]:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        entries = (path / name).iterdir() if (path / name).is_dir() else iter(())
        images = sorted(f for f in entries if f.suffix.lower() in SUFFIXES and f.name[0] != ".")
        if not images:
            raise DataError(f"{path / name}: class {name!r} has no images")
        files += images
        labels += [label] * len(images)
    return files, np.array(labels, dtype=np.int64)


def _groups(table: Path, files: Sequence[str]) -> Groups:
    found = {row["file"]: row["group"] for _, row in rows(table, "file", "group")}
    for file in files:
        if not found.get(file):
            raise DataError(f"{table}: no group for {file}")
    return np.array([found[file] for file in files])
