# SPDX-License-Identifier: Apache-2.0
"""Streams and events: how they end, their order, which is current, and awaiting."""

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
    stream = worker.rng.choice(worker.streams)
    first, second = cumem.Event(device=stream.device), None
    first.record(stream)
    second = stream.record(cumem.Event(device=stream.device, blocking=True))
    worker.streams[0].wait(second)
    second.synchronize()
    if second.seconds_since(first) < 0 or not second.done:
        raise WrongError("an event")
    first.close()
    with contextlib.suppress(ValueError):
        first.record(stream)
        raise WrongError("a closed event was recorded")


@operation(1)
def stream_objects(worker: Worker) -> None:
    device = worker.device()
    stream = cumem.Stream(device=device, non_blocking=worker.rng.random() < 0.5)
    repr(stream), stream.id, hash(stream), stream.priority, stream.is_capturing
    foreign = foreign_streams.ByProtocol(stream.handle)
    again = cumem.Stream.from_external(foreign, device=device)
    if again != stream:
        raise WrongError("the same stream from outside is another")
    with stream:
        if cumem.current_stream(device) != stream:
            raise WrongError("not the current stream")
        box = worker.make("device")
        cumem.copy(box.memory, box.expect)
    worker.give(box)
    worker.streams[worker.rng.randrange(2)] = stream


@operation(1)
def awaited(worker: Worker) -> None:
    begun = [launch(worker, None) for _ in range(worker.rng.randrange(1, 4))]
    stops = worker.rng.random() < 0.3
    asyncio.run(await_all([one.transfer for one in begun], stops))
    for one in begun:
        one.transfer.wait()
        finish_one(worker, dataclasses.replace(one, stream=None))


@operation(1)
def in_context(worker: Worker) -> None:
    """Make a stream and a pool current in another context alone."""
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
        raise WrongError("the current stream is another's")
