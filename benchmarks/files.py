# SPDX-License-Identifier: Apache-2.0
"""Measure reading and writing files against the link, the disk and other libraries.

    python benchmarks/files.py --dir /data --json benchmarks/results/files-h200.json

The script reads a file from the page cache to the device, to page-locked memory and to
ordinary memory. It then drops the file's pages before each call, and reads the same file
from the disk. It also writes device memory to a file, reads many short ranges in random
order, and copies a memory-mapped file. The bytes of each case are compared.

The same run measures what cumem is compared with: the link between host and GPU, by a copy
of pinned memory; plain preads by several threads, which are the ceiling; and the libraries
that are installed. The script also runs on the emulated device, and then says that the
figures are not a GPU's.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.units import format_nbytes, parse_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Call, Run

MIB = 1 << 20
GIB = 1 << 30
PEERS = ("kvikio", "torch")
ROUNDS = 5

Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """One transfer, by cumem and by others.

    Parameters
    ----------
    key : str
        Where the bytes come from and go to.
    link : str or None
        The direction of the link that the bytes cross, ``"up"`` (to the device) or
        ``"down"``, or None if they stay on the host.
    nbytes : int
        How many bytes are transferred.
    seconds : dict
        The best time of each library. Names that begin with ``raw`` are system calls
        without a library, which are the ceiling.
    spread : dict
        The median time divided by the best one, for each library.
    errors : dict
        The reason for each library that was not measured.
    """

    key: str
    link: str | None
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def evict(path: Path) -> None:
    """Drop the file's pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_read(path: Path, target: Array, threads: int, step: int, direct: bool) -> Call:
    """Return a call that reads `step` bytes at a time into `target`, in several threads."""

    def call() -> None:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            with ThreadPoolExecutor(threads) as pool:
                parts = range(0, target.size, step)
                list(
                    pool.map(
                        lambda at: os.preadv(fd, [target[at : at + step]], at), parts
                    )
                )
        finally:
            os.close(fd)

    return call


class Kvikio:
    """KvikIO with a given number of threads and length of each thread's pieces."""

    def __init__(self, library: Any, threads: int, task_nbytes: int) -> None:
        self._library = library
        self._settings = {"num_threads": threads, "task_size": task_nbytes}

    def _set(self) -> None:
        """Set KvikIO's defaults, which hold for the whole process."""
        defaults = importlib.import_module(f"{self._library.__name__}.defaults")
        if hasattr(defaults, "set"):
            defaults.set(self._settings)
            return
        for name, value in self._settings.items():
            getattr(defaults, f"{name}_reset")(value)

    def read(self, path: Path, target: Any) -> Call:
        """Return a call that reads the whole file."""

        def call() -> None:
            with self._library.CuFile(str(path), "r") as file:
                file.read(target)

        self._set()
        return call

    def write(self, path: Path, source: Any) -> Call:
        """Return a call that writes the whole file."""

        def call() -> None:
            with self._library.CuFile(str(path), "w") as file:
                file.write(source)

        self._set()
        return call


class Bench:
    """The file and the memory that all cases share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.nbytes = parse_nbytes(options.nbytes)
        if options.quick or self.emulated:
            self.nbytes = min(self.nbytes, 40 * MIB)
        self.nbytes -= self.nbytes % (4 * MIB)
        self.rounds = 1 if options.quick else ROUNDS
        self.only = re.compile(options.only)
        self.threads = len(os.sched_getaffinity(0))
        self.source, self.target = folder / "source", folder / "target"
        rng = np.random.default_rng(1)
        some = np.frombuffer(rng.bytes(min(self.nbytes, GIB)), "u8")
        self.content = np.tile(some, -(-self.nbytes // some.nbytes))
        self.content = self.content[: self.nbytes // 8]
        for i in range(0, self.nbytes // 8, 1 << 17):
            self.content[i] = i  # so a part that lands in the wrong place is noticed
        self.content = self.content.view("u1")
        self.content.tofile(self.source)
        self.device = cumem.empty_device(self.nbytes, "u1")
        self.peers: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        for name in PEERS:
            if self.emulated:
                self.missing[name] = "needs a GPU"
            elif importlib.util.find_spec(name) is None:
                self.missing[name] = "not installed"
            else:
                self.peers[name] = __import__(name)

    # -- one case --------------------------------------------------------------------------

    def times_of(self, call: Call, before: Call | None) -> list[float]:
        """Return the seconds of each call but the first; `before` runs first, untimed."""
        times = []
        for _ in range(1 + self.rounds):
            if before is not None:
                before()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times[1:]

    def run(
        self,
        case: Case,
        calls: dict[str, Callable[[], Call]],
        check: Callable[[], None],
        before: Call | None = None,
    ) -> Iterator[Case]:
        """Time each library's call and check its result."""
        if not self.only.search(case.key):
            return
        for name, make in calls.items():
            if name.split()[0] in self.missing:
                continue
            try:
                times = self.times_of(make(), before)
            except (RuntimeError, OSError, MemoryError, ValueError) as error:
                case.errors[name] = (str(error) or type(error).__name__).splitlines()[0]
                continue
            check()
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
        yield case

    def links(self) -> dict[str, float]:
        """Return the rate of copies of pinned memory each way, in bytes a second."""
        nbytes = min(self.nbytes, 512 * MIB)
        pinned = cumem.zeros(nbytes, "u1", "pinned")
        device = self.device[:nbytes]
        up = min(self.times_of(lambda: cumem.copy(device, pinned), None))
        down = min(self.times_of(lambda: cumem.copy(pinned, device), None))
        return {"up": nbytes / up, "down": nbytes / down}

    def check_bytes(self, got: Array) -> None:
        """Check that an array has the file's bytes, and overwrite it for the next call."""
        if not np.array_equal(got, self.content):
            raise AssertionError("wrong bytes")
        got[:] = 0

    def check_device(self) -> None:
        """Check that the device's memory has the file's bytes, and overwrite it."""
        step = 256 * MIB
        for at in range(0, self.nbytes, step):
            part = self.device[at : at + step]
            got = cumem.empty_pinned(part.shape, "u1")
            cumem.copy(got, part)
            if not np.array_equal(got.numpy(), self.content[at : at + step]):
                raise AssertionError(f"wrong bytes from {at} on")
        self.device.fill(0)
        cumem.Device(self.device.device.index).synchronize()

    # -- the cases -------------------------------------------------------------------------

    def cases(self) -> Iterator[Case]:
        """Measure all cases."""
        yield from self.to_device("page cache", None)
        yield from self.to_host("page cache", None)
        yield from self.mapped()
        yield from self.ranges()
        yield from self.to_file()
        yield from self.to_device("disk", lambda: evict(self.source))
        yield from self.to_host("disk", lambda: evict(self.source))

    def peers_to_device(self) -> dict[str, Callable[[], Call]]:
        """Return the calls with which other libraries read a file to the device."""
        device, source = self.device, self.source

        def mapped() -> Call:
            torch = self.peers["torch"]
            target = torch.as_tensor(device, device="cuda")

            def call() -> None:
                target.copy_(torch.from_numpy(np.memmap(source, "u1", "c")))
                torch.cuda.synchronize()

            return call

        def fromfile() -> Call:
            torch = self.peers["torch"]
            target = torch.as_tensor(device, device="cuda")

            def call() -> None:
                target.copy_(torch.from_numpy(np.fromfile(source, "u1")))
                torch.cuda.synchronize()

            return call

        def kvikio(threads: int, task_nbytes: int) -> Callable[[], Call]:
            return lambda: Kvikio(self.peers["kvikio"], threads, task_nbytes).read(
                source, device
            )

        return {
            "kvikio as it comes": kvikio(1, 4 * MIB),
            "kvikio 8 x 16 MiB": kvikio(8, 16 * MIB),
            "torch np.memmap": mapped,
            "torch np.fromfile": fromfile,
        }

    def to_device(self, place: str, before: Call | None) -> Iterator[Case]:
        """Measure reading the whole file into device memory."""
        device, source = self.device, self.source

        def read(direct: Any) -> Callable[[], Call]:
            return lambda: lambda: cumem.fromfile(source, out=device, direct=direct)

        calls = {"cumem": read("auto")}
        if place == "disk":
            calls |= {"cumem buffered": read(False), "cumem direct": read(True)}
        case = Case(f"{place} to device", "up", self.nbytes)
        yield from self.run(
            case, calls | self.peers_to_device(), self.check_device, before
        )

    def to_host(self, place: str, before: Call | None) -> Iterator[Case]:
        """Measure reading the whole file into host memory, by cumem and by plain preads."""
        for kind in ("pinned", "ordinary"):
            if kind == "pinned":
                target = cumem.empty_pinned(self.nbytes, "u1").numpy()
            else:
                target = np.frombuffer(mmap.mmap(-1, self.nbytes), "u1")
            target[:] = 0
            self.read_to(place, kind, target)
            yield from self.run(
                Case(f"{place} to {kind} memory", None, self.nbytes),
                self.read_to(place, kind, target),
                lambda target=target: self.check_bytes(target),
                before,
            )

    def read_to(
        self, place: str, kind: str, target: Array
    ) -> dict[str, Callable[[], Call]]:
        """Return, for each library, a function that makes the call to time."""
        source = self.source

        def into() -> None:
            with source.open("rb") as file:
                file.readinto(target)

        def raw(threads: int, step: int, direct: bool) -> Callable[[], Call]:
            return lambda: raw_read(source, target, threads, step, direct)

        calls: dict[str, Callable[[], Call]] = {
            "cumem": lambda: lambda: cumem.fromfile(source, out=target),
            f"raw {self.threads} x 16 MiB": raw(self.threads, 16 * MIB, False),
            "raw 8 x 16 MiB": raw(8, 16 * MIB, False),
            "readinto": lambda: into,
        }
        if place == "disk":
            calls["raw 16 x 4 MiB direct"] = raw(16, 4 * MIB, True)
        return calls

    def mapped(self) -> Iterator[Case]:
        """Measure copies of an np.memmap, which other libraries read by page faults."""
        torch_calls = self.peers_to_device()
        yield from self.run(
            Case("np.memmap to device", "up", self.nbytes),
            {
                "cumem": lambda: (
                    lambda: cumem.copy(self.device, np.memmap(self.source, "u1", "r"))
                ),
                "torch np.memmap": torch_calls["torch np.memmap"],
            },
            self.check_device,
        )

    def ranges(self) -> Iterator[Case]:
        """Measure reading the whole file as short ranges in random order."""
        rng = np.random.default_rng(2)
        for size in (MIB, 64 << 10, 4 << 10):
            total = min(self.nbytes, 16384 * size)
            starts = [int(i) * size for i in rng.permutation(total // size)]
            pairs = [(at, self.device[at : at + size]) for at in starts]
            rest = [(at, self.device[at:]) for at in (total,) if at < self.nbytes]

            def one_by_one(pairs: Any = pairs) -> None:
                for offset, part in pairs:
                    cumem.read_ranges(self.source, [(offset, part)])

            def check(rest: Any = rest) -> None:
                cumem.read_ranges(self.source, rest)
                self.check_device()

            yield from self.run(
                Case(f"ranges of {format_nbytes(size)} to device", "up", total),
                {
                    "cumem": lambda pairs=pairs: (
                        lambda: cumem.read_ranges(self.source, pairs)
                    ),
                    "cumem one by one": lambda: one_by_one,
                },
                check,
            )

    def to_file(self) -> Iterator[Case]:
        """Measure writing device memory into the page cache, and on to the disk."""
        cumem.fromfile(self.source, out=self.device)
        device, target = self.device, self.target

        def write(**options: Any) -> Callable[[], Call]:
            return lambda: lambda: cumem.tofile(target, device, **options)

        def torch() -> Call:
            source = self.peers["torch"].as_tensor(device, device="cuda")
            return lambda: source.cpu().numpy().tofile(target)

        def kvikio(threads: int, task_nbytes: int) -> Callable[[], Call]:
            return lambda: Kvikio(self.peers["kvikio"], threads, task_nbytes).write(
                target, device
            )

        def check() -> None:
            self.check_bytes(np.fromfile(target, "u1"))
            target.write_bytes(b"")

        yield from self.run(
            Case("device to page cache", "down", self.nbytes),
            {
                "cumem": write(),
                "kvikio as it comes": kvikio(1, 4 * MIB),
                "kvikio 8 x 16 MiB": kvikio(8, 16 * MIB),
                "torch numpy.tofile": torch,
            },
            check,
        )
        yield from self.run(
            Case("device to disk", "down", self.nbytes),
            {
                "cumem": write(fsync=True),
                "cumem direct": write(fsync=True, direct=True),
            },
            check,
        )


def line(case: Case, links: dict[str, float]) -> str:
    """Return a row of the table."""
    cells = [f"{case.key:<32}{format_nbytes(case.nbytes):>8}"]
    for name, seconds in case.seconds.items():
        rate = case.nbytes / seconds
        percent = f" ({100 * rate / links[case.link]:.0f} %)" if case.link else ""
        cells.append(f"{name} {rate / 1e9:.2f} GB/s{percent}")
    cells += [f"{name}: {why}" for name, why in case.errors.items()]
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(
        __doc__,
        nbytes={"default": "4GiB", "help": "length of the file"},
        dir={"metavar": "FOLDER", "help": "where to put it (default: tempfile's)"},
        only={"default": "", "metavar": "REGEX", "help": "only cases that match"},
    )
    with tempfile.TemporaryDirectory(dir=run.options.dir) as folder:
        bench = Bench(run.options, Path(folder))
        run.begin(bench.emulated)
        links = bench.links()
        print(f"link: {links['up'] / 1e9:.1f} up, {links['down'] / 1e9:.1f} GB/s down")
        run.note(1, link_bytes_per_second=links, missing=bench.missing)
        run.show(bench.cases(), lambda case: line(case, links))
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
