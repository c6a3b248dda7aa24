# SPDX-License-Identifier: Apache-2.0
"""Tensors that cumem takes by C functions, from a table that another library offers.

DLPack lets a type carry such a table in `__dlpack_c_exchange_api__`, so that its tensors
can be taken without running Python code. A type with a table made by ctypes counts how
often the table and how often Python was used. Where the table does not suffice, Python must
be asked.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.exporters import (
    CPU,
    CUDA,
    CUDA_HOST,
    READ_ONLY,
    FakeDLPack,
    Produced,
    Version,
    new_capsule,
)

import cumem

FROM_OBJECT = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p)
)
CURRENT_STREAM = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)
NAME = b"dlpack_exchange_api"


class Table(ctypes.Structure):
    """The table of C functions that DLPack's exchange API consists of."""

    _fields_ = [
        ("version", Version),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", FROM_OBJECT),
        ("to_object", ctypes.c_void_p),
        ("borrow", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


@FROM_OBJECT
def from_object(exporter: Any, out: Any) -> int:
    """Hand out the exporter's tensor, unless it must fail, and count the call."""
    exporter.taken += 1
    if exporter.fails:
        return -1
    out[0] = ctypes.addressof(exporter.quick.managed)
    return 0


TABLE = Table(Version(1, 3), None, None, from_object, None, None, None)


class Quick(FakeDLPack):
    """An exporter that has the table, and a separate tensor for __dlpack__."""

    __dlpack_c_exchange_api__: object = new_capsule(ctypes.addressof(TABLE), NAME, None)
    fails = False

    def __init__(self, array: np.ndarray[Any, Any], **options: Any) -> None:
        super().__init__(Produced.over(array))
        self.quick = Produced.over(array, **options)
        self.taken = 0

    @property
    def asked(self) -> int:
        """Return how often the object was asked in Python."""
        return len(self.calls)


def test_tensor_is_taken_without_asking_in_python(runtime) -> None:
    data = np.arange(12, dtype="i4").reshape(3, 4)[::-1, ::2]
    exporter = Quick(data)
    found = cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked) == (1, 0)
    assert (found.numpy() == data).all()
    assert (found.ptr, found.kind) == (data.ctypes.data, "pageable")
    part = found[1:]
    del found
    assert exporter.quick.deleted == 0
    del part
    assert exporter.quick.deleted == 1


# A copy of 4 elements is a short one, the others are not.
@pytest.mark.parametrize("count", [4, 5000, 50000])
def test_copy_reads_and_writes_it(runtime, count) -> None:
    data = np.arange(count, dtype="f8")
    buffer = cumem.zeros(count, "f8", "device")
    source = Quick(data)
    cumem.copy(buffer, source)
    assert (values.get(buffer) == data).all()
    target = Quick(np.zeros(count))
    cumem.copy(target, buffer)
    assert (target.quick.keep == data).all()
    for exporter in (source, target):
        assert (exporter.taken, exporter.asked) == (1, 0)
        assert exporter.quick.deleted == 1


@pytest.mark.parametrize("count", [4, 50000])
def test_readonly_tensor_is_not_written(runtime, count) -> None:
    target = Quick(np.zeros(count), flags=READ_ONLY)
    assert cumem.asbuffer(target).readonly
    with pytest.raises(ValueError, match="read-only"):
        cumem.copy(target, cumem.full(count, 1, "f8", "device"))
    assert not target.quick.keep.any()
    gc.collect()
    assert target.quick.deleted == 2


def test_page_locked_memory_is_seen(runtime) -> None:
    buffer = cumem.full(1 << 14, 7, "i8", "pinned")
    exporter = Quick(buffer.numpy())
    found = cumem.asbuffer(exporter)
    assert (found.kind, exporter.asked) == ("pinned", 0)
    device = cumem.empty_device(1 << 14, "i8")
    for count in (16, 1 << 14):
        part = Quick(buffer.numpy()[:count])
        cumem.copy(device[:count], part)
        assert part.asked == 0
    assert (values.get(device) == 7).all()


# -- memory with streams -------------------------------------------------------------------

#: On device 0 and on device 1, the exporter's library now works on these streams.
CURRENT: list[Any] = [None, None]
QUESTIONS: list[tuple[int, int]] = []


@CURRENT_STREAM
def current_stream(kind: int, device: int, out: Any) -> int:
    """Note the question, and answer with the stream that a test has set."""
    QUESTIONS.append((kind, device))
    if CURRENT[device] is None:
        return -1
    out[0] = CURRENT[device].handle
    return 0


STREAMS = Table(
    Version(1, 3),
    None,
    None,
    from_object,
    None,
    None,
    ctypes.cast(current_stream, ctypes.c_void_p),
)


class Working(Quick):
    """An exporter over device memory that a stream of its library writes."""

    __dlpack_c_exchange_api__: object = new_capsule(
        ctypes.addressof(STREAMS), NAME, None
    )

    def __init__(self, buffer: cumem.DeviceBuffer) -> None:
        super().__init__(np.zeros(1))
        device = (CUDA, buffer.device.index)
        for name in ("produced", "quick"):
            made = Produced(
                buffer.ptr, buffer.shape, None, buffer.dtype, device=device, keep=buffer
            )
            setattr(self, name, made)
        self._device = device


def waits() -> int:
    """Return how many times a stream was made to wait for another one."""
    return int(session.testing.fault_count("stream_wait_event"))


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("follower", [None, 0, 1], ids=["none", "on 0", "on 1"])
def test_work_of_the_exporters_stream_comes_first(emulated, device, follower) -> None:
    memory = cumem.zeros(1000, "u1", device=device)
    CURRENT[device] = cumem.Stream(device=device)
    exporter = Working(memory)
    where = {"kind": "pinned"} if follower is None else {"device": follower}
    out = cumem.zeros(1000, "u1", **where)
    stream = None if follower is None else cumem.Stream(device=follower)
    QUESTIONS.clear()
    with session.gate(CURRENT[device]):
        memory.fill(7, stream=CURRENT[device])
        before = waits()
        source = cumem.asbuffer(exporter) if stream is None else exporter
        assert stream is not None or waits() > before
        done = cumem.copy_async(out, source, stream=stream)
        assert waits() > before
        assert not done.done
    done.wait()
    CURRENT[device] = None
    assert (values.get(out) == 7).all()
    assert [(CUDA, device)] == QUESTIONS
    assert exporter.asked == 0


def test_stream_that_nobody_can_name_is_asked_for_in_python(emulated) -> None:
    memory = cumem.full(1000, 7, "u1", "device")
    exporter = Working(memory)
    QUESTIONS.clear()
    assert (values.get(cumem.asbuffer(exporter)) == 7).all()
    assert QUESTIONS == [(CUDA, 0)]
    assert exporter.asked == 1


# -- asked in Python instead ---------------------------------------------------------------


def test_failure_is_explained_by_python(runtime) -> None:
    exporter = Quick(np.arange(3.0))
    exporter.fails = True
    assert cumem.asbuffer(exporter).numpy().tolist() == [0, 1, 2]
    assert (exporter.taken, exporter.asked) == (1, 1)
    exporter = Quick(np.arange(3.0))
    exporter.fails = True
    exporter._error = lambda: BufferError("its own words")
    with pytest.raises(BufferError, match="its own words"):
        cumem.copy(cumem.empty_device(3), exporter)


def test_it_is_tried_once(runtime) -> None:
    for exporter in (Quick(np.ones(3)), Quick(np.ones(3), device=(CUDA, 0))):
        exporter.fails = exporter.quick.tensor.device.type == CPU
        cumem.copy(cumem.empty_device(3), exporter)
        assert (exporter.taken, exporter.asked) == (1, 1)


def test_interrupt_is_no_answer(runtime) -> None:
    class Interrupted(Quick):
        __dlpack_c_exchange_api__ = Quick.__dlpack_c_exchange_api__

        @property
        def requires_grad(self) -> bool:
            raise KeyboardInterrupt

    exporter = Interrupted(np.ones(3))
    with pytest.raises(KeyboardInterrupt):
        cumem.asbuffer(exporter)
    with pytest.raises(KeyboardInterrupt):
        cumem.copy(cumem.empty_device(3), exporter)
    assert (exporter.taken, exporter.asked) == (0, 0)


@pytest.mark.parametrize("has", [True, "unknown"])
def test_gradient_is_python_s_to_refuse(runtime, has) -> None:
    exporter = Quick(np.zeros(3))
    exporter.requires_grad = has  # type: ignore[attr-defined]
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked) == (0, 1)
    exporter.requires_grad = False  # type: ignore[attr-defined]
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked) == (1, 1)


def test_complex_numbers_may_be_conjugates(runtime) -> None:
    exporter = Quick(np.array([1 + 2j]))
    found = cumem.asbuffer(exporter)
    assert found.numpy().tolist() == [1 + 2j]
    assert (exporter.taken, exporter.asked, exporter.quick.deleted) == (1, 1, 1)


@pytest.mark.parametrize("device", [(CUDA, 0), (CUDA_HOST, 0)])
def test_what_has_streams_is_asked(runtime, device) -> None:
    exporter = Quick(np.zeros(3), device=device)
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked, exporter.quick.deleted) == (1, 1, 1)


def test_heirs_may_mean_something_else(runtime) -> None:
    class Heir(Quick):
        pass

    exporter = Heir(np.zeros(3))
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked) == (0, 1)


def with_table(table: object) -> Quick:
    """Return an exporter whose type has this table."""

    class Other(Quick):
        __dlpack_c_exchange_api__ = table

    return Other(np.zeros(3))


def test_another_version_of_the_table_is_not_used(runtime) -> None:
    newer = Table(Version(2, 0), None, None, from_object, None, None, None)
    exporter = with_table(new_capsule(ctypes.addressof(newer), NAME, None))
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked) == (0, 1)
    newer.previous = ctypes.addressof(TABLE)
    exporter = with_table(new_capsule(ctypes.addressof(newer), NAME, None))
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked) == (1, 0)


@pytest.mark.parametrize("table", [None, 5, "capsule", "without the function"])
def test_what_is_no_table_is_not_used(runtime, table) -> None:
    empty = Table(version=Version(1, 3))
    if table == "capsule":
        table = new_capsule(ctypes.addressof(TABLE), b"something else", None)
    elif table == "without the function":
        table = new_capsule(ctypes.addressof(empty), NAME, None)
    exporter = with_table(table)
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked) == (0, 1)


# -- lies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "error", "word"),
    [
        ("ndim", 65, ValueError, "ndim"),
        ("data", None, ValueError, "NULL"),
        ("shape", None, ValueError, "shape"),
        ("byte_offset", (1 << 64) - 1, ValueError, "address space"),
    ],
)
@pytest.mark.parametrize("copies", [False, True])
def test_wrong_fields_are_refused(runtime, field, value, error, word, copies) -> None:
    exporter = Quick(np.zeros((2, 3)))
    setattr(exporter.quick.tensor, field, value)
    buffer = cumem.empty_device((2, 3)) if copies else None
    with pytest.raises(error, match=word):
        cumem.copy(buffer, exporter) if copies else cumem.asbuffer(exporter)
    gc.collect()
    assert (exporter.quick.deleted, exporter.asked) == (1, 0)


def test_tensor_of_another_version_is_asked_for(runtime) -> None:
    exporter = Quick(np.zeros(3))
    exporter.quick.managed.version = Version(2, 0)
    cumem.asbuffer(exporter)
    assert (exporter.taken, exporter.asked, exporter.quick.deleted) == (1, 1, 1)


def test_address_of_a_device_is_not_the_hosts(runtime) -> None:
    buffer = cumem.zeros(1 << 14, "f8", "device")
    made = Produced(buffer.ptr, (1 << 14,), None, np.dtype("f8"), device=(CPU, 0))
    exporter = Quick(np.zeros(1 << 14))
    exporter.quick = made
    with pytest.raises(ValueError, match="device memory"):
        cumem.asbuffer(exporter)
    assert made.deleted == 1


# -- PyTorch -------------------------------------------------------------------------------


def test_torch_tensors_are_taken_so(runtime, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"PyTorch {torch.__version__} does not have this table")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("cumem called a method of the exporter in Python")

    buffer = cumem.empty_device((3, 4), "f4")
    conjugate = torch.zeros(3, 4, dtype=torch.complex64).conj()
    with pytest.raises((BufferError, RuntimeError), match="conj"):
        cumem.copy(cumem.empty_device((3, 4), "c8"), conjugate)
    with pytest.raises((BufferError, RuntimeError), match="grad"):
        cumem.copy(buffer, torch.zeros(3, 4, requires_grad=True))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__dlpack__", refuse)
        source = torch.arange(12, dtype=torch.float32).reshape(4, 3).T
        cumem.copy(buffer, source)
        target = torch.zeros(3, 4)
        cumem.copy(target, buffer)
        assert torch.equal(target, source)
        assert cumem.asbuffer(source).ptr == source.data_ptr()
        with pytest.raises(
            AssertionError, match="cumem called a method of the exporter in Python"
        ):
            cumem.copy(buffer, torch.nn.Parameter(torch.zeros(3, 4), False))


class Bare:
    """An exporter that has the table and nothing else."""

    __dlpack_c_exchange_api__: object = new_capsule(ctypes.addressof(TABLE), NAME, None)
    fails = False

    def __init__(self, quick: Produced) -> None:
        self.quick, self.taken = quick, 0


@pytest.mark.parametrize("count", [3, 100_000])
def test_the_table_alone_will_do(runtime, count) -> None:
    array = np.arange(float(count))
    assert (cumem.asbuffer(Bare(Produced.over(array))).numpy() == array).all()
    buffer = cumem.empty_device(count, "f8")
    cumem.copy(buffer, Bare(Produced.over(array)))
    assert (values.get(buffer) == array).all()
    buffer.fill(0)
    cumem.copy_async(buffer, Bare(Produced.over(array))).wait()
    assert (values.get(buffer) == array).all()


def test_type_that_does_not_tell_its_names_is_asked_in_python(runtime) -> None:
    class Silent(type):
        @property
        def __dict__(cls) -> Any:
            raise AttributeError("not told")

    class Exporter(FakeDLPack, metaclass=Silent):
        pass

    array = np.arange(3.0)
    assert (cumem.asbuffer(Exporter(Produced.over(array))).numpy() == array).all()
