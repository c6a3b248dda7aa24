# SPDX-License-Identifier: Apache-2.0
"""The benchmark of safetensors files runs without a GPU and notices wrong bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support import programs

import cumem

# The behaviour tested here does not depend on the version of Python.
pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "safetensors_files.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("safetensors_files", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_benchmark_of_safetensors_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    command = ["--quick", "--json", str(path), "--dir", str(tmp_path)]
    done = programs.run(str(SCRIPT), *command, CUMEM_EMULATED_DELAY_US="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["emulated"] is True
    assert results["headers"]["tensors"] == 1000
    assert results["headers"]["seconds"]["cumem"] > 0
    assert results["missing"]["safetensors.torch"] == "needs a GPU"
    assert [(case["key"], case["direction"]) for case in results["cases"]] == [
        ("model", "up"),
        ("model", "down"),
        ("small", "up"),
        ("small", "down"),
    ]
    for case in results["cases"]:
        assert case["errors"] == {}
        assert case["seconds"]["cumem"] > 0
        if case["direction"] == "up":
            assert all(run["load"] > 0 for run in case["fresh"]["cumem"])
    assert os.listdir(tmp_path) == ["results.json"]


def test_model_has_the_size_that_was_asked_for(benchmark: ModuleType) -> None:
    arrays = benchmark.model(4 << 20)
    nbytes = sum(array.nbytes for array in arrays.values())
    assert 0.99 * (4 << 20) < nbytes <= 4 << 20
    assert len(arrays) > 20


def test_wrong_bytes_are_seen(emulated, benchmark: ModuleType, tmp_path: Path) -> None:
    arrays = benchmark.small(3)
    name = next(iter(arrays))
    loaded = {key: cumem.array(array) for key, array in arrays.items()}
    benchmark.check(loaded, arrays)
    arrays[name] = arrays[name].copy()
    arrays[name].view("u1")[-1] ^= 1
    with pytest.raises(AssertionError, match="wrong bytes"):
        benchmark.check(loaded, arrays)
    with pytest.raises(AssertionError, match="other names"):
        benchmark.check(loaded, {})
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"123")
    two.write_bytes(b"123")
    assert benchmark.same_files(one, two)
    two.write_bytes(b"124")
    assert not benchmark.same_files(one, two)
    two.write_bytes(b"1234")
    assert not benchmark.same_files(one, two)


def test_wrong_tensors_are_seen(benchmark: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    nan = torch.tensor([float("nan")])
    benchmark.compare(torch, {"w": nan}, {"w": nan.clone()})
    for other in (nan.double(), nan[None], -nan, torch.tensor([1.0])):
        with pytest.raises(AssertionError):
            benchmark.compare(torch, {"w": nan}, {"w": other})
    with pytest.raises(AssertionError):
        benchmark.compare(torch, {"w": nan}, {"v": nan})
    assert np.isnan(nan.item())
