# SPDX-License-Identifier: Apache-2.0
"""Tests of the bytes and the failures of shards that are written at the same time.

A hook holds writes, so that a test can look at a checkpoint of which several files are
half written.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import faults, session, tuning, values

import cumem
from cumem.files.raw import FILES_AT_ONCE

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

testing = session.testing
KIND = ["device", "pinned", "host"]
NBYTES = 3 * (1 << 20) + 17
COUNT = 4


@pytest.fixture(autouse=True)
def with_threads(runtime) -> Iterator[None]:
    """Allow a call eight threads, and end the plan of faults after the test."""
    with tuning.tuned(threads=8):
        yield
    testing.file_plan()


def tensors(kind: str, count: int = COUNT, nbytes: int = NBYTES) -> dict[str, Any]:
    """Make tensors of random bytes. Each is longer than the next one by one byte.

    If the last length is the limit for a shard, each tensor gets a shard of its own.
    """
    rng = np.random.default_rng(7)
    made = {}
    for i in range(count):
        data = rng.integers(0, 256, nbytes + count - i, "u1")
        made[f"t{i}"] = data if kind == "host" else cumem.array(data, kind=kind)
    return made


def save(folder: Path, arrays: dict[str, Any], **options: Any) -> Path:
    """Save each of the arrays in a shard of its own."""
    least = min(array.nbytes for array in arrays.values())
    return cumem.save_safetensors(
        folder / "m.safetensors", arrays, max_shard_nbytes=least, **options
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def expected(tmp_path: Path, arrays: dict[str, Any]) -> list[bytes]:
    """Return the files of the shards, each of which was saved alone."""
    alone = tmp_path / "alone.safetensors"
    found = []
    for name, array in arrays.items():
        cumem.save_safetensors(alone, {name: array})
        found.append(alone.read_bytes())
    alone.unlink()
    return found


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("count", [2, FILES_AT_ONCE, FILES_AT_ONCE + 3])
def test_shards_have_the_bytes_of_files_saved_alone(tmp_path, kind, count) -> None:
    arrays = tensors(kind, count, 70_000)
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder, arrays)
    found = [contents(folder)[name] for name in sorted(os.listdir(folder))]
    assert found[:-1] == expected(tmp_path, arrays)


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("direct", ["0", "1"])
def test_long_and_short_tensors_share_the_shards(
    tmp_path, monkeypatch, kind, direct
) -> None:
    monkeypatch.setenv("CUMEM_DIRECT", direct)
    arrays = tensors(kind)
    arrays |= {f"s{i}": arrays["t0"][i : 3 * i + 5] for i in range(40)}
    arrays["rows"] = arrays["t1"][:600_000].reshape(600, 1000)[::2, 1::3]
    path = save(tmp_path, arrays)
    loaded = cumem.load_safetensors(path, kind="pinned")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (loaded[name].numpy() == values.get(array)).all(), name


def test_each_shard_is_written_by_a_thread_of_its_own(emulated, tmp_path) -> None:
    arrays = tensors("device")
    testing.file_plan(held=1)
    thread = threading.Thread(target=save, args=(tmp_path, arrays))
    thread.start()
    try:
        session.wait_until(
            lambda: testing.file_counts()[0] == COUNT, "a write to each of the files"
        )
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_files(tmp_path)]
        assert len(names) == COUNT
        assert all(name.endswith(".tmp") for name in names)
    finally:
        testing.file_open()
        thread.join()
    assert len(os.listdir(tmp_path)) == COUNT + 1


def open_files(folder: Path) -> list[int]:
    """Return the descriptors that are open for files of the folder."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of listdir() is closed
            continue
        if name.startswith(os.fspath(folder)):
            found.append(fd)
    return found


# -- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KIND)
def test_write_that_fails_names_its_shard_and_leaves_the_old_checkpoint(
    emulated, tmp_path, kind
) -> None:
    arrays = tensors(kind)
    testing.file_plan()
    save(tmp_path, arrays)
    calls = testing.file_counts()[0]
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    save(tmp_path, {"old": np.ones(5, "u1"), "older": np.ones(4, "u1")})
    before = contents(tmp_path)
    for nth in faults.some_of(calls, most=8):
        testing.file_plan(nth=nth, error=errno.EIO, repeat=True)
        with pytest.raises(OSError, match="Input/output error") as caught:
            save(tmp_path, arrays)
        assert caught.value.errno == errno.EIO
        shards = [f"m-{i + 1:05}-of-{COUNT:05}.safetensors" for i in range(COUNT)]
        assert caught.value.filename in [str(tmp_path / shard) for shard in shards]
        assert 0 <= caught.value.offset <= NBYTES + 1000
        assert contents(tmp_path) == before
        assert open_files(tmp_path) == []
        assert testing.pending_transfers() == 0


def test_only_the_shard_that_fails_is_named(emulated, tmp_path) -> None:
    arrays = tensors("device")
    testing.file_plan(held=1)
    failures: list[OSError] = []

    def run() -> None:
        try:
            save(tmp_path, arrays)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    session.wait_until(
        lambda: testing.file_counts()[0] == COUNT, "a write to each of the files"
    )
    # The descriptor of the third file is replaced by one that can only read.
    third = sorted(open_files(tmp_path))[2]
    reads = os.open(f"/proc/self/fd/{third}", os.O_RDONLY)
    os.dup2(reads, third)
    os.close(reads)
    testing.file_open()
    thread.join()
    (failure,) = failures
    assert failure.errno == errno.EBADF
    assert failure.filename == str(tmp_path / f"m-00003-of-{COUNT:05}.safetensors")
    assert os.listdir(tmp_path) == []


def no_larger(nbytes: int) -> Callable[[], object]:
    """Limit the size of files to `nbytes`, and return a function that ends the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, NBYTES + COUNT])
def test_want_of_room_for_one_shard_names_it_and_leaves_none(
    emulated, tmp_path, room
) -> None:
    arrays = tensors("device")
    # The third shard is the longest now, and the only one that does not fit.
    arrays["t2"] = cumem.zeros(2 * NBYTES, "u1")
    lift = no_larger(room + 1000 if room > 0 else 0)
    try:
        with pytest.raises(OSError, match="too large") as caught:
            save(tmp_path, arrays)
    finally:
        lift()
    number = 3 if room > 0 else 1
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(
        tmp_path / f"m-{number:05}-of-{COUNT:05}.safetensors"
    )
    assert os.listdir(tmp_path) == []


def test_ctrl_c_leaves_the_old_checkpoint(emulated, tmp_path) -> None:
    arrays = tensors("device")
    save(tmp_path, arrays)
    before = contents(tmp_path)
    stream = cumem.current_stream()
    with session.alarm(stream):
        arrays["t3"].fill(1)
        save(tmp_path, arrays)
    assert contents(tmp_path) == before
    assert open_files(tmp_path) == []
    save(tmp_path, arrays)


def test_device_that_fails_leaves_the_old_checkpoint(emulated, tmp_path) -> None:
    arrays = tensors("device")
    save(tmp_path, arrays)
    before = contents(tmp_path)
    for nth in (1, 2, 5):
        testing.plan_fault("copy_async", nth, 999)
        with pytest.raises(cumem.CudaError):
            save(tmp_path, arrays)
        testing.plan_fault(None, 0)
        assert contents(tmp_path) == before
        assert open_files(tmp_path) == []


def test_progress_counts_the_bytes_of_all_shards(tmp_path) -> None:
    arrays = tensors("device", FILES_AT_ONCE + 2, 9000)
    told: list[tuple[int, int]] = []
    save(tmp_path, arrays, progress=lambda *both: told.append(both))
    total = sum(array.nbytes for array in arrays.values())
    assert {both[1] for both in told} == {total}
    done = [both[0] for both in told]
    assert done == sorted(done)
    assert done[-1] == total
    # The first shards are written together, and the others after them.
    first = sum(array.nbytes for array in list(arrays.values())[:FILES_AT_ONCE])
    assert first in done
