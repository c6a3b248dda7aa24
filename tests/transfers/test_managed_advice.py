# SPDX-License-Identifier: Apache-2.0
"""Tests of which advice about managed memory is set, and of what is read back.

The tests set advice by call and by property, for whole buffers and for slices, and read
it from the driver. Wrong advice must be refused and change nothing.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest
from support import session
from support.managed import NBYTES, PAGE, managed, steers

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]


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
    assert again.ptr == place, "the pool returned other memory"
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
def test_wrong_advice_is_refused_and_changes_nothing(
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
        lambda: buffer.prefetch_pages("cpu"),
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
        with pytest.raises(ValueError, match="but no NUMA nodes"):
            buffer.accessed_by = [0, "numa:0"]
    assert buffer.accessed_by == (cumem.Device(1),)


@pytest.mark.parametrize(
    "text",
    ["numa:", "numa:100", "numa:-1", "numa:\uff11", "numa:1 ", "CPU", "\udc80", ""],
)
def test_text_that_is_no_place_is_refused(emulated, text: str) -> None:
    buffer = managed()
    for use in (
        lambda: buffer.prefetch_pages(text),
        lambda: buffer.advise(preferred_location=text),
        lambda: buffer.on(text).__enter__(),
        lambda: cumem.prefetch_pages([], text),
    ):
        with pytest.raises(
            ValueError, match=r'must be a device, "cpu" or "numa:N", not'
        ):
            use()
    assert buffer.prefetch_location is None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda b: b.prefetch_pages(0, None, 1),
            "prefetch_pages() takes at most 2 positional",
        ),
        (
            lambda b: b.prefetch_pages(where=0),
            "prefetch_pages() got an unexpected keyword argument",
        ),
        (lambda b: b.advise(True), "advise() takes no positional arguments (1 given)"),
        (
            lambda b: b.discard(None, 1),
            "discard() takes at most 1 positional argument (",
        ),
        (lambda b: b.on(0, None), "on() takes at most 1 positional argument (2 given)"),
        (
            lambda b: cumem.prefetch_pages(),
            "prefetch_pages() missing required argument",
        ),
        (lambda b: cumem.prefetch_pages(b, 0, 1, 2), "takes at most 3 positional"),
        (lambda b: cumem.prefetch_pages(3), "'int' object is not iterable"),
        (
            lambda b: b.prefetch_pages(1.5),
            'to must be a device, "cpu" or "numa:N", not float',
        ),
        (lambda b: b.prefetch_pages(0, "s"), "stream must be"),
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
        buffer.prefetch_pages(0, stream)
        buffer.advise(read_mostly=True, preferred_location="cpu", accessed_by=[0])
        buffer.read_mostly = False
        assert (buffer.read_mostly, buffer.preferred_location) == (False, "host")
        assert buffer.accessed_by == (cumem.Device(0),)
        cumem.prefetch_pages(parts, 0, stream)
        with buffer.on("cpu", stream=stream):
            assert buffer.prefetch_location == "host"

    use()  # After this, all objects for devices exist.
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
