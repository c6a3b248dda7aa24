# SPDX-License-Identifier: Apache-2.0
"""Compare cumem's kernel that copies rows by index with one written in CUDA C.

    python benchmarks/rows_kernel.py --json benchmarks/results/rows-kernel-h200.json

The kernels copy rows of one length, in random order on both sides, between mapped memory
and a GPU, and within a GPU. The bytes of each case are compared. A function of the test
build of cumem's core launches cumem's kernel and times it by events, so that the figures
contain no call of Python. The same run measures the handwritten kernel of
`rows_by_hand.py`, which CuPy compiles and runs with 32 blocks, and a plain copy of as many
contiguous bytes. The script also runs on the emulated device, and then says that the
figures are not a GPU's.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import testing  # first, because it loads the core with the kernel's hook

# isort: split
import rows_by_hand
from measure import Run, times_of

import cumem

MIB = 1 << 20
LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144]
MOST_ROWS = 100_000
DIRECTIONS = ("up", "down", "within")
#: Values of `max_sms` that are measured besides the default, in some of the cases.
SMS = [8, 16, 32, 64, 128]
SMS_LENGTHS = [512, 4096, 65536]
FEW_ROWS = [200, 2000]
ODD_LENGTHS = [100, 132, 528, 656, 4095]
ROUNDS = 3


@dataclass
class Case:
    """A launch of cumem's kernel, and the other ways to copy the same bytes.

    Parameters
    ----------
    direction : str
        ``"up"`` (mapped memory to device), ``"down"`` or ``"within"`` a device.
    count, nbytes : int
        How many rows are copied, and the bytes of each.
    numbers : str
        In which memory the indices of the rows are, ``"device"`` or ``"mapped"``.
    max_sms : int
        How many multiprocessors the kernel may use; 0 is the default.
    seconds : dict
        The best time of ``"cumem"``, of the handwritten kernel as ``"anchor"``, and of the
        plain copy as ``"link"``.
    spread : dict
        The median time of each, divided by the best one.
    errors : dict
        The reason for whatever was not measured.
    """

    direction: str
    count: int
    nbytes: int
    numbers: str = "device"
    max_sms: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Bench:
    """The memory that all cases share, and the measurements."""

    def __init__(self, options: Any) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.quick = options.quick or self.emulated
        self.total = MIB if self.quick else 512 * MIB
        self.most_rows = 64 if self.quick else MOST_ROWS
        self.rng = np.random.default_rng(35)
        self.missing: dict[str, str] = {}
        self.cupy = self._cupy()
        self.flag = cumem.empty_mapped(1, np.uint32)
        self.mapped = cumem.empty_mapped(self.total, np.uint8)
        self.device = [cumem.empty_device(self.total, np.uint8) for _ in range(2)]
        self.data = np.frombuffer(self.rng.bytes(self.total), np.uint8)

    def _cupy(self) -> Any:
        """Import CuPy and compile the kernel, or note why it cannot be measured."""
        if self.emulated:
            self.missing["anchor"] = "needs a GPU"
            return None
        try:
            import cupy
        except ImportError as error:
            self.missing["anchor"] = f"needs CuPy: {error}"
            return None
        self.anchor = rows_by_hand.kernel(cupy)
        return cupy

    def cases(self) -> Iterator[Case]:
        """Measure all cases."""
        lengths = [256, 4096] if self.quick else LENGTHS
        for direction in DIRECTIONS:
            for nbytes in lengths:
                yield self.run(Case(direction, self.rows_of(nbytes), nbytes))
            for nbytes in ODD_LENGTHS:
                yield self.run(Case(direction, self.rows_of(nbytes), nbytes))
            for count in FEW_ROWS if not self.quick else []:
                for nbytes in SMS_LENGTHS:
                    yield self.run(Case(direction, count, nbytes))
            for nbytes in SMS_LENGTHS if not self.quick else [512]:
                for sms in SMS:
                    count = self.rows_of(nbytes)
                    yield self.run(Case(direction, count, nbytes, max_sms=sms))
        for nbytes in lengths[:5]:
            yield self.run(Case("up", self.rows_of(nbytes), nbytes, numbers="mapped"))

    def rows_of(self, nbytes: int) -> int:
        """Return how many rows of this length fit into the memory."""
        return min(self.most_rows, self.total // nbytes)

    def run(self, case: Case) -> Case:
        """Measure one case in each way, and compare its bytes."""
        nbytes = case.count * case.nbytes
        down = case.direction == "down"
        target = self.mapped if down else self.device[0]
        source = self.mapped if case.direction == "up" else self.device[1]
        dst, src = target[:nbytes], source[:nbytes]
        cumem.copy(src, self.data[:nbytes])
        rows = [self.rng.permutation(case.count) for _ in range(2)]
        shape = (case.count, case.nbytes)
        expected = np.empty(shape, np.uint8)
        expected[rows[0]] = self.data[:nbytes].reshape(shape)[rows[1]]
        make = cumem.empty_mapped if case.numbers == "mapped" else cumem.empty_device
        numbers = [make(case.count, np.int64) for _ in range(2)]
        for buffer, values in zip(numbers, rows, strict=True):
            cumem.copy(buffer, values)
        ways: dict[str, Callable[[], list[float]]] = {
            "cumem": lambda: self.ours(case, dst, src, numbers),
            "anchor": lambda: self.theirs(case, dst, src, numbers),
        }
        for name, way in ways.items():
            if name in self.missing or (name == "anchor" and case.nbytes % 16):
                continue
            cumem.copy(dst, np.zeros(nbytes, np.uint8))
            times = way()
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
            got = np.empty(nbytes, np.uint8)
            cumem.copy(got, dst)
            if not np.array_equal(got.reshape(shape), expected):
                raise AssertionError(f"{name}: wrong bytes: {case}")
        times = times_of(lambda: cumem.copy(dst, src), 0.0 if self.quick else 0.2)
        case.seconds["link"] = min(times)
        case.spread["link"] = statistics.median(times) / min(times)
        return case

    def repeats(self, case: Case) -> int:
        """Return how many launches after the first one take about 50 ms."""
        if self.quick:
            return 1
        return max(3, min(500, int(0.05 * 40e9 / (case.count * case.nbytes))))

    def ours(self, case: Case, dst: Any, src: Any, numbers: list[Any]) -> list[float]:
        """Return the seconds of one launch of cumem's kernel, for each round."""
        shape = (case.count, case.nbytes)
        repeat = self.repeats(case)
        times = []
        self.flag[...] = 0
        for _ in range(ROUNDS):
            milliseconds = testing.copy_rows(
                [dst.reshape(shape)],
                [src.reshape(shape)],
                *numbers,
                self.flag,
                max_sms=case.max_sms,
                repeat=repeat + 1,
            )
            times.append(milliseconds / repeat / 1e3)
        if np.asarray(self.flag)[0]:
            raise AssertionError(f"the flag was raised: {case}")
        return times

    def theirs(self, case: Case, dst: Any, src: Any, numbers: list[Any]) -> list[float]:
        """Return the seconds of one launch of the kernel in CUDA C, for each round."""
        cupy = self.cupy
        arrays = [cupy.asarray(each) for each in (dst, src, *numbers)]
        sizes = np.int64(case.count), np.int64(case.nbytes // 16)
        blocks = case.max_sms or rows_by_hand.BLOCKS
        if case.direction == "within" and not case.max_sms:
            count = cupy.cuda.Device().attributes["MultiProcessorCount"]
            blocks = 2 * count
        repeat = self.repeats(case)
        times = []
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(ROUNDS):
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                for i in range(repeat + 1):
                    self.anchor((blocks,), (rows_by_hand.THREADS,), (*arrays, *sizes))
                    if i == 0:
                        start.record(stream)
                end.record(stream)
                stream.synchronize()
                elapsed = cupy.cuda.get_elapsed_time(start, end)
                times.append(elapsed / repeat / 1e3)
        return times


def line(case: Case) -> str:
    """Return a row of the table."""
    total = case.count * case.nbytes
    cells = [
        f"{case.direction:<7}{case.count:>7} x {case.nbytes:>6} B",
        f"numbers {case.numbers:<7}{case.max_sms or 'default':>8} SMs",
    ]
    for name, seconds in case.seconds.items():
        speed = f"{total / seconds / 1e9:.1f} GB/s" if seconds > 0 else "-"
        cells.append(f"{name} {speed}")
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    bench = Bench(run.options)
    run.begin(bench.emulated)
    run.note(1, missing=bench.missing)
    run.show(bench.cases(), line)
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
