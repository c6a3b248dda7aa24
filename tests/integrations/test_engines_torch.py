# SPDX-License-Identifier: Apache-2.0
"""The calls of inference engines on PyTorch's tensors, with a stand-in for PyTorch.

test_engines.py tests the calls on buffers, and with PyTorch itself on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import torch_stand_in, values
from support.torch_stand_in import StandIn, Tensor, ask

import cumem
from cumem.integrations import engines
from cumem.integrations.engines import SleepMode

SIZE = 3 << 20


@pytest.fixture
def torch(emulated, monkeypatch) -> Iterator[StandIn]:
    """Provide a stand-in, which a SleepMode serves as it serves PyTorch on a GPU."""
    monkeypatch.setattr(engines, "backend", lambda: "cuda")
    with torch_stand_in.opened(monkeypatch) as found:
        yield found


def fill(tensor: Tensor, value: int) -> Tensor:
    tensor.buffer().fill(value)
    return tensor


def holds(tensor: Tensor, value: int) -> bool:
    return bool((values.get(tensor.buffer()) == value).all())


def test_calls_of_sglang_reach_tensors(torch) -> None:
    """SGLang pauses the cache first and wakes it last, and names a tag without memory."""
    mode = SleepMode()
    with mode.region(tag="weights", enable_cpu_backup=True):
        weights = [fill(ask(torch, SIZE), number) for number in range(3)]
    with mode.region(tag="kv_cache", enable_cpu_backup=False):
        cache = fill(ask(torch, SIZE), 9)
    assert torch.empty(SIZE) is None  # outside, PyTorch takes memory of its own
    for _ in range(2):
        for tag in ("kv_cache", "weights", "cuda_graph"):
            mode.pause(tag=tag)
        assert cumem.stats()["device"].reserved_nbytes == 0
        for tag in ("weights", "kv_cache", "cuda_graph"):
            mode.resume(tag=tag)
        assert all(holds(tensor, number) for number, tensor in enumerate(weights))
        fill(cache, 9)
    for tensor in (*weights, cache):
        tensor.end()


def capture(mode: SleepMode, torch: StandIn, **options: object) -> tuple[Any, Tensor]:
    graph = torch.CUDAGraph()
    with mode.cuda_graph(graph, tag="cuda_graph", **options):  # type: ignore[arg-type]
        made = ask(torch, SIZE)
    return graph, made


def test_graph_takes_its_memory_from_a_region(torch) -> None:
    mode = SleepMode()
    made = [
        capture(mode, torch, stream="side", capture_error_mode="relaxed"),
        capture(mode, torch, pool=(1, 5)),
        capture(mode, torch, pool=(1, 5)),
        capture(mode, torch, pool=(1, 5), enable_cpu_backup=True),
    ]
    assert torch.graphs[:2] == [("side", "relaxed"), (None, "global")]
    made.append(capture(mode, torch, pool=made[0][0].pool()))
    ids = [graph.pool() for graph, _ in made]
    assert (ids[0], ids[1]) == (ids[4], ids[2])  # these share their memory
    assert len(set(ids)) == 3
    for value, (_, tensor) in enumerate(made):
        fill(tensor, value)
    mode.pause("cuda_graph")
    assert cumem.stats()["device"].reserved_nbytes == 0
    mode.resume("cuda_graph")
    assert holds(made[3][1], 3)
    for _, tensor in made:
        assert holds(fill(tensor, 5), 5)
        tensor.end()


def test_region_stays_awake_while_a_graph_is_captured(torch) -> None:
    mode = SleepMode()
    with mode.cuda_graph(torch.CUDAGraph(), tag="cuda_graph") as region:
        with pytest.raises(BufferError, match="'cuda_graph' cannot go to sleep"):
            region.sleep()
        ask(torch, SIZE).end()
    region.sleep()
    with (
        pytest.raises(RuntimeError, match="asleep"),
        mode.cuda_graph(torch.CUDAGraph(), tag="cuda_graph"),
    ):
        pass
    region.wake()


def test_disabled_block_takes_memory_that_stays_awake(torch) -> None:
    mode = SleepMode()
    with mode.region("weights", enable_cpu_backup=True) as region:
        weights = fill(ask(torch, SIZE), 7)
        with mode.disable():
            awake = fill(ask(torch, SIZE), 8)
            buffer = cumem.full(1000, 9, "u1", "device")
    mode.pause()
    assert region.is_asleep
    assert holds(awake, 8)
    assert (values.get(buffer) == 9).all()
    mode.resume()
    assert holds(weights, 7)
    weights.end()
    awake.end()


def test_calls_of_vllms_worker_reach_tensors(torch) -> None:
    mode = SleepMode()
    assert mode.get_current_usage() == 0
    with mode.use_memory_pool(tag="weights"):
        weights = fill(ask(torch, SIZE), 7)
    with mode.use_memory_pool(tag="kv_cache"):
        cache = fill(ask(torch, SIZE), 8)
    assert mode.get_current_usage() >= 2 * SIZE
    mode.sleep(offload_tags=("weights",))  # level 1
    mode.wake_up(["weights"])
    assert holds(weights, 7)
    mode.wake_up(["kv_cache"])
    fill(cache, 8)
    mode.sleep(offload_tags=())  # level 2
    mode.wake_up(None)
    assert holds(fill(weights, 5), 5)
    weights.end()
    cache.end()


def test_tag_in_use_does_not_sleep_and_sleeping_tag_is_not_used(torch) -> None:
    mode = SleepMode()
    with mode.use_memory_pool("kv_cache"):
        cache = fill(ask(torch, SIZE), 8)
    with mode.use_memory_pool("weights"):
        weights = fill(ask(torch, SIZE), 7)
        with pytest.raises(BufferError, match="'weights' cannot go to sleep"):
            mode.sleep(level=1)
    assert holds(cache, 8)  # contents are given up only after all others are safe
    mode.sleep(level=1)
    with pytest.raises(RuntimeError, match="asleep"), mode.use_memory_pool("weights"):
        pass
    mode.wake_up()
    assert holds(weights, 7)
    weights.end()
    cache.end()
