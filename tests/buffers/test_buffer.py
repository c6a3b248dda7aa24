# SPDX-License-Identifier: Apache-2.0
"""Tests how buffers are made, what they tell, how they end, and how they are pickled.

Most tests run for each kind of memory and compare with a NumPy array. Those about
lifetime end buffers by free(), by a block or by shutdown(), and look at what still
works.
"""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
from support import session, values
from support.strategies import DTYPES, KINDS

import cumem

pytestmark = [
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
    # These tests fail if a wheel, or an older NumPy, lacks something that cumem needs.
    pytest.mark.packaging,
]

HOST_KINDS = ["pinned", "mapped", "managed"]
TYPES = {
    "pinned": cumem.PinnedBuffer,
    "mapped": cumem.MappedBuffer,
    "managed": cumem.ManagedBuffer,
    "device": cumem.DeviceBuffer,
}


@pytest.mark.parametrize("kind", KINDS)
def test_empty_has_numpys_attributes(runtime, kind: str) -> None:
    array = np.empty((3, 4), "f4")
    buffer = cumem.empty((3, 4), "f4", kind)
    assert type(buffer) is TYPES[kind]
    assert isinstance(buffer, cumem.Buffer)
    assert buffer.shape == (3, 4)
    assert buffer.strides == array.strides
    assert buffer.dtype == np.float32
    assert (buffer.ndim, buffer.size, buffer.itemsize) == (2, 12, 4)
    assert buffer.nbytes == 48
    assert buffer.kind == kind
    assert buffer.device == cumem.Device(0)
    assert buffer.readonly is False
    assert buffer.base is None
    assert buffer.ptr > 0
    assert len(buffer) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [0, (0,), (3, 0, 2), ()])
def test_empty_sizes_and_0d_work_everywhere(runtime, kind, shape) -> None:
    buffer = cumem.zeros(shape, "i4", kind)
    expected = np.zeros(shape, "i4")
    assert buffer.shape == expected.shape
    assert buffer.nbytes == expected.nbytes
    buffer.fill(7)
    expected.fill(7)
    assert (values.get(buffer) == expected).all()
    cumem.copy(buffer, np.full(shape, 8, "i4"))
    assert (values.get(buffer[...]) == 8).all()
    assert buffer.reshape(-1).nbytes == expected.nbytes if buffer.size else True
    if expected.nbytes == 0:
        assert buffer.ptr == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(runtime, kind, dtype) -> None:
    array = np.frombuffer(np.random.default_rng(0).bytes(dtype.itemsize * 6), dtype)
    buffer = cumem.array(array.reshape(2, 3), kind=kind)
    assert buffer.dtype == dtype
    assert values.get(buffer).tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_ml_dtypes_round_trip(runtime, kind) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(8).astype(ml_dtypes.bfloat16)
    buffer = cumem.array(array, kind=kind)
    assert buffer.dtype == array.dtype
    assert values.get(buffer).tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_order_f_gives_numpys_strides(runtime, kind) -> None:
    buffer = cumem.empty((3, 4), "f8", kind, order="F")
    assert buffer.strides == np.empty((3, 4), "f8", "F").strides


def test_pinned_flags_are_kept(runtime) -> None:
    assert cumem.empty_pinned(4).flags == ("portable",)
    both = cumem.empty_pinned(4, write_combined=True)
    assert set(both.flags) == {"portable", "write_combined"}
    assert cumem.empty_pinned(4, portable=False).flags == ()
    assert "mapped" in cumem.empty_mapped(4).flags
    assert cumem.empty_managed(4, attach="host").flags == ("host",)


@pytest.mark.parametrize("kind", KINDS)
def test_full_zeros_array_empty_like(runtime, kind) -> None:
    assert (values.get(cumem.zeros((2, 3), "i2", kind)) == 0).all()
    assert (values.get(cumem.full((2, 3), 1.5, kind=kind)) == 1.5).all()
    assert values.get(cumem.array([[1, 2], [3, 4]], kind=kind)).tolist() == [
        [1, 2],
        [3, 4],
    ]
    like = cumem.empty_like(np.empty((2, 3), "c8"), kind=kind)
    assert (like.shape, like.dtype, like.kind) == ((2, 3), np.dtype("c8"), kind)
    assert cumem.empty_like(like).kind == kind


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: cumem.empty(-1), ValueError, "shape"),
        (lambda: cumem.empty("a"), TypeError, "shape"),
        (lambda: cumem.empty((2**40, 2**40)), ValueError, "shape|bytes|large"),
        (lambda: cumem.empty(3, object), TypeError, "object"),
        (lambda: cumem.empty(3, "f4", "pined"), ValueError, "kind"),
        (lambda: cumem.empty(3, order="K"), ValueError, "order"),
        (lambda: cumem.empty(3, device=99), ValueError, "device"),
        (lambda: cumem.empty(3, colour=1), TypeError, "colour"),
        (lambda: cumem.empty(), TypeError, "shape"),
        (lambda: cumem.empty(1, 2, 3, 4), TypeError, "positional"),
        (lambda: cumem.empty_managed(1, attach="single"), ValueError, "attach"),
        (lambda: cumem.Buffer(), TypeError, "Buffer"),
        (lambda: cumem.PinnedBuffer(), TypeError, "PinnedBuffer"),
    ],
)
def test_bad_arguments_name_the_argument(emulated, call, error, match) -> None:
    with pytest.raises(error, match=match):
        call()


def test_out_of_memory_says_what_was_asked(emulated) -> None:
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_device(1 << 40, "u1")
    error = caught.value
    assert isinstance(error, MemoryError)
    assert error.requested == 1 << 40
    assert error.code == 2
    assert error.name == "cudaErrorMemoryAllocation"
    assert error.arg == 1 << 40
    assert "asked for 1 TiB (1099511627776 bytes)" in str(error)


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_numpy_view_is_the_same_memory(runtime, kind) -> None:
    buffer = cumem.zeros((4, 4), "i4", kind)
    array = buffer.numpy()
    assert array.__array_interface__["data"][0] == buffer.ptr
    array[1:3, ::2] = 5
    assert (buffer[1:3, ::2].numpy() == 5).all()
    assert np.asarray(buffer).__array_interface__["data"][0] == buffer.ptr
    del buffer
    gc.collect()
    array[:] = 9  # The array keeps the memory.
    assert array.sum() == 9 * 16


def test_device_buffer_has_no_host_view(runtime) -> None:
    buffer = cumem.empty_device(4)
    with pytest.raises(TypeError, match="device"):
        buffer.numpy()
    with pytest.raises(TypeError):
        memoryview(buffer)
    with pytest.raises(TypeError, match="device"):
        np.asarray(buffer)


@pytest.mark.parametrize("kind", ["mapped", "managed"])
def test_as_device_shares_the_memory(runtime, kind) -> None:
    buffer = cumem.zeros(16, "i4", kind)
    device = buffer.as_device()
    assert type(device) is cumem.DeviceBuffer
    device[4:8] = 3
    assert buffer.numpy().tolist() == [0] * 4 + [3] * 4 + [0] * 8
    assert device.base is buffer


@pytest.mark.parametrize("kind", KINDS)
def test_free_closes_and_frees_once(runtime, kind) -> None:
    buffer = cumem.empty(16, "u1", kind)
    view = buffer[2:]
    buffer.free()
    assert buffer.closed
    assert view.closed
    for use in (
        lambda: buffer[0],
        lambda: view.fill(0),
        lambda: buffer.ptr,
        lambda: cumem.copy(view, b"x" * 14),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()
    buffer.free()  # Freeing twice is allowed, like closing a file twice.
    assert "closed" in repr(buffer)


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_free_while_exported_is_refused(runtime, kind) -> None:
    buffer = cumem.zeros(16, "u1", kind)
    with memoryview(buffer) as exported:
        with pytest.raises(BufferError):
            buffer.free()
        exported[0] = 1  # The memory still exists.
    assert buffer.numpy()[0] == 1
    gc.collect()
    buffer.free()
    assert buffer.closed


@pytest.mark.parametrize("kind", KINDS)
def test_with_block_closes_and_defers(runtime, kind) -> None:
    with cumem.zeros(16, "u1", kind) as buffer:
        array = buffer.numpy() if kind != "device" else None
        buffer[0] = 1
    assert buffer.closed
    with pytest.raises(ValueError, match="closed"):
        buffer.fill(0)
    if array is not None:
        array[:] = 2  # The export keeps the bytes until it is dropped.
        assert array.sum() == 32


def test_buffers_can_be_weakly_referenced(emulated) -> None:
    buffer = cumem.empty_pinned(1)
    ref = weakref.ref(buffer)
    assert ref() is buffer
    del buffer
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("kind", HOST_KINDS)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickle_round_trips(runtime, kind, protocol) -> None:
    buffer = cumem.array(np.arange(12, dtype="f4").reshape(3, 4), kind=kind)
    back = pickle.loads(pickle.dumps(buffer, protocol))
    assert type(back) is type(buffer)
    assert back.shape == (3, 4)
    assert (back.numpy() == buffer.numpy()).all()
    assert back.flags == buffer.flags


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_pickle_out_of_band_copies_nothing_on_the_way_out(runtime, kind) -> None:
    buffer = cumem.array(np.arange(12, dtype="f4"), kind=kind)
    pieces: list[pickle.PickleBuffer] = []
    data = pickle.dumps(buffer, 5, buffer_callback=pieces.append)
    assert len(pieces) == 1
    with pieces[0].raw() as raw:
        assert np.frombuffer(raw, "u1").__array_interface__["data"][0] == buffer.ptr
    assert len(data) < 500
    back = pickle.loads(data, buffers=pieces)
    assert (back.numpy() == buffer.numpy()).all()
    for piece in pieces:
        piece.release()


def test_pickle_of_strided_view_keeps_values(runtime) -> None:
    buffer = cumem.array(np.arange(12, dtype="f4").reshape(3, 4), kind="pinned")
    back = pickle.loads(pickle.dumps(buffer[::2, ::-1], 5))
    assert (back.numpy() == buffer.numpy()[::2, ::-1]).all()


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickle_of_what_is_read_only_comes_back_read_only(runtime, protocol) -> None:
    array = np.arange(3, dtype="i4")
    array.flags.writeable = False
    back = pickle.loads(pickle.dumps(cumem.asbuffer(array), protocol))
    assert type(back) is cumem.HostBuffer
    assert back.readonly is True
    assert back[1:].readonly is True
    assert back.numpy().tolist() == [0, 1, 2]
    for write in (lambda: back.fill(1), lambda: back.__setitem__(0, 1)):
        with pytest.raises(ValueError, match="read-only"):
            write()
    again = pickle.loads(pickle.dumps(back, protocol))
    assert again.readonly is True
    assert again.copy().readonly is False
    plain = pickle.loads(pickle.dumps(cumem.zeros(3, kind="pinned"), protocol))
    assert plain.readonly is False


def test_device_buffer_refuses_pickle(runtime) -> None:
    with pytest.raises(TypeError, match="device"):
        pickle.dumps(cumem.empty_device(1))


@pytest.mark.parametrize("kind", KINDS)
def test_repr_says_what_it_is(runtime, kind) -> None:
    text = repr(cumem.empty((3, 4), "f4", kind))
    assert TYPES[kind].__name__ in text
    assert "(3, 4)" in text
    assert "float32" in text
    assert ("emulated" in text) == runtime.emulated


@pytest.mark.parametrize("kind", KINDS)
def test_fill_patterns(runtime, kind) -> None:
    for dtype, value in [
        ("u1", 7),
        ("u2", 0x1234),
        ("f4", 1.5),
        ("f8", -2.25),
        ("c16", 1 + 2j),
        ("S5", b"hello"),
        ("?", True),
        ("V3", b"\x01\x02\x03"),
    ]:
        expected = np.zeros((5, 6), dtype)
        buffer = cumem.zeros((5, 6), dtype, kind)
        buffer.fill(np.array(value, dtype))
        expected[...] = np.array(value, dtype)
        assert values.get(buffer).tobytes() == expected.tobytes()
        expected[::2, ::3] = np.zeros((), dtype)
        buffer[::2, ::3].fill(np.zeros((), dtype))
        assert values.get(buffer).tobytes() == expected.tobytes()


def test_shutdown_closes_buffers_and_the_next_use_starts_afresh(runtime) -> None:
    buffer = cumem.empty_pinned(4)
    cumem.shutdown()
    assert buffer.closed
    session.testing.configure(backend=runtime.name, faults=True)
    assert cumem.empty_pinned(4).nbytes == 32
    with pytest.raises(ValueError, match="closed"):
        buffer.numpy()


def test_free_after_with_says_what_is_still_alive(runtime) -> None:
    with cumem.zeros(3, "u1", "pinned") as buffer:
        array = buffer.numpy()
    with pytest.raises(BufferError, match="1 live export: drop the arrays"):
        buffer.free()
    assert buffer.closed
    array[0] = 7  # The block has ended, but the array has not.
    assert array.tolist() == [7, 0, 0]
    del array
    buffer.free()
    buffer.free()


def test_shutdown_refuses_while_exported(runtime) -> None:
    buffer = cumem.empty_pinned(4)
    array = buffer.numpy()
    with pytest.raises(BufferError):
        cumem.shutdown()
    array[0] = 1
    assert buffer.numpy()[0] == 1


def test_int_and_float_read_the_element_and_not_its_digits(runtime) -> None:
    buffer = cumem.array(np.array([53, 54], "u1"), kind="pinned")
    assert int(buffer[0]) == 53
    assert float(buffer[1]) == 54.0
    with pytest.raises(TypeError):
        int(buffer)
    # Reading it copies the element to the host.
    assert float(cumem.full((), 1.5, "f4", "device")) == 1.5


def test_complex_reads_the_element(runtime) -> None:
    buffer = cumem.array(np.array([1 + 2j, 3j]), kind="pinned")
    assert complex(buffer[0]) == 1 + 2j
    assert complex(cumem.full((), 1.5, "f4", "pinned")) == 1.5
    with pytest.raises(TypeError):
        complex(buffer)
    # Reading it copies the element to the host.
    assert complex(cumem.full((), 2j, "c8", "device")) == 2j


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (4, "index 4 is out of bounds for axis 0 with length 4"),
        ((..., -6), "index -6 is out of bounds for axis 1 with length 5"),
        (10**30, "index 10+ is out of bounds for axis 0"),
        ((..., ...), "at most one Ellipsis"),
        ((0, 0, 0), "too many indices: the buffer has 2 dimensions"),
        ((None,) * 70, "at most 64 dimensions"),
        (1.5, "not float; index buf\\.numpy\\(\\) instead"),
        (True, "not bool"),
        (np.arange(2), "not ndarray"),
    ],
)
def test_what_is_no_index_is_refused(runtime, index, match) -> None:
    buffer = cumem.empty((4, 5), "f4", kind="pinned")
    with pytest.raises(IndexError, match=match):
        _ = buffer[index]
    assert buffer[np.int8(1), None, ..., ::2].shape == (1, 3)
