# SPDX-License-Identifier: Apache-2.0
"""The buffer protocol of buffers that the host may use, against NumPy's own.

Requests are made through memoryview and, with every combination of flags, through
ctypes. A NumPy array of the same layout says what the answers must be.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import io
import itertools
import struct
import threading

import numpy as np
import pytest
from support import session, values
from support.strategies import DTYPES

import cumem

HOST_KINDS = ["pinned", "mapped", "managed"]

SIMPLE, WRITABLE, FORMAT, ND, STRIDES = 0, 0x1, 0x4, 0x8, 0x10 | 0x8
C_CONTIGUOUS = 0x20 | STRIDES
F_CONTIGUOUS = 0x40 | STRIDES
ANY_CONTIGUOUS = 0x80 | STRIDES
INDIRECT = 0x100 | STRIDES
FULL = INDIRECT | WRITABLE | FORMAT
FULL_RO = INDIRECT | FORMAT


class PyBuffer(ctypes.Structure):
    """The struct Py_buffer of CPython's stable ABI."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = [ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int]
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.POINTER(PyBuffer)]


def request(obj: object, flags: int) -> dict[str, object]:
    """Return what PyObject_GetBuffer fills in, which is read before the release."""
    view = PyBuffer()
    _get(obj, ctypes.byref(view), flags)
    try:
        return {
            "len": view.len,
            "itemsize": view.itemsize,
            "readonly": bool(view.readonly),
            "format": view.format,
            "shape": tuple(view.shape[: view.ndim]) if view.shape else None,
            "strides": tuple(view.strides[: view.ndim]) if view.strides else None,
            "suboffsets": bool(view.suboffsets),
            "ndim": view.ndim,
            "bytes": ctypes.string_at(view.buf, min(view.len, 4)),
        }
    finally:
        _release(ctypes.byref(view))


SHAPES = [(), (0,), (5,), (2, 3), (2, 0, 3), (2, 1, 3)]


def described(view: memoryview) -> dict[str, object]:
    names = [
        "format",
        "itemsize",
        "nbytes",
        "ndim",
        "shape",
        "readonly",
        "c_contiguous",
        "f_contiguous",
        "contiguous",
        "suboffsets",
    ]
    # The strides of an empty view mean nothing.
    if view.nbytes:
        names.append("strides")
    return {name: getattr(view, name) for name in names}


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_memoryview_says_what_numpys_says(runtime, kind) -> None:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        array = np.zeros(shape, dtype)
        buffer = cumem.empty(shape, dtype, kind)
        try:
            expected = described(memoryview(array))
        # Datetimes have no buffer format.
        except ValueError:
            with pytest.raises(ValueError, match="cannot include dtype"):
                memoryview(buffer)
            continue
        with memoryview(buffer) as view:
            assert described(view) == expected, (dtype, shape)
            assert view.obj is buffer
        if array.nbytes:
            assert np.asarray(buffer).ctypes.data == buffer.ptr


def test_format_of_ml_dtypes_is_refused_as_numpy_does(runtime) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    buffer = cumem.empty(4, ml_dtypes.bfloat16, "pinned")
    with pytest.raises(ValueError, match="cannot include dtype"):
        memoryview(buffer)
    # Requests for bytes name no format, so hashing and sending still work.
    buffer.view("u1").fill(7)
    assert request(buffer, SIMPLE)["len"] == 8


LAYOUTS = {
    "c": lambda b: b,
    "f": lambda b: b.T,
    "rows": lambda b: b[::2],
    "columns": lambda b: b[:, 1:3],
    "reversed": lambda b: b[::-1],
    "one-row": lambda b: b[1],
    "scalar": lambda b: b[1, 2],
    "nothing": lambda b: b[2:2],
}
FLAGS = [
    base | more
    for base, more in itertools.product(
        (SIMPLE, ND, STRIDES, C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS, INDIRECT),
        (0, WRITABLE, FORMAT, WRITABLE | FORMAT),
    )
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_are_answered_as_numpy_answers_them(runtime, layout) -> None:
    array = np.arange(12, dtype="i4").reshape(3, 4)
    buffer = cumem.array(array, kind="pinned")
    for flags in FLAGS:
        compare_answers(
            np.asarray(LAYOUTS[layout](array)), LAYOUTS[layout](buffer), flags
        )


def compare_answers(same: np.ndarray, view: cumem.Buffer, flags: int) -> None:
    """Compare what an array and a buffer of the same memory answer to these flags."""
    try:
        expected = request(same, flags)
    except (BufferError, ValueError):
        with pytest.raises(BufferError, match="contiguous"):
            request(view, flags)
        return
    found = request(view, flags)
    for key in ("len", "itemsize", "readonly", "shape", "suboffsets", "bytes"):
        assert found[key] == expected[key], (key, hex(flags))
    assert (found["strides"] is None) == (expected["strides"] is None)
    if same.size > 0:
        assert found["strides"] == expected["strides"], hex(flags)
    assert (found["format"] is None) == (expected["format"] is None)
    if flags & ND:
        assert found["ndim"] == same.ndim


def test_readonly_buffer_refuses_writable_requests(runtime) -> None:
    array = np.arange(6, dtype="u1")
    array.flags.writeable = False
    buffer = cumem.asbuffer(array)
    for flags in FLAGS:
        if flags & WRITABLE:
            with pytest.raises(BufferError, match="read-only"):
                request(buffer, flags)
        else:
            assert request(buffer, flags)["readonly"] is True
    with pytest.raises(TypeError):
        memoryview(buffer)[0] = 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (SIMPLE, "without strides"),
        (ND, "without strides"),
        (C_CONTIGUOUS, "not C-contiguous"),
        (F_CONTIGUOUS, "not Fortran-contiguous"),
        (ANY_CONTIGUOUS, "not contiguous"),
    ],
)
def test_refusals_say_why(runtime, flags, reason) -> None:
    view = cumem.empty((4, 6), "f4", "pinned")[:, ::2]
    with pytest.raises(BufferError, match=reason):
        request(view, flags)


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_writes_are_seen_on_both_sides(runtime, kind) -> None:
    buffer = cumem.zeros((2, 3), "i4", kind)
    array = np.asarray(buffer)
    assert array.ctypes.data == buffer.ptr
    array[1, 2] = 7
    assert values.get(buffer)[1, 2] == 7
    buffer[0, 0] = 5
    assert array[0, 0] == 5
    (ctypes.c_int32 * 6).from_buffer(buffer)[1] = 9
    assert array[0, 1] == 9


def test_ordinary_consumers_take_it(runtime) -> None:
    data = bytes(range(256))
    buffer = cumem.array(np.frombuffer(data, "u1"), kind="pinned")
    assert bytes(buffer) == data
    assert bytearray(buffer) == data
    assert hashlib.sha256(buffer).digest() == hashlib.sha256(data).digest()
    assert io.BytesIO(data).readinto(buffer) == 256
    assert struct.unpack_from("<I", buffer, 4)[0] == 0x07060504
    assert b"".join([buffer, buffer]) == data * 2


def test_device_memory_has_no_buffer_protocol(runtime) -> None:
    with pytest.raises(TypeError):
        memoryview(cumem.empty(4, "u1", "device"))
    with pytest.raises(TypeError):
        memoryview(cumem.empty(4, "u1", "managed").as_device())


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_free_is_refused_while_exported(runtime, kind) -> None:
    buffer = cumem.empty(16, "u1", kind)
    first, second = memoryview(buffer), memoryview(buffer)
    with pytest.raises(BufferError, match="2 live exports"):
        buffer.free()
    first.release()
    with pytest.raises(BufferError, match="1 live export"):
        buffer.free()
    second[0] = 1  # The memory still exists.
    second.release()
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        memoryview(buffer)


def test_exports_are_balanced_after_refusals(runtime) -> None:
    buffer = cumem.empty((4, 4), "M8[s]", "pinned")
    for _ in range(3):
        with pytest.raises(ValueError):
            memoryview(buffer)
        with pytest.raises(BufferError):
            request(buffer[:, ::2], SIMPLE)
    buffer.free()


def test_view_outlives_its_buffer(runtime) -> None:
    view = memoryview(cumem.full(8, 3, "u1", "pinned"))
    assert bytes(view) == b"\3" * 8


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_export_waits_for_an_unfinished_transfer(emulated, kind) -> None:
    stream = cumem.Stream()
    source = cumem.full(1 << 12, 5, "u1", "device")
    buffer = cumem.zeros(1 << 12, "u1", kind)
    entered = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        entered.set()
        seen.append(bytes(memoryview(buffer)))

    reader = threading.Thread(target=read)
    with session.gate(stream):
        transfer = cumem.copy_async(buffer, source, stream=stream)
        reader.start()
        entered.wait()
        session.wait_until_waiting(reader)
        assert seen == []  # The gate holds the work back.
    reader.join()
    assert seen == [b"\5" * (1 << 12)]
    transfer.wait()


def test_threads_export_and_release_at_once(runtime) -> None:
    buffer = cumem.zeros((16, 16), "f4", "pinned")

    def work() -> None:
        for _ in range(300):
            with memoryview(buffer) as view:
                assert view.shape == (16, 16)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    buffer.free()


@pytest.mark.parametrize("nth", range(1, 3))
def test_view_taken_while_numpy_makes_its_own_is_remembered(emulated, nth: int) -> None:
    buffers = [cumem.zeros(4096, "u1", "pinned")]
    collections: list[str] = []

    def look(phase: str, info: object) -> None:
        collections.append(phase)
        if len(collections) == nth:
            # The consumer torch.frombuffer does the same, and keeps the object.
            memoryview(buffers[0]).release()

    thresholds = gc.get_threshold()
    gc.callbacks.append(look)
    # Making the array and its view now starts garbage collections.
    gc.set_threshold(1)
    try:
        array = buffers[0].numpy()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(look)
    if len(collections) < nth:
        pytest.skip("this Python collects less often")
    del array
    buffers[0].free()
    # The memory lives until the last reference to the buffer is dropped.
    assert cumem.stats()["pinned"].live_nbytes > 0
    buffers.clear()
    assert cumem.stats()["pinned"].live_nbytes == 0


def test_own_array_is_counted_and_not_remembered(emulated) -> None:
    # This dtype has no format, so NumPy gets bytes.
    buffer = cumem.zeros(4096, "M8[s]", "pinned")
    array = buffer.numpy()
    with pytest.raises(BufferError):
        buffer.free()
    del array
    buffer.free()
    assert cumem.stats()["pinned"].live_nbytes == 0
