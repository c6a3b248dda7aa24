# SPDX-License-Identifier: Apache-2.0
"""Measures copies, rows, allocation and the processor's own access to memory.

Each case moves random bytes. It is timed by a monotonic clock around calls that block
until the data is there. Afterwards it moves fresh random bytes once more and compares
them. Nothing here prints.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.random import default_rng  # NumPy would otherwise import it when first used
from numpy.typing import NDArray

from cumem import _core
from cumem.base.errors import CudaError
from cumem.base.kinds import is_on_device
from cumem.devices.device import Device
from cumem.pools.pool import trim
from cumem.tools.measuring import raw_copies

__all__ = ["COPY_KINDS", "ROW_NBYTES", "Plan", "Result", "count", "run"]

Bytes = NDArray[np.uint8]
Group = Literal["ceiling", "copy", "rows", "both", "allocate", "host"]

KIB: Final = 1024
MIB: Final = 1024 * KIB

# The order of the columns. If two kinds are equally fast, the report recommends the earlier
# one, because it is easier to use.
COPY_KINDS: Final = ("pageable", "pinned", "write-combined", "mapped", "managed")
ALLOCATE_KINDS: Final = (*COPY_KINDS, "device")
BOTH_KINDS: Final = ("pageable", "pinned", "mapped")
ROW_KINDS: Final = BOTH_KINDS
#: The length of a row that is copied by its number, such as a block of a key-value cache.
ROW_NBYTES: Final = 16 * KIB


#: Errors after which a case has no figure: the device cannot do it, or memory is short. The
#: interpreter itself may run out of memory if its address space is limited (``ulimit -v``).
REFUSALS: Final = (CudaError, MemoryError)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure and for how long.

    Parameters
    ----------
    sizes : tuple of int
        The sizes of the copies in bytes, ascending.
    row_sizes : tuple of int
        The bytes of all rows of a copy by random numbers, ascending.
    both_sizes : tuple of int
        The bytes in each direction for copies in both directions at once.
    allocate_sizes : tuple of int
        The bytes of the allocations.
    host_nbytes : int
        The bytes that the processor writes and reads to measure its access.
    budget : float
        The seconds of timed work per case; at least `least` repeats are made.
    least, most : int
        Bounds of the number of repeats.
    device : int
        The index of the device.
    seed : int
        The seed of the random data.
    """

    sizes: tuple[int, ...]
    row_sizes: tuple[int, ...]
    both_sizes: tuple[int, ...]
    allocate_sizes: tuple[int, ...]
    host_nbytes: int
    budget: float
    least: int = 5
    most: int = 400
    device: int = 0
    seed: int = 0

    @property
    def largest(self) -> int:
        """The size of the largest buffer that any case needs, in bytes."""
        return max(
            *self.sizes,
            *self.row_sizes,
            *self.both_sizes,
            *self.allocate_sizes,
            self.host_nbytes,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One measured case.

    Parameters
    ----------
    group : str
        ``"ceiling"`` (the CUDA runtime's own copies, without cumem), ``"copy"``,
        ``"rows"`` (by random numbers), ``"both"`` (directions at once), ``"allocate"`` or
        ``"host"``.
    what : str
        The case within the group: ``"h2d"`` or ``"d2h"`` of a ceiling, a copy or rows,
        ``"both"``, ``"first"`` or ``"again"`` of an allocation, ``"write"`` or ``"read"``
        of the host.
    kind : str
        The kind of memory; pinned for the ceiling.
    nbytes : int
        The bytes moved in one direction, or allocated.
    seconds : float
        The median of the repeats; 0 if skipped.
    low, high : float
        The first and third quartile, in seconds.
    repeats : int
        The number of timed repeats.
    verified : bool
        Whether the bytes arrived as sent.
    skipped : str or None
        The reason why there is no figure, if there is none.
    """

    group: Group
    what: str
    kind: str
    nbytes: int
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    repeats: int = 0
    verified: bool = False
    skipped: str | None = None

    @property
    def moved(self) -> int:
        """The bytes moved in all directions."""
        return 2 * self.nbytes if self.group == "both" else self.nbytes

    @property
    def gbps(self) -> float:
        """The rate in 10⁹ bytes per second; 0 if skipped."""
        return self.moved / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Trial:
    """A prepared case: the timed call, a call between repeats, and a check of the bytes."""

    action: Callable[[], None]
    verify: Callable[[], bool]
    reset: Callable[[], None] | None = None


def count(plan: Plan) -> int:
    """Count the cases of a plan, for a progress bar.

    Parameters
    ----------
    plan : Plan
        The plan that will be run.

    Returns
    -------
    int
        The number of results that `run` yields.
    """
    copies = 2 * len(COPY_KINDS) * len(plan.sizes)
    rows = 2 * len(ROW_KINDS) * len(plan.row_sizes)
    both = len(BOTH_KINDS) * len(plan.both_sizes)
    allocations = 2 * len(ALLOCATE_KINDS) * len(plan.allocate_sizes)
    return 2 + copies + rows + both + allocations + 2 * len(COPY_KINDS)


def run(plan: Plan) -> Iterator[Result]:
    """Measure every case of a plan.

    Parameters
    ----------
    plan : Plan
        What to measure.

    Yields
    ------
    Result
        One for each case, including those that could not run here (``skipped`` says why)
        and those whose data arrived wrong (``verified`` is false).

    Notes
    -----
    **Blocks** for about ``count(plan) * plan.budget`` seconds.
    """
    bench = _Bench(plan)
    groups = (
        (bench.ceilings, ("pinned",)),
        (bench.copies, COPY_KINDS),
        (bench.rows, ROW_KINDS),
        (bench.both_ways, BOTH_KINDS),
        (bench.allocations, ALLOCATE_KINDS),
        (bench.host_access, COPY_KINDS),
    )
    for measure, kinds in groups:
        for kind in kinds:
            yield from measure(kind)
            bench.empty_pools()  # so that the next kind finds the memory free


class _Bench:
    """Runs the cases, which share a device, a stream and a store of random bytes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = Device(plan.device)
        self.stream = _core.Stream(device=self.device)
        self._random = default_rng(plan.seed)
        self._shift = 4099  # makes each draw from the store differ from the last
        self._draws = 0
        self._store: Bytes = np.frombuffer(
            self._random.bytes(plan.largest + 64 * self._shift), np.uint8
        )

    def random(self, nbytes: int) -> Bytes:
        """Return random bytes that differ from those of the previous draw."""
        self._draws = (self._draws + 1) % 64
        start = self._draws * self._shift
        return self._store[start : start + nbytes]

    def allocate(self, kind: str, nbytes: int) -> Any:
        """Return memory of a kind, as one row of bytes."""
        device = self.device
        match kind:
            case "pageable":
                return np.empty(nbytes, np.uint8)
            case "pinned":
                return _core.empty_pinned(nbytes, np.uint8, device=device)
            case "write-combined":
                return _core.empty_pinned(
                    nbytes, np.uint8, write_combined=True, device=device
                )
            case "mapped":
                return _core.empty_mapped(nbytes, np.uint8, device=device)
            case "managed":
                return _core.empty_managed(nbytes, np.uint8, device=device)
            case _:
                return _core.empty_device(nbytes, np.uint8, device=device)

    def two_ends(self, kind: str, nbytes: int) -> tuple[Any, Any]:
        """Return memory of a kind and as much device memory, for copies between the two."""
        host = self.allocate(kind, nbytes)
        _host_view(host)[:] = 0  # touches every page before the clock starts
        return host, self.allocate("device", nbytes)

    def empty_pools(self) -> None:
        """Empty the pools, so that the next allocation needs memory from the system."""
        trim()  # queues the events for which the dropped blocks still have to wait
        self.device.synchronize()
        trim()

    # -- groups ------------------------------------------------------------------------

    def ceilings(self, kind: str) -> Iterator[Result]:
        """Measure the CUDA runtime's own copies of the largest size."""
        nbytes = self.plan.sizes[-1]
        try:
            host, device = self.allocate(kind, nbytes), self.allocate("device", nbytes)
        except REFUSALS as error:
            yield from self._skip("ceiling", kind, ("h2d", "d2h"), (nbytes,), error)
            return
        for what, target, source in (("h2d", device, host), ("d2h", host, device)):
            yield self._measure_raw(what, kind, target, source)

    def copies(self, kind: str) -> Iterator[Result]:
        """Measure copies to and from the device through one pair of buffers."""
        sizes = self.plan.sizes
        try:
            host, target = self.two_ends(kind, sizes[-1])
        except REFUSALS as error:
            yield from self._skip("copy", kind, ("h2d", "d2h"), sizes, error)
            return
        for nbytes in sizes:
            here, there = host[:nbytes], target[:nbytes]
            if kind == "managed":
                into, out = (
                    self._prefetch_in(here, there),
                    self._prefetch_out(here, there),
                )
            else:
                into, out = self._copy_in(here, there), self._copy_out(here, there)
            yield self._measure("copy", "h2d", kind, nbytes, into)
            yield self._measure("copy", "d2h", kind, nbytes, out)

    def rows(self, kind: str) -> Iterator[Result]:
        """Measure rows by random numbers on both sides, to and from the device."""
        sizes = self.plan.row_sizes
        try:
            host, target = self.two_ends(kind, sizes[-1])
        except REFUSALS as error:
            yield from self._skip("rows", kind, ("h2d", "d2h"), sizes, error)
            return
        for nbytes in sizes:
            row = min(ROW_NBYTES, nbytes)
            here, there = (end[:nbytes].reshape(-1, row) for end in (host, target))
            into, out = self._rows_in(here, there), self._rows_out(here, there)
            yield self._measure("rows", "h2d", kind, nbytes, into)
            yield self._measure("rows", "d2h", kind, nbytes, out)

    def both_ways(self, kind: str) -> Iterator[Result]:
        """Measure one copy in each direction at once, each on its own stream."""
        sizes = self.plan.both_sizes
        try:
            pairs = [
                (self.allocate(kind, sizes[-1]), self.allocate("device", sizes[-1]))
                for _ in range(2)
            ]
            other = _core.Stream(device=self.device)
        except REFUSALS as error:
            yield from self._skip("both", kind, ("both",), sizes, error)
            return
        for nbytes in sizes:
            parts = [(host[:nbytes], device[:nbytes]) for host, device in pairs]
            trial = self._both(parts[0], parts[1], other)
            yield self._measure("both", "both", kind, nbytes, trial)

    def allocations(self, kind: str) -> Iterator[Result]:
        """Measure an allocation of usable memory from the system, and one from the pool."""
        for nbytes in self.plan.allocate_sizes:
            first, again = self._first(kind, nbytes), self._again(kind, nbytes)
            yield self._measure("allocate", "first", kind, nbytes, first)
            yield self._measure("allocate", "again", kind, nbytes, again)

    def host_access(self, kind: str) -> Iterator[Result]:
        """Measure how fast the processor writes to a kind of memory and reads from it."""
        nbytes = self.plan.host_nbytes
        try:
            view = _host_view(self.allocate(kind, nbytes))
        except REFUSALS as error:
            yield from self._skip("host", kind, ("write", "read"), (nbytes,), error)
            return
        ordinary = self.random(nbytes).copy()
        view[:] = ordinary

        def verify() -> bool:
            fresh = self.random(nbytes)
            np.copyto(view, fresh)
            return np.array_equal(view, fresh)

        write = _Trial(lambda: np.copyto(view, ordinary), verify)
        read = _Trial(lambda: np.copyto(ordinary, view), verify)
        yield self._measure("host", "write", kind, nbytes, write)
        yield self._measure("host", "read", kind, nbytes, read)

    # -- trials ------------------------------------------------------------------------

    def _copy_in(self, host: Any, target: Any) -> _Trial:
        def verify() -> bool:
            fresh = self.random(target.nbytes)
            _host_view(host)[:] = fresh
            _core.copy(target, host)
            return self._holds(target, fresh)

        return _Trial(lambda: _core.copy(target, host), verify)

    def _copy_out(self, host: Any, source: Any) -> _Trial:
        def verify() -> bool:
            fresh = self.random(source.nbytes)
            _core.copy(source, fresh)
            _core.copy(host, source)
            return np.array_equal(_host_view(host), fresh)

        return _Trial(lambda: _core.copy(host, source), verify)

    def _numbers(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of all rows twice, each time in a random order."""
        return self._random.permutation(count), self._random.permutation(count)

    def _rows_in(self, host: Any, target: Any) -> _Trial:
        to, of = self._numbers(len(host))

        def action() -> None:
            _core.copy_rows(target, host, to, of)

        def verify() -> bool:
            fresh = self.random(host.nbytes).reshape(host.shape)
            _host_view(host)[:] = fresh
            action()
            moved = np.empty_like(fresh)
            moved[to] = fresh[of]
            return self._holds(target.reshape(-1), moved.reshape(-1))

        return _Trial(action, verify)

    def _rows_out(self, host: Any, source: Any) -> _Trial:
        to, of = self._numbers(len(host))

        def action() -> None:
            _core.copy_rows(host, source, to, of)

        def verify() -> bool:
            fresh = self.random(source.nbytes).reshape(source.shape)
            _core.copy(source, fresh)
            action()
            return np.array_equal(_host_view(host)[to], fresh[of])

        return _Trial(action, verify)

    def _prefetch(self, managed: Any, where: object) -> None:
        # The buffer's own prefetch_pages() would warn that the memory moves to and fro.
        _core.prefetch_pages((managed,), where, self.stream)
        self.stream.synchronize()

    def _prefetch_in(self, managed: Any, target: Any) -> _Trial:
        def verify() -> bool:
            fresh = self.random(target.nbytes)
            self._prefetch(managed, "host")
            managed.numpy()[:] = fresh
            self._prefetch(managed, self.device)
            _core.copy(target, managed.as_device())
            return self._holds(target, fresh)

        return _Trial(
            lambda: self._prefetch(managed, self.device),
            verify,
            lambda: self._prefetch(managed, "host"),
        )

    def _prefetch_out(self, managed: Any, source: Any) -> _Trial:
        def verify() -> bool:
            fresh = self.random(source.nbytes)
            _core.copy(source, fresh)
            self._prefetch(managed, self.device)
            _core.copy(managed.as_device(), source)
            self._prefetch(managed, "host")
            return np.array_equal(managed.numpy(), fresh)

        return _Trial(
            lambda: self._prefetch(managed, "host"),
            verify,
            lambda: self._prefetch(managed, self.device),
        )

    def _both(
        self, into: tuple[Any, Any], out: tuple[Any, Any], other: _core.Stream
    ) -> _Trial:
        def action() -> None:
            first = _core.copy_async(into[1], into[0], stream=self.stream)
            second = _core.copy_async(out[0], out[1], stream=other)
            first.wait()
            second.wait()

        def verify() -> bool:
            nbytes = into[1].nbytes
            up, down = self.random(nbytes), self.random(nbytes)
            _host_view(into[0])[:] = up
            _core.copy(out[1], down)
            action()
            return self._holds(into[1], up) and np.array_equal(_host_view(out[0]), down)

        return _Trial(action, verify)

    def _first(self, kind: str, nbytes: int) -> _Trial:
        kept: list[Any] = []

        def action() -> None:
            memory = self.allocate(kind, nbytes)
            if not is_on_device(kind):
                _host_view(memory)[:: 4 * KIB] = 1  # touch each page, to make it usable
            kept.append(memory)

        def reset() -> None:
            kept.clear()
            self.empty_pools()

        return _Trial(action, lambda: self._keeps_data(kind, nbytes), reset)

    def _again(self, kind: str, nbytes: int) -> _Trial:
        def action() -> None:
            memory = self.allocate(kind, nbytes)
            if kind == "pageable":
                memory[:: 4 * KIB] = 1  # touch each page, since ordinary ones are new

        return _Trial(action, lambda: self._keeps_data(kind, nbytes))

    # -- checks and clocks -------------------------------------------------------------

    def _holds(self, device: Any, expected: Bytes) -> bool:
        """Return whether device memory holds the expected bytes."""
        found = np.zeros(device.nbytes, np.uint8)
        _core.copy(found, device)
        return np.array_equal(found, expected)

    def _keeps_data(self, kind: str, nbytes: int) -> bool:
        """Return whether fresh memory gives back the bytes that were written to it."""
        memory, fresh = self.allocate(kind, nbytes), self.random(nbytes)
        if is_on_device(kind):
            _core.copy(memory, fresh)
            return self._holds(memory, fresh)
        _host_view(memory)[:] = fresh
        return np.array_equal(_host_view(memory), fresh)

    def _measure(
        self, group: Group, what: str, kind: str, nbytes: int, trial: _Trial
    ) -> Result:
        try:
            times = self._time(trial)
            if trial.reset is not None:
                trial.reset()
            verified = trial.verify()
        except REFUSALS as error:
            return Result(group, what, kind, nbytes, skipped=_first_line(error))
        low, median, high = _quartiles(times)
        return Result(
            group, what, kind, nbytes, median, low, high, len(times), verified
        )

    def _measure_raw(self, what: str, kind: str, target: Any, source: Any) -> Result:
        nbytes = source.nbytes
        fresh = self.random(nbytes)
        try:
            _core.copy(source, fresh)
            times = raw_copies(target, source, self.stream, self.plan.budget)
            found = np.zeros(nbytes, np.uint8)
            _core.copy(found, target)
        except REFUSALS as error:
            return Result("ceiling", what, kind, nbytes, skipped=_first_line(error))
        low, median, high = _quartiles(times)
        verified = np.array_equal(found, fresh)
        return Result(
            "ceiling", what, kind, nbytes, median, low, high, len(times), verified
        )

    def _time(self, trial: _Trial) -> list[float]:
        """Return the seconds of each repeat, after one repeat that is not timed."""
        plan, clock = self.plan, time.perf_counter_ns
        times: list[int] = []
        deadline = 0
        while True:
            if trial.reset is not None:
                trial.reset()
            start = clock()
            trial.action()
            end = clock()
            if not deadline:
                deadline = end + int(plan.budget * 1e9)
                continue
            times.append(end - start)
            enough = end >= deadline and len(times) >= plan.least
            if enough or len(times) >= plan.most:
                return [ns / 1e9 for ns in times]

    def _skip(
        self,
        group: Group,
        kind: str,
        whats: tuple[str, ...],
        sizes: tuple[int, ...],
        error: Exception,
    ) -> Iterator[Result]:
        reason = _first_line(error)
        for nbytes in sizes:
            for what in whats:
                yield Result(group, what, kind, nbytes, skipped=reason)


def _host_view(memory: Any) -> Bytes:
    """Return memory that the processor can use as an array of NumPy."""
    view: Bytes = memory if isinstance(memory, np.ndarray) else memory.numpy()
    return view


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _quartiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, median, high
