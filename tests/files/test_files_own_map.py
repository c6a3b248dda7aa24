# SPDX-License-Identifier: Apache-2.0
"""Files that are written from, or read into, a memory map of themselves.

Writing such a file could change the bytes that are still to be read. Each test makes a
map in one of several ways, and expects the bytes that the map showed before the call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumem

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

COUNT = 1 << 18
WHOLE = np.arange(COUNT, dtype="<u4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a file of 1 MiB whose elements are all different."""
    path = tmp_path / "whole.bin"
    WHOLE.tofile(path)
    return path


def by_memmap(path: Path) -> np.ndarray:
    return np.memmap(path, "<u4", "r+")


def by_private_memmap(path: Path) -> np.ndarray:
    return np.memmap(path, "<u4", "c")


def by_mmap(path: Path) -> np.ndarray:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), "<u4")


def by_memoryview(path: Path) -> np.ndarray:
    with path.open("r+b") as file:
        return np.asarray(memoryview(mmap.mmap(file.fileno(), 0)).cast("I"))


def by_buffer(path: Path) -> Any:
    return cumem.asbuffer(np.memmap(path, "<u4", "r+"))


def by_registered(path: Path) -> Any:
    return cumem.register(np.memmap(path, "<u4", "r+")).buffer


def by_torch(path: Path) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_file(os.fspath(path), True, COUNT, dtype=torch.int32).numpy()


def by_hard_link(path: Path) -> np.ndarray:
    """Return a map of the file under a second name."""
    other = path.with_name("other.bin")
    os.link(path, other)
    return np.memmap(other, "<u4", "r+")


def by_two_maps(path: Path) -> np.ndarray:
    """Return a map that the kernel keeps as two, because the first pages of the map
    have other flags than the rest.
    """
    with path.open("r+b") as file:
        made = mmap.mmap(file.fileno(), 0)
    made.madvise(mmap.MADV_DONTDUMP, 0, mmap.PAGESIZE * 16)
    return np.frombuffer(made, "<u4")


MAPS = [
    by_memmap,
    by_private_memmap,
    by_mmap,
    by_memoryview,
    by_buffer,
    by_registered,
    by_torch,
    by_hard_link,
    by_two_maps,
]
VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda m: m[:],
    "backwards": lambda m: m[::-1],
    "turned": lambda m: m.reshape(1 << 9, 1 << 9).T,
    "all but the first": lambda m: m[1:],
    "every second": lambda m: m[::2],
    "the second half": lambda m: m[COUNT // 2 :],
    "a few": lambda m: m[1000:1010],
}


def of(view: Callable[[Any], Any]) -> np.ndarray:
    return np.array(view(WHOLE)).ravel()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("mapped", MAPS)
def test_tofile_from_a_map_of_the_file_writes_what_the_map_showed(
    emulated, path, mapped, view
) -> None:
    source = mapped(path)
    cumem.tofile(path, view(source))
    assert (np.fromfile(path, "<u4") == of(view)).all()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("mapped", MAPS)
def test_write_ranges_from_a_map_of_the_file_writes_what_the_map_showed(
    emulated, path, mapped, view
) -> None:
    parts = of(view)
    cumem.write_ranges(path, [(8, view(mapped(path)))])
    want = WHOLE.tobytes()[:8] + parts.tobytes()
    want += WHOLE.tobytes()[len(want) :]
    assert path.read_bytes() == want


@pytest.mark.parametrize("opened", ["path", "str", "descriptor", "file", "link"])
def test_tofile_from_a_map_by_any_name_writes_what_the_map_showed(
    emulated, path, opened
) -> None:
    source = np.memmap(path, "<u4", "r")
    with contextlib.ExitStack() as stack:
        target: Any = path
        if opened == "str":
            target = os.fspath(path)
        if opened == "link":
            target = path.with_name("link")
            target.symlink_to(path)
        if opened in ("file", "descriptor"):
            target = stack.enter_context(path.open("r+b"))
        if opened == "descriptor":
            target = target.fileno()
        cumem.tofile(target, source[::-1])
    assert (np.fromfile(path, "<u4") == WHOLE[::-1]).all()


def test_tofile_that_cuts_a_map_of_the_file_leaves_the_map_whole(
    emulated, path
) -> None:
    source = np.memmap(path, "<u4", "r")
    mode = path.stat().st_mode
    cumem.tofile(path, source[-10:])
    assert (np.fromfile(path, "<u4") == WHOLE[-10:]).all()
    # A new file has taken the place of the old one, whose pages the map still has.
    assert (source == WHOLE).all()
    assert path.stat().st_mode == mode


def test_write_ranges_that_swaps_halves_of_a_map_swaps_them(emulated, path) -> None:
    source = np.memmap(path, "<u4", "r")
    half = COUNT // 2
    cumem.write_ranges(path, [(0, source[half:]), (half * 4, source[:half])])
    want = np.concatenate([WHOLE[half:], WHOLE[:half]])
    assert (np.fromfile(path, "<u4") == want).all()


def test_write_ranges_behind_what_the_map_shows_appends(emulated, path) -> None:
    source = np.memmap(path, "<u4", "r")
    cumem.write_ranges(path, [(WHOLE.nbytes, source)])
    assert (np.fromfile(path, "<u4") == np.tile(WHOLE, 2)).all()


@pytest.mark.parametrize("mapped", [by_memmap, by_mmap, by_buffer, by_hard_link])
def test_fromfile_into_a_map_of_the_file_reads_what_the_file_held(
    emulated, path, mapped
) -> None:
    target = mapped(path)
    cumem.fromfile(path, offset=4, out=target[: COUNT - 1])
    want = np.concatenate([WHOLE[1:], WHOLE[-1:]])
    assert (np.fromfile(path, "<u4") == want).all()


def test_read_ranges_into_a_map_of_the_file_turns_it_round(emulated, path) -> None:
    target = np.memmap(path, "<u4", "r+")
    cumem.read_ranges(path, [(0, target[::-1])])
    assert (np.fromfile(path, "<u4") == WHOLE[::-1]).all()


def test_load_into_a_map_of_the_file_reads_what_the_file_held(
    emulated, tmp_path
) -> None:
    path = tmp_path / "a.npy"
    np.save(path, WHOLE)
    target = np.load(path, mmap_mode="r+")
    cumem.load(path, out=target[::-1])
    assert (np.load(path) == WHOLE[::-1]).all()


@contextlib.contextmanager
def over(path: Path) -> Iterator[Any]:
    with path.open("r+b") as file:
        yield file


def test_save_over_an_open_file_from_a_map_of_it_writes_what_the_map_showed(
    emulated, path
) -> None:
    with over(path) as file:
        cumem.save(file, np.memmap(path, "<u4", "r")[::-1])
    assert (np.load(path) == WHOLE[::-1]).all()


def test_savez_over_an_open_file_from_maps_of_it_writes_what_they_showed(
    emulated, path
) -> None:
    source = np.memmap(path, "<u4", "r")
    with over(path) as file:
        cumem.savez(file, a=source[::-1], b=source)
    with np.load(path) as saved:
        assert (saved["a"] == WHOLE[::-1]).all()
        assert (saved["b"] == WHOLE).all()


def test_save_safetensors_from_maps_of_the_file_writes_what_they_showed(
    emulated, tmp_path
) -> None:
    path = tmp_path / "a.safetensors"
    cumem.save_safetensors(path, {"a": WHOLE, "b": WHOLE[::-1]})
    header = cumem.read_safetensors_header(path)
    cumem.save_safetensors(
        path, {"b": header.memmap("a"), "a": header.memmap("b")[: COUNT // 2]}
    )
    loaded = cumem.load_safetensors(path, framework="numpy")
    assert (loaded["b"] == WHOLE).all()
    assert (loaded["a"] == WHOLE[::-1][: COUNT // 2]).all()


def test_tofile_of_shared_memory_to_its_own_file_writes_what_it_showed(
    emulated,
) -> None:
    memory = shared_memory.SharedMemory(create=True, size=WHOLE.nbytes)
    try:
        source = np.frombuffer(memory.buf, "<u4")
        source[:] = WHOLE
        cumem.tofile(f"/dev/shm/{memory.name}", source[::-1])
        assert (source == WHOLE[::-1]).all()
        del source
    finally:
        memory.close()
        memory.unlink()


def test_tofile_from_a_map_that_fails_has_written_nothing(
    emulated, path, monkeypatch
) -> None:
    def refuse(*arguments: object) -> Any:
        raise MemoryError

    source = np.memmap(path, "<u4", "r")
    monkeypatch.setattr("cumem.files.raw._stage", refuse)
    with pytest.raises(MemoryError):
        cumem.tofile(path, source[::-1])
    assert (np.fromfile(path, "<u4") == WHOLE).all()
