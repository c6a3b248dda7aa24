# SPDX-License-Identifier: Apache-2.0
"""Streams of other libraries, and objects that only look like streams.

The tests wrap a stream's handle in the ways in which PyTorch, CuPy and Numba do, and
pass the object to cumem.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import weakref

import numpy as np
import pytest
from support import session
from support.streams import (
    FOREIGN,
    ByCupy,
    ByNumba,
    ByProtocol,
    ByTorch,
    Castable,
)

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "stream_get_device"),
]

testing = session.testing


@pytest.mark.parametrize("wrap", FOREIGN, ids=lambda c: c.__name__)
def test_foreign_stream_is_the_same_stream(runtime, wrap) -> None:
    stream = cumem.Stream()
    foreign = cumem.Stream.from_external(wrap(stream.handle))
    assert foreign == stream
    assert foreign.handle == stream.handle
    assert foreign.device == stream.device
    foreign.synchronize()
    foreign.close()  # The stream belongs to another library, so it stays usable.
    stream.synchronize()
    cumem.empty_device(4, stream=wrap(stream.handle)).free()


@pytest.mark.parametrize("wrap", FOREIGN, ids=lambda c: c.__name__)
def test_foreign_stream_that_ended_is_not_touched_for_its_memory(runtime, wrap) -> None:
    stream = cumem.Stream()
    # Like CuPy's ExternalStream, the object that names the stream does not keep the
    # stream alive.
    cumem.empty_device(4, stream=wrap(stream.handle)).free()
    stream.synchronize()
    stream.close()
    other = cumem.Stream()
    # The pool asks which work has ended.
    cumem.empty_device(1 << 20, stream=other).free()
    # This waits for work that may not have ended.
    cumem.shutdown()


@pytest.mark.parametrize("wrap", FOREIGN, ids=lambda c: c.__name__)
@pytest.mark.parametrize("handle", [0, 1])
def test_foreign_default_stream_is_the_legacy_one(runtime, wrap, handle) -> None:
    stream = cumem.Stream.from_external(wrap(handle))
    assert stream == cumem.current_stream()
    assert stream.handle == 1


class Handles(enum.IntEnum):
    LEGACY = 1


@pytest.mark.parametrize(
    "value",
    [
        Handles.LEGACY,
        ctypes.c_void_p(None),
        ctypes.c_uint64(1),
        np.uint64(1),
        np.float32(1),
        Castable(1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wrap", [ByProtocol, ByTorch, ByCupy, ByNumba])
def test_number_of_any_type_in_a_foreign_stream_is_its_handle(
    runtime, wrap, value
) -> None:
    assert cumem.Stream.from_external(wrap(value)) == cumem.current_stream()


def test_int_of_a_type_of_its_own_is_a_handle(runtime) -> None:
    assert cumem.Stream.from_external(Handles.LEGACY) == cumem.current_stream()


def test_protocol_is_asked_once_whatever_it_answers(runtime) -> None:
    class Counted:
        asked = 0

        def __cuda_stream__(self) -> tuple[int, object]:
            self.asked += 1
            return 0, np.uint64(1)

    counted = Counted()
    assert cumem.Stream.from_external(counted) == cumem.current_stream()
    assert counted.asked == 1


def test_stream_of_ours_is_returned_as_it_is(runtime) -> None:
    stream = cumem.Stream()
    assert cumem.Stream.from_external(stream) is stream


def test_protocol_comes_before_attributes(runtime) -> None:
    stream = cumem.Stream()

    class Both(ByProtocol):
        cuda_stream = 0xDEAD
        ptr = 0xDEAD
        handle = 0xDEAD

    assert cumem.Stream.from_external(Both(stream.handle)) == stream


@pytest.mark.parametrize(
    ("obj", "error", "match"),
    [
        (None, TypeError, "obj must be a stream"),
        (True, TypeError, "not bool"),
        (np.True_, TypeError, "obj must be"),
        (1.0, TypeError, "not float"),
        ("1", TypeError, "not str"),
        (b"1", TypeError, "not bytes"),
        (object(), TypeError, "obj must be a Stream, an int"),
        (-1, ValueError, "from 0 to"),
        (2**64, ValueError, "from 0 to"),
        (np.int64(-1), ValueError, "from 0 to"),
        (ByProtocol(1, version=1), ValueError, "version 1"),
        (ByProtocol(1, version="0"), TypeError, "version"),
        (ByProtocol(-5), ValueError, "from 0 to"),
        (ByProtocol(True), TypeError, "must be an int"),
        (ByProtocol("7"), TypeError, "must be an int"),
        (ByProtocol(None), TypeError, "must be an int"),
        (ByTorch(-1), ValueError, r"\.cuda_stream"),
        (ByTorch(1.5), TypeError, r"\.cuda_stream must be an int"),
        (ByCupy("x"), TypeError, r"\.ptr"),
        (ByNumba(2**70), ValueError, r"\.handle"),
        (np.zeros(3), TypeError, "obj must be"),
        (np.float64(1), TypeError, "obj must be a Stream, an int .* not float64"),
        (np.float32(1), TypeError, "obj must be a Stream, an int .* not float32"),
        (np.False_, TypeError, "obj must be a Stream, an int"),
        (ByProtocol(1, version=2**70), ValueError, "the version .* not 1180591"),
        (ByProtocol(1, version=-1), ValueError, "the version .* not -1"),
        (ByProtocol(bytearray(b"1")), TypeError, "must be an int, not bytearray"),
        (ByTorch(None), TypeError, r"\.cuda_stream must be an int, not NoneType"),
        (ByTorch(b"1"), TypeError, r"\.cuda_stream must be an int, not bytes"),
        (ByTorch(False), TypeError, r"\.cuda_stream must be an int, not bool"),
        (ByCupy(memoryview(b"1")), TypeError, r"\.ptr must be an int, not memoryview"),
        (
            ByNumba(ctypes.c_char(b"x")),
            TypeError,
            r"\.handle must be an int, not bytes",
        ),
    ],
)
def test_what_is_no_stream_is_refused(runtime, obj, error, match) -> None:
    with pytest.raises(error, match=match):
        cumem.Stream.from_external(obj)


@pytest.mark.parametrize("answer", [1, (0,), (0, 1, 2), [0, 1], None])
def test_wrong_answer_of_the_protocol_is_refused(runtime, answer) -> None:
    foreign = ByProtocol(1)
    foreign.answer = answer
    with pytest.raises((TypeError, ValueError), match="__cuda_stream__"):
        cumem.Stream.from_external(foreign)


def test_protocol_as_a_property_is_refused(runtime) -> None:
    class Old:
        __cuda_stream__ = (0, 1)

    with pytest.raises(TypeError, match="__cuda_stream__ must be a method"):
        cumem.Stream.from_external(Old())


def test_exception_of_the_protocol_passes_through(runtime) -> None:
    class Broken:
        def __cuda_stream__(self) -> None:
            raise ZeroDivisionError

    class BrokenAttribute:
        @property
        def cuda_stream(self) -> int:
            raise ZeroDivisionError

    for broken in (Broken(), BrokenAttribute()):
        with pytest.raises(ZeroDivisionError):
            cumem.Stream.from_external(broken)


def test_look_alikes_are_refused(runtime) -> None:
    """Many objects have `.ptr` or `.handle`, and the driver may crash if it takes one
    of these numbers for a stream.
    """

    class MyEvent:
        ptr = 1

    class Array:
        ptr = 1
        __cuda_array_interface__ = None

    for obj in (
        cumem.empty_device(4),
        cumem.empty_pinned(4),
        cumem.Event(),
        cumem.Device(0),
        # An array of one number has `__index__`.
        cumem.array([1], "i8", kind="pinned"),
        MyEvent(),
        Array(),
    ):
        with pytest.raises(TypeError, match="obj must be"):
            cumem.Stream.from_external(obj)


def test_dead_handle_is_an_error_of_the_driver(emulated) -> None:
    stream = cumem.Stream()
    handle = stream.handle
    stream.close()
    with pytest.raises(cumem.CudaError) as caught:
        cumem.Stream.from_external(handle)
    assert caught.value.code == 400


def test_foreign_owner_lives_as_long_as_its_record(runtime) -> None:
    stream = cumem.Stream()
    owner = ByProtocol(stream.handle)
    reference = weakref.ref(owner)
    foreign = cumem.Stream.from_external(owner)
    del owner
    gc.collect()
    assert reference() is not None
    foreign.close()
    testing.poll()
    assert reference() is None


def test_owner_is_let_go_when_the_handle_is_wrong(emulated) -> None:
    owner = ByProtocol(0xDEAD0)
    reference = weakref.ref(owner)
    with pytest.raises(cumem.CudaError):
        cumem.Stream.from_external(owner)
    del owner
    gc.collect()
    testing.poll()
    assert reference() is None


def test_device_of_a_foreign_stream(emulated) -> None:
    stream = cumem.Stream(device=1)
    asked = cumem.Stream.from_external(stream.handle, device=1)
    assert asked.device == cumem.Device(1)
    if emulated.has("stream_get_device"):
        assert cumem.Stream.from_external(stream.handle).device == cumem.Device(1)
        with pytest.raises(ValueError, match="belongs to device 1"):
            cumem.Stream.from_external(stream.handle, device=0)
    by_torch = cumem.Stream.from_external(ByTorch(0, device_index=1))
    assert by_torch.device == cumem.Device(1)
    by_cupy = cumem.Stream.from_external(ByCupy(0, device_id=1))
    assert by_cupy == by_torch
    assert cumem.Stream.from_external(ByCupy(0)).device == cumem.Device(0)
    assert cumem.Stream.from_external(0, device=1) == by_torch


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: cumem.Stream().wait("x"),
            "other must be an Event, a Transfer, a Stream",
        ),
        (lambda: cumem.Stream().wait(None), "other must be an Event, a Transfer"),
        (lambda: cumem.Stream.from_external("x"), "obj must be a Stream"),
        (lambda: cumem.empty_device(1, stream="x"), "stream must be None, a Stream"),
    ],
)
def test_error_names_the_argument(emulated, call, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()
