# SPDX-License-Identifier: Apache-2.0
"""Tests of forked children of a process that has used the driver.

Such a child cannot use the driver. Calls that need it raise an error, whatever other
threads were doing at the fork, and never wait for those threads, which the child lacks. The
bytes in its host memory are those of the moment of the fork. `test_fork_host.py` tests what
a child can do on the host.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import session
from support.forks import fork_and_die, fork_and_die_or_run, fork_and_run

import cumem
from cumem.pools import statistics
from cumem.pools.memory import LimitBlock
from cumem.transfers import tuning

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="forks are tested on Linux only"
    ),
    # Once any test has imported JAX, it warns of each fork.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]


def test_child_changes_how_its_own_copies_are_made(emulated) -> None:
    """What the child sets is in force in the child alone.

    Copies of the parent run in the background while it forks.
    """
    source, target = np.ones(1 << 20, "u1"), cumem.empty_device(1 << 20, "u1")

    def check() -> None:
        assert cumem.configure().threads == 3
        with cumem.configure(threads=1):
            assert cumem.configure().threads == 1
            copied = np.zeros_like(source)
            cumem.copy(copied, source)
            assert copied.all()
        with pytest.raises(ValueError, match="threads"):
            cumem.configure(threads=99)
        assert cumem.configure().threads == 3
        block.__exit__(None, None, None)
        assert cumem.configure().threads != 3

    with cumem.configure(threads=3) as block:
        # At some of these forks a thread holds a lock, which then stays held in the child.
        for _ in range(10):
            handles = [cumem.copy_async(target, source) for _ in range(4)]
            fork_and_run(check)
            for handle in handles:
                handle.wait()
        assert cumem.configure().threads == 3


@pytest.mark.parametrize(
    "lock", [tuning._lock, LimitBlock._lock, statistics._open_lock]
)
def test_child_finds_the_locks_of_the_package_free(emulated, lock) -> None:
    """Another thread, or the forking one, holds a lock of the package at the fork."""
    block = cumem.limit("pinned", "1GiB")
    cumem.empty_device(1, "u1")
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    def check() -> None:
        with block, cumem.measure(), cumem.configure(threads=1):
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait()
        fork_and_run(check)
    finally:
        over.set()
        thread.join()
    with lock:  # the thread that forks owns its locks in the child too
        fork_and_run(check)
        fork_and_run(lambda: fork_and_run(check))


@contextmanager
def busy() -> Iterator[None]:
    """Keep cumem's threads at work, so that any lock may be held at a fork."""
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


#: Calls that need the driver. Their argument is a buffer on the device, an array, a stream
#: and an event.
OPENED = {
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
            assert cumem.stats().pools == ()  # the pools are the parent's
        hook = cumem.on_out_of_memory(lambda *args: None)
        hook.remove()

    with busy():
        for _ in range(10):
            fork_and_run(check)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_of_a_signal_handler_does_not_go_on_waiting(emulated) -> None:
    """A handler forks while another thread waits for the device on behalf of this one.

    The child lacks that thread, so the call that was waiting must raise an error in the
    child.
    """
    stream, children = cumem.Stream(), []

    def handler() -> None:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            return
        children.append(child)
        session.testing.gate_open(stream)

    status = 1
    with session.gate(stream), session.on_alarm(handler):
        cumem.empty_device(64, "u1", stream=stream).fill(1, stream=stream)
        try:
            cumem.Device(0).synchronize()
        except RuntimeError as error:
            status = 0 if "forked child" in str(error) else 2
        finally:
            if not children:
                os._exit(status)
    assert status == 1  # the parent's wait ended as it should
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


#: Functions that make host memory of each sort, for a number of bytes.
MADE = {
    "pinned": lambda n: cumem.empty_pinned(n, "u1"),
    "mapped": lambda n: cumem.empty_mapped(n, "u1"),
    "write-combined": lambda n: cumem.empty_pinned(n, "u1", write_combined=True),
    "malloc": lambda n: cumem.empty(n, "u1", "pinned", pool=malloc_pool()),
}
#: Ways in which Python reads the bytes of a buffer.
VIEWS: list[Callable[[cumem.Buffer], object]] = [
    memoryview,
    np.asarray,
    cumem.Buffer.numpy,
    bytes,
    lambda buffer: np.frombuffer(buffer, "u1"),
]
MIB = 1 << 20
SHOWN = {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}


def malloc_pool() -> cumem.Pool:
    return cumem.Pool("pinned", segments="malloc")


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, "u1")


@pytest.mark.parametrize("nbytes", [1, 1000, 3 * MIB + 5, 40 * MIB])
@pytest.mark.parametrize("made", MADE)
def test_child_has_the_bytes_of_the_fork(runtime, made, nbytes) -> None:
    buffer = MADE[made](nbytes)
    array, expected = buffer.numpy(), pattern(nbytes)
    array[:] = expected

    def check() -> None:
        assert np.array_equal(array, expected)
        for view in VIEWS:
            assert bytes(view(buffer)) == expected.tobytes()
        assert expected.tobytes() in pickle.dumps(buffer)
        assert buffer[-1:].numpy()[0] == expected[-1]
        array[:] = 0  # this is the child's own memory, which nobody else sees
        assert not np.asarray(buffer).any()

    fork_and_run(check)
    assert np.array_equal(array, expected)
    assert np.array_equal(np.asarray(buffer), expected)


def test_child_has_an_array_whose_buffer_nobody_holds(runtime) -> None:
    arrays = [cumem.full(5000, i, "u1", "pinned").numpy() for i in range(50)]
    hidden = cumem.full(MIB, 7, "u1", "mapped").numpy()
    pool = cumem.Pool("pinned")
    dropped = cumem.full(3000, 9, "u1", "pinned", pool=pool).numpy()
    pool.close()
    del arrays[::2]

    def check() -> None:
        assert [int(array.sum()) // 5000 for array in arrays] == list(range(1, 50, 2))
        assert (hidden == 7).all()
        assert (dropped == 9).all()

    fork_and_run(check)


@pytest.mark.parametrize("made", MADE)
def test_child_and_parent_see_nothing_of_what_the_other_writes(runtime, made) -> None:
    """Parent and child write to the same pinned array in turn, and signal that by pipes."""
    buffer = MADE[made](5 * MIB)
    on_device = cumem.empty_device(5 * MIB, "u1")
    array, expected = buffer.numpy(), pattern(5 * MIB)
    array[:] = expected
    (child_reads, parent_writes), (parent_reads, child_writes) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.close(parent_writes)
        os.read(child_reads, 1)  # until the parent has written its zeros
        same = np.array_equal(array, expected)
        array[:] = 99
        os.write(child_writes, b"y" if same else b"n")
        os.read(child_reads, 1)
        os._exit(0 if (array == 99).all() else 1)
    os.close(child_reads)
    os.close(child_writes)
    array[:] = 0
    os.write(parent_writes, b".")
    assert os.read(parent_reads, 1) == b"y"
    assert not array.any()
    cumem.copy(on_device, buffer)
    # The device has none of the child's bytes.
    assert not cumem.asnumpy(on_device).any()
    cumem.copy(on_device, expected)
    cumem.copy(buffer, on_device)
    assert np.array_equal(array, expected)
    os.write(parent_writes, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(parent_writes)
    os.close(parent_reads)


def test_child_of_a_child_has_the_bytes_of_its_own_fork(runtime) -> None:
    buffer = cumem.full(3 * MIB, 1, "u1", "pinned")
    array = buffer.numpy()

    def check_again() -> None:
        assert (array == 2).all()
        array[:] = 3
        assert (np.asarray(buffer) == 3).all()
        with pytest.raises(RuntimeError, match="forked child"):
            cumem.empty_pinned(1000)

    def check() -> None:
        assert (array == 1).all()
        array[:] = 2
        for _ in range(2):
            fork_and_run(check_again)
        assert (array == 2).all()

    fork_and_run(check)
    assert (array == 1).all()


def test_child_of_a_second_thread_has_the_bytes_of_the_fork(runtime) -> None:
    array = cumem.full(3 * MIB, 5, "u1", "pinned").numpy()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                fork_and_run(lambda: (array == 5).all() or 1 / 0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_child_has_the_bytes_whatever_other_threads_were_doing(runtime) -> None:
    """Threads allocate and give back pinned memory while the main thread forks."""
    buffer = cumem.empty_pinned(3 * MIB, "u1")
    array, expected = buffer.numpy(), pattern(3 * MIB)
    array[:] = expected
    stop = threading.Event()

    def work(seed: int) -> None:
        held: list[cumem.Buffer] = []
        for size in np.random.default_rng(seed).integers(1, 3 * MIB, 10_000):
            if stop.is_set():
                return
            held.append(cumem.empty_pinned(int(size), "u1"))
            if len(held) > 6:
                held.clear()
                cumem.trim("pinned")  # gives back the memory around the buffer

    def check() -> None:
        assert np.array_equal(array, expected)
        assert np.array_equal(np.asarray(buffer), expected)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            fork_and_run(check)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert np.array_equal(array, expected)


def test_parent_loses_no_byte_of_copies_under_way_at_a_fork(runtime) -> None:
    """Copies run both ways between forks, and every byte is right on both sides."""
    idle = cumem.empty_pinned(2 * MIB, "u1")
    idle.numpy()[:] = pattern(2 * MIB)
    count, nbytes = 4, 8 * MIB
    sources = [cumem.empty_pinned(nbytes, "u1") for _ in range(count)]
    targets = [cumem.empty_pinned(nbytes, "u1") for _ in range(count)]
    middle = [cumem.empty_device(nbytes, "u1") for _ in range(count)]
    streams = [cumem.Stream() for _ in range(count)]
    views = [buffer.numpy() for buffer in (*sources, *targets)]
    for turn in range(6):
        for i, source in enumerate(sources):
            source.numpy()[:] = pattern(nbytes, seed=turn * count + i)
            targets[i].numpy()[:] = 0

        def check() -> None:
            assert np.array_equal(idle.numpy(), pattern(2 * MIB))
            # Copies may have changed these bytes at the fork, but now they are the child's
            # own.
            for view in views:
                assert view.sum() >= 0
                view[:] = 77

        handles = []
        for i, stream in enumerate(streams):
            handles.append(cumem.copy_async(middle[i], sources[i], stream=stream))
            handles.append(cumem.copy_async(targets[i], middle[i], stream=stream))
        for _ in range(2):
            fork_and_run(check)
        for handle in handles:
            handle.wait()
        for i, target in enumerate(targets):
            expected = pattern(nbytes, seed=turn * count + i)
            assert np.array_equal(sources[i].numpy(), expected)
            assert np.array_equal(target.numpy(), expected)


def test_child_is_refused_a_view_of_what_a_transfer_writes(emulated) -> None:
    source, target = (
        cumem.full(MIB, 3, "u1", "device"),
        cumem.zeros(MIB, "u1", "pinned"),
    )
    before, stream = target.numpy(), cumem.Stream()

    def check() -> None:
        assert before.sum() >= 0
        for view in VIEWS:
            with pytest.raises(RuntimeError, match="forked child"):
                view(target)

    with session.gate(stream):
        handle = cumem.copy_async(target, source, stream=stream)
        fork_and_run(check)
    handle.wait()
    assert (before == 3).all()


def test_child_is_refused_a_view_of_managed_memory(emulated) -> None:
    """The driver leaves such memory out of children, and so does the emulated device."""
    buffer = cumem.full(1000, 7, "u1", "managed")
    array, own = buffer.numpy(), cumem.asbuffer(np.ones(10, "u1"))

    def check() -> None:
        for view in VIEWS:
            with pytest.raises(RuntimeError, match="forked child"):
                view(buffer)
        assert bytes(memoryview(own)) == bytes([1] * 10)

    fork_and_run(check)
    fork_and_die(lambda: array[0])
    assert (array == 7).all()


def test_child_shares_no_emulated_device_memory(emulated) -> None:
    buffer = cumem.full(1000, 7, "u1", "device")
    seen = np.from_dlpack(buffer)

    def check() -> None:
        """The child may have memory of its own at these addresses, which are free there."""
        assert not (seen == 7).all()
        seen.fill(1)

    fork_and_die_or_run(check)
    assert (seen == 7).all()


def test_child_has_registered_memory_of_its_own(runtime) -> None:
    array = np.full(3 * MIB, 4, "u1")
    with cumem.register(array) as registered:

        def check() -> None:
            assert (array == 4).all()
            assert (np.asarray(registered) == 4).all()
            array[:] = 5

        fork_and_run(check)
        assert (array == 4).all()
        assert (cumem.asnumpy(registered) == 4).all()


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
def test_child_allocates_nothing_from_a_warm_pool(runtime, kind) -> None:
    """A pool with cached blocks must refuse the child, even after the child frees some."""
    empty = getattr(cumem, f"empty_{kind}")
    pool = cumem.Pool(kind)
    calls = [
        lambda n: empty(n, "u1"),
        lambda n: cumem.empty(n, "u1", kind),
        lambda n: cumem.empty(shape=n, dtype="u1", kind=kind),
        lambda n: cumem.zeros(n, "u1", kind),
        lambda n: empty(n, "u1", pool=pool),
        lambda n: cumem.empty_like(np.empty(n, "u1"), kind=kind),
    ]
    sizes = (100, 5000, 100_000)
    for call in calls:
        held = [call(n) for n in sizes for _ in range(3)]
        del held[1:]  # so that a block is live and others are cached
    kept = [empty(n, "u1") for n in sizes]
    assert pool.stats().cached_nbytes > 0

    def check() -> None:
        for call in calls:
            for n in sizes:
                with pytest.raises(RuntimeError, match="forked child"):
                    call(n)
        while kept:
            kept.pop().free()  # the child leaks the block without an error
        held.clear()
        gc.collect()
        for n in sizes:
            with pytest.raises(RuntimeError, match="forked child"):
                empty(n, "u1")

    fork_and_run(check)
    fork_and_run(check)


#: A program that limits its address space, so that a child has no room for the bytes of a
#: pinned buffer.
LACKING = """
import faulthandler, os, resource, signal, numpy as np
import cumem

faulthandler.disable()  # a child that is killed is not to write a traceback

buffer = cumem.full(256 << 20, 7, "u1", "pinned")
array = buffer.numpy()
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * os.sysconf("SC_PAGESIZE") + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for touches in (False, True):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            array[0] if touches else memoryview(buffer)
        except RuntimeError as error:
            os._exit(11 if "forked child" in str(error) else 12)
        os._exit(13)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (-signal.SIGSEGV if touches else 11), code
assert (array[:: 1 << 12] == 7).all()
"""


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer needs more address space than this test allows",
)
def test_child_that_has_no_room_for_the_bytes_is_not_given_others() -> None:
    """The child may not map enough memory for the bytes of a pinned buffer.

    A new view of these bytes must then be refused to the child, and touching an older view
    must kill the child.
    """
    assert run(LACKING) == ""


def run(code: str, backend: str = "emulated") -> str:
    """Run code in another process, and return what it writes to standard error.

    The text begins with the exit code if that is not 0.
    """
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", code],
        env=os.environ | SHOWN | {"CUMEM_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return (
        done.stderr or ""
        if done.returncode == 0
        else f"{done.returncode} {done.stderr}"
    )


#: A program whose child ends normally. Before that it may drop the buffers that it
#: inherited.
LEAVING = """
import gc, os, signal, sys, numpy as np
import cumem

made = [(n, kind) for n in (100, 3 << 20) for kind in ("pinned", "mapped")]
kept = [cumem.full(n, 7, "u1", kind) for n, kind in made]
views = [buffer.numpy() for buffer in kept]
cycle = [cumem.full(1000, 1, "u1", "pinned")]
cycle.append(cycle)
handle = cumem.copy_async(cumem.empty_device(3 << 20, "u1"), kept[2])
child = os.fork()
if child == 0:
    signal.alarm(20)
    assert all((view == 7).all() for view in views)
    del cycle
    gc.collect()
    if {how!r} == "dropping":
        del kept, views, handle
        gc.collect()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
handle.wait()
"""


@pytest.mark.parametrize("how", ["holding", "dropping"])
def test_child_ends_as_any_process_does(runtime, how) -> None:
    assert run(LEAVING.format(how=how), runtime.name) == ""


#: A program that starts other programs in several ways, and then forks. It counts how often
#: fork handlers run.
COUNTING = """
import asyncio, ctypes, os, subprocess, numpy as np
import cumem

array = cumem.full(3 << 20, 7, "u1", "pinned").numpy()
count = 0

@ctypes.CFUNCTYPE(None)
def prepare():
    global count
    count += 1

# pthread_atfork() calls this function. A fork runs all such handlers or none of them, so
# cumem's own handler has run if this one has.
ctypes.CDLL(None).__register_atfork(prepare, None, None, None)
subprocess.run(["true"], check=True)
subprocess.run("true", shell=True, check=True, capture_output=True, cwd="/")
os.system("true")
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
assert count == 0, count
child = os.fork()
if child == 0:
    os._exit(0 if (array == 7).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert count == 1, count
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "__register_atfork"), reason="this test needs glibc"
)
def test_subprocess_copies_nothing(runtime) -> None:
    """Starting a program must run no fork handlers, since cumem's handler copies memory."""
    assert run(COUNTING, runtime.name) == ""


def huge_nbytes(array: np.ndarray) -> int:
    """Return how many bytes of the mapping that has this array are in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            inside = low <= array.ctypes.data < high
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) << 10
    raise AssertionError("no mapping has this array")


def test_fork_splits_no_huge_page_of_the_parent(runtime) -> None:
    arrays = [cumem.full(5 * MIB, 7, "u1", "pinned").numpy() for _ in range(4)]
    before = [huge_nbytes(array) for array in arrays]
    fork_and_run(lambda: [array.fill(1) for array in arrays])
    assert [huge_nbytes(array) for array in arrays] == before


class Images:
    """A dataset for a loader of samples, with arrays in pinned and mapped memory."""

    def __init__(self) -> None:
        self.arrays = [
            cumem.full((64, 64), i, "i4", "pinned" if i % 2 else "mapped").numpy()
            for i in range(32)
        ]

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> np.ndarray:
        if index >= len(self):
            raise IndexError(index)
        return self.arrays[index] + 1


#: A program in which worker processes read the dataset `Images`.
WORKERS = """
import multiprocessing, os, sys
sys.path.insert(0, {folder!r})
from test_fork import Images, np

if __name__ == "__main__":
    images = Images()
    if {loader!r} == "torch":
        from torch.utils.data import DataLoader
        loader = DataLoader(images, 8, num_workers=2, multiprocessing_context={method!r})
        found = np.concatenate([batch.numpy() for batch in loader])
        assert (found == np.arange(1, 33).reshape(32, 1, 1)).all()
    else:
        with multiprocessing.get_context({method!r}).Pool(3) as pool:
            found = pool.map(images.__getitem__, range(len(images)), chunksize=4)
        assert (np.array(found) == np.arange(1, 33).reshape(32, 1, 1)).all()
"""


# A worker that is not forked imports PyTorch itself, which takes five seconds under
# AddressSanitizer. Each method is a test of its own, because the time limit is for each
# test.
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("loader", ["python", "torch"])
def test_workers_read_a_dataset_of_pinned_arrays(
    runtime, tmp_path, loader, method
) -> None:
    if loader == "torch":
        pytest.importorskip("torch")
    script = tmp_path / "workers.py"
    folder = str(Path(__file__).parent)
    script.write_text(WORKERS.format(loader=loader, method=method, folder=folder))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", str(script)],
        env=os.environ | SHOWN | {"CUMEM_BACKEND": runtime.name},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.any_python
def test_benchmark_of_forks_finds_no_wrong_byte(tmp_path) -> None:
    results = tmp_path / "fork.json"
    script = Path(__file__).parents[2] / "benchmarks" / "fork.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--json", str(results)],
        env=os.environ | SHOWN | {"CUMEM_BACKEND": "emulated"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = {case["key"]: case for case in json.loads(results.read_text())["cases"]}
    workers = {f"4 workers, {way}" for way in ("copy", "share", "omit")}
    assert set(found) == {"none", "ordinary", *MADE, "beside copies"} | workers
    assert found["none"]["child_nbytes"] < found["pinned"]["nbytes"]
    for made in MADE:
        assert found[made]["child_nbytes"] > found[made]["nbytes"]
        assert found[made]["huge_after"] == found[made]["huge_before"]


#: A driver's library whose loading does not end until the test allows it.
LATE_DRIVER = """
#include <stdlib.h>
#include <unistd.h>

__attribute__((constructor)) static void wait_for_test(void)
{
    char byte = 'x';
    (void)!write(atoi(getenv("INSIDE")), &byte, 1);
    (void)!read(atoi(getenv("GO_ON")), &byte, 1);
}
"""

#: A program that forks while another of its threads opens the driver.
OPENING = """
import os, signal, sys, threading, warnings
import cumem

warnings.simplefilter("ignore")
# The first fork beside a thread loads modules. Some load libraries, which would wait for
# the driver's library while that is being loaded. So a first fork comes before it.
idle = threading.Event()
beside = threading.Thread(target=idle.wait)
beside.start()
first = os.fork()
if first == 0:
    os._exit(0)
os.waitpid(first, 0)
idle.set()
beside.join()
thread = threading.Thread(target=cumem.synchronize)
thread.start()
os.read(int(sys.argv[1]), 1)  # the driver's library is being loaded
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        cumem.synchronize()
    except RuntimeError as error:
        os._exit(0 if "forked child" in str(error) else 2)
    os._exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os.write(int(sys.argv[2]), b"x")
thread.join()
sys.exit(status)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="this test builds a library")
def test_child_that_was_forked_while_the_driver_was_opened_does_not_wait(
    tmp_path,
) -> None:
    (tmp_path / "late.c").write_text(LATE_DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "late.c"], check=True
    )
    inside, go_on = os.pipe(), os.pipe()
    environment = {k: v for k, v in os.environ.items() if k != "CUMEM_BACKEND"}
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    environment |= {"INSIDE": str(inside[1]), "GO_ON": str(go_on[0])}
    done = subprocess.run(
        [sys.executable, "-c", OPENING, str(inside[0]), str(go_on[1])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=(*inside, *go_on),
    )
    for end in (*inside, *go_on):
        os.close(end)
    assert done.returncode == 0, done.stderr


#: A program that forbids one kind of advice of madvise(), as sandboxes do, and then runs
#: another program. Its first arguments are the number of the error that madvise() returns
#: and that of the advice.
DENY = r"""
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int count, char **words)
{
    (void)count;
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, atoi(words[2]), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | atoi(words[1])),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        return 99;
    }
    execv(words[3], words + 3);
    return 98;
}
"""

#: A program that copies, forks, and copies again.
DENIED = """
import os
import numpy as np
import cumem

pinned = cumem.full(1 << 20, 3, "u1", "pinned")
device = cumem.zeros(1 << 20, "u1")
cumem.copy(device, pinned)
assert (device.to_numpy() == 3).all()
child = os.fork()
if child == 0:
    try:
        cumem.zeros(4)
    except RuntimeError as error:
        os._exit(0 if "forked child" in str(error) else 2)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (device.to_numpy() == 3).all()
"""


# The kinds of advice are DONTNEED, DONTFORK, DOFORK, HUGEPAGE, DONTDUMP, WIPEONFORK,
# KEEPONFORK, PAGEOUT, POPULATE_READ and POPULATE_WRITE.
@pytest.mark.skipif(shutil.which("gcc") is None, reason="this test builds a program")
@pytest.mark.parametrize("advice", [4, 10, 11, 14, 16, 18, 19, 21, 22, 23])
def test_process_whose_sandbox_refuses_an_advice_works_without_it(
    tmp_path, advice
) -> None:
    source, program = tmp_path / "deny.c", tmp_path / "deny"
    source.write_text(DENY)
    subprocess.run(["gcc", "-o", program, source], check=True)
    done = subprocess.run(
        [program, str(errno.EINVAL), str(advice), sys.executable, "-c", DENIED],
        env=os.environ | {"CUMEM_BACKEND": "emulated"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == 99:
        pytest.skip("this kernel lets nobody filter system calls")
    assert done.returncode == 0, done.stderr
