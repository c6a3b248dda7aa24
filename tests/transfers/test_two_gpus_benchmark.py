# SPDX-License-Identifier: Apache-2.0
"""The benchmark of two GPUs runs on two emulated devices, and needs two."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support import programs

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "two_gpus.py"

#: The benchmark must measure at least these cases.
CASES = {
    "peer, no access",
    "peer, one way",
    "peer, both ways",
    "pinned to both",
    "array to both",
    "halves of an array to both",
    "halves from both",
}


def run(devices: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark briefly on this number of emulated devices."""
    return programs.run(
        *(str(SCRIPT), "--quick", *arguments),
        CUMEM_EMULATED_DEVICES=str(devices),
        CUMEM_EMULATED_DELAY_US="0",
    )


def test_benchmark_of_two_devices_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    done = run(2, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["emulated"] is True
    assert results["missing"] == dict.fromkeys(("torch", "cupy"), "needs a GPU")
    assert {case["key"] for case in results["cases"]} >= CASES
    assert all(case["seconds"]["cumem"] > 0 for case in results["cases"])
    assert not any(case["errors"] for case in results["cases"])


def test_benchmark_of_two_devices_needs_two() -> None:
    done = run(1)
    assert done.returncode == 2
    assert "needs two GPUs" in done.stderr
