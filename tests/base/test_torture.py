# SPDX-License-Identifier: Apache-2.0
"""A short run of the torture, and tests that it notices wrong bytes and lost copies.

The torture, `tests/isolated/torture.py`, lets threads make random calls of the whole
package and compares every byte. The later tests are about copies whose handles nobody
keeps: such a copy may fail to arrive, but only if a failure was reported in the same round.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs
from torture.boxes import Box
from torture.settings import WrongError
from torture.worker import Worker
from torture.world import World

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).parents[1] / "isolated" / "torture.py"

#: While this program runs a script, it flips a bit in the target of each copy of more than
#: 100 bytes into a NumPy array.
BROKEN = """
import runpy, sys
from support import core
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
    """Run the torture, and return its exit code, its results and its output."""
    done = programs.run(*command, "--threads", "4", "--json", str(path))
    said = done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text(encoding="utf-8")), said


@pytest.mark.hooks
def test_torture_in_short_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, result, said = run(path, str(SCRIPT), "--seconds", "5")
    assert code == 0, said
    assert result["failures"] == []
    assert result["operation_count"] > 0
    assert result["verified_nbytes"] > 0


@pytest.mark.hooks
def test_torture_sees_wrong_bytes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, result, said = run(path, "-c", BROKEN, str(SCRIPT), "--seconds", "60")
    assert code == 1, said
    assert "bytes are wrong" in "".join(result["failures"])


# -- copies whose handles nobody keeps ---------------------------------------------------


@pytest.fixture
def worker(emulated, tmp_path: Path) -> Worker:
    """Return a worker that is not started, so that a test can call its methods."""
    options = argparse.Namespace(seed=1, largest=4096, faults=False)
    world = World(options, tmp_path)
    found = Worker(world, 0, 0)
    world.workers = [found]
    return found


def dropped(worker: Worker, found: np.ndarray, unreported: int) -> list[str]:
    """Return what a round reports if a copy of ones over zeros left these bytes."""
    zeros, ones = np.zeros(found.size, "u1"), np.ones(found.size, "u1")
    world = worker.world
    target = Box(found, "numpy", 0, zeros)
    assert worker.arrived(found, target, ones, "dropped") == (found == 1).all()
    world.unreported += ["no memory"] * unreported
    world.balance()
    return world.failures


#: The bytes of a target after the first half of a copy of ones over zeros has arrived.
PART = np.repeat(np.array([1, 0], "u1"), 50)


def test_copy_that_did_not_arrive_is_excused_by_a_failure_that_was_reported(
    worker,
) -> None:
    assert dropped(worker, PART, unreported=1) == []


def test_copy_that_did_not_arrive_fails_the_round_where_none_was_reported(
    worker,
) -> None:
    (said,) = dropped(worker, PART, unreported=0)
    assert said.startswith("1 copies did not arrive, but 0 failures were reported")


def test_failure_that_was_reported_excuses_one_copy(worker) -> None:
    world = worker.world
    world.unwritten.append("another")
    (said,) = dropped(worker, PART, unreported=1)
    assert said.startswith("2 copies did not arrive, but 1 failures were reported")


def test_failure_of_one_round_excuses_no_copy_of_the_next(worker) -> None:
    assert dropped(worker, np.ones(100, "u1"), unreported=1) == []
    assert len(dropped(worker, PART, unreported=0)) == 1


def test_byte_that_no_copy_wrote_is_wrong_whatever_was_reported(worker) -> None:
    wrong = PART.copy()
    wrong[70] = 2
    with pytest.raises(WrongError, match="1 bytes are wrong, from 70 to 70"):
        dropped(worker, wrong, unreported=1)
