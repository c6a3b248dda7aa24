# SPDX-License-Identifier: Apache-2.0
"""What users of NumPy, CuPy and PyTorch type works here, or the error says what does.

Constructors, methods and flags are called as users of these libraries would, and the
answers are compared with NumPy's.
"""

from __future__ import annotations

import operator
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.strategies import (
    KINDS,
    basic_indices,
    dtypes,
    places,
    random_array,
    same_bytes,
    shapes,
)

import cumem

BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


# -- constructors -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_like_and_full_like_have_the_kind_of_their_prototype(
    runtime, kind
) -> None:
    prototype = values.put(np.ones((3, 4), "i2"), kind, "F")
    zeros = cumem.zeros_like(prototype)
    sevens = cumem.full_like(prototype, 7)
    for made in (zeros, sevens):
        assert (made.kind, made.shape, made.dtype) == (kind, (3, 4), np.dtype("i2"))
        assert made.strides == prototype.strides  # type: ignore[attr-defined]
    assert not values.get(zeros).any()
    assert (values.get(sevens) == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_like_and_full_like_of_a_list_and_of_other_arguments(
    runtime, kind
) -> None:
    zeros = cumem.zeros_like([[1, 2]], "f4", kind, order="F")
    assert (zeros.kind, zeros.dtype, zeros.shape) == (kind, np.dtype("f4"), (1, 2))
    row = cumem.full_like(np.ones((2, 3)), [1, 2, 3], kind=kind)
    assert values.get(row).tolist() == [[1, 2, 3]] * 2
    assert cumem.zeros_like(np.ones(3)).kind == "device"


def test_full_like_refuses_what_does_not_fit_but_by_casting(runtime) -> None:
    prototype = cumem.empty_pinned(3, "i4")
    with pytest.raises(TypeError, match="casting"):
        cumem.full_like(prototype, 1.5)
    cut = cumem.full_like(prototype, 1.5, casting="unsafe")
    assert cut.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_asarray_takes_what_fits_and_copies_what_does_not(runtime, kind) -> None:
    buffer = values.put(np.arange(6.0).reshape(2, 3), kind)
    assert cumem.asarray(buffer) is buffer
    assert cumem.asarray(buffer, kind=kind, dtype="f8", order="C") is buffer
    assert cumem.asarray(buffer, device=0) is buffer
    for made in (
        cumem.asarray(buffer, copy=True),
        cumem.asarray(buffer, order="F"),
        cumem.asarray(buffer, kind="mapped" if kind == "pinned" else "pinned"),
    ):
        assert made is not buffer
        assert made.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cumem.asarray(buffer, order="F").flags.f_contiguous
    assert cumem.asarray(buffer, copy=True).kind == kind
    with pytest.raises(ValueError, match="copy=False"):
        cumem.asarray(buffer, order="F", copy=False)


@pytest.mark.parametrize("kind", KINDS)
def test_asarray_of_ordinary_memory_and_of_values_is_a_copy(runtime, kind) -> None:
    array = np.arange(3, dtype="i4")
    for each in (array, cumem.asbuffer(array), [0, 1, 2], memoryview(array)):
        made = cumem.asarray(each, "i8", kind)
        assert (made.kind, made.dtype) == (kind, np.dtype("i8"))
        assert made.tolist() == [0, 1, 2]
    assert cumem.asarray(array).kind == "device"
    with pytest.raises(ValueError, match="copy=False"):
        cumem.asarray(array, copy=False)
    with pytest.raises(TypeError, match="object"):
        cumem.asarray(np.array([None]), kind=kind)


def test_asarray_of_an_exporter_of_our_memory_is_a_view(runtime) -> None:
    class Exporter:
        """An object that has only DLPack."""

        def __init__(self, buffer: cumem.Buffer) -> None:
            self.buffer = buffer

        def __dlpack__(self, **named: Any) -> object:
            return self.buffer.__dlpack__(**named)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.buffer.__dlpack_device__()

    pinned = cumem.array([1, 2, 3], kind="pinned")
    view = cumem.asarray(Exporter(pinned))
    assert view is not pinned
    # On the emulated device, DLPack says that the memory is ordinary.
    if not runtime.emulated:
        assert (view.ptr, view.kind) == (pinned.ptr, "pinned")
    assert view.tolist() == [1, 2, 3]


def test_asarray_with_a_pool_has_its_kind(runtime) -> None:
    with cumem.Pool("pinned") as pool:
        made = cumem.asarray(np.ones(4), pool=pool)
        assert made.kind == "pinned"
        assert pool.stats().live_nbytes >= 32
        del made


@pytest.mark.parametrize("kind", KINDS)
def test_asarray_in_order_copies_only_what_is_not(runtime, kind) -> None:
    buffer = values.put(np.arange(6).reshape(2, 3), kind)
    assert cumem.asarray(buffer, order="C") is buffer
    turned = cumem.asarray(buffer.T, order="C")  # type: ignore[attr-defined]
    assert turned.flags.c_contiguous
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("order", ["K", "C"])
def test_asarray_of_a_closed_buffer_says_so(runtime, order) -> None:
    buffer = cumem.empty_pinned(3)
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        cumem.asarray(buffer, order=order)


# -- against NumPy ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_ravel_flatten_squeeze_item_tolist_and_flags_equal_numpy(backend: str) -> None:
    with session.opened(backend):

        @given(st.data(), places, dtypes, shapes, st.sampled_from("CFAK"))
        def check(data, place, dtype, shape, order) -> None:
            whole = random_array(shape, dtype, 3)
            index = data.draw(basic_indices(shape))
            array = whole[index]
            if not isinstance(array, np.ndarray):
                return
            made: Any = values.put(whole, place)
            buffer = (cumem.asbuffer(made) if place == "numpy" else made)[index]
            for name in ("ravel", "flatten"):
                expected = getattr(array, name)(order)
                found = getattr(buffer, name)(order)
                assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
                assert same_bytes(found.to_numpy(), expected)
                assert found.kind == buffer.kind
            squeezed = buffer.squeeze()
            assert squeezed.shape == array.squeeze().shape
            assert same_bytes(squeezed.to_numpy(), array.squeeze())
            assert repr(buffer.tolist()) == repr(array.tolist())
            for name in ("c_contiguous", "f_contiguous", "fnc", "forc"):
                assert getattr(buffer.flags, name) == getattr(array.flags, name), name
            if array.size == 1:
                assert repr(buffer.item()) == repr(array.item())
            if array.size > 0:
                at = data.draw(st.integers(-array.size, array.size - 1))
                assert repr(buffer.item(at)) == repr(array.item(at))
                where = tuple(data.draw(st.integers(-n, n - 1)) for n in array.shape)
                assert repr(buffer.item(where)) == repr(array.item(where))

        check()


@pytest.mark.parametrize("kind", KINDS)
def test_ravel_is_a_view_where_numpys_is(runtime, kind) -> None:
    buffer: Any = values.put(np.arange(12).reshape(3, 4), kind)
    assert buffer.ravel().base is not None
    assert buffer.ravel().ptr == buffer.ptr
    assert buffer.T.ravel("F").ptr == buffer.ptr
    assert buffer.T.ravel("K").ptr == buffer.ptr
    copied = buffer.T.ravel()
    assert copied.ptr != buffer.ptr
    assert buffer.flatten().ptr != buffer.ptr


@pytest.mark.parametrize("name", ["ravel", "flatten"])
def test_ravel_and_flatten_refuse_other_orders(runtime, name) -> None:
    buffer = cumem.empty_pinned((2, 2))
    with pytest.raises(ValueError, match="'Q'"):
        getattr(buffer, name)("Q")
    with pytest.raises(TypeError, match="order"):
        getattr(buffer, name)(3)
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        getattr(buffer, name)()


@pytest.mark.parametrize("kind", KINDS)
def test_squeeze_takes_axes_as_numpy_does(runtime, kind) -> None:
    buffer = cumem.empty((1, 3, 1), kind=kind)
    assert buffer.squeeze(0).shape == (3, 1)
    assert buffer.squeeze(axis=(-1, 0)).shape == (3,)
    assert buffer.squeeze(()).shape == (1, 3, 1)
    for axis, text in (
        (1, "length 3"),
        (3, "axis 3 is out of bounds"),
        ((0, -3), "twice"),
    ):
        with pytest.raises(ValueError, match=text):
            buffer.squeeze(axis)
    with pytest.raises(TypeError, match="axis"):
        buffer.squeeze("0")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_item_refuses_what_numpy_refuses(runtime, kind) -> None:
    buffer = cumem.zeros((2, 3), kind=kind)
    with pytest.raises(ValueError, match="size 1"):
        buffer.item()
    with pytest.raises(IndexError, match="out of bounds"):
        buffer.item(6)
    with pytest.raises(IndexError, match="out of bounds"):
        buffer.item(0, 3)
    with pytest.raises(ValueError, match="incorrect number"):
        buffer.item(0, 1, 2)
    with pytest.raises(TypeError):
        buffer.item("0")  # type: ignore[arg-type]
    buffer.free()
    for call in (buffer.item, buffer.tolist):
        with pytest.raises(ValueError, match="closed"):
            call()


# -- numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_of_any_kind_is_a_number(runtime, kind) -> None:
    buffer = cumem.array([[1.5, 0.0], [-2.0, 3.0]], kind=kind)
    assert (float(buffer[0, 0]), int(buffer[1, 0])) == (1.5, -2)
    assert (complex(buffer[1, 1]), bool(buffer[0, 1])) == (3 + 0j, False)
    with pytest.raises(TypeError, match="one element"):
        float(buffer)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(buffer)


def test_a_number_of_device_memory_comes_after_the_work_on_it(emulated) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(2, "i4")
    found: list[int] = []
    with session.gate(stream):
        buffer.fill(5, stream=stream)
        reader = threading.Thread(target=lambda: found.append(int(buffer[1])))
        reader.start()
        session.wait_until_waiting(reader)
        assert not found
    reader.join()
    assert found == [5]


# -- flags ------------------------------------------------------------------------------


def test_flags_are_names_and_numpys_flags(emulated) -> None:
    buffer = cumem.empty_pinned((2, 3))
    flags = buffer.flags
    assert flags == ("portable",)
    assert flags[0] == "portable"
    assert "portable" in flags
    assert [*flags] == ["portable"]
    assert isinstance(flags, tuple)
    assert flags["C_CONTIGUOUS"] is flags["C"] is flags.c_contiguous is True
    assert flags["F_CONTIGUOUS"] is flags.f_contiguous is False
    assert flags.owndata is flags.writeable is flags.aligned is True
    assert flags.carray is True
    assert flags.farray is flags.writebackifcopy is False
    assert not buffer[0].flags.owndata
    assert not cumem.asbuffer(np.ones(3)).flags.owndata
    assert not cumem.asbuffer(b"abc").flags.writeable
    assert not buffer.view("u1")[0, 1:9].view("f8").flags.aligned
    with pytest.raises(KeyError, match="'Q'"):
        _ = flags["Q"]
    with pytest.raises(AttributeError, match="numpy"):
        flags.writeable = False  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(flags)) == ("portable",)


def test_flags_print_as_numpys_do(emulated) -> None:
    array = np.ones((2, 3))
    flags = cumem.array(array, kind="pinned").flags
    numpys = str(array.flags).rstrip().splitlines()
    assert str(flags).splitlines() == [*numpys, "  MEMORY : portable"]
    assert repr(flags) == str(flags)  # which is what a prompt shows
    assert repr(cumem.array(array).flags).endswith("  MEMORY : no flags")


def test_flags_of_a_closed_buffer_are_those_of_its_layout(runtime) -> None:
    buffer = cumem.empty_pinned((2, 3))
    buffer.free()
    assert buffer.flags.c_contiguous


# -- comparing --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 0.0, 0j, False, 2**70])
@pytest.mark.parametrize("kind", KINDS)
def test_equality_with_a_number_says_what_to_type(runtime, kind, number) -> None:
    buffer: Any = cumem.zeros((2, 2), kind=kind)
    array = "to_numpy" if kind == "device" else "numpy"
    for compare in (operator.eq, operator.ne):
        for a, b in ((buffer, number), (number, buffer)):
            with pytest.raises(TypeError, match=rf"buf\[index\]\.item.*buf\.{array}\("):
                compare(a, b)
        with pytest.raises(TypeError, match=r"write buf\.item\(\) =="):
            compare(buffer[0, 0], number)
    assert buffer[0, 0].item() == 0


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "device"])
def test_equality_with_a_number_of_numpy_is_by_element(runtime, kind) -> None:
    buffer: Any = cumem.zeros(3, kind=kind)
    for number in (np.float64(0), np.int8(0), np.False_):
        assert (buffer == number).tolist() == [True] * 3
        assert (buffer != number).tolist() == [False] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_equality_in_and_hash_are_by_identity(runtime, kind) -> None:
    buffer: Any = cumem.zeros(3, kind=kind)
    twin: Any = cumem.zeros(3, kind=kind)
    assert buffer == buffer
    assert buffer != twin
    assert buffer != buffer[:]
    assert (buffer == None) is False  # noqa: E711
    assert buffer in [twin, buffer]
    assert {buffer: 1, twin: 2}[twin] == 2
    assert hash(buffer) != hash(buffer[:])
    with pytest.raises(TypeError, match="does not search"):
        _ = 0 in buffer
    if kind == "device":
        with pytest.raises(TypeError, match="to_numpy"):
            _ = buffer == np.zeros(3)
        # This is NumPy's answer, as the documentation says.
        assert not np.array_equal(buffer, buffer)
    else:
        assert (buffer == np.zeros(3)).tolist() == [True] * 3
