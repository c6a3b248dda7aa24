# SPDX-License-Identifier: Apache-2.0
"""Make up traces of allocations, to try how pools grow when they replay them.

    python benchmarks/made_traces.py FOLDER

The script imitates five programs. The sizes and lifetimes of their allocations have
different distributions, and each program has a seed of its own. The traces are `.npz`
files, which `python -m cumem replay` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

KIB, MIB = 1 << 10, 1 << 20


class Writer:
    """Collects events. `allocate` returns a block's number, which `free` takes."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self.count = 0

    def allocate(self, nbytes: float, stream: int = 0) -> int:
        """Add an allocation, and return the block's number."""
        self.rows.append((1, self.count, max(int(nbytes), 1), stream))
        self.count += 1
        return self.count - 1

    def free(self, block: int, stream: int = 0) -> None:
        """Add the free of a block."""
        self.rows.append((0, block, 0, stream))


def lognormal(trace: Writer, random: np.random.Generator) -> None:
    """Allocate with log-normal sizes, so that a new block seldom fits into a freed one."""
    live: list[int] = []
    for size in random.lognormal(np.log(400 * KIB), 1.8, 20_000):
        live.append(trace.allocate(min(size, 256 * MIB)))
        while len(live) > 300 or (live and random.random() < 0.45):
            trace.free(live.pop(int(random.integers(len(live)))))


def ragged_training(trace: Writer, random: np.random.Generator) -> None:
    """Go through layers forward and back, with batches of another length in each step."""
    weights = [trace.allocate(size) for size in random.uniform(1, 24, 48) * MIB]
    for _ in range(60):
        length = random.uniform(0.2, 1.0)
        kept = []
        for _ in weights:
            for _ in range(3):
                trace.free(trace.allocate(length * random.choice([0.5, 3, 9]) * MIB))
            kept.append(trace.allocate(length * 6 * MIB))
        for block in reversed(kept):
            gradient = trace.allocate(length * 6 * MIB)
            trace.free(block)
            trace.free(gradient)


def growing_caches(trace: Writer, random: np.random.Generator) -> None:
    """Grow the caches of many sequences, each into a block that is a quarter larger."""
    caches: dict[int, tuple[int, float]] = {}
    for step in range(6_000):
        if len(caches) < 24:
            size = random.uniform(64 * KIB, MIB)
            caches[step] = (trace.allocate(size), size)
        key = int(random.choice(list(caches)))
        block, size = caches[key]
        if size > 48 * MIB or random.random() < 0.05:
            trace.free(block)
            del caches[key]
            continue
        caches[key] = (trace.allocate(size * 1.25), size * 1.25)
        trace.free(block)


def powers_and_odds(trace: Writer, random: np.random.Generator) -> None:
    """Allocate powers of two and odd sizes in bursts, and free them in the same order."""
    queue: list[int] = []
    for _ in range(150):
        for _ in range(int(random.integers(10, 120))):
            power = 2.0 ** random.integers(9, 25)
            queue.append(
                trace.allocate(power if random.random() < 0.5 else power * 1.3)
            )
        for _ in range(int(random.integers(0, len(queue)))):
            trace.free(queue.pop(0))


def two_sides(trace: Writer, random: np.random.Generator) -> None:
    """Allocate on two streams, with small blocks on one and large blocks on the other."""
    live: tuple[list[int], list[int]] = ([], [])
    for _ in range(12_000):
        side = int(random.random() < 0.3)
        scale = (200 * KIB, 5 * MIB)[side]
        live[side].append(trace.allocate(random.pareto(1.6) * scale % (64 * MIB), side))
        while len(live[side]) > (200, 40)[side]:
            at = int(random.integers(len(live[side])))
            trace.free(live[side].pop(at), side)


PROGRAMS: list[Callable[[Writer, np.random.Generator], None]] = [
    lognormal,
    ragged_training,
    growing_caches,
    powers_and_odds,
    two_sides,
]


def make(folder: Path) -> list[Path]:
    """Write all traces, which are the same in every run, and return their paths."""
    paths = []
    for seed, program in enumerate(PROGRAMS):
        trace = Writer()
        program(trace, np.random.default_rng(seed))
        op, block, size, stream = np.array(trace.rows, dtype=np.uint64).T
        paths.append(folder / f"made_{program.__name__}.npz")
        np.savez_compressed(
            paths[-1],
            op=op.astype("u1"),
            block=block.astype("u4"),
            size=size,
            stream=stream.astype("u1"),
        )
    return paths


if __name__ == "__main__":
    for path in make(Path(sys.argv[1])):
        print(path)
