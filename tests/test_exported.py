# SPDX-License-Identifier: Apache-2.0
"""Memory that others have seen: it is theirs until they let it go, and is used again only
after all that their devices were doing by then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.strangers import Stranger

import cumem

testing = session.testing
NBYTES = 4096
HOST_KINDS = ("pinned", "mapped", "managed")
KINDS = (*HOST_KINDS, "device")
ON_CPU = {"dl_device": (1, 0), "copy": False}


def dictionary(buffer: cumem.Buffer) -> Any:
    """Who reads it keeps the object, as the protocol says."""
    return testing.array_interface(buffer), buffer


DOORS: dict[str, Callable[[Any], Any]] = {
    "buffer protocol": memoryview,
    "NumPy": lambda buffer: buffer.numpy(),
    "old DLPack": lambda buffer: buffer.__dlpack__(),
    "DLPack": lambda buffer: buffer.__dlpack__(max_version=(1, 1)),
    "DLPack on the CPU": lambda buffer: buffer.__dlpack__(max_version=(1, 1), **ON_CPU),
    "array interface": dictionary,
}


def ways(kinds: tuple[str, ...] = KINDS) -> list[Any]:
    """Each kind through each door that it has."""
    return [
        (kind, door)
        for kind in kinds
        for door in DOORS
        if (kind in HOST_KINDS or door in ("old DLPack", "DLPack", "array interface"))
        and (door != "array interface" or kind != "pinned")
    ]


def fenced(pool: cumem.Pool, idle: int = 1) -> int:
    """Let what waits for a fence have one, and see it pass on a device that is idle; how
    many blocks still wait."""
    pool.trim(wait=False)
    cumem.Device(idle).synchronize()
    pool.trim(wait=False)
    return pool.stats().in_flight_count


@pytest.mark.parametrize(("kind", "door"), ways())
def test_block_stays_out_of_the_pool_until_it_is_let_go(emulated, kind, door) -> None:
    pool = cumem.Pool(kind)
    buffer = pool.allocate(NBYTES)
    address = buffer.ptr
    held = DOORS[door](buffer)
    del buffer
    others = [pool.allocate(NBYTES) for _ in range(8)]
    assert pool.stats().live_count == 9
    assert address not in [other.ptr for other in others]
    del held, others
    assert pool.stats().live_count == 0


@pytest.mark.parametrize(("kind", "door"), ways())
def test_block_waits_for_work_that_nobody_told_of(emulated, kind, door) -> None:
    """Of another stream, and a device that nothing of it ever was on."""
    pool = cumem.Pool(kind)
    for device in range(2):
        scratch = cumem.empty_device(NBYTES, "u1", device=device)
        stream = cumem.Stream(device=device)
        buffer = pool.allocate(NBYTES)
        address = buffer.ptr
        with session.gate(stream):
            scratch.fill(1, stream=stream)  # it might be on the buffer: nobody can know
            del_after = DOORS[door](buffer)
            del buffer, del_after
            assert fenced(pool, 1 - device) == 1
            assert pool.allocate(NBYTES).ptr != address
        pool.trim()
        assert pool.stats().in_flight_count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_is_made_for_what_was_never_exported(emulated, kind) -> None:
    pool = cumem.Pool(kind)
    del [pool.allocate(NBYTES)][:]
    testing.plan_fault(None, 0)
    for _ in range(3):
        buffer = pool.allocate(NBYTES)
        del buffer
    assert testing.fault_count() == 0
    assert pool.stats().in_flight_count == 0
    assert pool.stats().hit_count == 3


FENCES = ("context_record_event", "device_synchronize", "stream_synchronize")


@pytest.mark.parametrize(("kind", "door"), ways())
@pytest.mark.parametrize("where", ["here", "thread"])
def test_letting_go_takes_no_fence_and_does_not_wait(
    emulated, kind, door, where
) -> None:
    pool = cumem.Pool(kind)
    stream = cumem.Stream()
    buffer = pool.allocate(NBYTES)
    held = [DOORS[door](buffer)]
    scratch = cumem.empty_device(NBYTES, "u1")
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        del buffer
        testing.plan_fault(None, 0)
        if where == "here":
            held.clear()
        else:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()  # with the stream shut
        testing.poll()
        assert {op: testing.fault_count(op) for op in FENCES} == dict.fromkeys(
            FENCES, 0
        )
        assert pool.stats().in_flight_count == 1


@pytest.fixture
def newest():
    with session.opened(driver_version=13000) as runtime:
        yield runtime


def test_fence_is_taken_at_reuse_once_enough_waits(newest) -> None:
    pool = cumem.Pool("pinned")
    pieces = [pool.allocate(16 << 20) for _ in range(6)]
    addresses = [piece.ptr for piece in pieces]
    for piece in pieces:
        piece.numpy()
    testing.plan_fault(None, 0)
    del piece, pieces  # 96 MiB: more than may wait
    assert testing.fault_count("context_record_event") == 0
    first = pool.allocate(16 << 20)
    assert testing.fault_count("context_record_event") == 1  # tells of all
    cumem.Device(0).synchronize()
    later = [pool.allocate(16 << 20) for _ in range(3)]
    assert {first.ptr, *(one.ptr for one in later)} & {*addresses}


@pytest.mark.parametrize(("kind", "taken"), [("pinned", 1), ("device", 0)])
def test_fence_is_taken_once_enough_waits_even_if_other_memory_is_free(
    newest, kind, taken
) -> None:
    """The host writes faster to what it used lately, which the processor's cache has."""
    pool = cumem.Pool(kind)
    pieces = [pool.allocate(16 << 20) for _ in range(12)]
    capsules = [piece.__dlpack__() for piece in pieces[:6]]
    del pieces  # half is free at once
    testing.plan_fault(None, 0)
    pool.allocate(16 << 20)
    capsules.clear()
    pool.allocate(16 << 20)
    assert testing.fault_count("context_record_event") == taken
    pool.allocate(16 << 20)  # not soon again
    assert testing.fault_count("context_record_event") == taken
    assert pool.stats().growth_count <= 12


def test_block_of_an_old_driver_waits_for_the_whole_device() -> None:
    with session.opened(driver_version=12040):
        pool = cumem.Pool("pinned")
        stream = cumem.Stream()
        scratch = cumem.empty_device(NBYTES, "u1")
        pool.allocate(NBYTES).numpy()
        with session.gate(stream):
            scratch.fill(1, stream=stream)
            assert fenced(pool) == 1
            assert testing.fault_count("context_record_event") == 0
        pool.trim()
        assert testing.fault_count("device_synchronize") > 0
        assert pool.stats().in_flight_count == 0
        del scratch


def test_pages_stay_locked_under_work_on_another_device(emulated) -> None:
    stream = cumem.Stream(device=1)
    scratch = cumem.empty_device(NBYTES, "u1", device=1)
    registrations = [cumem.register(np.zeros(1 << 20, "u1"), device=0)]
    registrations[0].buffer.numpy()
    done = threading.Event()

    def run() -> None:
        registrations.pop().close()
        done.set()

    with session.gate(stream):
        scratch.fill(1, stream=stream)
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not done.is_set()
        assert testing.registrations() == 1
    thread.join()
    assert testing.registrations() == 0


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_what_another_librarys_copy_reads_late_is_not_overwritten(
    runtime, kind
) -> None:
    """Its stream is one that cumem was never told of."""
    with Stranger() as stranger:
        target = cumem.empty_device(NBYTES, "u1")
        source = cumem.full(NBYTES, 7, "u1", kind)
        array = source.numpy()
        stranger.copy(target.ptr, array.ctypes.data, NBYTES)
        del array, source
        for _ in range(16):
            cumem.empty(NBYTES, "u1", kind).numpy()[:] = 9
    assert (values.get(target) == 7).all()


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_what_another_librarys_copy_writes_late_is_nobody_elses(runtime, kind) -> None:
    with Stranger() as stranger:
        source = cumem.full(NBYTES, 7, "u1", "device")
        cumem.Device(0).synchronize()
        target = cumem.empty(NBYTES, "u1", kind)
        stranger.copy(target.numpy().ctypes.data, source.ptr, NBYTES)
        del target
        others = [cumem.full(NBYTES, 9, "u1", kind) for _ in range(16)]
    assert all((other.numpy() == 9).all() for other in others)
