# SPDX-License-Identifier: Apache-2.0
"""Measure what `cumem.record` costs for each event, and what it costs while none runs.

    python benchmarks/recording.py --json benchmarks/results/recording-h200.json

An allocation from a warm pool and its free are two events. The script times this pair with
and without a record, and says how many nanoseconds one event adds: without stacks, with
shallow and with deep ones, with a tag, and from four threads. It also times short copies. A
copy to a device takes microseconds, and its time varies by more than one event costs, so
that figure is only a bound.

`--before DIR` names a checkout of a commit that had no records yet, with its extension
built. The pair is then also timed in that build and in this one while no record runs, in
processes that alternate.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import cumem

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

NBYTES = 1000
DEEP = 32
THREADS = 4
TURNS = 10


@dataclass
class Case:
    """The time of one call, with one setting of the record or without a record.

    Parameters
    ----------
    key : str
        ``"off"``, ``"events"``, ``"stacks"``, ``"deep stacks"`` and so on.
    call_ns : float
        The time of an allocation with its free, or of a short copy, in the best round.
    median_ns : float
        The same time in the median round.
    event_ns : float
        How much one event adds to the best time, or 0 if no record runs.
    rounds : int
        How many rounds were timed.
    """

    key: str
    call_ns: float
    median_ns: float
    event_ns: float
    rounds: int


def pair(count: int) -> None:
    """Allocate and free `count` times from a warm pool."""
    empty = cumem.empty_pinned
    for _ in range(count):
        empty(NBYTES, "u1")


def at_depth(depth: int, act: Callable[[int], None], count: int) -> None:
    """Call `act` from a stack that is `depth` frames deeper."""
    if depth > 0:
        at_depth(depth - 1, act, count)
    else:
        act(count)


def in_threads(act: Callable[[int], None], count: int) -> None:
    """Call `act` in each of `THREADS` threads, and wait for all of them."""
    workers = [threading.Thread(target=act, args=(count,)) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def timed(act: Callable[[int], None], count: int, rounds: int) -> list[float]:
    """Return for each round how many nanoseconds one of its `count` calls took."""
    act(count)
    found = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        act(count)
        found.append((time.perf_counter_ns() - start) / count)
    return found


def measured(run: Run) -> Iterator[Case]:
    """Measure all cases in this process."""
    many, few, rounds = (200, 5, 2) if run.options.quick else (3000, 50, 30)
    device = cumem.empty_device(4096, "u1")
    pinned = cumem.empty_pinned(4096, "u1")
    host = np.ones(4096, "u1")

    def upload(times: int) -> None:
        for _ in range(times):
            cumem.copy(device, host)

    def copy(times: int) -> None:
        for _ in range(times):
            cumem.copy(pinned, host)

    def deep(times: int) -> None:
        at_depth(DEEP, pair, times)

    def threads(times: int) -> None:
        in_threads(pair, times)

    keep = [cumem.empty_pinned(NBYTES, "u1") for _ in range(16)]
    ways: list[tuple[str, Callable[[int], None], dict[str, bool | int], str, int]] = [
        ("events", pair, {"stacks": False}, "", 2),
        ("events with a tag", pair, {"stacks": False}, "tag", 2),
        ("stacks", pair, {"stacks": True}, "", 2),
        ("deep stacks", deep, {"stacks": True}, "", 2),
        ("stacks of more bytes", pair, {"stacks": 1 << 20}, "", 2),
        (f"events of {THREADS} threads", threads, {"stacks": False}, "", 2 * THREADS),
        ("transfers on the host", copy, {"stacks": False}, "", 1),
        ("transfers to the device", upload, {"stacks": False}, "", 1),
    ]
    for key, act, options, tag, events in ways:
        count = few if act is upload else many
        off, on = [], []
        for _ in range(TURNS):  # alternate, so that drift of the machine affects both
            off += timed(act, count, rounds)
            with ExitStack() as stack:
                stack.enter_context(cumem.record(max_entries=1 << 14, **options))
                if tag:
                    stack.enter_context(cumem.tag(tag))
                on += timed(act, count, rounds)
        yield Case(f"{key}, off", min(off), statistics.median(off), 0.0, len(off))
        added = (min(on) - min(off)) / events
        yield Case(key, min(on), statistics.median(on), added, len(on))
    del keep
    if run.options.before:
        yield from compared(Path(run.options.before), run.options.quick)


PAIRS = """
import sys, time, cumem
keep = [cumem.empty_pinned(1000, "u1") for _ in range(16)]
def pair(count):
    empty = cumem.empty_pinned
    for _ in range(count):
        empty(1000, "u1")
pair(3000)
for _ in range(int(sys.argv[1])):
    start = time.perf_counter_ns()
    pair(3000)
    print((time.perf_counter_ns() - start) / 3000)
"""


def compared(before: Path, quick: bool) -> Iterator[Case]:
    """Compare this build, while no record runs, with one that has no records."""
    trees = {"before": before, "now": Path(cumem.__file__).parents[1]}
    found: dict[str, list[float]] = {key: [] for key in trees}
    for _ in range(2 if quick else TURNS):
        for key, tree in trees.items():
            shown = {"PYTHONPATH": str(tree), "CUMEM_BACKEND": cumem.backend()}
            done = subprocess.run(
                [sys.executable, "-c", PAIRS, "10" if quick else "100"],
                capture_output=True,
                text=True,
                check=True,
                env=os.environ | shown,
            )
            found[key] += map(float, done.stdout.split())
    for key, values in found.items():
        median = statistics.median(values)
        yield Case(f"off, {key}", min(values), median, 0.0, len(values))


def line(case: Case) -> str:
    """Return a row of the table."""
    text = f"{case.key:<28} {case.call_ns:8.1f} ns (median {case.median_ns:8.1f})"
    return text + (f"   {case.event_ns:6.1f} ns an event" if case.event_ns else "")


def main() -> None:
    before = {
        "metavar": "DIR",
        "help": "a checkout that is built, of a commit without records",
    }
    run = Run(__doc__ or "", before=before)
    run.begin(cumem.backend() == "emulated")
    run.note(1, nbytes=NBYTES, depth=DEEP, threads=THREADS)
    run.show(measured(run), line)
    run.end()


if __name__ == "__main__":
    main()
