# SPDX-License-Identifier: Apache-2.0
"""A short copy keeps the GIL, and every call that may wait releases it.

A second thread waits for the GIL. Whether it has run after a call shows whether the
call released it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import forks, programs, session
from support.session import testing

import cumem

# A build with checks notices calls into Python without the GIL.
pytestmark = pytest.mark.checked

KIB = 1 << 10
MIB = 1 << 20
#: These operations of the runtime move a copy's bytes.
MOVES = {"copy_async", "copy_2d_async", "event_record"}
Call = Callable[[], object]


@pytest.fixture
def prompt() -> Iterator[session.Runtime]:
    """Open an emulated device whose work is never late."""
    with session.opened("emulated", max_delay_us=0) as opened:
        yield opened


@pytest.fixture
def late() -> Iterator[session.Runtime]:
    """Open an emulated device whose work is up to 50 ms late."""
    with session.opened("emulated", max_delay_us=50_000) as opened:
        yield opened


@contextlib.contextmanager
def another_thread() -> Iterator[threading.Event]:
    """Yield an event that a second thread sets as soon as it gets the GIL.

    The switch interval is so long that the thread gets the GIL only if a call releases the
    GIL.
    """
    ran = threading.Event()
    start = threading.Lock()
    start.acquire()

    def run() -> None:
        with start:
            ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000)
        start.release()
        yield ran
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def ends(nbytes: int, kind: str) -> tuple[cumem.Buffer, np.ndarray]:
    """Return the two ends of a copy: ones on a device, and ones on the host."""
    host = np.ones(nbytes, "u1")
    if kind == "pinned":
        host = cumem.array(host, kind="pinned").numpy()
    return cumem.array(host, kind="device"), host


@pytest.mark.parametrize("kind", ["ordinary", "pinned"])
@pytest.mark.parametrize("nbytes", [256, 64 * KIB, MIB])
@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_short_copy_keeps_the_gil(
    prompt: session.Runtime, nbytes: int, kind: str, down: bool
) -> None:
    buffer, host = ends(nbytes, kind)
    dst, src = (host, buffer) if down else (buffer, host)
    # After this copy the pool has all memory that the copies need.
    cumem.copy(dst, src)

    def is_kept() -> bool:
        # On a busy machine, one copy may take so long that it gives up the GIL. Twenty
        # attempts will not all do so.
        with another_thread() as ran:
            for _ in range(20):
                cumem.copy(dst, src)
            return not ran.is_set()

    session.wait_until(is_kept, "twenty copies with the GIL")
    assert testing.calls_with_gil().keys() >= {"copy_async", "event_record"}


@pytest.mark.parametrize("kind", ["ordinary", "pinned"])
@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_short_copy_that_takes_long_gives_the_gil_up(
    late: session.Runtime, kind: str, down: bool
) -> None:
    buffer, host = ends(256, kind)
    dst, src = (host, buffer) if down else (buffer, host)

    def lets_another_run() -> bool:
        with another_thread() as ran:
            cumem.copy(dst, src)
            return ran.is_set()

    session.wait_until(lets_another_run, "a copy without the GIL")


def queued_first(buffer: cumem.Buffer, host: np.ndarray) -> None:
    """Copy to the host while a fill of the buffer waits at a gate.

    The call of the copy has to wait, and the test can go on only if the call has released
    the GIL.
    """
    stream = cumem.Stream()
    with session.gate(stream):
        buffer.fill(0, stream=stream)
        copy = threading.Thread(target=cumem.copy, args=(host, buffer))
        copy.start()
        session.wait_until_waiting(copy)
    copy.join()
    assert (host == 0).all()


#: All of these calls must release the GIL.
GIVEN_UP: dict[str, Callable[[cumem.Buffer, np.ndarray], object]] = {
    "long": lambda buffer, host: cumem.copy(buffer, host),
    "background": lambda buffer, host: cumem.copy_async(buffer, host).wait(),
    "stream": lambda buffer, host: cumem.copy_async(
        buffer[:256], host[:256], stream=cumem.Stream()
    ).wait(),
    "progress": lambda buffer, host: cumem.copy(
        buffer[:256], host[:256], progress=lambda done, total: None
    ),
    "after another": queued_first,
    "unknown pages": lambda buffer, host: cumem.copy(
        buffer[:MIB], np.frombuffer(bytearray(MIB), "u1")
    ),
    "many": lambda buffer, host: cumem.copy_many([(buffer[:256], host[:256])]),
    "fill": lambda buffer, host: buffer.fill(1),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_what_may_wait_gives_the_gil_up(prompt: session.Runtime, name: str) -> None:
    buffer = cumem.empty_device(16 * MIB, "u1")
    host = np.ones(16 * MIB, "u1")
    GIVEN_UP[name](buffer, host)
    assert not MOVES & testing.calls_with_gil().keys()


def test_long_copy_of_another_thread_needs_the_gil_only_at_its_end(
    prompt: session.Runtime,
) -> None:
    """Only copies of the main thread take the GIL earlier, in order to notice Ctrl-C."""
    source = np.ones(48 * MIB, "u1")
    target = cumem.zeros(source.size, "u1", "device")
    cumem.Device(0).synchronize()
    address = testing.alias(target.ptr, target.nbytes)
    arrived = (ctypes.c_ubyte * target.nbytes).from_address(address)
    # The copy takes several times as long as the time after which a call looks for
    # Ctrl-C.
    testing.delay_op("copy_async", 30_000)
    copy = threading.Thread(target=cumem.copy, args=(target, source))
    copy.start()
    session.wait_until(lambda: arrived[0] == 1, "the first piece")
    try:
        session.wait_with_the_gil(lambda: arrived[-1] == 1, "the last piece")
    finally:
        copy.join()


def copy_and_compute(stream: cumem.Stream, buffer: cumem.Buffer) -> None:
    """Copy in another thread, which must wait for the GIL because this thread computes."""
    done = threading.Event()

    def run() -> None:
        cumem.copy(buffer, np.ones(buffer.nbytes, "u1"), stream=stream)
        done.set()

    with session.gate(stream):
        copy = threading.Thread(target=run)
        copy.start()
        session.wait_until_waiting(copy)
        session.testing.gate_open(stream)
        while not done.is_set():
            pass
    copy.join()


def test_copy_after_one_that_waited_for_the_gil_shortens_turns_until_its_end(
    prompt: session.Runtime,
) -> None:
    stream, buffer = cumem.Stream(), cumem.empty_device(16 * MIB, "u1")
    usual = sys.getswitchinterval()
    copy_and_compute(stream, buffer)
    assert sys.getswitchinterval() == usual
    with session.gate(stream):
        copy = threading.Thread(
            target=lambda: cumem.copy(buffer, np.ones(16 * MIB, "u1"), stream=stream)
        )
        copy.start()
        session.wait_until(lambda: sys.getswitchinterval() < usual, "short turns")
    copy.join()
    assert sys.getswitchinterval() == usual


def test_child_that_is_forked_during_short_turns_gets_usual_ones(
    prompt: session.Runtime,
) -> None:
    stream, buffer = cumem.Stream(), cumem.empty_device(16 * MIB, "u1")
    usual = sys.getswitchinterval()
    ordinary = np.ones(16 * MIB, "u1")
    copy_and_compute(stream, buffer)

    def copies_between_hosts() -> None:
        assert sys.getswitchinterval() < usual
        cumem.copy(np.empty_like(ordinary), ordinary)
        assert sys.getswitchinterval() == usual

    with session.gate(stream):
        copy = threading.Thread(
            target=lambda: cumem.copy(buffer, ordinary, stream=stream)
        )
        copy.start()
        session.wait_until(lambda: sys.getswitchinterval() < usual, "short turns")
        forks.fork_and_run(copies_between_hosts)
    copy.join()


@pytest.mark.parametrize("own", [0.004, 0.02])
def test_turns_that_the_program_has_chosen_stay(
    prompt: session.Runtime, own: float
) -> None:
    stream, buffer = cumem.Stream(), cumem.empty_device(16 * MIB, "u1")
    usual = sys.getswitchinterval()
    sys.setswitchinterval(own)
    try:
        copy_and_compute(stream, buffer)
        with session.gate(stream):
            copy = threading.Thread(
                target=lambda: cumem.copy(
                    buffer, np.ones(16 * MIB, "u1"), stream=stream
                )
            )
            copy.start()
            session.wait_until_waiting(copy)
            assert sys.getswitchinterval() == own
        copy.join()
        assert sys.getswitchinterval() == own
    finally:
        sys.setswitchinterval(usual)


def test_array_beside_a_thread_that_registers_is_asked_about_without_python(
    prompt: session.Runtime,
) -> None:
    """A thread without the GIL must not call Python.

    This thread releases the GIL while the other one works on the list of locked pages. If
    this thread calls Python without the GIL, a debug build ends the process.
    """
    array = np.zeros(1000)
    # As long as something is registered, cumem has to ask whether an array is
    # page-locked.
    with cumem.register(np.zeros(4096)):
        testing.delay_op("host_register", 500_000)
        thread = threading.Thread(
            target=lambda: cumem.register(np.zeros(1 << 16)).close()
        )
        thread.start()
        session.wait_until_waiting(thread)
        testing.delay_op("host_register", 0)
        with cumem.Device(1):  # The block's device is known to Python only.
            assert cumem.asbuffer(array).kind == "pageable"
            cumem.copy_many([(np.empty(1000), array), (np.empty(1000), array)])
        thread.join()


@pytest.mark.any_python
def test_benchmark_beside_threads_runs(tmp_path: Path) -> None:
    results = tmp_path / "threads.json"
    script = Path(__file__).parents[2] / "benchmarks" / "threads.py"
    done = programs.run(str(script), "--quick", "--json", str(results))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    cases = json.loads(results.read_text(encoding="utf-8"))["cases"]
    assert [(case["direction"], case["nbytes"]) for case in cases] == [
        *itertools.product(("up", "down"), (256,)),
        *itertools.product(("up", "down"), (64 * KIB,)),
        *itertools.product(("up", "down"), (MIB,)),
        ("", 0),
    ]
    for case in cases:
        assert case["seconds"].keys() == {"0", "1", "3"}
        assert all(
            0 < case["seconds"][n] <= case["longest"][n] for n in case["seconds"]
        )
