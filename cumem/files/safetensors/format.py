# SPDX-License-Identifier: Apache-2.0
"""Knows the element types, headers and indexes of safetensors files.

A file begins with the length of its header (8 bytes, little-endian), followed by the header
(a JSON object) and by the bytes of the tensors, without gaps. Nothing here reads or moves
tensors. The format is described at https://github.com/huggingface/safetensors#format.

Files may come from anywhere. So everything that a header or an index says is checked before
it is used, and reading a bad one cannot take much memory or time. The reference
implementation accepts everything that is accepted here.

A header is read in one of two ways. Nearly all headers look exactly as safetensors or
Python's json writes them, and `_usual_header` reads these with regular expressions. All
others are left to `_Scan`, which is slower, reads any JSON, and says what is wrong with a
bad header.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from cumem import _core
from cumem.base.answer import Answer, plain
from cumem.base.carried import remember
from cumem.base.places import found_in
from cumem.buffers.arguments import hinting
from cumem.buffers.casting import STANDS_FOR
from cumem.files.file_hints import (
    HEAD_NBYTES,
    is_lfs_pointer,
    lfs_text,
    text_of,
    what_it_is,
)
from cumem.files.opening import is_data, open_regular

__all__ = [
    "INDEX_SUFFIX",
    "MAX_HEADER_NBYTES",
    "MAX_NAMES",
    "METADATA",
    "TORCH_CARRIED",
    "TYPES",
    "ElementType",
    "SafetensorsError",
    "SafetensorsHeader",
    "SafetensorsInfo",
    "check_shard",
    "check_text",
    "checked_path",
    "dtype_of",
    "header_bytes",
    "index_bytes",
    "is_carried",
    "opened_shard",
    "packed_shape",
    "read_groups",
    "read_header",
    "read_index",
    "read_safetensors_header",
    "resolved",
    "tensor_nbytes",
    "type_of",
]

MAX_HEADER_NBYTES = 100_000_000
#: The largest number of names in one JSON object, of tensors or of texts in the metadata.
MAX_NAMES = 1 << 19
#: The end of the name of an index of several files.
INDEX_SUFFIX = ".safetensors.index.json"
#: The one name in a header that does not belong to a tensor.
METADATA = "__metadata__"
_MAX_NDIM = 64
#: The largest number of characters that may describe one tensor.
_MAX_VALUE_LENGTH = 1 << 16


class SafetensorsError(ValueError):
    """A file is not a valid safetensors file or index; the message names file and tensor.

    A file that does not exist or cannot be read raises an `OSError`, as everywhere.

    Examples
    --------
    >>> import pathlib
    >>> written = pathlib.Path("bad.safetensors").write_bytes(b"no header")
    >>> try:
    ...     cumem.load_safetensors("bad.safetensors")
    ... except cumem.SafetensorsError:
    ...     print("refused")
    refused
    """


@found_in("cumem.types")
class SafetensorsInfo(NamedTuple):
    """A tensor's element type and shape, and where its bytes are in the file.

    Attributes
    ----------
    dtype : str
        The element type as the file calls it, such as ``"BF16"``.
    shape : tuple of int
        The shape in elements.
    offset : int
        The offset of its first byte in the file.
    nbytes : int
        The number of its bytes.

    Examples
    --------
    >>> path = cumem.save_safetensors("a.safetensors", {"w": numpy.ones(3, "f4")})
    >>> info = cumem.read_safetensors_header("a.safetensors").tensors["w"]
    >>> info.shape, info.nbytes
    ((3,), 12)
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return this answer as plain data; see `Counters.to_dict`."""
        return plain(self, "offset_nbytes")


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class SafetensorsHeader(Answer):
    """The contents of the headers of a file, or of a checkpoint in several files.

    Attributes
    ----------
    path : Path
        The file, or the index of several files.
    tensors : dict
        A `SafetensorsInfo` for each name, file by file in the order in which the tensors
        lie there.
    metadata : dict
        The texts in the header, which may be empty. If several files have a text of the
        same name, the last one counts.
    nbytes : int
        The size of the file, or of all files together.
    files : dict
        The file of each tensor, for a checkpoint in several files; empty for one file.

    Examples
    --------
    >>> path = cumem.save_safetensors("a.safetensors", {"w": numpy.ones(3, "f4")})
    >>> cumem.read_safetensors_header("a.safetensors").nbytes  # of the file
    76
    """

    path: Path
    tensors: dict[str, SafetensorsInfo]
    metadata: dict[str, str]
    nbytes: int
    files: dict[str, Path] = dataclasses.field(default_factory=dict)

    def memmap(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Map one tensor from its file; its bytes are read only when they are used.

        Parameters
        ----------
        name : str
            A name in `tensors`.

        Returns
        -------
        numpy.memmap
            A read-only map with the dtype that `load_safetensors` would give the tensor.
            Elements of less than a byte are shown as the bytes they are packed in. A
            tensor without elements is a plain `numpy.ndarray`.

        Raises
        ------
        KeyError
            If there is no tensor of this name.
        OSError
            If the file cannot be opened, or is shorter than when the header was read.

        Examples
        --------
        >>> path = cumem.save_safetensors("w.safetensors", {"w": numpy.ones((4, 2))})
        >>> header = cumem.read_safetensors_header(path)
        >>> sum(len(chunk) for _, chunk in cumem.chunks(header.memmap("w"), 32))
        4
        """
        info = self.tensors[name]
        shape, dtype = packed_shape(info), dtype_of(info.dtype)
        path = self.files.get(name, self.path)
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size < info.offset + info.nbytes:
                raise OSError(f"{path} is shorter than its header says")
            if info.nbytes == 0:
                return np.empty(shape, dtype)
            mapped = np.memmap(file, dtype, "r", info.offset, shape)
            if is_carried(mapped, info.dtype):
                remember(mapped, info.dtype, info.shape)
            return mapped


# -- element types ---------------------------------------------------------------------


class ElementType(NamedTuple):
    """An element type of the format, and its names in other libraries.

    Attributes
    ----------
    name : str
        The name of the type in files.
    bits : int
        The bits of one element; elements that do not fill bytes are packed.
    numpy : str
        NumPy's type of the same width: the type itself, or unsigned integers if NumPy does
        not have it.
    ml : str or None
        The name in ``ml_dtypes``, for a type that NumPy lacks.
    torch : str or None
        The name in PyTorch.
    rank : int
        The place of the type in the order of tensors in files that the reference
        implementation writes. Tensors of the highest rank come first.
    """

    name: str
    bits: int
    numpy: str
    ml: str | None
    torch: str | None
    rank: int

    @property
    def native(self) -> bool:
        """Whether NumPy has this type itself."""
        return self.ml is None and self.bits >= 8


def _element_type(row: _core._Dtype, name: str) -> ElementType:
    """Make the element type that files call `name` from the extension's table."""
    is_whole = row.bits % 8 == 0
    return ElementType(
        name,
        row.bits,
        # Packed elements are held as bytes, and other types that NumPy lacks as integers.
        row.name if row.kind else f"uint{row.bits if is_whole else 8}",
        row.name if is_whole and not row.kind else None,
        row.torch_name,
        row.file_rank,
    )


#: Every element type of the format, by its name.
TYPES = {
    row.file_name: _element_type(row, row.file_name)
    for row in sorted(_core._DTYPES.values(), key=lambda row: row.file_rank)
    if row.file_name is not None
}

_BY_NUMPY = {np.dtype(t.numpy): t for t in TYPES.values() if t.native}
_BY_ML = {t.ml: t for t in TYPES.values() if t.ml is not None}

#: Integers that every version of PyTorch takes through DLPack, by the bytes of an element.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
#: Types that not every version of PyTorch takes through DLPack, and the integers to pass in
#: their place; the tensor is then viewed as its own type.
TORCH_CARRIED = {
    element.name: _CARRIERS[max(element.bits // 8, 1)]
    for element in TYPES.values()
    if not element.native or element.numpy in ("bool", "uint16", "uint32", "uint64")
}


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of an element type: NumPy's, that of ``ml_dtypes``, or integers."""
    kind = TYPES[name]
    if kind.ml is not None:
        try:
            own: type = getattr(importlib.import_module("ml_dtypes"), kind.ml)
            return np.dtype(own)
        except (ImportError, AttributeError):  # not installed, or too old
            pass
    return np.dtype(kind.numpy)


def dtype_for_casts(name: str) -> np.dtype[Any]:
    """Return the dtype that stands for an element type in a conversion.

    Raise a TypeError if elements of this type cannot be converted.
    """
    kind, dtype = TYPES[name], dtype_of(name)
    if kind.native or (kind.ml is not None and dtype.name == kind.ml):
        return dtype
    if kind.ml is not None and _core._DTYPES[kind.ml].converts:
        return np.dtype(kind.numpy, metadata={STANDS_FOR: kind.ml})
    if kind.ml is not None:
        raise TypeError(
            f"elements of type {name} are converted by ml_dtypes, which is not installed "
            "or too old: pip install -U ml_dtypes"
        )
    raise TypeError(
        f"elements of type {name} are packed, several in a byte, and nothing converts them"
    )


def type_named(dtype: object) -> ElementType | None:
    """Return the element type for a dtype of PyTorch or the name of one of ml_dtypes."""
    said = str(dtype)
    if type(dtype).__module__.partition(".")[0] == "torch":
        name = said.removeprefix("torch.")
        return next((kind for kind in TYPES.values() if kind.torch == name), None)
    return _BY_ML.get(said) if isinstance(dtype, str) else None


def is_carried(value: Any, name: str) -> bool:
    """Return whether a loaded array holds integers in place of elements of type `name`."""
    kind = TYPES[name]
    said = str(value.dtype).removeprefix("torch.")
    return not kind.native and said == str(np.dtype(kind.numpy))


def type_of(dtype: np.dtype[Any]) -> ElementType | None:
    """Return the element type of a dtype in the machine's byte order, or None.

    The format is little-endian, as is every machine that CUDA runs on.
    """
    found = _BY_NUMPY.get(dtype)
    if found is None and dtype.isbuiltin == 2:  # registered by another package
        found = _BY_ML.get(dtype.name)
    return found


def packed_shape(info: SafetensorsInfo) -> tuple[int, ...]:
    """Return the shape of a tensor's buffer, which for packed elements counts bytes.

    Elements of less than a byte are packed along the last axis if its elements fill whole
    bytes, and otherwise into one row of bytes.
    """
    bits = TYPES[info.dtype].bits
    if bits >= 8:
        return info.shape
    if info.shape and info.shape[-1] * bits % 8 == 0:
        return (*info.shape[:-1], info.shape[-1] * bits // 8)
    return (info.nbytes,)


def tensor_nbytes(kind: ElementType, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor; raise a ValueError if no tensor can have this shape."""
    if len(shape) > _MAX_NDIM:
        raise ValueError(f"it has {len(shape)} dimensions, more than {_MAX_NDIM}")
    count = nonzero = 1
    for extent in shape:
        count *= extent
        nonzero *= extent or 1
        if nonzero >= 1 << 63:
            break
    if nonzero >= 1 << 63 or nonzero * kind.bits >= 1 << 66:
        raise ValueError("its size does not fit in 63 bits")
    if count * kind.bits % 8:
        raise ValueError(
            f"{count} elements of {kind.bits} bits do not fill a whole number of bytes"
        )
    return count * kind.bits // 8


# -- reading ---------------------------------------------------------------------------


@hinting
def read_safetensors_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the headers of safetensors files, without reading any tensor.

    Parameters
    ----------
    path : str or path-like
        A file, an index or a folder, as for `load_safetensors`.

    Returns
    -------
    SafetensorsHeader
        The tensors with types, shapes and offsets, and the metadata.

    Raises
    ------
    SafetensorsError
        If a header is longer than 100 MB or than the file, does not begin with ``{``, is
        not JSON in UTF-8, has a key twice, has more than 524,288 tensors or texts, or
        describes one of them in more than 65,536 characters; if a tensor has an unknown
        element type, a shape or offsets that are not whole numbers from 0 on, or a size
        that does not fit in 63 bits, differs from that of its bytes, or goes beyond the
        file; if tensors overlap; if bytes belong to no tensor. If an index is wrong, names
        a file that is missing or outside the index's folder, or says that a file has a
        tensor which that file lacks.
    ValueError
        If a folder holds no checkpoint or more than one.
    OSError
        If a file cannot be read, or is a FIFO, a device or the like.
    TypeError
        If `path` is not a path but, for instance, a descriptor.

    Notes
    -----
    **Blocks** while the header is read. Even for a bad header, this needs at most a few
    times the header's length in memory, and 500 bytes for each tensor.

    Examples
    --------
    >>> path = cumem.save_safetensors("a.safetensors", {"w": numpy.ones(3, "f4")})
    >>> cumem.read_safetensors_header("a.safetensors").tensors["w"].shape
    (3,)
    """
    path = resolved(checked_path(path))
    if path.suffix != ".json":
        with open_regular(path) as file:
            return read_header(file, path)
    tensors: dict[str, SafetensorsInfo] = {}
    metadata: dict[str, str] = {}
    files: dict[str, Path] = {}
    nbytes = 0
    for place, names in read_groups(path).items():
        with opened_shard(path, place, names[0]) as file:
            header = read_header(file, place)
        check_shard(path, header, names)
        wanted = set(names)
        for name, info in header.tensors.items():
            if name in wanted:
                tensors[name], files[name] = info, place
        metadata.update(header.metadata)
        nbytes += header.nbytes
    return SafetensorsHeader(path, tensors, metadata, nbytes, files)


def resolved(path: Path) -> Path:
    """Return the file or index that a path names, or the only one in a folder."""
    if not path.is_dir():
        return path
    indexes = sorted(path.glob("*" + INDEX_SUFFIX))
    files = sorted(path.glob("*.safetensors"))
    if indexes:  # a file named like an index is a separate checkpoint
        stems = {index.name.removesuffix(INDEX_SUFFIX) for index in indexes}
        files = [file for file in files if file.stem in stems]
    found = indexes + files
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(f"the folder {path} holds no *.safetensors")
    named = ", ".join(file.name for file in found[:4])
    raise ValueError(
        f"the folder {path} holds several checkpoints, name one: {named}; "
        "load_safetensors() takes a list of files, too, which belong together"
    )


def read_groups(
    index: Path, names: Iterable[str] | None = None
) -> dict[Path, list[str]]:
    """Return the sorted files of an index, each with those of its tensors that are wanted.

    `names` are the wanted tensors; by default all are. Raise a KeyError if the index lacks
    one of the names, and the errors of `read_index`.
    """
    places = read_index(index)
    groups: dict[Path, list[str]] = {}
    for name in places if names is None else names:
        if name not in places:
            raise KeyError(f"{index} has no tensor {name!r}")
        groups.setdefault(places[name], []).append(name)
    return {file: groups[file] for file in sorted(groups)}


def opened_shard(index: Path, path: Path, name: str) -> BufferedReader:
    """Open the file that an index names for the tensor `name`."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise SafetensorsError(
            f"{index}: tensor {name!r}: its file {path.name} is missing"
        ) from None


def check_shard(index: Path, header: SafetensorsHeader, names: Iterable[str]) -> None:
    """Raise an error if a file lacks a tensor that the index says is in it."""
    for name in names:
        if name not in header.tensors:
            raise SafetensorsError(
                f"{index}: {header.path} has no tensor {name!r}, as this says"
            )


def checked_path(path: object, writes: bool = False) -> Path:
    """Return a path; raise a TypeError for anything that does not name a file.

    Descriptors of open files are refused too. With `writes` the error is worded for a
    caller that wants to write a file.
    """
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    given = type(path).__name__
    cure = ""
    if isinstance(path, (bytes, bytearray, memoryview)):
        cure = "; safetensors.numpy.load(data) reads the bytes of a file"
    elif hasattr(path, "read"):
        cure = "; pass the path, such as file.name, of the open file"
    elif writes and is_data(path):
        cure = ": the path comes first, and then the tensors"
    raise TypeError(f"path must be a str or path-like, not {given}{cure}")


def read_header(file: BinaryIO, path: Path) -> SafetensorsHeader:
    """Read and check the header of an open file."""
    size = os.fstat(file.fileno()).st_size
    try:
        text, start = _header_text(file, size)
        return SafetensorsHeader(path, *_header(text, start, size), size)
    except (ValueError, RecursionError) as error:
        refused = _refused(path, error)
    raise refused  # not in the except block, where its context would keep the text alive


def _refused(path: Path, error: Exception) -> SafetensorsError:
    """Make an error that adds the name of the file to `error`."""
    if isinstance(error, UnicodeDecodeError):
        return SafetensorsError(f"{path}: the header is not UTF-8: {error.reason}")
    if isinstance(error, json.JSONDecodeError):
        return SafetensorsError(f"{path}: not JSON: {error}")
    if isinstance(error, RecursionError):
        return SafetensorsError(f"{path}: not JSON that can be read: nested too deep")
    return SafetensorsError(f"{path}: {error}")


def _header_text(file: BinaryIO, size: int) -> tuple[str, int]:
    """Return the header's JSON and the offset of its end in the file."""
    start = file.read(8)
    if len(start) < 8:
        raise ValueError(f"{size} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_NBYTES:
        rest = file.read(HEAD_NBYTES)
        _refuse_other_file(start + rest)
        text = text_of(start + rest)
        if text is not None:
            raise ValueError(f"not a safetensors file but a text that begins {text}")
        raise ValueError(
            f"the header would have {length} bytes, more than {MAX_HEADER_NBYTES}: "
            "not a safetensors file?"
        )
    raw = file.read(length) if length <= size else b""
    if len(raw) < length:
        raise ValueError(
            f"the header has {length} bytes, the file only {size}: it is cut short"
        )
    if raw[:1] != b"{":
        raise ValueError("the header does not begin with '{'")
    return raw.decode(), 8 + length


def _refuse_other_file(head: bytes) -> None:
    """Raise an error that says what the file is, if it has another known format."""
    if is_lfs_pointer(head):
        raise ValueError(lfs_text("it"))
    known = what_it_is(head)
    if known is not None and "safetensors" not in known:
        raise ValueError(f"not a safetensors file but {known}")


def _header(
    text: str, start: int, size: int
) -> tuple[dict[str, SafetensorsInfo], dict[str, str]]:
    """Return the tensors and the metadata of a header, with data that begin at `start`."""
    found = _usual_header(text, start, size)
    if found is not None:
        return found
    scan = _Scan(text)
    metadata: dict[str, str] = {}
    tensors: dict[str, SafetensorsInfo] = {}
    for name in scan.names():
        if name == METADATA:
            metadata = _texts(scan)
        else:
            tensors[name] = _info(name, scan.value(), start)
    scan.end()
    ordered = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    _check_cover(ordered, start, size)
    return dict(ordered), metadata


class _Layout(NamedTuple):
    """The way in which a writer formats the entries of a header."""

    entry: re.Pattern[str]
    rest_length: int  # the characters of an entry outside the pattern's groups
    end: str  # the end of an entry


def _layout(colon: str, comma: str) -> _Layout:
    number = "(0|[1-9][0-9]{0,18})"
    groups = (r'([^"\\\x00-\x1f]*)', "([A-Z0-9_]*)", f"([0-9{comma}]*)", number, number)
    marks = (
        f'"{colon}{{"dtype"{colon}"',
        f'"{comma}"shape"{colon}[',
        f']{comma}"data_offsets"{colon}[',
        comma,
        f"]}}{comma}",
    )
    pattern = '"' + "".join(
        group + re.escape(mark) for group, mark in zip(groups, marks, strict=True)
    )
    return _Layout(re.compile(pattern), 1 + sum(map(len, marks)), marks[-1])


#: The formats of safetensors' own headers and of those that Python's json writes.
_LAYOUTS = (_layout(":", ","), _layout(": ", ", "))
_LENGTH = re.compile("0|[1-9][0-9]{0,18}")
_METADATA_FIRST = re.compile(r'\{"__metadata__":[ ]?(?=\{)')
#: The number of a header's characters that are matched at a time.
_WINDOW = 1 << 20


def _usual_header(
    text: str, start: int, size: int
) -> tuple[dict[str, SafetensorsInfo], dict[str, str]] | None:
    """Read a header in one of the usual formats, much faster than `_Scan` reads it.

    Such a header has all entries in the order of their bytes and formatted in the same way.
    A regular expression finds the entries of one window of the text at a time, so that
    the matches take little memory. They are accepted if all of them together are exactly as
    long as the window, since the expression cannot have skipped anything then.

    The answer is None for any other header, which may be good or damaged: `_Scan` reads it
    and says what is wrong with it.
    """
    metadata: dict[str, str] = {}
    at = 1
    first = _METADATA_FIRST.match(text)
    try:
        if first is not None:
            scan = _Scan(text, first.end())
            metadata = _texts(scan)
            at = scan.skip_comma()
        length = len(text.rstrip(" "))
        if not text.startswith("}}", length - 2):
            return None
        for layout in _LAYOUTS:
            body = text[at : length - 1] + layout.end[2:]
            tensors = _usual_entries(body, layout, start, size)
            if tensors is not None:
                return tensors, metadata
    except ValueError:
        pass
    return None


def _usual_entries(
    body: str, layout: _Layout, start: int, size: int
) -> dict[str, SafetensorsInfo] | None:
    tensors: dict[str, SafetensorsInfo] = {}
    shapes: dict[tuple[str, str], tuple[str, tuple[int, ...], int]] = {}
    make, info_type = tuple.__new__, SafetensorsInfo
    count, at, offset = 0, 0, start
    while at < len(body):
        cut = body.find(layout.end + '"', at + _WINDOW)
        cut = len(body) if cut < 0 else cut + len(layout.end)
        if cut - at > 4 * _WINDOW:
            return None
        found = layout.entry.findall(body, at, cut)
        count += len(found)
        length = sum(map(len, itertools.chain.from_iterable(found)))
        if length + len(found) * layout.rest_length != cut - at or count > MAX_NAMES:
            return None
        for name, dtype, lengths, begin, end in found:
            known = shapes.get((dtype, lengths))
            if known is None:
                known = _usual_shape(dtype, lengths)
                if len(shapes) < MAX_NAMES >> 6:
                    shapes[dtype, lengths] = known
            kind, shape, nbytes = known
            if int(begin) != offset - start or int(end) != offset - start + nbytes:
                return None
            tensors[name] = make(info_type, (kind, shape, offset, nbytes))
            offset += nbytes
        at = cut
    is_whole = len(tensors) == count and METADATA not in tensors and offset == size
    return tensors if is_whole else None


def _usual_shape(dtype: str, lengths: str) -> tuple[str, tuple[int, ...], int]:
    """Return type, shape and bytes, or raise a ValueError if the entry is unusual."""
    parts = lengths.replace(", ", ",").split(",") if lengths else []
    if dtype not in TYPES or not all(map(_LENGTH.fullmatch, parts)):
        raise ValueError(lengths)
    shape = tuple(map(int, parts))
    return TYPES[dtype].name, shape, tensor_nbytes(TYPES[dtype], shape)


def _texts(scan: _Scan) -> dict[str, str]:
    if not scan.at_object():
        if scan.value() is not None:
            raise ValueError(f"{METADATA} is not a JSON object")
        return {}
    texts: dict[str, str] = {}
    for key in scan.names():
        value = scan.value()
        if not isinstance(value, str):
            raise ValueError(f"{METADATA} has no text for {key!r}")
        check_text(key)
        check_text(value)
        texts[key] = value
    return texts


def check_text(text: str) -> None:
    """Raise a ValueError for half a surrogate pair, which UTF-8 cannot write."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{text!r} is not a text that UTF-8 can write") from None


def _info(name: str, fields: object, start: int) -> SafetensorsInfo:
    """Check one tensor of a header by itself, and return its info."""
    try:
        check_text(name)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        try:
            dtype, shape, offsets = (
                fields["dtype"],
                fields["shape"],
                fields["data_offsets"],
            )
        except KeyError as missing:
            raise ValueError(f"it has no {missing}") from None
        kind = TYPES.get(dtype) if isinstance(dtype, str) else None
        if kind is None:
            raise ValueError(f"the element type {dtype!r} is not known")
        _check_counts("shape", shape)
        _check_counts("data_offsets", offsets)
        if len(offsets) != 2:
            raise ValueError(f"data_offsets are {len(offsets)} numbers, not 2")
        begin, end = offsets
        if begin > end:
            raise ValueError(f"its data end at {end}, before they begin at {begin}")
        nbytes = tensor_nbytes(kind, shape)
        if nbytes != end - begin:
            raise ValueError(
                f"{dtype} of shape {tuple(shape)} takes {nbytes} bytes, "
                f"data_offsets give it {end - begin}"
            )
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from None
    return SafetensorsInfo(kind.name, tuple(shape), start + begin, nbytes)


def _check_counts(field: str, values: object) -> None:
    if not isinstance(values, list):
        raise ValueError(f"{field} is not a list")
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{field} has {value!r}: not a whole number from 0 on")


def _check_cover(
    tensors: list[tuple[str, SafetensorsInfo]], start: int, size: int
) -> None:
    """Check that sorted tensors cover each byte from `start` to the end exactly once."""
    at, before = start, ""
    for name, (_, _, offset, nbytes) in tensors:
        if offset < at:
            raise ValueError(f"tensor {name!r}: its data overlap those of {before!r}")
        if offset > at:
            raise ValueError(
                f"tensor {name!r}: the {offset - at} bytes before its data belong to "
                "no tensor"
            )
        at, before = offset + nbytes, name
        if at > size:
            raise ValueError(
                f"tensor {name!r}: its data end at {at}, but the file has {size} bytes: "
                "it is cut short"
            )
    if at < size:
        raise ValueError(f"the last {size - at} bytes belong to no tensor")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, and refuse a key that it has twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} stands twice in one JSON object")
            seen.add(key)
    return made


def _integer(text: str) -> int:
    if len(text) > 19 or text[0] == "-":
        raise ValueError(
            f"the number {text[:30]} is negative or does not fit in 63 bits"
        )
    return int(text)


def _constant(text: str) -> float:
    raise ValueError(f"not JSON: {text}")


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _constant(text)


_JSON = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_integer,
    parse_float=_number,
    parse_constant=_constant,
)
_BLANKS = re.compile(r"[ \t\n\r]*")
#: Matches a name without escapes, as most are, with the colon behind it.
_NAME = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_NEXT = re.compile(r"[ \t\n\r]*([,}])")


class _Scan:
    """Reads a JSON text value by value, so that only one small value exists at a time.

    Decoding the whole text at once may take thirty times its memory.
    """

    def __init__(self, text: str, at: int = 0) -> None:
        self._text = text
        self._at = at

    def names(self) -> Iterator[str]:
        """Yield the names in the next object; the caller reads the value of each."""
        self._take("{")
        seen: set[str] = set()
        if self._sign() == "}":
            self._at += 1
            return
        while True:
            name = self._name()
            if name in seen:
                raise ValueError(f"{name!r} stands twice in one JSON object")
            if len(seen) == MAX_NAMES:
                raise ValueError(f"more than {MAX_NAMES} names in one JSON object")
            seen.add(name)
            yield name
            follows = _NEXT.match(self._text, self._at)
            if follows is None:
                raise self._error("Expecting ',' delimiter")
            self._at = follows.end()
            if follows[1] == "}":
                return

    def value(self) -> Any:
        """Return the next value, which may be long only if it is a text."""
        if self._sign() == '"':
            return self._long_text()
        length = 1 << 10
        while True:
            part = self._text[self._at : self._at + length]
            try:
                value, end = _JSON.raw_decode(part)
            except json.JSONDecodeError as error:
                if len(part) < length:
                    raise self._error(error.msg, error.pos) from None
                length *= 8
                if length > _MAX_VALUE_LENGTH:
                    raise ValueError(
                        f"{part[:30]!r} goes on for more than {len(part)} characters, "
                        "or is not JSON"
                    ) from None
            else:
                self._at += end
                return value

    def skip_comma(self) -> int:
        """Skip a comma, and return where the next token begins."""
        self._take(",")
        self._sign()
        return self._at

    def at_object(self) -> bool:
        return self._sign() == "{"

    def end(self) -> None:
        """Raise an error if anything follows."""
        if self._sign():
            raise self._error("Extra data")

    def _name(self) -> str:
        plain = _NAME.match(self._text, self._at)
        if plain is not None:
            self._at = plain.end()
            return plain[1]
        if self._sign() != '"':
            raise self._error("Expecting property name enclosed in double quotes")
        name = self._long_text()
        self._take(":")
        return name

    def _long_text(self) -> str:
        value: str
        value, self._at = _JSON.raw_decode(self._text, self._at)
        return value

    def _sign(self) -> str:
        """Skip blanks and return the next character, or "" at the end of the text."""
        blanks = _BLANKS.match(self._text, self._at)
        self._at = self._at if blanks is None else blanks.end()
        return self._text[self._at : self._at + 1]

    def _take(self, sign: str) -> None:
        if self._sign() != sign:
            raise self._error(f"Expecting {sign!r} delimiter")
        self._at += 1

    def _error(self, message: str, offset: int = 0) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self._text, self._at + offset)


def read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint in several files.

    Raises
    ------
    SafetensorsError
        If the index is longer than 100 MB, is not JSON in UTF-8, has a key twice, no
        ``weight_map`` or more than 524,288 tensors, or names a file outside its own
        folder.
    OSError
        If it cannot be read, or is a FIFO, a device or the like.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_HEADER_NBYTES + 1)
        if len(raw) > MAX_HEADER_NBYTES:
            raise ValueError(f"the index has more than {MAX_HEADER_NBYTES} bytes")
        if not raw.lstrip().startswith(b"{"):
            _refuse_other_file(raw)
        return _places(_Scan(raw.decode()), path.parent)
    except (ValueError, RecursionError) as error:
        refused = _refused(path, error)
    raise refused  # not in the except block, where its context would keep the text alive


def _places(scan: _Scan, folder: Path) -> dict[str, Path]:
    places: dict[str, Path] | None = None
    files: dict[str, Path] = {}
    if not scan.at_object():
        scan.value()  # raises an error of its own if it is not JSON at all
        raise ValueError("not a JSON object")
    for key in scan.names():
        if key != "weight_map" or not scan.at_object():
            scan.value()
            continue
        places = {}
        for name in scan.names():
            file = scan.value()
            if not isinstance(file, str):
                raise ValueError(f"tensor {name!r}: its file is {file!r}, not a text")
            check_text(name)
            if file not in files:
                files[file] = _shard(folder, name, file)
            places[name] = files[file]
    scan.end()
    if places is None:
        raise ValueError("it has no JSON object 'weight_map'")
    return places


def _shard(folder: Path, name: str, shard: str) -> Path:
    """Return the path of a file that an index names, in its folder or in one below."""
    check_text(shard)
    parts = shard.split("/")
    if shard.startswith("./"):  # some programs write all names like this
        parts = parts[1:]
    if "\0" in shard or "\\" in shard or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"tensor {name!r}: its file {shard!r} is not a path inside the index's folder"
        )
    return folder.joinpath(*parts)


# -- writing ---------------------------------------------------------------------------


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
    metadata: Mapping[str, str] | None,
) -> tuple[bytes, dict[str, SafetensorsInfo]]:
    """Return the length and header that begin a file, as the reference writes them.

    Parameters
    ----------
    tensors : iterable of (name, element type, shape, nbytes)
        The tensors in any order. The header has those of the highest rank first, and sorts
        those of equal rank by name.
    metadata : mapping of str to str, optional
        The texts, which are written sorted by name, so that equal contents give equal
        files.

    Returns
    -------
    bytes
        The length and the header, which is padded with spaces to a multiple of 8 bytes.
    dict
        A `SafetensorsInfo` for each name, in the order in which the tensors lie in the
        file.

    Raises
    ------
    ValueError
        If the header would be longer than 100 MB, or have more than 524,288 names.
    """
    ordered = sorted(tensors, key=lambda item: (-TYPES[item[1]].rank, item[0]))
    if max(len(ordered) + bool(metadata), len(metadata or ())) > MAX_NAMES:
        raise ValueError(f"a header has at most {MAX_NAMES} tensors and texts")
    header: dict[str, Any] = {}
    if metadata:
        header[METADATA] = dict(sorted(metadata.items()))
    at = 0
    for name, dtype, shape, nbytes in ordered:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"the header would have {len(raw)} bytes, more than {MAX_HEADER_NBYTES}"
        )
    return struct.pack("<Q", len(raw)) + raw, dict(_placed(ordered, 8 + len(raw)))


def _placed(
    ordered: Iterable[tuple[str, str, tuple[int, ...], int]], at: int
) -> Iterator[tuple[str, SafetensorsInfo]]:
    for name, dtype, shape, nbytes in ordered:
        yield name, SafetensorsInfo(dtype, shape, at, nbytes)
        at += nbytes


def index_bytes(files: Mapping[str, str], total_nbytes: int) -> bytes:
    """Return the bytes of an index, which names the file of each tensor of a checkpoint.

    Raise a ValueError for more than 524,288 tensors or an index of more than 100 MB.
    """
    if len(files) > MAX_NAMES:
        raise ValueError(f"an index has at most {MAX_NAMES} tensors, not {len(files)}")
    index = {
        "metadata": {"total_size": total_nbytes},
        "weight_map": dict(sorted(files.items())),
    }
    raw = json.dumps(index, ensure_ascii=False, indent=2).encode() + b"\n"
    if len(raw) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"the index would have {len(raw)} bytes, more than {MAX_HEADER_NBYTES}"
        )
    return raw
