# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays in pinned memory for a whole process, and where there is no such memory.

The first part enables pinned arrays for all threads. The second runs into limits,
faults of the driver, shutdown, closed pools and the end of the interpreter: new arrays
must then get ordinary memory, and existing ones must keep theirs.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import faults, programs, session
from support.pinned import is_pinned, live
from support.session import testing

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


# -- the whole process ------------------------------------------------------------------


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


# -- when pinned memory cannot be had ---------------------------------------------------


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
    run()  # After this run, everything that is only made once exists.
    calls = {op: testing.fault_count(op) for op in faults.reached()}
    assert "host_register" in calls or "host_alloc" in calls
    injected = set()
    for op, count in sorted(calls.items()):
        for nth in faults.chosen(op, count):
            with faults.unraised():
                run(op, nth)
            injected |= {testing.last_injected_fault()} - {None}
            testing.plan_fault(None, 0)
            assert pool.stats().live_nbytes == 0
            assert testing.check_pools()
    assert injected == set(calls)
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
            # The `with` block has not ended, but makes ordinary arrays after a shutdown.
            assert np.ones(MIB, "u1").all()
            assert not testing.opened()
        assert np.zeros(MIB, "u1").sum() == 0  # enable() makes ordinary arrays as well.
        assert not testing.opened()
        # is_pinned() opens the driver again.
        assert not is_pinned(np.ones(MIB, "u1"))
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
        # This drops the last block of the closed pool. What is left of the pool goes in a
        # later call.
        del array
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


#: These programs end while arrays in pinned memory are alive.
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
