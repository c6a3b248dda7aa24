# SPDX-License-Identifier: Apache-2.0
"""Forks, runs programs, collects garbage, and starts threads with little stack."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

import cumem
from torture.boxes import Box
from torture.libraries import LIBRARIES
from torture.registry import operation
from torture.settings import HOST_KINDS, SANITIZED, SMALL_STACK, WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


@operation(0.4, main=False)
def forks(worker: Worker) -> None:
    """Fork a child that reads this thread's memory, which nobody is writing."""
    boxes = [b for b in worker.boxes if b.kind in HOST_KINDS]
    views = [np.asarray(box.memory) for box in boxes]
    ends_normally = worker.rng.random() < 0.5 and not LIBRARIES
    # CPython 3.13 crashes if a thread other than the main one forks and the child ends
    # normally, even without cumem.
    ends_normally = ends_normally and sys.version_info < (3, 13)
    with worker.world.fork_lock:
        child = os.fork()
    if child == 0:
        in_child(worker, boxes, views, ends_normally)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGALRM and SANITIZED:
        # Before GCC 14 AddressSanitizer did not take its allocator's locks at a fork, so
        # the child may wait for one of these locks for ever.
        worker.world.stuck_children += 1
    elif code != 0:
        raise WrongError(f"a forked child ended with {code}")


@operation(0.2)
def spawns(worker: Worker) -> None:
    subprocess.run(["true"], check=True)


@operation(0.5)
def collects(worker: Worker) -> None:
    gc.collect()


@operation(0.5, main=False)
def small_stack(worker: Worker) -> None:
    """Copy to a device and back in a thread with a small stack."""
    content = worker.world.content(worker.rng, worker.size())
    outcome: list[Any] = []

    def run() -> None:
        try:
            memory = cumem.empty_device(content.size, "u1", device=0)
            cumem.copy_async(memory, content).wait()
            outcome.append(cumem.asnumpy(memory))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    with worker.world.stack_lock:
        before = threading.stack_size(SMALL_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    worker.compare(outcome[0], content, "through a thread with a small stack")


def in_child(
    worker: Worker, boxes: list[Box], views: list[np.ndarray], ends_normally: bool
) -> None:
    """Check in a forked child what it may read and what it is refused, and end it."""
    status = 1
    try:
        signal.alarm(30)
        for box, view in zip(boxes, views, strict=True):
            worker.compare(view, box.expect, f"{box!r} in a child, an old view")
            again = np.asarray(box.memory)
            worker.compare(again, box.expect, f"{box!r} in a child, a new view")
        copied = np.empty(3)
        cumem.copy(copied, np.arange(3.0))  # a child can still copy on the host
        worker.compare(copied, np.arange(3.0), "a copy in a child")
        for call in (lambda: cumem.empty_pinned(100), cumem.Stream):
            try:
                call()
            except RuntimeError as error:
                if "forked child" not in str(error):
                    raise
            else:
                raise WrongError("a forked child was not refused memory or a stream")
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
