# SPDX-License-Identifier: Apache-2.0
"""Reads arrays from a foreign ``.npz``, and raises a ValueError if anything is wrong."""

from __future__ import annotations

import errno
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from cumem.files.npy import read_header
from cumem.files.opening import open_regular

__all__ = ["MOST_ROWS", "read_arrays"]

# A replay keeps about 200 bytes for each row, and no real trace has more rows than this.
MOST_ROWS: Final = 1 << 25


def read_arrays(
    path: Path, keys: Sequence[str], more: Sequence[str] = ()
) -> list[NDArray[Any]]:
    """Read one-dimensional arrays of integers.

    Parameters
    ----------
    path : Path
        The file to read.
    keys : sequence of str
        The names of the arrays.
    more : sequence of str
        Names of further arrays, which are left out of the result if they are missing.

    Returns
    -------
    list of ndarray
        The arrays in the order of `keys`, with at most `MOST_ROWS` rows each.

    Raises
    ------
    ValueError
        If the file is not such an archive, is damaged, encrypted or compressed in a way
        that Python cannot read, or if an array is missing, has another shape or dtype, or
        is too long. The message is one line that begins with the path.
    OSError
        If the file cannot be read.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                there = archive.namelist()
                found = [*keys, *(key for key in more if f"{key}.npy" in there)]
                return [_read_member(archive, key) for key in found]
        except Exception as error:  # a damaged archive may raise nearly anything
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # an error of the file itself, and not of its contents
            raise ValueError(f"{path}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        text = "there is not enough memory to read it"
    if not text or isinstance(error, KeyError):
        text = f"damaged ({type(error).__name__}{': ' * bool(text)}{text})"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _read_member(archive: zipfile.ZipFile, key: str) -> NDArray[Any]:
    name = f"{key}.npy"
    if name not in archive.namelist():
        found = [other.removesuffix(".npy") for other in archive.namelist()]
        there = ", ".join(found[:8]) or "none"
        raise ValueError(f"no array {key!r}; there are: {there}")
    entry = archive.getinfo(name)
    with archive.open(entry) as file:
        count, dtype = _read_header(file, key)
        held = entry.file_size - file.tell()
        if held != count * dtype.itemsize:
            raise ValueError(
                f"{key} declares {count} rows, but {held} bytes of them are there"
            )
        if count > MOST_ROWS:
            raise ValueError(f"{key} has {count} rows; at most {MOST_ROWS} work")
        data = file.read(held)
        # Reading to the end makes zipfile verify the checksum.
        if len(data) != held or file.read(1):
            raise ValueError(f"{key} is not as long as the archive says")
    return np.frombuffer(data, dtype)


def _read_header(file: IO[bytes], key: str) -> tuple[int, np.dtype[Any]]:
    shape, _, dtype = read_header(file, key)
    if dtype.kind not in "iu" or len(shape) != 1:
        raise ValueError(
            f"{key} is {dtype} of shape {shape}; expected integers of shape (n,)"
        )
    count = int(math.prod(shape))
    return count, dtype
