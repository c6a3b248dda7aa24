# SPDX-License-Identifier: Apache-2.0
"""Measure copies between ordinary memory and a GPU against the link and other libraries.

    python benchmarks/transfer.py --json benchmarks/results/transfer-h200.json

Blocking copies of NumPy arrays to the device and back by size, and of strided arrays to
the device, each verified; the link is a pinned copy, the peers are what is installed, all
in one run. On the emulated device it runs and says so: the figures are then not a GPU's.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

import cumem
from cumem import info
from cumem.units import format_nbytes

GIB = 1 << 30
SIZES = [256 << (2 * i) for i in range(11)] + [GIB, 4 * GIB]
MOST_SECONDS = 0.6  # for the repetitions of one case
PEERS = ("driver", "torch", "cupy")

Call = Callable[[], object]


@dataclass
class Case:
    """One copy, by cumem and by others.

    Parameters
    ----------
    key : str
        What is copied.
    direction : str
        ``"up"`` (host to device) or ``"down"``.
    nbytes : int
        Payload.
    seconds : dict
        Best time by library.
    spread : dict
        Median over best, by library.
    errors : dict
        Why a library has no time.
    """

    key: str
    direction: str
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def times_of(call: Call, seconds: float) -> list[float]:
    """Seconds of each call: as many as fit, at least three, after one that is dropped."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 2000):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


class Driver:
    """What cudaMemcpy calls, by way of ctypes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}")

    def copy(self, dst: int, src: int, nbytes: int) -> Call:
        """A blocking copy between two addresses."""
        function = self._library.cuMemcpy
        arguments = ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(nbytes)

        def call() -> None:
            if function(*arguments) != 0:
                raise OSError("cuMemcpy failed")

        return call


class Bench:
    """The memory that all cases share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.seconds = 0.02 if options.quick else MOST_SECONDS
        limit = 4 << 20 if self.emulated or options.quick else 4 * GIB
        self.sizes = [size for size in SIZES if size <= limit]
        self.room = max(*self.sizes, 8 << 20)
        rng = np.random.default_rng(1)
        self.host = np.frombuffer(rng.bytes(min(self.room, GIB)), "u1")
        self.host = np.tile(self.host, -(-self.room // self.host.size))
        self.back = np.zeros(self.room, "u1")
        self.device = cumem.empty_device(self.room, "u1")
        self.peers: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        for name in PEERS:
            self._find(name)

    def _find(self, name: str) -> None:
        if self.emulated:
            self.missing[name] = "needs a GPU"
        elif name == "driver":
            self.peers[name] = Driver()
        elif importlib.util.find_spec(name) is None:
            self.missing[name] = "not installed"
        else:
            self.peers[name] = __import__(name)

    # -- one case --------------------------------------------------------------------------

    def run(self, case: Case, calls: dict[str, Callable[[], Call]]) -> Case:
        """Time each library's call."""
        for name, make in calls.items():
            if name in self.missing:
                continue
            try:
                times = times_of(make(), self.seconds)
            except (RuntimeError, OSError, MemoryError, ValueError) as error:
                case.errors[name] = str(error).splitlines()[0]
                continue
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
        return case

    def links(self) -> dict[str, float]:
        """Bytes a second of pinned copies."""
        nbytes = min(self.room, 256 << 20)
        pinned = cumem.zeros(nbytes, "u1", "pinned")
        device = self.device[:nbytes]
        up = min(times_of(lambda: cumem.copy(device, pinned), self.seconds))
        down = min(times_of(lambda: cumem.copy(pinned, device), self.seconds))
        return {"up": nbytes / up, "down": nbytes / down}

    def check(self, wanted: np.ndarray[Any, Any], device: Any) -> None:
        """See that the device has the bytes, by way of pinned memory."""
        got = cumem.empty(wanted.shape, wanted.dtype, "pinned")
        cumem.copy(got, device)
        if not np.array_equal(got.numpy(), wanted):
            raise AssertionError(f"wrong bytes: {wanted.shape} {wanted.dtype}")

    # -- the cases -------------------------------------------------------------------------

    def sized(self) -> Iterator[Case]:
        """Ordinary memory in one run, both ways."""
        for nbytes in self.sizes:
            host, back = self.host[:nbytes], self.back[:nbytes]
            device = self.device[:nbytes]
            yield self.run(
                Case("contiguous", "up", nbytes), self.up_calls(device, host)
            )
            self.check(host, device)
            back[:] = 0
            yield self.run(
                Case("contiguous", "down", nbytes), self.down_calls(back, device)
            )
            if not np.array_equal(back, host):
                raise AssertionError(f"wrong bytes: {nbytes} down")

    def shaped(self) -> Iterator[Case]:
        """Ordinary memory that is not in one run, to the device."""
        nbytes = min(self.room, GIB)
        words = self.host[:nbytes].view("u4")
        side = int(words.size**0.5)
        sources = {
            "every second of 4 bytes": words[::2],
            "reversed": words[::-1],
            "transposed": words[: side * side].reshape(side, side).T,
            "32 KiB of every 64": self.host[:nbytes].reshape(-1, 65536)[:, :32768],
        }
        for key, source in sources.items():
            device = self.device[: source.nbytes].view(source.dtype)
            device = device.reshape(source.shape)
            calls = self.up_calls(device, source)
            calls.pop("driver")
            yield self.run(Case(key, "up", source.nbytes), calls)
            self.check(source, device)

    def up_calls(self, device: Any, host: Any) -> dict[str, Callable[[], Call]]:
        """By library: what makes the call that is timed."""

        def torch() -> Call:
            torch = self.peers["torch"]
            target = torch.as_tensor(device, device="cuda")
            source = torch.from_numpy(host)
            return lambda: target.copy_(source)

        def cupy() -> Call:
            target = self.peers["cupy"].asarray(device)
            return lambda: target.set(host)

        return {
            "cumem": lambda: lambda: cumem.copy(device, host),
            "driver": lambda: self.peers["driver"].copy(
                device.ptr, host.ctypes.data, host.nbytes
            ),
            "torch": torch,
            "cupy": cupy,
        }

    def down_calls(self, back: Any, device: Any) -> dict[str, Callable[[], Call]]:
        """The same from the device."""

        def torch() -> Call:
            torch = self.peers["torch"]
            source = torch.as_tensor(device, device="cuda")
            target = torch.from_numpy(back)
            return lambda: target.copy_(source)

        def cupy() -> Call:
            source = self.peers["cupy"].asarray(device)
            return lambda: source.get(out=back)

        return {
            "cumem": lambda: lambda: cumem.copy(back, device),
            "driver": lambda: self.peers["driver"].copy(
                back.ctypes.data, device.ptr, back.nbytes
            ),
            "torch": torch,
            "cupy": cupy,
        }


def line(case: Case, links: dict[str, float]) -> str:
    """A row of the table."""
    ours = case.seconds.get("cumem")
    if ours is None:
        return f"{case.key}: {case.errors}"
    cells = [
        f"{case.direction:<5}{case.key:<24}{format_nbytes(case.nbytes):>8}",
        f"{ours * 1e6:>10.1f} us",
        f"{case.nbytes / ours / 1e9:>6.1f} GB/s",
        f"{100 * case.nbytes / ours / links[case.direction]:>4.0f} % of the link",
    ]
    cells += [
        f"{name} {case.seconds[name] / ours:.2f} x" if name in case.seconds else ""
        for name in PEERS
    ]
    return "  ".join(cell for cell in cells if cell)


def main() -> int:
    """Measure and print; a file on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the results to FILE")
    add("--quick", action="store_true", help="small sizes, few rounds")
    options = parser.parse_args()
    started = datetime.now(UTC)
    bench = Bench(options)
    if bench.emulated:
        print("EMULATED DEVICE: no GPU took part, these figures are not a GPU's")
    links = bench.links()
    cases = []
    for source in (bench.sized, bench.shaped):
        for case in source():
            cases.append(case)
            print(line(case, links), flush=True)
    if options.json:
        results = {
            "schema": 1,
            "started": started.isoformat(timespec="seconds"),
            "emulated": bench.emulated,
            "quick": options.quick,
            "commit": info.commit(),
            **info.collect(),
            "link_bytes_per_second": links,
            "missing": bench.missing,
            "cases": [asdict(case) for case in cases],
        }
        info.save(results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
