# SPDX-License-Identifier: Apache-2.0
"""Shapes, axes and dtypes of views, in every spelling of NumPy.

Each call is made on a NumPy array and on a buffer. The answers must be equal or, if
NumPy copies or guesses, an error must say what to type.
"""

from __future__ import annotations

import array
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.strategies import as_view, basic_indices, dtypes, random_array, shapes

import cumem

KINDS = ["pinned", "mapped", "managed", "device"]


class Index:
    """An object that is a number by `__index__()`, as the integers of libraries are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Pair:
    """A sequence that is not a tuple, list or array."""

    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> object:
        return self.items[place]


class Broken:
    def __index__(self) -> int:
        raise ZeroDivisionError


def outcome(call: Callable[[Any], Any], on: Any) -> object:
    """Return the shape, strides and dtype of a call's answer, or the kind of its error."""
    try:
        answer = call(on)
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        for kind in (np.exceptions.AxisError, ZeroDivisionError, TypeError, ValueError):
            if isinstance(error, kind):
                return kind
        return IndexError
    return answer.shape, answer.dtype


#: Most of these calls use the array of shape (2, 3) that they get, and some make another
#: one. NumPy and cumem must answer equally.
CALLS: dict[str, Callable[[Any], Any]] = {
    "reshape(6)": lambda a: a.reshape(6),
    "reshape(3, 2)": lambda a: a.reshape(3, 2),
    "reshape((3, 2))": lambda a: a.reshape((3, 2)),
    "reshape([3, 2])": lambda a: a.reshape([3, 2]),
    "reshape(range)": lambda a: a.reshape(range(2, 4)),
    "reshape(shape)": lambda a: a.reshape(np.empty((3, 2)).shape),
    "reshape(int64)": lambda a: a.reshape(np.int64(6)),
    "reshape(int8, uint16)": lambda a: a.reshape(np.int8(3), np.uint16(2)),
    "reshape of an array": lambda a: a.reshape(np.array([3, 2])),
    "reshape of an array without axes": lambda a: a.reshape(np.array(6)),
    "reshape of arrays without axes": lambda a: a.reshape([np.array(3), np.array(2)]),
    "reshape of array.array": lambda a: a.reshape(array.array("q", [3, 2])),
    "reshape of a memoryview": lambda a: a.reshape(memoryview(b"\3\2")),
    "reshape of __index__": lambda a: a.reshape(Index(3), Index(-1)),
    "reshape of a sequence": lambda a: a.reshape(Pair(3, Index(2))),
    "reshape of a broken integer": lambda a: a.reshape(3, Broken()),
    "reshape(-1)": lambda a: a.reshape(-1),
    "reshape(2, -1, 1)": lambda a: a.reshape(2, -1, 1),
    "reshape(-1, -1)": lambda a: a.reshape(-1, -1),
    "reshape(4, -1)": lambda a: a.reshape(4, -1),
    "reshape(0, -1)": lambda a: a.reshape(0, -1),
    "reshape(5)": lambda a: a.reshape(5),
    "reshape(())": lambda a: a.reshape(()),
    "reshape()": lambda a: a.reshape(),
    "reshape of 64 axes": lambda a: a.reshape((1,) * 30 + (3,) + (1,) * 32 + (2,)),
    "reshape of 65 axes": lambda a: a.reshape((1,) * 64 + (6,)),
    "reshape(2**62, 4)": lambda a: a.reshape(2**62, 4),
    "reshape(2**32, 2**32)": lambda a: a.reshape(2**32, 2**32),
    "reshape(2**63)": lambda a: a.reshape(2**63),
    "reshape(-(2**70))": lambda a: a.reshape(-(2**70)),
    "reshape(6.0)": lambda a: a.reshape(6.0),
    "reshape(2, 3.0)": lambda a: a.reshape(2, 3.0),
    "reshape('6')": lambda a: a.reshape("6"),
    "reshape(True, 6)": lambda a: a.reshape(True, 6),
    "reshape(2, (3,))": lambda a: a.reshape(2, (3,)),
    "reshape(None, 6)": lambda a: a.reshape(None, 6),
    "reshape of a set": lambda a: a.reshape({2, 3}),
    "reshape of a dict": lambda a: a.reshape({2: 1, 3: 1}),
    "reshape of a generator": lambda a: a.reshape(i for i in (2, 3)),
    "reshape order F": lambda a: a.T.reshape(2, 3, order="F"),
    "reshape order A": lambda a: a.T.reshape(2, 3, order="A"),
    "reshape order None": lambda a: a.reshape(6, order=None),
    "reshape order K": lambda a: a.reshape(6, order="K"),
    "reshape order CF": lambda a: a.reshape(6, order="CF"),
    "reshape order 1": lambda a: a.reshape(6, order=1),
    "reshape axes=": lambda a: a.reshape(6, axes=1),
    "reshape shape=": lambda a: a.reshape(shape=6),
    "reshape of a number": lambda a: a[1, 2, ...].reshape(1, 1),
    "reshape of a number to a row": lambda a: a[1, 2, ...].reshape(-1),
    "reshape of nothing": lambda a: a[:0].reshape(5, -1),
    "reshape of nothing by 0": lambda a: a[:0].reshape(0, -1),
    "reshape of nothing to many": lambda a: a[:0].reshape(0, 2**62),
    "reshape of nothing to too many": lambda a: a[:0].reshape(0, 2**62, 2**62),
    "reshape of too many and 0": lambda a: a[:0].reshape(2**62, 2**62, 0),
    "T": lambda a: a.T,
    "transpose()": lambda a: a.transpose(),
    "transpose(None)": lambda a: a.transpose(None),
    "transpose(1, 0)": lambda a: a.transpose(1, 0),
    "transpose((1, 0))": lambda a: a.transpose((1, 0)),
    "transpose([1, -2])": lambda a: a.transpose([1, -2]),
    "transpose of an array": lambda a: a.transpose(np.array([1, 0])),
    "transpose of a range": lambda a: a.transpose(range(2)),
    "transpose of int64": lambda a: a.transpose(np.int64(1), np.int64(0)),
    "transpose(1)": lambda a: a.transpose(1),
    "transpose(())": lambda a: a.transpose(()),
    "transpose(1, 1)": lambda a: a.transpose(1, 1),
    "transpose(1, -1)": lambda a: a.transpose(1, -1),
    "transpose(0, 2)": lambda a: a.transpose(0, 2),
    "transpose(-3, 0)": lambda a: a.transpose(-3, 0),
    "transpose(None, None)": lambda a: a.transpose(None, None),
    "transpose(True, False)": lambda a: a.transpose(True, False),
    "transpose(1.0, 0)": lambda a: a.transpose(1.0, 0),
    "transpose('10')": lambda a: a.transpose("10"),
    "transpose axes=": lambda a: a.transpose(axes=(1, 0)),
    "transpose of a generator": lambda a: a.transpose(i for i in (1, 0)),
    "transpose of a number": lambda a: a[0, 0, ...].transpose(()),
    "squeeze()": lambda a: a[None, :, None].squeeze(),
    "squeeze(0)": lambda a: a[None].squeeze(0),
    "squeeze(axis=(0, -1))": lambda a: a[None, ..., None].squeeze(axis=(0, -1)),
    "squeeze(int64)": lambda a: a[None].squeeze(np.int64(0)),
    "squeeze(())": lambda a: a[None].squeeze(()),
    "squeeze(1)": lambda a: a[None].squeeze(1),
    "squeeze(3)": lambda a: a[None].squeeze(3),
    "squeeze((0, -3))": lambda a: a[None].squeeze((0, -3)),
    "squeeze(True)": lambda a: a[None].squeeze(True),
    "squeeze(0.0)": lambda a: a[None].squeeze(0.0),
    "squeeze(0, 1)": lambda a: a[None].squeeze(0, 1),
    "squeeze of a number": lambda a: a[0, 0, ...].squeeze(0),
    "squeeze of a number from the end": lambda a: a[0, 0, ...].squeeze(-1),
    "squeeze of no axis of a number": lambda a: a[0, 0, ...].squeeze(()),
    "squeeze of a second axis of a number": lambda a: a[0, 0, ...].squeeze(1),
    "view()": lambda a: a.view(),
    "view('f4')": lambda a: a.view("f4"),
    "view(dtype=)": lambda a: a.view(dtype=np.int64),
    "view(None)": lambda a: a.view(None),
    "view('V12')": lambda a: a.view("V12"),
    "view('V16')": lambda a: a.view("V16"),
    "view('V3')": lambda a: a.view("V3"),
    "view of columns": lambda a: a[:, ::2].view("f4"),
    "view of one column": lambda a: a[:, :1].view("f4"),
    "view of turned axes": lambda a: a.T.view("f4"),
    "view of turned axes as wide": lambda a: a.T.view("i8"),
    "view of a number": lambda a: a[0, 0, ...].view("f4"),
    "view of a number as wide": lambda a: a[0, 0, ...].view("i8"),
    "view of nothing": lambda a: a[:0].T.view("f4"),
    "view of empty rows": lambda a: a[:, :0].view("V16"),
    "view of objects": lambda a: a.view(object),
    "view(6)": lambda a: a.view(6),
    "view of no dtype": lambda a: a.view("nonsense"),
    "ravel order F": lambda a: a.T.ravel("F"),
    "ravel(order=)": lambda a: a.ravel(order="K"),
    "ravel order Q": lambda a: a.ravel("Q"),
    "ravel order 3": lambda a: a.ravel(3),
    "ravel(C, 1)": lambda a: a.ravel("C", 1),
    "ravel of a number": lambda a: a[0, 0, ...].ravel(),
    "ravel of nothing": lambda a: a[:0, ::2].ravel(),
    "flatten(None)": lambda a: a.flatten(None),
    "index by int64": lambda a: a[np.int64(-1)],
    "index by __index__": lambda a: a[Index(1), ...],
    "index by an array without axes": lambda a: a[np.array(1)],
    "slices of int64": lambda a: a[np.int64(1) :, :: np.int64(-2)],
    "slices of more than 64 bits": lambda a: a[-(2**70) : 2**70, :: 2**70],
    "slice of a float": lambda a: a[1.0:],
    "slice by no step": lambda a: a[::0],
    "two of Ellipsis": lambda a: a[..., ...],
    "too many": lambda a: a[0, 0, 0],
    "too large": lambda a: a[2**70],
    "a float": lambda a: a[1.0],
    "a name": lambda a: a["x"],
    "64 axes": lambda a: a[(None,) * 62],
    "65 axes": lambda a: a[(None,) * 63],
    "no index": lambda a: a[()],
    "new axes": lambda a: a[None, ..., None],
    "an index of a number": lambda a: a[0, 0, ...][0],
    "a new axis of a number": lambda a: a[0, 0, ...][None],
}


@pytest.mark.parametrize("kind", ["pinned", "device"])
@pytest.mark.parametrize("name", CALLS)
def test_call_answers_as_numpy_does(emulated, name, kind) -> None:
    if name.endswith("64 axes") and np.__version__.startswith("1."):
        pytest.skip("NumPy 1 allows 32 axes at most")
    whole = np.arange(6.0).reshape(2, 3)
    buffer = values.put(whole, kind)
    expected = outcome(CALLS[name], whole)
    assert outcome(CALLS[name], buffer) == expected
    if isinstance(expected, tuple):
        answer = CALLS[name](buffer)
        assert answer.kind == kind
        assert (values.get(answer) == CALLS[name](whole)).all()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda b: b.reshape(4, 5), ValueError, r"of 6 elements into shape \(4, 5\)"),
        (lambda b: b.reshape(4, -1), ValueError, r"into shape \(4, -1\)"),
        (lambda b: b.reshape(-2, 3), ValueError, "the negative length -2"),
        (lambda b: b.reshape(None), TypeError, "shape must be integers .* NoneType"),
        (lambda b: b.reshape((np.True_, 6)), TypeError, "shape must be .* not .*bool"),
        (lambda b: b.reshape(b"\6"), TypeError, "shape must be integers .* not bytes"),
        (lambda b: b.reshape(6, copy=True), TypeError, r"copy'.* never copies"),
        (lambda b: b.reshape(shape=6), TypeError, r"buf.reshape\(2, 3\)"),
        (lambda b: b.reshape(6, order="K"), ValueError, '"C", "F" or "A", not \'K\''),
        (lambda b: b[:, :2].reshape(-1), ValueError, r"in order 'C' .* copy\(\) it"),
        (lambda b: b.reshape(-1, order="F"), ValueError, "in order 'F'"),
        (lambda b: b.transpose(1), ValueError, "of the 2 axes, not 1 numbers"),
        (lambda b: b.transpose(0, 0), ValueError, "transpose: axis 0 is named twice"),
        (lambda b: b.transpose(0, 2), IndexError, "transpose: axis 2 is out of bounds"),
        (lambda b: b.transpose(axes=(1, 0)), TypeError, r"buf.transpose\(1, 0\)"),
        (lambda b: b.squeeze(0), ValueError, "axis 0 has length 2"),
        (lambda b: b.view(2, 3), TypeError, r"use reshape\(\)"),
        (lambda b: b.view(6), TypeError, r"use reshape\(\)"),
        (lambda b: b.ravel("Q"), ValueError, '"C", "F", "A" or "K", not \'Q\''),
        (lambda b: b.as_device(), TypeError, "needs mapped or managed memory"),
        (lambda b: b.as_device(1), TypeError, "takes no arguments"),
    ],
)
def test_refusal_says_what_to_type(emulated, call, error, match) -> None:
    with pytest.raises(error, match=match):
        call(cumem.empty_pinned((2, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_reshape_in_order_a_follows_the_buffer(runtime, kind) -> None:
    whole = np.arange(12.0).reshape(3, 4)
    buffer = values.put(whole, kind)
    for view, part in ((buffer, whole), (buffer.T, whole.T), (buffer[0], whole[0])):
        found = view.reshape(-1, order="A")
        assert (values.get(found) == part.reshape(-1, order="A")).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.reshape(-1),
        lambda b: b.transpose(1, 0),
        lambda b: b.T,
        lambda b: b.squeeze(),
        lambda b: b.view("i8"),
        lambda b: b.ravel(),
        lambda b: b.flatten(),
        lambda b: b.copy(),
        lambda b: b.astype("f8"),
        lambda b: b.astype("f8", copy=False),
        lambda b: b.as_device(),
        iter,
        reversed,
        lambda b: b[0],
    ],
)
def test_view_of_a_closed_buffer_says_so(runtime, kind, call) -> None:
    buffer = cumem.empty((2, 3), kind=kind)
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        call(buffer)


def test_buffer_that_an_integer_closes_gives_no_view(emulated) -> None:
    """__index__() is a user's code, so it may close the buffer."""

    class Closing:
        def __index__(self) -> int:
            buffer.free()
            return 1

    buffer = cumem.empty_pinned((2, 3))
    with pytest.raises(ValueError, match="closed"):
        buffer.reshape(6, Closing())
    buffer = cumem.empty_pinned((2, 3))
    with pytest.raises(ValueError, match="closed"):
        buffer.transpose(Closing(), 0)


def test_integer_that_empties_its_list_is_an_index_error(emulated) -> None:
    class Emptying:
        def __index__(self) -> int:
            lengths.clear()
            return 3

    lengths: list[Any] = [Emptying(), 2]
    with pytest.raises(IndexError):
        cumem.empty_pinned((2, 3)).reshape(lengths)


# -- against NumPy ---------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
def test_axes_that_do_not_step_as_one_are_not_joined(emulated, order) -> None:
    whole = np.arange(24).reshape(4, 6)
    for part in (whole[:, :3], whole[::2], whole[:, :3].T):
        buffer = cumem.asbuffer(part)
        expected = part.reshape(-1, order=order)
        if np.may_share_memory(expected, whole):
            assert (buffer.reshape(-1, order=order).to_numpy() == expected).all()
        else:
            with pytest.raises(ValueError, match="copy"):
                buffer.reshape(-1, order=order)


@st.composite
def cut(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Draw lengths whose product is `size`, some of which are 1."""
    lengths = []
    while size > 1 and len(lengths) < 8:
        factors = [f for f in range(2, size + 1) if size % f == 0]
        factor = draw(st.sampled_from(factors))
        lengths.append(factor)
        size //= factor
    lengths += [size] * (size != 1)
    for _ in range(draw(st.integers(0, 3))):
        lengths.insert(draw(st.integers(0, len(lengths))), 1)
    return tuple(lengths)


def test_any_reshape_equals_numpys_or_refuses_where_numpy_copies() -> None:
    """The views are cut, transposed, reversed and, with strides of 0, repeated."""
    with session.opened("emulated"):

        @given(st.data(), dtypes, shapes, st.sampled_from("CFA"))
        def check(data, dtype, shape, order) -> None:
            whole = random_array(shape, dtype, 1)
            if data.draw(st.booleans()):
                whole = np.broadcast_to(whole, (data.draw(st.integers(1, 3)), *shape))
            part = whole[as_view(data.draw(basic_indices(whole.shape)))]
            part = part.transpose(data.draw(st.permutations(range(part.ndim))))
            buffer = cumem.asbuffer(part)
            new: Any = data.draw(cut(part.size)) if part.size else part.shape[::-1]
            if new and part.size and data.draw(st.booleans()):
                place = data.draw(st.integers(0, len(new) - 1))
                new = (*new[:place], -1, *new[place + 1 :])
            expected = part.reshape(new, order=order)
            if part.size and not np.may_share_memory(expected, part):
                with pytest.raises(ValueError, match="copy"):
                    buffer.reshape(new, order=order)
                return
            for found in (
                buffer.reshape(new, order=order),
                buffer.reshape(*new, order=order) if new else buffer.reshape(()),
            ):
                assert found.shape == expected.shape
                for n, a, b in zip(
                    found.shape, found.strides, expected.strides, strict=True
                ):
                    assert a == b or n <= 1 or part.size == 0
                assert found.to_numpy().tobytes() == expected.tobytes()

        check()


def test_turned_and_squeezed_views_equal_numpys() -> None:
    with session.opened("emulated"):

        @given(st.data(), dtypes, shapes)
        def check(data, dtype, shape) -> None:
            whole = random_array(shape, dtype, 2)
            index = as_view(data.draw(basic_indices(shape)))
            part, view = whole[index], values.put(whole, "pinned")[index]
            axes = data.draw(st.permutations(range(part.ndim)))
            axes = [a - part.ndim if data.draw(st.booleans()) else a for a in axes]
            ones = [i for i, length in enumerate(part.shape) if length == 1]
            some = tuple(data.draw(st.sets(st.sampled_from(ones)))) if ones else ()
            for call in (
                lambda a: a.T,
                lambda a: a.transpose(axes),
                lambda a: a.transpose(*axes),
                lambda a: a.squeeze(),
                lambda a: a.squeeze(some),
            ):
                expected, found = call(part), call(view)
                assert found.shape == expected.shape
                assert found.base is not None
                assert found.to_numpy().tobytes() == expected.tobytes()

        check()


def test_rows_of_a_buffer_are_those_of_the_array() -> None:
    with session.opened("emulated"):

        @given(st.data(), dtypes, shapes)
        def check(data, dtype, shape) -> None:
            whole = random_array(shape, dtype, 4)
            index = as_view(data.draw(basic_indices(shape)))
            part, view = whole[index], values.put(whole, "pinned")[index]
            if part.ndim == 0:
                for walk in (iter, reversed):
                    with pytest.raises(TypeError, match="without dimensions"):
                        walk(view)
                return
            for walk in (iter, reversed):
                rows = list(walk(view))
                places = list(walk(range(len(part))))
                for row, place in zip(rows, places, strict=True):
                    expected = part[place, ...]
                    assert row.shape == expected.shape
                    assert row.to_numpy().tobytes() == expected.tobytes()

        check()


@pytest.mark.parametrize("kind", KINDS)
def test_row_iterator_goes_on_where_it_stopped(runtime, kind) -> None:
    buffer = cumem.zeros((3, 2), kind=kind)
    rows = iter(buffer)
    assert iter(rows) is rows
    assert rows.__length_hint__() == 3  # type: ignore[attr-defined]
    assert next(rows).ptr == buffer.ptr
    assert [row.ptr - buffer.ptr for row in rows] == [16, 32]
    assert next(rows, None) is None
    last = next(reversed(buffer))
    assert last.ptr - buffer.ptr == 32
    del buffer, rows
    assert values.get(last).tolist() == [0.0, 0.0]


def test_row_of_a_buffer_that_was_closed_meanwhile_says_so(emulated) -> None:
    buffer = cumem.zeros((3, 2), kind="pinned")
    rows = iter(buffer)
    next(rows)
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        next(rows)


# -- flags -----------------------------------------------------------------------------


def test_flags_of_any_view_equal_numpys() -> None:
    with session.opened("emulated"):

        @given(st.data(), dtypes, shapes)
        def check(data, dtype, shape) -> None:
            whole = random_array(shape, dtype, 5)
            index = as_view(data.draw(basic_indices(shape)))
            part = whole[index]
            part = part.transpose(data.draw(st.permutations(range(part.ndim))))
            part.flags.writeable = data.draw(st.booleans())
            flags = cumem.asbuffer(part).flags
            for name in ("C", "F", "W", "FNC", "FORC"):
                assert flags[name] == part.flags[name], name
            if part.size:
                for name in ("A", "B", "CA"):
                    assert flags[name] == part.flags[name], name
            assert not flags.owndata

        check()


@pytest.mark.parametrize("offset", range(9))
def test_flags_of_memory_that_is_not_aligned_say_so(emulated, offset) -> None:
    memory = np.zeros(64, "u1")
    part = memory[offset : offset + 32].view("f4")
    assert cumem.asbuffer(part).flags.aligned == part.flags.aligned
    pinned = cumem.asbuffer(memory)[offset : offset + 32].view("f4")
    assert pinned.flags.aligned == part.flags.aligned


@pytest.mark.parametrize("kind", KINDS)
def test_flags_stay_as_they_were_read(runtime, kind) -> None:
    """Flags are kept and shared, so nobody can change them."""
    buffer = cumem.empty((2, 3), kind=kind)
    flags = buffer.flags
    assert flags.owndata
    assert not buffer[:].flags.owndata
    assert buffer.T.flags.f_contiguous
    assert not buffer.T.flags.c_contiguous
    for name in ("c_contiguous", "writeable"):
        with pytest.raises(AttributeError, match="cannot be set"):
            setattr(flags, name, False)
    buffer.free()
    assert flags.c_contiguous
    assert buffer.flags.c_contiguous


# -- copies ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "pageable"])
@pytest.mark.parametrize("name", ["flatten", "ravel"])
def test_row_that_was_copied_is_a_buffer_of_its_own(runtime, kind, name) -> None:
    whole = np.arange(12.0).reshape(3, 4)
    if kind == "pageable":
        buffer: Any = cumem.asbuffer(whole)
    else:
        buffer = values.put(whole, kind)
    row = getattr(buffer.T, name)()
    assert row.base is None
    assert (row.kind, row.device, row.shape) == (buffer.kind, buffer.device, (12,))
    assert (row.to_numpy() == whole.T.ravel()).all()
    if kind != "pageable":
        assert row.flags.owndata


@pytest.mark.parametrize("make", [cumem.empty_pinned, cumem.empty_mapped])
def test_copies_have_the_flags_of_the_buffer(runtime, make) -> None:
    buffer: Any = make((2, 3), write_combined=True, portable=False)
    for made in (
        buffer.copy(),
        buffer.flatten(),
        buffer.T.ravel(),
        buffer.astype("f8"),
    ):
        assert tuple(made.flags) == tuple(buffer.flags)
        assert made.kind == buffer.kind


@pytest.mark.parametrize("order", ["C", "F", "A", "K", None])
@pytest.mark.parametrize("kind", [*KINDS, "pageable"])
def test_astype_of_its_own_dtype_is_numpys(runtime, kind, order) -> None:
    whole = np.arange(24.0).reshape(2, 3, 4)
    buffer: Any = cumem.asbuffer(whole)
    if kind != "pageable":
        buffer = values.put(whole, kind)
    whole, buffer = whole.transpose(1, 2, 0), buffer.transpose(1, 2, 0)
    same = buffer.astype("f8", order, copy=False)
    assert (same is buffer) == (order in ("K", None))
    made = buffer.astype(buffer.dtype, order)
    expected = whole.astype(whole.dtype, order or "K")
    assert made.base is None
    assert made.strides == expected.strides
    assert (made.to_numpy() == expected).all()
    with pytest.raises(ValueError, match="casting must be one of"):
        buffer.astype("f8", casting="nonsense")


def test_copy_is_ordered_like_any_other_copy(emulated) -> None:
    """cumem knows of work on the buffer, and a copy begins only when this work is done."""
    stream = cumem.Stream()
    buffer = cumem.zeros(math.prod((64, 64)), "f4")
    with session.gate(stream):
        buffer.fill(1, stream=stream)
        made = buffer.reshape(64, 64)
    assert (made.T.ravel().to_numpy() == 1).all()
    assert (made.copy().to_numpy() == 1).all()


# -- one element -----------------------------------------------------------------------

#: These calls take an array of integers of shape (2, 3). NumPy and cumem must answer
#: equally.
ITEMS: dict[str, Callable[[Any], Any]] = {
    "item(4)": lambda a: a.item(4),
    "item(-6)": lambda a: a.item(-6),
    "item(1, 2)": lambda a: a.item(1, 2),
    "item(-2, -3)": lambda a: a.item(-2, -3),
    "item((1, 2))": lambda a: a.item((1, 2)),
    "item((4,))": lambda a: a.item((4,)),
    "item(int64, __index__)": lambda a: a.item(np.int64(1), Index(0)),
    "item(6)": lambda a: a.item(6),
    "item(-7)": lambda a: a.item(-7),
    "item(0, 3)": lambda a: a.item(0, 3),
    "item(2, 0)": lambda a: a.item(2, 0),
    "item()": lambda a: a.item(),
    "item(())": lambda a: a.item(()),
    "item(1, 1, 1)": lambda a: a.item(1, 1, 1),
    "item(1.0)": lambda a: a.item(1.0),
    "item('1')": lambda a: a.item("1"),
    "item(True)": lambda a: a.item(True),
    "item(2**63)": lambda a: a.item(2**63),
    "item of a number": lambda a: a[1, 1, ...].item(),
    "item(0) of a number": lambda a: a[1, 1, ...].item(0),
    "item(()) of a number": lambda a: a[1, 1, ...].item(()),
    "item(1) of a number": lambda a: a[1, 1, ...].item(1),
    "item of one": lambda a: a[1:, 1:2].item(),
    "item of nothing": lambda a: a[:0].item(),
    "item(0) of nothing": lambda a: a[:0].item(0),
    "item of a turned one": lambda a: a.T[::-1, ::-1].item(1),
    "int": lambda a: int(a[1, 2, ...]),
    "float": lambda a: float(a[1, 2, ...]),
    "complex": lambda a: complex(a[1, 2, ...]),
    "bool": lambda a: bool(a[0, 0, ...]),
    "int of many": int,
    "float of many": float,
    "complex of many": complex,
    "bool of many": bool,
    "bool of none": lambda a: bool(a[:0]) if isinstance(a, cumem.Buffer) else bool(a),
    "format": lambda a: f"{a[1, 2, ...]:+05d}",
    "format of many": lambda a: f"{a:d}",
    "format nonsense": lambda a: f"{a[1, 2, ...]:nonsense}",
    "tolist": lambda a: a.tolist(),
    "tolist of a number": lambda a: a[1, 2, ...].tolist(),
    "tolist of columns": lambda a: a[:, ::-2].tolist(),
    "bytes": lambda a: bytes(a) if isinstance(a, cumem.Buffer) else a.tobytes(),
    "bytes of columns": lambda a: (
        bytes(a[:, ::-2]) if isinstance(a, cumem.Buffer) else a[:, ::-2].tobytes()
    ),
}


@pytest.mark.parametrize("kind", [*KINDS, "pageable", "as_device"])
@pytest.mark.parametrize("name", ITEMS)
def test_element_of_any_memory_is_numpys(emulated, name, kind) -> None:
    whole = np.arange(6, dtype="i2").reshape(2, 3)
    if kind == "pageable":
        buffer: Any = cumem.asbuffer(whole.copy())
    elif kind == "as_device":
        buffer = values.put(whole, "managed").as_device()  # type: ignore[attr-defined]
    else:
        buffer = values.put(whole, kind)

    def answer(on: Any) -> tuple[object, ...]:
        try:
            found = ITEMS[name](on)
        except (IndexError, TypeError, ValueError) as error:
            # If an integer does not fit an index, NumPy raises an OverflowError.
            return (type(error),)
        except OverflowError:
            return (ValueError,)
        return type(found), found

    assert answer(buffer) == answer(whole)
    buffer.free()  # None of the answers may keep the buffer's memory alive.


@pytest.mark.parametrize("kind", KINDS)
def test_element_that_refers_to_memory_has_its_own(runtime, kind) -> None:
    """An array within a structure, for example, is not a view of the buffer."""
    whole = np.zeros(3, [("x", "f4", (2,)), ("y", "i4")])
    buffer: Any = values.put(whole, kind)
    row = buffer.item(1)[0]
    assert row.tolist() == [0.0, 0.0]
    buffer.fill(np.ones(1, whole.dtype)[0])
    cumem.current_stream().synchronize()
    assert row.tolist() == [0.0, 0.0]
    buffer.free()
    assert row.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("read", [int, float, bool, complex, lambda b: b.item()])
@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_element_is_read_after_the_transfer_into_it(emulated, kind, read) -> None:
    source = cumem.array([5], dtype="i4", kind="pinned")
    buffer = cumem.zeros(1, "i4", kind)
    target = buffer.reshape(())
    stream = cumem.Stream()
    found: list[Any] = []
    with session.gate(stream):
        done = cumem.copy_async(buffer, source, stream=stream)
        reader = threading.Thread(target=lambda: found.append(read(target)))
        reader.start()
        session.wait_until_waiting(reader)
        assert not found
    reader.join()
    done.wait()
    assert found == [read(5) if read in (int, float, bool, complex) else 5]


def test_array_protocol_copies_and_converts_as_it_is_asked(runtime) -> None:
    buffer: Any = values.put(np.arange(6.0).reshape(2, 3).T, "pinned")
    assert np.shares_memory(buffer.__array__(), buffer.numpy())
    assert np.shares_memory(buffer.__array__("f8", copy=False), buffer.numpy())
    assert not np.shares_memory(buffer.__array__(copy=True), buffer.numpy())
    assert buffer.__array__(np.int8).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert np.asarray(buffer, dtype=object).dtype == object
    with pytest.raises(ValueError, match="another dtype needs a copy"):
        buffer.__array__("i4", copy=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kind'"):
        buffer.__array__(kind="pinned")
    with pytest.raises(TypeError, match="the host cannot read device memory"):
        cumem.empty(3).__array__()
