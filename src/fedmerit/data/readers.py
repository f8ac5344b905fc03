"""Readers of datasets; `load` chooses one by name and returns a `Dataset`.

============= ================================================================= =========================
name          path                                                              reader
============= ================================================================= =========================
fashion-mini  none: shipped with the package                                    `fashion_mini`
npz           a file with x_train, y_train, x_test, y_test                      `npz`
table         a CSV or Parquet file                                             `fedmerit.data.tables.table`
folder        ``train/<class>/*``, ``test/<class>/*``                           `folder`
cifar10       ``cifar-10-batches-py/`` or ``cifar-10-python.tar.gz``            `cifar10`
brain-mri     ``Training/<class>/*``, ``Testing/<class>/*``                     `brain_mri`
isic2019      images, ground-truth CSV, metadata CSV                            `isic2019`
pcam          ``camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5``       `pcam`
============= ================================================================= =========================
"""

from __future__ import annotations

import inspect
import io
import pickle
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.config import load_object
from fedmerit.data.dataset import Dataset, Groups, arrays, rows, sheet
from fedmerit.data.tables import table
from fedmerit.errors import DataError, FedmeritError, MissingExtra
from fedmerit.notes import meant
from fedmerit.protocol.pool import Images, Labels
from fedmerit.scoring.amounts import readings
from fedmerit.scoring.validate import spelled, two_spellings

# --------------------------------------------------------------------------------------- folders of images

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
    """Read ``train/<class>/*`` and ``test/<class>/*``, sorted by class and then by file name.

    Args:
        path: the folder that holds both.
        size: resize every image to size x size (aspect ratio not kept); if None, all must have the same size.
        channels: 1 for grey, 3 for colour; by default grey if every file is grey.
        train: name of the training folder.
        test: name of the test folder.
        groups: a CSV file under ``path`` with the columns ``file`` (``<class>/<name>`` under the training
            folder) and ``group`` (the hospital); it must list every training file.
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
    names = [f"{f.parent.name}/{f.name}" for f in files_train]
    group, said = _groups(path / groups, names) if groups else (None, ())
    return Dataset(
        name=path.name,
        x_train=together[: len(files_train)],
        y_train=y_train,
        x_test=together[len(files_train) :],
        y_test=y_test,
        classes=tuple(classes),
        group_train=group,
        notes=(*([f"resized to {size}x{size}"] if size else []), *said),
    )


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


def modes(files: Sequence[Path]) -> list[str]:
    """Return Pillow's mode of every file, read from its header."""
    image = pillow()
    found = []
    for file in files:
        with _guard(file), image.open(file) as opened:
            found.append(str(opened.mode))
    return found


def read_images(files: Sequence[Path], *, size: int | None, channels: int, crop: bool = False) -> Images:
    """Decode 8-bit images to (n, h, w, channels), resized to size x size if given.

    ``crop`` cuts out the largest centred square before resizing (Lanczos).
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
    """Return ``PIL.Image``, or raise an error that says what to install."""
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


def _groups(table: Path, files: Sequence[str]) -> tuple[Groups, tuple[str, ...]]:
    """Return the group of every file, and notes on how the table was read."""
    listed = sheet(table, "file", "group")
    found = {row["file"]: row["group"] for _, row in listed.rows}
    for file in files:
        if not found.get(file):
            raise DataError(f"{table}: no group for {file}")
    return np.array([found[file] for file in files]), tuple(f"{table.name}: {note}" for note in listed.notes)


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
NOT_A_CLASS = frozenset({"image", "score_weight", "validation_weight"})


def isic2019(
    path: Path,
    *,
    size: int = 64,
    group: str | None = None,
    archive: str = "",
    test_fraction: float = 0.2,
    split_seed: int = 0,
    test_csv: str | None = None,
) -> Dataset:
    """Read ISIC 2019: colour, cropped to the centred square, resized; only classes with training images.

    Args:
        path: the folder that holds the files above; images are looked for in all folders below it.
        size: side of the images.
        group: column of the metadata file to group by. Default: ``center`` if there is such a column,
            otherwise the first letters of ``lesion_id`` (the archive: HAM, BCN, MSK; "unknown" if empty).
        archive: only images whose ``lesion_id`` begins with these letters, such as HAM.
        test_fraction: share of each class to test on; no lesion is on both sides. An image without a
            ``lesion_id`` counts as a lesion of its own.
        split_seed: seed of that split.
        test_csv: replaces that split: a ground-truth file of the same form that lists the test images; they
            are removed from the training images.
    """
    columns, truth = _one_hot(path / ISIC_TRUTH)
    metadata = _metadata(path / ISIC_METADATA)
    if archive:
        known = {image for image, row in metadata.items() if row.get("lesion_id", "").startswith(archive)}
        truth = {image: name for image, name in truth.items() if image in known}

    def lesion(image: str) -> str:
        return metadata.get(image, {}).get("lesion_id") or image

    if group is not None and not any(group in row for row in metadata.values()):
        raise DataError(f"{path / ISIC_METADATA}: no column {group!r} to group by")
    if test_csv is not None:
        tested = _one_hot(path / test_csv)[1]
    else:
        if not 0 < test_fraction < 1:
            raise DataError(f"test_fraction must lie between 0 and 1, got {test_fraction}")
        images = list(truth)
        held = lesion_split(
            list(truth.values()), list(map(lesion, images)), test_fraction, np.random.default_rng(split_seed)
        )
        tested = {image: truth[image] for image, out in zip(images, held, strict=True) if out}
    train = {image: name for image, name in truth.items() if image not in tested}
    classes = [name for name in columns if name in set(train.values())]
    left_out = [image for image, name in tested.items() if name not in classes]
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
    notes = ["ISIC 2019: CC BY-NC 4.0 (no commercial use)", f"cropped and resized to {size}x{size}"]
    if left_out:
        notes.append(f"{len(left_out)} test images of classes without a training image left out")
    shared = set(map(lesion, train)) & set(map(lesion, test))
    if shared:
        notes.append(f"{len(shared)} lesions have images on both sides of the given split")
    groups = np.array([_group(metadata.get(image, {}), group) for image in train])
    return Dataset(
        name="isic2019",
        x_train=x[: len(train)],
        y_train=_numbers(train.values(), classes),
        x_test=x[len(train) :],
        y_test=_numbers(test.values(), classes),
        classes=tuple(classes),
        group_train=groups if metadata else None,
        notes=tuple(notes),
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
    listed = rows(file, "image")
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
    return {row["image"]: row for _, row in rows(file, "image")} if file.is_file() else {}


def _group(row: Mapping[str, str], column: str | None) -> str:
    if column is not None or "center" in row:
        return row.get(column or "center") or "unknown"
    archive = re.match(r"[A-Za-z]+", row.get("lesion_id", ""))
    return archive.group() if archive else "unknown"


def _numbers(names: Iterable[str], classes: list[str]) -> Labels:
    return np.array([classes.index(name) for name in names], dtype=np.int64)


# ------------------------------------------------------------------------------------------- PatchCamelyon
# Files ``camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5``, read in slices.

HDF5_ROWS = 2048
"""Number of images read at a time."""


def pcam(path: Path, *, limit: int | None = None, test: str = "test") -> Dataset:
    """Read patches with or without a tumour in the centre: ``x`` (n, 96, 96, 3) and ``y`` (n, 1, 1, 1).

    Args:
        path: the folder of the unpacked files. ``..._train_meta.csv``, if present, gives the slide as group.
        limit: the most images to read of each half, from its start (the whole training half needs 7.2 GB).
        test: which half to test on, "test" or "valid".
    """
    if test not in ("test", "valid"):
        raise DataError(f"pcam: test must be test or valid, got {test!r}")
    if limit is not None and limit < 1:
        raise DataError(f"pcam: limit must be at least 1, got {limit}")
    halves: dict[str, Any] = {}
    for part, split in (("train", "train"), ("test", test)):
        for key in ("x", "y"):
            halves[f"{key}_{part}"] = _hdf5(
                path / f"camelyonpatch_level_2_split_{split}_{key}.h5", key, limit
            )
        halves[f"y_{part}"] = halves[f"y_{part}"].reshape(len(halves[f"y_{part}"]), -1)
    return Dataset(
        name="pcam",
        **halves,
        classes=("normal", "tumour"),
        group_train=_slides(path / "camelyonpatch_level_2_split_train_meta.csv", len(halves["y_train"])),
        notes=("PatchCamelyon (B. Veeling et al., 2018): CC0",),
    )


def _hdf5(file: Path, key: str, limit: int | None) -> Images:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra("reading PCam's HDF5 files needs h5py: pip install 'fedmerit[data]'") from error
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
    slides = [row["wsi"] for _, row in rows(file, "wsi")]
    if len(slides) < n:
        raise DataError(f"{file}: expected a slide for each of {n} images, got {len(slides)}")
    return np.array(slides[:n])


# ------------------------------------------------------------------------------------------------- by name

FASHION_MINI = Path(__file__).with_name("fashion_mini.npz")
BOTH_HALVES = ("x_train", "y_train", "x_test", "y_test")
"""The arrays that every dataset has."""


def load(name: str, path: str | Path | None = None, **options: Any) -> Dataset:
    """Read a dataset.

    Args:
        name: one of ``READERS``, or a user's ``module:function``, see `own`.
        path: where its files are; fashion-mini takes none.
        options: keyword arguments of the reader.
    """
    if ":" in name:
        return own(name, path, options)
    if name not in READERS:
        raise DataError(f'dataset must be one of {", ".join(READERS)} or "module:function", got {name!r}')
    reader = READERS[name]
    taken = inspect.signature(reader).parameters
    known = [key for key in taken if key != "path"]
    for key in options:
        if key not in known:
            allowed = f"expected one of {', '.join(known)}" if known else "it has none"
            asked = meant(key, known)
            raise DataError.at("data.options", f"{name!r} has no option {key!r}{asked}: {allowed}")
    needed = [key for key, one in taken.items() if one.default is one.empty and key not in ("path", *options)]
    if needed:
        raise DataError.at(
            "data.options", f'{name!r} needs the option {needed[0]!r}, such as {needed[0]} = "y"'
        )
    if "path" not in taken:
        if path is not None:
            raise DataError(f"dataset {name!r} is part of the package and takes no path, got {str(path)!r}")
        return reader(**options)
    if path is None:
        raise DataError(f"dataset {name!r} needs the path of its files")
    if not Path(path).exists():
        raise DataError(f"{path}: no such file or folder")
    return reader(Path(path), **options)


def fashion_mini() -> Dataset:
    """Read the first 1,813 training and 600 test images of Fashion-MNIST (28x28 grey, 10 classes; MIT)."""
    found = npz(FASHION_MINI)
    note = (
        "Fashion-MNIST (Zalando SE, MIT licence): first 1,813 training and first 600 test images, unchanged"
    )
    return Dataset(**{**vars(found), "name": "fashion-mini", "notes": (note,)})


def npz(path: Path, *, images: bool = True) -> Dataset:
    """Read ``x_train, y_train, x_test, y_test`` as in `Dataset`, and ``group_train``, ``classes`` if present.

    If y is one integer or truth value per sample and ``classes`` is not there, the classes are "0", "1", ...
    up to the largest label. Texts are names of classes. If y is anything else, it is no class. Pickled
    objects are refused.

    Args:
        path: the file.
        images: False if x of shape (n, a, b) are no grey images, but sequences, for example.
    """
    content = arrays(path)
    missing = [key for key in BOTH_HALVES if key not in content]
    if missing:
        raise DataError(f"{path}: array {missing[0]} is missing, found {', '.join(content) or 'none'}")
    found = {key: content[key] for key in (*BOTH_HALVES, "group_train", "classes") if key in content}
    return Dataset(name=path.name, images=images, **with_classes(found))


def with_classes(found: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a dataset with its classes: texts in y, or "0", "1", ... if they have no names."""
    labels = [np.asarray(found[key]) for key in ("y_train", "y_test")]
    if "classes" not in found and all(y.dtype.kind == "U" and y.ndim == 1 for y in labels):
        texts = np.unique(np.concatenate(labels))
        if all(map(readings, texts.tolist())):
            raise DataError(f"y holds numbers as text, such as {str(texts[0])!r:.60}: store them as numbers")
        if alike := two_spellings(texts.tolist()):
            one, other = spelled(*alike)
            raise DataError(
                f"y holds {one} and {other}, which would be two classes: write a class in one way"
            )
        train, test = (np.searchsorted(texts, y) for y in labels)
        found = {**found, "classes": texts, "y_train": train, "y_test": test}
    if "classes" not in found and all(_are_labels(y) for y in labels):
        largest = max(int(np.max(y, initial=True)) for y in labels)
        found["classes"] = np.arange(min(largest, len(labels[0])) + 1).astype(str)
    names = found.get("classes", ())
    return {**found, "classes": tuple(np.atleast_1d(names).tolist()) if len(names) else ()}


def _are_labels(y: Labels) -> bool:
    return y.dtype.kind in "iub" and (y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1))


def own(name: str, path: str | Path | None, options: Mapping[str, Any]) -> Dataset:
    """Read data by a user's ``module:function``, called as ``function(**options)``, with ``path=`` if given.

    It returns a `Dataset`, or a mapping with ``x_train, y_train, x_test, y_test`` and, if there are any,
    ``group_train``, ``classes`` and ``images``, as in `Dataset` and `npz`.
    """
    function = load_object(name, "data.name")
    given = {**({} if path is None else {"path": str(path)}), **options}
    try:
        found = function(**given)
    except FedmeritError:
        raise
    except Exception as error:  # a user's code may raise anything
        called = ", ".join(f"{key}={value!r:.60}" for key, value in given.items())
        raise DataError(f"{name}({called}) failed: {type(error).__name__}: {error}") from error
    if isinstance(found, Dataset):
        return found
    if not isinstance(found, Mapping) or any(key not in found for key in BOTH_HALVES):
        got = f"one with {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
        raise DataError(f"{name}: expected a Dataset, or a mapping with {', '.join(BOTH_HALVES)}, got {got}")
    known = (*BOTH_HALVES, "group_train", "classes", "images", "notes")
    if unknown := [str(key) for key in found if key not in known]:
        raise DataError(f"{name}: unknown key {unknown[0]!r}; expected {', '.join(known)}")
    return Dataset(name=name, **with_classes(dict(found)))


READERS: dict[str, Callable[..., Dataset]] = {
    "fashion-mini": fashion_mini,
    "npz": npz,
    "folder": folder,
    "table": table,
    "cifar10": cifar10,
    "brain-mri": brain_mri,
    "isic2019": isic2019,
    "pcam": pcam,
}
