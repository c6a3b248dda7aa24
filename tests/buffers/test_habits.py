# SPDX-License-Identifier: Apache-2.0
"""What users of NumPy, CuPy and PyTorch type: it works, or the error says what does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import operator
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
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
    kinds,
    places,
    random_array,
    same_bytes,
    shapes,
)

import cumem
from cumem.buffers import hints

BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


# -- constructors ----------------------------------------------------------------------


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
        """What only has DLPack."""

        def __init__(self, buffer: cumem.Buffer) -> None:
            self.buffer = buffer

        def __dlpack__(self, **named: Any) -> object:
            return self.buffer.__dlpack__(**named)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.buffer.__dlpack_device__()

    pinned = cumem.array([1, 2, 3], kind="pinned")
    view = cumem.asarray(Exporter(pinned))
    assert view is not pinned
    if not runtime.emulated:  # there DLPack says it is ordinary memory
        assert (view.ptr, view.kind) == (pinned.ptr, "pinned")
    assert view.tolist() == [1, 2, 3]


def test_asarray_with_a_pool_has_its_kind(runtime) -> None:
    with cumem.Pool("pinned") as pool:
        made = cumem.asarray(np.ones(4), pool=pool)
        assert made.kind == "pinned"
        assert pool.stats().live_nbytes >= 32
        del made


@pytest.mark.parametrize("kind", KINDS)
def test_ascontiguousarray_copies_only_what_is_not(runtime, kind) -> None:
    buffer = values.put(np.arange(6).reshape(2, 3), kind)
    assert cumem.ascontiguousarray(buffer) is buffer
    turned = cumem.ascontiguousarray(buffer.T)  # type: ignore[attr-defined]
    assert turned.flags.c_contiguous
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert cumem.ascontiguousarray(5.0, kind=kind).shape == (1,)


@pytest.mark.parametrize("make", [cumem.asarray, cumem.ascontiguousarray])
def test_asarray_of_a_closed_buffer_says_so(runtime, make) -> None:
    buffer = cumem.empty_pinned(3)
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        make(buffer)


# -- against NumPy ---------------------------------------------------------------------


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


# -- numbers ---------------------------------------------------------------------------


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


# -- values in print -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2000,), (20, 20, 20), (3, 1000), (2000, 1, 2)])
def test_arrays_in_elements_are_printed_whole(runtime, shape) -> None:
    """NumPy asks the threshold for them as well."""
    array = np.zeros(shape, [("x", "i4", (8,))])
    array["x"] = np.arange(array.size * 8).reshape(*shape, 8)
    assert str(cumem.array(array)) == str(array)


@pytest.mark.parametrize("backend", BACKENDS)
def test_str_is_what_numpy_prints(backend: str) -> None:
    with session.opened(backend):

        @given(
            kinds,
            dtypes,
            st.lists(st.integers(0, 12), max_size=4).map(tuple),
            st.sampled_from([0, 10, 1000]),
            st.integers(1, 4),
        )
        def check(kind, dtype, shape, threshold, edge) -> None:
            array = random_array(shape, dtype, 5)
            buffer: Any = values.put(array, kind)
            with np.printoptions(threshold=threshold, edgeitems=edge):
                assert str(buffer) == str(array)
                assert format(buffer, "") == str(array)

        check()


@pytest.mark.parametrize("kind", KINDS)
def test_format_of_one_element_is_that_of_its_number(runtime, kind) -> None:
    buffer = cumem.array([1.23456, 2], kind=kind)
    assert f"{buffer[0]:.3f} {buffer[1]!s:>4}" == "1.235  2.0"
    with pytest.raises(TypeError, match="one element"):
        f"{buffer:.3f}"


def test_str_of_a_long_device_buffer_copies_what_it_shows(runtime, monkeypatch) -> None:
    array = np.random.default_rng(0).random((50, 40, 30))
    buffer = cumem.array(array)
    copied: list[int] = []

    def copy_many(pairs: list[Any]) -> None:
        copied.extend(pair[1].size for pair in pairs)
        make(pairs)

    make = cumem._core.copy_many
    monkeypatch.setattr(cumem._core, "copy_many", copy_many)
    assert str(buffer) == str(array)
    assert sum(copied) == 6**3


def test_str_waits_for_work_and_repr_does_not(emulated) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(3, "i4")
    said: list[str] = []
    with session.gate(stream):
        buffer.fill(8, stream=stream)
        assert repr(buffer).startswith("cumem.DeviceBuffer(shape=(3,)")
        reader = threading.Thread(target=lambda: said.append(str(buffer)))
        reader.start()
        session.wait_until_waiting(reader)
    reader.join()
    assert said == ["[8 8 8]"]


@pytest.mark.parametrize("kind", KINDS)
def test_str_of_a_closed_buffer_is_its_repr(runtime, kind) -> None:
    buffer = cumem.empty(3, kind=kind)
    buffer.free()
    assert str(buffer) == repr(buffer)
    assert "closed" in str(buffer)


def test_str_during_a_capture_says_so(emulated) -> None:
    buffer = cumem.zeros(3)
    stream = cumem.Stream()
    session.testing.set_capturing(stream, True)
    with stream:
        text = str(buffer)
    session.testing.set_capturing(stream, False)
    assert str(buffer) == "[0. 0. 0.]"
    assert text.startswith(repr(buffer))
    assert "capture" in text


@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning"
)
@pytest.mark.parametrize("kind", KINDS)
def test_str_in_a_forked_child_shows_values_or_says_why(emulated, kind) -> None:
    buffer = cumem.array([1, 2, 3], "i4", kind)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, f"{buffer}\n{buffer!r}".encode())
        os._exit(0)
    os.close(write)
    said = b""
    while part := os.read(read, 4096):
        said += part
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0
    shown = said.decode().splitlines()[0]
    if kind in ("pinned", "mapped"):
        assert shown == "[1 2 3]"
    else:
        assert "values cannot be read" in shown
        assert "fork" in shown


def test_str_of_a_copy_that_fails_says_why(emulated) -> None:
    buffer = cumem.array([1, 2, 3])
    session.testing.plan_fault("copy_async", 1, 999)
    text = str(buffer)
    session.testing.plan_fault(None, 0)
    assert text.startswith(repr(buffer))
    assert "values cannot be read: " in text
    assert str(buffer) == "[1 2 3]"


# -- flags -----------------------------------------------------------------------------


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
    assert repr(flags) == "('portable',)"


def test_flags_print_as_numpys_do(emulated) -> None:
    array = np.ones((2, 3))
    flags = cumem.array(array, kind="pinned").flags
    numpys = str(array.flags).rstrip().splitlines()
    assert str(flags).splitlines() == [*numpys, "  MEMORY : portable"]


def test_flags_of_a_closed_buffer_are_those_of_its_layout(runtime) -> None:
    buffer = cumem.empty_pinned((2, 3))
    buffer.free()
    assert buffer.flags.c_contiguous


# -- hints -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_missing_members_say_what_to_type(runtime, kind) -> None:
    buffer = cumem.empty(3, kind=kind)
    for name in hints.NAMES:
        assert not hasattr(buffer, name)
        assert name in vars(cumem.Buffer)
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; "):
            getattr(buffer, name)
    assert not hints.NAMES & {*dir(buffer)}
    assert "ravel" in dir(buffer)
    for stated, owner in (
        (hints.STREAM_MEMBERS, cumem.current_stream()),
        (hints.EVENT_MEMBERS, cumem.Event()),
    ):
        for name, hint in stated.items():
            assert not hasattr(owner, name)
            with pytest.raises(AttributeError, match=re.escape(f"use {hint}")):
                getattr(owner, name)


@pytest.mark.parametrize("kind", KINDS)
def test_no_hint_sends_the_host_to_device_memory(runtime, kind) -> None:
    buffer: Any = cumem.zeros((2, 2), kind=kind)
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: buffer.take(0),
        "indices": lambda: buffer[[0, 1]],
        "truth": lambda: bool(buffer),
    }
    told, other = "buf.numpy()", "buf.to_numpy()"
    if kind == "device":
        told, other = other, told
    for name, call in calls.items():
        with pytest.raises((AttributeError, IndexError, ValueError)) as caught:
            call()
        assert told in str(caught.value), name
        assert other not in str(caught.value), name


def test_hints_are_those_of_the_extension() -> None:
    """A name that only one of the two has would be a KeyError, or never said."""
    doc = "Not there: its error says why."
    for owner, stated in (
        (cumem.Buffer, hints.NAMES),
        (cumem.Stream, {*hints.STREAM_MEMBERS}),
        (cumem.Event, {*hints.EVENT_MEMBERS}),
    ):
        assert {n for n, m in vars(owner).items() if m.__doc__ == doc} == stated


def test_protocols_are_probed_as_before(runtime) -> None:
    """Others look for these, and must find nothing, or what is true."""
    buffer = cumem.empty_pinned(3)
    for name in ("__array_interface__", "__array_struct__", "__array_ufunc__"):
        assert not hasattr(buffer, name)
        assert name not in dir(buffer)
    assert not hasattr(buffer, "__cuda_array_interface__")
    assert not hasattr(type(buffer), "__getattr__")


#: Operators of two operands, and those that change the left one.
OPERATORS: dict[str, Callable[[Any, Any], object]] = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
        *("and_", "or_", "xor", "lshift", "rshift", "lt", "le", "gt", "ge"),
    )
} | {"divmod": divmod}
IN_PLACE: dict[str, Callable[[Any, Any], object]] = {
    name: getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
}
UNARY: dict[str, Callable[[Any], object]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "round": round,
    "round to": lambda buf: round(buf, 2),
}


def check_says_where_to_compute(kind: str, call: Callable[[], object]) -> None:
    told, other = "buf.numpy()", "buf.to_numpy()"
    if kind == "device":
        told, other = other, told
    with pytest.raises(TypeError, match="buffers do not compute: use ") as caught:
        call()
    for hint in ("cupy.asarray(buf)", "torch.from_dlpack(buf)", told):
        assert hint in str(caught.value)
    assert other not in str(caught.value)


@pytest.mark.parametrize("name", [*OPERATORS, *IN_PLACE])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_say_where_to_compute(runtime, kind, name) -> None:
    compute = (OPERATORS | IN_PLACE)[name]
    buffer = cumem.zeros(3, "i4", kind)
    for other in (1, 1.5, True, 2j, [1, 2, 3], (1, 2, 3), cumem.zeros(3, kind=kind)):
        check_says_where_to_compute(kind, lambda: compute(buffer, other))  # noqa: B023
        if name in OPERATORS:
            check_says_where_to_compute(kind, lambda: compute(other, buffer))  # noqa: B023


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_one_operand_say_where_to_compute(runtime, kind, name) -> None:
    buffer = cumem.zeros(3, "i4", kind)
    check_says_where_to_compute(kind, lambda: UNARY[name](buffer))


@pytest.mark.parametrize("of", [sum, max, min, sorted])
@pytest.mark.parametrize("kind", KINDS)
def test_what_python_computes_with_says_where_to_compute(runtime, kind, of) -> None:
    buffer = cumem.zeros((3, 2), "i4", kind)
    check_says_where_to_compute(kind, lambda: of(buffer))


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("kind", KINDS)
def test_no_operator_in_place_makes_a_buffer_an_array(runtime, kind, name) -> None:
    """NumPy would answer with an array of its own, and the buffer stay as it is."""
    buffer = cumem.zeros((3, 3), "i4", kind)
    for other in (np.ones((3, 3), "i4"), np.int32(1), "text", None):
        check_says_where_to_compute(kind, lambda: IN_PLACE[name](buffer, other))  # noqa: B023


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed"])
def test_operators_with_numpys_arrays_are_numpys(runtime, kind, name) -> None:
    compute = OPERATORS[name]
    array, other = np.arange(1, 4), np.array([3, 1, 2])
    buffer = cumem.array(array, kind=kind)
    for each in (other, other[0]):
        if name == "matmul" and each.ndim == 0:
            continue
        for found, expected in (
            (compute(buffer, each), compute(array, each)),
            (compute(each, buffer), compute(each, array)),
        ):
            assert np.array_equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_strangers_are_theirs_or_pythons_error(runtime, name) -> None:
    class Stranger:
        """Answers everything."""

        def answer(self, other: object) -> str:
            return "theirs"

        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = answer
        __rfloordiv__ = __rmod__ = __rpow__ = __rand__ = __ror__ = __rxor__ = answer
        __rlshift__ = __rrshift__ = __rdivmod__ = answer
        __lt__ = __le__ = __gt__ = __ge__ = answer

    buffer = cumem.zeros(3, "i4", "pinned")
    assert OPERATORS[name](buffer, Stranger()) == "theirs"
    with pytest.raises(TypeError, match=r"not supported|unsupported operand"):
        OPERATORS[name](buffer, object())


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed"])
def test_numpy_computes_on_host_memory(runtime, kind) -> None:
    buffer = cumem.array([1.0, 2.0, 3.0], kind=kind)
    array = np.ones(3)
    assert (buffer + array).tolist() == (array + buffer).tolist() == [2, 3, 4]  # type: ignore[operator]
    assert (buffer * np.float64(2)).tolist() == [2, 4, 6]  # type: ignore[operator]
    assert np.add(buffer, 1).tolist() == [2, 3, 4]  # type: ignore[call-overload]
    assert np.sum(buffer) == 6  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "compute",
    [
        lambda buf: np.add(buf, 1),
        lambda buf: np.sum(buf),
        lambda buf: buf + np.ones(3),
        lambda buf: np.float64(2) * buf,
        lambda buf: np.asarray(buf),
    ],
)
def test_numpy_on_device_memory_says_what_to_type(runtime, compute) -> None:
    with pytest.raises(TypeError, match=r"cupy\.asarray\(buf\).*buf\.to_numpy\(\)"):
        compute(cumem.zeros(3))


def test_arguments_of_others_say_what_to_type(runtime) -> None:
    buffer, array = cumem.zeros(3), np.zeros(3)
    calls = {
        "copy_async": lambda: cumem.copy(buffer, array, non_blocking=True),  # type: ignore[call-arg]
        r"copy_async\(dst": lambda: cumem.asnumpy(buffer, blocking=False),  # type: ignore[call-arg]
        "empty_pinned": lambda: cumem.empty(3, pin_memory=True),  # type: ignore[call-arg]
        "unexpected keyword argument 'nonsense'$": lambda: cumem.copy(
            buffer,
            array,
            nonsense=1,  # type: ignore[call-arg]
        ),
    }
    for text, call in calls.items():
        with pytest.raises(TypeError, match=text):
            call()


CONSTRUCTORS: dict[str, tuple[Any, ...]] = {
    "array": ([1, 2],),
    "asarray": ([1, 2],),
    "ascontiguousarray": ([1, 2],),
    "empty": (3,),
    "empty_device": (3,),
    "empty_like": ([1, 2],),
    "empty_managed": (3,),
    "empty_mapped": (3,),
    "empty_pinned": (3,),
    "full": (3, 1),
    "full_like": ([1, 2], 1),
    "zeros": (3,),
    "zeros_like": ([1, 2],),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_constructor_says_what_to_type_for_arguments_of_others(
    emulated, name
) -> None:
    make: Any = getattr(cumem, name)
    given = CONSTRUCTORS[name]
    taken = inspect.signature(make).parameters
    for keyword, hint in hints.ARGUMENTS.items():
        if keyword in taken:
            continue
        with pytest.raises(TypeError) as caught:
            make(*given, **{keyword: True})
        text = f"{name}() got an unexpected keyword argument '{keyword}': {hint}"
        assert str(caught.value) == text
    with pytest.raises(TypeError, match=r"argument 'nonsense'$"):
        make(*given, nonsense=1)
    # what is wrong besides says so itself
    with pytest.raises(TypeError, match="missing"):
        make()
    with pytest.raises(TypeError, match="dtype"):
        make(*given, dtype=object)
    assert make(*given, "f4").dtype == np.dtype("f4")


NEEDED: dict[str, tuple[Any, ...]] = {
    "chunks": (np.ones(3),),
    "pipeline": (lambda *_: None, np.ones(3)),
    "prefetch": ([np.ones(3)],),
    "load": ("x.npy",),
    "save": ("x.npy", np.ones(3)),
    "load_safetensors": ("x",),
    "fromfile": ("x",),
    "tofile": ("x", np.ones(3)),
    "to_device": (np.ones(3),),
    "to_host": (np.ones(3),),
    "copy": (np.ones(3), np.ones(3)),
    "reshape": (1, 1),
    "transpose": (1, 0),
}


@pytest.mark.parametrize("name", hints.ARGUMENTS_OF)
def test_every_function_says_what_to_type_for_arguments_of_others(
    emulated, name: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    buffer: Any = cumem.empty_pinned((1, 1))
    call: Any = getattr(cumem if hasattr(cumem, name) else buffer, name)
    for keyword, hint in hints.ARGUMENTS_OF[name].items():
        with pytest.raises(TypeError) as caught:
            call(*NEEDED[name], **{keyword: True})
        text = f"{name}() got an unexpected keyword argument '{keyword}': {hint}"
        assert str(caught.value) == text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("library", ["torch", "numba"])
def test_dtypes_of_others_say_which_one_of_numpy_to_type(emulated, library) -> None:
    class Dtype:
        """As theirs: only its text says what it is."""

        __module__ = f"{library}.core.types"

        def __init__(self, name: str) -> None:
            self.name = name

        def __str__(self) -> str:
            return f"torch.{self.name}" if library == "torch" else self.name

    buffer: Any = cumem.zeros(4, kind="pinned")
    for name, hint in (
        ("float32", 'use "float32"'),
        ("bool", 'use "bool"'),
        ("bfloat16", "use ml_dtypes.bfloat16"),
        ("float8_e5m2", "use ml_dtypes.float8_e5m2"),
        ("quint8", "that NumPy does not have"),
    ):
        dtype: Any = Dtype(name)
        calls: dict[str, Callable[[], object]] = {
            **{
                each: functools.partial(getattr(cumem, each), *given, dtype=dtype)
                for each, given in CONSTRUCTORS.items()
            },
            "view": lambda: buffer.view(dtype),  # noqa: B023
            "astype": lambda: buffer.astype(dtype),  # noqa: B023
            "fromfile": lambda: cumem.fromfile(os.devnull, dtype),  # noqa: B023
            "chunks": lambda: cumem.chunks([buffer], dtype=dtype),  # noqa: B023
            "pipeline": lambda: cumem.pipeline(abs, buffer, dtype=dtype),  # noqa: B023
        }
        for each, call in calls.items():
            with pytest.raises(TypeError) as caught:
                call()
            assert f"is one of {library}" in str(caught.value), each
            assert str(caught.value).endswith(hint), each


def test_what_is_no_dtype_at_all_raises_numpys_error(emulated) -> None:
    for make in (cumem.empty, cumem.zeros, cumem.empty_pinned):
        with pytest.raises(TypeError, match=r"understood|interpret"):
            make(3, "nonsense")
        with pytest.raises(TypeError, match="interpret"):
            make(3, 3.5)  # type: ignore[arg-type]


def test_every_dtype_of_torch_is_one_of_numpy_or_says_so(emulated) -> None:
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    named = 0
    for dtype in dtypes:
        with pytest.raises(TypeError, match=f"dtype {dtype} is one of torch") as caught:
            cumem.empty_pinned(3, dtype)
        found = re.search(r'use (?:"(\w+)"|ml_dtypes\.(\w+))$', str(caught.value))
        if found is None:
            continue
        theirs = torch.empty(3, dtype=dtype)
        ours = cumem.empty_pinned(3, found[1] or getattr(ml_dtypes, found[2]))
        assert ours.itemsize == theirs.element_size()
        if found[1]:
            assert theirs.numpy().dtype == ours.dtype
        named += 1
    assert named >= 12


def test_dtypes_of_jax_and_cupy_are_taken(emulated) -> None:
    """CuPy's are NumPy's own; JAX's say their dtype."""
    jnp = pytest.importorskip("jax.numpy")
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64):
        for make in (cumem.empty, cumem.zeros):
            assert make(3, dtype).dtype == jnp.empty(3, dtype).dtype


def test_every_hint_of_an_argument_can_be_typed() -> None:
    """Each function that a hint names is there and takes what it is given."""
    seen = set()
    call = re.compile(r"(?:cumem\.|(?<![\w.]))(\w+)\(([^()]*)")
    texts = [*hints.ARGUMENTS.values()]
    for own in hints.ARGUMENTS_OF.values():
        texts += [text.replace("np.load(file, ", "(") for text in own.values()]
    for text in texts:
        for name, arguments in call.findall(text):
            taken = inspect.signature(getattr(cumem, name)).parameters
            assert {*re.findall(r"(\w+)=", arguments)} <= {*taken}, text
            seen.add(name)
    assert {"empty_pinned", "empty_managed", "copy_async", "asarray"} <= seen


def test_channels_last_is_had_as_its_hint_says(emulated) -> None:
    torch = pytest.importorskip("torch")
    assert (
        ".empty((n, h, w, c)).transpose(0, 3, 1, 2)" in hints.ARGUMENTS["memory_format"]
    )
    buffer = cumem.empty_pinned((2, 5, 7, 3)).transpose(0, 3, 1, 2)
    tensor = torch.from_dlpack(buffer)
    assert tensor.shape == (2, 3, 5, 7)
    assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_every_hint_of_a_member_can_be_typed(runtime) -> None:
    """Each call that a hint names exists."""
    buf = cumem.array([[1.0, 2.0]], kind="pinned")
    known: dict[str, object] = {"cumem": cumem, "buf": buf, "np": np, "stream": None}
    for text in hints.MEMBERS.values():
        for name in re.findall(r"cumem\.(\w+)\(", text):
            assert callable(getattr(cumem, name)), text
        for name in re.findall(r"\bbuf\.(\w+)", text):
            assert hasattr(buf, name), text
    for stated, cls in (
        (hints.STREAM_MEMBERS, cumem.Stream),
        (hints.EVENT_MEMBERS, cumem.Event),
    ):
        for text in stated.values():
            for name in re.findall(r"\b(?:stream|event|end)\.(\w+)", text):
                assert hasattr(cls, name), text
    assert known


def test_functions_of_others_say_what_to_type() -> None:
    for name, hint in hints.NAMES_OF_CUMEM.items():
        if name != "integrations":  # which another test may have imported
            assert not hasattr(cumem, name)
            assert name not in dir(cumem)
        for there in re.findall(r"cumem\.(\w+)\(", hint):
            assert callable(getattr(cumem, there)), hint
    with pytest.raises(AttributeError, match=r"'ones'; use cumem\.full\(shape, 1\)"):
        cumem.ones  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"attribute 'nonsense'$"):
        cumem.nonsense  # type: ignore[attr-defined]  # noqa: B018


# -- devices, streams and events -------------------------------------------------------


def test_with_device_is_current_in_the_block_alone() -> None:
    with session.opened("emulated", device_count=3):
        one, two = cumem.Device(1), cumem.Device(2)
        with one as entered:
            assert entered is one
            assert cumem.current_device() == 1
            assert cumem.empty_device(4).device == 1
            assert cumem.empty_pinned(4).device == 1
            assert cumem.empty(4, kind="device").device == 1
            assert cumem.zeros(4).device == 1
            assert cumem.current_stream().device == 1
            assert cumem.Stream().device == 1
            assert cumem.Event().device == 1
            assert cumem.default_pool("device").device == 1
            with two:
                assert cumem.array([1]).device == 2
                with one:
                    assert cumem.current_device() == 1
                assert cumem.current_device() == 2
            assert cumem.array([1]).device == 1
            assert cumem.empty_device(4, device=0).device == 0
            assert cumem.asarray([1]).device == 1
        assert cumem.current_device() == 0
        assert cumem.empty_device(4).device == 0


def test_with_device_places_memory_there(runtime) -> None:
    last = cumem.Device(cumem.device_count() - 1)
    with last:
        buffers = [cumem.zeros(4, kind=kind) for kind in KINDS]
        assert all(buffer.device == last for buffer in buffers)
        stream = cumem.Stream()
        assert stream.device == cumem.current_stream().device == last
        buffers[-1].fill(3, stream=stream)
        assert buffers[-1].tolist() == [3] * 4
    assert cumem.current_device() == 0


def test_what_is_current_is_seen_by_the_collector() -> None:
    """Else the module would keep it for ever."""
    referents = gc.get_referents(cumem._core)
    names = {each.name for each in referents if isinstance(each, ContextVar)}
    assert names == {
        *("cumem.current_stream", "cumem.current_pool", "cumem.current_device"),
    }


def test_with_device_ends_with_an_exception_and_out_of_order() -> None:
    with session.opened("emulated", device_count=3):
        with pytest.raises(KeyError), cumem.Device(2):
            raise KeyError
        assert cumem.current_device() == 0

        def block(index: int) -> Any:
            with cumem.Device(index):
                yield

        outer, inner = block(1), block(2)
        next(outer)
        next(inner)
        outer.close()
        assert cumem.current_device() == 2
        inner.close()
        assert cumem.current_device() == 0
        with pytest.raises(RuntimeError, match="not entered"):
            cumem.Device(1).__exit__(None, None, None)


def test_with_device_works_in_an_exit_stack() -> None:
    with session.opened("emulated", device_count=3):
        with contextlib.ExitStack() as stack:
            for index in (1, 2):
                assert stack.enter_context(cumem.Device(index)) == index
                assert cumem.current_device() == index
        assert cumem.current_device() == 0
        assert isinstance(cumem.Device(1), contextlib.AbstractContextManager)


def test_with_device_is_of_its_thread_and_its_task() -> None:
    with session.opened("emulated", device_count=3):
        found: dict[str, Any] = {}
        with cumem.Device(1):
            thread = threading.Thread(
                target=lambda: found.update(thread=cumem.current_device().index)
            )
            thread.start()
            thread.join()

        async def task(index: int, other: asyncio.Barrier) -> int:
            with cumem.Device(index):
                await other.wait()
                return int(cumem.empty_device(1).device.index)  # type: ignore[union-attr]

        async def run() -> list[int]:
            barrier = asyncio.Barrier(3)
            return await asyncio.gather(*(task(index, barrier) for index in range(3)))

        assert asyncio.run(run()) == [0, 1, 2]
        assert found == {"thread": 0}


def test_set_current_device_in_a_block_holds_after_it() -> None:
    with session.opened("emulated", device_count=3):
        with cumem.Device(1):
            cumem.set_current_device(2)
            assert cumem.current_device() == 1
        assert cumem.current_device() == 2
        cumem.set_current_device(0)


def test_with_device_that_a_shutdown_took_away_is_passed_over() -> None:
    with session.opened("emulated", device_count=2), cumem.Device(1):
        cumem.shutdown()
        with session.opened("emulated", device_count=1):
            assert cumem.current_device() == 0
            assert cumem.empty_device(4).device == 0


def test_synchronize_waits_for_a_device(emulated) -> None:
    stream = cumem.Stream()
    done: list[bool] = []
    with session.gate(stream):
        cumem.zeros(3).fill(1, stream=stream)
        waiter = threading.Thread(
            target=lambda: done.append(cumem.synchronize() is None)
        )
        waiter.start()
        session.wait_until_waiting(waiter)
        assert not done
    waiter.join()
    assert done == [True]
    cumem.synchronize(0)
    cumem.synchronize("cuda:0")
    with pytest.raises(ValueError, match="does not exist"):
        cumem.synchronize(99)


def test_is_available_says_whether_there_is_a_gpu(runtime) -> None:
    assert cumem.is_available() is not runtime.emulated


@pytest.mark.parametrize("name", ["cuda", "nonsense"])
def test_is_available_never_raises_and_never_warns(name) -> None:
    code = (
        "import cumem; found = cumem.is_available(); print(found);"
        "assert found == (cumem.is_available())"
    )
    environment = {**os.environ, "CUMEM_BACKEND": name, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_names_that_two_peers_share_do_what_theirs_do(emulated) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    event, later = cumem.Event(), cumem.Event()
    with session.gate(stream):
        event.record(stream)
        assert event.query() is False
        other.wait_event(event)
        assert not other.done
        with other:
            event.wait()
        event.wait(other)
    other.synchronize()
    later.record(other)
    assert event.query() is True
    assert event.elapsed_time(later) == 1000 * later.seconds_since(event)
    with pytest.raises(TypeError, match="end"):
        event.elapsed_time(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        event.wait("nonsense")


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        ("units", "units.parse_nbytes('4 KiB')", "4096"),
        ("info", "info.collect.__module__", "cumem.tools.info"),
    ],
)
def test_modules_can_be_reached_without_an_import_of_their_own(
    name, call, answer
) -> None:
    code = f"import cumem; print(cumem.{call}, {name!r} in dir(cumem))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{answer} True\n"


# -- comparing -------------------------------------------------------------------------


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
        assert not np.array_equal(buffer, buffer)  # NumPy's, as the page says
    else:
        assert (buffer == np.zeros(3)).tolist() == [True] * 3
