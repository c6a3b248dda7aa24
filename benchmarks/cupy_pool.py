# SPDX-License-Identifier: Apache-2.0
"""Compare CuPy with its own pools to CuPy with cumem's pools. It needs a GPU.

    python benchmarks/cupy_pool.py --json benchmarks/results/cupy-pool-h200.json

The workload consists of Fourier transforms, elementwise work with temporaries, reductions,
sorts, matrix products and copies both ways, of several sizes and on several streams. It
runs with CuPy's default pool, with CuPy's asynchronous pool, which is told to keep its
memory, and with cumem's pools. The three alternate, and their results must be equal.

Then the script measures what one array costs, as the time of ``cupy.empty()`` or
``cupyx.empty_pinned()`` together with the array's deletion. Parts of the workload that CuPy
cannot compile on the machine are left out, and the output names them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import statistics
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.units import format_nbytes, format_seconds

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

if importlib.util.find_spec("cupy") is None:
    print("cupy_pool.py needs CuPy", file=sys.stderr)
    sys.exit(2)
import cupy
import cupyx

from cumem.integrations import cupy as served

Part = Callable[[Any], Any]
SHAPES = 6  # each needs two plans of transforms, and CuPy keeps 16 plans


@dataclass(frozen=True)
class Size:
    """The size of the workload."""

    steps: int = 24
    rows: int = 256  # at most
    columns: int = 1 << 14  # at most
    streams: int = 3
    rounds: int = 7
    repeats: int = 9  # measurements of what one array costs
    loops: int = 20_000


LITTLE = Size(4, 16, 1 << 8, 2, 2, 2, 200)


@dataclass
class Case:
    """The workload, or the allocation of one array, with one of the pools.

    Parameters
    ----------
    key : str
        ``"workload"``, or the call that allocates an array.
    way : str
        The name of the pool.
    seconds : list of float
        The time of each round, or of one allocation with its deletion.
    reserved_nbytes, pinned_nbytes : int
        The most device memory, and the most page-locked memory, that the pool reserved; 0
        if the pool does not tell.
    against_cupy : float
        The median time divided by that of CuPy's default pool.
    difference : float
        The largest difference of a result from that of CuPy's default pool.
    """

    key: str
    way: str
    seconds: list[float] = field(default_factory=list)
    reserved_nbytes: int = 0
    pinned_nbytes: int = 0
    against_cupy: float = 1.0
    difference: float = 0.0

    def median(self) -> float:
        """Return the median of the times, in seconds."""
        return statistics.median(self.seconds)


# -- allocators --------------------------------------------------------------------------


class Own:
    """CuPy's default pool."""

    name = "cupy"

    def __init__(self) -> None:
        self.pool = self.make()
        self.pinned = cupy.cuda.PinnedMemoryPool()

    def make(self) -> Any:
        """Return a new pool for device memory."""
        return cupy.cuda.MemoryPool()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Let CuPy allocate from these pools during the ``with`` block."""
        cupy.cuda.set_allocator(self.pool.malloc)
        cupy.cuda.set_pinned_memory_allocator(self.pinned.malloc)
        try:
            yield
        finally:
            cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
            cupy.cuda.set_pinned_memory_allocator(
                cupy.get_default_pinned_memory_pool().malloc
            )

    def reserved(self) -> int:
        """Return the most bytes of device memory that the pool reserved."""
        return int(self.pool.total_bytes())  # the peak, as the pool never shrinks

    def pinned_reserved(self) -> int:
        """Return 0, because CuPy does not count its page-locked memory."""
        return 0


class Asynchronous(Own):
    """CuPy's pool over cudaMallocAsync, which is set to keep its memory."""

    name = "cupy async"

    def make(self) -> Any:
        """Return a new asynchronous pool."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "experimental"
            pool = cupy.cuda.MemoryAsyncPool()
        pool.set_limit(1 << 40)  # limits what it keeps, not what it may allocate
        return pool


class Served:
    """cumem's pools."""

    name = "cumem"

    def __init__(self) -> None:
        self.pool = cumem.Pool("device")
        self.pinned = cumem.Pool("pinned")

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Let CuPy allocate from cumem's pools during the ``with`` block."""
        served.enable(self.pool, pinned=self.pinned)
        try:
            yield
        finally:
            served.disable()

    def reserved(self) -> int:
        """Return the most bytes of device memory that the pool reserved."""
        return self.pool.stats().peak_reserved_nbytes

    def pinned_reserved(self) -> int:
        """Return the most bytes of page-locked memory that the pool reserved."""
        return self.pinned.stats().peak_reserved_nbytes


# -- the workload ------------------------------------------------------------------------


def transform(x: Any) -> Any:
    """Apply a band-pass filter to each row."""
    spectrum = cupy.fft.rfft(x, axis=1)
    spectrum[:, : spectrum.shape[1] // 8] = 0
    spectrum[:, -spectrum.shape[1] // 8 :] = 0
    return cupy.fft.irfft(spectrum, n=x.shape[1], axis=1).astype("f4")


def chain(x: Any) -> Any:
    """Do elementwise arithmetic, which allocates an array for each operation."""
    y = cupy.tanh(x * 1.5 + 0.25)
    z = cupy.sqrt(y * y + 1.0) - cupy.abs(x)
    return cupy.where(z > 0, z * y, z - y) * 0.5


def reduce(x: Any) -> Any:
    """Scale rows to a mean of zero and a standard deviation of one."""
    spread = x.std(axis=1, keepdims=True) + 1e-6
    return (x - x.mean(axis=1, keepdims=True)) / spread + x.max() * 1e-3


def order(x: Any) -> Any:
    """Sort rows, and compute the indices that would sort them."""
    return cupy.sort(x, axis=1) + cupy.argsort(x, axis=1).astype("f4") * 1e-6


def product(x: Any) -> Any:
    """Multiply rows with each other, and the result with the rows."""
    few = x[:, :256]
    return cupy.matmul(cupy.matmul(few, few.T), x) * 1e-3


PARTS: dict[str, Part] = {
    "transform": transform,
    "chain": chain,
    "reduce": reduce,
    "order": order,
    "product": product,
}


class Workload:
    """The workload, which does the same work in every run."""

    def __init__(self, size: Size) -> None:
        random = np.random.default_rng(0)
        self.size = size
        shapes = [
            (
                int(random.integers(size.rows // 4, size.rows + 1)),
                size.columns // 16 * int(random.integers(1, 17)),
            )
            for _ in range(SHAPES)
        ]
        self.inputs = [
            random.standard_normal(shapes[random.integers(SHAPES)], dtype="f4")
            for _ in range(size.steps)
        ]
        self.streams = [
            cupy.cuda.Stream(non_blocking=True) for _ in range(size.streams)
        ]
        self.parts = dict(PARTS)

    def leave_out_what_fails(self) -> dict[str, str]:
        """Remove parts that CuPy cannot run here, and return the error of each."""
        left_out = {}
        for name, part in list(self.parts.items()):
            try:
                part(cupy.asarray(self.inputs[0]))
                cupy.cuda.Device().synchronize()
            except Exception as error:
                left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                del self.parts[name]
        return left_out

    def step(self, source: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Queue one step on the current stream, and return the array it will write."""
        x = cupy.asarray(source)
        for part in self.parts.values():
            x = part(x)
        out = cupyx.empty_pinned(x.shape, x.dtype)
        x.get(stream=cupy.cuda.get_current_stream(), out=out, blocking=False)
        return out

    def run(self) -> list[np.ndarray[Any, Any]]:
        """Do half of the steps on the default stream, and half on streams in turn."""
        half = len(self.inputs) // 2
        results = [self.step(source) for source in self.inputs[:half]]
        for number, source in enumerate(self.inputs[half:]):
            with self.streams[number % len(self.streams)]:
                results.append(self.step(source))
        cupy.cuda.Device().synchronize()
        return results


def forget_plans() -> None:
    """Empty CuPy's cache of transform plans, which hold memory of the pool in use."""
    cupy.fft.config.get_plan_cache().clear()
    gc.collect()


def compare(found: list[Any], wanted: list[Any]) -> float:
    """Return the largest difference, and raise if rounding cannot explain it."""
    largest = 0.0
    for result, other in zip(found, wanted, strict=True):
        if not np.allclose(result, other, rtol=1e-3, atol=1e-3):
            raise AssertionError("the results are others")
        largest = max(largest, float(np.abs(result - other).max()))
    return largest


def workloads(size: Size, ways: list[Any], run: Run) -> Iterator[Case]:
    """Measure the workload with all pools, which alternate; the first round is untimed."""
    workload = Workload(size)
    run.note(1, left_out=workload.leave_out_what_fails())
    cases = {way.name: Case("workload", way.name) for way in ways}
    expected: list[np.ndarray[Any, Any]] = []
    for _ in range(size.rounds):
        for way in ways:
            forget_plans()
            with way.on():
                results = workload.run()
                expected = expected or [np.array(each) for each in results]
                case = cases[way.name]
                case.difference = max(case.difference, compare(results, expected))
                del results
                start = time.perf_counter()
                results = workload.run()
                case.seconds.append(time.perf_counter() - start)
                del results
                forget_plans()
            case.reserved_nbytes = way.reserved()
            case.pinned_nbytes = way.pinned_reserved()
    yield from compared(cases.values())


# -- what one array costs ----------------------------------------------------------------


def costs(size: Size, ways: list[Any]) -> Iterator[Case]:
    """Measure what one allocation in a loop costs with each pool."""
    own, wrapped = cupy.cuda.Stream(non_blocking=True), cumem.Stream()
    streams = {
        "": cupy.cuda.Stream.null,
        ", own stream": own,
        ", cumem's stream": cupy.cuda.Stream.from_external(wrapped),
    }
    calls: dict[str, tuple[Any, Callable[[], object]]] = {}
    for suffix, stream in streams.items():
        calls[f"empty 4 KiB{suffix}"] = stream, lambda: cupy.empty(4096, "u1")
        calls[f"alloc 4 KiB{suffix}"] = stream, lambda: cupy.cuda.alloc(4096)
    null = cupy.cuda.Stream.null
    calls["empty 64 MiB"] = null, lambda: cupy.empty(64 << 20, "u1")
    calls["pinned 64 KiB"] = null, lambda: cupyx.empty_pinned(1 << 16, "u1")
    for key, (stream, call) in calls.items():
        cases = {way.name: Case(key, way.name) for way in ways}
        loops = size.loops // (20 if key.startswith("pinned") else 1)
        for _ in range(size.repeats):
            for way in ways:
                with way.on(), stream:
                    call()
                    seconds = timeit.timeit(call, number=loops) / loops
                cupy.cuda.Device().synchronize()
                cases[way.name].seconds.append(seconds)
        yield from compared(cases.values())


def compared(cases: Any) -> Iterator[Case]:
    """Fill in the ratio of each case to the first pool, which is CuPy's default."""
    first = None
    for case in cases:
        first = first or case.median()
        case.against_cupy = case.median() / first
        yield case


def line(case: Case) -> str:
    """Return a row of the table."""
    cells = [f"{case.key:<27} {case.way:<11} {format_seconds(case.median()):>9}"]
    cells.append(f"{case.against_cupy:6.3f} of CuPy's")
    cells.append(f"fastest {format_seconds(min(case.seconds))}")
    if case.key == "workload":
        cells.append(f"differs by {case.difference:g}")
    if case.reserved_nbytes:
        cells.append(f"held {format_nbytes(case.reserved_nbytes)}")
    if case.pinned_nbytes:
        cells.append(f"pinned {format_nbytes(case.pinned_nbytes)}")
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    if cumem.backend() == "emulated":
        print(
            "cupy_pool.py needs a GPU: CuPy cannot use emulated memory", file=sys.stderr
        )
        return 2
    size = LITTLE if run.options.quick else Size()
    ways = [Own(), Asynchronous(), Served()]
    run.begin(emulated=False)
    run.note(1, cupy=cupy.__version__, size=vars(size))
    run.show(workloads(size, ways, run), line)
    run.show(costs(size, ways), line)
    if run.facts["left_out"]:
        print("left out:", run.facts["left_out"])
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
