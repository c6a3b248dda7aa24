# SPDX-License-Identifier: Apache-2.0
"""Errors for values that cannot be written into a buffer; the extension raises them."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from cumem.buffers.casting import name_of


def refuse_masked(array: Any) -> None:
    """Raise a TypeError if any element of an array is masked."""
    # No array has a mask unless numpy.ma was imported. The module is looked up in
    # sys.modules, because the attribute np.ma would import it, and NumPy's lazy import
    # recurses without end if several threads do that at once.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if kind is not None and isinstance(array, kind) and np.ma.is_masked(array):
        raise TypeError(
            "an array with masked elements: the mask would get lost; pass "
            "array.filled(value) with a value in their place, or array.data to take them "
            "as they are in memory"
        )


def refuse_objects(value: object) -> NoReturn:
    """Raise an error for a value that NumPy turns into an array of Python objects.

    It is an OverflowError for integers that are too long, and a TypeError for anything
    else. The text says what the caller can pass instead.
    """
    if isinstance(value, (int, list, tuple)):
        found = np.asarray(value, object).ravel()
        if found.size > 0 and all(isinstance(each, int) for each in found):
            raise OverflowError(
                "an integer among the values has more than 64 bits, for which NumPy has no "
                'dtype; pass one of floats, such as dtype="f8", where it may be rounded'
            )
    raise TypeError(
        f"an object of type {type(value)!r} holds no plain values: {_values_hint(value)}"
    )


def _values_hint(value: object) -> str:
    """Say what to pass instead of an object whose values NumPy cannot read."""
    if str(getattr(value, "dtype", "")) == "object":
        return (
            "its dtype is object, whose elements are addresses of Python objects; "
            "convert it first, as by array.astype('f8')"
        )
    if isinstance(value, np.ndarray) and value.dtype.kind == "T":
        return (
            "the text of a StringDType lies outside of the array; convert it first to "
            "one of a fixed length, as by array.astype('U20')"
        )
    if hasattr(type(value), "toarray"):  # sparse arrays of SciPy have it
        return "it is not a dense array; pass its toarray()"
    # An object with these attributes looks like an array that reads its values, for example
    # from a file, only when it is indexed. NumPy cannot convert it if it has no __array__.
    if all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__")):
        return "pass the values that it reads, such as obj[...]"
    if isinstance(value, Iterator):
        return "pass list(values), since an iterator is not read here"
    if isinstance(value, numbers.Number):
        return "pass float(value), or int(value)"
    if isinstance(value, Mapping):
        return "cumem.to_device(tree) copies the arrays in it"
    return "pass numbers, text, or nested lists of them that are all of one kind"


def refuse_kind(source: np.dtype[Any], target: np.dtype[Any]) -> NoReturn:
    """Raise a TypeError, because conversion to the target's dtype would change a value."""
    both = name_of(source) is not None and name_of(target) is not None
    taken = "copy(), fill(), array() and full() take it"
    unsafe = f', or pass casting="unsafe" ({taken})' if both else ""
    raise TypeError(
        f"a value of dtype {source} would change in a target of dtype {target}; convert "
        f"it first{unsafe}"
    )


def refuse_change(
    value: object, is_number: bool, source: np.dtype[Any], target: np.dtype[Any]
) -> NoReturn:
    """Raise an OverflowError for a number that does not fit, or a ValueError for others."""
    error = OverflowError if is_number else ValueError
    raise error(
        f"the value {value!s} of dtype {source} does not fit into dtype {target}; round, "
        "cut or convert it first"
    )
