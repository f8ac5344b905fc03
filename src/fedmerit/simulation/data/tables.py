"""CSV files with a header and .npz files, read strictly."""

from __future__ import annotations

import csv
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedmerit.errors import DataError


def rows(file: Path, *columns: str) -> list[tuple[int, dict[str, str]]]:
    """(line number, cells by column) of every row; ``columns`` must exist, rows be as long as the header."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text, strict=True)
            header = [name.strip() for name in next(reader, [])]
            listed = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read as CSV: {error}") from error
    for name in columns:
        if name not in header:
            raise DataError(f"{file}: column {name!r} is missing, found {', '.join(header) or 'none'}")
    for line, row in listed:
        if len(row) != len(header):
            raise DataError(f"{file}, line {line}: expected {len(header)} cells, got {len(row)}")
    return [(line, dict(zip(header, row, strict=True))) for line, row in listed]


def arrays(file: Path) -> dict[str, Any]:
    """All arrays of an .npz file; pickled objects are refused."""
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
