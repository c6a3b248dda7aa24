# SPDX-License-Identifier: Apache-2.0
"""What `calibrate` measures of a machine, and what settings follow from the figures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cumem import _core
from cumem.base.locks import make_lock
from cumem.pools.pool import default_pool
from cumem.transfers.tuning import CALIBRATION, NEVER, change, stand_alone

#: Of an H200 on PCIe 5.0 with 16 cores of a Xeon Platinum; bytes per second, ns, bytes.
DEFAULTS = {
    "up_rate": 55e9,
    "down_rate": 55e9,
    "dma_gap_ns": 6500.0,
    "copy_rate_1": 9.6e9,
    "copy_rate_2": 19e9,
    "copy_rate_4": 36e9,
    "copy_rate_8": 48e9,
    "copy_rate_16": 51e9,
    "wake_ns": 50e3,
    "driver_up_rate": 8.9e9,
    "driver_down_rate": 18.3e9,
    "staged_up_nbytes": float(4 << 20),
    "staged_down_nbytes": float(1 << 20),
}
_THREADS = (1, 2, 4, 8, 16)
_NOISE = 1.03  #: a smaller gain may be none
_MIB = 1 << 20


def raw_copies(
    dst: _core.Buffer, src: _core.Buffer, stream: object, budget: float
) -> list[float]:
    """Seconds of each of 5 to 400 copies by the CUDA runtime alone, waited for one by
    one, that take about `budget` seconds together."""
    ends = dst.ptr, src.ptr, dst.nbytes
    _core._raw_copy(*ends, stream)  # wakes up what sleeps
    end = time.monotonic() + budget
    seconds: list[float] = []
    while len(seconds) < 5 or (len(seconds) < 400 and time.monotonic() < end):
        seconds.append(_core._raw_copy(*ends, stream))
    return seconds


# -- what follows from them ------------------------------------------------------------


def use(figures: Mapping[str, float] | None) -> None:
    """Have copies made accordingly; None for the defaults. ValueError: no such figures."""
    fields: dict[str, int | None] = dict.fromkeys(derive(DEFAULTS, 1))
    if figures is not None:
        for name in DEFAULTS:
            if not 0 <= figures[name] < 1e15:
                raise ValueError(f"{name} is no such figure: {figures[name]}")
        fields = derive(figures, _core._processors()[0])
    change(CALIBRATION, fields)


def derive(figures: Mapping[str, float], cpu_count: int) -> dict[str, int | None]:
    """Settings for such a machine where so many threads can run at once."""
    most = min(cpu_count, _THREADS[-1])
    threads = _choose_threads(figures, most)
    rate = copy_rate(figures, threads)
    spin_ns = int(min(max(figures["wake_ns"], 10e3), 200e3))
    return {
        "thread_count": threads if threads < most else None,
        "fresh_thread_count": most if threads < most else None,
        "chunk_nbytes": _choose_chunk(figures, threads, rate),
        "slot_count": 8 if threads > 2 else 4,
        "staged_up_nbytes": _choose_staged(figures, "up", rate),
        "staged_down_nbytes": _choose_staged(figures, "down", rate),
        "spin_ns": spin_ns,
        "wait_spin_ns": 4 * spin_ns,
    }


def copy_rate(figures: Mapping[str, float], threads: float) -> float:
    """Bytes per second that so many threads copy between pieces of host memory: on the
    line between two counts that were measured; beyond the last, as that one."""
    rate, count = figures["copy_rate_1"], 1
    for more in _THREADS[1:]:
        next_rate = figures[f"copy_rate_{more}"]
        if count >= threads or next_rate <= 0:
            break
        rate += min(1.0, (threads - count) / count) * (next_rate - rate)
        count = more
    return rate


def _choose_threads(figures: Mapping[str, float], most: int) -> int:
    """The fewest that keep up with the link, which takes some of the memory itself; where
    none do, the fastest, but no more for a gain that may be noise."""
    link = max(figures["up_rate"], figures["down_rate"])
    for count in range(1, most + 1):
        if 0 < 1.3 * link <= copy_rate(figures, count):
            return count
    best = 1
    for count in (*(n for n in _THREADS if 1 < n < most), most):
        if copy_rate(figures, count) > _NOISE * copy_rate(figures, best):
            best = count
    return best


def _round_up(nbytes: float, least: int, most: int) -> int:
    """The least power of two that is not less, within bounds."""
    size = least
    while size < nbytes and size < most:
        size *= 2
    return size


def _choose_chunk(figures: Mapping[str, float], threads: int, rate: float) -> int:
    """The link stands still between two pieces. Where threads are slower than it, it may;
    else that should be a tenth of the time at most."""
    link = min(figures["up_rate"], figures["down_rate"])
    gap = figures["dma_gap_ns"] * 1e-9
    nbytes = 10 * gap * link
    if 0 < rate < link:  # gap / (1 / rate - 1 / link), whose difference may round to 0
        nbytes = min(nbytes, gap * rate * link / (link - rate))
    # Less costs more in calls, and is in the way of threads that share a huge page; one
    # or two threads gain by what stays in their caches.
    least = 8 if threads > 3 else 2 if threads > 2 else 1
    return _round_up(nbytes, least * _MIB, 16 * _MIB)


def _choose_staged(figures: Mapping[str, float], way: str, rate: float) -> int:
    """Pieces through page-locked blocks must gain on the runtime's own copy."""
    if min(figures[f"{way}_rate"], rate) <= 1.1 * figures[f"driver_{way}_rate"]:
        return NEVER
    return _round_up(figures[f"staged_{way}_nbytes"], _MIB // 4, 64 * _MIB)


# -- measuring -------------------------------------------------------------------------

_NBYTES = 8 * _MIB
_REPEATS = 3
_BUDGET_S = 0.25  # a machine needs half of it
_running = make_lock()


def measure(index: int) -> dict[str, float]:
    """Figures of the machine with that device; what there is no time for keeps its
    default. Whatever happens, copies are made afterwards as they were before."""
    with _running:
        try:
            stand_alone({})
            return _Bench(index).run()
        finally:
            stand_alone(None)


class _Bench:
    def __init__(self, index: int) -> None:
        self.figures = dict(DEFAULTS)
        self.stream = _core.Stream(device=index)
        take: dict[str, Any] = {"dtype": "u1", "device": index, "stream": self.stream}
        self.pinned, self.device = (
            _core.empty(_NBYTES, kind=kind, pool=default_pool(kind, index), **take)
            for kind in ("pinned", "device")
        )
        self.host = np.ones(_NBYTES, np.uint8)
        self.pinned.numpy()[:] = 2
        self.cpu_count, _ = _core._processors()
        self.end = time.monotonic() + _BUDGET_S

    def run(self) -> dict[str, float]:
        for step in (
            self.links,
            self.driver,
            self.threads,
            self.waking,
            self.crossings,
        ):
            if not self.is_late():
                step()
        return self.figures

    def is_late(self) -> bool:
        return time.monotonic() > self.end

    def chain(self, dst: Any, src: Any, count: int) -> None:
        for _ in range(count):
            _core.copy_async(dst, src, stream=self.stream)

    def least_ns(self, function: Callable[[], None], cold: int = 0) -> float:
        """Of some calls, the first of which makes what it needs, and one alone once it is
        late; `cold`: of so many bytes of `host` that are in no cache."""
        best = math.inf
        for i in range(_REPEATS + 1):
            if i > 1 and self.is_late():
                break
            _core._flush_cache(self.host[:cold])
            start = time.perf_counter_ns()
            function()
            spent = time.perf_counter_ns() - start
            best = min(best, spent) if i > 0 else best
        return best

    def chain_ns(self, dst: Any, src: Any, count: int, short: int = 0) -> float:
        """`count` long copies, and so many of 64 KiB, which are queued meanwhile."""

        def run() -> None:
            self.chain(dst, src, count)
            self.chain(dst[: 64 << 10], src[: 64 << 10], short)
            self.stream.synchronize()

        return self.least_ns(run)

    def links(self) -> None:
        """The difference of a long and a short chain."""
        many = 5
        for way, dst, src in (
            ("up", self.device, self.pinned),
            ("down", self.pinned, self.device),
        ):
            long = self.chain_ns(dst, src, many)
            # What is common to both is small: were it half of the time, it would be noise.
            spent = max(long - self.chain_ns(dst, src, 1), long / 2)
            self.figures[f"{way}_rate"] = 1e9 * (many - 1) * _NBYTES / spent
        short = 16
        alone = self.chain_ns(self.device, self.pinned, 4)
        spent = self.chain_ns(self.device, self.pinned, 4, short) - alone
        moving = 1e9 * (64 << 10) / self.figures["up_rate"]
        self.figures["dma_gap_ns"] = max(0.0, spent / short - moving)

    def driver(self) -> None:
        host = _core.asbuffer(self.host)
        for way, dst, src in (("up", self.device, host), ("down", host, self.device)):
            _core._flush_cache(self.host)
            best = min(raw_copies(dst, src, self.stream, 0.0))
            self.figures[f"driver_{way}_rate"] = _NBYTES / best

    def threads(self) -> None:
        share = 1.0  # of the default machine's
        for count in _THREADS:
            name = f"copy_rate_{count}"
            below, running = count // 2, min(count, self.cpu_count)
            if below >= running:
                self.figures[name] = 0.0
            elif count > 1 and self.is_late():
                self.figures[name] = share * DEFAULTS[name]
            else:
                stand_alone({"thread_count": running, "fresh_thread_count": running})
                spent = self.least_ns(
                    lambda: _core.copy(self.pinned, self.host, stream=self.stream),
                    _NBYTES,
                )
                rate = 1e9 * _NBYTES / spent
                if running < count:  # on the line, where copy_rate() finds it
                    least = self.figures[f"copy_rate_{below}"]
                    more = (rate - least) * (count - below) / (running - below)
                    rate = max(0.0, least + more)
                self.figures[name] = rate
                share = rate / DEFAULTS[name]

    def waking(self) -> None:
        """Until a thread that sleeps works."""
        go, gone = threading.Semaphore(0), threading.Semaphore(0)
        woken = []

        def sleeper() -> None:
            for _ in range(_REPEATS):
                go.acquire()
                woken.append(time.perf_counter_ns())
                gone.release()

        thread = threading.Thread(target=sleeper, daemon=True)
        thread.start()
        asked = []
        try:
            for _ in range(_REPEATS):
                time.sleep(2e-3)
                asked.append(time.perf_counter_ns())
                go.release()
                gone.acquire()
        finally:
            go.release(_REPEATS)  # after an interrupt it ends as well
            thread.join()
        spent = (b - a for a, b in zip(asked, woken, strict=True))
        self.figures["wake_ns"] = float(min(spent))

    def crossings(self) -> None:
        """The least size from which on pieces win, each way."""
        for way in ("up", "down"):
            least, nbytes, wins = 2 * _NBYTES, _NBYTES, True
            while nbytes >= 512 << 10 and wins:
                if self.is_late():
                    return
                wins = self.staged_wins(way, nbytes)
                least = nbytes if wins else least
                nbytes //= 2
            self.figures[f"staged_{way}_nbytes"] = float(least)

    def staged_wins(self, way: str, nbytes: int) -> bool:
        device, host = self.device[:nbytes], self.host[:nbytes]
        ends = (device, host) if way == "up" else (host, device)
        derived = derive(self.figures, self.cpu_count).items()
        values = {name: value for name, value in derived if value is not None}
        values["quick_nbytes"] = 0
        spent = []
        for limit in (0, NEVER):
            values["staged_up_nbytes"] = values["staged_down_nbytes"] = limit
            stand_alone(values)
            spent.append(
                self.least_ns(lambda: _core.copy(*ends, stream=self.stream), nbytes)
            )
        return spent[0] * _NOISE < spent[1]
