# SPDX-License-Identifier: Apache-2.0
"""Measure how much memory a device pool reserves for traces, and by how many driver calls.

    python benchmarks/growth.py --traces FOLDER --json FILE

FOLDER holds `.npz` files of recorded allocations, or those that `made_traces.py` makes up.
Each is replayed twice on the same pool of the emulated device. The pool reserves the same
memory and makes the same driver calls there as on a GPU, but not in the same time.
So the script counts the calls, and multiplies each count by the time that this call takes
on an H200 (`results/driver-calls-h200.json`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import testing  # first, because it loads the core that counts calls

# isort: split
from measure import Run

import cumem
from cumem.tools.replay.trace import Trace, load_trace

GRANULE = 2 << 20
#: The functions of cumem's runtime layer that are counted, and the driver call of each.
CALLS = {
    "physical_create": "cuMemCreate",
    "address_map": "cuMemMap",
    "address_set_access": "cuMemSetAccess",
    "address_unmap": "cuMemUnmap",
    "physical_release": "cuMemRelease",
}


@dataclass
class Case:
    """One trace, replayed twice. Names that end in ``_again`` are of the second replay.

    Parameters
    ----------
    trace : str
        The name of the file.
    peak_live, peak_reserved : int
        The most bytes that the trace had allocated at one time, and the most that the pool
        had reserved from the driver.
    ratio, ratio_again : float
        `peak_reserved` divided by `peak_live`, after the first and the second replay.
    growths, growths_again : int
        How many allocations made the pool ask the driver for memory.
    calls, calls_again : dict
        How often each driver call was made for that, by its name.
    modelled_ms, modelled_ms_again : float
        The milliseconds that those calls take on an H200.
    """

    trace: str
    peak_live: int
    peak_reserved: int
    ratio: float
    ratio_again: float
    growths: int
    growths_again: int
    calls: dict[str, int]
    calls_again: dict[str, int]
    modelled_ms: float
    modelled_ms_again: float


def costs() -> dict[str, float]:
    """Return the microseconds that each call took for one granule on an H200."""
    path = Path(__file__).parent / "results/driver-calls-h200.json"
    rows = json.loads(path.read_text())["calls"]
    return {
        name: next(
            r["us"] for r in rows if r["call"] == name and r["nbytes"] == GRANULE
        )
        for name in CALLS.values()
    }


def play(trace: Trace, pool: cumem.Pool, streams: list[cumem.Stream]) -> int:
    """Replay a trace once, free everything, and return the peak of live bytes."""
    held: dict[int, tuple[object, int]] = {}
    live = peak = 0
    rows = zip(*(getattr(trace, name).tolist() for name in COLUMNS), strict=True)
    for op, block, nbytes, stream in rows:
        if op:
            held[block] = (pool.allocate(nbytes, stream=streams[stream]), nbytes)
            live += nbytes
            peak = max(peak, live)
        elif block in held:
            live -= held.pop(block)[1]
    return peak


COLUMNS = ("op", "block", "size", "stream")


def measure(path: Path) -> Case:
    """Replay one trace twice on a new pool of a new emulated device."""
    trace = load_trace(path)
    cumem.shutdown()
    testing.configure(backend="emulated", faults=True, memory_nbytes=64 << 30)
    streams = [cumem.Stream() for _ in range(int(trace.stream.max()) + 1)]
    pool = cumem.Pool("device")
    found = []
    price = costs()
    for _ in range(2):
        testing.plan_fault(None, 0)  # resets the counts of calls
        before = pool.stats().growth_count
        live = play(trace, pool, streams)
        stats = pool.stats()
        calls = {name: testing.fault_count(op) for op, name in CALLS.items()}
        ms = sum(price[name] * count for name, count in calls.items()) / 1000
        reserved = stats.peak_reserved_nbytes
        found.append((reserved, stats.growth_count - before, calls, ms))
    pool.close()
    cumem.shutdown()
    (reserved, growths, calls, ms), (again, growths_2, calls_2, ms_2) = found
    return Case(
        path.stem,
        live,
        reserved,
        reserved / live,
        again / live,
        growths,
        growths_2,
        calls,
        calls_2,
        round(ms, 2),
        round(ms_2, 2),
    )


def line(case: Case) -> str:
    """Return a row of the table."""
    return (
        f"{case.trace:24s} {case.ratio:.4f} again {case.ratio_again:.4f}  growths "
        f"{case.growths:4d} {case.growths_again:4d}  calls {sum(case.calls.values()):6d} "
        f"{sum(case.calls_again.values()):6d}  {case.modelled_ms:.1f} ms modelled"
    )


def main() -> None:
    run = Run(__doc__ or "", traces={"nargs": "+", "metavar": "FOLDER"})
    run.begin(emulated=True)
    run.note(1, about="peak reserved over peak live; times of calls are modelled")

    def cases() -> Iterator[Case]:
        for folder in run.options.traces:
            for path in sorted(Path(folder).glob("*.npz")):
                yield measure(path)

    run.show(cases(), line)
    run.end()


if __name__ == "__main__":
    main()
