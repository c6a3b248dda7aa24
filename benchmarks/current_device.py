# SPDX-License-Identifier: Apache-2.0
"""Measure what it costs an allocation to find out which device is current.

    python benchmarks/current_device.py --json benchmarks/results/current-device-h200.json

If several devices are visible and the program has not chosen one, each allocation without
`device=` asks the driver which device is current. The script measures this allocation from
a warm pool, and the same with a device that was chosen for the thread, for a ``with``
block, or in the call. `numpy.empty` is measured beside them.

Run it a second time with CUDA_VISIBLE_DEVICES=0: with one visible device cumem asks
nothing. The script also runs on emulated devices (CUMEM_EMULATED_DEVICES=4), and its output
then says so.
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

CALLS = 20_000  # timed together, because one call is too short for the clock


@dataclass
class Case:
    """The time of an allocation, with one way to choose the device.

    Parameters
    ----------
    key : str
        Where the device was chosen: ``"thread"``, ``"block"``, ``"argument"``, or
        ``"cuda"`` if it was not. ``"numpy"`` is `numpy.empty`.
    kind : str
        The kind of memory, or ``""`` for NumPy's.
    ns : float
        The median time of an allocation with its free.
    best_ns : float
        The shortest time.
    """

    key: str
    kind: str
    ns: float = 0.0
    best_ns: float = 0.0


def measure(case: Case, make: Callable[[], object], rounds: int) -> Case:
    """Time `make`, and fill in the case."""
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
