# SPDX-License-Identifier: Apache-2.0
"""copy_rows by numbers in device memory, which the kernel reads or the host fetches."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.exporters import FakeCAI, interface_of
from support.pieces import numbers
from support.row_tables import (
    ORDER,
    REACHED,
    SHAPE,
    draw_dtypes,
    draw_layers,
    draw_source_rows,
    draw_target_rows,
    draw_width,
    on_device,
    table,
)

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

PLACES = [*REACHED, "numpy"]
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTHS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]


def copy_by(how: str, *ends: Any, **rows: Any) -> None:
    if how == "blocking":
        cumem.copy_rows(*ends, **rows)
        return
    stream = cumem.Stream() if how == "stream" else None
    cumem.copy_rows_async(*ends, **rows, stream=stream).wait()


@pytest.mark.parametrize("which", ["both", "dst_rows", "src_rows"])
@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("how", ["blocking", "stream", "background"])
def test_rows_between_every_two_kinds_equal_numpys(
    runtime, to, source, how, which
) -> None:
    data = numbers(300 * 37).reshape(300, 37)
    expected = np.zeros((200, 37), "u1")
    ends = values.put(expected, to), values.put(data, source)
    random = np.random.default_rng(1)
    rows: dict[str, Any] = {
        "dst_rows": random.permutation(200)[:150],
        "src_rows": random.integers(-300, 300, 150),
    }
    expected[rows["dst_rows"]] = data[rows["src_rows"]]
    for name in rows if which == "both" else [which]:
        rows[name] = on_device(rows[name])
    copy_by(how, *ends, **rows)
    assert (values.get(ends[0]) == expected).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rows_of_any_layers_equal_numpys(backend: str) -> None:
    """Rows have any width and gaps, numbers may be negative, and ends may overlap."""
    with session.opened(backend):

        @given(st.data())
        def check(data: Any) -> None:
            dst_count, src_count = (data.draw(st.integers(1, 20)) for _ in range(2))
            dst_rows = draw_target_rows(data, dst_count)
            src_rows = draw_source_rows(data, src_count, len(dst_rows))
            made = draw_layers(
                data,
                draw_width(data),
                [(dst_count, src_count)] * data.draw(st.integers(1, 3)),
                (dst_rows, src_rows),
                st.integers(0, 20),
            )
            dtypes = draw_dtypes(data)
            cumem.copy_rows(
                made.targets,
                made.sources,
                on_device(dst_rows, dtypes[0]),
                on_device(src_rows, dtypes[1]),
            )
            made.check()

        check()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("step", [1, -1, 3])
def test_numbers_of_any_width_and_stride_are_read(emulated, width, step) -> None:
    data, source = table()
    whole = on_device(np.arange(30), width)
    target = cumem.zeros((len(range(30)[::step]), 40), "u1")
    handle = cumem.copy_rows_async(target, source, src_rows=whole[::step])
    handle.wait()
    assert handle.route == "rows"
    assert (values.get(target) == data[np.arange(30)[::step]]).all()


def test_numbers_of_another_library_are_read_in_place(emulated) -> None:
    data, source = table()
    memory = on_device(ORDER)
    rows = FakeCAI(interface_of(memory), memory)
    target = cumem.zeros(SHAPE, "u1")
    handle = cumem.copy_rows_async(target, source, src_rows=rows)
    handle.wait()
    assert handle.route == "rows"
    assert (values.get(target) == data[ORDER]).all()


def test_numbers_in_the_other_byte_order_are_fetched(emulated) -> None:
    data, source = table()
    got = cumem.take_rows(source, on_device([7, 1], ">i4"))
    assert (values.get(got) == data[[7, 1]]).all()


def test_numbers_that_are_not_aligned_are_fetched(emulated) -> None:
    data, source = table()
    room = cumem.zeros(17, "u1")
    rows = room[1:].view("i8")
    cumem.copy(rows, np.array([7, 1]))
    assert (values.get(cumem.take_rows(source, rows)) == data[[7, 1]]).all()


def test_rows_whose_elements_lie_apart_equal_numpys(emulated) -> None:
    data = np.arange(240).reshape(40, 6)
    target = cumem.empty_device((3, 6), "i8", order="F")
    cumem.copy_rows(target, cumem.array(data), src_rows=on_device([8, 0, -4]))
    assert (values.get(target) == data[[8, 0, -4]]).all()


def test_row_that_is_named_twice_has_bytes_of_either(emulated) -> None:
    data, source = table()
    target = cumem.zeros((3, 40), "u1")
    cumem.copy_rows(target, source, on_device([1, 1]), on_device([5, 6]))
    got = values.get(target)
    assert not got[0].any()
    assert not got[2].any()
    assert all(byte in pair for byte, pair in zip(got[1], data[[5, 6]].T, strict=True))


class TestMaxSms:
    @pytest.mark.parametrize("of_host", [False, True])
    @pytest.mark.parametrize("overlaps", [False, True])
    def test_rows_by_a_bounded_kernel_equal_numpys(
        self, emulated, of_host, overlaps
    ) -> None:
        data, source = table("device")
        target = source if overlaps else cumem.zeros(SHAPE, "u1", "pinned")
        rows = ORDER if of_host else on_device(ORDER)
        handle = cumem.copy_rows_async(target, source, src_rows=rows, max_sms=1)
        handle.wait()
        assert handle.route == "rows"
        assert (values.get(target) == data[ORDER]).all()

    @pytest.mark.parametrize("to", ["numpy", "pinned"])
    def test_copy_by_the_host_has_no_multiprocessors_to_bound(
        self, emulated, to
    ) -> None:
        data, _ = table()
        target = values.put(np.zeros(SHAPE, "u1"), to)
        cumem.copy_rows(target, data, src_rows=ORDER, max_sms=4)
        assert (values.get(target) == data[ORDER]).all()

    def test_host_numbers_are_checked_before_a_byte_moves(self, emulated) -> None:
        _, source = table()
        target = cumem.zeros(SHAPE, "u1")
        with pytest.raises(IndexError, match=r"src_rows\[1\] is 100"):
            cumem.copy_rows(target, source, src_rows=[0, 100], max_sms=4)
        assert not values.get(target).any()

    @pytest.mark.parametrize(
        ("wrong", "error"), [(0, ValueError), (-1, ValueError), ("4", TypeError)]
    )
    def test_wrong_limits_are_refused(self, emulated, wrong, error) -> None:
        _, source = table()
        with pytest.raises(error, match="max_sms"):
            cumem.copy_rows(source, source, src_rows=ORDER, max_sms=wrong)
        with pytest.raises(error, match="max_sms"):
            cumem.take_rows(source, ORDER, max_sms=wrong)


class TestOrder:
    def test_numbers_are_read_when_the_stream_gets_there(self, emulated) -> None:
        stream = cumem.Stream()
        data, source = table()
        rows = on_device(np.zeros(100), "i8")
        target = cumem.zeros(SHAPE, "u1")
        with session.gate(stream):
            cumem.copy_async(rows, cumem.array(ORDER, kind="pinned"), stream=stream)
            handle = cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
            assert not handle.done
        handle.wait()
        assert (values.get(target) == data[ORDER]).all()

    @pytest.mark.parametrize("how", ["stream", "background"])
    def test_numbers_come_after_their_own_transfers(self, emulated, how) -> None:
        first = cumem.Stream()
        second = cumem.Stream() if how == "stream" else None
        data, source = table()
        rows = on_device(np.zeros(100), "i8")
        target = cumem.zeros(SHAPE, "u1")
        cumem.Device(0).synchronize()  # From here on only `rows` gets new work.
        with session.gate(first):
            cumem.copy_async(rows, cumem.array(ORDER, kind="pinned"), stream=first)
            handle = cumem.copy_rows_async(target, source, src_rows=rows, stream=second)
            for _ in range(3):  # Work that need not wait gets its turn meanwhile.
                cumem.copy_async(cumem.zeros(SHAPE, "u1"), source).wait()
            assert not handle.done
        handle.wait()
        assert (values.get(target) == data[ORDER]).all()

    def test_next_write_of_the_numbers_comes_after_the_rows(self, emulated) -> None:
        first, second = cumem.Stream(), cumem.Stream()
        data, source = table()
        rows = on_device(ORDER)
        target = cumem.zeros(SHAPE, "u1")
        with session.gate(first):
            handle = cumem.copy_rows_async(target, source, src_rows=rows, stream=first)
            zeros = cumem.array(np.zeros(100, "i8"), kind="pinned")
            later = cumem.copy_async(rows, zeros, stream=second)
            assert not later.done
        later.wait()
        handle.wait()
        assert (values.get(target) == data[ORDER]).all()

    def test_memory_stays_until_late_rows_are_done(self, emulated) -> None:
        stream = cumem.Stream()
        data, source = table()
        target = cumem.zeros(SHAPE, "u1")
        with session.gate(stream):
            handle = cumem.copy_rows_async(
                target, source, src_rows=on_device(ORDER), stream=stream
            )
            del source
            gc.collect()
            # Memory that was freed too early would be given out again here.
            others = [on_device(np.full(100, 99)) for _ in range(4)]
        handle.wait()
        assert others
        assert (values.get(target) == data[ORDER]).all()

    def test_fetched_numbers_come_after_the_streams_that_are_named(
        self, emulated
    ) -> None:
        stream = cumem.Stream()
        data, _ = table()
        rows = on_device(np.zeros(100), "i8")
        cumem.copy_async(rows, cumem.array(ORDER, kind="pinned"), stream=stream)
        target = cumem.zeros(SHAPE, "u1")
        cumem.copy_rows_async(target, data, src_rows=rows, after=stream).wait()
        assert (values.get(target) == data[ORDER]).all()

    def test_target_that_holds_the_numbers_gets_rows_by_the_old_ones(
        self, emulated
    ) -> None:
        memory = on_device(np.arange(10)[::-1].reshape(10, 1))
        cumem.copy_rows(memory, cumem.array(np.arange(10).reshape(10, 1)), memory[:, 0])
        assert values.get(memory)[:, 0].tolist() == list(range(10))[::-1]

    @pytest.mark.parametrize("kind", REACHED)
    def test_overlapping_rows_leave_no_memory_in_use(self, emulated, kind) -> None:
        data, memory = table(kind)
        rows = on_device(ORDER)
        before = len(cumem.live())
        cumem.copy_rows(memory, memory, src_rows=rows)
        cumem.copy_rows_async(memory, memory, src_rows=rows).wait()
        session.testing.poll()  # cumem may not know yet that the first pass is done
        assert len(cumem.live()) == before
        assert (values.get(memory) == data[ORDER][ORDER]).all()

    @pytest.mark.parametrize("turned", [False, True])
    def test_arrays_in_the_gaps_of_each_other_take_one_launch(
        self, emulated, turned
    ) -> None:
        data = numbers(20 * 2 * 8).reshape(20, 2, 8)
        cache, rows = cumem.array(data, kind="device"), on_device([4, 0, 19])
        saved = cumem.zeros((3, 2, 8), "u1", "pinned")
        halves = [cache[::-1, k] if turned else cache[:, k] for k in (0, 1)]
        targets = [saved[:, k] for k in (0, 1)]
        cumem.copy_rows(targets, halves, src_rows=rows)
        session.testing.plan_fault(None, 0)  # counts from here
        cumem.copy_rows(targets, halves, src_rows=rows)
        assert session.testing.fault_count("kernel_launch") == 1
        assert (values.get(saved) == data[:: -1 if turned else 1][[4, 0, 19]]).all()

    @pytest.mark.parametrize("back", [False, True])
    @pytest.mark.parametrize("shift", [0, 1, 4, 7, 8])
    def test_rows_move_between_the_gaps_of_one_array(
        self, emulated, shift, back
    ) -> None:
        """Rows of 8 bytes, 16 apart, whose targets begin `shift` bytes behind them."""
        whole = numbers(20 * 16).reshape(20, 16)
        memory, order = cumem.array(whole, kind="device"), np.arange(20)[::-1]
        ends = [slice(shift, shift + 8), slice(8)]
        to, read = reversed(ends) if back else ends
        cumem.copy_rows(memory[:, to], memory[:, read], src_rows=on_device(order))
        whole[:, to] = whole[:, read][order].copy()
        assert (values.get(memory) == whole).all()

    def test_two_devices_copy_if_they_reach_each_other(self, emulated) -> None:
        data = numbers(4000).reshape(SHAPE)
        source = cumem.array(data, kind="device", device=1)
        target = cumem.zeros(SHAPE, "u1")
        cumem.copy_rows(target, source, src_rows=on_device(ORDER))
        assert (values.get(target) == data[ORDER]).all()

    def test_new_buffer_lies_on_the_device_of_the_numbers(self, emulated) -> None:
        rows = cumem.array(np.array([3, 1]), kind="device", device=1)
        got = cumem.take_rows(cumem.array(np.arange(10), kind="pinned"), rows)
        assert got.device == 1
        assert values.get(got).tolist() == [3, 1]


class TestWrongNumbers:
    @pytest.mark.parametrize("overlaps", [False, True])
    @pytest.mark.parametrize("how", ["blocking", "stream", "background"])
    @pytest.mark.parametrize("name", ["dst_rows", "src_rows"])
    def test_wrong_number_leaves_only_its_row_out(
        self, emulated, how, name, overlaps
    ) -> None:
        data, source = table("device")
        target = source if overlaps else cumem.array(data, kind="device")
        rows = {"dst_rows": np.arange(100), "src_rows": ORDER.copy()}
        rows[name][[3, 50]] = [100, -101]
        given = {key: on_device(row) for key, row in rows.items()}
        with pytest.raises(IndexError, match=name) as raised:
            copy_by(how, target, source, **given)
        assert raised.value.name == "CM_EROWS"  # type: ignore[attr-defined]
        expected = data.copy()
        right = np.delete(np.arange(100), [3, 50])
        expected[rows["dst_rows"][right]] = data[rows["src_rows"][right]]
        assert (values.get(target) == expected).all()

    def test_error_of_take_rows_names_its_own_argument(self, emulated) -> None:
        _, source = table()
        with pytest.raises(IndexError, match="cumem: rows: "):
            cumem.take_rows(source, on_device([100]))

    def test_wrong_number_that_nobody_asks_about_is_told(
        self, emulated, monkeypatch
    ) -> None:
        told: list[Any] = []
        monkeypatch.setattr(
            sys, "unraisablehook", lambda one: told.append(one.exc_type)
        )
        _, source = table()
        target = cumem.zeros((1, 40), "u1")
        cumem.copy_rows_async(target, source, src_rows=on_device([100]))
        cumem.copy(np.zeros((1, 40), "u1"), target)  # this waits for the rows
        session.testing.poll()
        assert told == [IndexError]

    def test_wrong_number_of_the_host_beside_some_of_a_device_moves_nothing(
        self, emulated
    ) -> None:
        _, source = table()
        target = cumem.zeros(SHAPE, "u1")
        rows = on_device(np.arange(2))
        with pytest.raises(IndexError, match=r"dst_rows\[1\] is 100"):
            cumem.copy_rows(target, source, [0, 100], rows)
        with pytest.raises(ValueError, match="each row may be written once"):
            cumem.copy_rows(target, source, [7, 7], rows)
        with pytest.raises(IndexError, match="dst has 1 rows, and 2 are asked for"):
            cumem.copy_rows(target[:1], source, src_rows=rows)
        assert not values.get(target).any()

    def test_fetched_numbers_are_checked_as_those_of_the_host(self, emulated) -> None:
        target = cumem.zeros(SHAPE, "u1")
        with pytest.raises(IndexError, match=r"src_rows\[1\] is 100"):
            cumem.copy_rows(target, np.ones(SHAPE, "u1"), src_rows=on_device([0, 100]))
        assert not values.get(target).any()

    @pytest.mark.parametrize(
        ("rows", "error", "text"),
        [
            (np.zeros(2), TypeError, "must be integers, not float64"),
            (np.zeros(2, bool), TypeError, "flatnonzero"),
            (np.zeros((2, 2), int), ValueError, r"src_rows\.ravel\(\)"),
        ],
    )
    def test_wrong_arrays_of_numbers_are_refused(
        self, emulated, rows, error, text
    ) -> None:
        _, source = table()
        with pytest.raises(error, match=text):
            cumem.copy_rows(source, source, src_rows=on_device(rows))

    def test_two_lists_of_other_lengths_are_refused(self, emulated) -> None:
        _, source = table()
        with pytest.raises(ValueError, match="dst_rows has 2 numbers and src_rows has"):
            cumem.copy_rows(source, source, on_device([0, 1]), on_device([0, 1, 2]))


class TestCapture:
    @pytest.mark.parametrize("dst_rows", [None, ORDER])
    @pytest.mark.parametrize("overlaps", [False, True])
    @pytest.mark.parametrize("kind", ["pinned", "device"])
    def test_captured_rows_belong_to_the_graph(
        self, emulated, overlaps, kind, dst_rows
    ) -> None:
        stream = cumem.Stream()
        source = cumem.empty_device(SHAPE, "u1", stream=stream)
        target = source if overlaps else cumem.zeros(SHAPE, "u1", kind)
        rows = on_device(ORDER)
        cumem.copy_rows(target, source, src_rows=rows, stream=stream)
        session.testing.set_capturing(stream, True)
        try:
            handle = cumem.copy_rows_async(
                target, source, dst_rows, rows, stream=stream
            )
            assert handle.done
            assert handle.route == "rows"
        finally:
            session.testing.set_capturing(stream, False)

    def test_numbers_that_must_be_fetched_are_refused(self, emulated) -> None:
        stream = cumem.Stream()
        target = cumem.empty_device(SHAPE, "u1", stream=stream)
        rows = on_device(ORDER)
        session.testing.set_capturing(stream, True)
        try:
            with pytest.raises(cumem.CudaError, match="captured") as raised:
                cumem.copy_rows_async(
                    target, np.ones(SHAPE, "u1"), src_rows=rows, stream=stream
                )
        finally:
            session.testing.set_capturing(stream, False)
        assert "empty_pinned" in raised.value.__notes__[0]


@pytest.mark.gpu
def test_graph_reads_the_numbers_anew_at_each_replay(cuda) -> None:
    torch = pytest.importorskip("torch")
    data, source = table()
    target, rows = cumem.zeros(SHAPE, "u1"), on_device(ORDER)
    both = cumem.array(data, kind="device")
    cumem.copy_rows(target, source, src_rows=rows)  # this loads the kernel
    cumem.copy_rows(both, both, src_rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        cumem.copy_rows_async(target, source, src_rows=rows, stream=stream)
        cumem.copy_rows_async(both, both, src_rows=rows, stream=stream)
    for order in (ORDER, ORDER[::-1], np.where(ORDER == 7, 100, ORDER)):
        cumem.copy(rows, order)
        cumem.copy(both, data)
        cumem.copy(target, data)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = data.copy()
        expected[order < 100] = data[order[order < 100]]
        assert (values.get(target) == expected).all()
        assert (values.get(both) == expected).all()


def test_signal_ends_the_waiting(emulated) -> None:
    stream = cumem.Stream()
    _, source = table()
    target, rows = cumem.zeros(SHAPE, "u1"), on_device(ORDER)
    cumem.Device(0).synchronize()
    with session.alarm(stream):
        cumem.copy_rows(target, source, src_rows=rows, stream=stream)
    stream.synchronize()


def test_progress_counts_the_bytes_of_all_rows(emulated) -> None:
    data, source = table()
    told: list[tuple[int, int]] = []
    cumem.copy_rows(
        cumem.zeros(SHAPE, "u1"),
        source,
        src_rows=on_device(ORDER),
        progress=lambda *seen: told.append(seen),
    )
    assert told[-1] == (data.nbytes, data.nbytes)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("how", ["blocking", "background"])
def test_failure_of_either_pass_is_told_once(emulated, nth, how, monkeypatch) -> None:
    """The rows overlap, so a first pass reads them, and a second one writes them."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    _, memory = table("device")
    rows = {"dst_rows": on_device(ORDER), "src_rows": on_device(ORDER[::-1])}
    cumem.copy_rows(memory, memory, **rows)  # this loads the kernel
    session.testing.plan_fault("kernel_launch", nth, code=999)

    def copy() -> None:
        if how == "blocking":
            cumem.copy_rows(memory, memory, **rows)
        else:
            cumem.copy_rows_async(memory, memory, **rows).wait()

    with pytest.raises(cumem.CudaError, match="999"):
        copy()
    session.testing.plan_fault(None, 0)
    gc.collect()
    assert not unraisable
    cumem.copy_rows(memory, memory, **rows)
