# SPDX-License-Identifier: Apache-2.0
"""Memory used in a capture belongs to the graph, which may run at any later time.

The first part uses a buffer in a capture, drops it, and looks whether its pool hands the
memory out again. In the later parts another thread captures while the main thread calls
cumem, or memory runs short during a capture. Neither may break the capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support import session

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

NBYTES = 1 << 16


@contextlib.contextmanager
def capture(stream: cumem.Stream) -> Iterator[None]:
    """Mark the stream as one that a graph captures while the block runs."""
    session.testing.set_capturing(stream, True)
    try:
        yield
    finally:
        session.testing.set_capturing(stream, False)


def fill(buffer: cumem.Buffer, stream: cumem.Stream) -> None:
    buffer.fill(1, stream=stream)


def record(buffer: cumem.Buffer, stream: cumem.Stream) -> None:
    buffer.record_stream(stream)


def copy_to(buffer: cumem.Buffer, stream: cumem.Stream) -> None:
    source = cumem.empty(NBYTES, "u1", buffer.kind, stream=stream)
    cumem.copy_async(buffer, source, stream=stream)


def copy_from(buffer: cumem.Buffer, stream: cumem.Stream) -> None:
    target = cumem.empty(NBYTES, "u1", buffer.kind, stream=stream)
    cumem.copy_async(target, buffer, stream=stream)


USES: dict[str, Callable[[cumem.Buffer, cumem.Stream], None]] = {
    "fill": fill,
    "view": lambda buffer, stream: fill(buffer[3:9], stream),
    "record_stream": record,
    "copy to": copy_to,
    "copy from": copy_from,
}


def in_flight_nbytes() -> int:
    return cumem.stats().total.in_flight_nbytes


def is_reused(use: Callable[[], cumem.Buffer]) -> bool:
    """Return whether a dropped buffer's memory is used again once all work has ended.

    `use()` returns the buffer, which is dropped here at once.
    """
    before = in_flight_nbytes()
    buffer = use()
    kind, first, end = buffer.kind, buffer.ptr, buffer.ptr + buffer.nbytes
    del buffer
    session.leftovers()  # The transfers have ended, so they no longer hold the buffer.
    # This waits for the events that were recorded when the transfers ended.
    cumem.Device(0).synchronize()
    cumem.trim()  # The pool looks at its memory in flight.
    is_kept = in_flight_nbytes() >= before + NBYTES
    again = [cumem.empty(NBYTES, "u1", kind) for _ in range(40)]
    overlap = any(b.ptr < end and first < b.ptr + b.nbytes for b in again)
    assert not (is_kept and overlap)
    assert is_kept or in_flight_nbytes() == before
    return not is_kept


@pytest.mark.parametrize("kind", ["device", "mapped", "managed"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_memory_of_an_ended_capture_is_not_reused(emulated, kind, use) -> None:
    stream = cumem.Stream()

    def used(captured: bool) -> cumem.Buffer:
        buffer = cumem.empty(NBYTES, "u1", kind, stream=stream)
        with capture(stream) if captured else contextlib.nullcontext():
            use(buffer, stream)
        return buffer

    assert is_reused(lambda: used(False))
    assert not is_reused(lambda: used(True))
    cumem.trim()
    assert not is_reused(lambda: used(True))


@pytest.mark.parametrize("captured", [False, True])
def test_dlpack_consumer_that_captures_keeps_the_memory(emulated, captured) -> None:
    # On a GPU, a DLPack export first orders the consumer's stream. An export of emulated
    # memory does not do so, so a hook of the tests does it.
    stream = cumem.Stream()

    def used() -> cumem.Buffer:
        buffer = cumem.empty_device(NBYTES, "u1", stream=stream)
        with capture(stream) if captured else contextlib.nullcontext():
            session.testing.order_consumer(buffer, stream)
        return buffer

    assert is_reused(used) != captured


class Exporter:
    """An exporter that gets the handle of cumem's stream, and has no memory to give."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **keywords: object) -> object:
        raise BufferError("empty")


def tell_interface(stream: cumem.Stream) -> None:
    """Read the stream's handle from the interface of a buffer that the stream still
    fills.
    """
    buffer = cumem.empty_device(NBYTES, "u1", stream=stream)
    session.shut(stream)
    buffer.fill(1, stream=stream)
    assert session.testing.array_interface(buffer)["stream"] is not None
    session.testing.gate_open(stream)
    stream.synchronize()


def tell_exporter(stream: cumem.Stream) -> None:
    with pytest.raises(BufferError, match="empty"):
        cumem.asbuffer(Exporter(), stream=stream)


#: Other libraries learn a stream's handle in these ways.
TELLING: dict[str, Callable[[cumem.Stream], object]] = {
    "handle": lambda stream: stream.handle,
    "__cuda_stream__": lambda stream: stream.__cuda_stream__(),
    "__cuda_array_interface__": tell_interface,
    "__dlpack__": tell_exporter,
}


def questions() -> int:
    return int(session.testing.fault_count("stream_is_capturing"))


@pytest.mark.parametrize("tell", TELLING.values(), ids=TELLING)
def test_only_a_stream_that_others_know_is_asked_for_a_capture(emulated, tell) -> None:
    stream = cumem.Stream()
    cumem.empty_device(NBYTES, "u1", stream=stream)
    session.testing.plan_fault(None, 0)
    cumem.empty_device(NBYTES, "u1", stream=stream)
    assert questions() == 0
    tell(stream)
    session.testing.plan_fault(None, 0)
    cumem.empty_device(NBYTES, "u1", stream=stream)
    assert questions() == 1


def test_interface_of_memory_in_a_capture_names_no_stream(emulated) -> None:
    stream = cumem.Stream()

    def used() -> cumem.Buffer:
        buffer = cumem.empty_device(NBYTES, "u1", stream=stream)
        with capture(stream):
            interface = session.testing.array_interface(buffer)
            assert interface["stream"] is None
        return buffer

    assert not is_reused(used)


def test_captured_fill_is_not_waited_for(emulated) -> None:
    buffer = cumem.zeros(64, "u1", "mapped")
    stream = cumem.Stream()
    with capture(stream):
        buffer.fill(1, stream=stream)
        assert not buffer.numpy().any()
        with pytest.raises(cumem.CudaError, match="being captured"):
            buffer.view("u8").fill(2**40 + 1, stream=stream)
    assert not buffer.numpy().any()


def test_failing_question_of_a_capture_is_raised(emulated) -> None:
    stream = cumem.Stream()
    buffer = cumem.empty_device(NBYTES, "u1")
    session.testing.plan_fault("stream_is_capturing", 1)
    with pytest.raises(cumem.CudaError) as caught:
        buffer.record_stream(stream)
    session.testing.plan_fault(None, 0)
    assert caught.value.call == "cudaStreamIsCapturing"


def test_captured_memory_comes_back_at_shutdown(emulated) -> None:
    stream = cumem.Stream()
    buffer = cumem.empty_device(NBYTES, "u1")
    with capture(stream):
        buffer.fill(1, stream=stream)
    del buffer, stream
    cumem.shutdown()
    free, total = cumem.memory_info()
    assert free == total


def pieces_across() -> list[tuple[cumem.Buffer, cumem.Buffer]]:
    """Return pairs of pieces on two devices, in memory that no work uses any more."""
    target, source = (
        cumem.empty(NBYTES, "u1", "device", device=device) for device in (1, 0)
    )
    for device in (0, 1):
        cumem.Device(device).synchronize()
    width = NBYTES // 16
    places = [slice(i * width, i * width + 100) for i in range(16)]
    return [(target[d], source[s]) for d, s in zip(places, places[::-1], strict=True)]


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("driver", [12000, 13000])
@pytest.mark.parametrize("peers", [0, 1])
def test_graph_holds_many_copies_between_devices(driver, where, peers) -> None:
    with session.opened("emulated", driver_version=driver, peers=peers):
        stream = cumem.Stream(device=where)
        pairs = pieces_across()
        session.testing.plan_fault(None, 0)
        with capture(stream):
            handle = cumem.copy_many_async(pairs, stream=stream)
            assert handle.done
        assert handle.route == "peer"
        assert session.testing.fault_count("copy_peer_async") == len(pairs)
        del handle, pairs


@pytest.mark.parametrize("captured", [False, True])
def test_memory_of_a_graph_that_a_failed_call_began_is_not_reused(
    emulated, captured
) -> None:
    """The graph contains the first copies even if a later one fails, so their memory
    must be kept.
    """
    stream = cumem.Stream()

    def used() -> cumem.Buffer:
        buffer = cumem.empty_device(NBYTES, "u1", stream=stream)
        source = cumem.empty(NBYTES, "u1", "pinned", stream=stream)
        width = NBYTES // 4
        pairs = [
            (buffer[i : i + 100], source[i + width : i + width + 100])
            for i in range(0, 2 * width, width)
        ]
        own = cumem.empty_device(NBYTES, "u1", stream=stream)
        bad = (own[:1000], np.zeros(1000, "u1")) if captured else (own[:10], own[:10])
        with capture(stream) if captured else contextlib.nullcontext():
            expected = pytest.raises(cumem.CudaError) if captured else None
            with expected or contextlib.nullcontext():
                cumem.copy_many_async([*pairs, bad], stream=stream)
        return buffer

    assert is_reused(used) != captured


@pytest.mark.parametrize("upload", [True, False])
def test_copy_after_a_stream_that_is_captured_is_refused(emulated, upload) -> None:
    """Waiting for the stream's event would draw the copy's own stream into the graph."""
    device = cumem.full(1 << 20, 1, "u1", kind="device")
    array = np.full(1 << 20, 2, "u1")
    ends = (device, array) if upload else (array, device)
    stream = cumem.Stream()
    with (
        capture(stream),
        pytest.raises(cumem.CudaError, match="being captured"),
    ):
        cumem.copy_async(*ends, after=stream)
    assert (cumem.asnumpy(ends[0]) == (1 if upload else 2)).all()
    cumem.copy_async(*ends, after=stream).wait()
    assert (cumem.asnumpy(ends[0]) == (2 if upload else 1)).all()


def test_prefetch_on_a_captured_stream_is_an_error(emulated) -> None:
    """A graph cannot contain a prefetch."""
    buffer = cumem.zeros(NBYTES, "u1", "managed")
    stream = cumem.Stream()
    with capture(stream), pytest.raises(cumem.CudaError, match="900"):
        buffer.prefetch_pages("host", stream=stream)
    buffer.prefetch_pages(stream=stream)


# -- a capture of another thread ---------------------------------------------------------


@contextlib.contextmanager
def captured_elsewhere(
    capture: Callable[[], contextlib.AbstractContextManager[object]],
) -> Iterator[None]:
    """Run the block while another thread captures, and check at the end that the
    capture succeeded.
    """
    begun, over = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with capture():
                begun.set()
                over.wait()
        except BaseException as failure:
            failures.append(failure)
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert failures == []


def emulated_capture() -> contextlib.AbstractContextManager[None]:
    return capture(cumem.Stream(non_blocking=True))


SHORT, LONG = 256, 9 << 20


# Each of these functions makes a call that must not break the capture of another
# thread. CALLS lists them.


def copy_between(dst: str, src: str, nbytes: int) -> None:
    cumem.copy(cumem.empty(nbytes, "u1", dst), cumem.empty(nbytes, "u1", src))


def copy_after(nbytes: int) -> None:
    stream = cumem.Stream()
    source = cumem.empty(nbytes, "u1", "device")
    source.fill(3, stream=stream)
    cumem.copy(np.empty(nbytes, "u1"), source)


def copy_strided() -> None:
    source = cumem.empty((64, 300), "u1", "device")
    cumem.copy(cumem.empty((64, 100), "u1", "device"), source[:, ::3])


def wait_for_transfer() -> None:
    cumem.copy_async(cumem.empty(LONG, "u1", "device"), np.zeros(LONG, "u1")).wait()


def copy_many() -> None:
    target = cumem.empty(LONG, "u1", "device")
    array = np.zeros(LONG, "u1")
    cumem.copy_many([(target[i : i + 9], array[i : i + 9]) for i in range(0, 900, 10)])


def query_event() -> None:
    event = cumem.Stream().record()
    while not event.done:
        pass
    event.synchronize()


def time_events() -> None:
    start, end = cumem.Event(timing=True), cumem.Event(timing=True)
    start.record()
    assert end.record().seconds_since(start) >= 0


def query_stream() -> None:
    stream = cumem.Stream()
    cumem.empty(SHORT, "u1", "device").fill(1, stream=stream)
    while not stream.done:
        pass
    stream.synchronize()


def touch_from_host() -> None:
    buffer = cumem.empty(LONG, "u1", "mapped")
    buffer.fill(1, stream=cumem.Stream())
    assert buffer.numpy().all()


def register() -> None:
    array = np.zeros(LONG, "u1")
    with cumem.register(array):
        cumem.copy(cumem.empty(LONG, "u1", "device"), array)


#: A thread may make these calls while another thread captures.
CALLS: dict[str, Callable[[], object]] = {
    "copy up, short": lambda: copy_between("device", "pinned", SHORT),
    "copy up, long": lambda: copy_between("device", "pinned", LONG),
    "copy down, short": lambda: copy_between("pinned", "device", SHORT),
    "copy down, long": lambda: copy_between("pinned", "device", LONG),
    "copy on the device, short": lambda: copy_between("device", "device", SHORT),
    "copy on the device, long": lambda: copy_between("device", "device", LONG),
    "copy of ordinary memory, short": lambda: cumem.empty_device(
        SHORT, "u1"
    ).to_numpy(),
    "copy of ordinary memory, long": lambda: cumem.empty_device(LONG, "u1").to_numpy(),
    "copy after a stream, short": lambda: copy_after(SHORT),
    "copy after a stream, long": lambda: copy_after(LONG),
    "copy of elements apart": copy_strided,
    "copies": copy_many,
    "Transfer.wait": wait_for_transfer,
    "explain": lambda: cumem.explain(
        cumem.empty_device(SHORT, "u1"), np.zeros(SHORT, "u1")
    ),
    "Event.done": query_event,
    "Event.seconds_since": time_events,
    "Stream.done": query_stream,
    "Device.synchronize": lambda: cumem.Device(0).synchronize(),
    "numpy": touch_from_host,
    "register": register,
    "trim": cumem.trim,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_call_does_not_break_the_capture_of_another_thread(emulated, call) -> None:
    with captured_elsewhere(emulated_capture):
        call()


def test_file_does_not_break_the_capture_of_another_thread(emulated, tmp_path) -> None:
    with captured_elsewhere(emulated_capture):
        cumem.tofile(tmp_path / "bytes", cumem.full(LONG, 1, "u1", "device"))
        read = cumem.fromfile(tmp_path / "bytes", "u1", kind="device")
        assert (cumem.asnumpy(read) == 1).all()


def test_call_still_breaks_the_capture_of_its_own_thread(emulated) -> None:
    """The thread waits for a stream in the middle of its own capture.

    A graph cannot contain this wait, so CUDA breaks the capture, and so does the emulated
    device.
    """
    stream, other = cumem.Stream(non_blocking=True), cumem.Stream(non_blocking=True)
    with (
        pytest.raises(cumem.CudaError, match="901"),
        capture(stream),
        pytest.raises(cumem.CudaError, match="900"),
    ):
        other.synchronize()


@contextlib.contextmanager
def driver_capture() -> Iterator[None]:
    """Capture in CUDA's global mode, by calls of the driver and not of cumem."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, graph = ctypes.c_void_p(), ctypes.c_void_p()
    stream = cumem.Stream(non_blocking=True)
    handle = ctypes.c_void_p(stream.handle)
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    try:
        assert driver.cuCtxSetCurrent(context) == 0
        assert driver.cuStreamBeginCapture_v2(handle, 0) == 0
        yield
        assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert driver.cuGraphDestroy(graph) == 0
    finally:
        driver.cuCtxSetCurrent(None)
        driver.cuDevicePrimaryCtxRelease_v2(0)


@contextlib.contextmanager
def torch_capture() -> Iterator[None]:
    """Capture an addition of PyTorch's around the block, and check that its graph
    replays.
    """
    torch = pytest.importorskip("torch")
    numbers = torch.zeros(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers += 1
        yield
    graph.replay()
    assert numbers.sum().item() == 100


#: During a capture the driver never synchronises a whole device, whatever the mode is.
ON_GPUS = {name: call for name, call in CALLS.items() if name != "Device.synchronize"}


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [driver_capture, torch_capture])
@pytest.mark.parametrize("call", ON_GPUS.values(), ids=ON_GPUS)
def test_call_beside_a_real_capture_leaves_it_whole(cuda, call, capture) -> None:
    if capture is torch_capture:
        torch = pytest.importorskip("torch")
        torch.zeros(1, device="cuda")
    call()  # The first use loads code, which a capture does not allow.
    with captured_elsewhere(capture):
        call()


class Foreign:
    """A stream of another library, which does not say what device it belongs to."""

    def __init__(self, stream: cumem.Stream) -> None:
        self.owner = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.owner.handle


@pytest.mark.parametrize("wrap", [lambda stream: stream.handle, Foreign])
def test_stream_that_captures_is_not_asked_who_it_is(emulated, wrap) -> None:
    """If cumem asked for the stream's id, CUDA would return an error and break the capture,
    whatever the mode of the capture.
    """
    stream = cumem.Stream()
    source = cumem.zeros(NBYTES, "u1", "device", stream=stream)
    target = cumem.empty_device(NBYTES, "u1", stream=stream)
    stream.synchronize()
    with capture(stream):  # The block ends with an error if the capture was broken.
        cumem.copy_async(target, source, stream=wrap(stream))
        other = cumem.empty_device(NBYTES, "u1", stream=wrap(stream))
        other.record_stream(wrap(stream))
        assert cumem.Stream.from_external(wrap(stream)).handle == stream.handle
    # From now on cumem knows the stream's id.
    other.fill(1, stream=wrap(stream))
    stream.synchronize()
    assert (other.to_numpy() == 1).all()
    del source, target, other


@pytest.mark.gpu
def test_torchs_capture_may_use_our_memory(cuda) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(NBYTES, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        buffer = cumem.empty_device(NBYTES, "u1", stream=stream)
        cumem.copy_async(buffer, tensor, stream=stream)
        buffer.record_stream(stream.cuda_stream)
    tensor.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert (buffer.to_numpy() == 7).all()


# -- memory runs short while something captures ------------------------------------------

MIB = 1 << 20
FENCED = ("pinned", "mapped", "managed", "device")


def exported(kind: str, pool: cumem.Pool | None = None) -> object:
    """Return exported memory.

    Other libraries may still work on this memory when it is dropped. Only a fence, or a
    wait for the device, can show when their work has ended.
    """
    return cumem.empty(4 * MIB, "u1", kind, pool=pool).__dlpack__()


def run_out(kind: str, _: list[object]) -> None:
    with cumem.limit(kind, "8MiB"), pytest.raises(cumem.OutOfMemoryError):
        cumem.empty(16 * MIB, "u1", kind)


def collect_and_run_out(kind: str, held: list[object]) -> None:
    """Run short of memory when only a garbage collection can free the held memory."""
    cycle: list[object] = [*held]
    cycle.append(cycle)
    held.clear()
    del cycle
    run_out(kind, held)


def call_back(kind: str, held: list[object]) -> None:
    with cumem.on_out_of_memory(lambda *_: cumem.trim()):
        run_out(kind, held)


def drop_and_allocate(kind: str, held: list[object]) -> None:
    """Drop more buffers than a pool keeps waiting for fences, and allocate in between."""
    while held:
        held.pop()
        cumem.empty(4 * MIB, "u1", kind)


def lower(kind: str, _: list[object]) -> None:
    cumem.set_limit(kind, "1MiB")


def register_too_much(_kind: str, _: list[object]) -> None:
    with cumem.limit("pinned", "1MiB"), pytest.raises(cumem.OutOfMemoryError):
        cumem.register(np.zeros(8 * MIB, "u1"))


SHORTAGES: dict[str, Callable[[str, list[object]], object]] = {
    "out of memory": run_out,
    "collection": collect_and_run_out,
    "callback": call_back,
    "many": drop_and_allocate,
    "trim": lambda *_: cumem.trim(),
    "trim without waiting": lambda *_: cumem.trim(wait=False),
    "lowered limit": lower,
    "registration": register_too_much,
}


@pytest.mark.parametrize("kind", FENCED)
@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
@pytest.mark.parametrize("non_blocking", [True, False])
def test_shortage_beside_a_capture_leaves_the_graph_whole(
    emulated, kind, shortage, non_blocking
) -> None:
    exported(kind)
    pool = cumem.Pool(kind)
    held: list[object] = [pool, *(exported(kind, pool) for _ in range(24))]
    del pool
    stream = cumem.Stream(non_blocking=non_blocking)
    cumem.synchronize()
    with capture(stream), stream:
        shortage(kind, held)
    held.clear()
    # Afterwards all memory comes back, except for what the graph was given.
    cumem.trim()
    if kind != "device":
        assert in_flight_nbytes() == 0


@pytest.mark.parametrize("kind", FENCED)
def test_pool_that_ends_beside_a_capture_leaves_the_graph_whole(emulated, kind) -> None:
    stream = cumem.Stream()
    pool = cumem.Pool(kind)
    exported(kind, pool)
    with capture(stream):
        pool.close()
        del pool


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("shortage", ["out of memory", "trim", "trim without waiting"])
def test_capture_of_another_library_is_asked_about(
    emulated, monkeypatch, library, shortage
) -> None:
    """cumem does not know the other library's current stream, so it asks the library
    whether that stream is capturing.
    """
    current = types.SimpleNamespace(is_capturing=lambda: True)
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: True,
        get_current_stream=lambda: current,
    )
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    exported("pinned")
    monkeypatch.setitem(sys.modules, library, types.SimpleNamespace(cuda=cuda))
    session.testing.plan_fault(None, 0)
    SHORTAGES[shortage]("pinned", [])
    for call in ("context_record_event", "device_synchronize"):
        assert session.testing.fault_count(call) == 0
    monkeypatch.delitem(sys.modules, library)
    cumem.trim()
    assert in_flight_nbytes() == 0


def calls_of_a_question(stream_count: int) -> tuple[int, int]:
    """Count what cumem asks before a fence.

    Exported memory was dropped, so cumem wants a fence, and first asks whether any
    stream is being captured. Return how often another device was made current, and how
    many streams were asked.
    """
    streams = [cumem.Stream() for _ in range(stream_count)]
    # Reading a handle may give it to another library, which could start a capture. So cumem
    # has to ask these streams.
    handles = [stream.handle for stream in streams]
    exported = cumem.zeros(1000, "u1", "pinned")
    np.from_dlpack(exported)
    del exported
    session.testing.plan_fault(None, 0)  # This resets the counters.
    cumem.trim(wait=False)
    entered = session.testing.fault_count("context_set")
    asked = session.testing.fault_count("stream_is_capturing")
    assert len(handles) == stream_count
    return entered, asked


def test_question_whether_anything_captures_enters_each_device_once() -> None:
    # Older drivers have no fences.
    with session.opened("emulated", driver_version=13000):
        calls_of_a_question(0)
        few_entered, few_asked = calls_of_a_question(1)
        many_entered, many_asked = calls_of_a_question(25)
    assert many_asked >= few_asked + 24
    assert many_entered <= few_entered + 4
