# SPDX-License-Identifier: Apache-2.0
"""What regions promise to servers and trainers, shown by small whole programs.

Each test here is a small form of something that people do: work on several streams while
a region goes to sleep, graphs that are replayed after waking, training whose optimizer
sleeps, two users of one GPU by turns, and a process that is killed while its region goes to
sleep. benchmarks/sleeping.py does some of them at full size.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20
#: The number of rounds of work that each of the first tests queues.
ROUNDS = 500


@pytest.fixture
def torch_on_gpu(cuda) -> Iterator[Any]:
    """Provide PyTorch on a GPU, and afterwards free the memory of cumem's that PyTorch
    caches.
    """
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA, or there is no GPU")
    yield torch
    from cumem.integrations.torch import empty_cache

    torch.cuda.synchronize()
    empty_cache()
    torch.cuda.empty_cache()


# -- work on three streams -----------------------------------------------------------------


class Exporter:
    """Memory as another library shows it, whose streams cumem does not know."""

    def __init__(self, buffer: cumem.DeviceBuffer) -> None:
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": buffer.dtype.str,
            "data": (buffer.ptr, False),
            "version": 3,
        }


def test_work_on_three_streams_at_the_moment_of_sleep_is_not_lost(runtime) -> None:
    """Fills, transfers and copies between buffers are queued, and then the region sleeps.

    The third stream works through an object of another library over one of the buffers. So
    cumem knows only that somebody may work there.
    """
    rng = np.random.default_rng(7)
    region = cumem.Region("work")
    size = 50_000
    buffers = [cumem.zeros(size, "u1", "device", pool=region.pool) for _ in range(4)]
    foreign = cumem.asbuffer(Exporter(buffers[2]))
    # The zeros must not come after the fills of `foreign`.
    cumem.Device(0).synchronize()
    streams = [cumem.Stream() for _ in range(3)]
    source = cumem.empty_pinned(size, "u1")
    out = cumem.empty_pinned(size, "u1")
    model = [np.zeros(size, "u1") for _ in buffers]
    for number in range(ROUNDS):
        value = number % 251
        source.to_numpy()[:] = rng.integers(0, 256, size, "u1")
        cumem.copy_async(buffers[0], source, stream=streams[0])
        model[0][:] = source.to_numpy()
        buffers[1][: size // 2].fill(value, stream=streams[1])
        model[1][: size // 2] = value
        cumem.copy_async(buffers[3], buffers[1], stream=streams[1])
        model[3][:] = model[1]
        foreign.fill(value + 1, stream=streams[2])
        model[2][:] = value + 1
        # This read was queued before the region sleeps, so it must see these bytes.
        cumem.copy_async(out, buffers[3], stream=streams[1])
        region.sleep()
        assert (out.to_numpy() == model[3]).all()
        region.wake()
        if number % 10 == 0 or number == ROUNDS - 1:
            for buffer, expected in zip(buffers, model, strict=True):
                assert (values.get(buffer) == expected).all(), number


@pytest.mark.gpu
def test_work_of_pytorch_on_three_streams_is_not_lost(torch_on_gpu) -> None:
    """The tensors are PyTorch's over buffers, and PyTorch's streams are unknown to us."""
    torch = torch_on_gpu
    region = cumem.Region("work")
    buffers = [cumem.zeros(MIB, "i8", "device", pool=region.pool) for _ in range(3)]
    tensors = [torch.from_dlpack(buffer) for buffer in buffers]
    streams = [torch.cuda.Stream() for _ in tensors]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for number, (tensor, stream) in enumerate(zip(tensors, streams, strict=True)):
            with torch.cuda.stream(stream):
                for _ in range(4):
                    tensor.add_(number + 1)
        region.sleep()
        region.wake()
    for number, tensor in enumerate(tensors):
        assert (tensor == 4 * ROUNDS * (number + 1)).all().item()


# -- captured graphs -----------------------------------------------------------------------


@pytest.mark.gpu
def test_graph_of_pytorchs_replays_the_same_bits_after_each_waking(
    torch_on_gpu,
) -> None:
    """The graph has kernels, a copy and a memset over memory of the region."""
    torch = torch_on_gpu
    region = cumem.Region("graph")
    with region:
        x, y, z, weights = (
            torch.from_dlpack(cumem.zeros((256, 256), "f4", "device")) for _ in range(4)
        )
    weights.copy_(torch.from_numpy(np.random.default_rng(1).random((256, 256), "f4")))
    x.copy_(torch.linspace(-1, 1, 256 * 256, device="cuda").reshape(256, 256))
    torch.matmul(x, weights)  # cuBLAS makes its workspace outside the region
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        z.zero_()  # a memset
        torch.matmul(x, weights, out=y)  # kernels
        z.copy_(y)  # a copy
        z.add_(x)
    graph.replay()
    expected = z.cpu()
    assert expected.abs().sum() > 0
    for _ in range(5):
        region.sleep()
        region.wake()
        y.fill_(5)
        z.fill_(6)
        graph.replay()
        assert torch.equal(z.cpu(), expected)
    del graph


@pytest.mark.gpu
def test_graph_of_cupys_replays_the_same_bits_after_each_waking(cuda) -> None:
    cupy = pytest.importorskip("cupy")
    region = cumem.Region("graph")
    buffers = [cumem.zeros(MIB, "u1", "device", pool=region.pool) for _ in range(2)]
    source, target = map(cupy.asarray, buffers)
    content = np.random.default_rng(1).integers(0, 256, MIB, "u1")
    source.set(content)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    target.data.memset_async(9, MIB, stream)
    target[: MIB // 2].data.copy_from_device_async(source.data, MIB // 2, stream)
    graph = stream.end_capture()
    for _ in range(5):
        region.sleep()
        region.wake()
        target.set(np.zeros(MIB, "u1"))
        cupy.cuda.runtime.deviceSynchronize()  # the stream does not wait for set()
        graph.launch(stream)
        stream.synchronize()
        found = target.get()
        assert (found[: MIB // 2] == content[: MIB // 2]).all()
        assert (found[MIB // 2 :] == 9).all()


# -- training whose optimizer sleeps -------------------------------------------------------


def train_with_numpy(region: cumem.Region, sleeps: bool) -> list[float]:
    """Train a perceptron whose moments (Adam's) are in a region, and return the losses."""
    rng = np.random.default_rng(3)
    shapes = [(16, 32), (32, 1)]
    weights = [rng.normal(0, 0.3, shape).astype("f4") for shape in shapes]
    moments = [
        [cumem.zeros(shape, "f4", "device", pool=region.pool) for _ in range(2)]
        for shape in shapes
    ]
    x = rng.normal(size=(64, 16)).astype("f4")
    wanted = np.sin(x.sum(1, keepdims=True))
    losses = []
    for step in range(1, 13):
        hidden = np.tanh(x @ weights[0])
        error = hidden @ weights[1] - wanted
        losses.append(float((error**2).mean()))
        slope = 2 * error / len(x)
        slopes = [x.T @ ((slope @ weights[1].T) * (1 - hidden**2)), hidden.T @ slope]
        region.wake()
        for weight, pair, gradient in zip(weights, moments, slopes, strict=True):
            first, second = (values.get(each) for each in pair)
            first = 0.9 * first + 0.1 * gradient
            second = 0.99 * second + 0.01 * gradient**2
            scaled = first / (1 - 0.9**step), second / (1 - 0.99**step)
            weight -= 0.02 * scaled[0] / (np.sqrt(scaled[1]) + 1e-8)
            for buffer, moment in zip(pair, (first, second), strict=True):
                cumem.copy_async(buffer, moment.astype("f4"))
        if sleeps:
            region.sleep()
    return losses


@pytest.mark.parametrize("host", ["keep", "release"])
def test_training_whose_optimizer_sleeps_has_the_same_losses(runtime, host) -> None:
    losses = train_with_numpy(cumem.Region("stays"), False)
    assert losses[-1] < losses[0] / 2
    assert train_with_numpy(cumem.Region("sleeps", host=host), True) == losses


def train_with_torch(torch: Any, region: cumem.Region | None) -> list[float]:
    from cumem.integrations.torch import using

    torch.manual_seed(5)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        x = torch.randn(64, 256, device="cuda")
        loss = (model(x) - x).square().mean()
        loss.backward()
        if region is not None:
            region.wake()
        # The first step makes the state, and the others only change it.
        is_first = region is not None and step == 0
        with using(region) if is_first else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        if region is not None:
            region.sleep()
        losses.append(loss.item())
    if region is not None:
        assert region.pool.stats().asleep_nbytes > 0
        region.wake()
    return losses


@pytest.mark.gpu
def test_training_of_pytorch_whose_optimizer_sleeps_has_the_same_losses(
    torch_on_gpu, monkeypatch
) -> None:
    torch = torch_on_gpu
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        losses = train_with_torch(torch, None)
        assert train_with_torch(torch, cumem.Region("optimizer")) == losses
    finally:
        torch.use_deterministic_algorithms(False)


# -- two users of one GPU by turns ---------------------------------------------------------


def test_two_regions_take_turns_with_60_percent_of_the_memory_each() -> None:
    """The device has no room for both, so a region can work only while the other sleeps."""
    with session.opened("emulated", memory_nbytes=320 * MIB):
        total = cumem.memory_info().free
        share = int(0.6 * total) // (64 * MIB) * (64 * MIB)
        assert 2 * share > total
        regions = [cumem.Region(name) for name in ("first", "second")]
        held: list[cumem.DeviceBuffer] = []
        for number, region in enumerate(regions):
            held.append(cumem.full(share, number, "u1", "device", pool=region.pool))
            region.sleep()
        for turn in range(4):
            number = turn % 2
            regions[number].wake()
            with pytest.raises(cumem.OutOfMemoryError):
                regions[1 - number].wake()
            assert regions[1 - number].is_asleep
            assert (values.get(held[number][::4096]) == turn).all()
            held[number].fill(turn + 2)
            regions[number].sleep()
        cumem.wake("first")
        assert (values.get(held[0][::4096]) == 4).all()
        held.clear()


#: Takes its part of the GPU, and then does what each line of its input says.
TURNS = """
import sys
import cumem

cumem.synchronize()
print("ready", flush=True)
share, value = map(int, sys.stdin.readline().split())
region = cumem.Region("turns")
buffer = cumem.full(share, value, "u1", "device", pool=region.pool)
region.sleep()
print("asleep", flush=True)
for line in sys.stdin:
    try:
        if line == "wake\\n":
            region.wake()
            assert (buffer[-1000:].to_numpy() == value).all()
            value += 1
            buffer.fill(value)
        else:
            region.sleep()
    except cumem.OutOfMemoryError:
        pass
    print("asleep" if region.is_asleep else "awake", flush=True)
"""


class Program:
    """A program of Python that answers each line by a line."""

    def __init__(self, text: str, backend: str, *arguments: str) -> None:
        shown = {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | shown | {"CUMEM_BACKEND": backend},
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *args: object) -> None:
        self.process.kill()
        self.process.communicate()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()


@pytest.mark.gpu
def test_two_processes_take_turns_with_60_percent_of_a_gpu_each(cuda) -> None:
    """What is left of the GPU beside a third user has no room for both."""
    with Program(TURNS, "cuda") as first, Program(TURNS, "cuda") as second:
        programs = [first, second]
        assert [each.answer() for each in programs] == [
            "ready"
        ] * 2  # both have their contexts now
        room = 2 << 30
        taken = cumem.empty_device(cumem.memory_info().free - room, "u1")
        share = int(0.6 * room) // (64 * MIB) * (64 * MIB)
        for number, program in enumerate(programs):
            assert program.ask(f"{share} {10 * number}") == "asleep"
        for turn in range(6):
            mine, other = programs[turn % 2], programs[1 - turn % 2]
            assert mine.ask("wake") == "awake"
            assert other.ask("wake") == "asleep"  # refused, and it can be tried again
            assert mine.ask("sleep") == "asleep"
        del taken


# -- memory of the host --------------------------------------------------------------------


def resident_nbytes() -> int:
    """Return how much memory this process has."""
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGESIZE")


def pinned_by_drivers() -> int:
    """Return how many bytes drivers have page-locked on this machine."""
    rows = dict(row.split() for row in Path("/proc/vmstat").read_text().splitlines())
    names = ("nr_foll_pin_acquired", "nr_foll_pin_released")
    if names[0] not in rows:
        pytest.skip("this kernel does not count pages that drivers page-lock")
    return (int(rows[names[0]]) - int(rows[names[1]])) * os.sysconf("SC_PAGESIZE")


@pytest.mark.gpu
def test_memory_of_the_host_is_back_after_release(cuda) -> None:
    size = 1 << 30
    region = cumem.Region("released", host="release")
    buffer = cumem.full(size, 7, "u1", "device", pool=region.pool)
    region.sleep()  # starts threads and fills caches that stay
    region.wake()
    resident, pinned = resident_nbytes(), pinned_by_drivers()
    region.sleep()
    assert resident_nbytes() > resident + size * 0.9
    is_counted = pinned_by_drivers() > pinned + size * 0.9
    region.wake()
    assert resident_nbytes() < resident + size * 0.01
    assert (values.get(buffer[-1000:]) == 7).all()
    if not is_counted:
        pytest.skip("this kernel does not count what this driver page-locks")
    assert pinned_by_drivers() < pinned + size * 0.01


# -- killed in mid-sleep -------------------------------------------------------------------

#: Puts a region to sleep in a thread, and says so once that thread waits in a call of the
#: driver.
KILLED = """
import sys, threading
from support import session, testing
import cumem

op, folder = sys.argv[1:]
testing.configure(backend="emulated", faults=True)
region = cumem.Region("killed")
buffer = cumem.full(40 << 20, 7, "u1", "device", pool=region.pool)
cumem.synchronize()
testing.delay_op(op, 300_000_000)
how = {"keep": "file", "path": folder} if folder else {}
sleeper = threading.Thread(target=lambda: region.sleep(**how), daemon=True)
sleeper.start()
session.wait_until_waiting(sleeper)
print("asleep" if region.is_asleep else "on the way", flush=True)
threading.Event().wait()
"""

#: The calls of the driver in which the process is killed.
MOMENTS = ("host_register", "copy_async", "address_unmap", "physical_release")


def segments() -> set[str]:
    """Return the names of all shared memory of this machine."""
    return {each.name for each in Path("/dev/shm").iterdir()}


def ways_to_keep() -> list[Any]:
    has_files = "path" in inspect.signature(cumem.Region.sleep).parameters
    return ["pinned", *(["file"] if has_files else [])]


@pytest.mark.hooks
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("keep", ways_to_keep())
def test_process_killed_in_mid_sleep_leaves_nothing(tmp_path, keep, moment) -> None:
    before = segments()
    folder = str(tmp_path) if keep == "file" else ""
    with Program(KILLED, "emulated", moment, folder) as program:
        assert program.answer() == "on the way"
        program.process.send_signal(signal.SIGKILL)
        assert program.process.wait() == -signal.SIGKILL
    assert [*tmp_path.iterdir()] == []
    assert segments() <= before


#: Sleeps and wakes, and says each time that it begins.
SLEEPER = """
import cumem

region = cumem.Region("killed", host="release")
buffer = cumem.full(1 << 30, 7, "u1", "device", pool=region.pool)
cumem.synchronize()
while True:
    print("begins", flush=True)
    region.sleep()
    region.wake()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_process_killed_on_a_gpu_leaves_no_memory_anywhere(cuda, rounds) -> None:
    cumem.synchronize()
    free, shared, pinned = cumem.memory_info().free, segments(), pinned_by_drivers()
    with Program(SLEEPER, "cuda") as program:
        for _ in range(rounds):
            assert program.answer() == "begins"
        program.process.send_signal(signal.SIGKILL)
        assert program.process.wait() == -signal.SIGKILL
    session.wait_until(
        lambda: cumem.memory_info().free >= free - 64 * MIB, "the GPU's memory"
    )
    session.wait_until(
        lambda: pinned_by_drivers() <= pinned + 16 * MIB, "page-locked memory"
    )
    assert segments() <= shared
