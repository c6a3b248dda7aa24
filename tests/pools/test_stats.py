# SPDX-License-Identifier: Apache-2.0
"""Tests of counters of pools, measurements of blocks of code, and maps of pools.

The tests allocate and free known sizes, and compare `stats()`, `measure()` and the
pool's snapshot with what must have been counted.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import weakref
from random import Random
from typing import Any

import pytest
from support import session

import cumem
from cumem.units import format_nbytes

# These tests fail if a wheel, or an older NumPy, lacks something that cumem needs.
pytestmark = pytest.mark.packaging

MIB = 1 << 20


def test_fields_are_the_counters_of_the_core(runtime) -> None:
    names = {field.name for field in dataclasses.fields(cumem.types.Counters)}
    assert names == cumem.Pool()._describe().counters.keys()
    own = {field.name for field in dataclasses.fields(cumem.types.PoolStats)} - names
    assert own == {"name", "kind", "device", "limit"}


def test_statistics_are_frozen(runtime) -> None:
    stats = cumem.Pool().stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.live_nbytes = 1


def test_counters_follow_what_happens(runtime) -> None:
    pool = cumem.Pool("pinned", limit=1 << 30)
    assert pool.stats().reserved_nbytes == 0
    a, b = pool.allocate(1000), pool.allocate(100)
    during = pool.stats()
    assert (during.kind, during.device, during.limit) == ("pinned", 0, 1 << 30)
    assert during.requested_nbytes == 1100
    assert during.live_nbytes == 1024 + 128
    assert during.waste_nbytes == 52
    assert (during.live_count, during.allocation_count) == (2, 2)
    assert (during.miss_count, during.hit_count) == (1, 1)
    assert during.growth_count == 1
    assert during.growth_ns > 0
    assert (
        during.live_nbytes + during.in_flight_nbytes + during.cached_nbytes
        == during.reserved_nbytes
    )
    del a, b
    after = pool.stats()
    assert (after.live_nbytes, after.free_count) == (0, 2)
    assert after.peak_live_nbytes == during.live_nbytes
    assert after.cached_nbytes == after.reserved_nbytes
    assert 0 <= after.fragmentation < 0.01
    pool.reset_peaks()
    assert pool.stats().peak_live_nbytes == 0
    assert pool.stats().peak_reserved_nbytes == after.reserved_nbytes


def test_hits_are_the_allocations_that_called_no_runtime(runtime) -> None:
    pool = cumem.Pool("pinned")
    kept = [pool.allocate(1000)]
    assert (pool.stats().miss_count, pool.stats().hit_count) == (1, 0)
    calls = session.testing.fault_count()
    kept += [pool.allocate(1000) for _ in range(3)]
    assert session.testing.fault_count() == calls
    assert (pool.stats().miss_count, pool.stats().hit_count) == (1, 3)
    kept.append(pool.allocate(64 * MIB))
    assert session.testing.fault_count() > calls
    assert (pool.stats().miss_count, pool.stats().hit_count) == (2, 3)
    del kept


def test_peaks_of_what_is_live_stay_when_less_is(runtime) -> None:
    pool = cumem.Pool("pinned")
    kept = [pool.allocate(1000) for _ in range(3)]
    del kept
    kept = [pool.allocate(100)]
    assert pool.stats().peak_live_nbytes == 3 * 1024
    assert pool.stats().peak_requested_nbytes == 3000
    kept += [pool.allocate(5000)]
    assert pool.stats().peak_live_nbytes == pool.stats().live_nbytes == 128 + 5056
    del kept


def test_peaks_of_what_is_cached_and_wasted_are_exact(runtime) -> None:
    pool = cumem.Pool("pinned")
    random = Random(7)
    held: list[cumem.Buffer] = []
    cached = waste = 0
    with cumem.measure() as m:
        for step in range(600):
            if held and random.random() < 0.5:
                del held[random.randrange(len(held))]
            else:
                held.append(pool.allocate(random.choice([1, 64, 1000, 70_000, MIB])))
            now = pool.stats()
            cached = max(cached, now.cached_nbytes)
            waste = max(waste, now.waste_nbytes)
            if step == 300:
                pool.reset_peaks()
                half, cached = (cached, waste), now.cached_nbytes
                waste = now.waste_nbytes
        assert (now.peak_cached_nbytes, now.peak_waste_nbytes) == (cached, waste)
    of = next(p for p in m.pools if p.name == pool.stats().name)
    assert of.peak_cached_nbytes == max(cached, half[0])
    assert of.peak_waste_nbytes == max(waste, half[1])
    assert f"peak_waste_nbytes {waste}" in repr(pool.stats())


def test_peak_of_cached_leaves_out_what_memory_was_taken_for(runtime) -> None:
    """A pool that grows for a block must not count the new memory as cached before the
    block gets it.
    """
    pool = cumem.Pool("pinned")
    buffer = pool.allocate(64 * MIB)
    assert pool.stats().peak_cached_nbytes == pool.stats().cached_nbytes < 64 * MIB
    del buffer
    pool.trim()
    now = pool.stats()
    assert now.cached_nbytes == 0
    assert now.peak_cached_nbytes >= 64 * MIB


def test_free_neighbours_count_as_one_piece_everywhere(runtime) -> None:
    pool = cumem.Pool("pinned")
    held = [pool.allocate(4096) for _ in range(100)]
    del held
    now = pool.stats()
    assert (now.cached_count, now.largest_free_nbytes) == (1, now.cached_nbytes)
    assert now.fragmentation == 0
    assert [b.nbytes for b in pool.snapshot().blocks] == [now.cached_nbytes]


def test_table_of_a_notebook_has_every_peak(runtime) -> None:
    cumem.empty_pinned(10)
    html = cumem.stats()._repr_html_()
    for name in ("live", "in flight", "cached", "reserved", "waste"):
        assert re.search(f"<th[^>]*>peak {name}</th>", html)


def test_stats_have_totals_of_kinds(emulated) -> None:
    pools = [cumem.Pool("pinned"), cumem.Pool("pinned"), cumem.Pool("device")]
    kept = [pool.allocate(1000) for pool in pools]
    stats = cumem.stats()
    assert [p.name for p in stats.pools] == [repr(p).split("'")[1] for p in pools]
    assert stats["pinned"].requested_nbytes == 2000
    assert stats["device"].requested_nbytes == 1000
    assert stats["managed"] == cumem.types.Counters()
    assert list(stats.kinds) == ["device", "pinned"]
    assert stats.total.live_count == 3
    with pytest.raises(KeyError):
        stats["paper"]
    del kept


def test_stats_before_the_first_use_are_empty(emulated) -> None:
    assert cumem.stats().pools == ()
    assert repr(cumem.stats()) == "no pool yet"
    assert not session.testing.opened()


def test_names_tell_default_pools_apart(emulated) -> None:
    kept = [
        cumem.empty_pinned(1),
        cumem.empty_pinned(1, write_combined=True, portable=False),
        cumem.empty_managed(1, attach="host"),
    ]
    names = {p.name for p in cumem.stats().pools}
    assert names == {
        "default",
        "default, not portable, write-combined",
        "default, attach host",
    }
    del kept


def test_text_is_aligned_and_html_is_escaped(emulated) -> None:
    kept = [cumem.Pool("pinned").allocate(3 * MIB), cumem.empty_pinned(1000)]
    lines = repr(cumem.stats()).splitlines()
    assert lines[0].split("  ")[0] == "pool"
    assert lines[-1].startswith("pinned, all pools")
    assert "3 MiB" in lines[-1]
    ends = [line.find("reserved") for line in lines[:1]]
    assert ends[0] > 0
    # The columns are aligned at the right.
    assert len({len(line) for line in lines}) <= 2
    table = cumem.stats()._repr_html_()
    assert table.count("<tr>") == len(lines)
    one = cumem.default_pool("pinned").stats()
    assert "requested_nbytes 8000" in repr(one)
    assert "3 MiB" not in one._repr_html_()
    assert "7.8 KiB (8000 bytes)" in one._repr_html_()
    del kept


# -- measure -------------------------------------------------------------------------------


def test_measure_reports_differences_and_peaks_of_its_block(runtime) -> None:
    pool = cumem.Pool("pinned")
    before = pool.allocate(8 * MIB)
    with cumem.measure() as m:
        with pytest.raises(RuntimeError, match="not over"):
            print(m.total)
        first = pool.allocate(1 * MIB)
        second = pool.allocate(2 * MIB)
        del first
        assert "running" in repr(m)
    assert m["pinned"].live_nbytes == 2 * MIB
    assert m["pinned"].peak_live_nbytes == 11 * MIB
    assert m.total.allocation_count == 2
    assert m.total.free_count == 1
    assert m.seconds > 0
    [one] = [p for p in m.pools if p.live_nbytes]
    assert one.peak_requested_nbytes == 11 * MIB
    assert one.peak_reserved_nbytes == pool.stats().reserved_nbytes
    assert "pinned" in repr(m)
    assert "<table>" in m._repr_html_()
    del before, second


def test_measure_leaves_peaks_of_the_pool_alone(runtime) -> None:
    pool = cumem.Pool("pinned")
    pool.allocate(8 * MIB)
    with cumem.measure() as m:
        pool.allocate(1 * MIB)
        assert pool.stats().peak_live_nbytes == 8 * MIB
        pool.reset_peaks()
        assert pool.stats().peak_live_nbytes == 0
    assert m.total.peak_live_nbytes == 1 * MIB
    assert pool.stats().peak_live_nbytes == 0


def test_nested_measurements_see_their_own_peaks(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.measure() as outer:
        pool.allocate(4 * MIB)
        with cumem.measure() as inner:
            pool.allocate(1 * MIB)
            with cumem.measure() as innermost:
                pool.allocate(2 * MIB)
        with cumem.measure() as late:
            pass
        pool.allocate(3 * MIB)
    peaks = [m.total.peak_live_nbytes for m in (outer, inner, innermost, late)]
    assert peaks == [4 * MIB, 2 * MIB, 2 * MIB, 0]
    assert outer.total.allocation_count == 4
    assert inner.total.allocation_count == 2


def test_overlapping_measurements_see_their_own_peaks(runtime) -> None:
    pool = cumem.Pool("pinned")
    a, b = cumem.measure(), cumem.measure()
    with a:
        pool.allocate(4 * MIB)
        b.__enter__()
        pool.allocate(1 * MIB)
    pool.allocate(2 * MIB)
    b.__exit__(None, None, None)
    assert a.total.peak_live_nbytes == 4 * MIB
    assert b.total.peak_live_nbytes == 2 * MIB


def test_measurement_may_be_used_again_but_not_entered_twice(runtime) -> None:
    pool = cumem.Pool("pinned")
    m = cumem.measure()
    with m:
        pool.allocate(1000)
        with pytest.raises(RuntimeError, match="already running"):
            m.__enter__()
    assert m.total.allocation_count == 1
    with m:
        pass
    assert m.total.allocation_count == 0


def test_measure_counts_a_pool_made_within_and_other_threads(runtime) -> None:
    with cumem.measure() as m:
        pool = cumem.Pool("pinned")
        thread = threading.Thread(target=lambda: pool.allocate(1 * MIB))
        thread.start()
        thread.join()
    assert m.total.allocation_count == 1
    assert m.total.peak_live_nbytes == 1 * MIB


# -- snapshots -----------------------------------------------------------------------------


def test_snapshot_lists_every_byte_once(runtime) -> None:
    pool = cumem.Pool("pinned", segments="malloc")
    kept = [pool.allocate(100_000) for _ in range(10)]
    del kept[::2]
    snapshot = pool.snapshot()
    stats = pool.stats()
    assert (snapshot.kind, snapshot.device) == ("pinned", 0)
    states = [block.state for block in snapshot.blocks]
    assert states.count("live") == 5
    assert sum(s.reserved_nbytes for s in snapshot.segments) == stats.reserved_nbytes
    live = [block for block in snapshot.blocks if block.state == "live"]
    assert {block.requested_nbytes for block in live} == {100_000}
    assert sum(block.nbytes for block in live) == stats.live_nbytes
    for segment in snapshot.segments:
        at = segment.address
        for block in segment.blocks:
            assert block.address == at
            at += block.nbytes
        assert at == segment.address + segment.nbytes
    assert {buffer.ptr for buffer in kept} == {block.address for block in live}


def test_snapshot_shows_what_is_in_flight(emulated) -> None:
    pool = cumem.Pool("mapped")
    stream = cumem.Stream()
    with session.gate(stream):
        buffer = pool.allocate(1 * MIB)
        buffer.fill(1, stream=stream)
        del buffer
        assert "in flight" in [block.state for block in pool.snapshot().blocks]
        assert "~" in "".join(str(pool.snapshot()).splitlines()[2:])


def test_map_draws_one_character_a_unit() -> None:
    blocks = (
        cumem.types.Block(0x1000, 1024, 1000, "live"),
        cumem.types.Block(0x1400, 1536, 0, "cached"),
        cumem.types.Block(0x1A00, 512, 512, "in flight"),
        cumem.types.Block(0x1C00, 1 << 40, 0, "gap"),
        cumem.types.Block(0x1C00 + (1 << 40), 256, 256, "live"),
        cumem.types.Block(0x1D00 + (1 << 40), 256, 0, "cached"),
    )
    segment = cumem.types.Segment(0x1000, sum(b.nbytes for b in blocks), blocks)
    snapshot = cumem.types.Snapshot("pool 1", "device", 0, (segment,))
    lines = snapshot.map(unit=512).splitlines()
    assert lines[0] == "device 0 pool 1: 3.5 KiB in 1 segment, 512 B per character"
    assert lines[2:] == ["0x1000 3.5 KiB", "##...~|+"]
    assert snapshot.map(width=3, unit=512).splitlines()[3:] == ["##.", "..~", "|+"]
    assert snapshot.map(unit=1024).splitlines()[3:] == ["#.~|+"]
    assert str(snapshot) == snapshot.map()
    assert snapshot.map(unit="1KiB") == snapshot.map(unit=1024)
    for wrong in ({"width": "64"}, {"width": 64.0}, {"width": True}, {"width": None}):
        with pytest.raises(TypeError, match="width must be an int"):
            snapshot.map(**wrong)
    for wrong in ({"unit": 1.5}, {"unit": True}):
        with pytest.raises(TypeError, match="unit must be"):
            snapshot.map(**wrong)
    with pytest.raises(ValueError, match="unit must be a number of bytes"):
        snapshot.map(unit="wide")
    assert (
        f"live, {format_nbytes(snapshot.blocks[0].nbytes)} at" in snapshot._repr_html_()
    )
    for wrong in ({"width": 0}, {"unit": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            snapshot.map(**wrong)


def test_map_of_an_empty_pool_has_no_segment(runtime) -> None:
    text = str(cumem.Pool().snapshot())
    assert "0 B in 0 segments" in text
    assert len(text.splitlines()) == 2


def test_measurement_that_never_ends_is_forgotten_with_its_last_name(runtime) -> None:
    """Ctrl-C can interrupt between `__enter__()` and the body, so that `__exit__()`
    never runs.
    """
    running = cumem.measure().__enter__()
    kept = weakref.ref(running)
    del running
    with cumem.measure():
        pass
    assert kept() is None


def test_running_measurement_knows_no_pool_that_ended(runtime) -> None:
    with cumem.measure() as running:
        for _ in range(3):
            pool = cumem.Pool("pinned")
            pool.allocate(100).free()
            # An inner measurement reads the counters of all pools.
            with cumem.measure():
                pass
            pool.close()
            del pool
        with cumem.measure():
            pass
        assert len(running._peaks) == len(cumem.stats().pools)


def test_pool_closed_in_the_block_counts_what_the_block_did(runtime) -> None:
    pool = cumem.Pool("pinned")
    kept = [pool.allocate(1000) for _ in range(5)]
    with cumem.measure() as m:
        kept.append(pool.allocate(1000))
        pool.close()
    (closed,) = [one for one in m.pools if one.name == "closed pool"]
    assert (closed.allocation_count, closed.live_nbytes) == (1, 1024)
    assert closed.peak_live_nbytes == 6 * 1024
    kept.clear()


def test_measurement_of_default_pools_begins_anew_after_a_shutdown(emulated) -> None:
    """The new default pool may lie at the address of the old one, and must not be taken
    for it.
    """
    cumem.empty_pinned(1000).free()
    with cumem.measure() as m:
        for _ in range(3):
            cumem.shutdown()
            cumem.empty_pinned(1000).free()
    assert m["pinned"].allocation_count == 1


def test_measurement_that_was_not_entered_cannot_end(runtime) -> None:
    measurement = cumem.measure()
    with pytest.raises(RuntimeError, match="not running"):
        measurement.__exit__(None, None, None)
    with measurement:
        pass
    with pytest.raises(RuntimeError, match="not running"):
        measurement.__exit__(None, None, None)
    assert measurement.seconds >= 0


def test_key_that_is_no_kind_names_the_kinds(emulated) -> None:
    stats: Any = cumem.stats()
    with pytest.raises(KeyError, match=r'is not a kind of memory.*"device", "pinned"'):
        stats["gpu"]
    with pytest.raises(TypeError, match="not iterable"):
        list(stats)
