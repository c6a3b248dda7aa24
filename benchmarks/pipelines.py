# SPDX-License-Identifier: Apache-2.0
"""Compare `cumem.chunks` and `cumem.pipeline` with single stages and handwritten loops.

    python benchmarks/pipelines.py --json benchmarks/results/pipelines-h200.json

First the script measures the three stages of a pipeline (copy in, work, and copy out), each
alone and all at the same time. Then it sums the rows of a file that is larger than the
memory that the device may use. The file is read through numpy.memmap, by cumem's functions
and by loops that are written by hand with cumem's streams and, if they are installed, with
CuPy and PyTorch. All results are checked. The script also runs on the emulated device, and
then says that the figures are not a GPU's.
"""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.transfers import pipelines
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

MIB, GIB = 1 << 20, 1 << 30
WIDTH = 1024  # how many float32 a row has
CHUNK = 64 * MIB  # how much the handwritten loops copy at a time
CAP = 2 * GIB  # how much device memory the work on the file may use
LONG_ROWS = GIB // WIDTH // 4


@dataclass
class Case:
    """One way to do one piece of work.

    Parameters
    ----------
    group : str
        ``"overlap"`` (the three stages) or ``"file"``.
    key : str
        For ``"overlap"`` the kind of memory and how much leaves the device, and for
        ``"file"`` the function or the handwritten loop.
    nbytes : int
        The bytes that are copied to the device.
    seconds : dict
        The time of each stage alone, and that of the whole work as ``"all"``.
    lines : int
        How many lines of code the work takes, without docstrings, or 0 if not counted.
    device_nbytes : int
        The most by which the device's free memory fell.
    samples : list
        How many bytes cumem had reserved on the device, over time.
    error : str
        The reason if it was not measured.
    """

    group: str
    key: str
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    lines: int = 0
    device_nbytes: int = 0
    samples: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def slowest(self) -> float:
        """Return the seconds of the slowest stage alone."""
        return max(s for name, s in self.seconds.items() if name != "all")


def line_of(case: Case) -> str:
    """Return a row of the table."""
    if case.error:
        return f"{case.group:8} {case.key:34} {case.error}"
    rate = case.nbytes / case.seconds["all"] / 1e9
    stages = " ".join(f"{k} {s * 1e3:.0f}" for k, s in case.seconds.items())
    text = f"{case.group:8} {case.key:34} {rate:7.1f} GB/s  ms: {stages}"
    if len(case.seconds) > 1:
        text += f"  all/slowest {case.seconds['all'] / case.slowest:.3f}"
    if case.lines:
        text += f"  lines {case.lines}"
    if case.device_nbytes:
        text += f"  device {format_nbytes(case.device_nbytes)}"
    return text


def library(name: str) -> Any:
    """Import a library, or return None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# -- the work on a chunk ---------------------------------------------------------------


class Worker:
    """A kernel whose duration can be chosen."""

    def __init__(self) -> None:
        self.xp: Any = np if cumem.backend() == "emulated" else library("cupy")
        if self.xp is None:
            raise SystemExit("the benchmark needs CuPy for its kernels")
        self.rounds = 1
        self._kernel: Callable[..., object] = self._on_host
        if self.xp is not np:
            self._kernel = self.xp.ElementwiseKernel(
                "float32 x, int32 n",
                "float32 y",
                "float a = x; for (int i = 0; i < n; i++) { a = a * 0.5f + 1.0f; } y = a",
                "rounds",
            )

    @staticmethod
    def _on_host(x: Any, n: int, y: Any) -> None:
        """Do the work of the kernel by NumPy."""
        y[...] = x
        for _ in range(n):
            y *= np.float32(0.5)
            y += np.float32(1)

    def __call__(self, x: Any, y: Any, stream: object) -> None:
        """Queue the work on `x`, which writes its result to `y`."""
        x, y = self.xp.from_dlpack(x), self.xp.from_dlpack(y)
        self._kernel(x[:, : y.shape[1]], self.rounds, y)

    def tune(self, x: cumem.Buffer, y: cumem.Buffer, seconds: float) -> None:
        """Adjust the work on `x` so that it takes about `seconds`."""
        self.rounds = 200 if self.xp is not np else 1
        self(x, y, None)
        for _ in range(2 if self.xp is not np else 0):
            spent = seconds_of(lambda: self(x, y, None))
            self.rounds = max(1, int(self.rounds * seconds / spent))


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call and of the work that it has queued."""
    stream = cumem.current_stream(0)
    stream.synchronize()
    begin = time.perf_counter()
    call()
    stream.synchronize()
    return time.perf_counter() - begin


# -- three stages ----------------------------------------------------------------------


def parts_of(rows: int, step: int) -> Iterator[slice]:
    """Cut so many rows into slices of `step` rows."""
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def only_in(src: Any, step: int) -> None:
    """Copy all rows to the device, and do nothing with them."""
    for _ in cumem.chunks(src, step * WIDTH * 4):
        pass


def only_work(worker: Worker, x: cumem.Buffer, y: cumem.Buffer, count: int) -> None:
    """Queue the work on one chunk `count` times, without copies."""
    for _ in range(count):
        worker(x, y, None)


def only_out(y: cumem.Buffer, out: Any, step: int) -> None:
    """Copy the same chunk from the device to all rows of `out`."""
    leaving: collections.deque[cumem.Transfer] = collections.deque()
    for part in parts_of(len(out), step):
        if len(leaving) == 3:
            leaving.popleft().wait()
        leaving.append(cumem.copy_async(out[part], y[: part.stop - part.start]))
    for transfer in leaving:
        transfer.wait()


def in_and_out(src: Any, x: cumem.Buffer, y: cumem.Buffer, out: Any) -> None:
    """Copy in and out at the same time, in long copies and without work."""
    streams = cumem.Stream(), cumem.Stream()

    def come() -> None:
        for part in parts_of(len(src), len(x)):
            cumem.copy_async(x[: part.stop - part.start], src[part], stream=streams[0])
        streams[0].synchronize()

    thread = threading.Thread(target=come)
    thread.start()
    for part in parts_of(len(out), len(y)):
        cumem.copy_async(out[part], y[: part.stop - part.start], stream=streams[1])
    streams[1].synchronize()
    thread.join()


def overlap(worker: Worker, nbytes: int, chunk: int, repeats: int) -> Iterator[Case]:
    """Measure the stages with both kinds of memory, while a part or all of it leaves."""
    rows = nbytes // WIDTH // 4
    for kind in ("pinned", "numpy"):
        of_ours = (
            chunk if kind == "pinned" else max(chunk, nbytes // 64)
        )  # the defaults
        step = of_ours // WIDTH // 4
        if kind == "pinned":
            src: Any = cumem.empty_pinned((rows, WIDTH), "f4")
            whole: Any = cumem.empty_pinned((rows, WIDTH), "f4")
        else:
            src, whole = np.empty((rows, WIDTH), "f4"), np.empty((rows, WIDTH), "f4")
        host = src.numpy() if kind == "pinned" else src
        host[:] = np.arange(WIDTH, dtype="f4")
        host[:, 0] = np.arange(rows)
        target = whole.numpy() if kind == "pinned" else whole
        target[:] = 0
        for share, work in ((4, 0.9), (2, 0.9), (1, 0.9), (2, 1.5)):
            out = whole.reshape(-1)[: rows * (WIDTH // share)]
            out = out.reshape(rows, WIDTH // share)
            key = f"{kind}, out 1/{share}, work {work} of in"
            yield one_overlap(worker, key, work, (src, out), step, repeats)


def one_overlap(
    worker: Worker,
    key: str,
    work_share: float,
    ends: tuple[Any, Any],
    step: int,
    repeats: int,
) -> Case:
    """Time each stage alone and the whole pipeline, and check its results."""
    src, out = ends
    count = -(-len(src) // step)
    x = cumem.empty_device((step, WIDTH), "f4")
    y = cumem.empty_device((step, out.shape[1]), "f4")
    long_x = cumem.empty_device((min(len(src), LONG_ROWS), WIDTH), "f4")
    long_y = cumem.empty_device((len(long_x), out.shape[1]), "f4")
    cumem.copy(x, src[:step])
    only_in(src, step)
    alone = seconds_of(lambda: only_in(src, step))
    worker.tune(x, y, work_share * alone / count)
    calls: dict[str, Callable[[], object]] = {
        "in": lambda: only_in(src, step),
        "work": lambda: only_work(worker, x, y, count),
        "out": lambda: only_out(y, out, step),
        "both": lambda: in_and_out(src, long_x, long_y, out),
        "all": lambda: cumem.pipeline(worker, src, out, rows=step),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):  # all alternate, so that drift of the machine affects all
        for name, call in calls.items():
            best[name] = min(best[name], seconds_of(call))
    case = Case("overlap", key, src.nbytes, best)
    for part in (slice(0, step), slice(len(src) - step, len(src))):
        cumem.copy(x, src[part])
        worker(x, y, None)
        if not np.array_equal(y.to_numpy(), cumem.asnumpy(out[part])):
            raise SystemExit(f"{key}: the results are wrong")
    return case


# -- the sums of a file ----------------------------------------------------------------

# Each of the next functions sums the rows of `data` into `out`, and brings `step` rows to
# the device at a time. They have no docstrings, because lines_of() counts their lines.


def cupy_naive(cp: Any, data: np.ndarray, out: np.ndarray, step: int) -> None:
    for begin in range(0, len(data), step):
        x = cp.asarray(data[begin : begin + step])
        out[begin : begin + step] = x.sum(axis=1).get()


def cupy_buffered(cp: Any, data: np.ndarray, out: np.ndarray, step: int) -> None:
    shape = (step, data.shape[1])
    count = int(np.prod(shape))
    hosts = [
        np.frombuffer(cp.cuda.alloc_pinned_memory(count * 4), "f4", count)
        for _ in range(2)
    ]
    hosts = [host.reshape(shape) for host in hosts]
    devices = [cp.empty(shape, "f4") for _ in range(2)]
    copying, working = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream()
    came = [cp.cuda.Event() for _ in range(2)]
    used = [cp.cuda.Event() for _ in range(2)]
    sums = []
    for number, begin in enumerate(range(0, len(data), step)):
        k = number % 2
        piece = data[begin : begin + step]
        rows = len(piece)
        came[k].synchronize()
        np.copyto(hosts[k][:rows], piece)
        with copying:
            copying.wait_event(used[k])
            devices[k][:rows].set(hosts[k][:rows])
            came[k].record(copying)
        with working:
            working.wait_event(came[k])
            sums.append(devices[k][:rows].sum(axis=1))
            used[k].record(working)
    working.synchronize()
    for number, each in enumerate(sums):
        out[number * step : number * step + len(each)] = each.get()


def torch_naive(torch: Any, data: np.ndarray, out: np.ndarray, step: int) -> None:
    for begin in range(0, len(data), step):
        x = torch.from_numpy(data[begin : begin + step]).cuda()
        out[begin : begin + step] = x.sum(1).cpu().numpy()


def torch_buffered(torch: Any, data: np.ndarray, out: np.ndarray, step: int) -> None:
    shape = (step, data.shape[1])
    hosts = [torch.empty(shape, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(shape, device="cuda") for _ in range(2)]
    copying, working = torch.cuda.Stream(), torch.cuda.Stream()
    came = [torch.cuda.Event() for _ in range(2)]
    used = [torch.cuda.Event() for _ in range(2)]
    sums = []
    for number, begin in enumerate(range(0, len(data), step)):
        k = number % 2
        piece = torch.from_numpy(data[begin : begin + step])
        rows = len(piece)
        came[k].synchronize()
        hosts[k][:rows].copy_(piece)
        with torch.cuda.stream(copying):
            copying.wait_event(used[k])
            devices[k][:rows].copy_(hosts[k][:rows], non_blocking=True)
            came[k].record(copying)
        with torch.cuda.stream(working):
            working.wait_event(came[k])
            sums.append(devices[k][:rows].sum(1))
            used[k].record(working)
    working.synchronize()
    for number, each in enumerate(sums):
        out[number * step : number * step + len(each)] = each.cpu().numpy()


def cumem_by_hand(xp: Any, data: np.ndarray, out: np.ndarray, step: int) -> None:
    parts = [slice(b, min(b + step, len(data))) for b in range(0, len(data), step)]
    devices = [cumem.empty_device((step, data.shape[1]), "f4") for _ in range(3)]
    stream = cumem.current_stream(0)

    def start(number: int) -> cumem.Transfer:
        piece = data[parts[number]]
        x = devices[number % 3][: len(piece)]
        return cumem.copy_async(x, piece, after=stream)

    coming = [start(number) for number in range(min(2, len(parts)))]
    leaving = []
    for number, part in enumerate(parts):
        if number + 2 < len(parts):
            coming.append(start(number + 2))
        coming[number].order(stream)
        x = devices[number % 3][: part.stop - part.start]
        y = cumem.empty_device(len(x), "f4")
        xp.sum(xp.from_dlpack(x), axis=1, out=xp.from_dlpack(y))
        leaving.append(cumem.copy_async(out[part], y, after=stream))
    for transfer in leaving:
        transfer.wait()


def cumem_chunks(xp: Any, data: np.ndarray, out: np.ndarray, step: int) -> None:
    for part, x in cumem.chunks(data, step * data.shape[1] * 4):
        y = cumem.empty_device(len(x), "f4")
        xp.sum(xp.from_dlpack(x), axis=1, out=xp.from_dlpack(y))
        cumem.copy(out[part], y)


def cumem_pipeline(xp: Any, data: np.ndarray, out: np.ndarray, step: int) -> None:
    def work(x: Any, y: Any, stream: object) -> None:
        xp.sum(xp.from_dlpack(x), axis=1, out=xp.from_dlpack(y))

    cumem.pipeline(work, data, out, rows=step)


def lines_of(function: Callable[..., object]) -> int:
    """Count the lines of a function's body that are not empty."""
    source = textwrap.dedent(inspect.getsource(function))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.FunctionDef)
    lines = source.splitlines()[body.body[0].lineno - 1 :]
    return sum(1 for line in lines if line.strip())


class Watch:
    """Measures how far the device's free memory falls within a ``with`` block."""

    def __enter__(self) -> Watch:
        self.before = self.least = cumem.memory_info(0).free
        self.samples: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        """Read the free memory every 20 ms until the block ends."""
        while not self._over.wait(0.02):
            info = cumem.memory_info(0)
            self.least = min(self.least, info.free)
            self.samples.append(info.reserved)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def write_file(path: Path, nbytes: int) -> None:
    """Write a file of random rows, whose parts of `CHUNK` bytes all differ."""
    block = np.random.default_rng(5).random((CHUNK // 4 // WIDTH, WIDTH), "f4")
    with path.open("wb") as file:
        for number in range(0, nbytes, CHUNK):
            block[:, 0] = number // CHUNK
            file.write(memoryview(block).cast("B")[: nbytes - number])


def stages_of_file(xp: Any, data: np.ndarray, step: int) -> dict[str, float]:
    """Return the seconds of only copying the file in, and of only computing the sums."""
    x = cumem.array(data[:step], kind="device")
    sums = cumem.empty_device(step, "f4")

    def work() -> None:
        for _ in parts_of(len(data), step):
            xp.sum(xp.from_dlpack(x), axis=1, out=xp.from_dlpack(sums))

    only_in(data, step)
    return {"in": seconds_of(lambda: only_in(data, step)), "work": seconds_of(work)}


def of_file(xp: Any, path: Path, chunk: int, repeats: int) -> Iterator[Case]:
    """Measure all ways to sum the rows of the file, and compare their sums."""
    data = np.memmap(path, "f4", "r").reshape(-1, WIDTH)
    of_ours = max(chunk, min(4 * chunk, data.nbytes // 64)) // WIDTH // 4  # the default
    ways: list[tuple[Callable[..., None], Any, str]] = [
        (cumem_pipeline, xp, "cumem.pipeline"),
        (cumem_chunks, xp, "cumem.chunks, out one by one"),
        (cumem_by_hand, xp, "cumem by hand"),
        (cupy_naive, library("cupy"), "CuPy, naive"),
        (cupy_buffered, library("cupy"), "CuPy, two buffers by hand"),
        (torch_naive, library("torch"), "PyTorch, naive"),
        (torch_buffered, library("torch"), "PyTorch, two buffers by hand"),
    ]
    stages = stages_of_file(xp, data, of_ours)
    expected: np.ndarray | None = None
    cumem.trim()
    for way, module, key in ways:
        step = of_ours if "cumem" in key else chunk // WIDTH // 4
        case = Case("file", key, data.nbytes, dict(stages), lines_of(way))
        if module is None or (module is not np and cumem.backend() == "emulated"):
            case.error = "not installed"
            yield case
            continue
        out = np.zeros(len(data), "f4")
        spent = []
        with Watch() as watch:
            for _ in range(repeats if "naive" not in key else 1):
                begin = time.perf_counter()
                way(module, data, out, step)
                spent.append(time.perf_counter() - begin)
        case.seconds["all"] = min(spent)
        case.device_nbytes = watch.before - watch.least
        every = max(1, len(watch.samples) // 40)
        case.samples = (
            watch.samples[::every] if module is xp and way is cumem_pipeline else []
        )
        expected = out if expected is None else expected
        if not np.allclose(out, expected, rtol=1e-5):
            raise SystemExit(f"{key}: the results are wrong")
        if module is library("cupy") and module is not None:
            module.get_default_memory_pool().free_all_blocks()
        if key.startswith("PyTorch"):
            module.cuda.empty_cache()
        cumem.trim()
        yield case
    step = of_ours
    check = np.concatenate([data[:step].sum(1), data[-step:].sum(1)])
    assert expected is not None
    if not np.allclose(
        check, np.concatenate([expected[:step], expected[-step:]]), 1e-4
    ):
        raise SystemExit("the sums are wrong")


# -- the timeline ----------------------------------------------------------------------


class Sightings:
    """Notes when copies are done, in one thread that asks each of them again and again.

    A thread for each copy, which waits for it, would take processors from the copies.
    """

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._pending: list[tuple[cumem.Transfer, str, int]] = []
        self._counts = {"in": 0, "out": 0}
        self._over = False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def add(self, transfer: cumem.Transfer, stage: str) -> None:
        """Watch a copy, which is the next one of its stage."""
        self._pending.append((transfer, stage, self._counts[stage]))
        self._counts[stage] += 1

    def _look(self) -> None:
        while self._pending or not self._over:
            for each in self._pending[:]:
                transfer, stage, number = each
                if transfer.done:
                    end = time.perf_counter()
                    self.spans.append(span(stage, number, end - transfer.seconds, end))
                    self._pending.remove(each)
            time.sleep(5e-5)

    def close(self) -> None:
        """Wait until all copies have been seen to end."""
        self._over = True
        self._thread.join()


def span(stage: str, number: int, begin: float, end: float) -> dict[str, Any]:
    """Return one entry of the timeline."""
    return {"stage": stage, "chunk": number, "begin": begin, "end": end}


def timeline(worker: Worker, nbytes: int, chunk: int) -> list[dict[str, Any]]:
    """Return when each stage of each chunk began and ended, in seconds.

    CUDA events time the work. A copy counts as ended when `Sightings` sees that it has,
    and as begun `Transfer.seconds` before that.
    """
    rows, step = nbytes // WIDTH // 4, chunk // WIDTH // 4
    src = cumem.full((rows, WIDTH), 1, "f4", "pinned")
    out = cumem.empty_pinned((rows, WIDTH // 2), "f4")
    x = cumem.full((step, WIDTH), 1, "f4", "device")
    worker.tune(x, cumem.empty_device((step, WIDTH // 2), "f4"), chunk / 60e9)
    stream = cumem.current_stream(0)
    events = [(cumem.Event(), cumem.Event()) for _ in range(2 * -(-rows // step))]
    marks: list[tuple[cumem.Event, cumem.Event]] = []
    before: Any = pipelines._core.copy_async

    def work(x: Any, y: Any, stream: Any) -> None:
        begin, end = events[len(marks)]
        begin.record(stream)
        worker(x, y, stream)
        end.record(stream)
        marks.append((begin, end))

    def copy_async(dst: Any, src: Any, **more: Any) -> cumem.Transfer:
        transfer: cumem.Transfer = before(dst, src, **more)
        seen.add(transfer, "in" if isinstance(dst, cumem.DeviceBuffer) else "out")
        return transfer

    cumem.pipeline(work, src, out, rows=step)  # warm
    count = len(marks)
    start = cumem.Event().record(stream)
    start.synchronize()
    zero = time.perf_counter()
    seen = Sightings()
    pipelines._core.copy_async = copy_async
    try:
        cumem.pipeline(work, src, out, rows=step)
    finally:
        pipelines._core.copy_async = before
        seen.close()
    spans = [
        span(s["stage"], s["chunk"], s["begin"] - zero, s["end"] - zero)
        for s in seen.spans
    ]
    for number, (begin, end) in enumerate(marks[count:]):
        times = begin.seconds_since(start), end.seconds_since(start)
        spans.append(span("work", number, *times))
    return sorted(spans, key=lambda each: float(each["begin"]))


def plot(spans: list[dict[str, Any]], path: str) -> None:
    """Draw a timeline into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
    lanes = ["out", "work", "in"]
    for each in spans:
        axes.barh(
            lanes.index(each["stage"]),
            1e3 * (each["end"] - each["begin"]),
            left=1e3 * each["begin"],
            height=0.7,
            color=f"C{each['chunk'] % 10}",
            edgecolor="white",
            alpha=0.8,
        )
    axes.set_yticks(range(3), ["copy out", "work", "copy in"])
    axes.set_xlabel("ms; a colour is a chunk")
    figure.savefig(path, dpi=110)


def cap_others() -> None:
    """Limit the device memory of CuPy and PyTorch to `CAP` bytes."""
    if cumem.backend() == "emulated":
        return
    if cupy := library("cupy"):
        cupy.get_default_memory_pool().set_limit(size=CAP)
    if torch := library("torch"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP / total)


def main() -> None:
    """Measure and print."""
    run = Run(
        __doc__ or "",
        folder={"default": None, "help": "where to put the file (default: tempfile's)"},
        largest={"type": int, "default": 40, "help": "the file's size in GiB at most"},
        parts={"default": "overlap,timeline,file", "help": "which of these"},
        plot={"metavar": "FILE", "help": "draw the timeline into a PNG file"},
    )
    quick = run.options.quick
    emulated = cumem.backend() == "emulated"
    run.begin(emulated)
    worker = Worker()
    chunk = MIB if quick else CHUNK
    nbytes = 8 * MIB if quick else 8 * GIB
    repeats = 1 if quick else 3
    parts = run.options.parts.split(",")
    run.note(1, chunk=chunk, cap=CAP)
    if "overlap" in parts:
        run.show(overlap(worker, nbytes, chunk, repeats), line_of)
        cumem.trim()
    if "timeline" in parts:
        spans = timeline(worker, 16 * chunk, chunk)
        run.note(1, timeline=spans)
        if run.options.plot:
            plot(spans, run.options.plot)
    if "file" in parts:
        with tempfile.TemporaryDirectory(dir=run.options.folder) as folder:
            free = shutil.disk_usage(folder).free * 8 // 10
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 6 // 10
            most = 8 * MIB if quick else min(free, memory, run.options.largest * GIB)
            path = Path(folder) / "rows.bin"
            begin = time.perf_counter()
            write_file(path, most // CHUNK * CHUNK or most)
            run.note(1, write_seconds=time.perf_counter() - begin)
            cap_others()
            with cumem.limit("device", 16 * chunk if quick else CAP, 0):
                run.show(of_file(worker.xp, path, chunk, repeats), line_of)
    run.end()


if __name__ == "__main__":
    main()
