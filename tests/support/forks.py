# SPDX-License-Identifier: Apache-2.0
"""Forked children that run a function of a test, and that may not outlive it."""

from __future__ import annotations

import os
import resource
import signal
import threading
import traceback
import warnings
from collections.abc import Callable

FORK = threading.Lock()  # audit hooks of other packages refuse two forks at once


def fork_and_run(check: Callable[[], object]) -> None:
    """Run `check` in a forked child, which may not hang. Its output is shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        with FORK:
            child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def fork_and_die(check: Callable[[], object]) -> None:
    """Run `check` in a forked child, which must be killed by a signal."""
    assert -fork_and_die_or_run(check) in (signal.SIGSEGV, signal.SIGBUS)


def fork_and_die_or_run(check: Callable[[], object]) -> int:
    """Run `check` in a forked child, which may die of touching memory or must succeed.

    Returns its exit code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGSEGV, signal.SIGBUS):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(20)
        try:
            check()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0 or -code in (signal.SIGSEGV, signal.SIGBUS)
    return code
