# SPDX-License-Identifier: Apache-2.0
"""Between files and memory of any kind, at the speed of the link or of the disk."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from cumem import _core

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Ranges = Iterable[tuple[SupportsIndex, object]]


def _is_plain(file: object) -> bool:
    raw = getattr(file, "raw", file)
    return isinstance(raw, io.FileIO) and isinstance(
        file, io.FileIO | io.BufferedReader | io.BufferedWriter | io.BufferedRandom
    )


class _File:
    """An open descriptor, what errors call it and where it stands."""

    def __init__(self, fd: int, name: object, file: Any = None) -> None:
        self.fd = fd
        self.name = name
        self.file = file  # None: opened here, or a descriptor: position 0, not moved

    def tell(self) -> int:
        return 0 if self.file is None else int(self.file.tell())

    def seek(self, position: int) -> None:
        if self.file is not None:
            self.file.seek(position)


@contextlib.contextmanager
def _opened(file: Any, flags: int) -> Iterator[_File]:
    """Whatever names or is a file, for `flags` of os.open()."""
    if isinstance(file, int) and not isinstance(file, bool):
        yield _File(file, file)
        return
    if isinstance(file, str | bytes | os.PathLike):
        fd = os.open(file, flags | os.O_CLOEXEC, 0o666)
        try:
            yield _File(fd, os.fspath(file))
        finally:
            os.close(fd)
        return
    plain = getattr(file, "file", file)  # what tempfile wraps
    if not _is_plain(plain):
        raise TypeError(
            "expected a path, a descriptor or a binary file that open() made, not "
            f"{type(file).__name__}"
        )
    if flags & (os.O_WRONLY | os.O_RDWR):
        plain.flush()
    yield _File(plain.fileno(), plain.name, plain)


def read_ranges(file: Any, ranges: Ranges, *, stream: object = None) -> None:
    """Read many byte ranges of one file, each into memory of its own."""
    with _opened(file, os.O_RDONLY) as opened:
        _core._transfer_file(opened.fd, opened.name, ranges, False, stream)


def write_ranges(file: Any, ranges: Ranges, *, stream: object = None) -> None:
    """Write pieces of memory to byte ranges of one file."""
    with _opened(file, os.O_WRONLY | os.O_CREAT) as opened:
        _core._transfer_file(opened.fd, opened.name, ranges, True, stream)


def _shape_of(opened: _File, begin: int, itemsize: int, count: int, shape: Any) -> Any:
    if shape is not None:
        if count != -1:
            raise ValueError("give count or shape, not both")
        return shape
    if count >= 0:
        return count
    size = os.fstat(opened.fd).st_size
    return max(size - begin, 0) // itemsize


def fromfile(
    file: Any,
    dtype: DTypeLike = float,
    count: int = -1,
    *,
    offset: int = 0,
    shape: Any = None,
    kind: Any = "device",
    device: object = None,
    stream: object = None,
    pool: Any = None,
    out: Any = None,
) -> Any:
    """Read an array from a binary file into new memory, or into `out`."""
    with _opened(file, os.O_RDONLY) as opened:
        begin = opened.tell() + offset
        if out is None:
            kept = np.dtype(dtype)
            out = _core.empty(
                _shape_of(opened, begin, kept.itemsize, count, shape),
                kept,
                kind,
                device=device,
                stream=stream,
                pool=pool,
            )
        _core._transfer_file(opened.fd, opened.name, [(begin, out)], False, stream)
        opened.seek(begin + out.nbytes)
    return out


def tofile(
    file: Any, buf: Any, *, offset: int | None = None, stream: object = None
) -> None:
    """Write an array to a binary file."""
    with _opened(file, os.O_WRONLY | os.O_CREAT) as opened:
        begin = opened.tell() + (offset or 0)
        _core._transfer_file(opened.fd, opened.name, [(begin, buf)], True, stream)
        end = begin + buf.nbytes
        if offset is None and opened.file is None and not isinstance(file, int):
            os.ftruncate(opened.fd, end)
        opened.seek(end)
