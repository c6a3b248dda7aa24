# SPDX-License-Identifier: Apache-2.0
"""Tests of ended objects and dtypes, which cumem keeps to use them again.

Both are kept for speed. The tests end a buffer in every way, make another one, and
check that it is as new; they also repeat arguments, and ask for memory on streams.
"""

from __future__ import annotations

import gc
import sys
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

EMPTY = {kind: getattr(cumem, f"empty_{kind}") for kind in KINDS}


def describe(buffer: cumem.Buffer) -> tuple:
    """Return all that a user can read of a buffer, except its address and its bytes."""
    return (
        type(buffer),
        buffer.shape,
        buffer.strides,
        buffer.dtype,
        buffer.nbytes,
        buffer.base,
        buffer.readonly,
        buffer.kind,
        buffer.device,
    )


def end_with_block(buffer: cumem.Buffer) -> None:
    with buffer:
        pass


def leave_with_block_while_exported(buffer: cumem.Buffer) -> None:
    """End the buffer by a `with` block inside which a view of it was released."""
    if buffer.kind == "device":
        return
    view = memoryview(buffer)
    with buffer:
        view.release()


def make_read_only(buffer: cumem.Buffer) -> None:
    """Make a read-only buffer of the same bytes, as unpickling does, and drop it."""
    if buffer.kind == "device":
        return
    rebuild, args = buffer.__reduce_ex__(2)
    assert args[-1] is False
    assert rebuild(*args[:-1], True).readonly


ENDS = {
    "free": lambda buffer: buffer.free(),
    "with": end_with_block,
    "export": leave_with_block_while_exported,
    "read-only": make_read_only,
    "weakref": lambda buffer: weakref.ref(buffer, lambda _: None),
    "fill": lambda buffer: buffer.fill(1),
    "copy": lambda buffer: cumem.copy(buffer, np.zeros(buffer.shape, buffer.dtype)),
    "stream": lambda buffer: buffer.record_stream(cumem.Stream()),
    "dlpack": lambda buffer: buffer.__dlpack__(),
    "view": lambda buffer: buffer[..., None],
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_buffer_after_one_that_ended_is_as_new(runtime, kind: str, end: str) -> None:
    empty = EMPTY[kind]
    kept = [empty(7, "u1") for _ in range(80)]  # This uses up what earlier tests left.
    expected = describe(empty((2, 3), "f4"))
    del kept
    for shape in [5, (2, 3), (1, 2, 3, 2, 1), 0, ()]:
        buffer = empty(shape, "i2")
        ENDS[end](buffer)
        del buffer
        fresh = empty((2, 3), "f4")
        assert describe(fresh) == expected
        assert weakref.getweakrefcount(fresh) == 0
        fresh.fill(2)
        assert (values.get(fresh) == 2).all()
        fresh.free()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_outlives_its_buffer_is_not_reused(runtime, kind: str) -> None:
    buffer = EMPTY[kind](1000, "i4")
    buffer.fill(5)
    capsule = buffer.__dlpack__()
    address = buffer.ptr
    del buffer
    others = [EMPTY[kind](1000, "i4") for _ in range(10)]
    assert address not in [other.ptr for other in others]
    for other in others:
        other.fill(6)
    del capsule, others
    gc.collect()


@pytest.mark.parametrize("kind", KINDS)
def test_kept_objects_are_few_and_end(runtime, kind: str) -> None:
    live = [EMPTY[kind](8) for _ in range(500)]
    kind_type = type(live[0])
    before = sys.getrefcount(kind_type)
    del live
    after = sys.getrefcount(kind_type)
    assert 500 - 64 <= before - after <= 500


def test_buffers_of_a_generation_that_ended_are_reused(emulated) -> None:
    old = cumem.empty_device(10)
    cumem.shutdown()
    with pytest.raises(ValueError, match="closed"):
        old.fill(1)
    del old
    new = cumem.empty_device(10)
    new.fill(3)
    assert (values.get(new) == 3).all()


# -- arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_usual_arguments_mean_the_same_the_second_time(runtime, kind: str) -> None:
    empty = EMPTY[kind]
    for _ in range(3):
        # Such a text is not interned, so it is another object than the name in C.
        name = "".join(["sh", "ape"])
        for buffer in [
            empty((4, 2), "f4"),
            empty((4, 2), dtype="f4"),
            empty(shape=(4, 2), dtype="f4"),
            empty(dtype="f4", shape=(4, 2)),
            empty([4, 2], np.float32),
            empty((np.int64(4), 2), np.dtype("f4"), order="C"),
            empty(**{name: (4, 2)}, dtype=np.float32),
        ]:
            assert (buffer.shape, buffer.strides) == ((4, 2), (8, 4))
            assert buffer.dtype == np.float32
        assert empty(3).dtype == np.float64
        assert empty(3, None).dtype == np.float64


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_pool_mean_the_same_the_second_time(runtime, kind: str) -> None:
    empty = EMPTY[kind]
    pool = cumem.Pool(kind)
    for _ in range(3):
        for order, strides in [
            ("C", (24, 8, 4)),
            ("F", (4, 16, 48)),
            (None, (24, 8, 4)),
        ]:
            for name in (order, order and "".join([order, ""])):
                for buffer in [
                    empty([4, 3, 2], "f4", order=name),
                    empty((4, 3, 2), dtype="f4", order=name, pool=None),
                    empty((4, 3, 2), dtype="f4", order=name, pool=pool),
                    cumem.empty((4, 3, 2), "f4", kind, order=name),
                    cumem.empty((4, 3, 2), "f4", "".join([kind, ""]), order=name),
                    cumem.empty((4, 3, 2), "f4", kind=kind, order=name, pool=pool),
                    cumem.empty((4, 3, 2), "f4", order=name, pool=pool),
                ]:
                    assert (buffer.shape, buffer.strides) == ((4, 3, 2), strides)
                    assert buffer.kind == kind
        del buffer
        assert pool.stats().live_count == 0
    assert pool.stats().allocation_count == 3 * 3 * 2 * 3


def test_kind_by_place_is_the_one_asked_for(runtime) -> None:
    for _ in range(3):
        for kind in KINDS:
            assert type(cumem.empty(10, "u1", kind)) is type(EMPTY[kind](10))
        assert cumem.empty(10).kind == "device"


# -- streams -----------------------------------------------------------------------------


def on_argument(stream: cumem.Stream, pool: cumem.Pool) -> cumem.Buffer:
    return cumem.empty_device(1000, "u1", stream=stream, pool=pool)


def on_current(stream: cumem.Stream, pool: cumem.Pool) -> cumem.Buffer:
    with pool, stream:
        return cumem.empty(1000, "u1")


def on_allocate(stream: cumem.Stream, pool: cumem.Pool) -> cumem.Buffer:
    return pool.allocate(1000, stream)


def on_current_allocate(stream: cumem.Stream, pool: cumem.Pool) -> cumem.Buffer:
    with stream:
        return pool.allocate(1000)


STREAMED = [on_argument, on_current, on_allocate, on_current_allocate]


@pytest.mark.parametrize("make", STREAMED)
def test_memory_of_a_stream_goes_to_that_stream_alone(emulated, make) -> None:
    stream, other, pool = cumem.Stream(), cumem.Stream(), cumem.Pool()
    for _ in range(3):  # The second round finds a kept object and memory.
        buffer = make(stream, pool)
        session.shut(stream)
        buffer.fill(1, stream=stream)
        address = buffer.ptr
        del buffer
        strangers = [make(other, pool), pool.allocate(1000)]
        assert address not in [buffer.ptr for buffer in strangers]
        assert make(stream, pool).ptr == address
        session.testing.gate_open(stream)
        assert session.testing.check_pools()
        del strangers
    stats = pool.stats()
    assert (stats.live_count, stats.in_flight_count) == (0, 0)
    assert stats.allocation_count == 3 * 4


@pytest.mark.parametrize("make", STREAMED)
def test_stream_lives_as_long_as_what_was_made_on_it(emulated, make) -> None:
    pool = cumem.Pool()
    make(cumem.Stream(), pool)
    streams = session.testing.counts()["streams"]
    for _ in range(3):
        stream = cumem.Stream()
        kept = [make(stream, pool) for _ in range(5)]
        ident = weakref.ref(stream)
        del stream
        assert ident() is None
        assert session.testing.counts()["streams"] == streams + 1
        del kept
        # This forgets streams whose work has ended.
        pool.trim()
        streams = session.testing.counts()["streams"]
        assert streams <= 1


@pytest.mark.parametrize("make", STREAMED[:3:2])
def test_closed_stream_or_one_of_another_device_is_refused(emulated, make) -> None:
    pool = cumem.Pool()
    closed = cumem.Stream()
    make(closed, pool)
    closed.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="closed"):
            make(closed, pool)
        with pytest.raises(ValueError, match="device"):
            make(cumem.Stream(device=1), pool)
        with pytest.raises(TypeError, match="stream"):
            make("stream", pool)  # type: ignore[arg-type]
    assert pool.stats().allocation_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_are_refused_the_second_time(runtime, kind: str) -> None:
    empty = EMPTY[kind]
    for _ in range(3):
        del_me = empty(4)
        del del_me
        for error, args, keywords in [
            (TypeError, (), {}),
            (TypeError, (), {"dtype": "f4"}),
            (TypeError, (3,), {"shape": 3}),
            (TypeError, (3, "f4"), {"dtype": "f4"}),
            (TypeError, (3,), {"shape\0": 3}),
            (TypeError, (3,), {"\ud800": 3}),
            (TypeError, (True,), {}),
            (TypeError, (3.0,), {}),
            (TypeError, (3, object), {}),
            (ValueError, (-3,), {}),
            (ValueError, ((3, -1),), {}),
            (ValueError, (1 << 62,), {}),
            (ValueError, (1 << 70,), {}),
            (ValueError, ((1 << 40, 1 << 40),), {}),
        ]:
            with pytest.raises(error):
                empty(*args, **keywords)


def test_class_may_change_its_dtype(runtime) -> None:
    class Changing:
        dtype = np.dtype("f4")

    assert cumem.empty_pinned(3, Changing).dtype == np.float32
    Changing.dtype = np.dtype("i2")
    assert cumem.empty_pinned(3, Changing).dtype == np.int16


def test_dtype_that_is_kept_is_the_one_asked_for(runtime) -> None:
    spellings = [f"{order}{code}" for order in "<>=" for code in "bhilqBHILQefdFD?"]
    for _ in range(2):
        for spelling in spellings:  # These are more dtypes than cumem keeps.
            assert cumem.empty_pinned(2, spelling).dtype == np.dtype(spelling)
    structured = np.dtype([("a", "f4")])
    count = sys.getrefcount(structured)
    cumem.empty_pinned(2, structured).free()
    assert sys.getrefcount(structured) == count


@pytest.mark.parametrize("kind", KINDS)
def test_kept_objects_serve_every_pool(runtime, kind: str) -> None:
    allocate = EMPTY[kind]
    with cumem.Pool(kind) as pool:
        # The second round finds a kept object, the third finds memory as well.
        for _ in range(3):
            buffer = allocate(1000, "u1")
            assert pool.stats().live_count == 1
            del buffer
        assert pool.stats().live_count == 0
        for _ in range(3):
            buffer = pool.allocate(1000)
            assert (buffer.shape, buffer.dtype) == ((1000,), np.dtype("u1"))
            assert type(buffer) is type(allocate(8))
            assert pool.stats().live_nbytes >= 1000
            del buffer
    outside = allocate(1000, "u1")
    assert pool.stats().live_count == 0
    del outside
    live = pool.allocate(1000)
    pool.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.allocate(1000)
    assert live.nbytes == 1000


def test_pool_of_another_kind_leaves_the_usual_one(runtime) -> None:
    with cumem.Pool("mapped") as pool:
        for _ in range(3):
            buffer = cumem.empty_pinned(1000, "u1")
            assert buffer.kind == "pinned"
            assert pool.stats().live_count == 0
            del buffer
