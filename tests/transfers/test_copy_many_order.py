# SPDX-License-Identifier: Apache-2.0
"""Tests of what comes before copy_many(), what it keeps alive, and how it fails.

A stream whose gate is shut starts no work, which shows what waits for it. Planned
faults make a part of a call fail.
"""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
from support import session, values
from support.pieces import numbers, shuffled
from support.strategies import KINDS

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

PLACES = [*KINDS, "numpy"]


class TestOrder:
    def test_comes_after_what_the_buffers_wait_for(self, emulated) -> None:
        first, second = cumem.Stream(), cumem.Stream()
        buffers = [cumem.empty(100, "u1") for _ in range(8)]
        with session.gate(first):
            for buffer in buffers:
                buffer.fill(7, stream=first)
            out = cumem.zeros(800, "u1", "pinned")
            handle = cumem.copy_many_async(
                [(out[i * 100 : i * 100 + 100], b) for i, b in enumerate(buffers)],
                stream=second,
            )
            assert not handle.done
        handle.wait()
        assert (out.numpy() == 7).all()

    def test_what_follows_comes_after_it(self, emulated) -> None:
        first, second = cumem.Stream(), cumem.Stream()
        source = cumem.array(numbers(800), kind="pinned")
        buffers = [cumem.zeros(100, "u1") for _ in range(8)]
        with session.gate(first):
            handle = cumem.copy_many_async(
                [(b, source[i * 100 : i * 100 + 100]) for i, b in enumerate(buffers)],
                stream=first,
            )
            copies = [cumem.empty(100, "u1", "pinned") for _ in buffers]
            later = cumem.copy_many_async(
                list(zip(copies, buffers, strict=True)), stream=second
            )
            assert not handle.done
            assert not later.done
        got = np.concatenate([c.numpy() for c in copies])
        assert (got == source.numpy()).all()

    def test_background_waits_for_nobody(self, emulated) -> None:
        stream = cumem.Stream()
        source = cumem.empty(1000, "u1", "mapped")
        with session.gate(stream):
            source.fill(3, stream=stream)
            out = cumem.zeros(1000, "u1")
            strided = cumem.zeros(1000, "u1")
            pairs = [(out[d], source[s]) for d, s in shuffled(10, 100)]
            pairs += [(strided[::2], source[::2]), (np.zeros(10, "u1"), source[:10])]
            handle = cumem.copy_many_async(pairs)
            assert not handle.done
        handle.wait()
        assert handle.route == "several"
        assert (values.get(out) == 3).all()
        assert values.get(strided).sum() == 1500

    @pytest.mark.parametrize("idle", ["itself", "nothing"])
    @pytest.mark.parametrize("where", PLACES)
    def test_a_pair_without_work_leaves_the_order(self, emulated, where, idle) -> None:
        """A pair that is done at once must not change the order of the pairs before it."""
        stream = cumem.Stream()
        source = cumem.zeros(1000, "u1")
        middle, target = (values.put(numbers(1000), where) for _ in range(2))
        again = middle[:10] if idle == "itself" else middle[:0]
        with session.gate(stream):
            source.fill(7, stream=stream)
            handle = cumem.copy_many_async(
                [(middle, source), (again, again), (target, middle)]
            )
            session.let_workers_pass()
            assert not handle.done  # The last pair waits for the first.
        handle.wait()
        assert handle.route == "several"
        assert (values.get(target) == 7).all()

    def test_a_stream_waits_for_all_parts(self, emulated) -> None:
        first, second = cumem.Stream(), cumem.Stream()
        source = cumem.array(numbers(1000), kind="pinned")
        out = cumem.zeros(1000, "u1")
        with session.gate(first):
            handle = cumem.copy_many_async(
                [(out[:500:2], source[:250]), (out[500:], source[:500])], stream=first
            )
            handle.order(second)
            assert not second.done
        second.synchronize()
        assert handle.done
        assert (values.get(out)[500:] == source.numpy()[:500]).all()

    def test_await(self, runtime) -> None:
        source = cumem.array(numbers(1000), kind="pinned")
        out = cumem.zeros(1000, "u1")

        async def main() -> None:
            await cumem.copy_many_async(
                [(out[d], source[s]) for d, s in shuffled(10, 100)]
            )
            await cumem.copy_many_async(
                [(out[::2], source[::2]), (out[1::2], source[1::2])]
            )

        asyncio.run(main())
        assert (values.get(out) == source.numpy()).all()

    def test_pageable_source_may_be_reused_once_the_call_returns(
        self, emulated
    ) -> None:
        data = numbers(100_000)
        kept = data.copy()
        buffer = cumem.empty(100_000, "u1")
        stream = cumem.Stream()
        places = shuffled(100, 1000)
        with session.gate(stream):
            handle = cumem.copy_many_async(
                [(buffer[d], data[s]) for d, s in places], stream=stream
            )
            data[:] = 0
            assert not handle.done
        handle.wait()
        assert all((values.get(buffer)[d] == kept[s]).all() for d, s in places)

    def test_signal_ends_the_waiting(self, emulated) -> None:
        stream = cumem.Stream()
        buffer = cumem.zeros(1000, "u1")
        pinned = cumem.zeros(1000, "u1", "pinned")
        pairs = [(buffer[d], pinned[s]) for d, s in shuffled(10, 100)]
        with session.alarm(stream):
            cumem.copy_many(pairs, stream=stream)
        pairs += [
            (buffer.view("u1")[::3], pinned[::3]),
            (np.zeros(9, "u1"), buffer[:9]),
        ]
        with session.alarm(stream):
            cumem.copy_many(pairs, stream=stream)


def test_handle_keeps_everything_alive(emulated) -> None:
    stream = cumem.Stream()
    arrays = [numbers(100, i) for i in range(20)]
    with session.gate(stream):
        targets = [cumem.zeros(100, "u1") for _ in arrays]
        sources = [cumem.array(a, kind="pinned") for a in arrays]
        dead = [weakref.ref(b) for b in sources]
        handle = cumem.copy_many_async(
            zip(targets, sources, strict=True), stream=stream
        )
        del sources
        gc.collect()
        assert all(ref() is not None for ref in dead)
        assert not handle.done
    handle.wait()
    assert all((values.get(t) == a).all() for t, a in zip(targets, arrays, strict=True))
    del handle
    gc.collect()
    assert all(ref() is None for ref in dead)


def test_dropped_handle_keeps_the_memory(emulated) -> None:
    stream = cumem.Stream()
    target = cumem.zeros(2000, "u1")
    with session.gate(stream):
        sources = [cumem.array(numbers(100, i), kind="pinned") for i in range(20)]
        cumem.copy_many_async(
            [(target[i * 100 : i * 100 + 100], s) for i, s in enumerate(sources)],
            stream=stream,
        )
        del sources
        # If the copied memory had been freed, it would be poisoned and handed out again
        # here.
        other = [cumem.full(100, 9, "u1", kind="pinned") for _ in range(40)]
    expected = np.concatenate([numbers(100, i) for i in range(20)])
    assert (values.get(target) == expected).all()
    del other


@pytest.mark.parametrize("background", [False, True])
def test_failure_is_the_handles_once(emulated, background) -> None:
    source = cumem.array(numbers(1000), kind="pinned")
    out = cumem.zeros(1000, "u1")
    pairs = [(out[d], source[s]) for d, s in shuffled(10, 100)]
    pairs += [(np.zeros(100, "u1"), cumem.zeros(100, "u1"))]
    cumem.copy_many(pairs)
    session.testing.plan_fault("kernel_launch", 1, code=999)
    copy = (
        (lambda p: cumem.copy_many_async(p).wait()) if background else cumem.copy_many
    )
    with pytest.raises(cumem.CudaError) as caught:
        copy(pairs)
    assert caught.value.call == "cuLaunchKernel"
    cumem.copy_many(pairs)


class TestFailedPart:
    """One part of a call cannot start, while the others are queued behind a stream."""

    @staticmethod
    def pairs() -> tuple[cumem.Buffer, list[tuple[cumem.Buffer, cumem.Buffer]]]:
        target = cumem.zeros(1000, "u1")
        pinned = cumem.full(1000, 7, "u1", "pinned")
        far = cumem.zeros(1000, "u1", device=1)
        pairs = [(target[d], pinned[s]) for d, s in shuffled(5, 100)]
        pairs += [(far[d], target[500:][s]) for d, s in shuffled(5, 100)]
        cumem.Device(0).synchronize()
        cumem.Device(1).synchronize()
        return target, pairs

    @staticmethod
    def let_fail() -> None:
        """Make the second part fail, which consists of the copies between the devices."""
        session.testing.plan_fault("kernel_launch", 2, code=999)

    def test_it_is_reported_at_once_and_the_rest_comes_first(self, emulated) -> None:
        stream = cumem.Stream()
        target, pairs = self.pairs()
        out = cumem.zeros(500, "u1", "pinned")
        with session.gate(stream):
            self.let_fail()
            with pytest.raises(cumem.CudaError, match="999"):
                cumem.copy_many_async(pairs, stream=stream)
            session.testing.plan_fault(None, 0)
            pairs.clear()
            gc.collect()
            # This copy is made in the background.
            after = cumem.copy_async(out, target[:500])
            session.let_workers_pass()
            assert not after.done
        after.wait()
        assert (out.numpy() == 7).all()
        assert (values.get(target)[:500] == 7).all()

    def test_signal_ends_the_waiting_for_the_rest(self, emulated) -> None:
        stream = cumem.Stream()
        target, pairs = self.pairs()
        self.let_fail()
        with session.alarm(stream):
            cumem.copy_many(pairs, stream=stream)
        stream.synchronize()
        session.testing.plan_fault(None, 0)
        assert (values.get(target)[:500] == 7).all()


def test_captured_copies_belong_to_the_graph(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.empty(100_000, "u1", "pinned", stream=stream)
    target = cumem.empty(100_000, "u1", stream=stream)
    pairs = [(target[d], source[s]) for d, s in shuffled(1000, 100)]
    cumem.copy_many(pairs, stream=stream)
    session.testing.set_capturing(stream, True)
    try:
        handle = cumem.copy_many_async(pairs, stream=stream)
        assert handle.done
        with pytest.raises(cumem.CudaError):
            cumem.copy_many(pairs, stream=stream)
        with pytest.raises(cumem.CudaError):
            cumem.copy_many_async([(target[:10], np.ones(10, "u1"))] * 2, stream=stream)
    finally:
        session.testing.set_capturing(stream, False)
