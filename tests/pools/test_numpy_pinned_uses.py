# SPDX-License-Identifier: Apache-2.0
"""Tests of NumPy's functions, NumPy's tests and forks with arrays in pinned memory.

Each use runs inside `with numpy_pinned():`, and must give the same values as without
it.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from support import programs
from support.forks import fork_and_run
from support.pinned import at_address, handler_name, is_pinned, live, numpy_core

import cumem

KIB = 1 << 10
MIB = 1 << 20


# -- NumPy's functions ------------------------------------------------------------------


def test_zeros_are_zero_in_memory_that_was_used(runtime) -> None:
    pool = cumem.Pool("pinned", limit="2MiB")
    with cumem.numpy_pinned(pool=pool):
        for _ in range(3):
            array = np.zeros(2 * MIB, "u1")
            assert not array.any()
            array[:] = 255
            del array
            pool.trim(keep="2MiB")  # This waits until the freed block can be reused.
        assert pool.stats().growth_count == 1
        # All bytes have to be cleared. An item has two bytes here, so half of the array
        # would be left if items were counted as bytes.
        long = np.zeros((2, 512, 1024), "i2")
        assert is_pinned(long)
        assert not long.any()
        del long


def test_resize_keeps_the_data_wherever_it_goes(runtime) -> None:
    # Let the pool grow first: a resize takes only memory that the pool already has.
    cumem.empty_pinned(200 * MIB, "u1")
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
        # fromstring() resizes its array without the GIL.
        lambda: np.fromstring("1 2 " * 3000, sep=" "),
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
        # The array `again` is a view of the pickle's bytes.
        again = pickle.loads(pickle.dumps(array, 5))
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
        double = big + big  # The result of a ufunc is pinned too.
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


# -- forks ------------------------------------------------------------------------------


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
        with cumem.numpy_pinned():  # This has no effect in a child.
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


# -- NumPy's own tests ------------------------------------------------------------------


#: NumPy's test files that make, copy, resize, pickle or read arrays, and the classes to
#: run in each of them. An empty tuple means the whole file.
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
#: These tests are left out. They take four fifths as long as all others together, and
#: smaller tests show the same. One of them makes a list of a billion references only to see
#: an error, and two fill gigabytes.
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
