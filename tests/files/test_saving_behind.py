# SPDX-License-Identifier: Apache-2.0
"""Files that `save_safetensors_async` writes in the background.

A gate holds an emulated stream shut, so that the device cannot copy yet, and a plan of
faults holds or fails the writes of the threads.
"""

from __future__ import annotations

import errno
import gc
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import forks, programs, session, values

import cumem
from cumem.files import raw

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

testing = session.testing
DATA = np.arange(60_000.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


@pytest.fixture(autouse=True)
def no_plan_left() -> Iterator[None]:
    yield
    testing.file_plan()


def saved(path: Path) -> dict[str, Any]:
    """Return the arrays that a file holds."""
    return dict(cumem.load_safetensors(path, kind="host", framework="numpy"))


def names(path: Path) -> list[str]:
    """Return the names of all files beside `path`, temporary ones too."""
    return sorted(os.listdir(path.parent))


# -- what the file holds -----------------------------------------------------------------


def test_ctrl_c_at_the_end_of_the_call_leaves_the_file_to_its_transfer(
    emulated, path, monkeypatch
) -> None:
    begin = raw._write_async

    def interrupted(*args: Any) -> None:
        begin(*args)
        raise KeyboardInterrupt

    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    monkeypatch.setattr(raw, "_write_async", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cumem.save_safetensors_async(path, {"w": cumem.full(3, 5, "f4", "device")})
    monkeypatch.undo()
    # Files are written in the order of the calls.
    other = path.with_name("other.safetensors")
    cumem.save_safetensors_async(other, {"w": np.zeros(1)}).wait()
    assert not reported
    assert saved(path)["w"].tolist() == [5, 5, 5]
    assert names(path) == [path.name, other.name]


def test_the_file_equals_that_of_a_call_that_waits(runtime, path, tmp_path) -> None:
    on_device = cumem.array(DATA)
    grid = on_device.reshape(300, 200)
    tensors = {
        "whole": on_device,
        "view": on_device[10:20],
        "gaps": grid[::3, ::2],
        "turned": grid.T,
        "empty": on_device[:0],
        "scalar": cumem.array(np.float32(7)),
        "plain": np.arange(5, dtype="i2"),
        "back": np.arange(5)[::-1],
        "pinned": cumem.array(DATA, kind="pinned"),
        "managed": cumem.array(DATA, kind="managed"),
    }
    options: dict[str, Any] = {"metadata": {"step": "3"}, "dtypes": {"plain": "BF16"}}
    saving = cumem.save_safetensors_async(path, tensors, **options)
    assert isinstance(saving, cumem.Transfer)
    saving.wait()
    other = cumem.save_safetensors(tmp_path / "b.safetensors", tensors, **options)
    assert path.read_bytes() == other.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    assert names(path) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("host_limit", [0, 1, 480_000, "500 kB", "1 GiB", None])
def test_a_limit_of_host_memory_changes_no_byte(runtime, path, host_limit) -> None:
    tensors = {"a": cumem.array(DATA), "b": cumem.array(-DATA), "c": cumem.array(2.0)}
    cumem.save_safetensors_async(path, tensors, host_limit=host_limit).wait()
    found = saved(path)
    assert (found["a"] == DATA).all()
    assert (found["b"] == -DATA).all()
    assert found["c"] == 2.0


def test_tensors_of_several_devices_are_in_one_file(emulated, path) -> None:
    tensors = {str(i): cumem.full(1000, i, "i4", device=i) for i in (0, 1)}
    cumem.save_safetensors_async(path, tensors).wait()
    assert {name: set(found) for name, found in saved(path).items()} == {
        "0": {0},
        "1": {1},
    }


def test_a_file_without_tensors_is_written(runtime, path) -> None:
    cumem.save_safetensors_async(path, {}, {"a": "b"}).wait()
    assert cumem.read_safetensors_header(path).metadata == {"a": "b"}


def test_the_loaded_metadata_is_kept(runtime, path) -> None:
    cumem.save_safetensors(path, {"a": DATA}, {"by": "me"})
    loaded = cumem.load_safetensors(path)
    cumem.save_safetensors_async(path, loaded).wait()
    assert cumem.read_safetensors_header(path).metadata == {"by": "me"}


# -- order -------------------------------------------------------------------------------


def test_the_call_returns_before_the_device_and_later_changes_are_left_out(
    emulated, path
) -> None:
    stream = cumem.current_stream()
    tensor = cumem.array(DATA)
    cumem.save_safetensors(path, {"a": -DATA})
    with session.rescued(stream), session.gate(stream):
        tensor.fill(5.0, stream=stream)
        saving = cumem.save_safetensors_async(path, {"a": tensor})
        tensor.fill(6.0, stream=stream)
        assert not saving.done
        assert (saved(path)["a"] == -DATA).all()
    saving.wait()
    assert (saved(path)["a"] == 5.0).all()
    assert (values.get(tensor) == 6.0).all()


def test_the_stream_waits_until_all_is_copied_and_not_until_it_is_written(
    emulated, path
) -> None:
    late, stream = cumem.Stream(), cumem.current_stream()
    tensor = cumem.array(DATA)
    tensor.fill(3.0, stream=late)
    late.synchronize()
    testing.file_plan(held=1)
    with session.rescued(late), session.gate(late):
        tensor.fill(4.0, stream=late)
        saving = cumem.save_safetensors_async(path, {"a": tensor})
        assert not stream.done
    stream.synchronize()
    testing.file_await()
    assert not saving.done
    testing.file_open()
    saving.wait()
    assert (saved(path)["a"] == 4.0).all()


def test_a_stream_of_a_with_block_counts_as_current(emulated, path) -> None:
    tensor = cumem.array(DATA)
    with cumem.Stream() as stream, session.rescued(stream), session.gate(stream):
        tensor.fill(8.0, stream=stream)
        saving = cumem.save_safetensors_async(path, {"a": tensor})
        tensor.fill(9.0, stream=stream)
    saving.wait()
    assert (saved(path)["a"] == 8.0).all()


def test_tensors_of_the_host_are_read_before_the_call_returns(emulated, path) -> None:
    stream = cumem.current_stream()
    tensor, plain = cumem.array(DATA), DATA.copy()
    pinned = cumem.array(DATA, kind="pinned")
    with session.rescued(stream), session.gate(stream):
        tensor.fill(1.0, stream=stream)
        saving = cumem.save_safetensors_async(
            path, {"a": tensor, "b": plain, "c": pinned}
        )
        plain[:] = 0
        pinned.numpy()[:] = 0
    saving.wait()
    found = saved(path)
    assert (found["b"] == DATA).all()
    assert (found["c"] == DATA).all()


def test_a_tensor_that_is_dropped_after_the_call_is_saved(emulated, path) -> None:
    stream = cumem.current_stream()
    tensor = cumem.array(DATA)
    with session.rescued(stream), session.gate(stream):
        tensor.fill(2.0, stream=stream)
        saving = cumem.save_safetensors_async(path, {"a": tensor})
        del tensor
        gc.collect()
        other = cumem.empty_device(DATA.shape, DATA.dtype)
        other.fill(3.0, stream=stream)
    saving.wait()
    assert (saved(path)["a"] == 2.0).all()


def test_of_two_files_of_one_name_the_later_call_wins(emulated, path) -> None:
    late = cumem.Stream()
    first, second = cumem.array(DATA), cumem.array(-DATA)
    with session.rescued(late), session.gate(late):
        first.fill(1.0, stream=late)
        one = cumem.save_safetensors_async(path, {"a": first})
        two = cumem.save_safetensors_async(path, {"a": second})
        assert not two.done
    two.wait()
    assert one.done
    assert (saved(path)["a"] == -DATA).all()
    assert names(path) == [path.name]


def test_page_locked_memory_is_free_again_when_the_file_is_written(
    emulated, path
) -> None:
    tensor = cumem.array(DATA)
    before = cumem.stats().kinds["pinned"].live_nbytes
    testing.file_plan(held=1)
    saving = cumem.save_safetensors_async(path, {"a": tensor})
    assert cumem.stats().kinds["pinned"].live_nbytes >= before + DATA.nbytes
    testing.file_open()
    saving.wait()
    assert cumem.stats().kinds["pinned"].live_nbytes == before


# -- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize("host_limit", [0, None])
def test_a_full_disk_leaves_the_old_file(runtime, path, host_limit) -> None:
    cumem.save_safetensors(path, {"a": DATA})
    tensor = cumem.array(-DATA)
    testing.file_plan(nth=1, error=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left") as caught:
        cumem.save_safetensors_async(path, {"a": tensor}, host_limit=host_limit).wait()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert (saved(path)["a"] == DATA).all()
    assert names(path) == [path.name]


def test_a_file_after_one_that_failed_is_written(runtime, path) -> None:
    tensor = cumem.array(DATA)
    testing.file_plan(nth=1, error=errno.EIO)
    failed = cumem.save_safetensors_async(path.with_name("b"), {"a": tensor})
    cumem.save_safetensors_async(path, {"a": tensor}).wait()
    with pytest.raises(OSError, match="Input/output error"):
        failed.wait()
    assert names(path) == [path.name]
    assert (saved(path)["a"] == DATA).all()


def test_a_name_that_is_taken_meanwhile_is_an_error(runtime, path) -> None:
    tensor = cumem.array(DATA)
    testing.file_plan(held=1)
    saving = cumem.save_safetensors_async(path, {"a": tensor})
    path.mkdir()
    testing.file_open()
    with pytest.raises(IsADirectoryError) as caught:
        saving.wait()
    assert caught.value.filename == str(path)
    assert names(path) == [path.name]


def test_what_is_wrong_with_the_path_is_said_at_once(runtime, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cumem.save_safetensors_async(tmp_path / "nowhere" / "a", {"a": DATA})
    with pytest.raises(ValueError, match="index"):
        cumem.save_safetensors_async(tmp_path / "a.json", {"a": DATA})
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match=r"FIFO|regular"):
        cumem.save_safetensors_async(tmp_path / "fifo", {"a": DATA})
    assert names(tmp_path / "a") == ["fifo"]


def test_wrong_arguments_create_no_file(runtime, path) -> None:
    with pytest.raises(TypeError, match="host_limit"):
        cumem.save_safetensors_async(path, {"a": DATA}, host_limit=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host_limit"):
        cumem.save_safetensors_async(path, {"a": DATA}, host_limit=-1)
    with pytest.raises(TypeError, match="mapping"):
        cumem.save_safetensors_async(path, [DATA])  # type: ignore[arg-type]
    assert names(path) == []


def test_a_cancelled_transfer_leaves_no_file(emulated, path) -> None:
    stream = cumem.current_stream()
    tensor = cumem.array(DATA)
    with session.rescued(stream), session.gate(stream):
        tensor.fill(2.0, stream=stream)
        saving = cumem.save_safetensors_async(path, {"a": tensor})
        assert saving.cancel()
        assert names(path) == []
    with pytest.raises(cumem.CancelledError):
        saving.wait()


def test_writing_that_has_begun_cannot_be_cancelled(emulated, path) -> None:
    testing.file_plan(held=1)
    saving = cumem.save_safetensors_async(path, {"a": cumem.array(DATA)})
    testing.file_await()
    assert not saving.cancel()
    testing.file_open()
    saving.wait()
    assert (saved(path)["a"] == DATA).all()


def test_ctrl_c_ends_the_wait_and_not_the_writing(emulated, path) -> None:
    stream = cumem.current_stream()
    tensor = cumem.array(DATA)
    with session.alarm(stream):
        tensor.fill(2.0, stream=stream)
        saving = cumem.save_safetensors_async(path, {"a": tensor})
        saving.wait()
    saving.wait()
    assert (saved(path)["a"] == 2.0).all()


# -- rights ------------------------------------------------------------------------------


def test_the_new_file_gets_the_rights_of_the_old_one_at_the_end(emulated, path) -> None:
    cumem.save_safetensors(path, {"a": DATA})
    path.chmod(0o640)
    testing.file_plan(held=1)
    saving = cumem.save_safetensors_async(path, {"a": cumem.array(DATA)})
    testing.file_await()
    [temporary] = path.parent.glob(".cumem-*.tmp")
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    testing.file_open()
    saving.wait()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_and_its_file_is_replaced(runtime, path, tmp_path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    cumem.save_safetensors_async(link, {"a": cumem.array(DATA)}).wait()
    assert link.is_symlink()
    assert (saved(path)["a"] == DATA).all()


# -- the end of the process --------------------------------------------------------------


def test_a_process_that_exits_finishes_the_file(emulated, path) -> None:
    program = (
        "import numpy as np, cumem\n"
        "tensor = cumem.array(np.arange(1e6))\n"
        f"cumem.save_safetensors_async({str(path)!r}, {{'a': tensor}})"
    )
    done = programs.run("-c", program, CUMEM_BACKEND="emulated")
    assert done.returncode == 0, done.stderr
    assert (saved(path)["a"] == np.arange(1e6)).all()
    assert names(path) == [path.name]


def test_a_forked_child_leaves_the_file_to_its_parent(emulated, path) -> None:
    stream = cumem.current_stream()
    tensor = cumem.array(DATA)
    with session.rescued(stream), session.gate(stream):
        tensor.fill(2.0, stream=stream)
        saving = cumem.save_safetensors_async(path, {"a": tensor})

        def check() -> None:
            with pytest.raises(RuntimeError, match="forked child"):
                saving.wait()

        forks.fork_and_run(check)
        assert len(names(path)) == 1
    saving.wait()
    assert (saved(path)["a"] == 2.0).all()
