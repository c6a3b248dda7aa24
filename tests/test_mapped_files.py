# SPDX-License-Identifier: Apache-2.0
"""Copies from files that are mapped into memory: with progress, and cut short."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import session, values
from support.strategies import KINDS

import cumem

testing = session.testing
PLACES = [*KINDS, "numpy"]
MIB = 1 << 20
LONG = 40 * MIB


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a file that nobody changes."""
    path = tmp_path_factory.mktemp("mapped") / "whole"
    np.arange(LONG // 4, dtype="<u4").tofile(path)
    return path


@pytest.fixture
def doomed(tmp_path: Path) -> Path:
    """Make a file to cut: most of it is a hole, which takes no room on the disk."""
    path = tmp_path / "doomed"
    np.arange(MIB, dtype="<u4").tofile(path)
    os.truncate(path, LONG)
    return path


@pytest.fixture(autouse=True)
def plain_calls() -> Iterator[None]:
    """Leave no plan behind."""
    yield
    testing.file_plan()


def blank(place: str) -> object:
    return values.put(np.zeros(LONG, "u1"), place, "C")


@pytest.mark.parametrize("place", PLACES)
def test_copy_with_progress_reads_the_file(emulated, path, place) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank(place)
    told: list[tuple[int, int]] = []
    testing.file_plan()
    cumem.copy(target, mapped, progress=lambda done, total: told.append((done, total)))
    assert testing.file_counts()[0] > 0
    assert told[-1] == (LONG, LONG)
    assert told == sorted(told)
    assert all(total == LONG for _, total in told)
    assert (values.get(target) == np.fromfile(path, "u1")).all()


@pytest.mark.parametrize("place", ["device", "numpy"])
def test_progress_of_a_file_grows_while_it_is_read(emulated, path, place) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank(place)
    told: list[int] = []
    testing.file_plan(most=64)  # hundreds of thousands of calls
    cumem.copy(target, mapped, progress=lambda done, total: told.append(done))
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == LONG


def test_what_is_told_of_a_file_may_end_the_copy(emulated, path) -> None:
    def refuse(done: int, total: int) -> None:
        raise session.AlarmError

    mapped = np.memmap(path, "u1", "r")
    target = blank("numpy")
    testing.file_plan(most=64)
    with pytest.raises(session.AlarmError):
        cumem.copy(target, mapped, progress=refuse)
    testing.file_plan()
    assert not values.get(target)[-MIB:].any()


COPIES: list[Callable[[object, np.ndarray], object]] = [
    cumem.copy,
    lambda dst, src: cumem.copy(dst, src, progress=lambda done, total: None),
    cumem.copy_async,
    lambda dst, src: cumem.copy_async(dst, src, stream=cumem.Stream()),
    lambda dst, src: cumem.broadcast(src, [dst]),
    lambda dst, src: cumem.broadcast_async(src, [dst]),
    lambda dst, src: cumem.scatter(src, [dst[:MIB], dst[MIB:]]),
    lambda dst, src: cumem.gather([src], dst),
    lambda dst, src: cumem.copy(dst[::-1], src[::-1]),
]


@pytest.mark.parametrize("place", ["device", "pinned", "numpy"])
@pytest.mark.parametrize("call", COPIES)
def test_mapped_file_cut_short_before_is_an_error(
    emulated, doomed, place, call
) -> None:
    mapped = np.memmap(doomed, "u1", "r")
    target = blank(place)
    os.truncate(doomed, MIB)
    with pytest.raises(EOFError, match=f"{MIB} of the {LONG} bytes") as caught:
        call(target, mapped)
    assert caught.value.offset == MIB
    assert caught.value.filename == str(doomed)
    assert not values.get(target)[2 * MIB :].any()


@pytest.mark.parametrize("call", COPIES)
def test_mapped_files_of_whole_length_are_copied(emulated, path, call) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank("device")
    handles = call(target, mapped)
    for handle in handles if isinstance(handles, list) else [handles]:
        if handle is not None:
            handle.wait()
    assert (values.get(target) == np.fromfile(path, "u1")).all()


# -- read as files by every other copy ----------------------------------------------------


def finish(handles: object) -> None:
    for handle in handles if isinstance(handles, list) else [handles]:
        if handle is not None:
            handle.wait()


@pytest.mark.parametrize("place", ["device", "managed", "pinned", "numpy"])
@pytest.mark.parametrize("call", COPIES[2:])
def test_other_copies_read_the_file_too(emulated, path, place, call) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank(place)
    testing.file_plan()
    finish(call(target, mapped))
    assert testing.file_counts()[0] > 0
    assert (values.get(target) == np.fromfile(path, "u1")).all()


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "every third": lambda a: a.view("<u4")[::3],
    "backwards": lambda a: a.view("<u2")[::-1],
    "long rows": lambda a: a.reshape(-1, 64 << 10)[:, 100 : 40 << 10],
    "short rows": lambda a: a.reshape(-1, 1024)[:, :700],
    "turned": lambda a: a.view("<u4").reshape(1024, -1).T,
    "far apart": lambda a: a.reshape(-1, 4096)[:, :16],
    "repeated": lambda a: np.broadcast_to(a, (2, LONG)),
    "three axes": lambda a: a.view("<u4").reshape(64, -1, 32)[::-1, 5:, ::2],
}


@pytest.mark.parametrize("place", ["device", "pinned", "numpy"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_parts_of_a_mapped_file_are_copied(
    emulated, path, place, background, view
) -> None:
    part = VIEWS[view](np.memmap(path, "u1", "r"))
    target = values.put(np.zeros(part.shape, part.dtype), place, "C")
    testing.file_plan()
    if background:
        cumem.copy_async(target, part).wait()
    else:
        cumem.copy(target, part)
    # what lies so far apart that nearly all would be read in vain is left to its pages;
    # a device turns what was read as it lies
    apart = view == "far apart" or (view == "turned" and place != "device")
    assert (testing.file_counts()[0] == 0) == apart
    assert (values.get(target) == part).all()


@pytest.mark.parametrize("place", ["device", "pinned", "numpy"])
@pytest.mark.parametrize("call", COPIES[2:])
def test_file_cut_short_meanwhile_is_an_error(emulated, doomed, place, call) -> None:
    mapped = np.memmap(doomed, "u1", "r")
    target = blank(place)
    testing.file_plan(held=3)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: finish(call(target, mapped)))
        testing.file_await()
        os.truncate(doomed, MIB)
        testing.file_open()
        with pytest.raises(EOFError, match="cut short") as caught:
            done.result()
    assert caught.value.offset == MIB
    assert caught.value.filename == str(doomed)
    testing.file_plan()
    other = blank(place)  # the engine goes on
    cumem.copy(other, np.ones(LONG, "u1"))
    assert values.get(other).all()


@pytest.mark.parametrize("place", ["device", "numpy"])
@pytest.mark.parametrize("call", COPIES[2:])
def test_file_that_cannot_be_read_is_an_error(emulated, path, place, call) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank(place)
    testing.file_plan(nth=4, error=errno.EIO, repeat=True)
    with pytest.raises(OSError, match="Input/output error") as caught:
        finish(call(target, mapped))
    assert caught.value.errno == errno.EIO
    testing.file_plan(nth=2, error=errno.EINTR)
    finish(call(target, mapped))
    assert (values.get(target) == np.fromfile(path, "u1")).all()


def test_failure_of_a_file_that_nobody_read_is_told(
    emulated, path, monkeypatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_value))
    mapped = np.memmap(path, "u1", "r")
    target = blank("device")
    testing.file_plan(nth=2, error=errno.EIO, repeat=True)
    cumem.copy_async(target, mapped)
    while testing.pending_transfers():
        testing.poll()
    del target  # which remembers it as well
    while not told:
        testing.poll()
    assert [type(error) for error in told] == [OSError]


def test_descriptors_of_mapped_files_are_closed(emulated, path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    mapped = np.memmap(path, "u1", "r")
    target = blank("device")
    finish(cumem.copy_async(target, mapped))
    before = count()
    for call in COPIES:
        finish(call(target, mapped))
    with pytest.raises(ValueError, match="shape"):
        cumem.copy_async(target[1:], mapped)
    assert count() == before


def cut_meanwhile(path: Path, size: int, call: Callable[[], object]) -> object:
    testing.file_plan(held=3)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
        testing.file_await()
        os.truncate(path, size)
        testing.file_open()
        return done.result()


def test_parts_before_the_end_of_a_file_arrive(emulated, doomed) -> None:
    mapped = np.memmap(doomed, "u1", "r")
    expected = np.array(mapped)
    parts = [values.put(np.ones(LONG // 4, "u1"), "device", "C") for _ in range(4)]
    testing.file_plan(held=3)
    handles = cumem.scatter_async(mapped, parts)
    testing.file_await()
    os.truncate(doomed, LONG - 2 * MIB)
    testing.file_open()
    for handle in handles[:3]:
        handle.wait()
    with pytest.raises(EOFError) as caught:
        handles[3].wait()
    assert caught.value.offset == LONG - 2 * MIB
    for i in range(3):
        begin = i * LONG // 4
        assert (values.get(parts[i]) == expected[begin : begin + LONG // 4]).all()


WAYS: dict[str, Callable[[object, np.ndarray], object]] = {
    "copy": cumem.copy,
    "copy_async": lambda dst, src: cumem.copy_async(dst, src).wait(),
}


@pytest.mark.parametrize("size", [0, MIB, 20 * MIB])
@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_offset_is_where_the_file_ends_now(
    emulated, doomed, size, meanwhile, way
) -> None:
    mapped = np.memmap(doomed, "u1", "r", offset=4 * MIB)
    target = values.put(np.zeros(mapped.shape, "u1"), "device", "C")
    if meanwhile:
        with pytest.raises(EOFError, match=str(doomed)) as caught:
            cut_meanwhile(doomed, size, lambda: WAYS[way](target, mapped))
    else:
        os.truncate(doomed, size)
        with pytest.raises(EOFError, match=str(doomed)) as caught:
            WAYS[way](target, mapped)
    assert caught.value.offset == size
    assert caught.value.filename == str(doomed)


def test_copies_under_way_hold_few_descriptors(emulated, path) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank("device")
    before = len(list(Path("/proc/self/fd").iterdir()))
    testing.file_plan(held=1)
    handles = [cumem.copy_async(target, mapped) for _ in range(70)]
    held = len(list(Path("/proc/self/fd").iterdir()))
    testing.file_open()
    finish(handles)
    assert before + 64 >= held > before + 32
    assert (values.get(target) == np.fromfile(path, "u1")).all()
