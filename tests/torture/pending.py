# SPDX-License-Identifier: Apache-2.0
"""Copies that were begun, and the ways to wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import cumem
from torture.boxes import Box
from torture.settings import WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


@dataclasses.dataclass
class Pending:
    """A copy that was begun, with its two ends."""

    transfer: cumem.Transfer | None
    stream: cumem.Stream | None  # None if it runs in the background
    target: Box
    source: Box | None  # None if all threads share the source
    written: np.ndarray  # what the target must hold when the copy has ended
    where: str


def launch(worker: Worker, stream: str | None) -> Pending:
    """Begin a copy on "any" stream, on a "new" one, or, for None, in the background."""
    target, source = worker.take(), worker.source()
    to, of = worker.ends(target.nbytes, source.nbytes)
    given = used = None
    if stream is not None:
        used = worker.stream_of(target, source, new=stream == "new")
        given = used if stream == "new" else worker.spelled(used)
    ends = to(target.memory), of(source.memory)
    transfer = cumem.copy_async(*ends, stream=given)
    written = target.expect.copy()
    to(written)[...] = of(source.expect)
    kept = None if source in worker.world.shared else source
    return Pending(
        transfer, used, target, kept, written, f"after copy_async of {source!r}"
    )


def limit_pending(worker: Worker) -> None:
    """Finish copies, chosen at random, until five are left."""
    while len(worker.pending) > 5:
        finish_one(
            worker, worker.pending.pop(worker.rng.randrange(len(worker.pending)))
        )


def finish_one(worker: Worker, begun: Pending) -> None:
    """Wait for a copy, by its stream or its handle, and check both ends."""
    transfer, stream, target = begun.transfer, begun.stream, begun.target
    if stream is not None and worker.rng.random() < 0.8:
        begun.transfer = transfer = None
        worker.wait_for(stream)
    elif not follow(worker, transfer):
        begun.written = target.expect
    target.expect = begun.written
    worker.verify(target, begun.where)
    worker.give(target)
    if begun.source is not None:
        worker.verify(begun.source, "once it was read")
        worker.give(begun.source)


def follow(worker: Worker, transfer: Any) -> bool:
    """Wait for a transfer in some way. Returns False if the copy was cancelled."""
    how = worker.rng.randrange(7)
    if how == 0 and transfer.cancel():
        if not (transfer.done and transfer.cancelled and transfer.progress == 0):
            raise WrongError("a cancelled transfer does not say so")
        with contextlib.suppress(cumem.CancelledError):
            transfer.wait()
            raise WrongError("wait() of a cancelled transfer raised no error")
        return False
    if how == 1:
        other = cumem.Stream(device=worker.device())
        transfer.order(other)
        other.synchronize()
    elif how == 2:
        asyncio.run(await_all([transfer]))
    elif how == 3:
        while not transfer.done:
            time.sleep(0)
    elif how == 4:
        with contextlib.suppress(TimeoutError):
            transfer.wait(timeout=0)
    transfer.wait(progress=(lambda *done: None) if how == 5 else None)
    if not transfer.done or transfer.cancelled:
        raise WrongError("a transfer is not done after wait()")
    if transfer.progress != transfer.nbytes:
        raise WrongError(
            f"a transfer is done, but reports {transfer.progress} of "
            f"{transfer.nbytes} bytes"
        )
    if not transfer.route or transfer.seconds < 0 or transfer.gbps < 0:
        raise WrongError(f"{transfer!r} has no route, or a negative time or rate")
    return True


async def await_all(transfers: list[Any], stops: bool = False) -> None:
    """Await transfers in tasks. With `stops` the first task is cancelled."""

    async def one(transfer: Any) -> None:
        await transfer

    tasks = [asyncio.ensure_future(one(transfer)) for transfer in transfers]
    if stops:
        await asyncio.sleep(0)
        tasks[0].cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, asyncio.CancelledError) and stops:
            continue
        if isinstance(outcome, BaseException):
            raise outcome
