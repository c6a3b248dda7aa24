# SPDX-License-Identifier: Apache-2.0
"""Tests of what is flushed to the disk, and in what order, before a call returns.

`os.fsync` and `os.replace` are replaced by functions that note the names of the files,
and the tests compare these notes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumem

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

ARRAY = np.arange(64.0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each file that is flushed or renamed, by the name that it has at that
    moment.
    """
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        events.append(f"fsync {'temporary' if name.endswith('.tmp') else name}")

    def noted_replace(old: Any, new: Any) -> None:
        replace(old, new)
        events.append(f"place {Path(new).name}")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return events


CALLS: dict[str, Callable[..., object]] = {
    "tofile": lambda path, **options: cumem.tofile(path, ARRAY, **options),
    "write_ranges": lambda path, **options: cumem.write_ranges(
        path, [(0, ARRAY)], **options
    ),
    "save": lambda path, **options: cumem.save(path, ARRAY, **options),
    "savez": lambda path, **options: cumem.savez(path, ARRAY, b=ARRAY, **options),
    "save_safetensors": lambda path, **options: cumem.save_safetensors(
        path, {"a": ARRAY}, **options
    ),
}
IN_PLACE = ("tofile", "write_ranges")


@pytest.mark.parametrize("call", CALLS)
def test_fsync_flushes_the_file_and_then_its_folder(
    runtime, tmp_path, said, call
) -> None:
    name = "x.npz" if call == "savez" else "x.npy"
    CALLS[call](tmp_path / name, fsync=True)
    if call in IN_PLACE:
        assert said == [f"fsync {name}", f"fsync {tmp_path.name}"]
    else:
        want = ["fsync temporary", f"place {name}", f"fsync {tmp_path.name}"]
        assert said == want


@pytest.mark.parametrize("call", CALLS)
def test_without_fsync_nothing_is_flushed(runtime, tmp_path, said, call) -> None:
    CALLS[call](tmp_path / "x.npz")
    assert not [event for event in said if event.startswith("fsync")]


@pytest.mark.parametrize("call", ["tofile", "write_ranges", "save", "savez"])
def test_fsync_of_an_open_file_flushes_it_alone(runtime, tmp_path, said, call) -> None:
    with (tmp_path / "x").open("w+b") as file:
        CALLS[call](file, fsync=True)
        assert said == ["fsync x"]
        assert os.fstat(file.fileno()).st_size >= ARRAY.nbytes


def test_fsync_of_shards_flushes_them_before_the_index_is_placed(
    runtime, tmp_path, said
) -> None:
    tensors = {"a": ARRAY, "b": ARRAY}
    cumem.save_safetensors(
        tmp_path / "m.safetensors", tensors, max_shard_nbytes=512, fsync=True
    )
    assert said == [
        *["fsync temporary"] * 3,
        "place m-00001-of-00002.safetensors",
        "place m-00002-of-00002.safetensors",
        f"fsync {tmp_path.name}",
        "place m.safetensors.index.json",
        f"fsync {tmp_path.name}",
    ]


def test_fsync_through_a_link_flushes_the_folder_of_the_file(
    runtime, tmp_path, said
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "x")
    cumem.tofile(tmp_path / "link", ARRAY, fsync=True)
    assert said == ["fsync x", "fsync there"]


def test_fsync_of_a_map_of_the_file_that_is_cut_flushes_the_new_one(
    emulated, tmp_path, said
) -> None:
    ARRAY.tofile(tmp_path / "x")
    cumem.tofile(tmp_path / "x", np.memmap(tmp_path / "x", "f8", "r")[::2], fsync=True)
    assert said == ["fsync temporary", "place x", f"fsync {tmp_path.name}"]


@pytest.mark.parametrize("call", CALLS)
def test_fsync_that_fails_is_an_error_and_keeps_what_was_there(
    runtime, tmp_path, monkeypatch, call
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "x.npz"
    path.write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        CALLS[call](path if call != "save" else tmp_path / "y", fsync=True)
    if call not in IN_PLACE:
        assert path.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [path]


def test_file_system_that_flushes_no_folders_is_no_error(
    runtime, tmp_path, monkeypatch
) -> None:
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    for call in CALLS.values():
        call(tmp_path / "x.npz", fsync=True)


def test_array_called_fsync_is_refused(runtime, tmp_path) -> None:
    with pytest.raises(TypeError, match="cannot be an array's name"):
        cumem.savez(tmp_path / "x", fsync=ARRAY)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
