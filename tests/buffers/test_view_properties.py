# SPDX-License-Identifier: Apache-2.0
"""Views of buffers have the shapes, strides and errors of views of NumPy's arrays.

Hypothesis draws arrays and indices, and both kinds of view must agree.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.strategies import (
    as_view,
    basic_indices,
    dtypes,
    kinds,
    random_array,
    shapes,
)

import cumem


def assert_same_view(view: cumem.Buffer, part: np.ndarray, origin: int) -> None:
    """Check that a view of a buffer describes the same elements as a view of an array.

    The buffer and the array are in different memory, so each view is compared by its offset
    from the address of the whole. `origin` is that address for the array.
    """
    assert view.shape == part.shape
    assert view.dtype == part.dtype
    assert view.ndim == part.ndim
    assert view.size == part.size
    assert view.nbytes == part.nbytes
    if part.size:
        offset = part.__array_interface__["data"][0] - origin
        assert view.ptr - view_origin(view) == offset
        for n, a, b in zip(part.shape, view.strides, part.strides, strict=True):
            assert a == b or n == 1


def view_origin(view: cumem.Buffer) -> int:
    """Return the address of the buffer from which the view was taken."""
    base = view
    while base.base is not None:
        base = base.base
    return base.ptr


def test_indexing_equals_numpys() -> None:
    with session.opened("emulated"):

        @given(st.data(), kinds, dtypes, shapes, st.sampled_from("CF"))
        def check(data, kind, dtype, shape, order) -> None:
            array = np.empty(shape, dtype, order)
            buffer = cumem.empty(shape, dtype, kind, order=order)
            origin = array.__array_interface__["data"][0]
            for _ in range(2):
                index = as_view(data.draw(basic_indices(array.shape)))
                array, buffer = array[index], buffer[index]
                assert_same_view(buffer, array, origin)

        check()


def test_reshape_equals_numpys_or_refuses_where_numpy_copies() -> None:
    with session.opened("emulated"):

        @given(st.data(), dtypes, shapes, st.sampled_from("CF"))
        def check(data, dtype, shape, order) -> None:
            array = np.empty(shape, dtype)
            buffer = cumem.empty(shape, dtype, "pinned")
            origin = array.__array_interface__["data"][0]
            index = as_view(data.draw(basic_indices(shape)))
            array, buffer = array[index], buffer[index]
            factors = data.draw(st.permutations(array.shape))
            new = tuple(factors)
            if new and data.draw(st.booleans()) and 0 not in new:
                new = (*new[:-1], -1)
            expected = array.reshape(new, order=order)
            if np.may_share_memory(expected, array) or array.size == 0:
                assert_same_view(buffer.reshape(new, order=order), expected, origin)
            else:
                with pytest.raises(ValueError, match="copy"):
                    buffer.reshape(new, order=order)

        check()


def test_view_as_other_dtype_equals_numpys() -> None:
    with session.opened("emulated"):

        @given(st.data(), dtypes, dtypes, shapes)
        def check(data, dtype, other, shape) -> None:
            array = random_array(shape, dtype, 1)
            buffer = values.put(array, "pinned")
            index = as_view(data.draw(basic_indices(shape)))
            part, view = array[index], buffer[index]
            try:
                expected = part.view(other)
            except (ValueError, TypeError):
                with pytest.raises((ValueError, TypeError)):
                    view.view(other)
                return
            got = view.view(other)
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            assert got.numpy().tobytes() == expected.tobytes()

        check()


@pytest.mark.parametrize(
    "index", [5, -6, (0, 0, 0), ([0, 1],), (np.array([True] * 5),), "a", 1.5]
)
def test_bad_index_is_an_index_error(emulated, index: object) -> None:
    buffer = cumem.empty_pinned((5, 2))
    with pytest.raises(IndexError):
        buffer[index]
