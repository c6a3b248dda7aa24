# SPDX-License-Identifier: Apache-2.0
"""The pinned memory of NumPy arrays is used again, and copies take it as it is.

Memory must not be used again while another library still copies from it; a stream
behind a shut gate stands for that library. The tests on a GPU show the same with
PyTorch and CuPy.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import session
from support.pinned import at_address, is_pinned
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


# -- reuse ------------------------------------------------------------------------------


@pytest.fixture
def gated(emulated: session.Runtime) -> Iterator[cumem.Stream]:
    """Yield a stream whose gate is shut until the test ends or opens it."""
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
        # Another library would copy in this way: it has the address and keeps nothing
        # alive.
        cumem.copy_async(target, at_address(address, array.nbytes), stream=gated)
        del array
        for _ in range(3):
            other = np.full(2 * MIB, 9, "u1")
            assert other.ctypes.data != address
            assert not is_pinned(other)
        testing.gate_open(gated)
        gated.synchronize()
        assert (target.to_numpy() == 7).all()
        # Events of older drivers are looked at only by trim().
        if session.emulated_driver() < 12_050:
            pool.trim(keep="2MiB")
        again = np.ones(2 * MIB, "u1")
        # This array took new memory if the fence of the first had not passed yet.
        if again.ctypes.data != address:
            cumem.Device(0).synchronize()
            again = np.ones(2 * MIB, "u1")
        assert again.ctypes.data == address
    del other, again


@pytest.mark.by_driver("context_record_event")
def test_what_waits_for_others_is_bounded(gated) -> None:
    nbytes = 16 * MIB
    pool = cumem.Pool("pinned")
    target = cumem.empty_device(1, "u1")
    target.fill(1, stream=gated)  # As long as this fill waits, no fence passes.
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
        pytest.skip("this driver cannot say when the work of a device has ended")
    cumem.empty_pinned(400 * MIB, "u1")  # From here on this memory is cached.
    for _ in range(8):
        for _ in range(64):
            np.empty(MIB, "u1")
        cumem.Device(0).synchronize()  # All events recorded so far have passed.
        stats = cumem.default_pool("pinned").stats()
        assert stats.in_flight_nbytes <= 3 * 64 * MIB
    assert stats.allocation_count == 1 + 8 * 64


def test_hit_and_a_free_make_no_runtime_call(runtime) -> None:
    pool = cumem.Pool("pinned")
    buffer = pool.allocate(16 * MIB)
    del buffer
    with cumem.numpy_pinned(pool=pool):
        np.empty(20 * MIB, "u1")  # The pool grows here.
        # The pool looks for ended work here, and will not look again soon.
        np.empty(MIB, "u1")
        testing.plan_fault(None, 0)
        array = np.empty(MIB, "u1")
        assert testing.fault_count() == 0
        del array
        assert testing.fault_count() == 0


# -- copies -----------------------------------------------------------------------------


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
    del source  # The transfer keeps the array alive.
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
    """The copies are NumPy arrays, which are pinned if they are made in the `with` block.

    A copy of pinned memory needs no staging.
    """
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
    torch.cuda.init()  # is_pinned() is false before this call.
    with cumem.numpy_pinned():
        array = np.arange(1 << 20, dtype="f4")
    assert torch.from_numpy(array).is_pinned()
    assert not torch.from_numpy(np.ones(1 << 20)).is_pinned()
    # Each array is dropped while its copy may still run.
    for round_ in range(50):
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
    # CuPy lets go of the copied arrays at its next allocation of pinned memory.
    cupy.cuda.alloc_pinned_memory(1)
