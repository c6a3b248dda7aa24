# SPDX-License-Identifier: Apache-2.0
"""Arrays whose axes are in another order on the device: sent as they lie, in pieces that a
kernel there puts in their places while the next one is on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from support import session, values

import cumem

PIECE_NBYTES = 64 << 10


@pytest.fixture(autouse=True)
def small_pieces(runtime) -> Iterator[None]:
    with cumem.configure(chunk_nbytes=PIECE_NBYTES, ring_nbytes="1MiB", threads=2):
        yield


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype="i4").reshape(shape)


@pytest.mark.parametrize(
    "rows", [100, 128, 1000]
)  # one piece, two, and more than slots
@pytest.mark.parametrize("background", [False, True])
def test_each_element_finds_its_place(runtime, rows, background) -> None:
    array = numbers(rows, 160)
    buffer = cumem.full((160, rows), -1, "i4", "device")
    told = cumem.explain(buffer, array.T)
    assert told.route == "staged-kernel"
    assert told.pieces == -(-array.nbytes // PIECE_NBYTES)
    for turn in range(3):
        array += turn
        if background:
            cumem.copy_async(buffer, array.T).wait()
        else:
            cumem.copy(buffer, array.T)
        assert (values.get(buffer) == array.T).all()


def test_what_follows_on_the_stream_sees_all_of_it(runtime) -> None:
    array = numbers(1000, 160)
    stream = cumem.Stream()
    buffer = cumem.empty_device((160, 1000), "i4", stream=stream)
    back = cumem.empty_pinned((160, 1000), "i4")
    cumem.copy_async(buffer, array.T, stream=stream)
    cumem.copy_async(back, buffer, stream=stream)
    array[:] = -1  # it was read before the call returned
    stream.synchronize()
    assert (back.numpy() == numbers(1000, 160).T).all()


@pytest.mark.parametrize(
    ("free", "route"), [(0, "staged"), (1, "staged-kernel"), (2, "staged-kernel")]
)
def test_little_memory_there_makes_it_slower_only(emulated, free, route) -> None:
    array = numbers(1000, 160)
    stream = cumem.Stream()
    buffer = cumem.empty_device((160, 1000), "i4", stream=stream)
    cumem.set_limit("device", cumem.stats().kinds["device"].reserved_nbytes)
    fillers = []
    with contextlib.suppress(cumem.OutOfMemoryError):
        while True:
            fillers.append(cumem.empty_device(PIECE_NBYTES, "u1", stream=stream))
    del fillers[len(fillers) - free :]
    before = cumem.stats().kinds["device"].allocation_count
    transfer = cumem.copy_async(buffer, array.T, stream=stream)
    transfer.wait()
    assert transfer.route == route
    assert cumem.stats().kinds["device"].allocation_count - before == free
    assert (values.get(buffer) == array.T).all()


@pytest.fixture
def shut(emulated) -> Iterator[cumem.Stream]:
    """A stream that does nothing before the end of the test."""
    stream = cumem.Stream()
    session.testing.gate_close(stream)
    yield stream
    session.testing.gate_open(stream)
    stream.synchronize()


@pytest.mark.parametrize("other", ["background", "turned", "blocking"])
def test_others_do_not_wait_behind_the_callers_stream(shut, other) -> None:
    array = numbers(400, 160)
    turned = [cumem.empty_device((160, 400), "i4") for _ in range(2)]
    flat = cumem.empty_device((400, 160), "i4")
    transfer = cumem.copy_async(turned[0], array.T, stream=shut)
    stream = cumem.Stream()
    if other == "background":
        cumem.copy_async(flat, array).wait()
    elif other == "turned":
        cumem.copy_async(turned[1], array.T, stream=stream).wait()
    else:
        cumem.copy(turned[1], array.T, stream=stream)
    assert not transfer.done
    session.testing.gate_open(shut)
    transfer.wait()
    assert (values.get(turned[0]) == array.T).all()


def test_the_second_block_is_not_worth_a_wait(shut) -> None:
    array = numbers(1000, 160)
    stream = cumem.Stream()
    buffer = cumem.empty_device((160, 1000), "i4", stream=stream)
    late = cumem.empty_device(PIECE_NBYTES, "u1", stream=shut)
    cumem.set_limit("device", cumem.stats().kinds["device"].reserved_nbytes)
    fillers = []
    with contextlib.suppress(cumem.OutOfMemoryError):
        while True:
            fillers.append(cumem.empty_device(PIECE_NBYTES, "u1", stream=stream))
    fillers.pop()
    late.fill(1, stream=shut)
    del late
    before = cumem.stats().kinds["device"].allocation_count
    cumem.copy(buffer, array.T, stream=stream)
    assert cumem.stats().kinds["device"].allocation_count == before + 1
    assert (values.get(buffer) == array.T).all()
