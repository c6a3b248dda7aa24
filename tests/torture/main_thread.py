# SPDX-License-Identifier: Apache-2.0
"""Has the operations that only the main thread may do, and copies under Ctrl-C."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path

from support import testing

import cumem
from torture.registry import Operation
from torture.settings import FAULT, FAULTY
from torture.worker import Worker
from torture.world import World

#: Ctrl-C is raised only in code of these two folders, the torture's and the package's.
OURS = (str(Path(__file__).parent), str(Path(cumem.__file__).parent))


class Main(Worker):
    """Does what only one thread may do, and operations that Ctrl-C may end anywhere."""

    is_main = True
    most_boxes = 4
    armed = False
    others: list[Worker]

    def hear(self, number: int, frame: object) -> None:
        """Raise KeyboardInterrupt, but only in code of `OURS`.

        In Python's own code, such as that of an import, it could leave a lock taken.
        """
        where = getattr(frame, "f_code").co_filename  # noqa: B009
        if self.armed and where.startswith(OURS):
            self.armed = False  # each operation is interrupted once
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
        elif what < 0.993 or world.options.seconds < 4:
            self.refused_shutdown()
        else:
            self.calm_shutdown()
        if what >= 0.9:
            self.counts[self.now] += 1

    def set_limits(self) -> None:
        """Lower a limit for a moment, and then set the old one again."""
        self.note("set_limit")
        kind = self.kind()
        device = 0 if kind in ("device", "managed") else None
        with self.world.limit_lock:
            before = cumem.get_limit(kind, device)
            cumem.set_limit(kind, self.rng.choice(("1MiB", "16MiB", "20%")), device)
            time.sleep(0.002)
            cumem.set_limit(kind, before, device)

    def refused_shutdown(self) -> None:
        """Call shutdown() while somebody uses pinned memory. The call must be
        refused.
        """
        self.note("shutdown, refused")
        try:
            anchor = cumem.empty_pinned(100, "u1", device=0)
        except cumem.OutOfMemoryError:  # the limits are small
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
        """Shut down while the other threads do only what `calm` allows them."""
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


def interrupt(main: Main, world: World, seed: int) -> None:
    """Send Ctrl-C to the process at random times, until the deadline."""
    rng = random.Random(seed)
    while time.monotonic() < world.deadline:
        time.sleep(rng.random() * 0.1)
        if main.armed:
            os.kill(os.getpid(), signal.SIGINT)


def plan_faults(world: World, seed: int) -> None:
    """Let a call of the driver fail, every hundredth of a second until the deadline."""
    rng = random.Random(seed)
    while time.monotonic() < world.deadline:
        if not world.calm:
            testing.plan_fault(rng.choice(FAULTY), rng.randrange(1, 100), FAULT)
        time.sleep(0.01)
    testing.plan_fault(None, 0)
