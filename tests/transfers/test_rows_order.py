# SPDX-License-Identifier: Apache-2.0
"""Tests of what comes before copy_rows(), what it keeps alive, and how it fails."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest
from support import session, values
from support.row_tables import ORDER, table

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]


def test_rows_come_after_what_the_buffers_wait_for(emulated) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    data, source = table()
    middle, out = cumem.zeros((100, 40), "u1"), cumem.zeros((100, 40), "u1", "pinned")
    with session.gate(first):
        cumem.copy_async(middle, source, stream=first)
        handle = cumem.copy_rows_async(out, middle, src_rows=ORDER, stream=second)
        assert not handle.done
    handle.wait()
    assert (out.numpy() == data[ORDER]).all()


def test_what_follows_comes_after_rows_in_the_background(emulated) -> None:
    stream = cumem.Stream()
    data, source = table()
    target = cumem.zeros((100, 40), "u1")
    out = cumem.zeros((100, 40), "u1", "pinned")
    with session.gate(stream):
        target.fill(1, stream=stream)
        first = cumem.copy_rows_async(target, source, src_rows=ORDER)
        second = cumem.copy_rows_async(out, target, src_rows=ORDER)
        assert not first.done
        assert not second.done
    second.wait()
    assert (out.numpy() == data[ORDER[ORDER]]).all()


def test_rows_come_after_the_streams_that_are_named(emulated) -> None:
    stream = cumem.Stream()
    data, source = table()
    target = cumem.zeros((100, 40), "u1")
    with session.gate(stream):
        handle = cumem.copy_rows_async(target, source, src_rows=ORDER, after=[stream])
        session.let_workers_pass()
        assert not handle.done
    handle.wait()
    assert (values.get(target) == data[ORDER]).all()


def test_overlapping_rows_come_after_the_streams_that_are_named(emulated) -> None:
    stream = cumem.Stream()
    data, memory = table("device")
    with session.gate(stream):
        handle = cumem.copy_rows_async(memory, memory, src_rows=ORDER, after=stream)
        session.let_workers_pass()
        assert not handle.done
    handle.wait()
    assert (values.get(memory) == data[ORDER]).all()


@pytest.mark.parametrize("overlaps", [False, True])
def test_handle_keeps_ends_alive_and_counts_their_bytes(emulated, overlaps) -> None:
    stream = cumem.Stream()
    data, source = table("device")
    target = source if overlaps else cumem.zeros((100, 40), "u1")
    with session.gate(stream):
        source.record_stream(stream)
        handle = cumem.copy_rows_async(target, source, src_rows=ORDER, stream=stream)
        kept = weakref.ref(target)
        del source
        gc.collect()
    assert handle.nbytes == data.nbytes
    handle.wait()
    assert kept() is target
    assert (values.get(target) == data[ORDER]).all()


def test_dropped_handle_lets_overlapping_rows_end(emulated) -> None:
    stream = cumem.Stream()
    data, memory = table("device")
    with session.gate(stream):
        cumem.copy_rows_async(memory, memory, src_rows=ORDER, stream=stream)
    assert (values.get(memory) == data[ORDER]).all()


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_overlapping_rows_leave_no_memory_in_use(emulated, kind) -> None:
    _, memory = table(kind)
    before = len(cumem.live())
    cumem.copy_rows(memory, memory, src_rows=ORDER)
    cumem.copy_rows_async(memory, memory, src_rows=ORDER).wait()
    # Overlapping rows take two passes, and cumem may not know yet that the first is done.
    session.testing.poll()
    assert len(cumem.live()) == before


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.parametrize("shift", [0, 1])
def test_failure_of_either_pass_is_told_once(
    emulated, nth, how, shift, monkeypatch
) -> None:
    """The first pass reads rows that overlap, and the second writes them.

    If `shift` is 0, both ends are one array, and the kernel reads the numbers of its rows.
    Otherwise the ends are two views, of which one begins a row later. Their rows are then
    joined into runs instead.
    """
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    _, memory = table("device")
    last = len(memory) - 1
    order = ORDER[last > ORDER]
    rows = {"dst_rows": order, "src_rows": order[::-1]}
    target, source = memory[shift:], memory[: len(memory) - shift]
    cumem.copy_rows(target, source, **rows)  # this loads the kernel
    session.testing.plan_fault("kernel_launch", nth, code=999)

    def copy() -> None:
        if how == "blocking":
            cumem.copy_rows(target, source, **rows)
        else:
            cumem.copy_rows_async(target, source, **rows).wait()

    with pytest.raises(cumem.CudaError, match="999"):
        copy()
    session.testing.plan_fault(None, 0)
    gc.collect()
    assert not unraisable
    cumem.copy_rows(target, source, **rows)


@pytest.mark.parametrize("overlaps", [False, True])
def test_captured_rows_belong_to_the_graph(emulated, overlaps) -> None:
    stream = cumem.Stream()
    source = cumem.empty_device((100, 40), "u1", stream=stream)
    target = cumem.empty_pinned((100, 40), "u1")
    target = source if overlaps else target
    cumem.copy_rows(target, source, src_rows=ORDER, stream=stream)
    session.testing.set_capturing(stream, True)
    try:
        handle = cumem.copy_rows_async(target, source, src_rows=ORDER, stream=stream)
        assert handle.done
        with pytest.raises(cumem.CudaError):
            cumem.copy_rows(target, source, src_rows=ORDER, stream=stream)
        ordinary = np.ones((100, 40), "u1")
        with pytest.raises(cumem.CudaError):
            cumem.copy_rows_async(source, ordinary, src_rows=ORDER, stream=stream)
    finally:
        session.testing.set_capturing(stream, False)


def test_signal_ends_the_waiting(emulated) -> None:
    stream = cumem.Stream()
    _, source = table()
    target = cumem.zeros((100, 40), "u1")
    cumem.Device(0).synchronize()
    with session.alarm(stream):
        cumem.copy_rows(target, source, src_rows=ORDER, stream=stream)
    stream.synchronize()


def test_stream_of_another_device_is_refused(emulated) -> None:
    _, source = table("device")
    with pytest.raises(ValueError, match="copy_rows"):
        cumem.copy_rows(
            np.zeros((100, 40), "u1"),
            source,
            src_rows=ORDER,
            stream=cumem.Stream(device=1),
        )


def test_closed_buffer_is_refused(emulated) -> None:
    _, source = table()
    source.free()
    with pytest.raises(ValueError, match="closed"):
        cumem.copy_rows(np.zeros((100, 40), "u1"), source, src_rows=ORDER)


def test_progress_counts_the_bytes_of_all_rows(emulated) -> None:
    data, source = table()
    told: list[tuple[int, int]] = []
    target = cumem.zeros((100, 40), "u1")
    cumem.copy_rows(
        target, source, src_rows=ORDER, progress=lambda *seen: told.append(seen)
    )
    assert told[-1] == (data.nbytes, data.nbytes)
