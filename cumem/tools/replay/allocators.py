# SPDX-License-Identifier: Apache-2.0
"""Has the allocators that replay a trace, which are cumem's pools and those of others.

Each class says how its allocator allocates, how much it has reserved and how it is emptied.
The library of another allocator is imported when its class is instantiated.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from cumem import _core
from cumem.base.driver import backend
from cumem.base.kinds import DEVICE_FIRST, is_on_device
from cumem.base.version import __version__
from cumem.devices.device import Device
from cumem.pools.pool import Pool

__all__ = ["ALLOCATORS", "POOLS", "Allocator", "Held", "is_installed", "make"]

#: The names of cumem's pools, and how each gets its memory.
POOLS: Final = {"default": "auto", "malloc": "malloc"}
#: The names of allocators, and the module that each needs.
ALLOCATORS: Final = {
    "cumem": "cumem",
    "torch": "torch",
    "torch-expandable": "torch",
    "cupy": "cupy",
    "rmm": "rmm",
}

#: How often `empty` trims the pool at most. The first trim may find blocks in flight, and a
#: later one sees that the work on them has ended.
_TRIMS: Final = 8


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes that a pool holds at one moment.

    Parameters
    ----------
    reserved : int
        The bytes that were taken from the driver and not given back.
    live : int
        The bytes of blocks that are handed out, with their rounding.
    cached : int
        The bytes that are free and can be handed out.
    in_flight : int
        The bytes that were freed while work on them may still run.
    """

    reserved: int
    live: int
    cached: int
    in_flight: int


class Allocator:
    """The interface of an allocator.

    Parameters
    ----------
    device : int
        The index of the device.
    stream_count : int
        The number of streams to make.
    """

    name: str
    version: str
    #: Allocates on the current stream.
    allocate: Callable[[int], object]
    #: Allocates on one of `streams`.
    allocate_on: Callable[[int, Any], object]
    streams: list[Any]
    #: Another stream, on which late work runs.
    side: Any
    #: Whether the allocator's own count of its peak is exact, so that `reserved` need not
    #: be read after each allocation.
    knows_peak: bool = False

    def reserved(self) -> int:
        """Return the bytes that are reserved from the driver now."""
        raise NotImplementedError

    def peak_reserved(self) -> int:
        """Return the allocator's own peak since the last `empty`, or 0 if it has none."""
        return 0

    def held(self) -> Held | None:
        """Return how the reserved bytes are used, or None if the allocator cannot say."""
        return None

    def growths(self) -> int | None:
        """Return how often the driver was asked for memory since the last `empty`."""
        return None

    def use_on_side(self, block: Any) -> bool:
        """Tell the allocator that the side stream works on a block.

        Return False if the allocator has no way to be told. The caller must then keep the
        block until the work has ended.
        """
        return False

    def empty(self) -> None:
        """Give all memory back to the driver, and reset the counts."""
        raise NotImplementedError


class CumemAllocator(Allocator):
    """cumem's pools, as a program uses them."""

    name = "cumem"
    version: str = __version__

    def __init__(self, kind: str, pool: str, device: int, stream_count: int) -> None:
        if kind not in DEVICE_FIRST:
            raise ValueError(f"kind {kind!r} is none of {', '.join(DEVICE_FIRST)}")
        if pool not in POOLS:
            raise ValueError(f"pool {pool!r} is none of {', '.join(POOLS)}")
        if not is_on_device(kind) and pool != "default":
            raise ValueError(f"pool {pool!r} is for device memory")
        self._pool = Pool(
            cast("Any", kind), device=device, segments=cast("Any", POOLS[pool])
        )
        self._device = device
        self._growths_before = 0
        self.streams: list[Any] = [
            _core.Stream(device=device) for _ in range(stream_count)
        ]
        self.side: Any = _core.Stream(device=device)
        allocate = self._pool.allocate
        self.allocate: Callable[[int], object] = allocate
        # Host memory is not allocated on a stream.
        self.allocate_on: Callable[[int, Any], object] = (
            allocate if is_on_device(kind) else lambda size, _: allocate(size)
        )

    def reserved(self) -> int:
        return self._pool.stats().reserved_nbytes

    def peak_reserved(self) -> int:
        return self._pool.stats().peak_reserved_nbytes

    def held(self) -> Held:
        now = self._pool.stats()
        return Held(
            reserved=now.reserved_nbytes,
            live=now.live_nbytes,
            cached=now.cached_nbytes,
            in_flight=now.in_flight_nbytes,
        )

    def growths(self) -> int:
        return self._pool.stats().growth_count - self._growths_before

    def use_on_side(self, block: Any) -> bool:
        block.record_stream(self.side)
        return True

    def empty(self) -> None:
        for _ in range(_TRIMS):
            Device(self._device).synchronize()
            self._pool.trim()
            if self.reserved() == 0:
                break
        else:
            raise RuntimeError(f"the pool cannot be emptied: {self._pool.stats()}")
        self._pool.reset_peaks()
        self._growths_before = self._pool.stats().growth_count


class TorchAllocator(Allocator):
    """PyTorch's caching allocator."""

    knows_peak = True

    def __init__(self, device: int, stream_count: int, expandable: bool) -> None:
        self.name = "torch-expandable" if expandable else "torch"
        setting = f"expandable_segments:{expandable}"
        # PyTorch reads this when it is imported. Since 2.9 the variable has the second
        # name.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting
        os.environ["PYTORCH_ALLOC_CONF"] = setting
        import torch

        self.version: str = torch.__version__
        self._cuda = torch.cuda
        torch.cuda.set_device(device)
        torch.cuda.init()
        self.streams: list[Any] = [torch.cuda.Stream() for _ in range(stream_count)]
        self.side: Any = torch.cuda.Stream()
        allocate = functools.partial(
            torch.empty, dtype=torch.uint8, device=f"cuda:{device}"
        )
        self.allocate: Callable[[int], object] = allocate
        current: Any = None

        def allocate_on(size: int, stream: Any) -> object:
            nonlocal current
            if stream is not current:
                torch.cuda.set_stream(stream)
                current = stream
            return allocate(size)

        self.allocate_on: Callable[[int, Any], object] = allocate_on

    def reserved(self) -> int:
        return int(self._cuda.memory_reserved())

    def peak_reserved(self) -> int:
        return int(self._cuda.max_memory_reserved())

    def growths(self) -> int | None:
        count = self._cuda.memory_stats().get("num_device_alloc")
        return None if count is None else int(count) - self._growths_before

    def use_on_side(self, block: Any) -> bool:
        block.record_stream(self.side)
        return True

    def empty(self) -> None:
        self._cuda.synchronize()
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats()
        self._growths_before = int(self._cuda.memory_stats().get("num_device_alloc", 0))


class CupyAllocator(Allocator):
    """CuPy's memory pool."""

    name = "cupy"

    def __init__(self, device: int, stream_count: int) -> None:
        import cupy

        self.version: str = cupy.__version__
        cupy.cuda.Device(device).use()
        self._synchronize = cupy.cuda.Device(device).synchronize
        self._pool = cupy.cuda.MemoryPool()
        cupy.cuda.set_allocator(self._pool.malloc)
        self.streams: list[Any] = [
            cupy.cuda.Stream(non_blocking=True) for _ in range(stream_count)
        ]
        self.side: Any = cupy.cuda.Stream(non_blocking=True)
        allocate = cupy.cuda.alloc
        self.allocate: Callable[[int], object] = allocate
        current: Any = None

        def allocate_on(size: int, stream: Any) -> object:
            nonlocal current
            if stream is not current:
                stream.use()
                current = stream
            return allocate(size)

        self.allocate_on: Callable[[int, Any], object] = allocate_on

    def reserved(self) -> int:
        return int(self._pool.total_bytes())

    def empty(self) -> None:
        self._synchronize()
        self._pool.free_all_blocks()


class RmmAllocator(Allocator):
    """RMM's pool over ``cudaMalloc``, which begins empty."""

    name = "rmm"
    knows_peak = True

    def __init__(self, device: int, stream_count: int) -> None:
        import rmm
        import rmm.mr
        import rmm.pylibrmm.stream

        self.version: str = rmm.__version__
        self._mr = rmm.mr
        self._device = device
        wrap = rmm.pylibrmm.stream.Stream
        self.streams: list[Any] = [
            wrap(_core.Stream(device=device)) for _ in range(stream_count)
        ]
        self.side: Any = wrap(_core.Stream(device=device))
        make = rmm.DeviceBuffer
        self.allocate: Callable[[int], object] = lambda size: make(size=size)
        self.allocate_on: Callable[[int, Any], object] = lambda size, stream: make(
            size=size, stream=stream
        )
        self.empty()

    def reserved(self) -> int:
        return int(self._counts.allocation_counts.current_bytes)

    def peak_reserved(self) -> int:
        return int(self._counts.allocation_counts.peak_bytes)

    def growths(self) -> int:
        return int(self._counts.allocation_counts.total_count)

    def empty(self) -> None:
        Device(self._device).synchronize()
        self._mr.set_current_device_resource(self._mr.CudaMemoryResource())
        gc.collect()  # frees the last reference to the old pool, and with it its memory
        self._counts = self._mr.StatisticsResourceAdaptor(self._mr.CudaMemoryResource())
        pool = self._mr.PoolMemoryResource(self._counts, initial_pool_size=0)
        self._mr.set_current_device_resource(pool)


def is_installed(name: str) -> bool:
    """Return whether the module that an allocator needs can be imported."""
    return importlib.util.find_spec(ALLOCATORS[name]) is not None


def make(name: str, kind: str, pool: str, device: int, stream_count: int) -> Allocator:
    """Make an allocator.

    Parameters
    ----------
    name : str
        A key of `ALLOCATORS`.
    kind : str
        One of `cumem.base.kinds.KINDS`. Allocators other than cumem take only ``"device"``.
    pool : str
        A key of `POOLS`, for cumem.
    device : int
        The index of the device.
    stream_count : int
        The number of streams to make.

    Returns
    -------
    Allocator

    Raises
    ------
    ValueError
        If the allocator cannot serve this kind or pool, or is not installed.
    """
    if name == "cumem":
        return CumemAllocator(kind, pool, device, stream_count)
    if name not in ALLOCATORS:
        raise ValueError(f"allocator {name!r} is none of {', '.join(ALLOCATORS)}")
    if kind != "device":
        raise ValueError(f"{name} is replayed for device memory only, not {kind}")
    if backend() == "emulated":
        raise ValueError(f"{name} needs a GPU; the emulated device is cumem's own")
    if not is_installed(name):
        raise ValueError(f"{name} is not installed")
    if name == "cupy":
        return CupyAllocator(device, stream_count)
    if name == "rmm":
        return RmmAllocator(device, stream_count)
    return TorchAllocator(device, stream_count, name == "torch-expandable")
