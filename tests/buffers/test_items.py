# SPDX-License-Identifier: Apache-2.0
"""One element becomes a number by item(), float(), int(), complex() and bool()."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumem

INTEGERS = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
NUMBERS = [*INTEGERS, "f2", "f4", "f8", "c8", "c16"]
#: Elements of these dtypes are read through a NumPy array.
OTHERS = ["g", ">i4", ">f8", "M8[s]", "m8[s]", "S3", "U2"]
CALLS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.item(),
    "item with an index": lambda x: x.item(*(0,) * x.ndim),
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
}


def answer(call: Callable[[Any], Any], operand: Any) -> tuple[Any, ...]:
    """Return the type and the text of a call's answer, or the type of its exception."""
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        try:
            found = call(operand)
        except (TypeError, ValueError, OverflowError) as error:
            return (type(error),)
    return type(found), repr(found), {each.category for each in reported}


@pytest.mark.parametrize("kind", ["pinned", "managed", "device"])
@pytest.mark.parametrize("dtype", NUMBERS + OTHERS)
def test_element_is_the_number_that_numpy_makes_of_it(runtime, dtype, kind) -> None:
    extremes = bytes(range(1, 17)), b"\xff" * 16, b"\0" * 16
    values = [np.frombuffer(raw, "u1", np.dtype(dtype).itemsize) for raw in extremes]
    # Random bytes may be no valid elements of these dtypes.
    if dtype in ("?", "U2"):
        values = [np.array([text], dtype).view("u1") for text in ("", "1")]
    for raw in values:
        for array in (raw.view(dtype), raw.view(dtype).reshape(())):
            buffer = cumem.array(array, kind=kind)
            for name, call in CALLS.items():
                assert answer(call, buffer) == answer(call, array), (name, array)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_element_that_is_no_finite_number_is_what_numpy_makes_of_it(
    emulated, dtype, special
) -> None:
    array = np.array(special, dtype)
    buffer = cumem.array(array, kind="pinned")
    for name, call in CALLS.items():
        assert answer(call, buffer) == answer(call, array), name


def test_item_of_a_strided_view_is_the_element_of_that_place(emulated) -> None:
    array = np.arange(24).reshape(4, 6)
    view = cumem.array(array, kind="pinned")[::-2, 1::3]
    wanted = array[::-2, 1::3]
    assert [view.item(n) for n in range(-4, 4)] == [
        wanted.item(n) for n in range(-4, 4)
    ]
    assert view.item(1, -1) == wanted.item(1, -1)


def test_item_of_a_closed_buffer_is_refused(emulated) -> None:
    buffer = cumem.zeros((), "f8", "pinned")
    buffer.free()
    for call in CALLS.values():
        with pytest.raises(ValueError, match="closed"):
            call(buffer)
