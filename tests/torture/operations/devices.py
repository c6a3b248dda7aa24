# SPDX-License-Identifier: Apache-2.0
"""Ends, orders and awaits streams and events, and makes streams current."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from typing import TYPE_CHECKING

import support.streams as foreign_streams

import cumem
from torture.pending import await_all, finish_one, launch
from torture.registry import operation
from torture.settings import WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


@operation(2)
def stream_ends(worker: Worker) -> None:
    """Drop a stream object while its work is under way."""
    begun = launch(worker, "new")
    stream = begun.stream
    begun.stream = None
    if worker.rng.random() < 0.5:
        stream.close()
    del stream
    finish_one(worker, begun)


@operation(2)
def events(worker: Worker) -> None:
    """Record two events, wait for them, and close one."""
    stream = worker.rng.choice(worker.streams)
    first, second = cumem.Event(device=stream.device), None
    first.record(stream)
    second = stream.record(cumem.Event(device=stream.device, blocking=True))
    worker.streams[0].wait(second)
    second.synchronize()
    if second.seconds_since(first) < 0 or not second.done:
        raise WrongError("a later event is not done, or its time is negative")
    first.close()
    with contextlib.suppress(ValueError):
        first.record(stream)
        raise WrongError("a closed event was recorded")


@operation(1)
def stream_objects(worker: Worker) -> None:
    """Make a stream, find it again from its handle, and make it current for a while."""
    device = worker.device()
    stream = cumem.Stream(device=device, non_blocking=worker.rng.random() < 0.5)
    repr(stream), stream.id, hash(stream), stream.priority, stream.is_capturing
    foreign = foreign_streams.ByProtocol(stream.handle)
    again = cumem.Stream.from_external(foreign, device=device)
    if again != stream:
        raise WrongError(
            "a stream from a handle is not equal to the one with the handle"
        )
    with stream:
        if cumem.current_stream(device) != stream:
            raise WrongError("a stream is not current inside its block")
        box = worker.make("device")
        cumem.copy(box.memory, box.expect)
    worker.give(box)
    worker.streams[worker.rng.randrange(2)] = stream


@operation(1)
def awaited(worker: Worker) -> None:
    """Await copies in tasks, one of which may be cancelled."""
    begun = [launch(worker, None) for _ in range(worker.rng.randrange(1, 4))]
    stops = worker.rng.random() < 0.3
    asyncio.run(await_all([one.transfer for one in begun], stops))
    for one in begun:
        one.transfer.wait()
        finish_one(worker, dataclasses.replace(one, stream=None))


@operation(1)
def in_context(worker: Worker) -> None:
    """Make a stream and a pool current in another context, and only there."""
    stream = worker.rng.choice(worker.streams)
    before = cumem.current_stream(stream.device)
    seen = []

    def inside() -> None:
        pool = cumem.Pool("pinned", device=stream.device)
        with stream, stream.device, pool:
            seen.append(cumem.current_stream(stream.device) == stream)
            box = worker.make(worker.rng.choice(("pinned", "device")))
            worker.verify(box, "made in a context")

    contextvars.copy_context().run(inside)
    if seen != [True] or cumem.current_stream(stream.device) != before:
        raise WrongError("the current stream is that of another context")
