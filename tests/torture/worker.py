# SPDX-License-Identifier: Apache-2.0
"""A thread that owns memory and makes random calls on it until the time is over.

The thread owns `boxes`, which are memory with known contents. An operation takes boxes out
of that list, uses them, verifies them and gives them back.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import support.streams as foreign_streams

import cumem
from torture import calm
from torture.boxes import Box, Make, layout, registered
from torture.pending import Pending, finish_one
from torture.registry import SHORT, Operation, Raises, weighted
from torture.settings import DTYPES, KINDS, POOLED, WrongError
from torture.world import World

#: Types of foreign stream objects that can keep the stream alive, unlike plain numbers.
FOREIGN_STREAMS = [one for one in foreign_streams.FOREIGN if not issubclass(one, int)]
FOREIGN_STREAMS.remove(np.uint64)


class Worker(threading.Thread):
    """A thread that does random operations until the deadline."""

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
        """Do operations until the deadline, then check the memory. Errors fail the run."""
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
        """Note what the thread does now, for reports of failures and of hangs."""
        self.now, self.since = name, time.monotonic()

    def step(self) -> None:
        """Do one operation."""
        world = self.world
        if world.calm:
            self.forget()
            self.note("calm")
            self.is_calm = True
            self.counts["calm"] += calm.step(self)
            return
        self.is_calm = False
        if self.epoch != world.epoch:
            self.forget()
            self.epoch = world.epoch
        chosen = self.choose()
        self.note(chosen.name)
        self.attempt(chosen)

    def choose(self) -> Operation:
        return self.rng.choices(*weighted(self.is_main))[0]

    def attempt(self, chosen: Operation) -> None:
        """Call an operation, which may raise the errors that it declares."""
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
        """Count an error, and fail the run unless the operation may raise it."""
        self.raised[f"{name}: {type(error).__name__}"] += 1
        text = str(error)
        for kind, pattern in raises:
            if isinstance(error, kind) and re.search(pattern, text):
                return
        if self.world.planned(error):
            return
        reports = "".join(traceback.format_exception(error))
        self.world.fail(f"{self.name}, {name}: {reports}")

    def forget(self) -> None:
        """Drop all memory and streams of the thread."""
        self.boxes.clear()
        self.pending.clear()
        self.streams.clear()

    def end(self) -> None:
        """Check that all copies arrive, and that the other memory has not changed."""
        while self.pending and not self.world.failures:
            try:
                finish_one(self, self.pending.pop())
            except Exception as error:
                self.judge("end", error, (SHORT,))
        for box in self.boxes:
            self.verify(box, "at the end")

    # -- memory

    def path(self) -> Path:
        """Return one of twenty paths that no other thread uses."""
        return self.world.folder / f"{self.index}-{next(self.file_number) % 20}"

    def size(self) -> int:
        """Choose a size, most often a small one, and now and then 0 or a very large one."""
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
        """Make new memory with random contents."""
        rng = self.rng
        kind = rng.choice(KINDS) if kind is None else kind
        nbytes = self.size() if nbytes is None else nbytes
        if kind == "registered" and nbytes == 0:
            nbytes = 1  # an empty array cannot be page-locked
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
        """Take a box out of this thread's list, or make one. It goes back by `give`."""
        kinds = (kind,) if isinstance(kind, str) else kind
        fits = [i for i, b in enumerate(self.boxes) if kinds is None or b.kind in kinds]
        if fits and self.rng.random() < 0.8:
            return self.boxes.pop(self.rng.choice(fits))
        return self.make(None if kinds is None else self.rng.choice(kinds))

    def give(self, *boxes: Box) -> None:
        """Put boxes into the list. If there are too many, verify and drop others."""
        self.boxes.extend(boxes)
        while len(self.boxes) > self.most_boxes:
            box = self.boxes.pop(self.rng.randrange(len(self.boxes)))
            self.verify(box, "dropped")

    def source(self) -> Box:
        """Choose one of this thread's boxes, or one of those that all threads only read."""
        if self.rng.random() < 0.3:
            return self.rng.choice(self.world.shared)
        return self.take()

    def give_source(self, box: Box) -> None:
        """Put a box of `source` back, unless it belongs to all threads."""
        if box not in self.world.shared:
            self.give(box)

    def verify(self, box: Box, where: str) -> None:
        """Fail if the bytes of a box are not what they must be."""
        found = self.world.raw.read(box)
        self.compare(found, box.expect, f"{box!r} {where}")

    def compare(self, found: np.ndarray, expect: np.ndarray, where: str) -> None:
        """Fail if bytes are not what they must be, with a text that says where."""
        self.nbytes += expect.size
        if np.array_equal(found, expect):
            return
        different = np.flatnonzero(found != expect)
        raise WrongError(
            f"{where}: {different.size} bytes are wrong, from {different[0]} to "
            f"{different[-1]}: {found[different[:8]]} for {expect[different[:8]]}"
        )

    def arrived(
        self, found: np.ndarray, target: Box, written: np.ndarray, where: str
    ) -> bool:
        """Return whether a copy without a handle has written what it should.

        If nobody kept its handle, a copy can fail without an error in this thread: only the
        unraisable hook hears of it, maybe later. An array does not know its transfers, and
        a copy from the target runs after the failed one without asking how the failed one
        ended.

        The failed copy may have written a part, so each byte must be either the old or the
        new one. Any other byte is wrong, whether or not the hook was called. The copy is
        added to `unwritten`, because its failure must have been reported by the end of the
        round.
        """
        self.nbytes += written.size
        if np.array_equal(found, written):
            return True
        mixed = np.where(found == target.expect, target.expect, written)
        self.compare(found, mixed, f"{target!r} {where}")
        self.world.unwritten.append(f"{self.name}, {self.now}: {target!r} {where}")
        return False

    def shape(self, dtype: np.dtype, nbytes: int) -> tuple[int, ...]:
        """Choose a shape of up to three dimensions that fits into some bytes."""
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
        """Choose views of two boxes, of this many bytes, that can be copied.

        Now and then the source is broadcast.
        """
        dtype = np.dtype(self.rng.choice(dtypes))
        shape = self.shape(dtype, min(target, source))
        given = shape
        if len(shape) > 1 and self.rng.random() < 0.1:
            given = (1, *shape[1:])
        return (
            layout(self.rng, dtype, shape, target),
            layout(self.rng, dtype, given, source),
        )

    # -- streams

    def stream_of(self, *boxes: Box, new: bool = False) -> Any:
        """Choose a stream of a device that these boxes are on.

        It is new, one of this thread's, or the default stream of this thread.
        """
        devices = [box.device for box in boxes if box.kind == "device"]
        device = self.rng.choice(devices) if devices else self.device()
        if new:
            return cumem.Stream(device=device, priority=self.rng.choice((0, -1)))
        fits = [s for s in self.streams if s.device == device]
        if fits and self.rng.random() < 0.85:
            return fits[0]
        return cumem.Stream.from_external(2, device=device)

    def spelled(self, stream: cumem.Stream) -> Any:
        """Return the stream itself, or a stream made from an object like those of other
        libraries.

        That object keeps the first stream alive.
        """
        if self.rng.random() < 0.5:
            return stream
        foreign = self.rng.choice(FOREIGN_STREAMS)(stream.handle)
        foreign.owner = stream
        return cumem.Stream.from_external(foreign, device=stream.device)

    def wait_for(self, stream: cumem.Stream) -> None:
        """Wait for a stream in one of several ways, none of which uses a transfer."""
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

    def settle(self) -> None:
        """Wait for all devices."""
        for index in range(self.world.devices):
            cumem.Device(index).synchronize()
