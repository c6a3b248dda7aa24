# SPDX-License-Identifier: Apache-2.0
"""cuda.core's buffers in cumem's pools: a memory resource over a Pool of any kind."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from cuda import core

from cumem import _core
from cumem.base.kinds import DEVICE_FIRST, KINDS, PAGE_LOCKED
from cumem.integrations.serving import Pools, lend, need_gpu

if not hasattr(core, "MemoryResource"):  # before 1.0
    from cuda.core import experimental as core

__all__ = ["PoolMemoryResource"]

#: From 1.2 on: what orders the end of a buffer that nobody closes.
_HAS_STREAM = "stream" in inspect.signature(core.Buffer.from_handle).parameters


if TYPE_CHECKING:
    # cuda.core is compiled, has no types, and may be missing where types are checked. A
    # base class that is unknown would make the whole class unknown.
    class _MemoryResource: ...
else:
    _MemoryResource = core.MemoryResource


class PoolMemoryResource(_MemoryResource):
    """Memory of a Pool as buffers of cuda.core.

    Device memory is ordered by streams: it is for the stream that it is allocated on,
    and is used again on the one that it is deallocated on; on others after events. Host
    memory is used again when the host has seen the work of both streams end.

    Parameters
    ----------
    pool : Pool, optional
        Default: the default pool of `kind`.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        Default: the pool's, else device memory.
    device : Device, int or str, optional
        Of the default pool; default: cumem's current one.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the pool is of another kind or device, or there is no such kind or device.
    RuntimeError
        If memory is emulated.

    Notes
    -----
    `shutdown` raises BufferError while buffers live.
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
        self._pools.of(index)  # or it is refused here
        self._blocks: dict[int, tuple[_core.Buffer, object]] = {}

    @property
    def pool(self) -> Any:
        """The Pool: its counters and its limit."""
        return self._pools.of(self._index)

    def allocate(self, size: int, stream: Any = None) -> Any:
        """Allocate memory from the pool.

        Parameters
        ----------
        size : int
            In bytes.
        stream : Stream, GraphBuilder or other stream object, optional
            What device memory is for; default: cumem's current stream.

        Returns
        -------
        cuda.core.Buffer

        Raises
        ------
        TypeError, ValueError
            If `size` is not a number of bytes, or `stream` is not a stream or is one of
            another device.
        OutOfMemoryError
            If there is no room, also after waiting for freed memory and trimming pools.
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
        """Give memory back, as ``Buffer.close`` does.

        Parameters
        ----------
        ptr : int
            The address; of one that is not lent nothing happens.
        size : int
            In bytes.
        stream : Stream, GraphBuilder or other stream object, optional
            After whose work it is used again; default: the stream that it was allocated
            on.

        Raises
        ------
        TypeError, ValueError, CudaError
            If `stream` is refused; the memory is given back, and used again after all work
            of the devices.
        """
        buffer, _ = self._blocks.pop(int(ptr), (None, None))
        if buffer is not None and stream is not None and size:
            try:
                buffer.record_stream(_stream_of(stream))
            except Exception:
                buffer.__dlpack__()  # it waits for all work then
                raise

    @property
    def is_device_accessible(self) -> bool:
        """True: devices reach page-locked memory as well."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """Of all kinds but device memory."""
        return bool(self._pools.kind != "device")

    @property
    def is_managed(self) -> bool:
        """Of managed memory."""
        return bool(KINDS[self._pools.kind].migrates)

    @property
    def device_id(self) -> int:
        """The device's index; -1 for page-locked memory."""
        return -1 if self._pools.kind in PAGE_LOCKED else self._index


def _stream_of(stream: Any) -> Any:
    """What a GraphBuilder captures is its stream's."""
    return getattr(stream, "stream", stream)
