# SPDX-License-Identifier: Apache-2.0
"""Conversions in which narrow numbers cross the link and the device widens them.

The byte count of a transfer shows which numbers crossed, and counts of kernel launches
show who converted. The host must convert instead where the device has no memory to
spare or cannot give the same bits.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from support import session, values
from support.casting import (
    BF16,
    F2,
    F4,
    FLOATS,
    LAYOUTS,
    assert_same,
    interesting,
)
from support.faults import sweep
from support.session import testing
from support.tuning import tuned

import cumem

# A table in C has the rules of casting, so no version of Python changes them.
pytestmark = pytest.mark.any_python


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore NumPy's warnings about values that do not fit the target's dtype."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value|overflow", RuntimeWarning)
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        yield


@pytest.fixture
def in_pieces() -> Iterator[None]:
    """Make copies by four threads, in pieces of 64 KiB."""
    with tuned(chunk_nbytes="64 KiB", threads=4):
        yield


SHORT = [np.dtype(t) for t in ("?", "i1", "u1", "i2", "u2")]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("source", [*SHORT, F2, BF16], ids=str)
def test_short_numbers_cross_the_link_and_grow_there(runtime, source, scaled) -> None:
    was = np.resize(interesting(source), 300_001)
    how = {"scale": 0.1, "offset": -3} if scaled else {}
    expected = was.astype(F4)
    if scaled:
        expected = expected * F4.type(0.1) + F4.type(-3)
    target = cumem.empty(was.shape, F4)
    done = cumem.copy_async(target, was, casting="unsafe", **how)
    done.wait()
    # The kernel would give NaN other bits, so the host converts floats that are scaled.
    on_host = scaled and source in FLOATS
    assert done.nbytes == (expected if on_host else was).nbytes
    assert_same(values.get(target), expected, was)


@pytest.mark.parametrize("number", [np.inf, np.nan, 1e39])
def test_scale_that_is_no_float32_is_left_to_the_host(emulated, number) -> None:
    was = np.resize(np.arange(256, dtype="u1"), 300_000)
    target = cumem.empty(was.shape, F4)
    cumem.copy(target, was, casting="same_kind", scale=number)
    expected = was.astype(F4) * F4.type(number)
    assert np.array_equal(values.get(target), expected, equal_nan=True)
    assert testing.fault_count("kernel_launch") == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("into", ["whole", "every other", "turned", "upside down"])
@pytest.mark.parametrize("kind", ["numpy", "pinned"])
def test_views_grow_on_the_device(runtime, in_pieces, layout, into, kind) -> None:
    was = np.random.default_rng(0).integers(0, 1 << 16, (1500, 1000), "u2")
    given = LAYOUTS[layout](values.put(was, kind) if layout != "planes" else was)
    expected = LAYOUTS[layout](was).astype(F4)
    shape = given.shape
    room = {
        "whole": lambda: cumem.zeros(shape, F4),
        "every other": lambda: cumem.zeros((*shape[:-1], 2 * shape[-1]), F4)[..., ::2],
        "turned": lambda: cumem.zeros(shape[::-1], F4).T,
        "upside down": lambda: cumem.zeros(shape, F4)[::-1],
    }
    target = room[into]()
    reported = cumem.explain(target, given, casting="same_kind")
    assert reported.route == "staged-kernel"
    assert reported.nbytes == given.size * 2
    assert "uint16 becomes float32 on the device" in reported.why
    cumem.copy(target, given, casting="same_kind")
    assert (values.get(target) == expected).all()


def test_repeated_numbers_cross_the_link_once(runtime) -> None:
    row = np.resize(np.arange(256, dtype="u1"), 300_000)
    target = cumem.zeros((3, 300_000), F4)
    done = cumem.copy_async(target, row, casting="same_kind")
    done.wait()
    assert done.nbytes == row.nbytes
    assert (values.get(target) == row).all()


@pytest.mark.parametrize("edge", [0, 1, 2, 4])
def test_unaligned_target_is_left_to_the_host(emulated, edge: int) -> None:
    was = np.resize(np.arange(256, dtype="u1"), 300_000)
    room = cumem.zeros(4 * 300_000 + 4, "u1")
    target = room[edge : edge + 4 * 300_000].view(F4)
    cumem.copy(target, was, casting="same_kind")
    assert (values.get(target) == was).all()
    assert (testing.fault_count("kernel_launch") > 0) == (edge % 4 == 0)


def test_few_numbers_take_no_kernel(emulated) -> None:
    was = np.arange(256, dtype="u1")
    target = cumem.zeros(256, F4)
    cumem.copy(target, was, casting="same_kind")
    assert (values.get(target) == was).all()
    assert testing.fault_count("kernel_launch") == 0


def fill_device() -> list[cumem.Buffer]:
    """Take all memory that the limit allows, except what is in flight."""
    cumem.set_limit("device", cumem.stats()["device"].reserved_nbytes)
    taken = []
    for nbytes in (1 << 20, 1 << 16, 1 << 12, 512):
        with contextlib.suppress(cumem.OutOfMemoryError):
            while True:
                taken.append(cumem.empty_device(nbytes, "u1"))
    return taken


@pytest.mark.parametrize("pinned", [None, 0])
def test_host_converts_where_the_device_has_no_memory_to_spare(
    emulated, pinned
) -> None:
    """The copy neither waits for memory in flight on other streams nor asks for relief."""
    was = np.resize(np.arange(256, dtype="u1"), 3_000_000)
    target = cumem.zeros(was.shape, F4)
    busy = cumem.Stream()
    gone = cumem.zeros(4 << 20, "u1", stream=busy)
    busy.synchronize()
    taken = fill_device()
    session.shut(busy)
    gone.fill(3, stream=busy)
    del gone
    asked: list[object] = []
    handle = cumem.on_out_of_memory(asked.append)
    with cumem.limit("pinned", pinned), handle:
        done = cumem.copy_async(target, was, casting="same_kind", scale=2)
        done.wait()
    assert done.nbytes == target.nbytes
    assert testing.fault_count("kernel_launch") == 0
    assert asked == []
    testing.gate_open(busy)
    assert (values.get(target) == was.astype(F4) * 2).all()
    taken.clear()


def test_overlapping_source_grows_without_memory_for_a_block(emulated) -> None:
    """The kernel reads the page-locked slots directly, so it needs no block on the
    device.
    """
    far = cumem.zeros(8 << 20, "u1")
    room = cumem.asbuffer(np.from_dlpack(far))
    was = np.resize(np.arange(256, dtype="u1"), 400_000)
    room.numpy()[5:400_005] = was
    taken = fill_device()
    target = far.view(F4)[:400_000]
    cumem.copy(target, room[5:400_005], casting="same_kind")
    assert (values.get(target) == was).all()
    assert testing.fault_count("kernel_launch") > 0
    taken.clear()


def test_source_that_overlaps_grows_on_the_device(emulated) -> None:
    far = cumem.zeros(2_000_000, "u1")
    room = cumem.asbuffer(np.from_dlpack(far))
    was = np.resize(np.arange(256, dtype="u1"), 400_000)
    room.numpy()[5:400_005] = was
    target = far.view(F4)[:400_000]
    cumem.copy(target, room[5:400_005], casting="same_kind")
    assert (values.get(target) == was).all()
    assert testing.fault_count("kernel_launch") > 0


def test_every_runtime_call_of_numbers_that_grow_may_fail(emulated) -> None:
    was = np.resize(np.arange(256, dtype="u1"), 300_000)

    def scenario() -> None:
        target = cumem.zeros(was.shape, F4)
        cumem.copy(target, was, casting="same_kind", scale=0.5)
        assert (values.get(target) == was.astype(F4) * F4.type(0.5)).all()

    swept = sweep(scenario)
    assert {"copy_async", "kernel_launch"} <= swept.failed
    assert "kernel_launch" in swept.raised
