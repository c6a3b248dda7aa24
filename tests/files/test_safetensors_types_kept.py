# SPDX-License-Identifier: Apache-2.0
"""Tensors that are loaded and saved again keep element types that NumPy lacks.

NumPy holds such a tensor as unsigned integers. cumem remembers the type beside it, and
the tests change, slice, pickle or replace tensors before they save them.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumem
import cumem.base.carried as carried
import cumem.files.safetensors.format as form
from cumem.integrations.torch import offload, restore


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide ml_dtypes, so that NumPy lacks more types."""
    form.dtype_of.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    yield
    form.dtype_of.cache_clear()


SHAPES = {"F4": (3, 8), "F6_E2M3": (2, 4), "F6_E3M2": (4, 8)}
NAMES = [name for name, element in form.TYPES.items() if not element.native]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a file with a tensor of each type that NumPy lacks, and two of types that it
    has.
    """
    tensors, dtypes = {}, {}
    for name in NAMES:
        element = form.TYPES[name]
        shape = SHAPES.get(name, (3, 4))
        nbytes = form.tensor_nbytes(element, shape)
        info = cumem.types.SafetensorsInfo(name, shape, 0, nbytes)
        packed = form.packed_shape(info)
        bits = np.arange(nbytes, dtype="u1").view(element.numpy)
        tensors[name], dtypes[name] = bits.reshape(packed), info
    tensors["U16"] = np.arange(4, dtype="u2")
    tensors["F32"] = np.arange(4, dtype="f4")
    return cumem.save_safetensors(tmp_path / "all.safetensors", tensors, dtypes=dtypes)


def types(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    infos = cumem.read_safetensors_header(path).tensors
    return {name: (info.dtype, info.shape) for name, info in infos.items()}


FORMS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda loaded: loaded,
    "dict": dict,
    "copy": lambda loaded: loaded.copy(),
    "copy.copy": copy.copy,
    "part": lambda loaded: {name: loaded[name] for name in loaded if name != "F4"},
    "renamed": lambda loaded: {f"model.{name}": loaded[name] for name in loaded},
    "merged": lambda loaded: {**loaded, "other": np.ones(3)},
    "or": lambda loaded: loaded | {"other": np.ones(3)},
    "slices": lambda loaded: {name: loaded[name][:] for name in loaded},
}


@pytest.mark.parametrize("form_of", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "pinned"}, {"kind": "host"}, {"framework": "numpy"}],
    ids=str,
)
def test_loaded_tensors_are_saved_as_they_were(
    runtime, plain, path, tmp_path, options, form_of
) -> None:
    tensors = form_of(cumem.load_safetensors(path, **options))
    saved = types(cumem.save_safetensors(tmp_path / "b.safetensors", tensors))
    was = types(path)
    for name in saved:
        if name != "other":
            assert saved[name] == was[name.removeprefix("model.")]


@pytest.mark.parametrize("options", [{}, {"framework": "numpy"}], ids=str)
def test_tensors_that_are_packed_are_saved_as_they_were_with_ml_dtypes(
    runtime, path, tmp_path, options
) -> None:
    pytest.importorskip("ml_dtypes")
    loaded = dict(cumem.load_safetensors(path, kind="pinned", **options))
    assert types(cumem.save_safetensors(tmp_path / "b", loaded)) == types(path)


def test_tensors_of_torch_are_saved_as_they_were(runtime, path, tmp_path) -> None:
    pytest.importorskip("torch")
    loaded = dict(cumem.load_safetensors(path, kind="host", framework="torch"))
    assert types(cumem.save_safetensors(tmp_path / "b", loaded)) == types(path)
    part = {name: loaded[name][:2] for name in NAMES}
    saved = types(cumem.save_safetensors(tmp_path / "c", part))
    assert {name: kind for name, (kind, _) in saved.items()} == {n: n for n in NAMES}


def test_offloaded_and_restored_tensors_are_saved_as_they_were(
    emulated, path, tmp_path
) -> None:
    pytest.importorskip("torch")
    loaded = cumem.load_safetensors(path, kind="host", framework="torch")
    there = offload(loaded)
    back = restore(there)
    for tensors in (there, back):
        assert tensors.infos == loaded.infos
        assert types(cumem.save_safetensors(tmp_path / "b", tensors)) == types(path)


def test_mapped_tensors_are_saved_as_they_were(runtime, plain, path, tmp_path) -> None:
    header = cumem.read_safetensors_header(path)
    mapped = {name: header.memmap(name) for name in header.tensors}
    assert types(cumem.save_safetensors(tmp_path / "b", mapped)) == types(path)
    rows = {name: header.memmap(name)[1:3] for name in ("BF16", "F4")}
    saved = types(cumem.save_safetensors(tmp_path / "c", rows))
    assert saved == {"BF16": ("BF16", (2, 4)), "F4": ("F4", (2, 8))}


def test_pickled_tensors_are_saved_as_they_were(
    plain, emulated, path, tmp_path
) -> None:
    loaded = cumem.load_safetensors(path, framework="numpy")
    again = pickle.loads(pickle.dumps(loaded))
    assert types(cumem.save_safetensors(tmp_path / "b", again)) == types(path)


def test_slices_keep_the_type_and_get_their_own_shape(
    runtime, plain, path, tmp_path
) -> None:
    loaded = cumem.load_safetensors(path)
    parts = {"a": loaded["BF16"][1:, ::2], "c": loaded["F4"][:2]}
    parts["t"] = loaded["F8_E4M3"].T
    saved = types(cumem.save_safetensors(tmp_path / "b", parts))
    assert saved == {
        "a": ("BF16", (2, 2)),
        "c": ("F4", (2, 8)),
        "t": ("F8_E4M3", (4, 3)),
    }


def test_replaced_tensor_of_the_same_storage_keeps_the_type(
    runtime, plain, path, tmp_path
) -> None:
    loaded = cumem.load_safetensors(path, framework="numpy")
    loaded["BF16"] = loaded["BF16"] + np.uint16(1)
    assert types(cumem.save_safetensors(tmp_path / "b", loaded)) == types(path)


@pytest.mark.parametrize(
    ("name", "array", "element"),
    [
        ("BF16", np.ones((3, 4), "f4"), "F32"),
        ("BF16", np.ones((3, 4), "f2"), "F16"),
        ("BF16", np.ones((3, 4), "i2"), "I16"),
        ("F4", np.ones((3, 4), "f8"), "F64"),
        ("U16", np.ones(3, "u1"), "U8"),
        ("F32", np.ones(4, "u4"), "U32"),
    ],
)
def test_replaced_tensor_of_another_dtype_is_what_it_says(
    runtime, plain, path, tmp_path, name, array, element
) -> None:
    loaded = cumem.load_safetensors(path)
    loaded[name] = array
    saved = types(cumem.save_safetensors(tmp_path / "b", loaded))
    assert saved[name] == (element, array.shape)


def test_replaced_tensor_with_a_dtype_of_its_own_is_not_mislabelled(
    runtime, path, tmp_path
) -> None:
    pytest.importorskip("ml_dtypes")
    # With ml_dtypes, BF16 is loaded as bfloat16.
    loaded = cumem.load_safetensors(path)
    loaded["BF16"] = np.ones((3, 4), "u2")
    saved = types(cumem.save_safetensors(tmp_path / "b", loaded))
    assert saved["BF16"] == ("U16", (3, 4))


def test_replaced_tensor_of_another_shape_has_to_be_named(
    runtime, plain, path, tmp_path
) -> None:
    loaded = cumem.load_safetensors(path)
    loaded["BF16"] = np.ones(7, "u2")
    with pytest.raises(TypeError, match=r"dtypes={'BF16': 'BF16'} or .*'U16'"):
        cumem.save_safetensors(tmp_path / "b", loaded)
    assert not (tmp_path / "b").exists()
    for element in ("BF16", "U16"):
        to = cumem.save_safetensors(tmp_path / "b", loaded, dtypes={"BF16": element})
        assert types(to)["BF16"] == (element, (7,))
        assert types(to)["F4"] == ("F4", (3, 8))


def test_packed_tensor_that_was_turned_has_to_be_named(runtime, path, tmp_path) -> None:
    loaded = cumem.load_safetensors(path)
    with pytest.raises(TypeError, match="loaded as F4"):
        cumem.save_safetensors(tmp_path / "b", {"w": loaded["F4"].T})
    with pytest.raises(TypeError, match="loaded as F6_E2M3"):
        cumem.save_safetensors(tmp_path / "b", {"w": loaded["F6_E2M3"][:, 1:]})


def test_tensor_seen_as_another_dtype_is_what_it_is_seen_as(
    runtime, plain, path, tmp_path
) -> None:
    loaded = cumem.load_safetensors(path)
    parts = {"a": loaded["BF16"].view("f2"), "b": loaded["BF16"].view("u1")}
    saved = types(cumem.save_safetensors(tmp_path / "b", parts))
    assert saved == {"a": ("F16", (3, 4)), "b": ("U8", (3, 8))}


def test_notes_go_with_what_they_are_about(runtime, path) -> None:
    """A note about an element type must not outlive its tensor."""
    gc.collect()
    before = len(carried._notes)
    loaded = cumem.load_safetensors(path)
    assert len(carried._notes) > before
    del loaded
    gc.collect()
    assert len(carried._notes) == before


def test_npy_of_what_it_cannot_name_warns(runtime, plain, path, tmp_path) -> None:
    loaded = cumem.load_safetensors(path)
    with pytest.warns(UserWarning, match=r"BF16: they come back as uint16; save_safet"):
        cumem.save(tmp_path / "a.npy", loaded["BF16"])
    with pytest.warns(UserWarning, match="are F4"):
        cumem.savez(tmp_path / "a.npz", w=loaded["F4"])
    cumem.save(tmp_path / "b.npy", loaded["U16"])


def test_npy_of_ml_dtypes_warns(runtime, tmp_path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.ones(3, ml_dtypes.bfloat16)
    with pytest.warns(UserWarning, match=r"bfloat16: they come back as V2"):
        cumem.save(tmp_path / "a.npy", array)
    assert (np.load(tmp_path / "a.npy").view("bfloat16") == array).all()


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"]
)
def test_npy_of_every_type_can_be_read_again(runtime, tmp_path, name) -> None:
    """NumPy writes ``<f1`` for `float8_e5m2`, and then refuses to read it."""
    of = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    record = np.dtype([("a", of, (2,)), ("b", "f4")], align=True)
    for dtype in (of, record):
        array = np.zeros(3, dtype)
        array["a" if dtype.names else ...] = 1
        with pytest.warns(UserWarning, match=rf"{name}: they come back as V"):
            cumem.save(tmp_path / "a.npy", array)
        with pytest.warns(UserWarning, match=rf"{name}: they come back as V"):
            cumem.savez(tmp_path / "a.npz", x=array)
        for read in (
            np.load(tmp_path / "a.npy"),
            np.load(tmp_path / "a.npz")["x"],
            cumem.load(tmp_path / "a.npy", kind="pinned").numpy(),
        ):
            assert (read.view(dtype) == array).all()


def test_npy_by_numpy_that_names_no_type_says_how_to_read_it(
    emulated, tmp_path
) -> None:
    of = pytest.importorskip("ml_dtypes").float8_e5m2
    array = np.arange(5).astype(of)
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=r"float8_e5m2.*offset=128") as caught:
        cumem.load(tmp_path / "a.npy")
    assert 'fromfile(path, "u1", offset=128)' in str(caught.value)
    read = cumem.fromfile(tmp_path / "a.npy", "u1", offset=128).view(of)
    assert (read.to_numpy() == array).all()


TEXTS = {"format": "pt", "step": "7"}


@pytest.fixture
def with_texts(tmp_path: Path) -> Path:
    """Make a file with metadata."""
    tensors = {name: np.arange(4, dtype="f4") for name in "abc"}
    return cumem.save_safetensors(tmp_path / "texts.safetensors", tensors, TEXTS)


def texts(path: Path) -> dict[str, str]:
    return cumem.read_safetensors_header(path).metadata


@pytest.mark.parametrize(
    "changed",
    [
        lambda loaded: loaded,
        lambda loaded: loaded.copy(),
        copy.copy,
        lambda loaded: (loaded.pop("a"), loaded)[1],
        lambda loaded: loaded.update(d=np.ones(3)) or loaded,
    ],
)
@pytest.mark.parametrize("most", [None, 20])
def test_metadata_of_what_was_loaded_is_kept(
    emulated, with_texts, tmp_path, changed, most
) -> None:
    loaded = changed(cumem.load_safetensors(with_texts, kind="pinned"))
    saved = cumem.save_safetensors(tmp_path / "to", loaded, max_shard_nbytes=most)
    assert texts(saved) == TEXTS
    if most is not None:
        files = sorted(tmp_path.glob("to-*.safetensors"))
        assert len(files) == len(loaded)
        assert all(texts(file) == TEXTS for file in files)


def test_metadata_of_chosen_tensors_is_kept(emulated, with_texts, tmp_path) -> None:
    part = cumem.load_safetensors(with_texts, names=["b"])
    assert texts(cumem.save_safetensors(tmp_path / "part", part)) == TEXTS


def test_metadata_that_is_given_takes_the_place_of_what_was_loaded(
    emulated, with_texts, tmp_path
) -> None:
    loaded = cumem.load_safetensors(with_texts)
    assert texts(cumem.save_safetensors(tmp_path / "to", loaded, {"a": "b"})) == {
        "a": "b"
    }
    assert texts(cumem.save_safetensors(tmp_path / "to", loaded, {})) == {}
    loaded.metadata["step"] = "8"
    assert texts(cumem.save_safetensors(tmp_path / "to", loaded))["step"] == "8"
    assert texts(cumem.save_safetensors(tmp_path / "to", dict(loaded))) == {}
    loaded.metadata["step"] = 8
    with pytest.raises(TypeError, match="metadata 'step': values must be str"):
        cumem.save_safetensors(tmp_path / "to", loaded)
