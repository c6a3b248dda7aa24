# SPDX-License-Identifier: Apache-2.0
"""Random rows by index are NumPy's, in a short run of tests/isolated/rows_random.py."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs
from torture.random_rows import NO_ROW, NOTHING, TWICE, Case, draw

# These tests run programs of their own, which are the same for each Python.
pytestmark = [pytest.mark.any_python, pytest.mark.hooks]

SCRIPT = str(Path(__file__).parents[1] / "isolated" / "rows_random.py")
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]

#: A program that runs a script whose copies of rows change the last byte of their target.
BROKEN = """
import runpy, sys
from support import core
import cumem
true_copy = cumem.copy_rows
def copy_rows(dst, src, dst_rows=None, src_rows=None, **how):
    true_copy(dst, src, dst_rows, src_rows, **how)
    first = dst[0] if isinstance(dst, list) else dst
    if first.dtype == "u1" and first.nbytes > 100:
        cumem.copy(first[:1], cumem.asnumpy(first[:1]) ^ 1)
cumem.copy_rows = copy_rows
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(
    backend: str, path: Path, *arguments: str, code: str = ""
) -> tuple[int, Any, str]:
    command = ["-c", code, SCRIPT] if code else [SCRIPT]
    done = programs.run(
        *command, *arguments, "--json", str(path), CUMEM_BACKEND=backend
    )
    said = done.stdout + done.stderr
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return done.returncode, found, said


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_hundred_random_cases_equal_numpys(backend: str, tmp_path: Path) -> None:
    arguments = ("--cases", "600", "--seed", "35", "--processes", "2")
    code, result, said = run(backend, tmp_path / "result.json", *arguments)
    assert code == 0, said
    assert result["wrong"] == []
    covered = result["covered"]
    assert result["cases"] == sum(
        count for name, count in covered.items() if name.startswith("wrong: ")
    )
    for name in ("route rows", "route host", "one memory", "numbers late"):
        assert covered[name] > 0
    for way in ("blocking", "stream", "background", "take", "plan", "layers"):
        assert covered[f"way {way}"] > 0
    for wrong in (NO_ROW, TWICE):
        assert covered[f"wrong: {wrong}"] > 0
    assert said.splitlines()[-1].endswith(" 0 wrong")


def test_wrong_byte_is_seen_and_its_case_can_be_run_again(tmp_path: Path) -> None:
    arguments = ("--cases", "60", "--processes", "1")
    code, result, said = run(
        "emulated", tmp_path / "result.json", *arguments, code=BROKEN
    )
    assert code == 1, said
    command, *reason = result["wrong"][0].splitlines()
    assert "bytes of" in "".join(reason)
    again = command.partition("rows_random.py ")[2].split()
    again_code, again_result, again_said = run(
        "emulated", tmp_path / "again.json", *again, code=BROKEN
    )
    assert again_code == 1
    # The case has the same memory, call and numbers, and as many bytes are wrong.
    assert again_result["wrong"] == result["wrong"][:1]
    assert command in again_said
    assert run("emulated", tmp_path / "right.json", *again)[0] == 0


# -- what the cases are ------------------------------------------------------------------


def drawn(count: int, spoiled: float = 0.0) -> list[Case]:
    rng = random.Random(1)
    cases = (draw(rng, 1 << 16, 1 << 16, spoiled) for _ in range(count))
    return [case for case in cases if case is not None]


def test_random_cases_have_all_that_they_should_have() -> None:
    cases = drawn(1000)
    assert len(cases) > 900
    lengths = [case.dtype.itemsize * int(np.prod(case.row)) for case in cases]
    assert min(lengths) == 1
    assert max(lengths) == 4096
    assert {len(case.to.views) for case in cases} == {1, 2, 4}
    assert any(case.count == 0 for case in cases)
    for name in ("dst_rows", "src_rows"):
        given = [getattr(case, name) for case in cases]
        assert any(rows is None for rows in given)
        assert any(rows and min(rows) < 0 for rows in given)
    assert any(case.src_rows and len({*case.src_rows}) < case.count for case in cases)
    memory = np.zeros(1 << 16, "u1")
    strides = {
        (case.targets(memory)[0].strides, case.sources(memory)[0].strides)
        for case in cases
    }
    assert len(strides) > 300


def test_targets_of_a_random_case_share_no_byte() -> None:
    for case in drawn(200):
        memory = np.zeros(1 << 16, "u1")
        layers = case.targets(memory)
        for layer in layers:
            ones = b"\1" * layer.dtype.itemsize
            layer[...] = np.frombuffer(ones, layer.dtype)
        assert np.count_nonzero(memory) == sum(layer.nbytes for layer in layers)


def test_rows_of_a_random_case_are_written_once_in_each_layer() -> None:
    for case in drawn(500):
        if case.dst_rows is not None:
            for count in case.to.counts:
                rows = [n % count for n in case.dst_rows]
                assert len(rows) == len({*rows})


def test_spoiled_case_has_one_wrong_number() -> None:
    cases = [case for case in drawn(500, 1.0) if case.wrong != NOTHING]
    assert {case.wrong for case in cases} == {NO_ROW, TWICE}
    for case in cases:
        numbers = getattr(case, case.wrong_side)
        counts = (case.to if case.wrong_side == "dst_rows" else case.of).counts
        outside = [n for n in numbers if not -min(counts) <= n < max(counts)]
        if case.wrong == NO_ROW:
            assert len(outside) == 1
        else:
            assert len(numbers) - len({*numbers}) == 1
