# SPDX-License-Identifier: Apache-2.0
"""Lets Numba allocate from cumem's pools, by its External Memory Management interface.

Numba does not say on which streams its arrays are used. So memory that it gives back is
reused only after all work that the devices had at that time is done.

``NUMBA_CUDA_MEMORY_MANAGER=cumem.integrations.numba`` has the same effect as `enable`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from numba.cuda.cudadrv import driver

from cumem import _core
from cumem.base import errors
from cumem.devices.device import Device
from cumem.integrations.serving import Pools, made_as, need_gpu
from cumem.pools.registering import register

__all__ = ["CumemMemoryManager", "OutOfMemoryError", "enable"]

_KINDS = ("device",)
_LEGACY = 1  # the handle of CUDA's legacy default stream
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY, the same for driver and runtime


if TYPE_CHECKING:
    # Numba has no types and may be missing where types are checked. A type checker would
    # know nothing about a class with an unknown base class. So type checkers see stand-ins
    # that have only the members which the classes below use.
    _CudaAPIError = Exception

    class _Manager:
        context: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def get_ipc_handle(self, memory: Any) -> Any: ...
else:
    _CudaAPIError = driver.CudaAPIError

    class _Manager(driver.GetIpcHandleMixin, driver.BaseCUDAMemoryManager):
        """The parts of a memory manager that Numba provides."""


class OutOfMemoryError(errors.OutOfMemoryError, _CudaAPIError):
    """cumem's `OutOfMemoryError`, which handlers of Numba's own error also catch.

    Its code is that of ``CUDA_ERROR_OUT_OF_MEMORY``, even if cumem's own limit was reached.
    """

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the error as Exception does, since Numba's class takes other arguments."""
        return Exception.__reduce__(self)

    def __str__(self) -> str:
        """Return the text, without Numba's code in front of it."""
        return Exception.__str__(self)

    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)


@contextlib.contextmanager
def _as_numbas() -> Iterator[None]:
    """Turn cumem's OutOfMemoryError into the one above, with Numba's code and message."""
    try:
        yield
    except errors.OutOfMemoryError as error:
        made: Any = made_as(error, OutOfMemoryError)
        made.code, made.msg = _OUT_OF_MEMORY, str(error)
        raise made from None


class CumemMemoryManager(_Manager):
    """Allocates device, managed and page-locked memory for one of Numba's contexts.

    Numba makes the object. Device memory comes from the pools of `enable`, and other memory
    from the default pools.
    """

    pools: Pools = Pools(None, None, _KINDS, "Numba")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # This keeps memory alive, since Numba's own references are weak.
        self._live: dict[int, Any] = {}
        self._keys = itertools.count()
        self._defers = 0
        self._deferred: list[object] = []

    @property
    def interface_version(self) -> int:
        """The version of Numba's interface, 1."""
        return 1

    def initialize(self) -> None:
        """Check that there is a GPU; Numba calls this when it begins to use a context."""
        need_gpu("Numba")

    @_as_numbas()
    def memalloc(self, size: int) -> Any:
        """Allocate device memory on the legacy default stream.

        All streams that Numba makes wait for that stream.
        """
        device = self.context.device.id
        legacy = _core.Stream.from_external(_LEGACY, device=device)
        buffer = self.pools.of(device).allocate(size, legacy)
        pointer = ctypes.c_void_p(buffer.ptr)
        return self._own(driver.AutoFreePointer, pointer, size, buffer.__dlpack__())

    @_as_numbas()
    def memallocmanaged(self, size: int, attach_global: bool) -> Any:
        """Allocate managed memory."""
        buffer = _core.empty_managed(
            size,
            "u1",
            attach="global" if attach_global else "host",
            device=self.context.device.id,
        )
        pointer = ctypes.c_void_p(buffer.ptr)
        return self._own(driver.ManagedMemory, pointer, size, memoryview(buffer))

    @_as_numbas()
    def memhostalloc(
        self,
        size: int,
        mapped: bool = False,
        portable: bool = False,
        wc: bool = False,
    ) -> Any:
        """Allocate page-locked memory. It is always portable, since that costs nothing."""
        make = _core.empty_mapped if mapped else _core.empty_pinned
        buffer = make(size, "u1", write_combined=wc, device=self.context.device.id)
        lease = memoryview(buffer)
        return self._own_host(mapped, buffer.ptr, size, lease)

    @_as_numbas()
    def mempin(
        self, owner: object, pointer: Any, size: int, mapped: bool = False
    ) -> Any:
        """Page-lock existing memory, until it is dropped and the work on it is done."""
        address = getattr(pointer, "value", pointer)
        memory = (ctypes.c_ubyte * size).from_address(address)
        registration = register(memory, mapped=mapped, device=self.context.device.id)
        lease = registration, memoryview(registration.buffer)
        return self._own_host(mapped, address, size, lease, owner=owner)

    def get_memory_info(self) -> Any:
        """Return the free and the total bytes of the device.

        The free bytes are those of the driver, which do not include the pools' cached
        memory.
        """
        free, total = Device(self.context.device.id).memory_info()
        return driver.MemoryInfo(free=free, total=total)

    def get_ipc_handle(self, memory: Any) -> Any:
        """Return a handle for other processes, which CUDA gives only for plain segments.

        Raises
        ------
        RuntimeError
            If the pool may map its memory piece by piece.
        """
        if self.pools.of(self.context.device.id).segments != "malloc":
            raise RuntimeError(
                "CUDA IPC needs memory of one allocation: "
                'cumem.integrations.numba.enable(cumem.Pool("device", '
                'segments="malloc"))'
            )
        return super().get_ipc_handle(memory)

    def reset(self) -> None:
        """Take back all memory of the context, as Numba's own manager does.

        Arrays in device, managed and mapped memory are invalid afterwards.
        """
        self._live.clear()

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        """Keep the memory of arrays that are dropped until the outermost block ends."""
        self._defers += 1
        try:
            yield
        finally:
            self._defers -= 1
            if self._defers == 0:
                self._deferred.clear()

    def _own(
        self, kind: Any, pointer: Any, size: int, lease: object, **owner: Any
    ) -> Any:
        """Make a pointer of Numba, and keep `lease` alive as long as arrays refer to it.

        The lease is an object that holds the memory: an export of it, or a registration.
        """
        key = next(self._keys)
        finalizer = self._finalizer(key, lease)
        made = kind(self._context(), pointer, size, finalizer=finalizer, **owner)
        self._live[key] = made
        return made.own()

    def _own_host(
        self, mapped: bool, address: int, size: int, lease: object, **owner: Any
    ) -> Any:
        # Without NVIDIA's binding, Numba uses ctypes, and expects the pointer as an object
        # of ctypes.
        has_binding = getattr(driver, "USE_NV_BINDING", True)
        pointer = address if has_binding else ctypes.c_void_p(address)
        if mapped:
            return self._own(driver.MappedMemory, pointer, size, lease, **owner)
        finalizer = self._finalizer(next(self._keys), lease)
        return driver.PinnedMemory(
            self._context(), pointer, size, finalizer=finalizer, **owner
        )

    def _context(self) -> Any:
        return weakref.proxy(self.context)

    def _finalizer(self, key: int, lease: object) -> Any:
        live, held = self._live, [lease]

        def finalize() -> None:
            live.pop(key, None)
            if self._defers:
                self._deferred.extend(held)
            held.clear()

        return finalize


#: Numba looks for this name in the module that NUMBA_CUDA_MEMORY_MANAGER names.
_numba_memory_manager = CumemMemoryManager


def enable(pool: object = None) -> None:
    """Let Numba allocate from cumem's pools, for the rest of the process.

    Parameters
    ----------
    pool : Pool or iterable of Pool, optional
        The pools of device memory, one for each device; by default the default pool of each
        device.

    Raises
    ------
    TypeError
        If `pool` is of another type.
    ValueError
        If a pool is of another kind, or two are of the same device.
    RuntimeError
        If Numba uses a device already, or memory is emulated.

    Notes
    -----
    This cannot be undone, because Numba keeps the manager that it used first. `shutdown`
    raises a BufferError as long as arrays of Numba live.
    """
    need_gpu("Numba")
    pools = Pools(pool, None, _KINDS, "Numba")
    if any(each.primary_context for each in driver.driver.devices.values()):
        raise RuntimeError(
            "Numba uses a device already, with another memory manager: enable() must "
            "come before its first array, kernel or question about a device"
        )
    CumemMemoryManager.pools = pools
    driver.set_memory_manager(CumemMemoryManager)
