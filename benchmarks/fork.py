# SPDX-License-Identifier: Apache-2.0
"""Measure what fork() costs a process with page-locked memory, and check every byte.

    python benchmarks/fork.py --json benchmarks/results/fork-h200.json

By default a child process gets a copy of every page-locked block that is in use. So the
script measures how long one `os.fork()` takes, and how much memory it costs, while nothing,
1 GiB or 16 GiB of page-locked memory is in use, and the same with ordinary memory. It also
times `subprocess.run`, for which nothing is copied.

Then it measures what 1.5 GiB costs in a pool with each value of `fork=` while four children
live at the same time. Finally it forks while copies run in both directions, and checks
every byte in the parent and in the child. The script also runs on the emulated device, and
its output then says so.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run, times_of

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 256 * MIB
CHILD_SECONDS = 300  # a child that has not ended after this time is killed
WORKERS = 4
WAYS = ("copy", "share", "omit")

MADE: dict[str, Callable[[int], cumem.Buffer]] = {
    "pinned": lambda n: cumem.empty_pinned(n, "u1"),
    "mapped": lambda n: cumem.empty_mapped(n, "u1"),
    "malloc": lambda n: cumem.empty(
        n, "u1", "pinned", pool=cumem.Pool("pinned", segments="malloc")
    ),
    "write-combined": lambda n: cumem.empty_pinned(n, "u1", write_combined=True),
}


@dataclass
class Case:
    """Forks with one kind and size of memory in use, or forks while copies run.

    Parameters
    ----------
    key : str
        ``"none"``, ``"ordinary"``, a name of `MADE`, ``"4 workers, copy"`` and so on, or
        ``"beside copies"``.
    nbytes : int
        How many bytes are in use, or are copied.
    fork_seconds, fork_spread : float
        The best time of `os.fork()` in the parent, and the median time divided by it. With
        four workers, the time of all four forks together, and 1.
    subprocess_seconds : float
        The best time of ``subprocess.run(["true"])``.
    child_nbytes : int
        How much memory the child shares with no other process when it begins to run. With
        four workers, how much less memory the machine had available for each of them.
    huge_before, huge_after : int
        How much of the parent's memory was in huge pages before and after the forks.
    flags : str
        The flags of the first mapping in /proc/self/smaps, such as ``wf`` and ``dc``.
    forks, wrong_nbytes : int
        How many forks were checked, and how many bytes were wrong in the parent or in a
        child. All bytes of a child that died count as wrong.
    """

    key: str
    nbytes: int
    fork_seconds: float = 0.0
    fork_spread: float = 0.0
    subprocess_seconds: float = 0.0
    child_nbytes: int = 0
    huge_before: int = 0
    huge_after: int = 0
    flags: str = ""
    forks: int = 0
    wrong_nbytes: int = 0


def fork(child: Callable[[], int]) -> tuple[float, int]:
    """Fork once. Returns the seconds in the parent, and the number that `child` returns."""
    (go_end, parent_end), (read_end, write_end) = os.pipe(), os.pipe()
    start = time.perf_counter()
    pid = os.fork()
    seconds = time.perf_counter() - start
    if pid == 0:
        try:
            signal.alarm(CHILD_SECONDS)
            os.read(go_end, 1)
            os.write(write_end, str(child()).encode())
        finally:
            os._exit(0)
    # The child waits for this byte. By now the parent has released what it allocated for
    # the fork.
    os.write(parent_end, b".")
    for end in (go_end, parent_end, write_end):
        os.close(end)
    with open(read_end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return seconds, int(answer or -1)


def private() -> int:
    """Return how many bytes of this process no other process shares."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_"))


def mappings(arrays: list[np.ndarray]) -> tuple[int, str]:
    """Return how many bytes of the arrays are in huge pages, and the first one's flags."""
    huge, flags, inside = 0, "", False
    places = [array.ctypes.data for array in arrays]
    for row in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", row):
            low, high = (int(end, 16) for end in match.groups())
            inside = any(low <= place < high for place in places)
        elif inside and row.startswith("AnonHugePages:"):
            huge += int(row.split()[1]) << 10
        elif inside and row.startswith("VmFlags:"):
            flags = flags or row.split(":", 1)[1].strip()
    return huge, flags


def wrong(array: np.ndarray, value: int) -> int:
    """Count the bytes of `array` that differ from `value`, in parts to save memory."""
    parts = (array[i : i + 16 * MIB] for i in range(0, array.size, 16 * MIB))
    return sum(int(np.count_nonzero(part != value)) for part in parts)


def measured(key: str, nbytes: int, arrays: list[np.ndarray], most: float) -> Case:
    """Fork again and again for about `most` seconds while `arrays` are in use.

    All bytes of the first array must be 1, those of the second 2, and so on.
    """
    case = Case(key, nbytes)
    case.huge_before, case.flags = mappings(arrays)
    _, case.child_nbytes = fork(private)
    times = [fork(lambda: 0)[0] for _ in range(3)]
    while sum(times) < most and len(times) < 50:
        times.append(fork(lambda: 0)[0])
    case.fork_seconds = min(times)
    case.fork_spread = statistics.median(times) / min(times)
    case.subprocess_seconds = min(
        times_of(lambda: subprocess.run(["true"], check=True), most / 4)
    )

    def look() -> int:
        return sum(wrong(array, i + 1) for i, array in enumerate(arrays))

    # The parent would take minutes to read 1 GiB of write-combined memory.
    if key != "write-combined":
        case.wrong_nbytes += look()
    _, found = fork(look)
    case.wrong_nbytes += nbytes if found < 0 else found
    case.forks = len(times) + 2
    case.huge_after, _ = mappings(arrays)
    return case


def sized(key: str, nbytes: int, most: float) -> Iterator[Case]:
    """Measure one kind and size, if the machine has room for the memory and a copy."""
    free = cumem.memory_info("host").available
    if nbytes * 5 // 2 > free:
        print(
            f"{key} {format_nbytes(nbytes)}: left out, {format_nbytes(free)} are free"
        )
        return
    sizes = [min(BLOCK, nbytes - at) for at in range(0, nbytes, BLOCK)]
    if key == "ordinary":
        arrays = [np.empty(size, "u1") for size in sizes]
    else:
        arrays = [MADE[key](size).numpy() for size in sizes]
    for i, array in enumerate(arrays):
        array[:] = i + 1
    yield measured(key, nbytes, arrays, most)
    arrays.clear()
    cumem.trim()


def available() -> int:
    """Return how many bytes the machine has available."""
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) << 10


def workers(way: str, nbytes: int) -> Case:
    """Fork four children that live together, while a pool with `fork=way` is in use."""
    pool = cumem.Pool("pinned", fork=way)  # type: ignore[arg-type]
    sizes = [min(BLOCK, nbytes - at) for at in range(0, nbytes, BLOCK)]
    arrays = [cumem.empty(n, "u1", kind="pinned", pool=pool).numpy() for n in sizes]
    for i, array in enumerate(arrays):
        array[:] = i + 1
    case = Case(f"4 workers, {way}", nbytes)
    case.huge_before, case.flags = mappings(arrays)
    before = available()
    (go_end, parent_end), (read_end, write_end) = os.pipe(), os.pipe()
    children = []
    start = time.perf_counter()
    for _ in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            found = 0
            try:
                signal.alarm(CHILD_SECONDS)
                os.close(parent_end)
                os.write(write_end, b".")  # the child has started, with its memory
                os.read(go_end, 1)
                if way != "omit":
                    found = sum(wrong(array, i + 1) for i, array in enumerate(arrays))
            finally:
                os._exit(1 if found else 0)
        children.append(pid)
    case.fork_seconds = time.perf_counter() - start
    case.fork_spread = 1.0
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        case.wrong_nbytes += 0 if len(pipe.read(WORKERS)) == WORKERS else nbytes
    case.child_nbytes = max(0, before - available()) // WORKERS
    os.close(parent_end)
    os.close(go_end)
    for pid in children:
        case.wrong_nbytes += nbytes if os.waitpid(pid, 0)[1] != 0 else 0
    case.forks = WORKERS
    case.wrong_nbytes += sum(wrong(array, i + 1) for i, array in enumerate(arrays))
    case.huge_after, _ = mappings(arrays)
    return case


def beside_copies(nbytes: int, rounds: int) -> Case:
    """Fork while copies run both ways, and check every byte."""
    count = 4
    case = Case("beside copies", 2 * count * nbytes * rounds)
    idle = cumem.full(4 * MIB, 9, "u1", "pinned").numpy()
    sources = [cumem.empty_pinned(nbytes, "u1") for _ in range(count)]
    targets = [cumem.empty_pinned(nbytes, "u1") for _ in range(count)]
    middle = [cumem.empty_device(nbytes, "u1") for _ in range(count)]
    streams = [cumem.Stream() for _ in range(count)]
    views = [buffer.numpy() for buffer in targets]

    def child() -> int:
        found = wrong(idle, 9)
        for view in views:
            view[:] = 255  # which the parent never writes, and must never see
        return found

    times = []
    for turn in range(rounds):
        values = [(turn * count + i) % 250 for i in range(count)]
        for source, view, value in zip(sources, views, values, strict=True):
            source.numpy()[:] = value
            view[:] = 254
        handles = []
        for source, mid, target, stream in zip(
            sources, middle, targets, streams, strict=True
        ):
            handles.append(cumem.copy_async(mid, source, stream=stream))
            handles.append(cumem.copy_async(target, mid, stream=stream))
        for _ in range(2):
            seconds, found = fork(child)
            times.append(seconds)
            case.wrong_nbytes += idle.size if found < 0 else found
        for handle in handles:
            handle.wait()
        for source, view, value in zip(sources, views, values, strict=True):
            case.wrong_nbytes += wrong(source.numpy(), value) + wrong(view, value)
    case.forks = len(times)
    case.fork_seconds = min(times)
    case.fork_spread = statistics.median(times) / min(times)
    return case


def cases(*, quick: bool) -> Iterator[Case]:
    """Measure all cases, the small ones first."""
    most = 0.1 if quick else 2.0
    yield measured("none", 0, [], most)
    sizes = [64 * MIB] if quick else [GIB, 16 * GIB]
    for nbytes in sizes:
        yield from sized("ordinary", nbytes, most)
        yield from sized("pinned", nbytes, most)
    for key, nbytes in (("mapped", sizes[0]), ("malloc", sizes[0])):
        yield from sized(key, nbytes, most)
    yield from sized("write-combined", 16 * MIB if quick else 256 * MIB, most)
    for way in WAYS:
        yield workers(way, 64 * MIB if quick else 3 * GIB // 2)
        cumem.trim()
    yield beside_copies(*((4 * MIB, 3) if quick else (64 * MIB, 50)))


def line(case: Case) -> str:
    """Return a row of the table."""
    return (
        f"{case.key:<17}{format_nbytes(case.nbytes):>10}"
        f"  fork {case.fork_seconds * 1e3:>9.2f} ms ({case.fork_spread:.2f})"
        f"  subprocess {case.subprocess_seconds * 1e3:>7.2f} ms"
        f"  child {format_nbytes(case.child_nbytes):>10}"
        f"  huge {format_nbytes(case.huge_before)} -> {format_nbytes(case.huge_after)}"
        f"  {case.forks} forks, {case.wrong_nbytes} wrong bytes"
    )


def main() -> int:
    """Measure and print, and write a file if asked to. Fails if a byte was wrong."""
    run = Run(__doc__)
    # Python warns that os.fork() is unsafe in a process that has threads.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", "fork='share' uses pages", RuntimeWarning)
    emulated = cumem.backend() == "emulated"
    run.begin(emulated)
    run.note(1, kernel=os.uname().release)
    run.show(cases(quick=run.options.quick), line)
    run.end()
    return 1 if any(case.wrong_nbytes for case in run.cases) else 0


if __name__ == "__main__":
    sys.exit(main())
