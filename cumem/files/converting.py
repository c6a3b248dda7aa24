# SPDX-License-Identifier: Apache-2.0
"""Reads and writes elements that have another dtype in the file than in memory.

The elements go through two stages, pieces of ordinary memory that are used in turn. While
the copy engine converts the elements of one stage, reading or writing goes on with the
other. The two stages are the only extra memory, however long the array is. The converted
elements are never all in memory at once.

A long array is cut into pieces that fit a stage. Short arrays share a stage with their
neighbours and are converted together with them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from cumem import _core
from cumem.base.kinds import is_on_device

#: The size of a stage. An element that is longer has a stage of its own length.
STAGE_NBYTES = 16 << 20
#: Arrays begin at multiples of this in a stage. No dtype needs a larger alignment.
_ALIGN = 64
#: A stage begins at a multiple of this, so that reading can bypass the page cache.
_PAGE = 64 << 10

Array = np.ndarray[Any, Any]


class Item(NamedTuple):
    """An array in a file, and the memory that it is read to or written from.

    Attributes
    ----------
    offset : int
        The offset of the first element in the file, in bytes. The elements follow each
        other in C order.
    dtype : numpy.dtype
        The dtype of the elements in the file.
    memory : Buffer or numpy.ndarray
        Memory of any strides and kind, with the dtype to convert to or from.
    """

    offset: int
    dtype: np.dtype[Any]
    memory: Any


def read_as(
    items: Iterable[Item],
    read: Callable[[list[tuple[int, Array]]], object],
    casting: Any,
    stream: object,
) -> None:
    """Fill the memory of all items with the converted elements that `read` reads.

    `read` takes pairs of an offset and an array of bytes, and returns when these are read.
    This function blocks until all memory is filled. The copies come after the work of
    `stream`. If it is None, they come after the work of the current stream of the device
    whose memory is filled.
    """
    with _Stages() as stages:
        for group in _groups(items):
            stage = stages.next(group[-1].end)
            views = [piece.view(stage) for piece in group]
            read(
                [(piece.offset, view) for piece, view in zip(group, views, strict=True)]
            )
            pairs = [
                (piece.memory, view.view(piece.dtype).reshape(piece.memory.shape))
                for piece, view in zip(group, views, strict=True)
            ]
            stages.begin(_copies(pairs, casting, stream))


def write_as(
    item: Item,
    write: Callable[[list[tuple[int, Array]]], object],
    casting: Any,
    stream: object,
) -> None:
    """Convert the memory of an item and let `write` write it.

    `write` takes the same pairs as `read` of `read_as`. This function blocks until
    everything is written.
    """
    with _Stages() as stages:
        before: tuple[_Piece, Array] | None = None
        for group in _groups([item]):
            (piece,) = group
            stage = stages.next(piece.end)
            view = piece.view(stage)
            elements = view.view(piece.dtype).reshape(piece.memory.shape)
            # While this piece is converted in its stage, the previous piece is written from
            # the other stage.
            transfer = _copies([(elements, piece.memory)], casting, stream)
            if before is not None:
                write([(before[0].offset, before[1])])
            transfer.wait()
            before = piece, view
        if before is not None:
            write([(before[0].offset, before[1])])


class _Piece(NamedTuple):
    """A part of an item whose bytes are contiguous in the file."""

    offset: int
    dtype: np.dtype[Any]
    memory: Any
    at: int  #: the offset of its bytes in the stage

    @property
    def end(self) -> int:
        return self.at + int(self.memory.size) * self.dtype.itemsize

    def view(self, stage: Array) -> Array:
        """Return its bytes in the stage."""
        return stage[self.at : self.end]


def _groups(items: Iterable[Item]) -> Iterator[list[_Piece]]:
    """Yield lists of pieces, in order, that fit one stage together."""
    group: list[_Piece] = []
    end = 0
    for offset, dtype, memory in items:
        at = offset
        for index in pieces(memory.shape, STAGE_NBYTES // dtype.itemsize):
            part = memory[index]
            nbytes = int(part.size) * dtype.itemsize
            if group and end + nbytes > STAGE_NBYTES:
                yield group
                group, end = [], 0
            group.append(_Piece(at, dtype, part, end))
            at += nbytes
            end += -(-nbytes // _ALIGN) * _ALIGN
    if group:
        yield group


def pieces(shape: tuple[int, ...], most: int) -> Iterator[tuple[Any, ...]]:
    """Yield indices that cut an array of `shape` into pieces of at most `most` elements.

    The pieces follow each other in C order. An empty array has none.
    """
    count = math.prod(shape)
    if count <= max(most, 1):
        if count > 0:
            yield (...,)
        return
    inner = count // shape[0]
    rows = most // inner
    if rows > 0:
        for first in range(0, shape[0], rows):
            yield (slice(first, first + rows), ...)
        return
    for row in range(shape[0]):
        for index in pieces(shape[1:], most):
            yield (row, *index)


def _copies(
    pairs: list[tuple[Any, Any]], casting: Any, stream: object
) -> _core.Transfer:
    """Begin the copies of a stage.

    A single long copy runs in the background, while the next piece is read or written.
    """
    on = stream
    if on is None:
        ends = (end for pair in pairs for end in pair if isinstance(end, _core.Buffer))
        far = next((end for end in ends if is_on_device(end.kind)), None)
        on = None if far is None else _core.current_stream(far.device)
    if len(pairs) == 1:
        ((dst, src),) = pairs
        return _core.copy_async(dst, src, after=on, casting=casting)
    return _core.copy_many_async(pairs, stream=on, casting=casting)


class _Stages:
    """Two stages that are used in turn. Each is used again once its last copy is done."""

    def __init__(self) -> None:
        self._memory = [np.empty(0, "u1"), np.empty(0, "u1")]
        self._work: list[_core.Transfer | None] = [None, None]
        self._turn = 0

    def next(self, nbytes: int) -> Array:
        """Return the other stage, with room for `nbytes`, once its last copy is done."""
        self._turn ^= 1
        self._wait(self._turn)
        now = self._memory[self._turn].size
        if now < nbytes:
            room = nbytes if now == 0 else max(nbytes, STAGE_NBYTES)
            self._memory[self._turn] = _aligned(room)
        return self._memory[self._turn]

    def begin(self, transfer: _core.Transfer) -> None:
        """Remember the copy that uses the stage which `next` returned last."""
        self._work[self._turn] = transfer

    def _wait(self, turn: int) -> None:
        transfer, self._work[turn] = self._work[turn], None
        if transfer is not None:
            transfer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._wait(self._turn ^ 1)
            self._wait(self._turn)
        finally:
            for turn in range(2):  # if one copy failed, the other must end as well
                with contextlib.suppress(Exception):
                    self._wait(turn)
            self._memory.clear()  # a traceback may keep this object alive


def _aligned(nbytes: int) -> Array:
    memory = np.empty(nbytes + _PAGE, "u1")
    first = -memory.ctypes.data % _PAGE
    return memory[first : first + nbytes]
