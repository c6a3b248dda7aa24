# SPDX-License-Identifier: Apache-2.0
"""Random copies of rows by index, with their memory and numbers, and NumPy's result.

A `Case` is drawn when only the sizes of two pieces of memory are known. The same case can
then view different bytes: those of the memory in which cumem copies rows, and those of
NumPy arrays in which NumPy does what the copy must do. So every byte of the memory can be
compared afterwards, even those between rows and elements.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from torture.boxes import Make, placed

#: Rows are copied as they are, so only the sizes and the fields of dtypes matter.
DTYPES = (
    *("u1", "u1", "u1", "?", "i2", ">i4", "f4", "f4", "f8", "c16"),
    *("M8[ns]", "S3", "V5", "i4,f4"),
)
WIDTHS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
LONGEST_ROW = 4096
MOST_ROWS = 60
MOST_SHORT_ROWS = 1500  # if each row has at most 16 bytes
MOST_LAYERS = 4


# -- how rows lie in memory ------------------------------------------------------------


def lay(
    rng: random.Random, dtype: np.dtype, shape: tuple[int, ...], begin: int, room: int
) -> Make | None:
    """Choose how an array lies within `room` bytes: with gaps, turned, at any address.

    Returns what `placed` returns.
    """
    axes = list(range(len(shape)))
    steps, pads = [1] * len(shape), [0] * len(shape)
    if rng.random() < 0.5:
        steps[0] = rng.choice((1, 1, -1, 2, 3))
        pads[-1] = rng.choice((0, 1, 3, 16))
    if len(shape) > 1 and rng.random() < 0.2:
        steps[-1] = rng.choice((-1, 2))
    if rng.random() < 0.1:
        rng.shuffle(axes)
    align = rng.choice((1, 16, dtype.itemsize))
    return placed(rng, dtype, shape, (axes, steps, pads), (begin, room), align)


def halves(make: Make, layer: int) -> Make:
    """Return a function that views one layer of an array of shape (rows, layers, ...)."""
    return lambda memory: make(memory)[:, layer]


def row_of(rng: random.Random) -> tuple[np.dtype, tuple[int, ...]]:
    """Choose the dtype and the shape of a row of 1 to 4,096 bytes."""
    dtype = np.dtype(rng.choice(DTYPES))
    nbytes = int(2 ** rng.uniform(0, math.log2(LONGEST_ROW)) + 0.5)
    if rng.random() < 0.5:
        nbytes = 1 << rng.randrange(13)
    count = max(1, nbytes // dtype.itemsize)
    if count == 1 and rng.random() < 0.5:
        return dtype, ()
    if count % 2 == 0 and rng.random() < 0.2:
        return dtype, (2, count // 2)
    return dtype, (count,)


@dataclasses.dataclass
class Side:
    """All layers of one end: the view of each, and how many rows it has."""

    views: list[Make]
    counts: list[int]


def side_of(
    rng: random.Random,
    dtype: np.dtype,
    row: tuple[int, ...],
    layers: int,
    room: int,
    may_share: bool,
) -> Side | None:
    """Choose how the layers of one end lie in `room` bytes.

    The layers of a target share no byte. Those of a source may share bytes, so that each of
    them can lie anywhere.
    """
    nbytes = math.prod(row) * dtype.itemsize
    limit = MOST_SHORT_ROWS if nbytes <= 16 and rng.random() < 0.2 else MOST_ROWS
    most = min(limit, room // nbytes // layers)
    if most < 1:
        return None
    if layers > 1 and rng.random() < 0.4:
        count = rng.randint(1, most)
        whole = lay(rng, dtype, (count, layers, *row), 0, room)
        if whole is not None:
            views = [halves(whole, layer) for layer in range(layers)]
            return Side(views, [count] * layers)
    views, counts = [], []
    for layer in range(layers):
        count = rng.randint(1, most)
        part = room // layers
        begin = 0 if may_share else layer * part
        view = lay(rng, dtype, (count, *row), begin, room if may_share else part)
        if view is None:
            return None
        views.append(view)
        counts.append(count)
    return Side(views, counts)


# -- numbers ---------------------------------------------------------------------------


def distinct(rng: random.Random, counts: list[int], most: int) -> list[int]:
    """Choose numbers of rows of a target, which name no row of any layer twice.

    A negative number counts from the end of each layer. So -1 and 4 name the same row of a
    layer with five rows, but not of one with six.
    """
    least = min(counts)
    numbers = rng.sample(range(least), rng.randint(0, most))
    order = rng.randrange(3)
    if order == 0:
        numbers.sort()
    elif order == 1:  # runs of neighbours, which are joined
        start = rng.randrange(least - len(numbers) + 1)
        numbers = [start + i for i in range(len(numbers))]
    seen: list[set[int]] = [set() for _ in counts]
    found = []
    turned = rng.choice((0.0, 0.0, 0.5, 1.0))
    for number in numbers:
        named = number - least if rng.random() < turned else number
        rows = [named if named >= 0 else named + count for count in counts]
        if any(row in layer for row, layer in zip(rows, seen, strict=True)):
            continue
        for row, layer in zip(rows, seen, strict=True):
            layer.add(row)
        found.append(named)
    return found


def repeated(rng: random.Random, counts: list[int], count: int) -> list[int]:
    """Choose numbers of rows of a source, of which each may come several times."""
    least = min(counts)
    if rng.random() < 0.2:
        start = rng.randrange(least)
        return [min(start + i, least - 1) for i in range(count)]
    lowest = rng.choice((0, -least))
    few = rng.choice((least, max(1, least // 8)))
    return [rng.randrange(lowest, few) for _ in range(count)]


def width_for(rng: random.Random, numbers: list[int]) -> str:
    """Choose a dtype of integers that holds all of the numbers."""
    fits = [
        width
        for width in WIDTHS
        if all(np.iinfo(width).min <= n <= np.iinfo(width).max for n in numbers)
    ]
    return rng.choice(fits)


# -- cases -----------------------------------------------------------------------------

#: What may be wrong with the numbers of a case.
NOTHING, NO_ROW, TWICE = "", "no such row", "a row twice"


@dataclasses.dataclass
class Case:
    """Rows to copy: the views of each layer, and the numbers of its rows."""

    dtype: np.dtype
    row: tuple[int, ...]
    to: Side
    of: Side
    dst_rows: list[int] | None
    src_rows: list[int] | None
    wrong: str = NOTHING
    wrong_side: str = ""  # "dst_rows" or "src_rows"

    def __repr__(self) -> str:
        rows = f"{len(self.to.views)} layers of rows {self.row} of {self.dtype}"
        return (
            f"{rows}, {self.to.counts} from {self.of.counts}, dst_rows={self.dst_rows}, "
            f"src_rows={self.src_rows}{', ' + self.wrong if self.wrong else ''}"
        )

    @property
    def count(self) -> int:
        given = self.dst_rows if self.dst_rows is not None else self.src_rows
        assert given is not None
        return len(given)

    @property
    def nbytes(self) -> int:
        row = math.prod(self.row) * self.dtype.itemsize
        return self.count * row * len(self.to.views)

    def targets(self, memory: Any) -> list[Any]:
        return [view(memory) for view in self.to.views]

    def sources(self, memory: Any) -> list[Any]:
        return [view(memory) for view in self.of.views]

    def write(
        self, target: np.ndarray, source: np.ndarray, by_layer: bool = False
    ) -> None:
        """Do what the copy does, to arrays that have the contents of both ends.

        All rows are read before the first is written. With `by_layer` this is done for one
        layer after the other. Numbers that name no row are left out, as a device leaves
        them out.
        """
        dst = range(self.count) if self.dst_rows is None else self.dst_rows
        src = range(self.count) if self.src_rows is None else self.src_rows
        to, of = max(self.to.counts), max(self.of.counts)
        pairs = [
            (d, s)
            for d, s in zip(dst, src, strict=True)
            if -to <= d < to and -of <= s < of
        ]
        if not pairs:
            return
        written, taken = [d for d, _ in pairs], [s for _, s in pairs]
        targets, sources = self.targets(target), self.sources(source)
        if by_layer:
            for to_layer, of_layer in zip(targets, sources, strict=True):
                to_layer[written] = of_layer[taken]
            return
        read = [layer[taken] for layer in sources]  # copies
        for layer, rows in zip(targets, read, strict=True):
            layer[written] = rows

    def after(
        self,
        target: np.ndarray,
        source: np.ndarray,
        found: np.ndarray,
        by_layer: bool = False,
    ) -> np.ndarray:
        """Return the bytes that a target must have after the copy.

        Parameters
        ----------
        target, source : numpy.ndarray
            The contents of both ends before, which may be one and the same array.
        found : numpy.ndarray
            The bytes that the target has after the copy. They matter only for a row that a
            device has written twice, which may have the bytes of either of its sources.
        by_layer : bool, optional
            Whether the layers are copied one after the other.
        """
        first, last = target.copy(), target.copy()
        self.write(last, last if source is target else source, by_layer)
        if self.wrong != TWICE:
            return last
        src = range(self.count) if self.src_rows is None else self.src_rows
        assert self.dst_rows is not None
        turned = dataclasses.replace(
            self, dst_rows=self.dst_rows[::-1], src_rows=list(src)[::-1]
        )
        turned.write(first, first if source is target else source, by_layer)
        return np.where(found == first, first, last)


def spoil(rng: random.Random, case: Case) -> None:
    """Make one number wrong: it names no row, or a row of the target a second time."""
    sides = [
        name for name in ("dst_rows", "src_rows") if getattr(case, name) is not None
    ]
    side = rng.choice(sides)
    numbers = getattr(case, side)
    if not numbers:
        return
    place = rng.randrange(len(numbers))
    if side == "dst_rows" and len(numbers) > 1 and rng.random() < 0.4:
        numbers[place] = numbers[place - 1]
        case.wrong = TWICE
    else:
        counts = (case.to if side == "dst_rows" else case.of).counts
        most = max(counts)
        numbers[place] = rng.choice((most, most + 7, -most - 1, -most - 9))
        case.wrong = NO_ROW
    case.wrong_side = side


def draw(
    rng: random.Random,
    to_room: int,
    of_room: int,
    spoiled: float = 0.0,
    layers: int | None = None,
) -> Case | None:
    """Draw a case for two pieces of memory of these sizes.

    Parameters
    ----------
    rng : random.Random
        The source of everything that is random.
    to_room, of_room : int
        The sizes of the target and of the source, in bytes.
    spoiled : float, optional
        How likely it is that a number is wrong.
    layers : int, optional
        How many layers there are; by default a random number.

    Returns
    -------
    Case or None
        The case, or None if the memory is too small for what was drawn.
    """
    dtype, row = row_of(rng)
    if layers is None:
        layers = rng.choice((1, 1, 2, MOST_LAYERS))
    to = side_of(rng, dtype, row, layers, to_room, may_share=False)
    of = side_of(rng, dtype, row, layers, of_room, may_share=True)
    if to is None or of is None:
        return None
    form = rng.choice(("both", "both", "dst_rows", "src_rows"))
    dst_rows: list[int] | None = None
    src_rows: list[int] | None = None
    if form == "src_rows":
        count = rng.randint(0, min(to.counts))
        src_rows = repeated(rng, of.counts, count)
    else:
        most = min(to.counts)
        most = most if form == "both" else min(most, *of.counts)
        dst_rows = distinct(rng, to.counts, most)
        if form == "both":
            src_rows = repeated(rng, of.counts, len(dst_rows))
    case = Case(dtype, row, to, of, dst_rows, src_rows)
    if rng.random() < spoiled:
        spoil(rng, case)
    return case


def as_numbers(
    rng: random.Random,
    numbers: list[int] | None,
    place: str,
    put: Callable[[np.ndarray, str], Any],
) -> Any:
    """Put numbers into memory of a kind, as integers of any width, with gaps or without.

    Parameters
    ----------
    rng : random.Random
        The source of everything that is random.
    numbers : list of int or None
        The numbers. None is returned as it is.
    place : str
        "list", "numpy", or a place that `put` knows.
    put : callable
        A function that puts an array into memory of another place.

    Returns
    -------
    list, array or buffer
    """
    if numbers is None or place == "list":
        return numbers
    width = np.dtype(width_for(rng, numbers))
    step = rng.choice((1, 1, 1, 2, -1))
    spread = np.full(max(1, len(numbers) * abs(step)), 77, width)
    view = spread[: len(numbers) * abs(step)][::step]
    view[...] = numbers
    if place == "numpy":
        return view
    return put(spread, place)[: len(numbers) * abs(step)][::step]
