# SPDX-License-Identifier: Apache-2.0
"""Regions are device memory that sleeps and wakes at the same addresses.

tests/c/test_pool_sleep.c tests the pool below, with every call of the driver failing.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import forks, session, testing, values

import cumem
from cumem.recording.events import KINDS, OPS

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20
CHUNK = 64 * MIB


def free_nbytes(device: int = 0) -> int:
    return cumem.memory_info(device).free


def fill_region(region: cumem.Region) -> list[tuple[cumem.Buffer, np.ndarray]]:
    """Make buffers of several sizes, and return them with their contents."""
    made = []
    for number, size in enumerate((3, 1000, 70_000, 3 * MIB, 40 * MIB, 1)):
        content = np.full(size, number + 1, "u1")
        buffer = cumem.empty_device(size, "u1", pool=region.pool, device=region.device)
        cumem.copy(buffer, content)
        made.append((buffer, content))
    return made


def check_contents(made: list[tuple[cumem.Buffer, np.ndarray]]) -> None:
    for buffer, content in made:
        assert (values.get(buffer) == content).all()


# -- sleep and wake --------------------------------------------------------------------


def test_region_wakes_with_the_same_bytes_at_the_same_addresses(runtime) -> None:
    region = cumem.Region("weights")
    with region:
        first = cumem.array(np.arange(1000, dtype="f4"))
    made = fill_region(region)
    view = first[10:20]
    addresses = [buffer.ptr for buffer, _ in made]
    for _ in range(3):
        region.sleep()
        assert region.is_asleep
        region.wake()
        assert not region.is_asleep
        assert [buffer.ptr for buffer, _ in made] == addresses
        check_contents(made)
        assert (values.get(view) == np.arange(10, 20)).all()


def test_region_wakes_equal_buffers_that_lie_around_a_hole(runtime) -> None:
    region = cumem.Region("weights")
    first, hole, second = (
        cumem.full(size, value, "u1", "device", pool=region.pool)
        for value, size in ((1, 4 * MIB), (2, 2 * CHUNK), (3, 4 * MIB))
    )
    del hole  # its chunks get no memory when the region wakes
    for _ in range(3):
        region.sleep()
        region.wake()
        assert (values.get(first) == 1).all()
        assert (values.get(second) == 3).all()


def test_region_asleep_has_no_memory_on_the_device(emulated) -> None:
    cumem.empty_device(1)  # makes everything else that is needed
    cumem.trim()
    before = free_nbytes()
    region = cumem.Region("weights")
    made = fill_region(region)
    assert free_nbytes() < before
    region.sleep()
    assert free_nbytes() == before
    stats = region.pool.stats()
    assert stats.reserved_nbytes == 0
    assert stats.live_nbytes + stats.cached_nbytes == stats.asleep_nbytes > 40 * MIB
    region.wake()
    assert region.pool.stats().asleep_nbytes == 0
    assert region.pool.stats().reserved_nbytes % CHUNK == 0
    check_contents(made)


def test_region_that_gives_contents_up_takes_no_pinned_memory(runtime) -> None:
    region = cumem.Region("cache")
    buffer = region.pool.allocate(10 * MIB)
    address = buffer.ptr
    before = cumem.stats()["pinned"].reserved_nbytes
    region.sleep(keep=False)
    assert cumem.stats()["pinned"].reserved_nbytes == before
    region.wake()
    assert buffer.ptr == address
    buffer.fill(5)
    assert (values.get(buffer) == 5).all()


@pytest.mark.parametrize("host", ["keep", "release"])
def test_region_keeps_or_releases_pinned_memory_after_waking(runtime, host) -> None:
    region = cumem.Region("weights", host=host)
    made = fill_region(region)
    pinned = cumem.stats()["pinned"].reserved_nbytes
    for _ in range(2):
        region.sleep()
        during = cumem.stats()["pinned"].reserved_nbytes
        assert during >= pinned + 43 * MIB
        region.wake()
        after = cumem.stats()["pinned"].reserved_nbytes
        assert after == (during if host == "keep" else pinned)
        check_contents(made)
    del made
    region.close()
    del region
    assert cumem.stats()["pinned"].reserved_nbytes == pinned


def test_region_that_releases_leaves_nothing_page_locked(emulated) -> None:
    region = cumem.Region("weights", host="release")
    made = fill_region(region)
    cumem.trim()
    names = ("host_allocs", "registrations")
    before = [testing.counts()[name] for name in names]
    region.sleep()
    assert [testing.counts()[name] for name in names] != before
    region.wake()
    assert [testing.counts()[name] for name in names] == before
    check_contents(made)


def test_region_counts_pinned_memory_under_its_limit(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    with cumem.limit("pinned", 20 * MIB), pytest.raises(cumem.OutOfMemoryError):
        region.sleep()
    assert not region.is_asleep
    check_contents(made)
    region.sleep()
    region.wake()
    check_contents(made)


def test_region_in_which_nothing_lives_sleeps_and_wakes(runtime) -> None:
    region = cumem.Region("empty")
    region.sleep()
    assert region.is_asleep
    region.wake()
    region.pool.allocate(100)  # this buffer ends at once
    region.sleep()
    region.wake()
    assert region.pool.stats().reserved_nbytes == 0  # the free chunk got no memory


def test_region_asleep_or_awake_already_stays_as_it_is(runtime) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    region.wake()
    region.sleep()
    region.sleep(keep=False)
    region.wake()
    region.wake()
    check_contents(made)


# -- one part after the other ------------------------------------------------------------


def region_of_parts(*sizes: int) -> tuple[cumem.Region, list[Any]]:
    """Make a region whose contents are saved in parts of these sizes.

    The region keeps the pinned memory of each sleep. In the next sleep this memory holds
    one part of the contents.
    """
    region = cumem.Region("weights")
    made: list[Any] = []
    for number, size in enumerate(sizes):
        if number:
            region.sleep()
            region.wake()
        content = np.full(size, number + 1, "u1")
        buffer = region.pool.allocate(size)
        cumem.copy(buffer, content)
        made.append((buffer, content))
    return region, made


def test_region_copies_while_it_takes_pinned_memory(emulated) -> None:
    """A part is on its way to the host before the next one has memory there."""
    region, made = region_of_parts(40 * MIB, 40 * MIB)
    testing.plan_fault("host_register", 1, 999)
    with pytest.raises(cumem.CudaError):
        region.sleep()
    copied = testing.fault_count("copy_async")
    unmapped = testing.fault_count("address_unmap")
    testing.plan_fault(None, 0)
    assert copied == 1
    assert unmapped == 0
    assert not region.is_asleep
    check_contents(made)
    region.sleep()
    region.wake()
    check_contents(made)


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_region_of_several_parts_prepares_each_ahead(emulated, nth) -> None:
    """Whichever part cannot be page-locked, nothing is lost and the next sleep works."""
    region = cumem.Region("weights", host="release")
    size = 300 * MIB
    content = np.arange(size // 8)
    buffers = [region.pool.allocate(size) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        cumem.copy(buffer, (content + number).view("u1"))
    if nth:
        testing.plan_fault("host_register", nth, 999)
        with pytest.raises(cumem.CudaError):
            region.sleep()
        testing.plan_fault(None, 0)
        assert not region.is_asleep
    region.sleep()
    region.wake()
    for number, buffer in enumerate(buffers):
        assert (values.get(buffer).view(content.dtype) == content + number).all()


def test_region_unmaps_chunks_while_it_copies_others(emulated) -> None:
    """If a later copy fails, the chunks that were unmapped are mapped again."""
    region, made = region_of_parts(70 * MIB, 40 * MIB, 40 * MIB)
    testing.plan_fault("copy_async", 3)
    with pytest.raises(cumem.CudaError):
        region.sleep()
    counts = {
        name: testing.fault_count(name)
        for name in ("address_unmap", "address_map", "physical_release")
    }
    testing.plan_fault(None, 0)
    assert counts["address_unmap"] >= 1
    assert counts["address_map"] == counts["address_unmap"]
    assert counts["physical_release"] == 0
    check_contents(made)
    region.sleep()
    region.wake()
    check_contents(made)


def test_region_fills_chunks_while_it_maps_others(emulated) -> None:
    """If a later chunk cannot be mapped, the region sleeps on with its contents."""
    region, made = region_of_parts(40 * MIB, 40 * MIB, 40 * MIB)
    region.sleep()
    testing.plan_fault("address_map", 2, 999)
    with pytest.raises(cumem.CudaError):
        region.wake()
    copied = testing.fault_count("copy_async")
    testing.plan_fault(None, 0)
    assert copied >= 1
    assert region.is_asleep
    assert region.pool.stats().reserved_nbytes == 0
    region.wake()
    check_contents(made)


@pytest.mark.parametrize(
    ("op", "nth"),
    [("stream_create", 1), ("copy_async", 2), ("address_unmap", 1), ("address_map", 1)],
)
def test_region_of_parts_survives_a_call_that_fails(emulated, op, nth) -> None:
    """test_faults.py lets every call fail for a region of one part."""
    region, made = region_of_parts(40 * MIB, 40 * MIB)
    testing.plan_fault(op, nth, 999)
    codes = []
    for call in (region.sleep, region.sleep, region.wake, region.wake):
        try:
            call()
        except cumem.CudaError as error:
            codes.append(error.code)
    testing.plan_fault(None, 0)
    assert codes == [999]
    check_contents(made)


def test_region_stays_awake_if_a_chunk_cannot_be_unmapped(emulated) -> None:
    region, made = region_of_parts(70 * MIB, 40 * MIB, 40 * MIB)
    reserved = region.pool.stats().reserved_nbytes
    testing.plan_fault("address_unmap", 2, 999, repeat=True)
    with pytest.raises(cumem.CudaError):
        region.sleep()
    testing.plan_fault(None, 0)
    assert not region.is_asleep
    check_contents(made)
    assert region.pool.stats().reserved_nbytes == reserved


def test_handle_that_goes_back_late_is_counted_and_recorded(emulated) -> None:
    """The driver refuses to take a handle back when the region goes to sleep. It takes the
    handle later, when the region fails to wake.
    """
    region = cumem.Region("weights")
    made = fill_region(region)
    held = region.pool.stats().reserved_nbytes
    with cumem.record() as rec:
        testing.plan_fault("physical_release", 1, 999, repeat=True)
        with pytest.raises(cumem.CudaError):
            region.sleep()
        assert region.pool.stats().asleep_nbytes == 0
        testing.plan_fault("address_map", 1, 999)
        with pytest.raises(cumem.CudaError):
            region.wake()
        testing.plan_fault(None, 0)
        assert region.pool.stats().asleep_nbytes == held
        region.wake()
    slept, woken = (
        rec.log.events[
            (rec.log.events["op"] == OPS.index(op))
            & (rec.log.events["kind"] == KINDS.index("device"))
        ]
        for op in ("sleep", "wake")
    )
    assert list(slept["nbytes"]) == list(woken["nbytes"]) == [held]
    check_contents(made)


# -- use while asleep ------------------------------------------------------------------

USES: dict[str, Callable[[cumem.Buffer], object]] = {
    "item": lambda buffer: buffer[0],
    "view": lambda buffer: buffer[2:],
    "reshape": lambda buffer: buffer.reshape(-1, 2),
    "fill": lambda buffer: buffer.fill(0),
    "assign": lambda buffer: buffer.__setitem__(0, 1),
    "copy to": lambda buffer: cumem.copy(buffer, np.zeros(1000, "u1")),
    "copy from": lambda buffer: cumem.copy(np.zeros(1000, "u1"), buffer),
    "copy_async": lambda buffer: cumem.copy_async(np.zeros(1000, "u1"), buffer),
    "copy_many": lambda buffer: cumem.copy_many([(np.zeros(1000, "u1"), buffer)]),
    "copy()": lambda buffer: buffer.copy(),
    "tolist": lambda buffer: buffer.tolist(),
    "bytes": bytes,
    "dlpack": lambda buffer: buffer.__dlpack__(),
    "array interface": lambda buffer: buffer.__cuda_array_interface__,
    "to_numpy": lambda buffer: buffer.to_numpy(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_region_asleep_refuses_the_use_of_its_buffers(emulated, use) -> None:
    region = cumem.Region("weights")
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    region.sleep()
    with pytest.raises(RuntimeError, match=r"region 'weights', which is asleep.*wake"):
        use(buffer)
    region.wake()
    assert (values.get(buffer) == 7).all()


def test_region_asleep_refuses_a_row_plan_of_its_buffers(emulated) -> None:
    region = cumem.Region("weights")
    data = np.arange(12, dtype="u1").reshape(6, 2)
    with region:
        buffer = cumem.array(data, kind="device")
    out = np.zeros((2, 2), "u1")
    plan = cumem.RowPlan(out, buffer, None, [3, 1])
    plan.copy()
    region.sleep()  # an idle plan does not keep it awake
    with pytest.raises(RuntimeError, match="asleep"):
        plan.copy()
    region.wake()
    out[:] = 0
    plan.copy()
    assert (out == data[[3, 1]]).all()
    plan.close()
    region.sleep()
    region.wake()


def test_region_asleep_refuses_allocations(emulated) -> None:
    region = cumem.Region("weights")
    region.pool.allocate(100)  # this buffer ends at once
    region.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        region.pool.allocate(100)
    with region, pytest.raises(RuntimeError, match="asleep"):
        cumem.empty_device(100)
    region.wake()
    region.pool.allocate(100)


def test_region_asleep_frees_buffers(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    region.sleep()
    dropped, freed = made.pop(0), made.pop(3)
    del dropped
    freed[0].free()
    assert freed[0].closed
    with pytest.raises(ValueError, match="closed"):
        freed[0].fill(1)
    region.wake()
    check_contents(made)
    assert region.pool.stats().live_count == len(made)


def test_region_keeps_exported_tensors_right(emulated) -> None:
    """An export in this process does not keep the region awake, since addresses stay."""
    region = cumem.Region("weights")
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    capsule = buffer.__dlpack__()
    region.sleep()
    region.wake()
    assert (values.get(buffer) == 7).all()
    del capsule


# -- what comes first ------------------------------------------------------------------


def sleep_in_thread(region: cumem.Region) -> tuple[threading.Thread, list[object]]:
    """Put a region to sleep in another thread. Return the thread and a list of its
    results.
    """
    outcome: list[object] = []

    def run() -> None:
        try:
            region.sleep()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def use_on_stream(buffer: cumem.Buffer, stream: cumem.Stream) -> None:
    buffer.fill(9, stream=stream)


def use_by_transfer(buffer: cumem.Buffer, stream: cumem.Stream) -> None:
    cumem.copy_async(buffer, np.full(1000, 9, "u1"), stream=stream)


def use_of_unknown_stream(buffer: cumem.Buffer, stream: cumem.Stream) -> None:
    """Use the address on any stream, as a library does that was given it."""
    other = cumem.full(1000, 9, "u1", "pinned")
    memory = cumem.asbuffer(Exporter(buffer.ptr))
    cumem.copy_async(memory, other, stream=stream)


class Exporter:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1000,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


EARLIER = {
    "stream": use_on_stream,
    "transfer": use_by_transfer,
    "unknown stream": use_of_unknown_stream,
}


@pytest.mark.parametrize("use", EARLIER.values(), ids=EARLIER)
def test_region_sleeps_after_earlier_work(emulated, use) -> None:
    region = cumem.Region("weights")
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    stream = cumem.Stream()
    session.shut(stream)
    use(buffer, stream)
    thread, outcome = sleep_in_thread(region)
    session.wait_until_waiting(thread)
    assert outcome == []
    assert not region.is_asleep
    testing.gate_open(stream)
    thread.join()
    assert outcome == [None]
    assert region.is_asleep
    region.wake()
    assert (values.get(buffer) == 9).all()


def test_region_sleeps_after_work_on_memory_that_was_dropped(emulated) -> None:
    region = cumem.Region("weights")
    kept = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    buffer = region.pool.allocate(1000)
    stream = cumem.Stream()
    session.shut(stream)
    buffer.fill(1, stream=stream)
    del buffer
    thread, outcome = sleep_in_thread(region)
    session.wait_until_waiting(thread)
    assert outcome == []
    testing.gate_open(stream)
    thread.join()
    assert outcome == [None]
    region.wake()
    assert (values.get(kept) == 7).all()


def test_region_refuses_to_sleep_during_a_capture(emulated) -> None:
    region = cumem.Region("weights")
    stream = cumem.Stream()
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    buffer.fill(8, stream=stream)
    stream.synchronize()
    testing.set_capturing(stream, True)
    try:
        with pytest.raises(cumem.CudaError, match="captured"):
            region.sleep()
    finally:
        testing.set_capturing(stream, False)
    assert not region.is_asleep
    assert (values.get(buffer) == 8).all()
    region.sleep()
    region.wake()
    assert (values.get(buffer) == 8).all()


def test_region_refuses_to_sleep_below_a_call(emulated) -> None:
    region = cumem.Region("weights")
    buffer = region.pool.allocate(10 * MIB)
    errors: list[BaseException] = []

    def report(*args: object) -> None:
        if not errors:
            with pytest.raises(
                BufferError, match="'weights' cannot go to sleep"
            ) as info:
                region.sleep()
            errors.append(info.value)

    cumem.copy(buffer, np.ones(10 * MIB, "u1"), progress=report)
    assert len(errors) == 1
    assert not region.is_asleep
    region.sleep()
    region.wake()
    assert (values.get(buffer) == 1).all()


def test_region_stays_awake_when_a_signal_ends_the_wait(emulated) -> None:
    region = cumem.Region("weights")
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    stream = cumem.Stream()
    with session.alarm(stream):
        buffer.fill(9, stream=stream)
        region.sleep()
    assert not region.is_asleep
    region.sleep()
    region.wake()
    assert (values.get(buffer) == 9).all()


@pytest.mark.parametrize("name", ["sleep", "wake", "close"])
def test_signal_handler_cannot_move_a_region_on_its_way(emulated, name) -> None:
    region = cumem.Region("weights")
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    stream = cumem.Stream()
    refused = []

    def handle() -> None:
        with pytest.raises(RuntimeError, match="on its way to sleep") as caught:
            getattr(region, name)()
        refused.append(caught.value)
        testing.gate_open(stream)

    session.shut(stream)
    buffer.fill(9, stream=stream)
    with session.on_alarm(handle):
        region.sleep()
    assert len(refused) == 1
    assert region.is_asleep
    region.wake()
    assert (values.get(buffer) == 9).all()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_region_waits_for_graphs_that_may_run_on_any_stream(
    emulated, is_dropped: bool
) -> None:
    """A graph goes on using a block that was dropped, until the graph itself ends."""
    region = cumem.Region("weights")
    buffer: cumem.Buffer | None = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    source = cumem.full(1000, 8, "u1", "device")
    stream, other = cumem.Stream(), cumem.Stream()
    cumem.Device(0).synchronize()
    testing.set_capturing(stream, True)
    cumem.copy_async(buffer, source, stream=stream)
    testing.set_capturing(stream, False)
    if is_dropped:
        buffer = None
        assert region.pool.stats().in_flight_count == 1
    session.shut(other)  # it may be replaying the graph
    source.fill(1, stream=other)
    slept = threading.Event()

    def sleep() -> None:
        region.sleep()
        slept.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    session.wait_until_waiting(thread, slept.is_set)
    assert not slept.is_set()
    testing.gate_open(other)
    thread.join()
    region.wake()


# -- memory that is not there ----------------------------------------------------------


def test_region_stays_asleep_while_others_have_the_memory(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    region.sleep()
    taken = [cumem.empty_device(MIB, "u1")]
    with contextlib.suppress(cumem.OutOfMemoryError):
        while True:
            taken.append(cumem.empty_device(64 * MIB, "u1"))
    for _ in range(2):
        with pytest.raises(cumem.OutOfMemoryError):
            region.wake()
        assert region.is_asleep
    del taken
    region.wake()  # the default pool gives its cache back
    check_contents(made)


def test_region_asleep_counts_against_no_limit(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    with cumem.limit("device", 128 * MIB):
        region.sleep()
        other = cumem.empty_device(100 * MIB, "u1")
        with pytest.raises(cumem.OutOfMemoryError, match="limit"):
            region.wake()
        del other
        region.wake()
    check_contents(made)


# -- several regions -------------------------------------------------------------------


def test_sleep_and_wake_take_regions_by_their_tags(emulated) -> None:
    regions = [cumem.Region(tag) for tag in ("a", "b", "a", "c")]
    made = [fill_region(region) for region in regions]
    cumem.sleep("a", "c")
    assert [region.is_asleep for region in regions] == [True, False, True, True]
    check_contents(made[1])
    cumem.wake("c")
    assert [region.is_asleep for region in regions] == [True, False, True, False]
    cumem.sleep(keep=True)
    assert all(region.is_asleep for region in regions)
    cumem.wake()
    for each in made:
        check_contents(each)


@pytest.mark.parametrize("function", [cumem.sleep, cumem.wake])
def test_sleep_and_wake_refuse_tags_that_no_region_has(emulated, function) -> None:
    region = cumem.Region("weights")
    with pytest.raises(ValueError, match=r"no region has the tag 'cache'.*'weights'"):
        function("weights", "cache")
    assert not region.is_asleep
    with pytest.raises(TypeError, match="tag must be a str, not int"):
        function(3)


def test_regions_of_two_devices_sleep_in_two_threads(emulated) -> None:
    regions = [cumem.Region("weights", device) for device in (0, 1)]
    made = [fill_region(region) for region in regions]

    def sleep_and_wake(region: cumem.Region) -> None:
        for _ in range(5):
            region.sleep()
            region.wake()

    threads = [threading.Thread(target=sleep_and_wake, args=(r,)) for r in regions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in made:
        check_contents(each)


def test_region_is_put_to_sleep_and_woken_by_several_threads(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                region.sleep()
                region.wake()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    region.wake()
    check_contents(made)


def test_region_of_a_device_is_reached_from_another_after_waking(emulated) -> None:
    region = cumem.Region("weights")
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    region.sleep()
    other = cumem.empty_device(1000, "u1", device=1)  # this makes the device's context
    region.wake()
    cumem.copy(other, buffer)
    assert (values.get(other) == 7).all()


# -- the end ---------------------------------------------------------------------------


def test_region_dropped_while_asleep_gives_pinned_memory_back(emulated) -> None:
    pinned = cumem.stats()["pinned"].reserved_nbytes
    region = cumem.Region("weights")
    made = fill_region(region)
    region.sleep()
    assert cumem.stats()["pinned"].reserved_nbytes > pinned
    del region
    gc.collect()
    assert cumem.stats()["pinned"].reserved_nbytes == pinned
    with pytest.raises(RuntimeError, match="'weights', which was closed"):
        made[0][0].fill(1)


def test_region_closed_while_awake_leaves_buffers_valid(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    region.close()
    region.close()
    check_contents(made)
    assert repr(region) == "<cumem.Region 'weights', device 0, closed>"
    assert not region.is_asleep
    for call in (region.sleep, region.wake):
        with pytest.raises(ValueError, match=r"^region 'weights' is closed$"):
            call()


def test_region_is_not_pickled_and_says_why(emulated) -> None:
    region = cumem.Region("weights")
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="its memory belongs to this process"):
            call(region)


def test_region_closed_while_asleep_gives_contents_up(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    region.sleep()
    region.close()
    with pytest.raises(RuntimeError, match="its contents are gone"):
        made[0][0].fill(1)
    del made
    assert cumem.stats()["pinned"].reserved_nbytes == 0


def test_region_asleep_does_not_wake_after_close_was_interrupted(
    emulated, monkeypatch
) -> None:
    """The region's contents may be gone by then."""
    region = cumem.Region("weights")
    other = cumem.Region("other")
    made = fill_region(region)
    region.sleep()
    other.sleep()

    def interrupt(self: cumem.Pool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cumem.Pool, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            region.close()
    with pytest.raises(ValueError, match="'weights' was closed while it was asleep"):
        region.wake()
    with pytest.raises(RuntimeError, match="its contents are gone"):
        made[0][0].fill(1)
    cumem.wake()  # this wakes only open regions
    assert not other.is_asleep
    region.close()
    assert not region.is_asleep


def test_shutdown_ends_a_region_that_is_asleep(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    region.sleep()
    cumem.shutdown()
    assert not region.is_asleep
    with pytest.raises(ValueError, match="closed"):
        region.wake()
    assert made[0][0].closed


def test_forked_child_neither_wakes_a_region_nor_copies_its_bytes(emulated) -> None:
    region = cumem.Region("weights")
    made = fill_region(region)
    region.sleep()

    def check() -> None:
        with pytest.raises(RuntimeError, match="forked"):
            region.wake()

    forks.fork_and_run(check)
    region.wake()
    check_contents(made)

    def check_awake() -> None:
        with pytest.raises(RuntimeError, match="forked"):
            region.sleep()

    forks.fork_and_run(check_awake)


@pytest.mark.parametrize("name", ["sleep", "wake", "close"])
def test_child_forked_while_a_region_falls_asleep_is_not_told_of_a_handler(
    emulated, name
) -> None:
    region = cumem.Region("weights")
    buffer = cumem.full(1000, 7, "u1", "device", pool=region.pool)
    stream = cumem.Stream()
    session.shut(stream)
    buffer.fill(9, stream=stream)
    thread, outcome = sleep_in_thread(region)
    session.wait_until_waiting(thread)
    told = pytest.raises(RuntimeError, match="forked")

    def check() -> None:
        with contextlib.nullcontext() if name == "wake" else told:
            getattr(region, name)()

    forks.fork_and_run(check)
    testing.gate_open(stream)
    thread.join()
    assert outcome == [None]
    region.wake()
    assert (values.get(buffer) == 9).all()


def test_interpreter_exits_while_a_region_is_asleep() -> None:
    text = (
        "import cumem\n"
        "region = cumem.Region('weights')\n"
        "buffer = region.pool.allocate(1 << 20)\n"
        "region.sleep()\n"
        "print(region.is_asleep)\n"
    )
    environment = {**os.environ, "CUMEM_BACKEND": "emulated"}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


# -- arguments and texts ---------------------------------------------------------------


@pytest.fixture
def region(emulated) -> Iterator[cumem.Region]:
    made = cumem.Region("weights", 1, host="release")
    yield made
    made.close()


def test_region_has_tag_device_pool_and_host(region: cumem.Region) -> None:
    assert (region.tag, region.device.index, region.host) == ("weights", 1, "release")
    assert region.pool.device is region.device
    assert region.pool.stats().name == "region weights"


def test_region_shows_what_it_holds(region: cumem.Region) -> None:
    buffer = region.pool.allocate(1 << 20)
    start = "<cumem.Region 'weights', device 1, emulated: 1 MiB live, "
    assert repr(region) == f"{start}64 MiB reserved>"
    region.sleep()
    assert repr(region) == f"{start}asleep>"
    region.wake()
    del buffer


def test_region_refuses_wrong_arguments(emulated) -> None:
    with pytest.raises(TypeError, match="tag must be a str, not int"):
        cumem.Region(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="host must be a str"):
        cumem.Region("a", host=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host must be 'keep' or 'release'"):
        cumem.Region("a", host="file")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device"):
        cumem.Region("a", 99)
    with pytest.raises(ValueError, match="keep must be True, False or 'file'"):
        cumem.Region("a").sleep("no")  # type: ignore[arg-type]


def test_region_block_is_that_of_its_pool(emulated) -> None:
    region = cumem.Region("weights")
    with region as entered:
        assert entered is region
        inside = cumem.empty_device(100)
    outside = cumem.empty_device(100)
    assert region.pool.stats().live_count == 1
    del inside, outside
    other = cumem.Region("other", 1)
    with pytest.raises(ValueError, match="device 1"), other:
        pass
