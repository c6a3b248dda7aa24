# SPDX-License-Identifier: Apache-2.0
"""CuPy's arrays in cumem's pools: device or managed memory, and page-locked memory.

Device memory is taken on CuPy's current stream of its current device and stays in the
order of that stream: dropped, it is used again on the stream at once, and on others after
an event. Page-locked memory, whose copies nobody tells of, is used again only when all
work of the devices is done that was under way when it was dropped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import cupy

from cumem import _core
from cumem.base import errors
from cumem.buffers.arguments import wrong_type
from cumem.integrations.serving import Pools, lend, made_as, need_gpu
from cumem.pools.pool import Pool, default_pool

__all__ = ["OutOfMemoryError", "PinnedOutOfMemoryError", "disable", "enable", "using"]

_KINDS = ("device", "managed")
#: CuPy's streams that are known at a time, and kept alive.
_STREAMS_MAX = 64


if TYPE_CHECKING:
    # CuPy's errors are compiled and have no types, and CuPy itself may be missing where
    # types are checked. A base class that is unknown would make the whole class unknown,
    # so that type checkers are told the builtin class that each of the two extends.
    _OutOfMemory = MemoryError
    _RuntimeError = RuntimeError
else:
    _OutOfMemory = cupy.cuda.memory.OutOfMemoryError
    _RuntimeError = cupy.cuda.runtime.CUDARuntimeError


class OutOfMemoryError(errors.OutOfMemoryError, _OutOfMemory):
    """cumem's `OutOfMemoryError`, which CuPy's own handlers catch as well."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        """As Exception does: CuPy's counts on attributes that only CuPy sets."""
        return Exception.__reduce__(self)

    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)


class PinnedOutOfMemoryError(errors.OutOfMemoryError, _RuntimeError):
    """The same for page-locked memory: CuPy then copies without it, and warns."""

    #: ``cudaErrorMemoryAllocation``, by which CuPy tells it from other errors.
    status = 2

    def __reduce__(self) -> str | tuple[Any, ...]:
        """As that of `OutOfMemoryError`."""
        return Exception.__reduce__(self)

    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)


#: CuPy's stream; whether its device is to be asked for; how to allocate, on what, and the
#: device.
_Place = tuple[Any, bool, Callable[[int, Any], _core.Buffer], Any, int]


class _Places:
    """Where memory comes from while a stream is CuPy's current one."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._get_device = cupy.cuda.runtime.getDevice
        self._is_single = cupy.cuda.runtime.getDeviceCount() == 1
        self._known: dict[tuple[int, int], _Place] = {}

    def find(self, stream: Any) -> _Place:
        device = self._get_device()
        place = self._known.get((stream.ptr, device))
        if place is None or place[0] is not stream:
            if len(self._known) >= _STREAMS_MAX:
                self._known.clear()
            place = self._make(stream, device)
            self._known[stream.ptr, device] = place
        return place

    def _make(self, stream: Any, device: int) -> _Place:
        own = getattr(stream, "_foreign_stream_ref", None)
        if not isinstance(own, _core.Stream):  # it was not cumem's before
            # Of a stream that CuPy made its end alone destroys it: the pools rely on
            # that, so that a block that is dropped on it needs no event. The handle 2 is
            # another stream in each thread, which ends with the thread.
            is_made = own is None and type(stream) is cupy.cuda.Stream
            lasts = is_made and stream.ptr > 2
            own = _core._wrap_stream(stream, device, lasts)
        # CuPy's default streams are one object for all devices.
        asks = not self._is_single and stream.device_id < 0
        return stream, asks, self._pools.of(device).allocate, own, device


def _make_allocator(pools: Pools) -> Callable[[int], Any]:
    """What CuPy calls for each array: made of as few steps as can be."""
    get_stream = cupy.cuda.get_current_stream
    get_device = cupy.cuda.runtime.getDevice
    pointer = cupy.cuda.MemoryPointer
    memory = cupy.cuda.UnownedMemory
    places = _Places(pools)
    find = places.find
    last = find(get_stream())
    lent = lend(pools.of(last[4]))

    def allocate(nbytes: int) -> Any:
        nonlocal last
        stream = get_stream()
        known, asks, take, own, device = last
        if known is not stream or (asks and get_device() != device):
            last = _, _, take, own, device = find(stream)
        try:
            buffer = take(nbytes, own)
        except errors.OutOfMemoryError as error:
            raise made_as(error, OutOfMemoryError) from None
        # the owner keeps the memory, and shutdown() away from it
        return pointer(memory(buffer.ptr, nbytes, (buffer, lent), device), 0)

    return allocate


def _make_pinned_allocator(pool: Pool) -> Callable[[int], Any]:
    pointer = cupy.cuda.PinnedMemoryPointer

    def allocate(nbytes: int) -> Any:
        try:
            buffer: Any = pool.allocate(nbytes)
        except errors.OutOfMemoryError as error:
            raise made_as(error, PinnedOutOfMemoryError) from None
        # Copies of it are not told of: an export waits for them all, and keeps
        # shutdown() away while the memory lives.
        memoryview(buffer).release()
        return pointer(buffer, 0)

    return allocate


class _Enabled:
    """What CuPy allocates with, and what it did before."""

    def __init__(self, allocate: Any, pinned: Any) -> None:
        self.allocate = allocate
        self.before = cupy.cuda.get_allocator()
        self.has_pinned = pinned is not None
        self.pinned_before = _read_pinned_allocator() if self.has_pinned else None
        cupy.cuda.set_allocator(allocate)
        if self.has_pinned:
            cupy.cuda.set_pinned_memory_allocator(pinned)

    def undo(self) -> None:
        if cupy.cuda.get_allocator() is not self.allocate:
            raise RuntimeError(
                "CuPy's allocator is another one by now, set by someone else since "
                "enable() or by a `using` block that is open here: end that first"
            )
        cupy.cuda.set_allocator(self.before)
        if self.has_pinned:
            cupy.cuda.set_pinned_memory_allocator(self.pinned_before)
            # CuPy looks then at what it holds until copies are done, and lets it go
            cupy.cuda.alloc_pinned_memory(0)


def _read_pinned_allocator() -> Any:
    """CuPy's allocator of page-locked memory, which only its memory tells; None: raw."""
    memory = cupy.cuda.alloc_pinned_memory(1).mem
    if type(memory) is cupy.cuda.PinnedMemory:
        return None
    pool = getattr(memory, "pool", lambda: None)()
    if pool is None:
        raise RuntimeError(
            "enable: CuPy's page-locked memory comes from an allocator that cannot be "
            "put back by disable(): pass pinned=False"
        )
    return pool.malloc


_lock = threading.Lock()
_enabled: _Enabled | None = None


def enable(
    pool: object = None, *, kind: str | None = None, pinned: bool | Pool = True
) -> None:
    """Have CuPy take its memory from cumem's pools, in the whole process.

    Arrays that exist stay where they are. A second call replaces the first.

    Parameters
    ----------
    pool : Pool or iterable of Pool, optional
        Where arrays come from; several for several devices. Default: the default pool
        of each device.
    kind : {'device', 'managed'}, optional
        Of what memory; default: the pool's, else device memory.
    pinned : bool or Pool
        Whether CuPy's page-locked memory (``cupyx.empty_pinned``, and what it stages
        copies in) comes from the default pool of pinned memory as well, or from this
        one.

    Raises
    ------
    TypeError
        If `pool` or `pinned` is of another type.
    ValueError
        If the pools are of another kind, or two are of one device; by CuPy, inside of
        ``cupy.cuda.using_allocator`` or `using`.
    RuntimeError
        If memory is emulated, CuPy's allocator of page-locked memory is one that could
        not be put back, or CuPy's allocator is another one than the last call set;
        nothing is done then.

    Notes
    -----
    `shutdown` raises BufferError until `disable`, and while arrays from the pools live.
    """
    global _enabled
    need_gpu("CuPy")
    pools = Pools(pool, kind, _KINDS, "CuPy")
    pinned_pool = _read_pinned(pinned)
    allocate = _make_allocator(pools)
    allocate_pinned = (
        None if pinned_pool is None else _make_pinned_allocator(pinned_pool)
    )
    with _lock:
        if _enabled is not None:
            if allocate_pinned is not None and not _enabled.has_pinned:
                _read_pinned_allocator()  # what is refused is so while nothing is done
            _enabled.undo()
            _enabled = None
        _enabled = _Enabled(allocate, allocate_pinned)


def _read_pinned(pinned: bool | Pool) -> Pool | None:
    if isinstance(pinned, bool):
        if not pinned:
            return None
        return default_pool("pinned")  # of the current device, which may be CuPy's
    if not isinstance(pinned, Pool):
        raise wrong_type("pinned", "a bool or a Pool", pinned)
    if pinned.kind != "pinned":
        raise ValueError(f"pinned is a pool of {pinned.kind} memory")
    return pinned


def disable() -> None:
    """Give CuPy back the allocators that it had before `enable`.

    Arrays from cumem's pools stay valid, and their memory goes back to the pools. Does
    nothing where nothing is enabled.

    Raises
    ------
    RuntimeError
        If CuPy's allocator is another one by now; nothing is done then.
    """
    global _enabled
    with _lock:
        if _enabled is not None:
            _enabled.undo()
            _enabled = None


@contextlib.contextmanager
def using(pool: object = None, *, kind: str | None = None) -> Iterator[None]:
    """Have CuPy take the arrays of this thread from cumem's pools, in a ``with`` block.

    Arrays may outlive the block.

    Parameters
    ----------
    pool, kind
        As for `enable`.

    Raises
    ------
    TypeError, ValueError
        As `enable` does for `pool` and `kind`.
    RuntimeError
        If memory is emulated.

    Notes
    -----
    CuPy's page-locked memory is the same in all threads: `enable` is for that.
    """
    need_gpu("CuPy")
    allocate = _make_allocator(Pools(pool, kind, _KINDS, "CuPy"))
    with cupy.cuda.using_allocator(allocate):
        yield
