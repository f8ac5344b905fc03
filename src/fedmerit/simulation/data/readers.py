"""`load`: a name and a path -> a `Dataset`.

============= ================================================================= =========================
name          path                                                              reader
============= ================================================================= =========================
fashion-mini  none: shipped with the package                                    `fashion_mini`
npz           a file with x_train, y_train, x_test, y_test                      `npz`
folder        ``train/<class>/*``, ``test/<class>/*``                           `images.folder`
cifar10       ``cifar-10-batches-py/`` or ``cifar-10-python.tar.gz``            `cifar.cifar10`
brain-mri     ``Training/<class>/*``, ``Testing/<class>/*``                     `images.brain_mri`
isic2019      images, ground-truth CSV, metadata CSV                            `isic.isic2019`
pcam          ``camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5``       `pcam.pcam`
============= ================================================================= =========================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedmerit.errors import DataError
from fedmerit.simulation.data.cifar import cifar10
from fedmerit.simulation.data.dataset import Dataset
from fedmerit.simulation.data.images import brain_mri, folder
from fedmerit.simulation.data.isic import isic2019
from fedmerit.simulation.data.pcam import pcam
from fedmerit.simulation.data.tables import arrays

FASHION_MINI = Path(__file__).with_name("fashion_mini.npz")


def load(name: str, path: str | Path | None = None, **options: Any) -> Dataset:
    """Read a dataset.

    Args:
        name: one of ``READERS``.
        path: where its files are; not for fashion-mini.
        options: the keyword arguments of the reader.
    """
    if name not in READERS:
        raise DataError(f"dataset must be one of {', '.join(READERS)}, got {name!r}")
    reader = READERS[name]
    known = [key for key in inspect.signature(reader).parameters if key != "path"]
    for key in options:
        if key not in known:
            allowed = f"expected one of {', '.join(known)}" if known else "it has none"
            raise DataError(f"dataset {name!r} has no option {key!r}: {allowed}")
    if "path" not in inspect.signature(reader).parameters:
        if path is not None:
            raise DataError(f"dataset {name!r} is part of the package and takes no path, got {str(path)!r}")
        return reader(**options)
    if path is None:
        raise DataError(f"dataset {name!r} needs the path of its files")
    if not Path(path).exists():
        raise DataError(f"{path}: no such file or folder")
    return reader(Path(path), **options)


def fashion_mini() -> Dataset:
    """The first 1,813 training and 600 test images of Fashion-MNIST (28x28 grey, 10 classes; MIT licence)."""
    found = npz(FASHION_MINI)
    note = (
        "Fashion-MNIST (Zalando SE, MIT licence): first 1,813 training and first 600 test images, unchanged"
    )
    return Dataset(**{**vars(found), "name": "fashion-mini", "notes": (note,)})


def npz(path: Path) -> Dataset:
    """Arrays ``x_train, y_train, x_test, y_test`` as in `Dataset`; optional ``group_train`` and ``classes``.

    Without ``classes`` the classes are "0", "1", ... up to the largest label. Pickled objects are refused.
    """
    wanted = ("x_train", "y_train", "x_test", "y_test")
    content = arrays(path)
    missing = [key for key in wanted if key not in content]
    if missing:
        raise DataError(f"{path}: array {missing[0]} is missing, found {', '.join(content) or 'none'}")
    found = {key: content[key] for key in (*wanted, "group_train", "classes") if key in content}
    if "classes" not in found:
        labels = [found[key] for key in ("y_train", "y_test") if found[key].dtype.kind in "iu"]
        largest = max((int(y.max(initial=1)) for y in labels), default=1)
        found["classes"] = np.arange(min(largest, len(found["y_train"])) + 1).astype(str)
    found["classes"] = tuple(np.atleast_1d(found["classes"]).tolist())
    return Dataset(name=path.name, **found)


READERS: dict[str, Callable[..., Dataset]] = {
    "fashion-mini": fashion_mini,
    "npz": npz,
    "folder": folder,
    "cifar10": cifar10,
    "brain-mri": brain_mri,
    "isic2019": isic2019,
    "pcam": pcam,
}
