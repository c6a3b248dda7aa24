# SPDX-License-Identifier: Apache-2.0
"""CuPy's memory from cumem's pools.

On the emulated device, stand-ins replace CuPy, and gates show when memory is used
again. On a GPU, CuPy itself is used.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support import session, stand_ins

import cumem

SIZE = 1 << 20

# CuPy warns when it is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def cupy(emulated, monkeypatch) -> Iterator[Any]:
    """Provide a stand-in for CuPy, whose attribute `it` is `cumem.integrations.cupy`."""
    made = stand_ins.Cupy(cumem.device_count())
    made.it = stand_ins.install(monkeypatch, made.modules, "cupy")  # type: ignore[attr-defined]
    yield made
    with contextlib.suppress(RuntimeError):
        made.it.disable()  # type: ignore[attr-defined]


def live(kind: Any = "device", device: int = 0) -> int:
    return cumem.default_pool(kind, device).stats().live_count


# -- on and off --------------------------------------------------------------------------


def test_arrays_come_from_the_pool_between_enable_and_disable(cupy) -> None:
    before = cupy.empty(8)
    cupy.it.enable()
    inside = cupy.empty(1000)
    assert (live(), inside.mem.size) == (1, 1000)
    cupy.it.disable()
    assert cupy.allocator is cupy.first
    assert cupy.pinned == cupy.pinned_pool.malloc
    after = cupy.empty(8)
    assert live() == 1, "disable() has freed an array"
    assert before.ptr == after.ptr
    del inside
    assert live() == 0


def test_raw_page_locked_memory_is_put_back(cupy) -> None:
    cupy.set_pinned(None)
    cupy.it.enable()
    cupy.it.disable()
    assert cupy.pinned is stand_ins.raw_pinned


def test_allocator_that_cannot_be_put_back_is_kept(cupy) -> None:
    def others(size: int) -> Any:
        class Memory:
            ptr = 4096

        return stand_ins.PinnedMemoryPointer(Memory(), 0)

    cupy.set_pinned(others)
    with pytest.raises(RuntimeError, match="pass pinned=False"):
        cupy.it.enable()
    assert (cupy.allocator, cupy.pinned) == (stand_ins.raw, others)
    cupy.it.enable(pinned=False)
    ours = cupy.allocator
    with pytest.raises(RuntimeError, match="pass pinned=False"):
        cupy.it.enable()
    assert (cupy.allocator, cupy.pinned) == (ours, others)
    del ours
    cupy.it.disable()
    assert cupy.pinned is others
    cumem.shutdown()


def test_enabling_again_replaces_and_disabling_twice_is_no_error(cupy) -> None:
    cupy.it.disable()
    cupy.it.enable()
    own, pinned = cumem.Pool("device"), cumem.Pool("pinned")
    cupy.it.enable(own, pinned=pinned)
    kept = cupy.empty(64), cupy.pinned(64)
    assert [pool.stats().live_count for pool in (own, pinned)] == [1, 1]
    assert live() == 0
    cupy.it.enable(pinned=False)
    assert cupy.pinned == cupy.pinned_pool.malloc
    cupy.it.disable()
    cupy.it.disable()
    assert cupy.allocator is cupy.first
    assert cupy.pinned == cupy.pinned_pool.malloc
    del kept


def test_allocator_of_someone_else_stays(cupy) -> None:
    cupy.it.enable()
    ours, pinned = cupy.allocator, cupy.pinned
    cupy.set_allocator(stand_ins.raw)
    for call in (cupy.it.enable, cupy.it.disable):
        with pytest.raises(RuntimeError, match="another one by now"):
            call()
        assert cupy.allocator is stand_ins.raw
        assert cupy.pinned is pinned
    cupy.set_allocator(ours)
    cupy.it.disable()
    assert cupy.allocator is cupy.first


def test_process_is_not_changed_inside_of_a_block(cupy) -> None:
    with cupy.it.using(), pytest.raises(ValueError, match="using_allocator"):
        cupy.it.enable()
    assert cupy.allocator is cupy.first
    cupy.it.enable()
    with cupy.it.using(), pytest.raises(RuntimeError, match="`using` block"):
        cupy.it.disable()
    cupy.it.disable()


def test_block_is_for_its_thread_and_its_arrays_outlive_it(cupy) -> None:
    pool = cumem.Pool("device")
    with ThreadPoolExecutor(1) as thread, cupy.it.using(pool):
        kept = cupy.empty(64)
        other = thread.submit(cupy.empty, 64).result()
        assert pool.stats().live_count == 1
        assert isinstance(kept.mem._owner[0], cumem.DeviceBuffer)
        assert other.mem._owner is None
    assert cupy.empty(64).mem._owner is None
    assert pool.stats().live_count == 1
    del kept
    assert pool.stats().live_count == 0


def test_emulated_memory_is_refused(cupy) -> None:
    with pytest.raises(RuntimeError, match=r"CuPy cannot use the memory .* emulated"):
        cupy.it.really_need_gpu("CuPy")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"pool": "device"}, TypeError, "pool must be a Pool, or several, not str"),
        ({"pool": 3}, TypeError, "pool must be a Pool"),
        ({"pool": []}, ValueError, "holds no pools"),
        ({"kind": "pinned"}, ValueError, "'device' or 'managed' here, not 'pinned'"),
        (
            {"kind": "managed", "pool": "own"},
            ValueError,
            "pool is one of device memory",
        ),
        ({"pool": "twice"}, ValueError, "two of one device"),
        ({"pool": "closed"}, ValueError, "pool is closed"),
        ({"pool": "pinned"}, ValueError, "not 'pinned'"),
        ({"pinned": "own"}, ValueError, "pinned is a pool of device memory"),
        ({"pinned": "yes"}, TypeError, "pinned must be a bool or a Pool, not str"),
        ({"pinned": None}, TypeError, "pinned must be a bool or a Pool, not NoneType"),
    ],
)
def test_wrong_arguments_change_nothing(cupy, arguments, error, text) -> None:
    pools = {
        "own": cumem.Pool("device"),
        "pinned": cumem.Pool("pinned"),
        "twice": [cumem.Pool("device"), cumem.Pool("device")],
        "closed": [cumem.Pool("device")],
    }
    pools["closed"][0].close()
    given = {
        name: pools.get(value, value)
        if isinstance(value, str) and name != "kind"
        else value
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=text):
        cupy.it.enable(**given)
    assert cupy.allocator is cupy.first
    assert cupy.pinned == cupy.pinned_pool.malloc


# -- streams and devices -----------------------------------------------------------------


def write(pointer: Any, stream: Any) -> None:
    """Queue work on CuPy's stream which cumem does not see, as CuPy's kernels do."""
    cumem.empty_device(SIZE).fill(1, stream=stream.ptr or 1)


@pytest.mark.parametrize("which", ["default", "own", "cumem's"])
def test_block_is_reused_at_once_on_its_stream_and_later_on_others(cupy, which) -> None:
    made = cumem.Stream()
    stream = {
        "default": lambda: cupy.null,
        "own": stand_ins.CupyStream,
        "cumem's": lambda: stand_ins.CupyStream.from_external(made),
    }[which]()
    other = stand_ins.CupyStream()
    cupy.it.enable(cumem.Pool("device"))
    cupy.use(stream)
    with session.gate(stream.ptr or 1):
        write(first := cupy.empty(SIZE), stream)
        address = first.ptr
        del first
        again = cupy.empty(SIZE)
        assert again.ptr == address, "the stream's own block was not used again"
        del again
        cupy.use(other)
        elsewhere = cupy.empty(SIZE)
        assert elsewhere.ptr != address, "the first stream may still use this block"
        del elsewhere
    cupy.use(cupy.null)


def test_block_that_is_dropped_on_a_stream_of_cupys_needs_no_event(cupy) -> None:
    cupy.it.enable(cumem.Pool("device"))
    stream = stand_ins.CupyStream()
    cupy.use(stream)
    cupy.empty(SIZE)
    before = session.testing.fault_count("event_create")
    for _ in range(5):
        cupy.empty(SIZE)
    assert session.testing.fault_count("event_create") == before
    cupy.use(cupy.null)


def test_each_device_has_its_pool_and_its_default_stream(cupy) -> None:
    cupy.it.enable()
    arrays = []
    for device in (0, 1, 0, 1, 1):
        cupy.use_device(device)
        arrays.append(cupy.empty(100))
        assert arrays[-1].mem.device_id == device
        assert arrays[-1].mem._owner[0].device == device
    assert (live(device=0), live(device=1)) == (2, 3)
    cupy.use_device(0)


def test_pools_of_other_devices_are_asked_for(cupy) -> None:
    first, second = cumem.Pool("device", device=0), cumem.Pool("device", device=1)
    cupy.it.enable(first)
    cupy.use_device(1)
    with pytest.raises(ValueError, match=r"device 1, but the pools given are of \[0\]"):
        cupy.empty(8)
    cupy.use_device(0)
    cupy.it.disable()
    cupy.it.enable([first, second])
    cupy.use_device(1)
    kept = cupy.empty(8)
    assert (first.stats().live_count, second.stats().live_count) == (0, 1)
    cupy.use_device(0)
    del kept


def test_per_thread_default_stream_is_each_threads_own(cupy) -> None:
    cupy.it.enable(cumem.Pool("device"))
    ptds = stand_ins.CupyStream(2)

    def allocate() -> Any:
        cupy.use(ptds)
        return cupy.empty(SIZE)

    here = allocate()
    with ThreadPoolExecutor(1) as thread:
        there = thread.submit(allocate).result()
        address = there.ptr
        stream = thread.submit(cumem.Stream.from_external, 2).result()
        with session.gate(stream):
            thread.submit(write, there, ptds).result()
            del there
            other = allocate()
            assert other.ptr != address, "the other thread may still use this block"
        del other, stream
    del here
    cupy.use(cupy.null)


def test_streams_that_come_and_go_are_not_mistaken(cupy) -> None:
    """CuPy may use a handle again for a new stream, and cumem keeps only a limited
    number of streams alive.
    """
    cupy.it.enable(cumem.Pool("device"))
    kept = [stand_ins.CupyStream() for _ in range(cupy.it._STREAMS_MAX + 3)]
    for stream in kept:
        cupy.use(stream)
        assert cupy.empty(8).mem._owner[0].nbytes == 8
    # This is another object with the same handle.
    twin = stand_ins.CupyStream(kept[-1].ptr)
    cupy.use(twin)
    assert cupy.empty(8).mem.size == 8
    cupy.use(cupy.null)
    assert cupy.empty(8).mem.size == 8
    of_twin = weakref.ref(twin)
    del twin
    gc.collect()
    assert of_twin() is not None, "cumem has let the stream go"


def test_managed_memory_is_used_again_when_the_host_may(cupy) -> None:
    cupy.it.enable(kind="managed")
    stream = stand_ins.CupyStream()
    cupy.use(stream)
    with session.gate(stream.ptr):
        write(first := cupy.empty(SIZE), stream)
        address = first.ptr
        assert isinstance(first.mem._owner[0], cumem.ManagedBuffer)
        del first
        second = cupy.empty(SIZE)
        assert second.ptr != address
        del second
    cupy.use(cupy.null)


# -- page-locked memory ------------------------------------------------------------------


def test_page_locked_memory_waits_for_work_that_nobody_announces(cupy) -> None:
    pool = cumem.Pool("pinned")
    cupy.it.enable(pinned=pool)
    stream = stand_ins.CupyStream()
    array = cupy.empty_pinned(SIZE)
    assert array.size() == SIZE
    address = array.ptr
    with session.gate(stream.ptr):
        write(array, stream)
        del array
        other = cupy.empty_pinned(SIZE)
        assert other.ptr != address
        assert pool.stats().in_flight_count == 1
    cumem.Stream.from_external(stream).synchronize()
    pool.trim()
    assert pool.stats().in_flight_count == 0
    del other


def test_no_bytes_are_no_block(cupy) -> None:
    cupy.it.enable()
    arrays = cupy.empty(0), cupy.empty_pinned(0)
    assert [each.ptr for each in arrays] == [0, 0]
    assert (live(), live("pinned")) == (0, 0)


# -- too little memory -------------------------------------------------------------------


def test_running_out_is_the_error_of_both(cupy) -> None:
    cupy.it.enable()
    with cumem.limit("device", "4 MiB"):
        with pytest.raises(stand_ins.CupyOutOfMemoryError) as caught:
            cupy.empty(16 << 20)
        kept = cupy.empty(1 << 20)
    error = caught.value
    assert isinstance(error, cumem.OutOfMemoryError)
    assert (error.requested, error.limit, error.kind) == (16 << 20, 4 << 20, "device")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cupy.it.OutOfMemoryError
    assert (again.requested, str(again)) == (error.requested, str(error))
    del kept


def test_running_out_of_page_locked_memory_is_what_cupy_copies_without(cupy) -> None:
    cupy.it.enable()
    limit = cumem.limit("pinned", "4 MiB")
    with limit, pytest.raises(stand_ins.CUDARuntimeError) as caught:
        cupy.empty_pinned(16 << 20)
    assert isinstance(caught.value, cumem.OutOfMemoryError)
    assert caught.value.status == 2, "the error is not cudaErrorMemoryAllocation"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.requested, again.status) == (16 << 20, 2)


# -- shutdown, and forked children -------------------------------------------------------


def test_shutdown_is_refused_while_memory_is_lent(cupy) -> None:
    cupy.it.enable()
    array, pinned = cupy.empty(8), cupy.empty_pinned(8)
    with pytest.raises(BufferError):
        cumem.shutdown()
    cupy.it.disable()
    del pinned
    with pytest.raises(BufferError, match="lent to another library"):
        cumem.shutdown()
    assert live() == 1
    del array
    cumem.shutdown()
    cupy.it.enable()  # CuPy can be enabled again.
    assert cupy.empty(8).mem.size == 8


def test_forked_child_allocates_nothing_and_drops_quietly(cupy) -> None:
    from support.forks import fork_and_run

    cupy.it.enable()
    arrays = [cupy.empty(100), cupy.empty_pinned(100)]

    def check() -> None:
        arrays.clear()
        gc.collect()
        for allocate in (cupy.empty, cupy.empty_pinned):
            with pytest.raises(RuntimeError, match="forked child"):
                allocate(SIZE)

    fork_and_run(check)
    assert (live(), live("pinned")) == (1, 1)


# -- CuPy itself -------------------------------------------------------------------------


@pytest.fixture
def real(cuda) -> Iterator[Any]:
    """Provide CuPy with cumem's pools. The attribute `it` is the integration's module."""
    cupy = pytest.importorskip("cupy")
    import cumem.integrations.cupy as it

    before = cupy.cuda.get_allocator()
    it.enable()
    yield cupy
    gc.collect()
    cupy.cuda.Device().synchronize()
    it.disable()
    assert cupy.cuda.get_allocator() == before


def rolled(cupy: Any, array: Any, stream: Any) -> Any:
    """Queue a long chain of copies on a stream, which needs no compiler."""
    for _ in range(20):
        other = cupy.empty_like(array)
        other.data.copy_from_device_async(array.data, array.nbytes, stream)
        array = other
    return array


@pytest.mark.gpu
def test_cupys_copies_are_right_through_reused_memory(real) -> None:
    cupy = real
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    streams += [cupy.cuda.Stream.null, cupy.cuda.Stream.ptds]
    data = np.random.default_rng(0).random((len(streams), SIZE))
    results: list[Any] = []
    for _ in range(4):
        for number, stream in enumerate(streams):
            with stream:
                array = cupy.empty(SIZE)
                array.set(data[number], stream=stream)
                results.append((number, stream, rolled(cupy, array, stream)))
                del array
    for number, stream, result in results:
        out = result.get(stream=stream)
        stream.synchronize()
        assert (out == data[number]).all()
    assert cumem.default_pool("device").stats().live_count == len(results)


@pytest.mark.gpu
def test_cupys_block_is_reused_at_once_on_its_stream(real) -> None:
    cupy = real
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            array = cupy.empty(SIZE)
            kept = rolled(cupy, array, stream)
            address = array.data.ptr
            del array
            # One of the two gets the block that the chain dropped last.
            again = [cupy.empty(SIZE) for _ in range(2)]
            assert address in [each.data.ptr for each in again]
            assert cumem.default_pool("device").stats().live_count == 3
        stream.synchronize()
        del kept, again


@pytest.mark.gpu
def test_cupys_page_locked_arrays_are_not_overwritten(real) -> None:
    """With CuPy's own pool, the next array can lie where a copy still reads."""
    cupy = real
    import cupyx

    stream = cupy.cuda.Stream(non_blocking=True)
    target = cupy.empty((8, 32 << 20), "u1")
    for round_ in range(8):
        source = cupyx.empty_pinned(32 << 20, "u1")
        source[:] = round_
        target[round_].set(source, stream=stream)
        del source
        cupyx.empty_pinned(32 << 20, "u1")[:] = 255
    stream.synchronize()
    found = target.get()
    assert (found == np.arange(8, dtype="u1")[:, None]).all()


@pytest.mark.gpu
def test_cupy_counts_against_cumems_limit(real) -> None:
    cupy = real
    limit = cumem.limit("device", "64 MiB")
    with limit, pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        cupy.empty(256 << 20, "u1")
    assert isinstance(caught.value, cumem.OutOfMemoryError)
    assert cupy.get_default_memory_pool().used_bytes() == 0


@pytest.mark.gpu
def test_cupy_stages_without_page_locked_memory_when_there_is_none(real) -> None:
    cupy = real
    data = np.arange(4 << 20, dtype="u1")
    with (
        cumem.limit("pinned", 1),
        pytest.warns(cupy._util.PerformanceWarning, match="pinned memory"),
    ):
        # CuPy would go through page-locked memory if it got any.
        array = cupy.array(data)
    assert (array.get() == data).all()


@pytest.mark.gpu
def test_cupys_arrays_keep_shutdown_away(real) -> None:
    array = real.empty(100)
    with pytest.raises(BufferError):
        cumem.shutdown()
    array.data.memset(0, array.nbytes)
    assert (array.get() == 0).all()


@pytest.mark.gpu
def test_graph_of_cupys_keeps_its_temporaries(real) -> None:
    cupy = real
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        source = cupy.empty(SIZE)
        source.data.memset_async(0, source.nbytes, stream)
        # This fills the pool's cache, since a capture allows no allocation by CUDA.
        rolled(cupy, source, stream)
        stream.synchronize()
        stream.begin_capture()
        result = rolled(cupy, source, stream)
        graph = stream.end_capture()
    for value in (1, 2, 3):
        source.data.memset_async(value, source.nbytes, stream)
        graph.launch(stream)
        with stream:
            others = [cupy.empty(SIZE) for _ in range(8)]
            # None of these may lie over a temporary of the graph.
            for other in others:
                other.data.memset_async(255, other.nbytes, stream)
        assert (result.view("u1").get(stream=stream) == value).all()
    del others


@pytest.mark.gpu
def test_cupy_of_two_devices(real) -> None:
    cupy = real
    if cumem.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    arrays = []
    for device in (0, 1, 0, 1):
        with cupy.cuda.Device(device):
            arrays.append(cupy.asarray(np.full(1000, device)))
            assert arrays[-1].device.id == device
    assert [cumem.default_pool("device", d).stats().live_count for d in (0, 1)] == [
        2,
        2,
    ]
    for array, device in zip(arrays, (0, 1, 0, 1), strict=True):
        with cupy.cuda.Device(device):
            assert (array.get() == device).all()


@pytest.mark.gpu
def test_cupys_managed_memory(cuda) -> None:
    cupy = pytest.importorskip("cupy")
    import cumem.integrations.cupy as it

    with it.using(kind="managed"):
        array = cupy.asarray(np.arange(1000))
        assert cumem.default_pool("managed").stats().live_count == 1
    assert (array.get() == np.arange(1000)).all()
    del array


@pytest.mark.gpu
def test_cupy_is_refused_emulated_memory() -> None:
    pytest.importorskip("cupy")
    import cumem.integrations.cupy as it

    with session.opened("emulated"):
        with pytest.raises(RuntimeError, match="needs a GPU"):
            it.enable()
        with pytest.raises(RuntimeError, match="needs a GPU"), it.using():
            pass
