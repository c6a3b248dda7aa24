# SPDX-License-Identifier: Apache-2.0
"""Has what the threads share, which is options, random bytes, and failures."""

from __future__ import annotations

import argparse
import random
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import cumem
from torture.boxes import Box, Raw, in_own_pages
from torture.settings import FAULT, KINDS, MIB, POOLED

if TYPE_CHECKING:
    from torture.worker import Worker


class World:
    """Everything that the threads share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.emulated = cumem.backend() == "emulated"
        self.devices = cumem.device_count()
        self.raw = Raw(self.emulated)
        rng = np.random.default_rng(options.seed)
        #: Random bytes, of which each content is a slice.
        self.noise = rng.integers(0, 256, 16 * options.largest + MIB, "u1")
        self.noise.flags.writeable = False
        self.failures: list[str] = []
        self.unwritten: list[str] = []  # copies without a handle that did not arrive
        self.unreported: list[str] = []  # the failures of such copies, from the hook
        self.workers: list[Worker] = []
        self.deadline = 0.0
        self.epoch = 0  # the number of shutdowns so far
        self.shutting = False
        self.calm = False  # threads export nothing, so that shutdown() can succeed
        self.shared: list[Box] = []
        self.stack_lock = threading.Lock()
        self.fork_lock = threading.Lock()
        # Without this lock two threads that lower a limit and set the old one again could
        # leave the lower one in force.
        self.limit_lock = threading.Lock()
        self.peaks: Counter[str] = Counter()
        self.stuck_children = 0
        self.excused = 0  # copies that did not arrive, with a failure reported for each

    def to_register(self, content: np.ndarray) -> np.ndarray:
        """Return a copy that can be registered, and then copied by other libraries."""
        return content.copy() if self.emulated else in_own_pages(content)

    def fail(self, text: str) -> None:
        """Note a failure, with what all threads were doing, and end the round."""
        doing = ", ".join(worker.now for worker in self.workers)
        self.failures.append(f"{text}Meanwhile: {doing}")
        self.deadline = 0.0

    def may_fail(self, error: BaseException | None) -> bool:
        """Return whether any copy may raise this: a lack of memory, or a planned fault."""
        return isinstance(error, cumem.OutOfMemoryError) or self.planned(error)

    def balance(self) -> None:
        """Fail if more copies without a handle did not arrive than failures were reported.

        The hook learns the type of the handle, but not which handle it was. So a failure
        excuses no particular copy. At the end of a round, when every failure has been
        reported, the numbers have to agree.
        """
        if len(self.unwritten) > len(self.unreported):
            copies = "; ".join(self.unwritten)
            self.fail(
                f"{len(self.unwritten)} copies did not arrive, but {len(self.unreported)} "
                f"failures were reported. The copies: {copies}. "
            )
        self.excused += len(self.unwritten)
        self.unwritten.clear()
        self.unreported.clear()

    def planned(self, error: BaseException | None) -> bool:
        """Return whether the error is a fault that was put into a call of the driver."""
        return (
            self.options.faults
            and isinstance(error, cumem.CudaError)
            and error.code == FAULT
        )

    def content(self, rng: random.Random, nbytes: int) -> np.ndarray:
        """Choose some bytes of the noise, which is read-only."""
        begin = rng.randrange(self.noise.size - nbytes + 1)
        return self.noise[begin : begin + nbytes]

    def share(self) -> None:
        """Make the boxes that all threads read and that no thread writes."""
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
