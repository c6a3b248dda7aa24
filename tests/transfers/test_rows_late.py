# SPDX-License-Identifier: Apache-2.0
"""Tests of what may be freed, dropped or changed while the streams of rows are late.

A gate holds the stream shut while the test frees, overwrites and allocates. Memory is read
at its address. A copy by cumem would first wait for pending work, and so hide that the call
under test had not waited for it.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from support import session
from support.pieces import numbers
from support.row_tables import ORDER
from torture.boxes import Box, Raw

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

SHAPE = (100, 40)
DATA = numbers(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
#: Where the numbers of rows may be. Numbers in device memory are read when the stream
#: reaches the copy.
PLACES = ["list", "numpy", "pinned", "managed", "device"]
OF_HOST = ["numpy", "pinned", "mapped", "managed"]


def put(rows: np.ndarray, place: str) -> Any:
    if place == "list":
        return rows.tolist()
    if place == "numpy":
        return rows.copy()
    return cumem.array(rows, kind=place)  # type: ignore[call-overload]


def bytes_at(buffer: cumem.Buffer) -> np.ndarray:
    """Read a buffer's bytes at their address."""
    kind = "device" if isinstance(buffer, cumem.DeviceBuffer) else "host memory"
    found = Raw(emulated=True).read(Box(buffer, kind, 0, np.empty(buffer.nbytes, "u1")))
    return found.reshape(buffer.shape)


@pytest.mark.parametrize("how", ["free", "drop"])
@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
@pytest.mark.parametrize("place", PLACES)
def test_source_that_is_freed_behind_the_call_stays_until_rows_are_there(
    emulated, place, kind, how
) -> None:
    """Memory of the same size is asked for at once, and nothing else uses the stream."""
    stream = cumem.Stream()
    source, target = cumem.array(DATA, kind=kind), cumem.zeros(SHAPE, "u1")
    rows = put(ORDER, place)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
        if how == "free":
            source.free()
        del source
        gc.collect()
        others = [cumem.full(SHAPE, 99, "u1", kind) for _ in range(4)]
        cumem.current_stream().synchronize()
        assert not stream.done
    stream.synchronize()
    assert others
    assert (bytes_at(target) == DATA[ORDER]).all()


@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
@pytest.mark.parametrize("place", PLACES)
def test_target_that_is_dropped_is_not_given_out_before_rows_are_there(
    emulated, place, kind
) -> None:
    stream = cumem.Stream()
    source, target = cumem.array(DATA, kind="pinned"), cumem.zeros(SHAPE, "u1", kind)
    rows = put(ORDER, place)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
        del target
        gc.collect()
        others = [cumem.full(SHAPE, 99, "u1", kind) for _ in range(4)]
        cumem.current_stream().synchronize()
        assert all((bytes_at(other) == 99).all() for other in others)
    stream.synchronize()
    assert all((bytes_at(other) == 99).all() for other in others)


@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overlaps", [False, True])
def test_stream_that_is_ordered_after_rows_is_done_when_they_are_there(
    emulated, place, kind, overlaps
) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    source = cumem.array(DATA, kind="device")
    target = source if overlaps else cumem.zeros(SHAPE, "u1", kind)
    cumem.Device(0).synchronize()
    with session.gate(first):
        handle = cumem.copy_rows_async(
            target, source, src_rows=put(ORDER, place), stream=first
        )
        handle.order(second)
        assert not second.done
        assert (bytes_at(target) == (DATA if overlaps else 0)).all()
    second.synchronize()
    assert (bytes_at(target) == DATA[ORDER]).all()


@pytest.mark.parametrize("way", ["stream", "background"])
@pytest.mark.parametrize("place", OF_HOST)
def test_numbers_of_the_host_may_change_once_the_call_has_returned(
    emulated, place, way
) -> None:
    late = cumem.Stream()
    source, target = cumem.array(DATA, kind="pinned"), cumem.zeros(SHAPE, "u1")
    rows = put(ORDER, place)
    with session.gate(late):
        target.fill(1, stream=late)
        stream = late if way == "stream" else None
        handle = cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
        array = rows if isinstance(rows, np.ndarray) else rows.numpy()
        array[...] = 10**6
        del array, rows
        gc.collect()
        others = [put(np.full(100, 10**6), place) for _ in range(4)]
        assert not late.done
    handle.wait()
    assert others
    assert (bytes_at(target) == DATA[ORDER]).all()


@pytest.mark.parametrize("way", ["stream", "background"])
def test_numbers_of_a_device_that_are_dropped_stay_until_they_are_read(
    emulated, way
) -> None:
    late = cumem.Stream()
    source, target = cumem.array(DATA, kind="pinned"), cumem.zeros(SHAPE, "u1")
    rows = put(ORDER, "device")
    with session.gate(late):
        target.fill(1, stream=late)
        stream = late if way == "stream" else None
        handle = cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
        rows.free()
        del rows
        gc.collect()
        others = [put(np.full(100, 99), "device") for _ in range(4)]
        assert not late.done
    handle.wait()
    assert others
    assert (bytes_at(target) == DATA[ORDER]).all()


@pytest.mark.parametrize("which", ["dst_rows", "src_rows"])
def test_numbers_of_a_device_change_in_the_order_of_the_stream(emulated, which) -> None:
    """The numbers arrive late, are read, and are overwritten, all on the same stream."""
    stream = cumem.Stream()
    source, target = cumem.array(DATA, kind="pinned"), cumem.zeros(SHAPE, "u1")
    rows = put(np.zeros(100, "i8"), "device")
    fresh, later = put(ORDER, "pinned"), put(ORDER[::-1], "pinned")
    with session.gate(stream):
        cumem.copy_async(rows, fresh, stream=stream)
        cumem.copy_rows_async(target, source, **{which: rows}, stream=stream)
        cumem.copy_async(rows, later, stream=stream)
        assert not stream.done
    stream.synchronize()
    expected = np.empty(SHAPE, "u1")
    if which == "dst_rows":
        expected[ORDER] = DATA
    else:
        expected[...] = DATA[ORDER]
    assert (bytes_at(target) == expected).all()


@pytest.mark.parametrize("place", PLACES)
def test_layers_that_are_freed_behind_the_call_stay_until_rows_are_there(
    emulated, place
) -> None:
    """The four sources are views of one buffer, and each target has a buffer of its own."""
    stream = cumem.Stream()
    whole = np.stack([DATA + layer for layer in range(4)], axis=1)
    cache = cumem.array(whole, kind="device")
    targets = [cumem.zeros(SHAPE, "u1", "pinned") for _ in range(4)]
    cumem.Device(0).synchronize()
    with session.gate(stream):
        sources = [cache[:, layer] for layer in range(4)]
        cumem.copy_rows_async(
            targets, sources, src_rows=put(ORDER, place), stream=stream
        )
        del cache, sources
        gc.collect()
        others = [cumem.full(whole.shape, 99, "u1", "device") for _ in range(2)]
        cumem.current_stream().synchronize()
        assert all((bytes_at(target) == 0).all() for target in targets)
    stream.synchronize()
    assert others
    for layer, target in enumerate(targets):
        assert (bytes_at(target) == whole[ORDER, layer]).all()


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_ordinary_memory_have_been_read_when_the_call_returns(
    emulated, place
) -> None:
    """The source may change after the call, though its bytes are still on their way.

    Numbers in device memory have to be fetched before the rows can be read.
    """
    stream = cumem.Stream()
    source, target = DATA.copy(), cumem.zeros(SHAPE, "u1")
    handle = cumem.copy_rows_async(
        target, source, src_rows=put(ORDER, place), stream=stream
    )
    source[...] = 99
    handle.wait()
    assert (bytes_at(target) == DATA[ORDER]).all()
