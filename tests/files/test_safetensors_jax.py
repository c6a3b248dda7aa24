# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files as arrays of JAX, which share the buffers' memory."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumem

KINDS = ["device", "pinned", "mapped", "managed", "host"]


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Save three small arrays, and return the path of their file."""
    tensors = {
        "w": np.arange(6, dtype="f4").reshape(2, 3),
        "empty": np.zeros((0, 3), "f2"),
        "scalar": np.array(7, "i4"),
    }
    return cumem.save_safetensors(tmp_path / "a.safetensors", tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_jax_have_the_values_of_the_file(runtime, jax, path, kind) -> None:
    loaded = cumem.load_safetensors(path, kind=kind, framework="jax")
    assert all(isinstance(array, jax.Array) for array in loaded.values())
    assert np.asarray(loaded["w"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["w"].dtype == np.float32
    assert loaded["empty"].shape == (0, 3)
    assert int(loaded["scalar"]) == 7
    loaded.clear()


@pytest.mark.parametrize("kind", ["device", "pinned", "mapped", "managed"])
def test_arrays_of_jax_share_the_memory(runtime, jax, path, kind, monkeypatch) -> None:
    made: list[cumem.Buffer] = []
    module = importlib.import_module("cumem.files.safetensors")
    # `cumem.empty` must be looked up before the core's function is replaced.
    allocate = cumem.empty

    def empty(*args: Any, **named: Any) -> cumem.Buffer:
        made.append(allocate(*args, **named))
        return made[-1]

    monkeypatch.setattr(module._core, "empty", empty)
    loaded = cumem.load_safetensors(path, kind=kind, framework="jax", names=["w"])
    monkeypatch.undo()
    (buffer,) = made
    # On the emulated device, the host sees device memory at another address.
    if kind != "device" or not runtime.emulated:
        assert loaded["w"].unsafe_buffer_pointer() == buffer.ptr
    cumem.copy(buffer, np.full((2, 3), 9, "f4"))
    assert np.asarray(loaded["w"]).tolist() == [[9] * 3] * 2
    loaded.clear()


def test_types_that_numpy_lacks_are_jaxs(runtime, jax, tmp_path) -> None:
    bf16 = np.dtype(jax.numpy.bfloat16)
    f8 = np.dtype(jax.numpy.float8_e4m3fn)
    tensors = {"b": np.ones(3, bf16), "f": np.ones(4, f8)}
    path = cumem.save_safetensors(tmp_path / "a.safetensors", tensors)
    loaded = cumem.load_safetensors(path, framework="jax", kind="pinned")
    assert (loaded["b"].dtype, loaded["f"].dtype) == (bf16, f8)
    # NumPy converts the values, because JAX 0.11 converts nothing that lies in
    # page-locked memory.
    assert np.asarray(loaded["b"]).astype("float32").tolist() == [1, 1, 1]
    loaded.clear()


def test_jax_is_not_let_cut_wide_elements(runtime, jax, tmp_path) -> None:
    path = cumem.save_safetensors(tmp_path / "a.safetensors", {"x": np.arange(3)})
    before = cumem.stats().total.allocation_count
    with pytest.raises(ValueError, match="jax_enable_x64"):
        cumem.load_safetensors(path, framework="jax", kind="pinned")
    assert cumem.stats().total.allocation_count == before
    jax.config.update("jax_enable_x64", True)
    try:
        loaded = cumem.load_safetensors(path, framework="jax", kind="pinned")
        assert loaded["x"].dtype == np.int64
        loaded.clear()
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_library_that_is_missing_is_named(runtime, path, monkeypatch, name) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"framework='{name}' needs that library"):
        cumem.load_safetensors(path, framework=name)  # type: ignore[arg-type]
