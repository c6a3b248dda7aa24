# SPDX-License-Identifier: Apache-2.0
"""Reads the counters of pools, adds them up, and tells how they change over a block.

A counter that only grows, or that gives a present amount, is measured over a block by
reading it before and after the block. A peak cannot be measured in this way, because the
highest peak may have been before the block. So each pool has a second set of peaks, which
start anew whenever they are read. `_fold` reads them when any measurement begins or ends,
and adds what it finds to all measurements that are open. The peak of a measurement is thus
the largest of the peaks between its two ends, however blocks are nested or overlap.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, ClassVar, Self

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.displays import show
from cumem.base.kinds import (
    ATTACH_GLOBAL,
    DEVICE_FIRST,
    KINDS,
    PORTABLE,
    WRITE_COMBINED,
    Kind,
)
from cumem.base.locks import make_lock
from cumem.base.places import found_in
from cumem.base.units import fit, format_nbytes, format_table
from cumem.pools.limits import is_share


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Counters(Answer):
    """The counters of a pool, or their sums over several pools.

    Counters are in bytes unless the name says count or ns. At any moment
    ``live + in_flight + cached = reserved + asleep``, where cached is all memory that
    belongs to no buffer, including memory that is being given back to the driver at that
    moment. ``live - requested`` is the cost of rounding. Sums of peaks and of
    ``largest_free_nbytes`` add up the values of the pools, although the pools need not
    reach their peaks at the same time.

    Attributes
    ----------
    live_nbytes, live_count : int
        Blocks that are handed out, including rounding.
    requested_nbytes : int
        The bytes that were asked for in live blocks.
    in_flight_nbytes, in_flight_count : int
        Blocks that were freed while work on them may still run.
    cached_nbytes, cached_count : int
        Free memory that is ready for reuse, and its number of pieces. Neighbours count as
        one piece if an allocation may use both. Above 512 pieces, pieces that could still
        be joined are counted separately, so that reading delays no allocation.
    reserved_nbytes : int
        Memory that the pool holds from CUDA: live, in flight and cached memory that is not
        asleep.
    asleep_nbytes : int
        The bytes of regions that sleep and of buffers that were spilled. They keep their
        addresses, but CUDA has the memory.
    peak_live_nbytes, peak_requested_nbytes, peak_waste_nbytes : int
    peak_in_flight_nbytes, peak_cached_nbytes, peak_reserved_nbytes : int
        The largest value since the start or ``reset_peaks()``. Memory that is taken
        for an allocation counts as cached only if the counters are read meanwhile.
    largest_free_nbytes : int
        The longest cached piece; with more than 512 pieces it is up to 3 % too small.
    segment_count : int
        The number of address ranges that hold the memory.
    allocation_count, free_count : int
        How many blocks were ever handed out, and how many came back.
    hit_count : int
        Allocations served at once from cached memory, without a call to CUDA.
    miss_count : int
        All other allocations, which had to look at or wait for work in flight, or to take
        memory from CUDA.
    split_count, merge_count : int
        How often a free piece was cut in two, and two free neighbours became one.
    cross_stream_wait_count : int
        Allocations that made a stream wait for another stream's work on the block.
    growth_count, growth_ns : int
        Allocations for which memory was taken from CUDA or moved, and the time that this
        took, including failed attempts.
    remap_count, remap_nbytes : int
        Pieces of cached memory that were mapped to other addresses to form one run.
    trim_count, trimmed_nbytes : int
        How often the pool looked for memory to give back, on request or because memory was
        short or idle, and the bytes that it gave back.
    spill_count, spilled_nbytes : int
        How often a buffer of a pool with ``spill="pinned"`` went to pinned memory, and the
        bytes that CUDA got back in this way.
    wake_count, woken_nbytes : int
        How often such a buffer came back, and the bytes that it took.
    out_of_memory_count : int
        Attempts that failed; an allocation makes several before it raises.
    lost_count : int
        How often CUDA refused to take back memory or an event, or there was no memory to
        keep track of a block in flight. That memory may stay reserved.

    Examples
    --------
    >>> with cumem.measure() as measured:
    ...     kept = cumem.empty_pinned(4096, "u1")
    >>> measured.total.live_nbytes >= 4096
    True
    """

    live_nbytes: int = 0
    live_count: int = 0
    requested_nbytes: int = 0
    in_flight_nbytes: int = 0
    in_flight_count: int = 0
    cached_nbytes: int = 0
    cached_count: int = 0
    reserved_nbytes: int = 0
    asleep_nbytes: int = 0
    peak_live_nbytes: int = 0
    peak_requested_nbytes: int = 0
    peak_waste_nbytes: int = 0
    peak_in_flight_nbytes: int = 0
    peak_cached_nbytes: int = 0
    peak_reserved_nbytes: int = 0
    largest_free_nbytes: int = 0
    segment_count: int = 0
    allocation_count: int = 0
    free_count: int = 0
    hit_count: int = 0
    miss_count: int = 0
    split_count: int = 0
    merge_count: int = 0
    cross_stream_wait_count: int = 0
    growth_count: int = 0
    growth_ns: int = 0
    remap_count: int = 0
    remap_nbytes: int = 0
    trim_count: int = 0
    trimmed_nbytes: int = 0
    spill_count: int = 0
    spilled_nbytes: int = 0
    wake_count: int = 0
    woken_nbytes: int = 0
    out_of_memory_count: int = 0
    lost_count: int = 0

    _keys: ClassVar[tuple[str, ...]] = ("waste_nbytes", "fragmentation")

    @property
    def waste_nbytes(self) -> int:
        """The bytes of live blocks beyond the requested ones, which rounding costs."""
        return self.live_nbytes - self.requested_nbytes

    @property
    def fragmentation(self) -> float:
        """``1 - largest_free / cached``; 0 if all cached memory is one piece."""
        if self.cached_nbytes <= 0:
            return 0.0
        return 1 - self.largest_free_nbytes / self.cached_nbytes


_STAGING = "staging"
_STAGING_NUMBER = 2**64 - 2  #: as in csrc/python/core/state.h, like the next number
_REGISTERED_NUMBER = 2**64 - 3
_COUNTERS = tuple(field.name for field in dataclasses.fields(Counters))
_PEAKS = tuple(name for name in _COUNTERS if name.startswith("peak_"))


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class PoolStats(Counters):
    """The counters of one pool, read at one moment.

    Attributes
    ----------
    name : str
        ``"default"``, ``"pool 3"`` for the third pool that was made, ``"closed pool"`` for
        one that exists only because of live buffers, or ``"staging"`` for one that copies
        use on the way. ``"registered"`` is not a pool. It stands for the pages that
        `register` has locked, which are shown as a pool of pinned memory that is all live.
    kind : str
        ``"device"``, ``"pinned"``, ``"mapped"`` or ``"managed"``.
    device : int
        The index of the device.
    limit : int or None
        The pool's own limit in bytes.

    Examples
    --------
    >>> found = cumem.default_pool("pinned").stats()
    >>> found.kind, found.live_nbytes <= found.reserved_nbytes
    ('pinned', True)
    """

    name: str = ""
    kind: Kind = "device"
    device: int = 0
    limit: int | None = None

    _keys = ("limit_nbytes",)

    @property
    def is_staging(self) -> bool:
        """Whether copies use the pool on the way, so that it holds no buffers."""
        return self.name == _STAGING

    def __repr__(self) -> str:
        return _table([(f"{self.kind} {self.device} {self.name}", self)], _lines(self))


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Stats(Answer):
    """The counters of all pools.

    ``total`` is the sum of ``kinds``, which are pools of buffers, and of ``staging``. Pages
    that `register` has locked count as pinned memory.

    Attributes
    ----------
    pools : tuple of PoolStats
        All pools, including those that copies use on the way.

    Examples
    --------
    >>> kept = cumem.empty_pinned(1 << 20, "u1")
    >>> cumem.stats()["pinned"].live_nbytes >= 1 << 20
    True
    """

    pools: tuple[PoolStats, ...]

    _keys = ("kinds", "staging", "total")

    #: Not iterable, since iteration by ``__getitem__`` would ask for item 0. `kinds` and
    #: `pools` can be iterated.
    __iter__: ClassVar[None] = None

    def __getitem__(self, kind: str) -> Counters:
        """Return the sum over the pools of one kind that hold buffers."""
        if kind not in DEVICE_FIRST:
            kinds = ", ".join(f'"{each}"' for each in DEVICE_FIRST)
            raise KeyError(f"{kind!r} is not a kind of memory; these are: {kinds}")
        return _add(p for p in self.pools if p.kind == kind and not p.is_staging)

    @property
    def total(self) -> Counters:
        """The sum over all pools."""
        return _add(self.pools)

    @property
    def staging(self) -> Counters:
        """The sum over the pools that copies use on the way.

        They are page-locked stages for ordinary memory, and memory on devices in which
        elements are transposed, gathered or read ahead. These pools hold no buffers, but
        count against limits.
        """
        return _add(pool for pool in self.pools if pool.is_staging)

    @property
    def kinds(self) -> dict[str, Counters]:
        """The sums over each kind that has a pool for buffers."""
        present = {pool.kind for pool in self.pools if not pool.is_staging}
        return {kind: self[kind] for kind in DEVICE_FIRST if kind in present}

    def __repr__(self) -> str:
        return _table(rows_of(self))


def stats() -> Stats:
    """Read the counters of all pools.

    Returns
    -------
    Stats
        The pools, each read at one moment. A closed pool is included as long as a buffer
        has memory of it. There are no pools before cumem is first used.

    Examples
    --------
    >>> kept = cumem.empty_pinned(1 << 20, "u1")
    >>> found = cumem.stats()
    >>> found.total.live_nbytes >= found["pinned"].live_nbytes >= 1 << 20
    True
    """
    return Stats(tuple(pool_stats(facts) for facts in _core._pools()))


def pool_stats(facts: _core._PoolFacts) -> PoolStats:
    """Make the result of `Pool.stats`."""
    return PoolStats(
        name=pool_name(facts),
        kind=facts.kind,
        device=facts.device,
        # Only the driver knows how many bytes a share is.
        limit=None if is_share(facts.limit) else facts.limit,
        **facts.counters,
    )


#: The names of the pools of regions, by their numbers.
REGION_NAMES: dict[int, str] = {}


def pool_name(of: _core._PoolFacts | _core._PoolConfig) -> str:
    """Return a name such as ``"default"`` or ``"pool 3"``; see `PoolStats`."""
    number, flags, kind = of.number, of.flags, of.kind
    if number == _STAGING_NUMBER:
        return _STAGING
    if number == _REGISTERED_NUMBER:
        return "registered"
    if number == 2**64 - 1:
        return "closed pool"
    if number != 0:
        return REGION_NAMES.get(number, f"pool {number}")
    if KINDS[kind].migrates:
        return "default" if flags == ATTACH_GLOBAL else "default, attach host"
    if not KINDS[kind].page_locked:
        return "default"
    portable = "" if flags & PORTABLE else ", not portable"
    return f"default{portable}{', write-combined' if flags & WRITE_COMBINED else ''}"


def _add(pools: Iterable[Counters]) -> Counters:
    sums = dict.fromkeys(_COUNTERS, 0)
    for pool in pools:
        for name in _COUNTERS:
            sums[name] += getattr(pool, name)
    return Counters(**sums)


# -- a block of code -------------------------------------------------------------------


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True, repr=False)
class Measurement(Stats):
    """The changes of the pools' counters in a block of code; see `measure`.

    Attributes
    ----------
    pools : tuple of PoolStats
        Differences between the end and the beginning of the block. They are negative if
        memory was given back. Peaks are the most bytes that were held at once in the block.
    seconds : float
        The time that the block took.

    Examples
    --------
    >>> with cumem.measure() as measured:
    ...     pass
    >>> measured.result.total.live_nbytes, measured.result.seconds >= 0
    (0, True)
    """

    seconds: float = 0.0


#: Members of a `Measure` that exist once its block has ended.
_FIGURES = ("kinds", "pools", "result", "seconds", "staging", "total")


@found_in("cumem.types")
class Measure:
    """The ``with`` block of `measure`, and its result afterwards.

    Examples
    --------
    >>> with cumem.measure() as measured:
    ...     kept = cumem.empty_device(1 << 20, "u1")
    >>> measured.total.peak_live_nbytes >= 1 << 20, measured.seconds >= 0
    (True, True)
    """

    def __init__(self) -> None:
        self._result: Measurement | None = None
        self._began = 0.0
        self._before: dict[int, PoolStats] = {}
        self._peaks: dict[int, list[int]] = {}

    def __enter__(self) -> Self:
        with _open_lock:
            if self in _open:
                raise RuntimeError("the measurement is already running")
            self._result = None
            self._before = _fold()
            self._peaks = {}
            _open.add(self)
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._began
        with _open_lock:
            if self not in _open:
                raise RuntimeError("the measurement is not running, or has ended")
            try:
                after = _fold()
            finally:
                _open.discard(self)
        pools = tuple(self._difference(*item) for item in after.items())
        self._result = Measurement(pools, seconds)

    def _difference(self, serial: int, after: PoolStats) -> PoolStats:
        before = self._before.get(serial, PoolStats())
        values: dict[str, Any] = {
            name: getattr(after, name) - getattr(before, name) for name in _COUNTERS
        }
        values |= zip(_PEAKS, self._peaks[serial], strict=True)
        return dataclasses.replace(after, **values)

    def __dir__(self) -> list[str]:
        """Return the names of members that can be read now."""
        early = () if self._result is not None else _FIGURES
        return sorted({*object.__dir__(self)}.difference(early))

    @property
    def result(self) -> Measurement:
        """The measurement. Reading it before the block has ended raises RuntimeError."""
        if self._result is None:
            raise RuntimeError("the block is not over yet")
        return self._result

    @property
    def seconds(self) -> float:
        """The time that the block took, in seconds."""
        return self.result.seconds

    @property
    def pools(self) -> tuple[PoolStats, ...]:
        """The differences for each pool."""
        return self.result.pools

    @property
    def total(self) -> Counters:
        """The differences for all pools together."""
        return self.result.total

    @property
    def kinds(self) -> dict[str, Counters]:
        """The differences for the pools of each kind together."""
        return self.result.kinds

    @property
    def staging(self) -> Counters:
        """The differences for the pools that copies used on the way."""
        return self.result.staging

    def __getitem__(self, kind: str) -> Counters:
        return self.result[kind]

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain data; RuntimeError before the block ends."""
        return self.result.to_dict()

    def __repr__(self) -> str:
        return (
            "<cumem.types.Measure, running>"
            if self._result is None
            else repr(self.result)
        )

    def _repr_html_(self) -> str | None:
        shown: str | None = show("html", self if self._result is None else self._result)
        return shown


def measure() -> Measure:
    """Measure what a block of code does with the pools.

    Write ``with cumem.measure() as m:`` and, after the block, ``m.total.peak_live_nbytes``,
    ``m["pinned"].miss_count``, ``m.seconds`` or ``print(m)``.

    Returns
    -------
    Measure
        The object of the ``with`` block. Its counters are differences between the end and
        the beginning of the block, and its peaks are the most bytes that were held at once
        in the block.

    Notes
    -----
    Blocks may be nested, and may overlap in several threads. The work of other threads
    during the block counts as well. The peaks are exact for each pool, and do not affect
    those of `stats`. A sum of several pools adds up their peaks. Pools that ended within
    the block are left out.

    Examples
    --------
    >>> with cumem.measure() as measured:
    ...     kept = cumem.empty_pinned(1 << 20, "u1")
    >>> measured.total.live_nbytes >= 1 << 20  # left alive by the block
    True
    """
    return Measure()


#: The measurements whose blocks are open. The set is weak because Ctrl-C may keep a block
#: from ending. Its measurement then leaves the set when the `Measure` object is dropped.
_open: weakref.WeakSet[Measure] = weakref.WeakSet()
_open_lock = make_lock()


def _fold() -> dict[int, PoolStats]:
    """Read all pools, by serial number, and update the peaks of open measurements.

    Reading resets the peaks, so that each call covers the time since the previous one.
    """
    found = {facts.serial: pool_stats(facts) for facts in _core._pools(True)}
    for one in list(_open):
        before, one._peaks = one._peaks, {}
        for serial, pool in found.items():
            peaks = [getattr(pool, peak) for peak in _PEAKS]
            one._peaks[serial] = [*map(max, before.get(serial, peaks), peaks)]
    return found


# -- text ------------------------------------------------------------------------------

COLUMNS = {
    "live": "live_nbytes",
    "in flight": "in_flight_nbytes",
    "cached": "cached_nbytes",
    "reserved": "reserved_nbytes",
    "peak live": "peak_live_nbytes",
    "peak reserved": "peak_reserved_nbytes",
}
MORE_COLUMNS = {  # shown only if there is room
    "peak in flight": "peak_in_flight_nbytes",
    "peak cached": "peak_cached_nbytes",
    "waste": "waste_nbytes",
    "peak waste": "peak_waste_nbytes",
}


def rows_of(found: Stats) -> list[tuple[str, Counters]]:
    """Return a row for each pool and for each kind with several pools, staging last."""
    rows: list[tuple[str, Counters]] = []
    groups = [(f"{kind}, all pools", found[kind], kind) for kind in found.kinds]
    for text, total, kind in [*groups, ("staging, all pools", found.staging, None)]:
        pools = [
            pool
            for pool in found.pools
            if (None if pool.is_staging else pool.kind) == kind
        ]
        rows += [(f"{p.kind} {p.device} {p.name}", p) for p in pools]
        if len(pools) > 1:
            rows.append((text, total))
    return rows


def cells_of(label: str, counters: Counters, columns: dict[str, str]) -> list[str]:
    asked = counters.allocation_count
    hits = f"{counters.hit_count / asked:.1%}" if asked else "-"
    sizes = [format_nbytes(getattr(counters, field)) for field in columns.values()]
    return [label, *sizes, str(asked), hits]


def _table(rows: list[tuple[str, Counters]], more: str = "") -> str:
    if not rows:
        return "no pool yet"
    cells = [["pool", *COLUMNS, "allocations", "hits"]]
    cells += [cells_of(*row, COLUMNS) for row in rows]
    return "\n".join(format_table(cells)) + fit(more)


def _lines(pool: PoolStats) -> str:
    """Return all counters that the table leaves out and that are not 0."""
    listed = {*COLUMNS.values(), "allocation_count", "hit_count"}
    rest = {n: getattr(pool, n) for n in _COUNTERS if n not in listed}
    return "".join(f"\n  {name} {value}" for name, value in rest.items() if value)
