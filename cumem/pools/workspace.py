# SPDX-License-Identifier: Apache-2.0
"""A workspace is scratch memory that is taken buffer by buffer and given back at once.

A workspace is a pool with one segment of a fixed size. Within a ``with`` block, buffers
are taken from the front of the segment to its end. When the block ends, they are closed,
and the pool can hand out the memory again. Two things make this less simple. Transfers may
still use the buffers of blocks that have ended, so `_wait_for_room` waits for the oldest
of these. And the pool may keep freed pieces separate, so `_join` makes it merge them.
"""

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
    NamedTuple,
    NoReturn,
    Self,
    SupportsIndex,
    TypeVar,
    final,
    overload,
)

import numpy as np

from cumem import _core
from cumem.base.errors import OutOfMemoryError
from cumem.base.units import fold, format_nbytes, read_size
from cumem.buffers.arguments import hinting
from cumem.pools.pool import Pool

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from cumem._core import _B_co
    from cumem.devices.device import Device
else:
    _B_co = TypeVar("_B_co", covariant=True)

_PAGE = 4096
_LONG = 64 << 10


def _end_of(nbytes: int, used: int) -> int:
    """Return an upper bound of where a block of `nbytes` ends after `used` bytes.

    The pool may end the block earlier, but never later. So a block that fits by this count
    also fits in the pool. The pool begins long blocks at whole pages.
    """
    step = _PAGE if nbytes >= _LONG else 512
    return -(-used // step) * step + max(512, -(-nbytes // step) * step)


def _nbytes_of(shape: _core._Shape, dtype: DTypeLike) -> int:
    """Return the size of a buffer in bytes, or 0 for arguments that `empty` will refuse."""
    lengths: Any = shape
    try:
        try:
            count = operator.index(lengths)
        except TypeError:
            count = math.prod(map(operator.index, lengths))
        return max(0, np.dtype(dtype).itemsize * count)
    except (TypeError, ValueError):
        return 0


class _Block(NamedTuple):
    """A `with` block of a workspace."""

    #: The buffers that the block handed out, and their sizes.
    buffers: list[tuple[_core.Buffer, int]]
    #: The bytes that outer blocks had handed out when the block began.
    used_before: int


@final
class Workspace(Generic[_B_co]):
    """Scratch memory of a fixed size, for buffers that end together.

    In a ``with`` block `empty` and `zeros` hand out the memory from front to back, and the
    end of the block takes it all back. Blocks may be nested. The end of an inner block
    takes back only what was handed out in that block.

    Parameters
    ----------
    nbytes : int or str
        The size, such as ``1 << 20`` or ``"64 MiB"``. It must be at least 1, and is rounded
        up to whole pages of 4096 bytes.
    kind : str
        The kind of memory, as for `empty`; device memory by default.
    device : Device, int or str, optional
        The device of the memory, or the one whose context page-locks it; by default
        cumem's current one.
    stream : Stream or other stream object, optional
        The stream on which device memory is used first; by default the stream that is
        current when a buffer is handed out.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If `nbytes` is less than 1, the kind or device does not exist, or `stream` is of
        another device.
    OutOfMemoryError, CudaError
        If there is not enough memory.

    Notes
    -----
    The memory is taken at once, and belongs to a `Pool` of its own that never has more.
    Between blocks the pool caches it: `trim`, or another pool that runs out of memory, may
    give it back to the driver, and the next block takes it again. The size of each buffer
    is rounded up to a multiple of 512 bytes, or of 4096 from 64 KiB on, and the buffer
    begins at such a multiple. A workspace is for one thread at a time, whose blocks end in
    the reverse order of their beginning.

    Another thread may call `close`. It ends the blocks of all threads, and an allocation
    that runs meanwhile raises a ValueError.

    A buffer is closed when its block ends, and using it afterwards raises a ValueError.
    Arrays and tensors made from it stay valid. Their bytes are not handed out again until
    they are dropped, and bytes that a stream still works on are not handed out again until
    it has finished. A buffer that is made meanwhile is placed behind those bytes, which may
    split the free memory in two.

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
        *("__weakref__", "_blocks", "_ended", "_high_water", "_is_closed"),
        *("_is_cut", "_kind"),
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
        self._blocks: list[_Block] = []  #: the open ones, the innermost last
        #: Buffers of ended blocks, which unfinished transfers may still use.
        self._ended: collections.deque[tuple[_core.Buffer, int]] = collections.deque()
        self._spent = 0  #: the bytes of these buffers
        self._used = self._high_water = self._thread = 0
        #: Whether close() was called; shutdown() closes only the pool.
        self._is_closed = False
        self._is_cut = False  #: whether free pieces of ended blocks may be unmerged
        # The pool has one segment, which it cuts from the front. So there are no holes
        # except where bytes of ended blocks are still in use.
        self._pool: Pool[Any] = Pool(kind, device=device, segments="malloc")
        self._pool.allocate(self._nbytes, stream)  # makes the segment, and is dropped
        self._pool.limit = self._pool.stats().reserved_nbytes

    @property
    def nbytes(self) -> int:
        """The size of the workspace in bytes."""
        return self._nbytes

    @property
    def kind(self) -> _core._Kind:
        """The kind of memory: "device", "pinned", "mapped" or "managed"."""
        return self._kind

    @property
    def device(self) -> Device:
        """The device of the memory, or the one whose context page-locks it."""
        return self._pool.device

    @property
    def used(self) -> int:
        """The bytes that are handed out, including rounding; 0 outside blocks."""
        return self._used if self._blocks and not self.closed else 0

    @property
    def high_water(self) -> int:
        """The largest value that `used` has had: this size would have been enough."""
        return self._high_water

    @property
    def closed(self) -> bool:
        """Whether close() or shutdown() was called."""
        return self._is_closed or self._pool.closed

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
            The lengths in elements.
        dtype : dtype_like
            Any NumPy dtype without Python objects.
        order : {'C', 'F'}
            Whether the last index ('C') or the first ('F') runs fastest.

        Returns
        -------
        Buffer
            A buffer of the workspace's kind, whose bytes are not set.

        Raises
        ------
        TypeError
            If an argument has the wrong type, or the dtype holds Python objects.
        ValueError
            If a length is negative, `order` is unknown, no block is open, or the
            workspace is closed, also by another thread during the call.
        RuntimeError
            If the block was begun in another thread.
        OutOfMemoryError
            If not enough memory is left, or not enough in one piece. The error's
            ``requested``, ``limit`` and ``live`` are the size that was asked for, the size
            of the workspace, and the bytes in use.

        Notes
        -----
        **Blocks** only if the buffer needs bytes that work queued in ended blocks still
        uses. It then waits until that work is done, with the GIL released. **Ordered
        after**: device memory may be used at once on the workspace's stream. To use it on
        another stream, the caller has to order that stream after the workspace's.
        """
        block = self._blocks[-1] if self._blocks else None
        if block is None:
            self._check_open()
            raise ValueError("a workspace hands out memory only inside its with block")
        self._check_thread()
        nbytes = _nbytes_of(shape, dtype)
        size = _end_of(nbytes, self._used) - self._used
        if self._used + size > self._nbytes:
            raise self._full(nbytes)
        self._wait_for_room(self._nbytes - self._used - size, block)
        try:
            if self._is_cut:
                self._join()
            buffer = self._take(shape, dtype, order)
        except OutOfMemoryError as error:
            if error.name != "CM_ELIMIT":
                raise  # the memory was trimmed, and others have taken it
            buffer = self._take_last(shape, dtype, order, nbytes, block)
        except ValueError:
            self._check_block(block)  # says more than that the pool is closed
            raise
        block.buffers.append((buffer, size))
        if not self._is_open(block):  # close() may have missed this buffer
            buffer.__exit__(None, None, None)
            self._check_block(block)
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
        """Hand out memory as `empty` does, and set its bytes to zero.

        Notes
        -----
        **Blocks** as `empty` does. If the host can read the memory, it also waits until the
        memory is zero, as `cumem.zeros` does.
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
        """End all blocks, and give the memory back to the driver.

        Closing a workspace twice is not an error. Any thread may do it: blocks of other
        threads end as well, and an allocation that runs there raises a ValueError.

        Notes
        -----
        **Blocks** as `Pool.close` does. Memory that arrays and tensors keep is given back
        when they are dropped.
        """
        self._is_closed = True
        # The lists are replaced rather than emptied, since another thread may be working
        # through one of them. That thread learns from `_is_open` that its block has gone.
        blocks, self._blocks = self._blocks, []
        for block in reversed(blocks):
            for buffer, _ in block.buffers:
                buffer.__exit__(None, None, None)
        self._ended = collections.deque()
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
        self._blocks.append(_Block([], self._used))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the innermost block, and close its buffers; this never waits.

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
        block: _Block,
    ) -> _B_co:
        """Wait until ended blocks use no memory, merge free pieces, and allocate again."""
        self._wait_for_room(0, block)
        self._join()
        try:
            return self._take(shape, dtype, order)
        except OutOfMemoryError as error:
            if error.name != "CM_ELIMIT":
                raise
            raise self._full(nbytes) from None

    def _join(self) -> None:
        """Make the pool merge free pieces that it keeps separate.

        The pool keeps small freed pieces, and those that a stream may still use, for
        requests of the same size. A larger buffer would be placed behind them and leave a
        hole.
        """
        self._pool.trim(keep=self._pool.limit or 0, wait=False)
        self._is_cut = False

    def _end_block(self) -> None:
        try:
            block = self._blocks.pop()
        except IndexError:  # another thread has closed the workspace this moment
            return
        self._used = block.used_before
        self._is_cut = self._is_cut or bool(block.buffers)
        for buffer, size in block.buffers:
            buffer.__exit__(None, None, None)
            self._ended.append((buffer, size))
            self._spent += size

    def _wait_for_room(self, most: int, block: _Block) -> None:
        """Wait until transfers use at most `most` bytes of ended blocks, the oldest first.

        The pool itself waits for streams that use the memory.
        """
        ended = self._ended
        while self._spent > most and ended:
            buffer, size = ended[0]
            _core._unregister(buffer, True)
            self._check_block(block)
            ended.popleft()
            self._spent -= size

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the workspace is closed")

    def _is_open(self, block: _Block) -> bool:
        """Return whether the block that was innermost when a call began is still open.

        Only close() can have ended it meanwhile, in another thread or in a finaliser.
        """
        blocks = self._blocks
        return not self.closed and bool(blocks) and blocks[-1] is block

    def _check_block(self, block: _Block) -> None:
        if not self._is_open(block):
            raise ValueError("the workspace was closed while it handed out memory")

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "a block of the workspace is open in another thread: give each thread a "
                "workspace of its own"
            )

    def _full(self, asked: int) -> OutOfMemoryError:
        """Make the error for a full workspace, instead of the one about its pool."""
        others = ""
        if _end_of(asked, self._used) <= self._nbytes:
            stats = self._pool.stats()
            others = (
                f". The largest free piece has "
                f"{format_nbytes(stats.largest_free_nbytes)}, because arrays or tensors "
                "keep bytes of blocks that have ended, or buffers lie between the free "
                "pieces"
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
