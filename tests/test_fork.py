# SPDX-License-Identifier: Apache-2.0
"""Forked children of a process that has opened the driver: they are told that they cannot
use it, whatever other threads were doing at the fork, and never wait for these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import cumem

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork")


def fork_and_run(check: Callable[[], object]) -> None:
    """Run `check` in a forked child, which may not hang; what it prints comes through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
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


def test_child_may_not_change_how_copies_are_made(emulated) -> None:
    source, target = np.ones(1 << 20, "u1"), cumem.empty_device(1 << 20, "u1")

    def check() -> None:
        before = cumem.configure()
        with pytest.raises(RuntimeError, match="forked child"):
            cumem.configure(threads=1)
        with pytest.raises(RuntimeError, match="forked child"):
            block.__exit__(None, None, None)
        with pytest.raises(ValueError, match="threads"):
            cumem.configure(threads=99)
        assert cumem.configure() == before

    with cumem.configure(threads=3) as block:
        for _ in range(10):  # a lock that a thread holds at the fork stays held
            handles = [cumem.copy_async(target, source) for _ in range(4)]
            fork_and_run(check)
            for handle in handles:
                handle.wait()
        assert cumem.configure().threads == 3


@contextmanager
def busy() -> Iterator[None]:
    """Threads of cumem's at work until closed: any lock may be held when one forks."""
    stop = threading.Event()
    source, target = np.ones(1 << 18, "u1"), cumem.empty_device(1 << 18, "u1")

    def work() -> None:
        while not stop.is_set():
            pairs = [(target[i : i + 999], source[i : i + 999]) for i in range(20)]
            cumem.copy_many_async(pairs)
            cumem.copy_async(target, source).wait()
            cumem.empty_pinned(1000).free()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


OPENED = {
    "set_limit": lambda ends: cumem.set_limit("pinned", "1GiB"),
    "limit": lambda ends: cumem.limit("pinned", "1GiB"),
    "trim": lambda ends: cumem.trim("device"),
    "calibrate": lambda ends: cumem.calibrate(),
    "shutdown": lambda ends: cumem.shutdown(),
    "explain": lambda ends: cumem.explain(*ends[:2]),
    "copy": lambda ends: cumem.copy(*ends[:2]),
    "copy_many": lambda ends: cumem.copy_many([ends[:2]] * 2),
    "tofile": lambda ends: cumem.tofile(os.devnull, ends[0]),
    "Stream": lambda ends: cumem.Stream(),
    "Stream.synchronize": lambda ends: ends[2].synchronize(),
    "Stream.done": lambda ends: ends[2].done,
    "Stream.wait": lambda ends: ends[2].wait(ends[3]),
    "Event": lambda ends: cumem.Event(),
    "Event.record": lambda ends: ends[3].record(ends[2]),
    "Event.synchronize": lambda ends: ends[3].synchronize(),
    "Event.done": lambda ends: ends[3].done,
    "Device.synchronize": lambda ends: cumem.Device(0).synchronize(),
    "fill": lambda ends: ends[0].fill(0),
}


def test_child_is_refused_whatever_its_parent_was_doing(emulated) -> None:
    stream, event = cumem.Stream(), cumem.Event()
    ends = (cumem.empty_device(999, "u1"), np.ones(999, "u1"), stream, event)
    event.record(stream)

    def check() -> None:
        for call in OPENED.values():
            with pytest.raises(RuntimeError, match="forked child"):
                call(ends)
        with cumem.measure():
            assert cumem.stats().pools
        hook = cumem.on_out_of_memory(lambda *args: None)
        hook.remove()

    with busy():
        for _ in range(10):
            fork_and_run(check)


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed"])
def test_child_is_given_no_view_of_memory_it_does_not_have(emulated, kind) -> None:
    buffer = cumem.full(1000, 7, "u1", kind)
    own = cumem.asbuffer(np.ones(10, "u1"))

    def check() -> None:
        for view in (memoryview, np.asarray, np.frombuffer, cumem.Buffer.numpy, bytes):
            with pytest.raises(RuntimeError, match="forked child"):
                view(buffer)
        assert bytes(memoryview(own)) == bytes([1] * 10)

    fork_and_run(check)


OPENING = """
import os, signal, sys, threading, warnings
import cumem

inside, go_on = threading.Event(), threading.Event()

def show(message, category, *rest, **named):
    if category is cumem.EmulationWarning:  # os.fork() has a warning as well
        inside.set()
        go_on.wait()

warnings.showwarning = show
thread = threading.Thread(target=cumem.device_count)
thread.start()
if not inside.wait(5):
    sys.exit(0)  # there is a device: nothing holds the opening up
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        cumem.device_count()
    except RuntimeError as error:
        os._exit(0 if "forked child" in str(error) else 2)
    os._exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go_on.set()
thread.join()
sys.exit(status)
"""


def test_child_that_was_forked_while_the_driver_was_opened_does_not_wait() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CUMEM_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", OPENING],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
