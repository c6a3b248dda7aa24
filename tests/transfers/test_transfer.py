# SPDX-License-Identifier: Apache-2.0
"""Tests of the order, lifetime, failures and awaiting of copy_async()'s handles.

A stream whose gate is shut starts no work. It keeps transfers under way while the tests
drop handles, free memory or raise signals. Planned faults make transfers fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime
import decimal
import fractions
import gc
import os
import sys
import threading
import weakref

import numpy as np
import pytest
from support import session, values
from support.strategies import KINDS

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

PLACES = [*KINDS, "numpy"]


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("background", [False, True])
def test_async_copy_between_every_pair(runtime, to, source, background) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype="u1")
    target = values.put(np.zeros_like(data), to)
    stream = None if background else cumem.Stream()
    handle = cumem.copy_async(target, values.put(data, source), stream=stream)
    assert handle.nbytes == 5000
    handle.wait()
    assert handle.done
    assert handle.seconds > 0
    assert handle.gbps > 0
    assert isinstance(handle.route, str)
    assert (values.get(target) == data).all()


def test_pageable_source_may_be_reused_once_the_call_returns(emulated) -> None:
    source = np.arange(100_000, dtype="i4")
    buffer = cumem.empty_device(100_000, "i4")
    stream = cumem.Stream()
    with session.gate(stream):
        # The source fits into the staging ring, so the call returns although the stream
        # is shut.
        handle = cumem.copy_async(buffer, source, stream=stream)
        source[:] = -1
        assert not handle.done
    handle.wait()
    assert (values.get(buffer) == np.arange(100_000)).all()


@pytest.mark.parametrize(
    "seconds", [0, 0.0, 0.01, np.float32(0.01), np.uint8(0), False]
)
def test_wait_that_is_too_short_says_the_seconds_it_was_given(
    emulated, seconds
) -> None:
    stream = cumem.Stream()
    with session.gate(stream):
        handle = cumem.copy_async(
            cumem.empty_device(8), cumem.zeros(8, kind="pinned"), stream=stream
        )
        with pytest.raises(TimeoutError) as caught:
            handle.wait(seconds)
    assert str(caught.value) == f"the transfer is not done after {seconds!r} s"
    for for_ever in (1e9, 10**18, float("inf"), None):
        handle.wait(for_ever)


@pytest.mark.parametrize(
    ("seconds", "error", "text"),
    [
        ("1", TypeError, "timeout must be a number of seconds or None, not str"),
        (b"1", TypeError, "timeout must be a number of seconds or None, not bytes"),
        ((1,), TypeError, "timeout must be a number of seconds or None, not tuple"),
        (1j, TypeError, "timeout must be a number of seconds or None, not complex"),
        (
            datetime.timedelta(seconds=1),
            TypeError,
            "timeout must be a number of seconds or None, not timedelta",
        ),
        (np.ones(2), TypeError, "timeout must be a number of seconds or None, not nda"),
        (-1, ValueError, "timeout must be at least 0 seconds, not -1"),
        (-0.5, ValueError, "timeout must be at least 0 seconds, not -0.5"),
        (float("nan"), ValueError, "timeout must be at least 0 seconds, not nan"),
        (10**400, OverflowError, "too large"),
    ],
)
def test_timeout_that_is_no_number_of_seconds_is_refused(
    runtime, seconds, error, text: str
) -> None:
    handle = cumem.copy_async(cumem.empty_pinned(8), np.zeros(8))
    with pytest.raises(error, match=text):
        handle.wait(timeout=seconds)
    handle.wait(decimal.Decimal("60"))
    handle.wait(fractions.Fraction(60))


def test_nothing_happens_while_the_stream_is_shut(emulated) -> None:
    source = cumem.array(np.arange(10, dtype="i4"), kind="pinned")
    target = cumem.zeros(10, "i4", "mapped")
    address = target.ptr
    stream = cumem.Stream()
    with session.gate(stream):
        handle = cumem.copy_async(target, source, stream=stream)
        assert not handle.done
        assert not stream.done
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0.02)
        import ctypes

        assert ctypes.string_at(address, 40) == bytes(40)
    handle.wait()
    assert (target.numpy() == np.arange(10)).all()


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed"])
def test_numpy_of_an_unfinished_target_waits(runtime, kind) -> None:
    source = cumem.array(np.arange(300_000, dtype="i4"), kind="device")
    target = cumem.zeros(300_000, "i4", kind)
    cumem.copy_async(target, source, stream=cumem.Stream())
    assert (target.numpy() == np.arange(300_000)).all()


def test_dropped_handle_keeps_both_ends_until_done(emulated) -> None:
    class Array(np.ndarray):
        pass

    target = np.zeros(1000, "i4").view(Array)
    alive = weakref.ref(target)
    source = cumem.array(np.arange(1000, dtype="i4"), kind="device")
    stream = cumem.Stream()
    with session.gate(stream):
        source.fill(1, stream=stream)
        handle = cumem.copy_async(target, source)
        del target, source, handle
        gc.collect()
        assert alive() is not None
        assert session.testing.pending_transfers() >= 1
    stream.synchronize()
    for _ in range(1000):
        session.testing.poll()
        gc.collect()
        if alive() is None:
            break
        cumem.Event().record(stream).synchronize()
    assert alive() is None


def test_freed_source_is_not_handed_out_before_its_copy(emulated) -> None:
    stream = cumem.Stream()
    target = cumem.zeros(4096, "u1", "device")
    with session.gate(stream):
        source = cumem.full(4096, 5, "u1", "pinned")
        cumem.copy_async(target, source, stream=stream)
        address = source.ptr
        del source
        gc.collect()
        others = [cumem.empty_pinned(4096, "u1") for _ in range(8)]
        assert address not in [other.ptr for other in others]
        for other in others:
            other.fill(9)
    stream.synchronize()
    assert (values.get(target) == 5).all()


def test_exported_pinned_block_waits_for_foreign_work(emulated) -> None:
    # Another library's stream, which cumem does not know, reads our pinned block.
    stream = cumem.Stream()
    other = cumem.zeros(4096, "u1", "device")
    with session.gate(stream):
        cumem.copy_async(other, cumem.zeros(4096, "u1", "pinned"), stream=stream)
        source = cumem.full(4096, 5, "u1", "pinned")
        view = source.numpy()
        address = source.ptr
        del view, source
        gc.collect()
        assert cumem.empty_pinned(4096, "u1").ptr != address
    stream.synchronize()


def test_failure_is_raised_once_by_wait(emulated) -> None:
    # The source is pageable, so a worker moves it.
    source = np.zeros(64, "u1")[::-1]
    target = cumem.zeros(64, "u1", "device")
    session.testing.plan_fault("copy_async", 1, 999)
    handle = cumem.copy_async(target, source)
    with pytest.raises(cumem.CudaError) as caught:
        handle.wait()
    assert caught.value.call == "cudaMemcpyAsync"
    assert handle.done
    session.testing.plan_fault(None, 0)
    cumem.copy(target, source)  # The engine still works.


def test_failure_at_submission_is_raised_by_the_call(emulated) -> None:
    source = cumem.zeros(64, "u1", "pinned")
    target = cumem.zeros(64, "u1", "device")
    session.testing.plan_fault("copy_async", 1, 999)
    with pytest.raises(cumem.CudaError, match="cudaMemcpyAsync"):
        cumem.copy_async(target, source, stream=cumem.Stream())
    session.testing.plan_fault(None, 0)
    assert session.testing.pending_transfers() == 0
    cumem.copy_async(target, source).wait()


def test_failure_nobody_read_goes_to_the_unraisable_hook(emulated, monkeypatch) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))
    # The source is pageable, so a worker moves it.
    source = np.zeros(64, "u1")[::-1]
    target = cumem.zeros(64, "u1", "device")
    session.testing.plan_fault("copy_async", 1, 999)
    cumem.copy_async(target, source)
    while session.testing.pending_transfers():
        session.testing.poll()
    session.testing.plan_fault(None, 0)
    # A target remembers the transfers into it. As long as the target lives, its numpy()
    # could still raise the error, so the hook gets the error only after the target is gone.
    del target
    # The worker lets go of the transfer a moment later.
    session.wait_until(lambda: session.testing.poll() or seen)
    assert [type(error) for error in seen] == [cumem.CudaError]


def test_failure_nobody_read_is_reported_once_its_handle_is_dropped(
    emulated, monkeypatch
) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))
    source = cumem.zeros(64, "u1", "pinned")
    target = cumem.zeros(64, "u1", "device")
    session.testing.plan_fault("copy_async", 1, 999)
    handles = [cumem.copy_async(target, source)]
    session.wait_until(lambda: session.testing.pending_transfers() == 0)
    session.testing.plan_fault(None, 0)
    assert seen == []  # Somebody may still ask the handle.
    handles.clear()
    session.testing.poll()
    assert [type(error) for error in seen] == [cumem.CudaError]
    assert "cudaMemcpyAsync" in str(seen[0])


@pytest.mark.parametrize("read", [cumem.asnumpy, cumem.array])
def test_failure_of_a_dropped_handle_is_not_raised_by_a_copy_from_its_target(
    emulated, monkeypatch, read
) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))
    # The source is pageable, so a worker moves it.
    source = np.ones(64, "u1")[::-1]
    target = cumem.zeros(64, "u1", "device")
    session.testing.plan_fault("copy_async", 1, 2)
    cumem.copy_async(target, source)
    session.wait_until(lambda: session.testing.pending_transfers() == 0)
    session.testing.plan_fault(None, 0)
    # The copy comes after the one that failed, and reads the bytes that were there
    # before.
    assert not cumem.asnumpy(read(target)).any()
    session.wait_until(lambda: session.testing.poll() or seen)
    assert [type(error) for error in seen] == [cumem.OutOfMemoryError]


def test_failure_of_a_dropped_handle_is_raised_by_numpy_of_its_target(
    emulated, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda u: None)
    source = cumem.full(64, 1, "u1", "device")
    target = cumem.zeros(64, "u1", "pinned")
    session.testing.plan_fault("copy_async", 1, 2)
    cumem.copy_async(target, source)
    session.wait_until(lambda: session.testing.pending_transfers() == 0)
    session.testing.plan_fault(None, 0)
    with pytest.raises(cumem.OutOfMemoryError, match="cudaMemcpyAsync"):
        target.numpy()
    assert not target.numpy().any()  # The error is raised once.


@pytest.mark.parametrize("use", [cumem.PinnedBuffer.numpy, np.from_dlpack, memoryview])
def test_failure_of_a_dropped_handle_is_not_raised_by_an_export_of_its_source(
    emulated, monkeypatch, use
) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))
    source = cumem.full(64, 1, "u1", "pinned")
    target = cumem.zeros(64, "u1", "device")
    session.testing.plan_fault("copy_async", 1, 2)
    cumem.copy_async(target, source)
    session.wait_until(lambda: session.testing.pending_transfers() == 0)
    session.testing.plan_fault(None, 0)
    assert np.asarray(use(source)).all()  # The copy only read these bytes.
    # The export has not kept the failure from being reported.
    del target
    session.wait_until(lambda: session.testing.poll() or seen)
    assert [type(error) for error in seen] == [cumem.OutOfMemoryError]


def test_failure_nobody_read_is_reported_after_shutdown(emulated, monkeypatch) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))
    source = np.zeros(64, "u1")[::-1]
    session.testing.plan_fault("copy_async", 1, 999)
    handles = [cumem.copy_async(cumem.zeros(64, "u1", "device"), source)]
    while session.testing.pending_transfers():
        session.testing.poll()
    session.testing.plan_fault(None, 0)
    cumem.shutdown()
    assert seen == []  # Somebody may still ask the handle.
    handles.clear()
    assert [type(error) for error in seen] == [cumem.CudaError]


@pytest.mark.parametrize("background", [False, True])
def test_await_wakes_the_loop(runtime, background) -> None:
    async def main() -> None:
        stream = None if background else cumem.Stream()
        source = cumem.array(np.arange(50_000, dtype="i4"), kind="pinned")
        targets = [cumem.zeros(50_000, "i4", "device") for _ in range(5)]
        handles = [cumem.copy_async(t, source, stream=stream) for t in targets]
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        for handle in handles:
            await handle
            assert handle.done
        await handles[0]  # A finished handle answers at once.
        ticker.cancel()
        for target in targets:
            assert (values.get(target) == np.arange(50_000)).all()

    asyncio.run(main())


def test_await_of_many_transfers_takes_no_descriptor_for_each(emulated) -> None:
    async def main() -> None:
        stream = cumem.Stream()
        source, target = cumem.zeros(100, kind="pinned"), cumem.empty_device(100)

        async def wait_for(transfer: cumem.Transfer) -> None:
            await transfer

        with session.gate(stream):
            first = cumem.copy_async(target, source, stream=stream)
            tasks = [asyncio.create_task(wait_for(first))]
            await asyncio.sleep(0)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(200):
                transfer = cumem.copy_async(target, source, stream=stream)
                tasks.append(asyncio.create_task(wait_for(transfer)))
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) == before
            assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_await_raises_the_failure(emulated) -> None:
    async def main() -> None:
        # The source is pageable, so a worker moves it.
        source = np.zeros(64, "u1")[::-1]
        target = cumem.zeros(64, "u1", "device")
        session.testing.plan_fault("copy_async", 1, 999)
        handle = cumem.copy_async(target, source)
        with pytest.raises(cumem.CudaError):
            await handle
        session.testing.plan_fault(None, 0)

    asyncio.run(main())


def test_stream_waits_for_a_background_transfer(runtime) -> None:
    source = np.arange(100_000, dtype="i4")
    middle = cumem.zeros(100_000, "i4", "device")
    last = cumem.zeros(100_000, "i4", "device")
    handle = cumem.copy_async(middle, source)
    stream = cumem.Stream()
    handle.order(stream)
    cumem.copy_async(last, middle, stream=stream).wait()
    assert (values.get(last) == source).all()


def test_order_that_the_driver_refuses_does_not_fail_the_copy(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 3, "u1", "device")
    target = cumem.zeros(5000, "u1", "pinned")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        handle = cumem.copy_async(target, source, stream=stream)
        session.testing.plan_fault("stream_wait_event", 1, 999)
        with pytest.raises(cumem.CudaError) as caught:
            handle.order(cumem.Stream())
        session.testing.plan_fault(None, 0)
        assert caught.value.code == 999
        assert not handle.done
    handle.wait()
    assert handle.progress == handle.nbytes
    assert (target.numpy() == 3).all()


def test_arguments_are_checked_before_anything_starts(runtime) -> None:
    buffer = cumem.empty_device(1, "f4")
    with pytest.raises(TypeError, match="stream"):
        cumem.copy_async(buffer, np.zeros(1, "f4"), stream="soon")
    with pytest.raises(TypeError):
        cumem.copy_async(buffer, np.zeros(1, "f8"))
    assert session.testing.pending_transfers() == 0


# -- held up -------------------------------------------------------------------------------


def test_background_copy_never_holds_up_its_caller(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 3, "u1", "pinned")
    buffer, last = cumem.empty_device(5000, "u1"), cumem.empty_device(5000, "u1")
    out = np.zeros(5000, "u1")
    with session.rescued(stream), session.gate(stream):
        buffer.fill(7, stream=stream)
        # A worker makes the first copy, and the others are queued after it.
        first = cumem.copy_async(out, buffer)
        second = cumem.copy_async(buffer, source)
        third = cumem.copy_async(last, buffer)
        assert not any(transfer.done for transfer in (first, second, third))
    for transfer in (third, second, first):
        transfer.wait()
    assert (out == 7).all()
    assert (values.get(buffer) == 3).all()
    assert (values.get(last) == 3).all()


@pytest.mark.parametrize("what", ["download", "upload", "host"])
def test_any_number_of_held_copies_leaves_the_others_running(emulated, what) -> None:
    """Nine copies wait for streams whose gates are shut. Later copies of other memory
    must still end.
    """
    streams = [cumem.Stream() for _ in range(9)]
    nbytes = 48 << 20 if what in ("download", "upload") else 5000
    if what == "host":
        sources = [cumem.full(nbytes, 3, "u1", "pinned") for _ in streams]
    else:
        sources = [cumem.full(nbytes, 3, "u1", "device") for _ in streams]
    targets = [np.zeros(nbytes, "u1") for _ in streams]
    data = np.full(nbytes, 5, "u1")
    cumem.Device(0).synchronize()
    with contextlib.ExitStack() as gates:
        for stream in streams:
            gates.enter_context(session.gate(stream))
        held = []
        for stream, source, target in zip(streams, sources, targets, strict=True):
            if what == "host":
                other = cumem.empty_device(nbytes, "u1")
                cumem.copy_async(source, other, stream=stream)
            else:
                source.fill(4, stream=stream)
            ends = (source, data) if what == "upload" else (target, source)
            held.append(cumem.copy_async(*ends))
        out = np.zeros(5000, "u1")
        cumem.copy_async(out, np.full(5000, 9, "u1")).wait(timeout=session.PATIENCE)
        assert (out == 9).all()
        buffer = cumem.empty_device(5000, "u1")
        cumem.copy_async(buffer, out).wait(timeout=session.PATIENCE)
        assert not any(transfer.done for transfer in held)
    for transfer in held:
        transfer.wait()
    for source, target in zip(sources, targets, strict=True):
        if what == "upload":
            assert (values.get(source) == 5).all()
        elif what != "host":
            assert (target == 4).all()


@pytest.mark.parametrize(
    "wait",
    [
        lambda transfer, stream: transfer.wait(),
        lambda transfer, stream: transfer.order(stream),
        lambda transfer, stream: stream.wait(transfer),
    ],
    ids=["wait", "order", "stream"],
)
def test_signal_ends_the_waiting_and_not_the_copy(emulated, wait) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    buffer, out = cumem.empty_device(5000, "u1"), np.zeros(5000, "u1")
    with session.alarm(stream):
        buffer.fill(7, stream=stream)
        transfer = cumem.copy_async(out, buffer)
        try:
            wait(transfer, other)
        finally:
            assert not transfer.done
    transfer.wait()
    assert (out == 7).all()


def test_signal_ends_a_copy_that_waits_for_its_stream(emulated) -> None:
    stream = cumem.Stream()
    # This is more than the staging ring holds.
    source = np.full(48 << 20, 7, "u1")
    buffer = cumem.empty_device(48 << 20, "u1")
    with session.alarm(stream):
        cumem.copy_async(buffer, source, stream=stream)
    stream.synchronize()


def test_signal_ends_a_copy_that_waits_for_another(emulated) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    buffer, out = cumem.empty_device(5000, "u1"), np.zeros(5000, "u1")
    source = cumem.full(5000, 3, "u1", "pinned")
    buffer.fill(7, stream=stream)
    with session.alarm(stream):
        buffer.fill(8, stream=stream)
        first = cumem.copy_async(out, buffer)
        cumem.copy_async(buffer, source, stream=other)
    first.wait()
    other.synchronize()
    assert (out == 8).all()
    assert (values.get(buffer) == 8).all()


def test_signal_ends_a_copy_between_hosts_on_a_stream(emulated) -> None:
    stream = cumem.Stream()
    out = np.zeros(5000, "u1")
    with session.alarm(stream):
        cumem.copy_async(out, np.ones(5000, "u1"), stream=stream)
    assert not out.any()


@pytest.mark.parametrize("limit", [0, 4 << 20])
@pytest.mark.parametrize("way", ["blocking", "background", "stream"])
def test_copies_of_ordinary_memory_do_without_pinned_memory(
    emulated, limit, way
) -> None:
    def copy(target, source) -> None:
        if way == "blocking":
            cumem.copy(target, source)
        else:
            stream = cumem.Stream() if way == "stream" else None
            cumem.copy_async(target, source, stream=stream).wait()

    cumem.set_limit("pinned", limit)
    for nbytes in (1000, 1 << 20, 20 << 20):
        data = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), "u1")
        buffer, out = cumem.empty_device(nbytes, "u1"), np.zeros(nbytes, "u1")
        copy(buffer, data)
        copy(out, buffer)
        assert (out == data).all()
        out[:] = 0
        copy(buffer[: nbytes // 2], data[::2])
        copy(out[::-2], buffer[: nbytes // 2])
        assert (out[::-2] == data[::2]).all()
        assert not out[::2][: nbytes // 2].any()


class Counted(np.ndarray):
    """An array that can be referred to weakly."""


@pytest.mark.parametrize(
    "call",
    [
        lambda device, array: cumem.copy(device, array),
        lambda device, array: cumem.copy(array, device),
        lambda device, array: cumem.copy(device[: array.size], array[::1]),
        lambda device, array: cumem.copy_async(array, device, stream=cumem.Stream()),
        lambda device, array: cumem.copy_many([(device, array)]),
        lambda device, array: cumem.copy_many([(device, array), (array, device)]),
        lambda device, array: cumem.broadcast([device], array),
        lambda device, array: cumem.gather(array, [device]),
    ],
    ids=[
        "up",
        "down",
        "sliced",
        "on-stream",
        "many",
        "touching",
        "broadcast",
        "gather",
    ],
)
@pytest.mark.parametrize("n", [256, 5 << 20])
def test_call_that_waited_keeps_nothing_alive(runtime, n, call) -> None:
    """The call must let go of its arrays even if the main thread, which is in a C call
    here, runs no Python until later.
    """
    device = cumem.zeros(n, "u1", "device")
    alive: list[bool] = []

    def work() -> None:
        array = np.zeros(n, "u1").view(Counted)
        call(device, array)
        reference = weakref.ref(array)
        del array
        alive.append(reference() is not None)

    libc = ctypes.CDLL(None)
    read_end, write_end = os.pipe()

    def work_and_tell() -> None:
        try:
            work()
        finally:
            os.write(write_end, b"x")

    thread = threading.Thread(target=work_and_tell)
    thread.start()
    landing = ctypes.create_string_buffer(1)
    # The main thread runs no Python until the other thread ends.
    assert libc.read(read_end, landing, 1) == 1
    thread.join()
    os.close(read_end)
    os.close(write_end)
    assert alive == [False]
