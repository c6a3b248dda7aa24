# SPDX-License-Identifier: Apache-2.0
"""Measure the driver calls that the pools are built on, without cumem in between.

    python benchmarks/driver_calls.py --json benchmarks/results/driver-calls-h200.json

The script needs a GPU and a few seconds, and takes at most 2 GiB of device memory and 1 GiB
of host memory. It makes each call through ctypes and times it by itself. From this time it
subtracts that of a C function that does nothing. It also compares the driver's own
page-locked memory with the way in which cumem makes it, where several threads touch huge
pages before the driver registers them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
CHUNKS = (2 * MIB, 32 * MIB, 256 * MIB)
RANGE = 1 << 40
HUGE = 2 * MIB
MAPPED, MOVED = 1024, 64  # how many granules are mapped, and how many one call takes
SLICE = 8 * MIB  # how much memory a thread populates at once
THREADS = (1, 4, 16)
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
PORTABLE_AND_MAPPED = 3
DISABLE_TIMING = 2
NON_BLOCKING = 1
RELAXED = 2
NOT_READY = 600


class Location(ctypes.Structure):
    """The driver's struct CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class Wanted(ctypes.Structure):
    """The driver's struct CUmemAllocationProp, for memory that resides on one device."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """The driver's struct CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Driver:
    """The driver's functions, by ctypes. A call raises unless the function returns 0."""

    #: The types of each function's arguments.
    SIGNATURES: dict[str, tuple[Any, ...]] = {  # noqa: RUF012
        "cuInit": (c_uint,),
        "cuDriverGetVersion": (c_void_p,),
        "cuDeviceGet": (c_void_p, c_int),
        "cuDeviceGetName": (c_void_p, c_int, c_int),
        "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
        "cuDevicePrimaryCtxRelease_v2": (c_int,),
        "cuCtxSetCurrent": (c_void_p,),
        "cuCtxGetCurrent": (c_void_p,),
        "cuCtxSynchronize": (),
        "cuThreadExchangeStreamCaptureMode": (c_void_p,),
        "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
        "cuMemAddressFree": (c_uint64, c_size_t),
        "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
        "cuMemRelease": (c_uint64,),
        "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
        "cuMemUnmap": (c_uint64, c_size_t),
        "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
        "cuMemAlloc_v2": (c_void_p, c_size_t),
        "cuMemFree_v2": (c_uint64,),
        "cuMemHostAlloc": (c_void_p, c_size_t, c_uint),
        "cuMemFreeHost": (c_void_p,),
        "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
        "cuMemHostUnregister": (c_void_p,),
        "cuMemsetD8Async": (c_uint64, ctypes.c_ubyte, c_size_t, c_void_p),
        "cuStreamCreate": (c_void_p, c_uint),
        "cuStreamDestroy_v2": (c_void_p,),
        "cuStreamQuery": (c_void_p,),
        "cuStreamIsCapturing": (c_void_p, c_void_p),
        "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
        "cuEventCreate": (c_void_p, c_uint),
        "cuEventDestroy_v2": (c_void_p,),
        "cuEventRecord": (c_void_p, c_void_p),
        "cuEventQuery": (c_void_p,),
    }

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self.functions: dict[str, Any] = {}
        for name, types in self.SIGNATURES.items():
            self.functions[name] = getattr(library, name)
            self.functions[name].argtypes = types

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises RuntimeError if it fails."""
        code = self.functions[name](*arguments)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")


class Times:
    """The times of all calls, by the name of the function and the number of bytes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.found: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        #: For each function, the times of a C function that does nothing and is called with
        #: the same types of arguments.
        self.idle: dict[str, list[int]] = defaultdict(list)
        libc = ctypes.CDLL(None)
        self.nothing: dict[str, Any] = {}
        for name, types in driver.SIGNATURES.items():
            self.nothing[name] = libc["abs"]  # it ignores all arguments but the first
            self.nothing[name].argtypes = types

    def call(
        self,
        name: str,
        *arguments: Any,
        nbytes: int | None = None,
        busy: bool = False,
        note: str = "",
    ) -> None:
        """Make and time one call of the driver.

        With `busy`, the answer "not ready" is not an error. `note` is added to the name in
        the results, for a call that is made in some special way.
        """
        function, nothing = self.driver.functions[name], self.nothing[name]
        start = perf_counter_ns()
        code = function(*arguments)
        end = perf_counter_ns()
        if code != 0 and not (busy and code == NOT_READY):
            raise RuntimeError(f"{name} answered {code}")
        note = "busy" if busy else note
        self.found[name + (f" ({note})" if note else ""), nbytes].append(end - start)
        start = perf_counter_ns()
        nothing(*arguments)
        self.idle[name].append(perf_counter_ns() - start)

    @contextmanager
    def timed(self, what: str, nbytes: int) -> Iterator[None]:
        """Time the ``with`` block."""
        start = perf_counter_ns()
        yield
        self.found[what, nbytes].append(perf_counter_ns() - start)

    def rows(self) -> list[dict[str, Any]]:
        """Return medians and quartiles in microseconds, minus the cost of ctypes."""
        rows = []
        for (what, nbytes), times in self.found.items():
            idle = statistics.median(self.idle.get(what.split()[0], [0]))
            net = [max(0.0, (ns - idle) / 1000) for ns in times]
            low, median, high = statistics.quantiles(net, n=4, method="inclusive")
            rows.append(
                {
                    "call": what,
                    "nbytes": nbytes,
                    "us": round(median, 3),
                    "low": round(low, 3),
                    "high": round(high, 3),
                    "repeats": len(times),
                }
            )
        return rows


# -- what is measured ------------------------------------------------------------------


def measure_chunks(driver: Driver, times: Times) -> None:
    """Time how device memory is made, mapped, unmapped and freed, in parts and whole."""
    start = c_uint64()
    for _ in range(10):
        times.call("cuMemAddressReserve", byref(start), RANGE, 0, 0, 0, nbytes=RANGE)
        times.call("cuMemAddressFree", start, RANGE, nbytes=RANGE)
    driver("cuMemAddressReserve", byref(start), RANGE, 0, 0, 0)
    wanted = Wanted(type=1, location=Location(1, 0))
    access = Access(Location(1, 0), 3)
    handle, plain = c_uint64(), c_uint64()
    for nbytes in CHUNKS:
        for i in range(40):
            at = start.value + i * nbytes
            times.call(
                "cuMemCreate", byref(handle), nbytes, byref(wanted), 0, nbytes=nbytes
            )
            times.call("cuMemMap", at, nbytes, 0, handle, 0, nbytes=nbytes)
            times.call("cuMemSetAccess", at, nbytes, byref(access), 1, nbytes=nbytes)
            times.call("cuMemUnmap", at, nbytes, nbytes=nbytes)
            times.call("cuMemRelease", handle, nbytes=nbytes)
        for _ in range(10):
            times.call("cuMemAlloc_v2", byref(plain), nbytes, nbytes=nbytes)
            times.call("cuMemFree_v2", plain, nbytes=nbytes)
    driver("cuMemAddressFree", start, RANGE)


def measure_moves(driver: Driver, times: Times) -> None:
    """Time how granules of device memory are moved while many others are mapped.

    Some calls are about one granule, and some about a run of neighbours. One granule is
    also mapped at a second address while it keeps its first mapping.
    """
    nbytes, run = HUGE, MOVED * HUGE
    start = c_uint64()
    driver("cuMemAddressReserve", byref(start), RANGE, 0, 0, 0)
    wanted = Wanted(type=1, location=Location(1, 0))
    access = Access(Location(1, 0), 3)
    handles = [c_uint64() for _ in range(MAPPED)]
    old, new = start.value, start.value + MAPPED * nbytes
    for i, handle in enumerate(handles):
        driver("cuMemCreate", byref(handle), nbytes, byref(wanted), 0)
        driver("cuMemMap", old + i * nbytes, nbytes, 0, handle, 0)
    for at in range(old, new, run):
        times.call(
            "cuMemSetAccess", at, run, byref(access), 1, nbytes=run, note="side by side"
        )
    many = f"{MAPPED} mapped"
    # Each granule is mapped at a second address, then unmapped and mapped at its first.
    for i, handle in enumerate(handles[: MAPPED // 2]):
        here, there = old + i * nbytes, new + i * nbytes
        for at, note in ((there, "second address"), (here, many)):
            if note == many:
                times.call("cuMemUnmap", at, nbytes, nbytes=nbytes, note=many)
            times.call("cuMemMap", at, nbytes, 0, handle, 0, nbytes=nbytes, note=note)
            times.call(
                "cuMemSetAccess", at, nbytes, byref(access), 1, nbytes=nbytes, note=note
            )
        driver("cuMemUnmap", there, nbytes)
    for at in range(old, new, run):
        times.call("cuMemUnmap", at, run, nbytes=run, note="side by side")
    for handle in handles:
        driver("cuMemRelease", handle)
    driver("cuMemAddressFree", start, RANGE)


def measure_host(driver: Driver, times: Times) -> None:
    """Time 1 GiB of page-locked memory that the driver makes, and as cumem makes it."""
    pointer = c_void_p()
    for _ in range(3):
        times.call(
            "cuMemHostAlloc", byref(pointer), GIB, PORTABLE_AND_MAPPED, nbytes=GIB
        )
        times.call("cuMemFreeHost", pointer, nbytes=GIB)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
    for threads in THREADS:
        for _ in range(3):
            with fresh_pages(libc) as start:
                with times.timed(f"touch huge pages, {threads} threads", GIB):
                    populate(start, threads, touch_slice)
                if threads != 4:
                    continue
                times.call(
                    "cuMemHostRegister_v2", start, GIB, PORTABLE_AND_MAPPED, nbytes=GIB
                )
                times.call("cuMemHostUnregister", start, nbytes=GIB)
    for _ in range(3):
        with (
            fresh_pages(libc) as start,
            times.timed(f"MADV_POPULATE_WRITE, {THREADS[-1]} threads", GIB),
        ):
            populate(
                start,
                THREADS[-1],
                lambda at: libc.madvise(at, SLICE, MADV_POPULATE_WRITE),
            )


@contextmanager
def fresh_pages(libc: ctypes.CDLL) -> Iterator[int]:
    """Yield the address of 1 GiB of untouched memory that may become huge pages."""
    pages = mmap.mmap(-1, GIB + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anchor = ctypes.c_char.from_buffer(pages)
    start = (ctypes.addressof(anchor) + HUGE - 1) // HUGE * HUGE
    libc.madvise(start, GIB, MADV_HUGEPAGE)
    try:
        yield start
    finally:
        del anchor
        pages.close()


def touch_slice(at: int) -> None:
    """Write one byte of each huge page of a slice, so that the page exists."""
    for page in range(at, at + SLICE, HUGE):
        ctypes.memset(page, 0, 1)


def populate(start: int, threads: int, one: Callable[[int], object]) -> None:
    """Call `one` with the address of each slice, from several threads."""
    slices = iter(range(start, start + GIB, SLICE))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                at = next(slices, None)
            if at is None:
                return
            one(at)

    helpers = [threading.Thread(target=work) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def measure_order(driver: Driver, times: Times) -> None:
    """Time the calls that ask whether streams are done, and that order their work."""
    streams = [c_void_p(), c_void_p()]
    event, context, memory = c_void_p(), c_void_p(), c_uint64()
    capturing, mode = c_int(), c_int(RELAXED)
    for stream in streams:
        driver("cuStreamCreate", byref(stream), NON_BLOCKING)
    driver("cuMemAlloc_v2", byref(memory), CHUNKS[-1])
    for _ in range(200):
        times.call("cuStreamQuery", streams[0])
        times.call("cuStreamIsCapturing", streams[0], byref(capturing))
        times.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        times.call("cuCtxGetCurrent", byref(context))
        times.call("cuCtxSetCurrent", context)
        times.call("cuEventCreate", byref(event), DISABLE_TIMING)
        times.call("cuEventRecord", event, streams[0])
        driver("cuCtxSynchronize")
        times.call("cuEventQuery", event)
        times.call("cuStreamWaitEvent", streams[1], event, 0)
        times.call("cuEventDestroy_v2", event)
    driver("cuEventCreate", byref(event), DISABLE_TIMING)
    for _ in range(50):
        for _ in range(4):
            driver("cuMemsetD8Async", memory, 0, CHUNKS[-1], streams[0])
        times.call("cuStreamQuery", streams[0], busy=True)
        driver("cuEventRecord", event, streams[0])
        times.call("cuEventQuery", event, busy=True)
        driver("cuCtxSynchronize")
    driver("cuEventDestroy_v2", event)
    driver("cuMemFree_v2", memory)
    for stream in streams:
        driver("cuStreamDestroy_v2", stream)


def measure(driver: Driver) -> dict[str, Any]:
    """Measure everything on the first device, and say which machine it was."""
    started = datetime.now(UTC)
    context, version = c_void_p(), c_int()
    name = ctypes.create_string_buffer(256)
    driver("cuDeviceGetName", name, len(name), 0)
    driver("cuDevicePrimaryCtxRetain", byref(context), 0)
    driver("cuCtxSetCurrent", context)
    driver("cuDriverGetVersion", byref(version))
    times = Times(driver)
    measure_order(driver, times)
    measure_chunks(driver, times)
    measure_moves(driver, times)
    measure_host(driver, times)
    driver("cuDevicePrimaryCtxRelease_v2", 0)
    return {
        "schema": 1,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
        "machine": f"{name.value.decode()}, {os.cpu_count()} cores",
        "device": name.value.decode(),
        "driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "cores": os.cpu_count(),
        "commit": os.environ.get("CUMEM_COMMIT"),
        "calls": times.rows(),
    }


def render(results: dict[str, Any]) -> str:
    """Return lines of aligned text."""
    lines = [f"{results['device']}, driver CUDA {results['driver']}; microseconds"]
    for row in results["calls"]:
        size = "" if row["nbytes"] is None else f"{row['nbytes'] // MIB} MiB"
        spread = f"({row['low']:.1f} to {row['high']:.1f})"
        lines.append(f"{row['call']:<36}{size:>12}{row['us']:>12.1f}  {spread}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    device = c_int()
    try:
        driver = Driver()
        driver("cuInit", 0)
        driver("cuDeviceGet", byref(device), 0)
    except (OSError, AttributeError, RuntimeError) as error:
        print(f"driver_calls.py needs a GPU and its driver: {error}", file=sys.stderr)
        return 2
    results = measure(driver)
    print(render(results))
    if options.json:
        text = json.dumps(results, indent=1) + "\n"
        Path(options.json).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
