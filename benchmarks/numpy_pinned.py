# SPDX-License-Identifier: Apache-2.0
"""Measure loops that make NumPy arrays in pinned memory and send them to a GPU by PyTorch.

    python benchmarks/numpy_pinned.py --json benchmarks/results/numpy-pinned-h200.json

`copy` copies one NumPy array to the device again and again. `loop` makes a new array each
time and copies it, in one thread. In `threads`, eight threads make the arrays and one
thread copies them. `make` is the loop without copies, and `cost` makes and drops arrays by
`np.empty`.

Each is measured with ordinary NumPy arrays, with PyTorch's `pin_memory()` of ordinary
arrays, inside ``with numpy_pinned():``, and after `numpy_pinned.enable()`. Only the second
of these needs another line in the code that makes and copies the arrays. The link is the
rate of copies from memory that PyTorch has pinned, in the same run.

Without a GPU the script runs on the emulated device, where cumem makes the copies instead
of PyTorch, and says so.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.units import format_nbytes, format_rate, format_seconds

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run, times_of

MIB = 1 << 20
THREADS = 8
#: How many times of a case the results keep at most. They keep the first ones.
ROUNDS = 100
#: How many of the last arrays on the device are kept alive.
DEPTH = 4


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Let NumPy make pinned arrays in the whole process during the ``with`` block."""
    cumem.numpy_pinned.enable()
    try:
        yield
    finally:
        cumem.numpy_pinned.disable()


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "NumPy": contextlib.nullcontext,
    "pin_memory()": contextlib.nullcontext,
    "numpy_pinned": cumem.numpy_pinned,
    "enable()": enabled,
}


@dataclass
class Case:
    """One of the loops, with one way to get pinned memory.

    Parameters
    ----------
    key : str
        ``"link"``, ``"copy"``, ``"make"``, ``"loop"``, ``"threads"`` or ``"cost"``.
    way : str
        A key of WAYS, or ``"pinned memory"`` for the link.
    nbytes : int
        The bytes of an array.
    count : int
        The number of arrays in a round.
    seconds : list of float
        The time of each round.
    percent : float
        The rate of the median round in percent of the link's. It is 100 for ``"link"``, and
        also for ``"cost"``, where it means nothing.
    """

    key: str
    way: str
    nbytes: int
    count: int
    seconds: list[float] = field(default_factory=list)
    percent: float = 0.0

    @property
    def median(self) -> float:
        """Return the median of the times, in seconds."""
        return statistics.median(self.seconds)


class Copies:
    """Makes the copies, by PyTorch or, on the emulated device, by cumem."""

    def __init__(self) -> None:
        self.torch: Any = None
        if cumem.backend() == "cuda":
            import torch

            self.torch = torch
        self.stream = cumem.Stream()

    def send(self, array: np.ndarray, pins: bool) -> Any:
        """Begin to copy an array to the device, and return the copy."""
        if self.torch is None:
            there = cumem.empty_device(array.shape, array.dtype, stream=self.stream)
            cumem.copy_async(there, array, stream=self.stream)
            return there
        tensor = self.torch.from_numpy(array)
        return (tensor.pin_memory() if pins else tensor).to("cuda", non_blocking=True)

    def pinned(self, nbytes: int) -> Any:
        """Allocate pinned memory to measure the link with."""
        if self.torch is None:
            return cumem.empty_pinned(nbytes // 4, "f4").numpy()
        return self.torch.empty(nbytes // 4, dtype=self.torch.float32, pin_memory=True)

    def send_pinned(self, source: Any) -> Any:
        """Begin to copy memory that `pinned` has allocated, and return the copy."""
        if self.torch is None:
            return self.send(source, False)
        return source.to("cuda", non_blocking=True)

    def wait(self) -> None:
        """Wait for all copies."""
        if self.torch is None:
            self.stream.synchronize()
        else:
            self.torch.cuda.synchronize()

    def host(self, there: Any) -> np.ndarray:
        """Return a copy on the device as a NumPy array."""
        return there.to_numpy() if self.torch is None else there.cpu().numpy()


def make(base: np.ndarray, number: int) -> np.ndarray:
    """Make an array as a user's code does, which calls NumPy and not cumem."""
    return base + np.float32(number)


class Bench:
    """The state that all cases share."""

    def __init__(self, quick: bool) -> None:
        self.copies = Copies()
        self.seconds = 0.05 if quick else 1.0
        self.sizes = [MIB] if quick else [MIB, 16 * MIB, 128 * MIB]
        self.total = 8 * MIB if quick else 1024 * MIB
        self.ways = [
            way for way in WAYS if self.copies.torch is not None or way[0] != "p"
        ]

    def measure(self, case: Case, run: Callable[[], object], link: float) -> Case:
        """Time one round again and again, and fill in the case."""
        case.seconds = times_of(run, self.seconds)[:ROUNDS]
        rate = case.nbytes * case.count / case.median
        case.percent = 100 * rate / link if link else 100.0
        return case

    def transfers(self) -> Iterator[Case]:
        """Measure the link and all loops but `cost`, with each size of arrays."""
        for nbytes in self.sizes:
            count = max(2, self.total // nbytes)
            source = self.copies.pinned(nbytes)

            def burst(source: Any = source, count: int = count) -> None:
                for _ in range(count):
                    self.copies.send_pinned(source)
                self.copies.wait()

            link = self.measure(Case("link", "pinned memory", nbytes, count), burst, 0)
            rate = nbytes * count / link.median
            yield link
            for key, way in itertools.product(("copy", "loop", "threads"), self.ways):
                yield self.transfer(key, way, nbytes, count, rate)
            yield self.transfer("make", "NumPy", nbytes, count, rate)

    def transfer(
        self, key: str, way: str, nbytes: int, count: int, link: float
    ) -> Case:
        """Measure one loop with one way to get pinned memory, and check a copy."""
        base = np.arange(nbytes // 4, dtype="f4")
        pins = way == "pin_memory()"
        last: list[Any] = []

        def copy(array: np.ndarray) -> None:
            last.append(self.copies.send(array, pins))
            del last[:-DEPTH]

        def round_of_one() -> None:
            for number in range(count):
                array = make(base, number)
                if key != "make":
                    copy(array)
            self.copies.wait()

        with WAYS[way](), ThreadPoolExecutor(THREADS) as threads:
            fixed = make(base, count - 1)

            def round_of_copies() -> None:
                for _ in range(count):
                    copy(fixed)
                self.copies.wait()

            def round_of_threads() -> None:
                for first in range(0, count, THREADS):
                    numbers = range(first, min(first + THREADS, count))
                    for array in threads.map(lambda n: make(base, n), numbers):
                        copy(array)
                self.copies.wait()

            rounds = {"copy": round_of_copies, "threads": round_of_threads}
            case = self.measure(
                Case(key, way, nbytes, count), rounds.get(key, round_of_one), link
            )
            if last and not (self.copies.host(last[-1]) == make(base, count - 1)).all():
                raise AssertionError(f"{key}, {way}: the device has other numbers")
        return case

    def costs(self) -> Iterator[Case]:
        """Measure `cost`, a thousand arrays in a row."""
        count = 1000
        for nbytes, way in itertools.product(
            (128, MIB, 8 * MIB), ("NumPy", "enable()")
        ):

            def run(items: int = nbytes // 8) -> None:
                for _ in range(count):
                    np.empty(items)

            with WAYS[way]():
                yield self.measure(Case("cost", way, nbytes, count), run, 0)


def line(case: Case) -> str:
    """Return a row of the table."""
    start = f"{case.key:<8} {case.way:<14} {format_nbytes(case.nbytes):>8}"
    if case.key == "cost":
        return f"{start}  {format_seconds(case.median / case.count):>9} each"
    rate = format_rate(case.nbytes * case.count, case.median)
    return f"{start}  {rate:>12}  {case.percent:>5.1f} % of the link"


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    emulated = cumem.backend() == "emulated"
    bench = Bench(run.options.quick or emulated)
    run.begin(emulated)
    run.note(1, threads=THREADS, numpy=np.__version__)
    run.show(bench.transfers(), line)
    run.show(bench.costs(), line)
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
