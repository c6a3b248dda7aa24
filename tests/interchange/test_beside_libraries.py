# SPDX-License-Identifier: Apache-2.0
"""Memory of PyTorch and CuPy at work beside cumem is counted, bounded or left alone.

Each test is about a fault that once raised no error, and that showed only beside a library
which keeps the GPU busy, captures a graph, or moves the memory of its own tensors.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cumem

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def busy(cuda) -> Iterator[Callable[[], None]]:
    """Yield a function that gives the GPU more work in PyTorch's default stream."""
    side = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()

    def work() -> None:
        for _ in range(8):
            torch.mm(side, side)

    work()
    yield work
    torch.cuda.synchronize()


def held(kind: str) -> int:
    return cumem.stats()[kind].reserved_nbytes


# -- exported page-locked memory beside a busy GPU -----------------------------------------


def numpy_and_back() -> None:
    cumem.empty_pinned((800, 800), "f4").numpy()[0, 0] = 1


def to_a_tensor() -> None:
    torch.from_numpy(cumem.empty_pinned((800, 800), "f4").numpy()).zero_()


def by_dlpack() -> None:
    torch.from_dlpack(cumem.empty_pinned((800, 800), "f4")).zero_()


def uploaded() -> None:
    array = cumem.empty_pinned((800, 800), "f4").numpy()
    torch.from_numpy(array).to("cuda", non_blocking=True)


def viewed() -> None:
    memoryview(cumem.empty_pinned((800, 800), "f4")).release()


def collated() -> None:
    cumem.PinnedCollate()([np.ones((400, 800), "f4")] * 2)


@pytest.mark.parametrize(
    "use", [numpy_and_back, to_a_tensor, by_dlpack, uploaded, viewed, collated]
)
def test_dropped_exports_are_bounded_while_the_gpu_works(busy, use) -> None:
    for i in range(1500):
        use()
        if i % 100 == 0:
            busy()
    # At most 256 MiB may wait for the GPU, and one growth may come on top.
    assert held("pinned") <= 2 * 256 * MIB


@pytest.mark.parametrize("ask", [str, np.array, pickle.dumps])
def test_what_never_left_is_used_again_while_the_gpu_works(busy, ask) -> None:
    for _ in range(300):
        ask(cumem.empty_pinned((800, 800), "f4")[:1])
    assert held("pinned") <= 64 * MIB


# -- what is page-locked in place ----------------------------------------------------------


def test_registered_tensor_counts_and_is_limited(cuda) -> None:
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    before = held("pinned")
    with cumem.register(tensor):
        assert held("pinned") - before >= 64 * MIB
        assert tensor.is_pinned()
        limit = cumem.limit("pinned", held("pinned") + MIB)
        with limit, pytest.raises(cumem.OutOfMemoryError):
            cumem.register(torch.ones(2 * MIB, dtype=torch.uint8))
    assert held("pinned") == before


def test_memory_of_a_tensor_that_moves_on_is_what_was_registered(cuda) -> None:
    tensor = torch.full((1 << 20,), 1.0)
    with cumem.register(tensor) as locked:
        tensor.data = torch.zeros(4)
        others = [torch.full((1 << 20,), 7.0) for _ in range(20)]
        torch.cuda.synchronize()
        up = cumem.array(locked, device=0)
        assert float(torch.as_tensor(up, device="cuda").sum()) == 1 << 20
    del others


def test_background_copy_of_a_tensor_that_moves_on_has_its_bytes(busy) -> None:
    stream = cumem.Stream.from_external(torch.cuda.current_stream())
    tensor = torch.full((1 << 20,), 1.0)
    target = cumem.empty_pinned(1 << 20, "f4")
    job = cumem.copy_async(target, tensor, after=stream)
    tensor.data = torch.zeros(4)
    others = [torch.full((1 << 20,), 7.0) for _ in range(20)]
    job.wait()
    assert (target.numpy() == 1).all()
    del others


# -- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "pinned", "managed"])
def test_limit_holds_for_what_was_cached(cuda, kind) -> None:
    del (first := [cumem.empty(600 * MIB, "u1", kind)])[:]
    del first
    with cumem.limit(kind, "256MiB"):
        with pytest.raises(cumem.OutOfMemoryError):
            cumem.empty(600 * MIB, "u1", kind)
        cumem.empty(200 * MIB, "u1", kind)


def test_limit_holds_for_cupys_memory_from_our_pool(cuda) -> None:
    cupy = pytest.importorskip("cupy")
    from cumem.integrations import cupy as integration

    with integration.using():
        cupy.empty(600 * MIB, "u1")
        refused = (cumem.OutOfMemoryError, cupy.cuda.memory.OutOfMemoryError)
        with cumem.limit("device", "256MiB"), pytest.raises(refused):
            cupy.empty(600 * MIB, "u1")


# -- chunks --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_chunks_given_to_torch_hold_what_is_documented(cuda, depth) -> None:
    data = np.ones((MIB, 256), "f4")
    pool = cumem.default_pool("device")
    cumem.trim()
    total = 0.0
    for _, chunk in cumem.chunks(data, "64 MiB", depth=depth):
        total += float(torch.from_dlpack(chunk).sum())
    assert total == data.size
    assert pool.stats().peak_reserved_nbytes <= (depth + 2) * 64 * MIB


def test_chunks_given_to_torch_fit_a_limit(busy) -> None:
    data = np.ones((MIB // 2, 256), "f4")
    cumem.trim()
    sums = []
    with cumem.limit("device", "256 MiB"):
        for _, chunk in cumem.chunks(data, "64 MiB"):
            sums.append(torch.from_dlpack(chunk).sum())
            busy()
    assert float(sum(sums)) == data.size


# -- captures ------------------------------------------------------------------------------


def test_want_of_pinned_memory_leaves_torchs_capture_whole(cuda) -> None:
    cumem.empty_pinned(MIB).numpy()  # This memory was exported, and is freed at once.
    work = torch.ones(1024, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work += 1
        with cumem.limit("pinned", "64MiB"), pytest.raises(cumem.OutOfMemoryError):
            cumem.empty_pinned(100 * MIB, "u1")
        work += 1
    graph.replay()
    torch.cuda.synchronize()
    assert (work == 3).all()


def test_want_of_pinned_memory_leaves_our_streams_capture_whole(cuda) -> None:
    cumem.empty_pinned(MIB).numpy()
    stream = cumem.Stream()
    theirs = torch.cuda.ExternalStream(stream.handle)
    work = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=theirs), stream:
        work += 1
        with cumem.limit("pinned", "64MiB"), pytest.raises(cumem.OutOfMemoryError):
            cumem.empty_pinned(100 * MIB, "u1")
        work += 1
    graph.replay()
    torch.cuda.synchronize()
    assert (work == 3).all()


# -- the current device --------------------------------------------------------------------


@pytest.fixture
def second(cuda) -> Iterator[None]:
    """Skip the test without a second GPU, and restore PyTorch's current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    before = torch.cuda.current_device()
    yield
    torch.cuda.set_device(before)


def test_prefetch_goes_where_torch_is(second) -> None:
    torch.cuda.set_device(1)
    torch.ones(1, device="cuda")
    loader = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4)
    assert [batch.device.index for batch in cumem.prefetch(loader)] == [1, 1]


# -- forks ---------------------------------------------------------------------------------

#: This program forks, and its child process must end without an exception.
FORKED = """
import os, sys
import numpy as np
import cumem
{before}
pid = os.fork()
if pid == 0:
    try:
        {child}
        os._exit(0)
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def forked(before: str, child: str) -> None:
    """Run a program that runs `before`, forks, and runs `child` in the forked process."""
    program = FORKED.format(
        before=before, child=textwrap.indent(child, " " * 8).strip()
    )
    path = os.pathsep.join(p for p in sys.path if p)
    done: Any = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "CUMEM_BACKEND": "cuda"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "ask",
    [
        *("cumem.is_available()", "cumem.backend()", "cumem.device_count()"),
        *("cumem.set_limit('pinned', '1GiB')", "cumem.memory_info('host')"),
        *("cumem.asbuffer(np.ones(3))", "cumem.Pool('pinned')", "cumem.stats()"),
    ],
)
def test_child_of_a_fork_after_a_question_uses_the_gpu(ask) -> None:
    forked(ask, "assert cumem.zeros(4, 'f4', 'device').to_numpy().sum() == 0")


def test_child_of_a_fork_after_use_works_on_the_host() -> None:
    forked(
        "b = cumem.full(1 << 20, 3, 'f4', 'pinned'); cumem.zeros(4)",
        "assert (b.numpy() == 3).all()\n"
        "copy = np.empty(1 << 20, 'f4')\n"
        "cumem.copy(copy, b)\n"
        "assert (copy == 3).all()\n"
        "import pickle\n"
        "assert (np.asarray(pickle.loads(pickle.dumps(b))) == 3).all()",
    )


def test_nothing_is_left(cuda) -> None:
    gc.collect()
    assert cumem.stats()["device"].live_nbytes == 0
