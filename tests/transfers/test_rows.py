# SPDX-License-Identifier: Apache-2.0
"""Rows by their numbers come out as NumPy's dst[d] = src[s], for all kinds of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.pieces import numbers
from support.row_tables import draw_source_rows, draw_target_rows, draw_width
from support.strategies import KINDS

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

PLACES = [*KINDS, "numpy"]
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTHS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]


def copy_by(how: str, *ends: Any, **rows: Any) -> None:
    if how == "blocking":
        assert cumem.copy_rows(*ends, **rows) is None
        return
    stream = cumem.Stream() if how == "stream" else None
    handle = cumem.copy_rows_async(*ends, **rows, stream=stream)
    handle.wait()
    assert handle.done


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("how", ["blocking", "stream", "background"])
def test_rows_between_every_two_kinds_equal_numpys(runtime, to, source, how) -> None:
    data = numbers(300 * 37).reshape(300, 37)
    expected = np.zeros((200, 37), "u1")
    target, read = values.put(expected, to), values.put(data, source)
    random = np.random.default_rng(1)
    dst_rows = random.permutation(200)[:150]
    src_rows = random.integers(-300, 300, 150)
    copy_by(how, target, read, dst_rows=dst_rows, src_rows=src_rows)
    expected[dst_rows] = data[src_rows]
    assert (values.get(target) == expected).all()


def strided(array: np.ndarray, place: str, gap: int, turned: bool) -> Any:
    """Put rows into memory with `gap` bytes between them, in reverse order if `turned`."""
    rows, width = array.shape
    whole = values.put(np.zeros((rows, width + gap), "u1"), place)
    view = whole[::-1, :width] if turned else whole[:, :width]  # type: ignore[index]
    cumem.copy(view, array)
    return view


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rows_of_any_layers_equal_numpys(backend: str) -> None:
    """Rows of 1 to 4,096 bytes, repeated in the source, in layers of different strides."""
    with session.opened(backend):

        @given(st.data())
        def check(data: Any) -> None:
            width = draw_width(data)
            dst_count, src_count = (data.draw(st.integers(1, 20)) for _ in range(2))
            dst_rows = draw_target_rows(data, dst_count)
            src_rows = draw_source_rows(data, src_count, len(dst_rows))
            wanted, targets, sources = [], [], []
            for layer in range(data.draw(st.integers(0, 3))):
                before = numbers(dst_count * width, layer).reshape(dst_count, width)
                read = numbers(src_count * width, 9 + layer).reshape(src_count, width)
                ends = []
                for array in (before, read):
                    place = data.draw(st.sampled_from(PLACES))
                    gap = data.draw(st.sampled_from([0, 0, 1, 3, 16]))
                    ends.append(strided(array, place, gap, data.draw(st.booleans())))
                targets.append(ends[0])
                sources.append(ends[1])
                before[dst_rows] = read[src_rows]
                wanted.append(before)
            kind = data.draw(st.sampled_from(["i1", "i2", "i4", "i8"]))
            how = data.draw(st.sampled_from(["blocking", "stream", "background"]))
            copy_by(
                how,
                targets,
                sources,
                dst_rows=np.array(dst_rows, kind),
                src_rows=src_rows,
            )
            for target, expected in zip(targets, wanted, strict=True):
                assert (values.get(target) == expected).all()

        check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapping_rows_are_read_before_they_are_written(backend: str) -> None:
    with session.opened(backend):

        @given(st.data())
        def check(data: Any) -> None:
            place = data.draw(st.sampled_from(PLACES))
            width = data.draw(st.integers(1, 60))
            step = data.draw(st.integers(1, width))
            expected = numbers(20 * width)
            memory = values.put(expected, place)
            start = data.draw(st.integers(0, width))
            count = data.draw(st.integers(0, 10))
            windows = np.lib.stride_tricks.sliding_window_view(expected, width)
            source, target = windows[start::step], expected.reshape(20, width)
            if place == "numpy":
                read = np.lib.stride_tricks.sliding_window_view(memory, width)  # type: ignore[call-overload]
                read = read[start::step]
            else:  # a buffer has no such view, so its rows only begin at `start`
                source = expected[start : start + 19 * width].reshape(19, width)
                read = memory[start : start + 19 * width].reshape(19, width)  # type: ignore[index]
            dst_rows = data.draw(st.permutations(range(20)))[:count]
            row = st.integers(0, len(source) - 1)
            src_rows = data.draw(st.lists(row, min_size=count, max_size=count))
            how = data.draw(st.sampled_from(["blocking", "stream", "background"]))
            copy_by(
                how,
                memory.reshape(20, width),  # type: ignore[attr-defined]
                read,
                dst_rows=dst_rows,
                src_rows=src_rows,
            )
            target[dst_rows] = source[src_rows].copy()
            assert (values.get(memory) == expected).all()

        check()


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_one_array_are_permuted_in_place(runtime, place) -> None:
    data = numbers(100 * 24).reshape(100, 24)
    memory = values.put(data, place)
    order = np.random.default_rng(2).permutation(100)
    cumem.copy_rows(memory, memory, src_rows=order)
    assert (values.get(memory) == data[order]).all()


def test_layers_that_are_views_of_one_cache_stay_apart(runtime) -> None:
    """Rows of keys and of values alternate in memory. The ranges of the two layers
    therefore overlap, although no byte belongs to both.
    """
    cache = cumem.array(numbers(2 * 16 * 8).reshape(16, 2, 8))
    expected = values.get(cache)
    layers = [cache[:, 0], cache[:, 1]]
    cumem.copy_rows(layers, layers, dst_rows=[0, 1], src_rows=[9, 8])
    expected[[0, 1]] = expected[[9, 8]]
    assert (values.get(cache) == expected).all()


def test_layers_of_different_lengths_count_from_their_own_ends(runtime) -> None:
    sources = [cumem.array(np.arange(n, dtype="i4")) for n in (3, 5)]
    targets = [cumem.zeros(n, "i4", "device") for n in (4, 2)]
    cumem.copy_rows(targets, sources, dst_rows=[-1], src_rows=[-1])
    assert values.get(targets[0]).tolist() == [0, 0, 0, 2]
    assert values.get(targets[1]).tolist() == [0, 4]


@pytest.mark.parametrize("dtype", ["?", ">i4", "c16", "M8[ns]", "S3", [("a", "i2")]])
def test_rows_of_any_dtype_are_copied_as_they_are(runtime, dtype) -> None:
    dtype = np.dtype(dtype)
    data = np.zeros((9, 2), dtype)
    data.view("u1")[:] = numbers(data.nbytes).reshape(9, -1) % 2
    device = cumem.array(data, kind="device")
    out = np.zeros((3, 2), dtype)
    cumem.copy_rows(out, device, src_rows=[8, 0, 4])
    assert out.tobytes() == data[[8, 0, 4]].tobytes()


def test_rows_whose_elements_lie_apart_are_copied(runtime) -> None:
    data = np.asfortranarray(numbers(40 * 6).reshape(40, 6))
    target = cumem.empty_device((40, 6), "u1", order="F")
    cumem.copy(target, np.zeros((40, 6), "u1"))
    cumem.copy_rows(target, data, dst_rows=[3, 30], src_rows=[0, 1])
    expected = np.zeros((40, 6), "u1")
    expected[[3, 30]] = data[[0, 1]]
    assert (values.get(target) == expected).all()


def test_rows_of_a_mapped_file_are_read_and_written(runtime, tmp_path) -> None:
    path = tmp_path / "table.bin"
    data = numbers(500 * 100).reshape(500, 100)
    path.write_bytes(data.tobytes())
    table = np.memmap(path, "u1", "r+", shape=data.shape)
    chosen = [499, 0, 250, 250]
    device = cumem.take_rows(table, chosen)
    assert (device.to_numpy() == data[chosen]).all()
    cumem.copy_rows(table, device, dst_rows=[1, 2, 3, 4])
    table.flush()
    data[1:5] = data[chosen]
    assert path.read_bytes() == data.tobytes()


def test_rows_between_two_mappings_of_a_file_are_read_first(emulated, tmp_path) -> None:
    path = tmp_path / "table.bin"
    data = numbers(50 * 8).reshape(50, 8)
    path.write_bytes(data.tobytes())
    to, read = (np.memmap(path, "u1", "r+", shape=data.shape) for _ in range(2))
    order = np.random.default_rng(3).permutation(50)
    cumem.copy_rows(to, read, src_rows=order)
    assert (np.asarray(to) == data[order]).all()


class TestNumbers:
    """Tests of the numbers that name the rows."""

    @pytest.mark.parametrize("dtype", [*WIDTHS, ">i2", ">u8"])
    @pytest.mark.parametrize("step", [1, 3, -2])
    def test_integers_of_any_width_and_stride_are_read(
        self, emulated, dtype, step
    ) -> None:
        rows = np.array([5, 1, 7, 0, 2, 3, 6, 4, 9, 8], dtype)[::step]
        data = np.arange(10)
        got = cumem.take_rows(data, rows)
        assert (got.to_numpy() == data[rows.astype("i8")]).all()

    @pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8"])
    def test_negative_numbers_count_from_the_end(self, emulated, dtype) -> None:
        rows = np.array([-1, -10, 3], dtype)
        assert cumem.take_rows(np.arange(10), rows).to_numpy().tolist() == [9, 0, 3]

    @pytest.mark.parametrize(
        "make",
        [
            list,
            tuple,
            memoryview,
            lambda rows: range(0, 6, 2),
            lambda rows: [np.int16(r) for r in rows],
            lambda rows: np.lib.stride_tricks.as_strided(rows, (3,), (8,)),
            lambda rows: np.frombuffer(b"x" + rows.tobytes(), "i8", offset=1),
            *(lambda rows, k=kind: values.put(rows, k) for kind in KINDS[:3]),
            lambda rows: values.put(rows, "pinned").numpy(),  # type: ignore[attr-defined]
        ],
    )
    def test_integers_in_any_container_are_read(self, emulated, make) -> None:
        rows = np.array([0, 2, 4])
        got = cumem.take_rows(np.arange(10), make(rows))
        assert got.to_numpy().tolist() == [0, 2, 4]

    def test_ranges_that_are_too_long_say_how_long(self, emulated) -> None:
        table = cumem.zeros((100, 4), "f4", "pinned")
        for call in (
            lambda rows: cumem.take_rows(table, rows),
            lambda rows: cumem.copy_rows(table, table, src_rows=rows),
        ):
            with pytest.raises(MemoryError, match=r"Unable to allocate.*1099511627776"):
                call(range(2**40))
            with pytest.raises(IndexError, match=r"rows is range\(.*more numbers than"):
                call(range(2**70))
        with pytest.raises(IndexError, match="not the number of a row"):
            cumem.take_rows(table, range(2**70, 2**70 + 2))

    def test_sources_that_are_no_memory_say_what_makes_an_array_of_them(
        self, emulated
    ) -> None:
        class Lazy:
            """An array that is read in slices, as a dataset of h5py is."""

            shape, dtype = (3,), np.dtype("f8")

            def __getitem__(self, index: object) -> np.ndarray:
                return np.ones(3)[index]  # type: ignore[index]

        for src in ([np.ones(3)], (1, 2), Lazy(), np.float32(3), "text", None):
            with pytest.raises(
                TypeError, match=r"^src must .* numpy\.asarray\(src\), n"
            ):
                cumem.take_rows(src, [0])  # type: ignore[arg-type]

    def test_no_numbers_copy_nothing(self, runtime) -> None:
        target = np.arange(3)
        cumem.copy_rows(target, np.zeros(0, int), src_rows=[])
        cumem.copy_rows(target, np.zeros(5, int), dst_rows=np.zeros(0, "u2"))
        assert target.tolist() == [0, 1, 2]
        assert cumem.take_rows(target, []).shape == (0,)

    def test_numbers_that_change_after_the_call_are_not_read_again(
        self, emulated
    ) -> None:
        stream = cumem.Stream()
        source = cumem.array(np.arange(100), kind="pinned")
        target = cumem.zeros(3, int)
        rows = np.array([1, 2, 3])
        with session.gate(stream):
            handle = cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
            rows[:] = 50
        handle.wait()
        assert target.to_numpy().tolist() == [1, 2, 3]

    def test_numbers_that_a_transfer_still_writes_are_waited_for(
        self, emulated
    ) -> None:
        stream = cumem.Stream()
        device = cumem.array(np.array([7, 8]), kind="device")
        rows = cumem.zeros(2, int, "pinned")
        with session.gate(stream):
            cumem.copy_async(rows, device, stream=stream)
        got = cumem.take_rows(np.arange(10), rows)
        assert got.to_numpy().tolist() == [7, 8]


class TestRefusals:
    """Everything wrong is found before a byte moves."""

    @pytest.mark.parametrize(
        ("rows", "error", "text"),
        [
            ({"dst_rows": [4]}, IndexError, r"dst_rows\[0\] is 4, but dst has 4 rows"),
            ({"src_rows": [0, -6]}, IndexError, r"src_rows\[1\] is -6, but src has 5"),
            ({"src_rows": range(5)}, IndexError, "dst has 4 rows, and 5 are asked for"),
            (
                {"src_rows": np.array([1, 2**64 - 1], "u8")},
                IndexError,
                r"src_rows\[1\] is 18446744073709551615, but src has 5",
            ),
            (
                {"dst_rows": np.array([2**63], ">u8")},
                IndexError,
                r"dst_rows\[0\] is 9223372036854775808, but dst has 4",
            ),
            (
                {"src_rows": np.array([2**63 - 1])},
                IndexError,
                r"src_rows\[0\] is 9223372036854775807, but src has 5",
            ),
            ({"src_rows": [2**70]}, IndexError, "not the number of a row"),
            ({"dst_rows": [2, 1, -2]}, ValueError, r"dst_rows\[2\] is -2, a row that"),
            ({"dst_rows": [1], "src_rows": [1, 2]}, ValueError, "as many of each"),
            ({"dst_rows": [[1]]}, ValueError, r"one dimension, .*ravel\(dst_rows\)"),
            ({"dst_rows": [1, (2,)]}, ValueError, "one dimension, not lists within"),
            ({"dst_rows": np.zeros((1, 1), int)}, ValueError, r"dst_rows\.ravel\(\)"),
            ({"src_rows": np.array(3)}, ValueError, "one dimension, not 0"),
            ({"dst_rows": [True]}, TypeError, "flatnonzero"),
            ({"dst_rows": np.array([True])}, TypeError, "flatnonzero"),
            ({"dst_rows": [np.True_]}, TypeError, "flatnonzero"),
            ({"dst_rows": [1.0]}, TypeError, "must be integers, not float"),
            ({"dst_rows": np.array([1.0])}, TypeError, "not float64"),
            ({"dst_rows": 1}, TypeError, "must be integers"),
            ({"dst_rows": "1"}, TypeError, "must be integers"),
            ({}, TypeError, r"use copy\(dst, src\)"),
        ],
    )
    def test_wrong_numbers_move_nothing(self, emulated, rows, error, text) -> None:
        for kind in ("numpy", "device"):
            target = values.put(np.zeros(4, int), kind)
            for call in (cumem.copy_rows, cumem.copy_rows_async):
                with pytest.raises(error, match=text):
                    call(target, np.arange(1, 6), **rows)
            assert not values.get(target).any()

    def test_a_row_twice_among_many_is_found(self, emulated) -> None:
        """A short array is checked by a bitmap, and a very long one by a hash table."""
        for length in (10**4, 10**8):
            target = np.lib.stride_tricks.as_strided(np.zeros(1, "V1"), (length, 0))
            rows = np.random.default_rng(0).permutation(10**4)
            source = np.zeros((10**4, 0), "V1")
            cumem.copy_rows(target, source, dst_rows=rows)
            rows[77] = rows[9000]
            with pytest.raises(ValueError, match=rf"dst_rows\[9000\] is {rows[77]}"):
                cumem.copy_rows(target, source, dst_rows=rows)

    @pytest.mark.parametrize(
        ("dst", "src", "error", "text"),
        [
            (np.zeros(3), np.zeros(3, "f4"), ValueError, "float64 and those of src"),
            (np.zeros((3, 2)), np.zeros((3, 3)), ValueError, r"\(2,\) and those of"),
            (np.zeros((3, 2)), np.zeros(3), ValueError, "must be equal"),
            (np.array(1.0), np.zeros(3), ValueError, "dst has no rows"),
            (np.zeros(3), np.array(1.0), ValueError, "src has no rows"),
            ([np.zeros(3)], np.zeros(3), TypeError, "dst is a list and src is one"),
            (np.zeros(3), [np.zeros(3)], TypeError, "src is a list and dst is one"),
            ([np.zeros(3)], [], ValueError, "as many of each"),
            ([np.zeros(3), 5], [np.zeros(3)] * 2, TypeError, "layer 1: dst must be"),
            (
                [np.zeros(3)] * 2,
                [np.zeros(3), np.zeros(3, "i4")],
                ValueError,
                "layer 1",
            ),
            (b"abc", np.zeros(3, "u1"), ValueError, "read-only"),
            (np.broadcast_to(0.0, 3), np.zeros(3), ValueError, "read-only"),
        ],
    )
    def test_wrong_ends_are_refused(self, emulated, dst, src, error, text) -> None:
        with pytest.raises(error, match=text):
            cumem.copy_rows(dst, src, dst_rows=[0])


class TestTakeRows:
    def test_new_buffer_lies_on_the_device_of_the_source(self, emulated) -> None:
        source = cumem.array(np.arange(10), kind="device", device=1)
        got = cumem.take_rows(source, [3, 1])
        assert got.device == 1
        assert got.to_numpy().tolist() == [3, 1]

    def test_new_buffer_lies_on_the_device_of_the_stream(self, emulated) -> None:
        got = cumem.take_rows(np.arange(10), [3, 1], stream=cumem.Stream(device=1))
        assert got.device == 1
        assert got.to_numpy().tolist() == [3, 1]

    def test_out_is_filled_and_returned(self, emulated) -> None:
        out = np.zeros((2, 3))
        data = np.arange(12.0).reshape(4, 3)
        assert cumem.take_rows(data, [3, 0], out) is out
        assert (out == data[[3, 0]]).all()

    def test_out_with_other_rows_is_refused(self, emulated) -> None:
        with pytest.raises(ValueError, match="out has 3 rows, and rows has 2 numbers"):
            cumem.take_rows(np.zeros(4), [0, 1], np.zeros(3))
        with pytest.raises(ValueError, match="rows of out are of dtype"):
            cumem.take_rows(np.zeros(4), [0, 1], np.zeros(2, "i4"))
        with pytest.raises(IndexError, match=r"take_rows: rows\[1\] is 4, but src has"):
            cumem.take_rows(np.zeros(4), [0, 4])
