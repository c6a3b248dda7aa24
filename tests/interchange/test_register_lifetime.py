# SPDX-License-Identifier: Apache-2.0
"""Registrations that share memory or pages, and how each of them ends.

Copies of an array, of its neighbours on a page, and of buffers made from it are behind
a shut gate while its registration ends. The pages must stay locked until the copies are
done.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sysconfig
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from support import exporters, session, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

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


def send_many(dst, src, stream) -> None:
    cumem.copy_many_async([(dst, src)], stream=stream)


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


@pytest.mark.parametrize("cut", [10, 4 * PAGE, 5 * PAGE])
def test_many_pieces_over_the_edge_of_two_registrations_arrive(runtime, cut) -> None:
    heap = np.random.default_rng(0).integers(0, 256, 9 * PAGE, dtype="u1")
    data = heap[-heap.ctypes.data % PAGE :][: 8 * PAGE]
    expected = data.copy()
    with cumem.register(data[: 4 * PAGE]), cumem.register(data) as buffer:
        for source in (data, buffer):
            device = cumem.zeros(data.shape, "u1")
            pairs = [(device[:cut], source[:cut]), (device[cut:], source[cut:])]
            cumem.copy_many(pairs)
            assert (values.get(device) == expected).all()
            data[:] = 0
            cumem.copy_many((src, dst) for dst, src in pairs)
            assert (data == expected).all()
            del pairs


@pytest.mark.parametrize("on_stream", [False, True])
def test_later_pair_that_touches_one_over_the_edge_comes_after_it(
    runtime, on_stream
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 8 * PAGE), "u1")
    sevens = cumem.array(np.full(PAGE, 7, "u1"), kind="device")
    stream = cumem.Stream() if on_stream else None
    with cumem.register(memory[2 * PAGE : 4 * PAGE]) as locked:
        for target in (locked[:PAGE], memory[2 * PAGE : 3 * PAGE]):
            memory[:] = 1
            out = np.zeros(2 * PAGE, "u1")
            over_edge = memory[PAGE : 3 * PAGE]
            cumem.copy_many([(out, over_edge), (target, sevens)], stream=stream)
            assert (out == 1).all()
            assert memory.sum(dtype=int) == 8 * PAGE + 6 * PAGE
            del target


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


@pytest.mark.parametrize("send", [cumem.copy_async, send_many])
def test_neighbour_on_a_locked_page_is_read_before_the_call_returns(
    emulated, send
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, PAGE), "u1")
    neighbours = memory[:1000], memory[2000:]
    stream = cumem.Stream()
    with cumem.register(memory[1000:2000]) as locked:
        assert cumem.asbuffer(memory[1000:2000]).kind == "pinned"
        for neighbour in neighbours:
            assert cumem.asbuffer(neighbour).kind == "pageable"
            memory[:] = 1
            device = cumem.empty_device(neighbour.shape, "u1", stream=stream)
            with session.gate(stream):
                send(device, neighbour, stream=stream)
                neighbour[:] = 2
            assert (values.get(device) == 1).all()
        # Now both registrations share the page.
        with cumem.register(neighbours[0]):
            assert cumem.asbuffer(memory[:2000]).kind == "pinned"
        assert (locked.numpy() == 1).all()


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
    """Check that `let_go`, which ends a registration, waits for the stream's work."""
    done = threading.Event()

    def run() -> None:
        let_go()
        done.set()

    with session.gate(stream):
        stream.record()
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not done.is_set()
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
    reason="free-threaded Python frees the buffer in the thread that holds the gate",
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


# -- copies of the array, which know nothing of its registration ------------------------


def ways_to_end() -> list[tuple[str, Callable[[list[cumem.types.Registration]], None]]]:
    """Return the ways in which a program can end a registration, by name."""
    return [
        ("close", lambda held: held.pop().close()),
        ("drop", lambda held: held.clear()),
    ]


@pytest.fixture(params=ways_to_end(), ids=lambda way: way[0])
def end(
    request: pytest.FixtureRequest,
) -> Callable[[list[cumem.types.Registration]], None]:
    """Return a function that ends the only registration of a list."""
    return request.param[1]


def check_copies_outlive(
    emulated: session.Runtime,
    registered: np.ndarray,
    array: np.ndarray,
    end: Callable[[list[cumem.types.Registration]], None],
    *,
    background: bool,
) -> None:
    """Queue copies of `array`, end the registration, and then let the copies be made."""
    array[...] = np.random.default_rng(0).integers(0, 99, array.shape)
    expected = array.copy()
    stream = cumem.Stream()
    up = cumem.zeros(array.shape, array.dtype)
    down = cumem.zeros(array.shape, array.dtype)
    held = [cumem.register(registered)]
    with session.gate(stream):
        up.record_stream(stream)
        stream.record()
        given = None if background else stream
        transfers = [
            cumem.copy_async(up, array, stream=given),
            cumem.copy_many_async([(down, array)], stream=given),
        ]
        end(held)
        gc.collect()
        assert testing.registrations() == 1
    for transfer in transfers:
        transfer.wait()
    del transfers
    assert (values.get(up) == expected).all()
    assert (values.get(down) == expected).all()
    assert testing.registrations() == 0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("nbytes", [100, 1 << 20])
def test_registration_that_ends_under_a_copy_of_its_array_keeps_the_pages(
    emulated, end, nbytes, background
) -> None:
    data = np.zeros(nbytes, "u1")
    check_copies_outlive(emulated, data, data, end, background=background)


@pytest.mark.parametrize("background", [False, True])
def test_registration_that_ends_under_a_copy_of_a_neighbour_keeps_the_pages(
    emulated, end, background
) -> None:
    heap = np.zeros(3 * PAGE, "u1")
    page = heap[-heap.ctypes.data % PAGE :][:PAGE]
    check_copies_outlive(
        emulated, page[:1000], page[2000:3000], end, background=background
    )


@pytest.mark.parametrize("background", [False, True])
def test_registration_that_ends_under_a_strided_copy_keeps_the_pages(
    emulated, end, background
) -> None:
    data = np.zeros((300, 100), "f4")
    check_copies_outlive(emulated, data, data[::2, 10:50], end, background=background)


VIEWS = {
    "array": lambda data: data,
    "memoryview": memoryview,
    "dlpack": lambda data: exporters.FakeDLPack(exporters.Produced.over(data)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_buffer_made_of_registered_memory_keeps_the_pages(emulated, end, view) -> None:
    data = np.arange(PAGE, dtype="u1")
    exported = VIEWS[view](data)
    held = [cumem.register(data)]
    buffer = cumem.asbuffer(exported)
    assert buffer.kind == "pinned"
    end(held)
    assert testing.registrations() == 1
    device = cumem.zeros(PAGE // 2, "u1")
    cumem.copy(device, buffer[::2])  # A kernel reads the memory where it lies.
    cumem.copy_many([(device[:9], buffer[:9]), (device[9:18], buffer[100:109])])
    expected = data[::2].copy()
    expected[:18] = [*data[:9], *data[100:109]]
    assert (values.get(device) == expected).all()
    del buffer
    assert testing.registrations() == 0


def pairs_of(device: cumem.Buffer, data: np.ndarray) -> list[tuple[object, object]]:
    return [(device[:1000], data[100:1100]), (device[1000:2000], data[1500:2500])]


#: These calls copy an array while a part of the same page is registered and released.
BESIDE = {
    "copy": lambda dev, data: cumem.copy(dev[:1000], data[100:1100]),
    "strided": lambda dev, data: cumem.copy_async(dev[:1000], data[100:2100:2]).wait(),
    "back": lambda dev, data: cumem.copy_async(data[100:2100:2], dev[:1000]).wait(),
    "background": lambda dev, data: cumem.copy_async(dev, data[100:3100]).wait(),
    "many": lambda dev, data: cumem.copy_many(pairs_of(dev, data)),
}


@pytest.mark.parametrize("call", BESIDE)
def test_copies_beside_registrations_that_come_and_go_on_their_page_succeed(
    emulated, call
) -> None:
    """What the driver answered before a copy must stay true until the copy is done."""
    heap = np.zeros(3 * PAGE, "u1")
    page = heap[-heap.ctypes.data % PAGE :][:PAGE]
    device = cumem.empty_device(3000, "u1")
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            with cumem.register(page[:10]):
                pass

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(500):
            BESIDE[call](device, page)
    finally:
        stop.set()
        thread.join()


def test_registration_that_ends_under_a_copy_into_its_array_keeps_the_pages(
    emulated, end
) -> None:
    data = np.zeros(1 << 20, "u1")
    device = cumem.full(1 << 20, 7, "u1")
    stream = cumem.Stream()
    held = [cumem.register(data)]
    with session.gate(stream):
        transfer = cumem.copy_async(data, device, stream=stream)
        end(held)
        assert testing.registrations() == 1
    transfer.wait()
    assert (data == 7).all()
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
    assert "3.5 KiB" in repr(registration)
    assert weakref.ref(registration)() is registration


def test_registering_releases_the_gil(emulated) -> None:
    with cumem.register(np.zeros(10)):
        assert testing.fault_count("host_register") == 1
    assert testing.fault_count("host_unregister") == 1
    assert not {"host_register", "host_unregister"} & set(testing.calls_with_gil())


@pytest.mark.parametrize("view", VIEWS)
def test_pages_of_an_import_are_unlocked_after_the_work_that_was_recorded(
    emulated, view
) -> None:
    """The work is another library's, and cumem knows of it only by record_stream()."""
    data = np.arange(PAGE, dtype="u1")
    held = cumem.register(data)
    buffer = cumem.asbuffer(VIEWS[view](data))
    gc.collect()  # The exporter is gone, but not its export.
    del held
    assert testing.registrations() == 1
    stream = cumem.Stream()
    seen: list[int] = []

    def let_go() -> None:
        while testing.fault_count("stream_synchronize") == before:
            pass
        seen.append(testing.registrations())
        testing.gate_open(stream)

    session.shut(stream)
    cumem.empty_device(8, "u1", stream=stream).fill(1, stream=stream)
    buffer.record_stream(stream)
    before = testing.fault_count("stream_synchronize")
    opener = threading.Thread(target=let_go)
    opener.start()
    del buffer
    opener.join()
    assert seen == [1]
    assert testing.registrations() == 0


def test_shutdown_beside_the_end_of_imports_is_refused_or_whole(emulated) -> None:
    """The import has the last share of several registered pieces. It unlocks them without
    the GIL, so that shutdown() can run meanwhile.
    """
    for _ in range(30):
        data = np.zeros(6 * PAGE, "u1")
        page = data[-data.ctypes.data % PAGE :]
        held = [cumem.register(page[i * PAGE : (i + 1) * PAGE]) for i in range(4)]
        buffer = [cumem.asbuffer(page[: 4 * PAGE])]
        held.clear()
        thread = threading.Thread(target=buffer.clear)
        thread.start()
        with contextlib.suppress(RuntimeError, BufferError):
            cumem.shutdown()
        thread.join()
        assert testing.registrations() == 0
