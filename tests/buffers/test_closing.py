# SPDX-License-Identifier: Apache-2.0
"""free(), the end of a with block and Registration.close(), and what delays them.

Transfers behind a shut gate, exports to other libraries and work of other streams hold
memory. The tests end a buffer while one of these holds it, and look at when the memory
is given back.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from support import session, values

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

testing = session.testing

KINDS = ["pinned", "mapped", "managed", "device"]
NBYTES = 1 << 16


def live(kind: str) -> int:
    """Return the bytes of live buffers of this kind."""
    return cumem.stats()[kind].live_nbytes


@contextmanager
def unrelated() -> Iterator[None]:
    """Keep a transfer between two other buffers under way."""
    stream = cumem.Stream()
    source = cumem.zeros(16, "u1", "pinned")
    target = cumem.empty_device(16, "u1")
    with session.gate(stream):
        transfer = cumem.copy_async(target, source, stream=stream)
        yield
        assert not transfer.done
    transfer.wait()


# -- transfers of others ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_free_does_not_wait_for_other_transfers(emulated, kind) -> None:
    buffer = cumem.empty(NBYTES, "u1", kind)
    with unrelated():
        before = live(kind)
        buffer.free()
        assert live(kind) == before - NBYTES


@pytest.mark.parametrize("kind", KINDS)
def test_with_block_does_not_wait_for_other_transfers(emulated, kind) -> None:
    with unrelated():
        before = live(kind)
        with cumem.empty(NBYTES, "u1", kind) as buffer:
            assert live(kind) == before + NBYTES
        assert live(kind) == before
        assert buffer.closed


def test_unregistering_does_not_wait_for_other_transfers(emulated) -> None:
    memory = mmap.mmap(-1, NBYTES)
    with unrelated():
        registration = cumem.register(memory)
        registration.close()
        assert testing.registrations() == 0
        with cumem.register(memory) as buffer:
            assert testing.registrations() == 1
        assert testing.registrations() == 0
        # The name `buffer` still exists, but the map is no longer exported and can be
        # closed.
        memory.close()
        assert buffer.closed


# -- transfers of the buffer that ends -------------------------------------------------


@pytest.mark.parametrize("end", ["free", "with"])
@pytest.mark.parametrize("which", [0, 1])
def test_own_transfer_puts_it_off_until_its_end(emulated, end, which) -> None:
    stream = cumem.Stream()
    data = np.arange(NBYTES, dtype="u1")
    ends = [cumem.empty_device(NBYTES, "u1"), cumem.array(data, kind="pinned")]
    kind = ends[which].kind
    with session.gate(stream):
        transfer = cumem.copy_async(*ends, stream=stream)
        if end == "free":
            ends[which].free()
            ends[which].free()
        else:
            with ends[which]:
                pass
        assert ends[which].closed
        assert live(kind) == NBYTES
    transfer.wait()
    assert live(kind) == 0  # The memory is given back although the object still lives.
    if which == 1:
        assert (values.get(ends[0]) == data).all()


def test_last_of_several_transfers_gives_it_back(emulated) -> None:
    streams = [cumem.Stream(), cumem.Stream()]
    source = cumem.zeros(NBYTES, "u1", "pinned")
    targets = [cumem.empty_device(NBYTES, "u1") for _ in streams]
    with session.gate(streams[1]):
        with session.gate(streams[0]):
            transfers = [
                cumem.copy_async(target, source, stream=stream)
                for target, stream in zip(targets, streams, strict=True)
            ]
            source.free()
        transfers[0].wait()
        assert live("pinned") == NBYTES
    transfers[1].wait()
    assert live("pinned") == 0


def test_failed_transfer_gives_it_back_too(emulated) -> None:
    source = cumem.zeros(NBYTES, "u1", "pinned")
    target = cumem.empty_device(NBYTES, "u1")
    testing.plan_fault("copy_async", 1)
    try:
        cumem.copy_async(target, source).wait()
    except cumem.CudaError:
        pass
    else:
        pytest.fail("the copy raised no error")
    finally:
        testing.plan_fault(None, 0)
    source.free()
    assert live("pinned") == 0


def test_close_waits_for_its_own_transfer(emulated) -> None:
    stream = cumem.Stream()
    registration = cumem.register(np.arange(NBYTES, dtype="u1"))
    target = cumem.empty_device(NBYTES, "u1")
    done = threading.Event()

    def run() -> None:
        registration.close()
        done.set()

    with session.gate(stream):
        transfer = cumem.copy_async(target, registration.buffer, stream=stream)
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not done.is_set()
        assert testing.registrations() == 1
    thread.join()
    assert testing.registrations() == 0
    assert transfer.done


@pytest.mark.parametrize("how", ["close", "exit"])
def test_ctrl_c_ends_the_wait_for_an_interrupted_copy(emulated, how) -> None:
    """Ctrl-C interrupts a call of copy(), but the copy itself goes on, and no buffer
    remembers it. Closing must wait for such a copy, and Ctrl-C must end that wait too.
    """
    stream = cumem.Stream()
    registration = cumem.register(np.zeros(NBYTES, "u1"))
    target = cumem.empty_device(NBYTES, "u1", stream=stream)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(call) -> None:
        with pytest.raises(KeyboardInterrupt), session.when_waiting(interrupt):
            call()

    end = (
        registration.close if how == "close" else lambda: registration.__exit__(0, 0, 0)
    )
    with session.gate(stream):
        interrupted(lambda: cumem.copy(target, registration.buffer, stream=stream))
        interrupted(end)
        assert testing.registrations() == 1
        assert not registration.buffer.closed
    end()
    assert testing.registrations() == 0


def test_freed_registration_is_unlocked_after_its_transfer(emulated) -> None:
    stream = cumem.Stream()
    registration = cumem.register(np.zeros(NBYTES, "u1"))
    target = cumem.empty_device(NBYTES, "u1")
    with session.gate(stream):
        transfer = cumem.copy_async(target, registration.buffer, stream=stream)
        registration.buffer.free()
        assert testing.registrations() == 1
    transfer.wait()
    assert testing.registrations() == 0
    registration.close()


# -- work that cumem cannot see --------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "drop"])
def test_pages_stay_locked_under_work_of_an_exported_buffer(emulated, end) -> None:
    stream = cumem.Stream()
    registrations = [cumem.register(np.zeros(NBYTES, "u1"))]
    registrations[0].buffer.numpy()
    done = threading.Event()

    def run() -> None:
        if end == "close":
            registrations[0].close()
        registrations.clear()
        done.set()

    scratch = cumem.empty_device(NBYTES, "u1")
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not done.is_set()
        assert testing.registrations() == 1
    thread.join()
    assert testing.registrations() == 0


def test_pages_stay_locked_under_per_thread_stream_of_another_thread(emulated) -> None:
    per_thread = 2
    registration = cumem.register(np.zeros(NBYTES, "u1"))
    buffer = registration.buffer
    recorded = threading.Event()
    locked: list[int] = []

    def work() -> None:
        stream = cumem.Stream.from_external(per_thread)
        with session.gate(stream):
            cumem.empty_device(NBYTES, "u1").fill(1, stream=stream)
            buffer.record_stream(stream)
            recorded.set()
            session.wait_until_waiting(threading.main_thread())
            locked.append(testing.registrations())
        stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    recorded.wait()
    registration.close()
    thread.join()
    assert locked == [1]
    assert testing.registrations() == 0


# -- exports ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed"])
@pytest.mark.parametrize("protocol", ["numpy", "dlpack"])
def test_memory_follows_the_last_export_of_a_block(runtime, kind, protocol) -> None:
    with cumem.zeros(NBYTES, "u1", kind) as buffer:
        array = buffer.numpy() if protocol == "numpy" else np.from_dlpack(buffer)
        part = array[3:5]
    del array
    gc.collect()
    assert live(kind) == NBYTES
    # Arrays that come by DLPack are read-only in older versions of NumPy.
    if part.flags.writeable:
        part[:] = 7
        assert part.tolist() == [7, 7]
    del part
    assert live(kind) == 0
    assert buffer.closed


def test_transfer_from_an_array_that_outlives_the_block(emulated) -> None:
    stream = cumem.Stream()
    target = cumem.empty_device(NBYTES, "u1")
    with cumem.full(NBYTES, 5, "u1", "pinned") as buffer:
        array = buffer.numpy()
    with session.gate(stream):
        transfer = cumem.copy_async(target, array, stream=stream)
        del array
        assert live("pinned") == NBYTES
    transfer.wait()
    assert (values.get(target) == 5).all()
    del transfer
    assert live("pinned") == 0
    assert buffer.closed


def test_what_the_buffer_protocol_gave_away_stays_with_the_object(runtime) -> None:
    with cumem.zeros(NBYTES, "u1", "pinned") as buffer:
        # A consumer may keep the object and use its memory without the view.
        memoryview(buffer).release()
    assert live("pinned") == NBYTES
    del buffer
    assert live("pinned") == 0


def test_what_the_array_interface_gave_away_stays_with_the_object(runtime) -> None:
    with cumem.zeros(NBYTES, "u1", "device") as buffer:
        testing.array_interface(buffer)
    assert buffer.closed
    assert live("device") == NBYTES
    del buffer
    assert live("device") == 0


def test_block_over_a_view_closes_only_the_view(runtime) -> None:
    buffer = cumem.zeros(NBYTES, "u1", "pinned")
    with buffer[5:10] as view:
        pass
    assert view.closed
    assert not buffer.closed
    assert buffer.numpy()[0] == 0


def test_block_of_a_host_view_lets_its_owner_go(runtime) -> None:
    memory = mmap.mmap(-1, NBYTES)
    with cumem.asbuffer(memory) as buffer:
        buffer[0] = 1
    memory.close()
    assert buffer.closed


def test_last_export_unlocks_what_a_block_registered(runtime) -> None:
    with cumem.register(np.arange(1000)) as buffer:
        array = buffer.numpy()
    assert testing.registrations() >= 1
    assert array[999] == 999
    del array
    assert testing.registrations() == 0
    assert buffer.closed


def test_threads_that_end_and_close_at_once_leave_nothing(emulated) -> None:
    """Deleters without the GIL, transfers and closing race, and counts stay right."""
    stream = cumem.Stream()
    target = cumem.empty_device(64, "u1")
    for _ in range(200):
        buffer = cumem.zeros(64, "u1", "pinned")
        transfer = cumem.copy_async(target, buffer, stream=stream)
        with buffer:
            exported = buffer.__dlpack__()
        thread = threading.Thread(target=transfer.wait)
        thread.start()
        del exported
        thread.join()
        transfer.wait()
        assert live("pinned") == 0


# -- forked children -------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="forks are tested on Linux only")
def test_child_sees_the_true_state_of_transfers(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.zeros(16, "u1", "pinned")
    target = cumem.empty_device(16, "u1")
    finished = cumem.copy_async(target, source)
    finished.wait()
    with session.gate(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        running = cumem.copy_async(target, source, stream=stream)
        child = os.fork()
        if child == 0:
            try:
                assert finished.done
                assert "done" in repr(finished)
                finished.wait()
                with pytest.raises(RuntimeError, match="forked child"):
                    _ = running.done
                with pytest.raises(RuntimeError, match="forked child"):
                    running.wait()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    running.wait()


class Watched:
    """A tensor whose storage runs Python code when it is asked where its memory is.

    That code calls `looked`.
    """

    looked: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.array = np.arange(1000.0)

    def __dlpack__(self, **how: object) -> object:
        return self.array.__dlpack__(**how)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def untyped_storage(self) -> Watched:
        return self

    def data_ptr(self) -> int:
        self.looked()
        return self.array.ctypes.data

    def nbytes(self) -> int:
        return self.array.nbytes


USES: dict[str, Callable[[cumem.Buffer], object]] = {
    "copy": lambda buffer: cumem.copy(np.empty(1000), buffer),
    "copy_many": lambda buffer: cumem.copy_many([(np.empty(1000), buffer)]),
    "numpy": lambda buffer: buffer.numpy(),
    "view": lambda buffer: buffer[1:],
    "fill": lambda buffer: buffer.fill(3),
    "ptr": lambda buffer: buffer.ptr,
    "dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("end", ["free", "shutdown"])
@pytest.mark.parametrize("use", USES)
def test_memory_that_is_closed_while_it_is_looked_at_is_not_used(
    emulated, use: str, end: str
) -> None:
    tensor = Watched()
    buffer = cumem.asbuffer(tensor)
    buffer[1:]

    def close() -> None:
        # This is refused if a call is under way.
        with suppress(RuntimeError, BufferError):
            buffer.free() if end == "free" else cumem.shutdown()

    tensor.looked = close
    # The call is refused if the buffer was closed.
    with suppress(ValueError):
        USES[use](buffer)
        assert not buffer.closed
    # `looked` refers to the buffer, and the buffer keeps the tensor, so this is a
    # cycle.
    del tensor.looked
