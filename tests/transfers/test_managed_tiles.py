# SPDX-License-Identifier: Apache-2.0
"""Tests of which tiles of managed memory come, when, and of what moves meanwhile.

tiles() sends a buffer to the device part by part, and sends used parts back. Its
streams are shut in some tests, so that each move can be looked at by itself.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import session
from support.managed import NBYTES, PAGE, Streams, managed, steers
from support.session import testing

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]


@pytest.fixture
def streams(emulated, monkeypatch) -> Iterator[Streams]:
    """Yield a stand-in for the extension, which shuts each stream that tiles() makes."""
    from cumem.transfers import managed as module

    made = Streams()
    monkeypatch.setattr(module, "_core", made)
    yield made
    made.made.clear()


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_tiles_are_the_buffer(runtime, ahead: int, evict: bool) -> None:
    steers(runtime)
    data = np.random.default_rng(2).integers(0, 9, (1000, 1024), "i4")
    buffer = cumem.array(data, kind="managed")
    seen = np.zeros(1000, int)
    for rows, tile in cumem.tiles(buffer, "256 KiB", 0, ahead, evict):
        assert isinstance(tile, cumem.ManagedBuffer)
        assert tile.shape == data[rows].shape
        tile.fill(rows.start + 1, stream=cumem.current_stream())
        seen[rows] += 1
        data[rows] = rows.start + 1
    cumem.current_stream().synchronize()
    assert (seen == 1).all()
    assert (buffer.numpy() == data).all()


def test_tiles_of_a_shape_cover_all_axes(runtime) -> None:
    steers(runtime)
    buffer = cumem.zeros((5, 6, 1024), "i4", "managed")
    places = []
    for place, tile in cumem.tiles(buffer, (2, 4)):
        assert tile.shape == buffer[place].shape
        tile.fill(len(places) + 1)
        places.append(place)
    assert len(places) == 6
    assert places[1] == (slice(0, 2), slice(4, 6))
    expected = np.zeros(buffer.shape, "i4")
    for number, place in enumerate(places, 1):
        expected[place] = number
    assert (buffer.numpy() == expected).all()
    assert [p for p, _ in cumem.tiles(buffer, [5])] == [(slice(0, 5),)]
    assert [p for p, _ in cumem.tiles(buffer, np.array([5]))] == [(slice(0, 5),)]
    for wrong in (np.array([2.5]), np.ones((2, 2))):
        with pytest.raises(TypeError, match="nbytes_or_shape must be"):
            cumem.tiles(buffer, wrong)


def test_tile_with_gaps_moves_row_by_row(emulated) -> None:
    buffer = cumem.zeros((4, 4 * PAGE), "u1", "managed")
    found = cumem.tiles(buffer, (4, PAGE), ahead=0)
    next(found)
    cumem.Device(0).synchronize()
    assert testing.host_pages(buffer) == 16 - 4
    found.close()
    cumem.Device(0).synchronize()
    assert testing.host_pages(buffer) == 16


def test_rows_of_a_tile_are_found_whatever_its_steps(emulated) -> None:
    buffer = cumem.zeros((4, 3, 4 * PAGE), "u1", "managed")
    for part, pages in (
        # The last two axes of this part have no gaps, so each row covers both.
        (buffer[:, 1:], 4 * 2 * 4),
        (buffer[::-1, ::2, :PAGE], 4 * 2),
        (buffer[1::2, :, PAGE : 2 * PAGE], 2 * 3),
    ):
        found = cumem.tiles(part, part.shape, ahead=0)
        next(found)
        cumem.Device(0).synchronize()
        assert testing.host_pages(buffer) == 48 - pages
        found.close()
        cumem.Device(0).synchronize()
        assert testing.host_pages(buffer) == 48


def test_next_tile_moves_in_while_this_one_is_used(emulated) -> None:
    buffer = managed(4 * NBYTES)
    stream = cumem.Stream()
    with stream:
        found = cumem.tiles(buffer, NBYTES)
        _, first = next(found)
        stream.synchronize()
        # The stream does not finish its work on the first tile.
        session.shut(stream)
        first.fill(2, stream=stream)
        session.wait_until(lambda: on_device(buffer) == 2, "the tile ahead")
        _, second = next(found)
        session.wait_until(lambda: on_device(buffer) == 3, "the next one")
        # The tile is not sent back before the work on it is done.
        assert testing.host_pages(first) == 0
        testing.gate_open(stream)
        session.wait_until(lambda: testing.host_pages(first) > 0, "the way back")
        assert second.prefetch_location == cumem.Device(0)
        found.close()
        stream.synchronize()
    assert on_device(buffer) == 0
    assert (first.numpy() == 2).all()


def on_device(buffer: cumem.ManagedBuffer) -> int:
    """Return how many MiB of the buffer are on the device."""
    return (buffer.nbytes // PAGE - testing.host_pages(buffer)) * PAGE // NBYTES


def test_work_on_a_tile_comes_after_its_move_and_its_way_back_after_that(
    streams,
) -> None:
    buffer = managed(2 * NBYTES)
    stream = cumem.Stream()
    with stream:
        found = cumem.tiles(buffer, NBYTES, ahead=0)
        _, tile = next(found)
        outward, other, inward = streams.made
        # Nothing uses this stream.
        testing.gate_open(other)
        # The stream has nothing to do but to wait.
        assert not stream.done
        testing.gate_open(inward)
        stream.synchronize()
        assert on_device(buffer) == 1
        session.shut(stream)
        tile.fill(8, stream=stream)
        testing.gate_open(outward)
        found.close()
        assert not outward.done
        testing.gate_open(stream)
        stream.synchronize()
    assert on_device(buffer) == 0
    assert (tile.numpy() == 8).all()


def test_fourth_tile_waits_until_the_first_is_back(emulated) -> None:
    buffer = managed(8 * NBYTES)
    stream = cumem.Stream()
    came: list[int] = []

    def read() -> None:
        with stream:
            for rows, _ in cumem.tiles(buffer, NBYTES):
                came.append(rows.start // NBYTES)

    session.shut(stream)
    thread = threading.Thread(target=read)
    thread.start()
    session.wait_until_waiting(thread)
    assert came == [0, 1, 2]
    assert on_device(buffer) <= 4
    testing.gate_open(stream)
    thread.join()
    assert came == list(range(8))
    stream.synchronize()
    assert on_device(buffer) == 0


def test_two_tiles_move_back_at_a_time(streams) -> None:
    buffer = managed(4 * NBYTES)
    found = cumem.tiles(buffer, NBYTES, ahead=0)
    _, first = next(found)
    outward, other, inward = streams.made
    testing.gate_open(inward)
    for _ in range(2):
        _, tile = next(found)
    # The second tile moves back on this stream. The first one's stream is still shut.
    testing.gate_open(other)
    session.wait_until(lambda: other.done, "the second tile's way back")
    assert not outward.done
    assert testing.host_pages(first) == 0
    testing.gate_open(outward)
    found.close()
    cumem.current_stream().synchronize()
    assert tile.nbytes == NBYTES
    assert on_device(buffer) == 0


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_tiles_take_three_more_than_are_ahead(emulated, ahead: int) -> None:
    buffer = managed(12 * NBYTES)
    most = 0
    for _, tile in cumem.tiles(buffer, NBYTES, ahead=ahead):
        tile.fill(1, stream=cumem.current_stream())
        most = max(most, on_device(buffer))
    assert most <= ahead + 3
    cumem.current_stream().synchronize()
    assert on_device(buffer) == 0


@pytest.mark.parametrize("last", [0, 1])
def test_stream_waits_for_the_last_ways_back(streams, last: int) -> None:
    buffer = managed(2 * NBYTES)
    stream = cumem.Stream()
    with stream:
        for _, tile in cumem.tiles(buffer, NBYTES, ahead=0):
            outward, inward = streams.made[:2], streams.made[2]
            testing.gate_open(inward)
            assert tile.nbytes == NBYTES
        testing.gate_open(outward[1 - last])
        outward[1 - last].synchronize()
        thread = threading.Thread(target=stream.synchronize)
        thread.start()
        session.wait_until_waiting(thread)
        testing.gate_open(outward[last])
        thread.join()
        assert on_device(buffer) == 0


@pytest.mark.parametrize("evict", [True, False])
def test_tiles_left_early_leave_nothing(emulated, evict: bool) -> None:
    buffer = managed(6 * NBYTES)
    found = cumem.tiles(buffer, NBYTES, ahead=2, evict=evict)
    next(found)
    next(found)
    found.close()
    cumem.current_stream().synchronize()
    assert on_device(buffer) == (0 if evict else 4)
    with pytest.raises(StopIteration):
        next(found)
    never = cumem.tiles(buffer, NBYTES)
    never.close()


@pytest.mark.parametrize("evict", [True, False])
def test_tiles_that_the_loop_closes_go_back_too(emulated, evict: bool) -> None:
    buffer = managed(6 * NBYTES)
    count = 0
    for _, tile in cumem.tiles(buffer, NBYTES, ahead=2, evict=evict):
        with tile:
            count += 1
    found = cumem.tiles(buffer, NBYTES, evict=evict)
    with next(found)[1]:
        pass
    found.close()
    cumem.current_stream().synchronize()
    assert count == 6
    assert on_device(buffer) == (0 if evict else 6)


def test_buffer_closed_under_its_tiles_is_reported_once(emulated, monkeypatch) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    buffer = managed(6 * NBYTES)
    found = cumem.tiles(buffer, NBYTES)
    next(found)
    buffer.__exit__(None, None, None)
    del found
    gc.collect()
    assert unraisable == []
    buffer = managed(6 * NBYTES)
    found = cumem.tiles(buffer, NBYTES)
    next(found)
    buffer.__exit__(None, None, None)
    with pytest.raises(ValueError, match="the buffer is closed"):
        next(found)


def test_ctrl_c_is_heard_and_everything_goes_back(emulated) -> None:
    buffer = managed(8 * NBYTES)
    stream = cumem.Stream()
    with stream, session.alarm(stream):
        for _ in cumem.tiles(buffer, NBYTES):
            pass
    stream.synchronize()
    assert on_device(buffer) == 0


def test_tiles_make_no_more_streams_than_tiles(emulated) -> None:
    cumem.current_stream().synchronize()
    before = testing.counts()["streams"]
    found = cumem.tiles(managed(2 * NBYTES), NBYTES, ahead=1000)
    next(found)
    assert testing.counts()["streams"] <= before + 4
    found.close()


def test_move_of_a_tile_that_fails_is_raised_and_the_others_go_back(emulated) -> None:
    buffer = managed(6 * NBYTES)
    testing.plan_fault("prefetch_async", 4, 999)
    with pytest.raises(cumem.CudaError, match="999"):
        for _ in cumem.tiles(buffer, NBYTES):
            pass
    testing.plan_fault(None, 0)
    cumem.Device(0).synchronize()
    assert on_device(buffer) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((np.ones(3), 8), TypeError, "buf must be a ManagedBuffer, not ndarray"),
        ((0,), ValueError, "nbytes_or_shape must be at least 1, not 0"),
        (("many",), ValueError, "nbytes_or_shape must be a number of bytes"),
        ((1.5,), TypeError, "nbytes_or_shape must be a number of bytes"),
        (((),), ValueError, "1 to 2 lengths of at least 1"),
        (((1, 2, 3),), ValueError, "1 to 2 lengths of at least 1"),
        (((0, 2),), ValueError, "1 to 2 lengths of at least 1"),
        (((2.5,),), TypeError, "nbytes_or_shape must be an int, not float"),
        ((8, "cpu"), ValueError, "device must be a device, not 'cpu'"),
        ((8, 7), ValueError, "device 7 does not exist"),
        ((8, 0, -1), ValueError, "ahead must not be negative, not -1"),
        ((8, 0, 1.5), TypeError, "ahead must be an int, not float"),
    ],
)
def test_what_cannot_be_tiled_is_refused(emulated, arguments, error, text) -> None:
    buffer = cumem.zeros((4, 4), "u1", "managed")
    if not isinstance(arguments[0], np.ndarray):
        arguments = (buffer, *arguments)
    with pytest.raises(error, match=text):
        cumem.tiles(*arguments)
    with pytest.raises(ValueError, match="no axis to cut"):
        cumem.tiles(cumem.zeros((), "u1", "managed"), 8)
