# SPDX-License-Identifier: Apache-2.0
"""fill() and full() with values that NumPy cannot read, such as those on a device.

The value is a buffer, or another library's object, whose memory is on the host or a
device. Dtypes and shapes must follow the same rules as for values of NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import values
from support.exporters import FakeCAI, FakeDLPack, Produced, interface_of
from support.strategies import KINDS

import cumem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (2, 3)])
def test_fill_takes_a_buffer_of_any_kind(runtime, kind, source, shape) -> None:
    expected = np.arange(1, np.prod(shape) + 1, dtype="i4").reshape(shape)
    buffer = cumem.zeros((2, 3), "i4", kind)
    buffer.fill(cumem.array(expected, kind=source))
    assert (values.get(buffer) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_fill_of_a_strided_view_takes_a_value_on_the_device(runtime, kind) -> None:
    buffer = cumem.zeros((4, 6), "f8", kind)
    buffer[::2, 1::3].fill(cumem.array(np.float64(2.5)))
    expected = np.zeros((4, 6))
    expected[::2, 1::3] = 2.5
    assert (values.get(buffer) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_value_on_the_device_is_converted_as_any_other(runtime, kind, shape) -> None:
    buffer = cumem.full(3, cumem.full(shape, 7, "i2"), "f4", kind)
    assert values.get(buffer).tolist() == [7.0] * 3
    buffer.fill(cumem.full(shape, 8, "i2"), casting="safe")
    assert values.get(buffer).tolist() == [8.0] * 3
    whole = cumem.zeros(3, "i4", kind)
    with pytest.raises(TypeError, match="casting='unsafe' does"):
        cumem.full(3, cumem.full(shape, 1.5), "i4", kind)
    wrapped = cumem.full(3, cumem.full(shape, 2**40 + 5), "i4", kind)
    assert values.get(wrapped).tolist() == [5] * 3  # NumPy's astype() gives the same.
    with pytest.raises(TypeError, match=r'target has dtype int32; .*casting="unsafe"'):
        whole.fill(cumem.full(shape, 1.5))
    with pytest.raises(
        TypeError, match=r'target has dtype int32; .*casting="same_kind"'
    ):
        whole.fill(cumem.full(shape, 2, "i8"))
    assert values.get(whole).tolist() == [0] * 3
    whole.fill(cumem.full(shape, 1.5), casting="unsafe")
    assert values.get(whole).tolist() == [1] * 3


def test_fill_with_a_buffer_that_does_not_fit_names_both_shapes(runtime) -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\) does not fit .* \(3,\)"):
        cumem.zeros(3).fill(cumem.zeros(4))


def test_fill_with_a_closed_buffer_is_refused(runtime) -> None:
    value = cumem.zeros(())
    value.free()
    with pytest.raises(ValueError, match="closed"):
        cumem.zeros(3).fill(value)


@pytest.mark.parametrize("kind", KINDS)
def test_fill_takes_what_another_library_has_on_the_device(runtime, kind) -> None:
    source = cumem.array(np.arange(3, dtype="i4"))
    for value in (source, source[1]):
        buffer = cumem.zeros((2, 3), "i4", kind)
        buffer.fill(fake_on_device(value))
        assert (values.get(buffer) == values.get(value)).all()
        made = cumem.full((2, 3), fake_on_device(value), kind=kind)
        assert made.dtype == np.int32
        assert (values.get(made) == values.get(value)).all()


def test_fill_takes_what_another_library_has_on_the_host(runtime) -> None:
    value = FakeDLPack(Produced.over(np.array([1.5, 2.5], "f4")))
    made = cumem.full((3, 2), value, "f8")
    assert values.get(made).tolist() == [[1.5, 2.5]] * 3
    assert cumem.full(2, value).dtype == np.float32
    # There is one call for each capsule, which can be used only once.
    assert len(value.calls) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_full_takes_dtype_and_value_from_the_device(runtime, kind) -> None:
    made = cumem.full(3, cumem.array(np.int16(5)), kind=kind)
    assert made.dtype == np.int16
    assert values.get(made).tolist() == [5] * 3
    wide = cumem.full((2, 2), cumem.array(np.int16([1, 2])), "f8", kind)
    assert values.get(wide).tolist() == [[1.0, 2.0]] * 2


def test_fill_after_work_on_the_values_stream_sees_that_work(emulated) -> None:
    stream = cumem.Stream()
    value = cumem.empty_device((), "i4", stream=stream)
    cumem.copy_async(value, np.int32(5), stream=stream)
    buffer = cumem.zeros(3, "i4", "pinned")
    buffer.fill(value)
    assert buffer.numpy().tolist() == [5] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["i4", "f8"])
@pytest.mark.parametrize("named", [False, True])
def test_fill_takes_values_of_another_device(runtime, kind, dtype, named) -> None:
    if cumem.device_count() < 2:
        pytest.skip("this test needs two devices")
    value = cumem.array(np.arange(3, dtype="i4"), device=1)
    buffer = cumem.zeros((2, 3), dtype, kind)
    casting = None if dtype == "i4" else "safe"
    buffer.fill(value, stream=cumem.Stream() if named else None, casting=casting)
    assert (values.get(buffer) == np.arange(3)).all()
    ordinary = cumem.asbuffer(np.zeros((2, 3), dtype))
    ordinary.fill(value, stream=cumem.Stream() if named else None, casting=casting)
    assert (ordinary.numpy() == np.arange(3)).all()


def fake_on_device(buffer: cumem.Buffer) -> object:
    """Return an object that exports like CuPy: its type has `__cuda_array_interface__`."""
    fake = FakeCAI(interface_of(buffer), buffer)
    entries = fake.__cuda_array_interface__

    class OnDevice:
        keep = buffer

        @property
        def __cuda_array_interface__(self) -> object:
            return entries

    return OnDevice()
