# SPDX-License-Identifier: Apache-2.0
"""What only programs with PyTorch need: its memory from cumem's pools, and offloading.

`offload_activations` keeps what autograd saves in pinned memory instead of on the device,
and `offload` and `restore` move whole modules and state dicts there and back.
`PinnedStager` stages distributed checkpoints.

PyTorch's CUDA memory may come from cumem's pools, so that both share limits and statistics.
There are three ways, none of which changes what PyTorch computes:

- `using` serves what one thread allocates in a ``with`` block, from a pool or from a
  region that can sleep. It uses a ``torch.cuda.MemPool`` (`mem_pool`) whose segments are
  cumem's blocks; PyTorch cuts and caches them.
- `enable` does the same for all threads of the process, including those of autograd, until
  `disable`.
- `replace_allocator` makes every tensor's memory a block of a cumem pool, from the
  beginning of the process to its end.

Any number of pools serve PyTorch at once by the first two ways. For each of them there is a
`_Lender`, which has the MemPools over the pool. The extension gives each pool a desk: a
function of its own, which PyTorch calls for segments (``csrc/python/pool/lending.c``).
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import inspect
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cumem import _core
from cumem.base.errors import OutOfMemoryError
from cumem.integrations.serving import check_pool, need_gpu
from cumem.integrations.torch_checkpoints import PinnedStager
from cumem.pools.memory import memory_info, set_limit
from cumem.pools.pool import Pool, default_pool, trim
from cumem.pools.region import Region, region_of
from cumem.transfers.offloading import (
    ActivationOffload,
    offload,
    offload_activations,
    restore,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ActivationOffload",
    "PinnedStager",
    "disable",
    "empty_cache",
    "enable",
    "mem_pool",
    "offload",
    "offload_activations",
    "replace_allocator",
    "restore",
    "using",
]

#: Since this version, a captured graph inside `enable` is served from the graph's own pool
#: rather than from the first that applies (https://github.com/pytorch/pytorch/pull/168382).
_NESTING: Final = (2, 11)

_lock = threading.RLock()
_served: dict[int, Pool] = {}  # the pool that serves if none is given, by device
_lenders: list[_Lender] = []
_enabled: dict[int, _Enabled] = {}  # what enable() began, by device
_kept: list[Any] = []  # objects whose addresses C++ code has, so they must not be freed


class _Lender:
    """A pool that lends segments to PyTorch, and the MemPools over it.

    Parameters
    ----------
    pool : Pool
        The pool, which may end before the lender does.
    """

    __slots__ = ("idle", "index", "pool", "pools_by_id", "region")

    def __init__(self, pool: Pool) -> None:
        region = region_of(pool)
        self.pool = weakref.ref(pool)
        self.region = None if region is None else weakref.ref(region)
        self.index = pool.device.index
        #: MemPools of `using` outside any block.
        self.idle: list[Any] = []
        #: Weak references to all MemPools over the pool, by their ids. A MemPool may end
        #: before its segments do.
        self.pools_by_id: dict[Any, weakref.ref[Any]] = {}

    def has_ended(self) -> bool:
        """Return whether the lender's pool was closed or dropped."""
        pool = self.pool()
        return pool is None or pool.closed

    def find_region(self) -> Region | None:
        """Return the region that the lender's pool belongs to, or None."""
        return None if self.region is None else self.region()


#: The lenders of MemPools that exist.
_lender_of: weakref.WeakKeyDictionary[Any, _Lender] = weakref.WeakKeyDictionary()


#: The MemPools of graphs that were captured into regions.
_pool_of_graph: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class _Enabled(NamedTuple):
    mem_pool: Any
    pool: Pool
    region: Region | None


def mem_pool(pool: Pool | Region | None = None, *, device: object = None) -> Any:
    """Return a ``torch.cuda.MemPool`` whose segments are blocks of a cumem pool.

    Parameters
    ----------
    pool : Pool or Region, optional
        A pool of device memory, or a region; by default the pool that was last given for
        the device, or the device's default pool if none was.
    device : torch.device, Device, int or str, optional
        The device; by default the pool's device, or else PyTorch's current one.

    Returns
    -------
    torch.cuda.MemPool
        A pool for ``torch.cuda.use_mem_pool`` and `using`.

    Raises
    ------
    RuntimeError
        If there is no GPU, if PyTorch has no CUDA or cannot take allocators, if its
        allocator was replaced, or if 64 pools serve PyTorch already.
    TypeError
        If an argument has the wrong type.
    ValueError
        If the pool is closed, is of another kind or device, or has segments of
        ``cudaMalloc``. For a part of such a segment, PyTorch would send other processes a
        wrong address.

    Notes
    -----
    If memory is short, PyTorch raises its own ``torch.OutOfMemoryError``. Callbacks of
    `on_out_of_memory` are not called, because PyTorch holds a lock that a callback may
    need. Segments go back to cumem when the ``MemPool`` ends.

    Enter the ``MemPool`` of a region by `using`, which keeps the region awake meanwhile.
    `Region.sleep` does not know of ``torch.cuda.use_mem_pool``.

    Examples
    --------
    >>> import cumem.integrations.torch  # doctest: +SKIP
    >>> pool = cumem.integrations.torch.mem_pool()  # doctest: +SKIP
    >>> with torch.cuda.use_mem_pool(pool):  # doctest: +SKIP
    ...     x = torch.empty(1 << 20, device="cuda")
    """
    torch = _torch()
    _refuse_replaced()
    index = _index(torch, device, pool)
    if not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no pools of one thread: it is too old for "
            "all but replace_allocator()"
        )
    chosen = _choose(pool, index)
    if not chosen.device.attributes().get("virtual_memory_management"):
        raise RuntimeError(
            f"device {index} cannot map memory piece by piece, and for memory of "
            "cudaMalloc PyTorch would send other processes the wrong address: use "
            "replace_allocator()"
        )
    with _lock:
        _notice_devices(torch)
        return _make(torch, _find_lender(torch, chosen), chosen)


@contextlib.contextmanager
def using(pool: Any = None, *, device: object = None) -> Iterator[Any]:
    """Take the memory of CUDA tensors that this thread allocates in the block from a pool.

    Other threads get memory as before, including those of autograd, in which ``backward()``
    runs. `enable` serves all threads.

    Parameters
    ----------
    pool : Region, Pool or torch.cuda.MemPool, optional
        A region or a pool as for `mem_pool`, or a ``MemPool`` that it returned. The
        ``MemPool`` of a region or a pool is kept for the next block.
    device : torch.device, Device, int or str, optional
        The device; by default the pool's device, or else PyTorch's current one.

    Yields
    ------
    torch.cuda.MemPool

    Raises
    ------
    RuntimeError
        As for `mem_pool`; also if the region sleeps.
    TypeError, ValueError
        As for `mem_pool`.

    Notes
    -----
    Blocks may be nested, and several threads may be in blocks of one region. As long as a
    thread is in such a block, `Region.sleep` raises a `BufferError`.

    Examples
    --------
    >>> import cumem.integrations.torch  # doctest: +SKIP
    >>> region = cumem.Region("weights")  # doctest: +SKIP
    >>> with cumem.integrations.torch.using(region):  # doctest: +SKIP
    ...     x = torch.empty(1 << 20, device="cuda")
    >>> region.sleep()  # doctest: +SKIP
    """
    torch = _torch()
    _refuse_replaced()
    is_kept = not isinstance(pool, torch.cuda.MemPool)
    lender = None if is_kept else _lender_of.get(pool)
    if lender is not None and device is None:
        index = lender.index
    else:
        index = _index(torch, device, pool)
    chosen = _choose(pool, index) if is_kept else None
    region = _region(chosen) if lender is None else lender.find_region()
    with _inside(region):
        if is_kept:
            lender, used = _take_idle(torch, chosen)
        else:
            used = pool
        try:
            with torch.cuda.use_mem_pool(used, index):
                yield used
        except torch.OutOfMemoryError as error:
            source = None if lender is None else lender.pool()
            if source is not None and not source.closed:
                error.add_note(f"Of cumem's pool {_describe(source)}.")
            raise
        finally:
            if is_kept:
                _give_idle(lender, used)


def enable(pool: Pool | Region | None = None, *, device: object = None) -> None:
    """Take the memory of a device's CUDA tensors from a pool, in all threads.

    Parameters
    ----------
    pool : Pool or Region, optional
        As for `mem_pool`. A region cannot sleep until `disable`.
    device : torch.device, Device, int or str, optional
        The device; by default the pool's device, or else PyTorch's current one. Other
        devices stay as they are.

    Raises
    ------
    RuntimeError
        As for `mem_pool`; also if PyTorch is older than 2.11, a stream is capturing, or the
        region sleeps.
    TypeError, ValueError
        As for `mem_pool`.

    Notes
    -----
    Tensors that exist stay where they are. Captured graphs keep PyTorch's own pools.

    While this is enabled, PyTorch does not reuse memory for which ``Tensor.record_stream``
    was called, and asks for more memory rather than giving its cache back. Call
    `empty_cache` to have both done. No other ``torch.cuda.MemPool`` may end meanwhile,
    because PyTorch would then abort the process.

    Examples
    --------
    >>> import cumem.integrations.torch  # doctest: +SKIP
    >>> cumem.integrations.torch.enable()  # doctest: +SKIP
    >>> x = torch.empty(1 << 20, device="cuda")  # doctest: +SKIP
    >>> cumem.integrations.torch.disable()  # doctest: +SKIP
    """
    torch = _torch()
    _refuse_replaced()
    index = _index(torch, device, pool)
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if version < _NESTING:
        raise RuntimeError(
            f"enable() needs PyTorch 2.11, not {torch.__version__}, which would let the "
            "memory of captured graphs be used elsewhere. using() and "
            "replace_allocator() serve it"
        )
    with _lock:
        _refuse_capture(torch)
        current = _enabled.get(index)
        if current is not None and pool is None and not current.pool.closed:
            return
        del current  # it holds the MemPool that _stop() ends
        chosen = _choose(pool, index)
        region = _region(chosen)
        with _inside(region):
            fresh = _Enabled(mem_pool(chosen, device=index), chosen, region)
            _disable(torch, index)
            if region is not None:
                region._enter_guest()  # until _disable()
            try:
                _start(torch, index, fresh)
            finally:
                _leave_if_stopped(index, region)


def disable(device: object = None) -> None:
    """End what `enable` began.

    Tensors keep their memory. It goes back to cumem's pool after they end, when PyTorch
    gives it back, for instance at ``torch.cuda.empty_cache()``. If nothing is enabled, this
    does nothing.

    Parameters
    ----------
    device : torch.device, Device, int or str, optional
        The device; by default all devices.

    Raises
    ------
    RuntimeError
        If a stream is capturing.
    """
    if not _enabled:
        return
    torch = _torch()
    which = [*_enabled] if device is None else [_index(torch, device)]
    with _lock:
        _refuse_capture(torch)
        for index in which:
            _disable(torch, index)


def empty_cache() -> None:
    """Make PyTorch give cumem's memory in its cache back to the pools.

    ``torch.cuda.empty_cache()`` does not do this as long as a ``MemPool`` lives. Tensors
    keep their memory. `cumem.trim` can then give the memory of the pools to the driver.

    Raises
    ------
    RuntimeError
        If a stream is capturing.

    Notes
    -----
    **Blocks** until the work on cached memory that several streams used is done.

    If the pool or region of `enable` was closed, this ends what `enable` began, as
    `disable` does.
    """
    torch = _torch()
    with _lock, contextlib.ExitStack() as again:
        _refuse_capture(torch)
        _sweep(torch)
        for lender in _lenders:
            _drop_idle(torch, lender)
        # No variable here may hold a MemPool, since they have to end before others are in
        # use.
        for index, (pool, region) in [(i, e[1:]) for i, e in _enabled.items()]:
            again.callback(_start_again, torch, index, pool, region)
            _stop(torch, index)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def replace_allocator() -> None:
    """Make every CUDA tensor's memory a block of cumem's default pools, for the process.

    Call it before PyTorch allocates anything on a GPU. The first call compiles a small
    library against the installed PyTorch, which takes seconds, and keeps it in
    ``~/.cache/cumem`` (``XDG_CACHE_HOME``). A second call does nothing.

    Raises
    ------
    RuntimeError
        If there is no GPU, if PyTorch has no CUDA or uses its own allocator already, or if
        there is no C++ compiler.

    Notes
    -----
    If memory is short, everything is tried that `empty` tries, including callbacks of
    `on_out_of_memory`, before ``torch.OutOfMemoryError`` is raised.

    ``Tensor.record_stream``, ``torch.cuda.empty_cache``,
    ``torch.cuda.set_per_process_memory_fraction`` and captured graphs work.
    ``torch.cuda.memory_allocated`` and everything else that asks PyTorch's own allocator
    raises an error; use `stats` instead. Tensors cannot be sent to other processes. After
    `shutdown` PyTorch is served from new pools, and the memory that it had is never given
    back.

    Examples
    --------
    >>> import cumem.integrations.torch  # doctest: +SKIP
    >>> cumem.integrations.torch.replace_allocator()  # doctest: +SKIP
    >>> x = torch.empty(1 << 20, device="cuda")  # doctest: +SKIP
    """
    torch = _torch()
    with _lock:
        if _is_replaced():
            return
        if torch.cuda.is_initialized():
            raise RuntimeError(_TOO_LATE)
        shim = ctypes.CDLL(str(_build(torch)))
        library = ctypes.CDLL(_core.__file__)
        allocator = torch._C._cuda_customAllocator(
            _address(shim.cumem_torch_alloc), _address(shim.cumem_torch_free)
        )
        allocator.set_record_stream_fn(_address(shim.cumem_torch_record_stream))
        allocator.set_begin_allocate_to_pool(_address(shim.cumem_torch_begin_pool))
        allocator.set_end_allocate_to_pool_fn(_address(shim.cumem_torch_end_pool))
        allocator.set_release_pool(_address(shim.cumem_torch_release_pool))
        functions = _Functions(
            *map(_address, (library.cumem_lend, library.cumem_lend_segment)),
            *map(_address, (library.cumem_take_back, library.cumem_note_stream)),
            _Relieve(_relieve),
        )
        callbacks = (_Reset(_trim), _Fraction(_set_fraction))
        allocator.set_reset_fn(_address(callbacks[0]))
        allocator.set_memory_fraction_fn(_address(callbacks[1]))
        shim.cumem_torch_begin(ctypes.byref(functions))
        try:
            torch._C._cuda_changeCurrentAllocator(allocator)
        except RuntimeError as error:
            raise RuntimeError(_TOO_LATE) from error
        atexit.register(shim.cumem_torch_end)
        _kept.extend((shim, allocator, functions, callbacks))


@atexit.register
def _at_exit() -> None:
    """End everything before PyTorch does.

    If a MemPool ends while another is in use, PyTorch aborts the process.
    """
    disable()
    _pool_of_graph.clear()
    for lender in _lenders:
        if lender.idle:
            _drop_idle(_torch(), lender)


_TOO_LATE: Final = (
    "PyTorch has begun to use its own allocator: call replace_allocator() before anything "
    "that touches CUDA, or use enable(), which can begin at any time"
)

# -- PyTorch, devices and pools -----------------------------------------------------------


def _torch() -> Any:
    """Return PyTorch, or raise a RuntimeError if it cannot use cumem's memory."""
    need_gpu("PyTorch")
    torch = importlib.import_module("torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise RuntimeError(
            f"PyTorch {torch.__version__} takes no allocator: it was built without CUDA"
        )
    return torch


def _is_replaced() -> bool:
    return bool(_kept)


def _refuse_replaced() -> None:
    if _is_replaced():
        raise RuntimeError(
            "PyTorch's allocator was replaced by replace_allocator(): all its memory is "
            "cumem's, and it has no MemPool of its own any more"
        )


def _index(torch: Any, device: Any, pool: object = None) -> int:
    """Return the index of a device; PyTorch and cumem number devices in the same way."""
    if device is None and isinstance(pool, (Pool, Region)):
        return pool.device.index
    if isinstance(device, torch.device) and device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, not {device}")
    torch.cuda.init()  # PyTorch has no current device before this
    return _core._device(device, "device", True).index


def _choose(pool: Any, index: int) -> Pool:
    """Return the pool for a device, which also becomes the device's default here."""
    if pool is None and _is_served(index):
        return _served[index]
    chosen = _check(pool.pool if isinstance(pool, Region) else pool, index)
    if _region(chosen) is None:
        _served[index] = chosen
    return chosen


def _region(pool: Pool | None) -> Region | None:
    return None if pool is None else region_of(pool)


@contextlib.contextmanager
def _inside(region: Region | None) -> Iterator[None]:
    """Keep a region awake in the block, or refuse it if it sleeps."""
    if region is None:
        yield
        return
    region._enter_guest()
    try:
        yield
    finally:
        region._leave_guest()


@contextlib.contextmanager
def _capturing(
    region: Region, graph: Any, pool: Any, pools: dict[Any, Any], **options: Any
) -> Iterator[None]:
    """Capture a graph into a region, for `SleepMode.cuda_graph`.

    Parameters
    ----------
    region : Region
        The region from which the graph takes memory.
    graph : torch.cuda.CUDAGraph
        The graph.
    pool : tuple of int or None
        The handle of the memory that the graph shares with others, as
        ``torch.cuda.graph`` takes it.
    pools : dict
        The MemPools that stand for such handles, by region and handle. This function adds
        to it. A graph that shares its memory with no other keeps its MemPool itself.
    **options
        Further arguments for ``torch.cuda.graph``.
    """
    torch = _torch()
    with _inside(region):
        found = pools.get((region, pool)) or _find_mem_pool(region, pool)
        if found is None:
            found = mem_pool(region)
            if pool is not None:
                pools[region, pool] = found
        # While this graph lives, another may be captured into the same memory.
        _pool_of_graph[graph] = found
        with torch.cuda.graph(graph, pool=found.id, **options):
            yield


def _find_mem_pool(region: Region, name: Any) -> Any:
    """Return the MemPool over a region that has this id, or None."""
    for lender in _lenders:
        if lender.find_region() is region and name in lender.pools_by_id:
            return lender.pools_by_id[name]()
    return None


def _check(pool: Any, index: int) -> Pool:
    if pool is None:
        found: Pool = default_pool("device", index)
        return found
    chosen = check_pool(pool, "a Pool, a Region or None", "device")
    if chosen.device.index != index:
        raise ValueError(
            f"pool is of device {chosen.device.index}, not of device {index}"
        )
    if chosen.segments != "auto":
        raise ValueError(
            "pool must have segments='auto': for segments of cudaMalloc, PyTorch would "
            "send other processes the address of the whole where it means a part"
        )
    return chosen


def _refuse_capture(torch: Any) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured: what serves PyTorch stays until it is done"
        )


def _notice_devices(torch: Any) -> None:
    """Let all devices that PyTorch uses by now reach cumem's memory."""
    for other in range(torch.cuda.device_count()):
        if other not in _served and torch._C._cuda_hasPrimaryContext(other):
            memory_info(other)  # makes cumem notice the context


def _is_served(index: int) -> bool:
    """Return whether a pool serves the device, which none does after `shutdown`."""
    return index in _served and not _served[index].closed


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# -- segments for PyTorch's own allocator -------------------------------------------------


def _segment_allocator(torch: Any, desk: int) -> Any:
    """Return the allocator through which PyTorch calls the extension, without the GIL.

    It is kept, also for the next pool with this desk, because segments of a MemPool that
    has ended still go back through it.
    """
    if desk not in _segment_allocators:
        plug = torch.cuda.memory.CUDAPluggableAllocator
        found = plug(_core.__file__, f"cumem_desk_{desk:02o}", "cumem_take_back")
        _segment_allocators[desk] = found
    return _segment_allocators[desk].allocator()


_segment_allocators: dict[int, Any] = {}


def _make(torch: Any, lender: _Lender, pool: Pool) -> Any:
    """Make a MemPool whose segments come from the lender's pool."""
    desk = _core._open_desk(pool)
    if desk is None:
        raise RuntimeError(
            "64 pools serve PyTorch, which is the most: drop regions, pools and MemPools "
            "that are not needed, and call empty_cache()"
        )
    try:
        with torch.cuda.device(lender.index):
            made = torch.cuda.MemPool(_segment_allocator(torch, desk))
    except BaseException:
        _core._close_desk(desk)
        raise
    weakref.finalize(made, _core._close_desk, desk).atexit = False
    _lender_of[made] = lender
    lender.pools_by_id[made.id] = weakref.ref(made)
    region = lender.find_region()
    if region is not None:
        region._find_spare = functools.partial(_find_spare, torch, lender)
    return made


def _find_spare(torch: Any, lender: _Lender) -> list[tuple[int, int]]:
    """Return the parts of a pool's segments that PyTorch uses for nothing now.

    These lie between tensors. A tensor that has ended counts as used while a stream for
    which it was recorded (``Tensor.record_stream``) still works on it. No lock is taken,
    because `Region.sleep` holds one.
    """
    spare: set[tuple[int, int]] = set()
    with _without_collections():
        for name, mem_pool in [*lender.pools_by_id.items()]:
            parts = _spare_parts(_snapshot(torch, name))
            if parts is None and mem_pool() is None:
                lender.pools_by_id.pop(name, None)
            spare.update(parts or ())
    return sorted(spare)


def _spare_parts(segments: list[Any]) -> list[tuple[int, int]] | None:
    """Return the address and length of each unused part, or None without segments."""
    parts = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            nbytes = block["size"]
            if block["state"] == "inactive":
                parts.append((address, nbytes))
            address += nbytes
    return parts if segments else None


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from collecting garbage in the block.

    A snapshot has a dict for each block of PyTorch's. So many new objects make Python look
    through all objects of the program for garbage, which takes longer than the snapshot
    does, and all of these dicts are gone at the end of the block.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _snapshot(torch: Any, name: Any) -> list[Any]:
    """Return the segments of a MemPool, or all segments if PyTorch cannot select them."""
    known = inspect.signature(torch.cuda.memory_snapshot).parameters
    wanted = {"mempool_id": name, "include_traces": False}
    found: list[Any] = torch.cuda.memory_snapshot(
        **{key: value for key, value in wanted.items() if key in known}
    )
    return found


def _find_lender(torch: Any, pool: Pool) -> _Lender:
    _sweep(torch)
    for lender in _lenders:
        if lender.pool() is pool:
            return lender
    made = _Lender(pool)
    _lenders.append(made)
    return made


def _take_idle(torch: Any, pool: Any) -> tuple[_Lender, Any]:
    """Return a MemPool over a pool that no block uses, and its lender.

    PyTorch refuses a MemPool that is in use in any thread.
    """
    with _lock:
        lender = _find_lender(torch, pool)
        used = lender.idle.pop() if lender.idle else None
        if used is None:
            used = mem_pool(pool, device=lender.index)
        return lender, used


def _give_idle(lender: Any, used: Any) -> None:
    with _lock:
        lender.idle.append(used)
        if lender not in _lenders:  # its pool has ended meanwhile
            _lenders.append(lender)


def _sweep(torch: Any) -> None:
    """Drop the idle MemPools of pools that have ended."""
    for lender in [each for each in _lenders if each.has_ended()]:
        _drop_idle(torch, lender)
        _lenders.remove(lender)


def _start(torch: Any, index: int, fresh: _Enabled) -> None:
    torch._C._cuda_beginAllocateToPool(index, fresh.mem_pool.id)
    _enabled[index] = fresh


def _stop(torch: Any, index: int) -> None:
    ended = _enabled.pop(index, None)
    if ended is not None:
        name = ended.mem_pool.id
        torch._C._cuda_endAllocateToPool(index, name)
        del ended  # the object must end before its use does: see _drop_idle()
        torch._C._cuda_releasePool(index, name)


def _disable(torch: Any, index: int) -> None:
    region = _enabled[index].region if index in _enabled else None
    try:
        _stop(torch, index)
    finally:
        _leave_if_stopped(index, region)


def _start_again(torch: Any, index: int, pool: Pool, region: Region | None) -> None:
    """Serve a device from a pool again after _stop(), unless the pool has ended."""
    try:
        if index not in _enabled and not pool.closed:
            _start(torch, index, _Enabled(mem_pool(pool, device=index), pool, region))
    finally:
        _leave_if_stopped(index, region)


def _leave_if_stopped(index: int, region: Region | None) -> None:
    """Let a region sleep again if it does not serve the device any more."""
    if region is not None and index not in _enabled:
        region._leave_guest()


def _drop_idle(torch: Any, lender: _Lender) -> None:
    """Drop MemPools that no block uses, even while others are in use.

    If a MemPool object is the last user of its memory, its end makes PyTorch wait for
    events. PyTorch refuses that while another MemPool is in use, and then ends the
    process. So this raises the memory's count of users before the object ends, and lowers
    the count afterwards. ``torch.cuda.empty_cache()`` frees the memory later, when PyTorch
    allows it.
    """
    index = lender.index
    while lender.idle:
        name = lender.idle[-1].id
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, name)
        torch._C._cuda_endAllocateToPool(index, name)
        lender.idle.pop()  # this ends the object, unless the program holds it too
        torch._C._cuda_releasePool(index, name)


def _describe(pool: Pool) -> str:
    stats = pool.stats()
    limits = (_core._limit("device", pool.device.index), pool.limit)
    least = min((each for each in limits if each is not None), default="none")
    return (
        f"{stats.live_nbytes} bytes are in use, {stats.cached_nbytes} cached and "
        f"{stats.in_flight_nbytes} wait for work to end; its limit is {least}"
    )


# -- blocks for the allocator that replaces PyTorch's own ---------------------------------

_Relieve = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_size_t),
)
_Reset = ctypes.CFUNCTYPE(None)
_Fraction = ctypes.CFUNCTYPE(None, ctypes.c_double, ctypes.c_int)


class _Functions(ctypes.Structure):
    """The functions that torch_allocator.cpp calls."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lend", "lend_segment")),
        *((name, ctypes.c_void_p) for name in ("take_back", "note_stream")),
        ("relieve", _Relieve),
    )


def _relieve(nbytes: int, index: int, captures: int, text: int, room: int) -> int:
    """Make room, or begin to serve the device; on failure write a text and return 0."""
    said = ""
    try:
        if not _is_served(index):
            # This is not done earlier, because it would make a context on every device.
            pool = _check(None, index)
            _core._lend(pool)
            _served[index] = pool
            _notice_devices(_torch())
            return 1
        if captures:  # a capture must not wait for anything
            if trim("device", device=index, wait=False):
                return 1
            said = f"Of it {_describe(_served[index])}."
        else:
            # Allocating a block tries everything that can make room. The block is freed at
            # once, for the request that failed.
            _served[index].allocate(nbytes, stream=0).free()
            return 1
    except OutOfMemoryError as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    except KeyboardInterrupt:
        _thread.interrupt_main()  # raises KeyboardInterrupt after this call
        said = "Ctrl-C ended the attempt."
    except Exception as error:  # PyTorch raises an exception of its own
        said = f"{type(error).__name__}: {error}"
    data = said.encode()[: room - 1] + b"\0"
    ctypes.memmove(text, data, len(data))
    return 0


def _trim() -> None:
    trim("device")


def _set_fraction(fraction: float, index: int) -> None:
    total = memory_info(index).total
    set_limit("device", None if fraction >= 1 else int(fraction * total), device=index)


def _build(torch: Any) -> Path:
    """Return torch_allocator.cpp as a library for this PyTorch, built if needed."""
    source = Path(__file__).with_name("torch_allocator.cpp")
    home = Path(torch.__file__).parent
    flag = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    compiler = next(filter(None, map(shutil.which, filter(None, names))), None)
    key = hashlib.sha256(source.read_bytes())
    key.update(f"{torch.__version__} {home} {flag} {sysconfig.get_platform()}".encode())
    target = _cache_folder() / f"torch_allocator_{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    if compiler is None:
        raise RuntimeError(
            "replace_allocator() needs a C++ compiler, and there is neither CXX nor c++, "
            "g++ or clang++ on the PATH: install one, or use enable(), which needs none"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    said = ""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        for standard in ("c++17", "c++20"):  # newer versions of PyTorch need the latter
            command = [compiler, "-shared", "-fPIC", "-O2", f"-std={standard}"]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={flag}", f"-I{home / 'include'}"]
            command += ["-o", str(made), str(source), f"-L{home / 'lib'}", "-lc10"]
            command += [f"-Wl,-rpath,{home / 'lib'}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.replace(made, target)
                return target
            said = done.stderr
    raise RuntimeError(
        f"replace_allocator(): {compiler} could not compile {source.name} against PyTorch "
        f"{torch.__version__}; enable() needs no compiler. It said:\n{said[-2000:]}"
    )


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    return Path(root if os.path.isabs(root) else Path.home() / ".cache") / "cumem"
