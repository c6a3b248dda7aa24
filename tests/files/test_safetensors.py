# SPDX-License-Identifier: Apache-2.0
"""Tensors between safetensors files and every kind of memory.

Where the package safetensors can do the same, the tests compare with it. They also load
and save checkpoints of several files, and let memory or the driver fail in the middle.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import faults, session, values
from support.strategies import KINDS
from test_safetensors_format import ARRAYS, blob, tensor

import cumem
from cumem.files.safetensors import format as form

ALL_KINDS = [*KINDS, "host"]
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = {
    "pinned": cumem.PinnedBuffer,
    "mapped": cumem.MappedBuffer,
    "managed": cumem.ManagedBuffer,
    "device": cumem.DeviceBuffer,
    "host": cumem.HostBuffer,
}


def some_arrays(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return an array of each dtype that NumPy and the format share, and some of
    unusual shapes.
    """
    rng = np.random.default_rng(seed)
    arrays = {
        dtype: rng.integers(0, 2, (3, 5)).astype(dtype)
        if dtype == "?"
        else np.frombuffer(rng.bytes(15 * np.dtype(dtype).itemsize), dtype).reshape(
            3, 5
        )
        for dtype in ARRAYS
    }
    arrays["scalar"] = np.array(7, "i4")
    arrays["empty"] = np.zeros((2, 0, 3), "f4")
    arrays["one"] = np.ones((1,) * 9, "u2")
    return arrays


def bits(array: np.ndarray[Any, Any]) -> tuple[object, ...]:
    """Return a value to compare arrays by.

    It contains their bits, so that NaNs can be equal.
    """
    return array.shape, array.dtype, array.tobytes()


def put(array: np.ndarray[Any, Any], kind: str) -> object:
    """Return the array in memory of `kind`, or the array itself for "host"."""
    return array if kind == "host" else values.put(array, kind)


def written(path: Path, header: object, data: bytes = b"") -> Path:
    path.write_bytes(blob(header, data))
    return path


def same(loaded: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Return whether the loaded memory has the names and the bits of the arrays."""
    return loaded.keys() == arrays.keys() and all(
        bits(values.get(loaded[name])) == bits(array) for name, array in arrays.items()
    )


# -- loading ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_file_of_the_reference_implementation_is_loaded(
    runtime, kind, tmp_path
) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    arrays = some_arrays()
    path = tmp_path / "a.safetensors"
    oracle.save_file(arrays, path, {"by": "them"})
    loaded = cumem.load_safetensors(path, kind=kind)
    assert same(loaded, arrays)
    assert {type(buffer) for buffer in loaded.values()} == {TYPES[kind]}
    assert loaded.metadata == {"by": "them"}
    assert loaded.infos == cumem.read_safetensors_header(path).tensors
    assert list(loaded) == list(loaded.infos)


@pytest.mark.parametrize("name", some_arrays())
def test_mapped_tensor_is_the_loaded_one(runtime, name, tmp_path) -> None:
    arrays = some_arrays()
    path = cumem.save_safetensors(tmp_path / "a.safetensors", arrays)
    mapped = cumem.read_safetensors_header(path).memmap(name)
    assert not mapped.flags.writeable or mapped.size == 0
    assert bits(mapped) == bits(arrays[name])
    if mapped.ndim:
        found = [chunk.to_numpy() for _, chunk in cumem.chunks(mapped, 24)]
        assert bits(np.concatenate([mapped[:0], *found])) == bits(mapped)


def test_mapped_tensor_of_a_file_that_changed_is_refused(emulated, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "a.safetensors", {"w": np.ones(30)})
    header = cumem.read_safetensors_header(path)
    with pytest.raises(KeyError, match="v"):
        header.memmap("v")
    os.truncate(path, header.nbytes - 1)
    with pytest.raises(OSError, match="shorter than its header says"):
        header.memmap("w")
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        header.memmap("w")


def test_device_is_where_tensors_go_by_default(runtime, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "a", {"w": np.ones(3)})
    loaded = cumem.load_safetensors(str(path))
    assert isinstance(loaded["w"], cumem.DeviceBuffer)
    assert loaded["w"].device == cumem.current_device()


def test_device_is_that_of_the_call(emulated, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "a", {"w": np.ones(3)})
    for kind in KINDS:
        loaded = cumem.load_safetensors(path, kind=kind, device=1)
        assert loaded["w"].device == cumem.Device(1)


@pytest.mark.parametrize("name", [n for n in form.TYPES if form.TYPES[n].ml])
def test_dtype_that_numpy_lacks_is_of_ml_dtypes_or_unsigned(
    runtime, name, tmp_path, monkeypatch
) -> None:
    nbytes = 3 * form.TYPES[name].bits // 8
    data = bytes(range(1, nbytes + 1))
    path = written(tmp_path / "a", {"w": tensor(name, [3], [0, nbytes])}, data)
    form.dtype_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        loaded = cumem.load_safetensors(path, kind="pinned")
        plain = loaded["w"]
        assert plain.dtype == np.dtype(f"u{form.TYPES[name].bits // 8}")
        assert loaded.infos["w"].dtype == name
        assert plain.numpy().tobytes() == data
        form.dtype_of.cache_clear()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    named = cumem.load_safetensors(path, kind="pinned")["w"]
    assert named.dtype == np.dtype(getattr(ml_dtypes, form.TYPES[name].ml))
    assert named.numpy().tobytes() == data


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_packed_types_come_as_bytes(runtime, kind, tmp_path) -> None:
    header = {
        "even": tensor("F4", [2, 4], [0, 4]),
        "odd": tensor("F4", [2, 3], [4, 7]),
        "six": tensor("F6_E2M3", [2, 4], [7, 13]),
        "other": tensor("F6_E3M2", [4, 1], [13, 16]),
    }
    path = written(tmp_path / "a", header, bytes(range(16)))
    loaded = cumem.load_safetensors(path, kind=kind)
    shapes = {name: buffer.shape for name, buffer in loaded.items()}
    assert shapes == {"even": (2, 2), "odd": (3,), "six": (2, 3), "other": (3,)}
    assert {buffer.dtype for buffer in loaded.values()} == {np.dtype("u1")}
    assert b"".join(values.get(b).tobytes() for b in loaded.values()) == bytes(
        range(16)
    )
    assert loaded.infos["odd"].shape == (2, 3)


def test_names_choose_tensors_and_their_order(runtime, tmp_path) -> None:
    arrays = some_arrays()
    path = cumem.save_safetensors(tmp_path / "a", arrays)
    loaded = cumem.load_safetensors(path, names=iter(["u1", "f8", "scalar"]))
    assert list(loaded) == list(loaded.infos) == ["u1", "f8", "scalar"]
    assert same(loaded, {name: arrays[name] for name in loaded})
    assert cumem.load_safetensors(path, names=[]) == {}
    with pytest.raises(KeyError, match="no tensor 'none'"):
        cumem.load_safetensors(path, names=["u1", "none"])
    with pytest.raises(TypeError, match="not str"):
        cumem.load_safetensors(path, names="u1")
    with pytest.raises(TypeError, match="not int"):
        cumem.load_safetensors(path, names=[1])  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["host", "pinned", "mapped", "managed"])
def test_framework_numpy_gives_arrays_on_that_memory(runtime, kind, tmp_path) -> None:
    arrays = some_arrays()
    path = cumem.save_safetensors(tmp_path / "a", arrays)
    loaded = cumem.load_safetensors(path, kind=kind, framework="numpy")
    for name, array in arrays.items():
        assert type(loaded[name]) is np.ndarray
        assert bits(loaded[name]) == bits(array)
        assert loaded[name].flags.writeable


def test_framework_numpy_means_ordinary_memory(runtime, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "a", {"w": np.ones(3)})
    before = session.testing.live_storages()
    loaded = cumem.load_safetensors(path, framework="numpy")
    assert loaded["w"].tolist() == [1, 1, 1]
    assert cumem.asbuffer(loaded["w"]).kind == "pageable"
    assert session.testing.live_storages() <= before + 1
    with pytest.raises(TypeError, match="NumPy cannot reach device memory"):
        cumem.load_safetensors(path, framework="numpy", kind="device")


def test_arguments_that_mean_nothing_are_refused(tmp_path) -> None:
    path = written(tmp_path / "a", {})
    with pytest.raises(ValueError, match="kind must be one of"):
        cumem.load_safetensors(path, kind="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="framework must be"):
        cumem.load_safetensors(path, framework="pt")  # type: ignore[arg-type]


def test_load_on_a_stream_is_ordered_on_it(runtime, tmp_path) -> None:
    arrays = some_arrays()
    path = cumem.save_safetensors(tmp_path / "a", arrays)
    with cumem.Stream() as stream:
        loaded = cumem.load_safetensors(path, stream=stream)
        stream.synchronize()
        assert same(loaded, arrays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_come_back_as_they_were_saved(backend, tmp_path) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    names = st.text(max_size=4).filter(lambda name: name != "__metadata__")
    shapes = st.lists(st.integers(0, 4), max_size=4)
    made = st.tuples(st.sampled_from(ARRAYS), shapes, st.sampled_from("CFR"))
    path = tmp_path / "a.safetensors"
    with session.opened(backend):

        @given(
            st.dictionaries(names, made, max_size=6),
            st.sampled_from(ALL_KINDS),
            st.sampled_from(ALL_KINDS),
            st.integers(0, 9),
        )
        def check(made, source, target, seed) -> None:
            rng = np.random.default_rng(seed)
            arrays = {}
            for name, (dtype, shape, order) in made.items():
                array = rng.integers(0, 2, shape).astype(dtype, order="C")
                if order == "F":
                    array = np.asfortranarray(array).reshape(shape)
                elif order == "R" and array.ndim:
                    array = array[::-1]
                arrays[name] = array
            cumem.save_safetensors(path, {n: put(a, source) for n, a in arrays.items()})
            plain = {
                n: np.ascontiguousarray(a).reshape(a.shape) for n, a in arrays.items()
            }
            assert path.read_bytes() == oracle.save(plain)
            assert same(cumem.load_safetensors(path, kind=target), arrays)

        check()


# -- several files ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_checkpoint_in_several_files_is_loaded(runtime, kind, tmp_path) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    arrays = some_arrays()
    names = sorted(arrays)
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: arrays[name] for name in names if places[name] == file}
        oracle.save_file({**part, "not in the index": np.ones(1)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    for path in (index, tmp_path):
        assert same(cumem.load_safetensors(path, kind=kind), arrays)
    two = cumem.load_safetensors(tmp_path, kind=kind, names=[names[4], names[0]])
    assert list(two) == [names[4], names[0]]
    assert same(two, {name: arrays[name] for name in two})
    with pytest.raises(KeyError, match="not in the index"):
        cumem.load_safetensors(tmp_path, names=["not in the index"])


def test_index_may_name_links_out_of_its_folder(emulated, tmp_path) -> None:
    store, folder = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    folder.mkdir()
    cumem.save_safetensors(store / "0123", {"w": np.arange(3)})
    (folder / "m-1.safetensors").symlink_to("../blobs/0123")
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "m-1.safetensors"}}))
    assert same(cumem.load_safetensors(folder), {"w": np.arange(3)})


def test_file_of_the_index_that_is_missing_or_wrong_is_named(
    emulated, tmp_path
) -> None:
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"v": "a.st", "w": "b.st"}}))
    written(tmp_path / "a.st", {"v": tensor()}, b"1")
    with pytest.raises(
        cumem.SafetensorsError, match=r"index\.json.*'w'.*b\.st is missing"
    ):
        cumem.load_safetensors(index)
    written(tmp_path / "b.st", {"x": tensor()}, b"1")
    with pytest.raises(
        cumem.SafetensorsError, match=r"index\.json.*b\.st has no .*'w'"
    ):
        cumem.load_safetensors(index)
    (tmp_path / "b.st").write_bytes(b"12345678")
    with pytest.raises(cumem.SafetensorsError, match=r"b\.st: "):
        cumem.load_safetensors(index)


def test_folder_with_one_file_stands_for_it(emulated, tmp_path) -> None:
    with pytest.raises(ValueError, match="holds no"):
        cumem.load_safetensors(tmp_path)
    path = cumem.save_safetensors(tmp_path, {"w": np.ones(2)})
    assert path == tmp_path / "model.safetensors"
    assert list(cumem.load_safetensors(tmp_path)) == ["w"]
    written(tmp_path / "other.safetensors", {})
    with pytest.raises(ValueError, match=r"several.*model\.safetensors, other"):
        cumem.load_safetensors(tmp_path)


def test_folder_with_an_index_and_a_file_of_its_name_is_refused(
    emulated, tmp_path
) -> None:
    arrays = {name: np.ones(2) for name in "ab"}
    cumem.save_safetensors(tmp_path, arrays, max_shard_nbytes=16)
    written(tmp_path / "another.safetensors", {})
    assert list(cumem.load_safetensors(tmp_path)) == ["a", "b"]
    written(tmp_path / "model.safetensors", {})
    with pytest.raises(ValueError, match="several"):
        cumem.load_safetensors(tmp_path)


# -- failing ---------------------------------------------------------------------------


def test_memory_of_all_tensors_is_made_in_one_growth(emulated, tmp_path) -> None:
    arrays = {f"{i}": np.full(600_000, i, "f4") for i in range(12)}
    path = cumem.save_safetensors(tmp_path / "many.safetensors", arrays)
    with cumem.Pool("device") as pool:
        loaded = cumem.load_safetensors(path)
        assert pool.stats().growth_count == 1
        for name, array in arrays.items():
            assert (loaded[name].to_numpy() == array).all()
        del loaded


def test_nothing_stays_allocated_when_memory_runs_out(emulated, tmp_path) -> None:
    arrays = {str(i): np.zeros(1 << 20, "u1") for i in range(6)}
    path = cumem.save_safetensors(tmp_path / "a", arrays)
    with cumem.limit("device", "4MiB"), pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.load_safetensors(path)
    # Nothing is left although the traceback is still alive.
    assert session.leftovers() == {}
    assert caught.value.kind == "device"


@pytest.mark.parametrize("framework", [None, "numpy"])
def test_nothing_stays_allocated_when_reading_fails(
    emulated, tmp_path, framework, monkeypatch
) -> None:
    arrays = some_arrays()
    path = cumem.save_safetensors(tmp_path / "a", arrays)
    cut = path.stat().st_size - 20

    def read_and_cut(file: Any, path: Path) -> cumem.types.SafetensorsHeader:
        header = form.read_header(file, path)
        os.truncate(path, cut)
        return header

    monkeypatch.setattr("cumem.files.safetensors.read_header", read_and_cut)
    with pytest.raises(EOFError) as caught:
        cumem.load_safetensors(path, kind="pinned", framework=framework)
    assert session.leftovers() == {}
    assert str(path) in str(caught.value)


def test_every_call_of_a_load_may_fail(emulated, tmp_path) -> None:
    arrays = {"a": np.arange(1000, dtype="f4"), "b": np.arange(7, dtype="u1")}
    path = cumem.save_safetensors(tmp_path / "a", arrays)

    def scenario() -> None:
        loaded = cumem.load_safetensors(path)
        assert same(loaded, arrays)

    result = faults.sweep(scenario)
    assert result.raised


def test_every_call_of_a_save_may_fail(emulated, tmp_path) -> None:
    arrays = {"a": np.arange(1000, dtype="f4"), "b": np.arange(7, dtype="u1")}

    def scenario() -> None:
        assert set(os.listdir(tmp_path)) <= {"a"}
        buffers = {name: values.put(array, "device") for name, array in arrays.items()}
        path = cumem.save_safetensors(tmp_path / "a", buffers)
        assert same(cumem.load_safetensors(path, kind="host"), arrays)

    result = faults.sweep(scenario)
    assert result.raised


# -- saving ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_buffers_are_saved_as_the_reference_implementation_does(
    runtime, kind, tmp_path
) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    arrays = some_arrays()
    buffers = {name: put(array, kind) for name, array in arrays.items()}
    path = tmp_path / "a.safetensors"
    assert cumem.save_safetensors(path, buffers, {"by": "us"}) == path
    assert path.read_bytes() == oracle.save(arrays, {"by": "us"})


def test_anything_that_copy_takes_is_saved(runtime, tmp_path) -> None:
    table = np.arange(24, dtype="i4").reshape(4, 6)
    device = values.put(table, "device")
    tensors = {
        "reversed": table[::-1, ::-2],
        "turned": device.T,
        "part": device[1:3, ::2],
        "broadcast": np.broadcast_to(table[0], (3, 6)),
        "number": np.float32(2.5),
        "bytes": b"abc",
        "writable": bytearray(b"de"),
        "other order": table.astype(">i4"),
        "view": memoryview(table),
    }
    path = cumem.save_safetensors(tmp_path / "a", tensors)
    expected = {
        "reversed": table[::-1, ::-2],
        "turned": table.T,
        "part": table[1:3, ::2],
        "broadcast": tensors["broadcast"],
        "number": np.array(2.5, "f4"),
        "bytes": np.frombuffer(b"abc", "u1"),
        "writable": np.frombuffer(b"de", "u1"),
        "other order": table,
        "view": table,
    }
    assert same(cumem.load_safetensors(path, kind="pinned"), expected)


def test_dtypes_of_ml_dtypes_are_saved_under_their_names(runtime, tmp_path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = {
        name: np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, element.ml))
        for name, element in form.TYPES.items()
        if element.ml
    }
    path = cumem.save_safetensors(tmp_path / "a", arrays)
    loaded = cumem.load_safetensors(path, kind="pinned")
    assert {name: info.dtype for name, info in loaded.infos.items()} == {
        name: name for name in arrays
    }
    for name, array in arrays.items():
        assert bits(loaded[name].numpy()) == bits(array)


def test_what_was_loaded_is_saved_as_it_was(runtime, tmp_path, monkeypatch) -> None:
    header: dict[str, Any] = {"__metadata__": {"k": "v"}}
    at = 0
    for name in form.TYPES:
        shape = [3, 2] if form.TYPES[name].bits == 4 else [4, 3]
        nbytes = form.tensor_nbytes(form.TYPES[name], shape)
        header[name] = tensor(name, shape, [at, at + nbytes])
        at += nbytes
    path = written(tmp_path / "a", header, bytes(i % 2 for i in range(at)))
    for missing in ({}, {"ml_dtypes": None}):
        form.dtype_of.cache_clear()
        with monkeypatch.context() as patch:
            for name, module in missing.items():
                patch.setitem(sys.modules, name, module)
            loaded = cumem.load_safetensors(path)
            again = cumem.save_safetensors(
                tmp_path / "b", loaded, loaded.metadata, dtypes=loaded.infos
            )
        form.dtype_of.cache_clear()
        back = cumem.load_safetensors(again)
        assert back.metadata == {"k": "v"}
        for name in form.TYPES:
            assert back.infos[name].dtype == name
            assert back.infos[name].shape == loaded.infos[name].shape
            one, two = values.get(back[name]), values.get(loaded[name])
            assert one.tobytes() == two.tobytes()


def test_dtypes_name_what_integers_are(runtime, tmp_path) -> None:
    words = np.arange(12, dtype="u2").reshape(3, 4)
    octets = words.astype("u1")
    path = cumem.save_safetensors(
        tmp_path / "a",
        {"w": words, "v": words.view("i2"), "f4": octets, "odd": octets[0, :3]},
        dtypes={
            "w": "BF16",
            "v": "F16",
            "f4": "F4",
            "odd": cumem.types.SafetensorsInfo("F4", (2, 3), 0, 0),
        },
    )
    found = cumem.read_safetensors_header(path).tensors
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "w": ("BF16", (3, 4)),
        "v": ("F16", (3, 4)),
        "f4": ("F4", (3, 8)),
        "odd": ("F4", (2, 3)),
    }


@pytest.mark.parametrize(
    ("value", "declared", "error", "why"),
    [
        (np.zeros(2, "f4"), "I32", TypeError, "float32 is neither I32 nor integers"),
        (np.zeros(2, "u4"), "BF16", TypeError, "uint32 is neither BF16 nor integers"),
        (np.zeros(2, "u2"), "F4", TypeError, "uint16 is neither F4 nor integers"),
        (np.zeros(2, "u1"), "F5", ValueError, "'F5' is not known"),
        (np.zeros(2, "u1"), "F6_E2M3", ValueError, "whole number of F6_E2M3"),
        (np.zeros((), "u1"), "F4", ValueError, "whole number of F4"),
        (
            np.zeros(2, "u1"),
            cumem.types.SafetensorsInfo("F4", (5,), 0, 0),
            ValueError,
            "5 elements of 4 bits",
        ),
        (
            np.zeros(2, "u1"),
            cumem.types.SafetensorsInfo("U8", (3,), 0, 0),
            ValueError,
            r"U8 of shape \(3,\) is not 2 bytes",
        ),
    ],
)
def test_dtypes_that_do_not_fit_are_refused(
    emulated, tmp_path, value, declared, error, why
) -> None:
    with pytest.raises(error, match=why) as caught:
        cumem.save_safetensors(tmp_path / "a", {"w": value}, dtypes={"w": declared})
    assert caught.value.__notes__ == ["while saving the tensor 'w'"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "why"),
    [
        (
            {"a": np.zeros(2, "c16")},
            None,
            TypeError,
            "no element type for .*complex128",
        ),
        ({"a": np.zeros(2, "M8[s]")}, None, TypeError, "no element type"),
        ({"a": np.zeros(2, "S3")}, None, TypeError, "no element type"),
        ({"a": np.zeros(2, "i4,f4")}, None, TypeError, "no element type"),
        ({"a": [1, 2]}, None, TypeError, "exports no memory"),
        ({1: np.zeros(2)}, None, TypeError, "must be str, not int"),
        ({"__metadata__": np.zeros(2)}, None, ValueError, "cannot be called"),
        ({"\ud800": np.zeros(2)}, None, ValueError, "UTF-8"),
        ({}, {"a": 1}, TypeError, "must be str, not int"),
        ({}, {1: "a"}, TypeError, "must be str, not int"),
        ({}, {"a": "\ud800"}, ValueError, "UTF-8"),
    ],
)
def test_what_cannot_be_saved_is_refused(
    emulated, tmp_path, tensors, metadata, error, why
) -> None:
    with pytest.raises(error, match=why):
        cumem.save_safetensors(tmp_path / "a", tensors, metadata)
    assert os.listdir(tmp_path) == []


def test_equal_contents_make_equal_files(emulated, tmp_path) -> None:
    arrays = some_arrays()
    one = cumem.save_safetensors(tmp_path / "1", arrays, {"b": "1", "a": "2"})
    turned = dict(reversed(arrays.items()))
    two = cumem.save_safetensors(tmp_path / "2", turned, {"a": "2", "b": "1"})
    assert one.read_bytes() == two.read_bytes()


def test_large_tensors_are_cut_by_their_names_order(emulated, tmp_path) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    arrays = {name: np.full(100, i, "u1") for i, name in enumerate("dacbe")}
    arrays["large"] = np.arange(400, dtype="u1")
    arrays["small"] = np.array(3)
    index = cumem.save_safetensors(
        tmp_path / "m.safetensors", arrays, {"k": "v"}, max_shard_nbytes="300B"
    )
    assert index == tmp_path / "m.safetensors.index.json"
    parts = [f"m-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert sorted(os.listdir(tmp_path)) == [*parts, index.name]
    members = [["d", "a", "c"], ["b", "e"], ["large"], ["small"]]
    for part, names in zip(parts, members, strict=True):
        expected = oracle.save({name: arrays[name] for name in names}, {"k": "v"})
        assert (tmp_path / part).read_bytes() == expected
    text = json.loads(index.read_text())
    assert text["metadata"] == {"total_size": 908}
    assert text["weight_map"]["e"] == parts[1]
    loaded = cumem.load_safetensors(index)
    assert same(loaded, arrays)
    assert loaded.metadata == {"k": "v"}


def test_checkpoint_replaces_the_earlier_one_of_its_name(emulated, tmp_path) -> None:
    (tmp_path / "other-00001-of-00009.safetensors").write_text("mine")
    arrays = {name: np.ones(8, "u1") for name in "abc"}
    # Each limit leaves this number of files. The last call has no limit, so it writes a
    # single file beside the four that are there.
    for limit, count in ((8, 4), (16, 3), (24, 1), (8, 4), (None, 5)):
        path = cumem.save_safetensors(
            tmp_path / "m.safetensors", arrays, max_shard_nbytes=limit
        )
        assert same(cumem.load_safetensors(path), arrays)
        assert len(os.listdir(tmp_path)) == count + 1
    assert (tmp_path / "other-00001-of-00009.safetensors").exists()


def test_file_is_replaced_as_a_whole_or_not_at_all(emulated, tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    cumem.save_safetensors(path, {"w": np.ones(4)})
    before = path.read_bytes()
    mapped = np.memmap(path, "u1", "r")
    lost = cumem.empty_device(4)
    session.testing.plan_fault("copy_async", 1, faults.UNKNOWN)
    with pytest.raises(cumem.CudaError):
        cumem.save_safetensors(path, {"w": np.zeros(4), "lost": lost})
    session.testing.plan_fault(None, 0)
    assert os.listdir(tmp_path) == ["m.safetensors"]
    assert path.read_bytes() == before
    # The map shows the old file, which is what must be saved.
    cumem.save_safetensors(path, {"w": mapped})
    assert same(cumem.load_safetensors(path), {"w": np.frombuffer(before, "u1")})


def test_shards_that_were_written_are_removed_when_a_later_one_fails(
    emulated, tmp_path
) -> None:
    good, lost = np.ones(4), cumem.empty_device(4)
    session.testing.plan_fault("copy_async", 1, faults.UNKNOWN)
    with pytest.raises(cumem.CudaError):
        cumem.save_safetensors(
            tmp_path, {"a": good, "b": good, "c": lost}, max_shard_nbytes=32
        )
    session.testing.plan_fault(None, 0)
    assert os.listdir(tmp_path) == []


def test_file_has_the_rights_of_other_new_files(emulated, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "a", {"w": np.ones(4)})
    (tmp_path / "b").touch()
    assert path.stat().st_mode == (tmp_path / "b").stat().st_mode


def test_folder_that_is_missing_is_an_oserror(emulated, tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        cumem.save_safetensors(tmp_path / "none" / "a", {"w": np.ones(4)})
