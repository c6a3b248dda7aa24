# SPDX-License-Identifier: Apache-2.0
"""What cumem tries before an allocation fails, and what the error says.

Most tests fill an emulated device of 64 MiB. They check which pools are trimmed, which
callbacks run, and the fields and the advice of the error. Copies that need a block on a
full device take the same steps.
"""

from __future__ import annotations

import gc
import os
import sys
import threading

import numpy as np
import pytest
from support import programs, session, testing

import cumem
from cumem import _core
from cumem.pools import out_of_memory

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20
SIZE = 64 * MIB


@pytest.fixture
def small():
    """Open an emulated device of 64 MiB."""
    with session.opened("emulated", memory_nbytes=SIZE) as opened:
        yield opened
        gc.collect()


def test_error_reports_all_that_is_known(small) -> None:
    pool = cumem.Pool(limit=48 * MIB)
    kept = pool.allocate(16 * MIB)
    outside = cumem.Pool().allocate(8 * MIB)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(40 * MIB)
    error = caught.value
    assert (error.requested, error.kind, error.device) == (40 * MIB, "device", 0)
    assert (error.limit, error.code, error.name) == (48 * MIB, -6, "CM_ELIMIT")
    assert (error.live, error.in_flight) == (16 * MIB, 0)
    assert error.cached == error.largest_free
    assert error.fragmentation == 0
    assert error.driver_total == SIZE
    assert error.driver_free == cumem.memory_info().free
    assert error.outside == 0
    assert error.available is None
    assert error.tried[0].startswith("waited for memory in flight")
    assert error.tried[-1] == "collected garbage"
    assert "drop buffers, or raise it with cumem.set_limit" in error.advice
    for said in (
        "40 MiB",
        "41943040 bytes",
        "limit 48 MiB",
        "16 MiB live",
        error.advice,
    ):
        assert said in str(error)
    assert pool.stats().out_of_memory_count > 0
    del kept, outside


@pytest.mark.parametrize("stream", [None, "new"])
def test_loop_of_copies_from_dropped_buffers_needs_no_more_than_the_limit(
    emulated, stream
) -> None:
    pool = cumem.Pool("pinned", limit=4 * MIB)
    how = {} if stream is None else {"stream": cumem.Stream()}
    targets = [cumem.empty_device(MIB, "u1") for _ in range(40)]
    for index, target in enumerate(targets):
        buffer = cumem.full(MIB, index, "u1", pool=pool)
        cumem.copy_async(target, buffer, **how)
        del buffer
    cumem.Device(0).synchronize()
    for index, target in enumerate(targets):
        assert (cumem.asnumpy(target) == index).all()


@pytest.mark.parametrize("how", ["dropped", "freed"])
def test_allocation_waits_for_transfers_of_buffers_that_nobody_has(
    emulated, how
) -> None:
    pool = cumem.Pool("pinned", limit=4 * MIB)
    target, stream = cumem.empty_device(3 * MIB, "u1"), cumem.Stream()
    buffer = pool.allocate(3 * MIB)
    session.shut(stream)
    transfer = cumem.copy_async(target, buffer, stream=stream)
    if how == "freed":
        buffer.free()  # the transfer's handle is kept
    else:
        del transfer
    del buffer
    with session.when_waiting(lambda: testing.gate_open(stream)):
        again = pool.allocate(3 * MIB)
    assert again.nbytes == 3 * MIB


def test_wait_for_transfers_of_dropped_buffers_ends_with_a_signal(emulated) -> None:
    pool = cumem.Pool("pinned", limit=4 * MIB)
    target, stream = cumem.empty_device(3 * MIB, "u1"), cumem.Stream()

    def ring() -> None:
        raise session.AlarmError

    with session.gate(stream):
        cumem.copy_async(target, pool.allocate(3 * MIB), stream=stream)
        with session.on_alarm(ring), pytest.raises(session.AlarmError):
            pool.allocate(3 * MIB)
    assert pool.allocate(3 * MIB).nbytes == 3 * MIB


def test_buffer_that_is_kept_is_not_waited_for(emulated) -> None:
    pool = cumem.Pool("pinned", limit=4 * MIB)
    target, stream = cumem.empty_device(3 * MIB, "u1"), cumem.Stream()
    kept, dropped = pool.allocate(2 * MIB), pool.allocate(MIB)
    cumem.copy_async(target[:MIB], dropped).wait()
    del dropped
    with session.gate(stream):
        transfer = cumem.copy_async(target[: 2 * MIB], kept, stream=stream)
        with pytest.raises(cumem.OutOfMemoryError) as caught:
            pool.allocate(3 * MIB)
    assert not any("transfers" in step for step in caught.value.tried)
    transfer.wait()
    session.shut(stream)
    cumem.copy_async(target[: 2 * MIB], pool.allocate(2 * MIB), stream=stream)
    with (
        session.when_waiting(lambda: testing.gate_open(stream)),
        pytest.raises(cumem.OutOfMemoryError, match="transfers of 1 dropped buffer"),
    ):
        pool.allocate(3 * MIB)
    assert kept.nbytes == 2 * MIB


def test_error_of_the_driver_keeps_its_call(small) -> None:
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_device(SIZE * 2, "u1")
    error = caught.value
    assert (error.code, error.limit) == (2, None)
    assert error.call is not None
    assert "the device has 64 MiB in all" in error.advice
    assert isinstance(error, MemoryError)


def test_allocation_that_fails_keeps_nothing(small) -> None:
    others = cumem.Pool(segments="malloc").allocate(24 * MIB)
    # The sizes are more than the device has, all of it, and more than is free.
    for nbytes in (SIZE * 2, SIZE, 48 * MIB):
        pool = cumem.Pool()
        with pytest.raises(
            cumem.OutOfMemoryError, match=rf"cuMemCreate\({nbytes} bytes"
        ) as caught:
            pool.allocate(nbytes)
        assert caught.value.driver_free == SIZE - 24 * MIB
        stats = pool.stats()
        assert (stats.reserved_nbytes, stats.peak_reserved_nbytes) == (0, 0)
        assert stats.lost_count == 0
        assert pool.allocate(40 * MIB).nbytes == 40 * MIB
        pool.trim()
    del others


def test_advice_names_fragmentation_where_that_is_the_cause(small) -> None:
    pool = cumem.Pool(segments="malloc")
    pool.allocate(48 * MIB)
    kept = [pool.allocate(4 * MIB) for _ in range(12)]
    del kept[::2]
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(20 * MIB)
    error = caught.value
    assert (error.cached, error.largest_free) == (24 * MIB, 4 * MIB)
    assert error.fragmentation == pytest.approx(5 / 6)
    assert "fragmentation 83%" in str(error)
    assert "24 MiB are free, but in pieces" in error.advice
    del kept


def test_advice_names_the_piece_that_memory_is_taken_in(small) -> None:
    pool = cumem.Pool(limit=MIB, segments="malloc")
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(1000)
    assert "taken in pieces, here of 2 MiB" in caught.value.advice


def test_error_names_what_other_pools_hold_against_the_limit(emulated) -> None:
    cumem.set_limit("device", SIZE)
    kept, pool = cumem.empty_device(60 * MIB, "u1"), cumem.Pool("device")
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(30 * MIB)
    error = caught.value
    assert (error.live, error.limit) == (0, SIZE)
    assert error.others == cumem.default_pool("device").stats().reserved_nbytes
    assert "other pools hold 60 MiB against the same limit" in str(error)
    assert "other pools hold 60 MiB and buffers of this one 0 B" in error.advice
    assert "drop buffers of the others" in error.advice
    cumem.set_limit("device", None)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(1 << 40)
    assert caught.value.others >= 60 * MIB
    assert "against the same limit" not in str(caught.value)
    del kept


def test_advice_names_other_pools_where_the_device_is_full(small) -> None:
    kept, pool = cumem.empty_device(50 * MIB, "u1"), cumem.Pool("device")
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(30 * MIB)
    assert caught.value.advice.startswith("other pools hold 50 MiB: drop buffers")
    del kept


def test_what_is_larger_than_the_limit_can_never_be_had(emulated) -> None:
    cumem.set_limit("device", "32MiB")
    pool = cumem.Pool("device", limit="64MiB")
    kept = pool.allocate(20 * MIB)
    for other, nbytes, limit in [
        (pool, 33 * MIB, 32),
        (cumem.Pool("device", limit="8MiB"), 9 * MIB, 8),
    ]:
        with pytest.raises(cumem.OutOfMemoryError) as caught:
            other.allocate(nbytes)
        advice = caught.value.advice
        assert advice.startswith(f"more than the limit of {limit} MiB can never be had")
    del kept


def test_own_limit_of_a_pool_leaves_the_caches_of_others(emulated) -> None:
    other, pool = cumem.Pool("device"), cumem.Pool("device", limit="16MiB")
    other.allocate(20 * MIB)
    cached = other.stats().cached_nbytes
    kept = pool.allocate(10 * MIB)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(10 * MIB)
    assert other.stats().cached_nbytes == cached > 0
    assert not any("other pool" in step for step in caught.value.tried)
    del kept
    pool.trim()
    cumem.set_limit("device", "24MiB")
    # Now the limit of the kind is reached, so trimming the other pool helps.
    pool.allocate(10 * MIB)
    assert other.stats().cached_nbytes == 0


def test_error_of_host_memory_reports_what_the_host_has(emulated) -> None:
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_pinned(1 << 45, "u1")
    error = caught.value
    assert error.driver_free is error.driver_total is error.outside is None
    assert error.available > 0
    assert error.limit == cumem.get_limit("pinned")


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt])
def test_error_without_room_to_explain_it_is_raised_all_the_same(
    small, monkeypatch, failure
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(out_of_memory, "explain", fail)
    raised = cumem.OutOfMemoryError if failure is MemoryError else failure
    with pytest.raises(raised) as caught:
        cumem.empty_device(SIZE * 2, "u1")
    if isinstance(caught.value, cumem.OutOfMemoryError):
        assert caught.value.name == "cudaErrorMemoryAllocation"
        assert caught.value.advice is None


def test_error_made_by_hand_has_no_numbers() -> None:
    error = cumem.OutOfMemoryError("text")
    assert error.requested is error.tried is error.advice is None


def test_other_pools_of_the_device_are_trimmed(small) -> None:
    other, managed = cumem.Pool(), cumem.Pool("managed")
    other.allocate(40 * MIB)
    cumem.empty_pinned(4 * MIB, "u1")
    assert other.stats().cached_nbytes >= 40 * MIB
    cumem.empty_device(48 * MIB, "u1")
    assert other.stats().reserved_nbytes == 0
    # Trimming pinned memory would not have helped, so it is left alone.
    assert cumem.stats()["pinned"].cached_nbytes >= 4 * MIB
    assert managed.stats().trim_count == 1


def test_pools_of_other_devices_are_left_alone(small) -> None:
    other = cumem.Pool(device=1)
    other.allocate(40 * MIB)
    with pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_device(SIZE * 2, "u1")
    assert other.stats().cached_nbytes >= 40 * MIB


def test_callbacks_are_called_in_order_until_one_helps(small) -> None:
    kept = [cumem.empty_device(40 * MIB, "u1")]
    calls: list[object] = []

    def first(*what: object) -> None:
        calls.append(what)

    def second(*what: object) -> None:
        calls.append("second")
        kept.clear()

    with (
        cumem.on_out_of_memory(first),
        cumem.on_out_of_memory(second),
        cumem.on_out_of_memory(lambda *_: calls.append("third")),
    ):
        buffer = cumem.empty_device(48 * MIB, "u1")
    assert calls == [("device", 0, 48 * MIB), "second"]
    with pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_device(48 * MIB, "u1")
    assert len(calls) == 2
    del buffer


def test_callback_may_be_installed_twice_and_removed_by_its_hook(small) -> None:
    calls: list[object] = []
    hooks = [cumem.on_out_of_memory(lambda *_: calls.append(1)) for _ in range(2)]
    assert "OutOfMemoryHook" in repr(hooks[0])
    hooks[0].remove()
    hooks[0].remove()
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_device(SIZE * 2, "u1")
    assert calls == [1]
    assert "called callback 1 of 1" in caught.value.tried
    hooks[1].remove()
    with pytest.raises(TypeError, match="callback must be callable"):
        cumem.on_out_of_memory("call me")


def test_callbacks_of_threads_come_and_go_without_losing_any(emulated) -> None:
    hooks = _core._out_of_memory_callbacks
    before = list(hooks)
    kept: list[cumem.types.OutOfMemoryHook] = []

    def work() -> None:
        for _ in range(500):
            kept.append(cumem.on_out_of_memory(print))
            cumem.on_out_of_memory(print).remove()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(hooks) == {*before, *kept}
    finally:
        sys.setswitchinterval(interval)
        hooks[:] = before


def test_exception_of_a_callback_goes_to_the_hook(small, monkeypatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))

    def fail(*_: object) -> None:
        raise KeyError("of the callback")

    with cumem.on_out_of_memory(fail), pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_device(SIZE * 2, "u1")
    assert [type(error) for error in seen] == [KeyError]


def test_interrupt_in_a_callback_ends_the_allocation(small) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with cumem.on_out_of_memory(interrupt), pytest.raises(KeyboardInterrupt):
        cumem.empty_device(SIZE * 2, "u1")
    assert session.leftovers() == {}
    cumem.empty_device(1000)


def test_allocation_in_a_callback_calls_no_callback(small) -> None:
    depth: list[int] = []

    def again(*_: object) -> None:
        depth.append(len(depth))
        with pytest.raises(cumem.OutOfMemoryError) as inner:
            cumem.empty_device(SIZE * 2, "u1")
        assert not any("callback" in step for step in inner.value.tried)

    with cumem.on_out_of_memory(again), pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_device(SIZE * 2, "u1")
    assert depth == [0]
    with cumem.on_out_of_memory(again), pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_device(SIZE * 2, "u1")
    assert depth == [0, 1]


def test_shutdown_in_a_callback_is_refused(small) -> None:
    refused: list[str] = []

    def end(*_: object) -> None:
        with pytest.raises(RuntimeError) as caught:
            cumem.shutdown()
        refused.append(str(caught.value))

    with cumem.on_out_of_memory(end), pytest.raises(cumem.OutOfMemoryError):
        cumem.empty_device(SIZE * 2, "u1")
    assert len(refused) == 1
    cumem.empty_device(1000)


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_also_where_that_is_switched_off(
    small, collecting
) -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self
            self.buffer = cumem.empty_device(40 * MIB, "u1")

    (gc.enable if collecting else gc.disable)()
    try:
        Node()
        buffer = cumem.empty_device(48 * MIB, "u1")
        assert buffer.nbytes == 48 * MIB
    finally:
        gc.enable()


# -- copies that need memory on the device ----------------------------------------------


def fill_device(pool: cumem.Pool | None = None) -> list[cumem.Buffer]:
    """Take all that is left of device 0's memory, in smaller and smaller blocks."""
    held = []
    pool = pool or cumem.Pool()
    nbytes = SIZE
    while nbytes >= 4096:
        try:
            held.append(pool.allocate(nbytes))
        except cumem.OutOfMemoryError:
            nbytes //= 2
    return held


def ends_of(way: str) -> tuple[object, object, object]:
    """Return the target and the source of a copy that needs a block on device 0, and
    the values that must arrive.
    """
    if way == "overlap":
        whole = cumem.array(np.arange(4 * MIB, dtype="i4"))
        return whole[1:], whole[:-1], np.arange(4 * MIB - 1)
    values = np.arange(2 * MIB, dtype="i4").reshape(1024, -1)
    gaps = cumem.zeros((1024, 4096), "i4")[:, ::2]
    if way == "up":
        return gaps, values, values
    if way == "turned":
        return cumem.zeros((2048, 1024), "i4"), values.T, values.T
    if way == "peers":
        session.testing.deny_peers(True)
        return gaps, cumem.array(values, device=1), values
    cumem.copy(gaps, values)
    return np.zeros_like(values), gaps, values


WAYS = ["up", "down", "overlap", "turned", "peers"]


def run_copy(how: str, dst: object, src: object) -> None:
    """Copy by one of three functions, and wait for the end."""
    if how == "copy":
        cumem.copy(dst, src)
    elif how == "many":
        cumem.copy_many([(dst, src)])
    else:
        cumem.copy_async(dst, src, stream=cumem.Stream()).wait()


@pytest.mark.parametrize("how", ["copy", "stream", "many"])
@pytest.mark.parametrize("way", WAYS)
def test_copy_short_of_device_memory_calls_the_callbacks(small, way, how) -> None:
    dst, src, expected = ends_of(way)
    held = fill_device()
    calls: list[object] = []

    def relieve(*what: object) -> None:
        calls.append(what)
        held.clear()

    with cumem.on_out_of_memory(relieve):
        run_copy(how, dst, src)
    assert [what[:2] for what in calls] == [("device", 0)]
    assert (cumem.asnumpy(dst) == expected).all()


@pytest.mark.parametrize("way", WAYS)
def test_copy_short_of_device_memory_trims_other_pools_first(small, way) -> None:
    dst, src, expected = ends_of(way)
    pool = cumem.Pool()
    # The buffers are dropped at once, so the memory is cached in the pool.
    fill_device(pool)
    assert pool.stats().cached_nbytes > 0
    with cumem.on_out_of_memory(
        lambda *_: pytest.fail("the other pool's memory was enough")
    ):
        cumem.copy(dst, src)
    assert (cumem.asnumpy(dst) == expected).all()


@pytest.mark.parametrize("way", WAYS)
def test_copy_that_nothing_helps_fails_or_goes_another_way(small, way) -> None:
    dst, src, expected = ends_of(way)
    before = cumem.asnumpy(dst)
    held = fill_device()
    calls: list[object] = []
    # The host can transpose the data instead, and a kernel can read and write
    # page-locked memory without a block.
    has_another = way in ("turned", "up", "down")
    with cumem.on_out_of_memory(lambda *what: calls.append(what)):
        if has_another:
            cumem.copy(dst, src)
        else:
            with pytest.raises(cumem.OutOfMemoryError):
                cumem.copy(dst, src)
    assert len(calls) == 1
    held.clear()
    assert (cumem.asnumpy(dst) == (expected if has_another else before)).all()


@pytest.mark.parametrize("way", ["up", "down"])
def test_copy_without_memory_on_either_side_fails(small, way) -> None:
    dst, src, _ = ends_of(way)
    before = cumem.asnumpy(dst)
    held = fill_device()
    cumem.trim("pinned")
    with cumem.limit("pinned", 0), pytest.raises(cumem.OutOfMemoryError):
        cumem.copy(dst, src)
    held.clear()
    assert (cumem.asnumpy(dst) == before).all()


def test_file_short_of_device_memory_calls_the_callbacks(small, tmp_path) -> None:
    path = tmp_path / "values"
    values = np.arange(2 * MIB, dtype="i4").reshape(1024, -1)
    values.tofile(path)
    gaps = cumem.zeros((1024, 4096), "i4")[:, ::2]
    held: list[cumem.Buffer] = []
    calls: list[object] = []

    def relieve(*what: object) -> None:
        calls.append(what)
        held.clear()

    held.extend(fill_device())
    with cumem.on_out_of_memory(relieve):
        cumem.fromfile(path, out=gaps)
    held.extend(fill_device())
    with cumem.on_out_of_memory(relieve):
        cumem.tofile(path, gaps)
    assert [what[:2] for what in calls] == [("device", 0)] * 2
    assert (cumem.asnumpy(gaps) == values).all()
    assert (np.fromfile(path, "i4") == values.ravel()).all()


def test_interrupt_in_a_callback_ends_the_copy(small) -> None:
    dst, src, _ = ends_of("up")
    held = fill_device()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with cumem.on_out_of_memory(interrupt), pytest.raises(KeyboardInterrupt):
        cumem.copy(dst, src)
    held.clear()
    assert (cumem.asnumpy(dst) == 0).all()


def test_callback_of_a_copy_may_copy(small) -> None:
    dst, src, expected = ends_of("up")
    other, source, others = ends_of("up")
    held = fill_device()

    def relieve(*_: object) -> None:
        held.pop(0)
        cumem.copy(other, source)
        held.clear()

    with cumem.on_out_of_memory(relieve):
        cumem.copy(dst, src)
    assert (cumem.asnumpy(dst) == expected).all()
    assert (cumem.asnumpy(other) == others).all()


def test_background_copy_short_of_device_memory_reports_its_handle(small) -> None:
    """A worker does the copy. It runs no Python code, hence calls no callback."""
    dst, src, _ = ends_of("peers")
    held = fill_device()
    with cumem.on_out_of_memory(lambda *_: pytest.fail("a worker called the callback")):
        transfer = cumem.copy_async(dst, src)
        with pytest.raises(cumem.OutOfMemoryError):
            transfer.wait()
    del held


def test_memory_in_flight_is_waited_for(small) -> None:
    stream = cumem.Stream()
    buffer = cumem.empty_device(40 * MIB, "u1", stream=stream)
    session.shut(stream)
    buffer.fill(1, stream=stream)
    del buffer
    with session.when_waiting(lambda: session.testing.gate_open(stream)):
        cumem.empty_device(48 * MIB, "u1")


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
@pytest.mark.parametrize("nbytes", [65 * MIB, 2 << 40, 1 << 60])
def test_request_far_larger_than_the_limit_names_the_limit_in_its_error(
    emulated, kind, nbytes: int
) -> None:
    """One size is larger than the address space.

    The limit is checked before any call of the driver.
    """
    cumem.set_limit(kind, "64MiB")
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty(nbytes, "u1", kind)
    error = caught.value
    assert error.call is None
    assert (error.requested, error.limit) == (nbytes, 64 * MIB)
    assert "the limit would be passed" in str(error)
    assert error.advice.startswith("more than the limit of 64 MiB can never be had")


# -- pinning that the driver refuses -------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "mapped"])
@pytest.mark.parametrize("code", [2, 801])
def test_refused_pinning_is_reported_as_that(emulated, kind, code) -> None:
    """WSL, gVisor and confidential computing refuse to pin although the host has much
    free memory.

    The error must not blame a lack of memory.
    """
    pool = cumem.Pool(kind, segments="auto" if code == 2 else "malloc")
    call = "host_register" if code == 2 else "host_alloc"
    session.testing.plan_fault(call, 1, code, repeat=True)
    with pytest.raises(cumem.CudaError) as caught:
        pool.allocate(64 << 20)
    said = "\n".join([str(caught.value), *caught.value.notes])
    assert "refuses to page-lock 64 MiB although the host has" in said
    assert "can be had from this machine" not in said
    assert isinstance(caught.value, cumem.OutOfMemoryError) == (code == 2)


@pytest.mark.parametrize("code", [2, 801])
def test_refused_registration_is_reported_as_that(emulated, code) -> None:
    session.testing.plan_fault("host_register", 1, code, repeat=True)
    with pytest.raises(cumem.CudaError) as caught:
        cumem.register(np.zeros(64 << 20, "u1"))
    said = "\n".join([str(caught.value), *caught.value.notes])
    assert "refuses to page-lock 64 MiB although the host has" in said


def test_more_than_the_host_has_is_reported_as_that(emulated, monkeypatch) -> None:
    available = cumem.memory_info("host").available
    assert available is not None
    cumem.set_limit("pinned", None)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_pinned(available + (64 << 30), "u1")
    assert caught.value.advice is not None
    assert "can be had from this machine or container now" in caught.value.advice


#: The process may use 300 MiB more addresses. `called` lists the kinds that callbacks
#: were called with.
ULIMIT = """
import os, resource
import cumem
cumem.empty_pinned(10)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
called = []
with cumem.on_out_of_memory(lambda kind, *_: called.append(kind)):
    for kind in ("pinned", "mapped"):
        try:
            cumem.empty(1 << 30, "u1", kind)
        except cumem.OutOfMemoryError as error:
            assert "ulimit -v" in str(error)
            assert error.available < 300 << 20, error.available
            assert error.name == "CM_EHOSTMEMORY"
        assert cumem.zeros(32 << 20, "u1", kind).numpy().sum() == 0
assert called == ["pinned", "mapped"]
"""


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer needs more addresses than the limit allows",
)
def test_limit_of_the_process_on_addresses_is_want_of_memory_of_the_kind() -> None:
    done = programs.run("-W", "ignore", "-c", ULIMIT)
    assert (done.returncode, done.stderr) == (0, "")
