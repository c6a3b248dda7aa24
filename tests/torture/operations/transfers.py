# SPDX-License-Identifier: Apache-2.0
"""Copies at once, on a stream, in the background, and many at a time."""

from __future__ import annotations

import sys
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np
from support import testing

import cumem
from torture.boxes import Box, layout
from torture.pending import finish_one, follow, launch, limit_pending
from torture.registry import operation
from torture.settings import DTYPES, POOLED, StopRunError

if TYPE_CHECKING:
    from torture.worker import Worker


class Tracked(np.ndarray):
    """An array that can be referred to weakly, so that its end can be seen."""


@operation(6)
def copy_blocking(worker: Worker) -> None:
    target, source = worker.take(), worker.source()
    to, of = worker.ends(target.nbytes, source.nbytes)
    reported: list[tuple[int, int]] = []
    progress = worker.rng.choice((None, None, lambda *done: reported.append(done)))
    cumem.copy(to(target.memory), of(source.memory), progress=progress)
    to(target.expect)[...] = of(source.expect)
    worker.verify(target, f"after a copy of {source!r}")
    worker.give(target)
    worker.give_source(source)


@operation(2)
def copy_within(worker: Worker) -> None:
    """Copy between two views of one box, which may overlap."""
    box = worker.take()
    to, of = worker.ends(box.nbytes, box.nbytes)
    cumem.copy(to(box.memory), of(box.memory))
    # The source is copied first, because NumPy's own assignment is wrong where views with
    # different strides overlap in one dimension.
    to(box.expect)[...] = of(box.expect).copy()
    worker.verify(box, "after a copy within")
    worker.give(box)


@operation(2, (StopRunError, ""))
def copy_stopped(worker: Worker) -> None:
    """Stop a copy by its progress. It may have written part of its target, and no more."""
    target, source = worker.take(), worker.take()
    to, of = worker.ends(target.nbytes, source.nbytes)

    def stop(done: int, total: int) -> None:
        raise StopRunError

    before = target.expect.copy()
    try:
        cumem.copy(to(target.memory), of(source.memory), progress=stop)
    finally:
        # However much of the target was written, no more is written now, and no byte beside
        # the target has changed.
        found = worker.world.raw.read(target)
        to(before)[...] = to(found)
        worker.compare(found, before, f"{target!r} after a copy that was stopped")
        target.expect = found
        worker.verify(source, "after a copy that was stopped")
        worker.give(target, source)


@operation(6)
def copy_streamed(worker: Worker) -> None:
    worker.pending.append(launch(worker, "any"))
    limit_pending(worker)


@operation(6)
def copy_background(worker: Worker) -> None:
    worker.pending.append(launch(worker, None))
    limit_pending(worker)


@operation(8)
def finish(worker: Worker) -> None:
    if worker.pending:
        finish_one(
            worker, worker.pending.pop(worker.rng.randrange(len(worker.pending)))
        )


@operation(3)
def copy_dropped(worker: Worker) -> None:
    """Drop the handle of a copy. The target must then wait for the copy by itself."""
    begun = launch(worker, None)
    begun.transfer = None
    target = begun.target
    if target.kind == "numpy":
        wait_until_let_go(worker, target)
    elif target.kind in ("device", "managed"):
        cumem.asnumpy(target.memory)
    else:
        target.memory.numpy()
    found = worker.world.raw.read(target)
    if worker.arrived(found, target, begun.written, "after a handle was dropped"):
        target.expect = begun.written
        worker.give(target)
    if begun.source is not None:
        worker.give(begun.source)


def wait_until_let_go(worker: Worker, target: Box) -> None:
    """Wait until copies whose handles were dropped no longer hold an array.

    An array does not know its transfers. A view of the array is therefore copied after
    those transfers. When nothing refers to the view or to the array any more, the transfers
    have ended.
    """
    while testing.pending_transfers() and not worker.world.failures:
        gone = target.memory.view(Tracked)
        kept = weakref.ref(gone)
        cumem.copy_async(gone[:0], gone[:0]).wait()
        del gone
        if kept() is None and sys.getrefcount(target.memory) <= 2:
            return
        time.sleep(0.0002)


@operation(4)
def copy_many(worker: Worker) -> None:
    """Copy pieces of several boxes in one call, in any order, and wait in some way."""
    rng = worker.rng
    boxes = [worker.take() for _ in range(rng.randrange(1, 4))]
    sources = [worker.source() for _ in boxes]
    pairs, written = [], []
    for target, source in zip(boxes, sources, strict=True):
        count = rng.choice((1, 3, 40))
        piece = min(target.nbytes, source.nbytes) // count
        to, of = worker.ends(piece, piece)
        for i in range(count):
            cut = slice(i * piece, (i + 1) * piece)
            pairs.append((to(target.memory[cut]), of(source.memory[cut])))
            written.append((to(target.expect[cut]), of(source.expect[cut])))
    rng.shuffle(pairs)
    how = rng.randrange(3)
    if len({b.device for b in (*boxes, *sources) if b.kind == "device"}) > 1:
        how = 2  # a stream belongs to one device, so it cannot serve all of them
    if how == 0:
        cumem.copy_many(pairs)
    elif how == 1:
        stream = worker.stream_of(*boxes, *sources)
        try:
            cumem.copy_many_async(pairs, stream=worker.spelled(stream))
        finally:
            worker.wait_for(stream)
    else:
        transfer = cumem.copy_many_async(iter(pairs))
        pairs.clear()
        if not follow(worker, transfer):
            written.clear()
    for into, out_of in written:
        into[...] = out_of
    for box in boxes:
        worker.verify(box, f"after {count} copies, way {how}")
    worker.give(*boxes)
    for box in sources:
        worker.give_source(box)


@operation(3)
def copy_several(worker: Worker) -> None:
    """Broadcast, scatter or gather between one box and several others."""
    rng = worker.rng
    what = rng.choice(("broadcast", "scatter", "gather"))
    many = [worker.take() for _ in range(rng.randrange(1, 4))]
    dtype = np.dtype(rng.choice(DTYPES))
    # One of these boxes may be the long one of an earlier call. Without this bound the
    # sizes would grow with each call.
    smallest = min(box.nbytes for box in many)
    n = min(smallest, worker.world.options.largest) // dtype.itemsize
    whole = n if what == "broadcast" else n * len(many)
    one = worker.make(rng.choice(POOLED), whole * dtype.itemsize)
    all_of = layout(rng, dtype, (whole,), one.nbytes)
    part_of = [layout(rng, dtype, (n,), box.nbytes) for box in many]
    views = [of(box.memory) for of, box in zip(part_of, many, strict=True)]
    call = getattr(cumem, what + rng.choice(("", "_async")))
    ends = [all_of(one.memory), views]
    stream = None if rng.random() < 0.6 else worker.stream_of(one, *many)
    try:
        done = call(*(ends if what == "gather" else ends[::-1]), stream=stream)
    except BaseException:
        worker.settle()  # some of the copies may be under way
        raise
    for transfer in done or ():
        if stream is None:
            transfer.wait()
    if stream is not None:
        worker.wait_for(stream)
    parts = [of(box.expect) for of, box in zip(part_of, many, strict=True)]
    total = all_of(one.expect)
    for i, part in enumerate(parts):
        piece = total if what == "broadcast" else total[i * n : (i + 1) * n]
        if what == "gather":
            piece[...] = part
        else:
            part[...] = piece
    for box in (one, *many):
        worker.verify(box, f"after {what}")
    worker.give(one, *many)
