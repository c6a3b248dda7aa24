# SPDX-License-Identifier: Apache-2.0
"""Look for memory that is handed out again while a library still uses it.

    python corruption_hunt.py [--seconds 180] [--seed 1] [--nbytes 4194304] [--only TEXT]
                              [--json FILE]

A library copies from or to memory of an allocator, on a stream that the allocator does not
know. The copy waits there behind other work. Meanwhile the memory is dropped, and its next
users take memory of the same size and write it. Then the copy runs. If one of the next
users was given the same bytes, either the copy's result is wrong or that user's bytes are.

Each pattern is played with the allocator of another library, called the peer, and then with
cumem in the peer's place. With the peer, data is expected to be corrupted. A round counts
if the copy was still waiting when the next users had written. If only an address is handed
out, cumem learns of the copy only from `record_stream`. Such a pattern is played with that
call and without it, and the second case is called "documented".

On a GPU the peers are those of PyTorch, CuPy and RMM that are installed, and with a second
GPU some copies are made there. On the emulated device cumem's own runtime makes the copies,
and the peers are replaced by an allocator that hands out the same memory at once. The exit
status is 0 if cumem's data was always right, and 1 if it was wrong or if no round counted.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import importlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.strangers import Stranger

import cumem
from cumem import info

#: What the last user of some memory writes into it, and what the next ones write.
OLD, NEW = 1, 2
NEXT_USERS = 4
#: The largest number of pieces of work by which a copy is delayed.
MOST_DELAY = 1 << 14


def module(name: str) -> ModuleType:
    """Import a library, or raise a MissingError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingError(f"{name} is not installed") from error


class MissingError(Exception):
    """A library or a device that a pattern needs is not there."""


# -- the libraries that copy late ------------------------------------------------------
#
# Each class queues work that takes long (`delay`) on a stream of its own, and behind it a
# copy from memory (`read`) or to it (`write`).


class CupyWork:
    """Copies by CuPy on a stream of its own."""

    name = "CuPy"

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.cupy = module("cupy")
        if device >= self.cupy.cuda.runtime.getDeviceCount():
            raise MissingError("there is no second GPU")
        self.device = self.cupy.cuda.Device(device)
        self.delay_count = 64
        with self.device:
            self.stream = self.cupy.cuda.Stream(non_blocking=True)
            self.ends = self.cupy.zeros((2, 1 << 28), "u1")
            self.target = self.cupy.zeros(nbytes, "u1")
            self.source = self.cupy.empty(nbytes, "u1")
            self.source.data.memset(OLD, nbytes)  # full() would need a compiler
            self.device.synchronize()

    def delay(self) -> None:
        with self.device, self.stream:
            for _ in range(self.delay_count):
                self.ends[0].data.copy_from_device_async(
                    self.ends[1].data, self.ends.shape[1], self.stream
                )

    def read(self, memory: Any) -> None:
        """Start a copy from a NumPy array or, within the device, from a CuPy array."""
        with self.device, self.stream:
            if isinstance(memory, np.ndarray):
                self.target.set(memory, stream=self.stream)
            else:
                self.target.data.copy_from_device_async(
                    memory.data, self.target.nbytes, self.stream
                )

    def write(self, memory: Any) -> None:
        with self.device, self.stream:
            if isinstance(memory, np.ndarray):
                self.source.get(stream=self.stream, out=memory, blocking=False)
            else:
                memory.data.copy_from_device_async(
                    self.source.data, self.source.nbytes, self.stream
                )

    def view(self, exporter: Any) -> Any:
        with self.device, self.stream:
            return self.cupy.from_dlpack(exporter)

    def view_of_dictionary(self, exporter: Any) -> Any:
        with self.device, self.stream:
            return self.cupy.asarray(exporter)

    def view_of_address(self, address: int, nbytes: int) -> Any:
        memory = self.cupy.cuda.UnownedMemory(address, nbytes, None)
        pointer = self.cupy.cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray((nbytes,), "u1", pointer)

    def is_late(self) -> bool:
        return not self.stream.done

    def wait(self) -> None:
        self.stream.synchronize()

    def result(self) -> np.ndarray:
        with self.device:
            return self.cupy.asnumpy(self.target)


class TorchWork:
    """Copies by PyTorch on a stream of its own."""

    name = "PyTorch"

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.torch = module("torch")
        if device >= self.torch.cuda.device_count():
            raise MissingError("there is no GPU for PyTorch, or no second one")
        self.where = f"cuda:{device}"
        self.stream = self.torch.cuda.Stream(device)
        self.delay_count = 64
        make = {"dtype": self.torch.uint8, "device": self.where}
        self.target = self.torch.zeros(nbytes, **make)
        self.source = self.torch.full((nbytes,), OLD, **make)
        self.torch.cuda.synchronize(device)

    def delay(self) -> None:
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(self.delay_count * 200_000)

    def _tensor(self, memory: Any) -> Any:
        is_array = isinstance(memory, np.ndarray)
        return self.torch.from_numpy(memory) if is_array else memory

    def read(self, memory: Any) -> None:
        with self.torch.cuda.stream(self.stream):
            self.target.copy_(self._tensor(memory), non_blocking=True)

    def write(self, memory: Any) -> None:
        with self.torch.cuda.stream(self.stream):
            self._tensor(memory).copy_(self.source, non_blocking=True)

    def view(self, exporter: Any) -> Any:
        with self.torch.cuda.stream(self.stream):
            return self.torch.from_dlpack(exporter)

    def view_of_dictionary(self, exporter: Any) -> Any:
        with self.torch.cuda.stream(self.stream):
            return self.torch.as_tensor(exporter, device=self.where)

    def is_late(self) -> bool:
        return not self.stream.query()

    def wait(self) -> None:
        self.stream.synchronize()

    def result(self) -> np.ndarray:
        return self.target.cpu().numpy()


class DriverWork:
    """Copies between plain addresses, so that no object keeps the memory alive."""

    name = "the CUDA runtime"

    def __init__(self, nbytes: int, device: int = 0) -> None:
        if device >= cumem.device_count():
            raise MissingError("there is no second GPU")
        make = {"dtype": "u1", "device": device}
        self.device, self.delay_count = device, MOST_DELAY
        self.target = cumem.zeros(nbytes, kind="device", **make)
        self.source = cumem.full(nbytes, OLD, kind="device", **make)
        cumem.Device(device).synchronize()
        self.stranger = Stranger(device)

    @property
    def stream(self) -> cumem.Stream:
        return self.stranger.stream

    def delay(self) -> None:
        self.stranger = Stranger(self.device)
        self.stranger.__enter__()

    def _copy(self, dst: Any, src: Any) -> None:
        self.stranger.copy(address_of(dst), address_of(src), self.target.nbytes)

    def read(self, memory: Any) -> None:
        self._copy(self.target, memory)

    def write(self, memory: Any) -> None:
        self._copy(memory, self.source)

    def view(self, exporter: Any) -> Any:
        return Viewed(exporter)

    view_of_dictionary = view

    def view_of_address(self, address: int, nbytes: int) -> Any:
        return address

    def is_late(self) -> bool:
        return not self.stream.done

    def wait(self) -> None:
        self.stranger.__exit__(None, None, None)

    def result(self) -> np.ndarray:
        return self.target.to_numpy()


class Viewed:
    """Stands for a GPU library that holds a DLPack capsule and uses the address."""

    def __init__(self, buffer: cumem.DeviceBuffer) -> None:
        self.ptr = buffer.ptr
        self.capsule = buffer.__dlpack__()


def address_of(memory: Any) -> int:
    if isinstance(memory, np.ndarray):
        return memory.ctypes.data
    return memory if isinstance(memory, int) else memory.ptr


# -- allocators of host memory ---------------------------------------------------------

#: A function that allocates a number of bytes.
Take = Callable[[int], np.ndarray]


def torch_pinned() -> Take:
    torch = module("torch")
    return lambda nbytes: torch.empty(
        nbytes, dtype=torch.uint8, pin_memory=True
    ).numpy()


def torch_pinned_inside() -> Take:
    """Take memory that begins inside a block. PyTorch knows a block only by the address of
    its start, so it does not recognize such memory.
    """
    take = torch_pinned()
    return lambda nbytes: take(nbytes + 4096)[4096:]


def cupy_pinned() -> Take:
    cupyx = module("cupyx")
    return lambda nbytes: cupyx.empty_pinned(nbytes, "u1")


class Managed(np.ndarray):
    """An array over managed memory that CuPy allocated and that the array keeps alive."""

    keep: Any


def cupy_managed() -> Take:
    cupy = module("cupy")
    pool = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)

    def take(nbytes: int) -> np.ndarray:
        memory = pool.malloc(nbytes)
        content = (ctypes.c_uint8 * nbytes).from_address(memory.ptr)
        array = np.frombuffer(content, "u1").view(Managed)
        array.keep = memory
        return array

    return take


def at_once() -> Take:
    """Return a stand-in for a peer, which hands out the same memory again at once."""
    spare: dict[int, cumem.Buffer] = {}

    def take(nbytes: int) -> np.ndarray:
        if nbytes not in spare:
            spare[nbytes] = cumem.empty_pinned(nbytes, "u1")
        return spare[nbytes].numpy()

    return take


def ours(kind: str) -> Callable[[], Take]:
    """Return a function that makes an allocator of cumem's memory of this kind."""
    is_warm = False

    def take(nbytes: int) -> np.ndarray:
        nonlocal is_warm
        # A pool that grows waits for the device, as cudaMallocManaged does, and the copy
        # would then not be late. So the pool grows before the first round.
        if not is_warm:
            [cumem.empty(nbytes, "u1", kind) for _ in range(64)]
            is_warm = True
        return cumem.empty(nbytes, "u1", kind).numpy()

    return lambda: take


def ours_by_torch() -> Take:
    torch = module("torch")

    def take(nbytes: int) -> np.ndarray:
        buffer = cumem.empty_pinned(nbytes, "u1")
        return torch.frombuffer(buffer, dtype=torch.uint8).numpy()

    return take


def ours_by_dlpack() -> Take:
    torch = module("torch")
    return lambda nbytes: torch.from_dlpack(cumem.empty_pinned(nbytes, "u1")).numpy()


@dataclasses.dataclass
class Outcome:
    """What came of a round: whether the copy was late, memory was reused, data is wrong."""

    late: bool
    reused: bool
    corrupted: bool


def host_round(work: Any, take: Take, nbytes: int, writes: bool) -> Outcome:
    """Play a round with host memory, which is dropped while a late copy uses it."""
    memory = take(nbytes)
    memory[:] = OLD
    address = memory.ctypes.data
    work.delay()
    (work.write if writes else work.read)(memory)
    del memory
    users = [take(nbytes) for _ in range(NEXT_USERS)]
    for user in users:
        user[:] = NEW
    late = work.is_late()
    work.wait()
    reused = any(user.ctypes.data == address for user in users)
    wrong = (
        any((user != NEW).any() for user in users)
        if writes
        else (work.result() != OLD).any()
    )
    return Outcome(late, reused, bool(wrong))


# -- allocators of device memory -------------------------------------------------------


class CupyMemory:
    """CuPy arrays from its pool, made and dropped on one stream."""

    name = "CuPy"

    def __init__(self) -> None:
        self.cupy = module("cupy")
        self.stream = self.cupy.cuda.Stream(non_blocking=True)

    def take(self, nbytes: int, value: int) -> Any:
        with self.stream:
            array = self.cupy.empty(nbytes, "u1")
            array.data.memset_async(value, nbytes, self.stream)
            return array

    def wait(self) -> None:
        self.stream.synchronize()

    def address(self, array: Any) -> int:
        return array.data.ptr

    def values(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(array)


class TorchMemory:
    """PyTorch tensors, made and dropped on one stream."""

    name = "PyTorch"

    def __init__(self) -> None:
        self.torch = module("torch")
        if not self.torch.cuda.is_available():
            raise MissingError("there is no GPU for PyTorch")
        self.stream = self.torch.cuda.Stream()

    def take(self, nbytes: int, value: int) -> Any:
        with self.torch.cuda.stream(self.stream):
            make = {"dtype": self.torch.uint8, "device": "cuda"}
            return self.torch.empty(nbytes, **make).fill_(value)

    def wait(self) -> None:
        self.stream.synchronize()

    def address(self, tensor: Any) -> int:
        return tensor.data_ptr()

    def values(self, tensor: Any) -> np.ndarray:
        return tensor.cpu().numpy()


class RmmMemory:
    """Buffers of RMM's pool, made and dropped on one stream, and used through CuPy."""

    name = "RMM"

    def __init__(self) -> None:
        rmm = module("rmm")
        self.cupy = module("cupy")
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        theirs = module("rmm.pylibrmm.stream").Stream(self.stream)
        self.pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), 1 << 28)
        self.make = lambda nbytes: rmm.DeviceBuffer(
            size=nbytes, stream=theirs, mr=self.pool
        )

    def take(self, nbytes: int, value: int) -> Any:
        with self.stream:
            array = self.cupy.asarray(self.make(nbytes)).view("u1")
            array.data.memset_async(value, nbytes, self.stream)
            return array

    wait = CupyMemory.wait
    address = CupyMemory.address
    values = CupyMemory.values


class OurMemory:
    """cumem's buffers, made and dropped on one stream."""

    name = "cumem"

    def __init__(self) -> None:
        self.stream = cumem.Stream()

    def take(self, nbytes: int, value: int) -> Any:
        buffer = cumem.empty_device(nbytes, "u1", stream=self.stream)
        buffer.fill(value, stream=self.stream)
        return buffer

    def wait(self) -> None:
        self.stream.synchronize()

    def address(self, buffer: Any) -> int:
        return buffer.ptr

    def values(self, buffer: Any) -> np.ndarray:
        return buffer.to_numpy()


# These functions hand memory to a library, each in another way.


def as_it_is(work: Any, memory: Any) -> Any:
    return memory


def by_dlpack(work: Any, memory: Any) -> Any:
    return work.view(memory)


def by_dictionary(work: Any, memory: Any) -> Any:
    return work.view_of_dictionary(memory)


def by_address(work: Any, memory: Any) -> Any:
    return work.view_of_address(memory.ptr, memory.nbytes)


def by_address_and_announced(work: Any, memory: Any) -> Any:
    memory.record_stream(work.stream)
    return work.view_of_address(memory.ptr, memory.nbytes)


def device_round(
    work: Any, owner: Any, view: Callable[[Any, Any], Any], nbytes: int, writes: bool
) -> Outcome:
    """Play a round with device memory, which `view` hands to the late library."""
    memory = owner.take(nbytes, OLD)
    address = owner.address(memory)
    owner.wait()  # until the data is there
    work.delay()
    seen = view(work, memory)
    (work.write if writes else work.read)(seen)
    del seen, memory
    users = [owner.take(nbytes, NEW) for _ in range(NEXT_USERS)]
    owner.wait()
    late = work.is_late()
    work.wait()
    reused = any(owner.address(user) == address for user in users)
    wrong = (
        any((owner.values(user) != NEW).any() for user in users)
        if writes
        else (work.result() != OLD).any()
    )
    return Outcome(late, reused, bool(wrong))


# -- the patterns -------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """What came of one pattern: an allocator's memory with a library that copies late.

    `role` is "peer", "cumem", or "documented", which is cumem without a call that it needs.
    """

    key: str
    role: str
    memory: str
    work: str
    writes: bool
    rounds: int = 0
    late_rounds: int = 0
    reused_rounds: int = 0
    corrupted_rounds: int = 0
    missing: str | None = None
    error: str | None = None


#: A function that takes a number of bytes, and returns a function that plays a round with
#: memory of this size.
Play = Callable[[int], Callable[[], tuple[Outcome, Any]]]


@dataclasses.dataclass
class Pattern:
    """A case that has not been played yet."""

    key: str
    role: str
    memory: str
    work: str
    play: Play
    writes: bool


def host(
    key: str,
    role: str,
    memory: str,
    make: Callable[[], Take],
    kind: Any,
    device: int = 0,
) -> list[Pattern]:
    """Return two patterns with host memory: the library reads it, or writes it."""

    def patterns(writes: bool) -> Pattern:
        def play(nbytes: int) -> Callable[[], tuple[Outcome, Any]]:
            work, take = kind(nbytes, device), make()
            return lambda: (host_round(work, take, nbytes, writes), work)

        where = f"{kind.name} on device {device}" if device else kind.name
        return Pattern(key, role, memory, where, play, writes)

    return [patterns(False), patterns(True)]


def device(
    key: str,
    role: str,
    memory: str,
    owner_kind: Any,
    kind: Any,
    view: Callable[[Any, Any], Any],
) -> list[Pattern]:
    """Return two patterns with device memory: the library reads it, or writes it."""

    def patterns(writes: bool) -> Pattern:
        def play(nbytes: int) -> Callable[[], tuple[Outcome, Any]]:
            work, owner = kind(nbytes), owner_kind()
            return lambda: (device_round(work, owner, view, nbytes, writes), work)

        return Pattern(key, role, memory, kind.name, play, writes)

    return [patterns(False), patterns(True)]


PINNED = "pinned memory of a library, copied by another"
PART = "a part of a pinned block, copied by its own library"
OTHER_GPU = "pinned memory copied by another library on another GPU"
MANAGED = "managed memory that a device still uses, written by the host"
STREAM = "device memory dropped on its stream while another one uses it"
CONSUMER = "device memory dropped while a consumer of DLPack uses it"
ADDRESS = "memory of which nothing but the address was handed out"


def on_a_gpu() -> list[Pattern]:
    """Return the patterns with real libraries."""
    found = []
    for kind, make, memory in (
        (CupyWork, torch_pinned, "PyTorch, pinned"),
        (CupyWork, cupy_pinned, "CuPy, cupyx.empty_pinned"),
        (TorchWork, cupy_pinned, "CuPy, cupyx.empty_pinned"),
        (DriverWork, torch_pinned, "PyTorch, pinned"),
        (DriverWork, cupy_pinned, "CuPy, cupyx.empty_pinned"),
    ):
        found += host(PINNED, "peer", memory, make, kind)
    for kind in (CupyWork, TorchWork, DriverWork):
        for name in ("pinned", "mapped"):
            found += host(PINNED, "cumem", f"cumem, {name}", ours(name), kind)
        found += host(PINNED, "cumem", "cumem, torch.frombuffer", ours_by_torch, kind)
        found += host(PINNED, "cumem", "cumem, torch.from_dlpack", ours_by_dlpack, kind)
        found += host(OTHER_GPU, "cumem", "cumem, pinned", ours("pinned"), kind, 1)
    found += host(PART, "peer", "PyTorch, pinned", torch_pinned_inside, TorchWork)
    found += host(
        PART,
        "cumem",
        "cumem, pinned",
        lambda: lambda nbytes: ours("pinned")()(nbytes + 4096)[4096:],
        TorchWork,
    )
    found += host(OTHER_GPU, "peer", "PyTorch, pinned", torch_pinned, CupyWork, 1)
    for kind in (CupyWork, DriverWork):
        found += host(MANAGED, "peer", "CuPy, malloc_managed", cupy_managed, kind)
        found += host(MANAGED, "cumem", "cumem, managed", ours("managed"), kind)
    found += device(STREAM, "peer", "CuPy", CupyMemory, CupyWork, as_it_is)
    found += device(STREAM, "peer", "PyTorch", TorchMemory, TorchWork, as_it_is)
    found += device(STREAM, "peer", "RMM", RmmMemory, CupyWork, as_it_is)
    for kind in (CupyWork, TorchWork):
        by = "cumem, __cuda_array_interface__"
        found += device(STREAM, "cumem", by, OurMemory, kind, by_dictionary)
        found += device(CONSUMER, "cumem", "cumem, DLPack", OurMemory, kind, by_dlpack)
    found += device(
        CONSUMER, "peer", "PyTorch, DLPack", TorchMemory, CupyWork, by_dlpack
    )
    found += device(CONSUMER, "peer", "CuPy, DLPack", CupyMemory, TorchWork, by_dlpack)
    untold, reported = "cumem, address alone", "cumem, address and record_stream"
    for kind in (CupyWork, DriverWork):
        found += device(ADDRESS, "documented", untold, OurMemory, kind, by_address)
        found += device(
            ADDRESS, "cumem", reported, OurMemory, kind, by_address_and_announced
        )
    return found


def emulated() -> list[Pattern]:
    """Return the patterns for the emulated device, where a stand-in is the only peer."""
    found = host(PINNED, "peer", "stand-in, reused at once", at_once, DriverWork)
    for name in ("pinned", "mapped"):
        found += host(PINNED, "cumem", f"cumem, {name}", ours(name), DriverWork)
        found += host(OTHER_GPU, "cumem", f"cumem, {name}", ours(name), DriverWork, 1)
    found += host(PINNED, "cumem", "cumem, torch.frombuffer", ours_by_torch, DriverWork)
    found += host(
        PINNED, "cumem", "cumem, torch.from_dlpack", ours_by_dlpack, DriverWork
    )
    found += host(MANAGED, "cumem", "cumem, managed", ours("managed"), DriverWork)
    found += device(
        CONSUMER, "cumem", "cumem, DLPack", OurMemory, DriverWork, by_dlpack
    )
    untold, reported = "cumem, address alone", "cumem, address and record_stream"
    found += device(ADDRESS, "documented", untold, OurMemory, DriverWork, by_address)
    found += device(
        ADDRESS, "cumem", reported, OurMemory, DriverWork, by_address_and_announced
    )
    return found


def hunt(pattern: Pattern, nbytes: int, seconds: float) -> Case:
    """Play a pattern, and note an error, or what the pattern needs and did not find."""
    fields = {f.name for f in dataclasses.fields(Case)} & vars(pattern).keys()
    case = Case(**{name: getattr(pattern, name) for name in fields})
    try:
        play_rounds(case, pattern.play(nbytes), seconds)
    except MissingError as error:
        case.missing = str(error)
    except Exception as error:
        case.error = "".join(traceback.format_exception(error))
    return case


def play_rounds(
    case: Case, play: Callable[[], tuple[Outcome, Any]], seconds: float
) -> None:
    """Play at least three rounds, and more until the time is over."""
    end = time.monotonic() + seconds
    while case.rounds < 3 or time.monotonic() < end:
        outcome, work = play()
        case.rounds += 1
        if not outcome.late:
            work.delay_count = min(MOST_DELAY, 2 * work.delay_count)
            if case.rounds >= 20 and case.late_rounds == 0:
                break  # the library waits in the call, so no copy is late
        case.late_rounds += outcome.late
        case.reused_rounds += outcome.reused and outcome.late
        case.corrupted_rounds += outcome.corrupted


def line(case: Case) -> str:
    """Return what came of a case, as a line of text."""
    way = "writes" if case.writes else "reads"
    head = f"{case.role:<10} {case.memory}, which {case.work} {way} late: "
    if case.missing is not None:
        return f"{head}left out, {case.missing}"
    if case.error is not None:
        return f"{head}failed, {case.error}"
    reported = f"{case.corrupted_rounds} of {case.rounds} rounds corrupted"
    if case.role == "peer" and case.corrupted_rounds == 0:
        reported += ", not reproduced"
    if case.late_rounds < case.rounds:
        reported += f"; {case.rounds - case.late_rounds} were not late"
    return f"{head}{reported}; the memory was handed out again in {case.reused_rounds}"


def failures_of(cases: list[Case]) -> list[str]:
    """Return what is wrong: data that cumem corrupted, errors, cases that show nothing."""
    own = [case for case in cases if case.role == "cumem" and case.missing is None]
    wrong = [line(case) for case in own if case.corrupted_rounds > 0]
    wrong += [line(case) for case in cases if case.error is not None]
    # With some kinds of memory, some libraries wait in the call, so that no copy is late.
    proved = {case.memory for case in own if case.late_rounds > 0}
    unproved = {case.memory for case in own if case.error is None} - proved
    return wrong + [f"never put to the proof: {memory}" for memory in sorted(unproved)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=1, help="of the patterns' order")
    parser.add_argument("--nbytes", type=int, default=4 << 20)
    parser.add_argument("--only", default="", help="patterns whose line has this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUMEM_EMULATED_DEVICES", "2")
    started = datetime.datetime.now(datetime.UTC)
    is_emulated = cumem.backend() == "emulated"
    patterns = emulated() if is_emulated else on_a_gpu()
    patterns = [
        p for p in patterns if options.only in f"{p.key} {p.role} {p.memory} {p.work}"
    ]
    random.Random(options.seed).shuffle(patterns)
    if is_emulated:
        print("EMULATED DEVICE: stand-ins take the place of other libraries")
    cases = []
    for pattern in patterns:
        cases.append(hunt(pattern, options.nbytes, options.seconds / len(patterns)))
        print(line(cases[-1]), flush=True)
    failures = failures_of(cases) if cases else ["no such pattern"]
    if options.json is not None:
        result = {
            "schema": 1,
            "started": started.isoformat(timespec="seconds"),
            "commit": info.commit(),
            "emulated": is_emulated,
            "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
            **info.collect(),
            "libraries": {
                name: getattr(sys.modules.get(name), "__version__", None)
                for name in ("torch", "cupy", "rmm")
            },
            "cases": [dataclasses.asdict(case) for case in cases],
            "failures": failures,
        }
        text = json.dumps(result, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    for failure in failures:
        print(f"WRONG: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
