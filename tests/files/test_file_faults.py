# SPDX-License-Identifier: Apache-2.0
"""What happens when reading or writing a file fails, ends early or is interrupted.

Hooks make the nth call of the operating system fail, or move only a part of the bytes.
After each test, no plan for such faults and no open file may be left.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import faults, session, values

import cumem

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

testing = session.testing
MIB = 1 << 20
LENGTH = 9 * MIB + 77
PLACES = ["device", "pinned", "numpy", "strided", "strided device"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a file of LENGTH random bytes, and return its path."""
    path = tmp_path / "file"
    np.random.default_rng(0).integers(0, 256, LENGTH, "u1").tofile(path)
    return path


@pytest.fixture(autouse=True)
def nothing_left(request) -> Iterator[None]:
    """Check that a test leaves no open file behind, and end its plan of faults."""
    if "runtime" in request.fixturenames:
        request.getfixturevalue("runtime")
        # This opens the driver, which keeps descriptors of its own.
        cumem.zeros(1)
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    testing.file_plan()
    # The device may have opened up to eight descriptors.
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 8


def memory(place: str, length: int = LENGTH) -> object:
    """Return memory of `length` bytes, which lies in this place."""
    if place == "numpy":
        return np.zeros(length, "u1")
    if place == "strided":
        return np.zeros(2 * length, "u1")[::2]
    if place == "strided device":
        return cumem.zeros(2 * length, "u1")[::2]
    return cumem.zeros(length, "u1", place)


def bytes_of(obj: object) -> np.ndarray:
    return values.get(obj)


def directions(path: Path, target: object) -> dict[str, Callable[[], object]]:
    """Return the calls that move a file to `target` and back, through the page cache or
    past it.
    """
    return {
        "read": lambda: cumem.fromfile(path, out=target),
        "direct read": lambda: cumem.fromfile(path, out=target, direct=True),
        "write": lambda: cumem.tofile(path, target),
        "direct write": lambda: cumem.tofile(path, target, direct=True),
    }


# -- each call in turn --------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("direction", ["read", "direct read", "write", "direct write"])
def test_every_file_call_may_fail(emulated, path, place, direction) -> None:
    content = np.fromfile(path, "u1")
    target = memory(place)
    cumem.fromfile(path, out=target)
    run = directions(path, target)[direction]
    testing.file_plan()
    run()
    calls = testing.file_counts()[0]
    assert calls >= {"read": 18, "write": 3}.get(direction, 5)
    # The calls form a loop over chunks, so some calls stand for all: those of the first
    # rounds, some later ones and the last.
    for nth in faults.some_of(calls, most=10):
        testing.file_plan(nth=nth, error=errno.EIO, repeat=True)
        with pytest.raises(OSError, match="Input/output error") as caught:
            run()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == os.fspath(path)
        assert 0 <= caught.value.offset < LENGTH
        assert testing.file_counts()[3] == 0
        assert testing.pending_transfers() == 0
        testing.file_plan()
        run()
        assert (bytes_of(target) == content).all()
        assert (np.fromfile(path, "u1") == content).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("direction", ["read", "direct read", "write", "direct write"])
def test_interrupted_and_short_calls_go_on(emulated, path, place, direction) -> None:
    content = np.fromfile(path, "u1")
    target = memory(place)
    cumem.fromfile(path, out=target)
    run = directions(path, target)[direction]
    plans = [{"nth": nth, "error": errno.EINTR} for nth in (1, 2, 5)]
    plans += [{"most": most} for most in (100_001, 4096, 8192 + 1)]
    for plan in plans:
        # The target is cleared, so that only bytes of this call count.
        if "read" in direction:
            cumem.copy(target, np.zeros(LENGTH, "u1"))
        else:
            os.truncate(path, 0)
        testing.file_plan(**plan)
        run()
        assert testing.file_counts()[0] >= LENGTH // plan.get("most", LENGTH)
        testing.file_plan()
        assert (bytes_of(target) == content).all()
        assert (np.fromfile(path, "u1") == content).all()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EAGAIN, BlockingIOError),
        (errno.ENOSPC, OSError),
        (errno.EACCES, PermissionError),
        (errno.EDQUOT, OSError),
    ],
)
def test_errno_chooses_the_exception(emulated, path, number, kind) -> None:
    testing.file_plan(nth=3, error=number, repeat=True)
    with pytest.raises(kind) as caught:
        cumem.tofile(path, memory("device"))
    assert caught.value.errno == number
    assert caught.value.__notes__ == [f"while writing at offset {caught.value.offset}"]


def test_full_device_is_reported(runtime) -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as caught:
        cumem.tofile("/dev/full", memory("device"))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.offset % (512 << 10) == 0


def no_larger(nbytes: int) -> Callable[[], object]:
    """Limit the size of files to `nbytes`, and return a function that ends the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1000], ids=["none", "for the header"])
@pytest.mark.parametrize("form", ["npy", "npz", "safetensors"])
def test_want_of_room_names_the_file_and_leaves_none(
    emulated, path, form, room
) -> None:
    target = f"{path}.{form}"
    data = memory("device")
    saves: dict[str, Callable[[], object]] = {
        "npy": lambda: cumem.save(target, data),
        "npz": lambda: cumem.savez(target, data, more=data),
        "safetensors": lambda: cumem.save_safetensors(target, {"a": data, "b": data}),
    }
    lift = no_larger(room)
    try:
        with pytest.raises(OSError, match="too large") as caught:
            saves[form]()
    finally:
        lift()
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, target)
    assert not any(str(each).endswith("tmp") for each in os.listdir(path.parent))
    assert not os.path.exists(target)
    saves[form]()
    assert os.path.getsize(target) > 0


def test_a_write_that_moves_nothing_is_an_error(emulated, path) -> None:
    testing.file_plan(nth=2, error=0)
    with pytest.raises(OSError, match="Input/output error"):
        cumem.tofile(path, memory("device"))


# -- the end of the file ------------------------------------------------------------------


def test_a_file_that_is_too_short_is_reported_before_anything_is_read(
    runtime, path
) -> None:
    target = memory("numpy", 100)
    testing.file_plan()
    with pytest.raises(EOFError) as caught:
        cumem.read_ranges(path, [(0, memory("device")), (LENGTH - 60, target)])
    assert str(caught.value) == (
        f"{os.fspath(path)!r} ends early: 60 of the 100 bytes at offset "
        f"{LENGTH - 60} are there"
    )
    assert caught.value.filename == os.fspath(path)
    assert caught.value.offset == LENGTH
    assert testing.file_counts()[0] == 0
    assert not target.any()
    with pytest.raises(EOFError, match=f"0 of the 8 bytes at offset {LENGTH + 5}"):
        cumem.read_ranges(path, [(LENGTH + 5, memory("numpy", 8))])
    with pytest.raises(EOFError, match="'/dev/null' ends early: 0 of the 4 bytes"):
        cumem.fromfile("/dev/null", "u1", 4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_short_while_it_is_read(emulated, path, place, direct) -> None:
    end = 3 * MIB + 5
    failures: list[BaseException] = []
    target = memory(place)

    def read() -> None:
        try:
            cumem.fromfile(path, out=target, direct=direct)
        except EOFError as error:
            failures.append(error)

    testing.file_plan(held=1)
    thread = threading.Thread(target=read)
    thread.start()
    testing.file_await()
    os.truncate(path, end)
    testing.file_open()
    thread.join()
    (failure,) = failures
    assert failure.offset == end
    assert f"{end} of the {LENGTH} bytes at offset 0" in str(failure)
    cumem.fromfile(path, out=target[:end])
    assert (bytes_of(target[:end]) == np.fromfile(path, "u1")).all()


def test_files_without_a_size_are_read_to_their_end(runtime) -> None:
    assert not bytes_of(cumem.fromfile("/dev/zero", "u1", 5 * MIB)).any()
    with pytest.raises(ValueError, match="no size"):
        cumem.fromfile("/dev/zero", "u1")
    expected = Path("/proc/version").read_bytes()
    version = cumem.fromfile("/proc/version", "S1", len(expected))
    assert bytes_of(version).tobytes() == expected
    with pytest.raises(EOFError):
        cumem.fromfile("/proc/version", "u1", len(expected) + 1)


# -- signals ------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["read", "write"])
def test_ctrl_c_ends_the_wait_for_a_stream(emulated, path, direction) -> None:
    stream = cumem.Stream()
    target = cumem.zeros(70 * MIB, "u1")
    long = path.with_name("long")
    cumem.tofile(long, target)
    with session.alarm(stream):
        if direction == "read":
            cumem.fromfile(long, out=target, stream=stream)
        else:
            cumem.tofile(long, target, stream=stream)
    calls = testing.file_counts()[0]
    stream.synchronize()
    # The file was let go: opening the stream's gate starts no further call.
    assert testing.file_counts()[0] == calls
    del target
    cumem.fromfile(path, "u1", stream=stream)


def test_ctrl_c_between_reads_leaves_the_rest_unread(emulated, path) -> None:
    def ring() -> None:
        raise session.AlarmError

    target = memory("numpy")
    # Reads of 16 bytes take half a million calls for each of the hundred ranges, so
    # that the signal comes long before the last call.
    testing.file_plan(most=16)
    with session.on_alarm(ring), pytest.raises(session.AlarmError):
        cumem.read_ranges(path, [(0, target)] * 100)
    testing.file_plan()
    cumem.fromfile(path, out=target)
    assert (target == np.fromfile(path, "u1")).all()
