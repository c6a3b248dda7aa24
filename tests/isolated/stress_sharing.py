# SPDX-License-Identifier: Apache-2.0
"""Let two processes open, copy from and drop shared memory of one name, again and again.

    python stress_sharing.py [--cycles 10000]

The processes run freely, so that each of them now makes the memory, now joins it, and now
is the last one that drops it. Each fills its own half, copies the whole to the device and
compares its half with what comes back. At the end neither process may have more
descriptors, mappings or memory than after the first tenth of the cycles, and the name may
have no note. The exit status is 0 if that is so and all bytes were right.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import numpy as np

import cumem

NBYTES = 256 << 10
MIB = 1 << 20
#: The memory and the mappings by which a process may grow, for what allocators and the
#: emulated device keep. A single cycle that left something would leave it in each cycle.
ROOM_NBYTES = 4 * MIB
ROOM_MAPPINGS = 64


class Use(NamedTuple):
    """What a process has of the system."""

    descriptors: int
    mappings: int
    shared_mappings: int
    resident_nbytes: int


def use() -> Use:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return Use(
        len(os.listdir("/proc/self/fd")),
        len(mappings),
        sum("cumem-shared" in each for each in mappings),
        pages * os.sysconf("SC_PAGESIZE"),
    )


def run(name: str, half: int, cycles: int, barrier: Barrier) -> None:
    """Run all cycles of one process, which writes this half of the memory."""
    warnings.filterwarnings("ignore", "shared_pinned", RuntimeWarning)
    on_device = cumem.empty_device((2, NBYTES // 2), "u1")
    before = use()
    barrier.wait()
    for cycle in range(cycles):
        if cycle == cycles // 10:
            before = use()
        with cumem.shared_pinned(name, (2, NBYTES // 2), "u1") as buffer:
            buffer.numpy()[half] = cycle % 256
            cumem.copy(on_device, buffer)
        found = on_device.to_numpy()[half]
        if (found != cycle % 256).any():
            raise SystemExit(f"cycle {cycle}: {np.unique(found)} in half {half}")
    after = use()
    print(f"half {half}: {before} before, {after} after {cycles} cycles", flush=True)
    if after.descriptors > before.descriptors or after.shared_mappings > 0:
        raise SystemExit("descriptors or shared memory were left behind")
    if after.mappings > before.mappings + ROOM_MAPPINGS:
        raise SystemExit("mappings were left behind")
    if after.resident_nbytes > before.resident_nbytes + ROOM_NBYTES:
        raise SystemExit("memory was left behind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10_000)
    cycles = parser.parse_args().cycles
    name = f"stress sharing {os.getpid()}"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [
        context.Process(target=run, args=(name, half, cycles, barrier))
        for half in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    note = Path(f"/dev/shm/cumem-{os.geteuid()}/{name}.note")
    if note.exists():
        note.unlink()
        sys.exit("a note was left behind")
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
