# SPDX-License-Identifier: Apache-2.0
"""Two builds of cumem against each other, in turns, on one machine.

    python benchmarks/versions.py OLD.whl NEW.whl [--rounds 5] [--json FILE]

Each round runs every case in a fresh process of each build. A case's figure is the median
over the rounds of the medians within them; the ratio is new to old, below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Case = tuple[str, Callable[[], object], int]


SHORT = 100  # short calls are timed so many together


def repeats(nbytes: int) -> int:
    return 40 * SHORT if nbytes <= 64 * KIB else 300 if nbytes <= 4 * MIB else 15


def name_of(nbytes: int) -> str:
    for unit, text in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {text}"
    return f"{nbytes} B"


def cases(largest: int) -> Iterator[Case]:
    """Yield (name, call, repeats); the memory of a case goes with it."""
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
    pieces = [np.ones(160 * KIB, "u1") for _ in range(600)]
    targets = [cumem.empty_device(p.shape, "u1") for p in pieces]
    up = list(zip(targets, pieces, strict=True))
    down = list(zip(pieces, targets, strict=True))
    yield "600 pieces up", lambda: cumem.copy_many(up), 9
    yield "600 pieces down", lambda: cumem.copy_many(down), 9
    for kind in ("device", "pinned"):
        yield (
            f"empty and free, {kind}",
            lambda k=kind, f=cumem.empty: f(MIB, "u1", k),
            1000 * SHORT,
        )


def machine() -> dict[str, str]:
    import cumem
    from cumem import info

    model = "".join(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "machine": f"{cumem.Device(0).name}, {len(os.sched_getaffinity(0))} cores",
        "driver": ".".join(map(str, cumem.driver_version())),
        "cpu": model[: len(model) // (os.cpu_count() or 1)],
        "commit": info.commit(),
    }


def measure(largest: int) -> dict[str, float]:
    """Run all cases; name -> median seconds."""
    figures: dict[str, float] = {}
    for name, call, times in cases(largest):
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
    return figures


def run(site: Path, largest: int) -> dict[str, dict]:
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, __file__, "--measure", str(largest)]
    answer = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=GIB)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", nargs=2, default=["old", "new"])
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        figures = measure(options.measure)
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
        for i in range(options.rounds):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                answer = run(sites[which], options.largest)
                rounds[which].append(answer["figures"])
                facts = answer["machine"]
    results = []
    print(f"{'case':32} {options.names[0]:>12} {options.names[1]:>12}   ratio")
    for name in rounds[0][0]:
        old, new = ([r[name] for r in each] for each in rounds)
        row = {"case": name, "old_s": old, "new_s": new}
        row["ratio"] = statistics.median(new) / statistics.median(old)
        results.append(row)
        print(
            f"{name:32} {statistics.median(old) * 1e6:10.2f}us"
            f" {statistics.median(new) * 1e6:10.2f}us   {row['ratio']:.3f}"
        )
    if options.json:
        commits = dict(zip(("old", "new"), options.names, strict=True))
        found = {"commit": options.names[1], "commits": commits, "started": started}
        document = facts | found | {"results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
