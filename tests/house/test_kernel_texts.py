# SPDX-License-Identifier: Apache-2.0
"""Tests of the PTX texts of the kernels that copy bytes, which run without a GPU.

support/ptx.py interprets a text on memory of the test. Each test makes random jobs, works
out the bytes that the kernel must leave, and compares all of them.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from support.ptx import Kernel, Memory

FOLDER = Path(__file__).resolve().parents[2] / "csrc/transfer/device"

# The driver compiles the texts, so no version of Python changes what they do.
pytestmark = [
    pytest.mark.any_python,
    pytest.mark.skipif(
        not FOLDER.is_dir(), reason="the C sources are not beside the tests"
    ),
]

WARP, SLOTS, MAX_LAYERS = 32, 4, 246
#: The addresses of the pieces of memory.
DST, SRC, DST_ROWS, SRC_ROWS, FLAG = (k << 32 for k in range(1, 6))


def up(a: int, b: int) -> int:
    """Divide, and round the result up."""
    return -(-a // b)


class Job:
    """A random launch of the rows kernel, with the bytes and flag that it must leave."""

    def __init__(self, roll: random.Random, *, unit: int, shift: int, units: int):
        self.roll = roll
        self.unit, self.shift, self.units = unit, shift, units
        self.layers = roll.choice([1, 1, 2, 5])
        self.rows = roll.randint(1, 40)  # the number of rows of each of the two arrays
        self.count = roll.randint(1, self.rows)
        self.packed = roll.random() < 0.2
        nbytes = units * unit
        self.strides = [nbytes + roll.randint(0, 2) * unit for _ in range(2)]
        self.memory = Memory()
        room = self.layers * self.rows * max(*self.strides, 1) + 64
        self.memory.add(DST, bytearray(b"\xee" * room))
        self.memory.add(SRC, bytearray(roll.randbytes(room)))
        self.memory.add(FLAG, bytearray(4))
        self.numbers = [self._numbers(DST_ROWS, True), self._numbers(SRC_ROWS, False)]

    def _numbers(self, address: int, is_distinct: bool) -> dict[str, int | list[int]]:
        """Put an array of row numbers into memory. Some of the numbers name no row."""
        roll = self.roll
        rows = list(range(self.rows))
        roll.shuffle(rows)
        if roll.random() < 0.2:
            rows = list(range(self.count))
            return {"address": 0, "stride": 0, "nbytes": 0, "signed": 0, "rows": rows}
        nbytes, signed = roll.choice([1, 2, 4, 8]), roll.random() < 0.5
        stride = nbytes * roll.choice([1, 3])
        rows = rows if is_distinct else roll.choices(rows, k=self.rows)
        rows = rows[: self.count]
        if roll.random() < 0.3:
            worst = (1 << 8 * nbytes - signed) - 1
            wrong = [self.rows, worst, *([-self.rows - 1, -worst - 1] * signed)]
            rows[roll.randrange(self.count)] = roll.choice(wrong)
        piece = bytearray(stride * self.count)
        for i, row in enumerate(rows):
            is_from_end = signed and 0 <= row < self.rows and roll.random() < 0.5
            number = row - self.rows if is_from_end else row
            piece[i * stride : i * stride + nbytes] = number.to_bytes(
                nbytes, "little", signed=signed
            )
        self.memory.add(address, piece)
        return {
            "address": address,
            "stride": stride,
            "nbytes": nbytes,
            "signed": signed,
            "rows": rows,
        }

    def bytes(self, warps: int) -> bytes:
        """Return the kernel's parameter. tests/c/test_rows_kernel.c asserts its layout."""
        dst, src = self.numbers
        groups = up(self.count, WARP >> self.shift)
        parts = max(1, up(self.units, 1 << self.shift))
        carried, step_parts = divmod(warps * SLOTS, parts)
        step_layers, step_groups = divmod(carried, groups)
        head = struct.pack(
            "<4q3Q2q4Q11I3I",
            *(dst["address"], src["address"], dst["stride"], src["stride"]),
            *(self.count, self.rows, self.rows, *self.strides),
            *(self.units, FLAG, groups, step_groups),
            *(step_parts, step_layers, parts, self.layers, self.unit, self.shift),
            *(dst["nbytes"], src["nbytes"], dst["signed"], src["signed"]),
            *(self.packed, 0, 0, 0),
        )
        ends = []
        for end, stride in zip((DST, SRC), self.strides, strict=True):
            starts = [end + k * self.rows * stride for k in range(self.layers)]
            ends += starts + [0] * (MAX_LAYERS - self.layers)
        return head + struct.pack(f"<{2 * MAX_LAYERS}Q", *ends)

    def expected(self) -> tuple[bytearray, set[int]]:
        """Return the bytes that the target must have, and the flags that are allowed."""
        out = bytearray(self.memory.pieces[DST])
        src = self.memory.pieces[SRC]
        nbytes = self.units * self.unit
        flags = set()
        for i in range(self.count):
            to, given = (each["rows"][i] for each in self.numbers)
            wrong = 1 * (not 0 <= to < self.rows) + 2 * (not 0 <= given < self.rows)
            if wrong:
                flags.add(wrong)
                continue
            for k in range(self.layers):
                a = (k * self.rows + to) * self.strides[0]
                b = (k * self.rows + (i if self.packed else given)) * self.strides[1]
                out[a : a + nbytes] = src[b : b + nbytes]
        return out, flags or {0}


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shift", [0, 3, 4, 5])
def test_rows_kernel_text_copies_what_its_parameter_says(unit: int, shift: int) -> None:
    kernel = Kernel((FOLDER / "rows.ptx").read_text())
    for seed in range(6):
        roll = random.Random(f"{unit} {shift} {seed}")
        # A row of the last two lengths has 3 or 5 parts, so the step of a warp may end in
        # the middle of a row.
        full = 1 << shift
        units = roll.choice([0, 1, full - 1, full, 2 * full + 1, 4 * full + 1])
        job = Job(roll, unit=unit, shift=shift, units=units)
        blocks, threads = roll.choice([(1, WARP), (2, 2 * WARP), (1, 3 * WARP)])
        out, flags = job.expected()
        params = job.bytes(blocks * threads // WARP)
        assert len(params) == 4096
        kernel.run(job.memory, params, blocks, threads)
        assert job.memory.pieces[DST] == out, seed
        assert job.memory.load(FLAG, 4) in flags, seed
        assert job.memory.load(FLAG, 4) or flags == {0}


TABLE_PIECES = 204


@pytest.mark.parametrize("dst_offset", [0, 1, 2, 4, 7, 8])
@pytest.mark.parametrize("src_offset", [0, 1, 2, 4, 8, 15])
def test_table_kernel_text_copies_each_piece(dst_offset: int, src_offset: int) -> None:
    """The parameter is a cm_table_job, whose layout tests/c/test_emulated_kernel.c uses."""
    kernel = Kernel((FOLDER / "table.ptx").read_text())
    roll = random.Random(f"{dst_offset} {src_offset}")
    lengths = [0, 1, 15, 16, 17, roll.randrange(600), 32 * 16 * 4, 3000]
    pitch = 4096
    memory = Memory()
    out = bytearray(b"\xee" * pitch * len(lengths))
    memory.add(DST, bytearray(out))
    memory.add(SRC, bytearray(roll.randbytes(len(out))))
    starts: list[list[int]] = [[], []]
    for i, nbytes in enumerate(lengths):
        to, source = i * pitch + dst_offset, i * pitch + src_offset
        out[to : to + nbytes] = memory.pieces[SRC][source : source + nbytes]
        starts[0].append(DST + to)
        starts[1].append(SRC + source)
    rest = TABLE_PIECES - len(lengths)
    shift = roll.choice([5, 6])
    params = struct.pack("<4I", len(lengths), shift, 0, 0)
    for each in starts:
        params += struct.pack(f"<{TABLE_PIECES}Q", *each, *[0] * rest)
    params += struct.pack(f"<{TABLE_PIECES}I", *lengths, *[0] * rest)
    assert len(params) == 4096
    kernel.run(memory, params, 1, (len(lengths) << shift) + WARP)
    assert memory.pieces[DST] == out
