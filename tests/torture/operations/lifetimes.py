# SPDX-License-Identifier: Apache-2.0
"""Ends memory by free(), by the end of a block, or by closing a registration."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING

import cumem
from torture.boxes import registered
from torture.registry import operation
from torture.settings import POOLED, WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


@operation(2)
def freed(worker: Worker) -> None:
    """Free memory, after which neither it nor a view of it can be used."""
    box = worker.take(POOLED)
    view = box.memory[: box.nbytes // 2]
    box.memory.free()
    for memory in (box.memory, view):
        with contextlib.suppress(ValueError):
            memory.fill(0)
            raise WrongError("freed memory was filled")


@operation(2)
def freed_in_flight(worker: Worker) -> None:
    """Free one or both ends of a copy while it is under way."""
    target, source = worker.take(POOLED), worker.take(POOLED)
    to, of = worker.ends(target.nbytes, source.nbytes)
    stream = worker.rng.choice((None, worker.stream_of(target, source)))
    transfer = cumem.copy_async(to(target.memory), of(source.memory), stream=stream)
    source.memory.free()
    if worker.rng.random() < 0.5:
        target.memory.free()
        transfer.wait()
        return
    del transfer
    found = cumem.asnumpy(target.memory)
    written = target.expect.copy()
    to(written)[...] = of(source.expect)
    worker.arrived(found, target, written, "its source freed")


@operation(2)
def closed_by_block(worker: Worker) -> None:
    """Close a buffer by a `with` statement, while an array over its memory lives on."""
    box = worker.take(("pinned", "mapped", "managed"))
    with box.memory as memory:
        held = memory.numpy()
    if not memory.closed:
        raise WrongError("a buffer is not closed at the end of its block")
    worker.compare(held, box.expect, f"{box!r}, closed")


#: Numbers of the names of shared memory.
_numbers = itertools.count()


@operation(1)
def shared_by_name(worker: Worker) -> None:
    """Copy to and from memory that has a name, and drop it while a copy is under way."""
    rng = worker.rng
    size = rng.randrange(1, 200_000)
    content = worker.world.content(rng, size)
    # No name is used again. After an error the memory may live on for a while, in the
    # frames of its traceback or in a copy that is under way.
    name = f"torture {os.getpid()} {next(_numbers)}"
    shared = cumem.shared_pinned(name, size, "u1")
    target = cumem.empty_device(size, "u1", device=worker.device())
    shared.numpy()[:] = content
    transfer = cumem.copy_async(target, shared)
    if rng.random() < 0.5:
        again = cumem.shared_pinned(name, size, "u1")
        worker.compare(again.numpy(), content, "memory by its name")
        del again
    del shared
    transfer.wait()
    worker.compare(cumem.asnumpy(target), content, "dropped memory that has a name")


@operation(2)
def registration_ends(worker: Worker) -> None:
    """Copy registered memory, in whole or in part, while its registration ends."""
    rng = worker.rng
    size = rng.randrange(1, 200_000)
    content = worker.world.content(rng, size)
    held = worker.world.to_register(content)
    cut = rng.randrange(size)
    part = held[cut:] if rng.random() < 0.5 else held
    target = cumem.empty_device(size, "u1", device=worker.device())
    with contextlib.ExitStack() as stack:
        first = registered(part, 0, mapped=rng.random() < 0.5)
        if rng.random() < 0.5:
            stack.enter_context(cumem.register(held[: cut + 1], device=0))
        if rng.random() < 0.5:
            transfer = cumem.copy_async(target, held)
        else:
            cuts = slice(0, size // 3), slice(size // 3, size)
            transfer = cumem.copy_many_async((target[i], held[i]) for i in cuts)
        del part
        if rng.random() < 0.5:
            first.close()
        else:
            del first
        transfer.wait()
    worker.compare(cumem.asnumpy(target), content, "a registration ended")
    cumem.copy(held, target)
    worker.compare(held, content, "back into what was registered")
