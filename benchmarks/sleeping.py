# SPDX-License-Identifier: Apache-2.0
"""Measure how fast GPU memory is given to other processes and taken back.

    python benchmarks/sleeping.py --json benchmarks/results/sleeping-h200.json
    python benchmarks/sleeping.py --parts large,turns,training --graphs 64

Blocks of device memory go to sleep, which gives their memory back to the driver, and wake
up again. The same blocks do this in several ways: as buffers of a `Region`, as PyTorch
tensors of a `Region`, by `cumem.integrations.torch.offload`, by torch_memory_saver, and in
vLLM's way, with a page-locked tensor and a copy for each block. Each way runs in a process
of its own, which reports

- how long the first and the later sleeps and wakes take, and for comparison the link, which
  is how long copies of one page-locked block of the same size take;
- how long a wake takes that begins as soon as the sleep is over. The driver then still
  clears the memory that it got back, and copies wait for it, so that all other wakes begin
  a tenth of a second later, which is less than any other program would use the memory for;
- how much device memory was free before the process allocated any, and how much is free
  while the blocks sleep;
- how much memory the process and the machine use, and have page-locked, at each moment.

``--parts`` chooses further parts. In "large", 48 GiB sleep. In "turns", two processes share
the GPU in turn, and each of them uses 60 % of its memory. In "training", a model of GPT-2's
size is trained with an optimizer whose state sleeps between its steps.

On the emulated device the script runs too, and says that its figures are not a GPU's. There
the other libraries cannot run, and each of the two processes has an emulated GPU of its
own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

MIB, GIB = 1 << 20, 1 << 30
#: The share of the GPU's memory that each of the two processes takes.
SHARE = 0.6
#: The share of the blocks of mixed sizes that are freed before the first sleep.
FREED = 0.4
#: The seconds between a sleep and its wake, in which the driver clears the memory.
PAUSE = 0.1
#: After so many seconds without an answer a process is ended, and its case says so.
PATIENCE = 300


@dataclass(frozen=True)
class Size:
    """The sizes and counts of a run."""

    total: int = 8 * GIB
    large: int = 48 * GIB
    largest: int = GIB  # the largest of the blocks of mixed sizes
    mixed_count: int = 5000
    cycles: int = 3
    turns: int = 3
    shared: int = 1 << 50  # how much of the GPU's memory is shared in "turns" at most


LITTLE = Size(48 * MIB, 96 * MIB, 8 * MIB, 300, 2, 2, 256 * MIB)


def shapes(size: Size) -> dict[str, int]:
    """Return for each set of blocks its name and the bytes of all blocks together."""
    counts = ("64 blocks", f"{size.mixed_count} blocks")
    small = dict.fromkeys(counts, size.total)
    return small | dict.fromkeys((f"{count}, large" for count in counts), size.large)


def sizes_of(shape: str, total: int, size: Size) -> list[int]:
    """Return the bytes of each block: 64 equal blocks, or many of mixed sizes.

    Mixed sizes go from 3 bytes to `size.largest`. Their logarithms are random, and spread
    so that the blocks that are not freed have about `total` bytes together.
    """
    if shape.startswith("64 "):
        return [total // 64] * 64
    spread = np.random.default_rng(1).random(size.mixed_count)
    spread[:2] = 0, 1

    def made(power: float) -> Any:
        return (3 * (size.largest / 3) ** (spread**power)).astype(np.int64)

    low, high = 0.01, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        too_much = made(middle).sum() > total / (1 - FREED)
        low, high = (middle, high) if too_much else (low, middle)
    return [int(n) for n in made(high)]


def freed_of(shape: str, count: int) -> list[int]:
    """Return the numbers of the blocks that are freed before anything sleeps."""
    if shape.startswith("64 "):
        return []
    chosen = np.random.default_rng(2).permutation(count)[: int(FREED * count)]
    return sorted(int(i) for i in chosen)


# -- what is in memory -------------------------------------------------------------------


def host_memory() -> dict[str, int]:
    """Return how many bytes of memory this process and the machine use, by /proc.

    VmLck and Mlocked count only what ``mlock`` has locked. What drivers have page-locked
    is computed from how many pages were pinned, and released, since the machine started.
    """
    found = {}
    for path, names in (
        ("/proc/self/status", ("VmRSS", "VmLck", "VmPin")),
        ("/proc/meminfo", ("MemAvailable", "Mlocked", "Unevictable")),
    ):
        for row in Path(path).read_text().splitlines():
            name, _, rest = row.partition(":")
            if name in names:
                found[name] = int(rest.split()[0]) << 10
    rows = dict(row.split() for row in Path("/proc/vmstat").read_text().splitlines())
    if "nr_foll_pin_acquired" in rows:
        held = int(rows["nr_foll_pin_acquired"]) - int(rows["nr_foll_pin_released"])
        found["pinned by drivers"] = held * os.sysconf("SC_PAGESIZE")
    found["cumem, pinned"] = cumem.stats()["pinned"].reserved_nbytes
    return found


# -- ways to sleep -----------------------------------------------------------------------


class Way(Protocol):
    """A way in which blocks sleep and wake.

    Blocks have the numbers from 0 on. Every byte of a block is its number modulo 251.
    """

    def make(self, sizes: list[int]) -> None: ...
    def drop(self, number: int) -> None: ...
    def address(self, number: int) -> int: ...
    def read(self, number: int, part: slice) -> Any: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Buffers:
    """Blocks that are buffers of a Region."""

    def __init__(
        self, keep: Any, host: str = "keep", folder: str | None = None
    ) -> None:
        self.region = cumem.Region("benchmark", host=host)  # type: ignore[arg-type]
        self.arguments = {"keep": keep} | ({"path": folder} if folder else {})
        self.blocks: dict[int, Any] = {}

    def make(self, sizes: list[int]) -> None:
        for number, nbytes in enumerate(sizes):
            block = cumem.empty_device(nbytes, "u1", pool=self.region.pool)
            block.fill(number % 251)
            self.blocks[number] = block

    def drop(self, number: int) -> None:
        del self.blocks[number]

    def address(self, number: int) -> int:
        return int(self.blocks[number].ptr)

    def read(self, number: int, part: slice) -> Any:
        return self.blocks[number][part].to_numpy()

    def sleep(self) -> None:
        self.region.sleep(**self.arguments)

    def wake(self) -> None:
        self.region.wake()

    def close(self) -> None:
        self.blocks.clear()
        self.region.close()


class Tensors:
    """Blocks that are PyTorch tensors, which sleep in vLLM's way.

    Each is copied to a page-locked tensor. vLLM gives them back their old addresses when
    they wake, and this class does not. Its subclasses change where tensors are allocated
    and how they sleep.
    """

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.tensors: dict[int, Any] = {}
        self.hosts: dict[int, Any] = {}
        self._empty(1000).fill_(1).mul_(1).cpu()  # loads the kernels
        torch.cuda.empty_cache()

    def place(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def make(self, sizes: list[int]) -> None:
        with self.place():
            for number, nbytes in enumerate(sizes):
                self.tensors[number] = self._empty(nbytes).fill_(number % 251)

    def _empty(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def drop(self, number: int) -> None:
        del self.tensors[number]

    def address(self, number: int) -> int:
        return int(self.tensors[number].data_ptr())

    def read(self, number: int, part: slice) -> Any:
        return self.tensors[number][part].cpu().numpy()

    def sleep(self) -> None:
        for number, tensor in self.tensors.items():
            host = self.torch.empty(tensor.nbytes, dtype=tensor.dtype, pin_memory=True)
            self.hosts[number] = host.copy_(tensor)
        self.tensors.clear()
        self.torch.cuda.empty_cache()

    def wake(self) -> None:
        for number, host in self.hosts.items():
            self.tensors[number] = self._empty(host.nbytes).copy_(host)
        self.hosts.clear()
        self.torch.cuda.synchronize()

    def close(self) -> None:
        self.tensors.clear()
        self.torch.cuda.empty_cache()


class Used(Tensors):
    """Tensors that PyTorch allocates in a Region, and perhaps CUDA graphs that use them."""

    def __init__(self, keep: bool, graphs: int) -> None:
        super().__init__()
        self.region = cumem.Region("benchmark")
        self.keep = keep
        self.graph_count = graphs
        self.graphs: list[Any] = []

    def place(self) -> contextlib.AbstractContextManager[Any]:
        from cumem.integrations.torch import using

        return using(self.region)

    def make(self, sizes: list[int]) -> None:
        super().make(sizes)
        for number in range(self.graph_count):
            graph, tensor = (
                self.torch.cuda.CUDAGraph(),
                self.tensors[number % len(sizes)],
            )
            with self.torch.cuda.graph(graph):
                tensor.mul_(1)
            self.graphs.append(graph)

    def sleep(self) -> None:
        self.region.sleep(keep=self.keep)

    def wake(self) -> None:
        self.region.wake()
        for graph in self.graphs:
            graph.replay()  # leaves all bytes as they are
        self.torch.cuda.synchronize()

    def close(self) -> None:
        from cumem.integrations.torch import empty_cache

        self.graphs.clear()
        super().close()
        empty_cache()
        self.region.close()


class Offloaded(Tensors):
    """Tensors that are parameters of a module, moved by `integrations.torch.offload`."""

    def make(self, sizes: list[int]) -> None:
        super().make(sizes)
        self.module = self.torch.nn.ParameterDict(
            {
                str(number): self.torch.nn.Parameter(tensor, requires_grad=False)
                for number, tensor in self.tensors.items()
            }
        )
        self.tensors.clear()

    def drop(self, number: int) -> None:
        del self.module[str(number)]

    def address(self, number: int) -> int:
        return int(self.module[str(number)].data_ptr())

    def read(self, number: int, part: slice) -> Any:
        return self.module[str(number)].data[part].cpu().numpy()

    def sleep(self) -> None:
        from cumem.integrations.torch import offload

        offload(self.module)
        self.torch.cuda.empty_cache()

    def wake(self) -> None:
        from cumem.integrations.torch import restore

        restore(self.module)
        self.torch.cuda.synchronize()

    def close(self) -> None:
        del self.module
        super().close()


class Saver(Tensors):
    """Tensors that torch_memory_saver allocates, in one of its hook modes.

    In the mode "preload" it takes the place of `cudaMalloc`, for which `preloaded` prepares
    the process. In the mode "torch" it is an allocator of PyTorch, and it ends the process
    if memory is freed outside of its region.
    """

    def __init__(self, retains: bool, mode: str) -> None:
        super().__init__()
        from torch_memory_saver import torch_memory_saver

        self.saver = torch_memory_saver
        self.saver.hook_mode = mode
        if retains:
            self.saver.retain_cpu_backup = True

    def place(self) -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = self.saver.region(
            tag="benchmark", enable_cpu_backup=True
        )
        return found

    def sleep(self) -> None:
        self.torch.cuda.synchronize()
        self.saver.pause("benchmark")

    def wake(self) -> None:
        self.saver.resume("benchmark")
        self.torch.cuda.synchronize()

    def close(self) -> None:
        with self.place():
            super().close()


KEEP, RELEASE = 'cumem, host="keep"', 'cumem, host="release"'
DROP, FILE = "cumem, keep=False", 'cumem, keep="file"'
USED, OFFLOADED = "cumem, PyTorch's tensors", "cumem.offload"
USED_DROP = "cumem, PyTorch's, keep=False"
BY_HAND = "by hand, as vLLM"
SAVER, RETAINED = "torch_memory_saver", "torch_memory_saver, retained"
SAVER_HOOK, RETAINED_HOOK = f"{SAVER}, torch's hook", f"{RETAINED}, torch's hook"
SAVERS = (SAVER, RETAINED, SAVER_HOOK, RETAINED_HOOK)
OURS = (KEEP, RELEASE, DROP, FILE)
THEIRS = (USED, USED_DROP, OFFLOADED, BY_HAND, *SAVERS)


def way_of(name: str, folder: str, graphs: int) -> Way:
    """Make the way that has this name."""
    ways: dict[str, Callable[[], Way]] = {
        KEEP: lambda: Buffers(True),
        RELEASE: lambda: Buffers(True, host="release"),
        DROP: lambda: Buffers(False),
        FILE: lambda: Buffers("file", folder=folder),
        USED: lambda: Used(True, graphs),
        USED_DROP: lambda: Used(False, graphs),
        OFFLOADED: Offloaded,
        BY_HAND: Tensors,
        SAVER: lambda: Saver(False, "preload"),
        RETAINED: lambda: Saver(True, "preload"),
        SAVER_HOOK: lambda: Saver(False, "torch"),
        RETAINED_HOOK: lambda: Saver(True, "torch"),
    }
    return ways[name]()


def missing(emulated: bool) -> dict[str, str]:
    """Return the ways that cannot be measured here, and the reason for each."""
    found = {}
    if "path" not in inspect.signature(cumem.Region.sleep).parameters:
        found[FILE] = "this build has no files for regions"
    for way in THEIRS:
        if emulated:
            found[way] = "needs a GPU"
        elif importlib.util.find_spec("torch") is None:
            found[way] = "PyTorch is not installed"
        elif importlib.util.find_spec("torch_memory_saver") is None:
            if way in SAVERS:
                found[way] = "torch_memory_saver is not installed"
    return found


# -- one way, in a process of its own ----------------------------------------------------


@dataclass
class Case:
    """One set of blocks that sleeps in one way.

    Parameters
    ----------
    shape, way : str
        The name of the set, and of the way. For the way ``"link"``, a sleep is a copy of
        one page-locked block of as many bytes to the host, and a wake is a copy back.
    live_nbytes, copied_nbytes : int
        The bytes of all blocks, and those of cumem's pinned memory that keeps their
        contents while they sleep; 0 if cumem does not keep them there.
    sleeps, wakes : list of float
        The seconds of each sleep and of each wake, in order.
    wakes_at_once : list of float
        The seconds of wakes that followed their sleeps without a pause.
    free_before, free_asleep : int
        How much device memory was free before the first allocation, and the least that was
        free while all blocks slept.
    host : dict
        The results of `host_memory`: "before" the first sleep, "asleep", "awake" after the
        last wake, and "closed" after the blocks were freed.
    keeps_addresses : bool
        Whether all blocks had their old addresses after the last wake.
    graphs : int
        How many CUDA graphs used the blocks, and were replayed after each wake.
    error : str
        What went wrong, if there are no figures.
    """

    shape: str
    way: str
    live_nbytes: int = 0
    copied_nbytes: int = 0
    sleeps: list[float] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)
    wakes_at_once: list[float] = field(default_factory=list)
    free_before: int = 0
    free_asleep: int = 0
    host: dict[str, dict[str, int]] = field(default_factory=dict)
    keeps_addresses: bool = True
    graphs: int = 0
    error: str = ""


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def warm_up() -> None:
    """Make the context, load kernels and start threads, so that measured code does not."""
    region = cumem.Region("warm")
    block = cumem.full(MIB, 1, "u1", "device", pool=region.pool)
    region.sleep()
    region.wake()
    cumem.copy(np.empty(MIB, "u1"), block)
    del block
    region.close()
    cumem.trim()


def check(way: Way, numbers: list[int], sizes: list[int]) -> None:
    """Compare the beginning, the middle and the end of each block with its value."""
    for number in numbers:
        end = sizes[number]
        for start in {0, max(0, end // 2 - 500), max(0, end - 1000)}:
            part = way.read(number, slice(start, min(end, start + 1000)))
            if not (part == number % 251).all():
                raise AssertionError(f"block {number} came back changed at {start}")


def measure(case: Case, way: Way, sizes: list[int], size: Size) -> None:
    """Make blocks, let them sleep and wake, and fill in the case."""
    case.free_before = cumem.memory_info().free
    way.make(sizes)
    freed = freed_of(case.shape, len(sizes))
    for number in freed:
        way.drop(number)
    numbers = sorted(set(range(len(sizes))) - set(freed))
    case.live_nbytes = sum(sizes[number] for number in numbers)
    addresses = [way.address(number) for number in numbers]
    cumem.synchronize()
    case.host["before"] = host_memory()
    pinned = cumem.stats()["pinned"].live_nbytes
    for _ in range(size.cycles):
        case.sleeps.append(timed(way.sleep))
        free = cumem.memory_info().free
        case.free_asleep = min(case.free_asleep or free, free)
        case.copied_nbytes = cumem.stats()["pinned"].live_nbytes - pinned
        case.host["asleep"] = host_memory()
        time.sleep(PAUSE)
        case.wakes.append(timed(way.wake))
        case.host["awake"] = host_memory()
    for _ in range(2):
        way.sleep()
        case.wakes_at_once.append(timed(way.wake))
    case.keeps_addresses = addresses == [way.address(number) for number in numbers]
    if case.way not in (DROP, USED_DROP):
        check(way, numbers, sizes)
    way.close()
    case.host["closed"] = host_memory()


def measure_link(case: Case, total: int, size: Size) -> None:
    """Time copies of one page-locked block of as many bytes, down and up."""
    case.live_nbytes = total
    device, host = cumem.empty_device(total, "u1"), cumem.empty_pinned(total, "u1")
    device.fill(1)
    cumem.synchronize()
    for _ in range(size.cycles):
        case.sleeps.append(timed(lambda: cumem.copy(host, device)))
        case.wakes.append(timed(lambda: cumem.copy(device, host)))


def work_on_case(run: Run, size: Size) -> dict[str, Any]:
    """Measure the case that this process was started for."""
    shape, name = run.options.shape, run.options.way
    case = Case(
        shape, name, graphs=run.options.graphs if name in (USED, USED_DROP) else 0
    )
    total = shapes(size)[shape]
    warm_up()
    if name == "link":
        measure_link(case, total, size)
    else:
        way = way_of(name, run.options.folder, case.graphs)
        measure(case, way, sizes_of(shape, total, size), size)
    return vars(case)


# -- two processes by turns --------------------------------------------------------------


@dataclass
class Turns:
    """Two processes that share one GPU by turns.

    Parameters
    ----------
    total_nbytes : int
        The memory of the GPU.
    kept_nbytes, dropped_nbytes : int
        How much memory each process has in a region that keeps its contents while it
        sleeps (the weights), and in one that does not (the cache). Together they are
        `SHARE` of the memory, but the host's memory limits how much can be kept.
    seconds : list of list of float
        For each process, the time of each turn. In a turn it wakes both regions, fills the
        cache, checks the weights and sleeps again.
    free_between : int
        The least device memory that was free while both slept.
    shares_gpu : bool
        Whether both used the same GPU. Emulated GPUs belong to one process.
    error : str
        What went wrong, if there are no figures.
    """

    total_nbytes: int = 0
    kept_nbytes: int = 0
    dropped_nbytes: int = 0
    seconds: list[list[float]] = field(default_factory=list)
    free_between: int = 0
    shares_gpu: bool = True
    error: str = ""


def work_on_turns(run: Run, size: Size) -> None:
    """Take a turn for each line on standard input, and answer it with a line of JSON."""
    warm_up()
    sys.stdin.readline()  # the first line asks for the blocks to be made
    kept = int(run.options.kept)
    dropped = shared_nbytes(size) - kept
    weights, cache = cumem.Region("weights"), cumem.Region("cache")
    blocks = [
        cumem.full(kept // 64, number, "u1", "device", pool=weights.pool)
        for number in range(64)
    ]
    keys = cumem.empty_device(dropped, "u1", pool=cache.pool)

    def rest() -> None:
        weights.sleep()
        cache.sleep(keep=False)

    def turn() -> None:
        cumem.wake("weights", "cache")
        keys.fill(1)
        for number, block in enumerate(blocks):
            if not (block[-1000:].to_numpy() == number).all():
                raise AssertionError(f"block {number} came back changed")
        rest()

    rest()
    print(json.dumps({"kept_nbytes": kept, "dropped_nbytes": dropped}), flush=True)
    for _ in iter(sys.stdin.readline, ""):
        print(json.dumps({"seconds": timed(turn)}), flush=True)


def shared_nbytes(size: Size) -> int:
    """Return how much of the GPU each of two processes takes."""
    return int(SHARE * min(cumem.memory_info().total, size.shared))


def take_turns(run: Run, size: Size) -> Iterator[Turns]:
    """Let two processes wake and sleep, one after the other."""
    case = Turns(seconds=[[], []], shares_gpu=not run.emulated)
    case.total_nbytes = cumem.memory_info().total
    # The host needs room for the contents of both processes at the same time.
    kept = min(shared_nbytes(size) * 9 // 10, host_memory()["MemAvailable"] // 3)
    command = command_of(run, "turns", kept=str(kept // 64 * 64))
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        timer = threading.Timer(PATIENCE, lambda: [each.kill() for each in processes])
        timer.start()
        stack.callback(timer.cancel)  # runs after the processes below have ended
        for _ in range(2):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            processes.append(stack.enter_context(process))

        def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline() or "null")
            if answer is None:
                raise RuntimeError(f"a process ended with {process.wait()}")
            return answer

        try:
            for process in processes:
                for name, value in ask(process).items():
                    setattr(case, name, value)
            for _ in range(size.turns):
                for number, process in enumerate(processes):
                    case.seconds[number].append(ask(process)["seconds"])
                    free = cumem.memory_info().free
                    case.free_between = min(case.free_between or free, free)
        except (OSError, RuntimeError) as error:
            case.error = f"{type(error).__name__}: {error}"
    yield case


# -- training whose optimizer sleeps -----------------------------------------------------


@dataclass
class Training:
    """One training from the common start, with an optimizer that sleeps or does not.

    Parameters
    ----------
    sleeps : bool
        Whether the state of the optimizer sleeps between its steps.
    seconds : list of float
        The time of each step after the warm-up.
    state_nbytes : int
        The bytes of the optimizer's state.
    peak_nbytes : int
        The most device memory in use after a backward pass.
    losses : list of float
        The loss of each step.
    error : str
        What went wrong, if there are no figures.
    """

    sleeps: bool
    seconds: list[float] = field(default_factory=list)
    state_nbytes: int = 0
    peak_nbytes: int = 0
    losses: list[float] = field(default_factory=list)
    error: str = ""


def train(case: Training, quick: bool) -> None:
    """Train some steps of a model of GPT-2's size."""
    import torch
    from offloading import LITTLE as LITTLE_MODEL
    from offloading import Model
    from offloading import Size as ModelSize

    from cumem.integrations.torch import using

    size = LITTLE_MODEL if quick else ModelSize()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    model = Model(size).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    region = cumem.Region("optimizer")
    generator = torch.Generator().manual_seed(1)
    shape = (size.batch, size.length + 1)
    for number in range(size.warm + size.steps):
        text = torch.randint(size.vocabulary, shape, generator=generator).to("cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        memory = cumem.memory_info()
        case.peak_nbytes = max(case.peak_nbytes, memory.total - memory.free)
        region.wake()
        # The first step makes the state, and the others only change it.
        with using(region) if number == 0 else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        if case.sleeps:
            region.sleep()
        case.losses.append(loss.item())
        if number >= size.warm:
            case.seconds.append(time.perf_counter() - start)
    case.state_nbytes = sum(
        each.nbytes
        for state in optimizer.state.values()
        for each in state.values()
        if torch.is_tensor(each) and each.is_cuda
    )


def work_on_training(run: Run) -> dict[str, Any]:
    """Run the training that this process was started for."""
    case = Training(run.options.way == "sleeps")
    train(case, run.options.quick)
    return vars(case)


def trainings(run: Run) -> Iterator[Training]:
    """Train without sleep, with sleep, and without it again, and compare the losses.

    Those with sleep may differ by at most four times as much as the other two differ
    from each other.
    """
    found = []
    for way in ("stays", "sleeps", "stays again"):
        case = Training(way == "sleeps")
        fill(case, ask_process(run, "training", way=way))
        found.append(case)
        yield case
    if any(case.error for case in found):
        return
    stays, sleeps, again = (np.array(case.losses) for case in found)
    noise, difference = abs(again - stays).max(), abs(sleeps - stays).max()
    if not difference <= 4 * noise:
        raise AssertionError(f"losses differ by {difference}, noise is {noise}")


# -- the run -----------------------------------------------------------------------------


def command_of(run: Run, worker: str, **more: str) -> list[str]:
    """Return the command line of a process that measures one part."""
    options = run.options
    command = [sys.executable, __file__, "--worker", worker]
    command += ["--graphs", str(options.graphs), "--folder", options.folder]
    command += ["--quick"] if options.quick or run.emulated else []
    for name, value in more.items():
        command += [f"--{name}", value]
    return command


def preloaded(way: str | None) -> contextlib.AbstractContextManager[Any]:
    """Let processes that begin in the block load what the way needs at their start."""
    if way not in (SAVER, RETAINED):
        return contextlib.nullcontext()
    from torch_memory_saver import configure_subprocess

    found: contextlib.AbstractContextManager[Any] = configure_subprocess()
    return found


def ask_process(run: Run, worker: str, **more: str) -> dict[str, Any]:
    """Measure a part in a new process, and return its results or its error."""
    try:
        with preloaded(more.get("way")):
            done = subprocess.run(
                command_of(run, worker, **more),
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
            )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PATIENCE} s"}
    if done.returncode != 0:
        rows = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        return {"error": rows[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fill(case: Any, found: dict[str, Any]) -> None:
    """Fill in a case with the results of its process."""
    for name, value in found.items():
        setattr(case, name, value)


def cases(run: Run, shape: str, left_out: dict[str, str]) -> Iterator[Case]:
    """Measure one set of blocks.

    Other libraries are measured with 64 blocks only. A file of 48 GiB takes minutes, as it
    does not fit into the page cache, so one set is enough for it.
    """
    theirs = THEIRS if shape == "64 blocks" else (USED,)
    has_file = not shape.endswith("large") or shape.startswith("64 ")
    for way in ("link", *OURS, *theirs):
        if way not in left_out and (way != FILE or has_file):
            case = Case(shape, way)
            fill(case, ask_process(run, "case", shape=shape, way=way))
            yield case


def later(seconds: list[float]) -> float:
    """Return the median of all times but the first."""
    return statistics.median(seconds[1:] or seconds)


class Lines:
    """Makes the lines of the output, with rates as a percentage of the link."""

    def __init__(self, emulated: bool) -> None:
        self.emulated = emulated
        self.links: dict[str, Case] = {}

    def __call__(self, case: Any) -> str:
        """Return the line of a case of any part."""
        if case.error:
            return f"{type(case).__name__} {getattr(case, 'way', '')}: {case.error}"
        if isinstance(case, Case):
            return self.of_case(case)
        if isinstance(case, Turns):
            both = [statistics.median(each) for each in case.seconds]
            where = "one GPU" if case.shares_gpu else "an emulated GPU each"
            kept, dropped = map(format_nbytes, (case.kept_nbytes, case.dropped_nbytes))
            return (
                f"turns on {where}, {kept} kept and {dropped} given up: "
                f"{both[0]:.3f} and {both[1]:.3f} s a turn"
            )
        how = "sleeps" if case.sleeps else "stays"
        return (
            f"training, {format_nbytes(case.state_nbytes)} of optimizer {how:6} "
            f"{statistics.median(case.seconds):.3f} s a step, "
            f"at most {format_nbytes(case.peak_nbytes)}, loss {case.losses[-1]:.6f}"
        )

    def of_case(self, case: Case) -> str:
        """Return the line of one set of blocks that slept in one way."""
        if case.way == "link":
            self.links[case.shape] = case
        link = self.links.get(case.shape)

        def rate(name: str, seconds: float) -> str:
            found = case.live_nbytes / seconds / 1e9
            if case.way in (DROP, USED_DROP):
                return f"{seconds / case.live_nbytes * GIB * 1e3:6.2f} ms/GiB"
            if link is None or link.error:
                return f"{found:6.1f} GB/s     "
            part = link.live_nbytes / later(getattr(link, name)) / 1e9
            return f"{found:6.1f} GB/s {found / part:4.0%}"

        cells = [f"{case.shape:16} {case.way:42}"]
        cells.append(f"sleep {rate('sleeps', case.sleeps[0])}")
        cells.append(f"again {rate('sleeps', later(case.sleeps))}")
        cells.append(f"wake {rate('wakes', later(case.wakes))}")
        if case.wakes_at_once:
            seconds = statistics.median(case.wakes_at_once)
            cells.append(f"at once {rate('wakes', seconds)}")
        if case.way != "link":
            missing_nbytes = max(0, case.free_before - case.free_asleep)
            cells.append(f"not free {format_nbytes(missing_nbytes)}")
        if case.copied_nbytes:
            cells.append(f"copied {case.copied_nbytes / case.live_nbytes:.3f}")
        # On the emulated device these would count the emulated GPU's memory as well.
        if case.way == RELEASE and not self.emulated:
            before, after = case.host["before"], case.host["awake"]
            for name in ("VmRSS", "pinned by drivers"):
                if before.get(name):
                    cells.append(f"{name} {after[name] / before[name] - 1:+.1%}")
        return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    hidden = {"default": "", "help": argparse.SUPPRESS}
    run = Run(
        __doc__,
        graphs={"type": int, "default": 0, "help": "CUDA graphs that use the tensors"},
        folder={"default": tempfile.gettempdir(), "help": "for files of regions"},
        parts={"default": "cases", "help": "some of cases, large, turns, training"},
        worker=hidden,
        kept=hidden,
        shape=hidden,
        way=hidden,
    )
    emulated = cumem.backend() == "emulated"
    size = LITTLE if run.options.quick or emulated else Size()
    if run.options.worker:
        if run.options.worker == "turns":
            work_on_turns(run, size)
        elif run.options.worker == "training":
            print(json.dumps(work_on_training(run)))
        else:
            print(json.dumps(work_on_case(run, size)), flush=True)
            if run.options.way in (SAVER_HOOK, RETAINED_HOOK):
                os._exit(
                    0
                )  # PyTorch frees its memory at the end, outside of the region
        return 0
    run.begin(emulated)
    left_out = missing(emulated)
    if USED in left_out:
        left_out["training"] = left_out[USED]
    versions = {}
    for name in ("torch", "torch_memory_saver"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    run.note(1, missing=left_out, libraries=versions, share=SHARE, size=vars(size))
    parts, line = run.options.parts.split(","), Lines(emulated)
    for shape in shapes(size):
        if ("large" if shape.endswith("large") else "cases") in parts:
            run.show(cases(run, shape, left_out), line)
    if "turns" in parts:
        run.show(take_turns(run, size), line)
    if "training" in parts and "training" not in left_out:
        run.show(trainings(run), line)
    for way, why in left_out.items():
        print(f"not measured: {way} ({why})")
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
