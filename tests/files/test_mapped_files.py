# SPDX-License-Identifier: Apache-2.0
"""Copies from and to mapped files, some of which are cut short or mapped twice.

Pages behind the new end of a file cannot be read, so the copy must fail with an
OSError. Two maps of one file show the same bytes at two addresses, and a copy between
them must be as right as one within a map.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.strategies import KINDS

import cumem

# The C core does all of this, so no version of Python or NumPy changes the outcome.
pytestmark = pytest.mark.any_python

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
    """Make a file that a test cuts short.

    Most of it is a hole, which takes no room on the disk.
    """
    path = tmp_path / "doomed"
    np.arange(MIB, dtype="<u4").tofile(path)
    os.truncate(path, LONG)
    return path


def blank(place: str) -> object:
    return values.put(np.zeros(LONG, "u1"), place, "C")


def finish(handles: object) -> None:
    """Wait for the transfers that a call returned, if it returned any."""
    for handle in handles if isinstance(handles, list) else [handles]:
        if handle is not None:
            handle.wait()


def refused(call: Callable[[], object]) -> None:
    """Check that a call fails with EFAULT.

    No local variable here may be the array: pytest shows locals when a test fails, and
    showing the array would read the missing pages.
    """
    code = None
    try:
        finish(call())
    except OSError as error:
        code = error.errno
    assert code == errno.EFAULT


@pytest.mark.parametrize("place", PLACES)
def test_copy_with_progress_reports_all_of_a_file(emulated, path, place) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank(place)
    reported: list[tuple[int, int]] = []
    cumem.copy(
        target, mapped, progress=lambda done, total: reported.append((done, total))
    )
    assert reported[-1] == (LONG, LONG)
    assert reported == sorted(reported)
    assert all(total == LONG for _, total in reported)
    assert (values.get(target) == np.fromfile(path, "u1")).all()


COPIES: list[Callable[[object, np.ndarray], object]] = [
    cumem.copy,
    lambda dst, src: cumem.copy(dst, src, progress=lambda done, total: None),
    cumem.copy_async,
    lambda dst, src: cumem.copy_async(dst, src, stream=cumem.Stream()),
    lambda dst, src: cumem.broadcast([dst], src),
    lambda dst, src: cumem.broadcast_async([dst], src),
    lambda dst, src: cumem.scatter([dst[:MIB], dst[MIB:]], src),
    lambda dst, src: cumem.gather(dst, [src]),
    lambda dst, src: cumem.copy(dst[::-1], src[::-1]),
    lambda dst, src: cumem.copy_many([(dst, src)]),
]


@pytest.mark.parametrize("place", ["device", "pinned", "numpy"])
@pytest.mark.parametrize("call", COPIES)
def test_mapped_file_cut_short_before_is_an_error(
    emulated, doomed, place, call
) -> None:
    mapped = np.memmap(doomed, "u1", "r")
    os.truncate(doomed, MIB)
    target = blank(place)
    refused(lambda: call(target, mapped))


@pytest.mark.parametrize("place", ["device", "managed", "pinned", "numpy"])
@pytest.mark.parametrize("call", COPIES)
def test_mapped_files_of_whole_length_are_copied(emulated, path, place, call) -> None:
    target = blank(place)
    finish(call(target, np.memmap(path, "u1", "r")))
    assert (values.get(target) == np.fromfile(path, "u1")).all()


@pytest.mark.parametrize("place", ["device", "managed", "pinned", "numpy"])
@pytest.mark.parametrize("call", COPIES)
def test_mapped_files_are_written(emulated, doomed, path, place, call) -> None:
    source = values.put(np.fromfile(path, "u1"), place, "C")
    finish(call(np.memmap(doomed, "u1", "r+"), source))
    assert doomed.read_bytes() == path.read_bytes()


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "every third": lambda a: a.view("<u4")[::3],
    "backwards": lambda a: a.view("<u2")[::-1],
    "long rows": lambda a: a.reshape(-1, 256 << 10)[:, 100 : 160 << 10],
    "long rows backwards": lambda a: a.reshape(-1, 256 << 10)[::-1, 100 : 160 << 10],
    "short rows": lambda a: a.reshape(-1, 1024)[:, :700],
    "turned": lambda a: a.view("<u4").reshape(1024, -1).T,
    "far apart": lambda a: a.reshape(-1, 4096)[:, :16],
    "repeated": lambda a: np.broadcast_to(a, (2, LONG)),
    "three axes": lambda a: a.view("<u4").reshape(64, -1, 32)[::-1, 5:, ::2],
}


@pytest.mark.parametrize("place", ["device", "pinned", "numpy"])
@pytest.mark.parametrize("call", [cumem.copy, cumem.copy_async])
@pytest.mark.parametrize("view", VIEWS)
def test_parts_of_a_mapped_file_are_copied(emulated, path, place, call, view) -> None:
    part = VIEWS[view](np.memmap(path, "u1", "r"))
    target = values.put(np.zeros(part.shape, part.dtype), place, "C")
    finish(call(target, part))
    assert (values.get(target) == part).all()


def test_private_mappings_keep_what_was_written_to_them(emulated, path) -> None:
    private = np.memmap(path, "u1", "c")
    private[5] ^= 255
    target = blank("device")
    cumem.copy(target, private)
    assert (values.get(target) == private).all()
    cumem.copy(private, values.put(np.ones(LONG, "u1"), "device", "C"))
    assert private.all()
    assert not np.fromfile(path, "u1").all()


def test_failure_of_a_file_that_nobody_read_is_reported(
    emulated, doomed, monkeypatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda what: reported.append(what.exc_value)
    )
    mapped = np.memmap(doomed, "u1", "r")
    os.truncate(doomed, MIB)
    target = blank("device")
    cumem.copy_async(target, mapped)
    while testing.pending_transfers():
        testing.poll()
    # The failure is reported only when the transfer is dropped, and the memory of `target`
    # would keep the transfer alive.
    del target
    while not reported:
        testing.poll()
    assert [type(error) for error in reported] == [OSError]


def test_parts_before_the_end_of_a_file_arrive(emulated, doomed) -> None:
    mapped = np.memmap(doomed, "u1", "r")
    expected = np.array(mapped)
    parts = [values.put(np.ones(LONG // 4, "u1"), "device", "C") for _ in range(4)]
    os.truncate(doomed, LONG - 2 * MIB)
    handles = cumem.scatter_async(parts, mapped)
    for handle in handles[:3]:
        handle.wait()
    refused(lambda: handles[3])
    for i in range(3):
        begin = i * LONG // 4
        assert (values.get(parts[i]) == expected[begin : begin + LONG // 4]).all()


# -- two maps of one file ----------------------------------------------------------------


def mapped_twice(path: Path, nbytes: int, by: str) -> tuple[Any, Any]:
    """Return two objects, each over its own mapping of the whole file."""
    np.random.default_rng(3).integers(0, 255, nbytes, "u1").tofile(path)
    if by == "memmap":
        return np.memmap(path, "u1", "r+"), np.memmap(path, "u1", "r+")
    if by == "asbuffer":
        made = [cumem.asbuffer(np.memmap(path, "u1", "r+")) for _ in range(2)]
    else:
        with open(path, "r+b") as file:
            maps = [mmap.mmap(file.fileno(), nbytes) for _ in range(2)]
        made = [np.frombuffer(each, "u1") for each in maps]
    return made[0], made[1]


OVERLAPS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "forwards": lambda a, b: (a[4096:], b[:-4096]),
    "backwards": lambda a, b: (a[:-4096], b[4096:]),
    "by a byte": lambda a, b: (a[1:], b[:-1]),
    "turned round": lambda a, b: (a, b[::-1]),
    "strided": lambda a, b: (a[: a.size // 2], b[::2][: a.size // 2]),
}
WAYS: dict[str, Callable[[Any, Any], object]] = {
    "copy": cumem.copy,
    "copy_async": cumem.copy_async,
    "copy_many": lambda dst, src: cumem.copy_many([(dst, src)]),
    "halves": lambda dst, src: cumem.copy_many(
        [(dst[: len(dst) // 2], src[: len(dst) // 2]), (dst[-9:], src[-9:])]
    ),
}


@pytest.mark.parametrize("by", ["memmap", "asbuffer", "mmap"])
@pytest.mark.parametrize("nbytes", [64 << 10, 3 * MIB])
@pytest.mark.parametrize("how", OVERLAPS)
@pytest.mark.parametrize("way", [name for name in WAYS if name != "halves"])
def test_copy_between_two_maps_of_a_file_is_as_within_one(
    emulated, tmp_path, by: str, nbytes: int, how: str, way: str
) -> None:
    one, other = mapped_twice(tmp_path / "twice", nbytes, by)
    dst, src = OVERLAPS[how](one, other)
    expected = np.array(src)
    finish(WAYS[way](dst, src))
    assert np.array_equal(np.asarray(dst), expected)


def test_long_copy_between_two_maps_of_a_file_is_right(emulated, tmp_path) -> None:
    one, other = mapped_twice(tmp_path / "twice", LONG, "memmap")
    for how in OVERLAPS:
        dst, src = OVERLAPS[how](one, other)
        expected = np.array(src)
        cumem.copy(dst, src)
        assert np.array_equal(dst, expected), how
    wide = one.view("f4")
    wide[:] = np.arange(wide.size)
    dst, src = one.view("u4")[100:], other.view("f4")[:-100]
    expected = np.array(src).astype("u4")
    cumem.copy(dst, src, casting="unsafe")
    assert np.array_equal(dst, expected)


def test_pieces_between_two_maps_of_a_file_are_made_in_their_order(
    emulated, tmp_path
) -> None:
    one, other = mapped_twice(tmp_path / "twice", 8 * MIB, "memmap")
    model = np.array(one)
    step = 100_000
    places = [(i * step + 1, (7 - i) * step) for i in range(8)] * 3
    for to, at in places:
        model[to : to + step] = model[at : at + step].copy()
    cumem.copy_many([(one[to : to + step], other[at : at + step]) for to, at in places])
    assert np.array_equal(one, model)


def is_read_whole(dst: object, src: object) -> bool:
    return "read whole first" in cumem.explain(dst, src).why


def test_maps_of_other_bytes_and_other_files_are_not_read_whole_first(
    emulated, tmp_path, path
) -> None:
    one, other = mapped_twice(tmp_path / "twice", 4 * MIB, "memmap")
    assert is_read_whole(one[MIB:], other[:-MIB])
    assert not is_read_whole(one[: 2 * MIB], other[2 * MIB :])
    assert not is_read_whole(one, np.memmap(path, "u1", "r")[: 4 * MIB])
    shifted = np.memmap(tmp_path / "twice", "u1", "r+", offset=2 * MIB)
    assert not is_read_whole(one[: 2 * MIB], shifted)
    assert is_read_whole(one[2 * MIB :], shifted)
    finish(cumem.copy(one[: 2 * MIB], shifted))
    assert np.array_equal(one[: 2 * MIB], one[2 * MIB :])


def test_copy_between_two_views_of_shared_memory_is_as_within_one(emulated) -> None:
    made = shared_memory.SharedMemory(create=True, size=MIB)
    attached = shared_memory.SharedMemory(made.name)
    one = np.ndarray(MIB, "u1", made.buf)
    other = np.ndarray(MIB, "u1", attached.buf)
    one[:] = np.arange(MIB) % 251
    expected = np.array(one[:-5000])
    cumem.copy(other[5000:], one[:-5000])
    assert np.array_equal(one[5000:], expected)
    del one, other
    attached.close()
    made.close()
    made.unlink()
