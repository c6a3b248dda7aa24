# SPDX-License-Identifier: Apache-2.0
"""Measure how much copies of rows slow down a matrix product that runs at the same time.

    python benchmarks/rows_beside.py --json benchmarks/results/rows-beside-h200.json

PyTorch multiplies matrices of bfloat16 on one stream, while random rows are copied between
mapped memory and a GPU on another. The indices of the rows are on the GPU. The copy is
made by the copy engine, as one plain copy; by cumem's kernel, with or without
`max_sms`; or by a Triton kernel that works like vLLM's offloading (triton_blocks.py),
with chunks of several lengths. The product is also measured without a copy.

The copy begins before the products. Each case says whether it also ended after them,
because only then did it run beside all of them. The output has the time of a product, this
time divided by that without a copy, and the speed of the copy, both beside the product and
alone. The script also runs on the emulated device, with NumPy's product instead of
PyTorch's, and then says that the figures are not a GPU's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

MIB = 1 << 20
LENGTHS = [512, 4096, 16384]
PRODUCTS = [4096, 8192]  # rows and columns of the matrices
MAX_SMS = [4, 8]
CHUNKS = [4096, 16384]
ROUNDS = 6
SHARE = 0.5  # how long all products take without a copy, as a share of the copy's time

Begin = Callable[[], None]


@dataclass
class Case:
    """One copy beside one product.

    Parameters
    ----------
    direction : str
        ``"up"`` (mapped memory to the GPU) or ``"down"``.
    nbytes, count : int
        The bytes of a row, and how many rows are copied.
    product : int
        How many rows and columns the matrices have.
    beside : str
        Who copies at the same time.
    product_us : float
        The median microseconds of a product beside the copy.
    slowed : float
        `product_us` as a multiple of the time of a product without a copy.
    copied, copied_alone : float
        Bytes per second of the copy, beside the product and without it.
    is_covered : bool
        Whether each copy ended after the products beside it.
    error : str
        The reason if the case was not measured.
    """

    direction: str
    nbytes: int
    count: int
    product: int
    beside: str
    product_us: float = 0.0
    slowed: float = 0.0
    copied: float = 0.0
    copied_alone: float = 0.0
    is_covered: bool = True
    error: str = ""


class OnGpu:
    """Two streams of PyTorch, whose work is timed by its events."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.side = torch.cuda.Stream()

    def stream(self) -> Any:
        """Return the stream of the copies."""
        return self.side

    def matrices(self, size: int) -> Callable[[], object]:
        """Return a function that queues a product."""
        torch = self.torch
        a, b = (
            torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        out = torch.empty_like(a)
        return lambda: torch.matmul(a, b, out=out)

    def time(
        self, begin: Begin | None, product: Callable[[], object], count: int
    ) -> tuple[float, float, bool]:
        """Return the seconds of the products and of the copy, and if that ended last."""
        torch = self.torch
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        marks[0].record(self.side)
        if begin is not None:
            begin()
        marks[1].record(self.side)
        marks[2].record()
        for _ in range(count):
            product()
        marks[3].record()
        torch.cuda.synchronize()
        products = marks[2].elapsed_time(marks[3]) / 1e3
        copy = marks[0].elapsed_time(marks[1]) / 1e3
        return products, copy, marks[3].elapsed_time(marks[1]) > 0


class Emulated:
    """Takes the place of `OnGpu` on the emulated device. It copies, and then multiplies."""

    def stream(self) -> Any:
        return cumem.current_stream()

    def matrices(self, size: int) -> Callable[[], object]:
        a = np.ones((size // 64, size // 64), "f4")
        return lambda: a @ a

    def time(
        self, begin: Begin | None, product: Callable[[], object], count: int
    ) -> tuple[float, float, bool]:
        start = time.perf_counter()
        if begin is not None:
            begin()
        cumem.current_stream().synchronize()
        middle = time.perf_counter()
        for _ in range(count):
            product()
        return time.perf_counter() - middle, middle - start, True


@dataclass
class Copy:
    """The ends of a copy, and the indices of its rows, on the GPU and on the host."""

    direction: str
    dst: Any
    src: Any
    on_device: list[Any]
    rows: list[np.ndarray]
    nbytes: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = len(self.rows[0]) * self.nbytes


class Bench:
    """The memory that all cases share, and the measurements."""

    def __init__(self, options: Any) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.quick = options.quick or self.emulated
        self.total = MIB if self.quick else 400 * MIB
        self.missing: dict[str, str] = {}
        self.ways: Any = Emulated() if self.emulated else OnGpu()
        self.triton = self._triton()
        self.host = cumem.empty_mapped(2 * self.total, "u1")
        self.device = cumem.empty_device(2 * self.total, "u1")
        self.rng = np.random.default_rng(35)

    def _triton(self) -> Any:
        """Import the Triton kernel, or note why it cannot be measured."""
        if self.emulated:
            self.missing["triton"] = "needs a GPU"
            return None
        try:
            import triton_blocks
        except ImportError as error:
            self.missing["triton"] = f"needs Triton: {error}"
            return None
        return triton_blocks

    def cases(self) -> Iterator[Case]:
        """Measure all copies beside all products."""
        for nbytes in LENGTHS[:1] if self.quick else LENGTHS:
            for direction in ("up", "down"):
                copy = self.copy_of(direction, nbytes)
                for size in PRODUCTS[:1] if self.quick else PRODUCTS:
                    yield from self.beside(copy, size)

    def copy_of(self, direction: str, nbytes: int) -> Copy:
        """Choose half of the rows on each side at random."""
        count = self.total // nbytes
        rows = [self.rng.permutation(2 * count)[:count] for _ in range(2)]
        ends = [end.reshape(-1, nbytes) for end in (self.device, self.host)]
        dst, src = ends if direction == "up" else ends[::-1]
        on_device = [cumem.array(each, kind="device") for each in rows]
        return Copy(direction, dst, src, on_device, rows, nbytes)

    def beside(self, copy: Copy, size: int) -> Iterator[Case]:
        """Measure one size of product beside each of the copies."""
        product = self.ways.matrices(size)
        self.ways.time(None, product, 3)
        alone = self.ways.time(None, product, 10)[0] / 10
        count = max(1, int(SHARE * copy.total / 50e9 / alone))
        usual = 0.0
        for name, begin in self.copies(copy).items():
            case = Case(copy.direction, copy.nbytes, len(copy.rows[0]), size, name)
            try:
                self.measure(case, copy, begin, product, count)
            except (RuntimeError, ValueError) as error:
                case.error = str(error).splitlines()[0]
            usual = case.product_us if begin is None else usual
            case.slowed = case.product_us / usual if usual > 0 else 0.0
            yield case

    def measure(
        self,
        case: Case,
        copy: Copy,
        begin: Begin | None,
        product: Callable[[], object],
        count: int,
    ) -> None:
        """Measure one product beside one copy, and fill in the case."""
        products, copies, alone = [], [], []
        for _ in range(2 if self.quick else ROUNDS):
            if begin is not None:
                alone.append(self.ways.time(begin, product, 0)[1])
            seconds, copied, is_covered = self.ways.time(begin, product, count)
            products.append(seconds / count)
            copies.append(copied)
            case.is_covered = case.is_covered and (begin is None or is_covered)
        case.product_us = statistics.median(products) * 1e6
        if begin is not None:
            case.copied = copy.total / statistics.median(copies)
            case.copied_alone = copy.total / statistics.median(alone)

    def copies(self, copy: Copy) -> dict[str, Begin | None]:
        """Return, for each way, a function that queues the copy on the side stream."""
        side = self.ways.stream()

        def ours(max_sms: int | None) -> Begin:
            ends = (copy.dst, copy.src, *copy.on_device)

            def begin() -> None:
                cumem.copy_rows_async(*ends, stream=side, max_sms=max_sms)

            return begin

        def engine() -> None:
            count = len(copy.rows[0])
            cumem.copy_async(copy.dst[:count], copy.src[:count], stream=side)

        made: dict[str, Begin | None] = {
            "nothing": None,
            "copy engine": engine,
            "cumem": ours(None),
        }
        made |= {f"cumem, max_sms={sms}": ours(sms) for sms in MAX_SMS}
        for chunk in CHUNKS if self.triton is not None else []:
            if chunk <= copy.nbytes or chunk == CHUNKS[0]:
                made[f"Triton, chunks of {chunk} B"] = self.by_triton(copy, chunk)
        return made

    def by_triton(self, copy: Copy, chunk: int) -> Begin:
        """Return a function that queues the Triton kernel."""
        torch, side = self.ways.torch, self.ways.stream()
        targets, sources = (
            torch.from_numpy(end.ptr + rows * copy.nbytes).cuda()
            for end, rows in zip((copy.dst, copy.src), copy.rows, strict=True)
        )
        lengths = torch.full_like(targets, copy.nbytes)
        grid = (self.triton.PROGRAMS,)

        def begin() -> None:
            with torch.cuda.stream(side):
                self.triton.copy_blocks[grid](
                    sources, targets, lengths, len(lengths), chunk=chunk
                )

        return begin


def line(case: Case) -> str:
    """Return a row of the table."""
    cells = [
        f"{case.direction:<5}{case.nbytes:>6} B",
        f"product {case.product}",
        f"{case.beside:<26}",
        case.error or f"{case.product_us:>7.1f} us {case.slowed:>6.3f} x alone",
    ]
    if case.copied > 0:
        cells.append(
            f"copy {case.copied / 1e9:.1f} GB/s, alone {case.copied_alone / 1e9:.1f}"
        )
        cells.append("" if case.is_covered else "ended early")
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
