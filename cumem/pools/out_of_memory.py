# SPDX-License-Identifier: Apache-2.0
"""Tries to make room when memory is short, and writes the texts of OutOfMemoryError.

The extension first waits for memory in flight and trims pools, and then calls `relieve`.
This calls the user's callbacks and collects garbage, and tries the allocation again after
each step. If all of this fails, `explain` fills the error with the numbers of the pool, the
limits and the device, and with advice that follows from the numbers.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from cumem import _core
from cumem.base import ranks
from cumem.base.errors import CudaError, OutOfMemoryError
from cumem.base.kinds import PAGE_LOCKED, is_on_device
from cumem.base.units import format_nbytes
from cumem.pools.statistics import PoolStats, pool_stats

_T = TypeVar("_T")

_LIMIT_MET = "CM_ELIMIT"

#: Remembers for each thread whether it is calling callbacks. Callbacks and finalisers may
#: allocate and run out of memory themselves, and no callbacks are called for that.
_depth = threading.local()


def relieve(attempt: object, trimmed: int, released: int, awaited: int) -> list[str]:
    """Try to make an allocation succeed, and return the list of what was tried.

    The extension calls this after the allocation has failed and it has trimmed other pools:
    `trimmed` of them, which gave back `released` bytes. Before that it has waited for the
    transfers of `awaited` buffers that were dropped or freed.
    """
    tried = ["waited for memory in flight and trimmed the pool"]
    if trimmed:
        pools = "pool" if trimmed == 1 else "pools"
        tried.append(f"trimmed {trimmed} other {pools}, {released} bytes")
    if awaited:
        buffers = "buffer" if awaited == 1 else "buffers"
        tried.append(f"waited for the transfers of {awaited} dropped {buffers}")
    _relieve(tried, lambda callback: bool(_core._retry(attempt, callback)))
    return tried


def _relieve(
    tried: list[str], retry: Callable[[Callable[..., object] | None], bool]
) -> None:
    """Call `retry` with each callback, and then, after a garbage collection, with None.

    This ends as soon as `retry` returns True, which means that no more tries are needed.
    The steps that were taken are added to `tried`.
    """
    if getattr(_depth, "is_inside", False):
        return
    _depth.is_inside = True
    try:
        callbacks = tuple(_core._out_of_memory_callbacks)
        for index, callback in enumerate(callbacks, 1):
            tried.append(f"called callback {index} of {len(callbacks)}")
            if retry(callback):
                return
        gc.collect()
        tried.append("collected garbage")
        retry(None)
    finally:
        _depth.is_inside = False


class _Unraised:
    """Passes an exception of a callback to ``sys.unraisablehook`` when it is dropped.

    Python code has no other way to call the hook for an exception of its own.
    """

    def __init__(self, callback: object, error: Exception) -> None:
        self._callback = callback
        self._error = error

    def __del__(self) -> None:
        raise self._error

    def __repr__(self) -> str:
        return repr(self._callback)


def describe_spill(
    count: int,
    nbytes: int,
    gone: int,
    kept: int,
    busy: int,
    small: int,
    is_capturing: int,
    is_contended: int,
    failure: Exception | None,
) -> str:
    """Return a text about the buffers that a pool has spilled, and those that it could not.

    `count` buffers with `nbytes` bytes were spilled. The next four arguments are the
    numbers of buffers that could not be spilled, by the reason. `failure` is the error with
    which bytes could not be saved, or None.
    """
    buffers = "buffer" if count == 1 else "buffers"
    text = f"spilled {count} {buffers}, {format_nbytes(nbytes)}, to pinned memory"
    reasons = {
        "exported, captured, or with an address that was read": gone,
        "kept by keep()": kept,
        "busy": busy,
        "too small": small,
    }
    found = [f"{number} {why}" for why, number in reasons.items() if number]
    if found:
        text += f" (not those that are {', '.join(found)})"
    if is_capturing:
        text += " (nothing moves while a stream is being captured)"
    if is_contended:
        text += (
            " (others used them again each time: call keep() for buffers that are always "
            "in use, or use the pool in fewer threads at once)"
        )
    if failure is not None:
        text += f" ({str(failure).splitlines()[0]})"
    return text


def lock_pages(lock: Callable[[], _T], kind: str, device: int) -> _T:
    """Return the result of `lock`, which page-locks memory for `register`.

    If there is no room for more page-locked memory, callbacks are called and garbage is
    collected, as for an allocation, and `lock` is tried again.

    Raises
    ------
    OutOfMemoryError
        The last error of `lock`, which itself trims the pools first.
    """
    try:
        return lock()
    except OutOfMemoryError as error:
        failure = error
    found: list[_T] = []
    tried = ["trimmed the pools of page-locked memory"]

    def retry(callback: Callable[..., object] | None) -> bool:
        nonlocal failure
        if callback is not None:
            try:
                callback(kind, device, failure.requested or 0)
            except Exception as error:
                # The object is dropped at once, which reports the error.
                _Unraised(callback, error)
        try:
            found.append(lock())
        except OutOfMemoryError as error:
            failure = error
            return False
        return True

    _relieve(tried, retry)
    if found:
        return found[0]
    failure.tried = tuple(tried)
    failure.args = (f"{failure.args[0]}. Tried: {'; '.join(tried)}",)
    try:
        raise failure
    finally:
        # Otherwise the traceback would keep the error, and with it the memory to lock.
        del failure


@dataclasses.dataclass
class _Numbers:
    """The numbers of an error. All but the first three are attributes of the error too."""

    stats: PoolStats
    smallest_limit: int | None  #: the smallest limit, even if another has less left
    left: int | None  #: how much is left of `limit`
    requested: int
    kind: str
    device: int
    tried: tuple[str, ...]
    limit: int | None  #: the limit of which the least is left
    #: The bytes of other pools under `limit`, or without one, of other pools of this kind.
    others: int
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
    """Give the error its numbers, its advice and the end of its text.

    An error that is not about memory only gets a note with the requested size. `budgets`
    are pairs of a limit and the bytes that are used of it. The pool's own limit comes
    first, and then the others that the pool counts against.
    """
    if not isinstance(error, OutOfMemoryError):
        what = f"{requested} bytes of {kind} memory for device {device}"
        error.add_note(f"while allocating {what}")
        if is_refused(error):
            advice = advise_on_host(
                requested, _core._host_memory().available_nbytes, True
            )
            error.add_note(f"Advice: {advice}")
        return
    pools = {facts.address: facts for facts in _core._pools()}
    stats = pool_stats(pools[pool]) if pool in pools else PoolStats()
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
        numbers.available = _core._host_memory().available_nbytes
    else:
        _ask_driver(numbers, [pool_stats(facts) for facts in pools.values()])
    advice = _advise(numbers, error)
    for field in dataclasses.fields(numbers)[3:]:
        setattr(error, field.name, getattr(numbers, field.name))
    error.live = stats.live_nbytes
    error.cached = stats.cached_nbytes
    error.in_flight = stats.in_flight_nbytes
    error.largest_free = stats.largest_free_nbytes
    error.fragmentation = stats.fragmentation
    error.advice = advice
    facts = [*_describe(numbers), f"Advice: {advice}"]
    error.args = ("\n  ".join([str(error.args[0]), *facts]),)


def refuse_locking(
    error: CudaError,
    kind: _core._Kind,
    device: int,
    requested: int,
    budgets: list[tuple[int | None, int]],
) -> NoReturn:
    """Raise the error of `register`, with its numbers, its advice and the end of its text.

    `budgets` are pairs of a limit and the bytes that are used of it, first for pinned
    memory and then for all page-locked memory.
    """
    if not isinstance(error, OutOfMemoryError):
        advice = advise_on_host(requested, _core._host_memory().available_nbytes, True)
        error.add_note(f"Advice: {advice}")
        raise error
    held = dict.fromkeys(("locked", "live", "reserved"), 0)
    for facts in _core._pools():
        pool = pool_stats(facts)
        if pool.name == "registered":
            held["locked"] += pool.live_nbytes
        elif pool.kind in PAGE_LOCKED:
            held["live"] += pool.live_nbytes
            held["reserved"] += pool.reserved_nbytes
    bounded = [budget for budget in budgets if budget[0] is not None]
    limit, used = min(
        bounded, key=lambda each: (each[0] or 0) - each[1], default=(None, 0)
    )
    error.requested, error.kind, error.device = requested, kind, device
    error.limit, error.others = limit, held["locked"] + held["reserved"]
    error.live, error.cached = held["live"], held["reserved"] - held["live"]
    error.available = _core._host_memory().available_nbytes
    if error.name == _LIMIT_MET:
        error.advice = (
            f"{_size(used)} of the limit of {_size(limit)} are in use, "
            f"{_size(held['locked'])} by register() and {_size(held['live'])} by "
            "buffers: close registrations or drop buffers that are no longer needed, "
            'register and copy in pieces, or raise it with cumem.set_limit("pinned", ...)'
        )
    else:
        error.advice = advise_on_host(requested, error.available, is_refused(error))
    error.args = (
        f"{error.args[0]}; asked to page-lock {_size(requested)} ({requested} bytes) of "
        f"ordinary memory on device {device}; limit {_limit(limit, kind)}. "
        f"Advice: {error.advice}",
    )
    raise error


def _ask_driver(numbers: _Numbers, pools: list[PoolStats]) -> None:
    """Add the numbers of the device, or nothing if the driver raises an error itself."""
    try:
        free, total = _core._device_memory(numbers.device)
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
        return advise_on_host(numbers.requested, numbers.available, is_refused(error))
    return _advise_on_device(numbers)


def is_refused(error: BaseException) -> bool:
    """Return whether the driver refused to page-lock memory, or this much of it."""
    return (
        getattr(error, "call", None) in _LOCKING_CALLS
        and getattr(error, "name", None) in _REFUSALS
    )


#: The calls of the CUDA runtime that lock pages, and the errors with which they refuse.
_LOCKING_CALLS = ("cudaHostRegister", "cudaHostAlloc")
_REFUSALS = ("cudaErrorMemoryAllocation", "cudaErrorNotSupported")


def advise_on_host(requested: int, available: int | None, was_refused: bool) -> str:
    """Return advice for memory that cannot be page-locked."""
    if was_refused and (available is None or available >= requested):
        return (
            f"the driver refuses to page-lock {_size(requested)} although the host has "
            f"{_size(available)} free: some systems allow little page-locked memory (WSL "
            "about half of Windows' memory or less, confidential computing, containers "
            "of gVisor) or none. Use ordinary memory, which cumem copies through a small "
            "page-locked ring, lock less at a time, or raise the system's allowance "
            "(memory= in .wslconfig)"
        )
    return (
        f"only {_size(available)} can be had from this machine or container now: "
        "page-lock less at a time by copying in pieces, or give the container more memory"
    )


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
            "free_all_blocks()), or see in nvidia-smi which other process has it"
        )
    if stats.cached_nbytes >= numbers.requested:
        return (
            f"{_size(stats.cached_nbytes)} are free, but in pieces with buffers between "
            "them: allocate large buffers first, or give short-lived ones a Pool of "
            "their own"
        )
    if numbers.others > stats.live_nbytes:
        return (
            f"other pools hold {_size(numbers.others)}: drop buffers of theirs that are no "
            "longer needed (cumem.stats() lists the pools), or work in smaller pieces"
        )
    return (
        f"buffers hold {_size(stats.live_nbytes)} of this pool: drop those that are no "
        "longer needed, or work in smaller pieces"
    )


# -- the text --------------------------------------------------------------------------


def _size(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_nbytes(nbytes)


def _limit(nbytes: int | None, kind: str) -> str:
    """Return the size of a limit, and the reason for it if it is a rank's share."""
    share = ranks.at_opening
    text = _size(nbytes)
    if kind not in PAGE_LOCKED or share is None or not share.is_of_rank:
        return text
    return f"{text} ({share.reason})" if nbytes == share.default_limit else text


def _describe(numbers: _Numbers) -> list[str]:
    """Return a line for each place at which memory may be short."""
    stats = numbers.stats
    against = "" if numbers.limit is None else " against the same limit"
    lines = [
        f"asked for {_size(numbers.requested)} ({numbers.requested} bytes) of "
        f"{numbers.kind} memory on device {numbers.device}; limit "
        f"{_limit(numbers.limit, numbers.kind)}",
        f"the pool has {_size(stats.live_nbytes)} live, {_size(stats.cached_nbytes)} "
        f"cached, {_size(stats.in_flight_nbytes)} in flight, largest free "
        f"{_size(stats.largest_free_nbytes)}, fragmentation {stats.fragmentation:.0%}",
        f"other pools hold {_size(numbers.others)}{against}",
    ]
    if numbers.driver_free is not None:
        lines.append(
            f"the driver has {_size(numbers.driver_free)} free of "
            f"{_size(numbers.driver_total)}, {_size(numbers.outside)} are held outside "
            "cumem"
        )
    elif numbers.available is not None:
        lines.append(f"the host can still give {_size(numbers.available)}")
    return [*lines, f"Tried: {'; '.join(numbers.tried)}"]
