# SPDX-License-Identifier: Apache-2.0
"""The kernel that copies rows by their numbers, on the emulated device and on a GPU.

Each case is compared with NumPy's `dst[d] = src[s]`, bytes between the rows included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, testing

import cumem

BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {
    "up": (cumem.empty_device, cumem.empty_mapped),
    "down": (cumem.empty_mapped, cumem.empty_device),
    "within": (cumem.empty_device, cumem.empty_device),
    "managed": (cumem.empty_managed, cumem.empty_device),
}
WIDTHS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
WRONG_DST, WRONG_SRC = 1, 2


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with session.opened(request.param):
        yield request.param


@dataclass
class Shape:
    """How the rows of one end lie: `row` bytes each, `gap` apart, from `start` on."""

    rows: int
    row: int
    gap: int
    start: int

    def view(self, whole: Any) -> Any:
        """Return the rows of a buffer, or of an array, of room() bytes."""
        pitch = self.row + self.gap
        ends = whole[self.start : self.start + self.rows * pitch]
        return ends.reshape(self.rows, pitch)[:, : self.row]

    def room(self) -> int:
        return self.start + self.rows * (self.row + self.gap)


def on_device(values: np.ndarray) -> Any:
    buffer = cumem.empty_device(values.shape, values.dtype)
    cumem.copy(buffer, values)
    return buffer


def check(
    direction: str,
    ends: tuple[Shape, Shape],
    dst_rows: np.ndarray | None,
    src_rows: np.ndarray | None,
    *,
    layers: int = 1,
    max_sms: int = 0,
) -> int:
    """Copy, compare all bytes of the targets with NumPy's, and return the flag."""
    kinds = KINDS[direction]
    roll = np.random.default_rng(35)
    wholes: list[list[Any]] = [[], []]
    arrays: list[list[np.ndarray]] = [[], []]
    for _ in range(layers):
        for side, shape in enumerate(ends):
            wholes[side].append(kinds[side](shape.room(), np.uint8))
            arrays[side].append(roll.integers(0, 256, shape.room(), np.uint8))
            cumem.copy(wholes[side][-1], arrays[side][-1])
    flag = cumem.empty_mapped(1, np.uint32)
    flag[...] = 0
    views = [
        [shape.view(whole) for whole in wholes[side]] for side, shape in enumerate(ends)
    ]
    numbers = [None if n is None else on_device(n) for n in (dst_rows, src_rows)]
    testing.copy_rows(*views, *numbers, flag, max_sms=max_sms)
    given_rows = [n for n in (dst_rows, src_rows) if n is not None]
    count = len(given_rows[0]) if given_rows else ends[0].rows
    plain = np.arange(count)
    to = plain if dst_rows is None else dst_rows.astype(object)
    source = plain if src_rows is None else src_rows.astype(object)
    right = [
        i
        for i in range(count)
        if -ends[0].rows <= to[i] < ends[0].rows
        and -ends[1].rows <= source[i] < ends[1].rows
    ]
    for k in range(layers):
        expected = arrays[0][k]
        rows = ends[1].view(arrays[1][k])
        for i in right:
            ends[0].view(expected)[int(to[i])] = rows[int(source[i])]
        got = np.empty_like(expected)
        cumem.copy(got, wholes[0][k])
        np.testing.assert_array_equal(got, expected)
    return int(np.asarray(flag)[0])


@pytest.mark.parametrize("direction", KINDS)
@pytest.mark.parametrize(
    "row", [1, 3, 16, 20, 100, 256, 512, 528, 1040, 2048, 4095, 4096, 65536]
)
def test_rows_of_a_kind_and_length_are_numpys(
    backend, direction: str, row: int
) -> None:
    roll = np.random.default_rng(row)
    dst_rows = roll.permutation(60)[:40].astype(np.int64)
    src_rows = roll.integers(-50, 50, 40).astype(np.int32)
    ends = Shape(60, row, 0, 0), Shape(50, row, 0, 0)
    assert check(direction, ends, dst_rows, src_rows) == 0


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw two ends that hold rows of one length, and numbers of any width for them."""
    row = draw(st.one_of(st.integers(1, 64), st.integers(1, 4096)))
    ends = []
    for _ in range(2):
        step = draw(st.sampled_from([1, 2, 4, 8, 16]))
        gap = -row % step + step * draw(st.integers(0, 2))
        start = step * draw(st.integers(0, 3))
        ends.append(Shape(draw(st.integers(1, 70)), row, gap, start))
    distinct = draw(st.permutations(range(ends[0].rows)))
    count = draw(st.integers(1, len(distinct)))
    dst = [k - ends[0].rows * draw(st.integers(0, 1)) for k in distinct[:count]]
    reach = ends[1].rows
    src = draw(st.lists(st.integers(-reach, reach - 1), min_size=count, max_size=count))
    numbers = []
    for values in (dst, src):
        width = draw(st.sampled_from(WIDTHS))
        is_unsigned = width[0] == "u"
        size = ends[len(numbers)].rows
        numbers.append(
            np.array([v % size if is_unsigned else v for v in values], width)
        )
    return {
        "direction": draw(st.sampled_from(sorted(KINDS))),
        "ends": tuple(ends),
        "dst_rows": numbers[0],
        "src_rows": numbers[1],
        "layers": draw(st.sampled_from([1, 1, 3])),
        "max_sms": draw(st.integers(0, 3)),
    }


@given(case=cases())
def test_rows_of_any_geometry_are_numpys(backend, case: dict[str, Any]) -> None:
    assert check(**case) == 0


def test_rows_of_many_layers_are_numpys(backend) -> None:
    ends = Shape(9, 256, 0, 0), Shape(9, 256, 0, 0)
    numbers = np.array([8, 0, 3], np.int64)
    assert check("up", ends, numbers, numbers[::-1].copy(), layers=300) == 0


@pytest.mark.parametrize(
    ("dst", "src", "flag"),
    [
        ([1, 9, 0], [0, 1, 2], WRONG_DST),
        ([1, 2, 0], [0, -10, 2], WRONG_SRC),
        ([1, 9, 0], [0, 9, 2], WRONG_DST | WRONG_SRC),
        ([-9, 2, 1], [0, -9, 2], 0),
    ],
)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_rows_that_do_not_exist_raise_the_flag_and_move_nothing(
    backend, direction: str, dst: list[int], src: list[int], flag: int
) -> None:
    ends = Shape(9, 4096, 0, 0), Shape(9, 4096, 0, 0)
    got = check(direction, ends, np.array(dst, np.int64), np.array(src, np.int16))
    assert got == flag


def test_largest_unsigned_number_is_no_row(backend) -> None:
    ends = Shape(9, 64, 0, 0), Shape(9, 64, 0, 0)
    numbers = np.array([3, 2**64 - 1], np.uint64)
    assert check("up", ends, None, numbers) == WRONG_SRC


def test_numbers_in_mapped_memory_are_read_by_the_device(backend) -> None:
    src = cumem.empty_mapped((6, 8), np.float32)
    src[...] = np.arange(48, dtype=np.float32).reshape(6, 8)
    dst = cumem.empty_device((2, 8), np.float32)
    rows = cumem.empty_mapped(2, np.int64)
    rows[...] = [5, -6]
    flag = cumem.empty_mapped(1, np.uint32)
    flag[...] = 0
    testing.copy_rows([dst], [src], None, rows, flag)
    got = np.empty((2, 8), np.float32)
    cumem.copy(got, dst)
    np.testing.assert_array_equal(got, np.asarray(src)[[5, 0]])
