# SPDX-License-Identifier: Apache-2.0
"""Reads ``__cuda_array_interface__`` dictionaries strictly, for the extension."""

from __future__ import annotations

import operator
import re
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

NEWEST_VERSION = 3
MAX_NDIM = 64
_LEAST, _MOST = -(2**63), 2**63 - 1
#: A byte order, one letter, digits and, for datetimes, a unit. numpy.dtype() accepts much
#: more than the interface allows.
TYPESTR = re.compile(r"[<>|](?:[biufcSUV]\d{1,10}|[mM]\d{1,10}(?:\[.*\])?)", re.ASCII)


def read(
    entries: Any,
) -> tuple[int, bool, tuple[int, ...], tuple[int, ...], np.dtype[Any], int]:
    """Return pointer, read-only, shape, strides in bytes, dtype and stream (0 for none).

    An error names the entry that is wrong. Integers and tuples have exactly these types.
    The dtype is that of ``descr`` if it has fields.
    """
    if not isinstance(entries, dict):
        given = repr(entries)[:200]
        raise TypeError(f"__cuda_array_interface__ must be a dict, not {given}")
    # A copy is read, since an __index__ of the exporter's could change the dict meanwhile.
    entries = {**entries}
    version = _integer("version", _required(entries, "version"))
    if not 0 <= version <= NEWEST_VERSION:
        _refuse(ValueError, "version", f"0 to {NEWEST_VERSION}", entries["version"])
    if entries.get("mask") is not None:
        _refuse(ValueError, "mask", "None: masks are not supported", entries["mask"])
    pointer, readonly = _read_data(_required(entries, "data"))
    shape = _integers("shape", _required(entries, "shape"))
    if min(shape, default=0) < 0:
        _refuse(ValueError, "shape", "without negative lengths", entries["shape"])
    stream = _read_stream(entries.get("stream"))
    dtype = _read_dtype(entries)
    if entries.get("strides") is None:
        strides = _dense_strides(shape, dtype.itemsize)
    else:
        strides = _integers("strides", entries["strides"])
        if len(strides) != len(shape):
            _refuse(ValueError, "strides", "as long as the shape", entries["strides"])
    return pointer, readonly, shape, strides, dtype, stream


@lru_cache(maxsize=1024)
def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    if step >= 2**63:
        raise ValueError(
            "__cuda_array_interface__['shape']: the number of bytes does not fit in 63 bits"
        )
    return tuple(reversed(strides))


def _refuse(error: type[Exception], key: str, expected: str, value: object) -> NoReturn:
    raise error(
        f"__cuda_array_interface__['{key}'] must be {expected}, not {repr(value)[:200]}"
    )


def _required(entries: dict[str, Any], key: str) -> Any:
    value = entries.get(key)
    if value is None:
        raise ValueError(f"__cuda_array_interface__ has no '{key}'")
    return value


def _integer(key: str, value: Any) -> int:
    if type(value) is int and _LEAST <= value <= _MOST:
        return value
    try:
        number = int(operator.index(value))
    except TypeError:
        raise TypeError(
            f"__cuda_array_interface__['{key}'] must be an int, not "
            f"{type(value).__name__}"
        ) from None
    if not _LEAST <= number <= _MOST:
        raise ValueError(
            f"__cuda_array_interface__['{key}']: {number} does not fit in 63 bits"
        )
    return number


def _integers(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        _refuse(TypeError, key, "a tuple of ints", value)
    if len(value) > MAX_NDIM:
        raise ValueError(
            f"__cuda_array_interface__['{key}'] has {len(value)} items, more than "
            f"{MAX_NDIM}"
        )
    for item in value:
        if type(item) is not int or not _LEAST <= item <= _MOST:
            break
    else:
        return tuple(value)
    return tuple(_integer(key, item) for item in value)


def _read_data(value: Any) -> tuple[int, bool]:
    if not isinstance(value, tuple) or len(value) != 2:
        _refuse(TypeError, "data", "a tuple (pointer, read_only)", value)
    try:
        pointer = int(operator.index(value[0]))
    except TypeError:
        _refuse(TypeError, "data", "a tuple (int, bool)", value)
    if not isinstance(value[1], int):
        _refuse(TypeError, "data", "a tuple (int, bool)", value)
    if not 0 <= pointer < 2**64 - 1:
        _refuse(ValueError, "data", "a pointer of 64 bits", value)
    return pointer, bool(value[1])


def _read_stream(value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        _refuse(TypeError, "stream", "None or an int", value)
    if not 0 < value < 2**64 - 1:
        expected = "None, 1 (legacy default), 2 (per-thread default) or a handle"
        _refuse(ValueError, "stream", expected, value)
    return int(value)


def _read_dtype(entries: dict[str, Any]) -> np.dtype[Any]:
    typestr, descr = _required(entries, "typestr"), entries.get("descr")
    if not isinstance(typestr, str):
        _refuse(TypeError, "typestr", "a str such as '<f4'", typestr)
    plain = _read_typestr(typestr)
    if plain.kind != "V" or descr is None:
        return plain
    if not isinstance(descr, list):  # where typestr says only how many bytes it has
        _refuse(TypeError, "descr", "a list of tuples", descr)
    fields = _make_dtype("descr", descr)
    if fields.itemsize != plain.itemsize:
        _refuse(ValueError, "descr", "of the size that typestr says", descr)
    return fields


@lru_cache(maxsize=1024)
def _read_typestr(typestr: str) -> np.dtype[Any]:
    if len(typestr) > 32 or not TYPESTR.fullmatch(typestr):
        _refuse(ValueError, "typestr", "a type string such as '<f4'", typestr)
    return _make_dtype("typestr", typestr)


def _make_dtype(key: str, value: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] | None
    try:
        dtype = np.dtype(value)
    except MemoryError:
        raise
    except Exception:
        dtype = None
    if dtype is None or dtype.hasobject or dtype.itemsize == 0 or dtype.subdtype:
        raise ValueError(
            f"__cuda_array_interface__['{key}'] is not a dtype cumem can hold: "
            f"{repr(value)[:200]}"
        )
    return dtype
