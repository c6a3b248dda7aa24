# SPDX-License-Identifier: Apache-2.0
"""Open and close cumem's runtime for one test, and say what a test left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from cumem import _core

testing = _core._testing

#: Longest random delay before each piece of emulated work. Never 0: a suite that runs
#: without late streams cannot see an ordering bug (test_emulation.py fails then).
MAX_DELAY_US = 150


def emulated_driver() -> int:
    """CUDA version of the emulated driver, e.g. 12040, from CUMEM_EMULATED_DRIVER."""
    major, _, minor = os.environ.get("CUMEM_EMULATED_DRIVER", "13.0").partition(".")
    return int(major) * 1000 + int(minor or 0) * 10


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What a test may ask about the runtime it runs on."""

    name: str

    @property
    def emulated(self) -> bool:
        return self.name == "emulated"

    def has(self, op: str) -> bool:
        """True when the driver (emulated or real) has the operation of ops.h."""
        oldest = {name: driver for name, _, driver in testing.op_names()}[op]
        major, minor = _core.driver_version()
        return major * 1000 + minor * 10 >= oldest


def leftovers(held: int = 0) -> dict[str, int]:
    """Count what should be zero once a test has dropped everything but `held` storages."""
    gc.collect()
    if testing.opened():
        for index in range(_core.device_count()):
            _core.Device(index).synchronize()
    while testing.pending_transfers():  # the watcher and the workers finish them
        testing.poll()
    # what a finished transfer kept is dropped by its thread a moment later
    patience = time.monotonic() + 2
    while testing.live_storages() > held and time.monotonic() < patience:
        testing.poll()
        time.sleep(0.001)
    found = {
        "storages": testing.live_storages(),
        "registrations": testing.registrations(),
        "transfers": testing.pending_transfers(),
    }
    return {what: count for what, count in found.items() if count}


@contextlib.contextmanager
def opened(name: str = "emulated", **overrides: object) -> Iterator[Runtime]:
    """Run cumem on one backend; fail if anything is left at the end."""
    _core.shutdown()
    settings: dict[str, object] = {"backend": name, "faults": True}
    if name == "emulated":
        settings.update(
            device_count=2,
            memory_nbytes=1 << 30,
            driver_version=emulated_driver(),
            max_delay_us=MAX_DELAY_US,
            seed=0,
        )
    settings.update(overrides)
    testing.configure(**settings)
    try:
        yield Runtime(name)
        if testing.opened():
            assert leftovers() == {}
            assert testing.check_pools()
    finally:
        gc.collect()
        if testing.opened():
            testing.plan_fault(None, 0)
        _core.shutdown()
        testing.configure()


@contextlib.contextmanager
def gate(stream: object) -> Iterator[None]:
    """Hold an emulated stream shut inside the block."""
    testing.gate_close(stream)
    try:
        yield
    finally:
        testing.gate_open(stream)


class AlarmError(Exception):
    """Raised by the signal of `alarm`."""


def ring_again() -> None:
    """Inside of `alarm`: another signal after the first."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)


@contextlib.contextmanager
def on_alarm(handler: Callable[[], None]) -> Iterator[None]:
    """Call `handler` for a signal soon after the beginning of the block."""
    old = signal.signal(signal.SIGALRM, lambda number, frame: handler())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@contextlib.contextmanager
def alarm(stream: object) -> Iterator[None]:
    """Hold `stream` shut inside the block, which a signal must end with AlarmError.

    What cannot be interrupted ends all the same, for the stream then opens.
    """

    def ring(number: int, frame: object) -> None:
        raise AlarmError

    rescued = threading.Event()

    def rescue() -> None:
        rescued.set()
        testing.gate_open(stream)

    old = signal.signal(signal.SIGALRM, ring)
    timer = threading.Timer(3, rescue)
    try:
        with gate(stream):
            timer.start()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                yield
            except AlarmError:
                pass
            else:
                raise AssertionError("no signal was seen")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert not rescued.is_set(), "the signal was seen only afterwards"
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGALRM, old)
