# SPDX-License-Identifier: Apache-2.0
"""Locks of the package, which a forked child finds free."""

from __future__ import annotations

import os
import threading


class Lock:
    """A lock for ``with``; a thread may take it again: a signal handler or finaliser may
    interrupt the block and use the same.

    A thread that holds it at a fork is not there in the child to let go of it, so that the
    child has a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        if self._lock.acquire(blocking=False):  # free, or of the thread that forked
            self._lock.release()
        else:
            self._lock = threading.RLock()
