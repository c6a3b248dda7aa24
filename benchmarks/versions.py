# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of two builds of cumem on one machine.

    python benchmarks/versions.py OLD.whl NEW.whl [--rounds 5] [--only TEXT] [--json FILE]

Each round runs all cases in a fresh process of one build, and then of the other. A round
gives the median time of a case, and the case's figure is the median over the rounds. The
ratio is the new build's figure divided by the old one's, so below 1 the new build is
faster. Beside it the output shows the ratio of the shortest times of all rounds. If the two
ratios differ much, the clock or the load of the host has changed between rounds. Processor
time is that of all threads of the process.
"""

from __future__ import annotations

import argparse
import compileall
import functools
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Case = tuple[str, Callable[[], object], int]


SHORT = 100  # how many short calls are timed together


def repeats(nbytes: int) -> int:
    """Return how often a copy of so many bytes is timed in a round."""
    return 40 * SHORT if nbytes <= 64 * KIB else 300 if nbytes <= 4 * MIB else 15


def name_of(nbytes: int) -> str:
    """Return a number of bytes as a short text, such as "4 MiB"."""
    for unit, text in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {text}"
    return f"{nbytes} B"


def copies(largest: int) -> Iterator[Case]:
    """Copy one array up and down."""
    import numpy as np

    import cumem

    stream = cumem.Stream()
    for n in (256, 64 * KIB, MIB, 4 * MIB, 64 * MIB, largest):
        array, device = np.ones(n, "u1"), cumem.full(n, 1, "u1", "device")
        pinned = cumem.full(n, 1, "u1", "pinned")
        size, times = name_of(n), repeats(n)

        def down_async(array=array, device=device) -> None:
            cumem.copy_async(array, device, stream=stream).wait()

        def up_async(array=array, device=device) -> None:
            cumem.copy_async(device, array, stream=stream).wait()

        yield f"up {size}", lambda d=device, a=array: cumem.copy(d, a), times
        yield f"down {size}", lambda d=device, a=array: cumem.copy(a, d), times
        yield f"up on a stream {size}", up_async, times
        yield f"down on a stream {size}", down_async, times
        yield f"pinned up {size}", lambda d=device, p=pinned: cumem.copy(d, p), times
        yield f"pinned down {size}", lambda d=device, p=pinned: cumem.copy(p, d), times
        if n >= MIB:
            yield f"down, new array {size}", lambda d=device: d.to_numpy(), times
            half, every = device[: n // 8].view("f4"), np.ones(n // 16, "f4")[::2]
            yield (
                f"every second float {size}",
                lambda d=half[: every.size], a=every: cumem.copy(d, a),
                times,
            )


def shapes(largest: int) -> Iterator[Case]:
    """Copy rows, planes, many pieces, and into a long new array."""
    import numpy as np

    import cumem

    rows = np.ones((largest // (64 * KIB), 64 * KIB), "u1")[:, : 32 * KIB]
    halves = cumem.empty_device(rows.shape, "u1")
    yield "rows of 32 KiB in 64", lambda: cumem.copy(halves, rows), 9
    pixels = np.ones((largest // (4 * MIB), 1024, 1024, 3), "u1").transpose(0, 3, 1, 2)
    planes = cumem.empty_device(pixels.shape, "u1")
    yield "pixels to planes", lambda: cumem.copy(planes, pixels), 9
    pieces = [np.ones(160 * KIB, "u1") for _ in range(600)]
    targets = [cumem.empty_device(p.shape, "u1") for p in pieces]
    up = list(zip(targets, pieces, strict=True))
    down = list(zip(pieces, targets, strict=True))
    yield "600 pieces up", lambda: cumem.copy_many(up), 9
    yield "600 pieces down", lambda: cumem.copy_many(down), 9
    count = 4096
    small = cumem.full((count, 2, 4 * KIB), 1, "u1", "pinned")
    room = cumem.empty_device((count, 2, 4 * KIB), "u1")
    pinned = [(room[i, 0], small[i, 0]) for i in range(count)]
    yield "4,096 pinned pieces", lambda: cumem.copy_many(pinned), 15
    long = cumem.full(4 * largest, 1, "u1", "device")
    yield "down, new array, four times the largest", lambda: long.to_numpy(), 3


def files(largest: int) -> Iterator[Case]:
    """Read a file in the page cache."""
    import numpy as np

    import cumem

    device = cumem.empty_device(largest, "u1")
    with tempfile.NamedTemporaryFile() as file:
        np.ones(largest, "u1").tofile(file.name)
        mapped = np.memmap(file.name, "u1", "r")
        yield "np.memmap up", lambda: cumem.copy(device, mapped), 5
        yield "fromfile to the device", lambda: cumem.fromfile(file.name, out=device), 5
        yield "tofile from the device", lambda: cumem.tofile(file.name, device), 3


def three_calls() -> None:
    """Make and drop three objects, which is work of Python alone."""
    object(), object(), object()


def pools(largest: int) -> Iterator[Case]:
    """Allocate from warm and cold pools, with many blocks or threads."""
    import cumem

    def allocate(kind: str, empty: Callable = cumem.empty) -> None:
        empty(MIB, "u1", kind)

    # The speed of a virtual machine's cores may change by a factor of two from one second
    # to the next. This case does not call cumem. If it differs between the builds, then the
    # differences of all other short cases say nothing about them.
    yield "three calls of Python's, for comparison", three_calls, 1000 * SHORT
    for kind in ("device", "pinned"):
        yield f"empty and free, {kind}", lambda k=kind: allocate(k), 1000 * SHORT

    def cold() -> None:
        cumem.trim()
        cumem.empty_pinned(largest, "u1")

    yield "pinned memory, cold, the largest", cold, 3
    for count in (1000, 100_000):
        held = [cumem.empty_pinned(256, "u1") for _ in range(count)]
        yield (
            f"empty and free beside {count:,} blocks",
            lambda held=held: cumem.empty_pinned(256, "u1"),
            200 * SHORT,
        )

    def many_threads() -> None:
        def loop() -> None:
            for _ in range(2000):
                cumem.empty_pinned(256, "u1")

        threads = [threading.Thread(target=loop) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    yield "32,000 by 16 threads", many_threads, 9


def beside(largest: int) -> Iterator[Case]:
    """Copy while another thread computes in Python."""
    import numpy as np

    import cumem

    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for n in (MIB, largest):
            array, device = np.ones(n, "u1"), cumem.full(n, 1, "u1", "device")
            yield (
                f"up {name_of(n)} beside a thread",
                lambda d=device, a=array: cumem.copy(d, a),
                repeats(n),
            )
    finally:
        stop.set()
        thread.join()


def two_gpus(largest: int) -> Iterator[Case]:
    """Copy between two GPUs, and one array to both, if there are two."""
    import numpy as np

    import cumem

    if cumem.device_count() < 2:
        return
    for n in (MIB, largest):
        first, second = (
            [cumem.full(n, 1, "u1", "device", device=i) for _ in range(2)]
            for i in (0, 1)
        )

        def both_ways(a: list = first, b: list = second) -> None:
            for transfer in (
                cumem.copy_async(b[0], a[0]),
                cumem.copy_async(a[1], b[1]),
            ):
                transfer.wait()

        size, times = name_of(n), repeats(n)
        yield (
            f"two GPUs {size}",
            lambda a=first, b=second: cumem.copy(b[0], a[0]),
            times,
        )
        yield f"two GPUs both ways {size}", both_ways, times
    array = np.ones((2, largest // 2), "u1")
    halves = [cumem.empty_device(largest // 2, "u1", device=i) for i in (0, 1)]

    def scatter() -> None:
        pairs = zip(halves, array, strict=True)
        for transfer in [cumem.copy_async(half, part) for half, part in pairs]:
            transfer.wait()

    yield f"two GPUs, half of {name_of(largest)} up to each", scatter, 9


def tensors(largest: int) -> Iterator[Case]:
    """Copy 256 B between PyTorch's tensors, buffers and arrays."""
    import numpy as np

    import cumem

    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        return
    array, device = np.ones(256, "u1"), cumem.full(256, 1, "u1", "device")
    host = torch.ones(256, dtype=torch.uint8)
    cuda = torch.ones(256, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ends = [(device, host), (cuda, array), (cuda, host), (host, cuda)]
    names = ["buffer from tensor", "CUDA tensor from array", "tensor up", "tensor down"]
    for name, (dst, src) in zip(names, ends, strict=True):
        call = functools.partial(cumem.copy, dst, src)
        yield f"256 B, {name}", call, repeats(256)
    yield "asbuffer of a CUDA tensor", lambda: cumem.asbuffer(cuda), repeats(256)


#: Groups that need PyTorch or two GPUs. The key is contained in the names of all its cases.
APART = {"two GPUs": two_gpus, "tensor": tensors}


def cases(largest: int, only: str) -> Iterator[Case]:
    """Yield (name, call, repeats). The memory of a group is freed before the next one."""
    for group in (copies, shapes, files, pools, beside):
        yield from group(largest)
    for word, group in APART.items():
        if not only or word in only:
            yield from group(largest)


def machine() -> dict[str, str]:
    """Return the GPU, the driver, the processor and the commit of the build."""
    import cumem
    from cumem import info

    model = "".join(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "machine": f"{cumem.Device(0).name}, {len(os.sched_getaffinity(0))} cores",
        "driver": info.collect()["versions"]["driver"],
        "cpu": model[: len(model) // (os.cpu_count() or 1)],
        "commit": info.commit(),
    }


def measure(largest: int, only: str) -> dict[str, float]:
    """Run the cases whose names match `only`, and return the median seconds by name."""
    figures: dict[str, float] = {}
    for name, call, times in cases(largest, only):
        if not re.search(only, name):
            continue
        for _ in range(3):
            call()
        taken = []
        together = SHORT if times > 1000 else 1
        for _ in range(times // together):
            start = time.perf_counter_ns()
            for _ in range(together):
                call()
            taken.append((time.perf_counter_ns() - start) / together)
        figures[name] = statistics.median(taken) * 1e-9
        if "1 GiB" in name and "beside" not in name:
            start_cpu = time.process_time()
            for _ in range(9):
                call()
            figures[f"{name}, processor"] = (time.process_time() - start_cpu) / 9
    return figures


def import_seconds(environment: dict[str, str]) -> float:
    """Return the shortest of nine times of ``import cumem`` after NumPy was imported."""
    code = "import time, numpy; s = time.perf_counter(); import cumem"
    code += "; print(time.perf_counter() - s)"
    command = [sys.executable, "-c", code]
    taken = [
        float(subprocess.run(command, env=environment, stdout=-1, check=True).stdout)
        for _ in range(9)
    ]
    return min(taken)


def run(site: Path, largest: int, only: str) -> dict[str, dict]:
    """Measure the cases in a fresh process of the build in `site`."""
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, __file__, "--measure", str(largest), "--only", only]
    answer = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    found = json.loads(answer.stdout.splitlines()[-1])
    if re.search(only, "import"):
        found["figures"]["import"] = import_seconds(environment)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=GIB)
    parser.add_argument(
        "--only", default="", help="only cases whose name matches this regex"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", nargs=2, default=["old", "new"])
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        figures = measure(options.measure, options.only)
        print(json.dumps({"machine": machine(), "figures": figures}))
        return
    if len(options.wheels) != 2:
        parser.error("two wheels are needed")
    rounds: list[list[dict[str, float]]] = [[], []]
    facts: dict[str, str] = {}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        sites = [Path(folder) / str(i) for i in range(2)]
        for wheel, site in zip(options.wheels, sites, strict=True):
            zipfile.ZipFile(wheel).extractall(site)
            compileall.compile_dir(site, quiet=1)  # as pip does
        for i in range(options.rounds):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                answer = run(sites[which], options.largest, options.only)
                rounds[which].append(answer["figures"])
                facts = answer["machine"]
    results = []
    print(
        f"{'case':40} {options.names[0]:>12} {options.names[1]:>12}   ratio   of the least"
    )
    for name in rounds[0][0]:
        old, new = ([r[name] for r in each] for each in rounds)
        row = {"case": name, "old_s": old, "new_s": new}
        row["ratio"] = statistics.median(new) / statistics.median(old)
        row["ratio_of_least"] = min(new) / min(old)
        results.append(row)
        print(
            f"{name:40} {statistics.median(old) * 1e6:10.2f}us"
            f" {statistics.median(new) * 1e6:10.2f}us   {row['ratio']:.3f}"
            f"   {row['ratio_of_least']:.3f}"
        )
    if options.json:
        commits = dict(zip(("old", "new"), options.names, strict=True))
        found = {"commit": options.names[1], "commits": commits, "started": started}
        document = facts | found | {"results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
