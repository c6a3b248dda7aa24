# SPDX-License-Identifier: Apache-2.0
"""Tests of the devices, capsules, copies, streams and lifetimes of DLPack exports.

The tests read the fields of capsules through ctypes, or let NumPy consume them, for
each kind of memory and both generations of the protocol.
"""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
from support import session, values
from support.exporters import (
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    DELETER,
    IS_COPIED,
    READ_ONLY,
    FakeDLPack,
    Legacy,
    Produced,
    Versioned,
    capsule_name,
    read_capsule,
)
from support.strategies import KINDS

import cumem

pytestmark = [
    # How fences are made, and how the device of a foreign stream is found, depends on
    # the driver.
    pytest.mark.by_driver("context_record_event", "stream_get_device"),
    # These tests fail if a wheel, or an older NumPy, lacks something that cumem needs.
    pytest.mark.packaging,
]

NATIVE = {
    "pinned": (CUDA_HOST, 0),
    "mapped": (CUDA_HOST, 0),
    "managed": (CUDA_MANAGED, 0),
    "device": (CUDA, 0),
}
#: This device is in the capsule if nobody asks for another.
CAPSULE = {**NATIVE, "pinned": (CPU, 0), "mapped": (CPU, 0)}
NUMBERS = ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
NEWEST = {"max_version": (1, 0)}
NUMPY_READS_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
#: Older versions make every array from DLPack read-only, even if NumPy exported it.
NUMPY_LETS_WRITE = np.lib.NumpyVersion(np.__version__) >= "2.2.5"


def device_of(capsule: object) -> tuple[int, int]:
    device = read_capsule(capsule).tensor.device
    return device.type, device.id


def consume(capsule: object) -> np.ndarray:
    """Return the capsule's tensor as an array, which NumPy itself makes if it can."""
    if not NUMPY_READS_VERSIONED and capsule_name(capsule) == "dltensor_versioned":
        return cumem.asbuffer(capsule).numpy()

    class Holder:
        def __dlpack__(self, **_: object) -> object:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return (CPU, 0)

    return np.from_dlpack(Holder())  # type: ignore[arg-type]


def on_cpu(buffer: cumem.Buffer) -> np.ndarray:
    """Call np.from_dlpack(buffer, device="cpu"), or do the same if NumPy is too old."""
    if NUMPY_READS_VERSIONED:
        return np.from_dlpack(buffer, device="cpu")  # type: ignore[arg-type]
    return consume(buffer.__dlpack__(dl_device=(CPU, 0), **NEWEST))


# -- devices ----------------------------------------------------------------------------


class Asked(FakeDLPack):
    """An exporter that notes in `entered` whether cumem has entered a device when it
    asks for a capsule.
    """

    entered = False

    def __dlpack__(self, **keywords: object) -> object:
        count = session.testing.fault_count
        self.entered = (count("context_set") + count("device_set")) % 2 == 1
        return super().__dlpack__(**keywords)


def test_exporter_is_asked_with_its_device_current(emulated) -> None:
    """PyTorch refuses to export a tensor of another device than the current one."""
    there = cumem.zeros(4, device=1)
    cumem.zeros(4, device=0)
    produced = Produced(
        there.ptr, (4,), None, there.dtype, device=(CUDA, 1), keep=there
    )
    asked = Asked(produced)
    # This plans nothing, but sets the counts to 0.
    session.testing.plan_fault(None, 0)
    buffer = cumem.asbuffer(asked)
    assert asked.entered
    assert buffer.device == cumem.Device(1)


@pytest.mark.parametrize("kind", KINDS)
def test_device_is_that_of_the_kind(runtime, kind) -> None:
    buffer = cumem.empty(4, "f4", kind)
    expected = (CPU, 0) if runtime.emulated else NATIVE[kind]
    assert buffer.__dlpack_device__() == expected
    for keywords in ({}, NEWEST, {"copy": False}, {"max_version": None}):
        capsule = buffer.__dlpack__(**keywords)
        expected = (CPU, 0) if runtime.emulated else CAPSULE[kind]
        assert device_of(capsule) == expected


def test_host_buffer_is_the_cpus(runtime) -> None:
    buffer = cumem.asbuffer(np.zeros(4))
    assert buffer.__dlpack_device__() == (CPU, 0)
    assert device_of(buffer.__dlpack__()) == (CPU, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_cpu_can_always_be_asked_for(runtime, kind) -> None:
    buffer = cumem.full((3, 4), 7, "i4", kind)
    capsule = buffer.__dlpack__(dl_device=(CPU, 0), **NEWEST)
    managed = read_capsule(capsule)
    assert device_of(capsule) == (CPU, 0)
    assert bool(managed.flags & IS_COPIED) is (kind == "device")
    assert (consume(capsule) == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_numpys_one_spelling_runs_everywhere(runtime, kind) -> None:
    buffer = cumem.full((3, 4), 7, "i4", kind)
    array = on_cpu(buffer)
    assert (array == 7).all()
    if array.flags.writeable:
        array[...] = 8
    else:
        assert not NUMPY_LETS_WRITE
        return
    assert (values.get(buffer) == (7 if kind == "device" else 8)).all()


def test_device_memory_is_not_copied_against_the_callers_will(runtime) -> None:
    buffer = cumem.empty(4, "f4", "device")
    with pytest.raises(BufferError, match="copy=False"):
        buffer.__dlpack__(dl_device=(CPU, 0), copy=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("pinned", (CUDA_HOST, 0)),
        ("mapped", (CUDA_HOST, 0)),
        ("mapped", (CUDA, 0)),
        ("managed", (CUDA_MANAGED, 0)),
        ("managed", (CUDA, 0)),
        ("device", (CUDA, 0)),
    ],
)
def test_asked_device_is_given_without_a_copy(cuda, kind, device) -> None:
    buffer = cumem.empty(4, "f4", kind)
    capsule = buffer.__dlpack__(dl_device=device, copy=False, **NEWEST)
    assert device_of(capsule) == device
    assert read_capsule(capsule).flags == 0
    pointer = buffer.device_ptr if (kind, device[0]) == ("mapped", CUDA) else buffer.ptr
    assert read_capsule(capsule).tensor.data == pointer
    del capsule


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("pinned", (CUDA, 0)),
        ("pinned", (CUDA_MANAGED, 0)),
        ("managed", (CUDA_HOST, 0)),
        ("device", (CUDA_HOST, 0)),
        ("device", (CUDA_MANAGED, 0)),
        ("device", (CUDA, 63)),
        ("pinned", (CPU, 1)),
        ("pinned", (10, 0)),
        ("pinned", (-1, 0)),
    ],
)
def test_impossible_devices_are_refused(runtime, kind, device) -> None:
    with pytest.raises(BufferError, match="dl_device"):
        cumem.empty(4, "f4", kind).__dlpack__(dl_device=device)


@pytest.mark.parametrize("device", [(CUDA, 0), (CUDA_HOST, 0), (CUDA_MANAGED, 0)])
def test_emulated_memory_is_nothing_but_the_cpus(emulated, device) -> None:
    for kind in KINDS:
        with pytest.raises(BufferError, match="emulated"):
            cumem.empty(4, "f4", kind).__dlpack__(dl_device=device)


@pytest.mark.parametrize("kind", ["mapped", "managed"])
def test_as_device_is_device_memory(runtime, kind) -> None:
    buffer = cumem.full(4, 3, "i4", kind)
    view = buffer.as_device()
    expected = (CPU, 0) if runtime.emulated else (CUDA, 0)
    assert view.__dlpack_device__() == expected
    assert device_of(view.__dlpack__()) == expected
    assert (on_cpu(view) == 3).all()


# -- the tensor -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_describes_the_buffer(runtime, kind) -> None:
    buffer = cumem.empty((4, 6), "f4", kind)
    for view in (buffer, buffer.T, buffer[1:, 1::2], buffer[2, 3], buffer[1:2]):
        capsule = view.__dlpack__(**NEWEST)
        tensor = read_capsule(capsule).tensor
        assert tensor.ndim == view.ndim
        assert tuple(tensor.shape[: view.ndim]) == view.shape
        assert bool(tensor.strides)
        steps = tuple(s * 4 for s in tensor.strides[: view.ndim])
        assert [s for s, n in zip(steps, view.shape, strict=True) if n > 1] == [
            s for s, n in zip(view.strides, view.shape, strict=True) if n > 1
        ]
        assert tensor.byte_offset == 0
        if not (runtime.emulated and kind == "device"):
            assert tensor.data == view.ptr
        else:
            assert tensor.data == session.testing.alias(view.ptr, 4)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_round_trip_through_numpy(runtime, dtype) -> None:
    data = np.arange(12).astype(dtype).reshape(3, 4)
    buffer = cumem.array(data, kind="pinned")
    for view, expected in ((buffer, data), (buffer[::2, 1:], data[::2, 1:])):
        array = np.from_dlpack(view)
        assert array.dtype == data.dtype
        assert array.ctypes.data == view.ptr
        assert (array == expected).all()
        assert array.flags.writeable is NUMPY_LETS_WRITE
        assert view.numpy().flags.writeable


@pytest.mark.parametrize(
    "dtype", [">f4", "M8[s]", "m8[ns]", "S3", "U2", "V4", "f16", [("a", "i4")]], ids=str
)
def test_other_dtypes_are_refused_by_name(runtime, dtype) -> None:
    with pytest.raises(BufferError, match="dtype"):
        cumem.empty(4, dtype, "pinned").__dlpack__()


def test_ml_dtypes_have_codes(runtime) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, code, bits in (
        ("bfloat16", 4, 16),
        ("float8_e4m3fn", 10, 8),
        ("float8_e5m2", 12, 8),
    ):
        dtype = np.dtype(getattr(ml_dtypes, name))
        buffer = cumem.zeros(4, dtype, "pinned")
        capsule = buffer.__dlpack__(**NEWEST)
        found = read_capsule(capsule).tensor.dtype
        assert (found.code, found.bits, found.lanes) == (code, bits, 1)
        assert cumem.asbuffer(capsule).dtype == dtype
    with pytest.raises(BufferError, match="int4"):
        cumem.empty(4, ml_dtypes.int4, "pinned").__dlpack__()


def test_strides_between_elements_are_refused(runtime) -> None:
    array = np.zeros(4, [("a", "i4"), ("b", "i2")])["a"]
    with pytest.raises(BufferError, match="itemsize"):
        cumem.asbuffer(array).__dlpack__()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [0, (3, 0), (0, 3, 2)])
def test_empty_buffer_has_no_data(runtime, kind, shape) -> None:
    buffer = cumem.empty(shape, "f4", kind)
    for device in (None, (CPU, 0)):
        capsule = buffer.__dlpack__(dl_device=device, **NEWEST)
        assert read_capsule(capsule).tensor.data is None
        assert read_capsule(capsule).flags == 0
    assert on_cpu(buffer).shape == buffer.shape


@pytest.mark.parametrize("kind", KINDS)
def test_0d_buffer_is_one_element(runtime, kind) -> None:
    buffer = cumem.full((), 5, "i4", kind)
    array = on_cpu(buffer)
    assert array.shape == ()
    assert array == 5


# -- versions and flags -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "name", "kind"),
    [
        (None, "dltensor", Legacy),
        ((0, 8), "dltensor", Legacy),
        ((1, 0), "dltensor_versioned", Versioned),
        ((1, 2), "dltensor_versioned", Versioned),
        ((2, 0), "dltensor_versioned", Versioned),
        ((1, 99), "dltensor_versioned", Versioned),
    ],
)
def test_capsule_is_of_the_generation_asked_for(runtime, version, name, kind) -> None:
    capsule = cumem.empty(4, "f4", "pinned").__dlpack__(max_version=version)
    assert capsule_name(capsule) == name
    managed = read_capsule(capsule)
    assert isinstance(managed, kind)
    if kind is Versioned:
        assert managed.version.major == 1
        assert (managed.version.major, managed.version.minor) <= version


def test_readonly_needs_the_new_generation(runtime) -> None:
    array = np.arange(4)
    array.flags.writeable = False
    buffer = cumem.asbuffer(array)
    with pytest.raises(BufferError, match="read-only"):
        buffer.__dlpack__()
    capsule = buffer.__dlpack__(**NEWEST)
    assert read_capsule(capsule).flags == READ_ONLY
    assert not consume(buffer.__dlpack__(**NEWEST)).flags.writeable
    # The consumer may write to a copy, since nobody else has it.
    copied = buffer.__dlpack__(copy=True, **NEWEST)
    assert read_capsule(copied).flags == IS_COPIED


@pytest.mark.parametrize("kind", KINDS)
def test_copy_true_copies(runtime, kind) -> None:
    buffer = cumem.full((2, 3), 4, "i4", kind)
    capsule = buffer.__dlpack__(copy=True, **NEWEST)
    managed = read_capsule(capsule)
    assert managed.flags == IS_COPIED
    assert device_of(capsule) == device_of(buffer.__dlpack__())
    assert managed.tensor.data != read_capsule(buffer.__dlpack__()).tensor.data
    copied = cumem.asbuffer(capsule)
    assert (values.get(copied) == 4).all()
    copied[...] = 5
    assert (values.get(buffer) == 4).all()


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"max_version": 1}, TypeError),
        ({"max_version": (1,)}, TypeError),
        ({"max_version": ("1", 0)}, TypeError),
        ({"dl_device": 1}, TypeError),
        ({"dl_device": (1, 0, 0)}, TypeError),
        ({"dl_device": (1, None)}, TypeError),
        ({"copy": np.ones(2)}, TypeError),
        ({"stream": "1"}, TypeError),
        ({"stream": 1.0}, TypeError),
        ({"unknown": 1}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(runtime, keywords, error) -> None:
    with pytest.raises(error):
        cumem.empty(4, "f4", "device").__dlpack__(**keywords)


def test_arguments_are_keywords_only(runtime) -> None:
    with pytest.raises(TypeError):
        cumem.empty(4, "f4", "pinned").__dlpack__(None)


# -- streams ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "mapped"])
@pytest.mark.parametrize("stream", [None, -1, 0, 1, 2, 12345])
def test_host_memory_takes_any_stream(runtime, kind, stream) -> None:
    assert cumem.empty(4, "f4", kind).__dlpack__(stream=stream) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [0, -2])
def test_forbidden_streams_are_refused(cuda, stream) -> None:
    for kind in ("managed", "device"):
        with pytest.raises(ValueError, match="stream"):
            cumem.empty(4, "f4", kind).__dlpack__(stream=stream)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [None, -1, 1, 2])
def test_cuda_streams_are_taken(cuda, stream) -> None:
    for kind in ("managed", "device"):
        assert cumem.zeros(4, "f4", kind).__dlpack__(stream=stream) is not None


@pytest.mark.gpu
def test_consumer_stream_waits_for_pending_work(cuda) -> None:
    producer, consumer = cumem.Stream(), cumem.Stream()
    buffer = cumem.zeros(1 << 26, "u1", "device")
    for _ in range(20):
        buffer.fill(1, stream=producer)
    buffer.fill(9, stream=producer)
    capsule = buffer.__dlpack__(stream=consumer.handle, **NEWEST)
    out = cumem.zeros(1 << 26, "u1", "pinned")
    view = cumem.asbuffer(capsule)
    cumem.copy_async(out, view, stream=consumer).wait()
    assert (out.numpy() == 9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_cpu_capsule_waits_for_pending_work(emulated, kind) -> None:
    stream = cumem.Stream()
    source = cumem.full(256, 6, "u1", "pinned")
    buffer = cumem.zeros(256, "u1", kind)
    seen: list[np.ndarray] = []
    entered = threading.Event()

    def read() -> None:
        entered.set()
        seen.append(np.from_dlpack(buffer).copy())

    reader = threading.Thread(target=read)
    with session.gate(stream):
        transfer = cumem.copy_async(buffer, source, stream=stream)
        # With stream=-1 the consumer itself takes care of the order.
        capsule = buffer.__dlpack__(stream=-1)
        reader.start()
        entered.wait()
        session.wait_until_waiting(reader)
        assert seen == []
    reader.join()
    assert (seen[0] == 6).all()
    transfer.wait()
    del capsule


# -- lifetime ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keywords", [{}, NEWEST], ids=["legacy", "versioned"])
def test_unused_capsule_frees_its_tensor(runtime, kind, keywords) -> None:
    buffer = cumem.empty(4, "f4", kind)
    capsule = buffer.__dlpack__(**keywords)
    with pytest.raises(BufferError, match="1 live export"):
        buffer.free()
    del capsule
    buffer.free()


@pytest.mark.parametrize("keywords", [{}, NEWEST], ids=["legacy", "versioned"])
def test_memory_outlives_the_buffer(runtime, keywords) -> None:
    array = consume(cumem.full(4, 9, "i4", "pinned").__dlpack__(**keywords))
    gc.collect()
    assert (array == 9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_free_is_refused_while_a_consumer_lives(runtime, kind) -> None:
    buffer = cumem.zeros(4, "f4", kind)
    array = (
        np.from_dlpack(buffer)
        if runtime.emulated or kind != "device"
        else cumem.asbuffer(buffer.__dlpack__())
    )
    with pytest.raises(BufferError, match="export"):
        buffer.free()
    del array
    buffer.free()


def test_closed_buffer_exports_nothing(runtime) -> None:
    buffer = cumem.empty(4, "f4", "pinned")
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        buffer.__dlpack__()
    with pytest.raises(ValueError, match="closed"):
        buffer.__dlpack_device__()


def test_deleter_runs_in_any_thread_without_the_gil(runtime) -> None:
    for keywords in ({}, NEWEST):
        buffer = cumem.empty(1 << 10, "f4", "pinned")
        capsule = buffer.__dlpack__(**keywords)
        managed = read_capsule(capsule)
        address = ctypes.addressof(managed)
        name = capsule_name(capsule).encode()
        ctypes.pythonapi.PyCapsule_SetName(
            ctypes.py_object(capsule), ctypes.c_char_p(USED[name])
        )
        # Calling a CFUNCTYPE releases the GIL around the deleter.
        deleter = DELETER(ctypes.cast(managed.deleter, ctypes.c_void_p).value)
        thread = threading.Thread(target=deleter, args=(address,))
        thread.start()
        thread.join()
        del capsule, managed
        buffer.free()


USED = {
    b"dltensor": b"used_dltensor",
    b"dltensor_versioned": b"used_dltensor_versioned",
}


def test_last_reference_may_go_in_a_deleter(runtime) -> None:
    def consume_and_drop() -> None:
        array = np.from_dlpack(cumem.empty(1 << 12, "u1", "pinned"))
        assert array.shape == (1 << 12,)

    threads = [threading.Thread(target=consume_and_drop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    session.testing.poll()
    assert session.testing.live_storages() == 0


# -- other libraries --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "mapped"])
def test_torch_shares_host_memory(runtime, kind) -> None:
    torch = pytest.importorskip("torch")
    buffer = cumem.zeros((3, 4), "f4", kind)
    tensor = torch.from_dlpack(buffer)
    assert tensor.data_ptr() == buffer.ptr
    tensor[1, 2] = 5
    assert values.get(buffer)[1, 2] == 5
    buffer[0, 0] = 7
    assert tensor[0, 0] == 7
    assert torch.from_dlpack(buffer[:, ::2]).stride() == (4, 2)
    with pytest.raises(BufferError, match="export"):
        buffer.free()
    del tensor


def test_torch_frombuffer_keeps_the_buffer(runtime) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.frombuffer(cumem.full(16, 3, "u1", "pinned"), dtype=torch.uint8)
    gc.collect()
    assert (tensor == 3).all()
    del tensor


def test_numpy_consumes_legacy_capsules(runtime) -> None:
    assert (consume(cumem.full(4, 2, "i4", "pinned").__dlpack__()) == 2).all()


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
@pytest.mark.parametrize("stream", [-2, -5, -(2**40)])
def test_stream_that_means_nothing_is_refused(runtime, kind: str, stream: int) -> None:
    with pytest.raises(ValueError, match=f"stream={stream}"):
        cumem.zeros(4, kind=kind).__dlpack__(stream=stream)


@pytest.mark.parametrize(
    ("dtype", "carrier"),
    [("M8[s]", "i8"), ("m8[ns]", "i8"), ("S3", "u1"), ("U2", "u1"), ("i4,f8", "u1")],
)
def test_dtype_without_a_code_names_a_view_that_works(runtime, dtype, carrier) -> None:
    array = np.frombuffer(bytes(range(48)), dtype, count=2)
    buffer = cumem.array(array, kind="pinned")
    with pytest.raises(BufferError, match="cannot describe") as caught:
        np.from_dlpack(buffer)
    assert f"view('{carrier}')" in str(caught.value)
    through = np.from_dlpack(buffer.view(carrier))
    assert through.view(dtype).tobytes() == array.tobytes()


def test_dtype_without_a_buffer_format_names_views_that_work(runtime) -> None:
    array = np.array(["2026-01-01", "2026-01-02"], "M8[s]")
    buffer = cumem.array(array, kind="pinned")
    with pytest.raises(ValueError, match=r"cannot include.*numpy\(\), or view\(\)"):
        memoryview(buffer)
    assert (buffer.numpy() == array).all()
    assert (np.frombuffer(buffer.view("i8"), "M8[s]") == array).all()
    assert cumem.asbuffer(array).dtype == array.dtype
