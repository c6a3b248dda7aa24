# SPDX-License-Identifier: Apache-2.0
"""Measure whether copies would gain from other settings than the defaults.

    python benchmarks/settings.py --json benchmarks/results/settings-h200.json

The script copies ordinary memory, contiguous and with gaps, alternately with one setting
changed and with the defaults. It also changes settings that users cannot reach. Each pair
of copies gives a ratio, and the figure of a case is the median of these ratios; below 1
the changed setting is faster. The cases named "nothing" compare the defaults with
themselves, and so show the noise.

If no value of a setting is faster in any case, the default is right on this machine, and
users need no such setting. Results files of commit e4ada78 also have the figures of
`calibrate()`, which was removed because of them.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem import _core
from cumem.transfers import tuning

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

KIB, MIB = 1 << 10, 1 << 20
#: The values that are tried for each setting.
VALUES: dict[str, tuple[Any, ...]] = {
    "thread_count": (1, 2, 4, 12, 16),
    "chunk_nbytes": (256 * KIB, 512 * KIB, 2 * MIB, 4 * MIB, 8 * MIB),
    "slot_count": (2, 3, 6, 8, 16),
    "ring_nbytes": (4 * MIB, 32 * MIB, 1024 * MIB),
    "staged_up_nbytes": (256 * KIB, 1 * MIB, 16 * MIB, 1 << 40),
    "staged_down_nbytes": (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    "quick_nbytes": (0, 256 * KIB, 1 * MIB, 4 * MIB, 64 * MIB),
    "bounce_nbytes": (0, 16 * KIB, 256 * KIB, 1 * MIB),
}
SIZES = (4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB, 256 * MIB)
GAPS_SIZES = (512 * KIB, 8 * MIB, 64 * MIB)


@dataclass
class Case:
    """One copy with one changed setting.

    Parameters
    ----------
    setting : str
        The setting that is changed, or ``"nothing"``.
    value : int
        The value that it is changed to.
    key : str
        The copy.
    us : float
        The median microseconds of a copy with the defaults.
    ratio : float
        The time with the changed setting divided by that with the defaults, as the median
        of all pairs.
    """

    setting: str
    value: int
    key: str
    us: float
    ratio: float


def copies() -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield the name of each copy, the call, and how many calls are timed together."""
    for nbytes in SIZES:
        host = np.ones(nbytes, "u1")
        device = cumem.full(nbytes, 1, "u1", "device")
        calls = max(1, min(200, (4 * MIB) // nbytes))
        size = f"{nbytes // KIB} KiB"
        yield f"up {size}", partial(cumem.copy, device, host), calls
        yield f"down {size}", partial(cumem.copy, host, device), calls
    for nbytes in GAPS_SIZES:
        gaps = np.ones((nbytes // 64, 32), "f4")[:, ::2]
        device = cumem.full(gaps.shape, 1, "f4", "device")
        calls = max(1, (4 * MIB) // nbytes)
        size = f"{nbytes // KIB} KiB with gaps"
        yield f"up {size}", partial(cumem.copy, device, gaps), calls
        yield f"down {size}", partial(cumem.copy, gaps, device), calls
    large = cumem.full(64 * MIB, 1, "u1", "device")
    yield "down 64 MiB, new array", large.to_numpy, 1


@contextmanager
def using(**values: int) -> Iterator[None]:
    """Change these settings during the ``with`` block."""
    tuning.change(tuning.CHOSEN, values)
    try:
        yield
    finally:
        tuning.change(tuning.CHOSEN, dict.fromkeys(values))


def seconds(call: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call, as the mean of `calls` calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def compare(
    call: Callable[[], object],
    calls: int,
    values: dict[str, int],
    rounds: int,
) -> tuple[float, float]:
    """Return the median microseconds with the defaults, and the median ratio."""
    ratios, times = [], []
    for _ in range(rounds + 1):
        with using(**values):
            ours = seconds(call, calls)
        usual = seconds(call, calls)
        ratios.append(ours / usual)
        times.append(usual)
    return statistics.median(times[1:]) * 1e6, statistics.median(ratios[1:])


def cases(rounds: int, only: str) -> Iterator[Case]:
    """Measure all copies with each setting whose name matches `only`."""
    all_copies = list(copies())
    values = {name: VALUES[name] for name in VALUES if re.search(only, name)}
    for key, call, calls in all_copies:
        us, ratio = compare(call, calls, {}, rounds)
        yield Case("nothing", 0, key, us, ratio)
    now = _core._read_tuning(True)
    for setting, tried in values.items():
        for value in (each for each in tried if each != now[setting].now):
            for key, call, calls in all_copies:
                us, ratio = compare(call, calls, {setting: value}, rounds)
                yield Case(setting, value, key, us, ratio)


def main() -> None:
    """Measure, print and write the file."""
    run = Run(__doc__, only={"default": "", "help": "settings whose names match"})
    run.begin(cumem.backend() == "emulated")
    run.note(1)
    best: dict[tuple[str, str], Case] = {}

    def line(case: Case) -> str:
        return (
            f"{case.setting:20} {case.value:>14} {case.key:26} {case.us:10.1f} us"
            f" x {case.ratio:.3f}"
        )

    def all_cases() -> Iterator[Case]:
        for case in cases(1 if run.options.quick else 21, run.options.only):
            name = (case.setting, case.key)
            if name not in best or case.ratio < best[name].ratio:
                best[name] = case
            yield case

    run.show(all_cases(), line)
    run.end()
    print("\nWhere a setting gains more than 5 %:")
    for case in sorted(best.values(), key=lambda each: each.ratio):
        if case.ratio < 0.95 or case.setting == "nothing":
            print(line(case))


if __name__ == "__main__":
    main()
