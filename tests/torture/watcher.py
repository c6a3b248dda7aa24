# SPDX-License-Identifier: Apache-2.0
"""Finds operations that never end, and figures that grow from round to round.

A thread of its own, `watch`, ends the process if an operation takes too long. `measure`
returns figures of the process after a round, and `grown` compares those of all rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from support import testing

import cumem
from torture.settings import KIB, MIB, SANITIZED
from torture.worker import Worker
from torture.world import World


def status(name: str) -> int:
    """Read a figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * KIB
    return 0


class Mallinfo(ctypes.Structure):
    """The struct of mallinfo2(), whose ten fields have the same type."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


@functools.cache
def heap_reader() -> Callable[[], int]:
    """Return a function that returns how many bytes malloc has given out."""
    process = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        sanitizer = process.__sanitizer_get_current_allocated_bytes
        sanitizer.restype = ctypes.c_size_t
        return sanitizer
    with contextlib.suppress(AttributeError):
        mallinfo = process.mallinfo2
        mallinfo.restype = Mallinfo

        def read() -> int:
            found = mallinfo()
            return int(found.field7 + found.field4)  # uordblks, hblkhd

        return read
    return lambda: 0


def have_malloc_give_back() -> None:
    """Have malloc give freed memory back to the system.

    Otherwise malloc keeps up to 64 MiB for each of eight threads a core, and a process
    that loses memory would not stand out.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ((-8, 2), (-3, 64 * KIB), (-1, 64 * KIB)):
            mallopt(name, value)  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


#: By how much each figure of the later rounds may be larger than in the earlier ones.
TOLERATED = {
    "rss": (512 if SANITIZED else 64) * MIB,  # AddressSanitizer keeps freed memory
    "rss anonymous": (512 if SANITIZED else 64) * MIB,
    "heap": 16 * MIB,
    "python_blocks": 20_000,
    "fds": 2,
    "threads": 64,  # each emulated stream has one
    "emulated events": 64,  # cumem keeps events for their next use
    "emulated streams": 64,
    "emulated address_ranges": 64,
    "emulated modules": 12,  # four devices load each of three kernels when they need it
}


def open_files() -> Counter[str]:
    """Count the open descriptors by their files' names, in which "N" replaces numbers."""
    names: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed
            name = os.readlink(f"/proc/self/fd/{number}")
            name = name if name.startswith("/dev/") else os.path.basename(name)
            names[re.sub("[0-9]+", "N", name)] += 1
    return names


def measure(open_runtime: bool = True) -> dict[str, int]:
    """Return figures of the process, and of the emulated device if the runtime is open."""
    gc.collect()
    found = {
        "rss": status("VmRSS"),
        "heap": heap_reader()(),
        "python_blocks": sys.getallocatedblocks(),
        "rss anonymous": status("RssAnon"),
        "fds": sum(open_files().values()),
        "threads": len(os.listdir("/proc/self/task")),
        "storages": testing.live_storages(),
        "registrations": testing.registrations(),
        "pending": testing.pending_transfers(),
    }
    if open_runtime and cumem.backend() == "emulated":
        counts = testing.counts()
        found |= {f"emulated {name}": count for name, count in counts.items()}
    return found


def watch(world: World, workers: list[Worker], over: threading.Event) -> None:
    """Note peaks, and end the process if an operation takes longer than the patience."""
    patience = world.options.patience
    while not over.wait(0.25):
        # The alarm ends the process even if a thread keeps the GIL for ever. So would the
        # watchdog thread of faulthandler, but a forked child that ends would wait for it.
        signal.alarm(2 * int(patience))
        world.peaks["rss"] = max(world.peaks["rss"], status("VmRSS"))
        for name, folder in (("fds", "fd"), ("threads", "task")):
            count = len(os.listdir(f"/proc/self/{folder}"))
            world.peaks[name] = max(world.peaks[name], count)
        count = testing.live_storages()
        world.peaks["storages"] = max(world.peaks["storages"], count)
        late = [w for w in workers if time.monotonic() - w.since > patience]
        late = [w for w in late if w.now != "over"]
        if late:
            faulthandler.dump_traceback(all_threads=True)
            for worker in workers:
                print(f"{worker.name}: {worker.now}", file=sys.stderr)
            text = f"HANG: {late[0].name} in {late[0].now}, seed {world.options.seed}"
            print(text, file=sys.stderr, flush=True)
            os._exit(3)
    signal.alarm(0)


def grown(rounds: list[dict[str, int]]) -> list[str]:
    """List what grew: figures that are larger in the later half of the rounds.

    Storages, registrations and transfers must be gone altogether.
    """
    half = len(rounds) // 2
    found = []
    for name in rounds[0]:
        tolerated = TOLERATED.get(name, 0)
        earlier = max(one[name] for one in rounds[:half])
        later = min(one[name] for one in rounds[half:])
        if later > earlier + tolerated:
            found.append(f"{name} grew: {[one[name] for one in rounds]}")
    last = rounds[-1]
    for name in ("storages", "registrations", "pending"):
        if last[name] != 0:
            found.append(f"{last[name]} {name} are left")
    return found
