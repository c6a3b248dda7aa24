# SPDX-License-Identifier: Apache-2.0
"""What type checkers say of programs that use cumem: what a constructor gives is known by
its kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import cumem
from cumem.kinds import KINDS

ROOT = Path(__file__).parent.parent

PROGRAM = """
from typing import assert_type

import numpy as np

import cumem

table = cumem.zeros((1024, 1024), "f4", "managed")
assert_type(table, cumem.ManagedBuffer)
table.numpy()[:] = 1
table.prefetch(0)
flags = cumem.zeros(4, "i4", "mapped")
print(flags.device_ptr)
weights = cumem.load_safetensors("m", framework="torch")
weights["x"].cuda()
with cumem.register(np.ones(4)) as pinned:
    pinned.numpy()

assert_type(cumem.zeros(4), cumem.DeviceBuffer)
assert_type(cumem.zeros(4, kind="mapped", device=0), cumem.MappedBuffer)
assert_type(cumem.zeros(4, pool=cumem.Pool("pinned")), cumem.Buffer)
assert_type(cumem.empty(4), cumem.DeviceBuffer)
assert_type(cumem.empty(4, "f4", "pinned"), cumem.PinnedBuffer)
assert_type(cumem.empty(4, kind="managed"), cumem.ManagedBuffer)
assert_type(cumem.full(4, 1.0, kind="pinned"), cumem.PinnedBuffer)
assert_type(cumem.array([1], kind="pinned", casting="unsafe"), cumem.PinnedBuffer)
assert_type(cumem.array([1]), cumem.DeviceBuffer)
assert_type(cumem.asarray(np.zeros(3)), cumem.Buffer)
assert_type(cumem.asarray(np.zeros(3), kind="mapped", copy=True), cumem.MappedBuffer)
assert_type(cumem.ascontiguousarray([1], kind="device"), cumem.DeviceBuffer)
assert_type(cumem.empty_like(np.zeros(3), kind="managed"), cumem.ManagedBuffer)
assert_type(cumem.zeros_like(table), cumem.Buffer)
assert_type(cumem.full_like(table, 1, kind="pinned"), cumem.PinnedBuffer)


def make(kind: cumem.Kind) -> cumem.Buffer:
    return cumem.zeros(3, kind=kind)


async def wait(event: cumem.Event, transfer: cumem.Transfer) -> None:
    transfer.add_done_callback(lambda each: print(each.nbytes))
    await event
    await transfer
"""

CHECKERS = {
    "mypy": ("mypy", "--strict", "--cache-dir", os.devnull),
    "pyright": ("pyright",),
}


@pytest.mark.parametrize("name", CHECKERS)
def test_kind_of_a_constructor_says_what_it_gives(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", *CHECKERS[name], str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_kind_has_the_names_of_all_kinds() -> None:
    assert set(get_args(cumem.Kind)) == set(KINDS)
