# SPDX-License-Identifier: Apache-2.0
"""register(), which page-locks memory that exists already.

The tests register arrays, views, files and tensors of any shape and alignment, copy to
and from them, let calls of the driver fail, and look at what counts against limits.
"""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import re
import weakref
from multiprocessing import shared_memory

import numpy as np
import pytest
from support import faults, session, values

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

testing = session.testing

PAGE = os.sysconf("SC_PAGE_SIZE")


class FakeTensor:
    """An object like a CPU tensor of PyTorch: it has DLPack and no buffer protocol."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: object) -> object:
        options.pop("stream", None)
        return self.values.__dlpack__(**options)


# -- what may be registered ------------------------------------------------------------


def test_array_becomes_a_pinned_buffer_in_place(runtime) -> None:
    data = np.arange(10_000, dtype="i4").reshape(100, 100)
    with cumem.register(data) as buffer:
        assert type(buffer) is cumem.PinnedBuffer
        assert buffer.ptr == data.ctypes.data
        assert buffer.shape == data.shape
        assert buffer.strides == data.strides
        assert buffer.dtype == data.dtype
        assert buffer.kind == "pinned"
        assert not buffer.readonly
        assert buffer.device == cumem.Device(0)
        assert testing.registrations() >= 1
        buffer[0, 0] = 7
        assert data[0, 0] == 7
        values.round_trip(buffer)
        assert not data.any()
    assert testing.registrations() == 0
    with pytest.raises(ValueError, match="closed"):
        buffer.numpy()


@pytest.mark.parametrize(
    "take",
    [
        lambda a: a[1:],
        lambda a: a[3:977],
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: a[::-3],
        lambda a: a.reshape(25, 40).T,
        lambda a: a.reshape(25, 40)[::-2, 5:30:4],
        lambda a: a.reshape(25, 40)[:, 3],
        lambda a: np.broadcast_to(a[:4], (5, 4)),
        lambda a: a[5],
        lambda a: a[:1].reshape(()),
    ],
)
def test_slices_keep_shape_and_strides(runtime, take) -> None:
    data = take(np.arange(1000, dtype="i2"))
    if not isinstance(data, np.ndarray):
        data = np.asarray(data)
    with cumem.register(data) as buffer:
        assert buffer.ptr == data.ctypes.data
        assert (buffer.shape, buffer.strides) == (data.shape, data.strides)
        assert (buffer.numpy() == data).all()
        device = cumem.empty_device(data.shape, data.dtype)
        cumem.copy(device, buffer)
        assert (values.get(device) == data).all()


@pytest.mark.parametrize("offset", [0, 1, 3, PAGE - 1, PAGE, PAGE + 7])
@pytest.mark.parametrize("nbytes", [1, 5, PAGE, 3 * PAGE + 11])
def test_any_alignment_and_length(runtime, offset: int, nbytes: int) -> None:
    memory = bytearray(np.random.default_rng(0).bytes(6 * PAGE))
    view = memoryview(memory)[offset : offset + nbytes]
    with cumem.register(view) as buffer:
        assert buffer.nbytes == nbytes
        assert buffer.dtype == np.uint8
        values.round_trip(buffer)
    assert memory[offset : offset + nbytes] == bytes(nbytes)
    view.release()


@pytest.mark.parametrize(
    "dtype", ["?", "f2", ">i4", "c16", "S3", "M8[ns]", [("a", "i2"), ("b", "f8")]]
)
def test_every_dtype(runtime, dtype) -> None:
    data = np.zeros((3, 4), dtype)
    with cumem.register(data) as buffer:
        assert buffer.dtype == data.dtype
        assert buffer.shape == (3, 4)


def test_bytes_likes(runtime) -> None:
    for obj in (
        bytearray(b"abc" * 1000),
        array.array("d", range(100)),
        (ctypes.c_int * 100)(*range(100)),
        memoryview(bytearray(100)),
    ):
        expected = np.asarray(memoryview(obj)).copy()
        with cumem.register(obj) as buffer:
            assert (buffer.numpy() == expected).all()
            values.round_trip(buffer)


def test_mmap_can_be_closed_afterwards(runtime) -> None:
    with mmap.mmap(-1, 5 * PAGE) as memory:
        with cumem.register(memory) as buffer:
            assert buffer.nbytes == 5 * PAGE
            with pytest.raises(BufferError):
                memory.close()
            cumem.copy(buffer, np.full(5 * PAGE, 7, "u1"))
        assert memory[:3] == b"\7\7\7"


def test_shared_memory_itself_and_its_view(runtime) -> None:
    memory = shared_memory.SharedMemory(create=True, size=3 * PAGE)
    try:
        for obj in (memory, memory.buf):
            with cumem.register(obj) as buffer:
                assert buffer.nbytes >= 3 * PAGE
                buffer[0] = 9
                assert memory.buf[0] == 9
                values.round_trip(buffer)
            del buffer
    finally:
        memory.close()
        memory.unlink()


def test_dlpack_cpu_tensor(runtime) -> None:
    data = np.arange(1000, dtype="f4").reshape(10, 100)
    with cumem.register(FakeTensor(data)) as buffer:
        assert buffer.ptr == data.ctypes.data
        assert buffer.shape == data.shape
        assert buffer.dtype == data.dtype
        values.round_trip(buffer)
    assert not data.any()


def test_torch_tensor(runtime) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1000, dtype=torch.float32)
    with cumem.register(tensor) as buffer:
        assert buffer.ptr == tensor.data_ptr()
        assert (buffer.numpy() == np.arange(1000, dtype="f4")).all()
        if not runtime.emulated:
            # Before this call, PyTorch takes no memory for pinned.
            torch.cuda.init()
            assert tensor.is_pinned()


@pytest.mark.parametrize("obj", [np.empty((0, 3)), b"", bytearray(), np.empty((2, 0))])
def test_nothing_to_register_is_fine(runtime, obj) -> None:
    with cumem.register(obj) as buffer:
        assert buffer.nbytes == 0
        assert buffer.ptr == 0
        assert testing.registrations() == 0
        assert buffer.numpy().nbytes == 0


def test_asbuffer_of_host_memory(runtime) -> None:
    data = np.arange(100)
    host = cumem.asbuffer(data)
    with cumem.register(host) as buffer:
        assert buffer.ptr == data.ctypes.data
        with pytest.raises(BufferError):
            host.free()
    host.free()


@pytest.mark.parametrize("make", [cumem.empty_pinned, cumem.empty_mapped])
@pytest.mark.parametrize("mapped", [False, True])
def test_memory_that_is_pinned_already_is_no_error(runtime, make, mapped) -> None:
    pinned = make(1000, "i4")
    pinned.fill(3)
    with cumem.register(pinned, mapped=mapped) as buffer:
        assert buffer.ptr == pinned.ptr
        assert testing.registrations() == 0
        values.round_trip(buffer)
    assert not pinned.numpy().any()


@pytest.mark.parametrize(
    ("obj", "match"),
    [
        (None, "obj must be an object with host memory"),
        (3, "not int"),
        ("text", "not str"),
        ([1, 2, 3], "not list"),
        (np.array([object()]), "object"),
    ],
)
def test_what_has_no_memory_is_refused(runtime, obj, match) -> None:
    with pytest.raises(TypeError, match=match):
        cumem.register(obj)


@pytest.mark.parametrize("kind", ["device", "managed"])
def test_other_kinds_of_ours_are_refused(runtime, kind) -> None:
    with pytest.raises(TypeError, match=f"host memory.* not {kind} memory") as caught:
        cumem.register(cumem.empty(10, kind=kind))
    # Managed memory has the buffer protocol, so its absence cannot be the reason.
    assert "buffer protocol" not in str(caught.value)


def test_wrong_arguments_are_refused(runtime) -> None:
    data = np.zeros(10)
    for call, error in (
        (lambda: cumem.register(), TypeError),
        (lambda: cumem.register(data, True), TypeError),
        (lambda: cumem.register(data, mapped=np.ones(2)), TypeError),
        (lambda: cumem.register(data, read_only=np.ones(2)), TypeError),
        (lambda: cumem.register(data, device=99), ValueError),
        (lambda: cumem.register(data, colour=1), TypeError),
        (lambda: cumem.types.Registration(), TypeError),
    ):
        with pytest.raises(error):
            call()
    assert testing.registrations() == 0
    closed = cumem.empty_pinned(4)
    closed.free()
    with pytest.raises(ValueError, match="closed"):
        cumem.register(closed)


# -- mapped and read-only --------------------------------------------------------------


def test_mapped_has_a_device_address(runtime) -> None:
    data = np.arange(1000, dtype="i4")
    with cumem.register(data[3:], mapped=True) as buffer:
        assert type(buffer) is cumem.MappedBuffer
        assert buffer.ptr == data.ctypes.data + 12
        assert buffer.device_ptr != 0
        assert hasattr(buffer, "__cuda_array_interface__") != runtime.emulated
        values.round_trip(buffer)


def can_read_only() -> bool:
    return bool(cumem.Device(0).attributes().get("host_register_read_only"))


def test_read_only_memory_is_registered_for_reading(runtime, tmp_path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
    ):
        if not can_read_only():
            with pytest.raises(cumem.CudaError):
                cumem.register(memory)
            return
        with cumem.register(memory) as buffer:
            assert buffer.readonly
            with pytest.raises((TypeError, ValueError, BufferError)):
                buffer[0] = 1
            with pytest.raises((TypeError, ValueError, BufferError)):
                cumem.copy(buffer, np.zeros(buffer.shape, "u1"))
            values.round_trip(buffer)


def test_read_only_heap_pages_can_be_registered_for_writing_too(runtime) -> None:
    data = np.zeros(2 * PAGE, "u1")
    frozen = data[:]
    frozen.flags.writeable = False
    with cumem.register(frozen) as reading:
        assert reading.readonly
        assert reading.flags == ("registered",)
        with cumem.register(data) as writing:
            cumem.copy(writing, cumem.full(2 * PAGE, 7, "u1"))
        assert (reading.numpy() == 7).all()
    assert testing.registrations() == 0


def test_read_only_follows_the_object_by_default(runtime) -> None:
    data = np.arange(100)
    frozen = data.copy()
    frozen.flags.writeable = False
    for obj in (frozen, bytes(100), frozen[:0]):
        for wish in (None, True):
            assert cumem.register(obj, read_only=wish).buffer.readonly
        with pytest.raises(ValueError, match="read_only=False, but obj is read-only"):
            cumem.register(obj, read_only=False)
    assert cumem.register(data, read_only=True).buffer.readonly
    assert not cumem.register(data).buffer.readonly
    assert not cumem.register(data, read_only=False).buffer.readonly
    assert testing.registrations() == 0


def test_parts_locked_before_are_mapped_as_one_or_named(runtime) -> None:
    data = np.zeros(64 << 10, "u1")
    first = cumem.register(data[: 16 << 10], mapped=True)
    # On the emulated device, each part has its own device address.
    if runtime.emulated:
        with pytest.raises(cumem.CudaError) as caught:
            cumem.register(data, mapped=True)
        assert caught.value.name == "CM_ENOTSUP"
        [note] = caught.value.__notes__
        assert re.search(r"parts .* page-locked before, and from byte \d+ on", note)
        # Without a mapping, the parts can be locked as one.
        assert cumem.register(data).buffer.ptr == data.ctypes.data
    # On a GPU, devices use the host's addresses, which follow each other.
    else:
        with cumem.register(data, mapped=True) as whole:
            whole.fill(3, stream=cumem.Stream())
            whole[::2].fill(4, stream=cumem.Stream())
            assert (whole.numpy().reshape(-1, 2) == (4, 3)).all()
    first.close()


# -- failures --------------------------------------------------------------------------


def test_failure_leaves_nothing(emulated) -> None:
    class Array(np.ndarray):
        pass

    data = np.zeros(1000).view(Array)
    owner = weakref.ref(data)
    for op in ("host_register", "host_device_address"):
        # The call is tried again after a trim, so the fault has to repeat.
        testing.plan_fault(op, 1, repeat=True)
        with pytest.raises(cumem.CudaError) as caught:
            cumem.register(data, mapped=True)
        assert caught.value.call in ("cudaHostRegister", "cudaHostGetDevicePointer")
        del caught
        assert testing.registrations() == 0
    testing.plan_fault(None, 0)
    del data
    gc.collect()
    testing.poll()
    assert owner() is None


def test_unregistering_that_fails_is_raised_by_close(emulated) -> None:
    data = np.zeros(1000)
    registration = cumem.register(data)
    testing.plan_fault("host_unregister", 1)
    with pytest.raises(cumem.CudaError) as caught:
        registration.close()
    assert caught.value.call == "cudaHostUnregister"
    registration.close()
    assert testing.registrations() == 1  # The pages that stayed locked are tried again.
    cumem.register(data).close()
    assert testing.registrations() == 0


def test_fault_sweep_of_registrations(emulated) -> None:
    data = np.zeros(3 * PAGE + 5, "u1")

    def scenario() -> None:
        with cumem.register(data[7:], mapped=True) as buffer:
            buffer.numpy()
        registration = cumem.register(data, read_only=True)
        registration.close()

    swept = faults.sweep(scenario)
    assert {"host_register", "host_unregister", "host_device_address"} <= swept.failed
    assert {"host_register", "host_device_address"} <= swept.raised


# A negative stride of 64 bits can name this many bytes.
FAR = 2**63


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2,), (-FAR,)),
        ((2, 2), (-FAR // 2, FAR // 2)),
        ((3,), (FAR // 2,)),
        ((2,), (FAR - 1,)),
    ],
)
def test_strides_that_leave_the_address_space_are_refused(
    runtime, shape, strides
) -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(8, "u1"), shape, strides)
    with pytest.raises(ValueError, match=r"63 bits|address space"):
        cumem.register(array)
    with pytest.raises(ValueError, match=r"63 bits|address space"):
        cumem.asbuffer(array)


def test_strides_that_no_element_needs_are_kept_and_harmless(runtime) -> None:
    """NumPy takes any stride for an axis of length 1, or for memory without elements."""
    array = np.lib.stride_tricks.as_strided(np.full(8, 7, "u1"), (1, 5), (-FAR, 1))
    with cumem.register(array) as buffer:
        assert (buffer[::-1][0, 1:].numpy() == 7).all()
        target = cumem.empty_device((1, 5), "u1")
        nothing = cumem.empty_device((0, 5), "u1")
        cumem.scatter([target, nothing], buffer)
        assert (values.get(target) == 7).all()
    empty = np.lib.stride_tricks.as_strided(array, (0, 5), (-FAR, -FAR))
    view = cumem.asbuffer(empty)[:, 3]
    assert view.shape == (0,)
    assert view.numpy().shape == (0,)
    assert view[:, None].reshape(0, 2**40, 2**20).__dlpack__() is not None


# -- pieces of one array ---------------------------------------------------------------

PIECES = {
    "ends": [(0, PAGE), (15 * PAGE, 16 * PAGE)],
    "halves": [(0, 7 * PAGE), (7 * PAGE, 16 * PAGE)],
    "first": [(0, 7 * PAGE)],
    "middle": [(3 * PAGE, 5 * PAGE)],
    "thirds": [(0, 4 * PAGE), (4 * PAGE, 9 * PAGE), (9 * PAGE, 16 * PAGE)],
}


# Each of these functions copies a whole array in a different way. Its copies cross the
# boundaries between memory that is page-locked and memory that is not.


def copy_strided(dst, src, stream) -> None:
    cumem.copy(dst[::2], src[::2])
    cumem.copy(dst[1::2], src[1::2])


def copy_on_stream(dst, src, stream) -> None:
    cumem.copy_async(dst, src, stream=stream)
    stream.synchronize()


def copy_strided_on_stream(dst, src, stream) -> None:
    for first in range(3):
        cumem.copy_async(dst[first::3], src[first::3], stream=stream)
    stream.synchronize()


def copy_in_background(dst, src, stream) -> None:
    cumem.copy_async(dst[::2], src[::2]).wait()
    cumem.copy_async(dst[1::2], src[1::2]).wait()


def copy_by_views(dst, src, stream) -> None:
    cumem.copy(cumem.asbuffer(dst)[::2], cumem.asbuffer(src)[::2], stream=stream)
    cumem.copy(cumem.asbuffer(dst)[1::2], cumem.asbuffer(src)[1::2], stream=stream)


def copy_many_on_stream(dst, src, stream) -> None:
    half = len(dst) // 2
    pairs = [(dst[:half], src[:half]), (dst[half:], src[half:])]
    cumem.copy_many_async(pairs, stream=stream)
    stream.synchronize()


def copy_many_whole(dst, src, stream) -> None:
    cumem.copy_many([(dst, src), (dst[:0], src[:0])])


@pytest.mark.parametrize("kind", ["device", "pinned", "mapped"])
@pytest.mark.parametrize(
    "move",
    [
        copy_strided,
        copy_on_stream,
        copy_strided_on_stream,
        copy_in_background,
        copy_by_views,
        copy_many_on_stream,
        copy_many_whole,
    ],
)
@pytest.mark.parametrize("pieces", PIECES)
def test_array_that_is_locked_in_pieces_is_copied_right(
    runtime, pieces: str, move, kind: str
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 16 * PAGE), "u1")
    # The array begins and ends inside a page. Its ends are locked only if a piece has that
    # whole page.
    array = memory[100 : 16 * PAGE - 100]
    values = np.random.default_rng(1).integers(0, 256, array.size, "u1")
    other = cumem.array(values, kind=kind)
    held = [cumem.register(memory[slice(*piece)]) for piece in PIECES[pieces]]
    stream = cumem.Stream()
    move(array, other, stream)
    assert (array == values).all()
    array[:] = values[::-1]
    move(other, array, stream)
    assert (cumem.asnumpy(other) == values[::-1]).all()
    for registered in held:
        registered.close()


def test_array_with_a_hole_between_locked_pages_is_ordinary_memory(runtime) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 16 * PAGE), "u1")
    with cumem.register(memory[:PAGE]), cumem.register(memory[2 * PAGE :]):
        assert cumem.asbuffer(memory).kind == "pageable"
        assert cumem.asbuffer(memory[2 * PAGE : 3 * PAGE]).kind == "pinned"
    with cumem.register(memory[:PAGE]), cumem.register(memory[PAGE:]):
        assert cumem.asbuffer(memory).kind == "pinned"


def test_fill_of_pieces_on_a_stream_reaches_every_byte(runtime) -> None:
    for pieces in PIECES.values():
        memory = np.frombuffer(mmap.mmap(-1, 16 * PAGE), "u1")
        held = [cumem.register(memory[slice(*piece)]) for piece in pieces]
        stream = cumem.Stream()
        cumem.asbuffer(memory)[::2].fill(7, stream=stream)
        cumem.asbuffer(memory)[1::2].fill(8, stream=stream)
        stream.synchronize()
        assert (memory[::2] == 7).all()
        assert (memory[1::2] == 8).all()
        for registered in held:
            registered.close()


# -- what is locked is counted, and limited ----------------------------------------------


MIB = 1 << 20


def pages(nbytes: int) -> np.ndarray:
    """Return memory that shares no page with anything else."""
    return np.frombuffer(mmap.mmap(-1, nbytes), "u1")


def locked() -> int:
    """Return how much host memory is page-locked, as both counters must report."""
    host = cumem.memory_info("host")
    assert host.live == cumem.stats()["pinned"].live_nbytes
    return host.live


def test_registered_memory_is_counted_until_it_is_unlocked(runtime) -> None:
    before = locked()
    with cumem.measure() as measured, cumem.register(pages(4 * MIB)):
        assert locked() == before + 4 * MIB
        (found,) = (p for p in cumem.stats().pools if p.name == "registered")
        assert (found.kind, found.live_nbytes) == ("pinned", 4 * MIB)
        assert cumem.live().nbytes >= 4 * MIB
    assert locked() == before
    (found,) = (p for p in measured.pools if p.name == "registered")
    assert (found.live_nbytes, found.peak_live_nbytes) == (0, 4 * MIB)


def test_pages_that_registrations_share_are_counted_once(runtime) -> None:
    before = locked()
    data = pages(4 * MIB)
    first = cumem.register(data[: 3 * MIB])
    second = cumem.register(data[MIB:])
    assert locked() == before + 4 * MIB
    first.close()
    second.close()
    assert locked() == before


def test_memory_that_was_locked_before_is_not_counted_again(runtime) -> None:
    buffer = cumem.empty_pinned(4 * MIB, "u1")
    before = locked()
    with cumem.register(buffer.numpy()):
        assert locked() == before


@pytest.mark.parametrize("mapped", [False, True])
def test_registering_more_than_a_limit_allows_says_what_to_type(
    runtime, mapped
) -> None:
    held = locked()
    with cumem.limit("pinned", held + 4 * MIB):
        with pytest.raises(cumem.OutOfMemoryError) as caught:
            cumem.register(pages(8 * MIB), mapped=mapped)
        error = caught.value
        assert error.name == "CM_ELIMIT"
        assert (error.requested, error.limit) == (8 * MIB, held + 4 * MIB)
        assert error.kind == ("mapped" if mapped else "pinned")
        assert error.advice is not None
        assert 'cumem.set_limit("pinned", ...)' in error.advice
        assert error.advice in str(error)
        assert locked() == held
        cumem.register(pages(4 * MIB), mapped=mapped).close()
    assert locked() == held


def test_registered_memory_leaves_pools_less_of_the_limit(emulated) -> None:
    cumem.set_limit("pinned", 16 * MIB)
    registration = cumem.register(pages(12 * MIB))
    with pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_pinned(8 * MIB, "u1")
    registration.close()
    cumem.empty_pinned(8 * MIB, "u1")


def test_cached_memory_makes_room_for_a_registration(emulated) -> None:
    del [cumem.empty_pinned(12 * MIB, "u1")][:]
    del [cumem.empty_mapped(2 * MIB, "u1")][:]
    cumem.set_limit("pinned", 16 * MIB)
    with cumem.register(pages(16 * MIB)):
        assert locked() == 16 * MIB


def test_callback_makes_room_for_a_registration(emulated) -> None:
    cumem.set_limit("pinned", 16 * MIB)
    kept = [cumem.empty_pinned(12 * MIB, "u1")]
    asked: list[tuple[str, int, int]] = []

    def drop(kind: str, device: int, nbytes: int) -> None:
        asked.append((kind, device, nbytes))
        kept.clear()

    with (
        cumem.on_out_of_memory(drop),
        cumem.register(pages(8 * MIB), mapped=True) as mapped,
    ):
        assert mapped.kind == "mapped"
    assert asked == [("mapped", 0, 8 * MIB)]


def test_collection_makes_room_for_a_registration(emulated) -> None:
    cumem.set_limit("pinned", 16 * MIB)
    cycle: list[object] = [cumem.empty_pinned(12 * MIB, "u1")]
    cycle.append(cycle)
    del cycle
    cumem.register(pages(8 * MIB)).close()


def test_registration_of_which_a_piece_fails_refunds_the_others(emulated) -> None:
    cumem.set_limit("pinned", 16 * MIB)
    data = pages(8 * MIB)
    between = cumem.register(data[3 * MIB : 5 * MIB])
    # The piece after `between` fails.
    testing.plan_fault("host_register", 2, repeat=True)
    with pytest.raises(cumem.CudaError):
        cumem.register(data)
    testing.plan_fault(None, 0)
    assert locked() == 2 * MIB
    between.close()
    assert locked() == 0
    cumem.register(pages(16 * MIB)).close()


def test_registration_that_dies_or_outlives_shutdown_is_refunded(emulated) -> None:
    cumem.set_limit("pinned", 16 * MIB)
    cumem.register(pages(12 * MIB))
    gc.collect()
    registration = cumem.register(pages(16 * MIB))
    cumem.shutdown()
    cumem.set_limit("pinned", 16 * MIB)
    assert locked() == 0
    cumem.register(pages(16 * MIB)).close()
    registration.close()


def test_tensor_that_is_registered_is_counted(runtime) -> None:
    torch = pytest.importorskip("torch")
    before = locked()
    tensor = torch.zeros(MIB, dtype=torch.float32)
    with cumem.register(tensor):
        assert before + 4 * MIB <= locked() <= before + 4 * MIB + PAGE
    assert locked() == before
