# SPDX-License-Identifier: Apache-2.0
"""Arrays whose axes are in another order on the device.

cumem sends the bytes in the order of the source, in pieces. A kernel on the device puts
the elements of each piece in their places while the next piece arrives in the other
half of a block, if there is memory for two halves. The tests compare the elements, and
let memory run short or streams be late.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import session, values
from support.session import testing
from support.tuning import tuned

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

BLOCK_NBYTES = 1 << 20  # This is the size of one piece.
ROW_NBYTES = 6400


@pytest.fixture(autouse=True)
def small_blocks(runtime) -> Iterator[None]:
    with tuned(chunk_nbytes=BLOCK_NBYTES, ring_nbytes="2MiB", threads=2):
        yield


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype="i4").reshape(shape)


# These make one piece, two pieces, and more pieces than the ring holds.
@pytest.mark.parametrize("rows", [80, 160, 1600])
@pytest.mark.parametrize("background", [False, True])
def test_each_element_finds_its_place(runtime, rows, background) -> None:
    array = numbers(rows, ROW_NBYTES // 4)
    buffer = cumem.full(array.T.shape, -1, "i4", "device")
    reported = cumem.explain(buffer, array.T)
    assert reported.route == "staged-kernel"
    assert (reported.pieces == 1) == (rows == 80)
    for turn in range(3):
        array += turn
        if background:
            cumem.copy_async(buffer, array.T).wait()
        else:
            cumem.copy(buffer, array.T)
        assert (values.get(buffer) == array.T).all()


def test_what_follows_on_the_stream_sees_all_of_it(runtime) -> None:
    array = numbers(1600, 1500)
    stream = cumem.Stream()
    buffer = cumem.empty_device((1500, 1600), "i4", stream=stream)
    back = cumem.empty_pinned((1500, 1600), "i4")
    cumem.copy_async(buffer, array.T, stream=stream)
    cumem.copy_async(back, buffer, stream=stream)
    array[:] = -1  # The array was read before the call returned.
    stream.synchronize()
    assert (back.numpy() == numbers(1600, 1500).T).all()


def fill_up(stream: cumem.Stream, but: int, limited: bool = True) -> list[cumem.Buffer]:
    """Take all memory of the device except that of `but` blocks in a row.

    With `limited`, take all that a limit allows except that of `but` separate blocks.
    """
    fillers: list[cumem.Buffer] = []
    if limited:
        reserved = cumem.stats().kinds["device"].reserved_nbytes
        cumem.set_limit("device", reserved + 8 * BLOCK_NBYTES)
    for nbytes in (BLOCK_NBYTES, 1 << 16):
        with contextlib.suppress(cumem.OutOfMemoryError):
            while True:
                fillers.append(cumem.empty_device(nbytes, "u1", stream=stream))
    assert all(filler.nbytes == BLOCK_NBYTES for filler in fillers[:8])
    if limited:
        return [f for i, f in enumerate(fillers) if i >= 2 * but or i % 2 == 1]
    return fillers[but:]


@pytest.mark.parametrize(("free", "route"), [(0, "staged"), (1, "staged-kernel")])
def test_little_memory_there_makes_it_slower_only(emulated, free, route) -> None:
    array = numbers(1600, 1500)
    stream = cumem.Stream()
    buffer = cumem.empty_device((1500, 1600), "i4", stream=stream)
    fillers = fill_up(stream, but=free)
    before = cumem.stats().kinds["device"].allocation_count
    transfer = cumem.copy_async(buffer, array.T, stream=stream)
    transfer.wait()
    assert transfer.route == route
    assert cumem.stats().kinds["device"].allocation_count - before == free
    assert (values.get(buffer) == array.T).all()
    del fillers


@pytest.fixture
def shut(emulated) -> Iterator[cumem.Stream]:
    """Hold a stream shut until the test ends. The ring has room for all pieces."""
    stream = cumem.Stream()
    session.shut(stream)
    with tuned(ring_nbytes="256MiB", depth=32):
        yield stream
    session.testing.gate_open(stream)
    stream.synchronize()


@pytest.mark.parametrize("other", ["background", "turned", "blocking"])
def test_others_do_not_wait_behind_the_callers_stream(shut, other) -> None:
    array = numbers(1600, 1500)
    turned = [cumem.empty_device((1500, 1600), "i4") for _ in range(2)]
    flat = cumem.empty_device((1600, 1500), "i4")
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


def test_those_on_one_stream_use_one_block_and_one_more_stream(shut) -> None:
    """Such copies can be queued on a stream that is shut, and their calls do not wait."""
    arrays = [numbers(1600, 1500) + i for i in range(5)]
    buffers = [cumem.empty_device((1500, 1600), "i4", stream=shut) for _ in arrays]
    fillers = fill_up(shut, but=2, limited=False)
    session.testing.plan_fault(None, 0)
    transfers = [
        cumem.copy_async(buffer, array.T, stream=shut)
        for buffer, array in zip(buffers, arrays, strict=True)
    ]
    assert session.testing.fault_count("stream_create") <= 1
    assert cumem.stats().kinds["device"].in_flight_nbytes == 0
    session.testing.gate_open(shut)
    for transfer, buffer, array in zip(transfers, buffers, arrays, strict=True):
        transfer.wait()
        assert transfer.route == "staged-kernel"
        assert (values.get(buffer) == array.T).all()
    del fillers


def test_none_needs_the_memory_of_two_blocks(shut) -> None:
    """The targets have gaps, so the host cannot transpose for them, and a kernel has to."""
    array = numbers(1600, 1500)
    stream = cumem.Stream()
    targets = [
        cumem.empty_device((1600, 3000), "i4", stream=s)[:, ::2] for s in (shut, stream)
    ]
    fillers = fill_up(stream, but=2)
    transfer = cumem.copy_async(targets[0], array, stream=shut)
    cumem.copy(targets[1], array, stream=stream)
    assert (values.get(targets[1]) == array).all()
    session.testing.gate_open(shut)
    transfer.wait()
    assert (values.get(targets[0]) == array).all()
    del fillers


def test_short_memory_fails_nobody_where_others_have_two_blocks(emulated) -> None:
    """Two threads make copies for which they need blocks. Each has memory for one block."""
    array = numbers(1600, 1500)
    streams = [cumem.Stream() for _ in range(2)]
    targets = [
        cumem.empty_device((1600, 3000), "i4", stream=s)[:, ::2] for s in streams
    ]
    for stream in streams:
        stream.synchronize()
    fillers = fill_up(streams[0], but=2, limited=False)
    streams[0].synchronize()
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(30):
                cumem.copy(targets[i], array, stream=streams[i])
        except cumem.OutOfMemoryError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all((values.get(target) == array).all() for target in targets)
    del fillers


@pytest.mark.parametrize("code", [2, 999])
def test_copy_that_cannot_order_its_second_stream_fails(emulated, code: int) -> None:
    """The second copy must fail whenever its second stream cannot be ordered, even if the
    driver's error is that memory is short.

    It gets the blocks that the first copy still uses. Without the order it would write to
    them too early.
    """
    first, second = (sign * np.arange(2_400_000, dtype="i4") for sign in (1, -1))
    first, second = (a.reshape(1600, 1500).T for a in (first, second))
    stream = cumem.Stream()
    there = cumem.empty_device(first.shape, "i4", stream=stream)
    other = cumem.empty_device(first.shape, "i4", stream=stream)
    stream.synchronize()
    failed: list[BaseException] = []

    def copy_second() -> None:
        try:
            cumem.copy_async(other, second, stream=stream).wait()
        except cumem.CudaError as error:
            failed.append(error)

    with tuned(chunk_nbytes="1 MiB", ring_nbytes="64 MiB", depth=32):
        session.shut(stream)
        done = cumem.copy_async(there, first, stream=stream)
        testing.plan_fault("stream_wait_event", 1, code)
        thread = threading.Thread(target=copy_second)
        thread.start()
        session.wait_until_waiting(thread)
        testing.gate_open(stream)
        thread.join()
        done.wait()
    assert len(failed) == 1
    assert (values.get(there) == first).all()
