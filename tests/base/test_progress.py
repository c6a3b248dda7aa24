# SPDX-License-Identifier: Apache-2.0
"""Tests of `progress=` in all calls that take it, except copy() and Transfer.wait().

Each function below makes one such call, and most tests are run for each function. The tests
hold the stream of the call's memory shut, so that the call has to wait and report.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session, values

import cumem

# No version of Python or NumPy changes what these tests show.
pytestmark = pytest.mark.any_python

NBYTES = 40_000
HALF = NBYTES // 2

#: A function that makes one call, given device memory, a stream, a folder and `progress`.
Call = Callable[[cumem.Buffer, cumem.Stream, Path, Any], object]


def file_of(folder: Path) -> Path:
    """Write a file of NBYTES bytes, and return its path."""
    path = folder / "bytes.bin"
    path.write_bytes(bytes([5]) * NBYTES)
    return path


def checkpoint_of(folder: Path) -> Path:
    """Save two tensors in a file each, and return the path of the checkpoint."""
    tensors = {"a": np.full(HALF, 5, "u1"), "b": np.full(HALF, 5, "u1")}
    return cumem.save_safetensors(folder / "m.safetensors", tensors, max_shard_nbytes=1)


def copy_many(memory, stream, folder, progress) -> None:
    """Copy pairs of ordinary and of pinned memory, and one strided pair."""
    ordinary, pinned = np.full(100, 5, "u1"), cumem.full(100, 5, "u1", "pinned")
    wide = cumem.full(2 * (NBYTES - 200), 5, "u1", "pinned")
    pairs = [
        (memory[:50], ordinary[:50]),
        (memory[100:150], ordinary[50:]),
        (memory[50:100], pinned[:50]),
        (memory[150:200], pinned[50:]),
        (memory[200:], wide[::2]),
    ]
    cumem.copy_many(pairs, stream=stream, progress=progress)


def copy_many_one_way(memory, stream, folder, progress) -> None:
    ordinary = np.full(NBYTES, 5, "u1")
    pairs = [(memory[i::2], ordinary[i::2]) for i in range(2)]
    cumem.copy_many(pairs, stream=stream, progress=progress)


def copy_rows(memory, stream, folder, progress) -> None:
    """Copy rows of ordinary memory: first every second row, then the others."""
    rows = [*range(0, NBYTES, 2), *range(1, NBYTES, 2)]
    source = np.full(NBYTES, 5, "u1")
    cumem.copy_rows(memory, source, src_rows=rows, stream=stream, progress=progress)


def broadcast(memory, stream, folder, progress) -> None:
    targets = [memory[:HALF], memory[HALF:]]
    source = np.full(HALF, 5, "u1")
    cumem.broadcast(targets, source, stream=stream, progress=progress)


def scatter(memory, stream, folder, progress) -> None:
    targets = [memory[:100], memory[100:]]
    source = np.full(NBYTES, 5, "u1")
    cumem.scatter(targets, source, stream=stream, progress=progress)


def gather(memory, stream, folder, progress) -> None:
    sources = [np.full(HALF, 5, "u1"), np.full(HALF, 5, "u1")]
    cumem.gather(memory, sources, stream=stream, progress=progress)


def fromfile(memory, stream, folder, progress) -> None:
    cumem.fromfile(file_of(folder), out=memory, stream=stream, progress=progress)


def read_ranges(memory, stream, folder, progress) -> None:
    ranges = [(0, memory[:HALF]), (HALF, memory[HALF:])]
    cumem.read_ranges(file_of(folder), ranges, stream=stream, progress=progress)


def tofile(memory, stream, folder, progress) -> None:
    cumem.tofile(folder / "out.bin", memory, stream=stream, progress=progress)


def write_ranges(memory, stream, folder, progress) -> None:
    ranges = [(0, memory[:HALF]), (HALF, memory[HALF:])]
    path = folder / "out.bin"
    cumem.write_ranges(path, ranges, stream=stream, progress=progress)


def save_safetensors(memory, stream, folder, progress) -> None:
    path, tensors = folder / "n.safetensors", {"a": memory[:HALF], "b": memory[HALF:]}
    cumem.save_safetensors(path, tensors, max_shard_nbytes=1, progress=progress)


def load_safetensors(memory, stream, folder, progress) -> object:
    path = checkpoint_of(folder)
    return cumem.load_safetensors(path, stream=stream, progress=progress)


#: All of these functions, and those of them that copy between memories.
CALLS = [
    *(copy_many, copy_many_one_way, copy_rows, broadcast, scatter, gather, fromfile),
    *(read_ranges, tofile, write_ranges, save_safetensors, load_safetensors),
]
COPIES = CALLS[:6]


@pytest.fixture(params=CALLS, ids=lambda call: call.__name__)
def call(request) -> Call:
    return request.param


@pytest.fixture
def total(call) -> int:
    """Return the bytes that the call reports. A source that is broadcast counts once."""
    return HALF if call is broadcast else NBYTES


@contextlib.contextmanager
def held() -> Iterator[tuple[cumem.Buffer, cumem.Stream]]:
    """Yield device memory, and a stream that is held shut and still has to fill it."""
    stream = cumem.Stream()
    memory = cumem.zeros(NBYTES, "u1", "device", stream=stream)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        memory.fill(1, stream=stream)
        yield memory, stream
    stream.synchronize()


class StopError(Exception):
    """Raised by a callable to which progress is reported."""


def test_callable_is_called_while_it_waits_and_at_the_end(
    emulated, call, total, tmp_path
) -> None:
    reported: list[tuple[int, int]] = []

    def tell(*args: int) -> None:
        if not reported:
            session.testing.gate_open(stream)
        reported.append(args)

    with held() as (memory, stream):
        made = call(memory, stream, tmp_path, tell)
    assert reported[0] == (0, total)
    assert reported == sorted(reported)
    assert reported[-1] == (total, total)
    # Files are loaded one after the other, so there are reports in between. They are
    # written at the same time, so there may be none.
    assert call is not load_safetensors or len(set(reported)) > 2
    if call in COPIES or call in (fromfile, read_ranges):
        assert (values.get(memory) == 5).all()
    if call in (tofile, write_ranges):
        assert (tmp_path / "out.bin").read_bytes() == bytes([1]) * NBYTES
    if call is load_safetensors:
        assert [(values.get(part) == 5).all() for part in made.values()] == [True] * 2


def test_callable_that_raises_ends_it_as_ctrl_c_does(emulated, call, tmp_path) -> None:
    def stop(done: int, total: int) -> None:
        assert done < total
        raise StopError

    with held() as (memory, stream):
        with pytest.raises(StopError):
            call(memory, stream, tmp_path, stop)
        assert not (tmp_path / "n.safetensors").exists()
        assert not list(tmp_path.glob(".cumem-*"))
    assert session.leftovers(held=1) == {"storages": 1}
    assert set(np.unique(values.get(memory))) <= {1, 5}  # what was queued still runs
    call(memory, stream, tmp_path, None)
    if call in COPIES:
        assert (values.get(memory) == 5).all()


@pytest.fixture
def bars(monkeypatch) -> list[Any]:
    """Replace real bars with ones that record what they show, and return their list."""
    made: list[Any] = []

    class Recorder:
        def __init__(self, title: str) -> None:
            self.title, self.reported, self.closed = title, (0, 0), 0
            made.append(self)

        def __call__(self, *reported: int) -> None:
            self.reported = reported

        def close(self) -> None:
            self.closed += 1

    monkeypatch.setattr("cumem.buffers.progress.Bar", Recorder)
    return made


@pytest.mark.parametrize("answer", [True, False, None])
def test_bar_is_shown_where_it_is_asked_for_and_closed(
    emulated, call, total, tmp_path, bars, answer
) -> None:
    memory = cumem.zeros(NBYTES, "u1", "device")
    call(memory, cumem.Stream(), tmp_path, answer)
    if not answer:
        assert bars == []
        return
    (bar,) = bars
    title = "copy"
    if call in (fromfile, read_ranges, load_safetensors):
        title = "read"
    if call in (tofile, write_ranges, save_safetensors):
        title = "write"
    assert (bar.title, bar.reported, bar.closed) == (title, (total, total), 1)


def test_bar_is_closed_after_ctrl_c(emulated, call, tmp_path, bars) -> None:
    with held() as (memory, stream), session.alarm(stream):
        call(memory, stream, tmp_path, True)
    (bar,) = bars
    assert (bar.reported[0], bar.closed) == (0, 1)
    assert session.leftovers(held=1) == {"storages": 1}


def test_bar_is_closed_after_a_failure(emulated, tmp_path, bars) -> None:
    memory = cumem.zeros(NBYTES + 1, "u1", "device")
    with pytest.raises(EOFError):
        cumem.fromfile(file_of(tmp_path), out=memory, progress=True)
    with pytest.raises(ValueError, match="does not fit"):
        cumem.copy_many([(memory, np.zeros(3, "u1"))], progress=True)
    session.testing.plan_fault("copy_async", 1, 999)
    with pytest.raises(cumem.CudaError):
        cumem.broadcast([memory], np.zeros(NBYTES + 1, "u1"), progress=True)
    session.testing.plan_fault(None, 0)
    assert [bar.closed for bar in bars] == [1, 1, 1]


def test_call_without_bytes_reports_zero_of_zero(emulated, tmp_path) -> None:
    reported: list[tuple[int, int]] = []

    def tell(*args: int) -> None:
        reported.append(args)

    cumem.copy_many([], progress=tell)
    cumem.read_ranges(file_of(tmp_path), [], progress=tell)
    path = cumem.save_safetensors(tmp_path / "m.safetensors", {}, progress=tell)
    cumem.load_safetensors(path, progress=tell)
    cumem.load_safetensors(checkpoint_of(tmp_path), names=[], progress=tell)
    assert reported == [(0, 0)] * 5


@pytest.mark.parametrize("wrong", [1, "yes", object()])
def test_progress_that_is_neither_bool_nor_callable_is_refused(
    emulated, call, tmp_path, wrong
) -> None:
    memory, stream = cumem.zeros(NBYTES, "u1", "device"), cumem.Stream()
    with pytest.raises(TypeError, match="progress must be a bool or a callable"):
        call(memory, stream, tmp_path, wrong)
    assert not (tmp_path / "out.bin").exists()
    assert (values.get(memory) == 0).all()


def test_missing_tqdm_is_known_before_anything_has_begun(
    emulated, call, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    memory, stream = cumem.zeros(NBYTES, "u1", "device"), cumem.Stream()
    with pytest.raises(ImportError, match=r"cumem\[progress\]"):
        call(memory, stream, tmp_path, True)
    assert not (tmp_path / "out.bin").exists()
    assert not (tmp_path / "n.safetensors").exists()
    assert (values.get(memory) == 0).all()


@pytest.mark.parametrize("name", ["copy_many", "broadcast", "scatter", "gather"])
def test_asynchronous_forms_have_handles_instead(emulated, name) -> None:
    ends = [[]] if name == "copy_many" else [[], []]
    with pytest.raises(TypeError, match="progress"):
        getattr(cumem, name + "_async")(*ends, progress=True)


def test_long_copy_of_many_shows_how_far_it_is(emulated) -> None:
    """Progress is also reported while parts of the copy have not begun."""
    nbytes = 24 << 20
    reported: list[tuple[int, int]] = []
    targets = [cumem.zeros(nbytes, "u1", "device") for _ in range(4)]
    source, pinned = np.full(nbytes, 5, "u1"), cumem.full(1000, 5, "u1", "pinned")
    pairs = [(target, source) for target in targets]
    pairs += [(cumem.zeros(1000, "u1", "device"), pinned) for _ in range(3)]
    cumem.copy_many(pairs, progress=lambda *args: reported.append(args))
    assert {total for _, total in reported} == {4 * nbytes + 3000}
    assert reported == sorted(reported)
    assert [done == total for done, total in reported] == [False] * (
        len(reported) - 1
    ) + [True]


def test_long_file_shows_how_far_it_is(emulated, tmp_path) -> None:
    """The memory's stream is shut until the first report, so that the read takes long."""
    nbytes = 8 << 20
    path = tmp_path / "long.bin"
    with open(path, "wb") as file:
        file.truncate(nbytes)
    reported: list[tuple[int, int]] = []
    stream = cumem.Stream()
    memory = cumem.full(nbytes, 1, "u1", "device")
    session.shut(stream)

    def progress(done: int, total: int) -> None:
        reported.append((done, total))
        if len(reported) == 1:
            session.testing.gate_open(stream)

    with session.rescued(stream):
        cumem.fromfile(path, out=memory, stream=stream, progress=progress)
    assert reported == sorted(reported)
    assert {total for _, total in reported} == {nbytes}
    assert reported[0][0] < reported[-1][0] == nbytes
    assert not values.get(memory).any()
