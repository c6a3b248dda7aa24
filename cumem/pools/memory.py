# SPDX-License-Identifier: Apache-2.0
"""Tells amounts of memory, limits them, and calls back when memory runs short."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import resource
from collections.abc import Callable, Iterable
from typing import (
    Any,
    Literal,
    ParamSpec,
    Self,
    SupportsIndex,
    TypeVar,
    overload,
)

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.kinds import PAGE_LOCKED, is_on_device
from cumem.base.places import found_in
from cumem.base.units import fit, format_nbytes
from cumem.buffers.arguments import hinting
from cumem.devices.device import Device
from cumem.pools.limits import enter, leave, limit_in_bytes, lock, put, read_limit
from cumem.pools.statistics import stats

_P = ParamSpec("_P")
_T = TypeVar("_T")


@found_in("cumem.types")
class DeviceMemory(tuple[int, int], Answer):
    """The memory of a device: the pair ``free, total``, and the bytes that cumem holds.

    Attributes
    ----------
    reserved, live : int
        The bytes that the pools of buffers hold on the device, and the part of these that
        is in live buffers.
    staging : int
        The bytes on the device that cumem holds in addition, as intermediate memory for
        copies.

    Examples
    --------
    >>> info = cumem.memory_info()
    >>> free, total = info
    >>> 0 < free <= total, info.live <= info.reserved
    (True, True)
    """

    reserved: int
    live: int
    staging: int

    _keys = (
        *("free_nbytes", "total_nbytes", "reserved_nbytes", "live_nbytes"),
        *("staging_nbytes", "outside_nbytes"),
    )

    def __new__(
        cls, free: int, total: int, reserved: int, live: int, staging: int = 0
    ) -> Self:
        self = super().__new__(cls, (free, total))
        self.reserved = reserved
        self.live = live
        self.staging = staging
        return self

    @property
    def free(self) -> int:
        """The free bytes, according to the driver."""
        return self[0]

    @property
    def total(self) -> int:
        """The bytes that the device has."""
        return self[1]

    @property
    def outside(self) -> int:
        """The bytes used outside cumem, by other libraries and processes and by CUDA."""
        return max(0, self.total - self.free - self.reserved - self.staging)

    def __getnewargs__(self) -> tuple[int, int, int, int, int]:
        return (self.free, self.total, self.reserved, self.live, self.staging)

    def __repr__(self) -> str:
        names = ("free", "total", "reserved", "live", "staging", "outside")
        return _shown(self, names)


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class HostMemory(Answer):
    """The memory of the host, in bytes.

    Attributes
    ----------
    total : int or None
        The memory of the machine.
    available : int or None
        The memory that this process can still get now, within its control group and
        ``ulimit -v``.
    cgroup_limit : int or None
        The memory limit of the process's control group; None if there is none.
    memlock_limit : int or None
        ``RLIMIT_MEMLOCK``, which CUDA does not obey; None if there is none.
    pinned_limit : int or None
        The limit of pinned memory, as `get_limit` returns it.
    reserved, live : int
        The pinned and mapped memory that the pools of buffers hold, and the part of it that
        is in live buffers.
    staging : int
        The page-locked memory that cumem holds in addition, as intermediate memory for
        copies.

    Examples
    --------
    >>> host = cumem.memory_info("host")
    >>> host.live <= host.reserved
    True
    """

    total: int | None
    available: int | None
    cgroup_limit: int | None
    memlock_limit: int | None
    pinned_limit: int | None
    reserved: int
    live: int
    staging: int = 0

    _keys = (
        *("total_nbytes", "available_nbytes", "cgroup_limit_nbytes"),
        *("memlock_limit_nbytes", "pinned_limit_nbytes", "reserved_nbytes"),
        *("live_nbytes", "staging_nbytes"),
    )

    def __repr__(self) -> str:
        return _shown(self, [each.name for each in dataclasses.fields(self)])


def _shown(memory: DeviceMemory | HostMemory, names: Iterable[str]) -> str:
    """Return the repr, with units; values that do not exist are shown as None."""
    sizes = [(name, getattr(memory, name)) for name in names]
    said = (
        f"{name}={size if size is None else format_nbytes(size)}"
        for name, size in sizes
    )
    return fit(f"{type(memory).__name__}({', '.join(said)})")


@overload
def memory_info(device: Literal["host"]) -> HostMemory: ...
@overload
def memory_info(device: str) -> DeviceMemory | HostMemory: ...
@overload
def memory_info(device: SupportsIndex | None = None) -> DeviceMemory: ...
@hinting
def memory_info(device: object = None) -> DeviceMemory | HostMemory:
    """Return the memory of a device as its driver sees it, or the memory of the host.

    Parameters
    ----------
    device : Device, int or str, optional
        The device, by default cumem's current one; or ``"host"`` for the host.

    Returns
    -------
    DeviceMemory or HostMemory
        For a device, the pair of its free and its total bytes, in which the memory of all
        processes counts; see `DeviceMemory`.

    Raises
    ------
    ValueError
        If the device does not exist.
    CudaError
        If the driver cannot answer.

    Notes
    -----
    If the device has no context yet, this creates one.

    Examples
    --------
    >>> info = cumem.memory_info()
    >>> 0 < info.free <= info.total
    True
    """
    if isinstance(device, str) and device == "host":
        return _host_memory()
    where: Any = device
    unit = _core.current_device() if device is None else Device(where)
    free, total = unit.memory_info()
    index = unit.index
    held = _held(lambda kind, where: is_on_device(kind) and where == index)
    return DeviceMemory(free, total, *held)


def _held(wanted: Callable[[str, int], bool]) -> tuple[int, int, int]:
    """Return the bytes that pools of buffers hold, those in live buffers, and staging."""
    pools = [pool for pool in stats().pools if wanted(pool.kind, pool.device)]
    own = [pool for pool in pools if not pool.is_staging]
    return (
        sum(pool.reserved_nbytes for pool in own),
        sum(pool.live_nbytes for pool in own),
        sum(pool.reserved_nbytes for pool in pools if pool.is_staging),
    )


def _host_memory() -> HostMemory:
    limit_nbytes = get_limit("pinned")
    host = _core._host_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if soft == resource.RLIM_INFINITY else soft
    held = _held(lambda kind, _: kind in PAGE_LOCKED)
    return HostMemory(
        host.total_nbytes,
        host.available_nbytes,
        host.cgroup_nbytes,
        memlock,
        limit_nbytes,
        *held,
    )


# -- limits ----------------------------------------------------------------------------


@hinting
def set_limit(
    kind: _core._Kind, limit: int | str | None, device: object = None
) -> None:
    """Limit how much memory of a kind cumem holds, including cached memory.

    An allocation that would need more raises `OutOfMemoryError`, after all cached and freed
    memory was given back. Memory that pools keep for reuse above a new limit is given back
    at once. Live buffers stay. As long as they alone exceed the limit, every allocation
    fails.

    Parameters
    ----------
    kind : str
        A kind that `empty` takes, such as ``"pinned"``.
    limit : int, str or None
        The bytes, a text such as ``"4GiB"``, or None for no limit. A text such as ``"50%"``
        means a share of the device's memory for managed and device memory, and of the
        memory that the process may use for pinned and mapped memory.
    device : Device, int or str, optional
        The device, for managed or device memory; by default each device gets this limit.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the limit cannot be read, the kind or device does not exist, or a device is given
        for host memory.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    By default, device and managed memory have no limit. Pinned and mapped memory together
    may take half of the memory that the process may use (that of the machine, or less in a
    control group with a limit), because locking more can bring a machine down. If a
    launcher such as torchrun, MPI or Slurm says that there are several ranks on this host,
    this half is divided by their number, but limits that are set are not. If the limit of
    either is set to more than the default, both together may take as much as the larger
    limit. ``CUMEM_LIMIT_PINNED``, ``_MAPPED``, ``_MANAGED`` and ``_DEVICE`` are read when
    the driver is opened. `shutdown` removes the limits that were set.

    In a block of `limit`, the limit of the block stays in force. The limit that is set here
    takes effect when the last block has ended.

    Examples
    --------
    >>> cumem.set_limit("device", "1GiB")  # or "50%"
    >>> cumem.get_limit("device")
    1073741824
    >>> cumem.set_limit("device", None)  # no limit
    """
    limits = read_limit(kind, limit, device)
    with lock:
        for index, nbytes in limits:
            put(kind, index, nbytes)


@hinting
def get_limit(kind: _core._Kind, device: object = None) -> int | None:
    """Return how much memory of a kind cumem may hold.

    Parameters
    ----------
    kind : str
        A kind that `empty` takes, such as ``"pinned"``.
    device : Device, int or str, optional
        The device, for managed and device memory; by default cumem's current one.

    Returns
    -------
    int or None
        The bytes, or None if there is no limit.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        As for `set_limit`.
    CudaError
        If the driver cannot be opened.

    Examples
    --------
    >>> with cumem.limit("device", "1GiB"):
    ...     cumem.get_limit("device")
    1073741824
    """
    places = read_limit(kind, None, device)
    index = places[0][0] if device is not None else _core.current_device().index
    return limit_in_bytes(_core._limit(kind, index), index)


@found_in("cumem.types")
class LimitBlock:
    """A limit for a ``with`` block, or for each call of a function that it decorates.

    Examples
    --------
    >>> with cumem.limit("device", "64MiB"):
    ...     cumem.get_limit("device")
    67108864
    """

    _lock = lock

    def __init__(self, kind: str, limits: list[tuple[int, int | None]]) -> None:
        self._kind = kind
        self._limits = limits
        self._state = "new"

    def __enter__(self) -> None:
        with self._lock:
            if self._state != "new":
                raise RuntimeError(
                    f"this limit is {self._state}: each with block takes a new "
                    "cumem.limit(...)"
                )
            self._state = "in use"
            for device, nbytes in self._limits:
                enter(self, self._kind, device, nbytes)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            if self._state != "in use":
                raise RuntimeError("this limit was not entered, or has ended")
            self._state = "over"
            for device, _ in self._limits:
                leave(self, self._kind, device)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        if not callable(function):
            given = type(function).__name__
            raise TypeError(f"function must be callable, not {given}")
        if any(_runs_later(one) for one in (function, type(function).__call__)):
            raise TypeError(
                "a call of a coroutine or generator function ends before its body begins: "
                'write "with cumem.limit(...):" in its body'
            )

        @functools.wraps(function)
        def limited(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with LimitBlock(self._kind, self._limits):
                return function(*args, **kwargs)

        return limited

    def __repr__(self) -> str:
        return f"<cumem.limit of {self._kind} memory, {self._state}>"


def _runs_later(function: object) -> bool:
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    )


@hinting
def limit(kind: Any, limit: int | str | None, device: object = None) -> LimitBlock:
    """Limit how much memory of a kind cumem holds, within a ``with`` block.

    The limit applies to the whole process, in place of that of `set_limit`. If blocks
    overlap, nested or in several threads, the limit of the block that was entered last
    among those still open applies, whether it is higher or lower. They may end in any
    order. When all have ended, the limit that `set_limit` set last applies, even if it was
    called while a block was open. `shutdown` ends no block.

    Parameters
    ----------
    kind, limit, device
        As for `set_limit`. They are read when `limit` is called, and shares become bytes
        then.

    Returns
    -------
    LimitBlock
        An object for one ``with`` block; a second block raises a RuntimeError. It also
        works as a decorator of functions. For coroutine and generator functions, whose
        bodies run after the call has returned, it raises a TypeError.

    Raises
    ------
    TypeError, ValueError, CudaError
        As for `set_limit`.

    Examples
    --------
    >>> with cumem.limit("device", "1MiB"):
    ...     try:
    ...         cumem.empty_device(1 << 26, "u1")
    ...     except cumem.OutOfMemoryError:
    ...         print("over the limit")
    over the limit
    """
    return LimitBlock(kind, read_limit(kind, limit, device))


# -- callbacks -------------------------------------------------------------------------


@found_in("cumem.types")
class OutOfMemoryHook:
    """A callback of `on_out_of_memory`; the end of a ``with`` block removes it.

    Examples
    --------
    >>> cache = {"old": cumem.empty_device(1 << 20)}
    >>> hook = cumem.on_out_of_memory(lambda kind, device, nbytes: cache.clear())
    >>> hook.remove()
    """

    def __init__(self, callback: Callable[[str, int, int], object]) -> None:
        self._callback = callback

    def __call__(self, kind: str, device: int, nbytes: int) -> None:
        self._callback(kind, device, nbytes)

    def remove(self) -> None:
        """Remove the callback, which is not called again; a second removal does nothing."""
        with contextlib.suppress(ValueError):
            _core._out_of_memory_callbacks.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<cumem.types.OutOfMemoryHook {self._callback!r}>"


@hinting
def on_out_of_memory(callback: Callable[[str, int, int], object]) -> OutOfMemoryHook:
    """Call a function when memory runs short, before an allocation fails.

    The function may drop buffers, or make other libraries give back what they cache. The
    allocation is tried again after each callback, and as soon as it succeeds the others
    are not called. An allocation inside a callback calls no callbacks.

    Parameters
    ----------
    callback : callable
        The function. It is called with the kind, the device's index and the number of bytes
        asked for, in the thread that allocates. Several callbacks are called in the order
        in which they were installed. Exceptions go to ``sys.unraisablehook``, except that
        `KeyboardInterrupt` and `SystemExit` end the allocation.

    Returns
    -------
    OutOfMemoryHook
        An object whose ``remove()`` removes the callback.

    Raises
    ------
    TypeError
        If `callback` cannot be called.

    Examples
    --------
    >>> cache = {"old": cumem.empty_device(1 << 20)}
    >>> with cumem.on_out_of_memory(lambda kind, device, nbytes: cache.clear()):
    ...     buf = cumem.empty_device(1 << 20)
    """
    if not callable(callback):
        raise TypeError(f"callback must be callable, not {type(callback).__name__}")
    hook = OutOfMemoryHook(callback)
    _core._out_of_memory_callbacks.append(hook)
    return hook
