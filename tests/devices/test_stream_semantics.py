# SPDX-License-Identifier: Apache-2.0
"""A stream that is done has delivered its bytes, whoever asks and in what way.

Functions for every route and direction start copies on a stream. CUDA and its libraries
have several ways to wait for a stream. After each of them the bytes must be there, although
nobody has waited for a transfer. If the processor does the last step of a copy, it does so
within the call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import session, values

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

# These are numbers of elements: one piece, and several pieces through the staging ring.
SHORT, LONG = 300, 1_500_000
SIZES = {"short": SHORT, "long": LONG}

Check = Callable[[], bool]
Route = Callable[[object, int, int], Check]


def device(n: int, value: int = 0) -> cumem.DeviceBuffer:
    return cumem.full(n, value, "i4", "device")


def is_all(array: np.ndarray, value: int) -> bool:
    return bool((array == value).all())


# Each of these routes starts copies of about `n` numbers, all equal to `i`, on `stream`. It
# returns a function, which the test calls after it has waited. That function says whether
# the numbers have arrived. `down` means from a device to the host, and `up` the other way.


def down(stream, n, i):
    out = np.zeros(n, "i4")
    cumem.copy_async(out, device(n, i), stream=stream)
    return lambda: is_all(out, i)


def down_into_strided(stream, n, i):
    out = np.zeros(2 * n, "i4")
    cumem.copy_async(out[::2], device(n, i), stream=stream)
    return lambda: is_all(out[::2], i) and is_all(out[1::2], 0)


def down_from_strided(stream, n, i):
    out = np.zeros(n, "i4")
    cumem.copy_async(out, device(2 * n, i)[::2], stream=stream)
    return lambda: is_all(out, i)


def down_turned(stream, n, i):
    out = np.zeros((n // 50, 50), "i4")
    source = cumem.full((50, n // 50), i, "i4", "device")
    cumem.copy_async(out.T, source, stream=stream)
    return lambda: is_all(out, i)


def down_to(kind: str) -> Route:
    def run(stream, n, i):
        out = cumem.zeros(n, "i4", kind)
        cumem.copy_async(out, device(n, i), stream=stream)
        # numpy() waits for work that cumem knows, so the test calls it only after its own
        # wait.
        host = out.numpy

        return lambda: is_all(host(), i)

    return run


def down_to_pinned_strided(stream, n, i):
    out = cumem.zeros(2 * n, "i4", "pinned")
    view = out.numpy()
    cumem.copy_async(out[::2], device(n, i), stream=stream)
    return lambda: is_all(view[::2], i)


def down_to_pinned_in_place(stream, n, i):
    out = cumem.zeros(n, "i4", "pinned")
    # After the wait, the test reads this view without calling cumem.
    view = out.numpy()
    cumem.copy_async(out, device(n, i), stream=stream)
    return lambda: is_all(view, i)


def seen_below(target: cumem.DeviceBuffer, stream: object, i: int) -> Check:
    """Copy what the stream's next work sees in `target` down to pinned memory.

    The test does not read `target` directly, because that could wait for more than the
    stream.
    """
    other = cumem.empty_like(target, kind="device")
    cumem.copy_async(other, target, stream=stream)
    landed = cumem.empty_pinned(target.shape, target.dtype)
    view = landed.numpy()
    cumem.copy_async(landed, other, stream=stream)
    return lambda: is_all(view, i)


def up(stream, n, i):
    source = np.full(n, i, "i4")
    target = device(n)
    cumem.copy_async(target, source, stream=stream)
    # The source was read during the call, so it may change.
    source[:] = -1
    return seen_below(target, stream, i)


def up_from_strided(stream, n, i):
    source = np.full(2 * n, i, "i4")
    target = device(n)
    cumem.copy_async(target, source[::2], stream=stream)
    source[:] = -1
    return seen_below(target, stream, i)


def up_into_strided(stream, n, i):
    source = np.full(n, i, "i4")
    target = device(2 * n, i)
    cumem.copy_async(target[::2], source, stream=stream)
    source[:] = -1
    return seen_below(target, stream, i)


def up_turned(stream, n, i):
    source = np.full((50, n // 50), i, "i4")
    target = cumem.zeros((n // 50, 50), "i4", "device")
    cumem.copy_async(target, source.T, stream=stream)
    source[:] = -1
    return seen_below(target, stream, i)


def up_repeated(stream, n, i):
    target = cumem.zeros((4, n), "i4", "device")
    cumem.copy_async(target, np.full(n, i, "i4"), stream=stream)
    return seen_below(target, stream, i)


def up_from_pinned(stream, n, i):
    target = device(n)
    cumem.copy_async(target, cumem.full(n, i, "i4", "pinned"), stream=stream)
    return seen_below(target, stream, i)


def on_device(stream, n, i):
    target = device(2 * n, i)
    cumem.copy_async(target[::2], device(n, i), stream=stream)
    return seen_below(target, stream, i)


def on_host(stream, n, i):
    out = np.zeros(n, "i4")
    cumem.copy_async(out, np.full(n, i, "i4"), stream=stream)
    return lambda: is_all(out, i)


def pinned_to_ordinary(stream, n, i):
    out = np.zeros(2 * n, "i4")
    source = cumem.zeros(n, "i4", "pinned")
    cumem.copy_async(source, device(n, i), stream=stream)
    cumem.copy_async(out[::2], source, stream=stream)
    return lambda: is_all(out[::2], i)


def ordinary_to_pinned(stream, n, i):
    out = cumem.zeros(n, "i4", "pinned")
    view = out.numpy()
    cumem.copy_async(out, np.full(n, i, "i4"), stream=stream)
    return lambda: is_all(view, i)


def pinned_to_pinned(stream, n, i):
    out = cumem.zeros(n, "i4", "pinned")
    view = out.numpy()
    cumem.copy_async(out, cumem.full(n, i, "i4", "pinned"), stream=stream)
    return lambda: is_all(view, i)


def down_many(stream, n, i):
    outs = [np.zeros(n // k, "i4") for k in (1, 2, 3, 5)]
    pairs = [(out, device(out.size, i)) for out in outs]
    strided = np.zeros(2 * n, "i4")
    pairs.append((strided[::2], device(n, i)))
    cumem.copy_many_async(pairs, stream=stream)
    return lambda: all(is_all(out, i) for out in (*outs, strided[::2]))


def down_many_small(stream, n, i):
    outs = np.zeros((100, n // 100), "i4")
    source = cumem.full(outs.shape, i, "i4", "device")
    cumem.copy_many_async([(outs[k], source[k]) for k in range(100)], stream=stream)
    return lambda: is_all(outs, i)


def many_in_order(stream, n, i):
    """Each pair uses the target of the one before, so the copies must be made in order."""
    out = np.zeros(n, "i4")
    between = device(n)
    pairs = [(between, device(n, i)), (out, between), (between, np.zeros(n, "i4"))]
    cumem.copy_many_async(pairs, stream=stream)
    return lambda: is_all(out, i)


def up_many(stream, n, i):
    sources = [np.full(n // k, i, "i4") for k in (1, 2, 3, 5)]
    targets = [device(source.size) for source in sources]
    cumem.copy_many_async(list(zip(targets, sources, strict=True)), stream=stream)
    for source in sources:
        source[:] = -1
    checks = [seen_below(target, stream, i) for target in targets]
    return lambda: all(check() for check in checks)


def gather_down(stream, n, i):
    out = np.zeros(3 * n, "i4")
    cumem.gather_async(out, [device(n, i) for _ in range(3)], stream=stream)
    return lambda: is_all(out, i)


def scatter_up(stream, n, i):
    targets = [device(n) for _ in range(3)]
    cumem.scatter_async(targets, np.full(3 * n, i, "i4"), stream=stream)
    checks = [seen_below(target, stream, i) for target in targets]
    return lambda: all(check() for check in checks)


def broadcast_down(stream, n, i):
    outs = [np.zeros(n, "i4") for _ in range(3)]
    cumem.broadcast_async(outs, device(n, i), stream=stream)
    return lambda: all(is_all(out, i) for out in outs)


def broadcast_up(stream, n, i):
    targets = [device(n) for _ in range(3)]
    cumem.broadcast_async(targets, np.full(n, i, "i4"), stream=stream)
    checks = [seen_below(target, stream, i) for target in targets]
    return lambda: all(check() for check in checks)


def fill_of(kind: str, step: int) -> Route:
    """Return the route that fills every `step`-th element of memory of this kind."""

    def run(stream, n, i):
        target = cumem.zeros(n * step, "i4", kind)
        if kind == "device":
            target[::step].fill(i, stream=stream)
            return seen_below(target[::step], stream, i)
        view = target.numpy()
        target[::step].fill(i, stream=stream)
        return lambda: is_all(view[::step], i)

    return run


def fill_of_ordinary(stream, n, i):
    out = np.zeros(n, "i4")
    cumem.asbuffer(out).fill(i, stream=stream)
    return lambda: is_all(out, i)


ROUTES: dict[str, Route] = {
    run.__name__: run
    for run in (
        down,
        down_into_strided,
        down_from_strided,
        down_turned,
        down_to_pinned_strided,
        down_to_pinned_in_place,
        up,
        up_from_strided,
        up_into_strided,
        up_turned,
        up_repeated,
        up_from_pinned,
        on_device,
        on_host,
        pinned_to_ordinary,
        ordinary_to_pinned,
        pinned_to_pinned,
        down_many,
        down_many_small,
        many_in_order,
        up_many,
        gather_down,
        scatter_up,
        broadcast_down,
        broadcast_up,
        fill_of_ordinary,
    )
} | {
    "down_to_mapped": down_to("mapped"),
    "down_to_managed": down_to("managed"),
    "fill_device": fill_of("device", 1),
    "fill_device_strided": fill_of("device", 3),
    "fill_pinned": fill_of("pinned", 1),
    "fill_pinned_strided": fill_of("pinned", 3),
}


# -- ways to wait ------------------------------------------------------------------------


def synchronize(stream: cumem.Stream) -> None:
    stream.synchronize()


def event_after(stream: cumem.Stream) -> None:
    cumem.Event().record(stream).synchronize()


def whole_device(stream: cumem.Stream) -> None:
    stream.device.synchronize()


def polling(stream: cumem.Stream) -> None:
    while not stream.done:
        pass


def other_stream(stream: cumem.Stream) -> None:
    other = cumem.Stream()
    other.wait(stream)
    other.synchronize()


def other_thread(stream: cumem.Stream) -> None:
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    thread.join()


WAITS = [
    synchronize,
    event_after,
    whole_device,
    polling,
    other_stream,
    other_thread,
]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("route", ROUTES)
def test_bytes_are_there_once_the_stream_is_done(runtime, route, size, wait) -> None:
    stream = cumem.Stream()
    for i in range(1, 4):
        check = ROUTES[route](stream, SIZES[size], i)
        wait(stream)
        assert check(), f"the bytes were not there in round {i}"


@pytest.mark.parametrize("route", ROUTES)
def test_default_streams_mean_the_same(runtime, route) -> None:
    for handle in (0, 1, 2):
        check = ROUTES[route](handle, LONG, 5)
        cumem.Stream.from_external(handle).synchronize()
        assert check(), f"the bytes were not there on stream {handle}"


# -- with a gate, which makes the order certain ------------------------------------------


#: Between these ends, the processor makes the last step of a copy.
HOST_ENDED = {
    "down": lambda n: (np.zeros(n, "i4"), device(n, 7)),
    "down_into_strided": lambda n: (np.zeros(2 * n, "i4")[::2], device(n, 7)),
    "down_from_strided": lambda n: (np.zeros(n, "i4"), device(2 * n, 7)[::2]),
    "on_host": lambda n: (np.zeros(n, "i4"), np.full(n, 7, "i4")),
    "from_pinned": lambda n: (
        np.zeros(2 * n, "i4")[::2],
        cumem.full(n, 7, "i4", "pinned"),
    ),
}


class Call(threading.Thread):
    """A call in a second thread, which may have to wait.

    After join(), `done` is what it returned and `error` what it raised.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call
        self.done: object = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.done = self.call()
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ends", HOST_ENDED)
def test_what_the_host_writes_is_written_in_the_call(
    emulated, ends, size, many
) -> None:
    """The call returns only when the stream has reached the copy and the bytes are at
    the target.
    """
    n = SIZES[size]
    stream = cumem.Stream()
    pairs = [HOST_ENDED[ends](n) for _ in range(3 if many else 1)]
    late = [0] * len(pairs)
    cumem.Device(0).synchronize()

    def call() -> tuple[bool, bool]:
        if many:
            transfer = cumem.copy_many_async(pairs, stream=stream)
        else:
            transfer = cumem.copy_async(*pairs[0], stream=stream)
        return transfer.done, all(is_all(out, 7) for out, _ in pairs)

    with session.gate(stream):
        # The copies are queued behind a shut gate, so that a copy that is made too
        # early is noticed.
        blocker = device(10)
        blocker.fill(1, stream=stream)
        thread = Call(call)
        while not session.testing.pending_transfers() and thread.is_alive():
            pass
        assert thread.is_alive()
        for index, (out, _) in enumerate(pairs):
            late[index] = int((out == 7).sum())
    thread.join()
    assert thread.error is None
    assert late == [0] * len(pairs)
    assert thread.done == (True, True)


#: Between these ends, the device makes the last step of a copy.
DEVICE_ENDED = {
    "up_from_pinned": lambda n: (device(n), cumem.full(n, 7, "i4", "pinned")),
    "down_to_pinned": lambda n: (cumem.zeros(n, "i4", "pinned"), device(n, 7)),
    "down_to_strided_pinned": lambda n: (
        cumem.zeros(2 * n, "i4", "pinned")[::2],
        device(n, 7),
    ),
    "down_to_managed": lambda n: (cumem.zeros(n, "i4", "managed"), device(n, 7)),
    "on_device": lambda n: (device(2 * n)[::2], device(n, 7)),
    "between_pinned": lambda n: (
        cumem.zeros(n, "i4", "pinned"),
        cumem.full(n, 7, "i4", "pinned"),
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ends", DEVICE_ENDED)
def test_what_the_device_writes_is_only_queued(emulated, ends, size) -> None:
    stream = cumem.Stream()
    dst, src = DEVICE_ENDED[ends](SIZES[size])
    cumem.Device(0).synchronize()
    with session.gate(stream):
        transfer = cumem.copy_async(dst, src, stream=stream)
        many = cumem.copy_many_async([(dst, src)], stream=stream)
        assert not transfer.done
        assert not many.done
    stream.synchronize()
    assert is_all(values.get(dst), 7)


def test_ordinary_source_is_read_in_the_call_on_a_shut_stream(emulated) -> None:
    stream = cumem.Stream()
    target = device(SHORT)
    source = np.full(SHORT, 7, "i4")
    with session.gate(stream):
        transfer = cumem.copy_async(target, source, stream=stream)
        source[:] = -1
        assert not transfer.done
    stream.synchronize()
    assert is_all(values.get(target), 7)


def test_calls_that_wait_hold_up_nobody_else(emulated) -> None:
    """Nine calls wait for streams whose gates are shut. Copies on other streams must
    still end.
    """
    streams = [cumem.Stream() for _ in range(9)]
    sources = [device(LONG, 3) for _ in streams]
    outs = [np.zeros(LONG, "i4") for _ in streams]
    cumem.Device(0).synchronize()
    gates = [session.gate(stream) for stream in streams]
    for gate in gates:
        gate.__enter__()
    calls = [
        Call(lambda ends=ends: cumem.copy_async(ends[0], ends[1], stream=ends[2]))
        for ends in zip(outs, sources, streams, strict=True)
    ]
    while session.testing.pending_transfers() < len(streams):
        pass
    free = cumem.Stream()
    check = down(free, LONG, 9)
    free.synchronize()
    assert check()
    background = np.zeros(LONG, "i4")
    cumem.copy_async(background, device(LONG, 4)).wait()
    assert is_all(background, 4)
    for gate in gates:
        gate.__exit__(None, None, None)
    for call in calls:
        call.join()
        assert call.error is None
    assert all(is_all(out, 3) for out in outs)


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("ends", HOST_ENDED)
def test_waiting_call_hears_an_interrupt(emulated, ends, many) -> None:
    stream = cumem.Stream()
    pairs = [HOST_ENDED[ends](LONG) for _ in range(3 if many else 1)]
    cumem.Device(0).synchronize()
    with session.alarm(stream):
        device(10).fill(1, stream=stream)
        if many:
            cumem.copy_many_async(pairs, stream=stream)
        else:
            cumem.copy_async(*pairs[0], stream=stream)
    stream.synchronize()
    # Later copies work as before.
    cumem.copy(*pairs[0], stream=stream)
    assert is_all(pairs[0][0], 7)


def test_failure_of_the_last_step_is_raised_by_the_call(emulated) -> None:
    stream = cumem.Stream()
    out, source = np.zeros(LONG, "i4"), device(LONG, 7)
    cumem.Device(0).synchronize()
    session.testing.plan_fault("copy_async", 2)
    with pytest.raises(cumem.CudaError, match="cudaMemcpyAsync"):
        cumem.copy_async(out, source, stream=stream)
    session.testing.plan_fault(None, 0)
    check = down(stream, LONG, 8)
    stream.synchronize()
    assert check()


# -- graphs ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ends", HOST_ENDED)
def test_graph_holds_nothing_that_the_host_finishes(emulated, ends, size) -> None:
    stream = cumem.Stream()
    dst, src = HOST_ENDED[ends](SIZES[size])
    cumem.Device(0).synchronize()
    session.testing.set_capturing(stream, True)
    try:
        for call in (
            lambda: cumem.copy_async(dst, src, stream=stream),
            lambda: cumem.copy_many_async([(dst, src)] * 2, stream=stream),
        ):
            with pytest.raises(cumem.CudaError, match="captur"):
                call()
    finally:
        session.testing.set_capturing(stream, False)
    assert is_all(dst, 0)


# -- the default stream of each thread ---------------------------------------------------


def on_no_shared_stream(n: int) -> cumem.DeviceBuffer:
    """Return a buffer without any work on the legacy stream.

    The legacy stream waits for the per-thread streams, and would hide a missing wait.
    """
    buffer = cumem.empty_device(n, "u1", stream=2)
    cumem.Device(0).synchronize()
    return buffer


class Queued:
    """A second thread that fills `buffer` with 7 on its own default stream, which is
    shut.
    """

    def __init__(self, buffer: cumem.Buffer, make: Callable[[], object]) -> None:
        self.queued, self.go_on = threading.Event(), threading.Event()

        def work() -> None:
            stream = make()
            own = cumem.Stream.from_external(2)
            session.shut(own)
            buffer.fill(7, stream=stream)
            self.queued.set()
            self.go_on.wait(session.PATIENCE)
            session.testing.gate_open(own)
            own.synchronize()

        self.thread = threading.Thread(target=work)
        self.thread.start()
        assert self.queued.wait(session.PATIENCE)

    def finish(self) -> None:
        self.go_on.set()
        self.thread.join()


READS: dict[str, Callable[[cumem.Buffer, np.ndarray, object], object]] = {
    "copy": lambda buffer, out, stream: cumem.copy(out, buffer, stream=stream),
    "copy_async": lambda buffer, out, stream: cumem.copy_async(
        out, buffer, stream=stream
    ),
    "background": lambda buffer, out, stream: cumem.copy_async(out, buffer).wait(),
    "copy_many": lambda buffer, out, stream: cumem.copy_many(
        [(out[:9], buffer[:9]), (out[9:], buffer[9:])], stream=stream
    ),
    "gather": lambda buffer, out, stream: cumem.gather(out, [buffer], stream=stream),
    "to_numpy": lambda buffer, out, stream: np.copyto(out, buffer.to_numpy()),
    "follow": lambda buffer, out, stream: cumem.copy(
        out, buffer, stream=cumem.Stream.from_external(2)
    ),
}


@pytest.mark.parametrize("driver", [12040, 13000])
@pytest.mark.parametrize("size", [256, LONG])
@pytest.mark.parametrize("read", READS)
def test_own_stream_of_another_thread_comes_first(read, size, driver) -> None:
    """Handle 2 is the same number in all threads, but means another stream in each."""

    def check() -> None:
        out = np.zeros(size, "u1")
        buffer = on_no_shared_stream(size)
        writer = Queued(buffer, lambda: 2)
        reader = Call(lambda: READS[read](buffer, out, 2))
        while not session.testing.pending_transfers() and reader.is_alive():
            if driver < 12050:
                break  # The call waits for the device before there is a transfer.
        writer.finish()
        reader.join()
        assert reader.error is None
        assert is_all(out, 7)

    with session.opened(driver_version=driver):
        check()


@pytest.mark.parametrize("driver", [12040, 13000])
def test_export_comes_after_the_own_stream_of_another_thread(driver) -> None:
    def check() -> None:
        buffer = on_no_shared_stream(256)
        writer = Queued(buffer, lambda: 2)
        consumer = cumem.Stream()
        order = Call(lambda: session.testing.order_consumer(buffer, consumer))
        # With an older driver, the call itself waits for the device.
        if driver >= 12050:
            order.join()
            assert not consumer.done
        writer.finish()
        order.join()
        assert order.error is None
        landed = cumem.zeros(256, "u1", "pinned")
        array = landed.numpy()
        cumem.copy_async(landed, buffer, stream=consumer)
        consumer.synchronize()
        assert is_all(array, 7)

    with session.opened(driver_version=driver):
        check()


def test_stream_object_means_the_own_stream_of_who_uses_it(emulated) -> None:
    """As in CUDA, an object with handle 2 means the stream of the thread that uses it,
    and not of the one that made it.
    """
    shared = cumem.Stream.from_external(2)
    buffer = on_no_shared_stream(256)
    writer = Queued(buffer, lambda: shared)
    # In this thread it means this thread's stream, which has no work.
    assert shared.done
    shared.synchronize()
    out = np.zeros(256, "u1")
    reader = Call(lambda: cumem.copy(out, buffer, stream=shared))
    while not session.testing.pending_transfers() and reader.is_alive():
        pass
    writer.finish()
    reader.join()
    assert reader.error is None
    assert is_all(out, 7)


def test_same_own_stream_needs_no_wait(emulated) -> None:
    buffer = cumem.empty_device(256, "u1", stream=2)
    target = cumem.empty_device(256, "u1", stream=2)
    before = session.testing.fault_count("stream_wait_event")
    buffer.fill(3, stream=2)
    cumem.copy_async(target, buffer, stream=2)
    assert session.testing.fault_count("stream_wait_event") == before
    cumem.Stream.from_external(2).synchronize()
    assert is_all(values.get(target), 3)


def test_many_copies_on_the_own_stream_of_a_thread(runtime) -> None:
    """Workers unpack the copies.

    In a worker, handle 2 would mean the worker's own stream, but the copies must be made on
    the caller's.
    """
    for i in range(1, 6):
        for route in (down_many, down_many_small, many_in_order, up_many):
            check = route(2, LONG, i)
            cumem.Stream.from_external(2).synchronize()
            assert check()


# -- streams and waits of other libraries ------------------------------------------------


# Each of these functions returns a stream that another library made, and the ways in
# which that library can wait for it.


def foreign_cupy() -> tuple[object, list[Callable[[], None]]]:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    return stream, [
        stream.synchronize,
        cupy.cuda.Device(0).synchronize,
        lambda: stream.record().synchronize(),
        lambda: cupy.cuda.runtime.streamSynchronize(stream.ptr),
    ]


def foreign_cupy_ptds() -> tuple[object, list[Callable[[], None]]]:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream.ptds
    return stream, [stream.synchronize, cupy.cuda.Device(0).synchronize]


def foreign_torch() -> tuple[object, list[Callable[[], None]]]:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()

    def other() -> None:
        second = torch.cuda.Stream()
        second.wait_stream(stream)
        second.synchronize()

    def event() -> None:
        torch.cuda.Event().record(stream)
        stream.record_event().synchronize()

    return stream, [stream.synchronize, torch.cuda.synchronize, event, other]


def foreign_numba() -> tuple[object, list[Callable[[], None]]]:
    numba_cuda = pytest.importorskip("numba.cuda")
    stream = numba_cuda.stream()
    return stream, [stream.synchronize, numba_cuda.synchronize]


def foreign_raw() -> tuple[object, list[Callable[[], None]]]:
    cuda = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p()
    cumem.Device(0).synchronize()
    # By now cumem has made the context, but the context is current in no thread.
    cumem.empty_device(1).fill(0)
    context = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuStreamCreate(ctypes.byref(handle), 1) == 0

    def synchronize() -> None:
        assert cuda.cuStreamSynchronize(handle) == 0

    def whole() -> None:
        assert cuda.cuCtxSynchronize() == 0

    def poll() -> None:
        while cuda.cuStreamQuery(handle):
            pass

    return handle.value, [synchronize, whole, poll]


FOREIGN = [foreign_cupy, foreign_cupy_ptds, foreign_torch, foreign_numba, foreign_raw]


@pytest.mark.gpu
@pytest.mark.parametrize("library", FOREIGN, ids=lambda f: f.__name__.split("_", 1)[1])
@pytest.mark.parametrize("route", ROUTES)
def test_other_libraries_streams_and_waits(cuda, route, library) -> None:
    stream, waits = library()
    for wait in waits:
        for size in SIZES.values():
            for i in range(1, 4):
                check = ROUTES[route](stream, size, i)
                wait()
                assert check(), f"the bytes were not there in round {i} of {size}"


# -- which streams a buffer remembers ---------------------------------------------------


# Each of these functions uses the two ends in copies or fills on a stream.


def use_by_copies(ends, stream) -> None:
    cumem.copy_async(ends[0], ends[1], stream=stream).wait()


def use_by_fills(ends, stream) -> None:
    ends[0].fill(3, stream=stream)


def use_within_one(ends, stream) -> None:
    cumem.copy_async(ends[0][:100], ends[0][100:200], stream=stream)


def use_by_many(ends, stream) -> None:
    cumem.copy_many_async([(ends[0], ends[1])], stream=stream).wait()


def use_by_many_that_wait(ends, stream) -> None:
    ends[0].fill(3, stream=stream)
    cumem.copy_many([(ends[0][:100], ends[1][:100]), (ends[0][200:], ends[1][200:])])


def use_by_strided_pairs(ends, stream) -> None:
    cumem.copy_many_async([(ends[0][::2], ends[1][::2])], stream=stream).wait()


def use_by_broadcast(ends, stream) -> None:
    ends[0].fill(3, stream=stream)
    cumem.broadcast([ends[0]], ends[1])


def wait_for(parts) -> None:
    for part in parts:
        part.wait()


def use_by_gather(ends, stream) -> None:
    parts = [ends[1][:1000], ends[1][1000:]]
    wait_for(cumem.gather_async(ends[0], parts, stream=stream))


def use_by_scatter(ends, stream) -> None:
    parts = [ends[1][:1000], ends[1][1000:3000], ends[1][3000:]]
    wait_for(cumem.scatter_async(parts, ends[0], stream=stream))


def use_by_broadcast_down(ends, stream) -> None:
    targets = [ends[1][:1000], ends[1][1000:2000]]
    wait_for(cumem.broadcast_async(targets, ends[0][:1000], stream=stream))


def use_by_reading(ends, stream) -> None:
    ends[0].fill(3, stream=stream)
    with open(__file__, "rb") as file:
        cumem.fromfile(file, out=ends[0])


#: Each use makes this many copies by the engine.
USES = {
    use_by_copies: 1,
    use_by_fills: 1,
    use_within_one: 1,
    use_by_many: 1,
    use_by_many_that_wait: 1,
    use_by_strided_pairs: 1,
    use_by_broadcast: 1,
    use_by_gather: 2,
    use_by_scatter: 3,
    use_by_broadcast_down: 2,
    use_by_reading: 1,
}


@pytest.mark.parametrize("use", USES)
def test_streams_of_earlier_copies_go_and_are_not_waited_for(emulated, use) -> None:
    ends = (cumem.zeros(4096, "u1", "device"), cumem.zeros(4096, "u1", "pinned"))
    waits, streams = [], []
    for _ in range(40):
        before = session.testing.fault_count("stream_wait_event")
        with cumem.Stream() as stream:
            use(ends, stream)
        del stream
        waits.append(session.testing.fault_count("stream_wait_event") - before)
        streams.append(session.testing.counts()["streams"])
    # The parts of a copy may all need a stream at the same moment, so the largest number of
    # live streams may vary by the number of parts. A leak would add 20 streams.
    assert max(streams[20:]) <= max(streams[:20]) + USES[use]
    # Each use waits only for the use before it, however long ago that was.
    assert max(waits) <= 4 * USES[use]


def test_per_thread_streams_of_ended_threads_are_not_waited_for(emulated) -> None:
    ends = (cumem.zeros(4096, "u1", "device"), cumem.zeros(4096, "u1", "pinned"))
    counts = []
    for _ in range(20):
        before = session.testing.fault_count("event_record")
        thread = threading.Thread(
            target=lambda: cumem.copy_async(*ends, stream=2).wait()
        )
        thread.start()
        thread.join()
        counts.append(session.testing.fault_count("event_record") - before)
    assert max(counts[10:]) <= max(counts[:10])


@pytest.mark.parametrize(
    "between",
    [
        *("copy", "fill", "nothing", "in place", "part in place", "many", "strided"),
        "part of nothing",
    ],
)
@pytest.mark.parametrize("look", ["copy", "stream", "background", "free"])
def test_forgotten_streams_still_come_before_what_follows(
    emulated, between: str, look: str
) -> None:
    """The gate of `first` is shut. Work on `second` either waits for `first` or has no
    bytes.

    A later read must still come after `first`, although `second` may have taken the place
    of `first` in the buffer's list of streams.
    """
    pool = cumem.Pool("device")
    buffer = pool.allocate(4096)
    buffer.fill(1)
    other = cumem.zeros(4096, "u1", "pinned")
    first, second, third = cumem.Stream(), cumem.Stream(), cumem.Stream()
    part = slice(100, 200)
    with session.gate(first):
        buffer.fill(7, stream=first)
        if between == "copy":
            cumem.copy_async(buffer[:50], other[:50], stream=second)
        elif between == "fill":
            buffer[:50].fill(9, stream=second)
        elif between == "nothing":
            cumem.copy_async(buffer[:0], other[:0], stream=second)
        # This work covers everything that `first` writes.
        elif between == "in place":
            cumem.copy_async(buffer, buffer, stream=second)
        elif between == "part in place":
            cumem.copy_async(buffer[part], buffer[part], stream=second)
        elif between == "strided":
            pairs = [(buffer[:100:2], other[:100:2])]
            cumem.copy_many_async(pairs, stream=second)
        elif between == "part of nothing":
            parts = [buffer[100:100], cumem.zeros(4096, "u1", "device")]
            cumem.scatter_async(parts, other, stream=second)
        else:
            cumem.copy_many_async([(buffer[:50], other[:50])], stream=second)
        out = cumem.zeros(100, "u1", "pinned")
        if look == "stream":
            cumem.copy_async(out, buffer[part], stream=third)
            done = third.synchronize
        elif look == "background":
            done = cumem.copy_async(out, buffer[part]).wait
        elif look == "copy":

            def done() -> None:
                cumem.copy(out, buffer[part])
        else:
            address = buffer.ptr
            del buffer
            taken = [pool.allocate(4096) for _ in range(3)]
            assert address not in [b.ptr for b in taken]
            return
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(done)
            # A copy that did not wait would end during this loop.
            for _ in range(20):
                session.let_workers_pass()
            assert not waiting.done()
            session.testing.gate_open(first)
            waiting.result(session.PATIENCE)
        session.testing.gate_close(first)
    assert (out.numpy() == 7).all()


def test_stream_on_which_others_work_is_remembered(emulated) -> None:
    """A stream that record_stream() named stays with the buffer as long as the buffer
    lives, since others may queue more work there without saying so.
    """
    pool = cumem.Pool("device")
    buffer, other = pool.allocate(4096), cumem.zeros(4096, "u1", "pinned")
    theirs = cumem.Stream()
    buffer.record_stream(theirs)
    for _ in range(3):
        with cumem.Stream() as stream:
            cumem.copy_async(buffer, other, stream=stream).wait()
        cumem.copy(buffer, other)
        buffer.fill(1)
    session.shut(theirs)
    work = cumem.empty_device(8, "u1", stream=theirs)
    work.fill(1, stream=theirs)  # This fill stands for a kernel that uses `buffer`.
    address = buffer.ptr
    del buffer
    assert address not in [b.ptr for b in [pool.allocate(4096) for _ in range(3)]]
    session.testing.gate_open(theirs)


def test_stream_named_while_a_copy_waits_is_not_forgotten_with_the_others(
    emulated,
) -> None:
    buffer = cumem.zeros(4096, "u1", "device")
    first, second = cumem.Stream(), cumem.Stream()
    outs = [np.empty(4096, "u1") for _ in range(2)]
    session.shut(first)
    session.shut(second)
    buffer.fill(7, stream=first)
    copies = [threading.Thread(target=cumem.copy, args=(out, buffer)) for out in outs]
    copies[0].start()
    session.wait_until_waiting(copies[0])
    buffer.fill(8, stream=second)
    session.testing.gate_open(first)
    copies[0].join()
    copies[1].start()
    session.wait_until_waiting(copies[1])
    assert copies[1].is_alive()
    session.testing.gate_open(second)
    copies[1].join()
    assert (outs[0] == 7).all()
    assert (outs[1] == 8).all()


@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
@pytest.mark.parametrize("size", ["short", "long"])
def test_blocking_copy_waits_for_the_work_of_others_on_its_memory(
    emulated, size, down
) -> None:
    nbytes = {"short": 256, "long": 24 << 20}[size]
    theirs = cumem.Stream()
    with theirs:
        other = cumem.zeros(8, "u1")
    buffer, array = cumem.empty_device(nbytes, "u1"), np.zeros(nbytes, "u1")
    # cumem is told nothing else about work on the buffer.
    buffer.record_stream(theirs)
    cumem.Device(0).synchronize()
    with session.alarm(theirs):
        other.fill(1, stream=theirs)
        if down:
            cumem.copy(array, buffer)
        else:
            cumem.copy(buffer, array)


def test_copy_on_a_stream_comes_after_another_stream(emulated) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    source = values.put(np.full(4096, 7, "u1"), "pinned")
    target = cumem.zeros(4096, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(first):
        target.fill(1, stream=first)
        transfer = cumem.copy_async(target, source, stream=second)
        # A copy that did not wait would end during this loop.
        for _ in range(20):
            session.let_workers_pass()
        assert not transfer.done
    second.synchronize()
    first.synchronize()
    assert transfer.route == "direct"
    assert (values.get(target) == 7).all()


def test_copy_on_a_stream_comes_after_a_transfer(emulated) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    one, other = (values.put(np.full(4096, n, "u1"), "pinned") for n in (5, 7))
    target = cumem.zeros(4096, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(first):
        # This copy has its own stream.
        before = cumem.copy_async(target, one, after=first)
        transfer = cumem.copy_async(target, other, stream=second)
        # A copy that did not wait would end during this loop.
        for _ in range(20):
            session.let_workers_pass()
        assert not transfer.done
    second.synchronize()
    before.wait()
    assert transfer.route == "direct"
    assert (values.get(target) == 7).all()


@pytest.mark.parametrize("shift", [1, -1])
def test_copy_on_a_stream_may_overlap_within_a_device(emulated, shift: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 1 << 16, "u1")
    stream = cumem.Stream()
    buf = cumem.array(data, kind="device")
    ends = (buf[1:], buf[:-1]) if shift > 0 else (buf[:-1], buf[1:])
    session.testing.plan_fault(None, 0)  # This resets the counters.
    cumem.copy_async(*ends, stream=stream)
    stream.synchronize()
    # The driver promises nothing for ends that overlap, so the whole source is first
    # copied elsewhere.
    assert session.testing.fault_count("copy_async") == 2
    expected = data.copy()
    if shift > 0:
        expected[1:] = data[:-1]
    else:
        expected[:-1] = data[1:]
    assert (values.get(buf) == expected).all()
