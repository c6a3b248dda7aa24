# SPDX-License-Identifier: Apache-2.0
"""Many threads make random calls of the whole package, every byte verified.

    python torture.py [--seconds 60] [--rounds 4] [--threads 8] [--seed 1] [--faults]
                      [--largest 1048576] [--patience 60] [--libraries] [--json FILE]

Each thread owns memory of all kinds with known contents. What a call writes is held
against NumPy's own result, bytes around it included, and read at its address, by no call
of cumem's, once the stream is waited for in one of the ways that CUDA has; only a copy in
the background is waited for by its handle. The main thread makes copies as well, under
Ctrl-C at any moment, and changes limits, trims and shuts down; threads fork, and the child
reads what lives. An exception that is not among those that a call may raise, a wrong byte,
a hang or growth from round to round fails the run. The seed decides what each thread does,
but not when; after a shutdown() or an error its choices differ.

On a GPU up to 6 GiB of device memory, 768 MiB of managed and 4 GiB of pinned memory are
used; CUMEM_LIMIT_... and CUMEM_EMULATED_... of the environment come first. --faults lets
calls of the driver fail now and then; --libraries uses PyTorch and JAX on the emulated
device as well. Exit status: 0 when all was right, 1 when something was not, 3 for a hang.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import faulthandler
import functools
import gc
import itertools
import json
import math
import mmap
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import support.streams as foreign_streams
from support.exporters import FakeCAI, FakeDLPack, Produced, interface_of

import cumem
from cumem import info
from cumem.tools import _testing as testing

FAULT = 998
FAULTY = ("copy_async", "kernel_launch", "event_record", "stream_wait_event")
POOLED = ("pinned", "mapped", "managed", "device")
KINDS = (*POOLED, "device", "numpy", "host", "registered")
HOST_KINDS = ("pinned", "mapped", "numpy", "host", "registered")
NUMBERS = ("u1", "u1", "i2", "i4", "f4", "f8", "c16", "f2")
DTYPES = (*NUMBERS, "M8[s]", "S3", "i4,f4")
KIB, MIB = 1 << 10, 1 << 20
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
SMALL_STACK = 256 * KIB if SANITIZED else 64 * KIB
EMULATED_ENVIRONMENT = {
    "CUMEM_EMULATED_DEVICES": "2",
    "CUMEM_EMULATED_MEMORY": "32MiB",
    "CUMEM_EMULATED_DELAY_US": "100",
}
CUDA_ENVIRONMENT = {
    "CUMEM_LIMIT_DEVICE": "6GiB",
    "CUMEM_LIMIT_MANAGED": "768MiB",
    "CUMEM_LIMIT_PINNED": "4GiB",
    "CUMEM_LIMIT_MAPPED": "2GiB",
}

#: Numbers cannot keep a stream alive.
FOREIGN_STREAMS = [one for one in foreign_streams.FOREIGN if not issubclass(one, int)]
FOREIGN_STREAMS.remove(np.uint64)
#: Where Ctrl-C is heard.
OURS = (__file__, str(Path(cumem.__file__).parent))

Make = Callable[[Any], Any]  # from the bytes of a box, array or buffer, to a view


# -- what is looked at -----------------------------------------------------------------


def in_own_pages(content: np.ndarray) -> np.ndarray:
    """A copy that shares no page. The driver itself refuses to copy to and from memory
    over the edge of a registration, so other libraries meet none on a GPU."""
    if content.size == 0:
        return content.copy()
    memory = np.frombuffer(mmap.mmap(-1, content.size), "u1")
    memory[...] = content
    return memory


class Raw:
    """Bytes at an address, read by no copy of cumem's."""

    def __init__(self, emulated: bool) -> None:
        self.emulated = emulated
        self.contexts: list[ctypes.c_void_p] = []
        if emulated:
            return
        self.lib = ctypes.CDLL("libcuda.so.1")
        for index in range(cumem.device_count()):
            context = ctypes.c_void_p()
            self.check(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
            self.contexts.append(context)

    @staticmethod
    def check(code: int) -> None:
        if code != 0:
            raise RuntimeError(f"the driver answered {code}")

    @contextlib.contextmanager
    def entered(self, device: int) -> Iterator[None]:
        self.check(self.lib.cuCtxPushCurrent_v2(self.contexts[device]))
        try:
            yield
        finally:
            self.check(self.lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    def read(self, box: Box) -> np.ndarray:
        if box.nbytes == 0:
            return np.empty(0, "u1")
        out = in_own_pages(np.empty(box.nbytes, "u1"))
        address = box.address
        if box.kind == "device" and not self.emulated:
            with self.entered(box.device):
                self.check(
                    self.lib.cuMemcpyDtoH_v2(
                        ctypes.c_void_p(out.ctypes.data),
                        ctypes.c_uint64(address),
                        ctypes.c_size_t(box.nbytes),
                    )
                )
            return out
        if box.kind == "device":
            address = testing.alias(address, box.nbytes)
        ctypes.memmove(out.ctypes.data, address, box.nbytes)
        return out

    def synchronize(self, stream: cumem.Stream) -> None:
        """As any other user of the driver waits for a stream."""
        with self.entered(stream.device.index):
            self.check(self.lib.cuStreamSynchronize(ctypes.c_void_p(stream.handle)))


class Box:
    """Memory of one kind, as bytes, and what must be in it."""

    def __init__(
        self, memory: Any, kind: str, device: int, expect: np.ndarray, keep: Any = None
    ) -> None:
        self.memory, self.kind, self.device = memory, kind, device
        self.expect, self.keep = expect, keep
        self.nbytes = expect.size
        is_array = isinstance(memory, np.ndarray)
        self.address = memory.ctypes.data if is_array else memory.ptr

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.nbytes} bytes on {self.device}>"


@dataclasses.dataclass
class Pending:
    """A copy that was begun, with both its ends."""

    transfer: cumem.Transfer | None
    stream: cumem.Stream | None  # None: in the background
    target: Box
    source: Box | None
    written: np.ndarray  # what the target then holds
    where: str


def layout(
    rng: random.Random, dtype: np.dtype, shape: tuple[int, ...], nbytes: int
) -> Make:
    """A view of that shape and dtype: turned, reversed, with gaps, or plain."""
    axes = list(range(len(shape)))
    steps, pads = [1] * len(shape), [0] * len(shape)
    if rng.random() < 0.5:
        rng.shuffle(axes)
        steps = [rng.choice((1, 1, 1, 1, -1, 2, 3)) for _ in shape]
        pads = [rng.choice((0, 0, 0, 1, 5)) for _ in shape]
    big = tuple(
        n * max(step, 1) + (0 if step < 0 else pad)
        for n, step, pad in zip(shape, steps, pads, strict=True)
    )
    total = math.prod(big) * dtype.itemsize
    if total > nbytes:
        axes, big = list(range(len(shape))), shape
        steps = [1] * len(shape)
        total = math.prod(big) * dtype.itemsize
    begin = rng.randrange((nbytes - total) // 16 + 1) * 16
    inverse = tuple(axes.index(i) for i in range(len(axes)))
    index = tuple(
        slice(None, None, -1) if step < 0 else slice(0, n * step, step)
        for n, step in zip(shape, steps, strict=True)
    )
    laid = tuple(big[axis] for axis in axes)

    def make(memory: Any) -> Any:
        view = memory[begin : begin + total].view(dtype).reshape(laid)
        return view.transpose(*inverse)[index]

    return make


# -- the operations --------------------------------------------------------------------

Raises = tuple[type[BaseException], str]
#: Any call may, while another thread's limit is in force.
SHORT: Raises = (cumem.OutOfMemoryError, "")
OPERATIONS: list[Operation] = []


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    call: Callable[[Any], None]
    weight: float
    raises: tuple[Raises, ...]  # what it may raise, and a pattern of the text
    main: bool  # may be interrupted by Ctrl-C


def operation(
    weight: float, *raises: Raises, main: bool = True
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(call: Callable[[Any], None]) -> Callable[[Any], None]:
        OPERATIONS.append(
            Operation(call.__name__, call, weight, (SHORT, *raises), main)
        )
        return call

    return add


class WrongError(Exception):
    """Not what it should be."""


class StopRunError(Exception):
    """Raised by a callback of the caller's."""


class Tracked(np.ndarray):
    """An array that can be seen to be let go."""


class World:
    """What the threads share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.emulated = cumem.backend() == "emulated"
        self.devices = cumem.device_count()
        self.raw = Raw(self.emulated)
        rng = np.random.default_rng(options.seed)
        self.noise = rng.integers(0, 256, 16 * options.largest + MIB, "u1")
        self.noise.flags.writeable = False
        self.failures: list[str] = []
        self.workers: list[Worker] = []
        self.deadline = 0.0
        self.epoch = 0  # shutdowns so far
        self.shutting = False
        self.calm = False  # nothing is exported, so that shutdown() has a chance
        self.shared: list[Box] = []
        self.stack_lock = threading.Lock()
        self.fork_lock = threading.Lock()
        self.limit_lock = threading.Lock()  # two who put back would keep a low one
        self.peaks: Counter[str] = Counter()
        self.stuck_children = 0

    def to_register(self, content: np.ndarray) -> np.ndarray:
        return content.copy() if self.emulated else in_own_pages(content)

    def fail(self, text: str) -> None:
        doing = ", ".join(worker.now for worker in self.workers)
        self.failures.append(f"{text}Meanwhile: {doing}")
        self.deadline = 0.0

    def planned(self, error: BaseException | None) -> bool:
        """Whether it is a fault that was put into a call of the driver."""
        return (
            self.options.faults
            and isinstance(error, cumem.CudaError)
            and error.code == FAULT
        )

    def content(self, rng: random.Random, nbytes: int) -> np.ndarray:
        begin = rng.randrange(self.noise.size - nbytes + 1)
        return self.noise[begin : begin + nbytes]

    def share(self) -> None:
        """Sources that all threads read and none writes."""
        rng = random.Random(self.options.seed)
        shared = []
        for kind in KINDS:
            content = self.content(rng, self.options.largest // 4)
            memory = content.copy()
            keep = None
            if kind in POOLED:
                memory = cumem.empty(memory.size, "u1", kind, device=0)
                cumem.copy(memory, content)
            elif kind == "host":
                memory = cumem.asbuffer(memory)
            elif kind == "registered":
                keep = cumem.register(self.to_register(content), device=0)
                memory = keep.buffer
            shared.append(Box(memory, kind, 0, content, keep))
        self.shared = shared


class Worker(threading.Thread):
    """Random operations until the deadline."""

    is_main = False
    most_boxes = 8

    def __init__(self, world: World, index: int, number: int) -> None:
        super().__init__(daemon=True, name=f"worker {index}")
        self.world, self.index = world, index
        seed = f"{world.options.seed} {number} {index}"
        self.rng = random.Random(seed)
        self.boxes: list[Box] = []
        self.pending: list[Pending] = []
        self.streams: list[cumem.Stream] = []
        self.counts: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.nbytes = 0
        self.epoch = -1
        self.is_calm = False
        self.now = "begin"
        self.since = time.monotonic()
        self.file_number = itertools.count()

    # -- the loop

    def run(self) -> None:
        try:
            while time.monotonic() < self.world.deadline:
                self.step()
            self.note("end")
            if not self.is_calm:
                self.end()
        except BaseException:
            self.world.fail(f"{self.name}: {traceback.format_exc()}")
        finally:
            self.note("over")
            self.forget()

    def note(self, name: str) -> None:
        self.now, self.since = name, time.monotonic()

    def step(self) -> None:
        world = self.world
        if world.calm:
            self.forget()
            self.note("calm")
            self.is_calm = True
            self.counts["calm"] += self.calm_step()
            return
        self.is_calm = False
        if self.epoch != world.epoch:
            self.forget()
            self.epoch = world.epoch
        chosen = self.choose()
        self.note(chosen.name)
        self.attempt(chosen)

    def choose(self) -> Operation:
        return self.rng.choices(OPERATIONS, WEIGHTS)[0]

    def attempt(self, chosen: Operation) -> None:
        try:
            if not self.streams:
                self.streams = [
                    cumem.Stream(device=self.rng.randrange(self.world.devices))
                    for _ in range(2)
                ]
            chosen.call(self)
        except Exception as error:
            self.judge(chosen.name, error, chosen.raises)
            if isinstance(error, MemoryError):
                del self.boxes[: len(self.boxes) // 2 + 1]
        else:
            self.counts[chosen.name] += 1

    def judge(
        self, name: str, error: BaseException, raises: tuple[Raises, ...]
    ) -> None:
        """Whether it may be, and else the end of the run."""
        self.raised[f"{name}: {type(error).__name__}"] += 1
        text = str(error)
        for kind, pattern in raises:
            if isinstance(error, kind) and re.search(pattern, text):
                return
        if self.world.planned(error):
            return
        told = "".join(traceback.format_exception(error))
        self.world.fail(f"{self.name}, {name}: {told}")

    def forget(self) -> None:
        self.boxes.clear()
        self.pending.clear()
        self.streams.clear()

    def end(self) -> None:
        """All that is under way arrives, and nobody has touched what was left alone."""
        while self.pending and not self.world.failures:
            try:
                self.finish_one(self.pending.pop())
            except Exception as error:
                self.judge("end", error, (SHORT,))
        for box in self.boxes:
            self.verify(box, "at the end")

    # -- what is quiet enough to let shutdown() through

    def calm_step(self) -> int:
        """Operations without an export; 1 when nothing came between."""
        world, rng = self.world, self.rng
        epoch = world.epoch
        content = world.content(rng, rng.randrange(1, 100_000))
        out = np.empty_like(content)
        what = rng.randrange(7)
        try:
            if what == 0:
                cumem.copy(out, cumem.array(content, kind=rng.choice(POOLED)))
            elif what == 1:
                stream = cumem.Stream()
                middle = cumem.empty_device(content.size, "u1", stream=stream)
                cumem.copy_async(middle, content, stream=stream)
                cumem.copy_async(out, middle, stream=stream)
                stream.synchronize()
            elif what == 2:
                middle = cumem.empty(content.size, "u1", rng.choice(POOLED))
                cumem.copy_async(middle, content).wait()
                cumem.copy_async(out, middle).wait()
            elif what == 3:
                pool = cumem.Pool(rng.choice(POOLED))
                middle = pool.allocate(content.size)
                middle[...] = content
                out = middle.to_numpy()
                pool.close()
            elif what == 4:
                event = cumem.Event().record()
                event.synchronize()
                cumem.copy(out, content)
            elif what == 5:
                path = self.path()
                cumem.tofile(path, content)
                out = cumem.fromfile(path, "u1", kind=rng.choice(POOLED)).to_numpy()
                path.unlink()
            else:
                held = world.to_register(content)
                with cumem.register(held) as buffer:
                    cumem.copy(out, buffer)
        except (ValueError, RuntimeError, OSError, BufferError) as error:
            self.raised[f"calm: {type(error).__name__}"] += 1
            if isinstance(error, MemoryError) or world.planned(error):
                return 0
            # In this order: a shutdown() that ends meanwhile counts before it says so.
            if not world.shutting and world.epoch == epoch:
                told = "".join(traceback.format_exception(error))
                world.fail(f"{self.name}, calm {what}, but no shutdown(): {told}")
            return 0
        if not np.array_equal(out, content):
            world.fail(f"{self.name}, calm {what}: {content.size} bytes are wrong")
        self.nbytes += content.size
        time.sleep(rng.random() * 0.01)
        return 1

    # -- memory

    def path(self) -> Path:
        return self.world.folder / f"{self.index}-{next(self.file_number) % 20}"

    def size(self) -> int:
        largest = self.world.options.largest
        if self.rng.random() < 0.03:
            return self.rng.randrange(largest, 8 * largest)
        if self.rng.random() < 0.02:
            return 0
        return int(largest ** self.rng.random())

    def device(self) -> int:
        return self.rng.randrange(self.world.devices)

    def kind(self) -> Any:
        return self.rng.choice(POOLED)

    def make(self, kind: str | None = None, nbytes: int | None = None) -> Box:
        """New memory with random contents."""
        rng = self.rng
        kind = rng.choice(KINDS) if kind is None else kind
        nbytes = self.size() if nbytes is None else nbytes
        if kind == "registered" and nbytes == 0:
            nbytes = 1  # there is nothing to page-lock
        device = self.device()
        content = self.world.content(rng, nbytes)
        how = rng.randrange(6)
        keep = None
        memory: Any
        if kind in ("numpy", "host", "registered"):
            memory = content.copy()
            if kind == "host":
                memory = cumem.asbuffer(memory)
            elif kind == "registered":
                memory = self.world.to_register(content)
                keep = registered(memory, device, mapped=how == 0)
                memory = keep.buffer
            return Box(memory, kind, device, content.copy(), keep)
        where = {"device": device}
        if how == 0:
            memory = cumem.array(content, kind=kind, **where)
        elif how == 1:
            memory = cumem.empty_like(content, kind=kind, **where)
        elif how == 2:
            memory = cumem.full(nbytes, how, "u1", kind, **where)
        elif kind == "device":
            streams: Any = [s for s in self.streams if s.device == device]
            stream = rng.choice([None, *streams])
            memory = cumem.empty_device(nbytes, "u1", stream=stream, **where)
        elif kind == "managed":
            attach: Any = rng.choice(("global", "host"))
            memory = cumem.empty_managed(nbytes, "u1", attach=attach, **where)
        else:
            flags = {"portable": rng.random() < 0.7, "write_combined": how == 3}
            made = cumem.empty_pinned if kind == "pinned" else cumem.empty_mapped
            memory = made(nbytes, "u1", **flags, **where)
        if how != 0:
            cumem.copy(memory, content)
        return Box(memory, kind, device, content.copy(), keep)

    def take(self, kind: str | tuple[str, ...] | None = None) -> Box:
        """One of mine, out of the list until `give`."""
        kinds = (kind,) if isinstance(kind, str) else kind
        fits = [i for i, b in enumerate(self.boxes) if kinds is None or b.kind in kinds]
        if fits and self.rng.random() < 0.8:
            return self.boxes.pop(self.rng.choice(fits))
        return self.make(None if kinds is None else self.rng.choice(kinds))

    def give(self, *boxes: Box) -> None:
        self.boxes.extend(boxes)
        while len(self.boxes) > self.most_boxes:
            box = self.boxes.pop(self.rng.randrange(len(self.boxes)))
            self.verify(box, "dropped")

    def source(self) -> Box:
        """One of mine, or one that all threads read."""
        if self.rng.random() < 0.3:
            return self.rng.choice(self.world.shared)
        return self.take()

    def give_source(self, box: Box) -> None:
        if box not in self.world.shared:
            self.give(box)

    def verify(self, box: Box, where: str) -> None:
        found = self.world.raw.read(box)
        self.compare(found, box.expect, f"{box!r} {where}")

    def compare(self, found: np.ndarray, expect: np.ndarray, where: str) -> None:
        self.nbytes += expect.size
        if np.array_equal(found, expect):
            return
        different = np.flatnonzero(found != expect)
        raise WrongError(
            f"{where}: {different.size} bytes are wrong, from {different[0]} to "
            f"{different[-1]}: {found[different[:8]]} for {expect[different[:8]]}"
        )

    def shape(self, dtype: np.dtype, nbytes: int) -> tuple[int, ...]:
        rng = self.rng
        most = nbytes // dtype.itemsize // rng.choice((1, 1, 2, 4, 9))
        rows = rng.randrange(1, 1 + int(most**0.5)) if most > 0 else 0
        if rng.random() < 0.4 or rows == 0:
            return (most,)
        inner = most // rows
        if rng.random() < 0.3 and inner > 1:
            third = rng.randrange(1, min(inner, 8) + 1)
            return (rows, third, inner // third)
        return (rows, inner)

    def ends(
        self, target: int, source: int, dtypes: tuple[str, ...] = DTYPES
    ) -> tuple[Make, Make]:
        """Views of two boxes that may be copied, the one broadcast now and then."""
        dtype = np.dtype(self.rng.choice(dtypes))
        shape = self.shape(dtype, min(target, source))
        given = shape
        if len(shape) > 1 and self.rng.random() < 0.1:
            given = (1, *shape[1:])
        return (
            layout(self.rng, dtype, shape, target),
            layout(self.rng, dtype, given, source),
        )

    def stream_of(self, *boxes: Box, new: bool = False) -> Any:
        """One that may work on them, or that of this thread alone."""
        devices = [box.device for box in boxes if box.kind == "device"]
        device = self.rng.choice(devices) if devices else self.device()
        if new:
            return cumem.Stream(device=device, priority=self.rng.choice((0, -1)))
        fits = [s for s in self.streams if s.device == device]
        if fits and self.rng.random() < 0.85:
            return fits[0]
        return cumem.Stream.from_external(2, device=device)

    def spelled(self, stream: cumem.Stream) -> Any:
        """The same stream as another library would name it, and keep it."""
        if self.rng.random() < 0.5:
            return stream
        foreign = self.rng.choice(FOREIGN_STREAMS)(stream.handle)
        foreign.owner = stream
        return cumem.Stream.from_external(foreign, device=stream.device)

    def wait_for(self, stream: cumem.Stream) -> None:
        """In one of the ways that do not know of cumem's handles."""
        how = self.rng.randrange(7)
        if how == 0:
            cumem.Event(device=stream.device).record(stream).synchronize()
        elif how == 1:
            stream.device.synchronize()
        elif how == 2:
            while not stream.done:
                time.sleep(0)
        elif how == 3:
            other = cumem.Stream(device=stream.device)
            other.wait(stream)
            other.synchronize()
        elif how == 4 and stream.handle != 2:
            thread = threading.Thread(target=stream.synchronize)
            thread.start()
            thread.join()
        elif how == 5 and not self.world.emulated:
            self.world.raw.synchronize(stream)
        elif how == 6:
            event = stream.record()
            while not event.done:
                time.sleep(0)
        else:
            stream.synchronize()

    # -- copies

    @operation(6)
    def copy_blocking(self) -> None:
        target, source = self.take(), self.source()
        to, of = self.ends(target.nbytes, source.nbytes)
        told: list[tuple[int, int]] = []
        progress = self.rng.choice((None, None, lambda *done: told.append(done)))
        cumem.copy(to(target.memory), of(source.memory), progress=progress)
        to(target.expect)[...] = of(source.expect)
        self.verify(target, f"after a copy of {source!r}")
        self.give(target)
        self.give_source(source)

    @operation(2)
    def copy_within(self) -> None:
        box = self.take()
        to, of = self.ends(box.nbytes, box.nbytes)
        cumem.copy(to(box.memory), of(box.memory))
        # NumPy's own assignment is wrong where two strides overlap in one dimension.
        to(box.expect)[...] = of(box.expect).copy()
        self.verify(box, "after a copy within")
        self.give(box)

    @operation(2, (StopRunError, ""))
    def copy_stopped(self) -> None:
        target, source = self.take(), self.take()
        to, of = self.ends(target.nbytes, source.nbytes)

        def stop(done: int, total: int) -> None:
            raise StopRunError

        before = target.expect.copy()
        try:
            cumem.copy(to(target.memory), of(source.memory), progress=stop)
        finally:  # whole or not, nothing is written any more, and nothing beside it
            found = self.world.raw.read(target)
            to(before)[...] = to(found)
            self.compare(found, before, f"{target!r} after a copy that was stopped")
            target.expect = found
            self.verify(source, "after a copy that was stopped")
            self.give(target, source)

    def launch(self, stream: str | None) -> Pending:
        target, source = self.take(), self.source()
        to, of = self.ends(target.nbytes, source.nbytes)
        given = used = None
        if stream is not None:
            used = self.stream_of(target, source, new=stream == "new")
            given = used if stream == "new" else self.spelled(used)
        ends = to(target.memory), of(source.memory)
        transfer = cumem.copy_async(*ends, stream=given)
        written = target.expect.copy()
        to(written)[...] = of(source.expect)
        kept = None if source in self.world.shared else source
        return Pending(
            transfer, used, target, kept, written, f"after copy_async of {source!r}"
        )

    @operation(6)
    def copy_streamed(self) -> None:
        self.pending.append(self.launch("any"))
        self.limit_pending()

    @operation(6)
    def copy_background(self) -> None:
        self.pending.append(self.launch(None))
        self.limit_pending()

    def limit_pending(self) -> None:
        while len(self.pending) > 5:
            self.finish_one(self.pending.pop(self.rng.randrange(len(self.pending))))

    @operation(8)
    def finish(self) -> None:
        if self.pending:
            self.finish_one(self.pending.pop(self.rng.randrange(len(self.pending))))

    def finish_one(self, begun: Pending) -> None:
        transfer, stream, target = begun.transfer, begun.stream, begun.target
        if stream is not None and self.rng.random() < 0.8:
            begun.transfer = transfer = None
            self.wait_for(stream)
        elif not self.follow(transfer):
            begun.written = target.expect
        target.expect = begun.written
        self.verify(target, begun.where)
        self.give(target)
        if begun.source is not None:
            self.verify(begun.source, "once it was read")
            self.give(begun.source)

    def follow(self, transfer: Any) -> bool:
        """Wait for the handle; False when that was cancelled."""
        how = self.rng.randrange(7)
        if how == 0 and transfer.cancel():
            if not (transfer.done and transfer.cancelled and transfer.progress == 0):
                raise WrongError("cancelled, but not done")
            with contextlib.suppress(cumem.CancelledError):
                transfer.wait()
                raise WrongError("cancelled, but wait() says nothing")
            return False
        if how == 1:
            other = cumem.Stream(device=self.device())
            transfer.order(other)
            other.synchronize()
        elif how == 2:
            asyncio.run(await_all([transfer]))
        elif how == 3:
            while not transfer.done:
                time.sleep(0)
        elif how == 4:
            with contextlib.suppress(TimeoutError):
                transfer.wait(timeout=0)
        transfer.wait(progress=(lambda *done: None) if how == 5 else None)
        if not transfer.done or transfer.cancelled:
            raise WrongError("waited for, but not done")
        if transfer.progress != transfer.nbytes:
            raise WrongError(f"done, but {transfer.progress} of {transfer.nbytes}")
        if not transfer.route or transfer.seconds < 0 or transfer.gbps < 0:
            raise WrongError(f"{transfer!r} says nonsense")
        return True

    @operation(3)
    def copy_dropped(self) -> None:
        """Nobody keeps the handle: the buffer itself knows what is under way."""
        begun = self.launch(None)
        begun.transfer = None
        target = begun.target
        target.expect = begun.written
        if target.kind == "numpy":
            self.wait_until_let_go(target)
        elif target.kind in ("device", "managed"):
            cumem.asnumpy(target.memory)
        else:
            target.memory.numpy()
        if self.world.options.faults:
            return  # it may have failed, which the hook was told
        self.verify(target, "after a handle was dropped")
        self.give(target)
        if begun.source is not None:
            self.give(begun.source)

    def wait_until_let_go(self, target: Box) -> None:
        """An array remembers nothing, so a second one is watched."""
        while testing.pending_transfers() and not self.world.failures:
            gone = target.memory.view(Tracked)
            kept = weakref.ref(gone)
            cumem.copy_async(gone[:0], gone[:0]).wait()
            del gone
            if kept() is None and sys.getrefcount(target.memory) <= 2:
                return
            time.sleep(0.0002)

    @operation(4)
    def copy_many(self) -> None:
        rng = self.rng
        boxes = [self.take() for _ in range(rng.randrange(1, 4))]
        sources = [self.source() for _ in boxes]
        pairs, written = [], []
        for target, source in zip(boxes, sources, strict=True):
            count = rng.choice((1, 3, 40))
            piece = min(target.nbytes, source.nbytes) // count
            to, of = self.ends(piece, piece)
            for i in range(count):
                cut = slice(i * piece, (i + 1) * piece)
                pairs.append((to(target.memory[cut]), of(source.memory[cut])))
                written.append((to(target.expect[cut]), of(source.expect[cut])))
        rng.shuffle(pairs)
        how = rng.randrange(3)
        if len({b.device for b in (*boxes, *sources) if b.kind == "device"}) > 1:
            how = 2  # no stream is of all of them
        if how == 0:
            cumem.copy_many(pairs)
        elif how == 1:
            stream = self.stream_of(*boxes, *sources)
            try:
                cumem.copy_many_async(pairs, stream=self.spelled(stream))
            finally:
                self.wait_for(stream)
        else:
            transfer = cumem.copy_many_async(iter(pairs))
            pairs.clear()
            if not self.follow(transfer):
                written.clear()
        for into, out_of in written:
            into[...] = out_of
        for box in boxes:
            self.verify(box, f"after {count} copies, way {how}")
        self.give(*boxes)
        for box in sources:
            self.give_source(box)

    @operation(3)
    def copy_several(self) -> None:
        rng = self.rng
        what = rng.choice(("broadcast", "scatter", "gather"))
        many = [self.take() for _ in range(rng.randrange(1, 4))]
        dtype = np.dtype(rng.choice(DTYPES))
        n = min(box.nbytes for box in many) // dtype.itemsize
        whole = n if what == "broadcast" else n * len(many)
        one = self.make(rng.choice(POOLED), whole * dtype.itemsize)
        all_of = layout(rng, dtype, (whole,), one.nbytes)
        part_of = [layout(rng, dtype, (n,), box.nbytes) for box in many]
        views = [of(box.memory) for of, box in zip(part_of, many, strict=True)]
        call = getattr(cumem, what + rng.choice(("", "_async")))
        ends = [all_of(one.memory), views]
        stream = None if rng.random() < 0.6 else self.stream_of(one, *many)
        try:
            done = call(*(ends if what == "gather" else ends[::-1]), stream=stream)
        except BaseException:
            self.settle()  # some may be under way
            raise
        for transfer in done or ():
            if stream is None:
                transfer.wait()
        if stream is not None:
            self.wait_for(stream)
        parts = [of(box.expect) for of, box in zip(part_of, many, strict=True)]
        total = all_of(one.expect)
        for i, part in enumerate(parts):
            piece = total if what == "broadcast" else total[i * n : (i + 1) * n]
            if what == "gather":
                piece[...] = part
            else:
                part[...] = piece
        for box in (one, *many):
            self.verify(box, f"after {what}")
        self.give(one, *many)

    def settle(self) -> None:
        for index in range(self.world.devices):
            cumem.Device(index).synchronize()

    # -- values

    @operation(3)
    def fill(self) -> None:
        box, value = self.take(), self.rng.randrange(100)
        dtype = np.dtype(self.rng.choice(NUMBERS))
        of = layout(self.rng, dtype, self.shape(dtype, box.nbytes), box.nbytes)
        if box.kind == "numpy":
            cumem.asbuffer(of(box.memory)).fill(value)
        elif self.rng.random() < 0.5:
            of(box.memory).fill(value)
            self.wait_for(cumem.current_stream(box.device))
        else:
            stream = self.stream_of(box)
            try:
                of(box.memory).fill(value, stream=stream)
            finally:
                self.wait_for(stream)
        of(box.expect)[...] = value
        self.verify(box, f"after fill() as {dtype}")
        self.give(box)

    @operation(2)
    def set_item(self) -> None:
        box = self.take()
        n = box.nbytes
        begin = self.rng.randrange(n + 1)
        index = slice(begin, self.rng.randrange(begin, n + 1), self.rng.choice((1, 2)))
        content = self.world.content(self.rng, len(range(*index.indices(n))))
        if box.kind != "numpy":
            value = self.rng.choice((7, content, content.tolist()))
            box.memory[index] = value
            box.expect[index] = value
        self.verify(box, "after an assignment")
        self.give(box)

    @operation(3)
    def new_memory(self) -> None:
        self.give(self.make())

    @operation(3)
    def new_from_values(self) -> None:
        rng = self.rng
        box = self.take(("pinned", "mapped", "managed", "device", "registered"))
        dtype = np.dtype(rng.choice(DTYPES))
        of = layout(rng, dtype, self.shape(dtype, box.nbytes), box.nbytes)
        memory = of(box.memory)
        order: Any = rng.choice(("C", "F", "A", "K"))
        kind, device = self.kind(), self.device()
        how = rng.randrange(6)
        if how == 0:
            made = cumem.array(memory, kind=kind, order=order, device=device)
        elif how == 1:
            made = memory.copy(order)
        elif how == 2:
            made = copy.copy(memory)
        elif how == 3:
            made = copy.deepcopy(memory)
        elif how == 4:
            made = cumem.empty_like(memory, kind=kind, order=order, device=device)
            made[...] = memory
        else:
            made = cumem.zeros(memory.shape, dtype, kind, order="F", device=device)
            if bytes_of(made.to_numpy()).any():
                raise WrongError("zeros() are not zero")
            cumem.copy(made, memory)
        what = f"a new {made.kind} of {box!r}, way {how}"
        self.compare(bytes_of(made.to_numpy()), bytes_of(of(box.expect)), what)
        self.give(box)

    @operation(3)
    def to_host(self) -> None:
        rng = self.rng
        box = self.take()
        dtype = np.dtype(rng.choice(DTYPES))
        of = layout(rng, dtype, self.shape(dtype, box.nbytes), box.nbytes)
        memory = of(box.memory)
        how = rng.randrange(6)
        if how == 0 or box.kind == "numpy":
            out = cumem.asnumpy(memory)
        elif how == 1:
            out = memory.to_numpy()
        elif how == 2 or box.kind == "device":
            out = np.from_dlpack(box.memory, device="cpu", copy=True).view("u1")
            of = lambda expect: expect  # noqa: E731
        elif how == 3:
            out = np.array(memory.numpy())
        elif how == 4 and memory.dtype.kind != "M":
            out = np.array(memoryview(memory))
        else:
            out = np.asarray(memory).copy()
        self.compare(bytes_of(out), bytes_of(of(box.expect)), f"{box!r}, way {how}")
        self.give(box)

    @operation(2)
    def host_writes(self) -> None:
        """By the program itself, no call of cumem's."""
        box = self.take(("pinned", "mapped", "managed", "host", "registered"))
        content = self.world.content(self.rng, box.nbytes)
        view = box.memory.numpy()
        view[...] = content
        box.expect = content.copy()
        del view
        self.give(box)

    @operation(2)
    def many_views(self) -> None:
        box = self.take(("pinned", "mapped", "managed", "host"))
        memory = box.memory
        repr(memory), memory.T, memory.flags, memory.device, memory.base
        repr(memory.residency), memory.readonly, memory.closed, memory.strides
        if memory.size > 3:
            rows = memory[: memory.size // 4 * 4].reshape(-1, 4)
            for row, back in zip(rows[:5], reversed(rows[-5:]), strict=False):
                if len(row) != 4 or row.base is None or len(back) != 4:
                    raise WrongError("rows of a view")
            first = int(box.expect[0])
            one = memory[0]
            if (int(one), float(one), bool(one)) != (first, float(first), first != 0):
                raise WrongError("the first element")
            if complex(one) != complex(first):
                raise WrongError("the first element, complex")
        self.give(box)

    @operation(2)
    def device_views(self) -> None:
        box = self.take(("mapped", "managed"))
        if box.kind == "managed" and box.nbytes > 0:
            where: Any = self.rng.choice(("host", "cpu", box.device, None))
            with contextlib.suppress(ValueError, TypeError):  # "cpu" or "host"
                box.memory.prefetch(where, stream=self.rng.choice(self.streams))
            repr(box.memory.prefetch_location)
            box.memory.advise(
                read_mostly=self.rng.choice((True, False)),
                preferred_location=self.rng.choice(("cpu", None)),
            )
            box.memory.page_residency()
            parts = [box.memory.reshape(-1)[i::2] for i in range(2)]
            cumem.prefetch_many(parts, "cpu", self.rng.choice(self.streams))
        view = box.memory.as_device()
        out = np.empty(box.nbytes, "u1")
        cumem.copy(out, view)
        self.compare(out, box.expect, f"{box!r} as device memory")
        box.memory.record_stream(self.stream_of(box))
        self.give(box)

    # -- objects of others

    def foreign(self, content: np.ndarray, writable: bool) -> tuple[Any, np.ndarray]:
        """An object with a copy of these bytes, and an array over its memory."""
        rng = self.rng
        under = content.copy()
        n = content.size
        how = rng.randrange(12)
        if how == 0:
            memory = bytearray(n)
            under = np.frombuffer(memory, "u1")
            under[:] = content
            return memory, under
        if how == 1:
            return memoryview(under), under
        if how == 2 and n > 0:
            pages = mmap.mmap(-1, n)
            under = np.frombuffer(pages, "u1", n)
            under[:] = content
            return pages, under
        if how == 3:
            chars = (ctypes.c_ubyte * n).from_buffer(under)
            return chars, under
        if how == 4:
            other = array.array("B", content.tobytes())
            return other, np.frombuffer(other, "u1")
        if how == 5:
            versioned = rng.random() < 0.5
            return FakeDLPack(Lasting.over(under, versioned=versioned)), under
        if how == 6:
            wide = np.zeros((n, 2), "u1")
            wide[:, 1] = content
            return wide[:, 1], wide[:, 1]
        if how == 7:
            back = content[::-1].copy()
            return back[::-1], back[::-1]
        if how == 8 and n > 0:
            path = self.path()
            content.tofile(path)
            held = np.memmap(path, "u1", "r+" if writable else "r")
            path.unlink()
            return held, held
        if how == 9 and not writable:
            return bytes(content), under
        if how == 10 and not writable:
            under.flags.writeable = False
            return under, under
        if how == 11:
            return np.asfortranarray(under.reshape(1, n)).reshape(n), under
        return under, under

    @operation(4)
    def from_foreign(self) -> None:
        target = self.take()
        content = self.world.content(self.rng, target.nbytes)
        obj, _ = self.foreign(content, writable=False)
        how = self.rng.randrange(4)
        if how == 0:
            cumem.copy_async(target.memory, obj).wait()
        elif how == 1:
            stream = self.stream_of(target)
            cumem.copy_async(target.memory, obj, stream=stream)
            self.wait_for(stream)
        elif how == 2:
            cumem.copy_many([(target.memory, obj)])
        else:
            cumem.copy(target.memory, cumem.asbuffer(obj))
        target.expect = content.copy()
        self.verify(target, f"after a copy of a {type(obj).__name__}, way {how}")
        self.give(target)

    @operation(4)
    def to_foreign(self) -> None:
        source = self.source()
        obj, under = self.foreign(np.zeros(source.nbytes, "u1"), writable=True)
        how = self.rng.randrange(4)
        if how == 0:
            cumem.copy_async(obj, source.memory).wait()
        elif how == 1:
            stream = self.stream_of(source)
            cumem.copy_async(obj, source.memory, stream=stream)
            self.wait_for(stream)
        elif how == 2:
            cumem.copy_many([(obj, source.memory)])
        else:
            cumem.copy(obj, source.memory)
        what = f"a {type(obj).__name__} after a copy of {source!r}, way {how}"
        self.compare(under, source.expect, what)
        self.give_source(source)

    @operation(3)
    def exchange(self) -> None:
        """DLPack and the CUDA array interface, out and in again."""
        box = self.take(POOLED)
        memory = box.memory
        if self.rng.random() < 0.5 and box.nbytes > 0 and box.kind != "pinned":
            entries = interface_of(memory, strides=None)
            outside: Any = FakeCAI(entries, keep=memory)
        else:
            newest: Any = self.rng.choice((None, (1, 0)))
            capsule = memory.__dlpack__(max_version=newest)
            place = memory.__dlpack_device__()
            outside = Held(capsule, place)
        view = cumem.asbuffer(outside)
        out = np.empty(box.nbytes, "u1")
        cumem.copy(out, view)
        self.compare(out, box.expect, f"{box!r} through {type(outside).__name__}")
        del view, outside
        self.give(box)

    @operation(0.5)
    def capsule_for_all(self) -> None:
        """One capsule, many takers: one of them gets it."""
        box = self.take("pinned")
        held = Held(box.memory.__dlpack__(), box.memory.__dlpack_device__())
        taken: list[object] = []

        def grab() -> None:
            with contextlib.suppress(BufferError, ValueError, TypeError):
                taken.append(cumem.asbuffer(held))  # else: no fresh capsule

        threads = [threading.Thread(target=grab) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(taken) != 1:
            raise WrongError(f"a capsule was taken {len(taken)} times")
        taken.clear()
        self.give(box)

    @operation(1)
    def pickled(self) -> None:
        box = self.take(("pinned", "mapped", "managed", "host"))
        buffers: list[pickle.PickleBuffer] = []
        if self.rng.random() < 0.5:
            text = pickle.dumps(box.memory, protocol=5, buffer_callback=buffers.append)
        else:
            text = pickle.dumps(box.memory, protocol=self.rng.choice((2, 4, 5)))
        again = pickle.loads(text, buffers=buffers)
        out = np.array(np.asarray(again))
        self.compare(out, box.expect, f"{box!r}, pickled")
        del again, buffers
        self.give(box)

    @operation(1)
    def libraries(self) -> None:
        if not LIBRARIES:
            return
        name = self.rng.choice(sorted(LIBRARIES))
        box = self.take(("pinned", "mapped", "device", "numpy"))
        if box.nbytes > 0:
            LIBRARIES[name](self, box)
            self.verify(box, f"after {name} had it")
        self.give(box)

    # -- the end of memory

    @operation(2)
    def freed(self) -> None:
        box = self.take(POOLED)
        view = box.memory[: box.nbytes // 2]
        box.memory.free()
        for memory in (box.memory, view):
            with contextlib.suppress(ValueError):
                memory.fill(0)
                raise WrongError("freed memory was filled")

    @operation(2)
    def freed_in_flight(self) -> None:
        target, source = self.take(POOLED), self.take(POOLED)
        to, of = self.ends(target.nbytes, source.nbytes)
        stream = self.rng.choice((None, self.stream_of(target, source)))
        transfer = cumem.copy_async(to(target.memory), of(source.memory), stream=stream)
        source.memory.free()
        if self.rng.random() < 0.5:
            target.memory.free()
            transfer.wait()
            return
        del transfer
        found = cumem.asnumpy(target.memory)
        if self.world.options.faults:
            return
        to(target.expect)[...] = of(source.expect)
        self.compare(found, target.expect, f"{target!r}, its source freed")

    @operation(2)
    def closed_by_block(self) -> None:
        box = self.take(("pinned", "mapped", "managed"))
        with box.memory as memory:
            held = memory.numpy()
        if not memory.closed:
            raise WrongError("not closed at the end of its block")
        self.compare(held, box.expect, f"{box!r}, closed")

    @operation(2)
    def registration_ends(self) -> None:
        """Copies of the same array, or of its neighbour, while a registration ends."""
        rng = self.rng
        size = rng.randrange(1, 200_000)
        content = self.world.content(rng, size)
        held = self.world.to_register(content)
        cut = rng.randrange(size)
        part = held[cut:] if rng.random() < 0.5 else held
        target = cumem.empty_device(size, "u1", device=self.device())
        with contextlib.ExitStack() as stack:
            first = registered(part, 0, mapped=rng.random() < 0.5)
            if rng.random() < 0.5:
                stack.enter_context(cumem.register(held[: cut + 1], device=0))
            if rng.random() < 0.5:
                transfer = cumem.copy_async(target, held)
            else:
                cuts = slice(0, size // 3), slice(size // 3, size)
                transfer = cumem.copy_many_async((target[i], held[i]) for i in cuts)
            del part
            if rng.random() < 0.5:
                first.close()
            else:
                del first
            transfer.wait()
        self.compare(cumem.asnumpy(target), content, "a registration ended")
        cumem.copy(held, target)
        self.compare(held, content, "back into what was registered")

    # -- pools and limits

    @operation(2)
    def own_pool(self) -> None:
        rng = self.rng
        kind, device = self.kind(), self.device()
        options: dict[str, Any] = {"limit": rng.choice((None, "4MiB", "50%"))}
        options["idle_trim"] = rng.choice((None, 0.001, 1))
        if kind != "managed":
            options["segments"] = rng.choice(("auto", "malloc"))
        pool = cumem.Pool(kind, device=device, **options)
        if rng.random() < 0.5:
            with pool.device, pool:
                memory = cumem.empty(self.size(), "u1", kind, device=device)
        else:
            memory = pool.allocate(self.size())
        content = self.world.content(rng, memory.nbytes)
        memory[...] = content
        self.give(Box(memory, kind, device, content.copy()))
        repr(pool.stats()), repr(pool), pool.limit, pool.numa_node, pool.closed
        snapshot = pool.snapshot()
        if not snapshot.blocks and memory.nbytes > 0:
            raise WrongError("a pool in use has no blocks")
        str(snapshot)
        pool.reset_peaks()
        pool.limit = rng.choice((None, "64MiB"))
        if rng.random() < 0.5:
            pool.trim(wait=rng.random() < 0.5)
        if rng.random() < 0.5:
            pool.close()

    @operation(1, main=False)  # a block that Ctrl-C keeps from beginning never ends
    def with_limit(self) -> None:
        nbytes = self.rng.choice(("2MiB", "30%", None))
        kind = self.kind()
        device = self.device() if kind in ("device", "managed") else None
        with self.world.limit_lock, cumem.limit(kind, nbytes, device):
            self.give(self.make(kind))

    @operation(1)
    def trim(self) -> None:
        kind = self.rng.choice((None, *POOLED))
        keep = self.rng.choice((0, "1MiB"))
        cumem.trim(kind, keep=keep, wait=self.rng.random() < 0.5)

    @operation(1)
    def short_of_memory(self) -> None:
        """A callback that makes room, or fails, while everything is held."""
        called = []

        def make_room(kind: str, device: int, nbytes: int) -> None:
            called.append(kind)
            if self.boxes:
                self.boxes.pop()

        device = self.device()
        nbytes = 24 * MIB if self.world.emulated else 7 << 30
        with cumem.on_out_of_memory(make_room):
            cumem.empty_device(nbytes, "u1", device=device)

    @operation(2)
    def reads(self) -> None:
        device = self.device()
        repr(cumem.stats()), repr(cumem.memory_info(device))
        cumem.memory_info("host"), cumem.pool_counters(), cumem.get_limit("pinned")
        str(cumem.default_pool(self.kind(), device).snapshot())
        repr(cumem.stats()[self.kind()]), cumem.stats().total
        cumem.backend(), cumem.emulation_reason(), cumem.driver_version()
        cumem.runtime_version(), cumem.device_count()
        one = cumem.Device(device)
        repr(one), one.name, one.uuid, one.pci_bus_id, one.total_nbytes
        one.compute_capability, one.emulated, one.attributes(), one.memory_info()
        one.can_access_peer(self.device()), hash(one), pickle.loads(pickle.dumps(one))
        repr(cumem.configure()), repr(cumem.current_stream(device))

    @operation(1)
    def measured(self) -> None:
        with cumem.measure() as measure:
            box = self.make(self.kind())
        repr(measure), measure.total, measure.seconds, measure.result.kinds
        self.give(box)

    @operation(1, main=False)
    def configured(self) -> None:
        rng = self.rng
        settings: dict[str, Any] = {
            "threads": rng.choice((1, 2, 5, "auto")),
            "chunk_nbytes": rng.choice(("64KiB", "1MiB", "auto")),
            "depth": rng.choice((2, 8, "auto")),
            "staged_up_nbytes": rng.choice((0, "64KiB", "auto")),
            "staged_down_nbytes": rng.choice((0, "64KiB", "auto")),
            "quick_nbytes": rng.choice((0, "4KiB", "auto")),
            "bounce_nbytes": rng.choice((0, "1KiB", "auto")),
            "ring_nbytes": rng.choice(("1MiB", "8MiB", "auto")),
        }
        chosen = rng.sample(sorted(settings), rng.randrange(1, 4))
        with cumem.configure(**{name: settings[name] for name in chosen}):
            type(self).copy_blocking(self)

    @operation(1)
    def explained(self) -> None:
        target, source = self.take(), self.take()
        to, of = self.ends(target.nbytes, source.nbytes)
        blocking = self.rng.random() < 0.5
        ends = to(target.memory), of(source.memory)
        repr(cumem.explain(*ends, blocking=blocking))
        self.give(target, source)

    # -- streams

    @operation(2)
    def stream_ends(self) -> None:
        """The object goes while its work is under way."""
        begun = self.launch("new")
        stream = begun.stream
        begun.stream = None
        if self.rng.random() < 0.5:
            stream.close()
        del stream
        self.finish_one(begun)

    @operation(2)
    def events(self) -> None:
        stream = self.rng.choice(self.streams)
        first, second = cumem.Event(device=stream.device), None
        first.record(stream)
        second = stream.record(cumem.Event(device=stream.device, blocking=True))
        self.streams[0].wait(second)
        second.synchronize()
        if second.seconds_since(first) < 0 or not second.done:
            raise WrongError("an event")
        first.close()
        with contextlib.suppress(ValueError):
            first.record(stream)
            raise WrongError("a closed event was recorded")

    @operation(1)
    def stream_objects(self) -> None:
        device = self.device()
        stream = cumem.Stream(device=device, non_blocking=self.rng.random() < 0.5)
        repr(stream), stream.id, hash(stream), stream.priority, stream.is_capturing
        foreign = foreign_streams.ByProtocol(stream.handle)
        again = cumem.Stream.from_external(foreign, device=device)
        if again != stream:
            raise WrongError("the same stream from outside is another")
        with stream:
            if cumem.current_stream(device) != stream:
                raise WrongError("not the current stream")
            box = self.make("device")
            cumem.copy(box.memory, box.expect)
        self.give(box)
        self.streams[self.rng.randrange(2)] = stream

    @operation(1)
    def awaited(self) -> None:
        begun = [self.launch(None) for _ in range(self.rng.randrange(1, 4))]
        stops = self.rng.random() < 0.3
        asyncio.run(await_all([one.transfer for one in begun], stops))
        for one in begun:
            one.transfer.wait()
            self.finish_one(dataclasses.replace(one, stream=None))

    @operation(1)
    def in_context(self) -> None:
        """A stream and a pool that are current in another context alone."""
        stream = self.rng.choice(self.streams)
        before = cumem.current_stream(stream.device)
        seen = []

        def inside() -> None:
            pool = cumem.Pool("pinned", device=stream.device)
            with stream, stream.device, pool:
                seen.append(cumem.current_stream(stream.device) == stream)
                box = self.make(self.rng.choice(("pinned", "device")))
                self.verify(box, "made in a context")

        contextvars.copy_context().run(inside)
        if seen != [True] or cumem.current_stream(stream.device) != before:
            raise WrongError("the current stream is another's")

    # -- files

    @operation(2)
    def files(self) -> None:
        box = self.take()
        path = self.path()
        direct: Any = self.rng.choice((None, True, False))
        cumem.tofile(path, box.memory, direct=direct)
        found = np.fromfile(path, "u1")
        self.compare(found, box.expect, f"the file of {box!r}")
        made = cumem.fromfile(
            path, "u1", kind=self.kind(), device=self.device(), direct=direct
        )
        self.compare(made.to_numpy(), box.expect, "read from a file")
        content = self.world.content(self.rng, box.nbytes)
        content.tofile(path)
        cumem.fromfile(path, out=box.memory)
        box.expect = content.copy()
        self.verify(box, "read from a file")
        path.unlink()
        self.give(box)

    @operation(2)
    def ranges(self) -> None:
        boxes = [self.take() for _ in range(self.rng.randrange(1, 4))]
        offsets = [0, *itertools.accumulate(box.nbytes + 5 for box in boxes)]
        path = self.path()
        pieces = [(at, b.memory) for at, b in zip(offsets, boxes, strict=False)]
        cumem.write_ranges(path, pieces, fsync=self.rng.random() < 0.1)
        content = self.world.content(self.rng, offsets[-1])
        found = np.fromfile(path, "u1")
        for at, box in zip(offsets, boxes, strict=False):
            self.compare(found[at : at + box.nbytes], box.expect, f"range of {box!r}")
        content.tofile(path)
        if self.rng.random() < 0.5:
            with open(path, "rb") as file:
                cumem.read_ranges(file, iter(pieces))
        else:
            cumem.read_ranges(path, pieces)
        for at, box in zip(offsets, boxes, strict=False):
            box.expect = content[at : at + box.nbytes].copy()
            self.verify(box, "read from a range")
        path.unlink()
        self.give(*boxes)

    @operation(1)
    def mapped_file(self) -> None:
        box = self.take()
        if box.nbytes == 0:
            return
        content = self.world.content(self.rng, box.nbytes)
        path = self.path()
        content.tofile(path)
        held = np.memmap(path, "u1", "r")
        cumem.copy(box.memory, held)
        box.expect = content.copy()
        self.verify(box, "from a mapped file")
        path.unlink()
        self.give(box)

    @operation(1)
    def safetensors(self) -> None:
        rng = self.rng
        boxes = [self.take() for _ in range(rng.randrange(1, 4))]
        path = self.path().with_suffix(".safetensors")
        most = rng.choice((None, 1000))
        named = {f"{i}.w": box.memory for i, box in enumerate(boxes)}
        saved = cumem.save_safetensors(path, named, {"a": "b"}, max_shard_nbytes=most)
        if saved == path:
            cumem.read_safetensors_header(path)
        kind: Any = rng.choice((*POOLED, "host"))
        loaded = cumem.load_safetensors(saved, kind=kind, device=self.device())
        for i, box in enumerate(boxes):
            found = cumem.asnumpy(loaded[f"{i}.w"])
            self.compare(found, box.expect, f"{box!r}, saved as tensor")
        for left in self.world.folder.iterdir():  # glob() caches each pattern it meets
            if left.name.startswith(path.stem) and ".safetensors" in left.name:
                left.unlink()
        self.give(*boxes)

    # -- the process

    @operation(0.4, main=False)
    def forks(self) -> None:
        """The child reads the memory of this thread, which nobody is writing."""
        boxes = [b for b in self.boxes if b.kind in HOST_KINDS]
        views = [np.asarray(box.memory) for box in boxes]
        ends_normally = self.rng.random() < 0.5 and not LIBRARIES
        # CPython 3.13 dies of it in a thread that forked, without cumem as well.
        ends_normally = ends_normally and sys.version_info < (3, 13)
        with self.world.fork_lock:
            child = os.fork()
        if child == 0:
            in_child(self, boxes, views, ends_normally)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGALRM and SANITIZED:
            # Before GCC 14 AddressSanitizer takes no locks of its allocator at a fork.
            self.world.stuck_children += 1
        elif code != 0:
            raise WrongError(f"a forked child ended with {code}")

    @operation(0.2)
    def spawns(self) -> None:
        subprocess.run(["true"], check=True)

    @operation(0.5)
    def collects(self) -> None:
        gc.collect()

    @operation(0.5, main=False)
    def small_stack(self) -> None:
        content = self.world.content(self.rng, self.size())
        outcome: list[Any] = []

        def run() -> None:
            try:
                memory = cumem.empty_device(content.size, "u1", device=0)
                cumem.copy_async(memory, content).wait()
                outcome.append(cumem.asnumpy(memory))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=run)
        with self.world.stack_lock:
            before = threading.stack_size(SMALL_STACK)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        self.compare(outcome[0], content, "through a thread with a small stack")


WEIGHTS = [one.weight for one in OPERATIONS]


class Lasting(Produced):
    """Lives until the consumer of its capsule has called the deleter."""

    living: ClassVar[set[Lasting]] = set()

    def capsule(self) -> object:
        self.living.add(self)
        return super().capsule()

    def _delete(self, context: int) -> None:
        super()._delete(context)
        self.living.discard(self)


class Held:
    """A capsule for whoever asks first."""

    def __init__(self, capsule: object, place: tuple[int, int]) -> None:
        self.capsule, self.place = capsule, place

    def __dlpack__(self, **_: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place


def registered(memory: np.ndarray, device: int, mapped: bool) -> cumem.Registration:
    """Mapped where its pages are not page-locked already, as a neighbour's."""
    try:
        return cumem.register(memory, mapped=mapped, device=device)
    except cumem.CudaError as error:
        if not mapped or "were page-locked before" not in error.__notes__[0]:
            raise
        return cumem.register(memory, device=device)


def bytes_of(values: np.ndarray) -> np.ndarray:
    """In C order, as bytes."""
    return np.frombuffer(values.tobytes(), "u1")


async def await_all(transfers: list[Any], stops: bool = False) -> None:
    async def one(transfer: Any) -> None:
        await transfer

    tasks = [asyncio.ensure_future(one(transfer)) for transfer in transfers]
    if stops:
        await asyncio.sleep(0)
        tasks[0].cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, asyncio.CancelledError) and stops:
            continue
        if isinstance(outcome, BaseException):
            raise outcome


def in_child(
    worker: Worker, boxes: list[Box], views: list[np.ndarray], ends_normally: bool
) -> None:
    status = 1
    try:
        signal.alarm(30)
        for box, view in zip(boxes, views, strict=True):
            worker.compare(view, box.expect, f"{box!r} in a child, an old view")
            again = np.asarray(box.memory)
            worker.compare(again, box.expect, f"{box!r} in a child, a new view")
        copied = np.empty(3)
        cumem.copy(copied, np.arange(3.0))  # on the host a child goes on
        worker.compare(copied, np.arange(3.0), "a copy in a child")
        for call in (lambda: cumem.empty_pinned(100), cumem.Stream):
            try:
                call()
            except RuntimeError as error:
                if "forked child" not in str(error):
                    raise
            else:
                raise WrongError("a forked child was served")
        if ends_normally:
            worker.forget()
            boxes.clear()
            views.clear()
            signal.alarm(30)
            ctypes.pythonapi.Py_Exit(0)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


# -- other libraries -------------------------------------------------------------------


def use_torch(worker: Worker, box: Box) -> None:
    import torch

    content = worker.world.content(worker.rng, box.nbytes)
    tensor = torch.from_numpy(content.copy())
    if not worker.world.emulated:
        if worker.rng.random() < 0.5:
            tensor = tensor.cuda(box.device)
        stream = torch.cuda.Stream(box.device)
        stream.wait_stream(torch.cuda.current_stream(box.device))
        cumem.copy_async(box.memory, tensor, stream=stream)
        stream.synchronize()
    else:
        cumem.copy(box.memory, tensor)
    box.expect = content.copy()
    if box.kind == "pinned":
        seen = torch.as_tensor(box.memory).numpy()
        worker.compare(seen, content, f"{box!r} as a tensor")
    elif box.kind == "device" and not worker.world.emulated:
        seen = torch.as_tensor(box.memory, device=f"cuda:{box.device}").cpu().numpy()
        worker.compare(seen, content, f"{box!r} as a tensor")
    back = torch.zeros_like(tensor)
    cumem.copy(back, box.memory)
    worker.compare(back.cpu().numpy(), content, "a tensor")


def use_cupy(worker: Worker, box: Box) -> None:
    import cupy

    content = worker.world.content(worker.rng, box.nbytes)
    with cupy.cuda.Device(box.device):
        stream = cupy.cuda.Stream(non_blocking=True)
        values = cupy.asarray(content)
        cupy.cuda.get_current_stream().synchronize()
        cumem.copy_async(box.memory, values, stream=stream)
        stream.synchronize()
        box.expect = content.copy()
        if box.kind in ("device", "mapped"):
            seen = cupy.asnumpy(cupy.asarray(box.memory))
            worker.compare(seen, content, f"{box!r} as CuPy's array")
        back = cupy.zeros_like(values)
        cupy.cuda.get_current_stream().synchronize()
        cumem.copy(back, box.memory)
        worker.compare(cupy.asnumpy(back), content, "CuPy's array")


def use_jax(worker: Worker, box: Box) -> None:
    import jax

    content = worker.world.content(worker.rng, box.nbytes)
    values = jax.device_put(content.copy())
    values.block_until_ready()
    cumem.copy(box.memory, values)
    box.expect = content.copy()
    try:
        cumem.copy(values, box.memory)
    except (ValueError, TypeError, BufferError):
        return
    raise WrongError("JAX's array was written")


LIBRARIES: dict[str, Callable[[Worker, Box], None]] = {}


def find_libraries() -> None:
    calls = {"torch": use_torch, "jax": use_jax, "cupy": use_cupy}
    for name, call in calls.items():
        if name == "cupy" and cumem.backend() == "emulated":
            continue
        with contextlib.suppress(ImportError):
            __import__(name)
            LIBRARIES[name] = call


# -- the main thread -------------------------------------------------------------------


class Main(Worker):
    """What only one thread does, and copies that Ctrl-C ends anywhere."""

    is_main = True
    most_boxes = 4
    armed = False
    others: list[Worker]

    def choose(self) -> Operation:
        return self.rng.choices(*INTERRUPTED)[0]

    def hear(self, number: int, frame: object) -> None:
        """Not amid an import or a lock of Python's own, which may then stay locked."""
        where = getattr(frame, "f_code").co_filename  # noqa: B009
        if self.armed and where.startswith(OURS):
            self.armed = False  # once for each operation
            raise KeyboardInterrupt

    def attempt(self, chosen: Operation) -> None:
        try:
            self.armed = True
            try:
                super().attempt(chosen)
            finally:
                self.armed = False
        except KeyboardInterrupt:
            self.raised[f"{chosen.name}: KeyboardInterrupt"] += 1

    def step(self) -> None:
        what = self.rng.random()
        world = self.world
        if what < 0.9:
            super().step()
        elif what < 0.93:
            self.set_limits()
        elif what < 0.95:
            self.note("set_current_device")
            cumem.set_current_device(self.device())
        elif what < 0.96:
            self.note("calibrate")
            try:
                repr(cumem.calibrate(self.device()))
            except cumem.OutOfMemoryError:
                # Another thread's limit may be below what lives.
                self.raised["calibrate: OutOfMemoryError"] += 1
        elif what < 0.993 or world.options.seconds < 4:
            self.refused_shutdown()
        else:
            self.calm_shutdown()
        if what >= 0.9:
            self.counts[self.now] += 1

    def set_limits(self) -> None:
        self.note("set_limit")
        kind = self.kind()
        device = 0 if kind in ("device", "managed") else None
        with self.world.limit_lock:
            before = cumem.get_limit(kind, device)
            cumem.set_limit(kind, self.rng.choice(("1MiB", "16MiB", "20%")), device)
            time.sleep(0.002)
            cumem.set_limit(kind, before, device)

    def refused_shutdown(self) -> None:
        """Somebody looks at pinned memory, so nothing may happen."""
        self.note("shutdown, refused")
        try:
            anchor = cumem.empty_pinned(100, "u1", device=0)
        except cumem.OutOfMemoryError:  # as above
            self.raised["shutdown, refused: OutOfMemoryError"] += 1
            return
        view = anchor.numpy()
        try:
            cumem.shutdown()
        except (BufferError, RuntimeError) as error:
            self.raised[f"shutdown: {type(error).__name__}"] += 1
        else:
            self.world.fail("shutdown() took exported memory away")
        view[:] = 1

    def calm_shutdown(self) -> None:
        world = self.world
        self.note("shutdown, calm")
        world.calm = True
        self.forget()
        while not all(w.is_calm or w.now == "over" for w in self.others):
            time.sleep(0.001)
        world.shared = []
        stop = time.monotonic() + 0.5
        done = False
        while not done and time.monotonic() < stop:
            gc.collect(0)
            world.shutting = True
            try:
                cumem.shutdown()
                done = True
                world.epoch += 1
            except (BufferError, RuntimeError) as error:
                self.raised[f"calm shutdown: {type(error).__name__}"] += 1
                time.sleep(0.001)
            finally:
                world.shutting = False
        self.counts["shutdown"] += done
        world.share()
        world.calm = False


OF_MAIN = [one for one in OPERATIONS if one.main]
INTERRUPTED = (OF_MAIN, [one.weight for one in OF_MAIN])


def interrupt(main: Main, world: World, seed: int) -> None:
    """Press Ctrl-C now and then."""
    rng = random.Random(seed)
    while time.monotonic() < world.deadline:
        time.sleep(rng.random() * 0.1)
        if main.armed:
            os.kill(os.getpid(), signal.SIGINT)


def plan_faults(world: World, seed: int) -> None:
    rng = random.Random(seed)
    while time.monotonic() < world.deadline:
        if not world.calm:
            testing.plan_fault(rng.choice(FAULTY), rng.randrange(1, 100), FAULT)
        time.sleep(0.01)
    testing.plan_fault(None, 0)


# -- what is watched -------------------------------------------------------------------


def status(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * KIB
    return 0


class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


@functools.cache
def heap_reader() -> Callable[[], int]:
    """Bytes that malloc has given out, all threads."""
    process = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        sanitizer = process.__sanitizer_get_current_allocated_bytes
        sanitizer.restype = ctypes.c_size_t
        return sanitizer
    with contextlib.suppress(AttributeError):
        mallinfo = process.mallinfo2
        mallinfo.restype = Mallinfo

        def read() -> int:
            found = mallinfo()
            return int(found.field7 + found.field4)  # uordblks, hblkhd

        return read
    return lambda: 0


def have_malloc_give_back() -> None:
    """malloc would keep what is freed, up to 64 MiB for each of eight threads a core: a
    process that loses memory would not stand out."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ((-8, 2), (-3, 64 * KIB), (-1, 64 * KIB)):
            mallopt(name, value)  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


#: By how much the later rounds may have more than the earlier ones.
TOLERATED = {
    "rss": (512 if SANITIZED else 64) * MIB,  # the sanitizer keeps what is freed
    "rss anonymous": (512 if SANITIZED else 64) * MIB,
    "heap": 16 * MIB,
    "python_blocks": 20_000,
    "fds": 2,
    "threads": 64,  # an emulated stream is one
    "emulated events": 64,  # kept for the next use
    "emulated streams": 64,
    "emulated address_ranges": 64,
    "emulated modules": 8,
}


def open_files() -> Counter[str]:
    """How many descriptors there are of each file, numbers left out."""
    names: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            name = os.readlink(f"/proc/self/fd/{number}")
            name = name if name.startswith("/dev/") else os.path.basename(name)
            names[re.sub("[0-9]+", "N", name)] += 1
    return names


def measure(open_runtime: bool = True) -> dict[str, int]:
    gc.collect()
    found = {
        "rss": status("VmRSS"),
        "heap": heap_reader()(),
        "python_blocks": sys.getallocatedblocks(),
        "rss anonymous": status("RssAnon"),
        "fds": sum(open_files().values()),
        "threads": len(os.listdir("/proc/self/task")),
        "storages": testing.live_storages(),
        "registrations": testing.registrations(),
        "pending": testing.pending_transfers(),
    }
    if open_runtime and cumem.backend() == "emulated":
        counts = testing.counts()
        found |= {f"emulated {name}": count for name, count in counts.items()}
    return found


def watch(world: World, workers: list[Worker], over: threading.Event) -> None:
    """The end of the process where one operation does not end; peaks by the way."""
    patience = world.options.patience
    while not over.wait(0.25):
        # Should somebody keep the GIL for ever, this still ends the process. A thread of
        # faulthandler's would do so too, but a forked child waits for it at its end.
        signal.alarm(2 * int(patience))
        world.peaks["rss"] = max(world.peaks["rss"], status("VmRSS"))
        for name, folder in (("fds", "fd"), ("threads", "task")):
            count = len(os.listdir(f"/proc/self/{folder}"))
            world.peaks[name] = max(world.peaks[name], count)
        count = testing.live_storages()
        world.peaks["storages"] = max(world.peaks["storages"], count)
        late = [w for w in workers if time.monotonic() - w.since > patience]
        late = [w for w in late if w.now != "over"]
        if late:
            faulthandler.dump_traceback(all_threads=True)
            for worker in workers:
                print(f"{worker.name}: {worker.now}", file=sys.stderr)
            text = f"HANG: {late[0].name} in {late[0].now}, seed {world.options.seed}"
            print(text, file=sys.stderr, flush=True)
            os._exit(3)
    signal.alarm(0)


def settle(world: World) -> None:
    """Everything ended and given back."""
    world.shared = []
    gc.collect()
    names = list(cumem.configure().sources)
    cumem.configure(**dict.fromkeys(names, "auto"))  # type: ignore[arg-type]
    cumem.set_current_device(0)
    stop = time.monotonic() + 30
    while testing.pending_transfers() and time.monotonic() < stop:
        testing.poll()
        time.sleep(0.001)
    for index in range(world.devices):
        cumem.Device(index).synchronize()
    while testing.live_storages() and time.monotonic() < stop:
        testing.poll()
        gc.collect()
        time.sleep(0.001)
    cumem.trim()
    cumem.trim()


def run_round(world: World, number: int) -> list[Worker]:
    options = world.options
    seconds = options.seconds / options.rounds
    world.deadline = time.monotonic() + seconds
    world.share()
    main = Main(world, options.threads, number)
    workers = [Worker(world, index, number) for index in range(options.threads)]
    main.others = workers
    everybody = world.workers = [*workers, main]
    over = threading.Event()
    watcher = threading.Thread(
        target=watch, args=(world, everybody, over), daemon=True, name="watcher"
    )
    others = [watcher]
    seed = options.seed * 1000 + number
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    calls.append((interrupt, (main, world, seed)))
    if options.faults:
        calls.append((plan_faults, (world, seed)))
    others += [threading.Thread(target=c, args=a, daemon=True) for c, a in calls]
    before = signal.signal(signal.SIGINT, main.hear)
    for thread in (*others, *workers):
        thread.start()
    main.run()
    for worker in workers:
        worker.join()
    for thread in others[1:]:
        thread.join()
    signal.signal(signal.SIGINT, before)
    main.note("settle")
    try:
        settle(world)
    except Exception:
        world.fail(f"at the end of round {number}: {traceback.format_exc()}")
    over.set()
    watcher.join()
    return everybody


def grown(rounds: list[dict[str, int]]) -> list[str]:
    """What the later half of the rounds has more of than the earlier one ever had."""
    half = len(rounds) // 2
    found = []
    for name in rounds[0]:
        tolerated = TOLERATED.get(name, 0)
        earlier = max(one[name] for one in rounds[:half])
        later = min(one[name] for one in rounds[half:])
        if later > earlier + tolerated:
            found.append(f"{name} grew: {[one[name] for one in rounds]}")
    last = rounds[-1]
    for name in ("storages", "registrations", "pending"):
        if last[name] != 0:
            found.append(f"{last[name]} {name} are left")
    return found


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    unread: list[str] = []

    started = datetime.datetime.now(datetime.UTC)
    begin = measure(open_runtime=False)
    for name in cumem.__all__:
        getattr(cumem, name)  # loaded at first use
    world = World(options, folder)
    set_hooks(world, unread)
    if options.libraries or not world.emulated:
        find_libraries()
    counts: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    nbytes = 0
    rounds: list[dict[str, int]] = []
    files: list[Counter[str]] = []
    for number in range(options.rounds):
        for worker in run_round(world, number):
            counts.update(worker.counts)
            raised.update(worker.raised)
            nbytes += worker.nbytes
        del worker
        world.workers = []
        rounds.append(measure())
        files.append(open_files())
        if world.failures or unread:
            break
    failures = world.failures + unread
    if not failures:
        failures = grown(rounds)
    if not testing.check_pools():
        failures.append("the equations of the pools do not hold")
    ran = {*counts, *(name.partition(":")[0] for name in raised)}
    shut = shut_down_at_last(failures)
    return {
        "commit": info.commit(),
        "started": started.isoformat(timespec="seconds"),
        "machine": info.machine(),
        "python": sys.version,
        "backend": cumem.backend(),
        "device": cumem.Device(0).name,
        "sanitized": SANITIZED,
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "seed": options.seed,
        "libraries": sorted(LIBRARIES),
        "operations": dict(sorted(counts.items())),
        "never_ran": [one.name for one in OPERATIONS if one.name not in ran],
        "operation_count": counts.total(),
        "verified_nbytes": nbytes,
        "exceptions": dict(sorted(raised.items())),
        "shutdowns": world.epoch,
        "children_stuck_in_the_sanitizer": world.stuck_children,
        "begin": begin,
        "peaks": dict(world.peaks),
        "after_each_round": rounds,
        "files_after_each_round": files,
        "after_shutdown": shut,
        "failures": failures,
    }


def set_hooks(world: World, unread: list[str]) -> None:
    """Note what nobody could be told of, but for Ctrl-C in a finaliser."""

    def hook(args: Any) -> None:
        error = args.exc_value
        if not (isinstance(error, KeyboardInterrupt) or world.planned(error)):
            unread.append("".join(traceback.format_exception(error)))

    sys.unraisablehook = hook
    threading.excepthook = hook


def shut_down_at_last(failures: list[str]) -> dict[str, int]:
    if failures:
        return {}  # it might never end
    cumem.shutdown()
    return measure(open_runtime=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=4, help="4 or more")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=MIB)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--libraries", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 4:
        parser.error("--rounds must be 4 or more")
    warnings.filterwarnings("ignore", ".*fork")  # in a process with threads
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)
    have_malloc_give_back()
    for name, value in (EMULATED_ENVIRONMENT | CUDA_ENVIRONMENT).items():
        if name.startswith("CUMEM_EMULATED") or os.environ.get("CUMEM_BACKEND") == (
            "cuda"
        ):
            os.environ.setdefault(name, value)
    os.environ.setdefault("CUMEM_EMULATED_SEED", str(options.seed))
    if options.faults:
        testing.configure(faults=True)
    folder = Path(tempfile.mkdtemp(prefix="cumem-torture-"))
    try:
        result = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    for failure in result["failures"]:
        print(f"WRONG, seed {options.seed}: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
