# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors in regions that sleep and wake, on a GPU.

test_torch_regions.py tests the same with a stand-in for PyTorch, and tests what is refused.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

import cumem
from cumem.integrations import torch as integration

torch = pytest.importorskip("torch")

#: This must be set before cuBLAS starts, which then adds up in the same order each
#: time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MIB = 1 << 20
ROUNDS = 5

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(cuda) -> Iterator[Any]:
    """Make cuBLAS's workspaces outside of any region, and check that nothing is left."""
    if not hasattr(torch._C, "_cuda_customAllocator") or not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA, or there is no GPU")
    warm_up()
    yield torch
    integration.disable()
    gc.collect()
    torch.cuda.synchronize()
    integration.empty_cache()
    torch.cuda.empty_cache()
    for pool in cumem.stats().pools:
        if pool.kind == "device":
            assert pool.live_count == 0


def warm_up() -> None:
    """Do what docs/sleep.md says: run a layer forwards and backwards."""
    layer = torch.nn.Linear(64, 64).cuda()
    layer(torch.ones(64, 64, device="cuda")).sum().backward()


def nap(*regions: cumem.Region) -> None:
    """Put the regions to sleep, let others have the memory, and wake them."""
    for region in regions:
        region.sleep()
        assert region.pool.stats().reserved_nbytes == 0
    scratch = torch.full((64 * MIB,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del scratch
    torch.cuda.empty_cache()
    for region in regions:
        region.wake()


def is_in(region: cumem.Region, tensor: Any) -> bool:
    at = tensor.data_ptr()
    return any(
        block.address <= at < block.address + block.nbytes
        for segment in region.pool.snapshot().segments
        for block in segment.blocks
        if block.state == "live"
    )


def test_tensors_wake_with_the_same_bytes_at_the_same_addresses(gpu) -> None:
    region = cumem.Region("weights")
    torch.manual_seed(1)
    with integration.using(region):
        made = [torch.randn(n, device="cuda") for n in (1, 1000, 3 * MIB, 20 * MIB)]
    wanted = [tensor.cpu() for tensor in made]
    addresses = [tensor.data_ptr() for tensor in made]
    assert all(is_in(region, tensor) for tensor in made)
    for _ in range(ROUNDS):
        nap(region)
        assert [tensor.data_ptr() for tensor in made] == addresses
        assert all(map(torch.equal, (tensor.cpu() for tensor in made), wanted))


def test_two_regions_sleep_apart(gpu) -> None:
    weights, cache = cumem.Region("weights"), cumem.Region("cache", host="release")
    with integration.using(weights):
        w = torch.full((4 * MIB,), 3.0, device="cuda")
        with integration.using(cache):
            keys = torch.full((8 * MIB,), 5.0, device="cuda")
        again = torch.full((4 * MIB,), 7.0, device="cuda")
    assert is_in(weights, w)
    assert is_in(weights, again)
    assert is_in(cache, keys)
    cumem.sleep("cache")
    assert (w + again).sum().item() == 10.0 * 4 * MIB
    cumem.sleep("weights")
    cumem.wake("cache")
    assert keys.sum().item() == 5.0 * 8 * MIB
    cumem.wake("weights")
    assert (w + again).sum().item() == 10.0 * 4 * MIB


def test_memory_goes_to_others_and_pytorch_goes_on_counting(gpu) -> None:
    region = cumem.Region("weights", host="release")
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with integration.using(region):
        tensor = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    counted = torch.cuda.memory_allocated()
    region.sleep()
    assert torch.cuda.memory_allocated() == counted >= 256 * MIB
    assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB
    region.wake()
    assert tensor.sum().item() == 256 * MIB


def test_only_what_pytorch_uses_is_copied(gpu) -> None:
    region = cumem.Region("weights", host="release")
    with integration.using(region):
        made = [torch.full((n * 1000,), n, device="cuda") for n in range(1, 300)]
        made.append(torch.zeros(200 * MIB, dtype=torch.uint8, device="cuda"))
    del made[::2]
    del made[-1]
    live = sum(tensor.untyped_storage().nbytes() for tensor in made)
    before = cumem.stats()["pinned"].live_nbytes
    region.sleep()
    copied = cumem.stats()["pinned"].live_nbytes - before
    region.wake()
    assert live <= copied <= 1.02 * live
    assert all((tensor == tensor[0]).all().item() for tensor in made)
    assert [tensor[0].item() for tensor in made] == [*range(2, 300, 2)]


def test_module_that_is_built_inside_computes_the_same(gpu) -> None:
    region = cumem.Region("weights")
    torch.manual_seed(2)
    with integration.using(region):
        model = torch.nn.Sequential(
            torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)
        ).cuda()
    x = torch.randn(64, 512, device="cuda")
    wanted = model(x)
    for _ in range(ROUNDS):
        nap(region)
        assert torch.equal(model(x), wanted)


def test_tied_weights_stay_tied(gpu) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        embedding = torch.nn.Embedding(1000, 256, device="cuda")
        head = torch.nn.Linear(256, 1000, bias=False, device="cuda")
        head.weight = embedding.weight
    nap(region)
    assert head.weight is embedding.weight
    with torch.no_grad():
        embedding.weight.fill_(0.5)
    assert (head.weight == 0.5).all().item()
    assert head.weight.data_ptr() == embedding.weight.data_ptr()


def train(steps: int, region: cumem.Region | None) -> list[float]:
    """Train, with the optimizer's state in a region that sleeps between the steps."""
    torch.manual_seed(5)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 256, device="cuda")
        loss = (model(x) - x).square().mean()
        loss.backward()
        if region is None:
            optimizer.step()
        else:
            region.wake()
            with integration.using(region):
                optimizer.step()
            region.sleep()
        optimizer.zero_grad()
        losses.append(loss.item())
    if region is not None:
        region.wake()
        state = optimizer.state[layers[0].weight]["exp_avg"]
        assert is_in(region, state)
    return losses


def test_optimizer_that_sleeps_between_steps_trains_the_same(gpu) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert train(8, cumem.Region("optimizer")) == train(8, None)
    finally:
        torch.use_deterministic_algorithms(False)


def test_graph_of_kernels_copies_and_sets_replays_the_same(gpu) -> None:
    region = cumem.Region("weights")
    torch.manual_seed(3)
    with integration.using(region):
        source = torch.randn(2 * MIB, device="cuda")
        copied, zeroed = torch.empty_like(source), torch.empty_like(source)
        summed = torch.empty_like(source)

    def step() -> None:
        copied.copy_(source)  # a memcpy node
        zeroed.zero_()  # a memset node
        torch.add(copied, zeroed, alpha=2, out=summed)  # a kernel node
        summed.mul_(1.5)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    wanted = [each.cpu() for each in (source, copied, zeroed, summed)]
    for _ in range(ROUNDS):
        nap(region)
        for each in (copied, zeroed, summed):
            each.fill_(-1)
        graph.replay()
        found = [each.cpu() for each in (source, copied, zeroed, summed)]
        assert all(map(torch.equal, found, wanted))
    del graph


def test_graph_that_is_captured_into_the_region_replays_the_same(gpu) -> None:
    region = cumem.Region("weights")
    with integration.using(region) as pool:
        x = torch.ones(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y = (x * 3).sqrt() + 1  # temporaries are freed in the capture
    del pool
    assert is_in(region, y)
    for value in range(1, ROUNDS + 1):
        x.fill_(value)
        nap(region)
        graph.replay()
        assert torch.equal(y, (x * 3).sqrt() + 1)
    del graph, y


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_function_allocates_from_the_region(gpu) -> None:
    pytest.importorskip("triton")
    region = cumem.Region("weights")

    @torch.compile
    def work(x: Any) -> Any:
        return (x * 2 + 1).sin().exp()

    x = torch.linspace(0, 1, MIB, device="cuda")
    wanted = work(x)
    with integration.using(region):
        # Compiled code allocates with the GIL held, and these tests fail if our calls of
        # the driver are made with it held. So PyTorch gets its memory beforehand.
        torch.empty_like(x)
        found = work(x)
    assert is_in(region, found)
    for _ in range(ROUNDS):
        nap(region)
        assert torch.equal(found, wanted)
        assert torch.equal(work(x), wanted)


def test_work_on_a_recorded_stream_comes_before_sleep(gpu) -> None:
    region = cumem.Region("weights")
    stream = torch.cuda.Stream()
    with integration.using(region):
        kept = torch.zeros(16 * MIB, device="cuda")
        dropped = torch.ones(16 * MIB, device="cuda")
    for value in range(1, ROUNDS + 1):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(50):
                kept.add_(1)
        kept.record_stream(stream)
        region.sleep()
        region.wake()
        assert (kept == 50 * value).all().item()
    with torch.cuda.stream(stream):
        for _ in range(50):
            dropped.add_(1)
        total = dropped.sum()
    dropped.record_stream(stream)
    del dropped
    nap(region)
    torch.cuda.synchronize()
    assert total.item() == 51.0 * 16 * MIB


def test_caches_may_be_emptied_at_any_time(gpu) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        kept = torch.full((MIB,), 7.0, device="cuda")
        dropped = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        integration.empty_cache()
    region.sleep()
    del dropped
    torch.cuda.empty_cache()
    integration.empty_cache()
    assert region.pool.stats().live_nbytes < 64 * MIB
    region.wake()
    torch.cuda.empty_cache()
    integration.empty_cache()
    assert kept.sum().item() == 7.0 * MIB
    with integration.using(region):
        more = torch.full((MIB,), 8.0, device="cuda")
    nap(region)
    assert (kept + more).sum().item() == 15.0 * MIB


def test_products_work_while_a_region_sleeps(gpu) -> None:
    """The workspaces of cuBLAS and cuBLASLt are not in the region, though the first product
    in it needs one.
    """
    region = cumem.Region("weights")
    with integration.using(region):
        layer = torch.nn.Linear(512, 512).cuda().half()
        layer(torch.ones(64, 512, device="cuda").half())
        torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    other = torch.nn.Linear(512, 512).cuda().half()
    region.sleep()
    a = torch.ones(512, 512, device="cuda")
    assert (a @ a).sum().item() == 512.0**3
    other(a.half()).sum().item()
    region.wake()


def test_refusals(gpu) -> None:
    region = cumem.Region("weights")
    with (
        integration.using(region),
        pytest.raises(BufferError, match="cannot go to sleep"),
    ):
        region.sleep()
    region.sleep()
    with (
        pytest.raises(RuntimeError, match=r"call wake\(\)"),
        integration.using(region),
    ):
        pass
    region.wake()


def test_region_that_is_closed_keeps_tensors(gpu) -> None:
    region = cumem.Region("weights")
    with integration.using(region):
        tensor = torch.full((MIB,), 7.0, device="cuda")
    region.close()
    integration.empty_cache()
    assert tensor.sum().item() == 7.0 * MIB
