# SPDX-License-Identifier: Apache-2.0
"""PyTorch's device memory from cumem's pools, on a GPU and partly without one.

test_torch_allocator.py calls the functions behind it directly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cumem
from cumem.integrations import torch as integration

torch = pytest.importorskip("torch")

#: This must be set before cuBLAS starts, which then adds up in the same order each
#: time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent
MIB = 1 << 20
HAS_CUDA = hasattr(torch._C, "_cuda_customAllocator")

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="this machine has no C++ compiler",
)


# -- without a GPU ------------------------------------------------------------------------


@needs_compiler
def test_memory_of_graphs_is_theirs_until_they_end(tmp_path) -> None:
    """A C++ program calls the C++ part of the integration, and supplies the memory."""
    home = Path(torch.__file__).parent
    program = tmp_path / "graphs"
    source = Path(integration.__file__).with_name("torch_allocator.cpp")
    command = [
        next(filter(None, map(shutil.which, ("c++", "g++", "clang++")))),
        *("-std=c++20", "-g", "-Wall", "-Wextra", "-Werror"),
        *(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",),
        *("-isystem", str(home / "include")),
        f'-DSOURCE="{source}"',
        *("-o", str(program), str(HERE.parent / "isolated" / "torch_graphs.cpp")),
        *(f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}", "-lpthread"),
    ]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


@needs_compiler
def test_compiled_part_is_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = integration._build(torch)
    assert made.parent == tmp_path / "cumem"
    assert [*made.parent.iterdir()] == [made]
    before = made.stat().st_mtime_ns
    monkeypatch.setenv("PATH", "")
    # No compiler is needed for this.
    assert integration._build(torch) == made
    assert made.stat().st_mtime_ns == before


def test_missing_compiler_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"C\+\+ compiler.*enable\(\)"):
        integration._build(torch)
    assert [*tmp_path.rglob("*.so")] == []


def test_compiler_that_fails_is_quoted(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "bad"
    compiler.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=r"(?s)could not compile.*no such luck"):
        integration._build(torch)
    assert [*tmp_path.rglob("*.so")] == []


# -- with one: segments of PyTorch's own allocator ---------------------------------------


@pytest.fixture
def gpu(cuda) -> Iterator[Any]:
    """Provide PyTorch on a GPU, and check that it keeps no memory of cumem's
    afterwards.
    """
    if not HAS_CUDA or not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA, or there is no GPU")
    yield torch
    integration.disable()
    gc.collect()
    torch.cuda.synchronize()
    integration.empty_cache()
    torch.cuda.empty_cache()
    for pool in cumem.stats().pools:
        if pool.kind == "device":
            assert pool.live_count == 0


def is_ours(tensor: Any) -> bool:
    """Return whether the tensor's memory lies in a block that a cumem pool has lent."""
    at = tensor.data_ptr()
    pool = cumem.default_pool("device", tensor.device.index)
    return any(
        block.address <= at < block.address + block.nbytes
        for segment in pool.snapshot().segments
        for block in segment.blocks
        if block.state == "live"
    )


def train(steps: int = 4) -> list[float]:
    """Train a little, in the same way each time, and return the losses."""
    torch.use_deterministic_algorithms(True)
    try:
        return _train(steps)
    finally:
        torch.use_deterministic_algorithms(False)


def _train(steps: int) -> list[float]:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(32 + 16 * step, 256, device="cuda")
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
def test_block_serves_this_thread(gpu) -> None:
    elsewhere: list[Any] = []
    with integration.using() as pool:
        assert isinstance(pool, torch.cuda.MemPool)
        a = torch.full((3, 5 * MIB), 7, dtype=torch.uint8, device="cuda")
        thread = threading.Thread(
            target=lambda: elsewhere.append(torch.ones(MIB, device="cuda"))
        )
        thread.start()
        thread.join()
        with integration.using() as again:
            assert again is not pool
            b = torch.ones(100, device="cuda")
    c = torch.ones(100, device="cuda")
    with integration.using() as kept:
        assert kept is pool
    assert is_ours(a)
    assert is_ours(b)
    assert not is_ours(c)
    assert not is_ours(elsewhere[0])
    assert a.sum().item() == 7 * 15 * MIB
    assert cumem.default_pool("device").stats().live_nbytes >= a.nbytes


@pytest.mark.gpu
def test_blocks_of_several_threads_are_apart(gpu) -> None:
    meet = threading.Barrier(3)
    found: list[bool] = []

    def work(value: int) -> None:
        with integration.using():
            meet.wait()
            a = torch.full((MIB,), value, device="cuda")
            meet.wait()
            found.append(is_ours(a) and a.sum().item() == value * MIB)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3


@pytest.mark.gpu
def test_inner_pool_of_pytorch_is_the_one(gpu) -> None:
    inner = torch.cuda.MemPool()
    with integration.using():
        with torch.cuda.use_mem_pool(inner):
            a = torch.ones(MIB, device="cuda")
        b = torch.ones(MIB, device="cuda")
    assert not is_ours(a)
    assert is_ours(b)
    del a, inner


@pytest.mark.gpu
def test_pool_that_ends_gives_its_segments_back(gpu) -> None:
    pool = integration.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.ones(8 * MIB, device="cuda")
    held = cumem.default_pool("device").stats()
    assert held.live_count > 0
    del a, pool
    gc.collect()
    torch.cuda.synchronize()
    assert cumem.default_pool("device").stats().live_count == 0
    cumem.trim("device")
    assert cumem.default_pool("device").stats().reserved_nbytes == 0


@pytest.mark.gpu
def test_limit_is_pytorchs_own_error(gpu) -> None:
    with cumem.limit("device", "64MiB"), integration.using():
        with pytest.raises(
            torch.OutOfMemoryError, match="CUDA out of memory"
        ) as caught:
            torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        a = torch.ones(MIB, device="cuda")  # PyTorch goes on after the error.
        assert a.sum().item() == MIB
    assert caught.value is not None
    with (
        cumem.limit("device", "64MiB"),
        pytest.raises(torch.OutOfMemoryError) as noted,
        integration.using(),
    ):
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert any(f"limit is {64 * MIB}" in note for note in noted.value.__notes__)


@pytest.mark.gpu
def test_pool_of_its_own_may_serve_pytorch(gpu) -> None:
    own = cumem.Pool("device", limit="256MiB")
    with integration.using(pool=own):
        a = torch.ones(MIB, device="cuda")
    assert own.stats().live_nbytes >= a.nbytes
    del a
    integration.empty_cache()
    torch.cuda.synchronize()
    assert own.stats().live_count == 0


def closed_pool() -> cumem.Pool:
    pool = cumem.Pool("device")
    pool.close()
    return pool


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: cumem.Pool("pinned"), ValueError, "pinned"),
        (lambda: cumem.Pool("device", segments="malloc"), ValueError, "processes"),
        (lambda: 3, TypeError, "pool"),
        (lambda: closed_pool(), ValueError, "closed"),
    ],
)
def test_pool_that_cannot_serve_is_refused(gpu, make, error, text) -> None:
    pool = make()
    for call in (integration.mem_pool, integration.enable):
        with pytest.raises(error, match=text):
            call(pool=pool)
    with pytest.raises(error, match=text), integration.using(pool=pool):
        pass
    with pytest.raises(ValueError, match="cpu"):
        integration.mem_pool(device=torch.device("cpu"))


@pytest.mark.gpu
def test_enabled_serves_autograds_threads_too(gpu) -> None:
    before = torch.ones(MIB, device="cuda")
    expected = train()
    integration.enable()
    integration.enable()  # Enabling it again changes nothing.
    w = torch.ones(512, 512, device="cuda", requires_grad=True)
    (w @ w).sum().backward()
    assert is_ours(w)
    assert is_ours(w.grad)
    assert not is_ours(before)
    assert train() == expected
    integration.disable()
    after = torch.ones(MIB, device="cuda")
    assert not is_ours(after)
    # The gradient keeps its memory after disable().
    assert w.grad.sum().item() == 2 * 512**3
    integration.disable()


@pytest.mark.gpu
def test_two_threads_are_served(gpu) -> None:
    integration.enable()
    sums: list[float] = []

    def work(value: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                a = torch.full((MIB,), value, dtype=torch.float32, device="cuda")
                b = a * 2
                sums.append(b.sum().item() / value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [2 * MIB] * 150


@pytest.mark.gpu
def test_graph_captured_while_enabled_keeps_its_memory(gpu) -> None:
    integration.enable()
    x = torch.zeros(MIB, device="cuda")

    def step() -> Any:
        return ((x + 1) * 3 + (x * 2)).sqrt()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    assert not is_ours(y)
    for value in (1, 5, 9):
        noise = [torch.full((MIB,), -1.0, device="cuda") for _ in range(20)]
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, step())
        del noise
    with pytest.raises(RuntimeError, match="captured"), capturing():
        integration.disable()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Capture an allocation of PyTorch's while the block runs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(10, device="cuda")
        yield


@pytest.mark.gpu
def test_empty_cache_gives_back_what_streams_shared(gpu) -> None:
    integration.enable()
    stream = torch.cuda.Stream()
    a = torch.ones(32 * MIB, device="cuda")
    keep = torch.ones(MIB, device="cuda")
    with torch.cuda.stream(stream):
        total = a.sum()
    a.record_stream(stream)
    nbytes = a.nbytes
    del a
    before = cumem.default_pool("device").stats().live_nbytes
    integration.empty_cache()
    torch.cuda.synchronize()
    after = cumem.default_pool("device").stats().live_nbytes
    assert before - after >= nbytes
    assert total.item() == 32 * MIB
    assert keep.sum().item() == MIB
    # New tensors still come from the pool.
    assert is_ours(torch.ones(MIB, device="cuda"))


@pytest.mark.gpu
def test_cache_may_be_emptied_inside_a_block(gpu) -> None:
    with integration.using():
        a = torch.ones(MIB, device="cuda")
        integration.empty_cache()
        integration.enable()
        with integration.using():
            b = torch.ones(MIB, device="cuda")
        integration.empty_cache()
        integration.disable()
        c = torch.ones(MIB, device="cuda")
    assert is_ours(a)
    assert is_ours(b)
    assert is_ours(c)
    assert (a + b + c).sum().item() == 3 * MIB


@pytest.mark.gpu
def test_too_late_to_replace_the_allocator(gpu) -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match=r"begun.*enable\(\)"):
        integration.replace_allocator()


@pytest.mark.gpu
def test_shutdown_leaves_tensors_and_serves_anew(gpu) -> None:
    with integration.using():
        a = torch.full((MIB,), 3.0, device="cuda")
    cumem.shutdown()
    assert a.sum().item() == 3 * MIB
    with integration.using():
        b = torch.ones(MIB, device="cuda")
    assert is_ours(b)
    del a, b


@pytest.mark.gpu
def test_tensors_are_not_sent_to_other_processes(gpu) -> None:
    with integration.using():
        a = torch.ones(MIB, device="cuda")
    # cudaIpcGetMemHandle refuses this memory.
    with pytest.raises(RuntimeError):
        a.untyped_storage()._share_cuda_()
    assert a.sum().item() == MIB


@pytest.mark.gpu
def test_devices_reach_each_others_memory(gpu) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    integration.enable(device=0)
    one = torch.full((MIB,), 2.0, device="cuda:0")
    integration.enable(device="cuda:1")
    other = torch.full((MIB,), 3.0, device="cuda:1")
    later = torch.full((64 * MIB,), 5.0, device="cuda:0")
    assert is_ours(one)
    assert is_ours(other)
    assert one.to("cuda:1").sum().item() == 2 * MIB
    assert other.to("cuda:0").sum().item() == 3 * MIB
    assert later.to("cuda:1").sum().item() == 5 * 64 * MIB
    one.copy_(other)
    torch.cuda.synchronize()
    assert one.sum().item() == 3 * MIB
    integration.disable(0)
    assert not is_ours(torch.ones(1, device="cuda:0"))
    assert is_ours(torch.ones(1, device="cuda:1"))


# -- in the allocator's place -------------------------------------------------------------

#: This program replaces PyTorch's allocator, as is possible only before PyTorch uses
#: the GPU. Each function under `@check` becomes a test below.
REPLACED = """
import gc, json, random, threading, traceback
import torch
import cumem
from cumem.integrations import torch as integration
from test_torch_memory import MIB, is_ours, train

results = {}

def check(function):
    try:
        results[function.__name__] = function() or "good"
    except BaseException:
        results[function.__name__] = traceback.format_exc()
    gc.collect()
    torch.cuda.synchronize()

def device_stats():
    return cumem.default_pool("device").stats()

integration.replace_allocator()
integration.replace_allocator()

@check
def blocks_are_exact():
    before = device_stats().requested_nbytes
    a = torch.ones(1000003, dtype=torch.uint8, device="cuda")
    assert is_ours(a)
    assert device_stats().requested_nbytes - before == 1000003
    assert torch.empty(0, device="cuda").data_ptr() == 0
    assert a.sum().item() == 1000003

@check
def losses():
    return train()

@check
def record_stream():
    stream = torch.cuda.Stream()
    for nbytes in (MIB, 40 * MIB):
        a = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            total = a.sum()
        a.record_stream(stream)
        del a
        b = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        stream.synchronize()
        assert total.item() == nbytes
        del b

@check
def unrecorded_blocks_come_back_at_once():
    torch.cuda.empty_cache()
    a = torch.ones(5 * MIB, device="cuda")
    at = a.data_ptr()
    torch.cuda._sleep(50_000_000)
    del a
    assert torch.ones(5 * MIB, device="cuda").data_ptr() == at

@check
def graphs():
    x = torch.zeros(MIB, device="cuda")
    def step():
        return ((x + 1) * 3 + (x * 2)).sqrt()
    handle = torch.cuda.graph_pool_handle()
    live = device_stats().live_nbytes
    made = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            y = step()
        made.append((graph, y))
    held = device_stats().live_nbytes
    assert held - live >= 4 * MIB * 3
    # Memory that was freed inside a capture is used again there.
    assert held - live <= 4 * MIB * 10
    for value in (1, 5, 9):
        noise = [torch.full((MIB,), -1.0, device="cuda") for _ in range(20)]
        x.fill_(value)
        expected = step()
        for graph, y in made:
            graph.replay()
            assert torch.equal(y, expected)
        cumem.trim("device")
        del noise
    del y, graph
    made.clear()
    gc.collect()
    torch.cuda.synchronize()
    del expected
    assert device_stats().live_nbytes <= live + 4 * MIB, (live, device_stats().live_nbytes)

@check
def graph_with_a_forked_stream():
    x = torch.ones(MIB, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            b = (a + 1) * 2
        a.record_stream(side)
        del a
        c = x * 5
        torch.cuda.current_stream().wait_stream(side)
        y = b + c
    for value in (1, 2):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, (x * 2 + 1) * 2 + x * 5)

@check
def memory_that_is_short():
    try:
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "cumem" in str(error), str(error)
        assert "asked for" in str(error), str(error)
    else:
        raise AssertionError
    held = [torch.ones(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.empty_cache()
    calls = []
    def relieve(kind, device, nbytes):
        calls.append((kind, nbytes))
        held.clear()
    hook = cumem.on_out_of_memory(relieve)
    with cumem.limit("device", device_stats().reserved_nbytes + MIB):
        a = torch.ones(128 * MIB, dtype=torch.uint8, device="cuda")
        assert calls == [("device", 128 * MIB)]
        try:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "limit" in str(error)
        else:
            raise AssertionError
    hook.remove()
    assert a.sum().item() == 128 * MIB

@check
def cache_goes_back():
    a = torch.ones(64 * MIB, device="cuda")
    del a
    torch.cuda.synchronize()
    assert device_stats().cached_nbytes >= 256 * MIB
    torch.cuda.empty_cache()
    assert device_stats().cached_nbytes < 64 * MIB

@check
def memory_fraction_is_a_limit():
    torch.cuda.set_per_process_memory_fraction(0.25)
    total = torch.cuda.mem_get_info()[1]
    assert abs(cumem.get_limit("device") - total // 4) <= 1
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert cumem.get_limit("device") is None

@check
def threads():
    sums = []
    def work(value):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                a = torch.full((MIB,), float(value), device="cuda")
                sums.append((a * 2).sum().item() / value)
    running = [threading.Thread(target=work, args=(v,)) for v in (1, 2, 3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert sums == [2 * MIB] * 150

@check
def nothing_is_overwritten():
    choose = random.Random(1)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
    wrong = []
    for i in range(3000):
        own, other = choose.choice(streams), choose.choice(streams)
        with torch.cuda.stream(own):
            n = choose.choice((1000, 300_000, 3_000_000))
            a = torch.full((n,), i, dtype=torch.int32, device="cuda")
        other.wait_stream(own)
        with torch.cuda.stream(other):
            if choose.random() < 0.02:
                torch.cuda._sleep(2_000_000)
            wrong.append((a != i).sum())
        a.record_stream(other)
        del a
    torch.cuda.synchronize()
    assert sum(each.item() for each in wrong) == 0


@check
def what_pytorch_refuses():
    a = torch.ones(10, device="cuda")
    for call in (
        torch.cuda.memory_allocated,
        torch.cuda.memory_snapshot,
        a.untyped_storage()._share_cuda_,
        torch.cuda.MemPool,
    ):
        try:
            call()
        except RuntimeError as error:
            assert "does not yet support" in str(error), str(error)
        else:
            raise AssertionError(call)
    for call in (integration.mem_pool, integration.enable):
        try:
            call()
        except RuntimeError as error:
            assert "replaced" in str(error)
        else:
            raise AssertionError(call)

@check
def shutdown():
    a = torch.full((MIB,), 3.0, device="cuda")
    cumem.shutdown()
    b = torch.full((MIB,), 4.0, device="cuda")
    assert a.sum().item() == 3 * MIB
    assert is_ours(b)
    del a

print("RESULTS" + json.dumps(results))
"""

NAMES = [
    line.removeprefix("def ").partition("(")[0]
    for line, before in zip(
        REPLACED.splitlines()[1:], REPLACED.splitlines()[:-1], strict=True
    )
    if before == "@check"
]


def run_program(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program on the GPU, with the package and the helpers of these tests."""
    path = os.pathsep.join([str(HERE), *(p for p in sys.path if p)])
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "CUMEM_BACKEND": "cuda"},
    )


@functools.cache
def replaced() -> dict[str, Any]:
    """Run the program once, and return what each of its checks found."""
    done = run_program(REPLACED)
    assert "RESULTS" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("RESULTS")[2])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name != "losses"])
def test_replaced_allocator(gpu, name) -> None:
    assert replaced()[name] == "good", replaced()[name]


@pytest.mark.gpu
def test_replaced_allocator_trains_as_pytorchs_own(gpu) -> None:
    native = """
    import json
    from test_torch_memory import train
    print("RESULTS" + json.dumps(train()))
    """
    done = run_program(textwrap.dedent(native))
    assert done.returncode == 0, done.stderr
    assert replaced()["losses"] == json.loads(done.stdout.partition("RESULTS")[2])


@pytest.mark.gpu
def test_collectives_work_on_replaced_memory(gpu, tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    program = """
    import sys
    import torch
    from cumem.integrations import torch as integration
    from test_torch_memory import MIB, is_ours
    rank, place = int(sys.argv[1]), sys.argv[2]
    integration.replace_allocator()
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method="file://" + place, rank=rank, world_size=2)
    for nbytes in (1, MIB, 64 * MIB):
        a = torch.full((nbytes,), rank + 1.0, device="cuda")
        torch.distributed.all_reduce(a)
        assert is_ours(a) and a.sum().item() == 3.0 * nbytes
        parts = [torch.empty_like(a) for _ in range(2)]
        torch.distributed.all_gather(parts, a)
        assert all(torch.equal(part, a) for part in parts)
    torch.distributed.destroy_process_group()
    """
    found: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: found.append(
                run_program(textwrap.dedent(program), rank, str(tmp_path / "meet"))
            )
        )
        for rank in "01"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.returncode for done in found] == [0, 0], [d.stderr for d in found]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "begin",
    [
        "integration.enable()",
        "integration.replace_allocator()",
        "pool = integration.mem_pool()",
        "with integration.using(): c = torch.ones(9, device='cuda')",
        "with integration.using(): integration.enable()",
    ],
)
def test_process_ends_well_whatever_is_alive(gpu, begin) -> None:
    program = f"""
    import torch
    from cumem.integrations import torch as integration
    {begin}
    a = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b = a * 2
    graph.replay()
    print(b.sum().item())
    """
    done = run_program(textwrap.dedent(program))
    assert (done.returncode, done.stdout) == (0, f"{float(2 << 20)}\n"), done.stderr
    assert done.stderr == ""
