# SPDX-License-Identifier: Apache-2.0
"""Measure many small copies in one call against loops, the batch call and other libraries.

    python benchmarks/many.py --json benchmarks/results/many-h200.json

The script copies pieces of equal size, in random order, between host memory (page-locked or
ordinary) and a GPU, and compares the bytes of each case. In the same run it measures a loop
of cudaMemcpyAsync, a single cudaMemcpyBatchAsync (if libcudart has it), and PyTorch and
CuPy if they are installed. The script also runs on the emulated device, and then says that
the figures are not a GPU's.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Call, Run, times_of

#: (how many pieces, bytes of each). The first shape is the one that has to be fast.
SHAPES = [
    (4096, 4096),
    (16, 65536),
    (256, 65536),
    (4096, 64),
    (4096, 65536),
    (65536, 64),
    (65536, 4096),
    (600, 16384),  # the blocks that a few requests have in a key-value cache
    (48000, 4096),  # the blocks of a whole key-value cache
]
MOST_SECONDS = 0.1  # how long one library's call is repeated
LIBRARIES = ("cumem", "loop", "batch", "torch", "cupy")


@dataclass
class Case:
    """One set of pieces, copied by cumem and by others.

    Parameters
    ----------
    key : str
        The host memory that is copied, ``"pinned"`` or ``"numpy"``.
    direction : str
        ``"up"`` (host to device) or ``"down"``.
    count, nbytes : int
        How many pieces, and the bytes of each.
    route : str
        The route by which cumem moved them, as `Transfer.route` names it.
    seconds : dict
        The best time of each library.
    spread : dict
        The median time divided by the best one, for each library.
    errors : dict
        The reason for each library that was not measured.
    """

    key: str
    direction: str
    count: int
    nbytes: int
    route: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Runtime:
    """Calls of libcudart, which is loaded by ctypes from a wheel or from the system."""

    def __init__(self) -> None:
        self._library = self._load()
        version = ctypes.c_int()
        self._call("cudaRuntimeGetVersion", ctypes.byref(version))
        self.version = version.value
        self._call("cudaSetDevice", 0)
        self._stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(self._stream), 1)

    @staticmethod
    def _load() -> ctypes.CDLL:
        """Load libcudart. Raises OSError if it is not found."""
        names = ["libcudart.so.13", "libcudart.so.12", "libcudart.so"]
        spec = importlib.util.find_spec("nvidia")
        for folder in spec.submodule_search_locations or () if spec else ():
            names += [f"{folder}/cu13/lib/libcudart.so.13"]
            names += [f"{folder}/cuda_runtime/lib/libcudart.so.12"]
        for name in names:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
        raise OSError("libcudart is not installed")

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of libcudart. Raises OSError if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}")

    def loop(self, dsts: list[int], srcs: list[int], nbytes: int) -> Call:
        """Return a call that makes one cudaMemcpyAsync for each piece, and waits."""
        copy, wait = self._library.cudaMemcpyAsync, self._library.cudaStreamSynchronize
        stream, size = self._stream, ctypes.c_size_t(nbytes)
        pairs = [
            (ctypes.c_void_p(d), ctypes.c_void_p(s))
            for d, s in zip(dsts, srcs, strict=True)
        ]
        default = ctypes.c_int(4)

        def call() -> None:
            for dst, src in pairs:
                if copy(dst, src, size, default, stream) != 0:
                    raise OSError("cudaMemcpyAsync failed")
            if wait(stream) != 0:
                raise OSError("cudaStreamSynchronize failed")

        return call

    def batch(self, dsts: list[int], srcs: list[int], nbytes: int) -> Call:
        """Return a call that makes one cudaMemcpyBatchAsync for all pieces, and waits."""
        if not hasattr(self._library, "cudaMemcpyBatchAsync"):
            raise OSError("this libcudart has no cudaMemcpyBatchAsync")
        count = len(dsts)
        words = ctypes.c_uint64 * count
        arrays = words(*dsts), words(*srcs), words(*([nbytes] * count))
        # This is cudaMemcpyAttributes: srcAccessOrder (1 means the stream's order), the
        # type and id of the source's and of the target's location, and flags.
        attributes = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 0)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arguments = [
            *arrays,
            ctypes.c_size_t(count),
            attributes,
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self.version < 13000:
            arguments.append(ctypes.byref(failed))
        arguments.append(self._stream)

        def call() -> None:
            self._call("cudaMemcpyBatchAsync", *arguments)
            self._call("cudaStreamSynchronize", self._stream)

        return call


class Bench:
    """The memory that all cases share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.seconds = 0.02 if options.quick else MOST_SECONDS
        small = options.quick or self.emulated
        self.shapes = [(c, n) for c, n in SHAPES if not small or c * n <= 16 << 20]
        self.peers: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        if self.emulated:
            self.missing = dict.fromkeys(LIBRARIES[1:], "needs a GPU")
            return
        try:
            self.peers["loop"] = self.peers["batch"] = Runtime()
        except OSError as error:
            self.missing["loop"] = self.missing["batch"] = str(error)
        for name in ("torch", "cupy"):
            if importlib.util.find_spec(name) is None:
                self.missing[name] = "not installed"
            else:
                self.peers[name] = __import__(name)

    def link(self) -> dict[str, float]:
        """Return the rate of one pinned copy each way, in bytes a second."""
        nbytes = 4 << 20 if self.emulated else 256 << 20
        pinned = cumem.zeros(nbytes, "u1", "pinned")
        device = cumem.zeros(nbytes, "u1")
        up = min(times_of(lambda: cumem.copy(device, pinned), self.seconds))
        down = min(times_of(lambda: cumem.copy(pinned, device), self.seconds))
        return {"up": nbytes / up, "down": nbytes / down}

    def cases(self) -> Iterator[Case]:
        """Measure every shape, memory and direction."""
        for count, nbytes in self.shapes:
            for key in ("pinned", "numpy"):
                for direction in ("up", "down"):
                    yield self.measure(Case(key, direction, count, nbytes))

    def measure(self, case: Case) -> Case:
        """Time all libraries on the same pieces, and verify the result of each."""
        count, nbytes = case.count, case.nbytes
        rng = np.random.default_rng(count + nbytes)
        data = np.frombuffer(rng.bytes(count * nbytes), "u1").reshape(count, nbytes)
        order = rng.permutation(count)
        # A gap after each piece keeps a library from joining neighbours into one copy.
        room = (count, nbytes + 64)
        host: Any = np.zeros(room, "u1")
        if case.key == "pinned":
            host = cumem.zeros(room, "u1", "pinned")
        device = cumem.zeros(room, "u1")
        down = case.direction == "down"
        target, source = (host, device) if down else (device, host)
        whole = np.zeros(room, "u1")
        whole[:, :nbytes] = data
        cumem.copy(source, whole)
        dsts = [target[i, :nbytes] for i in range(count)]
        srcs = [source[i, :nbytes] for i in order.tolist()]
        for name, make in self.calls(case, dsts, srcs).items():
            if name in self.missing:
                continue
            cumem.copy(target, np.zeros(room, "u1"))
            try:
                times = times_of(make(), self.seconds)
            except (RuntimeError, OSError, MemoryError, ValueError) as error:
                case.errors[name] = str(error).splitlines()[0]
                continue
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
            got = np.zeros(room, "u1")
            cumem.copy(got, target)
            if (
                not np.array_equal(got[:, :nbytes], data[order])
                or got[:, nbytes:].any()
            ):
                raise AssertionError(f"{name}: wrong bytes: {case}")
        case.route = cumem.copy_many_async(zip(dsts, srcs, strict=True)).route
        return case

    def calls(
        self, case: Case, dsts: list[Any], srcs: list[Any]
    ) -> dict[str, Callable[[], Call]]:
        """Return, for each library, a function that prepares the call to time.

        That call returns only when all bytes have arrived.
        """

        def address(end: Any) -> int:
            return end.ctypes.data if isinstance(end, np.ndarray) else end.ptr

        def ours() -> Call:
            pairs = list(zip(dsts, srcs, strict=True))
            return lambda: cumem.copy_many(pairs)

        def runtime(name: str) -> Call:
            addresses = [address(d) for d in dsts], [address(s) for s in srcs]
            return getattr(self.peers[name], name)(*addresses, case.nbytes)

        def tensor(end: Any) -> Any:
            torch = self.peers["torch"]
            if isinstance(end, cumem.DeviceBuffer):
                return torch.as_tensor(end, device="cuda")
            return torch.from_numpy(end if isinstance(end, np.ndarray) else end.numpy())

        def torch() -> Call:
            torch = self.peers["torch"]
            to, of = [tensor(d) for d in dsts], [tensor(s) for s in srcs]

            def call() -> None:
                torch._foreach_copy_(to, of, non_blocking=True)
                torch.cuda.synchronize()

            return call

        def cupy() -> Call:
            cupy = self.peers["cupy"]
            down = case.direction == "down"
            on_device = [cupy.asarray(b) for b in (srcs if down else dsts)]
            on_host = [
                b if isinstance(b, np.ndarray) else b.numpy()
                for b in (dsts if down else srcs)
            ]
            stream = cupy.cuda.Stream(non_blocking=True)

            def call() -> None:
                for there, here in zip(on_device, on_host, strict=True):
                    if down:
                        there.get(stream=stream, out=here, blocking=False)
                    else:
                        there.set(here, stream=stream)
                stream.synchronize()

            return call

        return {
            "cumem": ours,
            "loop": lambda: runtime("loop"),
            "batch": lambda: runtime("batch"),
            "torch": torch,
            "cupy": cupy,
        }


def line(case: Case, links: dict[str, float]) -> str:
    """Return a row of the table."""
    ours = case.seconds.get("cumem")
    if ours is None:
        return f"{case.key}: {case.errors}"
    total = case.count * case.nbytes
    cells = [
        f"{case.key:<7}{case.direction:<5}{case.count:>6} x",
        f"{format_nbytes(case.nbytes):<8}",
        f"{case.route:<13}",
        f"{ours * 1e6:>9.0f} us",
        f"{ours / case.count * 1e9:>6.0f} ns a piece",
        f"{100 * total / ours / links[case.direction]:>4.0f} % of the link",
    ]
    cells += [
        f"{name} {case.seconds[name] / ours:.2f} x" if name in case.seconds else ""
        for name in LIBRARIES[1:]
    ]
    return "  ".join(cell for cell in cells if cell)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    bench = Bench(run.options)
    run.begin(bench.emulated)
    links = bench.link()
    run.note(1, link_bytes_per_second=links, missing=bench.missing)
    run.show(bench.cases(), lambda case: line(case, links))
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
