# SPDX-License-Identifier: Apache-2.0
"""copy() against NumPy's assignment, for random shapes, strides, dtypes and kinds.

Hypothesis draws a target and a source, which may lie in one buffer. After the copy the
bytes must be those that NumPy's assignment leaves.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.strategies import (
    KINDS,
    as_view,
    basic_indices,
    dtypes,
    kinds,
    places,
    random_array,
    same_bytes,
    shapes,
)

import cumem

BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_copy_of_any_views_equals_numpy_assignment(backend: str) -> None:
    with session.opened(backend):

        @given(st.data(), places, places, dtypes, shapes, st.sampled_from("CF"))
        def check(data, to, source, dtype, shape, order) -> None:
            expected = random_array(shape, dtype, 1)
            index = data.draw(basic_indices(shape))
            target = values.put(expected, to, order)
            index = as_view(index)
            part = expected[index]
            # The source is a strided view of a larger array, or a broadcast of a
            # smaller one.
            lead = data.draw(st.integers(0, part.ndim))
            source_shape = tuple(
                1 if n and data.draw(st.booleans()) and data.draw(st.booleans()) else n
                for n in part.shape[lead:]
            )
            steps = [data.draw(st.sampled_from([1, 2, -1, -2])) for _ in source_shape]
            large = tuple(n * abs(s) for n, s in zip(source_shape, steps, strict=True))
            whole = random_array(large, dtype, 2)
            cut = tuple(slice(None, None, s) for s in steps)
            expected[index] = whole[(*cut, ...)]
            cumem.copy(target[index], values.put(whole, source)[(*cut, ...)])
            assert same_bytes(values.get(target), expected)

        check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_copy_within_one_buffer_equals_numpy_assignment(backend: str) -> None:
    with session.opened(backend):

        @given(st.data(), kinds, st.integers(2, 40), st.integers(1, 4))
        def check(data, kind, length, width) -> None:
            expected = random_array((length, width), np.dtype("u1"), 3)
            buffer = values.put(expected, kind)
            count = data.draw(st.integers(1, length))
            step = data.draw(st.sampled_from([1, -1]))
            first = data.draw(st.integers(0, length - count))
            second = data.draw(st.integers(0, length - count))
            a = (slice(first, first + count),)
            b = (slice(second, second + count),)
            flip = (slice(None, None, step),)
            expected[a] = expected[b][flip].copy()
            cumem.copy(buffer[a], buffer[b][flip])
            assert same_bytes(values.get(buffer), expected)

        check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_setitem_and_fill_equal_numpy(backend: str) -> None:
    with session.opened(backend):

        @given(st.data(), kinds, dtypes, shapes)
        def check(data, kind, dtype, shape) -> None:
            expected = random_array(shape, dtype, 4)
            buffer = values.put(expected, kind)
            index = data.draw(basic_indices(shape))
            value = random_array((), dtype, data.draw(st.integers(0, 99)))
            if data.draw(st.booleans()):
                expected[index] = value[()]
                buffer[index] = value[()]
            else:
                expected[as_view(index)].fill(value[()])
                buffer[as_view(index)].fill(value[()])
            assert same_bytes(values.get(buffer), expected)

        check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_copy_async_chain_keeps_stream_order(backend: str) -> None:
    with session.opened(backend):

        @given(st.lists(kinds, min_size=2, max_size=6), st.integers(0, 300))
        def check(chain, count) -> None:
            expected = random_array((count,), np.dtype("i4"), 5)
            stream = cumem.Stream()
            at = values.put(expected, "pinned")
            transfers = []
            for kind in chain:
                to = cumem.empty(count, "i4", kind)
                transfers.append(cumem.copy_async(to, at, stream=stream))
                at = to
            out = np.zeros(count, "i4")
            last = cumem.copy_async(out, at, stream=stream)
            last.wait()
            assert same_bytes(out, expected)
            assert all(t.done for t in transfers)

        check()


@pytest.mark.parametrize("kind", KINDS)
def test_copy_of_large_strided_array_round_trips(runtime, kind: str) -> None:
    array = np.arange(3_000_001, dtype="i4")
    buffer = cumem.empty(1_500_001, "i4", kind)
    cumem.copy(buffer, array[::2])
    back = np.zeros_like(array)
    cumem.copy(back[::-2], buffer)
    assert (back[::-2] == array[::2]).all()
    assert (back[1::2] == 0).all()


def test_numpy_to_numpy_copy_is_numpys(runtime) -> None:
    a = np.zeros((4, 5))
    cumem.copy(a[:, ::-1], np.arange(5.0))
    assert (a == np.arange(5.0)[::-1]).all()
