# SPDX-License-Identifier: Apache-2.0
"""Forks children that run a function of a test. An alarm ends a child that hangs."""

from __future__ import annotations

import os
import resource
import signal
import threading
import traceback
import warnings
from collections.abc import Callable

FORK = threading.Lock()  # audit hooks of other packages allow only one fork at a time


def fork_and_run(check: Callable[[], object]) -> None:
    """Run a check in a forked child, which must succeed. What it prints is shown."""
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
    """Run a check in a forked child, which a fault of memory must kill."""
    assert -fork_and_die_or_run(check) in (signal.SIGSEGV, signal.SIGBUS)


def fork_and_die_or_run(check: Callable[[], object]) -> int:
    """Run a check in a forked child, which must succeed or be killed by a fault of memory.

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
