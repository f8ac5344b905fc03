"""The reader of the compact benchmark files, on files of those formats and on the shared ones."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import compact
import numpy as np
import pytest
from PIL import Image

from fedmerit.data import load

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "compact.py"
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``tiles``: PNG mosaics of 3x2 tiles, the 8 training images in two; ``flow``: a stream of WebP files."""
    rng = np.random.default_rng(0)
    y = {"y_train": np.arange(8) % 2, "y_test": np.array([1, 0])}
    index = {}
    for name, channels in (("tiles", 3), ("flow", 1)):
        (tmp_path / name).mkdir()
        index[name] = {"tile": 8, "channels": channels, "classes": ["a", "b"]}
    index["tiles"] |= {"train": ["train_0.png", "train_1.png"], "test": ["test_0.png"]}
    for file in ("train_0.png", "train_1.png", "test_0.png"):
        Image.fromarray(rng.integers(0, 256, (24, 16, 3), dtype=np.uint8)).save(tmp_path / "tiles" / file)
    np.savez(tmp_path / "tiles" / "labels.npz", **y, center_train=np.arange(8))
    index["flow"] |= {"train": ["train.bin"], "test": ["test.bin"]}
    sizes = {}
    for part, n in (("train", 8), ("test", 2)):
        encoded = []
        for i in range(n):
            buffer = io.BytesIO()
            Image.fromarray(np.full((8, 8), 20 * i, np.uint8)).save(buffer, "WEBP", lossless=True)
            encoded.append(buffer.getvalue())
        (tmp_path / "flow" / f"{part}.bin").write_bytes(b"".join(encoded))
        sizes[f"size_{part}"] = np.array([len(raw) for raw in encoded], np.uint16)
    np.savez(tmp_path / "flow" / "labels.npz", **y, **sizes)
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


def test_mosaics(folder: Path):
    data, extra = compact.load(folder, "tiles", group="center")
    assert data.x_train.shape == (8, 8, 8, 3)
    with Image.open(folder / "tiles" / "train_1.png") as picture:
        second = np.asarray(picture)
    assert np.array_equal(data.x_train[7], second[:8, 8:])
    assert data.group_train.tolist() == list(range(8))
    assert list(extra) == ["center_train"]


def test_stream(folder: Path):
    data, extra = compact.load(folder, "flow")
    assert data.x_train[:, 0, 0, 0].tolist() == [20 * i for i in range(8)]
    assert extra == {}
    (folder / "flow" / "train.bin").write_bytes(b"short")
    with pytest.raises(SystemExit, match="bytes, got 5"):
        compact.load(folder, "flow")
    with pytest.raises(SystemExit, match="no dataset 'x', expected one of tiles, flow"):
        compact.load(folder, "x")


def test_the_command_writes_what_the_npz_reader_reads(folder: Path, tmp_path: Path):
    out = tmp_path / "out.npz"
    command = [sys.executable, str(SCRIPT), str(folder), "tiles", str(out), "--group", "center"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{out}: 8 training and 2 test images\n"
    data = load("npz", out)
    assert data.classes == ("a", "b")
    assert data.group_train is not None


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared benchmark data is not beside this checkout")
def test_the_shared_copies():
    fashion, _ = compact.load(SHARED, "fashion_mini")
    shipped = load("fashion-mini")
    for key in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(fashion, key), getattr(shipped, key))
    assert fashion.classes == shipped.classes
    lung, extra = compact.load(SHARED, "lung_histology", group="tile")
    assert np.bincount(lung.y_train).tolist() == [597, 582, 594]
    assert not set(extra["tile_train"].tolist()) & set(extra["tile_test"].tolist())
