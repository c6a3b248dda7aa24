# SPDX-License-Identifier: Apache-2.0
"""Tests of what copy() accepts and refuses, and that it waits for earlier work.

Copies go between all kinds of memory, and between layouts with gaps or repeated
elements. Hooks count short copies, which the calling thread makes by itself, and jobs
for the copy threads.
"""

from __future__ import annotations

import array
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.strategies import KINDS

import cumem

# A driver may lack this call, and cumem then waits until the whole device is idle.
pytestmark = pytest.mark.by_driver("context_record_event")

PLACES = [*KINDS, "numpy"]


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_copy_between_every_pair(runtime, to, source) -> None:
    data = np.random.default_rng(0).integers(0, 256, (64, 33), dtype="u1")
    target = values.put(np.zeros_like(data), to)
    cumem.copy(target, values.put(data, source))
    assert (values.get(target) == data).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "source",
    [
        b"0123456789",
        bytearray(b"0123456789"),
        memoryview(b"0123456789"),
        array.array("B", b"0123456789"),
    ],
    ids=lambda s: type(s).__name__,
)
def test_copy_from_bytes_likes(runtime, kind, source) -> None:
    buffer = cumem.empty(10, "u1", kind)
    cumem.copy(buffer, source)
    assert values.get(buffer).tobytes() == b"0123456789"


@pytest.mark.parametrize("kind", KINDS)
def test_copy_to_writable_bytes_likes(runtime, kind) -> None:
    buffer = cumem.array(np.frombuffer(b"0123456789", "u1"), kind=kind)
    for target in (bytearray(10), array.array("B", bytes(10)), mmap.mmap(-1, 10)):
        cumem.copy(target, buffer)
        assert bytes(target) == b"0123456789"
    with pytest.raises((TypeError, ValueError, BufferError), match="read-only"):
        cumem.copy(b"0123456789", buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_scalars_are_cast_and_broadcast(runtime, kind) -> None:
    buffer = cumem.zeros((3, 4), "f4", kind)
    buffer[1:] = 2
    buffer[:, 0] = np.float64(0.5)
    expected = np.zeros((3, 4), "f4")
    expected[1:] = 2
    expected[:, 0] = 0.5
    assert (values.get(buffer) == expected).all()
    buffer[0] = [1, 2, 3, 4]
    expected[0] = [1, 2, 3, 4]
    assert (values.get(buffer) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_must_be_equal(runtime, kind) -> None:
    buffer = cumem.zeros(4, "f4", kind)
    with pytest.raises(TypeError) as caught:
        cumem.copy(buffer, np.zeros(4, "f8"))
    assert "float32" in str(caught.value)
    assert "float64" in str(caught.value)
    with pytest.raises(TypeError, match=">f4"):
        cumem.copy(buffer, np.zeros(4, ">f4"))


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_must_match_or_broadcast(runtime, kind) -> None:
    buffer = cumem.zeros((3, 4), "f4", kind)
    with pytest.raises(ValueError) as caught:
        cumem.copy(buffer, np.zeros((4, 3), "f4"))
    assert "(3, 4)" in str(caught.value)
    assert "(4, 3)" in str(caught.value)
    with pytest.raises(ValueError):
        cumem.copy(buffer, np.zeros((2, 3, 4), "f4"))
    cumem.copy(buffer, np.ones((1, 4), "f4"))
    assert (values.get(buffer) == 1).all()


#: Sources of a short copy to shape (16, 16). Only the first two are a single run of
#: bytes in C order that is as long as the target.
LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "run": lambda a: a,
    "leading axis": lambda a: a[None],
    "fortran": np.asfortranarray,
    "backwards": lambda a: a[::-1, ::-1],
    "every other": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "one row": lambda a: a[:1],
    "one element": lambda a: a[3, 4],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_copy_of_any_layout_moves_each_element(runtime, kind, layout) -> None:
    data = np.arange(256, dtype="u1").reshape(16, 16)
    source = LAYOUTS[layout](data)
    expected = np.broadcast_to(source, (16, 16) if source.ndim < 3 else (1, 16, 16))
    target = cumem.zeros((16, 16), "u1", kind)
    turned = cumem.zeros((16, 16), "u1", kind, order="F")
    # A copy behind other work would not be made as a short one.
    cumem.current_stream().synchronize()
    cumem.copy(target, source)
    cumem.copy(turned, source)
    assert (values.get(target) == expected.reshape(16, 16)).all()
    assert (values.get(turned) == expected.reshape(16, 16)).all()
    cumem.copy_many([(target, target[::-1].T.copy()), (turned, data)])
    assert (values.get(turned) == data).all()
    assert (values.get(target) == expected.reshape(16, 16)[::-1].T).all()


#: These are shapes, and strides in bytes, for elements of two bytes. Some of them share
#: memory.
SHARED = [
    ((5,), (0,)),
    ((5,), (1,)),
    ((5, 4), (2, 2)),
    ((5, 4), (-2, 2)),
    ((5, 4), (4, 2)),
    ((2, 5, 3), (16, 0, 2)),
    ((3, 1, 2), (2, 0, 4)),
]
#: With these shapes and strides in bytes, all elements of a view lie apart.
APART = [
    ((2, 3), (6, 4)),
    ((2, 5), (2, 8)),
    ((1, 3), (0, 2)),
    ((0, 3), (0, 0)),
    ((3, 1), (-2, 0)),
    ((), ()),
]


def windows(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(200, "u2")[100:], shape, strides)


@pytest.mark.parametrize(("shape", "strides"), SHARED)
@pytest.mark.parametrize("source", ["numpy", "device"])
def test_target_whose_elements_share_memory_is_refused(
    emulated, shape, strides, source
) -> None:
    """Threads and kernels would write such elements in any order, so no rule could say
    which value stays.
    """
    target = windows(shape, strides)
    values_of = values.put(np.ones(shape, "u2"), source)
    calls: list[Callable[[], object]] = [
        lambda: cumem.copy(target, values_of),
        lambda: cumem.copy_async(target, values_of),
        lambda: cumem.copy_many([(target, values_of)]),
        lambda: cumem.broadcast([np.zeros(shape, "u2"), target], values_of),
        lambda: cumem.copy(target, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"elements of the target.* share memory"):
            call()
    assert not target.any()


@pytest.mark.parametrize(("shape", "strides"), APART)
def test_target_that_holds_each_element_once_is_written(
    emulated, shape, strides
) -> None:
    target = windows(shape, strides)
    cumem.copy(target, np.ones(shape, "u2"))
    assert (target == 1).all()


def test_source_whose_elements_share_memory_is_read(emulated) -> None:
    source = np.lib.stride_tricks.sliding_window_view(np.arange(10), 4)
    buffer = cumem.empty_device(source.shape, source.dtype)
    cumem.copy(buffer, source)
    assert (buffer.to_numpy() == source).all()


def test_read_only_target_is_refused(runtime) -> None:
    target = np.zeros(4)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cumem.copy(target, cumem.zeros(4, kind="pinned"))
    assert (target == 0).all()


@pytest.mark.parametrize("bad", [object(), 3, "text", {1: 2}, None])
def test_target_must_be_memory(runtime, bad) -> None:
    with pytest.raises(TypeError):
        cumem.copy(bad, np.zeros(4))


def test_bytes_between_elements_are_never_written(runtime) -> None:
    for kind in KINDS:
        buffer = cumem.full((6, 8), 7, "u1", kind)
        cumem.copy(buffer[1::2, 1::3], np.zeros((3, 3), "u1"))
        expected = np.full((6, 8), 7, "u1")
        expected[1::2, 1::3] = 0
        assert (values.get(buffer) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_copy_waits_for_work_on_a_late_stream(runtime, kind) -> None:
    count = 200_000
    stream = cumem.Stream()
    source = cumem.array(np.arange(count, dtype="i4"), kind="pinned")
    middle = cumem.zeros(count, "i4", kind)
    handle = cumem.copy_async(middle, source, stream=stream)
    out = np.zeros(count, "i4")
    # This copy is made on another stream, and must still see the bytes of the copy above.
    cumem.copy(out, middle)
    assert (out == np.arange(count)).all()
    assert handle.done


def check_with_torch_and_cupy(torch, cupy, kind: str) -> None:
    """Copy between a buffer and memory of PyTorch and CuPy, in both directions."""
    data = np.arange(1000, dtype="f4")
    buffer = cumem.zeros(1000, "f4", kind)
    for make in (
        lambda: torch.arange(1000, dtype=torch.float32, device="cuda"),
        lambda: torch.arange(1000, dtype=torch.float32),
        lambda: cupy.arange(1000, dtype="f4"),
    ):
        buffer.fill(0)
        cumem.copy(buffer, make())
        assert (values.get(buffer) == data).all()
    there = torch.zeros(1000, device="cuda")
    cumem.copy(there, buffer)
    assert (there.cpu().numpy() == data).all()
    here = cupy.zeros(1000, "f4")
    cumem.copy(here[::2], buffer[:500])
    assert (cupy.asnumpy(here)[::2] == data[:500]).all()
    assert (cupy.asnumpy(here)[1::2] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_copy_with_torch_and_cupy_both_ways(cuda, kind) -> None:
    torch = pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    check_with_torch_and_cupy(torch, cupy, kind)


def test_torch_cpu_tensors_are_copied(runtime) -> None:
    torch = pytest.importorskip("torch")
    for kind in KINDS:
        buffer = cumem.zeros((4, 5), "f4", kind)
        tensor = torch.arange(20, dtype=torch.float32).reshape(5, 4).T
        cumem.copy(buffer, tensor)
        assert (values.get(buffer) == tensor.numpy()).all()
        back = torch.zeros(4, 5)
        cumem.copy(back, buffer)
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("source", PLACES)
def test_copy_between_two_devices(runtime, source) -> None:
    if cumem.device_count() < 2:
        pytest.skip("this test needs two devices")
    data = np.random.default_rng(0).integers(0, 256, (300, 70), dtype="u1")
    there = cumem.zeros(data.shape, "u1", "device", device=1)
    assert there.device == cumem.Device(1)
    cumem.copy(there, values.put(data, source))
    assert (values.get(there) == data).all()
    here = cumem.zeros(data.shape, "u1", "device", device=0)
    cumem.copy(here[::2, ::-3], there[1::2, ::3])
    expected = np.zeros_like(data)
    expected[::2, ::-3] = data[1::2, ::3]
    assert (values.get(here) == expected).all()
    cumem.copy_async(here, there, stream=cumem.Stream(device=1)).wait()
    assert (values.get(here) == data).all()
    assert cumem.current_device() == cumem.Device(0)


def test_a_device_that_is_not_used_gets_no_context(runtime) -> None:
    if cumem.device_count() < 2:
        pytest.skip("this test needs two devices")
    buffer = cumem.zeros(100, "u1", "device", device=1)
    assert values.get(buffer).sum() == 0
    assert buffer.device == cumem.Device(1)


class OnlyArray:
    def __array__(self, dtype=None, copy=None):
        return np.array([1.9, 300.0, -1.0])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (OnlyArray(), TypeError),
        ([1.9, 3.0, 2.0], TypeError),
        (1.5, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (np.int64(300), OverflowError),
        (300, OverflowError),
        ([300, 1, 1], OverflowError),
        (-1, OverflowError),
    ],
)
def test_values_that_would_change_are_refused(runtime, value, error) -> None:
    for kind in KINDS:
        buffer = cumem.full(3, 7, "u1", kind)
        with pytest.raises(error):
            cumem.copy(buffer, value)
        assert (values.get(buffer) == 7).all()


def test_values_that_fit_are_converted(runtime) -> None:
    for kind in KINDS:
        buffer = cumem.zeros(3, "u1", kind)
        cumem.copy(buffer, [1, True, np.int64(255)])
        assert values.get(buffer).tolist() == [1, 1, 255]
        single = cumem.zeros(3, "f4", kind)
        cumem.copy(single, 0.1)
        assert (values.get(single) == np.float32(0.1)).all()
        single[1] = 7
        assert values.get(single)[1] == 7


@pytest.mark.parametrize("over", [-1, 0, 1, 4095, 4097])
@pytest.mark.parametrize(
    "nbytes", [4096, 16384, 32768, 262144, 786432, 2097152, 6291456]
)
def test_copy_of_any_length_about_the_pieces(runtime, nbytes, over):
    src = np.random.default_rng(nbytes).integers(0, 256, nbytes + over, np.uint8)
    dst = np.zeros(src.size + 2, np.uint8)
    buf = cumem.empty_device(src.shape, src.dtype)
    cumem.copy(buf, src)
    cumem.copy(dst[1:-1], buf)
    assert (dst[1:-1] == src).all()
    assert dst[0] == dst[-1] == 0


# -- what short copies ask of the driver --------------------------------------------------


def questions(dst: object, src: object) -> int:
    """Return how often a copy asked the driver whose memory an address belongs to."""
    session.testing.plan_fault(None, 0)
    cumem.copy(dst, src)
    return int(session.testing.fault_count("pointer_attributes"))


@pytest.mark.parametrize(("nbytes", "asked"), [(64 << 10, False), (65 << 10, True)])
def test_short_arrays_are_not_asked_about_where_a_device_is_waited_for(
    emulated, nbytes: int, asked: bool
) -> None:
    host = np.arange(nbytes, dtype="u1")
    back = np.zeros_like(host)
    device = cumem.empty_device(nbytes, "u1")
    pinned = cumem.empty_pinned(nbytes, "u1")
    assert (questions(device, host) > 0) == asked
    assert (questions(back, device) > 0) == asked
    np.testing.assert_array_equal(back, host)
    # The driver is asked only if the kind of memory matters: between two ends on the host,
    # in the background, and for memory of cumem.
    assert questions(pinned, host) > 0
    assert questions(device, pinned.numpy()) > 0
    session.testing.plan_fault(None, 0)
    cumem.copy_async(device, host).wait()
    assert session.testing.fault_count("pointer_attributes") > 0


def test_values_are_not_asked_about(emulated) -> None:
    device = cumem.empty_device(3, "i4")
    assert questions(device, [1, 2, 3]) == 0
    assert questions(device[:1], 7) == 0
    np.testing.assert_array_equal(values.get(device), [7, 2, 3])


def test_short_copies_of_what_others_have_locked_are_whole(runtime) -> None:
    host = np.arange(10_000, dtype="i4")
    back = np.zeros_like(host)
    device = cumem.empty_device(host.shape, "i4")
    with cumem.register(host), cumem.register(back):
        cumem.copy(device, host)
        cumem.copy(back, device)
    np.testing.assert_array_equal(back, host)
    managed = cumem.zeros(host.shape, "i4", "managed")
    managed.prefetch_pages(0)
    view = managed.numpy()
    cumem.copy(view, device)
    np.testing.assert_array_equal(view, host)
    device.fill(0)
    cumem.copy(device, view)
    cumem.copy(back, device)
    np.testing.assert_array_equal(back, host)


# -- targets in which elements share memory --------------------------------------------


def expanded(kind: str) -> Any:
    """Make three rows that share their memory, like a tensor after expand()."""
    row = cumem.zeros(4, kind=kind).numpy()
    return np.lib.stride_tricks.as_strided(row, (3, 4), (0, 8), writeable=True)


@pytest.mark.parametrize("kind", ["numpy", "pinned", "managed"])
def test_elements_of_a_target_that_share_memory_are_refused(runtime, kind) -> None:
    same = expanded("pinned" if kind == "numpy" else kind)
    target = same if kind == "numpy" else cumem.asbuffer(same)
    source = cumem.array(np.arange(12.0).reshape(3, 4))
    apart = np.zeros((3, 4))
    reported = r"share memory .*strides \(0, 8\) in bytes\), as after expand\(\)"
    for copy in (cumem.copy, cumem.copy_async):
        with pytest.raises(ValueError, match=reported):
            copy(target, source)
    for pairs in ([(target, source)], [(apart, source), (target, source)]):
        with pytest.raises(ValueError, match=reported):
            cumem.copy_many(pairs)
    with pytest.raises(ValueError, match=reported):
        cumem.copy(target, np.zeros((3, 4), "f4"), casting="unsafe")
    with pytest.raises(ValueError, match=reported):
        cumem.copy(target, np.zeros((3, 4), "c16"), casting="unsafe")
    assert (same == 0).all()


def test_elements_that_share_memory_may_be_read_and_left_alone(runtime) -> None:
    same = expanded("pinned")
    same[0] = np.arange(4)
    buffer = cumem.empty((3, 4))
    cumem.copy(buffer, same)
    assert values.get(buffer).tolist() == [[0, 1, 2, 3]] * 3
    # This is a single row, so no elements share memory.
    cumem.copy(same[:1], np.ones((1, 4)))
    cumem.copy(same[:, :0], np.ones((3, 0)))
    assert (same == 1).all()


def test_an_expanded_tensor_is_no_target(emulated) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1, 4).expand(3, 4)
    with pytest.raises(ValueError, match=r"strides \(0, 4\) in bytes"):
        cumem.copy(tensor, cumem.zeros((3, 4), "f4"))
    cumem.copy(tensor.contiguous(), cumem.zeros((3, 4), "f4"))


def counted(dst: object, src: object) -> tuple[int, int]:
    """Copy, and return how many short copies and how many jobs of the host this took."""
    before = session.testing.copy_counts()
    cumem.copy(dst, src)
    after = session.testing.copy_counts()
    return after["quick"] - before["quick"], after["host"] - before["host"]


@pytest.mark.parametrize("to", ["pinned", "mapped", "numpy"])
@pytest.mark.parametrize("source", ["pinned", "mapped", "numpy"])
def test_short_copy_between_ends_of_the_host_needs_no_job(emulated, to, source) -> None:
    for nbytes, expected in [(1, (1, 0)), (64 << 10, (1, 0)), ((64 << 10) + 1, (0, 1))]:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, "u1")
        target = values.put(np.zeros_like(data), to)
        assert counted(target, values.put(data, source)) == expected
        assert (values.get(target) == data).all()


def test_copies_between_ends_of_the_host_that_are_no_single_run_are_jobs(
    emulated,
) -> None:
    source = values.put(np.arange(64, dtype="u1"), "pinned")
    target = cumem.empty_pinned(32, "u1")
    assert counted(target, source[::2]) == (0, 1)
    assert values.get(target).tolist() == list(range(0, 64, 2))
    assert counted(source[1:], source[:-1]) == (0, 1)
    assert values.get(source).tolist() == [0, *range(63)]


def test_short_copy_between_ends_of_the_host_comes_after_what_is_queued(
    emulated,
) -> None:
    near = cumem.zeros(256, "u1", "device")
    between, target = cumem.empty_pinned(256, "u1"), cumem.empty_pinned(256, "u1")
    stream = cumem.Stream()
    for value in range(1, 20):
        near.fill(value, stream=stream)
        cumem.copy_async(between, near, stream=stream)
        cumem.copy(target, between)
        assert (values.get(target) == value).all()
