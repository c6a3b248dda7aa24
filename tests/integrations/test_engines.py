# SPDX-License-Identifier: Apache-2.0
"""The calls by which inference engines put regions to sleep and wake them by tags.

On the emulated device the regions hold buffers of cumem. The tests marked `gpu` let PyTorch
allocate, and make vLLM's and SGLang's calls in the order in which those engines make them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from support import testing, values

import cumem
from cumem.integrations import engines
from cumem.integrations.engines import SleepMode

MIB = 1 << 20
SIZE = 3 * MIB

#: Operations of the driver that sleeping or waking calls at least twice for three regions.
OPS = (
    *("physical_create", "address_map", "address_set_access"),
    *("address_unmap", "physical_release", "host_register", "copy_async"),
)


def make(mode: SleepMode, tag: str, keeps: bool, value: int) -> cumem.Buffer:
    """Make a buffer under a tag, full of a value."""
    with mode.region(tag, enable_cpu_backup=keeps):
        return cumem.full(SIZE, value, "u1", "device")


def holds(buffer: cumem.Buffer, value: int) -> bool:
    return bool((values.get(buffer) == value).all())


def sleeping(mode: SleepMode) -> dict[str, bool]:
    return {tag: region.is_asleep for (tag, _, _), region in mode._all()}


@pytest.fixture
def mode(emulated) -> SleepMode:
    return SleepMode()


# -- the calls of torch_memory_saver -----------------------------------------------------


def test_pause_and_resume_take_regions_by_their_tags(mode) -> None:
    weights = make(mode, "weights", True, 7)
    cache = make(mode, "kv_cache", False, 8)
    addresses = weights.ptr, cache.ptr
    mode.pause("kv_cache")
    assert sleeping(mode) == {"weights": False, "kv_cache": True}
    mode.pause("weights")
    assert cumem.stats()["device"].reserved_nbytes == 0
    mode.resume("weights")
    assert sleeping(mode) == {"weights": False, "kv_cache": True}
    assert holds(weights, 7)
    mode.resume("kv_cache")
    assert (weights.ptr, cache.ptr) == addresses
    cache.fill(9)
    assert holds(cache, 9)


def test_pause_of_all_keeps_only_what_has_a_backup(mode) -> None:
    kept = make(mode, "default", True, 7)
    dropped = make(mode, "default", False, 8)
    mode.pause()
    assert cumem.stats()["pinned"].live_nbytes < 2 * SIZE
    for buffer in (kept, dropped):
        with pytest.raises(RuntimeError, match="'default', which is asleep"):
            buffer.fill(0)
    mode.resume()
    assert holds(kept, 7)
    dropped.fill(1)


def test_memory_of_a_tag_is_in_one_region(mode) -> None:
    with mode.region("weights") as first:
        pass
    with mode.region("weights") as again, mode.region("weights", True) as kept:
        inner = cumem.empty_device(SIZE)
    assert again is first
    assert kept is not first
    assert kept.pool.stats().live_count == 1
    assert (first.tag, kept.tag) == ("weights", "weights")
    del inner
    cumem.sleep("weights")  # cumem.sleep() finds both regions
    assert first.is_asleep
    assert kept.is_asleep


def test_tags_without_memory_are_passed_over(mode) -> None:
    """SGLang pauses the tag of its graphs even if no graph was captured under it."""
    weights = make(mode, "weights", True, 7)
    mode.pause("cuda_graph")
    mode.resume("cuda_graph")
    mode.wake_up(["cuda_graph"])
    mode.discard("cuda_graph")
    assert holds(weights, 7)
    assert mode.enabled


@pytest.mark.parametrize("name", engines._ELSEWHERE)
def test_what_only_torch_memory_saver_has_is_told(mode, name) -> None:
    assert not hasattr(mode, name)
    with pytest.raises(AttributeError, match=f"{name}.*; use "):
        getattr(mode, name)
    with pytest.raises(AttributeError, match=f"{name}.*; use "):
        setattr(mode, name, 1)
    with pytest.raises(AttributeError, match="no 'sleeep'"):
        mode.sleeep()


def test_region_that_sleeps_takes_no_memory(mode) -> None:
    make(mode, "weights", True, 7)
    mode.pause("weights")
    with mode.region("weights", True), pytest.raises(RuntimeError, match="asleep"):
        cumem.empty_device(SIZE)
    mode.resume()


def test_region_serves_pytorch_where_there_is_a_gpu(mode, monkeypatch) -> None:
    inside: list[cumem.Region] = []

    @contextlib.contextmanager
    def using(region: cumem.Region) -> Iterator[None]:
        inside.append(region)
        yield
        inside.remove(region)

    monkeypatch.setattr(engines, "using", using)
    with mode.region("weights"):
        assert inside == []
    monkeypatch.setattr(engines, "backend", lambda: "cuda")
    with mode.region("weights") as region:
        assert inside == [region]
    with mode.use_memory_pool("weights") as kept:
        assert inside == [kept]
    assert inside == []


# -- the calls of vLLM's allocator -------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"level": 1}, {"weights"}),
        ({"level": 2}, set()),
        ({"offload_tags": ("weights", "kv_cache")}, {"weights", "kv_cache"}),
        ({"offload_tags": "kv_cache"}, {"kv_cache"}),
        ({"offload_tags": ()}, set()),
        ({}, set()),
    ],
)
def test_sleep_keeps_the_contents_of_its_tags(mode, how, kept) -> None:
    made = {}
    for value, tag in enumerate(("weights", "kv_cache"), 7):
        with mode.use_memory_pool(tag):
            made[tag] = cumem.full(SIZE, value, "u1", "device")
    pinned = cumem.stats()["pinned"].live_nbytes
    mode.sleep(**how)
    assert sleeping(mode) == {"weights": True, "kv_cache": True}
    held = cumem.stats()["pinned"].live_nbytes - pinned
    assert held // SIZE == len(kept)
    mode.wake_up()
    for value, tag in enumerate(("weights", "kv_cache"), 7):
        if tag in kept:
            assert holds(made[tag], value)
        made[tag].fill(1)


def test_sleep_without_tags_keeps_the_default_tag(mode) -> None:
    with mode.use_memory_pool():
        buffer = cumem.full(SIZE, 7, "u1", "device")
    mode.sleep()
    mode.wake_up()
    assert holds(buffer, 7)


def test_tags_wake_one_after_the_other(mode) -> None:
    """An engine fills new weights before it takes memory for its cache again."""
    weights = make(mode, "weights", True, 7)
    cache = make(mode, "kv_cache", False, 8)
    mode.sleep(level=2)
    mode.wake_up(tags=["weights"])
    assert sleeping(mode) == {"weights": False, "kv_cache": True}
    weights.fill(9)
    mode.wake_up(tags=["kv_cache"])
    cache.fill(0)
    assert holds(weights, 9)


def test_discard_gives_contents_up_and_leaves_others_awake(mode) -> None:
    weights = make(mode, "weights", True, 7)
    make(mode, "kv_cache", True, 8)
    mode.discard(("kv_cache",))
    assert sleeping(mode) == {"weights": False, "kv_cache": True}
    assert cumem.stats()["pinned"].live_nbytes == 0
    mode.pause("weights")
    mode.discard("weights")  # it leaves saved contents alone
    mode.wake_up()
    assert holds(weights, 7)


def test_usage_counts_what_is_allocated_asleep_or_awake(mode) -> None:
    assert mode.get_current_usage() == 0
    weights = make(mode, "weights", True, 7)
    cache = make(mode, "kv_cache", False, 8)
    used = mode.get_current_usage()
    assert used >= 2 * SIZE
    mode.sleep(level=1)
    assert mode.get_current_usage() == used
    mode.wake_up()
    del weights, cache
    assert mode.get_current_usage() == 0


# -- failures ----------------------------------------------------------------------------


def test_sleep_that_fails_wakes_what_it_put_to_sleep(mode) -> None:
    """The regions with contents come first, so nothing is lost if one of them fails."""
    cache = make(mode, "kv_cache", False, 8)
    weights = make(mode, "weights", True, 7)
    more = make(mode, "more", True, 9)
    made = cumem.stats()["pinned"].reserved_nbytes
    room = cumem.limit("pinned", made + SIZE + SIZE // 2)
    with room, pytest.raises(cumem.OutOfMemoryError):
        mode.pause()
    assert set(sleeping(mode).values()) == {False}
    assert [holds(*each) for each in ((cache, 8), (weights, 7), (more, 9))] == [
        True
    ] * 3
    mode.pause()
    mode.resume()
    assert holds(weights, 7)
    assert holds(more, 9)


def test_wake_that_fails_can_be_tried_again(mode) -> None:
    weights = make(mode, "weights", True, 7)
    mode.sleep(level=1)
    with cumem.limit("device", MIB), pytest.raises(cumem.OutOfMemoryError):
        mode.wake_up()
    mode.wake_up()
    assert holds(weights, 7)


@pytest.mark.hooks
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_calls_of_the_driver_may_fail(mode, op, nth) -> None:
    """Whatever fails, the memory wakes with the contents that are kept."""
    weights = make(mode, "weights", True, 7)
    more = make(mode, "more", True, 9)
    cache = make(mode, "kv_cache", False, 8)
    testing.plan_fault(op, nth)
    with contextlib.suppress(cumem.CudaError, cumem.OutOfMemoryError):
        mode.sleep(("weights", "more"))
        mode.wake_up()
    assert testing.last_injected_fault() == op
    testing.plan_fault(None, 0)
    mode.wake_up()
    assert holds(weights, 7)
    assert holds(more, 9)
    cache.fill(1)


# -- arguments, devices and the end --------------------------------------------------------


def test_wrong_arguments_are_refused(mode) -> None:
    with pytest.raises(TypeError, match="tag must be a str"), mode.region(3):
        pass
    with pytest.raises(TypeError, match="enable_cpu_backup"), mode.region("a", "no"):
        pass
    for call in (mode.pause, mode.wake_up, mode.discard, mode.sleep):
        with pytest.raises(TypeError, match="must be a str"):
            call(3)
        with pytest.raises(TypeError, match="must be a str"):
            call([3])
    with pytest.raises(TypeError, match="not both"):
        mode.sleep("weights", level=1)
    with pytest.raises(ValueError, match="level must be 1 or 2, not 3"):
        mode.sleep(level=3)
    with pytest.raises(ValueError, match="host"), SleepMode(host="x").region():  # type: ignore[arg-type]
        pass


def test_each_device_has_regions_of_its_own(emulated) -> None:
    mode = SleepMode(host="release")
    with mode.region("a") as first:
        pass
    with cumem.Device(1), mode.region("a") as second:
        buffer = cumem.empty_device(SIZE)
    assert (first.device.index, second.device.index) == (0, 1)
    assert buffer.device == cumem.Device(1)
    assert second.host == "release"


def test_tag_has_a_fresh_region_after_shutdown(mode) -> None:
    make(mode, "weights", True, 7)
    cumem.shutdown()
    assert mode.get_current_usage() == 0
    mode.pause()
    buffer = make(mode, "weights", True, 8)
    mode.pause()
    mode.resume()
    assert holds(buffer, 8)


# -- with PyTorch on a GPU -----------------------------------------------------------------


@pytest.fixture
def gpu(cuda) -> Iterator[Any]:
    """Provide PyTorch on a GPU, and afterwards free the memory of cumem's that PyTorch
    caches.
    """
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA, or there is no GPU")
    yield torch
    from cumem.integrations import torch as integration

    torch.cuda.synchronize()
    integration.empty_cache()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_calls_of_sglang_free_the_gpu_and_keep_the_weights(gpu) -> None:
    mode = SleepMode()
    with mode.region(tag="weights", enable_cpu_backup=True):
        model = gpu.nn.Linear(2048, 2048, device="cuda")
    with mode.region(tag="kv_cache", enable_cpu_backup=False):
        cache = gpu.zeros(64 * MIB, dtype=gpu.uint8, device="cuda")
    x = gpu.ones(16, 2048, device="cuda")
    before = model(x).clone()
    addresses = model.weight.data_ptr(), cache.data_ptr()
    gpu.cuda.synchronize()
    free = cumem.memory_info().free
    for _ in range(3):
        for tag in ("kv_cache", "weights", "cuda_graph"):
            mode.pause(tag=tag)
        assert cumem.memory_info().free >= free + 64 * MIB
        for tag in ("weights", "kv_cache", "cuda_graph"):
            mode.resume(tag=tag)
        cache.zero_()
        assert gpu.equal(model(x), before)
        assert (model.weight.data_ptr(), cache.data_ptr()) == addresses


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [False, True])
def test_graphs_of_sglang_sleep_and_replay_the_same(gpu, shares) -> None:
    mode = SleepMode()
    with mode.region(tag="weights", enable_cpu_backup=True):
        x = gpu.ones(4 * MIB, device="cuda")
    handle = gpu.cuda.graph_pool_handle() if shares else None
    graphs = [gpu.cuda.CUDAGraph() for _ in range(2)]
    made = []
    for factor, graph in enumerate(graphs, 2):
        with mode.cuda_graph(graph, pool=handle, tag="cuda_graph"):
            made.append((x * factor).sqrt() + 1)
    gpu.cuda.synchronize()
    free = cumem.memory_info().free
    for value in (1, 2, 3):
        x.fill_(value)
        mode.pause()
        assert cumem.memory_info().free >= free + 48 * MIB
        mode.resume()
        for factor, (graph, found) in enumerate(zip(graphs, made, strict=True), 2):
            graph.replay()
            assert gpu.equal(found, (x * factor).sqrt() + 1)
    del graphs, graph, made, found


@pytest.mark.gpu
def test_calls_of_vllms_worker_free_the_gpu_and_keep_the_weights(gpu) -> None:
    mode = SleepMode()
    assert mode.get_current_usage() == 0
    with mode.use_memory_pool(tag="weights"):
        model = gpu.nn.Linear(2048, 2048, device="cuda")
        model.register_buffer("scale", gpu.full((1,), 3.0, device="cuda"))
    with mode.use_memory_pool(tag="kv_cache"):
        cache = gpu.zeros(64 * MIB, dtype=gpu.uint8, device="cuda")
    kept = model.weight.detach().cpu()
    gpu.cuda.synchronize()
    mode.sleep(offload_tags=("weights",))  # level 1
    mode.wake_up(None)
    cache.zero_()
    assert gpu.equal(model.weight.detach().cpu(), kept)
    saved = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    mode.sleep(offload_tags=())  # level 2
    mode.wake_up(["weights"])
    for name, buffer in model.named_buffers():
        buffer.data.copy_(saved[name].data)
    model.weight.data.copy_(kept)  # the engine loads weights again
    mode.wake_up(["kv_cache"])
    cache.zero_()
    assert gpu.equal(model.weight.detach().cpu(), kept)
    assert model.get_buffer("scale").item() == 3.0
