# SPDX-License-Identifier: Apache-2.0
"""The stubs say what the extension has, and every public name explains itself."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from support.rules import check_none

import cumem
from cumem import _core
from cumem.kinds import KINDS

TYPES = [
    value
    for name in dir(_core)
    if isinstance(value := getattr(_core, name), type) and not name.startswith("_")
] + [cumem.Device, cumem.Pool, cumem.Registration]
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


def test_kinds_in_the_stubs_are_those_of_the_extension() -> None:
    tree = ast.parse(Path("cumem/_core.pyi").read_text())
    (literal,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_Kind"
    )
    assert isinstance(literal, ast.Subscript)
    assert ast.literal_eval(literal.slice) == tuple(KINDS)


def test_functions_have_a_signature_and_a_docstring() -> None:
    wrong = []
    for function in FUNCTIONS:
        try:
            inspect.signature(function)
        except ValueError:
            wrong.append(f"{function.__name__}: no signature")
        if len(function.__doc__ or "") <= 40:
            wrong.append(f"{function.__name__}: no docstring")
    assert len(FUNCTIONS) > 10
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


def test_docstrings_of_the_stub_are_those_of_the_extension() -> None:
    """The build puts them there: what a type or a table leaves out is seen here."""
    stub = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())
    wrong, seen = [], 0
    for node in stub.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        members = node.body if isinstance(node, ast.ClassDef) else []
        found = getattr(_core, node.name, None)
        pairs = [(node, found)]
        pairs += [
            (each, inspect.getattr_static(found, each.name, None))
            for each in members
            if isinstance(each, ast.FunctionDef)
        ]
        for each, thing in pairs:
            text = ast.get_docstring(each)
            seen += text is not None
            if text is not None and text != inspect.cleandoc(thing.__doc__ or ""):
                wrong.append(f"{node.name}: {each.name}")
    assert seen > 110
    check_none(wrong)


def test_every_public_name_exists() -> None:
    for name in cumem.__all__:
        assert hasattr(cumem, name)
