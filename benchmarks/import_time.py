# SPDX-License-Identifier: Apache-2.0
"""Measure what importing cumem costs after NumPy, and print one JSON object.

usage: python benchmarks/import_time.py [--runs N] [WHEEL]

Each run is a fresh interpreter. The first run is left out, because it fills the file cache.
If a wheel is given, its size is in the result too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

MEASURE = """
from time import perf_counter_ns
start = perf_counter_ns()
import numpy
middle = perf_counter_ns()
import cumem
end = perf_counter_ns()
print(middle - start, end - middle)
"""


def measured(runs: int) -> list[tuple[float, float]]:
    """Return for each run the milliseconds of importing NumPy, and then cumem."""
    results = []
    for _ in range(runs + 1):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
        )
        numpy_ns, cumem_ns = map(int, done.stdout.split())
        results.append((numpy_ns / 1e6, cumem_ns / 1e6))
    return results[1:]


def summary(values: list[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum, rounded to three digits."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    results = measured(arguments.runs)
    wheel = arguments.wheel
    report = {
        "machine": {
            "system": platform.platform(),
            "architecture": platform.machine(),
            "cpu_count": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "cumem": version("cumem"),
        },
        "wheel": wheel and {"name": wheel.name, "nbytes": wheel.stat().st_size},
        "runs": arguments.runs,
        "numpy_ms": summary([numpy_ms for numpy_ms, _ in results]),
        "cumem_after_numpy_ms": summary([cumem_ms for _, cumem_ms in results]),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
