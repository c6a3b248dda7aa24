# SPDX-License-Identifier: Apache-2.0
"""Tests of limits of kinds and pools, of sizes as people write them, and memory_info().

Limits are set in every way that cumem offers: `set_limit()`, `limit()` as a block or
decorator, `Pool(limit=)` and variables of the environment. The tests look at which
allocations still succeed and at what the pools keep.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import threading
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from support import session

import cumem
from cumem.units import parse_nbytes

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20


def usable() -> int:
    """Return how much memory this process may use, by the machine and by its cgroup."""
    host = cumem.memory_info("host")
    return min(n for n in (host.total, host.cgroup_limit) if n is not None)


def test_pinned_and_mapped_memory_is_limited_to_half_at_first(runtime) -> None:
    assert cumem.get_limit("pinned") == usable() // 2
    assert cumem.get_limit("mapped") == usable() // 2
    assert cumem.get_limit("device") is None
    assert cumem.get_limit("managed") is None


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
def test_limit_is_obeyed_and_counts_what_is_cached(runtime, kind: str) -> None:
    cumem.trim()
    cumem.set_limit(kind, "8MiB")
    assert cumem.get_limit(kind) == 8 * MIB
    a = cumem.empty(4 * MIB, "u1", kind)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty(8 * MIB, "u1", kind)
    assert caught.value.name == "CM_ELIMIT"
    assert caught.value.limit == 8 * MIB
    del a
    # This succeeds because the cached memory is given back first.
    cumem.empty(8 * MIB, "u1", kind)
    cumem.set_limit(kind, None)
    assert cumem.get_limit(kind) is None
    cumem.empty(12 * MIB, "u1", kind)


def test_limit_of_a_kind_holds_for_all_its_pools_together(emulated) -> None:
    cumem.set_limit("pinned", 8 * MIB)
    a, b = cumem.Pool("pinned"), cumem.Pool("pinned")
    kept = a.allocate(6 * MIB)
    with pytest.raises(cumem.OutOfMemoryError):
        b.allocate(4 * MIB)
    del kept
    b.allocate(8 * MIB)  # Pool `a` was trimmed to make room for this.


def test_pinned_and_mapped_memory_count_together(emulated) -> None:
    half = usable() // 2
    cumem.set_limit("pinned", None)
    cumem.set_limit("pinned", "100%")
    cumem.set_limit("mapped", 4 * MIB)
    assert cumem.get_limit("pinned") == usable()
    assert cumem.get_limit("mapped") == 4 * MIB
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_mapped(8 * MIB, "u1")
    assert caught.value.limit == 4 * MIB
    cumem.set_limit("pinned", half)
    cumem.set_limit("mapped", half)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_pinned(half + 16 * MIB, "u1")
    assert caught.value.limit == half


def test_limits_of_devices_are_their_own(emulated) -> None:
    cumem.set_limit("device", "8MiB", device=1)
    assert cumem.get_limit("device") is None
    assert cumem.get_limit("device", 1) == 8 * MIB
    cumem.empty_device(16 * MIB, "u1")
    with pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_device(16 * MIB, "u1", device=1)
    cumem.set_limit("device", "50%")
    total = cumem.memory_info().total
    assert [cumem.get_limit("device", d) for d in (0, 1)] == [total // 2] * 2


def test_limit_of_a_pool_is_its_own_and_may_change(runtime) -> None:
    pool, other = cumem.Pool("pinned", limit="4MiB"), cumem.Pool("pinned")
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(8 * MIB)
    assert caught.value.limit == 4 * MIB
    other.allocate(8 * MIB)
    pool.limit = "16MiB"
    assert pool.limit == 16 * MIB
    pool.allocate(8 * MIB)
    pool.limit = None
    assert pool.limit is None
    with pytest.raises(ValueError, match="limit must be"):
        pool.limit = "all"
    with pytest.raises(AttributeError):
        del pool.limit
    with pytest.raises(AttributeError):
        pool.kind = "device"


def test_limit_for_a_while_is_put_back_exactly(emulated) -> None:
    cumem.set_limit("device", 100 * MIB, device=1)
    before = [cumem.get_limit("device", d) for d in (0, 1)]
    seen = []
    with cumem.limit("device", "8MiB"):
        with cumem.limit("device", None, device=1):
            seen.append([cumem.get_limit("device", d) for d in (0, 1)])
        thread = threading.Thread(target=lambda: seen.append(cumem.get_limit("device")))
        thread.start()
        thread.join()
        with pytest.raises(cumem.OutOfMemoryError):
            cumem.empty_device(16 * MIB, "u1")
    assert seen == [[8 * MIB, None], 8 * MIB]
    assert [cumem.get_limit("device", d) for d in (0, 1)] == before
    with pytest.raises(KeyError), cumem.limit("pinned", "1GiB"):
        raise KeyError
    assert cumem.get_limit("pinned") == usable() // 2


@pytest.mark.parametrize("ends", list(itertools.permutations(range(3))))
def test_limit_blocks_may_end_in_any_order(emulated, ends: tuple[int, ...]) -> None:
    cumem.set_limit("device", 64 * MIB)
    blocks = [cumem.limit("device", n * MIB) for n in (8, 4, 16)]
    for n, block in zip((8, 4, 16), blocks, strict=True):
        block.__enter__()
        assert cumem.get_limit("device") == n * MIB
    still = [0, 1, 2]
    for i in ends:
        blocks[i].__exit__(None, None, None)
        still.remove(i)
        left = (8, 4, 16)[still[-1]] if still else 64
        assert cumem.get_limit("device") == left * MIB


def test_overlapping_limit_blocks_of_threads_leave_nothing(emulated) -> None:
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen = []

    def first() -> None:
        with cumem.limit("device", "1MiB"):
            first_in.set()
            assert second_in.wait(session.PATIENCE)
        seen.append(cumem.get_limit("device"))
        first_out.set()

    def second() -> None:
        assert first_in.wait(session.PATIENCE)
        with cumem.limit("device", "2MiB"):
            second_in.set()
            assert first_out.wait(session.PATIENCE)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [2 * MIB]
    assert cumem.get_limit("device") is None


def test_many_threads_of_limit_blocks_leave_nothing(emulated) -> None:
    cumem.set_limit("managed", "1GiB")

    def run(seed: int) -> None:
        for i in range(100):
            with cumem.limit("managed", (seed + i + 1) * MIB):
                pass

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cumem.get_limit("managed") == 1 << 30


def test_set_limit_in_a_block_counts_after_it(emulated) -> None:
    with cumem.limit("pinned", "8MiB"):
        cumem.set_limit("pinned", "16MiB")
        assert cumem.get_limit("pinned") == 8 * MIB
    assert cumem.get_limit("pinned") == 16 * MIB


def test_shutdown_in_a_block_leaves_the_block_its_limit(emulated) -> None:
    cumem.set_limit("device", "1GiB")
    with cumem.limit("device", "8MiB"):
        cumem.shutdown()
        assert cumem.get_limit("device") == 8 * MIB
        cumem.shutdown()
    assert cumem.get_limit("device") is None


def test_limit_object_serves_once(emulated) -> None:
    block = cumem.limit("device", "8MiB")
    with pytest.raises(RuntimeError, match="not entered"):
        block.__exit__(None, None, None)
    with block:
        with pytest.raises(RuntimeError, match="in use"), block:
            pass
        assert cumem.get_limit("device") == 8 * MIB
    with pytest.raises(RuntimeError, match="over"), block:
        pass
    assert cumem.get_limit("device") is None
    assert "over" in repr(block)


def test_limit_decorates_functions(emulated) -> None:
    @cumem.limit("device", "8MiB")
    def within(depth: int) -> int | None:
        return within(depth - 1) if depth else cumem.get_limit("device")

    assert within(0) == within(2) == 8 * MIB
    assert cumem.get_limit("device") is None


async def coroutine() -> None: ...


def generator() -> Iterator[None]:
    yield


async def async_generator() -> AsyncIterator[None]:
    yield


class Called:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "function",
    [coroutine, generator, async_generator, Called(), functools.partial(generator)],
)
def test_limit_refuses_functions_that_run_after_their_call(emulated, function) -> None:
    with pytest.raises(TypeError, match=r"with cumem\.limit\(\.\.\.\).* in its body"):
        cumem.limit("device", "8MiB")(function)
    with pytest.raises(TypeError, match="function must be callable, not int"):
        cumem.limit("device", "8MiB")(3)


def test_limit_notices_bad_values_when_it_is_made(runtime) -> None:
    for wrong in ("lots", -1, "101%"):
        with pytest.raises(ValueError, match="limit"):
            cumem.limit("device", wrong)
    with pytest.raises(TypeError, match="limit must be"):
        cumem.limit("device", 1.5)
    with pytest.raises(ValueError, match="kind must be"):
        cumem.limit("paper", 1)
    with pytest.raises(ValueError, match="takes no device"):
        cumem.limit("pinned", 1, device=0)


@pytest.mark.parametrize(
    ("limit", "reported"),
    [
        *((wrong, "limit must") for wrong in ("lots", "-1", "", "1e9", -1)),
        ("101%", r"limit: a share must be at most 100%, got '101%'"),
        ("4 GiBs", r"limit: unknown unit 'GiBs' in '4 GiBs'; use Ki to Ei"),
        ("9 EiB", "limit must be"),
    ],
)
def test_limit_that_cannot_be_read_is_refused(runtime, limit, reported) -> None:
    with pytest.raises(ValueError, match=reported):
        cumem.set_limit("device", limit)
    assert cumem.get_limit("device") is None


def test_limit_of_wrong_type_or_place_is_refused(runtime) -> None:
    for wrong in (1.5, True, b"1"):
        with pytest.raises(TypeError, match="limit must be"):
            cumem.set_limit("device", wrong)
    with pytest.raises(ValueError, match="kind must be"):
        cumem.set_limit("paper", 1)
    with pytest.raises(ValueError, match="takes no device"):
        cumem.set_limit("pinned", 1, device=0)
    with pytest.raises(ValueError, match="takes no device"):
        cumem.get_limit("mapped", 0)
    with pytest.raises(ValueError, match="does not exist"):
        cumem.set_limit("device", 1, device=99)


@pytest.mark.parametrize(
    "text",
    ["0", "4096", "512 KiB", "1.5GB", " 2 mib ", ".5GiB", "3.", "7EiB", "10 b", "1tb"],
)
def test_sizes_are_read_as_by_units(runtime, text: str) -> None:
    cumem.set_limit("managed", text)
    assert cumem.get_limit("managed") == parse_nbytes(text)


@pytest.mark.parametrize("share", ["0%", "33%", "12.5 %", "100%"])
def test_shares_are_read_as_by_units(runtime, share: str) -> None:
    cumem.set_limit("device", share)
    assert cumem.get_limit("device") == parse_nbytes(share, cumem.memory_info().total)


def test_environment_sets_limits_at_opening(monkeypatch) -> None:
    monkeypatch.setenv("CUMEM_LIMIT_PINNED", "64MiB")
    monkeypatch.setenv("CUMEM_LIMIT_MAPPED", "1%")
    monkeypatch.setenv("CUMEM_LIMIT_MANAGED", "1048576")
    monkeypatch.setenv("CUMEM_LIMIT_DEVICE", "25%")
    with session.opened("emulated"):
        assert cumem.get_limit("pinned") == 64 * MIB
        assert cumem.get_limit("mapped") == usable() // 100
        assert cumem.get_limit("managed", 1) == MIB
        assert cumem.get_limit("device", 1) == cumem.memory_info(1).total // 4
        cumem.set_limit("pinned", None)
        cumem.shutdown()
        # The variable has been read again.
        assert cumem.get_limit("pinned") == 64 * MIB


@pytest.mark.parametrize("kind", ["PINNED", "MAPPED", "MANAGED", "DEVICE"])
@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("lots", " must be .* not 'lots'"),
        ("120%", ": a share must be at most 100%, got '120%'"),
        ("-5", " must be .* not '-5'"),
    ],
)
def test_nonsense_in_the_environment_is_refused(
    monkeypatch, kind, text, reported
) -> None:
    with session.opened("emulated"):
        monkeypatch.setenv(f"CUMEM_LIMIT_{kind}", text)
        with pytest.raises(ValueError, match=f"CUMEM_LIMIT_{kind}{reported}"):
            cumem.empty(1)
        monkeypatch.delenv(f"CUMEM_LIMIT_{kind}")
        cumem.empty(1)


# -- memory_info ---------------------------------------------------------------------------


def test_memory_info_says_what_is_ours(emulated) -> None:
    free, total = cumem.memory_info()
    buffer = cumem.empty_device(8 * MIB, "u1")
    info = cumem.memory_info()
    assert (info.free, info.total) == tuple(info) == (info[0], total)
    assert info.free <= free - 8 * MIB
    assert info.live == 8 * MIB
    assert info.reserved >= info.live
    assert info.outside == total - info.free - info.reserved
    assert "MiB" in repr(info)
    for again in (copy.copy, lambda value: pickle.loads(pickle.dumps(value))):
        twin = again(info)
        assert (twin, twin.live, twin.outside) == (info, info.live, info.outside)
    assert cumem.memory_info(1).live == 0
    assert cumem.memory_info("cuda:0").live == 8 * MIB
    del buffer


def test_memory_info_of_the_host(runtime) -> None:
    before = cumem.memory_info("host")
    assert before.total is not None
    assert before.available is not None
    assert before.available <= before.total
    assert before.pinned_limit == cumem.get_limit("pinned")
    buffers = [cumem.empty_pinned(MIB, "u1"), cumem.empty_mapped(MIB, "u1")]
    info = cumem.memory_info("host")
    assert info.live == before.live + 2 * MIB
    assert info.reserved >= info.live
    del buffers


# -- a limit holds for what is handed out -----------------------------------------------


def big(kind: str, nbytes: int, pool: cumem.Pool | None = None) -> cumem.Buffer:
    return cumem.empty(nbytes, "u1", kind, pool=pool)


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
@pytest.mark.parametrize("how", ["block", "set_limit", "pool"])
def test_limit_below_what_is_cached_gives_the_rest_back(runtime, kind, how) -> None:
    cumem.trim()
    pool = cumem.Pool(kind) if how == "pool" else cumem.default_pool(kind)
    del [big(kind, 24 * MIB, pool)][:]
    assert pool.stats().cached_nbytes >= 24 * MIB
    with contextlib.ExitStack() as stack:
        if how == "block":
            stack.enter_context(cumem.limit(kind, "8MiB"))
        elif how == "set_limit":
            cumem.set_limit(kind, "8MiB")
            stack.callback(cumem.set_limit, kind, None)
        else:
            pool.limit = "8MiB"
        assert pool.stats().reserved_nbytes <= 8 * MIB
        with pytest.raises(cumem.OutOfMemoryError) as caught:
            big(kind, 24 * MIB, pool)
        assert caught.value.name == "CM_ELIMIT"
        held = big(kind, 4 * MIB, pool)
        assert pool.stats().reserved_nbytes <= 8 * MIB
    if how == "pool":
        pool.limit = None
    big(kind, 24 * MIB, pool)
    del held


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
def test_limit_leaves_as_much_cached_as_it_allows(emulated, kind) -> None:
    pieces = [big(kind, 4 * MIB) for _ in range(8)]
    del pieces
    cumem.set_limit(kind, 16 * MIB)
    assert 8 * MIB <= cumem.default_pool(kind).stats().cached_nbytes <= 16 * MIB


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
def test_limit_below_what_lives_hands_out_nothing_that_was_freed(
    emulated, kind
) -> None:
    """Freed memory must not be handed out again as long as the kind holds more than its
    limit.
    """
    pieces = [big(kind, 8 * MIB) for _ in range(4)]
    cumem.set_limit(kind, 16 * MIB)
    with pytest.raises(cumem.OutOfMemoryError):
        big(kind, 4096)
    pieces.pop()  # 24 MiB are still live, above the limit of 16 MiB.
    with pytest.raises(cumem.OutOfMemoryError):
        big(kind, 4096)
    del pieces[1:]
    assert big(kind, 4 * MIB).nbytes == 4 * MIB
    assert cumem.default_pool(kind).stats().reserved_nbytes <= 16 * MIB


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_what_comes_back_from_flight_does_not_stay_above_the_limit(
    emulated, kind
) -> None:
    pool = cumem.Pool(kind)
    stream, other = cumem.Stream(), cumem.Stream()
    scratch = cumem.empty_device(4096, "u1")
    buffer = pool.allocate(24 * MIB, stream=stream if kind == "device" else None)
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        buffer.record_stream(stream)
        buffer.record_stream(other)
        del buffer
        pool.limit = 8 * MIB
        assert pool.stats().in_flight_nbytes >= 24 * MIB
    cumem.Device(0).synchronize()
    assert pool.allocate(4 * MIB).nbytes == 4 * MIB
    assert pool.stats().reserved_nbytes <= 8 * MIB


def test_limit_that_is_lowered_trims_the_other_pools_of_its_kind(emulated) -> None:
    pools = [cumem.Pool("pinned") for _ in range(3)]
    for pool in pools:
        del [pool.allocate(8 * MIB)][:]
    cumem.set_limit("pinned", 8 * MIB)
    assert sum(pool.stats().reserved_nbytes for pool in pools) <= 8 * MIB


def test_limit_of_mapped_memory_lowers_what_both_kinds_keep(emulated) -> None:
    """Pinned and mapped memory together may be as much as the larger of their two
    limits.
    """
    cumem.set_limit("pinned", usable())
    del [big("mapped", 8 * MIB), big("pinned", 8 * MIB)][:]
    cumem.set_limit("mapped", 4 * MIB)
    stats = cumem.stats()
    assert stats["mapped"].reserved_nbytes <= 4 * MIB
    assert stats["pinned"].reserved_nbytes >= 8 * MIB


def test_arrays_of_numpy_stay_below_a_limit_that_was_lowered(emulated) -> None:
    with cumem.numpy_pinned():
        del [np.empty(24 * MIB, "u1")][:]
        with cumem.limit("pinned", "8MiB"):
            cumem.Device(0).synchronize()  # The freed array's fence passes as well.
            array = np.empty(24 * MIB, "u1")
            assert cumem.asbuffer(array).kind == "pageable"
            small = np.empty(MIB, "u1")
            assert cumem.stats()["pinned"].reserved_nbytes <= 8 * MIB
            assert cumem.asbuffer(small).kind == "pinned"


def test_limit_leaves_the_rest_of_a_fragmented_pool_usable(emulated) -> None:
    pieces = [big("device", 4 * MIB) for _ in range(8)]
    del pieces[::2]
    cumem.set_limit("device", 16 * MIB)
    assert cumem.default_pool("device").stats().reserved_nbytes <= 16 * MIB
    with pytest.raises(cumem.OutOfMemoryError):
        big("device", 4 * MIB)
    pieces.pop()
    assert big("device", 4 * MIB).nbytes == 4 * MIB


def test_threads_never_hold_more_than_a_limit_that_changes(emulated) -> None:
    pool = cumem.Pool("pinned")
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        while not stop.is_set():
            try:
                pool.allocate(3 * MIB)
            except cumem.OutOfMemoryError:
                pass
            # The main thread reports the failure.
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for limit in [64, 4, 32, 8, 2, 48] * 5:
        pool.limit = limit * MIB
    stop.set()
    for thread in threads:
        thread.join()
    pool.limit = 4 * MIB
    assert pool.stats().reserved_nbytes <= 4 * MIB
    assert not failures
