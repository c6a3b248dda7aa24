# SPDX-License-Identifier: Apache-2.0
"""Tests of regions that sleep in files, of what stays of the files, and of what fails.

tests/base/test_faults.py has the same with every call of the driver failing.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import faults, session, testing, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Check that a test leaves no file and no plan of faults behind."""
    yield
    testing.file_plan()
    assert os.listdir(tmp_path) == []


def open_files(folder: Path) -> int:
    """Count the descriptors of files that lie in the folder and have no name."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of listdir() is closed
            continue
        count += target.startswith(f"{folder}/") and target.endswith(" (deleted)")
    return count


class Filled:
    """A region with buffers of several sizes, whose contents are known."""

    def __init__(self, *sizes: int, host: Any = "keep") -> None:
        self.region = cumem.Region("weights", host=host)
        self.made = []
        for number, size in enumerate(sizes or (3, 1000, 70_000, 3 * MIB, 20 * MIB, 1)):
            content = np.random.default_rng(number).integers(0, 256, size, "u1")
            buffer = self.region.pool.allocate(size)
            cumem.copy(buffer, content)
            self.made.append((buffer, content))
        self.addresses = [buffer.ptr for buffer, _ in self.made]

    def check(self) -> None:
        assert not self.region.is_asleep
        assert [buffer.ptr for buffer, _ in self.made] == self.addresses
        for buffer, content in self.made:
            assert (values.get(buffer) == content).all()


# -- sleep and wake --------------------------------------------------------------------


def test_region_wakes_from_files_with_the_same_bytes(runtime, tmp_path) -> None:
    filled = Filled()
    for keep in ("file", True, "file"):
        folder = tmp_path if keep == "file" else None
        filled.region.sleep(keep, path=folder)  # type: ignore[arg-type]
        assert filled.region.is_asleep
        assert os.listdir(tmp_path) == []
        assert (open_files(tmp_path) > 0) == (keep == "file")
        filled.region.wake()
        assert open_files(tmp_path) == 0
        filled.check()


def test_region_shares_its_parts_out_among_files(emulated, tmp_path) -> None:
    """A part has 256 MiB, so the long buffer lies in two of them, in two files."""
    filled = Filled(3 * MIB, 270 * MIB, 5)
    filled.region.sleep("file", path=tmp_path)
    filled.region.wake()
    filled.check()


def test_region_sleeps_in_files_under_a_small_pinned_limit(emulated, tmp_path) -> None:
    filled = Filled()
    with cumem.limit("pinned", 10 * MIB):
        with pytest.raises(cumem.OutOfMemoryError) as caught:
            filled.region.sleep()
        assert any(
            "sleep(keep='file', path=" in note for note in caught.value.__notes__
        )
        filled.check()
        filled.region.sleep(keep="file", path=tmp_path)
        assert cumem.stats()["pinned"].reserved_nbytes <= 10 * MIB
        filled.region.wake()
    filled.check()


def test_region_refuses_a_small_pinned_limit_before_anything_moves(emulated) -> None:
    filled = Filled()
    testing.plan_fault(None, 0)  # counts from here on
    with (
        cumem.limit("pinned", 10 * MIB),
        pytest.raises(cumem.OutOfMemoryError, match="limit"),
    ):
        filled.region.sleep()
    for call in ("copy_async", "host_register", "address_unmap"):
        assert testing.fault_count(call) == 0
    filled.check()


def test_region_without_contents_makes_empty_files(runtime, tmp_path) -> None:
    region = cumem.Region("empty")
    region.sleep("file", path=tmp_path)
    region.wake()
    assert open_files(tmp_path) == 0


def test_region_asleep_in_files_forgets_dropped_buffers(emulated, tmp_path) -> None:
    filled = Filled()
    filled.region.sleep("file", path=tmp_path)
    del filled.made[3], filled.addresses[3]
    filled.made.pop(0)[0].free()
    del filled.addresses[0]
    filled.region.wake()
    filled.check()


def test_regions_sleep_in_one_folder_by_tags(emulated, tmp_path) -> None:
    regions = [Filled(), Filled(1000)]
    cumem.sleep("weights", keep="file", path=tmp_path)
    assert all(each.region.is_asleep for each in regions)
    cumem.wake("weights")
    for each in regions:
        each.check()


def test_region_sleeps_where_the_system_cannot_make_files_without_names(
    emulated, tmp_path, monkeypatch
) -> None:
    """There the file gets a name first, which it loses before anything is written."""
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    filled = Filled()
    filled.region.sleep("file", path=tmp_path)
    assert os.listdir(tmp_path) == []
    filled.region.wake()
    filled.check()


# -- the end ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "drop"])
def test_region_that_ends_asleep_closes_its_files(emulated, tmp_path, how) -> None:
    filled = Filled()
    filled.region.sleep("file", path=tmp_path)
    assert open_files(tmp_path) > 0
    if how == "close":
        filled.region.close()
    else:
        del filled.region
    assert open_files(tmp_path) == 0


PROGRAM = """
import sys, threading
from support import testing
import cumem
folder, held = sys.argv[1], int(sys.argv[2])
region = cumem.Region("weights")
buffer = cumem.full(60 << 20, 7, "u1", "device", pool=region.pool)
if held:
    testing.file_plan(held=held)
def run():
    region.sleep("file", path=folder)
    region.wake()
if held:
    threading.Thread(target=run, daemon=True).start()
    testing.file_await()
else:
    region.sleep("file", path=folder)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.hooks
@pytest.mark.parametrize("held", [1, 5, 15, 0, 17])
def test_region_of_a_killed_process_leaves_no_file(tmp_path, held) -> None:
    """The process is killed in call number `held` on its file, or asleep if `held` is
    0. It takes 15 calls to write 60 MiB, so the calls up to 15 are writes, and call 17
    is a read.
    """
    environment = {**os.environ, "CUMEM_BACKEND": "emulated"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(held)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert os.listdir(tmp_path) == []
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def ring() -> None:
    raise session.AlarmError


# -- files that fail -------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EFBIG, 0])
def test_region_stays_awake_if_a_file_cannot_be_written(
    emulated, tmp_path, error
) -> None:
    filled = Filled()
    testing.file_plan()
    filled.region.sleep("file", path=tmp_path)
    calls = testing.file_counts()[0]
    filled.region.wake()
    assert calls >= 6
    for nth in faults.some_of(calls, most=6):
        testing.file_plan(nth=nth, error=error, repeat=True)
        with pytest.raises(OSError) as caught:
            filled.region.sleep("file", path=tmp_path)
        testing.file_plan()
        assert caught.value.errno == (error or errno.EIO)
        assert caught.value.filename == os.fspath(tmp_path)
        assert open_files(tmp_path) == 0
        filled.check()
    filled.region.sleep("file", path=tmp_path)
    filled.region.wake()
    filled.check()


def test_region_writes_on_after_a_short_write(emulated, tmp_path) -> None:
    filled = Filled()
    testing.file_plan(most=100_001)
    filled.region.sleep("file", path=tmp_path)
    filled.region.wake()
    filled.check()


def test_region_stays_asleep_if_a_file_cannot_be_read(emulated, tmp_path) -> None:
    filled = Filled()
    filled.region.sleep("file", path=tmp_path)
    for nth in (1, 4):
        testing.file_plan(nth=nth, error=errno.EIO, repeat=True)
        with pytest.raises(OSError, match="Input/output error") as caught:
            filled.region.wake()
        testing.file_plan()
        assert caught.value.__notes__ == [
            "while reading the contents of region 'weights'"
        ]
        assert filled.region.is_asleep
        assert filled.region.pool.stats().reserved_nbytes == 0
    filled.region.wake()
    filled.check()


def longest_file(folder: Path) -> str:
    """Return the path below /proc of the longest file of a region that sleeps."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and os.readlink(path).startswith(f"{folder}/"):
            found.append((os.stat(path).st_size, path))
    return max(found)[1]


def test_region_stays_asleep_until_told_again_if_a_file_was_changed(
    emulated, tmp_path
) -> None:
    filled = Filled()
    filled.region.sleep("file", path=tmp_path)
    path = longest_file(tmp_path)
    before = os.stat(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    with pytest.raises(
        OSError, match="region 'weights' was written to while"
    ) as caught:
        filled.region.wake()
    assert caught.value.filename == os.fspath(tmp_path)
    assert "call wake() again" in caught.value.__notes__[0]
    assert filled.region.is_asleep
    filled.region.wake()  # the caller knows that no byte was changed
    filled.check()


def test_region_stays_asleep_if_a_file_was_cut(emulated, tmp_path) -> None:
    filled = Filled()
    filled.region.sleep("file", path=tmp_path)
    path = longest_file(tmp_path)
    nbytes = os.stat(path).st_size
    os.truncate(path, 1000)
    for _ in range(2):
        with pytest.raises(OSError, match=f"is 1000 bytes long in place of {nbytes}"):
            filled.region.wake()
        assert filled.region.is_asleep
    filled.region.close()


def test_region_stays_awake_if_the_folder_is_none(emulated, tmp_path) -> None:
    filled = Filled(1000)
    (tmp_path / "file").touch()
    for name, error in (("missing", FileNotFoundError), ("file", NotADirectoryError)):
        folder = tmp_path / name
        with pytest.raises(error) as caught:
            filled.region.sleep("file", path=folder)
        assert caught.value.filename == os.fspath(folder)
        filled.check()
    (tmp_path / "file").unlink()


def test_region_stays_awake_if_a_signal_ends_the_writing(emulated, tmp_path) -> None:
    filled = Filled()
    stream = cumem.Stream()
    with session.alarm(stream):
        filled.made[0][0].fill(9, stream=stream)
        filled.region.sleep("file", path=tmp_path)
    filled.made[0] = (filled.made[0][0], np.full(3, 9, "u1"))
    filled.check()
    assert open_files(tmp_path) == 0

    # The writes are so short that sleep() makes a million of them, and one is
    # interrupted.
    testing.file_plan(most=16)
    with pytest.raises(session.AlarmError), session.on_alarm(ring):
        filled.region.sleep("file", path=tmp_path)
    testing.file_plan()
    filled.check()
    assert open_files(tmp_path) == 0


def test_region_stays_asleep_if_a_signal_ends_the_reading(emulated, tmp_path) -> None:
    filled = Filled()
    filled.region.sleep("file", path=tmp_path)

    testing.file_plan(most=16)
    with pytest.raises(session.AlarmError), session.on_alarm(ring):
        filled.region.wake()
    testing.file_plan()
    assert filled.region.is_asleep
    assert filled.region.pool.stats().reserved_nbytes == 0
    filled.region.wake()
    filled.check()


# -- arguments -------------------------------------------------------------------------


def test_sleep_refuses_wrong_arguments(emulated, tmp_path) -> None:
    region = cumem.Region("weights")
    calls: list[Any] = [region.sleep, lambda **kwargs: cumem.sleep("weights", **kwargs)]
    for sleep in calls:
        with pytest.raises(ValueError, match="keep must be True, False or 'file'"):
            sleep(keep="disk")
        with pytest.raises(TypeError, match="keep='file' needs path="):
            sleep(keep="file")
        with pytest.raises(TypeError, match="path is only for keep='file'"):
            sleep(path=tmp_path)
        with pytest.raises(TypeError, match="path"):
            sleep(keep="file", path=3)
        with pytest.raises(TypeError, match="keep must be true or false"):
            sleep(keep=np.zeros(2))
        assert not region.is_asleep
