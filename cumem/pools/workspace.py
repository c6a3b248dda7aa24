# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of a fixed size: taken piece by piece, given back block by block."""

from __future__ import annotations

import collections
import math
import operator
import threading
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    Self,
    SupportsIndex,
    TypeVar,
    final,
    overload,
)

import numpy as np
from numpy.typing import DTypeLike

from cumem import _core
from cumem.base.errors import OutOfMemoryError
from cumem.base.units import fold, format_nbytes, read_size
from cumem.buffers.arguments import hinting
from cumem.pools.pool import Pool

if TYPE_CHECKING:
    from cumem._core import _B_co
    from cumem.devices.device import Device
else:
    _B_co = TypeVar("_B_co", covariant=True)

_PAGE = 4096
_LONG = 64 << 10


def _end_of(nbytes: int, used: int) -> int:
    """Of so many bytes behind what is used. Never less than where the pool ends them, so
    that what fits by this count does fit: it begins long blocks at whole pages."""
    step = _PAGE if nbytes >= _LONG else 512
    return -(-used // step) * step + max(512, -(-nbytes // step) * step)


def _nbytes_of(shape: _core._Shape, dtype: DTypeLike) -> int:
    """0 where they make no buffer, which is told by whoever makes it."""
    lengths: Any = shape
    try:
        try:
            count = operator.index(lengths)
        except TypeError:
            count = math.prod(map(operator.index, lengths))
        return max(0, np.dtype(dtype).itemsize * count)
    except (TypeError, ValueError):
        return 0


@final
class Workspace(Generic[_B_co]):
    """Scratch memory of a fixed size, for buffers that end together.

    In a ``with`` block `empty` and `zeros` hand out its memory from front to back; the
    end of the block takes it all back. Blocks may be nested: the end of one takes back
    what was handed out in it, and leaves the outer ones alone.

    Parameters
    ----------
    nbytes : int or str
        Its size, as ``1 << 20`` or ``"64 MiB"``; at least 1, rounded up to whole pages
        of 4096 bytes.
    kind : str
        What memory, as in `empty`; default device memory.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it; default: cumem's current one.
    stream : Stream or other stream object, optional
        Where device memory is used first; default: what is current when it is handed
        out.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If `nbytes` is less than 1, there is no such kind or device, or `stream` is of
        another device.
    OutOfMemoryError, CudaError
        If there is not enough memory.

    Notes
    -----
    The memory is taken at once, and belongs to a `Pool` of its own that never has more.
    Between blocks it is cached there: `trim`, or another pool that finds no memory, may
    give it back to the driver, and the next block takes it anew. Each buffer counts with
    its bytes rounded up to 512, from 64 KiB on to 4096, and begins at a multiple of
    that. A workspace is for one thread at a time, whose blocks end in the reverse of the
    order in which they began.

    A buffer is closed when its block ends, and whatever uses it afterwards raises
    ValueError. Arrays and tensors made of it stay valid: their bytes, and those that a
    stream still works on, are not handed out again before that is over: a buffer that
    comes meanwhile lies beside them, and what is free then may be in two pieces.

    Examples
    --------
    >>> scratch = cumem.Workspace("1 MiB", "pinned")
    >>> with scratch:
    ...     rows = scratch.empty((100, 256), "f4")
    ...     with scratch:
    ...         sums = scratch.zeros(100)
    ...     print(rows.closed, sums.closed, scratch.used)
    False True 102400
    >>> rows.closed, scratch.used, scratch.high_water
    (True, 0, 103424)
    """

    __slots__ = (
        *("__weakref__", "_blocks", "_ended", "_high_water", "_is_cut", "_kind"),
        *("_nbytes", "_pool", "_spent", "_stream", "_thread", "_used"),
    )

    @overload
    def __init__(
        self: Workspace[_core.PinnedBuffer],
        nbytes: SupportsIndex | str,
        kind: Literal["pinned"],
        *,
        device: object = ...,
        stream: object = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Workspace[_core.MappedBuffer],
        nbytes: SupportsIndex | str,
        kind: Literal["mapped"],
        *,
        device: object = ...,
        stream: object = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Workspace[_core.ManagedBuffer],
        nbytes: SupportsIndex | str,
        kind: Literal["managed"],
        *,
        device: object = ...,
        stream: object = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Workspace[_core.DeviceBuffer],
        nbytes: SupportsIndex | str,
        kind: Literal["device"] = ...,
        *,
        device: object = ...,
        stream: object = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Workspace[_core.Buffer],
        nbytes: SupportsIndex | str,
        kind: _core._Kind,
        *,
        device: object = ...,
        stream: object = ...,
    ) -> None: ...
    @hinting
    def __init__(
        self,
        nbytes: SupportsIndex | str,
        kind: _core._Kind = "device",
        *,
        device: object = None,
        stream: object = None,
    ) -> None:
        size = read_size(nbytes, "nbytes", False, None)
        if size == 0:
            raise ValueError("nbytes must be at least 1, not 0")
        self._nbytes = -(-size // _PAGE) * _PAGE
        self._kind = kind
        self._stream = stream
        #: Each with what was used before it.
        self._blocks: list[tuple[list[tuple[_core.Buffer, int]], int]] = []
        #: Of blocks that have ended: unfinished transfers may still use them.
        self._ended: collections.deque[tuple[_core.Buffer, int]] = collections.deque()
        self._spent = 0  #: bytes of these
        self._used = self._high_water = self._thread = 0
        self._is_cut = False  #: pieces of ended blocks may lie side by side
        # One segment, which is cut from its front on: no holes but where bytes are kept.
        self._pool: Pool[Any] = Pool(kind, device=device, segments="malloc")
        self._pool.allocate(self._nbytes, stream)  # and back, for the blocks
        self._pool.limit = self._pool.stats().reserved_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that it has."""
        return self._nbytes

    @property
    def kind(self) -> _core._Kind:
        """ "device", "pinned", "mapped" or "managed"."""
        return self._kind

    @property
    def device(self) -> Device:
        """Device whose memory it is, or whose context page-locks it."""
        return self._pool.device

    @property
    def used(self) -> int:
        """Bytes that are handed out, rounding included; 0 outside of blocks."""
        return self._used

    @property
    def high_water(self) -> int:
        """The most that `used` has been: the size that would have been enough."""
        return self._high_water

    @property
    def closed(self) -> bool:
        """True after close() or shutdown()."""
        return self._pool.closed

    @hinting
    def empty(
        self,
        shape: _core._Shape,
        dtype: DTypeLike = "float64",
        *,
        order: _core._Order = "C",
    ) -> _B_co:
        """Hand out memory until the end of the innermost block.

        Parameters
        ----------
        shape : int or sequence of int
            Lengths in elements.
        dtype : dtype_like
            Any NumPy dtype without Python objects.
        order : {'C', 'F'}
            Whether the last or the first index runs fastest.

        Returns
        -------
        Buffer
            Of the workspace's kind. Its bytes are not set.

        Raises
        ------
        TypeError
            If an argument has the wrong type, or the dtype holds Python objects.
        ValueError
            If a length is negative, `order` is unknown, no block is open, or the
            workspace is closed.
        RuntimeError
            If the block was begun in another thread.
        OutOfMemoryError
            If so much is not left, or not in one piece; ``requested``, ``limit`` and
            ``live`` say how much was asked for, its size, and what is in use.

        Notes
        -----
        **Blocks** only where the bytes that are left are still used by work that was
        queued in ended blocks, until that is done; GIL released. **Ordered after**:
        device memory may be used at once on the workspace's stream, another stream the
        user orders.
        """
        if not self._blocks:
            self._check_open()
            raise ValueError("a workspace hands out memory only inside its with block")
        self._check_thread()
        nbytes = _nbytes_of(shape, dtype)
        size = _end_of(nbytes, self._used) - self._used
        if self._used + size > self._nbytes:
            raise self._full(nbytes)
        self._wait_for_room(self._nbytes - self._used - size)
        if self._is_cut:
            self._join()
        try:
            buffer = self._take(shape, dtype, order)
        except OutOfMemoryError as error:
            if error.name != "CM_ELIMIT":
                raise  # it was trimmed, and others have the memory now
            buffer = self._take_last(shape, dtype, order, nbytes)
        self._blocks[-1][0].append((buffer, size))
        self._used += size
        self._high_water = max(self._high_water, self._used)
        return buffer

    @hinting
    def zeros(
        self,
        shape: _core._Shape,
        dtype: DTypeLike = "float64",
        *,
        order: _core._Order = "C",
    ) -> _B_co:
        """Hand out memory whose bytes are zero; all else as `empty` says.

        Notes
        -----
        **Blocks** as `cumem.zeros` does as well: for memory that the host can read,
        until it is zero.
        """
        buffer = self.empty(shape, dtype, order=order)
        buffer.fill(np.zeros((), buffer.dtype), stream=self._stream)
        return buffer

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Workspace cannot be copied or pickled: its memory is handed out once; make "
            "another one"
        )

    def close(self) -> None:
        """Give the memory back to the driver, and end all blocks; twice is not an error.

        Notes
        -----
        **Blocks** as `Pool.close` does. What arrays and tensors keep goes back with them.
        """
        while self._blocks:
            self._end_block()
        self._ended.clear()
        self._spent = 0
        self._pool.close()

    def __enter__(self) -> Self:
        """Begin a block.

        Raises
        ------
        ValueError
            If the workspace is closed.
        RuntimeError
            If a block is open in another thread.
        """
        self._check_open()
        if self._blocks:
            self._check_thread()
        self._thread = threading.get_ident()
        self._blocks.append(([], self._used))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the innermost block: buffers handed out in it are closed, never waiting.

        Raises
        ------
        RuntimeError
            If the block was begun in another thread.
        """
        if self._blocks:
            self._check_thread()
            self._end_block()

    def __repr__(self) -> str:
        if self.closed:
            return "<cumem.Workspace, closed>"
        emulated = ", emulated" if _core._is_emulated() else ""
        return fold(
            f"<cumem.Workspace of {self.kind} memory, device {self.device.index}"
            f"{emulated}: {format_nbytes(self._used)} of {format_nbytes(self._nbytes)} "
            "in use>"
        )

    def _take(
        self, shape: _core._Shape, dtype: DTypeLike, order: _core._Order
    ) -> _B_co:
        taken: Any = _core.empty(
            shape,
            dtype,
            self._kind,
            order=order,
            stream=self._stream,
            pool=self._pool,
        )
        made: _B_co = taken
        return made

    def _take_last(
        self,
        shape: _core._Shape,
        dtype: DTypeLike,
        order: _core._Order,
        nbytes: int,
    ) -> _B_co:
        """Once nothing of ended blocks is under way, which may join what is free."""
        self._wait_for_room(0)
        self._join()
        try:
            return self._take(shape, dtype, order)
        except OutOfMemoryError as error:
            if error.name != "CM_ELIMIT":
                raise
            raise self._full(nbytes) from None

    def _join(self) -> None:
        """The pool keeps small and late blocks apart for their own size: between them a
        larger one would be put behind, and leave a hole."""
        self._pool.trim(keep=self._pool.limit or 0, wait=False)
        self._is_cut = False

    def _end_block(self) -> None:
        buffers, self._used = self._blocks.pop()
        self._is_cut = self._is_cut or bool(buffers)
        for buffer, size in buffers:
            buffer.__exit__(None, None, None)
            self._ended.append((buffer, size))
            self._spent += size

    def _wait_for_room(self, most: int) -> None:
        """Until transfers use no more of what has ended than that, the oldest first. What
        streams use is the pool's to wait for."""
        while self._spent > most:
            buffer, size = self._ended[0]
            _core._unregister(buffer, True)
            self._ended.popleft()
            self._spent -= size

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the workspace is closed")

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "a block of the workspace is open in another thread: give each thread a "
                "workspace of its own"
            )

    def _full(self, asked: int) -> OutOfMemoryError:
        """It says so in terms of the workspace."""
        others = ""
        if _end_of(asked, self._used) <= self._nbytes:
            stats = self._pool.stats()
            others = (
                f". The largest piece that is free has "
                f"{format_nbytes(stats.largest_free_nbytes)}: buffers that were handed out "
                "beside bytes still in use lie between, or arrays or tensors keep bytes of "
                "blocks that have ended"
            )
        error = OutOfMemoryError(
            f"the workspace has no room for {format_nbytes(asked)} ({asked} bytes): "
            f"{format_nbytes(self._used)} of its {format_nbytes(self._nbytes)} of "
            f"{self.kind} memory are in use{others}. Make it larger, or end a block first",
            name="CM_ELIMIT",
        )
        error.requested, error.limit, error.live = asked, self._nbytes, self._used
        error.kind, error.device = self.kind, self.device.index
        return error
