# SPDX-License-Identifier: Apache-2.0
"""NumPy's own files, read and written by cumem for memory of any kind.

The same arrays are saved and loaded by NumPy, and files and values must be equal.
Damaged and truncated files must raise a ValueError that names them.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, testing, values
from support.strategies import (
    KINDS,
    basic_indices,
    dtypes,
    kinds,
    places,
    random_array,
    same_bytes,
    shapes,
)

import cumem
from cumem.files import npy

BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
#: This is longer than one of the pieces in which cumem unpacks an array.
LONG = npy._PIECE + 12344


# -- against NumPy -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_load_reads_what_numpy_saves_and_the_other_way_round(
    backend: str, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs.npy", tmp_path / "ours.npy"
    with session.opened(backend):

        @given(st.data(), kinds, places, dtypes, shapes, st.sampled_from("CF"))
        def check(data, kind, place, dtype, shape, order) -> None:
            whole = np.asarray(random_array(shape, dtype, 2), order=order)
            array = whole[data.draw(basic_indices(shape))]
            np.save(theirs, array)
            loaded = cumem.load(theirs, kind=kind)
            array = np.asarray(array)
            assert (loaded.kind, loaded.shape) == (kind, array.shape)
            assert loaded.dtype == array.dtype
            assert same_bytes(values.get(loaded), array)
            fortran = array.flags.fnc
            assert loaded.flags.fnc == fortran
            cumem.save(ours, values.put(array, place, "F" if fortran else "C"))
            assert ours.read_bytes() == theirs.read_bytes()

        check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_archives_equal_numpys(backend: str, tmp_path: Path) -> None:
    path, plain = tmp_path / "ours.npz", tmp_path / "theirs.npz"
    with session.opened(backend):

        @given(kinds, places, dtypes, shapes, st.booleans(), st.sampled_from("CF"))
        def check(kind, place, dtype, shape, packed, order) -> None:
            array = np.asarray(random_array(shape, dtype, 4), order=order)
            scalar = np.float32(3)
            (np.savez_compressed if packed else np.savez)(plain, array, named=scalar)
            loaded = cumem.load(plain, kind=kind)
            assert loaded.files == [*np.load(plain).files]
            assert loaded["arr_0"].kind == kind
            assert same_bytes(values.get(loaded["arr_0"]), array)
            assert loaded["arr_0"].dtype == array.dtype
            assert loaded["named"].item() == 3
            cumem.savez(path, values.put(array, place, order), named=scalar)
            with np.load(path) as back:
                assert back.files == loaded.files
                assert same_bytes(back["arr_0"], array)
                assert back["arr_0"].flags.fnc == array.flags.fnc

        check()


@pytest.mark.parametrize("kind", KINDS)
def test_archives_have_the_bytes_that_numpy_writes(runtime, tmp_path, kind) -> None:
    long = np.arange(LONG, dtype="u1")
    arrays: dict[str, Any] = {
        "long": long,
        "none": np.empty((3, 0)),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "\N{GREEK SMALL LETTER PI}": np.float32(3),
    }
    apart = long.reshape(4, -1)[:, ::2]
    np.savez(tmp_path / "theirs.npz", apart, **arrays)
    made = {
        name: values.put(np.asarray(array), kind, "F" if name == "fortran" else "C")
        for name, array in arrays.items()
    }
    cumem.savez(
        tmp_path / "ours.npz", values.put(long.reshape(4, -1), kind)[:, ::2], **made
    )
    theirs = (tmp_path / "theirs.npz").read_bytes()
    assert (tmp_path / "ours.npz").read_bytes() == theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direct", ["0", "1"])
def test_archives_are_written_like_ranges_with_right_checksums(
    runtime, tmp_path, monkeypatch, kind, direct
) -> None:
    monkeypatch.setenv("CUMEM_DIRECT", direct)
    array = np.arange(LONG, dtype="u1")
    testing.file_plan(most=300_000)  # most parts take several writes
    cumem.savez(
        tmp_path / "a.npz", values.put(array, kind), values.put(array, kind)[1:]
    )
    count, direct_count, _, _ = testing.file_counts()
    assert count > 2 * LONG // 300_000
    assert (direct_count > 0) == (direct == "1")
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None


def test_an_archive_is_appended_to_a_file(runtime, tmp_path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    with path.open("ab") as file:
        cumem.savez(file, x=cumem.array([1.0, 2.0]))
        assert file.tell() == path.stat().st_size
    assert path.read_bytes().startswith(b"before")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        member = io.BytesIO(archive.read("x.npy"))
    assert np.load(member).tolist() == [1, 2]


def test_an_archive_is_written_to_a_pipe(runtime) -> None:
    array = np.arange(LONG, dtype="u1")
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as pool, open(read, "rb") as source:
        content = pool.submit(source.read)
        with open(write, "wb") as file:
            cumem.savez(file, cumem.array(array), x=array[::-1])
        archive = io.BytesIO(content.result())
    with np.load(archive) as back:  # NumPy verifies the checksums
        assert (back["arr_0"] == array).all()
        assert (back["x"] == array[::-1]).all()


def test_names_that_no_archive_can_hold_are_refused(runtime, tmp_path) -> None:
    with pytest.raises(ValueError, match="70004 bytes"):
        cumem.savez(tmp_path / "a.npz", **{"x" * 70_000: [1]})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_fortran_order_stays(runtime, tmp_path, kind) -> None:
    array = np.asfortranarray(np.arange(24).reshape(2, 3, 4))
    np.save(tmp_path / "a.npy", array)
    loaded = cumem.load(tmp_path / "a.npy", kind=kind)
    assert loaded.strides == array.strides
    assert loaded.tolist() == array.tolist()
    cumem.save(tmp_path / "b.npy", loaded)
    assert (tmp_path / "b.npy").read_bytes() == (tmp_path / "a.npy").read_bytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_long_archives_go_piece_by_piece(runtime, tmp_path, kind, packed) -> None:
    array = np.arange(LONG, dtype="u1").reshape(5, -1)
    path = tmp_path / "long.npz"
    (np.savez_compressed if packed else np.savez)(path, a=array, b=array[::-1])
    loaded = cumem.load(path, kind=kind)
    assert (values.get(loaded["a"]) == array).all()
    assert (values.get(loaded["b"]) == array[::-1]).all()
    cumem.savez(tmp_path / "again", **loaded)
    cumem.savez(tmp_path / "strided", a=loaded["a"][:, ::2])
    # NumPy verifies the checksums.
    with np.load(tmp_path / "again.npz") as back:
        assert (back["a"] == array).all()
    with np.load(tmp_path / "strided.npz") as back:
        assert (back["a"] == array[:, ::2]).all()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_each_version_of_the_header_is_read(runtime, tmp_path, version) -> None:
    name = "\N{GREEK SMALL LETTER PI}\\" if version == (3, 0) else "x"
    array = np.array([(1, 2.5)], [(name, "i4"), ("\xe9", "f8")])
    path = tmp_path / "versioned.npy"
    with path.open("wb") as file, warnings.catch_warnings():
        # Old versions of NumPy cannot read this version of the header, and say so.
        warnings.simplefilter("ignore", UserWarning)
        np.lib.format.write_array(file, array, version)
    assert path.read_bytes()[6:8] == bytes(version)
    loaded = cumem.load(path, kind="pinned")
    assert loaded.dtype == array.dtype
    assert loaded.tolist() == array.tolist()


def test_save_takes_the_version_that_a_dtype_needs(runtime, tmp_path) -> None:
    wide = [(f"field_{number:05}", "i1") for number in range(4000)]
    for dtype, version in (
        ([("x", "i4")], (1, 0)),
        (wide, (2, 0)),
        ([("\N{GREEK SMALL LETTER PI}", "i4")], (3, 0)),
    ):
        array = np.zeros(3, dtype)
        cumem.save(tmp_path / "a.npy", cumem.array(array, kind="pinned"))
        data = (tmp_path / "a.npy").read_bytes()
        assert data[6:8] == bytes(version)
        assert (len(data) - array.nbytes) % 64 == 0
        back = np.load(tmp_path / "a.npy", max_header_size=1 << 20)
        assert back.dtype == array.dtype
        assert (back == array).all()


# -- arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "numpy"])
@pytest.mark.parametrize("order", "CF")
def test_load_fills_memory_that_there_is(runtime, tmp_path, kind, order) -> None:
    array = np.arange(12.0).reshape(3, 4)
    np.save(tmp_path / "a.npy", np.asarray(array, order=order))
    out: Any = values.put(np.zeros((3, 4)), kind)
    assert cumem.load(tmp_path / "a.npy", out=out) is out
    assert (values.get(out) == array).all()
    wide: Any = values.put(np.zeros((3, 8)), kind)
    cumem.load(tmp_path / "a.npy", out=wide[:, ::2])
    assert (values.get(wide)[:, ::2] == array).all()
    assert not values.get(wide)[:, 1::2].any()
    with pytest.raises(ValueError, match="shape"):
        cumem.load(tmp_path / "a.npy", out=out[:2])
    with pytest.raises(ValueError, match="dtype"):
        cumem.load(tmp_path / "a.npy", out=out.view("i8"))
    if kind != "numpy":
        other = "mapped" if kind == "pinned" else "pinned"
        with pytest.raises(ValueError, match=kind):
            cumem.load(tmp_path / "a.npy", kind=other, out=out)


def test_load_reads_open_files_from_their_position_on(runtime, tmp_path) -> None:
    path = tmp_path / "two.npy"
    with path.open("wb") as file:
        file.write(b"before")
        np.save(file, np.arange(3))
        cumem.save(file, cumem.array([[7, 8]], "i2", "pinned"))
    with path.open("rb") as file:
        file.seek(6)
        assert cumem.load(file, kind="pinned").tolist() == [0, 1, 2]
        assert cumem.load(file).tolist() == [[7, 8]]
        assert file.read() == b""


def test_load_and_save_take_a_descriptor_and_leave_its_position(
    runtime, tmp_path
) -> None:
    path = tmp_path / "a.npy"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        cumem.save(fd, cumem.array([1, 2, 3], "i4"))
        assert np.load(path).tolist() == [1, 2, 3]
        assert cumem.load(fd, kind="pinned").tolist() == [1, 2, 3]
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    finally:
        os.close(fd)


def test_archives_are_read_and_written_as_open_files(runtime, tmp_path) -> None:
    path = tmp_path / "a.zip"
    with path.open("wb") as file:
        cumem.savez(file, x=cumem.zeros(3), y=[1, 2])
    with path.open("rb") as file:
        loaded = cumem.load(file, names=["y"], kind="managed")
    assert {name: array.tolist() for name, array in loaded.items()} == {"y": [1, 2]}
    with cumem.load(path) as data:
        assert data["x"].tolist() == [0, 0, 0]
    data.close()


@pytest.mark.parametrize("bad", [io.BytesIO(), io.StringIO(), None, 1.5])
def test_what_is_no_file_is_refused(runtime, bad) -> None:
    for call in (cumem.load, lambda file: cumem.save(file, [1])):
        with pytest.raises(TypeError, match="file must be"):
            call(bad)


def test_load_says_what_to_do_instead_of_mapping(runtime, tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"np\.load\(file, mmap_mode"):
        cumem.load(tmp_path / "a.npy", mmap_mode="r")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"np\.load\(file, allow_pickle=True"):
        cumem.load(tmp_path / "a.npy", allow_pickle=True)  # type: ignore[arg-type]


def test_names_and_out_of_the_other_sort_of_file_are_refused(runtime, tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="names"):
        cumem.load(tmp_path / "a.npy", names=["x"])
    with pytest.raises(ValueError, match="out"):
        cumem.load(tmp_path / "a.npz", out=np.zeros(3))
    with pytest.raises(TypeError, match="names"):
        cumem.load(tmp_path / "a.npz", names="x")
    with pytest.raises(KeyError, match="no array 'y'; there are: x"):
        cumem.load(tmp_path / "a.npz", names=["y"])
    with pytest.raises(ValueError, match="kind"):
        cumem.load(tmp_path / "a.npy", kind="nonsense")  # type: ignore[arg-type]


def test_progress_reports_all_bytes(runtime, tmp_path) -> None:
    array = np.zeros((LONG // 8 + 1), "f8")
    np.savez_compressed(tmp_path / "a.npz", x=array, y=array)
    reported: list[tuple[int, int]] = []
    cumem.load(tmp_path / "a.npz", progress=lambda *now: reported.append(now))
    assert reported[-1] == (2 * array.nbytes, 2 * array.nbytes)
    assert sorted(reported) == reported


def test_save_appends_the_suffix_as_numpy_does(runtime, tmp_path) -> None:
    cumem.save(str(tmp_path / "a"), cumem.zeros(1))
    cumem.save(os.fsencode(tmp_path / "b.npy"), [1.5], fsync=True)
    cumem.savez(tmp_path / "c", cumem.zeros(1))
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.npy", "c.npz"]
    assert np.load(tmp_path / "b.npy").tolist() == [1.5]


def test_savez_refuses_two_arrays_of_one_name(runtime, tmp_path) -> None:
    with pytest.raises(ValueError, match="arr_0"):
        cumem.savez(tmp_path / "c", [1], arr_0=[2])
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("save", [cumem.save, cumem.savez])
def test_a_file_that_cannot_be_written_leaves_the_old_one(
    runtime, tmp_path, save
) -> None:
    path = tmp_path / ("a.npy" if save is cumem.save else "a.npz")
    path.write_bytes(b"old")
    closed = cumem.zeros(3)
    closed.free()
    for bad, error in ((np.array([None]), TypeError), (closed, ValueError)):
        with pytest.raises(error):
            save(path, bad)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]
    save(path, cumem.zeros(3))
    assert path.read_bytes() != b"old"


def test_a_save_whose_copy_fails_leaves_the_old_file(emulated, tmp_path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    buffer = cumem.zeros(1000)
    session.testing.plan_fault("copy_async", 1, 999)
    with pytest.raises(cumem.CudaError):
        cumem.save(path, buffer)
    session.testing.plan_fault(None, 0)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.npy"]


# -- fromfile ----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_fromfile_of_numpys_files_says_load(runtime, tmp_path, suffix) -> None:
    path = tmp_path / f"a{suffix}"
    (np.save if suffix == ".npy" else np.savez)(path, np.arange(3.0))
    with pytest.raises(ValueError, match=r"cumem\.load\(\).*offset=0"):
        cumem.fromfile(path)
    with path.open("rb") as file, pytest.raises(ValueError, match=r"cumem\.load"):
        cumem.fromfile(file, "u1", out=np.zeros(8, "u1"))
    whole = cumem.fromfile(path, "u1", offset=0)
    assert bytes(whole.to_numpy()) == path.read_bytes()
    if suffix == ".npy":
        assert cumem.fromfile(path, offset=128).tolist() == [0, 1, 2]


def test_fromfile_of_a_zip_by_another_name_reads_it(runtime, tmp_path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"PK\x03\x04data")
    assert bytes(cumem.fromfile(path, "u1").to_numpy()) == b"PK\x03\x04data"


# -- damaged -----------------------------------------------------------------------------


def saved(array: np.ndarray) -> bytes:
    """Return the bytes of the .npy file that NumPy writes for the array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_truncated_file_is_an_error_wherever_it_ends(runtime, tmp_path) -> None:
    data = saved(np.arange(10.0))
    path = tmp_path / "short.npy"
    before = cumem.stats().total.allocation_count
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises((EOFError, ValueError), match="short"):
            cumem.load(path)
    assert cumem.stats().total.allocation_count == before
    path.write_bytes(data[:-1])
    with pytest.raises(EOFError, match="79 of the 80 bytes") as caught:
        cumem.load(path)
    assert caught.value.filename == str(path)  # type: ignore[attr-defined]
    assert caught.value.offset == len(data) - 1  # type: ignore[attr-defined]


def npy_bytes(text: str, version: tuple[int, int] = (1, 0)) -> bytes:
    """Return a .npy file without elements, whose header is this text."""
    body = text.encode() + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(body))
    return npy.npy.MAGIC_PREFIX + bytes(version) + length + body


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not an .npy or .npz"),
        (b"\x80\x04pickle", "a pickle, which is not read"),
        (npy_bytes("{}"), "keys"),
        (npy_bytes("nonsense"), "damaged"),
        (npy_bytes("(" * 3000), "damaged"),
        (npy_bytes("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"), "-1"),
        (
            npy_bytes("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"),
            "pickle",
        ),
        (npy_bytes("{}", (9, 9)), "version"),
        (npy.npy.MAGIC_PREFIX + b"\x03\x00\xff\xff", "a.npy"),
        (npy.npy.MAGIC_PREFIX + b"\x03\x00\x02\x00\x00\x00\xff\xff", "a.npy"),
        (npy_bytes("{" + " " * 20_000 + "}"), "header"),
        (b"PK\x03\x04nonsense", "zip"),
    ],
)
def test_a_damaged_file_is_a_value_error_that_names_it(
    runtime, tmp_path, data, match
) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match) as caught:
        cumem.load(path)
    assert "a.npy" in str(caught.value)


def test_an_impossible_size_is_no_memory_error(runtime, tmp_path) -> None:
    path = tmp_path / "a.npy"
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    path.write_bytes(npy_bytes(text))
    with pytest.raises(EOFError, match="ends early"):
        cumem.load(path)


def test_a_damaged_archive_is_a_value_error(runtime, tmp_path) -> None:
    path = tmp_path / "a.npz"
    array = np.arange(1000.0)

    def write(name: str, data: bytes, how: int = zipfile.ZIP_STORED) -> None:
        with zipfile.ZipFile(path, "w", how) as archive:
            archive.writestr(name, data)

    for name, data, match in (
        ("notes.txt", b"hello", "notes.txt is not an array"),
        ("x.npy", saved(array)[:-8], "declares 8000 bytes, but 7992"),
        ("x.npy", saved(array) + b"more", "declares"),
        ("x.npy", npy_bytes("{}"), "x.npy"),
    ):
        for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            write(name, data, how)
            with pytest.raises(ValueError, match=match):
                cumem.load(path)
    np.savez(path, x=np.array([None, "a"], object))
    with pytest.raises(ValueError, match=r"x\.npy: object arrays"):
        cumem.load(path)
    write("x.npy", saved(array), zipfile.ZIP_DEFLATED)
    whole = bytearray(path.read_bytes())
    whole[200] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.npz"):
        cumem.load(path)
    np.savez(path, x=array)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="zip"):
        cumem.load(path)


def test_what_fails_leaves_nothing_allocated(emulated, tmp_path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros(1000), y=np.zeros(1 << 28, "u1"))
    before = cumem.stats().total.live_nbytes
    with pytest.raises(cumem.OutOfMemoryError), cumem.limit("device", "1MiB"):
        cumem.load(path)
    assert cumem.stats().total.live_nbytes == before
