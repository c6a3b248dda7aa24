# SPDX-License-Identifier: Apache-2.0
"""Random use of two regions through the public API, compared with a model.

The model knows the bytes of each buffer, or None where they were given up, and which
regions are asleep. Buffers are written by copies and by fills on streams that may be held
shut until their region goes to sleep.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import session, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

SIZES = st.sampled_from([1, 1000, 70_000, 3 << 20, 33 << 20])
REGIONS = st.integers(0, 1)
NUMBERS = st.integers(0, 1000)


@dataclass(eq=False)
class Held:
    buffer: cumem.DeviceBuffer
    address: int
    region: int
    value: int | None = None  # the value of all bytes, None if unknown


class RegionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.session = session.opened("emulated")
        self.session.__enter__()
        self.regions = [
            cumem.Region("a", 0, host="keep"),
            cumem.Region("b", 1, host="release"),
        ]
        self.asleep = [False, False]
        self.held: list[Held] = []

    def teardown(self) -> None:
        self.held.clear()
        self.regions.clear()
        self.session.__exit__(None, None, None)

    @rule(index=REGIONS, size=SIZES)
    def allocate(self, index: int, size: int) -> None:
        pool = self.regions[index].pool
        if self.asleep[index]:
            with pytest.raises(RuntimeError, match="asleep"):
                pool.allocate(size)
        elif len(self.held) < 8:
            buffer = pool.allocate(size)
            self.held.append(Held(buffer, buffer.ptr, index))

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS, value=st.integers(0, 255), on_stream=st.booleans())
    def write(self, number: int, value: int, on_stream: bool) -> None:
        held = self.held[number % len(self.held)]
        device = self.regions[held.region].device
        stream = cumem.Stream(device=device) if on_stream else None
        if self.asleep[held.region]:
            with pytest.raises(RuntimeError, match="asleep"):
                held.buffer.fill(value, stream=stream)
        else:
            held.buffer.fill(value, stream=stream)
            held.value = value

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        held = self.held[number % len(self.held)]
        if self.asleep[held.region]:
            with pytest.raises(RuntimeError, match="asleep"):
                values.get(held.buffer)
        else:
            assert held.buffer.ptr == held.address
            found = values.get(held.buffer)
            assert held.value is None or (found == held.value).all()

    @precondition(lambda self: self.held)
    @rule(number=NUMBERS, frees=st.booleans())
    def drop(self, number: int, frees: bool) -> None:
        held = self.held.pop(number % len(self.held))
        if frees:
            held.buffer.free()

    @rule(index=REGIONS, keep=st.sampled_from([True, "file", False]))
    def sleep(self, index: int, keep: bool | Literal["file"]) -> None:
        folder = tempfile.gettempdir() if keep == "file" else None
        self.regions[index].sleep(keep, path=folder)
        for held in self.held:
            if held.region == index and not keep and not self.asleep[index]:
                held.value = None
        self.asleep[index] = True

    @rule(index=REGIONS)
    def wake(self, index: int) -> None:
        self.regions[index].wake()
        self.asleep[index] = False

    @rule(index=REGIONS)
    def trim(self, index: int) -> None:
        self.regions[index].pool.trim()

    @invariant()
    def counters_agree(self) -> None:
        for index, region in enumerate(self.regions):
            stats = region.pool.stats()
            assert region.is_asleep == self.asleep[index]
            assert (
                stats.live_nbytes + stats.in_flight_nbytes + stats.cached_nbytes
                == stats.reserved_nbytes + stats.asleep_nbytes
            )
            assert (stats.reserved_nbytes == 0) or not self.asleep[index]
            assert (stats.asleep_nbytes == 0) or self.asleep[index]
            mine = [held for held in self.held if held.region == index]
            assert stats.live_count == len(mine)


TestRegionMachine = RegionMachine.TestCase
