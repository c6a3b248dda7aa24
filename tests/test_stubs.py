# SPDX-License-Identifier: Apache-2.0
"""The stubs say what the extension has, and every public name explains itself."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import cumem
from cumem import _core

TYPES = [
    value
    for name in dir(_core)
    if isinstance(value := getattr(_core, name), type) and not name.startswith("_")
]
FUNCTIONS = [
    value
    for name in dir(_core)
    if inspect.isbuiltin(value := getattr(_core, name)) and not name.startswith("_")
]


def test_stubs_match_the_extension() -> None:
    pytest.importorskip("mypy")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy.stubtest",
            "cumem._core",
            "--ignore-disjoint-bases",
            "--allowlist",
            "tests/stubtest-allow.txt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_function_has_signature_and_docstring(function) -> None:
    inspect.signature(function)
    assert function.__doc__
    assert len(function.__doc__) > 40


@pytest.mark.parametrize("cls", TYPES, ids=lambda c: c.__name__)
def test_type_and_its_members_have_docstrings(cls) -> None:
    assert cls.__doc__
    for name, member in vars(cls).items():
        if not name.startswith("_") and member is not None:  # defaults of CudaError
            assert inspect.getdoc(member), f"{cls.__name__}.{name}"


def test_every_public_name_exists() -> None:
    for name in cumem.__all__:
        assert hasattr(cumem, name)
