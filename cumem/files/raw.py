# SPDX-License-Identifier: Apache-2.0
"""Reads and writes plain bytes between files and memory of any kind.

`fromfile`, `tofile`, `read_ranges` and `write_ranges` check their arguments here; one call
of the extension, ``_core._transfer_file``, then moves all ranges at the speed of the link
or of the disk. `write_files` is for formats that make several new files at the same time,
and `write_summed` is for formats with checksums.

The memory may be a map of the same file, as an ``np.memmap`` is. The copy moves pieces in
any order, so it could overwrite parts of the map that it has not read yet. The extension
notices such a map before it moves anything, and `_move` uses a copy in ordinary memory in
its place. If the call would also cut off bytes that the map shows, `tofile` writes a new
file and lets it replace the old one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import math
import operator
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    SupportsIndex,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import numpy as np

from cumem import _core
from cumem.base.units import read_integer
from cumem.base.variables import SWITCH_WORDS, read_switch
from cumem.buffers.arguments import hinting, read_dtype, read_flag
from cumem.buffers.casting import Casting
from cumem.buffers.casting import check as check_casting
from cumem.buffers.filling import copy_as
from cumem.buffers.progress import Parts, Progress
from cumem.files.converting import Item, read_as, write_as
from cumem.files.file_hints import HEAD_NBYTES, why_not_plain
from cumem.files.opening import check_sort, open_owned, open_path, unwrapped
from cumem.files.replacing import Replacement, replacing, sync_folder
from cumem.pools.pool import Pool

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
#: A file is named by a path, by a descriptor, or by a binary file that open() made.
File = Path | int | io.FileIO | io.BufferedIOBase
Direct = Literal["auto"] | bool | None
Ranges = Iterable[tuple[SupportsIndex, object]]

_T = TypeVar("_T")
_B = TypeVar("_B", bound=_core.Buffer)


def _direct_number(direct: Direct) -> int:
    """Return what the extension takes as `direct`: 0 is "auto", 1 is no and 2 is yes."""
    if direct is None:
        text = os.environ.get("CUMEM_DIRECT", "")
        if text.strip().lower() in ("", "auto"):
            return 0
        try:
            return 1 + read_switch(text)
        except ValueError:
            raise ValueError(
                f"CUMEM_DIRECT must be auto, {SWITCH_WORDS}, not '{text:.100}'"
            ) from None
    if isinstance(direct, str) and direct != "auto":
        raise ValueError(f'direct must be "auto", True or False, not {direct!r}')
    return 0 if direct == "auto" else 1 + bool(direct)


def _offset_number(offset: object, name: str = "offset") -> int:
    number = read_integer(offset, name)
    if number < 0:
        raise ValueError(f"{name} must not be negative, not {number}")
    if number >= 2**63:
        raise ValueError(f"{name}: {number} does not fit in 63 bits")
    return number


def _check_mode(fd: int, writes: bool, name: object) -> None:
    """Refuse a descriptor that was opened only for the other direction."""
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if mode == (os.O_RDONLY if writes else os.O_WRONLY):
        text = f"the file is not open for {'writing' if writes else 'reading'}"
        raise OSError(errno.EBADF, text, name)


class _Opened:
    """A descriptor, its name in errors, and the position of its file.

    A path that will be written has no descriptor at first. `descriptor` creates the file
    only when everything else has been checked, so that a refused call leaves no empty file.
    """

    def __init__(self, fd: int | None, name: object, file: Any = None) -> None:
        self.fd = fd
        self.owned: io.FileIO | None = None  # the file of a path, once it is open
        self.name = name
        self.file = file  # None for a path or a descriptor, whose position is not used
        self.begin = 0 if file is None else int(file.tell())

    def descriptor(self) -> int:
        """Return the descriptor, after creating or opening the file of a path."""
        if self.fd is not None:
            return self.fd
        if self.owned is None:
            self.owned = open_path(self.name, os.O_WRONLY | os.O_CREAT)
        return self.owned.fileno()

    def sync(self) -> None:
        """Wait until the file, and for a path also its name, is on the disk."""
        os.fsync(self.descriptor())
        if self.owned is not None:
            sync_folder(os.path.realpath(str(self.name)))

    def nbytes(self) -> int | None:
        """Return the size of the file, or None if it is unknown.

        Devices have no size. Files such as those in ``/proc`` claim to have 0 bytes,
        because their contents are made only when they are read.
        """
        fd = self.descriptor()
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or (info.st_size == 0 and os.pread(fd, 1, 0)):
            return None
        return info.st_size

    def ends_early(self, text: str, size: int) -> EOFError:
        """Make the error for a file that ends at `size`, with its public attributes."""
        error = EOFError(text)
        vars(error).update(filename=self.name, offset=size)
        return error

    def move(self, position: int) -> None:
        """Set the position of a file object; paths and descriptors have none to set."""
        if self.file is not None:
            self.file.seek(position)


@contextlib.contextmanager
def _descriptor(fd: int, writes: bool) -> Iterator[int]:
    """Yield `fd`, or another descriptor of the file if `fd` appends whatever the offset."""
    if not writes or not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
        yield fd
        return
    with open_owned(f"/proc/self/fd/{fd}", os.O_WRONLY) as other:
        yield other.fileno()


@contextlib.contextmanager
def _opened(file: Any, writes: bool) -> Iterator[_Opened]:
    """Check `file` and yield it as an `_Opened`, closed at the end if it was opened here.

    A path that is to be written is not opened yet: `_Opened.descriptor` does that.
    """
    if isinstance(file, str | bytes | os.PathLike):
        path = os.fspath(file)
        opened = _Opened(None, path)
        try:
            opened.owned = None if writes else open_path(path, os.O_RDONLY)
            yield opened
        finally:
            if opened.owned is not None:
                opened.owned.close()
        return
    if isinstance(file, int) and not isinstance(file, bool):
        check_sort(os.fstat(file).st_mode, file)
        _check_mode(file, writes, file)
        with _descriptor(file, writes) as fd:
            yield _Opened(fd, file)
        return
    plain = unwrapped(file, writes)
    check_sort(os.fstat(plain.fileno()).st_mode, plain.name)
    _check_mode(plain.fileno(), writes, plain.name)
    if writes:
        plain.flush()
    with _descriptor(plain.fileno(), writes) as fd:
        if fd != plain.fileno():
            plain.seek(0, os.SEEK_END)
        yield _Opened(fd, plain.name, plain)


def _move(
    opened: _Opened,
    ranges: Ranges,
    writes: bool,
    stream: object,
    direct: int,
    progress: Progress,
    argument: str | None = None,
    cuts: bool = False,
    checksums: list[int] | None = None,
) -> int:
    """Read or write all ranges, and return their bytes in total.

    Errors call a single range by the name of the `argument` that it comes from, and other
    ranges ``ranges[0]`` and so on. With `cuts` the caller will cut off what lies behind the
    ranges. If a source maps bytes that would be cut off, this raises `_CutMapError` before
    anything is written. If `checksums` is a list, the values that `write_summed` returns
    are appended to it.
    """
    offsets: list[int] = []
    memories: list[Any] = []
    staged: list[tuple[Any, Any]] = []
    try:
        for index, pair in enumerate(_iterable(ranges)):
            offset, memory = _read_end(pair, argument or index, writes, stream)
            offsets.append(offset)
            memories.append(memory)

        def transfer() -> _core._FileOutcome:
            return _core._transfer_file(
                opened.descriptor,
                tuple(offsets),
                tuple(memories),
                writes,
                cuts,
                checksums is not None,
                stream,
                direct,
                progress,
            )

        outcome = transfer()
        if outcome.own_maps:
            end = max(offsets[i] + memories[i].nbytes for i in range(len(offsets)))
            if cuts and end < (opened.nbytes() or 0):
                raise _CutMapError
            for index in outcome.own_maps:
                memory = memories[index]
                own = _stage(memory, writes, stream)
                staged.append((memory, own))
                memories[index] = own
            outcome = transfer()
            assert not outcome.own_maps  # the copies are not maps of a file
        failure = outcome.failure
        if failure is None:
            if not writes:
                for memory, own in staged:
                    _core.copy(memory, own, stream=stream)
            if checksums is not None:
                checksums += outcome.checksums
            return outcome.nbytes
        begin, nbytes = offsets[failure.index], memories[failure.index].nbytes
        raise _failure(
            failure.error, opened.name, failure.offset, begin, nbytes, writes
        )
    finally:  # a traceback may keep this frame alive, but must not keep the memory
        pair = memory = own = None
        memories.clear()
        staged.clear()


def _move_as(
    opened: _Opened,
    item: Item,
    writes: bool,
    stream: object,
    direct: int,
    progress: Progress,
    casting: Any,
) -> int:
    """Read or write an item whose elements are converted; return its bytes in the file.

    If the memory is a map of the file that is written, all of it is first converted into a
    new array. Otherwise each piece that is written to the file would change elements of the
    map that have not been converted yet.
    """
    nbytes = int(item.memory.size) * item.dtype.itemsize
    size = None if writes else opened.nbytes()
    if size is not None and item.offset + nbytes > size:
        raise _failure(0, opened.name, size, item.offset, nbytes, writes)
    if not _core._maps_file(opened.descriptor, item.offset, item.memory):
        with Parts(progress, nbytes, "write" if writes else "read") as progress_parts:

            def move(ranges: list[tuple[int, Any]]) -> None:
                part = progress_parts.next(sum(view.nbytes for _, view in ranges))
                _move(opened, ranges, writes, None, direct, part)

            if writes:
                write_as(item, move, casting, stream)
            else:
                read_as([item], move, casting, stream)
        return nbytes
    own: np.ndarray[Any, Any] = np.empty(item.memory.shape, item.dtype)
    if writes:
        copy_as(own, item.memory, stream, casting)
    _move(opened, [(item.offset, own)], writes, stream, direct, progress)
    if not writes:
        copy_as(item.memory, own, stream, casting)
    return nbytes


def write_summed(file: File, ranges: Ranges) -> list[int]:
    """Write pieces of memory as `write_ranges` does, and return checksums.

    There is a CRC-32 for each range. Ranges that follow each other without a gap in the
    file have one together.
    """
    checksums: list[int] = []
    with _opened(file, True) as opened:
        number = _direct_number(None)
        _move(opened, ranges, True, None, number, None, checksums=checksums)
    return checksums


#: The most files that `write_files` writes at the same time (`CM_FILE_MAX`).
FILES_AT_ONCE = 16


def write_files(
    files: Sequence[tuple[io.BufferedWriter, list[tuple[int, _core.Buffer]]]],
    progress: Progress = None,
) -> None:
    """Write buffers to several new files at the same time, at most `FILES_AT_ONCE`.

    Each file comes with its ranges, which are pairs of an offset in the file and the
    buffer that is written there. No buffer may be a map of one of the files. The caller
    must have flushed what it wrote to a file itself. An error names its file, as an error
    of `write_ranges` does. After an error nothing more is written to any file.
    """
    ranges = [pair for _, its in files for pair in its]
    offsets = tuple(offset for offset, _ in ranges)
    memories = tuple(memory for _, memory in ranges)
    counts = tuple(len(its) for _, its in files)
    fds = tuple(file.fileno() for file, _ in files)
    failure = _core._write_files(
        fds, counts, offsets, memories, _direct_number(None), progress
    )
    if failure is None:
        return
    names = [file.name for file, its in files for _ in its]
    offset, memory = ranges[failure.index]
    raise _failure(
        failure.error,
        names[failure.index],
        failure.offset,
        offset,
        memory.nbytes,
        writes=True,
    )


def write_behind(
    file: io.BufferedWriter,
    ranges: Sequence[tuple[int, Any]],
    new: Replacement,
    mode: int,
    name: object,
    first: _core.Transfer | None = None,
) -> _core.Transfer:
    """Write the rest of a new file in the background, and let it replace the old file.

    `file` is the temporary file of `new`, and the caller has flushed its buffer. When all
    ranges are written, the file gets the permissions `mode`, is flushed to the disk, and is
    renamed. Errors of the transfer call the file `name`. The file belongs to the transfer
    that is returned. That transfer comes after `first`, a transfer of `write_part_behind`,
    and fails if `first` has failed.
    """
    temporary, target = os.fsencode(new.temporary), os.fsencode(new.target)
    return _write_async(file, ranges, name, temporary, target, mode, first, new)


def write_part_behind(
    file: io.BufferedWriter, ranges: Sequence[tuple[int, Any]], name: object
) -> _core.Transfer:
    """Write a part of a new file in the background, and do nothing else to the file."""
    return _write_async(file, ranges, name, b"", b"", 0, None, None)


def _write_async(
    file: io.BufferedWriter,
    ranges: Sequence[tuple[int, Any]],
    name: object,
    temporary: bytes,
    target: bytes,
    mode: int,
    first: _core.Transfer | None,
    new: Replacement | None,
) -> _core.Transfer:
    return _core._write_file_async(
        file.fileno(),
        tuple(offset for offset, _ in ranges),
        tuple(memory for _, memory in ranges),
        _direct_number(None),
        name,
        temporary,
        target,
        mode,
        first,
        new,
    )


class _CutMapError(Exception):
    """The call would cut off bytes of a file that its own source maps."""


def _stage(memory: Any, writes: bool, stream: object) -> Any:
    """Return ordinary memory to use in place of a map of the file.

    If the map is the source of a write, its contents are copied to the new memory.
    """
    own = np.empty(memory.shape, memory.dtype)
    if writes:
        _core.copy(own, memory, stream=stream)
    return own


def _read_end(
    pair: Any, where: str | int, writes: bool, stream: object
) -> tuple[int, Any]:
    """Check and return an offset and its memory.

    `where` is the name of an argument, or the index of a range, for errors.
    """
    try:
        offset, memory = pair
    except (TypeError, ValueError):
        given = type(pair).__name__
        raise TypeError(
            f"each of ranges must be a pair of an offset and memory, not {given}"
        ) from None
    if type(offset) is not int or not 0 <= offset < 2**63:
        name = "offset" if isinstance(where, str) else f"{_label(where)}: offset"
        offset = _offset_number(offset, name)
    return offset, _memory(memory, where, writes, stream)


def _label(where: str | int) -> str:
    return where if isinstance(where, str) else f"ranges[{where}]"


def _iterable(ranges: Any) -> Any:
    try:
        return iter(ranges)
    except TypeError:
        given = type(ranges).__name__
        raise TypeError(
            f"ranges must be an iterable of pairs of an offset and memory, not {given}"
        ) from None


def _memory(given: object, where: str | int, writes: bool, stream: object) -> Any:
    """Return `given` as a Buffer or an array, and refuse it if it cannot be used.

    `where` is as for `_read_end`.
    """
    memory: Any
    if isinstance(given, _core.Buffer) and not given.closed:
        memory = given
    elif _core._is_memory(given):
        memory = _core._read_end(given, None, stream).memory
    else:
        role, kind = "source" if writes else "target", type(given).__name__
        raise TypeError(
            f"{_label(where)}: the {role} must be a Buffer, an array or an object with "
            f"DLPack, __cuda_array_interface__ or the buffer protocol, not {kind}"
        )
    if writes:
        return memory
    readonly = (
        not memory.flags.writeable
        if isinstance(memory, np.ndarray)
        else memory.readonly
    )
    if readonly:
        raise ValueError(f"{_label(where)}: the target ({type(given)!r}) is read-only")
    if 0 not in memory.strides:
        return memory
    for axis, (n, step) in enumerate(zip(memory.shape, memory.strides, strict=True)):
        if n > 1 and step == 0 and 0 not in memory.shape:
            raise ValueError(
                f"{_label(where)}: elements share memory: stride 0 along axis {axis}; read "
                "into memory that holds each element once"
            )
    return memory


def _failure(
    number: int, filename: object, offset: int, begin: int, nbytes: int, writes: bool
) -> Exception:
    """Make the exception for a range whose transfer stopped at `offset`.

    The range has `nbytes` at `begin` in the file. `number` is the errno of the system, or 0
    if the file ended. The exception has the attributes `filename` and `offset`.
    """
    error: Any
    if number == 0:
        there = max(offset - begin, 0)
        error = EOFError(
            f"{filename!r} ends early: {there} of the {nbytes} bytes at offset {begin} "
            "are there"
        )
        error.filename = filename
    else:
        error = OSError(number, os.strerror(number), filename)
        error.add_note(f"while {'writing' if writes else 'reading'} at offset {offset}")
    error.offset = offset
    made: Exception = error
    return made


def _items_left(opened: _Opened, size: int | None, begin: int, itemsize: int) -> int:
    if size is None:
        raise ValueError(f"{opened.name!r} has no size: count or shape must be given")
    return (size - begin) // itemsize


def _shape(
    opened: _Opened, size: int | None, begin: int, itemsize: int, count: int, shape: Any
) -> int | tuple[int, ...]:
    """Return the count or shape to read, with -1 replaced by what the file holds."""
    if shape is None and count >= 0:
        return count
    if shape is None:
        items = _items_left(opened, size, begin, itemsize)
        left = 0 if size is None else size - begin
        over = left % itemsize
        if over:
            raise ValueError(
                f"{opened.name!r} does not end with a whole item: the {left} bytes from "
                f"offset {begin} on are {items} items of {itemsize} bytes and {over} "
                f"bytes more; count={items} reads the items alone, if the dtype is right"
            )
        return items
    lengths = [operator.index(n) for n in shape] if np.iterable(shape) else [shape]
    if lengths.count(-1) > 1:
        raise ValueError(f"only one length of shape can be -1, not those of {shape}")
    if -1 in lengths:
        rest = math.prod(n for n in lengths if n != -1)
        items = _items_left(opened, size, begin, itemsize)
        lengths[lengths.index(-1)] = items // rest if rest else 0
        left = 0 if size is None else size - begin
        if rest > 0 and left % (rest * itemsize):
            raise ValueError(
                f"shape={shape}: the {left} bytes of {opened.name!r} at offset {begin} "
                f"are not a multiple of {rest * itemsize}: "
                f"{left % (rest * itemsize)} are left over"
            )
    return tuple(lengths)


def _check_offset(opened: _Opened, size: int | None, begin: int, offset: int) -> None:
    if size is not None and begin > size:
        origin = f" from position {opened.begin}" if opened.begin else ""
        raise opened.ends_early(
            f"offset={offset}{origin} is past the end of {opened.name!r}, which has "
            f"{size} bytes",
            size,
        )


def _check_plain(opened: _Opened, begin: int, dtype: Any) -> None:
    """Refuse a file of a known format, whose header nobody means to read as elements."""
    head = os.pread(opened.descriptor(), HEAD_NBYTES, begin)
    name = os.fsdecode(opened.name) if isinstance(opened.name, (str, bytes)) else ""
    as_bytes = dtype is not None and read_dtype(dtype).itemsize == 1
    known = why_not_plain(name or str(opened.name), head, as_bytes)
    if known is not None:
        raise ValueError(
            f"{known}; to read its bytes as they are, header and all, pass dtype='u1' and "
            "offset=0"
        )


def _check_length(
    opened: _Opened, size: int | None, begin: int, nbytes: int, asked: str
) -> None:
    """Refuse to read past the end of the file, before memory is made for the array."""
    if size is not None and nbytes > size - begin:
        raise opened.ends_early(
            f"{asked}: {opened.name!r} ends early: {size - begin} of the {nbytes} bytes "
            f"at offset {begin} are there",
            size,
        )


def _check_out(
    out: Any, dtype: Any, casting: Casting | None, kind: object, **others: object
) -> None:
    """Refuse arguments that cannot be given together with `out`, or contradict it."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(f"{' and '.join(given)} cannot be given together with out")
    if dtype is None and kind is None:
        return
    has = _core.asbuffer(out)
    if kind is not None and kind != has.kind:
        raise ValueError(f"kind is {kind!r}, but out is {has.kind} memory")
    if dtype is not None and casting is not None:
        check_casting("fromfile: ", read_dtype(dtype), has.dtype, casting)
    elif dtype is not None and read_dtype(dtype) != has.dtype:
        raise ValueError(
            f"dtype {np.dtype(dtype)} is given, but out has {has.dtype}; pass casting= to "
            "convert what is read"
        )


def _made(
    opened: _Opened,
    size: int | None,
    begin: int,
    dtype: Any,
    count: int,
    shape: Any,
    memory: Any,
) -> _core.Buffer:
    """Make new memory for the array that will be read."""
    items = read_dtype(float if dtype is None else dtype)
    if items.itemsize == 0:
        raise ValueError(f"the items of {items!r} have no bytes")
    lengths = _shape(opened, size, begin, items.itemsize, count, shape)
    whole = lengths if isinstance(lengths, tuple) else (lengths,)
    if min(whole, default=0) >= 0:
        nbytes = math.prod(whole) * items.itemsize
        asked = f"count={count}" if shape is None else f"shape={shape}"
        _check_length(opened, size, begin, nbytes, asked)
    made: _core.Buffer = _core.empty(lengths, items, **memory)
    return made


class _From(TypedDict, total=False):
    """The keywords of `fromfile` that do not select the type of the result."""

    offset: int | None
    shape: SupportsIndex | Sequence[SupportsIndex] | None
    device: object
    stream: object
    casting: Casting | None
    direct: Direct
    progress: Progress


@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: None = ...,
    pool: None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _core.DeviceBuffer: ...
@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: None = ...,
    pool: Pool[_B],
    out: None = ...,
    **options: Unpack[_From],
) -> _B: ...
@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: Literal["pinned"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _core.PinnedBuffer: ...
@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: Literal["mapped"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _core.MappedBuffer: ...
@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: Literal["managed"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _core.ManagedBuffer: ...
@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: Literal["device"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _core.DeviceBuffer: ...
@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: _core._Kind,
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _core.Buffer: ...
@overload
def fromfile(
    file: File,
    dtype: DTypeLike | None = ...,
    count: int = ...,
    *,
    kind: _core._Kind | None = ...,
    pool: None = ...,
    out: _T,
    **options: Unpack[_From],
) -> _T: ...
@hinting
def fromfile(
    file: File,
    dtype: DTypeLike | None = None,
    count: int = -1,
    *,
    offset: int | None = None,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
    kind: _core._Kind | None = None,
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    out: Any = None,
    casting: Casting | None = None,
    direct: Direct = None,
    progress: Progress = None,
) -> Any:
    """Read an array from a binary file into new memory of any kind, or into `out`.

    Parameters
    ----------
    file : path, int or binary file
        A path, a descriptor, or a file that ``open(..., "rb")`` made. A file object is read
        from its position on, which afterwards is behind the bytes that were read. The
        position of a descriptor is neither used nor moved: its file is read from the first
        byte on.
    dtype : dtype, optional
        The dtype of the items in the file; by default that of `out`, or else float.
    count : int, optional
        The number of items to read. With -1, the default, all items up to the end of the
        file are read, and no bytes may be left over.
    offset : int, optional
        The number of bytes to skip, by default 0; it may not be past the end of the file.
        If it is given, files of known formats are read too, header and all.
    shape : int or sequence of int, optional
        The array's shape in C order, instead of `count`. One length may be -1: it is
        calculated from the length of the file, and no bytes may be left over.
    kind, device, pool : optional
        Where the new memory comes from, as for `empty`; `kind` is "device" by default.
    stream : stream, optional
        The stream on which device memory is written; by default the device's current
        stream.
    out : Buffer, array or exporter, optional
        Writable memory of any kind and strides, which is filled as a whole and returned.
        With it, `count`, `shape`, `device` and `pool` cannot be given, and `dtype` and
        `kind` must be those of `out`.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which conversions from `dtype`, the dtype in the file, to that of `out` are allowed,
        as for `copy`. By default the two must be equal.
    direct : {"auto", True, False}, optional
        Whether to bypass the page cache (``O_DIRECT``). "auto" bypasses it if many of the
        bytes to read are not in the cache. The default is the value of the environment
        variable ``CUMEM_DIRECT``, or else "auto".
    progress : bool or callable, optional
        As for `copy`. An exception that a callable raises ends the call as Ctrl-C does.

    Returns
    -------
    Buffer
        The new buffer, or `out`.

    Raises
    ------
    EOFError
        If the file ends before `offset` or before everything is read, or is cut short
        during the call. The attribute `filename` names the file, and `offset` says where
        it ends.
    OSError
        If the file cannot be opened or read, in which case the attribute `offset` says
        where reading failed, or if it is a directory, FIFO, pipe or socket.
    TypeError, ValueError
        If an argument makes no sense or contradicts `out`, if elements of `out` share
        memory, or if the file does not hold a whole number of items, or of rows of
        `shape`. If `offset` is not given, files with a format of their own are refused too:
        an ``.npy`` or ``.npz`` file, which `load` reads, a Git LFS pointer and, unless
        `dtype` has a single byte, a safetensors file, which `load_safetensors` reads, or a
        file of another known format.
    OutOfMemoryError
        If there is not enough memory for the array.
    ImportError
        If `progress` is True and tqdm is not installed.
    CudaError
        If a copy to the device failed.

    Notes
    -----
    **Blocks** until everything is read, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work on `out` that cumem knows of. After a failure part of `out`
    may have been written.

    Examples
    --------
    >>> numpy.arange(4.0).tofile("four.bin")
    >>> cumem.fromfile("four.bin").to_numpy()
    array([0., 1., 2., 3.])
    """
    number = _direct_number(direct)
    skipped = 0 if offset is None else _offset_number(offset)
    count = read_integer(count, "count")
    if count < -1:
        raise ValueError(f"count must be at least 0, or -1 for all, not {count}")
    if count != -1 and shape is not None:
        raise ValueError("count and shape cannot both be given")
    if out is not None:
        counted = None if count == -1 else count
        others = {"count": counted, "shape": shape, "device": device, "pool": pool}
        _check_out(out, dtype, casting, kind, **others)
    with _opened(file, False) as opened:
        begin = opened.begin + skipped
        size = opened.nbytes()
        _check_offset(opened, size, begin, skipped)
        if offset is None and size is not None:
            _check_plain(opened, begin, dtype)
        if out is None:
            memory = {"device": device, "stream": stream, "pool": pool}
            memory["kind"] = "device" if kind is None else kind
            out = _made(opened, size, begin, dtype, count, shape, memory)
        item = None
        if dtype is not None and casting is not None:
            item = Item(begin, read_dtype(dtype), _memory(out, "out", False, stream))
        if item is not None and item.dtype != item.memory.dtype:
            nbytes = _move_as(opened, item, False, stream, number, progress, casting)
        else:
            ranges = [(begin, out)]
            nbytes = _move(opened, ranges, False, stream, number, progress, "out")
        opened.move(begin + nbytes)
    return out


@hinting
def tofile(
    file: File,
    buf: object,
    *,
    dtype: DTypeLike | None = None,
    casting: Casting | None = None,
    offset: int | None = None,
    stream: object = None,
    fsync: bool = False,
    direct: Direct = None,
    progress: Progress = None,
) -> None:
    """Write an array to a binary file, in C order.

    Parameters
    ----------
    file : path, int or binary file
        A path, a descriptor, or a binary file that ``open()`` made for writing. A file
        object is written from its position on, or at its end if it appends, and its
        position afterwards is behind the bytes that were written. The position of a
        descriptor is neither used nor moved: its file is written from the first byte on.
    buf : Buffer, array or exporter
        Memory of any kind and strides.
    dtype : dtype_like, optional
        The dtype of the items in the file; by default that of `buf`.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which conversions from the dtype of `buf` to `dtype` are allowed, by the rules of
        ``numpy.can_cast``; ``"same_kind"`` by default.
    offset : int, optional
        The number of bytes to skip. If it is given, all other bytes of the file are kept.
        Without it, a file given by its path holds nothing but `buf` afterwards, and one
        given as a descriptor or file object keeps the bytes behind `buf`.
    stream : stream, optional
        The stream on which device memory is read; by default the device's current stream.
    fsync : bool, optional
        If True, return only when the file is on the disk and, for a path, its name in its
        folder as well. By default the system writes it some time later, and the file may
        be lost if the power fails.
    direct : {True, False, "auto"}, optional
        Whether to bypass the page cache (``O_DIRECT``); "auto" does not. The default is
        the value of the environment variable ``CUMEM_DIRECT``, or else "auto".
    progress : bool or callable, optional
        As for `fromfile`.

    Raises
    ------
    OSError
        If the file cannot be opened or written, for instance because the disk is full, in
        which case the attribute `offset` says where writing failed, and the bytes before
        that are in the file; or if it is a directory, FIFO, pipe or socket.
    TypeError, ValueError
        If an argument makes no sense; no file is then created or changed.
    ImportError
        If `progress` is True and tqdm is not installed.
    CudaError
        If a copy from the device failed.

    Notes
    -----
    **Blocks** until everything is written, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work on `buf` that cumem knows of. An existing file is written in
    place; if it is given by its path, it is cut to its new length at the end.

    Examples
    --------
    >>> cumem.tofile("two.bin", cumem.array([1.0, 2.0]))
    >>> numpy.fromfile("two.bin")
    array([1., 2.])
    """
    number = _direct_number(direct)
    fsync = read_flag(fsync, "fsync")
    skipped = 0 if offset is None else _offset_number(offset)
    rule: Casting = "same_kind" if casting is None else casting
    item = None
    if dtype is not None:
        item = Item(0, read_dtype(dtype), _memory(buf, "buf", True, stream))
        check_casting("tofile: ", item.memory.dtype, item.dtype, rule)
    elif casting is not None:
        raise ValueError("casting is given, but no dtype to convert to: pass dtype=")
    converts = item is not None and item.memory.dtype != item.dtype
    cuts = offset is None and isinstance(file, str | bytes | os.PathLike)
    with _opened(file, True) as opened:
        begin = opened.begin + skipped
        try:
            if item is not None and converts:
                item = item._replace(offset=begin)
                if cuts:
                    _check_cut(opened, item)
                nbytes = _move_as(opened, item, True, stream, number, progress, rule)
            else:
                ranges = [(begin, buf)]
                nbytes = _move(
                    opened, ranges, True, stream, number, progress, "buf", cuts
                )
        except _CutMapError:
            with replacing(pathlib.Path(os.fsdecode(cast(Any, file)))) as new:
                with new.open(fsync) as fresh:
                    tofile(
                        fresh,
                        buf,
                        dtype=dtype,
                        casting=casting,
                        stream=stream,
                        direct=direct,
                        progress=progress,
                    )
                new.place(fsync)
            return
        end = begin + nbytes
        if cuts:
            info = os.fstat(opened.descriptor())
            if stat.S_ISREG(info.st_mode) and info.st_size != end:
                os.ftruncate(opened.descriptor(), end)
        if fsync:
            opened.sync()
        opened.move(end)


def _check_cut(opened: _Opened, item: Item) -> None:
    """Raise `_CutMapError` if the item's memory maps the file and the file will be cut.

    The caller then lets a new file replace the old one, which exists for as long as it is
    mapped. Cutting the old file would make pages of the map invalid.
    """
    end = item.offset + int(item.memory.size) * item.dtype.itemsize
    is_cut = end < os.fstat(opened.descriptor()).st_size
    if is_cut and _core._maps_file(opened.descriptor, item.offset, item.memory):
        raise _CutMapError


@hinting
def read_ranges(
    file: File,
    ranges: Ranges,
    *,
    stream: object = None,
    direct: Direct = None,
    progress: Progress = None,
) -> None:
    """Read many byte ranges of one file in one call, each into its own memory.

    Parameters
    ----------
    file : path, int or binary file
        As for `fromfile`, except that its position is neither used nor moved.
    ranges : iterable of (offset, target)
        For each range the offset of its first byte in the file and the writable memory
        that it fills: a Buffer, a NumPy array of any strides, or an object with DLPack,
        ``__cuda_array_interface__`` or the buffer protocol. The range is as long as the
        target, which is filled in C order. Targets must not overlap.
    stream : stream, optional
        The stream on which device memory is written. All device memory must then be on the
        stream's device. By default it is each device's current stream.
    direct, progress : optional
        As for `fromfile`.

    Raises
    ------
    EOFError, OSError
        As for `fromfile`. Some targets may have been written by then.
    TypeError, ValueError
        If an argument makes no sense or a target is read-only.
    ImportError
        If `progress` is True and tqdm is not installed.
    CudaError
        If a copy to a device failed.

    Notes
    -----
    **Blocks** until everything is read, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work on any target that cumem knows of. The order in which ranges
    are read is not defined. Reading is fastest if `ranges` is sorted by offset.

    Examples
    --------
    >>> numpy.arange(6.0).tofile("six.bin")
    >>> first, last = cumem.empty_device(2), cumem.empty_device(2)
    >>> cumem.read_ranges("six.bin", [(0, first), (32, last)])
    >>> last.to_numpy()
    array([4., 5.])
    """
    number = _direct_number(direct)
    with _opened(file, False) as opened:
        _move(opened, ranges, False, stream, number, progress)


@hinting
def write_ranges(
    file: File,
    ranges: Ranges,
    *,
    stream: object = None,
    fsync: bool = False,
    direct: Direct = None,
    progress: Progress = None,
) -> None:
    """Write pieces of memory to byte ranges of one file in one call.

    Parameters
    ----------
    file : path, int or binary file
        As for `tofile`, except that its position is neither used nor moved. A file that
        does not exist is created; an existing one does not change outside the ranges.
    ranges : iterable of (offset, source)
        For each range the offset of its first byte in the file and the memory that is
        written there, in C order. Ranges must not overlap.
    stream : stream, optional
        The stream on which device memory is read. All device memory must then be on the
        stream's device. By default it is each device's current stream.
    fsync : bool, optional
        As for `tofile`.
    direct, progress : optional
        As for `tofile`.

    Raises
    ------
    OSError, TypeError, ValueError, ImportError, CudaError
        As for `tofile`.

    Notes
    -----
    **Blocks** until everything is written, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work on any source that cumem knows of.

    Examples
    --------
    >>> numpy.zeros(4).tofile("four.bin")
    >>> cumem.write_ranges("four.bin", [(16, cumem.array([7.0]))])
    >>> numpy.fromfile("four.bin")
    array([0., 0., 7., 0.])
    """
    number = _direct_number(direct)
    fsync = read_flag(fsync, "fsync")
    with _opened(file, True) as opened:
        _move(opened, ranges, True, stream, number, progress)
        if fsync:
            opened.sync()
