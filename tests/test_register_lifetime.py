# SPDX-License-Identifier: Apache-2.0
"""register(): memory that is shared between registrations, and how each ends."""

from __future__ import annotations

import gc
import os
import sysconfig
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from support import session, values

import cumem

testing = session.testing

PAGE = os.sysconf("SC_PAGE_SIZE")


# -- sharing and lifetime --------------------------------------------------------------


def test_overlapping_registrations_share(runtime) -> None:
    data = np.arange(100_000, dtype="u1") % 251
    whole = cumem.register(data)
    part = cumem.register(data[1000:50_000])
    again = cumem.register(data)
    whole.close()
    again.close()
    values.round_trip(part.buffer)
    part.close()
    assert testing.registrations() == 0


def test_parts_of_one_page(runtime) -> None:
    data = np.zeros(2 * PAGE, "u1")
    parts = [cumem.register(data[i : i + 10]) for i in range(0, 2 * PAGE, 1000)]
    for part in parts[::2]:
        part.close()
    for part in parts[1::2]:
        values.round_trip(part.buffer)
        part.close()
    assert testing.registrations() == 0


def test_copy_over_the_edge_of_a_registration(runtime) -> None:
    data = np.random.default_rng(0).integers(0, 256, 64 * PAGE, dtype="u1")
    with cumem.register(data[10 * PAGE : 20 * PAGE]):
        device = cumem.empty_device(data.shape, "u1")
        cumem.copy(device, data)
        assert (values.get(device) == data).all()
        target = np.zeros_like(data)
        with cumem.register(target[5 * PAGE + 3 : 40 * PAGE]):
            cumem.copy(target, device)
        assert (target == data).all()


def test_copy_of_a_neighbour_on_a_locked_page(runtime) -> None:
    heap = np.random.default_rng(0).integers(0, 256, 8 * PAGE, dtype="u1")
    before = heap[PAGE + 5 : 2 * PAGE + 100]
    behind = heap[4 * PAGE + 200 : 6 * PAGE]
    rows = [part[:PAGE].reshape(64, -1)[:, 3:-5] for part in (before, behind)]
    with cumem.register(heap[2 * PAGE + 100 : 4 * PAGE + 200]):
        for neighbour in (before, behind, *rows):
            expected = neighbour.copy()
            device = cumem.empty_device(neighbour.shape, "u1")
            cumem.copy(device, neighbour)
            neighbour[...] = 0
            cumem.copy(neighbour, device)
            assert (neighbour == expected).all()
            cumem.copy_async(device, neighbour).wait()
            neighbour[...] = 0
            cumem.copy_async(neighbour, device).wait()
            assert (neighbour == expected).all()


def test_last_reference_unregisters(runtime) -> None:
    class Array(np.ndarray):
        pass

    data = np.zeros(1000).view(Array)
    owner = weakref.ref(data)
    registration = cumem.register(data)
    view = registration.buffer[10:20]
    del data, registration
    gc.collect()
    assert owner() is not None
    assert testing.registrations() >= 1
    values.round_trip(view)
    del view
    gc.collect()
    testing.poll()
    assert testing.registrations() == 0
    assert owner() is None


def test_close_refuses_while_exported(runtime) -> None:
    data = np.zeros(1000)
    registration = cumem.register(data)
    export = memoryview(registration.buffer)
    with pytest.raises(BufferError, match="1 live export"):
        registration.close()
    assert registration.buffer.shape == (1000,)
    assert testing.registrations() >= 1
    export.release()
    buffer = registration.buffer
    registration.close()
    registration.close()
    assert testing.registrations() == 0
    with pytest.raises(ValueError, match="closed"):
        _ = registration.buffer
    with pytest.raises(ValueError, match="closed"):
        buffer[0]
    with pytest.raises(ValueError, match="closed"):
        registration.__enter__()
    assert "closed" in repr(registration)


def test_views_are_closed_with_the_registration(runtime) -> None:
    registration = cumem.register(np.zeros(1000))
    view = registration.buffer[10:20]
    registration.close()
    with pytest.raises(ValueError, match="closed"):
        view.numpy()


def test_block_ended_while_exported_defers(runtime) -> None:
    data = np.arange(1000)
    with cumem.register(data) as buffer:
        array = buffer.numpy()[5:10]
    with pytest.raises(ValueError, match="closed"):
        buffer.numpy()
    assert (array == data[5:10]).all()
    del array, buffer
    gc.collect()
    testing.poll()
    assert testing.registrations() == 0


def test_exception_in_the_block_passes_through(runtime) -> None:
    with pytest.raises(ZeroDivisionError), cumem.register(np.zeros(10)):
        raise ZeroDivisionError
    assert testing.registrations() == 0


def assert_waits_for(stream: cumem.Stream, let_go: Callable[[], object]) -> None:
    """`let_go`, which ends a registration, ends only when the stream's work has."""
    done = threading.Event()

    def run() -> None:
        let_go()
        done.set()

    with session.gate(stream):
        stream.record()
        thread = threading.Thread(target=run)
        thread.start()
        assert not done.wait(0.02)
        assert testing.registrations() >= 1
    thread.join()
    assert testing.registrations() == 0


def test_close_waits_for_streams_that_use_it(emulated) -> None:
    stream = cumem.Stream()
    registration = cumem.register(np.zeros(1000))
    registration.buffer.record_stream(stream)
    assert_waits_for(stream, registration.close)


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="free-threaded Python frees in the thread that made it, which holds the gate",
)
def test_last_reference_waits_for_streams_that_use_it(emulated) -> None:
    stream = cumem.Stream()
    keep = [cumem.register(np.zeros(1000)).buffer]
    keep[0].record_stream(stream)
    assert_waits_for(stream, keep.clear)


def test_transfer_under_way_keeps_it_locked(emulated) -> None:
    stream = cumem.Stream()
    data = np.arange(1000, dtype="i4")
    target = cumem.empty_device(1000, "i4")
    with session.gate(stream):
        registration = cumem.register(data)
        transfer = cumem.copy_async(target, registration.buffer, stream=stream)
        del registration
        gc.collect()
        assert testing.registrations() >= 1
    transfer.wait()
    assert (values.get(target) == np.arange(1000)).all()
    del transfer
    gc.collect()
    testing.poll()
    assert testing.registrations() == 0


def test_shutdown_unregisters(runtime) -> None:
    data = np.zeros(1000)
    registration = cumem.register(data)
    cumem.shutdown()
    with pytest.raises(ValueError, match="closed"):
        registration.buffer.numpy()
    registration.close()
    del registration
    with cumem.register(data):
        pass


def test_attributes_and_repr(runtime) -> None:
    data = np.zeros((10, 100), "i4")
    registration = cumem.register(data[::2])
    assert registration.nbytes == 8 * 400 + 400
    assert registration.buffer.nbytes == 5 * 400
    assert "3600 bytes" in repr(registration)
    assert weakref.ref(registration)() is registration


def test_registering_releases_the_gil(emulated) -> None:
    testing.delay_op("host_register", 20_000)
    ticks = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            ticks.append(1)
            stop.wait(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    while not ticks:
        pass
    before = len(ticks)
    with cumem.register(np.zeros(10)):
        during = len(ticks)
    stop.set()
    thread.join()
    testing.delay_op("host_register", 0)
    assert during > before
