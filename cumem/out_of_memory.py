# SPDX-License-Identifier: Apache-2.0
"""What is tried before an OutOfMemoryError, and what that tells: the numbers, what they
say, and what to do about it."""

from __future__ import annotations

import dataclasses
import gc
import threading

from cumem import _core
from cumem.errors import CudaError, OutOfMemoryError
from cumem.extension import driver
from cumem.kinds import PAGE_LOCKED, is_on_device
from cumem.pool_stats import PoolStats, pool_stats
from cumem.units import format_nbytes

_LIMIT_MET = "CM_ELIMIT"

#: Callbacks and finalisers may allocate, and run out of memory as well: then nothing is
#: called a second time.
_depth = threading.local()


def relieve(attempt: object, trimmed: int, released: int) -> list[str]:
    """By the extension, when an allocation has failed and so many other pools were
    trimmed, which have released so many bytes. Answers what was tried."""
    tried = ["waited for memory in flight and trimmed the pool"]
    if trimmed:
        pools = "pool" if trimmed == 1 else "pools"
        tried.append(f"trimmed {trimmed} other {pools}, {released} bytes")
    if getattr(_depth, "is_inside", False):
        return tried
    _depth.is_inside = True
    try:
        callbacks = tuple(_core._out_of_memory_callbacks)
        for index, callback in enumerate(callbacks, 1):
            tried.append(f"called callback {index} of {len(callbacks)}")
            if _core._retry(attempt, callback):
                return tried
        gc.collect()
        tried.append("collected garbage")
        _core._retry(attempt, None)
    finally:
        _depth.is_inside = False
    return tried


@dataclasses.dataclass
class _Numbers:
    """Fields but the first three are attributes of the error."""

    stats: PoolStats
    smallest_limit: int | None  #: of the limits, however much of each is in use
    left: int | None  #: of `limit`
    requested: int
    kind: str
    device: int
    tried: tuple[str, ...]
    limit: int | None  #: the one that allows least
    others: int  #: held by other pools against that limit, or of that kind
    driver_free: int | None = None
    driver_total: int | None = None
    outside: int | None = None
    available: int | None = None


def explain(
    error: Exception,
    pool: int,
    kind: str,
    device: int,
    requested: int,
    budgets: list[tuple[int | None, int]],
    tried: list[str] | None,
) -> None:
    """Give the error its numbers, its advice and the end of its text; one that is not of
    memory says what was asked for.

    `budgets` are limit and use of the pool itself, then of what it counts against as well.
    """
    if not isinstance(error, OutOfMemoryError):
        what = f"{requested} bytes of {kind} memory for device {device}"
        error.add_note(f"while allocating {what}")
        return
    rows = {address: row for address, _, row in _core._pools()}
    stats = pool_stats(*rows[pool]) if pool in rows else PoolStats()
    limits = [limit for limit, _ in budgets if limit is not None]
    left = [max(0, limit - used) for limit, used in budgets if limit is not None]
    bounded = [budget for budget in budgets if budget[0] is not None]
    limit, used = bounded[left.index(min(left))] if left else budgets[-1]
    numbers = _Numbers(
        stats=stats,
        smallest_limit=min(limits, default=None),
        left=min(left, default=None),
        requested=requested,
        kind=kind,
        device=device,
        tried=tuple(tried or ()),
        limit=limit,
        others=max(0, used - budgets[0][1]),
    )
    if kind in PAGE_LOCKED:
        numbers.available = _core._host_memory()[1]
    else:
        _ask_driver(numbers, [pool_stats(*row) for row in rows.values()])
    advice = _advise(numbers, error)
    for field in dataclasses.fields(numbers)[3:]:
        setattr(error, field.name, getattr(numbers, field.name))
    error.live = stats.live_nbytes
    error.cached = stats.cached_nbytes
    error.in_flight = stats.in_flight_nbytes
    error.largest_free = stats.largest_free_nbytes
    error.fragmentation = stats.fragmentation
    error.advice = advice
    error.args = (f"{error.args[0]}; {_describe(numbers)}. Advice: {advice}",)


def _ask_driver(numbers: _Numbers, pools: list[PoolStats]) -> None:
    """What cannot be read is left out: the error matters more."""
    try:
        free, total = driver.memory_info(numbers.device)
    except CudaError:
        return
    ours = sum(
        pool.reserved_nbytes
        for pool in pools
        if is_on_device(pool.kind) and pool.device == numbers.device
    )
    numbers.driver_free, numbers.driver_total = free, total
    numbers.outside = max(0, total - free - ours)


# -- the advice ------------------------------------------------------------------------


def _advise(numbers: _Numbers, error: OutOfMemoryError) -> str:
    if error.name == _LIMIT_MET:
        return _advise_on_limit(numbers, error.arg or 0)
    if numbers.kind in PAGE_LOCKED:
        return (
            f"only {_size(numbers.available)} can be had from this machine or container "
            "now: page-lock less at a time by copying in pieces, or give the container "
            "more memory"
        )
    return _advise_on_device(numbers)


def _advise_on_limit(numbers: _Numbers, piece: int) -> str:
    stats, smallest = numbers.stats, numbers.smallest_limit
    raise_it = f'raise it with cumem.set_limit("{numbers.kind}", ...)'
    limit = _size(numbers.limit)
    if smallest is not None and numbers.requested > smallest:
        return (
            f"more than the limit of {_size(smallest)} can never be had: ask for less, "
            f"work in pieces, or {raise_it} or the pool's limit"
        )
    if numbers.left is None or numbers.left >= numbers.requested:
        return (
            f"memory is taken in pieces, here of {_size(piece)}, and that passes the "
            f"limit of {limit}: {raise_it} or the pool's limit"
        )
    if numbers.others > stats.live_nbytes:
        return (
            f"other pools hold {_size(numbers.others)} and buffers of this one "
            f"{_size(stats.live_nbytes)}, and the limit is {limit} for all of them: drop "
            f"buffers of the others (cumem.stats() lists the pools), or {raise_it}"
        )
    return (
        f"buffers of this pool hold {_size(stats.live_nbytes)} and the limit is {limit}: "
        f"drop buffers, or {raise_it} or the pool's limit"
    )


def _advise_on_device(numbers: _Numbers) -> str:
    stats, total, outside = numbers.stats, numbers.driver_total, numbers.outside
    if total is not None and numbers.requested > total:
        return (
            f"the device has {_size(total)} in all: work in pieces, or use managed "
            "memory, which may be larger than the device"
        )
    if outside is not None and outside > stats.live_nbytes:
        return (
            f"{_size(outside)} of the device are held outside cumem: let the other "
            "libraries give back what they cache (torch.cuda.empty_cache(), CuPy's "
            "free_all_blocks()), or look with nvidia-smi which other process has it"
        )
    if stats.cached_nbytes >= numbers.requested:
        return (
            f"{_size(stats.cached_nbytes)} are free but in pieces that buffers in between "
            "keep apart: allocate large buffers first, or give short-lived ones a Pool "
            "of their own"
        )
    if numbers.others > stats.live_nbytes:
        return (
            f"other pools hold {_size(numbers.others)}: drop buffers of theirs that are "
            "done with (cumem.stats() lists the pools), or work in smaller pieces"
        )
    return (
        f"buffers hold {_size(stats.live_nbytes)} of this pool: drop those that are done "
        "with, or work in smaller pieces"
    )


# -- the text --------------------------------------------------------------------------


def _size(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_nbytes(nbytes)


def _describe(numbers: _Numbers) -> str:
    stats = numbers.stats
    beyond = ""
    if numbers.driver_free is not None:
        beyond = (
            f", the driver has {_size(numbers.driver_free)} free of "
            f"{_size(numbers.driver_total)}, {_size(numbers.outside)} are held outside "
            "cumem"
        )
    elif numbers.available is not None:
        beyond = f", the host can still give {_size(numbers.available)}"
    against = "" if numbers.limit is None else " against the same limit"
    return (
        f"asked for {_size(numbers.requested)} ({numbers.requested} bytes) of "
        f"{numbers.kind} memory on device {numbers.device}; limit {_size(numbers.limit)}; "
        f"the pool has {_size(stats.live_nbytes)} live, {_size(stats.cached_nbytes)} "
        f"cached, {_size(stats.in_flight_nbytes)} in flight, largest free "
        f"{_size(stats.largest_free_nbytes)}, fragmentation {stats.fragmentation:.0%}, "
        f"other pools hold {_size(numbers.others)}{against}{beyond}. "
        f"Tried: {'; '.join(numbers.tried)}"
    )
