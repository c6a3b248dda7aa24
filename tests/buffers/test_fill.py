# SPDX-License-Identifier: Apache-2.0
"""Tests of what fill() in the order of a stream leaves for later, and of who waits.

Buffers are filled on a stream whose gate is shut, which starts no work. The call must
return, and everyone who reads the buffer must wait for the gate.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

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

# The record has 10 bytes without padding.
RECORD = np.dtype([("key", "i2"), ("weight", "f8")])

#: One value of each dtype, in each of the sizes that memset and the kernel treat in
#: different ways.
VALUES = [
    np.array(True),
    np.array(7, "u1"),
    np.array(0x1234, "u2"),
    np.array(1.5, "f4"),
    np.array(-2.25, "f8"),
    np.array(1 + 2j, "c16"),
    np.array(b"odd", "S3"),
    np.array(b"hello", "S5"),
    np.array((-3, 0.5), RECORD),
    np.array("2024-02-29", "M8[D]"),
]
NAMES = [value.dtype.str if value.dtype.names is None else "record" for value in VALUES]


def bytes_now(buffer: cumem.Buffer) -> bytes:
    """Return what the host sees at this moment, without waiting for anybody."""
    return ctypes.string_at(buffer.ptr, buffer.nbytes)


def registered(shape: object, dtype: object) -> cumem.Buffer:
    return cumem.register(np.zeros(shape, dtype), mapped=True).buffer


@contextlib.contextmanager
def opened_soon(stream: cumem.Stream) -> Iterator[None]:
    """Open a shut stream as soon as the code in the block waits for that stream."""
    try:
        with session.when_waiting(lambda: session.testing.gate_open(stream)):
            yield
    finally:
        session.testing.gate_open(stream)


MAKERS = {
    "mapped": lambda shape, dtype: cumem.zeros(shape, dtype, "mapped"),
    "managed": lambda shape, dtype: cumem.zeros(shape, dtype, "managed"),
    "registered": registered,
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest):
    return MAKERS[request.param]


@pytest.mark.parametrize("value", VALUES, ids=NAMES)
def test_fill_on_a_shut_stream_returns_and_the_host_waits(
    emulated, make, value
) -> None:
    buffer = make((5, 7), value.dtype)
    expected = np.full((5, 7), value, value.dtype)
    stream = cumem.Stream()
    with session.gate(stream):
        buffer.fill(value, stream=stream)
        assert bytes_now(buffer) == bytes(buffer.nbytes)
    assert buffer.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("value", VALUES, ids=NAMES)
@pytest.mark.parametrize(
    "take",
    [
        np.s_[::2, ::3],
        np.s_[::-1, 1:4],
        np.s_[3],
        np.s_[:, 2],
        np.s_[4, 6],
        np.s_[2:3, ::-2],
    ],
    ids=["both", "backwards", "row", "column", "element", "part"],
)
def test_view_filled_on_a_stream_leaves_the_rest(runtime, make, value, take) -> None:
    buffer = make((5, 7), value.dtype)
    expected = np.zeros((5, 7), value.dtype)
    expected[take] = value
    buffer[take].fill(value, stream=cumem.Stream())
    assert buffer.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["u1", "f8", "S3", RECORD], ids=str)
def test_fill_of_nothing_and_of_one_element(runtime, make, dtype) -> None:
    stream = cumem.Stream()
    value = np.ones((), dtype)
    for shape in ((0,), (3, 0, 2), (0, 0)):
        empty = make(shape, dtype)
        empty.fill(value, stream=stream)
        assert empty.numpy().shape == shape
    for shape in ((), (1,), (1, 1)):
        one = make(shape, dtype)
        one.fill(value, stream=stream)
        assert one.numpy().tobytes() == value.tobytes()


@pytest.mark.parametrize("nbytes", [1, 3, 4095, 4097, 1_000_003, (8 << 20) + 5])
def test_fill_of_odd_sizes_and_offsets(runtime, make, nbytes) -> None:
    buffer = make(nbytes + 1, "u1")
    buffer[1:].fill(9, stream=cumem.Stream())
    array = buffer.numpy()
    assert array[0] == 0
    assert (array[1:] == 9).all()


def test_element_larger_than_a_piece(runtime, make) -> None:
    dtype = np.dtype(("V", (5 << 20) + 3))
    value = np.random.default_rng(1).bytes(dtype.itemsize)
    buffer = make(3, dtype)
    buffer[::2].fill(np.void(value), stream=cumem.Stream())
    array = buffer.numpy().view("u1").reshape(3, -1)
    assert array[0].tobytes() == array[2].tobytes() == value
    assert not array[1].any()


def test_constructors_fill_on_the_stream_given(emulated) -> None:
    stream = cumem.Stream()
    for kind in ("mapped", "managed"):
        with session.gate(stream):
            ones = cumem.full(1000, 1.5, kind=kind, stream=stream)
            zeros = cumem.zeros((10, 10), "u1", kind, stream=stream)
            assert not stream.done
        assert (ones.numpy() == 1.5).all()
        assert not zeros.numpy().any()


class BecomesArray:
    """An object that NumPy reads by `__array__`, and which has no dtype itself."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.array([1, 2, 3], dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_full_of_what_becomes_an_array_converts_as_of_an_array(runtime, kind) -> None:
    values: Any = BecomesArray()
    kept = cumem.full((2, 3), values, kind=kind)
    assert (kept.to_numpy() == [[1, 2, 3]] * 2).all()
    assert kept.dtype == np.array(values).dtype
    assert cumem.full(3, values, "f4", kind).to_numpy().tolist() == [1.0, 2.0, 3.0]
    assert cumem.full_like(kept[0], values, "f8").to_numpy().tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="'same_kind' does not allow"):
        cumem.full(3, values, "u1", kind)
    # Unlike full(), fill() does not convert an array to the dtype of the buffer.
    with pytest.raises(TypeError, match=r"fill: .*dtype"):
        cumem.empty(3, "f4", kind).fill(values)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_do_not_fit_are_refused_in_the_name_of_the_call(
    runtime, kind
) -> None:
    kept = cumem.zeros((2, 3), "f4", kind)
    sources: list[Any] = [
        np.ones(4, "f4"),
        [1, 2],
        cumem.zeros(4, "f4", "pinned"),
        cumem.zeros(4, "f4", "device"),
    ]
    shape = r"the source of shape \([24],\) does not fit the target of shape \(2, 3\)"
    for source in sources:
        with pytest.raises(ValueError, match="^fill: " + shape):
            kept.fill(source)
        with pytest.raises(ValueError, match="^fill: " + shape):
            kept.fill(source, casting="unsafe")
        with pytest.raises(ValueError, match="^full: " + shape):
            cumem.full((2, 3), source, "f4", kind)
        with pytest.raises(ValueError, match="^full: " + shape):
            cumem.full_like(kept, source, "f8")
    with pytest.raises(ValueError, match="^copy: " + shape):
        cumem.copy(kept, sources[0])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_of_elements_of_any_size_are_zero(runtime, kind) -> None:
    record = np.dtype([("a", "i4", (40,)), ("b", "S3")])
    for dtype in ("S63", "S64", "S65", record, "M8[s]", "c16", ">i4"):
        made = cumem.zeros(5, dtype, kind)
        assert made.to_numpy().tobytes() == bytes(made.nbytes), dtype
        assert cumem.zeros_like(made).to_numpy().tobytes() == bytes(made.nbytes), dtype


def test_new_buffer_whose_value_is_refused_leaves_no_memory(emulated) -> None:
    before = cumem.stats()["pinned"].live_nbytes
    with pytest.raises(OverflowError):
        cumem.full(1 << 20, 300, "u1", "pinned")
    with pytest.raises(ValueError, match="does not fit"):
        cumem.full((1 << 10, 2), [1, 2, 3], "u1", "pinned")
    assert cumem.stats()["pinned"].live_nbytes == before


def read_copy(buffer: cumem.Buffer) -> np.ndarray:
    out = np.zeros(buffer.shape, buffer.dtype)
    cumem.copy(out, buffer)
    return out


def read_through_device(buffer: cumem.Buffer) -> np.ndarray:
    other = cumem.empty_device(buffer.shape, buffer.dtype)
    cumem.copy(other, buffer)
    return values.get(other)


READERS: dict[str, Callable[[cumem.Buffer], np.ndarray]] = {
    "numpy": lambda buffer: buffer.numpy(),
    "memoryview": lambda buffer: np.asarray(memoryview(buffer)),
    "array": np.asarray,
    "dlpack": np.from_dlpack,
    "view": lambda buffer: buffer[::-1].numpy(),
    "int": lambda buffer: np.array([int(buffer[999:].reshape(()))]),
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer)).numpy(),
    "copy": read_copy,
    "device": read_through_device,
    "own copy": lambda buffer: buffer.copy().numpy(),
}


@pytest.mark.parametrize("kind", ["mapped", "managed"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_comes_after_a_late_fill(emulated, kind, read) -> None:
    buffer = cumem.zeros(1000, "i4", kind)
    stream = cumem.Stream()
    session.shut(stream)
    buffer.fill(5, stream=stream)
    with opened_soon(stream):
        assert (read(buffer) == 5).all()


def test_second_reader_waits_as_well(emulated) -> None:
    """If two threads read a buffer that is filled late, neither may see old bytes."""
    buffer = cumem.zeros(4096, "u1", "mapped")
    stream = cumem.Stream()
    seen: list[bool] = []
    readers = [
        threading.Thread(target=lambda: seen.append(bool((buffer.numpy() == 1).all())))
        for _ in range(4)
    ]
    with session.gate(stream):
        buffer.fill(1, stream=stream)
        for reader in readers:
            reader.start()
            session.wait_until_waiting(reader)
        assert seen == []
    for reader in readers:
        reader.join()
    assert seen == [True] * 4


def test_wait_that_failed_leaves_the_fill_late(emulated) -> None:
    buffer = cumem.zeros(64, "u1", "mapped")
    stream = cumem.Stream()
    session.shut(stream)
    buffer.fill(1, stream=stream)
    session.testing.plan_fault("stream_query", 1)
    with pytest.raises(cumem.CudaError):
        buffer.numpy()
    session.testing.plan_fault(None, 0)
    with opened_soon(stream):
        assert (buffer.numpy() == 1).all()


def test_filled_buffer_may_be_dropped_at_once(emulated, make) -> None:
    stream = cumem.Stream()
    with session.gate(stream):
        buffer = make(4096, "f8")
        buffer.fill(1.5, stream=stream)
        with opened_soon(stream):
            del buffer
            others = [cumem.empty_mapped(4096, "f8") for _ in range(4)]
            for other in others:
                other.fill(3)
    stream.synchronize()
    for other in others:
        assert (other.numpy() == 3).all()


def test_managed_memory_on_a_device_is_filled_there(emulated) -> None:
    for value in (np.array(3, "u1"), np.array(1.5), np.array(b"odd", "S3")):
        buffer = cumem.zeros(100_000, value.dtype, "managed")
        buffer.prefetch_pages(0)
        cumem.current_stream().synchronize()
        assert session.testing.host_pages(buffer) == 0
        buffer.fill(value)
        assert session.testing.host_pages(buffer) == 0
        assert bytes_now(buffer) == value.tobytes() * 100_000
        buffer.prefetch_pages("host")
        cumem.current_stream().synchronize()
        buffer.fill(np.zeros((), value.dtype))
        assert bytes_now(buffer) == bytes(buffer.nbytes)
        assert session.testing.host_pages(buffer) > 0


def test_memory_attached_to_the_host_is_filled_by_it(runtime) -> None:
    buffer = cumem.empty_managed(1000, "u1", attach="host")
    buffer.fill(3, stream=cumem.Stream())
    assert bytes_now(buffer) == b"\3" * 1000


@pytest.mark.parametrize("kind", ["mapped", "managed", "pinned"])
def test_fill_without_stream_is_done_on_return(runtime, kind) -> None:
    buffer = cumem.empty(10_000, "f8", kind)
    buffer.fill(2.5)
    assert bytes_now(buffer) == np.full(10_000, 2.5).tobytes()


@pytest.mark.parametrize("kind", ["mapped", "managed"])
def test_fills_and_copies_keep_the_streams_order(runtime, kind) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(1000, "f8", kind)
    copies = [cumem.empty_pinned(1000) for _ in range(3)]
    for value, copied in enumerate(copies, 1):
        buffer.fill(value, stream=stream)
        cumem.copy_async(copied, buffer, stream=stream)
    for value, copied in enumerate(copies, 1):
        assert (copied.numpy() == value).all()


# -- device memory in the order of its stream: without a transfer ------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "call"),
    [
        ("u1", 7, "fill_8_async"),
        ("f2", 1.5, "fill_16_async"),
        ("f4", 1.5, "fill_32_async"),
    ],
)
def test_fill_of_a_device_is_one_call_of_the_runtime(
    emulated, dtype, value, call
) -> None:
    stream = cumem.Stream()
    buffer = cumem.empty_device(64, dtype, stream=stream)
    buffer.fill(0, stream=stream)
    counts = session.testing.copy_counts()
    session.testing.plan_fault(None, 0)  # This resets the counters.
    with session.gate(stream):
        buffer.fill(value, stream=stream)
        assert session.testing.pending_transfers() == 0
    assert session.testing.fault_count(call) == 1
    for other in ("event_create", "event_record", "stream_wait_event", "stream_query"):
        assert session.testing.fault_count(other) == 0
    assert session.testing.copy_counts()["quick"] == counts["quick"] + 1
    assert (values.get(buffer) == value).all()


def test_fill_after_work_of_another_stream_comes_after_it(emulated) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    buffer = cumem.zeros(64, "u1")
    with session.gate(first):
        buffer.fill(1, stream=first)
        # This resets the counters.
        session.testing.plan_fault(None, 0)
        buffer.fill(2, stream=second)
        assert session.testing.fault_count("stream_wait_event") > 0
        buffer.fill(3, stream=second)
    second.synchronize()
    assert values.get(buffer).tolist() == [3] * 64


def test_fill_that_the_runtime_refuses_is_reported_and_leaves_nothing(emulated) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(64, "f4", stream=stream)
    session.testing.plan_fault("fill_32_async", 1)
    with pytest.raises(cumem.CudaError):
        buffer.fill(1.5, stream=stream)
    session.testing.plan_fault(None, 0)
    assert session.testing.pending_transfers() == 0
    buffer.fill(2.5, stream=stream)
    stream.synchronize()
    assert (values.get(buffer) == 2.5).all()
