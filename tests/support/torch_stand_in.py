# SPDX-License-Identifier: Apache-2.0
"""A stand-in for PyTorch 2.11 on the emulated device, as far as its MemPools go.

It does what c10/cuda/CUDACachingAllocator.cpp and torch/cuda/memory.py do: it calls the
functions of cumem's extension by their addresses, cuts tensors from segments, and keeps
what tensors leave. It notices calls for which PyTorch would end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cumem
from cumem import _core
from cumem.integrations import torch as integration

MIB = 1 << 20
MALLOC = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)
FREE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)

#: PyTorch rounds the size of a tensor up to a multiple of the first number, and that of a
#: segment up to a multiple of the second.
TENSOR_NBYTES = 512
SEGMENT_NBYTES = 2 * MIB

_library = ctypes.CDLL(_core.__file__)


class Block:
    """A part of a segment: a tensor's memory, or what lies between tensors."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.state = "inactive"


class Segment:
    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.blocks = [Block(address, nbytes)]

    def take(self, nbytes: int) -> Block | None:
        """Cut a block from the first part that is free and long enough."""
        for at, block in enumerate(self.blocks):
            if block.state == "inactive" and block.nbytes >= nbytes:
                rest = Block(block.address + nbytes, block.nbytes - nbytes)
                self.blocks[at + 1 : at + 1] = [rest] if rest.nbytes else []
                block.nbytes, block.state = nbytes, "active_allocated"
                return block
        return None

    def is_free(self) -> bool:
        return all(block.state == "inactive" for block in self.blocks)


class Tensor:
    """A tensor, whose memory PyTorch keeps for reuse when the tensor ends."""

    def __init__(self, block: Block, nbytes: int) -> None:
        self.block, self.nbytes = block, nbytes
        self.address = block.address

    def end(self, awaiting: bool = False) -> None:
        """End the tensor.

        With `awaiting`, a stream that was recorded for it is still at work.
        """
        self.block.state = "active_awaiting_free" if awaiting else "inactive"

    def buffer(self) -> cumem.Buffer:
        """Return its bytes as a buffer of cumem's."""
        interface = {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        holder: Any = type("Holder", (), {"__cuda_array_interface__": interface})()
        return cumem.asbuffer(holder)


# ruff: noqa: N802  names of PyTorch's
class StandIn:
    __version__ = "2.11.0+stand-in"

    class OutOfMemoryError(RuntimeError):
        pass

    class device:  # noqa: N801  torch.device
        def __init__(self, name: str) -> None:
            self.type, _, index = name.partition(":")
            self.index = int(index) if index else None

    def __init__(self) -> None:
        # This counts the uses of each pool, by its id.
        self.uses: dict[tuple[int, int], int] = {}
        self.functions: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.devices: dict[tuple[int, int], int] = {}
        self.captures: list[tuple[tuple[int, int], Callable[[], bool]]] = []
        self.segments: dict[tuple[int, int], list[Segment]] = {}
        self.freeable: set[tuple[int, int]] = set()
        self.snapshots: list[tuple[Any, bool]] = []
        self.graphs: list[tuple[object, str]] = []
        self.current = 0
        self.aborted = False
        self.capturing = False
        self.cuda = self._C = self.memory = self
        outer = self

        class MemPool:
            def __init__(self, allocator: tuple[Any, Any]) -> None:
                self.id = (0, len(outer.uses) + 1)
                outer.uses[self.id] = 1
                outer.functions[self.id] = allocator
                outer.devices[self.id] = outer.current

            def __del__(self) -> None:
                outer._cuda_releasePool(outer.devices[self.id], self.id)
                if self.id in outer.freeable:
                    outer.aborted |= bool(outer.captures)
                    outer.give_back(self.id)

        class CUDAGraph:
            def __init__(self) -> None:
                self.id: tuple[int, int] | None = None

            def pool(self) -> tuple[int, int] | None:
                return self.id

            def __del__(self) -> None:
                if self.id is not None:
                    outer._cuda_releasePool(outer.current, self.id)

        self.MemPool = MemPool
        self.CUDAGraph = CUDAGraph

    def init(self) -> None:
        """Stand for torch.cuda.init()."""

    def begin(self, pool: tuple[int, int], applies: Callable[[], bool]) -> None:
        if any(pool == each for each, _ in self.captures):
            raise RuntimeError("already recording to mempool_id")
        self.uses[pool] += 1
        self.captures.append((pool, applies))

    def _cuda_beginAllocateToPool(self, device: int, pool: tuple[int, int]) -> None:
        self.begin(pool, lambda: True)

    def _cuda_beginAllocateCurrentThreadToPool(
        self, device: int, pool: tuple[int, int]
    ) -> None:
        own = threading.get_ident()
        self.begin(pool, lambda: threading.get_ident() == own)

    def _cuda_endAllocateToPool(self, device: int, pool: tuple[int, int]) -> None:
        (found,) = [each for each in self.captures if each[0] == pool]
        self.captures.remove(found)

    def _cuda_releasePool(self, device: int, pool: tuple[int, int]) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0
        if self.uses[pool] == 0:
            self.freeable.add(pool)

    def _cuda_hasPrimaryContext(self, device: int) -> bool:
        return device == 0

    def give_back(self, pool: tuple[int, int]) -> None:
        left = []
        for segment in self.segments.get(pool, []):
            if segment.is_free():
                self.functions[pool][1](segment.address, 0, self.devices[pool], None)
            else:
                left.append(segment)
        self.segments[pool] = left

    def empty_cache(self) -> None:
        for pool in self.freeable:
            self.give_back(pool)

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Any, device: int) -> Iterator[None]:
        self._cuda_beginAllocateCurrentThreadToPool(device, pool.id)
        try:
            yield
        finally:
            self._cuda_endAllocateToPool(device, pool.id)
            self._cuda_releasePool(device, pool.id)

    @contextlib.contextmanager
    def graph(
        self,
        graph: Any,
        pool: tuple[int, int],
        stream: object = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """Stand for torch.cuda.graph. The graph uses the pool until it ends."""
        self.graphs.append((stream, capture_error_mode))
        self._cuda_beginAllocateCurrentThreadToPool(self.current, pool)
        graph.id = pool
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
            self._cuda_endAllocateToPool(self.current, pool)

    def empty(self, nbytes: int) -> Tensor | None:
        """Return a tensor, or None if PyTorch would use memory of its own."""
        for pool, applies in reversed(self.captures):
            if applies():
                return Tensor(self.take(pool, nbytes), nbytes)
        return None

    def take(self, pool: tuple[int, int], nbytes: int) -> Block:
        wanted = -(-nbytes // TENSOR_NBYTES) * TENSOR_NBYTES
        held = self.segments.setdefault(pool, [])
        for segment in held:
            block = segment.take(wanted)
            if block is not None:
                return block
        whole = -(-wanted // SEGMENT_NBYTES) * SEGMENT_NBYTES
        address = self.functions[pool][0](whole, self.devices[pool], None)
        if address is None:
            raise self.OutOfMemoryError("CUDA out of memory.")
        held.append(Segment(address, whole))
        found = held[-1].take(wanted)
        assert found is not None
        return found

    def memory_snapshot(
        self, mempool_id: tuple[int, int] | None = None, include_traces: bool = True
    ) -> list[dict[str, Any]]:
        self.snapshots.append((mempool_id, include_traces))
        return [
            {
                "address": segment.address,
                "total_size": segment.nbytes,
                "blocks": [
                    {"address": each.address, "size": each.nbytes, "state": each.state}
                    for each in segment.blocks
                ],
            }
            for pool, segments in self.segments.items()
            for segment in segments
            if mempool_id in (None, pool)
        ]

    def CUDAPluggableAllocator(self, path: str, lend: str, take_back: str) -> Any:
        library = ctypes.CDLL(path)
        functions = MALLOC((lend, library)), FREE((take_back, library))
        return type("Allocator", (), {"allocator": lambda self: functions})()

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class Cuda:
    """The module torch.cuda, whose `device` is not the `device` of torch."""

    def __init__(self, torch: StandIn) -> None:
        self.torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torch, name)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.torch.current = self.torch.current, index
        yield
        self.torch.current = before


@contextlib.contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Let the integration use a stand-in, and check that it leaves nothing behind."""
    found = StandIn()
    place = StandIn.device
    monkeypatch.setattr(integration, "_torch", lambda: found)
    # In PyTorch, torch.cuda.device is a context manager and torch.device a class.
    monkeypatch.setattr(found, "cuda", Cuda(found), raising=True)
    assert found.device is place
    yield found
    integration.disable()
    integration.empty_cache()
    gc.collect()
    assert not found.aborted
    assert found.captures == []
    assert sum(found.uses.values()) == 0
    integration._segment_allocators.clear()
    cumem.Device(0).synchronize()
    cumem.default_pool("device").trim()
    assert live() == 0


def live() -> int:
    """Return how many blocks of device memory are in use."""
    return sum(p.live_count for p in cumem.stats().pools if p.kind == "device")


def ask(torch: StandIn, nbytes: int = SEGMENT_NBYTES) -> Tensor:
    """Allocate by the stand-in, which must find the memory in a segment of cumem's."""
    found = torch.empty(nbytes)
    assert found is not None
    return found
