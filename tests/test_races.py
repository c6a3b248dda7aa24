# SPDX-License-Identifier: Apache-2.0
"""Code that runs in the middle of a call must not take the memory away from under it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support import session, values

import cumem


class FreesOnRead:
    """An exporter that frees the copy's target while it is asked for its data."""

    def __init__(self, target: cumem.Buffer) -> None:
        self.target = target
        self.inner = np.arange(16, dtype="u1")
        self.error: BaseException | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **keywords: object) -> object:
        try:
            self.target.free()
        except BufferError as error:
            self.error = error
        return self.inner.__dlpack__(**keywords)


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_target_cannot_be_freed_while_the_source_is_read(runtime, kind) -> None:
    target = cumem.zeros(16, "u1", kind)
    source = FreesOnRead(target)
    cumem.copy(target, source)
    assert isinstance(source.error, BufferError)
    source.error = None
    assert (values.get(target) == np.arange(16)).all()
    target.free()


class FreesOnStream:
    def __init__(self, buffer: cumem.Buffer, handle: int) -> None:
        self.buffer, self.handle = buffer, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        self.buffer.free()
        return (0, self.handle)


def test_memory_freed_by_the_stream_is_not_prefetched(runtime) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(4096, "u1", "managed")
    with pytest.raises(ValueError, match="closed"):
        buffer.prefetch(0, stream=FreesOnStream(buffer, stream.handle))


def churn(stop: threading.Event, failures: list[BaseException]) -> None:
    array, out = np.zeros(1000), np.zeros(1000)
    while not stop.is_set():
        try:
            cumem.empty_device(1000)
            cumem.copy(out, array)
        except (RuntimeError, ValueError):  # shut down in between
            pass
        except BaseException as error:
            failures.append(error)
            return


def test_shutdown_beside_working_threads_refuses_or_works(emulated) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    threads = [threading.Thread(target=churn, args=(stop, failures)) for _ in range(4)]
    for thread in threads:
        thread.start()
    refusals = []
    for _ in range(50):
        try:
            cumem.shutdown()
        except RuntimeError as error:
            refusals.append(str(error))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all("another thread" in refusal for refusal in refusals)


def test_import_waits_for_the_stream_of_the_memorys_device(emulated) -> None:
    count = 4096
    buffer = cumem.zeros(count, "u1", "device", device=1)
    session.testing.check_pools()
    producer = cumem.current_stream(1)
    source = cumem.full(count, 9, "u1", "pinned", device=1)
    target = cumem.zeros(count, "u1", "device", device=0)
    stream = cumem.Stream(device=0)
    interface = {
        "shape": (count,),
        "typestr": "|u1",
        "data": (buffer.ptr, False),
        "version": 3,
        "stream": 1,
    }
    exporter = type("Exporter", (), {"__cuda_array_interface__": interface})()
    with session.gate(producer):
        cumem.copy_async(buffer, source, stream=producer)
        handle = cumem.copy_async(target, exporter, stream=stream)
        assert not handle.done
    handle.wait()
    assert (values.get(target) == 9).all()


class ShutsDown:
    """Ends cumem while it is asked for its stream or its memory."""

    def __init__(self) -> None:
        self.inner = np.arange(16, dtype="u1")
        self.error: BaseException | None = None

    def shut_down(self) -> None:
        try:
            cumem.shutdown()
        except RuntimeError as error:
            self.error = error

    def __cuda_stream__(self) -> tuple[int, int]:
        self.shut_down()
        return (0, 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        self.shut_down()
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **keywords: object) -> object:
        return self.inner.__dlpack__(**keywords)


@pytest.mark.parametrize(
    "call",
    [
        lambda guest: cumem.Stream.from_external(guest),
        lambda guest: cumem.Event().record(guest),
        lambda guest: cumem.Stream().wait(guest),
        lambda guest: cumem.empty_device(10, stream=guest),
        lambda guest: cumem.asbuffer(guest),
        lambda guest: cumem.copy(cumem.zeros(16, "u1"), guest),
        lambda guest: cumem.register(guest),
    ],
)
def test_shutdown_below_a_call_is_refused(emulated, call) -> None:
    guest = ShutsDown()
    call(guest)
    assert "a call of cumem is under way" in str(guest.error)


def interface_of(buffer: cumem.Buffer) -> object:
    interface = {
        "shape": buffer.shape,
        "typestr": "|u1",
        "data": (buffer.ptr, False),
        "version": 3,
    }
    return type("Exporter", (), {"__cuda_array_interface__": interface})()


def pending(kind: str) -> cumem.Buffer:
    """Memory that a stream has worked on."""
    buffer = cumem.empty(4096, "u1", kind)
    buffer.fill(1, stream=cumem.Stream())
    return buffer


def recorded() -> cumem.Event:
    return cumem.Stream().record()


def trimmable() -> None:
    cumem.empty_pinned(5000).free()


def closed_after_work() -> cumem.Registration:
    return cumem.register(np.zeros(5000))


#: What is prepared, what is then done in another thread, and the call it is held up in.
CALLS = {
    "make a stream": (None, lambda _: cumem.Stream(), "stream_create"),
    "check a priority": (
        None,
        lambda _: cumem.Stream(priority=-1),
        "stream_priority_range",
    ),
    "close a stream": (cumem.Stream, lambda s: s.close(), "stream_destroy"),
    "drop a stream": (lambda: [cumem.Stream()], lambda s: s.clear(), "stream_destroy"),
    "wait for a stream": (
        cumem.Stream,
        lambda s: s.synchronize(),
        "stream_synchronize",
    ),
    "query a stream": (cumem.Stream, lambda s: s.done, "stream_query"),
    "ask for a priority": (cumem.Stream, lambda s: s.priority, "stream_get_priority"),
    "ask for a capture": (
        cumem.Stream,
        lambda s: s.is_capturing,
        "stream_is_capturing",
    ),
    "wrap a stream": (
        cumem.Stream,
        lambda s: cumem.Stream.from_external(s.handle),
        "stream_get_id",
    ),
    "let a stream wait": (
        lambda: [cumem.Stream(), cumem.Stream()],
        lambda s: s[0].wait(s[1]),
        "stream_wait_event",
    ),
    "make an event": (None, lambda _: cumem.Event(), "event_create"),
    "close an event": (cumem.Event, lambda e: e.close(), "event_destroy"),
    "drop an event": (lambda: [cumem.Event()], lambda e: e.clear(), "event_destroy"),
    "record an event": (cumem.Event, lambda e: e.record(), "event_record"),
    "wait for an event": (recorded, lambda e: e.synchronize(), "event_synchronize"),
    "query an event": (recorded, lambda e: e.done, "event_query"),
    "measure": (recorded, lambda e: e.seconds_since(e), "event_elapsed"),
    "wait for a device": (
        None,
        lambda _: cumem.Device(0).synchronize(),
        "device_synchronize",
    ),
    "ask for memory": (None, lambda _: cumem.memory_info(), "memory_info"),
    "describe a device": (None, lambda _: cumem.Device(0).name, "device_describe"),
    "ask for peers": (
        None,
        lambda _: cumem.Device(0).can_access_peer(1),
        "peer_can_access",
    ),
    "ask for a version": (None, lambda _: cumem.driver_version(), "driver_version"),
    "allocate": (None, lambda _: cumem.empty_device(5000), "physical_create"),
    "trim": (trimmable, lambda _: cumem.trim(), "host_unregister"),
    "fill": (
        lambda: cumem.empty_device(5000, "u1"),
        lambda b: b.fill(1),
        "fill_8_async",
    ),
    "copy": (
        lambda: cumem.empty_device(5000, "u1"),
        lambda b: cumem.copy(b, np.zeros(5000, "u1")),
        "copy_async",
    ),
    "prefetch": (
        lambda: cumem.zeros(5000, "u1", "managed"),
        lambda b: b.prefetch(0),
        "prefetch_async",
    ),
    "ask where pages are": (
        lambda: cumem.zeros(5000, "u1", "managed"),
        lambda b: b.prefetch_location,
        "prefetch_location",
    ),
    "drop used memory": (
        lambda: [pending("pinned")],
        lambda b: b.clear(),
        "event_record",
    ),
    "read late memory": (
        lambda: pending("managed"),
        lambda b: b.numpy().sum(),
        "stream_query",
    ),
    "export to CUDA": (
        lambda: pending("device"),
        session.testing.array_interface,
        "stream_query",
    ),
    "export by DLPack": (
        lambda: pending("managed"),
        lambda b: b.__dlpack__(),
        "stream_query",
    ),
    "import from CUDA": (
        lambda: cumem.zeros(4096, "u1"),
        lambda b: cumem.asbuffer(interface_of(b)),
        "pointer_attributes",
    ),
    "register": (
        lambda: np.zeros(5000),
        lambda array: cumem.register(array).close(),
        "host_register",
    ),
    "unregister": (closed_after_work, lambda r: r.close(), "host_unregister"),
}

HELD_UP_US = 100_000


@pytest.mark.parametrize("what", CALLS)
def test_shutdown_beside_a_call_is_refused(emulated, what: str) -> None:
    prepare, call, operation = CALLS[what]
    testing = session.testing
    subjects = [None if prepare is None else prepare()]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call(subjects[0])
        except BaseException as error:
            failures.append(error)

    testing.check_pools()
    testing.plan_fault(None, 0)
    testing.delay_op(operation, HELD_UP_US)
    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and testing.fault_count(operation) == 0:
        thread.join(0.0005)
    with pytest.raises(RuntimeError, match="another thread"):
        cumem.shutdown()
    testing.delay_op(operation, 0)
    thread.join()
    assert failures == []
    subjects.clear()
    cumem.shutdown()
