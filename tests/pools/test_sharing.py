# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory that processes share by its name, in real processes that are killed.

A `Peer` is a process that runs one line after the other and answers each, so that the test
decides what happens in which order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session
from support.forks import fork_and_run

import cumem

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:shared_pinned.. uses pages:RuntimeWarning"),
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
]

NOTES = Path(f"/dev/shm/cumem-{os.geteuid()}")
MIB = 1 << 20
IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become other users")

_LOOP = """
import signal, sys, warnings
signal.alarm(120)
warnings.filterwarnings("error")
warnings.filterwarnings("ignore", "shared_pinned", RuntimeWarning)
import cumem
names = {"cumem": cumem}
for line in sys.stdin:
    try:
        try:
            answer = repr(eval(line, names))
        except SyntaxError:
            exec(line, names)
            answer = ""
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(answer, flush=True)
"""


class Peer:
    """Another process, which runs lines of Python."""

    def __init__(self, **environment: str) -> None:
        shown = {
            "CUMEM_BACKEND": "emulated",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | shown | environment,
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def __call__(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(**environment: str) -> Peer:
        peers.append(Peer(**environment))
        return peers[-1]

    yield make
    for each in peers:
        each.kill()


@pytest.fixture
def name() -> Iterator[str]:
    made = f"test-{uuid.uuid4().hex}"
    yield made
    gc.collect()
    note_of(made).unlink(missing_ok=True)


def note_of(name: str) -> Path:
    return NOTES / f"{name}.note"


def opening(name: str, count: int = 1000, dtype: str = "i4") -> str:
    return f"a = cumem.shared_pinned({name!r}, {count}, {dtype!r})"


def descriptors() -> list[str]:
    """Return the files behind those descriptors of this process that are for
    shared memory.
    """
    links = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed
            links.append(os.readlink(f"/proc/self/fd/{each}"))
    return [link for link in links if "cumem-shared" in link or link.endswith(".note")]


# -- by name -------------------------------------------------------------------------------


def test_two_processes_see_the_same_bytes(peer, name) -> None:
    mine = cumem.shared_pinned(name, (10, 100), "i4")
    assert (mine.kind, mine.shape, mine.dtype, mine.numpy().any()) == (
        "pinned",
        (10, 100),
        np.dtype("i4"),
        False,
    )
    other = peer()
    assert other(f"a = cumem.shared_pinned({name!r}, (10, 100), 'i4')") == ""
    mine.numpy()[3, 4] = 7
    assert other("int(a.numpy()[3, 4])") == "7"
    assert other("a.numpy()[5] = 8") == ""
    assert (mine.numpy()[5] == 8).all()


def test_buffers_of_one_process_share_one_mapping(name) -> None:
    first = cumem.shared_pinned(name, 1000, "i4")
    again = cumem.shared_pinned(name, 1000, "i4")
    assert first.ptr == again.ptr
    first.free()
    again.numpy()[:] = 3
    with pytest.raises(ValueError, match="is closed"):
        first.numpy()


def test_memory_outlives_who_made_it(peer, name) -> None:
    first, second, third = peer(), peer(), peer()
    assert first(opening(name)) == ""
    assert first("a.numpy()[:] = 5") == ""
    assert second(opening(name)) == ""
    first.kill()
    # The note of the memory names the first process, which is dead. So the third process
    # has to find the second one by itself.
    assert third(opening(name)) == ""
    assert third("a.numpy().tolist() == [5] * 1000") == "True"
    second.kill()
    assert (cumem.shared_pinned(name, 1000, "i4").numpy() == 5).all()


def test_last_user_gives_everything_back(peer, name) -> None:
    mine = cumem.shared_pinned(name, 1000, "i4")
    other = peer()
    other(opening(name))
    assert len(descriptors()) == 2
    mine.free()
    assert descriptors() == []
    assert note_of(name).exists()
    other("del a")
    assert not note_of(name).exists()


def test_death_of_all_gives_the_memory_back(peer, name) -> None:
    users = peer(), peer()
    for each in users:
        each(opening(name))
    users[0]("a.numpy()[:] = 5")
    for each in users:
        each.kill()
    assert note_of(name).exists()
    mine = cumem.shared_pinned(name, (7,), "f8")
    assert not mine.numpy().any()
    mine.free()
    assert not note_of(name).exists()


def test_other_shape_or_dtype_is_refused_with_both(peer, name) -> None:
    other = peer()
    other(f"a = cumem.shared_pinned({name!r}, (4, 2), 'f4')")
    for shape, dtype in ((2, 4), "f4"), ((4, 2), "i4"), (8, "f4"), (9, "f8"):
        asked = (
            f"shape {shape if shape not in (8, 9) else (shape,)} of {np.dtype(dtype)}"
        )
        with pytest.raises(ValueError, match="in use for shape") as caught:
            cumem.shared_pinned(name, shape, dtype)
        assert "shape (4, 2) of float32" in str(caught.value)
        assert asked in str(caught.value)
    assert descriptors() == []
    mine = cumem.shared_pinned(name, (4, 2), "f4")
    with pytest.raises(ValueError, match="in use for shape"):
        cumem.shared_pinned(name, (4, 3), "f4")
    mine.free()


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"name": ""}, ValueError, "1 to 200 bytes"),
        ({"name": "a/b"}, ValueError, "without '/'"),
        ({"name": "a\0b"}, ValueError, "zeros"),
        ({"name": "é" * 101}, ValueError, "1 to 200 bytes"),
        ({"name": 5}, TypeError, "name must be a str"),
        ({"shape": -1}, ValueError, "must not be negative"),
        ({"shape": "ab"}, TypeError, "shape must be"),
        ({"shape": 1.5}, TypeError, "shape must be"),
        ({"shape": (1 << 40, 1 << 40)}, ValueError, "too large"),
        ({"dtype": "O"}, TypeError, "object"),
        ({"numa_node": 63}, ValueError, "numa_node 63 does not exist"),
        ({"numa_node": "0"}, TypeError, "numa_node must be"),
    ],
)
def test_arguments_that_cannot_be_are_refused(bad, error, text) -> None:
    with pytest.raises(error, match=text):
        cumem.shared_pinned(**{"name": "never", "shape": 4, "dtype": "i4"} | bad)
    assert not note_of("never").exists()


@pytest.mark.parametrize("odd", [".", "..", "a b", "é", "-", "x" * 200])
def test_odd_names_are_names(odd) -> None:
    with cumem.shared_pinned(odd, 4, "i4") as buffer:
        assert buffer.size == 4
        assert note_of(odd).exists()
    assert not note_of(odd).exists()


def test_no_elements_and_no_axes(name) -> None:
    with cumem.shared_pinned(name, (0, 5), "i4") as empty:
        assert pickle.loads(pickle.dumps(empty)).shape == (0, 5)
    with cumem.shared_pinned(name, (), "i4") as one:
        one.numpy()[...] = 4
        assert pickle.loads(pickle.dumps(one)).numpy() == 4


def test_more_than_the_process_may_use_is_refused_before_it_is_made(name) -> None:
    with pytest.raises(cumem.OutOfMemoryError):
        cumem.shared_pinned(name, 1 << 50, "u1")
    assert not note_of(name).exists()
    assert descriptors() == []


def test_memory_of_a_node(name) -> None:
    with cumem.shared_pinned(name, MIB, "u1", numa_node=0) as buffer:
        assert not buffer.numpy().any()


def test_many_cycles_leave_nothing(peer, name) -> None:
    other = peer()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    for round_ in range(200):
        buffer = cumem.shared_pinned(name, 5000, "u1")
        assert (
            other(opening(name, 5000, "u1") + f"; a.numpy()[0] = {round_}; del a") == ""
        )
        assert buffer.numpy()[0] == round_
        buffer.free()
    assert descriptors() == []
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 4
    assert not note_of(name).exists()


def test_two_processes_that_open_and_drop_freely_leave_nothing() -> None:
    # The script runs ten thousand cycles by itself.
    script = Path(__file__).parents[1] / "isolated" / "stress_sharing.py"
    subprocess.run(
        [sys.executable, str(script), "--cycles", "300"],
        env=os.environ | {"CUMEM_BACKEND": "emulated"},
        timeout=120,
        check=True,
    )


def test_threads_that_open_at_once_get_one_memory(name) -> None:
    opened: list[cumem.PinnedBuffer] = []
    barrier = threading.Barrier(8)

    def body() -> None:
        barrier.wait()
        opened.append(cumem.shared_pinned(name, MIB, "u1"))

    threads = [threading.Thread(target=body) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened[0].numpy()[:] = 9
    assert len(opened) == 8
    assert all((each.numpy() == 9).all() for each in opened)
    for each in opened:
        each.free()
    assert not note_of(name).exists()


# -- a process that is killed while it makes the memory ------------------------------------


def gate_of(name: str) -> int:
    """Take the gate of a name, as the process that makes the memory does."""
    NOTES.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(note_of(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, lock)
    return fd


def is_waiting_for_a_lock(pid: int) -> bool:
    # The system call of each thread: 72 is fcntl on x86-64, 25 on 64-bit ARM; 38 is
    # F_OFD_SETLKW.
    for thread in os.listdir(f"/proc/{pid}/task"):
        call = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        if call[0] in ("72", "25") and call[2] == "0x26":
            return True
    return False


def test_waiters_take_over_from_a_maker_that_was_killed(peer, name) -> None:
    gate = gate_of(name)
    os.write(gate, b"half a note")
    sleeper = subprocess.Popen(["sleep", "120"], pass_fds=[gate])
    os.close(gate)  # the lock is the other process's alone now
    waiters = [peer() for _ in range(2)]
    for each in waiters:
        assert each("1") == "1"
        each.send(opening(name))
    session.wait_until(
        lambda: all(is_waiting_for_a_lock(w.process.pid) for w in waiters)
    )
    assert not any(w.process.poll() for w in waiters)
    sleeper.kill()
    sleeper.wait()
    assert [each.answer() for each in waiters] == ["", ""]
    assert waiters[0]("a.numpy()[:] = 6") == ""
    assert waiters[1]("a.numpy().tolist() == [6] * 1000") == "True"


@pytest.mark.parametrize("round_", range(4))
def test_real_maker_killed_at_any_moment(peer, name, round_) -> None:
    maker, waiter = peer(), peer()
    assert maker("1") == waiter("1") == "1"
    maker.send(opening(name, 64 * MIB, "u1"))
    session.wait_until(note_of(name).exists)
    if round_ % 2 == 1:
        waiter.send(opening(name, 64 * MIB, "u1"))
    maker.kill()
    if round_ % 2 == 0:
        waiter.send(opening(name, 64 * MIB, "u1"))
    assert waiter.answer() == ""
    assert waiter("bool(a.numpy().any())") == "False"
    assert waiter("del a") == ""
    assert not note_of(name).exists()


def test_ctrl_c_ends_the_wait_for_a_maker(peer, name) -> None:
    gate = gate_of(name)
    waiter = peer()
    waiter("import contextlib; held = contextlib.suppress(KeyboardInterrupt)")
    waiter.send(f"with held: cumem.shared_pinned({name!r}, 10)")
    session.wait_until(lambda: is_waiting_for_a_lock(waiter.process.pid))
    os.kill(waiter.process.pid, signal.SIGINT)
    assert waiter.answer() == ""
    os.close(gate)
    assert waiter(opening(name)) == ""


# -- forks ---------------------------------------------------------------------------------


def test_forked_child_has_the_same_bytes(name) -> None:
    mine = cumem.shared_pinned(name, 1000, "i4")
    mine.numpy()[:] = 1

    def check() -> None:
        assert (mine.numpy() == 1).all()
        mine.numpy()[5] = 2
        again = cumem.shared_pinned(name, 1000, "i4")
        assert again.numpy()[5] == 2

    fork_and_run(check)
    assert mine.numpy()[5] == 2
    mine.free()
    assert not note_of(name).exists()


def test_forked_child_of_a_process_with_a_driver(runtime, name) -> None:
    mine = cumem.shared_pinned(name, 1000, "i4")
    on_device = cumem.empty_device(1000, "i4")
    cumem.copy(on_device, mine)
    assert registered() > 0

    def check() -> None:
        mine.numpy()[:] = 4
        other = cumem.shared_pinned(name, 1000, "i4")
        target = np.zeros(1000, "i4")
        cumem.copy(target, other)
        assert (target == 4).all()
        mine.free()

    fork_and_run(check)
    cumem.copy(on_device, mine)
    assert (on_device.to_numpy() == 4).all()


def test_child_that_outlives_its_parent_is_found(peer, name) -> None:
    parent = peer()
    assert parent(opening(name)) == ""
    assert parent("a.numpy()[:] = 3") == ""
    assert parent("import os, signal; r, w = os.pipe()") == ""
    parent("warnings = __import__('warnings'); warnings.simplefilter('ignore')")
    child = int(parent("os.fork() or signal.pause()"))
    parent.kill()
    try:
        assert (cumem.shared_pinned(name, 1000, "i4").numpy() == 3).all()
    finally:
        os.kill(child, signal.SIGKILL)


def test_fork_during_a_wait_leaves_no_gate_in_the_child(name) -> None:
    gate = gate_of(name)
    opened: list[cumem.PinnedBuffer] = []
    thread = threading.Thread(
        target=lambda: opened.append(cumem.shared_pinned(name, 10, "i4"))
    )
    thread.start()
    session.wait_until(lambda: is_waiting_for_a_lock(os.getpid()))

    def check() -> None:
        os.close(gate)
        assert descriptors() == []

    fork_and_run(check)
    os.close(gate)
    thread.join()
    assert opened[0].size == 10
    opened.pop().free()


# -- pickles -------------------------------------------------------------------------------


def fill(buffer: cumem.Buffer, view: cumem.Buffer) -> None:
    buffer.numpy()[0] = 21
    view.numpy()[:] = 22


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_multiprocessing_sends_the_memory_and_no_bytes(way, name) -> None:
    mine = cumem.shared_pinned(name, (100, 1000), "i4")
    view = mine[10:20, ::-3]
    assert len(pickle.dumps(view)) < 1000
    context = multiprocessing.get_context(way)
    worker = context.Process(target=fill, args=(mine, view))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert (mine.numpy()[0] == 21).all()
    assert (view.numpy() == 22).all()
    assert not mine.numpy()[20:].any()


def answer_tensors(received: Any, sent: Any) -> None:
    """Answer each buffer with a sum, and write into the memory through tensors."""
    import torch

    for buffer in iter(received.get, None):
        by_numpy = torch.from_numpy(buffer.numpy())
        by_dlpack = torch.from_dlpack(buffer)
        assert by_numpy.data_ptr() == by_dlpack.data_ptr()
        before = int(by_numpy.sum())
        by_numpy[0] += 1
        by_dlpack[-1] = 50
        sent.put(before)


@pytest.mark.parametrize("way", ["spawn", "fork"])
def test_torch_multiprocessing_sends_the_memory(way, name, monkeypatch) -> None:
    monkeypatch.setenv("CUMEM_BACKEND", "emulated")  # or else the child warns of it
    torch_multiprocessing = pytest.importorskip("torch.multiprocessing")
    mine = cumem.shared_pinned(name, (100, 10), "i4")
    mine.numpy()[:] = 3
    context = torch_multiprocessing.get_context(way)
    to_child, from_child = context.Queue(), context.Queue()
    child = context.Process(target=answer_tensors, args=(to_child, from_child))
    child.start()
    to_child.put(mine)
    assert from_child.get(timeout=30) == 3000
    assert (mine.numpy()[0] == 4).all()
    assert (mine.numpy()[-1] == 50).all()
    mine.numpy()[:] = 1
    to_child.put(mine[40:60])
    assert from_child.get(timeout=30) == 200
    to_child.put(None)
    child.join()
    assert child.exitcode == 0
    assert (mine.numpy()[40] == 2).all()
    assert (mine.numpy()[59] == 50).all()
    argument = context.Process(target=fill, args=(mine, mine[10:20]))
    argument.start()
    argument.join()
    assert argument.exitcode == 0
    assert (mine.numpy()[10:20] == 22).all()


def double(buffer: cumem.Buffer) -> int:
    buffer.numpy()[:] *= 2
    return int(buffer.numpy().sum())


@pytest.mark.parametrize("kind", ["futures", "pool", "loky"])
def test_pools_of_processes_get_the_memory_as_an_argument(kind, name) -> None:
    mine = cumem.shared_pinned(name, (4, 1000), "i4")
    mine.numpy()[:] = np.arange(1, 5)[:, None]
    context = multiprocessing.get_context("spawn")
    if kind == "futures":
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
            sums = list(executor.map(double, mine))
    elif kind == "pool":
        with context.Pool(2) as pool:
            sums = pool.map(double, list(mine))
    else:
        loky = pytest.importorskip("loky")
        with loky.ProcessPoolExecutor(2) as executor:
            sums = list(executor.map(double, mine))
    assert sums == [2000, 4000, 6000, 8000]
    assert (mine.numpy() == np.arange(2, 10, 2)[:, None]).all()


def test_pickle_after_the_last_user_raises(peer, name) -> None:
    mine = cumem.shared_pinned(name, 1000, "i4")
    sent = pickle.dumps(mine)
    mine.free()
    with pytest.raises(RuntimeError, match="is gone, since its last user"):
        pickle.loads(sent)
    assert not note_of(name).exists()
    later = cumem.shared_pinned(name, 1000, "i4")  # the same name, but other memory
    with pytest.raises(RuntimeError, match="is gone"):
        pickle.loads(sent)
    other = peer()
    assert other(f"import pickle; a = pickle.loads({sent!r})").startswith(
        "RuntimeError"
    )
    assert other(f"a = pickle.loads({pickle.dumps(later)!r})") == ""


def test_pickle_of_another_machine_raises(name, monkeypatch) -> None:
    sent = pickle.dumps(cumem.shared_pinned(name, 1000, "i4"))
    from cumem.interchange import pickling

    monkeypatch.setattr(pickling, "machine", lambda: "elsewhere")
    with pytest.raises(RuntimeError, match="is on another machine"):
        pickle.loads(sent)


def test_pickle_keeps_that_a_view_is_read_only_and_checks_its_place(name) -> None:
    mine = cumem.shared_pinned(name, 1000, "i4")
    from cumem import _core

    _, called, form, nbytes, token, *_ = mine.__reduce_ex__(5)[1]
    start = (called, form, nbytes, token, -1, mine.dtype)
    frozen = _core._shared_pinned(*start, (10,), (4,), 0, True)
    assert pickle.loads(pickle.dumps(frozen)).readonly
    assert not pickle.loads(pickle.dumps(mine)).readonly
    for shape, strides, offset in [
        ((1001,), (4,), 0),
        ((10,), (4,), 3964),
        ((10,), (-4,), 0),
        ((1,), (4,), -4),
        ((2,), (1 << 60,), 0),
    ]:
        with pytest.raises(ValueError, match=r"does not lie in|overflow|fit"):
            _core._shared_pinned(*start, shape, strides, offset, False)
    with pytest.raises(ValueError):
        _core._shared_pinned("../x", *start[1:], (10,), (4,), 0, False)


# -- page-locking --------------------------------------------------------------------------


def registered() -> int:
    return sum(p.live_nbytes for p in cumem.stats().pools if "registered" in str(p))


def test_pages_are_locked_by_the_first_copy_and_counted(runtime, name) -> None:
    mine = cumem.shared_pinned(name, 100_000, "i4")
    mine.numpy()[:] = np.arange(100_000)
    on_host = np.zeros(100_000, "i4")
    cumem.copy(on_host, mine)
    assert session.testing.registrations() == 0
    on_device = cumem.empty_device(100_000, "i4")
    cumem.copy(on_device, mine)
    assert session.testing.registrations() == 1
    assert (on_device.to_numpy() == on_host).all()
    again = cumem.shared_pinned(name, 100_000, "i4")
    cumem.copy(again[:10], on_device[10:20])
    assert (mine.numpy()[:10] == np.arange(10, 20)).all()
    assert session.testing.registrations() == 1
    mine.free()
    again.free()
    assert session.testing.registrations() == 0


@pytest.mark.parametrize("way", ["async", "many", "rows", "take", "broadcast", "array"])
def test_each_way_to_copy_locks_the_pages(runtime, name, way) -> None:
    mine = cumem.shared_pinned(name, (100, 50), "i4")
    mine.numpy()[:] = np.arange(5000).reshape(100, 50)
    on_device = cumem.empty_device((100, 50), "i4")
    if way == "async":
        cumem.copy_async(on_device, mine).wait()
    elif way == "many":
        cumem.copy_many([(on_device[:50], mine[:50]), (on_device[50:], mine[50:])])
    elif way == "rows":
        cumem.copy_rows(on_device, mine, range(100), range(100))
    elif way == "take":
        cumem.take_rows(mine, np.arange(100), out=on_device)
    elif way == "broadcast":
        cumem.broadcast([on_device], mine)
    else:
        on_device = cumem.array(mine, kind="device")
    assert session.testing.registrations() == 1
    assert (on_device.to_numpy() == mine.numpy()).all()


def test_register_locks_the_pages_at_once(runtime, name) -> None:
    mine = cumem.shared_pinned(name, MIB, "u1")
    with cumem.register(mine) as locked:
        assert session.testing.registrations() == 1
        on_device = cumem.array(locked)
        cumem.copy(on_device, mine)
        assert session.testing.registrations() == 1
    mine.free()
    assert session.testing.registrations() == 0


def test_limit_holds_for_the_locked_pages(runtime, name) -> None:
    mine = cumem.shared_pinned(name, 4 * MIB, "u1")
    mine.numpy()[:] = 3
    on_device = cumem.empty_device(4 * MIB, "u1")
    with cumem.limit("pinned", "1MiB"), pytest.raises(cumem.OutOfMemoryError):
        cumem.copy(on_device, mine)
    assert session.testing.registrations() == 0
    cumem.copy(on_device, mine)
    assert (on_device.to_numpy() == 3).all()


def test_process_that_only_fills_never_opens_the_driver(peer, name) -> None:
    other = peer()
    other(opening(name))
    assert other("a.numpy()[:] = 4; b = a[5:].to_numpy(); a.fill(6)") == ""
    assert other("cumem.copy(b, a[5:])") == "None"
    assert other("b.tolist() == [6] * 995") == "True"
    other("import os; warnings.simplefilter('ignore')")
    # A child can use the driver only if its parent has not.
    other("child = os.fork() or os._exit(int(cumem.empty_device(4).size))")
    assert other("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == "4"


def test_each_process_locks_on_the_device_that_it_uses(peer, name) -> None:
    users = [peer(CUDA_VISIBLE_DEVICES="0"), peer(CUDA_VISIBLE_DEVICES="1")]
    users.append(peer(CUMEM_EMULATED_DEVICES="2"))
    for number, each in enumerate(users):
        each("import warnings; warnings.simplefilter('ignore')")
        each(opening(name))
        device = 1 if number == 2 else 0
        assert each(f"d = cumem.empty_device(1000, 'i4', device={device})") == ""
        assert each(f"d.fill({number + 1}); cumem.copy(a, d)") == ""
        assert each("a.device.index") == str(device)
        assert users[0](f"a.numpy().tolist() == [{number + 1}] * 1000") == "True"
        assert each("sorted(d.index for d in [a.device])") == f"[{device}]"


# -- other users ---------------------------------------------------------------------------


def as_user(uid: int, check: Callable[[], None]) -> Callable[[], None]:
    def body() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        check()

    return body


@IS_ROOT
def test_folder_of_another_user_is_refused() -> None:
    folder = Path("/dev/shm/cumem-54321")
    folder.mkdir(mode=0o777)
    try:

        def check() -> None:
            with pytest.raises(OSError, match="not permitted"):
                cumem.shared_pinned("x", 4)

        fork_and_run(as_user(54321, check))
    finally:
        folder.rmdir()


@IS_ROOT
def test_users_that_cannot_be_reached_are_told(name) -> None:
    folder = Path("/dev/shm/cumem-54322")
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:

        def hold() -> None:
            buffer = cumem.shared_pinned(name, 4)
            # A process that changes its user is not dumpable until it calls exec.
            assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
            del buffer

        as_user(54322, hold)()
        os._exit(0)
    assert os.read(ready[0], 1) == b"x"

    def check() -> None:
        with pytest.raises(BufferError, match="lets this one have"):
            cumem.shared_pinned(name, 4)

    try:
        fork_and_run(as_user(54322, check))
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go_on):
            os.close(end)
    assert list(folder.iterdir()) == []
    folder.rmdir()
