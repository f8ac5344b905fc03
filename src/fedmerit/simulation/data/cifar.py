"""CIFAR-10 in its python version: pickled batches, read without trusting them.

The files are pickles of ``{b"data": uint8 array (10000, 3072), b"labels": list, ...}``, written by Python 2.
A pickle is a program; `_Unpickler` runs it in a world where the only things it can name are inert stand-ins
for the numpy constructors that those files use. Everything else is refused before it is imported.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedmerit.errors import DataError
from fedmerit.protocol.pool import Images, Labels
from fedmerit.simulation.data.dataset import Dataset

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"


def cifar10(path: Path) -> Dataset:
    """The folder ``cifar-10-batches-py``, a folder that holds it, or ``cifar-10-python.tar.gz`` unopened."""
    files = _from_tar(path) if path.is_file() else _from_folder(path)
    batches = [_batch(raw, where) for raw, where in files]
    return Dataset(
        name="cifar10",
        x_train=np.concatenate([x for x, _ in batches[:-1]]),
        y_train=np.concatenate([y for _, y in batches[:-1]]),
        x_test=batches[-1][0],
        y_test=batches[-1][1],
        classes=CLASSES,
        notes=("CIFAR-10 (A. Krizhevsky, 2009): no licence stated, research use",),
    )


def _from_folder(path: Path) -> list[tuple[bytes, str]]:
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    found = []
    for name in (*TRAIN, TEST):
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
                if member.isfile() and name in (*TRAIN, TEST):
                    content = archive.extractfile(member)
                    found[name] = content.read() if content else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as a tar archive: {error}") from error
    for name in (*TRAIN, TEST):
        if name not in found:
            raise DataError(f"{path}: {FOLDER}/{name} is missing")
    return [(found[name], f"{path}: {name}") for name in (*TRAIN, TEST)]


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
    """Stands in for ``numpy.dtype``: keeps its name, ignores its state."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands in for ``numpy.ndarray``: keeps shape, kind and bytes until `array` has checked them."""

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
    """Stands in for ``_codecs.encode``, by which Python 3 writes bytes in protocol 2."""
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
