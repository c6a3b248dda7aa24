# SPDX-License-Identifier: Apache-2.0
"""Measure short calls that take arrays of other libraries, such as copies and `asbuffer`.

    python benchmarks/doors.py --json benchmarks/results/doors-h200.json

The script calls these functions doors, because arrays of one library enter another one
through them. It copies 256 bytes from each of these to each other: a device buffer, a
NumPy array, PyTorch tensors on the CPU and on the GPU, and a CuPy array. It compares
the bytes of each copy. In the same run it measures `copy_` and `synchronize` of PyTorch
between the same places, how long `asbuffer` takes to accept an object of another
library, and how long other libraries take to accept a buffer. The script also runs on
the emulated device, and then says that the figures are not a GPU's.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Call, Run

NBYTES = 256
CALLS = 200  # timed together, because one call is too short for the clock
ROUNDS = 40
LIBRARIES = ("torch", "cupy", "tvm_ffi")


@dataclass
class Case:
    """One call, by cumem and, if PyTorch has such a call, by PyTorch.

    Parameters
    ----------
    what : str
        ``"copy"``, ``"in"`` for `asbuffer`, or ``"out"`` for a function of another library
        that accepts a buffer.
    target, source : str
        The two ends of a copy: ``"buffer"`` (in device memory), ``"ndarray"``, ``"cpu
        tensor"``, ``"cuda tensor"`` or ``"cupy"``. For ``"in"`` and ``"out"`` the target
        is the function that is called, and the source is its argument.
    seconds : dict
        The best time of a call for each library. Each time is the mean of 200 calls.
    spread : dict
        The median time divided by the best one, for each library.
    """

    what: str
    target: str
    source: str
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)


def times_of(calls: dict[str, Call], rounds: int, count: int) -> dict[str, list[float]]:
    """Return for each name the seconds of its call in every round; the calls alternate."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter() - start) / count)
    return found


class Bench:
    """The state that all cases share."""

    def __init__(self, quick: bool) -> None:
        self.emulated = cumem.backend() == "emulated"
        small = quick or self.emulated
        self.rounds, self.calls = (2, 10) if small else (ROUNDS, CALLS)
        self.imported: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        for name in LIBRARIES:
            try:
                self.imported[name] = importlib.import_module(name)
                if name == "cupy":
                    self.imported[name].zeros(1)
            except Exception as error:
                self.imported.pop(name, None)
                self.missing[name] = str(error).splitlines()[0]
        self.torch = self.imported.get("torch")
        self.has_cuda = bool(self.torch and self.torch.cuda.is_available())

    def run(self, case: Case, calls: dict[str, Call]) -> Case:
        """Time each call, and fill in the case."""
        for name, times in times_of(calls, self.rounds, self.calls).items():
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
        return case

    # -- copies --------------------------------------------------------------------------

    def ends(self) -> dict[str, Callable[[Any], Any]]:
        """Return for each kind of array the function that makes one from values."""
        found: dict[str, Callable[[Any], Any]] = {
            "buffer": lambda values: cumem.array(values, kind="device"),
            "ndarray": np.array,
        }
        if self.torch is not None:
            found["cpu tensor"] = lambda values: self.torch.tensor(values)
        if self.has_cuda:
            found["cuda tensor"] = lambda values: self.torch.tensor(
                values, device="cuda"
            )
        if "cupy" in self.imported:
            found["cupy"] = self.imported["cupy"].array
        return found

    def values(self, end: Any) -> Any:
        """Return an array's values as a NumPy array, wherever they lie."""
        return cumem.array(end, kind="pinned").numpy().copy()

    def peer(self, name: str, values: Any) -> Any:
        """Return a tensor in the same memory (CPU or GPU), or None if PyTorch has none."""
        if self.torch is None or (
            name not in ("ndarray", "cpu tensor") and not self.has_cuda
        ):
            return None
        where = "cpu" if name in ("ndarray", "cpu tensor") else "cuda"
        return self.torch.tensor(values, device=where)

    def copies(self) -> Iterator[Case]:
        """Measure a copy from each kind of array to each other."""
        ends = self.ends()
        zeros = np.zeros(NBYTES, np.uint8)
        numbers = np.arange(NBYTES, dtype=np.uint8)
        for target in ends:
            for source in ends:
                dst, src = ends[target](zeros), ends[source](numbers)
                calls: dict[str, Call] = {
                    "cumem": lambda d=dst, s=src: cumem.copy(d, s)
                }
                theirs = self.peer(target, zeros), self.peer(source, numbers)
                if theirs[0] is not None and theirs[1] is not None:
                    calls["torch"] = self.torch_copy(*theirs)
                case = self.run(Case("copy", target, source), calls)
                assert (self.values(dst) == numbers).all(), case
                yield case

    def torch_copy(self, dst: Any, src: Any) -> Call:
        """Return a call that copies by PyTorch and returns when the bytes are there."""
        if not (dst.is_cuda or src.is_cuda):
            return lambda: dst.copy_(src)
        synchronize = self.torch.cuda.synchronize

        def call() -> None:
            dst.copy_(src)
            synchronize()

        return call

    # -- doors ---------------------------------------------------------------------------

    def doors(self) -> Iterator[Case]:
        """Measure how long a library takes to accept an array of another one."""
        numbers = np.arange(NBYTES, dtype=np.uint8)
        for name, make in self.ends().items():
            made = make(numbers)
            yield self.run(
                Case("in", "asbuffer", name),
                {"cumem": lambda m=made: cumem.asbuffer(m)},
            )
        device = cumem.array(numbers, kind="device")
        pinned = cumem.array(numbers, kind="pinned")
        out: dict[str, tuple[Any, Any]] = {
            "np.asarray": (np.asarray, pinned),
            "np.from_dlpack": (np.from_dlpack, pinned),
        }
        if self.torch is not None:
            out["torch.from_dlpack"] = self.torch.from_dlpack, device
        if "cupy" in self.imported:
            out["cupy.asarray"] = self.imported["cupy"].asarray, device
        if "tvm_ffi" in self.imported:
            echo = self.imported["tvm_ffi"].get_global_func("testing.nop", True)
            with contextlib.suppress(TypeError):
                out["tvm_ffi.from_dlpack"] = (
                    self.imported["tvm_ffi"].from_dlpack,
                    device,
                )
                echo(device)
                out["a function of tvm_ffi"] = echo, device
        for name, (function, buffer) in out.items():
            yield self.run(
                Case("out", name, f"{buffer.kind} buffer"),
                {"cumem": lambda f=function, b=buffer: f(b)},
            )

    def cases(self) -> Iterator[Case]:
        """Measure all cases."""
        yield from self.copies()
        yield from self.doors()


def line_of(case: Case) -> str:
    """Return one row of the table on the terminal."""
    ours = case.seconds["cumem"] * 1e6
    peer = f"{case.seconds['torch'] * 1e6:8.2f}" if "torch" in case.seconds else " " * 8
    return f"{case.what:5}{case.target:22}{case.source:16}{ours:8.2f}{peer}"


def main() -> int:
    run = Run(__doc__ or "")
    bench = Bench(run.options.quick)
    run.begin(bench.emulated)
    run.note(
        1,
        nbytes=NBYTES,
        missing=bench.missing,
        libraries={
            name: getattr(it, "__version__", "?") for name, it in bench.imported.items()
        },
    )
    print(f"{'':5}{'target':22}{'source':16}{'cumem':>8}{'torch':>8}  (microseconds)")
    run.show(bench.cases(), line_of)
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
