# SPDX-License-Identifier: Apache-2.0
"""asbuffer(), and what copy() makes of objects of other libraries.

Buffers are made of NumPy arrays, of objects with the buffer protocol, and of DLPack
capsules whose fields the tests set. Wrong fields must be refused, and each deleter must
run once.
"""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.exporters import (
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    READ_ONLY,
    FakeCAI,
    FakeDLPack,
    Produced,
    capsule_name,
    interface_of,
)
from support.strategies import DTYPES, KINDS

import cumem


def produced(buffer: Any, device: tuple[int, int], **options: Any) -> Produced:
    """Return a DLPack tensor over one of our buffers."""
    strides = tuple(s // buffer.itemsize for s in buffer.strides)
    pointer = (
        getattr(buffer, "device_ptr", buffer.ptr) if device[0] == CUDA else buffer.ptr
    )
    return Produced(
        pointer,
        buffer.shape,
        strides,
        buffer.dtype,
        device=device,
        keep=buffer,
        **options,
    )


# -- our own and NumPy's ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_buffer_is_returned_as_it_is(runtime, kind) -> None:
    buffer = cumem.empty(4, "f4", kind)
    assert cumem.asbuffer(buffer) is buffer
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        cumem.asbuffer(buffer)


def test_array_of_any_dtype_is_a_host_buffer(runtime) -> None:
    for dtype in DTYPES:
        data = np.zeros((4, 6), dtype)
        for view in (data, data[::-2, 1:], data.T, data[1, 2, ...], data[:0]):
            found = cumem.asbuffer(view)
            assert isinstance(found, cumem.HostBuffer)
            assert (found.shape, found.dtype) == (view.shape, view.dtype)
            if view.size:
                assert found.strides == view.strides
                assert found.ptr == view.ctypes.data
            assert found.readonly is False


def test_array_over_pinned_memory_is_pinned(runtime) -> None:
    buffer = cumem.full((4, 4), 3, "i4", "pinned")
    found = cumem.asbuffer(np.asarray(buffer)[1:])
    assert isinstance(found, cumem.PinnedBuffer)
    assert found.ptr == buffer.ptr + 16


def test_array_over_managed_memory_is_managed(runtime) -> None:
    buffer = cumem.full((4, 4), 3, "i4", "managed")
    assert isinstance(cumem.asbuffer(np.asarray(buffer)), cumem.ManagedBuffer)


def test_readonly_array_stays_readonly(runtime) -> None:
    data = np.arange(4)
    data.flags.writeable = False
    found = cumem.asbuffer(data)
    assert found.readonly
    assert not found.numpy().flags.writeable
    with pytest.raises((ValueError, BufferError, TypeError), match="read-only"):
        found[...] = 1


@pytest.mark.parametrize("dtype", ["O", [("a", "O")], object])
def test_objects_are_refused(runtime, dtype) -> None:
    with pytest.raises(TypeError, match="object"):
        cumem.asbuffer(np.empty(3, dtype))


def test_array_is_kept_alive(runtime) -> None:
    class Array(np.ndarray):
        pass

    data = np.full(1000, 7, "u1").view(Array)
    reference = weakref.ref(data)
    found = cumem.asbuffer(data)[10:]
    del data
    gc.collect()
    assert reference() is not None
    assert (found.numpy() == 7).all()
    del found
    gc.collect()
    assert reference() is None


# -- the buffer protocol ----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"0123456789",
        lambda: bytearray(b"0123456789"),
        lambda: memoryview(bytearray(b"0123456789")),
        lambda: array.array("B", b"0123456789"),
        lambda: (ctypes.c_uint8 * 10)(*b"0123456789"),
    ],
    ids=["bytes", "bytearray", "memoryview", "array", "ctypes"],
)
def test_bytes_likes_become_host_buffers(runtime, make) -> None:
    source = make()
    found = cumem.asbuffer(source)
    assert type(found) is cumem.HostBuffer
    assert (found.shape, found.dtype) == ((10,), np.uint8)
    assert found.readonly is isinstance(source, bytes)
    assert bytes(memoryview(found)) == b"0123456789"
    assert found.ptr == np.frombuffer(source, "u1").ctypes.data


def test_export_is_held_as_long_as_the_buffer(runtime) -> None:
    source = bytearray(16)
    found = cumem.asbuffer(source)
    with pytest.raises(BufferError):
        source.append(1)
    found.free()
    source.append(1)


def test_formats_and_strides_are_kept(runtime) -> None:
    matrix = (ctypes.c_int16 * 3 * 2)((1, 2, 3), (4, 5, 6))
    found = cumem.asbuffer(matrix)
    assert (found.shape, found.dtype) == ((2, 3), np.int16)
    assert found.numpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    view = memoryview(array.array("d", range(8)))[::-2]
    found = cumem.asbuffer(view)
    assert found.strides == (-16,)
    assert found.numpy().tolist() == [7, 5, 3, 1]


def test_mmap_is_a_host_buffer(runtime) -> None:
    with mmap.mmap(-1, 4096) as mapped:
        found = cumem.asbuffer(mapped)
        found[:3] = np.frombuffer(b"abc", "u1")
        assert mapped[:3] == b"abc"
        found.free()


@pytest.mark.parametrize(
    "obj", [None, 1, "text", [1, 2], {}, object(), np.ndarray, int]
)
def test_what_exports_nothing_is_refused_by_type(runtime, obj) -> None:
    with pytest.raises(TypeError, match=type(obj).__name__):
        cumem.asbuffer(obj)


# -- DLPack -----------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [False, True])
def test_capsule_is_consumed(runtime, versioned) -> None:
    data = np.arange(6, dtype="f4").reshape(2, 3)
    made = Produced.over(data, versioned=versioned)
    capsule = made.capsule()
    found = cumem.asbuffer(capsule)
    assert capsule_name(capsule).startswith("used_")
    assert (found.numpy() == data).all()
    assert found.ptr == data.ctypes.data
    with pytest.raises(ValueError, match="consumed"):
        cumem.asbuffer(capsule)
    part = found[1:]
    del found, capsule
    assert made.deleted == 0
    del part
    assert made.deleted == 1


def test_early_free_calls_the_deleter_once(runtime) -> None:
    made = Produced.over(np.zeros(4))
    found = cumem.asbuffer(made.capsule())
    found.free()
    assert made.deleted == 1
    del found
    assert made.deleted == 1


def test_missing_deleter_is_no_error(runtime) -> None:
    made = Produced.over(np.zeros(4))
    made.managed.deleter = type(made.managed.deleter)()
    assert cumem.asbuffer(made.capsule()).shape == (4,)


def test_flags_are_read(runtime) -> None:
    data = np.zeros(4)
    assert cumem.asbuffer(Produced.over(data, flags=READ_ONLY).capsule()).readonly
    assert not cumem.asbuffer(Produced.over(data).capsule()).readonly


@pytest.mark.parametrize("dtype", ["?", "i1", "i8", "u4", "f2", "f8", "c8", "c16"])
def test_element_types_are_numpys(runtime, dtype) -> None:
    data = np.zeros(4, dtype)
    assert cumem.asbuffer(Produced.over(data).capsule()).dtype == data.dtype


def test_ml_dtypes_are_used_when_installed(runtime) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = Produced.over(np.zeros(4, "u2"))
    made.tensor.dtype.code = 4
    assert cumem.asbuffer(made.capsule()).dtype == ml_dtypes.bfloat16


def test_strides_may_be_absent_or_negative(runtime) -> None:
    data = np.arange(12).reshape(3, 4)
    made = Produced.over(data)
    made.tensor.strides = None
    assert cumem.asbuffer(made.capsule()).strides == (32, 8)
    found = cumem.asbuffer(Produced.over(data[::-1, ::2]).capsule())
    assert (found.numpy() == data[::-1, ::2]).all()


def test_byte_offset_is_added(runtime) -> None:
    data = np.arange(8)
    made = Produced.over(data[:4])
    made.tensor.byte_offset = 16
    assert cumem.asbuffer(made.capsule()).numpy().tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [
        ("pinned", (CPU, 0), "pinned"),
        ("pinned", (CUDA_HOST, 0), "pinned"),
        ("mapped", (CUDA_HOST, 0), "pinned"),
        ("mapped", (CUDA, 0), "device"),
        ("managed", (CUDA_MANAGED, 0), "managed"),
        ("managed", (CUDA, 0), "device"),
        ("managed", (CPU, 0), "managed"),
        ("device", (CUDA, 0), "device"),
    ],
)
def test_device_type_makes_the_kind(runtime, kind, device, expected) -> None:
    buffer = cumem.full((2, 3), 5, "i4", kind)
    found = cumem.asbuffer(produced(buffer, device).capsule())
    assert found.kind == expected
    assert (values.get(found) == 5).all()


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("host", (CUDA, 0)),
        ("host", (CUDA_HOST, 0)),
        ("host", (CUDA_MANAGED, 0)),
        ("pinned", (CUDA_MANAGED, 0)),
        ("managed", (CUDA_HOST, 0)),
        ("device", (CPU, 0)),
        ("device", (CUDA_HOST, 0)),
        ("device", (CUDA_MANAGED, 0)),
        ("device", (CUDA, 63)),
        ("device", (CUDA, -1)),
        ("pinned", (CPU, 1)),
    ],
)
def test_lying_device_is_refused(runtime, kind, device) -> None:
    buffer = (
        cumem.asbuffer(np.zeros(4)) if kind == "host" else cumem.zeros(4, "f8", kind)
    )
    made = produced(buffer, device)
    capsule = made.capsule()
    with pytest.raises(ValueError, match=r"device|memory"):
        cumem.asbuffer(capsule)


def test_memory_of_another_device_is_refused(emulated) -> None:
    buffer = cumem.zeros(4, "f8", "device", device=1)
    assert cumem.asbuffer(produced(buffer, (CUDA, 1)).capsule()).device.index == 1
    made = produced(buffer, (CUDA, 0))
    capsule = made.capsule()
    with pytest.raises(ValueError, match="device 1"):
        cumem.asbuffer(capsule)


def change(made: Produced, path: str, value: Any) -> None:
    """Set a field of a tensor, whose path is like `tensor.device.type`."""
    *parents, last = path.split(".")
    target = made.managed
    for name in parents:
        target = getattr(target, name)
    setattr(target, last, value)


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("version.major", 2, BufferError, "version 2"),
    ("version.major", 0, BufferError, "version 0"),
    ("tensor.ndim", -1, ValueError, "ndim"),
    ("tensor.ndim", 65, ValueError, "ndim"),
    ("tensor.ndim", (1 << 31) - 1, ValueError, "ndim"),
    ("tensor.shape", None, ValueError, "shape is NULL"),
    ("tensor.data", None, ValueError, "NULL"),
    ("tensor.data", (1 << 64) - 8, ValueError, "address space"),
    ("tensor.byte_offset", (1 << 64) - 1, ValueError, "address space"),
    ("tensor.dtype.lanes", 2, BufferError, "lanes"),
    ("tensor.dtype.lanes", 0, BufferError, "lanes"),
    ("tensor.dtype.bits", 0, BufferError, "bits"),
    ("tensor.dtype.bits", 4, BufferError, "bits"),
    ("tensor.dtype.bits", 24, BufferError, "bits"),
    ("tensor.dtype.code", 3, BufferError, "code 3"),
    ("tensor.dtype.code", 200, BufferError, "code 200"),
    ("tensor.device.type", 10, BufferError, "device type 10"),
    ("tensor.device.type", 0, BufferError, "device type 0"),
]


@pytest.mark.parametrize(("path", "value", "error", "word"), WRONG)
def test_wrong_fields_are_refused(runtime, path, value, error, word) -> None:
    made = Produced.over(np.zeros((2, 3)))
    change(made, path, value)
    capsule = made.capsule()
    with pytest.raises(error, match=word):
        cumem.asbuffer(capsule)
    # The capsule still belongs to the caller.
    assert made.deleted == 0
    assert capsule_name(capsule) == "dltensor_versioned"
    del capsule
    assert made.deleted == 1


@pytest.mark.parametrize("with_destructor", [True, False])
@pytest.mark.parametrize(("path", "value", "error", "word"), WRONG)
def test_deleter_of_an_asked_for_capsule_runs_once(
    runtime, path, value, error, word, with_destructor
) -> None:
    made = Produced.over(np.zeros((2, 3)), with_destructor=with_destructor)
    change(made, path, value)
    with pytest.raises(error, match=word):
        cumem.asbuffer(FakeDLPack(made, (CPU, 0)))
    gc.collect()
    assert made.deleted == 1


@pytest.mark.parametrize(
    ("shape", "strides", "word"),
    [
        ((-1, 3), (3, 1), "shape"),
        ((1 << 62, 4), (4, 1), "63 bits"),
        ((1 << 62, 4), None, "63 bits"),
        ((2, 3), (1 << 62, 1), "strides"),
        ((1 << 31, 1 << 31), (1 << 31, 1), "63 bits"),
        ((1 << 40, 2), (-(1 << 60) // 8, 1), "63 bits|reach|address"),
        ((2, 3), (-(1 << 59), 1), "63 bits|reach|address"),
    ],
)
def test_wrong_extents_are_refused(runtime, shape, strides, word) -> None:
    data = np.zeros((2, 3))
    made = Produced(data.ctypes.data, shape, strides, data.dtype, keep=data)
    # The capsule is kept, since its Python destructor must not run while an exception
    # is raised.
    capsule = made.capsule()
    with pytest.raises(ValueError, match=word):
        cumem.asbuffer(capsule)


def test_empty_tensor_may_have_any_pointer(runtime) -> None:
    for address in (0, 1, (1 << 64) - 1):
        made = Produced(address, (3, 0), (1, 1), np.dtype("f4"))
        assert cumem.asbuffer(made.capsule()).shape == (3, 0)


# -- asking for DLPack ------------------------------------------------------------------


def test_host_exporter_is_asked_without_a_stream(runtime) -> None:
    exporter = FakeDLPack(Produced.over(np.zeros(4)))
    cumem.asbuffer(exporter)
    assert exporter.calls == [{"max_version": (1, 0)}]


def test_older_exporters_are_asked_again(runtime) -> None:
    exporter = FakeDLPack(Produced.over(np.zeros(4), versioned=False), keywords=())
    cumem.asbuffer(exporter)
    assert exporter.calls == [{"max_version": (1, 0)}, {}]


def test_device_exporter_is_given_our_stream(runtime) -> None:
    buffer = cumem.zeros(4, "f4", "device")
    exporter = FakeDLPack(produced(buffer, (CUDA, 0)))
    cumem.asbuffer(exporter)
    stream = cumem.Stream()
    cumem.asbuffer(exporter, stream=stream)
    assert exporter.calls == [
        {"stream": 1, "max_version": (1, 0)},
        {"stream": stream.handle, "max_version": (1, 0)},
    ]
    older = FakeDLPack(
        produced(buffer, (CUDA, 0), versioned=False), keywords=("stream",)
    )
    cumem.asbuffer(older)
    assert older.calls[-1] == {"stream": 1}
    oldest = FakeDLPack(produced(buffer, (CUDA, 0), versioned=False), keywords=())
    cumem.asbuffer(oldest, stream=stream)
    assert oldest.calls[-1] == {}


def test_a_tensor_comes_after_the_stream_it_was_asked_for_on(emulated) -> None:
    buffer, stream = cumem.zeros(4, "f4", "device"), cumem.Stream()
    imported = cumem.asbuffer(FakeDLPack(produced(buffer, (CUDA, 0))), stream=stream)
    scratch = cumem.empty(4, "f4", "device")
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        reported = session.testing.array_interface(imported)
        # A consumer of `imported` is told of `stream`, and so comes after the fill as well.
        assert reported["stream"] == stream.handle
    stream.synchronize()


def test_one_that_knows_no_streams_has_made_the_legacy_one_wait(emulated) -> None:
    buffer, stream = cumem.zeros(4, "f4", "device"), cumem.Stream()
    oldest = FakeDLPack(produced(buffer, (CUDA, 0), versioned=False), keywords=())
    with session.gate(0):
        cumem.asbuffer(oldest, stream=stream)
        assert not stream.done
    stream.synchronize()


def test_pinned_exporter_may_hand_out_a_cpu_capsule(runtime) -> None:
    buffer = cumem.zeros(4, "f4", "pinned")
    exporter = FakeDLPack(produced(buffer, (CPU, 0)), (CUDA_HOST, 0))
    assert cumem.asbuffer(exporter).kind == "pinned"


@pytest.mark.parametrize("advertised", [(CUDA, 0), (CUDA_MANAGED, 0)])
def test_capsule_of_another_device_is_refused(runtime, advertised) -> None:
    made = Produced.over(np.zeros(4))
    with pytest.raises(ValueError, match="__dlpack_device__"):
        cumem.asbuffer(FakeDLPack(made, advertised))
    assert made.deleted == 1


@pytest.mark.parametrize("answer", [None, 1, (1,), ("1", 0), (1, 0, 0), (1 << 40, 0)])
def test_wrong_device_answers_are_refused(runtime, answer) -> None:
    exporter = FakeDLPack(Produced.over(np.zeros(4)))
    exporter._device = answer
    with pytest.raises((TypeError, ValueError)):
        cumem.asbuffer(exporter)


def test_something_else_than_a_capsule_is_refused(runtime) -> None:
    class Exporter(FakeDLPack):
        def __dlpack__(self, **keywords: Any) -> object:
            return np.zeros(4)

    with pytest.raises(TypeError, match="capsule"):
        cumem.asbuffer(Exporter(Produced.over(np.zeros(4))))


def test_exporters_own_error_comes_through(runtime) -> None:
    made = Produced.over(np.zeros(4))
    with pytest.raises(RuntimeError, match="lost"):
        cumem.asbuffer(FakeDLPack(made, error=lambda: RuntimeError("lost")))
    with pytest.raises(BufferError, match="never"):
        cumem.asbuffer(FakeDLPack(made, error=lambda: BufferError("never")))


def test_dlpack_comes_before_cai(runtime) -> None:
    class Both(FakeDLPack):
        __cuda_array_interface__ = property(lambda self: 1 / 0)

    assert cumem.asbuffer(Both(Produced.over(np.zeros(4)))).shape == (4,)


def test_imported_memory_can_be_exported_again(runtime) -> None:
    made = Produced.over(np.arange(4))
    array = np.from_dlpack(cumem.asbuffer(made.capsule()))
    gc.collect()
    assert made.deleted == 0
    assert array.tolist() == [0, 1, 2, 3]
    del array
    gc.collect()
    session.testing.poll()
    assert made.deleted == 1


# -- copy()'s operands ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_copy_takes_every_exporter(runtime, kind) -> None:
    data = np.arange(6, dtype="i4").reshape(2, 3)
    device = cumem.array(data, kind="device")
    made = Produced.over(data)  # It makes a capsule for each copy.
    sources = [
        data,
        cumem.array(data, kind="pinned"),
        FakeDLPack(made),
        made.capsule(),
        FakeCAI(interface_of(device), device),
        memoryview(data),
        data.tolist(),
    ]
    for source in sources:
        target = cumem.zeros((2, 3), "i4", kind)
        cumem.copy(target, source)
        assert (values.get(target) == data).all(), source


def test_copy_reads_odd_arrays(runtime) -> None:
    data = np.arange(24, dtype=">i4").reshape(4, 6)
    data.flags.writeable = False
    for view in (data, data[::-2, 1::2], data.T, np.broadcast_to(data[0], (3, 6))):
        target = cumem.zeros(view.shape, ">i4", "device")
        cumem.copy(target, view)
        assert (values.get(target) == view).all()
    with pytest.raises(TypeError, match=r">i4|<i4|dtype"):
        cumem.copy(cumem.zeros((4, 6), "<i4", "device"), data)


def test_refused_target_is_given_back(runtime) -> None:
    made = Produced.over(np.zeros(4), flags=READ_ONLY)
    with pytest.raises(ValueError, match="read-only"):
        cumem.copy(FakeDLPack(made), cumem.zeros(4, "f8", "device"))
    assert made.deleted == 1


@pytest.mark.parametrize("target", [None, 3, [1, 2], "text", np.float32(1)])
def test_copy_refuses_targets_without_memory(runtime, target) -> None:
    with pytest.raises((TypeError, BufferError, ValueError)):
        cumem.copy(target, np.zeros(2))


def test_bytes_are_one_value_of_a_bytes_dtype(runtime) -> None:
    buffer = cumem.zeros(3, "S4", "pinned")
    buffer[...] = b"ab"
    assert buffer.numpy().tolist() == [b"ab"] * 3
    buffer[1] = "cd"
    assert buffer.numpy().tolist() == [b"ab", b"cd", b"ab"]


def test_torch_tensors_are_read_and_written(runtime) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    found = cumem.asbuffer(tensor)
    assert found.ptr == tensor.data_ptr()
    found[0, 0] = 9
    assert tensor[0, 0] == 9
    buffer = cumem.zeros((4, 3), "f4", "device")
    cumem.copy(buffer, tensor.T)
    assert (values.get(buffer) == tensor.T.numpy()).all()
    out = torch.zeros(4, 3)
    cumem.copy(out, buffer)
    assert (out == tensor.T).all()
    with pytest.raises((BufferError, RuntimeError), match=r"detach|grad"):
        cumem.asbuffer(torch.zeros(3, requires_grad=True))
    with pytest.raises((BufferError, RuntimeError), match=r"detach|grad"):
        cumem.copy(buffer, torch.zeros(4, 3, requires_grad=True))
