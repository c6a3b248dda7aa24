# SPDX-License-Identifier: Apache-2.0
"""Compare `cumem.copy_rows` with the driver's batch call, PyTorch and a plain gather.

    python benchmarks/rows.py --json benchmarks/results/rows-h200.json
    python benchmarks/rows.py --only 'ordinary table.*KiB'

The rows of a case have one length and are chosen in random order. The array of their
indices is on the host when a call begins. There are two kinds of cases. In one, rows of
a table in ordinary or page-locked memory go to a GPU. In the other, blocks of a cache,
at random places on both sides, go between page-locked memory and a GPU. The bytes of
each case are compared.

The same run measures one cudaMemcpyBatchAsync of the rows; a loop of copies by PyTorch;
PyTorch's gather into page-locked memory, with a copy from there; and a kernel written
by hand, for which the indices are copied to the GPU first. It also measures a gather on
the host that moves nothing to a GPU, by PyTorch or, if that is not installed, by NumPy
in one thread. If a kernel copies, the same call is also measured with indices that are
on the GPU already, which shows what it costs to check and upload indices of the host.
The output has a line for each case, with the fastest of the others that move the same
bytes. The script also runs on the emulated device, and then says that the figures are
not a GPU's.
"""

from __future__ import annotations

import re
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
import rows_by_hand
from measure import Call, Run, times_of

KIB = 1 << 10
MOST_NBYTES = 1 << 30  # the most bytes of all rows of a case together
#: The cases: (key, directions, lengths of rows in KiB, the most rows).
CASES: list[tuple[str, tuple[str, ...], list[float], int]] = [
    ("ordinary table", ("up",), [0.25, 0.5, 2, 4, 32, 256], 100_000),
    ("pinned table", ("up",), [0.25, 0.5, 2, 4, 32, 256], 100_000),
    ("blocks", ("up", "down"), [4, 8, 16, 32, 64], 100_000),
    ("few blocks", ("up", "down"), [4, 8, 16, 32, 64], 2_000),
    ("one block", ("up", "down"), [4], 1),
]
OTHERS = ("batch", "by hand", "torch loop", "torch gather")
ROUNDS = 2  # in which all take turns, so that none is measured on a colder GPU only
MOST_LOOPED = 2_000  # a loop over more rows would take too long
CHECKED_ROWS = 1_000  # how many rows are compared if another library copied them
#: After how many bytes the contents repeat. It is a prime number, so no two rows are equal.
PATTERN_NBYTES = 67_108_859


class Case(many.Case):
    """Rows of one length, copied by cumem and by others; `key` names a row of CASES."""

    @property
    def is_table(self) -> bool:
        """Whether the rows are those of a table, and not blocks of a cache."""
        return "table" in self.key

    @property
    def name(self) -> str:
        """The text that ``--only`` is compared with."""
        return f"{self.key} {self.direction} {format_nbytes(self.nbytes)}"


@dataclass
class Work:
    """The arrays of one case, and the indices of the rows that are copied."""

    dst: Any
    src: Any
    dst_rows: np.ndarray | None
    src_rows: np.ndarray


class Bench:
    """The memory that all cases share, because it takes long to make."""

    def __init__(self, options: Any) -> None:
        others = many.Bench(options)
        self.peers, self.missing = others.peers, others.missing
        self.emulated, self.seconds = others.emulated, others.seconds
        self.link = others.link
        self.only = re.compile(options.only)
        self.most_nbytes = 4 << 20 if options.quick or self.emulated else MOST_NBYTES
        # The memory has room for twice the rows that are copied, so that few of those are
        # neighbours.
        length = min(PATTERN_NBYTES, self.most_nbytes + 1)
        pattern = np.frombuffer(np.random.default_rng(0).bytes(length), "u1")
        self.ordinary = np.resize(pattern, 2 * self.most_nbytes)
        self._pinned: Any = None
        self._device: Any = None

    @property
    def pinned(self) -> Any:
        """The same bytes as `ordinary`, in page-locked memory."""
        if self._pinned is None:
            self._pinned = cumem.array(self.ordinary, kind="pinned")
        return self._pinned

    @property
    def device(self) -> Any:
        """Memory of the GPU with as many bytes as `ordinary`."""
        if self._device is None:
            self._device = cumem.empty(self.ordinary.shape, "u1", "device")
        return self._device

    def cases(self) -> Iterator[Case]:
        """Measure every shape and direction."""
        for key, directions, lengths, most in CASES:
            for length in lengths:
                nbytes = int(length * KIB)
                count = min(most, self.most_nbytes // nbytes)
                for direction in directions:
                    case = Case(key, direction, count, nbytes)
                    if self.only.search(case.name):
                        yield self.measure(case)

    def measure(self, case: Case) -> Case:
        """Time all libraries on the same rows, and verify the result of each."""
        work = self.work_of(case)
        calls: dict[str, Call] = {}
        times: dict[str, list[float]] = {}
        for name, make in [*self.calls(case, work).items()] * ROUNDS:
            try:
                calls[name] = calls.get(name) or make()
                taken = times_of(calls[name], self.seconds / ROUNDS)
            except (RuntimeError, OSError, MemoryError, ValueError) as error:
                case.errors[name] = str(error).splitlines()[0]
                continue
            times.setdefault(name, []).extend(taken)
            case.seconds[name] = min(times[name])
            case.spread[name] = statistics.median(times[name]) / min(times[name])
            if name != "gather alone":
                self.verify(case, work, name)
        ends = (work.dst, work.src, work.dst_rows, work.src_rows)
        case.route = cumem.copy_rows_async(*ends).route
        if case.direction == "down":  # restores the host memory for the next case
            cumem.copy(work.dst.reshape(-1), self.ordinary[: work.dst.nbytes])
        return case

    def verify(self, case: Case, work: Work, name: str) -> None:
        """Compare copied rows, all of cumem's and some of others', and clear the target."""
        step = 1 if name == "cumem" else -(-case.count // CHECKED_ROWS)
        chosen = work.src_rows[::step]
        places = np.arange(case.count) if work.dst_rows is None else work.dst_rows
        got = cumem.asnumpy(work.dst)[places[::step]]
        table = self.ordinary[: self.rows_of(case) * case.nbytes]
        table = table.reshape(-1, case.nbytes)
        if not np.array_equal(got, table[chosen]):
            raise AssertionError(f"{name}: wrong bytes: {case}")
        work.dst.fill(0)

    def rows_of(self, case: Case) -> int:
        """Return how many rows the source has. A table is larger than processor caches."""
        return self.ordinary.size // case.nbytes if case.is_table else 2 * case.count

    def work_of(self, case: Case) -> Work:
        """Choose the rows of a case, and make views of the arrays that have such rows."""
        rng = np.random.default_rng(case.count + case.nbytes)
        rows = self.rows_of(case)

        def view(memory: Any, count: int) -> Any:
            return memory[: count * case.nbytes].reshape(count, case.nbytes)

        if case.is_table:
            memory = self.ordinary if "ordinary" in case.key else self.pinned
            chosen = rng.integers(0, rows, case.count)
            device = view(self.device, case.count)
            device.fill(0)
            return Work(device, view(memory, rows), None, chosen)
        chosen, places = (rng.permutation(rows)[: case.count] for _ in range(2))
        host, device = view(self.pinned, rows), view(self.device, rows)
        if case.direction == "down":
            cumem.copy(device, host)
            host.fill(0)
            return Work(host, device, places, chosen)
        device.fill(0)
        return Work(device, host, places, chosen)

    def calls(self, case: Case, work: Work) -> dict[str, Callable[[], Call]]:
        """Return, for each library, a function that prepares the call to time.

        That call returns only when all bytes have arrived.
        """
        dst, src, dst_rows, src_rows = work.dst, work.src, work.dst_rows, work.src_rows
        places = np.arange(case.count) if dst_rows is None else dst_rows

        def ours() -> Call:
            return lambda: cumem.copy_rows(dst, src, dst_rows, src_rows)

        def ours_from_device() -> Call:
            there = [
                None if rows is None else cumem.array(rows, kind="device")
                for rows in (dst_rows, src_rows)
            ]
            return lambda: cumem.copy_rows(dst, src, *there)

        def batch() -> Any:
            bases = [
                b.ctypes.data if isinstance(b, np.ndarray) else b.ptr
                for b in (dst, src)
            ]
            ends = [
                (base + rows * case.nbytes).tolist()
                for base, rows in zip(bases, (places, src_rows), strict=True)
            ]
            return self.peers["batch"].batch(*ends, case.nbytes)

        def by_hand() -> Call:
            cupy = self.peers["cupy"]
            kernel, stream = rows_by_hand.kernel(cupy), cupy.cuda.Stream()
            given = [np.ascontiguousarray(each, "i8") for each in (places, src_rows)]
            sheet = cumem.empty_pinned((2, case.count), "i8")
            numbers = cupy.empty(sheet.shape, "i8")
            of_both = list(numbers)
            ends = [np.uint64(end.ptr) for end in (dst, src)]
            sizes = np.int64(case.count), np.int64(case.nbytes // 16)
            launch = (rows_by_hand.BLOCKS,), (rows_by_hand.THREADS,)
            rows = np.asarray(sheet)

            def call() -> None:
                rows[0], rows[1] = given
                cupy.cuda.runtime.memcpyAsync(
                    numbers.data.ptr, sheet.ptr, sheet.nbytes, 1, stream.ptr
                )
                with stream:
                    kernel(*launch, (*ends, *of_both, *sizes))
                stream.synchronize()

            return call

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

        def gather() -> Call:
            table = src if isinstance(src, np.ndarray) else src.numpy()
            out = np.empty(dst.shape, "u1")
            if "torch" not in self.peers:
                return lambda: np.take(table, src_rows, 0, out, "clip")
            torch = self.peers["torch"]
            of, rows, to = map(torch.from_numpy, (table, src_rows, out))
            return lambda: torch.index_select(of, 0, rows, out=to)

        made: dict[str, Callable[[], Call]] = {"cumem": ours}
        if case.key != "ordinary table":
            made["numbers on the device"] = ours_from_device
        if "batch" in self.peers and case.key != "ordinary table":
            made["batch"] = batch
        if "cupy" in self.peers and case.key != "ordinary table":
            made["by hand"] = by_hand
        if "torch" in self.peers and case.is_table:
            made["torch gather"] = torch_gather
        if "torch" in self.peers and case.count <= MOST_LOOPED:
            made["torch loop"] = torch_loop
        if case.is_table:
            made["gather alone"] = gather
        return made


def line(case: Case, links: dict[str, float]) -> str:
    """Return a row of the table."""
    ours = case.seconds.get("cumem")
    if ours is None:
        return f"{case.name}: {case.errors}"
    total = case.count * case.nbytes
    cells = [
        f"{case.name:<28}{case.count:>7} rows",
        f"{case.route:<12}",
        f"{ours * 1e6:>7.0f} us",
        f"{total / ours / 1e9:>5.1f} GB/s",
        f"{100 * total / ours / links[case.direction]:>3.0f} % of the link",
    ]
    if "numbers on the device" in case.seconds:
        without = case.seconds["numbers on the device"]
        cells.append(f"numbers cost {100 * (ours - without) / without:>3.0f} %")
    others = {k: s for k, s in case.seconds.items() if k in OTHERS}
    if others:
        best = min(others, key=lambda name: others[name])
        cells.append(f"{others[best] / ours:>5.2f} x {best}")
    if "gather alone" in case.seconds:
        cells.append(f"{case.seconds['gather alone'] / ours:>5.2f} x gather alone")
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(
        __doc__,
        only={"default": "", "metavar": "REGEX", "help": "only cases that match"},
    )
    bench = Bench(run.options)
    run.begin(bench.emulated)
    links = bench.link()
    run.note(1, link_bytes_per_second=links, missing=bench.missing)
    run.show(bench.cases(), lambda case: line(case, links))
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
