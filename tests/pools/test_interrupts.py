# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while pools and shutdown() wait.

A signal must end the wait with its exception and leave nothing half done, so that the
same call succeeds afterwards. The last test is about faults in the core's own threads,
which Python's faulthandler must report as it does for any thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support import programs, session

import cumem

MIB = 1 << 20


@pytest.fixture(params=[12000, 13000], ids=["12.0", "13.0"])
def driver(request: pytest.FixtureRequest) -> Iterator[session.Runtime]:
    """Open an emulated driver with events over a whole context, and one without them."""
    with session.opened("emulated", driver_version=request.param) as opened:
        yield opened


def busy(stream: cumem.Stream) -> cumem.Buffer:
    """Give the stream work that ends after its gate opens, and return its buffer."""
    buffer = cumem.empty_device(100, "u1")
    buffer.fill(7, stream=stream)
    return buffer


def drop_exported(stream: cumem.Stream, pool: cumem.Pool) -> None:
    """Drop an exported buffer: cumem has to wait for all work of its device."""
    buffer = pool.allocate(MIB)
    np.from_dlpack(buffer)
    del buffer
    assert pool.stats().in_flight_count > 0


def drop_used(stream: cumem.Stream, pool: cumem.Pool) -> None:
    """Drop a buffer that the stream still uses: cumem has to wait for that stream."""
    buffer = pool.allocate(MIB)
    buffer.record_stream(stream)
    del buffer
    assert pool.stats().in_flight_count > 0


DROPS = {"used": drop_used, "exported": drop_exported}
Drop = Callable[[cumem.Stream, cumem.Pool], None]


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
@pytest.mark.parametrize("call", ["close", "trim", "trim all", "allocate"])
def test_signal_ends_the_wait_of_a_pool(driver, drop: Drop, call: str) -> None:
    pool = cumem.Pool("pinned", limit=2 * MIB)
    stream = cumem.Stream()
    calls: dict[str, Callable[[], object]] = {
        "close": pool.close,
        "trim": pool.trim,
        "trim all": cumem.trim,
        "allocate": lambda: pool.allocate(2 * MIB),
    }
    # The gate stays shut, so that the call has something to wait for.
    session.shut(stream)
    work = busy(stream)
    drop(stream, pool)
    with session.alarm(stream):
        calls[call]()
    assert not pool.closed
    assert pool.stats().in_flight_count == 1
    stream.synchronize()
    del work
    assert calls[call]() is not None or pool.closed
    assert pool.closed == (call == "close")


def exit_with_three(*_: object) -> None:
    sys.exit(3)


def say_time_is_up(*_: object) -> None:
    raise TimeoutError


HANDLERS: dict[str, tuple[Callable[..., None], type[BaseException]]] = {
    "Ctrl-C": (signal.default_int_handler, KeyboardInterrupt),
    "exit": (exit_with_three, SystemExit),
    "time is up": (say_time_is_up, TimeoutError),
}


@pytest.mark.parametrize(("handler", "raised"), HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize(
    "call", ["close", "trim", "trim all", "look", "allocate", "limit", "limit all"]
)
def test_signal_is_not_lost_while_a_library_is_asked_whether_it_captures(
    driver, monkeypatch, call: str, handler: Callable[..., None], raised: type
) -> None:
    """Each wait first runs Python code that asks CuPy about captures.

    The signal's handler runs within that code, and the handler's exception must not be lost
    there.
    """
    asked = []

    def get_current_stream() -> None:
        if not asked:
            asked.append(True)
            signal.raise_signal(signal.SIGINT)

    cuda = types.SimpleNamespace(get_current_stream=get_current_stream)
    pool = cumem.Pool("pinned", limit=2 * MIB)
    calls: dict[str, Callable[[], object]] = {
        "close": pool.close,
        "trim": pool.trim,
        "trim all": cumem.trim,
        "look": lambda: cumem.trim(wait=False),
        "allocate": lambda: pool.allocate(2 * MIB),
        "limit": lambda: setattr(pool, "limit", 3 * MIB),
        "limit all": lambda: cumem.set_limit("pinned", 3 * MIB),
    }
    stream = cumem.Stream()
    with session.gate(stream):
        drop_exported(stream, pool)
    before = signal.signal(signal.SIGINT, handler)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    try:
        with pytest.raises(raised):
            calls[call]()
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked
    calls[call]()  # The same calls succeed after the interruption.
    cumem.set_limit("pinned", None)


def test_closed_pool_of_live_buffers_waits_for_none(driver) -> None:
    pool = cumem.Pool("pinned")
    buffer = pool.allocate(MIB)
    stream = cumem.Stream()
    with session.gate(stream):
        buffer.record_stream(stream)
        work = busy(stream)
        pool.close()
    assert pool.closed
    del buffer, work


@pytest.mark.parametrize("what", ["named", "used", "made to wait"])
def test_signal_ends_a_fill_by_the_host(emulated, what: str) -> None:
    """The host writes pinned memory once everything that the buffer's streams wait for
    has ended.
    """
    late, stream = cumem.Stream(), cumem.Stream()
    buffer = cumem.full(100, 1, "u1", "pinned")
    session.shut(late)
    work = busy(late)
    if what == "used":
        buffer.record_stream(late)
    elif what == "made to wait":
        # This fill makes `stream` wait for `late`.
        work.fill(1, stream=stream)
    with session.alarm(late):
        buffer.fill(7, stream=late if what == "named" else stream)
    late.synchronize()
    assert (buffer.numpy() == 1).all()
    buffer.fill(7, stream=stream)
    assert (buffer.numpy() == 7).all()
    del work


# Each of these functions leaves something that a shutdown has to wait for, and returns
# the objects that must live until then.


def pending_copy(stream: cumem.Stream) -> list[object]:
    source = cumem.full(100, 7, "u1", "pinned")
    target = cumem.empty_device(100, "u1")
    return [target, cumem.copy_async(target, source, stream=stream)]


def used_buffer(stream: cumem.Stream) -> list[object]:
    buffer = cumem.empty_pinned(100, "u1")
    buffer.record_stream(stream)
    return [buffer, busy(stream)]


def dropped_buffer(stream: cumem.Stream) -> list[object]:
    drop_used(stream, cumem.default_pool("pinned"))
    return [busy(stream)]


def dropped_export(stream: cumem.Stream) -> list[object]:
    work = busy(stream)
    drop_exported(stream, cumem.default_pool("pinned"))
    return [work]


def own_pool(stream: cumem.Stream) -> list[object]:
    pool = cumem.Pool("pinned")
    drop_used(stream, pool)
    return [pool]


def registration(stream: cumem.Stream) -> list[object]:
    registered = cumem.register(np.zeros(MIB, "u1"))
    registered.buffer.record_stream(stream)
    return [registered, busy(stream)]


LEFT = [
    pending_copy,
    used_buffer,
    dropped_buffer,
    dropped_export,
    own_pool,
    registration,
]


@pytest.mark.parametrize("leave", LEFT)
def test_signal_ends_shutdown_and_leaves_all_open(
    driver, leave: Callable[[cumem.Stream], list[object]]
) -> None:
    stream = cumem.Stream()
    witness = cumem.full(10, 3, "u1", "pinned")
    session.shut(stream)
    left = leave(stream)
    with session.alarm(stream):
        cumem.shutdown()
    assert session.testing.opened()
    # Nothing has been closed, so both the memory and the stream still work.
    assert (witness.numpy() == 3).all()
    assert cumem.current_stream().handle == 1
    stream.synchronize()
    del left
    cumem.shutdown()
    with pytest.raises(ValueError, match="closed"):
        witness.numpy()


def test_shutdown_after_an_interrupted_wait_for_a_device_can_be_interrupted(
    emulated,
) -> None:
    stream = cumem.Stream()
    with session.alarm(stream):
        work = busy(stream)
        cumem.Device(0).synchronize()
    del work
    with session.alarm(stream) as ring_again:
        work = busy(stream)
        with pytest.raises(session.AlarmError):
            cumem.Device(0).synchronize()
        ring_again()
        cumem.shutdown()
    assert session.testing.opened()
    del work
    cumem.shutdown()


def test_shutdown_in_a_handler_while_it_waits_is_refused(emulated) -> None:
    refused: list[BaseException] = []
    stream = cumem.Stream()

    def handler() -> None:
        session.testing.gate_open(stream)
        try:
            cumem.shutdown()
        except RuntimeError as error:
            refused.append(error)

    session.shut(stream)
    kept = pending_copy(stream)
    with session.on_alarm(handler):
        cumem.shutdown()
    assert not session.testing.opened()
    del kept
    assert len(refused) == 1


def test_shutdown_of_another_thread_sees_no_signals_and_ends(emulated) -> None:
    left = [pending_copy(cumem.Stream()) for _ in range(3)]
    thread = threading.Thread(target=cumem.shutdown)
    thread.start()
    thread.join()
    assert not session.testing.opened()
    del left


# Each of these functions returns pairs that copy_many() has to copy one by one.


def strided_pairs(count: int) -> list[tuple[object, object]]:
    target, source = cumem.zeros(count * 40, "u1", "device"), np.ones(count * 40, "u1")
    return [
        (target[i : i + 40 : 2], source[i : i + 40 : 2])
        for i in range(0, count * 40, 40)
    ]


def pairs_with_one_target(count: int) -> list[tuple[object, object]]:
    target, source = cumem.zeros(40, "u1", "device"), cumem.zeros(40, "u1", "pinned")
    return [(target, source)] * count


def pairs_of_the_host(count: int) -> list[tuple[object, object]]:
    target, source = np.zeros((64, 1 << 20), "u1"), np.ones((64, 1 << 20), "u1")
    return [(target[:, ::2], source[:, ::2])] * (count // 8)


MANY = [strided_pairs, pairs_with_one_target, pairs_of_the_host]


@pytest.mark.parametrize("make", MANY)
def test_signal_ends_many_copies_that_go_alone(make) -> None:
    """Each copy is too short to look for signals itself, while all copies together take
    many seconds.
    """
    with session.opened("emulated", max_delay_us=300):
        pairs = make(8000)

        def ring() -> None:
            raise session.AlarmError

        with session.on_alarm(ring), pytest.raises(session.AlarmError):
            cumem.copy_many(pairs)
        # copy_many() may wait up to a second before it raises.
        left = session.testing.pending_transfers()
        assert left < 4000
        while session.testing.pending_transfers() > 0:
            session.testing.poll()
        pairs.clear()


def test_signal_ends_the_start_of_many_copies_that_go_on(emulated) -> None:
    """The call is interrupted after some copies have begun.

    It returns no handle, so the next use of the memory must wait for those copies.
    """
    stream = cumem.Stream()
    pairs = strided_pairs(20_000)
    session.testing.plan_fault(None, 0)  # This resets the counters of calls to 0.

    def ring() -> None:
        # By then some copies have begun.
        if session.testing.fault_count(None) > 100:
            raise session.AlarmError
        again()

    with session.on_alarm(ring) as again, pytest.raises(session.AlarmError):
        cumem.copy_many_async(pairs, stream=stream)
    base = pairs[0][0].base
    pairs.clear()
    copied = cumem.array(base, kind="pinned").numpy().reshape(-1, 40)[:, ::2]
    made = int(copied.all(axis=1).sum())
    assert 0 < made < 20_000
    assert copied[:made].all()
    assert not copied[made:].any()


def test_waits_for_a_device_leave_no_thread(emulated) -> None:
    """Another thread notes the ids of the threads that wait for the device, opens the
    gate, and all of these threads must have ended afterwards.
    """
    stream = cumem.Stream()
    testing = session.testing
    waiters: set[int] = set()

    def tasks() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/task")}

    def look() -> None:
        while testing.fault_count("device_synchronize") == 0:
            pass
        waiters.update(tasks() - before - {threading.get_native_id()})
        testing.gate_open(stream)

    work = busy(stream)
    # The emulated device starts a thread at its first fence and keeps it, so one wait
    # comes before the threads are counted.
    cumem.Device(0).synchronize()
    before = tasks()
    for _ in range(10):
        testing.gate_close(stream)
        work.fill(1, stream=stream)
        testing.plan_fault(None, 0)  # This resets the counters of calls to 0.
        thread = threading.Thread(target=look)
        thread.start()
        cumem.Device(0).synchronize()
        thread.join()
    assert waiters
    # A thread that was joined stays in /proc for a moment.
    session.wait_until(lambda: not tasks() & waiters, "the end of the threads")


FAULTING = """
import ctypes
import faulthandler
import mmap
import resource

import numpy as np

import cumem

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.enable()
nbytes = 1 << 20
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
size = ctypes.c_size_t(nbytes)
address = libc.mmap(None, size, 3, flags, -1, ctypes.c_long(0))
array = np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), "u1")
target = cumem.empty_device(nbytes, "u1")
pinned = cumem.register(array)
libc.munmap(ctypes.c_void_p(address), size)
# The thread of the emulated stream reads the memory, which is no longer mapped.
cumem.copy_async(target, pinned.buffer).wait()
"""


def test_fault_of_a_thread_of_the_core_is_reported_by_faulthandler() -> None:
    """The fault's signal must not be blocked in that thread: the kernel would then end
    the process without a report.
    """
    done = programs.run("-W", "ignore", "-c", FAULTING)
    assert -done.returncode in (signal.SIGSEGV, signal.SIGBUS)
    assert "Fatal Python error: " in done.stderr
