"""A dataset in memory (samples, targets, class names, groups), and its readers; `load` chooses one by name.

============= ================================================================= =========================
name          path                                                              reader
============= ================================================================= =========================
fashion-mini  none: shipped with the package                                    `fashion_mini`
npz           a file with x_train, y_train, x_test, y_test                      `npz`
table         a CSV or Parquet file                                             `fedmerit.data.tables.table`
folder        ``train/<class>/*``, ``test/<class>/*``                           `folder`
============= ================================================================= =========================
"""

from __future__ import annotations

import inspect
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_type_hints

import numpy as np
import numpy.typing as npt

from fedmerit.config import fits, load_object, words
from fedmerit.data.tables import table
from fedmerit.errors import DataError, FedmeritError, FileFormatError, MissingExtra
from fedmerit.files.sheets import Expected, Sheet, read_sheet
from fedmerit.notes import meant, spelled, two_spellings
from fedmerit.protocol.pool import Images, Labels
from fedmerit.scoring.amounts import readings


def sheet(file: Path, *columns: str) -> Sheet:
    """Return the table in a CSV file. The columns ``columns`` must exist."""
    try:
        return read_sheet(file, Expected(columns))
    except FileFormatError as error:
        raise DataError(str(error)) from error


def arrays(file: Path) -> dict[str, Any]:
    """Return all arrays of an .npz file; refuse pickled objects."""
    try:
        with file.open("rb") as raw:
            content = np.load(raw, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise DataError(f"{file}: holds a single array, expected an .npz file")
            return {key: _array(file, content, key) for key in content.files}
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read as .npz: {error}") from error


def _array(file: Path, content: Any, key: str) -> Any:
    """Return one array of an .npz file, if it holds no Python objects."""
    try:
        return content[key]
    except ValueError:
        if not _holds_objects(content, key):
            raise
    name = "groups" if key == "group_train" else key
    raise DataError(
        f"{file}: array {key} holds Python objects (dtype object, which pandas gives for text), and these "
        f"are refused: save text as np.asarray({name}, dtype=str), numbers with a dtype of numbers"
    )


def _holds_objects(content: Any, key: str) -> bool:
    with content.zip.open(f"{key}.npy") as raw:
        first = np.lib.format.read_magic(raw) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        return bool(read(raw)[2].hasobject)


# --------------------------------------------------------------------------------------------- the dataset

Groups = npt.NDArray[Any]
"""Hospital, centre or slide of each sample, strings or integers, shape (samples,)."""


REAL = "whole numbers are classes; store y as floats if they are real numbers"
Target = Literal["classes", "numbers", "arrays"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """Training and test samples with their targets. They are checked and brought to one form on creation.

    Args:
        name: for messages and records.
        x_train: (n, h, w, c) or (n, h, w) for images, or (n, ...); floats (kept as float32), uint8, or other
            integers (kept as int64, such as tokens).
        y_train: with ``classes``, (n,) or (n, 1) integers in 0 .. len(classes) - 1, of which every class must
            occur. Without, (n,) or (n, 1) real numbers (kept as float32), or arrays (n, ...) of numbers.
        x_test: like ``x_train``, with samples of the same shape and type.
        y_test: like ``y_train``, but a class may be absent (then a balanced test pool is refused).
        classes: names by class number; empty if y is not a class label.
        group_train: (n,) strings or integers: who recorded each training sample. None if unknown.
        notes: what readers of results must know, such as licence, re-encoding or dropped images.
        images: whether x of shape (n, a, b) are grey images; False leaves them as they are.
    """

    name: str
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    classes: tuple[str, ...] = ()
    group_train: Groups | None = None
    notes: tuple[str, ...] = ()
    images: bool = True

    def __post_init__(self) -> None:
        classes = tuple(str(name) for name in self.classes)
        if len(classes) == 1:
            raise DataError(
                f"{self.name}: expected at least 2 classes, or none where y is not a class label, got 1"
            )
        if twice := [name for name in classes if classes.count(name) > 1]:
            raise DataError(f"{self.name}: class name {twice[0]!r} appears twice")
        object.__setattr__(self, "classes", classes)
        for part in ("train", "test"):
            x = _samples(getattr(self, f"x_{part}"), f"{self.name}: x_{part}", images=self.images)
            what, y = f"{self.name}: y_{part}", _column(getattr(self, f"y_{part}"))
            y = _labels(y, what, classes) if classes else _targets(y, what)
            if len(x) != len(y):
                raise DataError(f"{self.name}: {len(x)} samples in x_{part} but {len(y)} labels in y_{part}")
            object.__setattr__(self, f"x_{part}", x)
            object.__setattr__(self, f"y_{part}", y)
        for what, train, test in (("samples", self.x_train, self.x_test), ("y", self.y_train, self.y_test)):
            if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
                kinds = [f"{'x'.join(map(str, x.shape[1:])) or 'one'} {x.dtype}" for x in (train, test)]
                raise DataError(f"{self.name}: training {what} are {kinds[0]}, test {what} {kinds[1]}")
        if classes:
            missing = np.flatnonzero(np.bincount(self.y_train, minlength=len(classes)) == 0)
            if missing.size:
                name = classes[missing[0]]
                hint = f": {REAL}" if name.isdigit() else ""
                raise DataError(f"{self.name}: class {name!r} has no training sample{hint}")
        elif bool((self.y_train == self.y_train[:1]).all()):
            raise DataError(
                f"{self.name}: y_train is the same for every sample, so there is nothing to learn"
            )
        if self.group_train is not None:
            groups = np.asarray(self.group_train)
            if groups.shape != (len(self.y_train),) or groups.dtype.kind not in "iuU":
                raise DataError(
                    f"{self.name}: group_train must hold one string or integer per training sample "
                    f"({len(self.y_train)}), got {groups.dtype} of shape {groups.shape}"
                )
            object.__setattr__(self, "group_train", groups)

    @property
    def target(self) -> Target:
        """What y is."""
        return "classes" if self.classes else "numbers" if self.y_train.ndim == 1 else "arrays"


def _samples(x: Images, what: str, *, images: bool) -> Images:
    x = np.asarray(x)
    if x.ndim == 3 and images and (x.dtype == np.uint8 or x.dtype.kind == "f"):
        x = x[..., np.newaxis]
    if x.ndim < 2 or 0 in x.shape:
        raise DataError(
            f"{what} must have shape (n, height, width, channels) for images, or (n, ...), none of them 0, "
            f"got {x.shape}"
        )
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    return _numbers(x, what)


def _column(y: Labels) -> Labels:
    y = np.asarray(y)
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _targets(y: Labels, what: str) -> Labels:
    if y.ndim < 1 or 0 in y.shape:
        raise DataError(f"{what} must have shape (n,) or (n, ...), none of them 0, got {y.shape}")
    if y.ndim == 1 and y.dtype.kind in "iub":  # one number per sample is a real one
        y = y.astype(np.float32)
    return _numbers(y, what)


def _numbers(values: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """Return finite floats as float32, and integers and truth values as int64."""
    if values.dtype.kind in "iub":
        return np.ascontiguousarray(values, dtype=np.int64)
    if values.dtype.kind != "f":
        raise DataError(f"{what} must be numbers, got {values.dtype}")
    with np.errstate(over="ignore"):  # found below
        values = np.ascontiguousarray(values, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if bad.size:
        raise DataError(f"{what}: sample {bad[0]} holds a value that is not finite")
    return values


def _labels(y: Labels, what: str, classes: tuple[str, ...]) -> Labels:
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise DataError(
            f"{what} must be integers of shape (n,), because classes are named, got {y.dtype} of shape "
            f"{y.shape}; without names of classes, y may be real numbers or arrays"
        )
    y = y.astype(np.int64)
    bad = np.flatnonzero((y < 0) | (y >= len(classes)))
    if bad.size:
        hint = f": {REAL}" if classes[0].isdigit() else ""
        raise DataError(
            f"{what}: label {y[bad[0]]} of sample {bad[0]} is outside 0 .. {len(classes) - 1}{hint}"
        )
    return y


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
    group, group_notes = _groups(path / groups, names) if groups else (None, ())
    return Dataset(
        name=path.name,
        x_train=together[: len(files_train)],
        y_train=y_train,
        x_test=together[len(files_train) :],
        y_test=y_test,
        classes=tuple(classes),
        group_train=group,
        notes=(*([f"resized to {size}x{size}"] if size else []), *group_notes),
    )


def modes(files: Sequence[Path]) -> list[str]:
    """Return Pillow's mode of every file, read from its header."""
    image, modes = pillow(), []
    for file in files:
        with _guard(file), image.open(file) as opened:
            modes.append(str(opened.mode))
    return modes


def read_images(files: Sequence[Path], *, size: int | None, channels: int, crop: bool = False) -> Images:
    """Decode 8-bit images to (n, h, w, channels), resized to size x size if given.

    ``crop`` cuts out the largest centred square before resizing (Lanczos).
    """
    image = pillow()
    if size is not None and size < 1:
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
        raise MissingExtra.of("image files need", "data") from error
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
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not classes:
        raise DataError(f"{path}: expected a folder per class, found none")
    return classes


def _files(path: Path, classes: Sequence[str]) -> tuple[list[Path], Labels]:
    files, labels = list[Path](), list[int]()
    for label, name in enumerate(classes):
        entries = (path / name).iterdir() if (path / name).is_dir() else iter(())
        images = sorted(f for f in entries if f.suffix.lower() in SUFFIXES and f.name[0] != ".")
        if not images:
            raise DataError(f"{path / name}: class {name!r} has no images")
        files += images
        labels += [label] * len(images)
    return files, np.array(labels, dtype=np.int64)


def _groups(table: Path, files: Sequence[str]) -> tuple[Groups, tuple[str, ...]]:
    listed = sheet(table, "file", "group")
    group_of = {row["file"]: row["group"] for _, row in listed.rows}
    for file in files:
        if not group_of.get(file):
            raise DataError(f"{table}: no group for {file}")
    notes = tuple(f"{table.name}: {note}" for note in listed.notes)
    return np.array([group_of[file] for file in files]), notes


# ------------------------------------------------------------------------------------------------- by name

FASHION_MINI = Path(__file__).with_name("fashion_mini.npz")
BOTH_HALVES = ("x_train", "y_train", "x_test", "y_test")
"""The arrays that every dataset has."""


def load(name: str, path: str | Path | None = None, **options: Any) -> Dataset:
    """Read a dataset by one of ``READERS`` with its options, or by a user's ``module:function``."""
    if ":" in name:
        return own(name, path, options)
    if name not in READERS:
        raise DataError(f'dataset must be one of {", ".join(READERS)} or "module:function", got {name!r}')
    reader = READERS[name]
    parameters = inspect.signature(reader).parameters
    known = [key for key in parameters if key != "path"]
    hints = get_type_hints(reader)
    for key, value in options.items():
        if key not in known:
            allowed = f"expected one of {', '.join(known)}" if known else "it has none"
            problem = f"{name!r} has no option {key!r}{meant(key, known)}: {allowed}"
            raise DataError.at("data.options", problem)
        if not fits(value, hints[key]):
            problem = f"expected {words(hints[key])}, got {value!r:.100}"
            raise DataError.at("data.options", problem, entry=key)
    for key in known:
        if parameters[key].default is inspect.Parameter.empty and key not in options:
            raise DataError.at("data.options", f'{name!r} needs the option {key!r}, such as {key} = "y"')
    if "path" not in parameters:
        if path is not None:
            raise DataError(f"dataset {name!r} is part of the package and takes no path, got {str(path)!r}")
        return fashion_mini()
    if path is None:
        raise DataError(f"dataset {name!r} needs the path of its files")
    if not Path(path).exists():
        raise DataError(f"{path}: no such file or folder")
    content = reader(Path(path), **options)
    return content if isinstance(content, Dataset) else Dataset(**content)


def fashion_mini() -> Dataset:
    """Read the first 1,813 training and 600 test images of Fashion-MNIST (28x28 grey, 10 classes; MIT)."""
    images = "first 1,813 training and first 600 test images, unchanged"
    note = f"Fashion-MNIST (Zalando SE, MIT licence): {images}"
    return replace(npz(FASHION_MINI), name="fashion-mini", notes=(note,))


def npz(path: Path, *, images: bool = True) -> Dataset:
    """Read ``x_train, y_train, x_test, y_test`` as in `Dataset`, and ``group_train``, ``classes`` if present.

    If y is one integer or truth value per sample and ``classes`` is not there, the classes are "0", "1", ...
    up to the largest label. Texts are names of classes. Any other y is not a class label. ``images``:
    whether x of shape (n, a, b) are grey images, not sequences, for example.
    """
    content = arrays(path)
    missing = [key for key in BOTH_HALVES if key not in content]
    if missing:
        raise DataError(f"{path}: array {missing[0]} is missing, found {', '.join(content) or 'none'}")
    named = {key: content[key] for key in (*BOTH_HALVES, "group_train", "classes") if key in content}
    return Dataset(name=path.name, images=images, **with_classes(named))


def with_classes(content: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a dataset with its classes: texts in y, or "0", "1", ... if they have no names."""
    labels = [np.asarray(content[key]) for key in ("y_train", "y_test")]
    if "classes" not in content and all(y.dtype.kind == "U" and y.ndim == 1 for y in labels):
        texts = np.unique(np.concatenate(labels))
        if all(map(readings, texts.tolist())):
            raise DataError(f"y holds numbers as text, such as {str(texts[0])!r:.60}: store them as numbers")
        if alike := two_spellings(texts.tolist()):
            both = " and ".join(spelled(*alike))
            raise DataError(f"y holds {both}, which would be two classes: write a class in one way")
        train, test = (np.searchsorted(texts, y) for y in labels)
        content = {**content, "classes": texts, "y_train": train, "y_test": test}
    if "classes" not in content and all(_column(y).ndim == 1 and y.dtype.kind in "iub" for y in labels):
        largest = max(int(np.max(y, initial=True)) for y in labels)
        content["classes"] = np.arange(min(largest, len(labels[0])) + 1).astype(str)
    names = content.get("classes", ())
    return {**content, "classes": tuple(np.atleast_1d(names).tolist()) if len(names) else ()}


def own(name: str, path: str | Path | None, options: Mapping[str, Any]) -> Dataset:
    """Read data by a user's ``module:function``, called as ``function(**options)``, with ``path=`` if given.

    It returns a `Dataset`, or a mapping with ``x_train, y_train, x_test, y_test`` and, if there are any,
    ``group_train``, ``classes`` and ``images``, as in `Dataset` and `npz`.
    """
    function = load_object(name, "data.name")
    arguments = {**({} if path is None else {"path": str(path)}), **options}
    try:
        content = function(**arguments)
    except FedmeritError:
        raise
    except Exception as error:  # a user's code may raise anything
        called = ", ".join(f"{key}={value!r:.60}" for key, value in arguments.items())
        raise DataError(f"{name}({called}) failed: {type(error).__name__}: {error}") from error
    if isinstance(content, Dataset):
        return content
    if not isinstance(content, Mapping) or any(key not in content for key in BOTH_HALVES):
        got = type(content).__name__
        if isinstance(content, Mapping):
            got = f"one with {', '.join(map(str, content))}"
        raise DataError(f"{name}: expected a Dataset, or a mapping with {', '.join(BOTH_HALVES)}, got {got}")
    known = (*BOTH_HALVES, "group_train", "classes", "images", "notes")
    if unknown := [str(key) for key in content if key not in known]:
        raise DataError(f"{name}: unknown key {unknown[0]!r}; expected {', '.join(known)}")
    return Dataset(name=name, **with_classes(dict(content)))


READERS: dict[str, Callable[..., Dataset | dict[str, Any]]] = {
    "fashion-mini": fashion_mini,
    "npz": npz,
    "folder": folder,
    "table": table,
}
