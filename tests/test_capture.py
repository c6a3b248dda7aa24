# SPDX-License-Identifier: Apache-2.0
"""Memory used while a stream is captured belongs to the graph, which may run later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support import session

import cumem

NBYTES = 1 << 16


@contextlib.contextmanager
def capture(stream: cumem.Stream) -> Iterator[None]:
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
    return sum(kind["in_flight_nbytes"] for kind in cumem.pool_counters().values())


def is_reused(use: Callable[[], cumem.Buffer]) -> bool:
    """Does the memory of the buffer, dropped at once, come back once work has ended?"""
    before = in_flight_nbytes()
    buffer = use()
    kind, first, end = buffer.kind, buffer.ptr, buffer.ptr + buffer.nbytes
    del buffer
    session.leftovers()  # the transfers are over and have let go
    cumem.Device(0).synchronize()  # and so are the events of that
    cumem.trim()  # looks at what is in flight
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
    # what a GPU's DLPack export does first, which emulated memory has no use for
    stream = cumem.Stream()

    def used() -> cumem.Buffer:
        buffer = cumem.empty_device(NBYTES, "u1", stream=stream)
        with capture(stream) if captured else contextlib.nullcontext():
            session.testing.order_consumer(buffer, stream)
        return buffer

    assert is_reused(used) != captured


class Exporter:
    """Is told the handle of the consumer's stream, and then has nothing to give."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **keywords: object) -> object:
        raise BufferError("empty")


def tell_interface(stream: cumem.Stream) -> None:
    buffer = cumem.empty_device(NBYTES, "u1", stream=stream)
    session.shut(stream)
    buffer.fill(1, stream=stream)
    assert session.testing.array_interface(buffer)["stream"] is not None
    session.testing.gate_open(stream)
    stream.synchronize()


def tell_exporter(stream: cumem.Stream) -> None:
    with pytest.raises(BufferError, match="empty"):
        cumem.asbuffer(Exporter(), stream=stream)


#: Ways in which others come to know a stream's handle.
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
    assert session.testing.fault_count(None) == 0
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
    """Runs between two devices, of memory that nothing works on any more."""
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
        assert session.testing.fault_count("copy_batch_async") == 0
        del handle, pairs


@pytest.mark.parametrize("captured", [False, True])
def test_memory_of_a_graph_that_a_failed_call_began_is_not_reused(
    emulated, captured
) -> None:
    """Some of the copies are in the graph, whatever becomes of the others."""
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
    """Its event would take the stream that does the copy into the graph."""
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
