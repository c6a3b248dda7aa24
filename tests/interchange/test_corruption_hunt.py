# SPDX-License-Identifier: Apache-2.0
"""A corruption hunt must find faults, as short runs with stand-ins for libraries show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import programs

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).parents[1] / "isolated" / "corruption_hunt.py"
BRIEFLY = ("--seconds", "0", "--nbytes", "65536")

#: This program runs a script for which cumem hands out the same memory again and
#: again.
BROKEN = """
import runpy, sys
import support.core  # The hunt needs its hooks, which must be there before cumem.
import cumem
true_empty, spare = cumem.empty, {}
def empty(nbytes, dtype, kind):
    if kind not in spare:
        spare[kind] = true_empty(nbytes, dtype, kind)
    return spare[kind]
cumem.empty = empty
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(path: Path, *command: str) -> tuple[int, dict[str, Any], str]:
    """Run a command briefly, and return its exit code, its results and its output."""
    done = programs.run(*command, *BRIEFLY, "--json", str(path))
    said = done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text(encoding="utf-8")), said


def test_hunt_in_short_finds_the_stand_in_and_nothing_of_ours(tmp_path: Path) -> None:
    code, result, said = run(tmp_path / "result.json", str(SCRIPT))
    assert code == 0, said
    assert said.startswith("EMULATED DEVICE")
    assert result["emulated"] is True
    assert result["failures"] == []
    assert {case["role"] for case in result["cases"]} == {"peer", "cumem", "documented"}
    cases = [case for case in result["cases"] if "torch" not in case["memory"]]
    if result["libraries"]["torch"] is not None:
        cases = result["cases"]
    assert len(cases) >= 18
    for case in cases:
        assert case["missing"] is None
        assert case["rounds"] == case["late_rounds"] >= 3
        expected = 0 if case["role"] == "cumem" else case["rounds"]
        assert case["corrupted_rounds"] == case["reused_rounds"] == expected, case


@pytest.mark.parametrize("writes", ["reads", "writes"])
def test_hunt_sees_memory_that_is_used_again(tmp_path: Path, writes) -> None:
    path = tmp_path / "result.json"
    code, result, said = run(path, "-c", BROKEN, str(SCRIPT), "--only", "cumem, pinned")
    assert code == 1, said
    assert any(f"{writes} late: 3 of 3 rounds" in each for each in result["failures"])


def test_hunt_without_a_pattern_proves_nothing(tmp_path: Path) -> None:
    code, result, _ = run(tmp_path / "result.json", str(SCRIPT), "--only", "no such")
    assert (code, result["failures"]) == (1, ["no such pattern"])
