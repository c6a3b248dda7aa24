# SPDX-License-Identifier: Apache-2.0
"""Measure the transfer rates of two builds of cumem, of other libraries and of raw calls.

    python benchmarks/links.py OLD.whl NEW.whl [--rounds 5] [--only TEXT] [--json FILE]

The cases are in groups, one for each kind of work: copies between two GPUs, one array to
two GPUs, pipelines of ordinary memory, saving, the first load of a process, processor time,
copies while Python threads compute, and many arrays of mixed sizes. In each round every
group runs three times, each time in a fresh process: with the old build, with the new
build, and with the others. The others are raw calls of CUDA and of the system, PyTorch,
safetensors and NumPy, as far as they are installed.

Each round gives the median of a case's calls, and its figure is the median over the rounds.
It is a rate in GB/s, or a time in ms if the name of the case ends in "processor" or
"seconds". When files are written, neither the removal of old files nor `sync` is timed.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import functools
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from versions import machine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Call = Callable[[], object]


@dataclass
class Options:
    """The sizes and the folder that a child process works with.

    Parameters
    ----------
    largest : int
        The bytes of one large array.
    long : int
        The bytes of a file, and of the source of a pipeline.
    folder : Path
        Where files are written, besides /dev/shm.
    repeats : int
        How often each case is timed, after one call that is not timed.
    """

    largest: int
    long: int
    folder: Path
    repeats: int

    def times_of(self, call: Call, before: Call | None = None) -> list[float]:
        """Return the seconds of each call but the first; `before` runs first, untimed."""
        times = []
        for _ in range(1 + self.repeats):
            if before is not None:
                before()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times[1:]

    def rate(self, nbytes: int, call: Call, before: Call | None = None) -> float:
        """Return the median rate of a call, in GB/s."""
        return nbytes / statistics.median(self.times_of(call, before)) / 1e9


#: A case: its name, and a function that measures it.
Measured = tuple[str, Callable[[], float]]
#: For each case of one process its figure, or the text of the error.
Figures = dict[str, float | str]


def has(name: str) -> bool:
    """Return whether a library is installed and can use the GPU."""
    if importlib.util.find_spec(name) is None:
        return False
    if name != "torch":
        return True
    import torch

    available: bool = torch.cuda.is_available()
    return available


# -- two GPUs ------------------------------------------------------------------------------


class RawPeers:
    """Memory of cudaMalloc on two GPUs, and copies by the runtime's own calls."""

    def __init__(self, nbytes: int) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self._memory, self._streams = [], []
        for device in (0, 1):
            self._runtime.setDevice(device)
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                self._runtime.deviceEnablePeerAccess(1 - device)
            self._memory.append([self._runtime.malloc(nbytes) for _ in range(2)])
            self._streams.append(self._runtime.streamCreateWithFlags(1))

    def copy(self, nbytes: int, ways: int) -> None:
        """Copy from GPU 0 to GPU 1 and, with two ways, back at the same time."""
        for way in range(ways):
            self._runtime.setDevice(way)
            self._runtime.memcpyPeerAsync(
                self._memory[1 - way][1],
                1 - way,
                self._memory[way][0],
                way,
                nbytes,
                self._streams[way],
            )
        self.wait()

    def up(self, hosts: list[int], nbytes: int, ways: int = 1) -> None:
        """Copy page-locked memory to both GPUs, or back from both if `ways` is 2."""
        for device, host in enumerate(hosts):
            self._runtime.setDevice(device)
            ends = (self._memory[device][0], host)
            self._runtime.memcpyAsync(
                *(ends if ways == 1 else reversed(ends)),
                nbytes,
                ways,  # cudaMemcpyHostToDevice is 1, cudaMemcpyDeviceToHost is 2
                self._streams[device],
            )
        self.wait()

    def wait(self) -> None:
        """Wait for the streams of both GPUs."""
        for device in (0, 1):
            self._runtime.setDevice(device)
            self._runtime.streamSynchronize(self._streams[device])


def two_gpus(to: Options) -> Iterator[Measured]:
    """Copy between two GPUs in one and both directions, and an array to both and back."""
    import cumem

    if cumem.device_count() < 2:
        return
    for nbytes in (MIB, to.largest):
        size = name_of(nbytes)
        made = [
            [cumem.full(nbytes, 1, "u1", "device", device=i) for _ in range(2)]
            for i in (0, 1)
        ]
        streams = [cumem.Stream(device=i) for i in (0, 1)]

        def one_way(made: Any = made) -> None:
            cumem.copy(made[1][0], made[0][0])

        def both_ways(made: Any = made, streams: Any = (None, None)) -> None:
            first = cumem.copy_async(made[1][0], made[0][0], stream=streams[0])
            second = cumem.copy_async(made[0][1], made[1][1], stream=streams[1])
            first.wait()
            second.wait()

        yield f"GPU to GPU, {size}", functools.partial(to.rate, nbytes, one_way)
        yield (
            f"both ways, in the background, {size}",
            functools.partial(to.rate, 2 * nbytes, both_ways),
        )
        yield (
            f"both ways, on streams, {size}",
            functools.partial(
                to.rate, 2 * nbytes, functools.partial(both_ways, streams=streams)
            ),
        )
    array = np.ones(to.largest, "u1")
    halves = [cumem.empty_device(to.largest // 2, "u1", device=i) for i in (0, 1)]
    yield (
        "one array to two GPUs",
        lambda: to.rate(to.largest, lambda: cumem.scatter(halves, array)),
    )
    yield (
        "two GPUs to one array",
        lambda: to.rate(to.largest, lambda: cumem.gather(array, halves)),
    )


def two_gpus_others(to: Options) -> Iterator[Measured]:
    """Make the same copies by raw calls and by PyTorch."""
    import cumem

    if cumem.device_count() < 2 or not has("cupy"):
        return
    raw = RawPeers(to.largest)
    for nbytes in (MIB, to.largest):
        size = name_of(nbytes)
        for ways, name in (
            (1, "GPU to GPU"),
            (2, "both ways, in the background"),
            (2, "both ways, on streams"),
        ):
            call = functools.partial(raw.copy, nbytes, ways)
            yield (
                f"{name}, {size}: raw calls",
                functools.partial(to.rate, ways * nbytes, call),
            )
        if has("torch"):
            yield from torch_peers(to, nbytes)
    pinned = cumem.full(to.largest, 1, "u1", "pinned")
    half = to.largest // 2
    hosts = [pinned.ptr, pinned.ptr + half]
    for ways, name in ((1, "one array to two GPUs"), (2, "two GPUs to one array")):
        call = functools.partial(raw.up, hosts, half, ways)
        yield (
            f"{name}: raw calls on page-locked memory",
            functools.partial(to.rate, to.largest, call),
        )


def torch_peers(to: Options, nbytes: int) -> Iterator[Measured]:
    """Copy between two GPUs by PyTorch."""
    import torch

    made = [
        [torch.ones(nbytes, dtype=torch.uint8, device=f"cuda:{i}") for _ in range(2)]
        for i in (0, 1)
    ]
    streams = [torch.cuda.Stream(device=i) for i in (0, 1)]

    def copy(ways: int) -> None:
        for way in range(ways):
            with torch.cuda.stream(streams[way]):
                made[1 - way][way].copy_(made[way][way], non_blocking=True)
        for stream in streams:
            stream.synchronize()

    for ways, name in ((1, "GPU to GPU"), (2, "both ways, on streams")):
        call = functools.partial(copy, ways)
        yield (
            f"{name}, {name_of(nbytes)}: torch",
            functools.partial(to.rate, ways * nbytes, call),
        )


# -- pipelines -----------------------------------------------------------------------------


def pipelines(to: Options) -> Iterator[Measured]:
    """Send ordinary memory to a GPU part by part, with and without results coming back."""
    import cumem

    columns = 1024
    data = np.ones((to.long // (4 * columns), columns), "f4")
    quarter = np.empty((data.shape[0], columns // 4), "f4")

    def work(x: Any, y: Any, stream: Any) -> None:
        cumem.copy_async(y, x[:, : columns // 4], stream=stream)

    def through(**how: Any) -> float:
        return to.rate(data.nbytes, lambda: cumem.pipeline(work, data, quarter, **how))

    def each(**how: Any) -> float:
        def call() -> None:
            for _ in cumem.chunks(data, **how):
                pass

        return to.rate(data.nbytes, call)

    def loaded(batch: int) -> float:
        rows = batch // (4 * columns)
        batches = [data[i : i + rows] for i in range(0, data.shape[0], rows)]

        def call() -> None:
            for _ in cumem.prefetch(batches):
                pass

        return to.rate(data.nbytes, call)

    yield "pipeline, a quarter back", through
    yield (
        "pipeline in chunks of 16 MiB, a quarter back",
        functools.partial(through, nbytes=16 * MIB),
    )
    yield "chunks", each
    yield "chunks of 16 MiB", functools.partial(each, nbytes=16 * MIB)
    yield "prefetch of batches of 64 MiB", functools.partial(loaded, 64 * MIB)

    def whole_copy() -> float:
        room = cumem.empty_device(data.shape, "f4")
        return to.rate(data.nbytes, lambda: cumem.copy(room, data))

    yield "one copy, for comparison", whole_copy
    managed = cumem.empty_managed(min(to.long // 2, 2 * GIB), "u1")
    managed.numpy()[:] = 1

    def to_host() -> None:
        managed.prefetch_pages("host")
        cumem.current_device().synchronize()

    def whole() -> None:
        managed.prefetch_pages(0)
        cumem.current_device().synchronize()

    def by_tiles() -> None:
        for _ in cumem.tiles(managed, 64 * MIB, evict=False):
            pass
        cumem.current_device().synchronize()

    yield (
        "managed memory, prefetch of all, for comparison",
        lambda: to.rate(managed.nbytes, whole, to_host),
    )
    yield (
        "managed memory, tiles of 64 MiB",
        lambda: to.rate(managed.nbytes, by_tiles, to_host),
    )


# -- saving --------------------------------------------------------------------------------

SHARDS = 8
#: How many files the shards are written to, in each of the cases.
FILES = (2, 4, SHARDS, 16)


def folders(to: Options) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each place that files are written to."""
    yield "page cache", to.folder
    yield "/dev/shm", Path("/dev/shm")


def saving(to: Options) -> Iterator[Measured]:
    """Write device memory to one file and to several."""
    import cumem

    part = to.long // max(FILES)
    tensors = {str(i): cumem.full(part, i, "u1", "device") for i in range(max(FILES))}
    whole = cumem.full(to.long, 1, "u1", "device")
    for where, parent in folders(to):

        def timed(save: Callable[[Path], object], parent: Path = parent) -> float:
            return rate_of_writing(to, parent, save)

        def shards(folder: Path, files: int) -> None:
            path = folder / "model.safetensors"
            most = to.long // files + MIB
            cumem.save_safetensors(path, tensors, max_shard_nbytes=most)

        def one(folder: Path) -> None:
            cumem.save_safetensors(folder / "model.safetensors", tensors)

        def raw(folder: Path) -> None:
            cumem.tofile(folder / "raw", whole)

        def array(folder: Path) -> None:
            cumem.save(folder / "array.npy", whole)

        def archive(folder: Path) -> None:
            cumem.savez(folder / "arrays.npz", **tensors)

        for files in FILES:
            yield (
                f"save_safetensors, {files} files, {where}",
                functools.partial(timed, functools.partial(shards, files=files)),
            )
        yield f"save_safetensors, one file, {where}", functools.partial(timed, one)
        yield f"tofile, {where}", functools.partial(timed, raw)
        yield f"save, {where}", functools.partial(timed, array)
        yield f"savez, {where}", functools.partial(timed, archive)


def rate_of_writing(to: Options, parent: Path, save: Callable[[Path], object]) -> float:
    """Return the rate at which `save` writes `to.long` bytes into an empty folder."""
    times = []
    for _ in range(1 + to.repeats):
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            os.sync()
            start = time.perf_counter()
            save(Path(folder))
            times.append(time.perf_counter() - start)
    return to.long / statistics.median(times[1:]) / 1e9


def write_by_threads(
    folder: Path, source: np.ndarray, files: int, threads: int
) -> None:
    """Write an array to files by pwrite, in pieces of 16 MiB that several threads take."""
    step = 16 * MIB
    view = source.data
    length = source.nbytes // files
    opened = [os.open(folder / str(i), os.O_CREAT | os.O_WRONLY) for i in range(files)]

    def write(place: tuple[int, int]) -> None:
        file, at = place
        begin = file * length + at
        end = min(begin + step, (file + 1) * length)
        while begin < end:
            begin += os.pwrite(opened[file], view[begin:end], begin - file * length)

    try:
        with ThreadPoolExecutor(threads) as pool:
            places = [(f, at) for at in range(0, length, step) for f in range(files)]
            list(pool.map(write, places))
    finally:
        for fd in opened:
            os.close(fd)


def saving_others(to: Options) -> Iterator[Measured]:
    """Write host memory by raw calls and NumPy, and device memory by PyTorch."""
    import cumem

    source = cumem.full(to.long, 1, "u1", "pinned").numpy()
    for where, parent in folders(to):
        several = [(files, (f"save_safetensors, {files} files",)) for files in FILES]
        single = (1, ("save_safetensors, one file", "tofile", "save", "savez"))
        for files, cases in (*several, single):
            for threads in sorted({1, 4, 8, files}):
                write = functools.partial(
                    write_by_threads, source=source, files=files, threads=threads
                )
                measured = functools.lru_cache(
                    functools.partial(rate_of_writing, to, parent, write)
                )
                for name in cases:
                    yield f"{name}, {where}: pwrite, {threads} threads", measured

        def archive(folder: Path) -> None:
            np.savez(folder / "arrays.npz", source)

        yield (
            f"savez, {where}: numpy.savez of host memory",
            functools.partial(rate_of_writing, to, parent, archive),
        )
        if has("torch") and has("safetensors"):
            yield from saving_of_torch(to, where, parent)


def saving_of_torch(to: Options, where: str, parent: Path) -> Iterator[Measured]:
    """Write device memory to one file by safetensors and by `torch.save`."""
    import torch
    from safetensors.torch import save_file

    part = to.long // SHARDS
    tensors = {
        str(i): torch.full((part,), i, dtype=torch.uint8, device="cuda")
        for i in range(SHARDS)
    }
    ways: dict[str, Callable[[Path], object]] = {
        "safetensors": lambda folder: save_file(tensors, folder / "model.safetensors"),
        "torch.save": lambda folder: torch.save(tensors, folder / "model.pt"),
    }
    for name, save in ways.items():
        yield (
            f"save_safetensors, one file, {where}: {name}",
            functools.partial(rate_of_writing, to, parent, save),
        )


# -- the first load of a process -----------------------------------------------------------


def model(to: Options) -> Path:
    """Return the index of a checkpoint in two shards, which is made if it is missing."""
    import cumem

    folder = to.folder / "links-model"
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(1)
        count = 2 * 36
        nbytes = to.long // count // 4 * 4
        content = rng.integers(0, 1 << 31, nbytes // 4, dtype="i4")
        tensors = {f"layer.{i}.weight": content + np.int32(i) for i in range(count)}
        cumem.save_safetensors(
            folder / "model.safetensors",
            tensors,
            max_shard_nbytes=nbytes * count // 2 + MIB,
        )
    return index


def loading(to: Options) -> Iterator[Measured]:
    """Load two shards in a process that has copied nothing before."""
    import cumem

    index = model(to)
    nbytes = sum(f.stat().st_size for f in index.parent.glob("*.safetensors"))
    cumem.current_device().synchronize()  # makes the context, which is not to be timed

    def first() -> float:
        start = time.perf_counter()
        loaded = cumem.load_safetensors(index)
        cumem.current_device().synchronize()
        seconds = time.perf_counter() - start
        del loaded
        return nbytes / seconds / 1e9

    def load() -> None:
        cumem.load_safetensors(index)
        cumem.current_device().synchronize()

    yield "load_safetensors, the first of a process", first
    yield "load_safetensors, later ones", lambda: to.rate(nbytes, load)


def loading_others(to: Options) -> Iterator[Measured]:
    """Load the same two shards by safetensors."""
    if not (has("torch") and has("safetensors")):
        return
    import torch
    from safetensors.torch import load_file

    index = model(to)
    files = sorted(index.parent.glob("*.safetensors"))
    nbytes = sum(f.stat().st_size for f in files)
    torch.zeros(1, device="cuda")

    def load() -> None:
        loaded = [load_file(file, device="cuda:0") for file in files]
        torch.cuda.synchronize()
        del loaded

    def first() -> float:
        start = time.perf_counter()
        load()
        return nbytes / (time.perf_counter() - start) / 1e9

    yield "load_safetensors, the first of a process: safetensors", first
    yield (
        "load_safetensors, later ones: safetensors",
        lambda: nbytes / statistics.median(to.times_of(load)) / 1e9,
    )


# -- processor time, and other threads -----------------------------------------------------


def processor_seconds(call: Call, count: int) -> float:
    """Return the processor time that all threads spend on one call, in ms."""
    call()
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count * 1e3


def beside(to: Options, nbytes: int, call: Call, count: int) -> float:
    """Return the rate of a call while `count` other threads compute."""
    from threads import computing  # not at the top, because it imports cumem

    with computing(count):
        return to.rate(nbytes, call)


def processor(to: Options) -> Iterator[Measured]:
    """Measure a copy's processor time, and its rate while other threads compute."""
    import cumem

    device = cumem.empty_device(to.largest, "u1")
    array = np.ones(to.largest, "u1")
    size = name_of(to.largest)
    yield from of_one_array(
        to, size, lambda: cumem.copy(device, array), lambda: cumem.copy(array, device)
    )
    little, small = device[: 64 * KIB], np.ones(64 * KIB, "u1")
    yield (
        "64 KiB up, processor",
        lambda: processor_seconds(lambda: cumem.copy(little, small), 2000),
    )


def of_one_array(
    to: Options, size: str, up: Call, down: Call, who: str = ""
) -> Iterator[Measured]:
    """Measure a copy's rate alone and beside threads, and its processor time."""
    for name, call in (("up", up), ("down", down)):
        yield (
            f"{size} {name}{who}",
            functools.partial(to.rate, to.largest, call),
        )
        yield (
            f"{size} {name}, processor{who}",
            functools.partial(processor_seconds, call, 2 * to.repeats),
        )
        for count in (1, 3):
            yield (
                f"{size} {name}, beside {count} threads{who}",
                functools.partial(beside, to, to.largest, call, count),
            )


def processor_others(to: Options) -> Iterator[Measured]:
    """Measure a copy of NumPy on the host, and copies of PyTorch."""
    size = name_of(to.largest)
    source, target = np.ones(to.largest, "u1"), np.ones(to.largest, "u1")
    yield (
        f"{size} up, processor: NumPy's copy",
        lambda: processor_seconds(lambda: np.copyto(target, source), 2 * to.repeats),
    )
    if not has("torch"):
        return
    import torch

    host = torch.from_numpy(source)
    device = torch.empty(to.largest, dtype=torch.uint8, device="cuda")

    def up() -> None:
        device.copy_(host)

    def down() -> None:
        host.copy_(device)

    yield from of_one_array(to, size, up, down, ": torch")


# -- many arrays ---------------------------------------------------------------------------


def mixed_sizes() -> list[int]:
    """Return the bytes of 600 arrays: log-normal, median 160 kB, 853 MB together."""
    # The mean of a log-normal distribution is its median times exp(sigma squared / 2).
    sigma = math.sqrt(2 * math.log(853e6 / 600 / 160e3))
    sizes = np.random.default_rng(5).lognormal(math.log(160e3), sigma, 600)
    return [max(4, int(n)) // 4 * 4 for n in sizes * (853e6 / sizes.sum())]


def many(to: Options) -> Iterator[Measured]:
    """Copy 600 arrays of mixed sizes up, and down, each time in one call."""
    import cumem

    sizes = mixed_sizes()
    arrays = [np.ones(n // 4, "f4") for n in sizes]
    buffers = [cumem.empty_device(n // 4, "f4") for n in sizes]
    ups = list(zip(buffers, arrays, strict=True))
    downs = list(zip(arrays, buffers, strict=True))
    nbytes = sum(sizes)
    yield "600 mixed arrays up", lambda: to.rate(nbytes, lambda: cumem.copy_many(ups))
    yield (
        "600 mixed arrays down",
        lambda: to.rate(nbytes, lambda: cumem.copy_many(downs)),
    )


def many_others(to: Options) -> Iterator[Measured]:
    """Copy the same arrays by PyTorch, in a loop."""
    if not has("torch"):
        return
    import torch

    sizes = mixed_sizes()
    hosts = [torch.ones(n // 4) for n in sizes]
    devices = [torch.empty(n // 4, device="cuda") for n in sizes]
    ends = {"up": (devices, hosts), "down": (hosts, devices)}

    def copy(name: str) -> None:
        for dst, src in zip(*ends[name], strict=True):
            dst.copy_(src, non_blocking=True)
        torch.cuda.synchronize()

    for name in ends:
        yield (
            f"600 mixed arrays {name}: torch",
            functools.partial(to.rate, sum(sizes), functools.partial(copy, name)),
        )


# -- the run -------------------------------------------------------------------------------

Group = Callable[[Options], Iterator[Measured]]
#: For each group, the cases of cumem, and those of the others if there are any.
GROUPS: dict[str, tuple[Group, Group | None]] = {
    "two GPUs": (two_gpus, two_gpus_others),
    "pipelines": (pipelines, None),
    "saving": (saving, saving_others),
    "loading": (loading, loading_others),
    "processor": (processor, processor_others),
    "many": (many, many_others),
}


def name_of(nbytes: int) -> str:
    """Return a number of bytes as a short text, such as "4 MiB"."""
    for unit, text in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {text}"
    return f"{nbytes} B"


def measure(group: Group, to: Options, only: str) -> Figures:
    """Return the figures of those cases of a group whose names match `only`."""
    figures: Figures = {}
    for name, figure in group(to):
        if re.search(only, name):
            try:
                figures[name] = figure()
            except Exception as error:  # a peer's failure does not end the run
                figures[name] = f"{type(error).__name__}: {error}"
    return figures


def run(
    site: Path, group: str, theirs: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a group in a fresh process of the build in `site`."""
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, __file__, "--measure", group, "--only", options.only]
    command += ["--theirs"] if theirs else []
    for name in ("largest", "long", "repeats", "folder"):
        command += [f"--{name}", str(getattr(options, name))]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if answer.returncode != 0:
        print(f"{group}: a process ended with {answer.returncode}", file=sys.stderr)
        return {"figures": {}, "machine": {}}
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def median(figures: list[float | str]) -> float | None:
    """Return the median of the figures that are not errors, or None if all are."""
    numbers = [figure for figure in figures if not isinstance(figure, str)]
    return statistics.median(numbers) if numbers else None


def text_of(figure: float | None) -> str:
    """Return a figure as a cell of the table."""
    return f"{figure:9.2f}" if figure is not None else "        -"


def show(cases: list[dict[str, Any]]) -> None:
    """Print each case with the figures of the others for the same work."""
    print(f"{'case':50} {'old':>9} {'new':>9}   new / old   others")
    for case in cases:
        old, new = median(case["old"]), median(case["new"])
        ratio = f"{new / old:9.3f}" if old and new else "        -"
        others = ", ".join(
            f"{name} {text_of(median(figures)).strip()}"
            for name, figures in case["others"].items()
        )
        print(f"{case['case']:50} {text_of(old)} {text_of(new)}   {ratio}   {others}")


def collect(rounds: list[dict[str, Figures]]) -> list[dict[str, Any]]:
    """Join the figures of all rounds into one entry for each case."""
    cases: dict[str, dict[str, Any]] = {}
    for each in rounds:
        for who, figures in each.items():
            for name, figure in figures.items():
                key, _, other = name.partition(": ")
                case = cases.setdefault(
                    key, {"case": key, "old": [], "new": [], "others": {}}
                )
                if who == "others":
                    case["others"].setdefault(other, []).append(figure)
                else:
                    case[who].append(figure)
    return list(cases.values())


def compare(options: argparse.Namespace) -> None:
    """Measure both wheels and the others in turn, print the table and write the file."""
    rounds: list[dict[str, Figures]] = []
    facts: dict[str, str] = {}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        sites = {}
        for name, wheel in zip(("old", "new"), options.wheels, strict=True):
            sites[name] = Path(folder) / name
            zipfile.ZipFile(wheel).extractall(sites[name])
            compileall.compile_dir(sites[name], quiet=1)  # as pip does
        for i in range(options.rounds):
            turns = ["old", "new", "others"][:: 1 if i % 2 == 0 else -1]
            for group, (_, others) in GROUPS.items():
                if not re.search(options.groups, group):
                    continue
                each: dict[str, Figures] = {}
                for who in turns:
                    if who == "others" and others is None:
                        continue
                    site = sites["new" if who == "others" else who]
                    answer = run(site, group, who == "others", options)
                    each[who] = answer["figures"]
                    facts = answer["machine"] or facts
                rounds.append(each)
                print(f"round {i + 1}: {group}", file=sys.stderr, flush=True)
                write(options, facts, started, collect(rounds))
    cases = collect(rounds)
    show(cases)
    write(options, facts, started, cases)


def write(
    options: argparse.Namespace,
    facts: dict[str, str],
    started: str,
    cases: list[dict[str, Any]],
) -> None:
    """Write the file after each round, so that an interrupted run keeps its figures."""
    if options.json:
        commits = dict(zip(("old", "new"), options.names, strict=True))
        found = {"commit": options.names[1], "commits": commits, "started": started}
        units = {"figures": "GB/s, or ms in cases of processor time"}
        document = facts | found | units | {"cases": cases}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--largest", type=int, default=GIB)
    parser.add_argument("--long", type=int, default=4 * GIB)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--groups", default="", help="only groups whose name matches this regex"
    )
    parser.add_argument(
        "--only", default="", help="only cases whose name matches this regex"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", nargs=2, default=["old", "new"])
    parser.add_argument("--measure", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        to = Options(options.largest, options.long, options.folder, options.repeats)
        ours, theirs = GROUPS[options.measure]
        group = theirs if options.theirs else ours
        assert group is not None
        figures = measure(group, to, options.only)
        print(json.dumps({"machine": machine(), "figures": figures}))
        return
    if len(options.wheels) != 2:
        parser.error("two wheels are needed")
    compare(options)


if __name__ == "__main__":
    main()
