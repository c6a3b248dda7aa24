# SPDX-License-Identifier: Apache-2.0
"""Measure managed memory: prefetches, tiles, page faults and explicit copies, in one run.

    python benchmarks/managed.py --json benchmarks/results/managed-h200.json

A kernel uses the memory. It sums all words and, in cases that write, adds a number to each
of them. After each measurement its sum and the words are checked. The same run measures the
ceiling, which is the driver's prefetch of managed memory that the driver itself allocated.
At most 4 GiB of managed memory are allocated at a time.

The script also runs on the emulated device, where copies and fills take the place of the
kernel, and then says that the figures are not a GPU's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Call, Run

MIB, GIB = 1 << 20, 1 << 30
RUNS = 5  # how often each way is timed
PEERS = ("torch", "cupy")
HOST = -1

#: The kernel. Thread i sums the words i, i + threads, … and adds `more` to each word,
#: unless `more` is 0.
PTX = b"""
.version 7.0
.target sm_52
.address_size 64
.visible .entry use(.param .u64 words, .param .u64 count, .param .u64 total,
                    .param .u32 more)
{
    .reg .pred %end, %reads;
    .reg .b32 %threads, %block, %lane, %blocks, %sum, %word, %more;
    .reg .b64 %i, %x, %step, %words, %count, %total;
    ld.param.u64 %words, [words];
    ld.param.u64 %count, [count];
    ld.param.u64 %total, [total];
    ld.param.u32 %more, [more];
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %lane, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    cvt.u64.u32 %i, %lane;
    mul.wide.u32 %x, %block, %threads;
    add.s64 %i, %i, %x;
    mul.wide.u32 %step, %blocks, %threads;
    setp.eq.u32 %reads, %more, 0;
    mov.u32 %sum, 0;
next:
    setp.ge.u64 %end, %i, %count;
    @%end bra done;
    shl.b64 %x, %i, 2;
    add.s64 %x, %x, %words;
    ld.global.u32 %word, [%x];
    add.u32 %sum, %sum, %word;
    add.s64 %i, %i, %step;
    @%reads bra next;
    add.u32 %word, %word, %more;
    st.global.u32 [%x], %word;
    bra next;
done:
    red.global.add.u32 [%total], %sum;
    ret;
}
"""


@dataclass
class Case:
    """One piece of work, done in several ways.

    Parameters
    ----------
    key : str
        What is done.
    nbytes : int
        How many bytes must move, in one direction.
    ceiling : str
        The name of the way with which the others are compared, or "" if there is none.
    seconds : dict
        The best time of each way.
    spread : dict
        The median time divided by the best one, for each way.
    errors : dict
        The reason for each way that was not measured.
    """

    key: str
    nbytes: int
    ceiling: str
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


#: A function that is called before each run without being timed, and the timed one.
Way = tuple[Call, Call]


class Driver:
    """Managed memory, a stream and the kernel, made by the driver through ctypes."""

    def __init__(self, nbytes: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self.nbytes = nbytes
        self.memory, self.total = ctypes.c_uint64(), ctypes.c_uint64()
        size = ctypes.c_size_t
        self._call("cuMemAllocManaged", ctypes.byref(self.memory), size(nbytes), 1)
        self._call("cuMemAlloc_v2", ctypes.byref(self.total), size(4))
        self.stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self.stream), 1)
        ctypes.memset(
            self.memory.value or 0, 1, nbytes
        )  # creates the pages on the host
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), PTX)
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"use")

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises OSError if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}")

    def close(self) -> None:
        """Free the memory."""
        self._call("cuMemFree_v2", self.memory)
        self._call("cuMemFree_v2", self.total)

    def prefetch(self, location: int) -> None:
        """Prefetch all of the memory, and wait."""
        size = ctypes.c_size_t(self.nbytes)
        self._call("cuMemPrefetchAsync", self.memory, size, location, self.stream)
        self._call("cuStreamSynchronize", self.stream)

    def use(self, address: int, nbytes: int, more: int, stream: int) -> None:
        """Launch the kernel."""
        values = (
            ctypes.c_uint64(address),
            ctypes.c_uint64(nbytes // 4),
            self.total,
            ctypes.c_uint32(more),
        )
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(each) for each in values)
        )
        grid = (ctypes.c_uint(4096), 1, 1, 256, 1, 1, 0)
        self._call(
            *("cuLaunchKernel", self._kernel, *grid),
            *(ctypes.c_void_p(stream), pointers, None),
        )

    def take_total(self) -> int:
        """Return the sum of all words that were read since the last call."""
        word = ctypes.c_uint32()
        self._call("cuCtxSynchronize")
        self._call(
            "cuMemcpyDtoH_v2", ctypes.byref(word), self.total, ctypes.c_size_t(4)
        )
        self._call("cuMemsetD32_v2", self.total, 0, ctypes.c_size_t(1))
        return word.value


def timed(way: Way, runs: int) -> list[float]:
    """Return the seconds of each run but the first."""
    prepare, call = way
    times = []
    for _ in range(runs + 1):
        prepare()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[1:]


class Bench:
    """The memory that is moved, and the measurements."""

    def __init__(self, quick: bool) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.quick = quick or self.emulated
        self.nbytes = 8 * MIB if self.emulated else 256 * MIB if quick else GIB
        self.missing: dict[str, str] = {}
        self.modules: dict[str, Any] = {}
        for name in PEERS:
            if self.emulated:
                self.missing[name] = "needs a GPU"
            elif importlib.util.find_spec(name) is None:
                self.missing[name] = "not installed"
            else:
                self.modules[name] = importlib.import_module(name)
        self.driver = None if self.emulated else Driver(self.nbytes)
        if self.driver is None:
            self.missing["raw"] = "needs a GPU"
        else:
            self.driver.take_total()
        self.stream = cumem.Stream()
        self.sink = cumem.empty_device(self.nbytes // 4, "u4")
        self.words = np.arange(self.nbytes // 4, dtype="u4")
        self.buffer = cumem.array(self.words, kind="managed")
        self.pinned = cumem.array(self.words, kind="pinned")  # for explicit copies

    # -- what uses memory ------------------------------------------------------------------

    def read(self, tile: Any) -> None:
        """Read every word, in the order of the stream."""
        if self.driver is None:
            cumem.copy_async(self.sink[: tile.size], tile, stream=self.stream)
        else:
            self.driver.use(_address(tile), tile.nbytes, 0, self.stream.handle)

    def write(self, tile: Any) -> None:
        """Add 1 to every word."""
        if self.driver is None:
            tile.fill(1, stream=self.stream)
        else:
            self.driver.use(_address(tile), tile.nbytes, 1, self.stream.handle)

    def check(self, where: cumem.Buffer, reads: int, writes: int) -> None:
        """Check how often all words were read and written since the last check."""
        total = int(self.words.sum(dtype="u8")) % 2**32
        if self.driver is None:
            expected = np.ones_like(self.words) if writes else self.words
        else:
            expected = self.words + np.uint32(writes)
            added = writes * (writes - 1) // 2 * self.words.size
            wanted = ((reads + writes) * total + added) % 2**32
            if (found := self.driver.take_total()) != wanted:
                raise AssertionError(f"a sum of {found}, not {wanted}")
        self.to_host()
        if not np.array_equal(where.numpy(), expected):
            raise AssertionError("wrong bytes")
        where.numpy()[:] = self.words

    # -- measuring -------------------------------------------------------------------------

    def run(
        self, case: Case, ways: dict[str, Way], reads: int = 0, writes: int = 0
    ) -> Case:
        """Time each way, and check how often each of its runs read and wrote all words."""
        runs = 2 if self.quick else RUNS
        for name, way in ways.items():
            try:
                times = timed(way, runs)
                # Only cumem's ways use the kernel, in each run and in the untimed one.
                ours = (runs + 1) * name.startswith("cumem")
                where = self.pinned if name == "cumem, copies" else self.buffer
                self.check(where, ours * reads, ours * writes)
            except Exception as error:
                case.errors[name] = f"{type(error).__name__}: {error}"
                if self.driver is not None:
                    self.driver.take_total()
                continue
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
        return case

    def to_host(self) -> None:
        """Move all pages to the host, so that the device has no copies of them either."""
        self.buffer.read_mostly = False
        self.buffer.prefetch_pages("cpu", self.stream)
        self.stream.synchronize()

    def to_device(self) -> None:
        """Move all pages to the GPU."""
        self.buffer.prefetch_pages(0, self.stream)
        self.stream.synchronize()

    def as_read_mostly(self) -> None:
        """Move all pages to the host, and mark the memory as mostly read."""
        self.to_host()
        self.buffer.read_mostly = True

    def raw(self, location: int) -> dict[str, Way]:
        """Return the driver's prefetch to `location`, or nothing if there is no GPU.

        It moves memory that the driver allocated, which is as large as the buffer.
        """
        driver = self.driver
        if driver is None:
            return {}
        other = 0 if location == HOST else HOST
        return {
            "raw": (lambda: driver.prefetch(other), lambda: driver.prefetch(location))
        }

    def prefetches(self) -> Iterator[Case]:
        """Measure the prefetch of all memory at once, by cumem and by the driver."""
        parts = np.array_split(np.arange(self.buffer.size), 16)
        slices = [self.buffer[int(p[0]) : int(p[-1]) + 1] for p in parts]

        def many(to: object) -> None:
            cumem.prefetch_pages(slices, to, self.stream)
            self.stream.synchronize()

        for key, to, location, before in (
            ("prefetch to the GPU", 0, 0, self.to_host),
            ("prefetch to the host", "cpu", HOST, self.to_device),
        ):

            def whole(to: object = to) -> None:
                self.buffer.prefetch_pages(to, self.stream)
                self.stream.synchronize()

            ways: dict[str, Way] = self.raw(location)
            ways["cumem"] = before, whole
            ways["cumem, many"] = before, lambda to=to: many(to)
            yield self.run(Case(key, self.nbytes, "raw"), ways)

    def finish(self, use: Callable[[Any], None]) -> Call:
        """Return a call that uses the whole buffer, and waits for the stream."""

        def call() -> None:
            use(self.buffer)
            self.stream.synchronize()

        return call

    def faults(self) -> Iterator[Case]:
        """Measure how kernels, and the host, get the pages by page faults."""
        ways: dict[str, Way] = {
            "cumem": (self.to_host, self.finish(self.read)),
        }
        for name, module in self.modules.items():
            ways[name] = self.to_host, _sum_by(name, module, self.buffer)
        yield self.run(
            Case("page faults, read on the GPU", self.nbytes, ""), ways, reads=1
        )
        written: dict[str, Way] = {"cumem": (self.to_host, self.finish(self.write))}
        yield self.run(
            Case("page faults, written on the GPU", self.nbytes, ""), written, writes=1
        )
        array = self.buffer.numpy()
        back: dict[str, Way] = {"host": (self.to_device, lambda: int(array.max()))}
        yield self.run(Case("page faults, read on the host", self.nbytes, ""), back)

    def sweep(self, use: Callable[[Any], None], tile: int, **how: Any) -> Call:
        """Return a call that uses the buffer tile by tile, and waits for all moves."""

        def call() -> None:
            with self.stream:
                for _, part in cumem.tiles(self.buffer, tile, **how):
                    use(part)
            self.stream.synchronize()

        return call

    def tiled(self) -> Iterator[Case]:
        """Compare tiles with a prefetch of all memory at once, and with explicit copies."""
        sizes = [MIB] if self.emulated else [64 * MIB] if self.quick else None
        for tile in sizes or [16 * MIB, 64 * MIB, 128 * MIB]:
            size = format_nbytes(tile)
            stay = {"evict": False}
            reading: dict[str, Way] = self.raw(0) | {
                "cumem": (self.to_host, self.sweep(self.read, tile, **stay)),
                "cumem, 2 ahead": (
                    self.to_host,
                    self.sweep(self.read, tile, ahead=2, **stay),
                ),
                "cumem, read mostly": (
                    self.as_read_mostly,
                    self.sweep(self.read, tile, **stay),
                ),
                "cumem, all at once": (self.to_host, self.bulk(self.read)),
                "cumem, faults": (self.to_host, self.finish(self.read)),
                "cumem, copies": (self.to_host, self.copies(tile, back=False)),
            }
            yield self.run(
                Case(f"tiles of {size}, read", self.nbytes, "raw"), reading, reads=1
            )
            writing: dict[str, Way] = self.raw(HOST) | {
                "cumem": (self.to_host, self.sweep(self.write, tile)),
                "cumem, 2 ahead": (self.to_host, self.sweep(self.write, tile, ahead=2)),
                "cumem, all at once": (self.to_host, self.bulk(self.write, back=True)),
                "cumem, faults": (self.to_host, self.finish(self.write)),
                "cumem, copies": (self.to_host, self.copies(tile, back=True)),
            }
            yield self.run(
                Case(f"tiles of {size}, written, back on the host", self.nbytes, "raw"),
                writing,
                writes=1,
            )
        self.to_host()

    def bulk(self, use: Callable[[Any], None], back: bool = False) -> Call:
        """Return a call that prefetches all memory and uses it, and may bring it back."""

        def call() -> None:
            self.buffer.prefetch_pages(0, self.stream)
            use(self.buffer)
            if back:
                self.buffer.prefetch_pages("cpu", self.stream)
            self.stream.synchronize()

        return call

    def copies(self, tile: int, *, back: bool) -> Call:
        """Return the same work by explicit copies, through three tiles of device memory."""
        count = tile // 4
        ring = [
            (cumem.empty_device(count, "u4"), cumem.Stream(), cumem.Event())
            for _ in range(3)
        ]

        def call() -> None:
            for i, begin in enumerate(range(0, self.pinned.size, count)):
                device, stream, used = ring[i % len(ring)]
                part = self.pinned[begin : begin + count]
                here = device[: part.size]
                cumem.copy_async(here, part, stream=stream)
                self.stream.wait(stream)
                (self.write if back else self.read)(here)
                self.stream.record(used)
                stream.wait(used)
                if back:
                    cumem.copy_async(part, here, stream=stream)
            for _, stream, _ in ring:
                stream.synchronize()

        return call


def _address(buffer: Any) -> int:
    """Return a buffer's address."""
    return int(buffer.ptr)


def _sum_by(name: str, module: Any, buffer: cumem.ManagedBuffer) -> Call:
    """Return a call in which another library finds the largest word of the buffer."""
    words = buffer.view("i4")
    if name == "torch":
        tensor = module.as_tensor(words, device="cuda")
        return lambda: int(tensor.max())
    array = module.asarray(words)
    return lambda: int(array.max())


def line(case: Case) -> str:
    """Return a row for each way."""
    rows = [f"{case.key}, {format_nbytes(case.nbytes)}"]
    ceiling = case.seconds.get(case.ceiling)
    for name, seconds in case.seconds.items():
        rate = case.nbytes / seconds / 1e9
        row = f"    {name:<20}{seconds * 1e3:>10.2f} ms {rate:>7.1f} GB/s"
        if ceiling is not None and name != case.ceiling:
            row += f"  {100 * ceiling / seconds:>6.1f} % of {case.ceiling}"
        rows.append(row)
    rows += [f"    {name}: {error}" for name, error in case.errors.items()]
    return "\n".join(rows)


def main() -> int:
    """Measure and print, and write a file if asked to. Fails if a way failed."""
    run = Run(__doc__)
    warnings.simplefilter("ignore", cumem.ManagedThrashWarning)  # on purpose
    bench = Bench(run.options.quick)
    run.begin(bench.emulated)
    run.note(1, missing=bench.missing)
    for source in (bench.prefetches, bench.faults, bench.tiled):
        run.show(source(), line)
    if bench.driver is not None:
        bench.driver.close()
    run.end()
    return 1 if any(case.errors for case in run.cases) else 0


if __name__ == "__main__":
    sys.exit(main())
