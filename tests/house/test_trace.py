# SPDX-License-Identifier: Apache-2.0
"""Tests of how many files a call passes on its way, in C and in Python.

`make trace` runs benchmarks/trace_calls.py, which builds the extension with tracing and
makes some calls. These tests do so too. They compare the counts with tests/debts.toml, and
check how the program counts by steps that are written by hand.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from support import structure

PROGRAM = structure.ROOT / "benchmarks" / "trace_calls.py"

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.timeout(1200),  # it may build the whole extension
    pytest.mark.skipif(
        not (structure.ROOT / "setup.py").is_file(),
        reason="the sources are not beside the tests",
    ),
    pytest.mark.skipif(
        "libasan" in os.environ.get("LD_PRELOAD", ""),
        reason="under a sanitizer the compiler, too, would run with it",
    ),
]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Import benchmarks/trace_calls.py."""
    spec = importlib.util.spec_from_file_location("trace_calls", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, Any]:
    """Run the program, and return what it finds for each call.

    The large copy has 64 MiB here. It passes the same files as one of 1 GiB.
    """
    for tool in ("gcc", "addr2line"):
        if shutil.which(tool) is None:
            pytest.skip(f"this machine does not have {tool}")
    # A build takes long but does not hang, so tracebacks would only confuse.
    faulthandler.cancel_dump_traceback_later()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    command = [sys.executable, str(PROGRAM), "--nbytes", str(64 << 20), "--json", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if "a file of CUDA is missing" in done.stderr:
        pytest.skip("there are no headers of CUDA: run `make build/cuda12/.stamp`")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found["calls"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", structure.TRACED)
def test_calls_pass_the_files_that_their_debt_says(calls, name: str) -> None:
    debts = structure.read_debts(structure.DEBTS.read_text(encoding="utf-8"))
    found = structure.traced(calls)[name]
    by = "--lower --trace FILE` after `make trace TRACE_ARGS='--json FILE'"
    said = structure.judge(name, found, debts[name], by)
    assert said is None, said


def test_long_ways_pass_the_files_that_the_page_gives_reasons_for(calls) -> None:
    page = (structure.ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    large, batch = page.split("### Why each file")[1].split("A batch of `prefetch()`")
    reasons = [set(re.findall(r"`([\w/.]+)`", part)) for part in (large, batch)]
    assert set(calls["numpy_to_device_large"]["moves_into"]) <= reasons[0]
    assert set(calls["prefetch"]["moves_into"]) <= reasons[0] | reasons[1]


def test_trace_has_every_call_with_its_first_function_and_files(calls, program) -> None:
    """The counts of each call agree with each other and with what the calls must reach."""
    assert list(calls) == list(program.CALLS)
    first = calls["numpy_to_device_256"]["in_order"][0]
    assert first.startswith("python/copy/copy_functions: ")
    for name, call in calls.items():
        assert call["rooms"] == len(call["moves_into"]) == min(call["rooms_of_runs"])
        assert call["functions"] >= call["rooms"] > 1, name
        assert call["moves"] >= call["rooms"] - 1, name
        assert len(call["in_python"]) == call["python_functions"]
    # Files of base/ are counted, and those of the emulated device are counted apart.
    assert "base/status" in calls["fill"]["moves_into"]
    assert calls["fill"]["threads"] > 1
    assert calls["fill"]["emulated"]["functions"] > 10
    assert not any(
        r.startswith("runtime/emulated") for r in calls["fill"]["moves_into"]
    )
    # An allocation that a pool serves from its cache asks no driver. Threads of the
    # emulated device may still work for the call before. Their rows begin with the number
    # of the thread, so the condition below passes over them.
    asked = {
        name
        for name, call in calls.items()
        if any(row.startswith("runtime/emulated/") for row in call["in_order"])
    }
    assert "fill" in asked
    assert "empty_pinned" not in asked
    assert any(
        "cumem/transfers/loading.py" in each for each in calls["prefetch"]["in_python"]
    )


def test_tally_counts_files_moves_and_functions_once(program) -> None:
    """The steps are of three threads. A step that is emulated is counted apart."""
    step = program.Step
    steps = [
        step(1, "python/copy", "copy", "", False),
        step(1, "base/status", "is_ok", "python/copy", False),
        step(1, "base/status", "is_ok", "python/copy", False),
        step(1, "cumem/a.py", "f", "python/copy", False),
        step(1, "cumem/a.py", "g", "cumem/a.py", False),
        step(1, "runtime/emulated/copy", "submit", "python/copy", True),
        step(5, "base/list", "push", "", True),
        step(7, "engine", "watch", "", False),
    ]
    found = program.tally(steps)
    assert (found["rooms"], found["rooms_of_the_caller"], found["threads"]) == (4, 3, 3)
    assert (found["moves"], found["functions"], found["function_calls"]) == (3, 5, 6)
    assert found["in_python"] == ["cumem/a.py: f", "cumem/a.py: g"]
    assert found["emulated"] == {"rooms": 2, "functions": 2, "function_calls": 2}
    assert found["moves_into"] == {
        "base/status": 2,
        "cumem/a.py": 1,
        "engine": 0,
        "python/copy": 0,
    }
    assert found["in_order"] == [
        "python/copy: copy",
        "base/status: is_ok x2",
        "cumem/a.py: f, g",
        "runtime/emulated/copy: submit",
        "[thread 1] base/list: push",
        "[thread 2] engine: watch",
    ]
