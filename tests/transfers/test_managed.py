# SPDX-License-Identifier: Apache-2.0
"""Managed memory that is steered: advice, discard, tiles, and what is said of it."""

from __future__ import annotations

import gc
import mmap
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest
from support import session
from support.session import testing

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # Fences and calls for several ranges at once depend on the driver.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]

PAGE = mmap.PAGESIZE
NBYTES = 1 << 20  # from here on a buffer has its pages for itself


def managed(nbytes: int = NBYTES) -> cumem.ManagedBuffer:
    buffer = cumem.empty_managed(nbytes, "u1")
    buffer.numpy()[:] = 1
    return buffer


def steers(runtime: session.Runtime) -> None:
    if not cumem.Device(0).attributes().get("concurrent_managed_access"):
        pytest.skip("the device has no concurrent managed access")


class Streams:
    """The extension, as tiles() sees it: streams that it makes are shut."""

    def __init__(self) -> None:
        self.made: list[cumem.Stream] = []

    def Stream(self, **where: object) -> cumem.Stream:  # noqa: N802
        self.made.append(cumem.Stream(**where))
        session.shut(self.made[-1])
        return self.made[-1]

    def __getattr__(self, name: str) -> object:
        return getattr(cumem._core, name)


@pytest.fixture
def streams(emulated, monkeypatch) -> Iterator[Streams]:
    """What is ordered on streams of cumem's own."""
    from cumem.transfers import managed as module

    made = Streams()
    monkeypatch.setattr(module, "_core", made)
    yield made
    made.made.clear()


# -- prefetch ----------------------------------------------------------------------------


def test_prefetch_goes_where_it_is_told(runtime) -> None:
    steers(runtime)
    buffer = managed()
    for to, place in (
        (0, cumem.Device(0)),
        ("cpu", "host"),
        ("cuda:0", cumem.Device(0)),
        ("host", "host"),
        (None, cumem.Device(0)),
    ):
        buffer.prefetch(to)
        assert buffer.prefetch_location == place
    stream = cumem.Stream()
    buffer.prefetch("cpu", stream)
    stream.synchronize()
    assert (buffer.numpy() == 1).all()


def test_prefetch_to_a_numa_node(runtime) -> None:
    steers(runtime)
    buffer = managed()
    if not runtime.emulated or session.emulated_driver() >= 12020:
        buffer.prefetch("numa:0")
        assert buffer.prefetch_location == "numa:0"
        buffer.preferred_location = "numa:0"
        found = buffer.preferred_location  # an H100's driver takes it and tells of none
        assert found == "numa:0" or (found is None and not runtime.emulated)
    with pytest.raises(ValueError, match='"cpu" or "numa:N", not \'numa:x\''):
        buffer.prefetch("numa:x")


@pytest.mark.parametrize("driver", [12000, 12010])
def test_old_drivers_know_no_numa_nodes_and_no_discard(driver: int) -> None:
    def check() -> None:
        buffer = managed()
        with pytest.raises(cumem.CudaError, match=r"it came with CUDA 12\.2") as caught:
            buffer.prefetch("numa:0")
        assert caught.value.call == "cudaMemPrefetchAsync"
        with pytest.raises(cumem.CudaError, match=r"it came with CUDA 12\.2") as caught:
            buffer.preferred_location = "numa:0"
        assert caught.value.call == "cudaMemAdvise"
        with pytest.raises(cumem.CudaError, match=r"it came with CUDA 13\.0") as caught:
            buffer.discard()
        assert caught.value.call == "cuMemDiscardBatchAsync"
        buffer.prefetch(0)
        buffer.advise(read_mostly=True, preferred_location="cpu", accessed_by=[0])
        assert buffer.accessed_by == (cumem.Device(0),)

    with session.opened("emulated", driver_version=driver):
        check()


def test_node_that_is_not_there_is_refused(emulated) -> None:
    if session.emulated_driver() < 12020:
        pytest.skip("the driver knows no nodes")
    with pytest.raises(cumem.CudaError, match="cudaErrorInvalidDevice"):
        managed().prefetch("numa:63")


@pytest.mark.parametrize("driver", [12080, 13000])
@pytest.mark.parametrize("own", [True, False])
def test_prefetch_many_moves_all_in_one_call_or_several(driver: int, own: bool) -> None:
    def check() -> None:
        buffers = [managed() for _ in range(3)]
        parts = [buffers[0], buffers[1][: 2 * PAGE], buffers[2], buffers[2][:0]]
        stream = cumem.Stream() if own else cumem.current_stream()
        testing.plan_fault(None, 0)
        cumem.prefetch_many(iter(parts), 0, stream)
        in_one = own and driver == 13000
        assert testing.fault_count("prefetch_batch_async") == in_one
        assert testing.fault_count("prefetch_async") == (0 if in_one else 3)
        stream.synchronize()
        pages = NBYTES // PAGE
        assert [testing.host_pages(b) for b in buffers] == [0, pages - 2, 0]
        cumem.prefetch_many([], "cpu")
        with pytest.raises(TypeError, match="buffers must be ManagedBuffers, not Pinn"):
            cumem.prefetch_many([buffers[0], cumem.empty_pinned(1)], 0)
        buffers[1].free()
        with pytest.raises(ValueError, match="closed"):
            cumem.prefetch_many(buffers, 0)

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
    cumem.prefetch_many(buffers, to, stream)
    stream.synchronize()
    place = "host" if to == "cpu" else cumem.Device(0)
    assert [buffer.prefetch_location for buffer in buffers] == [place] * 5
    for number, buffer in enumerate(buffers):
        assert (buffer.numpy() == number).all()


def test_prefetch_many_is_ordered_on_its_stream(emulated) -> None:
    buffers = [managed(), managed()]
    stream = cumem.Stream()
    with session.gate(stream):
        cumem.prefetch_many(buffers, 0, stream)
        assert testing.host_pages(buffers[1]) == NBYTES // PAGE
    stream.synchronize()
    assert testing.host_pages(buffers[1]) == 0


# -- advice ------------------------------------------------------------------------------


def test_advice_is_set_and_taken_back(runtime) -> None:
    steers(runtime)
    buffer = managed()
    device = cumem.Device(0)
    assert (buffer.read_mostly, buffer.preferred_location, buffer.accessed_by) == (
        False,
        None,
        (),
    )
    buffer.read_mostly = True
    assert buffer.read_mostly is True
    buffer.preferred_location = 0
    assert buffer.preferred_location == device
    buffer.accessed_by = ["cpu", device]
    assert set(buffer.accessed_by) == {"host", device}
    buffer.advise(preferred_location="cpu")
    assert buffer.preferred_location == "host"
    assert buffer.read_mostly
    assert set(buffer.accessed_by) == {"host", device}
    buffer.advise(read_mostly=False, preferred_location=None, accessed_by=[0])
    assert not buffer.read_mostly
    assert buffer.preferred_location is None
    assert buffer.accessed_by == (device,)
    buffer.accessed_by = ()
    assert buffer.accessed_by == ()
    assert (buffer.numpy() == 1).all()


def test_advice_for_a_slice_is_for_its_pages(runtime) -> None:
    steers(runtime)
    buffer = managed(4 * NBYTES)
    part = buffer[NBYTES : 2 * NBYTES]
    part.read_mostly = True
    part.preferred_location = "cpu"
    assert part.read_mostly
    assert not buffer.read_mostly
    assert not buffer[:NBYTES].read_mostly
    assert buffer.preferred_location is None
    part[PAGE + 1 : PAGE + 2].read_mostly = False
    assert not part.read_mostly
    assert part[2 * PAGE :].read_mostly
    assert not part[PAGE : 2 * PAGE].read_mostly


def test_memory_goes_back_without_its_advice(runtime) -> None:
    steers(runtime)
    buffer = cumem.empty_managed(NBYTES, "u1")
    buffer.advise(read_mostly=True, preferred_location=0, accessed_by=[0, "cpu"])
    place = buffer.ptr
    view = buffer[:10]
    del buffer
    assert view.read_mostly
    del view
    gc.collect()
    again = cumem.empty_managed(NBYTES, "u1")
    assert again.ptr == place, "not the memory that was advised"
    assert not again.read_mostly
    assert again.preferred_location is None
    assert again.accessed_by == ()


@pytest.mark.parametrize(
    ("advice", "error", "text"),
    [
        ({"preferred_location": "gpu"}, ValueError, 'a device, "cpu" or "numa:N", not'),
        (
            {"preferred_location": 7},
            ValueError,
            "preferred_location: device 7 does not exist",
        ),
        (
            {"preferred_location": 1.5},
            TypeError,
            'a device, "cpu" or "numa:N", not float',
        ),
        (
            {"accessed_by": [0.0]},
            TypeError,
            'accessed_by must be a device or "cpu", not',
        ),
        ({"accessed_by": "cpu"}, TypeError, "must be a sequence of devices, not str"),
        ({"accessed_by": 0}, TypeError, "must be a sequence of devices, not int"),
        ({"accessed_by": [0, 9]}, ValueError, "accessed_by: device 9 does not exist"),
        ({"read_mostly": np.ones(2)}, TypeError, "read_mostly must be true or false"),
        ({"read_mostly": "no"}, TypeError, "must be true or false, not str"),
        ({"shape": 3}, TypeError, "unexpected keyword argument 'shape'"),
    ],
)
def test_wrong_advice_is_refused_and_nothing_told(
    emulated, advice, error, text
) -> None:
    buffer = managed()
    with pytest.raises(error, match=text):
        buffer.advise(**advice)
    with pytest.raises(error, match=text):
        buffer.advise(**{"read_mostly": True} | advice)
    assert not buffer.read_mostly


def test_wrong_values_of_properties_are_refused(emulated) -> None:
    buffer = managed()
    with pytest.raises(TypeError, match="read_mostly must be true or false, not None"):
        buffer.read_mostly = None
    with pytest.raises(TypeError, match="read_mostly must be true or false, not str"):
        buffer.read_mostly = "no"
    assert not buffer.read_mostly
    buffer.read_mostly = np.bool_(True)
    assert buffer.read_mostly
    with pytest.raises(TypeError, match=r"preferred_location must be .* not ellipsis"):
        buffer.preferred_location = ...
    with pytest.raises(TypeError, match="accessed_by must be a sequence of devices"):
        buffer.accessed_by = None
    with pytest.raises(AttributeError, match="cannot delete accessed_by"):
        del buffer.accessed_by
    with pytest.raises(AttributeError):
        buffer.prefetch_location = 0
    buffer.free()
    for use in (
        lambda: buffer.read_mostly,
        lambda: buffer.advise(read_mostly=True),
        buffer.discard,
        buffer.page_residency,
        lambda: buffer.prefetch("cpu"),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_buffer_without_bytes_has_nothing_to_tell(runtime) -> None:
    buffer = cumem.empty_managed((0, 3))
    buffer.advise(read_mostly=True, preferred_location="cpu", accessed_by=["cpu"])
    assert not buffer.read_mostly
    assert buffer.preferred_location is None
    assert buffer.accessed_by == ()
    assert buffer.page_residency()[:2] == (0, ())
    assert list(cumem.tiles(buffer, 8)) == []


@pytest.mark.parametrize("kind", [list, tuple, set, iter, np.array, dict.fromkeys])
def test_accessed_by_takes_any_collection(
    emulated, kind: Callable[..., object]
) -> None:
    buffer = managed()
    buffer.accessed_by = kind([1, 0])
    assert buffer.accessed_by == (cumem.Device(0), cumem.Device(1))
    buffer.accessed_by = ()
    assert buffer.accessed_by == ()


def test_accessors_that_fail_while_they_are_read_change_nothing(emulated) -> None:
    buffer = managed()
    buffer.accessed_by = [1]

    def fail() -> Iterator[int]:
        yield 0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        buffer.accessed_by = fail()
    if session.emulated_driver() >= 12020:
        with pytest.raises(ValueError, match="and no NUMA nodes"):
            buffer.accessed_by = [0, "numa:0"]
    assert buffer.accessed_by == (cumem.Device(1),)


@pytest.mark.parametrize(
    "text",
    ["numa:", "numa:100", "numa:-1", "numa:\uff11", "numa:1 ", "CPU", "\udc80", ""],
)
def test_text_that_is_no_place_is_refused(emulated, text: str) -> None:
    buffer = managed()
    for use in (
        lambda: buffer.prefetch(text),
        lambda: buffer.advise(preferred_location=text),
        lambda: buffer.on(text).__enter__(),
        lambda: cumem.prefetch_many([], text),
    ):
        with pytest.raises(
            ValueError, match=r'must be a device, "cpu" or "numa:N", not'
        ):
            use()
    assert buffer.prefetch_location is None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda b: b.prefetch(0, None, 1), "prefetch() takes at most 2 positional"),
        (
            lambda b: b.prefetch(where=0),
            "prefetch() got an unexpected keyword argument",
        ),
        (lambda b: b.advise(True), "advise() takes no positional arguments (1 given)"),
        (
            lambda b: b.discard(None, 1),
            "discard() takes at most 1 positional argument (",
        ),
        (lambda b: b.on(0, None), "on() takes at most 1 positional argument (2 given)"),
        (lambda b: cumem.prefetch_many(), "prefetch_many() missing required argument"),
        (lambda b: cumem.prefetch_many(b, 0, 1, 2), "takes at most 3 positional"),
        (lambda b: cumem.prefetch_many(3), "'int' object is not iterable"),
        (
            lambda b: b.prefetch(1.5),
            'to must be a device, "cpu" or "numa:N", not float',
        ),
        (lambda b: b.prefetch(0, "s"), "stream must be"),
        (lambda b: b.discard("s"), "stream must be"),
    ],
)
def test_wrong_call_says_what_it_takes(emulated, call, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        call(managed())


def test_steering_calls_no_function_of_python(emulated) -> None:
    buffer = managed()
    parts = [buffer[: NBYTES // 2], buffer[NBYTES // 2 :]]
    stream = cumem.Stream()

    def use() -> None:
        buffer.prefetch(0, stream)
        buffer.advise(read_mostly=True, preferred_location="cpu", accessed_by=[0])
        buffer.read_mostly = False
        assert (buffer.read_mostly, buffer.preferred_location) == (False, "host")
        assert buffer.accessed_by == (cumem.Device(0),)
        cumem.prefetch_many(parts, 0, stream)
        with buffer.on("cpu", stream=stream):
            assert buffer.prefetch_location == "host"

    use()  # devices are made once
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        use()
    finally:
        sys.setprofile(None)
    calls = [name for name in called if not name.endswith("use")]
    assert all(name.startswith("Device.") for name in calls), calls


# -- discard -----------------------------------------------------------------------------


def has_discard(runtime: session.Runtime) -> None:
    if not runtime.has("discard_batch_async"):
        pytest.skip("the driver has no discard")


def test_discard_takes_no_byte_of_others(runtime) -> None:
    steers(runtime)
    has_discard(runtime)
    buffer = managed(4 * NBYTES)
    part = buffer[NBYTES + 1 : 2 * NBYTES + 100]
    part.discard()
    cumem.current_stream().synchronize()
    array = buffer.numpy()
    assert (array[: NBYTES + PAGE] == 1).all()
    assert (array[2 * NBYTES :] == 1).all()
    part.fill(3)
    assert (array[NBYTES + 1 : 2 * NBYTES + 100] == 3).all()
    buffer[5:9].discard()  # no whole page: nothing is given up
    cumem.current_stream().synchronize()
    assert (array[: NBYTES + 1] == 1).all()


@pytest.mark.parametrize("own", [True, False])
def test_discard_has_its_place_in_the_stream(emulated, own: bool) -> None:
    has_discard(emulated)
    buffer = managed()
    stream = cumem.Stream() if own else cumem.current_stream()
    with session.gate(stream):
        buffer.discard(stream if own else None)
        buffer.fill(4, stream=stream)
        assert (buffer.prefetch_location, testing.host_pages(buffer)) == (None, 256)
    stream.synchronize()
    assert (buffer.numpy() == 4).all(), "discarded after what came later"
    buffer.discard(stream)
    stream.synchronize()
    assert not (buffer.numpy() == 4).any(), "not discarded"


def test_discard_on_the_default_stream_comes_before_what_is_queued_later(
    emulated,
) -> None:
    has_discard(emulated)
    buffer = managed()
    out = cumem.zeros(NBYTES, "u1", "pinned")
    stream, other = cumem.current_stream(), cumem.Stream()
    session.shut(other)  # and with it the discard, which comes after the copy there
    cumem.copy_async(out, buffer, stream=other)
    buffer.discard()
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    session.wait_until_waiting(thread)
    assert thread.is_alive(), "what comes later need not wait for the discard"
    testing.gate_open(other)
    thread.join()
    assert (out.numpy() == 1).all()


def test_discard_on_the_default_stream_comes_after_what_was_queued_before(
    emulated,
) -> None:
    has_discard(emulated)
    buffer = managed()
    stream = cumem.current_stream()
    with session.gate(stream):
        buffer.fill(4, stream=stream)
        buffer.discard()
        cumem.Device(1).synchronize()
        assert testing.host_pages(buffer) == NBYTES // PAGE
    stream.synchronize()
    assert not (buffer.numpy() == 4).any(), "discarded before what came earlier"


def test_discard_on_the_default_stream_keeps_no_stream(emulated) -> None:
    has_discard(emulated)
    buffer = managed()
    buffer.discard()
    cumem.synchronize()
    before = testing.counts()["streams"]
    for _ in range(100):
        buffer.discard()
        cumem.synchronize()
    assert testing.counts()["streams"] <= before + 1


def test_discard_comes_after_all_work_on_the_buffer(emulated) -> None:
    has_discard(emulated)
    buffer = managed()
    out = cumem.zeros(NBYTES, "u1", "pinned")
    other, stream = cumem.Stream(), cumem.Stream()
    with session.gate(other):
        cumem.copy_async(out, buffer, stream=other)
        buffer.discard(stream)
        cumem.Device(1).synchronize()
        assert not stream.done
    stream.synchronize()
    other.synchronize()
    assert (out.numpy() == 1).all(), "discarded before it was read"


def test_discard_of_what_has_gaps_is_refused(emulated) -> None:
    buffer = cumem.zeros((8, PAGE), "u1", "managed")
    for part in (buffer[:, 1:], buffer[::2], buffer[3, ::2]):
        with pytest.raises(ValueError, match="contiguous"):
            part.discard()
    assert (buffer.numpy() == 0).all()


# -- residency ---------------------------------------------------------------------------


def test_residency_is_the_name_of_a_kind_for_every_kind(runtime) -> None:
    for kind in ("pinned", "mapped", "managed", "device"):
        assert cumem.empty(4, kind=kind).residency == kind
    assert cumem.asbuffer(np.zeros(4)).residency == "pageable"
    assert cumem.empty_mapped(4).as_device().residency == "mapped"


def test_residency_tells_where_each_part_was_sent(runtime) -> None:
    steers(runtime)
    buffer = cumem.empty_managed(4 * NBYTES, "u1")
    buffer.prefetch("cpu")
    buffer[NBYTES : 2 * NBYTES].prefetch(0)
    cumem.Device(0).synchronize()
    buffer.read_mostly = True
    found = buffer.page_residency()
    assert isinstance(found, cumem.Residency)
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
            pytest.skip("the system does not tell")
        buffer.numpy()[: 4 * NBYTES] = 1
        found = buffer.page_residency()
        assert found.host_nbytes >= 4 * NBYTES
        assert buffer[: 4 * NBYTES].page_residency().host_nbytes == 4 * NBYTES
        assert not found.sampled
        assert runtime.emulated or before < 8 * NBYTES  # there fresh memory is poisoned
        del buffer


def test_residency_of_much_memory_is_drawn_from_some_pages(emulated) -> None:
    nbytes = ((1 << 16) + 1) * PAGE  # one page more than are looked at
    with cumem.Pool("managed") as pool:
        buffer = pool.allocate(nbytes)
        buffer.numpy()[::PAGE] = 1
        found = buffer.page_residency()
        all_but_one = buffer[: nbytes - PAGE].page_residency()
        del buffer
    if found.host_nbytes is None:
        pytest.skip("the system does not tell")
    assert found.sampled
    assert found.host_nbytes == nbytes
    assert not all_but_one.sampled
    assert all_but_one.host_nbytes == nbytes - PAGE


def test_residency_of_many_small_ranges_tells_each(emulated) -> None:
    step = 64 << 10
    buffer = managed(64 * step)
    for part in range(0, 64, 2):
        buffer[part * step : (part + 1) * step].prefetch(0)
        buffer[(part + 1) * step : (part + 2) * step].prefetch("cpu")
    found = buffer.page_residency().last_prefetch
    if buffer.ptr % step == 0:
        assert len(found) == 64
        assert found[1] == (step, 2 * step, "host")
    assert found[0][0] == 0
    assert found[-1][1] == 64 * step


# -- with buf.on(...) ---------------------------------------------------------------------


def test_block_on_a_device_sends_there_and_back(runtime) -> None:
    steers(runtime)
    buffer = managed()
    with buffer.on(0) as same:
        assert same is buffer
        assert buffer.prefetch_location == cumem.Device(0)
    assert buffer.prefetch_location == "host"  # it had been nowhere
    buffer.prefetch(0)
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


# -- tiles -------------------------------------------------------------------------------


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_tiles_are_the_buffer(runtime, ahead: int, evict: bool) -> None:
    steers(runtime)
    data = np.random.default_rng(2).integers(0, 9, (1000, 1024), "i4")
    buffer = cumem.array(data, kind="managed")
    seen = np.zeros(1000, int)
    for rows, tile in cumem.tiles(buffer, "256 KiB", 0, ahead, evict):
        assert isinstance(tile, cumem.ManagedBuffer)
        assert tile.shape == data[rows].shape
        tile.fill(rows.start + 1, stream=cumem.current_stream())
        seen[rows] += 1
        data[rows] = rows.start + 1
    cumem.current_stream().synchronize()
    assert (seen == 1).all()
    assert (buffer.numpy() == data).all()


def test_tiles_of_a_shape_cover_all_axes(runtime) -> None:
    steers(runtime)
    buffer = cumem.zeros((5, 6, 1024), "i4", "managed")
    places = []
    for place, tile in cumem.tiles(buffer, (2, 4)):
        assert tile.shape == buffer[place].shape
        tile.fill(len(places) + 1)
        places.append(place)
    assert len(places) == 6
    assert places[1] == (slice(0, 2), slice(4, 6))
    expected = np.zeros(buffer.shape, "i4")
    for number, place in enumerate(places, 1):
        expected[place] = number
    assert (buffer.numpy() == expected).all()
    assert [p for p, _ in cumem.tiles(buffer, [5])] == [(slice(0, 5),)]
    assert [p for p, _ in cumem.tiles(buffer, np.array([5]))] == [(slice(0, 5),)]
    for wrong in (np.array([2.5]), np.ones((2, 2))):
        with pytest.raises(TypeError, match="nbytes_or_shape must be"):
            cumem.tiles(buffer, wrong)


def test_tile_with_gaps_moves_row_by_row(emulated) -> None:
    buffer = cumem.zeros((4, 4 * PAGE), "u1", "managed")
    found = cumem.tiles(buffer, (4, PAGE), ahead=0)
    next(found)
    cumem.Device(0).synchronize()
    assert testing.host_pages(buffer) == 16 - 4
    found.close()
    cumem.Device(0).synchronize()
    assert testing.host_pages(buffer) == 16


def test_rows_of_a_tile_are_found_whatever_its_steps(emulated) -> None:
    buffer = cumem.zeros((4, 3, 4 * PAGE), "u1", "managed")
    for part, pages in (
        (buffer[:, 1:], 4 * 2 * 4),  # rows of two axes each
        (buffer[::-1, ::2, :PAGE], 4 * 2),
        (buffer[1::2, :, PAGE : 2 * PAGE], 2 * 3),
    ):
        found = cumem.tiles(part, part.shape, ahead=0)
        next(found)
        cumem.Device(0).synchronize()
        assert testing.host_pages(buffer) == 48 - pages
        found.close()
        cumem.Device(0).synchronize()
        assert testing.host_pages(buffer) == 48


def test_next_tile_moves_in_while_this_one_is_used(emulated) -> None:
    buffer = managed(4 * NBYTES)
    stream = cumem.Stream()
    with stream:
        found = cumem.tiles(buffer, NBYTES)
        _, first = next(found)
        stream.synchronize()
        session.shut(stream)  # works on the first tile and does not come to an end
        first.fill(2, stream=stream)
        session.wait_until(lambda: on_device(buffer) == 2, "the tile ahead")
        _, second = next(found)
        session.wait_until(lambda: on_device(buffer) == 3, "the next one")
        assert testing.host_pages(first) == 0  # not sent back before its work is done
        testing.gate_open(stream)
        session.wait_until(lambda: testing.host_pages(first) > 0, "the way back")
        assert second.prefetch_location == cumem.Device(0)
        found.close()
        stream.synchronize()
    assert on_device(buffer) == 0
    assert (first.numpy() == 2).all()


def on_device(buffer: cumem.ManagedBuffer) -> int:
    """MiB of it that are."""
    return (buffer.nbytes // PAGE - testing.host_pages(buffer)) * PAGE // NBYTES


def test_work_on_a_tile_comes_after_its_move_and_its_way_back_after_that(
    streams,
) -> None:
    buffer = managed(2 * NBYTES)
    stream = cumem.Stream()
    with stream:
        found = cumem.tiles(buffer, NBYTES, ahead=0)
        _, tile = next(found)
        outward, other, inward = streams.made
        testing.gate_open(other)  # where nothing goes
        assert not stream.done  # nothing was given to it but the wait
        testing.gate_open(inward)
        stream.synchronize()
        assert on_device(buffer) == 1
        session.shut(stream)
        tile.fill(8, stream=stream)
        testing.gate_open(outward)
        found.close()
        assert not outward.done
        testing.gate_open(stream)
        stream.synchronize()
    assert on_device(buffer) == 0
    assert (tile.numpy() == 8).all()


def test_fourth_tile_waits_until_the_first_is_back(emulated) -> None:
    buffer = managed(8 * NBYTES)
    stream = cumem.Stream()
    came: list[int] = []

    def read() -> None:
        with stream:
            for rows, _ in cumem.tiles(buffer, NBYTES):
                came.append(rows.start // NBYTES)

    session.shut(stream)
    thread = threading.Thread(target=read)
    thread.start()
    session.wait_until_waiting(thread)
    assert came == [0, 1, 2]
    assert on_device(buffer) <= 4
    testing.gate_open(stream)
    thread.join()
    assert came == list(range(8))
    stream.synchronize()
    assert on_device(buffer) == 0


def test_two_tiles_move_back_at_a_time(streams) -> None:
    buffer = managed(4 * NBYTES)
    found = cumem.tiles(buffer, NBYTES, ahead=0)
    _, first = next(found)
    outward, other, inward = streams.made
    testing.gate_open(inward)
    for _ in range(2):
        _, tile = next(found)
    testing.gate_open(other)  # the second tile's way back; the first one's is shut
    session.wait_until(lambda: other.done, "the second tile's way back")
    assert not outward.done
    assert testing.host_pages(first) == 0
    testing.gate_open(outward)
    found.close()
    cumem.current_stream().synchronize()
    assert tile.nbytes == NBYTES
    assert on_device(buffer) == 0


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_tiles_take_three_more_than_are_ahead(emulated, ahead: int) -> None:
    buffer = managed(12 * NBYTES)
    most = 0
    for _, tile in cumem.tiles(buffer, NBYTES, ahead=ahead):
        tile.fill(1, stream=cumem.current_stream())
        most = max(most, on_device(buffer))
    assert most <= ahead + 3
    cumem.current_stream().synchronize()
    assert on_device(buffer) == 0


@pytest.mark.parametrize("last", [0, 1])
def test_stream_waits_for_the_last_ways_back(streams, last: int) -> None:
    buffer = managed(2 * NBYTES)
    stream = cumem.Stream()
    with stream:
        for _, tile in cumem.tiles(buffer, NBYTES, ahead=0):
            outward, inward = streams.made[:2], streams.made[2]
            testing.gate_open(inward)
            assert tile.nbytes == NBYTES
        testing.gate_open(outward[1 - last])
        outward[1 - last].synchronize()
        thread = threading.Thread(target=stream.synchronize)
        thread.start()
        session.wait_until_waiting(thread)
        testing.gate_open(outward[last])
        thread.join()
        assert on_device(buffer) == 0


@pytest.mark.parametrize("evict", [True, False])
def test_tiles_left_early_leave_nothing(emulated, evict: bool) -> None:
    buffer = managed(6 * NBYTES)
    found = cumem.tiles(buffer, NBYTES, ahead=2, evict=evict)
    next(found)
    next(found)
    found.close()
    cumem.current_stream().synchronize()
    assert on_device(buffer) == (0 if evict else 4)
    with pytest.raises(StopIteration):
        next(found)
    never = cumem.tiles(buffer, NBYTES)
    never.close()


@pytest.mark.parametrize("evict", [True, False])
def test_tiles_that_the_loop_closes_go_back_too(emulated, evict: bool) -> None:
    buffer = managed(6 * NBYTES)
    count = 0
    for _, tile in cumem.tiles(buffer, NBYTES, ahead=2, evict=evict):
        with tile:
            count += 1
    found = cumem.tiles(buffer, NBYTES, evict=evict)
    with next(found)[1]:
        pass
    found.close()
    cumem.current_stream().synchronize()
    assert count == 6
    assert on_device(buffer) == (0 if evict else 6)


def test_buffer_closed_under_its_tiles_is_told_once(emulated, monkeypatch) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    buffer = managed(6 * NBYTES)
    found = cumem.tiles(buffer, NBYTES)
    next(found)
    buffer.__exit__(None, None, None)
    del found
    gc.collect()
    assert unraisable == []
    buffer = managed(6 * NBYTES)
    found = cumem.tiles(buffer, NBYTES)
    next(found)
    buffer.__exit__(None, None, None)
    with pytest.raises(ValueError, match="the buffer is closed"):
        next(found)


def test_ctrl_c_is_heard_and_everything_goes_back(emulated) -> None:
    buffer = managed(8 * NBYTES)
    stream = cumem.Stream()
    with stream, session.alarm(stream):
        for _ in cumem.tiles(buffer, NBYTES):
            pass
    stream.synchronize()
    assert on_device(buffer) == 0


def test_tiles_make_no_more_streams_than_tiles(emulated) -> None:
    cumem.current_stream().synchronize()
    before = testing.counts()["streams"]
    found = cumem.tiles(managed(2 * NBYTES), NBYTES, ahead=1000)
    next(found)
    assert testing.counts()["streams"] <= before + 4
    found.close()


def test_move_of_a_tile_that_fails_is_raised_and_the_others_go_back(emulated) -> None:
    buffer = managed(6 * NBYTES)
    testing.plan_fault("prefetch_async", 4, 999)
    with pytest.raises(cumem.CudaError, match="999"):
        for _ in cumem.tiles(buffer, NBYTES):
            pass
    testing.plan_fault(None, 0)
    cumem.Device(0).synchronize()
    assert on_device(buffer) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((np.ones(3), 8), TypeError, "buf must be a ManagedBuffer, not ndarray"),
        ((0,), ValueError, "nbytes_or_shape must be at least 1, not 0"),
        (("many",), ValueError, "nbytes_or_shape must be a number of bytes"),
        ((1.5,), TypeError, "nbytes_or_shape must be a number of bytes"),
        (((),), ValueError, "1 to 2 lengths of at least 1"),
        (((1, 2, 3),), ValueError, "1 to 2 lengths of at least 1"),
        (((0, 2),), ValueError, "1 to 2 lengths of at least 1"),
        (((2.5,),), TypeError, "nbytes_or_shape must be an int, not float"),
        ((8, "cpu"), ValueError, "device must be a device, not 'cpu'"),
        ((8, 7), ValueError, "device 7 does not exist"),
        ((8, 0, -1), ValueError, "ahead must not be negative, not -1"),
        ((8, 0, 1.5), TypeError, "ahead must be an int, not float"),
    ],
)
def test_what_cannot_be_tiled_is_refused(emulated, arguments, error, text) -> None:
    buffer = cumem.zeros((4, 4), "u1", "managed")
    if not isinstance(arguments[0], np.ndarray):
        arguments = (buffer, *arguments)
    with pytest.raises(error, match=text):
        cumem.tiles(*arguments)
    with pytest.raises(ValueError, match="no axis to cut"):
        cumem.tiles(cumem.zeros((), "u1", "managed"), 8)


# -- without concurrent managed access ---------------------------------------------------


def test_device_without_concurrent_access_says_so() -> None:
    def check() -> None:
        buffer = managed()
        uses: list[Callable[[], object]] = [
            lambda: buffer.prefetch(0),
            lambda: buffer.prefetch("cpu"),
            lambda: cumem.prefetch_many([buffer, buffer], 0, cumem.Stream()),
            lambda: setattr(buffer, "preferred_location", 0),
            lambda: setattr(buffer, "accessed_by", [0]),
            lambda: buffer.on(0).__enter__(),
            lambda: next(cumem.tiles(buffer, PAGE)),
        ]
        if session.emulated_driver() >= 13000:
            uses.append(buffer.discard)
        for use in uses:
            with pytest.raises(cumem.CudaError, match="no concurrent managed access"):
                use()
        buffer.read_mostly = True
        buffer.accessed_by = ()
        buffer.preferred_location = "cpu"
        assert buffer.page_residency().read_mostly
        assert (buffer.numpy() == 1).all()

    with session.opened("emulated", concurrent=False):
        check()


# -- thrashing ---------------------------------------------------------------------------


def to_and_fro(buffer: cumem.ManagedBuffer, times: int) -> None:
    for _ in range(times):
        buffer.prefetch(0)
        buffer.numpy()


def test_thrashing_names_the_buffer_and_what_to_do(runtime) -> None:
    steers(runtime)
    buffer = managed()
    to_and_fro(buffer, 7)
    with pytest.warns(cumem.ManagedThrashWarning) as caught:
        to_and_fro(buffer, 2)
    text = str(caught[0].message)
    assert len(caught) == 1
    assert repr(buffer) in text
    assert "read_mostly" in text
    assert "tiles" in text
    assert caught[0].filename == __file__
    to_and_fro(buffer, 20)  # once


WAYS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "prefetches": (lambda b: b.prefetch(0), lambda b: b.prefetch("cpu")),
    "memoryview": (lambda b: b.prefetch(0), memoryview),
    "fills": (
        lambda b: b.fill(1, stream=cumem.current_stream()),
        lambda b: b.numpy(),
    ),
    "exports": (testing.array_interface, np.from_dlpack),
}


def in_turn(buffer: cumem.ManagedBuffer, name: str) -> None:
    for _ in range(9):
        for way in WAYS[name]:
            way(buffer)


@pytest.mark.parametrize("name", WAYS)
def test_each_way_to_and_fro_is_seen(emulated, name: str) -> None:
    buffer = managed()
    with pytest.warns(cumem.ManagedThrashWarning):
        in_turn(buffer, name)


def test_what_is_no_thrashing_is_not_warned_of(emulated) -> None:
    buffer = managed(32 * NBYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in range(32):  # by hand, each part once
            tile = buffer[part * NBYTES : (part + 1) * NBYTES]
            tile.prefetch(0)
            tile.prefetch("cpu")
        for _ in cumem.tiles(buffer, NBYTES):
            pass
        for _ in range(20):
            buffer.prefetch(0)
        steered = managed()
        steered.read_mostly = True
        to_and_fro(steered, 20)
        view = steered.as_device()
        for _ in range(20):
            testing.array_interface(view)
            steered.numpy()
        for _ in range(20):
            to_and_fro(managed(), 7)  # other memory each time


@pytest.mark.parametrize("name", WAYS)
def test_warning_that_is_an_error_leaves_nothing(emulated, name: str) -> None:
    buffer = managed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(cumem.ManagedThrashWarning):
            in_turn(buffer, name)
    cumem.Device(0).synchronize()
    del buffer
    gc.collect()
    assert testing.live_storages() == 0
