# SPDX-License-Identifier: Apache-2.0
"""Locks of the package, which a forked child finds free."""

from __future__ import annotations

import functools
import os
import threading


def make_lock() -> threading.RLock:
    """Make a lock that its thread may take again: a signal handler or finaliser may
    interrupt the block and use the same.

    A thread that holds it at a fork is not there in the child to let go of it: it is made
    anew there. It is no class of ours: between an ``__enter__`` in Python and its block a
    Ctrl-C would leave it held.
    """
    lock = threading.RLock()
    os.register_at_fork(after_in_child=functools.partial(_renew, lock))
    return lock


def _renew(lock: threading.RLock) -> None:
    if lock.acquire(blocking=False):  # free, or of the thread that forked
        lock.release()
    else:
        lock._at_fork_reinit()  # type: ignore[attr-defined]
