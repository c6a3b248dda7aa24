# SPDX-License-Identifier: Apache-2.0
"""What forked children get of a pool's memory: `Pool(fork="copy" | "share" | "omit")`.

Each test forks, and checks in the child what it can read there, and in the parent that
no block which a child still has is handed out again.
"""

from __future__ import annotations

import os
import pickle
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
from support.forks import fork_and_die, fork_and_run

import cumem

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="forks are tested on Linux only"
    ),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:fork='share' uses pages:RuntimeWarning"),
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
]

MIB = 1 << 20
KINDS = ["pinned", "mapped"]


def made(pool: cumem.Pool, nbytes: int, value: int) -> cumem.Buffer:
    """Return a buffer of the pool, all of whose bytes are `value`."""
    buffer = cumem.empty(nbytes, "u1", kind=pool.kind, pool=pool)
    buffer.numpy()[:] = value
    return buffer


@contextmanager
def child(body: Callable[[], object] = lambda: None) -> Iterator[Callable[[], None]]:
    """Fork a child, which runs `body` and then waits until it is killed.

    The context manager yields a function that kills the child, for tests that go on
    without it. A child that is still alive at the end of the block is killed there.
    """
    ready, go_on = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            os.close(go_on[1])
            body()
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    os.close(go_on[0])
    assert os.read(ready[0], 1) == b"x", "the child failed"
    ends = [pid]

    def end() -> None:
        if ends:
            os.kill(ends.pop(), signal.SIGKILL)
            os.waitpid(pid, 0)

    try:
        yield end
    finally:
        end()
        os.close(ready[0])
        os.close(go_on[1])


# -- as an argument ------------------------------------------------------------------------


def test_fork_is_copy_by_default_and_is_shown(runtime) -> None:
    assert cumem.Pool("pinned").fork == "copy"
    assert cumem.default_pool("pinned").fork == "copy"
    for way in "copy", "share", "omit":
        pool = cumem.Pool("mapped", fork=way, idle_trim=3.0)
        assert (pool.fork, pool.idle_trim, pool.closed) == (way, 3.0, False)
    assert cumem.Pool("device", fork="copy").fork == "copy"


@pytest.mark.parametrize(
    ("named", "error", "text"),
    [
        ({"fork": "none"}, ValueError, "fork must be 'copy', 'share' or 'omit'"),
        ({"fork": None}, TypeError, "fork must be a str"),
        ({"fork": True}, TypeError, "fork must be a str"),
        ({"kind": "device", "fork": "share"}, ValueError, "pinned and mapped"),
        ({"kind": "managed", "fork": "omit"}, ValueError, "pinned and mapped"),
        ({"fork": "share", "segments": "malloc"}, ValueError, "segments='malloc'"),
        ({"fork": "share", "write_combined": True}, ValueError, "write_combined"),
    ],
)
def test_fork_that_cannot_be_is_refused(runtime, named, error, text) -> None:
    with pytest.raises(error, match=text):
        cumem.Pool(**{"kind": "pinned"} | named)


@pytest.mark.filterwarnings("always:fork='share' uses pages:RuntimeWarning")
def test_share_reports_where_pages_are_small(runtime, monkeypatch, tmp_path) -> None:
    from cumem.pools import pool as pools

    setting = tmp_path / "shmem_enabled"
    monkeypatch.setattr(pools, "_SHARED_PAGES", str(setting))
    for text, reported in {
        "always within_size advise [never] deny force": "never",
        "always within_size advise never [deny] force": "deny",
        "always within_size [advise] never deny force": None,
        "[always] within_size advise never deny force": None,
    }.items():
        setting.write_text(text + "\n")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            cumem.Pool("pinned", fork="share")
        assert len(found) == (reported is not None)
        if reported is not None:
            assert f"says '{reported}'" in str(found[0].message)
            assert found[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cumem.Pool("pinned", fork="omit")
    setting.unlink()
    with pytest.warns(RuntimeWarning, match="pages of 4 KiB.* is not there") as found:
        cumem.Pool("pinned", fork="share")
    # The file that the advice would name does not exist.
    assert "sudo" not in str(found[0].message)


# -- omit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [100, 5 * MIB])
@pytest.mark.parametrize("how", [{}, {"segments": "malloc"}, {"write_combined": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_omitted_memory_cannot_be_touched_by_a_child(
    runtime, kind, how, nbytes
) -> None:
    buffer = made(cumem.Pool(kind, fork="omit", **how), nbytes, 7)
    array = buffer.numpy()
    fork_and_die(lambda: array[0])
    fork_and_die(lambda: array.fill(0))

    def check() -> None:
        for view in memoryview, np.asarray, cumem.Buffer.numpy, bytes:
            with pytest.raises(RuntimeError, match="forked child"):
                view(buffer)
        # The child's own allocations must not end up at addresses of the omitted
        # memory.
        held = [np.empty(MIB, "u1") for _ in range(50)]
        begin, end = array.ctypes.data, array.ctypes.data + nbytes
        assert not any(begin <= each.ctypes.data < end for each in held)

    fork_and_run(check)
    fork_and_die(lambda: fork_in_child_and_touch(array))
    assert (array == 7).all()


def fork_in_child_and_touch(array: np.ndarray) -> None:
    """Fork again and read the array there.

    If a signal ends that process, this one ends by the same signal.
    """
    pid = os.fork()
    if pid == 0:
        array[0]
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        os.kill(os.getpid(), -status)


def own_nbytes_of_child(look: Callable[[], object] = lambda: None) -> int:
    """Return how many bytes a forked child has that its parent does not share.

    The child calls `look` first. After many tests even a child that does nothing changes
    some memory. What a pool adds is therefore the difference from a child that was forked
    before the pool was made.
    """
    reader, writer = os.pipe()

    def check() -> None:
        look()
        rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
        own = sum(int(r.split()[1]) for r in rows if r.startswith("Private_Dirty"))
        os.write(writer, str(own * 1024).encode())

    with open(reader, encoding="ascii") as said:
        try:
            fork_and_run(check)
        finally:
            os.close(writer)
        return int(said.read())


def test_omitted_memory_is_not_copied_at_a_fork(runtime) -> None:
    before = own_nbytes_of_child()
    omitted = made(cumem.Pool("pinned", fork="omit"), 64 * MIB, 1)
    kept = made(cumem.Pool("pinned"), MIB, 2)

    def look() -> None:
        assert (kept.numpy() == 2).all()

    assert own_nbytes_of_child(look) - before < 48 * MIB
    assert (omitted.numpy() == 1).all()


# -- share ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [100, 5 * MIB])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory_is_the_same_on_both_sides(runtime, kind, nbytes) -> None:
    pool = cumem.Pool(kind, fork="share")
    buffer = made(pool, nbytes, 7)
    array = buffer.numpy()

    def check() -> None:
        assert (array == 7).all()
        assert (buffer.numpy() == 7).all()
        target = np.empty(nbytes, "u1")
        cumem.copy(target, buffer)
        assert (target == 7).all()
        array[:] = 9

    fork_and_run(check)
    assert (array == 9).all()
    # The driver's view of the memory must have followed the child's write.
    device = cumem.array(buffer)
    assert (device.to_numpy() == 9).all()
    fork_and_run(lambda: fork_and_run(lambda: array.fill(4)))
    assert (array == 4).all()


def test_shared_memory_is_not_copied_at_a_fork(runtime) -> None:
    before = own_nbytes_of_child()
    shared = made(cumem.Pool("pinned", fork="share"), 64 * MIB, 1)

    def look() -> None:
        assert shared.numpy()[::4096].all()

    assert own_nbytes_of_child(look) - before < 48 * MIB


def addresses(pool: cumem.Pool, count: int, nbytes: int) -> set[int]:
    """Return the addresses of `count` new blocks, which are dropped again at once.

    The pool first notices which blocks have become free, so that a block that may be
    used again is among them if `count` is as large as the number of free places.
    """
    pool.trim(keep="1GiB")
    held = [cumem.empty(nbytes, "u1", kind=pool.kind, pool=pool) for _ in range(count)]
    return {buffer.ptr for buffer in held}


@pytest.mark.parametrize("how", ["killed", "fds closed"])
def test_shared_block_is_not_used_again_while_a_child_lives(runtime, how) -> None:
    pool = cumem.Pool("pinned", fork="share")
    kept, dropped = made(pool, 4 * MIB, 7), made(pool, 4 * MIB, 8)
    place, views = dropped.ptr, [dropped.numpy()]
    before = made(pool, 4 * MIB, 9)
    free_place = before.ptr
    before.free()
    pool.trim(keep="1GiB")

    def live() -> None:
        # Daemons close all file descriptors. Only the pipes of this test stay open.
        if how == "fds closed":
            for fd in os.listdir("/proc/self/fd"):
                if "pipe" not in (link(fd) or "pipe"):
                    os.close(int(fd))
        assert (views[0] == 8).all()

    with child(live) as end:
        views.clear()
        dropped.free()
        found = addresses(pool, 6, 4 * MIB)
        assert place not in found
        # The child does not have this place, which was already free at the fork.
        assert free_place in found
        assert pool.stats().in_flight_nbytes >= 4 * MIB
        pool.trim()
        assert place not in addresses(pool, 6, 4 * MIB)
        end()
        assert place in addresses(pool, 8, 4 * MIB)
    assert (kept.numpy() == 7).all()


def link(fd: str) -> str | None:
    """Return what a file descriptor of this process refers to, or None if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def test_shared_block_waits_for_grandchildren(runtime) -> None:
    pool = cumem.Pool("pinned", fork="share")
    buffer = made(pool, 4 * MIB, 7)
    place = buffer.ptr
    tell, hear = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            signal.alarm(60)
            os.write(tell[1], b"x")
            os.read(hear[0], 1)
        os._exit(0)
    # The child has exited by now, but its own child still runs.
    os.waitpid(pid, 0)
    assert os.read(tell[0], 1) == b"x"
    os.close(tell[1])
    buffer.free()
    assert place not in addresses(pool, 4, 4 * MIB)
    os.write(hear[1], b"x")
    assert os.read(tell[0], 1) == b""  # The pipe is closed when the grandchild exits.
    for end in tell[0], *hear:
        os.close(end)
    wait_for(lambda: place in addresses(pool, 6, 4 * MIB))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds: memory comes back a moment after a process closed
    its pipes.
    """
    from support.session import wait_until

    wait_until(condition)


def test_block_made_after_a_fork_is_used_again_at_once(runtime) -> None:
    pool = cumem.Pool("pinned", fork="share")
    first = made(pool, 4 * MIB, 7)
    with child():
        later = made(pool, 4 * MIB, 8)
        place = later.ptr
        later.free()
        assert place in addresses(pool, 1, 4 * MIB)
    assert first.numpy().any()


def test_pool_of_shared_blocks_ends_while_a_child_has_them(emulated) -> None:
    pool = cumem.Pool("pinned", fork="share")
    buffer = made(pool, 4 * MIB, 7)
    with child(lambda: buffer.numpy().sum()):
        buffer.free()
        pool.close()
        cumem.empty_pinned(1)


def test_child_of_the_bare_exec_lets_go(runtime) -> None:
    """A program that replaces a forked child by `exec` no longer holds the child's
    blocks.
    """
    pool = cumem.Pool("pinned", fork="share")
    buffer = made(pool, 4 * MIB, 7)
    place = buffer.ptr
    tell, hear = os.pipe(), os.pipe()
    for end in tell[1], hear[0]:
        os.set_inheritable(end, True)
    pid = os.fork()
    if pid == 0:
        script = f"import os; os.write({tell[1]}, b'x'); os.read({hear[0]}, 1)"
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", script])
    try:
        # The byte comes from the new program, so `exec` has happened.
        assert os.read(tell[0], 1) == b"x"
        buffer.free()
        assert place in addresses(pool, 2, 4 * MIB)
    finally:
        os.write(hear[1], b"x")
        os.waitpid(pid, 0)
        for end in *tell, *hear:
            os.close(end)


# -- children that come about in other ways ------------------------------------------------


#: Python starts programs by `posix_spawn`, by `vfork`, and by `fork` where a function
#: has to run in the child first.
STARTS: dict[str, Callable[[list[str], int, int], int]] = {
    "posix_spawn": lambda args, give, take: os.posix_spawn(
        args[0],
        args,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, give, 1), (os.POSIX_SPAWN_DUP2, take, 0)],
    ),
    "subprocess": lambda args, give, take: (
        subprocess.Popen(args, stdin=take, stdout=give).pid
    ),
    "subprocess by fork": lambda args, give, take: (
        subprocess.Popen(args, stdin=take, stdout=give, preexec_fn=os.getpid).pid
    ),
}


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_other_program_holds_no_shared_block(runtime, start) -> None:
    pool = cumem.Pool("pinned", fork="share")
    buffer = made(pool, 4 * MIB, 7)
    place = buffer.ptr
    tell, hear = os.pipe(), os.pipe()
    script = "import os; os.write(1, b'x'); os.read(0, 1)"
    pid = start([sys.executable, "-I", "-S", "-c", script], tell[1], hear[0])
    try:
        assert os.read(tell[0], 1) == b"x"
        assert (buffer.numpy() == 7).all()
        buffer.free()
        assert place in addresses(pool, 2, 4 * MIB)
    finally:
        os.write(hear[1], b"x")
        os.waitpid(pid, 0)
        for end in *tell, *hear:
            os.close(end)


@pytest.mark.parametrize("way", ["share", "omit", "copy"])
def test_fork_in_another_thread_is_as_in_the_main_one(runtime, way) -> None:
    pool = cumem.Pool("pinned", fork=way)
    buffer = made(pool, 4 * MIB, 7)
    place = buffer.ptr
    array = buffer.numpy()
    found: list[bool] = []

    def fork() -> None:
        with child(lambda: way == "omit" or array[::4096].all() or os._exit(1)) as end:
            drop()
            found.append(place in addresses(pool, 6, 4 * MIB))
            end()
            found.append(place in addresses(pool, 8, 4 * MIB))

    def drop() -> None:
        nonlocal array
        array = np.zeros(1)
        buffer.free()
        pool.trim(keep="1GiB")

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert found == [way != "share", True]


def test_child_of_a_fork_in_a_block_of_a_pool_leaves_the_block(runtime) -> None:
    """A child that was forked inside `with pool:` reads the blocks that the parent
    made.

    Memory that it would have to ask the driver for is refused with an error.
    """
    for way in "share", "omit", "copy":
        with cumem.Pool("pinned", fork=way) as pool:
            buffer = made(pool, MIB, 7)

            def work(way: str = way, buffer: cumem.Buffer = buffer) -> None:
                if way != "omit":
                    assert (buffer.numpy() == 7).all()
                with pytest.raises(RuntimeError, match="forked child"):
                    cumem.empty_pinned(9)
                pickled = pickle.loads(pickle.dumps(cumem.asbuffer(np.ones(3))))
                assert pickled.numpy().sum() == 3

            fork_and_run(work)
            assert cumem.empty_pinned(9, "u1").nbytes == 9
            del buffer, work
