# SPDX-License-Identifier: Apache-2.0
"""Measure what it costs an allocation to find out which device is current.

    python benchmarks/current_device.py --json benchmarks/results/current-device-h200.json

Where several devices are visible and cumem's current device was not chosen, each call that
names no device asks the driver for CUDA's current one. The same pool hit is measured with a
device that was chosen for the thread, for a block, or in the call. The floor is
`numpy.empty` in the same run. Run it again with CUDA_VISIBLE_DEVICES=0, where nothing is
asked. It also runs on emulated devices (CUMEM_EMULATED_DEVICES=4), and then says so.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import cumem

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

CALLS = 20_000  # in a row: one alone is too short for the clock


@dataclass
class Case:
    """One way to say which device.

    Parameters
    ----------
    key : str
        ``"cuda"`` (nobody has said), ``"thread"``, ``"block"``, ``"argument"``, or
        ``"numpy"`` for the floor.
    kind : str
        The kind of memory; ``""`` for NumPy's.
    ns : float
        Median time of an allocation and its free.
    best_ns : float
        Least time.
    """

    key: str
    kind: str
    ns: float = 0.0
    best_ns: float = 0.0


def measure(case: Case, make: Callable[[], object], rounds: int) -> Case:
    """Fill in the times of `make`."""
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            make()
        times.append((time.perf_counter_ns() - begin) / CALLS)
    case.ns, case.best_ns = statistics.median(times[1:]), min(times[1:])
    return case


def cases(rounds: int) -> Iterator[Case]:
    """Measure all cases."""
    yield measure(Case("numpy", ""), lambda: np.empty(64), rounds)
    for kind, make in ("device", cumem.empty_device), ("pinned", cumem.empty_pinned):
        cumem.set_current_device(None)
        yield measure(Case("cuda", kind), lambda make=make: make(64), rounds)
        cumem.set_current_device(0)
        yield measure(Case("thread", kind), lambda make=make: make(64), rounds)
        with cumem.Device(0):
            yield measure(Case("block", kind), lambda make=make: make(64), rounds)
        yield measure(
            Case("argument", kind), lambda make=make: make(64, device=0), rounds
        )
        cumem.set_current_device(None)


def line(case: Case) -> str:
    """Return one line of the table."""
    what = f"{case.key} {case.kind}".rstrip()
    return f"{what:20} {case.ns:8.1f} ns, at best {case.best_ns:8.1f}"


def main() -> None:
    """Measure, print and write the file."""
    run = Run(__doc__)
    run.begin(cumem.backend() == "emulated")
    run.note(1, device_count=cumem.device_count())
    run.show(cases(3 if run.options.quick else 25), line)
    run.end()


if __name__ == "__main__":
    main()
