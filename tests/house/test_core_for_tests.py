# SPDX-License-Identifier: Apache-2.0
"""Tests that only the core for tests has hooks, and that the wheel's core has none."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from support import core, programs

from cumem import _core

# The tests find their core in the same way under every version of Python.
pytestmark = pytest.mark.any_python

STUB = Path(__file__).resolve().parents[2] / "csrc/python/module/testing.pyi"

is_replaced = pytest.mark.skipif(
    Path(_core.__file__).parent != core.FOLDER,
    reason="the package's own core is tested, which may have the hooks itself",
)


@is_replaced
def test_core_of_the_package_has_no_hooks() -> None:
    code = """
from pathlib import Path
import cumem
from cumem import _core
assert Path(_core.__file__).parent == Path(cumem.__file__).parent
print([name for name in dir(_core) if "_test" in name or "address" in name])
"""
    done = programs.run("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@is_replaced
def test_hooks_after_cumem_are_refused_since_there_would_be_two_cores() -> None:
    done = programs.run("-c", "import cumem\nfrom support import testing")
    assert "ImportError: import support.testing before cumem" in done.stderr


@is_replaced
def test_hook_on_the_core_of_the_package_skips_the_test() -> None:
    code = """
import pytest
from support import testing
assert not testing.HAS_HOOKS and not testing.opened()
with pytest.raises(pytest.skip.Exception, match="it needs hooks of the core"):
    testing.live_storages()
"""
    done = programs.run("-c", code, CUMEM_TESTS_CORE="package")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.hooks
@pytest.mark.skipif(not STUB.is_file(), reason="the sources are not beside the tests")
def test_hooks_are_those_of_their_stub() -> None:
    stub = {
        node.name: [argument.arg for argument in node.args.posonlyargs]
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    found = {
        name: list(inspect.signature(getattr(_core, name)).parameters)
        for name in dir(_core)
        if name.startswith("_test_")
    }
    assert found == stub
