"""Make the data folder that run.py reads from the original downloads.

::

    python experiments/prepare.py cifar10 cifar-10-python.tar.gz FOLDER
    python experiments/prepare.py brain_mri archive/ FOLDER
    python experiments/prepare.py isic2019_ham ISIC_2019/ FOLDER [--whole] [--size 224]
    python experiments/prepare.py pcam pcamv1/ FOLDER [--whole]
    python experiments/prepare.py cifar10 cifar-10-python.tar.gz cifar10.npz       # for a config
    python experiments/prepare.py --sources             # where to get them, with their checksums

By default images have the size and come from the part that our runs used; ``--whole`` takes everything. How
many training images a run uses is the plan's business (``run.py --subset cifar10=0`` for all). The images are
the originals, so results differ from the published ones, which are of re-encoded images; and ISIC, which has
no official test set with labels, is split anew. ISIC's own metadata name no centres: rows "4 centres" need a
metadata file with the column ``center``.

A target that ends in ``.npz`` becomes a file that a config can name: ``[data] name = "npz"``, as the paper's
protocol does (``fedmerit init --paper cifar10``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
from compact import write_npz  # noqa: E402
from downloads import brain_mri, cifar10, isic2019, pcam  # noqa: E402

from fedmerit.data import Dataset  # noqa: E402
from fedmerit.errors import FedmeritError  # noqa: E402


@dataclass(frozen=True)
class Source:
    """A download: where it is, what it must be, and what is read of it."""

    url: str
    reader: Callable[..., Dataset]
    note: str
    md5: Mapping[str, str] = field(default_factory=dict)  # of the files as downloaded
    images: tuple[int, int] = (0, 0)  # training and test images of the whole set; 0 if we split it ourselves
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reader for the part that our runs used."""


PCAM = "camelyonpatch_level_2_split_"
SOURCES = {
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", cifar10, "CIFAR-10, original images",
        md5={"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}, images=(50_000, 10_000),
    ),
    "brain_mri": Source(
        "https://www.kaggle.com/datasets/masoudnickparvar/brain-tumor-mri-dataset", brain_mri,
        "Brain-MRI, grey", images=(5_712, 1_311), ours={"size": 128},
    ),
    "isic2019_ham": Source(
        "https://challenge.isic-archive.com/data/#2019", isic2019, "ISIC 2019 (CC BY-NC 4.0)",
        ours={"size": 64, "archive": "HAM"},
    ),
    "pcam": Source(
        "https://zenodo.org/records/2546921", pcam, "PatchCamelyon",
        md5={
            f"{PCAM}train_x.h5.gz": "1571f514728f59376b705fc836ff4b63",
            f"{PCAM}train_y.h5.gz": "35c2d7259d906cfc8143347bb8e05be7",
            f"{PCAM}test_x.h5.gz": "d8c2d60d490dbd479f8199bdfa0cf6ec",
            f"{PCAM}test_y.h5.gz": "60a7035772fbdb7f34eb86d4420cf66a",
        },
        images=(262_144, 32_768), ours={"limit": 20_000},
    ),
}  # fmt: skip
"""Brain-MRI and ISIC 2019 publish no checksums. Brain-MRI's images are counted; a newer version has more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one dataset into the folder, or say where the downloads are."""
    options = parse(arguments)
    if options.sources:
        for name, source in SOURCES.items():
            sums = "".join(f"\n    md5 {digest}  {file}" for file, digest in source.md5.items())
            print(f"{name}: {source.url}{sums}")
        return 0
    if options.name is None or options.download is None or options.folder is None:
        raise SystemExit("expected NAME DOWNLOAD FOLDER, or NAME DOWNLOAD FILE.npz, or --sources")
    source = SOURCES[options.name]
    checked = check_sums(source, options.download)
    how = {} if options.whole else dict(source.ours)
    if options.size:
        how["size"] = options.size
    try:
        found = source.reader(options.download, **how)
    except FedmeritError as error:
        raise SystemExit(f"{error}\n{options.name} is published at {source.url}") from error
    counts = len(found.y_train), len(found.y_test)
    if source.images[0] and counts != source.images and "limit" not in how:
        print(
            f"note: expected {source.images[0]:,} training and {source.images[1]:,} test images, got {counts}"
        )
    if options.folder.suffix == ".npz":
        write_npz(options.folder, found)
    else:
        for file in keep(options.folder, options.name, found, source.note):
            print(file)
    said = ", ".join(checked) or "no checksum is published, or only unpacked files are here"
    print(f"{options.name}: {counts[0]:,} training and {counts[1]:,} test images; checksums: {said}")
    return 0


def check_sums(source: Source, download: Path) -> list[str]:
    """The downloaded files whose checksums are right; an error if one is wrong."""
    right = []
    for name, expected in source.md5.items():
        file = download if download.name == name else download / name
        if file.is_file():
            with file.open("rb") as opened:
                got = hashlib.file_digest(opened, "md5").hexdigest()
            if got != expected:
                raise SystemExit(
                    f"{file}: expected md5 {expected}, got {got}: download it again from {source.url}"
                )
            right.append(name)
    return right


def keep(folder: Path, name: str, found: Dataset, note: str) -> list[Path]:
    """Write the arrays, and the entry of the dataset in ``index.json``, as compact.py reads them."""
    home, index = folder / name, folder / "index.json"
    home.mkdir(parents=True, exist_ok=True)
    known = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
    extra: dict[str, Any] = {"y_train": found.y_train, "y_test": found.y_test}
    if found.group_train is not None:
        extra["center_train"] = found.group_train
    if name == "brain_mri":
        extra["dup_test"] = near_copies(found.x_test, found.x_train)
    np.savez(home / "labels.npz", **extra)
    np.savez(home / "images.npz", x_train=found.x_train, x_test=found.x_test)
    size = "x".join(map(str, found.x_train.shape[1:3]))
    known[name] = {"classes": list(found.classes), "note": f"{note} ({size})"}
    index.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return [home / "labels.npz", home / "images.npz", index]


def near_copies(test: np.ndarray, train: np.ndarray, *, below: float = 3.0, side: int = 32) -> np.ndarray:
    """Whether a test image has a training image that differs by less than ``below`` grey levels (RMSE).

    Both are reduced to ``side`` x ``side`` pixels first, by the mean.

    >>> near_copies(np.zeros((1, 64, 64, 1)), np.full((2, 64, 64, 1), 2.0)).tolist()
    [True]
    """
    small = [_reduced(images, side) for images in (test, train)]
    squares = [(one * one).sum(1) for one in small]
    distances = squares[0][:, None] + squares[1][None, :] - 2 * small[0] @ small[1].T
    close: np.ndarray = distances.min(1) < below**2 * small[0].shape[1]
    return close


def _reduced(images: np.ndarray, side: int) -> np.ndarray:
    step = max(1, images.shape[1] // side)
    cut = images[:, : step * (images.shape[1] // step), : step * (images.shape[2] // step), :1].astype(
        np.float64
    )
    blocks = cut.reshape(len(cut), cut.shape[1] // step, step, cut.shape[2] // step, step)
    return blocks.mean((2, 4)).reshape(len(cut), -1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", nargs="?", choices=SOURCES)
    parser.add_argument("download", nargs="?", type=Path, help="the downloaded archive or unpacked folder")
    parser.add_argument(
        "folder", nargs="?", type=Path, help="the data folder to make or to add to, or an .npz file"
    )
    parser.add_argument("--whole", action="store_true", help="all images at the reader's own size")
    parser.add_argument("--size", type=int, help="side of the images in pixels (brain_mri, isic2019_ham)")
    parser.add_argument(
        "--sources", action="store_true", help="say where the downloads are, and their checksums"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
