# SPDX-License-Identifier: Apache-2.0
"""Tables, and random layers, for tests of calls that copy rows by their numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cumem
from support import values
from support.pieces import numbers

#: The kinds of memory that a kernel of a device can reach.
REACHED = ["device", "pinned", "mapped", "managed"]
SHAPE = (100, 40)
ORDER = np.random.default_rng(4).permutation(SHAPE[0])


def table(kind: str = "pinned", shape: tuple[int, int] = SHAPE) -> tuple[Any, Any]:
    """Return random rows of bytes as an array, and a buffer of `kind` with the same."""
    data = numbers(shape[0] * shape[1]).reshape(shape)
    return data, cumem.array(data, kind=kind)  # type: ignore[call-overload]


def on_device(rows: Any, dtype: Any = None) -> cumem.Buffer:
    """Return the numbers of rows in memory of the device."""
    return cumem.array(np.asarray(rows, dtype), kind="device")


def draw_width(data: Any) -> int:
    """Choose how many bytes a row has: few, or up to 4,096."""
    width: int = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 4096)))
    return width


def draw_source_rows(data: Any, row_count: int, count: int) -> list[int]:
    """Choose rows of a source, some by negative numbers and perhaps more than once."""
    row = st.integers(-row_count, row_count - 1)
    rows: list[int] = data.draw(st.lists(row, min_size=count, max_size=count))
    return rows


def draw_target_rows(data: Any, row_count: int) -> list[int]:
    """Choose different rows of a target, some by negative numbers."""
    count = data.draw(st.integers(0, row_count))
    order = data.draw(st.permutations(range(row_count)))[:count]
    return [row - data.draw(st.sampled_from([0, row_count])) for row in order]


def draw_dtypes(data: Any) -> tuple[str, str]:
    """Choose the dtypes of the numbers of both ends."""
    dtypes: tuple[str, str] = data.draw(
        st.tuples(*[st.sampled_from(["i1", "i4", "i8"])] * 2)
    )
    return dtypes


@dataclass
class Layers:
    """The targets and sources of a copy by rows, which are views of larger arrays.

    `wholes` has the arrays in which the targets lie, and `wanted` what these must hold
    after the copy. Rows have gaps between them. Source and target of a layer may lie in
    one array and share rows there.
    """

    targets: list[Any] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)
    wholes: list[Any] = field(default_factory=list)
    wanted: list[np.ndarray] = field(default_factory=list)

    def check(self) -> None:
        """Compare every byte of all memories, gaps included."""
        for got, expected in zip(self.wholes, self.wanted, strict=True):
            assert (values.get(got) == expected).all()


def draw_layers(
    data: Any,
    width: int,
    counts: list[tuple[int, int]],
    rows: tuple[Any, Any],
    starts: st.SearchStrategy[int],
) -> Layers:
    """Make layers for a copy from rows `rows[1]` of each source to rows `rows[0]` of its
    target.

    Each of `counts` says how many rows the target and the source of a layer have. The
    array of a target has 40 rows, and `starts` draws the row with which the target begins.
    """
    made = Layers()
    kinds = data.draw(st.tuples(*[st.sampled_from(REACHED)] * 2))
    one_memory, gap = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    for layer, (dst_count, src_count) in enumerate(counts):
        whole = numbers(40 * (width + gap), layer).reshape(40, width + gap)
        first: Any = values.put(whole, kinds[0])
        second: Any = first if one_memory else values.put(whole, kinds[1])
        start = data.draw(starts)
        made.targets.append(first[start : start + dst_count, :width])
        made.sources.append(second[:src_count, :width])
        made.wholes.append(first)
        expected = whole.copy()
        read = whole[:src_count, :width]
        expected[start : start + dst_count, :width][rows[0]] = read[rows[1]]
        made.wanted.append(expected)
    return made
