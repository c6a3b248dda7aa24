# SPDX-License-Identifier: Apache-2.0
"""Chooses which build of the core a process gets.

There are two builds, which are linked from the same objects. The wheel's has no hooks for
tests. The other one is also linked with csrc/python/module/testing.c and is in tests/core/,
where editable installs and CUMEM_TESTING=1 put it (setup.py). If a program imports this
module or `support.testing` before cumem, the build with hooks takes the place of
`cumem._core`, so that a process never has both. A program that needs no hook imports
neither module, and runs on the wheel's core.

With CUMEM_TESTS_CORE=package the package keeps its own core. This is for builds whose own
core has the hooks (`make asan`, `make debug`). It is also for running the tests on the
wheel's core. Each test that calls a hook is then skipped, and the others run.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

CORE = "cumem._core"
FOLDER = Path(__file__).resolve().parents[1] / "core"


class _Finder:
    """An import finder that finds the core for tests in the place of cumem's own."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != CORE:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [str(FOLDER)])


def _put_in_place() -> None:
    """Make cumem find the core for tests if it was built for this Python."""
    if os.environ.get("CUMEM_TESTS_CORE") == "package":
        return
    if _Finder.find_spec(CORE) is None:
        return
    if CORE not in sys.modules:
        sys.meta_path.insert(0, _Finder)
    elif not hasattr(sys.modules[CORE], "_test_is_open"):
        raise ImportError("import support.testing before cumem, which has no hooks now")


_put_in_place()
