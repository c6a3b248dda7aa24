# SPDX-License-Identifier: Apache-2.0
"""Makes locks that are free in a forked child, whoever held them before the fork."""

from __future__ import annotations

import functools
import os
import threading


def make_lock() -> threading.RLock:
    """Make a lock that the same thread may take again.

    A signal handler or a finaliser may interrupt the block that holds the lock and need the
    lock itself.

    In a forked child, the thread that held a lock does not exist and cannot release it, so
    the lock is made anew there. The lock is an RLock rather than a class of ours: Ctrl-C
    could come between an ``__enter__`` written in Python and the block, and leave the lock
    held.
    """
    lock = threading.RLock()
    os.register_at_fork(after_in_child=functools.partial(_renew, lock))
    return lock


def _renew(lock: threading.RLock) -> None:
    if lock.acquire(blocking=False):  # free, or held by the thread that forked
        lock.release()
    else:
        lock._at_fork_reinit()  # type: ignore[attr-defined]
