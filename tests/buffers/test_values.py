# SPDX-License-Identifier: Apache-2.0
"""Values that become elements come back equal or are refused.

Integers near the ends of each dtype, floats, texts, dates and records are written by
fill(), `buffer[...] =` and array(), and compared with what NumPy makes of them.
"""

from __future__ import annotations

import contextlib
import datetime
import fractions
import sys
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support import values

import cumem

ml_dtypes = pytest.importorskip("ml_dtypes")

#: Older releases of ml_dtypes lack these dtypes.
COMPLEX32 = [
    getattr(ml_dtypes, name)
    for name in ("complex32", "bcomplex32")
    if hasattr(ml_dtypes, name)
]
PAIR = [("a", "i4"), ("b", "u1")]
NESTED = [("a", "i4"), ("b", [("x", "f2"), ("y", "S2")]), ("c", "u1", (2,))]


def write_fill(buffer: cumem.Buffer, value: object) -> None:
    buffer.fill(value)


def write_setitem(buffer: cumem.Buffer, value: object) -> None:
    buffer[...] = value


def write_array(buffer: cumem.Buffer, value: object) -> None:
    cumem.copy(buffer, cumem.array(value, buffer.dtype, "pinned"))


WRITERS = [write_fill, write_setitem, cumem.copy, write_array]

#: Each entry has a dtype, a value that the dtype would change, and the error.
CHANGED = [
    ([("a", "i4"), ("b", "u1")], [(1.7, 2), (3, 4)], TypeError),
    (PAIR, (1, 300), OverflowError),
    (PAIR, [(1, 2), (3,)], (ValueError, TypeError)),
    (NESTED, (1, (1e6, b"ab"), (1, 2)), OverflowError),
    (NESTED, (1, (1.5, b"abc"), (1, 2)), ValueError),
    (NESTED, (1, (1.5, b"ab"), (1, 256)), OverflowError),
    ("U2", "abcdef", ValueError),
    ("S2", [b"abcdef", b"x"], ValueError),
    ("S2", "é", ValueError),
    ("S2", 12345, TypeError),
    ("S9", 5, TypeError),
    ("U9", ["a", 5], TypeError),
    ("V4", b"abcde", ValueError),
    ("M8[s]", 1.5, TypeError),
    ("m8[s]", [1.5, 2.5], TypeError),
    ("M8[s]", np.datetime64("2020-01-01T00:00:00.500", "ms"), ValueError),
    ("M8[D]", "2020-01-01T12:00", ValueError),
    ("M8[ns]", np.datetime64("3000-01-01"), (ValueError, OverflowError)),
    ("M8[s]", np.timedelta64(5, "s"), TypeError),
    ("m8[s]", datetime.timedelta(milliseconds=5), ValueError),
    (ml_dtypes.int4, 100, OverflowError),
    (ml_dtypes.int4, 1.5, TypeError),
    (ml_dtypes.float8_e4m3fn, 1e9, OverflowError),
    (ml_dtypes.float8_e4m3fn, np.inf, OverflowError),
    (ml_dtypes.float4_e2m1fn, 100.0, OverflowError),
    (ml_dtypes.float4_e2m1fn, np.nan, OverflowError),
    (ml_dtypes.bfloat16, "1", TypeError),
    ("i4", ml_dtypes.bfloat16(1.5), TypeError),
    *(("f8", complex32(1 + 2j), TypeError) for complex32 in COMPLEX32),
    *((complex32, 1e39j, OverflowError) for complex32 in COMPLEX32),
    ("f2", 100000, OverflowError),
    ("f2", 2**70, OverflowError),
    ("f4", 1e300, OverflowError),
    ("f4", [1.0, -1e300], OverflowError),
    ("f8", 10**400, OverflowError),
    ("f8", [None, 1.0], TypeError),
    ("f8", Decimal(1), TypeError),
    ("c8", 1e300j, OverflowError),
    ("f8", 1j, TypeError),
    ("i8", 2**70, OverflowError),
    ("u8", 2**64, OverflowError),
    ("u8", [-1, 2**63], OverflowError),
    ("i8", np.uint64(2**63), OverflowError),
    ("u8", [1.5, 2**63], TypeError),
    ("i4", ["1", 2], TypeError),
    ("?", 2, OverflowError),
]

#: Each entry has a dtype, a value, and the two elements that the value becomes.
KEPT = [
    (PAIR, [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    (NESTED, (1, (1.5, "ab"), (2, 3)), [(1, (1.5, b"ab"), [2, 3])] * 2),
    ("S8", ["abc", b"x"], [b"abc", b"x"]),
    ("U3", "abc", ["abc"] * 2),
    ("V4", b"ab", [b"ab\0\0"] * 2),
    ("M8[D]", "2020-01-01T00:00", [datetime.date(2020, 1, 1)] * 2),
    ("M8[s]", datetime.datetime(2020, 1, 1), [datetime.datetime(2020, 1, 1)] * 2),
    ("m8[s]", 60, [datetime.timedelta(minutes=1)] * 2),
    ("m8[ms]", np.timedelta64(2, "s"), [datetime.timedelta(seconds=2)] * 2),
    ("M8[s]", "NaT", [None] * 2),
    ("f4", 0.1, [float(np.float32(0.1))] * 2),
    ("f2", 65519.0, [65504.0] * 2),
    ("f4", [1e-300, np.inf], [0.0, np.inf]),
    ("f4", 2**24 + 1, [float(2**24)] * 2),
    ("f8", 2**70, [float(2**70)] * 2),
    ("c16", [2**70, 1j], [complex(2**70), 1j]),
    ("f4", ml_dtypes.bfloat16(1.5), [1.5] * 2),
    (ml_dtypes.bfloat16, 0.1, [float(ml_dtypes.bfloat16(0.1))] * 2),
    (ml_dtypes.float4_e2m1fn, 2.4, [2.0] * 2),
    (ml_dtypes.int4, [-8, 7], [-8, 7]),
    *((complex32, 1 + 2j, [1 + 2j] * 2) for complex32 in COMPLEX32),
    *((complex32, [1.5, 2j], [1.5, 2j]) for complex32 in COMPLEX32),
    *(("c8", complex32(1 + 2j), [1 + 2j] * 2) for complex32 in COMPLEX32),
    ("u8", [2**63, 1], [2**63, 1]),
    ("u8", 2**63, [2**63] * 2),
    (">i4", [1, 2], [1, 2]),
    ("?", [0, 1], [False, True]),
]


#: These numbers lie at the ends of dtypes that the extension reads itself, and just
#: beyond them.
NUMBERS = [
    *(
        sign * (2**power + step)
        for power in (0, 7, 8, 15, 16, 24, 31, 32, 53, 63, 64)
        for sign in (1, -1)
        for step in (-1, 0, 1)
    ),
    *(True, 2**70, 10**400, 0.0, -0.0, 0.1, 1.5, 65519.0, 65520.0, 3.39e38, 3.4e38),
    *(3.5e38, 1e300, 1e-300, float("inf"), -float("inf"), float("nan")),
    *(1j, -1.5 + 2j, 1e39j, 1e300 + 1j, complex("inf"), complex("nan")),
]
NUMBER_DTYPES = [
    *(
        np.dtype(code).newbyteorder(order)
        for code in "?bBhHiIqQefdFD"
        for order in "=S"
    ),
    *(np.dtype(ml_dtypes.bfloat16).newbyteorder(order) for order in "=S"),
]


def outcome(read: Any) -> object:
    """Return the call's answer, or the type of its error."""
    try:
        return read()
    except (OverflowError, TypeError) as error:
        return type(error)


def fill_and_read(buffer: cumem.Buffer, value: object) -> bytes:
    buffer.fill(value)
    return buffer.numpy().tobytes()


@pytest.mark.parametrize("dtype", NUMBER_DTYPES, ids=str)
def test_number_and_scalar_become_what_an_array_of_them_becomes(
    emulated, dtype
) -> None:
    """The extension reads a single number, and NumPy reads a list: both must agree."""
    alone, listed = (cumem.zeros(1, dtype, "pinned") for _ in range(2))
    values = list(NUMBERS)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in NUMBER_DTYPES[::2]:
            for number in (0, 1, -1, 300, 1.5, 70_000, 1e30, 2j, float("nan")):
                # NumPy 2 itself refuses some of these.
                with contextlib.suppress(OverflowError):
                    values.append(np.asarray(number).astype(each)[()])
    for value in values:
        found = outcome(lambda value=value: fill_and_read(alone, value))
        assert found == outcome(lambda value=value: fill_and_read(listed, [value])), (
            value
        )


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("dtype", "value", "error"), CHANGED, ids=repr)
def test_value_that_would_change_is_refused_and_nothing_written(
    runtime, write, dtype, value, error
) -> None:
    buffer = cumem.zeros(2, dtype, "pinned")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error):
            write(buffer, value)
    assert buffer.numpy().tobytes() == bytes(buffer.nbytes)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("dtype", "value", "expected"), KEPT, ids=repr)
def test_value_that_keeps_its_meaning_is_converted(
    runtime, write, dtype, value, expected
) -> None:
    buffer = cumem.zeros(2, dtype, "pinned")
    write(buffer, value)
    array = buffer.numpy()
    found = [bytes(item) for item in array] if dtype == "V4" else array.tolist()
    if dtype == NESTED:
        found = [(a, b, list(c)) for a, b, c in found]
    assert found == expected


def test_nan_stays_nan(runtime) -> None:
    for dtype in ("f2", "f4", "c8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        made = cumem.full(2, [float("nan"), 1.0], dtype, "pinned").numpy()
        assert np.isnan(made.astype("c16")).tolist() == [True, False]


#: Each entry has a dtype, and an array that is converted to it.
ARRAYS = [
    (PAIR, np.array((1.7, 300), [("a", "f8"), ("b", "i4")])),
    (PAIR, np.array((1, 7), [("a", "i8"), ("b", "u2")])),
    ([("a", "i4")], np.array([1.5, 2.5])),
    ("S2", np.array(b"abcdef")),
    ("S8", np.array(b"abcdef")),
    ("M8[s]", np.array([1.5, 2.5])),
    ("M8[s]", np.array(["2020-01-01T00:00:00.500"] * 2, "M8[ms]")),
    ("i1", np.array([[1, 300]])[:, ::-1]),
    ("u1", np.array([1, 300])),
    (ml_dtypes.bfloat16, np.array([1.0, 3e39])),
    (ml_dtypes.int4, np.array([1, 7], "i1")),
    ("c8", np.array([1j, 2])),
    (">f4", np.array([1.5, 1e300])),
]


@pytest.mark.parametrize("kind", ["pinned", "device"])
@pytest.mark.parametrize(("dtype", "value"), ARRAYS, ids=repr)
def test_array_is_converted_by_rule_and_not_by_value(
    runtime, kind, dtype, value
) -> None:
    buffer = cumem.zeros(2, dtype, "pinned")
    wanted = buffer.dtype
    for given in (value, cumem.array(value, kind=kind)):
        if value.dtype != wanted:
            with pytest.raises(TypeError, match="fill: source has dtype"):
                buffer.fill(given)
        if not np.can_cast(value.dtype, wanted, "same_kind"):
            with pytest.raises(TypeError, match="'same_kind' does not allow"):
                cumem.full(2, given, dtype, kind)
            with pytest.raises(TypeError, match="'same_kind' does not allow"):
                cumem.array(given, dtype, kind)
            continue
        with np.errstate(all="ignore"):
            expected = value.astype(wanted)
        made = values.get(cumem.array(given, dtype, kind))
        assert made.tobytes() == expected.tobytes()
        same_length = np.broadcast_to(expected, np.broadcast_shapes(value.shape, 2))
        if same_length.ndim == 1:
            made = values.get(cumem.full(2, given, dtype, kind))
            assert made.tobytes() == same_length.tobytes()
    assert buffer.numpy().tobytes() == bytes(buffer.nbytes)


INTEGERS = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
REALS = ["f2", "f4", "f8"]


def ends_of(dtype: str) -> tuple[int, int]:
    """The least and the largest integer of a dtype."""
    if dtype == "?":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def near_ends(dtype: str) -> st.SearchStrategy[int]:
    """Draw integers of a dtype near its ends and near those of all other dtypes."""
    low, high = ends_of(dtype)
    near = {end + step for d in INTEGERS for end in ends_of(d) for step in (-1, 0, 1)}
    return st.sampled_from(sorted(i for i in near if low <= i <= high))


def test_integers_of_another_dtype_come_back_equal_or_are_refused(runtime) -> None:
    """Python's integers, which never wrap around, say which values are right."""

    @drawn(st.sampled_from(INTEGERS), st.sampled_from(INTEGERS), st.data())
    def check(source: str, to: str, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(near_ends(source), min_size=1, max_size=5))
        if data.draw(st.booleans()):
            check_integers(np.array(numbers[::-1], source)[::-1], numbers, to)
        else:
            check_integers(np.array(numbers, source), numbers, to)

    check()


def check_integers(array: np.ndarray, numbers: list[int], to: str) -> None:
    """Check that all ways to write integers keep each value, or fail and write nothing."""
    low, high = ends_of(to)
    fits = all(low <= number <= high for number in numbers)
    target = cumem.zeros(len(numbers), to, "pinned")
    for made in (
        lambda: cumem.array(numbers, to, "pinned"),
        lambda: cumem.array(list(array), to, "pinned"),
        lambda: cumem.full(len(numbers), list(array), to, "pinned"),
        lambda: target.fill(numbers) or target,
        lambda: write_setitem(target, numbers) or target,
    ):
        if fits:
            assert [int(number) for number in made().numpy()] == numbers
        else:
            with pytest.raises((OverflowError, TypeError)):
                made()
    assert fits or not target.numpy().any()


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 1.0, float("nan"), float("inf"), 1e300, 1j])
def test_reals_are_no_integers(runtime, to, value) -> None:
    for given in (value, [value], np.array(value), np.array([value] * 2)):
        with pytest.raises(TypeError):
            cumem.array(given, to, "pinned")
    for call in (
        lambda: cumem.full(2, value, to, "pinned"),
        lambda: cumem.zeros(2, to, "pinned").fill(np.float64(abs(value))),
        lambda: write_setitem(cumem.zeros(2, to, "pinned"), value),
    ):
        with pytest.raises(TypeError):
            call()


def test_numbers_in_a_real_are_rounded_as_numpy_rounds_or_refused(runtime) -> None:
    @drawn(st.sampled_from(REALS + INTEGERS), st.sampled_from(REALS), st.data())
    def check(source: str, to: str, data: st.DataObject) -> None:
        array = data.draw(arrays(source, st.integers(1, 5)))
        with np.errstate(all="ignore"):
            rounded = array.astype(to)
        if (np.isinf(rounded) & np.isfinite(array)).any():
            with pytest.raises(OverflowError):
                cumem.array(list(array), to, "pinned")
        else:
            made = cumem.array(list(array), to, "pinned").numpy()
            assert made.dtype == np.dtype(to)
            np.testing.assert_array_equal(made, rounded)

    check()


@pytest.mark.parametrize("order", ["C", "F", "K"])
@pytest.mark.parametrize(("source", "to"), [("f8", "f4"), ("i8", "i1"), ("u1", "i4")])
def test_array_of_another_dtype_is_laid_out_as_one_of_the_same(
    runtime, order, source, to
) -> None:
    array = np.arange(24, dtype=source).reshape(2, 3, 4)
    for view in (
        array,
        array.T,
        array.transpose(1, 0, 2),
        array[:, ::2],
        array[:, ::-1],
    ):
        made = cumem.array(view, to, "pinned", order=order)
        same = cumem.array(view.astype(to, order="K"), kind="pinned", order=order)
        assert (made.numpy() == view).all()
        assert made.strides == same.strides


@pytest.mark.parametrize(("source", "to"), [("f8", "f4"), ("i8", "u1"), ("U3", "U2")])
def test_one_value_at_the_end_of_a_long_list_is_looked_at(runtime, source, to) -> None:
    array = np.ones(100_003, source)
    assert (cumem.array(array.tolist(), to, "pinned").numpy() == array).all()
    array[-1] = {"f8": 1e300, "i8": 256, "U3": "abc"}[source]
    with pytest.raises((OverflowError, ValueError), match="does not fit"):
        cumem.array(array.tolist(), to)


@pytest.mark.parametrize(
    ("value", "dtype", "error"),
    [
        ("1", "i4", TypeError),
        ([1, 2], "U3", TypeError),
        (np.array(["2020-01-01"], "M8[D]"), "i8", TypeError),
        (np.array([1.5]), "M8[s]", TypeError),
        (None, "f8", TypeError),
        ([None], "f8", TypeError),
        (np.array([1, "a"], object), "i4", TypeError),
        (b"abc", "S2", ValueError),
        (b"abc", "i4", TypeError),
    ],
)
def test_array_of_another_kind_of_value_is_refused(
    runtime, value, dtype, error
) -> None:
    with pytest.raises(error):
        cumem.array(value, dtype, "pinned")


def test_records_go_into_each_other_by_position(runtime) -> None:
    value = np.array([(1, 2), (3, 4)], [("x", "i8"), ("y", "u2")])
    assert cumem.full(2, value, PAIR, "pinned").numpy().tolist() == [(1, 2), (3, 4)]
    empty = cumem.full((0, 2), value, PAIR)
    assert values.get(empty).shape == (0, 2)
    with pytest.raises(TypeError, match="different numbers of fields"):
        cumem.full(2, value[["x"]][0], PAIR)


def test_error_names_the_value_and_both_dtypes(runtime) -> None:
    with pytest.raises(
        OverflowError, match="value 300 of dtype int64 does not fit into dtype uint8;"
    ):
        cumem.full(2, [1, 300], "u1")
    with pytest.raises(
        ValueError, match=r"value abc of dtype <U3 .* dtype <U2; .*first"
    ):
        cumem.full(2, "abc", "U2")


@pytest.mark.parametrize("dtype", ["u1", "i4", "f2", ">i4", "M8[s]"])
def test_range_is_read_as_a_list_of_its_numbers(runtime, dtype: str) -> None:
    expected = np.array([1, 3, 5], "i8").astype(dtype)
    assert (cumem.array(range(1, 6, 2), dtype).to_numpy() == expected).all()
    for write in (
        lambda buffer: buffer.__setitem__(slice(None), range(1, 6, 2)),
        lambda buffer: buffer.fill(range(1, 6, 2)),
        lambda buffer: cumem.copy(buffer, range(1, 6, 2)),
        lambda buffer: cumem.copy_many([(buffer, range(1, 6, 2))]),
    ):
        buffer = cumem.zeros(3, dtype)
        write(buffer)
        assert (buffer.to_numpy() == expected).all()
    with pytest.raises(OverflowError, match=r"the value -1 .* does not fit"):
        cumem.zeros(3, "u1")[:] = range(-1, 2)


def test_empty_list_fits_every_dtype(runtime) -> None:
    for dtype in ("u1", "f4", "S3", "M8[s]", PAIR, ml_dtypes.int4):
        buffer = cumem.zeros(0, dtype)
        cumem.copy(buffer, [])
        buffer.fill([])


class Reading:
    """An array whose values are read only by indexing it, and that NumPy does not know."""

    shape, dtype = (2,), np.dtype("f4")

    def __getitem__(self, key: Any) -> np.ndarray:
        return np.ones(2, "f4")[key]


class Sparse(Reading):
    def toarray(self) -> np.ndarray:
        return np.ones(2, "f4")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, None], "nested lists"),
        (np.array([1, None]), r"dtype is object.*astype\('f8'\)"),
        (iter([1, 2]), r"list\(values\)"),
        ({"a": np.ones(2)}, "to_device"),
        (Decimal("1.5"), r"pass float\(value\)"),
        (fractions.Fraction(1, 2), r"pass float\(value\)"),
        (Reading(), r"such as obj\[\.\.\.\]"),
        (Sparse(), r"toarray\(\)"),
    ],
    ids=[
        "list",
        "objects",
        "iterator",
        "dict",
        "decimal",
        "fraction",
        "reading",
        "sparse",
    ],
)
def test_what_holds_no_plain_values_says_what_to_pass(emulated, value, words) -> None:
    for make in (cumem.array, cumem.asarray):
        with pytest.raises(TypeError, match=rf"holds no plain values: .*{words}"):
            make(value)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="needs NumPy 2")
def test_text_of_any_length_says_what_to_pass(emulated) -> None:
    array = np.array(["ab", "c"], np.dtypes.StringDType())
    with pytest.raises(TypeError, match=r"StringDType .* array\.astype\('U20'\)"):
        cumem.array(array)
    assert cumem.array(array.astype("U20")).tolist() == ["ab", "c"]


@pytest.mark.parametrize("value", [1 << 70, [1, -(1 << 64)], [[1 << 64, 2], [3, 4]]])
def test_integers_that_no_dtype_of_numpys_holds_are_reported(runtime, value) -> None:
    with pytest.raises(OverflowError, match=r'more than 64 bits.*dtype="f8"'):
        cumem.array(value)
    rounded = np.asarray(value, "f8")
    assert (values.get(cumem.array(value, "f8", "pinned")) == rounded).all()


@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("dtype", ["?", "u1", "f2", ">i4", "c8", ml_dtypes.bfloat16])
def test_number_is_written_without_a_call_of_the_package(emulated, kind, dtype) -> None:
    buffer = cumem.zeros(4, dtype, kind)
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    numbers = (True, 1, np.int64(1), np.uint8(1), np.ones((), buffer.dtype))
    index = slice(1, 3)
    sys.setprofile(note)
    try:
        for number in numbers:
            buffer.fill(number)
            buffer[...] = number
            buffer[index] = number
            buffer[0] = number
    finally:
        sys.setprofile(None)
    assert called == []
    assert (values.get(buffer) == 1).all()
