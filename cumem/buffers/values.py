# SPDX-License-Identifier: Apache-2.0
"""Values to elements of a dtype, for the extension: never changed, at most rounded.

``as_value()`` takes what may be written into a buffer: a scalar, a list or an array.
NumPy reads and converts it; what NumPy would change on the way is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from cumem.buffers.casting import name_of

#: Numbers of the dtypes of other packages, e.g. ml_dtypes, begin here.
USER_DTYPES = 256
#: Elements that are compared together: what the check makes of them stays in a cache.
BLOCK_COUNT = 8192


class Kind(IntEnum):
    """Kinds of value; of the numbers each goes into those after it."""

    INTEGER = 0  # bool as well
    REAL = 1
    COMPLEX = 2
    TEXT = 3
    TIME = 4
    SPAN = 5
    RAW = 6
    RECORD = 7
    OTHER = 8


KIND_OF_LETTER = {
    **dict.fromkeys("biu", Kind.INTEGER),
    "f": Kind.REAL,
    "c": Kind.COMPLEX,
    **dict.fromkeys("SU", Kind.TEXT),
    "M": Kind.TIME,
    "m": Kind.SPAN,
    "V": Kind.RAW,
}


def refuse_masked(array: Any) -> None:
    """TypeError for an array with masked elements; one whose mask hides none is plain."""
    # Where nobody has loaded numpy.ma, no array has a mask. To name it here would load it,
    # and NumPy's loading of it recurses without end where several threads do so at once.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if kind is not None and isinstance(array, kind) and np.ma.is_masked(array):
        raise TypeError(
            "an array with masked elements: the mask would get lost; pass "
            "array.filled(value) with a value in their place, or array.data to take them "
            "as they are in memory"
        )


def as_value(value: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array of ``dtype`` that holds the same as ``value``.

    TypeError where the kind of a value would change (1.5 to an integer, a number to
    text), OverflowError or ValueError where it does not fit; floats round.
    """
    if value is None:
        raise TypeError("None is not a value that can be written")
    if dtype.names is not None:
        return as_record(value, dtype)
    natural = read_naturally(value, dtype)
    if natural.size == 0 and isinstance(value, (list, tuple)):
        return np.asarray(value, dtype)
    return convert(natural, dtype)


def as_array(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """What may be written into ``dtype`` and is neither memory, a scalar nor a list.

    What only NumPy can read is an array: its dtype is compared and not converted. Dates
    and spans of Python it would keep as objects: they are values, as bytes are here.
    """
    is_time = dtype.kind in "Mm" and not (
        hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    )
    if is_time or value is None or isinstance(value, bytes):
        return as_value(value, dtype)
    return read_array(value)


def read_array(value: Any) -> np.ndarray[Any, Any]:
    """The array that NumPy makes of a value, in the dtype that NumPy gives it.

    TypeError: it holds Python objects, or some of its elements are masked.
    """
    array = np.asanyarray(value)
    if array.dtype.hasobject:
        raise refuse_objects(value)
    refuse_masked(array)  # netCDF4 gives masked arrays without being asked
    return np.asarray(array)


# -- kinds --------------------------------------------------------------------------


def echo(dtype: np.dtype[Any], number: complex) -> complex:
    """What number comes back from a dtype of another package; NaN where none does."""
    back = np.complex128 if isinstance(number, complex) else np.float64
    try:
        return complex(np.asarray(number).astype(dtype).astype(back))
    except Exception:
        return complex(math.nan)


def kind_of(dtype: np.dtype[Any]) -> Kind:
    if dtype.num >= USER_DTYPES:  # its `kind` is any letter, whatever it holds: ask it
        if echo(dtype, 1j) == 1j:
            return Kind.COMPLEX
        if echo(dtype, 0.5) == 0.5:
            return Kind.REAL
        return Kind.INTEGER if echo(dtype, 1.0) == 1.0 else Kind.OTHER
    return (
        Kind.RECORD
        if dtype.names is not None
        else KIND_OF_LETTER.get(dtype.kind, Kind.OTHER)
    )


def kind_of_item(item: object) -> Kind:
    if isinstance(item, (int, np.integer, np.bool_)):
        return Kind.INTEGER
    if isinstance(item, (float, np.floating)):
        return Kind.REAL
    if isinstance(item, (complex, np.complexfloating)):
        return Kind.COMPLEX
    return Kind.TEXT if isinstance(item, (str, bytes)) else Kind.OTHER


def kind_of_items(value: object) -> Kind:
    """One kind for all items: of numbers the widest; OTHER if they share none.

    They are looked at one by one: NumPy makes text of numbers beside text, and floats
    of integers that no 64 bits hold together.
    """
    items = np.asarray(value, object).reshape(-1)
    kinds = {kind_of_item(item) for item in items}
    if not kinds or max(kinds) <= Kind.COMPLEX:
        return max(kinds, default=Kind.INTEGER)
    return kinds.pop() if len(kinds) == 1 else Kind.OTHER


def keeps_kind(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    was, to = kind_of(source), kind_of(target)
    if to <= Kind.COMPLEX:
        return was <= to
    if to in (Kind.TIME, Kind.SPAN):
        return was in (to, Kind.INTEGER)  # so many of the dtype's units
    if to == Kind.RAW:
        return was == to or source.kind == "S"
    return was == to == Kind.TEXT


#: NumPy 1.26 turns -1 into the largest number without sign, and only warns of it.
_WRAPS = int(np.__version__.partition(".")[0]) < 2


# -- reading ------------------------------------------------------------------------


def refuse_objects(value: object) -> Exception:
    """What NumPy would make an array of Python objects of, with what to pass instead."""
    if isinstance(value, (int, list, tuple)):
        found = np.asarray(value, object).ravel()
        if found.size > 0 and all(isinstance(each, int) for each in found):
            return OverflowError(
                "an integer among the values has more than 64 bits, for which NumPy has no "
                'dtype; pass one of floats, such as dtype="f8", where it may be rounded'
            )
    return TypeError(
        f"an object of type {type(value)!r} holds no plain values: {_values_hint(value)}"
    )


def _values_hint(value: object) -> str:
    """What to pass instead of something that NumPy can read no values of."""
    if str(getattr(value, "dtype", "")) == "object":
        return (
            "its dtype is object, whose elements are addresses of Python objects; "
            "convert it first, as by array.astype('f8')"
        )
    if hasattr(type(value), "toarray"):  # SciPy's sparse ones
        return "it is no dense array, which its toarray() is"
    if all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__")):
        return "pass what it reads, such as obj[...]"
    if isinstance(value, Iterator):
        return "pass list(values), since an iterator is not read here"
    if isinstance(value, Mapping):
        return "cumem.to_device(tree) copies the arrays in it"
    return "pass numbers, text, or nested lists of them that are all of one kind"


def read_times(value: object, to: Kind) -> np.ndarray[Any, Any]:
    """Dates and spans of Python, or text, in a unit that NumPy chooses for them."""
    return np.asarray(value, "M8" if to == Kind.TIME else "m8")


def read_numbers(
    value: object, found: Kind, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Numbers that NumPy by itself would not read, in a dtype with room for them."""
    extended = dtype.char in "gG"
    wide: type[np.generic] = np.longdouble if extended else np.float64
    if found == Kind.COMPLEX:
        wide = np.clongdouble if extended else np.complex128
    try:
        if found > Kind.INTEGER or kind_of(dtype) in (Kind.REAL, Kind.COMPLEX):
            return np.asarray(value, wide)
        try:
            return np.asarray(value, np.int64)
        except OverflowError:
            if _WRAPS and min(np.asarray(value, object).flat) < 0:
                raise
            return np.asarray(value, np.uint64)
    except OverflowError:
        raise OverflowError(
            f"an integer among the values does not fit into dtype {dtype}; use a "
            "wider dtype"
        ) from None


def read_again(
    value: object, natural: np.ndarray[Any, Any], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """``natural``, unless NumPy's reading has changed what was meant."""
    to = kind_of(dtype)
    if natural.dtype.hasobject:
        if isinstance(value, np.ndarray):
            raise refuse_objects(value)
        if to in (Kind.TIME, Kind.SPAN):
            return read_times(value, to)
    else:
        read = kind_of(natural.dtype)
        changed = read == Kind.TEXT or (read == Kind.REAL and to == Kind.INTEGER)
        if not (changed and isinstance(value, (list, tuple))):
            return natural
    found = kind_of_items(value)
    if found <= Kind.COMPLEX:
        return read_numbers(value, found, dtype)
    if found == Kind.OTHER or natural.dtype.hasobject:
        raise refuse_objects(value)
    return natural


def read_naturally(value: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """As the dtype that the value has by itself, large enough to hold it exactly."""
    natural = read_again(value, np.asarray(value), dtype)
    if natural.dtype.hasobject:
        raise refuse_objects(value)
    to = kind_of(dtype)
    if to in (Kind.TIME, Kind.SPAN) and kind_of(natural.dtype) == Kind.TEXT:
        return read_times(natural, to)  # "2020-01-01"
    return natural


# -- comparing ----------------------------------------------------------------------


def changed_numbers(
    was: np.ndarray[Any, Any], now: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Which numbers are others now; rounding is not a change.

    A long double tells all 64-bit integers apart, and even a double would tell them
    from what they wrap round to.
    """
    kind, dtype = kind_of(now.dtype), now.dtype
    if dtype.kind in "Mm":
        now = now.astype(np.int64)
    if kind not in (Kind.REAL, Kind.COMPLEX):
        exact = was.astype(np.longdouble) != now.astype(np.longdouble)
        return np.asarray(exact)
    if dtype.num < USER_DTYPES and np.isfinite(now).all():
        return np.zeros(was.size, bool)  # NumPy's own dtypes have infinities
    # The largest of a dtype without infinities, which takes it for all beyond.
    most = complex(math.inf) if kind == Kind.COMPLEX else math.inf
    limit = abs(echo(dtype, most)) if dtype.num >= USER_DTYPES else math.inf
    limit = math.inf if math.isnan(limit) else limit
    wide = np.clongdouble if kind == Kind.COMPLEX else np.longdouble
    a = was.astype(wide).view(np.longdouble)  # real, imaginary, real, ...
    b = now.astype(wide).view(np.longdouble)
    rounded = np.isfinite(a) & np.isfinite(b) & (np.abs(a) <= limit)
    same = rounded | (np.isinf(a) & (a == b)) | (np.isnan(a) & np.isnan(b))
    parts = 2 if kind == Kind.COMPLEX else 1
    return np.asarray(~same.reshape(-1, parts).all(axis=1))


def changed_bytes(
    was: np.ndarray[Any, Any], now: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Which text, times and raw bytes are others when converted back.

    Raw bytes are never converted. Zeros at the end of an item count for nothing.
    """
    back = now if now.dtype.kind == "V" else now.astype(was.dtype)
    a = np.ndarray((was.size, was.itemsize), np.uint8, was.tobytes())
    b = np.ndarray((was.size, back.itemsize), np.uint8, back.tobytes())
    shared = min(was.itemsize, back.itemsize)
    differ = (a[:, :shared] != b[:, :shared]).any(axis=1)
    return np.asarray(differ | (a[:, shared:] != 0).any(axis=1))


def check_same(was: np.ndarray[Any, Any], now: np.ndarray[Any, Any]) -> None:
    is_number = kind_of(was.dtype) <= Kind.COMPLEX
    changed = changed_numbers(was, now) if is_number else changed_bytes(was, now)
    if changed.any():
        error = OverflowError if is_number else ValueError
        raise error(
            f"the value {was[np.argmax(changed)]!s} of dtype {was.dtype} does not fit "
            f"into dtype {now.dtype}; round, cut or convert it first"
        )


# -- converting ---------------------------------------------------------------------


def is_harmless(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Can a number neither wrap round nor become infinite on the way?"""
    if max(source.num, target.num) >= USER_DTYPES or source.kind not in "biufc":
        return False
    if source.kind in "biu" and target.kind in "fc":
        return target.itemsize >= 4  # float32 holds every 64-bit integer
    return np.can_cast(source, target, "safe")


def _or_cast(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """What else is to be done about numbers."""
    both = name_of(source) is not None and name_of(target) is not None
    taken = "copy(), fill(), array() and full() take it"
    return f', or pass casting="unsafe" ({taken})' if both else ""


def convert(
    natural: np.ndarray[Any, Any], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Plain values as ``dtype``, no record, laid out as they are."""
    if natural.dtype == dtype:
        return natural
    if not keeps_kind(natural.dtype, dtype):
        raise TypeError(
            f"a value of dtype {natural.dtype} would change in a target of dtype "
            f"{dtype}; convert it first{_or_cast(natural.dtype, dtype)}"
        )
    result: np.ndarray[Any, Any] = np.empty_like(natural, dtype=dtype, subok=False)
    if is_harmless(natural.dtype, dtype):
        np.copyto(result, natural, casting="unsafe")
        return result
    was = natural.reshape(-1)
    now = result.reshape(-1) if result.flags.c_contiguous else np.empty_like(was, dtype)
    with np.errstate(all="ignore"):  # NumPy warns of what the check refuses
        for first in range(0, was.size, BLOCK_COUNT):
            block = slice(first, first + BLOCK_COUNT)
            np.copyto(now[block], was[block], casting="unsafe")
            check_same(was[block], now[block])
    if not result.flags.c_contiguous:
        result[...] = now.reshape(result.shape)
    return result


# -- structured dtypes, field by field, each as a value of its own ------------------


def object_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same fields, for Python objects: NumPy puts tuples into it as they are."""
    if dtype.names is None:
        return np.dtype(object)
    fields = [(name, dtype[name]) for name in dtype.names]
    return np.dtype([(name, object_dtype(of.base), of.shape) for name, of in fields])


def as_record(value: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Records go into each other by position, as in NumPy; what has no fields goes
    into every one."""
    as_objects = isinstance(value, (list, tuple))
    natural = (
        np.asarray(value, object_dtype(dtype)) if as_objects else read_array(value)
    )
    if natural.dtype == dtype:
        return natural
    result: np.ndarray[Any, Any] = np.zeros(natural.shape, dtype)
    if natural.size == 0:
        return result
    names = dtype.names or ()
    sources = natural.dtype.names
    if sources is not None and len(sources) != len(names):
        raise TypeError(
            f"a value of dtype {natural.dtype} has not the fields of a target of dtype "
            f"{dtype}"
        )
    for index, name in enumerate(names):
        source = natural if sources is None else natural[sources[index]]
        # As a list, one level of which may be a sub-array's.
        given = source.tolist() if as_objects else source
        converted = as_value(given, dtype[name].base)
        field = result[name]
        if converted.shape != field.shape:
            raise ValueError(f"a value does not have the shape of field {name!r}")
        np.copyto(field, converted, casting="unsafe")
    return result
