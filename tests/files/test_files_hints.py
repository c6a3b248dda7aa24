# SPDX-License-Identifier: Apache-2.0
"""For files that a reader cannot read, the error says what they are and what to do.

The tests write files of other formats, such as pointers of Git LFS or archives of
PyTorch, and match the message of each reader.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumem

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 12345\n"
)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


READERS: dict[str, Callable[[Path], object]] = {
    "a.safetensors": cumem.load_safetensors,
    "b.safetensors": cumem.read_safetensors_header,
    "c.safetensors.index.json": cumem.load_safetensors,
    "d.npy": cumem.load,
    "e.npz": cumem.load,
    "f.bin": lambda path: cumem.fromfile(path, "f4"),
    "g.bin": lambda path: cumem.fromfile(path),
    "h.bin": lambda path: cumem.fromfile(path, "u1"),
    "i.bin": lambda path: cumem.fromfile(path, "f4", out=np.empty(4, "f4")),
    "j.bin": lambda path: cumem.fromfile(path, "f4", shape=(3, 4)),
    "k.bin": lambda path: list(cumem.chunks(path)),
    "l.npy": lambda path: list(cumem.chunks(path)),
    "m.safetensors": lambda path: list(cumem.chunks(str(path))),
    "n.bin": lambda path: cumem.pipeline(lambda *_: None, path),
}


@pytest.mark.parametrize("name", READERS)
def test_git_lfs_pointer_is_named_by_every_reader(emulated, tmp_path, name) -> None:
    path = written(tmp_path / name, LFS)
    with pytest.raises(ValueError, match=r"Git LFS pointer.*git lfs pull") as caught:
        READERS[name](path)
    assert str(path) in str(caught.value)


def test_git_lfs_pointer_among_the_files_of_an_index_is_named(
    emulated, tmp_path
) -> None:
    index = cumem.save_safetensors(
        tmp_path / "m.safetensors",
        {"a": np.ones(2), "b": np.ones(2)},
        max_shard_nbytes=16,
    )
    written(tmp_path / "m-00002-of-00002.safetensors", LFS)
    with pytest.raises(cumem.SafetensorsError, match=r"00002.*git lfs pull"):
        cumem.load_safetensors(index)


def test_git_lfs_pointer_is_read_as_bytes_where_that_is_meant(
    emulated, tmp_path
) -> None:
    path = written(tmp_path / "a", LFS)
    got = cumem.fromfile(path, "u1", offset=0, kind="pinned")
    assert bytes(got.numpy()) == LFS


def npy() -> bytes:
    """Return the bytes of a small .npy file."""
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


def safetensors(tmp_path: Path) -> bytes:
    return cumem.save_safetensors(tmp_path / "made", {"a": np.ones(3)}).read_bytes()


def archive() -> bytes:
    """Return the bytes of an archive that looks like those of torch.save()."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps({}))
    return file.getvalue()


#: Each entry has the contents of a file of another format, and what the error must say.
OTHERS: list[tuple[bytes, str]] = [
    (gzip.compress(npy()), "gzip.*gunzip"),
    (bz2.compress(npy()), "bunzip2"),
    (pickle.dumps([1, 2]), r"pickle.*torch\.load"),
    (b"<!DOCTYPE html><html>Not found</html>", "web page.*download"),
    (b"\n<html><body>403</body></html>", "web page"),
    (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
    (b"\x89HDF\r\n\x1a\n" + bytes(100), "h5py"),
]


@pytest.mark.parametrize(("content", "text"), OTHERS)
def test_file_of_another_sort_is_named(emulated, tmp_path, content, text) -> None:
    path = written(tmp_path / "x.npy", content)
    with pytest.raises(ValueError, match=text):
        cumem.load(path)
    path = written(tmp_path / "x.safetensors", content)
    with pytest.raises(cumem.SafetensorsError, match=text):
        cumem.load_safetensors(path)


#: By its name, each of these files could hold plain elements, but its contents have a
#: format.
STRUCTURED: list[tuple[str, Callable[[Path], bytes], str]] = [
    ("x.bin", lambda _: b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
    ("x.dat", lambda _: b"\x89HDF\r\n\x1a\n" + bytes(100), "h5py"),
    ("x.raw", lambda _: b"ARROW1\0\0" + bytes(100), "pyarrow"),
    ("x.model", safetensors, r"load_safetensors\(\) reads"),
    ("x.pt", lambda _: archive(), r"torch\.load"),
]


@pytest.mark.parametrize(("name", "make", "text"), STRUCTURED)
def test_file_with_a_format_is_not_read_as_elements(
    emulated, tmp_path, name, make, text
) -> None:
    path = written(tmp_path / name, make(tmp_path))
    with pytest.raises(ValueError, match=text + ".*dtype='u1' and offset=0"):
        cumem.fromfile(path, "f4")
    with pytest.raises(ValueError, match=text + r".*np\.memmap\(path"):
        list(cumem.chunks(path))
    size = path.stat().st_size
    assert cumem.fromfile(path, "u1").nbytes == size
    assert cumem.fromfile(path, "i1", offset=0).nbytes == size
    assert [len(c) for _, c in cumem.chunks(np.memmap(path, "u1", "r"))] == [size]


@pytest.mark.parametrize("content", [b"", bytes(200), pickle.dumps([1]), b"<html>"])
def test_chunks_of_what_only_is_called_npy_gives_no_bytes(
    emulated, tmp_path, content
) -> None:
    path = written(tmp_path / "x.npy", content)
    with pytest.raises(ValueError, match=r"is not an \.npy file, but"):
        list(cumem.chunks(path))
    # In a file with another suffix, these bytes may well be elements.
    other = written(tmp_path / "x.dat", content)
    assert sum(len(c) for _, c in cumem.chunks(other)) == len(content)


def test_file_of_pytorch_names_what_reads_it(emulated, tmp_path) -> None:
    path = written(tmp_path / "x.pt", archive())
    with pytest.raises(ValueError, match=r"saved by PyTorch: torch\.load"):
        cumem.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"Invalid username or password.",
        b'{"error":"Repository not found"}',
        b"# xet version 0\nfilesize = 1\n",
    ],
)
def test_text_in_place_of_tensors_is_shown(emulated, tmp_path, content) -> None:
    path = written(tmp_path / "x.safetensors", content)
    begin = content[:15].decode().replace("{", r"\{")
    with pytest.raises(cumem.SafetensorsError, match=f"a text that begins '{begin}"):
        cumem.load_safetensors(path)


def test_load_of_json_names_what_reads_an_index(emulated, tmp_path) -> None:
    path = written(tmp_path / "x.json", json.dumps({"weight_map": {}}).encode())
    with pytest.raises(ValueError, match=r"load_safetensors\(\) reads the index"):
        cumem.load(path)
    assert cumem.fromfile(path, "u1").nbytes == path.stat().st_size


def test_load_of_safetensors_names_what_reads_it(emulated, tmp_path) -> None:
    path = written(tmp_path / "x.safetensors", safetensors(tmp_path))
    with pytest.raises(ValueError, match=r"cumem\.load_safetensors\(\) reads it"):
        cumem.load(path)
    with pytest.raises(ValueError, match=r"cumem\.load_safetensors\(\) reads"):
        cumem.fromfile(path, "f4")
    assert cumem.fromfile(path, "u1").nbytes == path.stat().st_size


def test_load_safetensors_of_npy_and_npz_names_what_reads_them(
    emulated, tmp_path
) -> None:
    for content in (npy(), archive()):
        path = written(tmp_path / "x.safetensors", content)
        with pytest.raises(cumem.SafetensorsError, match=r"cumem\.load\(\) reads"):
            cumem.load_safetensors(path)


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("pt", "torch"),
        ("pytorch", "torch"),
        ("PT", "torch"),
        ("np", "numpy"),
        ("flax", "jax"),
    ],
)
def test_framework_by_its_other_name_says_its_name_here(
    emulated, tmp_path, given, here
) -> None:
    path = cumem.save_safetensors(tmp_path / "a", {"a": np.ones(3)})
    with pytest.raises(ValueError, match=f"say framework='{here}'"):
        cumem.load_safetensors(path, framework=given)


@pytest.mark.parametrize("name", ["safe_open", "load_file", "save_file"])
def test_names_of_the_package_safetensors_say_what_to_type(name) -> None:
    with pytest.raises(AttributeError, match=r"use cumem\.\w*_safetensors"):
        getattr(cumem, name)


# -- .npz and .npy ---------------------------------------------------------------------


def test_npz_with_objects_names_the_arrays_that_can_be_loaded(
    emulated, tmp_path
) -> None:
    path = tmp_path / "o.npz"
    objects = np.array([1, None], object)
    np.savez(path, A=np.ones(2), bounds=objects, B=np.zeros(3), more=objects)
    with pytest.raises(
        ValueError, match=r"names=\['A', 'B'\] loads the others"
    ) as caught:
        cumem.load(path)
    assert "bounds" in str(caught.value)
    assert list(cumem.load(path, names=["A", "B"])) == ["A", "B"]
    with pytest.raises(ValueError, match="object arrays") as caught:
        cumem.load(path, names=["A", "bounds"])
    assert "loads the others" not in str(caught.value)
    np.savez(path, objects=objects)
    with pytest.raises(ValueError, match="object arrays") as caught:
        cumem.load(path)
    assert "others" not in str(caught.value)
    np.savez(path, bad=objects, **{f"a{i}": np.ones(1) for i in range(100)})
    with pytest.raises(ValueError, match=r"names= loads the others.*but for \['bad'\]"):
        cumem.load(path)


def test_npz_with_a_text_names_the_arrays_that_can_be_loaded(
    emulated, tmp_path
) -> None:
    path = tmp_path / "o.npz"
    np.savez(path, A=np.ones(2))
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("readme.txt", "text")
    with pytest.raises(ValueError, match=r"readme.txt is not an array.*names=\['A'\]"):
        cumem.load(path)


@pytest.mark.parametrize(
    "field", ["field_{:05d}", "Feld_\N{GREEK SMALL LETTER ALPHA}{}"]
)
@pytest.mark.parametrize("count", [900, 9000])
def test_npy_with_a_wide_header_names_max_header_size_alone(
    emulated, tmp_path, field, count
) -> None:
    path = tmp_path / "w.npy"
    array = np.zeros(1, [(field.format(i), "f4") for i in range(count)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *arguments, **options: None)
        np.save(path, array)
    with pytest.raises(ValueError, match=r"pass max_header_size=(\d+)$") as caught:
        cumem.load(path)
    text = str(caught.value)
    assert "damaged" not in text
    assert "allow_pickle" not in text
    size = int(text.rpartition("=")[2])
    assert cumem.load(path, max_header_size=size).dtype == array.dtype
    with pytest.raises(ValueError, match="max_header_size"):
        cumem.load(path, max_header_size=size - 1)


# -- names -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", [cumem.load, cumem.fromfile], ids=["load", "fromfile"])
@pytest.mark.parametrize("content", [npy(), LFS, bytes(100), b"x\n" * 10_000])
def test_contents_in_place_of_a_name_are_a_type_error(emulated, call, content) -> None:
    with pytest.raises(TypeError, match=r"contents of a file.*np\.load\(io\.BytesIO"):
        call(content)


@pytest.mark.parametrize("call", [cumem.load, cumem.fromfile], ids=["load", "fromfile"])
@pytest.mark.parametrize(
    "given", [io.BytesIO(npy()), bytearray(npy()), memoryview(npy())], ids=repr
)
def test_memory_in_place_of_a_file_says_what_reads_it(emulated, call, given) -> None:
    with pytest.raises(TypeError, match=r"np\.load\(file\).*cumem\.array"):
        call(given)


@pytest.mark.parametrize(
    "call",
    [cumem.tofile, cumem.save, lambda file, array: cumem.savez(file, a=array)],
    ids=["tofile", "save", "savez"],
)
def test_memory_in_place_of_a_file_says_what_writes_to_it(emulated, call) -> None:
    buf = cumem.array(np.arange(3.0))
    file = io.BytesIO()
    with pytest.raises(
        TypeError, match=r"file\.write\(buf\.to_numpy\(\)\.tobytes\(\)\)"
    ):
        call(file, buf)
    file.write(buf.to_numpy().tobytes())
    assert file.getvalue() == np.arange(3.0).tobytes()
    file = io.BytesIO()
    np.save(file, buf.to_numpy())
    file.seek(0)
    assert (np.load(file) == np.arange(3.0)).all()


def test_gzip_file_object_says_what_reads_it(emulated, tmp_path) -> None:
    path = written(tmp_path / "a.npy.gz", gzip.compress(npy()))
    with gzip.open(path) as file, pytest.raises(TypeError, match=r"np\.load\(file\)"):
        cumem.load(file)


def test_load_safetensors_of_what_is_no_path_says_what_to_pass(
    emulated, tmp_path
) -> None:
    data = safetensors(tmp_path)
    with pytest.raises(TypeError, match=r"safetensors\.numpy\.load\(data\)"):
        cumem.load_safetensors(data)  # type: ignore[arg-type]
    with (
        (tmp_path / "made").open("rb") as file,
        pytest.raises(TypeError, match=r"pass the path"),
    ):
        cumem.load_safetensors(file)  # type: ignore[arg-type]


CALLS: list[Callable[[Any], object]] = [
    cumem.load,
    cumem.fromfile,
    cumem.load_safetensors,
    cumem.read_safetensors_header,
    lambda path: cumem.tofile(path, np.ones(3)),
    lambda path: cumem.save(path, np.ones(3)),
    lambda path: cumem.savez(path, np.ones(3)),
    lambda path: cumem.save_safetensors(path, {"a": np.ones(3)}),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "url", ["https://example.org/a.npy", "s3://bucket/a", "hf://a/b"]
)
def test_url_says_that_it_has_to_be_downloaded(emulated, call, url) -> None:
    with pytest.raises(FileNotFoundError, match=r"URL.*download it first") as caught:
        call(url)
    assert url.rpartition("/")[2] in str(caught.value.filename)


@pytest.mark.parametrize("call", CALLS)
def test_tilde_that_is_not_expanded_says_so(
    emulated, call, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"os\.path\.expanduser\(path\)"):
        call("~/there is no such file")
    assert not list(tmp_path.iterdir())


def test_folder_is_an_error_that_says_so(emulated, tmp_path) -> None:
    for call in (cumem.load, cumem.fromfile):
        with pytest.raises(IsADirectoryError):
            call(tmp_path)
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        cumem.load_safetensors(tmp_path)


# -- what is in an index ---------------------------------------------------------------


def test_index_with_files_that_begin_with_a_dot_is_loaded(emulated, tmp_path) -> None:
    index = cumem.save_safetensors(
        tmp_path / "m.safetensors",
        {"a": np.ones(2), "b": np.ones(2)},
        max_shard_nbytes=16,
    )
    texts = json.loads(index.read_text())
    texts["weight_map"] = {k: "./" + v for k, v in texts["weight_map"].items()}
    index.write_text(json.dumps(texts))
    assert sorted(cumem.load_safetensors(index)) == ["a", "b"]


# -- what is left over -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8", [("a", "u1"), ("b", "f8")]])
def test_fromfile_of_no_whole_number_of_items_names_count(
    emulated, tmp_path, dtype
) -> None:
    path = written(tmp_path / "a", bytes(3 * np.dtype(dtype).itemsize + 1))
    with pytest.raises(ValueError, match=r"1 bytes more; count=3 reads"):
        cumem.fromfile(path, dtype)
    with path.open("rb") as file, pytest.raises(ValueError, match="count=3"):
        cumem.fromfile(file, dtype)
    assert cumem.fromfile(path, dtype, count=3).size == 3
    assert cumem.fromfile(path, dtype, offset=1).size == 3
    with pytest.raises(ValueError, match="count=2"):
        cumem.fromfile(path, dtype, offset=2)


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_data_in_the_place_of_the_file_says_that_the_file_comes_first(
    runtime, tmp_path: Path, monkeypatch, kind
) -> None:
    """Users may pass the data first, as they do to `torch.save` and `pickle.dump`."""
    monkeypatch.chdir(tmp_path)
    arrays: list[Any] = [np.ones(3), cumem.zeros(3, kind=kind)]
    for data in arrays:
        for call in (
            lambda data: cumem.save(data, "x.npy"),
            lambda data: cumem.tofile(data, "x.bin"),
            lambda data: cumem.savez(data, x=data),
            lambda data: cumem.savez({"x": data}),
            lambda data: cumem.write_ranges(data, [(0, data)]),
        ):
            with pytest.raises(TypeError, match="the file comes first, and then what"):
                call(data)
        with pytest.raises(TypeError, match="the path comes first, and then the"):
            cumem.save_safetensors({"x": data}, "x.safetensors")  # type: ignore[arg-type]
        # Nothing is to be written here.
        with pytest.raises(TypeError) as caught:
            cumem.load(data)
        assert "comes first" not in str(caught.value)
    assert not [*tmp_path.iterdir()]
