# SPDX-License-Identifier: Apache-2.0
"""Memory that other libraries have seen.

It is theirs until they let it go. It is used again only after the devices have ended
everything that they were doing then. In the tests, a stream behind a shut gate does that
work. The middle part is about uses that need no such wait, and the last about a bound on
the memory that waits.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import pickle
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.strangers import Stranger

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

testing = session.testing
NBYTES = 4096
HOST_KINDS = ("pinned", "mapped", "managed")
KINDS = (*HOST_KINDS, "device")
ON_CPU = {"dl_device": (1, 0), "copy": False}


def dictionary(buffer: cumem.Buffer) -> Any:
    """Return the dictionary and the object: a consumer keeps both, as the protocol
    says.
    """
    return testing.array_interface(buffer), buffer


EXPORTS: dict[str, Callable[[Any], Any]] = {
    "buffer protocol": memoryview,
    "NumPy": lambda buffer: buffer.numpy(),
    "old DLPack": lambda buffer: buffer.__dlpack__(),
    "DLPack": lambda buffer: buffer.__dlpack__(max_version=(1, 1)),
    "DLPack on the CPU": lambda buffer: buffer.__dlpack__(max_version=(1, 1), **ON_CPU),
    "array interface": dictionary,
}


def ways(kinds: tuple[str, ...] = KINDS) -> list[Any]:
    """Return a parameter for each kind of memory and each protocol that exports it."""
    return [
        (kind, door)
        for kind in kinds
        for door in EXPORTS
        if (kind in HOST_KINDS or door in ("old DLPack", "DLPack", "array interface"))
        and (door != "array interface" or kind != "pinned")
    ]


def fenced(pool: cumem.Pool, idle: int = 1) -> int:
    """Have the pool record a fence for all blocks that need one. Then wait until the device
    `idle` has ended its work, and have the pool look at the fence.

    Return how many blocks still wait.
    """
    pool.trim(wait=False)
    cumem.Device(idle).synchronize()
    pool.trim(wait=False)
    return pool.stats().in_flight_count


@pytest.mark.parametrize(("kind", "door"), ways())
def test_block_stays_out_of_the_pool_until_it_is_let_go(emulated, kind, door) -> None:
    pool = cumem.Pool(kind)
    buffer = pool.allocate(NBYTES)
    address = buffer.ptr
    held = EXPORTS[door](buffer)
    del buffer
    others = [pool.allocate(NBYTES) for _ in range(8)]
    assert pool.stats().live_count == 9
    assert address not in [other.ptr for other in others]
    del held, others
    assert pool.stats().live_count == 0


@pytest.mark.parametrize(("kind", "door"), ways())
def test_block_waits_for_work_that_nobody_announced(emulated, kind, door) -> None:
    """The work is on another stream, and on a device that the block was never on."""
    pool = cumem.Pool(kind)
    for device in range(2):
        scratch = cumem.empty_device(NBYTES, "u1", device=device)
        stream = cumem.Stream(device=device)
        buffer = pool.allocate(NBYTES)
        address = buffer.ptr
        with session.gate(stream):
            scratch.fill(1, stream=stream)  # This fill stands for work on the buffer.
            del_after = EXPORTS[door](buffer)
            del buffer, del_after
            assert fenced(pool, 1 - device) == 1
            assert pool.allocate(NBYTES).ptr != address
        pool.trim()
        assert pool.stats().in_flight_count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_is_made_for_what_was_never_exported(emulated, kind) -> None:
    pool = cumem.Pool(kind)
    del [pool.allocate(NBYTES)][:]
    testing.plan_fault(None, 0)
    for _ in range(3):
        buffer = pool.allocate(NBYTES)
        del buffer
    assert testing.fault_count() == 0
    assert pool.stats().in_flight_count == 0
    assert pool.stats().hit_count == 3


FENCES = ("context_record_event", "device_synchronize", "stream_synchronize")


@pytest.mark.parametrize(("kind", "door"), ways())
@pytest.mark.parametrize("where", ["here", "thread"])
def test_letting_go_takes_no_fence_and_does_not_wait(
    emulated, kind, door, where
) -> None:
    pool = cumem.Pool(kind)
    stream = cumem.Stream()
    buffer = pool.allocate(NBYTES)
    held = [EXPORTS[door](buffer)]
    scratch = cumem.empty_device(NBYTES, "u1")
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        del buffer
        testing.plan_fault(None, 0)
        if where == "here":
            held.clear()
        else:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()  # The stream is still shut.
        testing.poll()
        assert {op: testing.fault_count(op) for op in FENCES} == dict.fromkeys(
            FENCES, 0
        )
        assert pool.stats().in_flight_count == 1


@pytest.fixture
def newest():
    with session.opened(driver_version=13000) as runtime:
        yield runtime


def test_fence_is_taken_at_reuse_once_enough_waits(newest) -> None:
    pool = cumem.Pool("pinned")
    pieces = [pool.allocate(16 << 20) for _ in range(6)]
    addresses = [piece.ptr for piece in pieces]
    for piece in pieces:
        piece.numpy()
    testing.plan_fault(None, 0)
    del piece, pieces  # 96 MiB are more than may wait without a fence.
    assert testing.fault_count("context_record_event") == 0
    first = pool.allocate(16 << 20)
    # One fence serves all of them.
    assert testing.fault_count("context_record_event") == 1
    cumem.Device(0).synchronize()
    later = [pool.allocate(16 << 20) for _ in range(3)]
    assert {first.ptr, *(one.ptr for one in later)} & {*addresses}


@pytest.mark.parametrize(("kind", "taken"), [("pinned", 1), ("device", 0)])
def test_fence_is_taken_once_enough_waits_even_if_other_memory_is_free(
    newest, kind, taken
) -> None:
    """Memory that the host used lately is in its caches, so the host writes to it faster. A
    fence is therefore worth its cost if it makes such memory free again.
    """
    pool = cumem.Pool(kind)
    pieces = [pool.allocate(16 << 20) for _ in range(12)]
    capsules = [piece.__dlpack__() for piece in pieces[:6]]
    del pieces  # Half of the memory is free at once.
    testing.plan_fault(None, 0)
    pool.allocate(16 << 20)
    capsules.clear()
    pool.allocate(16 << 20)
    assert testing.fault_count("context_record_event") == taken
    # The pool does not record another fence so soon.
    pool.allocate(16 << 20)
    assert testing.fault_count("context_record_event") == taken
    assert pool.stats().growth_count <= 12


def test_block_of_an_old_driver_waits_for_the_whole_device() -> None:
    with session.opened(driver_version=12040):
        pool = cumem.Pool("pinned")
        stream = cumem.Stream()
        scratch = cumem.empty_device(NBYTES, "u1")
        pool.allocate(NBYTES).numpy()
        with session.gate(stream):
            scratch.fill(1, stream=stream)
            assert fenced(pool) == 1
            assert testing.fault_count("context_record_event") == 0
        pool.trim()
        assert testing.fault_count("device_synchronize") > 0
        assert pool.stats().in_flight_count == 0
        del scratch


def test_pages_stay_locked_under_work_on_another_device(emulated) -> None:
    stream = cumem.Stream(device=1)
    scratch = cumem.empty_device(NBYTES, "u1", device=1)
    registrations = [cumem.register(np.zeros(1 << 20, "u1"), device=0)]
    registrations[0].buffer.numpy()
    done = threading.Event()

    def run() -> None:
        registrations.pop().close()
        done.set()

    with session.gate(stream):
        scratch.fill(1, stream=stream)
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not done.is_set()
        assert testing.registrations() == 1
    thread.join()
    assert testing.registrations() == 0


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_what_another_librarys_copy_reads_late_is_not_overwritten(
    runtime, kind
) -> None:
    """The stranger is a stand-in for another library, and works on a stream that cumem
    does not know.
    """
    with Stranger() as stranger:
        target = cumem.empty_device(NBYTES, "u1")
        source = cumem.full(NBYTES, 7, "u1", kind)
        array = source.numpy()
        stranger.copy(target.ptr, array.ctypes.data, NBYTES)
        del array, source
        for _ in range(16):
            cumem.empty(NBYTES, "u1", kind).numpy()[:] = 9
    assert (values.get(target) == 7).all()


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_what_another_librarys_copy_writes_late_is_nobody_elses(runtime, kind) -> None:
    with Stranger() as stranger:
        source = cumem.full(NBYTES, 7, "u1", "device")
        cumem.Device(0).synchronize()
        target = cumem.empty(NBYTES, "u1", kind)
        stranger.copy(target.numpy().ctypes.data, source.ptr, NBYTES)
        del target
        others = [cumem.full(NBYTES, 9, "u1", kind) for _ in range(16)]
    assert all((other.numpy() == 9).all() for other in others)


# -- what never left us is not an export ---------------------------------------------------


def save_in_files(buffer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cumem.tofile(f"{folder}/x", buffer)
        cumem.save(f"{folder}/x.npy", buffer)
        cumem.savez(f"{folder}/x.npz", x=buffer)


OWN_READS: dict[str, Callable[[Any], object]] = {
    "str": str,
    "str of a view": lambda buffer: str(buffer[:1]),
    "repr": repr,
    "format": lambda buffer: f"{buffer[0]:3d} {buffer}",
    "item": lambda buffer: buffer.item(0),
    "int": lambda buffer: int(buffer[:1].reshape(())),
    "bool": lambda buffer: bool(buffer[:1]),
    "element": lambda buffer: buffer[0],
    "tolist": lambda buffer: buffer.tolist(),
    "to_numpy": lambda buffer: buffer.to_numpy(),
    "astype": lambda buffer: buffer.astype("f4"),
    "array of another dtype": lambda buffer: cumem.array(buffer, dtype="i4"),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda buffer: pickle.loads(pickle.dumps(buffer, 4)),
    "files": save_in_files,
    "assignment": lambda buffer: buffer.__setitem__(slice(3), 1),
    "to bytes": lambda buffer: cumem.copy(bytearray(NBYTES), buffer),
    "bytes": bytes,
    "bytes of a view": lambda buffer: bytes(buffer[::2]),
    "numpy.array": np.array,
    "numpy.array of a view": lambda buffer: np.array(buffer[1::2]),
    "numpy.add": lambda buffer: np.add(buffer, 1),
    "numpy.array of another dtype": lambda buffer: np.array(buffer, "f8"),
    "numpy.sum": np.sum,
    "iteration": list,
    "contains": lambda buffer: buffer.__array__("f4"),
}


@pytest.mark.parametrize("kind", HOST_KINDS)
@pytest.mark.parametrize("read", OWN_READS.values(), ids=OWN_READS)
def test_block_that_never_left_us_is_reused_at_once(emulated, kind, read) -> None:
    """The block is reused at once even while the device is busy."""
    pool = cumem.Pool(kind)
    stream = cumem.Stream()
    scratch = cumem.empty_device(NBYTES, "u1")
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        for _ in range(2):
            buffer = pool.allocate(NBYTES)
            read(buffer)
            del buffer
            assert pool.stats().in_flight_count == 0


def test_read_that_keeps_the_array_is_an_export(emulated) -> None:
    pool = cumem.Pool("pinned")
    kept: list[object] = []
    for keep in (
        kept.append,
        lambda a: kept.append(a[1:]),
        lambda a: kept.append(a.base),
    ):
        buffer = pool.allocate(NBYTES)
        buffer._read_by(keep)
        del buffer
        assert pool.stats().live_count == 1
        kept.clear()
        assert (pool.stats().live_count, pool.stats().in_flight_count) == (0, 1)
        # This waits for the fence, so that the next block is the only one in flight.
        pool.trim()
        assert pool.stats().in_flight_count == 0


def test_read_beside_an_export_leaves_it_one(emulated) -> None:
    pool = cumem.Pool("pinned")
    buffer = pool.allocate(NBYTES)
    buffer._read_by(functools.partial(lambda door, _: door(), buffer.__dlpack__))
    del buffer
    assert pool.stats().in_flight_count == 1


# Each of these functions lets NumPy read the buffer, and keeps nothing. A library may
# have queued a copy of the memory all the same.


def hold_back(buffer: Any) -> object:
    return np.asarray(buffer)


def drop_later(buffer: Any) -> None:
    array = np.asarray(buffer)
    assert array.size
    del array


def drop_in_a_loop(buffer: Any) -> None:
    array = None
    for _ in range(3):
        array = np.asarray(buffer)
    del array


def drop_within_a_call(buffer: Any) -> None:
    # A call such as stranger.copy(..., np.asarray(buffer)) does the same.
    len(np.asarray(buffer))


def drop_by_a_collection(buffer: Any) -> None:
    """Drop the array within the call that began the copy, as a collection may do."""
    for _ in range(2):
        array = np.asarray(buffer)
        cycle: list[object] = [array]
        cycle.append(cycle)
        del array, cycle
        gc.collect()


def ask_simply(buffer: Any) -> None:
    """Ask for a view, as torch.frombuffer and bindings of CUDA do.

    The view ends with the call, but the work that they have begun goes on.
    """
    ctypes.c_char.from_buffer(buffer)


def pass_on_within_a_call(buffer: Any) -> None:
    """Use an array as compiled code such as CuPy's does.

    The array lives within one call, which also starts a copy.
    """
    started: list[int] = []

    def start(array: Any) -> None:
        started.append(array.ctypes.data)

    ask = functools.partial(np.asarray, buffer)
    deque(map(start, map(ask, [None])), maxlen=0)
    assert started


def pass_on_within_a_call_of_numpy(buffer: Any) -> None:
    ask = functools.partial(np.asarray, buffer)
    np.fromiter(map(len, map(ask, [None])), int)


class Lazy:
    """An object that drops one array when it is asked for another, in the same
    instruction and call.
    """

    def __init__(self, buffer: Any) -> None:
        self.kept: list[Any] = []
        self.objects = [buffer, self]

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        self.kept.clear()
        return np.zeros(1)

    def ask(self) -> None:
        for each in self.objects:
            self.kept.append(np.asarray(each))


def drop_while_numpy_asks_another(buffer: Any) -> None:
    Lazy(buffer).ask()


def pass_on_a_memoryview(buffer: Any) -> None:
    """Do the same as torch.frombuffer(memoryview(buf)).to(device, non_blocking=True)."""
    view = memoryview(buffer)
    array = np.frombuffer(view, "u1")
    assert array.size
    del array
    view.release()


LEFT_US: dict[str, Callable[[Any], object]] = {
    "dropped later": drop_later,
    "loop": drop_in_a_loop,
    "within a call": drop_within_a_call,
    "returned": hold_back,
    "collection": drop_by_a_collection,
    "simple": ask_simply,
    "beside a copy in one call": pass_on_within_a_call,
    "in one call of NumPy": pass_on_within_a_call_of_numpy,
    "while NumPy asks another": drop_while_numpy_asks_another,
    "memoryview": lambda buffer: len(memoryview(buffer)),
    "memoryview passed on": pass_on_a_memoryview,
    "pickle out of band": lambda buffer: pickle.dumps(
        buffer, protocol=5, buffer_callback=lambda part: None
    ),
    "numpy": lambda buffer: buffer.numpy().sum(),
}


@pytest.mark.parametrize("kind", HOST_KINDS)
@pytest.mark.parametrize("use", LEFT_US.values(), ids=LEFT_US)
def test_block_that_others_may_have_used_waits_for_a_fence(emulated, kind, use) -> None:
    pool = cumem.Pool(kind)
    stream = cumem.Stream()
    scratch = cumem.empty_device(NBYTES, "u1")
    buffer = pool.allocate(NBYTES)
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        use(buffer)
        del buffer
        gc.collect()
        assert fenced(pool) == 1
    pool.trim()
    assert pool.stats().in_flight_count == 0


def test_array_that_a_strangers_copy_reads_late_is_not_overwritten(runtime) -> None:
    """The array came from numpy.asarray() and died before the copy was made."""
    with Stranger() as stranger:
        target = cumem.empty_device(NBYTES, "u1")
        source = cumem.full(NBYTES, 7, "u1", "pinned")
        stranger.copy(target.ptr, np.asarray(source).ctypes.data, NBYTES)
        del source
        for _ in range(16):
            np.array(cumem.full(NBYTES, 9, "u1", "pinned"))
    assert (values.get(target) == 7).all()


def test_array_that_a_call_hands_on_and_drops_is_not_overwritten(runtime) -> None:
    """list() and map() stand for compiled code.

    Within one call, that code asks NumPy for an array, starts another library's copy
    and drops the array.
    """
    with Stranger() as stranger:
        target = cumem.empty_device(NBYTES, "u1")
        source = cumem.full(NBYTES, 7, "u1", "pinned")

        def upload(array: Any) -> None:
            stranger.copy(target.ptr, array.ctypes.data, NBYTES)

        ask = functools.partial(np.asarray, source)
        deque(map(upload, map(ask, [None])), maxlen=0)
        del source, ask
        for _ in range(16):
            np.array(cumem.full(NBYTES, 9, "u1", "pinned"))
    assert (values.get(target) == 7).all()


def test_memoryview_that_is_released_beside_a_strangers_copy_keeps_the_block(
    runtime,
) -> None:
    """A memoryview that was released is still an export.

    Its memory may have been handed on, and may be read later.
    """
    with Stranger() as stranger:
        target = cumem.empty_device(NBYTES, "u1")
        source = cumem.full(NBYTES, 7, "u1", "pinned")
        with memoryview(source) as view:
            array = np.frombuffer(view, "u1")
            stranger.copy(target.ptr, array.ctypes.data, NBYTES)
            del array
        del source, view
        for _ in range(16):
            np.array(cumem.full(NBYTES, 9, "u1", "pinned"))
    assert (values.get(target) == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_buffer_are_those_of_its_array(runtime, kind) -> None:
    given = np.arange(24, dtype="i4").reshape(4, 6)
    buffer = cumem.array(given, kind=kind)
    assert bytes(buffer) == given.tobytes()
    assert bytes(buffer[::2, ::3]) == given[::2, ::3].tobytes()
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        bytes(buffer)


# -- a bound on what waits ---------------------------------------------------------------

MIB = 1 << 20
# With more bytes than this in flight, a growth waits.
BOUND = 256 * MIB
# A growth that does not wait for a fence makes at most this many queries.
A_WAIT = 40


@contextlib.contextmanager
def pile_up(pool: cumem.Pool, nbytes: int = BOUND) -> Iterator[cumem.Stream]:
    """Keep a little more than `nbytes` in flight, with fences that are recorded.

    The device does not end its work while the body of the `with` statement runs.
    """
    stream = cumem.Stream()
    scratch = cumem.empty_device(NBYTES, "u1")
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        held = [pool.allocate(32 * MIB) for _ in range(nbytes // (32 * MIB) + 1)]
        capsules = [each.__dlpack__() for each in held]
        del held
        capsules.clear()
        # The pool records a fence here.
        pool.trim(wait=False)
        assert pool.stats().in_flight_nbytes > nbytes
        yield stream
    del scratch


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_growth_waits_for_fences_once_much_is_in_flight(newest, kind) -> None:
    pool = cumem.Pool(kind)
    with pile_up(pool) as stream:
        before = pool.stats().growth_count
        with session.when_waiting(lambda: testing.gate_open(stream)):
            pool.allocate(32 * MIB)
        assert pool.stats().growth_count == before


def test_growth_after_a_wait_in_vain_does_not_wait_until_a_fence_passes(newest) -> None:
    pool = cumem.Pool("pinned")
    with pile_up(pool):
        asked = []
        for _ in range(3):
            testing.plan_fault(None, 0)
            pool.allocate(48 * MIB)
            asked.append(testing.fault_count("event_query"))
        assert asked[0] > A_WAIT  # This growth has waited for a second.
        assert max(asked[1:]) < A_WAIT
    pool.trim()
    # A fence has passed, so the next growth waits again.
    with pile_up(pool) as stream:
        before = pool.stats().growth_count
        with session.when_waiting(lambda: testing.gate_open(stream)):
            pool.allocate(32 * MIB)
        assert pool.stats().growth_count == before


def test_growth_does_not_wait_below_the_bound(newest) -> None:
    pool = cumem.Pool("pinned")
    with pile_up(pool, 128 * MIB):
        testing.plan_fault(None, 0)
        pool.allocate(64 * MIB)
        assert testing.fault_count("event_query") < A_WAIT


def test_growth_does_not_wait_for_half_of_what_lives(newest) -> None:
    pool = cumem.Pool("pinned")
    living = pool.allocate(640 * MIB)
    with pile_up(pool):
        testing.plan_fault(None, 0)
        pool.allocate(64 * MIB)
        assert testing.fault_count("event_query") < A_WAIT
    del living


def test_growth_takes_no_fence_for_the_wait(newest) -> None:
    pool = cumem.Pool("pinned")
    with pile_up(pool):
        testing.plan_fault(None, 0)
        pool.allocate(32 * MIB)
        assert testing.fault_count("context_record_event") == 0
        assert testing.fault_count("device_synchronize") == 0


def test_wait_for_fences_ends_with_a_signal(newest) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    pool = cumem.Pool("pinned")
    me = threading.get_ident()
    old = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pile_up(pool):
            before = pool.stats().live_count
            with (
                session.when_waiting(lambda: signal.pthread_kill(me, signal.SIGUSR1)),
                pytest.raises(Interrupted),
            ):
                pool.allocate(32 * MIB)
            assert pool.stats().live_count == before
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_growth_does_not_wait_beside_a_capture(newest) -> None:
    pool = cumem.Pool("pinned")
    capturing = cumem.Stream()
    with pile_up(pool):
        testing.set_capturing(capturing, True)
        testing.plan_fault(None, 0)
        pool.allocate(32 * MIB)
        assert testing.fault_count("event_query") < A_WAIT
        testing.set_capturing(capturing, False)


def test_arrays_of_numpy_do_not_wait(newest) -> None:
    pool = cumem.Pool("pinned")
    with pile_up(pool):
        testing.plan_fault(None, 0)
        with cumem.numpy_pinned(pool=pool):
            array = np.empty(32 * MIB, "u1")
        assert testing.fault_count("event_query") < A_WAIT
        del array
