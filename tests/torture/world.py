# SPDX-License-Identifier: Apache-2.0
"""Shared by the threads: options, the noise that contents are cut from, and failures."""

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
        self.noise = rng.integers(0, 256, 16 * options.largest + MIB, "u1")
        self.noise.flags.writeable = False
        self.failures: list[str] = []
        self.unwritten: list[str] = []  # copies without a handle that did not arrive
        self.unreported: list[str] = []  # their failures, which only the hook was told
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
        self.excused = 0  # copies without a handle whose failures were told

    def to_register(self, content: np.ndarray) -> np.ndarray:
        return content.copy() if self.emulated else in_own_pages(content)

    def fail(self, text: str) -> None:
        doing = ", ".join(worker.now for worker in self.workers)
        self.failures.append(f"{text}Meanwhile: {doing}")
        self.deadline = 0.0

    def may_fail(self, error: BaseException | None) -> bool:
        """Return True for errors of any copy: a lack of memory, or a planned fault."""
        return isinstance(error, cumem.OutOfMemoryError) or self.planned(error)

    def balance(self) -> None:
        """Fail if more copies without a handle did not arrive than failures were reported.

        The hook learns the type of the handle, but not which handle it was. So a failure
        cannot excuse a certain copy, but the numbers have to agree at the end of a round,
        when every failure has been reported.
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
        """Return True if the error is a fault that was put into a call of the driver."""
        return (
            self.options.faults
            and isinstance(error, cumem.CudaError)
            and error.code == FAULT
        )

    def content(self, rng: random.Random, nbytes: int) -> np.ndarray:
        begin = rng.randrange(self.noise.size - nbytes + 1)
        return self.noise[begin : begin + nbytes]

    def share(self) -> None:
        """Make the sources that all threads read and none writes."""
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
