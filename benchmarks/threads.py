# SPDX-License-Identifier: Apache-2.0
"""Measure blocking copies of one thread while other threads compute in Python.

    python benchmarks/threads.py --json benchmarks/results/threads-h200.json

A call that releases the GIL gets it back only when the thread that computes meanwhile has
to hand it over, which by default is after 5 ms. The script measures cumem's blocking copies
from and to ordinary memory, alone and beside one and three threads that count. It does the
same with PyTorch's copies, if PyTorch is installed, and with a sleep, which shows how much
time it costs to release the GIL once. The script also runs on the emulated device, and its
output then says so.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run, times_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BESIDE = (0, 1, 3)
#: A sleep takes about as long as a copy of 1 GiB, and releases and regains the GIL once.
SLEEP, SLEEP_SECONDS = "sleep", 0.02


@dataclass
class Case:
    """One copy by cumem or PyTorch, or a sleep.

    Parameters
    ----------
    who : str
        ``"cumem"``, ``"torch"``, or ``"sleep"`` for the call that copies nothing.
    direction : str
        ``"up"`` (host to device) or ``"down"``, and ``""`` for a sleep.
    nbytes : int
        How many bytes are copied, which is 0 for a sleep.
    seconds : dict
        The median time, by the number of threads that compute meanwhile.
    longest : dict
        The longest time, by the same number.
    """

    who: str
    direction: str
    nbytes: int
    seconds: dict[int, float] = field(default_factory=dict)
    longest: dict[int, float] = field(default_factory=dict)


@contextlib.contextmanager
def computing(count: int) -> Iterator[None]:
    """Let `count` threads compute in Python during the ``with`` block."""
    stop = False

    def compute() -> None:
        number = 0
        while not stop:
            number += 1

    threads = [threading.Thread(target=compute) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop = True
        for thread in threads:
            thread.join()


def calls(library: str, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return one library's blocking copies in both directions, or a sleep."""
    if library == SLEEP:
        return {"": lambda: time.sleep(SLEEP_SECONDS)}
    host = np.ones(nbytes, "u1")
    if library == "cumem":
        device = cumem.empty_device(nbytes, "u1")
        return {
            "up": lambda: cumem.copy(device, host),
            "down": lambda: cumem.copy(host, device),
        }
    import torch

    ordinary = torch.from_numpy(host)
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return {"up": lambda: there.copy_(ordinary), "down": lambda: ordinary.copy_(there)}


def libraries() -> list[str]:
    """Return the libraries whose copies can be measured here."""
    try:
        import torch
    except ImportError:
        return ["cumem"]
    return ["cumem", "torch"] if torch.cuda.is_available() else ["cumem"]


def cases(quick: bool, seconds: float) -> Iterator[Case]:
    """Measure all cases."""
    sizes = (256, 64 * KIB, MIB) if quick else (256, 64 * KIB, MIB, 4 * MIB, GIB)
    for nbytes in (*sizes, 0):
        for library in libraries() if nbytes else [SLEEP]:
            for direction, call in calls(library, nbytes).items():
                case = Case(library, direction, nbytes)
                for beside in BESIDE:
                    with computing(beside):
                        times = times_of(call, seconds)
                    case.seconds[beside] = statistics.median(times)
                    case.longest[beside] = max(times)
                yield case


def line(case: Case) -> str:
    """Return one line of the table."""
    what = f"{case.who} {case.direction} {format_nbytes(case.nbytes)}"
    if case.who == SLEEP:
        what = f"sleep of {SLEEP_SECONDS * 1e3:.0f} ms"
    return f"{what:24}" + "".join(
        f"  {case.seconds[beside] * 1e6:10.1f} us beside {beside}"
        f" (at most {case.longest[beside] * 1e6:.0f})"
        for beside in BESIDE
    )


def main() -> None:
    """Measure, print and write the file."""
    run = Run(__doc__)
    run.begin(cumem.backend() == "emulated")
    run.note(1)
    run.show(cases(run.options.quick, 0.05 if run.options.quick else 0.5), line)
    run.end()


if __name__ == "__main__":
    main()
