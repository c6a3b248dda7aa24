# SPDX-License-Identifier: Apache-2.0
"""Tests of the route of rows by host numbers, and of what the kernel is given."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.pieces import numbers
from support.row_tables import (
    ORDER,
    SHAPE,
    draw_dtypes,
    draw_layers,
    draw_source_rows,
    draw_width,
    table,
)

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

KIB = 1 << 10
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


def route_of(dst: Any, src: Any, **rows: Any) -> str | None:
    handle = cumem.copy_rows_async(dst, src, **rows)
    handle.wait()
    return handle.route


def launches_of(*ends: Any, **rows: Any) -> int:
    cumem.copy_rows(*ends, **rows)  # this loads the kernels
    session.testing.plan_fault("kernel_launch", 0)
    cumem.copy_rows(*ends, **rows)
    return session.testing.fault_count("kernel_launch")


class TestRoute:
    @pytest.mark.parametrize(
        ("to", "source"),
        [
            ("device", "pinned"),
            ("pinned", "device"),
            ("device", "device"),
            ("device", "managed"),
            ("mapped", "device"),
        ],
    )
    def test_rows_that_one_device_reaches_go_by_its_kernel(
        self, emulated, to, source
    ) -> None:
        data, src = table(source)
        dst = values.put(np.zeros(SHAPE, "u1"), to)
        assert route_of(dst, src, dst_rows=ORDER, src_rows=ORDER[::-1]) == "rows"
        assert (values.get(dst)[ORDER] == data[ORDER[::-1]]).all()

    @pytest.mark.parametrize("of_numpy", ["dst", "src"])
    def test_rows_of_ordinary_memory_go_through_the_host(
        self, emulated, of_numpy
    ) -> None:
        data, device = table("device")
        other = np.zeros(SHAPE, "u1")
        ends = (other, device) if of_numpy == "dst" else (device, other)
        assert route_of(*ends, src_rows=ORDER) == "staged-table"
        assert (other == (data[ORDER] if of_numpy == "dst" else 0)).all()

    def test_rows_between_page_locked_arrays_need_no_device(self, emulated) -> None:
        data, src = table()
        dst = cumem.zeros(SHAPE, "u1", "pinned")
        assert route_of(dst, src, src_rows=ORDER) == "host"
        assert (values.get(dst) == data[ORDER]).all()

    @pytest.mark.parametrize(("count", "route"), [(3, "table"), (4, "rows")])
    def test_few_rows_are_not_described_to_the_kernel(
        self, emulated, count, route
    ) -> None:
        data, src = table()
        dst = cumem.zeros(SHAPE, "u1")
        rows = ORDER[:count]
        assert route_of(dst, src, dst_rows=rows, src_rows=rows) == route
        assert (values.get(dst)[rows] == data[rows]).all()

    def test_few_rows_of_many_layers_are_many_runs(self, emulated) -> None:
        layers = [table()[1] for _ in range(2)]
        targets = [cumem.zeros(SHAPE, "u1") for _ in layers]
        assert route_of(targets, layers, src_rows=[5, 3], dst_rows=[5, 3]) == "rows"
        got, expected = values.get(targets[1]), values.get(layers[1])
        assert (got[[5, 3]] == expected[[5, 3]]).all()

    @pytest.mark.parametrize(("count", "copies"), [(96, 0), (128, 1)])
    def test_more_than_a_few_numbers_are_brought_to_the_device(
        self, emulated, count, copies
    ) -> None:
        """Two numbers of 4 bytes for each row make 1 KiB with 128 rows."""
        rows = np.random.default_rng(1).permutation(128)[:count]
        data, src = table(shape=(128, 256))
        dst = cumem.zeros((128, 256), "u1")
        cumem.Device(0).synchronize()
        session.testing.plan_fault(None, 0)
        assert route_of(dst, src, dst_rows=rows, src_rows=rows[::-1]) == "rows"
        assert session.testing.fault_count("copy_async") == copies
        assert (values.get(dst)[rows] == data[rows[::-1]]).all()

    def test_numbers_stay_in_page_locked_memory_if_the_device_has_no_room(
        self, emulated
    ) -> None:
        data, src = table(shape=(4096, 512))
        dst = cumem.zeros((4096, 512), "u1")
        rows = np.arange(4096)[::-1].copy()
        cumem.trim()
        session.testing.plan_fault(None, 0)
        with cumem.limit("device", "2MiB"):  # `dst` takes all of it
            assert route_of(dst, src, src_rows=rows) == "rows"
        assert session.testing.fault_count("copy_async") == 0
        assert (values.get(dst) == data[rows]).all()

    @pytest.mark.parametrize(("kib", "route"), [(2047, "rows"), (2048, "table")])
    def test_long_rows_go_by_the_copy_engine(self, emulated, kib, route) -> None:
        data, src = table(shape=(6, kib * KIB))
        dst = cumem.zeros((6, kib * KIB), "u1")
        assert route_of(dst, src, src_rows=[4, 2, 0, 5, 3, 1]) == route
        assert (values.get(dst) == data[[4, 2, 0, 5, 3, 1]]).all()

    @pytest.mark.parametrize(("joined", "route"), [(512, "table"), (256, "rows")])
    def test_neighbours_that_make_long_runs_go_by_the_copy_engine(
        self, emulated, joined, route
    ) -> None:
        data, src = table(shape=(4096, 4 * KIB))
        dst = cumem.zeros((4096, 4 * KIB), "u1")
        rows = np.arange(4096).reshape(-1, joined)[::-1].ravel()
        assert route_of(dst, src, dst_rows=rows, src_rows=rows) == route
        assert (values.get(dst) == data).all()

    @pytest.mark.parametrize(
        ("width", "step", "route"),
        [
            (4 * KIB, 1, "direct-2d"),
            (4 * KIB, 3, "direct-2d"),
            (4 * KIB, -1, "rows"),
            (256, 1, "rows"),
        ],
    )
    def test_rows_at_one_distance_are_a_pitched_copy(
        self, emulated, width, step, route
    ) -> None:
        data, src = table(shape=(256, width))
        dst = cumem.zeros((256, width + 16), "u1")[:, :width]
        rows = np.arange(256)[::step]
        assert route_of(dst, src, dst_rows=rows, src_rows=rows) == route
        assert (values.get(dst)[rows] == data[rows]).all()

    def test_rows_go_by_the_engine_where_no_kernel_can_be_made(self, emulated) -> None:
        data, src = table()
        dst = cumem.zeros(SHAPE, "u1")
        session.testing.plan_fault("module_load", 1, code=221, repeat=True)
        cumem.copy_rows(dst, src, src_rows=ORDER)
        session.testing.plan_fault(None, 0)
        assert (values.get(dst) == data[ORDER]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rows_of_any_layers_equal_numpys(backend: str) -> None:
    """Numbers have every dtype, layers have different lengths, and some arrays touch."""
    with session.opened(backend):

        @given(st.data())
        def check(data: Any) -> None:
            lengths = data.draw(st.lists(st.integers(4, 20), min_size=1, max_size=3))
            least = min(lengths)
            count = data.draw(st.integers(4, 20).filter(lambda n: n <= least))
            order = data.draw(st.permutations(range(least)))[:count]
            src_rows = draw_source_rows(data, least, count)
            made = draw_layers(
                data,
                draw_width(data),
                [(length, length) for length in lengths],
                (order, src_rows),
                st.sampled_from([0, 0, 1, 20]),
            )
            dtypes = draw_dtypes(data)
            step = data.draw(st.sampled_from([1, 2, -1]))
            strided = np.zeros(count * abs(step), dtypes[1])[::step]
            strided[:] = src_rows
            dst_rows = np.array(order, dtypes[0])
            cumem.copy_rows(made.targets, made.sources, dst_rows, strided)
            made.check()

        check()


class TestNumbers:
    @pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u4", "i4", "i8", "u8", ">i8"])
    @pytest.mark.parametrize("step", [1, 2, -1])
    def test_integers_of_any_width_and_stride_are_read(
        self, emulated, dtype, step
    ) -> None:
        data, src = table()
        rows = ORDER.astype(dtype)[::step]
        assert (values.get(cumem.take_rows(src, rows)) == data[ORDER[::step]]).all()

    def test_numbers_of_a_long_list_are_read(self, emulated) -> None:
        """The list is so long that its numbers are checked in several blocks, without the
        GIL.
        """
        data, src = table(shape=(9_000, 4))
        dst = cumem.zeros((9_000, 4), "u1")
        order = np.random.default_rng(5).permutation(9_000) - 9_000
        cumem.copy_rows(dst, src, dst_rows=order.tolist(), src_rows=order[::-1])
        expected = np.zeros_like(data)
        expected[order] = data[order[::-1]]
        assert (values.get(dst) == expected).all()

    def test_numbers_that_change_after_the_call_are_not_read_again(
        self, emulated
    ) -> None:
        stream = cumem.Stream()
        data, src = table()
        dst, rows = cumem.zeros(SHAPE, "u1"), ORDER.copy()
        with session.gate(stream):
            handle = cumem.copy_rows_async(dst, src, src_rows=rows, stream=stream)
            rows[:] = 50
        handle.wait()
        assert (values.get(dst) == data[ORDER]).all()

    def test_memory_of_the_numbers_stays_until_late_rows_are_done(
        self, emulated
    ) -> None:
        stream = cumem.Stream()
        data, src = table()
        dst = cumem.zeros(SHAPE, "u1")
        with session.gate(stream):
            cumem.copy_rows_async(dst, src, ORDER, ORDER, stream=stream)
            gc.collect()
            # These buffers have the size of the memory of the numbers, so one of them
            # would get that memory if it had been freed too early.
            others = [cumem.array(np.full(256, 9, "i4"), kind="mapped") for _ in "abcd"]
        stream.synchronize()
        assert others
        assert (values.get(dst) == data).all()

    def test_memory_of_the_numbers_is_free_after_the_call(self, emulated) -> None:
        _, src = table()
        dst = cumem.zeros(SHAPE, "u1")
        before = len(cumem.live())
        cumem.copy_rows(dst, src, ORDER, ORDER)
        cumem.copy_rows_async(dst, src, ORDER, ORDER).wait()
        session.testing.poll()
        assert len(cumem.live()) == before

    @pytest.mark.parametrize(
        ("rows", "error", "text"),
        [
            (
                {"dst_rows": [0, 1, 2, 100]},
                IndexError,
                r"\[3\] is 100, but dst has 100",
            ),
            ({"src_rows": [0, 1, -101, 3]}, IndexError, r"src_rows\[2\] is -101, but"),
            ({"src_rows": [0, 1, 2**32, 3]}, IndexError, r"\[2\] is 4294967296, but"),
            ({"src_rows": np.zeros(101, int)}, IndexError, "100 rows, and 101 are"),
            ({"dst_rows": [0, 1, 2, 1]}, ValueError, r"dst_rows\[3\] is 1, a row that"),
            ({"dst_rows": [0, 1, 2, -99]}, ValueError, r"dst_rows\[3\] is -99, a row"),
        ],
    )
    @pytest.mark.parametrize("more", [{}, {"max_sms": 4}])
    def test_wrong_numbers_move_nothing(
        self, emulated, rows, error, text, more
    ) -> None:
        _, src = table()
        dst = cumem.zeros(SHAPE, "u1")
        for call in (cumem.copy_rows, cumem.copy_rows_async):
            with pytest.raises(error, match=text):
                call(dst, src, **rows, **more)
        assert not values.get(dst).any()

    # Threads share the work of checking the longer list.
    @pytest.mark.parametrize("count", [9_000, 90_000])
    def test_wrong_number_among_many_is_found(self, emulated, count) -> None:
        _, src = table(shape=(count, 4))
        dst = cumem.zeros((count, 4), "u1")
        for position in (0, 255, 256, count - 1):
            rows = np.arange(count)[::-1].copy()  # no neighbours to join
            rows[position] = count
            text = rf"src_rows\[{position}\] is {count}"
            with pytest.raises(IndexError, match=text):
                cumem.copy_rows(dst, src, src_rows=rows)
            rows[position] = rows[position - 1]
            with pytest.raises(ValueError, match="a row that an earlier number names"):
                cumem.copy_rows(dst, src, dst_rows=rows)

    def test_wrong_number_names_the_first_layer_that_has_no_such_row(
        self, emulated
    ) -> None:
        lengths = (12, 10, 11)
        layers = [table(shape=(length, 4))[1] for length in lengths]
        targets = [cumem.zeros((length, 4), "u1") for length in lengths]
        with pytest.raises(IndexError, match=r"layer 1: src_rows\[2\] is 10, but src"):
            cumem.copy_rows(targets, layers, src_rows=[0, 1, 10, 3])
        # The last row of the second layer is named by two numbers.
        with pytest.raises(ValueError, match=r"layer 1: dst_rows\[3\] is -1, a row"):
            cumem.copy_rows(targets, layers, dst_rows=[9, 1, 2, -1])
        assert not any(values.get(target).any() for target in targets)

    def test_rising_numbers_from_both_ends_of_an_array_are_looked_through(
        self, emulated
    ) -> None:
        _, src = table()
        dst = cumem.zeros(SHAPE, "u1")
        with pytest.raises(ValueError, match=r"dst_rows\[4\] is 99, a row that"):
            cumem.copy_rows(dst, src, dst_rows=[-3, -1, 3, 5, 99])
        cumem.copy_rows(dst, src, dst_rows=[-3, -1, 3, 5, 96])

    def test_negative_numbers_count_from_the_end_of_each_layer(self, emulated) -> None:
        lengths = (12, 10)
        layers = [table(shape=(length, 4))[1] for length in lengths]
        targets = [cumem.zeros((length, 4), "u1") for length in lengths]
        rows = [-1, -2, -3, 0]
        assert route_of(targets, layers, dst_rows=rows, src_rows=rows) == "rows"
        for target, layer in zip(targets, layers, strict=True):
            assert (values.get(target)[rows] == values.get(layer)[rows]).all()


class TestOverlap:
    """Rows of one array: the numbers say which of them are read and written."""

    def test_rows_that_are_only_read_or_written_take_one_launch(self, emulated) -> None:
        data, memory = table("device")
        rows: dict[str, Any] = {"dst_rows": ORDER[:50], "src_rows": ORDER[50:]}
        assert launches_of(memory, memory, **rows) == 1
        data[ORDER[:50]] = data[ORDER[50:]]
        assert (values.get(memory) == data).all()

    @pytest.mark.parametrize("sign", [0, 100])
    def test_row_that_is_read_and_written_takes_two_launches(
        self, emulated, sign
    ) -> None:
        data, memory = table("device")
        rows: dict[str, Any] = {"dst_rows": ORDER[:50], "src_rows": ORDER[50:] - sign}
        rows["src_rows"][9] = ORDER[20] - sign
        for _ in range(2):
            data[rows["dst_rows"]] = data[rows["src_rows"]]
        assert launches_of(memory, memory, **rows) == 2
        assert (values.get(memory) == data).all()

    def test_first_rows_of_a_target_without_numbers_are_written(self, emulated) -> None:
        data, memory = table("device")
        expected = data.copy()
        assert launches_of(memory, memory, src_rows=np.arange(98, 49, -1)) == 1
        expected[:49] = data[98:49:-1]
        assert (values.get(memory) == expected).all()
        assert launches_of(memory, memory, src_rows=np.arange(96, 47, -1)) == 2

    @pytest.mark.parametrize("shift", [0, 1])
    def test_layers_of_one_cache_are_compared(self, emulated, shift) -> None:
        """Each layer is copied to itself, or to the other layer, whose rows lie in its
        gaps.
        """
        cache = cumem.array(numbers(16 * 2 * 8).reshape(16, 2, 8), kind="device")
        expected = values.get(cache)
        layers = [cache[:, 0], cache[:, 1]]
        sources = layers[::-1] if shift else layers
        rows: dict[str, Any] = {"dst_rows": [0, 1, 2, 3], "src_rows": [9, 8, 7, 6]}
        cumem.copy_rows(layers, sources, **rows)
        read = expected[[9, 8, 7, 6]]
        expected[[0, 1, 2, 3]] = read[:, ::-1] if shift else read
        assert (values.get(cache) == expected).all()

    def test_rows_of_shifted_views_are_compared_by_their_bytes(self, emulated) -> None:
        data, memory = table("device")
        cumem.copy_rows(memory[1:], memory[:-1], src_rows=np.arange(99))
        assert (values.get(memory)[1:] == data[:-1]).all()


class TestCapture:
    def test_numbers_belong_to_the_graph(self, emulated) -> None:
        stream = cumem.Stream()
        source = cumem.empty_device(SHAPE, "u1", stream=stream)
        target = cumem.zeros(SHAPE, "u1", "pinned")
        cumem.copy_rows(target, source, ORDER, ORDER, stream=stream)
        pool = cumem.default_pool("mapped")
        before = pool.stats().in_flight_nbytes
        session.testing.set_capturing(stream, True)
        try:
            handle = cumem.copy_rows_async(target, source, ORDER, ORDER, stream=stream)
            assert handle.done
            assert handle.route == "rows"
        finally:
            session.testing.set_capturing(stream, False)
        assert pool.stats().in_flight_nbytes > before

    @pytest.mark.gpu
    def test_graph_keeps_the_numbers_of_the_host(self, cuda) -> None:
        torch = pytest.importorskip("torch")
        data, source = table()
        target, rows = cumem.zeros(SHAPE, "u1"), ORDER.copy()
        cumem.copy_rows(target, source, src_rows=rows)  # this loads the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
        rows[:] = 0
        for _ in range(2):
            others = [cumem.array(np.zeros(100, "i4"), kind="mapped") for _ in "abcd"]
            cumem.copy(target, np.zeros(SHAPE, "u1"))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert others
            assert (values.get(target) == data[ORDER]).all()
