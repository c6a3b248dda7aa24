# SPDX-License-Identifier: Apache-2.0
"""Copies from files that are mapped into memory: with progress, and cut short."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "mapped"
    np.arange(LONG // 4, dtype="<u4").tofile(path)
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
def test_mapped_file_cut_short_before_is_an_error(emulated, path, place, call) -> None:
    mapped = np.memmap(path, "u1", "r")
    target = blank(place)
    os.truncate(path, MIB)
    with pytest.raises(EOFError, match=f"{MIB} of the {LONG} bytes") as caught:
        call(target, mapped)
    assert caught.value.offset == MIB
    assert caught.value.filename == str(path)
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
