# SPDX-License-Identifier: Apache-2.0
"""Measure copies between two GPUs, and between the host and both.

    python benchmarks/two_gpus.py --json benchmarks/results/two-gpus-h200.json

The same run measures the ceilings, which are the driver's own copies: between the GPUs,
with and without peer access, and from page-locked memory to both at the same time. It also
measures the other libraries that are installed. Every byte that a library has written is
checked. The script also runs on emulated devices (CUMEM_EMULATED_DEVICES=2), and then says
that the figures are not a GPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import testing  # first, because it loads the core that can deny peers

# isort: split
from measure import Call, Run, times_of

import cumem
from cumem.units import format_nbytes

GIB = 1 << 30
SIZES = [1 << 20, 16 << 20, 128 << 20, GIB]
MOST_SECONDS = 0.5  # how long one library's call is repeated
PEERS = ("torch", "cupy")


@dataclass
class Case:
    """One piece of work, by cumem and by others.

    Parameters
    ----------
    key : str
        What is copied.
    nbytes : int
        How many bytes cross links, all copies together.
    ceiling : str
        The entry of `seconds` that cannot be beaten, or "" if there is none.
    seconds : dict
        The best time of each library.
    spread : dict
        The median time divided by the best one, for each library.
    errors : dict
        The reason for each library that was not measured.
    """

    key: str
    nbytes: int
    ceiling: str
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Driver:
    """Memory and streams of two devices, made by the driver through ctypes."""

    def __init__(self, room: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self.contexts = [ctypes.c_void_p(), ctypes.c_void_p()]
        self.streams = [ctypes.c_void_p(), ctypes.c_void_p()]
        self.memory = [[ctypes.c_uint64(), ctypes.c_uint64()] for _ in range(2)]
        for device in range(2):
            context = ctypes.byref(self.contexts[device])
            self._call("cuDevicePrimaryCtxRetain", context, device)
            with self.current(device):
                self._call("cuStreamCreate", ctypes.byref(self.streams[device]), 1)
                for address in self.memory[device]:
                    size = ctypes.c_size_t(room)
                    self._call("cuMemAlloc_v2", ctypes.byref(address), size)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises OSError if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code not in (0, 704):  # 704 means that peer access is enabled already
            raise OSError(f"{name} failed with {code}")

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make a device's context current during the ``with`` block."""
        self._call("cuCtxPushCurrent_v2", self.contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def enable(self) -> None:
        """Let each device use memory that cuMemAlloc has allocated on the other."""
        for device in range(2):
            with self.current(device):
                self._call("cuCtxEnablePeerAccess", self.contexts[1 - device], 0)

    def close(self) -> None:
        """Free the memory."""
        for device in range(2):
            with self.current(device):
                for address in self.memory[device]:
                    self._call("cuMemFree_v2", address)

    def _synchronize(self) -> None:
        """Wait for both devices."""
        for device in range(2):
            with self.current(device):
                self._call("cuStreamSynchronize", self.streams[device])

    def peer(self, nbytes: int, ways: int) -> Call:
        """Return a call that copies from device 0 to 1 and, with two ways, also back."""

        def call() -> None:
            for way in range(ways):
                with self.current(way):
                    self._call(
                        "cuMemcpyPeerAsync",
                        self.memory[1 - way][1],
                        self.contexts[1 - way],
                        self.memory[way][0],
                        self.contexts[way],
                        ctypes.c_size_t(nbytes),
                        self.streams[way],
                    )
            self._synchronize()

        return call

    def to_both(self, hosts: list[int], nbytes: int) -> Call:
        """Return a call that copies page-locked memory to both devices."""

        def call() -> None:
            for device, host in enumerate(hosts):
                with self.current(device):
                    self._call(
                        "cuMemcpyHtoDAsync_v2",
                        self.memory[device][0],
                        ctypes.c_void_p(host),
                        ctypes.c_size_t(nbytes),
                        self.streams[device],
                    )
            self._synchronize()

        return call


def in_threads(calls: list[Call]) -> None:
    """Make each call in a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Bench:
    """The memory that all cases share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.seconds = 0.02 if options.quick else MOST_SECONDS
        small = self.emulated or options.quick
        self.sizes = [2 << 20] if small else SIZES
        self.room = max(self.sizes)
        self.missing: dict[str, str] = {}
        self.driver = None if self.emulated else Driver(self.room)
        self.host = np.random.default_rng(1).integers(
            0, 1 << 31, self.room // 4, dtype="i4"
        )
        self.back = np.zeros_like(self.host)
        self.modules: dict[str, Any] = {}
        for name in PEERS:
            if self.emulated:
                self.missing[name] = "needs a GPU"
            elif importlib.util.find_spec(name) is None:
                self.missing[name] = "not installed"
            else:
                self.modules[name] = __import__(name)

    # -- one case --------------------------------------------------------------------------

    def run(
        self, case: Case, calls: dict[str, Call], check: Callable[[], None]
    ) -> Case:
        """Time each library's call, and then check what it has written."""
        for name, call in calls.items():
            try:
                times = times_of(call, self.seconds)
            except (RuntimeError, OSError, MemoryError, ValueError) as error:
                case.errors[name] = str(error).splitlines()[0]
                continue
            if not name.startswith("driver"):
                check()
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
        return case

    def expect(self, wanted: np.ndarray[Any, Any], *buffers: Any) -> None:
        """Check that the buffers have the wanted values, and overwrite them."""
        for buffer in buffers:
            got = cumem.empty(wanted.shape, wanted.dtype, "pinned")
            cumem.copy(got, buffer)
            if not np.array_equal(got.numpy(), wanted):
                raise AssertionError(f"wrong bytes: {wanted.shape} on {buffer.device}")
            buffer.fill(0)
            cumem.Device(buffer.device).synchronize()

    # -- between devices -------------------------------------------------------------------

    def apart(self) -> Iterator[Case]:
        """Measure copies without peer access, by the driver and by cumem."""
        if not testing.HAS_HOOKS:
            print(f"left out, copies without peer access: {testing.WITHOUT_HOOKS}")
            return
        for nbytes in self.sizes:
            calls: dict[str, Call] = {}
            if self.driver is not None:
                calls["driver"] = self.driver.peer(nbytes, 1)
            near, far = self.ends(nbytes)
            calls["cumem"] = lambda far=far, near=near: cumem.copy(far, near)
            testing.deny_peers(True)
            try:
                yield self.run(
                    Case("peer, no access", nbytes, "driver"),
                    calls,
                    lambda n=nbytes, far=far: self.expect(self.host[: n // 4], far),
                )
            finally:
                testing.deny_peers(False)

    def ends(self, nbytes: int, segments: str = "auto") -> list[Any]:
        """Return the source on device 0 and a target on device 1."""
        made = []
        for device in range(2):
            pool = cumem.Pool("device", device=device, segments=segments)
            made.append(pool.allocate(nbytes).view("i4"))
            made[-1].fill(0)
        cumem.copy(made[0], self.host[: nbytes // 4])
        return made

    def peer(self) -> Iterator[Case]:
        """Measure copies with peer access, in one direction and in both."""
        for nbytes in self.sizes:
            wanted = self.host[: nbytes // 4]
            near, far = self.ends(nbytes)
            plain_near, plain_far = self.ends(nbytes, "malloc")
            calls: dict[str, Call] = {
                "cumem": lambda far=far, near=near: cumem.copy(far, near),
                "cumem, cudaMalloc": lambda far=plain_far, near=plain_near: cumem.copy(
                    far, near
                ),
            }
            # This copy makes cumem enable peer access itself, as it would in a user's
            # program. So it has to come before `Driver.enable`.
            cumem.copy(plain_far, plain_near)
            if self.driver is not None:
                self.driver.enable()
                calls["driver"] = self.driver.peer(nbytes, 1)
            calls |= self.peers_between(near, far)
            plain_far.fill(0)

            def check(
                wanted: Any = wanted, far: Any = far, plain_far: Any = plain_far
            ) -> None:
                got = cumem.empty(wanted.shape, wanted.dtype, "pinned")
                cumem.copy(got, plain_far)
                self.expect(wanted, far if not got.numpy().any() else plain_far)

            yield self.run(Case("peer, one way", nbytes, "driver"), calls, check)
            yield self.both_ways(nbytes, near, far)

    def both_ways(self, nbytes: int, near: Any, far: Any) -> Case:
        """Measure two copies in opposite directions at the same time."""
        wanted = self.host[: nbytes // 4]
        back = cumem.zeros(wanted.shape, "i4", "device", device=0)
        other = cumem.empty(wanted.shape, "i4", "device", device=1)
        cumem.copy(other, wanted)
        streams = [cumem.Stream(device=device) for device in range(2)]

        def call() -> None:
            handles = [
                cumem.copy_async(far, near, stream=streams[0]),
                cumem.copy_async(back, other, stream=streams[1]),
            ]
            for handle in handles:
                handle.wait()

        calls: dict[str, Call] = {"cumem": call}
        if self.driver is not None:
            calls["driver"] = self.driver.peer(nbytes, 2)
        if "torch" in self.modules:
            calls["torch"] = self.torch_both_ways(near, far, other, back)
        case = Case("peer, both ways", 2 * nbytes, "driver")
        return self.run(case, calls, lambda: self.expect(wanted, far, back))

    def torch_both_ways(self, near: Any, far: Any, other: Any, back: Any) -> Call:
        """Return a call of PyTorch's copies, each on a stream of its source's device."""
        torch = self.modules["torch"]
        tensors = [torch.from_dlpack(end) for end in (near, far, other, back)]
        streams = [torch.cuda.Stream(device=device) for device in range(2)]

        def call() -> None:
            for way, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    tensors[2 * way + 1].copy_(tensors[2 * way], non_blocking=True)
            for stream in streams:
                stream.synchronize()

        return call

    def torch_between(self, near: Any, far: Any) -> Call:
        """Return a call that copies by PyTorch."""
        torch = self.modules["torch"]
        target, source = torch.from_dlpack(far), torch.from_dlpack(near)

        def call() -> None:
            target.copy_(source)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)

        return call

    def peers_between(self, near: Any, far: Any) -> dict[str, Call]:
        """Return the calls with which other libraries make the same copy."""
        calls: dict[str, Call] = {}
        if "torch" in self.modules:
            calls["torch"] = self.torch_between(near, far)
        if "cupy" in self.modules:
            cupy = self.modules["cupy"]
            with cupy.cuda.Device(0):
                left = cupy.from_dlpack(near)
            with cupy.cuda.Device(1):
                right = cupy.from_dlpack(far)

            def by_cupy() -> None:
                with cupy.cuda.Device(1):
                    cupy.copyto(right, left)
                    cupy.cuda.get_current_stream().synchronize()

            calls["cupy"] = by_cupy
        return calls

    def strided(self) -> Iterator[Case]:
        """Measure copies between devices where one end or both are not contiguous."""
        nbytes = self.room // 4
        wanted = self.host[: nbytes // 4]
        near, far = self.ends(2 * nbytes)
        cumem.copy(near[::2], wanted)
        packed = far[: nbytes // 4]
        for key, to, source in (
            ("every second of 4 bytes to packed", packed, near[::2]),
            ("every second of 4 bytes, both", far[::2], near[::2]),
        ):
            to.fill(0)
            calls: dict[str, Call] = {
                "cumem": lambda to=to, source=source: cumem.copy(to, source)
            }
            if "torch" in self.modules:
                calls["torch"] = self.torch_between(source, to)
            yield self.run(
                Case(f"peer, {key}", nbytes, ""),
                calls,
                lambda to=to: self.expect(wanted, to),
            )

    # -- the host and both -----------------------------------------------------------------

    def together(self) -> Iterator[Case]:
        """Measure copies of one array to both devices, and of its halves there and back."""
        for nbytes in self.sizes:
            wanted = self.host[: nbytes // 4]
            dsts = [
                cumem.zeros(wanted.shape, "i4", "device", device=d) for d in range(2)
            ]
            pinned = cumem.empty(wanted.shape, "i4", "pinned")
            cumem.copy(pinned, wanted)
            calls: dict[str, Call] = {
                "cumem": lambda s=pinned, d=dsts: cumem.broadcast(d, s)
            }
            if self.driver is not None:
                hosts = [pinned.ptr, pinned.ptr]
                calls["driver"] = self.driver.to_both(hosts, nbytes)
            yield self.run(
                Case("pinned to both", 2 * nbytes, "driver"),
                calls,
                lambda w=wanted, d=dsts: self.expect(w, *d),
            )
            ceiling = {"driver, pinned": calls["driver"]} if self.driver else {}
            calls = {"cumem": lambda s=wanted, d=dsts: cumem.broadcast(d, s)}
            calls |= self.torch_to_both([wanted, wanted], dsts) | ceiling
            yield self.run(
                Case("array to both", 2 * nbytes, "driver, pinned"),
                calls,
                lambda w=wanted, d=dsts: self.expect(w, *d),
            )
            yield from self.halves(nbytes)

    def halves(self, nbytes: int) -> Iterator[Case]:
        """Measure copies of one half of the array to each device, and back."""
        wanted = self.host[: nbytes // 4]
        half = wanted.size // 2
        dsts = [cumem.zeros(half, "i4", "device", device=d) for d in range(2)]
        parts = [wanted[:half], wanted[half:]]

        def check(dsts: Any = dsts) -> None:
            for part, dst in zip(parts, dsts, strict=True):
                self.expect(part, dst)

        calls: dict[str, Call] = {"cumem": lambda: cumem.scatter(dsts, wanted)}
        calls |= self.torch_to_both(parts, dsts)
        yield self.run(Case("halves of an array to both", nbytes, ""), calls, check)
        cumem.scatter(dsts, wanted)
        back = self.back[: nbytes // 4]

        def check_back() -> None:
            if not np.array_equal(back, wanted):
                raise AssertionError("wrong bytes: gathered")
            back[:] = 0

        calls = {"cumem": lambda: cumem.gather(back, dsts)}
        calls |= self.torch_to_host(dsts, [back[:half], back[half:]])
        yield self.run(Case("halves from both", nbytes, ""), calls, check_back)

    def torch_to_both(self, hosts: list[Any], dsts: list[Any]) -> dict[str, Call]:
        """Return PyTorch's copies to both, one after the other and in two threads."""
        return self.torch_pairs(hosts, dsts, up=True)

    def torch_to_host(self, srcs: list[Any], hosts: list[Any]) -> dict[str, Call]:
        """Return PyTorch's copies back to the host, likewise."""
        return self.torch_pairs(hosts, srcs, up=False)

    def torch_pairs(
        self, hosts: list[Any], buffers: list[Any], *, up: bool
    ) -> dict[str, Call]:
        """Return PyTorch's copies of all pairs, one after the other and in two threads."""
        if "torch" not in self.modules:
            return {}
        torch = self.modules["torch"]
        on_host = [torch.from_numpy(host) for host in hosts]
        on_device = [torch.from_dlpack(buffer) for buffer in buffers]
        pairs = zip(on_device, on_host, strict=True)
        pairs = list(pairs if up else ((host, there) for there, host in pairs))

        def move(pair: tuple[Any, Any]) -> None:
            pair[0].copy_(pair[1])
            for tensor in pair:
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)

        def in_turn() -> None:
            for pair in pairs:
                move(pair)

        def at_once() -> None:
            in_threads([lambda pair=pair: move(pair) for pair in pairs])

        return {"torch": in_turn, "torch, two threads": at_once}


def line(case: Case) -> str:
    """Return a row of the table."""
    ours = case.seconds.get("cumem")
    if ours is None:
        return f"{case.key}: {case.errors}"
    cells = [
        f"{case.key:<40}{format_nbytes(case.nbytes):>8}",
        f"{ours * 1e6:>10.1f} us",
        f"{case.nbytes / ours / 1e9:>6.1f} GB/s",
    ]
    if case.ceiling in case.seconds:
        percent = 100 * case.seconds[case.ceiling] / ours
        cells.append(f"{percent:>5.1f} % of the {case.ceiling}")
    cells += [
        f"{name} {seconds / ours:.2f} x"
        for name, seconds in case.seconds.items()
        if name not in ("cumem", case.ceiling)
    ]
    cells += [f"{name}: {error}" for name, error in case.errors.items()]
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    if cumem.device_count() < 2:
        print("this benchmark needs two GPUs", file=sys.stderr)
        return 2
    bench = Bench(run.options)
    run.begin(bench.emulated)
    run.note(1, missing=bench.missing)
    for source in (bench.apart, bench.peer, bench.strided, bench.together):
        run.show(source(), line)
    if bench.driver is not None:
        bench.driver.close()
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
