# SPDX-License-Identifier: Apache-2.0
"""Opens and closes cumem's runtime for one test, and finds what a test left behind.

It also has what tests need to wait for other threads without sleeping: gates, which hold
emulated streams shut, and helpers that act once a thread waits in a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from support import testing  # before cumem: see core.py

# isort: split
import cumem
from cumem import _core

#: The longest random delay before each piece of emulated work. If it were 0, streams would
#: not be late, and the suite could not notice an error of order (test_emulation.py checks
#: this).
MAX_DELAY_US = 150


#: Runtime calls that may be made while the GIL is held, because they end sooner than
#: another thread could take the GIL. The driver looks something up in a table for them, or
#: notes something about the thread, or makes a short copy on an idle stream.
#: tests/devices/test_gil.py says which calls may make such a copy.
ANSWERED_AT_ONCE = {
    *("device_attribute", "pointer_attributes", "context_get", "context_set"),
    *("context_device", "context_is_active"),
    "capture_mode_exchange",
    *("stream_is_capturing", "stream_query", "copy_async", "copy_peer_async"),
    *("event_create", "event_record", "event_query"),
}


#: The CUDA version of the emulated driver, unless CUMEM_EMULATED_DRIVER names another one.
DRIVER = "13.0"


def emulated_driver() -> int:
    """Return the CUDA version of the emulated driver, such as 12040 for 12.4."""
    major, _, minor = os.environ.get("CUMEM_EMULATED_DRIVER", DRIVER).partition(".")
    return int(major) * 1000 + int(minor or 0) * 10


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Facts about the runtime that a test runs on."""

    name: str

    @property
    def emulated(self) -> bool:
        return self.name == "emulated"

    def has(self, op: str) -> bool:
        """Return True if the driver, emulated or real, has this operation of ops.h."""
        oldest = {name: driver for name, _, driver in testing.op_names()}[op]
        major, minor = cumem.info.about().driver_version
        return major * 1000 + minor * 10 >= oldest


#: The seconds after which a test gives up waiting. The time only ends a test that hangs,
#: and measures nothing, so all tests share it.
PATIENCE = 60
NAP = 0.0005


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Let other threads go on until `condition()` is true; fail if it never is.

    This is for conditions that no gate, event or barrier can signal.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"this never came: {what or condition}")
        time.sleep(NAP)


def wait_with_the_gil(condition: Callable[[], object], what: str) -> None:
    """Let no other thread have the GIL until `condition()` is true; fail if it never is.

    The switch interval is so long that this thread keeps it.
    """
    deadline = time.monotonic() + PATIENCE
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000)
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"this never came without the GIL: {what}")
    finally:
        sys.setswitchinterval(interval)


def _place_of(thread_id: int | None) -> tuple[int, int] | None:
    """Return where a thread is, or None if it has ended or is in a helper of this file."""
    frame = sys._current_frames().get(thread_id or 0)
    if frame is None:
        return None
    code = frame.f_code
    if code.co_filename in (__file__, contextlib.__file__) or (
        code.co_filename == threading.__file__ and code.co_name != "run"
    ):
        return None
    return id(frame), frame.f_lasti


def wait_until_waiting(
    thread: threading.Thread, given_up: Callable[[], bool] = lambda: False
) -> None:
    """Return once `thread` is in a call that lets other threads run, or has ended.

    While this thread sleeps, any thread that asks for the GIL gets it. A thread that is at
    the same instruction after many short sleeps therefore did not ask for the GIL.
    """
    place, seen = None, 0

    def is_waiting() -> bool:
        nonlocal place, seen
        now = _place_of(thread.ident)
        seen = seen + 1 if now is not None and now == place else 0
        place = now
        return seen == 40 or not thread.is_alive() or given_up()

    wait_until(is_waiting, "a call in which the thread waits")


@contextlib.contextmanager
def when_waiting(act: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Call `act` in another thread once the block waits in a call.

    Yields a function that arranges the same for a later call of the block.
    """
    caller = threading.current_thread()
    over = threading.Event()
    watchers: list[threading.Thread] = []

    def watch() -> None:
        wait_until_waiting(caller, over.is_set)
        if not over.is_set():
            act()

    def again() -> None:
        watchers.append(threading.Thread(target=watch))
        watchers[-1].start()

    try:
        again()
        yield again
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()


def let_workers_pass() -> None:
    """Make a copy behind all others, and return when it is done.

    By then every copy that could go on has had its turn.
    """
    for _ in range(2):
        _core.copy_async(np.empty(1 << 16, "u1"), np.ones(1 << 16, "u1")).wait()


def _drop_failure() -> None:
    """Drop the exception that Python keeps for a debugger after a failed test.

    It holds the frames of that test, and so its buffers. While these live, no later test
    can open the runtime.
    """
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    gc.collect()


def leftovers(held: int = 0) -> dict[str, int]:
    """Count what is left once a test has dropped all but `held` storages.

    Returns an empty dict if nothing is left.
    """
    _drop_failure()
    if testing.opened():
        for index in range(cumem.device_count()):
            cumem.Device(index).synchronize()
    while testing.pending_transfers():  # the watcher and the workers finish these
        testing.poll()
    # The thread that finishes a transfer drops the references to its ends a moment later.
    deadline = time.monotonic() + PATIENCE / 10
    while testing.live_storages() > held and time.monotonic() < deadline:
        testing.poll()
        time.sleep(NAP)
    found = {
        "storages": testing.live_storages(),
        "registrations": testing.registrations(),
        "transfers": testing.pending_transfers(),
    }
    return {what: count for what, count in found.items() if count}


@contextlib.contextmanager
def opened(name: str = "emulated", **overrides: object) -> Iterator[Runtime]:
    """Open cumem on one backend for the block, and fail if anything is left at its end.

    Collecting garbage takes a good part of the time of a short test, so a test that passes
    collects only in `leftovers`. A core without hooks cannot say whether the runtime is
    open, so with such a core a test collects before the block and after it.
    """
    # A test without fixtures may have opened the runtime.
    if testing.opened() or not testing.HAS_HOOKS:
        _drop_failure()
        _core._shutdown(False)
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
    has_passed = False
    try:
        yield Runtime(name)
        _open_gates()
        if testing.opened():
            assert set(testing.calls_with_gil()) <= ANSWERED_AT_ONCE
            assert leftovers() == {}
            assert testing.check_pools()
        has_passed = True
    finally:
        _open_gates()
        if not has_passed or not testing.HAS_HOOKS:
            _drop_failure()
        if testing.opened():
            testing.plan_fault(None, 0)
        _core._shutdown(False)
        testing.configure()


_shut: list[object] = []


def shut(stream: object) -> None:
    """Hold an emulated stream shut until `testing.gate_open` or the end of the test."""
    testing.gate_close(stream)
    # A handle does not keep the stream alive.
    _shut.append(getattr(stream, "handle", stream))


def _open_gates() -> None:
    """Open the streams that a failed test left shut, so that closing can end."""
    while _shut:
        stream = _shut.pop()
        if testing.opened():
            with contextlib.suppress(Exception):  # the stream may have ended
                testing.gate_open(stream)


@contextlib.contextmanager
def gate(stream: object) -> Iterator[None]:
    """Hold an emulated stream shut inside the block."""
    testing.gate_close(stream)
    try:
        yield
    finally:
        testing.gate_open(stream)


class AlarmError(Exception):
    """Raised by the handler of `alarm`."""


#: A signal that nobody else uses: pytest-timeout takes SIGALRM and the timers, and users
#: send SIGINT.
SIGNAL = signal.SIGUSR1


@contextlib.contextmanager
def on_alarm(handler: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call a handler for a signal that comes while the block waits in a call.

    Yields a function that arranges another signal for a later call.
    """
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    old = signal.signal(SIGNAL, lambda number, frame: handler())
    try:
        with when_waiting(lambda: signal.pthread_kill(main, SIGNAL)) as again:
            yield again
    finally:
        signal.signal(SIGNAL, old)


@contextlib.contextmanager
def rescued_by(let_go: Callable[[], object]) -> Iterator[None]:
    """If the block would wait for ever, call `let_go`, which ends the wait, and fail."""
    late = threading.Event()

    def rescue() -> None:
        late.set()
        let_go()

    timer = threading.Timer(PATIENCE, rescue)
    timer.start()
    try:
        yield
        assert not late.is_set(), "the call went on only when it was rescued"
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def rescued(stream: object) -> Iterator[None]:
    """If the block would wait for a stream for ever, open the stream and fail."""
    with rescued_by(lambda: testing.gate_open(stream)):
        yield


@contextlib.contextmanager
def alarm(stream: object) -> Iterator[Callable[[], None]]:
    """Hold a stream shut inside the block, which a signal must end with AlarmError.

    A call that cannot be interrupted ends as well, because the stream is opened in the end.
    Yields a function that arranges another signal.
    """

    def ring() -> None:
        raise AlarmError

    with rescued(stream), gate(stream), on_alarm(ring) as ring_again:
        try:
            yield ring_again
        except AlarmError:
            pass
        else:
            raise AssertionError("the signal did not end the call")
