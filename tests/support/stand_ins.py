# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for CuPy, Numba and cuda.core on the emulated device.

They have the parts of the real libraries that cumem's integrations use, with the same
names, signatures and checks.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import cumem


def install(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]], name: str
) -> Any:
    """Import an integration again, with `modules` in the place of its library."""
    for place, names in modules.items():
        module = ModuleType(place)
        module.__path__ = []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, place, module)
        parent, _, last = place.rpartition(".")
        if parent in modules:
            setattr(sys.modules[parent], last, module)
    for which in ("serving", name):
        monkeypatch.delitem(sys.modules, f"cumem.integrations.{which}", raising=False)
    serving = importlib.import_module("cumem.integrations.serving")
    integration: Any = importlib.import_module(f"cumem.integrations.{name}")
    integration.really_need_gpu = serving.need_gpu
    monkeypatch.setattr(integration, "need_gpu", lambda library: None)
    return integration


# -- CuPy --------------------------------------------------------------------------------


class CupyOutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        self._size, self._total, self._limit = size, total, limit
        super().__init__(f"Out of memory allocating {size:,} bytes")

    def __reduce__(self) -> Any:
        return type(self), (self._size, self._total, self._limit)


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = int(status)
        super().__init__(f"cudaError {self.status}")

    def __reduce__(self) -> Any:
        return type(self), (self.status,)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        assert ptr != 0 or device_id >= 0
        self.ptr, self.size, self.device_id = ptr, size, device_id
        self._owner = owner


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        assert isinstance(mem, UnownedMemory)
        assert mem.ptr != 0 or offset == 0
        self.mem, self.ptr = mem, mem.ptr + offset


class PinnedMemory:
    def __init__(self, size: int, flags: int = 0) -> None:
        self.size, self.ptr = size, 1 << 40


class PooledPinnedMemory(PinnedMemory):
    def __init__(self, mem: PinnedMemory, pool: Any) -> None:
        self.ptr, self.size, self.pool = mem.ptr, mem.size, pool


class PinnedMemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def size(self) -> int:
        return self.mem.size - (self.ptr - self.mem.ptr)


class PinnedMemoryPool:
    def malloc(self, size: int) -> PinnedMemoryPointer:
        memory = PooledPinnedMemory(PinnedMemory(size), weakref.ref(self))
        return PinnedMemoryPointer(memory, 0)


def raw(size: int) -> MemoryPointer:
    """Allocate device memory as CuPy does without a pool."""
    return MemoryPointer(UnownedMemory(1 << 40, size, None, 0), 0)


def raw_pinned(size: int) -> PinnedMemoryPointer:
    """Allocate pinned memory as CuPy does without a pool."""
    return PinnedMemoryPointer(PinnedMemory(size), 0)


class CupyStream:
    """A stream that CuPy made, or an object for the stream of a handle that is given."""

    def __init__(self, handle: int | None = None, device: int = 0) -> None:
        self.kept = cumem.Stream(device=device) if handle is None else None
        self.ptr = handle if self.kept is None else self.kept.handle
        self.device_id = device if handle is None else -1

    @classmethod
    def from_external(cls, stream: Any) -> CupyStream:
        made = cls(stream.__cuda_stream__()[1])
        made.device_id = stream.device.index
        made._foreign_stream_ref = stream  # type: ignore[attr-defined]
        return made

    def __cuda_stream__(self) -> tuple[int, Any]:
        return 0, self.ptr

    def __hash__(self) -> int:
        raise AssertionError("nothing may hash a CuPy stream, since that is slow")


class Cupy:
    """The module `cupy`, and calls that a user of CuPy makes."""

    def __init__(self, device_count: int) -> None:
        self.state = threading.local()
        self.first = raw
        self.allocator: Any = raw
        self.null = CupyStream(0)
        self.pinned_pool = PinnedMemoryPool()
        self.pinned: Any = self.pinned_pool.malloc
        runtime = {
            "CUDARuntimeError": CUDARuntimeError,
            "getDevice": lambda: getattr(self.state, "device", 0),
            "getDeviceCount": lambda: device_count,
        }
        cuda = {
            "MemoryPointer": MemoryPointer,
            "Stream": CupyStream,
            "UnownedMemory": UnownedMemory,
            "PinnedMemory": PinnedMemory,
            "PinnedMemoryPointer": PinnedMemoryPointer,
            "get_allocator": self.get_allocator,
            "set_allocator": self.set_allocator,
            "using_allocator": self.using_allocator,
            "alloc_pinned_memory": lambda size: self.pinned(size),
            "set_pinned_memory_allocator": self.set_pinned,
            "get_current_stream": self.get_current_stream,
        }
        self.modules = {
            "cupy": {},
            "cupy.cuda": cuda,
            "cupy.cuda.memory": {"OutOfMemoryError": CupyOutOfMemoryError},
            "cupy.cuda.runtime": runtime,
        }

    def get_allocator(self) -> Any:
        return getattr(self.state, "allocator", None) or self.allocator

    def set_allocator(self, allocator: Any = None) -> None:
        if getattr(self.state, "allocator", None) is not None:
            raise ValueError("Can't change the global allocator inside using_allocator")
        self.allocator = allocator or raw

    @contextlib.contextmanager
    def using_allocator(self, allocator: Any) -> Iterator[None]:
        before = getattr(self.state, "allocator", None)
        self.state.allocator = allocator
        try:
            yield
        finally:
            self.state.allocator = before

    def set_pinned(self, allocator: Any = None) -> None:
        self.pinned = allocator or raw_pinned

    def get_current_stream(self) -> Any:
        streams = getattr(self.state, "streams", {})
        return streams.get(getattr(self.state, "device", 0), self.null)

    def use_device(self, device: int) -> None:
        self.state.device = device

    def use(self, stream: Any) -> None:
        streams = vars(self.state).setdefault("streams", {})
        streams[getattr(self.state, "device", 0)] = stream

    def empty(self, nbytes: int) -> Any:
        return self.get_allocator()(nbytes)

    def empty_pinned(self, nbytes: int) -> Any:
        return self.pinned(nbytes)


# -- Numba -------------------------------------------------------------------------------


class BaseCUDAMemoryManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.context = kwargs.pop("context")


class GetIpcHandleMixin:
    def get_ipc_handle(self, memory: Any) -> Any:
        return "handle", memory


class NumbaPointer:
    """A pointer whose memory is freed when nothing refers to it any more."""

    def __init__(
        self,
        context: Any,
        pointer: Any,
        size: int,
        owner: object = None,
        finalizer: Any = None,
    ) -> None:
        self.device_pointer, self.size, self.owner = pointer, size, owner
        self.finalizer = weakref.finalize(self, finalizer)
        self.references = 0

    def own(self) -> NumbaOwned:
        return NumbaOwned(weakref.proxy(self))


class NumbaOwned:
    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        pointer.references += 1

    def __del__(self) -> None:
        with contextlib.suppress(ReferenceError):
            self.pointer.references -= 1
            if self.pointer.references == 0:
                self.pointer.finalizer()

    @property
    def address(self) -> int:
        pointer = self.pointer.device_pointer
        return int(getattr(pointer, "value", pointer) or 0)


class NumbaPinned(NumbaPointer):
    def own(self) -> Any:
        return self


class NumbaMapped(NumbaPointer):
    pass


class NumbaManaged(NumbaPointer):
    pass


class CudaAPIError(Exception):
    def __init__(self, code: int, msg: str) -> None:
        self.code, self.msg = code, msg
        super().__init__(code, msg)

    def __str__(self) -> str:
        return f"[{self.code}] {self.msg}"


class Numba:
    """The modules of Numba, whose memory manager is set by a test."""

    def __init__(self) -> None:
        self.devices: dict[int, Any] = {}
        self.manager: Any = None
        driver = {
            "BaseCUDAMemoryManager": BaseCUDAMemoryManager,
            "GetIpcHandleMixin": GetIpcHandleMixin,
            "AutoFreePointer": NumbaPointer,
            "CudaAPIError": CudaAPIError,
            "ManagedMemory": NumbaManaged,
            "MappedMemory": NumbaMapped,
            "PinnedMemory": NumbaPinned,
            "MemoryInfo": lambda free, total: SimpleNamespace(free=free, total=total),
            "driver": SimpleNamespace(devices=self.devices),
            "set_memory_manager": self.set_memory_manager,
        }
        self.modules = {
            "numba": {},
            "numba.cuda": {},
            "numba.cuda.cudadrv": {},
            "numba.cuda.cudadrv.driver": driver,
        }

    def set_memory_manager(self, manager: Any) -> None:
        assert manager(context=None).interface_version == 1
        self.manager = manager

    def context(self, device: int = 0) -> Any:
        class Context:  # unlike an `object()` it can be referred to weakly
            pass

        context: Any = Context()
        context.device = SimpleNamespace(id=device)
        context.memory_manager = self.manager(context=context)
        context.memory_manager.initialize()
        self.devices[device] = SimpleNamespace(primary_context=context)
        return context


# -- cuda.core ---------------------------------------------------------------------------


class MemoryResource:
    pass


class CoreBuffer:
    def __init__(self, ptr: int, size: int, mr: Any, stream: Any) -> None:
        self.handle, self.size, self.mr, self.stream = ptr, size, mr, stream

    @staticmethod
    def from_handle(
        ptr: int, size: int, mr: Any = None, owner: object = None, *, stream: Any = None
    ) -> CoreBuffer:
        assert mr is not None
        assert owner is None
        return CoreBuffer(ptr, size, mr, stream)

    def close(self, stream: Any = None) -> None:
        resource, self.mr = self.mr, None
        if resource is not None:
            resource.deallocate(self.handle, self.size, stream=stream or self.stream)

    def __del__(self) -> None:
        self.close()


#: The modules of cuda.core.
CORE_MODULES: dict[str, dict[str, Any]] = {
    "cuda": {},
    "cuda.core": {"MemoryResource": MemoryResource, "Buffer": CoreBuffer},
}
