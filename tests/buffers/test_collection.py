# SPDX-License-Identifier: Apache-2.0
"""Tests of buffers as collections, by iteration, length, `in`, truth and equality.

Where NumPy's answer would read device memory or be ambiguous, the error must say what
to type.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest
from support import values
from support.strategies import KINDS

import cumem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4,), (3, 2), (2, 0), (0,), (0, 3), (2, 3, 2)])
def test_iterating_gives_the_views_that_indexing_gives(runtime, kind, shape) -> None:
    expected = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    buffer = cumem.array(expected, kind=kind)
    rows = list(buffer)
    assert len(rows) == len(buffer) == len(expected)
    for index, row in enumerate(rows):
        assert type(row) is type(buffer)
        assert row.base is buffer
        assert (row.shape, row.ptr) == (buffer[index].shape, buffer[index].ptr)
        assert (values.get(row) == expected[index]).all()
    backwards = [values.get(row).tolist() for row in reversed(buffer)]
    assert backwards == expected[::-1].tolist()


def test_elements_of_one_dimension_are_views_without_dimensions(runtime) -> None:
    buffer = cumem.array(np.arange(3), kind="pinned")
    assert [row.shape for row in buffer] == [()] * 3
    assert [int(row) for row in buffer] == [0, 1, 2]
    for row in buffer:
        row.fill(9)
    assert buffer.numpy().tolist() == [9, 9, 9]
    first, *rest = buffer
    assert first.ptr == buffer.ptr
    assert len(rest) == 2


def test_iterating_works_over_what_is_no_row(runtime) -> None:
    buffer = cumem.array(np.arange(12).reshape(3, 4), kind="pinned")
    rows = [row.numpy().tolist() for row in buffer.T[::2]]
    assert rows == [[0, 4, 8], [2, 6, 10]]


def test_iterator_keeps_the_memory_alive(runtime) -> None:
    rows = iter(cumem.array(np.arange(3), kind="pinned"))
    gc.collect()
    assert [int(row) for row in rows] == [0, 1, 2]
    assert list(rows) == []


@pytest.mark.parametrize("ends", [iter, reversed, len, list])
def test_buffer_without_dimensions_is_not_iterated(runtime, ends) -> None:
    for kind in KINDS:
        with pytest.raises(TypeError, match="buffer without dimensions"):
            ends(cumem.zeros((), kind=kind))


def test_closed_buffer_is_not_iterated(runtime) -> None:
    buffer = cumem.empty_pinned(3)
    rows = iter(buffer)
    buffer.free()
    for use in (iter, reversed):
        with pytest.raises(ValueError, match="closed"):
            use(buffer)
    with pytest.raises(ValueError, match="closed"):
        next(rows)


def test_buffer_is_no_sequence_for_others_to_read_element_by_element(runtime) -> None:
    buffer = cumem.array(np.arange(3), kind="pinned")
    assert not isinstance(buffer, Sequence)
    assert np.asarray(buffer).dtype == np.int64
    with pytest.raises(TypeError):
        np.asarray(cumem.empty(3))


@pytest.mark.parametrize("kind", KINDS)
def test_in_is_refused_with_what_to_do(runtime, kind) -> None:
    buffer = cumem.array(np.arange(3), kind=kind)
    with pytest.raises(TypeError, match=r"value in buf\.numpy\(\)") as caught:
        2 in buffer  # noqa: B015
    assert ('cumem.array(buf, kind="pinned")' in str(caught.value)) == (
        kind == "device"
    )
    host = buffer if kind != "device" else cumem.array(buffer, kind="pinned")
    assert 2 in host.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0, 3])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_truth_of_one_element_is_its_own(runtime, kind, value, shape) -> None:
    assert bool(cumem.full(shape, value, "i4", kind)) is bool(value)


@pytest.mark.parametrize("read", [np.asarray, np.array, np.sum])
def test_reading_device_memory_names_a_remedy_that_works(runtime, read) -> None:
    buffer = cumem.array(np.array(3.0))
    remedy = "buf.to_numpy() or cumem.asnumpy(buf)"
    with pytest.raises(TypeError, match="host cannot read device memory") as caught:
        read(buffer)
    assert remedy in str(caught.value)
    assert read(buffer.to_numpy()) == read(cumem.asnumpy(buffer)) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [0, 2, (2, 2)])
def test_truth_of_many_elements_or_none_is_ambiguous(runtime, kind, shape) -> None:
    buffer = cumem.zeros(shape, "f8", kind)
    message = f"truth of a buffer of {buffer.size} elements is ambiguous.*is not None"
    with pytest.raises(ValueError, match=message):
        bool(buffer)


def test_truth_of_a_closed_buffer_is_an_error(runtime) -> None:
    buffer = cumem.empty_pinned(1)
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        bool(buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_equality_is_identity_so_that_buffers_can_be_keys(runtime, kind) -> None:
    buffer = cumem.zeros(1, kind=kind)
    same = cumem.zeros(1, kind=kind)
    assert buffer == buffer
    assert buffer != same
    assert buffer != buffer[:]
    assert buffer != "0"
    assert {buffer: 1, same: 2}[buffer] == 1
    with pytest.raises(TypeError):
        buffer < same  # type: ignore[operator]  # noqa: B015
