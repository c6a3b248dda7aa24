# SPDX-License-Identifier: Apache-2.0
"""Tests of the memory of chunks(), pipeline() and prefetch(), and of ``async for``.

Their loops copy some pieces ahead of the one that the user works on. The tests count
the device memory that this takes, let it run short, and iterate with ``async for``
while streams, sources and tasks are held up or cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import faults, session
from support.session import testing

import cumem

# A chunk has as many bytes as a pool takes from the driver at a time.
PIECE = 2 << 20


def data(count: int = 24) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 255, (count, PIECE), "u1")


def look(chunk: cumem.DeviceBuffer) -> None:
    """Export a chunk to another library, and have the library read it."""
    if cumem.backend() == "emulated":
        np.from_dlpack(chunk).sum()
    else:
        torch = pytest.importorskip("torch")
        torch.from_dlpack(chunk).sum()


USES: dict[str, Callable[[cumem.DeviceBuffer], object]] = {
    "nothing": lambda chunk: None,
    "exported": look,
    "filled": lambda chunk: chunk.fill(0),
    "read": lambda chunk: chunk.to_numpy(),
}


def loops(array: np.ndarray, depth: int) -> dict[str, Callable[[Any], None]]:
    """Return the three loops by name.

    Each passes its chunks to a function, and keeps none.
    """

    def chunks(use: Any) -> None:
        for _, chunk in cumem.chunks(array, rows=1, depth=depth):
            use(chunk)

    def prefetch(use: Any) -> None:
        for batch in cumem.prefetch(array, depth=depth):
            use(batch)

    def pipeline(use: Any) -> None:
        cumem.pipeline(lambda x, *_: use(x), array, rows=1, depth=depth)

    return {"chunks": chunks, "prefetch": prefetch, "pipeline": pipeline}


@pytest.fixture
def patient(monkeypatch) -> None:
    """Let loops wait for memory as long as it takes.

    A loop that has waited for a second takes more memory instead. That would also happen on
    a device that is busy with the work of other processes.
    """
    monkeypatch.setattr("cumem.transfers.ahead._PATIENCE", 3600.0)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("loop", ["chunks", "prefetch", "pipeline"])
def test_loop_takes_memory_of_two_more_than_are_ahead(
    runtime, patient, loop: str, use: str, depth: int
) -> None:
    pool = cumem.default_pool("device")
    cumem.trim()
    pool.reset_peaks()
    before = pool.stats().reserved_nbytes
    loops(data(), depth)[loop](USES[use])
    peak = pool.stats().peak_reserved_nbytes - before
    assert peak <= (depth + 2) * PIECE


@pytest.mark.parametrize("depth", [1, 3])
def test_pipeline_takes_memory_of_its_inputs_and_outputs(
    runtime, patient, depth: int
) -> None:
    pool = cumem.default_pool("device")
    cumem.trim()
    pool.reset_peaks()
    before = pool.stats().reserved_nbytes
    array = data()
    out = np.empty_like(array)

    def work(x: Any, y: Any, stream: cumem.Stream) -> None:
        look(x)
        look(y)
        cumem.copy_async(y, x, stream=stream)

    cumem.pipeline(work, array, out, rows=1, depth=depth)
    assert np.array_equal(out, array)
    peak = pool.stats().peak_reserved_nbytes - before
    assert peak <= (depth + 2 + depth + 1) * PIECE


def test_chunks_that_are_kept_take_memory(runtime) -> None:
    array = data(12)
    kept = [chunk for _, chunk in cumem.chunks(array, rows=1, depth=1)]
    for row, chunk in zip(array, kept, strict=True):
        assert np.array_equal(chunk.to_numpy()[0], row)
    views = [np.asarray(b.to_numpy()) for b in cumem.prefetch(array)]
    assert np.array_equal(views, array)


def test_memory_behind_work_of_others_is_waited_for_only_a_while(
    emulated, monkeypatch
) -> None:
    """Memory that another stream still uses may never become free, so the loop must go
    on without it.
    """
    monkeypatch.setattr("cumem.transfers.ahead._PATIENCE", 0.0)
    stream = cumem.Stream()
    held = [cumem.empty_device(PIECE, "u1") for _ in range(8)]
    session.shut(stream)
    for buffer in held:
        buffer.fill(1, stream=stream)
    del buffer
    held.clear()
    gc.collect()
    array = data(12)
    found = [chunk.to_numpy()[0] for _, chunk in cumem.chunks(array, rows=1, depth=1)]
    assert np.array_equal(found, array)
    testing.gate_open(stream)


@pytest.mark.parametrize("loop", ["chunks", "prefetch", "pipeline"])
def test_memory_that_another_pool_has_in_flight_is_not_waited_for(
    emulated, monkeypatch, loop: str
) -> None:
    monkeypatch.setattr("cumem.transfers.ahead._PATIENCE", 3600.0)
    stream, other = cumem.Stream(), cumem.Pool("device")
    held = [other.allocate(2 * PIECE, stream=stream)]
    with session.rescued(stream), session.gate(stream):
        held[0].fill(1, stream=stream)
        # A second stream now uses the memory too, so the pool cannot hand it out again
        # in the order of the first stream alone.
        held[0].record_stream(cumem.current_stream(0))
        held.clear()
        gc.collect()
        assert other.stats().in_flight_nbytes > 0
        loops(data(12), 1)[loop](USES["nothing"])


@pytest.mark.parametrize("use", ["nothing", "exported"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("loop", ["chunks", "pipeline"])
def test_limit_makes_fewer_and_smaller_chunks(
    emulated, loop: str, pieces: int, use: str
) -> None:
    """With depth 3, five chunks of 8 MiB are wanted, and there is memory for fewer."""
    array = data().reshape(-1, 1 << 16)
    seen = 0

    def count(chunk: cumem.DeviceBuffer) -> None:
        nonlocal seen
        seen += len(chunk)
        USES[use](chunk)

    with cumem.limit("device", pieces * 8 << 20):
        if loop == "chunks":
            for part, chunk in cumem.chunks(array, "8 MiB"):
                assert np.array_equal(chunk[0].to_numpy(), array[part.start])
                count(chunk)
                del chunk
        else:
            cumem.pipeline(lambda x, *_: count(x), array, nbytes="8 MiB")
    assert seen == len(array)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("share", [1, 1.5, 2])
@pytest.mark.parametrize("form", ["array", "generator"])
def test_loop_that_holds_a_chunk_fits_where_there_is_memory_for_one(
    emulated, form: str, share: float, depth: int
) -> None:
    """The variable of the loop holds a chunk while the next one is asked for."""
    array = data().reshape(-1, 1 << 16)
    source = array if form == "array" else iter(np.split(array, 4))
    nbytes = array.nbytes // 4
    seen = 0
    with cumem.limit("device", int(share * nbytes)):
        for part, chunk in cumem.chunks(source, nbytes, depth=depth):
            assert np.array_equal(chunk.to_numpy(), array[part])
            seen += len(chunk)
        del chunk
    assert seen == len(array)


def test_chunk_that_leaves_no_room_for_the_next_is_named(emulated) -> None:
    """Each chunk has one row, which cannot be cut, and the loop's variable holds it."""
    array = data(4).reshape(4, -1)
    with cumem.limit("device", int(1.5 * array[0].nbytes)):
        with pytest.raises(cumem.OutOfMemoryError) as raised:
            for _, _chunk in cumem.chunks(array, rows=1):
                pass
        del _chunk
        notes = "\n".join(raised.value.__notes__)
        del raised
        assert "the chunk before is still referred to and has" in notes
        assert "`del` it before the next one is asked for" in notes
        count = 0
        for _, chunk in cumem.chunks(array, rows=1):
            count += 1
            del chunk
    assert count == 4


def test_out_of_memory_names_depth_and_the_size_of_a_chunk(emulated) -> None:
    array = data(4)
    for call in (
        lambda: [chunk for _, chunk in cumem.chunks(array, rows=2)],
        lambda: cumem.pipeline(lambda x, *_: x, array, rows=2),
        lambda: list(cumem.prefetch(array)),
    ):
        with cumem.limit("device", 3 << 20):
            with pytest.raises(cumem.OutOfMemoryError) as raised:
                call()
            notes = "\n".join(raised.value.__notes__)
            del raised
        assert "lower depth= and" in notes
        assert "2 MiB" in notes
    assert cumem.memory_info(0).live == 0


def test_batches_come_where_memory_for_one_and_the_next_exists(emulated) -> None:
    array = data(10)
    with cumem.limit("device", 2 * PIECE):
        sums = []
        for batch in cumem.prefetch(array, depth=4):
            sums.append(int(batch.to_numpy().sum()))
            del batch
    assert sums == array.sum(axis=1).tolist()


# -- as an iterator ----------------------------------------------------------------------


def test_loop_is_closed_by_with_and_says_what_it_is(runtime) -> None:
    array = data(6)
    with cumem.chunks(array, rows=1) as found:
        next(found)
        next(found)
        assert repr(found) == "<cumem.chunks, 1 so far>"
    assert repr(found) == "<cumem.chunks, ended>"
    assert list(found) == []
    found.close()
    assert repr(iter(cumem.prefetch(array))) == "<cumem.prefetch, 0 so far>"


def test_item_asked_for_within_the_source_is_refused(emulated) -> None:
    def items() -> Iterator[Any]:
        yield np.ones(3)
        next(found)

    found = cumem.chunks(items())
    next(found)
    with pytest.raises(ValueError, match="by another thread or task"):
        next(found)


# -- async for -----------------------------------------------------------------------------


async def turn() -> None:
    """Let the event loop go round once."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def gathered(found: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in found]


def test_async_for_gives_what_for_gives(runtime) -> None:
    array = data(8)

    async def main() -> None:
        found = await gathered(cumem.chunks(array, rows=3))
        assert [part for part, _ in found] == [slice(0, 3), slice(3, 6), slice(6, 8)]
        assert np.array_equal(np.concatenate([c.to_numpy() for _, c in found]), array)
        batches = cumem.prefetch(array)
        for _ in range(2):
            there = [b.to_numpy() for b in await gathered(aiter(batches))]
            assert np.array_equal(there, array)
        assert await gathered(cumem.chunks([])) == []

    asyncio.run(main())


def test_async_for_leaves_the_event_loop_free(emulated) -> None:
    """The event loop must turn while the source reads, while a copy waits, and while
    the device works.
    """
    may_read = threading.Event()
    entered = threading.Event()

    def items() -> Iterator[np.ndarray]:
        yield np.ones(1 << 10)
        entered.set()
        may_read.wait()
        for _ in range(3):
            yield np.ones(1 << 10)

    async def main() -> None:
        stream = cumem.Stream()
        count = 0

        async def read() -> None:
            nonlocal count
            with stream:
                async for _ in cumem.chunks(items(), depth=1):
                    count += 1
                    if count == 1:
                        session.shut(stream)

        task = asyncio.create_task(read())
        # The event loop turns while the source waits.
        while not entered.is_set():
            await turn()
        may_read.set()
        while count < 2:
            await turn()
        # It also turns while the device works on the first chunk.
        for _ in range(100):
            await turn()
        assert count == 2
        testing.gate_open(stream)
        await task
        assert count == 4

    asyncio.run(main())


def test_async_for_asks_the_source_in_the_tasks_context(emulated) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    seen: list[int] = []

    def items() -> Iterator[np.ndarray]:
        for _ in range(3):
            seen.append(variable.get(0))
            yield np.ones(3)

    async def main() -> None:
        variable.set(7)
        stream = cumem.Stream()
        with stream:
            async for _, chunk in cumem.chunks(items()):
                assert cumem.current_stream() == stream
                assert chunk.to_numpy().tolist() == [1, 1, 1]

    asyncio.run(main())
    assert seen == [7, 7, 7]


def test_async_for_raises_a_failure_after_the_items_before_it(runtime) -> None:
    def items() -> Iterator[np.ndarray]:
        yield np.ones(3)
        raise OSError("the disk is gone")

    async def main() -> list[int]:
        lengths = []
        found = cumem.chunks(items())
        lengths.append(len((await anext(found))[1]))
        with pytest.raises(OSError, match="the disk is gone"):
            await anext(found)
        return lengths

    assert asyncio.run(main()) == [3]


def test_async_for_that_is_cancelled_leaves_nothing_under_way(emulated) -> None:
    stream = cumem.Stream()

    async def main() -> None:
        async def read() -> None:
            with stream:
                async for _ in cumem.chunks(data(), rows=1):
                    came.set()

        came = asyncio.Event()
        session.shut(stream)
        task = asyncio.create_task(read())
        await came.wait()
        for _ in range(100):
            await turn()
        task.cancel()
        for _ in range(100):
            await turn()
        testing.gate_open(stream)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    assert testing.pending_transfers() == 0
    assert cumem.memory_info(0).live == 0


def test_async_for_that_is_left_early_is_closed(runtime) -> None:
    async def main() -> None:
        found = cumem.chunks(data(), rows=1)
        async for _ in found:
            break
        await found.aclose()
        assert await gathered(found) == []
        async for _ in cumem.prefetch(data(4)):
            break

    asyncio.run(main())
    gc.collect()
    assert testing.pending_transfers() == 0
    session.wait_until(
        lambda: not any(t.name.startswith("cumem-ahead") for t in threading.enumerate())
    )


def test_fault_sweep_of_loops(emulated) -> None:
    # The rows are short, because the loop runs once for each call that fails.
    array = np.ascontiguousarray(data(4)[:, : 64 << 10])

    def scenario() -> None:
        found = [chunk.to_numpy() for _, chunk in cumem.chunks(iter(array))]
        assert np.array_equal(found, array)
        for batch, row in zip(
            cumem.prefetch([{"x": each} for each in array]), array, strict=True
        ):
            assert np.array_equal(batch["x"].to_numpy(), row)

    swept = faults.sweep(scenario)
    assert {"copy_async", "event_record"} <= set(swept.failed)
