# SPDX-License-Identifier: Apache-2.0
"""The functions that PyTorch calls by address for device memory.

The tests call them as PyTorch does: through ctypes, hence without the GIL, and from any
thread. The last tests use the package's part of the integration, with a stand-in for
PyTorch. PyTorch itself is tested in test_torch_memory.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import faults, programs, session, torch_stand_in
from support.session import testing
from support.torch_stand_in import FREE, MALLOC, StandIn, ask, live

import cumem
from cumem import _core
from cumem.integrations import torch as integration

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20
NOTE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)

_library = ctypes.CDLL(_core.__file__)
lend = MALLOC(("cumem_lend", _library))
lend_segment = MALLOC(("cumem_lend_segment", _library))
take_back = FREE(("cumem_take_back", _library))
note_stream = NOTE(("cumem_note_stream", _library))


@contextlib.contextmanager
def lent_pool(**options: Any) -> Iterator[cumem.Pool]:
    """Lend a pool that constructors do not use, and check that it is empty at the end."""
    pool = cumem.Pool("device", **options)
    _core._lend(pool)
    yield pool
    settle(pool)
    assert (pool.stats().live_count, pool.stats().reserved_nbytes) == (0, 0)
    pool.close()


@pytest.fixture
def pool(runtime) -> Iterator[cumem.Pool]:
    with lent_pool() as pool:
        yield pool


def settle(pool: cumem.Pool) -> None:
    cumem.Device(0).synchronize()
    pool.trim()


def handle(stream: cumem.Stream) -> int:
    return stream.__cuda_stream__()[1]


def keep_busy(stream: cumem.Stream) -> None:
    """Queue work on the stream, which waits if the stream is shut."""
    cumem.empty_device(64, "u1", stream=stream).fill(1, stream=stream)


def address_of(nbytes: int, stream: int | None = None, segment: bool = False) -> int:
    """Ask for a block or a segment as PyTorch does, and return its address."""
    found = (lend_segment if segment else lend)(nbytes, 0, stream)
    assert found is not None
    return int(found)


def give(address: int, stream: int | None = None) -> None:
    take_back(address, 0, 0, stream)


@pytest.mark.parametrize("ask", [lend, lend_segment])
@pytest.mark.parametrize("nbytes", [1, 513, 2 * MIB, 20 * MIB + 7])
def test_block_is_the_pools_until_it_comes_back(pool, ask, nbytes) -> None:
    address = ask(nbytes, 0, None)
    stats = pool.stats()
    assert address % 512 == 0
    assert (stats.live_count, stats.requested_nbytes) == (1, nbytes)
    assert any(
        block.address == address and block.requested_nbytes == nbytes
        for segment in pool.snapshot().segments
        for block in segment.blocks
        if block.state == "live"
    )
    give(address)
    assert pool.stats().live_count == 0
    settle(pool)
    assert pool.stats().reserved_nbytes == 0


@pytest.mark.gpu
def test_copies_reach_what_was_lent(cuda) -> None:
    with lent_pool():
        address = address_of(4096)
        interface = {
            "shape": (4096,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        holder: Any = type("Holder", (), {"__cuda_array_interface__": interface})()
        source, back = np.arange(4096).astype("u1"), np.zeros(4096, "u1")
        cumem.copy(cumem.asbuffer(holder), source)
        cumem.copy(back, cumem.asbuffer(holder))
        assert (back == source).all()
        give(address)


@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
def test_block_is_reused_at_once_on_its_stream_alone(emulated, nbytes) -> None:
    one, other = cumem.Stream(), cumem.Stream()
    with lent_pool():
        address = address_of(nbytes, handle(one))
        with session.gate(one):
            keep_busy(one)
            give(address, handle(one))
            elsewhere = address_of(nbytes, handle(other))
            assert elsewhere != address
            assert address_of(nbytes, handle(one)) == address
            give(address, handle(one))
        give(elsewhere, handle(other))


def test_block_waits_for_streams_that_were_noted(emulated) -> None:
    user = cumem.Stream()
    with lent_pool() as pool:
        address = address_of(MIB)
        note_stream(address, handle(user))
        note_stream(address, handle(user))
        with session.gate(user):
            keep_busy(user)
            give(address)
            assert pool.stats().in_flight_count == 1
            other = address_of(MIB)
            assert other != address
        give(other)


def test_own_stream_may_be_noted_without_cost(emulated) -> None:
    one = cumem.Stream()
    with lent_pool() as pool:
        for stream in (None, handle(one)):
            address = address_of(MIB, stream)
            note_stream(address, stream)
            give(address, stream)
            assert pool.stats().in_flight_count == 0


@pytest.mark.parametrize("late", range(7))
def test_block_of_many_streams_waits_for_each(emulated, late) -> None:
    users = [cumem.Stream() for _ in range(7)]
    with lent_pool() as pool:
        address = address_of(MIB)
        for user in users:
            note_stream(address, handle(user))
        with session.gate(users[late]):
            keep_busy(users[late])
            give(address)
            other = address_of(MIB)
            assert other != address
        users[late].synchronize()
        settle(pool)
        assert pool.stats().in_flight_count == 0
        give(other)


def test_stream_of_another_device_is_waited_for(emulated) -> None:
    user = cumem.Stream(device=1)
    with lent_pool(device=0):
        address = address_of(MIB)
        note_stream(address, handle(user))
        with session.gate(user):
            cumem.empty_device(8, "u1", device=1, stream=user).fill(1, stream=user)
            give(address)
            other = address_of(MIB)
            assert other != address
        give(other)


def test_noted_stream_may_be_of_a_device_that_only_others_use(emulated) -> None:
    noted, unknown = cumem.Stream(), cumem.Stream()
    with lent_pool(device=0):
        address = address_of(MIB)
        # If the question fails, the device counts as in use.
        testing.plan_fault("context_is_active", 1)
        note_stream(address, handle(noted))
        assert testing.last_injected_fault() == "context_is_active"
        testing.plan_fault(None, 0)
        with session.gate(unknown):
            keep_busy(unknown)
            give(address)
            other = address_of(MIB)
            assert other != address
        give(other)


def test_segment_waits_for_whoever_works_on_the_device(emulated) -> None:
    unknown = cumem.Stream()
    with lent_pool() as pool:
        address = address_of(2 * MIB, segment=True)
        with session.gate(unknown):
            keep_busy(unknown)
            give(address)
            for ask in (lend, lend_segment):
                other = ask(2 * MIB, 0, None)
                assert other != address
                give(other)
        settle(pool)
        assert pool.stats().in_flight_count == 0


def test_segment_is_of_memory_that_idles(emulated) -> None:
    one = cumem.Stream()
    with lent_pool():
        address = address_of(2 * MIB, handle(one))
        with session.gate(one):
            keep_busy(one)
            give(address, handle(one))
            segment = address_of(2 * MIB, handle(one), segment=True)
            assert segment != address
        give(segment)


def test_capturing_stream_gets_segments_and_nothing_is_waited_for(emulated) -> None:
    one, busy = cumem.Stream(), cumem.Stream()
    with lent_pool(limit=4 * MIB):
        address = address_of(2 * MIB, handle(busy))
        with session.gate(busy):
            keep_busy(busy)
            give(address, handle(busy))
            testing.set_capturing(one, True)
            segment = address_of(2 * MIB, handle(one), segment=True)
            assert segment != address
            # This must return at once.
            assert lend_segment(2 * MIB, 0, handle(one)) is None
            testing.set_capturing(one, False)
        give(segment)


@pytest.mark.parametrize("ask", [lend, lend_segment])
def test_capturing_stream_gets_what_others_cache_and_waits_for_none(
    emulated, ask
) -> None:
    one, busy, done = cumem.Stream(), cumem.Stream(), cumem.Stream()
    pools = [cumem.Pool("device") for _ in range(2)]
    late, idle = pools[0].allocate(4 * MIB, busy), pools[1].allocate(4 * MIB, done)
    with cumem.limit("device", 8 * MIB), lent_pool():
        session.shut(busy)
        late.fill(1, stream=busy)
        del late, idle
        testing.set_capturing(one, True)
        address = ask(4 * MIB, 0, handle(one))
        assert address is not None
        # This must return at once.
        assert ask(4 * MIB, 0, handle(one)) is None
        testing.set_capturing(one, False)
        testing.gate_open(busy)
        give(address)


def test_limit_is_an_answer_of_null(pool) -> None:
    pool.limit = 8 * MIB
    first = address_of(6 * MIB)
    assert lend(4 * MIB, 0, None) is None
    assert lend_segment(4 * MIB, 0, None) is None
    assert pool.stats().out_of_memory_count == 2
    give(first)
    second = address_of(8 * MIB)
    give(second)


@pytest.mark.parametrize("ask", [lend, lend_segment])
def test_others_give_back_what_they_cache_before_null_is_answered(runtime, ask) -> None:
    turned = cumem.empty_device((1500, 1600), "f4")
    cumem.copy(turned, np.ones((1600, 1500), "f4").T)
    other = cumem.Pool("device")
    other.allocate(8 * MIB)
    pools = [pool for pool in cumem.stats().pools if pool.kind == "device"]
    staging = sum(pool.cached_nbytes for pool in pools if pool.is_staging)
    room = staging + other.stats().cached_nbytes
    assert staging > 0
    held = sum(pool.reserved_nbytes for pool in pools)
    with cumem.limit("device", held), lent_pool(limit=2 * MIB) as pool:
        # The pool's own limit is reached, so memory of other pools cannot help.
        assert ask(4 * MIB, 0, None) is None
        assert sum(pool.reserved_nbytes for pool in cumem.stats().pools) >= held
        pool.limit = None
        address = ask(room, 0, None)
        assert address is not None
        assert ask(MIB, 0, None) is None
        give(address)


def test_freed_memory_is_waited_for_before_null_is_answered(emulated) -> None:
    user = cumem.Stream()
    with lent_pool(limit=4 * MIB) as pool:
        address = address_of(4 * MIB)
        note_stream(address, handle(user))
        found: list[int | None] = []
        with session.gate(user):
            keep_busy(user)
            give(address)
            thread = threading.Thread(
                target=lambda: found.append(lend(4 * MIB, 0, None))
            )
            thread.start()
            session.wait_until(lambda: pool.stats().allocation_count == 1)
            assert found == []
        thread.join()
        assert found == [address]
        give(address)


@pytest.mark.parametrize("ask", [lend, lend_segment])
def test_what_cannot_be_lent_is_null(pool, ask) -> None:
    assert ask(0, 0, None) is None
    assert ask(MIB, 1, None) is None
    assert ask(MIB, -1, None) is None
    assert ask(MIB, 64, None) is None
    assert ask(1 << 62, 0, None) is None
    give(0)
    give(12345)
    note_stream(0, None)
    note_stream(12345, None)
    assert pool.stats().allocation_count == 0


def test_pool_that_is_lent_instead_gets_nothing_of_the_other(runtime) -> None:
    with cumem.Pool("device") as one, cumem.Pool("device") as other:
        _core._lend(one)
        first = address_of(MIB)
        _core._lend(other)
        second = address_of(MIB)
        assert one.stats().live_count == other.stats().live_count == 1
        give(first)
        assert one.stats().live_count == 0
        assert other.stats().live_count == 1
        give(second)


def test_closed_pool_keeps_what_is_on_loan(runtime) -> None:
    pool = cumem.Pool("device")
    _core._lend(pool)
    address = address_of(MIB)
    pool.close()
    again = address_of(MIB)  # The closed pool still lends.
    assert again != address
    give(address)
    give(again)
    with pytest.raises(ValueError, match="closed"):
        _core._lend(pool)
    assert _core._lend(None) is None  # type: ignore[func-returns-value,arg-type]
    with pytest.raises(TypeError, match="Pool"):
        _core._lend(3)  # type: ignore[arg-type]


def closed_pools() -> list[cumem.types.PoolStats]:
    return [pool for pool in cumem.stats().pools if pool.name == "closed pool"]


def test_closed_pool_that_serves_is_listed_and_trimmed(runtime) -> None:
    one, other = cumem.Pool("device"), cumem.Pool("device")
    _core._lend(one)
    addresses = [address_of(4 * MIB), address_of(4 * MIB)]
    _core._lend(other)
    addresses.append(address_of(4 * MIB))
    one.close()
    other.close()
    give(addresses.pop())
    give(addresses.pop())
    on_loan, lent = closed_pools()
    assert (on_loan.live_count, on_loan.cached_nbytes >= 4 * MIB) == (1, True)
    assert (lent.live_count, lent.cached_nbytes >= 4 * MIB) == (0, True)
    cumem.Device(0).synchronize()
    assert cumem.trim("device") >= 8 * MIB
    assert [pool.cached_nbytes for pool in closed_pools()] == [0, 0]
    give(addresses.pop())
    (left,) = closed_pools()
    assert left.reserved_nbytes == 0
    _core._lend(cumem.default_pool("device"))
    assert closed_pools() == []


def test_closed_pools_that_serve_let_in_a_device_that_is_used_later(emulated) -> None:
    one, other = cumem.Pool("device"), cumem.Pool("device")
    testing.plan_fault(None, 0)
    _core._lend(one)
    addresses = [address_of(4 * MIB)]
    _core._lend(other)
    addresses.append(address_of(4 * MIB))
    one.close()
    other.close()
    own = testing.fault_count("address_set_access")
    stream = cumem.Stream(device=1)
    assert own > 0
    assert testing.fault_count("address_set_access") == 2 * own
    for address in addresses:
        give(address)
    del stream


def test_threads_never_share_a_block(runtime) -> None:
    """Six threads ask for blocks and give them back at random. A block that one of them
    holds must not be lent again.
    """
    streams = [cumem.Stream() for _ in range(3)]
    handles = [None, *map(handle, streams)]
    held: set[int] = set()
    lock = threading.Lock()
    wrong: list[object] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        mine: list[tuple[int, int | None]] = []
        for _ in range(300):
            if len(mine) > 10 or (mine and choose.random() < 0.45):
                address, stream = mine.pop(choose.randrange(len(mine)))
                if choose.random() < 0.2:
                    note_stream(address, choose.choice(handles))
                with lock:
                    held.remove(address)
                give(address, stream)
                continue
            stream = choose.choice(handles)
            ask = choose.choice((lend, lend_segment))
            got = ask(choose.choice((1, 700, 5000, MIB, 3 * MIB)), 0, stream)
            with lock:
                if got is None or got in held:
                    wrong.append(got)
                else:
                    held.add(got)
                    mine.append((got, stream))
        for address, stream in mine:
            with lock:
                held.remove(address)
            give(address, stream)

    with lent_pool() as pool:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert testing.check_pools()
        settle(pool)
        assert pool.stats().reserved_nbytes == 0


def test_what_comes_back_after_shutdown_is_leaked(emulated) -> None:
    pool = cumem.default_pool("device")
    _core._lend(pool)
    address = address_of(MIB)
    cumem.shutdown()
    assert lend(MIB, 0, None) is None
    note_stream(address, None)
    give(address)
    _core._lend(cumem.default_pool("device"))
    # The leaked block no longer counts against the limit.
    with cumem.limit("device", 2 * MIB):
        again = address_of(MIB)
        assert cumem.default_pool("device").stats().live_count == 1
        give(again)


def test_what_is_on_loan_at_shutdown_counts_no_longer_whoever_lent_it(emulated) -> None:
    one = cumem.Pool("device")
    _core._lend(one)
    address = address_of(MIB)
    _core._lend(cumem.default_pool("device"))
    one.close()  # Only the memory on loan keeps the pool.
    other = address_of(MIB)
    cached = cumem.empty_device(30 * MIB, "u1")
    cumem.shutdown()
    assert cached.closed
    for late in (address, other):
        give(late)
    cumem.default_pool("device")
    assert [pool.name for pool in cumem.stats().pools] == ["default"]
    with cumem.limit("device", 2 * MIB):
        _core._lend(cumem.default_pool("device"))
        again = address_of(MIB)
        assert lend(3 * MIB, 0, None) is None
        give(again)


def test_shutdown_waits_for_calls_that_are_under_way(emulated) -> None:
    ended = threading.Event()
    counts = [0, 0]

    def work(index: int) -> None:
        while not ended.is_set():
            address = lend(1000, 0, None)
            if address is not None:
                give(address)
            counts[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            _core._lend(cumem.default_pool("device"))
            before = sum(counts)
            session.wait_until(lambda before=before: sum(counts) > before + 20)
            cumem.shutdown()
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("is_main", [True, False])
def test_shutdown_lets_others_run_while_it_waits_for_a_call(emulated, is_main) -> None:
    user = cumem.Stream()
    pool = cumem.Pool("device", limit=6 * MIB)
    _core._lend(pool)
    address = address_of(4 * MIB)
    note_stream(address, handle(user))
    session.shut(user)
    work = pool.allocate(64, user)
    work.fill(1, stream=user)
    pool.close()  # The closed pool still lends.
    give(address)
    found: list[int | None] = []
    caller = threading.Thread(target=lambda: found.append(lend(4 * MIB, 0, None)))
    caller.start()
    session.wait_until_waiting(caller)
    del work
    if is_main:
        with session.when_waiting(lambda: testing.gate_open(user)):
            cumem.shutdown()
    else:
        other = threading.Thread(target=cumem.shutdown)
        other.start()
        session.wait_until_waiting(other)
        testing.gate_open(user)
        other.join()
    caller.join()
    assert found == [address]
    assert lend(4 * MIB, 0, None) is None


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_gets_nothing_and_leaks(pool) -> None:
    address = address_of(MIB)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            good = lend(MIB, 0, None) is None and lend_segment(MIB, 0, None) is None
            note_stream(address, None)
            give(address)
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.stats().live_count == 1
    give(address)


def test_block_that_comes_back_at_exit_is_leaked() -> None:
    program = """
import atexit, ctypes
atexit.register(lambda: late())  # This runs after the function that cumem registers.
import cumem
from cumem import _core
pool = cumem.default_pool("device")
_core._lend(pool)
library = ctypes.CDLL(_core.__file__)
library.cumem_lend.restype = ctypes.c_void_p
library.cumem_lend.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
library.cumem_take_back.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
address = library.cumem_lend(1000, 0, None)
def late():
    library.cumem_take_back(address, 0, 0, None)
    print("late", library.cumem_lend(1000, 0, None) not in (None, address))
"""
    done = programs.run("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late True\n", "")


def use_all() -> None:
    """Call each function as PyTorch may. If a call fails, it returns null."""
    one, other = cumem.Stream(), cumem.Stream()
    with lent_pool() as pool:
        for ask in (lend, lend_segment):
            for nbytes in (1000, 3 * MIB):
                address = ask(nbytes, 0, handle(one))
                if address is not None:
                    note_stream(address, handle(other))
                    note_stream(address, None)
                    give(address, handle(one))
                again = ask(nbytes, 0, handle(other))
                if again is not None:
                    give(again, handle(other))
        assert pool.stats().live_count == 0


def test_failures_lose_nothing(emulated) -> None:
    use_all()
    faults.settle()
    testing.plan_fault(None, 0)
    use_all()
    calls = {op: testing.fault_count(op) for op in faults.reached()}
    assert {"stream_get_id", "physical_create", "event_record"} <= set(calls)
    for op, count in calls.items():
        for nth in faults.chosen(op, count):
            testing.plan_fault(op, nth, faults.UNKNOWN)
            with faults.unraised():
                # Calls that do not lend may raise.
                with contextlib.suppress(cumem.CudaError):
                    use_all()
                testing.plan_fault(None, 0)
                faults.settle()
            assert session.leftovers() == {}, (op, nth)
            assert testing.check_pools(), (op, nth)
            use_all()


def test_failing_growth_is_null_and_then_succeeds(emulated) -> None:
    with lent_pool():
        testing.plan_fault("physical_create", 1, faults.UNKNOWN)
        assert lend(MIB, 0, None) is None
        assert testing.last_injected_fault()
        testing.plan_fault(None, 0)
        give(address_of(MIB))


# -- what the package makes of them, with a stand-in for PyTorch ---------------------------


@pytest.fixture
def torch(emulated, monkeypatch) -> Iterator[StandIn]:
    with torch_stand_in.opened(monkeypatch) as found:
        yield found


def test_block_serves_its_thread_and_keeps_its_pool(torch) -> None:
    elsewhere: list[object] = []
    with integration.using() as pool:
        one = ask(torch)
        thread = threading.Thread(target=lambda: elsewhere.append(torch.empty(MIB)))
        thread.start()
        thread.join()
        with integration.using() as inner:
            assert inner is not pool
            other = ask(torch)
    assert elsewhere == [None]
    assert torch.empty(MIB) is None
    with integration.using() as again:
        assert again is pool
    assert live() == 2
    one.end()
    other.end()
    assert live() == 2  # PyTorch keeps the blocks.
    del pool, inner, again
    integration.empty_cache()
    settle(cumem.default_pool("device"))
    assert live() == 0


def test_enabled_serves_all_threads_until_it_is_disabled(torch) -> None:
    found: list[Any] = []
    integration.enable()
    integration.enable()
    thread = threading.Thread(target=lambda: found.append(torch.empty(2 * MIB)))
    thread.start()
    thread.join()
    assert found[0] is not None
    integration.disable()
    integration.disable()
    assert torch.empty(MIB) is None
    found[0].end()


def test_cache_is_emptied_while_pools_are_in_use(torch) -> None:
    with integration.using():
        one = ask(torch)
        integration.enable()
        with integration.using():
            other = ask(torch)
        other.end()
        ask(torch).end()
        integration.empty_cache()
        assert live() == 1
        third = ask(torch)
        integration.disable()
        fourth = ask(torch)
    for tensor in (one, third, fourth):
        tensor.end()


def test_pool_that_is_given_serves_until_another_is(torch) -> None:
    own = cumem.Pool("device", limit=8 * MIB)
    with integration.using(pool=own):
        one = ask(torch)
        with pytest.raises(torch.OutOfMemoryError) as caught, integration.using():
            ask(torch, 16 * MIB)
    assert own.stats().live_count == 1
    assert f"limit is {8 * MIB}" in caught.value.__notes__[0]
    one.end()
    integration.empty_cache()
    settle(own)
    assert own.stats().live_count == 0
    integration.enable(pool=cumem.default_pool("device"))
    two = ask(torch)
    assert own.stats().live_count == 0
    two.end()


def test_pool_says_of_which_device(torch) -> None:
    own = cumem.Pool("device", device=1)
    with integration.using(own):
        assert integration._served[1] is own
    integration.enable(own)
    assert [*integration._enabled] == [1]
    integration.disable(device=1)


def test_pool_of_pytorchs_is_used_and_not_kept(torch) -> None:
    own = integration.mem_pool(cumem.default_pool("device"))
    with integration.using(own) as used:
        assert used is own
        tensor = ask(torch)
        with pytest.raises(RuntimeError, match="already"), integration.using(own):
            pass
    with integration.using() as other:
        assert other is not own
    tensor.end()


def test_shutdown_in_between_is_survived(torch) -> None:
    with integration.using():
        lost = ask(torch)
    integration.enable()
    cumem.shutdown()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(MIB)
    integration.enable()
    with integration.using():
        one = ask(torch)
    two = ask(torch)
    assert live() == 2
    for tensor in (lost, one, two):
        tensor.end()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pool": 3}, TypeError, "pool must be a Pool"),
        ({"pool": "pinned"}, ValueError, "pinned memory"),
        ({"pool": "malloc"}, ValueError, "segments='auto'"),
        ({"pool": "closed"}, ValueError, "closed"),
        ({"pool": "other", "device": 0}, ValueError, "of device 1"),
        ({"device": "cpu"}, ValueError, "device"),
        ({"device": 7}, ValueError, "device"),
        ({"device": StandIn.device("cpu")}, ValueError, "CUDA device"),
        ({"device": object()}, TypeError, "device"),
    ],
)
def test_wrong_arguments_are_refused(torch, options, error, text) -> None:
    closed = cumem.Pool("device")
    closed.close()
    pools = {
        "pinned": cumem.Pool("pinned"),
        "malloc": cumem.Pool("device", segments="malloc"),
        "closed": closed,
        "other": cumem.Pool("device", device=1),
    }
    given = {
        name: pools.get(value, value) if name == "pool" else value
        for name, value in options.items()
    }
    for call in (integration.mem_pool, integration.enable):
        with pytest.raises(error, match=text):
            call(**given)
    with pytest.raises(error, match=text), integration.using(**given):
        pass


def test_capture_is_not_disturbed(torch) -> None:
    integration.enable()
    torch.capturing = True
    for call in (integration.disable, integration.enable, integration.empty_cache):
        with pytest.raises(RuntimeError, match="captured"):
            call()
    torch.capturing = False


def test_older_pytorch_is_refused_where_it_would_corrupt(torch) -> None:
    torch.__version__ = "2.10.1+cu130"
    with pytest.raises(RuntimeError, match=r"2\.11"):
        integration.enable()
    with integration.using():
        ask(torch).end()


def test_pytorch_without_pools_of_a_thread_is_refused(torch, monkeypatch) -> None:
    monkeypatch.delattr(StandIn, "_cuda_beginAllocateCurrentThreadToPool")
    with pytest.raises(RuntimeError, match="too old"):
        integration.mem_pool()


def test_device_without_mapping_is_refused(torch, monkeypatch) -> None:
    monkeypatch.setattr(cumem.Device, "attributes", lambda self: {})
    with pytest.raises(RuntimeError, match="replace_allocator"):
        integration.mem_pool()


def relieve(nbytes: int, index: int = 0, captures: int = 0) -> tuple[int, str]:
    """Call the function that PyTorch calls when it runs short.

    The answer is 1 if PyTorch should try again. Otherwise the text tells the user why not.
    """
    text = ctypes.create_string_buffer(4096)
    address = ctypes.addressof(text)
    answer = integration._relieve(nbytes, index, captures, address, len(text))
    return answer, text.value.decode()


def test_room_is_made_as_for_our_own_allocations(torch) -> None:
    held: list[int] = []

    def callback(kind: str, device: int, nbytes: int) -> None:
        assert (kind, device, nbytes) == ("device", 0, 8 * MIB)
        while held:
            give(held.pop())

    assert lend(MIB, 0, None) is None
    # From now on the device is served.
    assert relieve(MIB) == (1, "")
    held.append(address_of(6 * MIB))
    with cumem.limit("device", 8 * MIB), cumem.on_out_of_memory(callback):
        assert lend(8 * MIB, 0, None) is None
        assert relieve(8 * MIB) == (1, "")
        give(address_of(8 * MIB))
        answer, said = relieve(64 * MIB, captures=1)
        assert answer == 0 or said == ""
        answer, said = relieve(64 * MIB, captures=1)
        assert (answer, "limit is" in said) == (0, True)
    with cumem.limit("device", 8 * MIB):
        answer, said = relieve(64 * MIB)
        assert answer == 0
        assert "asked for 64 MiB" in said
        assert "limit 8 MiB" in said


def test_fraction_is_a_limit_and_reset_a_trim(torch) -> None:
    relieve(1)
    integration._set_fraction(0.25, 0)
    assert cumem.get_limit("device") == cumem.memory_info(0).total // 4
    integration._set_fraction(1.0, 0)
    assert cumem.get_limit("device") is None
    give(address_of(MIB))
    assert cumem.default_pool("device").stats().cached_nbytes > 0
    integration._trim()
    assert cumem.default_pool("device").stats().cached_nbytes == 0


CALLS: dict[str, Callable[[], object]] = {
    "mem_pool": integration.mem_pool,
    "using": lambda: integration.using().__enter__(),
    "enable": integration.enable,
    "empty_cache": integration.empty_cache,
    "replace_allocator": integration.replace_allocator,
}


@pytest.mark.parametrize("name", CALLS)
def test_emulated_memory_is_refused(emulated, name) -> None:
    with pytest.raises(RuntimeError, match="emulated"):
        CALLS[name]()


def test_nothing_that_is_enabled_may_be_disabled(emulated) -> None:
    integration.disable()


def test_only_what_others_call_is_seen() -> None:
    functions = ("cumem_lend", "cumem_lend_segment", "cumem_take_back")
    assert all(hasattr(_library, name) for name in (*functions, "cumem_note_stream"))
    assert not hasattr(_library, "cm_pool_alloc")
