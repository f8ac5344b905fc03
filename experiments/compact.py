"""Read the compact benchmark datasets: images tiled into mosaics, or a stream of WebP files.

The folder holds ``index.json`` (per dataset: tile side, channels, classes, files) and a folder per dataset
with ``labels.npz`` (y_train, y_test, further arrays per image, and for streams the byte counts size_train and
size_test). A mosaic is one picture with square tiles, row by row; a stream has one picture after another; and
what prepare.py made of an original download is an array, ``images.npz``.

As a command it writes an .npz that a config can name (``[data] name = "npz"``)::

    python experiments/compact.py FOLDER isic2019_ham isic.npz --group center
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedmerit.data import Dataset

NOTES = {
    "cifar10": "CIFAR-10 (JPEG re-encoded, 36.4 dB)",
    "brain_mri": "Brain-MRI (128x128 grey, WebP re-encoded, 36.2 dB)",
    "isic2019_ham": "ISIC 2019, HAM10000 part (64x64, JPEG re-encoded, 38.5 dB; CC BY-NC 4.0)",
    "lung_histology": "LC25000 lung, thinned (96x96, JPEG re-encoded, 34.0 dB)",
    "fashion_mini": "Fashion-MNIST, first images, lossless (MIT)",
}


def load(folder: str | Path, name: str, group: str | None = None) -> tuple[Dataset, dict[str, Any]]:
    """A dataset, and its further arrays by name (``dup_test``, ``center_train``, ...).

    Args:
        folder: where ``index.json`` is.
        name: a key of ``index.json``.
        group: further array that becomes ``group_train``: "center" of isic2019_ham, "tile" of lung_histology.
    """
    index = json.loads((Path(folder) / "index.json").read_text(encoding="utf-8"))
    if name not in index:
        raise SystemExit(f"{folder}: no dataset {name!r}, expected one of {', '.join(index)}")
    kept = Path(folder) / name / "images.npz"
    whole = np.load(kept, allow_pickle=False) if kept.exists() else {}
    spec, home = index[name], Path(folder) / name
    with np.load(home / "labels.npz", allow_pickle=False) as file:
        extra = {key: file[key] for key in file.files}
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        y = extra.pop(f"y_{part}").astype(np.int64)
        lengths = extra.pop(f"size_{part}", None)
        files = [home / file for file in spec.get(part, ())]
        if whole:
            x = whole[f"x_{part}"]
        elif lengths is None:
            x = np.concatenate([mosaic(file, spec["tile"], spec["channels"]) for file in files])[: len(y)]
        else:
            x = np.concatenate([stream(file, lengths, spec["channels"]) for file in files])
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    if group and f"{group}_train" not in extra and not whole:
        raise SystemExit(f"{folder}: {name} has no array {group}_train to group by")
    groups = extra.get(f"{group}_train")
    notes = (spec.get("note") or NOTES.get(name, "compact copy"),)
    return Dataset(
        name=name, **arrays, classes=tuple(spec["classes"]), group_train=groups, notes=notes
    ), extra


def mosaic(file: Path, tile: int, channels: int) -> np.ndarray:
    """All tiles of one picture, also the unused ones at its end."""
    pixels = decode(file.read_bytes(), channels)
    rows, columns = pixels.shape[0] // tile, pixels.shape[1] // tile
    grid = pixels.reshape(rows, tile, columns, tile, channels)
    return grid.transpose(0, 2, 1, 3, 4).reshape(rows * columns, tile, tile, channels)


def stream(file: Path, lengths: np.ndarray, channels: int) -> np.ndarray:
    """Pictures of the given byte counts, one after another."""
    raw = file.read_bytes()
    ends = np.cumsum(lengths.astype(np.int64))
    if ends[-1] != len(raw):
        raise SystemExit(f"{file}: expected {ends[-1]} bytes, got {len(raw)}")
    return np.stack(
        [decode(raw[end - size : end], channels) for end, size in zip(ends, lengths, strict=True)]
    )


def decode(raw: bytes, channels: int) -> np.ndarray:
    """One picture, (height, width, channels)."""
    with Image.open(io.BytesIO(raw)) as picture:
        pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def write_npz(file: Path, found: Dataset) -> None:
    """Write a dataset so that a config can name it: ``[data] name = "npz"``."""
    arrays = {key: getattr(found, key) for key in ("x_train", "y_train", "x_test", "y_test", "classes")}
    if found.group_train is not None:
        arrays["group_train"] = found.group_train
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)


def main() -> None:
    """Write one dataset as .npz."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", help="array that becomes group_train")
    args = parser.parse_args()
    found, _ = load(args.folder, args.name, args.group)
    write_npz(args.out, found)
    print(f"{args.out}: {len(found.y_train)} training and {len(found.y_test)} test images")


if __name__ == "__main__":
    main()
