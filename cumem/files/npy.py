# SPDX-License-Identifier: Apache-2.0
"""Reads NumPy's files, ``.npy`` and ``.npz``, into memory of any kind, and writes them.

The elements do not pass through a NumPy array. NumPy's public functions read and write the
header only. `read_ranges` and `write_ranges` move the elements between the file and the
memory, in one call for all arrays of an archive. Compressed members of an archive are the
exception: `zipfile` unpacks them on the host, and each piece is copied from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import (
    IO,
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import numpy as np
from numpy.lib import format as npy

from cumem import _core
from cumem.base.carried import find
from cumem.base.errors import warn_caller
from cumem.base.kinds import is_on_device
from cumem.base.places import found_in
from cumem.buffers.arguments import hinting, read_dtype, read_flag
from cumem.buffers.casting import Casting
from cumem.buffers.casting import check as check_casting
from cumem.buffers.filling import as_array, copy_as
from cumem.buffers.progress import Parts, Progress
from cumem.files.converting import Item, read_as
from cumem.files.file_hints import (
    HEAD_NBYTES,
    check_is_name,
    is_lfs_pointer,
    lfs_text,
    what_it_is,
)
from cumem.files.opening import open_regular, unwrapped
from cumem.files.raw import Direct, File, read_ranges, write_ranges
from cumem.files.replacing import replacing
from cumem.files.stored_members import member_name, write_archive
from cumem.pools.pool import Pool

__all__ = ["NpzDict", "load", "save", "savez"]

_T = TypeVar("_T")
_B = TypeVar("_B", bound=_core.Buffer)
if TYPE_CHECKING:
    import typing_extensions
    from numpy.typing import DTypeLike

    #: The type of the buffers in an `NpzDict`; Any where an annotation does not give it.
    _V = typing_extensions.TypeVar("_V", default=Any)

    # What `load` returns where only the file tells whether it is an array or an archive.
    # By default type checkers see an array, which most files are, and so find misspelt
    # attributes. The union with Any lets isinstance() narrow it to an archive. If a program
    # annotates the result as an array, an archive or either, type checkers take that type.
    _OnDevice = typing_extensions.TypeVar(
        "_OnDevice",
        bound="_core.DeviceBuffer | NpzDict[_core.DeviceBuffer]",
        default=_core.DeviceBuffer | Any,
    )
    _Pinned = typing_extensions.TypeVar(
        "_Pinned",
        bound="_core.PinnedBuffer | NpzDict[_core.PinnedBuffer]",
        default=_core.PinnedBuffer | Any,
    )
    _Mapped = typing_extensions.TypeVar(
        "_Mapped",
        bound="_core.MappedBuffer | NpzDict[_core.MappedBuffer]",
        default=_core.MappedBuffer | Any,
    )
    _Managed = typing_extensions.TypeVar(
        "_Managed",
        bound="_core.ManagedBuffer | NpzDict[_core.ManagedBuffer]",
        default=_core.ManagedBuffer | Any,
    )
    _OfAnyKind = typing_extensions.TypeVar(
        "_OfAnyKind",
        bound="_core.Buffer | NpzDict[Any]",
        default=_core.Buffer | Any,
    )
else:
    _V = TypeVar("_V")

#: How many bytes are unpacked at a time, or written to a file without offsets.
_PIECE = 16 << 20
_NO_PICKLES = (
    "object arrays are refused, since they are pickles: np.load(file, allow_pickle=True) "
    "reads those that you trust"
)
#: The number of names that an error lists at most.
_NAMED_COUNT = 12
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_READ_HEADER: Any = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


#: The struct format of the header's length, by version of the file format.
_LENGTH = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}


class _WideHeaderError(ValueError):
    """The header is longer than the caller allows."""


class _NoArrayError(ValueError):
    """A member of the archive is not an array."""


class _ObjectsError(ValueError):
    """The elements are Python objects."""


@found_in("cumem.types")
class NpzDict(dict[str, _V]):
    """The arrays of an ``.npz`` file by name, all of which are loaded already.

    It has the methods of the object that ``numpy.load`` returns, so that ``with load(path)
    as data: data["x"]`` works as well. Unlike that object, which reads an array when it is
    asked for it, it has all arrays from the beginning, and need not be closed.

    Examples
    --------
    >>> cumem.savez("points.npz", x=numpy.arange(3.0))
    >>> with cumem.load("points.npz", kind="pinned") as data:
    ...     data["x"].numpy()
    array([0., 1., 2.])
    """

    @property
    def files(self) -> list[str]:
        """The names of the arrays."""
        return list(self)

    def close(self) -> None:
        """Do nothing: the file is closed already, and the arrays stay."""

    def __enter__(self) -> Self:
        """Return the dict itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Do nothing."""


# -- loading ---------------------------------------------------------------------------


class _From(TypedDict, total=False):
    """The keyword arguments of `load` that do not affect its return type."""

    dtype: DTypeLike | None
    casting: Casting | None
    device: object
    stream: object
    direct: Direct
    progress: Progress
    max_header_size: int


@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: Iterable[str],
    kind: None = ...,
    pool: None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> NpzDict[_core.DeviceBuffer]: ...
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: Iterable[str],
    kind: None = ...,
    pool: Pool[_B],
    out: None = ...,
    **options: Unpack[_From],
) -> NpzDict[_B]: ...
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: Iterable[str],
    kind: Literal["pinned"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> NpzDict[_core.PinnedBuffer]: ...
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: Iterable[str],
    kind: Literal["mapped"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> NpzDict[_core.MappedBuffer]: ...
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: Iterable[str],
    kind: Literal["managed"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> NpzDict[_core.ManagedBuffer]: ...
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: Iterable[str],
    kind: Literal["device"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> NpzDict[_core.DeviceBuffer]: ...
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: Iterable[str],
    kind: _core._Kind,
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> NpzDict[_core.Buffer]: ...
# Without names nothing tells the two sorts of files apart: see `_OnDevice`.
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: None = ...,
    pool: None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _OnDevice: ...  # type: ignore[type-var]
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: None = ...,
    pool: Pool[_B],
    out: None = ...,
    **options: Unpack[_From],
) -> _B | Any: ...
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: Literal["pinned"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _Pinned: ...  # type: ignore[type-var]
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: Literal["mapped"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _Mapped: ...  # type: ignore[type-var]
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: Literal["managed"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _Managed: ...  # type: ignore[type-var]
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: Literal["device"],
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _OnDevice: ...  # type: ignore[type-var]
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: _core._Kind,
    pool: Pool | None = ...,
    out: None = ...,
    **options: Unpack[_From],
) -> _OfAnyKind: ...  # type: ignore[type-var]
@overload
def load(
    file: File,
    mmap_mode: None = ...,
    allow_pickle: Literal[False] = ...,
    *,
    names: None = ...,
    kind: _core._Kind | None = ...,
    pool: None = ...,
    out: _T,
    **options: Unpack[_From],
) -> _T: ...
@hinting
def load(
    file: File,
    mmap_mode: None = None,
    allow_pickle: Literal[False] = False,
    *,
    names: Iterable[str] | None = None,
    dtype: DTypeLike | None = None,
    casting: Casting | None = None,
    kind: _core._Kind | None = None,
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    out: Any = None,
    direct: Direct = None,
    progress: Progress = None,
    max_header_size: int = 10_000,
) -> Any:
    """Load an ``.npy`` or ``.npz`` file, as NumPy writes them, into memory of any kind.

    Parameters
    ----------
    file : path, int or binary file
        A path, a descriptor, or a file that ``open(..., "rb")`` made. A file object is read
        from its position on, and its position afterwards is behind the array.
    mmap_mode : None
        Refused: the error says how to map a file.
    allow_pickle : bool
        True is refused: Python objects cannot live in a buffer.
    names : iterable of str, optional
        The names of the arrays to load from an ``.npz``; by default all are loaded.
    dtype : dtype_like, optional
        The dtype of what is loaded, for each array of an ``.npz``; by default the one in
        the file.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which conversions from the dtype in the file are allowed, by the rules of
        ``numpy.can_cast``. The default is ``"same_kind"`` if `dtype` is given; with `out`
        alone the dtypes must be equal.
    kind, device, pool : optional
        Where the new memory comes from, as for `empty`; `kind` is "device" by default.
    stream : stream, optional
        The stream on which device memory is written; by default the device's current
        stream.
    out : Buffer, array or exporter, optional
        For an ``.npy`` only: writable memory of any kind and strides, with the shape and
        dtype of the array, which is filled and returned.
    direct, progress : optional
        As for `fromfile`.
    max_header_size : int
        The length in bytes of the longest header that is read, as for ``numpy.load``.

    Returns
    -------
    Buffer or NpzDict
        For an ``.npy``, `out` or a new buffer, which is in Fortran order if the file is;
        for an ``.npz``, a dict of new buffers by name.

    Raises
    ------
    ValueError
        If the file is neither an ``.npy`` nor an ``.npz``, is damaged or encrypted, holds
        Python objects, or does not fit `out`; if `mmap_mode` is given, or another argument
        makes no sense.
    KeyError
        If the file has no array with one of the `names`.
    EOFError
        If the file ends before the array does. The attribute `filename` names the file,
        and `offset` says where it ends.
    OSError
        If the file cannot be opened or read.
    OutOfMemoryError
        If there is not enough memory for the arrays.
    TypeError
        If an argument has the wrong type, or the dtype has no bytes.
    ImportError
        If `progress` is True and tqdm is not installed.
    CudaError
        If a copy to the device failed.

    Notes
    -----
    All headers are checked, and memory is made for all arrays, before the first element is
    read. An ``.npy``, and an array that is not compressed in an ``.npz``, is read as
    `read_ranges` reads, which does not verify the checksums of an ``.npz``. Compressed
    arrays are slower: `zipfile` unpacks them piece by piece, on one thread of the host.

    **Blocks** until everything is loaded, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work on `out` that cumem knows of, and after `stream`.

    Examples
    --------
    >>> cumem.save("x.npy", numpy.arange(3.0))
    >>> cumem.load("x.npy").to_numpy()
    array([0., 1., 2.])
    """
    if mmap_mode is not None:
        raise ValueError(
            "mmap_mode: a buffer is not a mapped file; np.load(file, mmap_mode=...) maps "
            "one, and copy() and chunks() take that as their source"
        )
    if allow_pickle:
        raise ValueError(f"allow_pickle: {_NO_PICKLES}")
    memory = {"device": device, "stream": stream, "pool": pool}
    if kind is not None or (pool is None and out is None):
        memory["kind"] = "device" if kind is None else kind
    options: Any = {"stream": stream, "direct": direct}
    wanted = _Wanted(None if dtype is None else read_dtype(dtype), casting)
    with contextlib.ExitStack() as stack:
        source = _open(stack, file)
        begin = source.tell()
        head = source.read(HEAD_NBYTES)
        magic = head[: len(npy.MAGIC_PREFIX)]
        source.seek(begin)
        if magic == npy.MAGIC_PREFIX:
            if names is not None:
                raise ValueError(f"{source.name!r} is one array: names cannot be given")
            array = read_array(source, max_header_size)
            target: Any = (
                wanted.make(array, memory)
                if out is None
                else wanted.check_out(array, out, kind)
            )
            if target.dtype != array.dtype:
                with Parts(progress, array.nbytes, "read") as progress_parts:
                    turned = target.T if array.fortran else target
                    _read_as(
                        source, array, turned, wanted.rule, options, progress_parts
                    )
                source.seek(array.offset + array.nbytes)
                return target if out is None else out
            ranges = [(array.offset, target.T if array.fortran else target)]
            try:
                read_ranges(source, ranges, progress=progress, **options)
            except BaseException:  # a kept traceback must not keep the memory
                ranges.clear()
                target = None
                raise
            source.seek(array.offset + array.nbytes)
            return target if out is None else out
        if not magic.startswith(_ZIP):
            if is_lfs_pointer(head):
                raise ValueError(lfs_text(repr(source.name)))
            known = what_it_is(head)
            raise ValueError(
                f"{source.name!r} is {known}; load() reads .npy and .npz"
                if known is not None
                else f"{source.name!r} is not an .npy or .npz file; fromfile() reads plain "
                "bytes, and pickles are not read"
            )
        if out is not None:
            raise ValueError("out is for one array, and this is an .npz of several")
        return _load_members(
            source, names, wanted, memory, options, progress, max_header_size
        )


def _open(stack: contextlib.ExitStack, file: Any) -> Any:
    """Return a file for Python to read, whose descriptor the extension can read as well."""
    if isinstance(file, int) and not isinstance(file, bool):
        file = f"/proc/self/fd/{file}"  # opened anew, it has a position of its own
    if isinstance(file, (str, bytes, os.PathLike)):
        check_is_name(file)
        return stack.enter_context(open_regular(os.fsdecode(file)))
    return unwrapped(file)


class _Array(NamedTuple):
    """The contents of a header, and where the elements begin in their file."""

    name: str
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, memory: dict[str, Any]) -> _core.Buffer:
        order: Any = "F" if self.fortran else "C"
        made: _core.Buffer = _core.empty(self.shape, self.dtype, order=order, **memory)
        return made

    def check(self, out: Any, kind: str | None) -> _core.Buffer:
        """Return `out` as a buffer, and refuse it if it is not like the array."""
        target = _core.asbuffer(out)
        if (target.shape, target.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"out has shape {target.shape} and dtype {target.dtype}, but {self.name} "
                f"has {self.shape} and {self.dtype}"
            )
        if kind is not None and kind != target.kind:
            raise ValueError(f"kind is {kind!r}, but out is {target.kind} memory")
        return target


def read_header(
    file: IO[bytes], name: str, max_header_size: int = 10_000
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read a header, and return the shape, whether the order is Fortran's, and the dtype.

    Raise a ValueError that mentions `name` if the header is damaged or the elements are
    Python objects.
    """
    try:
        version = npy.read_magic(file)
        if version not in _LENGTH:
            raise ValueError(f"version {version} of the format is not known")
        field = _LENGTH[version]
        (length,) = struct.unpack(field, file.read(struct.calcsize(field)))
        if length > max_header_size:
            raise _WideHeaderError(
                f"{name}: the header has {length} bytes, more than max_header_size="
                f"{max_header_size}; the parser may be slow or fail on a long header. If "
                f"you trust the file, pass max_header_size={length}"
            )
        text = file.read(length)
        if len(text) < length:
            raise ValueError("EOF: the header is cut short")
        if version == (3, 0):
            # Version 3.0 is 2.0 with its text in UTF-8, and NumPy has no public function
            # that reads it. The text is a Python literal, so that characters which latin-1
            # lacks can be written as escapes.
            text = text.decode("utf8").encode("latin1", "backslashreplace")
            version, field = (2, 0), "<I"
        again = io.BytesIO(struct.pack(field, len(text)) + text)
        shape, fortran, dtype = _READ_HEADER[version](
            again, max_header_size=max(len(text), max_header_size)
        )
    except _WideHeaderError as error:
        raise ValueError(str(error)) from None
    except OSError:
        raise
    except Exception as error:  # parsing a damaged header may raise nearly anything
        why = str(error) or type(error).__name__
        if "'<f1'" in why:  # NumPy writes this for float8_e5m2 of ml_dtypes
            raise ValueError(
                f"{name}: the header says '<f1', which NumPy writes for float8_e5m2 and "
                f'cannot read: fromfile(path, "u1", offset={file.tell()}) reads the bytes, '
                "whose view(ml_dtypes.float8_e5m2) is the array"
            ) from None
        raise ValueError(f"{name}: the header is damaged: {why}") from None
    if dtype.hasobject:
        raise _ObjectsError(f"{name}: {_NO_PICKLES}")
    if any(length < 0 for length in shape):
        raise ValueError(f"{name}: the shape {shape} has a negative length")
    return shape, fortran, dtype


def _peek(file: Any) -> bytes:
    """Return the first bytes, which tell the format, and leave the position as it was."""
    begin = file.tell()
    magic: bytes = file.read(len(npy.MAGIC_PREFIX))
    file.seek(begin)
    return magic


def is_npy(file: Any) -> bool:
    """Return whether an ``.npy`` begins at the position of the file."""
    return _peek(file) == npy.MAGIC_PREFIX


def read_array(file: Any, max_header_size: int = 10_000) -> _Array:
    """Read the header of the ``.npy`` that begins at the position of the file.

    Raise a ValueError if the header is damaged or the elements are Python objects, and an
    EOFError if the file is too short for the elements.
    """
    name = repr(file.name)
    array = _Array(name, *read_header(file, name, max_header_size), file.tell())
    size = os.fstat(file.fileno()).st_size
    if array.offset + array.nbytes > size:
        _refuse_short(file.name, array, size)
    return array


def _refuse_short(filename: object, array: _Array, size: int) -> NoReturn:
    """Raise an EOFError for a short file, before memory is made for the array."""
    error = EOFError(
        f"{filename!r} ends early: {max(size - array.offset, 0)} of the {array.nbytes} "
        f"bytes at offset {array.offset} are there"
    )
    vars(error).update(filename=filename, offset=size)
    raise error


# -- archives --------------------------------------------------------------------------


class _Member(NamedTuple):
    array: _Array
    packed: zipfile.ZipInfo | None  # None if the array is not compressed


class _Wanted(NamedTuple):
    """The dtype that the caller wants, and which conversions to it are allowed."""

    dtype: np.dtype[Any] | None
    casting: Casting | None

    @property
    def rule(self) -> Casting:
        return "same_kind" if self.casting is None else self.casting

    def converts(self, array: _Array) -> bool:
        return self.dtype is not None and self.dtype != array.dtype

    def make(self, array: _Array, memory: dict[str, Any]) -> _core.Buffer:
        """Make memory for the array, with the dtype that the caller wants."""
        if self.dtype is None:
            return array.make(memory)
        check_casting(f"{array.name}: ", array.dtype, self.dtype, self.rule)
        return array._replace(dtype=self.dtype).make(memory)

    def check_out(self, array: _Array, out: Any, kind: str | None) -> Any:
        """Return `out` as a buffer, after checking that the array can go into it."""
        if self.casting is None and self.dtype is None:
            return array.check(out, kind)
        found = out if isinstance(out, np.ndarray) else _core.asbuffer(out)
        if self.dtype is not None and self.dtype != found.dtype:
            raise ValueError(f"dtype {self.dtype} is given, but out has {found.dtype}")
        check_casting(f"{array.name}: ", array.dtype, found.dtype, self.rule)
        return array._replace(dtype=found.dtype).check(out, kind)


def _read_as(
    file: Any,
    array: _Array,
    target: Any,
    rule: Casting,
    options: dict[str, Any],
    progress_parts: Parts,
) -> None:
    """Read an array and convert it into `target`, whose axes are in the file's order."""

    def read(ranges: list[tuple[int, Any]]) -> None:
        part = progress_parts.next(sum(view.nbytes for _, view in ranges))
        read_ranges(file, ranges, progress=part, direct=options["direct"])

    item = Item(array.offset, array.dtype, target)
    read_as([item], read, rule, options["stream"])


def _load_members(
    file: Any,
    names: Iterable[str] | None,
    wanted: _Wanted,
    memory: dict[str, Any],
    options: dict[str, Any],
    progress: Progress,
    max_header_size: int,
) -> NpzDict[Any]:
    loaded: NpzDict[Any] = NpzDict()
    ranges: list[tuple[int, _core.Buffer]] = []
    with _archive(file) as archive:
        members = _members(file, archive, names, max_header_size)
        whole = [
            member
            for member in members.values()
            if member.packed is None and not wanted.converts(member.array)
        ]
        total = sum(member.array.nbytes for member in members.values())
        try:
            with Parts(progress, total, "read") as progress_parts:
                for name, (array, _) in members.items():
                    loaded[name] = wanted.make(array, memory)
                targets = {
                    name: loaded[name].T if member.array.fortran else loaded[name]
                    for name, member in members.items()
                }
                ranges += [
                    (array.offset, targets[name])
                    for name, (array, packed) in members.items()
                    if packed is None and not wanted.converts(array)
                ]
                part = progress_parts.next(sum(member.array.nbytes for member in whole))
                read_ranges(file, ranges, progress=part, **options)
                for name, (array, packed) in members.items():
                    target = targets[name]
                    if packed is None and wanted.converts(array):
                        _read_as(
                            file, array, target, wanted.rule, options, progress_parts
                        )
                    elif packed is not None:
                        part = progress_parts.next(array.nbytes)
                        rule = wanted.rule if wanted.converts(array) else None
                        _unpack(archive, packed, array, target, rule, options, part)
        except BaseException:  # a kept traceback must not keep the memory
            ranges.clear()
            targets = {}
            loaded.clear()
            raise
    file.seek(0, os.SEEK_END)
    return loaded


@contextlib.contextmanager
def _archive(file: Any) -> Iterator[zipfile.ZipFile]:
    """Open the archive, and turn zipfile's errors about damage into a ValueError."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(f"{file.name!r}: {error}") from None


def _members(
    file: Any,
    archive: zipfile.ZipFile,
    names: Iterable[str] | None,
    max_header_size: int,
) -> dict[str, _Member]:
    """Read the headers of the wanted arrays, in the order in which they are wanted."""
    if isinstance(names, (str, bytes)):
        raise TypeError(f"names must be a list of names, not {type(names).__name__}")
    entries = {info.filename: info for info in archive.infolist()}
    there = {name.removesuffix(".npy"): name for name in entries}
    members: dict[str, _Member] = {}
    refused: dict[str, str] = {}
    for name in there if names is None else names:
        if name not in there:
            known = ", ".join([*there][:8]) or "none"
            raise KeyError(f"{file.name!r} has no array {name!r}; there are: {known}")
        entry = entries[there[name]]
        try:
            members[name] = _read_member(file, archive, entry, max_header_size)
        except (_ObjectsError, _NoArrayError) as error:
            if names is not None:
                raise ValueError(str(error)) from None
            refused[name] = str(error)
    if refused:
        text = next(iter(refused.values()))
        others = f"names={[*members]!r} loads the others" if members else ""
        if len(members) > _NAMED_COUNT:
            others = (
                "names= loads the others: pass all names of the archive but for "
                f"{[*refused][:_NAMED_COUNT]!r}"
            )
        raise ValueError(f"{text}; {others}" if others else text)
    return members


def _read_member(
    file: Any, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, max_header_size: int
) -> _Member:
    label = f"{file.name!r}: {entry.filename}"
    if entry.flag_bits & 1:
        raise ValueError(f"{label} is encrypted")
    with archive.open(entry) as member:
        if member.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
            if entry.filename.rpartition("/")[2] == "data.pkl":
                raise ValueError(
                    f"{file.name!r} was saved by PyTorch: torch.load(file, mmap=True) "
                    "reads it; load() reads .npy and .npz"
                )
            raise _NoArrayError(f"{label} is not an array")
        member.seek(0)
        header = read_header(member, label, max_header_size)
        before = member.tell()
    array = _Array(label, *header, before)
    held = entry.file_size - before
    if held != array.nbytes:
        raise ValueError(
            f"{label} declares {array.nbytes} bytes, but {held} of them are there"
        )
    if entry.compress_type != zipfile.ZIP_STORED:
        return _Member(array, entry)
    head = os.pread(file.fileno(), _LOCAL_HEADER.size, entry.header_offset)
    _, name_length, extra_length = _LOCAL_HEADER.unpack(head)
    begin = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return _Member(array._replace(offset=begin + before), None)


def _unpack(
    archive: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
    array: _Array,
    target: _core.Buffer,
    rule: Casting | None,
    options: dict[str, Any],
    progress: Any,
) -> None:
    """Unpack a member piece by piece into `target`.

    `rule` is the casting for elements that are converted, or None if none are.
    """
    itemsize = array.dtype.itemsize
    step = max(_PIECE // itemsize, 1) * itemsize
    flat = target.reshape(-1) if array.nbytes else None
    with archive.open(entry) as member:
        member.read(array.offset)
        for at in range(0, array.nbytes, step):
            piece = member.read(min(step, array.nbytes - at))
            if len(piece) < min(step, array.nbytes - at):
                raise ValueError(f"{array.name} is not as long as the archive says")
            data = np.frombuffer(piece, array.dtype)
            part = flat[at // itemsize :][: data.size]  # type: ignore[index]
            copy_as(part, data, options["stream"], rule)
            if progress is not None:
                progress(at + len(piece), array.nbytes)
        if member.read(1):  # reading to the end makes zipfile verify the checksum
            raise ValueError(f"{array.name} is not as long as the archive says")


# -- saving ----------------------------------------------------------------------------


@hinting
def save(
    file: File,
    arr: object,
    *,
    stream: object = None,
    fsync: bool = False,
    direct: Direct = None,
    progress: Progress = None,
) -> None:
    """Save an array of any memory as an ``.npy`` file, which ``numpy.load`` reads.

    Parameters
    ----------
    file : path, int or binary file
        A path, to which ``.npy`` is appended unless it has that suffix; a descriptor; or a
        file that ``open(..., "wb")`` made, which is written from its position on.
    arr : Buffer, array, exporter or value
        Memory of any kind and strides, or anything that ``numpy.asarray`` takes. An array
        that is contiguous in Fortran order only is saved in that order.
    stream : stream, optional
        The stream on which device memory is read; by default the device's current stream.
    fsync : bool, optional
        As for `tofile`. A file that is replaced stays until the new one is on the disk.
    direct, progress : optional
        As for `tofile`.

    Raises
    ------
    TypeError, ValueError
        If an argument makes no sense, or the elements are Python objects; no file is then
        created or changed.
    OSError
        If the file cannot be written, or its name belongs to something that is not a
        regular file, such as a directory.
    ImportError
        If `progress` is True and tqdm is not installed.
    CudaError
        If a copy from the device failed.

    Notes
    -----
    For a path, `save` writes a new file under a temporary name in the same folder, gives it
    the permissions of the file that is there, and then replaces that file as a whole, like
    `save_safetensors`. If this fails, the old file stays. The bytes are those that
    ``numpy.save`` writes.

    **Blocks** until everything is written, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work on `arr` that cumem knows of.

    Examples
    --------
    >>> cumem.save("x.npy", cumem.array([1.0, 2.0]))  # from the device
    >>> numpy.load("x.npy")
    array([1., 2.])
    """
    fsync = read_flag(fsync, "fsync")
    head, data = _saved(arr, stream)
    options: Any = {"stream": stream, "direct": direct, "progress": progress}
    start = np.frombuffer(head, "u1")
    if isinstance(file, int) and not isinstance(file, bool):
        ranges = [(0, start), (len(head), data)]
        write_ranges(file, ranges, fsync=fsync, **options)
        return
    with _written(file, ".npy", fsync) as opened:
        if fcntl.fcntl(opened.fileno(), fcntl.F_GETFL) & os.O_APPEND:
            opened.seek(0, os.SEEK_END)  # an appending file writes there
        at = opened.tell()
        # One call writes both. If the source maps this file, writing the header in a call
        # of its own would change the source before it is read.
        ranges = [(at, start), (at + len(head), data)]
        write_ranges(opened, ranges, **options)
        opened.seek(at + len(head) + data.nbytes)


class _Exporter(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


@overload
def savez(file: File, /, *args: object, fsync: bool = ..., **named: object) -> None: ...
@overload  # without this, type checkers refuse **arrays, which may hold an "fsync"
def savez(file: File, /, *args: object, **named: _Exporter) -> None: ...
@hinting
def savez(file: File, /, *args: object, fsync: Any = False, **named: object) -> None:
    """Save several arrays of any memory as an ``.npz`` file, without compression.

    Parameters
    ----------
    file : path or binary file
        A path, to which ``.npz`` is appended unless it has that suffix; or a file that
        ``open(..., "wb")`` made.
    *args : Buffer, array, exporter or value
        As `arr` of `save`; their names are ``arr_0``, ``arr_1``, ….
    fsync : bool, optional
        As for `save`. No array can be saved under this name.
    **named : Buffer, array, exporter or value
        As `arr` of `save`; each has the name of its keyword.

    Raises
    ------
    TypeError, ValueError
        If elements are Python objects, two arrays have the same name, or `fsync` is an
        array; no file is then created or changed.
    OSError, CudaError
        As for `save`.

    Notes
    -----
    The arrays are written as `write_ranges` writes, in one call that also computes the
    checksums of the archive. A `file` without a position, such as a pipe, is written by
    `zipfile` instead: one array after the other, and more slowly. The new file replaces an
    old one as with `save`.

    **Blocks** until everything is written. **Ordered after** all work on the arrays that
    cumem knows of, and after the current streams.

    Examples
    --------
    >>> cumem.savez("points.npz", x=cumem.array([1.0, 2.0]))
    >>> numpy.load("points.npz")["x"]
    array([1., 2.])
    """
    if not isinstance(fsync, (bool, np.bool_)):
        raise TypeError(
            "fsync must be True or False (whether to wait for the disk), not "
            f"{type(fsync).__name__}; it cannot be an array's name"
        )
    arrays = dict(named)
    for index, array in enumerate(args):
        if f"arr_{index}" in arrays:
            raise ValueError(f"arr_{index} is also the name of an unnamed array")
        arrays[f"arr_{index}"] = array
    saved = {name: _saved(array, None) for name, array in arrays.items()}
    members = [(member_name(f"{name}.npy"), *parts) for name, parts in saved.items()]
    with _written(file, ".npz", bool(fsync)) as opened:
        if opened.seekable():
            write_archive(opened, members)
        else:
            _stream_members(opened, saved)


def _stream_members(opened: Any, saved: dict[str, tuple[bytes, _core.Buffer]]) -> None:
    """Write an archive to a file without offsets, such as a pipe."""
    with zipfile.ZipFile(opened, "w", zipfile.ZIP_STORED) as archive:
        for name, (head, data) in saved.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(head)
                _write_pieces(data, member.write)


@contextlib.contextmanager
def _written(file: Any, suffix: str, fsync: bool) -> Iterator[Any]:
    """Yield the file to write to; for a path it is a new file that replaces the old one."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        plain = unwrapped(file, writes=True)
        yield plain
        if fsync:
            plain.flush()
            os.fsync(plain.fileno())
        return
    path = os.fsdecode(file)
    with replacing(Path(path if path.endswith(suffix) else path + suffix)) as new:
        with new.open(fsync) as opened:
            yield opened
        new.place(fsync)


def _saved(obj: Any, stream: object) -> tuple[bytes, _core.Buffer]:
    """Return the header, and the elements as a buffer whose C order is the file's order."""
    if isinstance(obj, _core.Buffer) or _core._is_memory(obj):
        buffer = _core.asbuffer(obj, stream=stream)
    else:
        buffer = _core.asbuffer(as_array(obj))
    _ = buffer._address  # raises an error if the buffer is closed
    _warn_of_lost_type(obj, buffer.dtype)
    is_fortran = buffer.flags.fnc
    head = _header(buffer.shape, is_fortran, buffer.dtype)
    return head, buffer.T if is_fortran else buffer


def _warn_of_lost_type(obj: Any, dtype: np.dtype[Any]) -> None:
    """Warn if the header cannot name the type of the elements, as for `ml_dtypes`."""
    note, _ = find(obj)
    foreign = sorted(set(_foreign_types(dtype)), key=str)
    if foreign:  # other packages, such as ml_dtypes, registered these types
        name = " and ".join(each.name for each in foreign)
        comes_back = " and ".join(f"V{each.itemsize}" for each in foreign)
        cure = f'read it with np.load(file).view("{name}") while ml_dtypes is imported'
        if dtype.names is not None:  # save_safetensors() cannot keep records either
            warn_caller(
                f"an .npy file cannot say that fields are {name}: they come back as "
                f"{comes_back}; np.load(file).view(dtype) has them in their dtype",
                UserWarning,
            )
            return
    elif note is not None and dtype.kind == "u":
        name, comes_back = note.element, str(dtype)
        cure = "read it so on purpose"
    else:
        return
    warn_caller(
        f"an .npy file cannot say that the elements are {name}: they come back as "
        f"{comes_back}; save_safetensors() keeps the type, or {cure}",
        UserWarning,
    )


def _foreign_types(dtype: np.dtype[Any]) -> Iterator[np.dtype[Any]]:
    """Yield the types of other packages in a dtype, or in the fields of a record."""
    if dtype.subdtype is not None:
        yield from _foreign_types(dtype.base)
    elif dtype.names is not None:
        for name in dtype.names:
            yield from _foreign_types(dtype[name])
    elif dtype.isbuiltin == 2:
        yield dtype


def _header(shape: Sequence[int], fortran: bool, dtype: np.dtype[Any]) -> bytes:
    """Return the header that NumPy writes, in the oldest version that can hold it."""
    fields = {
        "descr": npy.dtype_to_descr(_readable(dtype)),
        "fortran_order": fortran,
        "shape": tuple(shape),
    }
    for write in (npy.write_array_header_1_0, npy.write_array_header_2_0):
        file = io.BytesIO()
        try:
            write(file, fields)
        except UnicodeEncodeError:
            break
        except ValueError:  # the header is longer than 64 KiB
            continue
        return file.getvalue()
    # Version 3.0 is for names that latin-1 lacks; NumPy has no public writer for it.
    text = "".join(f"{key!r}: {value!r}, " for key, value in sorted(fields.items()))
    body = f"{{{text}}}".encode()
    body += b" " * (-(len(body) + 13) % npy.ARRAY_ALIGN) + b"\n"
    return npy.MAGIC_PREFIX + b"\x03\x00" + struct.pack("<I", len(body)) + body


def _readable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype, with raw bytes for types that NumPy can write but not read back.

    Some packages register such types, and they occur in records too. For example, NumPy
    writes ``<f1`` for `float8_e5m2`, which names no dtype, so no program could read the
    file.
    """
    if dtype.names is not None:
        fields: Any = dtype.fields
        parts = [_readable(fields[name][0]) for name in dtype.names]
        if parts == [fields[name][0] for name in dtype.names]:
            return dtype
        return np.dtype(
            {
                "names": list(dtype.names),
                "formats": parts,
                "offsets": [fields[name][1] for name in dtype.names],
                "itemsize": dtype.itemsize,
            }
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((_readable(base), shape))
    try:
        npy.descr_to_dtype(npy.dtype_to_descr(dtype))
    except (TypeError, ValueError):
        return np.dtype(f"V{dtype.itemsize}")
    return dtype


def _write_pieces(data: _core.Buffer, write: Callable[[memoryview], object]) -> None:
    """Write the bytes in C order, in pieces that the host can read."""
    if data.nbytes == 0:
        return
    if not data.flags.c_contiguous:
        data = _core.asbuffer(data.to_numpy())
    flat = data.reshape(-1).view("u1")
    on_device = is_on_device(data.kind)
    stage = None
    if on_device:  # pinned by the device of `data`, which may not be the current one
        stage = _core.empty_pinned(min(_PIECE, flat.size), "u1", device=data.device)
    for at in range(0, flat.size, _PIECE):
        part = flat[at : at + _PIECE]
        if stage is not None:
            _core.copy(stage[: part.size], part)
            part = stage[: part.size]
        part._read_by(lambda array: write(array.data))
