# SPDX-License-Identifier: Apache-2.0
"""New memory with the same values, and the order of its elements.

Buffers are copied by copy(), by the module copy and by constructors. The order of
elements is compared with NumPy's for arrays of any layout.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import values
from support.strategies import DTYPES, KINDS

import cumem

COPIES = {
    "copy": lambda buffer: buffer.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
}
ORDERS = ["C", "F", "A", "K"]

copies = pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)


@copies
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_copy_is_of_the_same_type_and_shares_nothing(
    runtime, make, kind, shape
) -> None:
    expected = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    buffer = cumem.array(expected, kind=kind)
    new = make(buffer)
    assert type(new) is type(buffer)
    assert (new.shape, new.dtype, new.kind) == (buffer.shape, buffer.dtype, kind)
    assert (new.flags, new.device, new.base) == (buffer.flags, buffer.device, None)
    buffer.fill(-1)
    assert values.get(new).tolist() == expected.tolist()


@copies
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_of_every_dtype_keeps_every_byte(runtime, make, dtype) -> None:
    array = np.frombuffer(np.random.default_rng(0).bytes(dtype.itemsize * 6), dtype)
    new = make(cumem.array(array))
    assert new.dtype == dtype
    assert values.get(new).tobytes() == array.tobytes()


@copies
def test_copy_keeps_device_and_flags(emulated, make) -> None:
    assert make(cumem.zeros(3, device=1)).device == cumem.Device(1)
    assert make(cumem.empty_pinned(3, device=1)).device == cumem.Device(1)
    flags = make(cumem.empty_mapped(3, write_combined=True, portable=False)).flags
    assert flags == cumem.empty_mapped(3, write_combined=True, portable=False).flags
    managed = cumem.empty_managed(3, attach="host")
    assert make(managed).flags == managed.flags


@copies
def test_copy_of_ordinary_memory_is_ordinary_and_writable(runtime, make) -> None:
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    array.flags.writeable = False
    buffer = cumem.asbuffer(array)
    new = make(buffer)
    assert type(new) is cumem.HostBuffer
    assert new.readonly is False
    assert new.ptr != buffer.ptr
    assert new.numpy().tolist() == array.tolist()
    new[0] = 7


@copies
def test_copy_of_a_device_view_is_device_memory(runtime, make) -> None:
    buffer = cumem.array(np.arange(3), kind="mapped").as_device()
    new = make(buffer)
    assert type(new) is cumem.DeviceBuffer
    assert values.get(new).tolist() == [0, 1, 2]
    assert cumem.stats()["device"].live_count == 1


@copies
def test_copy_of_a_closed_buffer_is_refused(runtime, make) -> None:
    buffer = cumem.empty_pinned(3)
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        make(buffer)


def test_deepcopy_copies_a_buffer_once(runtime) -> None:
    buffer = cumem.zeros(3)
    first, second, other = copy.deepcopy([buffer, buffer, cumem.zeros(3)])
    assert first is second
    assert first is not buffer
    assert other is not first


# -- order -----------------------------------------------------------------------------


@st.composite
def arrangements(draw: st.DrawFn) -> np.ndarray:
    """Draw arrays of any order: transposed, cut, reversed, and with repeated axes."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=4)))
    array = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = [draw(st.sampled_from([1, 1, -1, 2, -2])) for _ in range(array.ndim)]
    array = array[tuple(slice(None, None, step) for step in steps)]
    if array.ndim < 4 and draw(st.booleans()):
        array = np.broadcast_to(array, (3, *array.shape))
    return array


def test_order_is_numpys(runtime) -> None:
    @given(arrangements(), st.sampled_from(ORDERS), st.sampled_from(KINDS))
    def check(array, order, kind) -> None:
        check_order(array, order, kind)

    check()


def strides(array: object) -> object:
    """Return the strides, or the shape if there are no elements."""
    return array.strides if array.size else array.shape


def check_order(array: np.ndarray, order: str, kind: str) -> None:
    """Compare the strides of new buffers and of copies with those that NumPy chooses."""
    like = cumem.empty_like(array, kind=kind, order=order)
    assert strides(like) == strides(np.empty_like(array, order=order))
    wider = cumem.empty_like(array, "f8", kind, order=order)
    assert strides(wider) == strides(np.empty_like(array, "f8", order=order))
    expected = array.copy(order)
    made = cumem.array(array, kind=kind, order=order)
    assert strides(made) == strides(expected)
    assert values.get(made).tolist() == array.tolist()
    new = made.copy(order)
    assert strides(new) == strides(expected.copy(order))
    assert values.get(new).tolist() == array.tolist()
    copied = cumem.asbuffer(array).copy(order)
    assert strides(copied) == strides(expected)
    assert copied.numpy().tolist() == array.tolist()


def test_order_that_is_not_given_is_numpys_default(runtime) -> None:
    array = np.arange(6, dtype="i4").reshape(2, 3).T
    buffer = cumem.array(array, kind="pinned")
    assert buffer.strides == np.array(array).strides == (4, 12)
    assert cumem.empty_like(buffer).strides == np.empty_like(array).strides == (4, 12)
    assert cumem.empty_like(buffer, order=None).strides == (4, 12)
    assert buffer.copy().strides == array.copy().strides == (8, 4)
    assert copy.copy(buffer).strides == copy.copy(array).strides == (4, 12)
    assert copy.deepcopy(buffer).strides == (4, 12)
    for make in (cumem.empty, cumem.zeros):
        assert make((2, 3), "i4").strides == (12, 4)


@pytest.mark.parametrize("order", ["c", "X", "", "CF"])
def test_order_that_is_none_of_them_is_refused(runtime, order) -> None:
    buffer = cumem.zeros(3)
    expected = 'order must be "C", "F", "A" or "K", not'
    for call in (
        lambda: cumem.empty_like(buffer, order=order),
        lambda: cumem.array([1], order=order),
        lambda: buffer.copy(order),
    ):
        with pytest.raises(ValueError, match=expected):
            call()
    with pytest.raises(TypeError, match="order must be"):
        buffer.copy(1)
    for make in (cumem.empty, cumem.zeros, cumem.empty_pinned, cumem.empty_device):
        with pytest.raises(ValueError, match='order must be "C" or "F", not'):
            make(3, order="K")
