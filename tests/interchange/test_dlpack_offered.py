# SPDX-License-Identifier: Apache-2.0
"""The table of C functions for DLPack that our buffer types carry.

Other libraries call these functions to take and make buffers without Python. The tests
call them through ctypes: tensors out, streams, the allocator, and tensors in.
"""

from __future__ import annotations

import ctypes
import gc
import threading
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
    Device,
    DType,
    Produced,
    Tensor,
    Version,
    Versioned,
    pointer_of,
    read_capsule,
)
from support.strategies import KINDS

import cumem

NAME = b"dlpack_exchange_api"
TYPES = [
    *(cumem.HostBuffer, cumem.PinnedBuffer, cumem.MappedBuffer),
    *(cumem.ManagedBuffer, cumem.DeviceBuffer),
]
OUT = ctypes.POINTER(ctypes.POINTER(Versioned))
TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
#: ctypes releases the GIL for a CFUNCTYPE, as a caller of the allocator may do.
ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Tensor), OUT, ctypes.c_void_p, TELL
)
FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, OUT)
TO_OBJECT = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Versioned), ctypes.POINTER(ctypes.c_void_p)
)
BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
CURRENT = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class Table(ctypes.Structure):
    """The table of C functions that DLPack's exchange API consists of."""

    _fields_ = [
        ("version", Version),
        ("previous", ctypes.c_void_p),
        ("allocate", ALLOCATE),
        ("from_object", FROM_OBJECT),
        ("to_object", TO_OBJECT),
        ("borrow", BORROW),
        ("current_stream", CURRENT),
    ]


def table_of(buffer_type: type) -> Table:
    capsule = vars(buffer_type)["__dlpack_c_exchange_api__"]
    return Table.from_address(pointer_of(capsule, NAME))


TABLE = table_of(cumem.PinnedBuffer)


def taken(buffer: Any) -> Versioned:
    """Return what from_object hands out, which the caller must delete."""
    out = ctypes.POINTER(Versioned)()
    # ctypes raises the error if there is one.
    assert TABLE.from_object(buffer, ctypes.byref(out)) == 0
    return out.contents


def delete(managed: Versioned) -> None:
    managed.deleter(ctypes.addressof(managed))


def borrowed(buffer: Any) -> Tensor:
    """Return the tensor that the table describes without handing over ownership."""
    tensor = Tensor()
    assert TABLE.borrow(buffer, ctypes.byref(tensor)) == 0
    return tensor


def said(tensor: Tensor) -> tuple[Any, ...]:
    """Return all fields of a tensor in a form that can be compared."""
    return (
        tensor.data,
        (tensor.device.type, tensor.device.id),
        (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes),
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]),
        tensor.byte_offset,
    )


# -- the table -----------------------------------------------------------------------------


def test_each_type_has_the_one_table() -> None:
    for buffer_type in TYPES:
        table = table_of(buffer_type)
        assert ctypes.addressof(table) == ctypes.addressof(TABLE)
    assert (TABLE.version.major, TABLE.version.minor) == (1, 3)
    assert TABLE.previous is None
    for name, _ in Table._fields_[2:]:
        assert ctypes.cast(getattr(TABLE, name), ctypes.c_void_p).value


# -- out -----------------------------------------------------------------------------------

VIEWS = {
    "all": lambda b: b,
    "T": lambda b: b.T,
    "cut": lambda b: b[1:, 1::2],
    "element": lambda b: b[2, 3],
    "one row": lambda b: b[1:2],
    "empty": lambda b: b[:0],
    "many axes": lambda b: b.reshape(2, 2, 1, 2, 3, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", VIEWS)
def test_both_say_what_the_capsule_says(runtime, kind, view) -> None:
    buffer = VIEWS[view](cumem.zeros((4, 6), "f4", kind))
    capsule = buffer.__dlpack__(max_version=(1, 3))
    expected = read_capsule(capsule)
    managed, tensor = taken(buffer), borrowed(buffer)
    assert said(managed.tensor) == said(expected.tensor) == said(tensor)
    assert (managed.version.major, managed.version.minor) == (1, 3)
    assert managed.flags == expected.flags == 0
    delete(managed)


def test_memory_of_others_goes_out_as_well(runtime) -> None:
    data = np.arange(6, dtype="i8")
    buffer = cumem.asbuffer(data)
    managed = taken(buffer)
    assert managed.tensor.data == data.ctypes.data == borrowed(buffer).data
    assert said(managed.tensor)[1] == (CPU, 0)
    delete(managed)


def test_readonly_is_a_flag_that_a_borrowed_tensor_lacks(runtime) -> None:
    buffer = cumem.asbuffer(b"abcd")
    managed = taken(buffer)
    assert managed.flags == READ_ONLY
    delete(managed)
    with pytest.raises(BufferError, match="read-only"):
        borrowed(buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_until_the_deleter_ran(runtime, kind) -> None:
    with cumem.Pool(kind) as pool:
        buffer = cumem.full(100, 7, "u1", kind)
    managed = taken(buffer[50:])
    with pytest.raises(BufferError, match="1 live export"):
        buffer.free()
    del buffer
    gc.collect()
    assert pool.stats().live_count == 1
    # Any thread may delete the tensor, without the GIL.
    thread = threading.Thread(target=delete, args=[managed])
    thread.start()
    thread.join()
    session.wait_until(lambda: pool.stats().live_count == 0)


def test_borrowed_memory_is_the_callers_to_keep(runtime) -> None:
    buffer = cumem.zeros(100, "u1", "pinned")
    borrowed(buffer)
    buffer.free()


@pytest.mark.parametrize("door", [lambda b: delete(taken(b)), borrowed])
def test_block_waits_for_work_that_nobody_announced(emulated, door) -> None:
    """A consumer that had the address may still use it, on any stream."""
    stream = cumem.Stream()
    other = cumem.zeros(4096, "u1", "device")
    with session.gate(stream):
        cumem.copy_async(other, cumem.zeros(4096, "u1", "pinned"), stream=stream)
        source = cumem.full(4096, 5, "u1", "pinned")
        door(source)
        address = source.ptr
        del source
        gc.collect()
        assert cumem.empty_pinned(4096, "u1").ptr != address
    stream.synchronize()


REFUSED = {
    "closed": (ValueError, "closed"),
    "reversed": (BufferError, "negative strides"),
    "no code": (BufferError, "dtype"),
    "odd stride": (BufferError, "multiple"),
}


def refusable(case: str) -> cumem.Buffer:
    """Return a buffer that DLPack has to refuse for the reason that `case` names."""
    buffer = cumem.zeros(6, "M8[s]" if case == "no code" else "i4", "pinned")
    if case == "closed":
        buffer.free()
    if case == "odd stride":
        pairs = cumem.zeros(6, [("a", "i4"), ("b", "i2")], "pinned")
        return cumem.asbuffer(pairs.numpy()["a"])
    return buffer[::-1] if case == "reversed" else buffer


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("door", [taken, borrowed])
def test_refusals_are_exceptions(runtime, case, door) -> None:
    error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        door(refusable(case))


@pytest.mark.parametrize("door", [taken, borrowed])
def test_buffer_of_before_a_shutdown_opens_nothing(runtime, door) -> None:
    buffer = cumem.zeros(4, "f4", "pinned")
    cumem.shutdown()
    with pytest.raises(ValueError, match="closed"):
        door(buffer)
    assert not session.testing.opened()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", [taken, borrowed])
def test_what_the_cpu_reads_is_waited_for(emulated, kind, door) -> None:
    """The CPU has no stream on which the consumer could come later."""
    stream = cumem.Stream()
    buffer, nines = cumem.zeros(64, "u1", kind), cumem.full(64, 9, "u1", "device")
    found: list[Any] = []
    with session.gate(stream):
        cumem.copy_async(buffer, nines, stream=stream)
        thread = threading.Thread(target=lambda: found.append(door(buffer)))
        thread.start()
        session.wait_until_waiting(thread)
        assert not found
    thread.join()
    tensor = getattr(found[0], "tensor", found[0])
    assert bytes((ctypes.c_char * 64).from_address(tensor.data)) == b"\t" * 64
    if found[0] is not tensor:
        delete(found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("door", [lambda b: delete(taken(b)), borrowed])
def test_current_stream_comes_after_work_of_others(cuda, door) -> None:
    """Only the device waits for that work. The call returns while the work goes on."""
    late, buffer = cumem.empty(1 << 30, "u1"), cumem.zeros(64, "u1")
    other, current = cumem.Stream(), cumem.Stream()
    waits = session.testing.fault_count
    with current:
        for _ in range(20):
            late.fill(1, stream=other)
        buffer.fill(9, stream=other)
        before = waits("stream_wait_event")
        door(buffer)
        assert waits("stream_wait_event") > before
        assert not other.done
        own = cumem.empty(64, "u1", stream=current)
        own.fill(8, stream=current)
        before = waits("stream_wait_event")
        door(own)  # A stream's own work needs no wait.
        assert waits("stream_wait_event") == before
    current.synchronize()


# -- streams -------------------------------------------------------------------------------


def current_stream(kind: int, index: int) -> int | None:
    """Ask the table for the handle of the current stream of a device."""
    out = ctypes.c_void_p(99)
    assert TABLE.current_stream(kind, index, ctypes.byref(out)) == 0
    return out.value


def test_current_stream_is_ours(runtime) -> None:
    for index in range(cumem.device_count()):
        # This is the legacy default stream, which never has the number 0.
        assert current_stream(CUDA, index) == 1
        with cumem.Stream(device=index) as stream:
            assert current_stream(CUDA, index) == stream.handle
    with cumem.Stream() as stream:
        assert current_stream(CUDA_MANAGED, 0) == stream.handle
        assert current_stream(CPU, 0) is None
        assert current_stream(CUDA_HOST, 0) is None


@pytest.mark.parametrize(
    ("device", "error"), [((CUDA, 99), ValueError), ((8, 0), BufferError)]
)
def test_stream_of_no_device_is_refused(runtime, device, error) -> None:
    with pytest.raises(error, match="device"):
        current_stream(*device)


# -- the allocator -------------------------------------------------------------------------


def prototype(
    shape: tuple[int, ...], dtype: tuple[int, int], device: tuple[int, int]
) -> Tensor:
    """Return a tensor without memory, which says what the allocator should make."""
    lengths = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    tensor = Tensor(
        None, Device(*device), len(shape), DType(*dtype, 1), lengths, None, 0
    )
    tensor.keep = lengths
    return tensor


def allocated(like: Tensor) -> Versioned | tuple[str, str]:
    """Return the tensor, or the kind and text of the error."""
    errors: list[tuple[str, str]] = []
    out = ctypes.POINTER(Versioned)()

    def tell(context: int, kind: bytes, message: bytes) -> None:
        assert context == 42
        errors.append((kind.decode(), message.decode()))

    result = TABLE.allocate(like, ctypes.byref(out), 42, TELL(tell))
    assert (result == 0) is bool(out) is (not errors)
    assert result == (0 if out else -1)
    assert len(errors) <= 1
    return out.contents if out else errors[0]


PLACES = {
    "pinned": [(CPU, 0), (CUDA_HOST, 0)],
    "managed": [(CUDA_MANAGED, 0)],
    "device": [(CUDA, 0)],
}


@pytest.mark.parametrize(
    ("kind", "device"), [(k, d) for k, each in PLACES.items() for d in each], ids=str
)
def test_allocator_takes_from_our_pools(runtime, kind, device) -> None:
    with cumem.Pool(kind) as pool:
        made = allocated(prototype((3, 5), (2, 32), device))
        if runtime.emulated and device != (CPU, 0):
            assert made[0] == "BufferError"  # type: ignore[index]
            assert "emulated" in made[1]  # type: ignore[index]
            return
    assert isinstance(made, Versioned)
    assert pool.stats().live_count == 1
    assert said(made.tensor) == (
        *(made.tensor.data, device, (2, 32, 1), (3, 5), (5, 1), 0),
    )
    delete(made)
    session.wait_until(lambda: pool.stats().live_count == 0)


def test_allocated_scalars_and_nothing_at_all(runtime) -> None:
    for shape in ((), (0, 4)):
        made = allocated(prototype(shape, (6, 8), (CPU, 0)))
        assert isinstance(made, Versioned)
        assert bool(made.tensor.data) is (shape == ())
        delete(made)


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "error", "text"),
    [
        ((3,), (2, 32), (CUDA, 99), "ValueError", "device"),
        ((3,), (2, 32), (8, 0), "BufferError", "device type 8"),
        ((3,), (3, 64), (CPU, 0), "BufferError", "element type"),
        ((3,), (0, 12), (CPU, 0), "BufferError", "whole bytes"),
        ((3,), (1, 4), (CPU, 0), "BufferError", "whole bytes"),
        ((-3,), (2, 32), (CPU, 0), "ValueError", "shape"),
        ((1,) * 65, (2, 32), (CPU, 0), "ValueError", "64"),
        (
            (1 << 40, 1 << 40),
            (2, 32),
            (CPU, 0),
            "ValueError",
            "too large|63 bits|bytes",
        ),
    ],
)
def test_allocator_reports_what_it_refuses(
    runtime, shape, dtype, device, error, text
) -> None:
    kind, message = allocated(prototype(shape, dtype, device))  # type: ignore[misc]
    assert kind == error
    assert any(word in message for word in text.split("|")), message


def test_allocator_reports_that_memory_is_short(runtime) -> None:
    with cumem.Pool("pinned", limit="1MiB"):
        kind, message = allocated(prototype((1 << 22,), (0, 8), (CPU, 0)))  # type: ignore[misc]
    assert kind == "MemoryError"
    assert "limit" in message


# -- in ------------------------------------------------------------------------------------


def made_of(produced: Produced) -> Any:
    """Return the object that the table makes of a tensor."""
    out = ctypes.c_void_p()
    assert TABLE.to_object(produced.managed, ctypes.byref(out)) == 0
    found = ctypes.cast(out, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(found))
    return found


def test_tensor_becomes_a_buffer_that_owns_it(runtime) -> None:
    data = np.arange(12, dtype="i4").reshape(3, 4)[::-1, ::2]
    for flags in (0, READ_ONLY):
        produced = Produced.over(data, flags=flags)
        buffer = made_of(produced)
        assert buffer.ptr == data.ctypes.data
        assert (buffer.numpy() == data).all()
        assert buffer.readonly is bool(flags)
        part = buffer[1:]
        del buffer
        assert produced.deleted == 0
        del part
        assert produced.deleted == 1


def test_tensor_of_the_device_is_used_on_the_current_stream(emulated) -> None:
    memory = cumem.zeros(100, "u1", "device")
    produced = Produced(
        memory.ptr, (100,), None, memory.dtype, device=(CUDA, 0), keep=memory
    )
    with cumem.Stream() as stream:
        buffer = made_of(produced)
        with session.gate(stream):
            # This fill stands for a kernel of the consumer.
            memory.fill(7, stream=stream)
            done = cumem.copy_async(cumem.empty_pinned(100, "u1"), buffer)
            assert not done.done
        done.wait()
    assert (values.get(buffer) == 7).all()


def test_refused_tensor_stays_the_callers(runtime) -> None:
    for field, value, error in (
        ("ndim", 65, ValueError),
        ("version", Version(2, 0), BufferError),
    ):
        produced = Produced.over(np.zeros(3))
        changed = produced.managed if field == "version" else produced.tensor
        setattr(changed, field, value)
        with pytest.raises(error):
            made_of(produced)
        assert produced.deleted == 0


def test_tensor_stays_the_callers_where_its_stream_cannot_be_noted(emulated) -> None:
    memory = cumem.zeros(100, "u1", "device")
    produced = Produced(
        memory.ptr, (100,), None, memory.dtype, device=(CUDA, 0), keep=memory
    )
    with cumem.Stream():
        session.testing.plan_fault("stream_is_capturing", 1, 999)
        with pytest.raises(cumem.CudaError):
            made_of(produced)
        assert session.testing.last_injected_fault() == "stream_is_capturing"
        session.testing.plan_fault(None, 0)
    gc.collect()
    assert produced.deleted == 0  # The caller has to delete it.
    buffer = made_of(produced)
    del buffer
    assert produced.deleted == 1


# -- a library that uses it ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tvm_ffi_takes_and_returns_our_memory(runtime, kind) -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    buffer = cumem.zeros((3, 4), "f4", kind)[1:, ::2]
    buffer[...] = 7
    tensor = tvm_ffi.from_dlpack(buffer)
    assert tuple(tensor.shape) == (2, 2)
    back = tvm_ffi.get_global_func("testing.echo")(buffer)
    assert isinstance(back, cumem.Buffer)
    assert (values.get(back) == 7).all()
    assert back.strides == buffer.strides
    with pytest.raises(BufferError, match="exports"):
        buffer.free()
    back[...] = 8  # Both have the same bytes.
    assert (values.get(buffer) == 8).all()
    del tensor, back
    gc.collect()
    buffer.free()


def test_tvm_ffi_is_refused_what_cannot_go(runtime) -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    echo = tvm_ffi.get_global_func("testing.echo")
    with pytest.raises(BufferError, match="negative strides"):
        echo(cumem.zeros(4, "f4", "pinned")[::-1])
    with pytest.raises(BufferError, match="dtype"):
        echo(cumem.zeros(4, "M8[s]", "pinned"))
