# SPDX-License-Identifier: Apache-2.0
"""Tests of prefetching managed memory, of where its pages are, and of blocks.

The emulated device counts which pages the host has. The tests send pages to devices, to
the host and to NUMA nodes, and compare these counts and the answers of `residency`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from support import session
from support.managed import NBYTES, PAGE, Streams, managed, steers
from support.session import testing

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]


@pytest.fixture
def streams(emulated, monkeypatch) -> Iterator[Streams]:
    """Yield a stand-in for the extension, which shuts each stream that
    cumem.transfers.managed makes.
    """
    from cumem.transfers import managed as module

    made = Streams()
    monkeypatch.setattr(module, "_core", made)
    yield made
    made.made.clear()


# -- prefetch ---------------------------------------------------------------------------


def test_prefetch_goes_where_its_arguments_say(runtime) -> None:
    steers(runtime)
    buffer = managed()
    for to, place in (
        (0, cumem.Device(0)),
        ("cpu", "host"),
        ("cuda:0", cumem.Device(0)),
        ("host", "host"),
        (None, cumem.Device(0)),
    ):
        buffer.prefetch_pages(to)
        assert buffer.prefetch_location == place
    stream = cumem.Stream()
    buffer.prefetch_pages("cpu", stream)
    stream.synchronize()
    assert (buffer.numpy() == 1).all()


def test_prefetch_to_a_numa_node(runtime) -> None:
    steers(runtime)
    buffer = managed()
    if not runtime.emulated or session.emulated_driver() >= 12020:
        buffer.prefetch_pages("numa:0")
        assert buffer.prefetch_location == "numa:0"
        buffer.preferred_location = "numa:0"
        # An H100's driver accepts a node, but does not report it afterwards.
        found = buffer.preferred_location
        assert found == "numa:0" or (found is None and not runtime.emulated)
    with pytest.raises(ValueError, match='"cpu" or "numa:N", not \'numa:x\''):
        buffer.prefetch_pages("numa:x")


@pytest.mark.parametrize("driver", [12000, 12010])
def test_old_drivers_know_no_numa_nodes_and_no_discard(driver: int) -> None:
    def check() -> None:
        buffer = managed()
        with pytest.raises(cumem.CudaError, match=r"it came with CUDA 12\.2") as caught:
            buffer.prefetch_pages("numa:0")
        assert caught.value.call == "cudaMemPrefetchAsync"
        with pytest.raises(cumem.CudaError, match=r"it came with CUDA 12\.2") as caught:
            buffer.preferred_location = "numa:0"
        assert caught.value.call == "cudaMemAdvise"
        with pytest.raises(cumem.CudaError, match=r"it came with CUDA 13\.0") as caught:
            buffer.discard()
        assert caught.value.call == "cuMemDiscardBatchAsync"
        buffer.prefetch_pages(0)
        buffer.advise(read_mostly=True, preferred_location="cpu", accessed_by=[0])
        assert buffer.accessed_by == (cumem.Device(0),)

    with session.opened("emulated", driver_version=driver):
        check()


def test_node_that_is_not_there_is_refused(emulated) -> None:
    if session.emulated_driver() < 12020:
        pytest.skip("this driver does not know NUMA nodes")
    with pytest.raises(cumem.CudaError, match="cudaErrorInvalidDevice"):
        managed().prefetch_pages("numa:63")


@pytest.mark.parametrize("driver", [12080, 13000])
@pytest.mark.parametrize("own", [True, False])
def test_prefetch_many_moves_all_in_one_call_or_several(driver: int, own: bool) -> None:
    def check() -> None:
        buffers = [managed() for _ in range(3)]
        parts = [buffers[0], buffers[1][: 2 * PAGE], buffers[2], buffers[2][:0]]
        stream = cumem.Stream() if own else cumem.current_stream()
        testing.plan_fault(None, 0)
        cumem.prefetch_pages(iter(parts), 0, stream)
        in_one = own and driver == 13000
        assert testing.fault_count("prefetch_batch_async") == in_one
        assert testing.fault_count("prefetch_async") == (0 if in_one else 3)
        stream.synchronize()
        pages = NBYTES // PAGE
        assert [testing.host_pages(b) for b in buffers] == [0, pages - 2, 0]
        cumem.prefetch_pages([], "cpu")
        with pytest.raises(TypeError, match="buffers must be ManagedBuffers, not Pinn"):
            cumem.prefetch_pages([buffers[0], cumem.empty_pinned(1)], 0)
        buffers[1].free()
        with pytest.raises(ValueError, match="closed"):
            cumem.prefetch_pages(buffers, 0)

    with session.opened("emulated", driver_version=driver):
        check()


@pytest.mark.parametrize("to", [0, "cpu"])
@pytest.mark.parametrize("own", [True, False])
def test_prefetch_many_leaves_the_bytes_as_they_are(runtime, own: bool, to) -> None:
    steers(runtime)
    buffers = [managed() for _ in range(5)]
    for number, buffer in enumerate(buffers):
        buffer.numpy()[:] = number
    stream = cumem.Stream() if own else cumem.current_stream()
    cumem.prefetch_pages(buffers, to, stream)
    stream.synchronize()
    place = "host" if to == "cpu" else cumem.Device(0)
    assert [buffer.prefetch_location for buffer in buffers] == [place] * 5
    for number, buffer in enumerate(buffers):
        assert (buffer.numpy() == number).all()


def test_prefetch_many_is_ordered_on_its_stream(emulated) -> None:
    buffers = [managed(), managed()]
    stream = cumem.Stream()
    with session.gate(stream):
        cumem.prefetch_pages(buffers, 0, stream)
        assert testing.host_pages(buffers[1]) == NBYTES // PAGE
    stream.synchronize()
    assert testing.host_pages(buffers[1]) == 0


# -- residency --------------------------------------------------------------------------


def test_residency_is_the_name_of_a_kind_for_every_kind(runtime) -> None:
    for kind in ("pinned", "mapped", "managed", "device"):
        assert cumem.empty(4, kind=kind).residency == kind
    assert cumem.asbuffer(np.zeros(4)).residency == "pageable"
    assert cumem.empty_mapped(4).as_device().residency == "mapped"


def test_residency_reports_where_each_part_was_sent(runtime) -> None:
    steers(runtime)
    buffer = cumem.empty_managed(4 * NBYTES, "u1")
    buffer.prefetch_pages("cpu")
    buffer[NBYTES : 2 * NBYTES].prefetch_pages(0)
    cumem.Device(0).synchronize()
    buffer.read_mostly = True
    found = buffer.page_residency()
    assert isinstance(found, cumem.types.Residency)
    assert found.nbytes == 4 * NBYTES
    places = {place for *_, place in found.last_prefetch}
    assert {"host", cumem.Device(0)} <= places
    assert found.last_prefetch[0][0] == 0
    assert found.last_prefetch[-1][1] == 4 * NBYTES
    for (_, end, _), (begin, _, _) in zip(
        found.last_prefetch, found.last_prefetch[1:], strict=False
    ):
        assert end == begin
    middle = next(r for r in found.last_prefetch if r[2] == cumem.Device(0))
    assert NBYTES <= middle[0] < middle[1] <= 2 * NBYTES
    assert middle[1] - middle[0] >= NBYTES - (128 << 10)
    assert (found.read_mostly, found.preferred_location, found.accessed_by) == (
        True,
        None,
        (),
    )
    assert buffer[::-1].page_residency().nbytes == 4 * NBYTES


def test_residency_counts_pages_that_the_host_has(runtime) -> None:
    with cumem.Pool("managed") as pool:
        buffer = pool.allocate(8 * NBYTES)
        before = buffer.page_residency().host_nbytes
        if before is None:
            pytest.skip("this system does not say which pages the host has")
        buffer.numpy()[: 4 * NBYTES] = 1
        found = buffer.page_residency()
        assert found.host_nbytes >= 4 * NBYTES
        assert buffer[: 4 * NBYTES].page_residency().host_nbytes == 4 * NBYTES
        assert not found.sampled
        # On the emulated device, fresh memory is poisoned, so the host has its pages.
        assert runtime.emulated or before < 8 * NBYTES
        del buffer


def test_residency_of_much_memory_is_drawn_from_some_pages(emulated) -> None:
    nbytes = ((1 << 16) + 1) * PAGE  # This is one page more than cumem looks at.
    with cumem.Pool("managed") as pool:
        buffer = pool.allocate(nbytes)
        buffer.numpy()[::PAGE] = 1
        found = buffer.page_residency()
        all_but_one = buffer[: nbytes - PAGE].page_residency()
        del buffer
    if found.host_nbytes is None:
        pytest.skip("this system does not say which pages the host has")
    assert found.sampled
    assert found.host_nbytes == nbytes
    assert not all_but_one.sampled
    assert all_but_one.host_nbytes == nbytes - PAGE


def test_residency_of_many_small_ranges_reports_each(emulated) -> None:
    step = 64 << 10
    buffer = managed(64 * step)
    for part in range(0, 64, 2):
        buffer[part * step : (part + 1) * step].prefetch_pages(0)
        buffer[(part + 1) * step : (part + 2) * step].prefetch_pages("cpu")
    found = buffer.page_residency().last_prefetch
    if buffer.ptr % step == 0:
        assert len(found) == 64
        assert found[1] == (step, 2 * step, "host")
    assert found[0][0] == 0
    assert found[-1][1] == 64 * step


# -- with buf.on(...) -------------------------------------------------------------------


def test_block_on_a_device_sends_there_and_back(runtime) -> None:
    steers(runtime)
    buffer = managed()
    with buffer.on(0) as same:
        assert same is buffer
        assert buffer.prefetch_location == cumem.Device(0)
    # The memory had no place before, so it goes back to the host.
    assert buffer.prefetch_location == "host"
    buffer.prefetch_pages(0)
    with buffer.on("cpu"):
        assert buffer.prefetch_location == "host"
    assert buffer.prefetch_location == cumem.Device(0)
    with pytest.raises(ZeroDivisionError), buffer.on("cpu"):
        raise ZeroDivisionError
    assert buffer.prefetch_location == cumem.Device(0)
    with buffer.on("cpu"):
        buffer.free()


def test_block_ends_after_the_work_it_gave(emulated) -> None:
    buffer = managed()
    stream = cumem.Stream(device=1)
    with stream:
        with buffer.on(1):
            stream.synchronize()
            assert testing.host_pages(buffer) == 0
            session.shut(stream)
            buffer.fill(5, stream=stream)
        cumem.Device(0).synchronize()
        assert testing.host_pages(buffer) == 0
        testing.gate_open(stream)
        stream.synchronize()
    assert testing.host_pages(buffer) > 0
    assert (buffer.numpy() == 5).all()


def test_block_is_entered_once_and_left_once(emulated) -> None:
    buffer = managed()
    block = buffer.on(0)
    with pytest.raises(RuntimeError, match="was not entered"):
        block.__exit__(None, None, None)
    with block:
        with pytest.raises(RuntimeError, match="can be entered once"):
            block.__enter__()
        assert buffer.prefetch_location == cumem.Device(0)
    with pytest.raises(RuntimeError, match="was not entered"):
        block.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="can be entered once"):
        block.__enter__()
    assert buffer.prefetch_location == "host"


def test_block_that_cannot_end_keeps_the_exception_of_its_body(emulated) -> None:
    buffer = managed()

    def fail() -> None:
        with buffer.on(0):
            testing.plan_fault("prefetch_async", 1, 999)
            raise ZeroDivisionError

    with pytest.raises(cumem.CudaError, match="999") as caught:
        fail()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    testing.plan_fault(None, 0)


def test_block_keeps_its_buffer_and_nothing_after_it(emulated) -> None:
    block = managed().on(0)
    gc.collect()
    assert testing.live_storages() == 1
    with block:
        pass
    del block
    gc.collect()
    cumem.synchronize()
    assert testing.live_storages() == 0
