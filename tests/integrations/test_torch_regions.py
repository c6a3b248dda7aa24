# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors in regions, with a stand-in for PyTorch on the emulated device.

test_torch_regions_gpu.py tests PyTorch itself.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import session, torch_stand_in
from support.torch_stand_in import SEGMENT_NBYTES, StandIn, Tensor, ask

import cumem
from cumem import _core
from cumem.integrations import torch as integration

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20


@pytest.fixture
def torch(emulated, monkeypatch) -> Iterator[StandIn]:
    with torch_stand_in.opened(monkeypatch) as found:
        yield found


def fill(tensor: Tensor, value: int) -> Tensor:
    cumem.copy(tensor.buffer(), np.full(tensor.nbytes, value, "u1"))
    return tensor


def holds(tensor: Tensor, value: int) -> bool:
    found = np.zeros(tensor.nbytes, "u1")
    cumem.copy(found, tensor.buffer())
    return bool((found == value).all())


def is_in(region: cumem.Region, tensor: Tensor) -> bool:
    return any(
        block.address <= tensor.address < block.address + block.nbytes
        for segment in region.pool.snapshot().segments
        for block in segment.blocks
        if block.state == "live"
    )


# -- which region a tensor is in ---------------------------------------------------------


def test_tensors_in_a_region_wake_with_the_same_bytes(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensors = [fill(ask(torch, 1000 * n), n) for n in range(1, 9)]
    assert all(is_in(region, tensor) for tensor in tensors)
    for _ in range(3):
        region.sleep()
        assert region.pool.stats().reserved_nbytes == 0
        region.wake()
        assert all(holds(tensor, n) for n, tensor in enumerate(tensors, 1))
    for tensor in tensors:
        tensor.end()


def test_regions_of_one_device_serve_by_turns_and_nested(torch) -> None:
    one, other = cumem.Region("weights"), cumem.Region("cache")
    made: list[tuple[cumem.Region, Tensor]] = []
    for _ in range(3):
        with integration.using(one):
            made.append((one, ask(torch)))
            with integration.using(other):
                made.append((other, ask(torch)))
                with integration.using(one):
                    made.append((one, ask(torch)))
            made.append((one, ask(torch)))
        with integration.using(other):
            made.append((other, ask(torch)))
    for region, tensor in made:
        assert is_in(region, tensor)
    other.sleep()
    assert one.pool.stats().reserved_nbytes > 0
    other.wake()
    for _, tensor in made:
        tensor.end()


def test_threads_serve_themselves_from_their_own_regions(torch) -> None:
    regions = [cumem.Region(tag) for tag in "abcd"]
    meet = threading.Barrier(len(regions))
    made: list[tuple[cumem.Region, Tensor]] = []

    def work(region: cumem.Region) -> None:
        for _ in range(5):
            with integration.using(region):
                meet.wait()
                made.append((region, ask(torch)))
                meet.wait()

    threads = [threading.Thread(target=work, args=(each,)) for each in regions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 20
    for region, tensor in made:
        assert is_in(region, tensor)
        tensor.end()


def test_region_does_not_serve_where_no_pool_is_given(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        inside = ask(torch)
    with integration.using():
        outside = ask(torch)
    assert is_in(region, inside)
    assert not is_in(region, outside)
    for tensor in (inside, outside):
        tensor.end()


def test_pool_of_a_region_stands_for_the_region(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region.pool):
        tensor = ask(torch)
        with pytest.raises(BufferError, match="'weights'"):
            region.sleep()
    assert is_in(region, tensor)
    tensor.end()


def test_mem_pool_keeps_its_region_and_device(torch) -> None:
    region, other = cumem.Region("weights", 1), cumem.Region("cache")
    own = integration.mem_pool(region)
    assert torch.devices[own.id] == 1
    with integration.using(other), integration.using(own):
        tensor = ask(torch)
        with pytest.raises(BufferError, match="'weights'"):
            region.sleep()
    assert is_in(region, tensor)
    region.sleep()
    with pytest.raises(RuntimeError, match="asleep"), integration.using(own):
        pass
    region.wake()
    tensor.end()


def test_limit_of_a_region_is_told_in_pytorchs_error(torch) -> None:
    region = cumem.Region("weights")
    region.pool.limit = 64 * MIB
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        integration.using(region),
    ):
        ask(torch, 128 * MIB)
    assert f"limit is {64 * MIB}" in caught.value.__notes__[0]
    region.sleep()  # the block has ended


# -- what sleep copies -------------------------------------------------------------------


def saved_nbytes(region: cumem.Region) -> int:
    """Put the region to sleep, and return the bytes that were copied."""
    before = cumem.stats()["pinned"].live_nbytes
    region.sleep()
    return cumem.stats()["pinned"].live_nbytes - before


def test_only_parts_that_pytorch_uses_are_copied(torch) -> None:
    region = cumem.Region("weights", host="release")
    with integration.using(region) as one:
        tensors = [fill(ask(torch, 100_000), n) for n in range(40)]
        with integration.using(region) as other:
            tensors.append(fill(ask(torch, 30 * MIB), 40))
            tensors.append(fill(ask(torch, 60 * MIB), 41))
    buffer = cumem.full(50_000, 77, "u1", "device", pool=region.pool)
    kept = [n for n in range(41) if n % 3 != 1 or n == 40]
    for n in {*range(42)} - {*kept}:
        tensors[n].end()
    tensors[0].end(awaiting=True)  # a stream works on it
    live = sum(tensors[n].block.nbytes for n in kept) + buffer.nbytes
    assert live <= saved_nbytes(region) <= live + 4096
    assert sorted(torch.snapshots) == [(one.id, False), (other.id, False)]
    region.wake()
    assert all(holds(tensors[n], n) for n in kept)
    assert (cumem.asarray(buffer, kind="pinned").numpy() == 77).all()
    assert torch_stand_in.live() == 5
    region.sleep(keep=False)
    assert len(torch.snapshots) == 2  # nothing is asked if nothing is copied
    region.wake()
    for n in kept:
        tensors[n].end()


def test_segments_of_a_mem_pool_that_has_ended_are_looked_into(torch) -> None:
    region = cumem.Region("weights", host="release")
    own = integration.mem_pool(region)
    with integration.using(own):
        kept, dropped = fill(ask(torch, MIB), 7), ask(torch, 20 * MIB)
        ask(torch, MIB)
    dropped.end()
    del own
    for _ in range(2):
        assert saved_nbytes(region) < 3 * MIB
        region.wake()
        assert holds(kept, 7)
        torch.empty_cache()
    kept.end()
    torch.segments[0, 1][0].blocks[1].state = "inactive"
    torch.empty_cache()
    region.sleep()
    region.wake()
    asked = len(torch.snapshots)
    region.sleep()
    assert len(torch.snapshots) == asked  # no memory is left to ask about


def test_pytorch_that_cannot_say_what_a_mem_pool_has_is_asked_for_all(
    torch, monkeypatch
) -> None:
    """In old versions memory_snapshot() has no arguments."""
    whole = torch.memory_snapshot
    monkeypatch.setattr(torch, "memory_snapshot", lambda: whole())
    region, other = cumem.Region("weights", host="release"), cumem.Region("cache")
    with integration.using(region), integration.using(region):
        kept = fill(ask(torch, MIB), 7)
        ask(torch, 40 * MIB).end()
    with integration.using(other):
        ask(torch, 40 * MIB).end()
    assert saved_nbytes(region) <= 2 * MIB
    region.wake()
    assert holds(kept, 7)
    kept.end()


def test_tensors_that_are_made_after_waking_are_copied_the_next_time(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        old = fill(ask(torch, MIB), 7)
    region.sleep()
    region.wake()
    with integration.using(region):
        new = fill(ask(torch, MIB), 8)
    assert new.address - old.address == MIB  # `old` had left this free
    region.sleep()
    region.wake()
    assert holds(old, 7)
    assert holds(new, 8)
    for tensor in (old, new):
        tensor.end()


def test_spare_parts_are_forgotten_when_sleep_fails(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensor, rest = fill(ask(torch, 10 * MIB), 7), ask(torch, 30 * MIB)
    rest.end()
    with cumem.limit("pinned", 5 * MIB), pytest.raises(cumem.OutOfMemoryError):
        region.sleep()
    with integration.using(region):
        again = fill(ask(torch, 30 * MIB), 8)
    region.sleep()
    region.wake()
    assert holds(tensor, 7)
    assert holds(again, 8)
    for each in (tensor, again):
        each.end()


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([10, 5, 12, 5], ValueError),
        ([20, 5, 10, 5], ValueError),
        ([(1 << 64) - 1, 2], ValueError),
        ([10, -1], OverflowError),
        (["10", 5], TypeError),
        ([10, None], TypeError),
        ((10, 5), TypeError),
    ],
)
def test_wrong_spare_parts_are_refused(emulated, parts, error) -> None:
    with pytest.raises(error):
        _core._set_spare(cumem.Pool("device"), parts)


# -- refusals ------------------------------------------------------------------------------


def test_region_asleep_cannot_be_used(torch) -> None:
    region = cumem.Region("weights")
    region.sleep()
    for call in (integration.using, integration.enable):
        with pytest.raises(RuntimeError, match=r"'weights' is asleep.*call wake\(\)"):
            call(region).__enter__()
    assert torch.uses == {}
    region.wake()
    with integration.using(region):
        ask(torch).end()


def test_region_refuses_to_sleep_inside_a_block(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensor = fill(ask(torch, 100), 7)
        with integration.using(region):
            pass
        with pytest.raises(BufferError, match=r"'weights' cannot go to sleep: PyTorch"):
            region.sleep()
        with pytest.raises(BufferError), integration.using(cumem.Region("cache")):
            cumem.sleep(keep=False)
    assert not region.is_asleep
    region.sleep()
    region.wake()
    assert holds(tensor, 7)
    tensor.end()


def test_region_refuses_to_sleep_while_another_thread_is_in_a_block(torch) -> None:
    region = cumem.Region("weights")
    is_in_block, may_leave = threading.Event(), threading.Event()

    def work() -> None:
        with integration.using(region):
            is_in_block.set()
            may_leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_in_block.wait()
    with pytest.raises(BufferError, match="another"):
        region.sleep()
    may_leave.set()
    thread.join()
    region.sleep()


def test_block_that_raises_has_ended(torch) -> None:
    region = cumem.Region("weights")
    with pytest.raises(KeyError), integration.using(region):
        raise KeyError
    region.sleep()
    region.wake()
    with integration.using(region):
        ask(torch).end()


def test_block_that_cannot_begin_has_not_begun(torch, monkeypatch) -> None:
    region = cumem.Region("weights")

    def refuse(*names: str) -> None:
        raise RuntimeError("no allocator")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "CUDAPluggableAllocator", refuse)
        with pytest.raises(RuntimeError, match="no alloc"), integration.using(region):
            pass
    region.sleep()
    region.wake()
    with integration.using(region):
        ask(torch).end()


def test_block_that_begins_while_the_region_falls_asleep_is_refused(torch) -> None:
    region = cumem.Region("weights")
    buffer = region.pool.allocate(1000)
    stream = cumem.Stream()
    session.shut(stream)
    buffer.fill(1, stream=stream)
    outcomes: list[BaseException] = []

    def use() -> None:
        try:
            with integration.using(region):
                pass
        except RuntimeError as error:
            outcomes.append(error)

    sleeper = threading.Thread(target=region.sleep)
    sleeper.start()
    session.wait_until_waiting(sleeper)
    user = threading.Thread(target=use)
    user.start()
    assert outcomes == []
    session.testing.gate_open(stream)
    sleeper.join()
    user.join()
    assert "asleep" in str(outcomes[0])
    region.wake()


def test_region_that_serves_all_threads_stays_awake(torch) -> None:
    region = cumem.Region("weights")
    integration.enable(region)
    tensor = ask(torch)
    integration.empty_cache()
    later = ask(torch)
    integration.enable()  # this keeps the region
    assert is_in(region, tensor)
    assert is_in(region, later)
    with pytest.raises(BufferError, match="enable"):
        region.sleep()
    integration.enable(cumem.default_pool("device"))
    elsewhere = ask(torch)
    assert not is_in(region, elsewhere)
    region.sleep()
    integration.disable()
    region.wake()
    for each in (tensor, later, elsewhere):
        each.end()


def guest_count(region: cumem.Region) -> int:
    return region._guest_count


def test_region_that_was_closed_serves_all_threads_no_more(torch) -> None:
    """The closed region's pool gives no MemPool any more, so what enable() began ends."""
    region = cumem.Region("weights")
    integration.enable(region)
    ask(torch).end()
    region.close()
    integration.empty_cache()
    assert torch.empty(100) is None  # PyTorch takes memory of its own
    assert guest_count(region) == 0
    integration.disable()
    assert guest_count(region) == 0


def test_empty_cache_that_fails_goes_on_serving(torch, monkeypatch) -> None:
    region = cumem.Region("weights")
    integration.enable(region)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_cache", interrupt)
        with pytest.raises(KeyboardInterrupt):
            integration.empty_cache()
    assert guest_count(region) == 1
    ask(torch).end()
    integration.disable()
    assert guest_count(region) == 0


@pytest.mark.parametrize(
    "name", ["_cuda_beginAllocateToPool", "_cuda_endAllocateToPool"]
)
def test_region_may_sleep_after_enable_or_disable_failed(
    torch, monkeypatch, name
) -> None:
    region = cumem.Region("weights")
    call = getattr(torch, name)

    def fail(*args: object) -> None:
        call(*args)
        if name.startswith("_cuda_begin"):
            torch._cuda_endAllocateToPool(*args)
        torch._cuda_releasePool(*args)
        raise RuntimeError("PyTorch fails")

    def enable_and_disable() -> None:
        integration.enable(region)
        integration.disable()

    monkeypatch.setattr(torch, name, fail)
    with pytest.raises(RuntimeError, match="PyTorch fails"):
        enable_and_disable()
    monkeypatch.setattr(torch, name, call)
    assert guest_count(region) == 0
    region.sleep()
    region.wake()


# -- many pools ----------------------------------------------------------------------------


def test_most_pools_that_serve_at_once(torch) -> None:
    regions = [cumem.Region(str(n)) for n in range(65)]
    for region in regions[:64]:
        with integration.using(region):
            pass
    with integration.using(regions[7]):  # a second MemPool of a region is not counted
        with integration.using(regions[7]):
            ask(torch).end()
        with (
            pytest.raises(RuntimeError, match="64 pools"),
            integration.using(regions[64]),
        ):
            pass
    regions[3].close()
    with integration.using(regions[64]):
        tensor = ask(torch)
    assert is_in(regions[64], tensor)
    tensor.end()


def test_desk_is_kept_until_all_segments_are_back(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensor = ask(torch)
    before = torch.functions[0, 1][0]
    region.close()
    made = []
    for tag in range(63):
        made.append(cumem.Region(str(tag)))
        with integration.using(made[-1]):
            pass
    with (
        pytest.raises(RuntimeError, match="64 pools"),
        integration.using(cumem.Region("late")),
    ):
        pass
    tensor.end()
    torch.empty_cache()
    late = cumem.Region("late")
    with integration.using(late):
        ask(torch).end()
        lent = torch.functions[torch.captures[-1][0]][0]
    address = before(SEGMENT_NBYTES, 0, None)
    assert address == lent(SEGMENT_NBYTES, 0, None) - SEGMENT_NBYTES
    for each in (address, address + SEGMENT_NBYTES):
        torch.functions[0, 1][1](each, 0, 0, None)


def test_mem_pool_of_before_a_shutdown_gets_nothing_of_later_pools(torch) -> None:
    old = integration.mem_pool(cumem.Region("old"))
    cumem.shutdown()
    regions = [cumem.Region(str(n)) for n in range(63)]
    for region in regions:
        with integration.using(region):
            pass
    with (
        pytest.raises(RuntimeError, match="64 pools"),
        integration.using(cumem.Region("late")),
    ):
        pass
    with pytest.raises(torch.OutOfMemoryError), integration.using(old):
        ask(torch)
    del old
    with integration.using(cumem.Region("late")):
        ask(torch).end()


def test_mem_pool_may_end_after_a_shutdown(torch) -> None:
    with integration.using(cumem.Region("old")):
        pass
    cumem.shutdown()
    torch.empty_cache()
    with integration.using(cumem.Region("new")):
        ask(torch).end()


def test_region_that_has_slept_may_outlive_a_shutdown_and_a_fork(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensor = ask(torch)
    region.sleep()
    region.wake()
    cumem.shutdown()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all("weights" not in name for name in cumem.stats().pools)
    tensor.end()


def test_number_of_no_desk_is_refused(emulated) -> None:
    for number in (-1, 64):
        with pytest.raises(ValueError, match="no such desk"):
            _core._close_desk(number)
    with pytest.raises(TypeError):
        _core._close_desk("0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Pool"):
        _core._open_desk(3)  # type: ignore[arg-type]


# -- the end -------------------------------------------------------------------------------


def test_region_that_is_closed_keeps_tensors_until_they_end(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensor = fill(ask(torch, 100), 7)
        region.close()
        later = fill(
            ask(torch, 4 * MIB), 8
        )  # the `with` block goes on, and so does lending
    assert holds(tensor, 7)
    assert holds(later, 8)
    with pytest.raises(ValueError, match="closed"), integration.using(region):
        pass
    assert torch_stand_in.live() == 2
    for each in (tensor, later):
        each.end()
    integration.empty_cache()
    assert torch_stand_in.live() == 0


def test_region_that_is_closed_asleep_takes_its_segments_back(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensor = ask(torch)
    region.sleep()
    region.close()
    tensor.end()
    integration.empty_cache()
    gc.collect()
    assert torch_stand_in.live() == 0
    assert cumem.stats()["pinned"].reserved_nbytes == 0


def test_region_that_is_dropped_lets_its_mem_pools_go(torch) -> None:
    def build() -> Tensor:
        region = cumem.Region("weights")
        with integration.using(region):
            return fill(ask(torch), 7)

    tensor = build()
    gc.collect()
    assert holds(tensor, 7)
    tensor.end()
    integration.empty_cache()
    assert torch_stand_in.live() == 0
    assert all(lender.pool() is not None for lender in integration._lenders)


def test_segments_come_back_while_the_region_sleeps(torch) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        kept, dropped = fill(ask(torch), 7), ask(torch)
    region.sleep()
    dropped.end()
    integration.empty_cache()
    assert torch_stand_in.live() == 1
    region.wake()
    assert holds(kept, 7)
    kept.end()


def use(region: Any, torch: StandIn) -> None:
    with integration.using(region):
        ask(torch).end()


def test_pool_of_device_memory_serves_as_a_region_does(torch) -> None:
    pools = [cumem.Pool("device") for _ in range(3)]
    made = []
    for pool in pools:
        with integration.using(pool):
            made.append(ask(torch))
    assert [pool.stats().live_count for pool in pools] == [1, 1, 1]
    for tensor in made:
        tensor.end()
    use(pools[0], torch)
    assert pools[0].stats().live_count == 1  # the segment was used again
