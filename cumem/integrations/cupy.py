# SPDX-License-Identifier: Apache-2.0
"""Lets CuPy allocate device, managed and page-locked memory from cumem's pools.

Device memory is allocated on CuPy's current stream of its current device, and ordered by
that stream: when it is dropped, it can be reused at once on this stream, and after an
event on others. cumem is not told about copies of page-locked memory, so that memory is
reused only after all work that its devices had when it was dropped.
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
#: The number of CuPy's streams that are remembered, and so kept alive, at a time.
_STREAMS_MAX = 64


if TYPE_CHECKING:
    # CuPy's errors are compiled and have no types, and CuPy itself may be missing where
    # types are checked. A type checker would know nothing about a class with an unknown
    # base class. So type checkers see the builtin class that each of the two errors
    # extends.
    _OutOfMemory = MemoryError
    _RuntimeError = RuntimeError
else:
    _OutOfMemory = cupy.cuda.memory.OutOfMemoryError
    _RuntimeError = cupy.cuda.runtime.CUDARuntimeError


class OutOfMemoryError(errors.OutOfMemoryError, _OutOfMemory):
    """cumem's `OutOfMemoryError`, which handlers of CuPy's own error also catch."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the error as Exception does; CuPy's method needs other attributes."""
        return Exception.__reduce__(self)

    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)


class PinnedOutOfMemoryError(errors.OutOfMemoryError, _RuntimeError):
    """cumem's `OutOfMemoryError` for page-locked memory, in the form that CuPy expects.

    CuPy catches it, warns, and copies without page-locked memory.
    """

    #: ``cudaErrorMemoryAllocation``, by which CuPy recognises the error.
    status = 2

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the error as `OutOfMemoryError` here does."""
        return Exception.__reduce__(self)

    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)


#: Where memory comes from: CuPy's stream, whether its device must be looked up each time,
#: the function that allocates, the stream to pass to it, and the device.
_Place = tuple[Any, bool, Callable[[int, Any], _core.Buffer], Any, int]


class _Places:
    """Finds out where memory comes from when a stream is CuPy's current one."""

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
        if not isinstance(own, _core.Stream):  # the stream did not come from cumem
            # A stream that CuPy made lasts as long as CuPy's stream object. The pools rely
            # on that: a block that is dropped on such a stream needs no event. The handle 2
            # means another stream in each thread, which ends with the thread.
            is_made = own is None and type(stream) is cupy.cuda.Stream
            lasts = is_made and stream.ptr > 2
            own = _core._wrap_stream(stream, device, lasts)
        # CuPy's default stream is one object for all devices.
        asks = not self._is_single and stream.device_id < 0
        return stream, asks, self._pools.of(device).allocate, own, device


def _make_allocator(pools: Pools) -> Callable[[int], Any]:
    """Make the function that CuPy calls for each array, with as few steps as possible."""
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
        # The owner `(buffer, lent)` keeps the memory alive, and makes shutdown() refuse to
        # run.
        return pointer(memory(buffer.ptr, nbytes, (buffer, lent), device), 0)

    return allocate


def _make_pinned_allocator(pool: Pool) -> Callable[[int], Any]:
    pointer = cupy.cuda.PinnedMemoryPointer

    def allocate(nbytes: int) -> Any:
        try:
            buffer: Any = pool.allocate(nbytes)
        except errors.OutOfMemoryError as error:
            raise made_as(error, PinnedOutOfMemoryError) from None
        # cumem is not told about copies of this memory. The memoryview marks the buffer as
        # exported, so that its memory is reused only after all work of its devices, and
        # shutdown() refuses to run as long as the memory lives.
        memoryview(buffer).release()
        return pointer(buffer, 0)

    return allocate


class _Enabled:
    """The allocators that CuPy uses, and those that it used before."""

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
            # This allocation makes CuPy release the memory of copies that are done.
            cupy.cuda.alloc_pinned_memory(0)


def _read_pinned_allocator() -> Any:
    """Return CuPy's allocator of page-locked memory, or None if it is CUDA's own.

    CuPy has no function for this. So this allocates a piece of memory, whose type shows
    where it comes from.
    """
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
    """Let CuPy allocate from cumem's pools, in the whole process.

    Arrays that exist stay where they are. A second call replaces the first.

    Parameters
    ----------
    pool : Pool or iterable of Pool, optional
        The pools of arrays, one for each device; by default the default pool of each
        device.
    kind : {'device', 'managed'}, optional
        The kind of memory; by default the pool's, or else device memory.
    pinned : bool or Pool
        Whether CuPy's page-locked memory (``cupyx.empty_pinned``, and the stages of its
        copies) comes from the default pool of pinned memory too. A pool is used in place of
        that pool.

    Raises
    ------
    TypeError
        If `pool` or `pinned` is of another type.
    ValueError
        If the pools are of another kind, or two are of the same device. CuPy raises it
        inside ``cupy.cuda.using_allocator`` or `using`.
    RuntimeError
        If memory is emulated, if CuPy's allocator of page-locked memory could not be
        restored later, or if somebody has replaced the allocator that the last call set.
        Nothing is changed then.

    Notes
    -----
    Until `disable`, and as long as arrays from the pools live, `shutdown` raises a
    BufferError.
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
                _read_pinned_allocator()  # raises its error before anything is changed
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
    """Restore the allocators that CuPy had before `enable`.

    Arrays from cumem's pools stay valid, and their memory goes back to the pools. If
    nothing is enabled, this does nothing.

    Raises
    ------
    RuntimeError
        If somebody has replaced CuPy's allocator meanwhile. Nothing is changed then.
    """
    global _enabled
    with _lock:
        if _enabled is not None:
            _enabled.undo()
            _enabled = None


@contextlib.contextmanager
def using(pool: object = None, *, kind: str | None = None) -> Iterator[None]:
    """Let CuPy allocate the arrays of this thread from cumem's pools, in a ``with`` block.

    Arrays may outlive the block.

    Parameters
    ----------
    pool, kind
        As for `enable`.

    Raises
    ------
    TypeError, ValueError
        As for `enable`, about `pool` and `kind`.
    RuntimeError
        If memory is emulated.

    Notes
    -----
    CuPy has one allocator of page-locked memory for all threads, which `enable` sets.
    """
    need_gpu("CuPy")
    allocate = _make_allocator(Pools(pool, kind, _KINDS, "CuPy"))
    with cupy.cuda.using_allocator(allocate):
        yield
