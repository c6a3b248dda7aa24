# SPDX-License-Identifier: Apache-2.0
"""Random use of a pool that spills, through the public API, compared with a model.

The model knows the bytes of each buffer, which must never be lost, and which buffers have
to stay on the device. Buffers are written by copies, and by fills on streams that run late.
Somebody else takes memory of the device, and gives it back.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import session, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20
CHUNK = 2 * MIB
LIMIT = 24 * MIB
MEMORY = 48 * MIB
SIZES = st.sampled_from([1, 70_000, 3 * MIB, 5 * MIB, 9 * MIB])
NUMBERS = st.integers(0, 1000)


@dataclass(eq=False)
class Held:
    buffer: cumem.DeviceBuffer
    value: int
    address: int | None = None  # None if nobody has read it
    is_kept: bool = False


class SpillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.session = session.opened("emulated", memory_nbytes=MEMORY)
        self.session.__enter__()
        self.pool = cumem.Pool("device", spill="pinned", limit=LIMIT)
        self.others = cumem.Pool("device")
        self.taken: list[cumem.DeviceBuffer] = []
        self.held: list[Held] = []

    def teardown(self) -> None:
        self.held.clear()
        self.taken.clear()
        del self.pool, self.others
        self.session.__exit__(None, None, None)

    @rule(size=SIZES, value=st.integers(0, 255))
    def allocate(self, size: int, value: int) -> None:
        if len(self.held) == 8:
            return
        text = ""
        try:
            buffer = self.pool.allocate(size)
        except cumem.OutOfMemoryError as error:
            text = str(error)
        if text:
            assert "spilled" in text
            # Memory may be short only because of buffers that have to stay, and of its
            # other users.
            staying = 2 * CHUNK * len(self.held) + sum(
                held.buffer.nbytes
                for held in self.held
                if held.is_kept or held.address is not None
            )
            taken = sum(buffer.nbytes for buffer in self.taken)
            needed = staying + size + 2 * CHUNK
            assert needed > LIMIT or needed + taken > MEMORY - 2 * CHUNK
            return
        buffer.fill(value)
        self.held.append(Held(buffer, value))

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS, value=st.integers(0, 255), on_stream=st.booleans())
    def write(self, number: int, value: int, on_stream: bool) -> None:
        held = self.held[number % len(self.held)]
        stream = cumem.Stream() if on_stream else None
        try:
            held.buffer.fill(value, stream=stream)
        except cumem.OutOfMemoryError:
            return
        held.value = value

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        held = self.held[number % len(self.held)]
        try:
            found = values.get(held.buffer)
        except cumem.OutOfMemoryError:
            return
        assert (found == held.value).all()

    @precondition(lambda self: len(self.held) > 1)
    @rule(one=NUMBERS, other=NUMBERS)
    def copy(self, one: int, other: int) -> None:
        dst = self.held[one % len(self.held)]
        src = self.held[other % len(self.held)]
        n = min(dst.buffer.nbytes, src.buffer.nbytes)
        if dst is src or n < dst.buffer.nbytes:
            return
        try:
            cumem.copy(dst.buffer, src.buffer[:n])
        except cumem.OutOfMemoryError:
            return
        dst.value = src.value

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS, keep=st.booleans())
    def keep(self, number: int, keep: bool) -> None:
        held = self.held[number % len(self.held)]
        try:
            held.buffer.keep(keep)
        except cumem.OutOfMemoryError:
            return
        held.is_kept = keep

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS)
    def read_address(self, number: int) -> None:
        held = self.held[number % len(self.held)]
        try:
            address = held.buffer.ptr
        except cumem.OutOfMemoryError:
            return
        assert held.address in (None, address)
        held.address = address

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS, frees=st.booleans())
    def drop(self, number: int, frees: bool) -> None:
        held = self.held.pop(number % len(self.held))
        if frees:
            held.buffer.free()

    @rule(size=st.sampled_from([4 * MIB, 16 * MIB]))
    def others_take(self, size: int) -> None:
        try:
            self.taken.append(self.others.allocate(size))
        except cumem.OutOfMemoryError:
            return

    @rule()
    def others_give_back(self) -> None:
        self.taken.clear()
        self.others.trim()

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @invariant()
    def counters_agree(self) -> None:
        stats = self.pool.stats()
        assert (
            stats.live_nbytes + stats.in_flight_nbytes + stats.cached_nbytes
            == stats.reserved_nbytes + stats.asleep_nbytes
        )
        assert stats.reserved_nbytes <= LIMIT
        assert stats.live_count == len(self.held)
        assert stats.spilled_nbytes - stats.woken_nbytes >= stats.asleep_nbytes


TestSpillMachine = SpillMachine.TestCase
