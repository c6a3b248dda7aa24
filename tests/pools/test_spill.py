# SPDX-License-Identifier: Apache-2.0
"""In pools that spill, buffers that have been idle sleep when memory is short.

tests/c/test_pool_spill.c tests the blocks below, with every call of the driver failing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import forks, session, testing, values

import cumem
from cumem.interchange import foreign_stream
from cumem.recording.events import GAINS, KINDS, LOSSES, OPS

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20


def make_pool(limit: int | str | None = "32MiB", **options) -> cumem.Pool:
    return cumem.Pool("device", spill="pinned", limit=limit, **options)


def make_filled(pool: cumem.Pool, count: int, nbytes: int) -> list[cumem.Buffer]:
    """Make buffers, each filled with its number + 1."""
    made = []
    for number in range(count):
        buffer = pool.allocate(nbytes)
        buffer.fill(number + 1)
        made.append(buffer)
    return made


def check_filled(made: list[cumem.Buffer]) -> None:
    for number, buffer in enumerate(made):
        assert (values.get(buffer) == number + 1).all()


# -- allocations make others sleep, and uses wake them ----------------------------------


def test_spill_lets_buffers_be_more_than_the_limit(runtime) -> None:
    pool = make_pool()
    made = make_filled(pool, 8, 8 * MIB)
    stats = pool.stats()
    assert stats.live_nbytes == 64 * MIB
    assert stats.reserved_nbytes <= 32 * MIB
    assert stats.asleep_nbytes == 32 * MIB == stats.spilled_nbytes
    assert stats.spill_count == 4
    assert "32 MiB asleep>" in repr(pool)
    assert "spill_count 4" in str(stats)
    for _ in range(2):
        check_filled(made)
    assert pool.stats().wake_count >= 8
    assert pool.stats().reserved_nbytes <= 32 * MIB
    made.clear()
    assert pool.stats().asleep_nbytes == 0
    assert pool.stats().live_nbytes == 0
    pool.close()


def test_spill_lets_buffers_be_more_than_the_device_has() -> None:
    with session.opened(memory_nbytes=64 * MIB):
        pool = make_pool(None)
        made = make_filled(pool, 6, 16 * MIB)
        assert pool.stats().asleep_nbytes >= 32 * MIB
        check_filled(made)
        del made


def test_spill_on_another_device(emulated) -> None:
    pool = make_pool(device=1)
    made = make_filled(pool, 8, 8 * MIB)
    check_filled(made)
    assert pool.stats().wake_count >= 4


def test_limit_of_device_memory_makes_buffers_spill(emulated) -> None:
    pool = make_pool(None)
    with cumem.limit("device", 32 * MIB):
        made = make_filled(pool, 8, 8 * MIB)
        assert pool.stats().reserved_nbytes <= 32 * MIB
        check_filled(made)
    del made


def test_spill_takes_those_that_were_idle_longest(runtime) -> None:
    pool = make_pool()
    made = make_filled(pool, 4, 8 * MIB)
    made[0].fill(1)
    made[1].fill(2)
    more = make_filled(pool, 2, 8 * MIB)
    assert pool.stats().spill_count == 2
    made[0].fill(1)
    made[1].fill(2)
    assert pool.stats().wake_count == 0
    made[3].fill(4)
    assert pool.stats().wake_count == 1
    check_filled(made)
    check_filled(more)


def test_spill_takes_no_more_than_is_missing(runtime) -> None:
    pool = make_pool()
    made = make_filled(pool, 3, 8 * MIB)
    more = pool.allocate(12 * MIB)
    assert pool.stats().spill_count == 1
    assert more.nbytes == 12 * MIB
    check_filled(made)


def test_spill_keeps_the_bytes_at_the_ends_of_a_block(runtime) -> None:
    pool = make_pool()
    small = pool.allocate(1000)
    small.fill(9)
    data = np.arange(9 * MIB, dtype="u4").view("u1")[: 9 * MIB].copy()
    buffer = pool.allocate(9 * MIB)
    cumem.copy(buffer, data)
    other = make_filled(pool, 3, 8 * MIB)
    assert 0 < pool.stats().asleep_nbytes < 9 * MIB
    assert (values.get(buffer) == data).all()
    assert (values.get(small) == 9).all()
    check_filled(other)


@pytest.mark.parametrize(
    "use",
    [
        lambda buf: buf[3:10],
        lambda buf: buf.item(5),
        lambda buf: buf.ptr,
        lambda buf: buf.fill(1),
        lambda buf: buf.to_numpy(),
        lambda buf: buf.__dlpack__(),
        lambda buf: cumem.copy(cumem.empty_pinned(buf.nbytes, "u1"), buf),
        lambda buf: cumem.copy(buf, np.ones(buf.nbytes, "u1")),
        lambda buf: cumem.copy_async(cumem.empty_pinned(buf.nbytes, "u1"), buf).wait(),
        lambda buf: cumem.copy_many([(cumem.empty_pinned(buf.nbytes, "u1"), buf)]),
        lambda buf: buf.reshape(2, -1),
        lambda buf: buf.keep(),
        lambda buf: buf.record_stream(cumem.Stream()),
    ],
)
def test_use_of_a_spilled_buffer_wakes_it(runtime, use) -> None:
    pool = make_pool()
    first = pool.allocate(8 * MIB)
    first.fill(1)
    others = make_filled(pool, 4, 8 * MIB)
    assert pool.stats().asleep_nbytes == 8 * MIB
    use(first)
    assert pool.stats().wake_count == 1
    assert (values.get(first) == 1).all()
    check_filled(others)


def test_views_share_the_sleep_of_their_buffer(runtime) -> None:
    pool = make_pool()
    first = pool.allocate(8 * MIB)
    view = first[4 * MIB :]
    view.fill(7)
    others = make_filled(pool, 4, 8 * MIB)
    assert pool.stats().spill_count == 1
    assert view.item(0) == 7
    assert pool.stats().wake_count == 1
    check_filled(others)


def test_record_tells_spills_from_growth(runtime) -> None:
    with cumem.record() as rec:
        pool = make_pool()
        made = make_filled(pool, 8, 8 * MIB)
        check_filled(made)
        stats = pool.stats()
    events = rec.log.events[rec.log.events["kind"] == KINDS.index("device")]
    sums = {
        op: int(events["nbytes"][events["op"] == OPS.index(op)].sum())
        for op in ("grow", "trim", "sleep", "wake")
    }
    assert sums["sleep"] == stats.spilled_nbytes > 0
    assert sums["wake"] == stats.woken_nbytes > 0
    held = sums["grow"] - sums["trim"] + sums["wake"] - sums["sleep"]
    assert held == stats.reserved_nbytes
    changes = np.isin(events["op"], (*GAINS, *LOSSES))
    assert events["value"][changes].max() == stats.peak_reserved_nbytes <= 32 * MIB
    (device,) = (each for each in rec.summary().kinds if each.name == "device")
    assert device.grown_nbytes == sums["grow"] + sums["wake"]
    assert device.trimmed_nbytes == sums["trim"] + sums["sleep"]


# -- who stays -------------------------------------------------------------------------


def refuse(pool: cumem.Pool, nbytes: int = 24 * MIB) -> str:
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        pool.allocate(nbytes)
    return str(caught.value)


def test_buffers_that_left_cumem_stay(runtime) -> None:
    pool = make_pool()
    address, tensor, kept = (pool.allocate(8 * MIB) for _ in range(3))
    address.fill(1)
    assert address.ptr
    tensor.__dlpack__()
    kept.keep()
    text = refuse(pool)
    assert "spilled 0 buffers" in text
    assert "2 exported, captured, or with an address that was read" in text
    assert "1 kept by keep()" in text
    assert pool.stats().asleep_nbytes == 0


LOOKS = {
    "repr": repr,
    "HTML": lambda buffer: buffer._repr_html_(),
    "flags": lambda buffer: buffer.flags,
    "asarray": cumem.asarray,
    "live": lambda buffer: str(cumem.live()),
    "who_holds": lambda buffer: cumem.who_holds(cumem.live().buffers[0]),
}


@pytest.mark.parametrize("look", LOOKS)
def test_displays_neither_wake_a_buffer_nor_keep_it_from_spilling(
    runtime, look
) -> None:
    """A display shows an address, but nobody reads or writes the memory there."""
    pool = make_pool()
    made = make_filled(pool, 2, 16 * MIB)
    for buffer in made:
        LOOKS[look](buffer)
    used = pool.allocate(32 * MIB)
    assert pool.stats().spill_count == 2
    for buffer in made:
        LOOKS[look](buffer)
    assert pool.stats().wake_count == 0
    del used
    check_filled(made)


COPIES = {
    "save": lambda buffer, path: cumem.save(path / "x.npy", buffer),
    "to_host": lambda buffer, path: cumem.to_host({"x": buffer}),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_of_the_package_do_not_keep_a_buffer_from_spilling(
    runtime, tmp_path, copy
) -> None:
    pool = make_pool()
    made = make_filled(pool, 2, 16 * MIB)
    for buffer in made:
        COPIES[copy](buffer, tmp_path)
    other = pool.allocate(32 * MIB)
    assert pool.stats().spill_count == 2
    del other
    check_filled(made)


def test_small_buffers_stay(runtime) -> None:
    pool = make_pool()
    small = pool.allocate(1000)
    big = pool.allocate(16 * MIB)
    text = refuse(pool, 40 * MIB)
    assert "1 too small" in text
    assert "spilled 1 buffer, 1" in text
    assert small.nbytes + big.nbytes > 0


def test_keep_is_taken_back(runtime) -> None:
    pool = make_pool()
    made = make_filled(pool, 4, 8 * MIB)
    for buffer in made:
        buffer.keep()
    assert "4 kept by keep()" in refuse(pool, 8 * MIB)
    made[2].keep(False)
    more = pool.allocate(8 * MIB)
    assert pool.stats().spill_count == 1
    check_filled(made[:2])
    assert more.nbytes == 8 * MIB
    del more
    check_filled(made)
    with pytest.raises(TypeError):
        made[0].keep(1)


def test_keep_does_not_outlive_the_buffer(runtime) -> None:
    pool = make_pool()
    first = pool.allocate(16 * MIB)
    first.keep()
    del first
    second = pool.allocate(16 * MIB)  # its object may lie where `first` lay
    third = pool.allocate(24 * MIB)
    assert pool.stats().spill_count == 1
    assert second.nbytes < third.nbytes


# -- limits ----------------------------------------------------------------------------


def test_spill_limit_bounds_pinned_memory(runtime) -> None:
    pool = make_pool(spill_limit="24MiB")
    assert pool.spill == "pinned"
    assert pool.spill_limit == 24 * MIB
    before = cumem.stats()["pinned"].reserved_nbytes
    made = make_filled(pool, 6, 8 * MIB)
    check_filled(made)
    made += make_filled(pool, 1, 8 * MIB)
    assert cumem.stats()["pinned"].reserved_nbytes - before == 24 * MIB
    text = refuse(pool, 8 * MIB)
    assert "spilled 0 buffers" in text
    assert "limit would be passed" in text
    assert cumem.stats()["pinned"].reserved_nbytes - before == 24 * MIB
    # To wake a buffer, the pool first spills another one. That needs a place in pinned
    # memory before the place of the first is free.
    first = made[0]
    assert pool.stats().spill_count == pool.stats().wake_count + 3
    with pytest.raises(cumem.OutOfMemoryError, match="spilled 0 buffers"):
        first.fill(1)
    made[6].fill(7)
    del made[6]
    for number, buffer in enumerate(made):
        buffer.fill(number + 1)
    check_filled(made)


def test_pinned_limit_counts_too(emulated) -> None:
    pool = make_pool()
    made = make_filled(pool, 4, 8 * MIB)
    with cumem.limit("pinned", 4 * MIB):
        refuse(pool, 8 * MIB)
    check_filled(made)
    pool.allocate(8 * MIB)


def test_lower_limit_spills_at_the_next_allocation(runtime) -> None:
    pool = make_pool()
    made = make_filled(pool, 4, 8 * MIB)
    pool.limit = 16 * MIB
    more = pool.allocate(8 * MIB)
    assert pool.stats().reserved_nbytes <= 16 * MIB
    del more
    check_filled(made)


def test_pool_refuses_wrong_spill_arguments(runtime) -> None:
    with pytest.raises(ValueError, match="spill is for device memory"):
        cumem.Pool("pinned", spill="pinned")
    with pytest.raises(ValueError, match="spill must be"):
        cumem.Pool("device", spill="file")
    with pytest.raises(TypeError, match="spill"):
        cumem.Pool("device", spill=1)
    with pytest.raises(ValueError, match="spill_limit is for"):
        cumem.Pool("device", spill_limit=1)
    with pytest.raises(ValueError, match="malloc"):
        cumem.Pool("device", spill="pinned", segments="malloc")
    assert cumem.Pool("device").spill is None
    assert cumem.Pool("device").spill_limit is None


# -- order -----------------------------------------------------------------------------


def test_spill_comes_after_work_on_the_buffer(emulated) -> None:
    pool = make_pool()
    stream = cumem.Stream()
    first = pool.allocate(16 * MIB)
    first.fill(1)
    made: list[cumem.Buffer] = []
    session.shut(stream)
    first.fill(2, stream=stream)
    thread = threading.Thread(target=lambda: made.append(pool.allocate(24 * MIB)))
    thread.start()
    session.wait_until_waiting(thread)
    assert made == []
    testing.gate_open(stream)
    thread.join()
    assert len(made) == pool.stats().spill_count == 1
    made.clear()
    assert (values.get(first) == 2).all()


def test_use_waits_for_a_buffer_that_moves(emulated) -> None:
    pool = make_pool()
    stream = cumem.Stream()
    first = pool.allocate(16 * MIB)
    session.shut(stream)
    first.fill(2, stream=stream)
    found: list[object] = []
    spiller = threading.Thread(target=lambda: pool.allocate(24 * MIB))
    spiller.start()
    session.wait_until_waiting(spiller)
    user = threading.Thread(target=lambda: found.append(first.item(0)))
    user.start()
    session.wait_until_waiting(user)
    assert found == []
    pool.limit = None  # so that both fit from now on
    testing.gate_open(stream)
    spiller.join()
    user.join()
    assert found == [2]
    assert pool.stats().spill_count == 1


def test_buffer_may_be_freed_while_it_moves(emulated) -> None:
    pool = make_pool()
    stream = cumem.Stream()
    first = pool.allocate(16 * MIB)
    session.shut(stream)
    first.fill(2, stream=stream)
    spiller = threading.Thread(target=lambda: pool.allocate(24 * MIB))
    spiller.start()
    session.wait_until_waiting(spiller)
    first.free()
    with pytest.raises(ValueError, match="closed"):
        first.fill(1)
    testing.gate_open(stream)
    spiller.join()
    cumem.trim()
    assert pool.stats().asleep_nbytes == 0
    assert pool.stats().live_count == 0


def test_signal_handler_is_told_that_a_buffer_moves(emulated) -> None:
    pool = make_pool()
    stream = cumem.Stream()
    first = pool.allocate(16 * MIB)
    first.fill(1)
    told: list[str] = []

    def use() -> None:
        with pytest.raises(RuntimeError, match="is being moved"):
            first.fill(3)
        with pytest.raises(cumem.OutOfMemoryError):
            pool.allocate(28 * MIB)
        told.append("told")
        testing.gate_open(stream)

    session.shut(stream)
    first.fill(2, stream=stream)
    with session.on_alarm(use):
        made = pool.allocate(24 * MIB)
    assert told == ["told"]
    assert pool.stats().spill_count == 1
    del made
    assert (values.get(first) == 2).all()


def test_signal_ends_a_spill_and_nothing_has_moved(emulated) -> None:
    pool = make_pool()
    stream = cumem.Stream()
    first = pool.allocate(16 * MIB)
    first.fill(1)

    def ring() -> None:
        testing.gate_open(stream)
        raise session.AlarmError

    session.shut(stream)
    first.fill(2, stream=stream)
    with session.on_alarm(ring), pytest.raises(session.AlarmError):
        pool.allocate(24 * MIB)
    assert (values.get(first) == 2).all()
    made = pool.allocate(24 * MIB)
    assert made.nbytes == 24 * MIB
    del made
    assert (values.get(first) == 2).all()


@contextlib.contextmanager
def interrupted_copy() -> Iterator[list[bool]]:
    """End the block's call by a signal while its copy waits on the device.

    The copy's stream is opened when the call waits for it, or else after the call. Yields a
    list. It says afterwards whether the call was over when the stream was opened.
    """
    was_over: list[bool] = []
    over = threading.Event()

    def waits() -> bool:
        return over.is_set() or testing.fault_count("stream_synchronize") > 0

    def ring() -> None:
        raise session.AlarmError

    with testing.new_streams_shut() as open_streams:

        def open_late() -> None:
            session.wait_until(waits, "the end of the call")
            was_over.append(over.is_set())
            open_streams()

        testing.plan_fault(None, 0)  # this resets the counts
        opener = threading.Thread(target=open_late)
        opener.start()
        try:
            with session.on_alarm(ring), pytest.raises(session.AlarmError):
                yield was_over
        finally:
            over.set()
            opener.join()


def test_interrupted_spill_waits_for_the_copy_that_it_has_begun(emulated) -> None:
    pool = make_pool()
    first = pool.allocate(16 * MIB)
    first.fill(1)
    cumem.Device(0).synchronize()
    with interrupted_copy() as was_over:
        pool.allocate(24 * MIB)
    assert was_over == [False]
    assert pool.stats().spill_count == 0
    assert (values.get(first) == 1).all()


def test_interrupted_wake_waits_for_the_copy_that_it_has_begun(emulated) -> None:
    pool = make_pool()
    first = pool.allocate(16 * MIB)
    first.fill(1)
    second = pool.allocate(24 * MIB)
    assert pool.stats().spill_count == 1
    del second
    with interrupted_copy() as was_over:
        first.item(0)
    assert was_over == [False]
    assert pool.stats().asleep_nbytes == 16 * MIB
    assert (values.get(first) == 1).all()


def test_transfer_under_way_keeps_its_buffer(emulated) -> None:
    pool = make_pool()
    stream = cumem.Stream()
    first = pool.allocate(16 * MIB)
    source = cumem.empty_pinned(16 * MIB, "u1")
    source.fill(5)
    with session.gate(stream):
        transfer = cumem.copy_async(first, source, stream=stream)
        assert "1 busy" in refuse(pool)
    transfer.wait()
    made = pool.allocate(24 * MIB)
    del made
    assert (values.get(first) == 5).all()


def test_nothing_spills_during_a_capture(emulated) -> None:
    pool = make_pool()
    made = make_filled(pool, 4, 8 * MIB)
    stream = cumem.Stream()
    testing.set_capturing(stream, True)
    try:
        assert "being captured" in refuse(pool, 8 * MIB)
    finally:
        testing.set_capturing(stream, False)
    check_filled(made)


# -- threads ---------------------------------------------------------------------------


def test_threads_allocate_and_use_at_once(runtime) -> None:
    pool = make_pool()
    shared = make_filled(pool, 4, 4 * MIB)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            own = [pool.allocate(3 * MIB) for _ in range(3)]
            for number, buffer in enumerate(own):
                buffer.fill(seed * 10 + number)
            for _ in range(12):
                number = int(rng.integers(3))
                assert own[number].item(17) == seed * 10 + number
                own[number].free()
                own[number] = pool.allocate(3 * MIB)
                own[number].fill(seed * 10 + number)
                which = int(rng.integers(4))
                assert shared[which].item(5) == which + 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    check_filled(shared)
    assert pool.stats().spill_count > 0


def test_request_gives_up_if_others_wake_what_it_spills(emulated, monkeypatch) -> None:
    """The only buffer that can spill is used again each time that it has spilled.

    An allocation asks libraries whether they capture, and asks again after a spill. The
    test answers in a library's place, and uses the buffer then. So no other thread has to
    win a race.
    """
    pool = make_pool()
    kept = pool.allocate(12 * MIB)
    kept.keep()
    wanted = pool.allocate(16 * MIB)
    wanted.fill(1)
    is_within = False

    def use() -> bool:
        nonlocal is_within
        if not is_within:
            is_within = True
            with contextlib.suppress(RuntimeError):  # the buffer may be on its way
                wanted.item(0)
            is_within = False
        return False

    monkeypatch.setattr(foreign_stream, "is_captured", use)
    text = refuse(pool)
    assert pool.stats().spill_count > 16
    assert "others used them again" in text
    assert "keep()" in text
    monkeypatch.undo()
    assert (values.get(wanted) == 1).all()
    assert kept.nbytes == 12 * MIB


# -- failures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["address_unmap", "physical_release", "copy_async", "host_register"]
)
def test_failed_spill_leaves_the_buffer_as_it_was(emulated, op) -> None:
    pool = make_pool()
    made = make_filled(pool, 4, 8 * MIB)
    testing.plan_fault(op, 1, 999, repeat=True)
    with contextlib.suppress(cumem.CudaError):
        pool.allocate(8 * MIB)
    testing.plan_fault(None, 0)
    check_filled(made)
    assert pool.allocate(8 * MIB).nbytes == 8 * MIB
    check_filled(made)


# -- ends ------------------------------------------------------------------------------


def test_spilled_buffers_are_freed_without_waking(runtime) -> None:
    pool = make_pool()
    made = make_filled(pool, 8, 8 * MIB)
    made[0].free()
    del made[0]
    with made[0]:
        pass
    stats = pool.stats()
    assert stats.wake_count <= 1
    del made[:]
    gc.collect()
    assert pool.stats().asleep_nbytes == 0
    assert pool.stats().live_count == 0


def test_spilled_buffers_outlive_their_pool(runtime) -> None:
    pool = make_pool()
    made = make_filled(pool, 8, 8 * MIB)
    pool.close()
    del pool
    check_filled(made)


def test_shutdown_with_spilled_buffers(emulated) -> None:
    pool = make_pool()
    made = make_filled(pool, 8, 8 * MIB)
    cumem.shutdown()
    assert pool.closed
    for buffer in made:
        assert buffer.closed


def test_forked_child_cannot_use_spilled_buffers(emulated) -> None:
    pool = make_pool()
    made = make_filled(pool, 8, 8 * MIB)

    def check() -> None:
        for buffer in made:
            with pytest.raises((cumem.CudaError, RuntimeError)):
                buffer.fill(0)
            buffer.free()

    forks.fork_and_run(check)
    check_filled(made)
