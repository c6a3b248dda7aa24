# SPDX-License-Identifier: Apache-2.0
"""Compare small calls on buffers, as a loop makes them often, with the same calls in NumPy.

    python benchmarks/views.py --json benchmarks/results/views-h200.json

The script measures views, reshapes, slices, flags, rows and copies of small buffers of
page-locked memory, allocations whose shapes are given as NumPy integers, and allocations of
device memory that is filled with a value. Each call alternates with NumPy's own call on an
array of the same shape. The last cases are `fill(0)` on 256 B of each kind of memory, which
alternates with `fill(0)` of an array, and `stats()`, which NumPy does not have.

The script also runs on the emulated device, and its output then says so. There, the calls
that use no device take as long as they do with a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cumem

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

CALLS = 5_000  # timed together, because one call is too short for the clock
AXES = (1, 0)
NAME, DTYPE = "f4", np.dtype("i8")
TWO, TEN, HUNDRED = np.int64(2), np.int32(10), np.int64(100)
PART = (slice(1, 3), Ellipsis, slice(None, None, 2))

#: The calls that are made both on a buffer and on an array of shape (4, 6).
CALLS_ON: dict[str, Callable[[Any], object]] = {
    "reshape(6, 4)": lambda a: a.reshape(6, 4),
    "reshape((6, 4))": lambda a: a.reshape((6, 4)),
    "reshape(-1)": lambda a: a.reshape(-1),
    "reshape(np.int64, 12)": lambda a: a.reshape(TWO, 12),
    "transpose()": lambda a: a.transpose(),
    "transpose(1, 0)": lambda a: a.transpose(1, 0),
    "transpose((1, 0))": lambda a: a.transpose(AXES),
    "T": lambda a: a.T,
    "view(name)": lambda a: a.view(NAME),
    "view(dtype)": lambda a: a.view(DTYPE),
    "ravel()": lambda a: a.ravel(),
    "squeeze()": lambda a: a.squeeze(),
    "[1]": lambda a: a[1],
    "[1:3]": lambda a: a[1:3],
    "[:, 1]": lambda a: a[:, 1],
    "[1:3, ..., ::2]": lambda a: a[PART],
    "[np.int64]": lambda a: a[TWO],
    "[None]": lambda a: a[None],
    "rows": lambda a: list(a),
    "shape": lambda a: a.shape,
    "flags.c_contiguous": lambda a: a.flags.c_contiguous,
    "astype, same dtype, copy=False": lambda a: a.astype("f8", copy=False),
    "copy()": lambda a: a.copy(),
    "flatten()": lambda a: a.flatten(),
}
#: The shapes that are allocated, by the text that names them in the results.
SHAPES: dict[str, Any] = {
    "empty(100)": 100,
    "empty(np.int64)": HUNDRED,
    "empty((10, 10))": (10, 10),
    "empty((np.int32, np.int32))": (TEN, TEN),
    "empty([10, 10])": [10, 10],
    "empty(array.shape)": np.empty((10, 10)).shape,
}
#: Allocations of 256 B that are filled with a value, which take the library (cumem or
#: NumPy) as their argument. cumem allocates device memory and only queues the fill.
LIKE = np.empty(64, "f4")
WITH_VALUES: dict[str, Callable[[Any], object]] = {
    "zeros(64)": lambda library: library.zeros(64, "f4"),
    "full(64, 1.5)": lambda library: library.full(64, 1.5, "f4"),
    "empty_like(array)": lambda library: library.empty_like(LIKE),
    "zeros_like(array)": lambda library: library.zeros_like(LIKE),
    "full_like(array, 1.5)": lambda library: library.full_like(LIKE, 1.5),
}


@dataclass
class Case:
    """The time of one call.

    Parameters
    ----------
    key : str
        The call, written as a NumPy user writes it.
    kind : str
        The kind of memory of the buffer.
    ns, numpy_ns : float
        The shortest time of cumem's call and of NumPy's; `numpy_ns` is 0 if NumPy has no
        such call.
    spread : float
        cumem's median time divided by its shortest time.
    ratio : float
        `ns` divided by `numpy_ns`.
    """

    key: str
    kind: str
    ns: float = 0.0
    numpy_ns: float = 0.0
    spread: float = 0.0
    ratio: float = 0.0


def time_of(call: Callable[[], object]) -> float:
    """Return how many nanoseconds one call takes, as the mean of `CALLS` calls."""
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begin) / CALLS


def measure(
    case: Case,
    rounds: int,
    ours: Callable[[], object],
    theirs: Callable[[], object] | None,
) -> Case:
    """Fill in both times. The two calls alternate, so other load slows both alike."""
    times, numpys = [], []
    for _ in range(rounds + 1):
        times.append(time_of(ours))
        if theirs is not None:
            numpys.append(time_of(theirs))
    case.ns = min(times[1:])
    case.spread = statistics.median(times[1:]) / case.ns
    if numpys:
        case.numpy_ns = min(numpys[1:])
        case.ratio = case.ns / case.numpy_ns
    return case


def cases(rounds: int) -> Iterator[Case]:
    """Measure all cases."""
    buffer, array = cumem.empty_pinned((4, 6)), np.empty((4, 6))
    for key, call in CALLS_ON.items():
        yield measure(
            Case(key, "pinned"),
            rounds,
            lambda call=call: call(buffer),  # type: ignore[misc]
            lambda call=call: call(array),  # type: ignore[misc]
        )
    for key, shape in SHAPES.items():
        for kind, make in (
            ("pinned", cumem.empty_pinned),
            ("device", cumem.empty_device),
        ):
            yield measure(
                Case(key, kind),
                rounds,
                lambda make=make, shape=shape: make(shape),  # type: ignore[misc]
                lambda shape=shape: np.empty(shape),  # type: ignore[misc]
            )
    for key, values in WITH_VALUES.items():
        yield measure(
            Case(key, "device"),
            rounds,
            lambda values=values: values(cumem),  # type: ignore[misc]
            lambda values=values: values(np),  # type: ignore[misc]
        )
    array = np.empty(64, "f4")
    for kind in ("pinned", "mapped", "managed", "device"):
        target = cumem.empty(64, "f4", kind)
        yield measure(
            Case("fill(0) of 256 B", kind),
            rounds,
            lambda target=target: target.fill(0),  # type: ignore[misc]
            lambda: array.fill(0),
        )
    yield measure(Case("stats()", ""), rounds, cumem.stats, None)


def line(case: Case) -> str:
    """Return one line of the table."""
    beside = ""
    if case.numpy_ns:
        beside = f", numpy {case.numpy_ns:7.1f} ns: x {case.ratio:.2f}"
    return f"{case.key:32} {case.kind:8} {case.ns:9.1f} ns{beside}"


def main() -> None:
    """Measure, print and write the file."""
    run = Run(__doc__)
    run.begin(cumem.backend() == "emulated")
    run.note(1, calls=CALLS)
    run.show(cases(2 if run.options.quick else 25), line)
    run.end()


if __name__ == "__main__":
    main()
