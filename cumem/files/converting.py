# SPDX-License-Identifier: Apache-2.0
"""Elements that have another dtype in a file than in memory.

They go by way of two stages of ordinary memory, in turn: while the copy engine converts
what lies in the one, into its place or from there, the other is read or written. So no
second array of the whole is made, whatever its length, and the stages are all that is held
beside it. What is long is cut along its elements; what is short shares a stage with its
neighbours, and is converted together with them.
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

#: Bytes of a stage. An element that is longer has one of its own length.
STAGE_NBYTES = 16 << 20
#: Where arrays begin in a stage: no dtype is aligned to more.
_ALIGN = 64
#: Where a stage begins, so that it can be read past the page cache.
_PAGE = 64 << 10

Array = np.ndarray[Any, Any]


class Item(NamedTuple):
    """An array in a file, and its memory.

    Attributes
    ----------
    offset : int
        In the file, in bytes; the elements follow each other in C order.
    dtype : numpy.dtype
        Of the elements in the file.
    memory : Buffer or numpy.ndarray
        Of any strides and kind, and of another dtype.
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
    """Fill the memory of all items with what `read` reads, converted.

    `read` takes pairs of an offset and of an array of bytes, and returns when these are
    read. Blocks until all is there; the copies come after the work of `stream`, or of the
    current one of the device whose memory is filled.
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
    """Convert the memory of an item and have `write` write it, which takes the same pairs
    as `read` of `read_as` does. Blocks until all is written."""
    with _Stages() as stages:
        before: tuple[_Piece, Array] | None = None
        for group in _groups([item]):
            (piece,) = group
            stage = stages.next(piece.end)
            view = piece.view(stage)
            elements = view.view(piece.dtype).reshape(piece.memory.shape)
            # What is converted lies in the other stage than what is written meanwhile.
            transfer = _copies([(elements, piece.memory)], casting, stream)
            if before is not None:
                write([(before[0].offset, before[1])])
            transfer.wait()
            before = piece, view
        if before is not None:
            write([(before[0].offset, before[1])])


class _Piece(NamedTuple):
    """A part of an item, which lies in the file in one run."""

    offset: int
    dtype: np.dtype[Any]
    memory: Any
    at: int  #: where it lies in the stage

    @property
    def end(self) -> int:
        return self.at + int(self.memory.size) * self.dtype.itemsize

    def view(self, stage: Array) -> Array:
        """Its bytes in the stage."""
        return stage[self.at : self.end]


def _groups(items: Iterable[Item]) -> Iterator[list[_Piece]]:
    """Pieces that have room in one stage, in order."""
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
    """Indices that cut an array of `shape` into pieces of at most `most` elements, which
    follow each other in C order; one that is empty has none."""
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
    """Begin the copies of a stage. One that is long runs in the background, beside what is
    read or written next."""
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
    """Two stages, taken in turn, each of which is free again once what was begun on it is
    done."""

    def __init__(self) -> None:
        self._memory = [np.empty(0, "u1"), np.empty(0, "u1")]
        self._work: list[_core.Transfer | None] = [None, None]
        self._turn = 0

    def next(self, nbytes: int) -> Array:
        """The one whose turn it is, with room for so many bytes; waits until it is free."""
        self._turn ^= 1
        self._wait(self._turn)
        now = self._memory[self._turn].size
        if now < nbytes:
            room = nbytes if now == 0 else max(nbytes, STAGE_NBYTES)
            self._memory[self._turn] = _aligned(room)
        return self._memory[self._turn]

    def begin(self, transfer: _core.Transfer) -> None:
        """Something works on the stage that was given last."""
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
            for turn in range(2):  # after a failure nothing goes on either
                with contextlib.suppress(Exception):
                    self._wait(turn)
            self._memory.clear()  # a traceback would keep it


def _aligned(nbytes: int) -> Array:
    memory = np.empty(nbytes + _PAGE, "u1")
    first = -memory.ctypes.data % _PAGE
    return memory[first : first + nbytes]
