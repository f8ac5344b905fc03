"""Readers of the paper's datasets as they are published, for prepare.py.

============ ============================================================== ==================
reader       path                                                           option
============ ============================================================== ==================
`cifar10`    ``cifar-10-batches-py/`` or ``cifar-10-python.tar.gz``
`brain_mri`  ``Training/<class>/*``, ``Testing/<class>/*``                  ``size``
`isic2019`   images, ground-truth CSV, metadata CSV                         ``size``, ``archive``
`pcam`       ``camelyonpatch_level_2_split_{train,test}_{x,y}.h5``          ``limit``
============ ============================================================== ==================
"""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from fedmerit.data.dataset import Dataset, Groups, folder, read_images, sheet
from fedmerit.errors import DataError
from fedmerit.protocol.pool import Images, Labels


def brain_mri(path: Path, *, size: int = 128) -> Dataset:
    """Read Brain Tumor MRI (M. Nickparvar): ``Training/<class>/*.jpg`` and ``Testing/<class>/*.jpg``.

    The files have mixed sizes; images are converted to grey and resized to size x size.
    """
    found = folder(path, size=size, channels=1, train="Training", test="Testing")
    notes = (
        "Brain Tumor MRI (M. Nickparvar; CC0 as published, figshare part CC BY 4.0)",
        f"grey, resized to {size}x{size}",
        "about a third of the published test images have a near-identical training image",
    )
    return Dataset(**{**vars(found), "name": "brain-mri", "notes": notes})


# ------------------------------------------------------------------------------------------------ CIFAR-10
# The python version: pickled batches, read without trusting them.
# The files are pickles of {b"data": uint8 array (10000, 3072), b"labels": list, ...}, written by Python 2.
# A pickle is a program. `_Unpickler` lets it name only inert stand-ins for the numpy constructors that these
# files use, and refuses everything else before importing it.

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR_TEST = "test_batch"


def cifar10(path: Path) -> Dataset:
    """Read the folder ``cifar-10-batches-py``, a folder that holds it, or ``cifar-10-python.tar.gz``."""
    files = _from_tar(path) if path.is_file() else _from_folder(path)
    batches = [_batch(raw, where) for raw, where in files]
    return Dataset(
        name="cifar10",
        x_train=np.concatenate([x for x, _ in batches[:-1]]),
        y_train=np.concatenate([y for _, y in batches[:-1]]),
        x_test=batches[-1][0],
        y_test=batches[-1][1],
        classes=CIFAR_CLASSES,
        notes=("CIFAR-10 (A. Krizhevsky, 2009): no licence stated, research use",),
    )


def _from_folder(path: Path) -> list[tuple[bytes, str]]:
    folder = path / CIFAR_FOLDER if (path / CIFAR_FOLDER).is_dir() else path
    found = []
    for name in (*CIFAR_TRAIN, CIFAR_TEST):
        file = folder / name
        try:
            found.append((file.read_bytes(), str(file)))
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    return found


def _from_tar(path: Path) -> list[tuple[bytes, str]]:
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and name in (*CIFAR_TRAIN, CIFAR_TEST):
                    content = archive.extractfile(member)
                    found[name] = content.read() if content else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as a tar archive: {error}") from error
    for name in (*CIFAR_TRAIN, CIFAR_TEST):
        if name not in found:
            raise DataError(f"{path}: {CIFAR_FOLDER}/{name} is missing")
    return [(found[name], f"{path}: {name}") for name in (*CIFAR_TRAIN, CIFAR_TEST)]


def _batch(raw: bytes, where: str) -> tuple[Images, Labels]:
    try:
        read = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in read.items()}
        pixels, labels = content["data"].array(), np.asarray(content["labels"])
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except KeyError as error:
        raise DataError(f"{where}: not a CIFAR-10 batch: {error.args[0]} is missing") from error
    except Exception as error:  # a damaged pickle can raise almost anything
        raise DataError(f"{where}: not a CIFAR-10 batch: {type(error).__name__}: {error}") from error
    if pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise DataError(f"{where}: expected data of shape (n, 3072), got {pixels.shape}")
    if labels.shape != (len(pixels),) or labels.dtype.kind not in "iu":
        raise DataError(f"{where}: expected {len(pixels)} integer labels, got {labels.dtype} {labels.shape}")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.astype(np.int64)


class _Kind:
    """Stand-in for ``numpy.dtype`` that keeps its name and ignores its state."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stand-in for ``numpy.ndarray`` that keeps shape, kind and bytes until `array` has checked them."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> Images:
        _, shape, kind, fortran, raw = self.state
        if kind.name != "u1":
            raise DataError(f"expected data of type uint8, got {kind.name}")
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _encode(text: str, _: str) -> bytes:
    """Replace ``_codecs.encode``, with which Python 3 writes bytes in protocol 2."""
    return text.encode("latin-1")


STAND_INS: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Kind,
    "_codecs.encode": _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in STAND_INS:
            raise DataError(f"refused: the pickle asks for {wanted}, which a CIFAR-10 batch does not need")
        return STAND_INS[wanted]


# ----------------------------------------------------------------------------------------------- ISIC 2019
# Dermoscopy images with eight diagnoses from several hospitals. The files lie under one folder, as published:
#
#     ISIC_2019_Training_Input/ISIC_0000000.jpg ...
#     ISIC_2019_Training_GroundTruth.csv      image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK     one-hot: 0.0 or 1.0
#     ISIC_2019_Training_Metadata.csv         image,age_approx,anatom_site_general,lesion_id,sex    (optional)

ISIC_TRUTH = "ISIC_2019_Training_GroundTruth.csv"
ISIC_METADATA = "ISIC_2019_Training_Metadata.csv"
TEST_FRACTION = 0.2
NOT_A_CLASS = frozenset({"image", "score_weight", "validation_weight"})


def isic2019(path: Path, *, size: int = 64, archive: str = "") -> Dataset:
    """Read ISIC 2019: colour, cropped to the centred square, resized; only classes with training images.

    The published test set has no labels, so a fifth of each class is set aside to test on, whole lesions at a
    time. An image without a ``lesion_id`` counts as a lesion of its own. Groups are the column ``center`` of
    the metadata, or else the letters with which a ``lesion_id`` begins (HAM, BCN, MSK).

    Args:
        path: the folder that holds the files above.
        size: side of the images in pixels.
        archive: only images whose ``lesion_id`` begins with these letters, such as HAM.
    """
    columns, truth = _one_hot(path / ISIC_TRUTH)
    metadata = _metadata(path / ISIC_METADATA)
    if archive:
        known = {image for image, row in metadata.items() if row.get("lesion_id", "").startswith(archive)}
        truth = {image: name for image, name in truth.items() if image in known}

    def lesion(image: str) -> str:
        return metadata.get(image, {}).get("lesion_id") or image

    images = list(truth)
    held = lesion_split(
        list(truth.values()), list(map(lesion, images)), TEST_FRACTION, np.random.default_rng(0)
    )
    tested = {image: truth[image] for image, out in zip(images, held, strict=True) if out}
    train = {image: name for image, name in truth.items() if image not in tested}
    classes = [name for name in columns if name in set(train.values())]
    test = {image: name for image, name in tested.items() if name in classes}
    if not train or not test:
        raise DataError(f"{path}: no image left to {'test' if train else 'train'} on")

    found = {file.stem: file for file in sorted(path.rglob("*.jpg"))}
    files = []
    for image in [*train, *test]:
        if image not in found:
            raise DataError(f"{path}: image {image}.jpg is missing")
        files.append(found[image])
    x = read_images(files, size=size, channels=3, crop=True)
    groups = np.array([_group(metadata.get(image, {})) for image in train])
    return Dataset(
        name="isic2019",
        x_train=x[: len(train)],
        y_train=_numbers(train.values(), classes),
        x_test=x[len(train) :],
        y_test=_numbers(test.values(), classes),
        classes=tuple(classes),
        group_train=groups if metadata else None,
        notes=("ISIC 2019: CC BY-NC 4.0 (no commercial use)", f"cropped and resized to {size}x{size}"),
    )


def lesion_split(
    labels: list[str], lesions: list[str], fraction: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return which images to test on: per class, whole lesions at random until ``fraction`` is reached.

    A lesion belongs to the class of its first image. A class keeps at least one lesion to train on.
    """
    members: dict[str, list[int]] = {}
    for i, lesion in enumerate(lesions):
        members.setdefault(lesion, []).append(i)
    by_class: dict[str, list[str]] = {}
    for lesion, images in members.items():
        by_class.setdefault(labels[images[0]], []).append(lesion)
    held = np.zeros(len(labels), dtype=np.bool_)
    for of_class in by_class.values():
        wanted = fraction * sum(len(members[lesion]) for lesion in of_class)
        taken = 0
        for k in rng.permutation(len(of_class))[:-1]:
            if taken >= wanted:
                break
            held[members[of_class[k]]] = True
            taken += len(members[of_class[k]])
    return held


def _one_hot(file: Path) -> tuple[list[str], dict[str, str]]:
    """Return the class columns, and the class of every image."""
    listed = sheet(file, "image").rows
    if not listed:
        raise DataError(f"{file}: lists no image")
    classes = [name for name in listed[0][1] if name not in NOT_A_CLASS]
    found: dict[str, str] = {}
    for line, row in listed:
        where = f"{file}, line {line}"
        if row["image"] in found:
            raise DataError(f"{where}: image {row['image']} is listed twice")
        marked = [name for name in classes if row[name] not in ("0", "0.0")]
        if len(marked) != 1 or row[marked[0]] not in ("1", "1.0"):
            raise DataError(f"{where}: expected one 1.0 and otherwise 0.0 for image {row['image']}")
        found[row["image"]] = marked[0]
    return classes, found


def _metadata(file: Path) -> dict[str, Mapping[str, str]]:
    """Return the metadata cells by image; empty if there is no file."""
    return {row["image"]: row for _, row in sheet(file, "image").rows} if file.is_file() else {}


def _group(row: Mapping[str, str]) -> str:
    if "center" in row:
        return row["center"] or "unknown"
    archive = re.match(r"[A-Za-z]+", row.get("lesion_id", ""))
    return archive.group() if archive else "unknown"


def _numbers(names: Iterable[str], classes: list[str]) -> Labels:
    return np.array([classes.index(name) for name in names], dtype=np.int64)


# ------------------------------------------------------------------------------------------- PatchCamelyon
# Files ``camelyonpatch_level_2_split_{train,test}_{x,y}.h5``, read in slices.

HDF5_ROWS = 2048
"""Number of images read at a time."""


def pcam(path: Path, *, limit: int | None = None) -> Dataset:
    """Read patches with or without a tumour in the centre: ``x`` (n, 96, 96, 3) and ``y`` (n, 1, 1, 1).

    Args:
        path: the folder of the unpacked files. ``..._train_meta.csv``, if present, gives the slide as group.
        limit: the most images to read of each half, from its start (the whole training half needs 7.2 GB).
    """
    halves: dict[str, Any] = {}
    for part in ("train", "test"):
        for key in ("x", "y"):
            halves[f"{key}_{part}"] = _hdf5(path / f"camelyonpatch_level_2_split_{part}_{key}.h5", key, limit)
        halves[f"y_{part}"] = halves[f"y_{part}"].reshape(len(halves[f"y_{part}"]), -1)
    return Dataset(
        name="pcam",
        **halves,
        classes=("normal", "tumour"),
        group_train=_slides(path / "camelyonpatch_level_2_split_train_meta.csv", len(halves["y_train"])),
        notes=("PatchCamelyon (B. Veeling et al., 2018): CC0",),
    )


def _hdf5(file: Path, key: str, limit: int | None) -> Images:
    if not file.is_file():
        packed = " (found it with .gz: unpack it first)" if Path(f"{file}.gz").exists() else ""
        raise DataError(f"{file}: no such file{packed}")
    try:
        with h5py.File(file, "r") as content:
            stored = content.get(key)
            if not isinstance(stored, h5py.Dataset) or not stored.shape:
                raise DataError(f"{file}: data set {key!r} is missing")
            n = len(stored) if limit is None else min(limit, len(stored))
            out = np.empty((n, *stored.shape[1:]), dtype=stored.dtype)
            for start in range(0, n, HDF5_ROWS):
                out[start : start + HDF5_ROWS] = stored[start : min(start + HDF5_ROWS, n)]
            return out
    except DataError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as HDF5: {error}") from error


def _slides(file: Path, n: int) -> Groups | None:
    if not file.is_file():
        return None
    slides = [row["wsi"] for _, row in sheet(file, "wsi").rows]
    if len(slides) < n:
        raise DataError(f"{file}: expected a slide for each of {n} images, got {len(slides)}")
    return np.array(slides[:n])
