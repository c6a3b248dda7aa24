# SPDX-License-Identifier: Apache-2.0
"""Shows a pool in detail, with its segments, their blocks, and a map of them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.displays import show
from cumem.base.kinds import Kind
from cumem.base.places import found_in
from cumem.base.units import (
    fit,
    format_count,
    format_nbytes,
    read_size,
    terminal_width,
)
from cumem.pools.statistics import pool_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Block(Answer):
    """A run of bytes of a segment that have the same state.

    Attributes
    ----------
    address : int
        The address for the device.
    nbytes : int
    requested_nbytes : int
        The bytes that were asked for; 0 unless the block is live or in flight.
    state : str
        ``"live"``, ``"in flight"``, ``"cached"``, or ``"gap"`` for addresses without
        memory.

    Examples
    --------
    >>> with cumem.Pool("pinned") as pool:
    ...     kept = cumem.empty_pinned(1000, "u1")
    >>> live = [b for s in pool.snapshot().segments for b in s.blocks if b.state == "live"]
    >>> [block.requested_nbytes for block in live]
    [1000]
    """

    address: int
    nbytes: int
    requested_nbytes: int
    state: str


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Segment(Answer):
    """A range of addresses of a pool.

    Attributes
    ----------
    address : int
    nbytes : int
        The length of the range, including gaps.
    blocks : tuple of Block
        The blocks in the order of their addresses. They cover the whole range.

    Examples
    --------
    >>> with cumem.Pool("pinned") as pool:
    ...     kept = cumem.empty_pinned(1 << 20, "u1")
    >>> segment = pool.snapshot().segments[0]
    >>> segment.nbytes >= 1 << 20, len(segment.blocks) > 0
    (True, True)
    """

    address: int
    nbytes: int
    blocks: tuple[Block, ...]

    _keys = ("reserved_nbytes",)

    @property
    def reserved_nbytes(self) -> int:
        """The bytes that have memory behind them."""
        return sum(b.nbytes for b in self.blocks if b.state != "gap")


#: The states in the order of cm_block_state in csrc/pool/pool.h.
_STATES = ("live", "in flight", "cached", "gap")
_MARKS = {"live": "#", "in flight": "~", "cached": ".", "gap": " "}
_LEGEND = "# live  ~ in flight  . cached  + live and other  | gap"


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Snapshot(Answer):
    """All segments and blocks of a pool at one moment; ``print()`` draws a map.

    Attributes
    ----------
    name, kind : str
    device : int
    segments : tuple of Segment

    Examples
    --------
    >>> with cumem.Pool("pinned") as pool:
    ...     kept = cumem.empty_pinned(1 << 20, "u1")
    >>> snapshot = pool.snapshot()
    >>> len(snapshot.segments), type(snapshot.map()).__name__
    (1, 'str')
    """

    name: str
    kind: Kind
    device: int
    segments: tuple[Segment, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all segments."""
        return tuple(b for segment in self.segments for b in segment.blocks)

    def map(self, width: int = 64, unit: int | str | None = None) -> str:
        """Draw the pool with one character for `unit` bytes.

        Parameters
        ----------
        width : int
            The number of characters in a line.
        unit : int or str, optional
            The bytes per character, such as ``65536`` or ``"64KiB"``. By default the
            map of the pool has about 16 lines.

        Returns
        -------
        str
            A line of totals, a legend, and the segments, in which one ``|`` stands for
            each gap.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `width` or `unit` is less than 1, or `unit` cannot be read.
        """
        if isinstance(width, bool) or not hasattr(width, "__index__"):
            raise TypeError(f"width must be an int, not {type(width).__name__}")
        width = operator.index(width)
        unit = None if unit is None else read_size(unit, "unit", False, None)
        if width < 1 or (unit is not None and unit < 1):
            raise ValueError("width and unit must be at least 1")
        reserved = sum(segment.reserved_nbytes for segment in self.segments)
        if unit is None:
            unit = 512
            while unit * width * 16 < reserved:
                unit *= 2
        lines = [
            f"{self.kind} {self.device} {self.name}: {format_nbytes(reserved)} in "
            f"{format_count(len(self.segments), 'segment')}, "
            f"{format_nbytes(unit)} per character",
            _LEGEND,
        ]
        for segment in self.segments:
            lines.append(
                f"0x{segment.address:x} {format_nbytes(segment.reserved_nbytes)}"
            )
            marks = "".join(_marks(segment, unit))
            lines += [marks[i : i + width] for i in range(0, len(marks), width)]
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the snapshot as `Pool.plot` draws a pool, and return the axes."""
        axes: Axes = show("plot", self, ax)
        return axes

    def __repr__(self) -> str:
        return fit(self.map(min(64, terminal_width())))

    __str__ = __repr__


def _marks(segment: Segment, unit: int) -> Iterator[str]:
    """Yield one character for each `unit` bytes, and one for each gap between them."""
    run: list[Block] = []
    for block in segment.blocks:
        if block.state == "gap":
            yield from _marks_of_run(run, unit)
            run = []
            yield "|"
        else:
            run.append(block)
    yield from _marks_of_run(run, unit)


def _marks_of_run(run: list[Block], unit: int) -> Iterator[str]:
    states: set[str] = set()
    room = unit
    for block in run:
        left = block.nbytes
        while left:
            step = min(left, room)
            states.add(block.state)
            left -= step
            room -= step
            if room == 0:
                yield _mark(states)
                states, room = set(), unit
    if states:
        yield _mark(states)


def _mark(states: set[str]) -> str:
    if len(states) == 1:
        return _MARKS[next(iter(states))]
    return "+" if "live" in states else "~"


def snapshot(config: _core._PoolConfig, rows: list[_core._PoolBlock]) -> Snapshot:
    """Make the answer of `Pool.snapshot`."""
    blocks: dict[int, list[Block]] = {}
    for row in rows:
        state = _STATES[row.state]
        block = Block(row.address, row.nbytes, row.requested_nbytes, state)
        blocks.setdefault(row.segment, []).append(block)
    segments = tuple(
        Segment(found[0].address, sum(b.nbytes for b in found), tuple(found))
        for found in blocks.values()
    )
    index = config.device.index
    return Snapshot(pool_name(config), config.kind, index, segments)
