# SPDX-License-Identifier: Apache-2.0
"""Tests of what saving and reading safetensors does to rights, links and other files.

The tests save over existing files, links, FIFOs and indexes, and look at the folder
afterwards: saving must remove or replace nothing that is not its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_safetensors_format import blob, tensor

import cumem
from cumem.files.safetensors import save

ARRAYS = {name: np.full(8, i, "u1") for i, name in enumerate("abc")}
EIGHT: dict[str, Any] = {"max_shard_nbytes": 8}


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Set a umask for the test, and put the old one back."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def loads(path: Path) -> bool:
    loaded = cumem.load_safetensors(path, kind="host")
    return all((loaded[name].numpy() == ARRAYS[name]).all() for name in ARRAYS)


def write_index(path: Path, files: dict[str, str]) -> None:
    path.write_text(json.dumps({"weight_map": files}))


# -- which files may be removed ------------------------------------------------------------


def test_saving_removes_no_file_that_an_index_names_elsewhere(
    emulated, tmp_path
) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    below = folder / "below"
    below.mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "linked").symlink_to(elsewhere)
    name = "m-00001-of-00009.safetensors"
    for place in (below, elsewhere):
        (place / name).write_text("mine")
    write_index(
        folder / "m.safetensors.index.json",
        {"a": f"below/{name}", "b": f"linked/{name}"},
    )
    cumem.save_safetensors(folder / "m.safetensors", ARRAYS, max_shard_nbytes=24)
    assert (below / name).read_text() == "mine"
    assert (elsewhere / name).read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["n-00001-of-00009.safetensors", "m-1-of-9.safetensors", "m.txt"]
)
def test_saving_removes_no_file_of_another_name(emulated, tmp_path, name) -> None:
    (tmp_path / name).write_text("mine")
    write_index(tmp_path / "m.safetensors.index.json", {"a": name})
    cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, **EIGHT)
    assert (tmp_path / name).read_text() == "mine"


def test_saving_removes_no_link_or_folder_that_an_index_names(
    emulated, tmp_path
) -> None:
    shards = [f"m-0000{i}-of-00009.safetensors" for i in range(3)]
    (tmp_path / "kept").write_text("mine")
    (tmp_path / shards[0]).symlink_to("kept")
    (tmp_path / shards[1]).symlink_to("nothing")
    (tmp_path / shards[2]).mkdir()
    write_index(
        tmp_path / "m.safetensors.index.json", {shard: shard for shard in shards}
    )
    cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, **EIGHT)
    assert set(shards) <= set(os.listdir(tmp_path))
    assert (tmp_path / "kept").read_text() == "mine"


def test_saving_believes_no_index_that_is_a_link(emulated, tmp_path) -> None:
    old = "m-00001-of-00009.safetensors"
    (tmp_path / old).write_text("mine")
    write_index(tmp_path / "elsewhere", {"a": old})
    (tmp_path / "m.safetensors.index.json").symlink_to("elsewhere")
    cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, max_shard_nbytes=24)
    assert (tmp_path / old).read_text() == "mine"
    assert (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "m.safetensors.index.json").is_symlink()
    assert loads(tmp_path / "m.safetensors")


def test_file_that_is_no_index_is_kept(emulated, tmp_path) -> None:
    (tmp_path / "m.safetensors.index.json").write_text("mine")
    cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, max_shard_nbytes=24)
    assert (tmp_path / "m.safetensors.index.json").read_text() == "mine"


# -- rights --------------------------------------------------------------------------------


@pytest.mark.parametrize("rights", [0o600, 0o640, 0o604, 0o444])
@pytest.mark.parametrize("options", [{}, EIGHT])
def test_saving_keeps_the_rights_of_what_it_replaces(
    emulated, tmp_path, rights, options
) -> None:
    path = cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, **options)
    for file in tmp_path.iterdir():
        file.chmod(rights)
    assert cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, **options) == path
    assert {mode(file) for file in tmp_path.iterdir()} == {rights}
    assert loads(path)


@pytest.mark.parametrize("mask", [0, 0o027, 0o077])
@pytest.mark.parametrize("options", [{}, EIGHT])
def test_new_files_have_the_rights_that_open_gives(
    emulated, tmp_path, mask, options
) -> None:
    os.umask(mask)
    cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, **options)
    assert {mode(file) for file in tmp_path.iterdir()} == {0o666 & ~mask}


def test_file_is_private_while_it_is_written(emulated, tmp_path, monkeypatch) -> None:
    os.umask(0)
    seen: list[tuple[str, int]] = []
    write = save.write_files

    def look(*args: Any) -> None:
        seen.extend((path.name, mode(path)) for path in tmp_path.iterdir())
        write(*args)

    monkeypatch.setattr(save, "write_files", look)
    for _ in range(2):
        path = cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS)
    assert {rights for name, rights in seen if name != path.name} == {0o600}
    # Each save uses a new temporary name.
    assert len({name for name, _ in seen}) == 3


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a file to another user"
)
def test_saving_keeps_the_owner_of_what_it_replaces(emulated, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS)
    os.chown(path, 12345, 23456)
    path.chmod(0o640)
    cumem.save_safetensors(path, ARRAYS)
    info = path.stat()
    assert (info.st_uid, info.st_gid, mode(path)) == (12345, 23456, 0o640)


def test_group_that_cannot_be_kept_gets_no_rights(
    emulated, tmp_path, monkeypatch
) -> None:
    def refuse(fd: int, uid: int, gid: int) -> None:
        raise PermissionError(errno.EPERM, "no")

    path = cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS)
    path.chmod(0o664)
    stat = os.stat_result
    lstat = os.lstat

    def other_group(name: Any) -> os.stat_result:
        info = lstat(name)
        return stat([*info[:5], info.st_gid + 1, *info[6:]])

    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(os, "lstat", other_group)
    cumem.save_safetensors(path, ARRAYS)
    assert mode(path) == 0o644


def test_saving_keeps_the_access_list_of_what_it_replaces(emulated, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS)
    entries = [(1, 6, -1), (2, 4, 12345), (4, 0, -1), (16, 4, -1), (32, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *e) for e in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"this file system has no access lists: {error}")
    cumem.save_safetensors(path, ARRAYS)
    assert os.getxattr(path, "system.posix_acl_access") == acl
    assert mode(path) == 0o640


# -- links ---------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True])
def test_link_as_target_is_followed(emulated, tmp_path, exists) -> None:
    real = tmp_path / "real"
    real.mkdir()
    target = real / "blob"
    if exists:
        target.write_text("old")
        target.chmod(0o600)
    link = tmp_path / "m.safetensors"
    link.symlink_to("real/blob")
    seen: set[Path] = set()
    cumem.save_safetensors(
        link, ARRAYS, progress=lambda *_: seen.update(tmp_path.rglob("*.tmp"))
    )
    assert os.readlink(link) == "real/blob"
    assert loads(link)
    assert mode(target) == (0o600 if exists else 0o644)
    assert {path.parent for path in seen} == {real}
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "blob",
        "m.safetensors",
        "real",
    ]


def test_link_that_leads_nowhere_is_an_oserror(emulated, tmp_path) -> None:
    link = tmp_path / "m.safetensors"
    link.symlink_to("none/blob")
    with pytest.raises(FileNotFoundError) as caught:
        cumem.save_safetensors(link, ARRAYS)
    assert caught.value.filename == str(link)
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(OSError, match=r"symbolic links.*m\.safetensors"):
        cumem.save_safetensors(link, ARRAYS)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_shards_that_are_links_to_one_file_are_refused(emulated, tmp_path) -> None:
    for i in (1, 3):
        (tmp_path / f"m-0000{i}-of-00003.safetensors").symlink_to("blob")
    with pytest.raises(ValueError, match="lead to one file"):
        cumem.save_safetensors(tmp_path / "m.safetensors", ARRAYS, **EIGHT)
    assert len(os.listdir(tmp_path)) == 2


def test_target_that_is_no_regular_file_is_refused(emulated, tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"FIFO.*m\.safetensors"):
        cumem.save_safetensors(path, ARRAYS)
    assert path.is_fifo()
    assert os.listdir(tmp_path) == ["m.safetensors"]
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(OSError, match=r"not a regular file.*m\.safetensors"):
        cumem.save_safetensors(path, ARRAYS)


def test_shards_replace_nothing_that_is_no_regular_file(emulated, tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    os.mkfifo(path)  # The shards would take the place of this FIFO.
    with pytest.raises(OSError, match=r"FIFO.*m\.safetensors"):
        cumem.save_safetensors(path, ARRAYS, **EIGHT)
    assert path.is_fifo()
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize(
    "name",
    ["m.safetensors", "m-00002-of-00003.safetensors", "m.safetensors.index.json"],
)
def test_what_comes_while_shards_are_written_is_not_replaced(
    emulated, tmp_path, name
) -> None:
    path = tmp_path / "m.safetensors"
    cumem.save_safetensors(path, ARRAYS, max_shard_nbytes=16)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def meanwhile(done: int, total: int) -> None:
        if done == total:
            (tmp_path / name).unlink(missing_ok=True)
            os.mkfifo(tmp_path / name)

    with pytest.raises(OSError, match="FIFO.*" + re.escape(name)):
        cumem.save_safetensors(path, ARRAYS, **EIGHT, progress=meanwhile)
    assert (tmp_path / name).is_fifo()
    (tmp_path / name).unlink()
    before.pop(name, None)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_old_shard_that_became_no_regular_file_is_kept(emulated, tmp_path) -> None:
    path, old = tmp_path / "m.safetensors", tmp_path / "m-00002-of-00002.safetensors"
    cumem.save_safetensors(path, ARRAYS, max_shard_nbytes=16)

    def meanwhile(done: int, total: int) -> None:
        if done == total:
            old.unlink()
            os.mkfifo(old)

    cumem.save_safetensors(path, ARRAYS, **EIGHT, progress=meanwhile)
    assert old.is_fifo()
    assert loads(tmp_path / "m.safetensors.index.json")


def test_tofile_keeps_rights_and_links(emulated, tmp_path) -> None:
    path, link, new = tmp_path / "file", tmp_path / "link", tmp_path / "new"
    path.touch()
    path.chmod(0o600)
    link.symlink_to("file")
    cumem.tofile(link, b"1234")
    assert link.is_symlink()
    assert path.read_bytes() == b"1234"
    assert mode(path) == 0o600
    link.unlink()
    link.symlink_to("new")
    os.umask(0o027)
    cumem.tofile(link, b"1234")
    assert mode(new) == 0o640


# -- what can be read ----------------------------------------------------------------------


def test_descriptors_are_refused_and_stay_open(emulated, tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(blob({"w": tensor()}, bytes(1)))
    fd = os.open(path, os.O_RDONLY)
    try:
        calls: list[Callable[[Any], object]] = [
            cumem.read_safetensors_header,
            cumem.load_safetensors,
            lambda file: cumem.save_safetensors(file, {}),
        ]
        for call in calls:
            for file in (fd, True, str(path).encode()):
                with pytest.raises(TypeError, match="path"):
                    call(file)
        assert os.fstat(fd).st_size == path.stat().st_size
    finally:
        os.close(fd)


def test_readers_refuse_a_fifo(emulated, tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    os.mkfifo(path)
    for call in (cumem.read_safetensors_header, cumem.load_safetensors):
        with pytest.raises(OSError, match=r"FIFO.*m\.safetensors"):
            call(path)
    write_index(tmp_path / "n.safetensors.index.json", {"a": path.name})
    with pytest.raises(OSError, match=r"FIFO.*m\.safetensors"):
        cumem.load_safetensors(tmp_path / "n.safetensors.index.json")
    index = tmp_path / "m.safetensors.index.json"
    os.mkfifo(index)
    with pytest.raises(OSError, match=r"FIFO.*index\.json"):
        cumem.load_safetensors(index)
    # Saving reads the index, because it looks for an earlier checkpoint.
    with pytest.raises(OSError, match="FIFO"):
        cumem.save_safetensors(path, ARRAYS, **EIGHT)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/tty"])
def test_readers_refuse_devices(emulated, name) -> None:
    if not os.path.exists(name):
        pytest.skip("this machine has no such device")
    with pytest.raises(OSError, match=f"not a regular file.*{name}"):
        cumem.read_safetensors_header(name)


# -- headers of several files, and lists of files ----------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Make a checkpoint of three files, and return the path of its index."""
    tensors = {f"w{i}": np.full((4, 2), i, "f8") for i in range(6)}
    return cumem.save_safetensors(
        tmp_path / "m.safetensors", tensors, {"k": "v"}, max_shard_nbytes=128
    )


@pytest.mark.parametrize("by", ["index", "folder"])
def test_header_of_a_checkpoint_has_the_tensors_of_all_files(
    runtime, sharded, by
) -> None:
    header = cumem.read_safetensors_header(sharded if by == "index" else sharded.parent)
    assert header.path == sharded
    assert list(header.tensors) == [f"w{i}" for i in range(6)]
    assert header.metadata == {"k": "v"}
    files = sorted(sharded.parent.glob("*.safetensors"))
    assert header.nbytes == sum(file.stat().st_size for file in files)
    assert sorted(set(header.files.values())) == files
    for i in range(6):
        assert header.tensors[f"w{i}"].shape == (4, 2)
        assert (header.memmap(f"w{i}") == i).all()
    loaded = cumem.load_safetensors(sharded)
    assert loaded.infos == header.tensors


def test_header_of_one_file_has_no_others(runtime, sharded) -> None:
    file = sharded.parent / "m-00001-of-00003.safetensors"
    header = cumem.read_safetensors_header(file)
    assert (header.path, header.files) == (file, {})


def test_header_of_a_checkpoint_with_damage_is_refused(runtime, sharded) -> None:
    texts = json.loads(sharded.read_text())
    texts["weight_map"]["w0"] = texts["weight_map"]["w5"]
    sharded.write_text(json.dumps(texts))
    with pytest.raises(cumem.SafetensorsError, match="no tensor 'w0', as this says"):
        cumem.read_safetensors_header(sharded)
    (sharded.parent / "m-00003-of-00003.safetensors").unlink()
    with pytest.raises(cumem.SafetensorsError, match=r"00003.safetensors is missing"):
        cumem.read_safetensors_header(sharded)


def test_list_of_files_is_loaded_as_one_checkpoint(runtime, sharded) -> None:
    files = sorted(sharded.parent.glob("*.safetensors"))
    forms = [
        files,
        tuple(map(str, files)),
        iter(files),
        sharded.parent.glob("*.safetens*s"),
    ]
    for paths in forms:
        loaded = cumem.load_safetensors(paths, kind="pinned")
        assert sorted(loaded) == [f"w{i}" for i in range(6)]
        for i in range(6):
            assert (loaded[f"w{i}"].numpy() == i).all()
        assert loaded.metadata == {"k": "v"}
    part = cumem.load_safetensors(files, names=["w5", "w0"], kind="pinned")
    assert list(part) == ["w5", "w0"]
    assert (part["w5"].numpy() == 5).all()
    mixed = cumem.save_safetensors(sharded.parent / "x.safetensors", {"x": np.ones(1)})
    assert "x" in cumem.load_safetensors([sharded, mixed])


def test_list_that_is_no_checkpoint_is_refused(runtime, sharded) -> None:
    files = sorted(sharded.parent.glob("*.safetensors"))
    with pytest.raises(ValueError, match="the list has no files"):
        cumem.load_safetensors([])
    with pytest.raises(ValueError, match=r"'w\d' is in two of the files.*one by one"):
        cumem.load_safetensors([*files, files[0]])
    with pytest.raises(KeyError, match="none of the 3 files has a tensor 'no'"):
        cumem.load_safetensors(files, names=["w0", "no"])
    with pytest.raises(TypeError, match="path must be a str or path-like, not int"):
        cumem.load_safetensors([3])  # type: ignore[list-item]
    sharded.unlink()
    with pytest.raises(ValueError, match=r"name one: .*takes a list of files"):
        cumem.load_safetensors(sharded.parent)
