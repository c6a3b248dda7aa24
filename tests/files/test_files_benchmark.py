# SPDX-License-Identifier: Apache-2.0
"""The benchmark of files runs on the emulated device, and verifies what it copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import programs

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "files.py"


def test_benchmark_of_files_runs_and_says_that_it_is_emulated(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = programs.run(
        *(str(SCRIPT), "--quick", "--nbytes", "8MiB"),
        *("--dir", str(tmp_path), "--json", str(path)),
        CUMEM_EMULATED_DELAY_US="0",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["emulated"] is True
    assert results["missing"] == {"kvikio": "needs a GPU", "torch": "needs a GPU"}
    cases = {case["key"]: case for case in results["cases"]}
    assert len(cases) == 12
    for case in cases.values():
        assert case["seconds"]["cumem"] > 0
        assert not [name for name in case["errors"] if name.startswith("cumem")]
    assert list(tmp_path.iterdir()) == [path]
