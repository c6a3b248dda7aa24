# SPDX-License-Identifier: Apache-2.0
"""Tests of what Pools hand out, of which one is current, and of how they end.

Further parts are about default pools, and about ways to give memory back: `trim()`, the
trim of a pool that has been idle, and `close()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from support import session

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

KINDS = ("device", "pinned", "mapped", "managed")
TYPES = {
    "device": cumem.DeviceBuffer,
    "pinned": cumem.PinnedBuffer,
    "mapped": cumem.MappedBuffer,
    "managed": cumem.ManagedBuffer,
}
MAKERS: dict[str, Callable[..., cumem.Buffer]] = {
    "device": cumem.empty_device,
    "pinned": cumem.empty_pinned,
    "mapped": cumem.empty_mapped,
    "managed": cumem.empty_managed,
}


def live(pool: cumem.Pool) -> int:
    return pool.stats().live_count


@pytest.mark.parametrize("kind", KINDS)
def test_allocate_gives_bytes_of_the_pools_kind(runtime, kind: str) -> None:
    pool = cumem.Pool(kind)
    buffer = pool.allocate(1000)
    assert type(buffer) is TYPES[kind]
    assert (buffer.shape, buffer.dtype, buffer.kind) == ((1000,), np.uint8, kind)
    assert live(pool) == 1
    assert pool.stats().requested_nbytes == 1000
    assert live(cumem.default_pool(kind)) == 0
    assert pool.allocate(0).nbytes == 0
    data = np.arange(1000, dtype="u1")
    out = np.zeros_like(data)
    cumem.copy(buffer, data)
    cumem.copy(out, buffer)
    assert (out == data).all()
    del buffer
    assert live(pool) == 0


def test_allocate_refuses_what_is_no_size_or_stream(runtime) -> None:
    pool = cumem.Pool()
    for wrong, error in [(-1, ValueError), ("1", TypeError), (1 << 63, ValueError)]:
        with pytest.raises(error, match="nbytes"):
            pool.allocate(wrong)
    with pytest.raises(TypeError, match="missing required argument"):
        pool.allocate()
    with pytest.raises(TypeError):
        pool.allocate(8, "stream")


def test_allocate_takes_its_arguments_by_keyword_too(runtime) -> None:
    pool, stream = cumem.Pool("device"), cumem.Stream()
    for buffer in (
        pool.allocate(nbytes=4096),
        pool.allocate(4096, stream=stream),
        pool.allocate(stream=stream, nbytes=4096),
        pool.allocate(4096, stream=None),
    ):
        assert buffer.nbytes == 4096
    wrong = [
        ((), {}, "missing required argument 'nbytes'"),
        ((), {"stream": stream}, "missing required argument 'nbytes'"),
        ((1,), {"nbytes": 1}, "nbytes"),
        ((1,), {"device": 0}, "device"),
        ((1, None, None), {}, "at most 2 positional arguments"),
    ]
    for args, kwargs, text in wrong:
        with pytest.raises(TypeError, match=text):
            pool.allocate(*args, **kwargs)


def test_allocate_of_a_host_pool_on_a_stream_waits_for_that_stream(emulated) -> None:
    pool = cumem.Pool("pinned")
    stream = cumem.Stream()
    with session.gate(stream):
        buffer = pool.allocate(1 << 20, stream)
        target = cumem.empty_device(1 << 20, "u1")
        cumem.copy_async(target, buffer, stream=stream)
        address = buffer.ptr
        del buffer
        assert pool.allocate(1 << 20).ptr != address


@pytest.mark.parametrize("kind", KINDS)
def test_properties_say_what_was_asked_for(runtime, kind: str) -> None:
    pool = cumem.Pool(kind, limit="1GiB", segments="malloc", idle_trim=2.5)
    assert pool.kind == kind
    assert pool.device == cumem.current_device()
    assert pool.limit == 1 << 30
    assert pool.numa_node is None
    assert pool.segments == "malloc"
    assert pool.idle_trim == pytest.approx(2.5)
    assert not pool.closed
    assert kind in repr(pool)
    pool.close()
    assert pool.closed
    assert pool.kind == kind
    assert "closed" in repr(pool)
    plain = cumem.Pool(kind)
    assert (plain.limit, plain.segments, plain.idle_trim) == (None, "auto", None)


def test_repr_says_emulated(emulated) -> None:
    assert "emulated" in repr(cumem.Pool())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kind": "paper"}, "kind must be"),
        ({"device": 99}, "does not exist"),
        ({"limit": "lots"}, "limit must be"),
        ({"limit": -1}, "negative"),
        ({"segments": "vmm"}, "segments must be"),
        ({"numa_node": 0}, "numa_node is for pinned and mapped"),
        ({"kind": "pinned", "numa_node": -2}, "numa_node"),
        (
            {"kind": "mapped", "numa_node": 63},
            r"numa_node 63 .*nodes with memory are \[0",
        ),
        ({"kind": "pinned", "numa_node": 9999}, "numa_node 9999"),
        ({"idle_trim": 0}, "idle_trim must be"),
        ({"idle_trim": 1e10}, "above 0 and up to 1e9, not 10000000000.0"),
        ({"idle_trim": float("nan")}, "idle_trim must be"),
        ({"write_combined": True}, "write_combined is for"),
        ({"portable": False}, "portable is for"),
        ({"kind": "pinned", "attach": "host"}, "attach is for managed"),
        ({"kind": "managed", "attach": "both"}, "attach must be"),
    ],
)
def test_pool_refuses_wrong_values(runtime, arguments, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        cumem.Pool(**arguments)


def test_numa_node_is_a_node_that_has_memory(runtime) -> None:
    assert cumem.Pool("pinned", numa_node=0).numa_node == 0
    for wrong in (True, False, "0", 0.0):
        with pytest.raises(TypeError, match="numa_node must be"):
            cumem.Pool("pinned", numa_node=wrong)


@pytest.mark.parametrize(
    "arguments",
    [{"kind": 1}, {"limit": 1.5}, {"limit": True}, {"segments": 3}, {"idle_trim": "1"}],
)
def test_pool_refuses_wrong_types(runtime, arguments) -> None:
    with pytest.raises(TypeError):
        cumem.Pool(**arguments)


# -- pool= ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_constructors_take_memory_from_the_pool_they_are_given(runtime, kind) -> None:
    pool = cumem.Pool(kind)
    made = [
        cumem.empty(10, pool=pool),
        cumem.empty(10, "f4", kind, pool=pool),
        cumem.zeros(10, pool=pool),
        cumem.full(10, 1.0, pool=pool),
        cumem.array([1, 2, 3], pool=pool),
        cumem.empty_like(np.zeros(3), pool=pool),
        cumem.empty_like(cumem.empty_pinned(3), pool=pool),
        MAKERS[kind](10, pool=pool),
        MAKERS[kind](10, pool=pool, device=pool.device),
    ]
    assert {type(buffer) for buffer in made} == {TYPES[kind]}
    assert live(pool) == len(made)
    assert cumem.empty(10, kind=kind, pool=None).kind == kind
    assert live(pool) == len(made)


def test_pool_of_another_kind_is_refused(runtime) -> None:
    pool = cumem.Pool("pinned")
    for call in (
        lambda: cumem.empty(1, kind="device", pool=pool),
        lambda: cumem.empty_device(1, pool=pool),
        lambda: cumem.empty_mapped(1, pool=pool),
    ):
        with pytest.raises(
            ValueError, match=r"pool is one of pinned memory, but \w+ memory"
        ):
            call()
    with pytest.raises(TypeError, match="pool must be a Pool or None"):
        cumem.empty(1, pool="pinned")
    with pytest.raises(ValueError, match="other values of portable"):
        cumem.empty_pinned(1, write_combined=True, pool=pool)


def test_pool_of_another_device_is_refused_and_says_the_device(emulated) -> None:
    pool = cumem.Pool("device", device=1)
    assert cumem.empty(1, pool=pool).device == cumem.Device(1)
    assert cumem.empty_device(1, pool=pool).device == cumem.Device(1)
    with pytest.raises(ValueError, match="pool is of device 1, but memory of device 0"):
        cumem.empty(1, device=0, pool=pool)
    with pytest.raises(ValueError, match="pool is of device 1, but memory of device 0"):
        cumem.empty_device(1, device=0, pool=pool)


# -- current -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_with_makes_a_pool_current_for_its_kind(runtime, kind: str) -> None:
    outer, inner = cumem.Pool(kind), cumem.Pool(kind)
    kept = []
    with outer as target:
        assert target is outer
        kept.append(MAKERS[kind](10))
        with inner:
            kept.append(cumem.empty(10, kind=kind))
            kept.append(kept[0].copy())
            kept += [MAKERS[other](10) for other in KINDS if other != kind]
        kept.append(MAKERS[kind](10))
    kept.append(MAKERS[kind](10))
    assert (live(outer), live(inner)) == (2, 2)
    assert live(cumem.default_pool(kind)) == 1


def test_current_pool_is_not_used_for_other_devices_or_flags(emulated) -> None:
    device_pool, pinned_pool = cumem.Pool("device", device=1), cumem.Pool("pinned")
    with pinned_pool, cumem.Device(1), device_pool:
        buffers = [
            cumem.empty_device(1, device=0),
            cumem.empty_pinned(1, write_combined=True),
            cumem.empty_device(1),
        ]
    assert live(device_pool) == 1
    assert live(pinned_pool) == 0
    assert len(buffers) == 3


def test_current_pool_serves_constructors_whatever_its_flags(runtime) -> None:
    pool = cumem.Pool("pinned", write_combined=True)
    with pool:
        buffer = cumem.empty_pinned(10)
    assert live(pool) == 1
    assert "write_combined" in buffer.flags


def test_closed_pool_cannot_become_current_and_is_passed_over(runtime) -> None:
    outer, inner = cumem.Pool(), cumem.Pool()
    with outer, inner:
        inner.close()
        buffer = cumem.empty(10)
        assert live(outer) == 1
    del buffer
    with pytest.raises(ValueError, match="closed"), inner:
        pass


def test_current_pool_belongs_to_its_thread(runtime) -> None:
    pool = cumem.Pool("pinned")
    kept: list[cumem.Buffer] = []
    with pool:
        thread = threading.Thread(target=lambda: kept.append(cumem.empty_pinned(10)))
        thread.start()
        thread.join()
    assert live(pool) == 0
    assert live(cumem.default_pool("pinned")) == 1


def test_current_pool_belongs_to_its_task(runtime) -> None:
    pools = [cumem.Pool("pinned") for _ in range(4)]
    kept: list[cumem.Buffer] = []

    async def work(pool: cumem.Pool, count: int) -> None:
        with pool:
            for _ in range(count):
                await asyncio.sleep(0)
                kept.append(cumem.empty_pinned(10))

    async def main() -> None:
        await asyncio.gather(*(work(pool, i + 1) for i, pool in enumerate(pools)))

    asyncio.run(main())
    assert [live(pool) for pool in pools] == [1, 2, 3, 4]
    assert live(cumem.default_pool("pinned")) == 0


def test_task_started_inside_keeps_the_pool_after_the_block(runtime) -> None:
    pool = cumem.Pool("pinned")

    async def late(gate: asyncio.Event) -> cumem.Buffer:
        await gate.wait()
        return cumem.empty_pinned(10)

    async def main() -> cumem.Buffer:
        gate = asyncio.Event()
        with pool:
            task = asyncio.create_task(late(gate))
        gate.set()
        return await task

    buffer = asyncio.run(main())
    assert live(pool) == 1
    del buffer


# -- default pools -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_default_pool_is_what_constructors_use(runtime, kind: str) -> None:
    pool = cumem.default_pool(kind)
    assert cumem.default_pool(kind) is pool
    before = live(pool)
    buffer = MAKERS[kind](1000)
    assert live(pool) == before + 1
    with pytest.raises(ValueError, match="default pool cannot be closed"):
        pool.close()
    del buffer


def test_default_pool_is_another_after_shutdown(runtime) -> None:
    pool = cumem.default_pool("device")
    cumem.shutdown()
    assert pool.closed
    assert cumem.default_pool("device") is not pool
    assert not cumem.default_pool("device").closed


# -- giving back ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_trim_gives_back_what_is_cached(runtime, kind: str) -> None:
    pool = cumem.Pool(kind)
    kept, dropped = pool.allocate(4 << 20), pool.allocate(8 << 20)
    del dropped
    assert pool.stats().cached_nbytes >= 8 << 20
    assert pool.trim(keep="1TiB") == 0
    assert pool.trim() >= 8 << 20
    assert pool.stats().reserved_nbytes >= 4 << 20
    del kept
    assert pool.trim(keep=0, wait=True) >= 4 << 20
    assert pool.stats().reserved_nbytes == 0
    assert pool.trim() == 0


def test_trim_waits_by_default(emulated) -> None:
    pool = cumem.Pool("mapped")
    stream = cumem.Stream()
    with session.gate(stream):
        buffer = pool.allocate(1 << 20)
        buffer.fill(1, stream=stream)
        del buffer
        assert pool.trim(wait=False) == 0
        assert pool.stats().in_flight_nbytes >= 1 << 20
    assert pool.trim() >= 1 << 20


@pytest.mark.parametrize("segments", ["auto", "malloc"])
def test_trim_leaves_free_memory_that_its_stream_still_uses(emulated, segments) -> None:
    pool = cumem.Pool("device", segments=segments)
    stream = cumem.Stream()
    with session.gate(stream), stream:
        buffer = pool.allocate(4 << 20)
        buffer.fill(1)
        del buffer  # The stream may use the memory again in its own order.
        assert pool.stats().cached_nbytes >= 4 << 20
        assert pool.trim(wait=False) == 0
        assert pool.stats().reserved_nbytes >= 4 << 20
    assert pool.trim() >= 4 << 20


WAITS: dict[str, Callable[[cumem.Pool], object]] = {
    "allocate": lambda pool: pool.allocate(8 << 20),
    "trim": lambda pool: pool.trim(),
    "trim all": lambda pool: cumem.trim(pool.kind),
    "allocate elsewhere": lambda pool: cumem.Pool(pool.kind).allocate(8 << 20),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_ctrl_c_ends_a_wait_for_memory_in_flight(
    emulated, kind: str, wait: str
) -> None:
    pool = cumem.Pool(kind, limit="8MiB")
    stream = cumem.Stream()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cumem.limit(kind, "8MiB"))
        stack.enter_context(session.alarm(stream))
        block = pool.allocate(8 << 20)
        block.record_stream(stream)
        del block
        WAITS[wait](pool)
    assert pool.stats().out_of_memory_count == 0
    stream.synchronize()
    pool.allocate(8 << 20)
    assert pool.trim() >= 8 << 20


def test_signal_handler_may_use_the_pool_that_waits(emulated) -> None:
    pool = cumem.Pool("pinned", limit="8MiB")
    stream = cumem.Stream()
    answers: list[object] = []

    def answer() -> None:
        try:
            pool.trim(wait=False)
            answers.append(pool.stats().in_flight_count)
        finally:
            session.testing.gate_open(stream)

    session.shut(stream)
    block = pool.allocate(8 << 20)
    block.record_stream(stream)
    del block
    with session.on_alarm(answer):
        pool.allocate(8 << 20)
    assert answers == [1]


IDLE = 0.02  # seconds


def let_idle_windows_pass(pool: cumem.Pool) -> None:
    """Allocate only small blocks from `pool` until another pool has trimmed itself
    three times.

    The other pool has the same idle time, so `pool` has had three chances to trim
    itself.
    """
    witness = cumem.Pool("pinned", idle_trim=IDLE)
    small = witness.allocate(100)

    def has_trimmed() -> bool:
        witness.allocate(100)
        pool.allocate(100)
        return witness.stats().trim_count > before

    for _ in range(3):
        before = witness.stats().trim_count
        witness.allocate(16 << 20)
        session.wait_until(has_trimmed)
    del small


def wait_for_trim(pool: cumem.Pool, most: int) -> list[int]:
    """Allocate small blocks until the pool holds at most `most` MiB.

    Return what it held after each allocation, in MiB.
    """
    held: list[int] = []

    def is_trimmed() -> bool:
        pool.allocate(100)
        held.append(pool.stats().reserved_nbytes >> 20)
        return held[-1] <= most

    session.wait_until(is_trimmed)
    return held


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("segments", ["auto", "malloc"])
@pytest.mark.parametrize("kind", KINDS)
def test_idle_trim_gives_back_what_small_blocks_leave(
    emulated, kind: str, segments: str, kept: bool
) -> None:
    pool = cumem.Pool(kind, segments=segments, idle_trim=IDLE)
    small = pool.allocate(100) if kept else None
    large = [pool.allocate(16 << 20) for _ in range(4)]
    del large
    assert pool.stats().peak_reserved_nbytes >= 64 << 20
    wait_for_trim(pool, 16)
    session.wait_until(lambda: pool.stats().trimmed_nbytes >= 48 << 20)
    del small


def test_idle_trim_lets_the_long_segments_go_first(emulated) -> None:
    pool = cumem.Pool("pinned", segments="malloc", idle_trim=IDLE)
    both = pool.allocate(8 << 20), pool.allocate(20 << 20)
    del both
    assert set(wait_for_trim(pool, 8)) <= {28, 8}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["made", "set later"])
def test_idle_trim_needs_no_allocation(emulated, kind: str, when: str) -> None:
    pool = cumem.Pool(kind, idle_trim=IDLE if when == "made" else None)
    small = pool.allocate(100)
    pool.allocate(64 << 20)
    if when == "set later":
        pool.idle_trim = IDLE
    allocations = pool.stats().allocation_count
    session.wait_until(lambda: pool.stats().reserved_nbytes < 64 << 20)
    assert pool.stats().allocation_count == allocations
    del small


def test_idle_trims_of_many_pools_take_one_thread(emulated) -> None:
    cumem.copy(cumem.empty_device(100, "u1"), np.zeros(100, "u1"))
    pools = [cumem.Pool("pinned", idle_trim=IDLE)]
    before = len(os.listdir("/proc/self/task"))
    pools += [cumem.Pool("pinned", idle_trim=IDLE) for _ in range(20)]
    assert len(os.listdir("/proc/self/task")) <= before + 1
    cumem.shutdown()
    assert all(pool.closed for pool in pools)


def test_idle_trim_beside_a_capture_leaves_the_graph_whole(emulated) -> None:
    pool = cumem.Pool("pinned", idle_trim=IDLE)
    small = pool.allocate(100)
    stream = cumem.Stream()
    session.testing.set_capturing(stream, True)
    pool.allocate(64 << 20)
    session.wait_until(lambda: pool.stats().reserved_nbytes < 64 << 20)
    session.testing.set_capturing(stream, False)
    del small


def test_idle_trim_of_a_stream_that_works_waits_for_it(emulated) -> None:
    pool = cumem.Pool("device", idle_trim=IDLE)
    stream = cumem.Stream()
    with session.gate(stream):
        pool.allocate(64 << 20, stream).fill(1, stream=stream)
        let_idle_windows_pass(pool)
        assert pool.stats().reserved_nbytes >= 64 << 20
    stream.synchronize()
    wait_for_trim(pool, 63)


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_idle_trim_may_be_set_later(emulated, kind: str) -> None:
    pool = cumem.default_pool(kind)
    assert pool.idle_trim is None
    small = pool.allocate(100)
    pool.allocate(64 << 20)
    let_idle_windows_pass(pool)
    assert pool.stats().trim_count == 0
    pool.idle_trim = 0.02
    assert pool.idle_trim == pytest.approx(0.02)
    assert cumem.default_pool(kind).idle_trim == pytest.approx(0.02)
    wait_for_trim(pool, 63)
    pool.idle_trim = None
    assert pool.idle_trim is None
    # A trim is counted when it ends, so one more may still be running here.
    let_idle_windows_pass(pool)
    count = pool.stats().trim_count
    assert count > 0
    let_idle_windows_pass(pool)
    assert pool.stats().trim_count == count
    del small


@pytest.mark.parametrize("seconds", [0.3, 0.1, 1e-9, 2.5, 60, 1e9])
def test_idle_trim_reads_back_as_it_was_set(emulated, seconds: float) -> None:
    assert cumem.Pool("device", idle_trim=seconds).idle_trim == seconds


def test_idle_trim_refuses_what_the_constructor_refuses(emulated) -> None:
    pool = cumem.Pool("device", idle_trim=3)
    for value, error in ((0, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="idle_trim must be"):
            pool.idle_trim = value  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del pool.idle_trim
    assert pool.idle_trim == pytest.approx(3)
    pool.close()
    with pytest.raises(ValueError, match="pool is closed"):
        pool.idle_trim = 1
    assert pool.idle_trim == pytest.approx(3)


def test_trim_of_all_pools_goes_by_kind_and_device(emulated) -> None:
    cumem.empty_pinned(4 << 20, "u1")
    cumem.empty_device(4 << 20, "u1")
    cumem.empty_device(4 << 20, "u1", device=1)
    own = cumem.Pool("managed")
    own.allocate(4 << 20)
    assert cumem.trim("mapped") == 0
    assert cumem.trim("device", device=1) >= 4 << 20
    assert cumem.trim("device", device=1) == 0
    assert cumem.trim("device") >= 4 << 20
    assert cumem.trim(keep="1GiB") == 0
    assert cumem.trim() >= 8 << 20
    assert cumem.stats().total.reserved_nbytes == 0


def test_trim_of_all_pools_keeps_so_much_altogether(emulated) -> None:
    pools = [cumem.Pool("pinned") for _ in range(4)]
    for pool in pools:
        pool.allocate(8 << 20)
    cumem.trim(keep=20 << 20)
    assert 20 << 20 <= cumem.stats().total.cached_nbytes < 28 << 20


def test_close_refuses_allocation_and_keeps_live_buffers(runtime) -> None:
    pool = cumem.Pool("pinned")
    kept, dropped = pool.allocate(4 << 20), pool.allocate(4 << 20)
    del dropped
    kept.numpy()[:] = 7
    pool.close()
    pool.close()
    for call in (
        lambda: pool.allocate(1),
        lambda: cumem.empty(1, pool=pool),
        pool.stats,
        pool.snapshot,
        pool.trim,
        pool.reset_peaks,
        lambda: pool.limit,
    ):
        with pytest.raises(ValueError, match="pool is closed"):
            call()
    assert (kept.numpy() == 7).all()
    [left] = [p for p in cumem.stats().pools if p.name == "closed pool"]
    assert left.live_count == 1
    del kept
    assert all(p.name != "closed pool" for p in cumem.stats().pools)
    assert cumem.stats()["pinned"].reserved_nbytes == 0


def test_memory_of_a_dropped_pool_goes_back_with_the_last_buffer(emulated) -> None:
    free = cumem.memory_info().free
    pool = cumem.Pool()
    seen = weakref.ref(pool)
    buffer = pool.allocate(8 << 20)
    del pool
    assert seen() is None
    assert cumem.memory_info().free <= free - (8 << 20)
    assert cumem.memory_info().live >= 8 << 20
    del buffer
    gc.collect()
    assert cumem.memory_info().free == free


def test_shutdown_closes_open_pools(runtime) -> None:
    pool, current = cumem.Pool("pinned"), cumem.Pool("device")
    buffer = pool.allocate(1000)
    with current:
        cumem.empty(1000)
        cumem.shutdown()
        assert pool.closed
        assert current.closed
        assert buffer.closed
        fresh = cumem.empty(1000)  # The closed pool is passed over.
        assert live(cumem.default_pool("device")) == 1
    with pytest.raises(ValueError, match="pool is closed"):
        pool.allocate(1)
    assert not fresh.closed


def test_pools_cannot_be_pickled(runtime) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(cumem.Pool())


def test_pool_is_used_by_many_threads(runtime) -> None:
    pool = cumem.Pool("pinned")
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            pick = np.random.default_rng(seed)
            held: list[tuple[cumem.Buffer, int]] = []
            for _ in range(300):
                if held and pick.random() < 0.5:
                    buffer, value = held.pop(int(pick.integers(len(held))))
                    assert (buffer.numpy() == value).all()
                else:
                    buffer = pool.allocate(int(pick.integers(1, 5000)))
                    value = int(pick.integers(256))
                    buffer.numpy()[:] = value
                    held.append((buffer, value))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    gc.collect()
    assert live(pool) == 0
