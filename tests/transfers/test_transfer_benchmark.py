# SPDX-License-Identifier: Apache-2.0
"""The benchmark of transfers runs on the emulated device, and notices wrong bytes.

Each test starts the script with short settings, or calls its functions, and reads the
results.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from support import programs

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "transfer.py"


@pytest.fixture(scope="module")
def transfer() -> ModuleType:
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("transfer_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_benchmark_of_transfers_runs_and_says_that_it_is_emulated(
    transfer: ModuleType,
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    done = programs.run(
        *(str(SCRIPT), "--quick", "--json", str(path)), CUMEM_EMULATED_DELAY_US="0"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["emulated"] is True
    assert results["missing"] == dict.fromkeys(transfer.PEERS, "needs a GPU")
    cases = {
        (case["key"], case["direction"], case["nbytes"]): case
        for case in results["cases"]
    }
    assert ("contiguous", "up", 256) in cases
    assert ("contiguous", "down", 4 << 20) in cases
    assert ("to a new array", "down", 4 << 20) in cases
    assert ("transposed", "up", 1448 * 1448 * 4) in cases
    assert ("pixels to planes", "up", 2 * 1024 * 1024 * 3) in cases
    assert {d for key, d, _ in cases if key.endswith(" arrays")} == {"up", "down"}
    assert all(
        case["seconds"]["cumem"] > 0 and not case["errors"] for case in cases.values()
    )


def test_benchmark_of_transfers_notices_wrong_bytes(
    transfer: ModuleType, emulated
) -> None:
    bench = transfer.Bench.__new__(transfer.Bench)
    wanted = np.arange(10, dtype="u4")
    other = transfer.cumem.array(wanted[::-1], kind="device")
    with pytest.raises(AssertionError, match="wrong bytes"):
        bench.check(wanted, other)


class Tensor:
    """A tensor like PyTorch's on the CPU: it has DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_benchmark_of_transfers_copies_tensors_both_ways(
    transfer: ModuleType, emulated
) -> None:
    bench = transfer.Bench.__new__(transfer.Bench)
    bench.peers = {transfer.TENSORS: SimpleNamespace(from_numpy=Tensor)}
    host, back = np.arange(100, dtype="u1"), np.zeros(100, "u1")
    device = transfer.cumem.empty_device(100, "u1")
    bench.up_calls(device, host)[transfer.TENSORS]()()
    bench.check(host, device)
    bench.down_calls(back, device)[transfer.TENSORS]()()
    bench.same(host, back)


def test_benchmark_of_many_copies_runs_and_verifies(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    script = str(SCRIPT.with_name("many.py"))
    done = programs.run(
        *(script, "--quick", "--json", str(path)), CUMEM_EMULATED_DELAY_US="0"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert set(results["missing"]) == {"loop", "batch", "torch", "cupy"}
    routes = {case["key"]: case["route"] for case in results["cases"]}
    assert routes == {"pinned": "rows", "numpy": "staged-table"}
    assert all(case["seconds"]["cumem"] > 0 for case in results["cases"])


def test_benchmark_of_pipelines_runs_and_verifies(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    script = str(SCRIPT.with_name("pipelines.py"))
    done = programs.run(
        *(script, "--quick", "--folder", str(tmp_path), "--json", str(path)),
        CUMEM_EMULATED_DELAY_US="0",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    results = json.loads(path.read_text(encoding="utf-8"))
    cases = {case["key"]: case for case in results["cases"]}
    assert len(cases) == 8 + 7
    seconds = cases["numpy, out 1/2, work 0.9 of in"]["seconds"]
    assert set(seconds) == {"in", "work", "out", "both", "all"}
    assert cases["cumem.pipeline"]["lines"] == 3
    assert cases["CuPy, naive"]["error"] == "not installed"
    stages = [span["stage"] for span in results["timeline"]]
    assert {each: stages.count(each) for each in stages} == dict.fromkeys(
        ("in", "work", "out"), 16
    )
    assert list(tmp_path.iterdir()) == [path]
