# SPDX-License-Identifier: Apache-2.0
"""A RowPlan reads and checks rows once, and copies them many times."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.pieces import numbers

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

PLACES = ["device", "pinned", "mapped", "managed", "numpy"]
LAYERS = 3
SHAPE = (100, 40)
ORDER = np.random.default_rng(4).permutation(100)
#: How the numbers are given: in memory of the host, in memory of the host with a limit on
#: multiprocessors, which only the kernel can keep, and in device memory.
NUMBERS = ["host", "kernel", "device"]


def on_device(rows: Any) -> cumem.Buffer:
    return cumem.array(np.asarray(rows), kind="device")


def tables(place: str, count: int = LAYERS) -> tuple[list[np.ndarray], list[Any]]:
    data = numbers(count * SHAPE[0] * SHAPE[1]).reshape(count, *SHAPE)
    return list(data), [values.put(layer, place) for layer in data]


def empty(place: str, count: int = LAYERS) -> list[Any]:
    return [values.put(np.zeros(SHAPE, "u1"), place) for _ in range(count)]


def plan_of(
    how: str, dsts: Any, srcs: Any, dst_rows: Any = None, src_rows: Any = None
) -> cumem.RowPlan:
    if how == "device":
        rows = (None if r is None else on_device(r) for r in (dst_rows, src_rows))
        return cumem.RowPlan(dsts, srcs, *rows)
    limit = 4 if how == "kernel" else None
    return cumem.RowPlan(dsts, srcs, dst_rows, src_rows, max_sms=limit)


@contextmanager
def capture(stream: cumem.Stream) -> Iterator[None]:
    session.testing.set_capturing(stream, True)
    try:
        yield
    finally:
        session.testing.set_capturing(stream, False)


def stream_on(device: int = 0) -> cumem.Stream:
    """Return a stream that has no work, so that a capture need not wait for any."""
    stream = cumem.Stream(device=device)
    stream.synchronize()
    return stream


def copy_all(way: str, plan: cumem.RowPlan) -> None:
    if way == "copy":
        plan.copy()
    elif way == "copy of each layer":
        for layer in range(plan.layer_count):
            plan.copy(layer=layer)
    elif way == "copy_async":
        plan.copy_async().wait()
    elif way == "copy_async on a stream":
        plan.copy_async(stream=cumem.Stream()).wait()
    elif way == "copy_layers":
        for transfer in plan.copy_layers():
            transfer.wait()
    else:
        for transfer in reversed(plan.copy_layers(stream=cumem.Stream())):
            transfer.wait()


WAYS = [
    *("copy", "copy of each layer", "copy_async", "copy_async on a stream"),
    *("copy_layers", "copy_layers on a stream"),
]


class TestBytes:
    @pytest.mark.parametrize("to", PLACES)
    @pytest.mark.parametrize("source", PLACES)
    @pytest.mark.parametrize("how", NUMBERS)
    @pytest.mark.parametrize("way", WAYS)
    def test_copies_between_every_two_kinds_equal_numpys(
        self, runtime, to, source, how, way
    ) -> None:
        data, sources = tables(source)
        targets = empty(to)
        rows = ORDER[:60], ORDER[::-1][:60] - 100
        plan = plan_of(how, targets, sources, *rows)
        for turn in range(2):  # The second copy goes by what the first one has kept.
            for target in targets:
                cumem.copy(target, np.full(SHAPE, turn, "u1"))
            copy_all(way, plan)
            for target, layer in zip(targets, data, strict=True):
                expected = np.full(SHAPE, turn, "u1")
                expected[rows[0]] = layer[rows[1]]
                assert (values.get(target) == expected).all()

    def test_rows_that_change_between_two_copies_are_read_anew(self, runtime) -> None:
        data, (source,) = tables("pinned", 1)
        (target,) = empty("device", 1)
        plan = cumem.RowPlan(target, source, src_rows=ORDER)
        plan.copy()
        source[...] = data[0] + 1
        plan.copy()
        assert (values.get(target) == data[0][ORDER] + 1).all()

    def test_numbers_of_the_host_may_change_once_the_plan_is_made(
        self, runtime
    ) -> None:
        for how in ("host", "kernel"):
            data, (source,) = tables("pinned", 1)
            (target,) = empty("device", 1)
            rows = ORDER.copy()
            plan = plan_of(how, target, source, None, rows)
            rows[:] = 0
            plan.copy()
            assert (values.get(target) == data[0][ORDER]).all()

    @pytest.mark.parametrize("source", ["pinned", "numpy"])
    def test_numbers_on_a_device_are_read_anew_at_each_copy(
        self, runtime, source
    ) -> None:
        data, (table,) = tables(source, 1)
        (target,) = empty("device", 1)
        rows = on_device(ORDER)
        plan = cumem.RowPlan(target, table, src_rows=rows)
        for order in (ORDER, ORDER[::-1]):
            cumem.copy(rows, np.ascontiguousarray(order))
            plan.copy()
            assert (values.get(target) == data[0][order]).all()

    @pytest.mark.parametrize("how", NUMBERS)
    @pytest.mark.parametrize("place", ["device", "numpy"])
    def test_layers_of_different_lengths_count_negative_numbers_each(
        self, runtime, place, how
    ) -> None:
        data = [numbers(rows * 8).reshape(rows, 8) for rows in (5, 9, 7)]
        sources = [values.put(layer, place) for layer in data]
        targets = [values.put(np.zeros((2, 8), "u1"), place) for _ in data]
        plan = plan_of(how, targets, sources, None, [-1, 1])
        for way in WAYS:
            copy_all(way, plan)
            for target, layer in zip(targets, data, strict=True):
                assert (values.get(target) == layer[[-1, 1]]).all()
                cumem.copy(target, np.zeros((2, 8), "u1"))

    @pytest.mark.parametrize("how", NUMBERS)
    @pytest.mark.parametrize("place", ["device", "pinned", "numpy"])
    def test_ends_that_overlap_are_read_before_they_are_written(
        self, runtime, place, how
    ) -> None:
        (data,), (memory,) = tables(place, 1)
        plan = plan_of(how, memory, memory, ORDER, ORDER[::-1])
        expected = data
        for way in WAYS:
            copy_all(way, plan)
            expected = expected.copy()
            expected[ORDER] = expected[ORDER[::-1]].copy()
            assert (values.get(memory) == expected).all()

    @pytest.mark.parametrize("how", NUMBERS)
    def test_plan_of_no_rows_copies_nothing(self, runtime, how) -> None:
        _, sources = tables("pinned")
        targets = empty("device")
        plan = plan_of(how, targets, sources, np.zeros(0, int), np.zeros(0, int))
        for way in WAYS:
            copy_all(way, plan)
        assert plan.nbytes == 0
        assert not any(values.get(target).any() for target in targets)

    def test_plan_of_no_layers_copies_nothing(self, runtime) -> None:
        plan = cumem.RowPlan([], [], [1])
        plan.copy()
        assert plan.copy_layers() == []
        assert plan.layer_count == 0

    @pytest.mark.parametrize("how", NUMBERS)
    @pytest.mark.parametrize("place", ["pinned", "numpy"])
    def test_threads_copy_by_one_plan_at_the_same_time(
        self, emulated, place, how
    ) -> None:
        """The layers differ in length, and negative numbers count from the end of each
        layer.
        """
        data = [numbers(rows * 8).reshape(rows, 8) for rows in range(300, 308)]
        sources = [values.put(layer, place) for layer in data]
        kind = "device" if place == "pinned" else "numpy"
        targets = [values.put(np.zeros((9, 8), "u1"), kind) for _ in data]
        rows = [-1, 1, -3, 7, 4, 100, -100, 50, 0]
        plan = plan_of(how, targets, sources, None, rows)
        failures: list[BaseException] = []

        def run(layer: int) -> None:
            try:
                for _ in range(20):
                    cumem.copy(targets[layer], np.zeros((9, 8), "u1"))
                    plan.copy(layer=layer)
                    assert (values.get(targets[layer]) == data[layer][rows]).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(data))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


class TestArguments:
    @pytest.mark.parametrize("how", ["host", "kernel"])
    def test_wrong_numbers_of_the_host_make_no_plan(self, emulated, how) -> None:
        _, sources = tables("pinned")
        targets = empty("device")
        for rows, error, text in [
            (([0, 1], [0, 100]), IndexError, r"RowPlan: layer 0: src_rows\[1\] is 100"),
            (([3, 3], [0, 1]), ValueError, "each row may be written once"),
            (([0], [0, 1]), ValueError, "dst_rows has 1 numbers and src_rows has 2"),
            ((None, None), TypeError, r"RowPlan\(\) needs dst_rows or src_rows"),
            ((None, [True]), TypeError, "flatnonzero"),
        ]:
            with pytest.raises(error, match=text):
                plan_of(how, targets, sources, *rows)
        assert session.testing.live_storages() == len(targets) + len(sources)

    def test_wrong_numbers_of_a_later_layer_make_no_plan(self, emulated) -> None:
        sources = [np.zeros((rows, 4)) for rows in (9, 5)]
        targets = [np.zeros((2, 4)) for _ in sources]
        with pytest.raises(IndexError, match=r"layer 1: src_rows\[1\] is 7"):
            cumem.RowPlan(targets, sources, src_rows=[0, 7])

    def test_arrays_that_do_not_pair_make_no_plan(self, emulated) -> None:
        with pytest.raises(ValueError, match="dsts has 1 arrays and srcs has 2"):
            cumem.RowPlan([np.zeros(3)], [np.zeros(3)] * 2, [0])
        with pytest.raises(ValueError, match="layer 0: the rows of dsts are of dtype"):
            cumem.RowPlan([np.zeros(3)], [np.zeros(3, "f4")], [0])
        with pytest.raises(TypeError, match="dsts is a list and srcs is one array"):
            cumem.RowPlan([np.zeros(3)], np.zeros(3), [0])
        with pytest.raises(
            TypeError, match="srcs must be a buffer, an array or a list"
        ):
            cumem.RowPlan(np.zeros(3), 7, [0])
        readonly = np.zeros(3)
        readonly.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            cumem.RowPlan(readonly, np.zeros(3), [0])

    @pytest.mark.parametrize("layer", [3, -4, 2**40])
    def test_layer_that_is_not_there_is_refused(self, emulated, layer) -> None:
        _, sources = tables("pinned")
        plan = cumem.RowPlan(empty("device"), sources, src_rows=[1])
        for call in (plan.copy, plan.copy_async):
            with pytest.raises(
                IndexError, match=f"layer is {layer}, but the plan has 3"
            ):
                call(layer=layer)

    def test_negative_layer_counts_from_the_end(self, emulated) -> None:
        data, sources = tables("pinned")
        targets = empty("device")
        cumem.RowPlan(targets, sources, src_rows=ORDER).copy(layer=-1)
        assert (values.get(targets[2]) == data[2][ORDER]).all()
        assert not values.get(targets[0]).any()

    def test_stream_of_another_device_is_refused(self, emulated) -> None:
        _, sources = tables("pinned")
        plan = cumem.RowPlan(empty("device"), sources, src_rows=[1])
        with pytest.raises(ValueError, match=r"RowPlan\.copy_layers"):
            plan.copy_layers(stream=cumem.Stream(device=1))

    @pytest.mark.parametrize("how", NUMBERS)
    def test_progress_counts_the_bytes_of_all_rows(self, emulated, how) -> None:
        _, sources = tables("pinned")
        plan = plan_of(how, empty("device"), sources, None, ORDER)
        told: list[tuple[int, int]] = []
        plan.copy(progress=lambda *seen: told.append(seen))
        assert told[-1] == (plan.nbytes, plan.nbytes)
        assert plan.nbytes == LAYERS * SHAPE[0] * SHAPE[1]

    def test_repr_says_how_much_is_copied(self, emulated) -> None:
        _, sources = tables("pinned")
        targets = empty("device")
        with plan_of("kernel", targets, sources, None, ORDER) as plan:
            assert repr(plan) == (
                "<cumem.RowPlan of 3 layers with 100 rows each, 12000 bytes, emulated>"
            )
        assert repr(plan) == "<cumem.RowPlan, closed>"
        ordinary = cumem.RowPlan(np.zeros((1, 2)), np.ones((1, 2)), [0])
        assert "of 1 layer with 1 row each, 16 bytes" in repr(ordinary)

    def test_pickles_and_copies_are_refused(self, emulated) -> None:
        plan = cumem.RowPlan(np.zeros(3), np.ones(3), [1])
        for refused in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                refused(plan)


class TestOrder:
    @pytest.mark.parametrize("how", NUMBERS)
    def test_stream_waits_for_its_layer_without_the_host(self, emulated, how) -> None:
        load, compute = cumem.Stream(), cumem.Stream()
        data, sources = tables("pinned")
        targets, seen = empty("device"), empty("pinned")
        plan = plan_of(how, targets, sources, None, ORDER)
        with session.gate(load):
            transfers = plan.copy_layers(stream=load)
            for target, transfer, out in zip(targets, transfers, seen, strict=True):
                transfer.order(compute)
                cumem.copy_async(out, target, stream=compute)
            assert not compute.done
            assert not any(transfer.done for transfer in transfers)
        compute.synchronize()
        for out, layer in zip(seen, data, strict=True):
            assert (values.get(out) == layer[ORDER]).all()

    @pytest.mark.parametrize("how", ["kernel", "device"])
    def test_layers_in_the_background_end_one_after_the_other(
        self, emulated, how
    ) -> None:
        """The last layer comes after the first, which comes after the work of a stream."""
        first = cumem.Stream()
        data, sources = tables("pinned")
        targets = empty("device")
        plan = plan_of(how, targets, sources, None, ORDER)
        with session.gate(first):
            cumem.copy_async(targets[0], np.zeros(SHAPE, "u1"), after=first)
            transfers = plan.copy_layers()
            for _ in range(3):  # Work that need not wait gets its turn meanwhile.
                cumem.copy_async(cumem.zeros(SHAPE, "u1"), data[0]).wait()
            assert not any(transfer.done for transfer in transfers)
        transfers[-1].wait()
        assert all(transfer.done for transfer in transfers)
        for target, layer in zip(targets, data, strict=True):
            assert (values.get(target) == layer[ORDER]).all()

    def test_copies_come_after_the_streams_that_are_named(self, emulated) -> None:
        before = cumem.Stream()
        data, sources = tables("pinned")
        targets = empty("device")
        plan = plan_of("device", targets, sources, None, ORDER)
        with session.gate(before):
            handles = [plan.copy_async(after=before), *plan.copy_layers(after=[before])]
            assert not any(handle.done for handle in handles)
        for handle in handles:
            handle.wait()
        assert (values.get(targets[2]) == data[2][ORDER]).all()

    @pytest.mark.parametrize("how", NUMBERS)
    def test_memory_stays_until_copies_of_a_dropped_plan_are_done(
        self, emulated, how
    ) -> None:
        stream = cumem.Stream()
        data, sources = tables("pinned")
        targets = empty("device")
        plan = plan_of(how, targets, sources, None, ORDER)
        with session.gate(stream):
            plan.copy_layers(stream=stream)
            plan.close()
            del plan, sources
            gc.collect()
            # Memory that was freed too early would be given out again here.
            others = [cumem.array(np.full(100, 99), kind="mapped") for _ in range(9)]
        stream.synchronize()
        assert others
        for target, layer in zip(targets, data, strict=True):
            assert (values.get(target) == layer[ORDER]).all()

    def test_signal_ends_the_waiting(self, emulated) -> None:
        stream = cumem.Stream()
        _, sources = tables("pinned")
        plan = plan_of("kernel", empty("device"), sources, None, ORDER)
        cumem.Device(0).synchronize()
        with session.alarm(stream):
            plan.copy(stream=stream)
        stream.synchronize()


class TestLife:
    def test_buffer_in_a_plan_is_not_freed_until_the_plan_is_closed(
        self, runtime
    ) -> None:
        _, sources = tables("pinned")
        targets, rows = empty("device"), on_device(ORDER)
        plan = cumem.RowPlan(targets, sources, src_rows=rows)
        for buffer in (targets[0], sources[2], rows):
            with pytest.raises(BufferError, match=r"live export.*close each RowPlan"):
                buffer.free()
        plan.copy()
        plan.close()
        for buffer in (*targets, *sources, rows):
            buffer.free()

    def test_closed_plan_is_refused(self, emulated) -> None:
        plan = cumem.RowPlan(np.zeros(3), np.ones(3), [1])
        assert not plan.closed
        with plan as entered:
            assert entered is plan
        plan.close()
        assert plan.closed
        assert (plan.layer_count, plan.nbytes) == (1, 8)
        for call in (plan.copy, plan.copy_async, plan.copy_layers, plan.check):
            with pytest.raises(ValueError, match="the plan is closed"):
                call()
        with pytest.raises(ValueError, match="the plan is closed"), plan:
            pass

    @pytest.mark.parametrize("how", NUMBERS)
    def test_plan_closed_during_its_copy_ends_with_it(self, emulated, how) -> None:
        stream = cumem.Stream()
        data, sources = tables("pinned")
        targets = empty("device")
        plan = plan_of(how, targets, sources, None, ORDER)
        cumem.Device(0).synchronize()

        def close() -> None:
            plan.close()
            session.testing.gate_open(stream)

        session.testing.gate_close(stream)
        with session.when_waiting(close) as joined:
            plan.copy(stream=stream)
        joined()
        assert (values.get(targets[2]) == data[2][ORDER]).all()
        for buffer in (*targets, *sources):
            buffer.free()

    @pytest.mark.parametrize("how", NUMBERS)
    def test_dropped_plan_leaves_nothing(self, emulated, how) -> None:
        _, sources = tables("pinned")
        plan = plan_of(how, empty("device"), sources, None, ORDER)
        plan.copy()
        del plan, sources
        gc.collect()
        session.leftovers()

    def test_plan_in_a_circle_is_collected(self, emulated) -> None:
        class Array(np.ndarray):
            plan: Any

        source = cumem.full(3, 1.0, kind="pinned").numpy().view(Array)
        source.plan = cumem.RowPlan(np.zeros(3), source, [1])
        gone = weakref.ref(source.plan)
        del source
        gc.collect()
        assert gone() is None

    def test_arrays_of_the_plan_outlive_their_names(self, emulated) -> None:
        target = np.zeros((2, 3))
        plan = cumem.RowPlan([target], [np.arange(6.0).reshape(2, 3)], [1, 0])
        gc.collect()
        plan.copy()
        assert target.tolist() == [[3, 4, 5], [0, 1, 2]]

    def test_array_that_has_moved_is_refused(self, emulated) -> None:
        source, target = np.ones(3), np.zeros(3)
        plan = cumem.RowPlan(target, source, [1])
        plan.copy()
        source.resize(1 << 20, refcheck=False)
        for call in (plan.copy, plan.copy_async, plan.copy_layers):
            with pytest.raises(BufferError, match="is gone"):
                call()

    def test_tensor_that_has_moved_is_refused(self, emulated) -> None:
        torch = pytest.importorskip("torch")
        source = torch.ones(3)
        plan = cumem.RowPlan(torch.zeros(3), source, [1])
        plan.copy()
        source.share_memory_()
        with pytest.raises(BufferError, match="share_memory_"):
            plan.copy()

    def test_shutdown_is_refused_while_a_plan_keeps_a_buffer(self, emulated) -> None:
        plan = cumem.RowPlan(cumem.zeros(3, kind="device"), np.ones(3), [1])
        with pytest.raises(BufferError, match="close each RowPlan"):
            cumem.shutdown()
        plan.close()
        cumem.shutdown()

    def test_forked_child_is_refused(self, emulated) -> None:
        plan = cumem.RowPlan(cumem.zeros(3, kind="pinned"), np.ones(3), [1])
        child = os.fork()
        if child == 0:
            calls = (plan.copy, plan.copy_async, plan.copy_layers, plan.check)
            refused = 0
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    refused += "forked child" in str(error)
            plan.close()
            own = cumem.RowPlan(np.zeros(3), np.ones(3), [1])
            own.copy()
            os._exit(0 if refused == len(calls) else 1)
        assert os.waitpid(child, 0)[1] == 0
        plan.copy()


class TestWrongNumbers:
    @pytest.mark.parametrize("way", WAYS[:4])
    def test_copy_and_check_tell_of_numbers_on_a_device(self, emulated, way) -> None:
        data, sources = tables("pinned")
        targets = empty("device")
        rows = ORDER.copy()
        rows[3] = 100
        plan = plan_of("device", targets, sources, None, rows)
        plan.check()
        with pytest.raises(IndexError, match="src_rows"):
            copy_all(way, plan)
        with pytest.raises(IndexError, match="src_rows") as raised:
            plan.check()
        assert raised.value.__notes__ == ["in copies of a plan"]
        plan.check()  # Each fault is told of once.
        right = np.delete(np.arange(100), 3)
        assert (values.get(targets[0])[right] == data[0][rows[right]]).all()

    def test_each_layer_tells_of_its_own_numbers(self, emulated) -> None:
        """One of the numbers names a row that the second layer does not have."""
        sources = [cumem.full((rows, 4), 7, "u1", "pinned") for rows in (9, 5, 9)]
        targets = [cumem.zeros((2, 4), "u1", "device") for _ in sources]
        plan = plan_of("device", targets, sources, None, [0, 7])
        first, second, third = plan.copy_layers(stream=cumem.Stream())
        third.wait()
        first.wait()
        with pytest.raises(IndexError, match="src_rows"):
            second.wait()
        with pytest.raises(IndexError, match="src_rows"):
            plan.check()
        assert [values.get(target)[1].any() for target in targets] == [
            True,
            False,
            True,
        ]

    def test_right_copy_after_a_wrong_one_does_not_raise(self, emulated) -> None:
        _, (source,) = tables("pinned", 1)
        rows = on_device([0, 100])
        (target,) = empty("device", 1)
        plan = cumem.RowPlan(target, source, src_rows=rows)
        with pytest.raises(IndexError):
            plan.copy()
        cumem.copy(rows, np.array([0, 99]))
        plan.copy()
        plan.copy_async().wait()
        with pytest.raises(IndexError):  # No check has told of the first copy yet.
            plan.check()

    def test_check_gathers_what_was_wrong_in_several_copies(self, emulated) -> None:
        _, (source,) = tables("pinned", 1)
        (target,) = empty("device", 1)
        rows = [on_device([0, 1]), on_device([0, 1])]
        plan = cumem.RowPlan(target, source, *rows)
        for wrong in rows:
            cumem.copy(wrong, np.array([0, 100]))
            with pytest.raises(IndexError):
                plan.copy()
            cumem.copy(wrong, np.array([0, 1]))
        with pytest.raises(IndexError, match="dst_rows and src_rows"):
            plan.check()

    def test_check_tells_of_copies_that_nobody_waits_for(
        self, emulated, monkeypatch
    ) -> None:
        session.testing.poll()  # Without this hook the failures would come later.
        told: list[Any] = []
        monkeypatch.setattr(
            sys, "unraisablehook", lambda one: told.append(one.exc_type)
        )
        _, sources = tables("pinned")
        plan = plan_of("device", empty("device"), sources, None, [100])
        stream = cumem.Stream()
        transfers = plan.copy_layers(stream=stream)
        stream.synchronize()
        with pytest.raises(IndexError):
            plan.check()
        del transfers
        session.testing.poll()
        assert told == [IndexError] * LAYERS  # as for every copy that nobody asks about

    def test_check_of_numbers_that_the_host_has_checked_is_silent(
        self, emulated
    ) -> None:
        for how in ("host", "kernel"):
            _, sources = tables("pinned")
            plan = plan_of(how, empty("device"), sources, None, ORDER)
            plan.copy()
            plan.check()

    def test_fetched_numbers_are_checked_as_those_of_the_host(self, emulated) -> None:
        _, sources = tables("numpy")
        targets = empty("device")
        plan = plan_of("device", targets, sources, None, [0, 100])
        with pytest.raises(IndexError, match=r"layer 2: src_rows\[1\] is 100"):
            plan.copy(layer=2)
        with pytest.raises(IndexError, match=r"layer 0: src_rows\[1\] is 100"):
            plan.copy_layers()
        assert not any(values.get(target).any() for target in targets)


class TestCapture:
    @pytest.mark.parametrize("how", NUMBERS)
    @pytest.mark.parametrize("overlaps", [False, True])
    def test_captured_copies_belong_to_the_graph(self, emulated, how, overlaps) -> None:
        stream = stream_on()
        _, sources = tables("device")
        targets = sources if overlaps else empty("device")
        plan = plan_of(how, targets, sources, None, ORDER)
        plan.copy(stream=stream)
        with capture(stream):
            handles = [plan.copy_async(stream=stream), *plan.copy_layers(stream=stream)]
            assert all(handle.done for handle in handles)
            assert {handle.route for handle in handles} == {"rows"}
        plan.check()

    @pytest.mark.parametrize("how", ["kernel", "device"])
    def test_memory_of_captured_copies_outlives_the_plan(self, emulated, how) -> None:
        """The kernel reads numbers of the host, or notes wrong numbers in a word
        of memory.
        """
        stream = stream_on()
        (target,), (source,) = empty("device", 1), tables("pinned", 1)[1]
        rows = on_device(ORDER)

        def in_flight(captured: bool) -> int:
            before = cumem.stats().total.in_flight_nbytes
            given = rows if how == "device" else ORDER
            limit = None if how == "device" else 4
            plan = cumem.RowPlan(target, source, src_rows=given, max_sms=limit)
            if captured:
                with capture(stream):
                    plan.copy_async(stream=stream)
            else:
                plan.copy_async(stream=stream).wait()
            del plan
            gc.collect()
            session.leftovers(held=3)  # the target, the source and the numbers stay
            cumem.Device(0).synchronize()
            cumem.trim()
            return cumem.stats().total.in_flight_nbytes - before

        assert in_flight(captured=False) == 0
        assert in_flight(captured=True) > 0

    def test_few_rows_can_be_captured_too(self, emulated) -> None:
        """The copy engine copies them, and it needs no numbers when the graph runs."""
        stream = stream_on()
        data, (source,) = tables("pinned", 1)
        (target,) = empty("device", 1)
        plan = cumem.RowPlan(target, source, [3], [5])
        plan.copy(stream=stream)
        with capture(stream):
            assert plan.copy_async(stream=stream).done
        assert (values.get(target)[3] == data[0][5]).all()

    def test_ordinary_memory_is_refused_in_a_capture(self, emulated) -> None:
        stream = stream_on()
        _, sources = tables("numpy")
        plan = plan_of("device", empty("device"), sources, None, ORDER)
        plan.copy(stream=stream)
        with (
            capture(stream),
            pytest.raises(cumem.CudaError, match="captured"),
        ):
            plan.copy_layers(stream=stream)


def graph_of(plan: cumem.RowPlan) -> Any:
    """Capture a copy of all layers and one of each layer, after the kernel is loaded."""
    torch = pytest.importorskip("torch")
    plan.copy()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        plan.copy_async(stream=stream)
        plan.copy_layers(stream=stream)
    return graph


@pytest.mark.gpu
class TestGraph:
    @pytest.mark.parametrize("how", ["kernel", "device"])
    def test_graph_runs_when_the_plan_is_gone(self, cuda, how) -> None:
        torch = pytest.importorskip("torch")
        data, sources = tables("pinned")
        targets = empty("device")
        plan = plan_of(how, targets, sources, None, ORDER)
        graph = graph_of(plan)
        del plan
        gc.collect()
        # Memory that had gone back would be given out again and overwritten here.
        others = [cumem.array(np.full(100, 99), kind="mapped") for _ in range(50)]
        for turn in range(2):
            for target in targets:
                cumem.copy(target, np.full(SHAPE, turn, "u1"))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            for target, layer in zip(targets, data, strict=True):
                assert (values.get(target) == layer[ORDER]).all()
        assert all((other.numpy() == 99).all() for other in others)

    def test_graph_of_rows_that_overlap_runs_when_the_plan_is_gone(self, cuda) -> None:
        torch = pytest.importorskip("torch")
        (data,), (memory,) = tables("device", 1)
        plan = plan_of("device", memory, memory, None, ORDER)
        graph = graph_of(plan)
        del plan
        gc.collect()
        others = [cumem.full(SHAPE, 99, "u1", "device") for _ in range(20)]
        cumem.copy(memory, data)
        torch.cuda.synchronize()
        graph.replay()  # a copy of all layers, and one of the only layer
        torch.cuda.synchronize()
        assert (values.get(memory) == data[ORDER][ORDER]).all()
        assert all((values.get(other) == 99).all() for other in others)

    def test_check_tells_of_wrong_numbers_in_a_replay(self, cuda) -> None:
        torch = pytest.importorskip("torch")
        data, sources = tables("pinned")
        targets, rows = empty("device"), on_device(ORDER)
        plan = cumem.RowPlan(targets, sources, src_rows=rows)
        graph = graph_of(plan)
        for order in (np.where(ORDER == 7, 100, ORDER), ORDER):
            cumem.copy(rows, order)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            right = order < 100
            for target, layer in zip(targets, data, strict=True):
                assert (values.get(target)[right] == layer[order[right]]).all()
            if not right.all():
                with pytest.raises(IndexError, match="src_rows"):
                    plan.check()
            plan.check()
