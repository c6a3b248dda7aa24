# SPDX-License-Identifier: Apache-2.0
"""Measure a pool that spills, with buffers that together need 1.5 times its limit.

    python benchmarks/spilling.py --json benchmarks/results/spilling-h200.json

The script measures three things:

1. The link: a copy of one buffer's size to pinned memory, and then a copy back.
2. Turns: the buffers are used one after the other, round after round. The buffer that is
   used next is always one that was spilled to pinned memory, so each use spills one buffer
   and wakes another. The bytes of a buffer cross the link twice, and the rate counts both.
3. Allocations: an allocation and its free in a pool that could spill but has room,
   alternating with the same in a pool without spill.

The script also runs on the emulated device, and then says that the figures are not a GPU's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cumem
from cumem.units import format_nbytes, format_rate, format_seconds

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run, times_of

#: How many buffers there are, and for how many of them the pool's limit has room.
BUFFERS = 12
ROOM = 8


@dataclass
class Case:
    """The link or the turns with one size of buffers, or the allocations.

    Parameters
    ----------
    key : str
        ``"link"``, ``"turns"`` or ``"allocation"``.
    nbytes : int
        The bytes of one buffer.
    seconds : list of float
        The time of each copy there and back, of each use, or of each allocation with its
        free in the pool that can spill.
    moved_nbytes : int
        How many bytes cross the link each time, both ways together.
    rate : float
        Bytes a second, both ways together.
    of_link : float
        `rate` divided by that of ``"link"``.
    first_seconds : float
        The time of the first use that spills, which has to page-lock memory.
    plain_seconds : list of float
        The time of each allocation with its free in the pool without spill.
    ratio : float
        The median of `seconds` divided by that of `plain_seconds`.
    """

    key: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    moved_nbytes: int = 0
    rate: float = 0.0
    of_link: float = 0.0
    first_seconds: float = 0.0
    plain_seconds: list[float] = field(default_factory=list)
    ratio: float = 0.0


def measure_link(nbytes: int) -> Case:
    """Time a copy to the host and back, one after the other, as in each turn."""
    device = cumem.empty_device(nbytes, "u1")
    host = cumem.empty_pinned(nbytes, "u1")

    def there_and_back() -> None:
        cumem.copy(host, device)
        cumem.copy(device, host)

    case = Case("link", nbytes, times_of(there_and_back, 1.0), 2 * nbytes)
    case.rate = case.moved_nbytes / statistics.median(case.seconds)
    case.of_link = 1.0
    return case


def measure_turns(nbytes: int, rounds: int, link: Case) -> Case:
    """Time the uses of more buffers than the pool has room for, one after the other."""
    case = Case("turns", nbytes)
    with cumem.Pool("device", spill="pinned", limit=ROOM * nbytes) as pool:
        buffers = []
        for _ in range(BUFFERS):
            start = time.perf_counter()
            buffers.append(pool.allocate(nbytes))
            buffers[-1].fill(1)
            if not case.first_seconds and pool.stats().spill_count:
                case.first_seconds = time.perf_counter() - start
        for _ in range(
            2
        ):  # after these rounds every buffer has pinned memory to spill to
            for buffer in buffers:
                buffer.item(0)
        before = pool.stats()
        for _ in range(rounds):
            for buffer in buffers:
                start = time.perf_counter()
                buffer.item(0)
                case.seconds.append(time.perf_counter() - start)
        after = pool.stats()
        moved = after.spilled_nbytes - before.spilled_nbytes
        moved += after.woken_nbytes - before.woken_nbytes
        case.moved_nbytes = moved // len(case.seconds)
        case.rate = moved / sum(case.seconds)
        case.of_link = case.rate / link.rate
        del buffers, buffer
    return case


def measure_allocation(count: int) -> Case:
    """Time allocations in a pool that can spill and in one that cannot, alternately."""
    nbytes = 1 << 20
    case = Case("allocation", nbytes)
    with (
        cumem.Pool("device", spill="pinned") as spilling,
        cumem.Pool("device") as plain,
    ):
        for pool in (spilling, plain):
            pool.allocate(nbytes)
        for _ in range(count):
            for pool, times in (
                (spilling, case.seconds),
                (plain, case.plain_seconds),
            ):
                start = time.perf_counter()
                for _ in range(1000):
                    pool.allocate(nbytes)
                times.append((time.perf_counter() - start) / 1000)
    case.ratio = statistics.median(case.seconds) / statistics.median(case.plain_seconds)
    return case


def measure(quick: bool) -> Iterator[Case]:
    """Measure all cases."""
    for mib in (8,) if quick else (8, 64, 512):
        link = measure_link(mib << 20)
        yield link
        yield measure_turns(mib << 20, 1 if quick else 5, link)
        cumem.trim()
    yield measure_allocation(3 if quick else 50)


def line(case: Case) -> str:
    """Return a row of the table."""
    if case.key == "allocation":
        return (
            f"an allocation of {format_nbytes(case.nbytes)} and its free: "
            f"{format_seconds(statistics.median(case.seconds))}, "
            f"{case.ratio:.3f} of that without spill"
        )
    what = "there and back" if case.key == "link" else "by turns"
    first = (
        f", the first spill {format_seconds(case.first_seconds)}"
        if case.first_seconds
        else ""
    )
    return (
        f"{format_nbytes(case.nbytes)} {what}: {format_rate(round(case.rate), 1.0)}, "
        f"{case.of_link:.1%} of the link{first}"
    )


def main() -> None:
    run = Run(__doc__ or "")
    run.begin(cumem.backend() == "emulated")
    run.note(1, buffers=BUFFERS, room=ROOM)
    run.show(measure(run.options.quick), line)
    run.end()


if __name__ == "__main__":
    main()
