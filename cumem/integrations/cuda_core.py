# SPDX-License-Identifier: Apache-2.0
"""Lets cuda.core allocate its buffers from cumem's pools, by a memory resource."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from cuda import core

from cumem import _core
from cumem.base.kinds import DEVICE_FIRST, KINDS, PAGE_LOCKED, is_on_device
from cumem.integrations.serving import Pools, lend, need_gpu

if not hasattr(core, "MemoryResource"):  # cuda.core before 1.0
    from cuda.core import experimental as core

__all__ = ["PoolMemoryResource"]

#: Since 1.2 a buffer that is not closed ends in the order of a stream that it knows.
_HAS_STREAM = "stream" in inspect.signature(core.Buffer.from_handle).parameters


if TYPE_CHECKING:
    # cuda.core is compiled, has no types, and may be missing where types are checked. A
    # type checker would know nothing about a class with an unknown base class.
    class _MemoryResource: ...
else:
    _MemoryResource = core.MemoryResource


class PoolMemoryResource(_MemoryResource):
    """A memory resource of cuda.core that allocates from a Pool.

    Device memory is ordered by streams: it is allocated for one stream, and can be reused
    at once on the stream on which it is deallocated, or on another stream after an event.
    Host memory is reused once the host has seen the work of both streams end.

    Parameters
    ----------
    pool : Pool, optional
        The pool; by default the default pool of `kind`.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        The kind of memory; by default the pool's, or else device memory.
    device : Device, int or str, optional
        The device of the default pool; by default cumem's current one.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the pool is of another kind or device, or the kind or device does not exist.
    RuntimeError
        If memory is emulated.

    Notes
    -----
    `shutdown` raises a BufferError as long as buffers of cuda.core are alive.
    """

    def __init__(
        self, pool: object = None, *, kind: str | None = None, device: object = None
    ) -> None:
        need_gpu("cuda.core")
        self._pools = Pools(pool, kind, DEVICE_FIRST, "cuda.core")
        index = self._pools.first()
        if index is None or device is not None:
            index = _core._device(device, "device").index
        self._index = index
        self._pools.of(index)  # refuses a pool of another device
        self._blocks: dict[int, tuple[_core.Buffer, object]] = {}

    @property
    def pool(self) -> Any:
        """The Pool, for its counters and its limit."""
        return self._pools.of(self._index)

    def allocate(self, size: int, stream: Any = None) -> Any:
        """Allocate memory from the pool.

        Parameters
        ----------
        size : int
            The number of bytes.
        stream : Stream, GraphBuilder or other stream object, optional
            The stream that uses device memory first; by default cumem's current stream.

        Returns
        -------
        cuda.core.Buffer

        Raises
        ------
        TypeError, ValueError
            If `size` is not a number of bytes, or `stream` is not a stream or is one of
            another device.
        OutOfMemoryError
            If there is no room, even after waiting for freed memory and trimming pools.
        CudaError
            If a call to CUDA failed.
        """
        ordered_by = _stream_of(stream)
        pool = self.pool
        buffer = pool.allocate(size, ordered_by)
        self._blocks[buffer.ptr] = buffer, lend(pool)
        more = {"stream": stream} if _HAS_STREAM and stream is not None else {}
        try:
            return core.Buffer.from_handle(buffer.ptr, size, mr=self, **more)
        except BaseException:
            del self._blocks[buffer.ptr]
            raise

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Give memory back, as ``Buffer.close`` does it.

        Parameters
        ----------
        ptr : int
            The address. An address that the resource did not allocate is ignored.
        size : int
            The number of bytes.
        stream : Stream, GraphBuilder or other stream object, optional
            The stream after whose work the memory is reused; by default the one on which
            it was allocated.

        Raises
        ------
        TypeError, ValueError, CudaError
            If `stream` is refused. The memory is given back all the same, and is reused
            after all work of the devices.
        """
        buffer, _ = self._blocks.pop(int(ptr), (None, None))
        if buffer is not None and stream is not None and size:
            try:
                buffer.record_stream(_stream_of(stream))
            except Exception:
                buffer.__dlpack__()  # an exported buffer waits for all work
                raise

    @property
    def is_device_accessible(self) -> bool:
        """True, since devices reach page-locked memory as well."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """True for all kinds but device memory."""
        return not is_on_device(self._pools.kind)

    @property
    def is_managed(self) -> bool:
        """True for managed memory."""
        return bool(KINDS[self._pools.kind].migrates)

    @property
    def device_id(self) -> int:
        """The device's index; -1 for page-locked memory."""
        return -1 if self._pools.kind in PAGE_LOCKED else self._index


def _stream_of(stream: Any) -> Any:
    """Return the stream of a GraphBuilder, on which it captures, or the stream itself."""
    return getattr(stream, "stream", stream)
