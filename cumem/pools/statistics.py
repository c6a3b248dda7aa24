# SPDX-License-Identifier: Apache-2.0
"""What the pools hold: counters of each pool and kind, and of a block of code."""

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
    """Counters of a pool, or sums over several.

    Bytes unless the name says count or ns. ``live + in_flight + cached = reserved`` at any
    moment, where cached is all that no buffer has, with what is just on its way back to the
    driver; ``live - requested`` is what rounding costs. Sums of peaks and of
    ``largest_free_nbytes`` add up those of each pool: pools need not peak together.

    Attributes
    ----------
    live_nbytes, live_count : int
        Blocks handed out, rounding included.
    requested_nbytes : int
        What was asked for by the live blocks.
    in_flight_nbytes, in_flight_count : int
        Blocks that were freed while work on them may still run.
    cached_nbytes, cached_count : int
        Free memory, ready for reuse, and in how many pieces, neighbours being one where
        an allocation may have both. Above 512 pieces they are counted as they lie, so
        that reading holds up no allocation: some may still join.
    reserved_nbytes : int
        Held from CUDA: live, in flight and cached.
    peak_live_nbytes, peak_requested_nbytes, peak_waste_nbytes : int
    peak_in_flight_nbytes, peak_cached_nbytes, peak_reserved_nbytes : int
        The most at any moment since the start or ``reset_peaks()``. Memory that is taken
        for an allocation counts as cached only if the counters are read meanwhile.
    largest_free_nbytes : int
        The longest cached piece; above 512 pieces up to 3 % too small.
    segment_count : int
        Ranges of addresses that the memory lies in.
    allocation_count, free_count : int
        Blocks handed out, and blocks given back, ever.
    hit_count : int
        Allocations served at once from what was cached, without a call to CUDA.
    miss_count : int
        All others: those that looked at or waited for work in flight, or took memory.
    split_count, merge_count : int
        Times a free piece was cut in two, and two free neighbours became one.
    cross_stream_wait_count : int
        Allocations that made a stream wait for another's work on the block.
    growth_count, growth_ns : int
        Allocations for which memory was taken or moved, and time spent at it, failures too.
    remap_count, remap_nbytes : int
        Pieces of cached memory mapped to other addresses, where one run was needed.
    trim_count, trimmed_nbytes : int
        Times memory was looked for to give back, also when short or idle; what went back.
    out_of_memory_count : int
        Attempts that failed; an allocation makes several before it raises.
    lost_count : int
        Times CUDA refused to take back memory or an event, or the record of a block in
        flight found no memory: what was concerned may stay held.

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
    out_of_memory_count: int = 0
    lost_count: int = 0

    _keys: ClassVar[tuple[str, ...]] = ("waste_nbytes", "fragmentation")

    @property
    def waste_nbytes(self) -> int:
        """Bytes of live blocks beyond what was asked for: lost to rounding."""
        return self.live_nbytes - self.requested_nbytes

    @property
    def fragmentation(self) -> float:
        """``1 - largest_free / cached``: 0 when what is cached is one piece."""
        if self.cached_nbytes <= 0:
            return 0.0
        return 1 - self.largest_free_nbytes / self.cached_nbytes


_STAGING = "staging"
_STAGING_NUMBER = 2**64 - 2  #: as csrc/python/core/state.h says, and the next
_REGISTERED_NUMBER = 2**64 - 3
_COUNTERS = tuple(field.name for field in dataclasses.fields(Counters))
_PEAKS = tuple(name for name in _COUNTERS if name.startswith("peak_"))


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class PoolStats(Counters):
    """Counters of one pool, read at one moment.

    Attributes
    ----------
    name : str
        ``"default"``, ``"pool 3"`` for the third that was made, ``"closed pool"`` for one
        that only live buffers keep, ``"staging"`` for one that copies go through. Not a
        pool but told as one of pinned memory, all of it live: ``"registered"``, the pages
        that `register` has locked.
    kind : str
        ``"device"``, ``"pinned"``, ``"mapped"`` or ``"managed"``.
    device : int
        Index of the device.
    limit : int or None
        Its own limit in bytes.

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
        """Whether copies go through it, and no buffer is in it."""
        return self.name == _STAGING

    def __repr__(self) -> str:
        return _table([(f"{self.kind} {self.device} {self.name}", self)], _lines(self))


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Stats(Answer):
    """Counters of all pools.

    ``total`` is the sum of ``kinds``, where buffers are, and of ``staging``. Pages that
    `register` has locked count as pinned memory.

    Attributes
    ----------
    pools : tuple of PoolStats
        Those that copies go through as well.

    Examples
    --------
    >>> kept = cumem.empty_pinned(1 << 20, "u1")
    >>> cumem.stats()["pinned"].live_nbytes >= 1 << 20
    True
    """

    pools: tuple[PoolStats, ...]

    _keys = ("kinds", "staging", "total")

    #: Python would otherwise ask for item 0; `kinds` and `pools` can be iterated.
    __iter__: ClassVar[None] = None

    def __getitem__(self, kind: str) -> Counters:
        """Sum of the pools of one kind that buffers are in."""
        if kind not in DEVICE_FIRST:
            kinds = ", ".join(f'"{each}"' for each in DEVICE_FIRST)
            raise KeyError(f"{kind!r} is not a kind of memory; these are: {kinds}")
        return _add(p for p in self.pools if p.kind == kind and not p.is_staging)

    @property
    def total(self) -> Counters:
        """Sum of all pools."""
        return _add(self.pools)

    @property
    def staging(self) -> Counters:
        """Sum of the pools that copies go through: page-locked pieces of ordinary memory,
        and room on devices where elements are turned, gathered or read ahead. No buffer is
        in them, and limits count them."""
        return _add(pool for pool in self.pools if pool.is_staging)

    @property
    def kinds(self) -> dict[str, Counters]:
        """Sums of the kinds that have a pool for buffers."""
        present = {pool.kind for pool in self.pools if not pool.is_staging}
        return {kind: self[kind] for kind in DEVICE_FIRST if kind in present}

    def __repr__(self) -> str:
        return _table(rows_of(self))


def stats() -> Stats:
    """Read the counters of all pools.

    Returns
    -------
    Stats
        Each pool is read at one moment. Pools that were closed count as long as a buffer
        keeps them. Empty before the first use.

    Examples
    --------
    >>> kept = cumem.empty_pinned(1 << 20, "u1")
    >>> found = cumem.stats()
    >>> found.total.live_nbytes >= found["pinned"].live_nbytes >= 1 << 20
    True
    """
    return Stats(tuple(pool_stats(facts) for facts in _core._pools()))


def pool_stats(facts: _core._PoolFacts) -> PoolStats:
    """Make what `Pool.stats` answers."""
    return PoolStats(
        name=pool_name(facts),
        kind=facts.kind,
        device=facts.device,
        # A share is one of what only the driver knows.
        limit=None if is_share(facts.limit) else facts.limit,
        **facts.counters,
    )


def pool_name(of: _core._PoolFacts | _core._PoolConfig) -> str:
    """``"default"``, ``"pool 3"``, ``"closed pool"``; see `PoolStats`."""
    number, flags, kind = of.number, of.flags, of.kind
    if number == _STAGING_NUMBER:
        return _STAGING
    if number == _REGISTERED_NUMBER:
        return "registered"
    if number == 2**64 - 1:
        return "closed pool"
    if number != 0:
        return f"pool {number}"
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
    """What the pools did in a block of code; see `measure`.

    Attributes
    ----------
    pools : tuple of PoolStats
        Differences between the end and the beginning, so that what was given back is
        negative; peaks are the most that was held at once in between.
    seconds : float
        How long the block took.

    Examples
    --------
    >>> with cumem.measure() as measured:
    ...     pass
    >>> measured.result.total.live_nbytes, measured.result.seconds >= 0
    (0, True)
    """

    seconds: float = 0.0


#: Of a `Measure`, once its block has ended.
_FIGURES = ("kinds", "pools", "result", "seconds", "staging", "total")


@found_in("cumem.types")
class Measure:
    """What `measure` answers: in its ``with`` block it measures, afterwards it tells.

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
        """Names of members that can be read now: figures once the block has ended."""
        early = () if self._result is not None else _FIGURES
        return sorted({*object.__dir__(self)}.difference(early))

    @property
    def result(self) -> Measurement:
        """The measurement, once the block has ended; RuntimeError before."""
        if self._result is None:
            raise RuntimeError("the block is not over yet")
        return self._result

    @property
    def seconds(self) -> float:
        """How long the block took."""
        return self.result.seconds

    @property
    def pools(self) -> tuple[PoolStats, ...]:
        """Each pool by itself."""
        return self.result.pools

    @property
    def total(self) -> Counters:
        """All pools together."""
        return self.result.total

    @property
    def kinds(self) -> dict[str, Counters]:
        """The pools of each kind together."""
        return self.result.kinds

    @property
    def staging(self) -> Counters:
        """The pools that copies went through."""
        return self.result.staging

    def __getitem__(self, kind: str) -> Counters:
        return self.result[kind]

    def to_dict(self) -> dict[str, Any]:
        """The measurement as plain data; RuntimeError before the end of the block."""
        return self.result.to_dict()

    def __repr__(self) -> str:
        return "<cumem.Measure, running>" if self._result is None else repr(self.result)

    def _repr_html_(self) -> str | None:
        shown: str | None = show("html", self if self._result is None else self._result)
        return shown


def measure() -> Measure:
    """Measure what a block of code does with the pools.

    ``with cumem.measure() as m:`` and then, after the block, ``m.total.peak_live_nbytes``,
    ``m["pinned"].miss_count``, ``m.seconds``, or ``print(m)``.

    Returns
    -------
    Measure
        Its counters are differences between the end and the beginning of the block; its
        peaks are the most that was held at once in between.

    Notes
    -----
    Blocks may be nested and overlap in threads; what other threads do meanwhile counts as
    well. The peaks are exact for each pool and leave those of `stats` alone; a sum of
    several pools adds up their peaks. Pools that ended within the block are left out.

    Examples
    --------
    >>> with cumem.measure() as measured:
    ...     kept = cumem.empty_pinned(1 << 20, "u1")
    >>> measured.total.live_nbytes >= 1 << 20  # left alive by the block
    True
    """
    return Measure()


#: Weak: one that Ctrl-C kept from its end is gone with its last name.
_open: weakref.WeakSet[Measure] = weakref.WeakSet()
_open_lock = make_lock()


def _fold() -> dict[int, PoolStats]:
    """Read all pools, by serial number, and let each open measurement see the peaks since
    the last look."""
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
MORE_COLUMNS = {  # where there is room for them
    "peak in flight": "peak_in_flight_nbytes",
    "peak cached": "peak_cached_nbytes",
    "waste": "waste_nbytes",
    "peak waste": "peak_waste_nbytes",
}


def rows_of(found: Stats) -> list[tuple[str, Counters]]:
    """Each pool, and the sum of each kind that has more than one; then those that copies
    go through."""
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
    """Whatever the table leaves out and is not 0."""
    told = {*COLUMNS.values(), "allocation_count", "hit_count"}
    rest = {n: getattr(pool, n) for n in _COUNTERS if n not in told}
    return "".join(f"\n  {name} {value}" for name, value in rest.items() if value)
