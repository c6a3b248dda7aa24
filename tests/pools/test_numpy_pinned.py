# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays born in pinned memory: which are, what they go through, and their end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import copy
import ctypes
import gc
import io
import os
import pickle
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import faults, programs, session
from support.exporters import new_capsule, pointer_of
from support.forks import fork_and_run
from support.session import testing

import cumem

KIB = 1 << 10
MIB = 1 << 20


def is_pinned(array: np.ndarray) -> bool:
    """What the driver says of its memory."""
    return cumem.asbuffer(array).kind == "pinned"


def live() -> int:
    """Bytes in arrays of the default pool of pinned memory."""
    return cumem.default_pool("pinned").stats().live_nbytes


@pytest.fixture
def enabled(runtime: session.Runtime) -> Iterator[session.Runtime]:
    """The whole process makes pinned arrays of 64 KiB or more."""
    cumem.numpy_pinned.enable()
    try:
        yield runtime
    finally:
        cumem.numpy_pinned.disable()


# -- blocks ------------------------------------------------------------------------------


def test_arrays_in_the_block_are_pinned_and_outlive_it(runtime) -> None:
    before = np.ones(MIB, "u1")
    with cumem.numpy_pinned():
        inside = np.ones(MIB, "u1")
        small = np.ones(64 * KIB - 1, "u1")
        least = np.ones(64 * KIB, "u1")
    after = np.ones(MIB, "u1")
    assert [is_pinned(a) for a in (before, inside, small, least, after)] == [
        *(False, True, False, True, False)
    ]
    assert live() == inside.nbytes + least.nbytes
    inside[:] = 7
    assert (inside == 7).all()
    assert least.all()
    del inside, least
    assert live() == 0


@pytest.mark.parametrize("size", [MIB, "1MiB", "1024 KiB", np.int64(MIB)])
def test_min_nbytes_is_a_count_or_a_text(runtime, size) -> None:
    with cumem.numpy_pinned(size):
        assert is_pinned(np.ones(MIB, "u1"))
        assert not is_pinned(np.ones(MIB - 1, "u1"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"min_nbytes": "many"}, ValueError, "min_nbytes"),
        ({"min_nbytes": "50%"}, ValueError, "min_nbytes"),
        ({"min_nbytes": -1}, ValueError, "min_nbytes"),
        ({"min_nbytes": 1.5}, TypeError, "min_nbytes"),
        ({"pool": 1}, TypeError, "pool must be a Pool or None, not int"),
    ],
)
def test_wrong_arguments_are_refused(runtime, arguments, error, text) -> None:
    for call in (cumem.numpy_pinned, cumem.numpy_pinned.enable):
        with pytest.raises(error, match=text):
            call(**arguments)
    assert not is_pinned(np.ones(MIB, "u1"))


def test_pool_chooses_where(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.numpy_pinned(pool=pool):
        array = np.ones(MIB, "u1")
    assert (pool.stats().live_nbytes, live()) == (MIB, 0)
    mapped = cumem.Pool("mapped")
    with cumem.numpy_pinned(pool=mapped):
        other = np.ones(MIB, "u1")
    assert mapped.stats().live_nbytes == MIB
    del array, other


def test_pools_that_cannot_serve_are_refused(runtime) -> None:
    for kind in ("device", "managed"):
        with pytest.raises(ValueError, match=f"pinned or mapped memory, not of {kind}"):
            cumem.numpy_pinned(pool=cumem.Pool(kind))
    with pytest.raises(ValueError, match="write-combined"):
        cumem.numpy_pinned(pool=cumem.Pool("pinned", write_combined=True))
    closed = cumem.Pool("pinned")
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        cumem.numpy_pinned(pool=closed)


def test_nested_blocks_each_count_for_themselves(runtime) -> None:
    with cumem.numpy_pinned("64KiB"):
        with cumem.numpy_pinned("1MiB"):
            assert not is_pinned(np.ones(64 * KIB, "u1"))
            assert is_pinned(np.ones(MIB, "u1"))
        assert is_pinned(np.ones(64 * KIB, "u1"))
    assert not is_pinned(np.ones(MIB, "u1"))


def test_an_exception_ends_the_block(runtime) -> None:
    with pytest.raises(KeyError), cumem.numpy_pinned():
        raise KeyError
    assert not is_pinned(np.ones(MIB, "u1"))


def test_one_object_has_one_block(runtime) -> None:
    block = cumem.numpy_pinned()
    with block, pytest.raises(RuntimeError, match="make another one"), block:
        pass
    with pytest.raises(RuntimeError, match="make another one"), block:
        pass
    assert not is_pinned(np.ones(MIB, "u1"))


def test_blocks_that_end_in_another_order_leave_nothing(runtime) -> None:
    def generator() -> Iterator[bool]:
        with cumem.numpy_pinned("1MiB"):
            yield is_pinned(np.ones(MIB, "u1"))

    steps = generator()
    assert next(steps)
    assert is_pinned(np.ones(MIB, "u1"))  # a generator shares its caller's context
    with cumem.numpy_pinned("2MiB"):
        assert next(steps, None) is None
        assert is_pinned(np.ones(2 * MIB, "u1"))
        assert not is_pinned(np.ones(MIB, "u1"))
    assert not is_pinned(np.ones(4 * MIB, "u1"))
    assert handler_name() == "default_allocator"


def test_blocks_that_overlap_do_not_keep_each_other(runtime) -> None:
    pools = [cumem.Pool("pinned") for _ in range(6)]
    blocks = [cumem.numpy_pinned(pool=pool) for pool in pools]
    left = [weakref.ref(pool) for pool in pools]
    del pools
    entered: list[cumem.numpy_pinned] = []
    while blocks:
        entered.append(blocks.pop(0))
        entered[-1].__enter__()
        if len(entered) == 3:
            entered.pop(0).__exit__(None, None, None)
            assert [pool() is None for pool in left].count(False) == len(
                [*entered, *blocks]
            )
            assert is_pinned(np.ones(MIB, "u1"))
    while entered:
        entered.pop(0).__exit__(None, None, None)
    assert not any(pool() for pool in left)
    assert handler_name() == "default_allocator"


def numpy_core() -> Any:
    """NumPy's own modules, which 1.26 has under their old name, its `_core` empty."""
    return np._core if int(np.__version__.partition(".")[0]) >= 2 else np.core


def handler_name(*array: np.ndarray) -> str:
    return numpy_core().multiarray.get_handler_name(*array)


def test_block_holds_for_its_context_alone(runtime) -> None:
    found = {}

    def look(name: str) -> None:
        found[name] = is_pinned(np.ones(MIB, "u1"))

    with cumem.numpy_pinned():
        inherited = contextvars.copy_context()
        inherited.run(look, "copied context")
        contextvars.Context().run(look, "empty context")
    inherited.run(look, "after its end")
    look("outside")
    assert found == {
        "copied context": True,
        "empty context": False,
        "after its end": False,
        "outside": False,
    }


def test_tasks_inherit_and_do_not_disturb_each_other(runtime) -> None:
    async def child() -> bool:
        await asyncio.sleep(0)
        return is_pinned(np.ones(MIB, "u1"))

    async def opener(inside: asyncio.Event, go_on: asyncio.Event) -> None:
        with cumem.numpy_pinned():
            inside.set()
            await go_on.wait()
            assert is_pinned(np.ones(MIB, "u1"))

    async def main() -> None:
        inside, go_on = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(opener(inside, go_on))
        await inside.wait()
        assert not is_pinned(np.ones(MIB, "u1"))
        assert not await asyncio.create_task(child())
        go_on.set()
        await task
        with cumem.numpy_pinned():
            assert await asyncio.create_task(child())
            assert await asyncio.to_thread(lambda: is_pinned(np.ones(MIB, "u1")))
            late = asyncio.create_task(child())
        assert not await late  # the block is over

    asyncio.run(main())


class Allocator(ctypes.Structure):
    """NumPy's PyDataMemAllocator."""

    MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    CALLOC = ctypes.CFUNCTYPE(
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    )
    REALLOC = ctypes.CFUNCTYPE(
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    )
    FREE = ctypes.CFUNCTYPE(*(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t))
    _fields_ = (
        *(("ctx", ctypes.c_void_p), ("malloc", MALLOC), ("calloc", CALLOC)),
        *(("realloc", REALLOC), ("free", FREE)),
    )


class Handler(ctypes.Structure):
    """NumPy's PyDataMem_Handler."""

    _fields_ = (
        *(("name", ctypes.c_char * 127), ("version", ctypes.c_uint8)),
        ("allocator", Allocator),
    )


#: What arrays of a failed test may still be freed by, as long as the process lives.
_foreign: list[Handler] = []


def foreign_handler() -> tuple[Handler, object]:
    """Of another library, over the C library; and its capsule."""
    libc = ctypes.CDLL(None)
    for name in ("malloc", "calloc", "realloc"):
        getattr(libc, name).restype = ctypes.c_void_p
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    handler = Handler(
        b"foreign",
        1,
        Allocator(
            None,
            Allocator.MALLOC(lambda _, n: libc.malloc(size(n))),
            Allocator.CALLOC(lambda _, n, m: libc.calloc(size(n), size(m))),
            Allocator.REALLOC(lambda _, p, n: libc.realloc(pointer(p), size(n))),
            Allocator.FREE(lambda _, p, n: libc.free(pointer(p))),
        ),
    )
    _foreign.append(handler)
    return handler, new_capsule(ctypes.addressof(handler), b"mem_handler", None)


def set_handler(capsule: object) -> object:
    """NumPy's PyDataMem_SetHandler."""
    table = pointer_of(numpy_core()._multiarray_umath._ARRAY_API, None)
    function = (ctypes.c_void_p * 305).from_address(table)[304]
    function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(function)
    return function(capsule)


def test_handlers_of_others_are_left_and_put_back(runtime) -> None:
    handler, capsule = foreign_handler()
    before = set_handler(capsule)
    try:
        cumem.numpy_pinned.enable()
        outside = np.ones(MIB, "u1")
        assert (handler_name(outside), is_pinned(outside)) == ("foreign", False)
        with cumem.numpy_pinned():
            inside = np.ones(MIB, "u1")
            small = np.ones(10, "u1")
        assert (handler_name(inside), is_pinned(inside)) == ("cumem_pinned", True)
        assert handler_name() == "foreign"
        with cumem.numpy_pinned():
            set_handler(capsule)  # and not put back: it is the innermost
        assert handler_name() == "foreign"
    finally:
        cumem.numpy_pinned.disable()
        set_handler(before)
    assert handler_name() == "default_allocator"
    outside.resize(2 * MIB, refcheck=False)
    inside.resize(2 * MIB, refcheck=False)
    assert outside[:MIB].all()
    assert inside[:MIB].all()
    assert small.all()
    del outside, inside, small
    gc.collect()
    assert handler.version == 1  # alive until here


def test_block_left_in_another_thread_is_over_in_both(runtime) -> None:
    block = cumem.numpy_pinned()

    def run() -> None:
        block.__exit__(None, None, None)

    context = contextvars.copy_context()
    context.run(block.__enter__)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not context.run(lambda: is_pinned(np.ones(MIB, "u1")))


# -- the whole process -------------------------------------------------------------------


def test_enable_holds_for_all_threads_until_disable(runtime) -> None:
    def pinned() -> bool:
        return is_pinned(np.ones(MIB, "u1"))

    with concurrent.futures.ThreadPoolExecutor(1) as early:
        assert not early.submit(pinned).result()
        cumem.numpy_pinned.enable("1MiB")
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as late:
                assert late.submit(pinned).result()
            assert early.submit(pinned).result()
            assert pinned()
            assert contextvars.Context().run(pinned)
            assert not is_pinned(np.ones(MIB - 1, "u1"))
            kept = np.ones(MIB, "u1")
        finally:
            cumem.numpy_pinned.disable()
        assert not early.submit(pinned).result()
        assert not pinned()
    cumem.numpy_pinned.disable()
    assert is_pinned(kept)
    assert kept.all()
    kept.resize(10)
    assert not is_pinned(kept)
    assert kept.all()


def test_enable_again_replaces_and_blocks_go_before_it(runtime) -> None:
    pool = cumem.Pool("pinned")
    cumem.numpy_pinned.enable("1MiB")
    first = np.ones(MIB, "u1")
    cumem.numpy_pinned.enable("2MiB", pool=pool)
    try:
        second = np.ones(2 * MIB, "u1")
        assert not is_pinned(np.ones(MIB, "u1"))
        assert (live(), pool.stats().live_nbytes) == (MIB, 2 * MIB)
        with cumem.numpy_pinned("64KiB"):
            third = np.ones(MIB, "u1")
        assert live() == 2 * MIB
    finally:
        cumem.numpy_pinned.disable()
    del first, second, third
    assert (live(), pool.stats().live_nbytes) == (0, 0)


def test_many_threads_share_one_pool(enabled) -> None:
    wrong: list[object] = []
    start = threading.Barrier(4)

    def run(number: int) -> None:
        start.wait()
        kept = [np.full(64 * KIB + number, number, "u1") for _ in range(20)]
        for round_ in range(30):
            kept[round_ % 20] = np.zeros(64 * KIB + 999 * round_, "u1")
            if kept[round_ % 20].any():
                wrong.append("not zero")
            kept[round_ % 20] += number
        wrong.extend(a for a in kept if not (a == number).all())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- what arrays go through --------------------------------------------------------------


def test_zeros_are_zero_in_memory_that_was_used(runtime) -> None:
    pool = cumem.Pool("pinned", limit="2MiB")
    with cumem.numpy_pinned(pool=pool):
        for _ in range(3):
            array = np.zeros(2 * MIB, "u1")
            assert not array.any()
            array[:] = 255
            del array
            pool.trim(keep="2MiB")  # so that it is idle
        assert pool.stats().growth_count == 1
        long = np.zeros(
            (2, 512, 1024), "i2"
        )  # memory is cleared by bytes, not by items
        assert is_pinned(long)
        assert not long.any()
        del long


def test_resize_keeps_the_data_wherever_it_goes(runtime) -> None:
    cumem.empty_pinned(200 * MIB, "u1")  # room: a resize takes what there is
    steps = [10, 64 * KIB, 100, MIB, MIB + 1, 8 * MIB, 3 * MIB, 64 * KIB, 1, 0, 2 * MIB]
    with cumem.numpy_pinned():
        array = np.arange(7, dtype="u1")
        for nbytes in steps:
            known = array.copy()
            array.resize(nbytes, refcheck=False)
            kept = min(nbytes, known.size)
            assert array.size == nbytes
            assert (array[:kept] == known[:kept]).all()
            assert not array[kept:].any()
            assert is_pinned(array) == (nbytes >= 64 * KIB), nbytes
            array[:] = np.arange(nbytes, dtype="u1")
    del array, known
    assert live() == 0


def test_resize_takes_no_more_than_the_pool_has(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.numpy_pinned(pool=pool):
        array = np.arange(64 * KIB, dtype="u1")
        growths = pool.stats().growth_count
        array.resize(64 * MIB, refcheck=False)
        assert (array[: 64 * KIB] == np.arange(64 * KIB, dtype="u1")).all()
        assert not array[64 * KIB :].any()
    assert pool.stats().growth_count == growths


def test_resize_that_fails_leaves_the_array(runtime) -> None:
    with cumem.numpy_pinned():
        array = np.ones(MIB, "u1")
        with pytest.raises(MemoryError):
            array.resize(1 << 62, refcheck=False)
        assert array.size == MIB
        assert array.all()
        assert is_pinned(array)


def test_impossible_sizes_raise_as_numpy_does(runtime) -> None:
    with cumem.numpy_pinned():
        for make in (np.empty, np.zeros):
            with pytest.raises(MemoryError):
                make(1 << 62, "u1")


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array(5.0),
        lambda: np.empty((0, 3)),
        lambda: np.zeros((4, 0)),
        lambda: np.array([], "O"),
        lambda: np.array([None, "text", 10**30], dtype=object),
        lambda: np.zeros(100, [("a", "i4"), ("b", "f8", (3,))]),
        lambda: np.array(["a", "much longer"]),
        lambda: np.arange(1000)[::-3].copy(),
        lambda: np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        lambda: np.array(["2020-01-01"], "M8[D]"),
        lambda: np.sort(np.arange(5000)[::-1]),
        lambda: np.argsort(np.arange(5000)[::-1], kind="stable"),
        lambda: np.fromiter(range(3000), "i8"),
        lambda: np.fromstring("1 2 " * 3000, sep=" "),  # resizes without the GIL
        lambda: np.loadtxt(io.StringIO("1 2\n3 4\n" * 200)),
    ],
)
def test_every_sort_of_array_is_as_without(runtime, make: Callable) -> None:
    expected = make()
    with cumem.numpy_pinned(0):
        array = make()
        assert handler_name(array) == "cumem_pinned"
        assert live() > 0
    np.testing.assert_array_equal(array, expected)
    assert (array.dtype, array.strides) == (expected.dtype, expected.strides)
    del array
    gc.collect()
    assert live() == 0


def test_object_arrays_keep_and_drop_their_objects(runtime) -> None:
    class Thing:
        pass

    thing = Thing()
    count = 20_000
    import sys

    before = sys.getrefcount(thing)
    with cumem.numpy_pinned():
        array = np.full(count, thing, dtype=object)
        assert is_object_pinned(array)
    assert sys.getrefcount(thing) == before + count
    del array
    assert sys.getrefcount(thing) == before


def is_object_pinned(array: np.ndarray) -> bool:
    return is_pinned(at_address(array.ctypes.data, array.nbytes))


def at_address(address: int, nbytes: int) -> np.ndarray:
    """The bytes there, of which nobody knows whose they are."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memory, "u1")


def test_arrays_start_where_simd_likes_it(runtime) -> None:
    with cumem.numpy_pinned(0):
        arrays = [np.empty(n, "u1") for n in (1, 3, 17, 1000, 64 * KIB, MIB)]
    assert [a.ctypes.data % 64 for a in arrays] == [0] * len(arrays)
    del arrays


def test_pickles_and_files_come_back_pinned(runtime, tmp_path) -> None:
    array = np.arange(100_000)
    np.save(tmp_path / "a.npy", array)
    array.tofile(tmp_path / "a.bin")
    with cumem.numpy_pinned():
        loaded = np.load(tmp_path / "a.npy")
        read = np.fromfile(tmp_path / "a.bin", array.dtype)
        again = pickle.loads(pickle.dumps(array, 5))  # the bytes are the pickle's
        copied = pickle.loads(pickle.dumps(np.asfortranarray(loaded.reshape(100, -1))))
        mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert is_pinned(loaded)
    assert is_pinned(read)
    assert not is_pinned(mapped)
    for each in (loaded, read, again, copied.ravel(), mapped):
        assert (each == array).all()
    del loaded, read, again, copied, mapped, each


def test_tracemalloc_sees_the_arrays(runtime) -> None:
    tracemalloc.start()
    try:
        with cumem.numpy_pinned():
            array = np.ones(MIB, "u1")
            zero = np.zeros(MIB, "u1")
        array.resize(2 * MIB, refcheck=False)
        traces = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
        )
        sizes = sorted(trace.size for trace in traces.traces)
        assert sizes[-2:] == [MIB, 2 * MIB]
        del array, zero
    finally:
        tracemalloc.stop()
    assert live() == 0


def test_big_arrays(runtime) -> None:
    with cumem.numpy_pinned():
        big = np.zeros(200 * MIB, "u1")
        assert is_pinned(big)
        assert not big[:: 4 * KIB].any()
        big[-1] = 1
        double = big + big  # so is what a ufunc makes
        assert is_pinned(double)
        assert double[-1] == 2
    del big, double


def test_counters_and_snapshots_name_the_memory(runtime) -> None:
    with cumem.numpy_pinned():
        array = np.ones(MIB, "u1")
    assert cumem.stats()["pinned"].live_nbytes == MIB
    assert any(
        block.state == "live" and block.nbytes == MIB
        for segment in cumem.default_pool("pinned").snapshot().segments
        for block in segment.blocks
    )
    del array


# -- where pinned memory is not to be had -------------------------------------------------


def test_at_the_limit_arrays_are_ordinary(runtime) -> None:
    called = []
    hook = cumem.on_out_of_memory(lambda *what: called.append(what))
    pool = cumem.Pool("pinned", limit="4MiB")
    with cumem.numpy_pinned(pool=pool):
        arrays = [np.full(MIB, i, "u1") for i in range(8)]
        assert sum(map(is_pinned, arrays)) == 4
        assert all((a == i).all() for i, a in enumerate(arrays))
        zeros = np.zeros(2 * MIB, "u1")
        assert not is_pinned(zeros)
        assert not zeros.any()
        arrays[0].resize(3 * MIB, refcheck=False)
        assert not arrays[0].any()
    assert pool.stats().reserved_nbytes == 4 * MIB
    assert called == []
    hook.remove()
    del arrays


def test_every_call_of_a_growth_may_fail(runtime) -> None:
    pool = cumem.Pool("pinned")

    def scenario() -> None:
        with cumem.numpy_pinned(pool=pool):
            array = np.full(3 * MIB, 5, "u1")
            zeros = np.zeros(3 * MIB, "u1")
        assert (array == 5).all()
        assert not zeros.any()

    def run(op: str | None = None, nth: int = 0) -> None:
        pool.trim()
        testing.plan_fault(op, nth, faults.UNKNOWN)
        scenario()

    run()
    run()  # what is made once is made
    calls = {op: testing.fault_count(op) for op in faults.reached()}
    assert "host_register" in calls or "host_alloc" in calls
    struck = set()
    for op, count in sorted(calls.items()):
        for nth in faults.chosen(op, count):
            with faults.unraised():
                run(op, nth)
            struck |= {testing.fault_struck()} - {None}
            testing.plan_fault(None, 0)
            assert pool.stats().live_nbytes == 0
            assert testing.check_pools()
    assert struck == set(calls)
    run()


def test_out_of_driver_memory_arrays_are_ordinary(emulated) -> None:
    pool = cumem.Pool("pinned")
    with cumem.numpy_pinned(pool=pool):
        for op in ("host_register", "host_alloc"):
            testing.plan_fault(op, 1, 2, repeat=True)
            array = np.ones(MIB, "u1")
            assert array.all()
            testing.plan_fault(None, 0)
        assert pool.stats().live_nbytes <= MIB
        pool.trim()
        assert is_pinned(np.ones(MIB, "u1"))
    del array


def test_shutdown_is_refused_while_arrays_live_and_ends_it(runtime) -> None:
    cumem.numpy_pinned.enable()
    try:
        with cumem.numpy_pinned():
            array = np.ones(MIB, "u1")
            with pytest.raises(BufferError, match=f"pinned buffer of {MIB} bytes"):
                cumem.shutdown()
            assert array.all()
            assert is_pinned(array)
            del array
            cumem.shutdown()
            assert np.ones(MIB, "u1").all()  # ordinary memory, in the block
            assert not testing.opened()
        assert np.zeros(MIB, "u1").sum() == 0  # and in the process
        assert not testing.opened()
        assert not is_pinned(np.ones(MIB, "u1"))  # that opened the driver afresh
        cumem.numpy_pinned.enable()
        assert is_pinned(np.ones(MIB, "u1"))
    finally:
        cumem.numpy_pinned.disable()


def test_closed_pool_makes_ordinary_arrays_and_keeps_what_lives(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.numpy_pinned(pool=pool):
        array = np.ones(MIB, "u1")
        pool.close()
        assert not is_pinned(np.ones(MIB, "u1"))
        assert is_pinned(array)
        assert array.all()
        del array  # the pool's last block, whose end waits: a later call does that
    testing.poll()
    assert testing.live_storages() == 0


def test_dropped_pool_lives_as_long_as_its_arrays(runtime) -> None:
    with cumem.numpy_pinned(pool=cumem.Pool("pinned")):
        array = np.ones(MIB, "u1")
    gc.collect()
    array += 1
    assert (array == 2).all()
    assert is_pinned(array)
    del array


EXITS = {
    "block": "block = cumem.numpy_pinned(); block.__enter__(); a = np.ones(1 << 20)",
    "enabled": "cumem.numpy_pinned.enable(); a = np.ones(1 << 20)",
    "in a module": (
        "cumem.numpy_pinned.enable(); import sys; sys.a = np.ones(1 << 20); "
        "cumem.numpy_pinned.disable()"
    ),
    "at exit": (
        "import atexit; cumem.numpy_pinned.enable(); a = np.ones(1 << 20); "
        "atexit.register(lambda: a.resize(1 << 21, refcheck=False))"
    ),
    "finalizer": (
        "class Late:\n    def __del__(self):\n        b = np.zeros(1 << 20); "
        "b += 1; assert b.all(); b.resize(5, refcheck=False)\n"
        "import sys; cumem.numpy_pinned.enable(); sys.late = Late(); a = np.ones(1 << 20)"
    ),
    "own pool": (
        "block = cumem.numpy_pinned(pool=cumem.Pool('pinned')); block.__enter__(); "
        "a = np.ones(1 << 20); block.__exit__()"
    ),
    "daemon": (
        "import threading; cumem.numpy_pinned.enable()\n"
        "def run():\n    while True: np.zeros(1 << 18)\n"
        "threading.Thread(target=run, daemon=True).start(); np.zeros(1 << 20)"
    ),
}


@pytest.mark.parametrize("case", EXITS)
def test_interpreter_ends_with_arrays_alive(case: str) -> None:
    done = programs.run("-c", f"import numpy as np, cumem\n{EXITS[case]}")
    assert (done.returncode, done.stderr) == (0, "")


# -- reuse -------------------------------------------------------------------------------


@pytest.fixture
def gated(emulated: session.Runtime) -> Iterator[cumem.Stream]:
    """A stream that does nothing yet."""
    stream = cumem.Stream()
    testing.gate_close(stream)
    yield stream
    testing.gate_open(stream)


@pytest.mark.by_driver("context_record_event")
def test_memory_that_others_still_copy_from_is_not_reused(gated) -> None:
    pool = cumem.Pool("pinned", limit="2MiB")
    target = cumem.empty_device(2 * MIB, "u1")
    with cumem.numpy_pinned(pool=pool):
        array = np.full(2 * MIB, 7, "u1")
        address = array.ctypes.data
        # as another library does: from the address, keeping nothing
        cumem.copy_async(target, at_address(address, array.nbytes), stream=gated)
        del array
        for _ in range(3):
            other = np.full(2 * MIB, 9, "u1")
            assert other.ctypes.data != address
            assert not is_pinned(other)
        testing.gate_open(gated)
        gated.synchronize()
        assert (target.to_numpy() == 7).all()
        if session.emulated_driver() < 12_050:  # an older one is asked by trim()
            pool.trim(keep="2MiB")
        again = np.ones(2 * MIB, "u1")
        if again.ctypes.data != address:  # it took a fence, which had not passed yet
            cumem.Device(0).synchronize()
            again = np.ones(2 * MIB, "u1")
        assert again.ctypes.data == address
    del other, again


@pytest.mark.by_driver("context_record_event")
def test_what_waits_for_others_is_bounded(gated) -> None:
    nbytes = 16 * MIB
    pool = cumem.Pool("pinned")
    target = cumem.empty_device(1, "u1")
    target.fill(1, stream=gated)  # so that no fence passes
    with cumem.numpy_pinned(pool=pool):
        pinned = [is_pinned(np.empty(nbytes, "u1")) for _ in range(40)]
    stats = pool.stats()
    assert 256 * MIB <= stats.in_flight_nbytes <= 256 * MIB + 2 * nbytes
    assert stats.reserved_nbytes <= 256 * MIB + 2 * nbytes
    assert pinned[:16] == [True] * 16
    assert pinned[-20:] == [False] * 20
    testing.gate_open(gated)
    cumem.Device(0).synchronize()
    pool.trim(keep="1GiB")
    with cumem.numpy_pinned(pool=pool):
        assert is_pinned(np.empty(nbytes, "u1"))


@pytest.mark.by_driver("context_record_event")
def test_loop_runs_in_the_same_memory(enabled) -> None:
    for _ in range(600):
        np.empty(MIB, "u1")[:] = 1
    stats = cumem.default_pool("pinned").stats()
    assert stats.reserved_nbytes <= 300 * MIB
    if enabled.has("context_record_event"):
        assert stats.allocation_count == 600


def test_what_has_ended_is_asked_however_much_is_cached(enabled) -> None:
    if not enabled.has("context_record_event"):
        pytest.skip("nothing tells when a device's work has ended")
    cumem.empty_pinned(400 * MIB, "u1")  # cached from now on
    for _ in range(8):
        for _ in range(64):
            np.empty(MIB, "u1")
        cumem.Device(0).synchronize()  # the events of before have passed
        stats = cumem.default_pool("pinned").stats()
        assert stats.in_flight_nbytes <= 3 * 64 * MIB
    assert stats.allocation_count == 1 + 8 * 64


def test_hit_and_a_free_make_no_runtime_call(runtime) -> None:
    pool = cumem.Pool("pinned")
    buffer = pool.allocate(16 * MIB)
    del buffer
    with cumem.numpy_pinned(pool=pool):
        np.empty(20 * MIB, "u1")  # grows
        np.empty(MIB, "u1")  # asks what has ended: not soon again
        testing.plan_fault(None, 0)
        array = np.empty(MIB, "u1")
        assert testing.fault_count() == 0
        del array
        assert testing.fault_count() == 0


# -- copies ------------------------------------------------------------------------------


def test_copies_go_straight_from_and_to_the_arrays(runtime) -> None:
    device = cumem.empty_device(8 * MIB, "u1")
    with cumem.numpy_pinned():
        source = np.arange(8 * MIB, dtype="u4").view("u1")[: 8 * MIB].copy()
        target = np.empty_like(source)
    assert (
        cumem.explain(device, source).route
        == cumem.explain(device, cumem.empty_pinned(8 * MIB, "u1")).route
    )
    transfer = cumem.copy_async(device, source)
    del source  # kept by the transfer
    transfer.wait()
    cumem.copy(target, device)
    assert (target == np.arange(8 * MIB, dtype="u4").view("u1")[: 8 * MIB]).all()
    del target, transfer


@pytest.mark.parametrize("nbytes", [MIB, 64 * MIB])
@pytest.mark.parametrize(
    "see",
    [
        lambda array: array,
        cumem.asbuffer,
        lambda array: cumem.asbuffer(array)[3:],
        lambda array: array[5:-7],
        lambda array: array.view("V1").view("u1"),
        memoryview,
        lambda array: cumem.asbuffer(memoryview(array).toreadonly()),
    ],
)
def test_whatever_sees_the_memory_is_copied_as_pinned_memory_is(
    runtime, see, nbytes
) -> None:
    with cumem.numpy_pinned():
        array = np.ones(nbytes, "u1")
    seen = see(array)
    device = cumem.empty_device(len(seen), "u1")
    pinned = cumem.empty_pinned(len(seen), "u1")
    found, expected = cumem.explain(device, seen), cumem.explain(device, pinned)
    assert (found.route, found.why) == (expected.route, expected.why)
    assert cumem.explain(device, np.ones(len(seen), "u1")).why != expected.why
    assert cumem.asbuffer(seen).kind == "pinned"
    cumem.copy(device, seen)
    assert device.to_numpy().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda buffer: buffer.copy(),
        lambda buffer: buffer.copy("F"),
        copy.copy,
        copy.deepcopy,
        lambda buffer: buffer.flatten(),
        lambda buffer: buffer[:, 1:100].ravel(),
        lambda buffer: buffer.astype("i2"),
        lambda buffer: pickle.loads(pickle.dumps(buffer)),
    ],
)
def test_copies_of_ordinary_memory_are_pinned_in_the_block(runtime, make) -> None:
    """They are NumPy's arrays; as ordinary ones they would be staged."""
    array = np.arange(64 * KIB, dtype="u1").reshape(256, -1)
    ordinary: Any = cumem.asbuffer(array)
    with cumem.numpy_pinned(4 * KIB):
        inside = make(ordinary)
    outside = make(ordinary)
    assert (inside.kind, outside.kind) == ("pinned", "pageable")
    assert inside.strides == outside.strides
    assert not inside.readonly
    assert np.array_equal(inside.numpy(), outside.numpy())
    device = cumem.empty_like(inside, kind="device")
    pinned = cumem.empty_like(inside)
    assert cumem.explain(device, inside).why == cumem.explain(device, pinned).why
    assert cumem.asbuffer(inside.numpy()).kind == "pinned"


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0",
    reason="from_dlpack() of this NumPy takes no copy=",
)
def test_a_copy_for_dlpack_is_pinned_in_the_block(runtime) -> None:
    array = np.arange(64 * KIB, dtype="u1")
    with cumem.numpy_pinned(4 * KIB):
        found = np.from_dlpack(cumem.asbuffer(array), copy=True)
    assert is_pinned(found)
    assert not np.shares_memory(found, array)
    assert np.array_equal(found, array)


@pytest.mark.gpu
def test_torch_sees_them_as_pinned(cuda) -> None:
    torch = pytest.importorskip("torch")
    torch.cuda.init()  # before that it says no of all memory
    with cumem.numpy_pinned():
        array = np.arange(1 << 20, dtype="f4")
    assert torch.from_numpy(array).is_pinned()
    assert not torch.from_numpy(np.ones(1 << 20)).is_pinned()
    for round_ in range(50):  # each array is dropped while its copy may run
        with cumem.numpy_pinned():
            array = np.full(1 << 20, round_, "f4")
        there = torch.from_numpy(array).to("cuda", non_blocking=True)
        del array
        assert (there == round_).all().item()


@pytest.mark.gpu
def test_cupy_copies_from_them_in_the_background(cuda) -> None:
    cupy = pytest.importorskip("cupy")
    with cumem.numpy_pinned():
        array = np.arange(1 << 20, dtype="f4")
    attributes = cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data)
    assert attributes.type == cupy.cuda.runtime.memoryTypeHost
    assert (cupy.asarray(array).get() == array).all()
    for round_ in range(50):
        with cumem.numpy_pinned():
            array = np.full(1 << 20, round_, "f4")
        there = cupy.asarray(array)
        del array
        assert bool((there == round_).all())
    cupy.cuda.alloc_pinned_memory(1)  # CuPy then lets go of what was copied


# -- forks -------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_process", [False, True])
def test_child_has_its_arrays_and_makes_ordinary_ones(runtime, whole_process) -> None:
    block = cumem.numpy_pinned()
    arrays: dict[str, np.ndarray] = {}

    def check() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for name in ("read", "grown", "shrunk", "freed"):
            assert (arrays[name] == 5).all()
        arrays["read"][:] = 6
        assert (arrays["read"] == 6).all()
        arrays["grown"].resize(4 * MIB, refcheck=False)
        assert (arrays["grown"][:MIB] == 5).all()
        assert not arrays["grown"][MIB:].any()
        arrays["shrunk"].resize(100, refcheck=False)
        assert (arrays["shrunk"] == 5).all()
        del arrays["freed"]
        new = [np.zeros(MIB, "u1") for _ in range(3)]
        assert not np.array(new).any()
        with cumem.numpy_pinned():  # does nothing there
            assert np.ones(MIB, "u1").all()
        cumem.numpy_pinned.enable()
        assert np.ones(MIB, "u1").all()
        cumem.numpy_pinned.disable()
        assert len(os.listdir("/proc/self/fd")) == before

    if whole_process:
        cumem.numpy_pinned.enable()
    else:
        block.__enter__()
    try:
        for name in ("read", "grown", "shrunk", "freed"):
            arrays[name] = np.full(MIB, 5, "u1")
        fork_and_run(check)
        assert all((a == 5).all() for a in arrays.values())
        fork_and_run(lambda: fork_and_run(check))
    finally:
        if whole_process:
            cumem.numpy_pinned.disable()
        else:
            block.__exit__(None, None, None)
    assert all(is_pinned(a) for a in arrays.values())
    arrays.clear()


# -- NumPy's own tests -------------------------------------------------------------------

#: What makes, copies, resizes, pickles and reads arrays.
OWN = {
    "_core/tests/test_multiarray.py": (
        *("TestResize", "TestPickling", "TestIO", "TestCreation", "TestAssignment"),
        *(
            "TestArrayConstruction",
            "TestFromBuffer",
            "TestTake",
            "TestZeroSizeFlexible",
        ),
    ),
    "_core/tests/test_numeric.py": ("TestLikeFuncs", "TestRequire", "TestFromiter"),
    "_core/tests/test_shape_base.py": (),
    "_core/tests/test_item_selection.py": (),
    "lib/tests/test_format.py": (),
}

#: These take four fifths of the time of all others together, and smaller tests show the
#: same: one makes a list of a billion references to see an error, two fill gigabytes.
HUGE = ("zeros_big", "test_huge_list_error", "test_large_archive")


@pytest.mark.any_python
def test_numpys_own_tests_pass_with_every_array_pinned() -> None:
    core = numpy_core()
    package = os.path.dirname(np.__file__)
    own = []
    for name, classes in OWN.items():
        name = name.replace("_core", core.__name__.split(".")[1])
        path = os.path.join(package, name)
        own += [f"{path}::{each}" for each in classes] or [path]
    left_out = f"not ({' or '.join(HUGE)})"
    done = programs.run(
        *("-m", "pytest", "-q", "-p", "support.numpy_hook", "-p", "no:cacheprovider"),
        *("-W", "ignore", "-k", left_out, "--override-ini", "addopts=", *own),
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "pinned arrays:" in done.stdout, done.stdout[-2000:]
