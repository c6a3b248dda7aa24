# SPDX-License-Identifier: Apache-2.0
"""Measure rows by index in one call against the batch call, PyTorch and gathers alone.

    python benchmarks/rows.py --json benchmarks/results/rows-h200.json

Rows of one length in random order, with their numbers on the host when a call begins:
blocks of a cache, random on both sides, between page-locked memory and a GPU; and rows of
a table, page-locked or ordinary, to a GPU. Each case is verified. In the same run: one
cudaMemcpyBatchAsync of the rows, a loop of copies by PyTorch, PyTorch's gather into
page-locked memory with a copy from there, and NumPy's gather alone, which moves nothing to
a GPU. On the emulated device it runs and says so: the figures are then not a GPU's.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
import many
from measure import Call, Run, times_of

KIB = 1 << 10
MOST_NBYTES = 4 << 30  # of all rows of a case
#: What is measured: (key, directions, lengths of rows, rows at most).
CASES = [
    ("blocks", ("up", "down"), [4, 8, 16, 32, 64], 100_000),
    ("few blocks", ("up", "down"), [4, 8, 16, 32, 64], 2_000),
    ("pinned table", ("up",), [0.25, 0.5, 2, 4, 32, 256], 100_000),
    ("ordinary table", ("up",), [0.25, 0.5, 2, 4, 32, 256], 100_000),
]
LIBRARIES = ("cumem", "batch", "torch loop", "torch gather", "numpy")
MOST_LOOPED = 5_000  # rows: a loop of more takes too long


class Case(many.Case):
    """Rows of one length, copied by cumem and by others; `key` names a row of CASES."""

    @property
    def is_table(self) -> bool:
        return "table" in self.key


@dataclass
class Work:
    """What one case copies: the arrays, and the numbers of the rows."""

    dst: Any
    src: Any
    dst_rows: np.ndarray | None
    src_rows: np.ndarray


class Bench:
    """What all cases share."""

    def __init__(self, options: Any) -> None:
        others = many.Bench(options)
        self.peers, self.missing = others.peers, others.missing
        self.emulated, self.seconds = others.emulated, others.seconds
        self.link = others.link
        self.most_nbytes = 4 << 20 if options.quick or self.emulated else MOST_NBYTES

    def cases(self) -> Iterator[Case]:
        """Go through every shape and direction."""
        for key, directions, lengths, most in CASES:
            for length in lengths:
                nbytes = int(length * KIB)
                count = min(most, self.most_nbytes // nbytes)
                for direction in directions:
                    yield self.measure(Case(key, direction, count, nbytes))

    def measure(self, case: Case) -> Case:
        """Time all libraries on the same rows, and verify the result of each."""
        work = self.work_of(case)
        taken = cumem.asnumpy(work.src)[work.src_rows]
        for name, make in self.calls(case, work).items():
            try:
                times = times_of(make(), self.seconds)
            except (RuntimeError, OSError, MemoryError, ValueError) as error:
                case.errors[name] = str(error).splitlines()[0]
                continue
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
            got = cumem.asnumpy(work.dst)
            got = got if work.dst_rows is None else got[work.dst_rows]
            if name != "numpy" and not np.array_equal(got, taken):
                raise AssertionError(f"{name}: wrong bytes: {case}")
            cumem.copy(work.dst, np.zeros(work.dst.shape, "u1"))
        rows = {"dst_rows": work.dst_rows, "src_rows": work.src_rows}
        case.route = cumem.copy_rows_async(work.dst, work.src, **rows).route
        return case

    def work_of(self, case: Case) -> Work:
        """Make arrays of twice as many rows as are copied, so that few are neighbours."""
        rng = np.random.default_rng(case.count + case.nbytes)
        rows = (2 * case.count, case.nbytes)
        data = rng.integers(0, 256, rows, dtype="u1")
        host = (
            data if case.key == "ordinary table" else cumem.array(data, kind="pinned")
        )
        if case.is_table:
            chosen = rng.integers(0, rows[0], case.count)
            device = cumem.zeros((case.count, case.nbytes), "u1", "device")
            return Work(device, host, None, chosen)
        chosen, places = (rng.permutation(rows[0])[: case.count] for _ in range(2))
        device = cumem.array(data, kind="device")
        if case.direction == "down":
            cumem.copy(host, np.zeros(rows, "u1"))
            return Work(host, device, places, chosen)
        cumem.copy(device, np.zeros(rows, "u1"))
        return Work(device, host, places, chosen)

    def calls(self, case: Case, work: Work) -> dict[str, Callable[[], Call]]:
        """Return, for each library, a function that makes the call to time.

        The call returns when all bytes are there.
        """
        dst, src, dst_rows, src_rows = work.dst, work.src, work.dst_rows, work.src_rows
        places = np.arange(case.count) if dst_rows is None else dst_rows

        def ours() -> Call:
            return lambda: cumem.copy_rows(dst, src, dst_rows, src_rows)

        def batch() -> Call:
            bases = [
                b.ctypes.data if isinstance(b, np.ndarray) else b.ptr
                for b in (dst, src)
            ]
            ends = [
                (base + rows * case.nbytes).tolist()
                for base, rows in zip(bases, (places, src_rows), strict=True)
            ]
            return self.peers["batch"].batch(*ends, case.nbytes)

        def tensor(end: Any) -> Any:
            torch = self.peers["torch"]
            if isinstance(end, cumem.DeviceBuffer):
                return torch.as_tensor(end, device="cuda")
            return torch.from_numpy(end if isinstance(end, np.ndarray) else end.numpy())

        def torch_loop() -> Call:
            torch, to, of = self.peers["torch"], tensor(dst), tensor(src)
            pairs = list(zip(places.tolist(), src_rows.tolist(), strict=True))

            def call() -> None:
                for d, s in pairs:
                    to[d].copy_(of[s], non_blocking=True)
                torch.cuda.synchronize()

            return call

        def torch_gather() -> Call:
            torch, to, of = self.peers["torch"], tensor(dst), tensor(src)
            staging = torch.empty(to.shape, dtype=torch.uint8, pin_memory=True)
            rows = torch.from_numpy(src_rows)

            def call() -> None:
                torch.index_select(of, 0, rows, out=staging)
                to.copy_(staging, non_blocking=True)
                torch.cuda.synchronize()

            return call

        def numpy() -> Call:
            table = src if isinstance(src, np.ndarray) else src.numpy()
            out = np.empty(dst.shape, "u1")
            return lambda: np.take(table, src_rows, 0, out, "clip")

        made: dict[str, Callable[[], Call]] = {"cumem": ours}
        if "batch" in self.peers and case.key != "ordinary table":
            made["batch"] = batch
        if "torch" in self.peers and case.is_table:
            made["torch gather"] = torch_gather
        if "torch" in self.peers and case.count <= MOST_LOOPED:
            made["torch loop"] = torch_loop
        if case.is_table:
            made["numpy"] = numpy
        return made


def line(case: Case, links: dict[str, float]) -> str:
    """Return a row of the table."""
    ours = case.seconds.get("cumem")
    if ours is None:
        return f"{case.key}: {case.errors}"
    total = case.count * case.nbytes
    cells = [
        f"{case.key:<15}{case.direction:<5}{case.count:>7} x",
        f"{format_nbytes(case.nbytes):<8}",
        f"{case.route:<13}",
        f"{ours * 1e6:>9.0f} us",
        f"{total / ours / 1e9:>5.1f} GB/s",
        f"{100 * total / ours / links[case.direction]:>4.0f} % of the link",
    ]
    cells += [
        f"{name} {total / case.seconds[name] / 1e9:.1f} GB/s"
        for name in LIBRARIES[1:]
        if name in case.seconds
    ]
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    bench = Bench(run.options)
    run.begin(bench.emulated)
    links = bench.link()
    run.note(1, link_bytes_per_second=links, missing=bench.missing)
    run.show(bench.cases(), lambda case: line(case, links))
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
