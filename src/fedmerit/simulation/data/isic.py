"""ISIC 2019: dermoscopy images and a ground-truth CSV, eight diagnoses, several hospitals.

Files under one folder, as published::

    ISIC_2019_Training_Input/ISIC_0000000.jpg ...
    ISIC_2019_Training_GroundTruth.csv      image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK     one-hot: 0.0 or 1.0
    ISIC_2019_Training_Metadata.csv         image,age_approx,anatom_site_general,lesion_id,sex    (optional)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmerit.errors import DataError
from fedmerit.protocol.pool import Labels
from fedmerit.simulation.data.dataset import Dataset
from fedmerit.simulation.data.images import read_images
from fedmerit.simulation.data.tables import rows

TRUTH = "ISIC_2019_Training_GroundTruth.csv"
METADATA = "ISIC_2019_Training_Metadata.csv"
NOT_A_CLASS = frozenset({"image", "score_weight", "validation_weight"})


def isic2019(
    path: Path,
    *,
    size: int = 64,
    group: str | None = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    test_csv: str | None = None,
) -> Dataset:
    """Colour, cropped to the centred square, resized to size x size. Only classes with training images count.

    Args:
        path: the folder that holds the files above; images are looked for in all folders below it.
        size: side of the images.
        group: column of the metadata file to group by. Default: ``center`` if there is such a column,
            otherwise the letters that open ``lesion_id`` (the archive: HAM, BCN, MSK; "unknown" if empty).
        test_fraction: share of each class to test on; never a lesion on both sides. Images without a
            ``lesion_id`` count as lesions of their own.
        split_seed: of that split.
        test_csv: instead: a ground-truth file of the same form that lists the test images; those also listed
            in the training file are taken out of it.
    """
    columns, truth = _one_hot(path / TRUTH)
    metadata = _metadata(path / METADATA)

    def lesion(image: str) -> str:
        return metadata.get(image, {}).get("lesion_id") or image

    if group is not None and not any(group in row for row in metadata.values()):
        raise DataError(f"{path / METADATA}: no column {group!r} to group by")
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
    """Which images to test on: of every class, whole lesions in random order until ``fraction`` is reached.

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
    """The class columns, and the class of every image."""
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


def _metadata(file: Path) -> dict[str, dict[str, str]]:
    """Cells by image; empty without the file."""
    return {row["image"]: row for _, row in rows(file, "image")} if file.is_file() else {}


def _group(row: dict[str, str], column: str | None) -> str:
    if column is not None or "center" in row:
        return row.get(column or "center") or "unknown"
    archive = re.match(r"[A-Za-z]+", row.get("lesion_id", ""))
    return archive.group() if archive else "unknown"


def _numbers(names: Iterable[str], classes: list[str]) -> Labels:
    return np.array([classes.index(name) for name in names], dtype=np.int64)
