# SPDX-License-Identifier: Apache-2.0
"""Opens files for readers and writers of all formats, and refuses what is not a file.

Ctrl-C can come between any two steps of Python. If it came after `os.open` had returned a
descriptor and before a file object owned it, the descriptor would stay open for good. So
`open_owned` opens and owns it in one step.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

from cumem.files.file_hints import check_is_name, explain_missing

_PLAIN = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom)


def check_sort(mode: int, name: object) -> None:
    """Refuse directories, FIFOs and sockets, which have no bytes at an offset."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        sort = "socket" if stat.S_ISSOCK(mode) else "FIFO or pipe"
        text = f"a {sort} has no offsets to read or write at"
        raise OSError(errno.ESPIPE, text, name)


def check_regular(mode: int, name: object) -> None:
    """Refuse everything but regular files, since only those have a known length."""
    check_sort(mode, name)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", name)


def is_data(given: object) -> bool:
    """Return whether `given` is data to save, which was passed in the place of the file.

    `torch.save` and `pickle.dump` take the data first, so people confuse the order.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return False  # these are more likely the contents of a file that was to be read
    return isinstance(given, Mapping) or any(
        hasattr(type(given), name)
        for name in ("__array__", "__dlpack__", "__cuda_array_interface__")
    )


def open_owned(path: Any, flags: int) -> io.FileIO:
    """Open a path as an unbuffered file.

    `map` calls `os.open` and `io.FileIO` with no step of Python in between, so that Ctrl-C
    cannot come there.
    """
    opened = map(os.open, [path], [flags | os.O_CLOEXEC], [0o666])
    file = next(map(io.FileIO, opened))
    file.name = path
    return file


def open_path(
    path: Any, flags: int, check: Callable[[int, object], None] = check_sort
) -> io.FileIO:
    """Open a path, after `check` has accepted the mode of what is there.

    This does not wait for the other end of a FIFO. Normally it does not even open a FIFO,
    since the other end would notice.
    """
    check_is_name(path)
    path = os.fspath(path)  # errors name the path as text
    with contextlib.suppress(FileNotFoundError):
        check(os.stat(path).st_mode, path)  # opening some devices already has effects
    try:
        file = open_owned(path, flags | os.O_NONBLOCK)
    except FileNotFoundError:
        explained = explain_missing(path)
        if explained is None:
            raise
        raise explained from None
    try:
        mode = os.fstat(file.fileno()).st_mode
        check(mode, path)  # another file may have taken the name since os.stat()
        if not stat.S_ISREG(mode):
            os.set_blocking(file.fileno(), True)
    except BaseException:
        file.close()
        raise
    return file


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading.

    Raise an OSError for anything else, because reading it may never end.
    """
    return io.BufferedReader(open_path(path, os.O_RDONLY, check_regular))


def unwrapped(file: Any, writes: bool = False) -> Any:
    """Return the plain file behind `file`, so that its descriptor reads the same bytes.

    Raise a TypeError for an object whose bytes are not in a file, or are there in another
    form, as in a gzip or text file. With `writes` the error is worded for a caller that
    wants to write.
    """
    plain = getattr(file, "file", file)  # tempfile wraps its files
    raw = getattr(plain, "raw", plain)
    if isinstance(plain, _PLAIN) and isinstance(raw, io.FileIO):
        return plain
    text = (
        "file must be a path, a descriptor or a binary file that open() made, not "
        f"{type(file).__name__}"
    )
    if writes and is_data(file):
        raise TypeError(f"{text}: the file comes first, and then what is written to it")
    if hasattr(file, "read") or isinstance(file, bytearray | memoryview):
        text += ": its bytes are in no file, or are there in another form; "
        if writes:
            text += (
                "file.write(buf.to_numpy().tobytes()) or np.save(file, buf.to_numpy()) "
                "writes to it by way of the host"
            )
        else:
            text += (
                "np.load(file) or np.frombuffer(data, dtype) gives an array, which "
                "cumem.array() takes"
            )
    raise TypeError(text)
