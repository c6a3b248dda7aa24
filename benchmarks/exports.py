# SPDX-License-Identifier: Apache-2.0
"""Measure how far the pinned pool grows when buffers are exported while the GPU is busy.

    python benchmarks/exports.py --json benchmarks/results/exports-h200.json

Each round allocates a page-locked array of 2.56 MB, uses it once in one of the ways below,
and drops it. Another library may still use a block that was exported to it, so the pool
sets the block aside until all work that was on the device at that time has ended. Meanwhile
a thread keeps the device busy with matrix products of PyTorch, so that this takes a while,
and the pool must grow. The script reports the size of the pool at the end. It needs PyTorch
and a GPU.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import cumem

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

SHAPE = (800, 800)
AHEAD = 20  # how many matrix products are queued at a time
HALVES = [np.ones((SHAPE[0] // 2, SHAPE[1]), "f4")] * 2
ONES = np.ones(SHAPE, "f4")


def make() -> cumem.PinnedBuffer:
    """Make one array."""
    return cumem.empty_pinned(SHAPE, "f4")


def _release(view: memoryview) -> None:
    """Release a view, as a consumer that is done with it does."""
    view.release()


#: The ways in which an array is used.
WAYS: dict[str, Callable[[], object]] = {
    "buf.fill(1)": lambda: make().fill(1),
    "buf[0, 0] = 1": lambda: make().__setitem__((0, 0), 1),
    "buf.to_numpy()": lambda: make().to_numpy(),
    "str(buf[:1])": lambda: str(make()[:1]),
    "np.array(buf)": lambda: np.array(make()),
    "cumem.copy(buf, array)": lambda: cumem.copy(make(), ONES),
    "buf.numpy()": lambda: make().numpy().fill(1),
    "memoryview(buf).release()": lambda: _release(memoryview(make())),
    "collate_pinned(...)": lambda: cumem.PinnedCollate()(HALVES),
}


@dataclass
class Case:
    """One way to use an array.

    Parameters
    ----------
    key : str
        The name of the way.
    rounds : int
        How many arrays were used, one after the other.
    reserved_nbytes : int
        The size of the pool at the end.
    us : float
        The mean time of a round, in microseconds.
    """

    key: str
    rounds: int
    reserved_nbytes: int
    us: float


@contextmanager
def busy_device() -> Iterator[None]:
    """Keep the device busy with matrix products during the ``with`` block."""
    ends = threading.Event()
    matrix = torch.randn(8192, 8192, device="cuda")

    def multiply() -> None:
        queued: list[torch.cuda.Event] = []
        with torch.cuda.stream(torch.cuda.Stream()):
            while not ends.is_set():
                _ = matrix @ matrix
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > AHEAD:
                    queued.pop(0).synchronize()

    thread = threading.Thread(target=multiply)
    thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        ends.set()
        thread.join()


def measure(key: str, way: Callable[[], object], rounds: int) -> Case:
    """Empty the pool, and then use `rounds` arrays in one way."""
    cumem.trim("pinned")
    begin = time.perf_counter()
    for _ in range(rounds):
        way()
    us = (time.perf_counter() - begin) / rounds * 1e6
    return Case(key, rounds, cumem.stats()["pinned"].reserved_nbytes, us)


def line(case: Case) -> str:
    """Return one line of the table."""
    return f"{case.key:28} {case.reserved_nbytes / 2**20:6.0f} MiB {case.us:8.0f} us"


def main() -> None:
    """Measure, print and write the file."""
    run = Run(__doc__)
    run.begin(cumem.backend() == "emulated")
    rounds = 100 if run.options.quick else 3_000
    run.note(1, array_nbytes=ONES.nbytes, products_queued=AHEAD)

    def cases() -> Iterator[Case]:
        for key, way in WAYS.items():
            with busy_device():
                case = measure(key, way, rounds)
            torch.cuda.synchronize()
            yield case

    run.show(cases(), line)
    run.end()


if __name__ == "__main__":
    main()
