# SPDX-License-Identifier: Apache-2.0
"""Tests of which NumPy arrays are in pinned memory, of which pool, and for how long.

The tests make arrays inside and outside of `with numpy_pinned():`, and ask cumem for
the kind of each array's memory. Others nest blocks, or use them in threads, in tasks,
and beside another library's allocator.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from support import session
from support.exporters import new_capsule, pointer_of
from support.pinned import handler_name, is_pinned, live, numpy_core

import cumem

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def enabled(runtime: session.Runtime) -> Iterator[session.Runtime]:
    """Make arrays of 64 KiB or more pinned in the whole process."""
    cumem.numpy_pinned.enable()
    try:
        yield runtime
    finally:
        cumem.numpy_pinned.disable()


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
    # A generator shares the context of its caller, so the generator's `with` block
    # counts here too.
    assert is_pinned(np.ones(MIB, "u1"))
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
        # The task runs after the block has ended, and must see that.
        assert not await late

    asyncio.run(main())


class Allocator(ctypes.Structure):
    """NumPy's struct `PyDataMemAllocator`."""

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
    """NumPy's struct `PyDataMem_Handler`."""

    _fields_ = (
        *(("name", ctypes.c_char * 127), ("version", ctypes.c_uint8)),
        ("allocator", Allocator),
    )


#: Handlers are kept for as long as the process lives, since arrays of a failed test may
#: be freed by them later.
_foreign: list[Handler] = []


def foreign_handler() -> tuple[Handler, object]:
    """Return a memory handler as another library would install it, and the handler's
    capsule.

    The handler calls the allocation functions of the C library.
    """
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
    """Call NumPy's `PyDataMem_SetHandler()`, which returns the handler that was set
    before.
    """
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
            # The other library sets its handler inside the block and does not put ours
            # back.
            set_handler(capsule)
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
    # The handler must live until all its arrays are freed, so it is used once more
    # here.
    assert handler.version == 1


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
