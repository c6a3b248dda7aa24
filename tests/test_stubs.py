# SPDX-License-Identifier: Apache-2.0
"""The stubs say what the extension has, and every public name explains itself."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from support.rules import check_none

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


def test_functions_have_a_signature_and_a_docstring() -> None:
    wrong = []
    for function in FUNCTIONS:
        try:
            inspect.signature(function)
        except ValueError:
            wrong.append(f"{function.__name__}: no signature")
        if len(function.__doc__ or "") <= 40:
            wrong.append(f"{function.__name__}: no docstring")
    assert len(FUNCTIONS) > 20
    check_none(wrong)


def test_types_and_their_members_have_docstrings() -> None:
    wrong = [cls.__name__ for cls in TYPES if not cls.__doc__]
    wrong += [
        f"{cls.__name__}.{name}"
        for cls in TYPES
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and member is not None  # defaults of CudaError
        and not inspect.getdoc(member)
    ]
    assert len(TYPES) > 10
    check_none(wrong)


def test_every_public_name_exists() -> None:
    for name in cumem.__all__:
        assert hasattr(cumem, name)
