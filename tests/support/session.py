# SPDX-License-Identifier: Apache-2.0
"""Open and close cumem's runtime for one test, and say what a test left behind."""

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

#: Longest random delay before each piece of emulated work. Never 0: a suite that runs
#: without late streams cannot see an ordering bug (test_emulation.py fails then).
MAX_DELAY_US = 150


#: Runtime calls that may be made with the GIL held, for they end sooner than another
#: thread would give it back: what the driver looks up in a table or notes of the thread,
#: and a short copy on an idle stream. tests/devices/test_gil.py says who may make the
#: latter.
ANSWERED_AT_ONCE = {
    *("device_attribute", "pointer_attributes", "context_get", "context_set"),
    *("context_device", "context_is_active"),
    "capture_mode_exchange",
    *("stream_is_capturing", "stream_query", "copy_async", "copy_peer_async"),
    *("event_create", "event_record", "event_query"),
}


#: CUDA version of the emulated driver where CUMEM_EMULATED_DRIVER names no other.
DRIVER = "13.0"


def emulated_driver() -> int:
    """CUDA version of the emulated driver, e.g. 12040, from CUMEM_EMULATED_DRIVER."""
    major, _, minor = os.environ.get("CUMEM_EMULATED_DRIVER", DRIVER).partition(".")
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
        major, minor = cumem.info.about().driver_version
        return major * 1000 + minor * 10 >= oldest


#: Seconds after which what a test waits for will not come. Nothing is measured by it:
#: who needs a deadline takes this one.
PATIENCE = 60
NAP = 0.0005


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Let other threads go on until `condition()` is true; fail if it never is.

    Only for what no gate, event or barrier can tell of.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never came: {what or condition}")
        time.sleep(NAP)


def _place_of(thread_id: int | None) -> tuple[int, int] | None:
    """Which instruction of which frame a thread is at; None: of a helper, or it ended."""
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
    """Return once `thread` is in a call in which it lets others run, or has ended.

    While this thread naps, whoever asks for the GIL gets it: a thread that is at the same
    instruction after many naps did not ask.
    """
    place, seen = None, 0

    def is_waiting() -> bool:
        nonlocal place, seen
        now = _place_of(thread.ident)
        seen = seen + 1 if now is not None and now == place else 0
        place = now
        return seen == 40 or not thread.is_alive() or given_up()

    wait_until(is_waiting, "a call that waits")


@contextlib.contextmanager
def when_waiting(act: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Call `act` in another thread once the block waits in a call.

    Gives a function: to do it once more, in a later call.
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
    """Return when a copy is made that was asked for after all others: those that could
    have gone on by then have had their turn."""
    for _ in range(2):
        _core.copy_async(np.empty(1 << 16, "u1"), np.ones(1 << 16, "u1")).wait()


def _drop_failure() -> None:
    """What is kept of a failure for a debugger holds the frames of that test, and so its
    buffers: no test after it could begin."""
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    gc.collect()


def leftovers(held: int = 0) -> dict[str, int]:
    """Count what should be zero once a test has dropped everything but `held` storages."""
    _drop_failure()
    if testing.opened():
        for index in range(cumem.device_count()):
            cumem.Device(index).synchronize()
    while testing.pending_transfers():  # the watcher and the workers finish them
        testing.poll()
    # what a finished transfer kept is dropped by its thread a moment later
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
    """Run cumem on one backend; fail if anything is left at the end."""
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
    try:
        yield Runtime(name)
        _open_gates()
        if testing.opened():
            assert set(testing.calls_with_gil()) <= ANSWERED_AT_ONCE
            assert leftovers() == {}
            assert testing.check_pools()
    finally:
        _open_gates()
        _drop_failure()
        if testing.opened():
            testing.plan_fault(None, 0)
        _core._shutdown(False)
        testing.configure()


_shut: list[object] = []


def shut(stream: object) -> None:
    """Hold an emulated stream shut until `testing.gate_open`, or the end of the test."""
    testing.gate_close(stream)
    _shut.append(getattr(stream, "handle", stream))  # keeps no stream alive


def _open_gates() -> None:
    """What a test that failed left shut would be waited for for ever."""
    while _shut:
        stream = _shut.pop()
        if testing.opened():
            with contextlib.suppress(Exception):  # the stream is gone, and its gate
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
    """Raised by the signal of `alarm`."""


#: Nobody else's: SIGALRM and the timers belong to pytest-timeout, SIGINT to the user.
SIGNAL = signal.SIGUSR1


@contextlib.contextmanager
def on_alarm(handler: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call `handler` for a signal that comes while the block waits in a call.

    Gives a function: for another signal, in a later call.
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
def rescued(stream: object) -> Iterator[None]:
    """Open `stream` if the block waits for it for ever, and fail then."""
    late = threading.Event()

    def rescue() -> None:
        late.set()
        testing.gate_open(stream)

    timer = threading.Timer(PATIENCE, rescue)
    timer.start()
    try:
        yield
        assert not late.is_set(), "it went on only when the stream was opened"
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def alarm(stream: object) -> Iterator[Callable[[], None]]:
    """Hold `stream` shut inside the block, which a signal must end with AlarmError.

    What cannot be interrupted ends all the same, for the stream then opens.
    """

    def ring() -> None:
        raise AlarmError

    with rescued(stream), gate(stream), on_alarm(ring) as ring_again:
        try:
            yield ring_again
        except AlarmError:
            pass
        else:
            raise AssertionError("no signal was seen")
