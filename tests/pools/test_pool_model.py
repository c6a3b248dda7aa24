# SPDX-License-Identifier: Apache-2.0
"""Random use of pools through the public API, compared with a model.

All bytes of a buffer have the same value, which the buffer's own stream writes. The
stream's gate may be shut. If a pool hands a dropped buffer's memory to another buffer
too early, the late write changes the new buffer's bytes, and the next read of it fails.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)
from support import session, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

KINDS = ("device", "pinned", "mapped", "managed")
#: These calls of the driver may be made to fail.
FAULTS = (
    "physical_create",
    "host_register",
    "managed_alloc",
    "event_record",
    "event_query",
)
SIZES = st.sampled_from([1, 100, 4096, 70_000, 1 << 20, 3 << 20])
STREAMS = 3
UNKNOWN = 999


@dataclass(eq=False)
class Held:
    """A buffer and what the model knows about it.

    `buffer` is None once it was dropped.
    """

    buffer: cumem.Buffer | None
    pool: int
    stream: int
    nbytes: int
    value: int = 0
    is_copied: bool = False  # True means that a copy may keep the buffer alive.


class PoolMachine(RuleBasedStateMachine):
    """Four pools and a few streams, in one runtime that is opened for the run."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.session = session.opened("emulated")
        self.session.__enter__()
        self.pools = [cumem.Pool(kind) for kind in KINDS]
        self.streams = [cumem.Stream() for _ in range(STREAMS)]
        self.shut: set[int] = set()
        self.live: list[Held] = []
        self.made = [0] * len(self.pools)
        self.dropped = [0] * len(self.pools)
        self.next_value = 0
        self.called: list[str] = []
        self.hook = cumem.on_out_of_memory(self.short_of_memory)

    def teardown(self) -> None:
        self.open_gates()
        self.hook.remove()
        for item in list(self.live):
            self.forget(item)
        session.leftovers()  # Copies under way keep both their ends alive.
        left = [(pool.trim(), pool.stats().reserved_nbytes)[1] for pool in self.pools]
        self.pools.clear()
        self.streams.clear()
        self.session.__exit__(None, None, None)
        assert left == [0] * len(KINDS)

    # -- helpers --------------------------------------------------------------------------

    def short_of_memory(self, kind: str, device: int, nbytes: int) -> None:
        self.called.append(kind)

    def open_gates(self) -> None:
        for index in self.shut:
            session.testing.gate_open(self.streams[index])
        self.shut.clear()

    def write(self, item: Held) -> None:
        self.next_value = self.next_value % 250 + 1
        item.value = self.next_value
        assert item.buffer is not None
        if item.pool != 0:
            # Before the host writes pinned memory, it waits for all work that the buffer's
            # stream was made to wait for. test_fill_gates.py tests that wait; here the
            # gates are opened.
            self.open_gates()
        item.buffer.fill(item.value, stream=self.streams[item.stream])

    def keep(self, buffer: cumem.Buffer, pool: int, stream: int) -> Held:
        item = Held(buffer, pool, stream, buffer.nbytes)
        self.live.append(item)
        self.made[pool] += 1
        self.write(item)
        return item

    def forget(self, item: Held) -> None:
        self.live.remove(item)
        self.dropped[item.pool] += 1
        item.buffer = None
        if item.is_copied:
            self.open_gates()
            session.leftovers(held=len(self.live))

    def allocate(self, pool: int, nbytes: int, stream: int) -> cumem.Buffer:
        if pool == 0:
            return self.pools[0].allocate(nbytes, self.streams[stream])
        with self.pools[pool]:
            return cumem.empty(nbytes, "u1", KINDS[pool])

    def try_allocate(self, pool: int, nbytes: int, stream: int) -> cumem.Buffer | None:
        try:
            return self.allocate(pool, nbytes, stream)
        except cumem.OutOfMemoryError:
            return None

    # -- rules ----------------------------------------------------------------------------

    @rule(target=held, pool=st.integers(0, 3), nbytes=SIZES, stream=st.integers(0, 2))
    def make(self, pool: int, nbytes: int, stream: int) -> Held:
        if self.pools[pool].limit is not None:
            self.open_gates()  # The allocation may wait for the gates.
        self.called.clear()
        buffer = self.try_allocate(pool, nbytes, stream)
        if buffer is None:
            assert self.pools[pool].limit is not None
            assert self.called == [KINDS[pool]]
            self.pools[pool].limit = None
            buffer = self.allocate(pool, nbytes, stream)
        return self.keep(buffer, pool, stream)

    @rule(
        pool=st.integers(0, 3),
        nbytes=SIZES,
        op=st.sampled_from(FAULTS),
        nth=st.integers(1, 3),
    )
    def make_under_a_fault(self, pool: int, nbytes: int, op: str, nth: int) -> None:
        self.open_gates()
        session.testing.plan_fault(op, nth, UNKNOWN)
        try:
            buffer = self.try_allocate(pool, nbytes, 0)
        except cumem.CudaError:
            assert session.testing.last_injected_fault() == op
            buffer = None
        session.testing.plan_fault(None, 0)
        if buffer is not None:
            self.forget(self.keep(buffer, pool, 0))

    @rule(item=held)
    def write_again(self, item: Held) -> None:
        self.write(item)

    @rule(item=held, other=held)
    def copy(self, item: Held, other: Held) -> None:
        same = item.stream == other.stream and item.nbytes == other.nbytes
        if same and item is not other:
            cumem.copy_async(
                item.buffer, other.buffer, stream=self.streams[item.stream]
            )
            item.value = other.value
            item.is_copied = other.is_copied = True

    @rule(item=held, stream=st.integers(0, 2))
    def record(self, item: Held, stream: int) -> None:
        assert item.buffer is not None
        item.buffer.record_stream(self.streams[stream])

    @rule(item=consumes(held))
    def drop(self, item: Held) -> None:
        self.forget(item)

    @rule(item=held)
    def read(self, item: Held) -> None:
        self.open_gates()
        self.streams[item.stream].synchronize()
        assert (values.get(item.buffer) == item.value).all()

    @rule(stream=st.integers(0, 2))
    def shut_gate(self, stream: int) -> None:
        session.shut(self.streams[stream])
        self.shut.add(stream)

    @rule()
    def open_all(self) -> None:
        self.open_gates()

    @rule(pool=st.integers(0, 3), keep=st.sampled_from([0, "2MiB"]), wait=st.booleans())
    def trim(self, pool: int, keep: int | str, wait: bool) -> None:
        if wait:
            self.open_gates()
        before = self.pools[pool].stats()
        released = self.pools[pool].trim(keep, wait)
        after = self.pools[pool].stats()
        assert after.reserved_nbytes == before.reserved_nbytes - released
        assert after.in_flight_count == 0 or not wait

    @rule(pool=st.integers(0, 3), limit=st.sampled_from([None, "4MiB", "8MiB"]))
    def limit(self, pool: int, limit: str | None) -> None:
        self.pools[pool].limit = limit

    @rule(pool=st.integers(0, 3))
    def replace(self, pool: int) -> None:
        """Close a pool that has no live buffers, and put a new one in its place."""
        if not any(item.pool == pool for item in self.live):
            self.open_gates()
            self.pools[pool].close()
            self.pools[pool] = cumem.Pool(KINDS[pool])
            self.made[pool] = self.dropped[pool] = 0

    # -- what always holds ----------------------------------------------------------------

    @invariant()
    def accounts_balance(self) -> None:
        for index, pool in enumerate(self.pools):
            mine = [item for item in self.live if item.pool == index]
            stats = pool.stats()
            assert stats.live_count == len(mine)
            assert stats.requested_nbytes == sum(item.nbytes for item in mine)
            assert stats.allocation_count == self.made[index]
            assert stats.free_count == self.dropped[index]
            assert stats.hit_count + stats.miss_count == self.made[index]
            held = stats.live_nbytes + stats.in_flight_nbytes + stats.cached_nbytes
            assert stats.reserved_nbytes == held
        assert session.testing.check_pools()

    @invariant()
    def no_two_overlap(self) -> None:
        ends = sorted(
            (i.buffer.ptr, i.nbytes) for i in self.live if i.buffer is not None
        )
        for (start, nbytes), (following, _) in itertools.pairwise(ends):
            assert start + nbytes <= following


def test_random_use_of_pools_equals_the_model() -> None:
    quick = hypothesis.settings()
    settings = hypothesis.settings(
        max_examples=max(quick.max_examples // 3, 1), stateful_step_count=40
    )
    hypothesis.stateful.run_state_machine_as_test(PoolMachine, settings=settings)
