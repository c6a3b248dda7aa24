# SPDX-License-Identifier: Apache-2.0
"""Let threads make random copies, and verify every byte.

    python stress_transfers.py [--seconds 60] [--rounds 4] [--threads 8] [--seed 1]
                               [--largest 67108864] [--faults] [--json FILE]

Each thread copies between all kinds of memory, from 1 byte to 64 MiB, whole, with strides,
backwards and transposed. The copy blocks, or it runs on a stream or in the background, and
then the thread waits for the handle, awaits, cancels or drops it, or orders it before a
stream. The thread compares every target, including the bytes between its elements, with
NumPy's own copy. It also compares what every handle says with what has happened. With
--faults calls of the driver fail now and then. After a copy that failed only the bytes that
must stay are compared.

The time is cut into rounds. After each of them the program reads the free memory of the
device. A driver gives some memory back late and keeps some for later, but a leak would
leave less after every later round than after the first. The exit status is 0 if all was
right, the pools gave everything back and nothing hung.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import testing

import cumem
from cumem import info

KINDS = ("numpy", "pinned", "mapped", "managed", "device")
FAULT = 998
FAULTY = ("copy_async", "kernel_launch", "event_record", "stream_wait_event")
PATIENCE = 120  # seconds that one copy may take, on a machine with other work


def view(memory: Any, how: int) -> Any:
    """View all of the bytes, or some, in one of several orders."""
    if how == 4:
        return memory[::2]
    if how == 5:
        return memory[::-1]
    if how == 6:
        return memory[1::3]
    if how == 7:
        side = math.isqrt(memory.size)
        return memory[: side * side].reshape(side, side).T
    return memory


def again(call: Callable[[], Any]) -> Any:
    """Repeat the call until no planned fault hits it, and return its answer."""
    while True:
        try:
            return call()
        except cumem.CudaError as error:
            if error.code != FAULT:
                raise


class Tracked(np.ndarray):
    """An array that can be referred to weakly, so that its end can be seen."""


def allocate(kind: str, nbytes: int, stream: cumem.Stream) -> Any:
    if kind == "numpy":
        return np.empty(nbytes, "u1")
    if kind == "device":
        return again(lambda: cumem.empty_device(nbytes, "u1", stream=stream))
    return again(lambda: cumem.empty(nbytes, "u1", kind))


class Worker(threading.Thread):
    """Makes random copies until `deadline`."""

    has_faults = False

    def __init__(
        self, streams: list[cumem.Stream], seed: int, deadline: float, largest: int
    ) -> None:
        super().__init__(daemon=True)
        self.streams, self.deadline, self.largest = streams, deadline, largest
        self.random = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        self.wrong: list[str] = []
        self.failure: BaseException | None = None
        self.last = time.monotonic()

    def run(self) -> None:
        try:
            while time.monotonic() < self.deadline and not self.wrong:
                self.step()
                self.last = time.monotonic()
        except BaseException as error:
            self.failure = error

    def choose(self, *things: str) -> str:
        return things[int(self.random.integers(len(things)))]

    def step(self) -> None:
        """Make a copy with random ends in a random way, and compare the bytes."""
        random = self.random
        nbytes = int(self.largest ** random.uniform(0, 1))
        stream = self.streams[int(random.integers(len(self.streams)))]
        how = int(random.integers(8)) if nbytes > 3 else 0
        kinds = self.choose(*KINDS), self.choose(*KINDS)
        target, source = (allocate(kind, nbytes, stream) for kind in kinds)
        before = random.integers(0, 256, nbytes, dtype="u1")
        content = random.integers(0, 256, nbytes, dtype="u1")
        again(lambda: cumem.copy(target, before))
        again(lambda: cumem.copy(source, content))
        where = f"{kinds[0]} <- {kinds[1]}, {nbytes} bytes, view {how}"
        ends = [view(target, how), view(source, how)]
        if kinds[0] == "numpy":
            ends[0] = ends[0].view(Tracked)
        kept = weakref.ref(ends[0])
        outcome = self.copy(ends, stream, where)
        while outcome == "dropped" and kinds[0] == "numpy" and kept() is not None:
            testing.poll()  # the copy may still write the array that it holds
        self.counts[outcome] += 1
        self.nbytes += nbytes
        expected = before.copy()
        after = np.empty(nbytes, "u1")
        if outcome not in ("cancelled", "failed"):
            view(expected, how)[...] = view(content, how)
        self.read(after, target)
        looked_at = np.ones(nbytes, bool)
        if outcome in ("failed", "dropped"):
            view(looked_at, how)[...] = outcome == "dropped" and not self.has_faults
        wrong = int(np.count_nonzero((after != expected) & looked_at))
        if wrong:
            self.wrong.append(f"{outcome}: {where}: {wrong} bytes are wrong")

    def read(self, out: np.ndarray, memory: Any) -> None:
        again(lambda: cumem.copy(out, memory))

    def copy(self, ends: list[Any], stream: cumem.Stream, where: str) -> str:
        """Make a copy, and return "done", "failed", "cancelled" or "dropped"."""
        way = self.choose("blocking", "stream", "background", "background")
        try:
            if way == "blocking":
                cumem.copy(*ends, stream=stream)
                return "done"
            given = stream if way == "stream" else None
            return self.follow(cumem.copy_async(*ends, stream=given), where)
        except cumem.CudaError as error:
            if error.code != FAULT:
                raise
            return "failed"
        finally:
            ends.clear()

    def follow(self, transfer: cumem.Transfer, where: str) -> str:
        """Wait for a transfer, or cancel or drop it, and check what its handle says."""
        what = self.choose("wait", "wait", "await", "cancel", "order", "drop")
        if what == "cancel" and transfer.cancel():
            self.check(
                transfer.cancelled and transfer.done,
                where,
                "a cancelled transfer does not say so",
            )
            self.check(
                transfer.progress == 0, where, "a cancelled transfer has progress"
            )
            try:
                transfer.wait()
            except cumem.CancelledError:
                return "cancelled"
            self.check(False, where, "wait() of a cancelled transfer raised no error")
        if what == "drop":
            del transfer
            return "dropped"
        try:
            if what == "await":
                asyncio.run(await_one(transfer))
            elif what == "order":
                self.order(transfer)
            transfer.wait(timeout=100)
        except cumem.CudaError:
            self.check(
                transfer.progress < transfer.nbytes,
                where,
                "a transfer that failed reports all bytes",
            )
            raise
        self.check(
            transfer.done and not transfer.cancelled,
            where,
            "a transfer is not done after wait()",
        )
        self.check(
            transfer.progress == transfer.nbytes,
            where,
            "a transfer is done, but not all of its bytes",
        )
        return "done"

    def order(self, transfer: cumem.Transfer) -> None:
        """Let another stream wait for the transfer, and wait for that stream."""
        other = cumem.Stream()
        try:
            transfer.order(other)
            other.synchronize()
        except cumem.CudaError as error:
            if error.code != FAULT:
                raise
            # wait() then shows whether the copy failed, or only the call of order().

    def check(self, good: bool, where: str, what: str) -> None:
        if not good:
            self.wrong.append(f"{where}: {what}")


async def await_one(transfer: cumem.Transfer) -> None:
    await transfer


def wait_for_all() -> None:
    """Wait until no transfer is under way."""
    begin = time.monotonic()
    while testing.pending_transfers() and time.monotonic() - begin < PATIENCE:
        time.sleep(0.0002)


def plan_faults(deadline: float, seed: int) -> None:
    """Let some call of the driver fail every two milliseconds, until the deadline."""
    random = np.random.default_rng(seed)
    while time.monotonic() < deadline:
        op = FAULTY[int(random.integers(len(FAULTY)))]
        testing.plan_fault(op, int(random.integers(1, 30)), FAULT)
        time.sleep(0.002)
    testing.plan_fault(None, 0)


def free_nbytes() -> int:
    """Give back what is free, and return the free memory of the device."""
    gc.collect()
    cumem.Device(0).synchronize()
    cumem.trim()
    cumem.trim()
    return int(cumem.memory_info()[0])


def join(workers: list[Worker]) -> bool:
    """Wait for all workers. Returns False if one of them hangs."""
    for worker in workers:
        while worker.is_alive():
            worker.join(1)
            if time.monotonic() - worker.last > PATIENCE:
                faulthandler.dump_traceback(all_threads=True)
                return False
    return True


def run_round(
    options: argparse.Namespace, streams: list[cumem.Stream], number: int
) -> tuple[list[Worker], bool]:
    """Run one round. Returns its workers, and whether all of them came to an end."""
    seconds = options.seconds / options.rounds
    deadline = time.monotonic() + seconds
    seed = options.seed * 100_000 + number * 1000
    workers = [
        Worker(streams, seed + i, deadline, options.largest)
        for i in range(options.threads)
    ]
    for worker in workers:
        worker.has_faults = options.faults
        worker.start()
    if options.faults:
        plan_faults(deadline, seed)
    ended = join(workers)
    for worker in workers:
        worker.streams = []
    return workers, ended


def run(options: argparse.Namespace) -> dict[str, Any]:
    started = datetime.now(UTC)
    unread: list[str] = []  # failures of transfers that were dropped
    sys.unraisablehook = lambda info: unread.append(str(info.exc_value))
    if options.faults:
        testing.configure(faults=True)
    streams = [cumem.Stream() for _ in range(4)]
    everybody: list[Worker] = []
    free: list[int] = []
    hung = False
    for number in range(options.rounds):
        workers, ended = run_round(options, streams, number)
        everybody += workers
        if not ended:
            hung = True
            break
        wait_for_all()
        free.append(free_nbytes())
    result = {
        "commit": info.commit(),
        "started": started.isoformat(timespec="seconds"),
        "machine": f"{cumem.Device(0).name}, {len(os.sched_getaffinity(0))} cores",
        "seed": options.seed,
        "seconds": options.seconds,
        "threads": options.threads,
        "copies": dict(sum((w.counts for w in everybody), Counter())),
        "verified_nbytes": sum(w.nbytes for w in everybody),
        "wrong": [text for w in everybody for text in w.wrong],
        "failures": [repr(w.failure) for w in everybody if w.failure is not None],
        "hung": hung,
    }
    if hung:
        return result
    planned = [text for text in unread if f"({FAULT})" in text]
    result["failures"] += [text for text in unread if text not in planned]
    result["pending"] = testing.pending_transfers()
    result["free_nbytes_after_each_round"] = free
    total = cumem.stats().total
    result["live_nbytes"] = total.live_nbytes
    result["reserved_nbytes"] = total.reserved_nbytes
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=4, help="2 or more")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=64 << 20)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more")
    result = run(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    good = (
        not (result["wrong"] or result["failures"] or result["hung"])
        and result["copies"].get("done", 0) > 0
        and result["pending"] == result["live_nbytes"] == 0
        and result["reserved_nbytes"] == 0
        and max(result["free_nbytes_after_each_round"][1:])
        >= result["free_nbytes_after_each_round"][0]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
