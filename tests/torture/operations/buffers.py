# SPDX-License-Identifier: Apache-2.0
"""Fills, assigns, makes and views buffers, and lets the host use them."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import numpy as np

import cumem
from torture.boxes import bytes_of, layout
from torture.registry import operation
from torture.settings import DTYPES, NUMBERS, WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


@operation(3)
def fill(worker: Worker) -> None:
    box, value = worker.take(), worker.rng.randrange(100)
    dtype = np.dtype(worker.rng.choice(NUMBERS))
    of = layout(worker.rng, dtype, worker.shape(dtype, box.nbytes), box.nbytes)
    if box.kind == "numpy":
        cumem.asbuffer(of(box.memory)).fill(value)
    elif worker.rng.random() < 0.5:
        of(box.memory).fill(value)
        worker.wait_for(cumem.current_stream(box.device))
    else:
        stream = worker.stream_of(box)
        try:
            of(box.memory).fill(value, stream=stream)
        finally:
            worker.wait_for(stream)
    of(box.expect)[...] = value
    worker.verify(box, f"after fill() as {dtype}")
    worker.give(box)


@operation(2)
def set_item(worker: Worker) -> None:
    box = worker.take()
    n = box.nbytes
    begin = worker.rng.randrange(n + 1)
    index = slice(begin, worker.rng.randrange(begin, n + 1), worker.rng.choice((1, 2)))
    content = worker.world.content(worker.rng, len(range(*index.indices(n))))
    if box.kind != "numpy":
        value = worker.rng.choice((7, content, content.tolist()))
        box.memory[index] = value
        box.expect[index] = value
    worker.verify(box, "after an assignment")
    worker.give(box)


@operation(3)
def new_memory(worker: Worker) -> None:
    worker.give(worker.make())


@operation(3)
def new_from_values(worker: Worker) -> None:
    """Make new memory with the values of a view, in one of six ways."""
    rng = worker.rng
    box = worker.take(("pinned", "mapped", "managed", "device", "registered"))
    dtype = np.dtype(rng.choice(DTYPES))
    of = layout(rng, dtype, worker.shape(dtype, box.nbytes), box.nbytes)
    memory = of(box.memory)
    order: Any = rng.choice(("C", "F", "A", "K"))
    kind, device = worker.kind(), worker.device()
    how = rng.randrange(6)
    if how == 0:
        made = cumem.array(memory, kind=kind, order=order, device=device)
    elif how == 1:
        made = memory.copy(order)
    elif how == 2:
        made = copy.copy(memory)
    elif how == 3:
        made = copy.deepcopy(memory)
    elif how == 4:
        made = cumem.empty_like(memory, kind=kind, order=order, device=device)
        made[...] = memory
    else:
        made = cumem.zeros(memory.shape, dtype, kind, order="F", device=device)
        if bytes_of(made.to_numpy()).any():
            raise WrongError("zeros() made memory that is not zero")
        cumem.copy(made, memory)
    what = f"a new {made.kind} of {box!r}, way {how}"
    worker.compare(bytes_of(made.to_numpy()), bytes_of(of(box.expect)), what)
    worker.give(box)


@operation(3)
def to_host(worker: Worker) -> None:
    """Read a view into ordinary memory, in one of several ways."""
    rng = worker.rng
    box = worker.take()
    dtype = np.dtype(rng.choice(DTYPES))
    of = layout(rng, dtype, worker.shape(dtype, box.nbytes), box.nbytes)
    memory = of(box.memory)
    how = rng.randrange(6)
    if how == 0 or box.kind == "numpy":
        out = cumem.asnumpy(memory)
    elif how == 1:
        out = memory.to_numpy()
    elif how == 2 or box.kind == "device":
        out = np.from_dlpack(box.memory, device="cpu", copy=True).view("u1")
        of = lambda expect: expect  # noqa: E731
    elif how == 3:
        out = np.array(memory.numpy())
    elif how == 4 and memory.dtype.kind != "M":
        out = np.array(memoryview(memory))
    else:
        out = np.asarray(memory).copy()
    worker.compare(bytes_of(out), bytes_of(of(box.expect)), f"{box!r}, way {how}")
    worker.give(box)


@operation(2)
def host_writes(worker: Worker) -> None:
    """Write without calling cumem, through an array over the memory."""
    box = worker.take(("pinned", "mapped", "managed", "host", "registered"))
    content = worker.world.content(worker.rng, box.nbytes)
    view = box.memory.numpy()
    view[...] = content
    box.expect = content.copy()
    del view
    worker.give(box)


@operation(2)
def many_views(worker: Worker) -> None:
    """Read attributes of a buffer, and single rows and elements of it."""
    box = worker.take(("pinned", "mapped", "managed", "host"))
    memory = box.memory
    repr(memory), memory.T, memory.flags, memory.device, memory.base
    repr(memory.residency), memory.readonly, memory.closed, memory.strides
    if memory.size > 3:
        rows = memory[: memory.size // 4 * 4].reshape(-1, 4)
        for row, back in zip(rows[:5], reversed(rows[-5:]), strict=False):
            if len(row) != 4 or row.base is None or len(back) != 4:
                raise WrongError("iterating over a buffer gave a row that is wrong")
        first = int(box.expect[0])
        one = memory[0]
        if (int(one), float(one), bool(one)) != (first, float(first), first != 0):
            raise WrongError("the first element, as a number, is wrong")
        if complex(one) != complex(first):
            raise WrongError("the first element, as a complex number, is wrong")
    worker.give(box)


@operation(2)
def device_views(worker: Worker) -> None:
    """Move pages of managed memory, and copy through a device's view of memory."""
    box = worker.take(("mapped", "managed"))
    if box.kind == "managed" and box.nbytes > 0:
        where: Any = worker.rng.choice(("host", "cpu", box.device, None))
        with contextlib.suppress(ValueError, TypeError):  # the stream may be refused
            box.memory.prefetch_pages(where, stream=worker.rng.choice(worker.streams))
        repr(box.memory.prefetch_location)
        box.memory.advise(
            read_mostly=worker.rng.choice((True, False)),
            preferred_location=worker.rng.choice(("cpu", None)),
        )
        box.memory.page_residency()
        parts = [box.memory.reshape(-1)[i::2] for i in range(2)]
        cumem.prefetch_pages(parts, "cpu", worker.rng.choice(worker.streams))
    view = box.memory.as_device()
    out = np.empty(box.nbytes, "u1")
    cumem.copy(out, view)
    worker.compare(out, box.expect, f"{box!r} as device memory")
    box.memory.record_stream(worker.stream_of(box))
    worker.give(box)
