# SPDX-License-Identifier: Apache-2.0
"""Let threads and streams use the pools of a real GPU, and verify every byte.

    python stress_pools.py [--seconds 60] [--threads 16] [--streams 8] [--json FILE]

Each thread queues copies by the driver, which cumem does not see, on streams that it names
by record_stream(). While these copies still run, the thread drops their page-locked source,
and takes and writes new page-locked memory. If a pool hands out a block before its events
have passed, a byte is wrong. A build of CUMEM_DEBUG=1 CFLAGS=-DCM_TEST_SKIP_EVENTS does not
wait for events, so the program must fail with it. At the end everything is trimmed, and the
device must have as much free memory as before. The exit status is 0 if all bytes were right
and all memory came back.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import cumem
from cumem import info

KIB = 1024
SIZES = (4 * KIB, 48 * KIB, 256 * KIB, 1000 * KIB, 4096 * KIB)
DEPTH = 6  # each thread queues this many round trips before it looks at the first


class Driver:
    """Copies by the driver, which cumem does not see."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self.check(self.lib.cuInit(0))
        self.check(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0))
        self.ballast = cumem.empty_device(512 << 20, "u1")

    def keep_busy(self, stream: int) -> None:
        """Queue work of about a tenth of a millisecond."""
        self.check(
            self.lib.cuMemsetD8Async(
                ctypes.c_uint64(self.ballast.ptr),
                ctypes.c_ubyte(0),
                ctypes.c_size_t(self.ballast.nbytes),
                ctypes.c_void_p(stream),
            )
        )

    @staticmethod
    def check(code: int) -> None:
        if code != 0:
            raise RuntimeError(f"the driver answered {code}")

    def enter(self) -> None:
        self.check(self.lib.cuCtxSetCurrent(self.context))

    def copy(
        self, to_device: bool, dst: int, src: int, nbytes: int, stream: int
    ) -> None:
        call = (
            self.lib.cuMemcpyHtoDAsync_v2
            if to_device
            else self.lib.cuMemcpyDtoHAsync_v2
        )
        address = ctypes.c_uint64 if to_device else ctypes.c_void_p
        other = ctypes.c_void_p if to_device else ctypes.c_uint64
        self.check(
            call(
                address(dst),
                other(src),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(stream),
            )
        )


class Worker(threading.Thread):
    """Makes round trips through device memory until `deadline`."""

    def __init__(
        self, driver: Driver, streams: list[cumem.Stream], seed: int, deadline: float
    ) -> None:
        super().__init__()
        self.driver, self.streams, self.deadline = driver, streams, deadline
        self.random = np.random.default_rng(seed)
        self.trips = self.nbytes = self.wrong = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.driver.enter()
            while time.monotonic() < self.deadline:
                self.round()
        except BaseException as error:
            self.failure = error

    def send(self) -> tuple[cumem.Buffer, int, cumem.Stream]:
        """Queue a round trip. Returns its target, the byte to expect, and its stream."""
        stream = self.streams[int(self.random.integers(len(self.streams)))]
        nbytes = int(SIZES[int(self.random.integers(len(SIZES)))])
        mark = int(self.random.integers(1, 255))
        source = cumem.empty_pinned(nbytes, "u1")
        source.numpy()[:] = mark
        device = cumem.empty_device(nbytes, "u1", stream=stream)
        result = cumem.empty_pinned(nbytes, "u1")
        self.driver.keep_busy(stream.handle)
        self.driver.copy(True, device.ptr, source.ptr, nbytes, stream.handle)
        self.driver.copy(False, result.ptr, device.ptr, nbytes, stream.handle)
        source.record_stream(stream)
        result.record_stream(stream)
        del source, device  # neither copy has begun, as both are behind the ballast
        cumem.trim("pinned", keep=1 << 40, wait=False)  # asks which work has ended
        # The memory that is handed out now must not be the source, which is still read.
        scratch = cumem.empty_pinned(nbytes, "u1")
        scratch.numpy()[:] = 255
        return result, mark, stream

    def round(self) -> None:
        """Queue several round trips, then wait for each and count wrong bytes."""
        sent = [self.send() for _ in range(DEPTH)]
        for result, mark, stream in sent:
            stream.synchronize()
            self.wrong += int(np.count_nonzero(result.numpy() != mark))
            self.trips += 1
            self.nbytes += result.nbytes


def free_nbytes() -> int:
    """Give back what is free, and return the free memory of the device."""
    gc.collect()
    cumem.Device(0).synchronize()
    cumem.trim()
    cumem.trim()
    return int(cumem.memory_info()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = datetime.now(UTC)
    streams = [cumem.Stream() for _ in range(options.streams)]
    warm = Worker(Driver(), streams, 1, time.monotonic() + 0.5)
    warm.start()
    warm.join()
    before = free_nbytes()
    deadline = time.monotonic() + options.seconds
    workers = [
        Worker(warm.driver, streams, 100 + i, deadline) for i in range(options.threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failures = [str(w.failure) for w in [warm, *workers] if w.failure is not None]
    result = {
        "commit": info.commit(),
        "started": started.isoformat(timespec="seconds"),
        "machine": f"{cumem.Device(0).name}, {len(os.sched_getaffinity(0))} cores",
        "seconds": options.seconds,
        "threads": options.threads,
        "streams": options.streams,
        "round_trips": sum(w.trips for w in workers),
        "verified_nbytes": sum(w.nbytes for w in workers),
        "wrong_bytes": sum(w.wrong for w in workers),
        "failures": failures,
        "free_before_nbytes": before,
        "free_after_nbytes": free_nbytes(),
    }
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    good = (
        not failures
        and result["wrong_bytes"] == 0
        and result["round_trips"] > 0
        and result["free_after_nbytes"] >= result["free_before_nbytes"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
