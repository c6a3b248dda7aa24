# SPDX-License-Identifier: Apache-2.0
"""The random torture of the whole package, for a few seconds, and that it sees faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import programs

# What is tested are programs of their own, which no version of Python changes.
pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).parents[1] / "isolated" / "torture.py"

#: Runs a script in which copies into bytes of NumPy's come to lose a bit.
BROKEN = """
import runpy, sys
import cumem, numpy
true_copy = cumem.copy
def copy(dst, src, **how):
    true_copy(dst, src, **how)
    if isinstance(dst, numpy.ndarray) and dst.dtype == "u1" and dst.size > 100:
        dst.flat[99] ^= 1
cumem.copy = copy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(path: Path, *command: str) -> tuple[int, dict[str, Any], str]:
    done = programs.run(*command, "--threads", "4", "--json", str(path))
    said = done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text(encoding="utf-8")), said


def test_torture_in_short_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, result, said = run(path, str(SCRIPT), "--seconds", "5")
    assert code == 0, said
    assert result["failures"] == []
    assert result["operation_count"] > 0
    assert result["verified_nbytes"] > 0


def test_torture_sees_wrong_bytes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, result, said = run(path, "-c", BROKEN, str(SCRIPT), "--seconds", "60")
    assert code == 1, said
    assert "bytes are wrong" in "".join(result["failures"])
