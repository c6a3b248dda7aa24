# SPDX-License-Identifier: Apache-2.0
"""How much memory there is, limits for a while, and what is called when it runs short."""

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
from cumem.pools.limits import enter, leave, lock, put, read_limit, settled
from cumem.pools.statistics import stats

_P = ParamSpec("_P")
_T = TypeVar("_T")


@found_in("cumem.types")
class DeviceMemory(tuple[int, int], Answer):
    """Memory of a device: the pair ``free, total``, and what of it is ours.

    Attributes
    ----------
    reserved, live : int
        Bytes of the device that the pools of buffers hold, and of these in buffers.
    staging : int
        Bytes of the device that cumem holds for copies to go through, beside those.

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
        """Bytes that nobody uses, as the driver says."""
        return self[0]

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return self[1]

    @property
    def outside(self) -> int:
        """Bytes in use outside cumem: other libraries and processes, CUDA itself."""
        return max(0, self.total - self.free - self.reserved - self.staging)

    def __getnewargs__(self) -> tuple[int, int, int, int, int]:
        return (self.free, self.total, self.reserved, self.live, self.staging)

    def __repr__(self) -> str:
        names = ("free", "total", "reserved", "live", "staging", "outside")
        return _shown(self, names)


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class HostMemory(Answer):
    """Memory of the host, in bytes.

    Attributes
    ----------
    total : int or None
        Of the machine.
    available : int or None
        What this process may still have now: of the machine, in its control group, under
        ``ulimit -v``.
    cgroup_limit : int or None
        What its control group allows; None for no limit.
    memlock_limit : int or None
        ``RLIMIT_MEMLOCK``; None for no limit. CUDA does not obey it.
    pinned_limit : int or None
        What `get_limit` says of pinned memory.
    reserved, live : int
        Pinned and mapped memory that the pools of buffers hold, and of this in buffers.
    staging : int
        Page-locked memory that cumem holds for copies to go through, beside that.

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
    """Sizes with their units; None stays, of what there is not."""
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
    """Memory of a device as its driver sees it, or of the host.

    Parameters
    ----------
    device : Device, int or str, optional
        cumem's current device by default; ``"host"`` for the host.

    Returns
    -------
    DeviceMemory or HostMemory
        The former is a pair of free and total bytes, all processes together.

    Raises
    ------
    ValueError
        If the device does not exist.
    CudaError
        If the driver cannot answer.

    Notes
    -----
    Creates a context on the device if there is none.

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
    """Bytes that pools of buffers hold, of these in buffers, and for copies."""
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
    """Limit how much memory of a kind cumem holds, cached memory included.

    An allocation that would need more raises `OutOfMemoryError` once nothing that is cached
    or freed can be given back. What the pools keep for reuse above the limit goes back to
    the driver at once. Buffers that live stay; while they alone are more than the limit
    nothing is handed out, also of what is freed meanwhile.

    Parameters
    ----------
    kind : str
        One that `empty` takes, such as ``"pinned"``.
    limit : int, str or None
        Bytes, a text such as ``"4GiB"``, a share such as ``"50%"`` of the device's memory
        (managed, device) or of the memory that the process may use (pinned, mapped), or
        None for no limit.
    device : Device, int or str, optional
        Whose memory of kind managed or device; default: every device, each by itself.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the limit cannot be read, a kind or device does not exist, or a device is given
        for memory of the host.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    At first device and managed memory have no limit, and pinned and mapped memory together
    may be half of what the process may use (the machine's memory, or less where its control
    group says so): locking more can bring a machine down. The two count together against
    that half, or against the larger of their limits where one is set higher.
    ``CUMEM_LIMIT_PINNED``, ``_MAPPED``, ``_MANAGED`` and ``_DEVICE`` are read when the
    driver is opened. `shutdown` forgets what was set.

    Within a `limit` block the limit of the block stays in force: what is set counts when
    the last block has ended.

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
    """How much memory of a kind cumem may hold.

    Parameters
    ----------
    kind : str
        One that `empty` takes, such as ``"pinned"``.
    device : Device, int or str, optional
        For managed and device memory; default: cumem's current one.

    Returns
    -------
    int or None
        Bytes; None for no limit.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        As `set_limit`.
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
    return settled(_core._limit(kind, index), index)


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

    The limit holds for the whole process, in place of what `set_limit` said. Where blocks
    overlap, nested or of several threads, that of the block entered last among those still
    open holds, higher or lower; they may end in any order. When all have ended, what
    `set_limit` said last holds, also where it was called meanwhile. `shutdown` ends no
    block.

    Parameters
    ----------
    kind, limit, device
        As in `set_limit`. They are read at once; shares become bytes.

    Returns
    -------
    LimitBlock
        For one ``with`` block, which a second one refuses with RuntimeError; or a
        decorator of functions, which refuses those of coroutines and generators with
        TypeError: they run after their call.

    Raises
    ------
    TypeError, ValueError, CudaError
        As `set_limit`.

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
    """A callback that `on_out_of_memory` installed; in a ``with`` block until its end.

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
        """Call it no more; doing it twice is not an error."""
        with contextlib.suppress(ValueError):
            _core._out_of_memory_callbacks.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<cumem.OutOfMemoryHook {self._callback!r}>"


@hinting
def on_out_of_memory(callback: Callable[[str, int, int], object]) -> OutOfMemoryHook:
    """Have a function called when memory runs short, before an allocation fails.

    It may drop buffers, or have other libraries give back what they cache. The allocation
    is tried again after each callback; once it succeeds the rest are not called. An
    allocation inside of a callback calls no callback.

    Parameters
    ----------
    callback : callable
        Called with the kind, the device's index and the number of bytes asked for, in the
        thread that allocates, in the order of installation. An exception of it goes to
        ``sys.unraisablehook``; `KeyboardInterrupt` and `SystemExit` end the allocation.

    Returns
    -------
    OutOfMemoryHook
        Its ``remove()`` ends this.

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
